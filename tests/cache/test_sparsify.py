"""Sequences that lost tokens: what is left is exact, goes on at its positions, stays private."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flowkv
from flowkv import KV, Geometry, LayerGroup, Sequence
from tests.cache.audit import audit, audit_empty
from tests.cache.test_codecs import codecs_of, make
from tests.cache.toy import advance, content, geometry, keys_values, make_kv, opened, published
from tests.inside import CapacityError, ConfigError, GeometryError, Importance, StateError
from tests.inside import kv_plan as plan

PAGE = 8


def two_groups(page_size: int = PAGE) -> Geometry:
    """Two groups of layers that see everything, of different shapes."""
    one = LayerGroup(layers=(0, 2), kv_heads=2, head_dim=8, value_dim=8)
    other = LayerGroup(layers=(1,), kv_heads=1, head_dim=8, value_dim=16)
    return Geometry(groups=(one, other), page_size=page_size)


def random_keep(
    kv: KV, length: int, count: int | tuple[int, ...], seed: int = 0
) -> list[np.ndarray]:
    """Slots of each layer and head, as many for all groups or a number for each."""
    dice, groups = np.random.default_rng(seed), kv.geometry.groups
    counts = (count,) * len(groups) if isinstance(count, int) else count
    return [
        np.sort(
            dice.permuted(np.tile(np.arange(length), (len(g.layers), g.kv_heads, 1)), axis=2)[
                :, :, :n
            ],
            axis=2,
        )
        for g, n in zip(groups, counts, strict=True)
    ]


def check_kept(kv: KV, seq: Sequence, tokens: list[int], keep: list[np.ndarray]) -> None:
    """Slot i of each layer and head holds token keep[i]; later slots what was computed since."""
    lost_by_group = (seq.position - seq.lengths).tolist()
    for group, part, lost in zip(kv.geometry.groups, keep, lost_by_group, strict=True):
        for i, layer in enumerate(group.layers):
            wanted = keys_values(kv.geometry, layer, tokens)
            for got, want in zip(content(kv, seq, layer), wanted, strict=True):
                for head in range(group.kv_heads):
                    slots = np.arange(part.shape[2] + lost, seq.position)
                    of = torch.from_numpy(np.concatenate([part[i, head], slots]))
                    assert torch.equal(got[:, head], want[of, head])


def write_at(kv: KV, seq: Sequence, tokens: list[int], fresh: list[int]) -> None:
    """A step of the toy model, whose K and V depend on the true position."""
    with kv.step([seq], [fresh]) as step:
        assert step.positions.tolist() == [list(range(len(tokens), len(tokens) + len(fresh)))]
        for g, group in enumerate(step.groups):
            for layer in group.layers:
                k, v = keys_values(kv.geometry, layer, [*tokens, *fresh], len(tokens))
                flowkv.kernels.append(k, v, step.pages(layer), step.batch(g))
    tokens += fresh


BUDGETS = st.integers(1, 40) | st.tuples(st.integers(1, 40), st.integers(1, 40))
"""Of all groups, or of each."""


def check_pages(seq: Sequence) -> None:
    """Each group has the pages that its tokens fill, and no other."""
    assert [len(b) for b in seq.blocks] == [-(-n // PAGE) for n in seq.lengths.tolist()]


@settings(max_examples=12)
@given(st.integers(1, 40), BUDGETS, st.integers(0, 30), st.integers(0, 99))
def test_what_is_kept_is_exact_and_the_sequence_goes_on(
    length: int, count: int | tuple[int, int], more: int, seed: int
) -> None:
    kv = make_kv(two_groups())
    tokens = list(range(length))
    seq = opened(kv, tokens)
    counts = (count, count) if isinstance(count, int) else count
    left = [min(n, length) for n in counts]
    keep = random_keep(kv, length, tuple(left), seed)
    lost = kv.sparsify(seq, keep)
    assert lost == length - min(left) == seq.dropped
    assert (seq.length, seq.position) == (max(left), length)
    assert seq.lengths.tolist() == left
    check_kept(kv, seq, tokens, keep)
    check_pages(seq)
    audit(kv)
    with pytest.raises(ZeroDivisionError), kv.step([seq], [[7] * (more + 1)]):
        raise ZeroDivisionError
    check_pages(seq)
    write_at(kv, seq, tokens, [5] * more)
    check_kept(kv, seq, tokens, keep)
    check_pages(seq)
    twin = kv.fork(seq)
    others = list(tokens)
    write_at(kv, twin, others, [6] * 9)
    check_kept(kv, twin, others, keep)
    check_pages(twin)
    check_kept(kv, seq, tokens, keep)
    kv.suspend(seq)
    kv.resume(seq)
    check_kept(kv, seq, tokens, keep)
    write_at(kv, seq, tokens, [8] * 5)
    check_kept(kv, seq, tokens, keep)
    audit(kv)
    seq.close()
    twin.close()
    kv.forget(tenant="")
    audit_empty(kv)


def test_twice_is_as_good_as_once() -> None:
    kv = make_kv(two_groups())
    tokens = list(range(30))
    seq = opened(kv, tokens)
    first, second = random_keep(kv, 30, 20, 1), random_keep(kv, 20, 11, 2)
    assert (kv.sparsify(seq, first), kv.sparsify(seq, second)) == (10, 9)
    both = [np.take_along_axis(a, b, 2) for a, b in zip(first, second, strict=True)]
    check_kept(kv, seq, tokens, both)
    write_at(kv, seq, tokens, [1, 2, 3])
    check_kept(kv, seq, tokens, both)


def test_groups_lose_by_turns() -> None:
    kv = make_kv(two_groups())
    tokens = list(range(30))
    seq = opened(kv, tokens)
    blocks = list(seq.blocks[1])
    first, second = random_keep(kv, 30, (9, 30), 1), random_keep(kv, 30, (9, 17), 2)
    assert kv.sparsify(seq, first) == 21
    assert seq.blocks[1] == blocks, "who loses nothing keeps its pages, and shares them"
    assert seq.lengths.tolist() == [9, 30] and not seq.publishable
    second[0] = np.broadcast_to(np.arange(9), first[0].shape)
    assert kv.sparsify(seq, second) == 13
    check_kept(kv, seq, tokens, [first[0], second[1]])
    write_at(kv, seq, tokens, [1, 2, 3])
    check_kept(kv, seq, tokens, [first[0], second[1]])
    audit(kv)
    with pytest.raises(StateError, match="lost tokens"):
        kv.truncate(seq, 30)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """`[T, Hq, Dv]`, in torch: token t of T sees all but the last T - 1 - t keys of its head."""
    new, heads = len(q), q.shape[1] // k.shape[1]
    logits = torch.einsum("tgd,sgd->gts", q, k.repeat_interleave(heads, 1)) * q.shape[2] ** -0.5
    behind = torch.ones(new, len(k), dtype=torch.bool).tril(len(k) - new)
    weights = logits.masked_fill(~behind, -torch.inf).softmax(2)
    return torch.einsum("gts,sgd->tgd", weights, v.repeat_interleave(heads, 1))


ROW = st.tuples(st.integers(1, 45), st.none() | BUDGETS)
STEPS = st.lists(st.integers(1, 12) | st.just(1), min_size=1, max_size=12)


@pytest.mark.parametrize("apart", [False, True])
@settings(max_examples=12)
@given(st.lists(ROW, min_size=1, max_size=3), STEPS, st.integers(0, 99))
def test_attention_is_over_what_each_layer_and_head_kept(
    apart: bool, rows: list[tuple[int, int | tuple[int, int] | None]], news: list[int], seed: int
) -> None:
    kv, dice = make_kv(two_groups()), np.random.default_rng(seed)
    known = [dice.integers(0, 99, length).tolist() for length, _ in rows]
    seqs = [opened(kv, tokens) for tokens in known]
    keeps = []
    for seq, (length, budget) in zip(seqs, rows, strict=True):
        counts = (budget, budget) if isinstance(budget, int) else budget or (length, length)
        keeps.append(random_keep(kv, length, tuple(min(n, length) for n in counts), seed))
        kv.sparsify(seq, keeps[-1])
    for new in news:
        fresh = [dice.integers(0, 99, new).tolist() for _ in seqs]
        with kv.step(seqs, fresh) as step:
            step.apart = apart
            for g, group in enumerate(step.groups):
                for i, layer in enumerate(group.layers):
                    both = [
                        keys_values(kv.geometry, layer, [*old, *more])
                        for old, more in zip(known, fresh, strict=True)
                    ]
                    q = torch.randn(new * len(seqs), 2 * group.kv_heads, group.head_dim)
                    k, v = (torch.cat([one[n][-new:] for one in both]) for n in range(2))
                    found = step.attend(layer, q, k, v).split(new)
                    for b, kept in enumerate(keeps):
                        whole = np.arange(len(both[b][0]))
                        slots = [np.r_[head, whole[rows[b][0] :]] for head in kept[g][i]]
                        mine = [
                            torch.stack([x[s, h] for h, s in enumerate(slots)], 1) for x in both[b]
                        ]
                        wanted = attention(q.split(new)[b], *mine)
                        torch.testing.assert_close(found[b], wanted, rtol=1e-4, atol=1e-5)
        for old, more in zip(known, fresh, strict=True):
            old += more
    for seq in seqs:
        check_pages(seq)
    audit(kv)


def test_nothing_of_it_is_published_and_what_was_known_stays() -> None:
    kv = make_kv(two_groups())
    tokens = list(range(35))
    published(kv, tokens)
    seq = opened(kv, tokens)
    assert seq.reused == 32
    blocks = kv.stats()["blocks"]
    keep = random_keep(kv, 35, 10)
    kv.sparsify(seq, keep)
    write_at(kv, seq, tokens, [9] * 40)
    assert kv.stats()["blocks"] == blocks
    again = opened(kv, range(35))
    assert again.reused == 32
    for layer in range(3):
        wanted = keys_values(kv.geometry, layer, range(35))
        for got, want in zip(content(kv, again, layer), wanted, strict=True):
            assert torch.equal(got, want)
    with kv.open([*range(35), *[9] * 40]) as other:
        assert other.reused == 32, "what came after the loss is nobody else's"


def test_a_prompt_that_is_not_computed_yet_goes_on() -> None:
    kv = make_kv(two_groups())
    seq = kv.open(range(40))
    done: list[int] = []
    for step in kv.prefill([seq], chunk=16):
        assert step.positions[0, 0] == len(done)
        chunk = step.tokens[0].tolist()
        for g, group in enumerate(step.groups):
            for layer in group.layers:
                k, v = keys_values(kv.geometry, layer, [*done, *chunk], len(done))
                flowkv.kernels.append(k, v, step.pages(layer), step.batch(g))
        done += chunk
        if len(done) == 16:
            step.commit()
            keep = random_keep(kv, 16, 6)
            kv.sparsify(seq, keep)
    assert done == list(range(40)) and (seq.length, seq.position) == (30, 40)
    check_kept(kv, seq, done, keep)


def test_sealed_pages_are_decoded_first() -> None:
    kv = make("kv8", recent_tokens=0)
    tokens = [3] * 200
    seq = opened(kv, tokens)
    assert codecs_of(kv, seq)[:3] == ["kv8"] * 3
    before = [content(kv, seq, layer) for layer in range(3)]
    keep = random_keep(kv, 200, 90)
    kv.sparsify(seq, keep)
    assert codecs_of(kv, seq) == ["raw", "raw"]
    for group, part in zip(kv.geometry.groups, keep, strict=True):
        for i, layer in enumerate(group.layers):
            for got, had in zip(content(kv, seq, layer), before[layer], strict=True):
                for head in range(group.kv_heads):
                    assert torch.equal(got[:, head], had[torch.from_numpy(part[i, head]), head])
    audit(kv)
    advance(kv, [seq], [[1] * 100])
    assert codecs_of(kv, seq)[:2] == ["kv8"] * 2, "what is left is sealed again"


def test_what_does_not_fit_leaves_the_sequence_as_it_was() -> None:
    kv = make_kv(two_groups(), pages=5)
    pages = 0
    for _, pool in kv.planner.store.pools.items():
        pages = pool.available(1)
    tokens = list(range(PAGE * (pages // 3)))
    seq = opened(kv, tokens)
    with pytest.raises(CapacityError):
        kv.sparsify(seq, random_keep(kv, len(tokens), len(tokens) - 1))
    assert seq.length == len(tokens) and not seq.dropped


# ---- chosen by what was watched


def watched(kv: KV, seq: Sequence, q: torch.Tensor) -> None:
    """Prefills with queries that all point the same way, and watches."""
    for step in kv.prefill([seq], chunk=16):
        step.watch()
        for group in step.groups:
            for layer in group.layers:
                known = seq.tokens[: seq.length + int(step.counts[0])].tolist()
                k, v = keys_values(kv.geometry, layer, known, seq.length)
                step.attend(layer, q.expand(len(k), 2 * group.kv_heads, -1).contiguous(), k, v)


def test_a_watched_sequence_keeps_what_was_looked_at() -> None:
    kv = make_kv(two_groups())
    seq = kv.open(range(37))
    q = 3 * torch.randn(1, 1, 8)
    watched(kv, seq, q)
    for g, group in enumerate(kv.geometry.groups):
        mass = seq.importance[g].mass
        assert mass.shape == (len(group.layers), group.kv_heads, 5)
        for i, layer in enumerate(group.layers):
            k, _ = keys_values(kv.geometry, layer, range(37))
            logits = torch.einsum("d,thd->ht", q[0, 0], k) * 8**-0.5
            logits = (
                logits[:, None]
                .expand(-1, 37, -1)
                .masked_fill(~torch.ones(37, 37, dtype=torch.bool).tril(), -torch.inf)
            )
            by_token = torch.nn.functional.pad(2 * logits.softmax(2), (0, 3))
            # Older weights fade by the chunk: 16, 16 and 5 queries.
            fade = torch.tensor([0.5 ** (21 / 1024)] * 16 + [0.5 ** (5 / 1024)] * 16 + [1.0] * 5)
            want = (by_token.unflatten(2, (5, 8)).sum(3) * fade[:, None]).sum(1)
            assert np.allclose(mass[i], want.numpy(), atol=1e-3)
    keep = [seq.importance[g].keep(37, budget) for g, budget in enumerate((20, 11))]
    assert kv.sparsify(seq, budget_tokens=[20, 11]) == 26
    check_kept(kv, seq, list(range(37)), keep)
    assert seq.importance[0].mass.shape == (2, 2, 3)
    twin = kv.fork(seq)
    assert twin.importance[0] is not seq.importance[0]
    assert np.array_equal(twin.importance[0].mass, seq.importance[0].mass)


def test_a_step_that_failed_was_not_seen() -> None:
    kv = make_kv(two_groups())
    seq = opened(kv, range(9))
    with pytest.raises(ZeroDivisionError), kv.step([seq], [[1]]) as step:
        step.watch()
        raise ZeroDivisionError
    assert not seq.importance


# ---- refused


def test_what_cannot_be_is_refused() -> None:
    kv = make_kv(two_groups())
    seq = opened(kv, range(20))
    good = random_keep(kv, 20, 10)
    with pytest.raises(StateError, match=r"Call step\.watch"):
        kv.sparsify(seq, budget_tokens=10)
    for wrong in ({}, {"keep": good, "budget_tokens": 10}):
        with pytest.raises(ConfigError, match="either keep or budget_tokens"):
            kv.sparsify(seq, **wrong)
    bad = {
        "of 1 layer groups, of 2": good[:1],
        r"Pass \[2, 2, 'n'\]": [good[0][:1], good[1]],
        "of a sequence of 20": [good[0] + 11, good[1]],
        "ascending": [good[0][:, :, ::-1], good[1]],
        "at least 1": [good[0][:, :, :0], good[1][:, :, :0]],
    }
    for match, keep in bad.items():
        with pytest.raises(GeometryError, match=match):
            kv.sparsify(seq, keep)
    seq.importance[0] = Importance(2, 2, PAGE)
    with pytest.raises(ConfigError, match="3 budgets for 2 layer groups"):
        kv.sparsify(seq, budget_tokens=[9, 9, 9])
    step = plan(kv, [seq], [1])
    with pytest.raises(StateError, match="in a step already"):
        kv.sparsify(seq, good)
    step.rollback()
    assert not seq.dropped and seq.publishable


def test_windows_are_refused() -> None:
    kv = make_kv(geometry())
    seq = opened(kv, range(20))
    with pytest.raises(GeometryError, match="'sliding' layer group"):
        kv.sparsify(seq, random_keep(kv, 20, 10))
    seq.importance[0] = Importance(1, 2, PAGE)
    with pytest.raises(GeometryError, match="'sliding' layer group"):
        kv.sparsify(seq, budget_tokens=10)


def test_a_sparsified_sequence_cannot_be_cut() -> None:
    kv = make_kv(two_groups())
    seq = opened(kv, range(20))
    kv.sparsify(seq, random_keep(kv, 20, 10))
    with pytest.raises(StateError, match="lost tokens in between cannot be cut"):
        kv.truncate(seq, 5)
