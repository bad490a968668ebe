"""One thread for what would keep a caller: it starts with the first piece of work."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class Apart:
    """Works things off in order, on a thread of its own. Thread-safe.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._work: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._closing = False

    def give(self, work: Callable[[], None]) -> None:
        """Queues work, which must not raise; after `close` it is done at once."""
        with self._changed:
            if self._closing:
                work()
                return
            self._work.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Waits until all that was given is done."""
        with self._changed:
            self._closing = True
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._work and not self._closing:
                    self._changed.wait()
                if not self._work:
                    return
                work = self._work.popleft()
            work()
