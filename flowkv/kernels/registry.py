"""Which function serves which operation, codec and backend; named here, imported on first use.

Every operation has an oracle in torch ("reference"), a twin in numba ("cpu") and, where a GPU may
call it, a Triton kernel. A test walks this table, so an operation without one of them cannot hide.
All implementations of an operation take the arguments of the function of that name in `dispatch`
(without `backend`, and with `scale` always a number), already checked.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

from flowkv.core.errors import ConfigError

BACKENDS = ("reference", "cpu", "triton")
ANY = "any"
"""The codec of operations that move bytes and never look at them."""

_ROOM = "flowkv.kernels"
IMPLEMENTATIONS: dict[tuple[str, str], dict[str, str]] = {
    ("append", "raw"): {
        "reference": f"{_ROOM}.reference:append",
        "cpu": f"{_ROOM}.cpu:append",
        "triton": f"{_ROOM}.triton_move:append",
    },
    ("paged_attention", "raw"): {
        "reference": f"{_ROOM}.reference:paged_attention",
        "cpu": f"{_ROOM}.cpu_attention:paged_attention",
        "triton": f"{_ROOM}.triton_attend:paged_attention",
    },
    ("merge", ANY): {
        "reference": f"{_ROOM}.reference:merge",
        "cpu": f"{_ROOM}.cpu:merge",
        "triton": f"{_ROOM}.triton_attend:merge",
    },
    ("gather_dense", "raw"): {
        "reference": f"{_ROOM}.reference:gather_dense",
        "cpu": f"{_ROOM}.cpu:gather_dense",
        "triton": f"{_ROOM}.triton_move:gather_dense",
    },
    ("copy_pages", ANY): {
        "reference": f"{_ROOM}.reference:copy_pages",
        "cpu": f"{_ROOM}.cpu:copy_pages",
        "triton": f"{_ROOM}.triton_move:copy_pages",
    },
    ("gather_pages", ANY): {
        "reference": f"{_ROOM}.reference:gather_pages",
        "cpu": f"{_ROOM}.cpu:gather_pages",
        "triton": f"{_ROOM}.triton_move:gather_pages",
    },
    ("scatter_pages", ANY): {
        "reference": f"{_ROOM}.reference:scatter_pages",
        "cpu": f"{_ROOM}.cpu:scatter_pages",
        "triton": f"{_ROOM}.triton_move:scatter_pages",
    },
}


def operations() -> tuple[str, ...]:
    """Names of all operations, in the order of the table."""
    return tuple(dict.fromkeys(op for op, _ in IMPLEMENTATIONS))


@cache
def resolve(op: str, codec: str, backend: str) -> Callable[..., Any]:
    """The function that serves `op` on pages of `codec`; its module is imported on first use.

    Raises:
        ConfigError: There is no such implementation.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"backend {backend!r} is unknown", f"Use one of {', '.join(BACKENDS)}")
    backends = IMPLEMENTATIONS.get((op, codec))
    if backends is None:
        known = ", ".join(c for o, c in IMPLEMENTATIONS if o == op) or "none"
        raise ConfigError(
            f"operation {op!r} has no kernel for codec {codec!r}", f"Use a codec of: {known}"
        )
    if backend not in backends:
        raise ConfigError(
            f"operation {op!r} on codec {codec!r} has no {backend!r} kernel",
            f"Pass backend={next(iter(backends))!r}, or move the tensors to another device",
        )
    module, _, name = backends[backend].partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name not in (module, "triton"):
            raise
        raise ConfigError(
            f"the {backend!r} kernels cannot be imported ({error})",
            "Install Triton (it comes with torch for CUDA), or pass backend='reference'",
        ) from error
