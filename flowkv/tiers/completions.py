"""Where a tier puts its answers until they are polled."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterable

from flowkv.tiers.base import Completion


class Completions:
    """A thread-safe queue of answers, with a file descriptor for those who wait on many things."""

    def __init__(self) -> None:
        self._ready: deque[Completion] = deque()
        self._changed = threading.Condition()
        self._event_fd = -1
        self._closed = False
        self._jobs = 0

    def new_job(self) -> int:
        """The next job number, from 1."""
        with self._changed:
            self._jobs += 1
            return self._jobs

    def put(self, answers: Iterable[Completion]) -> None:
        """Adds answers and wakes whoever polls."""
        with self._changed:
            before = len(self._ready)
            self._ready.extend(answers)
            if len(self._ready) > before:
                self._changed.notify_all()
                if self._event_fd >= 0:
                    os.eventfd_write(self._event_fd, 1)

    def take(self, timeout_s: float = 0.0) -> list[Completion]:
        """All answers there are; waits up to `timeout_s` for the first one."""
        with self._changed:
            if not self._ready and timeout_s > 0:
                end = time.monotonic() + timeout_s
                while not self._ready and (left := end - time.monotonic()) > 0:
                    self._changed.wait(left)
            answers = list(self._ready)
            self._ready.clear()
            if answers and self._event_fd >= 0:
                os.eventfd_read(self._event_fd)
            return answers

    def fileno(self) -> int:
        """An eventfd, readable while answers wait; made at the first call, -1 once closed."""
        with self._changed:
            if self._event_fd < 0 and not self._closed:
                waiting = 1 if self._ready else 0
                self._event_fd = os.eventfd(waiting, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            return self._event_fd

    def close(self) -> None:
        """Closes the eventfd for good; answers can still be taken."""
        with self._changed:
            self._closed = True
            if self._event_fd >= 0:
                os.close(self._event_fd)
                self._event_fd = -1
