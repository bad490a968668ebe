"""The numba twin of `gather_dense`: raw pages are copied, sealed ones decoded."""

from __future__ import annotations

import numpy as np
import torch

from flowkv.core.layout import CODECS
from flowkv.kernels.cpu import entries
from flowkv.kernels.cpu.pages import DTYPES, LIKE, address, fresh, run
from flowkv.kernels.operands import Pages, Ragged

TOP = {dtype: np.float32(torch.finfo(dtype).max) for dtype in LIKE}
"""Where decoded elements saturate; of the dtypes of raw pages only float16 is too small for any."""
DECODING = 8
"""Bytes that could be copied in the time that decoding one takes."""


def gather_dense(pages: Pages, batch: Ragged, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The last `columns` tokens of each row, dense; see `dispatch.gather_dense`."""
    layout = pages.layout
    rows, heads, dtype = batch.rows.shape[0], layout.kv_heads, DTYPES[layout.dtype]
    k = fresh(rows, heads, columns, layout.head_dim, dtype=dtype)
    v = fresh(rows, heads, columns, layout.stored_value_dim, dtype=dtype)
    if pages.sealed:
        raw = LIKE[dtype], TOP[dtype]
        a = _mixed_operands(k, v, pages, batch)
        run(entries.gather_mixed, DECODING * (k.nbytes + v.nbytes), a, raw)
    else:
        run(entries.gather_dense, k.nbytes + v.nbytes, _raw_operands(k, v, pages, batch))
    return k, v


def _blocks(columns: int, page_size: int) -> tuple[int, int]:
    """Columns of a unit of work, and such units in a row."""
    block = 8 * page_size
    return block, -(-columns // block)


def _raw_operands(k: torch.Tensor, v: torch.Tensor, pages: Pages, batch: Ragged) -> np.ndarray:
    (arena, layout, layer, _), item, columns = pages, k.element_size(), k.shape[2]
    return np.array(
        [
            address(k),
            address(v),
            address(arena) + layer * layout.stripe_stride_bytes,
            address(batch.table),
            address(batch.rows),
            address(batch.lengths),
            k.shape[0],
            layout.kv_heads,
            layout.page_size,
            layout.head_dim * item,
            layout.stored_value_dim * item,
            layout.run_bytes,
            layout.v_offset_bytes,
            batch.table.stride(0),
            columns,
            *_blocks(columns, layout.page_size),
        ],
        dtype=np.int64,
    )


def _mixed_operands(k: torch.Tensor, v: torch.Tensor, pages: Pages, batch: Ragged) -> np.ndarray:
    layout, columns = pages.layout, k.shape[2]
    forms = np.zeros((len(CODECS), 6), np.int64)
    for form in (layout, *pages.sealed):
        number = CODECS.index(form.codec)
        forms[number] = (
            number,
            address(pages.arena) + pages.layer * form.stripe_stride_bytes,
            form.run_bytes,
            form.v_offset_bytes,
            form.k_scale_offset_bytes,
            form.v_scale_offset_bytes,
        )
    return np.array(
        [
            address(k),
            address(v),
            address(batch.table),
            address(batch.rows),
            address(batch.lengths),
            k.shape[0],
            layout.kv_heads,
            layout.page_size,
            layout.head_dim,
            layout.value_dim,
            k.element_size(),
            batch.table.stride(0),
            columns,
            *_blocks(columns, layout.page_size),
            *forms.ravel().tolist(),
        ],
        dtype=np.int64,
    )
