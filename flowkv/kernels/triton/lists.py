"""Lists of a step's pages by codec, made on the device once per step.

A kernel's inner loop serves one codec, known when it is compiled, and must know the next page early
enough to copy it ahead. So the pages that a row sees are sorted by codec, in the order of the row
within one: list c of row b holds pages `first` to `first + count - 1` of line b. Each attention
kernel deals out the pages of one list over its programs as if the others were not there; where a
list is empty, its programs end at once.

Nothing is decided on the host. The kernel that makes the lists has a fixed grid and room for the
longest row, so it is captured in a CUDA graph with the kernels that read them, and sorts anew when
the graph is replayed.
"""

# ruff: noqa: PLR0913, PLR0917

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flowkv.core.layout import CODEC_SHIFT, CODECS, GRANULE_MASK
from flowkv.kernels.operands import Ragged
from flowkv.kernels.triton.launch import launch, padded
from flowkv.kernels.triton.plan import first_page
from flowkv.kernels.triton.task import Task

FIELDS = tl.constexpr(4)
"""Of a list and row: count, first, and how many pages at its begin and at its end need masks."""

BITS = 12
"""Bits for each list in the packed numbers of shares."""

TAG = tl.constexpr(CODEC_SHIFT)
PLACE = tl.constexpr(GRANULE_MASK)


class Lists(NamedTuple):
    """Pages by codec: raw ones, then those of each layout in `pages.sealed`.

    Attributes:
        counts: int32 `[lists, FIELDS, B]`.
        granules: int32 `[B, pages]`, where each listed page begins.
        numbers: int32 `[B, pages]`, which page of its row it is.
    """

    counts: torch.Tensor
    granules: torch.Tensor
    numbers: torch.Tensor


@triton.jit(do_not_specialize=["n_rows", "stride_table", "stride_list", "tags"])
def list_pages(p_table, p_rows, p_lengths, p_starts, p_counts, p_granules, p_numbers, n_rows,
               stride_table, stride_list, tags,
               LISTS: tl.constexpr, LINES: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
               CAUSAL: tl.constexpr, TREE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Sort the pages that a row sees. Grid (B,); `tags` holds the codec of each list, 4 bits each.

    LINES >= LISTS is a power of two.
    """
    i_row = tl.program_id(0)
    n_new = tl.load(p_starts + i_row + 1) - tl.load(p_starts + i_row)
    n_tokens = tl.load(p_lengths + i_row)
    p_line = p_table + tl.load(p_rows + i_row).to(tl.int64) * stride_table
    begin = first_page(n_tokens, n_new, PAGE, WINDOW)
    end = tl.where(n_new > 0, (n_tokens + PAGE - 1) // PAGE, begin)
    sees_all = n_tokens  # positions below are seen by every new token that has them in its window
    if CAUSAL:
        sees_all -= n_new
        if not TREE:
            sees_all += 1
    hidden = n_tokens - WINDOW if WINDOW > 0 else 0  # from here on the last new token sees
    o_list = tl.arange(0, LINES)
    b_tags = (tags >> (o_list * 4)) & 15
    b_tags = tl.where(o_list < LISTS, b_tags, 16)
    b_count = tl.zeros([LINES], tl.int32)
    b_edge = tl.zeros([LINES], tl.int32)
    b_tail = tl.zeros([LINES], tl.int32)
    for i in tl.range(begin, end, BLOCK, num_stages=1):
        o_page = i + tl.arange(0, BLOCK)
        b_page = tl.load(p_line + o_page, mask=o_page < end, other=-1)
        m = (b_page >> TAG)[:, None] == b_tags[None, :]
        b_count += tl.sum(m.to(tl.int32), axis=0)
        b_edge += tl.sum((m & (o_page * PAGE < hidden)[:, None]).to(tl.int32), axis=0)
        b_tail += tl.sum((m & (o_page * PAGE + PAGE > sees_all)[:, None]).to(tl.int32), axis=0)
    b_first = tl.cumsum(b_count, axis=0) - b_count
    p_count = p_counts + o_list * FIELDS * n_rows + i_row
    m_list = o_list < LISTS
    tl.store(p_count, b_count, mask=m_list)
    tl.store(p_count + n_rows, b_first, mask=m_list)
    tl.store(p_count + 2 * n_rows, b_edge, mask=m_list)
    tl.store(p_count + 3 * n_rows, b_tail, mask=m_list)
    o_to = i_row.to(tl.int64) * stride_list
    for i in tl.range(begin, end, BLOCK, num_stages=1):
        o_page = i + tl.arange(0, BLOCK)
        b_page = tl.load(p_line + o_page, mask=o_page < end, other=-1)
        m = (b_page >> TAG)[:, None] == b_tags[None, :]
        b_rank = tl.cumsum(m.to(tl.int32), axis=0) - 1 + b_first[None, :]
        b_at = tl.sum(tl.where(m, b_rank, 0), axis=1)
        m_page = tl.sum(m.to(tl.int32), axis=1) > 0
        tl.store(p_granules + o_to + b_at, b_page & PLACE, mask=m_page)
        tl.store(p_numbers + o_to + b_at, o_page, mask=m_page)
        b_first += tl.sum(m.to(tl.int32), axis=0)


class _Made(NamedTuple):
    """The lists of the last batch, by what they depend on, and the layer that asked last."""

    batch: Ragged | None
    lists: dict[tuple[Any, ...], tuple[Lists, int]]


_LAST = [_Made(None, {})]


def lists_of(task: Task) -> Lists:
    """The lists of a call: made by a step's first layer, found by the others.

    A layer that does not follow the last one begins a new step (a graph's capture, or a batch that
    was changed in place), and makes them again.
    """
    batch, layer = task.batch, task.pages.layer
    made = _LAST[0]
    if made.batch is not batch:
        made = _LAST[0] = _Made(batch, {})
    key = (
        task.layout.page_size,
        tuple(layout.codec for layout in task.pages.sealed),
        *(task.flags[name] for name in ("WINDOW", "CAUSAL", "TREE")),
        task.out.is_cuda and torch.cuda.is_current_stream_capturing(),
    )
    lists, last = made.lists.get(key, (None, layer))
    if lists is None or layer <= last:
        lists = _make(task)
    made.lists[key] = lists, layer
    return lists


def _make(task: Task) -> Lists:
    """Sort the pages of a call."""
    batch, rows, width = task.batch, task.rows, task.most_pages
    codecs = ("raw", *(layout.codec for layout in task.pages.sealed))
    counts = batch.table.new_empty(len(codecs), FIELDS.value, rows)
    granules = batch.table.new_empty(rows, width)
    lists = Lists(counts, granules, torch.empty_like(granules))
    launch(
        list_pages,
        (rows,),
        *task.operands[2:],
        *lists,
        rows,
        batch.table.stride(0),
        width,
        sum(CODECS.index(codec) << 4 * i for i, codec in enumerate(codecs)),
        LISTS=len(codecs),
        LINES=8,
        PAGE=task.layout.page_size,
        WINDOW=task.flags["WINDOW"],
        CAUSAL=task.flags["CAUSAL"],
        TREE=task.flags["TREE"],
        BLOCK=min(1024, padded(width)),
        num_warps=8,
    )
    return lists
