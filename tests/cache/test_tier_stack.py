"""Where each block is going below the device: to which tier, once, and not lost on the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from flowkv import KV, Namespace
from flowkv.testing import MemoryTier
from flowkv.tiers import Completion, Load, Outcome
from tests.cache.audit import audit
from tests.cache.fakes import Deferred, Silent, Wrapped, lasting
from tests.cache.toy import check_content, evict_all, make_kv, opened, published, settle, simple
from tests.inside import Block, ManualClock, StoreError, bind

P = [1] * 24
HOST, DISK = 0, 1


def stacked(*tiers: Any, **options: Any) -> tuple[KV, ManualClock]:
    """A cache over some tiers that is bound, and whose tier that lasts is away until `back`."""
    clock = ManualClock()
    kv = make_kv(simple(), pages=16, tiers=tiers, clock=clock, **options)
    kv.planner.store.stack.mover.lanes[-1].rest(60.0)
    return kv, clock


def back(kv: KV, clock: ManualClock) -> None:
    clock.advance(s=61.0)
    kv.flush(5.0)


def evict_and_settle(kv: KV) -> None:
    evict_all(kv)
    settle(kv)


def blocks(kv: KV) -> list[Any]:
    return sorted(kv.planner.store.index, key=lambda block: block.depth)


def dropped(store: Any) -> int:
    return sum(lane.dropped for lane in store.stack.mover.lanes)


@pytest.mark.parametrize("earlier", [False, True])
def test_a_page_that_leaves_for_memory_still_waits_for_the_tier_that_lasts(earlier: bool) -> None:
    """Be its copy in memory under way when it leaves, or there before."""
    near, disk = MemoryTier(name="near"), lasting()
    kv, clock = stacked(near, disk)
    published(kv, P)
    store = kv.planner.store
    for block in blocks(kv) if earlier else ():
        assert not store.eviction.store_pages([block], HOST)
    store.stack.mover.drain()
    evict_and_settle(kv)
    kv.planner.store.stack.mover.drain()
    assert len(near.frames) == 3 and not disk.frames and all(b.page < 0 for b in blocks(kv))
    assert store.writes.unsaved == 3 and not store.stack.lost and not dropped(store)
    audit(kv)
    back(kv, clock)
    assert len(disk.frames) == 3 and not store.writes.unsaved and not store.stack.lost


def test_what_waits_is_lost_once_memory_gives_it_up_and_not_when_it_is_forgotten() -> None:
    near, disk = MemoryTier(name="near"), lasting()
    kv, clock = stacked(near, disk)
    published(kv, P)
    evict_and_settle(kv)
    store = kv.planner.store
    store.writes.drain()
    *_, last = blocks(kv)
    store.stack.take_back(last, HOST)
    assert (
        store.stack.lost == 1 == store.stack.mover.lanes[-1].dropped and store.writes.unsaved == 2
    )
    kv.forget(P)
    assert store.stack.lost == 1 and not store.writes.unsaved
    back(kv, clock)
    assert not disk.frames and not near.frames


def test_a_page_on_its_way_to_memory_can_be_written_down_too() -> None:
    near, disk = Deferred(MemoryTier(name="near")), lasting()
    kv, clock = stacked(near, disk)
    published(kv, P)
    store = kv.planner.store
    store.stack.unwritten.clear()
    with kv.lock:
        for block in blocks(kv):
            assert not store.eviction.store_pages([block], HOST)
        store.stack.mover.collect()
        clock.advance(s=61.0)
        store.writes.write_down(*blocks(kv))
        assert {block.going for block in blocks(kv)} == {1 << HOST | 1 << DISK}
        assert all(block.going for block in blocks(kv)) and not near.frames
    assert kv.flush(5.0) and len(disk.frames) == len(near.frames) == 3
    assert not any(block.going for block in blocks(kv))


def test_a_block_is_stored_once_in_each_tier_and_named_as_it_lies_there() -> None:
    near = Deferred(MemoryTier(name="near"))
    kv = make_kv(simple(), pages=16, tiers=[near])
    published(kv, P)
    store, ended = kv.planner.store, list[int]()
    block, body = blocks(kv)[0], memoryview(bytes(4096))
    with kv.lock:
        (info,) = store.forms[block.group].describe([block])
        assert not store.stack.store([(block, info, body)], HOST, lambda _: ended.append(1))
        other = info._replace(codec=1, fidelity=1)
        assert not store.stack.store([(block, other, body)], HOST, lambda _: ended.append(2))
        assert ended == [2], "its body is not needed"
        store.writes.drain()
        near.work()
        store.writes.drain()
    assert ended == [2, 1] and block.codec_on(HOST) == 0
    ((header, _),) = near.frames.values()
    assert header.info.codec == 0 and store.stack.mover.lanes[HOST].stored_bytes == 4096


def test_an_erasure_names_every_tier_that_has_not_answered_a_store() -> None:
    near, disk = Deferred(MemoryTier(name="near")), Deferred(lasting())
    near.poll = disk.poll = lambda timeout_s=0.0: []
    kv = make_kv(simple(), pages=16, tiers=[near, disk], load_deadline_s=0.05)
    published(kv, P)
    for block in blocks(kv):
        assert not kv.planner.store.eviction.store_pages([block], HOST)
    with pytest.raises(StoreError, match=r"near has not answered.*lasting has not answered"):
        kv.forget(P)
    del near.poll, disk.poll
    for tier in (near, disk):
        tier.work()
    assert kv.flush(5.0) and not kv.planner.store.writes.unsaved
    assert not near.frames and not disk.frames


def test_what_waits_is_lost_once_if_its_store_fails_for_good() -> None:
    """Be it given to the tier that lasts by its device, or by memory."""
    for tiers in ([], [MemoryTier(name="near")]):
        disk = Deferred(lasting())
        kv, clock = stacked(*tiers, disk)
        published(kv, P)
        store = kv.planner.store
        with kv.lock:
            for _ in tiers:
                evict_and_settle(kv)
                store.writes.drain()
            clock.advance(s=61.0)
            for block in blocks(kv) if tiers else ():
                store.stack.take_back(block, HOST)
            evict_and_settle(kv)
            store.stack.mover.drain()
            disk.work("failed")
            store.stack.mover.drain()
        assert (
            store.stack.lost == 3 == store.stack.mover.lanes[-1].dropped
            and not store.writes.unsaved
        )
        assert not blocks(kv) and kv.flush(1.0) is False


def test_what_is_proven_on_its_way_to_memory_is_written_down() -> None:
    near, disk = Deferred(MemoryTier(name="near")), lasting()
    kv = make_kv(simple(), pages=16, tiers=[near, disk])
    store = kv.planner.store
    store.stack.provisional.active = True
    published(kv, P)
    with kv.lock:
        evict_and_settle(kv)
        assert [block.going for block in blocks(kv)] == [1 << HOST] * 3
        store.stack.provisional.begin()
        store.writes.confirm()
        assert len(store.stack.unwritten) == 3 and not disk.frames
    assert kv.flush(5.0) and len(disk.frames) == 3 and not store.stack.lost


class Broken(Wrapped):
    """Fails every load."""

    def submit_load(self, items: Sequence[Load], *, deadline_s: float = 10.0) -> int:
        answers = [Completion(-1, n, one.key, Outcome.FAILED, "EIO") for n, one in enumerate(items)]
        self.poll = lambda timeout_s=0.0: [answers.pop() for _ in answers[:]]
        return -1


class Stuck(Wrapped):
    """Deletes nothing while `stuck`."""

    stuck = True

    def delete(self, keys: Sequence[bytes]) -> int:
        if self.stuck:
            raise ValueError("a client's own")
        return int(self.inner.delete(keys))


def test_a_page_that_cannot_be_deleted_can_be_evicted_later() -> None:
    near = Stuck(MemoryTier())
    kv = make_kv(simple(), pages=16, tiers=[near], clock=ManualClock())
    published(kv, P)
    stack = kv.planner.store.stack
    evict_and_settle(kv)
    stack.mover.drain()
    near.capacity_bytes = near.used_bytes()
    with kv.lock:
        for _ in range(2):
            with pytest.raises(ValueError, match="own"):
                stack.make_room(HOST, 1)
        near.stuck = False
        assert stack.make_room(HOST, 1)
    assert len(near.frames) == 2


def test_the_victims_of_a_policy_that_fails_leave_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    near = MemoryTier()
    kv = make_kv(simple(), pages=16, tiers=[near], clock=ManualClock())
    published(kv, P)
    stack = kv.planner.store.stack
    evict_and_settle(kv)
    stack.mover.drain()
    near.capacity_bytes, asked = near.used_bytes(), []
    policy = stack.places[HOST].policy
    plain = policy.evict

    def evict(*given: Any) -> Any:
        asked.append(1)
        if len(asked) == 2:
            raise ValueError("a policy's own")
        return plain(*given)

    monkeypatch.setattr(policy, "evict", evict)
    with kv.lock:
        with pytest.raises(ValueError, match="own"):
            stack.make_room(HOST, near.capacity_bytes)
        assert len(near.frames) == 2
        assert stack.make_room(HOST, near.capacity_bytes) and not near.frames


@pytest.mark.parametrize("near", [Broken(MemoryTier()), MemoryTier(), None])
def test_what_cannot_be_written_is_counted(near: Any) -> None:
    """Its copy in memory cannot be read, or the tier that lasts has no room."""
    disk = lasting()
    kv, clock = stacked(*filter(None, [near]), disk)
    published(kv, P)
    store = kv.planner.store
    if near is not None:
        evict_and_settle(kv)
        store.writes.drain()
    assert store.writes.unsaved == 3
    if not isinstance(near, Broken):
        disk.capacity_bytes = 2000
    clock.advance(s=61.0)
    assert kv.flush(1.0) is False
    assert store.stack.lost == 3 and not store.writes.unsaved and not disk.frames


def test_a_drain_reads_memory_only() -> None:
    """A page that left for a slow tier is not read back in a request for the tier that lasts."""
    clock, far, disk = ManualClock(), Silent(Wrapped(MemoryTier(), kind="remote")), lasting()
    far.silent = False
    kv = make_kv(simple(), pages=16, tiers=[disk, far], clock=clock)
    kv.planner.store.stack.mover.lanes[0].rest(60.0)
    published(kv, P)
    evict_and_settle(kv)
    kv.planner.store.writes.drain()
    assert len(far.frames) == 3
    back(kv, clock)
    assert not far.loads and not disk.frames and kv.planner.store.stack.lost == 3


def test_pages_that_wait_for_a_tier_that_is_away_cost_nothing(ended: list[KV]) -> None:
    kv, _ = stacked(MemoryTier(name="near"), lasting())
    ended.clear()  # its blocks lie nowhere
    store, asked = kv.planner.store, list[Any]()
    for n in range(1000):
        block = store.index.get_or_create(n.to_bytes(32, "little"), bytes(32), 0)
        block.going = n & 1
        block.tiers = 1 - block.going
        assert store.stack.wait(block)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Block, "lacked_by", lambda block, number: bool(asked.append(block)))
        store.writes.drain()
    assert not asked and store.writes.unsaved == 1000
    store.stack.unwritten.clear()


def test_what_others_erased_is_not_lost() -> None:
    near = Deferred(MemoryTier(name="near"))
    kv, _ = stacked(near, lasting())
    published(kv, P)
    store = kv.planner.store
    with kv.lock:
        store.stack.mover.lanes[HOST].pump = lambda: 0
        evict_and_settle(kv)
        assert store.writes.unsaved == 6 and all(block.page < 0 for block in blocks(kv))
        store.stack.lose(known := blocks(kv), -1)
        store.forget(*known)
    assert not store.stack.lost and not store.writes.unsaved and not blocks(kv)


@pytest.mark.parametrize("near", [False, True])
def test_a_page_that_leaves_while_its_tier_rests_is_dropped_and_counted_once(near: bool) -> None:
    """Also without write-back; be its last place its device, or memory."""
    disk = lasting()
    kv, clock = stacked(*[MemoryTier(name="near")] * near, disk, write_back=False)
    published(kv, P)
    stack = kv.planner.store.stack
    evict_and_settle(kv)
    kv.planner.store.writes.drain()
    assert bool(stack.lost) is not near and len(blocks(kv)) == 3 * near
    for block in blocks(kv):
        stack.take_back(block, HOST)
    assert stack.lost == 3 == kv.stats()["tiers"]["lasting"]["dropped"]
    assert kv.flush(1.0) is False and kv.flush(1.0) and not blocks(kv)
    published(kv, P)
    back(kv, clock)
    evict_and_settle(kv)
    for block in blocks(kv) if near else ():
        kv.planner.store.writes.drain()
        stack.take_back(block, HOST)
    assert kv.flush(5.0) and len(disk.frames) == 3 and stack.lost == 3


@pytest.mark.parametrize("reason", ["lease", "held below", "read-only", "policy", "unproven"])
def test_a_page_that_its_tier_should_not_store_or_has_is_not_dropped(reason: str) -> None:
    disk = lasting()
    kv, clock = stacked(disk, write_back=False)
    store = kv.planner.store
    published(kv, P)
    if reason == "held below":
        clock.advance(s=61.0)
        for block in blocks(kv):
            assert not store.eviction.store_pages([block], 0)
        store.writes.drain()
        store.stack.mover.lanes[0].rest(60.0)
    disk.writable = reason != "read-only"
    if reason == "policy":
        policy = store.stack.places[0].policy
        policy.admit = lambda now, slots: [False] * len(slots)
    if reason == "unproven":
        store.stack.provisional.active = True
        for block in blocks(kv):
            store.stack.provisional.add(block)
    with kv.lock:
        for block in blocks(kv) if reason == "lease" else ():
            store._places[0].remove(block)
            store.eviction.leave([block], "lease")
    evict_and_settle(kv)
    assert not store.stack.lost and not dropped(store)
    assert len(blocks(kv)) == 3 * (reason == "held below")


def test_a_store_that_left_its_tiers_waits_for_nothing() -> None:
    kv, _ = stacked(lasting())
    published(kv, P)
    old = kv.planner.store
    bind(kv, simple(layers=2), Namespace(model="other"))
    with kv.lock:
        while old.eviction.make_room(0, 1):
            pass
    assert not old.writes.unsaved and not old.writes.flush(5.0)


def test_a_state_waits_for_the_tier_that_lasts_too() -> None:
    near, disk = MemoryTier(name="near"), lasting()
    kv, clock = stacked(near, disk)
    with opened(kv, P) as seq:
        assert kv.save_state(seq, {"h": torch.ones(2)})
    assert len(near.frames) == 1 and kv.planner.store.writes.unsaved == 4
    back(kv, clock)
    assert len(disk.frames) == 4


def test_a_flush_does_not_wait_for_a_tier_that_became_read_only() -> None:
    disk = lasting()
    kv, clock = stacked(disk)
    published(kv, P)
    store, drained = kv.planner.store, list[float]()
    disk.writable = False
    store.writes.drain = lambda timeout_s=0.0: drained.append(timeout_s)
    clock.advance(s=61.0)
    assert kv.flush(0.2) is False and len(drained) == 1
    del store.writes.drain
    disk.writable = True
    assert kv.flush(5.0) and len(disk.frames) == 3


def test_a_flush_gives_what_lies_in_memory_to_the_tier_that_lasts_together() -> None:
    near, disk = MemoryTier(name="near"), Deferred(lasting())
    kv, clock = stacked(near, disk)
    for first in range(4):
        published(kv, [first, *P[1:]])
    evict_and_settle(kv)
    back(kv, clock)
    assert len(disk.frames) == 12 and disk._jobs >= -4


@pytest.mark.parametrize("lost", [True, False])
def test_an_erasure_is_not_proven_before_what_was_forgotten_in_flight_has_landed(
    lost: bool,
) -> None:
    """Be it forgotten by this cache, or by another one; and another tenant sees nothing of it."""
    disk = Deferred(lasting())
    disk.poll = lambda timeout_s=0.0: []
    kv = make_kv(simple(), pages=16, tiers=[disk], load_deadline_s=0.05)
    published(kv, P)
    store = kv.planner.store
    if lost:
        store.stack.lose(known := blocks(kv), -1)
        store.forget(*known)
    else:
        with pytest.raises(StoreError, match="lasting has not answered"):
            kv.forget(P)
    assert disk.waiting == 3 and not blocks(kv)
    for tokens in (P, None):
        with pytest.raises(StoreError, match="lasting has not answered"):
            kv.forget(tokens)
    assert kv.forget(P, tenant="another") == 0
    del disk.poll
    disk.work()
    assert kv.forget(P) == 0 and not disk.frames and not store.writes.unsaved


@pytest.mark.parametrize("reason", ["", "EIO"])
def test_a_page_that_comes_back_does_not_join_the_store_that_was_forgotten(reason: str) -> None:
    """Its old content is not that of the new page, and is wiped when it lands."""
    disk = Deferred(lasting())
    disk.poll = lambda timeout_s=0.0: []
    kv = make_kv(simple(), pages=16, tiers=[disk], load_deadline_s=0.05)
    published(kv, P, tag=1)
    store = kv.planner.store
    with pytest.raises(StoreError, match="lasting has not answered"):
        kv.forget(P)
    published(kv, P, tag=2)
    store.writes.drain()
    del disk.poll
    assert disk.waiting == 3, "the new stores wait for the old ones"
    with kv.lock:
        disk.work(reason)
        store.stack.mover.collect()
        assert (
            not disk.frames
            and store.writes.unsaved == 3
            and not store.stack.mover.lanes[-1].stored_bytes
        )
        store.writes.drain()
        assert disk.waiting == 3
    assert kv.flush(5.0) and len(disk.frames) == 3 and not dropped(store)
    assert store.stack.mover.lanes[-1].stored_bytes == 3 * 4096
    evict_and_settle(kv)
    with opened(kv, [*P, 1], tag=2) as seq:
        assert seq.reused == 24
        check_content(kv, seq, [*P, 1], tag=2)
    assert kv.forget(P) == 3 and not disk.frames


def test_tails_and_states_that_no_tier_takes_are_counted() -> None:
    """Be their tier away or full; one that waits for proof, and is pushed out, counts too."""
    disk = lasting()
    kv, clock = stacked(disk)
    stack = kv.planner.store.stack
    with opened(kv, [*P, 1, 2, 3]) as seq:
        assert not kv.save_state(seq, {"h": torch.ones(2)})
    assert stack.mover.lanes[-1].dropped == stack.lost == 3 and kv.planner.store.writes.unsaved == 3
    back(kv, clock)
    assert len(disk.frames) == 3
    capacity, disk.capacity_bytes = disk.capacity_bytes, 2000
    published(kv, [*P, 4, 5])
    assert kv.flush(5.0) is False and stack.lost == 4
    disk.capacity_bytes, stack.provisional.active = capacity, True
    for token in range(18):
        published(kv, [*P, 6, token])
    assert stack.lost == 6 and len(stack.provisional) == 16
    stack.mover.lanes[0].rest(60.0)
    with kv.lock:
        stack.provisional.begin()
        kv.planner.store.writes.confirm()
    assert stack.lost == stack.mover.lanes[-1].dropped == 22 and len(disk.frames) == 3
