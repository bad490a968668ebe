"""Paged attention for many new tokens per row, in Triton: prefill, or a suffix over a prefix.

Bound by arithmetic. A block of query rows packs tokens and the query heads of one KV head, so
that grouped heads share each tile; tiles before the diagonal (and inside of every window) run
without masks. A short suffix over a long prefix has too few blocks to fill a device: then SPLIT
cuts the pages of each block into chunks, whose partials are merged.
"""

# ruff: noqa: PLR0913, PLR0915, PLR0917

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from flowkv.core.geometry import ITEMSIZE
from flowkv.core.layout import PageLayout
from flowkv.kernels.triton_launch import Traits, launch, padded, strides, traits
from flowkv.kernels.triton_merge import merge_many
from flowkv.kernels.triton_plan import (
    first_page,
    many_chunks,
    pick,
    row_of_item,
    sum_before,
    tile_range,
)
from flowkv.kernels.triton_task import REGISTERS, Task, merge_parts, tile_of, upcast
from flowkv.kernels.triton_tile import LN2, LOG2E, LOWEST, cap, load, locate, unit_of


@triton.jit
def many_tile(b_q, b_m, b_l, b_acc, t, p_run, p_line, b_seen, n_tokens, scale, softcap,
              HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
              PAGE: tl.constexpr, TILE: tl.constexpr, GRANULE: tl.constexpr, VALUES: tl.constexpr,
              WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr,
              UPCAST: tl.constexpr):  # fmt: skip
    """Take a tile of tokens into the running softmax (m, l, acc) of a block of query rows."""
    p_page, o_slot, position = locate(t, p_run, p_line, PAGE, TILE, GRANULE)
    o_t = tl.arange(0, TILE)
    o_d = tl.arange(0, D)
    o_v = tl.arange(0, DV)
    m_k = (o_d < HEAD_DIM)[:, None]
    m_v = (o_v < VALUE_DIM)[None, :]
    b_at = position + o_t
    if MASK:  # a slot that holds no token yet may hold anything, NaN included
        m_t = (b_at < n_tokens) & (o_slot + o_t < PAGE)
        m_k = m_k & m_t[None, :]
        m_v = m_v & m_t[:, None]
    p_k = p_page + o_slot * HEAD_DIM
    p_v = p_page + VALUES + o_slot * VALUE_DIM
    b_k = load(p_k + o_t[None, :] * HEAD_DIM + o_d[:, None], m_k, MASK or D != HEAD_DIM, UPCAST)
    b_s = tl.dot(b_q, b_k, out_dtype=tl.float32, input_precision="ieee")
    b_s = cap(b_s, scale, softcap, SOFTCAP)
    if MASK:
        m_s = m_t[None, :] & (b_at[None, :] < b_seen[:, None])
        if WINDOW > 0:
            m_s = m_s & (b_at[None, :] >= b_seen[:, None] - WINDOW)
        b_s = tl.where(m_s, b_s, -float("inf"))
    unit = unit_of(scale, SOFTCAP)
    b_top = tl.maximum(b_m, tl.max(b_s, axis=1))
    b_fade = tl.math.exp2((b_m - b_top) * unit)
    b_p = tl.math.exp2(b_s * unit - (b_top * unit)[:, None])
    b_l = b_l * b_fade + tl.sum(b_p, axis=1)
    b_v = load(p_v + o_t[:, None] * VALUE_DIM + o_v[None, :], m_v, MASK or DV != VALUE_DIM, UPCAST)
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, acc=b_acc * b_fade[:, None], out_dtype=tl.float32,
                   input_precision="ieee")  # fmt: skip
    return b_top, b_l, b_acc


@triton.jit(do_not_specialize=["layer", "n_rows", "n_shares"])
def attend_many(p_q, p_arena, p_table, p_rows, p_lengths, p_starts, p_sinks, p_out, p_lse,
                stride_token, stride_head, stride_table, layer, n_rows, n_shares, scale, softcap,
                HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
                PAGE: tl.constexpr, TILE: tl.constexpr, GRANULE: tl.constexpr,
                VALUES: tl.constexpr, RUN: tl.constexpr, STRIPE: tl.constexpr,
                GROUP: tl.constexpr, FEW: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
                MIN_PAGES: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr,
                SOFTCAP: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
                STAGES: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """One block of query rows of one KV head over one chunk of pages, for rows with T > FEW.

    Grid (items, Hk), where the item counts chunks within blocks within rows. Row r of a block
    stands for new token r // GROUP and query head r % GROUP of the group, counted from the block's
    first. With SPLIT, p_out is float32 partials `[items, Hk, BLOCK, Dv]` and p_lse `[items, Hk,
    BLOCK]` in units of log 2; without, the result `[N, Hq, Dv]` and `[N, Hq]`, natural log.
    """
    i_item = tl.num_programs(0) - 1 - tl.program_id(0)  # later blocks see more: they begin first
    i_head = tl.program_id(1)
    n_heads = tl.num_programs(1)
    b_blocks, b_chunks, n_chunk = many_chunks(
        p_starts, p_lengths, n_rows, n_shares, FEW, GROUP, BLOCK, MIN_PAGES, SPLIT, PAGE, WINDOW,
        ROWS)  # fmt: skip
    i_row = row_of_item(b_blocks * b_chunks, i_item)
    if i_row >= n_rows:
        return
    i_chunk = i_item - sum_before(b_blocks * b_chunks, i_row, ROWS)
    n_chunks = pick(b_chunks, i_row, ROWS)
    i_block = i_chunk // n_chunks
    i_chunk = i_chunk % n_chunks

    start = tl.load(p_starts + i_row)
    n_new = tl.load(p_starts + i_row + 1) - start
    n_tokens = tl.load(p_lengths + i_row)
    p_line = p_table + tl.load(p_rows + i_row).to(tl.int64) * stride_table
    p_run = p_arena + layer.to(tl.int64) * STRIPE + i_head * RUN
    o_r = i_block * BLOCK + tl.arange(0, BLOCK)
    o_d = tl.arange(0, D)
    o_v = tl.arange(0, DV)
    o_token = (start + o_r // GROUP).to(tl.int64)
    o_head = i_head * GROUP + o_r % GROUP
    m_r = o_r < n_new * GROUP
    o_q = o_token * stride_token + o_head * stride_head
    m_q = m_r[:, None] & (o_d < HEAD_DIM)[None, :]
    b_q = load(p_q + o_q[:, None] + o_d[None, :], m_q, True, UPCAST)
    if not UPCAST:
        b_q = b_q.to(p_arena.dtype.element_ty)

    b_m = tl.full([BLOCK], LOWEST, tl.float32)
    b_l = tl.zeros([BLOCK], tl.float32)
    b_acc = tl.zeros([BLOCK, DV], tl.float32)
    context = n_tokens - n_new
    b_seen = context + 1 + o_r // GROUP
    last = tl.minimum((i_block * BLOCK + BLOCK - 1) // GROUP, n_new - 1)
    t0, f0, f1, t1 = tile_range(
        first_page(n_tokens, n_new, PAGE, WINDOW) + i_chunk * n_chunk, n_chunk,
        context + 1 + i_block * BLOCK // GROUP, context + 1 + last, PAGE, TILE, WINDOW)  # fmt: skip
    for t in tl.range(f0, f1, num_stages=STAGES):
        b_m, b_l, b_acc = many_tile(
            b_q, b_m, b_l, b_acc, t, p_run, p_line, b_seen, n_tokens, scale, softcap,
            HEAD_DIM, VALUE_DIM, D, DV, PAGE, TILE, GRANULE, VALUES, WINDOW, SOFTCAP,
            PAGE % TILE != 0, UPCAST)  # fmt: skip
    n_head = f0 - t0
    for i in tl.range(0, n_head + t1 - f1, num_stages=1):
        t = tl.where(i < n_head, t0 + i, f1 + i - n_head)
        b_m, b_l, b_acc = many_tile(
            b_q, b_m, b_l, b_acc, t, p_run, p_line, b_seen, n_tokens, scale, softcap,
            HEAD_DIM, VALUE_DIM, D, DV, PAGE, TILE, GRANULE, VALUES, WINDOW, SOFTCAP,
            True, UPCAST)  # fmt: skip

    b_m = b_m * unit_of(scale, SOFTCAP)
    m_o = m_r[:, None] & (o_v < VALUE_DIM)[None, :]
    if SPLIT:  # a chunk behind the diagonal of its block has seen nothing
        b_some = tl.where(b_l == 0.0, 1.0, b_l)
        b_lse = tl.where(b_l == 0.0, -float("inf"), b_m + tl.math.log2(b_some))
        o_o = (i_item.to(tl.int64) * n_heads + i_head) * BLOCK + tl.arange(0, BLOCK)
        tl.store(p_lse + o_o, b_lse, mask=m_r)
        b_acc = b_acc / b_some[:, None]
    else:
        b_l = tl.where(m_r, b_l, 1.0)  # rows behind the last new token may have seen nothing
        if SINKS:
            b_sink = tl.load(p_sinks + o_head, mask=m_r, other=0.0).to(tl.float32) * LOG2E
            b_top = tl.maximum(b_m, b_sink)
            b_fade = tl.math.exp2(b_m - b_top)
            b_l = b_l * b_fade + tl.math.exp2(b_sink - b_top)
            b_acc = b_acc * b_fade[:, None]
            b_m = b_top
        o_o = o_token * n_heads * GROUP + o_head
        if LSE:
            tl.store(p_lse + o_o, (b_m + tl.math.log2(b_l)) * LN2, mask=m_r)
        b_acc = b_acc / b_l[:, None]
    p_o = p_out + o_o[:, None] * VALUE_DIM + o_v[None, :]
    tl.store(p_o, b_acc.to(p_out.dtype.element_ty), mask=m_o)


def prefill(task: Task) -> None:
    """Attend with all rows that have many new tokens."""
    layout, device = task.layout, traits(task.out.device)
    tokens = task.out.shape[0]
    shape, tune = _config(layout, device)
    block = tune["block"]
    blocks = tokens * task.group // block + task.rows  # at most
    shares = -(-device.processors * tune["programs"] // layout.kv_heads)
    least = -(-256 // layout.page_size)  # pages of a chunk
    split = blocks < shares and task.most_pages > least
    items = blocks + (min(shares, blocks * -(-task.most_pages // least)) if split else 0)
    common = {
        "GROUP": task.group,
        "FEW": task.few,
        "BLOCK": block,
        "ROWS": padded(task.rows),
        "MIN_PAGES": least,
        "WINDOW": task.flags["WINDOW"],
    }
    part, part_lse = task.out, task.lse
    if split:
        segments = (items, layout.kv_heads, block)
        part_lse = task.out.new_empty(segments, dtype=torch.float32)
        part = task.out.new_empty((*segments, layout.value_dim), dtype=torch.float32)
    launch(
        attend_many,
        (items, layout.kv_heads),
        *task.operands,
        task.sinks,
        part,
        part_lse,
        *task.numbers,
        shares,
        *task.softmax,
        **shape,
        **common,
        SPLIT=split,
        SOFTCAP=task.softmax[1] > 0,
        SINKS=task.flags["SINKS"],
        LSE=task.flags["LSE"],
        UPCAST=upcast(layout),
        num_warps=tune["warps"],
        **REGISTERS,
    )
    if split:
        merge_parts(merge_many, tokens, task, part, part_lse, shares, common)


@lru_cache(maxsize=256)
def _config(layout: PageLayout, device: Traits) -> tuple[dict[str, int], dict[str, int]]:
    """Constants of `attend_many`; query rows of a block, warps, programs a processor holds."""
    shape, item = dict(strides(layout)), ITEMSIZE[layout.dtype]
    block, tile = (128, tile_of(layout, 64)) if item == 2 else (64, 16)
    if item == 2 and max(shape["D"], shape["DV"]) > 128:  # as much as registers hold
        block, tile = {9: 128, 10: 64}.get(device.major, 32), min(tile, 32)
    row_bytes = (shape["D"] + shape["DV"]) * item
    while (
        block > 32 and block * shape["D"] * item + 2 * tile * row_bytes > device.shared_bytes - 4096
    ):
        block //= 2
    shape |= {"TILE": tile, "STAGES": 5}
    return shape, {"block": block, "warps": 8, "programs": 1}
