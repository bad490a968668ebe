"""Reuse distances: how far down the stack of leaf-first LRU a block lies when it is asked for.

A block is a hit in a cache of C blocks exactly if its distance is smaller than C, so one pass gives
the hit ratio of LRU at every size. Distances are exact: a Fenwick tree counts the blocks that were
used later than this one's last use (Bennett and Kruskal, "LRU stack processing", 1975).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flowkv.policy.order.compiled import Array, inner, kernel
from flowkv.sim.trace import Trace

Ints = NDArray[np.int64]


@inner
def add(tree: Array, at: int, by: int) -> None:
    """Adds to one entry."""
    i = at + 1
    while i < len(tree):
        tree[i] += by
        i += i & -i


@inner
def below(tree: Array, at: int) -> int:
    """Sum of the entries up to and including `at`."""
    total, i = 0, at + 1
    while i > 0:
        total += tree[i]
        i -= i & -i
    return total


@kernel
def measure(
    offsets: Array, blocks: Array, ranks: Array, last: Array, tree: Array, out: Array
) -> None:
    """Fills `out` with distances, -1 for a first use. `last` [U] of -1 and `tree` are scratch."""
    known = 0
    for r in range(len(offsets) - 1):
        for j in range(offsets[r], offsets[r + 1]):
            rank = last[blocks[j]]
            out[j] = known - below(tree, rank) if rank >= 0 else -1
        for j in range(offsets[r], offsets[r + 1]):
            rank = last[blocks[j]]
            if rank == ranks[j]:
                continue
            if rank >= 0:
                add(tree, rank, -1)
            else:
                known += 1
            add(tree, ranks[j], 1)
            last[blocks[j]] = ranks[j]


def stack_distances(trace: Trace) -> Ints:
    """i8, one per use of a block: blocks that LRU would give up later than it; -1 at first use."""
    out = np.empty(len(trace.blocks), np.int64)
    tree = np.zeros(len(trace.blocks) + 1, np.int32)
    last = np.full(trace.unique, -1, np.int64)
    measure(trace.offsets, trace.blocks, _ranks(trace), last, tree, out)
    return out


def lru_hit_ratios(distances: Ints, pages: Sequence[int]) -> list[float]:
    """Hit ratio of leaf-first LRU at each number of blocks."""
    known = np.sort(distances[distances >= 0])
    found = np.searchsorted(known, np.asarray(pages), side="left")
    return [float(n / max(len(distances), 1)) for n in found.tolist()]


def _ranks(trace: Trace) -> Ints:
    """The order in which LRU would give up what each use touched: time, then deepest first."""
    sizes = np.diff(trace.offsets)
    ends = np.repeat(trace.offsets[1:], sizes)
    starts = np.repeat(trace.offsets[:-1], sizes)
    ranks: Ints = ends - 1 - (np.arange(len(trace.blocks)) - starts)
    edges = np.concatenate(([0], np.flatnonzero(np.diff(trace.times_ns)) + 1, [len(trace)]))
    for first, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        if end - first > 1:  # several requests at one time: LRU cannot tell their order
            a, b = int(trace.offsets[first]), int(trace.offsets[end])
            blocks = trace.blocks[a:b]
            order = np.lexsort((blocks, -trace.depths[blocks]))
            same = blocks[order][1:] == blocks[order][:-1]
            places = np.concatenate(([0], np.cumsum(~same))) if b > a else order
            ranks[a:b][order] = a + places
    return ranks
