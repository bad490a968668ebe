"""Loads and stores of a disk tier: from requests to file operations, and to answers."""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flowkv.tiers.base import FrameInfo, Load, Outcome, Store
from flowkv.tiers.disk.files import reason_of
from flowkv.tiers.disk.journal import Held, Slot, WrittenFrame
from flowkv.tiers.disk.requests import (
    DiskItem,
    DiskRead,
    DiskRequestQueue,
    DiskWrite,
    FrameOperations,
    ItemAnswer,
    Staging,
    extents,
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
from flowkv.tiers.io.engine import ALIGNMENT, READ, WRITE
from flowkv.tiers.io.staging import ArenaSlot, address_of

# Frames that a disk has delivered: verified and copied to their targets, whole batches at a time.
#
# Small batches are checked by the envelope. Large ones of plain frames go through one compiled call
# (`tiers.digest`), which keeps its speed while the interpreter is busy elsewhere.

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
        stored = flight.memory.view[flight.body_at :]
        envelope.open(header, stored, target_of(flight), flight.first, flight.count)
    except BadFrame as error:
        return error.reason
    return ""


def read_header(envelope: Envelope, flight: DiskRead) -> Header:
    """The header that was read, checked, and found to be the one wished for.

    Raises:
        BadFrame: It is another one, or damaged.
    """
    held = flight.held
    data = flight.memory.view[: held.header_bytes]
    return agree(envelope.head(data, flight.item.key, generation=held.seq), held)


def target_of(flight: DiskRead) -> memoryview:
    """Where the stripes are wished for."""
    wish = flight.item.wish
    assert isinstance(wish, Load)
    return wish.target.cast("B")


def _open_compiled(flights: Sequence[DiskRead]) -> list[str]:
    from flowkv.tiers.digest import CHECK, REASONS, check_frames

    rows, fields, targets = [], [], []
    for flight in flights:
        held, address, step = flight.held, flight.memory.address, flight.held.info.stripe_bytes
        targets.append(target_of(flight))  # alive until all is copied
        to = address_of(targets[-1])
        start, n_bytes = address + flight.body_at, flight.count * step
        rows.append(
            (
                *(address, held.header_bytes, start, n_bytes, to, step),
                *(held.stripes, flight.first, flight.count),
            )
        )
        expected = Header(flight.item.key, held.info, bytes(DIGEST_BYTES * held.stripes), held.seq)
        fields.append(fixed_fields(expected))
    checks = np.array(rows, CHECK)
    reasons = check_frames(checks, np.frombuffer(b"".join(fields), np.uint8).reshape(-1, 256))
    return [REASONS[reason] for reason in reasons.tolist()]


class NoRoom(Exception):
    """There is no staging memory for an item now."""


class _Transfers:
    """What loads and stores have in common. For the conductor alone.

    Args:
        store: Where frames lie.
        envelope: How they are wrapped.
        staging: Memory.
        queue: Gets the answers.
        share: Part of the arena that these may take.
    """

    def __init__(
        self,
        store: DiskStore,
        envelope: Envelope,
        staging: Staging,
        queue: DiskRequestQueue,
        share: float,
    ) -> None:
        self._store, self._envelope = store, envelope
        self._staging, self._queue = staging, queue
        self._used_bytes, self._most_bytes = 0, int(staging.arena.n_bytes * share)

    def _memory(self, n_bytes: int, *, alone: bool) -> ArenaSlot:
        """Staging memory; `alone` if nothing is under way whose end could bring any.

        Raises:
            NoRoom: There is none now.
        """
        if not alone and self._used_bytes + n_bytes > self._most_bytes:
            raise NoRoom
        memory = self._staging.take(n_bytes, spare=alone)
        if memory is None:
            raise NoRoom
        self._used_bytes += memory.n_bytes
        return memory

    def _free(self, memory: ArenaSlot) -> None:
        self._used_bytes -= memory.n_bytes
        self._staging.give_back(memory)

    def _land(self, flight: FrameOperations) -> None:
        """Nothing of its memory is needed any more."""
        flight.over = True
        self._free(flight.memory)


_MOVES = 3  # times that a frame may move while a reader reads it


class Loading(_Transfers):
    """Begins and finishes loads."""

    def begin(self, item: DiskItem, *, alone: bool) -> DiskRead | None:
        """Starts a load; None if it is answered.

        Args:
            item: What is wished for.
            alone: Nothing is under way whose end could bring memory.

        Raises:
            NoRoom: There is no memory for it now.
        """
        wish = item.wish
        if not isinstance(wish, Load):
            return None
        try:
            held = self._store.pin(wish.key, wish.layout, wish.fidelity)
        except BadFrame as error:
            return self._end(item, Outcome.MISS, error.reason)
        if held is None:
            return self._end(item, Outcome.MISS)
        flight = None
        try:
            flight = self._read(item, wish, held, alone=alone)
        except OSError as error:
            self._end(item, Outcome.FAILED, reason_of(error))
        finally:
            if flight is None:
                self._store.unpin([held.slot])
        return flight

    def _read(self, item: DiskItem, wish: Load, held: Held, *, alone: bool) -> DiskRead | None:
        count = wish.stripes or held.stripes - wish.first
        if not 0 <= wish.first < wish.first + count <= held.stripes:
            return self._end(item, Outcome.MISS, "stripes")
        target, n_bytes = wish.target, count * held.info.stripe_bytes
        if target.nbytes < n_bytes or not target.c_contiguous or target.readonly:
            return self._end(item, Outcome.FAILED, "target")
        fd = self._store.fd(held.slot)
        parts = extents(held, wish.first, count)
        memory = self._memory(sum(wider(size) for _, size in parts), alone=alone)
        flight = DiskRead(item, memory, held, wish.first, count)
        at = 0
        for offset, size in parts:
            if offset:
                flight.body_at = at
            flight.operations.append(
                _read(fd, held.slot.offset + offset, memory.address + at, size)
            )
            at += wider(size)
        return flight

    def finish(self, flights: list[DiskRead]) -> list[DiskRead]:
        """Answers loads that were read; those that must read on are returned."""
        self._queue.claim(flight.item for flight in flights)
        good: list[DiskRead] = []
        more: list[DiskRead] = []
        answers: list[ItemAnswer] = []
        for flight in flights:
            try:
                if flight.item.claimed:
                    whole = self._read_whole(flight)
                    (good if whole else more).append(flight)
            except BadFrame as error:
                answers += self._damaged(flight, error.reason)
            except OSError as error:  # of this one alone
                answers.append(ItemAnswer(flight.item, Outcome.FAILED, reason_of(error)))
        for flight, reason in zip(good, open_all(self._envelope, good), strict=True):
            if reason:
                answers += self._damaged(flight, reason)
            else:
                n_bytes = flight.count * flight.held.info.stripe_bytes
                info = flight.held.info
                answers.append(ItemAnswer(flight.item, Outcome.HIT, "", info, n_bytes))
        self.drop(flight for flight in flights if flight not in more)
        self._queue.answer(answers)
        return more

    def drop(self, flights: Iterable[DiskRead]) -> None:
        """Lets go of the memory and the slots of loads; again does nothing."""
        slots: list[Slot] = []
        for flight in flights:
            if not flight.over:
                slots.append(flight.held.slot)
                self._land(flight)
        self._store.unpin(slots)

    def _read_whole(self, flight: DiskRead) -> bool:
        """Whether all was read; else the stripes are, now that the header says where they lie.

        Raises:
            BadFrame: It is cut off, or its header is damaged.
            OSError: The disk failed, or there is no memory or no file to go on with.
        """
        held = flight.held
        if flight.error:
            raise _failed(flight.error)
        if flight.short:
            raise BadFrame("truncated", "the slot ends within the frame")
        if not held.lossless or flight.header is not None:
            return True
        header = read_header(self._envelope, flight)
        ((_, size),) = extents(held, flight.first, flight.count)
        if size == held.stored_bytes:
            flight.header = header
            flight.body_at = self._envelope.place(header, flight.first, flight.count)[0]
            return True
        fd = self._store.fd(held.slot)
        offset, size = self._envelope.place(header, flight.first, flight.count)
        start = offset // ALIGNMENT * ALIGNMENT
        n_bytes = offset - start + size
        memory = self._memory(aligned(n_bytes), alone=True)
        self._free(flight.memory)
        flight.memory, flight.header, flight.body_at = memory, header, offset - start
        flight.operations = [_read(fd, held.slot.offset + start, memory.address, n_bytes)]
        self._queue.let_go([flight.item])
        return False

    def _damaged(self, flight: DiskRead, reason: str) -> list[ItemAnswer]:
        """The answer to a load of a frame that is not right; none if it is tried again."""
        item, held = flight.item, flight.held
        locked = reason == "integrity" and not self._envelope.reads(held.integrity)
        if locked or self._store.condemn(item.key, held):
            return [ItemAnswer(item, Outcome.MISS, reason)]
        item.tries += 1
        if item.tries >= _MOVES:
            return [ItemAnswer(item, Outcome.MISS)]
        self._queue.put_back(item)
        return []

    def _end(self, item: DiskItem, outcome: Outcome, reason: str = "") -> DiskRead | None:
        self._queue.answer([ItemAnswer(item, outcome, reason)])
        return None


def _read(fd: int, offset: int, address: int, n_bytes: int) -> tuple[int, int, int, int, int]:
    """A read of whole granules."""
    return READ, fd, offset, address, aligned(n_bytes)


def _failed(result: int) -> OSError:
    """The error in a negative result."""
    return OSError(-result, os.strerror(-result))


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

    # numba's cache is for what the function closes over, as pickled, which for a compiled function
    # is another one in every process: so it closes over the module, and over what its code is.
    stamp = 1 + zlib.crc32(Path(str(digest.__file__)).read_bytes())
    digest_at, digested_from = np.uint64(DIGEST_AT.start), np.uint64(DIGESTED_FROM)
    digests_at, eight = np.uint64(FIXED_BYTES), np.uint64(8)

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
                low, high = digest.digest_copied(
                    row.body + skip, row.step, row.data + skip, streams
                )
                digest.put_word(at, digest.swapped(high))
                digest.put_word(at + eight, digest.swapped(low))
                at += np.uint64(DIGEST_BYTES)
            low, high = digest.xxh3_128(
                row.header + digested_from, row.header_bytes - digested_from
            )
            digest.put_word(row.header + digest_at, digest.swapped(high))
            digest.put_word(row.header + digest_at + eight, digest.swapped(low))
        if streams:
            digest.fence()

    options = {"nogil": True, "error_model": "numpy"}
    try:
        return njit(cache=True, **options)(seal_rows)
    except RuntimeError:  # no directory to write to: compiled anew in every process
        return njit(**options)(seal_rows)


# Stores of a disk tier: from a wish to a write, from what was written to an answer.


class Storing(_Transfers):
    """Begins and finishes stores."""

    _unsealed: tuple[tuple[DiskItem, Unsealed], ...] = ()  # claimed: their bodies are read

    def begin(self, item: DiskItem, *, alone: bool) -> DiskWrite | None:
        """Starts a store; None if it is answered.

        Args:
            item: What is wished for.
            alone: Nothing is under way whose end could bring memory.

        Raises:
            NoRoom: There is no memory for it now.
        """
        wish = item.wish
        self._queue.claim([item])
        if not isinstance(wish, Store) or not item.claimed:
            self._queue.end_stores([item])
            return None
        if self._store.owner and self._holds(wish.key):
            return self._end(item, Outcome.STORED)
        try:
            stripes = count_stripes(wish.key, wish.info, wish.body.nbytes)
        except BadFrame as error:
            return self._end(item, Outcome.FAILED, error.reason)
        if not wish.body.c_contiguous:
            return self._end(item, Outcome.FAILED, "invalid")
        try:
            flight = self._write(item, wish, stripes, alone=alone)
        except (BadFrame, Refused) as error:
            return self._end(item, Outcome.FAILED, error.reason)
        except OSError as error:
            return self._end(item, Outcome.FAILED, reason_of(error))
        if flight is None:
            return self._end(item, Outcome.STORED)
        if not self._envelope.plain:
            self._queue.let_go([item])
        return flight

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
            self._queue.let_go(item for item, _ in self._unsealed)
            self._unsealed = ()

    def _write(self, item: DiskItem, wish: Store, stripes: int, *, alone: bool) -> DiskWrite | None:
        head = header_bytes(stripes, lossless=not self._envelope.plain)
        most = max(self._envelope.most_bytes(wish.body.nbytes), head + wish.body.nbytes)
        memory = self._memory(slot_granules(head, most - head) * ALIGNMENT, alone=alone)
        flight = None
        try:
            flight = self._wrap(item, wish, memory, stripes)
        finally:
            if flight is None:
                self._free(memory)
        return flight

    def _wrap(
        self, item: DiskItem, wish: Store, memory: ArenaSlot, stripes: int
    ) -> DiskWrite | None:
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
            fd = self._store.fd(slot)
        except BaseException:
            self._store.release(wish.key)
            raise
        stored_bytes, n_bytes = head.frame_bytes, sizes[1]
        # nothing of what lay there before survives behind a shorter frame
        length = slot.n_bytes if stale else aligned(n_bytes)
        memory.view[n_bytes:length] = bytes(length - n_bytes)
        compressed = bool(head.sizes)
        held = Held(seq, slot, stripes, wish.info, stored_bytes, head.integrity, compressed)
        flight = DiskWrite(item, memory, WrittenFrame(wish.key, held))
        flight.operations = [(WRITE, fd, slot.offset, memory.address, length)]
        if self._envelope.plain:
            body = wish.body.cast("B")
            frame = Unsealed(wish.key, wish.info, body, memory, sizes[0], seq)
            self._unsealed += ((item, frame),)
        return flight

    def drop(self, flights: list[DiskWrite], reason: str) -> None:
        """Fails stores that could not be sealed, or finished."""
        self._unsealed = ()
        for flight in flights:
            if not flight.over:  # else it was finished before something went wrong
                self._land(flight)
                self._store.abandon([flight.written])
        self._answer([ItemAnswer(flight.item, Outcome.FAILED, reason) for flight in flights])

    def finish(self, flights: list[DiskWrite]) -> list[DiskWrite]:
        """Those frames that lie whole in their slots and are still wanted."""
        good, answers = [], []
        for flight in flights:
            self._land(flight)
            if not flight.error and not flight.short and flight.item.done is None:
                good.append(flight)
                continue
            self._store.abandon([flight.written])
            reason = reason_of(_failed(flight.error or -errno.ENOSPC))
            answers.append(ItemAnswer(flight.item, Outcome.FAILED, reason))
        self._answer(answers)
        return good

    def commit(self, flights: list[DiskWrite], error: OSError | None) -> None:
        """Makes frames count that the disk has, or none of them where it failed."""
        late = [flight for flight in flights if flight.item.done is not None]
        wanted = [flight for flight in flights if flight.item.done is None]
        self._store.abandon(flight.written for flight in late)
        try:
            if error is not None:
                self._store.abandon(flight.written for flight in wanted)
                raise error
            if wanted:
                self._store.commit([flight.written for flight in wanted])
        except OSError as failed:
            reason = reason_of(failed)
            self._answer([ItemAnswer(f.item, Outcome.FAILED, reason) for f in wanted])
            wanted = []
        self._queue.claim(flight.item for flight in wanted)
        self._store.delete(flight.item.key for flight in wanted if not flight.item.claimed)
        self._answer([ItemAnswer(f.item, Outcome.STORED, "", None, f.item.n_bytes) for f in wanted])
        self._queue.end_stores(flight.item for flight in late)

    def _answer(self, answers: list[ItemAnswer]) -> None:
        self._queue.answer(answers)
        self._queue.end_stores(answer.item for answer in answers)

    def _end(self, item: DiskItem, outcome: Outcome, reason: str = "") -> DiskWrite | None:
        self._answer([ItemAnswer(item, outcome, reason)])
        return None


def _copy(sealed: SealedFrame, view: memoryview) -> None:
    at = len(sealed.header)
    view[:at] = sealed.header
    for part in sealed.parts:
        size = memoryview(part).nbytes
        view[at : at + size] = part
        at += size
