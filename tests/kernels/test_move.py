"""Moving tokens and pages: append, dense views, copies. All of it bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowkv.kernels import (
    Pages,
    append,
    checking,
    copy_pages,
    gather_dense,
)
from tests.inside import GRANULE_BYTES, page_views
from tests.inside import pages as cpu
from tests.kernels.scene import POISON, Scene, check_copies, int32, layout_of

BACKENDS = ["reference", "cpu"]
each_backend = pytest.mark.parametrize("backend", BACKENDS)


@st.composite
def scenes(draw: st.DrawFn, backend: str) -> Scene:
    size = draw(st.sampled_from([8, 16, 64]))
    layout = layout_of(
        kv_heads=draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from([16, 20, 64, 80])),
        value_dim=draw(st.sampled_from([16, 24, 64])),
        page_size=size,
        dtype=draw(st.sampled_from(["float32", "bfloat16", "float16"])),
    )
    lengths = draw(st.lists(st.integers(1, 3 * size + 1), max_size=4))
    new = [draw(st.integers(0, length)) for length in lengths]
    window = draw(st.sampled_from([None, None, 1, size + 2]))
    return Scene(layout, lengths, new, window, seed=draw(st.integers(0, 99)), backend=backend)


def expected_dense(scene: Scene, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-aligned tokens from what was appended, zeros where nothing is or pages are absent."""
    both = []
    for rows in (scene.k, scene.v):
        dim = scene.layout.head_dim if rows is scene.k else scene.layout.value_dim
        dtype = getattr(torch, scene.layout.dtype)
        dense = torch.zeros(len(rows), scene.layout.kv_heads, columns, dim, dtype=dtype)
        for b, (x, new) in enumerate(zip(rows, scene.new, strict=True)):
            length = len(x)
            gone = 0  # tokens whose pages the window has dropped
            if scene.window is not None:
                size = scene.layout.page_size
                gone = max(0, length - new - scene.window + 1) // size * size
            keep = min(columns, length - gone)
            if keep:
                dense[b, :, columns - keep :] = x[length - keep :].transpose(0, 1)
        both.append(dense)
    return both[0], both[1]


@each_backend
@given(data=st.data())
def test_append_then_gather(backend: str, data: st.DataObject) -> None:
    scene = data.draw(scenes(backend))
    longest = max(scene.lengths, default=0)
    for columns in {0, 1, longest, longest + 5, data.draw(st.integers(0, longest + 1))}:
        with checking():
            k, v = gather_dense(scene.pages, scene.batch, columns, backend=backend)
        expected_k, expected_v = expected_dense(scene, columns)
        assert torch.equal(k, expected_k) and torch.equal(v, expected_v)


@each_backend
def test_append_writes_new_tokens_and_nothing_else(backend: str) -> None:
    scene = Scene(layout_of(2, 20, 16, page_size=8), [21, 5, 40], [3, 0, 11])
    before = scene.pages.arena.clone()
    k, v = torch.randn(14, 2, 20), torch.randn(14, 2, 16)
    with checking():
        append(k, v, scene.pages, scene.batch, backend=backend)
    new = torch.cat([torch.arange(18, 21), torch.arange(29, 40) + 100])
    by_row = {0: k[:3], 1: k[:0], 2: k[3:]}
    dense, _ = gather_dense(scene.pages, scene.batch, 40, backend="reference")
    for b, length in enumerate(scene.lengths):
        tail = by_row[b]
        assert torch.equal(dense[b, :, 40 - len(tail) :], tail.transpose(0, 1))
        kept = scene.k[b][: length - len(tail)].transpose(0, 1)
        assert torch.equal(dense[b, :, 40 - length : 40 - len(tail)], kept)
    changed = (before != scene.pages.arena).sum()
    assert changed <= len(new) * 2 * (20 + 16) * 4


@each_backend
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_append_converts_and_takes_any_strides(backend: str, dtype: str) -> None:
    scene = Scene(layout_of(2, 16, page_size=8, dtype=dtype), [30], [30])
    fused = torch.randn(30, 3, 2, 16)
    for k, v in (
        (fused[:, 0], fused[:, 1]),
        (fused.to(getattr(torch, dtype))[:, 0], fused.to(getattr(torch, dtype))[:, 2]),
        (fused.transpose(1, 3)[:, :, :, 0].transpose(1, 2), fused[:, 1]),
    ):
        append(k, v, scene.pages, scene.batch, backend=backend)
        dense = gather_dense(scene.pages, scene.batch, 30, backend="reference")
        for got, x in zip(dense, (k, v), strict=True):
            assert torch.equal(got[0].transpose(0, 1), x.to(got.dtype))


@each_backend
def test_layers_do_not_touch_each_other(backend: str) -> None:
    layout = layout_of(2, 16, page_size=8, layers=3)
    scene = Scene(layout, [20], [20], layer=1)
    for layer in (0, 2):
        pages = Pages(scene.pages.arena, layout, layer)
        assert gather_dense(pages, scene.batch, 20, backend=backend)[0].isnan().all()
        append(scene.v[0], scene.k[0], pages, scene.batch, backend=backend)
    k, v = gather_dense(scene.pages, scene.batch, 20, backend=backend)
    assert torch.equal(k[0].transpose(0, 1), scene.k[0])
    assert torch.equal(v[0].transpose(0, 1), scene.v[0])
    frames = scene.pages.arena.view(-1, GRANULE_BYTES)
    assert (frames[0] == POISON).all() and (frames[-1] == POISON).all()


@each_backend
@given(data=st.data())
def test_pages_are_copied_bitwise(backend: str, data: st.DataObject) -> None:
    granules, count = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 7))
    check_copies(data.draw(st.permutations(range(2 * count + 2))), granules, backend)


def test_moves_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "slices", lambda work, least: 5)
    scene = Scene(layout_of(3, 64, page_size=16), [70, 3, 200], [7, 0, 200], backend="cpu")
    for columns in (1, 199, 333):
        got = gather_dense(scene.pages, scene.batch, columns, backend="cpu")
        expected = expected_dense(scene, columns)
        assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
    arena = torch.randint(0, 256, (9 * 3 * GRANULE_BYTES,), dtype=torch.uint8)
    frames = arena.clone().view(9, -1)
    copy_pages(arena, int32([0, 6]), int32([24, 12]), 3)
    frames[[8, 4]] = frames[[0, 2]]
    assert torch.equal(arena, frames.flatten())


def test_fresh_tensors_are_aligned_and_own_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "HUGE_BYTES", 0)
    for dtype in (torch.float32, torch.bfloat16):
        x = cpu.fresh(3, 5, 7, dtype=dtype)
        assert x.shape == (3, 5, 7) and x.dtype == dtype and x.is_contiguous()
        assert x.data_ptr() % 64 == 0
        x.fill_(2)
        assert x.sum() == 210
    assert cpu.fresh(0, 4, dtype=torch.float32).shape == (0, 4)


def test_page_views_are_the_layout() -> None:
    """The oracle's own addressing, byte by byte, for a page in the middle of an arena."""
    layout = layout_of(2, 16, 24, page_size=8, layers=2)
    arena = torch.zeros(5 * layout.page_bytes, dtype=torch.uint8)
    keys, values = page_views(Pages(arena, layout, 1))
    granule = 2 * layout.granules
    keys[granule, 1, 3] = 1.5
    values[granule, 1, 7] = -2.0
    at = granule * GRANULE_BYTES + layout.run_offset_bytes(1, 1)
    elements = arena.view(torch.float32)
    assert (elements[at // 4 + 3 * 16 :][:16] == 1.5).all()
    assert (elements[(at + layout.v_offset_bytes) // 4 + 7 * 24 :][:24] == -2.0).all()
    assert elements.count_nonzero() == 40
