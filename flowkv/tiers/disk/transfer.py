"""Loads and stores of a disk tier: from requests to file operations, and to answers."""

from __future__ import annotations

import errno
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flowkv.tiers.base import FrameInfo, Load, Outcome, Store
from flowkv.tiers.disk.files import reason_of
from flowkv.tiers.disk.journal import Held, WrittenFrame
from flowkv.tiers.disk.journal import Slot as Place
from flowkv.tiers.disk.requests import (
    DiskItem,
    DiskOperations,
    DiskRead,
    DiskRequestQueue,
    ItemAnswer,
    Operation,
    Staging,
    Writing,
    read,
    wider,
)
from flowkv.tiers.disk.store import DiskStore, Refused, agree, slot_granules
from flowkv.tiers.envelope import Envelope, SealedFrame
from flowkv.tiers.frame import (
    DIGEST_AT,
    DIGEST_BYTES,
    DIGESTED_FROM,
    FIXED_BYTES,
    XXH3_128,
    BadFrame,
    Header,
    aligned,
    count_stripes,
    describe,
    fixed_fields,
    header_bytes,
    lay_out,
    pack_header,
)
from flowkv.tiers.io.engine import ALIGNMENT
from flowkv.tiers.io.staging import ArenaSlot, address_of
from flowkv.tiers.io.staging import ArenaSlot as Memory

# Frames that a disk has delivered: verified and copied to their targets, whole batches at a time.
#
# Small batches are checked by the envelope. Large ones of plain frames go through one compiled call
# (`tiers.check`), which keeps its speed while the interpreter is busy elsewhere.

COMPILED_BYTES = 1 << 20
"""Batches at least so large are worth the compiled check, and once in a process its loading."""


def open_all(envelope: Envelope, flights: Sequence[DiskRead]) -> list[str]:
    """Verifies what was read and puts it into the targets; "" or the reason of each `BadFrame`."""
    found: dict[int, str] = {}
    if envelope.integrity == "xxh3":
        plain = [n for n, flight in enumerate(flights) if _is_plain(flight.held)]
        wanted = (flights[n].count * flights[n].held.info.stripe_bytes for n in plain)
        if sum(wanted) >= COMPILED_BYTES:
            reasons = _open_compiled([flights[n] for n in plain])
            found = dict(zip(plain, reasons, strict=True))
    return [
        found[n] if n in found else open_one(envelope, flight) for n, flight in enumerate(flights)
    ]


def _is_plain(held: Held) -> bool:
    return held.integrity == XXH3_128 and not held.lossless


def open_one(envelope: Envelope, flight: DiskRead) -> str:
    """The same for one of any kind."""
    try:
        header = flight.header or read_header(envelope, flight)
        target = target_of(flight)
        stored: memoryview = target if flight.direct is not None else _stored(flight)
        envelope.open(header, stored, target, flight.first, flight.count)
    except BadFrame as error:
        return error.reason
    return ""


def read_header(envelope: Envelope, flight: DiskRead) -> Header:
    """The header that was read, checked, and found to be the one wished for.

    Raises:
        BadFrame: It is another one, or damaged.
    """
    assert flight.memory is not None
    held = flight.held
    data = flight.memory.view[: held.header_bytes]
    return agree(envelope.head(data, flight.item.key, generation=held.seq), held)


def target_of(flight: DiskRead) -> memoryview:
    """Where the stripes are wished for."""
    if flight.direct is not None:
        return flight.direct
    wish = flight.item.wish
    assert isinstance(wish, Load)
    return wish.target.cast("B")


def _stored(flight: DiskRead) -> memoryview:
    assert flight.memory is not None
    return flight.memory.view[flight.body_at :]


def _open_compiled(flights: Sequence[DiskRead]) -> list[str]:
    from flowkv.tiers.digest import CHECK, REASONS, check_frames

    rows, fields, targets = [], [], []
    for flight in flights:
        held, memory = flight.held, flight.memory
        assert memory is not None
        target = target_of(flight)
        targets.append(target)  # alive until all is copied
        step = held.info.stripe_bytes
        to = address_of(target)
        start = to if flight.direct is not None else memory.address + flight.body_at
        rows.append(
            (
                *(memory.address, held.header_bytes, start, flight.count * step, to, step),
                *(held.stripes, flight.first, flight.count),
            )
        )
        expected = Header(flight.item.key, held.info, bytes(DIGEST_BYTES * held.stripes), held.seq)
        fields.append(fixed_fields(expected))
    checks = np.array(rows, CHECK)
    reasons = check_frames(checks, np.frombuffer(b"".join(fields), np.uint8).reshape(-1, 256))
    return [REASONS[reason] for reason in reasons.tolist()]


DIRECT_BYTES = 256 << 10
"""Stripes for which reading into the target pays for a read of the header alone."""
_MOVES = 3  # times that a frame may move while a reader reads it
_SHARE = 4  # of the arena, one part is left for stores


class Begun(NamedTuple):
    """A flight and what the engine shall do; no operations if the item is answered already."""

    flight: DiskOperations
    operations: list[Operation]


class Loading:
    """Begins and finishes loads, for the conductor alone."""

    def __init__(
        self, store: DiskStore, envelope: Envelope, staging: Staging, wishes: DiskRequestQueue
    ) -> None:
        self._store, self._envelope = store, envelope
        self._staging, self._wishes = staging, wishes
        self._used_bytes = 0
        self._landed: list[Place] = []

    def begin(self, item: DiskItem, *, alone: bool) -> Begun | None:
        """Starts a load; None if there is no memory for it now.

        Args:
            item: What is wished for.
            alone: Nothing is under way whose end could bring memory.
        """
        wish = item.wish
        if not isinstance(wish, Load):
            return Begun(DiskOperations(item, None), [])
        try:
            held = self._store.pin(wish.key, wish.layout, wish.fidelity)
        except BadFrame as error:
            return self._end(item, Outcome.MISS, error.reason)
        if held is None:
            return self._end(item, Outcome.MISS)
        count = wish.stripes or held.stripes - wish.first
        flight = DiskRead(item, held, wish.first, count)
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

    def _read(self, flight: DiskRead, wish: Load, n_bytes: int, *, alone: bool) -> Begun | None:
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

    def _direct(self, flight: DiskRead, wish: Load, n_bytes: int) -> bool:
        """Whether the disk may write to the target; if so, the target's slot is lent to it."""
        plain = flight.held.integrity == XXH3_128 and not flight.held.lossless
        if n_bytes < DIRECT_BYTES or n_bytes % ALIGNMENT or not plain or not wish.target.contiguous:
            return False
        slot = self._staging.arena.slot_of(wish.target)
        if slot is None or address_of(wish.target) % ALIGNMENT:
            return False
        return self._wishes.lend(flight.item, self._staging.arena, slot)

    def finish(self, flights: list[DiskRead]) -> list[Begun]:
        """Answers loads that were read; those that must read on are returned."""
        self._wishes.claim_all(flight.item for flight in flights)
        good: list[DiskRead] = []
        more: list[Begun] = []
        answers: list[ItemAnswer] = []
        for flight in flights:
            item = flight.item
            if not item.claimed:
                self._land(flight)
            elif flight.error:
                answers.append(ItemAnswer(item, Outcome.FAILED, _name(-flight.error)))
                self._land(flight)
            elif flight.short:
                self._damaged(flight, "truncated", answers)
            elif flight.held.lossless and flight.header is None and not self._whole(flight):
                try:
                    self._go_on(flight, more, answers)
                except OSError as error:  # of this one alone
                    answers.append(
                        ItemAnswer(item, Outcome.FAILED, _name(error.errno or errno.EIO))
                    )
                    self._land(flight)
            else:
                good.append(flight)
        for flight, reason in zip(good, open_all(self._envelope, good), strict=True):
            if reason:
                self._damaged(flight, reason, answers)
                continue
            info = flight.held.info
            n_bytes = flight.count * info.stripe_bytes
            answers.append(ItemAnswer(flight.item, Outcome.HIT, "", info, n_bytes))
            self._land(flight)
        self._unpin()
        self._wishes.answer(answers)
        return more

    def drop(self, flights: list[DiskRead]) -> None:
        """Lets go of all that loads hold which could not be finished; others answer them."""
        for flight in flights:
            if flight.memory is not None:
                self._land(flight)
        self._unpin()

    def _whole(self, flight: DiskRead) -> bool:
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

    def _go_on(self, flight: DiskRead, more: list[Begun], answers: list[ItemAnswer]) -> None:
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

    def _damaged(self, flight: DiskRead, reason: str, answers: list[ItemAnswer]) -> None:
        item, held = flight.item, flight.held
        locked = reason == "integrity" and not self._envelope.reads(held.integrity)
        if locked or self._store.condemn(item.key, held):
            answers.append(ItemAnswer(item, Outcome.MISS, reason))
            self._land(flight)
            return
        self._land(flight)
        item.tries += 1
        if item.tries < _MOVES:
            self._wishes.put_back(item)
        else:
            answers.append(ItemAnswer(item, Outcome.MISS))

    def _land(self, flight: DiskRead) -> None:
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

    def _memory(self, n_bytes: int, *, alone: bool) -> ArenaSlot | None:
        memory = self._staging.take(n_bytes)
        return self._staging.take_spare(n_bytes) if memory is None and alone else memory

    def _end(self, item: DiskItem, outcome: Outcome, reason: str = "") -> Begun:
        self._wishes.answer([ItemAnswer(item, outcome, reason)])
        return Begun(DiskOperations(item, None), [])


def _writable(target: memoryview) -> bool:
    return target.c_contiguous and not target.readonly


def _name(code: int) -> str:
    """The system's short name of an error, such as "ENOSPC"."""
    return errno.errorcode.get(code, "EIO")


# Plain frames sealed many at a time: copied into staging memory and digested in the same pass.
#
# One compiled call holds no lock of the interpreter while it reads gigabytes a second. What is
# digested is what lies in staging memory, whoever else writes to the body.

STREAMED_BYTES = 4 << 20

SEAL = np.dtype(
    [(name, "<u8") for name in ("header", "header_bytes", "body", "data", "step", "stripes")]
)
"""One frame: address and length of its header, address of its body, and where that is copied."""

_entries: list[Any] = []


class Unsealed(NamedTuple):
    """A frame whose place is known: `memory` begins with its header, the body follows."""

    key: bytes
    info: FrameInfo
    body: memoryview
    memory: ArenaSlot
    header_bytes: int
    seq: int


def seal_all(frames: list[Unsealed]) -> None:
    """Puts headers and bodies into their memory; descriptions and lengths were checked before."""
    if sum(frame.body.nbytes for frame in frames) < COMPILED_BYTES:
        for frame in frames:
            _seal(frame)
        return
    rows = []
    for frame in frames:
        stripes = frame.body.nbytes // frame.info.stripe_bytes
        header = Header(frame.key, frame.info, bytes(DIGEST_BYTES * stripes), frame.seq)
        frame.memory.view[: frame.header_bytes] = lay_out(header)
        address, body = frame.memory.address, address_of(frame.body)
        start, step = address + frame.header_bytes, frame.info.stripe_bytes
        rows.append((address, frame.header_bytes, body, start, step, stripes))
    if not _entries:
        _entries.append(_compiled())
    _entries[0](np.array(rows, SEAL))


def _seal(frame: Unsealed) -> None:
    start = frame.header_bytes
    copy = frame.memory.view[start : start + frame.body.nbytes]
    copy[:] = frame.body
    header = describe(frame.key, frame.info, copy, frame.seq)
    frame.memory.view[:start] = pack_header(header)


def _compiled() -> Any:
    from numba import njit

    from flowkv.tiers import digest
    from flowkv.tiers.digest import digest_copied, fence, put_word, swapped, xxh3_128

    digest_at, digested_from = np.uint64(DIGEST_AT.start), np.uint64(DIGESTED_FROM)
    digests_at, eight = np.uint64(FIXED_BYTES), np.uint64(8)
    stamp = 1 + zlib.crc32(
        Path(str(digest.__file__)).read_bytes()
    )  # part of what the cached code is for

    def seal_rows(rows):  # type: ignore[no-untyped-def]
        n_bytes = np.uint64(0)
        for i in range(len(rows) if stamp else 0):
            n_bytes += rows[i].step * rows[i].stripes
        streams = n_bytes >= np.uint64(STREAMED_BYTES)
        for i in range(len(rows)):
            row = rows[i]
            at = row.header + digests_at
            for stripe in range(row.stripes):
                skip = row.step * np.uint64(stripe)
                low, high = digest_copied(row.body + skip, row.step, row.data + skip, streams)
                put_word(at, swapped(high))
                put_word(at + eight, swapped(low))
                at += np.uint64(DIGEST_BYTES)
            low, high = xxh3_128(row.header + digested_from, row.header_bytes - digested_from)
            put_word(row.header + digest_at, swapped(high))
            put_word(row.header + digest_at + eight, swapped(low))
        if streams:
            fence()

    options = {"nogil": True, "error_model": "numpy"}
    try:
        return njit(cache=True, **options)(seal_rows)
    except RuntimeError:  # no directory to write to: compiled anew in every process
        return njit(**options)(seal_rows)


# Stores of a disk tier: from a wish to a write, from what was written to an answer.

_STORING_SHARE = 2  # part of the arena that stores may take


class Storing:
    """Begins and finishes stores, for the conductor alone.

    Attributes:
        dropped: Stores refused because another process owns the directory.
    """

    def __init__(
        self, store: DiskStore, envelope: Envelope, staging: Staging, wishes: DiskRequestQueue
    ) -> None:
        self._store, self._envelope = store, envelope
        self._staging, self._wishes = staging, wishes
        self._used_bytes = self.dropped = 0
        self._unsealed: list[tuple[DiskItem, Unsealed]] = []  # claimed: their bodies are read

    def begin(self, item: DiskItem, *, alone: bool) -> Begun | None:
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

    def _write(self, item: DiskItem, wish: Store, memory: Memory, stripes: int) -> Writing | None:
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
        return Writing(item, memory, WrittenFrame(wish.key, held), length)

    def drop(self, flights: list[Writing], reason: str) -> None:
        """Fails stores that could not be sealed, or finished."""
        self._unsealed = []
        for flight in flights:
            if flight.memory is not None:  # else it was finished before something went wrong
                self._free(flight.memory)
                flight.memory = None
                self._store.abandon([flight.written])
        self._answer([ItemAnswer(flight.item, Outcome.FAILED, reason) for flight in flights])

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
            answers.append(ItemAnswer(flight.item, Outcome.FAILED, reason))
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
        self._answer([ItemAnswer(f.item, Outcome.STORED, "", None, f.item.n_bytes) for f in wanted])
        for flight in late:
            self._wishes.end_store(flight.item)

    def _fail(self, flights: list[Writing], error: OSError) -> None:
        self._answer([ItemAnswer(f.item, Outcome.FAILED, reason_of(error)) for f in flights])

    def _answer(self, answers: list[ItemAnswer]) -> None:
        self._wishes.answer(answers)
        for answer in answers:
            self._wishes.end_store(answer.item)

    def _end(self, item: DiskItem, outcome: Outcome | None = None, reason: str = "") -> Begun:
        if outcome is not None:
            self._wishes.answer([ItemAnswer(item, outcome, reason)])
        self._wishes.end_store(item)
        return Begun(DiskOperations(item, None), [])

    def _memory(self, n_bytes: int, *, alone: bool) -> Memory | None:
        if not alone and self._used_bytes + n_bytes > self._staging.arena.n_bytes // _STORING_SHARE:
            return None
        memory = self._staging.take(n_bytes)
        return self._staging.take_spare(n_bytes) if memory is None and alone else memory

    def _free(self, memory: Memory) -> None:
        self._used_bytes -= memory.n_bytes
        self._staging.give_back(memory)


def _copy(sealed: SealedFrame, view: memoryview) -> None:
    at = len(sealed.header)
    view[:at] = sealed.header
    for part in sealed.parts:
        size = memoryview(part).nbytes
        view[at : at + size] = part
        at += size
