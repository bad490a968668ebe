"""Jobs of a tier: queued, worked off by threads, answered once and before their deadline.

Loads go before stores, except that one of the threads looks at stores first. An item whose deadline
passes is answered `FAILED` by whoever polls, even while a thread is stuck with it. What that thread
brings later is dropped, because it is never given an item's memory, only lent it: the target of a
load by `claim`, after which no other answer can come, and the body of a store inside `body`, until
the end of which the answer waits. So work that may take long has no other way than to copy first.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, cast

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
                end = time.monotonic() + timeout_s
                while not self._ready and (left := end - time.monotonic()) > 0:
                    self._changed.wait(left)
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
        n_bytes: Length of the memory.
        readonly: Whether the memory cannot be written to.
        done: The answer.
        hand: Who works on it.
    """

    __slots__ = (
        *("claimed", "deadline_ns", "done", "hand", "index", "job", "key", "lent", "memory"),
        *("n_bytes", "overtaken", "readonly", "start_ns", "stores", "wish"),
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
        self.claimed = False  # a thread is about to answer: too late to expire
        self.lent = False  # a thread reads the body right now
        self.overtaken = ""  # what happened meanwhile: the answer, once it is read


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
        self.batch: list[Item] = []
        self.overdue = False  # all it works on was answered without it
        self.thread: threading.Thread | None = None


class Patience(NamedTuple):
    """What is done about work that hangs.

    Attributes:
        spares: Most threads that are replaced while they are overdue.
        storing: Most threads that store at a time, so that loads find one free; 0 for all.
        late: Told of every item that a thread works on when its deadline passes.
    """

    spares: int = 0
    storing: int = 0
    late: Callable[[Item], None] | None = None


class Workers:
    """Threads that work off loads and stores.

    Args:
        name: Of the threads.
        load: Does one load and answers it.
        store: Does a batch of stores and answers each.
        clock: Source of time.
        threads: Their number; they start with the first item.
        batch: Most stores that are given to `store` at once.
        queue_bytes: Stores waiting beyond this are `FAILED` with reason "busy".
        patience: What is done about work that hangs; by default nothing.
    """

    def __init__(
        self,
        name: str,
        load: Callable[[Item, ThreadMemory], None],
        store: Callable[[list[Item]], None],
        clock: Clock,
        *,
        threads: int,
        batch: int,
        queue_bytes: int,
        patience: Patience | None = None,
    ) -> None:
        self.answers = Completions()
        self._name, self._load, self._store, self._clock = name, load, store, clock
        self._threads_wanted, self._batch, self._queue_bytes = threads, batch, queue_bytes
        self._patience = patience or Patience()
        self._changed = threading.Condition()
        self._loads: deque[Item] = deque()
        self._stores: deque[Item] = deque()
        self._waiting_bytes = 0
        self._followers: dict[bytes, list[Item]] = {}
        self._deadlines: list[tuple[int, int, Item]] = []
        self._ticket = itertools.count()
        self._hands: list[Hand] = []
        self._closing = False

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
                heapq.heappush(self._deadlines, (item.deadline_ns, next(self._ticket), item))
                if isinstance(wish, Load):
                    self._loads.append(item)
                else:
                    self._queue_store(item)
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
        """The memory of an item that only the caller may answer from now on; None if it was."""
        with self._changed:
            item.claimed = item.done is None
            return item.memory.cast("B") if item.memory is not None else None

    def let_go(self, item: Item) -> None:
        """Ends a claim without an answer."""
        with self._changed:
            item.claimed = False

    @contextmanager
    def body(self, item: Item) -> Iterator[memoryview | None]:
        """Lends the body of a store, as bytes; None if the item was answered.

        The item is not answered before this ends, so do nothing here that may take long.
        """
        with self._changed:
            memory = item.memory
            item.lent = memory is not None
        try:
            yield memory.cast("B") if memory is not None else None
        finally:
            with self._changed:
                item.lent = False
                if item.overtaken:
                    self.answer(item, Outcome.FAILED, item.overtaken)

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
                self.answers.put([item.done])

    def cancel(self, job: int) -> None:
        """Answers what is left of a job, except what a thread is about to answer."""
        with self._changed:
            for _, _, item in self._deadlines:
                if item.job == job:
                    self._overtake(item, "cancelled")

    def fail_waiting(self, reason: str) -> None:
        """Answers what no thread has begun."""
        with self._changed:
            for _, _, item in self._deadlines:
                if item.hand is None:
                    self._overtake(item, reason)

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
            for _, _, item in self._deadlines:
                self._overtake(item, "closed")
            self._deadlines.clear()
        self.answers.close()
        return not any(thread.is_alive() for thread in threads)

    def _overtake(self, item: Item, reason: str) -> None:
        """Fails an item that nobody is about to answer; one whose body is read, right after."""
        if item.lent:
            item.overtaken = item.overtaken or reason
        elif not item.claimed:
            self.answer(item, Outcome.FAILED, reason)

    def _queue_store(self, item: Item) -> None:
        followers = self._followers.get(item.key)
        if followers is not None:  # the key is on its way already: wait for that
            followers.append(item)
        elif self._stores and self._waiting_bytes + item.n_bytes > self._queue_bytes:
            self.answer(item, Outcome.FAILED, "busy")
        else:
            self._followers[item.key] = []
            self._waiting_bytes += item.n_bytes
            self._stores.append(item)

    def _expire(self) -> float:
        """Fails overdue items; returns the seconds until the next deadline."""
        late = []
        with self._changed:
            now, queue = self._clock.now_ns(), self._deadlines
            while queue and (queue[0][0] <= now or queue[0][2].done):
                item = heapq.heappop(queue)[2]
                if item.done is None:
                    self._overtake(item, "deadline")
                    if item.hand is not None:
                        late.append(item)
                        self._set_aside(item.hand)
            next_s = (queue[0][0] - now) / 1e9 if queue else _FOREVER_S
        if self._patience.late:
            for item in late:
                self._patience.late(item)
        return next_s

    def _set_aside(self, hand: Hand) -> None:
        """Does without a thread that is left with nothing but answered items."""
        if not hand.overdue and all(item.done for item in hand.batch):
            overdue = sum(other.overdue for other in self._hands)
            hand.overdue = overdue < self._patience.spares and not self._closing

    def _refill(self) -> None:
        """Starts a thread where one is missing and there is work; it starts the next one.

        Not while overdue items are answered: to start a thread takes longer than all the rest.
        """
        with self._changed:
            hands = sum(not hand.overdue for hand in self._hands)
            if hands < self._threads_wanted and (self._loads or self._stores) and not self._closing:
                hand = Hand(stores_first=hands == self._threads_wanted - 1)
                hand.thread = threading.Thread(
                    target=self._run, args=(hand,), name=f"flowkv {self._name}", daemon=True
                )
                self._hands.append(hand)
                hand.thread.start()

    def _run(self, hand: Hand) -> None:
        self._refill()
        while batch := self._next(hand):
            if batch[0].stores:
                self._guarded(batch, lambda: self._store(batch))
                self._end_stores(batch)
            else:
                self._guarded(batch, lambda: self._load(batch[0], hand.staging))

    def _next(self, hand: Hand) -> list[Item]:
        """What to do next, none of it answered; nothing when it is time to end."""
        with self._changed:
            hand.batch = []
            while not hand.overdue:  # else another one has taken its place
                queue = self._queue_for(hand)
                if queue is None:
                    if self._closing:
                        break
                    self._changed.wait()
                    continue
                count = 1 if queue is self._loads else self._batch
                self._expire()
                batch = [self._pop(queue) for _ in range(min(count, len(queue)))]
                if batch := [item for item in batch if item.done is None]:
                    hand.batch = batch
                    for item in batch:
                        item.hand = hand
                    return batch
            self._hands.remove(hand)
            return []

    def _queue_for(self, hand: Hand) -> deque[Item] | None:
        storing = sum(bool(other.batch) and other.batch[0].stores for other in self._hands)
        most = self._patience.storing or len(self._hands)
        stores = self._stores if storing < most else None
        if hand.stores_first:
            return stores or self._loads or None
        return self._loads or stores or None

    def _pop(self, queue: deque[Item]) -> Item:
        item = queue.popleft()
        if queue is self._stores:
            self._waiting_bytes -= item.n_bytes
            followers = self._followers[item.key]
            while item.done and followers:
                item = followers.pop(0)
            if item.done:
                del self._followers[item.key]
        return item

    def _end_stores(self, batch: list[Item]) -> None:
        # Followers are stored in their turn, which costs nothing if the frame is there: it may have
        # been deleted again since, so the answer of the first is not theirs.
        with self._changed:
            for item in batch:
                followers = self._followers.pop(item.key)
                if followers:
                    first, *self._followers[item.key] = followers
                    self._waiting_bytes += first.n_bytes
                    self._stores.appendleft(first)
            self._changed.notify_all()

    def _guarded(self, batch: list[Item], work: Callable[[], None]) -> None:
        """A thread never dies with items in its hands."""
        reason = "unanswered"
        try:
            work()
        except MemoryError:
            reason = "memory"
        except BaseException as error:  # libraries in other languages panic with one
            reason = f"{type(error).__name__}: {error}"
        for item in batch:
            self.answer(item, Outcome.FAILED, reason)
