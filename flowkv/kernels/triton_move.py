"""Moves tokens and pages on GPUs, in Triton: append, dense gather, and copies of whole pages.

Nothing here computes: every byte arrives as it left, up to the cast of an appended token to the
dtype of its page. Grids depend on shapes alone, so that calls can be captured in CUDA graphs.
"""

# ruff: noqa: PLR0913, PLR0917

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flowkv.core.layout import GRANULE_BYTES, PageLayout
from flowkv.kernels.operands import Pages, Ragged
from flowkv.kernels.triton_launch import launch, padded, strides, traits
from flowkv.kernels.triton_plan import row_of_token

GRANULES = 4
"""Granules a program moves at once: 16 KiB, or eight 16-byte vectors a thread."""

MOST_ELEMENTS = 4096
"""Of K or V that a program of `append_kernel` or `dense_kernel` holds."""


@triton.jit(do_not_specialize=["layer", "n_rows"])
def append_kernel(p_k, p_v, p_arena, p_table, p_rows, p_lengths, p_starts, k_token, k_head, k_dim,
                  v_token, v_head, v_dim, stride_table, layer, n_rows, HEADS: tl.constexpr,
                  HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, D: tl.constexpr,
                  DV: tl.constexpr, PAGE: tl.constexpr, GRANULE: tl.constexpr,
                  VALUES: tl.constexpr, RUN: tl.constexpr, STRIPE: tl.constexpr,
                  ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Write BLOCK heads of one new token into its page. Grid (N, cdiv(Hk, BLOCK))."""
    i_token = tl.program_id(0)
    i_row = row_of_token(i_token, p_starts, n_rows, ROWS)
    if i_row >= n_rows:
        return
    position = tl.load(p_lengths + i_row) - tl.load(p_starts + i_row + 1) + i_token
    p_line = p_table + tl.load(p_rows + i_row).to(tl.int64) * stride_table
    granule = tl.load(p_line + position // PAGE).to(tl.int64)
    if granule < 0:  # behind a window already
        return
    p_page = p_arena + granule * GRANULE + layer.to(tl.int64) * STRIPE
    o_slot = position % PAGE
    o_h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    o_d = tl.arange(0, D)
    o_v = tl.arange(0, DV)
    m_k = (o_h < HEADS)[:, None] & (o_d < HEAD_DIM)[None, :]
    m_v = (o_h < HEADS)[:, None] & (o_v < VALUE_DIM)[None, :]
    p_from = p_k + i_token.to(tl.int64) * k_token
    b_k = tl.load(p_from + o_h[:, None] * k_head + o_d[None, :] * k_dim, mask=m_k, other=0.0)
    p_from = p_v + i_token.to(tl.int64) * v_token
    b_v = tl.load(p_from + o_h[:, None] * v_head + o_v[None, :] * v_dim, mask=m_v, other=0.0)
    p_to = p_page + o_h[:, None] * RUN + o_slot * HEAD_DIM + o_d[None, :]
    tl.store(p_to, b_k.to(p_arena.dtype.element_ty), mask=m_k)
    p_to = p_page + VALUES + o_h[:, None] * RUN + o_slot * VALUE_DIM + o_v[None, :]
    tl.store(p_to, b_v.to(p_arena.dtype.element_ty), mask=m_v)


@triton.jit(do_not_specialize=["layer", "columns"])
def dense_kernel(p_out_k, p_out_v, p_arena, p_table, p_rows, p_lengths, stride_table, layer,
                 columns, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, D: tl.constexpr,
                 DV: tl.constexpr, PAGE: tl.constexpr, GRANULE: tl.constexpr,
                 VALUES: tl.constexpr, RUN: tl.constexpr, STRIPE: tl.constexpr,
                 BLOCK: tl.constexpr):  # fmt: skip
    """BLOCK columns of one row and head of `gather_dense`. Grid (cdiv(columns, BLOCK), Hk, B)."""
    i_head = tl.program_id(1)
    i_row = tl.program_id(2)
    o_c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(p_lengths + i_row) - columns + o_c
    p_line = p_table + tl.load(p_rows + i_row).to(tl.int64) * stride_table
    m_c = o_c < columns
    m_t = m_c & (position >= 0)
    granule = tl.load(p_line + position // PAGE, mask=m_t, other=-1)
    m_t = m_t & (granule >= 0)
    p_run = p_arena + layer.to(tl.int64) * STRIPE + i_head * RUN
    p_page = p_run + granule.to(tl.int64) * GRANULE
    o_slot = position % PAGE
    o_line = (i_row * tl.num_programs(1) + i_head).to(tl.int64) * columns + o_c
    o_d = tl.arange(0, D)
    o_v = tl.arange(0, DV)
    m_d = (o_d < HEAD_DIM)[None, :]
    m_v = (o_v < VALUE_DIM)[None, :]
    p_k = (p_page + o_slot * HEAD_DIM)[:, None] + o_d[None, :]
    b_k = tl.load(p_k, mask=m_t[:, None] & m_d, other=0.0)
    p_v = (p_page + VALUES + o_slot * VALUE_DIM)[:, None] + o_v[None, :]
    b_v = tl.load(p_v, mask=m_t[:, None] & m_v, other=0.0)
    tl.store(p_out_k + o_line[:, None] * HEAD_DIM + o_d[None, :], b_k, mask=m_c[:, None] & m_d)
    tl.store(p_out_v + o_line[:, None] * VALUE_DIM + o_v[None, :], b_v, mask=m_c[:, None] & m_v)


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


def append(k: torch.Tensor, v: torch.Tensor, pages: Pages, batch: Ragged) -> None:
    """Write new tokens into the open pages; see `dispatch.append`."""
    tokens, heads, _ = k.shape
    shape, block = strides(pages.layout), _heads(pages.layout)
    rows = batch.rows.shape[0]
    if tokens:
        launch(
            append_kernel,
            (tokens, triton.cdiv(heads, block)),
            k,
            v,
            pages.arena.view(getattr(torch, pages.layout.dtype)),
            batch.table,
            batch.rows,
            batch.lengths,
            batch.starts,
            *k.stride(),
            *v.stride(),
            batch.table.stride(0),
            pages.layer,
            rows,
            HEADS=heads,
            ROWS=padded(rows),
            BLOCK=block,
            **shape,
            num_warps=4,
        )


def gather_dense(pages: Pages, batch: Ragged, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The last `columns` tokens of each row, right-aligned; see `dispatch.gather_dense`."""
    layout = pages.layout
    shape = strides(layout)
    rows, heads = batch.rows.shape[0], layout.kv_heads
    elements = pages.arena.view(getattr(torch, layout.dtype))
    k = elements.new_empty(rows, heads, columns, layout.head_dim)
    v = elements.new_empty(rows, heads, columns, layout.value_dim)
    block = max(1, MOST_ELEMENTS // max(shape["D"], shape["DV"]))
    if rows * columns:
        launch(
            dense_kernel,
            (triton.cdiv(columns, block), heads, rows),
            k,
            v,
            elements,
            batch.table,
            batch.rows,
            batch.lengths,
            batch.table.stride(0),
            pages.layer,
            columns,
            BLOCK=block,
            **shape,
            num_warps=4,
        )
    return k, v


def copy_pages(
    arena: torch.Tensor, source: torch.Tensor, target: torch.Tensor, granules: int
) -> None:
    """Copy pages within the arena; see `dispatch.copy_pages`."""
    _copy(arena, arena, source, target, granules, SOURCE=True, TARGET=True)


def gather_pages(
    arena: torch.Tensor, source: torch.Tensor, granules: int, out: torch.Tensor
) -> None:
    """Copy pages of the arena side by side into `out`; see `dispatch.gather_pages`."""
    _copy(arena, out, source, source, granules, SOURCE=True, TARGET=False)


def scatter_pages(
    arena: torch.Tensor, target: torch.Tensor, granules: int, data: torch.Tensor
) -> None:
    """Copy the lines of `data` to pages of the arena; see `dispatch.scatter_pages`."""
    _copy(data, arena, target, target, granules, SOURCE=False, TARGET=True)


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
        source,
        target,
        read.view(-1).view(torch.int32),
        write.view(-1).view(torch.int32),
        total,
        granules,
        **lists,
        GRANULES=GRANULES,
        WORDS=GRANULE_BYTES // 4,
        num_warps=4,
    )


def _heads(layout: PageLayout) -> int:
    """KV heads whose keys or values of one token fit a program: a power of two."""
    most = max(1, MOST_ELEMENTS // padded(max(layout.head_dim, layout.value_dim)))
    return min(most, triton.next_power_of_2(layout.kv_heads))
