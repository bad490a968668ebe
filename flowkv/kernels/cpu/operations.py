"""Operations of the numba twin; attention runs in numba for few new tokens a row, else in torch.

Tensors become addresses here, without any view of them. The functions of numba that Python calls
are the only ones with machine code cached on disk, stamped with a digest of the sources of all
kernels: numba itself looks only at the file of a function, not at those of the ones it calls.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numba import types

from flowkv.compiled import compiling
from flowkv.compiled.digest import STAMP as DIGEST_STAMP
from flowkv.compiled.machine_code import ahead, kept, kept_callback, pointer
from flowkv.core.errors import ConfigError, GeometryError
from flowkv.core.geometry import CODECS, GRANULE_BYTES, ITEMSIZE, PageLayout
from flowkv.kernels.cpu import attend as fields
from flowkv.kernels.cpu import bits
from flowkv.kernels.cpu import transcode as codecs
from flowkv.kernels.cpu.bits import call, call_team, draw
from flowkv.kernels.operands import Pages, Ragged, Rotary, Scoring, Side

_SOURCES = b"".join(p.read_bytes() for p in sorted(Path(__file__).parent.glob("*.py")))
STAMP = zlib.crc32(_SOURCES, DIGEST_STAMP)
_WORD = np.int64(0)


def entry(function, **options):
    """Return a function as Python calls it, without the lock of the interpreter."""
    return kept(STAMP, nogil=True, error_model="numpy", **options)(function)


def entry_of(part):
    """Return a part of compiled code (`PART`) as Python calls it."""
    return entry(part.py_func, fastmath=part.targetoptions.get("fastmath", False))


@entry
def attend(a, threads, layer, q, q_token, q_head, out):
    """Attend with the queries at q: `threads` of a team, 1 alone, 0 sets operands only.

    Return how many slices are not done, since C functions cannot pass on what a slice raises.
    """
    to = pointer(a, _WORD)
    to[fields.Q], to[fields.Q_TOKEN], to[fields.Q_HEAD] = q, q_token, q_head
    to[fields.LAYER], to[fields.OUT] = layer, out
    to[fields.NEXT] = to[fields.DONE] = 0
    if threads > 1:
        call_team(to[fields.TEAM], to[fields.WORK], a, threads)
    elif threads:
        call(to[fields.WORK], a)
    return to[fields.PARTS] - to[fields.DONE]


@entry
def help_with(a):
    """Draw slices of a call until none is left."""
    call(pointer(a, _WORD)[fields.WORK], a)


@entry
def append_step(a, layer, k, k_token, k_head, v, v_token, v_head):
    """Write one layer's new tokens; operands `a` as of `append`, its arena's first layer."""
    to = pointer(a, _WORD)
    arena = to[2]
    to[0], to[1], to[2], to[15], to[16], to[17], to[18] = (
        k, v, arena + layer, k_token, k_head, v_token, v_head,
    )  # fmt: skip
    bits.append(to, None, None, 0, 1)
    to[2] = arena


_merge, _gather_dense = entry_of(fields.merge), entry_of(fields.gather)
_append, _drop_tokens = entry_of(bits.append), entry_of(bits.drop_tokens)
_reposition = entry_of(bits.reposition)
_checksum, _recode = entry_of(bits.sum_blocks), entry_of(codecs.transcode)
_move_pages, _digest_pages = entry_of(bits.move_pages), entry_of(bits.digest_pages)


@lru_cache(maxsize=None, typed=True)  # zeros of different types are equal
def worker(like_q, like, sealed: bool):
    """Return the C function of an attention call, compiled for these types; see `attend`.

    Args:
        like_q: Type under which elements of q and of the output travel.
        like: Type under which elements of pages travel.
        sealed: Whether pages of other codecs than raw are served.
    """

    def work(address):
        a = pointer(address, _WORD)
        part = draw(ahead(a, fields.NEXT))
        while part < a[fields.PARTS]:
            if sealed:  # a constant: the other branch is not compiled
                fields.attend_any(a, (like_q, like), part)
            else:
                fields.attend_raw(a, (like_q, like), part)
            if draw(ahead(a, fields.DONE)) == a[fields.PARTS] - 1:
                fields.combine(a, like_q)
            part = draw(ahead(a, fields.NEXT))

    with compiling.around():
        return kept_callback(types.void(types.int64), STAMP, error_model="numpy")(work)


# The numba twin of `gather_dense`: raw pages are copied, sealed ones decoded.

DECODING = 8
"""Bytes that are copied in the time of decoding one."""


def gather_dense(pages: Pages, batch: Ragged, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the last `columns` tokens of each row, dense; see `dispatch.gather_dense`."""
    layout = pages.layout
    rows, heads, dtype = batch.rows.shape[0], layout.kv_heads, DTYPES[layout.dtype]
    k = fresh(rows, heads, columns, layout.head_dim, dtype=dtype)
    v = fresh(rows, heads, columns, layout.stored_value_dim, dtype=dtype)
    forms = np.zeros((len(CODECS), 6), np.int64)
    for form in (layout, *pages.sealed):
        number, stripe, *offsets = _offsets(form)
        forms[number] = number, address(pages.arena) + pages.layer * stripe, *offsets
    block = 8 * layout.page_size
    a = operands(
        *(k, v, *batch[:3], rows, heads),
        *(layout.page_size, layout.head_dim, layout.stored_value_dim, k.element_size()),
        *(batch.table.stride(0), columns, block, -(-columns // block), *forms.ravel().tolist()),
    )
    n_bytes = (DECODING if pages.sealed else 1) * (k.nbytes + v.nbytes)
    run(_gather_dense, n_bytes, a, (LIKE[dtype], TOP[dtype]))
    return k, v


# Attention of many new tokens on the CPU: gather the context once, then matrix products in torch.
#
# A row's new tokens see its past, without any mask, and themselves, causally. Both go through
# torch's fused kernel, which takes neither windows nor softcaps nor Dv != D, and merge by their
# log-sum-exps. All other calls go block by block of query tokens, in float32.

QUERY_BLOCK = 128
"""Query tokens of a block: with fewer, the products are thin; with more, scores leave the cache."""


class PackedQueries(NamedTuple):
    """Packed queries, and their packed outputs; `lse` is None unless requested."""

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
    """Attend with q `[Hk, G, T, D]` over k and v `[Hk, S, D]`; return o and lse `[Hk, G, T]`."""
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
    """Part of a row that queries, keys and values belong to.

    Attributes:
        how: Options of the call.
        new: Slice of its new tokens in packed tensors.
        number: Index of the row in the batch.
        first: Position of the first key and value.
        layout: Layout of raw pages.
    """

    how: Scoring
    new: slice
    number: int
    first: int
    layout: PageLayout


def _blocked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, row: RowPart
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend as `_fused` does, with every option, block by block of query tokens."""
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
            high = past + j  # drafts of a tree, which may see any other, are one block
        s = (q[:, :, i:j].float() * how.scale).flatten(1, 2) @ k[:, :, low:high]
        if how.softcap is not None:
            s = torch.tanh_(s.div_(how.softcap)).mul_(how.softcap)
        s = s.unflatten(1, (group, j - i))
        if how.causal:
            own = torch.arange(past + i, past + j, device=s.device)
            column = torch.arange(low, high, device=s.device)
            _place(s, own, column, past, row)
        total = torch.logsumexp(s, 3)
        if how.sinks is not None:
            total = torch.logaddexp(total, how.sinks.view(heads, group, 1))
        least = total.masked_fill(total == -torch.inf, 0.0)  # for a token that sees nothing
        p = s.sub_(least[..., None]).exp_()
        if how.mass is not None:
            _weigh_pages(p.sum((1, 2)), row, row.first + low)
        o[:, :, i:j] = (p.flatten(1, 2) @ v[:, low:high]).unflatten(1, (group, j - i))
        lse[:, :, i:j] = total
    return o, lse


def _place(
    s: torch.Tensor, own: torch.Tensor, column: torch.Tensor, past: int, row: RowPart
) -> None:
    """Bias and mask logits `[Hk, G, T, S]` of queries with own tokens in the columns `own`."""
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
    position = torch.arange(first, first + weights.shape[1], device=weights.device)
    row.how.mass[row.number].index_add_(0, position // row.layout.page_size, weights.T)


FEW_NEW = {torch.float32: 24, torch.bfloat16: 8, torch.float16: 8}
"""Most new tokens a row that attend in numba, beyond in torch, by q's dtype.

The two cross, on a core with AVX-512 and AMX, for 1 to 8 query heads per KV head, 512 to 4096
tokens of context and head dims of 64 and 128, at 16 to 32 new tokens in float32, at 6 to 14 in
bfloat16, where AMX does the products (`bench/bench_kernels.py`, group "crossover").
"""
LATENT_ROWS = 32
"""The same for latents, by query rows: one core reads 4 x 4k latents of 16 heads in half the time
that torch takes."""
_ALL = 1 << 40
LEAST_ATTENDED = 1 << 15
"""Elements of K and V that are worth a slice: 10 us, three times what a team takes to start."""
INVARIANT_TOKENS = 1024
"""Tokens of a piece when rows must not depend on each other: always cut in the same places."""


class Call:
    """Attention calls over the pages and rows of a step, layer by layer. Not thread-safe.

    Args:
        pages: One layer of the pages.
        batch: The rows; those with more than `few` new tokens are left out.
        how: Options of the calls; sinks and slopes are float32.
        heads: Query heads.
        dtype: Dtype of queries and outputs.
        few: Most new tokens of a row.
    """

    __slots__ = ("_held", "_operands", "_parts", "address")

    def __init__(
        self, pages: Pages, batch: Ragged, how: Scoring, heads: int, dtype: torch.dtype, few: int
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
            dim_v = -(-layout.value_dim // fields.LANES) * fields.LANES
            count = items * -(-most_pages // chunk)
            slots = np.empty(count * most_rows * (dim_v + 2), np.float32)
        shares = np.empty(0, np.float32)
        if how.mass is not None:
            shares = np.empty(items * how.mass.shape[1] * 2 * most_rows, np.float32)
            a[fields.PAGES] = how.mass.shape[1]
        a[fields.SINKS : fields.MASS + 1] = operands(how.sinks, how.alibi, how.tree, how.mass)
        a[fields.SHARES], a[fields.SLOTS] = shares.ctypes.data, slots.ctypes.data
        a[fields.CHUNK], a[fields.PARTS] = chunk, parts
        factors = np.array([how.scale, how.softcap or 0.0], np.float32)
        a[fields.SCALE : fields.SOFTCAP + 1] = factors.view(np.int32)
        a[fields.ARENA : fields.WORK] = operands(
            *(pages.arena, batch.table, batch.table.stride(0), *batch[1:4], rows, group),
            *(layout.kv_heads, layout.head_dim, layout.value_dim, layout.value_stride, size),
            *(DTYPES[layout.dtype].itemsize, window, how.causal, most, most_rows),
        )
        for form in (layout, *pages.sealed):
            number, *offsets = _offsets(form)
            start = fields.FORMATS + fields.FORMAT_FIELDS * number
            a[start : start + fields.FORMAT_FIELDS] = offsets
        work = worker(LIKE[dtype], LIKE[DTYPES[layout.dtype]], bool(pages.sealed))
        a[fields.WORK], a[fields.TEAM] = work.address, team()
        self.address = a.ctypes.data
        self._held = slots, shares, how, batch  # addresses do not keep them alive

    def point(self, field: int, x: torch.Tensor) -> None:
        """Set an operand of `fields` to the address of a tensor, which must stay alive."""
        self._operands[field] = address(x)

    def run(self, layer: int, q: int, by_token: int, by_head: int, out: int) -> None:
        """Attend over a layer of the group: q by address and strides, to contiguous outputs."""
        threads = 1 if self._parts == 1 else min(torch.get_num_threads(), self._parts)
        alone = threads > 1 and not team()
        left = attend(self.address, 0 if alone else threads, layer, q, by_token, by_head, out)
        if alone:
            spread(lambda _: help_with(self.address), threads)
            left = self._operands[fields.PARTS] - self._operands[fields.DONE]
        if left:
            raise MemoryError("no memory for the scratch of attention")


def few_new(layout: PageLayout, heads: int, dtype: torch.dtype, how: Scoring) -> int:
    """Return the most new tokens of a row that attend in numba."""
    if not layout.latent:
        return FEW_NEW[dtype]
    # Many query heads make a matrix product of a single token.
    return 0 if how.alibi is not None or how.tree is not None else LATENT_ROWS // heads


def paged_attention(
    q: torch.Tensor, pages: Pages, batch: Ragged, how: Scoring
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend from the new tokens to their rows' pages; see `dispatch.paged_attention`."""
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
    least = min(batch.most_new, batch.starts.numpy()[1]) if len(batch.rows) == 1 else 0
    if few and tokens and least <= few:
        call = Call(pages, batch, how, heads, q.dtype, few)
        if lse is not None:
            call.point(fields.LSE, lse)
        call.run(pages.layer, q.data_ptr(), q.stride(0), q.stride(1), out.data_ptr())
    if batch.most_new > few:
        attend_long(PackedQueries(q, out, lse), pages, batch, how, few)
    if out.dtype is not dtype:
        out = out.to(dtype)
    return out if lse is None else (out, lse)


class Decode:
    """Step of new tokens, prepared once for the calls of all layers of a group.

    It serves tensors of the pages' own dtype on the CPU. Not thread-safe.

    Args:
        pages: One layer of the pages, not latent.
        batch: Rows of one new token each; for `append` alone, of any number.
        window: Tokens that a token sees, itself included; None for all before it.
    """

    def __init__(self, pages: Pages, batch: Ragged, window: int | None) -> None:
        layout, n = pages.layout, int(batch.starts.numpy()[-1])
        self._pages, self._layout, self.batch, self._window = pages, layout, batch, window
        self._dtype = DTYPES[layout.dtype]
        self._operands = append_operands(layout, batch)
        self._operands[2] = address(pages.arena)
        self._address, self._item = self._operands.ctypes.data, self._dtype.itemsize
        n_bytes = n * layout.kv_heads * int(self._operands[10] + self._operands[11])
        if batch.most_new > 1 and slices(n_bytes, LEAST_BYTES) > 1:
            n = -1  # threads share each layer's copy
        self._keys = _token_dims(n, layout.kv_heads, layout.head_dim)
        self._values = _token_dims(n, layout.kv_heads, layout.value_dim)
        self._how: tuple[object, ...] = ()
        self._call: Call
        self._by, self._shape = 0, (0,)

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> bool:
        """Write a layer's new tokens, counted within the group; return False if they do not fit.

        Args:
            layer: The layer.
            k: `[N, Hk, 1, D]`, `[1, Hk, N, D]` or `[N, Hk, D]`.
            v: Likewise, of Dv.
        """
        by_k, by_v = self._keys.get(k.shape), self._values.get(v.shape)
        if by_k is None or by_v is None or not (k.dtype is v.dtype is self._dtype):
            return False
        k_by, v_by, item = k.stride(), v.stride(), self._item
        if k_by[-1] != 1 or v_by[-1] != 1 or not (k.is_cpu and v.is_cpu):
            return False
        append_step(
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
        """Attend with the new tokens; return None if the queries do not fit.

        Args:
            layer: The layer, counted within the group.
            q: `[B, Hq, 1, D]`, `[1, Hq, B, D]` or `[B, Hq, D]`.
            scale: Scale of the logits; default 1 / sqrt(D).
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
            self._call.point(fields.SINKS, sinks)
        out = q.new_empty(self._shape)
        self._call.run(layer, q.data_ptr(), by[self._by], by[1], out.data_ptr())
        return out

    def _prepare(
        self, q: torch.Tensor, scale: float | None, softcap: float | None, plain: bool
    ) -> bool:
        layout, batch, heads = self._layout, self.batch, q.shape[1]
        n = batch.rows.shape[0]
        by = _token_dims(n, heads, layout.head_dim).get(q.shape)
        plain_numbers = all(x is None or isinstance(x, int | float) for x in (scale, softcap))
        if by is None or not heads or heads % layout.kv_heads or not plain_numbers:
            return False
        if softcap is not None and softcap <= 0:
            return False
        how = Scoring(
            scale=layout.head_dim**-0.5 if scale is None else scale,
            window=self._window,
            softcap=softcap,
        )
        self._call = Call(self._pages, batch, how, heads, self._dtype, 1)
        self._how = q.shape, scale, softcap, plain
        lead = (n,) if q.dim() == 3 else (n, 1) if by == 0 else (1, n)
        self._by, self._shape = by, (*lead, heads, layout.value_dim)
        return True


def _token_dims(tokens: int, heads: int, dim: int) -> dict[tuple[int, ...], int]:
    """Return by shape of packed tensors the dim of the tokens."""
    return {(tokens, heads, 1, dim): 0, (1, heads, tokens, dim): 2, (tokens, heads, dim): 0}


# Shared parts of the numba twin, moves of whole pages, and merges.


LIKE = {torch.float32: np.float32(0), torch.bfloat16: np.uint16(0), torch.float16: np.int16(0)}
"""Types under which the elements of a dtype travel through numba; see `cpu.bits`."""
TOP = {dtype: np.float32(torch.finfo(dtype).max) for dtype in LIKE}
"""Saturation of raw elements. Of the three, decoded elements can only exceed float16."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

LEAST_BYTES = 1 << 20
"""Bytes moved that are worth a thread."""
HUGE_BYTES = 1 << 22
"""Least size of numpy arrays that want huge pages."""
_HERE = torch.from_numpy(np.empty(0, np.uint8))
"""A CPU tensor: `new_empty` of it is on the CPU, regardless of torch's default device."""


def address(x: torch.Tensor) -> int:
    """Return the address of a tensor's elements, for compiled code, which does not check it.

    Raises:
        GeometryError: The tensor is not in this process's memory.
    """
    if not x.is_cpu:
        raise GeometryError(
            f"a tensor on {x.device} was given to a kernel of the CPU",
            "Pass tensors on the CPU, and none made under torch.device(...) or set_default_device",
        )
    return x.data_ptr()


def operands(*values: torch.Tensor | float | None) -> np.ndarray:
    """Return operands of compiled code: numbers, addresses of tensors, and 0 for None."""
    numbers = [address(x) if isinstance(x, torch.Tensor) else x or 0 for x in values]
    return np.array(numbers, np.int64)


def dense_rows(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor if the elements of its last dimension are neighbours, else a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def fresh(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised tensor, aligned to 64 bytes.

    Large ones come from numpy, which asks Linux for huge pages: their first writes fault once in
    2 MiB instead of 4 KiB, which makes filling a new tensor nearly twice as fast.
    """
    n_bytes = math.prod(shape) * dtype.itemsize
    if n_bytes < HUGE_BYTES:
        return _HERE.new_empty(shape, dtype=dtype)
    memory = np.empty(n_bytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return torch.from_numpy(memory[start : start + n_bytes]).view(dtype).view(shape)


def move_pages(
    source: Side, target: Side | None, count: int, granules: int, digests: torch.Tensor | None
) -> None:
    """Copy pages, digest their stripes, or both; see `dispatch.move_pages`."""
    places = [
        None if x is None else x.contiguous() for x in (source.places, target and target.places)
    ]
    a = target and target.data, places[1], source.data, places[0], count, granules * GRANULE_BYTES
    n_bytes = count * granules * GRANULE_BYTES
    if not count:
        return
    if digests is None:
        run(_move_pages, n_bytes, operands(*a))
    else:
        run(_digest_pages, n_bytes, operands(*a, digests.shape[1], digests))


def run(kernel, n_bytes: int, *operands: object) -> None:
    """Call `kernel(*operands, part, parts)` for all parts, as many as `n_bytes` justify."""
    parts = slices(n_bytes, LEAST_BYTES)
    if parts == 1:
        kernel(*operands, 0, 1)
    else:
        spread(lambda i: kernel(*operands, i, parts), parts)


def checksum(words: torch.Tensor, block_words: int) -> torch.Tensor:
    """Return two sums over each block; see `dispatch.checksum`."""
    sums = words.new_empty(-(-len(words) // block_words), 2, dtype=torch.int64)
    run(_checksum, 8 * len(words), operands(words, len(words), block_words, sums))
    return sums


def merge(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over disjoint sets of tokens; see `dispatch.merge`."""
    parts = [(o.contiguous(), lse.float().contiguous()) for o, lse in parts]
    first = parts[0][0]
    o, lse = torch.empty_like(first), first.new_empty(first.shape[:2], dtype=torch.float32)
    addresses = [(address(o), address(lse)) for o, lse in [*parts, (o, lse)]]
    a = np.array([(lse.numel(), first.shape[2]), *addresses], np.int64)
    run(_merge, 4 * first.numel() * len(parts), a, LIKE[first.dtype])  # as float32
    return o, lse


# The numba twin of `append`: packed new tokens into open pages, unchanged or rotated (RoPE).


def append(
    k: torch.Tensor, v: torch.Tensor, pages: Pages, batch: Ragged, rope: Rotary | None = None
) -> None:
    """Write new tokens into the open pages; see `dispatch.append`."""
    arena, layout, layer, _ = pages
    dtype = DTYPES[layout.dtype]
    v = dense_rows(v if v.dtype is dtype else v.to(dtype))
    wide = dtype if rope is None else torch.float32  # rounded once, after the rotation
    k = dense_rows(k if k.dtype is dtype else k.to(wide))
    a = append_operands(layout, batch)
    a[0], a[1] = address(k), address(v)
    a[2] = address(arena) + layer * layout.stripe_stride_bytes
    k_item, item, k_strides, v_strides = k.itemsize, dtype.itemsize, k.stride(), v.stride()
    a[15], a[16] = k_strides[0] * k_item, k_strides[1] * k_item
    a[17], a[18] = v_strides[0] * item, v_strides[1] * item
    n_bytes = k.shape[0] * layout.kv_heads * int(a[10] + a[11])
    if rope is None:
        run(_append, n_bytes, a, None, None)
    else:
        turn, likes = rotary_operands(rope, item), (LIKE[k.dtype], LIKE[dtype])
        run(_append, n_bytes, a, turn, likes)


def append_operands(layout: PageLayout, batch: Ragged) -> np.ndarray:
    """Return the operands that all layers of a step share; the others are left 0."""
    item = DTYPES[layout.dtype].itemsize
    a = np.zeros(19, np.int64)
    a[3:15] = operands(
        *(*batch[:4], batch.rows.shape[0], layout.kv_heads, layout.page_size),
        *(layout.head_dim * item, layout.stored_value_dim * item),
        *(layout.run_bytes, layout.v_offset_bytes, batch.table.stride(0)),
    )
    return a


def rotary_operands(rope: Rotary, item_bytes: int) -> np.ndarray:
    """Return the addresses and sizes of `rope` as `cpu.bits` reads them."""
    pairs = rope.cos.shape[1]
    return operands(rope.cos, rope.sin, pairs, rope.start, rope.interleaved, item_bytes)


# The numba twins of the operations that rewrite pages: `drop_tokens` and `reposition`.


def drop_tokens(
    arena: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    keep: torch.Tensor,
    layout: PageLayout,
) -> None:
    """Fill pages with chosen tokens of others; see `dispatch.drop_tokens`."""
    source, target, keep = source.contiguous(), target.contiguous(), keep.contiguous()
    kept, item = keep.shape[2], ITEMSIZE[layout.dtype]
    k_bytes, v_bytes = layout.head_dim * item, layout.stored_value_dim * item
    a = operands(
        *(arena, source, target, keep),
        *(layout.layers, layout.kv_heads, layout.page_size, kept, target.shape[0]),
        *(k_bytes, v_bytes, layout.run_bytes, layout.v_offset_bytes, layout.stripe_stride_bytes),
    )
    run(_drop_tokens, keep.numel() * (k_bytes + v_bytes), a)


def reposition(
    arena: torch.Tensor,
    pages: torch.Tensor,
    turns: torch.Tensor,
    rope: Rotary,
    layout: PageLayout,
    layer: int | None = None,
) -> None:
    """Rotate the keys of pages in place; see `dispatch.reposition`."""
    pages, turns = pages.contiguous(), turns.contiguous()
    item, layers = ITEMSIZE[layout.dtype], layout.layers if layer is None else 1
    a = operands(
        address(arena) + (layer or 0) * layout.stripe_stride_bytes,
        *(pages, turns, pages.shape[0], layers, layout.kv_heads, layout.page_size),
        *(layout.head_dim * item, layout.run_bytes, layout.stripe_stride_bytes),
    )
    turn, like = rotary_operands(rope, item), LIKE[DTYPES[layout.dtype]]
    n_bytes = 4 * pages.shape[0] * layers * layout.kv_heads * layout.page_size * rope.cos.shape[1]
    run(_reposition, item * n_bytes, a, turn, like)


# The numba twin of the codecs: threads share the layers of pages.


def transcode(
    arena: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    old: PageLayout,
    new: PageLayout,
) -> torch.Tensor:
    """Write full pages in another codec; see `dispatch.transcode`."""
    if old.dtype not in DTYPES:
        raise ConfigError(f"pages of {old.dtype} have no numba codec", "Pass backend='reference'")
    count, dtype = len(source), DTYPES[old.dtype]
    status = arena.new_empty(count, old.layers, dtype=torch.int32)
    source, target = source.contiguous(), target.contiguous()
    a = operands(
        *(arena, source, target, status),
        *(count, old.layers, old.kv_heads, old.page_size, old.head_dim, old.value_dim),
        *(*_offsets(old), *_offsets(new)),
    )
    run(_recode, count * old.page_bytes, a, (LIKE[dtype], TOP[dtype]))
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


# Threads for the CPU kernels: a counter from which all draw slices, the caller included.

SLICES_PER_THREAD = 4
"""Slices are drawn, not dealt: a core that is busy elsewhere takes fewer of them."""

_team: int | None = None


def slices(work: int, least: int) -> int:
    """Return into how many slices to cut `work`, none much smaller than `least`; 1 means inline."""
    if work < 2 * least:
        return 1
    threads = torch.get_num_threads()
    return 1 if threads == 1 else min(threads * SLICES_PER_THREAD, work // least)


def team() -> int:
    """Return the address of OpenMP's `GOMP_parallel`; 0 if absent, or after a fork."""
    global _team  # noqa: PLW0603 - found once
    if _team is None:
        found = getattr(ctypes.CDLL(None), "GOMP_parallel", None) if os.name == "posix" else None
        _team = ctypes.cast(found, ctypes.c_void_p).value or 0 if found is not None else 0
    return _team


def spread(run: Callable[[int], object], count: int) -> None:
    """Call `run(i)` for each i < count, on this thread and on helpers; return when all are done."""
    draw = itertools.count()

    def drain() -> None:
        while (i := next(draw)) < count:
            run(i)

    helpers = min(torch.get_num_threads(), count) - 1
    futures = [_executor().submit(drain) for _ in range(helpers)]
    try:
        drain()
    finally:
        for future in futures:  # a helper that never started has nothing left to do
            if not future.cancel():
                future.result()


@cache
def _executor() -> ThreadPoolExecutor:
    """Return the helpers of all callers; a thread begins when no other one is free."""
    return ThreadPoolExecutor((os.cpu_count() or 1) + 4, "flowkv-kernels")


def _forget() -> None:
    """In the child of a fork, forget the threads, which do not survive it."""
    global _team  # noqa: PLW0603 - OpenMP does not survive a fork either
    _team = 0
    _executor.cache_clear()


os.register_at_fork(after_in_child=_forget)
