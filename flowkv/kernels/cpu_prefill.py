"""Attention of many new tokens on the CPU: gather the context once, then matrix products in torch.

What a row's new tokens see is its past, without any mask, and themselves, causally. Both go through
torch's fused kernel, which takes neither windows nor softcaps nor Dv != D, and merge by their
log-sum-exps. Everything else goes block by block of query tokens, in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from flowkv.kernels.cpu import gather_dense
from flowkv.kernels.operands import Pages, Ragged

QUERY_BLOCK = 128
"""Query tokens of a block: with fewer, the products are thin; with more, scores leave the cache."""


class Switches(NamedTuple):
    """How to attend, and up to how many new tokens a row is not served here."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None
    few_new: int


class Packed(NamedTuple):
    """Packed queries, and where the packed outputs go; `lse` is None where nobody asks for it."""

    q: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor | None


def attend_long(packed: Packed, pages: Pages, batch: Ragged, switches: Switches) -> None:
    """Fill the outputs of the rows that have more than `switches.few_new` new tokens."""
    starts, window = batch.starts.tolist(), switches.window
    layout, (q, out, lse) = pages.layout, packed
    for b, length in enumerate(batch.lengths.tolist()):
        new = starts[b + 1] - starts[b]
        if new <= switches.few_new:
            continue
        seen = length if window is None else min(length, new + window - 1)
        one = batch._replace(rows=batch.rows[b : b + 1], lengths=batch.lengths[b : b + 1])
        k, v = (x.to(q.dtype) for x in gather_dense(pages, one, seen))  # [1, Hk, S, D]
        part = slice(starts[b], starts[b + 1])
        # [T, Hq, D] -> [Hk, G, T, D]: KV heads stand where a batch would, so that K and V expand
        heads = q[part].unflatten(1, (layout.kv_heads, -1)).permute(1, 2, 0, 3)
        plain = switches.softcap is None and seen == length and layout.head_dim == layout.value_dim
        if plain and (window is None or window >= length):
            o, total = _fused(heads, k[0], v[0], switches)
        else:
            o, total = _blocked(heads, k[0], v[0], switches)
        out[part].unflatten(1, (layout.kv_heads, -1)).copy_(o.permute(2, 0, 1, 3))
        if lse is not None:
            lse[part] = total.permute(2, 0, 1).flatten(1)


def _fused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, switches: Switches
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o `[Hk, G, T, Dv]`, lse `[Hk, G, T]`) of q `[Hk, G, T, D]` over k and v `[Hk, S, D]`."""
    new, past = q.shape[2], k.shape[1] - q.shape[2]

    def attend(part: slice, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
        k_part, v_part = (x[:, None, part].expand(-1, q.shape[1], -1, -1) for x in (k, v))
        o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k_part, v_part, 0.0, causal, scale=switches.scale
        )
        return (o.float(), lse) if past or switches.sinks is not None else (o, lse)

    o, lse = attend(slice(past, past + new), True)
    if past:
        o_past, lse_past = attend(slice(past), False)
        share = torch.sigmoid(lse_past - lse)[..., None]
        o, lse = o + share * (o_past - o), torch.logaddexp(lse, lse_past)
    if switches.sinks is not None:
        sinks = switches.sinks.view(q.shape[0], q.shape[1], 1)
        o = o * torch.sigmoid(lse - sinks)[..., None]
        lse = torch.logaddexp(lse, sinks)
    return o, lse


def _blocked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, switches: Switches
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_fused`, with window and softcap; the last new token is the last of k and v."""
    (heads, group, new, _), past = q.shape, k.shape[1] - q.shape[2]
    k, v = k.float().mT, v.float()
    o = torch.empty(heads, group, new, v.shape[2], dtype=torch.float32)
    lse = torch.empty(heads, group, new, dtype=torch.float32)
    for i in range(0, new, QUERY_BLOCK):
        j = min(new, i + QUERY_BLOCK)
        last = torch.arange(past + i, past + j)[:, None]  # the last column that each query sees
        low = 0 if switches.window is None else max(0, past + i - switches.window + 1)
        column = torch.arange(low, past + j)
        hidden = column > last
        if switches.window is not None:
            hidden |= column <= last - switches.window
        s = (q[:, :, i:j].float() * switches.scale).flatten(1, 2) @ k[:, :, low : past + j]
        if switches.softcap is not None:
            s = torch.tanh_(s.div_(switches.softcap)).mul_(switches.softcap)
        s = s.unflatten(1, (group, j - i)).masked_fill_(hidden, -torch.inf)
        total = torch.logsumexp(s, 3)
        if switches.sinks is not None:
            total = torch.logaddexp(total, switches.sinks.view(heads, group, 1))
        p = s.sub_(total[..., None]).exp_().flatten(1, 2)
        o[:, :, i:j] = (p @ v[:, low : past + j]).unflatten(1, (group, j - i))
        lse[:, :, i:j] = total
    return o, lse
