"""Paged attention for few new tokens per row over sealed pages of one codec, in Triton.

As `triton.few`, but over the pages of one list (`triton.lists`), full and before all new tokens, so
that only windows need masks. A program is one warp where 8 columns suffice: without barriers, and
with a loop that does not wait for other warps, 64 slots of 128 dims fill its registers.
"""

# ruff: noqa: PLR0912, PLR0913, PLR0915, PLR0917

from __future__ import annotations

import triton
import triton.language as tl

from flowkv.kernels.triton.bits import HIGH_BITS, MAGIC_BITS
from flowkv.kernels.triton.lists import FIELDS
from flowkv.kernels.triton.plan import (
    few_items,
    few_rows,
    list_range,
    pick,
    row_of_item,
    row_unit,
    share_of_items,
    sum_before,
)
from flowkv.kernels.triton.sealed_tile import halves, sealed_tile, sealed_unit, zero_points
from flowkv.kernels.triton.tile import LOG2E, LOWEST, store_partial


@triton.jit(do_not_specialize=["layer", "n_rows", "i_list", "n_segments"])
def attend_sealed(p_q, p_arena, p_lengths, p_starts, p_part, p_part_lse, stride_token, stride_head,
                  layer, n_rows, scale, softcap, p_alibi, p_lists, p_granules, p_numbers, i_list,
                  n_segments, stride_list, p_mass, stride_mass,
                  HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, D: tl.constexpr,
                  DV: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr,
                  GRANULE: tl.constexpr, VALUES: tl.constexpr, K_SCALES: tl.constexpr,
                  V_SCALES: tl.constexpr, RUN: tl.constexpr, STRIPE: tl.constexpr,
                  K_BITS: tl.constexpr, V_BITS: tl.constexpr, CHANNELS: tl.constexpr,
                  GROUP: tl.constexpr, FEW: tl.constexpr, COLUMNS: tl.constexpr,
                  ROWS: tl.constexpr, MIN_PAGES: tl.constexpr, UNITS: tl.constexpr,
                  WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
                  CAUSAL: tl.constexpr, MASS: tl.constexpr, SPLIT: tl.constexpr,
                  WARPS: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """Partials of one KV head over one share of the pages of list i_list.

    As `attend_few` with LISTED; D and DV cover what K and V hold in a line of bytes, p_arena is
    bytes, and all offsets are. K of kv4h wants p_q rotated.
    """
    i_share = tl.program_id(0)
    i_head = tl.program_id(1)
    p_lists += i_list * FIELDS * n_rows
    b_pages = few_rows(p_lists, p_starts, n_rows, FEW, ROWS)
    b_items = few_items(b_pages, MIN_PAGES, UNITS)
    n_share = share_of_items(b_items, tl.num_programs(0), MIN_PAGES, UNITS)
    i_item = i_share * n_share
    left = tl.minimum(n_share, tl.sum(b_items, axis=0) - i_item)
    i_row = row_of_item(b_items, i_item)
    skip = i_item - sum_before(b_items, i_row, ROWS)
    if UNITS > 0:
        skip *= row_unit(pick(b_pages, i_row, ROWS), MIN_PAGES, UNITS)
    p_run = p_arena + layer.to(tl.int64) * STRIPE + i_head * RUN
    PAIR: tl.constexpr = V_BITS == 4
    BLOCK: tl.constexpr = (TILE // 2 if PAIR else TILE) // PARTS
    HALF: tl.constexpr = HEAD_DIM // 2 if K_BITS == 4 else HEAD_DIM
    o_c = tl.arange(0, COLUMNS)
    o_d = tl.arange(0, D)
    while left > 0:
        start = tl.load(p_starts + i_row)
        n_new = tl.load(p_starts + i_row + 1) - start
        n_tokens = tl.load(p_lengths + i_row)
        n_pages = tl.load(p_lists + i_row)
        if UNITS > 0:
            take = tl.minimum(n_pages - skip, row_unit(n_pages, MIN_PAGES, UNITS))
            segment = i_item
        else:
            take = tl.minimum(n_pages - skip, left)
            segment = i_share + i_row
        few = (n_new > 0) & (n_new <= FEW) & (take > 0)
        if few:
            o_token = start + o_c // GROUP
            o_head = i_head * GROUP + o_c % GROUP
            m_c = o_c < n_new * GROUP
            m_q = m_c[None, :] & (o_d < HALF)[:, None]
            p_0 = p_q + (o_token.to(tl.int64) * stride_token + o_head * stride_head)[None, :]
            p_0 += o_d[:, None]
            b_0 = tl.load(p_0, mask=m_q, other=0.0)
            b_1 = b_0
            if K_BITS == 4:
                b_1 = tl.load(p_0 + HALF, mask=m_q, other=0.0)
            b_bad = tl.sum((b_0.to(tl.float32) + b_1.to(tl.float32)) * 0.0, axis=0)  # NaN stays
            b_factor = b_bad + scale * (1.0 if SOFTCAP or ALIBI else LOG2E)
            z_hi = tl.full([COLUMNS], HIGH_BITS, tl.int32)
            z_lo = tl.full([COLUMNS], MAGIC_BITS, tl.int32)
            if CHANNELS:  # scales of a page come first
                q_hi, q_lo, q_hi1, q_lo1, b_step = b_0, b_0, b_0, b_0, b_factor
            else:
                q_hi, q_lo, q_hi1, q_lo1, b_step = halves(
                    b_0.to(tl.float32), b_1.to(tl.float32), ASM, K_BITS == 4)  # fmt: skip
                b_step *= b_factor
                if K_BITS == 4:
                    z_hi += zero_points(q_hi, q_hi1)
                    z_lo += zero_points(q_lo, q_lo1)
            b_m = tl.full([COLUMNS], LOWEST, tl.float32)
            b_l = tl.zeros([BLOCK, COLUMNS], tl.float32)
            b_acc = tl.zeros([DV // 2 if SPLIT else DV, COLUMNS], tl.float32)
            b_acc1 = b_acc
            b_seen = n_tokens - n_new + 1 + o_c // GROUP
            if not CAUSAL:
                b_seen = o_c * 0 + n_tokens
            b_slope = b_m
            if ALIBI:
                b_slope = tl.load(p_alibi + o_head, mask=m_c, other=0.0).to(tl.float32)
            p_to = p_mass
            if MASS > 0:
                p_to += i_row.to(tl.int64) * stride_mass + i_head * COLUMNS + o_c
            o_list = i_row.to(tl.int64) * stride_list + tl.load(p_lists + n_rows + i_row)
            n_edge = tl.load(p_lists + 2 * n_rows + i_row)
            t0, f0, _, t1 = list_range(skip, take, n_pages, n_edge, 0, PAGE, TILE)
            p_line = p_granules + o_list
            p_pages = p_numbers + o_list
            for t in tl.range(f0, t1, num_stages=STAGES):
                b_m, b_l, b_acc, b_acc1 = sealed_tile(
                    q_hi, q_lo, q_hi1, q_lo1, b_step, z_hi, z_lo, p_0, m_q, b_m, b_l, b_acc,
                    b_acc1, t, p_run, p_line, p_pages, p_to, b_seen, b_slope, softcap, HEAD_DIM,
                    VALUE_DIM, D, DV, PAGE, TILE, PARTS, GRANULE, VALUES, K_SCALES, V_SCALES,
                    K_BITS, V_BITS, CHANNELS, WINDOW, SOFTCAP, ALIBI, MASS, False, SPLIT, WARPS,
                    ASM)  # fmt: skip
            if WINDOW > 0:
                for t in tl.range(t0, f0, num_stages=1):
                    b_m, b_l, b_acc, b_acc1 = sealed_tile(
                        q_hi, q_lo, q_hi1, q_lo1, b_step, z_hi, z_lo, p_0, m_q, b_m, b_l, b_acc,
                        b_acc1, t, p_run, p_line, p_pages, p_to, b_seen, b_slope, softcap,
                        HEAD_DIM, VALUE_DIM, D, DV, PAGE, TILE, PARTS, GRANULE, VALUES, K_SCALES,
                        V_SCALES, K_BITS, V_BITS, CHANNELS, WINDOW, SOFTCAP, ALIBI, MASS, True,
                        SPLIT, WARPS, ASM)  # fmt: skip
            o_part = segment.to(tl.int64) + i_list * n_segments
            o_part = (o_part * tl.num_programs(1) + i_head) * COLUMNS + o_c
            b_unit = sealed_unit(b_step, CHANNELS, SOFTCAP, ALIBI)
            b_l = tl.sum(b_l, axis=0)
            store_partial(
                p_part, p_part_lse, o_part, m_c, b_m * b_unit, b_l, b_acc, 0,
                VALUE_DIM)  # fmt: skip
            if SPLIT:
                store_partial(
                    p_part, p_part_lse, o_part, m_c, b_m * b_unit, b_l, b_acc1, DV // 2,
                    VALUE_DIM)  # fmt: skip
        if UNITS > 0:
            left -= few.to(tl.int32)
            i_item += few.to(tl.int32)
            stay = few & (skip + take < n_pages)
            skip = tl.where(stay, skip + take, 0)
            i_row += 1 - stay.to(tl.int32)
        else:
            left -= tl.where(few, take, 0)
            skip = 0
            i_row += 1
