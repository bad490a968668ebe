"""Dense rows on the CPU from pages of several codecs: raw ones are copied, the others decoded."""

from __future__ import annotations

import numpy as np
from numba import njit

from flowkv.core.layout import CODEC_SHIFT, GRANULE_MASK
from flowkv.kernels.cpu.bits import ahead, data, memcpy, memzero, pointer
from flowkv.kernels.cpu.encode import EXACT
from flowkv.kernels.cpu.transcode import (
    GRANULE,
    KV8,
    RAW,
    key_row,
    store_row,
    value_row,
)
from flowkv.kernels.cpu.transpose import transpose

FORMATS, FORMAT_FIELDS = 15, 6


@njit(**EXACT)
def _decode(run, form, span, shape, raw, room, to):
    """Write tokens [span[0], span[1]) of a run of a sealed page as raw rows of K and V."""
    (size, dim, dim_v), (like, top), (x, byte) = shape, raw, room
    k, v = to
    for t in range(span[0], span[1]):
        key_row(run, form, t, dim, like, x)
        store_row(x, dim, like, top, ahead(k, (t - span[0]) * dim))
    whole = size if form[0] == KV8 else size // 2
    transpose(byte, pointer(run + form[3], np.uint8(0)), dim_v, whole)
    for t in range(span[0], span[1]):
        value_row(run, form, t, size, dim_v, like, byte, x)
        store_row(x, dim_v, like, top, ahead(v, (t - span[0]) * dim_v))


@njit(**EXACT)
def gather(a, raw, part, parts):
    """Write rows into right-aligned dense K and V; the slice is a range of (row, head, block).

    a: k, v, table, rows, lengths; B, Hk, P, D, Dv, bytes of a raw element, table stride, columns,
    columns of a block, blocks of a row; then for each codec: its number, the address of the layer
    in granule 0, run bytes, starts of V, of the scales of K and of those of V.
    raw: the type of raw elements, and where they saturate.
    """
    heads, size, dim, dim_v, item, columns = a[6], a[7], a[8], a[9], a[10], a[12]
    k_bytes, v_bytes = dim * item, dim_v * item
    rows, bytes_v = np.empty(max(dim, dim_v), np.float32), np.empty(size * dim_v, np.uint8)
    room, shape = (data(rows), data(bytes_v)), (size, dim, dim_v)
    units = a[5] * heads * a[14]
    for unit in range(units * part // parts, units * (part + 1) // parts):
        block, head, b = unit % a[14], unit // a[14] % heads, unit // (a[14] * heads)
        line = ahead(pointer(a[2], np.int32(0)), a[11] * pointer(a[3], np.int32(0))[b])
        column, end = block * a[13], min(columns, (block + 1) * a[13])
        shift = pointer(a[4], np.int32(0))[b] - columns  # position of column c is c + shift
        while column < end:
            t, page, count = np.int64(0), np.int64(-1), min(end, -shift) - column
            position = column + shift
            if position >= 0:
                t = position % size
                page, count = np.int64(line[position // size]), min(end - column, size - t)
            at = (b * heads + head) * columns + column
            k, v = a[0] + at * k_bytes, a[1] + at * v_bytes
            column += count
            if page < 0:
                memzero(k, count * k_bytes)
                memzero(v, count * v_bytes)
                continue
            start = FORMATS + FORMAT_FIELDS * (page >> CODEC_SHIFT)
            form = a[start : start + FORMAT_FIELDS]
            run = form[1] + GRANULE * (page & GRANULE_MASK) + head * form[2]
            if form[0] == RAW:
                memcpy(k, run + t * k_bytes, count * k_bytes)
                memcpy(v, run + form[3] + t * v_bytes, count * v_bytes)
            else:
                to = pointer(k, raw[0]), pointer(v, raw[0])
                _decode(run, form, (t, t + count), shape, raw, room, to)
    return rows.size + bytes_v.size  # addresses do not keep arrays alive; this does
