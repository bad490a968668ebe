"""Merges partials of attention, `(o, lse)` over disjoint sets of tokens, into the result. Exact.

Segments of one query lie one after the other (`triton.plan`), so a program walks a short range.
"""

# ruff: noqa: PLR0913, PLR0917

from __future__ import annotations

import triton
import triton.language as tl

from flowkv.kernels.triton.plan import (
    few_items,
    few_pages,
    few_rows,
    few_segments,
    many_chunks,
    pick,
    row_of_token,
    share_of_items,
    sum_before,
)
from flowkv.kernels.triton.tile import LN2, LOG2E, LOWEST


@triton.jit
def nothing_yet(p_sinks, DV: tl.constexpr, SINKS: tl.constexpr):
    """A merge (m, l, acc) before its first segment, for one query head (program axis 1)."""
    if SINKS:  # a logit without a value
        b_m = tl.load(p_sinks + tl.program_id(1)).to(tl.float32) * LOG2E
        b_l = b_m * 0.0 + 1.0
    else:
        b_l = tl.zeros((), tl.float32)
        b_m = b_l + LOWEST
    return b_m, b_l, tl.zeros([DV], tl.float32)


@triton.jit
def fold_segments(b_m, b_l, b_acc, first, count, i_column, p_part, p_part_lse,
                  VALUE_DIM: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr,
                  WIDTH: tl.constexpr, SEGMENTS: tl.constexpr):  # fmt: skip
    """Take `count` segments from `first` on into a merge, for one token and query head."""
    i_kv_head = tl.program_id(1) // GROUP
    n_kv_heads = tl.num_programs(1) // GROUP
    o_v = tl.arange(0, DV)
    for i in tl.range(0, count, SEGMENTS, num_stages=1):
        o_s = i + tl.arange(0, SEGMENTS)
        o_part = ((first + o_s).to(tl.int64) * n_kv_heads + i_kv_head) * WIDTH + i_column
        b_lse = tl.load(p_part_lse + o_part, mask=o_s < count, other=-float("inf"))
        m_o = (b_lse > LOWEST)[:, None] & (o_v < VALUE_DIM)[None, :]
        b_o = tl.load(p_part + o_part[:, None] * VALUE_DIM + o_v[None, :], mask=m_o, other=0.0)
        b_top = tl.maximum(b_m, tl.max(b_lse, axis=0))
        b_fade = tl.math.exp2(b_m - b_top)
        b_w = tl.math.exp2(b_lse - b_top)
        b_l = b_l * b_fade + tl.sum(b_w, axis=0)
        b_acc = b_acc * b_fade + tl.sum(b_w[:, None] * b_o, axis=0)
        b_m = b_top
    return b_m, b_l, b_acc


@triton.jit
def store_merged(b_m, b_l, b_acc, i_token, p_out, p_lse, VALUE_DIM: tl.constexpr,
                 DV: tl.constexpr, LSE: tl.constexpr):  # fmt: skip
    """Store a merge as the result of one token and query head; without any segment, zeros."""
    o_v = tl.arange(0, DV)
    o_o = i_token.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    b_some = tl.where(b_l == 0.0, 1.0, b_l)  # NaN stays NaN
    tl.store(p_out + o_o * VALUE_DIM + o_v, (b_acc / b_some).to(p_out.dtype.element_ty),
             mask=o_v < VALUE_DIM)  # fmt: skip
    if LSE:
        b_lse = tl.where(b_l == 0.0, -float("inf"), (b_m + tl.math.log2(b_some)) * LN2)
        tl.store(p_lse + o_o, b_lse)


@triton.jit(do_not_specialize=["n_rows", "n_shares", "n_segments"])
def merge_few(p_part, p_part_lse, p_lengths, p_starts, p_sinks, p_out, p_lse, n_rows, n_shares,
              p_lists, n_segments,
              VALUE_DIM: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr, GROUP: tl.constexpr,
              FEW: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
              MIN_PAGES: tl.constexpr, UNITS: tl.constexpr, WINDOW: tl.constexpr,
              SEGMENTS: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr, LISTS: tl.constexpr,
              FIELDS: tl.constexpr, BITS: tl.constexpr):  # fmt: skip
    """Merge what `attend_few` made, or it and `attend_sealed` over LISTS lists. Grid (B FEW, Hq).

    n_shares holds, BITS bits each, into how many shares each list was cut; the partials of a list
    begin n_segments segments after those of the list before.
    """
    i_row = tl.program_id(0) // FEW
    i_new = tl.program_id(0) % FEW
    start = tl.load(p_starts + i_row)
    n_new = tl.load(p_starts + i_row + 1) - start
    if (i_new < n_new) & (n_new <= FEW):
        i_column = i_new * GROUP + tl.program_id(1) % GROUP
        b_m, b_l, b_acc = nothing_yet(p_sinks, DV, SINKS)
        for i_list in tl.static_range(max(1, LISTS)):
            if LISTS > 0:
                p_counts = p_lists + i_list * FIELDS * n_rows
                b_items = few_rows(p_counts, p_starts, n_rows, FEW, ROWS)
                n_list = ((n_shares >> (i_list * BITS)) & ((1 << BITS) - 1)).to(tl.int32)
            else:
                b_items = few_pages(p_starts, p_lengths, n_rows, FEW, PAGE, WINDOW, ROWS)
                n_list = n_shares
            b_items = few_items(b_items, MIN_PAGES, UNITS)
            n_share = share_of_items(b_items, n_list, MIN_PAGES, UNITS)
            first, count = few_segments(b_items, i_row, n_share, ROWS, UNITS)
            b_m, b_l, b_acc = fold_segments(
                b_m, b_l, b_acc, first + i_list * n_segments, count, i_column, p_part, p_part_lse,
                VALUE_DIM, DV, GROUP, COLUMNS, SEGMENTS)  # fmt: skip
        store_merged(b_m, b_l, b_acc, start + i_new, p_out, p_lse, VALUE_DIM, DV, LSE)


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
            b_m, b_l, b_acc = nothing_yet(p_sinks, DV, SINKS)
            b_m, b_l, b_acc = fold_segments(
                b_m, b_l, b_acc, first, n_chunks, o_r % BLOCK, p_part, p_part_lse, VALUE_DIM, DV,
                GROUP, BLOCK, SEGMENTS)  # fmt: skip
            store_merged(b_m, b_l, b_acc, i_token, p_out, p_lse, VALUE_DIM, DV, LSE)


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
