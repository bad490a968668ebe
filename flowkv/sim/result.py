"""What a replay tells. All of it is simulated, but for the times that calls took (DESIGN D17)."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowkv.sim.bounds import Bounds
from flowkv.sim.place import Course
from flowkv.sim.trace import Trace

START = 500
"""Requests that a warm start is judged by."""

Value = str | int | float | bool | None
Row = dict[str, Value]
Ints = NDArray[np.int64]


class Share(msgspec.Struct, frozen=True):
    """One tenant's part of a replay.

    Attributes:
        tenant: Its number in the trace.
        requests: Its requests.
        blocks: Blocks they asked for.
        prefix_hit_ratio: Of these, in the leading resident run.
    """

    tenant: int
    requests: int
    blocks: int
    prefix_hit_ratio: float


class Result(msgspec.Struct, kw_only=True):
    """One replay of one trace with one policy at one size.

    Attributes:
        trace: The trace's name.
        policy: The policy's name, and what it was given ("auto+hints").
        size: Share of the trace's different blocks that fit.
        pages: Blocks that fit.
        requests: Requests replayed.
        blocks: Blocks they asked for.
        prefix_hit_ratio: Blocks in the leading resident run, of all asked for.
        block_hit_ratio: Resident blocks of all, wherever in their chain; misleading, since a block
            behind a gap is of no use.
        closure: 0 is leaf-first LRU, 1 is Belady without prefetch; None where they do not differ.
        first_hit_ratio: Prefix hit ratio of the first 500 requests; for warm starts.
        first_closure: Their closure.
        saved_bytes_ratio: Share of the bytes asked for that hits saved to load or compute.
        saved_cost_ratio: Share of the cost to compute all blocks that hits saved; like the hit
            ratio, but deep blocks cost more (see `flowkv.sim.hardware`).
        load_traffic: Blocks loaded that were asked for before, and prefetches.
        load_traffic_vs_lru: The same, over that of leaf-first LRU; None if that loads nothing.
        prefetched: Blocks brought by prefetches.
        prefetch_precision: Share of these that were used; None without any.
        missed_p50: Blocks missed by a request: median,
        missed_p95: ... 95th
        missed_p99: ... and 99th percentile.
        blocks_per_s: Blocks replayed per second of wall time; measured.
        requests_per_s: Requests likewise.
        policy_us_p50: Microseconds that the policy's calls took per request: median; measured,
        policy_us_p99: ... and 99th percentile. None for `opt`.
        digest: The policy's digest at the end, in hexadecimal; empty for `opt`.
        hits: i8 [R], leading resident blocks of each request.
        missed: i8 [R], the other blocks of each.
        tenants: Split by tenant.
        extra: What a model of times and prices adds, by name; simulated.
    """

    trace: str
    policy: str
    size: float
    pages: int
    requests: int
    blocks: int
    prefix_hit_ratio: float
    block_hit_ratio: float
    closure: float | None
    first_hit_ratio: float
    first_closure: float | None
    saved_bytes_ratio: float
    saved_cost_ratio: float
    load_traffic: int
    load_traffic_vs_lru: float | None
    prefetched: int
    prefetch_precision: float | None
    missed_p50: float
    missed_p95: float
    missed_p99: float
    blocks_per_s: float
    requests_per_s: float
    policy_us_p50: float | None
    policy_us_p99: float | None
    digest: str
    hits: Ints
    missed: Ints
    tenants: list[Share]
    extra: Row = {}

    def row(self) -> Row:
        """Everything but what is there per request or tenant, as plain values."""
        names = [f.name for f in msgspec.structs.fields(self)]
        values = {n: getattr(self, n) for n in names if n not in _NOT_IN_ROWS}
        return {**values, **self.extra, "source": "simulated"}

    def __repr__(self) -> str:
        closure = "" if self.closure is None else f", closure {self.closure:.3f}"
        hit = f"hit {100 * self.prefix_hit_ratio:.2f} %"
        what = f"{self.policy} on {self.trace}, {self.pages} pages: {hit}{closure}"
        return f"Result(simulated: {what})"


_NOT_IN_ROWS = frozenset({"hits", "missed", "tenants", "extra"})


def ratio(part: NDArray[np.generic], whole: NDArray[np.generic]) -> float:
    """The quotient of two sums; 0 of nothing."""
    return float(part.sum() / whole.sum()) if whole.sum() else 0.0


def judge(
    trace: Trace,
    course: Course,
    bounds: Bounds,
    costs: NDArray[np.float64],
    *,
    policy: str,
    pages: int,
    seconds: float,
    digest: str = "",
) -> Result:
    """Makes a result of what happened.

    Args:
        trace: What was replayed.
        course: What happened.
        bounds: LRU and optimum of this trace and size.
        costs: f8 [U], to compute each block anew, in any unit.
        policy: Its name in tables.
        pages: Blocks that fit.
        seconds: Wall time.
        digest: Of the policy at the end.
    """
    sizes, hits = np.diff(trace.offsets), course.hits
    missed = sizes - hits
    traffic = int(course.loaded.sum()) + course.prefetched
    lru_traffic = len(trace.blocks) - trace.unique - int(bounds.lru.sum())
    p50, p95, p99 = np.percentile(missed, (50, 95, 99)).tolist() if len(trace) else (0.0, 0.0, 0.0)
    timed = course.policy_ns[course.policy_ns > 0] / 1e3
    calls = np.percentile(timed, (50, 99)).tolist() if len(timed) else (None, None)
    used = course.prefetch_used / course.prefetched if course.prefetched else None
    first = slice(START)
    return Result(
        trace=trace.name,
        policy=policy,
        size=pages / max(trace.unique, 1),
        pages=pages,
        requests=len(trace),
        blocks=len(trace.blocks),
        prefix_hit_ratio=ratio(hits, sizes),
        block_hit_ratio=ratio(course.held, sizes),
        closure=bounds.closure(hits),
        first_hit_ratio=ratio(hits[first], sizes[first]),
        first_closure=bounds.closure(hits, START),
        saved_bytes_ratio=ratio(hits, sizes),
        saved_cost_ratio=_saved(trace, hits, costs),
        load_traffic=traffic,
        load_traffic_vs_lru=traffic / lru_traffic if lru_traffic else None,
        prefetched=course.prefetched,
        prefetch_precision=used,
        missed_p50=p50,
        missed_p95=p95,
        missed_p99=p99,
        blocks_per_s=len(trace.blocks) / seconds if seconds > 0 else 0.0,
        requests_per_s=len(trace) / seconds if seconds > 0 else 0.0,
        policy_us_p50=calls[0],
        policy_us_p99=calls[1],
        digest=digest,
        hits=hits,
        missed=missed,
        tenants=_shares(trace, hits, sizes),
    )


def _saved(trace: Trace, hits: Ints, costs: NDArray[np.float64]) -> float:
    """Share of the cost of all blocks that lies in the leading resident runs."""
    total = np.concatenate(([0.0], np.cumsum(costs[trace.blocks])))
    starts, ends = trace.offsets[:-1], trace.offsets[1:]
    return ratio(total[starts + hits] - total[starts], total[ends] - total[starts])


def _shares(trace: Trace, hits: Ints, sizes: Ints) -> list[Share]:
    shares = []
    for tenant in np.unique(trace.tenants).tolist():
        mine = trace.tenants == tenant
        blocks = int(sizes[mine].sum())
        shares.append(Share(tenant, int(mine.sum()), blocks, ratio(hits[mine], sizes[mine])))
    return shares
