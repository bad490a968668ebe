"""The one lock of a `KV`, with a queue for work that may arrive while the lock is already held."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

FORK_WAIT_S = 1.0
"""How long a fork waits for changes under way to end."""


class Guard:
    """A re-entrant lock whose outermost entry and exit run deferred work.

    A finalizer can run at any allocation, also in the middle of a change by its own thread. It must
    neither change anything then nor wait for another thread, so it defers.

    A fork waits until nobody is in the middle of a change, so that a child can read what it got.

    Attributes:
        torn: This process was forked in the middle of a change: what is guarded cannot be read.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._deferred: deque[Callable[[], None]] = deque()
        self.torn = self._held = False
        _guards.add(weakref.ref(self, _guards.discard))

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

    # ---- around a fork

    def _hold(self, wait_s: float) -> None:
        self._held = self._lock.acquire(timeout=max(wait_s, 0.0))

    def _let_go(self) -> None:
        if self._held:
            self._held = False
            self._lock.release()

    def _inherit(self) -> None:
        """In a child: whoever held the lock is not here, nor who would want deferred work done."""
        self._deferred.clear()
        if self._held:
            self._let_go()
        else:
            self._lock, self._depth, self.torn = threading.RLock(), 0, True


_guards: set[weakref.ref[Guard]] = set()


def _every() -> list[Guard]:
    return [guard for known in list(_guards) if (guard := known()) is not None]


def _hold_all() -> None:
    end = time.monotonic() + FORK_WAIT_S
    for guard in _every():
        guard._hold(end - time.monotonic())


def _let_all_go() -> None:
    for guard in _every():
        guard._let_go()


def _inherit_all() -> None:
    for guard in _every():
        guard._inherit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold_all, after_in_parent=_let_all_go, after_in_child=_inherit_all)
