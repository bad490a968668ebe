"""Decode over sealed pages on the CPU against every way that torch has, at any dtype.

    python -m pytest bench/bench_sealed.py -k ratio -s

Torch may gather codes, dequantise and attend, in float32 or bfloat16, or have raw pages of either
dtype to gather and attend over; each by fused attention with query heads grouped by KV head, and by
matrix products. In every round all ways take a turn, ours last; a ratio is the fastest of torch's
in a round over ours, whatever way that was. Beside it: our own decode over raw pages.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch

from bench.bench_kernels import Case, Setting, benched, near, percentiles, setting
from bench.bench_kernels import ours as attend
from bench.figures import ratios, turns
from flowkv.core.geometry import LayerGroup, PageLayout, page_id, page_layout
from flowkv.kernels import Pages, transcode
from flowkv.kernels.reference import rotate

CASES = {
    "kv8, pages of 64": ("kv8", 64),
    "kv8, pages of 128": ("kv8", 128),
    "k8v4, pages of 128": ("k8v4", 128),
    "kv4c, pages of 128": ("kv4c", 128),
    "kv4h, pages of 128": ("kv4h", 128),
}
KeysValues = tuple[torch.Tensor, torch.Tensor]


def raw_case(page_size: int, dtype: str = "bfloat16") -> Case:
    """8 rows x 4k tokens x 8 KV heads of 128, 32 query heads."""
    return Case((4096,) * 8, dtype=dtype, page_size=page_size)


@cache
def sealed_setting(codec: str, page_size: int) -> Setting:
    """The bfloat16 setting with all of its pages sealed."""
    raw = setting(raw_case(page_size))
    old, table = raw.pages.layout, raw.batch.table
    group = LayerGroup(
        layers=(0,),
        kv_heads=old.kv_heads,
        head_dim=old.head_dim,
        value_dim=old.value_dim,
        dtype=old.dtype,
    )
    new = page_layout(group, page_size, codec)
    end = raw.pages.arena.numel() // 4096
    target = torch.randperm(table.numel(), generator=torch.Generator().manual_seed(1)).int()
    arena = torch.cat([raw.pages.arena, raw.pages.arena.new_zeros(table.numel() * new.page_bytes)])
    status = transcode(arena, table.flatten(), target * new.granules + end, old, new)
    assert (status == 0).all()
    ids = (target * new.granules | page_id(0, codec)).view_as(table)
    pages = Pages(arena[end * 4096 :].clone(), old, 0, (new,))
    return raw._replace(pages=pages, batch=raw.batch._replace(table=ids))


def dequantised(pages: Pages, table: torch.Tensor, dtype: torch.dtype) -> KeysValues:
    """K and V `[B, Hk, S, D]`, the keys of kv4h left rotated."""
    layout: PageLayout = pages.sealed[0]
    frames = pages.arena.view(-1, layout.page_bytes)
    chosen = frames[((table & ((1 << 28) - 1)) // layout.granules).long()]
    runs = chosen[..., : layout.stripe_bytes].unflatten(-1, (layout.kv_heads, -1)).transpose(1, 2)
    size, dim, dim_v = layout.page_size, layout.head_dim, layout.value_dim

    def part(start: int, n: int) -> torch.Tensor:
        return runs[..., start : start + n]  # [B, Hk, pages, bytes]

    def halves(x: torch.Tensor, axis: int, zero: int) -> torch.Tensor:
        return (torch.cat((x & 15, x >> 4), axis).to(torch.int8) - zero).to(dtype)

    def floats(start: int, n: int) -> torch.Tensor:
        return part(start, 2 * n).contiguous().view(torch.float16).to(dtype)

    k_at, v_at = layout.k_scale_offset_bytes, layout.v_scale_offset_bytes
    if layout.codec in ("kv8", "k8v4"):
        k = part(0, size * dim).view(torch.int8).unflatten(-1, (size, dim)).to(dtype)
    else:
        zero = 0 if layout.codec == "kv4c" else 8
        k = halves(part(0, size * dim // 2).unflatten(-1, (size, -1)), -1, zero)
    if layout.codec == "kv4c":
        by, least = floats(k_at, 2 * dim).unflatten(-1, (2, 1, dim)).unbind(-3)
        k = k.mul_(by).add_(least)
    else:
        k.mul_(floats(k_at, size)[..., None])
    if layout.codec == "kv8":
        v = part(layout.v_offset_bytes, size * dim_v).unflatten(-1, (dim_v, size)).to(dtype) - 128
    else:
        v = halves(part(layout.v_offset_bytes, size * dim_v // 2).unflatten(-1, (dim_v, -1)), -1, 8)
    v = v.mul_(floats(v_at, size)[..., None, :]).transpose(-1, -2)
    return k.flatten(2, 3), v.flatten(2, 3)


def gathered(pages: Pages, table: torch.Tensor) -> KeysValues:
    """K and V `[B, Hk, S, D]` of raw pages."""
    layout, dtype = pages.layout, getattr(torch, pages.layout.dtype)
    frames = pages.arena.view(dtype).view(-1, layout.page_bytes // dtype.itemsize)
    runs = frames[(table // layout.granules).long()]
    runs = runs[..., : layout.stripe_bytes // dtype.itemsize].unflatten(
        -1, (layout.kv_heads, 2, -1)
    )
    k, v = runs.transpose(1, 2).unbind(3)
    return k.unflatten(-1, (-1, 128)).flatten(2, 3), v.unflatten(-1, (-1, 128)).flatten(2, 3)


def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    grouped = q.unflatten(1, (k.shape[1], -1))
    return torch.nn.functional.scaled_dot_product_attention(grouped, k, v).flatten(1, 2)


def products(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    s = q.unflatten(1, (k.shape[1], -1)) @ k.mT
    return (torch.softmax(s.float() * q.shape[-1] ** -0.5, -1).to(v.dtype) @ v).flatten(1, 2)


def ways(codec: str, page_size: int) -> dict[str, Callable[[], torch.Tensor]]:
    """Every way that torch has to the answer."""
    scene, calls = sealed_setting(codec, page_size), {}
    for name in ("float32", "bfloat16"):
        dtype, raw = getattr(torch, name), setting(raw_case(page_size, name))
        q = scene.q.float()
        q = (rotate(q) if codec == "kv4h" else q).to(dtype)
        for how in (fused, products):

            def from_codes(how: Any = how, q: Any = q, dtype: Any = dtype) -> torch.Tensor:
                return how(q, *dequantised(scene.pages, scene.batch.table, dtype))

            def from_raw(how: Any = how, raw: Any = raw, dtype: Any = dtype) -> torch.Tensor:
                return how(raw.q.to(dtype), *gathered(raw.pages, raw.batch.table))

            calls[f"codes, {name}, {how.__name__}"] = from_codes
            calls[f"raw, {name}, {how.__name__}"] = from_raw
    return calls


def check(codec: str, page_size: int) -> None:
    """All ways answer alike, each for its pages."""
    scene = sealed_setting(codec, page_size)
    expected = attend(scene)
    for name, call in ways(codec, page_size).items():
        if name.startswith("codes"):
            near((call().to(expected.dtype),), (expected,))
    for dtype in ("float32", "bfloat16"):
        raw = setting(raw_case(page_size, dtype))
        near((ways(codec, page_size)[f"raw, {dtype}, fused"](),), (attend(raw),))


@benched("paged_attention")
@pytest.mark.parametrize("name", CASES)
def test_sealed_decode(benchmark: Any, name: str) -> None:
    benchmark(attend, sealed_setting(*CASES[name]))


@pytest.mark.parametrize("name", CASES)
def test_sealed_ratio(name: str) -> None:
    codec, page_size = CASES[name]
    check(codec, page_size)
    scene = sealed_setting(codec, page_size)
    sides = dict(ways(codec, page_size))
    for dtype in ("float32", "bfloat16"):
        sides[f"flowkv, raw {dtype}"] = partial(attend, setting(raw_case(page_size, dtype)))
    sides["flowkv, sealed"] = partial(attend, scene)
    times = turns(sides, 9)
    ours = times["flowkv, sealed"]
    best = [*map(min, zip(*(t for side, t in times.items() if side[:6] != "flowkv"), strict=True))]
    seen = scene.pages.sealed[0].stripe_bytes * scene.batch.table.numel()
    print(f"\n{name}, {torch.get_num_threads()} threads: {min(ours) * 1e3:.2f} ms at best,")
    print(f"    {seen / min(ours) / 1e9:.1f} GB/s of sealed pages")
    print("    " + percentiles(ratios(best, ours)), end="")
    print(" faster than the fastest of torch")
    for side in list(sides)[:-1]:
        ratio = percentiles(ratios(times[side], ours))
        median = statistics.median(times[side])
        print(f"    {ratio} than {side} ({median * 1e3:.1f} ms)")
