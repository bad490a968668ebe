"""Bytes turned over in numba: sealed pages hold V as `[Dv, P]`, rows are tokens everywhere else."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from flowkv.kernels.cpu.bits import ahead

_WORDS = ir.IntType(64).as_pointer()
_JIT = {"error_model": "numpy"}
_INLINE = {**_JIT, "forceinline": True}


@njit(**_JIT)
def transpose(to, of, rows, columns):
    """Transpose bytes `[rows, columns]`: 8 x 8 at a time in eight words, the edges one by one.

    `to` and `of` are pointers to bytes.
    """
    whole, wide = rows // 8 * 8, columns // 8 * 8
    a, b, c = np.uint64(0x00FF00FF00FF00FF), np.uint64(0x0000FFFF0000FFFF), np.uint64(0xFFFFFFFF)
    s8, s16, s32 = np.uint64(8), np.uint64(16), np.uint64(32)
    for i in range(0, whole, 8):
        for j in range(0, wide, 8):
            p = ahead(of, i * columns + j)
            x0, x1 = _word(p), _word(ahead(p, columns))
            x2, x3 = _word(ahead(p, 2 * columns)), _word(ahead(p, 3 * columns))
            x4, x5 = _word(ahead(p, 4 * columns)), _word(ahead(p, 5 * columns))
            x6, x7 = _word(ahead(p, 6 * columns)), _word(ahead(p, 7 * columns))
            x0, x1 = _swapped(x0, x1, a, s8)
            x2, x3 = _swapped(x2, x3, a, s8)
            x4, x5 = _swapped(x4, x5, a, s8)
            x6, x7 = _swapped(x6, x7, a, s8)
            x0, x2 = _swapped(x0, x2, b, s16)
            x1, x3 = _swapped(x1, x3, b, s16)
            x4, x6 = _swapped(x4, x6, b, s16)
            x5, x7 = _swapped(x5, x7, b, s16)
            x0, x4 = _swapped(x0, x4, c, s32)
            x1, x5 = _swapped(x1, x5, c, s32)
            x2, x6 = _swapped(x2, x6, c, s32)
            x3, x7 = _swapped(x3, x7, c, s32)
            p = ahead(to, j * rows + i)
            _put(p, x0)
            _put(ahead(p, rows), x1)
            _put(ahead(p, 2 * rows), x2)
            _put(ahead(p, 3 * rows), x3)
            _put(ahead(p, 4 * rows), x4)
            _put(ahead(p, 5 * rows), x5)
            _put(ahead(p, 6 * rows), x6)
            _put(ahead(p, 7 * rows), x7)
    for i in range(rows):
        for j in range(wide if i < whole else 0, columns):
            to[j * rows + i] = of[i * columns + j]


@intrinsic
def _word(context, p):
    """The eight bytes from p on as uint64, wherever p lies."""

    def codegen(context, builder, signature, args):
        return builder.load(builder.bitcast(args[0], _WORDS), align=1)

    return types.uint64(p), codegen


@intrinsic
def _put(context, p, x):
    """Write the eight bytes of x from p on."""

    def codegen(context, builder, signature, args):
        builder.store(args[1], builder.bitcast(args[0], _WORDS), align=1)
        return context.get_dummy_value()

    return types.none(p, x), codegen


@njit(**_INLINE)
def _swapped(x, y, mask, shift):
    """Exchange what lies in x above `mask` with what lies in y under it."""
    z = ((x >> shift) ^ y) & mask
    return x ^ (z << shift), y ^ z
