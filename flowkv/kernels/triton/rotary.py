"""Rotates keys (RoPE) on GPUs, in Triton: device code, and pages that move to other positions.

Compiled without FP fusion: each product and sum is rounded by itself (`operands.Rotary`).
"""

# ruff: noqa: PLR0913, PLR0917

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flowkv.core.layout import PageLayout
from flowkv.kernels.operands import Rotary
from flowkv.kernels.triton.launch import launch, strides

MOST_ELEMENTS = 4096
"""Of the keys that a program rotates."""


@triton.jit
def load_pairs(p_rows, m_rows, stride, PAIRS: tl.constexpr, P: tl.constexpr,
               INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The rotated dims of BLOCK rows as pairs: x `[BLOCK, P]` and y `[BLOCK, P]`."""
    if INTERLEAVED:
        o_d = tl.arange(0, 2 * P)
        m_d = m_rows[:, None] & (o_d < 2 * PAIRS)[None, :]
        b = tl.load(p_rows[:, None] + o_d[None, :] * stride, mask=m_d, other=0.0)
        b_x, b_y = tl.split(tl.reshape(b, (BLOCK, P, 2)))
    else:
        o_i = tl.arange(0, P)
        m_i = m_rows[:, None] & (o_i < PAIRS)[None, :]
        p_x = p_rows[:, None] + o_i[None, :] * stride
        b_x = tl.load(p_x, mask=m_i, other=0.0)
        b_y = tl.load(p_x + PAIRS * stride, mask=m_i, other=0.0)
    return b_x, b_y


@triton.jit
def store_turned(p_rows, m_rows, b_x, b_y, b_cos, b_sin, PAIRS: tl.constexpr, P: tl.constexpr,
                 INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Rotate pairs by `b_cos` and `b_sin`, `[1, P]` of float32, and store them as rows."""
    element: tl.constexpr = p_rows.dtype.element_ty
    wide: tl.constexpr = tl.float64 if element == tl.float64 else tl.float32
    b_x, b_y, b_cos, b_sin = b_x.to(wide), b_y.to(wide), b_cos.to(wide), b_sin.to(wide)
    b_u = (b_x * b_cos - b_y * b_sin).to(element)
    b_v = (b_y * b_cos + b_x * b_sin).to(element)
    if INTERLEAVED:
        o_d = tl.arange(0, 2 * P)
        m_d = m_rows[:, None] & (o_d < 2 * PAIRS)[None, :]
        b = tl.reshape(tl.join(b_u, b_v), (BLOCK, 2 * P))
        tl.store(p_rows[:, None] + o_d[None, :], b, mask=m_d)
    else:
        o_i = tl.arange(0, P)
        m_i = m_rows[:, None] & (o_i < PAIRS)[None, :]
        p_u = p_rows[:, None] + o_i[None, :]
        tl.store(p_u, b_u, mask=m_i)
        tl.store(p_u + PAIRS, b_v, mask=m_i)


@triton.jit
def load_turn(p_cos, p_sin, line, PAIRS: tl.constexpr, P: tl.constexpr):
    """A line of cosines and one of sines, `[1, P]`."""
    o_i = tl.arange(0, P)[None, :]
    o_from = line.to(tl.int64) * PAIRS + o_i
    m_i = o_i < PAIRS
    b_cos = tl.load(p_cos + o_from, mask=m_i, other=0.0)
    return b_cos, tl.load(p_sin + o_from, mask=m_i, other=0.0)


@triton.jit(do_not_specialize=["layer"])
def reposition_kernel(p_arena, p_pages, p_turns, p_cos, p_sin, layer, HEAD_DIM: tl.constexpr,
                      PAGE: tl.constexpr, GRANULE: tl.constexpr, RUN: tl.constexpr,
                      STRIPE: tl.constexpr, PAIRS: tl.constexpr, P: tl.constexpr,
                      INTERLEAVED: tl.constexpr, START: tl.constexpr,
                      BLOCK: tl.constexpr):  # fmt: skip
    """Rotate BLOCK keys of a page, where they lie. Grid (n * cdiv(PAGE, BLOCK), Hk, layers)."""
    BLOCKS: tl.constexpr = (PAGE + BLOCK - 1) // BLOCK
    i_page = tl.program_id(0) // BLOCKS
    turn = tl.load(p_turns + i_page)
    if turn < 0:
        return
    o_slot = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    m_slot = o_slot < PAGE
    p_run = p_arena + tl.load(p_pages + i_page).to(tl.int64) * GRANULE
    p_run += (layer + tl.program_id(2)).to(tl.int64) * STRIPE + tl.program_id(1) * RUN
    p_rows = p_run + START + o_slot * HEAD_DIM
    b_cos, b_sin = load_turn(p_cos, p_sin, turn, PAIRS, P)
    b_x, b_y = load_pairs(p_rows, m_slot, 1, PAIRS, P, INTERLEAVED, BLOCK)
    store_turned(p_rows, m_slot, b_x, b_y, b_cos, b_sin, PAIRS, P, INTERLEAVED, BLOCK)


def rotary_constants(rope: Rotary) -> dict[str, int]:
    """The constants by which kernels find the pairs of a key."""
    pairs = rope.cos.shape[1]
    return {
        "PAIRS": pairs,
        "P": triton.next_power_of_2(pairs),
        "INTERLEAVED": rope.interleaved,
        "START": rope.start,
    }


def reposition(
    arena: torch.Tensor,
    pages: torch.Tensor,
    turns: torch.Tensor,
    rope: Rotary,
    layout: PageLayout,
    layer: int | None = None,
) -> None:
    """Rotate the keys of pages in place; see `rotary.reposition`."""
    constants, shape = rotary_constants(rope), strides(layout)
    page = layout.page_size
    block = min(max(1, MOST_ELEMENTS // (2 * constants["P"])), triton.next_power_of_2(page))
    blocks, layers = triton.cdiv(page, block), layout.layers if layer is None else 1
    if pages.shape[0]:
        launch(
            reposition_kernel,
            (pages.shape[0] * blocks, layout.kv_heads, layers),
            arena.view(getattr(torch, layout.dtype)),
            pages.contiguous(),
            turns.contiguous(),
            rope.cos,
            rope.sin,
            layer or 0,
            **{name: shape[name] for name in ("HEAD_DIM", "PAGE", "GRANULE", "RUN", "STRIPE")},
            **constants,
            BLOCK=block,
            num_warps=4,
            enable_fp_fusion=False,
        )
