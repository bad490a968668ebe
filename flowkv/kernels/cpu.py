"""The numba twin, all but attention: what a CPU without a GPU beside it runs.

The functions here turn tensors into addresses (no views, so that a call costs microseconds), decide
whether the work is worth more than one thread, and call the kernels of `cpu_move` and `cpu_merge`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from flowkv.core.layout import GRANULE_BYTES, PageLayout
from flowkv.kernels import cpu_entries as entries
from flowkv.kernels.cpu_pool import slices, spread
from flowkv.kernels.operands import Pages, Ragged

LIKE = {
    torch.float32: np.float32(0),
    torch.bfloat16: np.uint16(0),
    torch.float16: np.int16(0),
}
"""Under which type the elements of a dtype travel through numba; see `cpu_bits`."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

LEAST_ELEMENTS = 1 << 18
"""Elements of K and V that are worth a thread: 50 to 100 us, far more than waking one."""
LEAST_BYTES = 1 << 20
"""Bytes moved that are worth a thread."""
HUGE_BYTES = 1 << 22
"""From this size on numpy's arrays want huge pages."""


def dense_rows(x: torch.Tensor) -> torch.Tensor:
    """The tensor itself if the elements of its last dimension are neighbours, or a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def fresh(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor, aligned to 64 bytes.

    Large ones come from numpy, which asks Linux for huge pages: their first writes fault once in
    2 MiB instead of 4 KiB, which makes filling a new tensor nearly twice as fast.
    """
    n_bytes = math.prod(shape) * dtype.itemsize
    if n_bytes < HUGE_BYTES:
        return torch.empty(shape, dtype=dtype)
    memory = np.empty(n_bytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return torch.from_numpy(memory[start : start + n_bytes]).view(dtype).view(shape)


def append(k: torch.Tensor, v: torch.Tensor, pages: Pages, batch: Ragged) -> None:
    """Write new tokens into the open pages; see `dispatch.append`."""
    arena, layout, layer, _ = pages
    dtype = DTYPES[layout.dtype]
    k, v = (
        dense_rows(k if k.dtype is dtype else k.to(dtype)),
        dense_rows(v if v.dtype is dtype else v.to(dtype)),
    )
    a = _append_operands(layout, batch).copy()
    a[0], a[1] = k.data_ptr(), v.data_ptr()
    a[2] = arena.data_ptr() + layer * layout.stripe_stride_bytes
    item, k_strides, v_strides = dtype.itemsize, k.stride(), v.stride()
    a[15], a[16] = k_strides[0] * item, k_strides[1] * item
    a[17], a[18] = v_strides[0] * item, v_strides[1] * item
    _run(entries.append, a, k.shape[0] * layout.kv_heads * int(a[10] + a[11]))


_APPENDED: list[tuple[PageLayout | None, Ragged | None, np.ndarray]] = [(None, None, np.empty(0))]


def _append_operands(layout: PageLayout, batch: Ragged) -> np.ndarray:
    """The operands that all layers of a step share; the others are left 0."""
    last = _APPENDED[0]
    if last[0] is layout and last[1] is batch:
        return last[2]
    item = DTYPES[layout.dtype].itemsize
    a = np.zeros(19, np.int64)
    a[3:15] = (
        batch.table.data_ptr(),
        batch.rows.data_ptr(),
        batch.lengths.data_ptr(),
        batch.starts.data_ptr(),
        batch.rows.shape[0],
        layout.kv_heads,
        layout.page_size,
        layout.head_dim * item,
        layout.value_dim * item,
        layout.run_bytes,
        layout.v_offset_bytes,
        batch.table.stride(0),
    )
    _APPENDED[0] = layout, batch, a
    return a


def gather_dense(pages: Pages, batch: Ragged, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The last `columns` tokens of each row, dense; see `dispatch.gather_dense`."""
    arena, layout, layer, _ = pages
    rows, heads, dtype = batch.rows.shape[0], layout.kv_heads, DTYPES[layout.dtype]
    k = fresh(rows, heads, columns, layout.head_dim, dtype=dtype)
    v = fresh(rows, heads, columns, layout.value_dim, dtype=dtype)
    item = k.element_size()
    block = 8 * layout.page_size  # columns of a unit of work
    a = np.array(
        [
            k.data_ptr(),
            v.data_ptr(),
            arena.data_ptr() + layer * layout.stripe_stride_bytes,
            batch.table.data_ptr(),
            batch.rows.data_ptr(),
            batch.lengths.data_ptr(),
            rows,
            heads,
            layout.page_size,
            layout.head_dim * item,
            layout.value_dim * item,
            layout.run_bytes,
            layout.v_offset_bytes,
            batch.table.stride(0),
            columns,
            block,
            -(-columns // block),
        ],
        dtype=np.int64,
    )
    _run(entries.gather_dense, a, k.nbytes + v.nbytes)
    return k, v


def copy_pages(
    arena: torch.Tensor, source: torch.Tensor, target: torch.Tensor, granules: int
) -> None:
    """Copy pages within the arena; see `dispatch.copy_pages`."""
    _move((arena, target.contiguous()), (arena, source.contiguous()), granules)


def gather_pages(
    arena: torch.Tensor, source: torch.Tensor, granules: int, out: torch.Tensor
) -> None:
    """Copy pages of the arena side by side; see `dispatch.gather_pages`."""
    _move((out, None), (arena, source.contiguous()), granules)


def scatter_pages(
    arena: torch.Tensor, target: torch.Tensor, granules: int, data: torch.Tensor
) -> None:
    """Copy lines of a staging tensor to pages of the arena; see `dispatch.scatter_pages`."""
    _move((arena, target.contiguous()), (data, None), granules)


_Side = tuple[torch.Tensor, torch.Tensor | None]


def _move(target: _Side, source: _Side, granules: int) -> None:
    places = target[1] if target[1] is not None else source[1]
    count, page = 0 if places is None else places.shape[0], granules * GRANULE_BYTES
    address = [
        0 if x is None else x.data_ptr() for x in (target[0], target[1], source[0], source[1])
    ]
    if count:
        _run(entries.move_pages, np.array([*address, count, page], np.int64), count * page)


def _run(kernel, a: np.ndarray, n_bytes: int) -> None:
    parts = slices(n_bytes, LEAST_BYTES)
    if parts == 1:
        kernel(a, 0, 1)
    else:
        spread(lambda i: kernel(a, i, parts), parts)


def merge(
    parts: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of disjoint sets of tokens; see `dispatch.merge`."""
    parts = [(o.contiguous(), lse.float().contiguous()) for o, lse in parts]
    first = parts[0][0]
    o, lse = torch.empty_like(first), torch.empty(first.shape[:2], dtype=torch.float32)
    addresses = [(o.data_ptr(), lse.data_ptr()) for o, lse in [*parts, (o, lse)]]
    a = np.array([(lse.numel(), first.shape[2]), *addresses], np.int64)
    count, like = slices(first.numel() * len(parts), LEAST_ELEMENTS), LIKE[first.dtype]
    if count == 1:
        entries.merge(a, like, 0, 1)
    else:
        spread(lambda i: entries.merge(a, like, i, count), count)
    return o, lse
