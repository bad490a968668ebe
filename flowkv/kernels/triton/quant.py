"""What the Triton codecs do with tiles: widen, rotate, quantise. Bit for bit `reference.codec`.

Kernels that call these are compiled without FP fusion. Tiles come in pairs, `b_a` and `b_b`, whose
elements share bytes once they are nibbles; columns are dims.
"""

from __future__ import annotations

import triton
import triton.language as tl

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
