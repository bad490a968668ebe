"""Decodes sealed pages into spare raw runs, for kernels that are bound by arithmetic, in Triton.

A block of 128 query rows multiplies an element of a page in 1/16 of a clock of an H200's tensor
cores: time for 8 thread-instructions, of which the softmax takes about 5. Decoding in the loop
would take 1.5 to 2.5 more in every block (2048 new tokens of 4 heads a group are 64 of them), and
take the tiles through registers on their way to shared memory. Decoding once costs bytes instead:
kv8 reads 1.02 and writes 2 an element, 0.7 ps at 4.3 TB/s, beside the 21 ps that the products of
those 8192 rows take at 790 TFLOP/s; kv4 2.5 bytes, 0.6 ps. At 280 query rows a KV head (70 tokens
of 4 heads) it takes as long as the products. The decode kernel, which decodes in its loop, serves
rows with up to 32.

The spare runs of all KV heads of long prompts would be large, and heads are independent: so many
are decoded and attended over at a time as SPARE_BYTES hold, at least one. One head's runs are
4 / (Hk * L) of the rows' own 4-bit pages.

Which pages are decoded is found on the device, so a captured CUDA graph stays right when tables
change; the number of spare runs depends on the batch's maxima, which it was captured with.
"""

# ruff: noqa: PLR0913, PLR0917

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from flowkv.core.geometry import ITEMSIZE
from flowkv.core.layout import CODEC_SHIFT, GRANULE_MASK, PageLayout
from flowkv.kernels.triton.dense import decode_run, sealed_constants
from flowkv.kernels.triton.launch import launch, padded
from flowkv.kernels.triton.plan import first_page, pick, row_of_item
from flowkv.kernels.triton.task import Task

TAG = tl.constexpr(CODEC_SHIFT)
PLACE = tl.constexpr(GRANULE_MASK)
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
