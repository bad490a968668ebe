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
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from flowkv.core.errors import StoreError
from flowkv.core.layout import GRANULE_BYTES
from flowkv.tiers.disk.contents import Contents
from flowkv.tiers.disk.files import FileIO
from flowkv.tiers.disk.home import Home
from flowkv.tiers.disk.index import Index
from flowkv.tiers.disk.journal import CHARGE_BYTES, Journal
from flowkv.tiers.disk.quota import Quota
from flowkv.tiers.disk.records import DELETED, STORED, Held, Record, Slot, Written
from flowkv.tiers.disk.recover import open_journal, recover
from flowkv.tiers.disk.refusal import Refused
from flowkv.tiers.disk.slab import Slabs, slot_granules
from flowkv.tiers.envelope import Envelope
from flowkv.tiers.frame import most_header_bytes, wanted

_BLANKED_AT_ONCE = 16
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
        self.corrupt, self._quota = 0, Quota(capacity_bytes)
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
        self._open_file: Callable[[str, bool], int] | None = None
        self._slabs = Slabs(self._files, self._home.path)
        self._journal: Journal | None = None

    def open(self, open_file: Callable[[str, bool], int] | None = None) -> None:
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
        """Why it may not write, if that is no other process."""
        return self._home.obstacle

    def used_bytes(self) -> int:
        """Bytes that are charged: frames, and what managing them takes or may take."""
        with self._lock:
            overhead = self._quota.overhead_bytes(self._frames())
            return overhead + self._slabs.allocated_bytes - self._slabs.free_bytes

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
        """The index, oldest store first."""
        with self._lock:
            return list(self._index.items())

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

    def to_sync(self, batch: Iterable[Written]) -> list[int]:
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

    def commit(self, batch: Sequence[Written]) -> None:
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
        except OSError:
            self.abandon(batch)
            raise

    def abandon(self, batch: Iterable[Written]) -> None:
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
                    with contextlib.suppress(OSError):
                        self._contents.note(self._home)
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
            self._bound[namespace] = name
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
                self.owner, self.shared = False, True
                self._drop_journal()
                self._let_go()
        return self.owner

    @property
    def _quiet(self) -> bool:
        """Whether nothing that was begun can still read or write a slab file."""
        return not (self._slabs.pinned or self._busy or self._tidying.locked())

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
        with contextlib.suppress(OSError):  # of a full disk: only `inspect` misses it
            self._contents.note(self._home)
