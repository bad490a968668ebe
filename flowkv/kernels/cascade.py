"""Attention over a prefix that many rows share: its pages are read once, not once for each row.

It combines existing kernels. The queries of all rows of a group attend over the shared pages as if
they were the new tokens of one row, without a causal mask, since they all follow the prefix; each
row attends over the rest of its pages as usual; the two partials merge (Ye et al., "Cascade
Inference", flashinfer.ai 2024; Juravsky et al., "Hydragen", arXiv 2402.05099).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from flowkv.core.errors import GeometryError
from flowkv.kernels.dispatch import ANY, check_queries, check_scoring, choose, lossiest, resolve
from flowkv.kernels.operands import Pages, Ragged, Scoring, sent

# Split of a step into a shared prefix per group of rows, and the rest of each row.
#
# A plan is made on the host, once per step, and is valid as long as the tables do not change: a
# captured CUDA graph may be replayed with other lengths only while every group shares the pages it
# was planned with.
#
# There is one level: where all rows share a little and some share more, rows are cut into the
# groups that save the most reads.

Ints = NDArray[np.int64]

LEAST_TOKENS = 4096
"""Reads of tokens that a group must save: about as long as the launches it takes (16 MB)."""


class Group(NamedTuple):
    """Neighbouring rows of a batch, `first` to `end - 1`, that begin with the same pages."""

    first: int
    end: int
    pages: int


class Cascade(NamedTuple):
    """Plan of a step: the shared prefixes of its rows, and the remaining suffixes.

    Attributes:
        batch: The step it was planned for.
        groups: Groups of rows, and how many pages each shares.
        prefix: A row for each group, over its shared pages; its new tokens are those of all its
            rows. None without groups.
        suffix: The rows, without the shared pages.
        tokens: int64, the packed tokens of rows in groups; None if all tokens are.
    """

    batch: Ragged
    groups: tuple[Group, ...]
    prefix: Ragged | None
    suffix: Ragged
    tokens: torch.Tensor | None


def shared_prefixes(lines: Ints, full: Ints, page_size: int, least_tokens: int) -> list[Group]:
    """Return the groups of neighbouring rows that save the most reads of pages.

    Args:
        lines: `[B, pages]`, page ids of each row; -1 for none.
        full: `[B]`, pages of each row that are wholly before its new tokens.
        page_size: Tokens P of a page.
        least_tokens: Least (rows - 1) * shared tokens of a group.
    """
    rows, columns = lines.shape
    if rows < 2 or not columns:
        return []
    same = (lines[1:] == lines[:-1]) & (lines[1:] >= 0)
    common = np.where(same.all(1), columns, same.argmin(1))  # pages shared with the row before
    common = np.minimum(common, np.minimum(full[1:], full[:-1]))
    groups, first = [], 0
    for row in range(1, rows + 1):
        if row == rows or common[row - 1] == 0:
            groups += _best_cuts(common[first : row - 1], first)
            first = row
    return [g for g in groups if (g.end - g.first - 1) * g.pages * page_size >= least_tokens]


def _best_cuts(common: Ints, first: int) -> list[Group]:
    """Cut a run of rows into groups; `common` counts pages shared with the row before."""
    count = len(common) + 1
    if count == 1 or common.min() == common.max():  # one system prompt: the usual case
        return [Group(first, first + count, int(common[0]))] if count > 1 else []
    best, cut = np.zeros(count + 1, np.int64), np.zeros(count + 1, np.int64)
    for end in range(1, count + 1):
        # A group [i, end) shares the least that its neighbours do; a single row saves nothing.
        depth = np.minimum.accumulate(common[: end - 1][::-1])[::-1]
        spared = best[:end] + np.append(depth * np.arange(end - 1, 0, -1), 0)
        cut[end] = int(spared.argmax())
        best[end] = spared[cut[end]]
    groups, end = [], count
    while end:
        begin = int(cut[end])
        if end - begin > 1:
            groups.append(Group(first + begin, first + end, int(common[begin : end - 1].min())))
        end = begin
    return groups[::-1]


def plan_cascade(
    batch: Ragged,
    page_size: int,
    *,
    host: Ragged | None = None,
    groups: Sequence[Group] | None = None,
    least_tokens: int = LEAST_TOKENS,
) -> Cascade:
    """Find the prefixes that neighbouring rows of a step share; called once per step.

    Args:
        batch: The step.
        page_size: Tokens P of a page.
        host: The same batch on the CPU; default: a copy, which waits for a GPU.
        groups: Shared prefixes, ascending, if the caller knows them; default: found in the table.
        least_tokens: Reads of tokens that a group must save.

    Raises:
        GeometryError: Groups overlap, or their rows do not share so many full pages.
    """
    table, *others = (x.numpy(force=True) for x in (host or batch)[:4])
    rows, lengths, starts = (x.astype(np.int64) for x in others)
    lines, full = table[rows].astype(np.int64), (lengths - np.diff(starts)) // page_size
    if groups is None:
        groups = shared_prefixes(lines, full, page_size, least_tokens)
    else:
        _check_groups(groups, lines, full)
    skipped = np.zeros(len(rows), np.int64)
    for group in groups:
        skipped[group.first : group.end] = group.pages
    return Cascade(
        batch,
        tuple(groups),
        _prefix(batch, groups, rows, starts, page_size) if groups else None,
        _suffix(batch, skipped, lengths - skipped * page_size, page_size) if groups else batch,
        _grouped_tokens(batch, groups, starts),
    )


def _check_groups(groups: Sequence[Group], lines: Ints, full: Ints) -> None:
    end = 0
    for group in groups:
        own = lines[group.first : group.end, : group.pages]
        if (
            not end <= group.first < group.end <= len(lines)
            or not 0 < group.pages <= full[group.first : group.end].min()
            or (own != own[0]).any()
            or (own < 0).any()
        ):
            raise GeometryError(
                f"{group} does not fit the step",
                "Give ascending groups of rows with the same first pages, which are full before "
                "the new tokens; or leave `groups` out",
            )
        end = group.end


def _prefix(
    batch: Ragged, groups: Sequence[Group], rows: Ints, starts: Ints, page_size: int
) -> Ragged:
    counts = [int(starts[group.end] - starts[group.first]) for group in groups]
    lengths = [group.pages * page_size for group in groups]
    return batch._replace(
        rows=_like(batch, [int(rows[group.first]) for group in groups]),
        lengths=_like(batch, lengths),
        starts=_like(batch, [0, *np.cumsum(counts)]),
        most_new=max(counts),
        most_length=max(lengths),
        most_prompts=len(groups),
    )


def _suffix(batch: Ragged, skipped: Ints, lengths: Ints, page_size: int) -> Ragged:
    columns = -(-int(lengths.max()) // page_size)
    device = batch.table.device
    index = sent(torch.from_numpy(skipped), device)[:, None] + torch.arange(columns, device=device)
    width = batch.table.shape[1]
    lines = batch.table[batch.rows.long()].gather(1, index.clamp(max=width - 1))
    return batch._replace(
        table=lines.masked_fill(index >= width, -1),
        rows=torch.arange(len(skipped), dtype=torch.int32, device=device),
        lengths=_like(batch, lengths),
        most_length=int(lengths.max()),
    )


def _grouped_tokens(batch: Ragged, groups: Sequence[Group], starts: Ints) -> torch.Tensor | None:
    parts = [np.arange(starts[group.first], starts[group.end]) for group in groups]
    if not parts or sum(map(len, parts)) == starts[-1]:
        return None
    return sent(torch.from_numpy(np.concatenate(parts)), batch.table.device)


def _like(batch: Ragged, values: object) -> torch.Tensor:
    return sent(torch.from_numpy(np.asarray(values, np.int32)), batch.table.device)


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
    """Compute `paged_attention`, reading the pages that a group of rows shares only once.

    Partials stay in float32, so that the result is as exact as the flat one; on CPUs they have q's
    dtype, which rounds twice.

    Args:
        q: `[N, Hq, D]`, packed by tokens.
        pages: One layer of the pages, of any codecs.
        batch: Rows and their new tokens.
        shared: Plan of the batch, `plan_cascade(batch, ...)`.
        scale: Scale of the logits; default 1 / sqrt(D).
        window: Allowed only if no row is longer, since a window hides different pages per row.
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
        ConfigError: The backend or codec does not exist.
    """
    layout = pages.layout
    check_queries(q, pages, batch)
    if shared.batch is not batch:
        raise GeometryError(
            "the plan belongs to another step", "Plan each step with plan_cascade(batch, ...)"
        )
    if window is not None and window < batch.most_length:
        raise GeometryError(
            f"a cascade with window={window} and rows of {batch.most_length} tokens",
            "Call paged_attention: the window hides different shared pages from each row",
        )
    how = Scoring(
        scale=1.0 / math.sqrt(layout.head_dim) if scale is None else scale,
        softcap=softcap,
        sinks=sinks,
        tree=tree,
        return_lse=return_lse,
        invariant=invariant,
    )
    check_scoring(how, q, pages, batch)
    backend = backend or choose(q.device, q.dtype, page_dtype=layout.dtype)
    attend = resolve("paged_attention", lossiest(pages), backend)
    if shared.prefix is None:
        return attend(q, pages, batch, how)
    wide = torch.promote_types(q.dtype, torch.float32)
    exact = q if backend == "cpu" else q.to(wide)  # on CPUs, it would cost the 16-bit products
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
