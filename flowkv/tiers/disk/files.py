"""The file operations of a disk tier, in one object, so that a test can make any of them fail."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import cast

_KEEP_SIZE_AND_PUNCH_HOLE = 0x01 | 0x02

Buffer = memoryview | bytearray | bytes


class FileIO:
    """Plain system calls. Every one may raise `OSError`; reads and writes may be short."""

    def open(self, path: str, *, write: bool) -> int:
        """Opens a regular file, creating it (only for us) when `write`; never follows a link."""
        flags = os.O_RDWR | os.O_CREAT if write else os.O_RDONLY
        # O_NONBLOCK, without effect on files, keeps a pipe of that name from blocking us
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a regular file", path)
        return fd

    def close(self, fd: int) -> None:
        """Closes a file."""
        os.close(fd)

    def size(self, fd: int) -> int:
        """Length of a file."""
        return os.fstat(fd).st_size

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

    def replace(self, source: str, target: str) -> None:
        """Renames a file over another, atomically, and waits until the directory is written."""
        os.replace(source, target)
        self.sync_directory(os.path.dirname(target))

    def sync_directory(self, path: str) -> None:
        """Waits until the device knows the directory's new names."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


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


def reason_of(error: OSError) -> str:
    """The system's short name of an error, such as "ENOSPC"."""
    return errno.errorcode.get(error.errno or 0, "EIO")
