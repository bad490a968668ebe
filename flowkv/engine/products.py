"""Matrix products in blocks of fixed numbers of rows.

Which kernel a library takes for a product, and with it the order of additions in a row, depends on
how many rows there are. So in place of a product over all rows there are products over blocks of a
few fixed sizes, the last one padded; and of those sizes only those are used that were seen to give
a row the same bits, wherever it stands in the block. (He, "Defeating nondeterminism in LLM
inference", Thinking Machines 2025.)

That is seen by computing it, once for each shape, dtype, device and number of threads: on a CPU
with AVX-512, all blocks of at least 16 rows agree in float32; in bfloat16, those of 64 and 256.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

SIZES = {torch.float32: (16, 64, 256), torch.float64: (16, 64, 256)}
"""Rows of blocks, by dtype; the first one is what all others have to agree with."""
OTHERS = (64, 256)
"""Those of all other dtypes: a tensor core's least product has about as many rows."""
ALIGNED = 64
"""Bytes: products over rows that lie otherwise may add up in another order."""


class Shape(NamedTuple):
    """What the kernel of a product may depend on, beside its rows."""

    dtype: torch.dtype
    device: torch.device
    size: tuple[int, ...]
    stride: tuple[int, ...]
    bias: bool
    threads: int


class Products:
    """Products whose rows have the same bits, whatever other rows there are.

    Example:
        >>> x, w = torch.randn(40, 24), torch.randn(24, 8)
        >>> products = Products()
        >>> bool((products(x, w)[7:8] == products(x[7:8], w)).all())
        True
    """

    def __init__(self) -> None:
        self._sizes: dict[Shape, list[int]] = {}
        self._asked: set[tuple[Shape, int]] = set()
        self._pads: dict[tuple[torch.dtype, torch.device, int], torch.Tensor] = {}

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`x @ weight + bias`.

        Args:
            x: `[M, K]`.
            weight: `[K, N]`.
            bias: `[N]`.

        Returns:
            `[M, N]`, in the dtype of `x`.
        """
        rows = x.shape[0]
        if not rows or not x.shape[1]:
            return _product(x, weight, bias)
        threads = torch.get_num_threads()
        shape = Shape(x.dtype, x.device, weight.shape, weight.stride(), bias is not None, threads)
        sizes = self._agreeing(shape, rows, weight, bias)
        least, begin = sizes[0], 0
        if rows < least:
            return _product(self._padded(x, least), weight, bias)[:rows]
        x = x.contiguous()
        if rows in sizes and x.data_ptr() % ALIGNED == 0:
            return _product(x, weight, bias)
        parts = []
        while begin < rows:
            size = max((size for size in sizes if size <= rows - begin), default=least)
            block = x[begin : begin + size]
            if block.shape[0] < size or block.data_ptr() % ALIGNED:
                block = self._padded(block, size)
            parts.append(_product(block, weight, bias)[: rows - begin])
            begin += size
        return torch.cat(parts)

    def _padded(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        """A block that begins with `x`; what is below it is of no account."""
        key = x.dtype, x.device, x.shape[1]
        pad = self._pads.get(key)
        if pad is None or pad.shape[0] < rows:
            pad = self._pads[key] = x.new_zeros(rows, x.shape[1])
        pad[: x.shape[0]].copy_(x)
        return pad[:rows]

    def _agreeing(
        self, shape: Shape, rows: int, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> list[int]:
        """Sizes of blocks that agree with each other, of those that so many rows could use."""
        wanted = SIZES.get(shape.dtype, OTHERS)
        sizes = self._sizes.get(shape)
        if sizes is None:
            free = self._is_free(wanted[0], weight, bias)
            sizes = self._sizes[shape] = [wanted[0]] if free else [1]
        for size in wanted[1:]:
            if size <= rows and (shape, size) not in self._asked:
                self._asked.add((shape, size))
                if sizes[0] == wanted[0] and _agree(sizes[0], size, weight, bias):
                    sizes.append(size)
        return sizes

    @staticmethod
    def _is_free(size: int, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
        """Whether a row has the same bits at every place of a block."""
        x = _sample(size, weight)
        whole = _product(x, weight, bias)
        return all(
            torch.equal(_product(x.roll(by, 0), weight, bias).roll(-by, 0), whole)
            for by in (1, size // 2 + 1)
        )


def _agree(least: int, size: int, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether rows have the same bits in a block of `size` as in blocks of `least`."""
    x = _sample(size, weight)
    small = torch.cat([_product(part, weight, bias) for part in torch.split(x, least)])
    return torch.equal(small, _product(x, weight, bias))


def _sample(rows: int, weight: torch.Tensor) -> torch.Tensor:
    """Rows such as any, the same every time."""
    draws = torch.Generator().manual_seed(rows)
    return torch.randn(rows, weight.shape[0], generator=draws, device="cpu").to(weight)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)
