"""Checks of rotations and of lists of tokens, before kernels read them; see `bounds`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flowkv.core.errors import GeometryError
from flowkv.core.layout import PageLayout
from flowkv.kernels import bounds
from flowkv.kernels.operands import Rotary


def check_rotary(rope: Rotary, layout: PageLayout, device: torch.device, lines: int) -> None:
    """Check rotations of keys of `layout`, of which at least `lines` will be read.

    Raises:
        GeometryError: A wrong shape, dtype or device, or too few lines.
    """
    cos, sin = rope.cos, rope.sin
    for name, x in (("cos", cos), ("sin", sin)):
        if (
            x.dtype is not torch.float32
            or x.dim() != 2
            or x.shape != cos.shape
            or not x.is_contiguous()
            or x.device != device
        ):
            raise GeometryError(
                f"{name} is {x.dtype} {tuple(x.shape)} on {x.device}",
                f"Make cos and sin contiguous torch.float32 [positions, R/2] on {device}",
            )
    if cos.shape[0] < lines:
        raise GeometryError(
            f"{cos.shape[0]} lines of rotations for {lines} positions",
            "Make cos and sin as long as the longest row may become",
        )
    if rope.start < 0 or rope.start + 2 * cos.shape[1] > layout.head_dim or not cos.shape[1]:
        raise GeometryError(
            f"{2 * cos.shape[1]} rotated dims from {rope.start} on, of {layout.head_dim}",
            "Pass cos and sin once per pair, [positions, R/2], for R rotated dims within a head",
        )
    if layout.latent and rope.start < layout.value_dim:
        raise GeometryError(
            f"rotated dims from {rope.start} on, of which {layout.value_dim} are the value",
            f"Rotate what stands behind a latent: start={layout.value_dim}",
        )


def check_lines(
    name: str, x: torch.Tensor, shape: Sequence[int], device: torch.device, low: int, end: int
) -> None:
    """Check a list of numbers from `low` to `end` - 1; their values only while `checking`.

    Raises:
        GeometryError: A wrong shape, dtype or device, or (while `checking`) a number outside.
    """
    if x.dtype is not torch.int32 or x.shape != tuple(shape) or x.device != device:
        raise GeometryError(
            f"{name} is {x.dtype} {tuple(x.shape)} on {x.device}",
            f"Make it torch.int32 {list(shape)} on {device}",
        )
    if bounds.is_checking() and x.numel():
        least, most = int(x.min()), int(x.max())
        if least < low or most >= end:
            raise GeometryError(
                f"{name} holds {least} to {most}", f"Pass numbers from {low} to {end - 1}"
            )
