"""One frame to or from an engine: within its deadline, past the breaker, checked, counted."""

from __future__ import annotations

import errno
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial

from flowkv.core import compiling
from flowkv.core.clock import Clock
from flowkv.core.layout import GRANULE_BYTES
from flowkv.tiers.base import FrameInfo, Load, Outcome, Store
from flowkv.tiers.envelope import Envelope
from flowkv.tiers.frame import (
    BadFrame,
    Header,
    accept,
    count_stripes,
    peek_header_bytes,
    span,
)
from flowkv.tiers.remote.backend import ABSENT, Backend, Lender
from flowkv.tiers.remote.guard import ANSWERS, Breaker, Pass, Rates, State, attempt
from flowkv.tiers.remote.known import Fact, Known
from flowkv.tiers.remote.limits import Limits
from flowkv.tiers.worker import Item, Staging, Workers

DAMAGED = ("digest", "key", "foreign", "truncated")
MOST_HEADS = 1 << 14
LEAST_BLAMED_S = 0.02
"""An engine that was given less time than this is not blamed for needing more."""
TRIES = 4


class Heads:
    """The headers that were read or written last, so that ranges of their frames can be read."""

    def __init__(self, most: int = MOST_HEADS) -> None:
        self._most, self._lock = most, threading.Lock()
        self._heads: OrderedDict[bytes, Header] = OrderedDict()

    def get(self, key: bytes) -> Header | None:
        """The header of a frame, if it is here."""
        with self._lock:
            if key in self._heads:
                self._heads.move_to_end(key)
            return self._heads.get(key)

    def add(self, header: Header) -> None:
        """Keeps a checked header."""
        with self._lock:
            self._heads[header.key] = header
            if len(self._heads) > self._most:
                self._heads.popitem(last=False)

    def drop(self, key: bytes) -> None:
        """Forgets the header of a frame."""
        with self._lock:
            self._heads.pop(key, None)


class Transfer:
    """Loads and stores of one tier, as its threads do them.

    Args:
        backend: The engine.
        envelope: How frames are wrapped and checked.
        clock: Source of time.
        undo: Deletes the frame of a store that was answered before it was done.
        capacity_bytes: Most bytes of frames.
        limits: How much may hang, and how long a failing engine is left alone.

    Attributes:
        known: What is believed to be there.
        heads: Headers seen lately.
        breaker: Leaves a failing engine alone.
        reading: How fast it reads.
        writing: How fast it writes.
        corrupt: Frames found damaged so far.
        workers: The threads; set by the tier.
    """

    workers: Workers

    def __init__(
        self,
        backend: Backend,
        envelope: Envelope,
        clock: Clock,
        *,
        undo: Callable[[bytes], None],
        capacity_bytes: int,
        limits: Limits,
    ) -> None:
        self.backend, self._envelope, self._clock = backend, envelope, clock
        self._undo = undo
        self._capacity_bytes, self._retired_bytes = capacity_bytes, limits.retired_bytes
        self.known, self.heads = Known(), Heads()
        self.breaker = Breaker(clock, pause_s=limits.pause_s)
        self.reading, self.writing, self.corrupt = Rates(), Rates(), 0
        self._lender = backend if isinstance(backend, Lender) else None
        self._begun: dict[Item, tuple[Pass, int]] = {}

    def load(self, item: Item, staging: Staging) -> None:
        """Reads, checks, and copies to the target last."""
        wish, key = item.wish, item.key
        assert isinstance(wish, Load)
        if self.known.is_shunned(key):
            self.workers.answer(item, Outcome.MISS)
            return
        was = self.known.get(key)
        part = bool(wish.first or wish.stripes)
        for remembered in (part and self.heads.get(key) is not None, False):
            try:
                self._guarded(item, lambda: self._load(item, wish, staging, was))
            except BadFrame as error:
                self.heads.drop(key)
                if remembered and error.reason in DAMAGED:
                    self.workers.let_go(item)  # others may have replaced it since: read both anew
                    continue
                if error.reason in DAMAGED:
                    self.corrupt += 1
                    self.known.drop(key, was, shun=True)
                self.workers.answer(item, Outcome.MISS, error.reason)
            return

    def store(self, items: list[Item]) -> None:
        """Copies the body, then writes the frame, unless it is known to be there."""
        for item in items:
            try:
                self._store(item)
            except BadFrame as error:  # before anything was written
                self.workers.answer(item, Outcome.FAILED, error.reason)

    def late(self, item: Item) -> None:
        """Blames the engine for an item that it has not finished in time, if it had the time."""
        begun = self._begun.get(item)
        if begun is not None:
            self._report(begun[0], self._blames(item, None))

    def ready(self) -> bool:
        """Whether the engine may be called: it works, or it is time to try, and memory is left."""
        overdue = self.workers.overdue and self.workers.retired_bytes > self._retired_bytes
        return not overdue and self.breaker.ready()

    def header(self, key: bytes, staging: Staging, left_s: Callable[[], float]) -> Header | None:
        """The header of a frame, from memory or the engine; None where there is no such frame.

        Raises:
            BadFrame: It is damaged.
            OSError: The engine failed.
        """
        if (head := self.heads.get(key)) is not None:
            return head
        was = self.known.get(key)
        page = self._get(key, 0, GRANULE_BYTES, staging, left_s)
        if page is not None and (size := peek_header_bytes(page)) > len(page):
            page = self._get(key, 0, size, staging, left_s)
        if page is None:
            self.known.drop(key, was)
            return None
        return self._seen(self._envelope.head(page, key))

    def describe(self, missing: Iterable[tuple[bytes, Fact]], limit_s: float) -> None:
        """Reads the headers of frames of which only the name is known.

        Raises:
            OSError: The engine failed.
        """
        staging, end_ns = Staging(), self._clock.now_ns() + round(limit_s * 1e9)
        for key, fact in missing:
            try:
                self.header(key, staging, lambda: (end_ns - self._clock.now_ns()) / 1e9)
            except BadFrame:
                self.known.drop(key, fact, shun=True)

    def _load(self, item: Item, wish: Load, staging: Staging, was: Fact | None) -> None:
        left_s = partial(self._left_s, item)
        if wish.first or wish.stripes:
            head = self.header(item.key, staging, left_s)
            if head is None:
                return self._absent(item, was)
            stripes = _suits(wish, head)
            if item.n_bytes < len(stripes) * head.info.stripe_bytes:  # before memory is found
                self.workers.answer(item, Outcome.FAILED, "target")
                return None
            offset, n_bytes = self._envelope.place(head, stripes.start, len(stripes))
            stored = self._get(item.key, offset, n_bytes, staging, left_s)
        else:  # in one call, header included: what was read belongs together
            stored = self._get(item.key, 0, self._most_bytes(item), staging, left_s)
            if stored is None:
                return self._absent(item, was)
            head = self._seen(self._envelope.head(stored, item.key))
            stripes = _suits(wish, head)
            stored = stored[self._envelope.place(head, 0, len(stripes))[0] :]
        if stored is None:
            return self._absent(item, was)
        n_bytes = len(stripes) * head.info.stripe_bytes
        if item.readonly or item.n_bytes < n_bytes:
            self.workers.answer(item, Outcome.FAILED, "target")
        elif (target := self.workers.claim(item)) is not None:
            self._envelope.open(head, stored, target, stripes.start, len(stripes))
            self.workers.answer(item, Outcome.HIT, "", head.info, n_bytes)

    def _seen(self, head: Header) -> Header:
        offset, n_bytes = self._envelope.place(head, 0, head.stripes)
        self.known.see(head.key, Fact(offset + n_bytes, head.info))
        self.heads.add(head)
        return head

    def _most_bytes(self, item: Item) -> int:
        """Bytes that a frame has at most whose body fits into the target."""
        most, fact = self._envelope.most_bytes(max(1, item.n_bytes)), self.known.get(item.key)
        return min(most, max(GRANULE_BYTES, fact.n_bytes)) if fact and fact.n_bytes else most

    def _absent(self, item: Item, was: Fact | None) -> None:
        self.known.drop(item.key, was)
        self.heads.drop(item.key)
        self.workers.answer(item, Outcome.MISS)

    def _store(self, item: Item) -> None:
        wish, hand = item.wish, item.hand
        assert isinstance(wish, Store) and hand is not None
        count_stripes(item.key, wish.info, item.n_bytes)
        if self.known.get(item.key) is not None:
            self.workers.answer(item, Outcome.STORED)
            return
        sealed = self._seal(item, wish.info, hand.staging)
        if sealed is None:
            return
        data, header = sealed
        if not self.known.reserve(len(data), self._capacity_bytes):
            self.workers.answer(item, Outcome.FAILED, "full")
            return
        fact, in_time = None, False
        try:
            if not self.known.begin(item.key, self._left_s(item)):
                raise BadFrame("deadline", "an earlier frame of that key is still being deleted")
            try:
                if self._guarded(item, lambda: self._put(item, data)):
                    fact = Fact(len(data), header.info, time.time_ns())
                in_time = self.workers.claim(item) is not None
            finally:
                self.known.land(item.key, fact if in_time else None)
        finally:
            self.known.release(len(data))
        if fact is not None and in_time:
            self.heads.add(header)
            self.workers.answer(item, Outcome.STORED, "", None, item.n_bytes)
        elif fact is not None:  # it was said to have failed, so it must not be found
            self._undo(item.key)

    def _seal(
        self, item: Item, info: FrameInfo, staging: Staging
    ) -> tuple[memoryview, Header] | None:
        """The frame in staging memory; None if the item was answered."""
        n_bytes = item.n_bytes
        most = self._envelope.most_bytes(n_bytes)
        start = most - n_bytes  # of the body, behind the largest header
        memory = staging(start + n_bytes + (0 if self._envelope.plain else most))
        copy = memory[start : start + n_bytes]
        with self.workers.body(item) as body:
            if body is None:
                return None
            copy[:] = body
        sealed = self._envelope.seal(item.key, info, copy)
        if self._envelope.plain:
            begin = start - len(sealed.header)
            memory[begin:start] = sealed.header
            return memory[begin : start + n_bytes], sealed.head
        begin = at = start + n_bytes
        for part in (sealed.header, *sealed.parts):
            view = memoryview(part).cast("B")
            memory[at : at + len(view)] = view
            at += len(view)
        return memory[begin:at], sealed.head

    def _put(self, item: Item, data: memoryview) -> None:
        def call(timeout_s: float) -> None:
            begun = self._clock.now_ns(), compiling.spent_ns()
            self.backend.put(item.key.hex(), data, timeout_s)
            self._learn(self.writing, len(data), begun, timeout_s)

        attempt(call, partial(self._left_s, item), tries=self._tries())

    def _get(
        self, key: bytes, offset: int, n_bytes: int, staging: Staging, left_s: Callable[[], float]
    ) -> memoryview | None:
        def call(timeout_s: float) -> memoryview | None:
            begun = self._clock.now_ns(), compiling.spent_ns()
            if self._lender is not None and n_bytes < self._lender.lends:
                found = self._lender.lend(key.hex(), offset, n_bytes, timeout_s)
            else:
                into = staging(n_bytes)
                count = self.backend.get(key.hex(), offset, into, timeout_s)
                found = None if count == ABSENT else into[:count]
            if found is not None:
                self._learn(self.reading, len(found), begun, timeout_s)
            return found

        return attempt(call, left_s, tries=self._tries())

    def _learn(self, rates: Rates, n_bytes: int, begun: tuple[int, int], timeout_s: float) -> None:
        took_s = (self._clock.now_ns() - begun[0]) / 1e9
        # What hung, or ran beside a compiler, says nothing about how fast the engine is.
        if took_s <= timeout_s and compiling.spent_ns() == begun[1]:
            rates.note(n_bytes, took_s)

    def _tries(self) -> int:
        return TRIES if self.breaker.state is State.CLOSED else 1

    def _left_s(self, item: Item) -> float:
        return (item.deadline_ns - self._clock.now_ns()) / 1e9

    def _guarded(self, item: Item, work: Callable[[], None]) -> bool:
        """Whether the engine did what it was asked; if not, the item is answered."""
        leave = self.breaker.enter() if self.ready() else None
        if leave is None:
            self.workers.answer(item, Outcome.FAILED, "breaker")
            return False
        self._begun[item] = leave, self._clock.now_ns()
        well: bool | None = True
        try:
            work()
        except OSError as error:
            well = self._blames(item, error)
            if item.hand is not None:  # a library may not be done with it
                item.hand.staging.give_up()
            self._report(leave, well)  # first: who has the answer finds the breaker as it is now
            self.workers.answer(item, Outcome.FAILED, reason_of(error))
            return False
        except BadFrame:
            raise  # not the engine's fault
        except BaseException:
            well = None
            raise
        finally:
            self._report(leave, well)
            self._begun.pop(item, None)  # then: until it is reported, `late` may report it
        return True

    def _blames(self, item: Item, error: OSError | None) -> bool | None:
        """Whether the engine worked all the same; None if it had too little time to tell."""
        if error is not None and error.errno in ANSWERS:
            return True
        begun = self._begun.get(item)
        if isinstance(error, TimeoutError | None) and begun is not None:
            rates = self.writing if item.stores else self.reading
            took_s = (self._clock.now_ns() - begun[1]) / 1e9
            enough_s = max(LEAST_BLAMED_S, rates.expected_s(item.n_bytes))
            return False if took_s >= enough_s else None
        return False

    def _report(self, leave: Pass, well: bool | None) -> None:
        if leave.report(well):
            self.workers.fail_waiting("breaker")


def reason_of(error: OSError) -> str:
    """One word for what an engine raised."""
    if isinstance(error, TimeoutError):
        return "deadline"
    code = error.errno
    if isinstance(code, int) and code == errno.ENOSPC:
        return "full"
    return errno.errorcode.get(code, "") if isinstance(code, int) else type(error).__name__


def _suits(wish: Load, head: Header) -> range:
    """Numbers of the stripes wished for, if the frame is one that the reader accepts."""
    accept(head, wish.key, wish.layout, wish.fidelity)
    return span(head, wish.first, wish.stripes)
