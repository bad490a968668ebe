"""Time in which a process compiles: known exactly, in nobody's deadline, in nobody's rate."""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis.strategies as st
import numba
import pytest
from hypothesis import given
from numba.core import compiler_lock, registry
from numba.extending import overload

from tests.clock import without_threads
from tests.inside import Intervals, SystemClock, compiling, progress


class Times:
    """A clock and a current thread, for `Intervals`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.thread = 1_000, 1
        monkeypatch.setattr(compiling.time, "monotonic_ns", lambda: self.now)
        monkeypatch.setattr(compiling.threading, "get_ident", lambda: self.thread)


@pytest.fixture
def times() -> Iterator[Times]:
    with pytest.MonkeyPatch.context() as patch:
        yield Times(patch)


EVENTS = st.lists(
    st.tuples(st.integers(1, 3), st.booleans(), st.integers(0, 50)), min_size=15, max_size=60
)


@given(EVENTS)
def test_the_clock_stands_still_while_any_thread_compiles(events: list) -> None:
    with pytest.MonkeyPatch.context() as patch:
        times, known = Times(patch), Intervals()
        depths, ticks, clock = {1: 0, 2: 0, 3: 0}, list[bool](), known.at()
        for thread, begins, passes in events:
            times.thread = thread
            if begins:
                known.begin()
                depths[thread] += 1
            else:  # an end of what never began is none
                known.end()
                depths[thread] = max(0, depths[thread] - 1)
            times.now += passes
            ticks += [any(depths.values())] * passes
            now_ns, spent_ns = known.at()
            assert spent_ns == sum(ticks)
            assert clock[0] - clock[1] <= now_ns - spent_ns, "it went back"
            assert known.at() == (clock := (now_ns, spent_ns))
        for first in range(0, len(ticks), 7):
            for last in range(first, len(ticks) + 1, 11):
                assert known.within_ns(1_000 + first, 1_000 + last) == sum(ticks[first:last])


def test_an_end_that_nobody_told_of_does_not_stop_the_clock_for_ever(times: Times) -> None:
    known, most_ns = Intervals(), round(compiling.MOST_S * 1e9)
    known.begin()
    times.now += most_ns + 5
    assert known.at() == (1_000 + most_ns + 5, most_ns)
    times.now += 7
    assert known.at() == (1_000 + most_ns + 12, most_ns)
    known.end()  # it comes all the same
    known.begin()
    times.now += 3
    known.end()
    assert known.at()[1] == most_ns + 3


def test_a_measured_time_is_believed_without_what_was_compiled(
    times: Times, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Intervals()
    monkeypatch.setattr(compiling, "_INTERVALS", known)
    times.now = 10**9
    with compiling.around():
        times.now += 10**8
    assert compiling.measured_s(0.0, 0.9) == 0.9, "it ended before"
    assert compiling.measured_s(1.1, 1.2) == pytest.approx(0.1), "it began after"
    assert compiling.measured_s(0.5, 2.5) == pytest.approx(1.9)
    assert compiling.measured_s(0.9, 1.3) == 0.0, "a quarter of it was compiling"
    assert compiling.within_s(0.9, 1.05) == pytest.approx(0.05)


def compiled_now(body: str = "x + 1") -> int:
    """Compiles a function that numba has not met; returns what it gives for 1."""
    function = numba.njit(eval(f"lambda x: {body}"))
    return function(1)


def test_numba_is_heard_of_whoever_compiles() -> None:
    clock = SystemClock()
    before, began_ns = compiling.spent_ns(), clock.now_ns()
    real_ns = time.monotonic_ns()
    assert compiled_now() == 2
    spent_ns = compiling.spent_ns() - before
    assert spent_ns > 0
    passed_ns, real_ns = clock.now_ns() - began_ns, time.monotonic_ns() - real_ns
    assert passed_ns <= real_ns - spent_ns + 10**6
    thread = threading.Thread(target=compiled_now, args=("x + 2",))
    thread.start()
    thread.join()
    assert compiling.spent_ns() > before + spent_ns
    assert not compiling._INTERVALS._depths


@pytest.mark.parametrize("main", [True, False])
def test_a_thread_that_compiles_leaves_warnings_of_others_alone(main: bool) -> None:
    compiling.watch()
    before, seen = (warnings.filters, warnings.showwarning), list[Any]()

    def typed() -> int:
        return 3

    @overload(typed)
    def inferred() -> Any:  # called while numba infers types
        seen.append((warnings.filters, warnings.showwarning))
        return lambda: 3

    @numba.njit
    def function() -> int:
        return typed()

    if main:
        function()
    else:
        thread = threading.Thread(target=function)
        thread.start()
        thread.join()
    assert seen
    assert main or all(found[0] is before[0] and found[1] is before[1] for found in seen)
    assert (warnings.filters, warnings.showwarning) == before and function() == 3


def test_what_cannot_be_compiled_ends_too() -> None:
    compiling.watch()
    before = compiling.spent_ns()
    with pytest.raises(numba.TypingError):
        compiled_now("x + nothing_of_this_name")
    assert compiling.spent_ns() > before
    assert not compiling._INTERVALS._depths


def test_who_waits_for_the_compiler_is_waiting_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from numba.core.compiler_lock import global_compiler_lock

    compiling.watch()
    waiting = threading.Thread(target=compiled_now, args=("x + 3",))
    with global_compiler_lock:
        waiting.start()
        while len(compiling._INTERVALS._depths) < 2:
            assert waiting.is_alive()
            time.sleep(0.001)
        before = compiling.now_ns()
        time.sleep(0.01)
        assert before < compiling.now_ns() < before + 10**6
    waiting.join()
    assert not compiling._INTERVALS._depths


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_does_not_inherit_what_other_threads_compile() -> None:
    known = Intervals()
    thread = threading.Thread(target=known.begin)
    thread.start()
    thread.join()
    before, first = known.at(), known.at()
    known.forked()
    later = known.at()
    assert before[1] <= first[1] <= later[1]
    while known.at()[0] == later[0]:
        pass
    assert known.at()[1] == later[1], "the clock runs"


@pytest.mark.parametrize("terminal", [False, True])
def test_what_is_compiled_for_long_is_told(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_EVERY_S", 0.01)
    monkeypatch.setattr(compiling, "LINE", progress.ProgressLine())
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    said = threading.Event()
    monkeypatch.setattr(progress._log, "info", lambda line: (lines.append(line), said.set()))
    lines, shown, known = list[str](), "", Intervals()
    others = set(threading.enumerate())
    known.begin()
    known.start_reports()
    known.start_reports()  # one thread tells, however many functions there are
    (teller,) = set(threading.enumerate()) - others
    if terminal:
        while "compiling" not in shown:
            shown += capsys.readouterr().err
    else:
        assert said.wait(60) and "compiling, once on this machine" in lines[0]
    known.end()
    teller.join(60)
    shown += capsys.readouterr().err
    assert shown.endswith("\r") == terminal  # the line is wiped out behind it


def test_only_what_is_really_compiled_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[int]()
    compiling.watch()
    monkeypatch.setattr(compiling._INTERVALS, "start_reports", lambda: told.append(1))
    twice = numba.njit(lambda x: 2 * x)
    twice(1)
    assert told
    count = len(told)
    twice(2)
    assert len(told) == count


def test_a_thread_that_cannot_begin_harms_no_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    known, reports = Intervals(), progress.ProgressLine()
    monkeypatch.setattr(compiling, "LINE", reports)
    with without_threads():
        known.start_reports()
    assert not reports._running  # and the next one is told


@pytest.mark.parametrize("stderr", [None, object()])
def test_standard_error_may_be_anything(stderr: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stderr)
    assert not progress._write("compiling")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("wait_s", [0.01, 60.0])
@pytest.mark.parametrize("first", [False, True])
def test_a_child_of_a_fork_within_a_compilation_compiles(
    first: bool, wait_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It once waited for ever: the thread that held the compiler's lock is not in the child.

    Nor is one that uses numba for the first time.
    """
    held, go_on = threading.Event(), threading.Event()
    owner = compiler_lock.global_compiler_lock
    context = vars(registry.CPUTarget)["_toplevel_target_context"]
    locks = [context._lock, getattr(context, "lock", context._lock)] if first else [owner._lock]

    def compiles() -> None:
        with locks[0], locks[-1]:
            held.set()
            assert go_on.wait(60)

    thread = threading.Thread(target=compiles)
    thread.start()
    assert held.wait(60)
    monkeypatch.setattr(compiling, "FORK_WAIT_S", wait_s)
    late = threading.Timer(0.05, go_on.set)
    if wait_s > 1:  # the fork waits for the end of the compilation
        late.start()
    child = os.fork()
    if child == 0:
        os._exit(0 if all(lock.acquire(timeout=2) for lock in locks) else 1)
    assert wait_s < 1 or go_on.is_set()
    go_on.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with locks[0], locks[-1]:
        pass


def test_threads_that_fork_at_once_free_what_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, found = compiler_lock.global_compiler_lock._lock, list[bool]()

    def take() -> None:
        found.append(lock.acquire(blocking=False))
        if found[-1]:
            lock.release()

    def beside(call: Callable[[], None]) -> None:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    monkeypatch.setattr(compiling, "FORK_WAIT_S", 0.0)
    compiling._hold_compilers()
    beside(compiling._hold_compilers)
    compiling._free_compilers()
    beside(take)
    assert found == [True]
