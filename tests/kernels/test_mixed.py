"""Attention and dense rows over pages of several codecs, under every switch, on the CPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowkv.kernels import (
    Pages,
    Ragged,
    Scoring,
    append,
    checking,
    gather_dense,
    merge,
    paged_attention,
)
from tests.inside import attention as cpu_mixed_call
from tests.inside import layout_CODECS as CODECS
from tests.kernels.scene import Scene, int32, layout_of

TOLERANCE = {"float32": 4e-6, "bfloat16": 1.6e-2, "float16": 2e-3}
PREFILL_TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3}
SEALED = CODECS[1:]
HEAVY = settings(max_examples=15)


@st.composite
def scenes(draw: st.DrawFn, most_new: int = 6, causal: bool = True) -> Scene:
    """Rows of pages of codecs in any order; behind them raw pages that hold the new tokens."""
    dim = draw(st.sampled_from([64, 80, 96, 128, 256, 20]))
    size = draw(st.sampled_from([64, 72, 128, 16]))
    small = dim < 64 or size < 64
    layout = layout_of(
        kv_heads=draw(st.integers(1, 3)),
        head_dim=dim,
        value_dim=draw(st.sampled_from([dim, dim, 72] if not small else [dim, 24])),
        page_size=size,
        dtype=draw(st.sampled_from(["float32", "float32", "bfloat16", "float16"])),
    )
    rows = draw(st.integers(1, 3))
    new = [draw(st.sampled_from([1, 1, 2, 3, most_new, 0])) for _ in range(rows)]
    past = st.sampled_from([0, 1, size, 2 * size, 2 * size + 5, 3 * size - 1, 4 * size])
    lengths = [max(1, n + draw(past)) for n in new]
    if not causal:
        lengths = [draw(past) for _ in new]
    window = draw(st.sampled_from([None, None, 1, 7, size, 2 * size + 3])) if causal else None
    codecs = ("kv8",) if small else draw(st.sampled_from([SEALED, SEALED, *((c,) for c in SEALED)]))
    seed = draw(st.integers(0, 99))
    return Scene(layout, lengths, new, window, seed, sealed=codecs, causal=causal)


@st.composite
def switches(draw: st.DrawFn, scene: Scene) -> tuple[torch.Tensor, Scoring]:
    """Queries of a scene, and how they attend; the mass is what it was before the call."""
    q = scene.queries(draw(st.sampled_from([1, 2, 3, 4, 5, 7, 8, 16])))
    heads, rng = q.shape[1], torch.Generator().manual_seed(scene.seed + 2)
    alibi = tree = None
    if scene.causal and draw(st.booleans()):
        alibi = torch.rand(heads, generator=rng) * 0.1 - 0.03
    if scene.causal and draw(st.booleans()):
        bits = torch.randint(-(1 << 63), (1 << 63) - 1, (len(q),), generator=rng)
        tree = bits & torch.randint(-(1 << 63), (1 << 63) - 1, (len(q),), generator=rng)
    mass = torch.rand(
        len(scene.lengths), scene.batch.table.shape[1], scene.layout.kv_heads, generator=rng
    )
    how = Scoring(
        scale=0.17,
        window=scene.window,
        softcap=draw(st.sampled_from([None, None, 3.0])),
        sinks=torch.linspace(-2, 3, heads) if draw(st.booleans()) else None,
        alibi=alibi,
        tree=tree,
        causal=scene.causal,
        mass=mass if draw(st.booleans()) else None,
        return_lse=True,
        invariant=draw(st.booleans()),
    )
    return q, how


def attend(
    scene: Scene, q: torch.Tensor, how: Scoring, tolerance: float, backend: str, blur: float = 30
) -> None:
    """Compare a backend with dense attention over what the pages decode to.

    Rows of many new tokens see it rounded to the pages' dtype, which blurs logits and weights.
    """
    o, lse, mass = scene.answer(q, how)
    before = None if how.mass is None else how.mass.clone()
    with checking():
        got, got_lse = paged_attention(
            q, scene.pages, scene.batch, **how._asdict(), backend=backend
        )
    assert got.dtype == q.dtype and got_lse.dtype == torch.float32
    torch.testing.assert_close(got.double(), o, rtol=0, atol=tolerance)
    near = max(1e-5, tolerance / blur)
    torch.testing.assert_close(got_lse.double(), lse, rtol=1e-6, atol=near)
    if before is not None:
        added = how.mass.double() - before.double()
        added[:, : mass.shape[1]] -= mass
        torch.testing.assert_close(added, torch.zeros_like(added), rtol=0, atol=3 * near)


@HEAVY
@given(data=st.data(), scene=scenes())
def test_oracle(data: st.DataObject, scene: Scene) -> None:
    q, how = data.draw(switches(scene))
    attend(scene, q, how, TOLERANCE[scene.layout.dtype], "reference")


@settings(max_examples=25)
@given(data=st.data(), scene=scenes())
def test_numba(data: st.DataObject, scene: Scene) -> None:
    q, how = data.draw(switches(scene))
    attend(scene, q, how, TOLERANCE[scene.layout.dtype], "cpu")


@HEAVY
@given(data=st.data(), scene=scenes())
def test_numba_in_pieces(data: st.DataObject, scene: Scene) -> None:
    """Items of several pieces leave partials, on several threads, and merge."""
    q, how = data.draw(switches(scene))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_mixed_call, "slices", lambda work, least: 7)
        patch.setattr(cpu_mixed_call, "INVARIANT_TOKENS", 1)
        patch.setattr(torch, "get_num_threads", lambda: 2)
        attend(scene, q, how, TOLERANCE[scene.layout.dtype], "cpu")


@HEAVY
@given(data=st.data(), scene=scenes(most_new=40))
def test_many_new_tokens(data: st.DataObject, scene: Scene) -> None:
    q, how = data.draw(switches(scene))
    attend(scene, q, how, PREFILL_TOLERANCE[scene.layout.dtype], "cpu", blur=1)


@HEAVY
@given(data=st.data(), scene=scenes(most_new=30, causal=False))
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_cross_attention(backend: str, data: st.DataObject, scene: Scene) -> None:
    """Every page may be sealed, rows may be empty, and queries may outnumber tokens."""
    q, how = data.draw(switches(scene))
    attend(scene, q, how, PREFILL_TOLERANCE[scene.layout.dtype], backend, blur=1)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("new", [6, 64])
def test_tree_of_drafts(backend: str, new: int) -> None:
    """Each draft sees its ancestors and itself: as the row of its path alone."""
    scene = Scene(layout_of(2, 64, page_size=64), [200 + new], [new], sealed=SEALED)
    parents = [-1] + [max(0, (j - 1) // 2) for j in range(1, new)]
    paths = [[j] for j in range(new)]
    for path in paths:
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
    bits = [sum(1 << j for j in path) for path in paths]
    tree = torch.tensor([b - (1 << 64) if b >> 63 else b for b in bits])
    q = scene.queries(4)
    o = paged_attention(q, scene.pages, scene.batch, tree=tree, backend=backend)
    for j in (0, 3, new - 1):
        k, v = (torch.cat([x[0][:200], x[0][200:][paths[j]]]) for x in (scene.k, scene.v))
        s = torch.einsum("hd,shd->sh", q[j].double(), k.double().repeat_interleave(4, 1)) / 8
        expected = torch.einsum("sh,shd->hd", s.softmax(0), v.double().repeat_interleave(4, 1))
        torch.testing.assert_close(o[j].double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("new", [3, 40])
def test_mass_is_added_and_sums_to_the_queries(new: int) -> None:
    scene = Scene(layout_of(2, 64, page_size=64), [300, 90], [new, 1], sealed=SEALED)
    q, mass = scene.queries(4), torch.full((2, 7, 2), 5.0)
    for _ in range(2):
        paged_attention(q, scene.pages, scene.batch, mass=mass, backend="cpu")
    assert (mass[0, 5:] == 5).all() and (mass[1, 2:] == 5).all() and (mass[0, :5] > 5).all()
    weights = (mass - 5).sum(1)
    torch.testing.assert_close(weights[0], torch.full((2,), 8.0 * new), rtol=1e-5, atol=0)
    torch.testing.assert_close(weights[1], torch.full((2,), 8.0), rtol=1e-5, atol=0)


def test_tokens_that_see_nothing_answer_zero() -> None:
    scene = Scene(layout_of(1, 64, page_size=64), [3], [3], sealed=("kv8",))
    q, tree = scene.queries(2), torch.tensor([1, 0, 7])
    for backend in ("reference", "cpu"):
        o, lse = paged_attention(
            q, scene.pages, scene.batch, tree=tree, return_lse=True, backend=backend
        )
        assert (o[1] == 0).all() and (lse[1] == -torch.inf).all()
        assert o[[0, 2]].isfinite().all() and lse[[0, 2]].isfinite().all()


def alone(scene: Scene, b: int) -> Ragged:
    """Row b of a scene's batch as a batch."""
    batch = scene.batch
    new, length = scene.new[b], scene.lengths[b]
    return Ragged(batch.table, batch.rows[b : b + 1], int32([length]), int32([0, new]), new, length)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sealed", [(), SEALED])
def test_an_invariant_row_has_the_same_bits_in_any_batch(
    dtype: str, sealed: tuple[str, ...]
) -> None:
    lengths, new = [900, 64, 1500, 2100, 1], [1, 4, 1, 30, 1]
    scene = Scene(layout_of(2, 64, page_size=64, dtype=dtype), lengths, new, sealed=sealed)
    q = scene.queries(4)
    options = {"return_lse": True, "invariant": True, "backend": "cpu"}
    whole = paged_attention(q, scene.pages, scene.batch, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 2)
        for count in (2, 9, 40):
            patch.setattr(cpu_mixed_call, "slices", lambda work, least, count=count: count)
            again = paged_attention(q, scene.pages, scene.batch, **options)
            assert all(torch.equal(a, b) for a, b in zip(again, whole, strict=True))
    for b in range(len(lengths)):
        part = slice(int(scene.batch.starts[b]), int(scene.batch.starts[b + 1]))
        single = paged_attention(q[part], scene.pages, alone(scene, b), **options)
        assert all(torch.equal(a, b[part]) for a, b in zip(single, whole, strict=True))


def test_pieces_of_other_sizes_have_other_bits() -> None:
    """What the test above would not see if nothing were ever cut."""
    scene = Scene(layout_of(2, 64, page_size=64), [2100], [1], sealed=SEALED)
    q = scene.queries(4)
    with pytest.MonkeyPatch.context() as patch:
        answers = []
        for tokens in (64, 1024, 4096):
            patch.setattr(cpu_mixed_call, "INVARIANT_TOKENS", tokens)
            answers.append(paged_attention(q, scene.pages, scene.batch, invariant=True))
    assert not torch.equal(answers[0], answers[1]) and not torch.equal(answers[1], answers[2])
    torch.testing.assert_close(answers[0], answers[2], rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_parts_of_any_split_merge_to_the_whole(backend: str) -> None:
    scene = Scene(layout_of(2, 64, 80, page_size=64), [450], [1], sealed=SEALED)
    q, batch = scene.queries(3), scene.batch
    whole, lse = paged_attention(q, scene.pages, batch, return_lse=True, backend=backend)
    for cut in range(1, 7):
        before = batch._replace(lengths=int32([cut * 64]), most_length=cut * 64)
        rest = 450 - cut * 64
        after = batch._replace(
            table=batch.table[:, cut:].contiguous(), lengths=int32([rest]), most_length=rest
        )
        parts = [
            paged_attention(q, scene.pages, part, causal=causal, return_lse=True, backend=backend)
            for part, causal in ((before, False), (after, True))
        ]
        o, o_lse = merge(parts, backend=backend)
        torch.testing.assert_close(o, whole, rtol=0, atol=4e-6)
        torch.testing.assert_close(o_lse, lse, rtol=0, atol=1e-5)


def test_raw_pages_among_possible_codecs_answer_as_before() -> None:
    """A pool that may hold sealed pages answers for raw ones what a raw pool does."""
    scene = Scene(layout_of(2, 64, page_size=64), [700, 1, 33, 129], [2, 1, 8, 1])
    mixed = Scene(layout_of(2, 64, page_size=64), [700], [2], sealed=SEALED).pages.sealed
    q = scene.queries(4)
    raw = paged_attention(q, scene.pages, scene.batch, return_lse=True, backend="cpu")
    pages = scene.pages._replace(sealed=mixed)
    got = paged_attention(q, pages, scene.batch, return_lse=True, backend="cpu")
    for a, b in zip(got, raw, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_nan_in_a_visible_token_shows_beside_sealed_pages() -> None:
    scene = Scene(layout_of(1, 64, page_size=64), [200], [1], sealed=("kv4c",))
    k, v = scene.k[0][192:].clone(), scene.v[0][192:]
    k[5, 0, 3] = torch.nan
    tail = scene.batch._replace(starts=int32([0, 8]), most_new=8)
    append(k, v, scene.pages, tail)
    o = paged_attention(scene.queries(2), scene.pages, scene.batch, backend="cpu")
    assert o.isnan().all()


def test_layers_and_pools_are_told_apart() -> None:
    """Operands that calls share must not outlive the layer, or the pool, that they came from."""
    layout = layout_of(1, 64, page_size=64)
    scene = Scene(layout, [200], [1], sealed=("kv8",), layer=1)
    other = Scene(layout, [200], [1], sealed=("kv8",), layer=0)
    q = scene.queries(2)
    one = paged_attention(q, scene.pages, scene.batch, backend="cpu")
    arena = scene.pages.arena.clone()
    ids = scene.batch.table[scene.batch.rows[0]].tolist()
    for page in [p for p in ids if p >= 0]:
        form = layout if page >> 28 == 0 else scene.pages.sealed[0]
        at, half = (page & ((1 << 28) - 1)) * 4096, form.stripe_stride_bytes
        arena[at : at + half] = arena[at + half : at + 2 * half].clone()
    moved = Pages(arena, layout, 0, scene.pages.sealed)
    assert torch.equal(paged_attention(q, moved, scene.batch, backend="cpu"), one)
    assert not torch.equal(paged_attention(q, other.pages, other.batch, backend="cpu"), one * 0)


@HEAVY
@given(data=st.data(), scene=scenes())
def test_dense_rows_have_the_same_bits(data: st.DataObject, scene: Scene) -> None:
    longest = max(scene.lengths)
    columns = data.draw(st.sampled_from([1, 7, scene.layout.page_size + 1, longest, longest + 9]))
    with checking():
        got = gather_dense(scene.pages, scene.batch, columns, backend="cpu")
        expected = gather_dense(scene.pages, scene.batch, columns, backend="reference")
    for x, y, of in zip(got, expected, (scene.k, scene.v), strict=True):
        assert x.dtype == y.dtype == getattr(torch, scene.layout.dtype) and torch.equal(x, y)
        for b, tokens in enumerate(of):
            low = (
                0 if scene.window is None else max(0, len(tokens) - scene.new[b] - scene.window + 1)
            )
            kept = min(len(tokens) - low, columns)
            own = tokens[len(tokens) - kept :].transpose(0, 1).to(x.dtype)
            assert torch.equal(x[b, :, columns - kept :], own)
