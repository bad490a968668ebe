"""Rotation of keys (RoPE) in plain torch; see `operands.Rotary`."""

from __future__ import annotations

import torch

from flowkv.kernels.operands import Rotary


def rotated(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rope: Rotary, dtype: torch.dtype
) -> torch.Tensor:
    """`x [..., D]`, its pairs turned by `cos` and `sin`, `[..., R/2]` alike, rounded to `dtype`."""
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    end = rope.start + 2 * cos.shape[-1]
    turned = x[..., rope.start : end].to(wide)
    cos, sin = cos.to(wide), sin.to(wide)
    if rope.interleaved:
        a, b = turned[..., ::2], turned[..., 1::2]
    else:
        a, b = turned.chunk(2, -1)
    pair = a * cos - b * sin, b * cos + a * sin
    turned = torch.stack(pair, -1).flatten(-2) if rope.interleaved else torch.cat(pair, -1)
    parts = x[..., : rope.start].to(dtype), turned.to(dtype), x[..., end:].to(dtype)
    return torch.cat(parts, -1)
