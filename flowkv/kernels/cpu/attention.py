"""Attention of the numba twin: few new tokens a row in numba, many in torch.

As in `cpu`, tensors become addresses without any view of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from flowkv.core.layout import PageLayout
from flowkv.kernels.cpu import entries
from flowkv.kernels.cpu.attend import DIM_V, FIELDS, MOST_ROWS, OWNERS, SLOTS
from flowkv.kernels.cpu.mixed_call import attend_mixed, is_mixed
from flowkv.kernels.cpu.pages import DTYPES, LEAST_ELEMENTS, LIKE, address, dense_rows
from flowkv.kernels.cpu.pool import slices, spread
from flowkv.kernels.cpu.prefill import Packed, attend_long
from flowkv.kernels.operands import Pages, Ragged, Scoring

FEW_NEW = {torch.float32: 24, torch.bfloat16: 8, torch.float16: 8}
"""Up to so many new tokens a row attends in numba, beyond in torch, by q's dtype.

Where the two meet on a core with AVX-512 and AMX, for 1 to 8 query heads per KV head, 512 to 4096
tokens of context and head dims of 64 and 128: at 16 to 32 new tokens in float32, at 6 to 14 in
bfloat16, whose products AMX takes (`bench/bench_kernels.py`, group "crossover").
"""
LATENT_ROWS = 32
"""The same for latents, by query rows: one core reads 4 x 4k latents of 16 heads in half the time
that torch takes."""
_ALL = 1 << 40


def paged_attention(
    q: torch.Tensor, pages: Pages, batch: Ragged, how: Scoring
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of the new tokens over their rows' pages; see `dispatch.paged_attention`."""
    dtype, layout = q.dtype, pages.layout
    if dtype is not torch.float32 and dtype is not DTYPES[layout.dtype]:
        q = q.float()  # so that numba compiles for few pairs of types
    q = dense_rows(q)
    tokens, heads, _ = q.shape
    out = q.new_empty(tokens, heads, layout.value_dim)
    lse = q.new_empty(tokens, heads, dtype=torch.float32) if how.return_lse else None
    if how.sinks is not None:
        how = how._replace(sinks=how.sinks.to(torch.float32).contiguous())
    few = FEW_NEW[q.dtype]
    mixed = is_mixed(pages, how)
    if layout.latent:  # many query heads make a matrix product of a single token
        few = 0 if mixed else LATENT_ROWS // heads
    if mixed and few:
        attend_mixed(Packed(q, out, lse), pages, batch, how, few)
    elif few:
        _attend_raw(Packed(q, out, lse), pages, batch, how, few)
    if batch.most_new > few:
        attend_long(Packed(q, out, lse), pages, batch, how, few)
    if out.dtype is not dtype:
        out = out.to(dtype)
    return out if lse is None else (out, lse)


def _attend_raw(packed: Packed, pages: Pages, batch: Ragged, how: Scoring, few: int) -> None:
    """Fill the outputs of the rows that have up to `few` new tokens, over raw pages."""
    (arena, layout, layer, _), (q, out, lse) = pages, packed
    shared = _shared_operands(layout, batch, q.shape[1], how.window, (q.dtype, few))
    a = shared.operands.copy()
    strides = q.stride()
    a[0], a[1], a[2], a[3] = address(q), strides[0], strides[1], address(out)
    a[5] = address(arena) + layer * layout.stripe_stride_bytes
    if lse is not None:
        a[4] = address(lse)
    if how.sinks is not None:
        a[11] = address(how.sinks)
    likes = LIKE[q.dtype], LIKE[DTYPES[layout.dtype]]
    factors = float(how.scale), float(how.softcap or 0.0)
    parts = slices(shared.work, LEAST_ELEMENTS)
    if parts == 1:
        entries.attend(a, likes, factors, 0, 1)
    else:
        _attend_parts(a, likes, factors, parts)


class _Shared(NamedTuple):
    """What the calls of all layers of a step have in common."""

    layout: PageLayout | None
    batch: Ragged | None
    switches: tuple[int, int | None, tuple[torch.dtype, int]] | None
    operands: np.ndarray
    work: int


_LAST = [_Shared(None, None, None, np.empty(0), 0)]


def _shared_operands(
    layout: PageLayout,
    batch: Ragged,
    heads: int,
    window: int | None,
    served: tuple[torch.dtype, int],
) -> _Shared:
    """The operands that do not depend on the layer; the others are left 0."""
    last, switches = _LAST[0], (heads, window, served)
    if last.layout is layout and last.batch is batch and last.switches == switches:
        return last
    group, most = heads // layout.kv_heads, min(batch.most_new, served[1])
    dim, rows = layout.head_dim, batch.rows.shape[0]
    a = np.zeros(FIELDS, np.int64)
    a[6:11] = (
        address(batch.table),
        batch.table.stride(0),
        address(batch.rows),
        address(batch.lengths),
        address(batch.starts),
    )
    a[14:27] = (
        rows,
        group,
        layout.kv_heads,
        dim,
        layout.value_dim,
        layout.page_size,
        2 if layout.dtype != "float32" else 4,
        layout.run_bytes,
        layout.v_offset_bytes,
        _ALL if window is None else window,
        most,
        max(most * group, 1),
        layout.value_stride,
    )
    seen = batch.most_length if window is None else min(batch.most_length, window + most)
    elements = rows * layout.kv_heads * seen * (dim + layout.value_dim)
    work = elements * max(1, most * group // 4)
    fresh = _LAST[0] = _Shared(layout, batch, switches, a, work)
    return fresh


def _attend_parts(
    a: np.ndarray,
    likes: tuple[Any, Any],
    factors: tuple[float, float],
    parts: int,
) -> None:
    slots = np.empty(2 * parts * a[MOST_ROWS] * (a[DIM_V] + 2), np.float32)
    owners = np.full(2 * parts, -1, np.int64)
    a[SLOTS], a[OWNERS] = slots.ctypes.data, owners.ctypes.data
    spread(lambda i: entries.attend(a, likes, factors, i, parts), parts)
    entries.combine(a, likes[0], parts)
