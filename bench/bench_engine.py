"""Cost of an engine's turn beside the model: time per step of 64 rows, by context length.

    pytest bench/bench_engine.py --benchmark-columns=min,median,mean,rounds

The model is none: logits are there at once. What is left is the scheduler, the step's plan, the
tables, the largest logit of each row, and the books. Page borders of the rows are spread, so that
every step fills a page. The target is 300 microseconds, flat in context length; with requests that
wait, for every scheduler; and with everybody listening: to events, and to tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from flowkv import KV, Engine, Geometry, Request
from flowkv.cache.step import Step
from flowkv.engine.runner import PackedRunner
from flowkv.observe.events import EngineStep
from flowkv.policy.scheduling import SCHEDULERS

ROWS, PAGE, ROUNDS = 64, 64, 256
SHAPE = Geometry.uniform(layers=1, kv_heads=1, head_dim=32, page_size=PAGE)
PAGE_BYTES = 4 * 4096
LOGITS = torch.zeros(ROWS, 1000)


def forward(step: Step, last: torch.Tensor) -> torch.Tensor:
    """The largest logit is always the first one."""
    step.pages(0)
    return LOGITS[: len(last)]


def make_engine(context: int, scheduler: str = "fcfs") -> Engine:
    pages = ROWS * (context // PAGE + ROUNDS // PAGE + 4)
    kv = KV(SHAPE, gpu=pages * PAGE_BYTES, max_rows=ROWS + 1, policy="lru")
    budget = ROWS * (context + PAGE)
    return Engine(
        None,
        kv,
        runner=PackedRunner(kv, forward),
        max_rows=ROWS,
        token_budget=budget,
        max_waiting=1000,
        scheduler=scheduler,
        watermark=0.0,
    )


def fill(engine: Engine, context: int, waiting: int) -> None:
    """64 rows decode; so many requests wait behind them."""
    loop = engine._loop
    for row in range(ROWS):
        prompt = np.full(context + row % PAGE, row)
        engine._hand_in(Request(prompt=prompt, max_new_tokens=4 * ROUNDS), limited=True)
    while len(loop.active) < ROWS or any(live.missing > 1 for live in loop.active):
        loop.turn()
    for row in range(waiting):
        engine._hand_in(Request(prompt=[row, 1], max_new_tokens=4 * ROUNDS), limited=True)


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check(engine: Engine) -> None:
    """Every row made a token in every turn."""
    made = {live.made for live in engine._loop.active}
    assert len(engine._loop.active) == ROWS and max(made) - min(made) <= 1
    engine.close(drain=False)
    engine.kv.close()


@pytest.mark.benchmark(group="turn of 64 rows")
@pytest.mark.parametrize("context", [1 << 7, 1 << 10, 1 << 14], ids=["128", "1k", "16k"])
def test_turn(benchmark, one_thread: None, context: int) -> None:
    engine = make_engine(context)
    fill(engine, context, 0)
    benchmark.pedantic(engine._loop.turn, rounds=ROUNDS, warmup_rounds=8)
    check(engine)


@pytest.mark.benchmark(group="turn of 64 rows, 100 wait")
@pytest.mark.parametrize("scheduler", sorted(SCHEDULERS))
def test_turn_with_a_queue(benchmark, one_thread: None, scheduler: str) -> None:
    engine = make_engine(1 << 10, scheduler)
    fill(engine, 1 << 10, 100)
    benchmark.pedantic(engine._loop.turn, rounds=ROUNDS, warmup_rounds=8)
    check(engine)


@pytest.mark.benchmark(group="turn of 64 rows, with listeners")
def test_turn_with_listeners(benchmark, one_thread: None) -> None:
    engine = make_engine(1 << 10)
    fill(engine, 1 << 10, 0)
    seen: list[EngineStep] = []
    engine.kv.bus.subscribe(seen.append, EngineStep)
    benchmark.pedantic(engine._loop.turn, rounds=ROUNDS, warmup_rounds=8)
    assert len(seen) == ROUNDS + 8
    check(engine)
