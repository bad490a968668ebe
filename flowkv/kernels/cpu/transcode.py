"""The numba kernel of the codecs: decode a run into float32 rows, encode the rows again."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit

from flowkv.compiled.machine_code import PART, ahead, data, instruction, pointer, prefetch
from flowkv.kernels.cpu.bits import bits_of, float_of, memzero, narrow, transpose, widen

# Steps of the numba codecs on one row of a page, a token's K or V: clean, rotate, quantize.
#
# They match the reference codec bit for bit, so no function here may be compiled with any fastmath
# flag: every float32 operation is rounded once, in the order in which it is written.

EXACT = {**PART, "fastmath": False}
_INLINE = {**EXACT, "forceinline": True}

_EIGHT, _EIGHT_INTS = ir.VectorType(ir.FloatType(), 8), ir.VectorType(ir.IntType(32), 8)
_ROUND = np.float32(12582912.0)  # 1.5 * 2**23: adding it leaves the nearest integer in the low bits
_MAGNITUDE = np.int32(0x7FFFFFFF)
INFINITE = np.int32(0x7F800000)  # these bits and more, without the sign: infinity and NaN
HUGE = np.int32(0x71800000)  # 2.0**100, least magnitude that is encoded as 0
_FITS, _LARGEST = np.float32(65520.0), np.float32(65504.0)
SOUND, NON_FINITE, OUT_OF_RANGE = np.int64(0), np.int64(1), np.int64(2)


@njit(**_INLINE)
def worse(a, b):
    """Return the state of a layer to report out of two: non-finite elements before large scales."""
    return NON_FINITE if NON_FINITE in (a, b) else max(a, b)


@njit(**EXACT)
def clean(x, n, limit):
    """Zero the elements of a row with a magnitude of the bits `limit` or more; return its state."""
    worst = np.int32(0)
    for i in range(n):
        worst = max(worst, np.int32(bits_of(x[i]) & _MAGNITUDE))
    if worst < limit:
        return SOUND
    for i in range(n):
        if np.int32(bits_of(x[i]) & _MAGNITUDE) >= limit:
            x[i] = np.float32(0)
    return NON_FINITE if worst >= INFINITE else OUT_OF_RANGE


@instruction()
def _turn(builder, p):
    """Apply the first three stages of the transform to the eight elements from p on."""
    where = builder.bitcast(p, _EIGHT.as_pointer())
    x = builder.load(where, align=4)
    for h in (1, 2, 4):
        swap = ir.Constant(_EIGHT_INTS, [i ^ h for i in range(8)])
        signs = ir.Constant(_EIGHT_INTS, [-(1 << 31) if i & h else 0 for i in range(8)])
        other = builder.shuffle_vector(x, ir.Constant(_EIGHT, ir.Undefined), swap)
        own = builder.bitcast(builder.xor(builder.bitcast(x, _EIGHT_INTS), signs), _EIGHT)
        x = builder.fadd(other, own)
    builder.store(x, where, align=4)


@instruction()
def _cross(builder, p, q):
    """Replace the eight elements from p on and those from q on by their sums and differences."""
    low, high = (builder.bitcast(x, _EIGHT.as_pointer()) for x in (p, q))
    u, v = builder.load(low, align=4), builder.load(high, align=4)
    builder.store(builder.fadd(u, v), low, align=4)
    builder.store(builder.fsub(u, v), high, align=4)


@njit(**EXACT)
def rotate(x, n):
    """Transform a row in place by blocks of the largest power of two that divides n."""
    block = n & -n
    h = 1
    if block >= 8:  # vectors of eight, spelled out: LLVM finds few of them here
        for i in range(0, n, 8):
            _turn(ahead(x, i))
        h = 8
        while h < block:
            for i in range(0, n, 2 * h):
                for j in range(i, i + h, 8):
                    _cross(ahead(x, j), ahead(x, j + h))
            h *= 2
    while h < block:
        for i in range(0, n, 2 * h):
            for j in range(i, i + h):
                u, v = x[j], x[j + h]
                x[j] = u + v
                x[j + h] = u - v
        h *= 2
    c = np.float32(block**-0.5)
    for i in range(n):
        x[i] *= c


@njit(**_INLINE)
def nearest(t, low, high, bias):
    """Return the nearest integer to t from low to high, plus an even bias, as a byte."""
    t = low if t < low else t
    t = high if t > high else t
    return np.uint8(bits_of(t + (_ROUND + bias)))


@njit(**_INLINE)
def half(x):
    """Return (bits of the float16 nearest to x, saturated; its value; the resulting state)."""
    state = SOUND if abs(x) < _FITS else OUT_OF_RANGE
    x = -_LARGEST if x < -_LARGEST else x
    x = _LARGEST if x > _LARGEST else x
    bits = narrow(x, np.int16(0))
    return bits, widen(bits), state


@njit(**_INLINE)
def reciprocal(s):
    """Return 1 / s, and 0 for 0: all elements without a scale become 0."""
    return s if s == np.float32(0) else np.float32(1) / s


@njit(**EXACT)
def quantize(x, rows, n, levels, bias, out, scales):
    """Encode each of some rows by one scale, as bytes q + bias, the bias an even float."""
    state = SOUND
    for t in range(rows):  # all scales first: none waits for the quotients of the one before it
        row = ahead(x, t * n)
        worst = np.int32(0)
        for i in range(n):
            worst = max(worst, np.int32(bits_of(row[i]) & _MAGNITUDE))
        scales[t], _, over = half(float_of(worst) / levels)
        state = max(state, over)
    for t in range(rows):
        row, q, r = ahead(x, t * n), ahead(out, t * n), reciprocal(widen(scales[t]))
        for i in range(n):
            q[i] = nearest(row[i] * r, -levels, levels, bias)
    return state


RAW, KV8, K8V4, KV4C, KV4H = range(5)  # indices in core.geometry.CODECS
GRANULE = 4096
ROWS = 16
"""Tokens decoded and encoded at a time: their float32 stay in the nearest cache."""

_U8, _I8, _HALF, _F32 = np.uint8(0), np.int8(0), np.int16(0), np.float32(0)
_0, _7, _8, _15, _127, _128 = (np.float32(x) for x in (0, 7, 8, 15, 127, 128))
_LOW, _FOUR = np.uint8(15), np.uint8(4)


@njit(**EXACT)
def transcode(a, raw, part, parts):
    """Write n pages in another codec; the slice is a range of all their layers.

    a: arena, source list, target list, status; n, L, Hk, P, D, Dv; then of the old layout and of
    the new: codec, stripe stride, run bytes, starts of V, of the scales of K and of those of V.
    raw: type of raw elements, and their saturation.
    """
    layers, heads, size, dim, dim_v = a[5], a[6], a[7], a[8], a[9]
    old, new = a[10:16], a[16:22]
    rows = np.empty(max(size * dim, ROWS * dim, ROWS * dim_v), np.float32)
    edges = np.empty(2 * dim, np.float32)
    spare = np.empty(max(2 * size * dim_v, ROWS * dim), np.uint8)
    room = data(rows), data(edges), data(spare)
    status = pointer(a[3], np.int32(0))
    units = a[4] * layers
    for unit in range(units * part // parts, units * (part + 1) // parts):
        page, layer = unit // layers, unit % layers
        source = a[0] + GRANULE * np.int64(pointer(a[1], np.int32(0))[page]) + layer * old[1]
        target = a[0] + GRANULE * np.int64(pointer(a[2], np.int32(0))[page]) + layer * new[1]
        state = SOUND
        for head in range(heads):
            of, to = source + head * old[2], target + head * new[2]
            for end in new[2:]:  # each part ends in up to 15 bytes of padding, written first
                memzero(to + end - 16, 16)
            if new[0] == KV4C:
                found = _keys_by_channel(of, to, old, new, (size, dim), raw, room)
            else:
                found = _keys(of, to, old, new, (size, dim), raw, room)
            state = worse(state, found)
            state = worse(state, _values(of, to, old, new, (size, dim_v), raw, room))
        memzero(target + heads * new[2], new[1] - heads * new[2])
        status[unit] = np.int32(state)
    # Addresses do not keep arrays alive; this does.
    return rows.size + edges.size + spare.size


@njit(**{**EXACT, "forceinline": True})
def _number(b):
    """Return a byte as float32, via int32: numba would use 64 bits, and take four times as long."""
    return np.float32(np.int32(b))


@njit(**EXACT)
def key_row(of, old, t, dim, like, x):
    """Decode token t of the keys of a run."""
    codec = old[0]
    if codec == RAW:
        raw = ahead(pointer(of, like), t * dim)
        for i in range(dim):
            x[i] = widen(raw[i])
        return
    scales = pointer(of + old[4], _HALF)
    if codec in (KV8, K8V4):
        q, s = ahead(pointer(of, _I8), t * dim), widen(scales[t])
        for i in range(dim):
            x[i] = _number(q[i]) * s
        return
    pair = dim // 2
    b, upper = ahead(pointer(of, _U8), t * pair), ahead(x, pair)
    if codec == KV4C:
        for i in range(pair):
            x[i] = _number(b[i] & _LOW) * widen(scales[i]) + widen(scales[dim + i])
        scales = ahead(scales, pair)
        for i in range(pair):
            upper[i] = _number(b[i] >> _FOUR) * widen(scales[i]) + widen(scales[dim + i])
    else:
        s = widen(scales[t])
        for i in range(pair):
            x[i] = (_number(b[i] & _LOW) - _8) * s
        for i in range(pair):
            upper[i] = (_number(b[i] >> _FOUR) - _8) * s
        rotate(x, dim)


@njit(**EXACT)
def value_row(of, old, t, size, dim, like, byte, x):
    """Decode token t of the values of a run; `byte` holds those of a sealed one as `[P, Dv]`."""
    if old[0] == RAW:
        raw = ahead(pointer(of + old[3], like), t * dim)
        for i in range(dim):
            x[i] = widen(raw[i])
        return
    s = widen(pointer(of + old[5], _HALF)[t])
    if old[0] == KV8:
        q = ahead(byte, t * dim)
        for i in range(dim):
            x[i] = (_number(q[i]) - _128) * s
        return
    q, shift = ahead(byte, t % (size // 2) * dim), np.uint8(t // (size // 2) * 4)
    for i in range(dim):
        x[i] = (_number((q[i] >> shift) & _LOW) - _8) * s


@njit(**EXACT)
def _key_rows(of, old, t, count, dim, like, x):
    """Decode `count` rows of keys from token t on, adjacent raw ones in one loop."""
    if old[0] == RAW:
        raw = ahead(pointer(of, like), t * dim)
        for i in range(2 * count * dim, 3 * count * dim, 32):  # for the rows after the next
            prefetch(raw, i)
        for i in range(count * dim):
            x[i] = widen(raw[i])
        return
    for i in range(count):
        key_row(of, old, t + i, dim, like, ahead(x, i * dim))


@njit(**EXACT)
def _value_rows(of, old, t, count, size, dim, like, byte, x):  # noqa: PLR0913, PLR0917
    """Decode `count` rows of values from token t on, as `_key_rows`."""
    if old[0] == RAW:
        raw = ahead(pointer(of + old[3], like), t * dim)
        for i in range(2 * count * dim, 3 * count * dim, 32):  # for the rows after the next
            prefetch(raw, i)
        for i in range(count * dim):
            x[i] = widen(raw[i])
        return
    for i in range(count):
        value_row(of, old, t + i, size, dim, like, byte, ahead(x, i * dim))


@njit(**EXACT)
def store_row(x, n, like, top, raw):
    """Store one row or several as raw elements, saturated at `top`; return their state."""
    state = clean(x, n, INFINITE)
    for i in range(n):
        y = top if x[i] > top else x[i]
        raw[i] = narrow(-top if y < -top else y, like)
    return state


@njit(**EXACT)
def _pack(low, high, n, out):
    for i in range(n):
        out[i] = low[i] | (high[i] << _FOUR)


@njit(**EXACT)
def _keys(of, to, old, new, shape, raw, room):
    """Encode the keys of a run, token by token; return their state."""
    (size, dim), (like, top), (x, _, byte) = shape, raw, room
    state = SOUND
    scales = pointer(to + new[4], _HALF)
    for t in range(0, size, ROWS):
        count = min(ROWS, size - t)
        _key_rows(of, old, t, count, dim, like, x)
        if new[0] == RAW:
            row = ahead(pointer(to, like), t * dim)
            state = worse(state, store_row(x, count * dim, like, top, row))
            continue
        state = worse(state, clean(x, count * dim, HUGE))
        if new[0] == KV4H:
            for i in range(count):
                rotate(ahead(x, i * dim), dim)
            state = worse(state, quantize(x, count, dim, _7, _8, byte, ahead(scales, t)))
            for i in range(count):
                low, out = ahead(byte, i * dim), pointer(to + (t + i) * (dim // 2), _U8)
                _pack(low, ahead(low, dim // 2), dim // 2, out)
        else:
            out = pointer(to + t * dim, _U8)
            state = worse(state, quantize(x, count, dim, _127, _0, out, ahead(scales, t)))
    return state


@njit(**EXACT)
def _keys_by_channel(of, to, old, new, shape, raw, room):
    """Encode the keys of a run by the extremes of each channel; return their state."""
    (size, dim), (like, _), (x, low, byte) = shape, raw, room
    high = ahead(low, dim)
    for i in range(dim):
        low[i], high[i] = np.float32(np.inf), np.float32(-np.inf)
    _key_rows(of, old, 0, size, dim, like, x)
    state = clean(x, size * dim, HUGE)
    for t in range(size):
        row = ahead(x, t * dim)
        for i in range(dim):
            low[i] = row[i] if row[i] < low[i] else low[i]
            high[i] = row[i] if row[i] > high[i] else high[i]
    scales = pointer(to + new[4], _HALF)
    for i in range(dim):
        scales[i], s, over = half((high[i] - low[i]) / _15)
        state = worse(state, over)
        scales[dim + i], low[i], over = half(low[i] + _0)
        state = worse(state, over)
        high[i] = reciprocal(s)
    for t in range(size):
        row = ahead(x, t * dim)
        for i in range(dim):
            byte[i] = nearest((row[i] - low[i]) * high[i], _0, _15, _0)
        _pack(byte, ahead(byte, dim // 2), dim // 2, pointer(to + t * (dim // 2), _U8))
    return state


@njit(**EXACT)
def _values(of, to, old, new, shape, raw, room):
    """Encode the values of a run, token by token; return their state."""
    (size, dim), (like, top), (x, _, byte) = shape, raw, room
    out, pair = ahead(byte, size * dim), size // 2
    if old[0] != RAW:
        transpose(byte, pointer(of + old[3], _U8), dim, size if old[0] == KV8 else pair)
    state = SOUND
    scales = pointer(to + new[5], _HALF)
    levels, bias = (_127, _128) if new[0] == KV8 else (_7, _8)
    for t in range(0, size, ROWS):
        count = min(ROWS, size - t)
        _value_rows(of, old, t, count, size, dim, like, byte, x)
        if new[0] == RAW:
            row = ahead(pointer(to + new[3], like), t * dim)
            state = worse(state, store_row(x, count * dim, like, top, row))
        else:
            state = worse(state, clean(x, count * dim, HUGE))
            q, scale = ahead(out, t * dim), ahead(scales, t)
            state = worse(state, quantize(x, count, dim, levels, bias, q, scale))
    v = pointer(to + new[3], _U8)
    if new[0] == KV8:
        transpose(v, out, size, dim)
    elif new[0] != RAW:
        _pack(out, ahead(out, pair * dim), pair * dim, out)
        transpose(v, out, pair, dim)
    return state
