"""Opening files past the page cache, where their file system allows that."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import struct

from flowkv.tiers.io.engine import ALIGNMENT

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
