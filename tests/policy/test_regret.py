"""The regret guard: what it adds up, when it stops, how it tries again."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tests.inside import ConfigError, Rates, RegretGuard

S, MIB = 1_000_000_000, 1 << 20


def guard(**options: object) -> RegretGuard:
    return RegretGuard(**{"trial_bytes": 100, "rest_s": 10.0, "interference": 0.1} | options)


def test_what_is_in_the_way_may_not_exceed_what_is_saved_by_more_than_its_budget() -> None:
    one = guard()
    one.demanded(0, 1000, in_the_way_bytes=200)
    assert one.allows(0), "a tenth of 1000, and a trial of 100"
    one.used(0, 50)
    one.displaced(0, 50)
    assert one.allows(0)
    one.displaced(0, 1)
    assert not one.allows(0) and one.rests == 1 and one.in_the_way_bytes == 200


def test_what_is_wasted_may_be_a_share_of_what_was_demanded_and_saved() -> None:
    one = guard(waste=0.5)
    one.demanded(0, 100)
    one.used(0, 100)
    one.wasted(0, 200)
    assert one.allows(0)
    one.wasted(0, 1)
    assert not one.allows(0) and (one.saved_bytes, one.wasted_bytes) == (100, 201)


def test_rests_grow_until_it_has_proved_itself() -> None:
    one, now = guard(longest_rest_s=25.0), 0
    for rest_s in (10, 20, 25, 25):
        one.wasted(now, 101)
        now += rest_s * S
        assert not one.allows(now - 1) and one.allows(now)
    one.used(now, 500)
    one.wasted(now, 1)
    one.wasted(now, 500)
    assert not one.allows(now)
    assert one.allows(now + 10 * S), "the first length again"


def test_what_is_long_ago_counts_little() -> None:
    one = guard(memory_s=10.0)
    for turn in range(50):
        one.wasted(turn * 10 * S, 45)  # their halves, quarters... add up to 90
    assert one.allows(500 * S)
    one.wasted(500 * S, 60)
    assert not one.allows(500 * S)


def test_time_that_goes_back_changes_nothing() -> None:
    one = guard()
    one.wasted(10 * S, 50)
    one.wasted(0, 50)
    assert one.allows(0)
    one.wasted(0, 10)
    assert not one.allows(0)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 300)), min_size=15, max_size=60))
def test_a_balance_never_passes_its_budget_by_more_than_one_event(
    events: list[tuple[int, int]],
) -> None:
    """In one moment, so that nothing fades: what is spent while it allows anything is bounded."""
    one, demanded, saved, cost, wasted = guard(waste=0.5), 0, 0, 0, 0
    for kind, n_bytes in events:
        if kind == 0:
            one.demanded(0, n_bytes)
            demanded += n_bytes
        elif not one.allows(0):
            continue
        elif kind == 1:
            one.used(0, n_bytes)
            saved += n_bytes
        elif kind == 2:
            one.displaced(0, n_bytes)
            cost += n_bytes
        else:
            one.wasted(0, n_bytes)
            wasted += n_bytes
        within = cost <= saved + 0.1 * demanded + 100
        within &= wasted <= 0.5 * (saved + demanded) + 100
        assert not one.allows(0) or within
        assert cost <= saved + 0.1 * demanded + 100 + 300
        assert wasted <= 0.5 * (saved + demanded) + 100 + 300


def test_chunks_take_a_few_milliseconds_by_what_was_measured() -> None:
    one, rates = RegretGuard(chunk_s=0.005), Rates()
    assert one.chunk_bytes(rates) == 4 * MIB
    for n in range(1, 20):
        rates.add(n * MIB, 1e-4 + n * MIB / 2e9)
    assert one.chunk_bytes(rates) == pytest.approx(0.0051 * 2e9, rel=0.01)
    slow, fast = Rates(), Rates()
    for n in range(1, 20):
        slow.add(n * MIB, n * MIB / 1e6)
        fast.add(n * MIB, n * MIB / 1e12)
    assert (one.chunk_bytes(slow), one.chunk_bytes(fast)) == (MIB, 64 * MIB)


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="chunk_s"):
        RegretGuard(chunk_s=0.0)
    assert "allows" in repr(RegretGuard())
