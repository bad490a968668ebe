"""Refusals before a kernel reads memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


def attend(s: Scene, *shape: int, **how: Any) -> object:
    return paged_attention(torch.ones(*shape), s.pages, s.batch, **how)


def write(s: Scene, keys: int, *values: int) -> object:
    return append(torch.ones(keys, 2, 16), torch.ones(*values), s.pages, s.batch)


def read(s: Scene, arena: torch.Tensor | None = None, layer: int = 0, **changes: Any) -> object:
    pages = Pages(s.pages.arena if arena is None else arena, s.layout, layer)
    return gather_dense(pages, s.batch._replace(**changes), changes.get("most_length", 4))


SHAPES: dict[str, tuple[Spoil, str]] = {
    "q of two dimensions": (lambda s: attend(s, 3, 64), r"Pass all rows' new tokens packed"),
    "q of another head dim": (lambda s: attend(s, 3, 4, 24), r"packed as \[N, 4, 16\]"),
    "query heads": (lambda s: attend(s, 3, 3, 16), "multiple of KV heads"),
    "sinks": (
        lambda s: attend(s, 3, 4, 16, sinks=torch.ones(2)),
        r"one number per query head, \[4\]",
    ),
    "window": (lambda s: attend(s, 3, 4, 16, window=0), "window=0"),
    "fewer queries than tokens": (
        lambda s: attend(s, 2, 4, 16),
        "2 packed tokens for a batch of 3",
    ),
    "fewer keys than tokens": (lambda s: write(s, 2, 2, 2, 24), "2 packed tokens for a batch of 3"),
    "fewer values than keys": (lambda s: write(s, 3, 2, 2, 24), "keys of 3 tokens and values of 2"),
    "fewer queries than the layer before had": (
        lambda s: [attend(s, n, 4, 16) for n in (3, 3, 2)],
        "2 packed tokens for a batch of 3",
    ),
    "v as wide as k": (lambda s: write(s, 3, 3, 2, 16), r"v has shape \(3, 2, 16\)"),
    "device": (
        lambda s: paged_attention(torch.ones(3, 4, 16, device="meta"), s.pages, s.batch),
        "a pool, of their own",
    ),
    "layer": (lambda s: read(s, layer=2), "layer 2 of a group of 2"),
    "arena dtype": (lambda s: read(s, s.pages.arena.float()), "contiguous uint8"),
    "arena size": (lambda s: read(s, s.pages.arena[:-1]), "4096-byte granules"),
    "index dtype": (lambda s: read(s, table=s.batch.table.long()), "table is torch.int64"),
    "index strides": (
        lambda s: read(s, lengths=int32([20, 1, 9, 1])[::2]),
        "neighbours in its last dimension",
    ),
    "row counts": (lambda s: read(s, lengths=int32([20])), "one length"),
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
        lambda s: read(s, table=s.batch.table + 10_000),
        "pool that owns this arena",
    ),
    "row beyond the table": (lambda s: read(s, rows=int32([0, 7])), "row 7"),
    "more new tokens than packed": (lambda s: attend(s, 2, 4, 16), "for 2 packed tokens"),
    "length beyond the table": (
        lambda s: read(s, lengths=int32([20, 99]), most_length=99),
        "a page for every token",
    ),
    "stale maxima": (lambda s: read(s, most_new=1), "Plan the step again"),
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
