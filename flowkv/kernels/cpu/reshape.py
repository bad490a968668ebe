"""The numba twins of the operations that remake pages: `drop_tokens` and `reposition`."""

from __future__ import annotations

import numpy as np
import torch

from flowkv.core.geometry import ITEMSIZE
from flowkv.core.layout import PageLayout
from flowkv.kernels.cpu import entries
from flowkv.kernels.cpu.append import rotary_operands
from flowkv.kernels.cpu.pages import DTYPES, LIKE, address, run
from flowkv.kernels.operands import Rotary


def drop_tokens(
    arena: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    keep: torch.Tensor,
    layout: PageLayout,
) -> None:
    """Make pages of chosen tokens of others; see `movement.drop_tokens`."""
    source, target, keep = source.contiguous(), target.contiguous(), keep.contiguous()
    kept, item = keep.shape[2], ITEMSIZE[layout.dtype]
    k_bytes, v_bytes = layout.head_dim * item, layout.stored_value_dim * item
    a = np.array(
        [
            address(arena),
            address(source),
            address(target),
            address(keep),
            layout.layers,
            layout.kv_heads,
            layout.page_size,
            kept,
            target.shape[0],
            k_bytes,
            v_bytes,
            layout.run_bytes,
            layout.v_offset_bytes,
            layout.stripe_stride_bytes,
        ],
        np.int64,
    )
    run(entries.drop_tokens, keep.numel() * (k_bytes + v_bytes), a)


def reposition(
    arena: torch.Tensor,
    pages: torch.Tensor,
    turns: torch.Tensor,
    rope: Rotary,
    layout: PageLayout,
    layer: int | None = None,
) -> None:
    """Rotate the keys of pages in place; see `rotary.reposition`."""
    pages, turns = pages.contiguous(), turns.contiguous()
    item, layers = ITEMSIZE[layout.dtype], layout.layers if layer is None else 1
    a = np.array(
        [
            address(arena) + (layer or 0) * layout.stripe_stride_bytes,
            address(pages),
            address(turns),
            pages.shape[0],
            layers,
            layout.kv_heads,
            layout.page_size,
            layout.head_dim * item,
            layout.run_bytes,
            layout.stripe_stride_bytes,
        ],
        np.int64,
    )
    turn, like = rotary_operands(rope, item), LIKE[DTYPES[layout.dtype]]
    n_bytes = 4 * pages.shape[0] * layers * layout.kv_heads * layout.page_size * rope.cos.shape[1]
    run(entries.reposition, item * n_bytes, a, turn, like)
