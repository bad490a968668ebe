"""Cost of a decision: blocks per second and overhead per call, for every row of the catalogue.

    pytest bench/bench_policies.py --benchmark-columns=min,median,rounds,iterations

A round is a burst of calls on a cache of 98,000 blocks in 400 chains of 245 (the mean request of an
agent trace). `extra_info` holds nanoseconds per block at the fastest round.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from flowkv.policy import CATALOGUE, make_policy

CHAINS, LENGTH, BURST = 400, 245, 100
MS = 10**6
pytestmark = pytest.mark.benchmark(group="policies")


class Cache:
    """A full cache and a clock."""

    def __init__(self, name: str, **options: object) -> None:
        self.policy = make_policy(name, **options)
        self.clock = itertools.count(MS, MS)
        blocks = np.arange(CHAINS * LENGTH).reshape(CHAINS, LENGTH)
        self.chains = [self.with_parents(chain) for chain in blocks]
        for chain, parents in self.chains:
            self.policy.insert(next(self.clock), chain, parents)

    @staticmethod
    def with_parents(chain: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return chain, np.concatenate(([-1], chain[:-1]))


@pytest.fixture(params=CATALOGUE)
def cache(request):
    return Cache(request.param)


def note(benchmark, calls: int, blocks: int) -> None:
    if benchmark.stats is not None:  # None with --benchmark-disable
        seconds = benchmark.stats.stats.min
        benchmark.extra_info["us_per_call"] = round(1e6 * seconds / calls, 2)
        benchmark.extra_info["ns_per_block"] = round(1e9 * seconds / calls / blocks, 1)
        benchmark.extra_info["million_blocks_per_s"] = round(blocks * calls / seconds / 1e6, 1)


def test_access(benchmark, cache):
    """A request of 245 blocks hits."""
    order = np.random.default_rng(0).permutation(CHAINS)[:BURST]
    chains = [cache.chains[i][0] for i in order]

    def burst():
        for chain in chains:
            cache.policy.access(next(cache.clock), chain)

    benchmark(burst)
    note(benchmark, BURST, LENGTH)


def test_access_without_common_history(benchmark, cache):
    """The worst case: 245 blocks from 245 places, each with its own count."""
    rng = np.random.default_rng(0)
    chains = [rng.permutation(CHAINS * LENGTH)[:LENGTH] for _ in range(BURST)]

    def burst():
        for chain in chains:
            cache.policy.access(next(cache.clock), chain)

    benchmark(burst)
    note(benchmark, BURST, LENGTH)


def test_evict(benchmark, cache):
    """Room for 245 blocks is made; the blocks come back untimed."""
    fresh = []

    def refill():
        for chain, parents in map(cache.with_parents, fresh):
            cache.policy.insert(next(cache.clock), chain, parents)
        fresh.clear()

    def burst():
        for _ in range(BURST):
            fresh.append(cache.policy.evict(next(cache.clock), LENGTH))

    benchmark.pedantic(burst, setup=refill, rounds=20)
    note(benchmark, BURST, LENGTH)


def test_insert(benchmark, cache):
    """A chain of 245 blocks becomes resident; room is made untimed."""
    fresh = []

    def make_room():
        fresh[:] = [
            cache.with_parents(cache.policy.evict(next(cache.clock), LENGTH)) for _ in range(BURST)
        ]

    def burst():
        for chain, parents in fresh:
            cache.policy.insert(next(cache.clock), chain, parents)

    benchmark.pedantic(burst, setup=make_room, rounds=20)
    note(benchmark, BURST, LENGTH)


@pytest.mark.parametrize("held", [0, 32 * LENGTH], ids="held{}".format)
def test_evict_one(benchmark, cache, held):
    """A step needs one page, `held` of them being in use (as an array)."""
    protected = np.concatenate([chain for chain, _ in cache.chains[-32:]])[:held]

    def burst():
        for _ in range(BURST):
            slot = cache.policy.evict(next(cache.clock), 1, protected)
            cache.policy.insert(next(cache.clock), slot, slot * 0 - 1)

    benchmark(burst)
    note(benchmark, BURST, 1)


@pytest.mark.parametrize("pinned", [0, 32 * LENGTH], ids="pinned{}".format)
def test_evict_one_of_pinned(benchmark, cache, pinned):
    """The same, what is in use being pinned once: it should cost nothing."""
    cache.policy.pin(np.concatenate([chain for chain, _ in cache.chains[-32:]])[:pinned])

    def burst():
        for _ in range(BURST):
            slot = cache.policy.evict(next(cache.clock), 1)
            cache.policy.insert(next(cache.clock), slot, slot * 0 - 1)

    benchmark(burst)
    note(benchmark, BURST, 1)


@pytest.mark.parametrize("call", ["access", "expired", "evict", "priority"])
def test_overhead(benchmark, cache, call):
    """What a call costs that has next to nothing to do."""
    policy, clock, one = cache.policy, cache.clock, np.zeros(1, np.int64)
    calls = {
        "access": lambda: policy.access(next(clock), one),
        "expired": lambda: policy.expired(next(clock)),
        "evict": lambda: policy.evict(next(clock), 0),
        "priority": lambda: policy.priority(0),
    }
    benchmark(calls[call])
    note(benchmark, 1, 1)
