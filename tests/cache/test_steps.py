"""Steps: what they reserve, commit and roll back, and what they refuse."""

from __future__ import annotations

import gc
from contextlib import ExitStack, suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowkv import KV, Salt, Sequence, Step, kernels
from flowkv.kernels import Pages, Ragged
from tests.cache.audit import audit, audit_empty
from tests.cache.toy import (
    PAGE,
    advance,
    check_content,
    content,
    keys_values,
    make_kv,
    opened,
    prefill,
    published,
    settle,
    simple,
    write,
)
from tests.inside import (
    CapacityError,
    ConfigError,
    GeometryError,
    StateError,
    TokenError,
    current_step,
)
from tests.inside import kv_plan as plan


@pytest.fixture
def kv() -> KV:
    return make_kv()


def test_what_a_step_says(kv: KV) -> None:
    a, b = opened(kv, [5] * 11), kv.open([6] * 3)
    with kv.step([a, b], [[1, 2], [6, 6, 6]]) as step:
        assert step.tokens.tolist() == [[1, 2, 6, 6, 6]] and step.tokens.dtype == torch.int64
        assert step.positions.tolist() == [[11, 12, 0, 1, 2]]
        assert step.counts.tolist() == [2, 3] and step.open and current_step() is step
        batch = step.batch(1)
        assert (batch.most_new, batch.most_length) == (3, 13)
        assert batch.starts.tolist() == [0, 2, 5] and batch.lengths.tolist() == [13, 3]
        write(step)
    assert not step.open and current_step() is None and (a.length, b.length) == (13, 3)
    step.commit()
    step.rollback()
    assert (a.length, b.length) == (13, 3)
    assert a.tokens.tolist() == [5] * 11 + [1, 2]


class Timer:
    """A device that is done when it is asked for the third time."""

    def __init__(self) -> None:
        self.calls = list[str]()

    def stop(self) -> None:
        self.calls.append("stop")

    def seconds(self) -> float | None:
        self.calls.append("asked")
        return 0.5 if len(self.calls) > 3 else None


@pytest.mark.at_once
def test_a_prompt_is_timed_by_its_device(kv: KV) -> None:
    """Its time is known some steps later; what the host stood still for is left out."""
    told, timer, seq = list[tuple[int, float, float]](), Timer(), opened(kv, [5] * 11)
    kv.planner.measured = lambda *given: told.append(given)
    kv.planner.measure_later(timer, 40, 0.1, 20.0)
    for turn in range(4):
        assert not told or turn > 2
        advance(kv, [seq], [[1]])
    assert told == [(40, pytest.approx(0.4), 20.0)]
    assert timer.calls == ["stop", *["asked"] * 3]


def test_a_step_that_waited_or_ran_twice_is_not_timed(kv: KV) -> None:
    """How long the device computed meanwhile is not known."""
    told = list[tuple[int, float, float]]()
    kv.planner.measured = lambda *given: told.append(given)
    for number, change in enumerate(("none", "waits", "runs again")):
        seq = kv.open([number] * 30, reuse=False)
        for step in kv.prefill([seq], chunk=40):
            write(step)
            step._timer = Timer()
            if change == "waits":
                step._waited_s = 1.0
            elif change == "runs again":
                step.rerun()
        for _ in range(4):
            advance(kv, [seq], [[1]])
        seq.close()
    assert [tokens for tokens, *_ in told] == [30]


def test_copies_to_the_pages_of_a_step_are_joined_under_the_lock(kv: KV) -> None:
    """Other threads may queue some meanwhile."""
    seq, held, pool = opened(kv, [5] * 11), list[bool](), kv.planner.store.pool(0)
    copies: Any = SimpleNamespace(reuse=int, free=lambda *_: None)
    copies.join = lambda: held.append(kv.planner.guard._is_owned())
    pool.copies = copies
    advance(kv, [seq], [[1]])
    pool.copies = None
    assert held and all(held)


def test_prefill_goes_in_chunks_and_stops_at_what_is_known(kv: KV) -> None:
    published(kv, range(20))
    a, b = kv.open(range(40)), kv.open([7] * 9)
    sizes = []
    for step in kv.prefill([a, b], chunk=10):
        sizes.append(step.counts.tolist())
        write(step)
    assert sizes == [[10, 9], [10], [4]] and (a.reused, b.reused) == (16, 0)
    check_content(kv, a, range(40))


def test_chunks_of_nothing_are_refused(kv: KV) -> None:
    with pytest.raises(ConfigError, match="chunk=0"):
        next(kv.prefill([kv.open([1, 2])], chunk=0))


def test_leaving_a_prefill_early_rolls_the_chunk_back(kv: KV) -> None:
    seq = kv.open(range(40))
    for step in kv.prefill([seq], chunk=10):
        write(step)
        if seq.length == 20:
            break
    gc.collect()
    assert seq.length == 20 and current_step() is None
    audit(kv)
    prefill(kv, seq)
    check_content(kv, seq, range(40))


def test_an_exception_rolls_back_tokens_and_pages_too(kv: KV) -> None:
    seq = opened(kv, range(12))
    used = kv.stats()["devices"]["cpu"]["used_bytes"]
    with pytest.raises(ZeroDivisionError), kv.step([seq], [[1] * 30]) as step:
        write(step)
        raise ZeroDivisionError
    assert (seq.length, seq.tokens.tolist()) == (12, list(range(12)))
    assert kv.stats()["devices"]["cpu"]["used_bytes"] == used
    advance(kv, [seq], [[2] * 30])  # the keys of the step that failed are forgotten as well
    check_content(kv, seq, [*range(12)] + [2] * 30)
    seq.close()
    with kv.open([*range(12)] + [1] * 30) as other:
        assert other.reused == PAGE


def test_a_dropped_step_is_rolled_back(kv: KV) -> None:
    seq = opened(kv, range(6))
    step = kv.step([seq], [[1] * 30])
    with pytest.raises(StateError, match="in a step already"):
        plan(kv, [seq], [1])
    del step
    gc.collect()
    assert seq.tokens.tolist() == list(range(6))
    audit(kv)
    advance(kv, [seq], [[2] * 30])
    check_content(kv, seq, [*range(6)] + [2] * 30)


def test_closing_inside_a_step_waits_for_its_end(kv: KV) -> None:
    a, b = opened(kv, range(12)), opened(kv, [9] * 4)
    with kv.step([a, b], [[1], [2]]) as step:
        a.close()
        assert a.closed
        other = kv.open([4])  # gets a line and pages of its own
        assert other.row not in (a.row, b.row)
        write(step)
    assert a.length == 0 and a.row == kv.planner.tables.nowhere
    check_content(kv, b, [9] * 4 + [2])
    audit(kv)
    with pytest.raises(StateError, match="is closed"):
        kv.step([a], [[1]])


def test_closing_inside_a_step_that_fails_or_is_dropped(kv: KV) -> None:
    for leave in ("raise", "drop"):
        seq = opened(kv, [3] * 12)
        step = kv.step([seq], [[1] * 9])
        seq.close()
        if leave == "raise":
            step.rollback()
        del step
        gc.collect()
        audit(kv)
    kv.invalidate()
    audit_empty(kv)


@pytest.mark.parametrize("act", ["truncate", "suspend", "fork", "resume", "save_state"])
def test_a_sequence_in_a_step_is_left_alone(kv: KV, act: str) -> None:
    seq = opened(kv, range(12))
    calls = {
        "truncate": lambda: kv.truncate(seq, 3),
        "suspend": lambda: kv.suspend(seq),
        "fork": lambda: kv.fork(seq),
        "resume": lambda: kv.resume(seq),
        "save_state": lambda: kv.save_state(seq, {}),
    }
    with kv.step([seq], [[1]]) as step:
        with pytest.raises(StateError):
            calls[act]()
        kv.truncate(seq, 12)  # changes no page: forgets tokens that are not computed
        assert kv.defragment() == 0
        seq.note([1])
        write(step)
    check_content(kv, seq, [*range(12), 1])


# ---- refusals


def test_rows_of_a_step_must_be_open_distinct_and_of_one_cache(kv: KV) -> None:
    seq, other = kv.open([1]), make_kv()
    with pytest.raises(StateError, match="twice"):
        kv.step([seq, seq], [[1], [1]])
    with pytest.raises(StateError, match="different models or caches"):
        kv.step([seq, other.open([1])], [[1], [1]])
    kv.suspend(seq)
    with pytest.raises(StateError, match="is suspended"):
        kv.step([seq], [[1]])
    kv.resume(seq)
    with pytest.raises(GeometryError, match="1 rows with 2 counts"):
        kv.step([seq], [[1], [2]])
    with pytest.raises(GeometryError, match="1 rows with 2 counts"):
        plan(kv, [seq], [1, 1])
    with pytest.raises(GeometryError, match="none of them negative"):
        plan(kv, [seq], [-1])
    advance(kv, [seq], [[1]])


def test_tokens_are_checked(kv: KV) -> None:
    for wrong in ([-1], [1 << 32], [1.5], [[1, 2]], None, [True], torch.tensor([[1]])):
        with pytest.raises(TokenError):
            kv.open(wrong)
    seq = kv.open(torch.tensor([1, 2, 3]))
    for wrong in ([-1], [1 << 32], [0.5], [[1], [2]]):
        with pytest.raises(TokenError):
            kv.step([seq], [wrong])
        with pytest.raises(TokenError):
            kv.step([seq], [torch.tensor(wrong)])
    with pytest.raises(TokenError, match="differ from its prompt at position 0"):
        kv.step([seq], [[1, 3]])
    advance(kv, [seq], [[1, 2, 3, (1 << 32) - 1]])
    assert seq.tokens.tolist() == [1, 2, 3, (1 << 32) - 1]


def test_more_sequences_than_rows_are_refused() -> None:
    kv = make_kv(max_rows=3)
    seqs = [kv.open([i]) for i in range(3)]
    for call in (lambda: kv.open([9]), lambda: kv.fork(seqs[0])):
        with pytest.raises(CapacityError, match="3 sequences are open"):
            call()
    assert kv.explain([1, 2]).known == 0 and kv.forget([1]) == 0, "asking needs no row"
    seqs[0].close()
    kv.open([9]).close()


def test_a_step_that_does_not_fit_changes_nothing() -> None:
    kv = make_kv(simple(), pages=4)
    a, b = opened(kv, [1] * 16), opened(kv, [2] * 6)
    with pytest.raises(CapacityError, match=r"2 pages of 4KiB do not fit: .* in use"):
        kv.step([a, b], [[1], [2] * 3])
    assert (a.length, b.length) == (16, 6)
    advance(kv, [b], [[2] * 2])
    a.close()
    advance(kv, [b], [[2] * 8])
    check_content(kv, b, [2] * 16)


def test_a_pool_that_is_too_small_is_refused() -> None:
    with pytest.raises(CapacityError, match="Give it at least"):
        make_kv(gpu=4096)


def test_steps_of_nothing(kv: KV) -> None:
    seq = kv.open([])
    with kv.step([], []) as step:
        assert step.tokens.shape == (1, 0) and step.positions.shape == (1, 0)
    with kv.step([seq], [[]]):
        pass
    assert seq.length == 0 and list(kv.prefill([seq])) == []
    assert content(kv, seq, 0)[0].shape == (0, 2, 8)


# ---- tokens told elsewhere


def test_planned_steps_publish_once_their_tokens_are_told(kv: KV) -> None:
    seq = kv.open([])
    for tokens in ([1] * 5, [2] * 5, [3] * 8):
        step = plan(kv, [seq], [len(tokens)])
        assert step.tokens is None
        for g, group in enumerate(step.groups):
            for layer in group.layers:
                zeros = (
                    torch.zeros(len(tokens), group.kv_heads, dim)
                    for dim in (group.head_dim, group.value_dim)
                )
                kernels.append(*zeros, step.pages(layer), step.batch(g))
        step.commit()
        if tokens[0] == 2:
            seq.note([1] * 5 + [2] * 5)
    assert kv.explain([1] * 5 + [2] * 5).known == PAGE
    seq.close()


def test_tokens_of_a_step_are_not_taken_for_those_of_a_gap(kv: KV) -> None:
    """Tokens whose past is unknown must not be noted as if they began the sequence."""
    seq = kv.open([])
    plan(kv, [seq], [3]).commit()
    step = kv.step([seq], [[7] * 20])
    for layer in (0, 1):
        step.pages(layer)
    step.commit()
    assert seq.length == 23 and seq.tokens.tolist() == []
    assert kv.stats()["blocks"] == 0


# ---- what is never shared


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("layer", [0, 1])
def test_non_finite_keys_are_never_published_and_warned_of_once(
    kv: KV, value: float, layer: int
) -> None:
    def spoiled() -> None:
        seq = kv.open([4] * 20, reuse=False)
        group, index = kv.planner.locate(layer)
        with kv.step([seq], [[4] * 20]) as step:
            write(step)
            layout = kv.planner.store.forms[group].raw
            page = int(step.batch(group).table[seq.row, 1])
            raw = kv.planner.store.pool(group).page_bytes(page, layout.page_bytes)
            raw.view(torch.float32)[layout.run_offset_bytes(index, 0) // 4 + 9] = value
        advance(kv, [seq], [[5] * 20])
        seq.close()

    with pytest.warns(UserWarning, match="holds NaN or infinity") as caught:
        spoiled()
        spoiled()
    assert len(caught) == 1
    audit(kv)
    assert kv.explain([4] * 20 + [5] * 20).known <= PAGE
    published(kv, [4] * 30)
    with kv.open([4] * 30) as seq:
        check_content(kv, seq, [4] * seq.length)


def test_a_warning_that_raises_leaves_whole_what_was_published_before_it(kv: KV) -> None:
    """The sequence holds the pages before the one that is no number, and no other one's."""
    seq = kv.open([4] * 20, reuse=False)
    with pytest.raises(UserWarning, match="holds NaN"):
        with kv.step([seq], [[4] * 20]) as step:
            write(step)
            layout = kv.planner.store.forms[0].raw
            page = int(step.batch(0).table[seq.row, 1])
            raw = kv.planner.store.pool(0).page_bytes(page, layout.page_bytes)
            raw.view(torch.float32)[layout.run_offset_bytes(0, 0) // 4 + 9] = float("nan")
        settle(kv)
    assert all(block.page >= 0 for blocks in seq.blocks for block in blocks if block is not None)
    other = opened(kv, [4] * 20)
    seq.close()
    audit(kv)
    check_content(kv, other, [4] * 20)
    other.close()


def test_large_finite_numbers_are_published(kv: KV) -> None:
    seq = kv.open([4] * 20)
    with kv.step([seq], [[4] * 20]) as step:
        for g, group in enumerate(step.groups):
            for layer in group.layers:
                huge = (
                    torch.full((20, group.kv_heads, dim), 3e38)
                    for dim in (group.head_dim, group.value_dim)
                )
                kernels.append(*huge, step.pages(layer), step.batch(g))
    assert kv.explain([4] * 20).known == 16


def test_what_a_page_held_before_is_neither_stored_nor_mistaken_for_keys() -> None:
    """Pages of one layer are smaller than a granule: the rest is padding, and is blanked."""
    kv = make_kv(simple(), pages=4)
    kv.planner.store.pools["cpu"].arena.fill_(255)  # NaNs everywhere
    with opened(kv, [1] * 9) as seq:
        (block, _) = seq.blocks[0]
        raw = kv.planner.store.pool(0).page_bytes(block.page, 4096)
        used = kv.planner.store.forms[0].raw.stripe_bytes
        assert used == 512 and not raw[used:].any() and raw[:used].any()
        check_content(kv, seq, [1] * 9)


def test_salts_keep_prompts_apart(kv: KV) -> None:
    cat, dog = (Salt(3, bytes([i]) * 32) for i in (1, 2))
    published(kv, [1] * 20, salts=[cat], tag=1)
    published(kv, [1] * 20, salts=[dog], tag=2)
    published(kv, [1] * 20)
    for salts, tag in (([cat], 1), ([dog], 2), ([], 0)):
        with kv.open([1] * 20, salts=salts) as seq:
            assert seq.reused == 16
            check_content(kv, seq, [1] * 16, tag)
    with kv.open([1] * 20, salts=[cat, dog]) as seq:
        assert seq.reused == 0
    assert kv.warm([1] * 20, salts=[cat]) == 16
    assert kv.pin([1] * 20, salts=[cat]) == 16
    assert kv.pin([1] * 20, salts=[cat], pinned=False) == 16
    assert kv.forget([1] * 20, salts=[dog]) == 4
    assert kv.explain([1] * 20, salts=[dog]).known == 0
    assert kv.explain([1] * 20, salts=[cat]).known == 16


@pytest.mark.parametrize("n", [0, 2, 4])
def test_tensors_of_another_number_of_tokens_are_refused(kv: KV, n: int) -> None:
    with kv.step([kv.open([5] * 2), kv.open([6])], [[5, 5], [6]]) as step:
        group = kv.geometry.groups[0]
        k, v, q = (torch.ones(n, group.kv_heads, group.head_dim) for _ in range(3))
        with pytest.raises(GeometryError, match="in a step of 3 new tokens"):
            step.write(0, k, v)
        with pytest.raises(GeometryError, match="in a step of 3 new tokens"):
            step.read(0, q)
        step.rollback()


def decoded(kv: KV, rows: dict[Sequence, list[int]], last: Step | None, token: int) -> Step:
    """One more token of each row, attended to, in a step that may go on where another ended."""
    step = plan(kv, list(rows), [1] * len(rows), last)
    step.give(np.full(len(rows), token, np.uint32))
    for known in rows.values():
        known.append(token)
    each = [keys_values(kv.geometry, 0, known) for known in rows.values()]
    q = torch.ones(len(rows), 2, 8)
    found = step.attend(0, q, *(torch.cat([kv[i][-1:] for kv in each]) for i in (0, 1)))
    for one, (k, v) in zip(found, each, strict=True):
        wanted = torch.softmax(k[:, 0].sum(1) * 8**-0.5, 0) @ v[:, 0]
        assert torch.allclose(one, wanted.expand(2, -1), atol=1e-5)
    step.commit()
    return step


@pytest.mark.at_once
def test_steps_of_the_same_rows_keep_what_was_prepared_until_the_longest_begins_a_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepared, prepare = [], kernels.prepare_decode

    def watched(pages: Pages, batch: Ragged, window: int | None) -> Any:
        prepared.append(batch.most_length)
        return prepare(pages, batch, window)

    monkeypatch.setattr(kernels, "prepare_decode", watched)
    with make_kv(simple()) as kv:
        rows = {opened(kv, [5] * 3): [5] * 3, opened(kv, [6]): [6]}
        last = None
        for _ in range(2 * PAGE):
            last = decoded(kv, rows, last, 9)
        assert prepared == [4, 9, 17]
        for seq, known in rows.items():
            check_content(kv, seq, known)
        audit(kv)


CHANGES = (
    *("nothing", "fork", "tables", "suspend", "advance", "roll back", "close", "reopen"),
    "checking",
)


@given(
    change=st.sampled_from(CHANGES),
    before=st.integers(0, PAGE + 1),
    then=st.integers(1, PAGE),
    count=st.integers(1, 3),
)
def test_a_step_after_another_writes_where_a_planned_one_would(
    change: str, before: int, then: int, count: int
) -> None:
    with make_kv(simple(), pages=96) as kv, ExitStack() as stack:
        prompts = [[i + 1] * (2 + 3 * i) for i in range(count)]
        rows = {opened(kv, prompt): list(prompt) for prompt in prompts}
        first, last = next(iter(rows)), None
        for i in range(before + then):
            if i == before:
                match change:
                    case "fork":
                        known, twin = [*rows[first], 77], kv.fork(first)
                        advance(kv, [twin], [[77]])
                        check_content(kv, twin, known)
                    case "tables":
                        opened(kv, [50] * (PAGE * 70))
                    case "suspend":
                        kv.suspend(first)
                        kv.resume(first)
                    case "advance":
                        advance(kv, [first], [[70] * (3 * PAGE)])
                        rows[first] += [70] * (3 * PAGE)
                    case "roll back":
                        with suppress(KeyError), kv.step(list(rows), [[1]] * count) as step:
                            write(step)
                            raise KeyError
                    case "close" if count > 1:
                        del rows[first]
                        first.close()
                    case "reopen":  # another sequence in its line
                        del rows[first]
                        first.close()
                        rows[opened(kv, [60] * (3 * PAGE))] = [60] * (3 * PAGE)
                    case "checking":
                        stack.enter_context(kernels.checking())
            last = decoded(kv, rows, last, 30 + i)
        for seq, known in rows.items():
            check_content(kv, seq, known)
        audit(kv)
