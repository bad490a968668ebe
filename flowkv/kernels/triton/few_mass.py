"""The weight that few new tokens of a row give to each page they see, in Triton.

The decode kernels know it when they have read a page, but for the normaliser, which comes last. So
they leave log 2 of each tile's weight, 4 bytes a tile, head and column, and this kernel ends it.
"""

# ruff: noqa: PLR0913, PLR0917

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flowkv.kernels.triton.launch import launch
from flowkv.kernels.triton.task import Task
from flowkv.kernels.triton.tile import LOG2E

BLOCK = 32
"""Pages of a program."""


@triton.jit(do_not_specialize=["n_pages", "stride_mass"])
def mass_few(p_part, p_starts, p_lse, p_mass, n_pages, stride_mass, GROUP: tl.constexpr,
             FEW: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr,
             BLOCK: tl.constexpr):  # fmt: skip
    """Add to p_mass `[B, pages, Hk]` what p_part `[B, n_pages, TILES, Hk, COLUMNS]` says.

    Grid (B, cdiv(n_pages, BLOCK), Hk). p_lse is `[N, Hq]`, natural log; tiles that were not read
    hold -inf.
    """
    i_row = tl.program_id(0)
    i_head = tl.program_id(2)
    n_heads = tl.num_programs(2)
    start = tl.load(p_starts + i_row)
    n_new = tl.load(p_starts + i_row + 1) - start
    if (n_new > 0) & (n_new <= FEW):
        o_page = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        o_c = tl.arange(0, COLUMNS)
        m_c = o_c < n_new * GROUP
        o_lse = (start + o_c // GROUP).to(tl.int64) * n_heads * GROUP
        b_lse = tl.load(p_lse + o_lse + i_head * GROUP + o_c % GROUP, mask=m_c, other=0.0) * LOG2E
        b_lse = tl.where(b_lse == -float("inf"), 0.0, b_lse)  # that query saw nothing
        b_sum = tl.zeros([BLOCK, COLUMNS], tl.float32)
        m = m_c[None, :] & (o_page < n_pages)[:, None]
        for i_tile in tl.static_range(TILES):
            o_part = (i_row.to(tl.int64) * n_pages + o_page) * TILES + i_tile
            o_part = (o_part * n_heads + i_head)[:, None] * COLUMNS + o_c[None, :]
            b_part = tl.load(p_part + o_part, mask=m, other=-float("inf"))
            b_sum += tl.math.exp2(b_part - b_lse[None, :])
        p_to = p_mass + i_row.to(tl.int64) * stride_mass + o_page * n_heads + i_head
        m_page = o_page < n_pages
        tl.store(p_to, tl.load(p_to, mask=m_page, other=0.0) + tl.sum(b_sum, axis=1), mask=m_page)


def new_parts(task: Task, columns: int, tiles: int) -> torch.Tensor:
    """Room for the weights of all tiles of a call, `tiles` to a page."""
    size = task.rows, task.most_pages, tiles, task.layout.kv_heads, columns
    return task.out.new_full(size, -torch.inf, dtype=torch.float32)


def add_mass(task: Task, parts: torch.Tensor) -> None:
    """Add the weights of rows with few new tokens to `task.how.mass`; their lse is written."""
    mass = task.how.mass
    assert mass is not None
    rows, pages, tiles, heads, columns = parts.shape
    if parts.numel():
        launch(
            mass_few,
            (rows, -(-pages // BLOCK), heads),
            parts,
            task.batch.starts,
            task.lse,
            mass,
            pages,
            mass.stride(0),
            GROUP=task.group,
            FEW=task.few,
            COLUMNS=columns,
            TILES=tiles,
            BLOCK=BLOCK,
            num_warps=4,
        )
