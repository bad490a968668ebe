"""`characterise`: statistics of a trace, independent of any policy."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowkv.policy.order.compiled import Array, inner, kernel
from flowkv.sim.trace import Trace, next_turns

# Reuse distances: depth of a block in the stack of leaf-first LRU when it is requested.
#
# A block is a hit in a cache of C blocks exactly if its distance is smaller than C, so one pass
# gives the hit ratio of LRU at every size. Distances are exact: a Fenwick tree counts the blocks
# that were used later than this one's last use (Bennett and Kruskal, "LRU stack processing",
# 1975).

Ints = NDArray[np.int64]


@inner
def add(tree: Array, at: int, by: int) -> None:
    """Add `by` to entry `at` of a Fenwick tree."""
    i = at + 1
    while i < len(tree):
        tree[i] += by
        i += i & -i


@inner
def below(tree: Array, at: int) -> int:
    """Return the sum of the entries up to and including `at`."""
    total, i = 0, at + 1
    while i > 0:
        total += tree[i]
        i -= i & -i
    return total


@kernel
def measure(
    offsets: Array, blocks: Array, ranks: Array, last: Array, tree: Array, out: Array
) -> None:
    """Fill `out` with distances, -1 for a first use. `last` [U] of -1 and `tree` are scratch."""
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
    """Return per use of a block how many blocks LRU would evict later, i8; -1 at first use."""
    out = np.empty(len(trace.blocks), np.int64)
    tree = np.zeros(len(trace.blocks) + 1, np.int32)
    last = np.full(trace.unique, -1, np.int64)
    measure(trace.offsets, trace.blocks, _ranks(trace), last, tree, out)
    return out


def lru_hit_ratios(distances: Ints, pages: Sequence[int]) -> list[float]:
    """Return the hit ratio of leaf-first LRU at each number of blocks."""
    known = np.sort(distances[distances >= 0])
    found = np.searchsorted(known, np.asarray(pages), side="left")
    return [float(n / max(len(distances), 1)) for n in found.tolist()]


def lru_hits(trace: Trace, capacity: int) -> Ints:
    """Return the hits of leaf-first LRU in leading blocks of each request, i8 [R]."""
    distances = stack_distances(trace)
    found = np.cumsum((distances >= 0) & (distances < capacity))
    return np.diff(np.concatenate(([0], found))[trace.offsets])


def _ranks(trace: Trace) -> Ints:
    """Return the eviction order of LRU over all uses: by time, then deepest first."""
    sizes = np.diff(trace.offsets)
    ends = np.repeat(trace.offsets[1:], sizes)
    starts = np.repeat(trace.offsets[:-1], sizes)
    ranks: Ints = ends - 1 - (np.arange(len(trace.blocks)) - starts)
    edges = np.concatenate(([0], np.flatnonzero(np.diff(trace.times_ns)) + 1, [len(trace)]))
    for first, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        if end - first > 1:  # several requests at one time have no order in LRU
            a, b = int(trace.offsets[first]), int(trace.offsets[end])
            blocks = trace.blocks[a:b]
            order = np.lexsort((blocks, -trace.depths[blocks]))
            same = blocks[order][1:] == blocks[order][:-1]
            places = np.concatenate(([0], np.cumsum(~same))) if b > a else order
            ranks[a:b][order] = a + places
    return ranks


WINDOWS_S = (60.0, 600.0, 3600.0)
SIZES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
TURNS = (0, 1, 2, 3, 5, 10)


class Percentiles(msgspec.Struct, frozen=True):
    """Percentiles of some values; all 0 without values."""

    p10: float
    p50: float
    p90: float
    p99: float


class Character(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of a trace.

    Attributes:
        trace: Name of the trace.
        requests: Number of requests.
        sessions: Number of different known sessions.
        tenants: Number of different tenants.
        span_s: Seconds from the first request to the last.
        block_tokens: Tokens of a block.
        blocks: Requested blocks.
        unique: Different blocks.
        infinite_hit_ratio: Hit ratio of a cache without evictions; no policy exceeds it.
        used_once: Share of the different blocks that are requested only once.
        top_share: Share of all requested blocks that falls on the most requested 1 % of them.
        blocks_per_request: Lengths of chains.
        extending: Share of the requests that continue the blocks of an earlier one.
        gap_s: Seconds from a request to the one that continues it.
        reuse_s: Seconds from a use of a block to its next use.
        reuse_requests: The same in requests.
        stack_distance: The same in blocks: the capacity that leaf-first LRU needs.
        arrival_s: Mean time between requests.
        arrival_cv: Its coefficient of variation; 1 is random, more is bursty.
        working_set: Window in seconds -> different blocks within it, mean over windows.
        returns: Turn -> share of the requests of that turn (0 the first) that are continued.
        lru: Share of the different blocks that fit -> hit ratio of leaf-first LRU, from distances.
    """

    trace: str
    requests: int
    sessions: int
    tenants: int
    span_s: float
    block_tokens: int
    blocks: int
    unique: int
    infinite_hit_ratio: float
    used_once: float
    top_share: float
    blocks_per_request: Percentiles
    extending: float
    gap_s: Percentiles
    reuse_s: Percentiles
    reuse_requests: Percentiles
    stack_distance: Percentiles
    arrival_s: float
    arrival_cv: float
    working_set: dict[float, float]
    returns: dict[int, float]
    lru: dict[float, float]


def characterise(trace: Trace) -> Character:
    """Return the statistics of a trace; takes about a second per million blocks."""
    sizes, n = np.diff(trace.offsets), max(len(trace), 1)
    uses = np.sort(np.bincount(trace.blocks, minlength=trace.unique))[::-1]
    top = max(1, round(trace.unique / 100))
    turns = next_turns(trace, use_sessions=False)
    going_on = np.flatnonzero(turns >= 0)
    arrivals = np.diff(trace.times_ns) / 1e9
    mean = float(arrivals.mean()) if len(arrivals) else 0.0
    times, requests = _reuses(trace)
    distances = stack_distances(trace)
    pages = [max(1, int(size * trace.unique + 1e-9)) for size in SIZES]
    return Character(
        trace=trace.name,
        requests=len(trace),
        sessions=len(np.unique(trace.sessions[trace.sessions >= 0])),
        tenants=len(np.unique(trace.tenants)),
        span_s=float(arrivals.sum()),
        block_tokens=trace.block_tokens,
        blocks=len(trace.blocks),
        unique=trace.unique,
        infinite_hit_ratio=1.0 - trace.unique / max(len(trace.blocks), 1),
        used_once=float((uses == 1).mean()) if len(uses) else 0.0,
        top_share=float(uses[:top].sum() / max(len(trace.blocks), 1)),
        blocks_per_request=_spread(sizes),
        extending=len(going_on) / n,
        gap_s=_spread((trace.times_ns[turns[going_on]] - trace.times_ns[going_on]) / 1e9),
        reuse_s=_spread(times),
        reuse_requests=_spread(requests),
        stack_distance=_spread(distances[distances >= 0]),
        arrival_s=mean,
        arrival_cv=float(arrivals.std() / mean) if mean else 0.0,
        working_set={window: _working_set(trace, window) for window in WINDOWS_S},
        returns=_returns(turns),
        lru=dict(zip(SIZES, lru_hit_ratios(distances, pages), strict=True)),
    )


def _spread(values: NDArray[np.generic]) -> Percentiles:
    some = values.astype(np.float64) if len(values) else np.zeros(1)
    return Percentiles(*np.percentile(some, (10, 50, 90, 99)).tolist())


def _reuses(trace: Trace) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the seconds and requests from each use of a block to its next."""
    users = np.repeat(np.arange(len(trace)), np.diff(trace.offsets))
    order = np.argsort(trace.blocks, kind="stable")
    again = trace.blocks[order[1:]] == trace.blocks[order[:-1]]
    before, after = users[order[:-1][again]], users[order[1:][again]]
    return (trace.times_ns[after] - trace.times_ns[before]) / 1e9, after - before


def _working_set(trace: Trace, window_s: float) -> float:
    """Return the different blocks per window, mean over the windows with any."""
    if not len(trace.blocks):
        return 0.0
    windows = (trace.times_ns - trace.times_ns[0]) // round(window_s * 1e9)
    each = np.repeat(windows, np.diff(trace.offsets))
    pairs = np.unique(each * trace.unique + trace.blocks)
    return len(pairs) / len(np.unique(each))


def _returns(turns: NDArray[np.int64]) -> dict[int, float]:
    """Return the share of the requests of each turn that are continued."""
    number = np.zeros(len(turns), np.int64)
    for r, following in enumerate(turns.tolist()):
        if following >= 0:
            number[following] = number[r] + 1
    return {
        turn: float((turns[number == turn] >= 0).mean()) for turn in TURNS if (number == turn).any()
    }
