"""The transfer scheduler: moves bytes between pages and tiers, what is waited for first.

One `Lane` per tier sends what its `Schedule` allows: demands, prefetches, then write-backs, with
bounded bytes in flight. A load of a frame that is just being stored takes it from memory.

A buffer given to a tier stays untouchable until the tier has answered, however late: a tag cannot
stop a DMA or a read that is under way (DESIGN D10).
"""

from __future__ import annotations

import select
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum, IntEnum
from functools import partial
from typing import NamedTuple, Protocol, cast

from flowkv.core import compiling
from flowkv.core.errors import FlowKVError
from flowkv.policy.prefetch.prefetcher import RegretGuard
from flowkv.policy.restore.costs import Rates
from flowkv.tiers.base import FrameInfo, Load, Outcome, Store, Tier, TierAnswer
from flowkv.tiers.frame import BadFrame, wanted

# In what order a tier is asked for what, and for how much at a time.
#
# Pure bookkeeping: neither tiers, threads nor time, so that tests drive it on a clock of their own.
#
# - A *demand* is what somebody waits for. It goes first, and its bytes in flight have a limit that
#   nothing else uses up.
# - *Prefetches* go before *write-backs*; both together have a second, smaller limit, and wait
#   while a demand is queued or in flight. Prefetches go in *chunks*: a demand finds one in flight
#   at most.
# - Yet write-back has a fair share: for every eight bytes of others, one of its own goes ahead of
#   them, or pages could never leave a busy device. Only demands earn it a place before a demand.
# - A frame is loaded once, whoever asks for it meanwhile, and stored once.

Done = Callable[[TierAnswer], object]
SHARE = 8
"""Of so many bytes, one is write-back's, however much is demanded."""


class CopyMark(Protocol):
    """A place in the order of a device's copies."""

    def done(self) -> bool:
        """Return whether all copies before it are over."""
        ...

    def wait(self, timeout_s: float = ...) -> bool:
        """Return once they are, or when the time is over; whether they are."""
        ...


class IOPriority(IntEnum):
    """Priorities of requests; the lowest goes first."""

    DEMAND = 0
    PREFETCH = 1
    WRITE_BACK = 2


class SubmitResult(Enum):
    """What became of a request."""

    QUEUED = "queued"
    JOINED = "joined"
    REFUSED = "refused"


class TransferRequest:
    """One load or store on its way.

    Args:
        item: What a tier is asked.
        done: Called with the answer.
        priority: Who waits for it.
        owner: Requests of one owner are cancelled together; None for those that never are.
        mark: The copy that fills the body of a store; None for a body that is there.

    Attributes:
        items: What a tier is asked, as a sequence.
        n_bytes: Bytes of its target or body.
        alike: Equal for requests that one answer may serve, if it spans theirs.
        span: First byte and end of what is loaded, within the body; 0 and 0 of a store.
        stores: Whether it is a store.
        demanded: Whether it was a demand from the first.
        flying: The tier has it, and owes the answer.
        ended: It was answered.
        followers: Requests for the same, answered with it.
        leader: The request that it follows.
    """

    __slots__ = (
        *("alike", "demanded", "done", "ended", "flying", "followers", "items", "leader"),
        *("mark", "n_bytes", "owner", "priority", "span", "stores"),
    )
    items: Sequence[Load | Store]

    def __init__(
        self,
        item: Load | Store,
        done: Done,
        priority: IOPriority,
        owner: object = None,
        mark: CopyMark | None = None,
    ) -> None:
        self.items, self.done, self.priority, self.owner = (item,), done, priority, owner
        self.mark = mark
        self.demanded = priority is IOPriority.DEMAND
        self.span, self.alike = (0, 0), cast(tuple[object, ...], (item.key,))
        self.stores = isinstance(item, Store)
        if isinstance(item, Load):
            self.n_bytes, self.alike = item.target.nbytes, (item.key, item.layout, item.fidelity)
            if item.target.readonly:  # lent: no answer to another load is copied there
                self.alike = (id(self),)
            first = item.first * (self.n_bytes // item.stripes) if item.stripes else 0
            self.span = first, first + self.n_bytes
        else:
            self.n_bytes = item.body.nbytes
        self.flying = self.ended = False
        self.followers: tuple[TransferRequest, ...] = ()
        self.leader: TransferRequest | None = None

    @property
    def item(self) -> Load | Store:
        """What a tier is asked; of several loads the first."""
        return self.items[0]

    @property
    def copying(self) -> bool:
        """Whether the body is still on its way from a device."""
        if self.mark is not None and self.mark.done():
            self.mark = None
        return self.mark is not None

    def serves(self, other: TransferRequest) -> bool:
        """Whether its answer would have all that another one of its kind wants."""
        if isinstance(other.item, Load) and other.item.stripes:
            return self.span[0] <= other.span[0] and other.span[1] <= self.span[1]
        return self.span == other.span

    def answers(self, item: int, answer: TierAnswer) -> bool:
        """A tier has answered one of the items; whether that was the last one."""
        return True

    def end(self, answer: TierAnswer) -> None:
        """It is over, and who asked is told."""
        self.flying, self.ended = False, True
        self.done(answer)


class TransferBatch(TransferRequest):
    """Loads that somebody waits for as a whole: queued, sent and answered as one.

    No other request joins them, or is joined by them.

    Args:
        items: What a tier is asked.
        done: Called once, with the answers in the order of the items.
        owner: As of one request.
    """

    __slots__ = ("_come", "_left")

    def __init__(
        self,
        items: Sequence[Load],
        done: Callable[[list[TierAnswer]], None],
        owner: object = None,
    ) -> None:
        super().__init__(items[0], cast(Done, done), IOPriority.DEMAND, owner)
        self.items, self.alike = items, (id(self),)
        self.n_bytes = sum(item.target.nbytes for item in items)
        self._come: list[TierAnswer | None] = [None] * len(items)
        self._left = len(items)

    def answers(self, item: int, answer: TierAnswer) -> bool:
        """A tier has answered one of the items; whether that was the last one."""
        self._come[item] = answer
        self._left -= 1
        return not self._left

    def end(self, answer: TierAnswer) -> None:
        """It is over, and who asked is told; `answer` is that of what was not answered."""
        self.flying, self.ended = False, True
        both = zip(self.items, self._come, strict=True)
        told = [one or answer._replace(key=item.key) for item, one in both]
        cast(Callable[[list[TierAnswer]], None], self.done)(told)


class Schedule:
    """The requests of one tier, and what waits for them.

    Args:
        demand_bytes: Most bytes of demands in flight; one alone may be larger.
        background_bytes: Most bytes of prefetches and write-backs in flight, likewise.
        queue_bytes: Most bytes of prefetches, and of write-backs, that wait; beyond that they are
            refused. Demands never are.
        chunk_bytes: Most bytes of prefetches in flight; one alone may be larger.

    Attributes:
        background_bytes: May be changed while transfers run.
        chunk_bytes: Likewise.
        joined: Requests that needed no transfer of their own.
        refused: Requests that found the queue full.
        barred: No write-back is sent now.
    """

    def __init__(
        self,
        demand_bytes: int = 1 << 28,
        background_bytes: int = 1 << 26,
        queue_bytes: int = 1 << 28,
        chunk_bytes: int = 1 << 22,
    ) -> None:
        self.demand_bytes, self.background_bytes = demand_bytes, background_bytes
        self.queue_bytes, self.chunk_bytes = queue_bytes, chunk_bytes
        self.joined = self.refused = 0
        self.barred = False
        self._queues: tuple[dict[TransferRequest, None], ...] = tuple({} for _ in IOPriority)
        self._queued_bytes = [0 for _ in IOPriority]
        self._flying: dict[TransferRequest, IOPriority] = {}
        self._flying_bytes = [0 for _ in IOPriority]
        self._leaders: dict[tuple[object, ...], list[TransferRequest]] = {}
        self._awaited: set[TransferRequest] = set()
        self._credit = [0.0 for _ in IOPriority]  # earned for write-back, by whom

    def __len__(self) -> int:
        """Requests that wait or are in flight, but for those that follow another."""
        return len(self._flying) + self.waiting

    @property
    def waiting(self) -> int:
        """Requests that wait to be sent."""
        return sum(map(len, self._queues))

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait to be sent."""
        return sum(self._queued_bytes)

    @property
    def flying_bytes(self) -> int:
        """Bytes in flight."""
        return sum(self._flying_bytes)

    @property
    def write_back(self) -> TransferRequest | None:
        """The next write-back, if any may be sent now."""
        return None if self.barred else next(iter(self._queues[IOPriority.WRITE_BACK]), None)

    def in_the_way(self) -> int:
        """Bytes of prefetches that a demand would find in flight; 0 if one has found them yet."""
        if self._queues[IOPriority.DEMAND] or self._demanding:
            return 0
        return self._flying_bytes[IOPriority.PREFETCH]

    def waits(self, priority: IOPriority) -> bool:
        """Whether any request of a kind waits to be sent."""
        return bool(self._queues[priority])

    def __iter__(self) -> Iterator[TransferRequest]:
        """All requests that wait or are in flight, but for those that follow another."""
        yield from self._flying
        for queue in self._queues:
            yield from queue

    def has_room(self, n_bytes: int, priority: IOPriority, ahead_bytes: int = 0) -> bool:
        """Whether a request for so many bytes would be taken, after others of `ahead_bytes`."""
        queued = self._queued_bytes[priority] + ahead_bytes
        return priority is IOPriority.DEMAND or not queued or queued + n_bytes <= self.queue_bytes

    def ask(self, request: TransferRequest) -> SubmitResult:
        """Takes a request, or lets it follow one for the same; refuses it if too much waits."""
        if self._joins(request):
            self.joined += 1
            return SubmitResult.JOINED
        if not self.has_room(request.n_bytes, request.priority):
            self.refused += 1
            return SubmitResult.REFUSED
        self._queue(request)
        return SubmitResult.QUEUED

    def take(self) -> list[TransferRequest]:
        """What is to be sent to the tier now, in this order; it is in flight from then on."""
        batch = []
        while (request := self._next()) is not None:
            self._unqueue(request)
            request.flying = True
            self._flying[request] = request.priority
            self._flying_bytes[request.priority] += request.n_bytes
            if request.priority is IOPriority.WRITE_BACK:
                self._spend(request.n_bytes)
            elif self._queues[IOPriority.WRITE_BACK]:
                self._credit[request.priority] += request.n_bytes / SHARE
            batch.append(request)
        return batch

    def end(self, request: TransferRequest) -> tuple[TransferRequest, ...]:
        """A request in flight was answered, or is overdue and waited for no longer.

        Returns those that followed it; whoever asks for the same begins anew.
        """
        self._land(request)
        return self._part(request)

    def withdraw(self, request: TransferRequest) -> bool:
        """Takes back a request that was not sent; False if it is in flight, or was answered."""
        if request.leader is not None:
            others = [one for one in request.leader.followers if one is not request]
            request.leader.followers, request.leader = tuple(others), None
            return True
        if request not in self._queues[request.priority]:
            return False
        self._unqueue(request)
        for follower in self._part(request):  # the first of them goes in its place
            if not self._joins(follower):
                self._queue(follower)
        return True

    def _joins(self, request: TransferRequest) -> bool:
        """Lets a request follow one that serves it, if there is any."""
        for leader in self._leaders.get(request.alike, ()):
            if leader.serves(request):
                request.leader = leader
                leader.followers += (request,)
                if request.priority < leader.priority:
                    self._hasten(leader, request.priority)
                return True
        return False

    def stand_alone(self, request: TransferRequest) -> None:
        """Lets nobody follow a request from now on."""
        leaders = self._leaders.get(request.alike, [])
        if request in leaders:
            leaders.remove(request)
        if not leaders:
            self._leaders.pop(request.alike, None)

    def _part(self, request: TransferRequest) -> tuple[TransferRequest, ...]:
        """Nobody follows a request any more; those that did, the widest first."""
        self.stand_alone(request)
        if not request.followers:
            return ()
        followers = sorted(request.followers, key=lambda one: -one.n_bytes)
        request.followers = ()
        for follower in followers:
            follower.leader = None
        return tuple(followers)

    def _hasten(self, request: TransferRequest, priority: IOPriority) -> None:
        if request in self._queues[request.priority]:
            self._unqueue(request)
            request.priority = priority
            self._queue(request)
        elif request in self._flying and priority is IOPriority.DEMAND:
            self._awaited.add(request)  # nothing is to be sent that could overtake it

    def _queue(self, request: TransferRequest) -> None:
        if request not in (leaders := self._leaders.setdefault(request.alike, [])):
            leaders.append(request)
        self._queues[request.priority][request] = None
        self._queued_bytes[request.priority] += request.n_bytes

    def _unqueue(self, request: TransferRequest) -> None:
        del self._queues[request.priority][request]
        self._queued_bytes[request.priority] -= request.n_bytes
        if not self._queues[IOPriority.WRITE_BACK]:
            self._credit = [0.0 for _ in IOPriority]

    def _spend(self, n_bytes: float) -> None:
        for priority in (IOPriority.PREFETCH, IOPriority.DEMAND):
            paid = min(n_bytes, self._credit[priority])
            self._credit[priority] -= paid
            n_bytes -= paid

    def _land(self, request: TransferRequest) -> None:
        self._awaited.discard(request)
        priority = self._flying.pop(request, None)
        if priority is not None:
            self._flying_bytes[priority] -= request.n_bytes

    @property
    def _demanding(self) -> bool:
        """Whether somebody waits for what is in flight."""
        return bool(self._flying_bytes[IOPriority.DEMAND] or self._awaited)

    def _next(self) -> TransferRequest | None:
        demands, prefetches, _ = self._queues
        demand, write_back = next(iter(demands), None), self.write_back
        if write_back is not None and write_back.copying:
            write_back = None
        credit = self._credit[IOPriority.DEMAND]
        if demand is None and not self._demanding:
            credit += self._credit[IOPriority.PREFETCH]
        if write_back is not None and credit >= write_back.n_bytes and self._fits(write_back):
            return write_back
        if demand is not None:
            return demand if self._fits(demand) else None
        if self._demanding:
            return None
        first = next(iter(prefetches), write_back)
        if first is not None and self._fills_chunk(first):
            first = write_back
        return first if first is not None and self._fits(first) else None

    def _fits(self, request: TransferRequest) -> bool:
        """Whether its bytes may be in flight beside the others of its kind."""
        demand, prefetch, write_back = self._flying_bytes
        if request.priority is IOPriority.DEMAND:
            return not demand or demand + request.n_bytes <= self.demand_bytes
        others = prefetch + write_back
        return not others or others + request.n_bytes <= self.background_bytes

    def _fills_chunk(self, request: TransferRequest) -> bool:
        """Whether it is a prefetch too many for the chunk that is in flight."""
        chunk = self._flying_bytes[IOPriority.PREFETCH]
        own = request.priority is IOPriority.PREFETCH
        return own and chunk > 0 and chunk + request.n_bytes > self.chunk_bytes


# The way to one tier and back: sends what the schedule says, matches answers, measures.

_STORE_DEADLINE_S = 60.0
_BARRED_S, _PAUSE_S = 1.0, 0.002
"""So long stores wait while others erase; whoever is stopped meanwhile holds nobody up."""
Admission = Callable[[], AbstractContextManager[bool]]
_ALWAYS: Admission = lambda: nullcontext(True)  # noqa: E731
_BACKGROUND_S = 0.1
_LEAST_BYTES, _MOST_BYTES = 1 << 23, 1 << 27
"""A demand may find writes before it that take so long, and are so many bytes."""


class _Job:
    """What was sent together: of each item its request and its number in it; None once answered."""

    __slots__ = ("bytes", "left", "requests", "seconds", "sent_s")

    def __init__(self, requests: Sequence[TransferRequest], sent_s: float) -> None:
        self.requests: list[tuple[TransferRequest, int] | None] = [
            (one, number) for one in requests for number in range(len(one.items))
        ]
        self.left, self.sent_s = len(self.requests), sent_s
        self.bytes, self.seconds = 0, 0.0


class Lane:
    """Transfers of one tier. Callers hold the KV lock.

    Args:
        tier: The tier.
        deadline_s: Longest wait for a load.
        loads: What loads from it take.
        clock_ns: Tells the guard the time.
        storing: Stores are sent within it, if it gives True: then nobody erases there.

    Attributes:
        schedule: What waits and what is in flight.
        guard: Whether prefetches go on, and how many bytes of them at a time.
        loads: What loads from it took when somebody waited for them.
        stores: What stores to it took.
        overdue: Loads that it owes after their deadline.
        cancelled: Loads that were called off.
    """

    def __init__(
        self,
        tier: Tier,
        deadline_s: float,
        loads: Rates,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        storing: Admission = _ALWAYS,
    ) -> None:
        self.tier, self.deadline_s, self.clock_ns = tier, deadline_s, clock_ns
        self._storing, self._barred_s = storing, 0.0
        self.guard = RegretGuard()
        self.schedule, self.loads, self.stores = Schedule(), loads, Rates()
        self.overdue = self.cancelled = 0
        self._jobs: dict[int, _Job] = {}
        self._busy_until_s = 0.0

    # ---- asking

    def ask(self, request: TransferRequest) -> SubmitResult:
        """Queues a request; `pump` sends it. A prefetch is refused while the guard says so."""
        if request.priority is IOPriority.DEMAND:
            self.guard.demanded(self.clock_ns(), request.n_bytes, self.schedule.in_the_way())
        elif request.priority is IOPriority.PREFETCH and not self.guard.allows(self.clock_ns()):
            self.schedule.refused += 1
            return SubmitResult.REFUSED
        return self.schedule.ask(request)

    def pump(self) -> int:
        """Sends what may be sent now, one job for all loads of an owner and one for all stores."""
        if self.schedule.waits(IOPriority.PREFETCH):
            self.schedule.chunk_bytes = self.guard.chunk_bytes(self.loads)
            if not self.guard.allows(self.clock_ns()):
                self.cancel(None)
        if not self.schedule.waits(IOPriority.WRITE_BACK):
            return self._send_all()
        with self._storing() as free:
            self._bar(not free)
            return self._send_all()

    def _bar(self, barred: bool) -> None:
        """Has write-backs wait, or fail where that takes long."""
        now_s = time.monotonic()
        self.schedule.barred = barred
        self._barred_s = (self._barred_s or now_s) if barred else 0.0
        if barred and now_s - self._barred_s > _BARRED_S:
            self._barred_s = now_s
            self.retract(None, "busy")

    def retract(self, keys: Collection[bytes] | None, reason: str = "cancelled") -> None:
        """Takes back stores of some keys, or all, that were not sent yet.

        Nobody follows what is in flight of them: it may bring what was there before.
        """
        known = [one for request in self.schedule for one in (request, *request.followers)]
        for request in known:
            if keys is not None and request.item.key not in keys:
                continue
            if request.stores and self.schedule.withdraw(request):
                request.end(TierAnswer(0, 0, request.item.key, Outcome.FAILED, reason))
            elif request.flying and keys is not None:
                self.schedule.stand_alone(request)

    def _send_all(self) -> int:
        batch, jobs = self.schedule.take(), dict[tuple[bool, int], list[TransferRequest]]()
        for request in batch:
            jobs.setdefault((request.stores, id(request.owner)), []).append(request)
        for requests in jobs.values():
            self._send(requests)
        return len(batch)

    def _send(self, requests: list[TransferRequest]) -> None:
        sent_s = time.monotonic()
        try:
            if requests[0].stores:
                stores = [cast(Store, one) for request in requests for one in request.items]
                job = self.tier.submit_store(stores, deadline_s=_STORE_DEADLINE_S)
            else:
                loads = [cast(Load, one) for request in requests for one in request.items]
                patience_s = self.patience_s(sum(request.n_bytes for request in requests))
                job = self.tier.submit_load(loads, deadline_s=patience_s)
        except FlowKVError:  # closed, or opened before a fork: a miss like any other
            for request in requests:
                self._answer(request, TierAnswer(0, 0, request.item.key, Outcome.FAILED, "closed"))
        else:
            self._jobs[job] = _Job(requests, sent_s)

    def settle(self, timeout_s: float = 0.0) -> int:
        """Sends and handles until neither goes on; waits up to `timeout_s` for a first answer."""
        self.pump()
        if timeout_s > 0:
            self.receive(timeout_s)
        handled = fresh = self.poll(timeout_s)
        while fresh and self.pump():
            fresh = self.poll()
            handled += fresh
        return handled

    def receive(self, timeout_s: float) -> None:
        """Wait for the body of the next write-back and send it, where nothing else is in flight."""
        request = None if self._jobs else self.schedule.write_back
        if request is not None and request.mark is not None and request.mark.wait(timeout_s):
            self.pump()

    @property
    def busy(self) -> bool:
        """Whether something waits, is in flight, or is owed."""
        return bool(self._jobs) or bool(self.schedule)

    def patience_s(self, n_bytes: int) -> float:
        """How long to wait for so many bytes."""
        return self.loads.patience_s(n_bytes, self.deadline_s)

    # ---- answers

    def poll(self, timeout_s: float = 0.0) -> int:
        """Handles answers that are there, or the first within `timeout_s`. Returns how many."""
        if not self._jobs:
            if self.schedule.barred and timeout_s > 0:
                time.sleep(min(timeout_s, _PAUSE_S))
            return 0
        answers = self.tier.poll(timeout_s)
        for answer in answers:
            job = self._jobs.get(answer.job)
            found = job.requests[answer.item] if job else None
            if job is None or found is None:
                continue
            request, number = found
            job.requests[answer.item] = None
            job.left -= 1
            if request.stores:
                self._measure(job, answer)
            if not job.left:
                del self._jobs[answer.job]
            if request.answers(number, answer):
                self._answer(request, answer)
        return len(answers)

    def _answer(self, request: TransferRequest, answer: TierAnswer) -> None:
        """Answers a request, and those that followed it: with its bytes, or by asking anew."""
        followers = self.schedule.end(request)
        self.cancelled += answer.reason == "cancelled"
        if not followers:
            request.end(answer)
            return
        failed = answer.outcome is Outcome.FAILED
        again = [follower for follower in followers if failed and not follower.stores]
        given = [
            self._given(request, answer, one) for one in followers
        ]  # before its memory is reused
        for one, its in zip((request, *followers), (answer, *given), strict=True):
            if one not in again:
                one.end(its)
        self._ask_again(again)

    @staticmethod
    def _given(request: TransferRequest, answer: TierAnswer, one: TransferRequest) -> TierAnswer:
        """The answer to a request that followed another, with its part of the bytes."""
        if answer.outcome is not Outcome.HIT:
            return answer
        first, n_bytes = one.span[0] - request.span[0], min(one.n_bytes, answer.n_bytes)
        given = cast(Load, request.item).target.cast("B")[first : first + n_bytes]
        cast(Load, one.item).target.cast("B")[:n_bytes] = given
        return answer._replace(n_bytes=n_bytes)

    def _ask_again(self, requests: Iterable[TransferRequest]) -> None:
        for request in requests:
            if self.schedule.ask(request) is SubmitResult.REFUSED:
                request.end(TierAnswer(0, 0, request.item.key, Outcome.FAILED, "busy"))

    def _measure(self, job: _Job, answer: TierAnswer) -> None:
        """Rates of stores; those of loads are measured by who waits for them."""
        if answer.outcome is not Outcome.STORED or not answer.n_bytes:
            return
        job.bytes += answer.n_bytes
        job.seconds = max(job.seconds, answer.seconds)
        if not job.left:  # jobs in flight at one time share the tier
            end_s = job.sent_s + job.seconds
            begun_s = max(job.sent_s, self._busy_until_s)
            self.stores.add(job.bytes, compiling.measured_s(begun_s, end_s))
            self._busy_until_s = max(end_s, self._busy_until_s)
            bound = round(self.stores.bytes_per_s * _BACKGROUND_S)
            self.schedule.background_bytes = min(max(bound, _LEAST_BYTES), _MOST_BYTES)

    # ---- calling off

    def give_up(self, request: TransferRequest) -> bool:
        """Waits for a load no longer; whether the tier still owes it, and may write to its target.

        `done` is called when it does answer.
        """
        if self.schedule.withdraw(request):
            request.ended = True
            return False
        if request.ended:
            return False
        self._ask_again(self.schedule.end(request))
        self.overdue += 1
        done = request.done

        def late(answer: TierAnswer) -> None:
            self.overdue -= 1
            done(answer)

        request.done = late
        self._call_off({request})
        return True

    def cancel(self, owner: object) -> int:
        """Calls off the loads of an owner (None: all prefetches) that nobody else waits for."""
        known = [one for request in self.schedule for one in (request, *request.followers)]
        mine = [one for one in known if one.owner is not None and owner in (None, one.owner)]
        if owner is None:
            mine = [one for one in mine if not one.demanded]
        flying = set()
        for request in mine:
            if self.schedule.withdraw(request):
                self.cancelled += 1
                request.end(TierAnswer(0, 0, request.item.key, Outcome.FAILED, "cancelled"))
            elif not request.followers:
                flying.add(request)
        self._call_off(flying)
        return len(mine)

    def _call_off(self, requests: set[TransferRequest]) -> None:
        """Tells the tier to cancel jobs of which nothing else is wanted any more."""
        for number, job in list(self._jobs.items()):
            left = {found[0] for found in job.requests if found is not None}
            if left <= requests and left:
                self.tier.cancel(number)


def from_memory(load: Load, store: Store) -> TierAnswer | None:
    """Answers a load with the body of a store that is under way; None if it is not what is asked.

    The bytes never left this process, so there is nothing to verify.
    """
    info, body, step = store.info, store.body.cast("B"), store.info.stripe_bytes
    try:
        wanted(info, load.layout, load.fidelity)
    except BadFrame:
        return None
    stripes = body.nbytes // step
    end = load.first + load.stripes if load.stripes else stripes
    n_bytes = (end - load.first) * step
    if not 0 <= load.first < end <= stripes or n_bytes > load.target.nbytes or load.target.readonly:
        return None
    load.target.cast("B")[:n_bytes] = body[load.first * step : end * step]
    return TierAnswer(0, 0, load.key, Outcome.HIT, "", info, n_bytes)


_LONGEST_S = 0.1
_WAIT_OF_SEVERAL_S = 0.002


class OnTheWay(NamedTuple):
    """A frame that a tier has been given and not yet acknowledged.

    Attributes:
        tier: Number of the tier.
        store: What it was given; its body is intact until it answers.
        mark: The copy that fills the body; None for a body that is there.
    """

    tier: int
    store: Store
    mark: CopyMark | None


def files(tiers: Sequence[Tier]) -> list[int]:
    """What can be polled for the next answer of tiers; empty if that cannot be polled for."""
    found = [tier.fileno() for tier in tiers if hasattr(tier, "fileno")]
    return found if len(found) == len(tiers) and min(found, default=0) >= 0 else []


def rest(files: Iterable[int], seconds: float, pause_s: float = 0.0005) -> None:
    """Waits for the next answer of a tier; that needs no lock.

    Args:
        files: As `files` said.
        seconds: Longest wait.
        pause_s: Longest wait where there are none.
    """
    waiting, polls = select.poll(), False  # not `select`, which knows few descriptors
    for number in files:
        waiting.register(number, select.POLLIN)
        polls = True
    if polls:
        waiting.poll(1000 * seconds)
    else:
        time.sleep(min(seconds, pause_s))


class Mover:
    """Transfers of all tiers of a stack. Callers hold the KV lock.

    Args:
        deadline_s: Longest wait for a load.
        rates: Load rates by tier name; shared with who decides whether to load.

    Attributes:
        lanes: One for each tier, nearest first.
        from_memory: Loads answered with the bytes of a store that was under way.
    """

    def __init__(self, deadline_s: float, rates: dict[str, Rates] | None = None) -> None:
        self.deadline_s, self.rates = deadline_s, {} if rates is None else rates
        self.lanes: list[Lane] = []
        self.from_memory = 0
        self._storing = 0
        self._bodies: dict[bytes, list[OnTheWay]] = {}

    @property
    def busy(self) -> bool:
        """Whether something waits, is in flight, or is owed: else there is nothing to `drain`."""
        return any(lane.busy for lane in self.lanes)

    def add(self, tier: Tier, storing: Admission = _ALWAYS) -> None:
        """Puts a tier below the others; see `Lane`."""
        rates = self.rates.setdefault(tier.name, Rates())
        self.lanes.append(Lane(tier, self.deadline_s, rates, storing=storing))

    def forget(self) -> None:
        """Leaves the tiers; who still waits for an answer will get none."""
        self.lanes.clear()
        self._bodies.clear()
        self._storing = 0

    # ---- stores

    def store(
        self,
        tier: int,
        key: bytes,
        info: FrameInfo,
        body: memoryview,
        done: Done,
        mark: CopyMark | None = None,
    ) -> bool:
        """Writes a frame in the background; False if too much waits for that already.

        Args:
            tier: Number in the stack.
            key: Of the frame.
            info: What the frame says about itself.
            body: Its bytes; they must stay as they are until the answer.
            done: Called with the answer, from a later `drain`.
            mark: The copy that fills the body; None for a body that is there.
        """
        item = Store(key, info, body)

        def answered(answer: TierAnswer) -> None:
            self._storing -= 1
            left = [one for one in self._bodies.pop(key, ()) if one.store is not item]
            if left:
                self._bodies[key] = left
            done(answer)

        request = TransferRequest(item, answered, IOPriority.WRITE_BACK, mark=mark)
        if self.lanes[tier].ask(request) is SubmitResult.REFUSED:
            return False
        self._storing += 1
        self._bodies.setdefault(key, []).append(OnTheWay(tier, item, mark))
        return True

    def storing(self) -> int:
        """Stores that are not answered yet."""
        return self._storing

    def on_the_way(self, key: bytes, tier: int = -1) -> OnTheWay | None:
        """Return a frame that is being stored in a tier (-1: in any), to be read from memory."""
        found = self._bodies.get(key, ())
        return next((one for one in found if tier in (-1, one.tier)), None)

    def retract(self, keys: Collection[bytes]) -> None:
        """Stores of these keys are not wanted any more; what was sent is read from no more."""
        for lane in self.lanes:
            lane.retract(keys)
        for key in keys:
            self._bodies.pop(key, None)

    def drain(self, timeout_s: float = 0.0) -> int:
        """Sends and answers what can be, or waits for the first answer. Returns how many came."""
        busy = [lane for lane in self.lanes if lane.busy]
        return self._wait(busy, timeout_s) if busy else 0

    def collect(self) -> int:
        """Handles the answers that are there, and sends nothing more. Returns how many came."""
        return sum(lane.poll() for lane in self.lanes)

    def _wait(self, lanes: Sequence[Lane], timeout_s: float) -> int:
        """Sends what can be sent, and waits for the first answers; returns how many came."""
        handled = sum(lane.settle() for lane in lanes)
        if handled or timeout_s <= 0:
            return handled
        if len(lanes) == 1:
            return lanes[0].settle(timeout_s)
        for lane in lanes:
            lane.receive(timeout_s)
        rest(files([lane.tier for lane in lanes]), timeout_s, _WAIT_OF_SEVERAL_S)
        return sum(lane.settle() for lane in lanes)

    # ---- loads

    def load(self, wanted: Sequence[tuple[int, Load]]) -> tuple[list[TierAnswer], set[int]]:
        """Reads frames of any tiers, all at once, and waits for all of them.

        Args:
            wanted: Numbers of tiers, what to read of each, and where to.

        Returns:
            One answer for each, and those whose target is lent to a tier that is overdue (they are
            answered as `FAILED` here).
        """
        answers, lent = dict[int, TierAnswer](), set[int]()
        requests, n_bytes = list[TransferRequest | None](), Counter[int]()
        for index, (tier, item) in enumerate(wanted):
            requests.append(self.ask(tier, item, partial(answers.setdefault, index)))
            n_bytes[tier] += item.target.nbytes
        started = compiling.now_s()
        ends = {tier: started + self.lanes[tier].patience_s(n) for tier, n in n_bytes.items()}
        while left := [index for index in range(len(wanted)) if index not in answers]:
            now, tiers = compiling.now_s(), {wanted[index][0] for index in left}
            # Once more after the end: the tier may have given up by itself.
            self.wait(tiers, min(max(min(ends[tier] for tier in tiers) - now, 0.0), _LONGEST_S))
            for index in left:
                (tier, item), request = wanted[index], requests[index]
                if ends[tier] <= now and index not in answers and request is not None:
                    failed = TierAnswer(0, index, item.key, Outcome.FAILED, "deadline passed")
                    answers[index] = failed._replace(seconds=now - started)
                    if self.give_up(tier, request):
                        lent.add(index)
        return [answers[index] for index in range(len(wanted))], lent

    def wait(self, tiers: Iterable[int], timeout_s: float) -> int:
        """Like `drain`, of these tiers only."""
        return self._wait([self.lanes[tier] for tier in tiers], timeout_s)

    def ask(
        self,
        tier: int,
        item: Load,
        done: Done,
        owner: object = None,
        priority: IOPriority = IOPriority.DEMAND,
    ) -> TransferRequest | None:
        """Reads a frame that somebody waits for, or may need; a later `drain` sends it.

        Args:
            tier: Number in the stack.
            item: What to read, and where to.
            done: Called with the answer, now or in a later `drain`; "busy" where there is no room
                for a prefetch.
            owner: What `cancel` calls it off by.
            priority: Whether somebody waits for it.

        Returns:
            What `give_up` takes; None if it was answered at once, from memory for instance.
        """
        held = self.on_the_way(item.key) if self._storing else None
        if held is not None and held.mark is not None and not held.mark.done():
            if priority is not IOPriority.DEMAND:
                done(TierAnswer(0, 0, item.key, Outcome.FAILED, "busy"))
                return None
            held.mark.wait()
        answer = from_memory(item, held.store) if held else None
        if answer is not None:
            self.from_memory += 1
            done(answer)
            return None
        request = TransferRequest(item, done, priority, owner)
        if self.lanes[tier].ask(request) is SubmitResult.REFUSED:
            done(TierAnswer(0, 0, item.key, Outcome.FAILED, "busy"))
            return None
        return request

    def ask_all(
        self,
        tier: int,
        items: Sequence[Load],
        done: Callable[[list[TierAnswer]], None],
        owner: object = None,
    ) -> TransferRequest:
        """Reads frames that somebody waits for as a whole; a later `drain` sends them.

        Args:
            tier: Number in the stack.
            items: What to read, and where to.
            done: Called with all answers, in their order, in a later `drain`.
            owner: What `cancel` calls them off by.

        Returns:
            What `give_up` takes.
        """
        request = TransferBatch(items, done, owner)
        self.lanes[tier].ask(request)
        return request

    def give_up(self, tier: int, request: TransferRequest) -> bool:
        """Waits for a load no longer; see `Lane.give_up`."""
        return self.lanes[tier].give_up(request)

    def cancel(self, owner: object = None) -> int:
        """Calls off the loads of an owner, or all prefetches; each is still answered."""
        return sum(lane.cancel(owner) for lane in self.lanes)
