"""The journal of a disk tier: which frame lies in which slot, as fixed records in checked pages.

    file   = page | page | ...                              4 KiB each, appended; the last one grows
    page   = magic, crc32, count, store id, number (64 bytes) | 18 records of 224 bytes
    record = op, sequence number, slot, everything the frame says about itself | crc32

The newest record of a key, and of a slot, wins. One wrong bit costs at most one record: a page
whose crc fails is searched record by record, and reading goes on with the next page. Rewriting the
last page in place is safe even if the machine dies meanwhile, because records that are already
there keep their bytes. Nothing here is trusted: a frame is served only if its own header and
digests agree, so the worst a bad journal does is forget.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from flowkv.core.layout import CODECS, GRANULE_BYTES
from flowkv.tiers.base import FrameInfo
from flowkv.tiers.disk.files import FileIO, read_fully, write_fully
from flowkv.tiers.frame import KINDS, MAX_STRIPES, header_bytes

PAGE_BYTES = 4096
RECORD_BYTES = 224
RECORDS = 18
CHARGE_BYTES = 228
"""Charged per record: its share of a page, rounded up."""
STORED, DELETED = 1, 2

_MAGIC = b"FKVJRNL1"
_HEAD = struct.Struct("<8sII16sQ24x")
_CRC_FROM = 12  # the crc covers what follows it
_RECORD = struct.Struct("<32s32s32s32s16s Q IQI Q 6I 4B 16x I")
_CRC = struct.Struct("<I")
_READ_BYTES = 1 << 22
_BLANK = bytes(PAGE_BYTES)


class Slot(NamedTuple):
    """A place for a frame: size in granules, and position in the slab file of that size."""

    granules: int
    number: int


class Held(NamedTuple):
    """Where a frame lies and what it says about itself.

    Attributes:
        seq: Sequence number of the record, unique in the store: the slot's generation.
        slot: Where it lies.
        stripes: Stripes of the body.
        info: The frame's description.
    """

    seq: int
    slot: Slot
    stripes: int
    info: FrameInfo

    @property
    def body_bytes(self) -> int:
        """Length of the body."""
        return self.stripes * self.info.stripe_bytes

    @property
    def frame_bytes(self) -> int:
        """Length of header and body."""
        return header_bytes(self.stripes) + self.stripes * self.info.stripe_bytes

    @property
    def charge_bytes(self) -> int:
        """What the frame is charged: its slot, and its records before and after a compaction."""
        return self.slot.granules * GRANULE_BYTES + 2 * CHARGE_BYTES


class Record(NamedTuple):
    """One line of the journal: `op` is `STORED` or `DELETED`."""

    op: int
    key: bytes
    held: Held


def pack_record(record: Record) -> bytes:
    """224 bytes."""
    op, key, (seq, slot, stripes, info) = record
    data = _RECORD.pack(
        *(key, info.parent, info.namespace, info.tenant, info.layout, seq, *slot, stripes),
        *(info.stripe_bytes, info.group, info.tokens, info.rank, info.world),
        *(info.head_start, info.head_stop, op, KINDS.index(info.kind), info.codec, info.fidelity),
        0,
    )
    return data[:-4] + _CRC.pack(zlib.crc32(data[:-4]))


def unpack_records(payload: bytes | memoryview) -> Iterator[Record]:
    """Records of a checked payload; those that make no sense are left out."""
    shared: dict[bytes, bytes] = {}  # thousands of frames have the same namespace
    share = shared.setdefault
    for fields in _RECORD.iter_unpack(payload):
        key, parent, namespace, tenant, layout, seq, granules, number, stripes = fields[:9]
        step, group, tokens, rank, world, start, stop, op, kind, codec, fidelity, _ = fields[9:]
        if op not in (STORED, DELETED) or kind >= len(KINDS) or fidelity >= len(CODECS):
            continue
        if not 1 <= stripes <= MAX_STRIPES:
            continue
        if header_bytes(stripes) + stripes * step > granules * GRANULE_BYTES:
            continue
        info = FrameInfo(
            KINDS[kind],
            codec,
            fidelity,
            share(layout, layout),
            parent,
            share(namespace, namespace),
            group,
            tokens,
            step,
            share(tenant, tenant),
            rank,
            world,
            start,
            stop,
        )
        yield Record(op, key, Held(seq, Slot(granules, number), stripes, info))


def pack_page(number: int, store_id: bytes, records: Iterable[bytes]) -> bytearray:
    """A whole page of at most 18 packed records."""
    page = bytearray(PAGE_BYTES)
    packed = b"".join(records)
    _HEAD.pack_into(page, 0, _MAGIC, 0, len(packed) // RECORD_BYTES, store_id, number)
    page[_HEAD.size : _HEAD.size + len(packed)] = packed
    _seal(page)
    return page


def read_page(page: memoryview, store_id: bytes) -> tuple[bytes, str]:
    """Packed records of a page, and whether it was "sound", "blank" or "bad"."""
    magic, crc, count, owner, _ = _HEAD.unpack_from(page)
    if magic == _MAGIC and count <= RECORDS and zlib.crc32(page[_CRC_FROM:]) == crc:
        if owner != store_id:
            return b"", "bad"
        return bytes(page[_HEAD.size : _HEAD.size + count * RECORD_BYTES]), "sound"
    if page == _BLANK:
        return b"", "blank"
    lines = (
        page[at : at + RECORD_BYTES]
        for at in range(_HEAD.size, _HEAD.size + RECORDS * RECORD_BYTES, RECORD_BYTES)
    )
    sound = (line for line in lines if zlib.crc32(line[:-4]) == _CRC.unpack(line[-4:])[0])
    return b"".join(sound), "bad"


def peek_store_id(files: FileIO, path: str) -> bytes | None:
    """Store id of the first sound page of a journal, for when the superblock is lost."""
    try:
        fd = files.open(path, write=False)
    except OSError:
        return None
    try:
        page = memoryview(bytearray(PAGE_BYTES))
        for offset in range(0, files.size(fd) - PAGE_BYTES + 1, PAGE_BYTES):
            read_fully(files, fd, page, offset)
            magic, crc, _, store_id, _ = _HEAD.unpack_from(page)
            if magic == _MAGIC and zlib.crc32(page[_CRC_FROM:]) == crc:
                return bytes(store_id)
        return None
    except OSError:
        return None
    finally:
        files.close(fd)


def _seal(page: bytearray) -> None:
    _CRC.pack_into(page, 8, zlib.crc32(memoryview(page)[_CRC_FROM:]))


class Journal:
    """One journal file, written by its owner or followed by a reader.

    Args:
        files: File operations.
        path: The file; made if `write`.
        store_id: 16 bytes that every page of this store carries.
        write: Whether to append to it.

    Attributes:
        count: Records in the file, dead ones included.
        bad_pages: Damaged pages met so far.
        sound_pages: Whole pages met so far; a journal has at least one, even of an empty store.

    Raises:
        OSError: The file cannot be opened.
    """

    def __init__(self, files: FileIO, path: str, store_id: bytes, *, write: bool) -> None:
        self.count = self.bad_pages = self.sound_pages = 0
        self._files, self._path, self._store_id, self._write = files, path, store_id, write
        self._fd = files.open(path, write=write)
        self._pages: dict[int, list[bytes]] = {0: []}  # the tail, and pages not on the disk yet
        self._tail = 0
        self._tail_seen: set[bytes] = set()
        self._next_seq = 1

    def next_seq(self) -> int:
        """A sequence number above all others."""
        self._next_seq += 1
        return self._next_seq - 1

    def read_new(self) -> Iterator[Record]:
        """Records appended since the last call; from the start at the first call."""
        number, size = self._tail, self._files.size(self._fd)
        first = number
        while number * PAGE_BYTES < size:
            want = min(_READ_BYTES, size - number * PAGE_BYTES)
            block = memoryview(bytearray(-(-want // PAGE_BYTES) * PAGE_BYTES))
            read_fully(self._files, self._fd, block[:want], number * PAGE_BYTES)
            for at in range(0, len(block), PAGE_BYTES):
                packed, state = read_page(block[at : at + PAGE_BYTES], self._store_id)
                if number > first:
                    self._tail_seen.clear()
                self._tail = number
                number += 1
                yield from self._fresh(packed, state, last=number * PAGE_BYTES >= size)
        if self._write:
            self._start_writing(size)

    def _fresh(self, packed: bytes, state: str, *, last: bool) -> Iterator[Record]:
        if self._tail_seen or last:
            lines = [packed[at : at + RECORD_BYTES] for at in range(0, len(packed), RECORD_BYTES)]
            packed = b"".join(line for line in lines if line not in self._tail_seen)
            self._tail_seen.update(lines)
            self._pages = {self._tail: lines if state != "bad" else [_BLANK] * RECORDS}
        self.bad_pages += state == "bad"
        self.sound_pages += state == "sound"
        self.count += len(packed) // RECORD_BYTES
        for record in unpack_records(packed):
            self._next_seq = max(self._next_seq, record.held.seq + 1)
            yield record

    def _start_writing(self, size: int) -> None:
        if size % PAGE_BYTES or len(self._pages[self._tail]) >= RECORDS:
            self._tail = -(-size // PAGE_BYTES)
            self._pages = {self._tail: []}

    def append(self, records: Iterable[Record], *, keep: bool = False) -> None:
        """Writes records behind the others.

        Args:
            records: What to write.
            keep: If writing fails, write them with the next ones instead of forgetting them.

        Raises:
            OSError: They are not on the disk.
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
        write_fully(self._files, self._fd, [data], first * PAGE_BYTES)
        self._pages = {self._tail: self._pages[self._tail]}

    def sync(self) -> None:
        """Waits until the device has what was appended."""
        self._files.sync(self._fd)

    def rewrite(self, live: Iterable[tuple[bytes, Held]]) -> None:
        """Replaces the file by one with only these frames, atomically.

        Raises:
            OSError: The old file is still there and in use.
        """
        lines = [pack_record(Record(STORED, key, held)) for key, held in live]
        temporary = self._path + ".tmp"
        fd = self._files.open(temporary, write=True)
        try:
            self._files.truncate(fd, 0)
            for first in range(0, len(lines) + 1, RECORDS):
                page = pack_page(first // RECORDS, self._store_id, lines[first : first + RECORDS])
                write_fully(self._files, fd, [page], first // RECORDS * PAGE_BYTES)
            self._files.sync(fd)
            self._files.replace(temporary, self._path)
        except OSError:
            self._files.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        self._files.close(self._fd)
        self._fd, self.count, self._tail = fd, len(lines), len(lines) // RECORDS
        self._pages = {self._tail: lines[self._tail * RECORDS :]}

    def replaced(self) -> bool:
        """Whether the path leads to another file by now."""
        try:
            now = os.stat(self._path, follow_symlinks=False)
        except OSError:
            return True
        mine = os.fstat(self._fd)
        return (now.st_dev, now.st_ino) != (mine.st_dev, mine.st_ino)

    def close(self) -> None:
        """Closes the file."""
        self._files.close(self._fd)
