"""What the numba codecs do with one row of a page, a token's K or V: clean, rotate, quantize.

Bit for bit what `reference.codec` does, so no function here may be compiled with any fastmath flag:
every float32 operation is rounded once, in the order in which it is written.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from flowkv.kernels.cpu.bits import ahead, bits_of, float_of, narrow, widen

EXACT = {"error_model": "numpy", "fastmath": False}
_INLINE = {**EXACT, "forceinline": True}

_EIGHT, _EIGHT_INTS = ir.VectorType(ir.FloatType(), 8), ir.VectorType(ir.IntType(32), 8)
_ROUND = np.float32(12582912.0)  # 1.5 * 2**23: adding it leaves the nearest integer in the low bits
_MAGNITUDE = np.int32(0x7FFFFFFF)
INFINITE = np.int32(0x7F800000)  # these bits and more, without the sign: infinity and NaN
HUGE = np.int32(0x71800000)  # 2.0**100, from where on elements are encoded as 0
_FITS, _LARGEST = np.float32(65520.0), np.float32(65504.0)
SOUND, NON_FINITE, OUT_OF_RANGE = np.int64(0), np.int64(1), np.int64(2)


@njit(**_INLINE)
def worse(a, b):
    """Of two states of a layer the one to report: non-finite elements before large scales."""
    return NON_FINITE if NON_FINITE in (a, b) else max(a, b)


@njit(**EXACT)
def clean(x, n, limit):
    """Zero the elements of a row whose magnitude has the bits `limit` or more; the row's state."""
    worst = np.int32(0)
    for i in range(n):
        worst = max(worst, np.int32(bits_of(x[i]) & _MAGNITUDE))
    if worst < limit:
        return SOUND
    for i in range(n):
        if np.int32(bits_of(x[i]) & _MAGNITUDE) >= limit:
            x[i] = np.float32(0)
    return NON_FINITE if worst >= INFINITE else OUT_OF_RANGE


@intrinsic
def _turn(context, p):
    """The first three stages of the transform of the eight elements from p on, each in a vector."""

    def codegen(context, builder, signature, args):
        where = builder.bitcast(args[0], _EIGHT.as_pointer())
        x = builder.load(where, align=4)
        for h in (1, 2, 4):
            swap = ir.Constant(_EIGHT_INTS, [i ^ h for i in range(8)])
            signs = ir.Constant(_EIGHT_INTS, [-(1 << 31) if i & h else 0 for i in range(8)])
            other = builder.shuffle_vector(x, ir.Constant(_EIGHT, ir.Undefined), swap)
            own = builder.bitcast(builder.xor(builder.bitcast(x, _EIGHT_INTS), signs), _EIGHT)
            x = builder.fadd(other, own)
        builder.store(x, where, align=4)
        return context.get_dummy_value()

    return types.none(p), codegen


@intrinsic
def _cross(context, p, q):
    """The sums and the differences of the eight elements from p on and those from q on."""

    def codegen(context, builder, signature, args):
        low, high = (builder.bitcast(x, _EIGHT.as_pointer()) for x in args)
        u, v = builder.load(low, align=4), builder.load(high, align=4)
        builder.store(builder.fadd(u, v), low, align=4)
        builder.store(builder.fsub(u, v), high, align=4)
        return context.get_dummy_value()

    return types.none(p, q), codegen


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
    """The nearest integer to t from low to high, and an even bias: a byte."""
    t = low if t < low else t
    t = high if t > high else t
    return np.uint8(bits_of(t + (_ROUND + bias)))


@njit(**_INLINE)
def half(x):
    """(Bits of the float16 nearest to x, saturated; its value; the state this means)."""
    state = SOUND if abs(x) < _FITS else OUT_OF_RANGE
    x = -_LARGEST if x < -_LARGEST else x
    x = _LARGEST if x > _LARGEST else x
    bits = narrow(x, np.int16(0))
    return bits, widen(bits), state


@njit(**_INLINE)
def reciprocal(s):
    """1 / s, and 0 for 0: all of what has no scale becomes 0."""
    return s if s == np.float32(0) else np.float32(1) / s


@njit(**EXACT)
def quantize(x, rows, n, levels, bias, out, scales):
    """Encode each of some rows by one scale, as bytes q + bias, the bias a float that is even."""
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
