"""Attention of the numba twin: few new tokens a row in numba, many in torch.

As in `cpu`, tensors become addresses without any view of them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from flowkv.core.geometry import CODECS, PageLayout
from flowkv.kernels.cpu import attend as fields
from flowkv.kernels.cpu import entries
from flowkv.kernels.cpu.attend import FORMAT_FIELDS, FORMATS, LANES
from flowkv.kernels.cpu.pages import (
    DTYPES,
    LIKE,
    TOP,
    address,
    append_operands,
    dense_rows,
    fresh,
    run,
)
from flowkv.kernels.cpu.pool import slices, spread, team
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
    block = 8 * layout.page_size
    a = np.array(
        [
            address(k),
            address(v),
            address(batch.table),
            address(batch.rows),
            address(batch.lengths),
            rows,
            heads,
            layout.page_size,
            layout.head_dim,
            layout.stored_value_dim,
            k.element_size(),
            batch.table.stride(0),
            columns,
            block,
            -(-columns // block),
            *forms.ravel().tolist(),
        ],
        dtype=np.int64,
    )
    n_bytes = (DECODING if pages.sealed else 1) * (k.nbytes + v.nbytes)
    run(entries.gather_dense, n_bytes, a, (LIKE[dtype], TOP[dtype]))
    return k, v


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
LEAST_ATTENDED = 1 << 15
"""Elements of K and V that are worth a slice: 10 us, three times what a team takes to start."""
MOST_OUTPUT_BYTES = 1 << 20
"""Of the outputs of several layers that are made at once."""
INVARIANT_TOKENS = 1024
"""Tokens of a piece when rows must not depend on each other: cut for parallelism, but always so."""


class Call:
    """Attention calls over the pages and rows of a step, layer by layer. Not thread-safe.

    Args:
        pages: One layer of the pages.
        batch: The rows; those with more than `few` new tokens are left out.
        how: The switches; sinks and slopes are float32.
        heads: Query heads.
        dtype: Of queries and outputs.
        few: Most new tokens of a row.
    """

    __slots__ = ("_held", "_operands", "_parts", "address", "short")

    def __init__(
        self,
        pages: Pages,
        batch: Ragged,
        how: Scoring,
        heads: int,
        dtype: torch.dtype,
        few: int,
    ) -> None:
        layout, rows, most = pages.layout, batch.rows.shape[0], min(batch.most_new, few)
        group, size = heads // layout.kv_heads, layout.page_size
        items, most_rows = rows * layout.kv_heads, max(most * group, 1)
        window = _ALL if how.window is None else how.window
        seen = min(batch.most_length, window + most)
        work = items * seen * (layout.head_dim + layout.value_dim) * max(1, most_rows // 4)
        self._parts = parts = slices(work, LEAST_ATTENDED)
        a = self._operands = np.zeros(fields.FIELDS, np.int64)
        most_pages = -(-seen // size) + 1
        chunk = most_pages if parts == 1 else -(-items * most_pages // (2 * parts))
        if how.invariant:
            chunk = INVARIANT_TOKENS // size
        chunk = max(1, chunk)
        slots = np.empty(0, np.float32)
        if most_pages > chunk:
            dim_v = -(-layout.value_dim // LANES) * LANES
            count = items * -(-most_pages // chunk)
            slots = np.empty(count * most_rows * (dim_v + 2), np.float32)
        shares = np.empty(0, np.float32)
        if how.mass is not None:
            shares = np.empty(items * how.mass.shape[1] * 2 * most_rows, np.float32)
            a[fields.PAGES] = how.mass.shape[1]
        a[fields.SINKS : fields.MASS + 1] = (
            _address(how.sinks),
            _address(how.alibi),
            _address(how.tree),
            _address(how.mass),
        )
        a[fields.SHARES], a[fields.SLOTS] = shares.ctypes.data, slots.ctypes.data
        a[fields.CHUNK], a[fields.PARTS] = chunk, parts
        factors = np.array([how.scale, how.softcap or 0.0], np.float32)
        a[fields.SCALE : fields.SOFTCAP + 1] = factors.view(np.int32)
        a[fields.ARENA : fields.WORK] = (
            address(pages.arena),
            address(batch.table),
            batch.table.stride(0),
            address(batch.rows),
            address(batch.lengths),
            address(batch.starts),
            rows,
            group,
            layout.kv_heads,
            layout.head_dim,
            layout.value_dim,
            layout.value_stride,
            size,
            DTYPES[layout.dtype].itemsize,
            window,
            how.causal,
            most,
            most_rows,
        )
        for form in (layout, *pages.sealed):
            start = FORMATS + FORMAT_FIELDS * CODECS.index(form.codec)
            a[start : start + FORMAT_FIELDS] = (
                form.stripe_stride_bytes,
                form.run_bytes,
                form.v_offset_bytes,
                form.k_scale_offset_bytes,
                form.v_scale_offset_bytes,
            )
        worker = entries.worker(LIKE[dtype], LIKE[DTYPES[layout.dtype]], bool(pages.sealed))
        a[fields.WORK], a[fields.TEAM] = worker.address, team()
        self.address, self.short = a.ctypes.data, parts == 1
        self._held = slots, shares, how, batch  # addresses do not keep them alive

    def attend(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        """Attends over a layer, counted within its group: `[N, Hq, D]` to contiguous outputs."""
        by_token, by_head, _ = q.stride()
        self.run(layer, q.data_ptr(), by_token, by_head, out.data_ptr())

    def sink(self, sinks: torch.Tensor) -> None:
        """Lets later calls weigh other sinks, float32 `[Hq]`, that live as long."""
        self._operands[fields.SINKS] = address(sinks)

    def normalise(self, lse: torch.Tensor) -> None:
        """Lets later calls write their normalisers, float32 `[N, Hq]`."""
        self._operands[fields.LSE] = address(lse)

    def run(self, layer: int, q: int, by_token: int, by_head: int, out: int) -> None:
        """`attend` with addresses and strides."""
        threads = 1 if self._parts == 1 else min(torch.get_num_threads(), self._parts)
        alone = threads > 1 and not team()
        entries.attend(self.address, 0 if alone else threads, layer, q, by_token, by_head, out)
        if alone:
            spread(lambda _: entries.help_with(self.address), threads)


def _address(x: torch.Tensor | None) -> int:
    return 0 if x is None else address(x)


def few_new(layout: PageLayout, heads: int, dtype: torch.dtype, how: Scoring) -> int:
    """Up to how many new tokens of a row attend in numba."""
    if not layout.latent:
        return FEW_NEW[dtype]
    # Many query heads make a matrix product of a single token.
    return 0 if how.alibi is not None or how.tree is not None else LATENT_ROWS // heads


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
    how = how._replace(
        sinks=None if how.sinks is None else how.sinks.to(torch.float32).contiguous(),
        alibi=None if how.alibi is None else how.alibi.to(torch.float32).contiguous(),
        tree=None if how.tree is None else how.tree.contiguous(),
    )
    few = few_new(layout, heads, q.dtype, how)
    if few and tokens:
        call = Call(pages, batch, how, heads, q.dtype, few)
        if lse is not None:
            call.normalise(lse)
        call.attend(pages.layer, q, out)
    if batch.most_new > few:
        attend_long(PackedQueries(q, out, lse), pages, batch, how, few)
    if out.dtype is not dtype:
        out = out.to(dtype)
    return out if lse is None else (out, lse)


class Decode:
    """One new token of each row, over all layers of a group: what each layer's call has left to do.

    Serves tensors of the pages' own dtype on the CPU. Not thread-safe.

    Args:
        pages: One layer of the pages, not latent.
        batch: Rows of one new token each.
        window: Tokens that a token sees, itself included; None for all before it.
    """

    def __init__(self, pages: Pages, batch: Ragged, window: int | None) -> None:
        layout, n = pages.layout, batch.rows.shape[0]
        self._pages, self._layout, self.batch, self._window = pages, layout, batch, window
        self._dtype = DTYPES[layout.dtype]
        self._operands = append_operands(layout, batch)
        self._operands[2] = address(pages.arena)
        self._address, self._item = self._operands.ctypes.data, self._dtype.itemsize
        self._keys = _token_dims(n, layout.kv_heads, layout.head_dim)
        self._values = _token_dims(n, layout.kv_heads, layout.value_dim)
        self._how: tuple[object, ...] = ()
        self._call: Call
        self._by, self._shape = 0, (0,)
        self._outs: list[torch.Tensor] = []

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> bool:
        """Writes the new tokens of a layer, counted within the group; False if they do not fit.

        Args:
            layer: The layer.
            k: `[B, Hk, 1, D]`, `[1, Hk, B, D]` or `[B, Hk, D]`.
            v: The same of Dv.
        """
        by_k, by_v = self._keys.get(k.shape), self._values.get(v.shape)
        if by_k is None or by_v is None or not (k.dtype is v.dtype is self._dtype):
            return False
        k_by, v_by, item = k.stride(), v.stride(), self._item
        if k_by[-1] != 1 or v_by[-1] != 1 or not (k.is_cpu and v.is_cpu):
            return False
        entries.append_step(
            self._address,
            layer * self._layout.stripe_stride_bytes,
            k.data_ptr(),
            k_by[by_k] * item,
            k_by[1] * item,
            v.data_ptr(),
            v_by[by_v] * item,
            v_by[1] * item,
        )
        return True

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Attends with the new tokens; None if the queries do not fit.

        Args:
            layer: The layer, counted within the group.
            q: `[B, Hq, 1, D]`, `[1, Hq, B, D]` or `[B, Hq, D]`.
            scale: Of the logits; default 1 / sqrt(D).
            softcap: c in `c * tanh(s / c)` on scaled logits.
            sinks: `[Hq]`, logits that join each softmax's denominator.

        Returns:
            `[B, 1, Hq, Dv]`, `[1, B, Hq, Dv]` or `[B, Hq, Dv]`.
        """
        by, plain = q.stride(), sinks is None
        if q.dtype is not self._dtype or by[-1] != 1 or not q.is_cpu:
            return None
        if self._how != (q.shape, scale, softcap, plain) and not self._prepare(
            q, scale, softcap, plain
        ):
            return None
        if sinks is not None:
            fits = sinks.dtype is torch.float32 and sinks.is_cpu and sinks.is_contiguous()
            if not fits or sinks.shape != (q.shape[1],):
                return None
            self._call.sink(sinks)
        out = self._outs.pop() if self._outs else self._fresh(q)
        if self._call.short:
            where = self._call.address
            entries.attend(where, 1, layer, q.data_ptr(), by[self._by], by[1], out.data_ptr())
        else:
            self._call.run(layer, q.data_ptr(), by[self._by], by[1], out.data_ptr())
        return out

    def _prepare(
        self, q: torch.Tensor, scale: float | None, softcap: float | None, plain: bool
    ) -> bool:
        layout, batch, heads = self._layout, self.batch, q.shape[1]
        n = batch.rows.shape[0]
        by = _token_dims(n, heads, layout.head_dim).get(q.shape)
        if by is None or heads % layout.kv_heads:
            return False
        how = Scoring(
            scale=layout.head_dim**-0.5 if scale is None else scale,
            window=self._window,
            softcap=softcap,
        )
        self._call = Call(self._pages, batch, how, heads, self._dtype, 1)
        self._how = q.shape, scale, softcap, plain
        lead = (n,) if q.dim() == 3 else (n, 1) if by == 0 else (1, n)
        self._by, self._shape, self._outs = by, (*lead, heads, layout.value_dim), []
        return True

    def _fresh(self, q: torch.Tensor) -> torch.Tensor:
        """An output; those of later layers are made with it, which costs less than one by one."""
        most = MOST_OUTPUT_BYTES // (math.prod(self._shape) * self._item)
        count = max(1, min(self._layout.layers, most))
        self._outs = list(q.new_empty(count, *self._shape).unbind(0))
        return self._outs.pop()


def _token_dims(tokens: int, heads: int, dim: int) -> dict[tuple[int, ...], int]:
    """In which dim of packed tensors of these shapes tokens follow each other."""
    return {(tokens, heads, 1, dim): 0, (1, heads, tokens, dim): 2, (tokens, heads, dim): 0}
