"""Erasure log of a place that several caches share: a small file beside the frames, and its lock.

    word 64 B | cell 64 B | cell | ...                       all little-endian, 16 KiB together
    word = magic 8 | version u32 | cells u32 | incarnation 16 | erased u64 | 0 16 | check u64
    cell = number u64 | kind u8 | count u8 | flags u16 | 0 u32 | names 40 | check u64

A cache that erases writes its cells before the erasure completes; a cache with copies compares the
word with its last value, and reads the cells only if it differs. The cells are a ring: a reader
that has fallen behind its end, or finds a cell damaged, treats everything as erased, which costs
hits and never an answer.

The file is read with `pread`: a truncated file ends early, where a mapping would kill the process.
A store begins under a shared lock, and an erasure runs under an exclusive one, which the kernel
releases when a process dies: so an erased frame is never stored again by a cache that has not read
the log yet.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import struct
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import xxhash

from flowkv.core.errors import StoreError
from flowkv.core.files import open_descriptor
from flowkv.tiers.base import Tier

FILE_BYTES, WORD_BYTES = 16 << 10, 64
CELLS = FILE_BYTES // WORD_BYTES - 1
MAGIC, VERSION = b"FKVERASE", 1
KEY_NAME_BYTES, REALM_NAME_BYTES = 8, 16
_KEYS, _BELOW, _REALMS = 1, 2, 3
_WIDTH = {_KEYS: KEY_NAME_BYTES, _BELOW: KEY_NAME_BYTES, _REALMS: REALM_NAME_BYTES}
_PROVEN = 1  # flag: the place itself holds none of the frames any more
_NAMES_BYTES = 40
_WORD, _CELL = struct.Struct("<8sII16sQ16xQ"), struct.Struct("<QBBH4x40sQ")
MOST_KEYS = CELLS // 2 * (_NAMES_BYTES // KEY_NAME_BYTES)
"""Most names in half of the ring; to erase more, publish the realm."""
_GATE_AT, _STORES_AT = 1 << 60, (1 << 60) + 1
_PAUSE_S, _TRIES = 0.0005, 4
_LOOK_S = 0.1
"""Interval between checks whether the file was deleted or replaced, which only people do."""
PATIENCE_S = 5.0
"""Longest wait for stores in progress elsewhere, which take milliseconds."""


class Erased(NamedTuple):
    """Set of erased frames, by name.

    Attributes:
        keys: First bytes of keys: the pages erased with all their descendants.
        below: First bytes of keys: only the descendants of these pages are erased.
        realms: Names of tenants and models, see `realm_name`.
        everything: Whether all frames must be taken as erased.
        proven: Whether the place of the log holds none of the erased frames any more.
    """

    keys: frozenset[bytes] = frozenset()
    below: frozenset[bytes] = frozenset()
    realms: frozenset[bytes] = frozenset()
    everything: bool = False
    proven: bool = True

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


ALL = Erased(everything=True)


def realm_name(tenant: bytes | None, namespace: bytes | None) -> bytes:
    """Return the name of a tenant's frames, of a model's, or of those of both."""
    said = (b"\0" if part is None else b"\1" + part for part in (tenant, namespace))
    return hashlib.sha256(b"flowkv.realm/1" + b"".join(said)).digest()[:REALM_NAME_BYTES]


class _Word(NamedTuple):
    incarnation: bytes
    erased: int


def _read_word(raw: bytes) -> _Word | None:
    """Parse a word; None if it is invalid."""
    if len(raw) != WORD_BYTES:
        return None
    magic, version, cells, incarnation, erased, check = _WORD.unpack(raw)
    sound = xxhash.xxh3_64_intdigest(raw[:-8]) == check
    ours = sound and (magic, version, cells) == (MAGIC, VERSION, CELLS)
    return _Word(incarnation, erased) if ours else None


def _pack_word(word: _Word) -> bytes:
    raw = _WORD.pack(MAGIC, VERSION, CELLS, *word, 0)[:-8]
    return raw + xxhash.xxh3_64_intdigest(raw).to_bytes(8, "little")


def _check(cell: bytes, incarnation: bytes) -> bytes:
    return xxhash.xxh3_64_intdigest(cell[:-8] + incarnation).to_bytes(8, "little")


class ErasureLog:
    """Erasure log of one place, as seen by one cache. Callers hold the lock of that cache.

    Args:
        path: The file; made if it is missing. Where it cannot be made, the log is off until it can.
        patience_s: Longest wait of `erasing`.
    """

    def __init__(self, path: str | os.PathLike[str], *, patience_s: float = PATIENCE_S) -> None:
        self.path, self._patience_s = Path(path), patience_s
        self._fd, self._writable, self._file = -1, False, (0, 0)
        self._seen = b""
        self._word: _Word | None = None
        self._let_go: Callable[[], object] = int  # nothing to release yet
        self._erasing = False
        self._look_s = 0.0
        self._own: set[tuple[bytes, int]] = set()
        self._open()
        _logs.add(self)

    # ---- readers

    @property
    def alone(self) -> bool:
        """Return whether this cache is within `erasing`."""
        return self._erasing

    def changed(self) -> bool:
        """Return whether other caches may have erased frames since the last `news`."""
        try:
            if self._fd < 0:
                return self._lies() != self._file
            if os.pread(self._fd, WORD_BYTES, 0) != self._seen:
                return True
            now_s = time.monotonic()
            if now_s < self._look_s:
                return False
            self._look_s = now_s + _LOOK_S
            return self._replaced()
        except OSError:
            return True

    def news(self) -> Erased:
        """Return the frames that others erased since the last call."""
        if self._fd < 0 or self._replaced():
            self.close()
            self._open()
            return ALL
        before = self._word
        for _ in range(_TRIES):
            raw = self._pread(FILE_BYTES)
            word = _read_word(raw[:WORD_BYTES])
            if word is not None:
                self._seen, self._word = raw[:WORD_BYTES], word
                own, self._own = self._own, set()
                return _between(before, word, raw, own)
            time.sleep(_PAUSE_S)  # the word may be half written
        self._mend()
        return ALL

    # ---- writers

    @contextlib.contextmanager
    def storing(self) -> Iterator[bool]:
        """Hold off erasures by others; yield False if one is, or may be, under way.

        Frames erased earlier are among the `news` by then: read it, and store none of them.
        """
        self._look_s = 0.0  # so that `changed` checks whether the lock is that of the file
        if self._fd < 0 or self._erasing:
            yield not self._erasing
            return
        free = self._may_lock(_GATE_AT) and self._lock(_STORES_AT, fcntl.F_RDLCK)
        try:
            yield free
        finally:
            if free:
                self._lock(_STORES_AT, fcntl.F_UNLCK)

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
            self._seen, self._word = b"", None
        if self._fd < 0 or not self._writable:
            raise StoreError(
                f"{self.path} cannot be written, so other caches would not learn of the erasure",
                "Forget in a process that may write there, or repair that file",
            )
        self._take(time.monotonic() + self._patience_s)
        self._erasing = True
        try:
            yield
        finally:
            self._erasing = False
            self._release()

    def publish(
        self,
        keys: Iterable[bytes] = (),
        below: Iterable[bytes] = (),
        realms: Iterable[bytes] = (),
        *,
        proven: bool = True,
    ) -> None:
        """Record erased frames; other caches find them at their next look. Call within `erasing`.

        Args:
            keys: Keys of pages that were erased with all their descendants.
            below: Keys of pages with only their descendants erased.
            realms: Names of tenants and models.
            proven: Whether the place holds none of the frames any more.

        Raises:
            StoreError: The log cannot be written.
        """
        word = _read_word(self._pread(WORD_BYTES)) or _Word(os.urandom(16), 0)
        cells = []
        for kind, names in ((_KEYS, keys), (_BELOW, below), (_REALMS, realms)):
            width, held = _WIDTH[kind], _NAMES_BYTES // _WIDTH[kind]
            some = sorted({name[:width] for name in names})
            for part in (some[at : at + held] for at in range(0, len(some), held)):
                cells.append((kind, len(part), _PROVEN * proven, b"".join(part)))
        if len(cells) > CELLS:
            raise StoreError(f"{len(cells)} cells of names", "Erase whole realms instead")
        try:
            for number, cell in enumerate(cells, word.erased + 1):
                raw = _CELL.pack(number, *cell, 0)
                os.pwrite(self._fd, raw[:-8] + _check(raw, word.incarnation), _cell_at(number))
            first, word = word.erased + 1, word._replace(erased=word.erased + len(cells))
            # The word comes last: until it is there, the cells are not read. The news still has
            # those of others.
            os.pwrite(self._fd, _pack_word(word), 0)
            self._own |= {(word.incarnation, one) for one in range(first, word.erased + 1)}
        except OSError as error:
            raise StoreError(
                f"{self.path} cannot be written ({error.strerror})", "Mend that file system"
            ) from error

    def close(self) -> None:
        """Close the file and drop its locks."""
        self._let_go()
        self._fd, self._writable = -1, False

    # ---- the file

    def _open(self, *, anew: bool = False) -> None:
        """Open or make the file; an unusable one is left alone, or replaced if `anew`."""
        self._seen, self._word, self._file = b"", None, self._lies()
        try:
            fd, self._writable = self._descriptor()
        except OSError:
            if anew and self._file != (0, 0):
                self._replace()
            return
        self._fd, self._let_go = fd, weakref.finalize(self, os.close, fd)
        status = os.fstat(fd)
        self._file = status.st_dev, status.st_ino
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:  # others may write to it
            self.close()
            if anew:
                self._replace()
            return
        self._seen = self._pread(WORD_BYTES)
        self._word = _read_word(self._seen)
        if self._word is None or status.st_size != FILE_BYTES:
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

    def _replace(self) -> None:
        """Remove the unusable file and open a new one, once."""
        with contextlib.suppress(OSError):
            os.unlink(self.path)
            self._open()

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
        """Initialize a damaged file, if the locks are free, under a new incarnation."""
        self._seen, self._word = self._pread(WORD_BYTES), None
        if not self._writable or self._erasing:
            return
        try:
            self._take(time.monotonic() + 20 * _PAUSE_S)
        except StoreError:
            return
        with contextlib.suppress(OSError):
            self._seen = self._pread(WORD_BYTES)
            self._word = _read_word(self._seen)
            if self._word is None or os.fstat(self._fd).st_size != FILE_BYTES:
                os.ftruncate(self._fd, FILE_BYTES)
                # so that a full disk blocks no later write
                os.posix_fallocate(self._fd, 0, FILE_BYTES)
                self._write(_Word(os.urandom(16), 0))
        self._release()

    def _write(self, word: _Word) -> None:
        raw = _pack_word(word)
        os.pwrite(self._fd, raw, 0)
        self._seen, self._word = raw, word

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
            while not self._lock(at, fcntl.F_WRLCK):
                if time.monotonic() >= end_s:
                    self._release()
                    raise StoreError(
                        f"{self.path} is locked by a process that does not go on",
                        "Continue or end that process, and forget again",
                    )
                time.sleep(_PAUSE_S)

    def _release(self) -> None:
        for at in (_STORES_AT, _GATE_AT):
            self._lock(at, fcntl.F_UNLCK)

    def _lock(self, at: int, how: int) -> bool:
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _range(at, how))
        except (OSError, ValueError):  # or the file was closed meanwhile
            return False
        return True

    def _may_lock(self, at: int) -> bool:
        try:
            found = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, _range(at, fcntl.F_RDLCK))
        # a file system without locks, or the file was closed meanwhile
        except (OSError, ValueError):
            return False
        return bool(struct.unpack_from("h", found)[0] == fcntl.F_UNLCK)


def _range(at: int, how: int) -> bytes:
    return struct.pack("hhqqi4x", how, os.SEEK_SET, at, 1, 0)


def _cell_at(number: int) -> int:
    return WORD_BYTES * (1 + (number - 1) % CELLS)


def _between(before: _Word | None, word: _Word, raw: bytes, own: set[tuple[bytes, int]]) -> Erased:
    """Return the erasures by others in the cells written after a word."""
    if before is None or before.incarnation != word.incarnation:
        return ALL
    if not 0 <= word.erased - before.erased <= CELLS:
        return ALL
    names: dict[int, set[bytes]] = {kind: set() for kind in _WIDTH}
    proven = True
    for number in range(before.erased + 1, word.erased + 1):
        if (word.incarnation, number) in own:
            continue
        at = _cell_at(number)
        cell = raw[at : at + WORD_BYTES]
        if len(cell) != WORD_BYTES or cell[-8:] != _check(cell, word.incarnation):
            return ALL
        found, kind, count, flags, held, _ = _CELL.unpack(cell)
        width = _WIDTH.get(kind, 0)
        if found != number or not width or count * width > _NAMES_BYTES:
            return ALL
        proven &= bool(flags & _PROVEN)
        names[kind].update(held[at : at + width] for at in range(0, count * width, width))
    keys, below, realms = (frozenset(names[kind]) for kind in _WIDTH)
    return Erased(keys, below, realms, proven=proven)


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


_logs: weakref.WeakSet[ErasureLog] = weakref.WeakSet()


def _forget() -> None:
    """Close the logs in a forked child: else locks of a dead parent would live on in its copies."""
    for log in list(_logs):
        with contextlib.suppress(OSError):
            log.close()


os.register_at_fork(after_in_child=_forget)
