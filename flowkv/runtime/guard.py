"""The one lock of a `KV`, with a queue for work that may arrive while the lock is already held."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class Guard:
    """A re-entrant lock whose outermost entry and exit run deferred work.

    A finalizer can run at any allocation, also in the middle of a change by its own thread. It must
    neither change anything then nor wait for another thread, so it defers.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._deferred: deque[Callable[[], None]] = deque()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1
        if self._depth == 1 and self._deferred:
            try:
                self._run()
            except BaseException:
                self._leave()
                raise

    def __exit__(self, *_: object) -> None:
        try:
            if self._depth == 1 and self._deferred:
                self._run()
        finally:
            self._leave()

    def defer(self, work: Callable[[], None]) -> None:
        """Runs `work` now if the lock is free, else at the next outermost entry or exit."""
        self._deferred.append(work)
        if self._lock.acquire(blocking=False):
            self._depth += 1
            self.__exit__()

    def _leave(self) -> None:
        self._depth -= 1
        self._lock.release()

    def _run(self) -> None:
        while self._deferred:
            self._deferred.popleft()()
