"""Residency: saving, evicting, demoting, loading, losing."""

from __future__ import annotations

from typing import Any

import pytest

from flowkv import KV
from flowkv.policy import make_policy
from flowkv.testing import FlakyTier, MemoryTier
from tests.cache.audit import audit, audit_empty
from tests.cache.fakes import Deferred, Silent, Wrapped, lasting
from tests.cache.toy import (
    PAGE,
    advance,
    check_content,
    evict_all,
    geometry,
    make_kv,
    opened,
    published,
    simple,
)
from tests.inside import CapacityError, ConfigError, Faults, HostTier, ManualClock, StoreError

P, Q, R = [1] * 24, [2] * 24, [3] * 24


def simple_kv(*tiers: Any, pages: int = 8, **options: Any) -> KV:
    return make_kv(simple(), pages=pages, tiers=tiers, **options)


def residency(kv: KV, tokens: list[int]) -> dict[str, int]:
    return kv.explain([*tokens, 0]).residency


def reused(kv: KV, tokens: list[int], tag: int = 0) -> int:
    """Opens a prompt, checks what it got, and says how much that was."""
    with kv.open([*tokens, 0]) as seq:
        check_content(kv, seq, tokens[: seq.length], tag)
        audit(kv)
        return seq.reused


# ---- evicting, demoting, loading


def test_without_a_tier_the_longest_unused_is_lost() -> None:
    kv = simple_kv(pages=7)
    for prompt in (P, Q):
        published(kv, prompt)
    assert reused(kv, P) == 24
    published(kv, R)
    assert (reused(kv, P), reused(kv, R)) == (24, 24)
    assert reused(kv, Q) == 8  # its beginning went last


def test_a_host_tier_catches_what_is_evicted() -> None:
    kv = simple_kv(HostTier(1 << 20), pages=4)
    published(kv, P)
    assert residency(kv, P) == {"device": 24}
    published(kv, Q)
    assert set(residency(kv, P)) == {"host"} | set(residency(kv, P)) & {"device"}
    assert reused(kv, P) == 24 and reused(kv, Q) == 24
    stats = kv.stats()["tiers"]["host"]
    assert stats["loaded_bytes"] >= 3 * 4096 and stats["stored_bytes"] >= 3 * 4096


def test_pages_go_down_the_stack_and_come_back_whole() -> None:
    near, far = HostTier(3 * 5300, name="near"), HostTier(1 << 20, name="far")
    kv = simple_kv(near, far, pages=4)
    for prompt in (P, Q, R):
        published(kv, prompt)
    assert residency(kv, P)["far"] >= 16
    assert kv.stats()["events"]['demoted_pages_total{source="near",tier="far"}'] >= 2
    for prompt in (P, Q, R, P):
        assert reused(kv, prompt) == 24


def test_written_down_pages_are_kept_near_too_when_evicted() -> None:
    disk, host = lasting(), HostTier(1 << 20)
    kv = simple_kv(host, disk, pages=4)
    published(kv, P)
    kv.flush()
    assert len(disk.frames) == 3 and not list(host.scan())
    published(kv, Q)
    published(kv, R)
    assert residency(kv, P) == {"host": 24}
    assert reused(kv, P) == 24 and kv.stats()["tiers"]["lasting"]["loaded_bytes"] == 0


def test_write_back_can_be_left_to_eviction() -> None:
    disk = lasting()
    kv = simple_kv(disk, pages=4, write_back=False)
    published(kv, P)
    assert not disk.frames
    published(kv, Q)
    kv.flush()
    assert disk.frames and reused(kv, P) == 24


def test_a_full_tier_makes_room_by_its_policy() -> None:
    kv = simple_kv(MemoryTier(4 * 4096), pages=4)
    for number in range(8):
        published(kv, [number] * 24)
        assert kv.stats()["tiers"]["memory"]["used_bytes"] <= 4 * 4096
        audit(kv)
    assert reused(kv, [7] * 24) == 24


def test_a_tier_that_is_too_small_for_a_page_is_left_alone() -> None:
    with pytest.warns(UserWarning, match="memory can store no page of this model: a frame takes"):
        kv = simple_kv(MemoryTier(4000), pages=4)
    published(kv, P)
    published(kv, Q)
    assert kv.stats()["tiers"]["memory"]["blocks"] == 0 and reused(kv, Q) == 24


def test_leases_run_out_everywhere() -> None:
    clock, memory = ManualClock(), MemoryTier()
    kv = simple_kv(memory, pages=4, clock=clock, policy=lambda: make_policy("lfu-ttl", lease_s=9.0))
    published(kv, P)
    published(kv, Q)
    held = kv.open([*Q, 0])
    clock.advance(s=10.0)
    assert reused(kv, P) == 0 and not memory.frames
    check_content(kv, held, Q)
    held.close()
    assert reused(kv, Q) == 0
    audit_empty(kv)


def test_pinned_pages_stay() -> None:
    kv = simple_kv(MemoryTier(6 * 4096), pages=6)
    published(kv, P)
    assert kv.pin([*P, 0]) == 24 and kv.pin([*P, 0]) == 24
    for number in range(10, 30):
        published(kv, [number] * 24)
        audit(kv)
    assert residency(kv, P) == {"device": 24}
    with pytest.raises(CapacityError):
        opened(kv, [9] * 32)
    kv.pin(P, pinned=False)
    published(kv, [9] * 32)
    assert kv.forget(P) == 3


def test_pins_outlive_neither_forgetting_nor_invalidation() -> None:
    kv = simple_kv()
    published(kv, P)
    kv.pin(P)
    assert kv.invalidate() == 3
    audit_empty(kv)
    published(kv, P)  # slots are used again
    kv.pin(P, pinned=False)


# ---- stores under way


@pytest.mark.at_once
def test_a_page_that_is_being_stored_is_not_given_out() -> None:
    disk = Deferred(lasting())
    kv = simple_kv(disk, pages=4)
    published(kv, P)
    assert disk.waiting == 3
    published(kv, Q)  # waits for the disk rather than evict more
    audit(kv)
    assert disk.waiting <= 3
    disk.work()
    kv.flush()
    assert reused(kv, P) == 24


def test_a_page_forgotten_while_it_is_stored_is_deleted_afterwards() -> None:
    disk = Deferred(lasting())
    kv = simple_kv(disk)
    published(kv, P)
    with kv.lock:
        for block in kv.planner.store.index:
            kv.planner.store.forget(block)
    published(kv, Q)  # takes the same slots
    disk.work()
    kv.flush()
    assert len(disk.frames) == 3 and reused(kv, Q) == 24 and reused(kv, P) == 0


def test_a_store_that_fails_is_reported_and_loses_nothing_else() -> None:
    disk = Deferred(lasting())
    kv = simple_kv(disk)
    published(kv, P)
    disk.work("ENOSPC")
    with pytest.warns(UserWarning, match="ENOSPC"):
        assert not kv.flush()
    assert kv.stats()["events"]['failures_total{operation="store",tier="lasting"}'] == 3
    assert reused(kv, P) == 24


def test_a_forked_write_does_not_reach_a_page_that_is_being_stored() -> None:
    disk = Deferred(lasting())
    kv = simple_kv(disk)
    seq = opened(kv, P)
    kv.truncate(seq, 20)  # back into a published page, which is on its way down
    advance(kv, [seq], [[7] * 9])
    check_content(kv, seq, P[:20] + [7] * 9)
    disk.work()
    kv.flush()
    seq.close()
    evict_all(kv)
    assert reused(kv, P) == 24


# ---- loads that go wrong


def test_a_tier_that_never_answers_costs_one_deadline_and_keeps_its_pages() -> None:
    memory = Silent(lasting())
    kv = simple_kv(memory, pages=4, load_deadline_s=0.05)
    published(kv, P)
    published(kv, Q)
    assert residency(kv, P)["lasting"] >= 16
    assert reused(kv, P) < 24
    lent = set(kv.planner.store.pools["cpu"].lent)
    assert lent and memory.loads == 1
    assert reused(kv, P) < 24 and memory.loads == 1, "it is not asked while it owes an answer"
    kv.defragment()
    memory.scribble()
    assert set(kv.planner.store.pools["cpu"].lent) == lent
    seq = opened(kv, [5] * 4)
    check_content(kv, seq, [5] * 4)
    seq.close()
    memory.speak()
    kv.flush()
    with kv.lock:
        kv.planner.store.stack.mover.drain()
    assert not set(kv.planner.store.pools["cpu"].lent)


def test_a_tier_that_was_late_rests_and_is_asked_again() -> None:
    clock, memory = ManualClock(), Silent(lasting())
    kv = simple_kv(memory, pages=4, load_deadline_s=0.05, clock=clock)
    published(kv, P)
    published(kv, Q)
    assert reused(kv, P) < 24
    memory.speak()
    with kv.lock:
        kv.planner.store.stack.mover.drain()
    assert reused(kv, P) < 24 and memory.loads == 1
    clock.advance(s=1.0)
    assert reused(kv, P) == 24


@pytest.mark.parametrize(
    "faults", [Faults(fail=1.0), Faults(lose=1.0), Faults(flip=1.0)], ids=["fail", "lose", "flip"]
)
def test_a_load_that_fails_is_a_miss_and_never_an_answer(faults: Faults) -> None:
    inner = MemoryTier()
    flaky = FlakyTier(inner, 3, Faults())
    kv = simple_kv(flaky, pages=4)
    published(kv, P)
    published(kv, Q)
    flaky.faults = faults
    got = reused(kv, P)
    assert got < 24
    published(kv, P)
    audit(kv)
    assert reused(kv, P) == 24
    stats = kv.stats()["tiers"]["flaky memory"]
    assert (stats["refused"] > 0) == (faults.flip > 0)


def test_a_damaged_frame_in_the_middle_ends_the_prefix_there() -> None:
    memory = MemoryTier()
    kv = simple_kv(memory, pages=7)
    published(kv, P)
    published(kv, Q)
    published(kv, [9] * 48)
    keys = [entry.key for entry in memory.scan() if entry.info.parent != bytes(32)]
    header, body = memory.frames[keys[0]]
    memory.frames[keys[0]] = header, b"\0" + body[1:]
    assert sorted((reused(kv, P), reused(kv, Q))) in ([8, 24], [16, 24])
    published(kv, P)
    published(kv, Q)
    assert reused(kv, P) == reused(kv, Q) == 24


def test_a_frame_of_lower_fidelity_is_never_an_answer() -> None:
    memory = lasting()
    kv = simple_kv(memory)
    published(kv, P)
    kv.flush()
    kv.close = lambda: None  # the tier goes on without it
    for key, (header, body) in list(memory.frames.items()):
        info = header.info._replace(fidelity=2)
        memory.frames[key] = header._replace(info=info), body
    other = simple_kv(memory)
    assert reused(other, P) == 0
    published(other, P)
    assert reused(other, P) == 24


# ---- tiers that others own


def test_a_read_only_tier_is_read_and_watched() -> None:
    shared = MemoryTier(name="lasting")
    owner = simple_kv(Wrapped(shared, kind="disk"))
    published(owner, P)
    owner.flush()
    reader = make_kv(
        simple(),
        pages=8,
        tiers=[Wrapped(shared, kind="disk", writable=False, shared=True)],
        policy="lru",
    )
    assert reused(reader, P) == 24
    published(owner, Q)
    owner.flush()
    assert reused(reader, Q) == 24, "what the owner writes later is found too"
    published(reader, R)
    assert reader.flush() and len(shared.frames) == 6
    with pytest.raises(StoreError, match=r"3 blocks .* lasting holds 3 of them and can only"):
        reader.forget(P)
    assert len(shared.frames) == 6
    stats = reader.stats()["tiers"]["lasting"]
    assert not stats["writable"] and stats["stored_bytes"] == 0


def test_windowed_groups_are_watched_too() -> None:
    shared = MemoryTier(name="lasting")
    owner = make_kv(tiers=[Wrapped(shared, kind="disk")])
    reader = make_kv(tiers=[Wrapped(shared, kind="disk", writable=False, shared=True)])
    published(owner, P)
    owner.flush()
    assert reused(reader, P) == 24


def test_what_is_discovered_belongs_to_its_tenant() -> None:
    shared = MemoryTier(name="lasting")
    owner = make_kv(tiers=[Wrapped(shared, kind="disk")])
    reader = make_kv(tiers=[Wrapped(shared, kind="remote", shared=True)])
    published(owner, P, tenant="a")
    owner.flush()
    with reader.open([*P, 0], tenant="a") as seq:
        assert seq.reused == 24
    assert reader.forget(tenant="b") == 0
    assert reader.forget(tenant="a") == 6 and not shared.frames
    audit_empty(reader)


def test_two_tiers_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two tiers are named 'memory'"):
        make_kv(tiers=[MemoryTier(), MemoryTier()])


# ---- the pool


def test_room_is_made_by_moving_pages_when_nothing_else_helps() -> None:
    """Groups whose pages differ in size: sparse slabs of one size block the other."""
    kv = make_kv(geometry(layers=6), pages=16)
    pool = kv.planner.store.pools["cpu"]
    seqs = [opened(kv, [i] * PAGE) for i in range(14)]
    for seq in seqs[::2]:
        seq.close()
    kv.invalidate()
    before = pool.fragmentation()
    with kv.step(seqs[1:2], [[9]]) as step:
        assert kv.defragment() == 0, "kernels may be reading"
        step.rollback()
    assert kv.defragment() > 0 and pool.fragmentation() < before
    for i, seq in enumerate(seqs):
        if i % 2:
            check_content(kv, seq, [i] * PAGE)


def test_pages_that_transfers_use_do_not_move() -> None:
    kv = make_kv(simple(), pages=64)
    store = kv.planner.store
    pages = store.allocator.allocate(0, 48)
    lent = [page for page in pages if page % 16 == 3]
    for page in pages:
        if page % 16 == 3:
            store.pool(0).lend(page)
        store.pool(0).release(page)
    assert kv.defragment() == 0
    audit(kv)
    for page in lent:
        store.pool(0).give_back(page)
    audit_empty(kv)


def test_a_deadline_of_the_pool_is_an_error_that_says_what_to_do() -> None:
    kv = simple_kv(pages=4)
    seq = opened(kv, P)
    with pytest.raises(CapacityError, match="Close or suspend sequences, or give"):
        opened(kv, Q)
    audit(kv)
    seq.close()
