"""The registry of kernels: a function by operation, codec and backend, imported on first use.

Every operation has a reference in torch ("reference"), a twin in numba ("cpu") and a Triton kernel
where a GPU may call it. A test walks this table, so that no operation lacks one of them unnoticed.
All implementations of an operation take the same arguments, already checked: those of the public
function of that name, without `backend`, and with the switches of attention as one `Scoring`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

from flowkv.compiled import compiling
from flowkv.core.errors import ConfigError
from flowkv.core.geometry import CODECS

BACKENDS = ("reference", "cpu", "triton")
ANY = "any"
"""Codec of operations that move bytes without reading them."""

_ROOM = "flowkv.kernels"
_RAW = ("raw",)
_OPERATIONS: dict[str, tuple[tuple[str, ...], str, str]] = {
    # operation: (codecs, module of its twin, module of its kernel)
    "append": (_RAW, "cpu.operations", "triton.move"),
    "paged_attention": (CODECS, "cpu.operations", "triton.attend"),
    "merge": ((ANY,), "cpu.operations", "triton.attend"),
    "gather_dense": (CODECS, "cpu.operations", "triton.codec"),
    "drop_tokens": (_RAW, "cpu.operations", "triton.move"),
    "reposition": (_RAW, "cpu.operations", "triton.move"),
    "transcode": (CODECS, "cpu.operations", "triton.codec"),
    "checksum": ((ANY,), "cpu.operations", "triton.move"),
    "move_pages": ((ANY,), "cpu.operations", "triton.move"),
}
IMPLEMENTATIONS: dict[tuple[str, str], dict[str, str]] = {
    (op, codec): {
        backend: f"{_ROOM}.{module}:{op}"
        for backend, module in zip(BACKENDS, ("reference", *modules), strict=True)
    }
    for op, (codecs, *modules) in _OPERATIONS.items()
    for codec in codecs
}


@cache
def resolve(op: str, codec: str, backend: str) -> Callable[..., Any]:
    """Return the function that serves `op` on pages of `codec`; import its module on first use.

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
    module, _, name = backends[backend].partition(":")
    try:
        with compiling.around():  # some modules compile code at import
            return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name not in (module, "triton"):
            raise
        raise ConfigError(
            f"the {backend!r} kernels cannot be imported ({error})",
            "Install Triton (it comes with torch for CUDA), or pass backend='reference'",
        ) from error
