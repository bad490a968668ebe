"""Transfers over tiers that answer late, never, or badly: what is shared, bounded, called off."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowkv import KV
from flowkv.testing import MemoryTier
from flowkv.tiers import Completion, FrameInfo, Load, Outcome, Store
from flowkv.tiers.disk import DiskTier
from tests.cache.audit import audit, audit_empty
from tests.cache.fakes import Deferred, Wrapped, lasting
from tests.cache.toy import check_content, evict_all, make_kv, opened, published, settle, simple
from tests.inside import (
    Demoted,
    Failed,
    Hit,
    HostTier,
    IOPriority,
    ManualClock,
    Miss,
    Mover,
    Promoted,
    Published,
    digests,
)
from tests.inside import mover as inside_mover

P, Q, R = [1] * 24, [2] * 24, [3] * 24
BODY = bytes(range(256)) * 16
LAYOUT = bytes(16)
INFO = FrameInfo("page", 0, 0, LAYOUT, bytes(32), bytes(32), 0, 8, 4096)


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "little")


class Slow(Wrapped):
    """Takes everything; answers as many items as it is told to, in the order they came."""

    def __init__(self, inner: Any, **changes: Any) -> None:
        super().__init__(inner, **changes)
        self.jobs: list[tuple[str, int]] = []
        self.waiting: list[tuple[int, int, Load | Store]] = []
        self.allowed = 0
        self.cancelled: list[int] = []
        self._ready: list[Completion] = []

    def submit_load(self, items: Sequence[Load], *, deadline_s: float = 10.0) -> int:
        return self._take("load", items)

    def submit_store(self, items: Sequence[Store], *, deadline_s: float = 60.0) -> int:
        return self._take("store", items)

    def _take(self, kind: str, items: Sequence[Any]) -> int:
        self.jobs.append((kind, len(items)))
        number = len(self.jobs)
        self.waiting += [(number, index, item) for index, item in enumerate(items)]
        return number

    def cancel(self, job: int) -> None:
        self.cancelled.append(job)
        for number, index, item in [each for each in self.waiting if each[0] == job]:
            self.waiting.remove((number, index, item))
            answer = Completion(number, index, item.key, Outcome.FAILED, "cancelled")
            self._ready.append(answer)

    def poll(self, timeout_s: float = 0.0) -> list[Completion]:
        if timeout_s > 0:
            self.allowed += 1
        while self.allowed and self.waiting:
            self.allowed -= 1
            number, index, item = self.waiting.pop(0)
            submit = self.inner.submit_load if isinstance(item, Load) else self.inner.submit_store
            submit([item])
            (answer,) = self.inner.poll(0.0)
            self._ready.append(answer._replace(job=number, item=index))
        ready, self._ready = self._ready, []
        return ready


def mover_over(*tiers: Any, deadline_s: float = 5.0) -> Mover:
    mover = Mover(deadline_s)
    for tier in tiers:
        mover.add(tier)
    return mover


def stored(tier: MemoryTier, *numbers: int) -> None:
    for number in numbers:
        tier.submit_store([Store(key_of(number), INFO, memoryview(BODY))])
        tier.poll()


def store(
    mover: Mover,
    tier: int,
    number: int,
    told: list[Completion] | None = None,
    body: bytes = BODY,
    mark: Any = None,
) -> bool:
    """Stores a frame in the background; False if there is no room in the queue."""
    told = [] if told is None else told
    item = Store(key_of(number), INFO, memoryview(body))
    return bool(mover.store(tier, [item], told.extend, mark))


def flushed(mover: Mover, timeout_s: float) -> bool:
    """Waits until nothing is being stored; False if that took too long."""
    end = time.monotonic() + timeout_s
    while mover.storing and time.monotonic() < end:
        mover.drain(0.1)
    return not mover.storing


def load_of(number: int) -> tuple[Load, bytearray]:
    target = bytearray(4096)
    return Load(key_of(number), memoryview(target), LAYOUT), target


# ---- the mover itself


def test_a_load_takes_what_is_being_stored_from_memory() -> None:
    tier = Slow(MemoryTier())
    mover, answers = mover_over(tier), list[Completion]()
    assert store(mover, 0, 1, answers)
    load, target = load_of(1)
    (answer,), lent = mover.load([(0, load)])
    assert answer.outcome is Outcome.HIT and answer.info == INFO and target == BODY
    assert not lent and not tier.jobs and mover.from_memory == 1
    mover.drain()
    load, target = load_of(1)
    assert mover.load([(0, load)])[0][0].outcome is Outcome.HIT
    assert tier.jobs == [("store", 1)]
    tier.allowed = 9
    assert flushed(mover, 1.0) and [a.outcome for a in answers] == [Outcome.STORED]
    assert mover.on_the_way(key_of(1)) is None


@pytest.mark.parametrize(
    "change", [{"layout": b"x" * 16}, {"first": 1}, {"stripes": 2}, {"target": bytearray(100)}]
)
def test_memory_gives_only_what_was_asked_for(change: dict[str, Any]) -> None:
    mover = mover_over(Slow(MemoryTier()))
    store(mover, 0, 1)
    if "target" in change:
        change = {"target": memoryview(change["target"])}
    wanted = load_of(1)[0]._replace(**change)
    (answer,), _ = mover.load([(0, wanted)])
    assert mover.from_memory == 0 and answer.outcome is not Outcome.HIT


class Coming:
    """A copy that is over when it is told to be."""

    def __init__(self) -> None:
        self.over, self.waited = False, list[float]()

    def done(self) -> bool:
        return self.over

    def wait(self, timeout_s: float = math.inf) -> bool:
        self.waited.append(timeout_s)
        self.over |= timeout_s == math.inf
        return self.over


def test_a_store_is_sent_once_its_body_has_come() -> None:
    """Who waits for stores waits no longer than was asked; a prefetch waits for no copy."""
    tier, answers = Deferred(MemoryTier()), list[Completion]()
    mover, mark = mover_over(tier), Coming()
    assert store(mover, 0, 1, answers, mark=mark)
    assert not mover.drain() and not mark.waited and not mover.drain(0.25)
    assert 0 < max(mark.waited) <= 0.25 and not mark.waited.clear()
    assert not tier.waiting and mover.storing == 1
    load, target = load_of(1)
    assert mover.ask(0, load, answers.extend, priority=IOPriority.PREFETCH) is None
    assert answers.pop().reason == "busy" and not mark.waited
    assert mover.ask(0, load, answers.extend) is None and mark.over
    assert answers.pop().outcome is Outcome.HIT and target == BODY
    assert mover.drain(1.0) == 1 and answers.pop().outcome is Outcome.STORED


def test_pages_of_a_batch_wait_where_their_tier_goes_away_in_the_middle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, disk = ManualClock(), lasting()
    kv = simple_kv(disk, pages=16, clock=clock)
    published(kv, [*range(4)])  # the cache is bound
    store, calls = kv.planner.store, list[int]()
    save = store.stack.store

    def going(frames: Sequence[Any], *given: Any) -> list[Any]:
        monkeypatch.setattr(store.stack, "store", save)
        calls.append(len(frames))
        refused = save(frames[:1], *given)
        store.stack.mover.lanes[0].rest(1.0)
        return [*refused, *(block for block, *_ in frames[1:])]

    monkeypatch.setattr(store.stack, "store", going)
    published(kv, P)
    assert calls == [2] and len(store.stack.unwritten) == 2
    clock.advance(s=2.0)
    assert kv.flush(60) and len(disk.frames) == 3


def test_a_part_is_given_from_memory_too() -> None:
    mover = mover_over(Slow(MemoryTier()))
    two = bytes(4096) + BODY
    store(mover, 0, 1, body=two)
    load, target = load_of(1)
    (answer,), _ = mover.load([(0, load._replace(first=1, stripes=1))])
    assert answer.outcome is Outcome.HIT and answer.n_bytes == 4096 and target == BODY


def test_loads_of_several_tiers_are_one_job_each() -> None:
    near, far = Slow(MemoryTier(name="near")), Slow(MemoryTier(name="far"))
    stored(near.inner, 1, 2)
    stored(far.inner, 3)
    near.allowed = far.allowed = 9
    loads = {number: load_of(number) for number in (1, 2, 3)}
    mover = mover_over(near, far)
    wanted = [(number == 3, loads[number][0]) for number in (1, 3, 2)]
    answers, lent = mover.load(wanted)
    assert [a.key for a in answers] == [key_of(n) for n in (1, 3, 2)] and not lent
    assert all(a.outcome is Outcome.HIT for a in answers)
    assert all(target == BODY for _, target in loads.values())
    assert near.jobs == [("load", 2)] and far.jobs == [("load", 1)]


def test_the_same_frame_is_loaded_once() -> None:
    tier = Slow(MemoryTier())
    stored(tier.inner, 1)
    mover, told = mover_over(tier), list[Completion]()
    first, one = load_of(1)
    assert mover.ask(0, first, told.extend, "owner", IOPriority.PREFETCH)
    mover.drain()
    second, two = load_of(1)
    tier.allowed = 9
    (answer,), _ = mover.load([(0, second)])
    assert answer.outcome is Outcome.HIT and one == two == BODY and len(told) == 1
    assert tier.jobs == [("load", 1)] and mover.lanes[0].schedule.joined == 1


def test_who_waits_with_another_asks_anew_when_that_fails() -> None:
    tier = Slow(MemoryTier())
    stored(tier.inner, 1)
    mover, told = mover_over(tier), list[Completion]()
    first, _ = load_of(1)
    mover.ask(0, first, told.extend, "owner", IOPriority.PREFETCH)
    mover.drain()
    second, two = load_of(1)

    def fail() -> None:
        job, index, item = tier.waiting.pop(0)
        tier._ready.append(Completion(job, index, item.key, Outcome.FAILED, "EIO"))
        tier.allowed = 9

    original = tier.poll
    tier.poll = lambda timeout_s=0.0: (fail() if len(tier.jobs) == 1 else None) or original()
    (answer,), _ = mover.load([(0, second)])
    assert answer.outcome is Outcome.HIT and two == BODY and told[0].reason == "EIO"
    assert tier.jobs == [("load", 1), ("load", 1)]


@pytest.mark.parametrize("right", [True, False])
def test_bytes_that_came_unread_are_verified_for_who_waits_with_their_load(right: bool) -> None:
    tier, told, also = Slow(MemoryTier()), list[Completion](), list[Completion]()
    stored(tier.inner, 1)
    mover, (first, one), (second, two) = mover_over(tier), load_of(1), load_of(1)
    mover.ask(0, first._replace(unread=True, direct=True), told.extend)
    mover.drain()
    mover.ask(0, second, also.extend)
    original, tier.allowed = tier.poll, 9

    def unread(timeout_s: float = 0.0) -> list[Completion]:
        found = original(timeout_s)
        if len(tier.jobs) == 1:
            one[9] ^= not right
            found = [answer._replace(digests=digests(BODY, 4096)) for answer in found]
        return found

    tier.poll = unread
    while not also:
        mover.drain(0.01)
    assert told[0].digests and not also[0].digests
    assert also[0].outcome is Outcome.HIT and two == BODY and (one == BODY) == right
    assert tier.jobs == [("load", 1)] * (1 if right else 2), "wrong ones are asked for again"


def test_a_cancelled_prefetch_is_answered_and_its_job_called_off() -> None:
    tier = Slow(MemoryTier())
    stored(tier.inner, *range(4))
    mover, told = mover_over(tier), list[Completion]()
    for owner in "ab":
        for number in (0, 1) if owner == "a" else (2, 3):
            mover.ask(0, load_of(number)[0], told.extend, owner, IOPriority.PREFETCH)
    mover.drain()
    assert tier.jobs == [("load", 2)] * 2, "those of two owners are two jobs"
    assert mover.cancel("a") == 2 and tier.cancelled == [1]
    tier.allowed = 9
    mover.drain()
    assert [a.reason for a in told] == ["cancelled"] * 2 + [""] * 2
    assert mover.lanes[0].cancelled == 2 and not mover.lanes[0].busy


def test_what_somebody_waits_for_is_not_called_off() -> None:
    tier = Slow(MemoryTier())
    stored(tier.inner, 1)
    mover, told = mover_over(tier), list[Completion]()
    mover.ask(0, load_of(1)[0], told.extend, "owner", IOPriority.PREFETCH)
    lane, (load, target) = mover.lanes[0], load_of(1)

    def cancelling(timeout_s: float = 0.0) -> list[Completion]:
        assert mover.cancel("owner") == (not told)
        tier.allowed = 9
        return Slow.poll(tier, timeout_s)

    tier.poll = cancelling
    (answer,), _ = mover.load([(0, load)])
    assert answer.outcome is Outcome.HIT and target == BODY and not tier.cancelled
    assert len(told) == 1 and not lane.busy


def test_an_overdue_load_is_owed_and_called_off() -> None:
    tier = Slow(MemoryTier())
    stored(tier.inner, 1)
    tier.poll = lambda timeout_s=0.0: []
    mover = mover_over(tier, deadline_s=0.02)
    (answer,), lent = mover.load([(0, load_of(1)[0])])
    assert (answer.outcome, answer.reason) == (Outcome.FAILED, "deadline passed") and lent == {0}
    assert mover.lanes[0].overdue == 1 and tier.cancelled == [1]
    del tier.poll
    mover.drain()
    assert mover.lanes[0].overdue == 0 and not mover.lanes[0].busy


def test_what_was_never_sent_is_not_owed() -> None:
    tier = Slow(MemoryTier())
    tier.poll = lambda timeout_s=0.0: []
    mover = mover_over(tier, deadline_s=0.02)
    mover.lanes[0].schedule.demand_bytes = 4096
    loads = [(0, load_of(number)[0]) for number in range(3)]
    answers, lent = mover.load(loads)
    assert all(a.outcome is Outcome.FAILED for a in answers) and lent == {0}
    assert tier.jobs == [("load", 1)]


def batch(mover: Mover, *numbers: int) -> tuple[Any, list[list[Completion]]]:
    """Loads that are asked for together; the request, and the answers once they are told."""
    told: list[list[Completion]] = []
    items = [load_of(number)[0] for number in numbers]
    return mover.ask_all(0, items, told.append, "me"), told


def test_loads_asked_together_are_answered_once_all_have_come() -> None:
    tier = Slow(MemoryTier())
    stored(tier.inner, 1, 3)
    mover = mover_over(tier)
    request, told = batch(mover, 1, 2, 3)
    other, alone = load_of(1), list[Completion]()
    mover.ask(0, other[0], alone.extend)
    for allowed in (1, 1, 0):
        mover.wait([0], 0.0)
        assert not told and not request.ended
        tier.allowed = allowed
    tier.allowed = 2
    mover.wait([0], 0.0)
    ((first, second, third),) = told
    assert request.ended and (first.key, second.key, third.key) == (key_of(1), key_of(2), key_of(3))
    assert [one.outcome for one in told[0]] == [Outcome.HIT, Outcome.MISS, Outcome.HIT]
    assert [one.outcome for one in alone] == [Outcome.HIT], "a load of its own"
    assert other[1] == BODY and not mover.busy


@pytest.mark.parametrize("come", [0, 1, 2])
def test_loads_asked_together_are_owed_together(come: int) -> None:
    tier = Slow(MemoryTier())
    stored(tier.inner, 1, 2, 3)
    mover = mover_over(tier)
    request, told = batch(mover, 1, 2, 3)
    tier.allowed = come
    mover.wait([0], 0.0)
    mover.collect()
    assert mover.lanes[0].give_up(request) and not told
    assert mover.lanes[0].overdue == 1 and len(tier.cancelled) == 1
    mover.collect()
    ((*found,),) = told
    assert [one.outcome for one in found] == [Outcome.HIT] * come + [Outcome.FAILED] * (3 - come)
    assert mover.lanes[0].overdue == 0 and not mover.busy


def test_loads_asked_together_can_be_taken_back_before_they_are_sent() -> None:
    mover = mover_over(Slow(MemoryTier()))
    request, told = batch(mover, 1, 2)
    assert not mover.lanes[0].give_up(request) and not told and not mover.busy
    _, told = batch(mover, 1, 2)
    assert mover.cancel("me") == 1
    assert [one.reason for one in told[0]] == ["cancelled"] * 2
    assert [one.key for one in told[0]] == [key_of(1), key_of(2)] and not mover.busy


def test_loads_of_one_request_are_given_up_together() -> None:
    """As many as there are, the request is overdue once, until its tier answers."""
    tier, told = Slow(MemoryTier()), list[Any]()
    stored(tier.inner, *range(3))
    mover = mover_over(tier)
    loads = [Load(key_of(n), memoryview(bytearray(4096)), LAYOUT, 0) for n in range(3)]
    request, lane = mover.ask_all(0, loads, told.append), mover.lanes[0]
    mover.drain()
    for _ in range(2000):
        assert lane.give_up(request) and lane.overdue == 1
    tier.allowed = 3
    assert mover.drain() and len(told) == 1 and lane.overdue == 0 and lane.answering


def test_a_closed_tier_fails_all_that_is_asked_together() -> None:
    tier = HostTier(1 << 20)
    mover = mover_over(tier)
    tier.close()
    _, told = batch(mover, 1, 2)
    mover.wait([0], 0.0)
    assert [(one.key, one.reason) for one in told[0]] == [
        (key_of(1), "closed"),
        (key_of(2), "closed"),
    ]


def test_a_closed_tier_fails_what_it_is_asked() -> None:
    from tests.inside import StateError

    class Closed(Wrapped):
        def submit_load(self, items: Any, *, deadline_s: float = 0.0) -> int:
            raise StateError("tier is closed", "Open another one")

        submit_store = submit_load

    mover, told = mover_over(Closed(MemoryTier())), list[Completion]()
    store(mover, 0, 1, told)
    (answer,), lent = mover.load([(0, load_of(2)[0])])
    assert answer.reason == told[0].reason == "closed" and not lent and not mover.storing


def test_stores_are_measured_and_bound_what_is_in_flight() -> None:
    class Timed(MemoryTier):
        def submit_store(self, items: Any, *, deadline_s: float = 60.0) -> int:
            return self._answer([self._store(item)._replace(seconds=0.5) for item in items])

    mover = mover_over(Timed())
    for number in range(12):
        store(mover, 0, number)
    mover.drain()
    lane = mover.lanes[0]
    assert lane.stores.bytes_per_s == pytest.approx(12 * 4096 / 0.5)
    assert lane.schedule.background_bytes == 1 << 23, "a slow tier gets no less than this"


@pytest.mark.parametrize(
    ("seconds", "n_bytes", "wanted"), [(0.8, 1 << 25, 1 << 26), (0.01, 1 << 20, 10 << 20)]
)
def test_a_tier_that_takes_long_for_each_job_gets_more_jobs(
    seconds: float, n_bytes: int, wanted: int
) -> None:
    """In flight is a tenth of a second at the tier's rate, or twice what one job takes."""

    class Timed(MemoryTier):
        def submit_store(self, items: Any, *, deadline_s: float = 60.0) -> int:
            said = dict(seconds=seconds, n_bytes=n_bytes)
            return self._answer([self._store(item)._replace(**said) for item in items])

    mover = mover_over(Timed())
    store(mover, 0, 0)
    mover.drain()
    assert mover.lanes[0].schedule.background_bytes == pytest.approx(wanted, rel=0.01)


# ---- stores of many frames


class OneAtATime(Slow):
    """Checks that no key has two stores under way, which a tier may carry out in any order."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.sent: list[Any] = []

    def _take(self, kind: str, items: Sequence[Any]) -> int:
        keys = [item.key for _, _, item in self.waiting] + [item.key for item in items]
        assert len(set(keys)) == len(keys)
        self.sent += [item.body.obj for item in items]
        return super()._take(kind, items)


@given(st.randoms(use_true_random=False), st.integers(1, 30))
@settings(max_examples=80, deadline=None)
def test_stores_that_are_taken_back_and_repeated(rng: Random, most: int) -> None:
    """Each is answered once, and sent once unless it was taken back before."""
    tier = OneAtATime(MemoryTier())
    mover = mover_over(tier)
    (lane,) = mover.lanes
    lane.schedule.queue_bytes = most * len(BODY)
    lane.schedule.background_bytes = rng.randint(1, 20) * len(BODY)
    answers, bodies = list[tuple[bytes, int]](), dict[tuple[bytes, int], bytearray]()
    newest = dict[bytes, tuple[bytes, int]]()  # of each key what was stored last, unless taken back

    def answered(came: list[Completion], count: int) -> None:
        for answer in came:
            one = answer.key, count
            assert one in bodies and one not in answers
            answers.append(one)
            was_sent = any(bodies[one] is body for body in tier.sent)
            assert was_sent == (answer.outcome is Outcome.STORED)
            if newest.get(answer.key) == one:
                del newest[answer.key]

    for count in range(rng.randint(3, 30)):
        action = rng.randrange(4)
        keys = [key_of(n) for n in rng.sample(range(12), rng.randint(1, 9))]
        if action <= 1:
            keys = [key for key in keys if key not in newest]  # a stack stores no frame twice
            given = [bytearray(len(BODY)) for _ in keys]
            items = [
                Store(key, INFO, memoryview(body)) for key, body in zip(keys, given, strict=True)
            ]
            room = most - lane.schedule.queued_bytes // len(BODY)
            taken = mover.store(0, items, lambda came, n=count: answered(came, n))
            assert taken == min(len(items), room), "as many as the queue has room for"
            for key, body in [*zip(keys, given, strict=True)][:taken]:
                bodies[key, count] = body
                newest[key] = key, count
        elif action == 2:
            mover.retract(keys)
            for key in keys:
                newest.pop(key, None)
                assert mover.on_the_way(key) is None
        else:
            tier.allowed = rng.randrange(12)
            mover.drain()
        assert mover.storing == len(bodies) - len(answers)
        for key, one in newest.items():
            found = mover.on_the_way(key)
            assert found is not None and found.store.body.obj is bodies[one]
    tier.allowed = 1000
    while mover.storing:
        assert mover.drain()
    assert set(answers) == set(bodies) and len(answers) == len(bodies)
    assert len({*map(id, tier.sent)}) == len(tier.sent)
    assert not (lane.stale or lane.behind or lane.bodies or lane.busy)


def test_an_answer_that_is_lost_holds_its_own_bytes_only() -> None:
    class Losing(Slow):
        def poll(self, timeout_s: float = 0.0) -> list[Completion]:
            return [one for one in super().poll(timeout_s) if one.key != key_of(3)]

    tier = Losing(MemoryTier())
    mover = mover_over(tier)
    (lane,) = mover.lanes
    told = list[Completion]()
    items = [Store(key_of(n), INFO, memoryview(BODY)) for n in range(200)]
    lane.schedule.background_bytes = 64 * len(BODY)  # eight to a request
    assert mover.store(0, items, told.extend) == 200
    lane.schedule.background_bytes = 8 * len(BODY)  # a tier that turned out to be slow
    tier.allowed = 10_000
    while mover.drain():
        pass
    assert len(told) == 199 and lane.schedule.flying_bytes == len(BODY) and mover.storing == 1
    assert not lane.schedule.waiting


def test_an_error_of_one_receiver_keeps_no_answer_from_others() -> None:
    tier = Slow(MemoryTier())
    mover, told = mover_over(tier), list[Completion]()

    def fails(answers: list[Completion]) -> None:
        raise RuntimeError("of this test")

    for number, done in enumerate([told.extend, fails, told.extend]):
        mover.store(0, [Store(key_of(number), INFO, memoryview(BODY))], done)
    mover.drain()
    tier.allowed = 3
    with pytest.raises(RuntimeError, match="of this test"):
        mover.drain()
    assert [one.key for one in told] == [key_of(0), key_of(2)] and not mover.storing


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_one_load_keeps_no_answer_from_those_that_wait_with_it(failing: int) -> None:
    tier, told = Slow(MemoryTier()), list[Completion]()
    stored(tier.inner, 1)
    mover, targets = mover_over(tier), list[bytearray]()

    def fails(answers: list[Completion]) -> None:
        raise RuntimeError("of this test")

    for number in range(3):
        load, target = load_of(1)
        mover.ask(0, load, fails if number == failing else told.extend)
        mover.drain()
        targets.append(target)
    tier.allowed = 9
    with pytest.raises(RuntimeError, match="of this test"):
        mover.drain()
    assert [one.outcome for one in told] == [Outcome.HIT] * 2 and targets == [BODY] * 3
    assert not mover.lanes[0].busy and tier.jobs == [("load", 1)]


def test_stores_behind_one_that_cannot_be_sent_are_answered() -> None:
    class Raising(MemoryTier):
        def submit_store(self, items: Any, *, deadline_s: float = 60.0) -> int:
            raise OSError("of this test")

    mover, told = mover_over(Raising()), list[Completion]()
    for _ in range(3):
        mover.store(0, [Store(key_of(1), INFO, memoryview(BODY))], told.extend)
    for _ in range(4):
        mover.drain()
    assert len(told) == 3 and not mover.storing and not mover.lanes[0].behind


# ---- with pages


def simple_kv(*tiers: Any, pages: int = 8, **options: Any) -> KV:
    return make_kv(simple(), pages=pages, tiers=tiers, **options)


def test_pages_that_are_on_their_way_down_are_found() -> None:
    disk = Deferred(lasting())
    kv = simple_kv(disk, pages=4, write_back=False)
    published(kv, P)
    evict_all(kv)
    settle(kv)
    assert disk.waiting == 3 and not disk.frames
    assert kv.explain([*P, 0]).residency == {"lasting": 24}
    disk.poll = lambda timeout_s=0.0: []  # it takes its time
    kv.planner.store.pool(0).release(kv.planner.store.allocator.allocate(0, 1)[0])
    with kv.open([*P, 0], limit=8) as seq:
        assert seq.reused == 8
        check_content(kv, seq, P[:8])
    assert kv.planner.store.stack.mover.from_memory == 1
    del disk.poll
    disk.work()
    assert kv.flush(60)


def test_pages_wait_while_a_tier_is_busy_and_are_written_later() -> None:
    disk = Deferred(lasting())
    kv = simple_kv(disk, pages=16)
    kv.planner.store.stack.mover.lanes[0].schedule.queue_bytes = 4096
    kv.planner.store.stack.mover.lanes[0].schedule.background_bytes = 4096
    for prompt in (P, Q, R):
        published(kv, prompt)
    store = kv.planner.store
    assert disk.waiting == 1 and store.stack.unwritten
    audit(kv)
    assert kv.flush(60) and len(disk.frames) == 9 and not store.stack.unwritten
    assert kv.stats()["tiers"]["lasting"]["dropped"] == 0
    assert kv.stats()["tiers"]["lasting"]["queued_bytes"] == 0


def test_pages_that_cannot_wait_any_longer_are_dropped_and_counted() -> None:
    disk = Deferred(lasting())
    disk.poll = lambda timeout_s=0.0: []
    kv = simple_kv(disk, pages=16)
    kv.planner.store.stack.mover.lanes[0].schedule.queue_bytes = 4096
    kv.planner.store.stack.mover.lanes[0].schedule.background_bytes = 4096
    published(kv, P)
    published(kv, Q)
    evict_all(kv)
    dropped = kv.stats()["tiers"]["lasting"]["dropped"]
    assert dropped == 4, "one is in flight, one waits in the queue"
    audit(kv)
    del disk.poll
    assert not kv.flush(5.0), "pages were dropped"
    assert kv.flush(60) and len(disk.frames) == 2


class Away(Wrapped):
    """A tier whose breaker is open."""

    asked = 0
    away = True

    def _refuse(self, items: Sequence[Any]) -> int:
        self.asked += 1
        if not self.away:
            return -1
        self.inner._answer(
            [Completion(0, 0, item.key, Outcome.FAILED, "breaker") for item in items]
        )
        return int(self.inner.inner._jobs) if hasattr(self.inner, "inner") else self.inner._jobs

    def submit_load(self, items: Sequence[Load], *, deadline_s: float = 10.0) -> int:
        job = self._refuse(items)
        return job if job > 0 else int(self.inner.submit_load(items))

    def submit_store(self, items: Sequence[Store], *, deadline_s: float = 60.0) -> int:
        job = self._refuse(items)
        return job if job > 0 else int(self.inner.submit_store(items))


def test_a_tier_whose_breaker_is_open_is_left_alone_and_gets_its_pages_later() -> None:
    clock, inner = ManualClock(), MemoryTier(name="remote")
    remote = Away(inner, kind="remote")
    kv = simple_kv(remote, pages=16, clock=clock)
    published(kv, P)
    assert not kv.stats()["tiers"]["remote"]["answers"]
    asked = remote.asked
    published(kv, Q)
    assert remote.asked == asked, "it rests"
    assert not kv.flush(5.0), "what waits for it goes on waiting"
    remote.away = False
    clock.advance(s=2.0)
    assert kv.flush(60)
    assert len(inner.frames) == 6 and kv.stats()["tiers"]["remote"]["answers"]


def stored_apart() -> tuple[Slow, KV]:
    """A cache with three pages on a slow disk alone; no job is done until it is allowed."""
    disk = Slow(lasting())
    disk.allowed = 99
    kv = simple_kv(disk, pages=8)
    published(kv, P)
    kv.flush()
    evict_all(kv)
    disk.allowed = 0
    return disk, kv


def test_prompts_are_prefetched_while_others_compute() -> None:
    disk, kv = stored_apart()
    coming = kv.prefetch([*P, 0])
    assert (coming.pages, coming.left, coming.arrived) == (3, 3, 0)
    audit(kv)
    kv.defragment()
    published(kv, [9] * 16)
    audit(kv)
    disk.allowed = 2
    published(kv, [8] * 8)
    assert coming.arrived == 2 and coming.left == 1
    audit(kv)
    assert coming.wait(60) and kv.explain([*P, 0]).residency == {"device": 24}
    loads = [n for kind, n in disk.jobs if kind == "load"]
    assert loads == [3]
    with kv.open([*P, 0]) as seq:
        check_content(kv, seq, P)
        assert seq.reused == 24
    assert kv.stats()["tiers"]["lasting"]["loaded_bytes"] == 3 * 4096
    assert repr(coming) == "<flowkv.Prefetch: 3 of 3 pages arrived, 0 left>"


def test_opening_waits_for_what_is_prefetched_already() -> None:
    disk, kv = stored_apart()
    coming = kv.prefetch(P)
    with kv.open([*P, 0]) as seq:
        assert seq.reused == 24
        check_content(kv, seq, P)
        audit(kv)
    assert coming.arrived == 3 and [n for kind, n in disk.jobs if kind == "load"] == [3]
    stats = kv.stats()["tiers"]["lasting"]
    assert stats["coalesced"] == 3 and stats["loaded_bytes"] == 3 * 4096


@pytest.mark.parametrize("how", ["cancel", "forget", "invalidate", "close"])
def test_a_prefetch_that_is_not_wanted_any_more_leaves_nothing_behind(how: str) -> None:
    disk, kv = stored_apart()
    coming = kv.prefetch(P)
    if how == "cancel":
        coming.cancel()
        coming.cancel()
        assert coming.left == 0 and disk.cancelled and not coming.arrived
        assert kv.stats()["tiers"]["lasting"]["cancelled"] == 3
        assert not kv.stats()["events"].get('failures_total{operation="load",tier="lasting"}')
    elif how == "forget":
        disk.inner.erase = disk.inner.inner.erase
        kv.forget(P)
    elif how == "invalidate":
        kv.invalidate()
    else:
        kv.close()
        assert disk.cancelled
        return
    disk.allowed = 99
    assert coming.wait(60)
    if how == "cancel":
        kv.invalidate()
    audit_empty(kv)


# ---- what is told


def test_events_say_what_moved_and_for_whom() -> None:
    host = HostTier(1 << 20)
    kv, told = simple_kv(host, pages=4), list[Any]()
    kv.bus.subscribe(told.append, Promoted, Demoted, Hit, Miss, Published, Failed)
    published(kv, P, tenant="alice")
    assert {e.tenant for e in told if isinstance(e, Published)} == {"alice"}
    published(kv, Q, tenant="bob")
    down = [e for e in told if isinstance(e, Demoted)]
    assert down and {(e.source, e.tier, e.n_bytes) for e in down} == {("device", "host", 4096)}
    told.clear()
    with kv.open([*P, 0], tenant="alice") as seq:
        assert seq.reused == 24
    (up,) = [e for e in told if isinstance(e, Promoted)]
    assert (up.source, up.tier) == ("host", "device") and up.n_bytes == 4096 * up.pages
    hits = {e.tier: e for e in told if isinstance(e, Hit)}
    assert hits["host"].tenant == "alice" and hits["host"].n_bytes == up.n_bytes
    assert sum(e.tokens for e in hits.values()) == 24
    (miss,) = [e for e in told if isinstance(e, Miss)] or [None]
    assert miss is None or (miss.tenant, miss.tokens) == ("alice", 0)


def test_statistics_tell_what_a_tier_was_measured_to_do() -> None:
    kv = simple_kv(HostTier(1 << 20), pages=4)
    for prompt in (P, Q, P, R):
        opened(kv, prompt).close()
    stats = kv.stats()["tiers"]["host"]
    assert stats["load_bytes_per_s"] > 0 and stats["store_bytes_per_s"] > 0
    assert stats["load_latency_s"] >= 0 and stats["answers"] is True
    assert kv.gate.rates["host"].bytes_per_s == stats["load_bytes_per_s"]


def test_two_disks_are_waited_for_at_once(tmp_path: Path) -> None:
    """Both have file descriptors to wait on, and threads that answer some time."""
    disks = [DiskTier(tmp_path / name, 4 << 20, name=name) for name in ("near", "far")]
    mover, told = mover_over(*disks), list[Completion]()
    for number in range(8):
        store(mover, number % 2, number, told)
    assert flushed(mover, 20.0) and len(told) == 8
    loads = {number: load_of(number) for number in range(8)}
    wanted = [(number % 2, load) for number, (load, _) in loads.items()]
    answers, lent = mover.load(wanted)
    assert [a.key for a in answers] == [key_of(n) for n in range(8)] and not lent
    assert all(a.outcome is Outcome.HIT for a in answers)
    assert all(target == BODY for _, target in loads.values())
    for disk in disks:
        disk.close()


def test_several_tiers_without_descriptors_are_waited_for() -> None:
    class Late(Slow):
        def poll(self, timeout_s: float = 0.0) -> list[Completion]:
            self.allowed = len(self.waiting) * (time.monotonic() > begun + 0.05)
            return super().poll()

    mover, begun = mover_over(Late(MemoryTier()), Late(MemoryTier())), time.monotonic()
    for number in (0, 1):
        assert store(mover, number, number)
    assert mover.drain(30.0)
    assert mover.drain(30.0) or not mover.storing


def test_a_load_that_finds_the_breaker_open_is_not_tried_again_at_once() -> None:
    clock = ManualClock()
    remote = Away(MemoryTier(name="remote"), kind="remote", away=False)
    kv = simple_kv(remote, pages=8, clock=clock)
    published(kv, P)
    assert kv.flush(60)
    evict_all(kv)
    remote.away = True
    kv.open([*P, 0]).close()
    asked = remote.asked
    with kv.open([*P, 0]) as seq:
        assert seq.reused == 0 and remote.asked == asked
    remote.away = False
    clock.advance(s=2.0)
    with kv.open([*P, 0]) as seq:
        assert seq.reused == 24
        check_content(kv, seq, P)


def test_what_is_asked_for_anew_keeps_it_busy() -> None:
    """Also where whoever is answered first drains what is on its way by itself."""
    tier, answers = Slow(MemoryTier()), list[Completion]()
    stored(tier.inner, 0)
    mover = mover_over(tier)
    mover.ask(0, load_of(0)[0], lambda _: (mover.drain(), None)[1])
    mover.ask(0, load_of(0)[0], answers.extend)
    mover.drain()
    tier.cancel(1)
    mover.drain()
    assert tier.jobs == [("load", 1)] * 2 and mover.busy and not answers
    tier.allowed = 1
    mover.drain()
    assert answers[0].outcome is Outcome.HIT and not mover.busy


def test_what_is_taken_from_a_store_under_way_must_match_its_digests() -> None:
    """A device made them; the copy in host memory may have gone wrong, in a part that counts."""
    body, target, from_memory = bytearray(BODY * 4), bytearray(4 * 4096), inside_mover.from_memory
    store = Store(key_of(1), INFO, memoryview(body), digests(body, 4096))
    wish = Load(key_of(1), memoryview(target), LAYOUT)
    part = Load(key_of(1), memoryview(target), LAYOUT, 0, 1, 2)
    assert from_memory(wish, store) and target == body
    body[5] ^= 1
    assert from_memory(wish, store) is None
    assert from_memory(part, store).n_bytes == 2 * 4096
    body[4096 * 2] ^= 1
    assert from_memory(part, store) is None
    assert from_memory(part, store._replace(digests=None)).n_bytes == 2 * 4096
