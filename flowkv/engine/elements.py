"""Functions of single elements, computed for all of them by the same instructions.

On a CPU, most elements of a tensor go through vector instructions, and what is left at the end of
each thread's part through the C library, whose `exp` rounds otherwise. Which elements those are
depends on how many there are. Where the tensor is filled up so that nothing is left, none are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

UNEVEN = frozenset(
    {"celu", "elu", "exp2", "gelu", "glu", "mish", "pow", "rsqrt", "selu", "sigmoid", "silu"}
    | {"softplus", "swish"}
)
"""Functions whose two ways round differently; those of the others were seen to agree."""
EXACT_POWERS = (1, 2, 3, 0.5, -1, -2)
"""Powers that are products, quotients and square roots."""
VECTORS = 64
"""Elements that a vector loop takes at once, at most."""
GRAIN = 32768
"""Elements from which torch has another thread help."""
GELU_GRAIN = 16000
"""The same for `gelu`, which all threads share from there on."""


def evenly(func: Callable[..., Any], name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """`func(*args, **kwargs)`, each element whatever the others.

    Args:
        func: A function of one tensor, or of one and numbers.
        name: Its name, one of `UNEVEN`, or with "_" behind if it works in place.
        args: Its arguments, the tensor first.
        kwargs: Likewise; the tensor may be `input`.
    """
    given = dict(kwargs)
    x, *others = (given.pop("input"), *args) if "input" in given else args
    if _is_even(x, name, others, given):
        return func(*args, **kwargs)
    if name == "glu":
        left, right = x.chunk(2, *others, **given)
        return left * evenly(torch.sigmoid, "sigmoid", (right,), {})
    inplace = given.pop("inplace", False) or name.endswith("_")
    if name.endswith("_"):
        func = getattr(torch, name[:-1], None) or getattr(torch.nn.functional, name[:-1])
    n_elements = x.numel()
    flat = x.new_zeros(_filled(n_elements, name))
    flat[:n_elements].view(x.shape).copy_(x)
    out = func(flat, *others, **given)[:n_elements].view(x.shape)
    return x.copy_(out) if inplace else out


def _is_even(x: Any, name: str, others: list[Any], given: dict[str, Any]) -> bool:
    if not isinstance(x, torch.Tensor) or x.device.type != "cpu" or not x.is_floating_point():
        return True
    if any(isinstance(other, torch.Tensor) for other in (*others, *given.values())):
        return True  # not of one tensor
    if name == "pow" and (others or [given.get("exponent")])[0] in EXACT_POWERS:
        return True
    if name == "rsqrt" and x.dtype is torch.float32:
        return True
    even = x.is_contiguous() and _filled(x.numel(), name) == x.numel()
    return even and name != "glu"


def _filled(n_elements: int, name: str) -> int:
    """So many elements that each thread has whole vectors."""
    while True:
        step = VECTORS * _threads(n_elements, name)
        filled = -(-n_elements // step) * step
        if VECTORS * _threads(filled, name) == step:
            return filled
        n_elements = filled


def _threads(n_elements: int, name: str) -> int:
    """How many threads torch takes."""
    most = torch.get_num_threads()
    if name.startswith("gelu"):
        return most if n_elements > GELU_GRAIN else 1
    return min(most, max(1, -(-n_elements // GRAIN)))
