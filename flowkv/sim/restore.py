"""Restores on a virtual clock, with the very policy objects that the cache uses.

Everything here is simulated and says so (DESIGN D17).
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import product
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from flowkv.core.errors import ConfigError, StateError
from flowkv.policy.restore.costs import Measured, lower_bound
from flowkv.policy.restore.flowkv import TwoPointer
from flowkv.policy.restore.state import (
    Compute,
    Costs,
    Load,
    Op,
    Progress,
    Request,
    RestorePolicy,
    Source,
    Span,
    State,
    Suffix,
)
from flowkv.sim.hardware import CODECS

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


# What came of executing restores, whichever engine did it.


class Done(NamedTuple):
    """One op, as it went.

    Attributes:
        op: Which.
        start_s: When it was given to its engine.
        end_s: When its cells were there, or when it failed.
        ok: False if it failed.
    """

    op: Op
    start_s: float
    end_s: float
    ok: bool


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What one execution did.

    Attributes:
        timeline: Its ops, in order of their starts; of one time, in the order they were begun in.
        ttft_s: Per request: from its arrival until its last op was done.
        link_bytes: Moved by loads, failed ones too.
        compute_busy_s: Seconds of all compute ops, suffixes too.
        link_busy_s: Seconds in which loads were under way, summed over tiers.
        met: Per request: share of its cells that was computed; where the pointers met.
    """

    timeline: tuple[Done, ...]
    ttft_s: dict[int, float]
    link_bytes: float
    compute_busy_s: float
    link_busy_s: float
    met: dict[int, float]

    @property
    def makespan_s(self) -> float:
        """From the first start until all was done."""
        ends = [done.end_s for done in self.timeline]
        return max(ends) - min(done.start_s for done in self.timeline) if ends else 0.0

    @property
    def mean_s(self) -> float:
        """Mean time to first token."""
        return sum(self.ttft_s.values()) / len(self.ttft_s)


def summed(requests: Iterable[Request], timeline: Iterable[Done]) -> Run:
    """What a timeline says about its requests; ops of one start in the order they were begun in."""
    known = {request.number: request for request in requests}
    timeline = tuple(sorted(timeline, key=lambda done: done.start_s))
    ends = {number: request.arrived_s for number, request in known.items()}
    computed = dict.fromkeys(known, 0)
    link_bytes = compute_s = link_s = 0.0
    free_s: dict[str, float] = {}
    for op, start_s, end_s, ok in timeline:
        ends[op.request] = max(ends[op.request], end_s)
        if isinstance(op, Load):
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


def cells_of(request: Request) -> int:
    """Cells that a restore of it has to produce."""
    return (request.tokens - request.resident) * request.layers


# A virtual clock: executes a restore policy against costs, deterministically.

Among = Collection[int] | None


def run(
    requests: Sequence[Request],
    policy: RestorePolicy,
    costs: Costs,
    *,
    believed: Costs | None = None,
    engines: Sequence[Among] = (None,),
    depth: int = 1,
    fails: Callable[[Load], bool] | None = None,
) -> Run:
    """Restores requests as a policy says.

    Args:
        requests: What is asked for; each is known from `arrived_s` on.
        policy: Who decides.
        costs: What things really take.
        believed: What the policy is told that they take; a `Measured` is told what they took. The
            truth without.
        engines: Compute engines, each with the numbers of the requests that it can compute; None
            for all. Each tier has one link, which loads one after the other.
        depth: Loads that are begun at once on a link, to be served one after the other.
        fails: Whether a load comes to nothing.

    Raises:
        StateError: The policy does not go on although something is left, or breaks the rules.
    """
    return VirtualClock(requests, policy, costs, believed or costs, engines, depth, fails).run()


class _Ending(NamedTuple):
    op: Op
    took_s: float
    ok: bool


class VirtualClock:
    """See `run`; `inputs_s` can be extended."""

    def __init__(
        self,
        requests: Sequence[Request],
        policy: RestorePolicy,
        costs: Costs,
        believed: Costs,
        engines: Sequence[Among],
        depth: int,
        fails: Callable[[Load], bool] | None,
    ) -> None:
        self.policy, self.costs, self.believed = policy, costs, believed
        self.requests = list(requests)
        self.state = State(believed)
        self.engines, self.depth = list(engines), depth
        self.fails = fails
        self.tiers = sorted({source.tier for one in requests for source in one.sources})
        self.busy = [False] * len(self.engines)
        self.queued = dict.fromkeys(self.tiers, 0)
        self.free_s = dict.fromkeys(self.tiers, 0.0)
        self.timeline: list[Done] = []
        self.events: list[tuple[float, int, Request | _Ending, int]] = []
        self.count = 0

    def run(self) -> Run:
        """Until nothing is left."""
        for request in self.requests:
            self._at(request.arrived_s, request, 0)
        while self.events:
            now_s = self.state.now_s = self.events[0][0]
            while self.events and self.events[0][0] <= now_s:
                _, _, what, engine = heapq.heappop(self.events)
                if isinstance(what, Request):
                    self._drop_if_done(self.state.add(what))
                else:
                    self._ended(what, engine)
            self._ask()
        if self.state.requests:
            left = sorted(self.state.requests)
            raise StateError(f"Requests {left} were left unfinished", "See the policy's answers")
        return summed(self.requests, self.timeline)

    def _at(self, time_s: float, what: Request | _Ending, engine: int) -> None:
        self.count += 1
        heapq.heappush(self.events, (time_s, self.count, what, engine))

    def _ask(self) -> None:
        for engine, among in enumerate(self.engines):
            if not self.busy[engine]:
                op = self.policy.next_compute(self.state, among)
                if op is not None:
                    self.busy[engine] = True
                    self._begin(op, engine)
        for tier in self.tiers:
            while self.queued[tier] < self.depth:
                load = self.policy.next_load(self.state, tier)
                if load is None:
                    break
                self.queued[tier] += 1
                self._begin(load, -1)

    def _begin(self, op: Op, engine: int) -> None:
        self.state.begin(op)
        now_s = start_s = self.state.now_s
        request = self.state.requests[op.request].request
        ok = True
        if isinstance(op, Load):
            cells = op.layers.size * op.tokens.size
            took_s = self.costs.load_s(request, op.source, cells)
            tier = request.sources[op.source].tier
            start_s = max(now_s, self.free_s[tier])
            self.free_s[tier] = start_s + took_s
            ok = self.fails is None or not self.fails(op)
        elif isinstance(op, Compute):
            start_s = self.inputs_s(op)
            took_s = self.costs.compute_s(request, op.layers.size, op.tokens)
        else:
            took_s = self.costs.suffix_s(request) / request.layers
        self.timeline.append(Done(op, now_s, start_s + took_s, ok))
        self._at(start_s + took_s, _Ending(op, took_s, ok), engine)

    def inputs_s(self, op: Compute) -> float:
        """When what a compute needs is there: now, for it is only begun then."""
        return self.state.now_s

    def _ended(self, ending: _Ending, engine: int) -> None:
        op, took_s, ok = ending
        progress = self.state.requests[op.request]
        if isinstance(op, Load):
            self.queued[progress.request.sources[op.source].tier] -= 1
        else:
            self.busy[engine] = False
        (self.state.end if ok else self.state.fail)(op)
        if ok and isinstance(self.believed, Measured):
            self._tell(self.believed, progress.request, op, took_s)
        self._drop_if_done(progress)

    def _drop_if_done(self, progress: Progress) -> None:
        if progress.done and not progress.flying:
            self.state.remove(progress.request.number)
            self.policy.forget(progress.request.number)

    @staticmethod
    def _tell(measured: Measured, request: Request, op: Op, seconds: float) -> None:
        if isinstance(op, Compute):
            measured.computed(request, op.layers.size, op.tokens, seconds)
        elif isinstance(op, Suffix):
            measured.suffixed(request, seconds * request.layers)
        else:
            measured.loaded(request, op.source, op.layers.size * op.tokens.size, seconds)


# What restores cost: from a model's shape, an accelerator's data sheet and the rate of a link.
#
# Nothing here is measured; whatever is computed from it is simulated (DESIGN D17).

LINK = "link"
"""Name of the tier where nothing else is said."""


class Decoder(NamedTuple):
    """The shape of a decoder, in bf16.

    Attributes:
        name: As the rows of the bench name it.
        layers: L.
        width: Of the residual stream, d.
        heads: Query heads.
        kv_heads: Key/value heads.
        head_dim: Numbers of each.
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
        """Keys and values of one token of one layer."""
        return 2 * self.kv_heads * self.head_dim * 2


SHAPES = MappingProxyType(
    {
        shape.name: shape
        for shape in (
            Decoder("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336),
            Decoder("Qwen3-8B", 36, 4096, 32, 8, 128, 12288),
            Decoder("Qwen3-30B-A3B", 48, 2048, 32, 4, 128, 768, experts=8),
            Decoder("Llama-3.1-70B", 80, 8192, 64, 8, 128, 28672),
        )
    }
)
"""Shapes of the protocol, from the models' public configuration files."""


class Accelerator(NamedTuple):
    """What a data sheet says.

    Attributes:
        name: As the rows of the bench name it.
        flops: Dense bf16 operations a second.
        bytes_per_s: Of its memory.
    """

    name: str
    flops: float
    bytes_per_s: float


GPUS = MappingProxyType(
    {
        gpu.name: gpu
        for gpu in (
            Accelerator("L40S", 362e12, 864e9),
            Accelerator("A100", 312e12, 1.555e12),
            Accelerator("H100", 989e12, 3.35e12),
            Accelerator("H200", 989e12, 4.8e12),
        )
    }
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
        share: Of the accelerator, what restores get; 1 is all of it.
        launch_s: Overhead of a layer of a chunk; an assumption.
        latency_s: Of a load, before its first byte.
        ideal: Without overheads and without the reading of weights: for bounds.

    Raises:
        ConfigError: A rate or a share that is not above 0.
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
            raise ConfigError(f"Share {share} and rates {rates}", "Give numbers above 0")
        self.model, self.gpu, self.rates, self.share = model, gpu, rates, share
        self._launch_s, self._latency_s = (0.0, 0.0) if ideal else (launch_s, latency_s)
        self._token_s = 2.0 * model.weights / (gpu.flops * EFFICIENCY * share)
        self._pair_s = 4.0 * model.heads * model.head_dim / (gpu.flops * ATTENTION * share)
        self._least_s = 0.0 if ideal else 2.0 * model.weights / (gpu.bytes_per_s * share)
        self._options = {"share": share, "launch_s": launch_s, "latency_s": latency_s}
        self._byte_s = {tier: 8.0 / (rate * 1e9) for tier, rate in rates.items()}

    @property
    def ideal(self) -> Modelled:
        """The same without overheads, for `lower_bound`."""
        return Modelled(self.model, self.gpu, self.rates, ideal=True, **self._options)

    def compute_s(self, request: Request, layers: int, tokens: Span) -> float:
        """So many layers of these tokens."""
        return layers * self._layer_s(tokens.first, tokens.stop - tokens.first)

    def suffix_s(self, request: Request) -> float:
        """All layers of the suffix."""
        return request.layers * self._layer_s(request.tokens, request.suffix)

    def load_s(self, request: Request, source: int, cells: int) -> float:
        """So many cells at once."""
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
) -> Request:
    """A request to such a model; its prefix lies in each of these tiers, in each codec."""
    sources = tuple(
        Source(tier, codec, model.cell_bytes * CODECS[codec]) for codec in codecs for tier in tiers
    )
    return Request(
        number=number,
        tokens=tokens,
        suffix=suffix,
        layers=model.layers,
        sources=sources,
        arrived_s=arrived_s,
        whole=whole,
    )


# The grid of the protocol, cell by cell, on the virtual clock.
#
# Three models, three accelerators, 10, 40 and 80 Gbps (1 Gbps = 1e9 bit/s) and prefixes of 6K to
# 96K tokens: the settings of the published comparisons (arXiv 2604.25080, 2410.03065).

GRID_MODELS = tuple(SHAPES)[:3]  # those of the published comparisons
GRID_GPUS = ("L40S", "A100", "H100")
GRID_GBPS = (10.0, 40.0, 80.0)
GRID_TOKENS = (6144, 16384, 30720, 98304)


class Cell(NamedTuple):
    """One setting.

    Attributes:
        model: Name in `SHAPES`.
        gpu: Name in `GPUS`.
        gbps: Rate of the link.
        tokens: Of the prefix.
        suffix: Tokens behind it.
        share: Of the accelerator, what the restore gets.
    """

    model: str
    gpu: str
    gbps: float
    tokens: int
    suffix: int = 512
    share: float = 1.0

    @property
    def costs(self) -> Modelled:
        """What things take there."""
        return Modelled(SHAPES[self.model], GPUS[self.gpu], self.gbps, share=self.share)

    def request(self, *, whole: bool = False, codecs: tuple[str, ...] = ("raw",)) -> Request:
        """Its only request."""
        shape = SHAPES[self.model]
        return asked(shape, self.tokens, self.suffix, whole=whole, codecs=codecs)

    def run(self, policy: RestorePolicy, *, whole: bool = False) -> Run:
        """Restores the request as a policy says."""
        return run([self.request(whole=whole)], policy, self.costs)

    def bound_s(self) -> float:
        """Seconds that no policy can beat."""
        return lower_bound(self.request(), self.costs.ideal)


def grid(suffix: int = 512, share: float = 1.0) -> tuple[Cell, ...]:
    """All 108 settings with such a suffix and such a share of the accelerator."""
    settings = product(GRID_MODELS, GRID_GPUS, GRID_GBPS, GRID_TOKENS)
    return tuple(Cell(*setting, suffix=suffix, share=share) for setting in settings)


# A pipeline of stages, each with a share of the layers, an accelerator and a link of its own.
#
# All stages restore at once: each loads the activations at its lower boundary for the tokens that
# it computes, so that it need not wait for the stage below (the paper's third dimension, arXiv
# 2604.25080). Those bytes come on top of the keys and values. Virtual: nothing here is several
# accelerators.

BOUNDARY_NUMBER_BYTES = 2


class Staged(NamedTuple):
    """What stages did with one prefix.

    Attributes:
        restored_s: Until the last stage had all its cells.
        bound_s: What no policy can beat, boundary activations loaded for what is computed.
        boundary_bytes: Loaded on top of keys and values, by all stages.
        link_bytes: Keys and values loaded, by all stages.
    """

    restored_s: float
    bound_s: float
    boundary_bytes: float
    link_bytes: float


class _Stages(VirtualClock):
    """Computes wait for the activations at their stage's boundary, which come over its link."""

    def __init__(self, stages: int, costs: Modelled, tokens: int) -> None:
        self.token_bytes = float(costs.model.width * BOUNDARY_NUMBER_BYTES)
        self._token_s = {
            i: self.token_bytes * 8.0 / (costs.rates[f"link{i}"] * 1e9) for i in range(1, stages)
        }
        self._policy = TwoPointer(block=64, inputs_s=self._token_s)
        part = costs.model._replace(layers=costs.model.layers // stages)
        asks = [asked(part, tokens, 0, number=i, tiers=(f"link{i}",)) for i in range(stages)]
        super().__init__(asks, self._policy, costs, costs, [(i,) for i in range(stages)], 1, None)
        self._fetched: dict[int, list[tuple[int, float]]] = {i: [] for i in range(1, stages)}

    @property
    def boundary_bytes(self) -> float:
        """Loaded so far."""
        return sum(known[-1][0] for known in self._fetched.values() if known) * self.token_bytes

    def inputs_s(self, op: Compute) -> float:
        """When the activations of all its tokens are there; those of the next pass are fetched."""
        number, stop = op.request, op.tokens.stop
        if number not in self._fetched or op.layers.first:
            return self.state.now_s
        self._fetch(number, stop)
        there_s = next(time_s for token, time_s in self._fetched[number] if token >= stop)
        self._fetch(number, min(self._policy.goal(number), stop + 3 * stop))
        return max(there_s, self.state.now_s)

    def _fetch(self, number: int, stop: int) -> None:
        fetched = self._fetched[number]
        first = fetched[-1][0] if fetched else 0
        if stop > first:
            tier = f"link{number}"
            took_s = (stop - first) * self._token_s[number]
            self.free_s[tier] = max(self.state.now_s, self.free_s[tier]) + took_s
            fetched.append((stop, self.free_s[tier]))


def staged(costs: Modelled, tokens: int, stages: int) -> Staged:
    """Restores a prefix on so many stages, without a suffix.

    Args:
        costs: Of one accelerator; all stages have one like it, and a link like its first.
        tokens: Of the prefix.
        stages: How many; they share the layers evenly.

    Raises:
        ConfigError: The layers cannot be shared evenly.
    """
    if stages < 1 or costs.model.layers % stages:
        raise ConfigError(f"{costs.model.layers} layers over {stages} stages", "Share them evenly")
    gbps = next(iter(costs.rates.values()))
    mine = Modelled(
        costs.model, costs.gpu, {f"link{i}": gbps for i in range(stages)}, share=costs.share
    )
    clock = _Stages(stages, mine, tokens)
    done = clock.run()
    whole = asked(costs.model, tokens, 0, tiers=("link0",))
    boundary_s = clock.token_bytes * 8.0 / (gbps * 1e9)
    return Staged(
        max(done.ttft_s.values()),
        lower_bound(whole, mine.ideal, stages=stages, boundary_s=boundary_s),
        clock.boundary_bytes,
        done.link_bytes,
    )


# Several requests at once: lengths to draw from.

MEDIAN_TOKENS = 12_000
LEAST_TOKENS, MOST_TOKENS, SPREAD = 1024, 98304, 0.8


def lengths(size: int, seed: int) -> tuple[int, ...]:
    """Prefix lengths of a batch, in tokens: lognormal around 12K, between 1K and 96K."""
    draw = random.Random(seed)
    some = (MEDIAN_TOKENS * draw.lognormvariate(0.0, SPREAD) for _ in range(size))
    return tuple(max(LEAST_TOKENS, min(MOST_TOKENS, int(n) // 64 * 64)) for n in some)
