"""Time that stands still until a test moves it; threads and processes beside a test."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from unittest import mock


class ManualClock:
    """Clock that moves only by `advance`."""

    def __init__(self, start_ns: int = 0) -> None:
        self._now_ns = start_ns

    def now_ns(self) -> int:
        """Return the time set by `advance`."""
        return self._now_ns

    def advance(self, *, ns: int = 0, s: float = 0.0) -> None:
        """Move the clock forward by `ns` nanoseconds plus `s` seconds."""
        step = ns + round(s * 1e9)
        if step < 0:
            raise ValueError("a clock does not go backwards. Advance by a positive step.")
        self._now_ns += step


def wait_for(
    condition: Callable[[], object], within_s: float = 60.0, every_s: float = 0.005
) -> None:
    """Waits until something is true."""
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, f"not within {within_s} s"
        time.sleep(every_s)


def together(*works: Callable[[], object]) -> None:
    """Runs functions in threads and raises what they raise."""
    problems: list[BaseException] = []

    def guarded(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a thread is stuck"
    for problem in problems:
        raise problem


@contextmanager
def held(*locks: AbstractContextManager[object]) -> Iterator[None]:
    """Let another thread hold locks meanwhile."""
    taken, over = threading.Event(), threading.Event()

    def hold() -> None:
        with ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            taken.set()
            over.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert taken.wait(60)
    try:
        yield
        assert thread.is_alive(), "the locks were waited for"
    finally:
        over.set()
        thread.join()


def without_threads() -> AbstractContextManager[object]:
    """Start no thread, as a system that has none left."""
    error = RuntimeError("can't start new thread")
    return mock.patch.object(threading.Thread, "start", side_effect=error)


def in_child(work: Callable[[], object], seconds: int = 20) -> int:
    """Return what a function gives in a forked process, or how that ended; it may not wait long."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other tests have threads
        child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(seconds)
        try:
            os._exit(int(work()))  # type: ignore[call-overload]
        except BaseException:
            traceback.print_exc()
        os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
