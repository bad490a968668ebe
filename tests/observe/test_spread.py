"""Quantiles are within 1 % of the true ones, parts add up, and memory is bounded."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.inside import ERROR, LEAST, Spread
from tests.inside import metrics_MOST as MOST

times = st.floats(1e-9, 1e6) | st.just(0.0)


def exact(values: list[float], q: float) -> float:
    ranked = sorted(values)
    return ranked[min(max(1, math.ceil(q * len(ranked))), len(ranked)) - 1]


@given(st.lists(times, min_size=1, max_size=60), st.sampled_from([0, 0.01, 0.5, 0.9, 0.99, 1]))
@settings(max_examples=50, deadline=None)
def test_quantiles_are_within_one_percent(values: list[float], q: float) -> None:
    spread = Spread(values)
    assert spread.quantile(q) == pytest.approx(exact(values, q), rel=ERROR * 1.0001, abs=1e-12)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e3])
def test_quantiles_of_a_heavy_tail(scale: float) -> None:
    values = (np.random.default_rng(3).lognormal(0, 2, 20_000) * scale).tolist()
    spread = Spread()
    for value in values[:700]:
        spread.add(value)
    spread.extend(values[700:])
    for q in (0.001, 0.5, 0.9, 0.95, 0.99, 0.999):
        assert abs(spread.quantile(q) / exact(values, q) - 1) <= ERROR
    assert spread.count == 20_000 and spread.total == pytest.approx(sum(values))
    assert (spread.least, spread.most) == (min(values), max(values))
    assert spread.mean == pytest.approx(np.mean(values))
    told = spread.summary()
    for q in (50, 90, 95, 99):
        assert abs(told[f"p{q}"] / exact(values, q / 100) - 1) <= ERROR


def test_buckets_hold_what_lies_in_them() -> None:
    values = [0.0, 0.0, 0.001, 0.0011, 5.0, 70.0]
    spread = Spread(values)
    for low, high, held in spread.buckets():
        assert held == sum(low < value <= high * (1 + 1e-12) for value in values)
        assert high / low == pytest.approx((1 + ERROR) / (1 - ERROR))
    assert sum(bucket.held for bucket in spread.buckets()) == 4 and spread.zeros == 2


def test_what_is_no_time_is_counted_soundly() -> None:
    spread = Spread([math.nan, -1.0, 0.0, 1e-12, 1e12])
    assert spread.count == 4 and spread.zeros == 2, "NaN is left out"
    assert (spread.least, spread.most) == (-1.0, 1e12)
    assert spread.quantile(0.5) == -1.0
    assert spread.quantile(1.0) == pytest.approx(MOST, rel=0.02)
    assert spread.quantile(0.75) == pytest.approx(LEAST, rel=0.02)


def test_nothing_has_no_quantile() -> None:
    spread = Spread()
    assert spread.summary() == dict.fromkeys(
        ("count", "mean", "p50", "p90", "p95", "p99", "max"), 0.0
    )
    spread.extend([math.nan])
    assert spread.count == 0 and spread.least == spread.most == 0.0
    assert list(spread.buckets()) == []


def test_memory_does_not_grow() -> None:
    spread = Spread()

    def held() -> int:
        return sys.getsizeof(spread._waiting) + spread._counts.nbytes

    draws = np.random.default_rng(5).exponential(0.02, 4000).tolist()
    spread.extend(draws)
    before = held()
    for _ in range(50):
        spread.extend(draws)
        spread.add(1.0)
    assert held() <= before + 16 * 1024 and spread._counts.nbytes < 20_000
    assert spread.count == 51 * 4000 + 50
