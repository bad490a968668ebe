"""Latency and bandwidth from samples."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tests.inside import Rates

SIZES = st.lists(st.integers(1, 1 << 30), min_size=1, max_size=30)


def test_nothing_is_known_before_the_first_sample() -> None:
    rates = Rates()
    rates.add(0, 1.0)
    rates.add(100, 0.0)
    assert rates.samples == 0 and rates.expected_s(1 << 30) == rates.bytes_per_s == 0.0
    assert rates.patience_s(1 << 40, 7.0) == 7.0


def test_a_line_is_found_exactly() -> None:
    rates = Rates()
    for n_bytes in (1_000, 2_000_000, 30_000, 4_000_000):
        rates.add(n_bytes, 0.002 + n_bytes / 1e9)
    assert rates.latency_s == pytest.approx(0.002) and rates.bytes_per_s == pytest.approx(1e9)
    assert rates.expected_s(10**8) == pytest.approx(0.102)


def test_one_size_tells_no_latency() -> None:
    rates = Rates()
    for _ in range(20):
        rates.add(4096, 0.5)
    assert rates.latency_s == 0.0 and rates.expected_s(8192) == pytest.approx(1.0)


def test_a_place_that_became_slow_is_noticed_within_a_few_samples() -> None:
    rates = Rates()
    for _ in range(100):
        rates.add(1 << 20, 0.001)
    for _ in range(10):
        rates.add(1 << 20, 0.1)
    assert rates.expected_s(1 << 20) > 0.08


def test_patience_is_many_times_what_it_should_take_and_never_more_than_allowed() -> None:
    rates = Rates()
    for _ in range(8):
        rates.add(1 << 20, 0.1)
    assert rates.patience_s(1 << 20, 60.0) == pytest.approx(3.0)
    assert rates.patience_s(1 << 20, 2.0) == 2.0


@given(SIZES, st.lists(st.floats(1e-6, 1e3), min_size=30, max_size=30))
def test_estimates_are_never_negative_nor_wild(sizes: list[int], seconds: list[float]) -> None:
    rates = Rates()
    for n_bytes, time_s in zip(sizes, seconds, strict=False):
        rates.add(n_bytes, time_s)
    used = seconds[: len(sizes)]
    assert rates.latency_s >= 0 and rates.bytes_per_s > 0
    assert 0 <= rates.expected_s(1) <= rates.expected_s(1 << 30)
    assert rates.latency_s <= max(used) * (1 + 1e-6)


@given(SIZES, st.floats(0.01, 0.99))
def test_doubt_makes_everything_faster(sizes: list[int], factor: float) -> None:
    rates = Rates()
    for n_bytes in sizes:
        rates.add(n_bytes, 0.001 + n_bytes / 1e8)
    before = rates.expected_s(1 << 20)
    rates.doubt(factor)
    assert rates.expected_s(1 << 20) == pytest.approx(before * factor)
