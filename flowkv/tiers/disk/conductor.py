"""The conductor of a disk tier: everything that is wished for, as few batches for the engine.

One step: what the engine has done is verified, copied and answered; then waiting loads and stores
get memory and go to the engine, loads first, each kind with room that the other cannot take. A
thread steps for ever, or whoever polls steps, which makes a tier without threads: the same calls
in the same order, on any clock.

Memory of an overdue operation is retired until the engine reports it. When too much is, the disk is
left alone ("breaker") until enough has come back.
"""

from __future__ import annotations

import errno
import threading

import numpy as np

from flowkv.tiers.base import Outcome
from flowkv.tiers.disk.flight import Flight, Reading, Writing
from flowkv.tiers.disk.loading import Begun, Loading
from flowkv.tiers.disk.memory import Staging
from flowkv.tiers.disk.store import DiskStore
from flowkv.tiers.disk.storing import Storing
from flowkv.tiers.disk.wishes import Answer, Item, Wishes
from flowkv.tiers.envelope import Envelope
from flowkv.tiers.io.engine import OPERATION, SYNC, Engine

LOADS_AT_ONCE, STORES_AT_ONCE = 64, 16
"""Begun before the engine is given them; more wait no longer than it takes to begin these."""
_IDLE_S = 0.05
_PATIENT_STEPS = 100
_PATIENCE_S = 0.001, 0.02  # for the engine: at first, and after a while without news


class Conductor:
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
        engine: Engine,
        staging: Staging,
        wishes: Wishes,
    ) -> None:
        self._store, self._engine, self._staging = store, engine, staging
        self._wishes = wishes
        self._loading = Loading(store, envelope, staging, wishes)
        self._storing = Storing(store, envelope, staging, wishes)
        self._flights: dict[int, tuple[Flight | None, int]] = {}
        self._by_item: dict[Item, Flight] = {}
        self._syncing: list[Writing] = []
        self._sync_group: list[Writing] = []
        self._syncs_left = self._sync_error = 0
        self._tag = 0
        self._stage = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._hungry = 0  # steps that a large store has waited for memory, which loads take

    @property
    def dropped(self) -> int:
        """Stores refused because another process owns the directory."""
        return self._storing.dropped

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
        self._wishes.closing = True
        self._wishes.wake()
        if self._thread is not None:
            self._thread.join(timeout_s)
            alive = self._thread.is_alive()
            self._stopping = True
            return not alive
        while self.step(0.0):
            pass
        return not self._by_item

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
        read: list[Reading] = []
        wrote: list[Writing] = []
        for tag, result in completions.tolist():
            flight, must = self._flights.pop(tag)
            if flight is None:
                self._synced(result)
            elif flight.note(result, must):
                self._by_item.pop(flight.item, None)
                if isinstance(flight, Reading):
                    read.append(flight)
                elif isinstance(flight, Writing):
                    wrote.append(flight)
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

    def _commit(self, wrote: list[Writing]) -> None:
        """Frames that are written: they count at once, or after the device has them."""
        self._syncing += wrote
        if not self._syncing or self._syncs_left:
            return  # one group waits for the device while the next one gathers
        try:
            files = self._store.to_sync(flight.written for flight in self._syncing)
        except OSError as error:
            self._storing.commit(self._group(), error)
            return
        if not files:
            self._storing.commit(self._group(), None)
            return
        self._sync_group, self._syncing = self._syncing, []
        self._syncs_left, self._sync_error = len(files), 0
        rows = []
        for fd in files:
            rows.append((SYNC, fd, 0, 0, 0, self._next_tag()))
            self._flights[self._tag] = None, 0
        self._engine.submit(np.array(rows, OPERATION))

    def _group(self) -> list[Writing]:
        group, self._syncing = self._syncing, []
        return group

    def _synced(self, result: int) -> None:
        self._sync_error = min(self._sync_error, result)
        self._syncs_left -= 1
        if not self._syncs_left:
            code = -self._sync_error
            error = OSError(code, errno.errorcode.get(code, "EIO")) if code else None
            self._storing.commit(self._sync_group, error)
            self._sync_group = []
            self._commit([])

    # --- what it is to do next -----------------------------------------------------------------

    def _begin(self) -> bool:
        if self._staging.clogged:
            self._wishes.fail_waiting("breaker")
        loads: list[Begun] = []
        tried = 0
        if self._hungry < _PATIENT_STEPS:
            loads, tried = self._take(LOADS_AT_ONCE, stores=False)
        stores, tried_too = self._take(STORES_AT_ONCE, stores=True, alone=not loads)
        self._hungry = 0 if stores or not self._wishes.waiting()[1] else self._hungry + 1
        self._submit(loads)
        try:
            self._storing.seal()
        except Exception as error:
            writes = [begun.flight for begun in stores]
            self._storing.drop([w for w in writes if isinstance(w, Writing)], _reason(error))
            stores = []
        self._submit(stores)
        return bool(tried or tried_too)

    def _take(self, most: int, *, stores: bool, alone: bool = True) -> tuple[list[Begun], int]:
        """What was begun of what waits, and how many items were begun or answered."""
        part = self._storing if stores else self._loading
        begun: list[Begun] = []
        for tried in range(most):
            item = self._wishes.next(stores=stores)
            if item is None:
                return begun, tried
            alone = alone and not self._flights and not begun
            try:
                new = part.begin(item, alone=alone)
            except Exception as error:
                self._wishes.answer([Answer(item, Outcome.FAILED, _reason(error))])
                if stores:
                    self._wishes.end_store(item)
                continue
            if new is None:  # no memory now
                self._wishes.put_back(item)
                return begun, tried
            if new.operations:
                begun.append(new)
        return begun, most

    def _submit(self, begun: list[Begun]) -> None:
        rows = []
        for flight, operations in begun:
            self._by_item[flight.item] = flight
            for operation in operations:
                flight.left += 1
                flight.tags.append(self._next_tag())
                rows.append((*operation, self._tag))
                self._flights[self._tag] = flight, operation[-1]
        if rows:
            self._engine.submit(np.array(rows, OPERATION))

    def _next_tag(self) -> int:
        self._tag += 1
        return self._tag

    # --- ends ----------------------------------------------------------------------------------

    def _give_up(self, items: list[Item]) -> None:
        """Answered before they were done: their memory waits for the engine, which may hurry."""
        tags: list[int] = []
        for item in items:
            flight = self._by_item.get(item)
            if flight is None:
                continue
            if flight.memory is not None:
                self._staging.retire(flight.memory)
            tags += flight.tags
        if tags:
            self._engine.cancel(np.array(tags, np.uint64))

    def _fail(self, reason: str, items: list[Item] | None = None) -> None:
        """Something that should not happen did: nobody waits for it in vain."""
        if items is None:
            items = list(self._by_item)
            self._wishes.fail_waiting(reason)
        self._wishes.claim_all(items)
        self._wishes.answer(Answer(item, Outcome.FAILED, reason) for item in items)


def _reason(error: Exception) -> str:
    return "memory" if isinstance(error, MemoryError) else f"{type(error).__name__}: {error}"
