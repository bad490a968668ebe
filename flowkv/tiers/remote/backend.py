"""The `Backend` protocol: the few operations that a remote engine must provide.

Objects have names (64 hex digits, made from keys and from nothing else) and are written whole. All
calls block, and may be made from several threads at once. Each gets a time limit in seconds; the
tier abandons a call that takes longer, and does not reuse its memory until it returns.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol, TypedDict

from flowkv.core.clock import Clock
from flowkv.core.config import without_secrets
from flowkv.core.errors import ConfigError
from flowkv.tiers.frame import Envelope

NAME = re.compile("[0-9a-f]{64}")
"""Names of objects."""
_PREFIX = re.compile(r"[A-Za-z0-9_.-]{1,64}")
CHANGED = "another process wrote it"


class Listed(NamedTuple):
    """One object of a listing.

    Attributes:
        name: Its name.
        n_bytes: Its length.
        stored_ns: Time of writing, in nanoseconds since 1970; 0 where unknown.
    """

    name: str
    n_bytes: int
    stored_ns: int = 0


class Backend(Protocol):
    """Engine as a store of named byte strings.

    One that writes files under another name first has `sweep()` as well, which removes what is left
    of those, of any age: an erasure calls it, and a store under way may fail by it. It raises where
    its directory is another one by now.

    One that can has `swap(name, was, data, timeout_s)`, too: it writes an object if its bytes are
    still `was` (None: if it is missing), and raises an error with `errno.EBUSY` if not. Without it,
    two nodes that erase at once may lose the note for other nodes of one erasure.

    Every failure is an `OSError`: `TimeoutError` after the time limit, `PermissionError` if the
    engine refuses and will refuse again (never retried), one with `errno.ENOSPC` if it is full,
    `ConnectionError` or any other if it may work another time, with `errno.EAGAIN` if it did
    nothing: behind another one it may still do what was asked.

    Attributes:
        name: Shown in statistics and errors, with the address and without secrets.
        asks: Most names that `exists` looks up quickly (some milliseconds) in one call; 0 where a
            look-up costs a request per name, so that only listed names count as known.
    """

    name: str
    asks: int

    def get(self, name: str, offset: int, into: memoryview, timeout_s: float) -> memoryview | None:
        """Read from `offset` on as many bytes as `into` holds, or the object has.

        Returns:
            The beginning of `into`; or, from a client that receives into memory of its own, that
                memory, owned by the caller from now on. None if there is no such object.
        """

    def put(self, name: str, data: memoryview, timeout_s: float) -> None:
        """Write an object whole, replacing an earlier one; readers see all of it or nothing."""

    def delete(self, names: Sequence[str], timeout_s: float) -> None:
        """Remove objects; missing names are no error."""

    def exists(self, names: Sequence[str], timeout_s: float) -> list[bool]:
        """Return which objects are there, according to the engine."""

    def list(self, timeout_s: float) -> Iterator[Listed]:
        """Yield all objects, in any order; `timeout_s` is for each of perhaps many requests.

        Names that are not 64 hex digits are not the tier's, and are left out.
        """

    def close(self) -> None:
        """Close connections; called once, when no call is under way."""


# Limits of a remote tier: concurrency, memory and time.


class RemoteLimits(NamedTuple):
    """Limits of a remote tier: concurrency, memory and time.

    Attributes:
        threads: Calls to the engine at a time.
        queue_bytes: Stores waiting beyond this many bytes are `FAILED` with reason "busy".
        spares: Most threads that are replaced while they hang.
        retired_bytes: Memory of hanging calls beyond which no call is begun.
        call_s: Seconds for one request without a deadline of its own: a page of a listing, a batch
            of deletions.
        open_s: Longest wait for the first listing at opening; a longer listing goes on in the
            background.
        close_s: Longest wait for stores under way at closing.
        erase_s: Longest time of `erase`; for a thousand frames twice as long, and so on.
        pause_s: First pause of an engine that failed three times.
        every_s: Seconds between two looks at frames of other writers, where the engine makes that
            cheap.
    """

    threads: int = 8
    queue_bytes: int = 1 << 28
    spares: int = 16
    retired_bytes: int = 1 << 28
    call_s: float = 5.0
    open_s: float = 5.0
    close_s: float = 10.0
    erase_s: float = 30.0
    pause_s: float = 0.5
    every_s: float = 15.0


class RemoteOptions(TypedDict, total=False):
    """Options of all remote tiers besides address and capacity; see `RemoteTier`."""

    name: str
    envelope: Envelope | None
    clock: Clock | None
    limits: RemoteLimits | None


def sweep(root: str, folder: str, unfinished: re.Pattern[str], inode: int) -> None:
    """Remove the files of a folder whose names match.

    Args:
        root: A directory.
        folder: Its folder, or ".".
        unfinished: Pattern of the names.
        inode: Number of the directory that was opened; a file system keeps it when mounted anew.

    Raises:
        OSError: Some may still be there, as may frames: the directory was moved or unmounted.
    """
    if os.stat(root).st_ino != inode:
        raise OSError(errno.ESTALE, "another directory is in its place", root)
    with suppress(FileNotFoundError):
        for entry in os.scandir(f"{root}/{folder}"):
            if unfinished.fullmatch(entry.name):
                with suppress(FileNotFoundError):
                    os.unlink(entry)


def swap(backend: Backend, path: str, was: bytes | None, data: memoryview, left_s: float) -> None:
    """Write an object of a directory if its bytes are still `was`, under a lock on a file there.

    Raises:
        OSError: As every backend.
    """
    name, room = os.path.basename(path), memoryview(bytearray(len(was or b"") + 1))
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(f"{path}.lock", flags, 0o666), "rb", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(errno.EBUSY, f"another process holds {path}.lock") from None
        except OSError:
            pass  # the file system has no locks
        try:
            if backend.get(name, 0, room, left_s) != was:
                raise OSError(errno.EBUSY, CHANGED)
            backend.put(name, data, left_s)
        finally:
            with suppress(OSError):  # now, as a forked child may have the file open, too
                fcntl.flock(file, fcntl.LOCK_UN)


def prefix_of(options: dict[str, str]) -> str:
    """Return the prefix of keys that the options of a URI name.

    Raises:
        ConfigError: It has other characters, or too many.
    """
    prefix = options.get("prefix", "flowkv")
    if not _PREFIX.fullmatch(prefix):
        raise ConfigError(f"prefix {prefix!r}", "Use up to 64 letters, digits, '_', '.' or '-'")
    return prefix


def shown(uri: str) -> str:
    """Return a URI without user, password and options."""
    return without_secrets(uri).partition("?")[0].replace("//...@", "//")
