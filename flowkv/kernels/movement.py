"""Operations that move pages and tokens: check the operands, choose the backend, run."""

from __future__ import annotations

import torch

from flowkv.core.errors import GeometryError
from flowkv.kernels import bounds
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
    backend: str | None = None,
) -> None:
    """Copy pages of the arena side by side into a staging tensor.

    Args:
        arena: uint8 `[bytes]`.
        source: int32 `[n]`, granules at which the pages begin.
        granules: Granules of a page.
        out: uint8 `[n, granules * 4096]`, contiguous.
        backend: "reference", "cpu" or "triton"; default by device.

    Raises:
        GeometryError: An operand has the wrong shape, dtype or device.
        ConfigError: No such backend.
    """
    bounds.check_granules(arena, granules, source=source)
    bounds.check_staging("out", out, arena, len(source), granules)
    resolve("gather_pages", ANY, backend or choose(arena.device))(arena, source, granules, out)


def scatter_pages(
    arena: torch.Tensor,
    target: torch.Tensor,
    granules: int,
    data: torch.Tensor,
    *,
    backend: str | None = None,
) -> None:
    """Copy the lines of a staging tensor to pages of the arena.

    Args:
        arena: uint8 `[bytes]`.
        target: int32 `[n]`, granules at which the pages begin; no two overlap.
        granules: Granules of a page.
        data: uint8 `[n, granules * 4096]`, contiguous.
        backend: "reference", "cpu" or "triton"; default by device.

    Raises:
        GeometryError: An operand has the wrong shape, dtype or device.
        ConfigError: No such backend.
    """
    bounds.check_granules(arena, granules, target=target)
    bounds.check_staging("data", data, arena, len(target), granules)
    resolve("scatter_pages", ANY, backend or choose(arena.device))(arena, target, granules, data)
