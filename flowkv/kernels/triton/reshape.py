"""Makes pages of chosen tokens of other pages on GPUs, in Triton (sparsification)."""

# ruff: noqa: PLR0913, PLR0917

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flowkv.core.layout import PageLayout
from flowkv.kernels.triton.launch import launch, strides

MOST_ELEMENTS = 4096
"""Of K or V that a program holds."""


@triton.jit(do_not_specialize=["n_kept"])
def drop_kernel(p_arena, p_source, p_target, p_keep, n_kept, HEAD_DIM: tl.constexpr,
                VALUE_DIM: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr,
                GRANULE: tl.constexpr, VALUES: tl.constexpr, RUN: tl.constexpr,
                STRIPE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Copy BLOCK kept tokens of one layer and head. Grid (cdiv(n_kept, BLOCK), Hk, L)."""
    i_head = tl.program_id(1)
    i_layer = tl.program_id(2).to(tl.int64)
    o_t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_t = o_t < n_kept
    p_line = p_keep + (i_layer * tl.num_programs(1) + i_head) * n_kept
    token = tl.load(p_line + o_t, mask=m_t, other=0)
    p_run = p_arena + i_layer * STRIPE + i_head * RUN
    g_from = tl.load(p_source + token // PAGE, mask=m_t, other=0).to(tl.int64)
    g_to = tl.load(p_target + o_t // PAGE, mask=m_t, other=0).to(tl.int64)
    p_from = p_run + g_from * GRANULE
    p_to = p_run + g_to * GRANULE
    s_from = token % PAGE
    s_to = o_t % PAGE
    o_d = tl.arange(0, D)[None, :]
    o_v = tl.arange(0, DV)[None, :]
    m_k = m_t[:, None] & (o_d < HEAD_DIM)
    m_v = m_t[:, None] & (o_v < VALUE_DIM)
    b_k = tl.load((p_from + s_from * HEAD_DIM)[:, None] + o_d, mask=m_k, other=0.0)
    b_v = tl.load((p_from + VALUES + s_from * VALUE_DIM)[:, None] + o_v, mask=m_v, other=0.0)
    tl.store((p_to + s_to * HEAD_DIM)[:, None] + o_d, b_k, mask=m_k)
    tl.store((p_to + VALUES + s_to * VALUE_DIM)[:, None] + o_v, b_v, mask=m_v)


def drop_tokens(
    arena: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    keep: torch.Tensor,
    layout: PageLayout,
) -> None:
    """Make pages of chosen tokens of others; see `movement.drop_tokens`."""
    shape = strides(layout) | {"VALUE_DIM": layout.stored_value_dim}
    kept = keep.shape[2]
    block = max(1, MOST_ELEMENTS // max(shape["D"], shape["DV"]))
    if kept:
        launch(
            drop_kernel,
            (triton.cdiv(kept, block), layout.kv_heads, layout.layers),
            arena.view(getattr(torch, layout.dtype)),
            source.contiguous(),
            target.contiguous(),
            keep.contiguous(),
            kept,
            **shape,
            BLOCK=block,
            num_warps=4,
        )
