"""A disk tier's directory: its owner, its superblock, and its protected files.

    superblock.json   description: format, sizes, store id         written by rename, with a crc32
    lock              held (flock) by the one process that writes; holds its process id
    journal           slots of the frames                          `disk.journal`
    slab-<granules>   the frames                                   `disk.store`
    learned           state that policies learned, if any          `flowkv.cache.stack`
    erased            erasures of caches, for other caches         `tiers.erasure_log`
    aside-<n>         a store of another format, moved out of the way and never deleted

The directory is 0700 and its files 0600; no link is followed, and no name in it comes from a key.
The writer holds the directory itself (flock), too: removing the lock file makes no second writer,
and the first one stops when it finds that its lock file, or the directory, is gone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import os
import re
import stat
import time
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from flowkv.core.errors import StoreError
from flowkv.core.files import MALFORMED, drop_in_children, open_descriptor
from flowkv.core.geometry import GRANULE_BYTES
from flowkv.core.reaper import REAPER
from flowkv.tiers.disk.journal import PAGE_BYTES, RECORD_BYTES, peek_store_id
from flowkv.tiers.frame import VERSION
from flowkv.tiers.io.engine import FileIO, read_file, replace_file

FORMAT = 2
SUPERBLOCK, LOCK, JOURNAL, LEARNED = "superblock.json", "lock", "journal", "learned"
ERASED = "erased"

RECENT_S = 7 * 86400
"""Frames of a namespace without a bound cache for this long are the first to be evicted."""
_NOTED_S, _NAME_LETTERS = 3600, 200

_OURS = re.compile(r"(superblock\.json|journal|learned)(\.tmp)?|lock|erased|slab-\d{8}|aside-\d+")
_MOST_BYTES = 1 << 20
_PATIENCE_S = 10.0  # longest wait for the end of garbage owners


class Named(msgspec.Struct, kw_only=True, frozen=True):
    """Namespace that a cache was bound to: its readable name, and the time of its last use."""

    name: str
    used_s: int


class Superblock(msgspec.Struct, kw_only=True):
    """Description of a store. Fields may be added; `store` and `format` stay in every format.

    `namespaces` (digests, in hex) are those that caches were bound to; frames of others, such as
    frames of earlier versions, are evicted first.
    """

    store: str
    format: int
    store_id: str = ""
    frame_version: int = VERSION
    granule_bytes: int = GRANULE_BYTES
    journal_page_bytes: int = PAGE_BYTES
    record_bytes: int = RECORD_BYTES
    capacity_bytes: int = 0
    namespaces: dict[str, Named] = {}

    @property
    def known(self) -> bool:
        """Return whether this version reads and writes such a store."""
        sizes = self.granule_bytes, self.journal_page_bytes, self.record_bytes, self.frame_version
        here = GRANULE_BYTES, PAGE_BYTES, RECORD_BYTES, VERSION
        return self.format == FORMAT and sizes == here


def read_superblock(files: FileIO, directory: Path) -> Superblock | None:
    """Return the superblock, or None if it is missing or damaged.

    Raises:
        OSError: It is there and cannot be read.
    """
    try:
        text = read_file(files, str(directory / SUPERBLOCK), _MOST_BYTES)
    except FileNotFoundError:
        return None
    body, _, check = text.rstrip(b"\n").rpartition(b"\n")
    if check != b"%08x" % zlib.crc32(body):
        return None
    try:
        superblock = msgspec.json.decode(body, type=Superblock)
        return superblock if superblock.store == "flowkv" else None
    except MALFORMED:
        return None


def write_superblock(files: FileIO, directory: Path, superblock: Superblock) -> None:
    """Write the superblock atomically, with its crc32."""
    body = msgspec.json.format(msgspec.json.encode(superblock))
    text = body + b"\n%08x\n" % zlib.crc32(body)
    replace_file(files, str(directory / SUPERBLOCK), text)


class Home:
    """A store's directory, opened by its owner or by a reader.

    Args:
        files: File operations.
        directory: Made if it is missing.
        capacity_bytes: Recorded in the superblock.
        exclusive: Refuse to be a mere reader.

    Attributes:
        path: The directory.
        owner: Whether this object may write.
        obstacle: The reason why it may not, other than another owner.
        title: The model of its frames; "" while that is not known.
        superblock: Superblock of the directory; None while its owner is still making it, or if this
            version cannot read it.
        found: Whether the superblock was there before.
        most: Most namespaces that are recorded.

    Raises:
        StoreError: The directory cannot be used; the message has the remedy.
    """

    most = 256

    def __init__(
        self, files: FileIO, directory: str, capacity_bytes: int, *, exclusive: bool
    ) -> None:
        if not directory:
            raise StoreError("a disk tier has no path", "Give it a directory of its own")
        # Absolute, because slab files are opened when they are needed, and programs change
        # directory.
        self.path, self._files = Path(directory).expanduser().absolute(), files
        self._lock_path = str(self.path / LOCK)
        self.superblock: Superblock | None = None
        self.found = False
        self._lock_fd = self._directory_fd = -1
        self.owner, self.obstacle, self.title = False, "", ""
        try:
            self._prepare()
            if not self._lock() and not self.obstacle and self._collected():
                self._lock()
            if not self.owner and exclusive:
                raise StoreError(
                    f"{self.path} can only be read ({self.obstacle})"
                    if self.obstacle
                    else f"{owner_of(self.path)} {self.path}",
                    "Close the other one, choose another directory, or open without exclusive=True",
                )
            self._identify(capacity_bytes)
            if self.obstacle and not self.found:
                raise OSError(errno.EACCES, self.obstacle)
        except OSError as error:
            self.close()
            if isinstance(error, StoreError):
                raise
            raise StoreError(
                f"directory {self.path} cannot be used ({error.strerror})",
                "Choose a directory on a local disk that this user may write to",
            ) from error
        _homes.add(self)
        drop_in_children(self, Home.close)

    def holds(self) -> bool:
        """Return whether this object still owns the directory at the path, by its own lock file."""
        return self.owner and self._files.same(self._lock_fd, self._lock_path)

    def take_over(self, capacity_bytes: int) -> bool:
        """Make a reader the owner if there is none any more; return whether it is the owner now."""
        try:
            if not self.owner and not self.obstacle and self._lock(patient=False):
                self._guard(empty=False)
                self._identify(capacity_bytes)
        except (OSError, StoreError):
            self.close()
        return self.owner

    def look_again(self) -> Superblock | None:
        """Read the superblock again, for a reader that came before the owner wrote it."""
        there = read_superblock(self._files, self.path)
        if there is not None and there.known:
            self.superblock = there
        return self.superblock

    def name(self, bound: Mapping[bytes, str]) -> None:
        """Record the namespaces of bound caches; write if they changed or some time passed.

        Raises:
            OSError: It could not be written.
        """
        there, now_s = self.superblock, int(time.time())
        if there is None or not self.owner:
            return
        known, fresh = there.namespaces, dict[str, Named]()
        for digest, title in bound.items():
            before, name = known.get(digest.hex()), title[:_NAME_LETTERS]
            lately = before is not None and 0 <= now_s - before.used_s < _NOTED_S
            if before is None or before.name != name or not lately:
                fresh[digest.hex()] = Named(name=name, used_s=now_s)
        if fresh:
            newest = sorted((known | fresh).items(), key=lambda one: one[1].used_s, reverse=True)
            there.namespaces = dict(newest[: self.most])
            write_superblock(self._files, self.path, there)

    def unbind(self, namespaces: Iterable[bytes]) -> None:
        """Remove the records of namespaces.

        Raises:
            OSError: It could not be written.
        """
        there, gone = self.superblock, {digest.hex() for digest in namespaces}
        if there is not None and self.owner and gone & there.namespaces.keys():
            there.namespaces = {d: n for d, n in there.namespaces.items() if d not in gone}
            write_superblock(self._files, self.path, there)

    def in_use(self, namespace: bytes) -> bool:
        """Return whether a cache was bound to a namespace lately."""
        named = self.superblock.namespaces.get(namespace.hex()) if self.superblock else None
        return named is not None and abs(time.time() - named.used_s) < RECENT_S

    def aside(self) -> list[str]:
        """Return the stores of other formats that were moved out of the way."""
        return [name for name in self._files.names(str(self.path)) if name.startswith("aside-")]

    def close(self) -> None:
        """Give up ownership and release its locks."""
        self.owner = False
        locks, self._lock_fd, self._directory_fd = (self._lock_fd, self._directory_fd), -1, -1
        for fd in locks:
            if fd >= 0:
                self._files.unlock(fd)

    def _lock(self, *, patient: bool = True) -> bool:
        path = str(self.path)
        self._directory_fd = self._files.lock_directory(path, patient=patient)
        if self._directory_fd < 0:
            return False
        try:
            self._lock_fd = self._files.lock(str(self.path / LOCK), patient=patient)
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES):
                raise
            self.obstacle = os.strerror(error.errno)
        self.owner = self._lock_fd >= 0
        if not self.owner:
            self.close()
        return self.owner

    def _collected(self) -> bool:
        """Wait for the end of garbage owners in this process; return whether there were any."""
        mine = any(_owns(home, self.path) for home in list(_homes))
        if mine:
            gc.collect()
            REAPER.join(_PATIENCE_S)
        return mine

    def _prepare(self) -> None:
        path = str(self.path)
        self._files.make_directory(path)
        names = self._files.names(path)
        foreign = [name for name in names if not _OURS.fullmatch(name)]
        if foreign and SUPERBLOCK not in names:
            raise StoreError(
                f"directory {self.path} holds other files, such as {min(foreign)!r}",
                "Choose an empty directory or one that does not exist yet",
            )
        self._guard(empty=not names)

    def _guard(self, *, empty: bool) -> None:
        """Check that no other user can write here, or replace this directory."""
        real = os.path.realpath(self.path)
        user, mode = self._files.status(real)
        if user != os.geteuid():
            raise StoreError(f"{self.path} belongs to another user", "Use a directory of your own")
        if mode & stat.S_IWOTH:
            raise StoreError(
                f"all users may write to {self.path}", f"Run chmod 700 {self.path}, or use another"
            )
        if mode & stat.S_IWGRP:
            if not empty:
                raise StoreError(f"a group may write to {self.path}", f"Run chmod 700 {self.path}")
            self._files.restrict(real)
        parent = os.path.dirname(real)
        _, above = self._files.status(parent)
        if above & stat.S_IWOTH and not above & stat.S_ISVTX:
            raise StoreError(
                f"all users may replace {self.path}, since all users may write to {parent}",
                f"Run chmod +t {parent}, or use a directory elsewhere",
            )

    def _identify(self, capacity_bytes: int) -> None:
        there = read_superblock(self._files, self.path)
        self.found = there is not None
        old = None
        if there is not None and not there.known:
            self._refuse_format(there)
            there = None
        elif there is None and self.owner:
            old = peek_store_id(self._files, str(self.path / JOURNAL))
        if self.owner and (there is None or there.capacity_bytes != capacity_bytes):
            there = there or Superblock(
                store="flowkv", format=FORMAT, store_id=(old or self._files.random(16)).hex()
            )
            there.capacity_bytes = capacity_bytes
            write_superblock(self._files, self.path, there)
        self.superblock = there

    def _refuse_format(self, there: Superblock) -> None:
        if not self.owner:
            self._warn(there, "empty")
            return
        names, number = self._files.names(str(self.path)), 1
        while (aside := f"aside-{number}") in names:
            if {*names}.isdisjoint(self._files.names(str(self.path / aside))):
                break  # an interrupted move, to be continued
            number += 1
        self._files.make_directory(str(self.path / aside))
        # The superblock last: without it, files left by an interrupted move would be reused.
        for name in sorted(names, key=SUPERBLOCK.__eq__):
            if _OURS.fullmatch(name) and name != LOCK and not name.startswith("aside-"):
                self._files.replace(str(self.path / name), str(self.path / aside / name))
        moved = f"The old store was moved to {aside}; delete it when no other version needs it."
        self._warn(there, f"starting empty. {moved}")

    def _warn(self, there: Superblock, what: str) -> None:
        found = f"{self.path} has format {there.format}, this version reads {FORMAT}"
        warnings.warn(f"{found}: {what}", stacklevel=5)


_homes: weakref.WeakSet[Home] = weakref.WeakSet()


def owner_of(directory: Path) -> str:
    """Return the subject and verb of a sentence that names the owner of an owned directory."""
    for home in list(_homes):
        if _owns(home, directory):
            model = f" (of {home.title})" if home.title else ""
            return f"another cache of this process{model} owns"
    return "another process owns"


def _owns(home: Home, directory: Path) -> bool:
    with contextlib.suppress(OSError):
        return home.owner and os.path.samefile(home.path, directory)
    return False


def owned(directory: Path) -> bool:
    """Return whether a living process owns the directory, without disturbing it."""
    real = os.path.realpath(directory)
    return _locked(os.path.join(real, LOCK), open_descriptor) or _locked(real, _open_directory)


def _open_directory(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _locked(path: str, opening: Callable[[str], int]) -> bool:
    try:
        fd = opening(path)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
