"""Intrinsics for memory by address that numba lacks: pointers, barriers, streaming copies."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LINE_BYTES = 64
"""Bytes of a cache line, or near enough."""

_I32, _BYTES = ir.IntType(32), ir.IntType(8).as_pointer()
_LINE = ir.VectorType(ir.IntType(64), LINE_BYTES // 8).as_pointer()


@intrinsic
def pointer(context, address, like):
    """Return the address as a pointer to elements of the type of `like`."""
    signature = types.CPointer(like)(address, like)

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return signature, codegen


@intrinsic
def data(context, array):
    """Return a pointer to the elements of a contiguous array, which must outlive its use."""

    def codegen(context, builder, signature, args):
        return context.make_array(signature.args[0])(context, builder, args[0]).data

    return types.CPointer(array.dtype)(array), codegen


@intrinsic
def ahead(context, p, i):
    """Return the pointer p + i, in elements."""
    return p(p, i), lambda context, builder, signature, args: builder.gep(args[0], [args[1]])


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


@intrinsic
def stream(context, target, source):
    """Copy a line past the caches; the target is aligned to lines, and needs a `fence`."""

    def codegen(context, builder, signature, args):
        to, of = (builder.inttoptr(x, _LINE) for x in args)
        stored = builder.store(builder.load(of, align=1), to, align=LINE_BYTES)
        stored.set_metadata("nontemporal", builder.module.add_metadata([_I32(1)]))
        return context.get_dummy_value()

    return types.none(target, source), codegen


@intrinsic
def fence(context):
    """Order all earlier writes before all later ones, for other threads."""

    def codegen(context, builder, signature, args):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen
