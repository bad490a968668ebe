"""Sparse slabs are emptied at the edges of steps: enough, never too much, and nothing is lost."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import hypothesis.strategies as st
from hypothesis import given, settings

from flowkv import KV, Sequence
from tests.cache.audit import audit, audit_pool
from tests.cache.test_codecs import check, make, text
from tests.cache.toy import advance, opened
from tests.inside import (
    GRANULE_BYTES,
    GRANULE_MASK,
    CapacityError,
    Defragmentation,
    Defragmented,
    Evicted,
    PagePool,
    codec_of,
)
from tests.inside import kv_plan as plan

PAGE = 64
SIZES = {0: 4, 1: 2, 3: 1}  # granules by codec


def sparse_pool(used: list[tuple[int, int]], slabs: int = 12) -> tuple[PagePool, dict[int, int]]:
    """A pool of slabs with (codec, pages in use) each, and a number in every page."""
    pool = PagePool("cpu", slabs * 16 * max(SIZES.values()) * GRANULE_BYTES, list(SIZES.values()))
    content: dict[int, int] = {}
    full = [pool.allocate(n, pool.slab_granules // n, c) or [] for c, n in sized(used)]
    for pages, (codec, count) in zip(full, used, strict=True):
        for number, page in enumerate(sorted(pages, key=lambda page: page * 7919 % 97)):
            if number < count:
                content[page] = len(content) % 251 + 1
                pool.page_bytes(page, SIZES[codec] * GRANULE_BYTES).fill_(content[page])
            else:
                pool.release(page)
    return pool, content


def sized(used: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(codec, SIZES[codec]) for codec, _ in used]


def carry_out(pool: PagePool, content: dict[int, int], moves: dict[int, int]) -> dict[int, int]:
    """Moves pages; returns what each must hold now."""
    pool.relocate(moves)
    now = {moves.get(page, page): number for page, number in content.items()}
    assert set(pool.live()) == now.keys()
    for page, number in now.items():
        granules = SIZES[page >> 28]
        assert bool((pool.page_bytes(page, granules * GRANULE_BYTES) == number).all())
    return now


SLABS = st.lists(st.tuples(st.sampled_from(sorted(SIZES)), st.integers(1, 20)), max_size=9)


@settings(max_examples=15)
@given(SLABS, st.integers(1, 40), st.sampled_from((1.0, 2.0, 4.0)), st.randoms())
def test_a_plan_keeps_to_its_limits(
    used: list[tuple[int, int]], most: int, gain: float, random: Any
) -> None:
    pool, content = sparse_pool(used)
    fixed = {page for page in content if random.random() < 0.02}
    before = pool.occupancy()
    moves = pool.plan_defragmentation(fixed, most_granules=most, least_gain=gain)
    copied = sum(SIZES[page >> 28] for page in moves)
    assert copied <= most or len(moves) == 1
    assert not fixed & moves.keys()
    assert all(codec_of(old) == codec_of(new) for old, new in moves.items())
    drained = {(page & GRANULE_MASK) // pool.slab_granules for page in moves}
    for number in drained:
        slab = pool._slab(number)
        assert slab.used * slab.granules * gain <= pool.slab_granules
    carry_out(pool, content, moves)
    audit_pool(pool)
    gained = pool.occupancy().empty - before.empty
    assert len(drained) - 1 <= gained <= len(drained), "only the last one may be begun"
    assert pool.fragmentation() <= before.fragmentation + 1e-12


@settings(max_examples=12)
@given(SLABS, st.integers(6, 60))
def test_small_steps_lead_as_far_as_a_large_one(used: list[tuple[int, int]], most: int) -> None:
    pool, content = sparse_pool(used)
    twin, same = sparse_pool(used)
    carry_out(twin, same, twin.plan_defragmentation())
    for _ in range(400):
        moves = pool.plan_defragmentation(most_granules=most)
        content = carry_out(pool, content, moves)
        if not moves:
            break
    audit_pool(pool)
    assert pool.occupancy().empty == twin.occupancy().empty
    assert pool.occupancy().reclaimable == twin.occupancy().reclaimable == 0


@settings(max_examples=12)
@given(SLABS, st.integers(0, 4))
def test_no_more_slabs_than_asked_for(used: list[tuple[int, int]], most: int) -> None:
    pool, content = sparse_pool(used)
    before = pool.occupancy()
    content = carry_out(pool, content, pool.plan_defragmentation(most_slabs=most))
    assert pool.occupancy().empty == before.empty + min(most, before.reclaimable)


def test_what_is_begun_is_not_filled_again() -> None:
    pool, content = sparse_pool([(0, 9), (0, 5), (0, 7)])
    moves = pool.plan_defragmentation(most_granules=8)
    (drained,) = {(page & GRANULE_MASK) // pool.slab_granules for page in moves}
    carry_out(pool, content, moves)
    fresh = pool.allocate(4, 5) or []
    assert drained not in {(page & GRANULE_MASK) // pool.slab_granules for page in fresh}


# ---- in a cache


def eager(kv: KV, **options: Any) -> list[Defragmented]:
    """Makes the cache move pages whenever it is allowed to; returns the events, as they come."""
    options = {"reserve_share": 1.0, "least_fragmentation": 0.0, "least_gain": 1.0} | options
    kv.planner.compactor.policies = {"cpu": Defragmentation(**options)}
    found: list[Defragmented] = []
    kv.bus.subscribe(found.append, Defragmented)
    return found


def churned(pages: int = 2, **options: Any) -> tuple[KV, list[tuple[Sequence, list[int]]]]:
    """A cache of raw and encoded pages, of which every other sequence is gone."""
    kv = make("kv4c", pages=40, recent_tokens=PAGE, max_rows=16, **options)
    prompts = [text(pages * PAGE + 5, seed) for seed in range(12)]
    rows = [(opened(kv, prompt), prompt) for prompt in prompts]
    for seq, prompt in rows[::2]:
        seq.close()
        kv.forget(prompt)
    return kv, rows[1::2]


def test_edges_give_slabs_back_and_say_so() -> None:
    kv, rows = churned(defragment_bytes=0)
    pool = kv.planner.store.pools["cpu"]
    events, before = eager(kv), pool.occupancy()
    assert before.reclaimable > 0
    for _ in range(2 * PAGE):
        for seq, known in rows[:1]:
            advance(kv, [seq], [[5]])
            known.append(5)
    assert events and sum(event.slabs for event in events) > 0
    assert all(event.pages and event.n_bytes and event.seconds > 0 for event in events)
    assert events[-1].fragmentation <= before.fragmentation
    total = kv.metrics.total
    assert total("defragmented_pages_total", device="cpu") == sum(e.pages for e in events)
    assert total("fragmentation", device="cpu") == events[-1].fragmentation
    audit(kv)
    for seq, known in rows:
        check(kv, seq, known)


def test_an_edge_copies_no_more_than_allowed() -> None:
    kv, rows = churned(defragment_bytes=0)
    page = kv.planner.store.forms[0].raw.page_bytes
    events = eager(kv, most_bytes=page)
    for turn in range(3 * PAGE):
        advance(kv, [rows[0][0]], [[turn % 3]])
    assert events and max(event.n_bytes for event in events) <= page


def test_nothing_moves_while_another_step_is_under_way() -> None:
    kv, rows = churned(defragment_bytes=0)
    events = eager(kv)
    step = plan(kv, [rows[1][0]], [0])
    lines = [table.copy() for table in kv.planner.tables.pages]
    advance(kv, [rows[0][0]], [[1] * PAGE])
    assert not events
    own = rows[0][0].row
    for before, now in zip(lines, kv.planner.tables.pages, strict=True):
        others = [row for row in range(len(before)) if row != own]
        width = before.shape[1]
        assert (before[others] == now[others, :width]).all()
    step.rollback()
    advance(kv, [rows[0][0]], [[1] * PAGE])
    assert events


def test_nothing_moves_if_it_is_switched_off() -> None:
    kv, rows = churned(defragment_bytes=0)
    seen: list[Defragmented] = []
    kv.bus.subscribe(seen.append, Defragmented)
    for _ in range(3):
        advance(kv, [rows[0][0]], [[1] * PAGE])
    assert not seen and not kv.planner.compactor.policies
    assert kv.defragment() > 0 and seen, "on demand it still works"


def test_room_is_made_by_moving_before_anything_known_is_evicted() -> None:
    lost: dict[int, int] = {}
    for most_bytes in (0, 1 << 20):
        kv, rows = churned(6, defragment_bytes=most_bytes)
        evicted: list[Evicted] = []
        kv.bus.subscribe(evicted.append, Evicted)
        for seq, known in rows[2:]:
            seq.close()  # known and idle: these pages are what could be evicted
            if seq in (rows[2][0], rows[3][0]):
                kv.forget(known)
        kv.planner.store.tails.drop()  # which go before all others
        pool = kv.planner.store.pools["cpu"]
        granules = kv.planner.store.forms[0].raw.granules
        assert pool.occupancy().reclaimable
        with kv.lock, suppress(CapacityError):
            pages = kv.planner.allocate({(0, 0): pool.available(granules) + 1})[0, 0]
            for page in pages:
                pool.release(page)
        lost[most_bytes] = len(evicted)
        audit(kv)
        for seq, known in rows[:2]:
            check(kv, seq, known)
        kv.close()
    assert lost[1 << 20] == 0 < lost[0]


@settings(max_examples=12)
@given(
    codec=st.sampled_from(("kv8", "kv4c", "auto")),
    calls=st.lists(
        st.tuples(st.sampled_from("oaaaacccf"), st.integers(0, 7), st.integers(1, 150)),
        min_size=8,
        max_size=24,
    ),
)
def test_whatever_moves_every_sequence_keeps_its_content(
    codec: str, calls: list[tuple[str, int, int]]
) -> None:
    kv = make(codec, pages=24, recent_tokens=PAGE, warm_tokens=PAGE, max_rows=8)
    eager(kv, most_bytes=1 << 17)
    rows: list[tuple[Sequence, list[int]]] = []
    for name, choice, amount in calls:
        seq, known = rows[choice % len(rows)] if rows else (None, [])
        if seq is None or (name == "o" and len(rows) < 6):
            tokens = text(amount, choice)
            rows.append((kv.open(tokens), tokens))
            seq, known = rows[-1]
            name = "a"
        try:
            if name == "c":
                seq.close()
                rows = [row for row in rows if row[0] is not seq]
                if amount % 2:
                    kv.forget(known)
            elif name == "f" and len(rows) < 6:
                rows.append((kv.fork(seq), list(known)))
            else:
                fresh = known[seq.length :] or [choice] * amount
                advance(kv, [seq], [fresh])
                known[seq.length - len(fresh) :] = fresh
        except CapacityError:
            pass
        audit(kv)
        for seq, known in rows:
            check(kv, seq, known[: seq.length], times=4.0)
    kv.close()
