"""The `IOEngine` protocol: reads and writes of files in batches, completed later.

    submit(operations) -> ... -> wait(timeout_s) -> completions

Three engines implement it, and a tier takes the first that this machine allows (`open_engine`):
io_uring, positional system calls on threads with O_DIRECT, and the same through the page cache.

Memory named by an operation belongs to the engine until its completion is reported: neither a
deadline nor `cancel` frees it before (DESIGN D10).
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

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowkv.core.errors import ConfigError, StateError
from flowkv.core.files import open_descriptor
from flowkv.core.memory import address_of, own_memory
from flowkv.core.reaper import begin

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
names the operation in its completion, and is unique among the operations in flight."""

COMPLETION = np.dtype([("tag", "<u8"), ("result", "<i8")])
"""One completion: bytes moved in total (short reads and writes are continued; fewer than `length`
only where a file ends), or a negative errno."""

ALIGNMENT = 4096

Operations = NDArray[Any]  # of dtype OPERATION
Completions = NDArray[Any]  # of dtype COMPLETION


class IOEngine(Protocol):
    """Engine that moves bytes between memory and files. Thread-safe.

    Attributes:
        direct: Whether files that it opens bypass the page cache.
        depth: Most operations passed to the system at a time; more may be submitted.
    """

    direct: bool
    depth: int

    @property
    def name(self) -> str:
        """Return the engine's name: "io_uring", "threads" or "buffered"."""

    def open(self, path: str, *, write: bool) -> int:
        """Open a regular file for this engine; as `FileIO.open`, with O_DIRECT where `direct`.

        Raises:
            OSError: It cannot be opened.
        """

    def submit(self, operations: Operations) -> None:
        """Start operations, or none if that raises; the array may be reused at once.

        Raises:
            StateError: The engine is closed.
        """

    def wait(self, timeout_s: float = 0.0) -> Completions:
        """Return the completions so far; wait up to `timeout_s` for the first one."""

    def cancel(self, tags: NDArray[np.uint64]) -> None:
        """Ask for an end of operations; each still completes, with -ECANCELED if that worked."""

    def close(self) -> bool:
        """End operations in flight; False if one never ended: its memory must never be reused.

        Safe to call again. Files stay open: they belong to the caller.
        """


# Completions on their way from an engine to its waiting callers.


class Reports:
    """Queue of completions. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._rows: list[tuple[int, int]] = []
        self._ended = False

    def post(self, rows: Sequence[tuple[int, int]]) -> None:
        """Add completions: pairs of tag and result."""
        with self._changed:
            self._rows += rows
            self._changed.notify_all()

    def reap(self, timeout_s: float) -> Completions:
        """Take all completions; wait up to `timeout_s` for the first one."""
        limit_s = min(timeout_s, threading.TIMEOUT_MAX)
        with self._changed:
            self._changed.wait_for(lambda: self._rows or self._ended, limit_s)
            rows, self._rows = self._rows, []
        return np.array(rows, COMPLETION)

    def close(self) -> None:
        """Wake all waiting callers, now and later; further completions are kept until taken."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()


# Opening of files past the page cache, where their file system allows that.

_STATX = {"x86_64": 332, "aarch64": 291}.get(platform.machine())
_STATX_DIOALIGN = 0x2000
_AT_EMPTY_PATH = 0x1000
_MASK_AT, _ALIGN_AT = 0, 0x98  # offsets of stx_mask, and of stx_dio_mem_align and _offset_align


class DirectFiles:
    """Base of engines that open files past the page cache.

    Attributes:
        direct: Whether all files bypass it.
        why: The reason if they do not; "" as long as they do.
    """

    why = ""

    def __init__(self, direct: bool) -> None:
        self.direct = direct

    def open(self, path: str, *, write: bool) -> int:
        """Open a regular file; after the first indirect one, the engine is not direct any more.

        A file bypasses the page cache unless the file system refuses, or requires more than
        addresses, offsets and lengths in multiples of `ALIGNMENT`.

        Raises:
            OSError: It cannot be opened.
        """
        fd = FileIO().open(path, write=write)
        try:
            direct = set_direct(fd) if self.direct else set_flags(fd, 0)
        except BaseException:
            os.close(fd)
            raise
        if not direct and self.direct:
            self.direct, self.why = False, f"no O_DIRECT for {path}"
        return fd


def set_direct(fd: int) -> bool:
    """Make an open file bypass the page cache; False where that does not work."""
    set_flags(fd, 0)
    try:
        return hasattr(os, "O_DIRECT") and aligned(fd) and set_flags(fd, os.O_DIRECT)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP):
            return False
        raise


def set_flags(fd: int, flags: int) -> bool:
    """Set exactly these flags: with O_NONBLOCK io_uring would not wait for a file."""
    fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    return bool(flags)


def aligned(fd: int) -> bool:
    """Return whether `ALIGNMENT` suffices for direct I/O, as far as the system reports."""
    if _STATX is None or ctypes.sizeof(ctypes.c_long) < 8:
        return True
    answer = ctypes.create_string_buffer(256)
    call = ctypes.CDLL(None, use_errno=True).syscall
    if call(_STATX, fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, answer):
        return True  # an old kernel, or one that forbids the question: the first transfer decides
    (mask,) = struct.unpack_from("<I", answer.raw, _MASK_AT)
    if not mask & _STATX_DIOALIGN:
        return True
    return all(0 < align <= ALIGNMENT for align in struct.unpack_from("<II", answer.raw, _ALIGN_AT))


def allows_direct(directory: str) -> bool:
    """Return whether files in a directory can bypass the page cache; try with an unnamed file.

    In a read-only directory the answer is True, and each file is tested when it is opened.

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


# Engine of threads that make positional system calls, for systems without io_uring.
#
# Each thread takes a share of the queue, so that the threads seldom meet. The system calls are made
# with plain addresses and run without the interpreter's lock; between them every thread needs that
# lock, so this engine slows down while Python is busy, and io_uring's does not.

THREADS = 16
MOST_BYTES = 0x7FFF_F000  # of one system call
MOST_TAKEN = 8  # operations that a thread takes at once
CLOSE_S = 10.0

Row = tuple[int, int, int, int, int, int]
Call = Callable[[int, int, int, int], int]


class ThreadsEngine(DirectFiles):
    """`IOEngine` over `pread` and `pwrite`.

    Args:
        direct: Open files with O_DIRECT; the engine's name is "threads" then, else "buffered".
        threads: Number of threads, which is the depth too; they start with the first operation.
        why: Reason why there is no better engine, for statistics.
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
        """Return "threads" as long as all files are direct, else "buffered"."""
        return "threads" if self.direct else "buffered"

    def submit(self, operations: Operations) -> None:
        """Queue operations for the threads.

        Raises:
            StateError: The engine is closed, or was opened before a fork.
            RuntimeError: No thread can start, and there is none.
        """
        if self._pid != os.getpid():
            raise StateError("the engine was opened before a fork", "Open another one, here")
        rows = np.asarray(operations, OPERATION).tolist()
        with self._changed:
            if self._closed:
                raise StateError("the engine is closed", "Open another one")
            wanted = len(self._queue) + len(rows) - self._idle
            while wanted > 0 and len(self._threads) < self.depth and self._start():
                wanted -= 1
            self._queue += rows
            self._changed.notify(len(rows))

    def start(self) -> None:
        """Start a thread if there is none: at the end of the process none can be started."""
        with self._changed:
            if not self._threads and not self._closed:
                self._start()

    def _start(self) -> bool:
        thread = begin(self._run, name="flowkv io")
        if thread is None and not self._threads:
            raise RuntimeError("no thread can start")
        self._threads += [thread] if thread else []
        return thread is not None

    def wait(self, timeout_s: float = 0.0) -> Completions:
        """Return the completions so far; wait up to `timeout_s` for the first one."""
        return self._reports.reap(timeout_s if self._pid == os.getpid() else 0.0)

    def cancel(self, tags: NDArray[np.uint64]) -> None:
        """End operations that no thread has begun."""
        unwanted = set(np.asarray(tags).tolist())
        with self._changed:
            ended = [row for row in self._queue if row[-1] in unwanted]
            if ended:
                self._queue = deque(row for row in self._queue if row[-1] not in unwanted)
                self._reports.post([(row[-1], -errno.ECANCELED) for row in ended])

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Cancel queued operations and wait for those under way; False if that took too long."""
        if self._pid != os.getpid():
            return True
        with self._changed:
            self._closed = True
            self._reports.post([(row[-1], -errno.ECANCELED) for row in self._queue])
            self._queue.clear()
            self._changed.notify_all()
        end_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        self._reports.close()
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        done: list[tuple[int, int]] = []
        while rows := self._next():
            for op, fd, offset, address, length, tag in rows:
                done.append((tag, self._do(op, fd, offset, address, length)))
            self._reports.post(done)
            done.clear()

    def _next(self) -> list[Row]:
        """Return a share of the queue; an empty list when the thread is to end."""
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
                # The rest of a direct read, of a file that ends within a sector, is not aligned.
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


# File operations of a disk tier, in one object that tests and the simulator replace.

_KEEP_SIZE_AND_PUNCH_HOLE = 0x01 | 0x02
_LOCK_TRIES, _LOCK_PAUSE_S = 4, 0.01
ZEROS_BYTES = 1 << 20

Buffer = memoryview | bytearray | bytes


class FileIO:
    """Plain system calls. All but `close` may raise `OSError`; reads and writes may be short."""

    def open(self, path: str, *, write: bool) -> int:
        """Open a regular file, creating it (for this user only) when `write`; never follow a link.

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
        """Close a file descriptor, which is gone even if the system reports an error."""
        with contextlib.suppress(OSError):
            os.close(fd)

    def size(self, fd: int) -> int:
        """Return the length of a file in bytes."""
        return os.fstat(fd).st_size

    def next_data(self, fd: int, offset: int) -> int:
        """Return the offset of the next data that is no hole; the file's end if there is none."""
        try:
            return os.lseek(fd, offset, os.SEEK_DATA)
        except OSError as error:
            return self.size(fd) if error.errno == errno.ENXIO else offset

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Call `preadv` once; return the bytes read."""
        return os.preadv(fd, buffers, offset)

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Call `pwritev` once; return the bytes written."""
        return os.pwritev(fd, buffers, offset)

    def truncate(self, fd: int, size: int) -> None:
        """Set the length of a file; growth is a hole."""
        os.ftruncate(fd, size)

    def punch(self, fd: int, offset: int, size: int) -> None:
        """Return the blocks of a range to the file system; the range reads as zeros."""
        if _fallocate()(fd, _KEEP_SIZE_AND_PUNCH_HOLE, offset, size):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def sync(self, fd: int) -> None:
        """Call `fdatasync` once."""
        os.fdatasync(fd)

    def replace(self, source: str, target: str, *, durable: bool = True) -> None:
        """Rename a file over another, atomically; wait for the directory if `durable`."""
        os.replace(source, target)
        if durable:
            self.sync_directory(os.path.dirname(target))

    def sync_directory(self, path: str) -> None:
        """Wait until the directory's new names are on the device."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def make_directory(self, path: str) -> None:
        """Make a directory for this user only, and its parents; it may be there already."""
        os.makedirs(path, 0o700, exist_ok=True)

    def status(self, path: str) -> tuple[int, int]:
        """Return the owner (uid) and mode of the file that a path leads to."""
        found = os.stat(path)
        return found.st_uid, found.st_mode

    def restrict(self, path: str) -> None:
        """Restrict a directory to this user."""
        os.chmod(path, 0o700)

    def names(self, path: str) -> list[str]:
        """Return the names in a directory."""
        return os.listdir(path)

    def remove(self, path: str) -> None:
        """Remove a file from its directory."""
        os.unlink(path)

    def free_bytes(self, path: str) -> int:
        """Return the bytes that the file system of a path can still take."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def same(self, fd: int, path: str) -> bool:
        """Return whether a path leads to an open file."""
        try:
            there, mine = os.stat(path, follow_symlinks=False), os.fstat(fd)
        except OSError:
            return False
        return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)

    def lock(self, path: str, *, patient: bool = True) -> int:
        """Lock a file and write this process's id to it; return its descriptor, -1 if it is locked.

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
        """Lock a directory itself, not a file; return its descriptor, -1 if it is locked.

        Raises:
            OSError: It cannot be opened.
        """
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if _flock(fd, patient=patient):
                return fd
        except OSError:
            return fd  # a file system that locks files only: the lock of the file must do
        os.close(fd)
        return -1

    def random(self, n_bytes: int) -> bytes:
        """Return unpredictable bytes, for the name of a store."""
        return secrets.token_bytes(n_bytes)

    def unlock(self, fd: int) -> None:
        """Release a lock by closing its descriptor."""
        self.close(fd)


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
    """Read until `target` is full or the file ends; return the bytes read."""
    done = 0
    while done < len(target):
        count = files.read(fd, [target[done:]], offset + done)
        if count <= 0:
            break
        done += count
    return done


def write_fully(files: FileIO, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
    """Write all bytes of all buffers.

    Raises:
        OSError: From the system; `ENOSPC` if it takes no more bytes without an error.
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
    """Return the content of a small file; at most one byte beyond `most_bytes` of a larger one.

    Args:
        files: File operations.
        path: The file.
        most_bytes: Most bytes that the file should have.
        ours: Refuse a file of another user.

    Raises:
        OSError: It cannot be read, is no regular file, or belongs to another user.
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
    """Write a small file, which appears whole or not at all.

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
    """Return `ZEROS_BYTES` zeros, aligned for files that bypass the page cache."""
    return own_memory(ZEROS_BYTES).toreadonly()


def wipe(files: FileIO, fd: int, offset: int, size: int) -> None:
    """Overwrite a part of a file with zeros.

    Raises:
        OSError: Some of it may still be there.
    """
    for at in range(0, size, ZEROS_BYTES):
        write_fully(files, fd, [zeros()[: min(ZEROS_BYTES, size - at)]], offset + at)


def reason_of(error: OSError) -> str:
    """Return the system's short name of an error, such as "ENOSPC"."""
    return errno.errorcode.get(error.errno or 0, "EIO")


# Staging memory: one mapping for transfers of disks, networks and GPUs.


class Extents:
    """Free pages of a range: extents in order; the first that is large enough is taken.

    Args:
        pages: Number of pages.

    Attributes:
        free_pages: Number of free pages.
    """

    def __init__(self, pages: int) -> None:
        self.free_pages = pages
        self._firsts, self._counts = [0], [pages]

    def allocate(self, pages: int, count: int = 1) -> list[int]:
        """Take neighbouring pages so often, or as often as there is room; return the first ones."""
        found, at = list[int](), 0
        while len(found) < count and at < len(self._counts):
            first, taken = self._firsts[at], min(self._counts[at] // pages, count - len(found))
            found += range(first, first + taken * pages, pages)
            self._firsts[at] += taken * pages
            self._counts[at] -= taken * pages
            if self._counts[at]:
                at += 1
            else:
                del self._firsts[at], self._counts[at]
        self.free_pages -= len(found) * pages
        return found

    def free(self, first: int, pages: int) -> None:
        """Free pages; free neighbours become one extent."""
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


class ArenaSlot(msgspec.Struct, eq=False):  # made without a call of Python
    """Piece of an arena.

    Attributes:
        arena: The arena.
        address: Start of the slot, a multiple of 4096.
        view: The memory.
        n_bytes: Requested bytes.
        taken_bytes: Bytes that the slot occupies, whole pages; 0 once it was given back.
    """

    arena: Arena
    address: int
    view: memoryview
    n_bytes: int
    taken_bytes: int


class Arena:
    """Anonymous mapping cut into slots. Thread-safe.

    Args:
        n_bytes: Its size, rounded up to 4096. Memory is committed as it is first touched, in huge
            pages where the system has them: fewer page table entries for every device that reads
            it.

    Attributes:
        address: Start of the mapping, a multiple of 2 MiB.
        n_bytes: Its size.
        view: All of it.

    Raises:
        ConfigError: The size is not positive.
    """

    def __init__(self, n_bytes: int) -> None:
        if n_bytes <= 0:
            raise ConfigError(f"an arena has {n_bytes} bytes", "Give it at least 4096 bytes")
        self.n_bytes = -(-n_bytes // PAGE_BYTES) * PAGE_BYTES
        self.view = own_memory(self.n_bytes)
        self._map: Any = self.view.obj
        self.address = address_of(self.view)
        self._lock = threading.Lock()
        self._extents = Extents(self.n_bytes // PAGE_BYTES)

    @property
    def free_bytes(self) -> int:
        """Return the bytes in no slot; they need not be side by side."""
        return self._extents.free_pages * PAGE_BYTES

    def acquire(self, n_bytes: int) -> ArenaSlot | None:
        """Return a slot of `n_bytes` with undefined content; None if there is no room.

        Raises:
            StateError: The arena is closed.
        """
        return next(iter(self.acquire_all(1, n_bytes)), None)

    def acquire_all(self, count: int, n_bytes: int) -> list[ArenaSlot]:
        """Return so many slots, or as many as there is room for; see `acquire`."""
        pages, view, address = max(1, -(-n_bytes // PAGE_BYTES)), self.view, self.address
        with self._lock:
            if self._map is None:
                raise StateError("the staging arena is closed", "Make another one")
            starts = map(PAGE_BYTES.__mul__, self._extents.allocate(pages, count))
        sizes = n_bytes, pages * PAGE_BYTES
        return [ArenaSlot(self, address + at, view[at : at + n_bytes], *sizes) for at in starts]

    def give_back(self, slot: ArenaSlot) -> None:
        """Free a slot that no operation uses any more.

        Raises:
            StateError: It is not taken.
        """
        with self._lock:
            if slot.arena is not self or not slot.taken_bytes or self._map is None:
                raise StateError(
                    f"a slot of {slot.n_bytes} bytes is not taken", "Give back each slot once"
                )
            first = (slot.address - self.address) // PAGE_BYTES
            self._extents.free(first, slot.taken_bytes // PAGE_BYTES)
            slot.taken_bytes = 0

    def close(self) -> None:
        """Return the memory to the system; memory with a view stays until the view is gone."""
        with self._lock:
            mapping, self._map = self._map, None
            self.view, self.n_bytes = memoryview(b""), 0
        if mapping is not None:
            with contextlib.suppress(BufferError):  # the last view unmaps it
                mapping.close()
