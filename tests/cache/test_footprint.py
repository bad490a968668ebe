"""Pages that are free, held, and would come free, beside counting them one by one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowkv import KV, Sequence
from tests.inside import CapacityError, Footprint

from .links import Link, evict
from .toy import PAGE, advance, geometry, make_kv, opened, published, settle, simple, write

TEXTS = ([1, 2, 3] * 20, [1, 2, 3] * 5 + [4] * 30, [5] * 40, [6])


def granules_alone(kv: KV, seq: Sequence) -> int:
    """Granules of the pages that nobody else uses, one by one."""
    store, total = kv.planner.store, 0
    for g, blocks in enumerate(seq.blocks):
        line = kv.planner.tables.pages[g][seq.row, : len(blocks)].tolist()
        for page, block in zip(line, blocks, strict=True):
            if page >= 0 and (block is None or block.holds == 1):
                total += store.forms[g].layout(page).granules
    return total


@pytest.mark.parametrize("codec", ["raw", "kv8"])
@settings(max_examples=12)
@given(st.data())
def test_what_is_counted_at_a_glance_is_what_there_is(codec: str, data: st.DataObject) -> None:
    kv = make_kv(geometry(heads=16), pages=80, codec=codec, recent_tokens=PAGE)
    footprint = Footprint(kv.planner)
    seqs: list[Sequence] = []
    for act in data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=12)):
        if act < 2 and len(seqs) < 6:
            text = data.draw(st.sampled_from(TEXTS))
            seqs.append(opened(kv, text[: data.draw(st.integers(1, len(text)))]))
        elif act == 2 and seqs:
            seqs.pop(data.draw(st.integers(0, len(seqs) - 1))).close()
        elif act == 3 and seqs:
            advance(kv, [data.draw(st.sampled_from(seqs))], [[7] * data.draw(st.integers(1, 9))])
        elif act == 4:
            evict(kv)
        else:
            published(kv, data.draw(st.sampled_from(TEXTS)))
        settle(kv)
        unit = footprint._unit["cpu"]
        for seq in seqs:
            assert footprint.alone(seq) == round(granules_alone(kv, seq) / unit)
        pool, before = kv.planner.store.pool(0), footprint.room()
        assert before == int(kv.planner.store.allocator.room("cpu") / unit)
        evict(kv)  # takes what nobody uses, and all of it was counted as free
        assert footprint.room() == before
        assert kv.planner.store.allocator.room("cpu") == pool.capacity_granules - pool.used_granules
    kv.close()


@pytest.mark.parametrize("codec", ["raw", "kv8"])
@pytest.mark.parametrize("window", [12, 200])
def test_what_a_sequence_will_take_is_what_it_takes(codec: str, window: int) -> None:
    shape = geometry(heads=16, window=window)
    kv = make_kv(shape, pages=80, codec=codec, recent_tokens=2 * PAGE)
    footprint = Footprint(kv.planner)
    for length in (1, PAGE, 5 * PAGE + 3, 40 * PAGE):
        seq = opened(kv, [i % 7 for i in range(length)])
        held = kv.planner.store.pool(0).capacity_granules - kv.planner.store.allocator.room("cpu")
        assert footprint.granules(length) == {"cpu": held}
        seq.close()
        kv.invalidate()


def test_pages_are_those_of_the_usual_length() -> None:
    kv = make_kv(geometry(heads=16, window=12), pages=40)
    footprint = Footprint(kv.planner)
    long = footprint.total  # behind the window, half of the layers take nothing
    footprint.observe_length(30)
    assert footprint.total < long
    short = footprint.total
    footprint.observe_length(33)
    assert footprint.total == short  # about the same
    for _ in range(80):
        footprint.observe_length(4000)
    assert footprint.total >= long


@pytest.mark.parametrize("codec", ["raw", "kv8"])
@pytest.mark.parametrize("chunk", [5, 16, 100])
def test_the_longest_sequence_fits_and_a_longer_one_does_not(codec: str, chunk: int) -> None:
    shape = simple(head_dim=64)
    kv = make_kv(shape, pages=12, codec=codec, recent_tokens=PAGE)
    most = Footprint(kv.planner).longest(chunk)

    def compute(length: int) -> None:
        seq = kv.open([i % 7 for i in range(length)])
        try:
            for step in kv.prefill([seq], chunk=chunk):
                write(step)
        finally:
            seq.close()
            kv.invalidate()

    compute(most)
    with pytest.raises(CapacityError):
        compute(most + 2 * PAGE + chunk)


def test_of_a_prompt_those_pages_count_that_others_use() -> None:
    kv = make_kv(simple(), pages=30)
    footprint = Footprint(kv.planner)
    text = [1, 2, 3] * 10
    probe = kv._lineless(kv.planner, None, ())
    probe.note(text)
    assert footprint.held(probe, 3) == 0
    seq = opened(kv, text[:20])
    assert footprint.held(probe, 3) == 2
    seq.close()
    assert footprint.held(probe, 3) == 0  # they are there, and can be had


def test_pages_on_their_way_count_as_the_row_s() -> None:
    link = Link(per_poll=0)
    kv = make_kv(simple(), pages=30, tiers=[link])
    text = [1, 2, 3] * 10
    published(kv, text)
    evict(kv)
    seq = kv.open(text, wait=False)
    assert seq.restoration is not None and seq.length == 0
    assert Footprint(kv.planner).alone(seq) == 4
