"""The numba twin of `append`: packed new tokens into open pages, as they are or rotated (RoPE)."""

from __future__ import annotations

import numpy as np
import torch

from flowkv.core.layout import PageLayout
from flowkv.kernels.cpu import entries
from flowkv.kernels.cpu.pages import DTYPES, LIKE, address, dense_rows, run
from flowkv.kernels.operands import Pages, Ragged, Rotary


def append(
    k: torch.Tensor, v: torch.Tensor, pages: Pages, batch: Ragged, rope: Rotary | None = None
) -> None:
    """Write new tokens into the open pages; see `dispatch.append`."""
    arena, layout, layer, _ = pages
    dtype = DTYPES[layout.dtype]
    v = dense_rows(v if v.dtype is dtype else v.to(dtype))
    if rope is None:
        k = dense_rows(k if k.dtype is dtype else k.to(dtype))
    else:  # rounded once, after the rotation
        k = dense_rows(k if k.dtype is dtype else k.float())
    a = _append_operands(layout, batch).copy()
    a[0], a[1] = address(k), address(v)
    a[2] = address(arena) + layer * layout.stripe_stride_bytes
    k_item, item, k_strides, v_strides = k.itemsize, dtype.itemsize, k.stride(), v.stride()
    a[15], a[16] = k_strides[0] * k_item, k_strides[1] * k_item
    a[17], a[18] = v_strides[0] * item, v_strides[1] * item
    n_bytes = k.shape[0] * layout.kv_heads * int(a[10] + a[11])
    if rope is None:
        run(entries.append, n_bytes, a)
        return
    turn, likes = rotary_operands(rope, item), (LIKE[k.dtype], LIKE[dtype])
    run(entries.append_rotary, n_bytes, a, turn, likes)


_APPENDED: list[tuple[PageLayout | None, Ragged | None, np.ndarray]] = [(None, None, np.empty(0))]


def _append_operands(layout: PageLayout, batch: Ragged) -> np.ndarray:
    """The operands that all layers of a step share; the others are left 0."""
    last = _APPENDED[0]
    if last[0] is layout and last[1] is batch:
        return last[2]
    item = DTYPES[layout.dtype].itemsize
    a = np.zeros(19, np.int64)
    a[3:15] = (
        address(batch.table),
        address(batch.rows),
        address(batch.lengths),
        address(batch.starts),
        batch.rows.shape[0],
        layout.kv_heads,
        layout.page_size,
        layout.head_dim * item,
        layout.stored_value_dim * item,
        layout.run_bytes,
        layout.v_offset_bytes,
        batch.table.stride(0),
    )
    _APPENDED[0] = layout, batch, a
    return a


def rotary_operands(rope: Rotary, item_bytes: int) -> np.ndarray:
    """The addresses and sizes of `rope` as `cpu.rotary` reads them."""
    return np.array(
        [
            address(rope.cos),
            address(rope.sin),
            rope.cos.shape[1],
            rope.start,
            rope.interleaved,
            item_bytes,
        ],
        np.int64,
    )
