"""Series keep sums and means however coarse their grid becomes, and never grow."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.inside import Series


@given(
    st.lists(st.tuples(st.floats(0, 500), st.integers(0, 9)), min_size=1, max_size=80),
    st.sampled_from([4, 16]),
)
@settings(max_examples=25, deadline=None)
def test_no_amount_is_lost(told: list[tuple[float, int]], most: int) -> None:
    series = Series(most=most, cell_s=0.5)
    for at_s, tokens in sorted(told):
        series.count(7.0 + at_s, {"tokens": tokens})
    times_s, rates = series.rate("tokens", most=3)
    assert len(times_s) == len(rates) <= 3 and series.cells <= most
    width_s = 2 * times_s[0]
    assert sum(rates) * width_s == pytest.approx(sum(tokens for _, tokens in told))
    assert times_s == sorted(times_s)


def test_levels_are_weighted_means() -> None:
    series = Series(most=4, cell_s=1.0)
    series.set(10.0, {"rows": 4, "kv": 0.5}, weight=3)
    series.set(10.9, {"rows": 8}, weight=1)
    series.set(13.5, {"rows": 2})
    assert series.times_s == [0.5, 1.5, 2.5, 3.5]
    assert series.level("rows") == [5, 5, 5, 2]
    assert series.level("kv") == [0.5] * 4
    assert all(map(math.isnan, series.level("never")))
    series.set(14.0, {"rows": 6})  # beyond the grid: two cells become one
    assert series.cell_s == 2.0 and series.level("rows") == [5, 2, 6]
    assert series.names == ["rows", "kv"]


def test_what_comes_late_counts_for_the_first_cell() -> None:
    series = Series(cell_s=1.0)
    series.count(10.0, {"tokens": 1})
    series.count(9.0, {"tokens": 2})
    assert series.rate("tokens") == ([0.5], [3.0])
    assert series.rate("never") == ([0.5], [0.0])


def test_rates_are_per_second() -> None:
    series = Series(cell_s=0.25)
    for number in range(8):
        series.count(5.0 + 0.25 * number, {"tokens": number})
    assert series.rate("tokens", most=4) == ([0.25, 0.75, 1.25, 1.75], [2.0, 10.0, 18.0, 26.0])
    times_s, rates = series.rate("tokens", most=3)
    assert times_s == [0.375, 1.125, 1.875] and rates == pytest.approx([4.0, 16.0, 52 / 3])


def test_an_empty_series() -> None:
    series = Series()
    assert (series.cells, series.times_s, series.names) == (0, [], [])
    assert series.rate("x") == ([], [])
