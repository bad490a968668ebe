"""Frames in a directory on a local disk: they survive the process, and other processes may read.

Bytes move by an engine (`tiers.io`) between the slab files and an arena; one conductor makes its
batches. A load is verified before its target sees anything. A store whose deadline passes while it
is written is undone.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from flowkv.core.clock import Clock, SystemClock
from flowkv.core.config import format_size
from flowkv.core.errors import ConfigError, FlowKVError, StateError, StoreError
from flowkv.tiers.base import Completion, Entry, Load, Outcome, Store
from flowkv.tiers.disk.files import FileIO
from flowkv.tiers.disk.journal import charge_bytes
from flowkv.tiers.disk.requests import (
    DiskItem,
    DiskOperations,
    DiskRead,
    DiskRequestQueue,
    DiskSync,
    DiskWrite,
    FrameOperations,
    ItemAnswer,
    Staging,
)
from flowkv.tiers.disk.store import DiskStore, Refused
from flowkv.tiers.disk.transfer import Loading, NoRoom, Storing
from flowkv.tiers.envelope import Envelope
from flowkv.tiers.io.engine import OPERATION, SYNC, IOEngine
from flowkv.tiers.io.staging import Arena

# The conductor of a disk tier: everything that is wished for, as few batches for the engine.
#
# One step: what the engine has done is verified, copied and answered; then waiting loads and stores
# get memory and go to the engine, loads first, each kind with room that the other cannot take. A
# thread steps for ever, or whoever polls steps, which makes a tier without threads: the same calls
# in the same order, on any clock.
#
# Memory of an overdue operation is retired until the engine reports it. When too much is, the
# disk is left alone ("breaker") until enough has come back.

LOADS_AT_ONCE, STORES_AT_ONCE = 64, 16
"""Begun before the engine is given them; more wait no longer than it takes to begin these."""
_IDLE_S = 0.05
_PATIENT_STEPS = 100
_LOADS_SHARE, _STORES_SHARE = 0.75, 0.5  # of the arena, so that neither takes all
_PATIENCE_S = 0.001, 0.02  # for the engine: at first, and after a while without news


class DiskScheduler:
    """Moves the frames of one store.

    Args:
        store: Where they lie.
        envelope: How they are wrapped.
        engine: Does the work; given to this conductor alone.
        staging: Memory.
        wishes: What is to be done.
    """

    def __init__(
        self,
        store: DiskStore,
        envelope: Envelope,
        engine: IOEngine,
        staging: Staging,
        wishes: DiskRequestQueue,
    ) -> None:
        self._store, self._engine, self._staging = store, engine, staging
        self._wishes = wishes
        self._loading = Loading(store, envelope, staging, wishes, _LOADS_SHARE)
        self._storing = Storing(store, envelope, staging, wishes, _STORES_SHARE)
        self._flights: dict[int, tuple[DiskOperations, int]] = {}  # by tag, with the bytes to come
        self._written: list[DiskWrite] = []  # that wait for the next group of syncs
        self._sync: DiskSync | None = None
        self._tag = 0
        self._stage = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._hungry = 0  # steps that a large store has waited for memory, which loads take

    # --- whose thread --------------------------------------------------------------------------

    def start(self, name: str) -> None:
        """Begins to step in a thread of its own, unless it does already."""
        if self._thread is not None:
            return  # without the lock, which a step holds while it waits for the engine
        with self._stage:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Works off what is queued; whether everything came to an end in time."""
        self._wishes.end()
        if self._thread is not None:
            self._thread.join(timeout_s)
            alive = self._thread.is_alive()
            self._stopping = True
            return not alive
        while self.step(0.0):
            pass
        return not self._flights

    def step(self, wait_s: float) -> bool:
        """One step; waits so long for the engine if there is nothing else to do.

        Returns:
            Whether anything was done.
        """
        with self._stage:
            self._give_up(self._wishes.overdue())
            begun = self._begin()
            done = self._collect(0.0 if begun else wait_s)
            if begun or done:
                return True
        return not self._flights and self._store.tidy()

    @property
    def busy(self) -> bool:
        """Whether the engine has something to do for this conductor."""
        return bool(self._flights)

    def _run(self) -> None:
        patience_s = _PATIENCE_S[0]
        while not self._stopping:
            try:
                moved = self.step(patience_s)
            except Exception as error:  # a conductor never leaves items behind
                self._fail(_reason(error))
                continue
            patience_s = _PATIENCE_S[0] if moved else min(2 * patience_s, _PATIENCE_S[1])
            if not moved and not self._flights:
                if self._wishes.closing and not any(self._wishes.waiting()):
                    return
                self._wishes.wait(_IDLE_S if any(self._wishes.waiting()) else 60.0)

    # --- what the engine has done --------------------------------------------------------------

    def _collect(self, wait_s: float) -> bool:
        if not self._flights:
            return False
        completions = self._engine.wait(wait_s)
        if not len(completions):
            return False
        read: list[DiskRead] = []
        wrote: list[DiskWrite] = []
        for tag, result in completions.tolist():
            flight, must = self._flights.pop(tag)
            if not flight.note(result, must):
                continue
            if isinstance(flight, FrameOperations):
                flight.item.flight = None
            if isinstance(flight, DiskRead):
                read.append(flight)
            elif isinstance(flight, DiskWrite):
                wrote.append(flight)
            elif isinstance(flight, DiskSync):
                self._synced(flight)
        try:
            if read:
                self._submit(self._loading.finish(read))
            if wrote:
                self._commit(self._storing.finish(wrote))
        except Exception as error:
            self._loading.drop(read)
            self._fail(_reason(error), [flight.item for flight in (*read, *wrote)])
            self._storing.drop(wrote, _reason(error))
        return True

    def _commit(self, wrote: list[DiskWrite]) -> None:
        """Frames that are written: they count at once, or after the device has them."""
        self._written += wrote
        if not self._written or self._sync is not None:
            return  # one group waits for the device while the next one gathers
        group, self._written = self._written, []
        failed = None
        try:
            files = self._store.to_sync(flight.written for flight in group)
        except OSError as error:
            files, failed = [], error
        if not files:
            self._storing.commit(group, failed)
            return
        self._sync = DiskSync(group)
        self._sync.operations = [(SYNC, fd, 0, 0, 0) for fd in files]
        self._submit([self._sync])

    def _synced(self, sync: DiskSync) -> None:
        code = -sync.error
        error = OSError(code, os.strerror(code)) if code else None
        self._sync = None
        self._storing.commit(sync.group, error)
        self._commit([])

    # --- what it is to do next -----------------------------------------------------------------

    def _begin(self) -> bool:
        if self._staging.clogged:
            self._wishes.fail_waiting("breaker")
        loads: list[DiskRead] = []
        tried = 0
        if self._hungry < _PATIENT_STEPS:
            tried = self._take(self._loading, loads, LOADS_AT_ONCE)
        stores: list[DiskWrite] = []
        tried += self._take(self._storing, stores, STORES_AT_ONCE, alone=not loads)
        self._hungry = 0 if stores or not self._wishes.waiting()[1] else self._hungry + 1
        self._submit(loads)
        try:
            self._storing.seal()
        except Exception as error:
            self._storing.drop(stores, _reason(error))
            stores = []
        self._submit(stores)
        return tried > 0

    def _take(
        self, part: Loading | Storing, begun: list[Any], most: int, *, alone: bool = True
    ) -> int:
        """Begins what waits; how many items were begun or answered."""
        stores = part is self._storing
        for tried in range(most):
            item = self._wishes.next(stores=stores)
            if item is None:
                return tried
            try:
                flight = part.begin(item, alone=alone and not self._flights and not begun)
            except NoRoom:
                self._wishes.put_back(item)
                return tried
            except Exception as error:
                self._wishes.answer([ItemAnswer(item, Outcome.FAILED, _reason(error))])
                if stores:
                    self._wishes.end_stores([item])
                continue
            if flight is not None:
                begun.append(flight)
        return most

    def _submit(self, flights: Sequence[DiskOperations]) -> None:
        rows = []
        for flight in flights:
            if isinstance(flight, FrameOperations):
                flight.item.flight = flight
            flight.left, flight.tags = len(flight.operations), []
            for operation in flight.operations:
                self._tag += 1
                flight.tags.append(self._tag)
                rows.append((*operation, self._tag))
                self._flights[self._tag] = flight, operation[-1]
        if rows:
            self._engine.submit(np.array(rows, OPERATION))

    # --- ends ----------------------------------------------------------------------------------

    def _give_up(self, items: list[DiskItem]) -> None:
        """Answered before they were done: their memory waits for the engine, which may hurry."""
        tags: list[int] = []
        for item in items:
            if item.flight is not None:
                self._staging.retire(item.flight.memory)
                tags += item.flight.tags
        if tags:
            self._engine.cancel(np.array(tags, np.uint64))

    def _fail(self, reason: str, items: list[DiskItem] | None = None) -> None:
        """Something that should not happen did: nobody waits for it in vain."""
        if items is None:
            flights = [flight for flight, _ in self._flights.values()]
            items = [flight.item for flight in flights if isinstance(flight, FrameOperations)]
            self._wishes.fail_waiting(reason)
        self._wishes.claim(items)
        self._wishes.answer(ItemAnswer(item, Outcome.FAILED, reason) for item in items)


def _reason(error: Exception) -> str:
    return "memory" if isinstance(error, MemoryError) else f"{type(error).__name__}: {error}"


STAGING_BYTES = 64 << 20
CLOSE_S = 60.0
ERASE_S = 5.0
_HEADROOM_BYTES = 512 << 20  # twice what staging, threads and compiled code were seen to take
_FROM_SYSTEM = (OSError, MemoryError, ImportError, RuntimeError)  # where memory runs out


class DiskTier:
    """A `Tier` in one directory. The first process to open it owns it; others only read.

    A reader becomes the owner when it looks for frames and there is none any more. An owner whose
    lock file, journal, slab file or directory somebody took away or replaced is a reader from then
    on: what it would store is `FAILED` with "read-only" or "ESTALE".

    `STORED` means: header, body and journal record were handed to the operating system, so that the
    frame survives `kill -9`; with `durability="sync"` the device confirmed it, and it survives the
    machine. A frame whose bytes are wrong is a `MISS` with the reason "digest", "key", "foreign",
    "version" or "truncated"; it is forgotten, and its slot stays unused until the directory is
    opened again. A reader answers stores with "read-only", and sees new frames as they come.

    Args:
        directory: A directory of its own; made if it is not there.
        capacity_bytes: Most bytes that the directory may occupy on the disk, everything included.
            If it was larger when the directory was open last, the oldest frames are dropped.
        name: Shown in statistics; default "disk:" and the directory.
        exclusive: Refuse a directory that another process owns, instead of only reading it.
        durability: "none" leaves it to the operating system when the device is written, "sync"
            waits for that.
        queue_bytes: Stores waiting beyond this many bytes are `FAILED` with reason "busy".
        envelope: How frames are wrapped and checked; default digests, no compression.
        engine: Moves the bytes, for this tier alone, which closes it; default the best there is.
        arena: Staging memory shared with others; default its own.
        threads: 1, or 0: then `poll` does the work, in the caller's thread.
        files: File operations, for tests and simulation; give an `engine` over them, too.
        clock: Source of time.

    Raises:
        ConfigError: The capacity is too small.
        StoreError: The directory cannot be used.
    """

    kind = "disk"

    def __init__(  # noqa: PLR0913 (each is one decision of whoever opens a tier)
        self,
        directory: str | os.PathLike[str],
        capacity_bytes: int,
        *,
        name: str = "",
        exclusive: bool = False,
        durability: Literal["none", "sync"] = "none",
        queue_bytes: int = 1 << 28,
        envelope: Envelope | None = None,
        engine: IOEngine | None = None,
        arena: Arena | None = None,
        threads: Literal[0, 1] = 1,
        files: FileIO | None = None,
        clock: Clock | None = None,
    ) -> None:
        path, durable = os.fspath(directory), durability == "sync"
        if durability not in ("none", "sync") or threads not in (0, 1):
            raise ConfigError(
                f"durability={durability!r}, threads={threads}",
                "Use durability 'none' or 'sync', and 0 or 1 threads",
            )
        self.name, self.capacity_bytes = name or f"disk:{path}", capacity_bytes
        envelope = envelope or Envelope()
        if engine is None:
            _need_addresses(path)
        self._store = DiskStore(
            path,
            capacity_bytes,
            exclusive=exclusive,
            durable=durable,
            files=files,
            envelope=envelope,
        )
        self._pid, self._open, self._closing = os.getpid(), True, threading.Lock()
        staging: Staging | None = None
        try:
            staging = Staging(arena, min(STAGING_BYTES, max(1 << 21, capacity_bytes)))
            if engine is None:
                from flowkv.tiers.io.uring import open_engine

                engine = open_engine(arena=staging.arena, directory=str(self._store.path))
            self._store.open(engine.open)
            self._wishes = DiskRequestQueue(clock or SystemClock(), queue_bytes)
        except BaseException as error:
            self._store.close()
            if (engine is None or engine.close()) and staging is not None:
                staging.close()
            if isinstance(error, _FROM_SYSTEM) and not isinstance(error, FlowKVError):
                raise StoreError(
                    f"the disk tier in {path} cannot be opened ({error or 'no memory'})",
                    "Free memory, or raise its limit (ulimit -v)",
                ) from error
            raise
        self._staging, self._engine, self._threads = staging, engine, threads
        self._conductor = DiskScheduler(
            self._store, envelope, self._engine, self._staging, self._wishes
        )
        if not self.writable:
            warnings.warn(
                f"{self._store.obstacle} in {path}: it is read, and nothing is stored there"
                if self._store.obstacle
                else f"another process owns {path}: this one reads it and stores nothing there",
                UserWarning,
                stacklevel=2,
            )

    @property
    def writable(self) -> bool:
        """Whether this process owns the directory now."""
        return self._store.owner

    @property
    def shared(self) -> bool:
        """Whether another process owned the directory while it was open here, or does so now."""
        return self._store.shared

    @property
    def path(self) -> Path:
        """The directory."""
        return self._store.path

    @property
    def corrupt(self) -> int:
        """Frames found damaged since the directory was opened."""
        return self._store.corrupt

    @property
    def engine(self) -> str:
        """Name of the engine that moves the bytes."""
        return self._engine.name

    def used_bytes(self) -> int:
        """Bytes charged for frames, and for managing them."""
        return self._store.used_bytes() if self._usable() else 0

    def frame_bytes(self, body_bytes: int) -> int:
        """Upper bound of what one more frame is charged."""
        return self._store.frame_bytes(body_bytes)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys are in the index; a reader looks at the journal first."""
        if not self._usable():
            return [False] * len(keys)
        self._store.refresh()
        return self._store.contains(keys)

    def submit_load(self, items: Sequence[Load], *, deadline_s: float = 10.0) -> int:
        """Queues reads; they go before stores.

        Raises:
            StateError: The tier is closed, or was opened before a fork.
        """
        self._require_usable()
        self._store.refresh()
        return self._submit(items, deadline_s)

    def submit_store(self, items: Sequence[Store], *, deadline_s: float = 60.0) -> int:
        """Queues writes; what does not fit into the queue is `FAILED` with reason "busy".

        Raises:
            StateError: The tier is closed, or was opened before a fork.
        """
        self._require_usable()
        return self._submit(items, deadline_s)

    def poll(self, timeout_s: float = 0.0) -> list[Completion]:
        """Answers that are ready; waits up to `timeout_s` for the first one."""
        if self._pid != os.getpid():
            return []
        if self._threads or not self._open:
            return self._wishes.poll(timeout_s)
        end_s = time.monotonic() + timeout_s
        while True:
            self._wishes.expire()
            while self._conductor.step(0.0):
                pass
            answers = self._wishes.poll(0.0)
            left_s = end_s - time.monotonic()
            if answers or left_s <= 0 or not self._conductor.busy:
                return answers
            self._conductor.step(left_s)

    def fileno(self) -> int:
        """An eventfd that is readable while answers wait; -1 once closed.

        Only `poll` notices a passed deadline, so call it by then, whatever the descriptor says.
        """
        return self._wishes.answers.fileno()

    def cancel(self, job: int) -> None:
        """Answers what is not in use right now."""
        self._wishes.cancel(job)

    def delete(self, keys: Sequence[bytes]) -> int:
        """Forgets frames. Their bytes stay in the slab files until the space is used again."""
        return self._store.delete(keys) if self._usable() else 0

    def erase(self, keys: Sequence[bytes]) -> int:
        """Forgets frames and clears every slot that holds none, those of earlier deletions too.

        Raises:
            StoreError: Another process owns the directory, a slot is still being read, or could not
                be cleared, or the directory has a store of another format in it.
        """
        if not self._usable():
            return 0
        if not self.writable:
            raise StoreError(f"another process owns {self.name}", "Erase there")
        try:
            count = self._store.delete(keys)
            while not self._threads and self._store.doomed and self._conductor.step(0.0):
                pass  # nobody else ends the loads that are under way
            self._store.wipe(ERASE_S if self._threads else 0.0)
        except Refused as error:
            raise StoreError(
                f"{self.name} forgot the frames, but some are being read right now",
                "Poll for those loads, then erase again",
            ) from error
        except OSError as error:
            raise StoreError(
                f"{self.name} could not clear the place of a frame ({error.strerror})",
                "Check the disk and erase again, or delete the directory",
            ) from error
        if aside := self._store.aside():
            raise StoreError(
                f"{self.name} erased its frames, but {aside[0]} holds a store of another format",
                "Delete that directory",
            )
        return count

    def survey(self) -> None:
        """Looks anew at what is there, so that `scan` leaves nothing out that was stored here.

        Raises:
            StoreError: The directory, its journal or its slab files were taken away or replaced, or
                cannot be read.
        """
        if not self._usable():
            return
        try:
            self._store.survey()
        except OSError as error:
            raise StoreError(
                f"{self.name} cannot list what it holds ({error.strerror})",
                "Erase what was in that directory, wherever it is now, and open it again",
            ) from error

    def bind(self, namespace: bytes, name: str) -> None:
        """A cache that uses a namespace is about to use this tier; the directory notes its name."""
        if self._usable():
            self._store.bind(namespace, name)

    def in_use(self, namespace: bytes) -> bool:
        """Whether a cache of this process uses a namespace, or one did in the last seven days."""
        return self._store.in_use(namespace)

    def scan(self) -> Iterator[Entry]:
        """All frames, oldest store first."""
        if self._usable():
            self._store.refresh()
            for key, held in self._store.entries():
                yield Entry(key, held.info, charge_bytes(held))

    def close(self) -> None:
        """Works off what is queued, for a minute at most, and gives up the directory."""
        if self._pid != os.getpid():
            return
        with self._closing:
            if not self._open:
                return
            self._open = False
            ended = self._conductor.stop(CLOSE_S)
            self._wishes.close(stuck=not ended)
            if self._engine.close() and ended:  # else something is stuck with files and memory
                self._store.close()
                self._staging.close()

    def _submit(self, items: Sequence[Load] | Sequence[Store], deadline_s: float) -> int:
        job = self._wishes.submit(items, deadline_s)
        if self._threads:
            self._conductor.start(f"flowkv {self.name}")
        return job

    def _usable(self) -> bool:
        return self._open and self._pid == os.getpid()

    def _require_usable(self) -> None:
        if not self._usable():
            why = "is closed" if self._pid == os.getpid() else "was opened before a fork"
            raise StateError(f"tier {self.name!r} {why}", "Open the directory again, here")


def _need_addresses(path: str) -> None:
    """Refuses to begin what could only end in the middle of starting a thread, or of compiled code.

    Raises:
        StoreError: The process may not take so much more memory.
    """
    try:
        mmap.mmap(-1, _HEADROOM_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0).close()
    except (OSError, MemoryError) as error:
        raise StoreError(
            f"the disk tier in {path} cannot be opened: {format_size(_HEADROOM_BYTES)} of address"
            " space are not left",
            "Free memory, or raise its limit (ulimit -v)",
        ) from error
