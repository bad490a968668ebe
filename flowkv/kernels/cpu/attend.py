"""Attention over pages on the CPU: one slice of a step's work, and the merge of shared items.

The unit of work is one page of one (row, KV head) *item*, with all query rows (T new tokens x G
query heads) that read it. The units of a step stand in one line, row by row, head by head, page by
page, weighted by their query rows; a slice is an equal stretch of that line, so ragged batches
balance, and a single long row splits like many short ones. An item that lies across slices leaves a
partial (accumulator, maximum, sum) in a slot of each, and `combine` merges them. Softmax is online
per page, in base 2.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from flowkv.kernels.cpu.bits import (
    FAST,
    LINE_BYTES,
    ahead,
    data,
    exp2,
    narrow,
    order,
    pointer,
    prefetch,
    tanh,
    unorder,
    widen,
)
from flowkv.kernels.cpu.inner import ZERO, mix, scores

FIELDS = 27
(
    Q, Q_TOKEN, Q_HEAD, OUT, LSE, ARENA, TABLE, TABLE_ROW, ROWS, LENGTHS, STARTS, SINKS,
    SLOTS, OWNERS, BATCH, GROUP, HEADS, DIM, DIM_V, SIZE, ITEM, RUN, V_OFFSET, WINDOW,
    MOST_NEW, MOST_ROWS, V_ROW,
) = range(FIELDS)  # fmt: skip
"""Places in the int64 vector `a` that describes a call.

Q to OWNERS are addresses (0: absent) with their strides in elements; ARENA includes the layer's
offset in a page, SINKS are float32. RUN and V_OFFSET are bytes, ITEM the bytes of an element. Rows
with more than MOST_NEW new tokens are left to someone else; MOST_ROWS are the query rows of the
largest item; V_ROW the elements from one token's value to the next one's. SLOTS and OWNERS: float32
[2 * slices, MOST_ROWS * (Dv + 2)] and int64 [2 * slices], partials and the items they belong to,
-1 for none.
"""

GRANULE = 4096
LOG2_E, LN_2 = np.float32(math.log2(math.e)), np.float32(math.log(2))
_NONE = np.float32(-np.inf)
_PLAIN = {"fastmath": FAST, "error_model": "numpy"}
_INLINE = {**_PLAIN, "forceinline": True}


@njit(**_INLINE)
def _row(a, b):
    """(first packed token, new tokens, length, first page, pages) of a row; no pages: no work."""
    starts, length = pointer(a[STARTS], np.int32(0)), pointer(a[LENGTHS], np.int32(0))[b]
    first = np.int64(starts[b])
    new = np.int64(starts[b + 1]) - first
    if new == 0 or new > a[MOST_NEW]:
        return first, new, np.int64(length), np.int64(0), np.int64(0)
    page = max(np.int64(0), length - new - a[WINDOW] + 1) // a[SIZE]
    return first, new, np.int64(length), page, (length + a[SIZE] - 1) // a[SIZE] - page


@njit(**_INLINE)
def cost(a, new):
    """Cost of a page for all query rows: reading it costs about as much as serving 4 of them."""
    return max(np.int64(4), new * a[GROUP])


@njit(**_INLINE)
def load_rows(a, like, first, new, head, factor, q):
    """Load an item's query rows, [T * G, D], as float32 times `factor`."""
    dim, group = a[DIM], a[GROUP]
    source = pointer(a[Q], like)
    for r in range(new * group):
        at = (first + r // group) * a[Q_TOKEN] + (head * group + r % group) * a[Q_HEAD]
        row, to = ahead(source, at), ahead(q, r * dim)
        for d in range(dim):
            to[d] = widen(row[d]) * factor


@njit(**_INLINE)
def _reset(a, rows, head, with_sinks, o, m, z):
    """Empty accumulators; the sinks, if any, are the first thing that the maximum and sum see."""
    for i in range(rows * a[DIM_V]):
        o[i] = ZERO
    sinks = pointer(a[SINKS], ZERO)
    for r in range(rows):
        m[r], z[r] = _NONE, ZERO
        if with_sinks and a[SINKS]:
            m[r] = sinks[head * a[GROUP] + r % a[GROUP]] * LOG2_E
            z[r] = np.float32(1)


@njit(**_INLINE)
def _weigh(s, low, high, begin, end, m, softcap):
    """Logits of tokens [low, high) to probabilities, zeros around them in [begin, end).

    Returns the new maximum, the sum, and the factor for what was accumulated under the old maximum.
    """
    if high <= low:
        for t in range(begin, end):
            s[t] = ZERO
        return m, ZERO, np.float32(1)
    if softcap > ZERO:
        for t in range(low, high):
            s[t] = tanh(s[t]) * softcap
    most = order(m)
    for t in range(low, high):
        most = max(most, order(s[t]))
    top = unorder(most)
    total = ZERO
    for t in range(begin, low):
        s[t] = ZERO
    for t in range(low, high):
        p = exp2(s[t] - top)
        s[t] = p
        total += p
    for t in range(high, end):
        s[t] = ZERO
    return top, total, exp2(m - top)


@njit(**_INLINE)
def block_rows(rows):
    """How many of the query rows that are left are served at once."""
    return 4 if rows >= 4 else 2 if rows >= 2 else 1


@njit(**_PLAIN)
def _page(a, k, v, after, row, span, lines, softcap):
    """Attend with all query rows of an item over tokens [low, high) of a page.

    `row` is (new tokens, position of the page's token 0 counted from the first new one), `after`
    the K of the next page, `lines` the item's scratch: query rows, scores, accumulators, maxima and
    sums.
    """
    new, offset = row
    low, high = span
    q, s, o, m, z = lines
    dim, dim_v, size, group, window = a[DIM], a[DIM_V], a[SIZE], a[GROUP], a[WINDOW]
    line, count = LINE_BYTES // a[ITEM], new * group
    begin, end = low // 4 * 4, (high + 3) // 4 * 4  # the page has whole fours
    r = 0
    while r < count:
        rows = block_rows(count - r)
        for t in range(low // 2 * 2, high, 2):
            if r == 0:  # V comes in behind the scores, the next page's K behind the mix
                for i in range(t * dim_v, (t + 2) * dim_v, line):
                    prefetch(v, i)
            scores(rows, ahead(q, r * dim), ahead(k, t * dim), dim, ahead(s, r * size + t), size)
        r += rows
    for r in range(count):
        last = r // group - offset  # the last token of the page that the query row sees
        bottom, top = max(low, last - window + 1), min(high, last + 1)
        m[r], total, keep = _weigh(ahead(s, r * size), bottom, top, begin, end, m[r], softcap)
        z[r] = z[r] * keep + total
        if keep != np.float32(1):
            row_o = ahead(o, r * dim_v)
            for d in range(dim_v):
                row_o[d] *= keep
    r = 0
    while r < count:
        rows = block_rows(count - r)
        for t in range(begin, end, 4):
            if r == 0:
                for i in range(t * dim, (t + 4) * dim, line):
                    prefetch(after, i)
            p, to = ahead(s, r * size + t), ahead(o, r * dim_v)
            mix(rows, p, size, v, (t, low, high), (dim_v, a[V_ROW]), to, dim_v)
        r += rows


@njit(**_PLAIN)
def _item(a, like, b, row, head, pages, lines, softcap):
    """Attend with an item's query rows over its pages [pages[0], pages[1])."""
    _, new, length, first_page, _ = row
    size, item = a[SIZE], a[ITEM]
    table = pointer(a[TABLE], np.int32(0))
    line = ahead(table, a[TABLE_ROW] * pointer(a[ROWS], np.int32(0))[b] + first_page)
    run = pointer(a[ARENA] + head * a[RUN], like)
    seen = max(np.int64(0), length - new - a[WINDOW] + 1)  # the first token anybody sees
    for p in range(pages[0], pages[1]):
        start = (first_page + p) * size
        here = np.int64(line[p]) * (GRANULE // item)
        then = np.int64(line[min(p + 1, pages[1] - 1)]) * (GRANULE // item)
        span = (max(np.int64(0), seen - start), min(size, length - start))
        k, v = ahead(run, here), ahead(run, here + a[V_OFFSET] // item)
        _page(a, k, v, ahead(run, then), (new, start - (length - new)), span, lines, softcap)


@njit(**_INLINE)
def _finish(a, like, first, new, head, lines):
    """Write an item's finished rows, normalised, and their log-sum-exp."""
    _, _, o, m, z = lines
    group, dim = a[GROUP], a[DIM_V]
    out = pointer(a[OUT], like)
    for r in range(new * group):
        at = (first + r // group) * a[HEADS] * group + head * group + r % group
        to, row_o, inverse = ahead(out, at * dim), ahead(o, r * dim), np.float32(1) / z[r]
        for d in range(dim):
            to[d] = narrow(row_o[d] * inverse, like)
        if a[LSE]:
            pointer(a[LSE], ZERO)[at] = (m[r] + np.log2(z[r])) * LN_2


@njit(**_INLINE)
def _slot(a, i):
    """Scratch of partial i, as (accumulators, maxima, sums)."""
    most, dim = a[MOST_ROWS], a[DIM_V]
    o = ahead(pointer(a[SLOTS], ZERO), i * most * (dim + 2))
    return o, ahead(o, most * dim), ahead(o, most * (dim + 1))


@njit(**_INLINE)
def _units(a, x, before, weight, pages):
    """How many of a row's units lie before place x of the line."""
    return min(max(np.int64(0), (x - before) // weight), a[HEADS] * pages)


@njit(**_PLAIN)
def attend(a, likes, factors, part, parts):
    """Do slice `part` of `parts`.

    `likes` are scalars of the types under which elements of q and of the pages travel; `factors`
    are the scale of the logits and their softcap (0: none).
    """
    like_q, like = likes
    scale, softcap = factors
    rows, dim, dim_v = a[MOST_ROWS], a[DIM], a[DIM_V]
    scratch = np.empty(rows * (dim + a[SIZE] + dim_v + 2), np.float32)
    q = data(scratch)
    s = ahead(q, rows * dim)
    own = ahead(s, rows * a[SIZE])
    factor, cap = np.float32(scale) * LOG2_E, np.float32(softcap) * LOG2_E
    if softcap > 0:
        factor = np.float32(scale / softcap)
    total = np.int64(0)
    for b in range(a[BATCH]):
        _, new, _, _, pages = _row(a, b)
        total += a[HEADS] * pages * cost(a, new)
    low, high = total * part // parts, total * (part + 1) // parts
    before = np.int64(0)
    for b in range(a[BATCH]):
        row = _row(a, b)
        first, new, _, _, pages = row
        weight = cost(a, new)
        unit, stop = _units(a, low, before, weight, pages), _units(a, high, before, weight, pages)
        before += a[HEADS] * pages * weight
        while unit < stop:
            head, begin = unit // pages, unit % pages
            end = min(pages, begin + stop - unit)
            whole = begin == 0 and end == pages
            o, m, z = own, ahead(own, rows * dim_v), ahead(own, rows * (dim_v + 1))
            if not whole:
                i = 2 * part + (1 if begin == 0 else 0)
                o, m, z = _slot(a, i)
                pointer(a[OWNERS], np.int64(0))[i] = b * a[HEADS] + head
            lines = (q, s, o, m, z)
            load_rows(a, like_q, first, new, head, factor, q)
            _reset(a, new * a[GROUP], head, begin == 0, o, m, z)
            _item(a, like, b, row, head, (begin, end), lines, cap)
            if whole:
                _finish(a, like_q, first, new, head, lines)
            unit += end - begin
    return np.int64(scratch.size)  # so that the scratch outlives the pointers into it


@njit(**_PLAIN)
def combine(a, like_q, parts):
    """Merge the partials of items that lie across slices, after all slices are done."""
    owners = pointer(a[OWNERS], np.int64(0))
    i = np.int64(0)
    while i < 2 * parts:
        owner = owners[i]
        o, m, z = _slot(a, i)
        i += 1
        if owner < 0:
            continue
        b, head = owner // a[HEADS], owner % a[HEADS]
        first, new, _, _, _ = _row(a, b)
        while i < 2 * parts and (owners[i] == owner or owners[i] < 0):
            if owners[i] == owner:
                add_partial(a[DIM_V], new * a[GROUP], (o, m, z), _slot(a, i))
            i += 1
        _finish(a, like_q, first, new, head, (o, o, o, m, z))
    return i


@njit(**_INLINE)
def add_partial(dim, rows, to, part):
    """Merge a partial, (accumulators, maxima, sums) of `rows` query rows, into another."""
    o, m, z = to
    o_part, m_part, z_part = part
    for r in range(rows):
        top = max(m[r], m_part[r])
        if top == _NONE:
            continue  # neither has seen a token
        keep, other = exp2(m[r] - top), exp2(m_part[r] - top)
        m[r], z[r] = top, z[r] * keep + z_part[r] * other
        row, row_part = ahead(o, r * dim), ahead(o_part, r * dim)
        for d in range(dim):
            row[d] = row[d] * keep + row_part[d] * other
