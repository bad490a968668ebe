from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from flowkv.tiers import Completion, Load, Outcome, Store
from tests.clock import wait_for, without_threads
from tests.inside import HUGE_BYTES, Item, ManualClock, SystemClock, ThreadMemory, Workers

from .frames import LAYOUT, info_of, key_of


def nothing(*args: object) -> None:
    pass


def workers(
    load: Callable[[Item], None] = nothing,
    store: Callable[[Item], None] = nothing,
    **changes: object,
) -> Workers:
    options = {"threads": 1, "queue_bytes": 1 << 20} | changes
    clock = options.pop("clock", SystemClock())
    return Workers("test", lambda item: (load, store)[item.stores](item), clock, **options)


def wish(name: object, size: int = 100) -> Load:
    return Load(key_of(name), memoryview(bytearray(size)), LAYOUT)


def body(name: object, size: int = 100) -> Store:
    return Store(key_of(name), info_of(size), memoryview(bytes(size)))


def collect(pool: Workers, count: int) -> list[Completion]:
    found: list[Completion] = []
    end = time.monotonic() + 60
    while len(found) < count:
        assert time.monotonic() < end
        found += pool.poll(0.1)
    return found


def test_a_thread_survives_its_work() -> None:
    def broken(item: Item) -> None:
        if item.index == 0:
            raise ValueError("oh")
        if item.index == 1:
            raise MemoryError
        if item.index == 3:
            pool.answer(item, Outcome.MISS)

    pool = workers(broken)
    pool.submit([wish(n) for n in range(4)], 10)
    assert [(a.outcome, a.reason) for a in collect(pool, 4)] == [
        (Outcome.FAILED, "ValueError: oh"),
        (Outcome.FAILED, "memory"),
        (Outcome.FAILED, "unanswered"),
        (Outcome.MISS, ""),
    ]
    assert pool.close(20)


def test_stores_of_one_key_go_one_after_the_other() -> None:
    gate, keys, going = threading.Event(), list[bytes](), set[bytes]()
    twice = []

    def store(item: Item) -> None:
        assert gate.wait(60)
        twice.append(item.key in going)
        going.add(item.key)
        time.sleep(0.001)
        going.discard(item.key)
        keys.append(item.key)
        pool.answer(item, Outcome.FAILED, "full")

    pool = workers(store=store, threads=3)
    pool.submit([body(n) for n in (0, 1, 1, 2, 3, 4, 1, 5)], 10)
    gate.set()
    done = collect(pool, 8)
    assert {(a.outcome, a.reason) for a in done} == {(Outcome.FAILED, "full")}
    assert sorted(a.item for a in done) == list(range(8))
    assert sorted(keys) == sorted(key_of(n) for n in (0, 1, 1, 1, 2, 3, 4, 5))
    assert not any(twice)
    assert pool.close(20)


def test_stores_that_wait_are_bounded() -> None:
    gate, entered = threading.Event(), threading.Event()

    def store(item: Item) -> None:
        entered.set()
        assert gate.wait(60)
        pool.answer(item, Outcome.STORED)

    clock = ManualClock()
    pool = workers(store=store, queue_bytes=250, clock=clock)
    pool.submit([body("begun")], 100)
    assert entered.wait(60)
    first = pool.submit([body(n) for n in range(4)], 1)
    assert [(a.item, a.reason) for a in pool.poll(0)] == [(2, "busy"), (3, "busy")]
    clock.advance(s=2)
    assert [(a.job, a.reason) for a in collect(pool, 2)] == [(first, "deadline")] * 2
    pool.submit([body(n) for n in range(4)], 100)
    assert [(a.item, a.reason) for a in pool.poll(0)] == [(2, "busy"), (3, "busy")]
    gate.set()
    assert {answer.outcome for answer in collect(pool, 3)} == {Outcome.STORED}
    assert pool._waiting_bytes == 0
    assert pool.close(20)


def test_a_thread_that_does_not_start_is_none() -> None:
    pool = workers(lambda item: pool.answer(item, Outcome.MISS))
    with without_threads():
        pool.submit([wish("a")], 10)
        assert [answer.reason for answer in pool.poll(0)] == ["memory"]
    pool.submit([wish("b")], 10)
    assert collect(pool, 1)[0].outcome is Outcome.MISS
    assert pool.close(20)


def test_what_is_put_back_after_the_end_is_answered() -> None:
    pool = workers(threads=0)
    pool.submit([wish("a")], 1000)
    item = pool.begin(stores=False)
    assert item is not None and pool.claim(item) is not None
    pool.fail_rest()
    assert pool.poll(0) == []
    pool.put_back(item)
    assert [answer.reason for answer in pool.poll(0)] == ["closed"]


def test_nothing_is_begun_after_the_end() -> None:
    pool = workers()
    assert pool.close(20)
    pool.submit([wish("a")], 10)
    pool.submit([body("a")], 10)
    assert [answer.reason for answer in pool.poll(0)] == ["closed"] * 2


def test_a_follower_takes_over_when_the_first_gives_up() -> None:
    clock, gate, entered = ManualClock(), threading.Event(), threading.Event()
    stored: list[bytes] = []

    def store(item: Item) -> None:
        entered.set()
        assert gate.wait(60)
        stored.append(item.key)
        pool.answer(item, Outcome.STORED)

    pool = workers(store=store, clock=clock)
    pool.submit([body("blocker")], 100)
    assert entered.wait(60)
    first, second = pool.submit([body("a")], 1), pool.submit([body("a")], 100)
    clock.advance(s=2)
    assert [(a.job, a.reason) for a in collect(pool, 1)] == [(first, "deadline")]
    gate.set()
    assert {a.job: a.outcome for a in collect(pool, 2)}[second] is Outcome.STORED
    assert stored == [key_of("blocker"), key_of("a")]
    assert pool.close(20)


def test_a_store_after_a_deletion_is_not_answered_from_before() -> None:
    gate, calls = threading.Event(), []

    def store(item: Item) -> None:
        calls.append(item.job)
        pool.answer(item, Outcome.STORED)
        assert gate.wait(60)

    pool = workers(store=store)
    first = pool.submit([body("a")], 10)
    assert collect(pool, 1)[0].job == first
    second = pool.submit([body("a")], 10)  # its key was deleted; the thread is not done yet
    assert pool.poll(0.02) == []
    gate.set()
    assert collect(pool, 1)[0].job == second
    assert calls == [first, second]
    assert pool.close(20)


def test_loads_go_first() -> None:
    gate, order = threading.Event(), []

    def load(item: Item) -> None:
        order.append("load")
        pool.answer(item, Outcome.MISS)

    def store(item: Item) -> None:
        assert gate.wait(60)
        order.append("store")
        pool.answer(item, Outcome.STORED)

    # with two threads, one of them looks at stores first, so that neither can starve the other
    pool = workers(load, store, threads=2)
    pool.submit([body(n) for n in range(3)], 10)
    pool.submit([wish(n) for n in range(3)], 10)
    time.sleep(0.05)
    gate.set()
    collect(pool, 6)
    assert sorted(order) == ["load"] * 3 + ["store"] * 3
    assert pool.close(20)


def test_close_gives_up_on_a_stuck_thread() -> None:
    gate, entered = threading.Event(), threading.Event()
    target = memoryview(bytearray(100))

    def load(item: Item) -> None:
        entered.set()
        assert gate.wait(60)
        if (memory := pool.claim(item)) is not None:
            memory[:] = b"x" * 100

    pool = workers(load)
    pool.submit([Load(key_of("a"), target, LAYOUT), wish("b")], 1000)
    assert entered.wait(60)
    assert not pool.close(0.05)
    assert [(a.outcome, a.reason) for a in pool.poll(0)] == [(Outcome.FAILED, "closed")] * 2
    gate.set()
    assert pool.close(20)
    assert pool.poll(0) == []
    assert target == bytes(100)


def test_poll_waits_for_the_first_answer_and_no_longer() -> None:
    pool = workers(lambda item: pool.answer(item, Outcome.MISS))
    start = time.monotonic()
    assert pool.poll(0.05) == []
    assert time.monotonic() - start >= 0.05
    pool.submit([wish("a")], 10)
    assert len(pool.poll(20)) == 1
    assert time.monotonic() - start < 10
    assert pool.close(20)


@pytest.mark.parametrize("size", [1, 4096, (1 << 20) + 1])
def test_staging_grows_and_is_aligned(size: int) -> None:
    staging = ThreadMemory()
    small, large = staging(10), staging(size)
    large[-1] = 7
    assert (len(small), len(large)) == (10, size)
    assert staging(size)[-1] == 7
    staging.give_up()
    staging(size)[-1] = 8
    assert large[-1] == 7


def test_a_body_is_not_touched_after_its_answer() -> None:
    """F4, S8: whoever is told that a store failed may use the memory again, at once."""
    clock, reading, gate = ManualClock(), threading.Event(), threading.Event()
    going = threading.Event()
    seen: list[bytes] = []

    def store(item: Item) -> None:
        memory = pool.claim(item)
        assert memory is not None
        reading.set()
        assert gate.wait(60)
        seen.append(bytes(memory))
        pool.unclaim(item)
        assert going.wait(60)

    pool = workers(store=store, clock=clock)
    memory = bytearray(b"x" * 100)
    pool.submit([Store(key_of("a"), info_of(100), memoryview(memory))], 1)
    assert reading.wait(60)
    clock.advance(s=2)
    assert pool.poll(0.02) == []  # overdue, but its body is being read
    pool.cancel(1)
    assert pool.poll(0.02) == []
    gate.set()
    assert [(a.outcome, a.reason) for a in collect(pool, 1)] == [(Outcome.FAILED, "deadline")]
    memory[:] = b"y" * 100
    going.set()
    assert pool.close(20)
    assert seen == [b"x" * 100]


def test_what_was_claimed_at_the_end_is_answered_when_it_is_let_go() -> None:
    gate, entered = threading.Event(), threading.Event()

    def store(item: Item) -> None:
        assert pool.claim(item) is not None
        entered.set()
        assert gate.wait(60)
        pool.unclaim(item)

    pool = workers(store=store)
    pool.submit([body("a")], 1000)
    assert entered.wait(60)
    assert not pool.close(0.05)
    assert pool.poll(0) == []
    gate.set()
    assert [answer.reason for answer in collect(pool, 1)] == ["closed"]
    assert pool.close(20)


def test_memory_is_out_of_reach_after_the_answer() -> None:
    clock, gate, entered = ManualClock(), threading.Semaphore(0), threading.Semaphore(0)
    found: list[object] = []

    def late(item: Item) -> None:
        entered.release()
        assert gate.acquire(timeout=60)
        found.extend([pool.claim(item), pool.claim(item)])
        found.extend(getattr(item.wish, name, b"") for name in ("target", "body"))

    pool = workers(late, late, clock=clock)
    for asked in (wish("a"), body("a")):
        pool.submit([asked], 1)
        assert entered.acquire(timeout=60)
        clock.advance(s=2)
        assert collect(pool, 1)[0].reason == "deadline"
        gate.release()
    assert pool.close(20)
    assert found == [None, None, b"", b""] * 2


def test_a_stuck_thread_is_replaced_and_its_memory_retired() -> None:
    clock, gate, told = ManualClock(), threading.Event(), []
    busy = threading.Semaphore(0)

    def load(item: Item) -> None:
        item.hand.staging(1)
        busy.release()
        if item.deadline_ns < 10**9:
            assert gate.wait(60)
        pool.answer(item, Outcome.MISS)

    pool = workers(load, clock=clock, spares=2, late=told.append)
    for stuck in range(1, 4):
        pool.submit([wish(stuck)], 1e-9)
        assert busy.acquire(timeout=60)
        clock.advance(ns=2)
        assert collect(pool, 1)[0].reason == "deadline"
        assert [item.key for item in told] == [key_of(n) for n in range(1, stuck + 1)]
        overdue = sum(hand.overdue for hand in pool._hands)
        assert overdue == min(stuck, 2)  # the third one has no replacement
        assert pool.retired_bytes == min(stuck, 2) * HUGE_BYTES
    pool.submit([wish("waits")], 100)
    assert pool.poll(0.02) == []
    gate.set()
    assert collect(pool, 1)[0].outcome is Outcome.MISS
    wait_for(lambda: not any(hand.overdue for hand in pool._hands))
    assert pool.retired_bytes == 0
    assert pool.close(20)


def test_stores_leave_threads_to_loads() -> None:
    gate, storing = threading.Event(), threading.Semaphore(0)

    def store(item: Item) -> None:
        storing.release()
        assert gate.wait(60)
        pool.answer(item, Outcome.STORED)

    pool = workers(lambda item: pool.answer(item, Outcome.MISS), store, threads=2, storing=1)
    pool.submit([body(n) for n in range(3)], 100)
    assert storing.acquire(timeout=60)
    pool.submit([wish("a")], 100)
    assert collect(pool, 1)[0].outcome is Outcome.MISS
    gate.set()
    assert {answer.outcome for answer in collect(pool, 3)} == {Outcome.STORED}
    assert pool.close(20)


def test_what_waits_can_be_failed() -> None:
    gate, entered = threading.Event(), threading.Event()

    def load(item: Item) -> None:
        entered.set()
        assert gate.wait(60)
        pool.answer(item, Outcome.MISS)

    pool = workers(load)
    pool.submit([wish(n) for n in range(3)], 100)
    assert entered.wait(60)
    pool.fail_waiting("breaker")
    assert [(a.item, a.reason) for a in collect(pool, 2)] == [(1, "breaker"), (2, "breaker")]
    gate.set()
    assert [(a.item, a.outcome) for a in collect(pool, 1)] == [(0, Outcome.MISS)]
    assert pool.close(20)
