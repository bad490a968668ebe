"""Paged attention: oracle and numba twin against dense attention over the tokens themselves."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowkv.kernels import Ragged, append, checking, merge, paged_attention
from tests.inside import attention as cpu_attention
from tests.kernels.scene import Scene, int32, layout_of

TOLERANCE = {"float32": 4e-6, "bfloat16": 1.6e-2, "float16": 2e-3}
PREFILL_TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3}
DTYPES = ["float32", "bfloat16", "float16"]


@st.composite
def scenes(draw: st.DrawFn, most_new: int = 8, dtypes: list[str] | None = None) -> Scene:
    dim = draw(st.sampled_from([16, 20, 64, 80, 96, 128, 256]))
    size = draw(st.sampled_from([8, 16, 64, 128]))
    layout = layout_of(
        kv_heads=draw(st.integers(1, 3)),
        head_dim=dim,
        value_dim=draw(st.sampled_from([dim, dim, 16, 24])),
        page_size=size,
        dtype=draw(st.sampled_from(dtypes or DTYPES)),
    )
    rows = draw(st.integers(0, 4))
    new = [draw(st.sampled_from([0, 1, 1, 2, 5, most_new])) for _ in range(rows)]
    past = st.one_of(
        st.sampled_from([0, 1, size - 1, size, size + 1, 3 * size]), st.integers(0, 200)
    )
    lengths = [max(1, n + draw(past)) for n in new]
    window = draw(st.sampled_from([None, None, 1, 5, size, size + 3, 100]))
    seed, far = draw(st.integers(0, 99)), draw(st.sampled_from([False, False, False, True]))
    return Scene(layout, lengths, new, window, seed=seed, far=far)


class Switches(NamedTuple):
    group: int = 2
    softcap: float | None = None
    with_sinks: bool = False


ANY_SWITCHES = st.builds(
    Switches,
    st.sampled_from([1, 2, 3, 4, 5, 7, 8]),
    st.sampled_from([None, None, 3.0, 50.0]),
    st.booleans(),
)


def attend(scene: Scene, switches: Switches, tolerance: float, backend: str | None) -> None:
    """Compare a backend with dense attention."""
    q = scene.queries(switches.group)
    sinks = torch.linspace(-2, 3, q.shape[1]) if switches.with_sinks else None
    options = {"scale": 0.17, "softcap": switches.softcap, "sinks": sinks}
    expected, expected_lse = scene.dense(q, **options)
    options |= {"window": scene.window, "return_lse": True, "backend": backend}
    with checking():
        o, lse = paged_attention(q, scene.pages, scene.batch, **options)
    assert o.dtype == q.dtype and o.shape == expected.shape and lse.dtype == torch.float32
    torch.testing.assert_close(o.double(), expected.double(), rtol=0, atol=tolerance)
    near = max(1e-5, tolerance / 30)
    torch.testing.assert_close(lse.double(), expected_lse.double(), rtol=1e-6, atol=near)


@given(scene=scenes(), switches=ANY_SWITCHES)
def test_oracle(scene: Scene, switches: Switches) -> None:
    attend(scene, switches, TOLERANCE[scene.layout.dtype], "reference")


@given(scene=scenes(), switches=ANY_SWITCHES)
def test_numba(scene: Scene, switches: Switches) -> None:
    attend(scene, switches, TOLERANCE[scene.layout.dtype], "cpu")


@given(scene=scenes(), switches=ANY_SWITCHES)
def test_numba_in_slices(scene: Scene, switches: Switches) -> None:
    """Items that lie across slices leave partials and merge."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_attention, "slices", lambda work, least: 7)
        attend(scene, switches, TOLERANCE[scene.layout.dtype], "cpu")


@given(scene=scenes(most_new=40), switches=ANY_SWITCHES)
def test_many_new_tokens(scene: Scene, switches: Switches) -> None:
    attend(scene, switches, PREFILL_TOLERANCE[scene.layout.dtype], None)


@pytest.mark.parametrize("past", [0, 1, 300])
@pytest.mark.parametrize("window", [None, 64, 10_000])
def test_prefill_longer_than_a_block(past: int, window: int | None) -> None:
    scene = Scene(layout_of(2, 32, page_size=64), [past + 300, 9], [300, 1], window)
    attend(scene, Switches(), 1e-5, None)


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


@pytest.mark.parametrize("backend", ["reference", "cpu"])
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


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(("past", "new", "padded"), [(0, 20, 32), (0, 1, 32), (150, 60, 64)])
def test_tokens_of_no_row_behind_a_single_row(
    backend: str, past: int, new: int, padded: int
) -> None:
    """As in captured steps, whose buffers hold more tokens than the row has."""
    scene = Scene(layout_of(2, 64, page_size=16), [past + new], [new])
    more = scene.batch._replace(most_new=padded, most_length=2 * (past + padded))
    q = torch.cat([scene.queries(4), torch.full((padded - new, 8, 64), torch.nan)])
    o = paged_attention(q, scene.pages, more, backend=backend)[:new]
    expected = paged_attention(q[:new], scene.pages, scene.batch, backend="reference")
    torch.testing.assert_close(o, expected, rtol=0, atol=1e-5)


def parts_of(scene: Scene, cut: int) -> list[Ragged]:
    """The batch as two: pages before `cut`, then the rest (one row, one new token)."""
    size, batch = scene.layout.page_size, scene.batch
    before = batch._replace(lengths=int32([cut * size]), most_length=cut * size)
    rest = scene.lengths[0] - cut * size
    after = batch._replace(
        table=batch.table[:, cut:].contiguous(), lengths=int32([rest]), most_length=rest
    )
    return [before, after]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parts_of_any_split_merge_to_the_whole(backend: str, dtype: str) -> None:
    scene = Scene(layout_of(2, 64, 80, page_size=16, dtype=dtype), [150], [1])
    q = scene.queries(3)
    whole, lse = paged_attention(q, scene.pages, scene.batch, return_lse=True, backend=backend)
    for cut in range(1, 10):
        parts = [
            paged_attention(q, scene.pages, part, return_lse=True, backend=backend)
            for part in parts_of(scene, cut)
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
    scene = Scene(layout_of(1, 32, page_size=16, dtype=dtype), [40], [1])
    x = getattr(scene, where)[0]
    x[21, 0, 3] = torch.nan
    full = scene.batch._replace(starts=int32([0, 40]), most_new=40)
    append(scene.k[0], scene.v[0], scene.pages, full)
    o, lse = paged_attention(
        scene.queries(2), scene.pages, scene.batch, return_lse=True, backend="cpu"
    )
    if where == "k":
        assert o.isnan().all() and lse.isnan().all()
    else:
        assert o[..., 3].isnan().all() and o.isnan().sum() == 2


@pytest.mark.parametrize("backend", ["reference", "cpu"])
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
