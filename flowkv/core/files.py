"""Opening of files that others name or write, errors of damaged ones, and writes of whole files."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
import struct
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

_T = TypeVar("_T")
_locking: weakref.WeakKeyDictionary[Any, Callable[[Any], object]] = weakref.WeakKeyDictionary()

MALFORMED = (ValueError, RecursionError, OverflowError)
"""Errors of parsers of JSON, TOML and msgpack for malformed or too deeply nested bytes."""

_YOUNG_S = 60.0

MOST_DIMENSIONS = 64
"""Most dimensions of a tensor, as in torch; the product of more takes long."""


def open_descriptor(
    path: str | os.PathLike[str], flags: int = os.O_RDONLY, *, follow: bool = True
) -> int:
    """Open a regular file, never a FIFO or a device: opening those may wait for ever, or act.

    Args:
        path: The file.
        flags: As for `os.open`; with O_CREAT the file is made for its owner only.
        follow: Whether the path may be a symbolic link.

    Raises:
        OSError: The path cannot be opened, or leads to no regular file.
    """
    flags |= os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        mode = os.stat(path, follow_symlinks=follow).st_mode
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
    else:  # a link is left to O_NOFOLLOW
        _refuse(stat.S_ISREG(mode) or stat.S_ISLNK(mode), path)
    fd = os.open(path, flags, 0o600)
    try:
        _refuse(stat.S_ISREG(os.fstat(fd).st_mode), path)
    except OSError:
        os.close(fd)
        raise
    return fd


def drop_in_children(owner: _T, drop: Callable[[_T], object]) -> None:
    """Call `drop(owner)` in forked children, where locks of a dead parent would live on."""
    _locking[owner] = drop


def renew_lock(owner: object, lock: Any) -> None:
    """Free an owner's lock in forked children, unless the thread that forked holds it.

    Any other holder is a thread that does not exist there, so that a child would wait for ever.
    """
    mine = getattr(lock, "_is_owned", bool)
    drop_in_children(owner, lambda _: mine() or lock._at_fork_reinit())


def _drop_all() -> None:
    for owner, drop in list(_locking.items()):
        with suppress(OSError):
            drop(owner)


os.register_at_fork(after_in_child=_drop_all)


def lock_byte(fd: int, at: int, how: int) -> bool:
    """Lock or unlock a byte for a descriptor, which may be behind the file's end, without a wait.

    Args:
        fd: The descriptor; the lock ends with it, and with the process.
        at: The byte.
        how: `fcntl.F_RDLCK`, `F_WRLCK` or `F_UNLCK`.

    Returns:
        Whether that worked.
    """
    wish = struct.pack("hhqqi4x", how, os.SEEK_SET, at, 1, 0)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, wish)
    except (OSError, ValueError):  # taken, a file system without locks, or the file was closed
        return False
    return True


def sensible(shape: tuple[int, ...]) -> bool:
    """Return whether a tensor can have that shape: few dimensions, none of them negative."""
    return len(shape) <= MOST_DIMENSIONS and min(shape, default=0) >= 0


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading; see `open_descriptor`."""
    return os.fdopen(open_descriptor(path), "rb")


def remove_left(path: Path) -> None:
    """Remove a file, unless it is new, or locked by its writer."""
    with (
        suppress(OSError),
        os.fdopen(open_descriptor(path, os.O_WRONLY, follow=False), "wb") as file,
    ):
        young = abs(time.time() - path.stat().st_mtime) < _YOUNG_S  # perhaps not locked yet
        if not young and lock_byte(file.fileno(), 0, fcntl.F_WRLCK):
            path.unlink()


def _open_beside(path: Path, mode: int) -> tuple[Path, BinaryIO]:
    """Open a new file that will replace another one; remove those of writers that were killed.

    Raises:
        OSError: It cannot be opened, or is to replace a device, a directory, or such.
    """
    with suppress(FileNotFoundError):
        _refuse(stat.S_ISREG(os.stat(path).st_mode), path)  # nor what a link, as /dev/stdout, shows
    stem = path.name[:50]  # names have an end, too
    own = re.compile(rf"\.{re.escape(stem)}\.[0-9a-f]{{16}}\.part")
    for name in filter(own.fullmatch, os.listdir(path.parent)):
        remove_left(path.with_name(name))
    temporary = path.with_name(f".{stem}.{secrets.token_hex(8)}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.fdopen(os.open(temporary, flags, mode), "wb")
    lock_byte(file.fileno(), 0, fcntl.F_WRLCK)
    return temporary, file


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Write a file that appears whole or not at all, in place of an old one.

    Raises:
        OSError: It cannot be written; the old one, if there was one, is still there.
    """
    temporary, file = _open_beside(path, mode)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _refuse(regular: bool, path: str | os.PathLike[str]) -> None:
    if not regular:
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
