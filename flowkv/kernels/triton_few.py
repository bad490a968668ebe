"""Paged attention for few new tokens per row, in Triton: decode and speculative verify.

Bound by memory, so the work is to keep loads in flight and instructions few:
* the problem is transposed, S^T = K Q^T and O^T = V^T P^T: the few query rows lie along the
  dimension that pads to 8, not along the one that pads to 16;
* one tile lies in one page: one scalar page address, affine below it;
* tiles that every query sees in full run without masks, the others are peeled.
"""

# ruff: noqa: PLR0913, PLR0917

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from flowkv.core.geometry import ITEMSIZE
from flowkv.core.layout import PageLayout
from flowkv.kernels.triton_launch import Traits, launch, padded, strides, traits
from flowkv.kernels.triton_merge import merge_few
from flowkv.kernels.triton_plan import (
    few_pages,
    few_share,
    first_page,
    row_of_item,
    seen_pages,
    sum_before,
    tile_range,
)
from flowkv.kernels.triton_task import REGISTERS, Task, merge_parts, tile_of, upcast
from flowkv.kernels.triton_tile import LOWEST, cap, load, locate, unit_of


@triton.jit
def few_tile(b_q, b_m, b_l, b_acc, t, p_run, p_line, b_seen, n_tokens, scale, softcap,
             HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
             PAGE: tl.constexpr, TILE: tl.constexpr, GRANULE: tl.constexpr, VALUES: tl.constexpr,
             WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr,
             UPCAST: tl.constexpr):  # fmt: skip
    """Take a tile of tokens into the running softmax (m, l, acc) of all columns."""
    p_page, o_slot, position = locate(t, p_run, p_line, PAGE, TILE, GRANULE)
    o_t = tl.arange(0, TILE)
    o_d = tl.arange(0, D)
    o_v = tl.arange(0, DV)
    m_k = (o_d < HEAD_DIM)[None, :]
    m_v = (o_v < VALUE_DIM)[:, None]
    b_at = position + o_t
    if MASK:  # a slot that holds no token yet may hold anything, NaN included
        m_t = (b_at < n_tokens) & (o_slot + o_t < PAGE)
        m_k = m_k & m_t[:, None]
        m_v = m_v & m_t[None, :]
    p_k = p_page + o_slot * HEAD_DIM
    p_v = p_page + VALUES + o_slot * VALUE_DIM
    b_k = load(p_k + o_t[:, None] * HEAD_DIM + o_d[None, :], m_k, MASK or D != HEAD_DIM, UPCAST)
    b_s = tl.dot(b_k, b_q, out_dtype=tl.float32, input_precision="ieee")
    b_v = load(p_v + o_t[None, :] * VALUE_DIM + o_v[:, None], m_v, MASK or DV != VALUE_DIM, UPCAST)
    b_s = cap(b_s, scale, softcap, SOFTCAP)
    if MASK:
        m_s = m_t[:, None] & (b_at[:, None] < b_seen[None, :])
        if WINDOW > 0:
            m_s = m_s & (b_at[:, None] >= b_seen[None, :] - WINDOW)
        b_s = tl.where(m_s, b_s, -float("inf"))
    unit = unit_of(scale, SOFTCAP)
    b_top = tl.maximum(b_m, tl.max(b_s, axis=0))
    b_fade = tl.math.exp2((b_m - b_top) * unit)
    b_p = tl.math.exp2(b_s * unit - (b_top * unit)[None, :])
    b_l = b_l * b_fade + tl.sum(b_p, axis=0)
    b_acc = tl.dot(b_v, b_p.to(b_v.dtype), acc=b_acc * b_fade[None, :], out_dtype=tl.float32,
                   input_precision="ieee")  # fmt: skip
    return b_top, b_l, b_acc


@triton.jit(do_not_specialize=["layer", "n_rows", "n_shares"])
def attend_few(p_q, p_arena, p_table, p_rows, p_lengths, p_starts, p_part, p_part_lse,
               stride_token, stride_head, stride_table, layer, n_rows, n_shares, scale, softcap,
               HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
               PAGE: tl.constexpr, TILE: tl.constexpr, GRANULE: tl.constexpr,
               VALUES: tl.constexpr, RUN: tl.constexpr, STRIPE: tl.constexpr,
               GROUP: tl.constexpr, FEW: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
               MIN_PAGES: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
               STAGES: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """Partials of one KV head over one share of the pages of all rows with 0 < T <= FEW.

    Grid (n_shares, Hk). Column c stands for new token c // GROUP and query head c % GROUP of the
    group. Writes segment share + row of p_part `[n_shares + B, Hk, COLUMNS, Dv]` and of p_part_lse
    `[n_shares + B, Hk, COLUMNS]`, which is in units of log 2.
    """
    i_share = tl.program_id(0)
    i_head = tl.program_id(1)
    b_pages = few_pages(p_starts, p_lengths, n_rows, FEW, PAGE, WINDOW, ROWS)
    n_share = few_share(b_pages, n_shares, MIN_PAGES)
    begin = i_share * n_share
    left = tl.minimum(n_share, tl.sum(b_pages, axis=0) - begin)
    i_row = row_of_item(b_pages, begin)
    skip = begin - sum_before(b_pages, i_row, ROWS)
    p_run = p_arena + layer.to(tl.int64) * STRIPE + i_head * RUN
    o_c = tl.arange(0, COLUMNS)
    o_d = tl.arange(0, D)
    o_v = tl.arange(0, DV)
    while left > 0:
        start = tl.load(p_starts + i_row)
        n_new = tl.load(p_starts + i_row + 1) - start
        n_tokens = tl.load(p_lengths + i_row)
        n_pages = seen_pages(n_tokens, n_new, PAGE, WINDOW)
        take = tl.minimum(n_pages - skip, left)
        if (n_new > 0) & (n_new <= FEW):
            p_line = p_table + tl.load(p_rows + i_row).to(tl.int64) * stride_table
            o_q = (start + o_c // GROUP).to(tl.int64) * stride_token
            o_q += (i_head * GROUP + o_c % GROUP) * stride_head
            m_c = o_c < n_new * GROUP
            m_q = m_c[None, :] & (o_d < HEAD_DIM)[:, None]
            b_q = load(p_q + o_q[None, :] + o_d[:, None], m_q, True, UPCAST)
            if not UPCAST:
                b_q = b_q.to(p_arena.dtype.element_ty)
            b_m = tl.full([COLUMNS], LOWEST, tl.float32)
            b_l = tl.zeros([COLUMNS], tl.float32)
            b_acc = tl.zeros([DV, COLUMNS], tl.float32)
            b_seen = n_tokens - n_new + 1 + o_c // GROUP
            t0, f0, f1, t1 = tile_range(
                first_page(n_tokens, n_new, PAGE, WINDOW) + skip, take,
                n_tokens - n_new + 1, n_tokens, PAGE, TILE, WINDOW)  # fmt: skip
            for t in tl.range(f0, f1, num_stages=STAGES):
                b_m, b_l, b_acc = few_tile(
                    b_q, b_m, b_l, b_acc, t, p_run, p_line, b_seen, n_tokens, scale, softcap,
                    HEAD_DIM, VALUE_DIM, D, DV, PAGE, TILE, GRANULE, VALUES, WINDOW, SOFTCAP,
                    PAGE % TILE != 0, UPCAST)  # fmt: skip
            n_head = f0 - t0
            for i in tl.range(0, n_head + t1 - f1, num_stages=1):
                t = tl.where(i < n_head, t0 + i, f1 + i - n_head)
                b_m, b_l, b_acc = few_tile(
                    b_q, b_m, b_l, b_acc, t, p_run, p_line, b_seen, n_tokens, scale, softcap,
                    HEAD_DIM, VALUE_DIM, D, DV, PAGE, TILE, GRANULE, VALUES, WINDOW, SOFTCAP,
                    True, UPCAST)  # fmt: skip
            o_part = ((i_share + i_row).to(tl.int64) * tl.num_programs(1) + i_head) * COLUMNS + o_c
            b_some = tl.where(b_l == 0.0, 1.0, b_l)  # NaN stays NaN
            b_lse = b_m * unit_of(scale, SOFTCAP) + tl.math.log2(b_some)
            tl.store(p_part_lse + o_part, tl.where(b_l == 0.0, -float("inf"), b_lse), mask=m_c)
            p_o = p_part + o_part[None, :] * VALUE_DIM + o_v[:, None]
            m_o = m_c[None, :] & (o_v < VALUE_DIM)[:, None]
            tl.store(p_o, b_acc / b_some[None, :], mask=m_o)
            left -= take
            skip = 0
        i_row += 1


def decode(task: Task) -> None:
    """Attend with all rows that have few new tokens."""
    layout, device = task.layout, traits(task.out.device)
    shape, tune = _config(layout, device)
    columns = max(8, 1 << (task.few * task.group - 1).bit_length())
    least = -(-128 // layout.page_size)  # pages of a share
    shares = device.processors * tune["programs"] // layout.kv_heads
    shares = max(1, min(shares, -(-task.rows * task.most_pages // least)))
    segments = (shares + task.rows, layout.kv_heads, columns)
    part_lse = task.out.new_empty(segments, dtype=torch.float32)
    part = task.out.new_empty((*segments, layout.value_dim), dtype=torch.float32)
    common = {
        "GROUP": task.group,
        "FEW": task.few,
        "COLUMNS": columns,
        "ROWS": padded(task.rows),
        "MIN_PAGES": least,
        "WINDOW": task.flags["WINDOW"],
    }
    launch(
        attend_few,
        (shares, layout.kv_heads),
        *task.operands,
        part,
        part_lse,
        *task.numbers,
        shares,
        *task.softmax,
        **shape,
        **common,
        SOFTCAP=task.softmax[1] > 0,
        UPCAST=upcast(layout),
        num_warps=tune["warps"],
        **REGISTERS,
    )
    merge_parts(merge_few, task.rows * task.few, task, part, part_lse, shares, common)


@lru_cache(maxsize=256)
def _config(layout: PageLayout, device: Traits) -> tuple[dict[str, int], dict[str, int]]:
    """Constants of `attend_few`; warps of a program, programs that a processor holds at once."""
    shape, item = dict(strides(layout)), ITEMSIZE[layout.dtype]
    row_bytes = (shape["D"] + shape["DV"]) * item
    # float32 is multiplied exactly, without tensor cores, and holds whole operands in registers.
    tile = tile_of(layout, 64 if item == 2 else 16)
    while tile > 16 and tile * row_bytes > 32768:  # more needs 4 warps, which tempts to use WGMMA
        tile //= 2
    # A loop that reads the page table needs 5 stages for two K/V tiles in flight, 3 for one.
    shape |= {"TILE": tile, "STAGES": 5}
    warps = 1 if tile * row_bytes <= 16384 and item == 2 else 2
    programs = max(1, min(8, device.shared_bytes // (2 * tile * row_bytes + 2048)))
    return shape, {"warps": warps, "programs": programs}
