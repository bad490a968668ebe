"""Two that compute in turns, so that what else happens on the machine meets both alike."""

from __future__ import annotations

import threading
import time


class Turnstile:
    """Lets one of two threads go on at a time; each passes after every token, and notes its time.

    Args:
        stride: Tokens in a turn.

    Attributes:
        wall_s: Of each side: time between two tokens, without what it waited for its turn.
        cpu_s: The same of processor time of its thread.
    """

    def __init__(self, stride: int) -> None:
        self._stride, self._turn = stride, 0
        self._left = [False, False]
        self._count = [0, 0]
        self._since: list[tuple[float, float] | None] = [None, None]
        self._changed = threading.Condition()
        self.wall_s: tuple[list[float], list[float]] = ([], [])
        self.cpu_s: tuple[list[float], list[float]] = ([], [])

    def passes(self, side: int) -> None:
        """A side made a token; returns when it may make the next."""
        wall, cpu = time.perf_counter(), time.thread_time()
        if (before := self._since[side]) is not None:
            self.wall_s[side].append(wall - before[0])
            self.cpu_s[side].append(cpu - before[1])
        self._count[side] += 1
        if before is None or self._count[side] % self._stride == 0:
            self._wait(side)
        self._since[side] = time.perf_counter(), time.thread_time()

    def leave(self, side: int) -> None:
        """A side is done: the other one goes on alone."""
        with self._changed:
            self._left[side] = True
            self._turn = 1 - side
            self._changed.notify_all()

    def _wait(self, side: int) -> None:
        with self._changed:
            self._turn = 1 - side
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._turn == side or self._left[1 - side])
