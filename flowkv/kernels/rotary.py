"""Keys that move to other positions: pages are reused where their prefix is another one.

A key that was rotated for position p (RoPE, Su et al., arXiv 2104.09864) and is needed at p + d is
rotated by d once more: R(d) R(p) = R(p + d). So a chunk of text computed elsewhere can stand behind
another prefix (CacheBlend, Yao et al., arXiv 2405.16444), for the cost of one pass over its keys.

*Error.* Let u be the unit roundoff of the pages' dtype (2**-8 bfloat16, 2**-11 float16, 2**-24
float32), and r the length of a pair (x, y). A stored key is off by u * r at most per pair; turning
keeps that, and rounding adds u * r. So a repositioned key lies within (2 u + 2**-21) r of the exact
one, where a computed one lies within u * r: one rounding more (float16 below 2**-14 is coarser, by
2**-24). n moves cost n roundings: move from the original. Angles are made in float64; models that
make theirs in float32 are off by up to 2**-24 * position radians themselves, which no rotation can
know.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from flowkv.core.errors import GeometryError
from flowkv.core.layout import PageLayout
from flowkv.kernels import bounds
from flowkv.kernels.bounds_rotary import check_lines, check_rotary
from flowkv.kernels.dispatch import choose
from flowkv.kernels.operands import Rotary
from flowkv.kernels.registry import resolve


def rotations(
    deltas: Sequence[int],
    inv_freq: torch.Tensor | Sequence[float],
    *,
    interleaved: bool = False,
    start: int = 0,
    device: torch.device | str = "cpu",
) -> tuple[Rotary, torch.Tensor]:
    """Rotations by distances, made once on the host in float64, one line for each distinct one.

    Args:
        deltas: `[n]`, new position of each page less its old one, in tokens.
        inv_freq: `[R/2]`, radians a token, of the model's rotary embedding.
        interleaved: Whether dims of a pair are neighbours, or one from either half of the R dims.
        start: First of the R rotated dims of a key.
        device: Where the pages lie.

    Returns:
        (rotations, `turns` int32 `[n]`), the operands of `reposition`; -1 where nothing moves.
    """
    distinct = sorted({int(delta) for delta in deltas} - {0})
    lines = {0: -1} | {delta: line for line, delta in enumerate(distinct)}
    speed = torch.as_tensor(inv_freq, dtype=torch.float64, device="cpu").numpy()
    angle = np.array(distinct, np.float64)[:, None] * speed
    cos, sin = (torch.from_numpy(f(angle).astype(np.float32)).to(device) for f in (np.cos, np.sin))
    turns = torch.from_numpy(np.array([lines[int(delta)] for delta in deltas], np.int32)).to(device)
    return Rotary(cos, sin, interleaved, start), turns


def reposition(
    arena: torch.Tensor,
    pages: torch.Tensor,
    turns: torch.Tensor,
    rope: Rotary,
    layout: PageLayout,
    *,
    layer: int | None = None,
    backend: str | None = None,
) -> None:
    """Rotate the keys of raw pages in place, each page by a line of `rope`.

    Sealed pages are decoded first (`transcode`) and sealed again behind. Values have no positions.

    Args:
        arena: uint8 `[bytes]`.
        pages: int32 `[n]`, granules at which the pages begin; none twice.
        turns: int32 `[n]`, line of `rope` for each page; -1 leaves a page as it is, bit for bit.
        rope: Rotations, `rotations()` for distances.
        layout: Where the bytes of a page lie.
        layer: Within the group; default all.
        backend: "reference", "cpu" or "triton"; default by device and dtype.

    Raises:
        GeometryError: An operand has the wrong shape, dtype or device.
        ConfigError: No such backend, or the pages are sealed.
    """
    bounds.check_granules(arena, layout.granules, pages=pages)
    if layer is not None and not 0 <= layer < layout.layers:
        raise GeometryError(
            f"layer {layer} of a group of {layout.layers}",
            "Count layers within their group, from 0, or pass None for all",
        )
    check_rotary(rope, layout, arena.device, 0)
    check_lines("turns", turns, pages.shape, arena.device, -1, rope.cos.shape[0])
    backend = backend or choose(arena.device, page_dtype=layout.dtype)
    resolve("reposition", layout.codec, backend)(arena, pages, turns, rope, layout, layer)
