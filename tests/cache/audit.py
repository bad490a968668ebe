"""Adds everything up: pages, references, residency, and what policies believe about it."""

from __future__ import annotations

from collections import Counter

from flowkv import KV
from tests.inside import (
    CODEC_SHIFT,
    GRANULE_MASK,
    Copy,
    PagePool,
    PageStore,
    PrefixIndex,
    SwappedCopy,
)


def audit_pool(pool: PagePool) -> None:
    """Every granule is in exactly one place: a page in use, a free page, or a free slab."""
    owner: dict[int, str] = {}
    names = {page & GRANULE_MASK: page for page in pool.live()}
    assert len(names) == len(pool._refs), "one place has two pages"

    def claim(first: int, granules: int, who: str) -> None:
        for granule in range(first, first + granules):
            assert granule not in owner, f"granule {granule}: {who} and {owner[granule]}"
            owner[granule] = who

    used = 0
    for number, slab in enumerate(pool._slabs):
        first = number * pool.slab_granules
        if slab is None:
            assert number in pool._free_slabs
            claim(first, pool.slab_granules, "free slab")
            continue
        assert slab.first == first and number not in pool._free_slabs
        assert slab.used > 0, "an empty slab belongs to no size"
        assert bool(slab.free) == (number in pool._partial.get(slab.granules, {}))
        for granule in slab.free:
            claim(granule, slab.granules, "free page")
            assert granule not in names
        for granule in slab.occupied():
            claim(granule, slab.granules, "used page")
            assert pool.references(names[granule]) > 0
            used += slab.granules
    assert len(set(pool._free_slabs)) == len(pool._free_slabs)
    assert used * 4096 == pool.used_bytes()
    assert set(pool.live()) == {page for page, count in pool._refs.items() if count > 0}
    for granules, vacant in pool._vacant.items():
        assert vacant == sum(len(pool._slab(n).free) for n in pool._partial.get(granules, ()))


def audit(kv: KV) -> None:
    """Checks a cache whose sequences are in no step."""
    assert kv.planner is not None
    kv.planner.publish_pending()  # a page that is being encoded, and its target, are lent to that
    store, tables = kv.planner.store, kv.planner.tables
    refs = {device: Counter[int]() for device in store.pools}
    holds: Counter[int] = Counter()
    for seq in kv._open.values():
        for g, blocks in enumerate(seq.blocks):
            line = tables.pages[g][seq.row].tolist()
            assert all(page == -1 for page in line[len(blocks) :])
            for page, block in zip(line, blocks, strict=False):
                if page >= 0:
                    refs[store.devices[g]][page] += 1
                    assert page >> CODEC_SHIFT <= seq.fidelity
                if block is not None:
                    assert block.page == page >= 0
                    holds[id(block)] += 1
    for block in [*store.index, *store._orphans]:
        assert block.holds == holds.pop(id(block), 0)
        assert block.gone == (block in store._orphans)
        assert block.page < 0 or block.page >> CODEC_SHIFT <= block.fidelity
        if block.page >= 0 and not block.gone:
            refs[store.devices[block.group]][block.page] += 1
    assert not holds
    for pages in store.tails.values():
        for g, page in enumerate(pages):
            refs[store.devices[g]][page] += 1
            assert store.pool(g).references(page) == 1 and not page >> CODEC_SHIFT
    audit_suspended(kv)
    for device, pool in store.pools.items():
        for page, count in pool.lent.items():
            refs[device][page] += count
        assert dict(refs[device]) == pool._refs
        audit_pool(pool)
    audit_residency(kv, store)
    audit_index(store.index)
    audit_beginnings(store)


def audit_suspended(kv: KV) -> None:
    """What suspended sequences need is counted once, and copied once it is not there any more."""
    assert kv.planner is not None
    store, n_bytes, users = kv.planner.store, 0, Counter[SwappedCopy]()
    for seq in kv._open.values():
        for g, pages in enumerate(seq.suspended or ()):
            for page in filter(None, pages):
                if isinstance(page, Copy) or not users[page]:
                    n_bytes += store.forms[g].layouts[page.codec].page_bytes
                if isinstance(page, SwappedCopy):
                    users[page] += 1
    assert kv.planner.aside_bytes == n_bytes
    for copy, count in users.items():
        assert copy.users == count
        assert (copy.content is None) == (store.swapped.get(copy.block) is copy)
        there = copy.block.page >> CODEC_SHIFT
        assert copy.content is not None or there == copy.codec
    assert set(store.swapped.values()) <= set(users)


def audit_residency(kv: KV, store: PageStore) -> None:
    """Policies know what lies where; what may not leave is protected; nothing lies nowhere."""
    used = {b.slot for b in store.index if b.holds or b.kept}
    for device, place in store.device_places.items():
        groups = {g for g, spec in enumerate(store.geometry.groups) if spec.device == device}
        here = [b for b in store.index if b.group in groups]
        ahead = store.next_victims[device]
        assert all(b.page >= 0 and not (b.holds or b.kept or b.gone) for b in ahead)
        assert all(b.tiers or b.going for b in ahead) and {*ahead} == {b for b in here if b.ahead}
        assert all(b.page >= 0 and not b.gone for b in ahead.twice)
        ordered = [b.slot for b in here if b.page >= 0 and b not in ahead]
        assert sorted(place.policy.resident()) == sorted(ordered)
        assert set(place.held) == used & {b.slot for b in here}
        pool = store.pools[device]
        idle = {b.page for b in here if b.page >= 0 and not (b.holds or b.kept)}
        idle |= {pages[g] for pages in store.tails.values() for g in groups}
        free = pool.capacity_bytes() - pool.used_bytes()
        assert store.allocator.room(device) * 4096 == free + sum(map(pool.size_bytes, idle))
    for number, place in enumerate(store.stack.places):
        there = [block.slot for block in store.index if block.tiers >> number & 1]
        assert sorted(place.policy.resident()) == sorted(there)
        assert set(place.held) == {b.slot for b in store.index if b.going or b.kept}
    restores = kv.restores._active.values()
    coming = Counter(one.block for restore in restores for one in restore if one._kept)
    for block in store.index:
        assert block.somewhere or block.going, "a block lies nowhere and is still known"
        assert block.kept == block.pinned + coming[block]
        assert store.index.at(block.slot) is block


def audit_index(index: PrefixIndex) -> None:
    """The tree has every known block exactly once, and no dead branches."""
    linked = [key for children in index._children.values() for key in children]
    assert len(linked) == len(set(linked))
    assert set(linked) == {*index._by_key, *index._holes}
    for key in index._holes:
        assert index._children[key] and key not in index._by_key
    assert all(index._children.values())
    ghosts = {index.slot(key) for key in index.ghosts._known}
    assert not ghosts & {block.slot for block in index} and len(ghosts) == len(index.ghosts)
    free = [i for i, block in enumerate(index._slots) if block is None and i not in ghosts]
    assert sorted(index._free) == free


def audit_beginnings(store: PageStore) -> None:
    """Whose tokens are known, and nobody else, can be found by them."""
    known = [one for _, line in store.index.beginnings._below.values() for one in line]
    ones = [b for b in store.index if b.kind == "page" and not b.group and b.tokens is not None]
    assert Counter(map(id, known)) == Counter(map(id, [*ones, *store.tails]))
    for order, line in store.index.beginnings._below.values():
        tokens = [one.tokens for one in line if one.tokens is not None]
        assert tokens and order == [ids.astype(">u4").tobytes() for ids in tokens] == sorted(order)


def audit_empty(kv: KV) -> None:
    """Nothing is left: no page, no block, no line."""
    audit(kv)
    assert kv.planner is not None and not kv._open
    store = kv.planner.store
    store.tails.drop()
    assert len(store.index) == 0 and not store._orphans
    assert not any(pool.lent for pool in store.pools.values())
    assert not store.index._children and not store.index._holes
    assert all(pool.used_bytes() == 0 for pool in store.pools.values())
    assert sorted(kv.planner.tables._free) == list(range(kv.planner.tables.max_rows))
