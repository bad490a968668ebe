"""Thread that closes collected objects, so that no finalizer has to wait.

The collector may run in the middle of any change, in any thread: a finalizer only queues the
closing.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from flowkv.core.errors import StoreError


def begin(target: Callable[..., object], *args: Any, name: str) -> threading.Thread | None:
    """Start a thread; return None if the system has none now, or the interpreter ends."""
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    try:
        thread.start()
    except (RuntimeError, MemoryError):
        return None
    return thread


def started(target: Callable[..., object], *, name: str) -> threading.Thread:
    """Start a thread, as `begin`, for an object that is nothing without it.

    Raises:
        StoreError: The system has none now.
    """
    if (thread := begin(target, name=name)) is None:
        raise StoreError("no thread can start", "End other threads, or raise `ulimit -u`")
    return thread


class Reaper:
    """Thread that runs functions queued by finalizers, one after the other.

    Attributes:
        put: Queues a function; safe in a finalizer, even if it interrupts itself.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.put = self._queue.put

    def start(self) -> None:
        """Start the thread, unless it runs."""
        if self._thread is None:
            self._thread = begin(self._run, name="flowkv ends")  # or closing at exit must do

    def join(self, seconds: float) -> None:
        """Wait until the functions queued so far have run, for `seconds` at most."""
        if self._thread is not None and self._thread is not threading.current_thread():
            done = threading.Event()
            self.put(done.set)
            done.wait(seconds)

    def forked(self) -> None:
        """Begin anew in a forked child, with an empty queue."""
        self.__init__()  # type: ignore[misc]

    def _run(self) -> None:
        queue = self._queue
        while True:
            work = queue.get()
            with contextlib.suppress(Exception):
                work()
            del work  # so that objects it holds are freed now, not with the next function


_END_S = 5.0

REAPER = Reaper()
# The interpreter's end would stop the thread within torch, which aborts the process.
atexit.register(lambda: REAPER.join(_END_S))
os.register_at_fork(after_in_child=REAPER.forked)
