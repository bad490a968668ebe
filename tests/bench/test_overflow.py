"""What is simulated of contexts longer than a device keeps to its bound."""

from __future__ import annotations

import pytest

from bench.overflow import LINKS, STRIPE_S, WEIGHT_BYTES, simulated_step
from tests.inside import HARDWARE, MODELS

H100 = HARDWARE["h100"]


@pytest.mark.parametrize("model", sorted(WEIGHT_BYTES))
@pytest.mark.parametrize("codec", ["raw", "kv8", "kv4c"])
def test_a_step_takes_no_less_than_its_bound_and_little_more(model: str, codec: str) -> None:
    for tokens in (1 << 17, 1 << 19, 1 << 20):
        before_s = 0.0
        for rate in sorted(LINKS.values(), reverse=True):
            given = MODELS[model], H100, WEIGHT_BYTES[model], tokens, codec, rate
            free, busy = (simulated_step(*given, each_s) for each_s in STRIPE_S)
            assert free[1] == busy[1]
            assert (1 - 1e-9) * free[1] <= free[0] <= 1.3 * free[1]
            assert free[0] <= busy[0]
            assert before_s <= free[0], "a slower link is slower"
            before_s = free[0]


def test_what_fits_is_computed_and_nothing_else() -> None:
    given = MODELS["8b"], H100, 2.0, 1 << 17, "kv8"
    fast, slow = (simulated_step(*given, rate, 50e-6) for rate in (55e9, 1.0))
    assert fast == slow
    assert fast[0] == pytest.approx(fast[1])
