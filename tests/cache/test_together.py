"""Pages that leave a device together: one of them may fail, be forgotten, erased, or not fit."""

from __future__ import annotations

import random
from typing import Any

import pytest

from flowkv import KV
from flowkv.policy.restore import LoadGate, Span
from flowkv.testing import MemoryTier
from flowkv.tiers import Completion, Outcome
from tests.cache.audit import audit
from tests.cache.fakes import Deferred, Halves, Wrapped, lasting
from tests.cache.test_pinned import behind_a_bus
from tests.cache.toy import check_content, make_kv, published, simple
from tests.inside import (
    Block,
    Demoted,
    Evicted,
    Failed,
    HostTier,
    IOPriority,
    LayerSlice,
    LoadBatch,
    ManualClock,
    PageLoad,
    PageLoader,
    Stored,
    reserve,
    ways,
)

TEXT = [*range(48)]  # six pages


def leave_all(kv: KV, reason: str = "space") -> list[Block]:
    """Take all pages off the device in one batch; return their blocks, root to leaf."""
    store = kv.planner.store
    with kv.lock:
        store.tails.drop()
        blocks = sorted(store.index, key=lambda block: block.depth)
        leave(kv, blocks[::-1], reason)
    return blocks


def leave(kv: KV, blocks: list[Block], reason: str = "space") -> None:
    """Take pages off the device in one batch, as if its policy had chosen them."""
    store = kv.planner.store
    with kv.lock:
        for block in blocks:
            store.device_places["cpu"].remove(block)
        store.eviction.leave(blocks, reason)


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


@pytest.mark.at_once
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
    kv, blocks, told = departing(near, bus=bus)
    assert kv.flush(60)
    assert [type(one) for one in told] == [Demoted, Failed, Stored] and told[-1].pages == 5
    assert kv.stats()["tiers"]["near"]["dropped"] == 1
    # The first of the batch is the deepest page.
    assert [block.gone for block in blocks] == [depth == 5 - bad for depth in range(6)]
    served(kv, 8 * (5 - bad))


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
    """These are the first of the prompt, without which the others would serve nothing."""
    near = HostTier(room * (4096 + 16 + 1024) + 100, name="near")
    kv, blocks, told = departing(near, bus=bus)
    assert kv.flush(60)
    assert [block.tiers for block in blocks] == [depth < room for depth in range(6)]
    assert sum(one.pages for one in told if isinstance(one, Stored)) == 6
    assert near.used_bytes() <= near.capacity_bytes
    assert not any(block.going for block in blocks) and not kv.planner.store.pool(0).lent
    served(kv, 8 * min(room, 6))


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


@pytest.mark.at_once
def test_what_leaves_memory_for_a_tier_that_is_busy_is_counted() -> None:
    """Without write-back nothing else says that the page is lost."""
    near, far = MemoryTier(name="near"), lasting()
    kv = make_kv(simple(), pages=16, tiers=[near, far], write_back=False)
    published(kv, TEXT)
    blocks, store = leave_all(kv), kv.planner.store
    with kv.lock:
        store.stack.mover.drain()
        store.stack.mover.lanes[1].takes = lambda *_: False
        store.stack.take_back(blocks[-1], 0)
    assert blocks[-1].gone and kv.stats()["tiers"]["lasting"]["dropped"] == 1


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


@pytest.mark.parametrize("bus", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_a_page_is_not_lost_while_its_own_batch_makes_room(late: bool, bus: bool) -> None:
    """Its copy in the far tier gives way to the page that gives way to it in the near one."""
    near: Any = MemoryTier(4096, name="near")
    near, far = Deferred(near) if late else near, lasting(capacity_bytes=4096)
    kv = make_kv(simple(), pages=16, tiers=[near, far], write_back=False)
    if bus:
        behind_a_bus(kv)
    store, other = kv.planner.store, [*range(100, 108)]
    published(kv, TEXT[:8])
    with kv.lock:
        store.tails.drop()
        (block,) = store.index
        assert not store.eviction.store_pages([block], 1)
        store.writes.flush(60.0)
    published(kv, other)
    with kv.lock:
        store.tails.drop()
        (first,) = (one for one in store.index if one is not block)
    leave(kv, [first])
    assert kv.flush(60) and (block.tiers, first.tiers) == (2, 1)
    leave(kv, [block])
    assert kv.flush(60) and not block.gone
    assert (block.tiers, first.tiers) == (1, 2) and len(near.frames) == len(far.frames) == 1
    for text in (TEXT[:8], other):
        with kv.open([*text, 99]) as seq:
            assert seq.reused == 8
            check_content(kv, seq, text)
    assert not any(one["dropped"] for one in kv.stats()["tiers"].values())


@pytest.mark.parametrize("bus", [False, True])
@pytest.mark.parametrize("where", ["admit", "describe", "make_room"])
def test_an_error_leaves_no_page_without_an_owner(
    where: str, bus: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second call fails: two pages have left, two are leaving, and two have their turn."""
    monkeypatch.setattr("flowkv.cache.store.BATCH_BYTES", 2 * 4096)
    kv, calls = make_kv(simple(), pages=16, tiers=[MemoryTier(name="near")]), list[str]()
    if bus:
        behind_a_bus(kv)
    published(kv, TEXT)
    store = kv.planner.store
    owners = {
        "admit": store.stack.places[0].policy,
        "describe": store.forms[0],
        "make_room": store.stack,
    }
    owner = owners[where]
    real = getattr(owner, where)

    def fails(*given: Any) -> Any:
        calls.append(where)
        if len(calls) == 2:
            raise RuntimeError("broken")
        return real(*given)

    monkeypatch.setattr(owner, where, fails)
    with pytest.raises(RuntimeError, match="broken"):
        leave_all(kv)
    monkeypatch.undo()
    blocks = sorted(store.index, key=lambda block: block.depth)
    assert kv.flush(60) and not store.pool(0).lent
    assert not any(block.going for block in blocks) and not store.stack.leaving
    lost = 2 * (where == "make_room")  # their pages were free by then
    assert [block.page >= 0 for block in blocks] == [True] * (4 - lost) + [False] * 2
    served(kv, 16 if lost else 48)
    taken = store.allocator.try_allocate(0, 16)
    assert taken, "all pages can become free"
    store.pool(0).release(*taken)


@pytest.mark.parametrize("policy", ["lru", "lfu-ttl", "arc", "cost-aware", "hazard"])
@pytest.mark.parametrize("seed", range(3))
def test_a_tier_gives_up_the_same_whether_pages_leave_together_or_alone(
    policy: str, seed: int, monkeypatch: pytest.MonkeyPatch, ended: list[KV]
) -> None:
    """Neither the cost of a page nor its depth is another prompt's."""
    monkeypatch.setattr(LoadGate, "token_s", lambda gate, position: (1 + position) * 1e-6)
    rng, found = random.Random(seed), list[list[tuple[int, int]]]()
    lengths = [rng.randrange(120, 200, 8) for _ in range(3)]
    turns = [rng.randrange(3) for _ in range(999)]
    for way in ("together", "alone", "one by one"):
        near, clock = MemoryTier(name="near"), ManualClock()
        kv = make_kv(simple(), pages=80, tiers=[near], policy=policy, clock=clock)
        store, prompts = kv.planner.store, list[list[Block]]()
        for number, length in enumerate(lengths):
            before = {*store.index}
            published(kv, [*range(16), *range(1000 * number, 1000 * number + length)])
            store.tails.drop()
            prompts.append(sorted({*store.index} - before, key=lambda block: -block.depth))
        left, mixed = [[*prompt] for prompt in prompts], list[Block]()
        for turn in turns:
            mixed += [left[turn].pop(0)] if left[turn] else []
        parts = [mixed] if way == "together" else prompts
        if way == "one by one":
            parts = [[block] for prompt in prompts for block in reversed(prompt)]
        for part in parts:
            leave(kv, part)
            assert kv.flush(60) and all(block.tiers for block in part)
        ended.clear()  # the tier keeps what its policy gives up here
        victims = store.stack.places[0].evict(clock.now_ns(), len(mixed))
        gone = map(store.index.at, victims.tolist())
        found.append([(block.slot, block.depth) for block in gone])
    assert found[0] == found[1] == found[2]


class Refusing(Wrapped):
    """Stores nothing while it has a reason."""

    reason = ""

    def poll(self, timeout_s: float = 0.0) -> list[Completion]:
        return [self._answer(one) for one in self.inner.poll(timeout_s)]

    def _answer(self, one: Completion) -> Completion:
        if not self.reason or one.outcome is not Outcome.STORED:
            return one
        self.inner.delete([one.key])
        return one._replace(outcome=Outcome.FAILED, reason=self.reason, n_bytes=0)


@pytest.mark.parametrize("reason", ["full", "breaker"])
def test_a_page_whose_tier_fails_while_others_are_sent_is_counted_or_waits(reason: str) -> None:
    """It is on its device: no tier is asked for it, and it is not taken for written."""
    near = Refusing(MemoryTier(4096 * 3, name="shm"), kind="host", shared=True)
    kv = make_kv(simple(), pages=16, tiers=[near])
    store = kv.planner.store
    lane, told = store.stack.mover.lanes[0], list[Any]()
    lane.rest(600.0)
    published(kv, TEXT)
    assert len(store.stack.unwritten) == 6
    kv.bus.subscribe(told.append, Failed)
    lane.rest(0.0)
    near.reason = reason
    kv.flush(5.0)
    failed = 6 - len(store.stack.unwritten) - kv.stats()["tiers"]["shm"]["dropped"]
    assert told and not failed and not near.frames
    near.reason = ""
    lane.rest(0.0)
    assert kv.flush(60)
    assert len(near.frames) == (0 if reason == "full" else 3)


@pytest.mark.parametrize("reason", ["space", "prefetch", "quota"])
def test_only_for_space_is_a_busy_tier_waited_for(reason: str) -> None:
    class Busy(Deferred):
        waits = 0

        def poll(self, timeout_s: float = 0.0) -> list[Completion]:
            self.waits += timeout_s > 0
            return super().poll(timeout_s)

    near = Busy(MemoryTier(name="near"))
    kv, told = make_kv(simple(), pages=16, tiers=[near]), list[Any]()
    published(kv, TEXT)
    kv.bus.subscribe(told.append, Evicted)
    store = kv.planner.store
    schedule = store.stack.mover.lanes[0].schedule
    schedule.queue_bytes = schedule.background_bytes = 4096
    if reason == "space":
        leave_all(kv)
    else:
        with kv.lock:
            store.tails.drop()
            victims = store.device_places["cpu"].evict(store.context.now_ns(), 6)
            if reason == "prefetch":
                store.eviction.leave(store.index.those(victims.tolist()), "prefetch")
            else:
                store.eviction._relieve(
                    lambda place, _: victims.tolist() * (place.kind == "gpu"), reason
                )
    assert [(one.tier, one.pages, one.reason) for one in told] == [("device", 6, reason)]
    assert (near.waits > 0) == (reason == "space")
    assert kv.flush(60)
    kept = 6 if reason == "space" else 2  # one is in flight, and one waits
    assert len(near.frames) == kept and kv.stats()["tiers"]["near"]["dropped"] == 6 - kept


def test_a_load_that_lands_while_others_leave_keeps_its_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prefetch was under way when a request computed the page."""
    monkeypatch.setattr("flowkv.cache.store.BATCH_BYTES", 4096)
    near = Deferred(MemoryTier(name="near"))
    kv = make_kv(simple(), pages=16, tiers=[near])
    store, near_poll = kv.planner.store, near.poll
    published(kv, TEXT[:8])
    (block,) = leave_all(kv)
    assert kv.flush(60)
    near.poll = lambda timeout_s=0.0: []
    with kv.lock:
        (load,) = loads = PageLoad.several(store, [(block, 0)], awaited=False)
        assert reserve(loads, ways(store, loads), store.allocator.try_allocate)
        batch = LoadBatch("prefetch", lambda _: None, priority=IOPriority.PREFETCH)
        PageLoader(store).submit(batch, [LayerSlice(load, 0, 1)], -1)
        store.stack.mover.drain()
    published(kv, TEXT[:8], reuse=False)
    published(kv, [*range(100, 124)])
    assert block.page >= 0 and block.page != load.page and not block.holds
    near.poll = near_poll
    schedule = store.stack.mover.lanes[0].schedule
    schedule.queue_bytes = schedule.background_bytes = 4096
    blocks = leave_all(kv)
    assert load.held and block.holds == 1 and block.page >= 0
    assert all(one.page < 0 for one in blocks if one is not block)
    with kv.lock:
        load.drop()
    assert kv.flush(60)
    served(kv, 8)
    leave(kv, [block])


@pytest.mark.parametrize("bus", [False, True])
def test_a_tier_that_raises_loses_what_it_was_sent_and_nothing_else(bus: bool) -> None:
    class Raising(Wrapped):
        broken = True

        def submit_store(self, items: Any, *, deadline_s: float = 60.0) -> int:
            if self.broken:
                raise RuntimeError("odd")
            return int(self.inner.submit_store(items))

        def submit_load(self, items: Any, *, deadline_s: float = 10.0) -> int:
            if self.broken:
                raise RuntimeError("odd")
            return int(self.inner.submit_load(items))

    near = Raising(MemoryTier(name="near"))
    kv, blocks, told = departing(near, bus=bus)
    assert kv.flush(60)
    assert {one.reason for one in told if isinstance(one, Failed)} == {"RuntimeError: odd"}
    assert all(block.gone for block in blocks) and not kv.planner.store.pool(0).lent
    assert kv.stats()["tiers"]["near"]["dropped"] == 6
    audit(kv)
    near.broken = False
    published(kv, TEXT)
    leave_all(kv)
    assert kv.flush(60) and len(near.frames) == 6
    near.broken = True
    served(kv, 0)
    near.broken = False
    served(kv, 48)
