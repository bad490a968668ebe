"""The model changes under an engine: pages are counted where they are from then on."""

from __future__ import annotations

import gc
import weakref

import pytest

from flowkv import Namespace
from flowkv.policy.scheduling import ASIDE, RUNNING, WAITING
from tests.inside import CapacityError, bind, swap

from ..cache.toy import make_kv, opened, simple
from .pressed import Pressed, pressed
from .test_pressure import check, prompts


def change(one: Pressed) -> None:
    """As a model does that is moved to another dtype: other pages, in pools of their own."""
    bind(one.kv, simple(head_dim=64, layers=4), Namespace(model="changed"))


def test_pages_are_counted_where_rows_are_opened_now() -> None:
    with pressed(make_kv(simple(), pages=64)) as one:
        old = one.submit(prompts(3)[0], 30)
        one.turn(3)
        before = one.keeper.room()
        change(one)
        room = one.keeper.room()
        assert room.total < before.total and room.free == room.total
        fresh = one.submit(prompts(3)[1])
        one.turn(3)
        assert [old.state, fresh.state] == [RUNNING] * 2
        one.keeper.count([old, fresh])
        assert old.pages == 0 < fresh.pages, "one of them makes no room"
        assert one.keeper.room().free < room.free
        assert one.keeper.worth.page_bytes == one.keeper._footprint.page_bytes
        one.run()
        check(fresh, prompts(3)[1])
        check(old, prompts(3)[0], 30)


@pytest.mark.parametrize("whose", ["old", "new"])
def test_rows_of_before_and_after_leave_and_come_back(whose: str) -> None:
    with pressed(make_kv(simple(), pages=64)) as one:
        sizes = (50, 20) if whose == "old" else (20, 50)  # of other numbers of pages
        given = [prompts(2, size)[n] for n, size in enumerate(sizes)]
        lives = [one.submit(given[0])]
        one.turn(4)
        change(one)
        lives.append(one.submit(given[1]))
        one.turn(4)
        live = lives[whose == "new"]
        one.keeper._swap_bytes = swap.weigh(live.open_row.seq.planner, live.open_row.seq)
        one.preempt(live, keep=True)
        assert live.state == ASIDE, "there is just enough host memory"
        assert live.open_row.seq.planner.aside_bytes > 0
        assert one.keeper.worth.out.samples, "what it copied was measured"
        one.run()
        assert live.preempted == 1
        check(lives[0], given[0])
        check(lives[1], given[1])


def test_what_was_set_aside_before_still_counts() -> None:
    with pressed(make_kv(simple(), pages=64), max_rows=1) as one:
        old = one.submit(prompts(2)[0], 30)
        one.turn(3)
        one.preempt(old, keep=True)
        change(one)
        fresh = one.submit(prompts(2)[1], priority=1)
        one.loop._take_in(0.0)
        one.keeper.enter(fresh, 0.0)
        one.loop.waiting.remove(fresh)
        one.loop.active.append(fresh)
        one.loop._step(0.0)
        bytes_of_it = swap.weigh(fresh.open_row.seq.planner, fresh.open_row.seq)
        one.keeper._swap_bytes = bytes_of_it + 1
        one.preempt(fresh, keep=True)
        assert (old.state, fresh.state) == (ASIDE, WAITING)
        one.run()
        check(fresh, prompts(2)[1])


def test_the_longest_request_is_that_of_the_pools_of_now() -> None:
    with pressed(make_kv(simple(), pages=64)) as one:
        most = one.keeper.longest(24)
        change(one)
        assert one.keeper.longest(24) < most
        with pytest.raises(CapacityError, match="pages for"):
            one.submit([1] * (most - 8))


def test_pools_of_before_are_let_go() -> None:
    with pressed(make_kv(simple(), pages=64)) as one:
        one.submit(prompts(2)[0])
        one.run()
        before = weakref.ref(one.kv.planner)
        one.submit(prompts(2)[1])
        change(one)  # it is noticed when its row is opened
        one.run()
        gc.collect()
        assert before() is None


@pytest.mark.parametrize("pools", ["same", "other"])
def test_requests_that_wait_are_looked_up_anew(pools: str) -> None:
    prompt = prompts(2)[0]
    with pressed(make_kv(simple(), pages=64)) as one:
        first = one.submit(prompt)
        one.turn(4)
        waits = one.submit([*prompt, 1], 4)
        one.loop._take_in(0.0)
        one.keeper.count_shared(waits)
        assert waits.shared == 2
        if pools == "same":
            bind(one.kv, simple(), Namespace(model="changed"))
        else:
            change(one)
        one.keeper.count_shared(waits)
        assert waits.shared == 0, "they are of another model"
        with opened(one.kv, prompt):
            one.keeper.count_shared(waits)
            assert waits.shared == 2, "and these of its own"
        one.run()
        check(first, prompt)
        check(waits, [*prompt, 1], 4)


def test_what_was_set_aside_shares_nothing_with_pools_of_now() -> None:
    prompt = prompts(2)[0]
    with pressed(make_kv(simple(), pages=64)) as one:
        old = one.submit(prompt)
        one.turn(4)
        one.preempt(old, keep=True)
        assert old.state == ASIDE
        change(one)
        bind(one.kv, simple(), Namespace(model="toy"))  # and back: keys are the same again
        with opened(one.kv, prompt):
            one.keeper.count_shared(old)
        assert old.shared == 0
        one.run()
        check(old, prompt)
