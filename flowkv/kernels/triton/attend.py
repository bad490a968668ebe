"""Paged attention and merging of partials on GPUs: choice of kernels and tile sizes, launches.

Grids and scratch depend only on facts that the host has without a look at the device: shapes,
`batch.most_new` and `batch.most_length`. So a call can be captured in a CUDA graph and replayed
after lengths and tables have changed, as long as they stay below the maxima of its capture.
"""

# ruff: noqa: PLR0913, PLR0917

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from flowkv.core.errors import ConfigError
from flowkv.core.geometry import ITEMSIZE, PageLayout
from flowkv.kernels.operands import Pages, Ragged, Scoring
from flowkv.kernels.triton.few import decode
from flowkv.kernels.triton.launch import Constants, Traits, given, launch, padded, strides, traits
from flowkv.kernels.triton.many import (
    block_of_item,
    block_tiles,
    cut_of,
    partials,
    prefill,
    rows_of,
    store_block,
    weigh,
)
from flowkv.kernels.triton.task import (
    REGISTERS,
    Batching,
    Ends,
    Switches,
    Task,
    element,
    merge_many,
    merge_parts,
    merge_two,
    tile_of,
    upcast,
)
from flowkv.kernels.triton.tile import LOWEST, add_tiles, load, locate, row_at, sight_of, unit_of

# Attention over latents (MLA), in Triton: one KV head, its values the first dims of its keys.
#
# All query heads share each latent, so rows of queries are many even in decode, and a block of
# them is laid out as for prompts (`triton.many`). A latent is read once: the tile that the first
# Dv dims of the queries are multiplied with is the tile that the weights mix; only the other dims
# of the keys, rotated by position, are a tile of their own (multi-head latent attention, arXiv
# 2405.04434: 576 = 512 + 64).
#
# Rows of few and of many new tokens are served alike. Where there are fewer blocks than the device
# holds, the pages of each are cut into chunks, and the chunks' partials are merged.


@triton.jit
def latent_tile(soft, t, query, place, sight, scores, MASK: tl.constexpr, C: tl.constexpr):
    """Add a tile of tokens to the running softmax (m, l, acc) of a block of query rows."""
    b_m, b_l, b_acc = soft
    b_q, b_q_rest = query
    p_page, o_slot, position = locate(t, place[0], place[1], C)
    o_t = tl.arange(0, C.TILE)
    o_v = tl.arange(0, C.DV)
    o_d = tl.arange(0, C.REST)
    b_at = position + o_t
    m_t = (b_at < sight[3]) & (o_slot + o_t < C.PAGE)
    m_v = (o_v < C.VALUE_DIM)[None, :]
    m_k = (o_d < C.HEAD_DIM - C.VALUE_DIM)[:, None]
    if MASK:  # a slot without a token may hold anything, NaN included
        m_v = m_v & m_t[:, None]
        m_k = m_k & m_t[None, :]
    p_tile = p_page + o_slot * C.HEAD_DIM
    b_v = load(p_tile + o_t[:, None] * C.HEAD_DIM + o_v[None, :], m_v, MASK or C.DV != C.VALUE_DIM,
               C.UPCAST)  # fmt: skip
    b_k = load(p_tile + C.VALUE_DIM + o_t[None, :] * C.HEAD_DIM + o_d[:, None], m_k,
               MASK or C.REST != C.HEAD_DIM - C.VALUE_DIM, C.UPCAST)  # fmt: skip
    b_s = tl.dot(b_q, tl.trans(b_v), out_dtype=tl.float32, input_precision="ieee")
    b_s = tl.dot(b_q_rest, b_k, acc=b_s, out_dtype=tl.float32, input_precision="ieee")
    b_s = weigh(b_s, b_at, m_t, sight, scores, MASK, C)
    unit = unit_of(scores[0], C)
    b_top = tl.maximum(b_m, tl.max(b_s, axis=1))
    b_fade = tl.math.exp2((b_m - b_top) * unit)
    b_p = tl.math.exp2(b_s * unit - (b_top * unit)[:, None])
    b_l = b_l * b_fade + tl.sum(b_p, axis=1)
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, acc=b_acc * b_fade[:, None], out_dtype=tl.float32,
                   input_precision="ieee")  # fmt: skip
    return b_top, b_l, b_acc


@triton.jit(do_not_specialize=["layer", "n_rows", "n_shares"])
def attend_latent(p_q, p_arena, p_table, p_rows, p_lengths, p_starts, p_sinks, p_alibi, p_tree,
                  p_out, p_lse, stride_token, stride_head, stride_table, layer, n_rows, n_shares,
                  scale, softcap, C: tl.constexpr):  # fmt: skip
    """Attend with a block of query rows over a chunk of pages. Grid (items,), as `attend_many`."""
    i_item = tl.num_programs(0) - 1 - tl.program_id(0)  # later blocks see more, so they begin first
    i_row, _, i_block, page, n_pages = block_of_item(
        i_item, p_starts, p_lengths, n_rows, n_shares, C)  # fmt: skip
    if i_row >= n_rows:
        return
    start, n_new, n_tokens = row_at(i_row, p_starts, p_lengths)
    p_line = p_table + tl.load(p_rows + i_row).to(tl.int64) * stride_table
    p_run = p_arena + layer.to(tl.int64) * C.STRIPE
    o_r = i_block * C.BLOCK + tl.arange(0, C.BLOCK)
    o_v = tl.arange(0, C.DV)
    o_d = tl.arange(0, C.REST)
    o_token, o_head, m_r = rows_of(o_r, start, n_new, 0, C)
    p_rows_q = p_q + (o_token * stride_token + o_head * stride_head)[:, None]
    b_q = load(p_rows_q + o_v[None, :], m_r[:, None] & (o_v < C.VALUE_DIM)[None, :], True, C.UPCAST)
    m_rest = m_r[:, None] & (o_d < C.HEAD_DIM - C.VALUE_DIM)[None, :]
    b_q_rest = load(p_rows_q + C.VALUE_DIM + o_d[None, :], m_rest, True, C.UPCAST)
    if not C.UPCAST:
        b_q = b_q.to(p_arena.dtype.element_ty)
        b_q_rest = b_q_rest.to(p_arena.dtype.element_ty)

    b_none = tl.full([C.BLOCK], 0, tl.float32)
    soft = b_none + LOWEST, b_none, tl.full([C.BLOCK, C.DV], 0, tl.float32)
    sight = sight_of(
        o_r, o_token, o_head, m_r, n_tokens - n_new, n_tokens, p_alibi, p_tree, C)  # fmt: skip
    seen = block_tiles(page, n_pages, i_block, n_new, n_tokens, C)
    query, place, scores = (b_q, b_q_rest), (p_run, p_line), (scale, softcap)
    b_m, b_l, b_acc = add_tiles(latent_tile, soft, seen, query, place, sight, scores, C)
    store_block(b_m * unit_of(scale, C), b_l, b_acc, p_out, p_lse, p_sinks, i_item,
                o_token, o_head, C.GROUP, m_r, C)  # fmt: skip


def attend_latents(task: Task) -> None:
    """Attend with all rows over pages of latents.

    Raises:
        ConfigError: The mass of pages is requested.
    """
    if task.how.mass is not None:
        raise ConfigError(
            "no Triton kernel weighs pages of latents", "Leave `mass` out, or use a 'full' group"
        )
    task = task._replace(few=0, batching=task.batching._replace(FEW=0))
    layout, device = task.layout, traits(task.out.device)
    # 64 rows for WGMMA, with outputs of 64 x 512, do not fit in the registers beside the rest.
    most = task.group * (1 if task.how.invariant else task.batch.most_new)
    block = 16 if layout.dtype == "float32" or most <= 16 else 32
    cut = cut_of(task, block, device.processors)
    shape = _config(layout, device, block, cut.split)
    part, part_lse = partials(task, cut, block)
    common: dict[str, Any] = {"BLOCK": block, "MIN_PAGES": cut.least, "SPLIT": cut.split}
    launch(
        attend_latent,
        (cut.items,),
        *(*task.operands, task.how.sinks, task.how.alibi, task.how.tree, part, part_lse),
        *(*task.numbers, cut.shares, *task.softmax),
        C=given(shape, task.batching, task.switches, task.ends, **common),
        num_warps=8,
        **REGISTERS,
    )
    if cut.split:
        merge_parts(merge_many, len(task.out), task, part, part_lse, cut.shares, common)


@lru_cache(maxsize=256)
def _config(layout: PageLayout, device: Traits, block: int, split: bool) -> Constants:
    """Return the constants of `attend_latent`."""
    item = ITEMSIZE[layout.dtype]
    rest = padded(layout.head_dim - layout.value_dim)
    shape = strides(layout)._replace(VALUE_DIM=layout.value_dim, REST=rest)
    row_bytes = (shape.DV + rest) * item
    # Programs that write results themselves take a few registers more than writers of partials.
    tile = tile_of(layout, 16 if item == 4 else 64 if split else 32)
    room = device.shared_bytes - 1024
    while tile > 16 and block * (row_bytes + tile * item) + 2 * tile * row_bytes > room:
        tile //= 2
    return shape._replace(TILE=tile, STAGES=5)


MOST_COLUMNS = 32
"""Most query rows per KV head of a row that counts as having few new tokens."""

Partial = tuple[torch.Tensor, torch.Tensor]


def paged_attention(
    q: torch.Tensor, pages: Pages, batch: Ragged, how: Scoring
) -> torch.Tensor | Partial:
    """Attend from the new tokens to their rows' pages; see `dispatch.paged_attention`.

    Tokens of q that belong to no row (padding of a captured graph) get no result.

    Raises:
        ConfigError: The pages' dtype or head dimension has no kernel.
    """
    layout, sinks, return_lse = pages.layout, how.sinks, how.return_lse
    tokens, heads, _ = q.shape
    out = q.new_empty(tokens, heads, layout.value_dim)
    asks_lse = return_lse or how.mass is not None  # the mass of a page is relative to it
    lse = q.new_empty(tokens, heads, dtype=torch.float32) if asks_lse else None
    rows, group = batch.rows.shape[0], heads // layout.kv_heads
    few = _few(batch.most_new, group, rows, how.invariant)
    if q.stride(2) != 1:
        q = q.contiguous()
    task = Task(
        q=q,
        pages=pages,
        batch=batch,
        how=how,
        operands=(q, pages.arena.view(element(layout)), *batch[:4]),
        out=out,
        lse=lse,
        numbers=(q.stride(0), q.stride(1), batch.table.stride(0), pages.layer, rows),
        softmax=(how.scale, how.softcap or 0.0),
        layout=layout,
        rows=rows,
        most_pages=-(-batch.most_length // layout.page_size),
        few=few,
        group=group,
        batching=Batching(GROUP=group, FEW=few, ROWS=padded(rows), WINDOW=how.window or 0),
        switches=Switches(
            SOFTCAP=(how.softcap or 0.0) > 0,
            ALIBI=how.alibi is not None,
            TREE=how.tree is not None,
            CAUSAL=how.causal,
            UPCAST=upcast(layout),
        ),
        ends=Ends(SINKS=sinks is not None, LSE=asks_lse),
    )
    if tokens and layout.latent:
        attend_latents(task)
    elif tokens:
        if few:
            decode(task)
        if batch.most_new > few:
            prefill(task)
    return (out, lse) if return_lse and lse is not None else out


def _few(most_new: int, group: int, rows: int, invariant: bool) -> int:
    """Return the most new tokens of a row for the decode kernel; 0: prefill for all."""
    if invariant:  # a row's kernel must not depend on the other rows
        return 1 if group <= MOST_COLUMNS else 0
    few = 1 << max(most_new - 1, 0).bit_length()  # a power of two: fewer kernels to compile
    if few * group <= MOST_COLUMNS:
        return few
    return 1 if rows > 1 and group <= MOST_COLUMNS else 0


def merge(parts: Sequence[Partial]) -> Partial:
    """Merge attention over disjoint sets of tokens, exactly; see `dispatch.merge`."""
    o, lse = parts[0]
    tokens, heads, dim = o.shape
    dtype = o.dtype
    o, lse = o.contiguous(), lse.float().contiguous()
    for i, (other, other_lse) in enumerate(parts[1:], 2):
        # Between two of many merges the sum stays in float32.
        out = o.new_empty(o.shape, dtype=dtype if i == len(parts) else torch.float32)
        out_lse = torch.empty_like(lse)
        if tokens * heads:
            launch(
                merge_two,
                (tokens * heads,),
                *(o, lse, other.contiguous(), other_lse.float().contiguous(), out, out_lse),
                C=Constants(VALUE_DIM=dim, DV=padded(dim)),
                num_warps=1,
            )
        o, lse = out, out_lse
    return o, lse
