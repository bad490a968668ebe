"""Paged attention and the merging of partials on GPUs: chooses kernels and tile sizes, launches.

Grids and scratch depend only on what the host knows without asking the device: shapes,
`batch.most_new` and `batch.most_length`. So a call can be captured in a CUDA graph and replayed
after lengths and tables have changed, as long as they stay below the maxima it was captured with.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flowkv.kernels.operands import Pages, Ragged, Scoring
from flowkv.kernels.triton.few import decode
from flowkv.kernels.triton.latent import attend_latents
from flowkv.kernels.triton.launch import launch, padded
from flowkv.kernels.triton.many import prefill
from flowkv.kernels.triton.merge import merge_two
from flowkv.kernels.triton.task import Task, element

MOST_COLUMNS = 32
"""Query rows per KV head up to which a row counts as having few new tokens."""

Partial = tuple[torch.Tensor, torch.Tensor]


def paged_attention(
    q: torch.Tensor, pages: Pages, batch: Ragged, how: Scoring
) -> torch.Tensor | Partial:
    """Attention of the new tokens over their rows' pages; see `dispatch.paged_attention`.

    Tokens of q that belong to no row (padding of a captured graph) get no result.

    Raises:
        ConfigError: The pages' dtype or head dimension has no kernel.
    """
    layout, sinks, return_lse = pages.layout, how.sinks, how.return_lse
    tokens, heads, _ = q.shape
    out = q.new_empty(tokens, heads, layout.value_dim)
    asks_lse = return_lse or how.mass is not None  # a page's weight is relative to it
    lse = q.new_empty(tokens, heads, dtype=torch.float32) if asks_lse else out  # `out`: unused
    rows, group = batch.rows.shape[0], heads // layout.kv_heads
    few = _few(batch.most_new, group, rows, how.invariant)
    if q.stride(2) != 1:
        q = q.contiguous()
    task = Task(
        q=q,
        pages=pages,
        batch=batch,
        how=how,
        operands=(
            q,
            pages.arena.view(element(layout)),
            batch.table,
            batch.rows,
            batch.lengths,
            batch.starts,
        ),
        sinks=out if sinks is None else sinks,
        alibi=out if how.alibi is None else how.alibi,
        tree=out if how.tree is None else how.tree,
        out=out,
        lse=lse,
        numbers=(q.stride(0), q.stride(1), batch.table.stride(0), pages.layer, rows),
        softmax=(how.scale, how.softcap or 0.0),
        layout=layout,
        rows=rows,
        most_pages=-(-batch.most_length // layout.page_size),
        few=few,
        group=group,
        flags={
            "WINDOW": how.window or 0,
            "SINKS": sinks is not None,
            "LSE": asks_lse,
            "ALIBI": how.alibi is not None,
            "TREE": how.tree is not None,
            "CAUSAL": how.causal,
            "INVARIANT": how.invariant,
        },
    )
    if layout.latent:
        if tokens:
            attend_latents(task)
        return (out, lse) if return_lse else out
    if tokens and few:
        decode(task)
    if tokens and batch.most_new > few:
        prefill(task)
    return (out, lse) if return_lse else out


def _few(most_new: int, group: int, rows: int, invariant: bool) -> int:
    """New tokens up to which a row goes to the decode kernel; 0 sends all to the prefill kernel."""
    if invariant:  # the kernel that serves a row must not depend on the others
        return 1 if group <= MOST_COLUMNS else 0
    few = 1 << max(most_new - 1, 0).bit_length()  # a power of two: fewer kernels to compile
    if few * group <= MOST_COLUMNS:
        return few
    return 1 if rows > 1 and group <= MOST_COLUMNS else 0


def merge(parts: Sequence[Partial]) -> Partial:
    """Attention over the union of disjoint sets of tokens, exactly; see `dispatch.merge`."""
    o, lse = parts[0]
    tokens, heads, dim = o.shape
    dtype = o.dtype
    o, lse = o.contiguous(), lse.float().contiguous()
    for i, (other, other_lse) in enumerate(parts[1:], 2):
        # Between two of many merges the sum stays in float32.
        out = o.new_empty(o.shape, dtype=dtype if i == len(parts) else torch.float32)
        out_lse = torch.empty_like(lse)
        if tokens * heads:
            launch(
                merge_two,
                (tokens * heads,),
                o,
                lse,
                other.contiguous(),
                other_lse.float().contiguous(),
                out,
                out_lse,
                DIM=dim,
                DV=padded(dim),
                num_warps=1,
            )
        o, lse = out, out_lse
    return o, lse
