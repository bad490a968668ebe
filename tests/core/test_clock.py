"""Clocks never go backwards."""

from __future__ import annotations

import pytest

from tests.inside import ManualClock, SystemClock, compiling


def test_manual_clock_moves_when_told() -> None:
    clock = ManualClock(5)
    assert clock.now_ns() == clock.now_ns() == 5
    clock.advance(ns=3, s=1.5)
    assert clock.now_ns() == 1_500_000_008
    clock.advance(ns=-3, s=1.0)
    assert clock.now_ns() == 2_500_000_005
    with pytest.raises(ValueError, match="backwards"):
        clock.advance(s=-1e-9)
    assert clock.now_ns() == 2_500_000_005


def test_system_clock_is_monotonic() -> None:
    clock = SystemClock()
    times = [clock.now_ns() for _ in range(1000)]
    assert times == sorted(set(times))


def test_what_happens_while_the_clock_stands_has_an_order() -> None:
    clock = SystemClock()
    with compiling.around():
        times = [clock.now_ns() for _ in range(1000)]
    assert times == sorted(set(times))
    assert times[-1] < times[0] + 10**6
