"""The `IOEngine` protocol: reads and writes of files in batches, completed later.

    submit(operations) -> ... -> wait(timeout_s) -> completions

Three engines implement it, and a tier takes the first that this machine allows (`open_best`):
io_uring, positional system calls on threads with O_DIRECT, and the same through the page cache.

Memory named by an operation belongs to the engine until its completion is reported, whatever
happens meanwhile: neither a deadline nor `cancel` makes it free before (DESIGN D10).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import secrets
import struct
import threading
import time
from bisect import bisect
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from flowkv.core.errors import ConfigError, StateError
from flowkv.core.files import open_descriptor
from flowkv.core.memory import address_of, own_memory

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
    fd = FileIO().open(path, write=write)
    try:
        return fd, set_direct(fd) if direct else set_flags(fd, 0)
    except BaseException:
        os.close(fd)
        raise


class DirectFiles:
    """A base of engines that open files past the page cache.

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
            while wanted > 0 and len(self._threads) < self.depth and self._start():
                wanted -= 1
            self._changed.notify(len(rows))

    def start(self) -> None:
        """Start a thread if there is none: at the end of the process none can be started."""
        with self._changed:
            if not self._threads and not self._closed:
                self._start()

    def _start(self) -> bool:
        thread = threading.Thread(target=self._run, name="flowkv io", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system has none now, or the interpreter is about to end
            if not self._threads:
                raise
            return False
        self._threads.append(thread)
        return True

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


# The file operations of a disk tier, in one object that tests and the simulator replace.

_KEEP_SIZE_AND_PUNCH_HOLE = 0x01 | 0x02
_LOCK_TRIES, _LOCK_PAUSE_S = 4, 0.01
ZEROS_BYTES = 1 << 20

Buffer = memoryview | bytearray | bytes


class FileIO:
    """Plain system calls. Every one may raise `OSError`; reads and writes may be short."""

    def open(self, path: str, *, write: bool) -> int:
        """Opens a regular file, creating it (only for us) when `write`; never follows a link.

        Raises:
            OSError: It cannot be opened, is no regular file, or belongs to another user.
        """
        flags = os.O_RDWR | os.O_CREAT if write else os.O_RDONLY
        fd = open_descriptor(path, flags, follow=False)
        if write and os.fstat(fd).st_uid != os.geteuid():
            os.close(fd)
            raise OSError(errno.EPERM, "the file belongs to another user", path)
        return fd

    def close(self, fd: int) -> None:
        """Closes a file."""
        os.close(fd)

    def size(self, fd: int) -> int:
        """Length of a file."""
        return os.fstat(fd).st_size

    def next_data(self, fd: int, offset: int) -> int:
        """Where the next bytes that are no hole begin, from `offset` on; the file's end if none."""
        try:
            return os.lseek(fd, offset, os.SEEK_DATA)
        except OSError as error:
            return self.size(fd) if error.errno == errno.ENXIO else offset

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """One `preadv`."""
        return os.preadv(fd, buffers, offset)

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """One `pwritev`."""
        return os.pwritev(fd, buffers, offset)

    def truncate(self, fd: int, size: int) -> None:
        """Sets the length of a file; growth is a hole."""
        os.ftruncate(fd, size)

    def punch(self, fd: int, offset: int, size: int) -> None:
        """Gives the blocks of a range back to the file system; it reads as zeros."""
        if _fallocate()(fd, _KEEP_SIZE_AND_PUNCH_HOLE, offset, size):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def sync(self, fd: int) -> None:
        """One `fdatasync`."""
        os.fdatasync(fd)

    def replace(self, source: str, target: str, *, durable: bool = True) -> None:
        """Renames a file over another, atomically; waits for the directory where `durable`."""
        os.replace(source, target)
        if durable:
            self.sync_directory(os.path.dirname(target))

    def sync_directory(self, path: str) -> None:
        """Waits until the device knows the directory's new names."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def make_directory(self, path: str) -> None:
        """Makes a directory for us only, and those above it; it may be there already."""
        os.makedirs(os.path.dirname(path), exist_ok=True)
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            if not os.path.isdir(path):
                raise

    def status(self, path: str) -> tuple[int, int]:
        """Owner (uid) and mode of what a path leads to."""
        found = os.stat(path)
        return found.st_uid, found.st_mode

    def restrict(self, path: str) -> None:
        """Makes a directory ours only."""
        os.chmod(path, 0o700)

    def names(self, path: str) -> list[str]:
        """What is in a directory."""
        return os.listdir(path)

    def remove(self, path: str) -> None:
        """Removes a file."""
        os.unlink(path)

    def free_bytes(self, path: str) -> int:
        """Bytes that the file system of a path can still take."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def same(self, fd: int, path: str) -> bool:
        """Whether a path leads to an open file."""
        try:
            there = os.stat(path, follow_symlinks=False)
        except OSError:
            return False
        mine = os.fstat(fd)
        return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)

    def lock(self, path: str, *, patient: bool = True) -> int:
        """Locks a file of that name, and notes our process in it; -1 if another one has it.

        `patient` tries more than once, as `inspect` holds a lock for an instant.
        """
        fd = self.open(path, write=True)
        try:
            if _flock(fd, patient=patient) and self.same(fd, path):
                os.ftruncate(fd, 0)
                os.pwrite(fd, b"%d\n" % os.getpid(), 0)
                return fd
        except OSError:
            os.close(fd)
            raise
        os.close(fd)
        return -1

    def lock_directory(self, path: str, *, patient: bool = True) -> int:
        """Locks a directory itself, whatever becomes of the files in it; -1 if another one has it.

        Raises:
            OSError: It cannot be opened.
        """
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if _flock(fd, patient=patient):
                return fd
        except OSError:
            return fd  # a file system that locks files only: their lock has to do
        os.close(fd)
        return -1

    def random(self, n_bytes: int) -> bytes:
        """Bytes that nobody can guess, for the name of a store."""
        return secrets.token_bytes(n_bytes)

    def unlock(self, fd: int) -> None:
        """Gives a lock up."""
        os.close(fd)


def _flock(fd: int, *, patient: bool) -> bool:
    for attempt in range(_LOCK_TRIES if patient else 1):
        if attempt:
            time.sleep(_LOCK_PAUSE_S)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    return False


@lru_cache(maxsize=1)
def _fallocate() -> Callable[[int, int, int, int], int]:
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "fallocate") or ctypes.sizeof(ctypes.c_long) < 8:  # off_t is a long
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    function = library.fallocate
    function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
    return cast(Callable[[int, int, int, int], int], function)


def read_fully(files: FileIO, fd: int, target: memoryview, offset: int) -> int:
    """Reads until `target` is full or the file ends; returns the bytes read."""
    done = 0
    while done < len(target):
        count = files.read(fd, [target[done:]], offset + done)
        if count <= 0:
            break
        done += count
    return done


def write_fully(files: FileIO, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
    """Writes all bytes of all buffers.

    Raises:
        OSError: From the system; `ENOSPC` when it takes no more bytes without saying why.
    """
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    while views:
        count = files.write(fd, views, offset)
        if count <= 0:
            raise OSError(errno.ENOSPC, "the file takes no more bytes")
        offset += count
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if views and count:
            views[0] = views[0][count:]


def read_file(files: FileIO, path: str, most_bytes: int, *, ours: bool = False) -> bytes:
    """The content of a small file; of a larger one no more than one byte beyond `most_bytes`.

    Args:
        files: File operations.
        path: The file.
        most_bytes: Most that it should hold.
        ours: Refuse a file of another user.

    Raises:
        OSError: It cannot be read, is no regular file, or belongs to somebody else.
    """
    fd = files.open(path, write=False)
    try:
        if ours and os.fstat(fd).st_uid != os.geteuid():
            raise OSError(errno.EPERM, "the file belongs to another user", path)
        data = memoryview(bytearray(min(files.size(fd), most_bytes + 1)))
        return bytes(data[: read_fully(files, fd, data, 0)])
    finally:
        files.close(fd)


def replace_file(files: FileIO, path: str, data: bytes) -> None:
    """Writes a small file, which appears whole or not at all.

    Raises:
        OSError: The old one, if there was one, is still there.
    """
    temporary = f"{path}.tmp"
    fd = files.open(temporary, write=True)
    try:
        files.truncate(fd, 0)
        write_fully(files, fd, [data], 0)
        files.sync(fd)
    finally:
        files.close(fd)
    files.replace(temporary, path)


@lru_cache(maxsize=1)
def zeros() -> memoryview:
    """`ZEROS_BYTES` zeros, aligned as files that bypass the page cache want them."""
    return own_memory(ZEROS_BYTES).toreadonly()


def wipe(files: FileIO, fd: int, offset: int, size: int) -> None:
    """Overwrites a part of a file.

    Raises:
        OSError: Some of it may still be there.
    """
    for at in range(0, size, ZEROS_BYTES):
        write_fully(files, fd, [zeros()[: min(ZEROS_BYTES, size - at)]], offset + at)


def reason_of(error: OSError) -> str:
    """The system's short name of an error, such as "ENOSPC"."""
    return errno.errorcode.get(error.errno or 0, "EIO")


def reason_of_ring(error: OSError) -> str:
    """What the system's name for an error means to whoever wants io_uring."""
    name = errno.errorcode.get(error.errno or 0, "EIO")
    if error.errno == errno.EPERM:
        return f"{name}: forbidden by a seccomp filter or kernel.io_uring_disabled"
    if error.errno == errno.ENOSYS:
        return f"{name}: the kernel has none, or an old one"
    if error.errno == errno.ENOMEM:
        return f"{name}: beyond the limit of locked memory, `ulimit -l`"
    return name


# Staging memory: one mapping that disks, networks and GPUs move bytes into and out of.


class Extents:
    """Free pages of a range: extents in order, the first that is large enough is taken.

    Args:
        pages: Their number.

    Attributes:
        free_pages: How many are free.
    """

    def __init__(self, pages: int) -> None:
        self.free_pages = pages
        self._firsts, self._counts = [0], [pages]

    def take(self, pages: int) -> int | None:
        """The first of so many neighbouring pages, or None where there are not as many."""
        for at, count in enumerate(self._counts):
            if count >= pages:
                first = self._firsts[at]
                self._firsts[at], self._counts[at] = first + pages, count - pages
                if count == pages:
                    del self._firsts[at], self._counts[at]
                self.free_pages -= pages
                return first
        return None

    def give_back(self, first: int, pages: int) -> None:
        """Frees pages; neighbours that are free become one extent."""
        self.free_pages += pages
        at = bisect(self._firsts, first)
        if at < len(self._firsts) and self._firsts[at] == first + pages:
            pages += self._counts.pop(at)
            del self._firsts[at]
        if at and self._firsts[at - 1] + self._counts[at - 1] == first:
            self._counts[at - 1] += pages
        else:
            self._firsts.insert(at, first)
            self._counts.insert(at, pages)


PAGE_BYTES = 4096

_kept: list[Any] = []  # mappings that somebody may still write to: never unmapped


class ArenaSlot:
    """A piece of an arena.

    Attributes:
        arena: The arena.
        address: Where it begins, a multiple of 4096.
        n_bytes: As many as were asked for.
        view: Them.
    """

    __slots__ = ("_state", "address", "arena", "n_bytes", "view")

    def __init__(self, arena: Arena, address: int, view: memoryview) -> None:
        self.arena, self.address, self.view, self.n_bytes = arena, address, view, len(view)
        self._state = "taken"

    def __repr__(self) -> str:
        return f"Slot({self.address:#x}, {self.n_bytes} bytes, {self._state})"

    @property
    def retired(self) -> bool:
        """Whether its operation is overdue."""
        return self._state == "retired"

    @property
    def _pages(self) -> int:
        """What it occupies."""
        return max(1, -(-self.n_bytes // PAGE_BYTES))


class Arena:
    """An anonymous mapping cut into slots. Thread-safe.

    Args:
        n_bytes: Its size, rounded up to 4096. Memory is committed as it is first touched, in huge
            pages where the system has them: fewer page table entries for every device that reads
            it.

    Attributes:
        address: Where it begins; a multiple of 2 MiB.
        n_bytes: Its size.
        view: All of it.
        most_retired_bytes: A quarter; beyond so many retired bytes it is `clogged`.

    Raises:
        ConfigError: The size is not positive.
    """

    def __init__(self, n_bytes: int) -> None:
        if n_bytes <= 0:
            raise ConfigError(f"an arena of {n_bytes} bytes", "Give it at least 4096 bytes")
        self.n_bytes = -(-n_bytes // PAGE_BYTES) * PAGE_BYTES
        self.view = own_memory(self.n_bytes)
        self._map: Any = self.view.obj
        self.address = address_of(self.view)
        self._lock = threading.Lock()
        self._extents = Extents(self.n_bytes // PAGE_BYTES)
        self.most_retired_bytes, self._retired_bytes = self.n_bytes // 4, 0

    @property
    def retired_bytes(self) -> int:
        """Bytes of slots whose operation is overdue."""
        return self._retired_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes in no slot; not all of them may lie side by side."""
        return self._extents.free_pages * PAGE_BYTES

    @property
    def clogged(self) -> bool:
        """Whether so much is retired that its engine should be left alone: open the breaker."""
        return self._retired_bytes > self.most_retired_bytes

    def take(self, n_bytes: int) -> ArenaSlot | None:
        """A slot of at least `n_bytes`, with whatever was there before; None if there is no room.

        Raises:
            StateError: The arena is closed.
        """
        with self._lock:
            if self._map is None:
                raise StateError("the staging arena is closed", "Make another one")
            first = self._extents.take(max(1, -(-n_bytes // PAGE_BYTES)))
            if first is None:
                return None
            start = first * PAGE_BYTES
            return ArenaSlot(self, self.address + start, self.view[start : start + n_bytes])

    def give_back(self, slot: ArenaSlot) -> None:
        """Frees a slot that nothing moves bytes into or out of.

        Raises:
            StateError: It is not taken.
        """
        with self._lock:
            self._become(slot, "taken", "free")
            self._free(slot)

    def retire(self, slot: ArenaSlot) -> None:
        """Keeps a slot from being used until `revive`: its operation is overdue.

        Raises:
            StateError: It is not taken.
        """
        with self._lock:
            self._become(slot, "taken", "retired")
            self._retired_bytes += slot._pages * PAGE_BYTES

    def revive(self, slot: ArenaSlot) -> None:
        """Frees a retired slot: its operation has ended after all.

        Raises:
            StateError: It is not retired.
        """
        with self._lock:
            self._become(slot, "retired", "free")
            self._retired_bytes -= slot._pages * PAGE_BYTES
            self._free(slot)

    def close(self) -> None:
        """Gives the memory back to the system, unless a retired slot may still be written to.

        Memory that somebody holds a view of stays until that is gone.
        """
        with self._lock:
            mapping, self._map = self._map, None
            if mapping is None:
                return
            self.view, self.n_bytes = memoryview(b""), 0
            if self._retired_bytes:
                _kept.append(mapping)
                return
        with contextlib.suppress(BufferError):  # the last view unmaps it
            mapping.close()

    def _become(self, slot: ArenaSlot, before: str, after: str) -> None:
        if slot.arena is not self or slot._state != before or self._map is None:
            raise StateError(f"{slot!r} is not {before}", "Give back what was taken, once")
        slot._state = after

    def _free(self, slot: ArenaSlot) -> None:
        self._extents.give_back((slot.address - self.address) // PAGE_BYTES, slot._pages)
