"""Jobs of a tier: queued, worked off by threads, answered once and before their deadline.

Loads go before stores, except that one of the threads looks at stores first. An item whose deadline
passes is answered `FAILED` by whoever polls, even while a thread is stuck with it; what that thread
brings later is dropped, because it must `claim` an item before it touches the item's memory again.
"""

from __future__ import annotations

import heapq
import itertools
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

from flowkv.core.clock import Clock
from flowkv.tiers.base import Completion, FrameInfo, Load, Outcome, Store
from flowkv.tiers.completions import Completions

_FOREVER_S = 1e9


class Item:
    """One wish on its way; `wish` is let go of with the answer."""

    __slots__ = (
        *("claimed", "deadline_ns", "done", "index", "job", "key"),
        *("n_bytes", "start_ns", "stores", "wish"),
    )

    def __init__(self, job: int, index: int, wish: Load | Store, times_ns: tuple[int, int]) -> None:
        self.job, self.index, self.key = job, index, wish.key
        self.wish: Load | Store | None = wish
        self.stores = isinstance(wish, Store)
        self.n_bytes = (wish.target if isinstance(wish, Load) else wish.body).nbytes
        self.start_ns, self.deadline_ns = times_ns
        self.done: Completion | None = None
        self.claimed = False  # a thread is about to answer: too late to expire


class Staging:
    """Memory of one thread, as large as the largest frame it met."""

    def __init__(self) -> None:
        self._view = memoryview(b"")

    def __call__(self, n_bytes: int) -> memoryview:
        """Writable, page-aligned memory; what was there before is overwritten."""
        if len(self._view) < n_bytes:
            block = mmap.mmap(-1, 1 << max(20, (n_bytes - 1).bit_length()))
            if hasattr(mmap, "MADV_HUGEPAGE"):
                block.madvise(mmap.MADV_HUGEPAGE)
            self._view = memoryview(block)
        return self._view[:n_bytes]


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
    """

    def __init__(
        self,
        name: str,
        load: Callable[[Item, Staging], None],
        store: Callable[[list[Item]], None],
        clock: Clock,
        *,
        threads: int,
        batch: int,
        queue_bytes: int,
    ) -> None:
        self.answers = Completions()
        self._name, self._load, self._store, self._clock = name, load, store, clock
        self._threads_wanted, self._batch, self._queue_bytes = threads, batch, queue_bytes
        self._changed = threading.Condition()
        self._loads: deque[Item] = deque()
        self._stores: deque[Item] = deque()
        self._waiting_bytes = 0
        self._followers: dict[bytes, list[Item]] = {}
        self._deadlines: list[tuple[int, int, Item]] = []
        self._ticket = itertools.count()
        self._threads: list[threading.Thread] = []
        self._closing = False

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
            while len(self._threads) < self._threads_wanted:
                arguments = (len(self._threads) == self._threads_wanted - 1,)
                thread = threading.Thread(
                    target=self._run, args=arguments, name=f"flowkv {self._name}", daemon=True
                )
                self._threads.append(thread)
                thread.start()
            self._changed.notify_all()
        return job

    def poll(self, timeout_s: float) -> list[Completion]:
        """Answers that are ready, those of items whose deadline has passed among them."""
        end_s = time.monotonic() + timeout_s
        while True:
            next_s = self._expire()
            left_s = max(0.0, end_s - time.monotonic())
            answers = self.answers.take(min(left_s, max(next_s, 0.001)))
            if answers or time.monotonic() >= end_s:
                return answers

    def claim(self, item: Item) -> bool:
        """Whether an item still waits for its answer; if so, only the caller may give it."""
        with self._changed:
            item.claimed = item.done is None
            return item.claimed

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
                item.wish = None
                self.answers.put([item.done])

    def cancel(self, job: int) -> None:
        """Answers what is left of a job, except what a thread is about to answer."""
        with self._changed:
            for _, _, item in self._deadlines:
                if item.job == job and not item.claimed:
                    self.answer(item, Outcome.FAILED, "cancelled")

    def close(self, timeout_s: float) -> bool:
        """Works off what is queued; whether all threads came to an end in time."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        end_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        with self._changed:
            for _, _, item in self._deadlines:
                self.answer(item, Outcome.FAILED, "closed")
            self._deadlines.clear()
        return not any(thread.is_alive() for thread in self._threads)

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
        with self._changed:
            now, queue = self._clock.now_ns(), self._deadlines
            while queue and (queue[0][0] <= now or queue[0][2].done):
                item = heapq.heappop(queue)[2]
                if not item.claimed:
                    self.answer(item, Outcome.FAILED, "deadline")
            return (queue[0][0] - now) / 1e9 if queue else _FOREVER_S

    def _run(self, stores_first: bool) -> None:
        staging = Staging()
        while batch := self._next(stores_first):
            if batch[0].stores:
                self._guarded(batch, lambda: self._store(batch))
                self._end_stores(batch)
            else:
                self._guarded(batch, lambda: self._load(batch[0], staging))

    def _next(self, stores_first: bool) -> list[Item]:
        """What to do next, none of it answered; nothing when it is time to end."""
        with self._changed:
            while True:
                queues = (
                    (self._stores, self._loads) if stores_first else (self._loads, self._stores)
                )
                queue = queues[0] or queues[1]
                if not queue:
                    if self._closing:
                        return []
                    self._changed.wait()
                    continue
                count = 1 if queue is self._loads else self._batch
                self._expire()
                batch = [self._pop(queue) for _ in range(min(count, len(queue)))]
                if batch := [item for item in batch if item.done is None]:
                    return batch

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

    def _guarded(self, batch: list[Item], work: Callable[[], None]) -> None:
        """A thread never dies with items in its hands."""
        reason = "unanswered"
        try:
            work()
        except MemoryError:
            reason = "memory"
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        for item in batch:
            self.answer(item, Outcome.FAILED, reason)
