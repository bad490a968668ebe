"""Transcodes pages on GPUs, in Triton: one program decodes K or V of a run and encodes it anew."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from flowkv.core.errors import ConfigError
from flowkv.core.geometry import ITEMSIZE
from flowkv.core.layout import CODECS, GRANULE_BYTES, PageLayout
from flowkv.kernels.triton.launch import launch, padded

# What the Triton codecs do with tiles: widen, rotate, quantise. Bit for bit `reference.codec`.
#
# Kernels that call these are compiled without FP fusion. Tiles come in pairs, `b_a` and `b_b`,
# whose elements share bytes once they are nibbles; columns are dims.

INFINITE = tl.constexpr(0x7F800000)  # these bits and more, without the sign: infinity and NaN
HUGE = tl.constexpr(0x71800000)  # 2.0**100, from where on elements are encoded as 0
FITS = tl.constexpr(65520.0)  # what float16 rounds to infinity
LARGEST = tl.constexpr(65504.0)
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2**23: leaves the nearest integer in the low bits


@triton.jit
def widen(b, BF16: tl.constexpr):
    """Raw elements as float32; bfloat16 comes as int16, for the interpreter cannot cast it."""
    if BF16:
        return (b.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return b.to(tl.float32)


@triton.jit
def narrow(b, dtype: tl.constexpr, BF16: tl.constexpr):
    """Finite float32 as raw elements, to nearest even; float16 saturates."""
    if BF16:
        bits = b.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
    elif dtype == tl.float16:
        return tl.minimum(tl.maximum(b, -LARGEST), LARGEST).to(tl.float16)
    else:
        return b


@triton.jit
def clean(b, LIMIT: tl.constexpr):
    """(The tile with 0 for magnitudes of the bits LIMIT and more, the largest bits of each row)."""
    bits = b.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.where(bits < LIMIT, b, 0.0), tl.max(bits, axis=1)


@triton.jit
def half(x):
    """(float16 nearest to x, saturated, where it saturated)."""
    clamped = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
    return clamped.to(tl.float16), tl.abs(x) >= FITS


@triton.jit
def reciprocal(s):
    """1 / s, and 0 for 0: all of what has no scale becomes 0."""
    return tl.where(s == 0.0, 0.0, tl.div_rn(1.0, tl.where(s == 0.0, 1.0, s)))


@triton.jit
def nearest(b, LOW: tl.constexpr, HIGH: tl.constexpr):
    """The nearest integer from LOW to HIGH, in the low bits of an int32."""
    b = tl.minimum(tl.maximum(b, LOW), HIGH) + ROUND
    return b.to(tl.int32, bitcast=True)


@triton.jit
def scale_of(b_a, b_b, LEVELS: tl.constexpr):
    """(float16 scale by row, its reciprocal, where it is too large) of a symmetric code."""
    most = tl.maximum(tl.max(tl.abs(b_a), axis=1), tl.max(tl.abs(b_b), axis=1))
    scale, over = half(tl.div_rn(most, LEVELS))
    return scale, reciprocal(scale.to(tl.float32)), over


@triton.jit
def butterfly(b, ROWS: tl.constexpr, COLUMNS: tl.constexpr, H: tl.constexpr):
    """One stage of the transform: columns i and i + H become their sum and their difference.

    The other column of a pair is found as the sum of both, as integers, less the own: a reduction
    over two elements is a shuffle at most, so that nothing goes through shared memory.
    """
    own = tl.reshape(b, [ROWS, COLUMNS // (2 * H), 2, H])
    bits = own.to(tl.int32, bitcast=True)
    other = (tl.sum(bits, axis=2, keep_dims=True) - bits).to(tl.float32, bitcast=True)
    upper = (tl.arange(0, 2) == 1)[None, None, :, None]
    return tl.reshape(other + tl.where(upper, -own, own), [ROWS, COLUMNS])


@triton.jit
def rotate(b_a, b_b, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
           FACTOR: tl.constexpr):  # fmt: skip
    """The transform of blocks of n = 2**STAGES dims, `b_a` their lower halves, `b_b` the upper.

    FACTOR is n**-0.5.
    """
    for i in tl.static_range(STAGES - 1):
        b_a = butterfly(b_a, ROWS, COLUMNS, 1 << i)
        b_b = butterfly(b_b, ROWS, COLUMNS, 1 << i)
    return (b_a + b_b) * FACTOR, (b_a - b_b) * FACTOR


# Blocks of K and V of a run, in Triton: read and decoded from any codec, stored in any.
#
# A tile is two blocks of float32: of K the lower and the upper halves of the dims, of V tokens of
# the lower and of the upper half of the page. So both nibbles of a byte lie in the same place of
# either.

# ruff: noqa: PLR0913, PLR0917, PLR1714, SIM109 - kernels have many constants, and no `in`


RAW, KV8, K8V4, KV4C, KV4H = (tl.constexpr(i) for i in range(len(CODECS)))


@triton.jit
def fetch(p, m, MASKED: tl.constexpr):
    """A block; elements outside of `m` are 0 and not read."""
    if MASKED:
        return tl.load(p, mask=m, other=0)
    else:
        return tl.load(p)


@triton.jit
def put(p, b, m, MASKED: tl.constexpr):
    """Store what lies within `m`."""
    if MASKED:
        tl.store(p, b, mask=m)
    else:
        tl.store(p, b)


@triton.jit
def zero(p, START: tl.constexpr, END: tl.constexpr):
    """Zero the bytes from START to END: padding behind a part of a run, or behind the last run."""
    if START < END:
        o = START + tl.arange(0, 16 if END - START <= 16 else 4096)
        tl.store(p + o, tl.zeros_like(o).to(tl.uint8), mask=o < END)


@triton.jit
def dims_of(o_c, UPPER: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """The dims that the columns `o_c` of a block of K hold.

    With BLOCK, which must divide D an odd number of times, the block holds the halves of blocks.
    """
    if BLOCK:
        return o_c // (BLOCK // 2) * BLOCK + o_c % (BLOCK // 2) + UPPER * (BLOCK // 2)
    else:
        return o_c + UPPER * HALF


@triton.jit
def keys_of(p_byte, p_half, p_raw, o_t, o_c, m_t, UPPER: tl.constexpr, CODEC: tl.constexpr,
            SCALES: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
            BF16: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """One block of keys, decoded but for turning them back; 0 outside of the page."""
    o_d = dims_of(o_c, UPPER, HALF, BLOCK)
    m_d = (o_c < HALF) & (o_d < DIM)
    m = m_t[:, None] & m_d[None, :]
    if CODEC == RAW:
        return widen(fetch(p_raw + o_t[:, None] * DIM + o_d[None, :], m, MASKED), BF16)
    if CODEC == KV8 or CODEC == K8V4:
        b = fetch(p_byte + o_t[:, None] * DIM + o_d[None, :], m, MASKED)
        b = b.to(tl.int8, bitcast=True).to(tl.float32)
    else:
        o_byte = o_d % (DIM // 2) if BLOCK else o_c
        shift = (o_d // (DIM // 2) * 4)[None, :] if BLOCK else UPPER * 4
        b = fetch(p_byte + o_t[:, None] * (DIM // 2) + o_byte[None, :], m, MASKED).to(tl.int32)
        b = (b >> shift) & 15
        if CODEC == KV4H:
            b = tl.where(m, b - 8, 0)
        b = b.to(tl.float32)
    if CODEC == KV4C:
        b_scale = fetch(p_half + SCALES // 2 + o_d, m_d, MASKED).to(tl.float32)
        b_offset = fetch(p_half + SCALES // 2 + DIM + o_d, m_d, MASKED).to(tl.float32)
        return tl.where(m, b * b_scale[None, :] + b_offset[None, :], 0.0)
    else:
        b_scale = fetch(p_half + SCALES // 2 + o_t, m_t, MASKED).to(tl.float32)
        return b * b_scale[:, None]


@triton.jit
def picked(b_a, b_b, o_d, BLOCK: tl.constexpr):
    """Columns of dims `o_d` out of two blocks that hold halves of blocks; see `dims_of`."""
    column = o_d // BLOCK * (BLOCK // 2) + o_d % (BLOCK // 2)
    column = tl.broadcast_to(tl.minimum(column, b_a.shape[1] - 1)[None, :], b_a.shape)
    upper = (o_d % BLOCK >= BLOCK // 2)[None, :]
    return tl.where(upper, tl.gather(b_b, column, axis=1), tl.gather(b_a, column, axis=1))


@triton.jit
def put_keys(p_byte, b_a, b_b, o_t, o_c, m_t, NIBBLES: tl.constexpr, DIM: tl.constexpr,
             HALF: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Store two blocks of integers, as bytes or as nibbles."""
    if NIBBLES:
        if BLOCK:
            low = picked(b_a, b_b, o_c, BLOCK)
            b_b = picked(b_a, b_b, o_c + HALF, BLOCK)
            b_a = low
        b = (b_a & 15) | ((b_b & 15) << 4)
        m = m_t[:, None] & (o_c < HALF)[None, :]
        put(p_byte + o_t[:, None] * HALF + o_c[None, :], b.to(tl.uint8), m, MASKED)
    else:
        for i in tl.static_range(2):
            o_d = dims_of(o_c, i, HALF, BLOCK)
            m = m_t[:, None] & ((o_c < HALF) & (o_d < DIM))[None, :]
            b = b_b if i else b_a
            put(p_byte + o_t[:, None] * DIM + o_d[None, :], b.to(tl.uint8), m, MASKED)


@triton.jit
def key_tile(p_byte, p_half, p_raw, t, o_c, OLD: tl.constexpr, NEW: tl.constexpr,
             SCALES: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
             BLOCK: tl.constexpr, STAGES: tl.constexpr, FACTOR: tl.constexpr, BF16: tl.constexpr,
             ROWS: tl.constexpr, COLUMNS: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """(Both blocks of the keys of ROWS tokens, ready to be encoded, largest bits of each row)."""
    LIMIT: tl.constexpr = INFINITE if NEW == RAW else HUGE
    o_t = t + tl.arange(0, ROWS)
    m_t = o_t < PAGE
    b_a = keys_of(p_byte, p_half, p_raw, o_t, o_c, m_t, False, OLD, SCALES, DIM, HALF, BLOCK,
                  BF16, MASKED)  # fmt: skip
    b_b = keys_of(p_byte, p_half, p_raw, o_t, o_c, m_t, True, OLD, SCALES, DIM, HALF, BLOCK,
                  BF16, MASKED)  # fmt: skip
    if OLD == KV4H:
        b_a, b_b = rotate(b_a, b_b, ROWS, COLUMNS, STAGES, FACTOR)
    b_a, worst_a = clean(b_a, LIMIT)
    b_b, worst_b = clean(b_b, LIMIT)
    if NEW == KV4H:
        b_a, b_b = rotate(b_a, b_b, ROWS, COLUMNS, STAGES, FACTOR)
    return b_a, b_b, tl.maximum(worst_a, worst_b)


@triton.jit
def values_of(p_byte, p_half, p_raw, o_c, o_d, UPPER: tl.constexpr, CODEC: tl.constexpr,
              VALUES: tl.constexpr, SCALES: tl.constexpr, PAGE: tl.constexpr, HALF: tl.constexpr,
              DIM: tl.constexpr, BF16: tl.constexpr, ITEM: tl.constexpr,
              MASKED: tl.constexpr):  # fmt: skip
    """One block of values, tokens `o_c` of a half of the page, decoded; 0 outside of the page."""
    o_t = o_c + UPPER * HALF
    m_t = (o_c < HALF) & (o_t < PAGE)
    m = m_t[:, None] & (o_d < DIM)[None, :]
    if CODEC == RAW:
        p = p_raw + VALUES // ITEM + o_t[:, None] * DIM + o_d[None, :]
        return widen(fetch(p, m, MASKED), BF16)
    if CODEC == KV8:
        p = p_byte + VALUES + o_d[None, :] * PAGE + o_t[:, None]
        b = fetch(p, m, MASKED).to(tl.int32) - 128
    else:
        p = p_byte + VALUES + o_d[None, :] * HALF + o_c[:, None]
        b = ((fetch(p, m, MASKED).to(tl.int32) >> (UPPER * 4)) & 15) - 8
    b_scale = fetch(p_half + SCALES // 2 + o_t, m_t, MASKED).to(tl.float32)
    return tl.where(m, b.to(tl.float32) * b_scale[:, None], 0.0)


# ruff: noqa: PLR0913, PLR0917, PLR1714, SIM109 - kernels have many constants, and no `in`


NON_FINITE, OUT_OF_RANGE = tl.constexpr(1), tl.constexpr(2)  # see `coding`
GRANULE = tl.constexpr(GRANULE_BYTES)
KEY_ELEMENTS, VALUE_ELEMENTS = 2048, 4096
"""Of each block of a tile of K, of V; V is turned over, which wants many tokens."""
MOST_ELEMENTS = 8192
"""Of a block of K that is encoded by channel: up to here, all tokens of the page are one tile."""


@triton.jit
def report(p_status, worst, over, LIMIT: tl.constexpr):
    """Tell the status of a layer what was found: non-finite elements before large scales."""
    if tl.max(worst, axis=0) >= INFINITE:
        tl.atomic_xchg(p_status, NON_FINITE)
    elif (tl.max(worst, axis=0) >= LIMIT) | (over > 0):
        tl.atomic_cas(p_status, 0, OUT_OF_RANGE)


@triton.jit
def transcode_keys(p_byte, p_half, p_raw, p_to, p_to_half, p_to_raw, p_status, OLD: tl.constexpr,
                   NEW: tl.constexpr, OLD_SCALES: tl.constexpr, NEW_SCALES: tl.constexpr,
                   PAGE: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
                   STAGES: tl.constexpr, FACTOR: tl.constexpr, BF16: tl.constexpr,
                   ROWS: tl.constexpr, COLUMNS: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Keys with a scale for each token, or raw."""
    o_c = tl.arange(0, COLUMNS)
    worst = tl.zeros([ROWS], tl.int32)
    over = tl.zeros([ROWS], tl.int32)
    for t in range(0, PAGE, ROWS):
        o_t = t + tl.arange(0, ROWS)
        m_t = o_t < PAGE
        b_a, b_b, most = key_tile(p_byte, p_half, p_raw, t, o_c, OLD, NEW, OLD_SCALES, PAGE, DIM,
                                  HALF, BLOCK, STAGES, FACTOR, BF16, ROWS, COLUMNS,
                                  MASKED)  # fmt: skip
        worst = tl.maximum(worst, most)
        if NEW == RAW:
            for i in tl.static_range(2):
                o_d = dims_of(o_c, i, HALF, BLOCK)
                m = m_t[:, None] & ((o_c < HALF) & (o_d < DIM))[None, :]
                b = narrow(b_b if i else b_a, p_to_raw.dtype.element_ty, BF16)
                put(p_to_raw + o_t[:, None] * DIM + o_d[None, :], b, m, MASKED)
        else:
            LEVELS: tl.constexpr = 7.0 if NEW == KV4H else 127.0
            scale, r, beyond = scale_of(b_a, b_b, LEVELS)
            put(p_to_half + NEW_SCALES // 2 + o_t, scale, m_t, MASKED)
            over = over | beyond.to(tl.int32)
            b_a = nearest(b_a * r[:, None], -LEVELS, LEVELS)
            b_b = nearest(b_b * r[:, None], -LEVELS, LEVELS)
            if NEW == KV4H:
                b_a = b_a + 8
                b_b = b_b + 8
            put_keys(p_to, b_a, b_b, o_t, o_c, m_t, NEW == KV4H, DIM, HALF, BLOCK, MASKED)
    report(p_status, worst, tl.max(over, axis=0), INFINITE if NEW == RAW else HUGE)


@triton.jit
def put_channels(low, high, p_scale, o_d, m_d, DIM: tl.constexpr, MASKED: tl.constexpr):
    """Store the scales of channels, and what they count from; 1 where either is too large."""
    scale, over = half(tl.div_rn(high - low, 15.0))
    offset, low_over = half(low + 0.0)
    put(p_scale + o_d, scale, m_d, MASKED)
    put(p_scale + DIM + o_d, offset, m_d, MASKED)
    return ((over | low_over) & m_d).to(tl.int32)


@triton.jit
def channels(p_scale, o_d, m_d, DIM: tl.constexpr, MASKED: tl.constexpr):
    """(What channels count from, reciprocals of their scales), as they were stored."""
    scale = fetch(p_scale + o_d, m_d, MASKED).to(tl.float32)
    offset = fetch(p_scale + DIM + o_d, m_d, MASKED).to(tl.float32)
    return offset[None, :], reciprocal(scale)[None, :]


@triton.jit
def transcode_channels(p_byte, p_half, p_raw, p_to, p_to_half, p_status, OLD: tl.constexpr,
                       NEW: tl.constexpr, OLD_SCALES: tl.constexpr, NEW_SCALES: tl.constexpr,
                       PAGE: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
                       BLOCK: tl.constexpr, STAGES: tl.constexpr, FACTOR: tl.constexpr,
                       BF16: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                       MASKED: tl.constexpr):  # fmt: skip
    """Keys with a scale and an offset for each channel: all rows at once, or by reading twice."""
    o_c = tl.arange(0, COLUMNS)
    b_a, b_b, worst = key_tile(p_byte, p_half, p_raw, 0, o_c, OLD, NEW, OLD_SCALES, PAGE, DIM, HALF,
                               BLOCK, STAGES, FACTOR, BF16, ROWS, COLUMNS, MASKED)  # fmt: skip
    m_t = (tl.arange(0, ROWS) < PAGE)[:, None]
    low_a = tl.where(m_t, b_a, float("inf"))
    low_b = tl.where(m_t, b_b, float("inf"))
    high_a = tl.where(m_t, b_a, float("-inf"))
    high_b = tl.where(m_t, b_b, float("-inf"))
    for t in range(ROWS, PAGE, ROWS):
        b_a, b_b, most = key_tile(p_byte, p_half, p_raw, t, o_c, OLD, NEW, OLD_SCALES, PAGE, DIM,
                                  HALF, BLOCK, STAGES, FACTOR, BF16, ROWS, COLUMNS,
                                  MASKED)  # fmt: skip
        worst = tl.maximum(worst, most)
        m_t = (t + tl.arange(0, ROWS) < PAGE)[:, None]
        low_a = tl.minimum(low_a, tl.where(m_t, b_a, low_a))
        low_b = tl.minimum(low_b, tl.where(m_t, b_b, low_b))
        high_a = tl.maximum(high_a, tl.where(m_t, b_a, high_a))
        high_b = tl.maximum(high_b, tl.where(m_t, b_b, high_b))
    p_scale = p_to_half + NEW_SCALES // 2
    o_a = dims_of(o_c, False, HALF, BLOCK)
    o_b = dims_of(o_c, True, HALF, BLOCK)
    m_c = o_c < HALF
    over = put_channels(tl.min(low_a, axis=0), tl.max(high_a, axis=0), p_scale, o_a, m_c, DIM,
                        MASKED)  # fmt: skip
    over |= put_channels(tl.min(low_b, axis=0), tl.max(high_b, axis=0), p_scale, o_b, m_c, DIM,
                         MASKED)  # fmt: skip
    tl.debug_barrier()  # other threads need them, spread otherwise: reading beats dividing again
    from_a, r_a = channels(p_scale, o_a, m_c, DIM, MASKED)
    from_b, r_b = channels(p_scale, o_b, m_c, DIM, MASKED)
    for t in range(0, PAGE, ROWS):
        if ROWS < PAGE:
            b_a, b_b, _ = key_tile(p_byte, p_half, p_raw, t, o_c, OLD, NEW, OLD_SCALES, PAGE, DIM,
                                   HALF, BLOCK, STAGES, FACTOR, BF16, ROWS, COLUMNS,
                                   MASKED)  # fmt: skip
        b_qa = nearest((b_a - from_a) * r_a, 0.0, 15.0)
        b_qb = nearest((b_b - from_b) * r_b, 0.0, 15.0)
        o_t = t + tl.arange(0, ROWS)
        put_keys(p_to, b_qa, b_qb, o_t, o_c, o_t < PAGE, True, DIM, HALF, BLOCK, MASKED)
    report(p_status, worst, tl.max(over, axis=0), HUGE)


@triton.jit
def transcode_values(p_byte, p_half, p_raw, p_to, p_to_half, p_to_raw, p_status,
                     OLD: tl.constexpr, NEW: tl.constexpr, OLD_VALUES: tl.constexpr,
                     OLD_SCALES: tl.constexpr, NEW_VALUES: tl.constexpr,
                     NEW_SCALES: tl.constexpr, PAGE: tl.constexpr, HALF: tl.constexpr,
                     DIM: tl.constexpr, BF16: tl.constexpr, ITEM: tl.constexpr,
                     ROWS: tl.constexpr, COLUMNS: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Values: a scale for each token, and turned over, unless raw."""
    LIMIT: tl.constexpr = INFINITE if NEW == RAW else HUGE
    LEVELS: tl.constexpr = 127.0 if NEW == KV8 else 7.0
    BIAS: tl.constexpr = 128 if NEW == KV8 else 8
    o_d = tl.arange(0, COLUMNS)
    worst = tl.zeros([ROWS], tl.int32)
    over = tl.zeros([ROWS], tl.int32)
    for t in range(0, HALF, ROWS):
        o_c = t + tl.arange(0, ROWS)
        b_q = tl.zeros([ROWS, COLUMNS], tl.int32)
        for i in tl.static_range(2):
            o_t = o_c + i * HALF
            m_t = (o_c < HALF) & (o_t < PAGE)
            m = m_t[:, None] & (o_d < DIM)[None, :]
            b = values_of(p_byte, p_half, p_raw, o_c, o_d, i, OLD, OLD_VALUES, OLD_SCALES, PAGE,
                          HALF, DIM, BF16, ITEM, MASKED)  # fmt: skip
            b, most = clean(b, LIMIT)
            worst = tl.maximum(worst, most)
            if NEW == RAW:
                b = narrow(b, p_to_raw.dtype.element_ty, BF16)
                p = p_to_raw + NEW_VALUES // ITEM + o_t[:, None] * DIM + o_d[None, :]
                put(p, b, m, MASKED)
            else:
                scale, r, beyond = scale_of(b, b, LEVELS)
                put(p_to_half + NEW_SCALES // 2 + o_t, scale, m_t, MASKED)
                over = over | beyond.to(tl.int32)
                b = nearest(b * r[:, None], -LEVELS, LEVELS) + BIAS
                if NEW == KV8:
                    p = p_to + NEW_VALUES + o_d[None, :] * PAGE + o_t[:, None]
                    put(p, b.to(tl.uint8), m, MASKED)
                else:
                    b_q = b_q | ((b & 15) << (4 * i))
        if NEW != RAW and NEW != KV8:
            m = (o_c < HALF)[:, None] & (o_d < DIM)[None, :]
            p = p_to + NEW_VALUES + o_d[None, :] * HALF + o_c[:, None]
            put(p, b_q.to(tl.uint8), m, MASKED)
    report(p_status, worst, tl.max(over, axis=0), LIMIT)


@triton.jit
def transcode_kernel(p_arena, p_halves, p_raw, p_source, p_target, p_status, LAYERS: tl.constexpr,
                     HEADS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr,
                     VALUE_DIM: tl.constexpr, ITEM: tl.constexpr, BF16: tl.constexpr,
                     OLD: tl.constexpr, OLD_STRIPE: tl.constexpr, OLD_RUN: tl.constexpr,
                     OLD_VALUES: tl.constexpr, OLD_K_SCALES: tl.constexpr,
                     OLD_V_SCALES: tl.constexpr, NEW: tl.constexpr, NEW_STRIPE: tl.constexpr,
                     NEW_RUN: tl.constexpr, NEW_VALUES: tl.constexpr, NEW_K_SCALES: tl.constexpr,
                     NEW_V_SCALES: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
                     FACTOR: tl.constexpr, K_ROWS: tl.constexpr, K_COLUMNS: tl.constexpr,
                     V_ROWS: tl.constexpr, V_COLUMNS: tl.constexpr):  # fmt: skip
    """K (0) or V (1) of one run. Grid (pages * L * Hk, 2)."""
    HALF_DIM: tl.constexpr = (DIM + 1) // 2
    HALF_PAGE: tl.constexpr = (PAGE + 1) // 2
    K_MASKED: tl.constexpr = PAGE % K_ROWS != 0 or 2 * K_COLUMNS != DIM
    V_MASKED: tl.constexpr = PAGE % (2 * V_ROWS) != 0 or V_COLUMNS != VALUE_DIM
    i_head = tl.program_id(0) % HEADS
    i_layer = tl.program_id(0) // HEADS
    i_page = i_layer // LAYERS
    i_stripe = (i_layer % LAYERS).to(tl.int64)
    g_old = tl.load(p_source + i_page).to(tl.int64)
    g_new = tl.load(p_target + i_page).to(tl.int64)
    p_byte = p_arena + g_old * GRANULE + i_stripe * OLD_STRIPE + i_head * OLD_RUN
    p_half = p_halves + g_old * (GRANULE // 2) + i_stripe * (OLD_STRIPE // 2)
    p_half += i_head * (OLD_RUN // 2)
    p_from = p_raw + g_old * (GRANULE // ITEM) + i_stripe * (OLD_STRIPE // ITEM)
    p_from += i_head * (OLD_RUN // ITEM)
    p_to = p_arena + g_new * GRANULE + i_stripe * NEW_STRIPE + i_head * NEW_RUN
    p_to_half = p_halves + g_new * (GRANULE // 2) + i_stripe * (NEW_STRIPE // 2)
    p_to_half += i_head * (NEW_RUN // 2)
    p_to_raw = p_raw + g_new * (GRANULE // ITEM) + i_stripe * (NEW_STRIPE // ITEM)
    p_to_raw += i_head * (NEW_RUN // ITEM)
    p_status += i_layer
    if tl.program_id(1) == 0:
        if NEW == RAW:
            zero(p_to, PAGE * DIM * ITEM, NEW_VALUES)
        elif NEW == KV8 or NEW == K8V4:
            zero(p_to, PAGE * DIM, NEW_VALUES)
        else:
            zero(p_to, PAGE * DIM // 2, NEW_VALUES)
        if NEW == KV4C:
            zero(p_to, NEW_K_SCALES + 4 * DIM, NEW_V_SCALES)
            transcode_channels(p_byte, p_half, p_from, p_to, p_to_half, p_status, OLD, NEW,
                               OLD_K_SCALES, NEW_K_SCALES, PAGE, DIM, HALF_DIM, BLOCK, STAGES,
                               FACTOR, BF16, K_ROWS, K_COLUMNS, K_MASKED)  # fmt: skip
        else:
            if NEW != RAW:
                zero(p_to, NEW_K_SCALES + 2 * PAGE, NEW_V_SCALES)
            transcode_keys(p_byte, p_half, p_from, p_to, p_to_half, p_to_raw, p_status, OLD, NEW,
                           OLD_K_SCALES, NEW_K_SCALES, PAGE, DIM, HALF_DIM, BLOCK, STAGES, FACTOR,
                           BF16, K_ROWS, K_COLUMNS, K_MASKED)  # fmt: skip
    else:
        if NEW == RAW:
            zero(p_to, NEW_VALUES + PAGE * VALUE_DIM * ITEM, NEW_RUN)
        else:
            if NEW == KV8:
                zero(p_to, NEW_VALUES + PAGE * VALUE_DIM, NEW_K_SCALES)
            else:
                zero(p_to, NEW_VALUES + PAGE // 2 * VALUE_DIM, NEW_K_SCALES)
            zero(p_to, NEW_V_SCALES + 2 * PAGE, NEW_RUN)
        if i_head == HEADS - 1:
            zero(p_to, NEW_RUN, NEW_RUN + NEW_STRIPE - HEADS * NEW_RUN)
        transcode_values(p_byte, p_half, p_from, p_to, p_to_half, p_to_raw, p_status, OLD, NEW,
                         OLD_VALUES, OLD_V_SCALES, NEW_VALUES, NEW_V_SCALES, PAGE, HALF_PAGE,
                         VALUE_DIM, BF16, ITEM, V_ROWS, V_COLUMNS, V_MASKED)  # fmt: skip


@cache
def _constants(old: PageLayout, new: PageLayout) -> dict[str, int | float | bool]:
    """The constants and options of the kernel for a pair of layouts."""
    page, dim = old.page_size, old.head_dim
    block = dim & -dim if "kv4h" in (old.codec, new.codec) else 0
    columns, value_columns = padded((dim + 1) // 2), padded(old.value_dim)
    most = MOST_ELEMENTS if new.codec == "kv4c" else KEY_ELEMENTS
    rows = min(triton.next_power_of_2(page), max(1, most // columns))
    if rows < page:
        rows = min(rows, max(1, KEY_ELEMENTS // columns))
    half_page = triton.next_power_of_2((page + 1) // 2)
    constants: dict[str, int | float | bool] = {
        "LAYERS": old.layers,
        "HEADS": old.kv_heads,
        "PAGE": page,
        "DIM": dim,
        "VALUE_DIM": old.value_dim,
        "ITEM": ITEMSIZE[old.dtype],
        "BF16": old.dtype == "bfloat16",
        "BLOCK": block if block != dim else 0,
        "STAGES": block.bit_length() - 1,
        "FACTOR": block**-0.5 if block else 1.0,
        "num_warps": 8 if rows * columns >= MOST_ELEMENTS else 4,
        "K_ROWS": rows,
        "K_COLUMNS": columns,
        "V_ROWS": min(half_page, max(1, VALUE_ELEMENTS // value_columns)),
        "V_COLUMNS": value_columns,
    }
    for side, layout in (("OLD", old), ("NEW", new)):
        constants |= {
            side: CODECS.index(layout.codec),
            f"{side}_STRIPE": layout.stripe_stride_bytes,
            f"{side}_RUN": layout.run_bytes,
            f"{side}_VALUES": layout.v_offset_bytes,
            f"{side}_K_SCALES": layout.k_scale_offset_bytes,
            f"{side}_V_SCALES": layout.v_scale_offset_bytes,
        }
    return constants


def transcode(
    arena: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    old: PageLayout,
    new: PageLayout,
) -> torch.Tensor:
    """Write full pages once more in another codec; see `coding.transcode`."""
    if old.dtype == "float64":
        raise ConfigError("pages of float64 have no Triton codec", "Pass backend='reference'")
    dtype = torch.int16 if old.dtype == "bfloat16" else getattr(torch, old.dtype)
    status = arena.new_zeros(len(source), old.layers, dtype=torch.int32)
    if len(source):
        launch(
            transcode_kernel,
            (status.numel() * old.kv_heads, 2),
            arena,
            arena.view(torch.float16),
            arena.view(dtype),
            source.contiguous(),
            target.contiguous(),
            status,
            **_constants(old, new),
            enable_fp_fusion=False,
        )
    return status
