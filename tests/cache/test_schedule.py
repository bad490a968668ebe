"""The order of transfers, on a clock of the test's own: no tier, no thread."""

from __future__ import annotations

import random
from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from flowkv.tiers import FrameInfo, Load, Store
from tests.inside import SHARE, IOPriority, Schedule, TransferRequest

KIB = 1 << 10
INFO = FrameInfo("page", 0, 0, bytes(16), bytes(32), bytes(32), 0, 8, 4096)
MEMORY = memoryview(bytearray(64 * KIB))


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "little")


def wish(
    number: int, kib: int, priority: IOPriority = IOPriority.DEMAND, owner: object = None
) -> TransferRequest:
    part = MEMORY[: kib * KIB]
    if priority is IOPriority.WRITE_BACK:
        return TransferRequest([Store(key_of(number), INFO, part)], lambda _: None, priority, owner)
    return TransferRequest([Load(key_of(number), part, bytes(16))], lambda _: None, priority, owner)


def small() -> Schedule:
    return Schedule(32 * KIB, 16 * KIB, queue_bytes=64 * KIB, chunk_bytes=12 * KIB)


class Simulation:
    """A tier that works through what it was sent, so many bytes a second; time is a number."""

    def __init__(self, schedule: Schedule, seed: int) -> None:
        self.schedule, self.random = schedule, random.Random(seed)
        self.now = 0.0
        self.flying: list[TransferRequest] = []
        self.answered: Counter[TransferRequest] = Counter()
        self.sent: list[TransferRequest] = []
        self.sent_bytes: Counter[IOPriority] = Counter()

    def send(self) -> None:
        """Whatever may be sent now; checks the order and the limits at each."""
        waiting = {
            p: set(queue) for p, queue in zip(IOPriority, self.schedule._queues, strict=True)
        }
        credit = sum(self.schedule._credit)
        for one in self.schedule.take():
            ahead = {w for p in IOPriority if p < one.priority for w in waiting[p]}
            if ahead:  # only write-back may pass others: with its fair share, or beside a chunk
                assert one.priority is IOPriority.WRITE_BACK
                chunk = self.schedule._flying_bytes[IOPriority.PREFETCH]
                assert credit >= one.n_bytes or (chunk and not waiting[IOPriority.DEMAND])
            if one.priority is IOPriority.WRITE_BACK:
                credit = max(0.0, credit - one.n_bytes)
            elif waiting[IOPriority.WRITE_BACK]:
                credit += one.n_bytes / SHARE
            waiting[one.priority].discard(one)
            if not waiting[IOPriority.WRITE_BACK]:
                credit = 0.0
            assert one.flying and not one.ended
            self.flying.append(one)
            self.sent.append(one)
            self.sent_bytes[one.priority] += one.n_bytes
        self.check_limits()

    def check_limits(self) -> None:
        schedule, most = self.schedule, Counter[bool]()
        for one in schedule._flying:
            most[one.priority is IOPriority.DEMAND] += one.n_bytes
        for demand, limit in ((True, schedule.demand_bytes), (False, schedule.background_bytes)):
            those = [w for w in schedule._flying if (w.priority is IOPriority.DEMAND) == demand]
            assert most[demand] <= limit or len(those) == 1
        chunk = [w for w in schedule._flying if w.priority is IOPriority.PREFETCH]
        assert sum(w.n_bytes for w in chunk) <= schedule.chunk_bytes or len(chunk) == 1
        assert schedule.flying_bytes == sum(most.values())
        for priority, queue in zip(IOPriority, schedule._queues, strict=True):
            queued = sum(w.n_bytes for w in queue)
            assert queued == schedule._queued_bytes[priority]

    def answer(self, count: int) -> None:
        """The tier answers some, in any order; who followed is answered too."""
        for _ in range(min(count, len(self.flying))):
            one = self.flying.pop(self.random.randrange(len(self.flying)))
            self.now += one.n_bytes / 1e6
            for each in (one, *self.schedule.end(one)):
                each.ended = True
                self.answered[each] += 1


SIZES = st.integers(1, 24)
WISHES = st.tuples(st.just("ask"), st.sampled_from(IOPriority), st.integers(0, 12), SIZES)
MOVES = st.one_of(
    WISHES,
    WISHES,
    st.tuples(st.just("answer"), st.integers(1, 4)),
    st.tuples(st.just("withdraw"), st.integers(0, 30)),
    st.tuples(st.just("retire"), st.integers(0, 30)),
    st.tuples(st.just("send")),
)


def run(moves: list[tuple], seed: int) -> None:
    schedule = small()
    world, asked, gone = Simulation(schedule, seed), list[TransferRequest](), set[TransferRequest]()
    for move in moves:
        if move[0] == "ask":
            _, priority, number, kib = move
            one = wish(number, kib, priority)
            queued = schedule._queued_bytes[priority]
            verdict = schedule.ask(one)
            if not verdict:
                assert priority is not IOPriority.DEMAND, "a demand is never refused"
                assert queued + one.n_bytes > schedule.queue_bytes
            else:
                asked.append(one)
        elif move[0] == "answer":
            world.answer(move[1])
        elif move[0] == "send":
            world.send()
        elif asked:
            one = asked[move[1] % len(asked)]
            if move[0] == "withdraw":
                was = one.ended or one.flying or one in gone
                if schedule.withdraw(one):
                    assert not was or one.leader is None
                    gone.add(one)
            elif one.flying and not one.ended and one in schedule._flying:
                for follower in schedule.end(one):
                    assert schedule.ask(follower) is not None
                    if follower not in schedule and follower.leader is None:
                        gone.add(follower)  # refused
    while len(schedule) or world.flying:
        world.send()
        world.answer(3)
    for one in asked:
        assert world.answered[one] == (one not in gone), "every wish is answered exactly once"
    assert not schedule._leaders and not schedule.queued_bytes and not schedule.flying_bytes


@given(st.lists(MOVES, min_size=15, max_size=60), st.integers(0, 99))
def test_every_wish_is_answered_once_in_order_and_within_limits(moves: list, seed: int) -> None:
    run(moves, seed)


@pytest.mark.deep
@settings(max_examples=20_000)
@given(st.lists(MOVES, min_size=60, max_size=300), st.integers(0, 99))
def test_every_wish_is_answered_once_at_length(moves: list, seed: int) -> None:
    run(moves, seed)


@given(
    st.lists(st.tuples(st.booleans(), SIZES), min_size=40, max_size=120),
    st.lists(st.integers(1, 12), min_size=1, max_size=8),
    st.integers(0, 99),
)
def test_write_back_gets_its_share_of_a_tier_that_is_always_in_demand(
    others: list[tuple[bool, int]], stores: list[int], seed: int
) -> None:
    """There is always something else to do, and always pages to write."""
    schedule = small()
    world, number = Simulation(schedule, seed), 1000
    for turn, (demanded, kib) in enumerate(others):
        schedule.ask(wish(turn, kib, IOPriority.DEMAND if demanded else IOPriority.PREFETCH))
        while schedule._queued_bytes[IOPriority.WRITE_BACK] < 32 * KIB:
            number += 1
            schedule.ask(wish(number, stores[number % len(stores)], IOPriority.WRITE_BACK))
        world.send()
        world.answer(2)
    written = world.sent_bytes[IOPriority.WRITE_BACK]
    rest = sum(world.sent_bytes.values()) - written
    held_back = 2 * max(stores) * KIB + schedule.background_bytes  # the limit, and rounding
    assert written >= rest / SHARE - held_back


def test_write_back_waits_while_something_is_demanded() -> None:
    schedule = small()
    schedule.ask(wish(1, 8, IOPriority.WRITE_BACK))
    schedule.ask(wish(2, 8, IOPriority.PREFETCH))
    schedule.ask(wish(3, 8))
    (demand,) = schedule.take()
    assert demand.priority is IOPriority.DEMAND and not schedule.take()
    schedule.end(demand)
    assert [one.priority for one in schedule.take()] == [IOPriority.PREFETCH, IOPriority.WRITE_BACK]


def test_a_demand_does_not_wait_for_what_is_in_flight_already() -> None:
    schedule = small()
    schedule.ask(wish(1, 16, IOPriority.WRITE_BACK))
    assert len(schedule.take()) == 1
    schedule.ask(wish(2, 32))
    assert [one.n_bytes for one in schedule.take()] == [32 * KIB]


def test_one_that_is_larger_than_the_limit_goes_alone() -> None:
    schedule = small()
    for number in range(2):
        schedule.ask(wish(number, 64))
    (first,) = schedule.take()
    assert not schedule.take()
    schedule.end(first)
    assert len(schedule.take()) == 1


def test_a_full_queue_refuses_what_nobody_waits_for() -> None:
    schedule = small()
    verdicts = [schedule.ask(wish(n, 24, IOPriority.WRITE_BACK)) for n in range(4)]
    assert verdicts == [True] * 2 + [False] * 2 and schedule.refused == 2
    assert schedule.ask(wish(9, 24, IOPriority.PREFETCH))
    assert all(schedule.ask(wish(n, 24)) for n in range(20, 40))


def test_who_asks_for_the_same_follows_and_makes_it_urgent() -> None:
    schedule = small()
    first, second = wish(1, 8, IOPriority.PREFETCH), wish(1, 8)
    schedule.ask(wish(2, 8, IOPriority.PREFETCH))
    schedule.ask(first)
    assert schedule.ask(second) and schedule.joined == 1
    assert schedule.ask(wish(1, 4)) and schedule.joined == 1, "another length is another load"
    assert schedule.take()[0] is first
    assert schedule.end(first) == (second,)


def test_who_followed_takes_the_place_of_one_that_was_withdrawn() -> None:
    schedule = small()
    first, second, third = (wish(1, 8, p) for p in (IOPriority.PREFETCH, *[IOPriority.DEMAND] * 2))
    for one in (first, second, third):
        schedule.ask(one)
    assert schedule.withdraw(first) and not schedule.withdraw(first)
    assert schedule.take() == [second]
    assert not schedule.withdraw(second), "it is in flight"
    assert schedule.withdraw(third) and schedule.end(second) == ()


def test_nothing_overtakes_a_prefetch_in_flight_that_somebody_waits_for() -> None:
    schedule = small()
    waited_for = wish(2, 6, IOPriority.PREFETCH)
    for one in (wish(1, 6, IOPriority.PREFETCH), waited_for, wish(3, 6, IOPriority.PREFETCH)):
        schedule.ask(one)
    first, second = schedule.take()
    assert second is waited_for and schedule.in_the_way() == 12 * KIB
    follower = wish(2, 6)
    assert schedule.ask(follower) and schedule.joined == 1 and schedule.in_the_way() == 0
    schedule.end(first)
    assert not schedule.take(), "a chunk has room, but for what nobody waits for"
    assert schedule.end(waited_for) == (follower,)
    assert len(schedule.take()) == 1


def test_what_prefetches_earn_takes_no_write_back_before_a_demand() -> None:
    schedule = Schedule(1 << 20, 16 * KIB, 1 << 20, chunk_bytes=64 * KIB)
    schedule.ask(wish(0, 16, IOPriority.WRITE_BACK))
    (blocker,) = schedule.take()  # write-backs fill what they may
    schedule.ask(wish(1, 1, IOPriority.WRITE_BACK))
    schedule.end(blocker)
    schedule.ask(wish(2, 16, IOPriority.PREFETCH))
    (prefetch,) = schedule.take()
    schedule.end(prefetch)  # it has earned the write-back two KiB
    schedule.ask(wish(3, 4))
    (sent,) = schedule.take()
    assert sent.priority is IOPriority.DEMAND
    schedule.end(sent)
    assert [one.priority for one in schedule.take()] == [IOPriority.WRITE_BACK]


def layers(first: int, count: int, priority: IOPriority = IOPriority.DEMAND) -> TransferRequest:
    load = Load(key_of(1), MEMORY[: 4 * count * KIB], bytes(16), 0, first, count)
    return TransferRequest([load], lambda _: None, priority)


def test_who_wants_a_part_follows_and_the_widest_goes_in_place_of_one_that_was_withdrawn() -> None:
    schedule = small()
    whole, part, more = wish(1, 24, IOPriority.PREFETCH), layers(1, 2), layers(1, 3)
    assert schedule.ask(whole)
    assert all(schedule.ask(one) for one in (part, more)) and schedule.joined == 2
    assert schedule.ask(layers(5, 2)) and schedule.joined == 2, "its end lies behind"
    assert schedule.withdraw(whole)
    assert part.leader is more and more.leader is None
    assert more in schedule.take() and schedule.end(more) == (part,)
