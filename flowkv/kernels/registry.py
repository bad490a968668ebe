"""Which function serves which operation, codec and backend; named here, imported on first use.

Every operation has an oracle in torch ("reference"), a twin in numba ("cpu") and, where a GPU may
call it, a Triton kernel. A test walks this table, so an operation without one of them cannot hide.
All implementations of an operation take the same arguments, already checked: those of the public
function of that name, without `backend`, and with the switches of attention as one `Scoring`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

from flowkv.core import compiling
from flowkv.core.errors import ConfigError
from flowkv.core.layout import CODECS

BACKENDS = ("reference", "cpu", "triton")
ANY = "any"
"""The codec of operations that move bytes and never look at them."""

_ROOM = "flowkv.kernels"
_RAW, _SEALED = ("raw",), CODECS[1:]
_OPERATIONS: dict[str, tuple[tuple[str, ...], str, str, str]] = {
    # operation: (codecs, oracle, twin, kernel)
    "append": (_RAW, "reference:append", "cpu.pages:append", "triton.move:append"),
    "paged_attention": (
        CODECS,
        "reference:paged_attention",
        "cpu.attention:paged_attention",
        "triton.attend:paged_attention",
    ),
    "cascade_attention": (
        (ANY,),
        "cascade:on_reference",
        "cascade:on_cpu",
        "cascade:on_triton",
    ),
    "merge": ((ANY,), "reference:merge", "cpu.pages:merge", "triton.attend:merge"),
    "gather_dense": (
        CODECS,
        "reference:gather_dense",
        "cpu.attention:gather_dense",
        "triton.codec:gather_dense",
    ),
    "drop_tokens": (
        _RAW,
        "reference:drop_tokens",
        "cpu.pages:drop_tokens",
        "triton.move:drop_tokens",
    ),
    "reposition": (
        _RAW,
        "reference:reposition",
        "cpu.pages:reposition",
        "triton.move:reposition",
    ),
    "transcode": (
        CODECS,
        "reference:transcode",
        "cpu.codec:transcode",
        "triton.codec:transcode",
    ),
    "checksum": (
        (ANY,),
        "reference:checksum",
        "cpu.pages:checksum",
        "triton.move:checksum",
    ),
    "copy_pages": (
        (ANY,),
        "reference:copy_pages",
        "cpu.pages:copy_pages",
        "triton.move:copy_pages",
    ),
    "gather_pages": (
        (ANY,),
        "reference:gather_pages",
        "cpu.pages:gather_pages",
        "triton.move:gather_pages",
    ),
    "scatter_pages": (
        (ANY,),
        "reference:scatter_pages",
        "cpu.pages:scatter_pages",
        "triton.move:scatter_pages",
    ),
}
IMPLEMENTATIONS: dict[tuple[str, str], dict[str, str]] = {
    (op, codec): {
        backend: f"{_ROOM}.{target}" for backend, target in zip(BACKENDS, targets, strict=True)
    }
    for op, (codecs, *targets) in _OPERATIONS.items()
    for codec in codecs
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
        with compiling.around():  # some of it is compiled by being imported
            return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name not in (module, "triton"):
            raise
        raise ConfigError(
            f"the {backend!r} kernels cannot be imported ({error})",
            "Install Triton (it comes with torch for CUDA), or pass backend='reference'",
        ) from error
