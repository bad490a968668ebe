"""Attention of many new tokens on the CPU: gather the context once, then matrix products in torch.

What a row's new tokens see is its past, without any mask, and themselves, causally. Both go through
torch's fused kernel, which takes neither windows nor softcaps nor Dv != D, and merge by their
log-sum-exps. Everything else goes block by block of query tokens, in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from flowkv.core.layout import PageLayout
from flowkv.kernels.cpu.gather import gather_dense
from flowkv.kernels.operands import Pages, Ragged, Scoring

QUERY_BLOCK = 128
"""Query tokens of a block: with fewer, the products are thin; with more, scores leave the cache."""


class Packed(NamedTuple):
    """Packed queries, and where the packed outputs go; `lse` is None where nobody asks for it."""

    q: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor | None


def attend_long(packed: Packed, pages: Pages, batch: Ragged, how: Scoring, few: int) -> None:
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
            o, total = _blocked(heads, k[0], v[0], Row(how, part, b, length - seen, layout))
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


class Row(NamedTuple):
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
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, row: Row
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


def _place(s: torch.Tensor, own: torch.Tensor, column: torch.Tensor, past: int, row: Row) -> None:
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


def _weigh_pages(weights: torch.Tensor, row: Row, first: int) -> None:
    """Add the weights `[Hk, S]` of tokens from position `first` on to the mass of their pages."""
    assert row.how.mass is not None
    page = (
        torch.arange(first, first + weights.shape[1], device=weights.device) // row.layout.page_size
    )
    row.how.mass[row.number].index_add_(0, page, weights.T)
