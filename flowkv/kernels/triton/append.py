"""Writes new tokens into open pages on GPUs, in Triton, as they are or rotated (RoPE).

Grids depend on shapes alone, so that calls can be captured in CUDA graphs.
"""

# ruff: noqa: PLR0913, PLR0917

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flowkv.core.layout import PageLayout
from flowkv.kernels.operands import Pages, Ragged, Rotary
from flowkv.kernels.triton.launch import launch, padded, strides
from flowkv.kernels.triton.plan import row_of_token
from flowkv.kernels.triton.rotary import load_pairs, load_turn, rotary_constants, store_turned

MOST_ELEMENTS = 4096
"""Of K or V that a program holds."""


@triton.jit
def _place(i_token, p_arena, p_table, p_rows, p_lengths, p_starts, stride_table, layer, n_rows,
           PAGE: tl.constexpr, GRANULE: tl.constexpr, STRIPE: tl.constexpr,
           ROWS: tl.constexpr):  # fmt: skip
    """(position of a packed token, its layer's stripe); position -1 if it has no page."""
    i_row = row_of_token(i_token, p_starts, n_rows, ROWS)
    m_row = i_row < n_rows  # tokens of no row pad a captured graph
    b_end = tl.load(p_starts + i_row + 1, mask=m_row, other=0)
    position = tl.load(p_lengths + i_row, mask=m_row, other=0) - b_end + i_token
    o_line = tl.load(p_rows + i_row, mask=m_row, other=0).to(tl.int64) * stride_table
    granule = tl.load(p_table + o_line + position // PAGE, mask=m_row, other=-1)
    p_stripe = p_arena + granule.to(tl.int64) * GRANULE + layer.to(tl.int64) * STRIPE
    return tl.where(granule < 0, -1, position), p_stripe  # granule -1: behind a window already


@triton.jit
def _copy_heads(p_from, stride_head, stride_dim, p_to, o_h, o_d, m, RUN: tl.constexpr):
    """Copy `[heads, dims]` of one token where `m` is set, cast to the dtype of the page."""
    p_read = p_from + o_h[:, None] * stride_head + o_d[None, :] * stride_dim
    b = tl.load(p_read, mask=m, other=0.0).to(p_to.dtype.element_ty)
    tl.store(p_to + o_h[:, None] * RUN + o_d[None, :], b, mask=m)


@triton.jit(do_not_specialize=["layer", "n_rows"])
def append_kernel(p_k, p_v, p_arena, p_table, p_rows, p_lengths, p_starts, k_token, k_head, k_dim,
                  v_token, v_head, v_dim, stride_table, layer, n_rows, HEADS: tl.constexpr,
                  HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, D: tl.constexpr,
                  DV: tl.constexpr, PAGE: tl.constexpr, GRANULE: tl.constexpr,
                  VALUES: tl.constexpr, RUN: tl.constexpr, STRIPE: tl.constexpr,
                  ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Write BLOCK heads of one new token into its page. Grid (N, cdiv(Hk, BLOCK))."""
    i_token = tl.program_id(0)
    position, p_stripe = _place(i_token, p_arena, p_table, p_rows, p_lengths, p_starts,
                                stride_table, layer, n_rows, PAGE, GRANULE, STRIPE,
                                ROWS)  # fmt: skip
    if position < 0:
        return
    o_slot = position % PAGE
    o_h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    o_d = tl.arange(0, D)
    o_v = tl.arange(0, DV)
    m_k = (o_h < HEADS)[:, None] & (o_d < HEAD_DIM)[None, :]
    m_v = (o_h < HEADS)[:, None] & (o_v < VALUE_DIM)[None, :]
    p_from = p_k + i_token.to(tl.int64) * k_token
    _copy_heads(p_from, k_head, k_dim, p_stripe + o_slot * HEAD_DIM, o_h, o_d, m_k, RUN)
    p_from = p_v + i_token.to(tl.int64) * v_token
    p_to = p_stripe + VALUES + o_slot * VALUE_DIM
    _copy_heads(p_from, v_head, v_dim, p_to, o_h, o_v, m_v, RUN)


@triton.jit(do_not_specialize=["layer", "n_rows"])
def append_rotary_kernel(p_k, p_v, p_arena, p_table, p_rows, p_lengths, p_starts, k_token, k_head,
                         k_dim, v_token, v_head, v_dim, stride_table, layer, n_rows, p_cos, p_sin,
                         HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
                         D: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr,
                         GRANULE: tl.constexpr, VALUES: tl.constexpr, RUN: tl.constexpr,
                         STRIPE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
                         PAIRS: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr,
                         START: tl.constexpr):  # fmt: skip
    """As `append_kernel`, the key rotated by line `position` of cos and sin."""
    i_token = tl.program_id(0)
    position, p_stripe = _place(i_token, p_arena, p_table, p_rows, p_lengths, p_starts,
                                stride_table, layer, n_rows, PAGE, GRANULE, STRIPE,
                                ROWS)  # fmt: skip
    if position < 0:
        return
    o_slot = position % PAGE
    o_h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_h = o_h < HEADS
    o_v = tl.arange(0, DV)
    p_from = p_k + i_token.to(tl.int64) * k_token
    p_to = p_stripe + o_slot * HEAD_DIM
    b_cos, b_sin = load_turn(p_cos, p_sin, position, PAIRS, P)
    p_rows_from = p_from + START * k_dim + o_h * k_head
    b_x, b_y = load_pairs(p_rows_from, m_h, k_dim, PAIRS, P, INTERLEAVED, BLOCK)
    store_turned(p_to + START + o_h * RUN, m_h, b_x, b_y, b_cos, b_sin, PAIRS, P, INTERLEAVED,
                 BLOCK)  # fmt: skip
    if 2 * PAIRS < HEAD_DIM:
        o_d = tl.arange(0, D)
        m_d = (o_d < HEAD_DIM) & ((o_d < START) | (o_d >= START + 2 * PAIRS))
        _copy_heads(p_from, k_head, k_dim, p_to, o_h, o_d, m_h[:, None] & m_d[None, :], RUN)
    p_from = p_v + i_token.to(tl.int64) * v_token
    p_to = p_stripe + VALUES + o_slot * VALUE_DIM
    m_v = m_h[:, None] & (o_v < VALUE_DIM)[None, :]
    _copy_heads(p_from, v_head, v_dim, p_to, o_h, o_v, m_v, RUN)


def append(
    k: torch.Tensor, v: torch.Tensor, pages: Pages, batch: Ragged, rope: Rotary | None = None
) -> None:
    """Write new tokens into the open pages; see `dispatch.append`."""
    tokens, heads, _ = k.shape
    shape = strides(pages.layout) | {"VALUE_DIM": pages.layout.stored_value_dim}
    block = _heads(pages.layout)
    rows = batch.rows.shape[0]
    operands = (
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
    )
    constants = {"HEADS": heads, "ROWS": padded(rows), "BLOCK": block, **shape, "num_warps": 4}
    grid = tokens, triton.cdiv(heads, block)
    if not tokens:
        return
    if rope is None:
        launch(append_kernel, grid, *operands, **constants)
        return
    constants |= rotary_constants(rope)
    kernel = append_rotary_kernel
    launch(kernel, grid, *operands, rope.cos, rope.sin, **constants, enable_fp_fusion=False)


def _heads(layout: PageLayout) -> int:
    """KV heads whose keys or values of one token fit a program: a power of two."""
    most = max(1, MOST_ELEMENTS // padded(max(layout.head_dim, layout.value_dim)))
    return min(most, triton.next_power_of_2(layout.kv_heads))
