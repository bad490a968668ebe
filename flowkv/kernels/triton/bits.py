"""Integers in the registers of sealed kernels: nibbles, signed bytes, and numbers of two digits.

Four bytes fill a register, and a compiler that does not know it takes them apart: as plain code
these few lines cost as much as everything else in a decode kernel. With ASM they are the two or
three PTX instructions that they ought to be. Without (AMD, the interpreter) they are plain Triton
of the same meaning; a test runs the PTX in a model of its four instructions to compare them.

A *number of two digits* is an integer n of at most 127 * 256 in magnitude, kept as two int8 `hi`
and `lo` with n = 256 hi + lo: tensor cores multiply both with 8- or 4-bit integers, exactly, and
the second product costs little beside the loads it waits for (`triton.sealed_tile`).
"""

from __future__ import annotations

import triton
import triton.language as tl

MOST = tl.constexpr(32512.0)
"""The largest number of two digits, 127 * 256."""

MAGIC = tl.constexpr(12582912.0)
"""1.5 * 2**23: adding it rounds a float32 below 2**22 to an integer, the low bits of the sum."""

MAGIC_BITS = tl.constexpr(0x4B400000)
"""The bits of MAGIC: an int32 accumulator that begins here ends as the bits of MAGIC + its sum."""

HIGH_BITS = tl.constexpr(0x4F400000)
"""The bits of 256 * MAGIC: sums of high digits that begin here count 256 times."""

SPLIT_NIBBLES = tl.constexpr("""{
    .reg .b32 t;
    and.b32 $0, $2, 0x0F0F0F0F;
    shr.u32 t, $2, 4;
    and.b32 $1, t, 0x0F0F0F0F;
}""")
FLIP_SIGNS = tl.constexpr("xor.b32 $0, $1, 0x80808080;")
SPLIT_DIGITS = tl.constexpr("""{
    .reg .b32 s, t;
    prmt.b32 s, $2, $3, 0x0051;
    prmt.b32 t, $4, $5, 0x0051;
    prmt.b32 $0, s, t, 0x5410;
    prmt.b32 s, $2, $3, 0x0040;
    prmt.b32 t, $4, $5, 0x0040;
    prmt.b32 s, s, t, 0x5410;
    xor.b32 $1, s, 0x80808080;
}""")


@triton.jit
def nibbles(b, ASM: tl.constexpr):
    """(Low, high) nibbles of bytes, as int8 of 0 to 15."""
    if ASM:
        return tl.inline_asm_elementwise(
            SPLIT_NIBBLES, "=r,=r,r", [b], dtype=(tl.int8, tl.int8), is_pure=True, pack=4
        )
    else:
        return (b & 15).to(tl.int8), (b >> 4).to(tl.int8)


@triton.jit
def signed(b, ASM: tl.constexpr):
    """Bytes u as int8 u - 128."""
    if ASM:
        return tl.inline_asm_elementwise(
            FLIP_SIGNS, "=r,r", [b], dtype=tl.int8, is_pure=True, pack=4
        )
    else:
        return (b ^ 128).to(tl.int8, bitcast=True)


@triton.jit
def rounded(x):
    """Float32 of at most MOST in magnitude as integers, 128 and MAGIC_BITS above themselves."""
    return (x + (MAGIC + 128.0)).to(tl.int32, bitcast=True)


@triton.jit
def digits(b, ASM: tl.constexpr):
    """(hi, lo) of what `rounded` returned: byte 1, and byte 0 less the 128."""
    if ASM:
        return tl.inline_asm_elementwise(
            SPLIT_DIGITS, "=r,=r,r,r,r,r", [b], dtype=(tl.int8, tl.int8), is_pure=True, pack=4
        )
    else:
        return (b >> 8).to(tl.int8), (b ^ 128).to(tl.int8)


@triton.jit
def joined(b_hi, b_lo):
    """Float32 MAGIC + 256 hi + lo of accumulators that began at HIGH_BITS and MAGIC_BITS.

    Both sums are below 2**22. What is left of MAGIC goes where the result is multiplied: an FMA
    with a constant costs less than to subtract it. The error is half a unit, or 2**-24 of the sum.
    """
    b_hi = b_hi.to(tl.float32, bitcast=True) - 256.0 * MAGIC
    return b_hi + b_lo.to(tl.float32, bitcast=True)
