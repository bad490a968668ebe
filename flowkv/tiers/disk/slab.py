"""The slab files of a disk tier: fixed slots of a few sizes, reused in place.

One file per slot size, `slab-<granules>`. A slot is `header | body`, whole 4 KiB granules; sizes
step by an eighth of an octave, so powers of two and most layer counts fit exactly and the rest
wastes at most an eighth. Space moves between sizes by punching holes into free slots, as late as
possible: what is charged is what may lie on the disk, whatever the files' lengths say.

A free slot is a *hole*, which has no blocks, or *stale*: it still holds what lay there before. Who
stores a frame into a stale slot writes all of it, so nothing of the old frame survives behind it.
"""

from __future__ import annotations

import contextlib
import errno
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flowkv.core.layout import GRANULE_BYTES
from flowkv.tiers.disk.files import FileIO, read_fully, wipe, write_fully, zeros
from flowkv.tiers.disk.records import Slot

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
        quarantined: Slots taken out of use since the directory was opened.
    """

    def __init__(
        self,
        files: FileIO,
        directory: Path,
        *,
        ahead_bytes: int = 0,
        open_file: Callable[[str, bool], int] | None = None,
    ) -> None:
        self.allocated_bytes = self.free_bytes = self.quarantined = 0
        self._files, self._directory, self._ahead_bytes = files, directory, ahead_bytes
        self._open_file = open_file or (lambda path, write: files.open(path, write=write))
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

        No two frames share a slot, and every slot lies within its file (`disk.recover.recover`).
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
        self.quarantined += 1
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
            for first, count in _runs(sorted(slab.free)):
                self._wipe(slab, granules, first, count)
        for slot in list(self._damaged):
            wipe(self._files, self.fd(slot), slot.offset, slot.n_bytes)
            self._damaged.discard(slot)
        for slab in self._slabs.values():  # those only cut short when they were opened, too
            self._files.sync(slab.fd)

    def _wipe(self, slab: _SlabFile, granules: int, first: int, count: int) -> None:
        size = granules * GRANULE_BYTES
        if self._punch(Slot(granules, first), count):
            for number in range(first, first + count):
                del slab.free[number]
                slab.holes.append(number)
            self.allocated_bytes -= count * size
            self.free_bytes -= count * size
        else:
            wipe(self._files, slab.fd, first * size, count * size)
        for number in range(first, first + count):
            self._named.pop(Slot(granules, number), None)

    def close(self) -> None:
        """Closes all files."""
        for slab in self._slabs.values():
            self._files.close(slab.fd)
        self._slabs.clear()

    def _slab(self, granules: int) -> _SlabFile:
        slab = self._slabs.get(granules)
        if slab is None:
            fd = self._open_file(self._path(granules), self._ahead_bytes > 0)
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
            while got < want_bytes and len(slab.free) > keep:
                slot = Slot(granules, next(reversed(slab.free)))
                if not self._punch(slot, 1):
                    return got
                slab.free.popitem()
                slab.holes.append(slot.number)
                self._named.pop(slot, None)
                got += granules * GRANULE_BYTES
                self.allocated_bytes -= granules * GRANULE_BYTES
                self.free_bytes -= granules * GRANULE_BYTES
        return got

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
