"""The oracle of the codecs: what every byte of a sealed page is, in plain torch, on any device.

Every step is one float32 operation, rounded once, to nearest even, in the order written here. So
the numba twin and the Triton kernel can write the very same bytes, and do. The formulas, and the
bounds that follow from them, are derived in docs/explain/codecs.md.

Runs are stacked as `[..., P, D]`: whatever stands before tokens and dims is a batch.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from flowkv.core.layout import GRANULE_BYTES, PageLayout
from flowkv.kernels.coding import NON_FINITE, OUT_OF_RANGE

LEVELS = {"kv8": (127, 127), "k8v4": (127, 7), "kv4c": (15, 7), "kv4h": (7, 7)}
"""By codec: q of K and V goes from -levels to levels; of the keys of kv4c, from 0 to levels."""

FITS = 65520.0
"""The least number that float16 rounds to infinity; it rounds everything below to a number."""
HUGE = 2.0**100
"""Elements from here on are encoded as 0: no codec has a scale for them, whatever is beside."""

_ROUND = 12582912.0  # 1.5 * 2**23: adding it leaves the nearest integer in the low bits


class Coded(NamedTuple):
    """Quantised elements: integers `q`, what they are multiplied by, and whether that fits.

    Attributes:
        q: int32, as wide as what was encoded.
        scales: float16, `[..., P]` by token or `[..., D]` by channel.
        over: bool `[...]`: a scale or offset is beyond float16, which saturates instead.
        offsets: float16 `[..., D]`, what the keys of kv4c count from.
    """

    q: torch.Tensor
    scales: torch.Tensor
    over: torch.Tensor
    offsets: torch.Tensor | None = None


def rint(t: torch.Tensor) -> torch.Tensor:
    """The nearest integer, half to even, where |t| < 2**22; beyond, something at least as large."""
    return (t + _ROUND) - _ROUND


def divided(a: torch.Tensor, b: float) -> torch.Tensor:
    """The quotient, rounded once: by a plain number, CUDA torch multiplies with its reciprocal."""
    return a / a.new_tensor(b)


def to_half(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(float16 nearest to x, saturated; whether it saturated)."""
    return x.clamp(-65504.0, 65504.0).to(torch.float16), ~(x.abs() < FITS)


def _reciprocal(s: torch.Tensor) -> torch.Tensor:
    return torch.where(s == 0, s, s.new_tensor(1.0) / s)


def symmetric(x: torch.Tensor, levels: int) -> Coded:
    """Encode each token of `[..., P, D]` by one scale: q from -levels to levels."""
    scales, over = to_half(divided(x.abs().amax(-1), levels))
    r = _reciprocal(scales.float())
    q = rint(x * r[..., None]).clamp(-levels, levels)
    return Coded(q.int(), scales, over.any(-1))


def by_channel(x: torch.Tensor, levels: int = 15) -> Coded:
    """Encode each channel of `[..., P, D]` by a scale and its minimum: q from 0 to levels."""
    low = x.amin(-2)
    offsets, low_over = to_half(low + 0.0)  # no -0: of zeros of both signs either is the minimum
    scales, over = to_half(divided(x.amax(-2) - low, levels))
    r = _reciprocal(scales.float())
    q = rint((x - offsets.float()[..., None, :]) * r[..., None, :]).clamp(0, levels)
    return Coded(q.int(), scales, (low_over | over).any(-1), offsets)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """The orthonormal Walsh-Hadamard transform of blocks of D; its own inverse, up to rounding.

    A block is the largest power of two that divides D. Butterflies in place, nearest first.
    """
    shape, block = x.shape, x.shape[-1] & -x.shape[-1]
    h = 1
    while h < block:
        u, v = x.reshape(*shape[:-1], -1, 2, h).unbind(-2)
        x = torch.stack((u + v, u - v), -2)
        h *= 2
    return x.reshape(shape) * x.new_tensor(block**-0.5)


def narrowed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Decoded elements as raw ones: to nearest even; float16 saturates.

    The largest float16 may decode to a little more than itself, which must not become infinite.
    """
    return x.clamp(-65504.0, 65504.0).to(dtype) if dtype is torch.float16 else x.to(dtype)


def decoded(
    arena: torch.Tensor, layout: PageLayout, layer: int, granules: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer of some full pages, as numbers: what attention over them attends to.

    Args:
        arena: uint8 `[bytes]`.
        layout: Of the pages, in any codec.
        layer: Layer within the group.
        granules: Where the pages begin.

    Returns:
        K `[n, Hk, P, D]` and V `[n, Hk, P, Dv]` in float32 (float64 if the pages are), never
        rounded to the dtype of raw pages.
    """
    tokens, dim, dim_v = layout.page_size, layout.head_dim, layout.value_dim
    parts = _parts(_stripes(arena, layout, layer, granules), layout)
    heads = len(granules), layout.kv_heads
    if layout.codec == "raw":
        dtype = getattr(torch, layout.dtype)
        exact = torch.promote_types(dtype, torch.float32)
        k, v = (x.contiguous().view(dtype).to(exact) for x in parts[:2])
        return k.view(*heads, tokens, dim), v.view(*heads, tokens, dim_v)
    levels_v = LEVELS[layout.codec][1]
    k, v = parts[0].unflatten(-1, (tokens, -1)), parts[1].unflatten(-1, (dim_v, -1))
    scales_k, scales_v = (x.contiguous().view(torch.float16).float() for x in parts[2:])
    values = _opened(v, -1) - 8 if levels_v == 7 else v.int() - 128
    if layout.codec == "kv4c":
        by, offsets = scales_k.unflatten(-1, (2, 1, dim)).unbind(-3)
        keys = _opened(k, -1) * by + offsets
    elif layout.codec == "kv4h":
        keys = rotate((_opened(k, -1) - 8) * scales_k[..., None])
    else:
        keys = k.view(torch.int8) * scales_k[..., None]
    return keys, (values * scales_v[..., None, :]).transpose(-1, -2)


def encoded(k: torch.Tensor, v: torch.Tensor, layout: PageLayout) -> tuple[torch.Tensor, ...]:
    """One layer of full pages as bytes.

    Args:
        k: `[n, Hk, P, D]`, float32.
        v: `[n, Hk, P, Dv]`.
        layout: Of the pages, in any codec.

    Returns:
        uint8 `[n, stripe_stride_bytes]`, its padding zero, and the status of each page, int32 `[n]`
        (see `coding.transcode`).
    """
    finite = k.isfinite().flatten(1).all(1) & v.isfinite().flatten(1).all(1)
    largest = torch.finfo(k.dtype).max if layout.codec == "raw" else HUGE
    over = torch.zeros_like(finite)
    clean = []
    for x in (k, v):
        fits = x.abs() <= largest if layout.codec == "raw" else x.abs() < largest
        over |= ~fits.flatten(1).all(1)
        clean.append(x.where(fits, x.new_zeros(())))
    if layout.codec == "raw":
        dtype = getattr(torch, layout.dtype)
        parts = [_bytes(narrowed(x, dtype)) for x in clean]
        over = torch.zeros_like(over)
    else:
        parts, beyond = _encoded_parts(clean[0], clean[1], layout)
        over |= beyond.any(1)
    stripes = k.new_zeros(len(k), layout.stripe_stride_bytes, dtype=torch.uint8)
    for to, part in zip(_parts(stripes, layout), parts, strict=True):
        to.copy_(part)
    status = torch.where(finite, over.int() * OUT_OF_RANGE, NON_FINITE)
    return stripes, status.int()


def transcode(
    arena: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    old: PageLayout,
    new: PageLayout,
) -> torch.Tensor:
    """Write full pages once more in another codec; see `coding.transcode`."""
    status = arena.new_zeros(len(source), old.layers, dtype=torch.int32)
    granules, places = source.tolist(), target.tolist()
    if not granules:
        return status
    for layer in range(old.layers):
        stripes, status[:, layer] = encoded(*decoded(arena, old, layer, granules), new)
        start = layer * new.stripe_stride_bytes
        for place, stripe in zip(places, stripes, strict=True):
            begin = GRANULE_BYTES * place + start
            arena[begin : begin + new.stripe_stride_bytes] = stripe
    return status


def _encoded_parts(
    k: torch.Tensor, v: torch.Tensor, layout: PageLayout
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """K, V and their scales as the bytes `[n, Hk, bytes]` of runs; whose scales are too large."""
    levels_k, levels_v = LEVELS[layout.codec]
    values = symmetric(v, levels_v)
    v_q = values.q.transpose(-1, -2)  # [n, Hk, Dv, P]
    v_bytes = _packed(v_q + 8) if levels_v == 7 else v_q + 128
    if layout.codec == "kv4c":
        keys = by_channel(k, levels_k)
        assert keys.offsets is not None
        k_bytes, k_scales = _packed(keys.q), torch.cat((keys.scales, keys.offsets), -1)
    elif layout.codec == "kv4h":
        keys = symmetric(rotate(k), levels_k)
        k_bytes, k_scales = _packed(keys.q + 8), keys.scales
    else:
        keys = symmetric(k, levels_k)
        k_bytes, k_scales = keys.q & 255, keys.scales
    elements = [x.to(torch.uint8).flatten(2) for x in (k_bytes, v_bytes)]
    return [*elements, _bytes(k_scales), _bytes(values.scales)], keys.over | values.over


def _packed(q: torch.Tensor) -> torch.Tensor:
    """Nibbles of `[..., n]` as bytes `[..., n / 2]`: i, and i + n / 2 above it."""
    low, high = q.chunk(2, -1)
    return low | high << 4


def _opened(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The inverse of `_packed`, as int32."""
    return torch.cat((x & 15, x >> 4), dim).int()


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """`[n, Hk, ...]` as uint8 `[n, Hk, bytes]`."""
    return x.contiguous().view(*x.shape[:2], math.prod(x.shape[2:])).view(torch.uint8)


def _stripes(
    arena: torch.Tensor, layout: PageLayout, layer: int, granules: list[int]
) -> torch.Tensor:
    """A copy of a layer's stripes of some pages: uint8 `[n, stripe_stride_bytes]`."""
    rows = arena.view(-1, GRANULE_BYTES)
    count = layout.stripe_stride_bytes // GRANULE_BYTES
    first = torch.tensor(granules, device=arena.device, dtype=torch.int64) + layer * count
    index = first[:, None] + torch.arange(count, device=arena.device)
    return rows[index].flatten(1)


def _parts(stripes: torch.Tensor, layout: PageLayout) -> tuple[torch.Tensor, ...]:
    """Views `[n, Hk, bytes]` of K, V and their scales, all but the padding, in stripes."""
    runs = stripes[:, : layout.stripe_bytes].unflatten(1, (layout.kv_heads, layout.run_bytes))
    tokens, dim, dim_v = layout.page_size, layout.head_dim, layout.value_dim
    if layout.codec == "raw":
        item = getattr(torch, layout.dtype).itemsize
        sizes = [tokens * dim * item, tokens * dim_v * item]
    else:
        levels_k, levels_v = LEVELS[layout.codec]
        sizes = [
            tokens * dim // (1 if levels_k == 127 else 2),
            tokens * dim_v // (1 if levels_v == 127 else 2),
            4 * dim if layout.codec == "kv4c" else 2 * tokens,
            2 * tokens,
        ]
    starts = [0, layout.v_offset_bytes, layout.k_scale_offset_bytes, layout.v_scale_offset_bytes]
    return tuple(runs[..., a : a + n] for a, n in zip(starts, sizes, strict=False))
