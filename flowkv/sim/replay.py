"""`replay`: simulate a policy over a trace, from cold, with LRU and the optimum beside it.

    result = replay(trace, policy="auto", size="1%")

The policy is the same object that the cache uses (DESIGN D8). All blocks of a request become
resident, and then the surplus is evicted; requests take no time.
"""

from __future__ import annotations

import math
import multiprocessing
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter, perf_counter_ns
from typing import Annotated, Any, NamedTuple, TypedDict, Unpack

import msgspec
import numpy as np
import xxhash
from msgspec import Meta
from numpy.typing import NDArray

from flowkv.core.errors import ConfigError, refuse_unknown
from flowkv.policy import make_policy
from flowkv.policy.admission import RULES, WriteAdmission
from flowkv.policy.base import NEVER_NS, Learner, Policy, Slots, Visit
from flowkv.policy.optimum import Optimum, belady
from flowkv.policy.order.compiled import Array, kernel
from flowkv.policy.pages import StatePlacement
from flowkv.policy.prefetch import Prefetcher
from flowkv.policy.tenants import Tenants
from flowkv.residency import Ledger, Place
from flowkv.residency import Meta as About
from flowkv.sim.character import lru_hits
from flowkv.sim.hardware import CODECS, HARDWARE, MODELS, Hardware, Shape, block_costs
from flowkv.sim.states import ReplayedStates
from flowkv.sim.trace import Trace, TraceHints, hints_of, wide

# One place that a trace is replayed through: policy, hints, queue and prefetches in their order.
#
# Prefetched blocks arrive at once; times come from a model of the hardware, below.

Progress = Callable[[int, int], None]
"""Callback with the finished and the total number of requests."""


@kernel
def climb(here: Array, seen: Array, parents: Array, tip: int, out: Array) -> tuple[int, int]:
    """Write `tip` and its ancestors up to a resident one; return their number, and that one or -1.

    At most `len(out)` blocks are written.
    """
    n = 0
    while tip >= 0 and n < len(out) and not here[tip] and seen[tip]:
        out[n] = tip
        n += 1
        tip = parents[tip]
    return n, tip


class Course:
    """Course of a replay, request by request.

    Attributes:
        hits: i8 [R], leading blocks that were resident.
        held: i8 [R], blocks that were resident.
        loaded: i8 [R], blocks that were not resident, and had been requested before.
        policy_ns: i8 [R], time of the policy's calls; measured.
        prefetched: Blocks brought by prefetches.
        prefetch_used: Prefetched blocks that were requested before they left.
    """

    def __init__(self, requests: int) -> None:
        self.hits, self.held, self.loaded, self.policy_ns = np.zeros((4, requests), np.int64)
        self.prefetched = self.prefetch_used = 0


@dataclass(eq=False)
class OnePlace:
    """Place of equal blocks, one byte each, above a place with all blocks ever requested.

    It is also the `PrefetchView` of its prefetcher.

    Args:
        trace: Trace to replay.
        policy: A fresh policy.
        capacity_bytes: Blocks that fit.
        hints: Hints of the application after each request; none without.
        sigma: Error of the hints, as passed to the policy.
        queue_ns: Time that each request is queued before it runs.
        prefetcher: Prefetcher of the place, if any.
        costs_ns: i8 [U], time to recompute each block.
        states: States of a hybrid model, which limit what hits are of use.
        held: Whether room is made before the blocks of a request come, which stay while it runs.
    """

    trace: Trace
    policy: Policy
    capacity_bytes: int
    hints: TraceHints | None = None
    sigma: float = 0.0
    queue_ns: int = 0
    prefetcher: Prefetcher | None = None
    costs_ns: NDArray[np.int64] | None = None
    states: ReplayedStates | None = None
    held: bool = False

    def __post_init__(self) -> None:
        trace = self.trace
        self.here = np.zeros(trace.unique, np.bool_)
        self.seen = np.zeros(trace.unique, np.bool_)
        self.prefetched_unused = np.zeros(trace.unique, np.bool_)  # prefetched, not requested yet
        self.owners = np.zeros(trace.unique, np.int32)  # tenant of the first request for each block
        self.used = 0
        self.course = Course(len(trace))
        self._due = int(trace.times_ns[0]) if len(trace) else 0
        self._path = np.empty(int(trace.depths.max(initial=0)) + 1, np.int64)

    # ---- view of the prefetcher

    def room_bytes(self) -> int:
        """Return how many blocks still fit."""
        return self.capacity_bytes - self.used

    def sizes(self, slots: Slots) -> Slots:
        """Return 1 byte for each block."""
        return np.ones(len(slots), np.int64)

    def missing(self, tip: int) -> tuple[int, Slots]:
        """Return the deepest resident ancestor, or -1, and the missing blocks down to `tip`."""
        n, top = 0, -1
        if tip < len(self.here):
            n, top = climb(self.here, self.seen, self.trace.parents, tip, self._path)
        if top >= 0 and not self.here[top]:  # a gap: the source never held the blocks above
            n, top = 0, -1
        return int(top), self._path[:n][::-1].copy()

    # ---- the replay

    def replay(self, progress: Progress | None = None) -> Course:
        """Replay the trace from cold.

        Args:
            progress: Called now and then with the finished and all requests.
        """
        times = self.trace.times_ns.tolist()
        every = max(1, len(times) // 100)
        queued = 0
        for r, now in enumerate(times):
            while self.queue_ns and queued < len(times) and times[queued] - self.queue_ns <= now:
                self.enqueue(max(times[queued] - self.queue_ns, times[0]), queued)
                queued += 1
            self.prefetch(now)
            self.serve(r, now)
            if progress is not None and r % every == every - 1:
                progress(r + 1, len(times))
        return self.course

    def chain(self, r: int) -> Slots:
        """Return the blocks of a request."""
        return self.trace.blocks[self.trace.offsets[r] : self.trace.offsets[r + 1]]

    def serve(self, r: int, now: int) -> None:
        """Replay one request, which takes no time."""
        trace, policy, course, chain = self.trace, self.policy, self.course, self.chain(r)
        start = perf_counter_ns()
        run_out = policy.expired(now)
        course.policy_ns[r] += perf_counter_ns() - start
        if len(run_out):
            policy.remove(run_out)
            self._left(now, run_out)
        held, known = self.here[chain], chain[self.seen[chain]]
        hits = len(chain) if held.all() else int(held.argmin())
        new = chain[~held]
        again = int(np.count_nonzero(self.seen[new]))
        used = hits if self.states is None else self.states.usable(r, chain, hits)
        course.hits[r], course.held[r], course.loaded[r] = used, len(chain) - len(new), again
        self.owners[new[~self.seen[new]]] = trace.tenants[r]
        self.seen[new] = True
        self._asked(now, r, known, hits, again)
        tenant, tokens = int(trace.tenants[r]), int(trace.input_tokens[r])
        visit = Visit(r, int(trace.sessions[r]), tokens, len(chain), tenant)
        stop, output = int(trace.stops[r]), int(trace.output_tokens[r])
        start = perf_counter_ns()
        policy.access(now, known, visit)
        if self.held:
            new = new[trace.depths[new] < self.capacity_bytes]
        loaded = again if self.held and self.prefetcher is not None else 0
        for some in (new[:loaded], new[loaded:]):
            over = self.used + len(some) - self.capacity_bytes
            if self.held and over > 0 and (gone := policy.evict(now, over, chain)) is not None:
                self._left(now, gone)
            if len(some):
                self._insert(now, some, tenant)
        policy.complete(now, r, stop=stop, output_tokens=output)
        if self.hints is not None:
            self._hint(now, r, policy)
        surplus = self.used - self.capacity_bytes
        victims = [policy.evict(now, surplus)] if surplus > 0 else []
        victims += [policy.shed(now)] if isinstance(policy, Tenants) else []
        course.policy_ns[r] += perf_counter_ns() - start
        if self.states is not None:
            self.states.save_states(r, chain, used, hits, self.used)
        for gone in [some for some in victims if some is not None]:
            self._left(now, gone)
        if self.prefetcher is not None:
            if self.hints is not None:
                self._hint(now, r, self.prefetcher)
            self._due = self.prefetcher.due_ns(now)

    def _hint(self, now: int, r: int, to: Policy | Prefetcher) -> None:
        """Pass on a request's hints: the part that is not sent again, and the time of the rest."""
        assert self.hints is not None
        chain, n = self.chain(r), int(self.hints.counts[r])
        if n < len(chain):
            to.hint(now, chain, NEVER_NS)
        if n > 0:
            to.hint(now, chain[:n], int(self.hints.etas_ns[r]), self.sigma)

    def enqueue(self, now: int, r: int) -> None:
        """Enqueue a request that will run later."""
        self.prefetch(now)
        chain = self.chain(r)
        known = self.seen[chain]
        chain = chain if known.all() else chain[: int(known.argmin())]
        self.policy.enqueue(now, r, chain)
        if self.prefetcher is not None:
            self.prefetcher.enqueue(now, r, chain)
            self._bring(now)
            self._due = self.prefetcher.due_ns(now)

    def prefetch(self, until: int) -> None:
        """Let the prefetcher decide, as often as it is due, up to `until`."""
        if self.prefetcher is None:
            return
        while self._due <= until:
            self._bring(self._due)
            self._due = self.prefetcher.due_ns(self._due)

    def _bring(self, now: int) -> None:
        assert self.prefetcher is not None
        for fetch in self.prefetcher.plan(now, self.policy, self):
            self._gone(fetch.victims)
            if len(fetch.slots):
                self._insert(now, fetch.slots, int(self.owners[fetch.slots[-1]]))
                self.prefetched_unused[fetch.slots] = True
                self.course.prefetched += len(fetch.slots)
            self.prefetcher.landed(now, fetch.slots)

    def _asked(self, now: int, r: int, chain: Slots, hits: int, loaded: int) -> None:
        if self.prefetcher is not None:
            waiting = self.prefetched_unused[chain]
            self.course.prefetch_used += int(np.count_nonzero(waiting[:hits]))
            self.prefetched_unused[chain] = False
            self.prefetcher.accessed(now, chain, hits, loaded, r)

    def _insert(self, now: int, new: Slots, tenant: int) -> None:
        """Give blocks room, and insert them in the policy."""
        said: dict[str, Any] = {"tenant": tenant}
        if self.costs_ns is not None:
            said["cost_ns"] = int(self.costs_ns[new].mean())
        self.policy.insert(now, new, self.trace.parents[new], **said)
        self.here[new] = True
        self.used += len(new)
        if self.states is not None:
            self.states.count_children(new)

    def _left(self, now: int, slots: Slots) -> None:
        self._gone(slots)
        if self.prefetcher is not None:
            self.prefetcher.left(now, slots)

    def _gone(self, slots: Slots) -> None:
        self.here[slots] = self.prefetched_unused[slots] = False
        self.used -= len(slots)
        if self.states is not None:
            self.states.drop_behind(slots)


# Bounds for comparison: leaf-first LRU and Belady, once per trace and size.

_MOST = 256


class Bounds(NamedTuple):
    """Hits of both bounds, request by request.

    Attributes:
        lru: i8 [R], hits of leaf-first LRU; closure 0.
        opt: i8 [R], hits of the optimum; closure 1.
    """

    lru: NDArray[np.int64]
    opt: NDArray[np.int64]

    def closure(self, hits: NDArray[np.int64], first: int | None = None) -> float | None:
        """Return the share of the way from LRU to the optimum; None where they do not differ.

        Args:
            hits: i8 [R] of a policy.
            first: Number of leading requests to count; all by default.
        """
        lru, opt = int(self.lru[:first].sum()), int(self.opt[:first].sum())
        return None if opt == lru else (int(hits[:first].sum()) - lru) / (opt - lru)


_known: OrderedDict[tuple[int, int], Bounds] = OrderedDict()


def digest_of(trace: Trace) -> int:
    """Return a 64-bit digest of the columns that decide hits: times and chains."""
    digest = xxhash.xxh3_64(trace.times_ns.tobytes())
    digest.update(trace.offsets.tobytes())
    digest.update(trace.blocks.tobytes())
    return digest.intdigest()


def bounds_of(trace: Trace, capacity: int) -> Bounds:
    """Return both bounds, computed at the first call and cached."""
    key = (digest_of(trace), capacity)
    if key not in _known:
        opt = belady(trace.offsets, trace.blocks, trace.unique, capacity)
        _known[key] = Bounds(lru_hits(trace, capacity), opt)
        if len(_known) > _MOST:
            _known.popitem(last=False)
    _known.move_to_end(key)
    return _known[key]


# Results of a replay. All values are simulated, except for the measured times (DESIGN D17).

START = 500
"""Leading requests that measure a warm start."""

Value = str | int | float | bool | None
Row = dict[str, Value]
Ints = NDArray[np.int64]


class TenantShare(msgspec.Struct, frozen=True):
    """Part of one tenant in a replay.

    Attributes:
        tenant: Number of the tenant in the trace.
        requests: Requests of the tenant.
        blocks: Blocks that they requested.
        prefix_hit_ratio: Share of these in the leading resident runs.
    """

    tenant: int
    requests: int
    blocks: int
    prefix_hit_ratio: float


class Result(msgspec.Struct, kw_only=True):
    """Result of one replay of one trace with one policy at one size.

    Attributes:
        trace: Name of the trace.
        policy: Name of the policy, with its extra inputs ("auto+hints").
        size: Share of the trace's different blocks that fit.
        pages: Blocks that fit.
        requests: Requests replayed.
        blocks: Requested blocks.
        prefix_hit_ratio: Share of the requested blocks in the leading resident runs.
        block_hit_ratio: Share of resident blocks, anywhere in their chain; misleading, since a
            block behind a gap is of no use.
        closure: 0 is leaf-first LRU, 1 is Belady without prefetch; None where they do not differ.
        first_hit_ratio: Prefix hit ratio of the first 500 requests; for warm starts.
        first_closure: Their closure.
        saved_bytes_ratio: Share of the requested bytes that hits saved to load or compute.
        saved_cost_ratio: Share of the cost to compute all blocks that hits saved; like the hit
            ratio, but deep blocks cost more (see `flowkv.sim.hardware`).
        load_traffic: Loaded blocks that were requested before, and prefetches.
        load_traffic_vs_lru: The same, over that of leaf-first LRU; None if that loads nothing.
        prefetched: Blocks brought by prefetches.
        prefetch_precision: Share of the prefetched blocks that were used; None without any.
        missed_p50: Blocks missed by a request: median,
        missed_p95: ... 95th
        missed_p99: ... and 99th percentile.
        blocks_per_s: Blocks replayed per second of wall time; measured.
        requests_per_s: Requests likewise.
        policy_us_p50: Microseconds of the policy's calls per request: median; measured,
        policy_us_p99: ... and 99th percentile. None for `opt`.
        digest: The policy's digest at the end, in hexadecimal; empty for `opt`.
        hits: i8 [R], leading resident blocks of each request.
        missed: i8 [R], the other blocks of each.
        tenants: Split by tenant.
        extra: Further values of a model of times and prices, by name; simulated.
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
    tenants: list[TenantShare]
    extra: Row = {}

    def row(self) -> Row:
        """Return all fields that are single values, as plain values."""
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
    """Return the quotient of two sums; 0 if the divisor is 0."""
    return float(part.sum() / whole.sum()) if whole.sum() else 0.0


def judge(
    trace: Trace, course: Course, *, policy: str, pages: int, seconds: float, digest: str = ""
) -> Result:
    """Make a result from the course of a replay.

    Args:
        trace: Replayed trace.
        course: Course of the replay.
        policy: Name of the policy in tables.
        pages: Blocks that fit.
        seconds: Wall time.
        digest: Digest of the policy at the end.
    """
    sizes, hits, bounds = np.diff(trace.offsets), course.hits, bounds_of(trace, pages)
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
        saved_cost_ratio=_saved(trace, hits, block_costs(trace)),
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
    """Return the share of the cost of all blocks that the leading resident runs save."""
    total = np.concatenate(([0.0], np.cumsum(costs[trace.blocks])))
    starts, ends = trace.offsets[:-1], trace.offsets[1:]
    return ratio(total[starts + hits] - total[starts], total[ends] - total[starts])


def _shares(trace: Trace, hits: Ints, sizes: Ints) -> list[TenantShare]:
    shares = []
    for tenant in np.unique(trace.tenants).tolist():
        mine = trace.tenants == tenant
        blocks = int(sizes[mine].sum())
        shares.append(TenantShare(tenant, int(mine.sum()), blocks, ratio(hits[mine], sizes[mine])))
    return shares


# Capacity in blocks, as a number or as a share of a trace's different blocks.


def pages_of(trace: Trace, pages: int | None = None, size: float | str | None = None) -> int:
    """Return how many blocks fit.

    Args:
        trace: Trace that `size` is a share of.
        pages: The number itself.
        size: Share of the trace's different blocks: 0.01 or "1%".

    Raises:
        ConfigError: If not exactly one of the two is given, or it is out of range.
    """
    if (pages is None) == (size is None):
        raise ConfigError(f"pages={pages!r} and size={size!r}", "Give one of the two")
    if size is not None:
        return max(1, math.floor(share_of(size) * trace.unique + 1e-9))
    if isinstance(pages, bool) or not isinstance(pages, int) or pages < 0:
        raise ConfigError(f"pages={pages!r} is no number of blocks", "Use 0 or more")
    return pages


def share_of(size: Any) -> float:
    """Return a share, from 0.01 or "1%".

    Raises:
        ConfigError: If it is neither, not positive or not finite, or a text above 1 without "%".
    """
    try:
        text = size.strip() if isinstance(size, str) else size
        share = (
            float(text[:-1]) / 100 if isinstance(text, str) and text[-1:] == "%" else float(text)
        )
    except (TypeError, ValueError):
        share = math.nan
    if not 0.0 < share < math.inf:
        raise ConfigError(f"{size!r} is no share of a trace's blocks", 'Use 0.01 or "1%"')
    if share > 1 and isinstance(text, str) and not text.endswith("%"):
        remedy = f"Did you mean {text}%? For {share:g} times the blocks write {100 * share:g}%"
        raise ConfigError(f"{text} is more than all blocks of the trace", remedy)
    return share


# A trace replayed through several places, with a model of times and prices.
#
# The ledger decides the places of all blocks, with one policy per place. Times follow from it by a
# plain model, and are simulated: a leading run of blocks in a place takes its latency and bytes
# over bandwidth, or is recomputed if that is faster (DESIGN D7); a block without a place is
# computed; nothing overlaps, and requests do not wait for each other. Prices are a proxy: the rent
# of the accelerator while it computes and waits, and that of the places' room all the time.

_HOUR_S = 3600.0

LASTING = ("disk", "remote")
"""Places behind write admission."""


class ReplayTier(msgspec.Struct, frozen=True, kw_only=True):
    """Place of a replay.

    Attributes:
        place: Name of the place in the hardware: "hbm", "dram", "disk", "remote".
        size: Room as a share of the trace's different blocks, uncompressed.
        policy: Name of its policy; that of the replay by default.
        codec: Codec of its blocks, which makes room for more: a name of `CODECS`.
    """

    place: str
    size: Annotated[float, Meta(gt=0.0)]
    policy: str = ""
    codec: str = "raw"

    def capacity(self, unique: int) -> int:
        """Return how many blocks fit, once compressed."""
        refuse_unknown("no codec", self.codec, CODECS)
        return max(1, int(self.size * unique / CODECS[self.codec] + 1e-9))


def tier_from(text: str) -> ReplayTier:
    """Return a tier from "dram:5%", "disk:0.3" or "dram:5%:kv8".

    Raises:
        ConfigError: If the text is no tier.
    """
    parts = text.split(":")
    if not 2 <= len(parts) <= 3:
        raise ConfigError(f"{text!r} is no tier", 'Write "dram:5%" or "dram:5%:kv8"')
    place, size, codec = (*parts, "raw")[:3]
    return ReplayTier(place=place, size=share_of(size), codec=codec)


def admission_of(rule: str, tiers: Iterable[ReplayTier]) -> WriteAdmission | None:
    """Return what chooses the blocks for tiers that last, by a rule; None for "all".

    Raises:
        ConfigError: There is no such rule, or no such tier.
    """
    refuse_unknown("no rule of write admission", rule, ("all", *RULES))
    if rule == "all":
        return None
    if not any(tier.place in LASTING for tier in tiers):
        raise ConfigError(f"admit={rule!r} without a place that lasts", 'Add one, as "disk:100%"')
    return WriteAdmission(rule)


class PlaceStack:
    """Stack of several places, fastest first, that a trace is replayed through.

    Args:
        trace: Trace to replay.
        policies: One fresh policy per place.
        pages: Blocks that fit in each.
        lasts: Whether each is behind write admission; none by default.
        admission: Chooses the blocks that leave memory for those places.
        held: See `ReplaySettings`.
    """

    def __init__(
        self, trace: Trace, policies: Sequence[Policy], pages: Sequence[int],
        lasts: Sequence[bool] = (), admission: WriteAdmission | None = None, *, held: bool = False,
    ) -> None:  # fmt: skip
        self.trace, self.held = trace, held
        places = [*map(Place, policies, pages, lasts or [False] * len(pages))]
        self.ledger = Ledger(places, ghosts=trace.unique, admission=admission)
        self.course = Course(len(trace))
        self.found = np.zeros((len(trace), len(places)), np.int64)
        self.moved = np.zeros(len(places) + 1, np.int64)

    def replay(self, progress: Progress | None = None) -> Course:
        """Replay the trace from cold.

        This fills `found`, i8 [R, places]: leading blocks of each request that were read from each
        place; and `moved`, i8 [places + 1]: blocks that came to each from the one before it, and
        last those that left the stack.
        """
        trace, ledger = self.trace, self.ledger
        space = ledger.namespace(b"trace")  # the trace's chains separate tenants, if they differ
        pairs = wide(trace.blocks)
        every = max(1, len(trace) // 100)
        seen = np.zeros(trace.unique, np.bool_)
        for r, now in enumerate(trace.times_ns.tolist()):
            first, end = int(trace.offsets[r]), int(trace.offsets[r + 1])
            tenant, tokens = int(trace.tenants[r]), int(trace.input_tokens[r])
            about = About(session=int(trace.sessions[r]), tokens=tokens, tenant=tenant)
            end_of = {"stop": int(trace.stops[r]), "output_tokens": int(trace.output_tokens[r])}
            if self.held:
                plan = ledger.begin(now, r, space, pairs[first:end], about)
            else:
                plan = ledger.serve(now, space, pairs[first:end], about, request=r, **end_of)
            chain, sources = trace.blocks[first:end], plan.sources
            self.course.hits[r] = plan.hits
            self.course.held[r] = int(np.count_nonzero(sources >= 0))
            self.course.loaded[r] = int(np.count_nonzero(seen[chain[sources < 0]]))
            seen[chain] = True
            self.found[r] = np.bincount(sources[: plan.hits], minlength=self.found.shape[1])
            ended = ledger.complete(now, r, **end_of) if self.held else ()
            for move in (*plan.moves, *ended):
                self.moved[move.target] += len(move.slots)
            if progress is not None and r % every == every - 1:
                progress(r + 1, len(trace))
        return self.course

    def digest(self) -> str:
        """Return the digest of all decisions, in hexadecimal."""
        return f"{self.ledger.digest():016x}"


def first_tokens_s(
    trace: Trace,
    found: NDArray[np.int64],
    tiers: Sequence[ReplayTier],
    hardware: Hardware,
    model: Shape,
) -> NDArray[np.float64]:
    """Return simulated seconds from each request's arrival to its first token, f8 [R].

    Args:
        trace: Replayed trace.
        found: i8 [R, places]; see `PlaceStack.replay`. Runs are taken in the order of the places.
        tiers: The places.
        hardware: Rates of the places and of the accelerator.
        model: Shape of the computed model.
    """
    flops = np.concatenate(([0.0], np.cumsum(block_costs(trace, model)[trace.blocks])))
    sizes, tokens = np.diff(trace.offsets), float(trace.block_tokens)
    at = trace.offsets[:-1].copy()
    seconds = np.zeros(len(trace))
    for k, tier in enumerate(tiers):
        place, count = hardware.place(tier.place), found[:, k]
        n_bytes = count * tokens * model.token_bytes() * CODECS[tier.codec]
        load = np.where(count > 0, place.latency_s + n_bytes / place.bytes_per_s, 0.0)
        anew = hardware.prefill_s(flops[at + count] - flops[at])
        seconds += np.minimum(load, anew) if k or tier.codec != "raw" else 0.0
        at += count
    seconds += hardware.prefill_s(flops[trace.offsets[1:]] - flops[at])
    rest = np.maximum(trace.input_tokens - sizes * tokens, 1.0)
    return seconds + hardware.prefill_s(model.prefill_flops(sizes * tokens, 1.0) * rest)


def priced(
    trace: Trace,
    found: NDArray[np.int64],
    tiers: Sequence[ReplayTier],
    hardware: Hardware,
    model: Shape,
) -> Row:
    """Return times, bytes and money of a replay, by name; see `first_tokens_s`."""
    seconds = first_tokens_s(trace, found, tiers, hardware, model)
    nothing = first_tokens_s(trace, found * 0, tiers, hardware, model)
    row: Row = {"hardware": hardware.name}
    total, dollars = max(int(np.diff(trace.offsets).sum()), 1), 0.0
    block_bytes = trace.block_tokens * model.token_bytes()
    for k, tier in enumerate(tiers):
        place = hardware.place(tier.place)
        gib = tier.capacity(trace.unique) * block_bytes * CODECS[tier.codec] / 2**30
        dollars += gib * place.dollars_per_gib_hour * (k > 0)  # the first is the accelerator's own
        row[f"hit_ratio_{tier.place}"] = float(found[:, k].sum() / total)
        row[f"read_gib_{tier.place}"] = float(
            found[:, k].sum() * block_bytes * CODECS[tier.codec] / 2**30
        )
        row[f"room_gib_{tier.place}"] = gib
    whole = np.diff(trace.offsets) * trace.block_tokens  # of a request of unknown length
    tokens = max(int(np.where(trace.input_tokens, trace.input_tokens, whole).sum()), 1)
    span_s = float(trace.times_ns[-1] - trace.times_ns[0]) / 1e9 if len(trace) else 0.0
    rent = hardware.dollars_per_hour * float(seconds.sum()) + dollars * span_s
    for name, value in zip(("p50", "p95", "p99"), (50, 95, 99), strict=True):
        row[f"ttft_ms_{name}"] = float(np.percentile(seconds, value) * 1e3) if len(trace) else 0.0
    row["ttft_ms_mean"] = float(seconds.mean() * 1e3) if len(trace) else 0.0
    row["ttft_ms_mean_without"] = float(nothing.mean() * 1e3) if len(trace) else 0.0
    row["ttft_saved_ratio"] = 1.0 - float(seconds.sum() / nothing.sum()) if len(trace) else 0.0
    row["dollars_per_hour"] = hardware.dollars_per_hour + dollars
    row["dollars_per_million_tokens"] = rent / _HOUR_S / tokens * 1e6
    return row


Options = Mapping[str, object]
Maker = str | Policy | Callable[[], Policy]


class ReplaySettings(TypedDict, total=False):
    """Settings of a replay besides policy and size. Every field may be left out.

    Attributes:
        options: Options of the policy, if it is given by name.
        hints: Standard deviation of the natural logarithm of the hints' error. The application
            hints when each conversation goes on, and which part of its prompt it will send again;
            never where it ends (see `flowkv.sim.trace.hints_of`). No hints without.
        queue_s: Seconds that requests are queued before they run.
        prefetch: Prefetch blocks from a place that has all blocks seen so far; "markov", or a
            mapping of options of `Prefetcher`, turns it on too.
        warm: Model of a policy of this kind: the result of its `save_model`.
        costs: Pass the policy the cost to compute each block, with this hardware and model.
        tiers: More places below the first, fastest first: "dram:5%", "disk:30%:kv8" (see
            `flowkv.sim.replay`). Hits are then those of all places, traffic counts blocks that none
            of them had, and there is no closure. Without hints, queue, prefetch, warm start.
        codec: Codec of the blocks of the first place: raw, kv8 or kv4; as with `tiers`.
        admit: With `tiers`, the blocks that leave memory for the disk or the remote place: "all",
            or by a rule of `flowkv.policy.admission`.
        hardware: A name of `HARDWARE`, which gives times and prices; "h100" with `tiers`.
        model: A name of `MODELS`; "8b" by default.
        states: A rule of `flowkv.policy.pages.STATE_RULES` for a hybrid model, whose hits end at
            the last state; or a mapping of `rule`, its options, and `room`, the most bytes of
            states (see `flowkv.sim.states.ReplayedStates`). Without `tiers`.
        held: Make room before the blocks of a request come, which then stay while it runs, as on a
            device. By default all come first, and its own may leave again, as may the optimum's.
        seed: Seed of the errors of hints.
        progress: Called now and then with the finished and all requests.
    """

    options: Options | None
    hints: float | None
    queue_s: float
    prefetch: bool | str | Options
    warm: bytes | None
    costs: bool
    tiers: Sequence[str | ReplayTier]
    codec: str
    admit: str
    hardware: str | None
    model: str
    states: str | Options | None
    held: bool
    seed: int
    progress: Progress | None


def replay(
    trace: Trace,
    policy: Maker = "auto",
    *,
    pages: int | None = None,
    size: float | str | None = None,
    **settings: Unpack[ReplaySettings],
) -> Result:
    """Replay a trace from cold.

    Args:
        trace: A trace of `read_trace` or `generate`.
        policy: A name of the catalogue, a factory of policies, or a fresh policy.
        pages: Blocks that fit.
        size: The same as a share of the trace's different blocks: 0.01 or "1%".
        **settings: See `ReplaySettings`.

    Returns:
        The result, compared with LRU and the optimum.

    Raises:
        ConfigError: If an argument is wrong.
    """
    unknown = sorted(set(settings) - set(ReplaySettings.__annotations__))
    if unknown:
        raise ConfigError(
            f"replay has no setting {', '.join(unknown)}",
            f"Use {', '.join(ReplaySettings.__annotations__)}",
        )
    capacity = pages_of(trace, pages, size)
    told = settings.get("codec", "raw") != "raw" or settings.get("admit", "all") != "all"
    if settings.get("tiers") or told:
        return _tiered(trace, policy, capacity, settings)
    plain = not _beyond(settings) and not settings.get("states")
    if policy == "opt" and plain and not settings.get("options"):
        return _told(trace, _optimum(trace, capacity), settings)
    mine, states = make(trace, policy, settings), _states(trace, settings)
    name = policy if isinstance(policy, str) else mine.name
    name += "".join(f"+{word}" for word in _beyond(settings))
    place = _place(trace, mine, capacity, settings, states)
    start = perf_counter()
    course = place.replay(settings.get("progress"))
    seconds = perf_counter() - start
    digest = f"{mine.digest():016x}"
    result = judge(trace, course, policy=name, pages=capacity, seconds=seconds, digest=digest)
    result = _told(trace, result, settings)
    if states is None:
        return result
    # The bounds are those of attention alone.
    extra = result.extra | states.figures()
    return msgspec.structs.replace(result, closure=None, first_closure=None, extra=extra)


def make(trace: Trace, policy: Maker, settings: ReplaySettings) -> Policy:
    """Return a fresh policy, with its future or its saved model loaded.

    Raises:
        ConfigError: If there is no such policy, or it cannot be warmed.
    """
    options = dict(settings.get("options") or {})
    if callable(policy):
        policy = policy()
    made = make_policy(policy, **options)
    if len(made.resident()):
        raise ConfigError(
            f"policy {made.name!r} holds blocks already", "Pass its name, or a fresh object"
        )
    if isinstance(made, Optimum):
        made.foresee(trace.offsets, trace.blocks)
    saved = settings.get("warm")
    if saved is not None:
        if not isinstance(made, Learner):
            raise ConfigError(
                f"policy {made.name!r} learns no model and cannot start warm", "Leave out warm"
            )
        made.load_model(saved)
    return made


def _states(trace: Trace, settings: ReplaySettings) -> ReplayedStates | None:
    """Return the states of a hybrid model, if a rule for them is given.

    Raises:
        ConfigError: The rule or an option is unknown, or the model has attention alone.
    """
    wish = settings.get("states")
    if wish is None:
        return None
    told = {"rule": wish} if isinstance(wish, str) else dict(wish)
    room, (_, model) = told.pop("room", 0.0), _machine(settings)
    if not isinstance(room, int | float) or not 0.0 <= room < math.inf:
        raise ConfigError(f"room={room!r} is no share", "Use 0 (no limit) or more")
    if not model.state_bytes:
        hybrids = ", ".join(name for name, shape in MODELS.items() if shape.state_bytes)
        raise ConfigError("the model keeps no states", f"With states, use model={hybrids}")
    return ReplayedStates(trace, StatePlacement(**told), model, float(room))


def _place(
    trace: Trace,
    policy: Policy,
    capacity: int,
    settings: ReplaySettings,
    states: ReplayedStates | None,
) -> OnePlace:
    sigma = settings.get("hints")
    wish = settings.get("prefetch", False)
    told: Any = {"learned": wish} if isinstance(wish, str) else wish
    told = told if isinstance(told, Mapping) else {}
    on = isinstance(wish, Mapping) or bool(wish)
    hardware, model = _machine(settings)
    costs_s = hardware.prefill_s(block_costs(trace, model))
    queue_s = settings.get("queue_s", 0.0)
    if not 0.0 <= queue_s < math.inf:
        raise ConfigError(f"queue_s={queue_s!r} is no time", "Use 0 (no queue) or more seconds")
    return OnePlace(
        trace,
        policy,
        capacity,
        hints=None if sigma is None else hints_of(trace, sigma, settings.get("seed", 0)),
        sigma=sigma or 0.0,
        queue_ns=round(queue_s * 1e9),
        prefetcher=Prefetcher(capacity, **told) if on and capacity else None,
        costs_ns=(costs_s * 1e9).astype(np.int64) if settings.get("costs") else None,
        states=states,
        held=settings.get("held", False),
    )


def _tiered(trace: Trace, policy: Maker, capacity: int, settings: ReplaySettings) -> Result:
    """Replay through several places; the result covers all of them."""
    if _beyond(settings) or not isinstance(policy, str) or settings.get("states"):
        raise ConfigError(
            "with tiers there are no hints, queue, prefetch, warm start or states, and policies"
            " have names",
            "Leave those out, or the tiers",
        )
    hardware, model = _machine(settings)
    below = [tier_from(t) if isinstance(t, str) else t for t in settings.get("tiers", ())]
    codec, share = settings.get("codec", "raw"), capacity / max(trace.unique, 1)
    first = ReplayTier(place=hardware.places[0].name, size=max(share, 1e-12), codec=codec)
    tiers = [first, *below]
    pages = [tier.capacity(trace.unique) for tier in tiers]
    policies = [make(trace, tier.policy or policy, settings) for tier in tiers]
    rule = settings.get("admit", "all")
    admission = admission_of(rule, tiers)
    lasts = [tier.place in LASTING for tier in tiers]
    stack = PlaceStack(trace, policies, pages, lasts, admission, held=settings.get("held", False))
    start = perf_counter()
    course = stack.replay(settings.get("progress"))
    seconds = perf_counter() - start
    name = "/".join(dict.fromkeys(tier.policy or policy for tier in tiers))
    digest = stack.digest()
    result = judge(trace, course, policy=name, pages=sum(pages), seconds=seconds, digest=digest)
    extra = priced(trace, stack.found, tiers, hardware, model)
    for k, tier in enumerate(tiers[1:], 1):
        extra[f"written_{tier.place}"] = int(stack.moved[k])
    return msgspec.structs.replace(
        result,
        extra=extra | {"admit": rule, "declined": stack.ledger.declined},
        closure=None,  # the bounds are those of one place
        first_closure=None,
        load_traffic_vs_lru=None,
    )


def _told(trace: Trace, result: Result, settings: ReplaySettings) -> Result:
    """Return the result with times and prices, if hardware is named."""
    if settings.get("hardware") is None:
        return result
    hardware, model = _machine(settings)
    tier = ReplayTier(place=hardware.places[0].name, size=max(result.size, 1e-12))
    extra = priced(trace, result.hits[:, None], [tier], hardware, model)
    return msgspec.structs.replace(result, extra=extra)


def _machine(settings: ReplaySettings) -> tuple[Hardware, Shape]:
    names = (settings.get("hardware") or "h100", settings.get("model") or "8b")
    for name, known in zip(names, (HARDWARE, MODELS), strict=True):
        if name not in known:
            raise ConfigError(f"{name!r} is not known", f"Use one of {', '.join(known)}")
    return HARDWARE[names[0]], MODELS[names[1]]


def _optimum(trace: Trace, capacity: int) -> Result:
    """Return the result of the bound itself: its resident blocks are always a leading run."""
    start = perf_counter()
    hits = belady(trace.offsets, trace.blocks, trace.unique, capacity)
    seconds = perf_counter() - start
    course = Course(len(trace))
    course.hits = course.held = hits
    # Blocks are numbered in the order of their first use.
    known = np.concatenate(([0], np.maximum.accumulate(trace.blocks) + 1))[trace.offsets]
    course.loaded = np.diff(trace.offsets) - np.diff(known) - hits
    return judge(trace, course, policy="opt", pages=capacity, seconds=seconds)


def _beyond(settings: ReplaySettings) -> list[str]:
    """Return the names of the policy's inputs besides the requests."""
    on = {
        "hints": settings.get("hints") is not None,
        "queue": settings.get("queue_s"),
        "prefetch": settings.get("prefetch", False) is not False,
        "warm": settings.get("warm") is not None,
    }
    return [word for word, given in on.items() if given]


# `sweep`: a trace replayed with several policies at several sizes.

Done = Callable[[int, int, Result], None]
"""Callback after each replay with the finished number, the total and the result."""

_carried: dict[str, Trace] = {}


def sweep(
    trace: Trace,
    policies: Iterable[Maker] | Mapping[str, ReplaySettings],
    sizes: Iterable[float | str],
    *,
    processes: int = 1,
    done: Done | None = None,
    **settings: Unpack[ReplaySettings],
) -> list[Result]:
    """Replay a trace with every policy at every size.

    Args:
        trace: Trace to replay.
        policies: Names of the catalogue, or factories of policies; or names with settings of their
            own besides `settings`.
        sizes: Shares of the trace's different blocks: 0.01 or "1%".
        processes: Number of replays at a time; with more than one, policies are given by name.
        done: Called after each replay.
        **settings: Settings of all replays; see `ReplaySettings`.

    Returns:
        One result per size and policy, sizes first.

    Raises:
        ConfigError: If an argument is wrong.
    """
    extra: Mapping[Maker, ReplaySettings] = policies if isinstance(policies, Mapping) else {}  # type: ignore[assignment]
    makers = list(policies)
    given = {maker: settings | extra.get(maker, ReplaySettings()) for maker in makers}
    jobs = [(maker, size, given[maker]) for size in list(sizes) for maker in makers]
    results: list[Result] = []
    with ExitStack() as stack:
        found: Iterable[Result] = (replay(trace, m, size=s, **mine) for m, s, mine in jobs)
        if processes > 1 and len(jobs) > 1:
            if not all(isinstance(maker, str) for maker in makers) or "progress" in settings:
                raise ConfigError(
                    "only names of policies can be passed to other processes",
                    "Use processes=1, or put the policy in the catalogue",
                )
            context = multiprocessing.get_context("spawn")
            pool = ProcessPoolExecutor(processes, context, _carry, (trace,))
            found = stack.enter_context(pool).map(_one, *zip(*jobs, strict=True))
        for result in found:
            results.append(result)
            if done is not None:
                done(len(results), len(jobs), result)
    return results


def _carry(trace: Trace) -> None:
    _carried["trace"] = trace


def _one(policy: Maker, size: float | str, settings: ReplaySettings) -> Result:
    return replay(_carried["trace"], policy, size=size, **settings)
