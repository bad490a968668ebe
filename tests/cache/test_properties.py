"""The named properties of the cache, each under every input that Hypothesis thinks of."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings

import flowkv
from flowkv import KV, Geometry
from flowkv.testing import MemoryTier
from tests.cache.audit import audit, audit_pool
from tests.cache.toy import (
    PAGE,
    advance,
    check_content,
    geometry,
    history,
    make_kv,
    opened,
    prefill,
    published,
    simple,
    write,
)
from tests.hooks.nano import generate_plain, make_nano
from tests.inside import CapacityError, PagePool, StateError, relocate

SIZES = (1, 2, 5)  # granules of the pages of a pool


def make_pool(granules: int = 60, sizes: tuple[int, ...] = SIZES) -> PagePool:
    return PagePool("cpu", granules * 4096, sizes)


def fill(pool: PagePool, page: int, granules: int) -> torch.Tensor:
    data = torch.full((granules * 4096,), page % 251, dtype=torch.uint8)
    data[:2] = torch.tensor([page // 251, granules])
    pool.page_bytes(page, len(data)).copy_(data)
    return data


# ---- pages


@given(st.lists(st.tuples(st.sampled_from(SIZES), st.integers(1, 9), st.integers(0, 50))))
def test_no_page_is_in_two_free_lists(calls: list[tuple[int, int, int]]) -> None:
    pool, held = make_pool(), list[int]()
    for granules, count, choice in calls:
        free = pool.available(granules)
        pages = pool.allocate(granules, count)
        assert (pages is None) == (count > free)
        audit_pool(pool)
        assert len(set(pages or ())) == len(pages or ()) and not set(pages or ()) & set(held)
        for page in pages or ():
            held += [page] * (1 + page % 2)
            if page % 2:
                pool.share(page)
        for _ in range(min(choice, len(held))):
            page = held.pop(choice % len(held))
            assert pool.release(page) == (page not in held)
            audit_pool(pool)
    for page in held:
        pool.release(page)
    audit_pool(pool)
    assert pool.used_bytes() == 0 and pool.fragmentation() == 0.0
    with pytest.raises(StateError, match="not in use"):
        pool.release(0)


@given(st.data())
def test_defragmentation_preserves_content_whatever_moves(data: st.DataObject) -> None:
    pool = make_pool()
    pages: dict[int, tuple[torch.Tensor, int]] = {}
    for granules in SIZES:
        for page in pool.allocate(granules, data.draw(st.integers(1, 9))) or ():
            pages[page] = fill(pool, page, granules), granules
            if page % 3 == 0:
                pool.share(page)
    moves: dict[int, int] = {}
    for granules in SIZES:
        mine = [page for page, (_, size) in pages.items() if size == granules]
        free = [p for n in pool._partial.get(granules, ()) for p in pool._slab(n).free]
        sources = data.draw(st.lists(st.sampled_from(mine), unique=True)) if mine else []
        targets = data.draw(st.permutations(free)) if sources else []
        moves |= dict(zip(sources, targets, strict=False))
    before = {page: pool.references(page) for page in pages}
    pool.relocate(moves)
    audit_pool(pool)
    for page, (content, _) in pages.items():
        now = moves.get(page, page)
        assert torch.equal(pool.page_bytes(now, len(content)), content)
        assert pool.references(now) == before[page]
    assert sum(before.values()) == sum(pool.references(page) for page in pool.live())


@given(st.randoms(use_true_random=False), st.integers(0, 3))
def test_defragmentation_preserves_live_sequences_whatever_moves(
    random: object, closed: int
) -> None:
    kv = make_kv(pages=24)
    prompts = [[i] * (9 + 6 * i) for i in range(4)]
    seqs = [opened(kv, prompt) for prompt in prompts]
    twin = kv.fork(seqs[-1])
    for seq in seqs[:closed]:
        seq.close()
    (pool,) = kv.planner.store.pools.values()
    pages = list(pool.live())
    free = [page for n in pool._partial.get(1, ()) for page in pool._slab(n).free]
    for some in (pages, free):
        random.shuffle(some)
    with kv.lock:
        store, tables = kv.planner.store, kv.planner.tables
        relocate(store, tables, "cpu", dict(zip(pages, free, strict=False)))
    for seq, prompt in [*zip(seqs, prompts, strict=True)][closed:]:
        check_content(kv, seq, prompt)
    check_content(kv, twin, prompts[-1])
    for prompt in prompts[:closed]:
        seq = kv.open(prompt)
        assert seq.reused == (len(prompt) - 1) // PAGE * PAGE
        check_content(kv, seq, prompt[: seq.length])
    advance(kv, [twin], [[7, 7, 7]])
    check_content(kv, twin, [*prompts[-1], 7, 7, 7])
    audit(kv)
    kv.close()


@given(st.lists(st.integers(0, 11), min_size=4, max_size=30))
def test_a_freed_page_is_never_returned_by_a_lookup(turns: list[int]) -> None:
    kv = make_kv(pages=7)
    store, prompts = kv.planner.store, [[i] * 17 for i in range(5)]
    (pool,) = store.pools.values()
    for turn in turns:
        if turn < 5:
            published(kv, prompts[turn])
        elif turn < 10:
            kv.forget(prompts[turn - 5])
        else:
            store.eviction.make_room(0, 2)
        for prompt in prompts:
            with kv._probe(prompt, None, ()) as seq:
                for block in kv.restorer.known_blocks(seq):
                    assert pool.references(block.page) == 1
            with kv.open(prompt) as seq:
                check_content(kv, seq, prompt[: seq.length])
    kv.close()


@given(st.data())
def test_copy_on_write_isolates_data(data: st.DataObject) -> None:
    kv = make_kv(pages=60)
    length = data.draw(st.integers(0, 30))
    texts = {kv.open(list(range(1, length + 1))): list(range(1, length + 1))}
    prefill(kv, next(iter(texts)))
    for turn in range(data.draw(st.integers(1, 6))):
        seq = data.draw(st.sampled_from(list(texts)))
        texts[kv.fork(seq)] = list(texts[seq])
        cut = data.draw(st.sampled_from(list(texts)))
        texts[cut] = texts[cut][: data.draw(st.integers(max(0, len(texts[cut]) - 9), 99))]
        kv.truncate(cut, len(texts[cut]))
        writers = data.draw(st.lists(st.sampled_from(list(texts)), min_size=1, unique=True))
        fresh = [[100 * turn + row] * data.draw(st.integers(0, 10)) for row in range(len(writers))]
        advance(kv, writers, fresh)
        for seq, tokens in zip(writers, fresh, strict=True):
            texts[seq] += tokens
        for seq, tokens in texts.items():
            check_content(kv, seq, tokens)
        audit(kv)
    kv.close()


# ---- swapping


@given(st.lists(st.integers(0, 40), min_size=1, max_size=4), st.booleans(), st.booleans())
def test_swap_out_and_in_is_bit_exact(lengths: list[int], evict: bool, forget: bool) -> None:
    kv = make_kv(pages=40)
    texts = [[i] * length for i, length in enumerate(lengths)]
    seqs = [opened(kv, text) for text in texts]
    swapped = [kv.suspend(seq) for seq in seqs]
    audit(kv)
    assert all(bool(n_bytes) == bool(text) for n_bytes, text in zip(swapped, texts, strict=True))
    if forget:
        kv.invalidate()
    if evict:  # somebody else's pages take their places
        published(kv, [9] * 200, tag=5)
    for seq, text in zip(reversed(seqs), reversed(texts), strict=True):
        assert seq.length == len(text)
        kv.resume(seq)
        audit(kv)
        check_content(kv, seq, text)
        if not forget:  # what it computed is known again, and shared
            assert kv.explain([*text, 0]).residency.get("device", 0) == len(text) // PAGE * PAGE
    advance(kv, seqs, [[8] * 11] * len(seqs))
    for seq, text in zip(seqs, texts, strict=True):
        check_content(kv, seq, text + [8] * 11)
    kv.close()


@settings(max_examples=12)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=4, max_size=14))
def test_a_preempted_and_resumed_sequence_gives_the_same_tokens(
    events: list[tuple[int, int]],
) -> None:
    model = make_nano(attend=flowkv.attention)
    shape = Geometry.uniform(layers=2, kv_heads=2, head_dim=8, page_size=8)
    kv = make_kv(shape, pages=16, tiers=[MemoryTier()])
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6] * 5, [5, 3, 5, 8, 9, 7, 9, 3, 2]]
    seqs, asleep = [kv.open(prompt) for prompt in prompts], set[int]()
    made: list[list[int]] = [[] for _ in prompts]

    def run(rows: list[int]) -> None:
        fresh = [made[row][-1:] or prompts[row] for row in rows]
        with torch.no_grad(), kv.step([seqs[row] for row in rows], fresh) as step:
            logits = model(step.tokens, step.positions)[0]
        for row, end in zip(rows, step.counts.cumsum(), strict=True):
            made[row].append(int(logits[end - 1].argmax()))

    for row, event in events:
        if event == 0 and row not in asleep:
            kv.suspend(seqs[row])
            asleep.add(row)
        elif event == 1:
            kv.defragment()
            published(kv, [40 + row] * 40, tag=row, tenant="other")
        awake = [i for i in range(3) if i not in asleep]
        if awake:
            run(awake)
        if event == 3:
            for i in sorted(asleep):
                kv.resume(seqs[i])
            asleep.clear()
    for row in asleep:
        kv.resume(seqs[row])
    run([0, 1, 2])
    plain = make_nano()
    for prompt, tokens in zip(prompts, made, strict=True):
        assert tokens == generate_plain(plain, prompt, len(tokens))
    kv.close()


# ---- attention


@settings(max_examples=20)
@given(
    page_size=st.sampled_from((8, 16, 24, 64)),
    dim=st.sampled_from((8, 64, 80, 96)),
    heads=st.sampled_from(((1, 1), (2, 4), (1, 6))),
    window=st.sampled_from((None, 1, 7, 20)),
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=3),
    chunk=st.sampled_from((1, 5, 16, 90)),
)
def test_paged_attention_equals_dense_for_every_context_length_head_dim_and_page_size(
    page_size: int,
    dim: int,
    heads: tuple[int, int],
    window: int | None,
    lengths: list[int],
    chunk: int,
) -> None:
    few, many = heads
    shape = simple(page_size=page_size, head_dim=dim, kv_heads=few, window=window)
    kv = KV(shape, gpu=30 * 100 // page_size * -(-few * page_size * dim * 8 // 4096) * 4096)
    qkv = [[torch.randn(n, h, dim) for h in (many, few, few)] for n in lengths]
    seqs = [kv.open([row] * n) for row, n in enumerate(lengths)]
    got: list[list[torch.Tensor]] = [[] for _ in lengths]
    for step in kv.prefill(seqs, chunk=chunk):
        rows = [seqs.index(seq) for seq in step.seqs]
        parts = [
            [x[seqs[row].length : seqs[row].length + count] for x in qkv[row]]
            for row, count in zip(rows, step.counts.tolist(), strict=True)
        ]
        out = step.attend(0, *(torch.cat([part[i] for part in parts]) for i in range(3)))
        for row, piece in zip(rows, out.split(step.counts.tolist()), strict=True):
            got[row].append(piece)
    for n, (q, k, v), pieces in zip(lengths, qkv, got, strict=True):
        age = torch.arange(n)[:, None] - torch.arange(n)
        mask = (age >= 0) & (age < (window or n))
        q, k, v = (x.transpose(0, 1).double() for x in (q, k, v))
        want = F.scaled_dot_product_attention(q[None], k[None], v[None], mask, enable_gqa=True)
        assert torch.allclose(torch.cat(pieces), want[0].transpose(0, 1).float(), atol=1e-5)
    kv.close()


# ---- tenants


TALK = st.lists(
    st.tuples(st.sampled_from("AB"), st.integers(0, 1), st.integers(1, 30)), max_size=12
)


def answers(talk: list[tuple[str, int, int]], *, only: str = "") -> list[tuple[object, ...]]:
    """What each tenant is told: tokens reused, and what it then reads, request by request."""
    kv, told = make_kv(pages=200, tiers=[MemoryTier()]), []
    for tenant, document, length in talk:
        if tenant not in (only or "AB"):
            continue
        tokens, tag = [document] * length, ord(tenant)
        seq = kv.open(tokens, tenant=tenant)
        check_content(kv, seq, tokens[: seq.length], tag)  # K and V differ between tenants here
        prefill(kv, seq, tag=tag)
        check_content(kv, seq, tokens, tag)
        told.append((tenant, seq.reused, str(kv.explain(tokens, tenant=tenant))))
        seq.close()
    kv.close()
    return told


@given(TALK)
def test_no_interleaving_of_tenants_yields_a_cross_tenant_hit(
    talk: list[tuple[str, int, int]],
) -> None:
    told = answers(talk)
    seen: dict[str, list[list[int]]] = {"A": [], "B": []}
    for (tenant, document, length), (_, reused, _) in zip(talk, told, strict=True):
        own = [text[:reused] for text in seen[tenant]]
        assert reused == 0 or [document] * reused in own, "reused what it never computed"
        seen[tenant].append([document] * length)


@given(TALK)
def test_what_one_tenant_stores_never_changes_what_another_is_answered(
    talk: list[tuple[str, int, int]],
) -> None:
    together = answers(talk)
    for tenant in "AB":
        assert [line for line in together if line[0] == tenant] == answers(talk, only=tenant)


def test_a_secret_makes_keys_of_equal_prompts_unguessable() -> None:
    keys = set()
    for secret, tenant in itertools.product(("", "00ff"), ("a", "b")):
        kv = make_kv(secret=secret)
        with kv.open(range(20), tenant=tenant) as seq:
            keys |= {seq.key(group, 0) for group in (0, 1)}
        kv.close()
    assert len(keys) == 8


# ---- failures


@given(st.integers(1, 60), st.integers(1, 40))
def test_a_step_that_fails_leaves_everything_as_it_was(length: int, more: int) -> None:
    kv = make_kv(pages=8)
    text = list(range(length))
    try:
        seq = opened(kv, text)
    except CapacityError:
        audit(kv)
        return
    for problem in (KeyError, CapacityError("x", "y"), KeyboardInterrupt):
        failed = pytest.raises((KeyError, CapacityError, KeyboardInterrupt))
        with failed, kv.step([seq], [[7] * more]) as step:
            write(step)
            raise problem
        check_content(kv, seq, text)
        assert seq.tokens.tolist() == text
        audit(kv)
    kv.close()


def test_the_toy_model_tells_prompts_apart() -> None:
    """The tests above rest on this: another past, another number."""
    pasts = [history(text)[-1] for text in ([1], [2], [1, 1], [2, 1], [1, 2], [1, 1, 1])]
    assert len(set(pasts)) == 6
    assert history([1], tag=1)[0] != history([1])[0]
    assert geometry().groups[1].window == 12
