"""Suspended sequences: what is copied, when, and that every byte comes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowkv import KV, Sequence
from flowkv.testing import MemoryTier
from tests.inside import CapacityError, swap
from tests.inside import cache_pool as pool

from .audit import audit, audit_empty
from .links import evict
from .toy import PAGE, advance, check_content, content, geometry, make_kv, opened, published, simple

TEXT = [1, 2, 3] * 9  # three full pages, and three tokens


def copied(seq: Sequence) -> int:
    """Pages whose bytes lie in host memory for a suspended sequence."""
    assert seq.suspended is not None
    pages = [page for pages in seq.suspended for page in pages if page is not None]
    return sum(page.content is not None for page in pages)


def test_a_known_page_is_copied_only_once_it_leaves() -> None:
    kv = make_kv(simple(), pages=16)
    seqs = [opened(kv, TEXT) for _ in range(3)]
    n_bytes = [kv.suspend(seq) for seq in seqs]
    page = kv.planner.store.forms[0].raw.page_bytes
    assert n_bytes == [4 * page, page, page]  # what they share is counted once
    assert kv.planner.aside_bytes == 6 * page
    assert [copied(seq) for seq in seqs] == [1, 1, 1]  # the open pages
    audit(kv)

    kv.resume(seqs[0])
    assert kv.planner.aside_bytes == 5 * page  # the others may still have to
    evict(kv)  # what one of them uses stays
    assert [copied(seq) for seq in seqs[1:]] == [1, 1]
    seqs[0].close()
    evict(kv)
    assert [copied(seq) for seq in seqs[1:]] == [4, 4]
    first, second = (seq.suspended[0] for seq in seqs[1:] if seq.suspended is not None)
    assert [a is b for a, b in zip(first, second, strict=True)] == [True, True, True, False]
    audit(kv)

    for seq in seqs[1:]:
        kv.resume(seq)
        check_content(kv, seq, TEXT)
        audit(kv)
    assert kv.planner.aside_bytes == 0
    assert kv.explain(TEXT).known == 3 * PAGE  # known again


def test_nothing_is_copied_back_that_is_still_there() -> None:
    kv = make_kv(simple(), pages=16)
    seq = opened(kv, TEXT)
    before = kv.planner.tables.pages[0][seq.row, :3].tolist()
    kv.suspend(seq)
    assert kv.planner.store.allocator.room("cpu") == kv.planner.store.pool(0).capacity_granules
    kv.resume(seq)
    assert kv.planner.tables.pages[0][seq.row, :3].tolist() == before
    assert all(block is not None for block in seq.blocks[0][:3])
    advance(kv, [seq], [[7] * 9])
    check_content(kv, seq, TEXT + [7] * 9)


def test_what_is_there_is_not_given_up_for_the_rest_of_it() -> None:
    kv = make_kv(simple(), pages=8)
    seq = opened(kv, TEXT)
    kv.suspend(seq)
    other = opened(kv, [5] * 4 * PAGE)  # beside its three known pages there is one page left
    kv.resume(seq)
    check_content(kv, seq, TEXT)
    audit(kv)
    kv.suspend(seq)
    third = opened(kv, [9] * PAGE)
    with pytest.raises(CapacityError):
        kv.resume(seq)
    audit(kv)  # it holds nothing
    third.close()
    kv.resume(seq)
    check_content(kv, seq, TEXT)
    other.close()


@pytest.mark.parametrize("how", ["forget", "evict", "defragment"])
def test_closing_a_suspended_sequence_leaves_nothing(how: str) -> None:
    kv = make_kv(pages=40)
    seqs = [opened(kv, TEXT), opened(kv, TEXT + [4] * 20)]
    for seq in seqs:
        kv.suspend(seq)
    acts: dict[str, Callable[[], object]] = {
        "forget": kv.invalidate,
        "evict": lambda: evict(kv),
        "defragment": kv.defragment,
    }
    acts[how]()
    audit(kv)
    for seq in seqs:
        seq.close()
        audit(kv)
    assert kv.planner.aside_bytes == 0
    kv.invalidate()
    audit_empty(kv)


@pytest.mark.parametrize("gone_before", [False, True])
@pytest.mark.parametrize("how", ["prompt", "tenant", "model"])
def test_what_was_erased_meanwhile_does_not_become_known_again(how: str, gone_before: bool) -> None:
    kv = make_kv(simple(), pages=16, tiers=[MemoryTier()])
    seq, other = opened(kv, TEXT), opened(kv, [4] * 20)
    for one in (seq, other):
        kv.suspend(one)
    if gone_before:  # to the tier
        evict(kv)
    if how == "model":
        kv.invalidate()
    else:
        kv.forget(TEXT if how == "prompt" else None)
    kv.resume(seq)
    check_content(kv, seq, TEXT)
    assert kv.explain(TEXT).known == 0
    kv.resume(other)
    assert kv.explain([4] * 20).known == (16 if how == "prompt" else 0)


def test_long_sequences_move_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = make_kv(simple(), pages=16)
    seq = opened(kv, TEXT * 3)
    n_bytes = kv.planner.store.forms[0].raw.page_bytes
    monkeypatch.setattr(pool, "AT_ONCE_BYTES", 4 * n_bytes)
    assert [len(range(11)[part]) for part in pool._parts(11, n_bytes)] == [4, 4, 3]
    assert len(list(pool._parts(2, 8 * n_bytes))) == 2
    kv.invalidate()  # nobody else knows it
    kv.suspend(seq)
    assert copied(seq) == 11
    kv.resume(seq)
    check_content(kv, seq, TEXT * 3)


def test_bytes_that_others_computed_differently_are_not_taken_instead() -> None:
    """Rounding may differ with what else is in a step: a sequence goes on over its own bytes."""
    kv = make_kv(simple(), pages=16)
    seq = opened(kv, TEXT, tag=1)
    mine = content(kv, seq, 0)
    kv.suspend(seq)
    evict(kv)
    other = opened(kv, TEXT, tag=2)  # the same tokens, other bytes
    theirs = content(kv, other, 0)
    kv.resume(seq)
    for got, want, wrong in zip(content(kv, seq, 0), mine, theirs, strict=True):
        assert torch.equal(got, want) and not torch.equal(got, wrong)
    audit(kv)
    kv.suspend(seq)
    other.close()
    evict(kv)
    kv.resume(seq)
    assert all(map(torch.equal, content(kv, seq, 0), mine))
    assert kv.explain(TEXT).known == 3 * PAGE  # nobody else knew it by now


def test_a_page_that_is_encoded_meanwhile_comes_back_raw() -> None:
    kv = make_kv(simple(head_dim=64), pages=16, codec="kv8", recent_tokens=4 * PAGE)
    seq = opened(kv, TEXT)
    mine = content(kv, seq, 0)
    kv.suspend(seq)
    longer = opened(kv, TEXT[: 3 * PAGE] + [4] * 5 * PAGE)  # what they share becomes due
    assert any(block.page >> 24 for block in kv.planner.store.index) or longer.fidelity
    audit(kv)
    assert copied(seq) == 4
    kv.resume(seq)
    assert all(map(torch.equal, content(kv, seq, 0), mine))


def fails_at(nth: int, real: Callable[..., Any]) -> Callable[..., Any]:
    """`real`, whose n-th call finds no memory."""
    calls: list[int] = []

    def call(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == nth:
            raise torch.OutOfMemoryError("no memory on the device")
        return real(*given)

    return call


@pytest.mark.parametrize("nth", [1, 2])
def test_a_copy_that_fails_suspends_nothing(nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = make_kv(geometry(), pages=20)
    seq = opened(kv, TEXT)
    before = kv.planner.copied_bytes
    monkeypatch.setattr(swap, "download", fails_at(nth, swap.download))
    with pytest.raises(torch.OutOfMemoryError):
        kv.suspend(seq)
    assert seq.suspended is None and kv.planner.aside_bytes == 0
    assert not kv.planner.store.swapped
    assert nth == 2 or kv.planner.copied_bytes == before
    audit(kv)
    kv.suspend(seq)
    audit(kv)
    kv.resume(seq)
    check_content(kv, seq, TEXT)


@pytest.mark.parametrize("evicted", [True, False])
@pytest.mark.parametrize("nth", [1, 2])
def test_a_copy_back_that_fails_holds_nothing(
    nth: int, evicted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = make_kv(geometry(), pages=20)
    seq = opened(kv, TEXT)
    kv.suspend(seq)
    if evicted:
        evict(kv)
    aside, used = kv.planner.aside_bytes, kv.planner.store.pool(0).used_bytes()
    monkeypatch.setattr(swap, "upload", fails_at(nth, swap.upload))
    for _ in range(40):  # more than there is room for
        with pytest.raises(torch.OutOfMemoryError):
            kv.resume(seq)
        audit(kv)
        monkeypatch.setattr(swap, "upload", fails_at(nth, pool.upload))
    assert kv.planner.store.pool(0).used_bytes() == used and kv.planner.aside_bytes == aside
    assert seq.suspended is not None
    monkeypatch.undo()
    kv.resume(seq)
    check_content(kv, seq, TEXT)


def run(kv: KV, seqs: list[Sequence], events: list[tuple[int, int]]) -> None:
    """Sequences go and come back while others take their pages."""
    asleep = [False] * len(seqs)
    for which, what in events:
        seq = seqs[which % len(seqs)]
        if what == 0:
            evict(kv, keep=which)
        elif what == 1:
            kv.defragment()
        elif what == 2:
            published(kv, [9, which] * 20, tag=5)
        elif not asleep[which % len(seqs)]:
            kv.suspend(seq)
            asleep[which % len(seqs)] = True
        else:
            kv.resume(seq)
            asleep[which % len(seqs)] = False
        audit(kv)
    for seq, away in zip(seqs, asleep, strict=True):
        if away:
            kv.resume(seq)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12),
    st.lists(st.integers(1, 40), min_size=2, max_size=3),
)
def test_every_byte_comes_back_whatever_happens_meanwhile(
    events: list[tuple[int, int]], lengths: list[int]
) -> None:
    kv = make_kv(geometry(), pages=48)
    texts = [([1, 2, 3] * 14)[:length] for length in lengths]
    seqs = [opened(kv, text) for text in texts]
    run(kv, seqs, events)
    for seq, text in zip(seqs, texts, strict=True):
        check_content(kv, seq, text)
        seq.close()
    kv.invalidate()
    audit_empty(kv)
    kv.close()
