"""Bounds of a codec's error for each element, as docs/explain/codecs.md derives them.

They are evaluated in float64 from the original elements, never from stored codes, and hold for
every page that `kernels.transcode` reports as `SOUND`.
"""

from __future__ import annotations

import math

import torch

from flowkv.core.geometry import SPECS
from flowkv.kernels import reference as reference_codec

U, U_HALF, TINY = 2.0**-24, 2.0**-11, 2.0**-25
"""Unit roundoffs of float32 and float16; half of the least positive float16."""


def by_token(x: torch.Tensor, levels: int) -> torch.Tensor:
    """Return a symmetric code's error bound per element of float64 `[..., P, D]`."""
    most = x.abs().amax(-1, keepdim=True)
    scale = most / levels * (1 + U) * (1 + U_HALF) + TINY
    clamped = most * (U_HALF + U) + levels * TINY
    return torch.maximum(scale / 2 + 3 * U * x.abs(), clamped.expand_as(x))


def by_channel(x: torch.Tensor, levels: int = 15) -> torch.Tensor:
    """Return the error bound of kv4c's keys per element of float64 `[..., P, D]`."""
    low = x.amin(-2, keepdim=True)
    span = x.amax(-2, keepdim=True) - low
    scale = span / levels * (1 + 2 * U) * (1 + U_HALF) + TINY
    offset = low.abs() * U_HALF + TINY
    rounded = scale / 2 + 4 * U * (x - low + offset)
    clamped = offset + span * (U_HALF + 2 * U) + levels * TINY
    largest = low.abs() + offset + levels * scale
    return torch.maximum(rounded, clamped.expand_as(x)) + U * largest


def turning(x: torch.Tensor) -> float:
    """Return the relative change of a token's norm, of `[..., P, D]`, by a float32 transform."""
    block = x.shape[-1] & -x.shape[-1]
    return math.expm1((block.bit_length() + 1) * math.log1p(U)) * (1 + 1e-6)


def by_rotation(x: torch.Tensor, levels: int = 7) -> torch.Tensor:
    """Return the error bound of kv4h's keys per token of `[..., P, D]`, as a Euclidean norm."""
    norm, lost = x.norm(dim=-1), turning(x)
    # The transform in float64 is all but exact beside float32.
    most = reference_codec.rotate(x.double()).abs().amax(-1) + lost * norm
    each = most / levels / 2 * (1 + U) * (1 + U_HALF) + TINY / 2 + 3 * U * most
    each = torch.maximum(each, most * (U_HALF + U) + levels * TINY)
    coded = each * math.sqrt(x.shape[-1])
    both: torch.Tensor = coded * (1 + lost) + norm * (lost * (2 + lost))
    return both


def bounds(codec: str, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the error bounds of a codec of the catalogue for each element of full pages.

    Args:
        codec: One of `CODECS`.
        k: `[..., P, D]`, the original elements.
        v: `[..., P, Dv]`.

    Returns:
        Bounds of K and of V, float64.
    """
    k, v = k.double(), v.double()
    if codec == "raw":
        return torch.zeros_like(k), torch.zeros_like(v)
    spec = SPECS[codec]
    lost_v = by_token(v, spec.v_levels)
    if spec.by_channel:
        return by_channel(k, spec.k_levels), lost_v
    if spec.rotates:
        return by_rotation(k, spec.k_levels)[..., None].expand_as(k), lost_v
    return by_token(k, spec.k_levels), lost_v
