"""Pages from a device to host memory and back, through the cache and without a model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.gpu.machine import Machine
from flowkv import KV, Geometry
from flowkv.core.geometry import GRANULE_BYTES

PAGES = ((256 << 10, 16, 4), (2 << 20, 16, 32), (4 << 20, 32, 32))
"""Bytes, tokens and layers of pages: 8 KV heads of 128 elements in bfloat16."""
TOTAL, PROMPT = 2 << 30, 512 << 20
REST_S = 2.0
"""Time in which host memory is registered with the device, as while a pool fills."""


def path(machine: Machine) -> Iterator[dict[str, Any]]:
    """Bytes a second both ways, beside one large copy of the same run."""
    if not machine.limits:
        machine.measure_limits()
    for n_bytes, tokens, layers in PAGES:
        yield from of_pages(machine, n_bytes, tokens, layers)


def of_pages(machine: Machine, n_bytes: int, tokens: int, layers: int) -> Iterator[dict[str, Any]]:
    total, prompt = (TOTAL, PROMPT) if machine.timing else (16 * n_bytes, 4 * n_bytes)
    pages, each = total // n_bytes, prompt // n_bytes
    shape = Geometry.uniform(
        layers=layers,
        kv_heads=8,
        head_dim=128,
        page_size=tokens,
        dtype="bfloat16",
        device=str(machine.device),
    )
    tiers = [f"gpu:{(pages + 64) * n_bytes}B", f"host:{2 * total}B"]
    with KV(shape, namespace="path", tiers=tiers, policy="lru") as kv:
        assert kv.planner is not None
        kv.planner.measured = lambda *_: None  # type: ignore[method-assign] # nothing is computed
        store = kv.planner.store
        store.pool(0).arena.zero_()  # pages are published only with finite numbers
        prompts = [[n, *range(each * tokens - 1), 0] for n in range(pages // each)]
        for prompt_ids in prompts:
            with kv.open(prompt_ids) as seq:
                for step in kv.prefill([seq], chunk=2048):
                    for layer in range(layers):
                        step.pages(layer)  # what lies there serves as keys and values
        time.sleep(REST_S * machine.timing)

        def out() -> None:
            """Take all memory of the device, and give it back."""
            device, granules, taken = str(machine.device), n_bytes // GRANULE_BYTES, list[int]()
            while more := store.allocator.try_allocate(
                0, min(64, store.allocator.room(device) // granules)
            ):
                taken += more
            kv.flush(60.0)
            for page in taken:
                store.pool(0).release(page)

        def back() -> None:
            for ids in prompts:
                with kv.open(ids) as seq:
                    assert seq.reused >= len(ids) - tokens

        for way, call, limit in (("out", out, "to_host"), ("back", back, "to_device")):
            rate = pages * n_bytes / timed(machine, call)
            found = {"bytes_s": rate, "of_link": rate / machine.limits[f"{limit}_bytes_s"]}
            yield {"case": f"pages of {n_bytes >> 10} KiB {way}", **found}


def timed(machine: Machine, call: Callable[[], None]) -> float:
    begun_s = time.perf_counter()
    call()
    if not machine.dry:
        torch.cuda.synchronize()
    return time.perf_counter() - begun_s
