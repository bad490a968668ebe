"""The reference kernels in torch: every operation, plain and slow, that defines the others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from flowkv.core.digest import FIRST, KEYS, SECOND, STEP, WORDS
from flowkv.core.geometry import GRANULE_BYTES, GRANULE_MASK, PageLayout, codec_of
from flowkv.kernels.dispatch import NON_FINITE, OUT_OF_RANGE
from flowkv.kernels.operands import Pages, Ragged, Rotary, Scoring, Side

# Reference of the codecs: every byte of a sealed page, in plain torch, on any device.
#
# Every step is one float32 operation, rounded once, to nearest even, in the order written here. So
# the numba twin and the Triton kernel can write the very same bytes, and do. The formulas, and the
# bounds that follow from them, are derived in docs/explain/codecs.md.
#
# Runs are stacked as `[..., P, D]`: all dims before tokens and head dims are a batch.

FITS = 65520.0
"""Least number that float16 rounds to infinity; all below round to a number."""
HUGE = 2.0**100
"""Least magnitude that is encoded as 0: no codec has a scale for such elements."""

_ROUND = 12582912.0  # 1.5 * 2**23: adding it leaves the nearest integer in the low bits


class Coded(NamedTuple):
    """Quantised elements: integers `q` with their scales, and whether these fit float16.

    Attributes:
        q: int32, of the shape of the input.
        scales: float16, `[..., P]` by token or `[..., D]` by channel.
        over: bool `[...]`: a scale or offset is beyond float16, which saturates instead.
        offsets: float16 `[..., D]`, zero points of the keys of kv4c.
    """

    q: torch.Tensor
    scales: torch.Tensor
    over: torch.Tensor
    offsets: torch.Tensor | None = None


def rint(t: torch.Tensor) -> torch.Tensor:
    """Round half to even where |t| < 2**22; beyond, the result is at least as large."""
    return (t + _ROUND) - _ROUND


def divided(a: torch.Tensor, b: float) -> torch.Tensor:
    """Return the quotient, rounded once: for a plain number, CUDA torch multiplies instead."""
    return a / a.new_tensor(b)


def to_half(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (float16 nearest to x, saturated; whether it saturated)."""
    return x.clamp(-65504.0, 65504.0).to(torch.float16), ~(x.abs() < FITS)


def _reciprocal(s: torch.Tensor) -> torch.Tensor:
    return torch.where(s == 0, s, s.new_tensor(1.0) / s)


def symmetric(x: torch.Tensor, levels: int) -> Coded:
    """Encode each token of `[..., P, D]` by one scale: q from -levels to levels."""
    scales, over = to_half(divided(x.abs().amax(-1), levels))
    r = _reciprocal(scales.float())
    q = rint(x * r[..., None]).clamp(-levels, levels)
    return Coded(q.int(), scales, over.any(-1))


def by_channel(x: torch.Tensor, levels: int = 15) -> Coded:
    """Encode each channel of `[..., P, D]` by a scale and its minimum: q from 0 to levels."""
    low = x.amin(-2)
    offsets, low_over = to_half(low + 0.0)  # no -0: of zeros of both signs either is the minimum
    scales, over = to_half(divided(x.amax(-2) - low, levels))
    r = _reciprocal(scales.float())
    q = rint((x - offsets.float()[..., None, :]) * r[..., None, :]).clamp(0, levels)
    return Coded(q.int(), scales, (low_over | over).any(-1), offsets)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Return the orthonormal Walsh-Hadamard transform of blocks of D; up to rounding, self-inverse.

    A block is the largest power of two that divides D. Butterflies in place, nearest first.
    """
    shape, block = x.shape, x.shape[-1] & -x.shape[-1]
    h = 1
    while h < block:
        u, v = x.reshape(*shape[:-1], -1, 2, h).unbind(-2)
        x = torch.stack((u + v, u - v), -2)
        h *= 2
    return x.reshape(shape) * x.new_tensor(block**-0.5)


def narrowed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return decoded elements as raw ones: to nearest even; float16 saturates.

    The largest float16 may decode to a little more than itself, which must not become infinite.
    """
    return x.clamp(-65504.0, 65504.0).to(dtype) if dtype is torch.float16 else x.to(dtype)


def decoded(
    arena: torch.Tensor, layout: PageLayout, layer: int, granules: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode one layer of some full pages to the numbers that attention uses.

    Args:
        arena: uint8 `[bytes]`.
        layout: Layout of the pages, in any codec.
        layer: Layer within the group.
        granules: First granules of the pages.

    Returns:
        K `[n, Hk, P, D]` and V `[n, Hk, P, Dv]` in float32 (float64 if the pages are), never
        rounded to the dtype of raw pages.
    """
    tokens, dim, dim_v = layout.page_size, layout.head_dim, layout.value_dim
    parts = _parts(_stripes(arena, layout, layer, granules), layout)
    heads = len(granules), layout.kv_heads
    if layout.codec == "raw":
        dtype = getattr(torch, layout.dtype)
        exact = torch.promote_types(dtype, torch.float32)
        k, v = (x.contiguous().view(dtype).to(exact) for x in parts[:2])
        return k.view(*heads, tokens, dim), v.view(*heads, tokens, dim_v)
    k, v = parts[0].unflatten(-1, (tokens, -1)), parts[1].unflatten(-1, (dim_v, -1))
    scales_k, scales_v = (x.contiguous().view(torch.float16).float() for x in parts[2:])
    values = _opened(v, -1) - 8 if layout.spec.v_bits == 4 else v.int() - 128
    if layout.spec.by_channel:
        by, offsets = scales_k.unflatten(-1, (2, 1, dim)).unbind(-3)
        keys = _opened(k, -1) * by + offsets
    elif layout.spec.rotates:
        keys = rotate((_opened(k, -1) - 8) * scales_k[..., None])
    else:
        keys = k.view(torch.int8) * scales_k[..., None]
    return keys, (values * scales_v[..., None, :]).transpose(-1, -2)


def encoded(k: torch.Tensor, v: torch.Tensor, layout: PageLayout) -> tuple[torch.Tensor, ...]:
    """Encode one layer of full pages as bytes.

    Args:
        k: `[n, Hk, P, D]`, float32.
        v: `[n, Hk, P, Dv]`.
        layout: Layout of the pages, in any codec.

    Returns:
        uint8 `[n, stripe_stride_bytes]`, its padding zero, and the status of each page, int32 `[n]`
        (see `dispatch.transcode`).
    """
    finite = k.isfinite().flatten(1).all(1) & v.isfinite().flatten(1).all(1)
    largest = torch.finfo(k.dtype).max if layout.codec == "raw" else HUGE
    over = torch.zeros_like(finite)
    clean = []
    for x in (k, v):
        fits = x.abs() <= largest if layout.codec == "raw" else x.abs() < largest
        over |= ~fits.flatten(1).all(1)
        clean.append(x.where(fits, x.new_zeros(())))
    if layout.codec == "raw":
        dtype = getattr(torch, layout.dtype)
        parts = [_bytes(narrowed(x, dtype)) for x in clean]
        over = torch.zeros_like(over)
    else:
        parts, beyond = _encoded_parts(clean[0], clean[1], layout)
        over |= beyond.any(1)
    stripes = k.new_zeros(len(k), layout.stripe_stride_bytes, dtype=torch.uint8)
    for to, part in zip(_parts(stripes, layout), parts, strict=True):
        to.copy_(part)
    status = torch.where(finite, over.int() * OUT_OF_RANGE, NON_FINITE)
    return stripes, status.int()


def transcode(
    arena: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    old: PageLayout,
    new: PageLayout,
) -> torch.Tensor:
    """Write full pages in another codec; see `dispatch.transcode`."""
    status = arena.new_zeros(len(source), old.layers, dtype=torch.int32)
    granules, places = source.tolist(), target.tolist()
    if not granules:
        return status
    for layer in range(old.layers):
        stripes, status[:, layer] = encoded(*decoded(arena, old, layer, granules), new)
        start = layer * new.stripe_stride_bytes
        for place, stripe in zip(places, stripes, strict=True):
            begin = GRANULE_BYTES * place + start
            arena[begin : begin + new.stripe_stride_bytes] = stripe
    return status


def _encoded_parts(
    k: torch.Tensor, v: torch.Tensor, layout: PageLayout
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return K, V and their scales as bytes `[n, Hk, bytes]`, and runs with too large scales."""
    spec = layout.spec
    values = symmetric(v, spec.v_levels)
    v_q = values.q.transpose(-1, -2)  # [n, Hk, Dv, P]
    v_bytes = _packed(v_q + 8) if spec.v_bits == 4 else v_q + 128
    if spec.by_channel:
        keys = by_channel(k, spec.k_levels)
        assert keys.offsets is not None
        k_bytes, k_scales = _packed(keys.q), torch.cat((keys.scales, keys.offsets), -1)
    elif spec.rotates:
        keys = symmetric(rotate(k), spec.k_levels)
        k_bytes, k_scales = _packed(keys.q + 8), keys.scales
    else:
        keys = symmetric(k, spec.k_levels)
        k_bytes, k_scales = keys.q & 255, keys.scales
    elements = [x.to(torch.uint8).flatten(2) for x in (k_bytes, v_bytes)]
    return [*elements, _bytes(k_scales), _bytes(values.scales)], keys.over | values.over


def _packed(q: torch.Tensor) -> torch.Tensor:
    """Pack nibbles of `[..., n]` into bytes `[..., n / 2]`: i, and i + n / 2 above it."""
    low, high = q.chunk(2, -1)
    return low | high << 4


def _opened(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Unpack bytes of `_packed` to int32."""
    return torch.cat((x & 15, x >> 4), dim).int()


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """View `[n, Hk, ...]` as uint8 `[n, Hk, bytes]`."""
    return x.contiguous().view(*x.shape[:2], math.prod(x.shape[2:])).view(torch.uint8)


def _stripes(
    arena: torch.Tensor, layout: PageLayout, layer: int, granules: list[int]
) -> torch.Tensor:
    """Copy a layer's stripes of some pages: uint8 `[n, stripe_stride_bytes]`."""
    rows = arena.view(-1, GRANULE_BYTES)
    count = layout.stripe_stride_bytes // GRANULE_BYTES
    first = torch.tensor(granules, device=arena.device, dtype=torch.int64) + layer * count
    index = first[:, None] + torch.arange(count, device=arena.device)
    return rows[index].flatten(1)


def _parts(stripes: torch.Tensor, layout: PageLayout) -> tuple[torch.Tensor, ...]:
    """Return views `[n, Hk, bytes]` of K, V and their scales, all but the padding, in stripes."""
    runs = stripes[:, : layout.stripe_bytes].unflatten(1, (layout.kv_heads, layout.run_bytes))
    tokens, dim, dim_v = layout.page_size, layout.head_dim, layout.value_dim
    if layout.codec == "raw":
        item = getattr(torch, layout.dtype).itemsize
        sizes = [tokens * dim * item, tokens * dim_v * item]
    else:
        spec = layout.spec
        sizes = [
            tokens * dim * spec.k_bits // 8,
            tokens * dim_v * spec.v_bits // 8,
            4 * dim if spec.by_channel else 2 * tokens,
            2 * tokens,
        ]
    starts = [0, layout.v_offset_bytes, layout.k_scale_offset_bytes, layout.v_scale_offset_bytes]
    return tuple(runs[..., a : a + n] for a, n in zip(starts, sizes, strict=False))


# Rotation of keys (RoPE) in plain torch; see `operands.Rotary`.


def rotated(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rope: Rotary, dtype: torch.dtype
) -> torch.Tensor:
    """Return `x [..., D]`, its pairs turned by `cos` and `sin`, both `[..., R/2]`, as `dtype`."""
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    end = rope.start + 2 * cos.shape[-1]
    turned = x[..., rope.start : end].to(wide)
    cos, sin = cos.to(wide), sin.to(wide)
    if rope.interleaved:
        a, b = turned[..., ::2], turned[..., 1::2]
    else:
        a, b = turned.chunk(2, -1)
    pair = a * cos - b * sin, b * cos + a * sin
    turned = torch.stack(pair, -1).flatten(-2) if rope.interleaved else torch.cat(pair, -1)
    parts = x[..., : rope.start].to(dtype), turned.to(dtype), x[..., end:].to(dtype)
    return torch.cat(parts, -1)


# Reference of the attention operations in plain torch, row after row, accumulated in float64.
#
# Nothing here is fast. It defines the operations, serves dtypes and devices without kernels of
# their own, and is the expectation in tests of the kernels. Shapes follow the legend in `operands`.

Partial = tuple[torch.Tensor, torch.Tensor]


def page_views(pages: Pages) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of a layer by starting granule: K `[g, Hk, P, D]`, V `[g, Hk, P, Dv]`.

    Neighbouring granules overlap; only those at which a page begins are meaningful.
    """
    arena, layout, layer, _ = pages
    elements = arena.view(getattr(torch, layout.dtype))
    item = elements.element_size()
    starts = (arena.numel() - layout.page_bytes) // GRANULE_BYTES + 1
    start, run = layout.run_offset_bytes(layer, 0) // item, layout.run_bytes // item

    def view(offset_bytes: int, dim: int, row: int) -> torch.Tensor:
        size = (max(starts, 0), layout.kv_heads, layout.page_size, dim)
        stride = (GRANULE_BYTES // item, run, row, 1)
        offset = elements.storage_offset() + start + offset_bytes // item
        return elements.as_strided(size, stride, offset)

    return (
        view(0, layout.head_dim, layout.head_dim),
        view(layout.v_offset_bytes, layout.value_dim, layout.value_stride),
    )


def spans(batch: Ragged) -> Iterator[tuple[list[int], int, slice]]:
    """Yield for each row of the batch its page ids, its length, its slice of packed tensors."""
    starts = batch.starts.tolist()
    rows, lengths = batch.rows.tolist(), batch.lengths.tolist()
    for b, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        yield batch.table[row].tolist(), length, slice(starts[b], starts[b + 1])


def append(
    k: torch.Tensor, v: torch.Tensor, pages: Pages, batch: Ragged, rope: Rotary | None = None
) -> None:
    """Write new tokens into the open pages, at positions `lengths[b] - T_b + j`.

    Args:
        k: `[N, Hk, D]`.
        v: `[N, Hk, Dv]`.
        pages: Target; the pages that receive tokens must be present.
        batch: Rows and tokens to write.
        rope: Rotations by position, for the keys.
    """
    keys, values = page_views(pages)
    size = pages.layout.page_size
    for granules, length, new in spans(batch):
        for n, position in enumerate(range(length - (new.stop - new.start), length), new.start):
            at = granules[position // size], slice(None), position % size
            key = k[n].to(keys.dtype)
            if rope is not None:
                line = rope.cos[position], rope.sin[position]
                key = rotated(k[n], *line, rope, keys.dtype)
            keys[at] = key
            if not pages.layout.latent:
                values[at] = v[n].to(values.dtype)


def pages_of(pages: Pages, ids: list[int]) -> Partial:
    """Return K `[n, Hk, P, D]` and V `[n, Hk, P, Dv]` of present pages of any codecs.

    They have the dtype of raw pages if all of these are raw, else at least float32, the dtype in
    which sealed pages decode.
    """
    views, codecs = page_views(pages), [codec_of(page) for page in ids]
    raw = [i for i, codec in enumerate(codecs) if codec == "raw"]
    places = torch.tensor([ids[i] for i in raw], dtype=torch.int64, device=pages.arena.device)
    k, v = (x[places] for x in views)
    if len(raw) == len(ids):
        return k, v
    exact = torch.promote_types(k.dtype, torch.float32)
    every_k, every_v = (x.new_empty(len(ids), *x.shape[1:], dtype=exact) for x in (k, v))
    every_k[raw], every_v[raw] = k.to(exact), v.to(exact)
    for layout in pages.sealed:
        where = [i for i, codec in enumerate(codecs) if codec == layout.codec]
        if where:
            granules = [ids[i] & GRANULE_MASK for i in where]
            every_k[where], every_v[where] = decoded(pages.arena, layout, pages.layer, granules)
    return every_k, every_v


def paged_attention(
    q: torch.Tensor, pages: Pages, batch: Ragged, how: Scoring
) -> torch.Tensor | Partial:
    """Attend from the new tokens to their rows' pages; see `dispatch.paged_attention`."""
    size, heads, kv_heads = pages.layout.page_size, q.shape[1], pages.layout.kv_heads
    exact = torch.float32 if q.device.type == "mps" else torch.float64
    out = q.new_zeros(q.shape[0], heads, pages.layout.value_dim)
    lse = q.new_full((q.shape[0], heads), -torch.inf, dtype=torch.float32)
    for b, (ids, length, new) in enumerate(spans(batch)):
        count = new.stop - new.start
        if not count:
            continue
        first = 0 if how.window is None else max(0, length - count - how.window + 1) // size
        seen = torch.arange(first * size, length, device=q.device)  # [S]
        # [pages, Hk, P, D] -> [S, Hk, D] -> [Hq, S, D], each KV head serving Hq / Hk neighbours
        k, v = (
            x.transpose(1, 2).flatten(0, 1)[: len(seen)].to(exact).transpose(0, 1)
            .repeat_interleave(heads // kv_heads, 0)
            for x in pages_of(pages, ids[first : -(-length // size)])
        )  # fmt: skip
        s = torch.einsum("thd,hsd->hts", q[new].to(exact), k) * how.scale
        if how.softcap is not None:
            s = how.softcap * torch.tanh(s / how.softcap)
        position = torch.arange(length - count, length, device=q.device)[:, None]  # [T, 1]
        if how.alibi is not None:
            s = s + how.alibi.to(exact)[:, None, None] * (seen - position)
        if how.causal:
            tree = None if how.tree is None else how.tree[new]
            s = s.masked_fill(_hidden(seen, position, how.window, tree), -torch.inf)
        if how.sinks is not None:
            s = torch.cat([s, how.sinks.to(exact)[:, None, None].expand(-1, count, 1)], 2)
        total = torch.logsumexp(s, 2)  # [Hq, T]
        least = total.masked_fill(total == -torch.inf, 0.0)  # for a token that sees nothing
        p = torch.exp(s - least[..., None])[..., : len(seen)]
        out[new] = torch.einsum("hts,hsd->thd", p, v).to(q.dtype)
        lse[new] = total.T.float()
        if how.mass is not None:
            tokens = p.unflatten(0, (kv_heads, -1)).sum((1, 2))  # [Hk, S]
            padded = torch.nn.functional.pad(tokens, (0, -len(seen) % size))
            weights = padded.unflatten(1, (-1, size)).sum(2).T.to(how.mass)  # [pages, Hk]
            how.mass[b, first : first + len(weights)] += weights
    return (out, lse) if how.return_lse else out


def _hidden(
    seen: torch.Tensor, position: torch.Tensor, window: int | None, tree: torch.Tensor | None
) -> torch.Tensor:
    """Return a mask of the positions `seen` [S] hidden from new tokens at `position` [T, 1]."""
    hidden = seen > position
    if tree is not None:
        number = seen - position[0]  # index among the new tokens; negative before them
        bit = tree[:, None] >> number.clamp(min=0) & 1
        hidden = (number >= 0) & (bit == 0)
    if window is not None:
        hidden = hidden | (seen <= position - window)
    return hidden


def merge(parts: Sequence[Partial]) -> Partial:
    """Merge attention over disjoint sets of tokens into that over their union.

    Args:
        parts: `(o [N, Hq, Dv], lse [N, Hq])` each; an lse of -inf marks a part without tokens.
    """
    dtype = parts[0][0].dtype
    exact = torch.float32 if parts[0][0].device.type == "mps" else torch.float64
    lses = torch.stack([lse for _, lse in parts]).to(exact)  # [parts, N, Hq]
    total = torch.logsumexp(lses, 0)
    weights = torch.exp(lses - total).masked_fill(lses == -torch.inf, 0.0)
    o = sum(w[..., None] * o.to(exact) for w, (o, _) in zip(weights, parts, strict=True))
    return o.to(dtype), total.float()


def gather_dense(pages: Pages, batch: Ragged, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the last `columns` tokens of each row: k `[B, Hk, columns, D]` and v `[..., Dv]`.

    Right-aligned: a row's last token is in the last column. Zeros fill the columns before a row
    begins and those of absent pages.
    """
    size, rows = pages.layout.page_size, len(batch.rows)
    views = page_views(pages)
    dense = tuple(x.new_zeros(rows, x.shape[1], columns, x.shape[3]) for x in views)
    for b, (ids, length, _) in enumerate(spans(batch)):
        start = max(0, length - columns)  # first token that has a column
        for p in range(start // size, -(-length // size)):
            if ids[p] < 0:
                continue
            low, high = max(start, p * size), min(length, (p + 1) * size)
            column = columns - length + low
            for to, x in zip(dense, pages_of(pages, ids[p : p + 1]), strict=True):
                part = x[0, :, low - p * size : high - p * size]
                part = part if part.dtype is to.dtype else narrowed(part, to.dtype)
                to[b, :, column : column + high - low] = part
    return dense[0], dense[1]


def move_pages(
    source: Side, target: Side | None, count: int, granules: int, digests: torch.Tensor | None
) -> None:
    """Copy pages, digest their stripes, or both; see `dispatch.move_pages`."""
    pages = _pages_at(source, count, granules)
    if digests is not None:
        for n, page in enumerate(pages):
            digests[n] = _digests_of(page, digests.shape[1])
    if target is not None:
        for to, page in zip(_pages_at(target, count, granules), pages, strict=True):
            to.copy_(page)


def _pages_at(side: Side, count: int, granules: int) -> list[torch.Tensor]:
    """Return views of the bytes of each page."""
    dense = [n * granules for n in range(count)]
    starts = dense if side.places is None else side.places.tolist()
    memory = side.data.view(-1)
    return [memory[GRANULE_BYTES * at :][: GRANULE_BYTES * granules] for at in starts]


def _digests_of(page: torch.Tensor, stripes: int) -> torch.Tensor:
    """Return the digests of the stripes of a page (`core.digest`), int64 `[stripes, 2]`."""
    keys = torch.from_numpy(KEYS.view(np.int64)).to(page.device)
    words = page.clone().view(torch.int64).view(stripes, -1, 1, WORDS)
    x = words + keys  # [stripes, granules of a stripe, 2, WORDS]
    h, k = ((x & 0xFFFFFFFF) * _shifted(x, 32)).sum(-1).unbind(-1)
    place = torch.arange(1, h.shape[1] + 1, device=page.device) * _signed(STEP)
    u = _mixed(h + place)
    one, two = u.sum(1), _mixed(k + u).sum(1)
    n_bytes = h.shape[1] * GRANULE_BYTES
    low = _mixed(one + two + (torch.full_like(one, n_bytes + 1) * _signed(STEP)))
    return torch.stack((low, _mixed(two + low)), -1)


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """Mix the bits of int64; see `core.digest.mix`."""
    x = (x ^ _shifted(x, 32)) * _signed(FIRST)
    x = (x ^ _shifted(x, 29)) * _signed(SECOND)
    return x ^ _shifted(x, 32)


# Reference of the operations that rewrite pages, and of rotation (RoPE).


def drop_tokens(
    arena: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    keep: torch.Tensor,
    layout: PageLayout,
) -> None:
    """Fill pages with chosen tokens of others; see `dispatch.drop_tokens`."""
    size, count = layout.page_size, keep.shape[2]
    heads = torch.arange(layout.kv_heads, device=arena.device)[:, None]
    token = torch.arange(count, device=arena.device)
    to = target.long()[token // size], heads, token % size
    for layer in range(layout.layers):
        chosen = keep[layer].long()  # [Hk, n]
        of = source.long()[chosen // size], heads, chosen % size
        for view in page_views(Pages(arena, layout, layer)):
            view[to] = view[of]


def reposition(
    arena: torch.Tensor,
    pages: torch.Tensor,
    turns: torch.Tensor,
    rope: Rotary,
    layout: PageLayout,
    layer: int | None = None,
) -> None:
    """Rotate the keys of pages in place; see `dispatch.reposition`."""
    for number in range(layout.layers) if layer is None else (layer,):
        keys, _ = page_views(Pages(arena, layout, number))
        for page, turn in zip(pages.tolist(), turns.tolist(), strict=True):
            if turn >= 0:
                keys[page] = rotated(keys[page], rope.cos[turn], rope.sin[turn], rope, keys.dtype)


# Reference of `checksum`, in torch.

_AT_ONCE = 1 << 20
"""Words mixed at a time: temporary tensors stay small beside the weights of a model."""


def checksum(words: torch.Tensor, block_words: int) -> torch.Tensor:
    """Return two sums over each block; see `dispatch.checksum`."""
    sums = words.new_zeros(-(-len(words) // block_words), 2)
    for block, out in zip(words.split(block_words), sums, strict=True):
        for first in range(0, len(block), _AT_ONCE):
            part = block[first : first + _AT_ONCE]
            key = torch.arange(first + 1, first + 1 + len(part), device=words.device)
            key = key * _signed(STEP)
            x = _mixed(part ^ key)
            out[0] += x.sum()
            out[1] += (x * (key | 1)).sum()
    return sums


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    # torch shifts int64 arithmetically: the copies of the sign are masked out.
    return (x >> bits) & ((1 << 64 - bits) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
