"""The weight that many new tokens of a row give to each page they see, in Triton.

Weights are relative to a query's whole row, so they are known only after attention; the scores are
made again, and values are not read. One program owns one page of one row and KV head: sums come out
the same each time.
"""

# ruff: noqa: PLR0913, PLR0917

from __future__ import annotations

import triton
import triton.language as tl

from flowkv.core.geometry import ITEMSIZE
from flowkv.kernels.triton.block import page_of_tile, spare_offset, weigh
from flowkv.kernels.triton.launch import launch, padded, strides, traits
from flowkv.kernels.triton.plan import first_page, sum_before
from flowkv.kernels.triton.task import REGISTERS, Task, tile_of, upcast
from flowkv.kernels.triton.tile import LOG2E, load, unit_of
from flowkv.kernels.triton.unseal import Spare


@triton.jit(do_not_specialize=["layer", "n_rows", "head_low", "n_heads", "n_columns"])
def mass_many(p_q, p_arena, p_table, p_rows, p_lengths, p_starts, p_alibi, p_tree, p_spare, p_lse,
              p_mass, stride_token, stride_head, stride_table, layer, n_rows, stride_mass, head_low,
              n_heads, n_columns, scale, softcap,
              HEAD_DIM: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
              GRANULE: tl.constexpr, RUN: tl.constexpr, STRIPE: tl.constexpr, GROUP: tl.constexpr,
              FEW: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, WINDOW: tl.constexpr,
              SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, TREE: tl.constexpr,
              CAUSAL: tl.constexpr, SEALED: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """Add to p_mass `[B, pages, n_heads]`. Grid (B * n_columns, KV heads from head_low on)."""
    i_row = tl.program_id(0) // n_columns
    i_page = tl.program_id(0) % n_columns
    i_head = tl.program_id(1) + head_low
    start = tl.load(p_starts + i_row)
    n_new = tl.load(p_starts + i_row + 1) - start
    n_tokens = tl.load(p_lengths + i_row)
    first = first_page(n_tokens, n_new, PAGE, WINDOW)
    if (n_new <= FEW) | (i_page < first) | (i_page * PAGE >= n_tokens):
        return
    p_line = p_table + tl.load(p_rows + i_row).to(tl.int64) * stride_table
    p_run = p_arena + layer.to(tl.int64) * STRIPE + i_head * RUN
    n_spare = tl.num_programs(1) * RUN
    o_spare = i_row
    if SEALED:
        o_row = tl.arange(0, ROWS)
        m_row = o_row < n_rows
        b_start = tl.load(p_starts + o_row, mask=m_row, other=0)
        b_new = tl.load(p_starts + 1 + o_row, mask=m_row, other=0) - b_start
        i_rank = sum_before((b_new > FEW).to(tl.int32), i_row, ROWS)
        o_spare = spare_offset(p_spare, p_run, i_rank, n_columns, n_spare, RUN, GRANULE)
    o_d = tl.arange(0, D)
    context = n_tokens - n_new
    TILES: tl.constexpr = (PAGE + TILE - 1) // TILE
    b_mass = tl.zeros([BLOCK], tl.float32)
    for t in tl.range(i_page * TILES, i_page * TILES + TILES, num_stages=1):
        p_page, o_slot, position = page_of_tile(
            t, p_run, p_line, o_spare, n_spare, PAGE, TILE, GRANULE, SEALED)  # fmt: skip
        o_t = tl.arange(0, TILE)
        b_at = position + o_t
        m_t = (b_at < n_tokens) & (o_slot + o_t < PAGE)
        m_k = m_t[None, :] & (o_d < HEAD_DIM)[:, None]
        p_k = p_page + o_slot * HEAD_DIM
        b_k = load(p_k + o_t[None, :] * HEAD_DIM + o_d[:, None], m_k, True, UPCAST)
        for i in tl.range(0, n_new * GROUP, BLOCK, num_stages=1):
            o_r = i + tl.arange(0, BLOCK)
            o_token = (start + o_r // GROUP).to(tl.int64)
            o_head = i_head * GROUP + o_r % GROUP
            m_r = o_r < n_new * GROUP
            o_q = o_token * stride_token + o_head * stride_head
            m_q = m_r[:, None] & (o_d < HEAD_DIM)[None, :]
            b_q = load(p_q + o_q[:, None] + o_d[None, :], m_q, True, UPCAST)
            if not UPCAST:
                b_q = b_q.to(p_arena.dtype.element_ty)
            b_seen = context + 1 + o_r // GROUP
            if not CAUSAL:
                b_seen = o_r * 0 + n_tokens
            b_lse = tl.load(p_lse + o_token * n_heads * GROUP + o_head, mask=m_r, other=0.0)
            b_slope = b_lse
            if ALIBI:
                b_slope = tl.load(p_alibi + o_head, mask=m_r, other=0.0).to(tl.float32)
            b_tree = o_token
            if TREE:
                b_tree = tl.load(p_tree + o_token, mask=m_r, other=0)
            b_s = tl.dot(b_q, b_k, out_dtype=tl.float32, input_precision="ieee")
            b_s = weigh(b_s, b_at, m_t, b_seen, b_slope, b_tree, context, scale, softcap, WINDOW,
                        SOFTCAP, ALIBI, TREE, True)  # fmt: skip
            b_log = b_s * unit_of(scale, SOFTCAP, ALIBI) - (b_lse * LOG2E)[:, None]
            m_s = m_r[:, None] & (b_s > -float("inf"))
            b_mass += tl.sum(tl.where(m_s, tl.math.exp2(b_log), 0.0), axis=1)
    p_to = p_mass + i_row.to(tl.int64) * stride_mass + i_page * n_heads + i_head
    tl.store(p_to, tl.load(p_to) + tl.sum(b_mass, axis=0))


def add_mass(task: Task, spare: Spare) -> None:
    """Add the weights of rows with many new tokens to `task.how.mass`; their lse is written."""
    layout, mass, flags = task.layout, task.how.mass, task.flags
    assert mass is not None
    shape = strides(layout)
    names = ("HEAD_DIM", "D", "PAGE", "GRANULE", "RUN", "STRIPE")
    wide = ITEMSIZE[layout.dtype] == 4 or shape["D"] > 128
    launch(
        mass_many,
        (task.rows * task.most_pages, spare.heads),
        *task.operands,
        task.alibi,
        task.tree,
        spare.runs,
        task.lse,
        mass,
        *task.numbers,
        mass.stride(0),
        spare.low,
        layout.kv_heads,
        task.most_pages,
        *task.softmax,
        **{name: shape[name] for name in names},
        TILE=tile_of(layout, 16 if wide else 64),
        GROUP=task.group,
        FEW=task.few,
        BLOCK=32 if wide else 128 if traits(task.out.device).major >= 9 else 64,
        ROWS=padded(task.rows),
        WINDOW=flags["WINDOW"],
        SOFTCAP=task.softmax[1] > 0,
        ALIBI=flags["ALIBI"],
        TREE=flags["TREE"],
        CAUSAL=flags["CAUSAL"],
        SEALED=bool(task.pages.sealed),
        UPCAST=upcast(layout),
        num_warps=4,
        **REGISTERS,
    )
