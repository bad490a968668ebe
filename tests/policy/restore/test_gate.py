"""Load or recompute."""

from __future__ import annotations

import pytest

from flowkv.policy.restore import LoadGate


def test_the_gate_weighs_measured_rates() -> None:
    gate = LoadGate()
    assert gate.worth({"disk": 1 << 30}, 1)
    gate.computed(100, 1.0)
    assert gate.worth({"disk": 1 << 30}, 1), "the first load measures"
    gate.loaded("disk", 1000, 1.0)
    assert gate.load_s({"disk": 500, "host": 500}) == pytest.approx(0.5)
    assert gate.worth({"disk": 1000}, 101) and not gate.worth({"disk": 1000}, 50)
    gate.loaded("disk", 0, 9.0)
    gate.computed(0, 9.0)
    assert gate.worth({"disk": 1000}, 101)


def test_refusals_are_not_for_ever() -> None:
    gate = LoadGate()
    gate.computed(1000, 1.0)
    gate.loaded("disk", 1000, 100.0)
    refused = 0
    while not gate.worth({"disk": 1000}, 1000):
        refused += 1
    assert 50 < refused < 150, "a hundred times too slow is tried about once in ninety requests"
    gate.loaded("disk", 1000, 0.1)
    gate.loaded("disk", 1000, 0.1)
    assert gate.worth({"disk": 1000}, 1000)


# ---- what is stored


def long(most: int) -> int:
    return most


def slow(latency_s: float, bytes_per_s: float, s_per_token: float = 1e-3) -> LoadGate:
    """A gate that has measured a disk so."""
    gate = LoadGate()
    gate.computed(1000, 1000 * s_per_token)
    for n in range(1, 21):
        gate.loaded("disk", 1000 * n, latency_s + 1000 * n / bytes_per_s)
    return gate


def test_what_can_never_pay_is_not_stored() -> None:
    # 64 tokens take 64 ms to compute; a page of 1000 bytes may take 8 times that.
    for bytes_per_s, pays in ((2000, True), (1900, False)):
        gate = slow(0.0, bytes_per_s)
        assert gate.pays_to_store("disk", 1000, 64, long) == pays
        assert gate.pays_to_store("disk", 1000, 64, lambda _: 1) == pays
        assert gate.pays_to_store("host", 1000, 64, long), "it was never measured"


def test_on_a_tier_that_is_slow_to_begin_only_long_prompts_are_stored() -> None:
    gate = slow(5.0, 1e6)
    # 5 s are what 9.8 pages may take; the longer the prompt, the less they weigh.
    assert [gate.pays_to_store("disk", 1000, 64, lambda _, n=n: n) for n in (1, 9, 10, 256)] == [
        *(False, False, True, True)
    ]
    asked: list[int] = []
    assert gate.pays_to_store("disk", 1000, 640, asked.append) and not asked, "one page pays"


@pytest.mark.parametrize("loads", [0, 7, 8])
def test_little_was_measured_everything_pays(loads: int) -> None:
    gate = LoadGate()
    for _ in range(loads):
        gate.loaded("disk", 1000, 1000.0)
    assert gate.pays_to_store("disk", 1000, 64, long), "computing was never measured"
    gate.computed(1000, 1.0)
    assert gate.pays_to_store("disk", 1000, 64, long) == (loads < 8)


def test_refused_pages_are_tried_again_and_a_measurement_begins_anew() -> None:
    gate = slow(0.0, 500.0)  # four times too slow
    before, refused = gate.load_s({"disk": 1000}), 0
    while not gate.pays_to_store("disk", 1000, 64, long):
        refused += 1
    assert 1300 < refused < 1450 and gate.load_s({"disk": 1000}) == before
    assert gate.pays_to_store("disk", 1000, 64, long)
    gate.loaded("disk", 1000, 2.0)
    assert not gate.pays_to_store("disk", 1000, 64, long)


def test_what_a_token_takes_grows_with_its_position() -> None:
    gate = LoadGate()
    assert gate.token_s(0) == 0.0
    gate.computed(512, 0.512)
    assert gate.token_s(0) == gate.token_s(10_000) == pytest.approx(1e-3), (
        "one sample tells no more"
    )
    for number in range(40):  # chunks anywhere in prompts, and once whole ones
        size, before = 256 + 64 * (number % 5), 1024 * (number % 9)
        middle = before + size / 2
        gate.computed(size, size * (1e-3 + 2e-7 * middle), middle if before else None)
    for position in (100, 5_000, 50_000):
        assert gate.token_s(position) == pytest.approx(1e-3 + 2e-7 * position, rel=0.05)
