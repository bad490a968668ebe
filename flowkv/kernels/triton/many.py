"""Paged attention for many new tokens per row, in Triton: prefill, or a suffix over a prefix.

Prefill is bound by arithmetic. A block of query rows packs tokens and the query heads of one KV
head, so that grouped heads share each tile; tiles before the diagonal (and inside of every window)
run without masks. A short suffix over a long prefix has too few blocks to fill a device: then SPLIT
cuts the pages of each block into chunks, and their partials are merged.

Sealed pages are decoded before, once, into spare raw runs (`codec.unseal`), so that the same kernel
with the same tensor-core instructions attends over rows of any codecs. Pages of latents have a
kernel of their own, for rows of few and of many new tokens.
"""

# ruff: noqa: PLR0913, PLR0917

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flowkv.core.errors import ConfigError
from flowkv.core.geometry import ITEMSIZE, PageLayout
from flowkv.kernels.triton.codec import Spare, unseal
from flowkv.kernels.triton.flight import prefilling
from flowkv.kernels.triton.launch import Constants, Traits, given, launch, padded, strides, traits
from flowkv.kernels.triton.task import REGISTERS, TAG, Task, merge_many, merge_parts, tile_of
from flowkv.kernels.triton.tile import (
    LN2,
    LOG2E,
    LOWEST,
    add_tiles,
    cap,
    first_page,
    load,
    locate,
    many_chunks,
    of_rows,
    pick,
    row_at,
    row_of_item,
    sight_of,
    sum_before,
    tile_range,
    tiles,
    unit_of,
    visible,
)

# Common parts of the kernels for many new tokens, for one block of query rows.
#
# Row r of a block stands for new token r // GROUP and query head r % GROUP of a KV head's group,
# counted from the block's first. The rows of a block, its pages, the way from scores to
# probabilities, and the place of the result, are the same for every kind of page.


@triton.jit
def block_of_item(i_item, p_starts, p_lengths, n_rows, n_shares, C: tl.constexpr):
    """Return (row, rank, block, first page, pages) of an item: a chunk of pages of a row's block.

    The row is `n_rows` or more for items of no row. The rank counts rows with more than FEW new
    tokens.
    """
    b_blocks, b_chunks, n_chunk = many_chunks(p_starts, p_lengths, n_rows, n_shares, C)
    i_row = row_of_item(b_blocks * b_chunks, i_item)
    i_chunk = i_item - sum_before(b_blocks * b_chunks, i_row)
    n_chunks = tl.maximum(pick(b_chunks, i_row), 1)
    i_rank = sum_before((b_blocks > 0).to(tl.int32), i_row)
    return i_row, i_rank, i_chunk // n_chunks, i_chunk % n_chunks * n_chunk, n_chunk


@triton.jit
def block_tiles(page, n_pages, i_block, n_new, n_tokens, C: tl.constexpr):
    """Return `tile_range` of a block's chunk; its pages count from the first that the row sees."""
    if not C.CAUSAL:
        least = n_tokens
        most = n_tokens
    elif C.TREE:  # all see the tokens before the new ones
        least = n_tokens - n_new
        most = n_tokens
    else:
        context = n_tokens - n_new
        least = context + 1 + i_block * C.BLOCK // C.GROUP
        most = context + 1 + tl.minimum((i_block * C.BLOCK + C.BLOCK - 1) // C.GROUP, n_new - 1)
    return tile_range(first_page(n_tokens, n_new, C) + page, n_pages, least, most, C)


@triton.jit
def spare_offset(p_spare, p_run, i_rank, i_spare, n_columns, n_spare, C: tl.constexpr):
    """Return the elements from p_run to the spare run of the first page of the row of rank i_rank.

    It is an offset, not a pointer: AMD's compiler wants one base for all addresses of a load.
    """
    ITEM: tl.constexpr = 4096 // C.GRANULE
    o_spare = (p_spare.to(tl.int64) - p_run.to(tl.int64)) // ITEM
    return o_spare + i_rank.to(tl.int64) * n_columns * n_spare + i_spare * C.RUN


@triton.jit
def page_of_tile(t, p_run, p_line, o_spare, n_spare, C: tl.constexpr):
    """Return `locate`; a sealed page p is read at p_run + o_spare + p * n_spare instead."""
    if C.SEALED:
        i_page = t // tiles(C)
        o_slot = t % tiles(C) * C.TILE
        page = tl.load(p_line + i_page)
        o_page = page.to(tl.int64) * C.GRANULE
        o_page = tl.where(page >> TAG > 0, o_spare + i_page.to(tl.int64) * n_spare, o_page)
        p_page = p_run + tl.multiple_of(o_page, C.GRANULE // 256)  # runs begin at whole 16 bytes
        return p_page, o_slot, i_page * C.PAGE + o_slot
    else:
        return locate(t, p_run, p_line, C)


@triton.jit
def rows_of(o_r, start, n_new, i_head, C: tl.constexpr):
    """Return (packed tokens, query heads, mask) of the query rows o_r of a KV head."""
    o_token = (start + o_r // C.GROUP).to(tl.int64)
    return o_token, i_head * C.GROUP + o_r % C.GROUP, o_r < n_new * C.GROUP


@triton.jit
def load_queries(p_q, rows, stride_token, stride_head, dtype: tl.constexpr, C: tl.constexpr):
    """Load the queries `[BLOCK, D]` of `rows_of`, as elements of pages."""
    o_token, o_head, m_r = rows
    o_d = tl.arange(0, C.D)
    o_q = o_token * stride_token + o_head * stride_head
    m_q = m_r[:, None] & (o_d < C.HEAD_DIM)[None, :]
    b_q = load(p_q + o_q[:, None] + o_d[None, :], m_q, True, C.UPCAST)
    return b_q if C.UPCAST else b_q.to(dtype)


@triton.jit
def weigh(b_s, b_at, m_t, sight, scores, MASK: tl.constexpr, C: tl.constexpr):
    """Return scores `[BLOCK, TILE]` of the tokens at b_at, in units of `unit_of`; -inf if hidden.

    Args:
        b_s: Products of queries and keys.
        b_at: `[TILE]` positions.
        m_t: `[TILE]`, mask of the slots that hold tokens.
        sight: What the queries see (`sight_of`).
        scores: Scale of the products, and the softcap of the scaled ones.
        MASK: Whether anything may be hidden.
        C: Constants of the kernel (`launch.Constants`).
    """
    b_seen, b_slope, b_tree, _, context = sight
    b_s = cap(b_s, scores[0], scores[1], C)
    if C.ALIBI:
        b_s += b_slope[:, None] * (b_at[None, :] + 1 - b_seen[:, None]).to(tl.float32)
    if MASK:
        m_s = visible(b_at[None, :], b_seen[:, None], b_tree[:, None], context, C)
        b_s = tl.where(m_t[None, :] & m_s, b_s, -float("inf"))
    return b_s


@triton.jit
def store_block(b_m, b_l, b_acc, p_out, p_lse, p_sinks, i_part, o_token, o_head, n_heads, m_r,
                C: tl.constexpr):  # fmt: skip
    """Write the result of a block: maxima b_m and sums b_l in units of log 2, and outputs.

    With SPLIT, p_out is float32 partials `[parts, BLOCK, Dv]` and p_lse `[parts, BLOCK]` in units
    of log 2; without, the result `[N, n_heads, Dv]` and `[N, n_heads]`, natural log.
    """
    o_v = tl.arange(0, C.DV)
    if C.SPLIT:
        o_o = i_part.to(tl.int64) * C.BLOCK + tl.arange(0, C.BLOCK)
    else:
        o_o = o_token * n_heads + o_head
        if C.SINKS:
            b_sink = tl.load(p_sinks + o_head, mask=m_r, other=0.0).to(tl.float32) * LOG2E
            b_top = tl.maximum(b_m, b_sink)
            b_fade = tl.math.exp2(b_m - b_top)
            b_l = b_l * b_fade + tl.math.exp2(b_sink - b_top)
            b_acc = b_acc * b_fade[:, None]
            b_m = b_top
    b_some = tl.where(b_l == 0.0, 1.0, b_l)  # a chunk behind the diagonal has seen nothing
    if C.SPLIT or C.LSE:
        b_lse = tl.where(b_l == 0.0, -float("inf"), b_m + tl.math.log2(b_some))
        if not C.SPLIT:
            b_lse = b_lse * LN2
        tl.store(p_lse + o_o, b_lse, mask=m_r)
    p_o = p_out + o_o[:, None] * C.VALUE_DIM + o_v[None, :]
    m_o = m_r[:, None] & (o_v < C.VALUE_DIM)[None, :]
    tl.store(p_o, (b_acc / b_some[:, None]).to(p_out.dtype.element_ty), mask=m_o)


# The weight that many new tokens of a row give to each page they see, in Triton.
#
# Weights are relative to a query's whole row, so they are known only after attention; the scores
# are computed again, and values are not read. One program owns one page of one row and KV head: the
# sums are the same each time.


@triton.jit(do_not_specialize=["layer", "n_rows", "head_low", "n_heads", "n_columns"])
def mass_many(p_q, p_arena, p_table, p_rows, p_lengths, p_starts, p_alibi, p_tree, p_spare, p_lse,
              p_mass, stride_token, stride_head, stride_table, layer, n_rows, stride_mass, head_low,
              n_heads, n_columns, scale, softcap, C: tl.constexpr):  # fmt: skip
    """Add to p_mass `[B, pages, n_heads]`. Grid (B * n_columns, KV heads from head_low on)."""
    i_row = tl.program_id(0) // n_columns
    i_page = tl.program_id(0) % n_columns
    i_head = tl.program_id(1) + head_low
    start, n_new, n_tokens = row_at(i_row, p_starts, p_lengths)
    first = first_page(n_tokens, n_new, C)
    if (n_new <= C.FEW) | (i_page < first) | (i_page * C.PAGE >= n_tokens):
        return
    p_line = p_table + tl.load(p_rows + i_row).to(tl.int64) * stride_table
    p_run = p_arena + layer.to(tl.int64) * C.STRIPE + i_head * C.RUN
    n_spare = tl.num_programs(1) * C.RUN
    o_spare = i_row
    if C.SEALED:
        b_new = of_rows(p_starts + 1, n_rows, C) - of_rows(p_starts, n_rows, C)
        i_rank = sum_before((b_new > C.FEW).to(tl.int32), i_row)
        o_spare = spare_offset(
            p_spare, p_run, i_rank, tl.program_id(1), n_columns, n_spare, C)  # fmt: skip
    o_d = tl.arange(0, C.D)
    context = n_tokens - n_new
    b_mass = tl.full([C.BLOCK], 0, tl.float32)
    for t in tl.range(i_page * tiles(C), i_page * tiles(C) + tiles(C), num_stages=1):
        p_page, o_slot, position = page_of_tile(t, p_run, p_line, o_spare, n_spare, C)
        o_t = tl.arange(0, C.TILE)
        b_at = position + o_t
        m_t = (b_at < n_tokens) & (o_slot + o_t < C.PAGE)
        m_k = m_t[None, :] & (o_d < C.HEAD_DIM)[:, None]
        p_k = p_page + o_slot * C.HEAD_DIM
        b_k = load(p_k + o_t[None, :] * C.HEAD_DIM + o_d[:, None], m_k, True, C.UPCAST)
        for i in tl.range(0, n_new * C.GROUP, C.BLOCK, num_stages=1):
            o_r = i + tl.arange(0, C.BLOCK)
            rows = rows_of(o_r, start, n_new, i_head, C)
            b_q = load_queries(p_q, rows, stride_token, stride_head, p_arena.dtype.element_ty, C)
            o_token, o_head, m_r = rows
            b_lse = tl.load(p_lse + o_token * n_heads * C.GROUP + o_head, mask=m_r, other=0.0)
            sight = sight_of(o_r, o_token, o_head, m_r, context, n_tokens, p_alibi, p_tree, C)
            b_s = tl.dot(b_q, b_k, out_dtype=tl.float32, input_precision="ieee")
            b_s = weigh(b_s, b_at, m_t, sight, (scale, softcap), True, C)
            b_log = b_s * unit_of(scale, C) - (b_lse * LOG2E)[:, None]
            m_s = m_r[:, None] & (b_s > -float("inf"))
            b_mass += tl.sum(tl.where(m_s, tl.math.exp2(b_log), 0.0), axis=1)
    p_to = p_mass + i_row.to(tl.int64) * stride_mass + i_page * n_heads + i_head
    tl.store(p_to, tl.load(p_to) + tl.sum(b_mass, axis=0))


def add_mass(task: Task, spare: Spare) -> None:
    """Add the weights of rows with many new tokens to `task.how.mass`; needs their lse."""
    layout, mass = task.layout, task.how.mass
    assert mass is not None
    shape = strides(layout)
    wide = ITEMSIZE[layout.dtype] == 4 or shape.D > 128
    launch(
        mass_many,
        (task.rows * task.most_pages, spare.heads),
        *(*task.operands, task.how.alibi, task.how.tree, spare.runs, task.lse, mass, *task.numbers),
        *(mass.stride(0), spare.low, layout.kv_heads, task.most_pages, *task.softmax),
        C=given(
            shape,
            task.batching,
            task.switches,
            TILE=tile_of(layout, 16 if wide else 64),
            BLOCK=32 if wide else 128 if traits(task.out.device).major >= 9 else 64,
            SEALED=bool(task.pages.sealed),
        ),
        **REGISTERS,
    )


INVARIANT_TOKENS = 4096
"""Tokens of a chunk where a row's bits must not depend on the batch: all chunks are alike then."""


@triton.jit
def many_tile(soft, t, b_q, place, sight, scores, MASK: tl.constexpr, C: tl.constexpr):
    """Add a tile of tokens to the running softmax (m, l, acc) of a block of query rows."""
    b_m, b_l, b_acc = soft
    p_run, p_line, o_spare, n_spare = place
    p_page, o_slot, position = page_of_tile(t, p_run, p_line, o_spare, n_spare, C)
    o_t = tl.arange(0, C.TILE)
    o_d = tl.arange(0, C.D)
    o_v = tl.arange(0, C.DV)
    m_k = (o_d < C.HEAD_DIM)[:, None]
    m_v = (o_v < C.VALUE_DIM)[None, :]
    b_at = position + o_t
    m_t = (b_at < sight[3]) & (o_slot + o_t < C.PAGE)
    if MASK:  # a slot without a token may hold anything, NaN included
        m_k = m_k & m_t[None, :]
        m_v = m_v & m_t[:, None]
    p_k = p_page + o_slot * C.HEAD_DIM
    p_v = p_page + C.VALUES + o_slot * C.VALUE_DIM
    b_k = load(p_k + o_t[None, :] * C.HEAD_DIM + o_d[:, None], m_k, MASK or C.D != C.HEAD_DIM,
               C.UPCAST)  # fmt: skip
    b_s = tl.dot(b_q, b_k, out_dtype=tl.float32, input_precision="ieee")
    b_s = weigh(b_s, b_at, m_t, sight, scores, MASK, C)
    unit = unit_of(scores[0], C)
    b_top = tl.maximum(b_m, tl.max(b_s, axis=1))
    b_fade = tl.math.exp2((b_m - b_top) * unit)
    b_p = tl.math.exp2(b_s * unit - (b_top * unit)[:, None])
    b_l = b_l * b_fade + tl.sum(b_p, axis=1)
    b_v = load(p_v + o_t[:, None] * C.VALUE_DIM + o_v[None, :], m_v, MASK or C.DV != C.VALUE_DIM,
               C.UPCAST)  # fmt: skip
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, acc=b_acc * b_fade[:, None], out_dtype=tl.float32,
                   input_precision="ieee")  # fmt: skip
    return b_top, b_l, b_acc


@triton.jit(
    do_not_specialize=[
        *("layer", "n_rows", "n_shares", "head_low", "n_heads", "n_columns", "n_here", "n_falling")
    ]
)
def attend_many(p_q, p_arena, p_table, p_rows, p_lengths, p_starts, p_sinks, p_alibi, p_tree,
                p_spare, p_out, p_lse, stride_token, stride_head, stride_table, layer, n_rows,
                n_shares, head_low, n_heads, n_columns, n_here, n_falling, scale, softcap,
                C: tl.constexpr):  # fmt: skip
    """Attend with a block of query rows of a KV head over a chunk of pages, for rows with T > FEW.

    Grid (items * n_here,), n_here KV heads from head_low on; the item counts chunks within blocks
    within rows. Later blocks see more: n_falling of each head begin first, from the last one down,
    the others follow from the first one up (`falling`). With SEALED, p_spare holds runs `[rows with
    T > FEW, n_columns, those heads]`. `store_block` writes the results, partials to `[items,
    n_heads, BLOCK, Dv]`.
    """
    i_item = tl.program_id(0) // n_here
    i_head = tl.program_id(0) % n_here + head_low
    n_items = tl.num_programs(0) // n_here
    i_item = tl.where(i_item < n_falling, n_items - 1 - i_item, i_item - n_falling)
    i_row, i_rank, i_block, page, n_pages = block_of_item(
        i_item, p_starts, p_lengths, n_rows, n_shares, C)  # fmt: skip
    if i_row >= n_rows:
        return
    start, n_new, n_tokens = row_at(i_row, p_starts, p_lengths)
    p_line = p_table + tl.load(p_rows + i_row).to(tl.int64) * stride_table
    p_run = p_arena + layer.to(tl.int64) * C.STRIPE + i_head * C.RUN
    n_spare = n_here * C.RUN
    o_spare = i_rank
    if C.SEALED:
        o_spare = spare_offset(
            p_spare, p_run, i_rank, i_head - head_low, n_columns, n_spare, C)  # fmt: skip
    o_r = i_block * C.BLOCK + tl.arange(0, C.BLOCK)
    rows = rows_of(o_r, start, n_new, i_head, C)
    b_q = load_queries(p_q, rows, stride_token, stride_head, p_arena.dtype.element_ty, C)

    b_none = tl.full([C.BLOCK], 0, tl.float32)
    soft = b_none + LOWEST, b_none, tl.full([C.BLOCK, C.DV], 0, tl.float32)
    sight = sight_of(
        o_r, rows[0], rows[1], rows[2], n_tokens - n_new, n_tokens, p_alibi, p_tree, C)  # fmt: skip
    seen = block_tiles(page, n_pages, i_block, n_new, n_tokens, C)
    place = p_run, p_line, o_spare, n_spare
    b_m, b_l, b_acc = add_tiles(many_tile, soft, seen, b_q, place, sight, (scale, softcap), C)
    # There are no registers to hold the rows in, so they are computed again: the difference is
    # always 0, but unknown to the compiler.
    o_r = i_block * C.BLOCK + tl.arange(0, C.BLOCK)
    o_r += tl.load(p_starts + i_row, volatile=True) - start
    o_token, o_head, m_r = rows_of(o_r, start, n_new, i_head, C)
    store_block(b_m * unit_of(scale, C), b_l, b_acc, p_out, p_lse, p_sinks,
                i_item * n_heads + i_head, o_token, o_head, n_heads * C.GROUP, m_r, C)  # fmt: skip


class Cut(NamedTuple):
    """Cut of a call's work into programs.

    Attributes:
        items: Most programs along the first axis of the grid.
        shares: Chunks to aim at over all rows; `merge_many` needs the number to find them again.
        least: Least pages of a chunk.
        split: Whether a block's pages are cut at all.
    """

    items: int
    shares: int
    least: int
    split: bool


def prefill(task: Task) -> None:
    """Attend with all rows that have many new tokens."""
    layout, device = task.layout, traits(task.out.device)
    heads, tokens = layout.kv_heads, task.out.shape[0]
    shape, tune = _config(layout, device, bool(task.pages.sealed) or task.switches.ALIBI)
    block = tune["block"]
    cut = cut_of(task, block, -(-device.processors * tune["programs"] // heads))
    common: dict[str, Any] = {"BLOCK": block, "MIN_PAGES": cut.least, "SPLIT": cut.split}
    part, part_lse = partials(task, cut, block)
    constants = given(
        shape, task.batching, task.switches, task.ends, **common, SEALED=bool(task.pages.sealed)
    )
    for spare in unseal(task):
        launch(
            attend_many,
            (cut.items * spare.heads,),
            *(*task.operands, task.how.sinks, task.how.alibi, task.how.tree, spare.runs),
            *(part, part_lse),
            *(*task.numbers, cut.shares, spare.low, heads, task.most_pages, spare.heads),
            *(falling(cut.items, spare.heads, device.processors * tune["programs"]), *task.softmax),
            C=constants,
            num_warps=tune["warps"],
            **REGISTERS,
        )
    if cut.split:
        merge_parts(merge_many, tokens, task, part, part_lse, cut.shares, common)
    if task.how.mass is not None:  # masses are relative to the weight of all pages together
        for spare in unseal(task):
            add_mass(task, spare)


def falling(items: int, heads: int, at_once: int) -> int:
    """Return how many items of each head begin in falling order, the longest first.

    A free processor takes the longest remaining item. Where all programs begin at once, the second
    half rises: the programs of a processor are a long one and a short one.
    """
    return -(-items // 2) if items * heads <= at_once else items


def cut_of(task: Task, block: int, shares: int) -> Cut:
    """Cut pages into chunks only where blocks of query rows are too few to fill the device."""
    most, size = task.most_pages, task.layout.page_size
    blocks = task.out.shape[0] * task.group // block + task.rows  # at most
    least = -(-256 // size)
    split = blocks < shares and most > least
    if task.how.invariant:  # chunks of the least size, wherever the row stands
        least, shares, split = -(-INVARIANT_TOKENS // size), 1 << 30, True
    chunks = min(shares, blocks * -(-most // least)) if split else 0
    return Cut(blocks + chunks, shares, least, split)


def partials(task: Task, cut: Cut, block: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the outputs of blocks: (o, lse) of the call, or, where they are cut, of each item."""
    if not cut.split:
        return task.out, task.lse
    segments = (cut.items, task.layout.kv_heads, block)
    part = task.out.new_empty((*segments, task.layout.value_dim), dtype=torch.float32)
    return part, task.out.new_empty(segments, dtype=torch.float32)


@lru_cache(maxsize=256)
def _config(layout: PageLayout, device: Traits, busy: bool) -> tuple[Constants, dict[str, int]]:
    """Return the constants of `attend_many`, and its rows a block, warps and programs."""
    shape, item = strides(layout), ITEMSIZE[layout.dtype]
    warps, tile = 8, tile_of(layout, 64) if item == 2 else 16
    block = 128 if item == 2 else 64
    if item == 2 and max(shape.D, shape.DV) > 128:  # as much as registers hold
        block, tile = {9: 128, 10: 64}.get(device.major, 32), min(tile, 32)
    elif item == 2:
        block, warps = prefilling(shape.D + shape.DV, tile, device)
    if item == 2 and busy and device.major < 9:  # spare runs, or ALiBi, take registers too
        tile = min(tile, 32)
    row_bytes = (shape.D + shape.DV) * item
    room = device.shared_bytes - 4096
    while block > 32 and block * shape.D * item + 2 * tile * row_bytes > room:
        block //= 2
    shape = shape._replace(TILE=tile, STAGES=5 if device.major else 3)
    return shape, {"block": block, "warps": warps, "programs": 8 // warps}


# Attention over latents (MLA), in Triton: one KV head, its values the first dims of its keys.
#
# All query heads share each latent, so rows of queries are many even in decode, and a block of
# them is laid out as for prompts. A latent is read once: the tile that the first Dv dims of the
# queries are multiplied with is the tile that the weights mix; only the other dims of the keys,
# rotated by position, are a tile of their own (multi-head latent attention, arXiv 2405.04434: 576 =
# 512 + 64).
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
    shape = _latent_config(layout, device, block, cut.split)
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
def _latent_config(layout: PageLayout, device: Traits, block: int, split: bool) -> Constants:
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
