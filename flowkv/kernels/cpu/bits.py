"""What numba lacks for page kernels: raw addresses, 16-bit floats, memcpy, prefetch, a fast exp2.

A 16-bit float travels under the integer type of its width, so that one kernel source serves all:
uint16 is bfloat16, int16 is float16 (`widen` and `narrow` convert; LLVM vectorises both).
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

FAST = {"reassoc", "contract", "arcp", "nsz"}
"""Not "ninf" and "nnan": masks are -inf, and NaN in a cache must show in the answer."""

LINE_BYTES = 64

_I8, _I32, _F32 = ir.IntType(8), ir.IntType(32), ir.FloatType()
_BYTES = _I8.as_pointer()


@intrinsic
def pointer(context, address, like):
    """The address as a pointer to elements of the type of `like`."""
    signature = types.CPointer(like)(address, like)

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return signature, codegen


@intrinsic
def data(context, array):
    """Pointer to the elements of a contiguous array, which must outlive its use."""

    def codegen(context, builder, signature, args):
        return context.make_array(signature.args[0])(context, builder, args[0]).data

    return types.CPointer(array.dtype)(array), codegen


@intrinsic
def ahead(context, p, i):
    """The pointer p + i, in elements."""
    return p(p, i), lambda context, builder, signature, args: builder.gep(args[0], [args[1]])


@intrinsic
def widen(context, x):
    """A stored element as float32."""

    def codegen(context, builder, signature, args):
        if signature.args[0] == types.float32:
            return args[0]
        if signature.args[0] == types.uint16:
            return builder.bitcast(builder.shl(builder.zext(args[0], _I32), _I32(16)), _F32)
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), _F32)

    return types.float32(x), codegen


@intrinsic
def narrow(context, x, like):
    """A float32 as a stored element of the type of `like`, rounded to nearest even."""

    def codegen(context, builder, signature, args):
        if signature.return_type == types.float32:
            return args[0]
        if signature.return_type == types.int16:
            return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))
        bits = builder.bitcast(args[0], _I32)
        odd = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
        rounded = builder.lshr(builder.add(builder.add(bits, _I32(0x7FFF)), odd), _I32(16))
        nan = builder.fcmp_unordered("uno", args[0], args[0])
        return builder.trunc(builder.select(nan, _I32(0x7FC0), rounded), ir.IntType(16))

    return like(x, like), codegen


@intrinsic
def bits_of(context, x):
    """The bits of a float32 as int32."""
    return types.int32(x), lambda context, builder, signature, args: builder.bitcast(args[0], _I32)


@intrinsic
def float_of(context, x):
    """The float32 that has these bits."""
    return types.float32(x), lambda context, builder, signature, args: builder.bitcast(
        args[0], _F32
    )


@intrinsic
def memcpy(context, target, source, n_bytes):
    """Copy bytes between addresses (int64) that do not overlap."""

    def codegen(context, builder, signature, args):
        to, of = (builder.inttoptr(x, _BYTES) for x in args[:2])
        cgutils.raw_memcpy(builder, to, of, args[2], 1)
        return context.get_dummy_value()

    return types.none(target, source, n_bytes), codegen


@intrinsic
def memzero(context, target, n_bytes):
    """Set bytes at an address (int64) to zero."""

    def codegen(context, builder, signature, args):
        cgutils.memset(builder, builder.inttoptr(args[0], _BYTES), args[1], 0)
        return context.get_dummy_value()

    return types.none(target, n_bytes), codegen


@intrinsic
def prefetch(context, p, i):
    """Ask for the cache line of p[i]; never faults."""

    def codegen(context, builder, signature, args):
        line = builder.bitcast(builder.gep(args[0], [args[1]]), _BYTES)
        kind = ir.FunctionType(ir.VoidType(), [_BYTES, _I32, _I32, _I32])
        fn = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(fn, [line, _I32(0), _I32(2), _I32(1)])  # read, into L2, data
        return context.get_dummy_value()

    return types.none(p, i), codegen


_ROUND = np.float32(12582912.0)  # 1.5 * 2**23: adding it leaves the nearest integer in the low bits


# Spelled out, for numba lets callers pass their own flags down to a function that names none, and
# under "reassoc" (x + _ROUND) - _ROUND folds to x.
_EXACT = {"fastmath": {"contract"}, "error_model": "numpy", "forceinline": True}


@njit(**_EXACT)
def exp2(x):
    """2**x for x <= 127, to 2 ulp; exactly 0 below -126.5. NaN stays NaN."""
    x = np.float32(-127) if x < np.float32(-127) else x
    r = x + _ROUND
    f = x - (r - _ROUND)
    p = np.float32(1.5403530e-4)
    p = p * f + np.float32(1.3333558e-3)
    p = p * f + np.float32(9.6181291e-3)
    p = p * f + np.float32(5.5504109e-2)
    p = p * f + np.float32(2.4022651e-1)
    p = p * f + np.float32(6.9314718e-1)
    p = p * f + np.float32(1)
    return p * float_of(np.int32((bits_of(r) - bits_of(_ROUND) + np.int32(127)) << np.int32(23)))


@njit(**_EXACT)
def tanh(x):
    """Hyperbolic tangent to 3 ulp (near zero, where 1 - 2 / (e**2x + 1) cancels, as in Cephes)."""
    a = abs(x)
    a = np.float32(10) if a > np.float32(10) else a
    z = a * a
    p = np.float32(-5.70498872745e-3)
    p = p * z + np.float32(2.06390887954e-2)
    p = p * z + np.float32(-5.37397155531e-2)
    p = p * z + np.float32(1.33314422036e-1)
    p = p * z + np.float32(-3.33332819422e-1)
    near = p * z * a + a
    far = np.float32(1) - np.float32(2) / (exp2(a * np.float32(2.885390082)) + np.float32(1))
    y = near if a < np.float32(0.625) else far
    return -y if x < np.float32(0) else y


@njit(**_EXACT)
def order(x):
    """The bits of a float32 so changed that they compare as it does, with +NaN above everything.

    A maximum of integers vectorises; one of floats does only where NaN may be ignored.
    """
    bits = bits_of(x)
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@njit(**_EXACT)
def unorder(bits):
    """The float32 that `order` made `bits` of."""
    return float_of(np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))))
