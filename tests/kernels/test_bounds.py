"""Refusals before a kernel reads memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from flowkv.kernels import (
    Pages,
    append,
    checking,
    copy_pages,
    gather_dense,
    gather_pages,
    paged_attention,
    scatter_pages,
)
from tests.inside import ConfigError, GeometryError
from tests.kernels.scene import Scene, int32, layout_of


@pytest.fixture
def scene() -> Scene:
    return Scene(layout_of(2, 16, 24, page_size=8), [20, 9], [2, 1])


Spoil = Callable[[Scene], object]

SHAPES: dict[str, tuple[Spoil, str]] = {
    "q of two dimensions": (
        lambda s: paged_attention(torch.ones(3, 64), s.pages, s.batch),
        r"Pass all rows' new tokens packed",
    ),
    "q of another head dim": (
        lambda s: paged_attention(torch.ones(3, 4, 24), s.pages, s.batch),
        r"packed as \[N, 4, 16\]",
    ),
    "query heads": (
        lambda s: paged_attention(torch.ones(3, 3, 16), s.pages, s.batch),
        "multiple of KV heads",
    ),
    "sinks": (
        lambda s: paged_attention(torch.ones(3, 4, 16), s.pages, s.batch, sinks=torch.ones(2)),
        r"one number per query head, \[4\]",
    ),
    "window": (
        lambda s: paged_attention(torch.ones(3, 4, 16), s.pages, s.batch, window=0),
        "window=0",
    ),
    "fewer queries than tokens": (
        lambda s: paged_attention(torch.ones(2, 4, 16), s.pages, s.batch),
        "2 packed tokens for a batch of 3",
    ),
    "fewer keys than tokens": (
        lambda s: append(torch.ones(2, 2, 16), torch.ones(2, 2, 24), s.pages, s.batch),
        "2 packed tokens for a batch of 3",
    ),
    "fewer values than keys": (
        lambda s: append(torch.ones(3, 2, 16), torch.ones(2, 2, 24), s.pages, s.batch),
        "keys of 3 tokens and values of 2",
    ),
    "fewer queries than the layer before had": (
        lambda s: [paged_attention(torch.ones(n, 4, 16), s.pages, s.batch) for n in (3, 3, 2)],
        "2 packed tokens for a batch of 3",
    ),
    "v as wide as k": (
        lambda s: append(torch.ones(3, 2, 16), torch.ones(3, 2, 16), s.pages, s.batch),
        r"v has shape \(3, 2, 16\)",
    ),
    "device": (
        lambda s: paged_attention(torch.ones(3, 4, 16, device="meta"), s.pages, s.batch),
        "a pool, of their own",
    ),
    "layer": (
        lambda s: gather_dense(Pages(s.pages.arena, s.layout, 2), s.batch, 4),
        "layer 2 of a group of 2",
    ),
    "arena dtype": (
        lambda s: gather_dense(Pages(s.pages.arena.float(), s.layout, 0), s.batch, 4),
        "contiguous uint8",
    ),
    "arena size": (
        lambda s: gather_dense(Pages(s.pages.arena[:-1], s.layout, 0), s.batch, 4),
        "4096-byte granules",
    ),
    "index dtype": (
        lambda s: gather_dense(s.pages, s.batch._replace(table=s.batch.table.long()), 4),
        "table is torch.int64",
    ),
    "index strides": (
        lambda s: gather_dense(s.pages, s.batch._replace(lengths=int32([20, 1, 9, 1])[::2]), 4),
        "neighbours in its last dimension",
    ),
    "row counts": (
        lambda s: gather_dense(s.pages, s.batch._replace(lengths=int32([20])), 4),
        "one length",
    ),
    "granule dtype": (
        lambda s: copy_pages(s.pages.arena, torch.ones(1), int32([0]), 1),
        "source is torch.float32",
    ),
    "list lengths": (
        lambda s: copy_pages(s.pages.arena, int32([0, 1]), int32([2]), 1),
        "a target for every source",
    ),
    "staging": (
        lambda s: gather_pages(
            s.pages.arena, int32([0]), 2, torch.empty(1, 4096, dtype=torch.uint8)
        ),
        r"contiguous torch.uint8 \[1, 8192\]",
    ),
}


@pytest.mark.parametrize("case", SHAPES)
def test_shapes_dtypes_and_devices(scene: Scene, case: str) -> None:
    call, message = SHAPES[case]
    with pytest.raises(GeometryError, match=message):
        call(scene)


def test_codecs_without_kernels(scene: Scene) -> None:
    import msgspec

    other = msgspec.structs.replace(scene.layout, codec="kv8")
    with pytest.raises(ConfigError, match="Use a codec of: raw"):
        append(scene.k[0][:3], scene.v[0][:3], Pages(scene.pages.arena, other, 0), scene.batch)


PAGES: dict[str, tuple[Spoil, str]] = {
    "granule beyond the arena": (
        lambda s: gather_dense(s.pages, s.batch._replace(table=s.batch.table + 10_000), 4),
        "pool that owns this arena",
    ),
    "row beyond the table": (
        lambda s: gather_dense(s.pages, s.batch._replace(rows=int32([0, 7])), 4),
        "row 7",
    ),
    "more new tokens than packed": (
        lambda s: paged_attention(torch.ones(2, 4, 16), s.pages, s.batch),
        "for 2 packed tokens",
    ),
    "length beyond the table": (
        lambda s: gather_dense(
            s.pages, s.batch._replace(lengths=int32([20, 99]), most_length=99), 4
        ),
        "a page for every token",
    ),
    "stale maxima": (
        lambda s: gather_dense(s.pages, s.batch._replace(most_new=1), 4),
        "Plan the step again",
    ),
    "writing to an absent page": (
        lambda s: append(
            torch.ones(3, 2, 16),
            torch.ones(3, 2, 24),
            s.pages,
            s.batch._replace(table=torch.full_like(s.batch.table, -1)),
        ),
        "Allocate the row's pages",
    ),
    "copying from outside": (
        lambda s: scatter_pages(
            s.pages.arena, int32([-1]), 1, torch.zeros(1, 4096, dtype=torch.uint8)
        ),
        "Take granules from the pool",
    ),
}


@pytest.mark.parametrize("case", PAGES)
def test_page_tables_while_checking(scene: Scene, case: str) -> None:
    call, message = PAGES[case]
    with checking(), pytest.raises(GeometryError, match=message):
        call(scene)


def test_checking_nests(scene: Scene) -> None:
    bad = int32([-1])
    with checking():
        with checking():
            pass
        with pytest.raises(GeometryError):
            copy_pages(scene.pages.arena, bad, int32([1]), 1)
