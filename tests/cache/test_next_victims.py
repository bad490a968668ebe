"""Pages that leave a device for host memory while no request waits for their room."""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from flowkv import KV, Geometry, Namespace
from flowkv.testing import MemoryTier
from flowkv.tiers import Store
from tests.cache.fakes import Deferred, Wrapped, lasting
from tests.cache.test_machine import Machine
from tests.cache.test_pinned import behind_a_bus, end
from tests.cache.toy import advance, check_content, geometry, make_kv, opened, published, simple
from tests.inside import Copies, HostTier, ManualClock, NextVictims, PolicyPlace, bind

PAGE = 4096


class Watched:
    """Counts the bytes that leave a device, by what asked for them: a request, or none."""

    def __init__(self, copies: Copies) -> None:
        self.waiting, self.n_bytes, self._download = False, {True: 0, False: 0}, copies.download
        copies.download = self.download

    def download(self, granules: Any, n_bytes: int) -> Any:
        self.n_bytes[self.waiting] += len(granules) * n_bytes
        return self._download(granules, n_bytes)


def prompt(number: int, pages: int = 3) -> list[int]:
    return [number, *range(8 * pages)]


def world(
    shape: Geometry | None = None, pages: int = 64, **options: Any
) -> tuple[KV, Copies, Watched]:
    options = {"tiers": [HostTier(1 << 24)], "prefetch": "off"} | options
    kv = make_kv(shape or simple(), pages=pages, **options)
    (copies,) = behind_a_bus(kv)
    return kv, copies, Watched(copies)


def ask(kv: KV, watched: Watched, tokens: list[int]) -> None:
    watched.waiting = True
    seq = opened(kv, tokens)
    watched.waiting = False
    seq.close()


def ahead(kv: KV) -> NextVictims:
    (found,) = kv.planner.store.next_victims.values()
    return found


def filled(kv: KV, count: int = 40, first: int = 0) -> None:
    for number in range(first, first + count):
        published(kv, prompt(number))


def served(kv: KV, count: int) -> None:
    for number in range(count):
        with kv.open([*prompt(number), 99]) as seq:
            assert seq.reused == 24
            check_content(kv, seq, prompt(number)[:24])


# ---- what a request waits for


@pytest.mark.parametrize(
    ("policy", "late"), [("lru", False), ("lru", True), ("auto", True), ("arc", False)]
)
def test_a_full_device_copies_nothing_while_an_unseen_prompt_waits(policy: str, late: bool) -> None:
    kv, copies, watched = world(policy=policy)
    copies.streams.behind = late
    copies.most_bytes = 1 << 30
    filled(kv)
    kv.flush()
    filled(kv, 10, first=40)
    watched.n_bytes = {True: 0, False: 0}
    for number in range(50, 62):
        ask(kv, watched, prompt(number))
    assert watched.n_bytes == {True: 0, False: 12 * 3 * PAGE}
    served(kv, 62)
    assert not any(tier["dropped"] for tier in kv.stats()["tiers"].values())
    end(kv, copies)


def test_nothing_is_copied_ahead_before_the_first_token_of_a_request() -> None:
    kv, copies, watched = world()
    filled(kv)
    before, waiting = dict(watched.n_bytes), len(ahead(kv))
    assert waiting == 8
    seq = opened(kv, prompt(100, pages=9), reuse=False)
    assert not ahead(kv), "the prompt took what was ahead"
    taken = watched.n_bytes[False] - before[False]
    assert taken == (9 - waiting) * PAGE
    copied = watched.n_bytes[False]
    advance(kv, [seq], [[5]])
    assert watched.n_bytes[False] == copied
    for _ in range(8):
        advance(kv, [seq], [[5]])
    assert watched.n_bytes[False] > copied and ahead(kv), "a step after the first token"
    seq.close()
    end(kv, copies)


@pytest.mark.at_once
def test_nothing_is_copied_ahead_with_room_or_without_copies_beside_the_computation() -> None:
    kv, copies, watched = world(pages=200)
    filled(kv)
    assert watched.n_bytes == {True: 0, False: 0} and not ahead(kv)
    end(kv, copies)
    kv = make_kv(simple(), pages=64, tiers=[HostTier(1 << 24)])
    filled(kv)
    assert not ahead(kv)


def test_nothing_is_copied_ahead_while_the_host_tier_is_asked() -> None:
    kv, copies, _ = world()
    filled(kv)
    (lane,) = kv.planner.store.stack.mover.lanes

    class Asked:
        stores = False

    lane.schedule.__class__.__iter__, real = (
        lambda self: iter([Asked()]),
        type(lane.schedule).__iter__,
    )
    try:
        waiting = len(ahead(kv))
        published(kv, prompt(100))
        assert len(ahead(kv)) < max(waiting, 1)
    finally:
        type(lane.schedule).__iter__ = real
    published(kv, prompt(101))
    assert ahead(kv)
    end(kv, copies)


# ---- what is used again


@pytest.mark.parametrize("seed", range(2))
def test_the_device_holds_what_it_held_without(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With recency as policy a page that was evicted ahead counts as any other one."""

    def hits(on: bool) -> list[int]:
        if not on:
            monkeypatch.setattr(NextVictims, "copy_ahead", lambda self, served=None: None)
        kv, copies, _ = world(clock=(clock := ManualClock()))
        picks, found = random.Random(seed), list[int]()
        for _ in range(200):
            number = min(picks.randrange(40), picks.randrange(40))
            loaded = kv.planner.store.stack.mover.lanes[0].loaded_bytes
            published(kv, prompt(number))
            found.append(kv.planner.store.stack.mover.lanes[0].loaded_bytes - loaded)
            clock.advance(s=1.0)
        end(kv, copies)
        return found

    assert hits(True) == hits(False)


def workload(name: str, picks: random.Random) -> list[int]:
    if name == "unseen":
        return prompt(picks.randrange(1 << 30))
    hot = picks.random() < 0.5 or name == "hot"
    return prompt(
        min(picks.randrange(30), picks.randrange(30)) if hot else picks.randrange(1 << 30)
    )


@pytest.mark.parametrize(
    ("name", "policy"), [("unseen", "lru"), ("mixed", "auto"), ("hot", "auto")]
)
def test_hardly_more_is_copied_than_without(
    name: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unseen prompts, with and without others that come again, also where these nearly fit."""

    def copied(on: bool) -> int:
        if not on:
            monkeypatch.setattr(NextVictims, "copy_ahead", lambda self, served=None: None)
        kv, copies, watched = world(policy=policy, clock=(clock := ManualClock()))
        picks = random.Random(3)
        for _ in range(160):
            published(kv, workload(name, picks))
            clock.advance(s=0.5)
        mark = kv.planner.store.pool(0).capacity_bytes() // 8
        victims = ahead(kv)
        assert sum(victims.twice.values()) <= mark
        end(kv, copies)
        return sum(watched.n_bytes.values())

    with_it, without = copied(True), copied(False)
    assert with_it <= 1.1 * without + 8 * PAGE, "and once what is ahead at the end"


# ---- faults of earlier attempts


def test_pages_that_wait_for_a_disk_are_not_saved_by_copies_in_memory() -> None:
    """They lie in host memory only: they wait, `flush` tells so, and they are written later."""
    disk = lasting()
    kv, copies, _ = world(tiers=[HostTier(1 << 24), disk])
    lane, store = kv.planner.store.stack.mover.lanes[1], kv.planner.store
    filled(kv, 20)
    kv.flush()
    lane.rest(1e9)
    filled(kv, 30, first=20)
    assert store.stack.mover.lanes[0].stored_bytes and ahead(kv)
    assert not kv.flush(0.1) and store.writes.unsaved >= 30 * 3
    assert len(list(disk.scan())) <= 20 * 3
    lane.rest(0.0)
    assert kv.flush()
    assert not store.writes.unsaved and len(list(disk.scan())) == 50 * 3
    end(kv, copies)


def fail_all(kv: KV, tier: Deferred) -> None:
    while kv.planner.store.stack.mover.storing:
        kv.planner.store.writes.drain()
        tier.work("full")


def test_a_page_that_left_ahead_is_lost_once_where_the_host_tier_fails() -> None:
    """It is counted once, as any page that leaves for a tier that fails."""
    tier = Deferred(MemoryTier(1 << 24, name="host"))
    kv, copies, _ = world(tiers=[tier])
    for number in range(60):
        published(kv, prompt(number))
        if number < 40:
            tier.work()
            kv.planner.store.writes.drain()
    copies.streams.finish()  # the copies are over, and their stores are with the tier
    kv.planner.store.writes.drain()
    assert ahead(kv) and tier.waiting
    there = [block for block in ahead(kv) if block.going]
    assert there
    waiting = kv.planner.store.stack.mover.storing
    fail_all(kv, tier)
    assert kv.stats()["tiers"]["host"]["dropped"] == waiting
    assert all(block.gone for block in there)
    end(kv, copies)


@pytest.mark.parametrize("number", range(3))
def test_pages_that_memory_is_missing_to_copy_stay_on_the_device(number: int) -> None:
    kv, copies, _ = world(geometry())
    filled(kv)
    store, download, left = kv.planner.store, copies.download, [number]
    copies.most_bytes = 1 << 20

    def fail(granules: Any, n_bytes: int) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise MemoryError
        return download(granules, n_bytes)

    with kv.lock:
        pages = store.allocator.allocate(0, len(ahead(kv)) // 2)
        before, copies.download = {*store.index}, fail
        with pytest.raises(MemoryError):
            store.eviction.copy_ahead()
        copies.download = download
        store.pool(0).release(*pages)
    assert not [block for block in before if block.gone]
    end(kv, copies)


@pytest.mark.usefixtures("much")
def test_a_page_may_lose_its_copy_to_another_of_the_same_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A full host tier makes room for one page with the copy of the next one."""
    kv, copies, _ = world(geometry(), tiers=[tier := MemoryTier(1 << 24)])
    filled(kv)
    kv.flush()
    served(kv, 2)
    kv.flush()
    store = kv.planner.store
    with kv.lock:
        idle = [one for one in store.index if one.page >= 0 and not (one.ahead or one.holds)]
        first, fresh = [one for one in idle if not one.tiers and not one.group][:2]
        copied = next(one for one in idle if one.tiers and one.group)
        turns, below = [[first], [fresh, copied]], [[copied]]

        def choose(place: PolicyPlace, now_ns: int, count: int) -> Any:
            here = turns if place.kind == "gpu" else below
            chosen = here.pop(0) if here else []
            for block in chosen:
                place.remove(block)
            return np.array([block.slot for block in chosen]) if chosen else None

        monkeypatch.setattr(PolicyPlace, "evict", choose)
        tier.capacity_bytes = tier.used_bytes() + 4096 + 2000
        monkeypatch.setattr(type(ahead(kv)), "_room", lambda *_: 1 << 20)
        monkeypatch.setattr(type(store.pool(0).copies), "has_room", lambda *_: True)
        pages = store.allocator.free(0, 16, 0)
        store.eviction.copy_ahead()
        store.pool(0).release(*pages)
    assert copied.gone and fresh.ahead and not turns
    end(kv, copies)


def test_memory_that_others_share_gets_each_page_once() -> None:
    stored = list[bytes]()

    class Shared(Wrapped):
        def submit_store(self, items: Sequence[Store], **options: Any) -> int:
            stored.extend(item.key for item in items)
            return int(self.inner.submit_store(items, **options))

    kv, copies, watched = world(tiers=[Shared(MemoryTier(1 << 24, name="all"), shared=True)])
    filled(kv, 60)
    kv.flush()
    assert len(stored) == len(set(stored)) == 60 * 3 and not ahead(kv)
    assert sum(watched.n_bytes.values()) == 60 * 3 * PAGE
    end(kv, copies)


def test_devices_above_one_host_tier_do_not_fill_it_with_copies_of_their_pages() -> None:
    full, sliding = geometry().groups
    shape = Geometry(groups=(full, msgspec.structs.replace(sliding, device="cpu:0")), page_size=8)
    kv = make_kv(shape, pages=64, tiers=[HostTier(1 << 22)], prefetch="off")
    behind_a_bus(kv)
    store, picks = kv.planner.store, random.Random(1)
    for _ in range(150):
        published(kv, prompt(picks.randrange(60)))
        twice = [sum(victims.twice.values()) for victims in store.next_victims.values()]
        pools = [pool.capacity_bytes() // 8 for pool in store.pools.values()]
        assert all(n <= most for n, most in zip(twice, pools, strict=True))
        assert sum(twice) <= (1 << 22) // 32
    assert any(store.next_victims.values())


def test_a_prefetch_takes_the_room_of_pages_that_left_ahead() -> None:
    kv, copies, _ = world(prefetch="auto", clock=ManualClock())
    filled(kv)
    kv.flush()
    store, before = kv.planner.store, len(ahead(kv))
    stay = [block for block in store.index if block.page >= 0 and not block.ahead]
    queued = kv.enqueue([*prompt(0), 99])
    assert queued.prefetch.wait() and queued.prefetch.arrived > 1
    assert all(block.page >= 0 for block in stay) and len(ahead(kv)) < before
    end(kv, copies)


# ---- ends


@pytest.mark.parametrize("how", ["flush", "close", "bind", "forget", "invalidate", "page"])
def test_what_is_on_its_way_is_ended(how: str) -> None:
    """Copies are late, and the tier answers late, while the cache is told to end or to forget."""
    tier = Deferred(MemoryTier(1 << 24, name="host"))
    kv, copies, _ = world(tiers=[tier], namespace="one")
    filled(kv, 40)
    kv.flush()
    copies.streams.behind, copies.most_bytes = True, 1 << 30
    filled(kv, 20, first=40)
    some = list(ahead(kv))
    assert some and all(block.page >= 0 for block in some) and kv.planner.store.stack.mover.storing
    if how == "flush":
        assert kv.flush() and not kv.planner.store.writes.unsaved
        assert len(list(tier.scan())) >= 60 * 3 - 64
        served(kv, 60)
    elif how == "bind":
        bind(kv, simple(layers=2), Namespace(model="other"))
        assert not ahead(kv)
        tier.work()
        assert kv.flush()
        filled(kv, 5)
    elif how == "forget":
        for number in range(60):
            kv.forget(prompt(number))
        assert kv.planner.store.writes.unsaved == 0 and not list(tier.scan())
        assert all(block.gone for block in some) and not ahead(kv)
    elif how == "invalidate":
        kv.invalidate()
        assert not list(tier.scan()) and not ahead(kv)
    elif how == "page":
        kv.planner.store.forget(*some)
        assert not ahead(kv) and all(block.gone for block in some)
        kv.flush()
        assert not {block.key for block in some} & {entry.key for entry in tier.scan()}
    if how != "close":
        end(kv, copies)
    else:
        kv.close()
        copies.streams.finish()
        gc.collect()
        assert copies.staged_bytes() == 0


def test_a_lease_ends_for_pages_that_left_ahead() -> None:
    kv, copies, _ = world(
        policy="lru", policy_options={"lease_s": 60.0}, clock=(clock := ManualClock())
    )
    filled(kv)
    kv.flush()
    some = list(ahead(kv))
    assert some
    clock.advance(s=100.0)
    published(kv, prompt(100))
    assert all(block.gone for block in some)
    end(kv, copies)


# ---- anything


class AheadMachine(Machine):
    """All calls of a cache, over a device that copies late, with half of its pages ahead."""

    ahead, near = True, 200 * PAGE


@pytest.fixture
def much(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_POOL_SHARE", 2), ("_TIER_SHARE", 2), ("_WASTE", 0)):
        monkeypatch.setattr(f"flowkv.cache.store.{name}", value)


@pytest.mark.usefixtures("much")
def test_any_order_of_calls() -> None:
    run_state_machine_as_test(
        AheadMachine, settings=settings(max_examples=40, stateful_step_count=40)
    )


@pytest.mark.deep
@pytest.mark.usefixtures("much")
def test_any_order_of_calls_at_length() -> None:
    run_state_machine_as_test(
        AheadMachine, settings=settings(max_examples=1500, stateful_step_count=60)
    )
