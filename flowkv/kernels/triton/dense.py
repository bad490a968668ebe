"""The dense view of rows on GPUs, in Triton: raw pages are copied, sealed ones are decoded.

One launch writes the columns of raw pages and of no page, one launch for each other codec its own:
each of these has one compile-time codec, and programs that find another one end at once. Grids
depend on shapes alone, so that calls can be captured in CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from flowkv.core.geometry import ITEMSIZE
from flowkv.core.layout import CODEC_SHIFT, CODECS, GRANULE_BYTES, GRANULE_MASK, PageLayout
from flowkv.kernels.operands import Pages, Ragged
from flowkv.kernels.triton.codec import (
    KEY_ELEMENTS,
    VALUE_ELEMENTS,
    dims_of,
    key_tile,
    narrow,
    values_of,
)
from flowkv.kernels.triton.launch import launch, padded, strides
from flowkv.kernels.triton.plan import first_page, pick, row_of_item
from flowkv.kernels.triton.task import Task

# ruff: noqa: PLR0913, PLR0917


MOST_ELEMENTS = 4096
"""Of K or V that a program of `dense_kernel` holds."""

RAW = tl.constexpr(0)
TAG = tl.constexpr(CODEC_SHIFT)
PLACE = tl.constexpr(GRANULE_MASK)


@triton.jit(do_not_specialize=["layer", "columns"])
def dense_kernel(p_out_k, p_out_v, p_arena, p_table, p_rows, p_lengths, stride_table, layer,
                 columns, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, D: tl.constexpr,
                 DV: tl.constexpr, PAGE: tl.constexpr, GRANULE: tl.constexpr,
                 VALUES: tl.constexpr, RUN: tl.constexpr, STRIPE: tl.constexpr,
                 BLOCK: tl.constexpr, SEALED: tl.constexpr):  # fmt: skip
    """BLOCK columns of one row and head of `gather_dense`. Grid (cdiv(columns, BLOCK), Hk, B)."""
    i_head = tl.program_id(1)
    i_row = tl.program_id(2)
    o_c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(p_lengths + i_row) - columns + o_c
    p_line = p_table + tl.load(p_rows + i_row).to(tl.int64) * stride_table
    m_c = o_c < columns
    m_t = m_c & (position >= 0)
    granule = tl.load(p_line + position // PAGE, mask=m_t, other=-1)
    if SEALED:
        m_c = m_c & (granule >> TAG <= 0)  # columns of other codecs are written by others
        m_t = m_t & m_c
    m_t = m_t & (granule >= 0)
    p_run = p_arena + layer.to(tl.int64) * STRIPE + i_head * RUN
    p_page = p_run + granule.to(tl.int64) * GRANULE
    o_slot = position % PAGE
    o_line = (i_row * tl.num_programs(1) + i_head).to(tl.int64) * columns + o_c
    o_d = tl.arange(0, D)
    o_v = tl.arange(0, DV)
    m_d = (o_d < HEAD_DIM)[None, :]
    m_v = (o_v < VALUE_DIM)[None, :]
    p_k = (p_page + o_slot * HEAD_DIM)[:, None] + o_d[None, :]
    b_k = tl.load(p_k, mask=m_t[:, None] & m_d, other=0.0)
    p_v = (p_page + VALUES + o_slot * VALUE_DIM)[:, None] + o_v[None, :]
    b_v = tl.load(p_v, mask=m_t[:, None] & m_v, other=0.0)
    tl.store(p_out_k + o_line[:, None] * HEAD_DIM + o_d[None, :], b_k, mask=m_c[:, None] & m_d)
    tl.store(p_out_v + o_line[:, None] * VALUE_DIM + o_v[None, :], b_v, mask=m_c[:, None] & m_v)


@triton.jit
def decode_run(p_run, p_scales, p_k, p_v, low, end, values, CODEC: tl.constexpr,
               PAGE: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BF16: tl.constexpr,
               VALUES: tl.constexpr, K_SCALES: tl.constexpr, V_SCALES: tl.constexpr,
               BLOCK: tl.constexpr, STAGES: tl.constexpr, FACTOR: tl.constexpr,
               K_ROWS: tl.constexpr, K_COLUMNS: tl.constexpr, V_ROWS: tl.constexpr,
               V_COLUMNS: tl.constexpr):  # fmt: skip
    """Decode K, or if `values` V, of the tokens [low, end) of a run to lines of p_k, of p_v."""
    HALF: tl.constexpr = (DIM + 1) // 2
    HALF_PAGE: tl.constexpr = (PAGE + 1) // 2
    K_MASKED: tl.constexpr = PAGE % K_ROWS != 0 or 2 * K_COLUMNS != DIM
    V_MASKED: tl.constexpr = PAGE % (2 * V_ROWS) != 0 or V_COLUMNS != VALUE_DIM
    if values == 0:
        o_c = tl.arange(0, K_COLUMNS)
        for t in range(0, PAGE, K_ROWS):
            b_a, b_b, _ = key_tile(p_run, p_scales, p_k, t, o_c, CODEC, RAW, K_SCALES, PAGE, DIM,
                                   HALF, BLOCK, STAGES, FACTOR, BF16, K_ROWS, K_COLUMNS,
                                   K_MASKED)  # fmt: skip
            o_t = t + tl.arange(0, K_ROWS)
            m_t = (o_t < end) & (o_t >= low)
            p_to = p_k + o_t[:, None] * DIM
            for i in tl.static_range(2):
                o_d = dims_of(o_c, i, HALF, BLOCK)
                m = m_t[:, None] & ((o_c < HALF) & (o_d < DIM))[None, :]
                b = narrow(b_b if i else b_a, p_k.dtype.element_ty, BF16)
                tl.store(p_to + o_d[None, :], b, mask=m)
    else:
        o_d = tl.arange(0, V_COLUMNS)
        for t in range(0, HALF_PAGE, V_ROWS):
            o_c = t + tl.arange(0, V_ROWS)
            for i in tl.static_range(2):
                b = values_of(p_run, p_scales, p_v, o_c, o_d, i, CODEC, VALUES, V_SCALES, PAGE,
                              HALF_PAGE, VALUE_DIM, BF16, 1, V_MASKED)  # fmt: skip
                o_t = o_c + i * HALF_PAGE
                m_t = (o_c < HALF_PAGE) & (o_t < end) & (o_t >= low)
                b = narrow(b, p_v.dtype.element_ty, BF16)
                p_to = p_v + o_t[:, None] * VALUE_DIM + o_d[None, :]
                tl.store(p_to, b, mask=m_t[:, None] & (o_d < VALUE_DIM)[None, :])


@triton.jit(do_not_specialize=["layer", "columns"])
def dense_sealed_kernel(p_out_k, p_out_v, p_bytes, p_halves, p_table, p_rows, p_lengths,
                        stride_table, layer, columns, CODEC: tl.constexpr, PAGE: tl.constexpr,
                        DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BF16: tl.constexpr,
                        STRIPE: tl.constexpr, RUN: tl.constexpr, VALUES: tl.constexpr,
                        K_SCALES: tl.constexpr, V_SCALES: tl.constexpr, BLOCK: tl.constexpr,
                        STAGES: tl.constexpr, FACTOR: tl.constexpr, K_ROWS: tl.constexpr,
                        K_COLUMNS: tl.constexpr, V_ROWS: tl.constexpr, V_COLUMNS: tl.constexpr,
                        GRANULE: tl.constexpr):  # fmt: skip
    """Decode K (even) or V (odd) of one head of a page. Grid (2 * pages in sight, Hk, B)."""
    i_head = tl.program_id(1)
    i_row = tl.program_id(2)
    n_tokens = tl.load(p_lengths + i_row)
    i_page = tl.maximum(n_tokens - columns, 0) // PAGE + tl.program_id(0) // 2
    if i_page * PAGE >= n_tokens:
        return
    page = tl.load(p_table + tl.load(p_rows + i_row).to(tl.int64) * stride_table + i_page)
    if page >> TAG != CODEC:
        return
    o_run = (page & PLACE).to(tl.int64) * GRANULE + layer.to(tl.int64) * STRIPE + i_head * RUN
    p_run = p_bytes + o_run
    p_scales = p_halves + o_run // 2
    o_line = (i_row * tl.num_programs(1) + i_head).to(tl.int64) * columns
    first = columns - n_tokens + i_page * PAGE  # column of the page's first token
    end = tl.minimum(columns - first, PAGE)
    decode_run(
        p_run, p_scales, p_out_k + (o_line + first) * DIM, p_out_v + (o_line + first) * VALUE_DIM,
        -first, end, tl.program_id(0) % 2, CODEC, PAGE, DIM, VALUE_DIM, BF16, VALUES, K_SCALES,
        V_SCALES, BLOCK, STAGES, FACTOR, K_ROWS, K_COLUMNS, V_ROWS, V_COLUMNS)  # fmt: skip


def gather_dense(pages: Pages, batch: Ragged, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The last `columns` tokens of each row, right-aligned; see `dispatch.gather_dense`."""
    layout = pages.layout
    shape = strides(layout) | {"VALUE_DIM": layout.stored_value_dim}
    rows, heads = batch.rows.shape[0], layout.kv_heads
    elements = pages.arena.view(getattr(torch, layout.dtype))
    k = elements.new_empty(rows, heads, columns, layout.head_dim)
    v = elements.new_empty(rows, heads, columns, layout.stored_value_dim)
    block = max(1, MOST_ELEMENTS // max(shape["D"], shape["DV"]))
    if rows * columns:
        launch(
            dense_kernel,
            (triton.cdiv(columns, block), heads, rows),
            k,
            v,
            elements,
            batch.table,
            batch.rows,
            batch.lengths,
            batch.table.stride(0),
            pages.layer,
            columns,
            BLOCK=block,
            SEALED=bool(pages.sealed),
            **shape,
            num_warps=4,
        )
        for codec in pages.sealed:
            _unseal(k, v, pages, batch, codec)
    return k, v


def _unseal(
    k: torch.Tensor, v: torch.Tensor, pages: Pages, batch: Ragged, codec: PageLayout
) -> None:
    """Write the columns of the pages of one codec."""
    rows, heads, columns, _ = k.shape
    if codec.dtype == "bfloat16":  # as bits, rounded by hand: see `triton.quant.widen`
        k, v = k.view(torch.int16), v.view(torch.int16)
    launch(
        dense_sealed_kernel,
        (2 * (triton.cdiv(columns, codec.page_size) + 1), heads, rows),
        k,
        v,
        pages.arena,
        pages.arena.view(torch.float16),
        batch.table,
        batch.rows,
        batch.lengths,
        batch.table.stride(0),
        pages.layer,
        columns,
        **sealed_constants(codec),
        num_warps=4,
        enable_fp_fusion=False,
    )


@cache
def sealed_constants(codec: PageLayout) -> dict[str, int | float | bool]:
    """The constants by which kernels find and decode the elements of a codec."""
    page, dim = codec.page_size, codec.head_dim
    block = dim & -dim if codec.codec == "kv4h" else 0
    key_columns, value_columns = padded((dim + 1) // 2), padded(codec.value_dim)
    half_page = triton.next_power_of_2((page + 1) // 2)
    return {
        "CODEC": CODECS.index(codec.codec),
        "PAGE": page,
        "DIM": dim,
        "VALUE_DIM": codec.value_dim,
        "BF16": codec.dtype == "bfloat16",
        "STRIPE": codec.stripe_stride_bytes,
        "RUN": codec.run_bytes,
        "VALUES": codec.v_offset_bytes,
        "K_SCALES": codec.k_scale_offset_bytes,
        "V_SCALES": codec.v_scale_offset_bytes,
        "BLOCK": block if block != dim else 0,
        "STAGES": block.bit_length() - 1,
        "FACTOR": block**-0.5 if block else 1.0,
        "K_ROWS": min(triton.next_power_of_2(page), max(1, KEY_ELEMENTS // key_columns)),
        "K_COLUMNS": key_columns,
        "V_ROWS": min(half_page, max(1, VALUE_ELEMENTS // value_columns)),
        "V_COLUMNS": value_columns,
        "GRANULE": GRANULE_BYTES,
    }


# Decodes sealed pages into spare raw runs, for kernels that are bound by arithmetic, in Triton.
#
# A block of 128 query rows multiplies an element of a page in 1/16 of a clock of an H200's tensor
# cores: time for 8 thread-instructions, of which the softmax takes about 5. Decoding in the loop
# would take 1.5 to 2.5 more in every block (2048 new tokens of 4 heads a group are 64 of them), and
# take the tiles through registers on their way to shared memory. Decoding once costs bytes instead:
# kv8 reads 1.02 and writes 2 an element, 0.7 ps at 4.3 TB/s, beside the 21 ps that the products of
# those 8192 rows take at 790 TFLOP/s; kv4 2.5 bytes, 0.6 ps. At 280 query rows a KV head (70 tokens
# of 4 heads) it takes as long as the products. The decode kernel, which decodes in its loop, serves
# rows with up to 32.
#
# The spare runs of all KV heads of long prompts would be large, and heads are independent: so many
# are decoded and attended over at a time as SPARE_BYTES hold, at least one. One head's runs are
# 4 / (Hk * L) of the rows' own 4-bit pages.
#
# Which pages are decoded is found on the device, so a captured CUDA graph stays right when tables
# change; the number of spare runs depends on the batch's maxima, which it was captured with.

# ruff: noqa: PLR0913, PLR0917


SPARE_BYTES = 256 << 20
"""Spare runs of one pass, where a single head's are not more."""


class Spare(NamedTuple):
    """Raw runs of KV heads `low` to `low + heads - 1`: `[rows, pages, heads, run]`, some empty."""

    runs: torch.Tensor
    low: int
    heads: int


@triton.jit(do_not_specialize=["layer", "n_rows", "n_columns", "head_low"])
def unseal_kernel(p_out, p_bytes, p_halves, p_table, p_rows, p_lengths, p_starts, stride_table,
                  layer, n_rows, n_columns, head_low,
                  CODEC: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr,
                  VALUE_DIM: tl.constexpr, BF16: tl.constexpr, STRIPE: tl.constexpr,
                  RUN: tl.constexpr, VALUES: tl.constexpr, K_SCALES: tl.constexpr,
                  V_SCALES: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
                  FACTOR: tl.constexpr, K_ROWS: tl.constexpr, K_COLUMNS: tl.constexpr,
                  V_ROWS: tl.constexpr, V_COLUMNS: tl.constexpr, GRANULE: tl.constexpr,
                  OUT_RUN: tl.constexpr, OUT_VALUES: tl.constexpr, FEW: tl.constexpr,
                  WINDOW: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Decode K (even) or V (odd) of one head of a page, if it has the codec of number CODEC.

    Grid (2 * n_columns * rows with T > FEW, KV heads from head_low on). Strides of the sealed page
    are bytes, of p_out elements.
    """
    i_slot = tl.program_id(0) // 2
    i_page = i_slot % n_columns
    o_row = tl.arange(0, ROWS)
    m_row = o_row < n_rows
    b_start = tl.load(p_starts + o_row, mask=m_row, other=0)
    b_new = tl.load(p_starts + 1 + o_row, mask=m_row, other=0) - b_start
    i_row = row_of_item((b_new > FEW).to(tl.int32), i_slot // n_columns)
    if i_row >= n_rows:
        return
    n_tokens = tl.load(p_lengths + i_row)
    n_new = pick(b_new, i_row, ROWS)
    if (i_page * PAGE >= n_tokens) | (i_page < first_page(n_tokens, n_new, PAGE, WINDOW)):
        return
    page = tl.load(p_table + tl.load(p_rows + i_row).to(tl.int64) * stride_table + i_page)
    if page >> TAG != CODEC:
        return
    i_head = tl.program_id(1)
    o_run = (page & PLACE).to(tl.int64) * GRANULE + layer.to(tl.int64) * STRIPE
    o_run += (i_head + head_low) * RUN
    p_to = p_out + (i_slot.to(tl.int64) * tl.num_programs(1) + i_head) * OUT_RUN
    decode_run(
        p_bytes + o_run, p_halves + o_run // 2, p_to, p_to + OUT_VALUES, 0, PAGE,
        tl.program_id(0) % 2, CODEC, PAGE, DIM, VALUE_DIM, BF16, VALUES, K_SCALES, V_SCALES, BLOCK,
        STAGES, FACTOR, K_ROWS, K_COLUMNS, V_ROWS, V_COLUMNS)  # fmt: skip


def unseal(task: Task) -> Iterator[Spare]:
    """Raw runs of the sealed pages of all rows with many new tokens, for some heads at a time.

    Each `Spare` is overwritten by the next. Without sealed pages it is one, of all heads, empty.
    """
    layout, sealed = task.layout, task.pages.sealed
    if not sealed:
        yield Spare(task.out, 0, layout.kv_heads)
        return
    item = ITEMSIZE[layout.dtype]
    slots = _most_rows(task) * task.most_pages
    at_once = min(layout.kv_heads, max(1, SPARE_BYTES // max(1, slots * layout.run_bytes)))
    elements = slots * at_once * layout.run_bytes // item
    runs = task.out.new_empty(elements, dtype=getattr(torch, layout.dtype))
    for low in range(0, layout.kv_heads, at_once):
        spare = Spare(runs, low, min(at_once, layout.kv_heads - low))
        for codec in sealed:
            _decode(task, codec, spare, slots)
        yield spare


def _most_rows(task: Task) -> int:
    """Rows that may have more than `few` new tokens, from what the host knows."""
    most = min(task.rows, task.out.shape[0] // (task.few + 1))
    if task.few and task.batch.most_prompts >= 0:
        most = min(most, task.batch.most_prompts)
    return max(1, most)


def _decode(task: Task, codec: PageLayout, spare: Spare, slots: int) -> None:
    raw, runs = task.layout, spare.runs
    if raw.dtype == "bfloat16":  # as bits, rounded by hand: see `triton.quant.widen`
        runs = runs.view(torch.int16)
    launch(
        unseal_kernel,
        (2 * slots, spare.heads),
        runs,
        task.pages.arena,
        task.pages.arena.view(torch.float16),
        *task.operands[2:],
        task.batch.table.stride(0),
        task.pages.layer,
        task.rows,
        task.most_pages,
        spare.low,
        **sealed_constants(codec),
        OUT_RUN=raw.run_bytes // ITEMSIZE[raw.dtype],
        OUT_VALUES=raw.v_offset_bytes // ITEMSIZE[raw.dtype],
        FEW=task.few,
        WINDOW=task.flags["WINDOW"],
        ROWS=padded(task.rows),
        num_warps=4,
        enable_fp_fusion=False,
    )
