"""Slabs, references and moves of one device's pool."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from tests.cache.audit import audit_pool
from tests.inside import (
    GRANULE_MASK,
    CapacityError,
    PagePool,
    StateError,
    cache_pool,
    codec_of,
    own_memory,
    page_id,
)
from tests.inside import layout_CODECS as CODECS


def pool_of(slabs: int, sizes: tuple[int, ...] = (1,)) -> PagePool:
    return PagePool("cpu", slabs * 16 * max(sizes) * 4096, sizes)


def test_a_pool_of_less_than_two_pages_is_refused() -> None:
    with pytest.raises(CapacityError, match="at least 24KiB"):
        PagePool("cpu", 5 * 4096, [3])
    assert PagePool("cpu", 6 * 4096, [3]).available(3) == 2


def test_slabs_are_shared_between_sizes_when_empty() -> None:
    pool = pool_of(4, (1, 4))
    assert pool.available(1) == 4 * 64 and pool.available(4) == 64
    small, large = pool.allocate(1, 65), pool.allocate(4, 32)
    assert small and large and pool.available(4) == 0 and pool.available(1) == 63
    for page in small:
        pool.release(page)
    assert pool.available(4) == 32
    audit_pool(pool)


def test_what_does_not_fit_changes_nothing() -> None:
    pool = pool_of(4)
    assert pool.allocate(1, 65) is None and pool.used_bytes() == 0
    assert pool.allocate(1, 0) == []
    pages = pool.allocate(1, 64)
    assert pages and len(set(pages)) == 64 and pool.allocate(1, 1) is None


def test_sparse_slabs_are_emptied_and_movable_pages_only_move() -> None:
    pool = pool_of(6)
    pages = pool.allocate(1, 96)
    assert pages
    for page in pages:  # the slabs keep 1, 2, 3, 8, 12 and 16 pages
        keep = (1, 2, 3, 8, 12, 16)[page // 16]
        if page % 16 >= keep:
            pool.release(page)
    before = pool.fragmentation()
    fixed = {next(p for p in pool.live() if p // 16 == 1)}
    moves = pool.plan_defragmentation(fixed)
    assert not fixed & moves.keys()
    assert {page // 16 for page in moves} == {0, 2}, "whole slabs, the sparsest first"
    pool.relocate(moves)
    audit_pool(pool)
    assert pool.fragmentation() < before
    assert pool.available(1) == 96 - 42


def test_planning_is_fast_where_everything_is_sparse() -> None:
    pool = pool_of(2000)
    for page in pool.allocate(1, 32000) or ():
        if page % 16 > 1:
            pool.release(page)
    moves = pool.plan_defragmentation()
    assert len(moves) > 2 * 1740, "250 full slabs are enough"
    pool.relocate({})


def test_references_and_content_travel() -> None:
    pool = pool_of(4)
    a, b, c = pool.allocate(1, 3) or ()
    pool.share(b)
    for page in (a, b, c):
        pool.page_bytes(page, 4096).fill_(page + 1)
    first, second = [page for page in range(16) if page not in (a, b, c)][:2]
    pool.relocate({a: first, b: second})
    audit_pool(pool)
    assert [pool.references(page) for page in (a, b, c, first, second)] == [0, 0, 1, 1, 2]
    assert [int(pool.page_bytes(page, 1)) for page in (first, second, c)] == [a + 1, b + 1, c + 1]
    assert torch.equal(pool.page_bytes(second, 4096), torch.full((4096,), b + 1, dtype=torch.uint8))


def test_ids_carry_the_codec() -> None:
    pool = pool_of(4, (1, 2))
    raw, small, other = (pool.allocate(g, 3, c) or [] for g, c in ((2, 0), (1, 1), (1, 3)))
    assert {codec_of(page) for page in raw} == {"raw"}
    assert {codec_of(page) for page in small} == {"kv8"} and min(small) > 1 << 27
    assert pool.bytes_by_codec() == {"raw": 6 * 4096, "kv8": 3 * 4096, "kv4c": 3 * 4096}
    for number, page in enumerate((*raw, *small, *other)):
        pool.page_bytes(page, 4096).fill_(number)
    audit_pool(pool)
    assert [int(pool.page_bytes(page, 1)) for page in (*small, *other)] == [3, 4, 5, 6, 7, 8]
    with pytest.raises(StateError, match="not in use"):
        pool.release(small[0] & GRANULE_MASK)
    pool.copy(small[:1], other[:1], 1)
    assert int(pool.page_bytes(other[0], 1)) == 3


def test_a_replaced_page_leaves_its_references_behind() -> None:
    pool = pool_of(4, (1, 2))
    (old,), (new,) = pool.allocate(2, 1) or [], pool.allocate(1, 1, 2) or []
    pool.share(old)
    pool.replace(old, new)
    audit_pool(pool)
    assert (pool.references(old), pool.references(new)) == (0, 2)
    assert pool.used_bytes() == 4096
    assert not pool.release(new) and pool.release(new) and pool.used_bytes() == 0


def test_pages_of_several_codecs_move_within_a_slab() -> None:
    pool = pool_of(4)
    ids = [(pool.allocate(1, 1, number % len(CODECS)) or [-1])[0] for number in range(8)]
    for number, page in enumerate(ids):
        pool.page_bytes(page, 4096).fill_(number)
    slab = (ids[0] & GRANULE_MASK) // 16
    free = {*range(16 * slab, 16 * slab + 16)} - {page & GRANULE_MASK for page in ids}
    moves = {o: page_id(n, codec_of(o)) for o, n in zip(ids, sorted(free), strict=True)}
    pool.relocate(moves)
    audit_pool(pool)
    assert [int(pool.page_bytes(moves[page], 1)) for page in ids] == list(range(8))
    for page in ids[::2]:
        pool.release(moves[page])
    pool.relocate(pool.plan_defragmentation())
    audit_pool(pool)


def test_a_pool_beyond_what_ids_can_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowkv.cache.pool._arena", lambda *_: torch.empty(0))
    with pytest.raises(CapacityError, match="at most 1TiB"):
        PagePool("cpu", (1 << 40) + (1 << 30), [16])
    assert PagePool("cpu", 1 << 40, [16]).available(16) == 1 << 24


def test_no_thread_that_is_to_touch_memory_frees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would do so within torch, at the interpreter's end, too, which aborts the process."""
    later: list[Any] = []
    made: list[weakref.ref[Any]] = []

    def own(n_bytes: int) -> memoryview:
        memory = own_memory(n_bytes)
        made.append(weakref.ref(memory.obj))
        return memory

    monkeypatch.setattr(cache_pool, "own_memory", own)
    monkeypatch.setattr(cache_pool, "begin", lambda *work, name: later.append(work))
    pool = pool_of(4)
    assert later and made[0]() is not None
    del pool
    gc.collect()
    assert made[0]() is None
    for work, *words in later:
        work(*words)
