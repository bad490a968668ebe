"""`checksum` on GPUs, in Triton: every byte is read once, where it lies."""

# ruff: noqa: PLR0913, PLR0917

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flowkv.kernels.sums import FIRST, SECOND, STEP
from flowkv.kernels.triton.launch import launch

TILE = 1024
TILES = 16
"""Tiles of a program: 128 KiB, so that a model's weights make thousands of programs."""


@triton.jit(do_not_specialize=["n_words", "block_words", "splits"])
def checksum_kernel(p_words, p_sums, n_words, block_words, splits, STEP: tl.constexpr,
                    FIRST: tl.constexpr, SECOND: tl.constexpr, TILE: tl.constexpr,
                    TILES: tl.constexpr):  # fmt: skip
    """Two sums over one of the `splits` parts of a block."""
    i_p = tl.program_id(0)
    i_b = (i_p // splits).to(tl.int64)
    first = (i_p % splits).to(tl.int64) * TILE * TILES
    begin = i_b * block_words
    stop = tl.minimum(begin + block_words, n_words)
    b_one = tl.zeros([TILE], tl.uint64)
    b_two = tl.zeros([TILE], tl.uint64)
    for i in tl.range(TILES):
        o_j = first + i * TILE + tl.arange(0, TILE)
        m_j = (o_j < block_words) & (begin + o_j < stop)
        b_w = tl.load(p_words + begin + o_j, mask=m_j, other=0).to(tl.uint64, bitcast=True)
        b_key = (o_j + 1).to(tl.uint64, bitcast=True) * STEP
        b_x = b_w ^ b_key
        b_x = (b_x ^ (b_x >> 32)) * FIRST
        b_x = (b_x ^ (b_x >> 29)) * SECOND
        b_x = b_x ^ (b_x >> 32)
        b_one += tl.where(m_j, b_x, 0)
        b_two += tl.where(m_j, b_x * (b_key | 1), 0)
    p_out = p_sums + 2 * i_p.to(tl.int64)
    tl.store(p_out, tl.sum(b_one.to(tl.int64, bitcast=True), 0))
    tl.store(p_out + 1, tl.sum(b_two.to(tl.int64, bitcast=True), 0))


def checksum(words: torch.Tensor, block_words: int) -> torch.Tensor:
    """Two sums over each block; see `sums.checksum`."""
    blocks = triton.cdiv(len(words), block_words)
    splits = triton.cdiv(min(block_words, len(words)), TILE * TILES)
    sums = words.new_empty(blocks, splits, 2)
    launch(
        checksum_kernel,
        (blocks * splits,),
        words,
        sums,
        len(words),
        block_words,
        splits,
        STEP=STEP,
        FIRST=FIRST,
        SECOND=SECOND,
        TILE=TILE,
        TILES=TILES,
        num_warps=4,
    )
    return sums.sum(1)  # modulo 2**64, in any order the same
