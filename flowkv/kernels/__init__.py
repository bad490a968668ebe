"""Page kernels: Triton for GPUs, numba for CPUs, and a torch oracle that both are held to.

Importing this package imports neither Triton nor numba; a backend is loaded by its first call.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "Pages": "operands",
    "Ragged": "operands",
    "Rotary": "operands",
    "Scoring": "operands",
    "append": "dispatch",
    "cascade_attention": "cascade",
    "checking": "bounds",
    "checksum": "dispatch",
    "copy_pages": "dispatch",
    "drop_tokens": "dispatch",
    "gather_dense": "dispatch",
    "gather_pages": "dispatch",
    "merge": "dispatch",
    "paged_attention": "dispatch",
    "plan_cascade": "cascade",
    "reposition": "dispatch",
    "rotations": "dispatch",
    "scatter_pages": "dispatch",
    "stripe_part": "dispatch",
    "transcode": "dispatch",
}

__all__ = [
    "Pages",
    "Ragged",
    "Rotary",
    "Scoring",
    "append",
    "cascade_attention",
    "checking",
    "checksum",
    "copy_pages",
    "drop_tokens",
    "gather_dense",
    "gather_pages",
    "merge",
    "paged_attention",
    "plan_cascade",
    "reposition",
    "rotations",
    "scatter_pages",
    "stripe_part",
    "transcode",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
