"""The oracle of `checksum`, in torch."""

from __future__ import annotations

import torch

from flowkv.kernels.sums import FIRST, SECOND, STEP

_AT_ONCE = 1 << 20
"""Words that are mixed at a time: temporary tensors stay small beside the weights of a model."""


def checksum(words: torch.Tensor, block_words: int) -> torch.Tensor:
    """Two sums over each block; see `sums.checksum`."""
    sums = words.new_zeros(-(-len(words) // block_words), 2)
    for block, out in zip(words.split(block_words), sums, strict=True):
        for first in range(0, len(block), _AT_ONCE):
            part = block[first : first + _AT_ONCE]
            key = torch.arange(first + 1, first + 1 + len(part), device=words.device)
            key = key * _signed(STEP)
            x = part ^ key
            x = (x ^ _shifted(x, 32)) * _signed(FIRST)
            x = (x ^ _shifted(x, 29)) * _signed(SECOND)
            x = x ^ _shifted(x, 32)
            out[0] += x.sum()
            out[1] += (x * (key | 1)).sum()
    return sums


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    # torch shifts int64 arithmetically: the copies of the sign have to go.
    return (x >> bits) & ((1 << 64 - bits) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
