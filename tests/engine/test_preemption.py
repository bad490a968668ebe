"""Preempted at random, and back: every byte of its pages, and every token, is as it was."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from flowkv import KV, Engine, Request, Sequence
from flowkv.policy.scheduling import ASIDE, RUNNING
from tests.inside import RunningRequest

from .nano import PAGE, VOCABULARY, Nano, make_kv

Bytes = list[list[torch.Tensor | None]]


def content(kv: KV, seq: Sequence) -> Bytes:
    """The written bytes of a sequence's pages, group by group."""
    store, found = kv.planner.store, Bytes()
    for g, blocks in enumerate(seq.blocks):
        layout = store.forms[g].raw
        line = kv.planner.tables.pages[g][seq.row, : len(blocks)].tolist()
        pages = [store.pool(g).page_bytes(page, layout.page_bytes).clone() for page in line]
        found.append(list(pages))
    return found


class Random:
    """A schedule: who is preempted when, what is evicted, who comes and goes."""

    def __init__(self, model: Nano, seed: int, **settings: Any) -> None:
        self.dice, self.model = random.Random(seed), model
        pages = self.dice.choice((10, 16, 40))
        self.kv = make_kv(pages)
        settings = {"max_rows": 4, "token_budget": self.dice.choice((6, 16))} | settings
        self.engine = Engine(model, self.kv, patience_s=0.0, **settings)
        self.loop, self.bytes = self.engine._loop, dict[RunningRequest, Bytes]()
        self.checked = self.moved = 0
        leave, enter = self.loop.keeper.leave, self.loop.keeper.enter

        def left(live: RunningRequest, keep: bool, now_s: float) -> None:
            before = content(self.kv, live.open_row.seq)
            leave(live, keep, now_s)
            if live.state == ASIDE:
                self.bytes[live] = before

        def entered(live: RunningRequest, now_s: float) -> None:
            enter(live, now_s)
            before = self.bytes.pop(live, None)
            if before is not None:
                self.check(before, content(self.kv, live.open_row.seq))

        self.loop.keeper.leave = left  # type: ignore[method-assign]
        self.loop.keeper.enter = entered  # type: ignore[method-assign]

    def check(self, before: Bytes, after: Bytes) -> None:
        for old, new in zip(before, after, strict=True):
            for a, b in zip(old, new, strict=True):
                assert a is not None and b is not None and torch.equal(a, b)
        self.checked += 1

    def prompt(self) -> list[int]:
        dice = self.dice
        shared = [[1, 2, 3, 4, 5, 6, 7] * 4, [8, 9] * 9, []][dice.randrange(3)]
        return shared + [dice.randrange(VOCABULARY) for _ in range(dice.randint(1, 8))]

    def run(self) -> None:
        dice, loop = self.dice, self.loop
        asked = []
        for _ in range(dice.randint(2, 6)):
            prompt, count = self.prompt(), dice.randint(1, 8)
            request = Request(prompt=prompt, max_new_tokens=count)
            asked.append((self.engine._hand_in(request, limited=True), prompt))
        while not loop.idle or loop.inbox.pending:
            loop.turn()
            running = [live for live in loop.active if live.state == RUNNING]
            if running and dice.random() < 0.4:
                loop._leave(dice.choice(running), dice.random() < 0.8, 0.0)
            if dice.random() < 0.3:
                with self.kv.lock:
                    for _ in range(dice.randint(1, 12)):
                        self.kv.planner.store.eviction.make_room(0, 1)
            if dice.random() < 0.1:
                self.kv.defragment()
        loop.turn()  # gives answers that ended by hand
        for live, prompt in asked:
            count = live.limit
            assert live.answer.result(0).tokens == self.model.alone(prompt, count)
        self.moved = self.kv.planner.copied_bytes
        self.engine.close()
        assert not self.kv._open and self.kv.planner.aside_bytes == 0
        self.kv.close()


def schedules(seeds: range) -> None:
    model, checked, moved = Nano(), 0, 0
    for seed in seeds:
        one = Random(model, seed, scheduler=("fcfs", "shortest", "priority")[seed % 3])
        one.run()
        checked, moved = checked + one.checked, moved + one.moved
    assert checked > len(seeds) // 2 and moved > PAGE  # else nothing was tested


def test_preempted_and_resumed_requests_lose_no_bit() -> None:
    schedules(range(40))


@pytest.mark.usefixtures("behind")
def test_nor_do_they_where_tokens_are_read_late() -> None:
    schedules(range(40, 60))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 2000, 100))
def test_preempted_and_resumed_requests_lose_no_bit_in_a_thousand_schedules(first: int) -> None:
    schedules(range(first, first + 100))
