"""Erasure log of a place that several caches share: a small file beside the frames, and its lock.

    length u64 | xxh3_64 of the rest | MessagePack: version, the last entries | zeros     16 KiB

An entry has a random lot number, and the names of erased frames. A cache that erases adds its entry
before the erasure completes; a cache with copies compares the first 16 bytes with their last value,
and reads the entries only if they differ. Entries go in the order in which they came: a reader that
knows none of them has fallen behind, and treats everything as erased, as it does if the file is
damaged, which costs hits and never an answer. A new log has one entry that names nothing.

The file is read with `pread`: a truncated file ends early, where a mapping would kill the process.
A store begins under a shared lock, and an erasure runs under an exclusive one, which the kernel
releases when a process dies: so an erased frame is never stored again by a cache that has not read
the log yet.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import xxhash

from flowkv.core.errors import StoreError, stating
from flowkv.core.files import MALFORMED, drop_in_children, lock_byte, open_descriptor
from flowkv.tiers.base import Entry, FrameInfo, Tier

FILE_BYTES, _HEAD_BYTES = 16 << 10, 16
KEY_NAME_BYTES, REALM_NAME_BYTES = 8, 16
MOST_KEYS = 640
"""Most names in half of the file; to erase more, publish the realm."""
_VERSION = 2
_GATE_AT, _STORES_AT = 1 << 60, (1 << 60) + 1
_PAUSE_S, _TRIES = 0.0005, 4
_LOOK_S = 0.1
"""Interval between checks whether the file was deleted or replaced, which only people do."""
PATIENCE_S = 5.0
"""Longest wait for stores in progress elsewhere, which take milliseconds."""


class Erased(
    msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Set of erased frames, by name: an entry of a log, or several together.

    Attributes:
        lot: 16 random bytes that name an entry.
        keys: First bytes of keys: the pages erased with all their descendants.
        below: First bytes of keys: only the descendants of these pages are erased.
        realms: Names of tenants and models, see `realm_name`.
        proven: Whether the place of the log holds none of the erased frames any more.
        everything: Whether all frames must be taken as erased.
    """

    lot: bytes = b""
    keys: frozenset[bytes] = frozenset()
    below: frozenset[bytes] = frozenset()
    realms: frozenset[bytes] = frozenset()
    proven: bool = True
    everything: bool = False

    def __bool__(self) -> bool:
        return self.everything or bool(self.keys or self.below or self.realms)

    def covers(self, tenant: bytes, namespace: bytes) -> bool:
        """Return whether all frames of a tenant with a model are erased."""
        pairs = (tenant, None), (None, namespace), (tenant, namespace)
        return self.everything or any(realm_name(*pair) in self.realms for pair in pairs)

    def has(self, key: bytes) -> bool:
        """Return whether a key itself is named."""
        return key[:KEY_NAME_BYTES] in self.keys

    def ends(self, key: bytes) -> bool:
        """Return whether the descendants of a key are erased."""
        return key[:KEY_NAME_BYTES] in self.below or self.has(key)

    def means(self, key: bytes, info: FrameInfo, gone: Collection[bytes] = ()) -> bool:
        """Return whether a frame is erased; `gone` are keys of other erased frames."""
        if key in gone or info.parent in gone or self.has(key) or self.ends(info.parent):
            return True
        return self.covers(info.tenant, info.namespace)

    def among(self, entries: Iterable[Entry]) -> set[bytes]:
        """Return the keys of erased frames, and of all frames that continue them."""
        listed, gone, before = list(entries), set[bytes](), -1
        while before < len(gone):  # listed root to leaf mostly, so that once is enough
            before = len(gone)
            gone.update(e.key for e in listed if self.means(e.key, e.info, gone))
        return gone


ALL = Erased(everything=True)


def realm_name(tenant: bytes | None, namespace: bytes | None) -> bytes:
    """Return the name of a tenant's frames, of a model's, or of those of both."""
    said = (b"\0" if part is None else b"\1" + part for part in (tenant, namespace))
    return hashlib.sha256(b"flowkv.realm/1" + b"".join(said)).digest()[:REALM_NAME_BYTES]


def new_entry(
    keys: Iterable[bytes] = (),
    below: Iterable[bytes] = (),
    realms: Iterable[bytes] = (),
    proven: bool = True,
) -> Erased:
    """Return a new entry of a log with the names of these frames.

    Args:
        keys: Keys of pages that were erased with all their descendants.
        below: Keys of pages with only their descendants erased.
        realms: Names of tenants and models.
        proven: Whether the place of the log holds none of the frames any more.
    """
    own, ends = (frozenset(key[:KEY_NAME_BYTES] for key in some) for some in (keys, below))
    return Erased(os.urandom(16), own, ends, frozenset(realms), proven)


def pack_entries(entries: Iterable[Erased]) -> bytes:
    """Return the bytes of entries, with a digest."""
    body = msgspec.msgpack.encode((_VERSION, tuple(entries)))
    return xxhash.xxh3_64_digest(body) + body


def unpack_entries(data: bytes) -> dict[bytes, Erased] | None:
    """Return entries by their lots, oldest first; None if the bytes are damaged."""
    try:
        if xxhash.xxh3_64_digest(data[8:]) != data[:8]:
            return None
        version, entries = msgspec.msgpack.decode(data[8:], type=tuple[int, tuple[Erased, ...]])
    except MALFORMED:
        return None
    return {entry.lot: entry for entry in entries} if version == _VERSION else None


def joined(parts: Sequence[Erased]) -> Erased:
    """Return the union of erasures."""
    return Erased(
        keys=frozenset[bytes]().union(*(one.keys for one in parts)),
        below=frozenset[bytes]().union(*(one.below for one in parts)),
        realms=frozenset[bytes]().union(*(one.realms for one in parts)),
        proven=all(one.proven for one in parts),
        everything=any(one.everything for one in parts),
    )


class ErasureLog:
    """Erasure log of one place, as seen by one cache. Callers hold the lock of that cache.

    Args:
        path: The file; made if it is missing. Where it cannot be made, the log is off until it can.
        patience_s: Longest wait of `erasing`.
    """

    def __init__(self, path: str | os.PathLike[str], *, patience_s: float = PATIENCE_S) -> None:
        self.path, self._patience_s = Path(path), patience_s
        self._fd, self._writable, self._file = -1, False, (0, 0)
        self._head = b""
        self._seen: set[bytes] | None = None  # lots; None while they are unknown
        self._let_go: Callable[[], object] = int  # nothing to release yet
        self.alone = self._warned = False
        self._look_s = 0.0
        self._own: set[bytes] = set()
        self._open()
        drop_in_children(self, ErasureLog.close)

    # ---- readers

    def changed(self) -> bool:
        """Return whether other caches may have erased frames since the last `news`."""
        try:
            if self._fd < 0:
                return self._lies() != self._file
            if os.pread(self._fd, _HEAD_BYTES, 0) != self._head:
                return True
            now_s = time.monotonic()
            if now_s < self._look_s:
                return False
            replaced = self._replaced()
            self._look_s = now_s + (0.0 if replaced else _LOOK_S)
            return replaced
        except OSError:
            return True

    def news(self) -> Erased:
        """Return the frames that others erased since the last call."""
        if self._fd < 0 or self._replaced():
            self.close()
            self._open()
            return ALL
        before = self._seen
        for _ in range(_TRIES):
            if (there := self._look()) is not None:
                own, self._own = self._own, set()
                return _between(before, there, own)
            time.sleep(_PAUSE_S)  # it may be half written
        self._mend()
        return ALL

    # ---- writers

    @contextlib.contextmanager
    def storing(self) -> Iterator[bool]:
        """Hold off erasures by others; yield False if one is, or may be, under way.

        Frames erased earlier are among the `news` by then: read it, and store none of them.
        """
        self._look_s = 0.0  # so that `changed` checks whether the lock is that of the file
        if self._fd < 0 or self.alone:
            yield not self.alone
            return
        gate = lock_byte(self._fd, _GATE_AT, fcntl.F_RDLCK)
        free = gate and lock_byte(self._fd, _STORES_AT, fcntl.F_RDLCK)
        if gate:
            lock_byte(self._fd, _GATE_AT, fcntl.F_UNLCK)
        try:
            yield free
        finally:
            if free:
                lock_byte(self._fd, _STORES_AT, fcntl.F_UNLCK)

    @contextlib.contextmanager
    def erasing(self) -> Iterator[None]:
        """Hold off stores, and erasures by others.

        Raises:
            StoreError: The file cannot be written, or another process does not release its lock.
        """
        if self._fd < 0 or self._lies() != self._file:
            self.close()
            self._open(anew=True)
            # erasures by others meanwhile are still read as news
            self._head, self._seen = b"", None
        if self._fd < 0 or not self._writable:
            raise StoreError(
                f"{self.path} cannot be written, so other caches would not learn of the erasure",
                "Forget in a process that may write there, or repair that file",
            )
        self._take(time.monotonic() + self._patience_s)
        self.alone = True
        try:
            yield
        finally:
            self.alone = False
            self._release()

    def publish(self, entry: Erased) -> None:
        """Record erased frames; other caches find them at their next look. Call within `erasing`.

        Raises:
            StoreError: The log cannot be written.
        """
        entries = [*(self._entries() or {}).values(), entry]
        while len(data := _framed(entries)) > FILE_BYTES:
            if len(entries) == 1:
                raise StoreError(f"{len(data)} bytes of names", "Erase whole realms instead")
            del entries[0]
        with stating(f"{self.path} cannot be written", "Mend that file system"):
            os.pwrite(self._fd, data, 0)
        self._own.add(entry.lot)  # the news still has those of others

    def close(self) -> None:
        """Close the file and drop its locks."""
        self._fd, self._writable = -1, False
        with contextlib.suppress(OSError):  # the descriptor is gone all the same
            self._let_go()

    # ---- the file

    def _open(self, *, anew: bool = False) -> None:
        """Open or make the file; an unusable one is left alone, or replaced if `anew`."""
        self._head, self._seen, self._file = b"", None, self._lies()
        try:
            self._fd, self._writable = self._descriptor()
            self._let_go = weakref.finalize(self, os.close, self._fd)
            status = os.fstat(self._fd)
        except OSError as error:
            self.close()
            self._do_without(anew and error.errno not in (errno.EMFILE, errno.ENFILE))
            return
        self._file = status.st_dev, status.st_ino
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:  # others may write to it
            self.close()
            self._do_without(anew)
            return
        if self._look() is None or status.st_size != FILE_BYTES:
            self._mend()

    def _descriptor(self) -> tuple[int, bool]:
        """Return a descriptor of the file, and whether it is writable.

        Raises:
            OSError: It cannot be opened.
        """
        try:
            return open_descriptor(self.path, os.O_RDWR | os.O_CREAT, follow=False), True
        except OSError:
            return open_descriptor(self.path, follow=False), False

    def _do_without(self, anew: bool) -> None:
        """Replace the unusable file, once; or note that others may use it, if it is this user's."""
        with contextlib.suppress(OSError):
            there = os.stat(self.path, follow_symlinks=False)
            if anew:
                os.unlink(self.path)
                self._open()
            elif stat.S_ISREG(there.st_mode) and there.st_uid == os.geteuid():
                self._file = 0, 0  # so that it has changed at each look, until it can be opened
                if there.st_mode & 0o622 != 0o600 and not self._warned:
                    self._warned = True
                    warnings.warn(
                        f"{self.path} has mode {there.st_mode & 0o777:03o}: nothing is stored or "
                        f"reused there. Run chmod 600 {self.path}",
                        stacklevel=2,
                    )

    def _lies(self) -> tuple[int, int]:
        """Return the device and inode of the file at the path; zeros if there is none."""
        try:
            status = os.stat(self.path, follow_symlinks=False)
        except OSError:
            return 0, 0
        return status.st_dev, status.st_ino

    def _replaced(self) -> bool:
        """Return whether another file is at the path; a missing file has no news."""
        return self._lies() not in (self._file, (0, 0))

    def _mend(self) -> None:
        """Initialize a damaged file, if the locks are free."""
        self._look()
        if not self._writable or self.alone:
            return
        try:
            self._take(time.monotonic() + 20 * _PAUSE_S)
        except StoreError:
            return
        with contextlib.suppress(OSError):
            if self._look() is None or os.fstat(self._fd).st_size != FILE_BYTES:
                os.ftruncate(self._fd, FILE_BYTES)
                # so that a full disk blocks no later write
                os.posix_fallocate(self._fd, 0, FILE_BYTES)
                os.pwrite(self._fd, _framed([new_entry()]), 0)
                self._look()
        self._release()

    def _look(self) -> dict[bytes, Erased] | None:
        """Read the entries, and take them as seen; None if they are damaged."""
        self._head, there = self._pread(_HEAD_BYTES), self._entries()
        self._seen = None if there is None else set(there)
        return there

    def _entries(self) -> dict[bytes, Erased] | None:
        """Return the entries by their lots, oldest first; None if they are damaged."""
        data = self._pread(FILE_BYTES)
        return unpack_entries(data[8 : 8 + int.from_bytes(data[:8], "little")])

    def _pread(self, n_bytes: int) -> bytes:
        try:
            return os.pread(self._fd, n_bytes, 0)
        except OSError:
            return b""

    # ---- locks, which belong to the descriptor and end with it

    def _take(self, end_s: float) -> None:
        """Take both locks exclusively.

        Raises:
            StoreError: Another process holds one for too long.
        """
        for at in (_GATE_AT, _STORES_AT):
            while not lock_byte(self._fd, at, fcntl.F_WRLCK):
                if time.monotonic() >= end_s:
                    self._release()
                    raise StoreError(
                        f"{self.path} is locked by a process that does not go on",
                        "Continue or end that process, and forget again",
                    )
                time.sleep(_PAUSE_S)

    def _release(self) -> None:
        for at in (_STORES_AT, _GATE_AT):
            lock_byte(self._fd, at, fcntl.F_UNLCK)


def _framed(entries: list[Erased]) -> bytes:
    data = pack_entries(entries)
    return len(data).to_bytes(8, "little") + data


def _between(before: set[bytes] | None, there: dict[bytes, Erased], own: set[bytes]) -> Erased:
    """Return the erasures by others in the entries that came after those seen before."""
    if before is None or before.isdisjoint(there):
        return ALL
    return joined([one for lot, one in there.items() if lot not in before | own])


class ErasureLogs(dict[int, ErasureLog]):
    """Erasure logs of the tiers of a stack that others use too, by tier number.

    Attributes:
        behind: Whether others erased frames that are not dropped here yet; stores wait.
    """

    behind = False

    def open_log(self, number: int, tier: Tier) -> ErasureLog | None:
        """Open the log of a tier, or take the one that it has; None if it has none."""
        if (found := getattr(tier, "erasure_log", None)) is not None:
            is_path = isinstance(found, (str, os.PathLike))
            self[number] = ErasureLog(found) if is_path else found
        return self.get(number)

    @contextlib.contextmanager
    def storing(self, log: ErasureLog | None) -> Iterator[bool]:
        """Yield whether a tier may store: no erasure runs there, and all past ones are known."""
        if log is None:
            yield True
            return
        with log.storing() as free:
            self.behind |= free and log.changed()
            yield free and not self.behind

    @contextlib.contextmanager
    def erasing(self) -> Iterator[dict[int, StoreError]]:
        """Hold off stores, and erasures by others; yield the errors of logs that cannot."""
        failed = dict[int, StoreError]()
        with contextlib.ExitStack() as held:
            # In the order of their paths, so that no two caches wait for each other.
            for number, log in sorted(self.items(), key=lambda one: one[1].path):
                try:
                    held.enter_context(log.erasing())
                except StoreError as error:
                    failed[number] = error
            yield failed

    def outdated(self) -> bool:
        """Return whether others erased frames that are not dropped here yet."""
        for log in self.values():  # noqa: SIM110 - a microsecond less for each `open`
            if log.changed():
                return True
        return False

    def all_news(self) -> Iterator[tuple[int, Erased]]:
        """Yield the erasures by others since the last call, each with its tier's number."""
        self.behind = False
        for number, log in list(self.items()):
            if log.changed() and (erased := log.news()):
                yield number, erased

    def close(self) -> None:
        """Close the logs: nothing is stored or looked up here any more."""
        for log in self.values():
            log.close()
        self.clear()
