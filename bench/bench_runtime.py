"""Cost of a step and of a look-up on the host, beside the model: time per call, by context length.

    pytest bench/bench_runtime.py --benchmark-columns=min,median,mean,rounds

A decode step of 64 rows is planned, given its token ids, told where its pages lie, and committed.
Page borders of the rows are spread, so that every step fills one page in each group: it is checked,
named by its key, published, and another one is taken from the pool, where all idle pages are in use
("full": one is given up for it). The target is 200 microseconds, flat in context length.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from flowkv import KV, Geometry, Sequence, kernels
from flowkv.cache.kv import plan
from flowkv.tiers.host import HostTier

ROWS, PAGE, ROUNDS = 64, 64, 256
SHAPE = Geometry.uniform(layers=4, kv_heads=1, head_dim=8, page_size=PAGE)
PAGE_BYTES = 4 * 4096


def make_kv(context: int, spare: int, **options: object) -> KV:
    pages = ROWS * (context // PAGE + 2 + ROUNDS // PAGE * 2) + spare
    return KV(SHAPE, gpu=pages * PAGE_BYTES, max_rows=ROWS + 1, policy="lru", **options)


def fill(kv: KV, seq: Sequence) -> None:
    """Computes a prompt: keys are positions, values their negatives."""
    for step in kv.prefill([seq], chunk=1 << 20):
        positions = step.positions[0].float().view(-1, 1, 1)
        for layer in range(4):
            k = (positions + layer).expand(-1, 1, 8)
            kernels.append(k, -k, step.pages(layer), step.batch(0))


def check(kv: KV, seq: Sequence) -> None:
    """What was computed is there, page by page."""
    step = plan(kv, [seq], [0])
    with kernels.checking():
        k, v = kernels.gather_dense(step.pages(3), step.batch(0), seq.length)
    step.rollback()
    assert torch.equal(k[0, 0, :, 0], torch.arange(seq.length) + 3.0) and torch.equal(v, -k)


@pytest.fixture(params=["roomy", "full"])
def rows(request: pytest.FixtureRequest, context: int) -> Iterator[tuple[KV, list[Sequence]]]:
    torch.set_num_threads(1)
    kv = make_kv(context, 64)
    kv.planner.store.pools["cpu"].arena.zero_()  # else the first writes are what is measured
    seqs = [kv.open(np.full(context + row % PAGE, row)) for row in range(ROWS)]
    for seq in seqs:
        fill(kv, seq)
    check(kv, seqs[5])
    if request.param == "full":
        free = kv.planner.store.pool(0).available(4) - 1
        with kv.open(np.full(free * PAGE, 1000)) as idle:
            fill(kv, idle)
    yield kv, seqs
    check(kv, seqs[5])
    kv.close()


@pytest.mark.benchmark(group="decode step of 64 rows")
@pytest.mark.parametrize("context", [1 << 10, 1 << 15], ids=["1k", "32k"])
@pytest.mark.parametrize("door", ["plan", "step"])
def test_decode_step(benchmark, rows: tuple[KV, list[Sequence]], context: int, door: str) -> None:
    kv, seqs = rows
    counts, numbers = np.ones(ROWS, np.int64), itertools.count()
    fresh = [[7]] * ROWS
    k = torch.zeros(ROWS, 1, 8)

    def told() -> None:  # `plan` leaves the ids to its caller, as the Hugging Face door does
        position = next(numbers)
        assert seqs[0].length == context + position

    def planned() -> None:
        step = plan(kv, seqs, counts)
        step.batch(0)
        for layer in range(4):
            step.pages(layer)
        step.commit()

    def stepped() -> None:
        step = kv.step(seqs, fresh)
        step.batch(0)
        for layer in range(4):
            step.pages(layer)
        step.commit()

    def before() -> None:
        told()
        if door == "plan":
            for seq in seqs:
                seq.note([7])

    for _ in range(2):  # compiled, and right
        before()
        with plan(kv, seqs, counts) as step:
            if door == "step":
                for seq in seqs:
                    seq.note([7])
            for layer in range(4):
                at = step.positions[0].float().view(-1, 1, 1).expand(-1, 1, 8) + layer
                kernels.append(at + 0 * k, -at, step.pages(layer), step.batch(0))
    check(kv, seqs[5])
    benchmark.pedantic(
        planned if door == "plan" else stepped, setup=before, rounds=ROUNDS, iterations=1
    )
    for seq in seqs:  # what was only planned holds no keys
        kv.truncate(seq, context + 2)


@pytest.mark.parametrize("codec", ["raw", "kv8", "auto"])
@pytest.mark.benchmark(group="decode step of 64 rows, one of which fills a page that is encoded")
def test_step_that_encodes(benchmark, codec: str) -> None:
    kv = make_kv(1 << 12, 64, codec=codec, recent_tokens=PAGE, warm_tokens=4 * PAGE)
    kv.planner.store.pools["cpu"].arena.zero_()
    seqs = [kv.open(np.full((1 << 10) + row, row)) for row in range(ROWS)]
    for seq in seqs:
        fill(kv, seq)
    counts = np.ones(ROWS, np.int64)

    def planned() -> None:
        step = plan(kv, seqs, counts)
        step.batch(0)
        for layer in range(4):
            step.pages(layer)
        step.commit()

    def before() -> None:
        for seq in seqs:
            seq.note([7])

    benchmark.pedantic(planned, setup=before, rounds=ROUNDS, warmup_rounds=2, iterations=1)
    codecs = kv.stats()["devices"]["cpu"]["codecs"]
    assert set(codecs) == {"raw"} if codec == "raw" else len(codecs) > 1
    kv.close()


@pytest.mark.parametrize("place", ["device", "host", "disk"])
@pytest.mark.benchmark(group="open a known prompt of 32k tokens")
def test_open(benchmark, place: str, tmp_path: Path) -> None:
    context = 1 << 15
    tiers: list[object] = [f"gpu:{(context // PAGE + 64) * PAGE_BYTES}B"]
    if place == "host":
        tiers.append(HostTier(1 << 30))
    elif place == "disk":
        tiers.append(f"disk:{tmp_path / 'kv'}:1GiB")
    kv = KV(SHAPE, tiers=tiers, policy="lru", namespace="bench")
    prompt = np.arange(context + 1) % 50_000
    with kv.open(prompt) as seq:
        fill(kv, seq)
    kv.flush()
    store = kv.planner.store

    def leave() -> None:
        while place != "device" and store.eviction.make_room(0, 1):
            store.writes.flush(10.0)
        kv.gate.__init__()  # always load

    def reopen() -> None:
        with kv.open(prompt) as seq:
            assert seq.reused == context

    leave()
    assert {name.partition(":")[0] for name in kv.explain(prompt).residency} == {place}
    with kv.open(prompt) as seq:
        check(kv, seq)
    benchmark.pedantic(reopen, setup=leave, rounds=10, iterations=1)
    kv.close()
