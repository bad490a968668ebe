"""A disk tier's directory: its owner, its superblock, its journal, and its protected files.

    superblock.json   description: format, sizes, store id         written by rename, with a crc32
    lock              held (flock) by the one process that writes; holds its process id
    journal           slots of the frames                          `Journal`
    slab-<granules>   the frames                                   `disk.store`
    learned           state that policies learned, if any          `flowkv.cache.stack`
    erased            erasures of caches, for other caches         `tiers.erasure_log`
    aside-<n>         a store of another format, moved out of the way and never deleted

The directory is 0700 and its files 0600; no link is followed, and no name in it comes from a key.
The writer holds the directory itself (flock), too: removing the lock file makes no second writer,
and the first one stops when it finds that its lock file, or the directory, is gone.

The journal has the slot of each frame, as fixed records in checked pages.

    file   = page | page | ...                              4 KiB each, appended; the last one grows
    page   = magic, crc32, count, store id, number (64 bytes) | 18 records of 224 bytes
    record = `Record`, with a crc32 of its own

The newest record of a key, and of a slot, wins: the one with the highest number, at any place in
the file. One wrong bit costs at most one record: a page with a wrong crc is searched record by
record, and reading goes on with the next page. Rewriting the last page in place is safe even if the
machine dies meanwhile, because earlier records keep their bytes. Leftovers of a failed write are
taken back before any other record counts. No record is trusted: a frame is served only if its own
header and digests agree, so the worst effect of a bad journal is a lost frame.

Holes are not read. Damage is skipped as far as the journal of a full store may reach; behind that,
reading ends with the first block without any page of this store.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import os
import re
import stat
import struct
import time
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowkv.core.errors import StoreError
from flowkv.core.files import MALFORMED, drop_in_children, open_descriptor
from flowkv.core.geometry import FIDELITIES, GRANULE_BYTES
from flowkv.core.reaper import REAPER
from flowkv.tiers.base import FrameInfo
from flowkv.tiers.frame import (
    DIGEST_BYTES,
    FIXED_BYTES,
    KINDS,
    MAX_STRIPES,
    NH_128,
    SIZE_BYTES,
    VERSION,
    header_bytes,
)
from flowkv.tiers.io.engine import FileIO, read_file, read_fully, replace_file, write_fully

# One line of a disk tier's journal: a fixed record of a frame's description and slot.
#
#     key, parent, namespace, tenant (32 each), layout (16) | sequence number u64
#     slot: granules u32, number u64 | stripes u32, stripe bytes u64
#     group, tokens, rank, world, head start, head stop (u32) | op, kind, codec, fidelity
#     stored bytes u64 | integrity, lossless | 6 zeros | crc32
#
# Records have 224 bytes, little endian. Thousands are read at once, as rows of a numpy array; a row
# becomes a `Held` when it is needed.

RECORD_BYTES = 224
STORED, DELETED = 1, 2

_CRC = struct.Struct("<I")
_MOST_SLOTS, _MOST_GRANULES = 1 << 40, 1 << 23
_MOST_SEQ = 10**16  # more than a million a second for three hundred years
UNBOUNDED = (1 << 63) - 1
"""Capacity of a store without a known one; no file reaches further."""
_FIELDS = {
    **dict.fromkeys(("key", "parent", "namespace", "tenant"), "32s"),
    **{"layout": "16s", "seq": "Q", "granules": "I", "number": "Q"},
    **{"stripes": "I", "stripe_bytes": "Q"},
    **dict.fromkeys(("group", "tokens", "rank", "world", "head_start", "head_stop"), "I"),
    **dict.fromkeys(("op", "kind", "codec", "fidelity"), "B"),
    **{"stored_bytes": "Q", "integrity": "B", "lossless": "B", "zeros": "6s", "crc": "I"},
}
"""Fields of a record, and their forms as of `struct`."""
_RECORD = struct.Struct("<" + "".join(_FIELDS.values()))
_AS_ROW = {"I": "<u4", "Q": "<u8", "B": "u1"}
ROW = np.dtype([(name, _AS_ROW.get(form, f"V{form[:-1]}")) for name, form in _FIELDS.items()])
"""A record as a numpy row."""

Rows = NDArray[Any]  # of dtype ROW


class Slot(NamedTuple):
    """Slot for a frame: size in granules, and position in the slab file of that size."""

    granules: int
    number: int

    @property
    def n_bytes(self) -> int:
        """Return the size in bytes."""
        return self.granules * GRANULE_BYTES

    @property
    def offset(self) -> int:
        """Return the offset of the slot in its file."""
        return self.number * self.granules * GRANULE_BYTES


class Held(NamedTuple):
    """Index entry of a frame: its slot and its description.

    Attributes:
        seq: Sequence number, unique in the store: the slot's generation, which the header repeats.
        slot: Slot of the frame.
        stripes: Stripes of the body.
        info: The frame's description.
        stored_bytes: Header and stripes as they are stored.
        integrity: Kind of the frame's checks (`frame.NH_128` and others).
        lossless: Whether its stripes are compressed.
    """

    seq: int
    slot: Slot
    stripes: int
    info: FrameInfo
    stored_bytes: int
    integrity: int = NH_128
    lossless: bool = False

    @property
    def body_bytes(self) -> int:
        """Return the length of the body in bytes, uncompressed."""
        return self.stripes * self.info.stripe_bytes

    @property
    def header_bytes(self) -> int:
        """Return the length of the header in bytes."""
        return header_bytes(self.stripes, lossless=self.lossless)


class Record(NamedTuple):
    """One line of the journal: `op` is `STORED` or `DELETED`."""

    op: int
    key: bytes
    held: Held


def pack_record(record: Record) -> bytes:
    """Return the 224 bytes of a record."""
    op, key, (seq, slot, stripes, info, stored_bytes, integrity, lossless) = record
    data = _RECORD.pack(
        *(key, info.parent, info.namespace, info.tenant, info.layout, seq, *slot, stripes),
        *(info.stripe_bytes, info.group, info.tokens, info.rank, info.world),
        *(info.head_start, info.head_stop, op, KINDS.index(info.kind), info.codec, info.fidelity),
        *(stored_bytes, integrity, lossless, bytes(6), 0),
    )
    return data[:-4] + _CRC.pack(zlib.crc32(data[:-4]))


def record_sound(line: bytes) -> bool:
    """Return whether 224 bytes match their own crc."""
    return line[-4:] == _CRC.pack(zlib.crc32(line[:-4]))


def unpack_row(data: bytes | memoryview, row: int = 0) -> Record:
    """Return the record in a row; `sensible` rows only."""
    fields = _RECORD.unpack_from(data, row * RECORD_BYTES)
    key, parent, namespace, tenant, layout, seq, granules, number, stripes = fields[:9]
    step, group, tokens, *shard, op, kind, codec, fidelity = fields[9:20]
    stored_bytes, integrity, lossless, *_ = fields[20:]
    ancestry = layout, parent, namespace
    info = FrameInfo(KINDS[kind], codec, fidelity, *ancestry, group, tokens, step, tenant, *shard)
    held = Held(seq, Slot(granules, number), stripes, info, stored_bytes, integrity, bool(lossless))
    return Record(op, key, held)


def sensible(rows: Rows) -> Rows:
    """Return the rows that can be true; every number that is used later is bounded here."""
    stripes, step = rows["stripes"].astype(np.uint64), rows["stripe_bytes"]
    slot_bytes = rows["granules"].astype(np.uint64) * np.uint64(GRANULE_BYTES)
    lossless = rows["lossless"] == 1
    each = np.where(lossless, DIGEST_BYTES + SIZE_BYTES, DIGEST_BYTES).astype(np.uint64)
    granule = np.uint64(GRANULE_BYTES)
    head = (np.uint64(FIXED_BYTES) + each * stripes + granule - np.uint64(1)) // granule * granule
    stored = rows["stored_bytes"]
    good: NDArray[np.bool_] = (
        ((rows["op"] == STORED) | (rows["op"] == DELETED))
        & (rows["kind"] < len(KINDS))
        & (rows["codec"] <= rows["fidelity"])
        & (rows["fidelity"] < len(FIDELITIES))
        & (rows["integrity"] <= NH_128)
        & (rows["lossless"] <= 1)
        & (stripes >= 1)
        & (stripes <= MAX_STRIPES)
        & (step >= 1)
        & (step <= _MOST_SLOTS)
        & ((stripes == 1) | (step % granule == 0))
        & (rows["rank"] < rows["world"])
        & (rows["number"] < _MOST_SLOTS)
        & (rows["granules"] < _MOST_GRANULES)
        & (stored <= slot_bytes)
        & np.where(lossless, stored > head, stored == head + stripes * step)
    )
    return rows if good.all() else rows[good]


def in_order(rows: Rows, capacity_bytes: int = UNBOUNDED) -> Rows:
    """Return the sensible rows that are possible in a store, ordered by their numbers.

    Failed writes, repairs and crashes leave records anywhere in a file; but a store counts upwards,
    so the numbers show which record of a key or a slot is the last one.

    Args:
        rows: Sensible rows.
        capacity_bytes: Capacity of the store; a slot is no larger.
    """
    seqs, slot_bytes = rows["seq"], rows["granules"].astype(np.uint64) * np.uint64(GRANULE_BYTES)
    # A store that continued from an impossible number would run out of numbers. If there is one,
    # numbers a little below the limit are rejected too: they may have been counted from it.
    most = _MOST_SEQ if not len(rows) or seqs.max() < _MOST_SEQ else _MOST_SEQ // 2
    good: NDArray[np.bool_] = (
        (seqs < most)
        & (slot_bytes <= np.uint64(min(max(capacity_bytes, 0), UNBOUNDED)))
        & (rows["number"] < np.uint64(UNBOUNDED) // slot_bytes)
    )
    rows = rows if good.all() else rows[good]
    seqs = rows["seq"]
    ordered = bool((seqs[1:] >= seqs[:-1]).all())
    return rows if ordered else rows[np.argsort(seqs, kind="stable")]


def newest(rows: Rows) -> NDArray[np.int64]:
    """Return the indices of rows that still hold: the last of their key and of their slot."""
    order = range(len(rows))
    last = dict(zip(rows["key"].tolist(), order, strict=True))
    found: NDArray[np.int64] = np.sort(np.fromiter(last.values(), np.int64, len(last)))
    stored: NDArray[np.bool_] = rows["op"] == STORED
    found = found[stored[found]]
    slots = (rows["number"] << np.uint64(23)) ^ rows["granules"]
    if len(found) == len(rows) == len(np.unique(slots)):
        return found  # no frame was ever deleted or stored anew
    stores = np.flatnonzero(stored)
    owner = dict(zip(slots[stores].tolist(), stores.tolist(), strict=True))
    owners = np.fromiter(map(owner.__getitem__, slots[found].tolist()), np.int64, len(found))
    kept: NDArray[np.int64] = found[owners == found]
    return kept


def numbered_apart(rows: Rows) -> bool:
    """Return whether records of one slot, as they lie in a file, do not count upwards.

    A version that cannot read all records counts from a lower number than the others.
    """
    slots = (rows["number"] << np.uint64(23)) ^ rows["granules"]
    order = np.argsort(slots, kind="stable")
    order = order[rows["op"][order] == STORED]
    slots, seqs = slots[order], rows["seq"][order]
    return bool(((slots[1:] == slots[:-1]) & (seqs[1:] < seqs[:-1])).any())


PAGE_BYTES = 4096
RECORDS = 18
CHARGE_BYTES = 228
"""Bytes charged per record: its share of a page, rounded up."""

_MAGIC = b"FKVJRNL2"
_HEAD = struct.Struct("<8sII16sQ24x")
_CRC_FROM = 12  # the crc covers all later bytes
_READ_BYTES, _LEAST_READ_BYTES, _WRITTEN_BYTES = 1 << 24, 1 << 16, 1 << 20
_BLANK = bytes(PAGE_BYTES)


def charge_bytes(held: Held) -> int:
    """Return the bytes charged for a frame: its slot, and two records (old and compacted)."""
    return held.slot.n_bytes + 2 * CHARGE_BYTES


def pack_page(number: int, store_id: bytes, records: Iterable[bytes]) -> bytearray:
    """Return a whole page of at most 18 packed records."""
    page = bytearray(PAGE_BYTES)
    packed = b"".join(records)
    _HEAD.pack_into(page, 0, _MAGIC, 0, len(packed) // RECORD_BYTES, store_id, number)
    page[_HEAD.size : _HEAD.size + len(packed)] = packed
    struct.pack_into("<I", page, 8, zlib.crc32(memoryview(page)[_CRC_FROM:]))
    return page


def read_page(page: memoryview, store_id: bytes) -> tuple[bytes, str]:
    """Return the packed records of a page, and its state: "sound", "blank" or "bad".

    A damaged page yields the records that match their own crc, another store's page none.
    """
    magic, crc, count, owner, _ = _HEAD.unpack_from(page)
    packed = bytes(page[_HEAD.size :])
    if magic == _MAGIC and count <= RECORDS and zlib.crc32(page[_CRC_FROM:]) == crc:
        return (packed[: count * RECORD_BYTES], "sound") if owner == store_id else (b"", "bad")
    if page == _BLANK:
        return b"", "blank"
    return b"".join(line for line in _split(packed) if record_sound(line)), "bad"


def peek_store_id(files: FileIO, path: str) -> bytes | None:
    """Return the store id of the first sound page of a journal, for a lost superblock."""
    try:
        fd = files.open(path, write=False)
    except OSError:
        return None
    try:
        start = files.next_data(fd, 0) // PAGE_BYTES * PAGE_BYTES
        block = memoryview(bytearray(max(0, min(_READ_BYTES, files.size(fd) - start))))
        read_fully(files, fd, block, start)
        for at in range(0, len(block) - PAGE_BYTES + 1, PAGE_BYTES):
            page = block[at : at + PAGE_BYTES]
            magic, crc, _, store_id, _ = _HEAD.unpack_from(page)
            if magic == _MAGIC and zlib.crc32(page[_CRC_FROM:]) == crc:
                return bytes(store_id)
        return None
    except OSError:
        return None
    finally:
        files.close(fd)


class Journal:
    """Journal file, written by its owner or followed by a reader.

    Args:
        files: File operations.
        path: The file; made if `write`.
        store_id: 16 bytes that every page of this store carries.
        write: Whether to append to it.
        capacity_bytes: Capacity of the store, which bounds the reading of a file that is no
            journal.

    Attributes:
        count: Records in the file, dead ones included.
        bad_pages: Damaged pages read so far.
        sound_pages: Whole pages read so far; a journal has at least one, even of an empty store.
        mixed: Whether records that were read were numbered apart.
        capacity_bytes: Capacity of the store.

    Raises:
        OSError: The file cannot be opened.
    """

    def __init__(
        self, files: FileIO, path: str, store_id: bytes, *, write: bool, capacity_bytes: int
    ) -> None:
        self.count = self.bad_pages = self.sound_pages = 0
        self._files, self._path, self._store_id, self._write = files, path, store_id, write
        self.capacity_bytes, self.mixed = capacity_bytes, False
        self._fd = files.open(path, write=write)
        self._pages: dict[int, list[bytes]] = {0: []}  # the tail, and pages not on the disk yet
        self._torn = False  # whether a write failed, so that other records may be in the file
        self._tail = 0
        self._tail_seen: set[bytes] = set()
        self._next_seq, self._renamed = 1, write

    @property
    def lost(self) -> bool:
        """Return whether no page read so far is of this store, so that the slots must be read.

        A page that was being written when the machine stopped keeps its earlier records.
        """
        return not self.sound_pages and not self.count

    def next_seq(self) -> int:
        """Return a sequence number above all others."""
        self._next_seq += 1
        return self._next_seq - 1

    def seq_seen(self, seq: int) -> None:
        """Raise the next sequence number above one that was found elsewhere."""
        self._next_seq = max(self._next_seq, seq + 1)

    def read_new(self) -> Rows:
        """Return records appended since the last call, in order; all of them at the first call."""
        files, fd, number = self._files, self._fd, self._tail
        size, most = files.size(fd), self.capacity_bytes
        step = min(_READ_BYTES, max(_LEAST_READ_BYTES, most >> 4) // PAGE_BYTES * PAGE_BYTES)
        found: list[bytes] = []
        while number * PAGE_BYTES < size:
            number = max(number, files.next_data(fd, number * PAGE_BYTES) // PAGE_BYTES)
            want = min(step, size - number * PAGE_BYTES)
            block = memoryview(bytearray(max(0, -(-want // PAGE_BYTES) * PAGE_BYTES)))
            read_fully(files, fd, block[:want], number * PAGE_BYTES)
            pages = [block[at : at + PAGE_BYTES] for at in range(0, len(block), PAGE_BYTES)]
            before = self.sound_pages + self.count, self._tail, self._pages
            found.append(self._read_pages(number, pages))
            number += len(pages)
            if number * PAGE_BYTES > most >> 4 and self.sound_pages + self.count == before[0]:
                _, self._tail, self._pages = before
                break
        if self._write:
            self._start_writing(size)
        every = np.frombuffer(b"".join(found), ROW)
        good, seqs = sensible(every), every["seq"]
        rows, self.mixed = in_order(good, most), self.mixed or numbered_apart(good)
        self.seq_seen(int(rows["seq"].max(initial=0)))
        # Also above those of records that only another version can read.
        self.seq_seen(int(seqs[seqs < _MOST_SEQ // 2].max(initial=0)))
        return rows

    def _read_pages(self, first: int, pages: list[memoryview]) -> bytes:
        """Return the records of some pages, except those of the tail that were read before."""
        found: list[bytes] = []
        last: tuple[int, bytes, str] | None = None
        for number, page in enumerate(pages, first):
            packed, state = read_page(page, self._store_id)
            if state == "blank":
                continue
            self.sound_pages += state == "sound"
            self.bad_pages += state == "bad"
            last = number, packed, state
            if number == self._tail and self._tail_seen:
                packed = b"".join(line for line in _split(packed) if line not in self._tail_seen)
            found.append(packed)
        if last is None:
            return b""
        number, packed, state = last
        if number > self._tail:
            self._tail_seen.clear()
        lines = _split(packed)
        self._tail_seen.update(lines)
        self._tail = number
        # no record is ever written into a damaged page
        self._pages = {number: lines if state == "sound" else [_BLANK] * RECORDS}
        fresh = b"".join(found)
        self.count += len(fresh) // RECORD_BYTES
        return fresh

    def _start_writing(self, size: int) -> None:
        cut = self._tail == size // PAGE_BYTES  # the last page ends too early
        if cut or len(self._pages[self._tail]) >= RECORDS:
            self._tail += size > 0
            self._pages = {self._tail: []}
        end = self._tail + bool(self._pages[self._tail])
        if size > end * PAGE_BYTES:  # unread bytes must not come to life when pages reach them
            self._files.truncate(self._fd, end * PAGE_BYTES)

    def append(self, records: Iterable[Record], *, keep: bool = False) -> None:
        """Write records behind the others.

        Args:
            records: Records to write.
            keep: If writing fails, write them with the next ones instead of forgetting them.

        Raises:
            OSError: They are not on the disk, or may be taken back from there.
        """
        tail, there, before = self._tail, len(self._pages[self._tail]), self.count
        for record in records:
            if len(self._pages[self._tail]) == RECORDS:
                self._tail += 1
                self._pages[self._tail] = []
            self._pages[self._tail].append(pack_record(record))
            self.count += 1
        try:
            self._flush()
        except OSError:
            if not keep:
                self._pages = {n: lines for n, lines in self._pages.items() if n <= tail}
                del self._pages[tail][there:]
                self._tail, self.count = tail, before
            raise

    def _flush(self) -> None:
        first = min(self._pages)
        data = b"".join(
            pack_page(number, self._store_id, self._pages[number])
            for number in range(first, self._tail + 1)
        )
        torn, self._torn = self._torn, True
        write_fully(self._files, self._fd, [data], first * PAGE_BYTES)
        if torn:  # pages of a failed write, which may reach further
            self._files.truncate(self._fd, (self._tail + 1) * PAGE_BYTES)
        self._pages = {self._tail: self._pages[self._tail]}
        self._torn = False

    def repair(self) -> None:
        """Take back the leftovers of a failed append, and write the records that it was to keep.

        Raises:
            OSError: Leftovers may still be there, or the kept records are not.
        """
        if self._torn and any(self._pages.values()):
            self._flush()
        elif self._torn:
            self._files.truncate(self._fd, self._tail * PAGE_BYTES)
            self._torn = False

    def sync(self) -> None:
        """Wait until the device has all appended records, and the name of the file."""
        self._files.sync(self._fd)
        if self._renamed:
            self._files.sync_directory(os.path.dirname(self._path))
            self._renamed = False

    def rewrite(self, live: Iterable[bytes], *, durable: bool = True) -> None:
        """Replace the file by one with only these packed records, atomically.

        Args:
            live: Packed records.
            durable: Wait for the device before the old file goes; for the name, `sync` waits.

        Raises:
            OSError: The old file is still there and in use.
        """
        lines, temporary, tail = iter(live), self._path + ".tmp", list[bytes]()
        fd = self._files.open(temporary, write=True)
        try:
            self._files.truncate(fd, 0)
            data, number, full = bytearray(), -1, True
            while full:
                number, tail = number + 1, list(islice(lines, RECORDS))
                data += pack_page(number, self._store_id, tail)
                full = len(tail) == RECORDS
                if not full or len(data) >= _WRITTEN_BYTES:
                    write_fully(self._files, fd, [data], (number + 1) * PAGE_BYTES - len(data))
                    data = bytearray()
            if durable:
                self._files.sync(fd)
            self._files.replace(temporary, self._path, durable=False)
        except OSError:
            self._files.close(fd)
            with contextlib.suppress(OSError):
                self._files.remove(temporary)
            raise
        self._files.close(self._fd)
        self._fd, self.count, self._tail = fd, number * RECORDS + len(tail), number
        self._pages, self._renamed = {self._tail: tail}, True
        self._torn = False

    def rewound(self) -> bool:
        """Return whether the owner took back some of the records read here."""
        page = memoryview(bytearray(PAGE_BYTES))
        read_fully(self._files, self._fd, page, self._tail * PAGE_BYTES)
        packed, _ = read_page(page, self._store_id)
        return not self._tail_seen.issubset(_split(packed))

    def replaced(self) -> bool:
        """Return whether the path leads to another file by now."""
        return not self._files.same(self._fd, self._path)

    def close(self) -> None:
        """Close the file; nothing is synced."""
        self._files.close(self._fd)


def _split(packed: bytes) -> list[bytes]:
    return [packed[at : at + RECORD_BYTES] for at in range(0, len(packed), RECORD_BYTES)]


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
