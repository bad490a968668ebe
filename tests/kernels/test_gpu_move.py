"""Rotating, remaking, staging and decoding pages on a real GPU, against the oracle on the CPU."""

from __future__ import annotations

import pytest
import torch

from flowkv.kernels import (
    Ragged,
    Rotary,
    append,
    checksum,
    digest_pages,
    drop_tokens,
    gather_dense,
    gather_pages,
    reposition,
    rotations,
    scatter_pages,
    stripe_part,
)
from tests.inside import GRANULE_BYTES
from tests.inside import layout_CODECS as CODECS
from tests.kernels.scene import Scene, layout_of
from tests.kernels.test_reshape import halves
from tests.kernels.test_rope import pool, rotary

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1200)]

DTYPES = ["float32", "bfloat16", "float16"]
# (D, pairs, first rotated dim)
ROTATED = {"whole": (128, 64, 0), "partial": (80, 16, 0), "latent": (576, 32, 512)}
each_rotation = pytest.mark.parametrize("shape", ROTATED.values(), ids=ROTATED)
each_style = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])


def moved(batch: Ragged) -> Ragged:
    return Ragged(*(x.cuda() if isinstance(x, torch.Tensor) else x for x in batch))


@each_rotation
@each_style
@pytest.mark.parametrize("dtype", DTYPES)
def test_append_rotated(shape: tuple[int, int, int], interleaved: bool, dtype: str) -> None:
    dim, pairs, start = shape
    scene = Scene(layout_of(3, dim, 64, 64, dtype), [700, 3, 410, 9], [70, 0, 410, 1], 600)
    rope = rotary(700, pairs, interleaved, start)
    fused = torch.randn(481, 2, 3, dim + 64)
    k, v = fused[:, 0, :, :dim], fused[:, 1, :, dim:]
    for x in (k, k.to(getattr(torch, dtype))):
        arena = scene.pages.arena.cuda()
        pages = scene.pages._replace(arena=arena)
        append(x, v, scene.pages, scene.batch, rope, backend="reference")
        on_gpu = Rotary(rope.cos.cuda(), rope.sin.cuda(), interleaved, start)
        append(x.cuda(), v.cuda(), pages, moved(scene.batch), on_gpu)
        assert torch.equal(arena.cpu(), scene.pages.arena)


@each_rotation
@each_style
@pytest.mark.parametrize("dtype", DTYPES)
def test_reposition(shape: tuple[int, int, int], interleaved: bool, dtype: str) -> None:
    dim, pairs, start = shape
    arena, pages, layout = pool(layout_of(3, dim, 64, 64, dtype), 6)
    speed = 1e4 ** -torch.linspace(0, 1, pairs)
    deltas = [5, 0, -70_000, 5, 1, 99_000]
    for layer in (None, 1):
        there = arena.cuda()
        rope, turns = rotations(deltas, speed, interleaved=interleaved, start=start)
        reposition(arena, pages, turns, rope, layout, layer=layer, backend="reference")
        rope, turns = rotations(
            deltas, speed, interleaved=interleaved, start=start, device=there.device
        )
        reposition(there, pages.cuda(), turns, rope, layout, layer=layer)
        assert torch.equal(there.cpu(), arena)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(128, 128), (80, 64), (576, 512)])
def test_drop_tokens(dims: tuple[int, int], dtype: str) -> None:
    layout = layout_of(3, *dims, 64, dtype)
    where = pool(layout, 7)
    source, target = halves(where, 4)
    keep = torch.stack([torch.randperm(256)[:170] for _ in range(6)]).view(2, 3, 170).int()
    arena = where[0].cuda()
    drop_tokens(where[0], source, target, keep, layout, backend="reference")
    drop_tokens(arena, source.cuda(), target.cuda(), keep.cuda(), layout)
    assert torch.equal(arena.cpu(), where[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(128, 128), (64, 96), (80, 64), (256, 256)])
def test_dense_of_sealed_pages(dims: tuple[int, int], dtype: str) -> None:
    layout = layout_of(3, *dims, 128, dtype)
    scene = Scene(layout, [2000, 128, 700], [4, 1, 1], sealed=CODECS[1:])
    pages, batch = scene.pages, moved(scene.batch)
    there = pages._replace(arena=pages.arena.cuda())
    for columns in (1, 300, 1999, 2005):
        got = gather_dense(there, batch, columns)
        expected = gather_dense(pages, scene.batch, columns, backend="reference")
        assert all(torch.equal(a.cpu(), b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("pinned", [False, True])
def test_stripes_to_staging_and_back(pinned: bool) -> None:
    layout = layout_of(8, 128, page_size=64, dtype="bfloat16", layers=4)
    granules, count = layout.granules, 50
    arena = torch.randint(0, 256, (2 * count * layout.page_bytes,), dtype=torch.uint8).cuda()
    frames = arena.clone().view(2 * count, granules, GRANULE_BYTES)
    order = torch.randperm(2 * count).cuda()
    source, target = order[:count], order[count:]
    first, size = part = stripe_part(layout, 1, 2)
    out = torch.zeros(count, size * GRANULE_BYTES, dtype=torch.uint8)
    out = out.pin_memory() if pinned else out.cuda()
    gather_pages(arena, (source * granules).int(), granules, out, part=part)
    torch.cuda.synchronize()
    expected = frames[source, first : first + size]
    assert torch.equal(out.cuda(), expected.flatten(1))
    scatter_pages(arena, (target * granules).int(), granules, out, part=part)
    frames[target, first : first + size] = expected
    assert torch.equal(arena, frames.flatten())


@pytest.mark.parametrize("stripes", [1, 4, 32])
def test_digests(stripes: int) -> None:
    arena = torch.randint(0, 256, (64 * 32 * GRANULE_BYTES,), dtype=torch.uint8)
    source = torch.randperm(64)[:50].int() * 32
    wanted = digest_pages(arena, source, 32, stripes)
    given, places = arena.cuda(), source.cuda()
    assert torch.equal(digest_pages(given, places, 32, stripes).cpu(), wanted)
    staged = torch.empty(50, 32 * GRANULE_BYTES, dtype=torch.uint8).pin_memory()
    out, back = torch.zeros_like(wanted).cuda(), torch.zeros_like(wanted).cuda()
    gather_pages(given, places, 32, staged, digests=out)
    scatter_pages(torch.zeros_like(given), places, 32, staged, digests=back)
    assert torch.equal(out.cpu(), wanted) and torch.equal(back.cpu(), wanted)


@pytest.mark.parametrize(("words", "block"), [(1, 1), (4097, 1000), (3 << 20, 1 << 19)])
def test_checksum(words: int, block: int) -> None:
    given = torch.randint(-(1 << 63), (1 << 63) - 1, (words,))
    found = checksum(given.cuda(), block)
    assert torch.equal(found.cpu(), checksum(given, block))
