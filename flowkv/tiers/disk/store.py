"""The core of a disk tier: index, slots, journal and quota; it moves no frames itself.

A store is: a slot (`reserve`), header and body into it, then a journal record and the index
(`commit`). So what is in the index is on the disk, and `kill -9` loses nothing that was
acknowledged; nothing waits for the device unless the store is `durable`. Slots being read are
pinned; a slot whose bytes are wrong is never reused while the directory stays open.

Files are written by their owner only. Anyone else follows the journal, and a frame that moved under
its eyes is a miss.
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
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flowkv.core.config import format_size
from flowkv.core.errors import ConfigError, FlowKVError, StoreError
from flowkv.core.geometry import GRANULE_BYTES
from flowkv.core.memory import own_memory
from flowkv.tiers.base import Load
from flowkv.tiers.disk.home import (
    JOURNAL,
    FrameShape,
    Home,
    Superblock,
    owner_of,
    write_superblock,
)
from flowkv.tiers.disk.journal import (
    CHARGE_BYTES,
    DELETED,
    RECORD_BYTES,
    ROW,
    STORED,
    UNBOUNDED,
    Held,
    Journal,
    Record,
    Rows,
    Slot,
    WrittenFrame,
    charge_bytes,
    in_order,
    newest,
    pack_record,
    peek_store_id,
    sensible,
    unpack_row,
)
from flowkv.tiers.envelope import Envelope
from flowkv.tiers.frame import KINDS, BadFrame, Header, most_header_bytes, peek_header_bytes, wanted
from flowkv.tiers.io.engine import FileIO, read_fully, wipe, write_fully, zeros

# What the superblock says about the frames of a store: hints for whoever looks at it.


class Contents:
    """Shapes and tenants of frames met so far."""

    def __init__(self) -> None:
        self.tenants: set[str] = set()
        self.shapes: set[FrameShape] = set()

    def start(self, rows: Rows) -> None:
        """Begins anew with what a journal says."""
        self.tenants, self.shapes = set(), set()
        names = ("tenant", "layout", "kind", "stripes", "stripe_bytes")
        news = np.ones(len(rows), np.bool_)  # frames of a kind come one after the other
        news[1:] = np.logical_or.reduce([rows[name][1:] != rows[name][:-1] for name in names])
        some = rows[news]
        for each in set(zip(*(some[name].tolist() for name in names), strict=True)):
            self._add(*each)

    def add(self, held: Held) -> None:
        """One more frame."""
        info = held.info
        kind = KINDS.index(info.kind)
        self._add(info.tenant, info.layout, kind, held.stripes, info.stripe_bytes)

    def _add(self, tenant: bytes, layout: bytes, kind: int, stripes: int, step: int) -> None:
        self.tenants.add(tenant.hex())
        self.shapes.add(
            FrameShape(layout=layout.hex(), kind=KINDS[kind], stripes=stripes, stripe_bytes=step)
        )


# What a directory may occupy: the capacity, and what of it managing the frames may take.

LEAST_BYTES = 256 << 10
_FIXED_BYTES = 48 << 10
"""Superblock, lock, log of what was erased, directory, unfinished journal pages, their copies."""


class DirectoryQuota:
    """Bytes of one directory.

    Args:
        capacity_bytes: Most that it may occupy, everything included.

    Attributes:
        capacity_bytes: The same.
        garbage: Dead records that the journal may hold.
        reserved_bytes: What managing frames may take, without any frame.

    Raises:
        ConfigError: The capacity is too small.
    """

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < LEAST_BYTES:
            raise ConfigError(
                f"a disk tier of {capacity_bytes} bytes", f"Give it at least {LEAST_BYTES} bytes"
            )
        self.capacity_bytes = capacity_bytes
        self.garbage = min(max(capacity_bytes >> 16, 64), 1 << 18)
        reserve = (capacity_bytes >> 9) + min(capacity_bytes >> 4, 1 << 19)
        self.reserved_bytes = _FIXED_BYTES + reserve + self.garbage * CHARGE_BYTES

    def overhead_bytes(self, frames: int) -> int:
        """What so many frames take beside their slots."""
        # every frame may stand in the journal twice: a compaction writes a second one
        return self.reserved_bytes + 2 * CHARGE_BYTES * frames

    def slots_bytes(self, frames: int) -> int:
        """What is left for the slots of so many frames."""
        return self.capacity_bytes - self.overhead_bytes(frames)


# Why a store cannot be done now.


class Refused(FlowKVError):
    """A wish that cannot be fulfilled now; `reason` is "full", "busy" or "read-only"."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the frame was not stored ({reason})", "Make room, or store it later")
        self.reason = reason


# The index of a disk tier: which frame lies in which slot, in the order of the stores.
#
# What a journal says at opening stays in its rows until somebody asks, so that a store of a hundred
# thousand frames opens in a fraction of the time that their objects would take.


class Index:
    """A dict of `Held` by key, oldest store first. Not thread-safe but for `in`."""

    def __init__(self) -> None:
        self._held: dict[bytes, Held | int] = {}
        self._rows = b""

    def load(self, rows: Rows) -> None:
        """Starts from the rows that hold (`records.newest`); forgets everything else."""
        self._rows = rows.tobytes()
        self._held = dict(zip(rows["key"].tolist(), range(len(rows)), strict=True))

    def apply(self, rows: Rows) -> None:
        """What the owner did since; nothing that is older than what is known here."""
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
        """Where a frame lies."""
        held = self._held.get(key)
        if isinstance(held, int):
            held = self._held[key] = unpack_row(self._rows, held).held
        return held

    def __setitem__(self, key: bytes, held: Held) -> None:
        self._held[key] = held

    def pop(self, key: bytes) -> Held | None:
        """Forgets a frame; where it lay."""
        held = self.get(key)
        self._held.pop(key, None)
        return held

    def __contains__(self, key: bytes) -> bool:
        return key in self._held

    def __len__(self) -> int:
        return len(self._held)

    def oldest(self, n_bytes: int) -> list[bytes]:
        """Keys of the oldest frames that are charged so much together."""
        keys = []
        for key, held in self.items():
            if n_bytes <= 0:
                break
            keys.append(key)
            n_bytes -= charge_bytes(held)
        return keys

    def items(self) -> Iterator[tuple[bytes, Held]]:
        """All frames, oldest store first; the index must not change meanwhile."""
        rows = self._rows
        for key, held in self._held.items():
            yield key, unpack_row(rows, held).held if isinstance(held, int) else held

    def lines(self) -> Iterator[bytes]:
        """Packed records of all frames, oldest store first."""
        rows = memoryview(self._rows)
        for key, held in self._held.items():
            if isinstance(held, int):
                yield bytes(rows[held * RECORD_BYTES : (held + 1) * RECORD_BYTES])
            else:
                yield pack_record(Record(STORED, key, held))

    def clear(self) -> None:
        """Forgets everything."""
        self._held, self._rows = {}, b""


# The slab files of a disk tier: fixed slots of a few sizes, reused in place.
#
# One file per slot size, `slab-<granules>`. A slot is `header | body`, whole 4 KiB granules; sizes
# step by an eighth of an octave, so powers of two and most layer counts fit exactly and the rest
# wastes at most an eighth. Space moves between sizes by punching holes into free slots, as late as
# possible: what is charged is what may lie on the disk, whatever the files' lengths say.
#
# A free slot is a *hole*, which has no blocks, or *stale*: it still holds what lay there before.
# Who stores a frame into a stale slot writes all of it, so nothing of the old frame survives
# behind it.

_MOST_FREE = 1 << 20  # slots of a size to be reused; a hole is made of the others
SLAB_NAME = re.compile(r"slab-(\d{8})")


def slot_granules(header_bytes: int, body_bytes: int) -> int:
    """Size of the slot that such a frame goes into."""
    body = -(-body_bytes // GRANULE_BYTES)
    step = 1 << max(0, (body - 1).bit_length() - 4)
    return header_bytes // GRANULE_BYTES + -(-body // step) * step


class _SlabFile:
    """Bookkeeping of one file; `high` slots were ever used, those in `holes` have no blocks."""

    __slots__ = ("fd", "free", "high", "holes", "named", "reach")

    def __init__(self, fd: int, reach: int) -> None:
        self.fd, self.reach, self.high = fd, reach, 0
        self.named = False  # whether the device is known to know the file's name
        self.free: dict[int, None] = {}
        self.holes: list[int] = []


class Slabs:
    """Allocates and frees slots. Not thread-safe but for `read`.

    Args:
        files: File operations.
        directory: Where the slab files are.
        ahead_bytes: How far a file is grown at a time; 0 for a reader, who changes nothing.
        open_file: Opens a slab file, for reading or writing; default as `files` does.

    Attributes:
        allocated_bytes: Bytes of slots that may have blocks on the disk.
        free_bytes: Those of them that hold nothing.
    """

    def __init__(
        self,
        files: FileIO,
        directory: Path,
        *,
        ahead_bytes: int = 0,
        open_file: Callable[..., int] | None = None,
    ) -> None:
        self.allocated_bytes = self.free_bytes = 0
        self._files, self._directory, self._ahead_bytes = files, directory, ahead_bytes
        self._open_file = open_file or files.open
        self._slabs: dict[int, _SlabFile] = {}
        self._pins: Counter[Slot] = Counter()
        self._doomed: set[Slot] = set()  # to be freed when unpinned
        self._named: dict[Slot, None] = {}  # stale slots whose first page still names a frame
        self._damaged: set[Slot] = set()  # quarantined, and still holding bytes
        self._can_punch = True

    def sizes(self) -> list[int]:
        """Slot sizes, in granules, of which there is a file."""
        with contextlib.suppress(FileNotFoundError):
            found = map(SLAB_NAME.fullmatch, self._files.names(str(self._directory)))
            return sorted(int(name[1]) for name in found if name and int(name[1]) > 0)
        return []

    def written(self, granules: int) -> Iterator[int]:
        """Numbers of slots of a size that do not begin in a hole, as far as anybody can tell."""
        size, end_bytes, number = granules * GRANULE_BYTES, self.end_bytes(granules), 0
        while number * size < end_bytes:
            data = self._files.next_data(self._slab(granules).fd, number * size)
            number, within = divmod(data, size)
            if data < end_bytes and within < GRANULE_BYTES:
                yield number
            number += 1

    def end_bytes(self, granules: int) -> int:
        """Length of the file of a size; 0 if a reader finds none."""
        try:
            return self._files.size(self._slab(granules).fd)
        except FileNotFoundError:
            return 0

    def reaches(self, slot: Slot, n_bytes: int) -> bool:
        """Whether the file is long enough to hold so many bytes in a slot."""
        return slot.offset + n_bytes <= self.end_bytes(slot.granules)

    def fd(self, slot: Slot) -> int:
        """The file of a slot.

        Raises:
            OSError: It cannot be opened.
        """
        return self._slab(slot.granules).fd

    def occupy(self, granules: NDArray[np.uint32], numbers: NDArray[np.uint64]) -> None:
        """Tells which slots hold frames; cuts off what lies behind the last one of each file.

        No two frames share a slot, and every slot lies within its file (`recover`).
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
        """A free slot and whether it is stale; None if all would not stay within the budget.

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
        """Frees a slot, once nobody reads it any more."""
        if self._pins[slot] > 0:
            self._doomed.add(slot)
            return
        self._named[slot] = None
        self._slab(slot.granules).free[slot.number] = None
        self.free_bytes += slot.granules * GRANULE_BYTES

    def quarantine(self, slot: Slot) -> None:
        """Takes a slot out of use until the directory is opened again; gives back its blocks."""
        if self._punch(slot, 1):
            self.allocated_bytes -= slot.granules * GRANULE_BYTES
        else:
            self._damaged.add(slot)

    def pin(self, slot: Slot) -> None:
        """Keeps a slot from being reused."""
        self._pins[slot] += 1

    def unpin(self, slot: Slot) -> None:
        """Ends one `pin`."""
        self._pins[slot] -= 1
        if self._pins[slot] <= 0:
            del self._pins[slot]
            if slot in self._doomed:
                self._doomed.discard(slot)
                self.give_back(slot)

    def read(self, slot: Slot, target: memoryview) -> int:
        """Reads the beginning of a slot; returns the bytes that were there."""
        return read_fully(self._files, self.fd(slot), target, slot.offset)

    @property
    def pinned(self) -> bool:
        """Whether any slot is being read."""
        return bool(self._pins)

    def there(self, granules: int) -> bool:
        """Whether the file of a size is still at its path."""
        return self._files.same(self._slab(granules).fd, self._path(granules))

    def complete(self) -> bool:
        """Whether every file that was opened is still at its path."""
        return all(self._files.same(slab.fd, self._path(n)) for n, slab in self._slabs.items())

    def sync(self, sizes: Iterator[int] | list[int]) -> None:
        """Waits until the device has what was written to the files of these sizes."""
        for granules in sizes:
            self._files.sync(self._slab(granules).fd)
            self.name(granules)

    def name(self, granules: int) -> None:
        """Waits until the device knows the name of a file."""
        slab = self._slab(granules)
        if not slab.named:
            self._files.sync_directory(str(self._directory))
            slab.named = True

    def trim(self, budget_bytes: int) -> None:
        """Gives back the blocks of free slots until all slots stay within the budget."""
        self._reclaim(self.allocated_bytes - budget_bytes, 0)

    # --- what deleted frames leave behind ----------------------------------------------------

    @property
    def doomed(self) -> int:
        """Slots of deleted frames that somebody still reads."""
        return len(self._doomed)

    def to_blank(self, most: int) -> list[Slot]:
        """Some stale slots that still name a frame, out of use until `blanked`."""
        slots: list[Slot] = []
        while self._named and len(slots) < most:
            slot = self._named.popitem()[0]
            del self._slabs[slot.granules].free[slot.number]
            slots.append(slot)
        return slots

    def blank(self, slot: Slot) -> None:
        """Overwrites the first page: a deleted frame stays away, even if the journal is lost."""
        write_fully(self._files, self.fd(slot), [zeros()[:GRANULE_BYTES]], slot.offset)

    def blanked(self, slots: list[Slot]) -> None:
        """Back into use."""
        for slot in slots:
            self._slabs[slot.granules].free[slot.number] = None

    def wipe(self) -> None:
        """Leaves nothing in any free or quarantined slot, as far as the device is concerned too.

        Raises:
            OSError: Something may still be there.
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
        for slot in list(self._damaged):
            wipe(self._files, self.fd(slot), slot.offset, slot.n_bytes)
            self._damaged.discard(slot)
        for slab in self._slabs.values():  # those only cut short when they were opened, too
            self._files.sync(slab.fd)

    def close(self) -> None:
        """Closes all files."""
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
        """Punches free slots, of other sizes first, until so much is free; returns how much."""
        got = 0
        for granules in sorted(self._slabs, key=lambda g: (g == needed, -g)):
            slab, keep = self._slabs[granules], int(granules == needed)
            size = granules * GRANULE_BYTES
            while got < want_bytes and len(slab.free) > keep:
                first = end = next(reversed(slab.free))
                most = min(len(slab.free) - keep, -((got - want_bytes) // size))
                while end - first < most and next(reversed(slab.free)) == end:
                    end = slab.free.popitem()[0] + 1  # which is as fast where there are millions
                if not self._make_holes(slab, Slot(granules, first), end - first):
                    slab.free |= dict.fromkeys(reversed(range(first, end)))
                    return got
                got += (end - first) * size
        return got

    def _make_holes(self, slab: _SlabFile, first: Slot, count: int) -> bool:
        """Gives back the blocks of neighbouring free slots; False where that does not work."""
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
    """Slots before the last one taken that are not: the first ones, and the rest as runs.

    A file that claims to be endless may hold a frame at its end: nobody needs all slots before it.
    """
    first = np.append(0, taken[:-1] + 1)[: len(taken)]
    count = taken - first
    near = np.clip(_MOST_FREE - (np.cumsum(count) - count), 0, count)
    free = np.repeat(first - (np.cumsum(near) - near), near) + np.arange(near.sum())
    far = count > near
    return free, list(zip((first + near)[far].tolist(), (count - near)[far].tolist(), strict=True))


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """First and count of neighbours."""
    start = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[at - 1] + 1:
            yield numbers[start], at - start
            start = at


# From a disk tier's files to its index: replay of the journal, or of the slots if it is lost.

_KEY_AT = slice(40, 72)  # of a header
_MOST_STRIPE_BYTES = 1 << 31  # of a compressed frame that is checked where it lies


def open_journal(files: FileIO, directory: Path, superblock: Superblock, *, write: bool) -> Journal:
    """The journal of a directory.

    Raises:
        OSError: It cannot be opened; a reader finds none before the owner made one.
    """
    if write:
        with contextlib.suppress(FileNotFoundError):
            files.remove(str(directory / f"{JOURNAL}.tmp"))  # of a compaction that did not end
    path, store_id = str(directory / JOURNAL), store_id_of(superblock)
    if store_id is None:
        store_id = peek_store_id(files, path) or (files.random(16) if write else bytes(16))
        if write:  # what is appended from now on must be found at the next opening
            superblock.store_id = store_id.hex()
            write_superblock(files, directory, superblock)
    capacity_bytes = superblock.capacity_bytes
    return Journal(files, path, store_id, write=write, capacity_bytes=capacity_bytes)


def store_id_of(superblock: Superblock) -> bytes | None:
    """The 16 bytes that pages of a store carry; None if the superblock names something else."""
    try:
        store_id = bytes.fromhex(superblock.store_id)
    except ValueError:
        return None
    return store_id if len(store_id) == 16 else None


def recover(slabs: Slabs, journal: Journal, index: Index, envelope: Envelope) -> Rows:
    """Fills the index of an owner that opens the directory, and tells the slabs what is used.

    Returns:
        The rows of what is there.

    Raises:
        OSError: The files cannot be read.
    """
    rows = journal.read_new()
    rows = rows[newest(rows)]
    if journal.lost:
        rows = rows_in_slots(slabs, envelope, journal.capacity_bytes)
        if len(rows):
            journal.seq_seen(int(rows["seq"].max()))
            index.load(rows)
            journal.rewrite(index.lines())
    rows = within(slabs, rows)
    index.load(rows)
    slabs.occupy(rows["granules"], rows["number"])
    return rows


def within(slabs: Slabs, rows: Rows) -> Rows:
    """Those frames that lie inside of their slab files; a file may have been cut off."""
    good = np.zeros(len(rows), np.bool_)
    for granules in slabs.sizes():
        ends = rows["number"] * np.uint64(granules * GRANULE_BYTES) + rows["stored_bytes"]
        good |= (rows["granules"] == granules) & (ends <= np.uint64(slabs.end_bytes(granules)))
    return rows if good.all() else rows[good]


def rows_in_slots(slabs: Slabs, envelope: Envelope, capacity_bytes: int = UNBOUNDED) -> Rows:
    """What the headers of all slots say; for when the journal is lost.

    Of a key that two slots claim, the one that was stored last counts.
    """
    rows = in_order(sensible(packed_rows(frames_in_slots(slabs, envelope))), capacity_bytes)
    return rows[newest(rows)]


def packed_rows(frames: Iterable[tuple[bytes, Held]]) -> Rows:
    """What a journal would say of these frames."""
    packed = b"".join(pack_record(Record(STORED, key, held)) for key, held in frames)
    return np.frombuffer(packed, ROW)


def frames_in_slots(
    slabs: Slabs, envelope: Envelope, locked: list[Slot] | None = None
) -> Iterator[tuple[bytes, Held]]:
    """What the headers of all slots say.

    Slots are blanked when their frames are deleted, so those do not come back.

    Args:
        slabs: Where to look.
        envelope: How headers are checked.
        locked: Gets the slots of frames that are checked in another way.
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
    """The header of the frame that should lie in a slot, once all of its stripes are verified.

    Raises:
        BadFrame: It does not lie there, or is damaged.
    """
    header = agree(envelope.head(data, key, generation=held.seq), held)
    if header.sizes and header.info.stripe_bytes > _MOST_STRIPE_BYTES:
        raise BadFrame("foreign", f"a compressed stripe of {header.info.stripe_bytes} bytes")
    scratch = memoryview(bytearray(header.info.stripe_bytes))  # of one: compressed ones are small
    for number in range(header.stripes):
        offset, n_bytes = envelope.place(header, number, 1)
        envelope.open(header, data[offset : offset + n_bytes], scratch, number, 1)
    return header


def agree(header: Header, held: Held) -> Header:
    """A header, if it is the one that the journal speaks of.

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
_stores: weakref.WeakSet[DiskStore] = weakref.WeakSet()  # that caches are bound to


class DiskStore:
    """Frames in one directory, as far as books can tell. Thread-safe.

    Args:
        directory: A directory of its own; made if it is not there.
        capacity_bytes: Most bytes that the directory may occupy, everything included.
        exclusive: Refuse a directory that another process owns, instead of only reading it.
        durable: Wait for the device before a store is acknowledged.
        files: File operations.
        envelope: How frames are checked, for when the journal is lost.

    Attributes:
        owner: Whether this object may write; it may lose that, and a reader come to it.
        shared: Whether another process wrote here while it was open, or may.
        corrupt: Frames found damaged so far.

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
        self.corrupt, self._quota = 0, DirectoryQuota(capacity_bytes)
        self._files, self._durable = files or FileIO(), durable
        self._envelope = envelope or Envelope()
        self._lock = threading.RLock()
        self._unpinned = threading.Condition(self._lock)
        self._tidying = threading.Lock()
        self._index, self._busy = Index(), set[bytes]()
        self._contents = Contents()
        self._closed = False
        self._bound: dict[bytes, str] = {}
        self._robbed = False  # of slab files that were open here, and may still hold frames
        self._freed = False  # whether the journal has deletions that the device may not have
        self._home = Home(self._files, directory, capacity_bytes, exclusive=exclusive)
        self.owner = self._home.owner
        self.shared = not self.owner
        self._open_file: Callable[..., int] | None = None
        self._slabs = Slabs(self._files, self._home.path)
        self._journal: Journal | None = None

    def open(self, open_file: Callable[..., int] | None = None) -> None:
        """Reads what is there.

        Args:
            open_file: Opens slab files for whoever moves the frames.

        Raises:
            StoreError: It cannot be read.
        """
        self._open_file = open_file
        try:
            if self.owner:
                self._recover()
            else:
                self._slabs = self._new_slabs()
                self.refresh()
        except OSError as error:
            self.close()
            raise StoreError(
                f"the store in {self.path} cannot be opened ({error.strerror})",
                "Check the disk, or choose another directory",
            ) from error

    @property
    def path(self) -> Path:
        """The directory."""
        return self._home.path

    @property
    def obstacle(self) -> str:
        """Why it may not write, if that is no other owner."""
        return self._home.obstacle

    @property
    def owned_by(self) -> str:
        """What owns the directory, as far as that is known here."""
        return owner_of(self.path)

    def used_bytes(self) -> int:
        """Bytes that are charged: frames, and what managing them takes or may take."""
        with self._lock:
            overhead = self._quota.overhead_bytes(self._frames())
            return overhead + self._slabs.allocated_bytes - self._slabs.free_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes that are charged without any frame."""
        return self._quota.reserved_bytes

    def no_room(self, n_bytes: int) -> str:
        """Return why the file system can take no frame; "" if it can, or frames may give way."""
        if not self.owner or len(self._index):
            return ""
        free = self._files.free_bytes(str(self.path))
        if free >= n_bytes:
            return ""
        return f"a frame takes {format_size(n_bytes)}, and the disk has {format_size(free)} left"

    def frame_bytes(self, body_bytes: int) -> int:
        """Upper bound of what one more frame is charged."""
        header = most_header_bytes(body_bytes, lossless=not self._envelope.plain)
        granules = slot_granules(header, self._envelope.most_bytes(body_bytes) - header)
        return granules * GRANULE_BYTES + 2 * CHARGE_BYTES

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys are in the index."""
        return [key in self._index for key in keys]

    def find(self, key: bytes) -> Held | None:
        """Where a frame lies, for now."""
        with self._lock:
            return self._index.get(key)

    def entries(self) -> list[tuple[bytes, Held]]:
        """The index, oldest store first: in the order in which stores began, as after a replay."""
        with self._lock:
            listed = list(self._index.items())
        return sorted(listed, key=lambda entry: entry[1].seq)

    # --- loads ---------------------------------------------------------------------------------

    def pin(self, key: bytes, layout: bytes, fidelity: int) -> Held | None:
        """Where a frame lies, which then stays as it is until `unpin`; None if it is not there.

        Raises:
            BadFrame: It is not the one wished for: "layout" or "fidelity".
        """
        with self._lock:
            held = self._index.get(key)
            if held is None:
                return None
            wanted(held.info, layout, fidelity)
            self._slabs.pin(held.slot)
            return held

    def pin_all(self, wishes: Iterable[Load]) -> list[Held | None]:
        """The same for many; None also for those that are not the ones wished for."""
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
        """Ends a `pin` of each."""
        with self._lock:
            for slot in slots:
                self._slabs.unpin(slot)
            self._unpinned.notify_all()
            self._let_go()

    def fd(self, slot: Slot) -> int:
        """The file that a slot is in.

        Raises:
            OSError: It cannot be opened.
        """
        return self._slabs.fd(slot)

    def condemn(self, key: bytes, held: Held) -> bool:
        """Drops a frame that was not in its slot; False if a reader merely saw it move."""
        with self._lock:
            self.refresh()
            now = self._index.get(key)
            same = now is not None and now.seq == held.seq
            if not self.owner and not same:
                return False
            self.corrupt += 1
            if same:
                self._index.pop(key)
                if self._leads():
                    self._slabs.quarantine(held.slot)
                    self._note_deleted([(key, held)])
            return True

    # --- stores --------------------------------------------------------------------------------

    def reserve(self, key: bytes) -> int | None:
        """A sequence number for a frame that is about to be written; None if it is there already.

        Raises:
            Refused: The key is being written, or this is a reader.
        """
        with self._lock:
            if not self._leads():
                raise Refused("read-only")
            if key in self._index:
                return None
            if key in self._busy:
                raise Refused("busy")
            assert self._journal is not None
            self._busy.add(key)
            return self._journal.next_seq()

    def release(self, key: bytes) -> None:
        """Takes a `reserve` back."""
        with self._lock:
            self._busy.discard(key)
            self._let_go()

    def place(self, header_bytes: int, n_bytes: int) -> tuple[Slot, bool]:
        """A slot for a frame, and whether it is stale, so that all of it must be written.

        Raises:
            Refused: There is no room.
            OSError: The slab file cannot be opened or extended.
        """
        with self._lock:
            granules = slot_granules(header_bytes, n_bytes - header_bytes)
            if found := self._slabs.take(granules, self._quota.slots_bytes(self._frames())):
                return found
            raise Refused("full")

    def to_sync(self, batch: Iterable[WrittenFrame]) -> list[int]:
        """Files that must be on the device before a batch counts; none unless durable.

        Raises:
            OSError: The device could not be told the name of a file.
        """
        if not self._durable:
            return []
        with self._lock:
            sizes = {written.held.slot.granules: written.held.slot for written in batch}
            for granules in sizes:
                self._slabs.name(granules)
            files = [self._slabs.fd(slot) for slot in sizes.values()]
            if files and self._freed and self._journal is not None:
                # Else a machine that stops now might know of these frames and not of those whose
                # place they took, and drop some that were promised, to stay within its capacity.
                self._journal.settle()
                self._journal.sync()  # not by an engine: a compaction closes the file meanwhile
                self._freed = False
            return files

    def commit(self, batch: Sequence[WrittenFrame]) -> None:
        """Makes written frames count.

        Raises:
            OSError: None of them counts, and their slots are free again; ESTALE if what was written
                lies in no file of this directory any more, or the directory is another's by now.
        """
        try:
            with self._lock:
                if not self._leads({written.held.slot.granules for written in batch}):
                    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(self.path))
                assert self._journal is not None
                self._compact(self._quota.garbage)
                self._journal.append([Record(STORED, *written) for written in batch])
                for key, held in batch:
                    self._index[key] = held
                    self._contents.add(held)
                self._busy.difference_update(key for key, _ in batch)
                if self._durable:
                    self._journal.sync()
        except Exception:
            self.abandon(batch)
            raise

    def abandon(self, batch: Iterable[WrittenFrame]) -> None:
        """Frees the slots of written frames that shall not count."""
        with self._lock:
            self._freed = True  # an append that failed may have told of them
            for key, held in batch:
                now = self._index.get(key)
                if now is None or now.seq != held.seq or not self.delete([key]):
                    self._slabs.give_back(held.slot)
                self._busy.discard(key)
            self._let_go()

    # --- deletions -----------------------------------------------------------------------------

    def delete(self, keys: Iterable[bytes]) -> int:
        """Forgets frames; a reader forgets none. Returns how many were there."""
        with self._lock:
            if not self._leads(()):
                return 0
            gone = [(key, held) for key in keys if (held := self._index.pop(key))]
            if gone:
                self._note_deleted(gone)
            for _, held in gone:
                self._slabs.give_back(held.slot)
            return len(gone)

    @property
    def doomed(self) -> int:
        """Slots of deleted frames that are still being read."""
        return self._slabs.doomed

    def wipe(self, wait_s: float) -> None:
        """Leaves nothing in any slot that holds no frame, of earlier deletions and damage too.

        Raises:
            OSError: Something may still be there.
            Refused: "busy": a slot is still being read after `wait_s`.
        """
        with self._lock:
            if not self._leads(()):
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(self.path))
        with self._tidying, self._lock:
            if not self._unpinned.wait_for(lambda: not self._slabs.doomed, wait_s):
                raise Refused("busy")
            self._slabs.wipe()
            if self._journal is not None:
                with contextlib.suppress(OSError):  # of a full disk: the names of what is gone
                    self._journal.settle()
                self._journal.sync()

    def aside(self) -> list[str]:
        """Stores of other formats in the directory, which this object cannot look into."""
        return self._home.aside()

    def tidy(self) -> bool:
        """Does a little of what can wait until nobody waits; whether there may be more.

        Slots of deleted frames lose their first page, and the journal its dead records.
        """
        if not self.owner or not self._tidying.acquire(blocking=False):
            return False
        try:
            with self._lock:
                if self._journal is None or not self._leads():
                    return False
                with contextlib.suppress(OSError):
                    self._compact(self._quota.garbage // 4)
                slots = self._slabs.to_blank(_BLANKED_AT_ONCE)
            with contextlib.suppress(OSError):  # the journal says so too
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
        """Lets a reader see what the owner did meanwhile; where there is none, it becomes that."""
        if self.owner:
            return
        with self._lock, contextlib.suppress(OSError):
            if self._take_over():
                return
            if self._journal is not None and (self._journal.replaced() or self._journal.rewound()):
                self._drop_journal()
            if self._journal is None:
                self._index.clear()
                if self._quiet:  # of another store, perhaps
                    self._slabs = self._new_slabs()
                superblock = self._home.superblock or self._home.look_again()
                if superblock is None:
                    return
                path = self._home.path
                self._journal = open_journal(self._files, path, superblock, write=False)
            self._index.apply(self._journal.read_new())

    def survey(self) -> None:
        """Sees to it that `entries` leaves nothing out that was stored here and may be there yet.

        Raises:
            OSError: It cannot: directory, journal or slab files were taken away or replaced.
        """
        with self._lock:
            self._leads(())
            self.refresh()
            if self._robbed or not self._slabs.complete():
                raise OSError(errno.ESTALE, "slab files of it were taken away or replaced")
            if self._journal is None or self._journal.replaced():
                raise OSError(errno.ESTALE, "its directory or its journal was taken away")
            if not self.owner:
                self._index.apply(self._journal.read_new())

    def close(self) -> None:
        """Closes all files and gives up ownership; what was committed stays."""
        while self.tidy():
            pass
        with self._lock:
            if self._journal is not None:
                if self._leads():
                    self._note_bound()
                    with contextlib.suppress(OSError):
                        self._journal.settle()
                    self._note_contents()
                self._drop_journal()
            self._slabs.close()
            self._home.close()
            self.owner, self._closed = False, True
            self._bound = {}
            self._index.clear()

    # --- whose frames these are ----------------------------------------------------------------

    def bind(self, namespace: bytes, name: str) -> None:
        """A cache uses a namespace from now on."""
        with self._lock:
            self._bound[namespace] = self._home.title = name
            _stores.add(self)
            self._note_bound()

    def in_use(self, namespace: bytes) -> bool:
        """Whether a cache of this process uses a namespace, or another one did lately."""
        bound = any(namespace in store._bound for store in list(_stores))
        return bound or self._home.in_use(namespace)

    def forget(self, namespaces: Iterable[bytes]) -> None:
        """Notes nothing of namespaces any more.

        Raises:
            OSError: It could not be written.
        """
        with self._lock:
            self._home.forget(namespaces)

    def _note_bound(self) -> None:
        if self._bound and self._leads():
            with contextlib.suppress(OSError):  # of a full disk: they may be evicted too early
                self._home.name(self._bound)

    def _note_contents(self) -> None:
        with contextlib.suppress(OSError):  # of a full disk: only `inspect` misses it
            self._home.note(self._contents.shapes, self._contents.tenants)

    # --- whose directory it is -----------------------------------------------------------------

    def _leads(self, sizes: Iterable[int] | None = None) -> bool:
        """Whether this object may write now: nobody took its lock, journal or slab files away.

        Else it is a reader from then on, which may become the owner again as any reader may.

        Args:
            sizes: Of the slab files to look at; None looks at the lock alone.
        """
        journal = self._journal
        if self.owner and journal is not None:
            there = self._home.holds()
            if there and sizes is not None:
                there = not journal.replaced() and all(map(self._slabs.there, sizes))
            if not there:
                self._yield()
        return self.owner

    @property
    def _quiet(self) -> bool:
        """Whether nothing that was begun can still read or write a slab file."""
        return not (self._slabs.pinned or self._busy or self._tidying.locked())

    def cede(self, wait_s: float) -> bool:
        """Give up the directory, and read on; whether nothing of this object can write any more.

        Args:
            wait_s: Longest wait for what was begun.
        """
        end_s = time.monotonic() + wait_s
        with self._lock:
            if self._journal is not None and self._leads():
                with contextlib.suppress(OSError):
                    self._journal.settle()
                self._note_contents()
                self._yield()
            while self._home.owner and (left_s := end_s - time.monotonic()) > 0:
                self._unpinned.wait(min(left_s, _LOOK_S))
                self._let_go()
            return not self._home.owner

    def _yield(self) -> None:
        self.owner, self.shared = False, True
        self._drop_journal()
        self._let_go()

    def _let_go(self) -> None:
        """Leaves the directory to others once nothing that was begun can still be written."""
        if not self.owner and self._home.owner and self._quiet:
            self._home.close()

    def _take_over(self) -> bool:
        """Becomes the owner if there is none, and nothing is being read."""
        if self._closed or not self._quiet:
            return False
        if not self._home.take_over(self._quota.capacity_bytes):
            return False
        self._drop_journal()
        self.owner = True
        try:
            self._recover()
        except (OSError, StoreError):
            self.owner = False
            self._drop_journal()
            self._home.close()
        self._note_bound()
        return self.owner

    def _drop_journal(self) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def _new_slabs(self) -> Slabs:
        ahead_bytes = min(1 << 24, self._quota.capacity_bytes >> 4) if self.owner else 0
        self._robbed = self._robbed or not self._slabs.complete()
        self._slabs.close()
        path, open_file = self._home.path, self._open_file
        return Slabs(self._files, path, ahead_bytes=ahead_bytes, open_file=open_file)

    def _frames(self) -> int:
        return len(self._index) + len(self._busy)

    def _note_deleted(self, gone: Iterable[tuple[bytes, Held]]) -> None:
        # If this cannot be written now, it will be with the next record; until then a crash would
        # bring the frames back, unless their slots were reused, which the journal knows.
        assert self._journal is not None
        self._freed = True
        with contextlib.suppress(OSError):
            self._compact(self._quota.garbage)
        with contextlib.suppress(OSError):
            seq = self._journal.next_seq
            self._journal.append(
                [Record(DELETED, key, held._replace(seq=seq())) for key, held in gone], keep=True
            )

    def _compact(self, garbage: int) -> None:
        # Beyond all that is charged for it there is no more time to wait for the device.
        assert self._journal is not None
        if self._journal.count > len(self._index) + garbage:
            wait = self._durable or garbage < self._quota.garbage
            self._journal.rewrite(self._index.lines(), durable=wait)

    def _recover(self) -> None:
        superblock = self._home.superblock
        assert superblock is not None
        self._slabs = self._new_slabs()
        self._journal = open_journal(self._files, self._home.path, superblock, write=True)
        rows = recover(self._slabs, self._journal, self._index, self._envelope)
        excess = self.used_bytes() - self._quota.capacity_bytes
        if excess > 0:  # opened with a smaller capacity than before
            self.delete(self._index.oldest(excess))
        self._slabs.trim(self._quota.slots_bytes(self._frames()))
        if self._durable:  # what a killed process left to the operating system is promised anew
            self._slabs.sync(self._slabs.sizes())
            self._journal.sync()
        self._contents.start(rows)
        self._note_contents()
