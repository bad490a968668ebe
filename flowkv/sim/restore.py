"""Restores on a virtual clock, with the same policy objects that the cache uses.

All results are simulated and labelled so (DESIGN D17).
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from flowkv.core.errors import ConfigError, StateError
from flowkv.policy.restore.costs import Measured, lower_bound
from flowkv.policy.restore.policy import (
    Compute,
    Costs,
    Op,
    Progress,
    RestoreLoad,
    RestorePolicy,
    RestoreRequest,
    Source,
    Span,
    State,
    Suffix,
)
from flowkv.sim.hardware import CODECS, by_name

__all__ = [
    "GPUS",
    "SHAPES",
    "Done",
    "Modelled",
    "Run",
    "asked",
    "cells_of",
    "lower_bound",
    "run",
    "summed",
]


# Results of executed restores, for any executor.


class Done(NamedTuple):
    """Executed operation, with its times.

    Attributes:
        op: The operation.
        start_s: Time when it was given to its engine.
        end_s: Time when its cells were available, or when it failed.
        ok: False if it failed.
    """

    op: Op
    start_s: float
    end_s: float
    ok: bool


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """Course of one execution.

    Attributes:
        timeline: Operations in order of their starts; of one time, in the order of their begin.
        ttft_s: Per request: seconds from its arrival until its last operation was done.
        link_bytes: Bytes moved by loads, failed ones too.
        compute_busy_s: Seconds of all compute operations, suffixes too.
        link_busy_s: Seconds in which loads were under way, summed over tiers.
        met: Per request: computed share of its cells; where the pointers met.
    """

    timeline: tuple[Done, ...]
    ttft_s: dict[int, float]
    link_bytes: float
    compute_busy_s: float
    link_busy_s: float
    met: dict[int, float]

    @property
    def makespan_s(self) -> float:
        """Seconds from the first start until all was done."""
        ends = [done.end_s for done in self.timeline]
        return max(ends) - min(done.start_s for done in self.timeline) if ends else 0.0

    @property
    def mean_s(self) -> float:
        """Mean time to first token."""
        return sum(self.ttft_s.values()) / len(self.ttft_s)


def summed(requests: Iterable[RestoreRequest], timeline: Iterable[Done]) -> Run:
    """Summarise a timeline; operations of one start are in the order of their begin."""
    known = {request.number: request for request in requests}
    timeline = tuple(sorted(timeline, key=lambda done: done.start_s))
    ends = {number: request.arrived_s for number, request in known.items()}
    computed = dict.fromkeys(known, 0)
    link_bytes = compute_s = link_s = 0.0
    free_s: dict[str, float] = {}
    for op, start_s, end_s, ok in timeline:
        ends[op.request] = max(ends[op.request], end_s)
        if isinstance(op, RestoreLoad):
            cells = op.layers.size * op.tokens.size
            link_bytes += cells * known[op.request].sources[op.source].cell_bytes
            tier = known[op.request].sources[op.source].tier
            link_s += max(0.0, end_s - max(start_s, free_s.get(tier, -math.inf)))
            free_s[tier] = max(free_s.get(tier, -math.inf), end_s)
            continue
        compute_s += end_s - start_s
        if isinstance(op, Compute) and ok:
            computed[op.request] += op.layers.size * op.tokens.size
    return Run(
        timeline=timeline,
        ttft_s={number: ends[number] - known[number].arrived_s for number in known},
        link_bytes=link_bytes,
        compute_busy_s=compute_s,
        link_busy_s=link_s,
        met={number: computed[number] / max(1, cells_of(known[number])) for number in known},
    )


def cells_of(request: RestoreRequest) -> int:
    """Return the cells that a restore of a request has to produce."""
    return (request.tokens - request.resident) * request.layers


# Virtual clock that executes a restore policy against costs, deterministically.

Among = Collection[int] | None


def run(
    requests: Sequence[RestoreRequest],
    policy: RestorePolicy,
    costs: Costs,
    *,
    believed: Costs | None = None,
    engines: Sequence[Among] = (None,),
    depth: int = 1,
    fails: Callable[[RestoreLoad], bool] | None = None,
) -> Run:
    """Restore requests as a policy decides.

    Args:
        requests: Requests, each known from its `arrived_s` on.
        policy: Policy that decides.
        costs: True costs.
        believed: Costs that the policy assumes; a `Measured` learns from the true ones. By default
            the true costs.
        engines: Compute engines, each with the numbers of the requests that it can compute; None
            for all. Each tier has one link, which loads one after the other.
        depth: Loads that are begun at once on a link, to be served one after the other.
        fails: Returns whether a load fails.

    Raises:
        StateError: The policy stops although work is left, or breaks the rules.
    """
    return VirtualClock(
        requests, policy, costs, believed=believed, engines=engines, depth=depth, fails=fails
    ).run()


class VirtualClock:
    """Executor of a policy, event by event; arguments as of `run`.

    Attributes:
        state: State that the policy reads.
        windows: Per tier, loads that are begun at once.
        timeline: Operations that were begun.
    """

    def __init__(
        self,
        requests: Sequence[RestoreRequest],
        policy: RestorePolicy,
        costs: Costs,
        *,
        believed: Costs | None = None,
        engines: Sequence[Among] = (None,),
        depth: int = 1,
        fails: Callable[[RestoreLoad], bool] | None = None,
    ) -> None:
        self.policy, self.costs, self.believed = policy, costs, believed or costs
        self.requests = {request.number: request for request in requests}
        self.state = State(self.believed)
        self.engines, self.fails = list(engines), fails
        tiers = sorted({source.tier for one in requests for source in one.sources})
        self.windows = dict.fromkeys(tiers, depth)
        self.free_s = dict.fromkeys(tiers, 0.0)
        self.timeline: list[Done] = []
        self._busy = [False] * len(self.engines)
        self._queued = Counter[str]()
        self._events: list[tuple[float, int, RestoreRequest | Done | int, int]] = []
        self._count = 0
        for request in requests:
            self.at(request.arrived_s, request)

    def run(self) -> Run:
        """Execute all requests, and return the course."""
        self.execute()
        if left := sorted(self.state.requests):
            raise StateError(f"requests {left} were left unfinished", "See the policy's answers")
        return summed(self.requests.values(), self.timeline)

    def execute(self) -> None:
        """Execute events until none is left."""
        while self._events:
            now_s = self.state.now_s = self._events[0][0]
            while self._events and self._events[0][0] <= now_s:
                _, _, what, engine = heapq.heappop(self._events)
                if isinstance(what, RestoreRequest):
                    self.settle(self.state.add(what))
                elif isinstance(what, Done):
                    self._ended(what, engine)
                else:
                    self.called_off(what)
            self._ask()

    def at(self, time_s: float, what: RestoreRequest | Done | int, engine: int = -1) -> None:
        """Add an event: a request comes, an operation ends, a request is cancelled."""
        self._count += 1
        heapq.heappush(self._events, (time_s, self._count, what, engine))

    # ---- parts that subclasses may replace

    def inputs_s(self, op: Compute) -> float:
        """Return when the inputs of a compute are available: now, as it is only begun then."""
        return self.state.now_s

    def takes_s(self, op: Op) -> tuple[float, float]:
        """Return when an operation that is begun now really starts, and how long it takes."""
        request, now_s = self.requests[op.request], self.state.now_s
        if isinstance(op, Compute):
            return self.inputs_s(op), self.costs.compute_s(request, op.layers.size, op.tokens)
        if isinstance(op, Suffix):
            return now_s, self.costs.suffix_s(request) / request.layers
        took_s = self.costs.load_s(request, op.source, op.layers.size * op.tokens.size)
        tier = request.sources[op.source].tier
        start_s = max(now_s, self.free_s[tier])
        self.free_s[tier] = start_s + took_s
        return start_s, took_s

    def settle(self, progress: Progress) -> None:
        """Remove a request if it is done."""
        if progress.done and not progress.flying:
            self.remove(progress.request.number)

    def called_off(self, number: int) -> None:
        """Remove a request before it is done."""
        if number in self.state.requests:
            self.remove(number)

    # ---- execution

    def remove(self, number: int) -> None:
        """Remove a request from the state and the policy."""
        self.state.remove(number)
        self.policy.forget(number)

    def _ask(self) -> None:
        for engine, among in enumerate(self.engines):
            if not self._busy[engine]:
                op = self.policy.next_compute(self.state, among)
                if op is not None:
                    self._busy[engine] = True
                    self._begin(op, engine)
        for tier, window in self.windows.items():
            while self._queued[tier] < window:
                load = self.policy.next_load(self.state, tier)
                if load is None:
                    break
                self._queued[tier] += 1
                self._begin(load, -1)

    def _begin(self, op: Op, engine: int) -> None:
        self.state.begin(op)
        start_s, took_s = self.takes_s(op)
        ok = not (isinstance(op, RestoreLoad) and self.fails is not None and self.fails(op))
        self.timeline.append(Done(op, self.state.now_s, start_s + took_s, ok))
        self.at(start_s + took_s, Done(op, start_s, start_s + took_s, ok), engine)

    def _ended(self, done: Done, engine: int) -> None:
        op, start_s, end_s, ok = done
        request, progress = self.requests[op.request], self.state.requests.get(op.request)
        if isinstance(op, RestoreLoad):
            self._queued[request.sources[op.source].tier] -= 1
        else:
            self._busy[engine] = False
        if progress is None:  # cancelled in the meantime
            return
        (self.state.end if ok else self.state.fail)(op)
        if ok and isinstance(self.believed, Measured):
            learn(self.believed, request, op, end_s - start_s)
        self.settle(progress)


def learn(measured: Measured, request: RestoreRequest, op: Op, seconds: float) -> None:
    """Record an operation's duration in measured costs."""
    if isinstance(op, Compute):
        measured.computed(request, op.layers.size, op.tokens, seconds)
    elif isinstance(op, Suffix):
        measured.suffixed(request, seconds * request.layers)
    else:
        measured.loaded(request, op.source, op.layers.size * op.tokens.size, seconds)


# Costs of restores: from a model's shape, an accelerator's data sheet and the rate of a link.
#
# Nothing here is measured; all results computed from it are simulated (DESIGN D17).

LINK = "link"
"""Name of the default tier."""


class Decoder(NamedTuple):
    """Shape of a decoder, in bf16.

    Attributes:
        name: Name in the rows of the bench.
        layers: L.
        width: Width of the residual stream, d.
        heads: Query heads.
        kv_heads: Key/value heads.
        head_dim: Elements of a head.
        ffn: Inner width of the feed-forward part (of each expert).
        experts: Experts that take part in each token; 1 for a dense model.
    """

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    experts: int = 1

    @property
    def weights(self) -> int:
        """Weights of a layer that take part in each token."""
        attention = self.width * self.head_dim * 2 * (self.heads + self.kv_heads)
        return attention + 3 * self.width * self.ffn * self.experts

    @property
    def cell_bytes(self) -> int:
        """Bytes of keys and values of one token of one layer."""
        return 2 * self.kv_heads * self.head_dim * 2


SHAPES = by_name(
    Decoder("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336),
    Decoder("Qwen3-8B", 36, 4096, 32, 8, 128, 12288),
    Decoder("Qwen3-30B-A3B", 48, 2048, 32, 4, 128, 768, experts=8),
    Decoder("Llama-3.1-70B", 80, 8192, 64, 8, 128, 28672),
)
"""Shapes of the protocol, from the models' public configuration files."""


class Accelerator(NamedTuple):
    """Accelerator, by its data sheet.

    Attributes:
        name: Name in the rows of the bench.
        flops: Dense bf16 operations per second.
        bytes_per_s: Bandwidth of its memory.
    """

    name: str
    flops: float
    bytes_per_s: float


GPUS = by_name(
    Accelerator("L40S", 362e12, 864e9),
    Accelerator("A100", 312e12, 1.555e12),
    Accelerator("H100", 989e12, 3.35e12),
    Accelerator("H200", 989e12, 4.8e12),
)
"""Accelerators of the protocol, from the makers' data sheets."""


class Modelled:
    """Costs by formula (`Costs`).

    One layer of a chunk takes a fixed overhead, the larger of its products and one reading of its
    weights, and its attention. A load takes its bytes over the link's rate.

    Args:
        model: Shape of the model.
        gpu: Accelerator.
        gbps: Rate of each tier's link, 1 Gbps = 1e9 bit/s; or one rate for all.
        share: Share of the accelerator for restores; 1 is all of it.
        launch_s: Overhead of a layer of a chunk; an assumption.
        latency_s: Seconds of a load before its first byte.
        ideal: Leave out overheads and the reading of weights: for bounds.

    Raises:
        ConfigError: A rate or the share is not above 0.
    """

    def __init__(
        self,
        model: Decoder,
        gpu: Accelerator,
        gbps: float | Mapping[str, float],
        *,
        share: float = 1.0,
        launch_s: float = 60e-6,
        latency_s: float = 0.0,
        ideal: bool = False,
    ) -> None:
        rates = dict(gbps) if isinstance(gbps, Mapping) else {LINK: gbps}
        if share <= 0 or min(rates.values()) <= 0:
            raise ConfigError(f"share {share} and rates {rates}", "Give numbers above 0")
        self.model, self.gpu, self.rates, self.share = model, gpu, rates, share
        self._launch_s, self._latency_s = (0.0, 0.0) if ideal else (launch_s, latency_s)
        self._token_s = 2.0 * model.weights / (gpu.flops * EFFICIENCY * share)
        self._pair_s = 4.0 * model.heads * model.head_dim / (gpu.flops * ATTENTION * share)
        self._least_s = 0.0 if ideal else 2.0 * model.weights / (gpu.bytes_per_s * share)
        self._options = {"share": share, "launch_s": launch_s, "latency_s": latency_s}
        self._byte_s = {tier: 8.0 / (rate * 1e9) for tier, rate in rates.items()}

    @property
    def ideal(self) -> Modelled:
        """The same costs without overheads, for `lower_bound`."""
        return Modelled(self.model, self.gpu, self.rates, ideal=True, **self._options)

    def compute_s(self, request: RestoreRequest, layers: int, tokens: Span) -> float:
        """Return the seconds of computing layers of tokens."""
        return layers * self._layer_s(tokens.first, tokens.stop - tokens.first)

    def suffix_s(self, request: RestoreRequest) -> float:
        """Return the seconds of all layers of the suffix."""
        return request.layers * self._layer_s(request.tokens, request.suffix)

    def load_s(self, request: RestoreRequest, source: int, cells: int) -> float:
        """Return the seconds of loading so many cells at once."""
        tier, _, cell_bytes = request.sources[source]
        return self._latency_s + cells * cell_bytes * self._byte_s[tier]

    def _layer_s(self, before: int, tokens: int) -> float:
        if tokens <= 0:
            return 0.0
        pairs = tokens * (before + (tokens + 1) / 2)
        return self._launch_s + max(tokens * self._token_s, self._least_s) + pairs * self._pair_s


EFFICIENCY = 0.55
"""Share of the peak that products reach; an assumption."""

ATTENTION = 0.45
"""Share of the peak that attention reaches; an assumption."""


def asked(
    model: Decoder,
    tokens: int,
    suffix: int = 512,
    *,
    number: int = 0,
    codecs: tuple[str, ...] = ("raw",),
    tiers: tuple[str, ...] = (LINK,),
    arrived_s: float = 0.0,
    whole: bool = False,
) -> RestoreRequest:
    """Return a request to a model, with its prefix in each of these tiers and codecs."""
    sources = tuple(
        Source(tier, codec, model.cell_bytes * CODECS[codec]) for codec in codecs for tier in tiers
    )
    return RestoreRequest(
        number=number,
        tokens=tokens,
        suffix=suffix,
        layers=model.layers,
        sources=sources,
        arrived_s=arrived_s,
        whole=whole,
    )
