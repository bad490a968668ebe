"""Frames into a tier and out again, in GB/s, and the share of the time that digests take.

    pytest bench/bench_tiers.py --benchmark-columns=min,median,rounds

A round moves 64 MiB of distinct frames of 16 or 32 stripes, after every byte was checked once. Disk
loads come from the operating system's page cache: the figure is what FlowKV's own path costs, not
what a device gives.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from flowkv.testing import MemoryTier
from flowkv.tiers.base import FrameInfo, Load, Outcome, Store, Tier
from flowkv.tiers.disk import DiskTier
from flowkv.tiers.frame import describe, verify
from flowkv.tiers.host import HostTier
from flowkv.tiers.shared import SharedTier

ROUND_BYTES = 64 << 20
SIZES = {"64 KiB": 64 << 10, "256 KiB": 256 << 10, "1 MiB": 1 << 20}
LAYOUT = bytes(16)


@pytest.fixture(params=["memory", "host", "shared", "disk"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    capacity = 4 * ROUND_BYTES
    if request.param == "disk":
        made: Tier = DiskTier(tmp_path / "kv", capacity)
    elif request.param == "shared":
        made = SharedTier(f"bench-{os.getpid()}", capacity)
    else:
        made = (HostTier if request.param == "host" else MemoryTier)(capacity)
    request.node.add_marker(pytest.mark.benchmark(group=f"tiers {request.param}"))
    yield made
    made.remove() if isinstance(made, SharedTier) else made.close()


@pytest.fixture(params=SIZES)
def stores(request: pytest.FixtureRequest) -> list[Store]:
    size = SIZES[request.param]
    noise = np.random.default_rng(0).bytes(ROUND_BYTES)
    info = FrameInfo(
        kind="page",
        codec=0,
        fidelity=0,
        layout=LAYOUT,
        parent=bytes(32),
        namespace=bytes(32),
        group=0,
        tokens=64,
        stripe_bytes=max(4096, size // 32),
    )
    return [
        Store(hashlib.sha256(b"%d" % at).digest(), info, memoryview(noise)[at : at + size])
        for at in range(0, ROUND_BYTES, size)
    ]


def finish(tier: Tier, count: int, outcome: Outcome) -> None:
    while count:
        done = tier.poll(1.0)
        assert all(answer.outcome is outcome for answer in done), done
        count -= len(done)


def put(tier: Tier, stores: list[Store]) -> None:
    tier.submit_store(stores)
    finish(tier, len(stores), Outcome.STORED)


def loads(stores: list[Store]) -> list[Load]:
    memory = memoryview(bytearray(ROUND_BYTES))
    size = stores[0].body.nbytes
    return [
        Load(store.key, memory[n * size : (n + 1) * size], LAYOUT) for n, store in enumerate(stores)
    ]


def note(benchmark, stores: list[Store]) -> None:
    """Adds GB/s, and what part of a round one thread needs for the digests alone."""
    if benchmark.stats is None:  # with --benchmark-disable
        return
    seconds = benchmark.stats.stats.min
    headers = [describe(store.key, store.info, store.body) for store in stores]
    digests = 1e9
    for _ in range(5):
        start = time.perf_counter()
        for header, store in zip(headers, stores, strict=True):
            verify(header, store.body)
        digests = min(digests, time.perf_counter() - start)
    benchmark.extra_info["gb_per_s"] = round(ROUND_BYTES / seconds / 1e9, 2)
    benchmark.extra_info["digest_gb_per_s"] = round(ROUND_BYTES / digests / 1e9, 1)
    benchmark.extra_info["digest_share"] = round(digests / seconds, 3)


def test_put(benchmark, tier: Tier, stores: list[Store]) -> None:
    """Frames that are not there yet, into space that was used before."""
    keys = [store.key for store in stores]
    put(tier, stores)

    def empty() -> None:
        assert tier.delete(keys) == len(keys)

    benchmark.pedantic(put, (tier, stores), setup=empty, rounds=5)
    note(benchmark, stores)


def test_get(benchmark, tier: Tier, stores: list[Store]) -> None:
    put(tier, stores)
    wishes = loads(stores)

    def get() -> None:
        tier.submit_load(wishes)
        finish(tier, len(wishes), Outcome.HIT)

    get()
    assert all(wish.target == store.body for wish, store in zip(wishes, stores, strict=True))
    benchmark.pedantic(get, rounds=7)
    note(benchmark, stores)
