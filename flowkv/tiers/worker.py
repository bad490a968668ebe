"""Jobs of a tier: queued, worked off by threads, answered once and before their deadline.

Loads go before stores, except that one of the threads looks at stores first; stores of one key go
one after the other. An item whose deadline passes is answered `FAILED` by whoever polls, even while
a thread is stuck with it. What that thread brings later is dropped, because it is never given an
item's memory, only lent it: from `claim` on no other answer can come, until it answered the item or
let go of it. So work that may take long has no other way than to copy first.

A thread whose item is overdue may never come back. It is set aside with its staging memory, which
is *retired* until the call returns (DESIGN D10), and replaced, as often as `spares` allows.
"""

from __future__ import annotations

import heapq
import itertools
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import cast

from flowkv.core.clock import Clock
from flowkv.tiers.base import Completion, FrameInfo, Load, Outcome, Store

# Where a tier puts its answers until they are polled.


class Completions:
    """A thread-safe queue of answers, with a file descriptor for those who wait on many things."""

    def __init__(self) -> None:
        self._ready: deque[Completion] = deque()
        self._changed = threading.Condition()
        self._event_fd = -1
        self._closed = False
        self._jobs = 0

    def new_job(self) -> int:
        """The next job number, from 1."""
        with self._changed:
            self._jobs += 1
            return self._jobs

    def put(self, answers: Iterable[Completion]) -> None:
        """Adds answers and wakes whoever polls."""
        with self._changed:
            before = len(self._ready)
            self._ready.extend(answers)
            if len(self._ready) > before:
                self._changed.notify_all()
                if self._event_fd >= 0:
                    os.eventfd_write(self._event_fd, 1)

    def take(self, timeout_s: float = 0.0) -> list[Completion]:
        """All answers there are; waits up to `timeout_s` for the first one."""
        with self._changed:
            if not self._ready and timeout_s > 0:
                self._changed.wait_for(lambda: self._ready, timeout_s)
            answers = list(self._ready)
            self._ready.clear()
            if answers and self._event_fd >= 0:
                os.eventfd_read(self._event_fd)
            return answers

    def fileno(self) -> int:
        """An eventfd, readable while answers wait; made at the first call, -1 once closed."""
        with self._changed:
            if self._event_fd < 0 and not self._closed:
                waiting = 1 if self._ready else 0
                self._event_fd = os.eventfd(waiting, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            return self._event_fd

    def close(self) -> None:
        """Closes the eventfd for good; answers can still be taken."""
        with self._changed:
            self._closed = True
            if self._event_fd >= 0:
                os.close(self._event_fd)
                self._event_fd = -1


_FOREVER_S = 1e9
_NOTHING = memoryview(b"")


class Item:
    """One wish on its way. Its memory is let go of with the answer.

    Attributes:
        wish: What was asked, without the memory.
        stores: Whether it is a store.
        n_bytes: Length of the memory.
        readonly: Whether the memory cannot be written to.
        done: The answer.
        hand: Who works on it.
    """

    __slots__ = (
        *("claimed", "deadline_ns", "done", "hand", "index", "job", "key", "memory"),
        *("n_bytes", "readonly", "start_ns", "stores", "wish"),
    )

    def __init__(self, job: int, index: int, wish: Load | Store, times_ns: tuple[int, int]) -> None:
        self.job, self.index, self.key = job, index, wish.key
        self.memory: memoryview | None  # of `Workers`: ask for it there
        self.wish: Load | Store
        if isinstance(wish, Load):
            self.memory, self.wish = wish.target, wish._replace(target=_NOTHING)
        else:
            self.memory, self.wish = wish.body, wish._replace(body=_NOTHING)
        self.stores = isinstance(wish, Store)
        self.n_bytes, self.readonly = self.memory.nbytes, self.memory.readonly
        self.start_ns, self.deadline_ns = times_ns
        self.done: Completion | None = None
        self.hand: Hand | None = None
        self.claimed = False  # a thread uses its memory right now: too early to answer without it


class ThreadMemory:
    """Memory of one thread, as large as the largest frame it met."""

    def __init__(self) -> None:
        self._view = memoryview(b"")

    @property
    def n_bytes(self) -> int:
        """Bytes it has grown to."""
        return len(self._view)

    def give_up(self) -> None:
        """Uses other memory from now on: somebody may still read or write this."""
        self._view = memoryview(b"")

    def __call__(self, n_bytes: int) -> memoryview:
        """Writable, page-aligned memory; what was there before is overwritten."""
        if len(self._view) < n_bytes:
            block = mmap.mmap(-1, 1 << max(20, (n_bytes - 1).bit_length()))
            if hasattr(mmap, "MADV_HUGEPAGE"):
                block.madvise(mmap.MADV_HUGEPAGE)
            self._view = memoryview(block)
        return self._view[:n_bytes]


class Hand:
    """One thread: what it works on, and in which memory."""

    def __init__(self, stores_first: bool) -> None:
        self.stores_first, self.staging = stores_first, ThreadMemory()
        self.item: Item | None = None
        self.overdue = False  # what it works on was answered without it
        self.thread: threading.Thread | None = None


class Workers:
    """Threads that work off loads and stores.

    Args:
        name: Of the threads.
        work: Does one item and answers it; `item.hand` has memory for it.
        clock: Source of time.
        threads: Their number; they start with the first item.
        queue_bytes: Stores waiting beyond this are `FAILED` with reason "busy".
        spares: Most threads that are replaced while they are overdue.
        storing: Most threads that store at a time, so that loads find one free; 0 for all.
        late: Told of every item that a thread works on when its deadline passes.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[Item], None],
        clock: Clock,
        *,
        threads: int,
        queue_bytes: int,
        spares: int = 0,
        storing: int = 0,
        late: Callable[[Item], None] | None = None,
    ) -> None:
        self.answers = Completions()
        self._name, self._work, self._clock, self._late = name, work, clock, late
        self._threads, self._spares, self._storing = threads, spares, storing
        self._queue_bytes, self._waiting_bytes = queue_bytes, 0
        self._changed = threading.Condition()
        self._loads: deque[Item] = deque()
        self._stores: deque[Item] = deque()
        self._deadlines: list[tuple[int, int, Item]] = []
        self._ticket = itertools.count()
        self._hands: list[Hand] = []
        self._closing = self._closed = False

    @property
    def retired_bytes(self) -> int:
        """Staging memory of threads that are overdue."""
        with self._changed:
            return sum(hand.staging.n_bytes for hand in self._hands if hand.overdue)

    @property
    def overdue(self) -> int:
        """Threads that are stuck with items which were answered without them."""
        with self._changed:
            return sum(hand.overdue for hand in self._hands)

    def submit(self, wishes: Sequence[Load] | Sequence[Store], deadline_s: float) -> int:
        """Queues the items of a job; returns its number."""
        job, now = self.answers.new_job(), self._clock.now_ns()
        times = now, now + round(min(deadline_s, _FOREVER_S) * 1e9)
        with self._changed:
            for index, wish in enumerate(wishes):
                item = Item(job, index, cast(Load | Store, wish), times)
                queue = self._stores if item.stores else self._loads
                self._waiting_bytes += item.n_bytes if item.stores else 0
                if self._closing:
                    self.answer(item, Outcome.FAILED, "closed")
                elif item.stores and queue and self._waiting_bytes > self._queue_bytes:
                    self.answer(item, Outcome.FAILED, "busy")
                else:
                    queue.append(item)
                    heapq.heappush(self._deadlines, (item.deadline_ns, next(self._ticket), item))
            self._refill()
            self._changed.notify_all()
        return job

    def poll(self, timeout_s: float) -> list[Completion]:
        """Answers that are ready, those of items whose deadline has passed among them."""
        end_s = time.monotonic() + timeout_s
        while True:
            self._refill()
            next_s = self._expire()
            left_s = max(0.0, end_s - time.monotonic())
            answers = self.answers.take(min(left_s, max(next_s, 0.001)))
            if answers or time.monotonic() >= end_s:
                return answers

    def claim(self, item: Item) -> memoryview | None:
        """The memory of an item, as bytes, for the caller alone; None if the item was answered.

        Until the caller answers the item, or lets go of it, nobody else answers it: so do nothing
        meanwhile that may take long.
        """
        with self._changed:
            item.claimed = item.memory is not None
            return item.memory.cast("B") if item.memory is not None else None

    def let_go(self, item: Item) -> None:
        """Ends a claim without an answer."""
        with self._changed:
            item.claimed = False
            if self._closed:
                self.answer(item, Outcome.FAILED, "closed")

    def answer(
        self,
        item: Item,
        outcome: Outcome,
        reason: str = "",
        info: FrameInfo | None = None,
        n_bytes: int = 0,
    ) -> None:
        """Answers an item, unless it was."""
        with self._changed:
            if item.done is None:
                seconds = (self._clock.now_ns() - item.start_ns) / 1e9
                item.done = Completion(
                    item.job, item.index, item.key, outcome, reason, info, n_bytes, seconds
                )
                item.memory = None
                if item.stores and item.hand is None:
                    self._waiting_bytes -= item.n_bytes
                self.answers.put([item.done])

    def cancel(self, job: int) -> None:
        """Answers what is left of a job, except what a thread has claimed."""
        self._give_up("cancelled", lambda item: item.job == job)

    def fail_waiting(self, reason: str) -> None:
        """Answers what no thread has begun."""
        self._give_up(reason, lambda item: item.hand is None)

    def close(self, timeout_s: float) -> bool:
        """Works off what is queued; whether all threads came to an end in time."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            threads = [hand.thread for hand in self._hands if hand.thread]
        end_s = time.monotonic() + timeout_s
        for thread in threads:
            while thread.is_alive() and (left_s := end_s - time.monotonic()) > 0:
                thread.join(min(left_s, max(self._expire(), 0.001)))
        with self._changed:
            self._closed = True
            self._give_up("closed", lambda item: True)
            for queue in (self._deadlines, self._loads, self._stores):
                queue.clear()
            self._changed.notify_all()
        self.answers.close()
        return not any(thread.is_alive() for thread in threads)

    def _give_up(self, reason: str, which: Callable[[Item], bool]) -> None:
        with self._changed:
            for _, _, item in self._deadlines:
                if which(item) and not item.claimed:
                    self.answer(item, Outcome.FAILED, reason)

    def _expire(self) -> float:
        """Fails overdue items; returns the seconds until the next deadline."""
        late, claimed = [], []
        with self._changed:
            now, queue = self._clock.now_ns(), self._deadlines
            while queue and (queue[0][0] <= now or queue[0][2].done):
                entry = heapq.heappop(queue)
                item = entry[2]
                if item.claimed and item.done is None:  # answered in a moment, or let go of
                    claimed.append(entry)
                elif item.done is None:
                    self.answer(item, Outcome.FAILED, "deadline")
                    if item.hand is not None:
                        late.append(item)
                        self._set_aside(item.hand)
            for entry in claimed:
                heapq.heappush(queue, entry)
            next_s = (queue[0][0] - now) / 1e9 if queue else _FOREVER_S
        if self._late:
            for item in late:
                self._late(item)
        return next_s

    def _set_aside(self, hand: Hand) -> None:
        """Does without a thread whose item was answered."""
        if not hand.overdue:
            overdue = sum(other.overdue for other in self._hands)
            hand.overdue = overdue < self._spares and not self._closing

    def _refill(self) -> None:
        """Starts a thread where one is missing and there is work; it starts the next one.

        Not while overdue items are answered: to start a thread takes longer than all the rest.
        """
        with self._changed:
            hands = sum(not hand.overdue for hand in self._hands)
            if hands < self._threads and (self._loads or self._stores) and not self._closing:
                hand = Hand(stores_first=hands == self._threads - 1)
                hand.thread = threading.Thread(
                    target=self._run, args=(hand,), name=f"flowkv {self._name}", daemon=True
                )
                self._hands.append(hand)
                hand.thread.start()

    def _run(self, hand: Hand) -> None:
        """The life of a thread, which never dies with an item in its hands."""
        self._refill()
        while item := self._next(hand):
            reason = "unanswered"
            try:
                self._work(item)
            except MemoryError:
                reason = "memory"
            except BaseException as error:  # libraries in other languages panic with one
                reason = f"{type(error).__name__}: {error}"
            self.answer(item, Outcome.FAILED, reason)

    def _next(self, hand: Hand) -> Item | None:
        """What to do next, not answered; nothing when it is time to end."""
        with self._changed:
            if self._closing or (hand.item is not None and hand.item.stores):
                self._changed.notify_all()  # others may wait for the end of this store, or all
            hand.item = None
            while not hand.overdue:  # else another one has taken its place
                self._expire()
                if (item := self._take(hand)) is not None:
                    return item
                if self._closing and not (self._loads or self._stores):
                    break
                self._changed.wait()
            self._hands.remove(hand)
            return None

    def _take(self, hand: Hand) -> Item | None:
        """Takes the first item out of a queue that is not answered and may be begun.

        A store waits for the end of one of the same key, and is then done in its turn, which costs
        nothing if the frame is there: it may have been deleted again since, so the answer of the
        first is not that of the second.
        """
        storing = {other.item.key for other in self._hands if other.item and other.item.stores}
        queues = [self._loads, self._stores]
        if len(storing) >= (self._storing or len(self._hands)):
            queues.pop()
        for queue in reversed(queues) if hand.stores_first else queues:
            while queue and queue[0].done:
                queue.popleft()
            for number, item in enumerate(queue):
                if item.done is None and not (item.stores and item.key in storing):
                    del queue[number]
                    self._waiting_bytes -= item.n_bytes if item.stores else 0
                    hand.item, item.hand = item, hand
                    return item
        return None
