"""Batch-invariant steps: a token's logits have the same bits whatever other rows are in the step.

They do not depend either on how the prompt was cut into chunks, on which part of it was reused, or
on where its pages lie. Four rules ensure that. Matrix products run over blocks of fixed numbers of
rows. Elementwise functions process whole vectors only. Each new token attends by itself, as in
decoding, however many there are (`Step.apart`). Pages computed this way have a salt of their own.
All other operations of a decoder on packed tokens work within a single token.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import torch
from torch.nn import Parameter, functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from flowkv.cache.kv import KV
from flowkv.cache.step import Step
from flowkv.core.errors import ConfigError
from flowkv.core.keys import Salt
from flowkv.engine.request import Request
from flowkv.engine.runner import Forward
from flowkv.engine.sampling import UNEVEN, evenly

# Matrix products in blocks of fixed numbers of rows.
#
# A library chooses the kernel of a product, and with it the order of additions within a row, by
# the number of rows. A product over all rows is therefore split into blocks of a few fixed sizes,
# the last one padded, and only sizes are used that give a row the same bits at every place of the
# block. (He, "Defeating nondeterminism in LLM inference", Thinking Machines 2025.)
#
# The sizes are tested once for each shape, dtype, device and number of threads: on a CPU with
# AVX-512, all blocks of at least 16 rows agree in float32; in bfloat16, those of 64 and 256.

SIZES = {torch.float32: (16, 64, 256), torch.float64: (16, 64, 256)}
"""Rows of a block, by dtype; all other sizes have to agree with the first one."""
OTHERS = (64, 256)
"""Rows of a block in other dtypes: the least product of a tensor core has about as many."""
ALIGNED = 64
"""Alignment in bytes: a product over rows at other addresses may add up in another order."""


Shape = tuple[Any, ...]
"""What the kernel of a product may depend on, beside the number of rows."""


class Products:
    """Matrix product with the same bits of a row, whatever other rows there are.

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
        """Return `x @ weight + bias`.

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
        own = weight.shape, weight.stride(), bias is not None
        shape = (x.dtype, x.device, *own, torch.get_num_threads())
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
        """Return a block of `rows` rows that begins with `x`; the rows below it are arbitrary."""
        key = x.dtype, x.device, x.shape[1]
        pad = self._pads.get(key)
        if pad is None or pad.shape[0] < rows:
            pad = self._pads[key] = x.new_zeros(rows, x.shape[1])
        pad[: x.shape[0]].copy_(x)
        return pad[:rows]

    def _agreeing(
        self, shape: Shape, rows: int, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> list[int]:
        """Return the block sizes that agree with each other, of those that `rows` rows can use."""
        wanted = SIZES.get(weight.dtype, OTHERS)
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
        """Return whether a row has the same bits at every place of a block."""
        x = _sample(size, weight)
        whole = _product(x, weight, bias)
        return all(
            torch.equal(_product(x.roll(by, 0), weight, bias).roll(-by, 0), whole)
            for by in (1, size // 2 + 1)
        )


def _agree(least: int, size: int, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Return whether rows have the same bits in a block of `size` as in blocks of `least`."""
    x = _sample(size, weight)
    small = torch.cat([_product(part, weight, bias) for part in torch.split(x, least)])
    return torch.equal(small, _product(x, weight, bias))


def _sample(rows: int, weight: torch.Tensor) -> torch.Tensor:
    """Return random rows `[rows, K]`, the same ones at every call."""
    draws = torch.Generator().manual_seed(rows)
    return torch.randn(rows, weight.shape[0], generator=draws, device="cpu").to(weight)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


MARK = Salt(0, hashlib.sha256(b"flowkv.invariant/1").digest())
"""Salt of pages that were computed batch-invariantly: only such requests share them."""

_ALWAYS = frozenset({"einsum", "tensordot", "matmul", "__matmul__", "__rmatmul__"})
"""Functions that call a matrix product for some operands, and none for others."""
_GROUPED = frozenset({"_grouped_mm", "grouped_mm_fallback"})
_PRODUCTS = _GROUPED | {"mm", "bmm", "mv", "addmm", "baddbmm", "addmv"}


def marked(request: Request) -> Request:
    """Return the request with a salt that separates its pages from those of other steps."""
    return replace(request, salts=(MARK, *request.salts))


def check_cache(kv: KV) -> None:
    """Refuse a cache with full pages that differ from the open ones.

    Raises:
        ConfigError: A lossy codec encodes full pages: a token's result depends on when it runs.
    """
    codecs = {layout.codec for forms in kv._bound().store.forms for layout in forms.sealed}
    if codecs:
        raise ConfigError(
            f"invariant=True over pages of codec {', '.join(sorted(codecs))}",
            "Make the cache with codec='raw'",
        )


def invariant(forward: Forward) -> Forward:
    """Return a forward that gives a row the same bits in any step.

    Args:
        forward: Runs a model that mixes tokens in attention alone.
    """
    mode = Fixed()

    def run(step: Step, last: torch.Tensor) -> torch.Tensor:
        step.apart = True
        with mode:
            return forward(step, last)

    return run


class Fixed(TorchFunctionMode):
    """Torch mode in which matrix products run over blocks of fixed numbers of rows."""

    names_flowkv_pages = True  # by the salt of each request (`marked`)

    def __init__(self) -> None:
        super().__init__()
        self._products = Products()
        self._deep = _Deep(self._products)
        self._plain: set[Any] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace matrix products and elementwise functions within a torch function call."""
        kwargs = kwargs or {}
        if func in self._plain:
            return func(*args, **kwargs)
        if func is functional.linear:
            return self._linear(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name.rstrip("_") in UNEVEN:
            return evenly(func, name, args, kwargs)
        self._deep.met = False
        with self._deep:
            out = func(*args, **kwargs)
        if not self._deep.met and name not in _ALWAYS:
            self._plain.add(func)
        return out

    def _linear(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if weight.dim() == 1:
            return self._linear(input, weight[None], bias).squeeze(-1)
        if input.dim() == 2:
            return self._products(input, weight.t(), bias)
        out = self._products(input.reshape(-1, input.shape[-1]), weight.t(), bias)
        return out.view(*input.shape[:-1], weight.shape[0])


class _Deep(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that replaces the matrix products within other functions.

    Attributes:
        met: Whether a product was called since the last reset.
    """

    names_flowkv_pages = True

    def __init__(self, products: Products) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._products, self.met = products, False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace an operation if it is a matrix product."""
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        self.met |= name in _PRODUCTS
        if name in ("mm", "bmm", "mv"):
            return self._each(*args)
        if name in ("addmm", "baddbmm", "addmv"):
            added, left, right = args
            out = self._each(left, right)
            return kwargs.get("beta", 1) * added + kwargs.get("alpha", 1) * out
        if name in _GROUPED and len(args) >= 2 and args[0].dim() == 2 and args[1].dim() == 3:
            return self._grouped(*args, **kwargs)
        return func(*args, **kwargs)

    def _each(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        if left.shape[-1] == 1:  # no sum, hence no order of additions
            return left * right
        if right.dim() == 1:
            return self._pair(left, right[:, None])[:, 0]
        if left.dim() == 2:
            return self._pair(left, right)
        return torch.stack([self._pair(*pair) for pair in zip(left, right, strict=True)])

    def _pair(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        if isinstance(right, Parameter) or isinstance(right._base, Parameter):
            return self._products(left, right)
        # Columns may belong to tokens as well, and are split into blocks, too.
        least = SIZES.get(right.dtype, OTHERS)[0]
        padded = functional.pad(right, (0, -right.shape[1] % least))
        parts = torch.split(padded, least, 1)
        out = torch.cat([self._products(left, part.contiguous()) for part in parts], 1)
        return out[:, : right.shape[1]]

    def _grouped(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        offs: torch.Tensor,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Multiply consecutive groups of rows `[S, K]` with one matrix each of `[E, K, N]`."""
        out = x.new_empty(x.shape[0], weight.shape[2])
        begin = 0
        for group, end in enumerate(offs.tolist()):
            out[begin:end] = self._products(x[begin:end], weight[group])
            begin = end
        out = out if bias is None else out + bias
        return out if out_dtype is None else out.to(out_dtype)
