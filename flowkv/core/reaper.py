"""A thread that ends what is garbage, so that no finalizer waits for anything.

The collector may run in the middle of any change, in any thread: a finalizer only queues the end.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue


class Reaper:
    """Do work that finalizers queue, one after the other, in a thread.

    Attributes:
        put: Queues a function; safe in a finalizer, also in the middle of itself.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.put = self._queue.put

    def start(self) -> None:
        """Start the thread, unless it runs."""
        if self._thread is None:
            with contextlib.suppress(RuntimeError):  # the system has none: the exit has to do
                thread = threading.Thread(target=self._run, name="flowkv ends", daemon=True)
                thread.start()
                self._thread = thread

    def settle(self, seconds: float) -> None:
        """Wait until all that is gone by now is ended."""
        if self._thread is not None and self._thread is not threading.current_thread():
            done = threading.Event()
            self.put(done.set)
            done.wait(seconds)

    def forked(self) -> None:
        """Begin anew, in a child."""
        self.__init__()  # type: ignore[misc]

    def _run(self) -> None:
        queue = self._queue
        while True:
            work = queue.get()
            with contextlib.suppress(Exception):
                work()
            del work  # what it held goes now, and not with the next one


REAPER = Reaper()
os.register_at_fork(after_in_child=REAPER.forked)
