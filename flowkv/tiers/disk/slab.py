"""The slab files of a disk tier: fixed slots of a few sizes, reused in place.

One file per slot size, `slab-<granules>`. A slot is `header | body`, whole 4 KiB granules; sizes
step by an eighth of an octave, so powers of two and most layer counts fit exactly and the rest
wastes at most an eighth. Space moves between sizes by punching holes into free slots, as late as
possible: what is charged is what may lie on the disk, whatever the files' lengths say.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from flowkv.core.layout import GRANULE_BYTES
from flowkv.tiers.disk.files import Buffer, FileIO, read_fully, write_fully
from flowkv.tiers.disk.journal import Slot

SLAB_NAME = re.compile(r"slab-(\d{8})")
_BLANK = bytes(GRANULE_BYTES)


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
        self.free: list[int] = []
        self.holes: list[int] = []


class Slabs:
    """Allocates, reads and writes slots. Not thread-safe but for `read` and `write`.

    Args:
        files: File operations.
        directory: Where the slab files are.
        ahead_bytes: How far a file is grown at a time; 0 for a reader, who changes nothing.

    Attributes:
        allocated_bytes: Bytes of slots that may have blocks on the disk.
        free_bytes: Those of them that hold nothing.
        quarantined: Slots taken out of use since the directory was opened.
    """

    def __init__(self, files: FileIO, directory: Path, *, ahead_bytes: int = 0) -> None:
        self.allocated_bytes = self.free_bytes = self.quarantined = 0
        self._files, self._directory, self._ahead_bytes = files, directory, ahead_bytes
        self._slabs: dict[int, _SlabFile] = {}
        self._pins: Counter[Slot] = Counter()
        self._doomed: dict[Slot, bool] = {}  # to be freed when unpinned, and whether wiped then
        self._can_punch = True

    def sizes(self) -> list[int]:
        """Slot sizes, in granules, of which there is a file."""
        with contextlib.suppress(FileNotFoundError):
            found = (SLAB_NAME.fullmatch(name) for name in os.listdir(self._directory))
            return sorted(int(name[1]) for name in found if name and int(name[1]) > 0)
        return []

    def slots(self, granules: int) -> int:
        """Slots that the file of a size reaches over, the last one perhaps in part."""
        return -(-self.end_bytes(granules) // (granules * GRANULE_BYTES))

    def end_bytes(self, granules: int) -> int:
        """Length of the file of a size; 0 if a reader finds none."""
        try:
            return self._files.size(self._slab(granules).fd)
        except FileNotFoundError:
            return 0

    def reaches(self, slot: Slot, n_bytes: int) -> bool:
        """Whether the file is long enough to hold so many bytes in a slot."""
        offset = slot.number * slot.granules * GRANULE_BYTES
        return offset + n_bytes <= self.end_bytes(slot.granules)

    def occupy(self, used: Iterable[Slot]) -> None:
        """Tells which slots hold frames; cuts off what lies behind the last one of each file.

        No two frames share a slot, and every slot lies within its file (`disk.recover.recover`).
        """
        taken: dict[int, set[int]] = {granules: set() for granules in self.sizes()}
        for granules, index in used:
            taken.setdefault(granules, set()).add(index)
        for granules, indices in taken.items():
            slab, size = self._slab(granules), granules * GRANULE_BYTES
            slab.high = max(indices, default=-1) + 1
            slab.free = [index for index in range(slab.high) if index not in indices]
            slab.free.reverse()
            self._files.truncate(slab.fd, slab.high * size)
            slab.reach = slab.high
            self.allocated_bytes += slab.high * size
            self.free_bytes += len(slab.free) * size

    def take(self, granules: int, budget_bytes: int) -> Slot | None:
        """A free slot, if all slots together then stay within the budget; None otherwise.

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
            return Slot(granules, slab.free.pop())
        self.allocated_bytes += size
        if slab.holes:
            return Slot(granules, slab.holes.pop())
        slab.high += 1
        return Slot(granules, slab.high - 1)

    def give_back(self, slot: Slot, *, wipe: bool = False) -> None:
        """Frees a slot and blanks its first page, or all of it, once nobody reads it any more.

        So a frame that was deleted stays deleted, even if the journal is lost that says so.

        Raises:
            OSError: It could not be wiped; the slot is free all the same.
        """
        if self._pins[slot] > 0:
            self._doomed[slot] = wipe
            return
        try:
            self.write(slot, [bytes(slot.granules * GRANULE_BYTES) if wipe else _BLANK])
        except OSError:
            if wipe:
                raise
        finally:
            self._free(slot)

    def _free(self, slot: Slot) -> None:
        self._slab(slot.granules).free.append(slot.number)
        self.free_bytes += slot.granules * GRANULE_BYTES

    def quarantine(self, slot: Slot) -> None:
        """Takes a slot out of use until the directory is opened again; gives back its blocks."""
        self.quarantined += 1
        if self._punch(slot):
            self.allocated_bytes -= slot.granules * GRANULE_BYTES

    def pin(self, slot: Slot) -> None:
        """Keeps a slot from being reused."""
        self._pins[slot] += 1

    def unpin(self, slot: Slot) -> None:
        """Ends one `pin`."""
        self._pins[slot] -= 1
        if self._pins[slot] <= 0:
            del self._pins[slot]
            if slot in self._doomed:
                with contextlib.suppress(OSError):
                    self.give_back(slot, wipe=self._doomed.pop(slot))

    def read(self, slot: Slot, target: memoryview) -> int:
        """Reads the beginning of a slot; returns the bytes that were there."""
        offset = slot.number * slot.granules * GRANULE_BYTES
        return read_fully(self._files, self._slab(slot.granules).fd, target, offset)

    def write(self, slot: Slot, buffers: Sequence[Buffer]) -> None:
        """Writes a slot from its beginning, with zeros up to a whole granule.

        Raises:
            OSError: The slot's content is undefined.
        """
        rest = -sum(memoryview(buffer).nbytes for buffer in buffers) % GRANULE_BYTES
        offset = slot.number * slot.granules * GRANULE_BYTES
        fd = self._slab(slot.granules).fd
        write_fully(self._files, fd, [*buffers, bytes(rest)] if rest else buffers, offset)

    def sync(self, sizes: Iterable[int]) -> None:
        """Waits until the device has what was written to the files of these sizes."""
        for granules in sizes:
            slab = self._slab(granules)
            self._files.sync(slab.fd)
            if not slab.named:
                self._files.sync_directory(str(self._directory))
                slab.named = True

    def trim(self, budget_bytes: int) -> None:
        """Gives back the blocks of free slots until all slots stay within the budget."""
        self._reclaim(self.allocated_bytes - budget_bytes, 0)

    def close(self) -> None:
        """Closes all files."""
        for slab in self._slabs.values():
            self._files.close(slab.fd)
        self._slabs.clear()

    def _slab(self, granules: int) -> _SlabFile:
        slab = self._slabs.get(granules)
        if slab is None:
            path = self._directory / f"slab-{granules:08d}"
            fd = self._files.open(str(path), write=self._ahead_bytes > 0)
            reach = self._files.size(fd) // (granules * GRANULE_BYTES)
            slab = self._slabs.setdefault(granules, _SlabFile(fd, reach))
            if slab.fd != fd:  # another thread was faster
                self._files.close(fd)
        return slab

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
                if not self._punch(Slot(granules, slab.free[-1])):
                    return got
                slab.holes.append(slab.free.pop())
                got += granules * GRANULE_BYTES
                self.allocated_bytes -= granules * GRANULE_BYTES
                self.free_bytes -= granules * GRANULE_BYTES
        return got

    def _punch(self, slot: Slot) -> bool:
        size = slot.granules * GRANULE_BYTES
        if self._can_punch:
            try:
                self._files.punch(self._slab(slot.granules).fd, slot.number * size, size)
                return True
            except OSError as error:
                self._can_punch = error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS)
        return False
