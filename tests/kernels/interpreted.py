"""The Triton kernels in Triton's interpreter, against the oracle; run by `test_triton_interpreter`.

Not collected by itself: TRITON_INTERPRET=1 must be set before Triton is imported, and a process
that has it set can compile nothing. Test names begin with the group that runs them.

An interpreted program takes milliseconds, so rows are short and pages small; what a case needs is
that every loop of a kernel is entered, left out, or cut by a share. bfloat16 is not tested: the
interpreter truncates it.
"""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowkv.kernels import (
    Pages,
    Scoring,
    append,
    checking,
    gather_dense,
    merge,
    paged_attention,
)
from tests.inside import ConfigError, interpreted, merge_two
from tests.inside import few as triton_few
from tests.kernels.scene import Scene, attend, check_copies, check_nan_shows, layout_of

assert os.environ.get("TRITON_INTERPRET") == "1", "run tests/kernels/test_triton_interpreter.py"

TOLERANCE = {"float32": 1e-5, "float16": 2e-3}


def check(scene: Scene, group: int, *, sinks: bool = False, softcap: float | None = None) -> None:
    """Compare a call with attention over the tokens themselves."""
    q = scene.queries(group)
    logits = torch.linspace(-2, 3, q.shape[1]) if sinks else None
    how = Scoring(0.17, scene.window, softcap, logits)
    attend(scene, q, how, TOLERANCE[scene.layout.dtype], "triton", near_lse=1e-5)


# (kv heads, group, D, Dv, page, dtype, window, softcap, sinks)
SHAPES = {
    "plain": (2, 4, 128, 128, 64, "float32", None, None, False),
    "multi-head": (3, 1, 64, 64, 16, "float32", None, None, False),
    "grouped by 8": (1, 8, 64, 64, 64, "float16", None, None, False),
    "padded dims": (1, 4, 80, 48, 16, "float16", None, None, False),
    "odd dims": (1, 3, 20, 24, 16, "float32", None, None, False),
    "wide": (1, 2, 256, 96, 32, "float32", None, None, False),
    "half-used tiles": (1, 2, 64, 64, 24, "float32", 30, None, False),
    "smallest page": (2, 2, 32, 32, 8, "float32", None, None, True),
    "window": (1, 4, 64, 64, 16, "float32", 37, None, False),
    "narrow window": (1, 2, 64, 64, 16, "float16", 1, None, True),
    "softcap": (1, 4, 64, 64, 64, "float32", None, 3.0, False),
    "sinks": (1, 4, 64, 64, 64, "float32", None, None, True),
    "everything": (2, 4, 80, 64, 16, "float32", 50, 5.0, True),
}
each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def run(shape: tuple, lengths: list[int], new: list[int]) -> None:
    heads, group, dim, dim_v, page, dtype, window, softcap, sinks = shape
    layout = layout_of(heads, dim, dim_v, page, dtype)
    scene = Scene(layout, lengths, new, window)
    check(scene, group, sinks=sinks, softcap=softcap)


def test_move_is_interpreted() -> None:
    assert interpreted(merge_two)


@each_shape
def test_few_decode(shape: tuple) -> None:
    """One new token a row, rows of one token and of many pages, shares that cross rows."""
    run(shape, [150, 1, 64, 33], [1, 1, 1, 1])


@each_shape
def test_few_verify(shape: tuple) -> None:
    """Up to three new tokens, across the edge of a page; a row without any."""
    run(shape, [130, 9, 65], [3, 0, 2])


@pytest.mark.parametrize("new", [1, 40])
def test_few_or_many_far_pages(new: int) -> None:
    """Places in the pool of a large GPU need more than 32 bits."""
    check(Scene(layout_of(2, 64, page_size=16), [150, 90], [1, new], far=True), 2)


@pytest.mark.parametrize("shares", [1, 2, 5, 64])
@pytest.mark.parametrize("window", [None, 40])
def test_few_shares(shares: int, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """However the pages are dealt out, the answer is the same."""
    traits = triton_few.traits(torch.device("cpu"))
    monkeypatch.setattr(
        triton_few, "traits", lambda device: traits._replace(processors=shares, shared_bytes=1)
    )
    layout = layout_of(1, 32, page_size=16)
    check(Scene(layout, [150, 17, 300, 1, 48], [1, 1, 1, 0, 1], window), 2)


def test_few_rows_without_tokens() -> None:
    layout = layout_of(1, 32, page_size=16)
    check(Scene(layout, [40, 3, 16], [0, 0, 1]), 2)
    for lengths, new in (([], []), ([12, 3], [0, 0])):
        scene = Scene(layout, lengths, new)
        o, lse = paged_attention(
            scene.queries(4), scene.pages, scene.batch, return_lse=True, backend="triton"
        )
        assert o.shape == (0, 4, 32) and lse.shape == (0, 4)


def test_few_queries_of_another_dtype_and_stride() -> None:
    scene = Scene(layout_of(2, 64, dtype="float16"), [50, 7], [1, 2])
    wide = torch.randn(3, 8, 3 * 64)
    for q in (wide.half()[:, :, 64:128], wide[:, ::2, :64], wide.half()[..., ::3]):
        o = paged_attention(q, scene.pages, scene.batch, backend="triton")
        expected, _ = scene.dense(q, 1 / 8)
        torch.testing.assert_close(o.double(), expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("new", [1, 40])
def test_few_nan_in_a_visible_token_shows(where: str, new: int) -> None:
    check_nan_shows(Scene(layout_of(1, 32, page_size=16), [140], [new]), where, 1, "triton")


def test_few_and_many_without_lse() -> None:
    scene = Scene(layout_of(1, 32, page_size=16), [40, 70], [1, 40])
    q = scene.queries(1)
    both = paged_attention(q, scene.pages, scene.batch, return_lse=True, backend="triton")
    assert torch.equal(both[0], paged_attention(q, scene.pages, scene.batch, backend="triton"))


def test_few_refuses_what_has_no_kernel() -> None:
    scene = Scene(layout_of(1, 16, dtype="float64"), [20], [2])
    with pytest.raises(ConfigError, match="backend='reference'"):
        paged_attention(scene.queries(2), scene.pages, scene.batch, backend="triton")


@each_shape
def test_prefill_in_blocks(shape: tuple) -> None:
    """A prompt longer than a block, one behind a prefix, and a decoding row among them."""
    run(shape, [140, 70, 50], [140 // shape[1], 35, 1])


@each_shape
def test_suffix_over_a_long_prefix(shape: tuple) -> None:
    """Few blocks: their pages are cut into chunks, whose partials are merged."""
    group = shape[1]
    run(shape, [620, 9], [33 // group + 1, 0])


def test_suffix_of_many_heads() -> None:
    """A group too large for the decode kernel."""
    check(Scene(layout_of(1, 32, page_size=16), [70, 5], [1, 2]), 40)
    check(Scene(layout_of(1, 32, page_size=16), [600], [1]), 40)


@settings(max_examples=12)
@given(data=st.data())
def test_prefill_of_anything(data: st.DataObject) -> None:
    draw = data.draw
    size = draw(st.sampled_from([8, 16, 64]))
    dim = draw(st.sampled_from([16, 20, 64]))
    layout = layout_of(draw(st.integers(1, 2)), dim, page_size=size)
    new = draw(st.lists(st.sampled_from([0, 1, 2, 5, 40]), max_size=3))
    past = st.sampled_from([0, 1, size - 1, size, 3 * size + 1, 190])
    lengths = [max(1, n + draw(past)) for n in new]
    window = draw(st.sampled_from([None, 1, 5, size, size + 3, 100]))
    sinks, softcap = draw(st.booleans()), draw(st.sampled_from([None, 4.0]))
    group = draw(st.sampled_from([1, 2, 4, 7]))
    check(Scene(layout, lengths, new, window), group, sinks=sinks, softcap=softcap)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_move_merge(count: int, dtype: torch.dtype) -> None:
    outs = torch.randn(count, 3, 2, 20).to(dtype)
    lses = torch.randn(count, 3, 2) * 30
    if count > 1:  # a part without tokens may hold anything
        lses[1, 0], outs[1, 0] = -torch.inf, torch.nan
    parts = list(zip(outs, lses, strict=True))
    o, lse = merge(parts, backend="triton")
    clean = [(a.nan_to_num(0), b) for a, b in parts]
    expected, expected_lse = merge(clean, backend="reference")
    torch.testing.assert_close(o, expected, rtol=0, atol=1e-6 if dtype == torch.float32 else 2e-3)
    torch.testing.assert_close(lse, expected_lse)
    assert o.dtype == dtype


def test_move_merge_of_nothing() -> None:
    nothing = torch.full((2, 3, 16), torch.nan), torch.full((2, 3), -torch.inf)
    o, lse = merge([nothing, nothing], backend="triton")
    assert (o == 0).all() and (lse == -torch.inf).all()
    o, lse = merge([(torch.ones(0, 2, 4), torch.ones(0, 2))] * 2, backend="triton")
    assert o.shape == (0, 2, 4)


MOVES = [(1, 16, 16, 8, "float32"), (3, 20, 24, 16, "float16"), (5, 80, 256, 32, "float16")]


@pytest.mark.parametrize(("heads", "dim", "dim_v", "page", "dtype"), MOVES)
@pytest.mark.parametrize("window", [None, 30])
def test_move_append_and_gather(
    heads: int, dim: int, dim_v: int, page: int, dtype: str, window: int | None
) -> None:
    layout = layout_of(heads, dim, dim_v, page, dtype, layers=3)
    scene = Scene(layout, [70, 3, 41, 9], [7, 0, 41, 1], window)
    fused = torch.randn(49, 2, heads, dim + dim_v)  # strided, and of another dtype
    k, v = fused[:, 0, :, :dim], fused[:, 1, :, dim:]
    arenas = [scene.pages.arena.clone() for _ in range(2)]
    for arena, backend in zip(arenas, ("triton", "reference"), strict=True):
        with checking():
            append(k, v, scene.pages._replace(arena=arena), scene.batch, backend=backend)
    assert torch.equal(*arenas) and not torch.equal(arenas[0], scene.pages.arena)
    pages = Pages(arenas[0], layout, 1)
    for columns in (0, 1, 33, 70, 75):
        got = gather_dense(pages, scene.batch, columns, backend="triton")
        expected = gather_dense(pages, scene.batch, columns, backend="reference")
        assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


@pytest.mark.parametrize("granules", [1, 3, 10])
@pytest.mark.parametrize("count", [0, 1, 4])
def test_move_pages(granules: int, count: int) -> None:
    check_copies(torch.randperm(2 * count + 2).tolist(), granules, "triton")
