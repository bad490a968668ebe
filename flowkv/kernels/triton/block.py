"""What the kernels for many new tokens do alike with one block of query rows.

Row r of a block stands for new token r // GROUP and query head r % GROUP of a KV head's group,
counted from the block's first. Which rows a block has, which pages it attends over, how scores
become probabilities, and where the result goes, is the same for every kind of page.
"""

# ruff: noqa: PLR0913, PLR0917

from __future__ import annotations

import triton
import triton.language as tl

from flowkv.core.layout import CODEC_SHIFT
from flowkv.kernels.triton.plan import (
    first_page,
    many_chunks,
    pick,
    row_of_item,
    sum_before,
    tile_range,
)
from flowkv.kernels.triton.tile import LN2, LOG2E, cap, locate, visible

TAG = tl.constexpr(CODEC_SHIFT)


@triton.jit
def block_of_item(i_item, p_starts, p_lengths, n_rows, n_shares, PAGE: tl.constexpr,
                  GROUP: tl.constexpr, FEW: tl.constexpr, BLOCK: tl.constexpr,
                  ROWS: tl.constexpr, MIN_PAGES: tl.constexpr, SPLIT: tl.constexpr,
                  WINDOW: tl.constexpr):  # fmt: skip
    """(Row, rank, block, first page, pages) of an item: a chunk of pages of a block of a row.

    The row is `n_rows` or more for items of no row. The rank counts rows with more than FEW new
    tokens.
    """
    b_blocks, b_chunks, n_chunk = many_chunks(
        p_starts, p_lengths, n_rows, n_shares, FEW, GROUP, BLOCK, MIN_PAGES, SPLIT, PAGE, WINDOW,
        ROWS)  # fmt: skip
    i_row = row_of_item(b_blocks * b_chunks, i_item)
    i_chunk = i_item - sum_before(b_blocks * b_chunks, i_row, ROWS)
    n_chunks = tl.maximum(pick(b_chunks, i_row, ROWS), 1)
    i_rank = sum_before((b_blocks > 0).to(tl.int32), i_row, ROWS)
    return i_row, i_rank, i_chunk // n_chunks, i_chunk % n_chunks * n_chunk, n_chunk


@triton.jit
def block_tiles(page, n_pages, i_block, n_new, n_tokens, PAGE: tl.constexpr, TILE: tl.constexpr,
                GROUP: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
                CAUSAL: tl.constexpr, TREE: tl.constexpr):  # fmt: skip
    """`tile_range` of a block's chunk, whose pages count from the first that the row sees."""
    if not CAUSAL:
        least = n_tokens
        most = n_tokens
    elif TREE:  # all see what lies before the new tokens
        least = n_tokens - n_new
        most = n_tokens
    else:
        context = n_tokens - n_new
        least = context + 1 + i_block * BLOCK // GROUP
        most = context + 1 + tl.minimum((i_block * BLOCK + BLOCK - 1) // GROUP, n_new - 1)
    return tile_range(
        first_page(n_tokens, n_new, PAGE, WINDOW) + page, n_pages, least, most, PAGE, TILE,
        WINDOW)  # fmt: skip


@triton.jit
def spare_offset(p_spare, p_run, i_rank, n_columns, n_spare, RUN: tl.constexpr,
                 GRANULE: tl.constexpr):  # fmt: skip
    """Elements from p_run to the spare run of a row's first page, whose rank is i_rank.

    An offset, not a pointer: AMD's compiler wants all that a load may read to have one base.
    """
    ITEM: tl.constexpr = 4096 // GRANULE
    o_spare = (p_spare.to(tl.int64) - p_run.to(tl.int64)) // ITEM
    return o_spare + i_rank.to(tl.int64) * n_columns * n_spare + tl.program_id(1) * RUN


@triton.jit
def page_of_tile(t, p_run, p_line, o_spare, n_spare, PAGE: tl.constexpr, TILE: tl.constexpr,
                 GRANULE: tl.constexpr, SEALED: tl.constexpr):  # fmt: skip
    """`locate`; a sealed page p is read at p_run + o_spare + p * n_spare instead."""
    if SEALED:
        i_page = t // ((PAGE + TILE - 1) // TILE)
        o_slot = t % ((PAGE + TILE - 1) // TILE) * TILE
        page = tl.load(p_line + i_page)
        o_page = page.to(tl.int64) * GRANULE
        o_page = tl.where(page >> TAG > 0, o_spare + i_page.to(tl.int64) * n_spare, o_page)
        p_page = p_run + tl.multiple_of(o_page, GRANULE // 256)  # runs begin at whole 16 bytes
        return p_page, o_slot, i_page * PAGE + o_slot
    else:
        return locate(t, p_run, p_line, PAGE, TILE, GRANULE)


@triton.jit
def weigh(b_s, b_at, m_t, b_seen, b_slope, b_tree, context, scale, softcap, WINDOW: tl.constexpr,
          SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, TREE: tl.constexpr,
          MASK: tl.constexpr):  # fmt: skip
    """Scores `[BLOCK, TILE]` of the tokens at b_at, in units of `unit_of`; -inf where hidden.

    Args:
        b_s: Products of queries and keys.
        b_at: `[TILE]` positions.
        m_t: `[TILE]`, which of them hold tokens.
        b_seen: `[BLOCK]`: each query sees the positions below.
        b_slope: `[BLOCK]`, of ALiBi.
        b_tree: `[BLOCK]`, bits of the new tokens that a query sees.
        context: Position of the row's first new token.
        scale: Of the products.
        softcap: On scaled products.
        WINDOW: Tokens seen, 0 for all.
        SOFTCAP: Whether there is a softcap.
        ALIBI: Whether there are slopes.
        TREE: Whether bits stand in for the causal rule.
        MASK: Whether anything may be hidden.
    """
    b_s = cap(b_s, scale, softcap, SOFTCAP, ALIBI)
    if ALIBI:
        b_s += b_slope[:, None] * (b_at[None, :] + 1 - b_seen[:, None]).to(tl.float32)
    if MASK:
        m_s = visible(b_at[None, :], b_seen[:, None], b_tree[:, None], context, WINDOW, TREE)
        b_s = tl.where(m_t[None, :] & m_s, b_s, -float("inf"))
    return b_s


@triton.jit
def store_block(b_m, b_l, b_acc, p_out, p_lse, p_sinks, i_part, o_token, o_head, n_heads, m_r,
                VALUE_DIM: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr,
                SPLIT: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr):  # fmt: skip
    """Write what a block has seen: maxima b_m and sums b_l in units of log 2, and outputs.

    With SPLIT, p_out is float32 partials `[parts, BLOCK, Dv]` and p_lse `[parts, BLOCK]` in units
    of log 2; without, the result `[N, n_heads, Dv]` and `[N, n_heads]`, natural log.
    """
    o_v = tl.arange(0, DV)
    if SPLIT:
        o_o = i_part.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    else:
        o_o = o_token * n_heads + o_head
        if SINKS:
            b_sink = tl.load(p_sinks + o_head, mask=m_r, other=0.0).to(tl.float32) * LOG2E
            b_top = tl.maximum(b_m, b_sink)
            b_fade = tl.math.exp2(b_m - b_top)
            b_l = b_l * b_fade + tl.math.exp2(b_sink - b_top)
            b_acc = b_acc * b_fade[:, None]
            b_m = b_top
    b_some = tl.where(b_l == 0.0, 1.0, b_l)  # a chunk behind the diagonal has seen nothing
    if SPLIT or LSE:
        b_lse = tl.where(b_l == 0.0, -float("inf"), b_m + tl.math.log2(b_some))
        if not SPLIT:
            b_lse = b_lse * LN2
        tl.store(p_lse + o_o, b_lse, mask=m_r)
    p_o = p_out + o_o[:, None] * VALUE_DIM + o_v[None, :]
    m_o = m_r[:, None] & (o_v < VALUE_DIM)[None, :]
    tl.store(p_o, (b_acc / b_some[:, None]).to(p_out.dtype.element_ty), mask=m_o)
