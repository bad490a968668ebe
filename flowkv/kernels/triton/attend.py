"""Paged attention and merging of partials on GPUs: choice of kernels and tile sizes, launches.

Grids and scratch depend only on facts that the host has without a look at the device: shapes,
`batch.most_new` and `batch.most_length`. So a call can be captured in a CUDA graph and replayed
after lengths and tables have changed, as long as they stay below the maxima of its capture.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flowkv.kernels.operands import Pages, Ragged, Scoring
from flowkv.kernels.triton.few import decode
from flowkv.kernels.triton.launch import Constants, launch, padded
from flowkv.kernels.triton.many import attend_latents, prefill
from flowkv.kernels.triton.task import Batching, Ends, Switches, Task, element, merge_two, upcast

MOST_COLUMNS = 32
"""Most query rows per KV head of a row that counts as having few new tokens."""

Partial = tuple[torch.Tensor, torch.Tensor]


def paged_attention(
    q: torch.Tensor, pages: Pages, batch: Ragged, how: Scoring
) -> torch.Tensor | Partial:
    """Attend from the new tokens to their rows' pages; see `dispatch.paged_attention`.

    Tokens of q that belong to no row (padding of a captured graph) get no result.

    Raises:
        ConfigError: The pages' dtype or head dimension has no kernel.
    """
    layout, sinks, return_lse = pages.layout, how.sinks, how.return_lse
    tokens, heads, _ = q.shape
    out = q.new_empty(tokens, heads, layout.value_dim)
    asks_lse = return_lse or how.mass is not None  # the mass of a page is relative to it
    lse = q.new_empty(tokens, heads, dtype=torch.float32) if asks_lse else None
    rows, group = batch.rows.shape[0], heads // layout.kv_heads
    few = _few(batch.most_new, group, rows, how.invariant)
    if q.stride(2) != 1:
        q = q.contiguous()
    task = Task(
        q=q,
        pages=pages,
        batch=batch,
        how=how,
        operands=(q, pages.arena.view(element(layout)), *batch[:4]),
        out=out,
        lse=lse,
        numbers=(q.stride(0), q.stride(1), batch.table.stride(0), pages.layer, rows),
        softmax=(how.scale, how.softcap or 0.0),
        layout=layout,
        rows=rows,
        most_pages=-(-batch.most_length // layout.page_size),
        few=few,
        group=group,
        batching=Batching(GROUP=group, FEW=few, ROWS=padded(rows), WINDOW=how.window or 0),
        switches=Switches(
            SOFTCAP=(how.softcap or 0.0) > 0,
            ALIBI=how.alibi is not None,
            TREE=how.tree is not None,
            CAUSAL=how.causal,
            UPCAST=upcast(layout),
        ),
        ends=Ends(SINKS=sinks is not None, LSE=asks_lse),
    )
    if tokens and layout.latent:
        attend_latents(task)
    elif tokens:
        if few:
            decode(task)
        if batch.most_new > few:
            prefill(task)
    return (out, lse) if return_lse and lse is not None else out


def _few(most_new: int, group: int, rows: int, invariant: bool) -> int:
    """Return the most new tokens of a row for the decode kernel; 0: prefill for all."""
    if invariant:  # a row's kernel must not depend on the other rows
        return 1 if group <= MOST_COLUMNS else 0
    few = 1 << max(most_new - 1, 0).bit_length()  # a power of two: fewer kernels to compile
    if few * group <= MOST_COLUMNS:
        return few
    return 1 if rows > 1 and group <= MOST_COLUMNS else 0


def merge(parts: Sequence[Partial]) -> Partial:
    """Merge attention over disjoint sets of tokens, exactly; see `dispatch.merge`."""
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
                *(o, lse, other.contiguous(), other_lse.float().contiguous(), out, out_lse),
                C=Constants(VALUE_DIM=dim, DV=padded(dim)),
                num_warps=1,
            )
        o, lse = out, out_lse
    return o, lse
