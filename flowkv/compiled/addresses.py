"""Intrinsics for memory by address that numba lacks: pointers, barriers, streaming copies."""

from __future__ import annotations

from functools import wraps

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LINE_BYTES = 64
"""Bytes of a cache line, or near enough."""

_I32, _BYTES = ir.IntType(32), ir.IntType(8).as_pointer()
_LINE = ir.VectorType(ir.IntType(64), LINE_BYTES // 8).as_pointer()


def instruction(result=types.none):
    """Make an intrinsic of a function that emits it, of a builder and the values of its arguments.

    `result` is the type of what it returns.
    """

    def of(emit):
        @intrinsic
        @wraps(emit)
        def typed(context, *kinds):
            def codegen(context, builder, signature, args):
                value = emit(builder, *args)
                return context.get_dummy_value() if value is None else value

            return result(*kinds), codegen

        return typed

    return of


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


@instruction()
def prefetch(builder, p, i):
    """Ask for the cache line of p[i]; never faults."""
    line = builder.bitcast(builder.gep(p, [i]), _BYTES)
    kind = ir.FunctionType(ir.VoidType(), [_BYTES, _I32, _I32, _I32])
    fn = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(fn, [line, _I32(0), _I32(2), _I32(1)])  # read, into L2, data


@instruction()
def stream(builder, target, source):
    """Copy a line past the caches; the target is aligned to lines, and needs a `fence`."""
    to, of = (builder.inttoptr(x, _LINE) for x in (target, source))
    stored = builder.store(builder.load(of, align=1), to, align=LINE_BYTES)
    stored.set_metadata("nontemporal", builder.module.add_metadata([_I32(1)]))


@instruction()
def fence(builder):
    """Order all earlier writes before all later ones, for other threads."""
    builder.fence("seq_cst")
