"""Pages on their way: what becomes of them when others bring them, callers give up or room ends."""

from __future__ import annotations

import pytest

from flowkv.testing import MemoryTier
from flowkv.tiers import Load
from tests.cache.fakes import Wrapped, lasting
from tests.cache.test_pinned import Eager
from tests.cache.toy import check_content, make_kv, prefill, published, simple
from tests.inside import Copies, PageStore, Prefetch, SlotPool


class Ranked(Wrapped):
    """Answers one load at a time, in the order of `rank`; what has no rank waits."""

    def __init__(self, inner: MemoryTier) -> None:
        super().__init__(inner, kind="disk", shared=True)
        self.asked: list[tuple[int, int, Load]] = []
        self.jobs, self.waited_for = 0, False
        self.rank = lambda load: 0

    def submit_load(self, items, *, deadline_s=10.0):
        self.jobs += 1
        self.asked += [(self.jobs, n, load) for n, load in enumerate(items)]
        return self.jobs

    def poll(self, timeout_s=0.0):
        self.waited_for |= timeout_s > 0
        ranked = [
            (rank, j, n) for j, n, load in self.asked if (rank := self.rank(load)) is not None
        ]
        if not ranked:
            return self.inner.poll(0.0)
        _, job, item = min(ranked)
        (load,) = [load for j, n, load in self.asked if (j, n) == (job, item)]
        self.asked.remove((job, item, load))
        self.inner.submit_load([load])
        (answer,) = self.inner.poll(1.0)
        return [answer._replace(job=job, item=item)]


class OnceEach(Copies):
    """Copies of which no two may go to one place together: nobody knows which is the last."""

    def launch(self) -> None:
        places = [granule for granule, _ in self._queue]
        assert len(set(places)) == len(places)
        super().launch()


def shared(tokens: list[int]) -> MemoryTier:
    """A tier with the pages of a prompt, of codecs that nobody who comes later knows."""
    tier = MemoryTier(name="m")
    writer = make_kv(
        simple(), pages=32, tiers=[Wrapped(tier, kind="disk", shared=True)], prefetch="off"
    )
    published(writer, tokens)
    writer.flush()
    return tier


def forget_codecs(store: PageStore) -> None:
    for block in store.index:
        block.codecs |= 15


@pytest.mark.parametrize(
    ("pages", "known", "fetched"), [(6, 4, 1), (8, 4, 3), (11, 8, 2), (13, 3, 1)]
)
def test_a_page_that_came_twice_is_copied_up_before_it_is_another_ones(
    pages: int, known: int, fetched: int
) -> None:
    text = list(range(8 * known))
    tier = Ranked(shared(text))
    lossy = dict(codec="kv8", recent_tokens=8, prefetch="off", write_back=False)
    kv = make_kv(simple(), pages=pages, tiers=[tier], load_deadline_s=5, **lossy)
    store = kv.planner.store
    for seed, pool in enumerate(store.pools.values()):
        streams, slots = Eager(seed), SlotPool(1 << 18)
        slots.register(streams.pin, streams.unpin)
        pool.copies = OnceEach(streams, pool.arena, slots)
        pool.copies.kernel_bytes, pool.copies.least_pieces = 8191, 3
    forget_codecs(store)
    eight = next(x.fingerprint() for codec, x in store.forms[0].layouts.items() if codec)
    tier.rank = lambda load: 0 if load.layout == eight else None
    tier.waited_for = False
    kv.prefetch([*text[: 8 * fetched], 99])
    for _ in range(4):
        store.stack.mover.drain()
    coming = {load.key for _, _, load in tier.asked}

    def rank(load: Load) -> int | None:  # what was fetched before comes while the rest is awaited
        return (
            (0 if load.key in coming else 2) + (load.layout != eight) if tier.waited_for else None
        )

    tier.rank = rank
    with kv.open([*text, 199]) as seq:
        assert seq.reused
        check_content(kv, seq, text[: seq.length])


class Interrupted(Wrapped):
    """Gives half of the answers; then whoever waits is interrupted, and the rest comes later."""

    def __init__(self, inner: MemoryTier) -> None:
        super().__init__(inner)
        self.armed, self.kept = False, []

    def poll(self, timeout_s=0.0):
        got = self.kept + self.inner.poll(0.0)
        if not self.armed:
            self.kept = []
            return got
        if not got or self.kept:
            self.armed, self.kept = False, got
            raise KeyboardInterrupt
        self.kept = got[4:]
        return got[:4]


def test_policies_know_what_came_before_a_caller_was_interrupted() -> None:
    tier = Interrupted(lasting())
    kv = make_kv(simple(), pages=12, tiers=[tier], prefetch="off")
    text = list(range(64))
    published(kv, text)
    for first in (100, 101, 102):
        published(kv, [first, *range(80)])
    kv.flush()
    tier.armed = True
    with pytest.raises(KeyboardInterrupt):
        kv.open([*text, 99])
    store = kv.planner.store
    for _ in range(5):
        store.writes.drain()
    known = set(store.device_places["cpu"].policy.resident())
    there = {block.slot for block in store.index if block.page >= 0}
    assert there and there == known
    prefill(kv, kv.open(list(range(1000, 1096))))  # all twelve pages can be had


def test_a_prefetch_gives_up_nothing_for_a_page_of_another_codec() -> None:
    tier = Wrapped(shared(list(range(16))), kind="disk", shared=True)
    lossy = dict(codec="kv8", recent_tokens=8, prefetch="off", write_back=False)
    kv = make_kv(simple(), pages=8, tiers=[tier], **lossy)
    store = kv.planner.store
    forget_codecs(store)
    published(kv, list(range(500, 548)))
    idle = {block.key for block in store.index if block.page >= 0}

    def free(group: int, count: int, codec: int) -> list[int]:
        pool, granules = store.pool(group), store.forms[group].layouts[codec].granules
        return pool.allocate(granules, min(count, pool.available(granules)), codec) or []

    handle = Prefetch(store, kv.loader, kv.lock)
    with kv.lock:
        handle.issue([block for block in store.index if block.page < 0], free)
    assert handle.wait(60)
    assert idle <= {block.key for block in store.index if block.page >= 0}


def test_a_prefetch_asks_for_nothing_that_is_there() -> None:
    told: list[object] = []
    kv = make_kv(simple(), pages=12, tiers=[lasting()], prefetch="off")
    published(kv, list(range(32)))
    kv.flush()
    store = kv.planner.store
    handle = Prefetch(store, kv.loader, kv.lock, lambda block, arrived: told.append(arrived))
    with kv.lock:
        handle.issue([block for block in store.index if block.page >= 0])
    assert handle.pages == handle.left == 0 and told == [False] * 4
