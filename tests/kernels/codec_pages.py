"""Pages full of what codecs get wrong, and transcoding them between guards."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flowkv.kernels import checking, transcode
from tests.inside import (
    GRANULE_BYTES,
    NON_FINITE,
    OUT_OF_RANGE,
    SOUND,
    ConfigError,
    PageLayout,
    page_of,
)
from tests.inside import codecs_KINDS as KINDS
from tests.inside import layout_CODECS as CODECS
from tests.kernels.scene import POISON, int32, layout_like, layout_of

EXTREMES = ("largest", "huge", "beyond", "nan", "infinite", "nan and huge")
"""Kinds of runs with one special element; `status_of` says what becomes of its layer."""

# (kv heads, page, D, Dv)
SMALL = ((3, 16, 20, 24), (1, 24, 7, 5), (2, 8, 80, 16))
SHAPES = (*SMALL, (2, 64, 128, 64), (1, 64, 80, 96), (2, 72, 96, 80), (1, 128, 64, 256))
DTYPES = ("float32", "bfloat16", "float16")


def layouts_of(shape: tuple[int, int, int, int], dtype: str) -> dict[str, PageLayout]:
    """The layout of two layers in every codec that such pages can have."""
    heads, page, dim, dim_v = shape
    raw, found = layout_of(heads, dim, dim_v, page, dtype), {}
    for codec in CODECS:
        try:
            found[codec] = layout_like(raw, codec)
        except ConfigError:
            assert page < 64 or min(dim, dim_v) < 64
    return found


def run_of(kind: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Float32 `[..., P, D]` of a kind, regular or extreme."""
    if kind in KINDS:
        return page_of(kind, shape, seed)
    x = page_of("noise", shape, seed).clamp(-9, 9)
    flat = x.view(-1)
    place = seed * 7919 % flat.numel()
    if kind == "largest":
        flat[place] = 65504.0 * (-1) ** seed
    elif kind == "huge":  # within bfloat16, beyond float16 whatever divides it
        flat[place] = 3.0e38 * (-1) ** seed
    elif kind == "beyond":  # too large for a scale of kv4c or of 4 bits, not for one of 8
        flat[place] = 2.0e6 * (-1) ** seed
    elif kind == "infinite":
        flat[place] = torch.inf * (-1) ** seed
    else:
        flat[place] = torch.nan
        if kind == "nan and huge":
            flat[(place + 1) % flat.numel()] = 1.0e37
    return x


class Filled(NamedTuple):
    """Raw pages in an arena, and what is in them.

    Attributes:
        arena: Guards and poison around the pages.
        source: int32 `[n]`, where they begin.
        k: float32 `[n, L, Hk, P, D]`, exactly what the pages hold.
        v: float32 `[n, L, Hk, P, Dv]`.
    """

    arena: torch.Tensor
    source: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def filled(raw: PageLayout, kinds: list[tuple[str, str]], seed: int = 0) -> Filled:
    """One raw page for every pair of kinds, of K and of V; its layers differ."""
    dtype, item = getattr(torch, raw.dtype), getattr(torch, raw.dtype).itemsize
    heads, tokens, layers = raw.kv_heads, raw.page_size, raw.layers
    source = int32([1 + i * (raw.granules + 1) for i in range(len(kinds))])
    count = len(kinds) * (raw.granules + 1) + 1
    arena = torch.full((count * GRANULE_BYTES,), POISON, dtype=torch.uint8)
    both = []
    for which, dim in enumerate((raw.head_dim, raw.value_dim)):
        x = torch.stack(
            [
                torch.stack(
                    [
                        run_of(pair[which], (heads, tokens, dim), seed + 31 * i + 7 * layer + which)
                        for layer in range(layers)
                    ]
                )
                for i, pair in enumerate(kinds)
            ]
        ).to(dtype)
        for i, start in enumerate(source.tolist()):
            for layer in range(layers):
                for head in range(heads):
                    begin = start * GRANULE_BYTES + raw.run_offset_bytes(layer, head)
                    begin += raw.v_offset_bytes if which else 0
                    part = x[i, layer, head].flatten().view(torch.uint8)
                    arena[begin : begin + tokens * dim * item] = part
        both.append(x.float())
    return Filled(arena, source, *both)


class Moved(NamedTuple):
    """What became of an arena in which pages were transcoded."""

    arena: torch.Tensor
    target: torch.Tensor
    status: torch.Tensor

    def pages(self, layout: PageLayout) -> torch.Tensor:
        """The new pages, uint8 `[n, page_bytes]`."""
        rows = self.arena.view(-1, GRANULE_BYTES)
        return torch.stack([rows[g : g + layout.granules].flatten() for g in self.target.tolist()])


def moved(
    arena: torch.Tensor, source: torch.Tensor, old: PageLayout, new: PageLayout, backend: str
) -> Moved:
    """Transcode into poison behind the arena, a guard behind every page; nothing else changes."""
    count, behind = len(source), arena.numel() // GRANULE_BYTES
    places = torch.arange(count).flip(0) * (new.granules + 1) + behind
    extra = (count * (new.granules + 1)) * GRANULE_BYTES
    room = torch.cat([arena, torch.full((extra,), POISON, dtype=torch.uint8)])
    before, target = room.clone(), places.int()
    with checking():
        status = transcode(room, source, target, old, new, backend=backend)
    rows, kept = room.view(-1, GRANULE_BYTES), before.view(-1, GRANULE_BYTES)
    untouched = torch.ones(len(rows), dtype=torch.bool)
    for place in target.tolist():
        untouched[place : place + new.granules] = False
    assert torch.equal(rows[untouched], kept[untouched])
    assert status.shape == (count, old.layers) and status.dtype == torch.int32
    return Moved(room, target, status)


def padding(layout: PageLayout) -> torch.Tensor:
    """Which bytes of a page mean nothing, bool `[page_bytes]`."""
    tokens, dim, dim_v, codec = (layout.page_size, layout.head_dim, layout.value_dim, layout.codec)
    item = getattr(torch, layout.dtype).itemsize
    k, v = {
        "raw": (dim * item, dim_v * item),
        "kv8": (dim, dim_v),
        "k8v4": (dim, dim_v / 2),
        "kv4c": (dim / 2, dim_v / 2),
        "kv4h": (dim / 2, dim_v / 2),
    }[codec]
    parts = [(0, tokens * k), (layout.v_offset_bytes, tokens * v)]
    if codec != "raw":
        scales = 4 * dim if codec == "kv4c" else 2 * tokens
        parts += [(layout.k_scale_offset_bytes, scales), (layout.v_scale_offset_bytes, 2 * tokens)]
    meaning = torch.zeros(layout.page_bytes, dtype=torch.bool)
    for layer in range(layout.layers):
        for head in range(layout.kv_heads):
            run = layout.run_offset_bytes(layer, head)
            for start, size in parts:
                meaning[run + start : run + start + int(size)] = True
    return ~meaning


def status_of(k: torch.Tensor, v: torch.Tensor, codec: str) -> int:
    """What `transcode` should say of a layer that holds these float32 runs, from first principles.

    A scale or offset is too large where float16 rounds it to infinity; rotated keys are judged in
    float64, so none may lie within an ulp of the limit.
    """
    if not (k.isfinite().all() and v.isfinite().all()):
        return NON_FINITE
    if codec == "raw":
        return SOUND
    k, v = k.double(), v.double()
    largest = [v.abs().amax() / (127 if codec == "kv8" else 7)]
    if codec == "kv4c":
        low, high = k.amin(-2), k.amax(-2)
        largest += [low.abs().max(), ((high - low) / 15).max()]
    elif codec == "kv4h":
        n = k.shape[-1] & -k.shape[-1]
        signs = torch.ones(1, 1, dtype=torch.float64)
        while len(signs) < n:
            signs = torch.cat([torch.cat([signs, signs], 1), torch.cat([signs, -signs], 1)])
        largest.append((k.unflatten(-1, (-1, n)) @ signs).abs().max() * n**-0.5 / 7)
    else:
        largest.append(k.abs().max() / 127)
    return OUT_OF_RANGE if max(largest) >= 65520 else SOUND
