"""Codecs on GPUs, in Triton: pages are transcoded, copied to dense rows, or decoded for prompts.

One program decodes K or V of a run, and encodes it again or writes raw lines.
"""

# ruff: noqa: PLR0913, PLR0917, PLR1714 - kernels have many constants, and no `in`

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from flowkv.core.errors import ConfigError
from flowkv.core.geometry import CODECS, GRANULE_BYTES, ITEMSIZE, PageLayout
from flowkv.kernels.operands import Pages, Ragged
from flowkv.kernels.triton.launch import Constants, coded, launch, padded, power, strides
from flowkv.kernels.triton.task import PLACE, TAG, Task
from flowkv.kernels.triton.tile import first_page, of_rows, pick, row_of_item

# Tile operations of the Triton codecs: widen, rotate, quantise, bit for bit as the reference codec.
#
# Kernels that call these are compiled without FP fusion. Tiles come in pairs, `b_a` and `b_b`, with
# elements that share bytes once they are nibbles; columns are dims.

INFINITE = tl.constexpr(0x7F800000)  # these bits and more, without the sign: infinity and NaN
HUGE = tl.constexpr(0x71800000)  # 2.0**100, least magnitude that is encoded as 0
FITS = tl.constexpr(65520.0)  # least number that float16 rounds to infinity
LARGEST = tl.constexpr(65504.0)
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2**23: leaves the nearest integer in the low bits


@triton.jit
def widen(b, BF16: tl.constexpr):
    """Return raw elements as float32; bfloat16 is int16 here, as the interpreter cannot cast it."""
    if BF16:
        return (b.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return b.to(tl.float32)


@triton.jit
def narrow(b, dtype: tl.constexpr, BF16: tl.constexpr):
    """Return finite float32 as raw elements, to nearest even; float16 saturates."""
    if BF16:
        bits = b.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
    elif dtype == tl.float16:
        return tl.minimum(tl.maximum(b, -LARGEST), LARGEST).to(tl.float16)
    else:
        return b


@triton.jit
def clean(b, LIMIT: tl.constexpr):
    """Return (the tile with 0 for magnitudes of the bits LIMIT or more, the magnitudes' bits)."""
    bits = b.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.where(bits < LIMIT, b, 0.0), bits


@triton.jit
def half(x):
    """Return (float16 nearest to x, saturated, where it saturated)."""
    clamped = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
    return clamped.to(tl.float16), tl.abs(x) >= FITS


@triton.jit
def reciprocal(s):
    """Return 1 / s, and 0 for 0: all elements without a scale become 0."""
    return tl.where(s == 0.0, 0.0, tl.div_rn(1.0, tl.where(s == 0.0, 1.0, s)))


@triton.jit
def nearest(b, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Return the nearest integer from LOW to HIGH, in the low bits of an int32."""
    b = tl.minimum(tl.maximum(b, LOW), HIGH) + ROUND
    return b.to(tl.int32, bitcast=True)


@triton.jit
def scale_of(b_a, b_b, LEVELS: tl.constexpr):
    """Return (float16 scale by row, its reciprocal, where it is too large) of a symmetric code."""
    most = tl.maximum(tl.max(tl.abs(b_a), axis=1), tl.max(tl.abs(b_b), axis=1))
    scale, over = half(tl.div_rn(most, LEVELS))
    return scale, reciprocal(scale.to(tl.float32)), over


@triton.jit
def butterfly(b, ROWS: tl.constexpr, COLUMNS: tl.constexpr, H: tl.constexpr):
    """Apply one stage of the transform: columns i and i + H become their sum and their difference.

    The other column of a pair is the sum of both, as integers, less the own: a reduction over two
    elements is a shuffle at most, so that nothing goes through shared memory.
    """
    own = tl.reshape(b, [ROWS, COLUMNS // (2 * H), 2, H])
    bits = own.to(tl.int32, bitcast=True)
    other = (tl.sum(bits, axis=2, keep_dims=True) - bits).to(tl.float32, bitcast=True)
    upper = (tl.arange(0, 2) == 1)[None, None, :, None]
    return tl.reshape(other + tl.where(upper, -own, own), [ROWS, COLUMNS])


@triton.jit
def rotate(b_a, b_b, C: tl.constexpr):
    """Transform blocks of n = 2**STAGES dims, `b_a` their lower halves, `b_b` the upper.

    FACTOR is n**-0.5.
    """
    for i in tl.static_range(C.STAGES - 1):
        b_a = butterfly(b_a, C.K_ROWS, C.K_COLUMNS, 1 << i)
        b_b = butterfly(b_b, C.K_ROWS, C.K_COLUMNS, 1 << i)
    return (b_a + b_b) * C.FACTOR, (b_a - b_b) * C.FACTOR


# Blocks of K and V of a run, in Triton: read and decoded from any codec, stored in any.
#
# A tile is two blocks of float32: of K the lower and the upper halves of the dims, of V tokens of
# the lower and of the upper half of the page. So both nibbles of a byte have the same index in
# either.

RAW, KV8, K8V4, KV4C, KV4H = (tl.constexpr(i) for i in range(len(CODECS)))


@triton.jit
def fetch(p, m, MASKED: tl.constexpr):
    """Load a block; elements outside of `m` are 0 and not read."""
    if MASKED:
        return tl.load(p, mask=m, other=0)
    else:
        return tl.load(p)


@triton.jit
def put(p, b, m, MASKED: tl.constexpr):
    """Store the elements within `m`."""
    if MASKED:
        tl.store(p, b, mask=m)
    else:
        tl.store(p, b)


@triton.jit
def near(SIZE: tl.constexpr, COUNT: tl.constexpr):
    """Return the offsets of a line of a block, with COUNT neighbours a thread instead of 16 bytes.

    Every thread with elements of a column repeats the column's computation, so a thread of few
    columns and many lines repeats little. Loads of a warp are as wide in either case.
    """
    return tl.max_contiguous(tl.arange(0, SIZE), COUNT)


@triton.jit
def zero(p, START: tl.constexpr, END: tl.constexpr):
    """Zero the bytes from START to END: padding behind a part of a run, or behind the last run."""
    if START < END:
        o = START + tl.arange(0, 16 if END - START <= 16 else 4096)
        tl.store(p + o, tl.zeros_like(o).to(tl.uint8), mask=o < END)


@triton.jit
def dims_of(o_c, UPPER: tl.constexpr, C: tl.constexpr):
    """Return the dims of the columns `o_c` of a block of K.

    With BLOCK, which must divide D an odd number of times, the block holds the halves of blocks.
    """
    if C.BLOCK:
        return o_c // (C.BLOCK // 2) * C.BLOCK + o_c % (C.BLOCK // 2) + UPPER * (C.BLOCK // 2)
    else:
        return o_c + UPPER * C.HALF_DIM


@triton.jit
def keys_of(p_byte, p_half, p_raw, o_t, o_c, m_t, UPPER: tl.constexpr, C: tl.constexpr):
    """Decode one block of keys, without the inverse rotation; 0 outside of the page."""
    o_d = dims_of(o_c, UPPER, C)
    m_d = (o_c < C.HALF_DIM) & (o_d < C.DIM)
    m = m_t[:, None] & m_d[None, :]
    if C.OLD.CODEC == RAW:
        return widen(fetch(p_raw + o_t[:, None] * C.DIM + o_d[None, :], m, C.K_MASKED), C.BF16)
    if C.OLD.CODEC == KV8 or C.OLD.CODEC == K8V4:
        b = fetch(p_byte + o_t[:, None] * C.DIM + o_d[None, :], m, C.K_MASKED)
        b = b.to(tl.int8, bitcast=True).to(tl.float32)
    else:
        o_byte = o_d % (C.DIM // 2) if C.BLOCK else o_c
        shift = (o_d // (C.DIM // 2) * 4)[None, :] if C.BLOCK else UPPER * 4
        b = fetch(p_byte + o_t[:, None] * (C.DIM // 2) + o_byte[None, :], m, C.K_MASKED)
        b = (b.to(tl.int32) >> shift) & 15
        if C.OLD.CODEC == KV4H:
            b = tl.where(m, b - 8, 0)
        b = b.to(tl.float32)
    if C.OLD.CODEC == KV4C:
        b_scale = fetch(p_half + C.OLD.K_SCALES // 2 + o_d, m_d, C.K_MASKED).to(tl.float32)
        b_offset = fetch(p_half + C.OLD.K_SCALES // 2 + C.DIM + o_d, m_d, C.K_MASKED).to(tl.float32)
        return tl.where(m, b * b_scale[None, :] + b_offset[None, :], 0.0)
    else:
        b_scale = fetch(p_half + C.OLD.K_SCALES // 2 + o_t, m_t, C.K_MASKED).to(tl.float32)
        return b * b_scale[:, None]


@triton.jit
def picked(b_a, b_b, o_d, C: tl.constexpr):
    """Select columns of dims `o_d` from two blocks that hold halves of blocks; see `dims_of`."""
    column = o_d // C.BLOCK * (C.BLOCK // 2) + o_d % (C.BLOCK // 2)
    column = tl.broadcast_to(tl.minimum(column, b_a.shape[1] - 1)[None, :], b_a.shape)
    upper = (o_d % C.BLOCK >= C.BLOCK // 2)[None, :]
    return tl.where(upper, tl.gather(b_b, column, axis=1), tl.gather(b_a, column, axis=1))


@triton.jit
def put_keys(p_byte, b_a, b_b, o_t, o_c, m_t, NIBBLES: tl.constexpr, C: tl.constexpr):
    """Store two blocks of integers, as bytes or as nibbles."""
    if NIBBLES:
        if C.BLOCK:
            low = picked(b_a, b_b, o_c, C)
            b_b = picked(b_a, b_b, o_c + C.HALF_DIM, C)
            b_a = low
        b = (b_a & 15) | ((b_b & 15) << 4)
        m = m_t[:, None] & (o_c < C.HALF_DIM)[None, :]
        put(p_byte + o_t[:, None] * C.HALF_DIM + o_c[None, :], b.to(tl.uint8), m, C.K_MASKED)
    else:
        for i in tl.static_range(2):
            o_d = dims_of(o_c, i, C)
            m = m_t[:, None] & ((o_c < C.HALF_DIM) & (o_d < C.DIM))[None, :]
            b = b_b if i else b_a
            put(p_byte + o_t[:, None] * C.DIM + o_d[None, :], b.to(tl.uint8), m, C.K_MASKED)


@triton.jit
def key_tile(p_byte, p_half, p_raw, t, o_c, C: tl.constexpr):
    """Return (both key blocks of ROWS tokens, ready to be encoded; largest bits of each row)."""
    LIMIT: tl.constexpr = INFINITE if C.NEW.CODEC == RAW else HUGE
    o_t = t + tl.arange(0, C.K_ROWS)
    m_t = o_t < C.PAGE
    b_a = keys_of(p_byte, p_half, p_raw, o_t, o_c, m_t, False, C)
    b_b = keys_of(p_byte, p_half, p_raw, o_t, o_c, m_t, True, C)
    if C.OLD.CODEC == KV4H:
        b_a, b_b = rotate(b_a, b_b, C)
    b_a, bits_a = clean(b_a, LIMIT)
    b_b, bits_b = clean(b_b, LIMIT)
    if C.NEW.CODEC == KV4H:
        b_a, b_b = rotate(b_a, b_b, C)
    return b_a, b_b, tl.max(tl.maximum(bits_a, bits_b), axis=1)


@triton.jit
def values_of(p_byte, p_half, p_raw, o_c, o_d, UPPER: tl.constexpr, C: tl.constexpr):
    """Decode one block of values, tokens `o_c` of a half of the page; 0 outside of the page."""
    o_t = o_c + UPPER * C.HALF_PAGE
    m_t = (o_c < C.HALF_PAGE) & (o_t < C.PAGE)
    m = m_t[:, None] & (o_d < C.VALUE_DIM)[None, :]
    if C.OLD.CODEC == RAW:
        p = p_raw + C.OLD.VALUES // C.ITEM + o_t[:, None] * C.VALUE_DIM + o_d[None, :]
        return widen(fetch(p, m, C.V_MASKED), C.BF16)
    if C.OLD.CODEC == KV8:
        p = p_byte + C.OLD.VALUES + o_d[None, :] * C.PAGE + o_t[:, None]
        b = fetch(p, m, C.V_MASKED).to(tl.int32) - 128
    else:
        p = p_byte + C.OLD.VALUES + o_d[None, :] * C.HALF_PAGE + o_c[:, None]
        b = ((fetch(p, m, C.V_MASKED).to(tl.int32) >> (UPPER * 4)) & 15) - 8
    b_scale = fetch(p_half + C.OLD.V_SCALES // 2 + o_t, m_t, C.V_MASKED).to(tl.float32)
    return tl.where(m, b.to(tl.float32) * b_scale[:, None], 0.0)


NON_FINITE, OUT_OF_RANGE = tl.constexpr(1), tl.constexpr(2)  # see `dispatch`
GRANULE = tl.constexpr(GRANULE_BYTES)
KEY_ELEMENTS, VALUE_ELEMENTS = 2048, 4096
"""Elements of each block of a tile of K, of V; V is transposed, which needs many tokens."""
CHANNEL_ELEMENTS = 2048
"""Elements of a block of K encoded by channel: all tokens of the page, and some of the dims."""


@triton.jit
def report(p_status, worst, over, LIMIT: tl.constexpr):
    """Record the status of a layer: non-finite elements before large scales."""
    if tl.max(worst, axis=0) >= INFINITE:
        tl.atomic_xchg(p_status, NON_FINITE)
    elif (tl.max(worst, axis=0) >= LIMIT) | (over > 0):
        tl.atomic_cas(p_status, 0, OUT_OF_RANGE)


@triton.jit
def transcode_keys(p_byte, p_half, p_raw, p_to, p_to_half, p_to_raw, p_status, C: tl.constexpr):
    """Transcode keys with a scale for each token, or raw."""
    o_c = tl.arange(0, C.K_COLUMNS)
    worst = tl.full([C.K_ROWS], 0, tl.int32)
    over = tl.full([C.K_ROWS], 0, tl.int32)
    for t in range(0, C.PAGE, C.K_ROWS):
        o_t = t + tl.arange(0, C.K_ROWS)
        m_t = o_t < C.PAGE
        b_a, b_b, most = key_tile(p_byte, p_half, p_raw, t, o_c, C)
        worst = tl.maximum(worst, most)
        if C.NEW.CODEC == RAW:
            for i in tl.static_range(2):
                o_d = dims_of(o_c, i, C)
                m = m_t[:, None] & ((o_c < C.HALF_DIM) & (o_d < C.DIM))[None, :]
                b = narrow(b_b if i else b_a, p_to_raw.dtype.element_ty, C.BF16)
                put(p_to_raw + o_t[:, None] * C.DIM + o_d[None, :], b, m, C.K_MASKED)
        else:
            LEVELS: tl.constexpr = 7.0 if C.NEW.CODEC == KV4H else 127.0
            scale, r, beyond = scale_of(b_a, b_b, LEVELS)
            put(p_to_half + C.NEW.K_SCALES // 2 + o_t, scale, m_t, C.K_MASKED)
            over = over | beyond.to(tl.int32)
            b_a = nearest(b_a * r[:, None], -LEVELS, LEVELS)
            b_b = nearest(b_b * r[:, None], -LEVELS, LEVELS)
            if C.NEW.CODEC == KV4H:
                b_a = b_a + 8
                b_b = b_b + 8
            put_keys(p_to, b_a, b_b, o_t, o_c, m_t, C.NEW.CODEC == KV4H, C)
    report(p_status, worst, tl.max(over, axis=0), INFINITE if C.NEW.CODEC == RAW else HUGE)


@triton.jit
def put_channels(low, high, p_scale, o_d, m_d, C: tl.constexpr):
    """Store the scales and offsets of channels.

    Returns:
        The offsets, the reciprocals of the scales, and 1 where either is too large.
    """
    scale, over = half(tl.div_rn(high - low, 15.0))
    offset, low_over = half(low + 0.0)
    put(p_scale + o_d, scale, m_d, C.K_MASKED)
    put(p_scale + C.DIM + o_d, offset, m_d, C.K_MASKED)
    r = reciprocal(scale.to(tl.float32))
    return offset.to(tl.float32)[None, :], r[None, :], ((over | low_over) & m_d).to(tl.int32)


@triton.jit
def transcode_channels(p_byte, p_half, p_raw, p_to, p_to_half, p_status, C: tl.constexpr):
    """Transcode keys with a scale and an offset per channel: all rows at once, or in two reads."""
    p_scale = p_to_half + C.NEW.K_SCALES // 2
    for c in range(0, C.HALF_DIM, C.K_COLUMNS):
        o_c = c + near(C.K_COLUMNS, 2)
        b_a, b_b, worst = key_tile(p_byte, p_half, p_raw, 0, o_c, C)
        m_t = (tl.arange(0, C.K_ROWS) < C.PAGE)[:, None]
        low_a = tl.where(m_t, b_a, float("inf"))
        low_b = tl.where(m_t, b_b, float("inf"))
        high_a = tl.where(m_t, b_a, float("-inf"))
        high_b = tl.where(m_t, b_b, float("-inf"))
        for t in range(C.K_ROWS, C.PAGE, C.K_ROWS):
            b_a, b_b, most = key_tile(p_byte, p_half, p_raw, t, o_c, C)
            worst = tl.maximum(worst, most)
            m_t = (t + tl.arange(0, C.K_ROWS) < C.PAGE)[:, None]
            low_a = tl.minimum(low_a, tl.where(m_t, b_a, low_a))
            low_b = tl.minimum(low_b, tl.where(m_t, b_b, low_b))
            high_a = tl.maximum(high_a, tl.where(m_t, b_a, high_a))
            high_b = tl.maximum(high_b, tl.where(m_t, b_b, high_b))
        m_c = o_c < C.HALF_DIM
        o_a, o_b = dims_of(o_c, False, C), dims_of(o_c, True, C)
        from_a, r_a, over = put_channels(
            tl.min(low_a, axis=0), tl.max(high_a, axis=0), p_scale, o_a, m_c, C
        )
        from_b, r_b, over_b = put_channels(
            tl.min(low_b, axis=0), tl.max(high_b, axis=0), p_scale, o_b, m_c, C
        )
        for t in range(0, C.PAGE, C.K_ROWS):
            if C.K_ROWS < C.PAGE:
                b_a, b_b, _ = key_tile(p_byte, p_half, p_raw, t, o_c, C)
            b_qa = nearest((b_a - from_a) * r_a, 0.0, 15.0)
            b_qb = nearest((b_b - from_b) * r_b, 0.0, 15.0)
            o_t = t + tl.arange(0, C.K_ROWS)
            put_keys(p_to, b_qa, b_qb, o_t, o_c, o_t < C.PAGE, True, C)
        report(p_status, worst, tl.max(over | over_b, axis=0), HUGE)


@triton.jit
def transcode_values(p_byte, p_half, p_raw, p_to, p_to_half, p_to_raw, p_status, C: tl.constexpr):
    """Transcode values: a scale for each token, and transposed, unless raw."""
    LIMIT: tl.constexpr = INFINITE if C.NEW.CODEC == RAW else HUGE
    LEVELS: tl.constexpr = 127.0 if C.NEW.CODEC == KV8 else 7.0
    BIAS: tl.constexpr = 128 if C.NEW.CODEC == KV8 else 8
    o_d = tl.arange(0, C.V_COLUMNS)
    worst = tl.full([C.V_ROWS], 0, tl.int32)
    over = tl.full([C.V_ROWS], 0, tl.int32)
    for t in range(0, C.HALF_PAGE, C.V_ROWS):
        o_c = t + (tl.arange(0, C.V_ROWS) if C.OLD.CODEC == RAW else near(C.V_ROWS, 4))
        b_q = tl.full([C.V_ROWS, C.V_COLUMNS], 0, tl.int32)
        for i in tl.static_range(2):
            o_t = o_c + i * C.HALF_PAGE
            m_t = (o_c < C.HALF_PAGE) & (o_t < C.PAGE)
            m = m_t[:, None] & (o_d < C.VALUE_DIM)[None, :]
            b = values_of(p_byte, p_half, p_raw, o_c, o_d, i, C)
            b, bits = clean(b, LIMIT)
            worst = tl.maximum(worst, tl.max(bits, axis=1))
            if C.NEW.CODEC == RAW:
                b = narrow(b, p_to_raw.dtype.element_ty, C.BF16)
                p = p_to_raw + C.NEW.VALUES // C.ITEM + o_t[:, None] * C.VALUE_DIM + o_d[None, :]
                put(p, b, m, C.V_MASKED)
            else:
                scale, r, beyond = scale_of(b, b, LEVELS)
                put(p_to_half + C.NEW.V_SCALES // 2 + o_t, scale, m_t, C.V_MASKED)
                over = over | beyond.to(tl.int32)
                b = nearest(b * r[:, None], -LEVELS, LEVELS) + BIAS
                if C.NEW.CODEC == KV8:
                    p = p_to + C.NEW.VALUES + o_d[None, :] * C.PAGE + o_t[:, None]
                    put(p, b.to(tl.uint8), m, C.V_MASKED)
                else:
                    b_q = b_q | ((b & 15) << (4 * i))
        if C.NEW.CODEC != RAW and C.NEW.CODEC != KV8:
            m = (o_c < C.HALF_PAGE)[:, None] & (o_d < C.VALUE_DIM)[None, :]
            p = p_to + C.NEW.VALUES + o_d[None, :] * C.HALF_PAGE + o_c[:, None]
            put(p, b_q.to(tl.uint8), m, C.V_MASKED)
    report(p_status, worst, tl.max(over, axis=0), LIMIT)


@triton.jit(do_not_specialize=["n_layers"])  # one kernel for models of any depth
def transcode_kernel(p_arena, p_halves, p_raw, p_source, p_target, p_status, n_layers,
                     C: tl.constexpr):  # fmt: skip
    """Transcode K (0) or V (1) of one run. Grid (pages * L * Hk, 2)."""
    i_head = tl.program_id(0) % C.HEADS
    i_layer = tl.program_id(0) // C.HEADS
    i_page = i_layer // n_layers
    i_stripe = (i_layer % n_layers).to(tl.int64)
    g_old = tl.load(p_source + i_page).to(tl.int64)
    g_new = tl.load(p_target + i_page).to(tl.int64)
    p_byte = p_arena + g_old * GRANULE + i_stripe * C.OLD.STRIPE + i_head * C.OLD.RUN
    p_half = p_halves + g_old * (GRANULE // 2) + i_stripe * (C.OLD.STRIPE // 2)
    p_half += i_head * (C.OLD.RUN // 2)
    p_from = p_raw + g_old * (GRANULE // C.ITEM) + i_stripe * (C.OLD.STRIPE // C.ITEM)
    p_from += i_head * (C.OLD.RUN // C.ITEM)
    p_to = p_arena + g_new * GRANULE + i_stripe * C.NEW.STRIPE + i_head * C.NEW.RUN
    p_to_half = p_halves + g_new * (GRANULE // 2) + i_stripe * (C.NEW.STRIPE // 2)
    p_to_half += i_head * (C.NEW.RUN // 2)
    p_to_raw = p_raw + g_new * (GRANULE // C.ITEM) + i_stripe * (C.NEW.STRIPE // C.ITEM)
    p_to_raw += i_head * (C.NEW.RUN // C.ITEM)
    p_status += i_layer
    if tl.program_id(1) == 0:
        zero(p_to, C.PAGE * C.DIM * C.NEW.K_BITS // 8, C.NEW.VALUES)
        if C.NEW.CODEC == KV4C:
            zero(p_to, C.NEW.K_SCALES + 4 * C.DIM, C.NEW.V_SCALES)
            transcode_channels(p_byte, p_half, p_from, p_to, p_to_half, p_status, C)
        else:
            if C.NEW.CODEC != RAW:
                zero(p_to, C.NEW.K_SCALES + 2 * C.PAGE, C.NEW.V_SCALES)
            transcode_keys(p_byte, p_half, p_from, p_to, p_to_half, p_to_raw, p_status, C)
    else:
        V_END: tl.constexpr = C.NEW.VALUES + C.PAGE * C.VALUE_DIM * C.NEW.V_BITS // 8
        if C.NEW.CODEC == RAW:
            zero(p_to, V_END, C.NEW.RUN)
        else:
            zero(p_to, V_END, C.NEW.K_SCALES)
            zero(p_to, C.NEW.V_SCALES + 2 * C.PAGE, C.NEW.RUN)
        if i_head == C.HEADS - 1:
            zero(p_to, C.NEW.RUN, C.NEW.RUN + C.NEW.STRIPE - C.HEADS * C.NEW.RUN)
        transcode_values(p_byte, p_half, p_from, p_to, p_to_half, p_to_raw, p_status, C)


class Coding(NamedTuple):
    """Constants of a kernel that decodes pages, and may encode them again.

    Attributes:
        OLD: Layout of the pages that are read.
        NEW: Layout of the pages that are written; only the codec where lines are written.
        HEADS: KV heads of a layer.
        PAGE: Tokens of a page.
        DIM: Dims of a key.
        VALUE_DIM: Dims of a value.
        ITEM: Bytes of a raw element.
        BF16: Whether raw elements are bfloat16, which travels as int16.
        HALF_DIM: Dims of a block of K.
        HALF_PAGE: Tokens that share bytes with as many others.
        BLOCK: Dims that kv4h rotates together, if those are not all; else 0.
        STAGES: Log 2 of the dims that are rotated together.
        FACTOR: Factor of the rotation.
        K_ROWS: Tokens of a block of K.
        K_COLUMNS: Extent of a block that covers HALF_DIM.
        K_MASKED: Whether blocks of K reach beyond the page.
        V_ROWS: Tokens of a block of V.
        V_COLUMNS: Extent of a block that covers a value.
        V_MASKED: Whether blocks of V reach beyond the page.
    """

    OLD: Constants
    NEW: Constants
    HEADS: int
    PAGE: int
    DIM: int
    VALUE_DIM: int
    ITEM: int
    BF16: bool
    HALF_DIM: int
    HALF_PAGE: int
    BLOCK: int
    STAGES: int
    FACTOR: float
    K_ROWS: int
    K_COLUMNS: int
    K_MASKED: bool
    V_ROWS: int
    V_COLUMNS: int
    V_MASKED: bool


@cache
def coding(old: PageLayout, new: PageLayout | None = None) -> Coding:
    """Return the constants for reading pages of `old`, to be written as `new`, or as raw lines."""
    page, dim, value_dim = old.page_size, old.head_dim, old.value_dim
    rotates = old.spec.rotates or (new is not None and new.spec.rotates)
    block = dim & -dim if rotates else 0
    columns, value_columns = padded((dim + 1) // 2), padded(value_dim)
    rows = min(power(page), max(1, KEY_ELEMENTS // columns))
    if new is not None and new.spec.by_channel and not block:  # columns are independent
        rows = min(256, power(page))
        columns = min(columns, max(16, CHANNEL_ELEMENTS // rows))
    half_page = power((page + 1) // 2)
    value_rows = min(half_page, max(1, VALUE_ELEMENTS // value_columns))
    return Coding(
        OLD=coded(old),
        NEW=Constants() if new is None else coded(new),
        HEADS=old.kv_heads,
        PAGE=page,
        DIM=dim,
        VALUE_DIM=value_dim,
        ITEM=ITEMSIZE[old.dtype],
        BF16=old.dtype == "bfloat16",
        HALF_DIM=(dim + 1) // 2,
        HALF_PAGE=(page + 1) // 2,
        BLOCK=block if block != dim else 0,
        STAGES=block.bit_length() - 1,
        FACTOR=block**-0.5 if block else 1.0,
        K_ROWS=rows,
        K_COLUMNS=columns,
        K_MASKED=page % rows != 0 or dim % (2 * columns) != 0,
        V_ROWS=value_rows,
        V_COLUMNS=value_columns,
        V_MASKED=page % (2 * value_rows) != 0 or value_columns != value_dim,
    )


def transcode(
    arena: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    old: PageLayout,
    new: PageLayout,
) -> torch.Tensor:
    """Write full pages in another codec; see `dispatch.transcode`."""
    if old.dtype == "float64":
        raise ConfigError("pages of float64 have no Triton codec", "Pass backend='reference'")
    dtype = torch.int16 if old.dtype == "bfloat16" else getattr(torch, old.dtype)
    status = arena.new_zeros(len(source), old.layers, dtype=torch.int32)
    constants = coding(old, new)
    if len(source):
        launch(
            transcode_kernel,
            (status.numel() * old.kv_heads, 2),
            *(arena, arena.view(torch.float16), arena.view(dtype)),
            *(source.contiguous(), target.contiguous(), status, old.layers),
            C=constants,
            enable_fp_fusion=False,
        )
    return status


# The dense view of rows: raw pages are copied, sealed ones are decoded.
#
# One launch writes the columns of raw and of absent pages, and one launch for each other codec
# those of its pages: it is compiled for that codec, and programs that find another one end at once.
# Grids depend on shapes alone, so that calls can be captured in CUDA graphs.

DENSE_ELEMENTS = 4096
"""Elements of K or V that a program of `dense_kernel` holds."""


@triton.jit(do_not_specialize=["layer", "columns"])
def dense_kernel(p_out_k, p_out_v, p_arena, p_table, p_rows, p_lengths, stride_table, layer,
                 columns, C: tl.constexpr):  # fmt: skip
    """Write BLOCK columns of one row and head. Grid (cdiv(columns, BLOCK), Hk, B)."""
    i_head = tl.program_id(1)
    i_row = tl.program_id(2)
    o_c = tl.program_id(0) * C.BLOCK + tl.arange(0, C.BLOCK)
    position = tl.load(p_lengths + i_row) - columns + o_c
    p_line = p_table + tl.load(p_rows + i_row).to(tl.int64) * stride_table
    m_c = o_c < columns
    m_t = m_c & (position >= 0)
    granule = tl.load(p_line + position // C.PAGE, mask=m_t, other=-1)
    if C.SEALED:
        m_c = m_c & (granule >> TAG <= 0)  # another launch writes columns of other codecs
        m_t = m_t & m_c
    m_t = m_t & (granule >= 0)
    p_run = p_arena + layer.to(tl.int64) * C.STRIPE + i_head * C.RUN
    p_page = p_run + granule.to(tl.int64) * C.GRANULE
    o_slot = position % C.PAGE
    o_line = (i_row * tl.num_programs(1) + i_head).to(tl.int64) * columns + o_c
    o_d = tl.arange(0, C.D)
    o_v = tl.arange(0, C.DV)
    m_d = (o_d < C.HEAD_DIM)[None, :]
    m_v = (o_v < C.VALUE_DIM)[None, :]
    p_k = (p_page + o_slot * C.HEAD_DIM)[:, None] + o_d[None, :]
    b_k = tl.load(p_k, mask=m_t[:, None] & m_d, other=0.0)
    p_v = (p_page + C.VALUES + o_slot * C.VALUE_DIM)[:, None] + o_v[None, :]
    b_v = tl.load(p_v, mask=m_t[:, None] & m_v, other=0.0)
    tl.store(p_out_k + o_line[:, None] * C.HEAD_DIM + o_d[None, :], b_k, mask=m_c[:, None] & m_d)
    tl.store(p_out_v + o_line[:, None] * C.VALUE_DIM + o_v[None, :], b_v, mask=m_c[:, None] & m_v)


@triton.jit
def decode_run(p_run, p_scales, p_k, p_v, low, end, values, C: tl.constexpr):
    """Decode K, or if `values` V, of the tokens [low, end) of a run to lines of p_k, of p_v."""
    if values == 0:
        o_c = tl.arange(0, C.K_COLUMNS)
        for t in range(0, C.PAGE, C.K_ROWS):
            b_a, b_b, _ = key_tile(p_run, p_scales, p_k, t, o_c, C)
            o_t = t + tl.arange(0, C.K_ROWS)
            m_t = (o_t < end) & (o_t >= low)
            p_to = p_k + o_t[:, None] * C.DIM
            for i in tl.static_range(2):
                o_d = dims_of(o_c, i, C)
                m = m_t[:, None] & ((o_c < C.HALF_DIM) & (o_d < C.DIM))[None, :]
                b = narrow(b_b if i else b_a, p_k.dtype.element_ty, C.BF16)
                tl.store(p_to + o_d[None, :], b, mask=m)
    else:
        o_d = tl.arange(0, C.V_COLUMNS)
        for t in range(0, C.HALF_PAGE, C.V_ROWS):
            o_c = t + tl.arange(0, C.V_ROWS)
            for i in tl.static_range(2):
                b = values_of(p_run, p_scales, p_v, o_c, o_d, i, C)
                o_t = o_c + i * C.HALF_PAGE
                m_t = (o_c < C.HALF_PAGE) & (o_t < end) & (o_t >= low)
                b = narrow(b, p_v.dtype.element_ty, C.BF16)
                p_to = p_v + o_t[:, None] * C.VALUE_DIM + o_d[None, :]
                tl.store(p_to, b, mask=m_t[:, None] & (o_d < C.VALUE_DIM)[None, :])


@triton.jit(do_not_specialize=["layer", "columns"])
def dense_sealed_kernel(p_out_k, p_out_v, p_bytes, p_halves, p_table, p_rows, p_lengths,
                        stride_table, layer, columns, C: tl.constexpr):  # fmt: skip
    """Decode K (even) or V (odd) of one head of a page. Grid (2 * pages in sight, Hk, B)."""
    i_head = tl.program_id(1)
    i_row = tl.program_id(2)
    n_tokens = tl.load(p_lengths + i_row)
    i_page = tl.maximum(n_tokens - columns, 0) // C.PAGE + tl.program_id(0) // 2
    if i_page * C.PAGE >= n_tokens:
        return
    page = tl.load(p_table + tl.load(p_rows + i_row).to(tl.int64) * stride_table + i_page)
    if page >> TAG != C.OLD.CODEC:
        return
    o_run = (page & PLACE).to(tl.int64) * GRANULE + layer.to(tl.int64) * C.OLD.STRIPE
    o_run += i_head * C.OLD.RUN
    p_run = p_bytes + o_run
    p_scales = p_halves + o_run // 2
    o_line = (i_row * tl.num_programs(1) + i_head).to(tl.int64) * columns
    first = columns - n_tokens + i_page * C.PAGE  # column of the page's first token
    end = tl.minimum(columns - first, C.PAGE)
    p_k = p_out_k + (o_line + first) * C.DIM
    p_v = p_out_v + (o_line + first) * C.VALUE_DIM
    decode_run(p_run, p_scales, p_k, p_v, -first, end, tl.program_id(0) % 2, C)


def gather_dense(pages: Pages, batch: Ragged, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the last `columns` tokens of each row, right-aligned; see `dispatch.gather_dense`."""
    layout = pages.layout
    shape = strides(layout)
    rows, heads = batch.rows.shape[0], layout.kv_heads
    elements = pages.arena.view(getattr(torch, layout.dtype))
    k = elements.new_empty(rows, heads, columns, layout.head_dim)
    v = elements.new_empty(rows, heads, columns, layout.stored_value_dim)
    block = max(1, DENSE_ELEMENTS // max(shape.D, shape.DV))
    table = batch.table, batch.rows, batch.lengths, batch.table.stride(0), pages.layer, columns
    if rows * columns:
        launch(
            dense_kernel,
            (triton.cdiv(columns, block), heads, rows),
            *(k, v, elements, *table),
            C=shape._replace(BLOCK=block, SEALED=bool(pages.sealed)),
        )
    for codec in pages.sealed if rows * columns else ():
        bits = codec.dtype == "bfloat16"  # as bits, rounded by hand: see `widen`
        launch(
            dense_sealed_kernel,
            (2 * (triton.cdiv(columns, codec.page_size) + 1), heads, rows),
            *((x.view(torch.int16) if bits else x) for x in (k, v)),
            *(pages.arena, pages.arena.view(torch.float16), *table),
            C=coding(codec),
            enable_fp_fusion=False,
        )
    return k, v


# Decoding of sealed pages into spare raw runs, for kernels that are bound by arithmetic.
#
# A block of 128 query rows multiplies an element of a page in 1/16 of a clock of an H200's tensor
# cores: time for 8 thread-instructions, of which the softmax takes about 5. Decoding in the loop
# would take 1.5 to 2.5 more in every block (2048 new tokens of 4 heads a group are 64 of them), and
# take the tiles through registers on their way to shared memory. Decoding once costs bytes instead:
# kv8 reads 1.02 and writes 2 an element, 0.7 ps at 4.3 TB/s, beside the 21 ps that the products of
# those 8192 rows take at 790 TFLOP/s; kv4 2.5 bytes, 0.6 ps. At 280 query rows a KV head (70 tokens
# of 4 heads) it takes as long as the products. The decode kernel, which decodes in its loop, serves
# rows with up to 32.
#
# The spare runs of all KV heads of long prompts would be large, and heads are independent: so the
# heads are decoded and attended over in passes of as many as SPARE_BYTES hold, at least one. One
# head's runs are 4 / (Hk * L) of the rows' own 4-bit pages.
#
# The pages to decode are found on the device, so a captured CUDA graph stays right when tables
# change; the number of spare runs depends on the batch's maxima at its capture.

SPARE_BYTES = 256 << 20
"""Bytes of the spare runs of one pass, unless a single head's are more."""


class Spare(NamedTuple):
    """Raw runs of KV heads `low` to `low + heads - 1`: `[rows, pages, heads, run]`, some empty."""

    runs: torch.Tensor
    low: int
    heads: int


@triton.jit(do_not_specialize=["layer", "n_rows", "n_columns", "head_low"])
def unseal_kernel(p_out, p_bytes, p_halves, p_table, p_rows, p_lengths, p_starts, stride_table,
                  layer, n_rows, n_columns, head_low, OUT: tl.constexpr,
                  C: tl.constexpr):  # fmt: skip
    """Decode K (even) or V (odd) of one head of a page, if it has the codec of C.

    Grid (2 * n_columns * rows with T > FEW, KV heads from head_low on). Strides of the sealed page
    are bytes, those of p_out, in OUT, elements.
    """
    i_slot = tl.program_id(0) // 2
    i_page = i_slot % n_columns
    b_new = of_rows(p_starts + 1, n_rows, OUT) - of_rows(p_starts, n_rows, OUT)
    i_row = row_of_item((b_new > OUT.FEW).to(tl.int32), i_slot // n_columns)
    if i_row >= n_rows:
        return
    n_tokens = tl.load(p_lengths + i_row)
    n_new = pick(b_new, i_row)
    if (i_page * C.PAGE >= n_tokens) | (i_page < first_page(n_tokens, n_new, OUT)):
        return
    page = tl.load(p_table + tl.load(p_rows + i_row).to(tl.int64) * stride_table + i_page)
    if page >> TAG != C.OLD.CODEC:
        return
    i_head = tl.program_id(1)
    o_run = (page & PLACE).to(tl.int64) * GRANULE + layer.to(tl.int64) * C.OLD.STRIPE
    o_run += (i_head + head_low) * C.OLD.RUN
    p_to = p_out + (i_slot.to(tl.int64) * tl.num_programs(1) + i_head) * OUT.RUN
    decode_run(p_bytes + o_run, p_halves + o_run // 2, p_to, p_to + OUT.VALUES, 0, C.PAGE,
               tl.program_id(0) % 2, C)  # fmt: skip


def unseal(task: Task) -> Iterator[Spare]:
    """Yield raw runs of the sealed pages of all rows with many new tokens, some heads at a time.

    Each `Spare` is overwritten by the next. Without sealed pages there is one, of all heads, empty.
    """
    layout, sealed = task.layout, task.pages.sealed
    if not sealed:
        yield Spare(task.out, 0, layout.kv_heads)
        return
    item = ITEMSIZE[layout.dtype]
    # The rows that may have more than `few` new tokens, as far as the host knows.
    rows = min(task.rows, task.out.shape[0] // (task.few + 1))
    if task.few and task.batch.most_prompts >= 0:
        rows = min(rows, task.batch.most_prompts)
    slots = max(1, rows) * task.most_pages
    at_once = min(layout.kv_heads, max(1, SPARE_BYTES // max(1, slots * layout.run_bytes)))
    elements = slots * at_once * layout.run_bytes // item
    runs = task.out.new_empty(elements, dtype=getattr(torch, layout.dtype))
    for low in range(0, layout.kv_heads, at_once):
        spare = Spare(runs, low, min(at_once, layout.kv_heads - low))
        for codec in sealed:
            _decode(task, codec, spare, slots)
        yield spare


def _decode(task: Task, codec: PageLayout, spare: Spare, slots: int) -> None:
    raw, runs = task.layout, spare.runs
    if raw.dtype == "bfloat16":  # as bits, rounded by hand: see `widen`
        runs = runs.view(torch.int16)
    arena = task.pages.arena
    launch(
        unseal_kernel,
        (2 * slots, spare.heads),
        *(runs, arena, arena.view(torch.float16), *task.operands[2:], task.batch.table.stride(0)),
        *(task.pages.layer, task.rows, task.most_pages, spare.low),
        OUT=strides(raw)._replace(**task.batching._asdict()),
        C=coding(codec),
        enable_fp_fusion=False,
    )
