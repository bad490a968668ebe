"""What a disk tier was asked for: queued, claimed by its conductor, answered once and in time.

An item whose deadline passes is answered `FAILED` by whoever polls, even while the conductor is
stuck with it; what comes later is dropped, because an item must be claimed before its memory is
touched, and a claimed one is answered, or let go of, as soon as memory can be copied.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

from flowkv.core.clock import Clock
from flowkv.core.layout import GRANULE_BYTES
from flowkv.tiers.base import Completion, FrameInfo, Load, Outcome, Store
from flowkv.tiers.disk.journal import Held, WrittenFrame
from flowkv.tiers.frame import Header, aligned
from flowkv.tiers.io.staging import Arena, ArenaSlot
from flowkv.tiers.worker import Completions

_FOREVER_S = 1e9


class DiskItem:
    """One wish on its way; `wish` is let go of with the answer, `flight` with its last byte."""

    __slots__ = (
        *("claimed", "deadline_ns", "done", "flight", "index"),
        *("job", "key", "n_bytes", "start_ns", "tries", "wish"),
    )

    def __init__(self, job: int, index: int, wish: Load | Store, times_ns: tuple[int, int]) -> None:
        self.job, self.index, self.key = job, index, wish.key
        self.wish: Load | Store | None = wish
        self.n_bytes = (wish.target if isinstance(wish, Load) else wish.body).nbytes
        self.start_ns, self.deadline_ns = times_ns
        self.done: Completion | None = None
        self.claimed = False  # about to be answered: too late to expire
        self.tries = 0
        self.flight: FrameOperations | None = None


class ItemAnswer(NamedTuple):
    """How an item ends."""

    item: DiskItem
    outcome: Outcome
    reason: str = ""
    info: FrameInfo | None = None
    n_bytes: int = 0


class DiskRequestQueue:
    """The queue of one tier. Thread-safe.

    Args:
        clock: Source of time.
        queue_bytes: Stores waiting beyond this are `FAILED` with reason "busy".
    """

    def __init__(self, clock: Clock, queue_bytes: int) -> None:
        self.answers = Completions()
        self._clock, self._queue_bytes = clock, queue_bytes
        self._changed = threading.Condition()
        self._loads: deque[DiskItem] = deque()
        self._stores: deque[DiskItem] = deque()
        self._waiting_bytes = 0
        self._followers: dict[bytes, list[DiskItem]] = {}
        self._deadlines: list[tuple[int, int, DiskItem]] = []
        self._ticket = itertools.count()
        self._overdue: list[DiskItem] = []
        self.closing = False

    def submit(self, wishes: Sequence[Load] | Sequence[Store], deadline_s: float) -> int:
        """Queues the items of a job; returns its number."""
        job, now = self.answers.new_job(), self._clock.now_ns()
        times = now, now + round(min(deadline_s, _FOREVER_S) * 1e9)
        with self._changed:
            for index, wish in enumerate(wishes):
                item = DiskItem(job, index, cast(Load | Store, wish), times)
                heapq.heappush(self._deadlines, (item.deadline_ns, next(self._ticket), item))
                if isinstance(wish, Load):
                    self._loads.append(item)
                else:
                    self._queue_store(item)
            self._changed.notify_all()
        return job

    def poll(self, timeout_s: float) -> list[Completion]:
        """Answers that are ready, those of items whose deadline has passed among them."""
        end_s = time.monotonic() + timeout_s
        while True:
            next_s = self.expire()
            left_s = max(0.0, end_s - time.monotonic())
            answers = self.answers.take(min(left_s, max(next_s, 0.001)))
            if answers or time.monotonic() >= end_s:
                return answers

    # --- for the conductor ---------------------------------------------------------------------

    def wait(self, timeout_s: float) -> None:
        """Waits until something is queued, or it is time to end."""
        with self._changed:
            if not (self._loads or self._stores or self.closing):
                self._changed.wait(timeout_s)

    def end(self) -> None:
        """It is time to end, once all that is queued is done."""
        with self._changed:
            self.closing = True
            self._changed.notify_all()

    def waiting(self) -> tuple[int, int]:
        """Loads and stores that were not begun."""
        return len(self._loads), len(self._stores)

    def next(self, *, stores: bool) -> DiskItem | None:
        """The first one that waits and is not answered."""
        with self._changed:
            queue = self._stores if stores else self._loads
            while queue:
                item = self._pop_store() if stores else queue.popleft()
                if item.done is None:
                    return item
                if stores:
                    self._follow(item)
            return None

    def put_back(self, item: DiskItem) -> None:
        """Makes an item the first again: it cannot be begun yet, or must be begun anew."""
        with self._changed:
            item.claimed = False
            if isinstance(item.wish, Store):
                self._waiting_bytes += item.n_bytes
                self._stores.appendleft(item)
            else:
                self._loads.appendleft(item)

    def claim(self, items: Iterable[DiskItem]) -> None:
        """Claims those that wait for their answers: only the caller may give them from now on."""
        with self._changed:
            for item in items:
                item.claimed = item.done is None

    def let_go(self, items: Iterable[DiskItem]) -> None:
        """Ends claims without an answer."""
        with self._changed:
            for item in items:
                item.claimed = False

    def answer(self, answers: Iterable[ItemAnswer]) -> None:
        """Answers items, unless they were."""
        now = self._clock.now_ns()
        with self._changed:
            todo = [answer for answer in answers if answer.item.done is None]
            self.answers.put([self._complete(answer, now) for answer in todo])

    def end_stores(self, items: Iterable[DiskItem]) -> None:
        """Items that `next` gave are answered and of no more concern: their followers go on."""
        with self._changed:
            for item in items:
                self._follow(item)

    def overdue(self) -> list[DiskItem]:
        """Items answered by deadline or cancellation since the last call."""
        if not self._overdue:
            return []
        with self._changed:
            items, self._overdue = self._overdue, []
            return items

    # --- ends ----------------------------------------------------------------------------------

    def expire(self) -> float:
        """Fails overdue items; returns the seconds until the next deadline."""
        with self._changed:
            now, queue, later = self._clock.now_ns(), self._deadlines, []
            while queue and (queue[0][0] <= now or queue[0][2].done):
                entry = heapq.heappop(queue)
                if entry[2].claimed and entry[2].done is None:
                    later.append(entry)
                else:
                    self._give_up(entry[2], "deadline", now)
            for entry in later:  # answered in a moment, or let go of
                heapq.heappush(queue, entry)
            return (queue[0][0] - now) / 1e9 if queue else _FOREVER_S

    def cancel(self, job: int) -> None:
        """Answers what is left of a job, except where memory is in use."""
        with self._changed:
            now = self._clock.now_ns()
            for _, _, item in self._deadlines:
                if item.job == job and not item.claimed:
                    self._give_up(item, "cancelled", now)

    def fail_waiting(self, reason: str) -> None:
        """Fails everything that was not begun."""
        with self._changed:
            now = self._clock.now_ns()
            for item in [*self._loads, *self._stores]:
                self._give_up(item, reason, now)
            self._changed.notify_all()

    def close(self, *, stuck: bool = False) -> None:
        """Fails everything that is left, but for what a conductor that is stuck is answering."""
        with self._changed:
            now = self._clock.now_ns()
            for _, _, item in self._deadlines:
                if not (stuck and item.claimed):
                    self._give_up(item, "closed", now)
            self._deadlines.clear()
        self.answers.close()

    def _give_up(self, item: DiskItem, reason: str, now: int) -> None:
        if item.done is None:
            self.answers.put([self._complete(ItemAnswer(item, Outcome.FAILED, reason), now)])
            self._overdue.append(item)

    def _complete(self, answer: ItemAnswer, now: int) -> Completion:
        item, outcome, reason, info, n_bytes = answer
        seconds = (now - item.start_ns) / 1e9
        item.done = Completion(
            item.job, item.index, item.key, outcome, reason, info, n_bytes, seconds
        )
        item.wish = None
        return item.done

    def _queue_store(self, item: DiskItem) -> None:
        followers = self._followers.get(item.key)
        if followers is not None:  # the key is on its way already: wait for that
            followers.append(item)
        elif self._stores and self._waiting_bytes + item.n_bytes > self._queue_bytes:
            self.answer([ItemAnswer(item, Outcome.FAILED, "busy")])
        else:
            self._followers[item.key] = []
            self._waiting_bytes += item.n_bytes
            self._stores.append(item)

    def _pop_store(self) -> DiskItem:
        item = self._stores.popleft()
        self._waiting_bytes -= item.n_bytes
        return item

    def _follow(self, item: DiskItem) -> None:
        # Followers are stored in their turn, which costs nothing if the frame is there: it may have
        # been deleted again since, so the answer of the first is not theirs.
        followers = self._followers.pop(item.key, None)
        while followers:
            first = followers.pop(0)
            if first.done is None:
                self._followers[item.key] = followers
                self._waiting_bytes += first.n_bytes
                self._stores.appendleft(first)
                break


# One wish between the queue and its answer: what it does to the disk, and in which memory.

NEAR_BYTES = 64 << 10
"""Stripes that lie so near to their header are read together with it."""

Operation = tuple[int, int, int, int, int]  # op, fd, offset, address, length


class DiskOperations:
    """Operations that belong together.

    Attributes:
        operations: What the engine shall do next.
        tags: Those of the operations that it was given.
        left: How many of them did not complete yet.
        error: First negative result, or 0.
        short: Whether an operation moved less than it must.
    """

    __slots__ = ("error", "left", "operations", "short", "tags")

    def __init__(self) -> None:
        self.left = self.error = 0
        self.short = False
        self.operations: list[Operation] = []
        self.tags: list[int] = []

    def note(self, result: int, must: int) -> bool:
        """Takes a completion; whether it was the last one."""
        self.left -= 1
        if result < 0:
            self.error = self.error or result
        elif result < must:
            self.short = True
        return self.left == 0


class FrameOperations(DiskOperations):
    """Those of one item.

    Attributes:
        item: Whose.
        memory: Staging slot.
        over: Whether that was given back.
    """

    __slots__ = ("item", "memory", "over")

    def __init__(self, item: DiskItem, memory: ArenaSlot) -> None:
        super().__init__()
        self.item, self.memory, self.over = item, memory, False


class DiskRead(FrameOperations):
    """A load. `first` and `count` are the stripes wished for.

    Attributes:
        held: Where the frame lies.
        header: What the header says, once it was read before the stripes.
        body_at: Where the stored stripes begin in `memory`.
    """

    __slots__ = ("body_at", "count", "first", "header", "held")

    def __init__(
        self, item: DiskItem, memory: ArenaSlot, held: Held, first: int, count: int
    ) -> None:
        super().__init__(item, memory)
        self.held, self.first, self.count = held, first, count
        self.header: Header | None = None
        self.body_at = held.header_bytes + first * held.info.stripe_bytes


class DiskWrite(FrameOperations):
    """A store: one write of header and stripes."""

    __slots__ = ("written",)

    def __init__(self, item: DiskItem, memory: ArenaSlot, written: WrittenFrame) -> None:
        super().__init__(item, memory)
        self.written = written


class DiskSync(DiskOperations):
    """What a group of written frames waits for before it counts."""

    __slots__ = ("group",)

    def __init__(self, group: list[DiskWrite]) -> None:
        super().__init__()
        self.group = group


def extents(held: Held, first: int, count: int) -> list[tuple[int, int]]:
    """Parts of a slot to be read for some stripes, from and length: header and stripes.

    Of a compressed frame the header alone, unless that is near to all: it says where stripes lie.
    """
    head, step = held.header_bytes, held.info.stripe_bytes
    if held.lossless:
        whole = count == held.stripes or held.stored_bytes <= head + NEAR_BYTES
        return [(0, held.stored_bytes if whole else head)]
    start, n_bytes = head + first * step, count * step
    if start - head <= NEAR_BYTES:
        return [(0, start + n_bytes)]
    return [(0, head), (start, n_bytes)]


def wider(n_bytes: int) -> int:
    """Memory that a read of whole granules needs."""
    return aligned(max(n_bytes, GRANULE_BYTES))


# Where frames lie on their way between a disk and whoever wants them.


class Staging:
    """Slots of an arena, and memory for the odd frame that does not fit into it.

    Args:
        arena: Shared with others; None for one of its own.
        n_bytes: Size of its own.

    Attributes:
        arena: Where slots come from.
    """

    def __init__(self, arena: Arena | None, n_bytes: int) -> None:
        self.arena, self._own = arena or Arena(n_bytes), arena is None
        self._spare: set[Arena] = set()

    @property
    def clogged(self) -> bool:
        """Whether so much memory waits for overdue operations that the disk is left alone."""
        retired_bytes = sum(arena.retired_bytes for arena in (self.arena, *self._spare))
        return retired_bytes > self.arena.most_retired_bytes

    def take(self, n_bytes: int, *, spare: bool) -> ArenaSlot | None:
        """Memory in the arena; where it has no room now, outside of it if `spare`, else None.

        Raises:
            OSError: The system has none.
        """
        slot = self.arena.take(n_bytes)
        if slot is None and spare:
            arena = Arena(n_bytes)
            self._spare.add(arena)
            slot = arena.take(n_bytes)
        return slot

    def retire(self, slot: ArenaSlot) -> None:
        """The operation on this memory is overdue: `give_back` will say when it has ended."""
        if not slot.retired:
            slot.arena.retire(slot)

    def give_back(self, slot: ArenaSlot) -> None:
        """No operation uses this memory any more."""
        arena = slot.arena
        (arena.revive if slot.retired else arena.give_back)(slot)
        if arena in self._spare:
            self._spare.discard(arena)
            arena.close()

    def close(self) -> None:
        """Gives up memory of its own, unless something may still be written to it."""
        for arena in (*self._spare, *([self.arena] if self._own else [])):
            arena.close()
