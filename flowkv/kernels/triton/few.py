"""Paged attention for few new tokens per row, in Triton: decode and speculative verify.

Decoding is bound by memory, so loads must stay in flight and instructions be few:
* the problem is transposed, S^T = K Q^T and O^T = V^T P^T: the few query rows are along the
  dimension that pads to 8, not along the one that pads to 16;
* one tile is within one page: one scalar page address, affine below it;
* tiles that every query sees in full run without masks, the others are peeled.

Where pages may be sealed, one launch serves the raw ones and those of the first codec, and
`triton.sealed` has one more launch per further codec; all partials are merged at once.
"""

# ruff: noqa: PLR0913, PLR0917

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from flowkv.core.geometry import PageLayout
from flowkv.kernels.triton.flight import decoding, stream
from flowkv.kernels.triton.launch import Constants, Traits, given, launch, power, strides, traits
from flowkv.kernels.triton.sealed import (
    Work,
    attend_list,
    sealed_config,
    sealed_constants,
    sealed_share,
    turned,
)
from flowkv.kernels.triton.task import BITS, REGISTERS, Task, lists_of, merge_few, merge_parts
from flowkv.kernels.triton.tile import (
    LOG2E,
    LOWEST,
    add_tiles,
    cap,
    few_pages,
    few_rows,
    first_page,
    list_range,
    load,
    locate,
    row_at,
    seen_pages,
    share_begin,
    share_next,
    share_take,
    sight_of,
    store_mass,
    store_partial,
    tile_range,
    tiles,
    unit_of,
    visible,
)

# The weight that few new tokens of a row give to each page they see, in Triton.
#
# The decode kernels know this weight when they have read a page, except for the normaliser, which
# comes last. So they store log 2 of each tile's weight, 4 bytes a tile, head and column, and this
# kernel normalises it.

BLOCK = 32
"""Pages of a program."""


@triton.jit(do_not_specialize=["n_pages", "stride_mass"])
def mass_few(p_part, p_starts, p_lse, p_mass, n_pages, stride_mass, C: tl.constexpr):
    """Add the weights of p_part `[B, n_pages, TILES, Hk, COLUMNS]` to p_mass `[B, pages, Hk]`.

    Grid (B, cdiv(n_pages, BLOCK), Hk). p_lse is `[N, Hq]`, natural log; tiles that were not read
    hold -inf.
    """
    i_row = tl.program_id(0)
    i_head = tl.program_id(2)
    n_heads = tl.num_programs(2)
    start = tl.load(p_starts + i_row)
    n_new = tl.load(p_starts + i_row + 1) - start
    if (n_new > 0) & (n_new <= C.FEW):
        o_page = tl.program_id(1) * C.BLOCK + tl.arange(0, C.BLOCK)
        o_c = tl.arange(0, C.COLUMNS)
        m_c = o_c < n_new * C.GROUP
        o_lse = (start + o_c // C.GROUP).to(tl.int64) * n_heads * C.GROUP
        p_from = p_lse + o_lse + i_head * C.GROUP + o_c % C.GROUP
        b_lse = tl.load(p_from, mask=m_c, other=0.0) * LOG2E
        b_lse = tl.where(b_lse == -float("inf"), 0.0, b_lse)  # the query saw nothing
        b_sum = tl.full([C.BLOCK, C.COLUMNS], 0, tl.float32)
        m = m_c[None, :] & (o_page < n_pages)[:, None]
        MASS: tl.constexpr = C.MASS
        for i_tile in tl.static_range(MASS):
            o_part = (i_row.to(tl.int64) * n_pages + o_page) * C.MASS + i_tile
            o_part = (o_part * n_heads + i_head)[:, None] * C.COLUMNS + o_c[None, :]
            b_part = tl.load(p_part + o_part, mask=m, other=-float("inf"))
            b_sum += tl.math.exp2(b_part - b_lse[None, :])
        p_to = p_mass + i_row.to(tl.int64) * stride_mass + o_page * n_heads + i_head
        m_page = o_page < n_pages
        tl.store(p_to, tl.load(p_to, mask=m_page, other=0.0) + tl.sum(b_sum, axis=1), mask=m_page)


def add_mass(task: Task, parts: torch.Tensor) -> None:
    """Add the weights of rows with few new tokens to `task.how.mass`; needs their lse."""
    mass = task.how.mass
    assert mass is not None
    rows, pages, tiles, heads, columns = parts.shape
    if parts.numel():
        launch(
            mass_few,
            (rows, -(-pages // BLOCK), heads),
            *(parts, task.batch.starts, task.lse, mass, pages, mass.stride(0)),
            C=Constants(GROUP=task.group, FEW=task.few, COLUMNS=columns, MASS=tiles, BLOCK=BLOCK),
        )


MOST_SHARES = (1 << BITS.value) - 1
MOST_UNITS = 64
"""Most units of a row's pages where its bits must not depend on the batch."""


@triton.jit
def few_tile(soft, t, b_q, place, sight, scores, MASK: tl.constexpr, C: tl.constexpr):
    """Add a tile of tokens to the running softmax (m, l, acc) of all columns.

    MASS is the number of tiles of a page in p_mass, `[pages, MASS, Hk, COLUMNS]`.
    """
    b_m, b_l, b_acc = soft
    p_run, p_line, p_numbers, p_mass = place
    b_seen, b_slope, b_tree, n_tokens, context = sight
    p_page, o_slot, position = locate(t, p_run, p_line, C)
    if C.LISTED:
        position = tl.load(p_numbers + t // tiles(C)) * C.PAGE + o_slot
    o_t = tl.arange(0, C.TILE)
    o_d = tl.arange(0, C.D)
    o_v = tl.arange(0, C.DV)
    m_k = (o_d < C.HEAD_DIM)[None, :]
    m_v = (o_v < C.VALUE_DIM)[:, None]
    b_at = position + o_t
    if MASK:  # a slot without a token may hold anything, NaN included
        m_t = (b_at < n_tokens) & (o_slot + o_t < C.PAGE)
        m_k = m_k & m_t[:, None]
        m_v = m_v & m_t[None, :]
    p_k = p_page + o_slot * C.HEAD_DIM
    p_v = p_page + C.VALUES + o_slot * C.VALUE_DIM
    b_k = load(p_k + o_t[:, None] * C.HEAD_DIM + o_d[None, :], m_k, MASK or C.D != C.HEAD_DIM,
               C.UPCAST)  # fmt: skip
    b_s = tl.dot(b_k, b_q, out_dtype=tl.float32, input_precision="ieee")
    b_v = load(p_v + o_t[None, :] * C.VALUE_DIM + o_v[:, None], m_v, MASK or C.DV != C.VALUE_DIM,
               C.UPCAST)  # fmt: skip
    b_s = cap(b_s, scores[0], scores[1], C)
    if C.ALIBI:
        b_s += b_slope[None, :] * (b_at[:, None] - (b_seen - 1)[None, :]).to(tl.float32)
    if MASK:
        m_s = visible(b_at[:, None], b_seen[None, :], b_tree[None, :], context, C)
        b_s = tl.where(m_t[:, None] & m_s, b_s, -float("inf"))
    unit = unit_of(scores[0], C)
    b_top = tl.maximum(b_m, tl.max(b_s, axis=0))
    b_fade = tl.math.exp2((b_m - b_top) * unit)
    b_p = tl.math.exp2(b_s * unit - (b_top * unit)[None, :])
    b_sum = tl.sum(b_p, axis=0)
    if C.MASS > 0:
        store_mass(p_mass, position // C.PAGE * C.MASS + o_slot // C.TILE, b_top * unit, b_sum)
    b_l = b_l * b_fade + b_sum
    b_acc = tl.dot(b_v, b_p.to(b_v.dtype), acc=b_acc * b_fade[None, :], out_dtype=tl.float32,
                   input_precision="ieee")  # fmt: skip
    return b_top, b_l, b_acc


@triton.jit
def few_share(i_share, n_shares, p_q, p_arena, p_table, p_rows, p_lengths, p_starts, p_part,
              p_part_lse, stride_token, stride_head, stride_table, layer, n_rows, scale, softcap,
              p_alibi, p_tree, p_lists, p_granules, p_numbers, stride_list, p_mass, stride_mass,
              C: tl.constexpr):  # fmt: skip
    """Write the partials of one KV head over one share of the pages of all rows with 0 < T <= FEW.

    Column c stands for new token c // GROUP and query head c % GROUP of the
    group. Writes segment share + row (with UNITS, the number of the unit) of p_part
    `[segments, Hk, COLUMNS, Dv]` and of p_part_lse `[segments, Hk, COLUMNS]`, which is in units of
    log 2. With LISTED, pages are those of list 0 (`triton.task`), otherwise those of the table.
    """
    i_head = tl.program_id(1)
    if C.LISTED:
        b_pages = few_rows(p_lists, p_starts, n_rows, C)
    else:
        b_pages = few_pages(p_starts, p_lengths, n_rows, C)
    i_item, left, i_row, skip = share_begin(b_pages, i_share, n_shares, C)
    p_run = p_arena + layer.to(tl.int64) * C.STRIPE + i_head * C.RUN
    o_c = tl.arange(0, C.COLUMNS)
    o_d = tl.arange(0, C.D)
    while left > 0:
        start, n_new, n_tokens = row_at(i_row, p_starts, p_lengths)
        context = n_tokens - n_new
        if C.LISTED:
            n_pages = tl.load(p_lists + i_row)
        else:
            n_pages = seen_pages(n_tokens, n_new, C)
        take, segment = share_take(i_share, i_item, left, i_row, skip, n_pages, C)
        few = (n_new > 0) & (n_new <= C.FEW) & (take > 0)
        if few:
            o_token = start + o_c // C.GROUP
            o_head = i_head * C.GROUP + o_c % C.GROUP
            m_c = o_c < n_new * C.GROUP
            m_q = m_c[None, :] & (o_d < C.HEAD_DIM)[:, None]
            o_q = o_token.to(tl.int64) * stride_token + o_head * stride_head
            b_q = load(p_q + o_q[None, :] + o_d[:, None], m_q, True, C.UPCAST)
            if not C.UPCAST:
                b_q = b_q.to(p_arena.dtype.element_ty)
            b_none = tl.full([C.COLUMNS], 0, tl.float32)
            soft = b_none + LOWEST, b_none, tl.full([C.DV, C.COLUMNS], 0, tl.float32)
            sight = sight_of(o_c, o_token, o_head, m_c, context, n_tokens, p_alibi, p_tree, C)
            p_to = p_run  # not used
            if C.MASS > 0:
                p_to = p_mass + (i_row.to(tl.int64) * stride_mass + i_head * C.COLUMNS + o_c)
            if C.LISTED:
                o_list = i_row.to(tl.int64) * stride_list + tl.load(p_lists + n_rows + i_row)
                p_line = p_granules + o_list
                p_pages = p_numbers + o_list
                n_edge = tl.load(p_lists + 2 * n_rows + i_row)
                n_tail = tl.load(p_lists + 3 * n_rows + i_row)
                seen = list_range(skip, take, n_pages, n_edge, n_tail, C)
            else:
                p_line = p_table + tl.load(p_rows + i_row).to(tl.int64) * stride_table
                p_pages = p_line
                seen_least = context + 1
                if C.TREE:
                    seen_least = context
                if not C.CAUSAL:
                    seen_least = n_tokens
                page = first_page(n_tokens, n_new, C) + skip
                seen = tile_range(page, take, seen_least, n_tokens, C)
            place = p_run, p_line, p_pages, p_to
            b_m, b_l, b_acc = add_tiles(
                few_tile, soft, seen, b_q, place, sight, (scale, softcap), C
            )
            o_part = segment.to(tl.int64) * tl.num_programs(1) + i_head
            o_part = o_part * C.COLUMNS + o_c
            store_partial(p_part, p_part_lse, o_part, m_c, b_m * unit_of(scale, C), b_l,
                          b_acc, 0, C)  # fmt: skip
        i_item, left, i_row, skip = share_next(i_item, left, i_row, skip, few, take, n_pages, C)


@triton.jit(do_not_specialize=["layer", "n_rows"])
def attend_few(p_q, p_arena, p_table, p_rows, p_lengths, p_starts, p_part, p_part_lse, stride_token,
               stride_head, stride_table, layer, n_rows, scale, softcap, p_alibi, p_tree, p_mass,
               stride_mass, C: tl.constexpr):  # fmt: skip
    """Attend over raw pages alone. Grid (shares, Hk)."""
    few_share(tl.program_id(0), tl.num_programs(0), p_q, p_arena, p_table, p_rows, p_lengths,
              p_starts, p_part, p_part_lse, stride_token, stride_head, stride_table, layer, n_rows,
              scale, softcap, p_alibi, p_tree, p_rows, p_rows, p_rows, 0, p_mass, stride_mass,
              C)  # fmt: skip


@triton.jit(do_not_specialize=["layer", "n_rows", "n_raw", "n_sealed", "n_segments"])
def attend_lists(p_q, p_arena, p_table, p_rows, p_lengths, p_starts, p_part, p_part_lse,
                 stride_token, stride_head, stride_table, layer, n_rows, n_raw, n_sealed, scale,
                 softcap, p_alibi, p_tree, p_lists, p_granules, p_numbers, n_segments, stride_list,
                 p_mass, stride_mass, p_turned, p_bytes, stride_turned, stride_turned_head,
                 C: tl.constexpr, S: tl.constexpr):  # fmt: skip
    """Attend over the raw pages (list 0, C) and those of list 1 (S) in one launch.

    Grid (max(n_raw, n_sealed), Hk): a program attends over its share of either list, so that all
    programs that a device holds read sealed pages from the beginning.
    """
    i_share = tl.program_id(0)
    if i_share < n_raw:
        few_share(i_share, n_raw, p_q, p_arena, p_table, p_rows, p_lengths, p_starts, p_part,
                  p_part_lse, stride_token, stride_head, stride_table, layer, n_rows, scale,
                  softcap, p_alibi, p_tree, p_lists, p_granules, p_numbers, stride_list, p_mass,
                  stride_mass, C)  # fmt: skip
    if i_share < n_sealed:
        sealed_share(i_share, n_sealed, p_turned, p_bytes, p_lengths, p_starts, p_part, p_part_lse,
                     stride_turned, stride_turned_head, layer, n_rows, scale, softcap, p_alibi,
                     p_lists, p_granules, p_numbers, 1, n_segments, stride_list, p_mass,
                     stride_mass, S)  # fmt: skip


def decode(task: Task) -> None:
    """Attend with all rows that have few new tokens."""
    out, sealed, invariant = task.out, task.pages.sealed, task.how.invariant
    queries = task.few * task.group
    shape, warps, shares, segments, tiles, common = _cut(
        task.layout, sealed, traits(out.device), queries, task.rows, task.most_pages, invariant
    )
    columns = common["COLUMNS"]
    size = (len(shares) * segments, task.layout.kv_heads, columns)
    part_lse = out.new_empty(size, dtype=torch.float32)
    part = out.new_empty((*size, task.layout.value_dim), dtype=torch.float32)
    tiles = 0 if task.how.mass is None else tiles
    weights = task.rows, task.most_pages, tiles, task.layout.kv_heads, columns
    parts = out.new_full(weights, -torch.inf, dtype=torch.float32) if tiles else None
    lists = lists_of(task) if sealed else None
    mass = (None, None) if parts is None else (parts, parts.stride(0))
    work = Work(lists, segments, part, part_lse, mass, tiles, common)
    _attend(task, work, shape, warps, shares)
    for i, (codec, share) in enumerate(zip(sealed[1:], shares[2:], strict=True), 2):
        attend_list(task, work, i, codec, share)
    merge_parts(
        merge_few,
        task.rows * task.few,
        *(task, part, part_lse),
        sum(share << i * BITS.value for i, share in enumerate(shares)),
        {**common, "LISTS": len(shares) if sealed else 0},
        task.batch.lengths if lists is None else lists.counts,
        segments,
    )
    if parts is not None:
        add_mass(task, parts)


@lru_cache(maxsize=1024)
def _cut(
    layout: PageLayout,
    sealed: tuple[PageLayout, ...],
    device: Traits,
    queries: int,
    rows: int,
    most_pages: int,
    invariant: bool,
) -> tuple[Constants, int, tuple[int, ...], int, int, dict[str, Any]]:
    """Cut the work of rows with at most `queries` query rows of each KV head.

    Returns:
        Constants of `few_share`, warps of its programs, shares of each list, segments of one list
        in the partials, most tiles of a page, constants of all kernels.
    """
    columns = max(8, power(queries))
    tunes = [sealed_config(codec, columns, device)[1] for codec in sealed]
    shape, tune = _config(
        layout, device, *((tunes[0]["warps"], tunes[0]["room"]) if sealed else ())
    )
    least = -(-128 // layout.page_size)  # pages of a share
    units = MOST_UNITS if invariant else 0
    most = max(1, -(-rows * most_pages // least))
    configs = [tune, *tunes]
    held = [device.processors * config["programs"] // layout.kv_heads for config in configs]
    if sealed:  # a program serves both lists, so no more are resident than of list 1
        held[0] = min(held[:2])
    shares = tuple(max(1, min(count, most, MOST_SHARES)) for count in held)
    segments = max(shares) + rows
    if units:
        segments = rows * max(1, min(units, -(-most_pages // least)))
    tiles = max(-(-layout.page_size // config["tile"]) for config in configs)
    common = {"COLUMNS": columns, "MIN_PAGES": least, "UNITS": units}
    return shape, tune["warps"], shares, segments, tiles, common


def _attend(task: Task, work: Work, shape: Constants, warps: int, shares: tuple[int, ...]) -> None:
    """Attend over raw pages and, if there are lists, those of list 1."""
    lists, heads = work.lists, task.layout.kv_heads
    constants = given(
        shape,
        task.batching,
        task.switches,
        **work.common,
        LISTED=lists is not None,
        MASS=work.tiles,
    )
    first = (*task.operands, work.part, work.part_lse, *task.numbers)
    if lists is None:
        launch(
            attend_few,
            (shares[0], heads),
            *(*first, *task.softmax, task.how.alibi, task.how.tree, *work.mass),
            C=constants,
            num_warps=warps,
            **REGISTERS,
        )
        return
    codec = task.pages.sealed[0]
    q = turned(task.q) if codec.spec.rotates else task.q
    launch(
        attend_lists,
        (max(shares[:2]), heads),
        *(*first, *shares[:2], *task.softmax),
        *(task.how.alibi, task.how.tree, *lists, work.segments, task.most_pages, *work.mass),
        *(q, task.pages.arena, q.stride(0), q.stride(1)),
        C=constants,
        S=sealed_constants(task, work, codec)[0],
        num_warps=warps,
        **REGISTERS,
    )


@lru_cache(maxsize=256)
def _config(
    layout: PageLayout, device: Traits, warps: int = 0, room: int = 0
) -> tuple[Constants, dict[str, int]]:
    """Return the constants of `few_share`, and the warps, programs a processor and tile.

    Beside a sealed list, a program has that list's warps and shared memory.
    """
    tiling = decoding(stream(layout, 8), device, warps, room)
    shape = strides(layout)._replace(TILE=tiling.block, STAGES=tiling.stages)
    return shape, {"warps": tiling.warps, "programs": tiling.programs, "tile": tiling.block}
