"""Moves pages on GPUs, in Triton: copies of whole pages or of their stripes.

Nothing here computes: every byte arrives as it left. Grids depend on shapes alone, so that calls
can be captured in CUDA graphs.
"""

# ruff: noqa: PLR0913, PLR0917

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flowkv.core.layout import GRANULE_BYTES
from flowkv.kernels.triton.launch import launch, traits

GRANULES = 4
"""Granules a program moves at once: 16 KiB, or eight 16-byte vectors a thread."""


@triton.jit(do_not_specialize=["n_granules", "granules"])
def copy_kernel(p_source, p_target, p_from, p_to, n_granules, granules, SOURCE: tl.constexpr,
                TARGET: tl.constexpr, GRANULES: tl.constexpr, WORDS: tl.constexpr):  # fmt: skip
    """Copy `n_granules`, GRANULES at a time and program after program.

    Granule i is number i % granules of page i // granules, which begins where the list says, or,
    without SOURCE or TARGET, right behind the page before it.
    """
    o_w = tl.arange(0, WORDS)
    step = tl.num_programs(0) * GRANULES
    for i in tl.range(tl.program_id(0) * GRANULES, n_granules, step):
        o_g = i + tl.arange(0, GRANULES)
        m_g = o_g < n_granules
        g_from = o_g
        g_to = o_g
        if SOURCE:
            g_from = tl.load(p_source + o_g // granules, mask=m_g, other=0) + o_g % granules
        if TARGET:
            g_to = tl.load(p_target + o_g // granules, mask=m_g, other=0) + o_g % granules
        p_read = p_from + g_from.to(tl.int64)[:, None] * WORDS + o_w[None, :]
        p_write = p_to + g_to.to(tl.int64)[:, None] * WORDS + o_w[None, :]
        tl.store(p_write, tl.load(p_read, mask=m_g[:, None], other=0), mask=m_g[:, None])


def copy_pages(
    arena: torch.Tensor, source: torch.Tensor, target: torch.Tensor, granules: int
) -> None:
    """Copy pages within the arena; see `movement.copy_pages`."""
    _copy(arena, arena, source, target, granules, SOURCE=True, TARGET=True)


def gather_pages(
    arena: torch.Tensor,
    source: torch.Tensor,
    granules: int,
    out: torch.Tensor,
    part: tuple[int, int] | None = None,
) -> None:
    """Copy pages of the arena, or `part` of each, side by side; see `movement.gather_pages`."""
    first, count = part or (0, granules)
    _copy(arena[GRANULE_BYTES * first :], out, source, source, count, SOURCE=True, TARGET=False)


def scatter_pages(
    arena: torch.Tensor,
    target: torch.Tensor,
    granules: int,
    data: torch.Tensor,
    part: tuple[int, int] | None = None,
) -> None:
    """Copy the lines of `data` to pages, or to `part` of each; see `movement.scatter_pages`."""
    first, count = part or (0, granules)
    _copy(data, arena[GRANULE_BYTES * first :], target, target, count, SOURCE=False, TARGET=True)


def _copy(
    read: torch.Tensor,
    write: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    granules: int,
    **lists: bool,
) -> None:
    total = source.shape[0] * granules
    if not total:
        return
    # A pinned host tensor is reached over a bus that few programs fill; leave the others to work.
    programs = 4 * traits(source.device).processors if read.device == write.device else 16
    launch(
        copy_kernel,
        (min(programs, triton.cdiv(total, GRANULES)),),
        source.contiguous(),
        target.contiguous(),
        read.view(-1).view(torch.int32),
        write.view(-1).view(torch.int32),
        total,
        granules,
        **lists,
        GRANULES=GRANULES,
        WORDS=GRANULE_BYTES // 4,
        num_warps=4,
    )
