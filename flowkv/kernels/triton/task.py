"""What the launches of one attention call have in common, and how their partials are merged."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from flowkv.core.errors import ConfigError
from flowkv.core.layout import PageLayout
from flowkv.kernels.operands import Pages, Ragged, Scoring
from flowkv.kernels.triton.launch import interpreted, launch, padded
from flowkv.kernels.triton.merge import merge_few

REGISTERS = {} if torch.version.hip else {"maxnreg": 255}
"""Keeps the assembler from spilling to fit a program more, which shared memory would not admit."""


class Task(NamedTuple):
    """One call of `paged_attention`, as its launches share it."""

    q: torch.Tensor  # neighbours in its last dimension
    pages: Pages
    batch: Ragged
    how: Scoring
    operands: tuple[Any, ...]  # q, arena, table, rows, lengths, starts
    sinks: torch.Tensor  # as all switches that are tensors: any other tensor if there are none
    alibi: torch.Tensor
    tree: torch.Tensor
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


def merge_parts(
    kernel: Any,
    programs: int,
    task: Task,
    part: torch.Tensor,
    part_lse: torch.Tensor,
    shares: int,
    common: dict[str, int],
    *more: Any,
) -> None:
    """Merge partials into the output of a call, with `merge_few` or `merge_many`."""
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
        *more,
        VALUE_DIM=task.layout.value_dim,
        DV=padded(task.layout.value_dim),
        SEGMENTS=max(1, 2048 // padded(task.layout.value_dim)),
        SINKS=task.flags["SINKS"],
        LSE=task.flags["LSE"],
        PAGE=task.layout.page_size,
        **common,
        num_warps=4,
    )


def upcast(layout: PageLayout) -> bool:
    """Whether kernels must compute in float32: the interpreter's bfloat16 is wrong."""
    return layout.dtype == "bfloat16" and interpreted(merge_few)


def element(layout: PageLayout) -> torch.dtype:
    """The dtype of raw elements.

    Raises:
        ConfigError: No kernel serves it, or the head dimension.
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
    """Tokens of a tile: a power of two of 16 to `most` that divides the page, or else 16."""
    tile = most
    while tile > 16 and layout.page_size % tile:
        tile //= 2
    return tile
