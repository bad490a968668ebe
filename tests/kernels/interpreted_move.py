"""The Triton kernels that rotate, remake and gather pages, in Triton's interpreter.

See `interpreted`, which says how and why; this file is run like it.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from flowkv.kernels import (
    append,
    checking,
    checksum,
    digest_pages,
    drop_tokens,
    gather_dense,
    gather_pages,
    reposition,
    rotations,
    scatter_pages,
)
from tests.inside import CODEC_SHIFT, GRANULE_BYTES, append_kernel, interpreted, narrowed
from tests.inside import layout_CODECS as CODECS
from tests.inside import move as triton_reshape
from tests.inside import move as triton_rotary
from tests.kernels.scene import Scene, int32, layout_of
from tests.kernels.test_reshape import halves
from tests.kernels.test_rope import keys_of, outside_keys, pool, rotary

assert os.environ.get("TRITON_INTERPRET") == "1", "run tests/kernels/test_triton_interpreter.py"

# (kv heads, D, Dv, page, dtype, pairs, first rotated dim)
ROTATED = {
    "whole": (2, 16, 16, 8, "float32", 8, 0),
    "partial": (3, 20, 24, 16, "float16", 5, 0),
    "behind a latent part": (1, 80, 64, 32, "float16", 16, 48),
    "in the middle": (5, 96, 16, 24, "float32", 12, 7),
    "float64": (1, 16, 16, 8, "float64", 8, 0),
}
each_rotation = pytest.mark.parametrize("shape", ROTATED.values(), ids=ROTATED)
each_style = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])


def test_remake_is_interpreted() -> None:
    assert interpreted(append_kernel) and interpreted(triton_rotary.reposition_kernel)
    assert interpreted(triton_reshape.drop_kernel)


@each_rotation
@each_style
def test_remake_append_rotated(shape: tuple, interleaved: bool) -> None:
    heads, dim, dim_v, page, dtype, pairs, start = shape
    layout = layout_of(heads, dim, dim_v, page, dtype, layers=3)
    scene = Scene(layout, [30, 3, 41, 9], [7, 0, 20, 1], 60)
    rope = rotary(41, pairs, interleaved, start)
    fused = torch.randn(28, 2, heads, dim + dim_v)  # strided, and of another dtype
    k, v = fused[:, 0, :, :dim], fused[:, 1, :, dim:]
    arenas = [scene.pages.arena.clone() for _ in range(2)]
    for arena, backend in zip(arenas, ("triton", "reference"), strict=True):
        with checking():
            append(k, v, scene.pages._replace(arena=arena), scene.batch, rope, backend=backend)
    assert torch.equal(*arenas) and not torch.equal(arenas[0], scene.pages.arena)


def test_remake_append_leaves_tokens_of_no_row() -> None:
    """A captured graph is padded with tokens behind the last row, and rows lose their pages."""
    scene = Scene(layout_of(2, 16, page_size=8), [9, 4], [3, 1], 1)
    scene.batch.table[scene.batch.rows[0].item()] = -1
    k, v = torch.randn(2, 7, 2, 16)
    for rope in (None, rotary(9, 8)):
        arenas = [scene.pages.arena.clone() for _ in range(2)]
        append(k, v, scene.pages._replace(arena=arenas[0]), scene.batch, rope, backend="triton")
        batch = scene.batch._replace(
            rows=scene.batch.rows[1:], lengths=int32([4]), starts=int32([0, 1])
        )
        pages = scene.pages._replace(arena=arenas[1])
        append(k[3:4], v[3:4], pages, batch, rope, backend="reference")
        assert torch.equal(*arenas)


@each_rotation
@each_style
@pytest.mark.parametrize("layer", [None, 1])
def test_remake_reposition(
    shape: tuple, interleaved: bool, layer: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, dim, dim_v, page, dtype, pairs, start = shape
    monkeypatch.setattr(triton_rotary, "MOST_ELEMENTS", 512)  # several programs a page
    arena, pages, layout = pool(layout_of(heads, dim, dim_v, page, dtype), 4)
    speed = 100.0 ** -torch.linspace(0, 1, pairs)
    rope, turns = rotations([5, 0, -70_000, 5], speed, interleaved=interleaved, start=start)
    rest, before = outside_keys(arena, pages, layout), keys_of(arena, pages, layout)
    arenas = [arena, arena.clone()]
    for x, backend in zip(arenas, ("triton", "reference"), strict=True):
        with checking():
            lists = (a.repeat_interleave(2)[::2] for a in (pages, turns))  # neither is contiguous
            reposition(x, *lists, rope, layout, layer=layer, backend=backend)
    assert torch.equal(*arenas)
    assert torch.equal(outside_keys(arena, pages, layout), rest)
    after = keys_of(arena, pages, layout)
    assert torch.equal(after[:, 1], before[:, 1]) and not torch.equal(after[:, 2], before[:, 2])


@pytest.mark.parametrize("kept", [0, 1, 16, 37])
@pytest.mark.parametrize(("dim", "dim_v"), [(16, 24), (80, 64)])
def test_remake_dropped_tokens(
    kept: int, dim: int, dim_v: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_reshape, "MOST_ELEMENTS", 1024)  # several programs a head
    layout = layout_of(3, dim, dim_v, 16, "float16")
    where = pool(layout, 3 + -(-kept // 16))
    source, target = halves(where, 3)
    keep = torch.stack([torch.randperm(48)[:kept] for _ in range(6)]).view(2, 3, kept).int()
    arenas = [where[0], where[0].clone()]
    for x, backend in zip(arenas, ("triton", "reference"), strict=True):
        with checking():
            lists = (a.repeat_interleave(2)[::2] for a in (source, target))
            drop_tokens(x, *lists, keep, layout, backend=backend)
    assert torch.equal(*arenas)


@pytest.mark.parametrize("part", [(0, 1), (2, 3), (1, 0), (0, 5)])
@pytest.mark.parametrize("count", [0, 1, 4])
def test_remake_parts_of_pages(part: tuple[int, int], count: int) -> None:
    first, size = part
    arena = torch.randint(0, 256, (10 * 5 * GRANULE_BYTES,), dtype=torch.uint8)
    frames = arena.clone().view(10, 5, GRANULE_BYTES)
    places = torch.randperm(10)
    source, target = places[:count], places[count : 2 * count]
    out = torch.zeros(count, size * GRANULE_BYTES, dtype=torch.uint8)
    with checking():
        at = int32(5 * source).repeat_interleave(2)[::2]
        gather_pages(arena, at, 5, out, part=part, backend="triton")
        assert torch.equal(out, frames[source, first : first + size].flatten(1))
        scatter_pages(arena, int32(5 * target), 5, out, part=part, backend="triton")
    frames[target, first : first + size] = frames[source, first : first + size]
    assert torch.equal(arena, frames.flatten())


# (KV heads, D, Dv, page, dtype, codecs)
SEALED = {
    "all": (1, 64, 64, 64, "float16", CODECS[1:]),
    "bfloat16": (1, 64, 96, 64, "bfloat16", CODECS[1:]),
    "blocks of 16": (1, 80, 64, 72, "float32", ("kv4c", "kv4h")),
    "small pages": (3, 20, 24, 24, "float16", ("kv8",)),
}


@pytest.mark.parametrize("case", SEALED)
def test_dense_of_sealed_pages(case: str) -> None:
    """Bit for bit what the oracle decodes, in whatever order codecs stand in a row."""
    heads, dim, dim_v, page, dtype, codecs = SEALED[case]
    layout = layout_of(heads, dim, dim_v, page, dtype)
    long = page * (len(codecs) + 2) + 3
    scene = Scene(layout, [long, 2, 2 * page], [4, 1, 1], seed=1, sealed=codecs)
    ids = scene.batch.table[scene.batch.table >= 0] >> CODEC_SHIFT
    assert set(ids.tolist()) == {CODECS.index(codec) for codec in ("raw", *codecs)}
    for columns in {page + 1, long - 4, long + 5}:
        with checking():
            got = gather_dense(scene.pages, scene.batch, columns, backend="triton")
        for x, parts in zip(got, (scene.k, scene.v), strict=True):
            assert x.shape[2] == columns and x.dtype == getattr(torch, dtype)
            for line, part in zip(x, parts, strict=True):
                kept = min(columns, len(part))
                seen = line[:, columns - kept :].transpose(0, 1)
                assert torch.equal(seen, narrowed(part[len(part) - kept :], x.dtype))
                assert not line[:, : columns - kept].count_nonzero()


def test_dense_of_pages_that_are_gone() -> None:
    layout = layout_of(1, 64, page_size=64, dtype="float16")
    scene = Scene(layout, [200], [1], window=100, seed=0, sealed=("kv8",))
    table = scene.batch.table[scene.batch.rows[0].item()]
    assert table[0] == -1 and table[1] >= 1 << CODEC_SHIFT
    for columns in (199, 200):
        got = gather_dense(scene.pages, scene.batch, columns, backend="triton")
        for x, part in zip(got, (scene.k[0], scene.v[0]), strict=True):
            assert torch.equal(x[0, :, -136:].transpose(0, 1), narrowed(part[64:], x.dtype))
            assert not x[0, :, :-136].count_nonzero()


@pytest.mark.parametrize(
    ("granules", "stripes", "part"), [(1, 1, None), (6, 3, None), (6, 1, None), (8, 2, (3, 4))]
)
def test_move_digests(granules: int, stripes: int, part: tuple[int, int] | None) -> None:
    generator = torch.manual_seed(granules)
    arena = torch.randint(0, 256, (9 * granules * GRANULE_BYTES,), generator=generator).byte()
    source = torch.tensor([0, 4, 2]).int() * granules + 1
    found = digest_pages(arena, source, granules, stripes, part=part, backend="triton")
    wanted = digest_pages(arena, source, granules, stripes, part=part, backend="reference")
    assert torch.equal(found, wanted)
    staged = torch.empty(3, (part or (0, granules))[1] * GRANULE_BYTES, dtype=torch.uint8)
    copied, back = torch.zeros_like(wanted), torch.zeros_like(wanted)
    gather_pages(arena, source, granules, staged, part=part, digests=copied, backend="triton")
    other = torch.zeros_like(arena)
    scatter_pages(other, source, granules, staged, part=part, digests=back, backend="triton")
    assert torch.equal(copied, wanted) and torch.equal(back, wanted)
    assert torch.equal(
        digest_pages(other, source, granules, stripes, part=part, backend="reference"), wanted
    )
    size = staged.shape[1] // GRANULE_BYTES
    lines, apart = torch.tensor([3, 0, 2]).int() * size, torch.zeros(4 * staged.shape[1]).byte()
    moved: dict[str, Any] = {"part": part, "lines": lines, "backend": "triton"}
    gather_pages(arena, source, granules, apart, digests=copied.zero_(), **moved)
    assert torch.equal(apart.view(4, -1)[[3, 0, 2]], staged) and torch.equal(copied, wanted)
    gather_pages(arena, source, granules, apart.zero_(), **moved)
    assert torch.equal(apart.view(4, -1)[[3, 0, 2]], staged)
    for digests in (back.zero_(), None):
        other = torch.zeros_like(arena)
        scatter_pages(other, source, granules, apart, digests=digests, **moved)
        again = digest_pages(other, source, granules, stripes, part=part, backend="reference")
        assert torch.equal(again, wanted)
    assert torch.equal(back, wanted)


@pytest.mark.parametrize(("words", "block"), [(1, 1), (4097, 1000), (70_000, 1 << 19), (65, 64)])
def test_remake_checksum(words: int, block: int) -> None:
    given = torch.randint(-(1 << 63), (1 << 63) - 1, (words,), generator=torch.manual_seed(words))
    assert torch.equal(
        checksum(given, block, backend="triton"), checksum(given, block, backend="reference")
    )
