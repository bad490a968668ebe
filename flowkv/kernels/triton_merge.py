"""Merges partials of attention, `(o, lse)` over disjoint sets of tokens, into the result. Exact.

Segments of one query lie one after the other (`triton_plan`), so a program walks a short range.
"""

# ruff: noqa: PLR0913, PLR0917

from __future__ import annotations

import triton
import triton.language as tl

from flowkv.kernels.triton_plan import (
    few_pages,
    few_share,
    many_chunks,
    pick,
    row_of_token,
    sum_before,
)
from flowkv.kernels.triton_tile import LN2, LOG2E, LOWEST


@triton.jit
def merge_segments(first, count, i_token, i_column, p_part, p_part_lse, p_sinks, p_out, p_lse,
                   VALUE_DIM: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr,
                   WIDTH: tl.constexpr, SEGMENTS: tl.constexpr, SINKS: tl.constexpr,
                   LSE: tl.constexpr):  # fmt: skip
    """Merge `count` segments from `first` on, for one token and query head (program axis 1)."""
    i_head = tl.program_id(1)
    o_v = tl.arange(0, DV)
    if SINKS:  # a logit without a value
        b_m = tl.load(p_sinks + i_head).to(tl.float32) * LOG2E
        b_l = b_m * 0.0 + 1.0
    else:
        b_l = tl.zeros((), tl.float32)
        b_m = b_l + LOWEST
    b_acc = tl.zeros([DV], tl.float32)
    for i in tl.range(0, count, SEGMENTS, num_stages=1):
        o_s = i + tl.arange(0, SEGMENTS)
        n_kv_heads = tl.num_programs(1) // GROUP
        o_part = ((first + o_s).to(tl.int64) * n_kv_heads + i_head // GROUP) * WIDTH + i_column
        b_lse = tl.load(p_part_lse + o_part, mask=o_s < count, other=-float("inf"))
        m_o = (b_lse > LOWEST)[:, None] & (o_v < VALUE_DIM)[None, :]
        b_o = tl.load(p_part + o_part[:, None] * VALUE_DIM + o_v[None, :], mask=m_o, other=0.0)
        b_top = tl.maximum(b_m, tl.max(b_lse, axis=0))
        b_fade = tl.math.exp2(b_m - b_top)
        b_w = tl.math.exp2(b_lse - b_top)
        b_l = b_l * b_fade + tl.sum(b_w, axis=0)
        b_acc = b_acc * b_fade + tl.sum(b_w[:, None] * b_o, axis=0)
        b_m = b_top
    o_o = i_token.to(tl.int64) * tl.num_programs(1) + i_head
    tl.store(p_out + o_o * VALUE_DIM + o_v, (b_acc / b_l).to(p_out.dtype.element_ty),
             mask=o_v < VALUE_DIM)  # fmt: skip
    if LSE:
        tl.store(p_lse + o_o, (b_m + tl.math.log2(b_l)) * LN2)


@triton.jit(do_not_specialize=["n_rows", "n_shares"])
def merge_few(p_part, p_part_lse, p_lengths, p_starts, p_sinks, p_out, p_lse, n_rows, n_shares,
              VALUE_DIM: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr, GROUP: tl.constexpr,
              FEW: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
              MIN_PAGES: tl.constexpr, WINDOW: tl.constexpr, SEGMENTS: tl.constexpr,
              SINKS: tl.constexpr, LSE: tl.constexpr):  # fmt: skip
    """Merge what `attend_few` made. Grid (B * FEW, Hq)."""
    i_row = tl.program_id(0) // FEW
    i_new = tl.program_id(0) % FEW
    start = tl.load(p_starts + i_row)
    n_new = tl.load(p_starts + i_row + 1) - start
    if (i_new < n_new) & (n_new <= FEW):
        b_pages = few_pages(p_starts, p_lengths, n_rows, FEW, PAGE, WINDOW, ROWS)
        n_share = few_share(b_pages, n_shares, MIN_PAGES)
        begin = sum_before(b_pages, i_row, ROWS)
        first = begin // n_share
        last = (begin + pick(b_pages, i_row, ROWS) - 1) // n_share
        i_column = i_new * GROUP + tl.program_id(1) % GROUP
        merge_segments(
            first + i_row, last - first + 1, start + i_new, i_column, p_part, p_part_lse, p_sinks,
            p_out, p_lse, VALUE_DIM, DV, GROUP, COLUMNS, SEGMENTS, SINKS, LSE)  # fmt: skip


@triton.jit(do_not_specialize=["n_rows", "n_shares"])
def merge_many(p_part, p_part_lse, p_lengths, p_starts, p_sinks, p_out, p_lse, n_rows, n_shares,
               VALUE_DIM: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr, GROUP: tl.constexpr,
               FEW: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
               MIN_PAGES: tl.constexpr, WINDOW: tl.constexpr, SEGMENTS: tl.constexpr,
               SINKS: tl.constexpr, LSE: tl.constexpr):  # fmt: skip
    """Merge what `attend_many` made with SPLIT. Grid (N, Hq)."""
    i_token = tl.program_id(0)
    i_row = row_of_token(i_token, p_starts, n_rows, ROWS)
    if i_row < n_rows:
        start = tl.load(p_starts + i_row)
        if tl.load(p_starts + i_row + 1) - start > FEW:
            b_blocks, b_chunks, _ = many_chunks(
                p_starts, p_lengths, n_rows, n_shares, FEW, GROUP, BLOCK, MIN_PAGES, True, PAGE,
                WINDOW, ROWS)  # fmt: skip
            n_chunks = pick(b_chunks, i_row, ROWS)
            o_r = (i_token - start) * GROUP + tl.program_id(1) % GROUP
            first = sum_before(b_blocks * b_chunks, i_row, ROWS) + o_r // BLOCK * n_chunks
            merge_segments(
                first, n_chunks, i_token, o_r % BLOCK, p_part, p_part_lse, p_sinks, p_out, p_lse,
                VALUE_DIM, DV, GROUP, BLOCK, SEGMENTS, SINKS, LSE)  # fmt: skip


@triton.jit
def merge_two(p_a, p_a_lse, p_b, p_b_lse, p_out, p_lse, DIM: tl.constexpr, DV: tl.constexpr):
    """Merge two `(o [N, Hq, DIM], lse [N, Hq])`, natural log. Grid (N * Hq,)."""
    i = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, DV)
    a_lse = tl.load(p_a_lse + i)
    b_lse = tl.load(p_b_lse + i)
    top = tl.maximum(tl.maximum(a_lse, b_lse), LOWEST)
    a_w = tl.math.exp2((a_lse - top) * LOG2E)
    b_w = tl.math.exp2((b_lse - top) * LOG2E)
    total = a_w + b_w
    some = tl.where(total == 0.0, 1.0, total)  # NaN stays NaN
    o_o = i * DIM + o_d
    m_d = o_d < DIM
    b_none = tl.zeros([DV], tl.float32) + LOWEST  # a part without tokens may hold anything
    b_a = tl.load(p_a + o_o, mask=m_d & (a_lse > b_none), other=0.0).to(tl.float32)
    b_b = tl.load(p_b + o_o, mask=m_d & (b_lse > b_none), other=0.0).to(tl.float32)
    b_o = b_a * (a_w / some) + b_b * (b_w / some)
    tl.store(p_out + o_o, b_o.to(p_out.dtype.element_ty), mask=m_d)
    b_out = tl.where(total == 0.0, -float("inf"), top + tl.math.log2(some) * LN2)
    tl.store(p_lse + i, b_out)
