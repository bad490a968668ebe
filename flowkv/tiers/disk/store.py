"""The core of a disk tier: index, slots, journal and quota, without threads or deadlines.

A store is: digests, then header and body into a free slot, then a journal record, then the index.
So what is in the index is on the disk, and `kill -9` loses nothing that was acknowledged; nothing
waits for the device unless the store is `durable`. A load reads the slot and believes only the
header and the digests that it finds there. Slots being read are pinned; a slot whose bytes are
wrong is never reused while the directory stays open.

Files are written by their owner only. Anyone else follows the journal, and a frame that moved under
its eyes is a miss.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from flowkv.core.errors import ConfigError, FlowKVError, StoreError
from flowkv.core.layout import GRANULE_BYTES
from flowkv.tiers.base import FrameInfo
from flowkv.tiers.disk.files import FileIO
from flowkv.tiers.disk.home import Home
from flowkv.tiers.disk.journal import CHARGE_BYTES, DELETED, STORED, Held, Journal, Record
from flowkv.tiers.disk.recover import check_frame, open_journal, recover, replay
from flowkv.tiers.disk.slab import Slabs, slot_granules
from flowkv.tiers.frame import (
    BadFrame,
    Header,
    describe,
    header_bytes,
    most_header_bytes,
    pack_header,
    wanted,
)

LEAST_BYTES = 256 << 10
_FIXED_BYTES = 32 << 10  # superblock, lock, directory, unfinished journal pages, their copies
_MOVES = 3  # times that a frame may move while a reader reads it


class Refused(FlowKVError):
    """A store that cannot be done now; `reason` is "full", "busy" or "read-only"."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the frame was not stored ({reason})", "Make room, or store it later")
        self.reason = reason


class Written(NamedTuple):
    """A frame that lies in its slot but is not yet known to the journal."""

    key: bytes
    held: Held


class DiskStore:
    """Frames in one directory. Thread-safe; reads and writes of frames run in parallel.

    Args:
        directory: A directory of its own; made if it is not there.
        capacity_bytes: Most bytes that the directory may occupy, everything included.
        exclusive: Refuse a directory that another process owns, instead of only reading it.
        durable: Wait for the device before a store is acknowledged.
        files: File operations.

    Attributes:
        owner: Whether this object may write.
        corrupt: Frames found damaged so far.
        bad_pages: Damaged journal pages met so far.

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
    ) -> None:
        if capacity_bytes < LEAST_BYTES:
            raise ConfigError(
                f"a disk tier of {capacity_bytes} bytes", f"Give it at least {LEAST_BYTES} bytes"
            )
        self.capacity_bytes, self.corrupt = capacity_bytes, 0
        self._files, self._durable = files or FileIO(), durable
        self._lock = threading.RLock()
        self._index: dict[bytes, Held] = {}
        self._busy: set[bytes] = set()
        self._garbage = min(max(capacity_bytes >> 16, 64), 1 << 18)
        reserve = (capacity_bytes >> 9) + min(capacity_bytes >> 4, 1 << 19)
        self._fixed_bytes = _FIXED_BYTES + reserve + self._garbage * CHARGE_BYTES
        self._home = Home(self._files, directory, capacity_bytes, exclusive=exclusive)
        self.owner = self._home.owner
        ahead_bytes = min(1 << 24, capacity_bytes >> 4) if self.owner else 0
        self._slabs = Slabs(self._files, self._home.path, ahead_bytes=ahead_bytes)
        self._journal: Journal | None = None
        try:
            if self.owner:
                self._recover()
            else:
                self.refresh()
        except OSError as error:
            self.close()
            raise StoreError(
                f"the store in {self._home.path} cannot be opened ({error.strerror})",
                "Check the disk, or choose another directory",
            ) from error

    @property
    def path(self) -> Path:
        """The directory."""
        return self._home.path

    @property
    def bad_pages(self) -> int:
        """Damaged journal pages met so far."""
        return self._journal.bad_pages if self._journal else 0

    def used_bytes(self) -> int:
        """Bytes that are charged: frames, and what managing them takes or may take."""
        with self._lock:
            return self._overhead_bytes() + self._slabs.allocated_bytes - self._slabs.free_bytes

    def frame_bytes(self, body_bytes: int) -> int:
        """Upper bound of what one more frame is charged."""
        granules = slot_granules(most_header_bytes(body_bytes), body_bytes)
        return granules * GRANULE_BYTES + 2 * CHARGE_BYTES

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys are in the index."""
        return [key in self._index for key in keys]

    def entries(self) -> list[tuple[bytes, Held]]:
        """The index, oldest store first."""
        with self._lock:
            return list(self._index.items())

    def write(self, key: bytes, info: FrameInfo, body: memoryview) -> Written | None:
        """Puts a frame into a slot; None if the key is there already. `commit` makes it count.

        Raises:
            BadFrame: `info` does not fit the body.
            Refused: There is no room, or the key is being written, or this is a reader.
            OSError: The slot could not be written and is free again.
        """
        if not self.owner:
            raise Refused("read-only")
        if key in self._index:
            return None
        header = describe(key, info, body)
        with self._lock:
            if key in self._index:
                return None
            if key in self._busy:
                raise Refused("busy")
            granules = slot_granules(header_bytes(header.stripes), header.body_bytes)
            budget = self.capacity_bytes - self._overhead_bytes(1)
            slot = self._slabs.take(granules, budget)
            if slot is None:
                raise Refused("full")
            self._busy.add(key)
        written = Written(key, Held(0, slot, header.stripes, info))
        try:
            self._slabs.write(slot, [pack_header(header), body])
        except BaseException:
            self.abandon([written])
            raise
        return written

    def commit(self, batch: Sequence[Written]) -> None:
        """Makes written frames count.

        Raises:
            OSError: None of them counts, and their slots are free again.
        """
        try:
            if self._durable:
                self._slabs.sync({written.held.slot.granules for written in batch})
            with self._lock:
                assert self._journal is not None
                self._compact()
                records = [
                    Record(STORED, key, held._replace(seq=self._journal.next_seq()))
                    for key, held in batch
                ]
                self._journal.append(records)
                self._index.update((key, held) for _, key, held in records)
                self._busy.difference_update(key for key, _ in batch)
                if self._durable:
                    self._journal.sync()
        except OSError:
            self.abandon(batch)
            raise

    def abandon(self, batch: Sequence[Written]) -> None:
        """Frees the slots of written frames that shall not count."""
        with self._lock:
            for key, held in batch:
                if not self.delete([key]):
                    self._slabs.give_back(held.slot)
                self._busy.discard(key)

    def read(
        self, key: bytes, layout: bytes, fidelity: int, memory: Callable[[int], memoryview]
    ) -> tuple[Header, memoryview] | None:
        """A frame, verified, in memory that `memory` gives; None if it is not there.

        Raises:
            BadFrame: The frame is not the one wished for; if it was damaged, it is gone now.
            OSError: The slot could not be read; the frame stays.
        """
        for _ in range(_MOVES):
            with self._lock:
                held = self._index.get(key)
                if held is None:
                    return None
                wanted(held.info, layout, fidelity)
                self._slabs.pin(held.slot)
            try:
                size = held.frame_bytes
                if not self._slabs.reaches(held.slot, size):  # before memory is taken for it
                    raise BadFrame("truncated", "the slab file ends before the frame")
                data = memory(size)
                if self._slabs.read(held.slot, data) < size:
                    raise BadFrame("truncated", "the slot could not be read to its end")
                return check_frame(data, key, held)
            except BadFrame:
                if self._condemn(key, held):
                    raise
            finally:
                with self._lock:
                    self._slabs.unpin(held.slot)
        return None

    def _condemn(self, key: bytes, held: Held) -> bool:
        """Drops a frame that was not in its slot; False if a reader merely saw it move."""
        with self._lock:
            self.refresh()
            now = self._index.get(key)
            if not self.owner and (now is None or now.seq != held.seq):
                return False
            self.corrupt += 1
            if now is held or not self.owner:
                self._index.pop(key, None)
            if now is held and self.owner:
                self._slabs.quarantine(held.slot)
                self._note_deleted([(key, held)])
            return True

    def delete(self, keys: Iterable[bytes], *, wipe: bool = False) -> int:
        """Forgets frames; a reader forgets none. Returns how many were there.

        Args:
            keys: Which.
            wipe: Overwrite the slots; those being read right now, once they are not.

        Raises:
            OSError: A slot could not be overwritten.
        """
        if not self.owner:
            return 0
        with self._lock:
            gone = [(key, held) for key in keys if (held := self._index.pop(key, None))]
            if gone:
                self._note_deleted(gone)
            for _, held in gone:
                self._slabs.give_back(held.slot, wipe=wipe)
            return len(gone)

    def refresh(self) -> None:
        """Lets a reader see what the owner did meanwhile."""
        if self.owner:
            return
        with self._lock, contextlib.suppress(OSError):
            if self._journal is not None and self._journal.replaced():
                self._journal.close()
                self._journal = None
            if self._journal is None:
                self._index.clear()
                superblock = self._home.superblock or self._home.look_again()
                if superblock is None:
                    return
                path = self._home.path
                self._journal = open_journal(self._files, path, superblock, write=False)
            replay(self._journal.read_new(), self._index)

    def close(self) -> None:
        """Closes all files and gives up ownership; what was committed stays."""
        with self._lock:
            if self._journal is not None:
                self._journal.close()
                self._journal = None
            self._slabs.close()
            self._home.close()
            self.owner = False
            self._index.clear()

    def _overhead_bytes(self, more_frames: int = 0) -> int:
        # every frame may stand in the journal twice: a compaction writes a second one
        frames = len(self._index) + len(self._busy) + more_frames
        return self._fixed_bytes + 2 * CHARGE_BYTES * frames

    def _note_deleted(self, gone: Iterable[tuple[bytes, Held]]) -> None:
        # If this cannot be written now, it will be with the next record; until then a crash would
        # bring the frames back, unless their slots were reused, which the journal knows.
        assert self._journal is not None
        with contextlib.suppress(OSError):
            self._compact()
        with contextlib.suppress(OSError):
            seq = self._journal.next_seq
            self._journal.append(
                [Record(DELETED, key, held._replace(seq=seq())) for key, held in gone], keep=True
            )

    def _compact(self) -> None:
        assert self._journal is not None
        if self._journal.count > len(self._index) + self._garbage:
            self._journal.rewrite(self._index.items())

    def _recover(self) -> None:
        superblock = self._home.superblock
        assert superblock is not None
        self._journal = open_journal(self._files, self._home.path, superblock, write=True)
        recover(self._slabs, self._journal, self._index)
        excess, drop = self.used_bytes() - self.capacity_bytes, []
        for key, held in self._index.items():  # opened with a smaller capacity than before
            if excess > 0:
                drop.append(key)
                excess -= held.charge_bytes
        self.delete(drop)
        self._slabs.trim(self.capacity_bytes - self._overhead_bytes())
