"""numba kernels that move bytes: none of them looks at what it moves, so one compile serves all.

Each takes one int64 vector of addresses and sizes (made by `cpu`) and its slice of the work.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from flowkv.kernels.cpu.bits import memcpy, memzero, pointer

GRANULE = 4096
_JIT = {"error_model": "numpy"}


@njit(**_JIT)
def _int32_at(address, i):
    return np.int64(pointer(address, np.int32(0))[i])


@njit(**_JIT)
def append(a, part, parts):
    """Write packed tokens into pages; the slice is a range of all tokens of the batch.

    a: k, v, arena (with layer offset), table, rows, lengths, starts; B, Hk, P, bytes of a K row and
    a V row, run bytes, V offset, table stride, then byte strides of k and v by token and head.
    """
    k, v, arena, table, rows, lengths, starts = a[0], a[1], a[2], a[3], a[4], a[5], a[6]
    size, k_bytes, v_bytes = a[9], a[10], a[11]
    tokens = _int32_at(starts, a[7])
    low, high = tokens * part // parts, tokens * (part + 1) // parts
    for b in range(a[7]):
        first, end = _int32_at(starts, b), _int32_at(starts, b + 1)
        shift = _int32_at(lengths, b) - end  # position of packed token n is n + shift
        line = table + 4 * a[14] * _int32_at(rows, b)
        for n in range(max(first, low), min(end, high)):
            page, t = (n + shift) // size, (n + shift) % size
            run = arena + GRANULE * _int32_at(line, page)
            for h in range(a[8]):
                memcpy(run + t * k_bytes, k + n * a[15] + h * a[16], k_bytes)
                memcpy(run + a[13] + t * v_bytes, v + n * a[17] + h * a[18], v_bytes)
                run += a[12]
    return high - low


@njit(**_JIT)
def gather_dense(a, part, parts):
    """Copy rows into right-aligned dense K and V; the slice is a range of (row, head, block).

    a: k, v, arena (with layer offset), table, rows, lengths; B, Hk, P, bytes of a K row and a V
    row, run bytes, V offset, table stride, columns, columns of a block, blocks of a row.
    """
    arena, table, heads, size, columns = a[2], a[3], a[7], a[8], a[14]
    k_bytes, v_bytes = a[9], a[10]
    units = a[6] * heads * a[16]
    for unit in range(units * part // parts, units * (part + 1) // parts):
        block, head = unit % a[16], unit // a[16] % heads
        b = unit // (a[16] * heads)
        line = table + 4 * a[13] * _int32_at(a[4], b)
        column, end = block * a[15], min(columns, (block + 1) * a[15])
        shift = _int32_at(a[5], b) - columns  # position of column c is c + shift
        k = a[0] + ((b * heads + head) * columns) * k_bytes
        v = a[1] + ((b * heads + head) * columns) * v_bytes
        while column < end:
            position = column + shift
            if position < 0:
                count, granule = min(end, -shift) - column, np.int64(-1)
            else:
                count = min(end - column, size - position % size)
                granule = _int32_at(line, position // size)
            if granule < 0:
                memzero(k + column * k_bytes, count * k_bytes)
                memzero(v + column * v_bytes, count * v_bytes)
            else:
                run, t = arena + GRANULE * granule + head * a[11], position % size
                memcpy(k + column * k_bytes, run + t * k_bytes, count * k_bytes)
                memcpy(v + column * v_bytes, run + a[12] + t * v_bytes, count * v_bytes)
            column += count
    return units


@njit(**_JIT)
def move_pages(a, part, parts):
    """Copy n pages; each side is a pool with a list of granules, or staging when its list is 0.

    a: target, target list, source, source list, n, bytes of a page. The slice is a range of all
    granules, so that few large pages split well too.
    """
    page = a[5]
    granules = a[4] * (page // GRANULE)
    low = GRANULE * (granules * part // parts)
    high = GRANULE * (granules * (part + 1) // parts)
    while low < high:
        n, offset = low // page, low % page
        count = min(high - low, page - offset)
        target = a[0] + (GRANULE * _int32_at(a[1], n) if a[1] else n * page)
        source = a[2] + (GRANULE * _int32_at(a[3], n) if a[3] else n * page)
        memcpy(target + offset, source + offset, count)
        low += count
    return high


@njit(**_JIT)
def drop_tokens(a, part, parts):
    """Gather tokens of pages into fresh pages; the slice is a range of (layer, head, target page).

    a: arena, source, target, keep; L, Hk, P, n kept, target pages, bytes of a K row and a V row,
    run bytes, V offset, stripe bytes.
    """
    heads, size, kept, k_bytes, v_bytes = a[5], a[6], a[7], a[9], a[10]
    units = a[4] * heads * a[8]
    for unit in range(units * part // parts, units * (part + 1) // parts):
        page, line = unit % a[8], unit // a[8]  # line: (layer, head)
        run = line // heads * a[13] + line % heads * a[11]
        to = a[0] + GRANULE * _int32_at(a[2], page) + run
        for t in range(min(size, kept - page * size)):
            token = _int32_at(a[3], line * kept + page * size + t)
            of = a[0] + GRANULE * _int32_at(a[1], token // size) + run
            slot = token % size
            memcpy(to + t * k_bytes, of + slot * k_bytes, k_bytes)
            memcpy(to + a[12] + t * v_bytes, of + a[12] + slot * v_bytes, v_bytes)
    return units
