"""Blocks of K and V of a run, in Triton: read and decoded from any codec, stored in any.

A tile is two blocks of float32: of K the lower and the upper halves of the dims, of V tokens of the
lower and of the upper half of the page. So both nibbles of a byte lie in the same place of either.
"""

# ruff: noqa: PLR0913, PLR0917, PLR1714, SIM109 - kernels have many constants, and no `in`

from __future__ import annotations

import triton
import triton.language as tl

from flowkv.core.layout import CODECS
from flowkv.kernels.triton.quant import HUGE, INFINITE, clean, rotate, widen

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
