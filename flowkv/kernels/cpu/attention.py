"""Attention of the numba twin: few new tokens a row in numba, many in torch.

As in `cpu`, tensors become addresses without any view of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from flowkv.core.layout import CODECS, PageLayout
from flowkv.kernels.cpu import entries
from flowkv.kernels.cpu.attend import (
    ALIBI,
    CAUSAL,
    CHUNK,
    DIM_V,
    FIELDS,
    FORMAT_FIELDS,
    FORMATS,
    LANES,
    MASS,
    MOST_ROWS,
    OWNERS,
    PAGES,
    SHARES,
    SINKS,
    SLOTS,
)
from flowkv.kernels.cpu.pages import (
    DTYPES,
    LEAST_ELEMENTS,
    LIKE,
    TOP,
    address,
    dense_rows,
    fresh,
    run,
)
from flowkv.kernels.cpu.pool import slices, spread
from flowkv.kernels.operands import Pages, Ragged, Scoring

# The numba twin of `gather_dense`: raw pages are copied, sealed ones decoded.

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


# Attention of many new tokens on the CPU: gather the context once, then matrix products in torch.
#
# What a row's new tokens see is its past, without any mask, and themselves, causally. Both go
# through torch's fused kernel, which takes neither windows nor softcaps nor Dv != D, and merge by
# their log-sum-exps. Everything else goes block by block of query tokens, in float32.

QUERY_BLOCK = 128
"""Query tokens of a block: with fewer, the products are thin; with more, scores leave the cache."""


class PackedQueries(NamedTuple):
    """Packed queries, and where the packed outputs go; `lse` is None where nobody asks for it."""

    q: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor | None


def attend_long(packed: PackedQueries, pages: Pages, batch: Ragged, how: Scoring, few: int) -> None:
    """Fill the outputs of the rows that have more than `few` new tokens."""
    starts, window = batch.starts.tolist(), how.window
    layout, (q, out, lse) = pages.layout, packed
    rare = (how.softcap, how.alibi, how.tree, how.mass)
    fusable = all(x is None for x in rare) and layout.head_dim == layout.value_dim
    for b, length in enumerate(batch.lengths.tolist()):
        new = starts[b + 1] - starts[b]
        if new <= few:
            continue
        seen = length if window is None else min(length, new + window - 1)
        one = batch._replace(rows=batch.rows[b : b + 1], lengths=batch.lengths[b : b + 1])
        k, v = (x.to(q.dtype) for x in gather_dense(pages, one, seen))  # [1, Hk, S, D]
        v = k[..., : layout.value_dim] if layout.latent else v
        part = slice(starts[b], starts[b + 1])
        # [T, Hq, D] -> [Hk, G, T, D]: KV heads stand where a batch would, so that K and V expand
        heads = q[part].unflatten(1, (layout.kv_heads, -1)).permute(1, 2, 0, 3)
        if fusable and seen and (window is None or window >= length):
            o, total = _fused(heads, k[0], v[0], how)
        else:
            o, total = _blocked(heads, k[0], v[0], RowPart(how, part, b, length - seen, layout))
        out[part].unflatten(1, (layout.kv_heads, -1)).copy_(o.permute(2, 0, 1, 3))
        if lse is not None:
            lse[part] = total.permute(2, 0, 1).flatten(1)


def _fused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o `[Hk, G, T, Dv]`, lse `[Hk, G, T]`) of q `[Hk, G, T, D]` over k and v `[Hk, S, D]`."""
    new = q.shape[2] if how.causal else 0
    past = k.shape[1] - new

    def attend(part: slice, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
        k_part, v_part = (x[:, None, part].expand(-1, q.shape[1], -1, -1) for x in (k, v))
        o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k_part, v_part, 0.0, causal, scale=how.scale
        )
        return (o.float(), lse) if past or how.sinks is not None else (o, lse)

    if new:
        o, lse = attend(slice(past, past + new), True)
    if past:
        o_past, lse_past = attend(slice(past), False)
        if new:
            share = torch.sigmoid(lse_past - lse)[..., None]
            o, lse = o + share * (o_past - o), torch.logaddexp(lse, lse_past)
        else:
            o, lse = o_past, lse_past
    if how.sinks is not None:
        sinks = how.sinks.view(q.shape[0], q.shape[1], 1)
        o = o * torch.sigmoid(lse - sinks)[..., None]
        lse = torch.logaddexp(lse, sinks)
    return o, lse


class RowPart(NamedTuple):
    """Of which row the queries, keys and values are, and where in it.

    Attributes:
        how: The switches of the call.
        new: Its new tokens in packed tensors.
        number: Its number in the batch.
        first: Position of the first key and value.
        layout: Of raw pages.
    """

    how: Scoring
    new: slice
    number: int
    first: int
    layout: PageLayout


def _blocked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, row: RowPart
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_fused`, with every switch, block by block of query tokens."""
    (heads, group, new, _), how = q.shape, row.how
    past = k.shape[1] - new if how.causal else 0
    k, v = k.float().mT, v.float()
    o = q.new_empty(heads, group, new, v.shape[2], dtype=torch.float32)
    lse = q.new_empty(heads, group, new, dtype=torch.float32)
    for i in range(0, new, QUERY_BLOCK):
        j = min(new, i + QUERY_BLOCK)
        low, high = 0, k.shape[2]
        if how.causal:
            low = 0 if how.window is None else max(0, past + i - how.window + 1)
            high = past + j  # drafts of a tree, of which any may be seen, are one block
        s = (q[:, :, i:j].float() * how.scale).flatten(1, 2) @ k[:, :, low:high]
        if how.softcap is not None:
            s = torch.tanh_(s.div_(how.softcap)).mul_(how.softcap)
        s = s.unflatten(1, (group, j - i))
        if how.causal:
            own, column = (
                torch.arange(*x, device=s.device) for x in ((past + i, past + j), (low, high))
            )
            _place(s, own, column, past, row)
        total = torch.logsumexp(s, 3)
        if how.sinks is not None:
            total = torch.logaddexp(total, how.sinks.view(heads, group, 1))
        least = total.masked_fill(total == -torch.inf, 0.0)  # of a token that sees nothing
        p = s.sub_(least[..., None]).exp_()
        if how.mass is not None:
            _weigh_pages(p.sum((1, 2)), row, row.first + low)
        o[:, :, i:j] = (p.flatten(1, 2) @ v[:, low:high]).unflatten(1, (group, j - i))
        lse[:, :, i:j] = total
    return o, lse


def _place(
    s: torch.Tensor, own: torch.Tensor, column: torch.Tensor, past: int, row: RowPart
) -> None:
    """Bias and mask logits `[Hk, G, T, S]` of queries whose own tokens have the columns `own`."""
    how, own = row.how, own[:, None]
    if how.alibi is not None:
        s += how.alibi.float().view(*s.shape[:2], 1, 1) * (column - own)
    hidden = column > own
    if how.tree is not None:
        bits = how.tree[row.new][own - past]
        hidden = (column >= past) & (bits >> (column - past).clamp(min=0) & 1 == 0)
    if how.window is not None:
        hidden |= column <= own - how.window
    s.masked_fill_(hidden, -torch.inf)


def _weigh_pages(weights: torch.Tensor, row: RowPart, first: int) -> None:
    """Add the weights `[Hk, S]` of tokens from position `first` on to the mass of their pages."""
    assert row.how.mass is not None
    page = (
        torch.arange(first, first + weights.shape[1], device=weights.device) // row.layout.page_size
    )
    row.how.mass[row.number].index_add_(0, page, weights.T)


# Calls of `cpu.attend`: pages of several codecs, and the rarer switches of attention.

INVARIANT_TOKENS = 1024
"""Tokens of a piece when rows must not depend on each other: cut for parallelism, but always so."""


def is_mixed(pages: Pages, how: Scoring) -> bool:
    """Whether a call needs more than `cpu.attend` knows."""
    _, _, _, _, alibi, tree, causal, mass, _, invariant = how  # unpacked, for it is faster
    plain = alibi is None and tree is None and mass is None
    return bool(pages.sealed) or not (plain and causal) or invariant


def attend_mixed(
    packed: PackedQueries, pages: Pages, batch: Ragged, how: Scoring, few: int
) -> None:
    """Fill the outputs of the rows that have at most `few` new tokens."""
    q, out, lse = packed
    alibi = None if how.alibi is None else how.alibi.to(torch.float32).contiguous()
    tree = None if how.tree is None else how.tree.contiguous()
    shared = _mixed_call_shared_operands(pages, batch, how, q, few)
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


def _call_operands(
    layout: PageLayout, batch: Ragged, heads: int, window: int | None, most: int, fields: int
) -> tuple[np.ndarray, int, int]:
    """(Operands of a call that all layers share, the others 0; tokens that a row sees; work)."""
    group, rows = heads // layout.kv_heads, batch.rows.shape[0]
    a = np.zeros(fields, np.int64)
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
        layout.head_dim,
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
    elements = rows * layout.kv_heads * seen * (layout.head_dim + layout.value_dim)
    return a, seen, elements * max(1, most * group // 4)


class _mixed_call_Shared(NamedTuple):
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


_MIXED_CALL_LAST = [_mixed_call_Shared((), np.empty(0), np.empty(0), np.empty(0), 0, 0, 0, 0)]


def _mixed_call_shared_operands(
    pages: Pages, batch: Ragged, how: Scoring, q: torch.Tensor, few: int
) -> _mixed_call_Shared:
    """The operands that do not depend on addresses of a layer's tensors; the others are left 0."""
    layout, heads, last = pages.layout, q.shape[1], _MIXED_CALL_LAST[0]
    key = (layout, pages.sealed, how.window, how.causal, heads, few)
    if last.key[:-1] == key and last.key[-1] is batch:
        return last
    most, rows = min(batch.most_new, few), batch.rows.shape[0]
    fields = FORMATS + FORMAT_FIELDS * len(CODECS)
    a, seen, work = _call_operands(layout, batch, heads, how.window, most, fields)
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
    items, most_pages = rows * layout.kv_heads, -(-seen // layout.page_size) + 1
    most_rows = int(a[MOST_ROWS])
    fresh = _mixed_call_Shared((*key, batch), a, used, stripes, items, most_rows, most_pages, work)
    _MIXED_CALL_LAST[0] = fresh
    return fresh


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
        attend_mixed(PackedQueries(q, out, lse), pages, batch, how, few)
    elif few:
        _attend_raw(PackedQueries(q, out, lse), pages, batch, how, few)
    if batch.most_new > few:
        attend_long(PackedQueries(q, out, lse), pages, batch, how, few)
    if out.dtype is not dtype:
        out = out.to(dtype)
    return out if lse is None else (out, lse)


def _attend_raw(packed: PackedQueries, pages: Pages, batch: Ragged, how: Scoring, few: int) -> None:
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
    most = min(batch.most_new, served[1])
    a, _, work = _call_operands(layout, batch, heads, window, most, FIELDS)
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
