"""Digests of pages where they lie: equal on every backend, and those of the bytes in a frame."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowkv.kernels import checking, digest_pages, gather_pages, scatter_pages
from tests.inside import GRANULE_BYTES, GeometryError, digests

BACKENDS = ["reference", "cpu"]


def noise(granules: int, seed: int) -> torch.Tensor:
    size = (granules * GRANULE_BYTES,)
    return torch.randint(0, 256, size, generator=torch.manual_seed(seed)).byte()


@st.composite
def scenes(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int, int, tuple[int, int] | None]:
    """An arena, pages in it, granules of a page, stripes, and the part of a page."""
    each, stripes = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    count = each * stripes
    granules = count + draw(st.integers(0, 3))
    first = draw(st.integers(0, granules - count))
    part = None if count == granules and draw(st.booleans()) else (first, count)
    n = draw(st.integers(0, 4))
    places = draw(st.permutations(range(5)))[:n]
    arena = noise(5 * granules + 1, draw(st.integers(0, 99)))
    return arena, torch.tensor(places).int() * granules + 1, granules, stripes, part


@pytest.mark.parametrize("backend", BACKENDS)
@given(scene=scenes())
def test_they_are_those_of_frames(
    backend: str, scene: tuple[torch.Tensor, torch.Tensor, int, int, tuple[int, int] | None]
) -> None:
    arena, source, granules, stripes, part = scene
    first, count = part or (0, granules)
    found = digest_pages(arena, source, granules, stripes, part=part, backend=backend)
    assert found.shape == (len(source), stripes, 2) and found.dtype is torch.int64
    lines = arena.view(-1, GRANULE_BYTES)
    body = b"".join(lines[g + first : g + first + count].numpy().tobytes() for g in source.tolist())
    step = count // stripes * GRANULE_BYTES
    assert found.numpy().tobytes() == (digests(body, step) if body else b"")
    staged = torch.zeros(len(source), count * GRANULE_BYTES, dtype=torch.uint8)
    out, back = torch.zeros_like(found), torch.zeros_like(found)
    gather_pages(arena, source, granules, staged, part=part, digests=out, backend=backend)
    assert staged.numpy().tobytes() == body and torch.equal(out, found)
    other = torch.zeros_like(arena)
    with checking():
        scatter_pages(other, source, granules, staged, part=part, digests=back, backend=backend)
    assert torch.equal(back, found)
    touched = other.view(-1, GRANULE_BYTES).any(1).sum()
    assert touched <= len(source) * count, "nothing beside the parts is written"


def test_large_batches_are_digested_in_slices() -> None:
    arena = noise(64 * 64, 1)
    source = torch.randperm(64, generator=torch.manual_seed(2)).int() * 64
    wanted = digest_pages(arena, source, 64, 16, backend="reference")
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert torch.equal(digest_pages(arena, source, 64, 16, backend="cpu"), wanted)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_does_not_fit_is_refused(backend: str) -> None:
    arena, source = noise(8, 3), torch.tensor([0, 4]).int()
    for stripes in (0, 3, 5, -1):
        with pytest.raises(GeometryError, match="stripes of equal whole granules"):
            digest_pages(arena, source, 4, stripes, backend=backend)
    with pytest.raises(GeometryError, match="part"):
        digest_pages(arena, source, 4, 1, part=(3, 2), backend=backend)
    staged = torch.zeros(2, 4 * GRANULE_BYTES, dtype=torch.uint8)
    wrong = [torch.zeros(2, 4, 2), torch.zeros(2, 4).long(), torch.zeros(1, 4, 2).long()]
    for digests_ in (*wrong, torch.zeros(2, 3, 2).long(), torch.zeros(2, 2, 4).long()[..., ::2]):
        for move in (gather_pages, scatter_pages):
            with pytest.raises(GeometryError, match=r"digests are|equal whole granules"):
                move(arena, source, 4, staged, digests=digests_, backend=backend)
