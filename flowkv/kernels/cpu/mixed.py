"""Attention on the CPU over pages of any codec, with every switch: what `cpu.attend` leaves out.

The unit of work is a *piece*: up to CHUNK pages of one item (row, KV head), with all query rows
that read them. The pieces of a step stand in one line, weighted by what they cost; a slice takes
those that begin in its stretch of it. Where an item is cut depends on the item and CHUNK alone, so
with a CHUNK that is always the same a row's result has the same bits whatever else is in the batch.
An item of one piece is finished at once; others leave a partial (accumulator, maximum, sum) of each
piece in a slot, which `combine` merges in order.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from flowkv.core.layout import CODEC_SHIFT, GRANULE_MASK
from flowkv.kernels.cpu.attend import (
    BATCH,
    DIM,
    DIM_V,
    GRANULE,
    GROUP,
    HEADS,
    ITEM,
    LENGTHS,
    LN_2,
    LOG2_E,
    LSE,
    MOST_NEW,
    MOST_ROWS,
    OUT,
    ROWS,
    SINKS,
    SIZE,
    SLOTS,
    STARTS,
    TABLE,
    TABLE_ROW,
    WINDOW,
    add_partial,
    block_rows,
    cost,
    load_rows,
)
from flowkv.kernels.cpu.bits import FAST, LINE_BYTES, ahead, narrow, pointer, prefetch
from flowkv.kernels.cpu.inner import ZERO, mix, scores
from flowkv.kernels.cpu.sealed import (
    RAW,
    code_floats,
    codes_of,
    format_of,
    mix_sealed,
    padded,
    prepare,
    score,
)
from flowkv.kernels.cpu.weigh import (
    BASE,
    CAUSAL,
    CHUNK,
    MASS,
    NONE,
    PAGES,
    RUN,
    V_AT,
    share,
    shares_of,
    weigh,
)

_PLAIN = {"fastmath": FAST, "error_model": "numpy"}
_INLINE = {**_PLAIN, "forceinline": True}


@njit(**_INLINE)
def _row(a, b):
    """(first packed token, new tokens, length, first page, pages) of a row; new = 0: no work."""
    starts, length = pointer(a[STARTS], np.int32(0)), np.int64(pointer(a[LENGTHS], np.int32(0))[b])
    first, size, page = np.int64(starts[b]), a[SIZE], np.int64(0)
    new = np.int64(starts[b + 1]) - first
    if a[CAUSAL]:
        page = max(page, length - new - a[WINDOW] + 1) // size
    return first, new if new <= a[MOST_NEW] else 0, length, page, (length + size - 1) // size - page


@njit(**_INLINE)
def _pieces(a, new, pages):
    """Pieces of each item of a row; one even if there is no page to see."""
    return max(np.int64(1), (pages + a[CHUNK] - 1) // a[CHUNK]) if new else np.int64(0)


@njit(**_INLINE)
def _reset(a, rows, head, with_sinks, lines):
    """Empty accumulators; the sinks, if any, are the first thing that the maximum and sum see."""
    _, _, o, m, z = lines
    for i in range(rows * padded(a[DIM_V])):
        o[i] = ZERO
    sinks = pointer(a[SINKS], ZERO)
    for r in range(rows):
        m[r], z[r] = NONE, ZERO
        if with_sinks and a[SINKS]:
            m[r] = sinks[head * a[GROUP] + r % a[GROUP]] * LOG2_E
            z[r] = np.float32(1)


@njit(**_PLAIN)
def _score_raw(a, k, after, span, count, q, s):
    """Scores of query rows with tokens [low, high) of a raw page, of which no other may count."""
    low, high = span
    dim, size, row_bytes = a[DIM], padded(a[SIZE]), a[DIM] * a[ITEM]
    r = 0
    while r < count:
        rows = block_rows(count - r)
        for t in range(low // 2 * 2, high, 2):
            if r == 0:
                for i in range(t * row_bytes, (t + 2) * row_bytes, LINE_BYTES):
                    prefetch(after, i)
            scores(rows, ahead(q, r * dim), ahead(k, t * dim), dim, ahead(s, r * size + t), size)
        r += rows


@njit(**_PLAIN)
def _mix_raw(a, v, after, span, count, s, o):
    """Add the values of a raw page, weighted by rows of `s`, to `o`."""
    low, high = span
    dim, size, row_bytes = a[DIM_V], padded(a[SIZE]), a[DIM_V] * a[ITEM]
    r = 0
    while r < count:
        rows = block_rows(count - r)
        for t in range(low // 4 * 4, high, 4):
            if r == 0:
                for i in range(t * row_bytes, (t + 4) * row_bytes, LINE_BYTES):
                    prefetch(after, i)
            p, to = ahead(s, r * size + t), ahead(o, r * padded(dim))
            mix(rows, p, size, v, (t, low, high), (dim, dim), to, padded(dim))
        r += rows


@njit(**_PLAIN)
def _page(a, like, page, place, count, lines, codes, cap):
    """Attend with an item's query rows over a page.

    `page` is its codec, the address of its run and that of the next page's; `place` as for `weigh`,
    with the page's shares behind.
    """
    codec, run, then = page
    q, s, o, m, z = lines
    span, shares, stride = (place[3], place[4]), place[5], padded(a[DIM_V])
    scales, v_at = np.int64(0), format_of(a, codec, V_AT)
    if codec == RAW:
        _score_raw(a, pointer(run, like), pointer(then, np.uint8(0)), span, count, q, s)
    else:
        scales = score(a, codec, (run, then), count, q, codes, s)
    for r in range(count):
        m[r], total, keep = weigh(a, ahead(s, r * padded(a[SIZE])), r, place, scales, m[r], cap)
        z[r] = z[r] * keep + total
        if a[MASS]:
            shares[2 * r], shares[2 * r + 1] = m[r], total
        if keep != np.float32(1):
            row_o = ahead(o, r * stride)
            for d in range(stride):
                row_o[d] *= keep
    if codec == RAW:
        v, after = pointer(run + v_at, like), pointer(then + v_at, np.uint8(0))
        _mix_raw(a, v, after, span, count, s, o)
    else:
        mix_sealed(a, codec, (run, then), count, s, codes, o)


@njit(**_INLINE)
def _run(a, page, head):
    """The address of a head's run in a page."""
    codec = np.int64(page) >> CODEC_SHIFT
    start = format_of(a, codec, BASE) + GRANULE * (np.int64(page) & GRANULE_MASK)
    return start + head * format_of(a, codec, RUN)


@njit(**_PLAIN)
def _piece(a, like, item, pages, lines, codes, cap):
    """Attend with the query rows of an item, (row number, row, head), over some of its pages."""
    b, row, head = item
    first, new, length, first_page, _ = row
    size, seen = a[SIZE], np.int64(0)  # the first token anybody sees
    if a[CAUSAL]:
        seen = max(seen, length - new - a[WINDOW] + 1)
    table = pointer(a[TABLE], np.int32(0))
    line = ahead(table, a[TABLE_ROW] * pointer(a[ROWS], np.int32(0))[b] + first_page)
    prepare(a, new * a[GROUP], lines[0], codes)
    for p in range(pages[0], pages[1]):
        start = (first_page + p) * size
        then = _run(a, line[min(p + 1, pages[1] - 1)], head)
        page = np.int64(line[p]) >> CODEC_SHIFT, _run(a, line[p], head), then
        low, high = max(np.int64(0), seen - start), min(size, length - start)
        shares = shares_of(a, b * a[HEADS] + head, first_page + p)
        place = first, head, start - (length - new), low, high, shares
        _page(a, like, page, place, new * a[GROUP], lines, codes, cap)


@njit(**_PLAIN)
def _finish(a, like, b, row, head, lines):
    """Write an item's finished rows, normalised, their log-sum-exp, and its pages' mass."""
    o, m, z = lines
    first, new, _, first_page, pages = row
    group, dim, heads = a[GROUP], a[DIM_V], a[HEADS]
    out, lse, mass = pointer(a[OUT], like), pointer(a[LSE], ZERO), pointer(a[MASS], ZERO)
    for r in range(new * group):
        at = ((first + r // group) * heads + head) * group + r % group
        inverse = np.float32(1) / z[r] if z[r] != ZERO else ZERO
        to, row_o = ahead(out, at * dim), ahead(o, r * padded(dim))
        for d in range(dim):
            to[d] = narrow(row_o[d] * inverse, like)
        if a[LSE]:
            lse[at] = (m[r] + np.log2(z[r])) * LN_2 if z[r] != ZERO else NONE
    if a[MASS]:
        for page in range(first_page, first_page + pages):
            shares = shares_of(a, b * heads + head, page)
            mass[(b * a[PAGES] + page) * heads + head] += share(shares, new * group, m, z)


@njit(**_INLINE)
def _slot(a, i):
    """Scratch of partial i, as (accumulators, maxima, sums)."""
    most, dim = a[MOST_ROWS], padded(a[DIM_V])
    o = ahead(pointer(a[SLOTS], ZERO), i * most * (dim + 2))
    return o, ahead(o, most * dim), ahead(o, most * (dim + 1))


@njit(**_PLAIN)
def attend(a, likes, factors, part, parts):
    """Do slice `part` of `parts`; see `cpu.attend.attend`."""
    like_q, like = likes
    scale, softcap = factors
    rows, dim_v = a[MOST_ROWS], padded(a[DIM_V])
    q_floats, s_floats, code = rows * padded(a[DIM]), rows * padded(a[SIZE]), rows * code_floats(a)
    scratch = np.empty(q_floats + s_floats + code + rows * (dim_v + 2) + 16, np.float32)
    q = pointer((np.int64(scratch.ctypes.data) + 63) // 64 * 64, ZERO)
    s = ahead(q, q_floats)
    own = ahead(s, s_floats)
    codes = codes_of(a, ahead(own, rows * dim_v), rows)
    own_m = ahead(own, rows * dim_v + code)
    factor, cap = np.float32(scale) * LOG2_E, np.float32(softcap) * LOG2_E
    if softcap > 0:
        factor = np.float32(scale / softcap)
    total = np.int64(0)
    for b in range(a[BATCH]):
        _, new, _, _, pages = _row(a, b)
        total += a[HEADS] * max(pages, np.int64(1)) * cost(a, new) if new else np.int64(0)
    low, high = total * part // parts, total * (part + 1) // parts
    before = slot = np.int64(0)
    for b in range(a[BATCH]):
        row = _row(a, b)
        first, new, _, _, pages = row
        pieces = _pieces(a, new, pages)
        for i in range(a[HEADS] * pieces):
            head, start = i // pieces, i % pieces * a[CHUNK]
            end = min(pages, start + a[CHUNK])
            if low <= before < high:
                o, m, z = own, own_m, ahead(own_m, rows)
                if pieces > 1:
                    o, m, z = _slot(a, slot)
                lines = (q, s, o, m, z)
                load_rows(a, like_q, first, new, head, factor, q)
                _reset(a, new * a[GROUP], head, start == 0, lines)
                _piece(a, like, (b, row, head), (start, end), lines, codes, cap)
                if pieces == 1:
                    _finish(a, like_q, b, row, head, (o, m, z))
            before += max(end - start, np.int64(1)) * cost(a, new)
            slot += pieces > 1
    return np.int64(scratch.size)  # so that the scratch outlives the pointers into it


@njit(**_PLAIN)
def combine(a, like_q):
    """Merge the partials of items of several pieces, after all slices are done."""
    slot = np.int64(0)
    for b in range(a[BATCH]):
        row = _row(a, b)
        _, new, _, _, pages = row
        pieces = _pieces(a, new, pages)
        if pieces > 1:
            for head in range(a[HEADS]):
                lines = _slot(a, slot)
                for i in range(1, pieces):
                    add_partial(padded(a[DIM_V]), new * a[GROUP], lines, _slot(a, slot + i))
                _finish(a, like_q, b, row, head, lines)
                slot += pieces
    return slot
