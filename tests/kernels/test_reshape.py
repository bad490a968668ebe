"""Pages remade of tokens of others, and layers' stripes of pages to and from staging."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowkv import Geometry
from flowkv.kernels import (
    Pages,
    checking,
    copy_pages,
    drop_tokens,
    gather_pages,
    scatter_pages,
    stripe_part,
)
from tests.inside import GRANULE_BYTES, ConfigError, GeometryError, page_layout, page_views
from tests.inside import layout_CODECS as CODECS
from tests.inside import pages as cpu
from tests.kernels.scene import POISON, int32, layout_of
from tests.kernels.test_rope import Pool, pool

each_backend = pytest.mark.parametrize("backend", ["reference", "cpu"])


def halves(where: Pool, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two lists of the pool's pages: the first `count`, and the others, poisoned."""
    arena, pages, layout = where
    frames = arena.view(-1, GRANULE_BYTES)
    for granule in pages[count:].tolist():
        frames[granule : granule + layout.granules] = POISON
    return pages[:count], pages[count:]


@each_backend
@settings(max_examples=20)
@given(data=st.data())
def test_kept_tokens_fill_the_new_pages(backend: str, data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([8, 24]))
    layout = layout_of(
        data.draw(st.integers(1, 3)),
        data.draw(st.sampled_from([16, 20])),
        data.draw(st.sampled_from([16, 24])),
        size,
        data.draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        layers=data.draw(st.integers(1, 3)),
    )
    old = data.draw(st.integers(1, 4))
    kept = data.draw(st.integers(0, old * size))
    new = -(-kept // size)
    where = pool(layout, old + new, data.draw(st.integers(0, 99)))
    arena = where[0]
    source, target = halves(where, old)
    ascending = data.draw(st.booleans())
    keep = torch.stack(
        [torch.randperm(old * size)[:kept] for _ in range(layout.layers * layout.kv_heads)]
    )
    keep = keep.sort().values if ascending else keep
    keep = keep.view(layout.layers, layout.kv_heads, kept).int()
    before = arena.clone()
    with checking():
        drop_tokens(arena, source, target, keep, layout, backend=backend)
    for layer in range(layout.layers):
        olds = page_views(Pages(before, layout, layer))
        news = page_views(Pages(arena, layout, layer))
        for was, now in zip(olds, news, strict=True):
            for head in range(layout.kv_heads):
                for j, token in enumerate(keep[layer, head].tolist()):
                    got = now[target[j // size].item(), head, j % size]
                    assert torch.equal(got, was[source[token // size].item(), head, token % size])
                    got.view(torch.uint8).fill_(POISON)
    # Those tokens poisoned again, nothing has changed: neighbours, padding, the end of a page.
    assert torch.equal(arena, before)


@each_backend
def test_a_token_may_be_kept_twice(backend: str) -> None:
    layout = layout_of(2, 16, page_size=8, layers=1)
    where = pool(layout, 2)
    source, target = halves(where, 1)
    keep = torch.full((1, 2, 8), 5, dtype=torch.int32)
    drop_tokens(where[0], source, target, keep, layout, backend=backend)
    keys, _ = page_views(Pages(where[0], layout, 0))
    assert (keys[target.item()] == keys[source.item(), :, 5:6]).all()


def test_dropping_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "slices", lambda work, least: 5)
    layout = layout_of(3, 16, page_size=8)
    where = pool(layout, 7)
    source, target = halves(where, 4)
    keep = torch.stack([torch.randperm(32)[:20] for _ in range(6)]).view(2, 3, 20).int()
    arenas = [where[0], where[0].clone()]
    for x, backend in zip(arenas, ("reference", "cpu"), strict=True):
        drop_tokens(x, source, target, keep, layout, backend=backend)
    assert torch.equal(*arenas)
    strided = keep.transpose(0, 1).contiguous().transpose(0, 1)
    drop_tokens(where[0], source, target, strided, layout, backend="cpu")
    assert torch.equal(*arenas)


@each_backend
@given(data=st.data())
def test_stripes_to_staging_and_back(backend: str, data: st.DataObject) -> None:
    """Of n pages the same granules, and no others, are read and written."""
    granules, count = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 5))
    first = data.draw(st.integers(0, granules))
    size = data.draw(st.integers(0, granules - first))
    places = data.draw(st.permutations(range(2 * count + 2)))
    total = (2 * count + 2) * granules
    arena = torch.randint(0, 256, (total * GRANULE_BYTES,), dtype=torch.uint8)
    frames = arena.clone().view(-1, granules, GRANULE_BYTES)
    source, target = places[:count], places[count : 2 * count]
    out = torch.full((count, size * GRANULE_BYTES), 7, dtype=torch.uint8)
    options = {"part": (first, size), "backend": backend}
    with checking():
        gather_pages(arena, int32(p * granules for p in source), granules, out, **options)
        expected = frames[list(source), first : first + size]
        assert torch.equal(out, expected.flatten(1))
        scatter_pages(arena, int32(p * granules for p in target), granules, out, **options)
    frames[list(target), first : first + size] = expected
    assert torch.equal(arena, frames.flatten())
    order = data.draw(st.permutations(range(count + 1)))[:count]
    apart = torch.full(((count + 1) * size * GRANULE_BYTES,), 7, dtype=torch.uint8)
    options["lines"] = int32(p * size for p in order)
    with checking():
        gather_pages(arena, int32(p * granules for p in target), granules, apart, **options)
        there = apart.view(count + 1, size * GRANULE_BYTES)
        assert torch.equal(there[list(order)], expected.flatten(1))
        assert there.count_nonzero(1).sum() == expected.count_nonzero() + size * GRANULE_BYTES
        scatter_pages(arena, int32(p * granules for p in source), granules, apart, **options)
    frames[list(source), first : first + size] = expected
    assert torch.equal(arena, frames.flatten())


@each_backend
@pytest.mark.parametrize("codec", CODECS)
def test_layers_and_pages_of_every_codec(backend: str, codec: str) -> None:
    """A layer's part holds its stripe; pages of any codec's size are compacted by copies."""
    geometry = Geometry.uniform(layers=3, kv_heads=2, head_dim=64, page_size=64, dtype="bfloat16")
    layout = page_layout(geometry.groups[0], 64, codec)
    granules, stride = layout.granules, layout.stripe_stride_bytes
    arena = torch.randint(0, 256, (5 * layout.page_bytes,), dtype=torch.uint8)
    pages = arena.clone().view(5, -1)
    source, target = int32([4 * granules, 2 * granules]), int32([0, granules])
    for layer, layers in ((0, 1), (2, 1), (1, 2)):
        part = stripe_part(layout, layer, layers)
        out = torch.empty(2, layers * stride, dtype=torch.uint8)
        gather_pages(arena, source, granules, out, part=part, backend=backend)
        assert torch.equal(out, pages[[4, 2], layer * stride : (layer + layers) * stride])
    copy_pages(arena, source, target, granules, backend=backend)
    pages[[0, 1]] = pages[[4, 2]]
    assert torch.equal(arena, pages.flatten())


Call = Callable[[Pool], object]
STAGING = torch.zeros(1, 2 * GRANULE_BYTES, dtype=torch.uint8)


def drop(where: Pool, keep: torch.Tensor, targets: int = 1) -> None:
    drop_tokens(where[0], where[1][:1], where[1][1 : 1 + targets], keep, where[2])


REFUSED: dict[str, tuple[Call, str]] = {
    "targets": (lambda w: drop(w, torch.zeros(2, 2, 9).int()), "1 pages for 9 tokens"),
    "layers": (lambda w: drop(w, torch.zeros(1, 2, 8).int()), r"torch.int32 \[2, 2, 8\]"),
    "keep dtype": (lambda w: drop(w, torch.zeros(2, 2, 8)), "keep is torch.float32"),
    "keep scalar": (lambda w: drop(w, torch.tensor(1)), "keep is torch.int64"),
    "token beyond": (lambda w: drop(w, torch.full((2, 2, 8), 8).int()), "numbers from 0 to 7"),
    "negative token": (lambda w: drop(w, torch.full((2, 2, 8), -1).int()), "holds -1 to -1"),
    "part beyond": (
        lambda w: gather_pages(w[0], w[1][:1], 2, STAGING, part=(1, 2)),
        r"part \(1, 2\) of pages of 2 granules",
    ),
    "negative part": (
        lambda w: scatter_pages(w[0], w[1][:1], 2, STAGING, part=(-1, 2)),
        "within the page",
    ),
    "staging of whole pages": (
        lambda w: gather_pages(w[0], w[1][:1], 2, STAGING, part=(1, 1)),
        r"torch.uint8 \[1, 4096\]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    call, message = REFUSED[case]
    with checking(), pytest.raises(GeometryError, match=message):
        call(pool(layout_of(2, 16, page_size=8), 3))


def test_tokens_of_sealed_pages_are_decoded_first() -> None:
    import msgspec

    arena, pages, layout = pool(layout_of(1, 16, page_size=8, layers=1), 2)
    sealed = msgspec.structs.replace(layout, codec="kv8")
    with pytest.raises(ConfigError, match="Use a codec of: raw"):
        drop_tokens(arena, pages[:1], pages[1:], torch.zeros(1, 1, 8).int(), sealed)
