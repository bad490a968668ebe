"""Operations that move pages and tokens: check the operands, choose the backend, run."""

from __future__ import annotations

import torch

from flowkv.core.errors import GeometryError
from flowkv.core.layout import GRANULE_BYTES, PageLayout
from flowkv.kernels import bounds
from flowkv.kernels.bounds_rotary import check_lines
from flowkv.kernels.dispatch import choose
from flowkv.kernels.registry import ANY, resolve


def copy_pages(
    arena: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    granules: int,
    *,
    backend: str | None = None,
) -> None:
    """Copy pages within the arena; no target may overlap another target or a source.

    Args:
        arena: uint8 `[bytes]`.
        source: int32 `[n]`, granules at which the pages begin.
        target: int32 `[n]`, granules at which their copies begin.
        granules: Granules of a page (`PageLayout.granules`).
        backend: "reference", "cpu" or "triton"; default by device.

    Raises:
        GeometryError: An operand has the wrong shape, dtype or device.
        ConfigError: No such backend.
    """
    bounds.check_granules(arena, granules, source=source, target=target)
    if source.shape != target.shape:
        raise GeometryError(
            f"{len(source)} sources, {len(target)} targets", "Pass a target for every source"
        )
    resolve("copy_pages", ANY, backend or choose(arena.device))(arena, source, target, granules)


def gather_pages(
    arena: torch.Tensor,
    source: torch.Tensor,
    granules: int,
    out: torch.Tensor,
    *,
    part: tuple[int, int] | None = None,
    backend: str | None = None,
) -> None:
    """Copy pages of the arena, or one layer's stripe of each, side by side into staging.

    Args:
        arena: uint8 `[bytes]`.
        source: int32 `[n]`, granules at which the pages begin.
        granules: Granules of a page.
        out: uint8 `[n, granules * 4096]`, contiguous; beside a GPU it may be pinned host memory,
            which holds the pages when the stream has come so far.
        part: `(first, count)` in granules (`stripe_part`) of each page; `out` is
            `[n, count * 4096]` then. Default: whole pages.
        backend: "reference", "cpu" or "triton"; default by device.

    Raises:
        GeometryError: An operand has the wrong shape, dtype or device.
        ConfigError: No such backend.
    """
    _check_staged(arena, granules, part, "out", out, source=source)
    move = resolve("gather_pages", ANY, backend or choose(arena.device))
    move(arena, source, granules, out, part)


def scatter_pages(
    arena: torch.Tensor,
    target: torch.Tensor,
    granules: int,
    data: torch.Tensor,
    *,
    part: tuple[int, int] | None = None,
    backend: str | None = None,
) -> None:
    """Copy the lines of a staging tensor to pages of the arena, or to one stripe of each.

    Args:
        arena: uint8 `[bytes]`.
        target: int32 `[n]`, granules at which the pages begin; no two overlap.
        granules: Granules of a page.
        data: uint8 `[n, granules * 4096]`, contiguous; beside a GPU it may be pinned host memory,
            which must live until the stream has come so far.
        part: `(first, count)` in granules (`stripe_part`) of each page, the only bytes written;
            `data` is `[n, count * 4096]` then. Default: whole pages.
        backend: "reference", "cpu" or "triton"; default by device.

    Raises:
        GeometryError: An operand has the wrong shape, dtype or device.
        ConfigError: No such backend.
    """
    _check_staged(arena, granules, part, "data", data, target=target)
    move = resolve("scatter_pages", ANY, backend or choose(arena.device))
    move(arena, target, granules, data, part)


def drop_tokens(
    arena: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    keep: torch.Tensor,
    layout: PageLayout,
    *,
    backend: str | None = None,
) -> None:
    """Make pages of the tokens that are kept of others, chosen for each layer and KV head alone.

    Sparsification by what tokens weigh (H2O, Zhang et al., arXiv 2306.14048; SnapKV, Li et al.,
    arXiv 2404.14469). Keys keep the rotations of their own positions. All pages are raw: sealed
    ones are decoded first (`transcode`), and what results may be sealed again.

    Args:
        arena: uint8 `[bytes]`.
        source: int32 `[s]`, granules at which the pages of a row begin, in order.
        target: int32 `[ceil(n / P)]`, granules of pages to fill; none overlaps another page.
        keep: int32 `[L, Hk, n]`: token j of the new pages of a layer and head is token
            `keep[l, h, j]`, below s * P, of the old ones, in whatever order.
        layout: Where the bytes of a page lie.
        backend: "reference", "cpu" or "triton"; default by device and dtype.

    Raises:
        GeometryError: An operand has the wrong shape, dtype or device.
        ConfigError: No such backend, or the pages are sealed.
    """
    bounds.check_granules(arena, layout.granules, source=source, target=target)
    kept = keep.shape[-1] if keep.dim() else 0
    shape = layout.layers, layout.kv_heads, kept
    check_lines("keep", keep, shape, arena.device, 0, len(source) * layout.page_size)
    if len(target) != -(-kept // layout.page_size):
        raise GeometryError(
            f"{len(target)} pages for {kept} tokens",
            f"Pass one fresh page for each {layout.page_size} tokens that are kept",
        )
    backend = backend or choose(arena.device, page_dtype=layout.dtype)
    resolve("drop_tokens", layout.codec, backend)(arena, source, target, keep, layout)


def stripe_part(layout: PageLayout, layer: int, layers: int = 1) -> tuple[int, int]:
    """`part` of a page that holds `layers` layers from `layer` (within the group) on."""
    stripe = layout.stripe_stride_bytes // GRANULE_BYTES
    return layer * stripe, layers * stripe


def _check_staged(
    arena: torch.Tensor,
    granules: int,
    part: tuple[int, int] | None,
    name: str,
    staging: torch.Tensor,
    **lists: torch.Tensor,
) -> None:
    bounds.check_granules(arena, granules, **lists)
    first, count = part or (0, granules)
    if first < 0 or count < 0 or first + count > granules:
        raise GeometryError(
            f"part ({first}, {count}) of pages of {granules} granules",
            "Pass (first granule, granules) within the page, as stripe_part() answers",
        )
    (places,) = lists.values()
    bounds.check_staging(name, staging, arena, len(places), count)
