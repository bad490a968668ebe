"""What other threads ask of the one that runs the engine."""

from __future__ import annotations

import threading
from collections import deque

from flowkv.core.errors import BusyError, StateError
from flowkv.engine.live import Live


class Inbox:
    """Requests and cancellations on their way to the engine. Thread-safe.

    Args:
        limit: Most requests that wait.

    Attributes:
        fresh: New requests, in order of submission, until the engine has `taken` them.
        off: Numbers of requests that were called off; the engine takes them out.
        waiting: Requests that the engine has taken, and that wait there; it says so.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self.waiting = limit, 0
        self._changed = threading.Condition()
        self.fresh: deque[Live] = deque()
        self.off: deque[int] = deque()
        self._closed = self._now = False
        self._why: BaseException | None = None

    @property
    def closed(self) -> bool:
        """Whether nothing is taken any more."""
        return self._closed

    @property
    def pending(self) -> bool:
        """Whether there is anything that the engine has not taken yet."""
        return bool(self.fresh or self.off)

    @property
    def now(self) -> bool:
        """Whether what was taken is called off as well."""
        return self._now

    def put(self, *lives: Live, limited: bool = True) -> None:
        """Hands requests in, all or none.

        Args:
            *lives: The requests.
            limited: False takes them whatever waits.

        Raises:
            BusyError: Too many wait.
            StateError: The engine is closed, or failed.
        """
        with self._changed:
            if self._closed:
                raise self._refusal()
            waiting = self.waiting + len(self.fresh)
            if limited and waiting >= self._limit:
                raise BusyError(
                    f"{waiting} requests wait already",
                    "Wait for some of the answers first, or raise max_waiting",
                )
            self.fresh += lives
            self._changed.notify_all()

    def check(self) -> None:
        """Refuses as `put` would.

        Raises:
            StateError: The engine is closed, or failed.
        """
        if self._closed:
            raise self._refusal()

    def _refusal(self) -> StateError:
        if self._why is None:
            return StateError("the engine is closed", "Make a new one")
        refusal = StateError(f"the engine failed: {self._why!r}", "Make a new one")
        refusal.__cause__ = self._why
        return refusal

    def call_off(self, number: int) -> None:
        """Asks for a cancellation."""
        with self._changed:
            self.off.append(number)
            self._changed.notify_all()

    def close(self, *, now: bool = False, why: BaseException | None = None) -> None:
        """Takes nothing any more.

        Args:
            now: What was taken is called off, too.
            why: What the engine failed with.
        """
        with self._changed:
            self._closed, self._now = True, self._now or now
            self._why = self._why or why
            self._changed.notify_all()

    def taken(self) -> None:
        """The engine has the first of `fresh`: it waits there now, and is counted all the time."""
        with self._changed:
            self.waiting += 1
            self.fresh.popleft()

    def wait(self) -> bool:
        """Waits until there is something to do; False once nothing is taken any more."""
        with self._changed:
            while not (self.pending or self._closed):
                self._changed.wait()
            return self.pending
