"""Lower bounds against their definition, by trying all splits."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowkv.policy.restore import RestoreRequest, Source, Span
from flowkv.sim import lower_bound
from flowkv.sim.restore import GPUS, SHAPES, Modelled, asked
from tests.inside import ConfigError

LLAMA = SHAPES["Llama-3.1-8B"]


class Plain:
    """Costs without overheads: linear loads, quadratic computes."""

    def __init__(self, token_s: float, pair_s: float, byte_s: dict[str, float]) -> None:
        self.token_s, self.pair_s, self.byte_s = token_s, pair_s, byte_s

    def compute_s(self, request: RestoreRequest, layers: int, tokens: Span) -> float:
        pairs = (tokens.stop**2 - tokens.first**2) / 2
        return layers * (tokens.size * self.token_s + pairs * self.pair_s)

    def suffix_s(self, request: RestoreRequest) -> float:
        behind = Span(request.tokens, request.tokens + request.suffix)
        return self.compute_s(request, request.layers, behind)

    def load_s(self, request: RestoreRequest, source: int, cells: int) -> float:
        return (
            cells * request.sources[source].cell_bytes * self.byte_s[request.sources[source].tier]
        )


def ask(tokens: int, suffix: int = 0, **more: object) -> RestoreRequest:
    wanted = {"number": 0, "layers": 3, "sources": (Source("a", "raw", 1.0),), "unit": 1, **more}
    return RestoreRequest(tokens=tokens, suffix=suffix, **wanted)  # type: ignore[arg-type]


@given(
    tokens=st.integers(1, 60),
    suffix=st.integers(0, 20),
    resident=st.integers(0, 30),
    token_s=st.floats(0.01, 10),
    pair_s=st.floats(0, 1),
    byte_s=st.floats(0.01, 10),
)
def test_one_request(
    tokens: int, suffix: int, resident: int, token_s: float, pair_s: float, byte_s: float
) -> None:
    costs = Plain(token_s, pair_s, {"a": byte_s})
    request = ask(tokens, suffix, resident=min(resident, tokens))

    def ends_s(split: int) -> float:
        computed_s = costs.compute_s(request, 3, Span(request.resident, split))
        loaded_s = costs.load_s(request, 0, 3 * (tokens - split))
        return max(computed_s + costs.suffix_s(request), loaded_s)

    best = min(map(ends_s, range(request.resident, tokens + 1)))
    bound = lower_bound(request, costs)
    assert bound <= best * (1 + 1e-9)
    # What lies between whole tokens is at most one of them.
    one_s = 3 * max(byte_s, token_s + tokens * pair_s)
    assert bound >= best - one_s - 1e-9
    assert bound >= costs.suffix_s(request)


def best_makespan(sizes: list[int], costs: Plain) -> float:
    """By trying every split of every request."""
    ends = []
    for splits in product(*(range(size + 1) for size in sizes)):
        computed_s = sum(costs.compute_s(ask(0), 3, Span(0, split)) for split in splits)
        left = sum(size - split for size, split in zip(sizes, splits, strict=True))
        ends.append(max(computed_s, costs.load_s(ask(0), 0, 3 * left)))
    return min(ends)


@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    token_s=st.floats(0.1, 10),
    pair_s=st.floats(0, 1),
    byte_s=st.floats(0.1, 10),
)
def test_makespan(sizes: list[int], token_s: float, pair_s: float, byte_s: float) -> None:
    costs = Plain(token_s, pair_s, {"a": byte_s})
    batch = [ask(size, number=i) for i, size in enumerate(sizes)]
    best, bound = best_makespan(sizes, costs), lower_bound(batch, costs)
    assert bound <= best * (1 + 1e-9)
    one_s = 3 * len(sizes) * max(byte_s, token_s + 12 * pair_s)
    assert bound >= best - one_s - 1e-9


def test_the_closed_form() -> None:
    """Figures derived by hand for one H100 at 40 Gbps, in ms, without a suffix."""
    costs = Modelled(LLAMA, GPUS["H100"], 40).ideal
    derived = {6144: 82, 16384: 230, 30720: 452, 98304: 1648}
    found = {n: lower_bound(asked(LLAMA, n, 0), costs) * 1e3 for n in derived}
    assert found == pytest.approx(derived, rel=0.01)


def test_mean_of_equal_lengths() -> None:
    costs = Modelled(LLAMA, GPUS["A100"], 40).ideal
    batch = [asked(LLAMA, 8192, 0, number=i) for i in range(4)]
    one = lower_bound(batch[0], costs)
    assert lower_bound(batch, costs) == pytest.approx(4 * one, rel=1e-3)
    assert lower_bound(batch, costs, of="mean") == pytest.approx(2.5 * one, rel=1e-3)


def test_mean_of_arrivals_far_apart_is_that_of_each_alone() -> None:
    costs = Modelled(LLAMA, GPUS["A100"], 40).ideal
    batch = [asked(LLAMA, 8192, number=i, arrived_s=9.0 * i) for i in range(4)]
    assert lower_bound(batch, costs, of="mean") == pytest.approx(lower_bound(batch[0], costs))


def test_what_can_be_computed_only_or_loaded_only() -> None:
    costs = Plain(1.0, 0.0, {"a": 2.0})
    assert lower_bound(ask(10, sources=()), costs) == 30.0
    assert lower_bound(ask(10, computable=False), costs) == 60.0
    assert lower_bound(ask(10, resident=10), costs) == 0.0
    assert lower_bound([], costs) == 0.0


def test_two_tiers_load_together() -> None:
    costs = Plain(1e9, 0.0, {"a": 1.0, "b": 0.5})
    both = ask(30, sources=(Source("a", "raw", 1.0), Source("b", "raw", 1.0)))
    assert lower_bound(both, costs) == pytest.approx(90 / 3)


def test_requests_on_tiers_of_their_own_do_not_wait_for_each_other() -> None:
    costs = Plain(1e9, 0.0, {"a": 1.0, "b": 1.0})
    first, second = ask(30), ask(20, number=1, sources=(Source("b", "raw", 1.0),))
    assert lower_bound([first, second], costs) == pytest.approx(90)


def test_the_best_codec_counts() -> None:
    costs = Plain(1e9, 0.0, {"a": 1.0})
    request = ask(30, sources=(Source("a", "raw", 1.0), Source("a", "kv8", 0.5)))
    assert lower_bound(request, costs) == pytest.approx(45)


def test_stages_share_the_work_but_for_what_crosses_their_boundaries() -> None:
    costs = Modelled(LLAMA, GPUS["H100"], 40).ideal
    request = asked(LLAMA, 16384, 0)
    one = lower_bound(request, costs)
    assert lower_bound(request, costs, stages=4) == pytest.approx(one / 4)
    assert one / 4 < lower_bound(request, costs, stages=4, boundary_s=1e-6) < one / 3


def test_wrong_questions() -> None:
    costs = Plain(1.0, 0.0, {"a": 1.0})
    with pytest.raises(ConfigError):
        lower_bound(ask(5), costs, stages=0)
    with pytest.raises(ConfigError):
        lower_bound(ask(5), costs, of="best")  # type: ignore[arg-type]
