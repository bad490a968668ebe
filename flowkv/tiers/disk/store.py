"""Store of a disk tier: index, slots, journal and quota; it moves no frames itself.

The steps of a store: a slot (`reserve`), header and body into it, then a journal record and the
index (`commit`). So every frame in the index is on the disk, and `kill -9` loses no acknowledged
store; a store waits for the device only if it is `durable`. Slots being read are pinned; a slot
with wrong bytes is never reused while the directory stays open.

Files are written by their owner only. A reader follows the journal; a frame that moved during its
read is a miss.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flowkv.core.config import format_size
from flowkv.core.errors import ConfigError, FlowKVError, StoreError
from flowkv.core.geometry import GRANULE_BYTES
from flowkv.core.memory import own_memory
from flowkv.tiers.base import BadFrame, Load
from flowkv.tiers.disk.home import (
    CHARGE_BYTES,
    DELETED,
    JOURNAL,
    RECORD_BYTES,
    ROW,
    STORED,
    UNBOUNDED,
    Held,
    Home,
    Journal,
    Record,
    Rows,
    Slot,
    Superblock,
    charge_bytes,
    in_order,
    newest,
    pack_record,
    peek_store_id,
    sensible,
    unpack_row,
    write_superblock,
)
from flowkv.tiers.frame import (
    AES_256_GCM,
    Envelope,
    Header,
    peek_header_bytes,
    wanted,
)
from flowkv.tiers.io.engine import FileIO, read_fully, wipe, write_fully, zeros

# Bytes that a directory may occupy: the capacity, and the part for managing the frames.

LEAST_BYTES = 256 << 10
_FIXED_BYTES = 48 << 10
"""Superblock, lock, erasure log, directory, unfinished journal pages, their copies."""


# Refusals of stores.


class Refused(FlowKVError):
    """Error for a request that cannot be served now; `reason` is "full", "busy" or "read-only"."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the frame was not stored ({reason})", "Make room, or store it later")
        self.reason = reason


# The index of a disk tier: the slot of each frame, in the order of the stores.
#
# Entries read from the journal at opening stay packed in its rows until they are needed, so that a
# store of a hundred thousand frames opens in a fraction of the time that their objects would take.


class Index:
    """Dictionary of `Held` by key, oldest store first. Not thread-safe except for `in`."""

    def __init__(self) -> None:
        self._held: dict[bytes, Held | int] = {}
        self._rows = b""

    def rebuild(self, rows: Rows) -> None:
        """Start from the rows of present frames (`journal.newest`); forget everything else."""
        self._rows = rows.tobytes()
        self._held = dict(zip(rows["key"].tolist(), range(len(rows)), strict=True))

    def apply(self, rows: Rows) -> None:
        """Apply later operations of the owner, except those older than the entry here."""
        packed = rows.tobytes()
        for row in range(len(rows)):
            op, key, held = unpack_row(packed, row)
            known = self.get(key)
            if known is not None and known.seq > held.seq:
                continue
            self._held.pop(key, None)
            if op == STORED:
                self._held[key] = held

    def get(self, key: bytes) -> Held | None:
        """Return the entry of a frame, or None."""
        held = self._held.get(key)
        if isinstance(held, int):
            held = self._held[key] = unpack_row(self._rows, held).held
        return held

    def __setitem__(self, key: bytes, held: Held) -> None:
        self._held[key] = held

    def pop(self, key: bytes) -> Held | None:
        """Forget a frame; return its entry, or None."""
        held = self.get(key)
        self._held.pop(key, None)
        return held

    def __contains__(self, key: bytes) -> bool:
        return key in self._held

    def __len__(self) -> int:
        return len(self._held)

    def oldest(self, n_bytes: int) -> list[bytes]:
        """Return the keys of the oldest frames that are charged at least `n_bytes` together."""
        keys = []
        for key, held in self.items():
            if n_bytes <= 0:
                break
            keys.append(key)
            n_bytes -= charge_bytes(held)
        return keys

    def items(self) -> Iterator[tuple[bytes, Held]]:
        """Yield all frames, oldest store first; the index must not change meanwhile."""
        rows = self._rows
        for key, held in self._held.items():
            yield key, unpack_row(rows, held).held if isinstance(held, int) else held

    def lines(self) -> Iterator[bytes]:
        """Yield packed records of all frames, oldest store first."""
        rows = memoryview(self._rows)
        for key, held in self._held.items():
            if isinstance(held, int):
                yield bytes(rows[held * RECORD_BYTES : (held + 1) * RECORD_BYTES])
            else:
                yield pack_record(Record(STORED, key, held))

    def clear(self) -> None:
        """Forget all frames, also those still packed in rows."""
        self._held, self._rows = {}, b""


# The slab files of a disk tier: fixed slots of a few sizes, reused in place.
#
# One file per slot size, `slab-<granules>`. A slot is `header | body`, whole 4 KiB granules; sizes
# step by an eighth of an octave, so powers of two and most layer counts fit exactly and the rest
# wastes at most an eighth. Space moves between sizes by punching holes into free slots, as late as
# possible: the bytes charged are those that may be on the disk, whatever the lengths of the files.
#
# A free slot is a *hole*, which has no blocks, or *stale*: it still holds the bytes of an earlier
# frame. A store into a stale slot writes all of it, so that no byte of the old frame survives
# behind it.

_MOST_FREE = 1 << 20  # most slots of a size to be reused; the others become holes
SLAB_NAME = re.compile(r"slab-(\d{8})")


def slot_granules(header_bytes: int, body_bytes: int) -> int:
    """Return the size of the slot for such a frame, in granules."""
    body = -(-body_bytes // GRANULE_BYTES)
    step = 1 << max(0, (body - 1).bit_length() - 4)
    return header_bytes // GRANULE_BYTES + -(-body // step) * step


class _SlabFile:
    """State of one slab file; `high` slots were ever used, those in `holes` have no blocks."""

    __slots__ = ("fd", "free", "high", "holes", "named", "reach")

    def __init__(self, fd: int, reach: int) -> None:
        self.fd, self.reach, self.high = fd, reach, 0
        self.named = False  # whether the file's name is on the device for certain
        self.free: dict[int, None] = {}
        self.holes: list[int] = []


class Slabs:
    """Allocator of slots. Not thread-safe except for `read`.

    Args:
        files: File operations.
        directory: Directory of the slab files.
        open_file: Opens a slab file, for reading or writing.
        ahead_bytes: Bytes by which a file grows at a time; 0 for a reader, which changes nothing.

    Attributes:
        allocated_bytes: Bytes of slots that may have blocks on the disk.
        free_bytes: Bytes of those slots that are free.
        pinned: Number of pins of each slot that is being read.
        doomed: Slots of deleted frames that are still being read, to be freed when unpinned.
    """

    def __init__(
        self, files: FileIO, directory: Path, open_file: Callable[..., int], ahead_bytes: int = 0
    ) -> None:
        self.allocated_bytes = self.free_bytes = 0
        self._files, self._directory, self._ahead_bytes = files, directory, ahead_bytes
        self._open_file = open_file
        self._slabs: dict[int, _SlabFile] = {}
        self.pinned: Counter[Slot] = Counter()
        self.doomed: set[Slot] = set()
        self._named: dict[Slot, None] = {}  # stale slots with a frame's name in the first page
        self._damaged: set[Slot] = set()  # quarantined, and still holding bytes
        self._can_punch = True

    def sizes(self) -> list[int]:
        """Return the slot sizes, in granules, for which there is a file."""
        with contextlib.suppress(FileNotFoundError):
            found = map(SLAB_NAME.fullmatch, self._files.names(str(self._directory)))
            return sorted(int(name[1]) for name in found if name and int(name[1]) > 0)
        return []

    def written(self, granules: int) -> Iterator[int]:
        """Yield the numbers of slots of a size that do not begin in a hole, as far as known."""
        size, end_bytes, number = granules * GRANULE_BYTES, self.end_bytes(granules), 0
        while number * size < end_bytes:
            data = self._files.next_data(self._slab(granules).fd, number * size)
            number, within = divmod(data, size)
            if data < end_bytes and within < GRANULE_BYTES:
                yield number
            number += 1

    def end_bytes(self, granules: int) -> int:
        """Return the length of the file of a size; 0 if a reader finds none."""
        try:
            return self._files.size(self._slab(granules).fd)
        except FileNotFoundError:
            return 0

    def reaches(self, slot: Slot, n_bytes: int) -> bool:
        """Return whether the file is long enough to hold so many bytes in a slot."""
        return slot.offset + n_bytes <= self.end_bytes(slot.granules)

    def fd(self, slot: Slot) -> int:
        """Return the descriptor of the file of a slot.

        Raises:
            OSError: It cannot be opened.
        """
        return self._slab(slot.granules).fd

    def occupy(self, granules: NDArray[np.uint32], numbers: NDArray[np.uint64]) -> None:
        """Mark the slots that hold frames; cut off each file behind its last one.

        No two frames share a slot, and every slot is within its file (`recover`).
        """
        for each in sorted({*self.sizes(), *np.unique(granules).tolist()}):
            taken = np.sort(numbers[granules == each]).astype(np.int64)
            slab, size = self._slab(each), each * GRANULE_BYTES
            slab.high = int(taken[-1]) + 1 if len(taken) else 0
            free, far = _unused(taken)
            slab.free = dict.fromkeys(free[::-1].tolist())
            self._files.truncate(slab.fd, slab.high * size)
            slab.reach = slab.high
            self.allocated_bytes += (len(taken) + len(free)) * size
            self.free_bytes += len(free) * size
            for first, count in far:
                if not self._punch(Slot(each, first), count):
                    self.allocated_bytes += count * size

    def take(self, granules: int, budget_bytes: int) -> tuple[Slot, bool] | None:
        """Take a free slot; return it and whether it is stale; None beyond the budget.

        Raises:
            OSError: The file cannot be opened or extended.
        """
        slab, size = self._slab(granules), granules * GRANULE_BYTES
        fresh = 0 if slab.free else size
        if fresh:
            self._extend(slab, size)
        excess = self.allocated_bytes + fresh - budget_bytes
        if excess > 0 and self._reclaim(excess, granules) < excess:
            return None
        if not fresh:
            self.free_bytes -= size
            slot = Slot(granules, slab.free.popitem()[0])
            self._named.pop(slot, None)
            return slot, True
        self.allocated_bytes += size
        if slab.holes:
            return Slot(granules, slab.holes.pop()), False
        slab.high += 1
        return Slot(granules, slab.high - 1), False

    def give_back(self, slot: Slot) -> None:
        """Free a slot, once no load reads it any more."""
        if self.pinned[slot] > 0:
            self.doomed.add(slot)
            return
        self._named[slot] = None
        self._slab(slot.granules).free[slot.number] = None
        self.free_bytes += slot.granules * GRANULE_BYTES

    def quarantine(self, slot: Slot) -> None:
        """Take a slot out of use until the directory is opened again, and free its blocks."""
        if self._punch(slot, 1):
            self.allocated_bytes -= slot.granules * GRANULE_BYTES
        else:
            self._damaged.add(slot)

    def pin(self, slot: Slot) -> None:
        """Keep a slot from being reused."""
        self.pinned[slot] += 1

    def unpin(self, slot: Slot) -> None:
        """End one `pin`; after the last one, free the slot of a deleted frame."""
        self.pinned[slot] -= 1
        if self.pinned[slot] <= 0:
            del self.pinned[slot]
            if slot in self.doomed:
                self.doomed.discard(slot)
                self.give_back(slot)

    def read(self, slot: Slot, target: memoryview) -> int:
        """Read the beginning of a slot; return the number of bytes read."""
        return read_fully(self._files, self.fd(slot), target, slot.offset)

    def there(self, granules: int) -> bool:
        """Return whether the file of a size is still at its path."""
        return self._files.same(self._slab(granules).fd, self._path(granules))

    def intact(self) -> bool:
        """Return whether every opened file is still at its path."""
        return all(self._files.same(slab.fd, self._path(n)) for n, slab in self._slabs.items())

    def sync(self, sizes: Iterator[int] | list[int]) -> None:
        """Wait until the device has all bytes written to the files of these sizes."""
        for granules in sizes:
            self._files.sync(self._slab(granules).fd)
            self.name(granules)

    def name(self, granules: int) -> None:
        """Wait until the name of a file is on the device."""
        slab = self._slab(granules)
        if not slab.named:
            self._files.sync_directory(str(self._directory))
            slab.named = True

    def trim(self, budget_bytes: int) -> None:
        """Return the blocks of free slots to the disk until all slots stay within the budget."""
        self._reclaim(self.allocated_bytes - budget_bytes, 0)

    # --- leftovers of deleted frames ---------------------------------------------------------

    def to_blank(self, most: int) -> list[Slot]:
        """Take some stale slots that still name a frame, out of use until `blanked`."""
        slots: list[Slot] = []
        while self._named and len(slots) < most:
            slot = self._named.popitem()[0]
            del self._slabs[slot.granules].free[slot.number]
            slots.append(slot)
        return slots

    def blank(self, slot: Slot) -> None:
        """Overwrite the first page: a deleted frame stays away, even if the journal is lost."""
        write_fully(self._files, self.fd(slot), [zeros()[:GRANULE_BYTES]], slot.offset)

    def blanked(self, slots: list[Slot]) -> None:
        """Return blanked slots to use."""
        for slot in slots:
            self._slabs[slot.granules].free[slot.number] = None

    def wipe(self) -> None:
        """Erase the bytes of all free and quarantined slots, on the device too.

        Raises:
            OSError: Some bytes may still be there.
        """
        for granules, slab in self._slabs.items():
            size = granules * GRANULE_BYTES
            for first, count in _runs(sorted(slab.free)):
                if self._make_holes(slab, Slot(granules, first), count):
                    for number in range(first, first + count):
                        del slab.free[number]
                else:
                    wipe(self._files, slab.fd, first * size, count * size)
        self._named.clear()
        damaged = list(self._damaged)
        for slot in damaged:
            wipe(self._files, self.fd(slot), slot.offset, slot.n_bytes)
        # also files that were only cut short when they were opened
        for slab in self._slabs.values():
            self._files.sync(slab.fd)
        self._damaged.difference_update(damaged)  # a sync that failed may have lost the zeros

    def close(self) -> None:
        """Close all slab files."""
        for slab in self._slabs.values():
            self._files.close(slab.fd)
        self._slabs.clear()

    def _slab(self, granules: int) -> _SlabFile:
        slab = self._slabs.get(granules)
        if slab is None:
            fd = self._open_file(self._path(granules), write=self._ahead_bytes > 0)
            reach = self._files.size(fd) // (granules * GRANULE_BYTES)
            slab = self._slabs.setdefault(granules, _SlabFile(fd, reach))
            if slab.fd != fd:  # another thread was faster
                self._files.close(fd)
        return slab

    def _path(self, granules: int) -> str:
        return str(self._directory / f"slab-{granules:08d}")

    def _extend(self, slab: _SlabFile, size: int) -> None:
        # Growing the file well ahead of its content, by holes, keeps file systems from reserving
        # blocks behind the end at every write, which would count against the directory's limit.
        if not slab.holes and slab.high >= slab.reach:
            reach = slab.high + max(1, self._ahead_bytes // size)
            self._files.truncate(slab.fd, reach * size)
            slab.reach = reach

    def _reclaim(self, want_bytes: int, needed: int) -> int:
        """Punch free slots, of other sizes first, until so much is free; return the bytes freed."""
        got = 0
        for granules in sorted(self._slabs, key=lambda g: (g == needed, -g)):
            slab, keep = self._slabs[granules], int(granules == needed)
            size = granules * GRANULE_BYTES
            while got < want_bytes and len(slab.free) > keep:
                first = end = next(reversed(slab.free))
                most = min(len(slab.free) - keep, -((got - want_bytes) // size))
                while end - first < most and next(reversed(slab.free)) == end:
                    end = slab.free.popitem()[0] + 1  # just as fast with millions of free slots
                if not self._make_holes(slab, Slot(granules, first), end - first):
                    slab.free |= dict.fromkeys(reversed(range(first, end)))
                    return got
                got += (end - first) * size
        return got

    def _make_holes(self, slab: _SlabFile, first: Slot, count: int) -> bool:
        """Punch neighbouring free slots; False where that does not work."""
        if not self._punch(first, count):
            return False
        numbers = range(first.number, first.number + count)
        slab.holes += numbers
        for number in numbers if self._named else ():
            self._named.pop(Slot(first.granules, number), None)
        self.allocated_bytes -= count * first.n_bytes
        self.free_bytes -= count * first.n_bytes
        return True

    def _punch(self, slot: Slot, count: int) -> bool:
        if self._can_punch:
            try:
                self._files.punch(self.fd(slot), slot.offset, count * slot.n_bytes)
                return True
            except OSError as error:
                self._can_punch = error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS)
        return False


def _unused(taken: NDArray[np.int64]) -> tuple[NDArray[np.int64], list[tuple[int, int]]]:
    """Return the free slots before the last taken one: the first ones, and the rest as runs.

    A file that claims to be endless may hold a frame at its end: not all slots before it are
    needed.
    """
    first = np.append(0, taken[:-1] + 1)[: len(taken)]
    count = taken - first
    near = np.clip(_MOST_FREE - (np.cumsum(count) - count), 0, count)
    free = np.repeat(first - (np.cumsum(near) - near), near) + np.arange(near.sum())
    far = count > near
    return free, list(zip((first + near)[far].tolist(), (count - near)[far].tolist(), strict=True))


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """Yield first and count of each run of neighbours."""
    for _, run in groupby(enumerate(numbers), lambda one: one[1] - one[0]):
        (_, first), *others = run
        yield first, 1 + len(others)


# Recovery of a disk tier's index: replay of the journal, or of the slots if it is lost.

_KEY_AT, _SEQ_AT = slice(40, 72), slice(224, 232)  # slices of a header
_MOST_STRIPE_BYTES = 1 << 31  # largest stripe of a compressed frame that is checked in place


def open_journal(files: FileIO, directory: Path, superblock: Superblock, *, write: bool) -> Journal:
    """Open the journal of a directory.

    Raises:
        OSError: It cannot be opened; a reader finds none before the owner made one.
    """
    if write:
        with contextlib.suppress(FileNotFoundError):
            files.remove(str(directory / f"{JOURNAL}.tmp"))  # left by an unfinished compaction
    path, store_id = str(directory / JOURNAL), store_id_of(superblock)
    if store_id is None:
        store_id = peek_store_id(files, path) or (files.random(16) if write else bytes(16))
        if write:  # so that the next opening finds records appended from now on
            superblock.store_id = store_id.hex()
            write_superblock(files, directory, superblock)
    capacity_bytes = superblock.capacity_bytes
    return Journal(files, path, store_id, write=write, capacity_bytes=capacity_bytes)


def store_id_of(superblock: Superblock) -> bytes | None:
    """Return the 16 bytes that pages of a store carry; None if the superblock has no valid ones."""
    try:
        store_id = bytes.fromhex(superblock.store_id)
    except ValueError:
        return None
    return store_id if len(store_id) == 16 else None


def recover(slabs: Slabs, journal: Journal, index: Index, envelope: Envelope) -> Rows:
    """Fill the index of an owner that opens the directory, and mark the used slots in the slabs.

    Returns:
        The rows of the frames found.

    Raises:
        OSError: The files cannot be read.
    """
    rows = journal.read_new()
    if journal.mixed:
        rows = rows[[row["op"] == DELETED or _in_slot(slabs, row) for row in rows]]
    rows = rows[newest(rows)]
    if journal.lost:
        rows = rows_in_slots(slabs, envelope, journal.capacity_bytes)
        journal.seq_seen(int(rows["seq"].max(initial=0)))
    rows = within(slabs, rows)
    index.rebuild(rows)
    if journal.mixed or (journal.lost and len(rows)):
        journal.rewrite(index.lines())
    slabs.occupy(rows["granules"], rows["number"])
    return rows


def _in_slot(slabs: Slabs, row: np.void) -> bool:
    """Return whether the header in the slot of a row names its frame."""
    page, slot = own_memory(GRANULE_BYTES), Slot(int(row["granules"]), int(row["number"]))
    if slabs.reaches(slot, GRANULE_BYTES):
        slabs.read(slot, page)
    named: bytes = row["key"].tobytes() + row["seq"].tobytes()
    return bytes(page[_KEY_AT]) + bytes(page[_SEQ_AT]) == named


_TENANTS_TRIED = 64


def count_locked(slabs: Slabs, rows: Rows, envelope: Envelope) -> int:
    """Return the number of encrypted frames that have another secret than the envelope.

    All frames of one tenant salt have one secret, for it is made with the secret. So up to three
    headers of each of the largest tenants are read.
    """
    rows = rows[rows["integrity"] == AES_256_GCM]
    if envelope.kind != AES_256_GCM:
        return len(rows)
    page, locked = own_memory(GRANULE_BYTES), 0
    _, tenants, counts = np.unique(rows["tenant"], return_inverse=True, return_counts=True)
    for tenant in np.argsort(counts)[-_TENANTS_TRIED:]:
        own = rows[tenants == tenant]
        some = own[[0, len(own) // 2, -1]]
        slots = (Slot(int(row["granules"]), int(row["number"])) for row in some)
        locked += 0 if any(_opens(slabs, slot, envelope, page) for slot in slots) else len(own)
    return locked


def _opens(slabs: Slabs, slot: Slot, envelope: Envelope, page: memoryview) -> bool:
    try:
        _read_header(slabs, slot, envelope, page)
    except (BadFrame, OSError):
        return False
    return True


def within(slabs: Slabs, rows: Rows) -> Rows:
    """Return the frames inside of their slab files; a file may have been cut off."""
    good = np.zeros(len(rows), np.bool_)
    for granules in slabs.sizes():
        ends = rows["number"] * np.uint64(granules * GRANULE_BYTES) + rows["stored_bytes"]
        good |= (rows["granules"] == granules) & (ends <= np.uint64(slabs.end_bytes(granules)))
    return rows if good.all() else rows[good]


def rows_in_slots(slabs: Slabs, envelope: Envelope, capacity_bytes: int = UNBOUNDED) -> Rows:
    """Return rows made from the headers of all slots, for a lost journal.

    Of a key in two slots, the one that was stored last counts.
    """
    rows = in_order(sensible(packed_rows(frames_in_slots(slabs, envelope))), capacity_bytes)
    return rows[newest(rows)]


def packed_rows(frames: Iterable[tuple[bytes, Held]]) -> Rows:
    """Return the journal rows of these frames."""
    packed = b"".join(pack_record(Record(STORED, key, held)) for key, held in frames)
    return np.frombuffer(packed, ROW)


def frames_in_slots(
    slabs: Slabs, envelope: Envelope, locked: list[Slot] | None = None
) -> Iterator[tuple[bytes, Held]]:
    """Yield key and entry of each frame, read from the headers of all slots.

    Slots are blanked when their frames are deleted, so those do not come back.

    Args:
        slabs: Slabs to search.
        envelope: Checks the headers.
        locked: Gets the slots of frames of another integrity mode.
    """
    page = own_memory(GRANULE_BYTES)
    for slot in (Slot(g, number) for g in slabs.sizes() for number in slabs.written(g)):
        try:
            header = _read_header(slabs, slot, envelope, page)
        except BadFrame as error:
            if error.reason == "integrity" and locked is not None:
                locked.append(slot)
            continue
        size, how = header.frame_bytes, (header.integrity, bool(header.sizes))
        if size <= slot.n_bytes:
            yield header.key, Held(header.generation, slot, header.stripes, header.info, size, *how)


def _read_header(slabs: Slabs, slot: Slot, envelope: Envelope, page: memoryview) -> Header:
    if slabs.read(slot, page) < GRANULE_BYTES:
        raise BadFrame("truncated", "the slot ends within the header")
    size = peek_header_bytes(page)
    if size > slot.n_bytes:
        raise BadFrame("foreign", "the header is longer than the slot")
    if size > GRANULE_BYTES:
        page = own_memory(size)
        page = page[: slabs.read(slot, page)]
    return envelope.head(page, bytes(page[_KEY_AT]))


def check_frame(data: memoryview, key: bytes, held: Held, envelope: Envelope) -> Header:
    """Verify all stripes of the frame in a slot; return its header.

    Raises:
        BadFrame: It is another frame, or damaged.
    """
    header = agree(envelope.head(data, key, generation=held.seq), held)
    if header.sizes and header.info.stripe_bytes > _MOST_STRIPE_BYTES:
        raise BadFrame("foreign", f"a compressed stripe of {header.info.stripe_bytes} bytes")
    # of one stripe: compressed ones are small
    scratch = memoryview(bytearray(header.info.stripe_bytes))
    for number in range(header.stripes):
        offset, n_bytes = envelope.place(header, number, 1)
        envelope.open(header, data[offset : offset + n_bytes], scratch, number, 1)
    return header


def agree(header: Header, held: Held) -> Header:
    """Return a header, if it matches the journal's entry.

    Raises:
        BadFrame: "foreign": the slot holds another frame of this key.
    """
    said = held.stripes, held.info, held.integrity, held.lossless
    found = header.stripes, header.info, header.integrity, bool(header.sizes)
    if found != said or header.frame_bytes != held.stored_bytes:
        raise BadFrame("foreign", "the slot holds another frame of this key")
    return header


_BLANKED_AT_ONCE = 16
_LOOK_S = 0.01
_stores: weakref.WeakSet[DiskStore] = weakref.WeakSet()  # stores with bound caches


class DiskStore:
    """Index and slots of the frames in one directory. Thread-safe.

    Args:
        directory: A directory of its own; made if it is missing.
        capacity_bytes: Most bytes that the directory may occupy, everything included.
        exclusive: Refuse a directory that another process owns, instead of only reading it.
        durable: Wait for the device before a store is acknowledged.
        files: File operations.
        envelope: Checks frames, for a lost journal.

    Attributes:
        path: Path of the directory.
        home: The directory and its locks.
        reserved_bytes: Bytes charged for managing frames, even without any frame.
        owner: Whether this object may write; it may lose that, and a reader may become the owner.
        shared: Whether another process wrote here while it was open, or may.
        corrupt: Frames found damaged so far.
        locked: Encrypted frames that were there at the opening, and that the secret does not open.

    Raises:
        ConfigError: The capacity is too small.
        StoreError: The directory cannot be used.
    """

    def __init__(
        self,
        directory: str,
        capacity_bytes: int,
        *,
        exclusive: bool = False,
        durable: bool = False,
        files: FileIO | None = None,
        envelope: Envelope | None = None,
    ) -> None:
        if capacity_bytes < LEAST_BYTES:
            raise ConfigError(
                f"a disk tier has {capacity_bytes} bytes", f"Give it at least {LEAST_BYTES} bytes"
            )
        self.corrupt, self.locked, self._capacity_bytes = 0, 0, capacity_bytes
        self._garbage = min(max(capacity_bytes >> 16, 64), 1 << 18)  # most dead records
        reserve = (capacity_bytes >> 9) + min(capacity_bytes >> 4, 1 << 19)
        self.reserved_bytes = _FIXED_BYTES + reserve + self._garbage * CHARGE_BYTES
        self._files, self._durable = files or FileIO(), durable
        self._envelope = envelope or Envelope()
        self._lock = threading.RLock()
        self._unpinned = threading.Condition(self._lock)
        self._tidying = threading.Lock()
        self._index, self._busy = Index(), set[bytes]()
        self._closed = False
        self._bound: dict[bytes, str] = {}
        self._robbed = False  # whether slab files that were open here are gone, perhaps with frames
        self._freed = False  # whether the journal has deletions that the device may not have
        self.home = Home(self._files, directory, capacity_bytes, exclusive=exclusive)
        self.path, self.owner = self.home.path, self.home.owner
        self.shared = not self.owner
        self._open_file: Callable[..., int] = self._files.open
        self._slabs = Slabs(self._files, self.path, self._open_file)
        self._journal: Journal | None = None

    def open(self, open_file: Callable[..., int] | None = None) -> None:
        """Open the files and read the index.

        Args:
            open_file: Opens slab files for the engine that moves the frames.

        Raises:
            StoreError: It cannot be read.
        """
        self._open_file = open_file or self._files.open
        try:
            if self.owner:
                self._recover()
            else:
                self._slabs = self._new_slabs()
                self.refresh()
                rows = np.frombuffer(b"".join(self._index.lines()), ROW)
                self.locked = count_locked(self._slabs, rows, self._envelope)
        except OSError as error:
            self.close()
            raise StoreError(
                f"the store in {self.path} cannot be opened ({error.strerror})",
                "Check the disk, or choose another directory",
            ) from error

    def used_bytes(self) -> int:
        """Return the bytes charged for frames and for managing them, reserves included."""
        with self._lock:
            return self._overhead_bytes() + self._slabs.allocated_bytes - self._slabs.free_bytes

    def no_room(self, n_bytes: int) -> str:
        """Return why the file system can take no frame; "" if it can, or frames may be evicted."""
        if not self.owner or len(self._index):
            return ""
        try:
            free = self._files.free_bytes(str(self.path))
        except OSError:  # stores will find it
            return ""
        text = f"a frame takes {format_size(n_bytes)}, and the disk has {format_size(free)} left"
        return "" if free >= n_bytes else text

    def frame_bytes(self, body_bytes: int) -> int:
        """Return an upper bound of the bytes charged for one more frame."""
        header = self._envelope.most_bytes(body_bytes) - body_bytes
        granules = slot_granules(header, body_bytes)
        return granules * GRANULE_BYTES + 2 * CHARGE_BYTES

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which keys are in the index."""
        return [key in self._index for key in keys]

    def find(self, key: bytes) -> Held | None:
        """Return the entry of a frame, which may move at any time; None if it is absent."""
        with self._lock:
            return self._index.get(key)

    def entries(self) -> list[tuple[bytes, Held]]:
        """Return the index in the order in which the stores began, as after a replay."""
        with self._lock:
            listed = list(self._index.items())
        return sorted(listed, key=lambda entry: entry[1].seq)

    # --- loads ---------------------------------------------------------------------------------

    def pin(self, key: bytes, layout: bytes, fidelity: int) -> Held | None:
        """Return the entry of a frame and keep its slot until `unpin`; None if it is absent.

        Raises:
            BadFrame: It is not the requested one: "layout" or "fidelity".
        """
        with self._lock:
            held = self._index.get(key)
            if held is None:
                return None
            wanted(held.info, layout, fidelity)
            self._slabs.pin(held.slot)
            return held

    def pin_all(self, wishes: Iterable[Load]) -> list[Held | None]:
        """Pin many frames; None for absent ones and for those with another layout or fidelity."""
        found = list[Held | None]()
        with self._lock:
            for wish in wishes:
                try:
                    found.append(self.pin(wish.key, wish.layout, wish.fidelity))
                except BadFrame:
                    found.append(None)
                except BaseException:
                    self.unpin(held.slot for held in found if held is not None)
                    raise
        return found

    def unpin(self, slots: Iterable[Slot]) -> None:
        """End one `pin` of each slot."""
        with self._lock:
            for slot in slots:
                self._slabs.unpin(slot)
            self._unpinned.notify_all()
            self._let_go()

    def fd(self, slot: Slot) -> int:
        """Return the descriptor of the file of a slot.

        Raises:
            OSError: It cannot be opened.
        """
        return self._slabs.fd(slot)

    def condemn(self, key: bytes, held: Held) -> bool:
        """Drop a frame that was not in its slot; False if a reader merely saw it move."""
        with self._lock:
            self.refresh()
            now = self._index.get(key)
            same = now is not None and now.seq == held.seq
            if not self.owner and not same:
                return False
            self.corrupt += 1
            if same:
                self._index.pop(key)
                if self.leads():
                    self._slabs.quarantine(held.slot)
                    self._note_deleted([Record(DELETED, key, held)])
            return True

    # --- stores --------------------------------------------------------------------------------

    def reserve(self, key: bytes) -> int | None:
        """Return a sequence number for a frame about to be written; None if it is there already.

        Call `leads` before each batch of frames.

        Raises:
            Refused: The key is being written, or this is a reader.
        """
        with self._lock:
            if not self.owner:
                raise Refused("read-only")
            if key in self._index:
                return None
            if key in self._busy:
                raise Refused("busy")
            assert self._journal is not None
            self._busy.add(key)
            return self._journal.next_seq()

    def unreserve(self, key: bytes) -> None:
        """Undo a `reserve` of a key."""
        with self._lock:
            self._busy.discard(key)
            self._let_go()

    def new_slot(self, header_bytes: int, n_bytes: int) -> tuple[Slot, bool]:
        """Return a slot for a frame, and whether it is stale, so that all of it must be written.

        Raises:
            Refused: There is no room.
            OSError: The slab file cannot be opened or extended.
        """
        with self._lock:
            granules = slot_granules(header_bytes, n_bytes - header_bytes)
            if found := self._slabs.take(granules, self._slots_bytes()):
                return found
            raise Refused("full")

    def to_sync(self, batch: Iterable[Record]) -> list[int]:
        """Return the files to sync before a batch counts; an empty list unless durable.

        Raises:
            OSError: The name of a file could not be synced to the device.
        """
        if not self._durable:
            return []
        with self._lock:
            sizes = {written.held.slot.granules: written.held.slot for written in batch}
            for granules in sizes:
                self._slabs.name(granules)
            files = [self._slabs.fd(slot) for slot in sizes.values()]
            if files and self._freed and self._journal is not None:
                # Otherwise a machine that stops now might know of these frames and not of the
                # deletion of those that had their slots, and drop some promised frames to stay
                # within its capacity.
                self._journal.repair()
                self._journal.sync()  # not by an engine: a compaction closes the file meanwhile
                self._freed = False
            return files

    def commit(self, batch: Sequence[Record], claim: Callable[[], Iterable[object]]) -> None:
        """Publish written frames: append them to the journal and the index.

        Args:
            batch: The frames.
            claim: Called once they are in the journal and before they are found; returns None for
                those that shall not count any more, which are deleted.

        Raises:
            OSError: None of them counts, and their slots are free again; ESTALE if they were
                written to files that are no longer in this directory, or another process owns the
                directory now.
        """
        try:
            with self._lock:
                if not self.leads({written.held.slot.granules for written in batch}):
                    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(self.path))
                assert self._journal is not None
                self._compact(self._garbage)
                self._journal.append(batch)
                late = list(batch)  # all of them if the device fails
                try:
                    if self._durable:
                        self._journal.sync()
                    for written, claimed in zip(batch, claim(), strict=True):
                        if claimed is not None:
                            late.remove(written)
                            self._index[written.key] = written.held
                            self._busy.discard(written.key)
                finally:
                    if late:
                        self._note_deleted(late)
                if late:
                    self.abandon(late)
                self._note_bound()  # once an hour: a process that is killed later notes nothing
        except Exception:
            self.abandon(batch)
            raise

    def abandon(self, batch: Iterable[Record]) -> None:
        """Free the slots of written frames that shall not count."""
        with self._lock:
            self._freed = True  # an append that failed may have recorded them
            for _, key, held in batch:
                now = self._index.get(key)
                if now is None or now.seq != held.seq or not self.delete([key]):
                    self._slabs.give_back(held.slot)
                self._busy.discard(key)
            self._let_go()

    # --- deletions -----------------------------------------------------------------------------

    def delete(self, keys: Iterable[bytes]) -> int:
        """Forget frames; a reader forgets none. Return how many were there."""
        with self._lock:
            if not self.leads(()):
                return 0
            gone = [Record(DELETED, key, held) for key in keys if (held := self._index.pop(key))]
            if gone:
                self._note_deleted(gone)
            for one in gone:
                self._slabs.give_back(one.held.slot)
            return len(gone)

    @property
    def doomed(self) -> bool:
        """Return whether slots of deleted frames are still being read."""
        return bool(self._slabs.doomed)

    def wipe(self, wait_s: float) -> None:
        """Erase the bytes of all slots without a frame, of earlier deletions and damage too.

        Raises:
            OSError: Some bytes may still be there.
            Refused: "busy": a slot is still being read after `wait_s`.
        """
        with self._lock:
            if not self.leads(()):
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(self.path))
        with self._tidying, self._lock:
            if not self._unpinned.wait_for(lambda: not self._slabs.doomed, wait_s):
                raise Refused("busy")
            self._slabs.wipe()
            if self._journal is not None:
                with contextlib.suppress(OSError):  # a full disk: the names of deleted frames stay
                    self._journal.repair()
                self._journal.sync()

    def tidy(self) -> bool:
        """Do a little deferred work; return whether there may be more.

        Slots of deleted frames lose their first page, and the journal its dead records.
        """
        if not self.owner or not self._tidying.acquire(blocking=False):
            return False
        try:
            with self._lock:
                if self._journal is None or not self.leads():
                    return False
                with contextlib.suppress(OSError):
                    self._compact(self._garbage // 4)
                slots = self._slabs.to_blank(_BLANKED_AT_ONCE)
            with contextlib.suppress(OSError):  # the journal has the deletions too
                for slot in slots:
                    self._slabs.blank(slot)
            with self._lock:
                self._slabs.blanked(slots)
            return len(slots) == _BLANKED_AT_ONCE
        finally:
            self._tidying.release()
            with self._lock:
                self._let_go()

    def refresh(self) -> None:
        """Apply the owner's changes to a reader's index; without an owner, take over."""
        if self.owner:
            return
        with self._lock, contextlib.suppress(OSError):
            if self._take_over():
                return
            if self._journal is not None and (self._journal.replaced() or self._journal.rewound()):
                self._drop_journal()
            if self._journal is None:
                self._index.clear()
                if self._quiet:  # its slab files may be of another store
                    self._slabs = self._new_slabs()
                superblock = self.home.superblock or self.home.look_again()
                if superblock is None:
                    return
                path = self.path
                self._journal = open_journal(self._files, path, superblock, write=False)
            self._index.apply(self._journal.read_new())

    def survey(self) -> None:
        """Ensure that `entries` omits no frame that was stored here and may still be there.

        Raises:
            OSError: It cannot: directory, journal or slab files were removed or replaced.
        """
        with self._lock:
            self.leads(())
            self.refresh()
            if self._robbed or not self._slabs.intact():
                raise OSError(errno.ESTALE, "its slab files were removed or replaced")
            if self._journal is None or self._journal.replaced():
                raise OSError(errno.ESTALE, "its directory or its journal was removed")
            if not self.owner:
                self._index.apply(self._journal.read_new())

    def close(self) -> None:
        """Close all files and give up ownership; committed frames stay."""
        while self.tidy():
            pass
        with self._lock:
            if self._journal is not None:
                if self.leads():
                    with contextlib.suppress(OSError):
                        self._journal.repair()
                    self._note_bound()
                self._drop_journal()
            self._slabs.close()
            self.home.close()
            self.owner, self._closed = False, True
            self._bound = {}
            self._index.clear()

    # --- namespaces ----------------------------------------------------------------------------

    def bind(self, namespace: bytes, name: str) -> None:
        """Record that a cache uses a namespace from now on."""
        with self._lock:
            self._bound[namespace] = self.home.title = name
            if len(self._bound) > self.home.most:  # of weights that change
                del self._bound[next(iter(self._bound))]
            _stores.add(self)
            if self.leads():
                self._note_bound()

    def in_use(self, namespace: bytes) -> bool:
        """Return whether a cache of this process uses a namespace, or another one did lately."""
        bound = any(namespace in store._bound for store in list(_stores))
        return bound or self.home.in_use(namespace)

    def _note_bound(self) -> None:
        with contextlib.suppress(OSError):  # a full disk: their frames may be evicted too early
            self.home.name(self._bound)

    # --- ownership of the directory --------------------------------------------------------------

    def leads(self, sizes: Iterable[int] | None = None) -> bool:
        """Return whether this object may write: lock, journal and slab files are still in place.

        Otherwise it is a reader from then on, which may become the owner again as any reader may.

        Args:
            sizes: Sizes of the slab files to look at; None looks at the lock alone.
        """
        with self._lock:
            journal = self._journal
            if self.owner and journal is not None:
                there = self.home.holds()
                if there and sizes is not None:
                    there = not journal.replaced() and all(map(self._slabs.there, sizes))
                if not there:
                    self._yield()
            return self.owner

    @property
    def _quiet(self) -> bool:
        """Return whether no operation under way can still read or write a slab file."""
        return not (self._slabs.pinned or self._busy or self._tidying.locked())

    def cede(self, wait_s: float) -> bool:
        """Give up ownership, and read on; return whether all writes of this object have ended.

        Args:
            wait_s: Longest wait for operations under way.
        """
        end_s = time.monotonic() + wait_s
        with self._lock:
            if self._journal is not None and self.leads():
                with contextlib.suppress(OSError):
                    self._journal.repair()
                self._yield()
            while self.home.owner and (left_s := end_s - time.monotonic()) > 0:
                self._unpinned.wait(min(left_s, _LOOK_S))
                self._let_go()
            return not self.home.owner

    def _yield(self) -> None:
        self.owner, self.shared = False, True
        self._drop_journal()
        self._let_go()

    def _let_go(self) -> None:
        """Release the directory once no operation under way can still write to it."""
        if not self.owner and self.home.owner and self._quiet:
            self.home.close()

    def _take_over(self) -> bool:
        """Become the owner if there is none, and nothing is being read."""
        if self._closed or not self._quiet or not self.home.take_over(self._capacity_bytes):
            return False
        self._drop_journal()
        self.owner = True
        try:
            self._recover()
        except (OSError, StoreError):
            self.owner = False
            self._drop_journal()
            self.home.close()
        self._note_bound()
        return self.owner

    def _drop_journal(self) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def _new_slabs(self) -> Slabs:
        ahead_bytes = min(1 << 24, self._capacity_bytes >> 4) if self.owner else 0
        self._robbed = self._robbed or not self._slabs.intact()
        self._slabs.close()
        return Slabs(self._files, self.path, self._open_file, ahead_bytes)

    def _overhead_bytes(self) -> int:
        """Return the bytes that all frames take beside their slots."""
        # Every frame may be in the journal twice: a compaction writes a second record.
        return self.reserved_bytes + 2 * CHARGE_BYTES * (len(self._index) + len(self._busy))

    def _slots_bytes(self) -> int:
        """Return the bytes left for the slots."""
        return self._capacity_bytes - self._overhead_bytes()

    def _note_deleted(self, gone: Iterable[Record]) -> None:
        # If this cannot be written now, it will be with the next record; until then a crash would
        # bring the frames back, unless their slots were reused, which the journal records.
        assert self._journal is not None
        self._freed = True
        with contextlib.suppress(OSError):
            self._compact(self._garbage)
        with contextlib.suppress(OSError):
            seq = self._journal.next_seq
            records = [Record(DELETED, key, held._replace(seq=seq())) for _, key, held in gone]
            self._journal.append(records, keep=True)

    def _compact(self, garbage: int) -> None:
        # With more garbage than the quota charges, there is no time to wait for the device.
        assert self._journal is not None
        if self._journal.count > len(self._index) + garbage:
            wait = self._durable or garbage < self._garbage
            self._journal.rewrite(self._index.lines(), durable=wait)

    def _recover(self) -> None:
        superblock = self.home.superblock
        assert superblock is not None
        self._slabs = self._new_slabs()
        self._journal = open_journal(self._files, self.home.path, superblock, write=True)
        rows = recover(self._slabs, self._journal, self._index, self._envelope)
        excess = self.used_bytes() - self._capacity_bytes
        if excess > 0:  # opened with a smaller capacity than before
            self.delete(self._index.oldest(excess))
        self._slabs.trim(self._slots_bytes())
        # data that a killed process left to the operating system is promised anew
        if self._durable:
            self._slabs.sync(self._slabs.sizes())
            self._journal.sync()
        self.locked = count_locked(self._slabs, rows, self._envelope)
