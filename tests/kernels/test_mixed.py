"""Attention and dense rows over pages of several codecs, under every switch, on the CPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowkv.kernels import Pages, append, checking, gather_dense, paged_attention
from tests.inside import attention as cpu_mixed_call
from tests.kernels.scene import Scene, alone, attend, int32, layout_of
from tests.kernels.test_attention import PREFILL_TOLERANCE, SEALED, calls, each_backend, scenes

HEAVY = settings(max_examples=15)


@HEAVY
@given(data=st.data(), scene=scenes(sealed=True, most_new=30, causal=False))
@each_backend
def test_cross_attention(backend: str, data: st.DataObject, scene: Scene) -> None:
    """Every page may be sealed, rows may be empty, and queries may outnumber tokens."""
    q, how = data.draw(calls(scene))
    near = PREFILL_TOLERANCE[scene.layout.dtype]
    attend(scene, q, how, near, backend, near_mass=(0.0, 3 * near))


@each_backend
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
@given(data=st.data(), scene=scenes(sealed=True))
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
