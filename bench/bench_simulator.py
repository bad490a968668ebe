"""Another simulator's opinion: LRU and Belady of libcachesim on the same streams of single blocks.

    python -m bench.bench_simulator [TRACE ...]      # pip install --group bench-sim

libcachesim knows no requests of several blocks. So each chain is read leaf to root, one block after
the other, every block a root and a request of its own; there both must agree. The last columns are
whole requests, for comparison: a chain is a hit only as far as it was there when the request came.
Without arguments: generated traces.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowkv.core.errors import FlowKVError
from flowkv.policy import LRU
from flowkv.policy.optimum import NOT_AGAIN, belady, next_uses
from flowkv.sim import Trace, build_trace, generate, read_trace
from flowkv.sim.replay import OnePlace, bounds_of
from flowkv.sim.trace import wide

SIZES = (0.005, 0.01, 0.05, 0.1)
MISSING = "libcachesim is not installed: pip install 'libcachesim>=0.3.5' to compare with it"


def flattened(trace: Trace) -> Trace:
    """The trace as single blocks, leaf to root, at times of their own."""
    sizes = np.diff(trace.offsets)
    starts, ends = np.repeat(trace.offsets[:-1], sizes), np.repeat(trace.offsets[1:], sizes)
    flat = trace.blocks[ends - 1 - (np.arange(len(trace.blocks)) - starts)]
    ones = np.ones(len(flat), np.int64)
    return build_trace(trace.name, np.arange(len(flat)), ones, wide(flat), trace.block_tokens)


def theirs(library: Any, single: Trace, capacity: int) -> tuple[float, float]:
    """Hit ratios of libcachesim's LRU and Belady."""
    uses = next_uses(single.offsets, single.blocks, single.unique)
    # Its requests are counted from 1, and no use is the largest number.
    following = np.where(uses == NOT_AGAIN, np.iinfo(np.int64).max, uses + 1)
    lru, best = library.LRU(cache_size=capacity), library.Belady(cache_size=capacity)
    hits = np.zeros(2, np.int64)
    for block, use in zip(single.blocks.tolist(), following.tolist(), strict=True):
        told = {"obj_id": block + 1, "obj_size": 1}
        hits[0] += lru.get(library.Request(**told))
        hits[1] += best.get(library.Request(**told, next_access_vtime=use))
    shares: NDArray[np.float64] = hits / max(len(single.blocks), 1)
    return float(shares[0]), float(shares[1])


def compare(library: Any, trace: Trace) -> list[tuple[float, ...]]:
    """For each size: theirs and ours of single blocks, and ours of whole requests."""
    single, rows = flattened(trace), []
    n = max(len(single.blocks), 1)
    for size in SIZES:
        capacity = max(1, int(size * trace.unique))
        lru, best = theirs(library, single, capacity)
        own_lru = OnePlace(single, LRU(), capacity).replay().hits.sum() / n
        own_best = belady(single.offsets, single.blocks, single.unique, capacity).sum() / n
        both = bounds_of(trace, capacity)
        rows.append((size, lru, own_lru, best, own_best, both.lru.sum() / n, both.opt.sum() / n))
    return rows


def main(names: list[str]) -> int:
    """Prints a table per trace; 0 also without the library, as there is nothing to compare then."""
    try:
        import libcachesim
    except ImportError:
        print(MISSING, file=sys.stderr)
        return 0
    try:
        traces = [read_trace(name) for name in names]
    except FlowKVError as error:
        print(error, file=sys.stderr)
        return 2
    traces = traces or [generate(kind, requests=2000, seed=1) for kind in ("chat", "rag")]
    worst = [0.0, 0.0]
    for trace in traces:
        print(f"\n{trace.name}: {len(trace.blocks):,} accesses, {trace.unique:,} blocks")
        print("  size   lru theirs    ours   belady theirs    ours   requests: lru      opt")
        for size, lru, own, best, own_best, whole, opt in compare(libcachesim, trace):
            print(f"{size:6.1%} {lru:12.4f} {own:7.4f} {best:15.4f} {own_best:7.4f}", end="")
            print(f" {whole:15.4f} {opt:8.4f}")
            worst = [max(worst[0], abs(lru - own)), max(worst[1], abs(best - own_best))]
    print(f"\nlargest difference: LRU {worst[0]:.1e}, Belady {worst[1]:.1e}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
