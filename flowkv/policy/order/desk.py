"""All arrays of a policy as one argument of a compiled call.

Taking an array out of its Python object costs a call 40 ns or so, and a learned order works on ten.
A `Desk` is one vector with the address and shape of each; compiled code makes the arrays of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import from_dtype, types
from numba.core.base import BaseContext
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from flowkv.policy.order.compiled import Array
from flowkv.policy.order.slots import NODE, TERMS

WORDS = 4  # of each array: its address, and up to three lengths
ORDER = ((NODE, 1), (TERMS, 1), (np.int64, 3), (np.int64, 1))
"""What `flowkv.policy.order.calls` works on: type and dimensions of nodes, terms, heaps, state."""


class Desk:
    """Where some arrays lie, as long as they are the same.

    It keeps them alive, so an address is never that of something else; a copy knows none.

    Attributes:
        groups: The arrays, as they were laid.
        words: Their addresses and shapes.
    """

    def __init__(self) -> None:
        self.groups: tuple[object, ...] = ()
        self.words = np.zeros(0, np.int64)

    def __deepcopy__(self, memo: dict[int, Any]) -> Desk:
        return Desk()

    def __reduce__(self) -> tuple[type[Desk], tuple[()]]:
        return Desk, ()

    def lay(self, kinds: tuple[tuple[Any, int], ...], groups: tuple[Any, ...]) -> Array:
        """The vector for these arrays.

        Args:
            kinds: Type and dimensions that compiled code expects of each.
            groups: Arrays and tuples of arrays. None is ever resized or changed for another
                within its tuple.
        """
        arrays: list[Array] = []
        for group in groups:
            arrays.extend(group if isinstance(group, tuple) else (group,))
        words = np.zeros((len(arrays), WORDS), np.int64)
        for row, array, (dtype, ndim) in zip(words, arrays, kinds, strict=True):
            assert array.dtype == dtype and array.ndim == ndim and array.flags.c_contiguous
            assert array.flags.writeable and array.flags.aligned
            row[0] = array.ctypes.data
            row[1 : 1 + ndim] = array.shape
        self.groups, self.words = groups, words.reshape(-1)
        return self.words


def opener(first: int, kinds: tuple[tuple[Any, int], ...]) -> Any:
    """A compiled function that makes a tuple of arrays of a desk, from number `first` on."""
    kept = types.Tuple([types.Array(from_dtype(np.dtype(d)), n, "C") for d, n in kinds])

    def codegen(context: BaseContext, builder: ir.IRBuilder, _sig: Any, args: Any) -> Any:
        words = context.make_array(types.Array(types.int64, 1, "C"))(context, builder, args[0])
        made = []
        for i, array in enumerate(kept.types):

            def word(k: int, at: int = WORDS * (first + i)) -> Any:
                where = context.get_constant(types.intp, at + k)
                return builder.load(builder.gep(words.data, [where]))

            item = context.get_data_type(array.dtype)
            size = context.get_constant(types.intp, context.get_abi_sizeof(item))
            shape = [word(1 + k) for k in range(array.ndim)]
            strides = [size]
            for length in reversed(shape[1:]):
                strides.insert(0, builder.mul(strides[0], length))
            view = context.make_array(array)(context, builder)
            data = builder.inttoptr(word(0), item.as_pointer())
            populate_array(view, data, shape, strides, size, None)
            made.append(view._getvalue())
        return context.make_tuple(builder, kept, made)

    def opened(_typing: Any, desk: Any) -> Any:
        return kept(desk), codegen

    return intrinsic(opened)


order_on = opener(0, ORDER)
