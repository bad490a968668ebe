"""The oracle: every kernel operation in plain torch, row after row, accumulated in float64.

Nothing here is fast. It says what the operations mean, serves dtypes and devices without kernels of
their own, and is what the kernels are tested against. Shapes follow the legend in `operands`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from flowkv.core.layout import GRANULE_BYTES
from flowkv.kernels.operands import Pages, Ragged, Scoring

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

    def view(offset_bytes: int, dim: int) -> torch.Tensor:
        size = (max(starts, 0), layout.kv_heads, layout.page_size, dim)
        stride = (GRANULE_BYTES // item, run, dim, 1)
        offset = elements.storage_offset() + start + offset_bytes // item
        return elements.as_strided(size, stride, offset)

    return view(0, layout.head_dim), view(layout.v_offset_bytes, layout.value_dim)


def spans(batch: Ragged) -> Iterator[tuple[list[int], int, slice]]:
    """For each row of the batch: its granules, its length, its slice of packed tensors."""
    starts = batch.starts.tolist()
    rows, lengths = batch.rows.tolist(), batch.lengths.tolist()
    for b, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        yield batch.table[row].tolist(), length, slice(starts[b], starts[b + 1])


def append(k: torch.Tensor, v: torch.Tensor, pages: Pages, batch: Ragged) -> None:
    """Write new tokens into the open pages, at positions `lengths[b] - T_b + j`.

    Args:
        k: `[N, Hk, D]`.
        v: `[N, Hk, Dv]`.
        pages: Where to; the pages that receive tokens must be present.
        batch: Which tokens of which rows.
    """
    keys, values = page_views(pages)
    size = pages.layout.page_size
    for granules, length, new in spans(batch):
        first = length - (new.stop - new.start)
        for position in range(first, length):
            g, t, n = granules[position // size], position % size, new.start + position - first
            keys[g, :, t] = k[n].to(keys.dtype)
            values[g, :, t] = v[n].to(values.dtype)


def paged_attention(
    q: torch.Tensor, pages: Pages, batch: Ragged, how: Scoring
) -> torch.Tensor | Partial:
    """Attention of the new tokens over their rows' pages; see `dispatch.paged_attention`."""
    window, softcap, sinks = how.window, how.softcap, how.sinks
    keys, values = page_views(pages)
    size, heads = pages.layout.page_size, q.shape[1]
    exact = torch.float32 if q.device.type == "mps" else torch.float64
    out = q.new_zeros(q.shape[0], heads, values.shape[3])
    lse = q.new_full((q.shape[0], heads), -torch.inf, dtype=torch.float32)
    for granules, length, new in spans(batch):
        count = new.stop - new.start
        if not count:
            continue
        position = torch.arange(length - count, length, device=q.device)  # [T]
        first = 0 if window is None else max(0, length - count - window + 1) // size
        index = torch.tensor(granules[first : -(-length // size)], device=q.device)
        seen = torch.arange(first * size, length, device=q.device)  # [S]
        # [pages, Hk, P, D] -> [S, Hk, D] -> [Hq, S, D], each KV head serving Hq / Hk neighbours
        k, v = (
            x[index].transpose(1, 2).flatten(0, 1)[: len(seen)].to(exact).transpose(0, 1)
            .repeat_interleave(heads // x.shape[1], 0)
            for x in (keys, values)
        )  # fmt: skip
        s = torch.einsum("thd,hsd->hts", q[new].to(exact), k) * how.scale
        if softcap is not None:
            s = softcap * torch.tanh(s / softcap)
        hidden = seen[None] > position[:, None]
        if window is not None:
            hidden |= seen[None] <= position[:, None] - window
        s = s.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            s = torch.cat([s, sinks.to(exact)[:, None, None].expand(-1, count, 1)], 2)
        total = torch.logsumexp(s, 2)  # [Hq, T]
        p = torch.exp(s - total[..., None])[..., : len(seen)]
        out[new] = torch.einsum("hts,hsd->thd", p, v).to(q.dtype)
        lse[new] = total.T.float()
    return (out, lse) if how.return_lse else out


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
    for b, (granules, length, _) in enumerate(spans(batch)):
        start = max(0, length - columns)  # first token that has a column
        for p in range(start // size, -(-length // size)):
            if granules[p] < 0:
                continue
            low, high = max(start, p * size), min(length, (p + 1) * size)
            column = columns - length + low
            for to, x in zip(dense, views, strict=True):
                part = x[granules[p], :, low - p * size : high - p * size]
                to[b, :, column : column + high - low] = part
    return dense[0], dense[1]


def _frames(arena: torch.Tensor, granules: int) -> torch.Tensor:
    """Overlapping view of an arena by starting granule: `[g, granules * 4096]`."""
    starts = max(0, arena.numel() // GRANULE_BYTES - granules + 1)
    size, stride = (starts, granules * GRANULE_BYTES), (GRANULE_BYTES, 1)
    return arena.as_strided(size, stride, arena.storage_offset())


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
    arena: torch.Tensor, source: torch.Tensor, granules: int, out: torch.Tensor
) -> None:
    """Copy pages of the arena side by side into `out`, uint8 `[n, granules * 4096]`."""
    frames = _frames(arena, granules)
    for n, g in enumerate(source.tolist()):
        out[n] = frames[g]


def scatter_pages(
    arena: torch.Tensor, target: torch.Tensor, granules: int, data: torch.Tensor
) -> None:
    """Copy the lines of `data`, uint8 `[n, granules * 4096]`, to pages of the arena."""
    frames = _frames(arena, granules)
    for n, g in enumerate(target.tolist()):
        frames[g] = data[n]
