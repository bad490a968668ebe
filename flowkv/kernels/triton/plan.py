"""Who does which part of the work: device code shared by the Triton kernels.

Nothing here is planned on the host, so a captured CUDA graph stays right when lengths change: every
program reads the (few) lengths of the batch and finds its own share. Two ways of sharing:

* *few* new tokens per row (decode): stream-K. The pages of all rows stand in one line, cut into
  equal shares; a share may end in the middle of a row and go on in the next. Segment number
  `share + row` is unique, so partials need no table. Where a row's result must not depend on the
  rest of the batch, what is dealt out are *units* of pages instead, cut within each row alone, and
  every unit is a segment.
* *many* new tokens (prefill): a row is cut into blocks of query rows, and each block into chunks
  of pages where there are too few blocks to fill the device.

A row belongs to the few if `0 < T <= FEW`, to the many if `T > FEW`; one batch may hold both.
"""

# ruff: noqa: PLR0913, PLR0917

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_of_token(i_token, p_starts, n_rows, ROWS: tl.constexpr):
    """Row of packed token `i_token`; at least `n_rows` for a token of no row. ROWS >= n_rows."""
    o_row = tl.arange(0, ROWS)
    b_end = tl.load(p_starts + 1 + o_row, mask=o_row < n_rows, other=2147483647)
    return tl.sum((b_end <= i_token).to(tl.int32), axis=0)


@triton.jit
def first_page(n_tokens, n_new, PAGE: tl.constexpr, WINDOW: tl.constexpr):
    """First page that any new token of a row sees."""
    if WINDOW > 0:
        return tl.maximum(n_tokens - n_new - WINDOW + 1, 0) // PAGE
    else:
        return n_tokens * 0


@triton.jit
def seen_pages(n_tokens, n_new, PAGE: tl.constexpr, WINDOW: tl.constexpr):
    """Number of pages that the new tokens of a row see."""
    return (n_tokens + PAGE - 1) // PAGE - first_page(n_tokens, n_new, PAGE, WINDOW)


@triton.jit
def few_pages(p_starts, p_lengths, n_rows, FEW: tl.constexpr, PAGE: tl.constexpr,
              WINDOW: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """`[ROWS]` pages to read of each row that has few new tokens, 0 of the others."""
    o_row = tl.arange(0, ROWS)
    m_row = o_row < n_rows
    b_start = tl.load(p_starts + o_row, mask=m_row, other=0)
    b_new = tl.load(p_starts + 1 + o_row, mask=m_row, other=0) - b_start
    b_length = tl.load(p_lengths + o_row, mask=m_row, other=0)
    b_pages = seen_pages(b_length, b_new, PAGE, WINDOW)
    return tl.where(m_row & (b_new > 0) & (b_new <= FEW), b_pages, 0)


@triton.jit
def few_rows(p_counts, p_starts, n_rows, FEW: tl.constexpr, ROWS: tl.constexpr):
    """`[ROWS]` counts `[B]` of rows that have few new tokens, 0 of the others."""
    o_row = tl.arange(0, ROWS)
    m_row = o_row < n_rows
    b_new = tl.load(p_starts + 1 + o_row, mask=m_row, other=0)
    b_new -= tl.load(p_starts + o_row, mask=m_row, other=0)
    b_count = tl.load(p_counts + o_row, mask=m_row, other=0)
    return tl.where((b_new > 0) & (b_new <= FEW), b_count, 0)


@triton.jit
def few_share(b_pages, n_shares, MIN_PAGES: tl.constexpr):
    """Pages of one share when all pages are dealt out over at most `n_shares`."""
    return tl.maximum((tl.sum(b_pages, axis=0) + n_shares - 1) // n_shares, MIN_PAGES)


@triton.jit
def row_unit(n_pages, MIN_PAGES: tl.constexpr, UNITS: tl.constexpr):
    """Pages of a unit of a row that is cut into UNITS at most, whatever the other rows are."""
    return tl.maximum((n_pages + UNITS - 1) // UNITS, MIN_PAGES)


@triton.jit
def few_items(b_pages, MIN_PAGES: tl.constexpr, UNITS: tl.constexpr):
    """`[ROWS]` items of each row's pages that are dealt out: pages, or units if UNITS > 0."""
    if UNITS > 0:
        b_unit = row_unit(b_pages, MIN_PAGES, UNITS)
        return (b_pages + b_unit - 1) // b_unit
    else:
        return b_pages


@triton.jit
def share_of_items(b_items, n_shares, MIN_PAGES: tl.constexpr, UNITS: tl.constexpr):
    """Items of one share."""
    if UNITS > 0:
        return tl.maximum((tl.sum(b_items, axis=0) + n_shares - 1) // n_shares, 1)
    else:
        return few_share(b_items, n_shares, MIN_PAGES)


@triton.jit
def few_segments(b_items, i_row, n_share, ROWS: tl.constexpr, UNITS: tl.constexpr):
    """(First, number) of the segments of a row's partials."""
    begin = sum_before(b_items, i_row, ROWS)
    n_items = pick(b_items, i_row, ROWS)
    if UNITS > 0:
        return begin, n_items
    else:
        first = begin // n_share
        last = (begin + n_items - 1) // n_share
        return first + i_row, tl.where(n_items > 0, last - first + 1, 0)


@triton.jit
def many_chunks(p_starts, p_lengths, n_rows, n_shares, FEW: tl.constexpr, GROUP: tl.constexpr,
                BLOCK: tl.constexpr, MIN_PAGES: tl.constexpr, SPLIT: tl.constexpr,
                PAGE: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Blocks `[ROWS]` and chunks per block `[ROWS]` of rows with many new tokens, pages a chunk."""
    o_row = tl.arange(0, ROWS)
    m_row = o_row < n_rows
    b_start = tl.load(p_starts + o_row, mask=m_row, other=0)
    b_new = tl.load(p_starts + 1 + o_row, mask=m_row, other=0) - b_start
    b_length = tl.load(p_lengths + o_row, mask=m_row, other=0)
    b_pages = seen_pages(b_length, b_new, PAGE, WINDOW)
    b_blocks = tl.where(m_row & (b_new > FEW), (b_new * GROUP + BLOCK - 1) // BLOCK, 0)
    if SPLIT:
        n_chunk = (tl.sum(b_blocks * b_pages, axis=0) + n_shares - 1) // n_shares
        n_chunk = tl.maximum(n_chunk, MIN_PAGES)
        b_chunks = (b_pages + n_chunk - 1) // n_chunk
    else:
        n_chunk = tl.max(b_pages, axis=0)
        b_chunks = tl.full([ROWS], 1, tl.int32)
    return b_blocks, b_chunks, n_chunk


@triton.jit
def pick(b_values, index, ROWS: tl.constexpr):
    """Element `index` of a block."""
    return tl.sum(tl.where(tl.arange(0, ROWS) == index, b_values, 0), axis=0)


@triton.jit
def sum_before(b_values, index, ROWS: tl.constexpr):
    """Sum of the elements of a block before `index`."""
    return tl.sum(tl.where(tl.arange(0, ROWS) < index, b_values, 0), axis=0)


@triton.jit
def row_of_item(b_items, i_item):
    """Row that holds item `i_item` when rows hold `b_items` each; ROWS beyond the last item."""
    return tl.sum((tl.cumsum(b_items, axis=0) <= i_item).to(tl.int32), axis=0)


@triton.jit
def tile_at(position, PAGE: tl.constexpr, TILE: tl.constexpr):
    """Number of the tile that holds a position. A page is cut into cdiv(PAGE, TILE) tiles."""
    if PAGE % TILE == 0:
        return position // TILE
    else:
        return position // PAGE * ((PAGE + TILE - 1) // TILE) + position % PAGE // TILE


@triton.jit
def tiles_until(position, PAGE: tl.constexpr, TILE: tl.constexpr):
    """Number of tiles that hold the positions below `position`."""
    return tl.where(position > 0, tile_at(position - 1, PAGE, TILE) + 1, 0)


@triton.jit
def tile_range(page, n_pages, seen_least, seen_most, PAGE: tl.constexpr, TILE: tl.constexpr,
               WINDOW: tl.constexpr):  # fmt: skip
    """Tiles `[t0, t1)` of `n_pages` pages that some query sees, `[f0, f1)` that all see in full.

    Queries see the positions below `seen_least` to `seen_most`, and WINDOW of them at most.
    """
    TILES: tl.constexpr = (PAGE + TILE - 1) // TILE
    t0 = page * TILES
    t1 = tl.minimum((page + n_pages) * TILES, tiles_until(seen_most, PAGE, TILE))
    f0 = t0
    if WINDOW > 0:
        t0 = tl.maximum(t0, tile_at(tl.maximum(seen_least - WINDOW, 0), PAGE, TILE))
        f0 = tiles_until(tl.maximum(seen_most - WINDOW, 0), PAGE, TILE)
    t1 = tl.maximum(t0, t1)
    f0 = tl.minimum(tl.maximum(f0, t0), t1)
    f1 = tl.minimum(tl.maximum(tile_at(seen_least, PAGE, TILE), f0), t1)
    return t0, f0, f1, t1


@triton.jit
def list_range(skip, take, n_pages, n_edge, n_tail, PAGE: tl.constexpr, TILE: tl.constexpr):
    """`tile_range` of `take` pages from `skip` on of a list: its ends of n_edge, n_tail have masks.

    Tiles are cut from pages of PAGE tokens.
    """
    TILES: tl.constexpr = (PAGE + TILE - 1) // TILE
    end = skip + take
    f0 = tl.minimum(tl.maximum(skip, n_edge), end)
    f1 = tl.minimum(tl.maximum(n_pages - n_tail, f0), end)
    return skip * TILES, f0 * TILES, f1 * TILES, end * TILES
