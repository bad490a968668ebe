"""Paged attention and the merging of partials on GPUs: chooses kernels and tile sizes, launches.

Grids and scratch depend only on what the host knows without asking the device: shapes,
`batch.most_new` and `batch.most_length`. So a call can be captured in a CUDA graph and replayed
after lengths and tables have changed, as long as they stay below the maxima it was captured with.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from flowkv.core.errors import ConfigError
from flowkv.core.geometry import ITEMSIZE
from flowkv.core.layout import PageLayout
from flowkv.kernels.operands import Pages, Ragged
from flowkv.kernels.triton_few import attend_few
from flowkv.kernels.triton_launch import Traits, interpreted, launch, padded, strides, traits
from flowkv.kernels.triton_many import attend_many
from flowkv.kernels.triton_merge import merge_few, merge_many, merge_two

MOST_COLUMNS = 32
"""Query rows per KV head up to which a row counts as having few new tokens."""

REGISTERS = {} if torch.version.hip else {"maxnreg": 255}
"""Keeps the assembler from spilling to fit a program more, which shared memory would not admit."""

Partial = tuple[torch.Tensor, torch.Tensor]


class Task(NamedTuple):
    """One call of `paged_attention`, as its launches share it."""

    operands: tuple[Any, ...]  # q, arena, table, rows, lengths, starts
    sinks: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    numbers: tuple[Any, ...]  # strides and layer
    softmax: tuple[float, float]  # scale, softcap
    layout: PageLayout
    rows: int
    most_pages: int
    few: int
    group: int
    flags: dict[str, Any]


def paged_attention(
    q: torch.Tensor,
    pages: Pages,
    batch: Ragged,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | Partial:
    """Causal attention of the new tokens over their rows' pages; see `dispatch.paged_attention`.

    Tokens of q that belong to no row (padding of a captured graph) get no result.

    Raises:
        ConfigError: The pages' dtype or head dimension has no kernel.
    """
    layout = pages.layout
    tokens, heads, _ = q.shape
    out = q.new_empty(tokens, heads, layout.value_dim)
    lse = q.new_empty(tokens, heads, dtype=torch.float32) if return_lse else out  # `out`: unused
    rows, group = batch.rows.shape[0], heads // layout.kv_heads
    few = _few(batch.most_new, group, rows)
    if q.stride(2) != 1:
        q = q.contiguous()
    task = Task(
        operands=(
            q,
            pages.arena.view(_dtype(layout)),
            batch.table,
            batch.rows,
            batch.lengths,
            batch.starts,
        ),
        sinks=out if sinks is None else sinks,
        out=out,
        lse=lse,
        numbers=(q.stride(0), q.stride(1), batch.table.stride(0), pages.layer, rows),
        softmax=(scale, softcap or 0.0),
        layout=layout,
        rows=rows,
        most_pages=-(-batch.most_length // layout.page_size),
        few=few,
        group=group,
        flags={"WINDOW": window or 0, "SINKS": sinks is not None, "LSE": return_lse},
    )
    if tokens and few:
        _attend_few(task)
    if tokens and batch.most_new > few:
        _attend_many(task)
    return (out, lse) if return_lse else out


def _few(most_new: int, group: int, rows: int) -> int:
    """New tokens up to which a row goes to the decode kernel; 0 sends all to the prefill kernel."""
    few = 1 << max(most_new - 1, 0).bit_length()  # a power of two: fewer kernels to compile
    if few * group <= MOST_COLUMNS:
        return few
    return 1 if rows > 1 and group <= MOST_COLUMNS else 0


def _attend_few(task: Task) -> None:
    layout, device = task.layout, traits(task.out.device)
    shape, tune = _few_config(layout, device)
    columns = max(8, 1 << (task.few * task.group - 1).bit_length())
    least = -(-128 // layout.page_size)  # pages of a share
    shares = device.processors * tune["programs"] // layout.kv_heads
    shares = max(1, min(shares, -(-task.rows * task.most_pages // least)))
    segments = (shares + task.rows, layout.kv_heads, columns)
    part_lse = task.out.new_empty(segments, dtype=torch.float32)
    part = task.out.new_empty((*segments, layout.value_dim), dtype=torch.float32)
    common = {
        "GROUP": task.group,
        "FEW": task.few,
        "COLUMNS": columns,
        "ROWS": padded(task.rows),
        "MIN_PAGES": least,
        "WINDOW": task.flags["WINDOW"],
    }
    launch(
        attend_few,
        (shares, layout.kv_heads),
        *task.operands,
        part,
        part_lse,
        *task.numbers,
        shares,
        *task.softmax,
        **shape,
        **common,
        SOFTCAP=task.softmax[1] > 0,
        UPCAST=_upcast(layout),
        num_warps=tune["warps"],
        **REGISTERS,
    )
    _merge(merge_few, task.rows * task.few, task, part, part_lse, shares, common)


def _attend_many(task: Task) -> None:
    layout, device = task.layout, traits(task.out.device)
    tokens = task.out.shape[0]
    shape, tune = _many_config(layout, device)
    block = tune["block"]
    blocks = tokens * task.group // block + task.rows  # at most
    shares = -(-device.processors * tune["programs"] // layout.kv_heads)
    least = -(-256 // layout.page_size)  # pages of a chunk
    split = blocks < shares and task.most_pages > least
    items = blocks + (min(shares, blocks * -(-task.most_pages // least)) if split else 0)
    common = {
        "GROUP": task.group,
        "FEW": task.few,
        "BLOCK": block,
        "ROWS": padded(task.rows),
        "MIN_PAGES": least,
        "WINDOW": task.flags["WINDOW"],
    }
    part, part_lse = task.out, task.lse
    if split:
        segments = (items, layout.kv_heads, block)
        part_lse = task.out.new_empty(segments, dtype=torch.float32)
        part = task.out.new_empty((*segments, layout.value_dim), dtype=torch.float32)
    launch(
        attend_many,
        (items, layout.kv_heads),
        *task.operands,
        task.sinks,
        part,
        part_lse,
        *task.numbers,
        shares,
        *task.softmax,
        **shape,
        **common,
        SPLIT=split,
        SOFTCAP=task.softmax[1] > 0,
        SINKS=task.flags["SINKS"],
        LSE=task.flags["LSE"],
        UPCAST=_upcast(layout),
        num_warps=tune["warps"],
        **REGISTERS,
    )
    if split:
        _merge(merge_many, tokens, task, part, part_lse, shares, common)


def _merge(kernel, programs, task, part, part_lse, shares, common) -> None:
    lengths, starts = task.operands[4:]
    launch(
        kernel,
        (programs, task.out.shape[1]),
        part,
        part_lse,
        lengths,
        starts,
        task.sinks,
        task.out,
        task.lse,
        task.rows,
        shares,
        VALUE_DIM=task.layout.value_dim,
        DV=padded(task.layout.value_dim),
        SEGMENTS=max(1, 2048 // padded(task.layout.value_dim)),
        SINKS=task.flags["SINKS"],
        LSE=task.flags["LSE"],
        PAGE=task.layout.page_size,
        **common,
        num_warps=4,
    )


def _upcast(layout: PageLayout) -> bool:
    return layout.dtype == "bfloat16" and interpreted(attend_few)


def _dtype(layout: PageLayout) -> torch.dtype:
    if layout.dtype == "float64" or max(layout.head_dim, layout.value_dim) > 256:
        raise ConfigError(
            f"no Triton kernel attends over {layout.dtype} pages with head dims of "
            f"{layout.head_dim} and {layout.value_dim}",
            "Use 32- or 16-bit pages with head dims up to 256, or backend='reference'",
        )
    return getattr(torch, layout.dtype)


def _tile(layout: PageLayout, most: int) -> int:
    """Tokens of a tile: a power of two of 16 to `most` that divides the page, or else 16."""
    tile = most
    while tile > 16 and layout.page_size % tile:
        tile //= 2
    return tile


@lru_cache(maxsize=256)
def _few_config(layout: PageLayout, device: Traits) -> tuple[dict[str, int], dict[str, int]]:
    """Constants of `attend_few`; warps of a program, programs that a processor holds at once."""
    shape, item = dict(strides(layout)), ITEMSIZE[layout.dtype]
    row_bytes = (shape["D"] + shape["DV"]) * item
    # float32 is multiplied exactly, without tensor cores, and holds whole operands in registers.
    tile = _tile(layout, 64 if item == 2 else 16)
    while tile > 16 and tile * row_bytes > 32768:  # more needs 4 warps, which tempts to use WGMMA
        tile //= 2
    # A loop that reads the page table needs 5 stages for two K/V tiles in flight, 3 for one.
    shape |= {"TILE": tile, "STAGES": 5}
    warps = 1 if tile * row_bytes <= 16384 and item == 2 else 2
    programs = max(1, min(8, device.shared_bytes // (2 * tile * row_bytes + 2048)))
    return shape, {"warps": warps, "programs": programs}


@lru_cache(maxsize=256)
def _many_config(layout: PageLayout, device: Traits) -> tuple[dict[str, int], dict[str, int]]:
    """Constants of `attend_many`; query rows of a block, warps, programs a processor holds."""
    shape, item = dict(strides(layout)), ITEMSIZE[layout.dtype]
    block, tile = (128, _tile(layout, 64)) if item == 2 else (64, 16)
    if item == 2 and max(shape["D"], shape["DV"]) > 128:  # as much as registers hold
        block, tile = {9: 128, 10: 64}.get(device.major, 32), min(tile, 32)
    row_bytes = (shape["D"] + shape["DV"]) * item
    while (
        block > 32 and block * shape["D"] * item + 2 * tile * row_bytes > device.shared_bytes - 4096
    ):
        block //= 2
    shape |= {"TILE": tile, "STAGES": 5}
    return shape, {"block": block, "warps": 8, "programs": 1}


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
