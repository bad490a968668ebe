"""The numba twin of the codecs: tensors become addresses, and the layers of pages are dealt out."""

from __future__ import annotations

import numpy as np
import torch

from flowkv.core.errors import ConfigError
from flowkv.core.layout import CODECS, PageLayout
from flowkv.kernels.cpu import entries
from flowkv.kernels.cpu.pages import DTYPES, LIKE, address, run

TOP = {dtype: np.float32(torch.finfo(dtype).max) for dtype in LIKE}
"""Where raw elements saturate. Of the three, decoded elements can only exceed float16."""


def transcode(
    arena: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    old: PageLayout,
    new: PageLayout,
) -> torch.Tensor:
    """Write full pages once more in another codec; see `coding.transcode`."""
    if old.dtype not in DTYPES:
        raise ConfigError(f"pages of {old.dtype} have no numba codec", "Pass backend='reference'")
    count, dtype = len(source), DTYPES[old.dtype]
    status = arena.new_empty(count, old.layers, dtype=torch.int32)
    source, target = source.contiguous(), target.contiguous()
    a = np.array(
        [
            *(address(x) for x in (arena, source, target, status)),
            *(count, old.layers, old.kv_heads, old.page_size, old.head_dim, old.value_dim),
            *_offsets(old),
            *_offsets(new),
        ],
        np.int64,
    )
    run(entries.transcode, count * old.page_bytes, a, (LIKE[dtype], TOP[dtype]))
    return status


def _offsets(layout: PageLayout) -> tuple[int, ...]:
    return (
        CODECS.index(layout.codec),
        layout.stripe_stride_bytes,
        layout.run_bytes,
        layout.v_offset_bytes,
        layout.k_scale_offset_bytes,
        layout.v_scale_offset_bytes,
    )
