"""Pages that leave a device together: one of them may fail, be forgotten, erased, or not fit."""

from __future__ import annotations

import random
from typing import Any

import pytest

from flowkv import KV
from flowkv.policy.restore import Span
from flowkv.testing import MemoryTier
from flowkv.tiers import Completion, Outcome
from tests.cache.audit import audit
from tests.cache.fakes import Deferred, Halves, Wrapped, lasting
from tests.cache.test_pinned import behind_a_bus
from tests.cache.toy import check_content, make_kv, published, simple
from tests.inside import Block, Demoted, Failed, HostTier, Stored

TEXT = [*range(48)]  # six pages


def leave_all(kv: KV) -> list[Block]:
    """Take all pages off the device in one batch; return their blocks, root to leaf."""
    store = kv.planner.store
    with kv.lock:
        store.drop_tails()
        blocks = sorted(store.index, key=lambda block: block.depth)
        for block in blocks:
            store.device_places["cpu"].remove(block)
        store.leave(blocks[::-1], "space")
    return blocks


def departing(tier: Any, *, bus: bool = False, **options: Any) -> tuple[KV, list[Block], list[Any]]:
    """A cache of which all pages leave their device in one batch, those blocks, and its events."""
    kv, told = make_kv(simple(), pages=16, tiers=[tier], **options), list[Any]()
    if bus:
        behind_a_bus(kv)
    published(kv, TEXT)
    kv.bus.subscribe(told.append, Stored, Failed, Demoted)
    blocks = leave_all(kv)
    assert all(block.page < 0 for block in blocks)
    return kv, blocks, told


def served(kv: KV, tokens: int) -> None:
    """So many tokens come back, and each is what it was."""
    with kv.open([*TEXT, 99]) as seq:
        assert seq.reused == tokens
        check_content(kv, seq, TEXT[:tokens])
    audit(kv)


@pytest.mark.parametrize("bus", [False, True])
def test_they_are_one_request_of_the_tier_and_one_event(bus: bool) -> None:
    near = Deferred(MemoryTier(name="near"))
    kv, blocks, told = departing(near, bus=bus)
    if bus:
        kv.planner.store.stack.mover.lanes[0].receive(60.0)
    assert [len(items) for _, items in near._kept] == [6] and all(b.going for b in blocks)
    near.work()
    assert kv.flush(60)
    (down,) = (one for one in told if isinstance(one, Demoted))
    (stored,) = (one for one in told if isinstance(one, Stored))
    assert (down.pages, stored.pages) == (6, 6) and down.n_bytes == stored.n_bytes == 6 * 4096
    served(kv, 48)


@pytest.mark.parametrize("bus", [False, True])
@pytest.mark.parametrize("bad", range(6))
def test_one_that_its_tier_does_not_store_is_lost_alone(bad: int, bus: bool) -> None:
    class Failing(Wrapped):
        def poll(self, timeout_s: float = 0.0) -> list[Completion]:
            return [self._answer(one) for one in self.inner.poll(timeout_s)]

        def _answer(self, one: Completion) -> Completion:
            if one.item != bad or one.outcome is not Outcome.STORED:
                return one
            self.inner.delete([one.key])
            return one._replace(outcome=Outcome.FAILED, reason="full", n_bytes=0)

    near = Failing(MemoryTier(name="near"))
    kv, _, told = departing(near, bus=bus)
    assert kv.flush(60)
    assert [type(one) for one in told] == [Demoted, Failed, Stored] and told[-1].pages == 5
    assert kv.stats()["tiers"]["near"]["dropped"] == 1
    assert sum(block.gone for block in kv.planner.store.index) == 0
    served(kv, 8 * (5 - bad))  # the first of the batch is the deepest page


def test_an_answer_that_names_another_page_counts_for_its_own() -> None:
    class Lying(Wrapped):
        def poll(self, timeout_s: float = 0.0) -> list[Completion]:
            return [one._replace(key=bytes(32)) for one in self.inner.poll(timeout_s)]

    near = Lying(MemoryTier(name="near"))
    kv, blocks, _ = departing(near)
    assert kv.flush(60) and all(block.tiers and not block.going for block in blocks)
    near.poll = near.inner.poll
    served(kv, 48)


@pytest.mark.parametrize("bus, sent", [(False, True), (True, False), (True, True)])
def test_one_that_is_forgotten_meanwhile_leaves_nothing_behind(sent: bool, bus: bool) -> None:
    """Be it queued, or with its tier; and it can be stored anew, while the first is under way."""
    near = Deferred(MemoryTier(name="near"))
    near.poll = lambda timeout_s=0.0: []
    kv, blocks, _ = departing(near, bus=bus)
    store, gone = kv.planner.store, blocks[4]
    lane = store.stack.mover.lanes[0]
    if sent:
        lane.receive(60.0)
    else:
        lane.pump = lambda: 0
    with kv.lock:
        store.forget(gone)
    assert gone.gone and store.stack.mover.on_the_way(gone.key) is None
    published(kv, TEXT)
    if not sent:
        del lane.pump
    del near.poll
    assert kv.flush(60)
    assert gone.key not in near.frames and len(near.frames) == 5
    served(kv, 48)


@pytest.mark.parametrize("bus", [False, True])
@pytest.mark.parametrize("sent", [False, True])
def test_an_erasure_finds_all_that_is_under_way(sent: bool, bus: bool) -> None:
    near = Deferred(MemoryTier(name="near"))
    kv, blocks, _ = departing(near, bus=bus)
    if bus and sent:
        kv.planner.store.stack.mover.lanes[0].receive(60.0)
    near.work()
    kv.forget(TEXT)
    assert kv.flush(60) and not near.frames and all(block.gone for block in blocks)
    assert not kv.planner.store.pool(0).lent
    served(kv, 0)


@pytest.mark.parametrize("bus", [False, True])
def test_a_cache_that_closes_waits_for_those_under_way(bus: bool) -> None:
    near = Deferred(MemoryTier(name="near"))
    near.close = lambda: None
    kv, blocks, _ = departing(near, bus=bus)
    kv.close()
    assert len(near.frames) == 6 and not any(block.going for block in blocks)


@pytest.mark.parametrize("bus", [False, True])
@pytest.mark.parametrize("room", range(1, 8))
def test_those_that_fit_are_stored_where_all_do_not(room: int, bus: bool) -> None:
    near = HostTier(room * (4096 + 16 + 1024) + 100, name="near")
    kv, blocks, told = departing(near, bus=bus)
    assert kv.flush(60)
    stored = sum(one.pages for one in told if isinstance(one, Stored))
    there = [block for block in kv.planner.store.index if block.tiers]
    assert len(there) == min(room, 6) <= stored and near.used_bytes() <= near.capacity_bytes
    assert not any(block.going for block in blocks) and not kv.planner.store.pool(0).lent
    audit(kv)


@pytest.mark.parametrize("seed", range(8))
def test_a_queue_that_is_short_takes_them_one_by_one(seed: int) -> None:
    """Memory is waited for; a tier that lasts takes what it has room for, the rest is counted."""
    rng = random.Random(seed)
    near = MemoryTier(name="near") if seed % 2 else lasting()
    kv = make_kv(simple(), pages=16, tiers=[near], write_back=False)
    schedule = kv.planner.store.stack.mover.lanes[0].schedule
    schedule.queue_bytes = 4096 * rng.randint(1, 5)
    schedule.background_bytes = 4096 * rng.randint(1, 5)
    published(kv, TEXT)
    leave_all(kv)
    whole, lost = kv.flush(60), kv.stats()["tiers"][near.name]["dropped"]
    assert whole or lost
    assert len(near.frames) + lost == 6 and (not seed % 2 or not lost)
    audit(kv)


def test_what_leaves_memory_for_a_tier_that_is_busy_is_counted() -> None:
    """Without write-back nothing else says that the page is lost."""
    near, far = MemoryTier(name="near"), lasting()
    kv = make_kv(simple(), pages=16, tiers=[near, far], write_back=False)
    published(kv, TEXT)
    blocks, store = leave_all(kv), kv.planner.store
    with kv.lock:
        store.stack.mover.drain()
        store.stack.mover.lanes[1].takes = lambda *_: False
        store.stack.places[0].remove(blocks[-1])
        store.stack._evict(blocks[-1], 0, "space")
    assert blocks[-1].gone and kv.stats()["tiers"]["lasting"]["dropped"] == 1
    audit(kv)


def test_layers_of_a_page_that_arrive_together_hold_it_once() -> None:
    """A restore has asked for the first layer: so another request's load is cut in two."""

    class FirstLayer(Halves):
        def next_load(self, state: Any, tier: str) -> Any:
            found = super().next_load(state, tier)
            return found and found._replace(layers=Span(0, 1))

    near = HostTier(1 << 22, name="near")
    kv = make_kv(simple(layers=2, head_dim=1024), pages=40, tiers=[near])
    kv.restores.policy = FirstLayer(0.0)
    behind_a_bus(kv)
    published(kv, TEXT)
    blocks = leave_all(kv)
    assert kv.flush(60)
    near.poll = lambda timeout_s=0.0: []  # type: ignore[method-assign]
    with kv.open([*TEXT, 99], wait=False):
        with kv.lock:
            kv.restores.pump()
        coming = kv.planner.store.coming
        assert {len(one.flying) for (one,) in coming.values()} == {1} and len(coming) == 6
        del near.poll
        with kv.open([*TEXT, 98]) as second:
            assert second.reused == 48
            check_content(kv, second, TEXT)
    pool = kv.planner.store.pool(0)
    assert {(block.holds, pool.references(block.page)) for block in blocks} == {(0, 1)}
    audit(kv)
