"""Device code that kernels share: tiles of K and V, two-digit numbers, distribution of work."""

# ruff: noqa: PLR0913, PLR0917

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1.0e30)  # finite: "nothing seen yet" needs no guards against NaN


@triton.jit
def tiles(C: tl.constexpr):
    """Return the number of tiles of a page, a constant."""
    return (C.PAGE + C.TILE - 1) // C.TILE


@triton.jit
def locate(t, p_run, p_line, C: tl.constexpr):
    """Return (pointer to the page's run, slot of the tile's first token, position of that token).

    Args:
        t: Number of the tile; pages are cut into `tiles`.
        p_run: Run of the head in a page at granule 0.
        p_line: The row's line of the page table.
        C: Constants of the kernel (`launch.Constants`).
    """
    i_page = t // tiles(C)
    o_slot = t % tiles(C) * C.TILE
    p_page = p_run + tl.load(p_line + i_page).to(tl.int64) * C.GRANULE
    return p_page, o_slot, i_page * C.PAGE + o_slot


@triton.jit
def load(p, m, MASKED: tl.constexpr, UPCAST: tl.constexpr):
    """Load a tile; elements outside of `m` are 0 and not read.

    UPCAST is for the interpreter, as its bfloat16 arithmetic is wrong.
    """
    if MASKED:
        b = tl.load(p, mask=m, other=0.0)
    else:
        b = tl.load(p)
    if UPCAST:
        b = b.to(tl.float32)
    return b


@triton.jit
def cap(b_s, scale, softcap, C: tl.constexpr):
    """Return scores b_s' such that `b_s' * unit` is the logit, capped, in units of log 2."""
    if C.SOFTCAP:  # cap * tanh(s / cap), where tanh(x) = 1 - 2 / (exp(2 x) + 1)
        b_exp = tl.math.exp2(b_s * (2.0 * LOG2E * scale / softcap))
        return softcap - 2.0 * softcap / (b_exp + 1.0)
    elif C.ALIBI:  # the logit itself, so that a bias may be added to it
        return b_s * scale
    else:
        return b_s


@triton.jit
def unit_of(scale, C: tl.constexpr):
    """Return the unit of `cap`."""
    if C.SOFTCAP or C.ALIBI:
        return LOG2E
    else:
        return scale * LOG2E


@triton.jit
def visible(b_at, b_seen, b_tree, context, C: tl.constexpr):
    """Return whether queries see positions b_at, by causality, a tree and a window.

    Args:
        b_at: Positions, broadcast against the queries.
        b_seen: Number of positions up to each query's own; of the row, without causality.
        b_tree: int64, bit j of a query's: it sees new token j of its row.
        context: Position of the row's first new token.
        C: Constants of the kernel (`launch.Constants`).
    """
    if C.TREE:
        b_new = tl.minimum(tl.maximum(b_at - context, 0), 63).to(tl.int64)
        m = (b_at < context) | (((b_tree >> b_new) & 1) != 0)
    else:
        m = b_at < b_seen
    if C.WINDOW > 0:
        m = m & (b_at >= b_seen - C.WINDOW)
    return m


@triton.jit
def store_mass(p_mass, i_tile, b_top, b_sum):
    """Store log 2 of the weight of a tile, before normalisation: `b_sum * 2**b_top` by column.

    Args:
        p_mass: `[COLUMNS]` pointers for tile 0; tiles follow at the distance of all KV heads.
        i_tile: Number of the tile within the row.
        b_top: Maxima in units of log 2.
        b_sum: Weights relative to the maxima.
    """
    COLUMNS: tl.constexpr = b_sum.shape[0]
    o_tile = i_tile.to(tl.int64) * tl.num_programs(1) * COLUMNS
    b_log = b_top + tl.math.log2(tl.where(b_sum == 0.0, 1.0, b_sum))  # NaN stays NaN
    tl.store(p_mass + o_tile, tl.where(b_sum == 0.0, -float("inf"), b_log))


@triton.jit
def store_partial(p_part, p_part_lse, o_part, m_c, b_m, b_l, b_acc, FROM: tl.constexpr,
                  C: tl.constexpr):  # fmt: skip
    """Store a running softmax as a partial: m in units of log 2, acc from dim FROM on."""
    o_v = FROM + tl.arange(0, b_acc.shape[0])
    b_some = tl.where(b_l == 0.0, 1.0, b_l)  # NaN stays NaN
    b_lse = tl.where(b_l == 0.0, -float("inf"), b_m + tl.math.log2(b_some))
    tl.store(p_part_lse + o_part, b_lse, mask=m_c)
    m_o = m_c[None, :] & (o_v < C.VALUE_DIM)[:, None]
    tl.store(p_part + o_part[None, :] * C.VALUE_DIM + o_v[:, None], b_acc / b_some[None, :],
             mask=m_o)  # fmt: skip


# Integers in the registers of sealed kernels: nibbles, signed bytes, and numbers of two digits.
#
# Four bytes fill a register, and a compiler without that knowledge takes them apart: as plain code
# these few lines cost as much as all the rest of a decode kernel. With ASM they are just two or
# three PTX instructions. Without (AMD, the interpreter) they are plain Triton of the same meaning;
# a test runs the PTX in a model of its four instructions to compare them.
#
# A *number of two digits* is an integer n of at most 127 * 256 in magnitude, kept as two int8 `hi`
# and `lo` with n = 256 hi + lo: tensor cores multiply both with 8- or 4-bit integers, exactly, and
# the second product costs little beside the loads it waits for (`triton.sealed`).

MOST = tl.constexpr(32512.0)
"""The largest number of two digits, 127 * 256."""

MAGIC = tl.constexpr(12582912.0)
"""1.5 * 2**23: adding it rounds a float32 below 2**22 to an integer, the low bits of the sum."""

MAGIC_BITS = tl.constexpr(0x4B400000)
"""The bits of MAGIC: an int32 accumulator that begins here ends as the bits of MAGIC + its sum."""

HIGH_BITS = tl.constexpr(0x4F400000)
"""The bits of 256 * MAGIC: sums of high digits that begin here count 256 times."""

SPLIT_NIBBLES = tl.constexpr("""{
    .reg .b32 t;
    and.b32 $0, $2, 0x0F0F0F0F;
    shr.u32 t, $2, 4;
    and.b32 $1, t, 0x0F0F0F0F;
}""")
FLIP_SIGNS = tl.constexpr("xor.b32 $0, $1, 0x80808080;")
SPLIT_DIGITS = tl.constexpr("""{
    .reg .b32 s, t;
    prmt.b32 s, $2, $3, 0x0051;
    prmt.b32 t, $4, $5, 0x0051;
    prmt.b32 $0, s, t, 0x5410;
    prmt.b32 s, $2, $3, 0x0040;
    prmt.b32 t, $4, $5, 0x0040;
    prmt.b32 s, s, t, 0x5410;
    xor.b32 $1, s, 0x80808080;
}""")


@triton.jit
def nibbles(b, C: tl.constexpr):
    """Return the (low, high) nibbles of bytes, as int8 of 0 to 15."""
    if C.ASM:
        return tl.inline_asm_elementwise(
            SPLIT_NIBBLES, "=r,=r,r", [b], dtype=(tl.int8, tl.int8), is_pure=True, pack=4
        )
    else:
        return (b & 15).to(tl.int8), (b >> 4).to(tl.int8)


@triton.jit
def signed(b, C: tl.constexpr):
    """Return bytes u as int8 u - 128."""
    if C.ASM:
        return tl.inline_asm_elementwise(
            FLIP_SIGNS, "=r,r", [b], dtype=tl.int8, is_pure=True, pack=4
        )
    else:
        return (b ^ 128).to(tl.int8, bitcast=True)


@triton.jit
def rounded(x):
    """Return float32 of at most MOST in magnitude as integers, raised by 128 and MAGIC_BITS."""
    return (x + (MAGIC + 128.0)).to(tl.int32, bitcast=True)


@triton.jit
def digits(b, C: tl.constexpr):
    """Return (hi, lo) of a result of `rounded`: byte 1, and byte 0 less the 128."""
    if C.ASM:
        return tl.inline_asm_elementwise(
            SPLIT_DIGITS, "=r,=r,r,r,r,r", [b], dtype=(tl.int8, tl.int8), is_pure=True, pack=4
        )
    else:
        return (b >> 8).to(tl.int8), (b ^ 128).to(tl.int8)


@triton.jit
def joined(b_hi, b_lo):
    """Return float32 MAGIC + 256 hi + lo of accumulators that began at HIGH_BITS and MAGIC_BITS.

    Both sums are below 2**22. The rest of MAGIC is removed where the result is multiplied: an FMA
    with a constant costs less than a subtraction. The error is half a unit, or 2**-24 of the sum.
    """
    b_hi = b_hi.to(tl.float32, bitcast=True) - 256.0 * MAGIC
    return b_hi + b_lo.to(tl.float32, bitcast=True)


# Distribution of the work over programs.
#
# The host plans nothing, so a captured CUDA graph stays right when lengths change: every program
# reads the (few) lengths of the batch and finds its own share. There are two ways of sharing:
#
# * *few* new tokens per row (decode): stream-K. The pages of all rows form one line, cut into equal
#   shares; a share may end in the middle of a row and go on in the next. Segment number
#   `share + row` is unique, so partials need no table. Where a row's result must not depend on the
#   rest of the batch, *units* of pages are distributed instead, cut within each row alone, and
#   every unit is a segment.
# * *many* new tokens (prefill): a row is cut into blocks of query rows, and each block into chunks
#   of pages where there are too few blocks to fill the device.
#
# A row belongs to the few if `0 < T <= FEW`, to the many if `T > FEW`; one batch may hold both.


@triton.jit
def row_of_token(i_token, p_starts, n_rows, C: tl.constexpr):
    """Return the row of packed token `i_token`; at least `n_rows` for padding. ROWS >= n_rows."""
    o_row = tl.arange(0, C.ROWS)
    b_end = tl.load(p_starts + 1 + o_row, mask=o_row < n_rows, other=2147483647)
    return tl.sum((b_end <= i_token).to(tl.int32), axis=0)


@triton.jit
def row_at(i_row, p_starts, p_lengths):
    """Return (first new token, new tokens, tokens) of a row."""
    start = tl.load(p_starts + i_row)
    return start, tl.load(p_starts + i_row + 1) - start, tl.load(p_lengths + i_row)


@triton.jit
def sight_of(o_r, o_token, o_head, m_r, context, n_tokens, p_alibi, p_tree, C: tl.constexpr):
    """Return what query rows see: (ends of positions, ALiBi slopes, bits of new tokens).

    Behind these are the tokens of the row, and the position of its first new token.
    """
    b_seen = context + 1 + o_r // C.GROUP
    if not C.CAUSAL:
        b_seen = o_r * 0 + n_tokens
    b_slope = b_seen
    if C.ALIBI:
        b_slope = tl.load(p_alibi + o_head, mask=m_r, other=0.0).to(tl.float32)
    b_tree = o_r
    if C.TREE:
        b_tree = tl.load(p_tree + o_token, mask=m_r, other=0)
    return b_seen, b_slope, b_tree, n_tokens, context


@triton.jit
def add_tiles(add: tl.constexpr, soft, seen, query, place, sight, scores, C: tl.constexpr):
    """Add the tiles of a `tile_range` to a running softmax (m, l, acc), by a function for one.

    Those that all queries see in full come first, without masks.
    """
    t0, f0, f1, t1 = seen
    for t in tl.range(f0, f1, num_stages=C.STAGES):
        soft = add(soft, t, query, place, sight, scores, C.PAGE % C.TILE != 0, C)
    n_head = f0 - t0
    for i in tl.range(0, n_head + t1 - f1, num_stages=1):
        t = tl.where(i < n_head, t0 + i, f1 + i - n_head)
        soft = add(soft, t, query, place, sight, scores, True, C)
    return soft


@triton.jit
def first_page(n_tokens, n_new, C: tl.constexpr):
    """Return the first page that any new token of a row sees."""
    if C.WINDOW > 0:
        return tl.maximum(n_tokens - n_new - C.WINDOW + 1, 0) // C.PAGE
    else:
        return n_tokens * 0


@triton.jit
def seen_pages(n_tokens, n_new, C: tl.constexpr):
    """Return the number of pages that the new tokens of a row see."""
    return (n_tokens + C.PAGE - 1) // C.PAGE - first_page(n_tokens, n_new, C)


@triton.jit
def of_rows(p, n_rows, C: tl.constexpr):
    """Load the `[ROWS]` numbers of all rows; 0 beyond the last."""
    o_row = tl.arange(0, C.ROWS)
    return tl.load(p + o_row, mask=o_row < n_rows, other=0)


@triton.jit
def few_pages(p_starts, p_lengths, n_rows, C: tl.constexpr):
    """Return the `[ROWS]` pages to read of each row that has few new tokens, 0 of the others."""
    b_new = of_rows(p_starts + 1, n_rows, C) - of_rows(p_starts, n_rows, C)
    b_pages = seen_pages(of_rows(p_lengths, n_rows, C), b_new, C)
    return tl.where((b_new > 0) & (b_new <= C.FEW), b_pages, 0)


@triton.jit
def few_rows(p_counts, p_starts, n_rows, C: tl.constexpr):
    """Return the `[ROWS]` counts of rows that have few new tokens, 0 of the others."""
    b_new = of_rows(p_starts + 1, n_rows, C) - of_rows(p_starts, n_rows, C)
    return tl.where((b_new > 0) & (b_new <= C.FEW), of_rows(p_counts, n_rows, C), 0)


@triton.jit
def row_unit(n_pages, C: tl.constexpr):
    """Return the pages of a unit of a row that is cut into at most UNITS, regardless of others."""
    return tl.maximum((n_pages + C.UNITS - 1) // C.UNITS, C.MIN_PAGES)


@triton.jit
def few_items(b_pages, C: tl.constexpr):
    """Return the `[ROWS]` items of each row to distribute: pages, or units if UNITS > 0."""
    if C.UNITS > 0:
        b_unit = row_unit(b_pages, C)
        return (b_pages + b_unit - 1) // b_unit
    else:
        return b_pages


@triton.jit
def share_of_items(b_items, n_shares, C: tl.constexpr):
    """Return the items of one share."""
    LEAST: tl.constexpr = 1 if C.UNITS > 0 else C.MIN_PAGES
    return tl.maximum((tl.sum(b_items, axis=0) + n_shares - 1) // n_shares, LEAST)


@triton.jit
def share_begin(b_pages, i_share, n_shares, C: tl.constexpr):
    """Return (number of the first item, items, their first row, pages of it before) of a share."""
    b_items = few_items(b_pages, C)
    n_share = share_of_items(b_items, n_shares, C)
    i_item = i_share * n_share
    i_row = row_of_item(b_items, i_item)
    skip = i_item - sum_before(b_items, i_row)
    if C.UNITS > 0:
        skip *= row_unit(pick(b_pages, i_row), C)
    return i_item, tl.minimum(n_share, tl.sum(b_items, axis=0) - i_item), i_row, skip


@triton.jit
def share_take(i_share, i_item, left, i_row, skip, n_pages, C: tl.constexpr):
    """Return (pages that a share takes of a row, number of the segment for their partials)."""
    if C.UNITS > 0:
        return tl.minimum(n_pages - skip, row_unit(n_pages, C)), i_item
    else:
        return tl.minimum(n_pages - skip, left), i_share + i_row


@triton.jit
def share_next(i_item, left, i_row, skip, few, take, n_pages, C: tl.constexpr):
    """Return the next state of a share (`share_begin`), which took pages of a row if `few`."""
    if C.UNITS > 0:
        one = few.to(tl.int32)
        stay = few & (skip + take < n_pages)
        skip = tl.where(stay, skip + take, 0)
        return i_item + one, left - one, i_row + 1 - stay.to(tl.int32), skip
    else:
        return i_item, left - tl.where(few, take, 0), i_row + 1, skip * 0


@triton.jit
def few_segments(b_items, i_row, n_share, C: tl.constexpr):
    """Return (first, number) of the segments of a row's partials."""
    begin = sum_before(b_items, i_row)
    n_items = pick(b_items, i_row)
    if C.UNITS > 0:
        return begin, n_items
    else:
        first = begin // n_share
        last = (begin + n_items - 1) // n_share
        return first + i_row, tl.where(n_items > 0, last - first + 1, 0)


@triton.jit
def many_chunks(p_starts, p_lengths, n_rows, n_shares, C: tl.constexpr):
    """Return `[ROWS]` blocks, `[ROWS]` chunks a block, pages a chunk, for many new tokens."""
    b_new = of_rows(p_starts + 1, n_rows, C) - of_rows(p_starts, n_rows, C)
    b_pages = seen_pages(of_rows(p_lengths, n_rows, C), b_new, C)
    b_blocks = tl.where(b_new > C.FEW, (b_new * C.GROUP + C.BLOCK - 1) // C.BLOCK, 0)
    if C.SPLIT:
        n_chunk = (tl.sum(b_blocks * b_pages, axis=0) + n_shares - 1) // n_shares
        n_chunk = tl.maximum(n_chunk, C.MIN_PAGES)
        b_chunks = (b_pages + n_chunk - 1) // n_chunk
    else:
        n_chunk = tl.max(b_pages, axis=0)
        b_chunks = tl.full([C.ROWS], 1, tl.int32)
    return b_blocks, b_chunks, n_chunk


@triton.jit
def pick(b_values, index):
    """Return element `index` of a block."""
    return tl.sum(tl.where(tl.arange(0, b_values.shape[0]) == index, b_values, 0), axis=0)


@triton.jit
def sum_before(b_values, index):
    """Return the sum of the elements of a block before `index`."""
    return tl.sum(tl.where(tl.arange(0, b_values.shape[0]) < index, b_values, 0), axis=0)


@triton.jit
def row_of_item(b_items, i_item):
    """Return the row of item `i_item` when rows hold `b_items` each; ROWS beyond the last."""
    return tl.sum((tl.cumsum(b_items, axis=0) <= i_item).to(tl.int32), axis=0)


@triton.jit
def tile_at(position, C: tl.constexpr):
    """Return the number of a position's tile."""
    if C.PAGE % C.TILE == 0:
        return position // C.TILE
    else:
        return position // C.PAGE * tiles(C) + position % C.PAGE // C.TILE


@triton.jit
def tiles_until(position, C: tl.constexpr):
    """Return the number of tiles that hold the positions below `position`."""
    return tl.where(position > 0, tile_at(position - 1, C) + 1, 0)


@triton.jit
def tile_range(page, n_pages, seen_least, seen_most, C: tl.constexpr):
    """Return tiles `[t0, t1)` of pages that some query sees, `[f0, f1)` that all see in full.

    Queries see the positions below `seen_least` to `seen_most`, and at most WINDOW of them.
    """
    t0 = page * tiles(C)
    t1 = tl.minimum((page + n_pages) * tiles(C), tiles_until(seen_most, C))
    f0 = t0
    if C.WINDOW > 0:
        t0 = tl.maximum(t0, tile_at(tl.maximum(seen_least - C.WINDOW, 0), C))
        f0 = tiles_until(tl.maximum(seen_most - C.WINDOW, 0), C)
    t1 = tl.maximum(t0, t1)
    f0 = tl.minimum(tl.maximum(f0, t0), t1)
    f1 = tl.minimum(tl.maximum(tile_at(seen_least, C), f0), t1)
    return t0, f0, f1, t1


@triton.jit
def list_range(skip, take, n_pages, n_edge, n_tail, C: tl.constexpr):
    """Return `tile_range` of `take` pages from `skip` on of a list, with masks at its ends.

    The first n_edge and the last n_tail pages need masks. Tiles are cut from pages of PAGE tokens.
    """
    end = skip + take
    f0 = tl.minimum(tl.maximum(skip, n_edge), end)
    f1 = tl.minimum(tl.maximum(n_pages - n_tail, f0), end)
    return skip * tiles(C), f0 * tiles(C), f1 * tiles(C), end * tiles(C)
