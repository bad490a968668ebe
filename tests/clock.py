"""Time that stands still until a test moves it, and waits for what other threads do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


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
