"""Request queue of a tier: jobs are queued, worked off, and answered once before their deadline.

An item past its deadline is answered `FAILED` by the next poll, even while a thread is stuck with
it. A later result is dropped, because an item's memory is never given away, only lent: from `claim`
on no other answer can come, until the item is answered or released. So work that may take long must
copy first. Stores of one key run one after the other.

`Workers` serves such a queue with threads. Loads go before stores, except that one of the threads
looks at stores first. A thread with an overdue item may never return: it is set aside with its
staging memory, which is *retired* until the call returns (DESIGN D10), and replaced, as often as
`spares` allows. The queue of a disk is served by one scheduler instead (`tiers.disk.tier`).
"""

from __future__ import annotations

import heapq
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, NamedTuple, cast

import msgspec

from flowkv.core.clock import Clock
from flowkv.core.errors import StateError
from flowkv.core.memory import HUGE_BYTES, own_memory
from flowkv.core.reaper import begin
from flowkv.tiers.base import FrameInfo, Load, Outcome, Store, TierAnswer

# Answers of a tier until they are polled.


class Completions:
    """Thread-safe queue of answers, with a file descriptor for event loops.

    Attributes:
        new_job: Returns the next job number, from 1.
    """

    def __init__(self) -> None:
        self._ready: deque[TierAnswer] = deque()
        self._changed = threading.Condition()
        self._event_fd = -1
        self._closed = False
        self.new_job = itertools.count(1).__next__

    def post(self, answers: Iterable[TierAnswer]) -> None:
        """Add answers and wake the threads that poll."""
        with self._changed:
            before = len(self._ready)
            self._ready.extend(answers)
            if len(self._ready) > before:
                self._changed.notify_all()
                if self._event_fd >= 0:
                    os.eventfd_write(self._event_fd, 1)

    def poll(self, timeout_s: float = 0.0) -> list[TierAnswer]:
        """Take all answers there are; wait up to `timeout_s` for the first one, or for `close`."""
        with self._changed:
            if not self._ready and timeout_s > 0:
                before = self._closed
                self._changed.wait_for(lambda: self._ready or self._closed > before, timeout_s)
            answers = list(self._ready)
            self._ready.clear()
            if answers and self._event_fd >= 0:
                os.eventfd_read(self._event_fd)
            return answers

    def fileno(self) -> int:
        """Return an eventfd, readable while answers wait; made on first use, -1 after `close`."""
        with self._changed:
            if self._event_fd < 0 and not self._closed:
                waiting = 1 if self._ready else 0
                self._event_fd = os.eventfd(waiting, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            return self._event_fd

    def close(self) -> None:
        """Close the eventfd for good; answers can still be taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            if self._event_fd >= 0:
                os.close(self._event_fd)
                self._event_fd = -1


# Base of tiers.


class Handle:
    """Base of tiers: their answers, for the process that opened them, until they are closed.

    Compiled code makes all digests from then on: numpy takes thirty times as long.

    Args:
        name: Shown in statistics.
        answers: The answers, until they are polled.
    """

    _remedy = "Open another one, here"

    def __init__(self, name: str, answers: Completions) -> None:
        from flowkv.compiled.digest import compile_digest  # imports numba

        compile_digest()
        self.name, self._answers = name, answers
        self._closed, self._pid = False, os.getpid()

    def submit_load(self, items: Sequence[Load], *, deadline_s: float = 10.0) -> int:
        """Start reading frames into their targets; return a job number.

        Raises:
            StateError: The tier is closed, or was opened before a fork.
        """
        return self._run(items, deadline_s)

    def submit_store(self, items: Sequence[Store], *, deadline_s: float = 60.0) -> int:
        """Start writing frames; return a job number.

        Raises:
            StateError: The tier is closed, or was opened before a fork.
        """
        return self._run(items, deadline_s)

    def poll(self, timeout_s: float = 0.0) -> list[TierAnswer]:
        """Return the answers that are ready; wait up to `timeout_s` for the first one."""
        return self._answers.poll(timeout_s) if self._pid == os.getpid() else []

    def fileno(self) -> int:
        """Return an eventfd that is readable while answers wait; -1 once closed.

        Only `poll` notices a passed deadline, so call it by then, even if the descriptor is not
        readable.
        """
        return self._answers.fileno()

    def _usable(self) -> bool:
        return not self._closed and self._pid == os.getpid()

    def _require_usable(self) -> None:
        if not self._usable():
            why = "is closed" if self._pid == os.getpid() else "was opened before a fork"
            raise StateError(f"tier {self.name!r} {why}", self._remedy)

    def _run(self, items: Sequence[Load] | Sequence[Store], deadline_s: float) -> int:
        raise NotImplementedError


# Requests on their way.

_FOREVER_S = 1e9
_NOTHING = memoryview(b"")


class Item(msgspec.Struct, eq=False):  # made without a call of Python
    """One request on its way. The answer drops the reference to its memory.

    Attributes:
        wish: The request, without its memory.
        stores: Whether it is a store.
        memory: Target or body until the item is answered; access it with `claim`.
        n_bytes: Length of the memory.
        readonly: Whether the memory cannot be written to.
        begun: Whether work on it has begun.
        claimed: Whether its memory is in use right now: too early to answer without it.
        done: The answer.
        hand: The thread that works on it.
        flight: Its operation under way on a disk.
        tries: How often that operation was restarted.
    """

    job: int
    index: int
    key: bytes
    wish: Load | Store
    memory: memoryview | None
    n_bytes: int
    readonly: bool
    stores: bool
    start_ns: int
    deadline_ns: int
    begun: bool = False
    claimed: bool = False
    done: TierAnswer | None = None
    hand: Hand | None = None
    flight: Any = None
    tries: int = 0


def _lent(wish: Load | Store) -> tuple[Load | Store, memoryview]:
    """Return a request without its memory, and that memory."""
    if isinstance(wish, Load):
        return Load(wish.key, _NOTHING, *wish[2:]), wish.target
    known = None if wish.digests is None else bytes(wish.digests)
    return wish._replace(body=_NOTHING, digests=known), wish.body


class ItemAnswer(NamedTuple):
    """Answer to an item."""

    item: Item
    outcome: Outcome
    reason: str = ""
    info: FrameInfo | None = None
    n_bytes: int = 0
    digests: bytes = b""


class RequestQueue:
    """Queue of items until they are answered. Thread-safe.

    Args:
        clock: Source of time.
        queue_bytes: Stores waiting beyond this are `FAILED` with reason "busy".
        forsake: Called with every store in progress, before it is answered without its result.

    Attributes:
        answers: The answers, until they are polled.
        closing: Whether the queue accepts no more items.
    """

    def __init__(
        self, clock: Clock, queue_bytes: int, forsake: Callable[[Item], None] | None = None
    ) -> None:
        self.answers, self.closing, self._closed = Completions(), False, False
        self._clock, self._queue_bytes, self._waiting_bytes = clock, queue_bytes, 0
        self._forsake = forsake
        self._changed = threading.Condition()
        self._loads: deque[Item] = deque()
        self._stores: deque[Item] = deque()
        self._storing: set[bytes] = set()  # keys of stores in progress
        self._deadlines: list[tuple[int, int, list[Item]]] = []  # (deadline, job, items)
        self._given_up: list[Item] = []

    def submit(self, wishes: Sequence[Load] | Sequence[Store], deadline_s: float) -> int:
        """Queue the items of a job; return its number."""
        job, now, items = self.answers.new_job(), self._clock.now_ns(), list[Item]()
        times = now, now + round(min(deadline_s, _FOREVER_S) * 1e9)
        for index, one in enumerate(cast(Sequence[Load | Store], wishes)):
            wish, memory = _lent(one)
            n_bytes, readonly, stores = memory.nbytes, memory.readonly, isinstance(wish, Store)
            if n_bytes and memory.c_contiguous:
                memory = memory.cast("B")
            which = job, index, wish.key, wish
            items.append(Item(*which, memory, n_bytes, readonly, stores, *times))
        with self._changed:
            heapq.heappush(self._deadlines, (times[1], job, [*items]))
            loads = not (items and items[0].stores)
            if loads and not self.closing:
                self._loads += items
                items = []
            for item in items:
                self._waiting_bytes += item.n_bytes * item.stores
                if self.closing:
                    self.answer(item, Outcome.FAILED, "closed")
                elif self._stores and self._waiting_bytes > self._queue_bytes:
                    self.answer(item, Outcome.FAILED, "busy")
                else:
                    self._stores.append(item)
            self._changed.notify_all()
        return job

    def poll(self, timeout_s: float) -> list[TierAnswer]:
        """Return the answers that are ready, including those of items past their deadline."""
        end_s = time.monotonic() + timeout_s
        while True:
            next_s = self.expire()
            left_s = max(0.0, end_s - time.monotonic())
            answers = self.answers.poll(min(left_s, max(next_s, 0.001)))
            if answers or time.monotonic() >= end_s:
                return answers

    # --- for the workers -----------------------------------------------------------------------

    def wait(self, timeout_s: float) -> None:
        """Wait until an item is queued, or the queue is closing."""
        with self._changed:
            if not (self._loads or self._stores or self.closing):
                self._changed.wait(timeout_s)

    def shutdown(self) -> None:
        """Close the queue to new items; the workers end once all queued items are done."""
        with self._changed:
            self.closing = True
            self._changed.notify_all()

    def waiting(self) -> int:
        """Return an upper bound of the items not begun: some may be answered already."""
        return len(self._loads) + len(self._stores)

    @property
    def stores_wait(self) -> bool:
        """Return whether a store waits to begin."""
        return bool(self._stores)

    def begin(self, *, stores: bool) -> Item | None:
        """Take the first item that is not answered and may begin.

        A store waits for an earlier one of the same key, and then runs in its turn, which costs
        nothing if the frame is there: the frame may have been deleted since, so the first answer
        does not hold for the second.
        """
        with self._changed:
            queue = self._stores if stores else self._loads
            while queue and queue[0].done:
                queue.popleft()
            for number, item in enumerate(queue):
                if item.done is None and not (stores and item.key in self._storing):
                    del queue[number]
                    item.begun = True
                    if stores:
                        self._waiting_bytes -= item.n_bytes
                        self._storing.add(item.key)
                    return item
            return None

    def begin_loads(self, known: Container[bytes], most_bytes: int) -> list[Item]:
        """Take the first loads that are not answered, while their keys are known.

        Args:
            known: The keys that may be taken, such as those with known digests.
            most_bytes: Most bytes of their memory; the last one may go beyond.
        """
        found, n_bytes = list[Item](), 0
        with self._changed:
            while self._loads and n_bytes < most_bytes:
                item = self._loads[0]
                if item.done is None and item.key not in known:
                    break
                self._loads.popleft()
                if item.done is None:
                    item.begun = True
                    found.append(item)
                    n_bytes += item.n_bytes
        return found

    def put_back(self, item: Item) -> None:
        """Return an item to the head of its queue: it cannot begin yet, or must begin anew."""
        with self._changed:
            item.begun = item.claimed = False
            if item.stores:
                self._storing.discard(item.key)
            if item.done is None:
                self._waiting_bytes += item.n_bytes if item.stores else 0
                if self._closed:
                    self.answer(item, Outcome.FAILED, "closed")
                    return
                (self._stores if item.stores else self._loads).appendleft(item)

    def end_store(self, item: Item) -> None:
        """End a store that was begun, so that the next one of its key can begin."""
        with self._changed:
            self._storing.discard(item.key)
            self._changed.notify_all()

    def claim(self, item: Item) -> memoryview | None:
        """Return the memory of an item, for the caller alone; None if the item was answered.

        Until the caller answers the item, or releases it, no other answer can come: so do nothing
        meanwhile that may take long.
        """
        with self._changed:
            item.claimed = item.memory is not None
            return item.memory

    def claim_all(self, items: Iterable[Item]) -> list[memoryview | None]:
        """Claim many items; return their memory, None for answered ones."""
        with self._changed:
            return [self.claim(item) for item in items]

    def unclaim(self, item: Item) -> None:
        """End a claim without an answer."""
        with self._changed:
            item.claimed = False
            if self._closed:
                self.answer(item, Outcome.FAILED, "closed")

    def answer(self, item: Item, outcome: Outcome, reason: str = "") -> None:
        """Answer an item, unless it has an answer."""
        self.answer_all([ItemAnswer(item, outcome, reason)])

    def answer_all(self, answers: Iterable[ItemAnswer]) -> None:
        """Answer those items that have no answer yet."""
        with self._changed:
            now, done = self._clock.now_ns(), []
            for item, outcome, reason, info, n_bytes, known in answers:
                if item.done is None:
                    asked, seconds = (item.job, item.index, item.key), (now - item.start_ns) / 1e9
                    item.done = TierAnswer(*asked, outcome, reason, info, n_bytes, seconds, known)
                    item.memory = None
                    if item.stores and not item.begun:
                        self._waiting_bytes -= item.n_bytes
                    done.append(item.done)
            self.answers.post(done)

    def given_up(self) -> list[Item]:
        """Take the begun items that were answered without their result since the last call."""
        if not self._given_up:
            return []
        with self._changed:
            items, self._given_up = self._given_up, []
            return items

    # --- ends ----------------------------------------------------------------------------------

    def expire(self) -> float:
        """Fail overdue items; return the seconds until the next deadline."""
        with self._changed:
            now, queue, claimed = self._clock.now_ns(), self._deadlines, []
            while queue:
                deadline_ns, job, items = queue[0]
                while items and items[-1].done:
                    items.pop()
                if items and deadline_ns > now:
                    break
                heapq.heappop(queue)
                for item in items:
                    if not item.claimed:  # a claimed item is answered or released in a moment
                        self._give_up(item, "deadline")
                if left := [item for item in items if item.done is None]:
                    claimed.append((deadline_ns, job, left))
            for entry in claimed:
                heapq.heappush(queue, entry)
            return (queue[0][0] - now) / 1e9 if queue else _FOREVER_S

    def cancel(self, job: int) -> None:
        """Answer the rest of a job, except items with their memory in use."""
        self._give_up_all("cancelled", lambda item: item.job == job)

    def fail_waiting(self, reason: str) -> None:
        """Fail all items that were not begun."""
        self._give_up_all(reason, lambda item: not item.begun)

    def fail_rest(self) -> None:
        """Fail all remaining items except claimed ones, which fail on release; close for good."""
        with self._changed:
            self._closed = True
            self._give_up_all("closed", lambda item: True)
            for queue in (self._deadlines, self._loads, self._stores):
                queue.clear()
            self._changed.notify_all()
        self.answers.close()

    def _give_up_all(self, reason: str, which: Callable[[Item], bool]) -> None:
        with self._changed:
            for item in itertools.chain.from_iterable(items for _, _, items in self._deadlines):
                if which(item) and not item.claimed:
                    self._give_up(item, reason)

    def _give_up(self, item: Item, reason: str) -> None:
        if item.done is None:
            if item.begun and item.stores and self._forsake is not None:
                self._forsake(item)
            self.answer(item, Outcome.FAILED, reason)
            if item.begun:
                self._given_up.append(item)


# Queue served by threads.


class ThreadMemory:
    """Staging memory of one thread, as large as its largest frame so far."""

    def __init__(self) -> None:
        self._view = memoryview(b"")

    @property
    def n_bytes(self) -> int:
        """Return the current size in bytes."""
        return len(self._view)

    def give_up(self) -> None:
        """Abandon the memory, which may still be read or written; allocate anew on next use."""
        self._view = memoryview(b"")

    def __call__(self, n_bytes: int) -> memoryview:
        """Return writable, page-aligned memory with undefined content."""
        if len(self._view) < n_bytes:
            self._view = own_memory(max(HUGE_BYTES, 1 << (n_bytes - 1).bit_length()))
        return self._view[:n_bytes]


class Hand:
    """One worker thread, with its current item and its staging memory."""

    def __init__(self, stores_first: bool) -> None:
        self.stores_first, self.staging = stores_first, ThreadMemory()
        self.item: Item | None = None
        self.overdue = False  # its item was answered without its result
        self.thread: threading.Thread | None = None


class Workers(RequestQueue):
    """Request queue with threads that serve loads and stores.

    Args:
        name: Name of the threads.
        work: Does one item and answers it; `item.hand` has memory for it.
        clock: Source of time.
        threads: Number of threads; they start with the first item.
        queue_bytes: Stores waiting beyond this are `FAILED` with reason "busy".
        spares: Most threads that are replaced while they are overdue.
        storing: Most threads that store at a time, so that loads find one free; 0 for all.
        late: Called with every item in progress at its deadline.
        forsake: Called with every store in progress, before it is answered without its result.
    """

    def __init__(  # noqa: PLR0913 - each is a property of the queue
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
        forsake: Callable[[Item], None] | None = None,
    ) -> None:
        super().__init__(clock, queue_bytes, forsake)
        self._name, self._work, self._late = name, work, late
        self._threads, self._spares, self._most_storing = threads, spares, storing
        self._hands: list[Hand] = []

    @property
    def retired_bytes(self) -> int:
        """Return the bytes of staging memory of overdue threads."""
        with self._changed:
            return sum(hand.staging.n_bytes for hand in self._hands if hand.overdue)

    def submit(self, wishes: Sequence[Load] | Sequence[Store], deadline_s: float) -> int:
        """Queue the items of a job; return its number."""
        job = super().submit(wishes, deadline_s)
        self._refill()
        return job

    def start(self) -> None:
        """Start a thread if there is none: at the end of the process none can be started."""
        with self._changed:
            if not self._hands and not self.closing:
                self._hire()

    def expire(self) -> float:
        """Fail overdue items, and set aside the threads stuck with them."""
        self._refill()
        next_s = super().expire()
        for item in self.given_up():
            if item.done is not None and item.done.reason == "deadline" and item.hand is not None:
                with self._changed:
                    stuck = sum(hand.overdue for hand in self._hands)
                    spare = not self.closing and stuck < self._spares
                    item.hand.overdue |= spare and item.hand.item is item
                if self._late is not None:
                    self._late(item)
        return next_s

    def close(self, timeout_s: float) -> bool:
        """Work off all queued items; return whether all threads ended in time."""
        self.shutdown()
        with self._changed:
            threads = [hand.thread for hand in self._hands if hand.thread]
        end_s = time.monotonic() + timeout_s
        for thread in threads:
            while thread.is_alive() and (left_s := end_s - time.monotonic()) > 0:
                thread.join(min(left_s, max(self.expire(), 0.001)))
        self.fail_rest()
        return not any(thread.is_alive() for thread in threads)

    def _refill(self) -> None:
        """Start a thread if one is missing and there is work; that thread starts the next one.

        It is not called while overdue items are answered: starting a thread takes longer than all
        the rest.
        """
        with self._changed:
            hands = sum(not hand.overdue for hand in self._hands)
            if hands < self._threads and (self._loads or self._stores) and not self.closing:
                self._hire(stores_first=hands == self._threads - 1)

    def _hire(self, *, stores_first: bool = False) -> None:
        hand = Hand(stores_first)
        self._hands.append(hand)
        hand.thread = begin(self._run, hand, name=f"flowkv {self._name}")
        if hand.thread is None:
            self._hands.remove(hand)
            if all(other.overdue for other in self._hands):
                self.fail_waiting("memory")

    def _run(self, hand: Hand) -> None:
        """Serve items until the queue closes; no error leaves an item unanswered."""
        while item := self._next(hand):
            reason = "unanswered"
            try:
                self._work(item)
            except MemoryError:
                reason = "memory"
            # libraries in other languages panic with a BaseException
            except BaseException as error:
                reason = f"{type(error).__name__}: {error}"
            self.answer(item, Outcome.FAILED, reason)

    def _next(self, hand: Hand) -> Item | None:
        """Return the next unanswered item; None when the thread is to end."""
        with self._changed:
            if hand.item is not None and hand.item.stores:
                self.end_store(hand.item)
            elif self.closing:
                self._changed.notify_all()  # others may wait for the end of all threads
            hand.item = None
            while not hand.overdue:  # an overdue thread has been replaced
                self.expire()
                if (item := self._take(hand)) is not None:
                    return item
                if self.closing and not (self._loads or self._stores):
                    break
                self._changed.wait()
            self._hands.remove(hand)
            return None

    def _take(self, hand: Hand) -> Item | None:
        kinds = [False, True]  # whether to take stores
        if len(self._storing) >= (self._most_storing or len(self._hands)):
            kinds.pop()
        for stores in reversed(kinds) if hand.stores_first else kinds:
            if (item := self.begin(stores=stores)) is not None:
                hand.item, item.hand = item, hand
                return item
        return None
