"""Disk tier: frames in a local directory, which survive the process and are readable by others.

Bytes move by an engine (`tiers.io`) between the slab files and an arena; one scheduler makes its
batches. A load is verified while it is copied to its target, or where it lies if the disk reads it
there (`Load.direct`). A store that is still being written at its deadline is undone.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Literal, NamedTuple, cast

import numpy as np

from flowkv.compiled.compiling import SystemClock
from flowkv.core.clock import Clock
from flowkv.core.config import format_size
from flowkv.core.errors import ConfigError, FlowKVError, StoreError, stating
from flowkv.core.memory import address_of
from flowkv.core.reaper import REAPER, begin
from flowkv.tiers.base import BadFrame, Buffer, Entry, Load, Outcome, Store, TierAnswer, aligned
from flowkv.tiers.disk.home import ERASED, STORED, Held, Record, Slot, charge_bytes, owner_of
from flowkv.tiers.disk.store import DiskStore, Refused, agree, slot_granules
from flowkv.tiers.frame import (
    DIGEST_BYTES,
    FIXED_BYTES,
    NH_128,
    Envelope,
    Header,
    count_stripes,
    fixed_fields,
    header_bytes,
    lay_out,
    pack_header,
)
from flowkv.tiers.io import open_engine
from flowkv.tiers.io.engine import (
    ALIGNMENT,
    OPERATION,
    READ,
    SYNC,
    WRITE,
    Arena,
    ArenaSlot,
    FileIO,
    IOEngine,
    reason_of,
)
from flowkv.tiers.worker import Handle, Item, ItemAnswer, RequestQueue

# The work of one item between the queue and its answer: operations on the disk, and their memory.

KNOWN_BYTES = 16 << 20
"""Most bytes of remembered digests."""
NEAR_BYTES = 64 << 10
"""Stripes within this distance of their header are read together with it."""

Operation = tuple[int, int, int, int, int]  # op, fd, offset, address, length


class Operations:
    """Operations of the engine that belong together, such as the syncs of a group of stores.

    Args:
        group: Stores that wait for them, or loads that they serve together.
        items: Items that they answer.

    Attributes:
        operations: Operations to submit next.
        tags: Tags of the submitted operations.
        left: Number of submitted operations that did not complete yet.
        error: First negative result, or 0.
        short: Whether an operation moved fewer bytes than it must.
        late: Whether an item was answered without its result.
    """

    def __init__(self, group: Sequence[Flight] = (), items: Sequence[Item] = ()) -> None:
        self.left = self.error = 0
        self.short = self.late = False
        self.operations: list[Operation] = []
        self.tags: list[int] = []
        self.group, self.items = group, items

    def complete_one(self, result: int, must: int) -> bool:
        """Record a completion; return whether it was the last one."""
        self.left -= 1
        if result < 0:
            self.error = self.error or result
        elif result < must:
            self.short = True
        return self.left == 0


class Flight(Operations):
    """Operations of one item: one or two reads of a load, one write of a store.

    Args:
        item: The item.
        held: Index entry of the frame, or the future one of a store.
        body: The caller's memory that stripes are written from, or read into; it stays where it is
            until this is over. None for staging memory.
        first: First requested stripe, and `count` their number.
        known: Digests of the frame's stripes, if its header is not read; else None.

    Attributes:
        memory: Staging slot.
        n_bytes: Bytes of the requested stripes.
        over: Whether the memory was given back.
        header: The header, if it was read before the stripes.
        body_at: Offset of the stored stripes in `memory`.
        unread: Whether the caller verifies the stripes.
        check: Row of `digest.CHECK` for a plain frame, and `fields`, its expected fixed fields.
    """

    memory: ArenaSlot

    def __init__(
        self, item: Item, held: Held, body: memoryview | None, first: int = 0, count: int = 0,
        known: Digests | None = None,
    ) -> None:  # fmt: skip
        super().__init__(items=(item,))
        self.item, self.held, self.over, self.known = item, held, False, known
        self.first, self.count, self.n_bytes = first, count, count * held.info.stripe_bytes
        self.header: Header | None = None
        unread = isinstance(item.wish, Load) and item.wish.unread
        self.body, self.unread = body, unread and body is not None
        self.body_at = held.header_bytes + first * held.info.stripe_bytes

    @property
    def address(self) -> int:
        """Return the address that the stripes are read to."""
        return self.memory.address + self.body_at if self.body is None else address_of(self.body)

    def expect(self) -> None:
        """Prepare the check of a plain frame while the disk reads it."""
        held, known, target = self.held, self.known, self.item.memory
        if target is None:
            return  # answered meanwhile
        head, self.fields = (known.address if known else 0, 0), bytes(FIXED_BYTES)
        if known is None:
            head = self.memory.address, held.header_bytes
            blank = bytes(DIGEST_BYTES * held.stripes)
            self.fields = fixed_fields(Header(self.item.key, held.info, blank, held.seq))
        there = 0 if self.unread else self.address, self.n_bytes, address_of(target)
        span = held.info.stripe_bytes, held.stripes, self.first, self.count
        self.check = *head, *there, *span, known is not None

    @property
    def hit(self) -> ItemAnswer:
        """Return the answer to a load with sound stripes, or with digests for unread ones."""
        values = self.known.values if self.known else self.memory.view[FIXED_BYTES:]
        its = values[DIGEST_BYTES * self.first :][: DIGEST_BYTES * self.count * self.unread]
        return ItemAnswer(self.item, Outcome.HIT, "", self.held.info, self.n_bytes, bytes(its))

    @property
    def written(self) -> Record:
        """Return the key and index entry of the frame, for the store."""
        return Record(STORED, self.item.key, self.held)


def plain(held: Held) -> bool:
    """Return whether stripes are uncompressed, with digests that compiled code verifies."""
    return held.integrity == NH_128 and not held.lossless


def extents(held: Held, first: int, count: int, *, apart: bool) -> list[tuple[int, int]]:
    """Return the (offset, bytes) parts of a slot to read for some stripes: whole pages.

    The parts hold header and stripes, `apart` or as one if they are near; of a compressed frame
    only the header, unless that is near to all: the header has the offsets of the stripes.
    """
    head, step = held.header_bytes, held.info.stripe_bytes
    if held.lossless:
        whole = count == held.stripes or held.stored_bytes <= head + NEAR_BYTES
        return [(0, aligned(held.stored_bytes if whole else head))]
    start, n_bytes = head + first * step, count * step
    if start - head <= NEAR_BYTES and not apart:
        return [(0, aligned(start + n_bytes))]
    return [(0, head), (start, aligned(n_bytes))]


def flight_of(item: Item, target: memoryview, held: Held, known: Digests | None = None) -> Flight:
    """Return the flight of a load, without memory: straight to its target where that is possible.

    Raises:
        BadFrame: "stripes": the requested ones are not all in the frame.
        Refused: "target": they do not fit there.
    """
    wish = cast(Load, item.wish)
    first, count = wish.first, wish.stripes or held.stripes - wish.first
    if not 0 <= first < first + count <= held.stripes:
        raise BadFrame("stripes", f"{count} stripes from {first} on of {held.stripes}")
    n_bytes = count * held.info.stripe_bytes
    if target.nbytes < n_bytes or not target.c_contiguous or target.readonly:
        raise Refused("target")
    direct = wish.direct and plain(held) and not (address_of(target) | n_bytes) % ALIGNMENT
    return Flight(item, held, target if direct else None, first, count, known)


class Digests(NamedTuple):
    """Digests of all stripes of a frame with a checked header.

    Attributes:
        seq: Generation of the frame.
        values: 16 bytes each.
        address: Address of `values`.
    """

    seq: int
    values: bytearray
    address: int


class KnownDigests:
    """Digests of plain frames with headers that need not be read again. Thread-safe.

    They serve frames with stripes that are read without their header: alone, layer by layer, or
    straight into their target.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._bytes = 0
        self._found: dict[bytes, Digests] = {}
        self.find = self._found.get

    def __contains__(self, key: object) -> bool:
        """Return whether the digests of a frame, or of an earlier one of its key, are known."""
        return key in self._found

    def add(self, key: bytes, seq: int, digests: Buffer) -> None:
        """Remember the digests of a frame that was read with its header, or is being stored."""
        values = bytearray(digests)
        with self._lock:
            self.invalidate(key)
            self._found[key] = Digests(seq, values, address_of(memoryview(values)))
            self._bytes += len(values)
            while self._bytes > KNOWN_BYTES:
                self.invalidate(next(iter(self._found)))

    def invalidate(self, key: bytes) -> None:
        """Forget the digests of a frame, so that its header is read again."""
        with self._lock:
            found = self._found.pop(key, None)
            self._bytes -= len(found.values) if found is not None else 0


class Stripes(Operations):
    """Operations of loads of stripes with known digests: one read each, without the header.

    If anything fails, the loads begin anew, each by itself and with its header.

    Attributes:
        memory: Staging memory of all.
    """

    def __init__(self, parts: Sequence[Flight], memory: ArenaSlot) -> None:
        super().__init__(parts, [part.item for part in parts])
        self.memory = memory


# Checks of frames that were read: verified and copied to their targets, a batch at a time.
#
# Plain frames go through one compiled call (`tiers.digest`), which keeps its speed while the
# interpreter is busy elsewhere; others are opened by the envelope.


def open_all(envelope: Envelope, flights: Sequence[Flight]) -> list[str]:
    """Verify frames and copy them to their targets; return "" or the reason of each `BadFrame`."""
    some = [flight for flight in flights if plain(flight.held) and envelope.integrity == "xxh3"]
    found = dict(zip(some, _open_compiled(some), strict=True)) if some else {}
    return [found[one] if one in found else _open_one(envelope, one) for one in flights]


def _open_one(envelope: Envelope, flight: Flight) -> str:
    """Verify and copy one frame of any kind; return "" or the reason of its `BadFrame`."""
    target = flight.item.memory
    assert target is not None  # the item is claimed
    try:
        header = flight.header or _read_header(envelope, flight)
        stored = flight.memory.view[flight.body_at :]
        envelope.open(header, stored, target, flight.first, flight.count)
    except BadFrame as error:
        return error.reason
    return ""


def _read_header(envelope: Envelope, flight: Flight) -> Header:
    """Return the header that was read, once it is checked against the index entry.

    Raises:
        BadFrame: It is another one, or damaged.
    """
    held = flight.held
    data = flight.memory.view[: held.header_bytes]
    return agree(envelope.head(data, flight.item.key, generation=held.seq), held)


def _open_compiled(flights: Sequence[Flight]) -> list[str]:
    from flowkv.tiers.digest import REASONS, check_frames, checks_of

    checks = checks_of([flight.check for flight in flights])
    # Writable, as all arrays of checks: for another type the function would be compiled once more.
    fields = np.frombuffer(bytearray().join(flight.fields for flight in flights), np.uint8)
    reasons = check_frames(checks, fields.reshape(-1, 256))
    return [REASONS[reason] for reason in reasons.tolist()]


# Sealing of many plain frames: copied into staging memory and digested in the same pass.
#
# One compiled call holds no lock of the interpreter while it reads gigabytes a second. The digests
# are those of the copies in staging memory, even if another thread writes to the body.


def seal_all(flights: Sequence[Flight]) -> None:
    """Write headers and claimed bodies to the memory of stores, which were checked before."""
    from flowkv.tiers.digest import SEAL, seal_frames

    rows = list[tuple[int, ...]]()
    for flight in flights:
        held, memory, body = flight.held, flight.memory, flight.item.memory
        assert body is not None  # the item is claimed
        start, blank = held.header_bytes, bytes(DIGEST_BYTES * held.stripes)
        memory.view[:start] = lay_out(Header(flight.item.key, held.info, blank, held.seq))
        span = address_of(body), memory.address + start, held.info.stripe_bytes, held.stripes
        rows.append((memory.address, start, *span))
    seal_frames(np.array(rows, SEAL))


# The scheduler of a disk tier: it serves all requests with few batches for the engine.
#
# One step: operations that the engine completed are verified, copied and answered; then waiting
# loads and stores get memory and go to the engine, loads first, each kind with room that the other
# cannot take. While stores wait, the engine gets no more loads than it works off soon, for it takes
# operations in their order. A thread steps for ever, or `poll` steps in the caller's thread, which
# makes a tier without threads: the same calls in the same order, on any clock.
#
# Memory of an overdue operation stays taken until the engine reports it. When that is more than a
# quarter of the arena, the disk is left alone ("breaker") until enough has come back.

_LOADS, _STORES = False, True
TOGETHER_BYTES = 4 << 20
"""Most bytes of stripes with known digests that are read and answered together."""
SHARED_BYTES = 64 << 20
"""Bytes of loads with the engine from which on others wait, if stores do."""
AT_ONCE = 16
"""Items begun before the engine gets them; others wait no longer than it takes to begin these."""
_SHARE = {_LOADS: 0.75, _STORES: 0.5}  # of the arena, so that neither kind takes all
_IDLE_S = 0.05
_PATIENT_STEPS = 100
# longest wait for the engine: at first, and after a while without completions
_PATIENCE_S = 0.001, 0.02
_MOVES = 3  # most tries of a frame that moves while a reader reads it


class NoRoom(Exception):
    """Raised when there is no staging memory for an item now."""


class DiskScheduler:
    """Scheduler that moves the frames of one store.

    Args:
        store: Index and slots of the frames.
        envelope: Seals and opens frames.
        engine: Moves the bytes, for this scheduler alone.
        arena: Staging memory.
        queue: Requests.
    """

    def __init__(
        self,
        store: DiskStore,
        envelope: Envelope,
        engine: IOEngine,
        arena: Arena,
        queue: RequestQueue,
    ) -> None:
        self._store, self._envelope, self._engine = store, envelope, engine
        self._arena, self._queue = arena, queue
        self._used_bytes = {_LOADS: 0, _STORES: 0}  # bytes of staging memory
        self._flights: dict[int, tuple[Operations, int]] = {}  # by tag, with the bytes to come
        self._refused: list[tuple[int, int]] = []  # completions of what the engine did not take
        self._unsealed: list[Flight] = []  # of claimed items, with bodies being read
        self._written: list[Flight] = []  # frames that wait for the next group of syncs
        self._late_bytes, self._syncing = 0, False  # bytes of overdue operations
        self._tag, self._pid = 0, os.getpid()
        self._stage = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._hungry = 0  # steps that a large store has waited for memory taken by loads
        self.known = KnownDigests()

    # --- the thread ----------------------------------------------------------------------------

    def start(self, name: str) -> None:
        """Start a thread that steps, unless there is one."""
        if self._thread is not None:
            return  # checked without the lock, which a step holds while it waits for the engine
        with self._stage:
            if self._thread is None:
                self._thread = begin(self._run, name=name)
                if self._thread is None:
                    self._queue.fail_waiting("memory")

    def stop(self, timeout_s: float) -> bool:
        """Work off all queued items; return whether everything ended in time."""
        self._queue.shutdown()
        if self._thread is not None:
            self._thread.join(timeout_s)
            self._stopping = True
            return not self._thread.is_alive()
        while self.step(0.0):
            pass
        return not self._flights

    def close(self, own: Arena | None) -> None:
        """End the parts of a tier that is closed, or was collected; a second call does nothing.

        Args:
            own: Staging memory of the tier alone.
        """
        if self._pid != os.getpid() or self._queue.closing:
            return
        ended = self.stop(CLOSE_S)
        self._queue.fail_rest()
        if self._engine.close() and ended:
            self._store.close()
            if own is not None:
                own.close()
        else:
            _stuck.append(self)

    def step(self, wait_s: float) -> bool:
        """Do one step; wait for the engine if there is nothing else to do, for `wait_s` at most.

        Returns:
            Whether anything was done.
        """
        with self._stage:
            self._give_up(self._queue.given_up())
            begun = self._begin()
            done = self._collect(0.0 if begun else wait_s)
        return begun or done or (not self._flights and self._store.tidy())

    @property
    def busy(self) -> bool:
        """Return whether the engine has operations of this scheduler."""
        return bool(self._flights)

    def _run(self) -> None:
        patience_s = _PATIENCE_S[0]
        while not self._stopping:
            try:
                moved = self.step(patience_s)
            except Exception as error:  # a scheduler never leaves items unanswered
                self._fail(_reason(error))
                continue
            patience_s = _PATIENCE_S[0] if moved else min(2 * patience_s, _PATIENCE_S[1])
            if not moved and not self._flights:
                waiting = self._queue.waiting()
                if self._queue.closing and not waiting:
                    return
                self._queue.wait(_IDLE_S if waiting else 60.0)

    # --- beginning of items --------------------------------------------------------------------

    def _begin(self) -> bool:
        if self._late_bytes > self._arena.n_bytes // 4:
            self._queue.fail_waiting("breaker")
        loads, tried = list[Operations](), 0
        if self._hungry < _PATIENT_STEPS:
            tried, room = self._take_known(loads)
            tried += self._take(_LOADS, loads) if room else 0
        stores: list[Flight] = []
        tried += self._take(_STORES, stores, alone=not loads)
        if stores:
            self._hungry = 0
        self._submit(loads)
        try:
            if self._unsealed:
                seal_all(self._unsealed)
        except Exception as error:
            self._drop_stores(stores, _reason(error))
            stores = []
        for flight in self._unsealed:
            self._queue.unclaim(flight.item)
        self._unsealed = []
        self._submit(stores)
        return tried > 0

    def _take(
        self, stores: bool, begun: list[Flight] | list[Operations], *, alone: bool = True
    ) -> int:
        """Begin waiting items of one kind; return how many were begun or answered."""
        begin, n_bytes = self._begin_store if stores else self._begin_load, 0
        most = 4 * AT_ONCE if self._flights else AT_ONCE  # an idle disk starts soon
        for tried in range(most):
            # Loads wait while stores are sealed.
            full = stores and tried >= AT_ONCE and n_bytes >= 2 * TOGETHER_BYTES
            item = None if full else self._queue.begin(stores=stores)
            if item is None:
                self._hungry *= not stores
                return tried
            n_bytes += item.n_bytes
            try:
                if stores and not tried:
                    self._store.leads()  # once a batch: each look takes 15 us and Python's lock
                flight = begin(item, alone=alone and not self._flights and not begun)
            except NoRoom:
                self._queue.put_back(item)
                self._hungry += stores
                return tried
            except Exception as error:
                self._answer([_failure(item, error)])
                continue
            if flight is not None:
                begun.append(flight)
            else:
                self._answer([ItemAnswer(item, Outcome.STORED if stores else Outcome.MISS)])
        return most

    def _take_known(self, begun: list[Operations]) -> tuple[int, bool]:
        """Begin the first loads that need no header; return how many, and whether there is room."""
        tried, room = 0, 1 << 62
        if self._queue.stores_wait:
            room = SHARED_BYTES
            for one, n_bytes in self._flights.values():
                room -= 0 if one.late or any(item.stores for item in one.items) else n_bytes
        while room > 0 and (items := self._queue.begin_loads(self.known, TOGETHER_BYTES)):
            alone = not self._flights and not begun
            try:
                stripes = self._begin_known(items, alone=alone)
            except NoRoom:
                self._put_back(items)
                return tried, False
            except Exception:  # an error of one of them, which will show when each begins by itself
                self._put_back(items, forget=True)
                continue
            tried += len(stripes.group)
            begun += [stripes] if stripes.group else []
            room -= sum(part.n_bytes for part in stripes.group)
        return tried, room > 0

    def _put_back(self, items: Sequence[Item], *, forget: bool = False) -> None:
        """Return loads to the queue, in their order; `forget` makes each begin by itself."""
        for item in reversed(items):
            if forget:
                self.known.invalidate(item.key)
            self._queue.put_back(item)

    def _begin_known(self, items: Sequence[Item], *, alone: bool) -> Stripes:
        """Start loads with known digests; put those back that do not match the index any more.

        Raises:
            NoRoom: There is no memory for them now.
            OSError: A file cannot be opened, or there is no memory at all.
        """
        pinned = self._store.pin_all([item.wish for item in items if isinstance(item.wish, Load)])
        parts, others, n_bytes = list[Flight](), list[Item](), 0
        memory: ArenaSlot | None = None
        slots = [held.slot for held in pinned if held is not None]
        try:
            for item, held in zip(items, pinned, strict=True):
                known, target, part = self.known.find(item.key), item.memory, None
                if held and known and known.seq == held.seq and target is not None:
                    with suppress(BadFrame, Refused):
                        part = flight_of(item, target, held, known)
                if part is None:
                    others.append(item)
                    continue
                part.body_at = n_bytes
                parts.append(part)
                n_bytes += aligned(part.n_bytes) if part.body is None else 0
            memory = self._memory(max(n_bytes, ALIGNMENT), _LOADS, alone=alone)
            stripes = Stripes(parts, memory)
            for part in parts:
                part.memory, held = memory, part.held
                start = held.header_bytes + part.first * held.info.stripe_bytes
                where = self._store.fd(held.slot), held.slot.offset + start, part.address
                stripes.operations.append((READ, *where, aligned(part.n_bytes)))
        except BaseException:
            self._store.unpin(slots)
            if memory is not None:
                self._free(memory, _LOADS)
            raise
        if others:
            for part in parts:
                slots.remove(part.held.slot)
            self._store.unpin(slots)
            self._put_back(others, forget=True)
        if not parts:
            self._free(memory, _LOADS)
        return stripes

    def _begin_load(self, item: Item, *, alone: bool) -> Flight | None:
        """Start a load; None if there is no such frame.

        Args:
            item: The load.
            alone: Whether no operation is under way that would free memory at its end.

        Raises:
            NoRoom: There is no memory for it now.
            BadFrame: The frame is not the requested one.
            Refused: "target": the requested stripes do not fit there.
            OSError: The file cannot be opened, or there is no memory at all.
        """
        wish, target = item.wish, item.memory
        if target is None or not isinstance(wish, Load):
            return None  # answered meanwhile
        held = self._store.pin(wish.key, wish.layout, wish.fidelity)
        if held is None:
            return None
        try:
            flight, fd, at = flight_of(item, target, held), self._store.fd(held.slot), 0
            apart = flight.body is not None
            parts = extents(held, flight.first, flight.count, apart=apart)
            n_bytes = parts[0][1] if apart else sum([size for _, size in parts])
            flight.memory = self._memory(n_bytes, _LOADS, alone=alone)
        except BaseException:
            self._store.unpin([held.slot])
            raise
        for offset, size in parts:
            flight.body_at = at if offset else flight.body_at
            to = flight.address if offset else flight.memory.address
            flight.operations.append((READ, fd, held.slot.offset + offset, to, size))
            at += size
        return flight

    def _begin_store(self, item: Item, *, alone: bool) -> Flight | None:
        """Start a store; None if the frame is there already.

        Args:
            item: The store.
            alone: Whether no operation is under way that would free memory at its end.

        Raises:
            NoRoom: There is no memory for it now.
            BadFrame: The frame is described wrongly, or cannot be sealed.
            Refused: There is no room for it, or this is a reader.
            OSError: The file cannot be opened or extended, or there is no memory at all.
        """
        wish, body = item.wish, self._queue.claim(item)
        if body is None or not isinstance(wish, Store):
            return None  # answered meanwhile
        if self._store.owner and self._holds(wish.key):
            return None
        stripes = count_stripes(wish.key, wish.info, body.nbytes, wish.digests)
        plain = self._envelope.plain
        if not body.c_contiguous:
            raise Refused("invalid")
        head = header_bytes(stripes, lossless=not plain)
        most = max(self._envelope.most_bytes(body.nbytes), head + body.nbytes)
        n_bytes = slot_granules(head, most - head) * ALIGNMENT
        direct = plain and bool(wish.digests) and not (address_of(body) | body.nbytes) % ALIGNMENT
        n_bytes -= body.nbytes if direct else 0  # it is written from where it lies
        memory, flight = self._memory(n_bytes, _STORES, alone=alone), None
        try:
            flight = self._wrap(item, wish, body, memory, stripes, direct=direct)
        finally:
            if flight is None:
                self._free(memory, _STORES)
        if wish.digests or not plain:
            self._queue.unclaim(item)
        return flight

    def _holds(self, key: bytes) -> bool:
        """Return whether a frame is there; delete one that this integrity mode cannot read."""
        held, envelope = self._store.find(key), self._envelope
        if held is None or envelope.reads(held.integrity) or not envelope.reads(envelope.kind):
            return held is not None
        self._store.delete([key])
        return False

    def _wrap(self, item: Item, wish: Store, body: memoryview, memory: ArenaSlot, stripes: int, *,
              direct: bool) -> Flight | None:  # fmt: skip
        """Reserve a slot for a frame, and seal it into memory; None if it is there already.

        Its body does not go there if it is to be written `direct`.
        """
        key, info, _, known = wish
        seq = self._store.reserve(key)
        if seq is None:
            return None
        try:
            if self._envelope.plain and (direct or not known):
                head = Header(key, info, bytes(known or DIGEST_BYTES * stripes), seq)
                start, n_bytes = head.header_bytes, head.frame_bytes
                if direct:
                    memory.view[:start] = pack_header(head)
                    self.known.add(key, seq, head.digests)  # with this number only
            else:
                sealed = self._envelope.seal(key, info, body, generation=seq, known=known)
                head, start = sealed.head, len(sealed.header)
                n_bytes = sealed.write(memory.view)
            slot, stale = self._store.new_slot(start, n_bytes)
        except BaseException:
            self._store.unreserve(key)
            raise
        how = head.integrity, bool(head.sizes)
        held = Held(seq, slot, stripes, info, head.frame_bytes, *how)
        try:
            written = body if direct else None
            flight = self._begun(item, memory, held, (start, n_bytes), written, stale=stale)
            if self._envelope.plain and not known:  # last: every frame in this list gets sealed
                self._unsealed.append(flight)
            return flight
        except BaseException:
            self._store.abandon([Record(STORED, key, held)])
            raise

    def _begun(self, item: Item, memory: ArenaSlot, held: Held, sizes: tuple[int, int],
               body: memoryview | None, *, stale: bool) -> Flight:  # fmt: skip
        """Return the writes of a frame with a slot: from memory, or a `body` from where it lies.

        `sizes` are those of header and frame.
        """
        (start, n_bytes), slot, fd = sizes, held.slot, self._store.fd(held.slot)
        # No bytes of an earlier frame survive behind a shorter one.
        length = slot.n_bytes if stale else aligned(n_bytes)
        zeros_at, rest = n_bytes if body is None else start, length - n_bytes
        memory.view[zeros_at:][:rest] = bytes(rest)
        flight, pieces = Flight(item, held, body), [(0, memory.address, length)]
        flight.memory = memory
        if body is not None:
            zeros = n_bytes, memory.address + start, rest
            pieces = [(0, memory.address, start), (start, address_of(body), body.nbytes), zeros]
        flight.operations = [
            (WRITE, fd, slot.offset + to, at, size) for to, at, size in pieces if size
        ]
        return flight

    def _submit(self, flights: Sequence[Operations]) -> None:
        rows = []
        for flight in flights:
            for item in flight.items:
                item.flight = flight
            flight.left, flight.tags = len(flight.operations), []
            for operation in flight.operations:
                self._tag += 1
                flight.tags.append(self._tag)
                rows.append((*operation, self._tag))
                self._flights[self._tag] = flight, operation[-1]
        try:
            if rows:
                self._engine.submit(np.array(rows, OPERATION))
        except Exception as error:  # the engine has taken none of them
            code = getattr(error, "errno", None) or errno.ENOMEM
            self._refused += [(row[-1], -code) for row in rows]
        for flight in flights:
            for one in [flight] if isinstance(flight, Flight) else flight.group:
                if plain(one.held) and not one.item.stores:
                    one.expect()

    def _memory(self, n_bytes: int, stores: bool, *, alone: bool) -> ArenaSlot:
        """Return staging memory; `alone` if no operation is under way that would free any.

        Raises:
            NoRoom: There is none now.
        """
        used_bytes = self._used_bytes[stores] + n_bytes
        if not alone and used_bytes > self._arena.n_bytes * _SHARE[stores]:
            raise NoRoom
        memory = self._arena.acquire(n_bytes)
        if memory is None and alone:  # the odd frame that does not fit into the arena
            memory = Arena(n_bytes).acquire(n_bytes)
        if memory is None:
            raise NoRoom
        self._used_bytes[stores] += memory.n_bytes
        return memory

    def _free(self, memory: ArenaSlot, stores: bool) -> None:
        self._used_bytes[stores] -= memory.n_bytes
        memory.arena.give_back(memory)

    # --- completions of the engine -------------------------------------------------------------

    def _collect(self, wait_s: float) -> bool:
        if not self._flights:
            return False
        refused, self._refused = self._refused, []
        completions = refused + self._engine.wait(0.0 if refused else wait_s).tolist()
        if not completions:
            return False
        read, wrote, stripes = list[Flight](), list[Flight](), list[Stripes]()
        for tag, result in completions:
            flight, must = self._flights.pop(tag)
            self._late_bytes -= must * flight.late
            if not flight.complete_one(result, must):
                continue
            for item in flight.items:
                item.flight = None
            if isinstance(flight, Stripes):
                stripes.append(flight)
            elif isinstance(flight, Flight):
                (wrote if flight.item.stores else read).append(flight)
            else:
                self._syncing = False
                if flight.error:  # it is that of all writes so far: the next sync may succeed
                    flight.group, self._written = [*flight.group, *self._written], []
                    for one in [*wrote, *(one for one, _ in self._flights.values())]:
                        if any(item.stores for item in one.items):
                            one.error = one.error or flight.error
                self._finish_stores(flight.group, flight.error)
                self._commit([])
        self._finish_stripes(stripes)
        try:
            if read:
                self._submit(self._finish_loads(read))
            if wrote:
                self._commit(self._landed(wrote))
        except Exception as error:
            self._drop_loads(read)
            self._fail(_reason(error), [flight.item for flight in (*read, *wrote)])
            self._drop_stores(wrote, _reason(error))
        return True

    def _finish_loads(self, flights: list[Flight]) -> list[Flight]:
        """Answer the loads that were read; return those that must read on."""
        good, more, answers = list[Flight](), list[Flight](), list[ItemAnswer]()
        for flight in flights:
            try:
                if self._queue.claim(flight.item) is not None:
                    (good if self._read_whole(flight) else more).append(flight)
            except BadFrame as error:
                answers += self._damaged(flight, error.reason)
            except OSError as error:  # an error of this load alone
                answers.append(_failure(flight.item, error))
        for flight, reason in zip(good, open_all(self._envelope, good), strict=True):
            if reason:
                answers += self._damaged(flight, reason)
            else:
                if len(flight.operations) > 1 and plain(flight.held):
                    its = flight.memory.view[FIXED_BYTES:][: DIGEST_BYTES * flight.held.stripes]
                    self.known.add(flight.item.key, flight.held.seq, its)
                answers.append(flight.hit)
        self._queue.answer_all(answers)  # first, because callers wait for the answers
        self._drop_loads(flight for flight in flights if flight not in more)
        return more

    def _finish_stripes(self, groups: Sequence[Stripes]) -> None:
        """Answer the loads that were read and verified; all others begin anew, each by itself.

        One compiled call checks all: behind each, a busy interpreter keeps its lock for 5 ms.
        """
        parts = list[Flight]()
        for one in groups:
            both = zip(one.group, self._queue.claim_all(one.items), strict=True)
            if not (one.error or one.short):
                parts += [part for part, target in both if target is not None]
        with suppress(Exception):  # any error shows again when each load begins by itself
            ends = zip(parts, open_all(self._envelope, parts), strict=True)
            self._queue.answer_all([part.hit for part, reason in ends if not reason])
        for one in reversed(groups):
            self._put_back([item for item in one.items if item.done is None], forget=True)
            self._free(one.memory, _LOADS)
            self._store.unpin([part.held.slot for part in one.group])

    def _drop_loads(self, flights: Iterable[Flight]) -> None:
        """Free the memory and the slots of loads; a second call does nothing."""
        slots: list[Slot] = []
        for flight in flights:
            if not flight.over:
                slots.append(flight.held.slot)
                self._land(flight)
        self._store.unpin(slots)

    def _land(self, flight: Flight) -> None:
        """Free the staging memory of an item."""
        flight.over, flight.body = True, None
        self._free(flight.memory, flight.item.stores)

    def _read_whole(self, flight: Flight) -> bool:
        """Return whether all was read; else prepare to read the stripes where the header says.

        Raises:
            BadFrame: It is cut off, or its header is damaged.
            OSError: The disk failed, or there is no memory or no file to continue with.
        """
        held = flight.held
        if flight.error:
            raise _error_of(flight.error)
        if flight.short:
            raise BadFrame("truncated", "the slot ends within the frame")
        if not held.lossless or flight.header is not None:
            return True
        header = _read_header(self._envelope, flight)
        offset, n_bytes = self._envelope.place(header, flight.first, flight.count)
        if flight.operations[0][-1] >= held.stored_bytes:
            flight.header, flight.body_at = header, offset
            return True
        fd, start = self._store.fd(held.slot), offset // ALIGNMENT * ALIGNMENT
        length = aligned(offset - start + n_bytes)
        memory = self._memory(length, _LOADS, alone=True)
        self._free(flight.memory, _LOADS)
        flight.memory, flight.header, flight.body_at = memory, header, offset - start
        flight.operations = [(READ, fd, held.slot.offset + start, memory.address, length)]
        self._queue.unclaim(flight.item)
        return False

    def _damaged(self, flight: Flight, reason: str) -> list[ItemAnswer]:
        """Return the answer to a load of a damaged frame; an empty list if it is tried again."""
        item, held = flight.item, flight.held
        locked = reason == "integrity" and not self._envelope.reads(held.integrity)
        if locked or self._store.condemn(item.key, held):
            return [ItemAnswer(item, Outcome.MISS, reason)]
        item.tries += 1
        if item.tries >= _MOVES:
            return [ItemAnswer(item, Outcome.MISS)]
        self._queue.put_back(item)
        return []

    def _landed(self, flights: list[Flight]) -> list[Flight]:
        """Return the stores that were written whole and are still wanted; fail the others."""
        good = []
        for flight in flights:
            self._land(flight)
            if flight.error or flight.short or flight.item.done is not None:
                self._store.abandon([flight.written])
                error = _error_of(flight.error or -errno.ENOSPC)
                self._answer([_failure(flight.item, error)])
            else:
                good.append(flight)
        return good

    def _commit(self, wrote: list[Flight]) -> None:
        """Commit written frames: at once, or after the device has them."""
        self._written += wrote
        if not self._written or self._syncing:
            return  # one group waits for the device while the next one gathers
        group, self._written = self._written, []
        try:
            files = self._store.to_sync(flight.written for flight in group)
        except Exception as error:
            code = errno.ENOMEM if isinstance(error, MemoryError) else errno.EIO
            self._finish_stores(group, -(getattr(error, "errno", None) or code))
            return
        if not files:
            self._finish_stores(group, 0)
            return
        self._syncing, sync = True, Operations(group)
        sync.operations = [(SYNC, fd, 0, 0, 0) for fd in files]
        self._submit([sync])

    def _finish_stores(self, group: Sequence[Flight], code: int) -> None:
        """Commit frames that are on the disk, or none of them if it failed."""
        wanted = [flight for flight in group if flight.item.done is None]
        unwanted = [flight for flight in group if flight.item.done is not None]
        self._store.abandon(flight.written for flight in (group if code else unwanted))
        try:
            if code:
                raise _error_of(code)
            if wanted:
                # What is answered early from here on is not found: a failed store stores nothing.
                claim = partial(self._queue.claim_all, [flight.item for flight in wanted])
                self._store.commit([flight.written for flight in wanted], claim)
        except Exception as error:
            self._answer([_failure(flight.item, error) for flight in group])
            return
        self._answer([ItemAnswer(f.item, Outcome.STORED, "", None, f.item.n_bytes) for f in group])

    def _drop_stores(self, flights: list[Flight], reason: str) -> None:
        """Fail stores that could not be sealed or finished."""
        for flight in flights:
            if not flight.over:  # else it was finished before the error
                self._land(flight)
                self._store.abandon([flight.written])
        self._answer([ItemAnswer(flight.item, Outcome.FAILED, reason) for flight in flights])

    # --- ends ----------------------------------------------------------------------------------

    def _answer(self, answers: list[ItemAnswer]) -> None:
        """Answer items, and let the next stores of their keys begin."""
        self._queue.answer_all(answers)
        for answer in answers:
            if answer.item.stores:
                self._queue.end_store(answer.item)

    def _give_up(self, items: list[Item]) -> None:
        """Count the bytes of items answered early, and cancel their operations in the engine."""
        tags: list[int] = []
        for item in items:
            if (flight := item.flight) is not None:
                if not flight.late:
                    flight.late = True
                    left = map(self._flights.get, flight.tags)
                    self._late_bytes += sum([one[1] for one in left if one is not None])
                if all(one.done is not None for one in flight.items):
                    tags += flight.tags
        if tags:
            self._engine.cancel(np.array(tags, np.uint64))

    def _fail(self, reason: str, items: list[Item] | None = None) -> None:
        """Fail all pending items after an internal error, so that no caller hangs."""
        if items is None:
            items = [item for flight, _ in self._flights.values() for item in flight.items]
            self._queue.fail_waiting(reason)
        self._queue.answer_all(ItemAnswer(item, Outcome.FAILED, reason) for item in items)


def _failure(item: Item, error: Exception) -> ItemAnswer:
    """Return the answer to an item that raised an error."""
    if isinstance(error, BadFrame) and not item.stores:
        return ItemAnswer(item, Outcome.MISS, error.reason)
    return ItemAnswer(item, Outcome.FAILED, _reason(error))


def _reason(error: Exception) -> str:
    if isinstance(error, BadFrame | Refused):
        return error.reason
    if isinstance(error, OSError):
        return reason_of(error)
    return "memory" if isinstance(error, MemoryError) else f"{type(error).__name__}: {error}"


def _error_of(result: int) -> OSError:
    """Return the error of a negative result."""
    return OSError(-result, os.strerror(-result))


STAGING_BYTES = 64 << 20
CLOSE_S = 60.0
ERASE_S = 5.0
_HEADROOM_BYTES = 512 << 20  # twice the observed need of staging, threads and compiled code
_FROM_SYSTEM = (OSError, MemoryError, ImportError, RuntimeError)  # errors of exhausted memory


class DiskTier(Handle):
    """`Tier` in one directory. The first process to open it owns it; others only read.

    A reader becomes the owner when it looks for frames and there is no owner any more. An owner is
    a reader from the moment when its lock file, journal, slab file or directory is removed or
    replaced: its stores are then `FAILED` with "read-only" or "ESTALE".

    `STORED` means: header, body and journal record were handed to the operating system, so that the
    frame survives `kill -9`; with `durability="sync"` the device confirmed it, and it survives the
    machine. A frame with wrong bytes is a `MISS` with the reason "digest", "key", "foreign",
    "version" or "truncated"; it is forgotten, and its slot stays unused until the directory is
    opened again. A reader answers stores with "read-only", and sees new frames as they come.

    Args:
        directory: A directory of its own; made if it is missing.
        capacity_bytes: Most bytes that the directory may occupy on the disk, everything included.
            If it was larger when the directory was open last, the oldest frames are dropped.
        name: Shown in statistics; default "disk:" and the directory.
        exclusive: Refuse a directory that another process owns, instead of only reading it.
        durability: "none" leaves the time of writing to the operating system, "sync" waits for the
            device.
        queue_bytes: Stores waiting beyond this many bytes are `FAILED` with reason "busy".
        envelope: Seals and checks frames; default digests, no compression.
        engine: Moves the bytes, for this tier alone, which closes it; default the best there is.
        arena: Staging memory shared with others; default its own.
        threads: 1, or 0: then `poll` does the work, in the caller's thread.
        files: File operations, for tests and simulation; give an `engine` over them, too.
        clock: Source of time.

    Attributes:
        path: Path of the directory.
        erasure_log: Path of the log of erasures that caches share, see `tiers.erasure_log`.

    Raises:
        ConfigError: The capacity is too small.
        StoreError: The directory cannot be used.
    """

    kind = "disk"
    _remedy = "Open the directory again, here"

    def __init__(  # noqa: PLR0913 (each is one decision at the opening of a tier)
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
        printable = os.fsencode(path).decode(errors="backslashreplace")  # for JSON and metrics
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
        own: Arena | None = None
        try:
            if arena is None:
                own = arena = Arena(min(STAGING_BYTES, max(1 << 21, capacity_bytes)))
            from flowkv.tiers.digest import compile_frames

            compile_frames()  # so that the first restore does not wait for it
            engine = engine or open_engine(arena, str(self._store.path))
            self._store.open(engine.open)
            self._wishes = RequestQueue(clock or SystemClock(), queue_bytes)
            super().__init__(name or f"disk:{printable}", self._wishes.answers)
        except BaseException as error:
            self._store.close()
            if (engine is None or engine.close()) and own is not None:
                own.close()
            if isinstance(error, _FROM_SYSTEM) and not isinstance(error, FlowKVError):
                raise StoreError(
                    f"the disk tier in {path} cannot be opened ({error or 'no memory'})",
                    "Free memory, or raise its limit (ulimit -v)",
                ) from error
            raise
        self.capacity_bytes, self._closing = capacity_bytes, threading.Lock()
        self.path, self.erasure_log = self._store.path, self._store.path / ERASED
        self._engine, self._threads = engine, threads
        self._conductor = DiskScheduler(self._store, envelope, engine, arena, self._wishes)
        self._shut = partial(self._conductor.close, own)
        if files is None:  # the caller closes a tier with given files
            weakref.finalize(self, REAPER.put, self._shut).atexit = False
            REAPER.start()
        if not self.writable:
            warnings.warn(
                f"{self._store.home.obstacle} in {path}: it is read, and nothing is stored there"
                if self._store.home.obstacle
                else f"{owner_of(self.path)} {path}: this one reads it and stores nothing there"
                " until the other one is closed",
                stacklevel=2,
            )
        if self.locked:
            warnings.warn(
                f"of the frames in {path}, {self.locked:,} are encrypted with another secret and"
                ' not found: pass integrity="aead" and that secret, or use another directory',
                stacklevel=2,
            )

    @property
    def writable(self) -> bool:
        """Return whether this process owns the directory now."""
        return self._store.owner

    @property
    def shared(self) -> bool:
        """Return whether another process owns the directory, or did while it was open here."""
        return self._store.shared

    @property
    def corrupt(self) -> int:
        """Return the number of frames found damaged since the directory was opened."""
        return self._store.corrupt

    @property
    def locked(self) -> int:
        """Return the number of encrypted frames at the opening that the secret does not open."""
        return self._store.locked

    @property
    def engine(self) -> str:
        """Return the name of the engine that moves the bytes."""
        return self._engine.name

    @property
    def reserved_bytes(self) -> int:
        """Return the bytes of `used_bytes` that are reserved for managing frames."""
        return self._store.reserved_bytes if self._usable() else 0

    def no_room(self, n_bytes: int) -> str:
        """Return why the file system can take no frame of so many bytes; "" if it can."""
        return self._store.no_room(n_bytes) if self._usable() else ""

    def used_bytes(self) -> int:
        """Return the bytes charged for frames, and for managing them."""
        return self._store.used_bytes() if self._usable() else 0

    def frame_bytes(self, body_bytes: int) -> int:
        """Return an upper bound of the bytes charged for one more frame."""
        return self._store.frame_bytes(body_bytes)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which keys are in the index; a reader reads the journal first."""
        if not self._usable():
            return [False] * len(keys)
        self._store.refresh()
        return self._store.contains(keys)

    def poll(self, timeout_s: float = 0.0) -> list[TierAnswer]:
        """Return the answers that are ready; wait up to `timeout_s` for the first one."""
        if self._pid != os.getpid():
            return []
        if self._threads or self._closed:
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

    def cancel(self, job: int) -> None:
        """Cancel the items of a job that are not in use right now."""
        self._wishes.cancel(job)

    def delete(self, keys: Sequence[bytes]) -> int:
        """Forget frames; return how many. Their bytes stay on disk until the space is reused."""
        return self._store.delete(keys) if self._usable() else 0

    def erase(self, keys: Sequence[bytes]) -> int:
        """Forget frames and clear every slot that holds none, those of earlier deletions too.

        Raises:
            StoreError: Another process owns the directory, a slot is still being read, or could not
                be cleared, or the directory has a store of another format in it.
        """
        if not self._usable():
            return 0
        if not self.writable:
            raise StoreError(f"{owner_of(self.path)} {self.name}", "Let its owner erase")
        problem = f"{self.name} could not clear the slot of a frame"
        try:
            with stating(problem, "Check the disk and erase again, or delete the directory"):
                count = self._store.delete(keys)
                self._conductor.known = KnownDigests()
                while not self._threads and self._store.doomed and self._conductor.step(0.0):
                    pass  # no thread ends the loads that are under way
                self._store.wipe(ERASE_S if self._threads else 0.0)
                aside = self._store.home.aside()
        except Refused as error:
            raise StoreError(
                f"{self.name} forgot the frames, but some are being read right now",
                "Poll for those loads, then erase again",
            ) from error
        if aside:
            raise StoreError(
                f"{self.name} erased its frames, but {aside[0]} holds a store of another format",
                "Delete that directory",
            )
        return count

    def survey(self) -> None:
        """Look anew at the directory, so that `scan` omits no frame that was stored here.

        Raises:
            StoreError: The directory, its journal or its slab files were removed or replaced, or
                cannot be read.
        """
        if not self._usable():
            return
        remedy = "Erase the old content of that directory, wherever it is, and open it again"
        with stating(f"{self.name} cannot list its frames", remedy):
            self._store.survey()

    def bind(self, namespace: bytes, name: str) -> None:
        """Record, with its name, that a cache with this namespace is about to use the tier."""
        if self._usable():
            self._store.bind(namespace, name)
            if self._threads:  # now: at the end of the process no thread can be started
                self._conductor.start(f"flowkv {self.name}")

    def cede(self, wait_s: float) -> bool:
        """Give up ownership, and read on; return whether another process may own the directory."""
        return not self._usable() or self._store.cede(wait_s)

    def in_use(self, namespace: bytes) -> bool:
        """Return whether a cache here uses a namespace, or any did in the last seven days."""
        return self._store.in_use(namespace)

    def scan(self) -> Iterator[Entry]:
        """Yield all frames, oldest store first."""
        if self._usable():
            self._store.refresh()
            for key, held in self._store.entries():
                yield Entry(key, held.info, charge_bytes(held))

    def close(self) -> None:
        """Work off all queued items, for a minute at most, and give up the directory."""
        if self._pid != os.getpid():
            return
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._shut()

    def _run(self, items: Sequence[Load] | Sequence[Store], deadline_s: float) -> int:
        self._require_usable()
        if items and isinstance(items[0], Load):
            self._store.refresh()
        job = self._wishes.submit(items, deadline_s)
        if self._threads:
            self._conductor.start(f"flowkv {self.name}")
        return job


_stuck: list[DiskScheduler] = []  # with operations that may still use their files and memory


def _need_addresses(path: str) -> None:
    """Check that enough memory is left to start threads and to run compiled code.

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
