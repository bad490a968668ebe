"""A demand finds at most one chunk of prefetches before it: in a queueing model, and on real tiers.

Everything is counted in bytes, or timed on a clock that the test turns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from flowkv.testing import MemoryTier
from flowkv.tiers import Completion, FrameInfo, Load, Outcome, Store
from flowkv.tiers.disk import DiskTier
from tests.cache.fakes import Wrapped, lasting
from tests.cache.toy import make_kv, published, simple
from tests.inside import IOPriority, ManualClock, Mover, RegretGuard, Schedule, TransferRequest

KIB, MIB = 1 << 10, 1 << 20
MEMORY = memoryview(bytearray(64 * KIB))
LAYOUT = bytes(16)


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "little")


# ---- a queueing model around the very same schedule: a tier that moves a byte a nanosecond


def latencies(arrivals: Sequence[tuple[int, int, int, bool]], chunk: int) -> dict[int, int]:
    """Nanoseconds that each demand waited.

    Args:
        arrivals: (time, key, bytes, whether it is demanded), by time.
        chunk: Bytes of prefetches in flight.
    """
    schedule = Schedule(1 << 40, 1 << 40, 1 << 40, chunk_bytes=chunk)
    waiting, flying, waited = deque(arrivals), deque[TransferRequest](), dict[int, int]()
    now, free_at = 0, 0
    born: dict[TransferRequest, tuple[int, int]] = {}
    while waiting or flying:
        at_end = free_at if flying else 1 << 60
        if waiting and waiting[0][0] <= at_end:
            number = len(arrivals) - len(waiting)
            starts = not flying
            now, key, n_bytes, demanded = waiting.popleft()
            priority = IOPriority.DEMAND if demanded else IOPriority.PREFETCH
            load = Load(key_of(key), MEMORY[:n_bytes], LAYOUT)
            wish = TransferRequest([load], lambda _: None, priority, "owner")
            born[wish] = number, now
            schedule.ask(wish)
        else:
            now, first, starts = at_end, flying.popleft(), True
            for wish in (first, *schedule.end(first)):
                number, at = born[wish]
                if arrivals[number][3]:
                    waited[number] = now - at
        flying.extend(schedule.take())
        if flying and starts:
            free_at = now + flying[0].n_bytes
    return waited


ARRIVALS = st.lists(
    st.tuples(st.integers(0, 400), st.integers(0, 40), st.booleans()), min_size=1, max_size=40
)


def workload(arrivals: Sequence[tuple[int, int, bool]]) -> list[tuple[int, int, int, bool]]:
    """With sizes that belong to the keys, so that equal keys are one load."""
    return [(at, key, 1 + key * 7 % 50, demanded) for at, key, demanded in sorted(arrivals)]


@given(ARRIVALS, st.integers(1, 120))
@example([(197, 7, False), (198, 5, True), (283, 0, False)], 1)  # one comes as another ends
def test_no_demand_waits_longer_than_without_prefetches_but_for_a_chunk(
    arrivals: list[tuple[int, int, bool]], chunk: int
) -> None:
    events = workload(arrivals)
    demands = [n for n, event in enumerate(events) if event[3]]
    alone = latencies([events[n] for n in demands], chunk)
    beside = latencies(events, chunk)
    longest = max([chunk, *(n_bytes for _, _, n_bytes, demanded in events if not demanded)])
    for order, number in enumerate(demands):
        assert beside[number] <= alone[order] + longest


def test_without_chunks_a_demand_would_wait_for_all_of_them() -> None:
    """So the model can tell."""
    events = [(0, key, 50, False) for key in range(100)] + [(1, 1000, 10, True)]
    assert latencies(events, chunk=1 << 40)[100] == 100 * 50 - 1 + 10
    assert latencies(events, chunk=50)[100] == 50 - 1 + 10


# ---- the mover over real tiers


class Witness(Wrapped):
    """Notes what was asked of a tier and what it still owed then.

    Attributes:
        before: For each demand, the bytes of prefetches that were sent and not answered then.
        after: Prefetches that were sent while it was not answered.
    """

    def __init__(self, inner: Any, demands: set[bytes]) -> None:
        super().__init__(inner)
        self.demands, self.owed = demands, dict[tuple[int, int], Load]()
        self.before: list[int] = []
        self.after = self.loads = 0

    def submit_load(self, items: Sequence[Load], *, deadline_s: float = 10.0) -> int:
        job = int(self.inner.submit_load(items, deadline_s=deadline_s))
        self.loads += len(items)
        for item in items:
            sent = [one.target.nbytes for one in self.owed.values() if one.key not in self.demands]
            if item.key in self.demands:
                self.before.append(sum(sent))
            else:
                self.after += any(one.key in self.demands for one in self.owed.values())
        for index, item in enumerate(items):
            self.owed[job, index] = item
        return job

    def poll(self, timeout_s: float = 0.0) -> list[Completion]:
        answers: list[Completion] = self.inner.poll(timeout_s)
        for answer in answers:
            self.owed.pop((answer.job, answer.item), None)
        return answers


class Paced(MemoryTier):
    """Memory that takes a nanosecond a byte, one item after another, on a clock of the test's."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self.clock, self.free_ns = clock, 0
        self._later: deque[tuple[int, Completion]] = deque()

    def submit_load(self, items: Sequence[Load], *, deadline_s: float = 10.0) -> int:
        job = super().submit_load(items, deadline_s=deadline_s)
        for answer in super().poll():
            n_bytes = items[answer.item].target.nbytes
            self.free_ns = max(self.free_ns, self.clock.now_ns()) + n_bytes
            self._later.append((self.free_ns, answer))
        return job

    def poll(self, timeout_s: float = 0.0) -> list[Completion]:
        if timeout_s > 0 and self._later:
            self.clock.advance(ns=max(0, self._later[0][0] - self.clock.now_ns()))
        answers = super().poll()
        while self._later and self._later[0][0] <= self.clock.now_ns():
            answers.append(self._later.popleft()[1])
        return answers


def fill(tier: Any, count: int, n_bytes: int) -> None:
    info = FrameInfo("page", 0, 0, LAYOUT, bytes(32), bytes(32), 0, 8, n_bytes)
    body = memoryview(bytes(n_bytes))
    tier.submit_store([Store(key_of(number), info, body) for number in range(count)])
    left = count
    while left:
        left -= len(tier.poll(1.0))


def ask(mover: Mover, numbers: Sequence[int], n_bytes: int) -> tuple[int, list[Completion]]:
    """Prefetches; returns how many were taken, and the answers that come."""
    told, taken = list[Completion](), 0
    for number in numbers:
        load = Load(key_of(number), memoryview(bytearray(n_bytes)), LAYOUT)
        if mover.ask(0, load, told.extend, "owner", IOPriority.PREFETCH) is None:
            assert told.pop().reason == "busy"
            break
        taken += 1
    return taken, told


def demand(mover: Mover, number: int, n_bytes: int) -> Completion:
    load = Load(key_of(number), memoryview(bytearray(n_bytes)), LAYOUT)
    (answer,), lent = mover.load([(0, load)])
    assert answer.outcome is Outcome.HIT and not lent
    return answer


@pytest.mark.parametrize("count", [1, 40, 200])
@pytest.mark.parametrize("drains", [0, 1, 3])
def test_on_a_disk_a_demand_finds_at_most_one_chunk(
    tmp_path: Path, count: int, drains: int
) -> None:
    size, total = 64 * KIB, 210
    with closing(DiskTier(tmp_path / "kv", 64 * MIB)) as disk:
        fill(disk, total, size)
        tier = Witness(disk, {key_of(number) for number in range(200, total)})
        mover = Mover(10.0)
        mover.add(tier)
        taken, told = ask(mover, range(count), size)
        assert taken == count
        for number in range(200, total):
            for _ in range(drains):
                mover.drain()
            demand(mover, number, size)
        chunk = mover.lanes[0].schedule.chunk_bytes
        assert len(tier.before) == total - 200
        assert max(tier.before) <= chunk and not tier.after
        if count == 200 and drains:
            assert max(tier.before) > 0, "or nothing was tried"
        while len(told) < count:
            mover.drain(1.0)
        assert all(answer.outcome is Outcome.HIT for answer in told)
        assert tier.loads == count + total - 200


@pytest.mark.parametrize("count", [1, 10, 300])
def test_on_a_clock_a_demand_waits_for_itself_and_one_chunk(count: int) -> None:
    clock, size = ManualClock(), 64 * KIB
    tier = Paced(clock)
    fill(tier, count + 1, size)
    mover = Mover(10.0)
    mover.add(tier)
    chunk = mover.lanes[0].schedule.chunk_bytes
    ask(mover, range(count), size)
    mover.drain()
    began_ns = clock.now_ns()
    demand(mover, count, size)
    assert clock.now_ns() - began_ns == size + min(chunk, count * size)


def guarded(clock: ManualClock, **options: object) -> tuple[Mover, Any]:
    tier = Paced(clock)
    fill(tier, 300, 64 * KIB)
    mover = Mover(10.0)
    mover.add(tier)
    lane = mover.lanes[0]
    lane.clock_ns, lane.guard = clock.now_ns, RegretGuard(**options)
    return mover, lane


def test_prefetches_that_are_in_the_way_too_often_are_switched_off_and_tried_again() -> None:
    clock, size = ManualClock(), 64 * KIB
    mover, lane = guarded(clock, trial_bytes=5 * MIB, rest_s=10.0, interference=0.0)
    number, in_the_way = 0, 0
    while lane.guard.rests == 0 and number < 200:
        taken, _ = ask(mover, range(number, number + 16), size)
        assert taken == 16
        mover.drain()
        demand(mover, 250, size)
        in_the_way += 16 * size
        assert lane.guard.in_the_way_bytes == in_the_way
        mover.drain(1.0)
        number += 16
    assert in_the_way <= 5 * MIB + 16 * size, "it may not cost more than its trial, and one more"
    asked, _ = ask(mover, range(200, 216), size)
    assert asked == 0 and lane.schedule.refused == 1
    assert demand(mover, 200, size).outcome is Outcome.HIT
    clock.advance(s=10.0)
    assert ask(mover, range(201, 216), size)[0] == 15


def test_what_waits_is_called_off_when_it_is_switched_off() -> None:
    clock, size = ManualClock(), 64 * KIB
    mover, lane = guarded(clock, trial_bytes=MIB, interference=0.0)
    _, told = ask(mover, range(200), size)
    mover.drain()
    demand(mover, 250, size)
    assert lane.guard.rests == 1
    mover.drain()
    assert len(told) == 200 and not lane.schedule.waiting
    assert sum(answer.reason == "cancelled" for answer in told) >= 200 - 4 * MIB // size


def test_prefetches_that_nobody_uses_are_switched_off() -> None:
    clock = ManualClock()
    mover, lane = guarded(clock, trial_bytes=MIB, waste=0.5)
    lane.guard.wasted(clock.now_ns(), MIB)
    assert ask(mover, range(4), 64 * KIB)[0] == 4
    lane.guard.wasted(clock.now_ns(), 1)
    assert ask(mover, range(4, 8), 64 * KIB)[0] == 0


# ---- with pages


@pytest.mark.parametrize("used", [True, False])
def test_the_guard_learns_what_became_of_prefetched_pages(used: bool) -> None:
    prompt = [1] * 24
    kv = make_kv(simple(), pages=8, tiers=[lasting()])
    published(kv, prompt)
    assert kv.flush(60)
    store = kv.planner.store
    guard = store.stack.mover.lanes[0].guard
    with kv.lock:
        while store.eviction.make_room(0, 1):
            pass
    coming = kv.prefetch([*prompt, 0])
    assert coming.wait(60) and coming.arrived == 3 and len(store.prefetched_unused) == 3
    assert (guard.saved_bytes, guard.wasted_bytes) == (0, 0)
    if used:
        with kv.open([*prompt, 0]) as seq:
            assert seq.reused == 24
    with kv.lock:
        while store.eviction.make_room(0, 1):
            pass
    assert not store.prefetched_unused
    came = 3 * 4096
    assert (guard.saved_bytes, guard.wasted_bytes) == ((came, 0) if used else (0, came))
