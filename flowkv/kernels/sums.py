"""`checksum`: what memory holds, computed where it lies, with the same result on every device.

Word w at place j of its block becomes x = mix(w XOR (j + 1) G), a bijection of w, and a block's two
sums are the sums of x and of x times an odd number that j gives, modulo 2**64. So a change of one
word always changes both sums; words that trade places or change together collide by chance alone
(1 in 2**64, were the sums random). It guards against mistakes and not against an attacker.
"""

from __future__ import annotations

import torch

from flowkv.core.errors import GeometryError
from flowkv.kernels.dispatch import choose
from flowkv.kernels.registry import ANY, resolve

STEP, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 0xBF58476D1CE4E5B9
"""G, and the multipliers of `mix`; odd, from Steele et al., "Fast splittable pseudorandom number
generators" (2014), and Degski's mixer."""


def checksum(words: torch.Tensor, block_words: int, *, backend: str | None = None) -> torch.Tensor:
    """Two 64-bit sums over each block of a tensor.

    Args:
        words: int64 `[n]`, contiguous.
        block_words: Words of a block; the last one may be shorter.
        backend: "reference", "cpu" or "triton"; default by device.

    Returns:
        int64 `[ceil(n / block_words), 2]`, on the device of `words`.

    Raises:
        GeometryError: `words` is no flat contiguous int64 tensor, or a block has no words.
        ConfigError: No such backend.
    """
    if words.dtype is not torch.int64 or words.dim() != 1 or not words.is_contiguous():
        raise GeometryError(
            f"words of shape {tuple(words.shape)} and type {words.dtype}",
            "Pass a flat contiguous int64 tensor, as in x.view(-1).view(torch.int64)",
        )
    if block_words < 1:
        raise GeometryError(f"blocks of {block_words} words", "Use at least 1")
    if not len(words):
        return words.new_zeros(0, 2)
    return resolve("checksum", ANY, backend or choose(words.device))(words, block_words)
