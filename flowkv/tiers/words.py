"""Memory by address, for compiled code: words read and written, and products of 128 bits."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_I8, _I32, _I64, _I128 = (ir.IntType(n) for n in (8, 32, 64, 128))
_PREFETCH = [_I8.as_pointer(), _I32, _I32, _I32]  # address, to read, into all caches, data


def load(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    """What lies at an address, wherever that is; for other intrinsics."""
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def prefetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Asks for a line of memory, which need not exist; for other intrinsics."""
    pointer, kind = _I8.as_pointer(), ir.FunctionType(ir.VoidType(), _PREFETCH)
    ask = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
    builder.call(ask, [builder.inttoptr(address, pointer), _I32(0), _I32(3), _I32(1)])


@intrinsic
def word(context, address):
    """The eight bytes at an address, as uint64."""

    def codegen(context, builder, signature, args):
        return load(builder, args[0], _I64)

    return types.uint64(types.uint64), codegen


@intrinsic
def half_word(context, address):
    """The four bytes at an address, as uint64."""

    def codegen(context, builder, signature, args):
        return builder.zext(load(builder, args[0], _I32), _I64)

    return types.uint64(types.uint64), codegen


@intrinsic
def byte(context, address):
    """The byte at an address, as uint64."""

    def codegen(context, builder, signature, args):
        return builder.zext(load(builder, args[0], _I8), _I64)

    return types.uint64(types.uint64), codegen


@intrinsic
def put(context, address, value):
    """Write a byte."""

    def codegen(context, builder, signature, args):
        builder.store(builder.trunc(args[1], _I8), builder.inttoptr(args[0], _I8.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64), codegen


@intrinsic
def put_word(context, address, value):
    """Write eight bytes."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], _I64.as_pointer())
        builder.store(args[1], pointer, align=1)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64), codegen


@intrinsic
def fence(context):
    """Everything written before is there for others before anything written after."""

    def codegen(context, builder, signature, args):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def upper(context, a, b):
    """The upper 64 bits of a product."""

    def codegen(context, builder, signature, args):
        product = builder.mul(*(builder.zext(arg, _I128) for arg in args))
        return builder.trunc(builder.lshr(product, _I128(64)), _I64)

    return types.uint64(types.uint64, types.uint64), codegen


@intrinsic
def swapped(context, x):
    """The bytes of x in the other order."""

    def codegen(context, builder, signature, args):
        return builder.bswap(args[0])

    return types.uint64(types.uint64), codegen
