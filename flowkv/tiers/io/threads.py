"""An engine of threads that make positional system calls: for where io_uring is not allowed.

Each thread takes a share of what is queued, so that the threads seldom meet. The system calls are
made with plain addresses and run without the interpreter's lock; between them every thread needs
that lock, so this engine slows down while Python is busy, as io_uring's does not.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import cast

import numpy as np
from numpy.typing import NDArray

from flowkv.core.errors import StateError
from flowkv.tiers.io.engine import OPERATION, READ, SYNC, WRITE, Completions, Operations
from flowkv.tiers.io.opening import open_file
from flowkv.tiers.io.reports import Reports

THREADS = 16
MOST_BYTES = 0x7FFF_F000  # of one system call
MOST_TAKEN = 8  # operations that a thread takes at once
CLOSE_S = 10.0

Row = tuple[int, int, int, int, int, int]
Call = Callable[[int, int, int, int], int]


class ThreadsEngine:
    """An `Engine` over `pread` and `pwrite`.

    Args:
        direct: Open files with O_DIRECT; the engine's name is "threads" then, else "buffered".
        threads: Their number, which is the depth too; they start with the first operation.
        why: Why there is no better engine, for whoever reads statistics.
    """

    def __init__(self, *, direct: bool = True, threads: int = THREADS, why: str = "") -> None:
        self.why = why
        self.name = "threads" if direct else "buffered"
        self.direct, self.depth = direct, threads
        self._reports = Reports()
        self._changed = threading.Condition()
        self._queue: deque[Row] = deque()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed, self._pid = False, os.getpid()
        library = ctypes.CDLL(None, use_errno=True)
        self._read = _positional(library, "pread")
        self._write = _positional(library, "pwrite")

    def open(self, path: str, *, write: bool) -> int:
        """Opens a regular file; the engine is a buffered one from the first that is not direct.

        Raises:
            OSError: It cannot be opened.
        """
        fd, direct = open_file(path, write=write, direct=self.direct)
        if not direct and self.direct:
            self.name, self.direct = "buffered", False
            self.why = f"no O_DIRECT for {path}"
        return fd

    def submit(self, operations: Operations) -> None:
        """Queues operations for the threads.

        Raises:
            StateError: The engine is closed, or was opened before a fork.
        """
        if self._pid != os.getpid():
            raise StateError("the engine was opened before a fork", "Open another one, here")
        rows = np.asarray(operations, OPERATION).tolist()
        with self._changed:
            if self._closed:
                raise StateError("the engine is closed", "Open another one")
            self._reports.expect(len(rows))
            self._queue += rows
            wanted = len(self._queue) - self._idle
            while wanted > 0 and len(self._threads) < self.depth:
                thread = threading.Thread(target=self._run, name="flowkv io", daemon=True)
                self._threads.append(thread)
                thread.start()
                wanted -= 1
            self._changed.notify(len(rows))

    def wait(self, timeout_s: float = 0.0, *, least: int = 1) -> Completions:
        """Completions that are there; waits up to `timeout_s` for the first `least` of them."""
        if self._pid != os.getpid():
            timeout_s = 0.0
        return self._reports.take(timeout_s, least)

    def cancel(self, tags: NDArray[np.uint64]) -> None:
        """Ends operations that no thread has begun."""
        unwanted = set(np.asarray(tags).tolist())
        with self._changed:
            ended = [row for row in self._queue if row[-1] in unwanted]
            if ended:
                self._queue = deque(row for row in self._queue if row[-1] not in unwanted)
                self._reports.put([(row[-1], -errno.ECANCELED) for row in ended])

    def in_flight(self) -> int:
        """Operations whose completion was not taken yet."""
        return self._reports.owed()

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Cancels what is queued and waits for what is under way; False if that took too long."""
        if self._pid != os.getpid():
            return True
        with self._changed:
            self._closed = True
            self._reports.put([(row[-1], -errno.ECANCELED) for row in self._queue])
            self._queue.clear()
            self._changed.notify_all()
        end_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        self._reports.end()
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        done: list[tuple[int, int]] = []
        while rows := self._next():
            for op, fd, offset, address, length, tag in rows:
                done.append((tag, self._do(op, fd, offset, address, length)))
            self._reports.put(done)
            done.clear()

    def _next(self) -> list[Row]:
        """A share of what is queued; nothing when it is time to end."""
        with self._changed:
            while not self._queue:
                if self._closed:
                    return []
                self._idle += 1
                self._changed.wait()
                self._idle -= 1
            count = min(MOST_TAKEN, -(-len(self._queue) // self.depth))
            return [self._queue.popleft() for _ in range(count)]

    def _do(self, op: int, fd: int, offset: int, address: int, length: int) -> int:
        if op == SYNC:
            try:
                os.fdatasync(fd)
            except OSError as error:
                return -(error.errno or errno.EIO)
            return 0
        if op not in (READ, WRITE):
            return -errno.EINVAL
        call, done = self._read if op == READ else self._write, 0
        while done < length:
            count = call(fd, address + done, min(length - done, MOST_BYTES), offset + done)
            if count < 0:
                code = ctypes.get_errno()
                if code == errno.EINTR:
                    continue
                # What a direct read left of a file that ends within a sector is not aligned.
                return done if code == errno.EINVAL and op == READ and done else -code
            if count == 0:
                return done if op == READ else -errno.ENOSPC
            done += count
        return done


def _positional(library: ctypes.CDLL, name: str) -> Call:
    function = getattr(library, name + "64", None) or getattr(library, name)
    function.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)
    function.restype = ctypes.c_ssize_t
    return cast(Call, function)
