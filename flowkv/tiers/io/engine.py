"""The `IOEngine` protocol: reads and writes of files in batches, completed later.

    submit(operations) -> ... -> wait(timeout_s) -> completions

Three engines implement it, and a tier takes the first that this machine allows (`open_engine`):
io_uring, positional system calls on threads with O_DIRECT, and the same through the page cache.

Memory named by an operation belongs to the engine until its completion is reported, whatever
happens meanwhile: neither a deadline nor `cancel` makes it free before (DESIGN D10).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from flowkv.core.errors import StateError

READ, WRITE, SYNC = 0, 1, 2

OPERATION = np.dtype(
    [
        ("op", "<u4"),
        ("fd", "<i4"),
        ("offset", "<u8"),
        ("address", "<u8"),
        ("length", "<u8"),
        ("tag", "<u8"),
    ]
)
"""One operation: `READ` or `WRITE` `length` bytes at `offset` of `fd`, from or to memory at
`address`; or `SYNC` (fdatasync). With a direct file all three are multiples of `ALIGNMENT`. `tag`
names it in its completion, and is unique among the operations in flight."""

COMPLETION = np.dtype([("tag", "<u8"), ("result", "<i8")])
"""One completion: bytes moved in all (short reads and writes are continued; fewer than `length`
only where a file ends), or a negative errno."""

ALIGNMENT = 4096

Operations = NDArray[Any]  # of dtype OPERATION
Completions = NDArray[Any]  # of dtype COMPLETION


class IOEngine(Protocol):
    """Moves bytes between memory and files. Thread-safe.

    Attributes:
        direct: Whether files that it opens bypass the page cache.
        depth: Operations that it has the system work on at a time; more may be submitted.
    """

    direct: bool
    depth: int

    @property
    def name(self) -> str:
        """What it is: "io_uring", "threads" or "buffered"."""
        ...

    def open(self, path: str, *, write: bool) -> int:
        """Opens a regular file for this engine; as `FileIO.open`, with O_DIRECT where `direct`.

        Raises:
            OSError: It cannot be opened.
        """
        ...

    def submit(self, operations: Operations) -> None:
        """Starts operations; the array may be reused at once.

        Raises:
            StateError: The engine is closed.
        """
        ...

    def wait(self, timeout_s: float = 0.0, *, least: int = 1) -> Completions:
        """Completions that are there; waits up to `timeout_s` for the first `least` of them."""
        ...

    def cancel(self, tags: NDArray[np.uint64]) -> None:
        """Asks for an end of operations; each still completes, with -ECANCELED if that worked."""
        ...

    def close(self) -> bool:
        """Ends what is in flight; False if something never ended: its memory must never be reused.

        Safe to call again. Files stay open: they belong to whoever asked for them.
        """
        ...


# Completions on their way from an engine to whoever waits for them.


class Reports:
    """A queue of completions. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._rows: list[tuple[int, int]] = []
        self._ended = False

    def put(self, rows: Sequence[tuple[int, int]]) -> None:
        """Adds completions: pairs of tag and result."""
        with self._changed:
            self._rows += rows
            self._changed.notify_all()

    def take(self, timeout_s: float, least: int) -> Completions:
        """All completions that are there; waits up to `timeout_s` for the first `least`."""
        end_s = time.monotonic() + timeout_s
        with self._changed:
            while len(self._rows) < least and not self._ended:
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(min(left_s, threading.TIMEOUT_MAX))
            rows, self._rows = self._rows, []
        return np.array(rows, COMPLETION)

    def end(self) -> None:
        """Nobody waits any more: what comes is kept for whoever looks."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()


# Opening files past the page cache, where their file system allows that.

_STATX = {"x86_64": 332, "aarch64": 291}.get(platform.machine())
_STATX_DIOALIGN = 0x2000
_AT_EMPTY_PATH = 0x1000
_MASK_AT, _ALIGN_AT = 0, 0x98  # offsets of stx_mask, and of stx_dio_mem_align and _offset_align


def open_file(path: str, *, write: bool, direct: bool) -> tuple[int, bool]:
    """Opens a regular file as `FileIO.open` does.

    Returns:
        The file descriptor, and whether it bypasses the page cache: not where the file system
        refuses, or where it wants more than addresses, offsets and lengths in multiples of
        `ALIGNMENT`.

    Raises:
        OSError: It cannot be opened.
    """
    from flowkv.tiers.disk.files import FileIO  # a room that is built on this one

    fd = FileIO().open(path, write=write)
    try:
        return fd, set_direct(fd) if direct else set_flags(fd, 0)
    except BaseException:
        os.close(fd)
        raise


class DirectFiles:
    """What engines have in common that open files past the page cache.

    Attributes:
        direct: Whether they all are.
        why: Why not; "" as long as they are.
    """

    why = ""

    def __init__(self, direct: bool) -> None:
        self.direct = direct

    def open(self, path: str, *, write: bool) -> int:
        """Opens a regular file; the engine is not direct any more from the first that is not.

        Raises:
            OSError: It cannot be opened.
        """
        fd, direct = open_file(path, write=write, direct=self.direct)
        if not direct and self.direct:
            self.direct, self.why = False, f"no O_DIRECT for {path}"
        return fd


def set_direct(fd: int) -> bool:
    """Makes an open file bypass the page cache; False where that does not work."""
    try:
        if not hasattr(os, "O_DIRECT") or not aligned(fd):
            return set_flags(fd, 0)
        set_flags(fd, os.O_DIRECT)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP):
            return set_flags(fd, 0)
        raise
    return True


def set_flags(fd: int, flags: int) -> bool:
    """Sets exactly these flags: io_uring gives up on an O_NONBLOCK file rather than wait for it."""
    fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    return bool(flags)


def aligned(fd: int) -> bool:
    """Whether multiples of `ALIGNMENT` are enough for direct I/O, as far as the system tells."""
    if _STATX is None or ctypes.sizeof(ctypes.c_long) < 8:
        return True
    answer = ctypes.create_string_buffer(256)
    call = ctypes.CDLL(None, use_errno=True).syscall
    if call(_STATX, fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, answer):
        return True  # an old kernel, or one that may not be asked: the first transfer will tell
    (mask,) = struct.unpack_from("<I", answer.raw, _MASK_AT)
    if not mask & _STATX_DIOALIGN:
        return True
    return all(0 < align <= ALIGNMENT for align in struct.unpack_from("<II", answer.raw, _ALIGN_AT))


def allows_direct(directory: str) -> bool:
    """Whether files in a directory can bypass the page cache; tries with one that has no name.

    Where nothing may be written each file tells when it is opened.

    Raises:
        OSError: It is no directory, or its device fails.
    """
    try:
        fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in (errno.EROFS, errno.EACCES):
            return True
        raise
    try:
        return set_direct(fd)
    finally:
        os.close(fd)


# An engine of threads that make positional system calls: for where io_uring is not allowed.
#
# Each thread takes a share of what is queued, so that the threads seldom meet. The system calls are
# made with plain addresses and run without the interpreter's lock; between them every thread needs
# that lock, so this engine slows down while Python is busy, as io_uring's does not.

THREADS = 16
MOST_BYTES = 0x7FFF_F000  # of one system call
MOST_TAKEN = 8  # operations that a thread takes at once
CLOSE_S = 10.0

Row = tuple[int, int, int, int, int, int]
Call = Callable[[int, int, int, int], int]


class ThreadsEngine(DirectFiles):
    """An `IOEngine` over `pread` and `pwrite`.

    Args:
        direct: Open files with O_DIRECT; the engine's name is "threads" then, else "buffered".
        threads: Their number, which is the depth too; they start with the first operation.
        why: Why there is no better engine, for whoever reads statistics.
    """

    def __init__(self, *, direct: bool = True, threads: int = THREADS, why: str = "") -> None:
        super().__init__(direct)
        self.why, self.depth = why, threads
        self._reports = Reports()
        self._changed = threading.Condition()
        self._queue: deque[Row] = deque()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed, self._pid = False, os.getpid()
        library = ctypes.CDLL(None, use_errno=True)
        self._read = _positional(library, "pread")
        self._write = _positional(library, "pwrite")

    @property
    def name(self) -> str:
        """Either "threads", as long as files are direct, or "buffered"."""
        return "threads" if self.direct else "buffered"

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
