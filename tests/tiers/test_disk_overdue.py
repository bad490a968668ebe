"""A disk that takes its time, or never answers: answers come all the same, and nobody's memory is
touched after its answer (D10)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowkv.tiers import Completion, Load, Outcome, Store
from flowkv.tiers.disk import DiskTier
from tests.clock import wait_for
from tests.inside import READ, Arena, ManualClock, Operations, StoreError, address_of, seal_all

from .frames import LAYOUT, answers, body_of, hits, info_of, key_of, outcomes, stored
from .gates import GatedEngine

MIB = 1 << 20


def load_of(name: object, target: bytearray | memoryview) -> Load:
    return Load(key_of(name), memoryview(target), LAYOUT)


def gated(
    path: Path, holds: str, names: Sequence[object] = (), **options: Any
) -> tuple[GatedEngine, DiskTier]:
    """An engine that from now on holds these operations back, and a tier that has these frames."""
    engine = GatedEngine()
    tier = DiskTier(path, MIB, engine=engine, **options)
    if names:
        stored(tier, names)
    engine.holds = holds
    return engine, tier


def store_of(name: object, body: bytes | bytearray | None = None, size: int = 8192) -> Store:
    return Store(key_of(name), info_of(size), memoryview(body or body_of(name, size)))


def test_an_overdue_load_does_not_touch_its_target(tmp_path: Path) -> None:
    clock = ManualClock()
    engine, tier = gated(tmp_path, "read", ["a"], clock=clock)
    job = tier.submit_load([load_of("a", target := bytearray(8192))], deadline_s=3)
    assert engine.entered.acquire(timeout=60)
    assert tier.poll() == []
    clock.advance(s=3)
    assert outcomes(answers(tier, job, 1)) == [("failed", "deadline")]
    engine.release()
    tier.close()
    assert target == bytes(8192)
    assert tier.poll() == []


def test_an_overdue_store_is_undone(tmp_path: Path) -> None:
    clock = ManualClock()
    engine, tier = gated(tmp_path, "write", clock=clock)
    used, body = tier.used_bytes(), bytearray(body_of("a"))
    job = tier.submit_store([store_of("a", body)], deadline_s=3)
    assert engine.entered.acquire(timeout=60)
    clock.advance(s=4)
    assert outcomes(answers(tier, job, 1)) == [("failed", "deadline")]
    body[:] = bytes(8192)  # its owner uses the memory again
    engine.release()
    stored(tier, ["b"])
    tier.delete([key_of("b")])
    assert tier.contains([key_of("a")]) == [False]
    wait_for(lambda: tier.used_bytes() == used)
    tier.close()
    tier = DiskTier(tmp_path, MIB)
    assert list(tier.scan()) == []


def test_a_store_that_waits_for_the_device_is_undone_too(tmp_path: Path) -> None:
    clock = ManualClock()
    engine, tier = gated(tmp_path, "sync", ["a"], clock=clock, durability="sync")
    late = tier.submit_store([store_of("b")], deadline_s=3)
    assert engine.entered.acquire(timeout=60)
    behind = tier.submit_store([store_of("c")], deadline_s=30)  # gathers for the next group
    clock.advance(s=4)
    assert outcomes(answers(tier, late, 1)) == [("failed", "deadline")]
    engine.release()
    assert outcomes(answers(tier, behind, 1)) == [("stored", "")]
    assert tier.contains([key_of(name) for name in "abc"]) == [True, False, True]


def test_items_that_wait_too_long_fail(tmp_path: Path) -> None:
    clock = ManualClock()
    engine, tier = gated(tmp_path, "write", clock=clock, queue_bytes=3 * 8192)
    first = tier.submit_store([store_of(0)], deadline_s=3)
    assert engine.entered.acquire(timeout=60)
    arena = tier._conductor._arena
    block = arena.acquire(arena.free_bytes)  # so that nothing more can be begun
    assert block is not None
    job = tier.submit_store([store_of(n) for n in range(1, 8)], deadline_s=3)
    busy: list[Completion] = tier.poll()
    assert {(answer.outcome, answer.reason) for answer in busy} == {(Outcome.FAILED, "busy")}
    assert len(busy) == 4
    clock.advance(s=4)
    late: list[Completion] = []
    while len(late) < 4:
        late += tier.poll(1.0)
    assert {(answer.outcome, answer.reason) for answer in late} == {(Outcome.FAILED, "deadline")}
    ends = [(answer.job, answer.item) for answer in busy + late]
    assert sorted(ends) == [(first, 0), *((job, n) for n in range(7))]
    arena.give_back(block)
    engine.release()
    wait_for(lambda: not tier._wishes._waiting_bytes)
    stored(tier, [8])
    assert tier.contains([key_of(n) for n in range(9)]) == [False] * 8 + [True]


def test_stores_of_one_key_share_its_fate(tmp_path: Path) -> None:
    engine, tier = gated(tmp_path, "write")
    job = tier.submit_store([store_of("a")] * 3)
    assert engine.entered.acquire(timeout=60)
    engine.release()
    assert outcomes(answers(tier, job, 3)) == [("stored", "")] * 3
    assert sum(1 for _ in tier.scan()) == 1


def test_a_slot_is_not_reused_while_it_is_read(tmp_path: Path) -> None:
    engine, tier = gated(tmp_path, "read", ["a"])
    (place,) = [held.slot for _, held in tier._store.entries()]
    job = tier.submit_load([load_of("a", target := bytearray(8192))])
    assert engine.entered.acquire(timeout=60)
    assert tier.delete([key_of("a")]) == 1
    stored(tier, ["b"])
    assert place not in [held.slot for _, held in tier._store.entries()]
    engine.release()
    assert outcomes(answers(tier, job, 1)) == [("hit", "")]
    assert target == body_of("a")
    stored(tier, ["c"])
    assert place in [held.slot for _, held in tier._store.entries()]


@pytest.mark.parametrize("what", ["read", "write"])
def test_what_is_cancelled_leaves_its_memory_alone(tmp_path: Path, what: str) -> None:
    engine, tier = gated(tmp_path, what, ["a"])
    target, body = bytearray(8192), bytearray(body_of("b"))
    if what == "read":
        job = tier.submit_load([load_of("a", target)])
    else:
        job = tier.submit_store([store_of("b", body)])
    assert engine.entered.acquire(timeout=60)
    tier.cancel(job)
    assert outcomes(answers(tier, job, 1)) == [("failed", "cancelled")]
    body[:] = bytes(8192)
    engine.release()
    tier.cancel(job)  # once more does nothing
    assert hits(tier, ["a", "b"]) == 1
    assert target == bytes(8192)


def test_too_much_retired_memory_opens_the_breaker(tmp_path: Path) -> None:
    engine, clock, arena = GatedEngine(), ManualClock(), Arena(MIB)
    tier = DiskTier(tmp_path, 8 * MIB, engine=engine, clock=clock, arena=arena)
    stored(tier, range(4), size=128 << 10)
    engine.holds = "read"
    targets = [bytearray(128 << 10) for _ in range(4)]
    job = tier.submit_load([load_of(n, targets[n]) for n in range(4)], deadline_s=3)
    for _ in range(4):
        assert engine.entered.acquire(timeout=60)
    clock.advance(s=4)
    assert outcomes(answers(tier, job, 4)) == [("failed", "deadline")] * 4
    wait_for(lambda: tier._conductor._late_bytes > MIB // 4)
    for submit in (
        lambda: tier.submit_load([load_of(0, bytearray(128 << 10))]),
        lambda: tier.submit_store([store_of("new")]),
    ):
        job = submit()
        assert outcomes(answers(tier, job, 1)) == [("failed", "breaker")]
    engine.release()  # the disk comes back
    wait_for(lambda: not tier._conductor._late_bytes)
    assert hits(tier, range(4), size=128 << 10) == 4
    assert targets == [bytearray(128 << 10)] * 4
    tier.close()
    assert arena.free_bytes == MIB
    arena.close()


def test_a_frame_larger_than_the_arena(tmp_path: Path) -> None:
    arena = Arena(64 << 10)
    tier = DiskTier(tmp_path, 8 * MIB, arena=arena)
    block = arena.acquire(64 << 10)  # others may have all of it
    assert block is not None
    stored(tier, ["a"], size=MIB)
    stored(tier, ["b"])
    assert hits(tier, ["a"], size=MIB) == 1
    assert hits(tier, ["b"]) == 1
    arena.give_back(block)
    stored(tier, ["c"], size=MIB)
    assert hits(tier, ["c"], size=MIB) == 1
    tier.close()
    assert arena.free_bytes == 64 << 10


def test_stores_do_not_starve(tmp_path: Path) -> None:
    """Loads come without end; a store among them is done while they are."""
    tier = DiskTier(tmp_path, 4 * MIB, arena=Arena(256 << 10))
    stored(tier, range(8), size=32 << 10)
    target, at, waiting, job = bytearray(32 << 10), 0, set[int](), -1
    while job < 0 or job in waiting:
        while len(waiting) < 64 and at < 40_000:
            waiting.add(tier.submit_load([load_of(at % 8, target)]))
            at += 1
        if at >= 100 and job < 0:
            waiting.add(job := tier.submit_store([store_of("new")]))
        waiting -= {answer.job for answer in tier.poll(1.0)}
    assert waiting, "the store waited for the last load"
    while waiting:
        waiting -= {answer.job for answer in tier.poll(1.0)}
    assert hits(tier, ["new"]) == 1


def test_close_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowkv.tiers.disk.tier.CLOSE_S", 0.2)
    engine, tier = gated(tmp_path, "read", ["a"])
    job = tier.submit_load([load_of("a", target := bytearray(8192))])
    assert engine.entered.acquire(timeout=60)
    tier.close()
    assert outcomes(answers(tier, job, 1)) == [("failed", "closed")]
    assert target == bytes(8192)
    assert tier.poll() == []


def test_close_leaves_memory_alone_that_is_being_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowkv.tiers.disk.tier.CLOSE_S", 0.05)
    begun, go_on = threading.Event(), threading.Event()

    def slowly(frames: object) -> None:
        begun.set()
        assert go_on.wait(60)
        seal_all(frames)  # type: ignore[arg-type]

    monkeypatch.setattr("flowkv.tiers.disk.tier.seal_all", slowly)
    tier = DiskTier(tmp_path, MIB)
    job = tier.submit_store([store_of("a")])
    assert begun.wait(60)
    tier.close()
    assert tier.poll() == [], "an answer would say that the body is free"
    go_on.set()
    answers(tier, job, 1)


def test_erasing_what_is_being_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowkv.tiers.disk.tier.ERASE_S", 0.05)
    engine, tier = gated(tmp_path, "read", ["a"])
    job = tier.submit_load([load_of("a", bytearray(8192))])
    assert engine.entered.acquire(timeout=60)
    with pytest.raises(StoreError, match="being read right now"):
        tier.erase([key_of("a")])
    assert tier.contains([key_of("a")]) == [False]
    with pytest.raises(StoreError, match="being read right now"):
        tier.erase([])  # still not done
    engine.release()
    assert outcomes(answers(tier, job, 1)) == [("hit", "")]
    assert tier.erase([]) == 0
    assert body_of("a")[:512] not in (tmp_path / "slab-00000003").read_bytes()


def test_a_large_store_does_not_starve_either(tmp_path: Path) -> None:
    """It needs more memory than loads without end ever leave."""
    engine = GatedEngine()
    tier = DiskTier(tmp_path, 8 * MIB, arena=Arena(256 << 10), threads=0, engine=engine)
    size = 60 << 10
    stored(tier, range(8), size=size)
    engine.holds = "read"
    target = bytearray(size)
    done: list[Completion] = []
    for at in range(6):
        tier.submit_load([load_of(at, target)])
    job = tier.submit_store([store_of("large", None, 200 << 10)])
    for at in range(400):
        done += tier.poll()
        if any(answer.job == job for answer in done):
            break
        engine.release(1)
        tier.submit_load([load_of(at % 8, target)])
    assert [answer.outcome for answer in done if answer.job == job] == [Outcome.STORED]
    engine.release()


def test_stores_wait_for_few_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many loads came before: the engine works off what it was given, in that order."""
    size, order = 32 << 10, list[str]()
    monkeypatch.setattr("flowkv.tiers.disk.tier.TOGETHER_BYTES", size)
    monkeypatch.setattr("flowkv.tiers.disk.tier.SHARED_BYTES", 4 * size)
    engine = GatedEngine()
    tier = DiskTier(tmp_path, 8 * MIB, arena=Arena(3 * size), threads=0, engine=engine)
    stored(tier, range(32), size=size)
    memory = memoryview(bytearray(33 * size))
    memory = memory[-address_of(memory) % 4096 :]
    loads = [
        Load(key_of(n), memory[n * size : (n + 1) * size], LAYOUT, direct=True) for n in range(32)
    ]
    answers(tier, tier.submit_load(loads), 32)  # whose digests are known then
    submit = engine.submit

    def noted(operations: Operations) -> None:
        order.extend("read" if op == READ else "write" for op in operations["op"].tolist())
        submit(operations)

    monkeypatch.setattr(engine, "submit", noted)
    jobs = tier.submit_load(loads), tier.submit_store([store_of(f"new {n}") for n in range(8)])
    done: list[Completion] = []
    while len(done) < 40:
        done += tier.poll(1.0)
    assert {answer.outcome for answer in done} == {Outcome.HIT, Outcome.STORED} and len(jobs) == 2
    assert order.index("write") <= 4 and order.count("read") == 32


def test_loads_pass_stores_that_the_disk_does_not_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither those with the engine, nor those that wait, nor overdue loads hold a load back."""
    size, engine, clock = 32 << 10, GatedEngine(), ManualClock()
    monkeypatch.setattr("flowkv.tiers.disk.tier.SHARED_BYTES", 2 * size)
    arena = Arena(10 * size)
    tier = DiskTier(tmp_path, 8 * MIB, arena=arena, threads=0, engine=engine, clock=clock)
    stored(tier, ["a", "b", "c"], size=size)
    target = bytearray(size)
    engine.holds = "read"
    late = tier.submit_load([load_of(n, target) for n in "ab"], deadline_s=3)
    assert tier.poll() == [] and len(engine.held) == 2
    clock.advance(s=4)
    assert outcomes(answers(tier, late, 2)) == [("failed", "deadline")] * 2
    engine.holds = "write"
    job = tier.submit_store([store_of(f"new {n}", None, size) for n in range(8)])
    assert tier.poll() == [] and 4 < len(engine.held) < 10
    load = tier.submit_load([load_of("c", target)])
    assert outcomes(answers(tier, load, 1, within_s=5.0)) == [("hit", "")]
    assert target == body_of("c", size)
    engine.release()
    assert outcomes(answers(tier, job, 8)) == [("stored", "")] * 8


def test_nobody_waits_for_what_went_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even if FlowKV itself is at fault."""
    tier = DiskTier(tmp_path, MIB)
    stored(tier, ["a"])

    def wrong(*_: object, **__: object) -> None:
        raise RuntimeError("a fault of ours")

    for place in ("open_all", "DiskScheduler._begin_load"):
        with monkeypatch.context() as patch:
            patch.setattr(f"flowkv.tiers.disk.tier.{place}", wrong)
            job = tier.submit_load([load_of("a", bytearray(8192))])
            reason = "RuntimeError: a fault of ours"
            assert outcomes(answers(tier, job, 1, within_s=60)) == [("failed", reason)]
    for place in ("DiskScheduler._begin_store", "DiskScheduler._landed"):
        with monkeypatch.context() as patch:
            patch.setattr(f"flowkv.tiers.disk.tier.{place}", wrong)
            job = tier.submit_store([store_of(place)])
            assert outcomes(answers(tier, job, 1, within_s=60)) == [("failed", reason)]
    assert hits(tier, ["a"]) == 1
    staged = tier._conductor._arena
    assert staged.free_bytes == staged.n_bytes and tier.erase([key_of("a")]) == 1, "nothing leaked"


def test_memory_with_gaps_is_refused_and_costs_nobody_else_anything(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, MIB)
    stored(tier, ["a"])
    gaps, target = np.zeros((8192, 2), np.uint8)[:, 0].data, bytearray(8192)
    used = tier.used_bytes()
    job = tier.submit_store([Store(key_of("b"), info_of(8192), gaps)])
    assert outcomes(answers(tier, job, 1)) == [("failed", "invalid")]
    assert tier.used_bytes() == used
    stored(tier, ["b"])
    job = tier.submit_load([load_of("a", gaps), load_of("a", target)])
    assert outcomes(answers(tier, job, 2)) == [("failed", "target"), ("hit", "")]
    assert target == body_of("a") and tier.erase([key_of("a"), key_of("b")]) == 2
