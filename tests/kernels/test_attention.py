"""Paged attention: oracle and numba twin against dense attention over the tokens themselves."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowkv.kernels import Ragged, Scoring, merge, paged_attention
from tests.inside import attention as cpu_attention
from tests.inside import layout_CODECS as CODECS
from tests.kernels.scene import (
    Scene,
    attend,
    check_nan_shows,
    check_tokens_of_no_row,
    int32,
    layout_of,
)

TOLERANCE = {"float32": 4e-6, "bfloat16": 1.6e-2, "float16": 2e-3}
PREFILL_TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3}
DTYPES = ["float32", "bfloat16", "float16"]
SEALED = CODECS[1:]
each_backend = pytest.mark.parametrize("backend", ["reference", "cpu"])
raw_or_sealed = pytest.mark.parametrize(
    "sealed", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["raw", "sealed"]
)


@st.composite
def scenes(draw: st.DrawFn, sealed: bool, most_new: int = 8, causal: bool = True) -> Scene:
    """Rows of raw pages, or of pages of codecs in any order and raw ones behind them."""
    dim = draw(st.sampled_from([16, 20, 64, 80, 96, 128, 256]))
    size = draw(st.sampled_from([8, 16, 64, 72, 128]))
    small = dim < 64 or size < 64
    layout = layout_of(
        kv_heads=draw(st.integers(1, 3)),
        head_dim=dim,
        value_dim=draw(st.sampled_from([dim, dim, 72] if not small else [dim, dim, 16, 24])),
        page_size=size,
        dtype=draw(st.sampled_from(["float32", *DTYPES])),
    )
    rows = draw(st.integers(int(sealed), 4 - sealed))
    new = [draw(st.sampled_from([0, 1, 1, 2, 3, 5, most_new])) for _ in range(rows)]
    edges = [0, 1, size - 1, size, size + 1, 2 * size, 3 * size - 1, 3 * size, 4 * size]
    past = st.one_of(st.sampled_from(edges), st.integers(0, 200))
    lengths = [max(1, n + draw(past)) if causal else draw(past) for n in new]
    window = draw(st.sampled_from([None, None, 1, 5, size, size + 3, 2 * size + 3, 100]))
    any_codecs = st.sampled_from([SEALED, SEALED, *((codec,) for codec in SEALED)])
    codecs = () if not sealed else ("kv8",) if small else draw(any_codecs)
    far = not sealed and draw(st.sampled_from([False, False, False, True]))
    seed = draw(st.integers(0, 99))
    options = {"sealed": codecs, "far": far, "causal": causal}
    return Scene(layout, lengths, new, window if causal else None, seed, **options)


@st.composite
def calls(draw: st.DrawFn, scene: Scene) -> tuple[torch.Tensor, Scoring]:
    """Queries of a scene, and how they attend: half of them with the switches of most models."""
    q, plain = scene.queries(draw(st.sampled_from([1, 2, 3, 4, 5, 7, 8, 16]))), draw(st.booleans())
    heads, rng = q.shape[1], torch.Generator().manual_seed(scene.seed + 2)
    alibi = tree = mass = None
    if scene.causal and not plain and draw(st.booleans()):
        alibi = torch.rand(heads, generator=rng) * 0.1 - 0.03
    if scene.causal and not plain and draw(st.booleans()):
        bits = torch.randint(-(1 << 63), (1 << 63) - 1, (len(q),), generator=rng)
        tree = bits & torch.randint(-(1 << 63), (1 << 63) - 1, (len(q),), generator=rng)
    if not plain and draw(st.booleans()):
        columns = scene.batch.table.shape[1]
        mass = torch.rand(len(scene.lengths), columns, scene.layout.kv_heads, generator=rng)
    how = Scoring(
        scale=0.17,
        window=scene.window,
        softcap=draw(st.sampled_from([None, None, 3.0, 50.0])),
        sinks=torch.linspace(-2, 3, heads) if draw(st.booleans()) else None,
        alibi=alibi,
        tree=tree,
        causal=scene.causal,
        mass=mass,
        invariant=not plain and draw(st.booleans()),
    )
    return q, how


@raw_or_sealed
@pytest.mark.parametrize("way", ["reference", "cpu", "slices"])
@given(data=st.data())
def test_every_switch(way: str, sealed: bool, data: st.DataObject) -> None:
    """In slices, items of several pieces leave partials, on several threads, and merge."""
    scene = data.draw(scenes(sealed))
    q, how = data.draw(calls(scene))
    near = TOLERANCE[scene.layout.dtype]
    near_lse = max(1e-5, near / 30)
    with pytest.MonkeyPatch.context() as patch:
        if way == "slices":
            patch.setattr(cpu_attention, "slices", lambda work, least: 7)
            patch.setattr(cpu_attention, "INVARIANT_TOKENS", 1)
            patch.setattr(torch, "get_num_threads", lambda: 2)
        backend = "reference" if way == "reference" else "cpu"
        bounds = {"near_lse": near_lse, "near_mass": (0.0, 3 * near_lse)}
        attend(scene, q, how, near, backend, **bounds)


@raw_or_sealed
@given(data=st.data())
def test_many_new_tokens(sealed: bool, data: st.DataObject) -> None:
    """They see raw pages rounded to the pages' dtype, which blurs logits and weights."""
    scene = data.draw(scenes(sealed, most_new=40))
    q, how = data.draw(calls(scene))
    near = PREFILL_TOLERANCE[scene.layout.dtype]
    attend(scene, q, how, near, near_mass=(0.0, 3 * near))


@pytest.mark.parametrize("past", [0, 1, 300])
@pytest.mark.parametrize("window", [None, 64, 10_000])
def test_prefill_longer_than_a_block(past: int, window: int | None) -> None:
    scene = Scene(layout_of(2, 32, page_size=64), [past + 300, 9], [300, 1], window)
    attend(scene, scene.queries(2), Scoring(0.17, window), 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_of_another_dtype_and_stride(dtype: str) -> None:
    """float32 queries over 16-bit pages, and q as a view of a fused projection."""
    scene = Scene(layout_of(2, 64, dtype=dtype), [50, 7, 90], [1, 3, 40])
    wide = torch.randn(44, 8, 3 * 64)
    for q in (wide[:, :, 64:128], wide.bfloat16()[:, ::2, :64], wide.half()[..., ::3]):
        for backend in ("cpu", "reference"):
            o = paged_attention(q, scene.pages, scene.batch, backend=backend)
            expected, _ = scene.dense(q, 1 / math.sqrt(64))
            torch.testing.assert_close(
                o.double(), expected, rtol=0, atol=PREFILL_TOLERANCE[str(q.dtype)[6:]] + 1e-6
            )


@each_backend
def test_float64_and_empty_batches(backend: str) -> None:
    if backend == "reference":
        scene = Scene(layout_of(1, 16, dtype="float64"), [20], [2])
        q = scene.queries(2)
        o = paged_attention(q, scene.pages, scene.batch)  # float64 chooses the oracle by itself
        torch.testing.assert_close(o, scene.dense(q, 0.25)[0], rtol=0, atol=1e-14)
    for lengths, new in (([], []), ([12, 3], [0, 0])):
        scene = Scene(layout_of(1, 16), lengths, new)
        o, lse = paged_attention(
            scene.queries(4), scene.pages, scene.batch, return_lse=True, backend=backend
        )
        assert o.shape == (0, 4, 16) and lse.shape == (0, 4)


@each_backend
@pytest.mark.parametrize(("past", "new", "padded"), [(0, 20, 32), (0, 1, 32), (150, 60, 64)])
def test_tokens_of_no_row_behind_a_single_row(
    backend: str, past: int, new: int, padded: int
) -> None:
    check_tokens_of_no_row(past, new, padded, 1e-5, backend)


def parts_of(scene: Scene, cut: int) -> list[Ragged]:
    """The batch as two: pages before `cut`, then the rest (one row, one new token)."""
    size, batch = scene.layout.page_size, scene.batch
    before = batch._replace(lengths=int32([cut * size]), most_length=cut * size)
    rest = scene.lengths[0] - cut * size
    after = batch._replace(
        table=batch.table[:, cut:].contiguous(), lengths=int32([rest]), most_length=rest
    )
    return [before, after]


@each_backend
@pytest.mark.parametrize(
    ("length", "size", "dtype", "sealed"),
    [(150, 16, "float32", ()), (150, 16, "bfloat16", ()), (450, 64, "float32", SEALED)],
)
def test_parts_of_any_split_merge_to_the_whole(
    backend: str, length: int, size: int, dtype: str, sealed: tuple[str, ...]
) -> None:
    scene = Scene(layout_of(2, 64, 80, size, dtype), [length], [1], sealed=sealed)
    q = scene.queries(3)
    whole, lse = paged_attention(q, scene.pages, scene.batch, return_lse=True, backend=backend)
    for cut in range(1, length // size):
        parts = [
            paged_attention(q, scene.pages, part, causal=causal, return_lse=True, backend=backend)
            for part, causal in zip(parts_of(scene, cut), (False, True), strict=True)
        ]
        o, o_lse = merge(parts, backend=backend)
        torch.testing.assert_close(o, whole, rtol=0, atol=TOLERANCE[dtype])
        torch.testing.assert_close(o_lse, lse, rtol=0, atol=1e-5)


def test_slices_answer_as_one_to_rounding() -> None:
    scene = Scene(layout_of(2, 64, page_size=16), [700, 1, 33], [2, 1, 8])
    q = scene.queries(4)
    whole = paged_attention(q, scene.pages, scene.batch, backend="cpu")
    with pytest.MonkeyPatch.context() as patch:
        for count in (2, 3, 50, 1000):
            patch.setattr(cpu_attention, "slices", lambda work, least, count=count: count)
            o = paged_attention(q, scene.pages, scene.batch, backend="cpu")
            torch.testing.assert_close(o, whole, rtol=0, atol=1e-6)


def test_same_call_same_bits_from_many_threads() -> None:
    scene = Scene(layout_of(2, 64, page_size=16), [500, 90], [1, 3])
    q = scene.queries(4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 3)
        patch.setattr(cpu_attention, "slices", lambda work, least: 5)
        first = paged_attention(q, scene.pages, scene.batch, backend="cpu")
        with ThreadPoolExecutor(4) as pool:
            calls = [
                pool.submit(paged_attention, q, scene.pages, scene.batch, backend="cpu")
                for _ in range(24)
            ]
            assert all(torch.equal(call.result(), first) for call in calls)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("where", ["k", "v"])
def test_nan_in_a_visible_token_shows(dtype: str, where: str) -> None:
    """No fast-math shortcut may turn what the oracle calls NaN into a number."""
    layout = layout_of(1, 32, page_size=16, dtype=dtype)
    check_nan_shows(Scene(layout, [40], [1]), where, 2, "cpu")


@each_backend
def test_large_logits_stay_exact(backend: str) -> None:
    scene = Scene(layout_of(1, 16), [60], [2])
    q = scene.queries(2) * 300
    o, lse = paged_attention(
        q, scene.pages, scene.batch, scale=1.0, return_lse=True, backend=backend
    )
    reference, total = paged_attention(
        q, scene.pages, scene.batch, scale=1.0, return_lse=True, backend="reference"
    )
    torch.testing.assert_close(o, reference, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(lse, total, rtol=1e-6, atol=1e-3)
