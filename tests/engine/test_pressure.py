"""Requests that do not fit side by side: they make room, wait, come back, and say the same."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import pytest
import torch

from flowkv import Step
from flowkv.policy.restore import Compute, RestoreLoad, RestorePolicy, Span, State, Suffix
from flowkv.policy.scheduling import ASIDE, COMING, RUNNING, WAITING
from tests.inside import CapacityError, Event, Preempted, RunningRequest

from ..cache.links import Link, Trouble, evict
from ..cache.toy import PAGE, geometry, make_kv, opened, published, simple
from .pressed import Model, Pressed, made, pressed

PROMPT = [1, 2, 3, 4, 5] * 6


def check(live: RunningRequest, prompt: list[int], limit: int = 8) -> None:
    assert live.answer.result(0).tokens == made(prompt, limit)


def prompts(count: int, length: int = 20) -> list[list[int]]:
    """Prompts that go on for eight tokens at least."""
    every = ([(7 * i + 3 * j + i * j) % 10 for j in range(length)] for i in range(1000))
    return list(islice((one for one in every if len(made(one, 8)) == 8), count))


def test_more_requests_than_fit_end_with_the_tokens_of_each_alone() -> None:
    with pressed(make_kv(geometry(), pages=8)) as one:  # of about two requests
        lives = [one.submit(prompt) for prompt in prompts(8)]
        while not one.loop.idle or one.loop.inbox.pending:
            one.turn()
            one.audit()
        for live, prompt in zip(lives, prompts(8), strict=True):
            check(live, prompt)


@pytest.mark.parametrize("keep", [True, False])
def test_a_preempted_request_goes_on_where_it_was(keep: bool) -> None:
    with pressed(make_kv(geometry(), pages=40)) as one:
        live = one.submit(PROMPT, 12)
        one.turn(4)
        done = list(live.tokens)
        assert done and live.state == RUNNING
        one.preempt(live, keep)
        assert live.state == (ASIDE if keep else WAITING)
        one.audit()
        evict(one.kv)  # somebody needs the room
        tokens = one.model.steps
        one.turn()
        one.audit()
        assert live.state == RUNNING and live.tokens[: len(done)] == done
        if keep:
            assert one.model.steps == tokens + 1 and len(live.tokens) == len(done) + 1
        one.run()
        check(live, PROMPT, 12)
        assert live.preempted == 1


def test_host_memory_for_preempted_requests_has_a_bound() -> None:
    kv, told = make_kv(geometry(), pages=40), list[Event]()
    kv.bus.subscribe(told.append)
    with pressed(kv, swap=17 * 4096) as one:
        lives = [one.submit(prompt) for prompt in prompts(3)]
        one.turn(4)
        for live in lives:
            one.preempt(live, True)
        assert [live.state for live in lives] == [ASIDE, ASIDE, WAITING]
        assert kv.planner.aside_bytes <= 17 * 4096
        events = [event for event in told if isinstance(event, Preempted)]
        assert [event.kept for event in events] == [True, True, False]
        assert events[0].n_bytes > 0 == events[2].n_bytes
        one.run()
        for live, prompt in zip(lives, prompts(3), strict=True):
            check(live, prompt)


def test_rows_that_share_a_prefix_enter_where_only_the_rest_of_them_fits() -> None:
    with pressed(make_kv(simple(), pages=12), watermark=0.0) as one:
        first = one.submit([*PROMPT[:24], 6], 8)  # three pages are shared, one is its own
        one.turn(3)
        others = [one.submit([*PROMPT[:24], 7 + i], 6) for i in range(3)]
        one.turn()
        assert [live.state for live in others] == [RUNNING] * 3
        one.keeper.count([first, *others])
        assert [live.pages for live in (first, *others)] == [1, 1, 1, 1]
        one.run()
        assert not any(live.preempted for live in (first, *others))
        check(first, [*PROMPT[:24], 6])


def test_two_half_computed_prompts_do_not_wait_for_each_other() -> None:
    # Each fits alone, both do not: the second may enter only once the first is through.
    with pressed(make_kv(simple(), pages=8), token_budget=8, watermark=0.0) as one:
        lives = [one.submit(prompt, 4) for prompt in prompts(2, 40)]
        for _ in range(4):
            one.turn()
            assert lives[1].state == WAITING
        one.run()
        assert not any(live.preempted for live in lives)
        for live, prompt in zip(lives, prompts(2, 40), strict=True):
            check(live, prompt, 4)


def test_sequences_of_others_take_room_away_and_give_it_back() -> None:
    with pressed(make_kv(simple(), pages=16), patience_s=30.0) as one:
        foreign = [opened(one.kv, [9, i] * 20) for i in range(2)]  # five pages each
        lives = [one.submit(prompt) for prompt in prompts(3)]
        for _ in range(6):
            one.turn()
            one.audit()
        third = opened(one.kv, [8] * 4)
        one.turn(3)
        for seq in [*foreign, third]:
            seq.close()
        one.run()
        for live, prompt in zip(lives, prompts(3), strict=True):
            check(live, prompt)


def test_what_can_never_fit_is_refused_and_what_others_hold_fails_in_the_end() -> None:
    with pressed(make_kv(simple(), pages=8)) as one:
        with pytest.raises(CapacityError, match=r"Shorten the prompt"):
            one.submit([1] * 70)
        foreign = opened(one.kv, [9, 1] * 30)
        live = one.submit(PROMPT)
        one.run()
        with pytest.raises(CapacityError, match="in use by open sequences"):
            live.answer.result(0)
        foreign.close()
        again = one.submit(PROMPT)
        one.run()
        check(again, PROMPT)


def test_patience_is_of_each_request_that_waits() -> None:
    with pressed(make_kv(simple(), pages=8), patience_s=0.05) as one:
        foreign = opened(one.kv, [9, 1] * 30)
        gone = one.submit(PROMPT)
        one.turn()
        gone.answer.cancel()
        one.turn()
        time.sleep(0.06)
        live = one.submit(PROMPT)
        one.turn()
        assert not live.answer.done(), "it has not waited yet"
        foreign.close()
        one.run()
        check(live, PROMPT)


def test_pages_are_weighed_as_they_are_counted() -> None:
    with pressed(make_kv(geometry(), pages=40)) as one:  # of short sequences no page is let go
        before = one.keeper.worth.page_bytes
        one.submit(PROMPT)
        one.run()
        assert one.keeper.worth.page_bytes == one.keeper._footprint.page_bytes > before


@pytest.mark.parametrize("codec", ["raw", "kv8"])
def test_the_longest_request_that_is_taken_fits(codec: str) -> None:
    for shape in (geometry(heads=16), simple(head_dim=64)):
        within = 0.0 if codec == "raw" else 0.005
        kv = make_kv(shape, pages=12, codec=codec, recent_tokens=PAGE)
        with pressed(kv, within) as one:
            most = one.keeper.longest(24)
            assert most >= 8 * PAGE
            with pytest.raises(CapacityError):
                one.submit([1] * most, 1)
            prompt = [(3 * i) % 10 for i in range(most - 8)]
            live = one.submit(prompt)
            one.run()
            check(live, prompt)


# ---- prefixes on their way


@contextmanager
def linked(per_poll: int = 1, **options: Any) -> Iterator[tuple[Link, Pressed]]:
    """An engine whose cache has known the prompt, which now lies on a link."""
    link = Link(per_poll=per_poll)
    kv = make_kv(geometry(), pages=40, tiers=[link], **options)
    published(kv, PROMPT)
    evict(kv)
    with pressed(kv) as one:
        yield link, one


def test_others_go_on_while_a_prefix_comes() -> None:
    with linked(per_poll=0) as (link, one):
        other = one.submit([9, 8, 7], 60)
        one.turn(2)
        live = one.submit(PROMPT)
        for _ in range(12):
            made_so_far = len(other.tokens)
            one.turn()
            one.audit()
            assert len(other.tokens) == made_so_far + 1
        # What its loads bring is not computed meanwhile, which would slow the other one down.
        assert live.state == COMING and live.ready == 0
        link.per_poll = 100
        for _ in range(200):
            one.turn()
            if live.state != COMING:
                break
        # By a slow clock the link was late: then one page is computed after all.
        assert live.state != COMING and live.reused >= 29 - PAGE
        one.run()
        check(live, PROMPT)
        assert live.answer.result(0).restore_s > 0.0


def test_where_nobody_else_computes_the_rest_is_computed_behind_the_loads() -> None:
    with linked() as (_, one):
        live = one.submit([*PROMPT, 6, 6])
        turns = one.run()
        check(live, [*PROMPT, 6, 6])
        assert live.reused >= PAGE and turns < 40


def test_a_request_that_is_over_behind_its_loads_tells_of_them() -> None:
    with linked(per_poll=0) as (link, one):
        one.kv.restores.policy.next_compute = lambda state, among: Suffix(min(among), 0)  # type: ignore
        forward = one.model

        def slow(step: Step, last: torch.Tensor) -> torch.Tensor:
            link.per_poll = 100  # nothing has come before
            return forward(step, last)

        one.loop.runner._forward = slow  # type: ignore[attr-defined]
        live = one.submit(PROMPT, 1)
        one.run()
        assert live.moves == 2, "it never ran without them"
        done = live.answer.result(0)
        # But for the moment that the page behind the whole ones is given.
        assert done.reused_tokens == 24 and done.restore_s > 0.0 and done.exposed_s < 0.5


class Reticent(RestorePolicy):
    """Loads so many pages from the back, computes so many from the front, and says no more."""

    name = "reticent"

    def __init__(self, front: int, back: int) -> None:
        self.front, self.back = front, back

    def next_compute(self, state: State, among: Any = None) -> Compute | None:
        for progress in state.among(among):
            request, first = progress.request, progress.front[0]
            stop = min(self.front * request.unit, *progress.back)
            if progress.computed[0] == first < stop:
                return Compute(request.number, Span(0, request.layers), Span(first, stop))
        return None

    def next_load(self, state: State, tier: str) -> RestoreLoad | None:
        for progress in state:
            request, stop = progress.request, progress.back[0]
            floor = max(progress.front[0], request.tokens - self.back * request.unit)
            if floor < stop:
                return RestoreLoad(request.number, Span(0, request.layers), Span(floor, stop))
        return None


@pytest.mark.parametrize("company", [True, False])
@pytest.mark.parametrize(("front", "back"), [(0, 0), (1, 0), (0, 1), (1, 1), (3, 3)])
def test_a_policy_that_leaves_the_rest_open_ends_the_restore(
    front: int, back: int, company: bool
) -> None:
    """Its plan has an end: what it left is loaded or computed behind it, as `KV.prefill` does."""
    with linked(per_poll=100) as (_, one):
        one.kv.restores.policy = Reticent(front, back)
        if company:
            one.submit([9, 8, 7], 30)
            one.turn(2)
        live = one.submit(PROMPT)
        one.run(500)
        check(live, PROMPT)


@pytest.mark.parametrize("how", ["lost", "hangs"])
@pytest.mark.parametrize("company", [True, False])
def test_what_does_not_come_is_computed(how: str, company: bool) -> None:
    with linked(load_deadline_s=0.1) as (link, one):
        link.trouble = Trouble(fail=1.0) if how == "lost" else Trouble(hang=1.0)
        if company:
            one.submit([9, 8, 7], 30)
            one.turn(2)
        live = one.submit(PROMPT)
        one.run(200_000)
        check(live, PROMPT)
        link.release()


@pytest.mark.parametrize("what", ["cancel", "preempt", "forget"])
def test_a_prefix_that_is_not_wanted_any_more_leaves_nothing(what: str) -> None:
    with linked(per_poll=0) as (link, one):
        other = one.submit([9, 8, 7], 40)
        one.turn(2)
        live = one.submit(PROMPT)
        one.turn(3)
        assert live.state == COMING
        if what == "cancel":
            live.answer.cancel()
        elif what == "preempt":
            one.preempt(live, True)  # what is on its way cannot be set aside
            assert live.state == WAITING and live.preempted == 1
        else:
            one.kv.forget(PROMPT)
        one.audit()
        one.turn(2)
        one.audit()
        link.per_poll = 1
        one.run()
        check(other, [9, 8, 7], 40)
        if what == "cancel":
            assert live.answer.result(0).reason == "cancelled"
        else:
            check(live, PROMPT)
        waited = live.answer.result(0)
        assert 0.0 < waited.exposed_s <= waited.restore_s


def test_waiting_requests_come_nearer() -> None:
    with linked(prefetch="off") as (link, one):
        one.loop.turns.limits = one.loop.turns.limits._replace(max_rows=1)
        first = one.submit([9, 8, 7], 30)
        one.turn(2)
        assert not link.asked
        live, twin = one.submit(PROMPT), one.submit(PROMPT)
        one.turn(12)
        one.audit()
        assert link.asked and live.state == WAITING
        assert one.kv.explain([*PROMPT, 0]).residency.get("device", 0) == 24
        twin.answer.cancel()
        one.run()
        check(first, [9, 8, 7], 30)
        check(live, PROMPT)
        assert live.reused == 29 and live.restore_s == 0.0  # it was there when its turn came


def test_a_request_that_waits_keeps_what_comes_for_its_own_prompt() -> None:
    with pressed(make_kv(simple(), pages=40), max_rows=1) as one:
        one.submit([9, 8, 7], 30)
        one.turn(2)
        mine, other, twin = one.submit(PROMPT), one.submit([7] * 20), one.submit(PROMPT)
        for _ in range(3):
            one.turn()
        assert all(live.queued.waiting for live in (mine, other, twin))
        opened(one.kv, [7] * 20).close()  # by somebody else
        served = other.queued
        one.keeper.ahead.opened(twin)  # its prompt was opened, which served who came first
        assert other.queued is served and twin.queued is None
        one.run()
        check(mine, PROMPT)


def test_a_model_that_fails_harms_nobody_else() -> None:
    with pressed(make_kv(geometry(), pages=8)) as one:
        lives = [one.submit(prompt) for prompt in prompts(4)]
        one.model.poison = prompts(4)[1][0]
        one.run()
        for live, prompt in zip(lives, prompts(4), strict=True):
            if prompt[0] != one.model.poison:
                check(live, prompt)
                continue
            with pytest.raises(ArithmeticError):
                live.answer.result(0)


def test_the_model_of_these_tests_can_fail() -> None:
    kv = make_kv(geometry(), pages=20)
    with pressed(kv) as one:
        live = one.submit(PROMPT, 12)
        one.turn(4)
        seq = live.open_row.seq
        page = int(kv.planner.tables.pages[0][seq.row, 0])
        kv.planner.store.pool(0).page_bytes(page, 64).fill_(1)
        one.run()
        with pytest.raises(AssertionError, match="attends to what is wrong"):
            live.answer.result(0)
    assert isinstance(one.model, Model)
