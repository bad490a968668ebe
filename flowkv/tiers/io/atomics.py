"""Loads and stores that two threads, or a thread and the kernel, agree about; for compiled code."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_WORDS = {4: types.int32, 8: types.int64}


def _loader(n_bytes: int) -> Any:
    @intrinsic
    def load_acquire(context, address):  # type: ignore[no-untyped-def]
        def emit(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            pointer = builder.inttoptr(arguments[0], ir.IntType(8 * n_bytes).as_pointer())
            return builder.load_atomic(pointer, ordering="acquire", align=n_bytes)

        return _WORDS[n_bytes](types.int64), emit

    return load_acquire


def _storer(n_bytes: int) -> Any:
    @intrinsic
    def store_release(context, address, value):  # type: ignore[no-untyped-def]
        def emit(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            word = ir.IntType(8 * n_bytes)
            pointer = builder.inttoptr(arguments[0], word.as_pointer())
            value = arguments[1]
            if n_bytes < 8:
                value = builder.trunc(value, word)
            builder.store_atomic(value, pointer, ordering="release", align=n_bytes)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), emit

    return store_release


@intrinsic
def fence(context):  # type: ignore[no-untyped-def]
    """What was stored before is seen by others before anything is loaded after."""

    def emit(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), emit


load32, load64 = _loader(4), _loader(8)
store32, store64 = _storer(4), _storer(8)
