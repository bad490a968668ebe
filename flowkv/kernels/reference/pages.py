"""The oracle: every kernel operation in plain torch, row after row, accumulated in float64.

Nothing here is fast. It says what the operations mean, serves dtypes and devices without kernels of
their own, and is what the kernels are tested against. Shapes follow the legend in `operands`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from flowkv.core.layout import GRANULE_BYTES, codec_of, granule_of
from flowkv.kernels.operands import Pages, Ragged, Rotary, Scoring
from flowkv.kernels.reference.codec import decoded, narrowed
from flowkv.kernels.reference.rotary import rotated

Partial = tuple[torch.Tensor, torch.Tensor]


def page_views(pages: Pages) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of one layer of the arena by starting granule: K `[g, Hk, P, D]`, V `[g, Hk, P, Dv]`.

    Neighbouring granules overlap; only those at which a page begins mean anything.
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
    """For each row of the batch: its page ids, its length, its slice of packed tensors."""
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
        pages: Where to; the pages that receive tokens must be present.
        batch: Which tokens of which rows.
        rope: Rotations by position, for the keys.
    """
    keys, values = page_views(pages)
    size = pages.layout.page_size
    for granules, length, new in spans(batch):
        first = length - (new.stop - new.start)
        for position in range(first, length):
            g, t, n = granules[position // size], position % size, new.start + position - first
            if rope is None:
                keys[g, :, t] = k[n].to(keys.dtype)
            else:
                line = rope.cos[position], rope.sin[position]
                keys[g, :, t] = rotated(k[n], *line, rope, keys.dtype)
            if not pages.layout.latent:
                values[g, :, t] = v[n].to(values.dtype)


def pages_of(pages: Pages, ids: list[int]) -> Partial:
    """K `[n, Hk, P, D]` and V `[n, Hk, P, Dv]` of present pages of any codecs.

    They have the dtype of raw pages if all of these are raw, else at least float32, in which sealed
    ones decode.
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
            granules = [granule_of(ids[i]) for i in where]
            every_k[where], every_v[where] = decoded(pages.arena, layout, pages.layer, granules)
    return every_k, every_v


def paged_attention(
    q: torch.Tensor, pages: Pages, batch: Ragged, how: Scoring
) -> torch.Tensor | Partial:
    """Attention of the new tokens over their rows' pages; see `dispatch.paged_attention`."""
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
        least = total.masked_fill(total == -torch.inf, 0.0)  # of a token that sees nothing
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
    """Which tokens at positions `seen` [S] each new token, at `position` [T, 1], cannot see."""
    hidden = seen > position
    if tree is not None:
        number = seen - position[0]  # of the new token; negative before them
        bit = tree[:, None] >> number.clamp(min=0) & 1
        hidden = (number >= 0) & (bit == 0)
    if window is not None:
        hidden = hidden | (seen <= position - window)
    return hidden


def merge(parts: Sequence[Partial]) -> Partial:
    """Attention over the union of disjoint sets of tokens, from its parts.

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
    """The last `columns` tokens of each row as k `[B, Hk, columns, D]` and v `[..., Dv]`.

    Right-aligned: a row's last token lies in the last column. Zeros fill the columns before a row
    begins and those of absent pages.
    """
    size, rows = pages.layout.page_size, len(batch.rows)
    views = page_views(pages)
    dense = tuple(
        x.new_zeros(rows, x.shape[1], columns, x.shape[3]) for x in views
    )  # zeros: what no page covers
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


def _frames(arena: torch.Tensor, granules: int) -> torch.Tensor:
    """Overlapping view of an arena by starting granule: `[g, granules * 4096]`."""
    starts = max(0, arena.numel() // GRANULE_BYTES - granules + 1)
    size, stride = (starts, granules * GRANULE_BYTES), (GRANULE_BYTES, 1)
    return arena.as_strided(size, stride, arena.storage_offset())


def _parts(frames: torch.Tensor, part: tuple[int, int] | None) -> torch.Tensor:
    """The same (offset, count) of granules of every frame."""
    if part is None:
        return frames
    first, count = part
    return frames[:, first * GRANULE_BYTES : (first + count) * GRANULE_BYTES]


def copy_pages(
    arena: torch.Tensor, source: torch.Tensor, target: torch.Tensor, granules: int
) -> None:
    """Copy pages of `granules` granules within the arena; no target overlaps another or a source.

    Args:
        arena: uint8 `[bytes]`.
        source: int32 `[n]`, granules at which the pages begin.
        target: int32 `[n]`, granules at which their copies begin.
        granules: Granules of a page.
    """
    frames = _frames(arena, granules)
    for a, b in zip(source.tolist(), target.tolist(), strict=True):
        frames[b] = frames[a]


def gather_pages(
    arena: torch.Tensor,
    source: torch.Tensor,
    granules: int,
    out: torch.Tensor,
    part: tuple[int, int] | None = None,
) -> None:
    """Copy pages of the arena, or `part` of each, side by side into `out`, uint8 `[n, bytes]`."""
    frames = _parts(_frames(arena, granules), part)
    for n, g in enumerate(source.tolist()):
        out[n] = frames[g]


def scatter_pages(
    arena: torch.Tensor,
    target: torch.Tensor,
    granules: int,
    data: torch.Tensor,
    part: tuple[int, int] | None = None,
) -> None:
    """Copy the lines of `data`, uint8 `[n, bytes]`, to pages of the arena, or to `part` of each."""
    frames = _parts(_frames(arena, granules), part)
    for n, g in enumerate(target.tolist()):
        frames[g] = data[n]
