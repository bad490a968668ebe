"""A model made of arithmetic: K and V of a position are a hash of everything before it.

A page that is wrong in any way (another prompt's, another tenant's, stale, shifted, half written)
then shows as a wrong number, and nothing has to be trained.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

import numpy as np
import torch

from flowkv import KV, Geometry, LayerGroup, Sequence, Step, kernels
from tests.inside import CudaStreams, operands, page_layout
from tests.inside import kv_plan as plan

PAGE = 8
WINDOW = 12
MADE: list[KV] | None = None
"""Caches that the running test left open, where tests/cache/conftest.py ends them."""
_TWO_64 = 1 << 64


def geometry(
    *,
    page_size: int = PAGE,
    window: int = WINDOW,
    layers: int = 2,
    heads: int = 2,
    device: str = "cpu",
) -> Geometry:
    """A full group of every second layer, and a sliding one of the others."""
    full = LayerGroup(
        layers=tuple(range(0, layers, 2)), kv_heads=heads, head_dim=8, value_dim=8, device=device
    )
    sliding = LayerGroup(
        layers=tuple(range(1, layers, 2)),
        kv_heads=1,
        head_dim=8,
        value_dim=16,
        kind="sliding",
        window=window,
        device=device,
    )
    return Geometry(groups=(full, sliding), page_size=page_size)


def simple(**options: Any) -> Geometry:
    """One full group of one layer."""
    return Geometry.uniform(**{"layers": 1, "kv_heads": 1, "head_dim": 8, "page_size": 8} | options)


def make_kv(shape: Geometry | None = None, *, pages: int = 64, **options: Any) -> KV:
    """A cache whose pool holds about `pages` raw pages of each group, and loads what it can.

    The toy computes so fast that loading is seldom worth it, and a test must not hang on that.
    """
    shape = shape or geometry()
    granules = sum(page_layout(group, shape.page_size).granules for group in shape.groups)
    options = {"policy": "lru", "max_rows": 32} | options
    size = pages * granules * 4096
    if "tiers" in options:
        options["tiers"] = [f"gpu:{size}B", *options["tiers"]]
    else:
        options = {"gpu": size} | options
    kv = KV(shape, **{"namespace": "toy"} | options)
    kv.planner.measured = lambda *_: None
    if MADE is not None:
        MADE[:] = [*(one for one in MADE if not one.closed), kv]
    return kv


def history(tokens: Items[int], tag: int = 0) -> np.ndarray:
    """uint64 `[T]`: a number for each position that depends on all tokens up to it."""
    seen, out = (tag * 0x9E3779B97F4A7C15 + 1) % _TWO_64, []
    for token in tokens:
        seen = (seen * 6364136223846793005 + int(token) * 2862933555777941757 + 3037) % _TWO_64
        out.append(seen ^ seen >> 29)
    return np.array(out, np.uint64)


def numbers(past: np.ndarray, layer: int, part: int, shape: tuple[int, int]) -> torch.Tensor:
    """float32 `[T, heads, dim]` in [-1, 1): a hash of the history, the layer and the element."""
    lane = np.arange(shape[0] * shape[1], dtype=np.uint64) + np.uint64(1 + part * 4096)
    x = past[:, None] + lane[None] * np.uint64(0x9E3779B97F4A7C15) + np.uint64(layer << 40)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    values = (x >> np.uint64(40)).astype(np.float32) / (1 << 23) - 1
    return torch.from_numpy(values.reshape(len(past), *shape))


def keys_values(
    shape: Geometry, layer: int, tokens: Items[int], first: int = 0, tag: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """K `[T, Hk, D]` and V `[T, Hk, Dv]` of the tokens from position `first` on."""
    group = shape.groups[shape.locate(layer)[0]]
    past, dtype = history(tokens, tag)[first:], getattr(torch, group.dtype)
    k = numbers(past, layer, 0, (group.kv_heads, group.head_dim))
    v = numbers(past, layer, 1, (group.kv_heads, group.value_dim))
    return k.to(dtype), v.to(dtype)


def write(step: Step, tags: Items[int] | None = None) -> None:
    """Writes K and V of a step's new tokens into its pages, layer by layer."""
    shape = step.seqs[0].planner.geometry
    tags = tags or [0] * len(step.seqs)
    for g, group in enumerate(shape.groups):
        for layer in group.layers:
            parts = []
            for seq, count, tag in zip(step.seqs, step.counts.tolist(), tags, strict=True):
                known = seq.tokens[: seq.length + count].tolist()
                parts.append(keys_values(shape, layer, known, seq.length, tag))
            k, v = (torch.cat([part[i] for part in parts]).to(group.device) for i in (0, 1))
            kernels.append(k, v, step.pages(layer), step.batch(g))


def advance(
    kv: KV, seqs: Items[Sequence], tokens: Items[Items[int]], tags: Items[int] | None = None
) -> None:
    """One step of the toy model."""
    with kv.step(seqs, tokens) as step:
        write(step, tags)


def prefill(kv: KV, seq: Sequence, chunk: int = 16, tag: int = 0) -> Sequence:
    """Computes what is missing of a prompt."""
    for step in kv.prefill([seq], chunk=chunk):
        write(step, [tag])
    settle(kv)
    return seq


def opened(kv: KV, tokens: Items[int], *, tag: int = 0, **options: Any) -> Sequence:
    """Opens a prompt and computes what is missing."""
    return prefill(kv, kv.open(tokens, **options), tag=tag)


def published(kv: KV, tokens: Items[int], *, tag: int = 0, **options: Any) -> None:
    """Makes a prompt known."""
    opened(kv, tokens, tag=tag, **options).close()
    settle(kv)


def settle(kv: KV) -> None:
    """Have a device come to the end of its work, and the cache draw the consequences.

    A step on a GPU publishes its pages at the end of a later one, and tiers get them when their
    copies are over.
    """
    store = kv.planner.store
    if not operands.GPUS & {pool.device.type for pool in store.pools.values()}:
        return
    kv.planner.publish_pending()
    with kv.lock:
        for _ in range(2):  # what is over lets further copies begin
            for copies in [pool.copies for pool in store.pools.values()]:
                if copies is not None and isinstance(copies.streams, CudaStreams):
                    for mark, *_ in [*copies._coming, *copies._leaving]:
                        mark.wait()
            while store.writes.drain():
                pass


def content(kv: KV, seq: Sequence, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K `[S, Hk, D]` and V of a sequence, gathered from its pages; zeros where pages are gone."""
    group, _ = seq.planner.locate(layer)
    step = plan(kv, [seq], [0])
    try:
        with kernels.checking():
            columns = int(seq.lengths[group])
            k, v = kernels.gather_dense(step.pages(layer), step.batch(group), columns)
    finally:
        step.rollback()
    return k[0].transpose(0, 1).cpu(), v[0].transpose(0, 1).cpu()


def evict_all(kv: KV) -> None:
    """All pages that no sequence holds leave the devices."""
    with kv.lock:
        while kv.planner.store.eviction.make_room(0, 1):
            pass


def check_content(
    kv: KV, seq: Sequence, tokens: Items[int], tag: int = 0, within: float = 0.0
) -> None:
    """Every position that a query may still see holds what the model computed there.

    Args:
        within: Largest error, for pages that were encoded.
    """
    shape = seq.planner.geometry
    assert seq.length == len(tokens)
    for g, group in enumerate(shape.groups):
        seen = 0 if group.window is None else max(0, seq.length - group.window + 1)
        assert seq.first_page[g] * shape.page_size <= seen
        first = seq.first_page[g] * shape.page_size
        for layer in group.layers:
            wanted = keys_values(shape, layer, tokens, first, tag)
            for name, got, want in zip("kv", content(kv, seq, layer), wanted, strict=True):
                worst = float((got[first:] - want).abs().max()) if len(want) else 0.0
                assert worst <= within, f"{name} of layer {layer} is wrong by {worst}"
