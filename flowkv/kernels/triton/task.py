"""The launches of one attention call: their common operands, and the merge of their partials."""

# ruff: noqa: PLR0913, PLR0917

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flowkv.core.errors import ConfigError
from flowkv.core.geometry import CODEC_SHIFT, CODECS, GRANULE_MASK, PageLayout
from flowkv.kernels.operands import Pages, Ragged, Scoring
from flowkv.kernels.triton.launch import Constants, given, interpreted, launch, padded
from flowkv.kernels.triton.tile import (
    LN2,
    LOG2E,
    LOWEST,
    few_items,
    few_pages,
    few_rows,
    few_segments,
    first_page,
    many_chunks,
    pick,
    row_of_token,
    share_of_items,
    sum_before,
)

# Merges of partials of attention, `(o, lse)` over disjoint sets of tokens, into the result. Exact.
#
# Segments of one query are adjacent (`triton.tile`), so a program walks a short range.


@triton.jit
def nothing_yet(p_sinks, C: tl.constexpr):
    """Return a merge (m, l, acc) before its first segment, for one query head (program axis 1)."""
    if C.SINKS:  # a logit without a value
        b_m = tl.load(p_sinks + tl.program_id(1)).to(tl.float32) * LOG2E
        b_l = b_m * 0.0 + 1.0
    else:
        b_l = tl.zeros((), tl.float32)
        b_m = b_l + LOWEST
    return b_m, b_l, tl.full([C.DV], 0, tl.float32)


@triton.jit
def fold_segments(b_m, b_l, b_acc, first, count, i_column, p_part, p_part_lse, WIDTH: tl.constexpr,
                  C: tl.constexpr):  # fmt: skip
    """Add `count` segments from `first` on to a merge, for one token and query head."""
    i_kv_head = tl.program_id(1) // C.GROUP
    n_kv_heads = tl.num_programs(1) // C.GROUP
    o_v = tl.arange(0, C.DV)
    for i in tl.range(0, count, C.SEGMENTS, num_stages=1):
        o_s = i + tl.arange(0, C.SEGMENTS)
        o_part = ((first + o_s).to(tl.int64) * n_kv_heads + i_kv_head) * WIDTH + i_column
        b_lse = tl.load(p_part_lse + o_part, mask=o_s < count, other=-float("inf"))
        m_o = (b_lse > LOWEST)[:, None] & (o_v < C.VALUE_DIM)[None, :]
        b_o = tl.load(p_part + o_part[:, None] * C.VALUE_DIM + o_v[None, :], mask=m_o, other=0.0)
        b_top = tl.maximum(b_m, tl.max(b_lse, axis=0))
        b_fade = tl.math.exp2(b_m - b_top)
        b_w = tl.math.exp2(b_lse - b_top)
        b_l = b_l * b_fade + tl.sum(b_w, axis=0)
        b_acc = b_acc * b_fade + tl.sum(b_w[:, None] * b_o, axis=0)
        b_m = b_top
    return b_m, b_l, b_acc


@triton.jit
def store_merged(b_m, b_l, b_acc, i_token, p_out, p_lse, C: tl.constexpr):
    """Store a merge as the result of one token and query head; without any segment, zeros."""
    o_v = tl.arange(0, C.DV)
    o_o = i_token.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    b_some = tl.where(b_l == 0.0, 1.0, b_l)  # NaN stays NaN
    tl.store(p_out + o_o * C.VALUE_DIM + o_v, (b_acc / b_some).to(p_out.dtype.element_ty),
             mask=o_v < C.VALUE_DIM)  # fmt: skip
    if C.LSE:
        b_lse = tl.where(b_l == 0.0, -float("inf"), (b_m + tl.math.log2(b_some)) * LN2)
        tl.store(p_lse + o_o, b_lse)


@triton.jit(do_not_specialize=["n_rows", "n_shares", "n_segments"])
def merge_few(p_part, p_part_lse, p_lengths, p_starts, p_sinks, p_out, p_lse, n_rows, n_shares,
              p_lists, n_segments, C: tl.constexpr):  # fmt: skip
    """Merge partials of `attend_few`, or its and `attend_sealed`'s over LISTS. Grid (B FEW, Hq).

    n_shares holds, BITS bits each, the number of shares of each list; the partials of a list begin
    n_segments segments after those of the list before.
    """
    i_row = tl.program_id(0) // C.FEW
    i_new = tl.program_id(0) % C.FEW
    start = tl.load(p_starts + i_row)
    n_new = tl.load(p_starts + i_row + 1) - start
    if (i_new < n_new) & (n_new <= C.FEW):
        i_column = i_new * C.GROUP + tl.program_id(1) % C.GROUP
        b_m, b_l, b_acc = nothing_yet(p_sinks, C)
        for i_list in tl.static_range(max(1, C.LISTS)):
            if C.LISTS > 0:
                p_counts = p_lists + i_list * FIELDS * n_rows
                b_items = few_rows(p_counts, p_starts, n_rows, C)
                n_list = (n_shares >> (i_list * BITS.value)) & ((1 << BITS.value) - 1)
                n_list = n_list.to(tl.int32)
            else:
                b_items = few_pages(p_starts, p_lengths, n_rows, C)
                n_list = n_shares
            b_items = few_items(b_items, C)
            n_share = share_of_items(b_items, n_list, C)
            first, count = few_segments(b_items, i_row, n_share, C)
            b_m, b_l, b_acc = fold_segments(b_m, b_l, b_acc, first + i_list * n_segments, count,
                                            i_column, p_part, p_part_lse, C.COLUMNS, C)  # fmt: skip
        store_merged(b_m, b_l, b_acc, start + i_new, p_out, p_lse, C)


@triton.jit(do_not_specialize=["n_rows", "n_shares"])
def merge_many(p_part, p_part_lse, p_lengths, p_starts, p_sinks, p_out, p_lse, n_rows, n_shares,
               C: tl.constexpr):  # fmt: skip
    """Merge the partials of `attend_many` with SPLIT. Grid (N, Hq)."""
    i_token = tl.program_id(0)
    i_row = row_of_token(i_token, p_starts, n_rows, C)
    if i_row < n_rows:
        start = tl.load(p_starts + i_row)
        if tl.load(p_starts + i_row + 1) - start > C.FEW:
            b_blocks, b_chunks, _ = many_chunks(p_starts, p_lengths, n_rows, n_shares, C)
            n_chunks = pick(b_chunks, i_row)
            o_r = (i_token - start) * C.GROUP + tl.program_id(1) % C.GROUP
            first = sum_before(b_blocks * b_chunks, i_row) + o_r // C.BLOCK * n_chunks
            b_m, b_l, b_acc = nothing_yet(p_sinks, C)
            b_m, b_l, b_acc = fold_segments(b_m, b_l, b_acc, first, n_chunks, o_r % C.BLOCK, p_part,
                                            p_part_lse, C.BLOCK, C)  # fmt: skip
            store_merged(b_m, b_l, b_acc, i_token, p_out, p_lse, C)


@triton.jit
def merge_two(p_a, p_a_lse, p_b, p_b_lse, p_out, p_lse, C: tl.constexpr):
    """Merge two `(o [N, Hq, DIM], lse [N, Hq])`, natural log. Grid (N * Hq,)."""
    i = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, C.DV)
    a_lse = tl.load(p_a_lse + i)
    b_lse = tl.load(p_b_lse + i)
    top = tl.maximum(tl.maximum(a_lse, b_lse), LOWEST)
    a_w = tl.math.exp2((a_lse - top) * LOG2E)
    b_w = tl.math.exp2((b_lse - top) * LOG2E)
    total = a_w + b_w
    some = tl.where(total == 0.0, 1.0, total)  # NaN stays NaN
    o_o = i * C.VALUE_DIM + o_d
    m_d = o_d < C.VALUE_DIM
    b_none = tl.full([C.DV], 0, tl.float32) + LOWEST  # a part without tokens may hold anything
    b_a = tl.load(p_a + o_o, mask=m_d & (a_lse > b_none), other=0.0).to(tl.float32)
    b_b = tl.load(p_b + o_o, mask=m_d & (b_lse > b_none), other=0.0).to(tl.float32)
    b_o = b_a * (a_w / some) + b_b * (b_w / some)
    tl.store(p_out + o_o, b_o.to(p_out.dtype.element_ty), mask=m_d)
    b_out = tl.where(total == 0.0, -float("inf"), top + tl.math.log2(some) * LN2)
    tl.store(p_lse + i, b_out)


REGISTERS = {} if torch.version.hip else {"maxnreg": 255}
"""Register limit, else the assembler spills to fit a program that shared memory does not admit."""


class Batching(NamedTuple):
    """Constants of all kernels of a call."""

    GROUP: int
    FEW: int
    ROWS: int
    WINDOW: int


class Switches(NamedTuple):
    """Constants of the scores."""

    SOFTCAP: bool
    ALIBI: bool
    TREE: bool
    CAUSAL: bool
    UPCAST: bool


class Ends(NamedTuple):
    """Constants of the results."""

    SINKS: bool
    LSE: bool


class Task(NamedTuple):
    """One call of `paged_attention`, as its launches share it."""

    q: torch.Tensor  # neighbours in its last dimension
    pages: Pages
    batch: Ragged
    how: Scoring
    operands: tuple[Any, ...]  # q, arena, table, rows, lengths, starts
    out: torch.Tensor
    lse: torch.Tensor | None  # None unless requested
    numbers: tuple[Any, ...]  # strides and layer
    softmax: tuple[float, float]  # scale, softcap
    layout: PageLayout
    rows: int
    most_pages: int
    few: int
    group: int
    batching: Batching
    switches: Switches
    ends: Ends


def merge_parts(
    kernel: Any,
    programs: int,
    task: Task,
    part: torch.Tensor,
    part_lse: torch.Tensor | None,
    shares: int,
    constants: dict[str, Any],
    *more: Any,
) -> None:
    """Merge partials into the output of a call, with `merge_few` or `merge_many`."""
    launch(
        kernel,
        (programs, task.out.shape[1]),
        *(part, part_lse, *task.operands[4:], task.how.sinks, task.out, task.lse),
        *(task.rows, shares, *more),
        C=given(_merging(task.layout), task.batching, task.ends, **constants),
    )


@cache
def _merging(layout: PageLayout) -> Constants:
    """Return the constants of `merge_few` and `merge_many`."""
    width = padded(layout.value_dim)
    segments = max(1, 2048 // width)
    return Constants(VALUE_DIM=layout.value_dim, DV=width, SEGMENTS=segments, PAGE=layout.page_size)


def upcast(layout: PageLayout) -> bool:
    """Return whether kernels must compute in float32: the interpreter's bfloat16 is wrong."""
    return layout.dtype == "bfloat16" and interpreted(merge_few)


def element(layout: PageLayout) -> torch.dtype:
    """Return the dtype of raw elements.

    Raises:
        ConfigError: No kernel serves this dtype or head dimension.
    """
    most = 1024 if layout.latent else 256
    if layout.dtype == "float64" or max(layout.head_dim, layout.value_dim) > most:
        raise ConfigError(
            f"no Triton kernel attends over {layout.dtype} pages with head dims of "
            f"{layout.head_dim} and {layout.value_dim}",
            "Use 32- or 16-bit pages with head dims up to 256, or backend='reference'",
        )
    return getattr(torch, layout.dtype)


def tile_of(layout: PageLayout, most: int) -> int:
    """Return the tokens of a tile: a power of two of 16 to `most` that divides the page, or 16."""
    tile = most
    while tile > 16 and layout.page_size % tile:
        tile //= 2
    return tile


# Lists of a step's pages by codec, made on the device once per step.
#
# A kernel's inner loop serves one codec, known when it is compiled, and must know the next page
# early enough to copy it ahead. So the pages that a row sees are sorted by codec, in the order of
# the row within one: list c of row b holds pages `first` to `first + count - 1` of line b. Each
# attention kernel distributes the pages of one list over its programs and ignores the others; where
# a list is empty, its programs end at once.
#
# The host decides nothing. The kernel that makes the lists has a fixed grid and room for the
# longest row, so it is captured in a CUDA graph with the kernels that read them, and sorts again
# when the graph is replayed.

FIELDS = tl.constexpr(4)
"""Fields per list and row: count, first, and how many pages at either end need masks."""

BITS = tl.constexpr(12)
"""Bits for each list in the packed numbers of shares."""

TAG = tl.constexpr(CODEC_SHIFT)
PLACE = tl.constexpr(GRANULE_MASK)


class Lists(NamedTuple):
    """Pages by codec: raw ones, then those of each layout in `pages.sealed`.

    Attributes:
        counts: int32 `[lists, FIELDS, B]`.
        granules: int32 `[B, pages]`, first granule of each listed page.
        numbers: int32 `[B, pages]`, index of each listed page in its row.
    """

    counts: torch.Tensor
    granules: torch.Tensor
    numbers: torch.Tensor


@triton.jit(do_not_specialize=["n_rows", "stride_table", "stride_list", "tags"])
def list_pages(p_table, p_rows, p_lengths, p_starts, p_counts, p_granules, p_numbers, n_rows,
               stride_table, stride_list, tags, C: tl.constexpr):  # fmt: skip
    """Sort the pages that a row sees. Grid (B,); `tags` holds each list's codec, 4 bits each."""
    i_row = tl.program_id(0)
    n_new = tl.load(p_starts + i_row + 1) - tl.load(p_starts + i_row)
    n_tokens = tl.load(p_lengths + i_row)
    p_line = p_table + tl.load(p_rows + i_row).to(tl.int64) * stride_table
    begin = first_page(n_tokens, n_new, C)
    end = tl.where(n_new > 0, (n_tokens + C.PAGE - 1) // C.PAGE, begin)
    sees_all = n_tokens  # every new token sees positions below, if they are in its window
    if C.CAUSAL:
        sees_all -= n_new
        if not C.TREE:
            sees_all += 1
    hidden = n_tokens - C.WINDOW if C.WINDOW > 0 else 0  # the last new token sees from here on
    LINES: tl.constexpr = 2 if C.LISTS <= 2 else 4 if C.LISTS <= 4 else 8
    o_list = tl.arange(0, LINES)
    b_tags = (tags >> (o_list * 4)) & 15
    b_tags = tl.where(o_list < C.LISTS, b_tags, 16)
    b_count = tl.zeros([LINES], tl.int32)
    b_edge = tl.zeros([LINES], tl.int32)
    b_tail = tl.zeros([LINES], tl.int32)
    for i in tl.range(begin, end, C.BLOCK, num_stages=1):
        o_page = i + tl.arange(0, C.BLOCK)
        b_page = tl.load(p_line + o_page, mask=o_page < end, other=-1)
        m = (b_page >> TAG)[:, None] == b_tags[None, :]
        b_count += tl.sum(m.to(tl.int32), axis=0)
        if C.WINDOW > 0:
            b_edge += tl.sum((m & (o_page * C.PAGE < hidden)[:, None]).to(tl.int32), axis=0)
        b_tail += tl.sum((m & (o_page * C.PAGE + C.PAGE > sees_all)[:, None]).to(tl.int32), axis=0)
    b_first = tl.cumsum(b_count, axis=0) - b_count
    p_count = p_counts + o_list * FIELDS * n_rows + i_row
    m_list = o_list < C.LISTS
    tl.store(p_count, b_count, mask=m_list)
    tl.store(p_count + n_rows, b_first, mask=m_list)
    tl.store(p_count + 2 * n_rows, b_edge, mask=m_list)
    tl.store(p_count + 3 * n_rows, b_tail, mask=m_list)
    o_to = i_row.to(tl.int64) * stride_list
    for i in tl.range(begin, end, C.BLOCK, num_stages=1):
        o_page = i + tl.arange(0, C.BLOCK)
        b_page = tl.load(p_line + o_page, mask=o_page < end, other=-1)
        m = (b_page >> TAG)[:, None] == b_tags[None, :]
        b_rank = tl.cumsum(m.to(tl.int32), axis=0) - 1 + b_first[None, :]
        b_at = tl.sum(tl.where(m, b_rank, 0), axis=1)
        m_page = tl.sum(m.to(tl.int32), axis=1) > 0
        tl.store(p_granules + o_to + b_at, b_page & PLACE, mask=m_page)
        tl.store(p_numbers + o_to + b_at, o_page, mask=m_page)
        b_first += tl.sum(m.to(tl.int32), axis=0)


_LAST: list[tuple[Ragged | None, dict[tuple[Any, ...], tuple[Lists, int]]]] = [(None, {})]
"""The last batch and its lists, by their parameters, with the layer that used them last."""


def lists_of(task: Task) -> Lists:
    """Return the lists of a call: made by a step's first layer, reused by the others.

    A layer that does not follow the last one begins a new step (a graph's capture, or a batch that
    was changed in place), and makes them again.
    """
    batch, layer = task.batch, task.pages.layer
    last_batch, made = _LAST[0]
    if last_batch is not batch:
        made = {}
        _LAST[0] = batch, made
    key = (
        task.layout.page_size,
        tuple(layout.codec for layout in task.pages.sealed),
        *(task.how.window, task.how.causal, task.how.tree is not None),
        task.out.is_cuda and torch.cuda.is_current_stream_capturing(),
    )
    lists, last = made.get(key, (None, layer))
    if lists is None or layer <= last:
        lists = _make(task)
    made[key] = lists, layer
    return lists


def _make(task: Task) -> Lists:
    """Make the lists of a call, sorting its pages on the device."""
    batch, rows, width = task.batch, task.rows, task.most_pages
    codecs = ("raw", *(layout.codec for layout in task.pages.sealed))
    counts = batch.table.new_empty(len(codecs), FIELDS.value, rows)
    granules = batch.table.new_empty(rows, width)
    lists = Lists(counts, granules, torch.empty_like(granules))
    launch(
        list_pages,
        (rows,),
        *(*task.operands[2:], *lists, rows, batch.table.stride(0), width),
        sum(CODECS.index(codec) << 4 * i for i, codec in enumerate(codecs)),
        C=Constants(
            PAGE=task.layout.page_size,
            WINDOW=task.how.window or 0,
            CAUSAL=task.how.causal,
            TREE=task.how.tree is not None,
            LISTS=len(codecs),
            BLOCK=min(1024, padded(width)),
        ),
        num_warps=8,
    )
    return lists
