from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.clock import without_threads
from tests.inside import (
    FAILURES,
    Aside,
    Breaker,
    BreakerState,
    ManualClock,
    OperationRates,
    Pass,
    attempt,
)

STEPS = st.lists(
    st.one_of(
        st.just("enter"),
        st.tuples(st.integers(-2, 2), st.sampled_from((True, False, False, False, None))),
        st.sampled_from((0.5, 1.0, 4.0, 9.0)),
    ),
    min_size=40,
    max_size=100,
)
"""Long, and about few passes: else three failures in a row are rare, and probes never happen."""


@settings(max_examples=50)
@given(STEPS)
def test_breaker_against_a_model(steps: list[object]) -> None:
    """Passes are given, reported late or twice, in any order, while time goes by."""
    clock = ManualClock()
    breaker = Breaker(clock, pause_s=1.0, most_pause_s=4.0)
    passes: list[tuple[Pass, int]] = []  # with the number of openings before it
    reported: set[int] = set()
    probe: Pass | None = None
    run, openings, opened_s, pause_s, now_s = 0, 0, None, 1.0, 0.0
    for step in steps:
        if isinstance(step, float):
            clock.advance(s=step)
            now_s = clock.now_ns() / 1e9
        elif step == "enter":
            leave = breaker.enter()
            if opened_s is None:
                assert leave is not None
            elif probe is not None or now_s - opened_s < pause_s:
                assert leave is None, "open means that nobody gets through"
            else:
                assert leave is not None, "after the pause somebody tries"
                probe = leave
            if leave is not None:
                passes.append((leave, openings))
        elif isinstance(step, tuple) and passes:
            which, well = step[0] % len(passes), step[1]
            leave, epoch = passes[which]
            tripped = leave.report(well)
            first = which not in reported
            reported.add(which)
            expected = False
            if first and leave is probe:
                probe = None
                if well:
                    opened_s, run, pause_s = None, 0, 1.0
                elif well is False:
                    pause_s, opened_s = min(4.0, 2 * pause_s), now_s
            elif first and epoch == openings and well is not None and opened_s is None:
                run = 0 if well else run + 1
                if run == FAILURES:
                    openings, opened_s, expected = openings + 1, now_s, True
            assert tripped is expected
        state = breaker.state
        assert (state is BreakerState.CLOSED) == (opened_s is None)
        assert breaker.ready() == (state is not BreakerState.OPEN)
        assert breaker.trips == openings


def test_a_failed_probe_doubles_the_pause_up_to_a_limit() -> None:
    clock = ManualClock()
    breaker = Breaker(clock, pause_s=1.0, most_pause_s=4.0)
    for _ in range(3):
        breaker.enter().report(False)
    for pause_s in (1.0, 2.0, 4.0, 4.0):
        clock.advance(s=pause_s - 0.001)
        assert breaker.enter() is None
        clock.advance(s=0.001)
        breaker.enter().report(False)
    clock.advance(s=4.0)
    breaker.enter().report(None)  # nothing was learnt: the pause is the same
    clock.advance(s=4.0)
    breaker.enter().report(True)
    for _ in range(3):
        breaker.enter().report(False)
    clock.advance(s=1.0)
    assert breaker.ready(), "a closed breaker begins with the first pause again"


class Engine:
    """Fails a number of times; its calls and the pauses between them take virtual time."""

    def __init__(self, clock: ManualClock, failures: list[type[OSError] | None], call_s: float):
        self.clock, self.failures, self.call_s = clock, failures, call_s
        self.given: list[float] = []

    def __call__(self, timeout_s: float) -> str:
        self.given.append(timeout_s)
        self.clock.advance(s=min(self.call_s, timeout_s))
        if self.call_s > timeout_s:
            raise TimeoutError
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None:
            raise failure("no")
        return "done"


@given(
    deadline_s=st.floats(0.0, 1.0),
    call_s=st.floats(0.0, 0.6),
    pause_s=st.floats(0.0, 0.5),
    failures=st.lists(st.sampled_from((ConnectionError, OSError, None)), max_size=6),
    seed=st.integers(0, 1000),
)
def test_retries_end_with_the_deadline(
    deadline_s: float,
    call_s: float,
    pause_s: float,
    failures: list[type[OSError] | None],
    seed: int,
) -> None:
    clock = ManualClock()
    engine = Engine(clock, list(failures), call_s)

    def left_s() -> float:
        return deadline_s - clock.now_ns() / 1e9

    try:
        attempt(
            engine,
            left_s,
            tries=4,
            pause_s=pause_s,
            jitter=random.Random(seed),
            sleep=lambda s: clock.advance(s=s),
        )
        worked = True
    except OSError:
        worked = False
    assert clock.now_ns() / 1e9 <= deadline_s + 1e-6, "beyond the deadline"
    assert len(engine.given) <= 4
    assert all(0 < given <= deadline_s for given in engine.given)
    if deadline_s > 4 * (call_s + 8 * pause_s) + 1e-6:  # there was time for all tries
        assert worked == (len(failures) < 4 or None in failures[:4])


def test_a_refusal_is_final() -> None:
    calls = []

    def refused(timeout_s: float) -> None:
        calls.append(timeout_s)
        raise PermissionError("no")

    with pytest.raises(PermissionError):
        attempt(refused, lambda: 1.0)
    assert len(calls) == 1


def test_a_call_without_a_thread_leaves_its_turn_to_others() -> None:
    aside = Aside("test", most=1)
    with without_threads():
        for _ in range(3):
            with pytest.raises(OSError, match="no thread"):
                aside.call(lambda: 1, 5.0)
    assert aside.call(lambda: 1, 5.0) == 1


def test_rates_follow_the_engine() -> None:
    rates = OperationRates()
    draw = random.Random(0)
    for latency_s, bandwidth in ((0.002, 50e6), (0.02, 5e6), (0.0001, 4e9)):
        for _ in range(200):
            for n_bytes in (4096, 1 << 20, 8 << 20):
                exact = latency_s + n_bytes / bandwidth
                rates.add_sample(n_bytes, exact * draw.uniform(0.9, 1.1))
        for n_bytes in (4096, 1 << 20, 64 << 20):
            exact = latency_s + n_bytes / bandwidth
            assert rates.expected_s(n_bytes) == pytest.approx(exact, rel=0.25)


def test_one_outlier_does_not_move_the_rates_much() -> None:
    rates = OperationRates()
    for _ in range(50):
        rates.add_sample(1 << 20, 0.011)
    before = rates.s_per_byte
    rates.add_sample(1 << 20, 0.033)
    assert before < rates.s_per_byte < before * 1.25


@given(st.lists(st.tuples(st.integers(0, 1 << 40), st.floats(0.0, 1e6)), max_size=30))
def test_rates_stay_finite(seen: list[tuple[int, float]]) -> None:
    rates = OperationRates()
    for n_bytes, seconds in seen:
        rates.add_sample(n_bytes, seconds)
    assert 0 < rates.s_per_byte < float("inf")
    assert 0 <= rates.latency_s < float("inf")
    assert 0 <= rates.expected_s(1 << 20) < float("inf")
