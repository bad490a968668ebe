"""Page kernels: Triton for GPUs, numba for CPUs, and a torch reference that defines both.

Importing this package imports neither Triton nor numba; a backend is loaded by its first call.
"""

from __future__ import annotations

from flowkv.kernels.cascade import cascade_attention, plan_cascade
from flowkv.kernels.dispatch import (
    append,
    checking,
    checksum,
    copy_pages,
    digest_pages,
    drop_tokens,
    gather_dense,
    gather_pages,
    merge,
    paged_attention,
    prepare_decode,
    reposition,
    rotations,
    scatter_pages,
    stripe_part,
    transcode,
)
from flowkv.kernels.operands import Pages, Ragged, Rotary, Scoring

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
    "digest_pages",
    "drop_tokens",
    "gather_dense",
    "gather_pages",
    "merge",
    "paged_attention",
    "plan_cascade",
    "prepare_decode",
    "reposition",
    "rotations",
    "scatter_pages",
    "stripe_part",
    "transcode",
]


def __dir__() -> list[str]:
    return sorted(__all__)
