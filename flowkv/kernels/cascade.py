"""Attention over a prefix that many rows share: its pages are read once, not once for each row.

Made of what there is already. The queries of all rows of a group attend over the shared pages as if
they were the new tokens of one row, without a causal mask, for they all lie behind it; each row
attends over the rest of its pages as always; the two partials merge (Ye et al., "Cascade
Inference", flashinfer.ai 2024; Juravsky et al., "Hydragen", arXiv 2402.05099).
"""

from __future__ import annotations

import math

import torch

from flowkv.core.errors import GeometryError
from flowkv.kernels import bounds
from flowkv.kernels.cascade_plan import Cascade
from flowkv.kernels.dispatch import choose, lossiest
from flowkv.kernels.operands import Pages, Ragged, Scoring
from flowkv.kernels.registry import ANY, resolve

Partial = tuple[torch.Tensor, torch.Tensor]


def cascade_attention(  # noqa: PLR0913 - the switches of attention belong to one call
    q: torch.Tensor,
    pages: Pages,
    batch: Ragged,
    shared: Cascade,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    tree: torch.Tensor | None = None,
    return_lse: bool = False,
    invariant: bool = False,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`paged_attention`, reading the pages that a group of rows shares once for all of them.

    Partials are kept in float32, so that the result is as exact as the flat one; on CPUs in q's
    dtype, which rounds twice.

    Args:
        q: `[N, Hq, D]`, packed by tokens.
        pages: One layer of the pages, of any codecs.
        batch: Which tokens of which rows.
        shared: What its rows share, `plan_cascade(batch, ...)`.
        scale: Of the logits; default 1 / sqrt(D).
        window: Only if no row is longer: what a window hides differs from row to row.
        softcap: c in `c * tanh(s / c)` on scaled logits.
        sinks: `[Hq]`, logits that join each softmax's denominator.
        tree: int64 `[N]`, bit j: the token sees new token j of its row.
        return_lse: Return the natural-log normaliser too, the sink included, for `merge`.
        invariant: As for `paged_attention`, among batches in which a row's group is the same.
        backend: "reference", "cpu" or "triton"; default by device and dtype.

    Returns:
        `[N, Hq, Dv]` in q's dtype; with `return_lse` also float32 `[N, Hq]`.

    Raises:
        GeometryError: An operand has the wrong shape, dtype or device, the plan is of another step,
            or a window cuts rows off.
        ConfigError: No such backend or codec.
    """
    layout = pages.layout
    bounds.check_queries(q, pages, batch)
    if shared.batch is not batch:
        raise GeometryError(
            "the plan is of another step",
            "Make one for this: plan each step, plan_cascade(batch, ...)",
        )
    if window is not None and window < batch.most_length:
        raise GeometryError(
            f"a cascade with window={window} and rows of {batch.most_length} tokens",
            "Call paged_attention: rows of a group would see different parts of what they share",
        )
    how = Scoring(
        scale=1.0 / math.sqrt(layout.head_dim) if scale is None else scale,
        softcap=softcap,
        sinks=sinks,
        tree=tree,
        return_lse=return_lse,
        invariant=invariant,
    )
    bounds.check_scoring(how, q, pages, batch)
    backend = backend or choose(q.device, q.dtype, page_dtype=layout.dtype)
    return resolve("cascade_attention", ANY, backend)(q, pages, batch, shared, how)


def on_reference(
    q: torch.Tensor, pages: Pages, batch: Ragged, shared: Cascade, how: Scoring
) -> torch.Tensor | Partial:
    """The oracle: two calls of `reference.paged_attention`, merged."""
    return _attend("reference", q, pages, batch, shared, how)


def on_cpu(
    q: torch.Tensor, pages: Pages, batch: Ragged, shared: Cascade, how: Scoring
) -> torch.Tensor | Partial:
    """The twin: two calls of `cpu.attention.paged_attention`, merged."""
    return _attend("cpu", q, pages, batch, shared, how)


def on_triton(
    q: torch.Tensor, pages: Pages, batch: Ragged, shared: Cascade, how: Scoring
) -> torch.Tensor | Partial:
    """On GPUs: two calls of `triton.attend.paged_attention`, merged."""
    return _attend("triton", q, pages, batch, shared, how)


def _attend(
    backend: str, q: torch.Tensor, pages: Pages, batch: Ragged, shared: Cascade, how: Scoring
) -> torch.Tensor | Partial:
    attend = resolve("paged_attention", lossiest(pages), backend)
    if shared.prefix is None:
        return attend(q, pages, batch, how)
    wide = torch.promote_types(q.dtype, torch.float32)
    exact = q if backend == "cpu" else q.to(wide)  # there, it would cost the 16-bit products
    o, lse = attend(exact, pages, shared.suffix, how._replace(return_lse=True))
    some = slice(None) if shared.tokens is None else shared.tokens
    above = how._replace(causal=False, tree=None, sinks=None, return_lse=True)
    parts = (o[some], lse[some]), attend(exact[some], pages, shared.prefix, above)
    merged_o, merged_lse = resolve("merge", ANY, backend)(parts)
    if shared.tokens is None:
        o, lse = merged_o, merged_lse
    else:
        o[some], lse[some] = merged_o, merged_lse
    o = o.to(q.dtype)
    return (o, lse) if how.return_lse else o
