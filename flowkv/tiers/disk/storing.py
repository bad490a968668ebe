"""Stores of a disk tier: from a wish to a write, from what was written to an answer."""

from __future__ import annotations

import errno

from flowkv.tiers.base import Outcome, Store
from flowkv.tiers.disk.files import reason_of
from flowkv.tiers.disk.flight import Flight, Writing
from flowkv.tiers.disk.loading import Begun
from flowkv.tiers.disk.memory import Staging
from flowkv.tiers.disk.records import Held, Written
from flowkv.tiers.disk.refusal import Refused
from flowkv.tiers.disk.sealing import Unsealed, seal_all
from flowkv.tiers.disk.slab import slot_granules
from flowkv.tiers.disk.store import DiskStore
from flowkv.tiers.disk.wishes import Answer, Item, Wishes
from flowkv.tiers.envelope import Envelope, Sealed
from flowkv.tiers.frame import (
    DIGEST_BYTES,
    BadFrame,
    Header,
    aligned,
    count_stripes,
    header_bytes,
)
from flowkv.tiers.io.staging import Slot as Memory

_SHARE = 2  # part of the arena that stores may take


class Storing:
    """Begins and finishes stores, for the conductor alone.

    Attributes:
        dropped: Stores refused because another process owns the directory.
    """

    def __init__(
        self, store: DiskStore, envelope: Envelope, staging: Staging, wishes: Wishes
    ) -> None:
        self._store, self._envelope = store, envelope
        self._staging, self._wishes = staging, wishes
        self._used_bytes = self.dropped = 0
        self._unsealed: list[tuple[Item, Unsealed]] = []  # claimed: their bodies are read

    def begin(self, item: Item, *, alone: bool) -> Begun | None:
        """Starts a store; None if there is no memory for it now.

        Args:
            item: What is wished for.
            alone: Nothing is under way whose end could bring memory.
        """
        wish = item.wish
        if not isinstance(wish, Store) or not self._wishes.claim(item):
            return self._end(item)
        if self._store.owner and self._holds(wish.key):
            return self._end(item, Outcome.STORED)
        try:
            stripes = count_stripes(wish.key, wish.info, wish.body.nbytes)
        except BadFrame as error:
            return self._end(item, Outcome.FAILED, error.reason)
        if not wish.body.c_contiguous:
            return self._end(item, Outcome.FAILED, "invalid")
        head = header_bytes(stripes, lossless=not self._envelope.plain)
        most = max(self._envelope.most_bytes(wish.body.nbytes), head + wish.body.nbytes)
        memory = self._memory(slot_granules(head, most - head) * 4096, alone=alone)
        if memory is None:
            return None
        self._used_bytes += memory.n_bytes
        try:
            flight = self._write(item, wish, memory, stripes)
        except (BadFrame, Refused) as error:
            self._free(memory)
            self.dropped += error.reason == "read-only"
            return self._end(item, Outcome.FAILED, error.reason)
        except OSError as error:
            self._free(memory)
            return self._end(item, Outcome.FAILED, reason_of(error))
        except BaseException:
            self._free(memory)
            raise
        if flight is None:
            self._free(memory)
            return self._end(item, Outcome.STORED)
        if not self._envelope.plain:
            self._wishes.let_go(item)
        return Begun(flight, [flight.operation(self._store.fd(flight.written.held.slot))])

    def _holds(self, key: bytes) -> bool:
        """Whether a frame is there. One of another integrity mode would never be read: it goes."""
        held, envelope = self._store.find(key), self._envelope
        if held is None or envelope.reads(held.integrity) or not envelope.reads(envelope.kind):
            return held is not None
        self._store.delete([key])
        return False

    def seal(self) -> None:
        """Seals what was begun since the last call: before the engine is given it."""
        if self._unsealed:
            seal_all([frame for _, frame in self._unsealed])
            for item, _ in self._unsealed:
                self._wishes.let_go(item)
            self._unsealed = []

    def _write(self, item: Item, wish: Store, memory: Memory, stripes: int) -> Writing | None:
        """Gives the frame a slot, and wraps it into memory; None if it is there already."""
        seq = self._store.reserve(wish.key)
        if seq is None:
            return None
        try:
            if self._envelope.plain:
                head = Header(wish.key, wish.info, bytes(DIGEST_BYTES * stripes), seq)
                sizes = head.header_bytes, head.frame_bytes
            else:
                sealed = self._envelope.seal(wish.key, wish.info, wish.body, generation=seq)
                _copy(sealed, memory.view)
                head, sizes = sealed.head, (len(sealed.header), sealed.n_bytes)
            slot, stale = self._store.place(*sizes)
        except BaseException:
            self._store.release(wish.key)
            raise
        if self._envelope.plain:
            body = wish.body.cast("B")
            frame = Unsealed(wish.key, wish.info, body, memory, sizes[0], seq)
            self._unsealed.append((item, frame))
        stored_bytes, n_bytes = head.frame_bytes, sizes[1]
        # nothing of what lay there before survives behind a shorter frame
        length = slot.n_bytes if stale else aligned(n_bytes)
        memory.view[n_bytes:length] = bytes(length - n_bytes)
        compressed = bool(head.sizes)
        held = Held(seq, slot, stripes, wish.info, stored_bytes, head.integrity, compressed)
        return Writing(item, memory, Written(wish.key, held), length)

    def drop(self, flights: list[Writing], reason: str) -> None:
        """Fails stores that could not be sealed, or finished."""
        self._unsealed = []
        for flight in flights:
            if flight.memory is not None:  # else it was finished before something went wrong
                self._free(flight.memory)
                flight.memory = None
                self._store.abandon([flight.written])
        self._answer([Answer(flight.item, Outcome.FAILED, reason) for flight in flights])

    def finish(self, flights: list[Writing]) -> list[Writing]:
        """Those frames that lie whole in their slots and are still wanted."""
        good, answers = [], []
        for flight in flights:
            assert flight.memory is not None
            self._free(flight.memory)
            flight.memory = None
            if not flight.error and not flight.short and flight.item.done is None:
                good.append(flight)
                continue
            self._store.abandon([flight.written])
            reason = errno.errorcode.get(-flight.error or errno.ENOSPC, "EIO")
            answers.append(Answer(flight.item, Outcome.FAILED, reason))
        self._answer(answers)
        return good

    def commit(self, flights: list[Writing], error: OSError | None) -> None:
        """Makes frames count that the disk has, or none of them where it failed."""
        late = [flight for flight in flights if flight.item.done is not None]
        wanted = [flight for flight in flights if flight.item.done is None]
        self._store.abandon(flight.written for flight in late)
        if wanted and error is None:
            try:
                self._store.commit([flight.written for flight in wanted])
            except OSError as failed:
                self._fail(wanted, failed)
                wanted = []
        elif wanted and error is not None:
            self._store.abandon(flight.written for flight in wanted)
            self._fail(wanted, error)
            wanted = []
        self._wishes.claim_all(flight.item for flight in wanted)
        self._store.delete(flight.item.key for flight in wanted if not flight.item.claimed)
        self._answer([Answer(f.item, Outcome.STORED, "", None, f.item.n_bytes) for f in wanted])
        for flight in late:
            self._wishes.end_store(flight.item)

    def _fail(self, flights: list[Writing], error: OSError) -> None:
        self._answer([Answer(f.item, Outcome.FAILED, reason_of(error)) for f in flights])

    def _answer(self, answers: list[Answer]) -> None:
        self._wishes.answer(answers)
        for answer in answers:
            self._wishes.end_store(answer.item)

    def _end(self, item: Item, outcome: Outcome | None = None, reason: str = "") -> Begun:
        if outcome is not None:
            self._wishes.answer([Answer(item, outcome, reason)])
        self._wishes.end_store(item)
        return Begun(Flight(item, None), [])

    def _memory(self, n_bytes: int, *, alone: bool) -> Memory | None:
        if not alone and self._used_bytes + n_bytes > self._staging.arena.n_bytes // _SHARE:
            return None
        memory = self._staging.take(n_bytes)
        return self._staging.take_spare(n_bytes) if memory is None and alone else memory

    def _free(self, memory: Memory) -> None:
        self._used_bytes -= memory.n_bytes
        self._staging.give_back(memory)


def _copy(sealed: Sealed, view: memoryview) -> None:
    at = len(sealed.header)
    view[:at] = sealed.header
    for part in sealed.parts:
        size = memoryview(part).nbytes
        view[at : at + size] = part
        at += size
