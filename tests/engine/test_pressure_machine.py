"""Anything that can happen to an engine short of memory, in any order: everything ends, adds up."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from flowkv import Sequence
from flowkv.policy.scheduling import COMING, OVER
from flowkv.testing import MemoryTier
from tests.inside import CapacityError, RunningRequest

from ..cache.links import NO_TROUBLE, Link, Trouble
from ..cache.toy import PAGE, geometry, make_kv, prefill
from .pressed import Pressed, made

BEGINNINGS = ([1, 2, 3] * 8, [1, 2, 3] * 3 + [4] * 9, [5, 6], [7] * 20)
TROUBLES = (
    *(NO_TROUBLE, Trouble(miss=0.5), Trouble(fail=0.5, damage=0.3), Trouble(hang=0.5)),
    Trouble(fail=1.0),
)


class Pressure(RuleBasedStateMachine):
    """An engine, a cache, a tier and a user of the same cache, all of whom may fail or go."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[RunningRequest, list[int], int]] = []
        self.foreign: list[Sequence] = []
        self.failing = False

    @initialize(
        tiers=st.sampled_from(("none", "host", "link")),
        pages=st.sampled_from((8, 12, 30)),
        scheduler=st.sampled_from(("fcfs", "shortest", "priority")),
        codec=st.sampled_from(("raw", "raw", "kv8")),
        max_rows=st.integers(1, 4),
        token_budget=st.sampled_from((4, 12, 40)),
        swap=st.sampled_from(("1B", "40KiB", "1GiB")),
    )
    def start(
        self,
        tiers: str,
        pages: int,
        scheduler: str,
        codec: str,
        max_rows: int,
        token_budget: int,
        swap: str,
    ) -> None:
        self.link = Link(per_poll=1)
        stack: dict[str, list[Any]] = {"none": [], "host": [MemoryTier()], "link": [self.link]}
        kv = make_kv(
            geometry(heads=2 if codec == "raw" else 16),
            pages=pages,
            tiers=stack[tiers],
            codec=codec,
            recent_tokens=PAGE,
            max_rows=8,
            load_deadline_s=0.05,
        )
        self.one = Pressed(
            kv,
            0.0 if codec == "raw" else 0.005,
            scheduler=scheduler,
            max_rows=max_rows,
            token_budget=token_budget,
            swap=swap,
        )

    @property
    def under_way(self) -> list[RunningRequest]:
        return [live for live, _, _ in self.asked if live.state != OVER]

    # ---- requests

    @rule(
        beginning=st.sampled_from(BEGINNINGS),
        end=st.lists(st.integers(1, 2), max_size=3),
        limit=st.integers(1, 20),
        priority=st.integers(0, 2),
        deadline_s=st.sampled_from((None, None, None, 0.0, 0.02, 100.0)),
    )
    def submit(
        self,
        beginning: list[int],
        end: list[int],
        limit: int,
        priority: int,
        deadline_s: float | None,
    ) -> None:
        prompt = beginning + end
        with contextlib.suppress(CapacityError):
            live = self.one.submit(prompt, limit, priority=priority, deadline_s=deadline_s)
            self.asked.append((live, prompt, limit))

    # What is drawn depends on nothing that time decides: numbers, not requests.

    @rule(which=st.integers(0, 5))
    def cancel(self, which: int) -> None:
        if lives := self.under_way:
            lives[which % len(lives)].answer.cancel()

    @rule(count=st.integers(1, 6))
    def turn(self, count: int) -> None:
        self.one.turn(count)

    @rule(which=st.integers(0, 3), keep=st.booleans())
    def preempt(self, which: int, keep: bool) -> None:
        if active := self.one.loop.active:
            self.one.preempt(active[which % len(active)], keep)

    @rule(count=st.integers(1, 3))
    def fail_steps(self, count: int) -> None:
        self.one.model.fail, self.failing = count, True

    # ---- the cache

    @rule(tokens=st.integers(1, 40), first=st.integers(1, 2))
    def shrink(self, tokens: int, first: int) -> None:
        if len(self.foreign) == 2:
            return
        with contextlib.suppress(CapacityError):
            seq = self.one.kv.open([first] + [9] * tokens)
            self.foreign.append(seq)
            prefill(self.one.kv, seq)

    @rule()
    def grow(self) -> None:
        if self.foreign:
            self.foreign.pop().close()

    @rule(pages=st.integers(1, 9))
    def evict(self, pages: int) -> None:
        kv = self.one.kv
        with kv.lock:
            for n in range(pages):
                kv.planner.store.eviction.make_room(n % 2, 1)

    @rule(beginning=st.sampled_from(BEGINNINGS))
    def forget(self, beginning: list[int]) -> None:
        self.one.kv.forget(beginning)

    @rule()
    def defragment(self) -> None:
        self.one.kv.defragment()

    @rule(trouble=st.sampled_from(TROUBLES), per_poll=st.sampled_from((0, 1, 50)))
    def tier(self, trouble: Trouble, per_poll: int) -> None:
        self.link.trouble, self.link.per_poll = trouble, per_poll

    @rule()
    def release(self) -> None:
        self.link.release()

    # ---- what must hold

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "one"):
            return
        self.one.audit()
        for live, prompt, limit in self.asked:
            wanted = made(prompt, limit)
            assert live.tokens == wanted[: len(live.tokens)]
            assert live.state != COMING or live.open_row.seq.restoration is not None

    def teardown(self) -> None:
        if not hasattr(self, "one"):
            return
        self.link.trouble, self.link.per_poll = NO_TROUBLE, 50
        self.link.release()
        for seq in self.foreign:
            seq.close()
        self.one.model.fail = 0
        self.one.run(20_000)
        for live, prompt, limit in self.asked:
            self.ended(live, made(prompt, limit))
        self.one.finish()
        self.one.kv.close()

    def ended(self, live: RunningRequest, wanted: list[int]) -> None:
        assert live.answer.done() and live.state == OVER
        if (error := live.answer.exception(0)) is not None:
            assert isinstance(error, CapacityError) or self.failing
            return
        completion = live.answer.result(0)
        if completion.reason in ("cancelled", "deadline"):
            assert completion.tokens == wanted[: len(completion.tokens)]
        else:
            assert completion.tokens == wanted
            assert (completion.reason == "stop") == (wanted[-1] == 10)


def test_everything_ends_and_adds_up() -> None:
    run_state_machine_as_test(Pressure, settings=settings(max_examples=25, stateful_step_count=25))


@pytest.mark.deep
def test_everything_ends_and_adds_up_at_length() -> None:
    run_state_machine_as_test(Pressure, settings=settings(max_examples=800, stateful_step_count=50))
