"""Scores and outputs of sealed pages on the CPU, from their codes: nothing is decoded to memory.

Scales that differ by token multiply scores (K) and weights (V); those of `kv4c`, which differ by
dim, multiply the query once a page, and its minima add a constant to each query row's scores; the
rotation of `kv4h` is applied to the query once. Queries and weights are float32, as over raw pages.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from flowkv.core.layout import CODECS
from flowkv.kernels.cpu.attend import DIM, DIM_V, SIZE
from flowkv.kernels.cpu.bits import FAST, ahead, pointer, widen
from flowkv.kernels.cpu.dots import LANES, mix_bytes, mix_nibbles, score_bytes, score_nibbles
from flowkv.kernels.cpu.encode import rotate
from flowkv.kernels.cpu.inner import ZERO
from flowkv.kernels.cpu.weigh import FORMAT_FIELDS, FORMATS, K_SCALES, RUN, V_AT, V_SCALES

RAW, KV8, K8V4, KV4C, KV4H = range(len(CODECS))
_PLAIN = {"fastmath": FAST, "error_model": "numpy"}
_INLINE = {**_PLAIN, "forceinline": True}


@njit(**_INLINE)
def padded(n):
    """N in whole vectors."""
    return (n + LANES - 1) // LANES * LANES


@njit(**_INLINE)
def format_of(a, codec, field):
    """A field of a codec's format."""
    return a[FORMATS + FORMAT_FIELDS * codec + field]


@njit(**_INLINE)
def code_floats(a):
    """Floats of scratch that a query row needs for sealed pages; see `codes_of`."""
    half_d, half_p = 2 * padded(a[DIM] // 2), 2 * padded(a[SIZE] // 2)
    return padded(a[DIM]) + 2 * half_d + max(padded(a[SIZE]), half_p) + 2


@njit(**_INLINE)
def codes_of(a, scratch, rows):
    """The scratch of `rows` query rows for sealed pages, as lines of rows.

    They are the query in order; rotated, in two halves; times the channel scales of a page, in two
    halves; weights times the scales of V; sums of the rotated query; constants of a product.
    """
    half_d, half_p = 2 * padded(a[DIM] // 2), 2 * padded(a[SIZE] // 2)
    turned = ahead(scratch, rows * padded(a[DIM]))
    scaled = ahead(turned, rows * half_d)
    w = ahead(scaled, rows * half_d)
    sums = ahead(w, rows * max(padded(a[SIZE]), half_p))
    return scratch, turned, scaled, w, sums, ahead(sums, rows)


@njit(**_PLAIN)
def prepare(a, count, q, codes):
    """Lay the query rows of an item out for the codecs that there are, pads filled with zeros."""
    plain, turned, scaled, _, sums, _ = codes
    dim, wide, plane = a[DIM], padded(a[DIM]), padded(a[DIM] // 2)
    for r in range(count):
        row, to = ahead(q, r * dim), ahead(plain, r * wide)
        for d in range(dim):
            to[d] = row[d]
        for d in range(dim, wide):
            to[d] = ZERO
        to, free = ahead(turned, r * 2 * plane), ahead(scaled, r * 2 * plane)
        for i in range(2 * plane):
            to[i] = ZERO
        if format_of(a, KV4H, RUN):
            _turn(row, free, to, dim)
            total = ZERO
            for i in range(2 * plane):
                total += to[i]
            sums[r] = np.float32(-8) * total
        for i in range(2 * plane):
            free[i] = ZERO


@njit(**_PLAIN)
def _turn(row, free, to, dim):
    """The rotated row, by way of `free`, in two padded halves."""
    half, second = dim // 2, ahead(to, padded(dim // 2))
    for d in range(dim):
        free[d] = row[d]
    rotate(free, dim)
    for d in range(half):
        to[d] = free[d]
        second[d] = free[d + half]


@njit(**_PLAIN)
def _scale_channels(a, run, count, q, codes):
    """Query rows times the channel scales of a `kv4c` page; their dots with its minima."""
    _, _, scaled, _, _, bias = codes
    dim, half, plane = a[DIM], a[DIM] // 2, padded(a[DIM] // 2)
    scales = pointer(run + format_of(a, KV4C, K_SCALES), np.int16(0))
    least = ahead(scales, dim)
    for r in range(count):
        total = ZERO
        for part in range(2):
            row, to = ahead(q, r * dim + part * half), ahead(scaled, (2 * r + part) * plane)
            factor, low = ahead(scales, part * half), ahead(least, part * half)
            for d in range(half):
                to[d] = row[d] * widen(factor[d])
                total += row[d] * widen(low[d])
        bias[r] = total


@njit(**_PLAIN)
def score(a, codec, runs, count, q, codes, s):
    """Scores of query rows with a sealed page's tokens, but for the scales of its keys.

    Args:
        a: The call.
        codec: Number of the page's codec.
        runs: Addresses of the page's run and of the one that comes next.
        count: Query rows.
        q: The query rows.
        codes: See `codes_of`.
        s: Where to, lines of `padded(P)`.

    Returns:
        The address of the scales, float16 by token; 0 if there are none.
    """
    plain, turned, scaled, _, sums, bias = codes
    run, after = runs[0], pointer(runs[1], np.uint8(0))
    dim, size, half = a[DIM], a[SIZE], a[DIM] // 2
    out, wide, plane = (s, padded(size)), padded(dim), padded(half)
    if codec in (KV8, K8V4):
        for r in range(count):
            bias[r] = ZERO
        k = pointer(run, np.int8(0)), dim, size
        score_bytes(count, (plain, wide), k, wide // LANES, bias, out, after)
        return run + format_of(a, codec, K_SCALES)
    k_halves = pointer(run, np.uint8(0)), half, size
    if codec == KV4H:
        score_nibbles(count, (turned, 2 * plane), k_halves, plane // LANES, sums, out, after)
        return run + format_of(a, codec, K_SCALES)
    _scale_channels(a, run, count, q, codes)
    score_nibbles(count, (scaled, 2 * plane), k_halves, plane // LANES, bias, out, after)
    return np.int64(0)


@njit(**_PLAIN)
def mix_sealed(a, codec, runs, count, s, codes, o):
    """Add to `o`, lines of `padded(Dv)`, the values of a sealed page weighted by rows of `s`."""
    _, _, _, w, _, bias = codes
    run, size, dim = runs[0], a[SIZE], a[DIM_V]
    v_at = format_of(a, codec, V_AT)
    scales = pointer(run + format_of(a, codec, V_SCALES), np.int16(0))
    planes = 1 if codec == KV8 else 2
    tokens, zero = size // planes, np.float32(-128) if codec == KV8 else np.float32(-8)
    plane = padded(tokens)
    for r in range(count):
        total = ZERO
        for part in range(planes):
            p, to = (
                ahead(s, r * padded(size) + part * tokens),
                ahead(w, (r * planes + part) * plane),
            )
            factor = ahead(scales, part * tokens)
            for t in range(tokens):
                x = p[t] * widen(factor[t])
                to[t] = x
                total += x
            for t in range(tokens, plane):
                to[t] = ZERO
        bias[r] = zero * total
    v, after = pointer(run + v_at, np.uint8(0)), pointer(runs[1] + v_at, np.uint8(0))
    out, vectors = (o, padded(dim)), plane // LANES
    if codec == KV8:
        mix_bytes(count, (w, plane), (v, tokens, dim), vectors, bias, out, after)
    else:
        mix_nibbles(count, (w, 2 * plane), (v, tokens, dim), vectors, bias, out, after)
