"""Queries in the rotated coordinates of kv4h keys, in Triton.

Scores do not change when keys and queries are rotated alike. The rotation is a matrix of signs, so
that tensor cores multiply it exactly with 16-bit queries; sums are float32.
"""

# ruff: noqa: PLR0913, PLR0917

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from flowkv.kernels.triton.launch import interpreted, launch, padded

BLOCK = 16
"""Queries of a program."""


@triton.jit(do_not_specialize=["n_heads", "n_queries"])
def turn_queries(p_q, p_turn, p_out, stride_token, stride_head, n_heads, n_queries,
                 HEAD_DIM: tl.constexpr, D: tl.constexpr, PART: tl.constexpr, NORM: tl.constexpr,
                 BLOCK: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """p_out float32 `[N, Hq, D]` is p_q times p_turn `[D, D]` times NORM. Grid (blocks,)."""
    o_r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o_d = tl.arange(0, D)
    m_r = o_r < n_queries
    m_q = m_r[:, None] & (o_d < HEAD_DIM)[None, :]
    o_q = (o_r // n_heads).to(tl.int64) * stride_token + o_r % n_heads * stride_head
    b_q = tl.load(p_q + o_q[:, None] + o_d[None, :], mask=m_q, other=0.0)
    if UPCAST:
        b_q = b_q.to(tl.float32)
    for e in tl.static_range(0, D, PART):
        o_e = e + tl.arange(0, PART)
        m_turn = (o_d < HEAD_DIM)[:, None] & (o_e < HEAD_DIM)[None, :]
        b_turn = tl.load(p_turn + o_d[:, None] * HEAD_DIM + o_e[None, :], mask=m_turn, other=0.0)
        b_out = tl.dot(b_q, b_turn.to(b_q.dtype), out_dtype=tl.float32, input_precision="ieee")
        p_to = p_out + o_r.to(tl.int64)[:, None] * HEAD_DIM + o_e[None, :]
        tl.store(p_to, b_out * NORM, mask=m_r[:, None] & (o_e < HEAD_DIM)[None, :])


def turned(q: torch.Tensor) -> torch.Tensor:
    """Queries `[N, Hq, D]`, neighbours in their last dimension, rotated as kv4h keys are."""
    tokens, heads, dim = q.shape
    out = q.new_empty(q.shape, dtype=torch.float32)
    width = padded(dim)
    launch(
        turn_queries,
        (-(-tokens * heads // BLOCK),),
        q,
        turn(dim, q.device),
        out,
        q.stride(0),
        q.stride(1),
        heads,
        tokens * heads,
        HEAD_DIM=dim,
        D=width,
        PART=min(width, 64 if q.element_size() == 2 else 16),
        NORM=rotation(dim)[1],
        BLOCK=BLOCK,
        UPCAST=q.dtype is torch.bfloat16 and interpreted(turn_queries),
        num_warps=4,
    )
    return out


def rotation(dim: int) -> tuple[int, float]:
    """(Dims that kv4h rotates together, the factor that keeps their length)."""
    block = dim & -dim
    return block, block**-0.5


@cache
def turn(dim: int, device: torch.device) -> torch.Tensor:
    """The rotation of kv4h without its factor: Hadamard matrices of `rotation(dim)` dims."""
    block, _ = rotation(dim)
    matrix = torch.ones(1, 1, dtype=torch.float16, device="cpu")
    while len(matrix) < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return torch.block_diag(*[matrix] * (dim // block)).to(device)
