"""Where each block is going below the device: to which tier, once, and not lost on the way."""

from __future__ import annotations

from typing import Any

import pytest

from flowkv import KV
from flowkv.testing import MemoryTier
from tests.cache.audit import audit
from tests.cache.fakes import Deferred, lasting
from tests.cache.toy import make_kv, published, simple
from tests.inside import ManualClock, StoreError

P = [1] * 24
HOST, DISK = 0, 1


def stacked(*tiers: Any, **options: Any) -> tuple[KV, ManualClock]:
    """A cache over some tiers that is bound, and whose tier that lasts is away until `back`."""
    clock = ManualClock()
    kv = make_kv(simple(), pages=16, tiers=tiers, clock=clock, **options)
    kv.planner.store.stack.rest(len(tiers) - 1, 60.0)
    return kv, clock


def back(kv: KV, clock: ManualClock) -> None:
    clock.advance(s=61.0)
    kv.flush(5.0)


def evict_all(kv: KV) -> None:
    with kv.lock:
        while kv.planner.store._give_up(0, 1):
            pass


def blocks(kv: KV) -> list[Any]:
    return sorted(kv.planner.store.index, key=lambda block: block.depth)


@pytest.mark.parametrize("earlier", [False, True])
def test_a_page_that_leaves_for_memory_still_waits_for_the_tier_that_lasts(earlier: bool) -> None:
    """Be its copy in memory under way when it leaves, or there before."""
    near, disk = MemoryTier(name="near"), lasting()
    kv, clock = stacked(near, disk)
    published(kv, P)
    store = kv.planner.store
    for block in blocks(kv) if earlier else ():
        assert store._store_page(block, HOST)
    store.stack.mover.drain()
    evict_all(kv)
    kv.planner.store.stack.mover.drain()
    assert len(near.frames) == 3 and not disk.frames and all(b.page < 0 for b in blocks(kv))
    assert store.unsaved == 3 and not store.stack.lost and not store.stack.dropped.total()
    audit(kv)
    back(kv, clock)
    assert len(disk.frames) == 3 and not store.unsaved and not store.stack.lost
    audit(kv)


def test_what_waits_is_lost_once_memory_gives_it_up_and_not_when_it_is_forgotten() -> None:
    near, disk = MemoryTier(name="near"), lasting()
    kv, clock = stacked(near, disk)
    published(kv, P)
    evict_all(kv)
    store = kv.planner.store
    store.drain()
    *_, last = blocks(kv)
    store.stack.places[HOST].remove(last)
    store.stack._evict(last, HOST, "space")
    assert store.stack.lost == 1 == store.stack.dropped["lasting"] and store.unsaved == 2
    kv.forget(P)
    assert store.stack.lost == 1 and not store.unsaved
    back(kv, clock)
    assert not disk.frames and not near.frames
    audit(kv)


def test_a_page_on_its_way_to_memory_can_be_written_down_too() -> None:
    near, disk = Deferred(MemoryTier(name="near")), lasting()
    kv, clock = stacked(near, disk)
    published(kv, P)
    store = kv.planner.store
    store._unwritten.clear()
    with kv.lock:
        for block in blocks(kv):
            assert store._store_page(block, HOST)
        store.stack.mover.collect()
        clock.advance(s=61.0)
        store.write_down(*blocks(kv))
        assert {block.going for block in blocks(kv)} == {1 << HOST | 1 << DISK}
        assert all(block.going for block in blocks(kv)) and not near.frames
    assert kv.flush(5.0) and len(disk.frames) == len(near.frames) == 3
    assert not any(block.going for block in blocks(kv))
    audit(kv)


def test_a_block_is_stored_once_in_each_tier_and_named_as_it_lies_there() -> None:
    near = Deferred(MemoryTier(name="near"))
    kv = make_kv(simple(), pages=16, tiers=[near])
    published(kv, P)
    store, ended = kv.planner.store, list[int]()
    block, body = blocks(kv)[0], memoryview(bytes(4096))
    with kv.lock:
        info = store.describe(block)
        assert store.stack.store(block, HOST, info, body, lambda: ended.append(1))
        other = info._replace(codec=1, fidelity=1)
        assert store.stack.store(block, HOST, other, body, lambda: ended.append(2))
        assert ended == [2], "its body is not needed"
        store.drain()
        near.work()
        store.drain()
    assert ended == [2, 1] and block.codec_on(HOST) == 0
    ((header, _),) = near.frames.values()
    assert header.info.codec == 0 and store.stack.stored_bytes["near"] == 4096
    audit(kv)


def test_an_erasure_names_every_tier_that_has_not_answered_a_store() -> None:
    near, disk = Deferred(MemoryTier(name="near")), Deferred(lasting())
    near.poll = disk.poll = lambda timeout_s=0.0: []
    kv = make_kv(simple(), pages=16, tiers=[near, disk], load_deadline_s=0.05)
    published(kv, P)
    for block in blocks(kv):
        assert kv.planner.store._store_page(block, HOST)
    with pytest.raises(StoreError, match=r"near has not answered.*lasting has not answered"):
        kv.forget(P)
    del near.poll, disk.poll
    for tier in (near, disk):
        tier.work()
    assert kv.flush(5.0) and not kv.planner.store.unsaved
    assert not near.frames and not disk.frames
    audit(kv)
