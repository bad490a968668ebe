"""The file operations of a disk tier, in one object that tests and the simulator replace."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import stat
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import cast

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
        # O_NONBLOCK, without effect on files, keeps a pipe of that name from blocking us
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a regular file", path)
        if write and status.st_uid != os.geteuid():
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
    return memoryview(mmap.mmap(-1, ZEROS_BYTES)).toreadonly()


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
