"""Loads of a disk tier: from a wish to reads, from what was read to an answer."""

from __future__ import annotations

import errno
from typing import NamedTuple

from flowkv.tiers.base import Load, Outcome
from flowkv.tiers.disk.flight import Flight, Operation, Reading, read, wider
from flowkv.tiers.disk.memory import Staging
from flowkv.tiers.disk.opened import open_all, read_header
from flowkv.tiers.disk.records import Slot as Place
from flowkv.tiers.disk.store import DiskStore
from flowkv.tiers.disk.wishes import Answer, Item, Wishes
from flowkv.tiers.envelope import Envelope
from flowkv.tiers.frame import XXH3_128, BadFrame, aligned
from flowkv.tiers.io.engine import ALIGNMENT
from flowkv.tiers.io.staging import Slot, address_of

DIRECT_BYTES = 256 << 10
"""Stripes for which reading into the target pays for a read of the header alone."""
_MOVES = 3  # times that a frame may move while a reader reads it
_SHARE = 4  # of the arena, one part is left for stores


class Begun(NamedTuple):
    """A flight and what the engine shall do; no operations if the item is answered already."""

    flight: Flight
    operations: list[Operation]


class Loading:
    """Begins and finishes loads, for the conductor alone."""

    def __init__(
        self, store: DiskStore, envelope: Envelope, staging: Staging, wishes: Wishes
    ) -> None:
        self._store, self._envelope = store, envelope
        self._staging, self._wishes = staging, wishes
        self._used_bytes = 0
        self._landed: list[Place] = []

    def begin(self, item: Item, *, alone: bool) -> Begun | None:
        """Starts a load; None if there is no memory for it now.

        Args:
            item: What is wished for.
            alone: Nothing is under way whose end could bring memory.
        """
        wish = item.wish
        if not isinstance(wish, Load):
            return Begun(Flight(item, None), [])
        try:
            held = self._store.pin(wish.key, wish.layout, wish.fidelity)
        except BadFrame as error:
            return self._end(item, Outcome.MISS, error.reason)
        if held is None:
            return self._end(item, Outcome.MISS)
        count = wish.stripes or held.stripes - wish.first
        flight = Reading(item, held, wish.first, count)
        n_bytes = count * held.info.stripe_bytes
        if not 0 <= wish.first < wish.first + count <= held.stripes:
            answer = self._end(item, Outcome.MISS, "stripes")
        elif wish.target.nbytes < n_bytes or not _writable(wish.target):
            answer = self._end(item, Outcome.FAILED, "target")
        elif alone or self._used_bytes < self._staging.arena.n_bytes * (_SHARE - 1) // _SHARE:
            try:
                return self._read(flight, wish, n_bytes, alone=alone)
            except BaseException:  # no memory: nobody else unpins it
                self._wishes.take_back(item)
                self._store.unpin([held.slot])
                raise
        else:
            self._store.unpin([held.slot])
            return None
        self._store.unpin([held.slot])
        return answer

    def _read(self, flight: Reading, wish: Load, n_bytes: int, *, alone: bool) -> Begun | None:
        held, slot = flight.held, flight.held.slot
        direct = self._direct(flight, wish, n_bytes)
        extents = flight.extents(direct=direct)
        own = extents[:1] if direct else extents
        memory = self._memory(sum(wider(size) for _, size in own), alone=alone)
        if memory is None:
            self._wishes.take_back(flight.item)
            self._store.unpin([slot])
            return None
        flight.memory = memory
        self._used_bytes += memory.n_bytes
        try:
            fd = self._store.fd(slot)
        except OSError as error:
            self._land(flight)
            self._unpin()
            return self._end(flight.item, Outcome.FAILED, _name(error.errno or errno.EIO))
        operations, address = [], memory.address
        for offset, size in extents:
            to = address_of(wish.target) if direct and offset else address
            operations.append(read(fd, slot.offset + offset, to, size))
            address += wider(size)
        if direct:
            flight.direct = wish.target.cast("B")[:n_bytes]
        elif len(extents) > 1:
            flight.body_at = wider(extents[0][1])
        else:
            flight.body_at = held.header_bytes + flight.first * held.info.stripe_bytes
        return Begun(flight, operations)

    def _direct(self, flight: Reading, wish: Load, n_bytes: int) -> bool:
        """Whether the disk may write to the target; if so, the target's slot is lent to it."""
        plain = flight.held.integrity == XXH3_128 and not flight.held.lossless
        if n_bytes < DIRECT_BYTES or n_bytes % ALIGNMENT or not plain or not wish.target.contiguous:
            return False
        slot = self._staging.arena.slot_of(wish.target)
        if slot is None or address_of(wish.target) % ALIGNMENT:
            return False
        return self._wishes.lend(flight.item, self._staging.arena, slot)

    def finish(self, flights: list[Reading]) -> list[Begun]:
        """Answers loads that were read; those that must read on are returned."""
        self._wishes.claim_all(flight.item for flight in flights)
        good: list[Reading] = []
        more: list[Begun] = []
        answers: list[Answer] = []
        for flight in flights:
            item = flight.item
            if not item.claimed:
                self._land(flight)
            elif flight.error:
                answers.append(Answer(item, Outcome.FAILED, _name(-flight.error)))
                self._land(flight)
            elif flight.short:
                self._damaged(flight, "truncated", answers)
            elif flight.held.lossless and flight.header is None and not self._whole(flight):
                try:
                    self._go_on(flight, more, answers)
                except OSError as error:  # of this one alone
                    answers.append(Answer(item, Outcome.FAILED, _name(error.errno or errno.EIO)))
                    self._land(flight)
            else:
                good.append(flight)
        for flight, reason in zip(good, open_all(self._envelope, good), strict=True):
            if reason:
                self._damaged(flight, reason, answers)
                continue
            info = flight.held.info
            n_bytes = flight.count * info.stripe_bytes
            answers.append(Answer(flight.item, Outcome.HIT, "", info, n_bytes))
            self._land(flight)
        self._unpin()
        self._wishes.answer(answers)
        return more

    def drop(self, flights: list[Reading]) -> None:
        """Lets go of all that loads hold which could not be finished; others answer them."""
        for flight in flights:
            if flight.memory is not None:
                self._land(flight)
        self._unpin()

    def _whole(self, flight: Reading) -> bool:
        """Whether all of a compressed frame was read, or its header only."""
        ((_, size),) = flight.extents(direct=False)
        if size < flight.held.stored_bytes:
            return False
        flight.header = None
        header = flight.held.header_bytes
        flight.body_at = header
        if flight.first:
            try:
                found = read_header(self._envelope, flight)
            except BadFrame:
                return True  # found again, and answered, when it is opened
            flight.body_at = self._envelope.place(found, flight.first, flight.count)[0]
        return True

    def _go_on(self, flight: Reading, more: list[Begun], answers: list[Answer]) -> None:
        """Reads the stripes, now that the header has said where they are."""
        held = flight.held
        try:
            header = read_header(self._envelope, flight)
        except BadFrame as error:
            self._damaged(flight, error.reason, answers)
            return
        offset, size = self._envelope.place(header, flight.first, flight.count)
        start = offset // ALIGNMENT * ALIGNMENT
        memory = self._memory(aligned(offset - start + size), alone=True)
        assert flight.memory is not None and memory is not None
        self._used_bytes += memory.n_bytes - flight.memory.n_bytes
        self._staging.give_back(flight.memory)
        flight.memory, flight.header, flight.body_at = memory, header, offset - start
        flight.tags = []
        self._wishes.let_go(flight.item)
        fd = self._store.fd(held.slot)
        operation = read(fd, held.slot.offset + start, memory.address, offset - start + size)
        more.append(Begun(flight, [operation]))

    def _damaged(self, flight: Reading, reason: str, answers: list[Answer]) -> None:
        item, held = flight.item, flight.held
        locked = reason == "integrity" and not self._envelope.reads(held.integrity)
        if locked or self._store.condemn(item.key, held):
            answers.append(Answer(item, Outcome.MISS, reason))
            self._land(flight)
            return
        self._land(flight)
        item.tries += 1
        if item.tries < _MOVES:
            self._wishes.put_back(item)
        else:
            answers.append(Answer(item, Outcome.MISS))

    def _land(self, flight: Reading) -> None:
        """Gives its memory back; `_unpin` its slot, of many at a time."""
        if flight.item.lent is not None:
            self._wishes.take_back(flight.item)
        self._landed.append(flight.held.slot)
        if flight.memory is not None:
            self._used_bytes -= flight.memory.n_bytes
            self._staging.give_back(flight.memory)
            flight.memory = None

    def _unpin(self) -> None:
        self._store.unpin(self._landed)
        self._landed.clear()

    def _memory(self, n_bytes: int, *, alone: bool) -> Slot | None:
        memory = self._staging.take(n_bytes)
        return self._staging.take_spare(n_bytes) if memory is None and alone else memory

    def _end(self, item: Item, outcome: Outcome, reason: str = "") -> Begun:
        self._wishes.answer([Answer(item, outcome, reason)])
        return Begun(Flight(item, None), [])


def _writable(target: memoryview) -> bool:
    return target.c_contiguous and not target.readonly


def _name(code: int) -> str:
    """The system's short name of an error, such as "ENOSPC"."""
    return errno.errorcode.get(code, "EIO")
