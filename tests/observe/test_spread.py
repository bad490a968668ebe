"""Quantiles are those of the newest values, sums are those of all, and memory is bounded."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.inside import NEWEST, Spread

times = st.floats(1e-9, 1e6) | st.just(0.0)


def exact(values: list[float], q: float) -> float:
    ranked = sorted(values)
    return ranked[min(max(1, math.ceil(q * len(ranked))), len(ranked)) - 1]


@given(st.lists(times, min_size=1, max_size=60), st.sampled_from([0, 0.01, 0.5, 0.9, 0.99, 1]))
@settings(max_examples=50, deadline=None)
def test_quantiles_are_values_of_their_rank(values: list[float], q: float) -> None:
    assert Spread(values).quantile(q) == exact(values, q)


def test_a_long_stream_has_quantiles_of_its_newest_values() -> None:
    values = np.random.default_rng(3).lognormal(0, 2, NEWEST + 700).tolist()
    spread = Spread()
    for value in values[:700]:
        spread.add(value)
    spread.extend(values[700:])
    found = spread.summary()
    for q in (50, 90, 95, 99):
        assert found[f"p{q}"] == exact(values[-NEWEST:], q / 100)
    assert len(spread.newest) == NEWEST, "memory is bounded"
    assert (spread.count, found["max"], spread.least) == (len(values), max(values), min(values))
    assert found["mean"] == pytest.approx(np.mean(values)) and spread.total > 0


def test_no_values_and_no_numbers() -> None:
    spread = Spread()
    assert set(spread.summary().values()) == {0.0}
    spread.extend([math.nan])
    assert spread.count == 0 and spread.least == spread.most == 0.0
    spread.extend([-1.0, math.nan, -3.0])
    assert (spread.count, spread.least, spread.most) == (2, -3.0, -1.0)
