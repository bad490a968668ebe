"""Calls of `cpu.mixed`: pages of several codecs, and the rarer switches of attention."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from flowkv.core.layout import CODECS
from flowkv.kernels.cpu import entries
from flowkv.kernels.cpu.attend import SINKS, SLOTS
from flowkv.kernels.cpu.dots import LANES
from flowkv.kernels.cpu.pages import DTYPES, LEAST_ELEMENTS, LIKE, address
from flowkv.kernels.cpu.pool import slices, spread
from flowkv.kernels.cpu.prefill import Packed
from flowkv.kernels.cpu.weigh import (
    ALIBI,
    CAUSAL,
    CHUNK,
    FORMAT_FIELDS,
    FORMATS,
    MASS,
    PAGES,
    SHARES,
)
from flowkv.kernels.operands import Pages, Ragged, Scoring

INVARIANT_TOKENS = 1024
"""Tokens of a piece when rows must not depend on each other: cut for parallelism, but always so."""
_ALL = 1 << 40


def is_mixed(pages: Pages, how: Scoring) -> bool:
    """Whether a call needs more than `cpu.attend` knows."""
    _, _, _, _, alibi, tree, causal, mass, _, invariant = how  # unpacked, for it is faster
    plain = alibi is None and tree is None and mass is None
    return bool(pages.sealed) or not (plain and causal) or invariant


def attend_mixed(packed: Packed, pages: Pages, batch: Ragged, how: Scoring, few: int) -> None:
    """Fill the outputs of the rows that have at most `few` new tokens."""
    q, out, lse = packed
    alibi = None if how.alibi is None else how.alibi.to(torch.float32).contiguous()
    tree = None if how.tree is None else how.tree.contiguous()
    shared = _shared_operands(pages, batch, how, q, few)
    a, parts = shared.operands.copy(), slices(shared.work, LEAST_ELEMENTS)
    items, most_pages, most_rows = shared.items, shared.most_pages, shared.most_rows
    by_token, by_head, _ = q.stride()
    a[:5] = address(q), by_token, by_head, address(out), _address(lse)
    a[SINKS] = _address(how.sinks)
    a[ALIBI : MASS + 1] = _address(alibi), _address(tree), _address(how.mass)
    if how.mass is not None:
        shares = np.empty(items * how.mass.shape[1] * 2 * most_rows, np.float32)
        a[SHARES : PAGES + 1] = shares.ctypes.data, how.mass.shape[1]
    a[FORMATS:] += shared.used * address(pages.arena) + shared.stripes * pages.layer
    if how.invariant:
        chunk = max(1, INVARIANT_TOKENS // pages.layout.page_size)
    else:
        chunk = most_pages if parts == 1 else -(-items * most_pages // (2 * parts))
    a[CHUNK] = chunk = max(1, chunk)
    if most_pages > chunk:
        dim_v = -(-pages.layout.value_dim // LANES) * LANES
        count = items * -(-most_pages // chunk)
        slots = np.empty(count * most_rows * (dim_v + 2), np.float32)
        a[SLOTS] = slots.ctypes.data
    likes = LIKE[q.dtype], LIKE[DTYPES[pages.layout.dtype]]
    factors = float(how.scale), float(how.softcap or 0.0)
    if parts == 1:
        entries.attend_mixed(a, likes, factors, 0, 1)
    else:
        spread(lambda i: entries.attend_mixed(a, likes, factors, i, parts), parts)
    if most_pages > chunk:
        entries.combine_mixed(a, likes[0])


def _address(x: torch.Tensor | None) -> int:
    return 0 if x is None else address(x)


class _Shared(NamedTuple):
    """What the calls of all layers of a step have in common.

    `used` is 1 where the operands from FORMATS on are addresses, to which the arena's is added, and
    `stripes` the bytes from layer to layer there.
    """

    key: tuple[object, ...]
    operands: np.ndarray
    used: np.ndarray
    stripes: np.ndarray
    items: int
    most_rows: int
    most_pages: int
    work: int


_LAST = [_Shared((), np.empty(0), np.empty(0), np.empty(0), 0, 0, 0, 0)]


def _shared_operands(
    pages: Pages, batch: Ragged, how: Scoring, q: torch.Tensor, few: int
) -> _Shared:
    """The operands that do not depend on addresses of a layer's tensors; the others are left 0."""
    layout, heads, last = pages.layout, q.shape[1], _LAST[0]
    key = (layout, pages.sealed, how.window, how.causal, heads, few)
    if last.key[:-1] == key and last.key[-1] is batch:
        return last
    group, most, rows = heads // layout.kv_heads, min(batch.most_new, few), batch.rows.shape[0]
    a = np.zeros(FORMATS + FORMAT_FIELDS * len(CODECS), np.int64)
    a[6:11] = (
        address(batch.table),
        batch.table.stride(0),
        address(batch.rows),
        address(batch.lengths),
        address(batch.starts),
    )
    a[14:26] = (
        rows,
        group,
        layout.kv_heads,
        layout.head_dim,
        layout.value_dim,
        layout.page_size,
        2 if layout.dtype != "float32" else 4,
        layout.run_bytes,
        layout.v_offset_bytes,
        _ALL if how.window is None else how.window,
        most,
        max(most * group, 1),
    )
    a[CAUSAL] = how.causal
    used, stripes = np.zeros((2, FORMAT_FIELDS * len(CODECS)), np.int64)
    for form in (layout, *pages.sealed):
        start = FORMAT_FIELDS * CODECS.index(form.codec)
        used[start], stripes[start] = 1, form.stripe_stride_bytes
        a[FORMATS + start + 1 : FORMATS + start + FORMAT_FIELDS] = (
            form.run_bytes,
            form.v_offset_bytes,
            form.k_scale_offset_bytes,
            form.v_scale_offset_bytes,
        )
    length, size = batch.most_length, layout.page_size
    seen = length if how.window is None else min(length, how.window + most)
    work = rows * layout.kv_heads * seen * (layout.head_dim + layout.value_dim)
    work *= max(1, most * group // 4)
    items, most_rows, most_pages = rows * layout.kv_heads, int(a[25]), -(-seen // size) + 1
    fresh = _Shared((*key, batch), a, used, stripes, items, most_rows, most_pages, work)
    _LAST[0] = fresh
    return fresh
