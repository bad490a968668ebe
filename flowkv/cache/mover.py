"""The transfer scheduler: moves bytes between pages and tiers, awaited loads first.

One `Lane` per tier sends what its `Schedule` allows: demands, prefetches, then write-backs, with
bounded bytes in flight. A load of a frame that is just being stored takes it from memory.

A buffer given to a tier stays untouchable until the tier has answered, however late: a tag cannot
stop a DMA or a read that is under way (DESIGN D10).
"""

from __future__ import annotations

import math
import select
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from enum import IntEnum
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, cast

import msgspec

from flowkv.compiled import compiling
from flowkv.core.digest import DIGEST_BYTES, digests
from flowkv.core.errors import FlowKVError
from flowkv.policy.prefetch.prefetcher import RegretGuard
from flowkv.policy.restore.costs import Rates
from flowkv.tiers.base import BadFrame, Buffer, FrameInfo, Load, Outcome, Store, Tier, TierAnswer
from flowkv.tiers.frame import wanted

# Order and volume of the requests to one tier.
#
# Pure bookkeeping: neither tiers, threads nor time, so that tests drive it on a clock of their own.
#
# - A *demand* is a load that a caller waits for. It goes first, and its bytes in flight have a
#   limit that nothing else uses up.
# - *Prefetches* go before *write-backs*; both together have a second, smaller limit, and wait
#   while a demand is queued or in flight. Prefetches go in *chunks*: a demand finds one in flight
#   at most.
# - Yet write-back has a fair share: for every eight bytes of others, one of its own goes ahead of
#   them, or pages could never leave a busy device. Only demands earn it a place before a demand.
# - A frame is loaded once for all requests that overlap in time.

Done = Callable[[list[TierAnswer]], object]
_KEY, _TARGET, _BODY = attrgetter("key"), attrgetter("target.nbytes"), attrgetter("body.nbytes")
SHARE = 8
"""Bytes of other transfers that earn one byte of write-back, at any rate of demands."""


class CopyMark(Protocol):
    """A place in the order of a device's copies."""

    def done(self) -> bool:
        """Return whether all copies before it are over."""

    def wait(self, timeout_s: float = ...) -> bool:
        """Wait for all copies before the mark; return False if the time ran out first."""


class IOPriority(IntEnum):
    """Priorities of requests; the lowest goes first."""

    DEMAND = 0
    PREFETCH = 1
    WRITE_BACK = 2


class TransferRequest:
    """Loads or stores on their way, which are sent together; loads are answered as one.

    Args:
        items: The loads or stores.
        done: Called with the answers in the order of the items; for stores with those of all that
            ended together and have the same `done`.
        priority: Priority of the request.
        owner: Requests of one owner are cancelled together; None for those that never are.
        mark: The copy that fills the bodies of stores; None for bodies that are complete.
        alone: Whether the request neither follows another one nor has followers, as with stores.

    Attributes:
        item: The first load or store.
        n_bytes: Bytes of the targets or bodies.
        left: Keys of the items, without those of answered stores.
        alike: Equal for requests that one answer may serve, if its span covers theirs; () for
            those that stay alone.
        span: First byte and end of the loaded part of the body; (0, 0) for stores.
        stores: Whether the items are stores.
        demanded: Whether it was submitted as a demand.
        flying: Whether the tier has it and has not answered.
        ended: Whether it was answered.
        followers: Requests for the same bytes, answered with this one.
        leader: The request that this one follows.
        come: Answers to loads, by the number of the item.
    """

    __slots__ = (
        *("alike", "come", "demanded", "done", "ended", "flying", "followers", "item", "items"),
        *("leader", "left", "mark", "n_bytes", "owner", "priority", "span", "stores"),
    )

    def __init__(
        self, items: Sequence[Load | Store], done: Done, priority: IOPriority,
        owner: object = None, mark: CopyMark | None = None, *, alone: bool = False,
    ) -> None:  # fmt: skip
        self.items, self.done, self.priority, self.owner = items, done, priority, owner
        self.item, self.mark, item = items[0], mark, items[0]
        self.demanded = priority is IOPriority.DEMAND
        self.span, self.alike, self.stores = (0, 0), tuple[object, ...](), isinstance(item, Store)
        if isinstance(item, Load):
            # Lent memory: no answer to another load is copied there.
            if not (alone or item.target.readonly):
                self.alike = (item.key, item.layout, item.fidelity)
            n_bytes = item.target.nbytes
            first = item.first * (n_bytes // item.stripes) if item.stripes else 0
            self.span = first, first + n_bytes
        self.n_bytes = sum(map(_BODY if self.stores else _TARGET, items))
        self.left = set(map(_KEY, items))
        self.flying = self.ended = False
        self.followers: tuple[TransferRequest, ...] = ()
        self.leader: TransferRequest | None = None
        self.come = dict[int, TierAnswer]()

    def serves(self, other: TransferRequest) -> bool:
        """Return whether this request's answer would cover another one with an equal `alike`."""
        if isinstance(other.item, Load) and other.item.stripes:
            return self.span[0] <= other.span[0] and other.span[1] <= self.span[1]
        return self.span == other.span

    def end(self, answer: TierAnswer) -> None:
        """End the request, and call `done`; `answer` stands in for missing answers."""
        self.flying, self.ended, come = False, True, self.come
        self.done([come.get(n) or answer._replace(key=one.key) for n, one in enumerate(self.items)])


class Schedule:
    """The queued and in-flight requests of one tier.

    Args:
        demand_bytes: Most bytes of demands in flight; one alone may be larger.
        background_bytes: Most bytes of prefetches and write-backs in flight, likewise.
        queue_bytes: Most queued bytes of prefetches, and of write-backs; beyond that they are
            refused. Demands never are.
        chunk_bytes: Most bytes of prefetches in flight; one alone may be larger.

    Attributes:
        background_bytes: The limit, which may change while transfers run.
        chunk_bytes: The limit, which may change while transfers run.
        joined: Requests that needed no transfer of their own.
        refused: Requests that found the queue full.
        barred: Whether write-backs are held back now.
        used: Whether a request was queued since the lane was idle, so that it may be `busy`.
    """

    def __init__(
        self, demand_bytes: int = 1 << 28, background_bytes: int = 1 << 26,
        queue_bytes: int = 1 << 28, chunk_bytes: int = 1 << 22,
    ) -> None:  # fmt: skip
        self.demand_bytes, self.background_bytes = demand_bytes, background_bytes
        self.queue_bytes, self.chunk_bytes = queue_bytes, chunk_bytes
        self.joined = self.refused = 0
        self.barred = self.used = False
        self._queues: tuple[dict[TransferRequest, None], ...] = tuple({} for _ in IOPriority)
        self._queued_bytes = [0 for _ in IOPriority]
        self._flying: dict[TransferRequest, IOPriority] = {}
        self._flying_bytes = [0 for _ in IOPriority]
        self._leaders: dict[tuple[object, ...], list[TransferRequest]] = {}
        self._awaited: set[TransferRequest] = set()
        self._credit = [0.0] * len(IOPriority)  # bytes earned for write-back, by earning priority

    def __len__(self) -> int:
        """Return the number of requests that wait or are in flight, without followers."""
        return len(self._flying) + self.waiting

    @property
    def waiting(self) -> int:
        """Return the number of requests that wait to be sent."""
        return sum(map(len, self._queues))

    @property
    def queued_bytes(self) -> int:
        """Return the bytes that wait to be sent."""
        return sum(self._queued_bytes)

    @property
    def flying_bytes(self) -> int:
        """Return the bytes in flight."""
        return sum(self._flying_bytes)

    def in_the_way(self) -> int:
        """Return the bytes of prefetches ahead of a new demand; 0 behind an earlier demand."""
        demanding = self._queues[IOPriority.DEMAND] or self._flying_bytes[IOPriority.DEMAND]
        if demanding or self._awaited:
            return 0
        return self._flying_bytes[IOPriority.PREFETCH]

    def __iter__(self) -> Iterator[TransferRequest]:
        """Yield all requests that wait or are in flight, without followers."""
        yield from self._flying
        for queue in self._queues:
            yield from queue

    def has_room(self, n_bytes: int, priority: IOPriority, ahead_bytes: int = 0) -> bool:
        """Return whether a request of `n_bytes` fits the queue, after others of `ahead_bytes`."""
        queued = self._queued_bytes[priority] + ahead_bytes
        return priority is IOPriority.DEMAND or not queued or queued + n_bytes <= self.queue_bytes

    def fitting(self, sizes: Sequence[int]) -> int:
        """Return how many write-backs of these bytes fit the queue, from the first one on."""
        queued, count = self._queued_bytes[IOPriority.WRITE_BACK], 0
        while count < len(sizes) and (not queued or queued + sizes[count] <= self.queue_bytes):
            queued, count = queued + sizes[count], count + 1
        return count

    def shorten(self, request: TransferRequest, items: Sequence[Store]) -> None:
        """Leave only some of the stores of a request that was not sent."""
        if not items:
            self.withdraw(request)
            return
        before, request.items, request.item = request.n_bytes, items, items[0]
        request.n_bytes, request.left = sum(map(_BODY, items)), set(map(_KEY, items))
        self._queued_bytes[request.priority] += request.n_bytes - before

    def ask(self, request: TransferRequest) -> bool:
        """Queue a request, or let it follow an equal one; return False if the queue is full."""
        if request.alike in self._leaders and self._joins(request):
            self.joined += 1
        elif self.has_room(request.n_bytes, request.priority):
            self.queue(request)
        else:
            self.refused += 1
            return False
        return True

    def take(self) -> list[TransferRequest]:
        """Remove from the queues and return the requests to send now; they are then in flight."""
        batch = []
        while any(self._queues) and (request := self._next()) is not None:
            self._unqueue(request)
            request.flying = True
            self._flying[request] = request.priority
            self._flying_bytes[request.priority] += request.n_bytes
            if request.priority is IOPriority.WRITE_BACK:
                if any(self._credit):
                    self._spend(request.n_bytes)
            elif self._queues[IOPriority.WRITE_BACK]:
                self._credit[request.priority] += request.n_bytes / SHARE
            batch.append(request)
        return batch

    def landed(self, request: TransferRequest, n_bytes: int) -> None:
        """Make room for others of the bytes of a request's answered stores."""
        if request in self._flying:
            request.n_bytes -= n_bytes
            self._flying_bytes[self._flying[request]] -= n_bytes

    def end(self, request: TransferRequest) -> tuple[TransferRequest, ...]:
        """End a request in flight that was answered, or is overdue and no longer awaited.

        Return its followers; later requests for the same bytes start a transfer of their own.
        """
        self._awaited.discard(request)
        priority = self._flying.pop(request, None)
        if priority is not None:
            self._flying_bytes[priority] -= request.n_bytes
        return self._part(request) if request.alike else ()

    def withdraw(self, request: TransferRequest) -> bool:
        """Withdraw a request that was not sent; return False if it is in flight or answered."""
        if request.leader is not None:
            others = [one for one in request.leader.followers if one is not request]
            request.leader.followers, request.leader = tuple(others), None
            return True
        if request not in self._queues[request.priority]:
            return False
        self._unqueue(request)
        for follower in self._part(request):  # the first one takes its place
            if not self._joins(follower):
                self.queue(follower)
        return True

    def _joins(self, request: TransferRequest) -> bool:
        """Let a request follow one that serves it; return False if there is none."""
        for leader in self._leaders.get(request.alike, ()):
            if leader.serves(request):
                request.leader = leader
                leader.followers += (request,)
                if request.priority < leader.priority:
                    self._hasten(leader, request.priority)
                return True
        return False

    def stand_alone(self, request: TransferRequest) -> None:
        """Accept no further followers for a request."""
        leaders = self._leaders.get(request.alike, [])
        if request in leaders:
            leaders.remove(request)
        if not leaders:
            self._leaders.pop(request.alike, None)

    def _part(self, request: TransferRequest) -> tuple[TransferRequest, ...]:
        """Detach a request from its followers; return them, the widest first."""
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
            self.queue(request)
        elif request in self._flying and priority is IOPriority.DEMAND:
            self._awaited.add(request)  # no background transfer may overtake it

    def queue(self, request: TransferRequest) -> None:
        """Queue a request that has room, and follows no other one."""
        if request.alike:
            leaders = self._leaders.setdefault(request.alike, [])
            leaders += [request] * (request not in leaders)
        self._queues[request.priority][request] = None
        self._queued_bytes[request.priority] += request.n_bytes
        self.used = True

    def _unqueue(self, request: TransferRequest) -> None:
        del self._queues[request.priority][request]
        self._queued_bytes[request.priority] -= request.n_bytes
        if not self._queues[IOPriority.WRITE_BACK]:
            self._credit = [0.0] * len(IOPriority)

    def _spend(self, n_bytes: float) -> None:
        for priority in (IOPriority.PREFETCH, IOPriority.DEMAND):
            paid = min(n_bytes, self._credit[priority])
            self._credit[priority] -= paid
            n_bytes -= paid

    def _next(self) -> TransferRequest | None:
        demands, prefetches, stores = self._queues
        demand = next(iter(demands), None)
        write_back = None if self.barred else next(iter(stores), None)
        if write_back and write_back.mark is not None and not write_back.mark.done():
            write_back = None  # its body is still being copied from a device
        credit = self._credit[IOPriority.DEMAND]
        demanding = not demand and (self._flying_bytes[IOPriority.DEMAND] or self._awaited)
        if demand is None and not demanding:
            credit += self._credit[IOPriority.PREFETCH]
        if write_back is not None and credit >= write_back.n_bytes and self._fits(write_back):
            return write_back
        if demand is not None:
            return demand if self._fits(demand) else None
        if demanding:
            return None
        first, chunk = next(iter(prefetches), None), self._flying_bytes[IOPriority.PREFETCH]
        if first is None or (chunk and chunk + first.n_bytes > self.chunk_bytes):
            first = write_back
        if first is None or self._fits(first):
            return first
        return self._cut(first) if first.stores else None

    def _fits(self, request: TransferRequest) -> bool:
        """Return whether a request's bytes fit the limit beside the others of its kind."""
        demand, prefetch, write_back = self._flying_bytes
        if request.priority is IOPriority.DEMAND:
            return not demand or demand + request.n_bytes <= self.demand_bytes
        others = prefetch + write_back
        return not others or others + request.n_bytes <= self.background_bytes

    def _cut(self, request: TransferRequest) -> TransferRequest | None:
        """Take the stores out of a request that fit, if it was queued under a higher limit."""
        items, count = cast(Sequence[Store], request.items), 0
        room = self.background_bytes - sum(self._flying_bytes[IOPriority.PREFETCH :])
        while count < len(items) and items[count].body.nbytes <= room:
            room -= items[count].body.nbytes
            count += 1
        if not count:
            return None
        first = TransferRequest(items[:count], request.done, request.priority, mark=request.mark)
        self.shorten(request, items[count:])
        self.queue(first)
        return first


# Transfers of one tier: sends the scheduled requests, matches answers, measures rates.

_STORE_DEADLINE_S = 60.0
_BARRED_S, _PAUSE_S = 1.0, 0.002
"""Longest wait of stores for an erasure by others, and pause between checks: an eraser that hangs
holds nothing up."""
Admission = Callable[[], AbstractContextManager[bool]]
_BACKGROUND_S = 0.1
_LEAST_BYTES, _MOST_BYTES = 1 << 23, 1 << 27
"""Limits of the background bytes in flight: the time that writes ahead of a demand may take, or
twice the shortest that a job takes if that is longer, and the least and most bytes of them."""
_PARTS = 8
"""Least number of requests of stores that fill the background bytes in flight."""


class _Job(msgspec.Struct, eq=False):
    """Items sent together, each as its request and its number there; None once answered."""

    requests: list[tuple[TransferRequest, int] | None]
    left: int
    sent_s: float
    bytes: int = 0
    seconds: float = 0.0


class Lane:
    """Transfers of one tier. Callers hold the KV lock.

    Args:
        tier: The tier.
        deadline_s: Longest wait for a load.
        loads: Measured rates of loads from the tier.
        clock_ns: Clock of the guard, and of the tier's rest.
        storing: Context in which stores are sent if it yields True: no erasure runs there then;
            None where others erase nothing.

    Attributes:
        schedule: Queued requests, and those in flight.
        guard: Admits prefetches, and sets their bytes in flight.
        loads: Measured rates of awaited loads from the tier.
        stores: Measured rates of stores to the tier.
        overdue: Loads that the tier has not answered by their deadline.
        cancelled: Loads that were cancelled.
        loaded_bytes: Bytes that were loaded for requests.
        stored_bytes: Bytes that were stored.
        incoming_bytes: Bytes that the stores on their way will take.
        refused: Frames that the tier returned and that failed verification.
        dropped: Pages that the tier did not store, as it was busy, away or full.
        unpaid: Pages that were not stored, as loading them could never pay.
        declined: Pages that left memory, and that write admission kept from the tier.
        bodies: Frames that are being stored, by key.
        stale: Headers of frames that are being stored and were forgotten since, by key.
        behind: Stores of keys with another store under way, sent once that is answered.
    """

    def __init__(
        self, tier: Tier, deadline_s: float, loads: Rates,
        clock_ns: Callable[[], int] = time.monotonic_ns, storing: Admission | None = None,
    ) -> None:  # fmt: skip
        self.tier, self.deadline_s, self.clock_ns = tier, deadline_s, clock_ns
        self._storing, self._barred_s = storing, 0.0
        self.guard = RegretGuard()
        self.schedule, self.loads, self.stores = Schedule(), loads, Rates()
        self.overdue = self.cancelled = self.loaded_bytes = self.stored_bytes = 0
        self.refused = self.dropped = self.unpaid = self.declined = self.incoming_bytes = 0
        self.bodies, self._jobs = dict[bytes, OnTheWay](), dict[int, _Job]()
        self.stale, self.behind = dict[bytes, FrameInfo](), dict[bytes, list[TransferRequest]]()
        self._busy_until_s, self._shortest_s, self._rests_until_ns = 0.0, math.inf, 0

    # ---- availability

    @property
    def rests(self) -> bool:
        """Return whether the tier rests, so that nothing is to be sent to it."""
        return self._rests_until_ns > 0 and self.clock_ns() < self._rests_until_ns

    def rest(self, seconds: float) -> None:
        """Let the tier rest for some seconds, as requests would be late or would fail."""
        self._rests_until_ns = self.clock_ns() + round(seconds * 1e9)

    @property
    def answering(self) -> bool:
        """Return whether loads may be sent to the tier: none is overdue, and it does not rest."""
        return not self.overdue and not (self._rests_until_ns and self.rests)

    def takes(self, n_bytes: int, ahead_bytes: int = 0) -> bool:
        """Return whether the tier takes one more frame, after others of `ahead_bytes`.

        A tier that does not is busy or away.
        """
        room = self.schedule.has_room(n_bytes, IOPriority.WRITE_BACK, ahead_bytes)
        return room and not self.rests

    # ---- submission

    def ask(self, request: TransferRequest) -> bool:
        """Queue a request for `pump` to send; return False if it is refused, see `Schedule.ask`.

        A prefetch is refused unless the guard allows it.
        """
        if request.priority is IOPriority.DEMAND:
            self.guard.demanded(self.clock_ns(), request.n_bytes, self.schedule.in_the_way())
        elif request.priority is IOPriority.PREFETCH and not self.guard.allows(self.clock_ns()):
            self.schedule.refused += 1
            return False
        return self.schedule.ask(request)

    def pump(self) -> int:
        """Send the due requests: one job for all loads of an owner, and one for all stores."""
        _, prefetches, stores = self.schedule._queues
        if prefetches:
            self.schedule.chunk_bytes = self.guard.chunk_bytes(self.loads)
            if not self.guard.allows(self.clock_ns()):
                self.cancel(None)
        if self._storing is None or not stores:
            return self._send_all() if any(self.schedule._queues) else 0
        with self._storing() as free:
            self._bar(not free)
            return self._send_all()

    def _bar(self, barred: bool) -> None:
        """Hold back write-backs while barred, and fail them once that takes too long."""
        now_s = time.monotonic()
        self.schedule.barred = barred
        self._barred_s = (self._barred_s or now_s) if barred else 0.0
        if barred and now_s - self._barred_s > _BARRED_S:
            self._barred_s = now_s
            self.retract(None, "busy")

    def retract(self, keys: Collection[bytes] | None, reason: str = "cancelled") -> None:
        """Withdraw and fail the unsent stores of some keys, or of all (None).

        Requests for these keys in flight serve no others any more: they may have old content.
        """
        ends = list[tuple[Done, list[TierAnswer]]]()
        for request in [*self.schedule]:
            mine = {key for key in request.left if keys is None or key in keys}
            if not mine or (keys is None if request.flying else not request.stores):
                continue
            stores = cast(Sequence[Store], request.items)
            if not request.stores:
                self.schedule.stand_alone(request)
            elif request.flying:
                self.stale |= {one.key: one.info for one in stores if one.key in mine}
            else:
                gone = [_failed(one.key, reason) for one in stores if one.key in mine]
                self.schedule.shorten(request, [one for one in stores if one.key not in mine])
                ends.append((request.done, gone))
        for key in [key for key in self.behind if keys is None or key in keys]:
            ends += [(one.done, [_failed(key, reason)]) for one in self.behind.pop(key)]
        _call_all(ends)

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
            items: list[Any] = [one for request in requests for one in request.items]
            if requests[0].stores:
                job = self.tier.submit_store(items, deadline_s=_STORE_DEADLINE_S)
            else:
                patience_s = self.patience_s(sum(request.n_bytes for request in requests))
                job = self.tier.submit_load(items, deadline_s=patience_s)
        except Exception as error:  # as a tier that is closed, or was opened before a fork: a miss
            why = "closed" if isinstance(error, FlowKVError) else f"{type(error).__name__}: {error}"
            for request in requests:
                self._answer(request, _failed(request.item.key, why))
                for key in request.left & self.behind.keys() if request.stores else ():
                    self._follow(key)
        else:
            items = [(one, n) for one in requests for n in range(len(one.items))]
            self._jobs[job] = _Job([*items], len(items), sent_s)

    def settle(self, timeout_s: float = 0.0) -> int:
        """Send requests and handle answers until none is left; return the number of answers.

        Wait up to `timeout_s` for a first answer.
        """
        self.pump()
        if timeout_s > 0:
            self.receive(timeout_s)
        handled = fresh = self.poll(timeout_s)
        while fresh and self.pump():
            fresh = self.poll()
            handled += fresh
        return handled

    def receive(self, timeout_s: float) -> None:
        """Wait for the body of the next write-back and send it, if nothing else is in flight."""
        stores = () if self._jobs or self.schedule.barred else self.schedule._queues[-1]
        request = next(iter(stores), None)
        if request is not None and request.mark is not None and request.mark.wait(timeout_s):
            self.pump()

    @property
    def busy(self) -> bool:
        """Return whether a request waits, is in flight, or is overdue."""
        self.schedule.used = bool(self._jobs) or bool(self.schedule)
        return self.schedule.used

    def patience_s(self, n_bytes: int) -> float:
        """Return the longest time to wait for a load of `n_bytes`."""
        return self.loads.patience_s(n_bytes, self.deadline_s)

    # ---- answers

    def poll(self, timeout_s: float = 0.0) -> int:
        """Handle arrived answers, or the first within `timeout_s`; return their number."""
        if not self._jobs:
            if self.schedule.barred and timeout_s > 0:
                time.sleep(min(timeout_s, _PAUSE_S))
            return 0
        answers, stored = self.tier.poll(timeout_s), dict[Done, list[TierAnswer]]()
        landed, ended = Counter[TransferRequest](), list[tuple[Any, ...]]()
        try:
            for answer in answers:
                job = self._jobs.get(answer.job)
                found = job.requests[answer.item] if job else None
                if job is None or found is None:
                    continue
                request, number = found
                job.requests[answer.item] = None
                job.left -= 1
                if not job.left:
                    del self._jobs[answer.job]
                if not request.stores:
                    request.come[number] = answer
                    if len(request.come) == len(request.items):
                        ended.append((self._answer, request, answer))
                    continue
                if answer.outcome is Outcome.STORED and answer.n_bytes:
                    job.bytes += answer.n_bytes
                    job.seconds = max(job.seconds, answer.seconds)
                    if not job.left:
                        self._measure(job)
                key = request.items[number].key
                request.left.discard(key)
                landed[request] += _BODY(request.items[number])
                if not request.left:
                    del landed[request]
                    self.schedule.end(request)
                    request.flying, request.ended = False, True
                self.cancelled += answer.reason == "cancelled"
                self.stale.pop(key, None)
                if answer.key != key:
                    answer = answer._replace(key=key)
                stored.setdefault(request.done, []).append(answer)
                if key in self.behind:
                    self._follow(key)
        finally:
            for request, n_bytes in landed.items():
                self.schedule.landed(request, n_bytes)
            _call_all([*ended, *stored.items()])
        return len(answers)

    def _answer(self, request: TransferRequest, answer: TierAnswer) -> None:
        """End a request and its followers; those that it does not serve are queued anew."""
        followers = self.schedule.end(request)
        self.cancelled += answer.reason == "cancelled"
        if not followers:
            request.end(answer)
            return
        # Copied before the request's memory is reused.
        given = [(self._given(request, answer, one), one) for one in followers]
        served = [(one.end, its) for its, one in given if its.outcome is not Outcome.FAILED]
        others = [one for its, one in given if its.outcome is Outcome.FAILED]
        _call_all([(request.end, answer), *served, (self._ask_again, others)])

    @staticmethod
    def _given(request: TransferRequest, answer: TierAnswer, one: TransferRequest) -> TierAnswer:
        """Return the answer to a follower, with its part of the bytes copied to its target.

        `FAILED` if the bytes, which the leader's device is to verify, are not those of the frame.
        """
        if answer.outcome is not Outcome.HIT or answer.info is None:
            return answer
        first, n_bytes = one.span[0] - request.span[0], min(one.n_bytes, answer.n_bytes)
        given = cast(Load, request.item).target.cast("B")[first : first + n_bytes]
        target = cast(Load, one.item).target.cast("B")[:n_bytes]
        fine = copied(target, given, answer.info, first, answer.digests)
        outcome = Outcome.HIT if fine else Outcome.FAILED
        return answer._replace(outcome=outcome, n_bytes=n_bytes, digests=b"")

    def _follow(self, key: bytes) -> None:
        """Queue the next store of a key, of which no store is under way any more."""
        waiting = self.behind.pop(key, [])
        while waiting and not self.schedule.ask(first := waiting.pop(0)):
            first.end(_failed(key, "busy"))
        if waiting:
            self.behind[key] = waiting

    def _ask_again(self, requests: Iterable[TransferRequest]) -> None:
        busy = [request for request in requests if not self.schedule.ask(request)]
        _call_all([(request.end, _failed(request.item.key, "busy")) for request in busy])

    def _measure(self, job: _Job) -> None:
        """Measure the rate of stores; awaited loads are measured where they are awaited."""
        end_s = job.sent_s + job.seconds  # jobs in flight at one time share the tier
        begun_s = max(job.sent_s, self._busy_until_s)
        self.stores.add(job.bytes, compiling.measured_s(begun_s, end_s))
        self._busy_until_s = max(end_s, self._busy_until_s)
        # A tier that takes long for any job, such as a server, needs more in flight to be busy.
        self._shortest_s = min(self._shortest_s, job.seconds)
        bound = round(self.stores.bytes_per_s * max(_BACKGROUND_S, 2 * self._shortest_s))
        self.schedule.background_bytes = min(max(bound, _LEAST_BYTES), _MOST_BYTES)

    # ---- cancellation

    def give_up(self, request: TransferRequest) -> bool:
        """Stop waiting for a load; return whether the tier may still write to its target.

        In that case `done` is called when the tier answers.
        """
        request.ended |= self.schedule.withdraw(request)
        if request.ended or not request.flying:  # or given up before, for another of its loads
            return not request.ended
        self._ask_again(self.schedule.end(request))
        self.overdue += 1
        request.flying = False
        done = request.done

        def late(answers: list[TierAnswer]) -> None:
            self.overdue -= 1
            done(answers)

        request.done = late
        self._call_off({request})
        return True

    def cancel(self, owner: object) -> int:
        """Cancel the loads of an owner (None: all prefetches) that no other request follows."""
        known = [one for request in self.schedule for one in (request, *request.followers)]
        mine = [one for one in known if one.owner is not None and owner in (None, one.owner)]
        if owner is None:
            mine = [one for one in mine if not one.demanded]
        gone = [request for request in mine if self.schedule.withdraw(request)]
        self.cancelled += len(gone)
        flying = {*mine}.difference(gone)
        self._call_off({request for request in flying if not request.followers})
        _call_all([(request.end, _failed(request.item.key, "cancelled")) for request in gone])
        return len(mine)

    def _call_off(self, requests: set[TransferRequest]) -> None:
        """Cancel the tier's jobs in which only these requests are unanswered."""
        for number, job in list(self._jobs.items()):
            left = {found[0] for found in job.requests if found is not None}
            if left <= requests and left:
                self.tier.cancel(number)


def _call_all(ends: Iterable[tuple[Any, ...]]) -> None:
    """Call functions with their arguments; an error of one is raised once all were called."""
    with ExitStack() as calls:
        for done, *given in reversed([*ends]):  # the last one is called first
            calls.callback(done, *given)


def _failed(key: bytes, reason: str) -> TierAnswer:
    return TierAnswer(0, 0, key, Outcome.FAILED, reason)


def copied(to: memoryview, source: memoryview, info: FrameInfo, first: int, known: Buffer) -> bool:
    """Copy stripes, from byte `first` of a body on; return whether they match known digests."""
    to[:], step = source, info.stripe_bytes
    known = known[DIGEST_BYTES * (first // step) :][: DIGEST_BYTES * (len(to) // step)]
    return not known or digests(to, step) == known


def from_memory(load: Load, store: Store) -> TierAnswer | None:
    """Answer a load with the body of a store that is under way; None if that does not match.

    Bytes that never left this process have no digests, and need none.
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
    target, known, first = load.target.cast("B")[:n_bytes], store.digests or b"", load.first * step
    if not copied(target, body[first : end * step], info, first, known):
        return None
    return TierAnswer(0, 0, load.key, Outcome.HIT, "", info, n_bytes)


_LONGEST_S = 0.1
_WAIT_OF_SEVERAL_S = 0.002


class OnTheWay(NamedTuple):
    """A frame that is being stored in a tier.

    Attributes:
        tier: Number of the tier.
        store: The store request; its body stays intact until the tier answers.
        mark: The copy that fills the body; None for a body that is complete.
        done: Called with the answers to this store and to others.
    """

    tier: int
    store: Store
    mark: CopyMark | None
    done: Done


def files(tiers: Sequence[Tier]) -> list[int]:
    """Return file descriptors that signal answers of tiers; [] if a tier has none."""
    found = [tier.fileno() for tier in tiers if hasattr(tier, "fileno")]
    return found if len(found) == len(tiers) and min(found, default=0) >= 0 else []


def rest(files: Iterable[int], seconds: float, pause_s: float = 0.0005) -> None:
    """Wait for the next answer of a tier; needs no lock.

    Args:
        files: File descriptors, as `files` returns them.
        seconds: Longest wait.
        pause_s: Longest wait without file descriptors.
    """
    waiting, polls = select.poll(), False  # `select.select` is limited to low descriptors
    for number in files:
        waiting.register(number, select.POLLIN)
        polls = True
    if polls:
        waiting.poll(1000 * seconds)
    else:
        time.sleep(min(seconds, pause_s))


_BUSY = attrgetter("busy")


class Mover:
    """Transfers of all tiers of a stack. Callers hold the KV lock.

    Args:
        deadline_s: Longest wait for a load.
        rates: Load rates by tier name, shared with the policy that decides whether to load.
        clock_ns: Clock of the lanes' guards and rests.

    Attributes:
        lanes: One for each tier, nearest first.
        from_memory: Loads answered with the bytes of a store that was under way.
        storing: Stores that are not answered yet.
    """

    def __init__(
        self,
        deadline_s: float,
        rates: dict[str, Rates] | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.deadline_s, self._clock_ns = deadline_s, clock_ns
        self.rates = {} if rates is None else rates
        self.lanes: list[Lane] = []
        self.from_memory = self.storing = 0

    @property
    def busy(self) -> bool:
        """Return whether any lane has requests; if not, there is nothing to `drain`."""
        return any(map(_BUSY, self.lanes))

    def add(self, tier: Tier, storing: Admission | None = None) -> None:
        """Add a tier below the others; see `Lane`."""
        rates = self.rates.setdefault(tier.name, Rates())
        self.lanes.append(Lane(tier, self.deadline_s, rates, self._clock_ns, storing))

    def forget(self) -> None:
        """Drop all tiers; pending requests get no answer."""
        self.lanes.clear()
        self.storing = 0

    # ---- stores

    def store(
        self, tier: int, items: Sequence[Store], done: Done, mark: CopyMark | None = None
    ) -> int:
        """Write frames in the background; return how many of them, from the first on, are queued.

        Args:
            tier: Number in the stack.
            items: The frames; their bodies must stay unchanged until the answer.
            done: Called with the answers, several at once, from a later `drain`.
            mark: The copy that fills the bodies; None for bodies that are complete.
        """
        lane = self.lanes[tier]
        schedule, bodies = lane.schedule, lane.bodies

        def answered(answers: list[TierAnswer]) -> None:
            self.storing -= len(answers)
            for answer in answers:
                if (body := bodies.get(answer.key)) and body.done is done:
                    del bodies[answer.key]
            done(answers)

        count = schedule.fitting([item.body.nbytes for item in items])
        schedule.refused += count < len(items)
        most, parts, n_bytes = schedule.background_bytes // _PARTS, list[list[Store]](), 0
        for item in items[:count]:
            if item.key in bodies or item.key in lane.stale:
                request = TransferRequest([item], answered, IOPriority.WRITE_BACK, mark=mark)
                lane.behind.setdefault(item.key, []).append(request)
            else:
                n_bytes += item.body.nbytes
                if not parts or n_bytes > most:
                    parts.append([])
                    n_bytes = item.body.nbytes
                parts[-1].append(item)
            bodies[item.key] = OnTheWay(tier, item, mark, done)
        for part in parts:
            schedule.queue(TransferRequest(part, answered, IOPriority.WRITE_BACK, mark=mark))
        self.storing += count
        return count

    def on_the_way(self, key: bytes, tier: int = -1) -> OnTheWay | None:
        """Return the frame of a key that is being stored in a tier (-1: in any), or None."""
        lanes = self.lanes if tier < 0 else (self.lanes[tier],)
        return next((lane.bodies[key] for lane in lanes if key in lane.bodies), None)

    def retract(self, keys: Collection[bytes]) -> None:
        """Withdraw the stores of these keys; bodies that were sent serve no loads any more."""
        for lane in self.lanes:
            lane.retract(keys)
            for key in keys:
                lane.bodies.pop(key, None)

    def drain(self, timeout_s: float = 0.0) -> int:
        """Send requests and handle answers, waiting for a first one; return how many came."""
        busy = [*filter(_BUSY, self.lanes)]
        return self._wait(busy, timeout_s) if busy else 0

    def await_end(self) -> bool:
        """Wait for the end of a transfer, be it barred by an erasure elsewhere; False if too long.

        Its pages are free then, whether it succeeded or not.
        """
        storing = self.storing
        return bool(self.drain(self.deadline_s)) or self.storing < storing

    def await_room(self, tier: int, n_bytes: int, ahead_bytes: int = 0) -> None:
        """Wait until a tier takes a frame, see `Lane.takes`, while any transfer is answered."""
        lane = self.lanes[tier]
        while not (lane.rests or lane.takes(n_bytes, ahead_bytes)) and self.drain(self.deadline_s):
            pass

    def collect(self) -> int:
        """Handle arrived answers without sending requests; return their number."""
        return sum(lane.poll() for lane in self.lanes)

    def _wait(self, lanes: Sequence[Lane], timeout_s: float) -> int:
        """Send requests, and wait for the first answers of some lanes; return their number."""
        handled, storing = sum(map(Lane.settle, lanes)), self.storing
        end_s = time.monotonic() + timeout_s
        while not handled and self.storing >= storing and any(map(_BUSY, lanes)):
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                break
            if len(lanes) == 1:
                handled = lanes[0].settle(left_s)
                continue
            for lane in lanes:
                lane.receive(left_s)
            rest(files([lane.tier for lane in lanes]), left_s, _WAIT_OF_SEVERAL_S)
            handled = sum(map(Lane.settle, lanes))
        return handled

    # ---- loads

    def load(self, wanted: Sequence[tuple[int, Load]]) -> tuple[list[TierAnswer], set[int]]:
        """Load frames from any tiers, all at once, and wait for all of them.

        Args:
            wanted: Loads, each with the number of its tier.

        Returns:
            One answer for each load, and the indices of loads with a target that an overdue tier
            may still write to (their answers are `FAILED`).
        """
        answers, lent = dict[int, TierAnswer](), set[int]()
        requests, n_bytes = list[TransferRequest | None](), Counter[int]()
        for index, (tier, item) in enumerate(wanted):
            done = lambda came, index=index: answers.setdefault(index, *came)  # noqa: E731
            requests.append(self.ask(tier, item, done))
            n_bytes[tier] += item.target.nbytes
        started = compiling.now_s()
        ends = {tier: started + self.lanes[tier].patience_s(n) for tier, n in n_bytes.items()}
        while left := [index for index in range(len(wanted)) if index not in answers]:
            now, tiers = compiling.now_s(), {wanted[index][0] for index in left}
            # Poll once more after the end: the tier may have answered at its own deadline.
            self.wait(tiers, min(max(min(ends[tier] for tier in tiers) - now, 0.0), _LONGEST_S))
            for index in left:
                (tier, item), request = wanted[index], requests[index]
                if ends[tier] <= now and index not in answers and request is not None:
                    failed = TierAnswer(0, index, item.key, Outcome.FAILED, "deadline passed")
                    answers[index] = failed._replace(seconds=now - started)
                    if self.lanes[tier].give_up(request):
                        lent.add(index)
        return [answers[index] for index in range(len(wanted))], lent

    def wait(self, tiers: Iterable[int], timeout_s: float) -> int:
        """Send and handle answers like `drain`, of these tiers only."""
        return self._wait([self.lanes[tier] for tier in tiers], timeout_s)

    def ask(
        self, tier: int, item: Load, done: Done, owner: object = None,
        priority: IOPriority = IOPriority.DEMAND,
    ) -> TransferRequest | None:  # fmt: skip
        """Load a frame as a demand or a prefetch; a later `drain` sends the request.

        Args:
            tier: Number in the stack.
            item: The load.
            done: Called with the answer, now or in a later `drain`; "busy" where there is no room
                for a prefetch.
            owner: Owner for `cancel`.
            priority: Demand or prefetch.

        Returns:
            The request for `Lane.give_up`; None if it was answered at once, as from memory.
        """
        held = self.on_the_way(item.key) if self.storing else None
        if held is not None and held.mark is not None and not held.mark.done():
            if priority is not IOPriority.DEMAND:
                done([TierAnswer(0, 0, item.key, Outcome.FAILED, "busy")])
                return None
            held.mark.wait()
        answer = from_memory(item, held.store) if held else None
        if answer is not None:
            self.from_memory += 1
            done([answer])
            return None
        request = TransferRequest([item], done, priority, owner)
        if not self.lanes[tier].ask(request):
            done([TierAnswer(0, 0, item.key, Outcome.FAILED, "busy")])
            return None
        return request

    def ask_all(
        self, tier: int, items: Sequence[Load], done: Done, owner: object = None
    ) -> TransferRequest:
        """Load frames as one demand, answered as a whole; a later `drain` sends it.

        Args:
            tier: Number in the stack.
            items: The loads.
            done: Called with all answers, in their order, in a later `drain`.
            owner: Owner for `cancel`.

        Returns:
            The request for `Lane.give_up`.
        """
        request = TransferRequest(items, done, IOPriority.DEMAND, owner, alone=True)
        self.lanes[tier].ask(request)
        return request

    def cancel(self, owner: object = None) -> int:
        """Cancel the loads of an owner, or all prefetches; each is still answered."""
        return sum(lane.cancel(owner) for lane in self.lanes)
