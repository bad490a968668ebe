"""Restores: operations, their progress, and the policy that chooses the next one.

An executor of restores (virtual clock, emulated devices, torch, the cache) calls `State.begin`,
`end` and `fail`; policies only read the state.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import msgspec

from flowkv.core.errors import ConfigError, StateError
from flowkv.policy.base import made

# Terms of a restore: the request, and three operations on it.
#
# A prefix of N tokens over L layers is a rectangle of *cells* (layer, token). Each cell is computed
# or loaded, once. Causality gives both their direction: a layer's tokens are computed from the
# front, and only where the layer below computed them too; so loads come from the back. Each layer
# has two pointers, and the layer is complete when they have met. The suffix, which no tier has, is
# computed layer by layer once the prefix of its layer is complete.


class Span(NamedTuple):
    """A half-open range: of layers, or of tokens."""

    first: int
    stop: int

    @property
    def size(self) -> int:
        """Number of layers or tokens in the range."""
        return self.stop - self.first


class Source(NamedTuple):
    """Tier and codec from which all cells of a prefix can be loaded.

    Attributes:
        tier: Name of the tier; loads of one tier share a link.
        codec: Codec of the pages there (`core.geometry.CODECS`).
        cell_bytes: Bytes of one token of one layer.
    """

    tier: str
    codec: str
    cell_bytes: float


class RestoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt with a prefix to restore.

    Attributes:
        number: Number of the request; unique among those restored together.
        tokens: N, tokens of the prefix; its cells are those of `[resident, tokens)`.
        suffix: S, tokens behind it, which must be computed. 0 leaves the suffix out.
        layers: L.
        resident: Leading tokens that are resident already.
        unit: Tokens of a page. Spans of tokens begin and end at multiples of it, or at `tokens`.
        sources: Sources of its cells, most precise first; empty if it can only be computed.
        computable: Whether cells can be computed at all; False without control of the model.
        whole: Computes are over all layers (an unmodified model cannot be stopped halfway).
        least: Layers of a page that are worth one request, however fast the link is.
        shared: Whether loads take the time of the processor that computes.
        arrived_s: Time of arrival.
    """

    number: int
    tokens: int
    suffix: int
    layers: int
    resident: int = 0
    unit: int = 64
    sources: tuple[Source, ...] = ()
    computable: bool = True
    whole: bool = False
    least: int = 1
    shared: bool = False
    arrived_s: float = 0.0


class Compute(NamedTuple):
    """Operation that computes these layers of these tokens.

    Attributes:
        request: Number of the request.
        layers: Range of layers.
        tokens: Range of tokens; it begins where the layers' computed tokens end.
    """

    request: int
    layers: Span
    tokens: Span


class RestoreLoad(NamedTuple):
    """Operation that loads these layers of these tokens.

    Attributes:
        request: Number of the request.
        layers: Range of layers.
        tokens: Range of tokens; it ends where the layers' loaded tokens begin.
        source: Index into `RestoreRequest.sources`.
    """

    request: int
    layers: Span
    tokens: Span
    source: int = 0


class Suffix(NamedTuple):
    """Operation that computes a suffix layer; its prefix is complete, and the layer below is done.

    Attributes:
        request: Number of the request.
        layer: Layer of the model.
    """

    request: int
    layer: int


Op = Compute | RestoreLoad | Suffix


class Costs(Protocol):
    """Expected durations, in seconds; 0.0 while one is unknown."""

    def compute_s(self, request: RestoreRequest, layers: int, tokens: Span) -> float:
        """Return the seconds of computing so many layers of these tokens."""

    def suffix_s(self, request: RestoreRequest) -> float:
        """Return the seconds of computing all layers of the suffix."""

    def load_s(self, request: RestoreRequest, source: int, cells: int) -> float:
        """Return the seconds of loading so many cells (tokens times layers) at once."""


class Progress:
    """Progress of one request's cells.

    Attributes:
        request: The request.
        front: Per layer: tokens for which computes were begun, from the first one on.
        back: Per layer: first token for which loads were begun.
        computed: Per layer: tokens that are computed (or were resident).
        missing: Per layer: tokens of loads in flight.
        suffix: Layers of the suffix that were begun.
        answered: Layers of the suffix that are done.
        flying: Operations in flight.
        lost: Tokens up to which no load is possible, because a load of theirs failed.
        fronted: Whether the front has ended: no more of the prefix is computed, and the suffix
            waits for the rest, layer by layer.
    """

    def __init__(self, request: RestoreRequest) -> None:
        layers = request.layers
        self.request = request
        self.front, self.computed = [request.resident] * layers, [request.resident] * layers
        self.back, self.missing = [request.tokens] * layers, [0] * layers
        self.suffix = self.answered = self.lost = 0
        self.fronted = False
        self.flying: list[Op] = []

    def gap(self, layer: int) -> int:
        """Return the tokens of a layer that are neither computed nor loaded nor in flight."""
        return max(0, self.back[layer] - self.front[layer])

    def cells(self) -> int:
        """Return the cells that are neither computed nor loaded nor in flight."""
        return sum(map(self.gap, range(self.request.layers)))

    def there(self, layer: int) -> bool:
        """Return whether all cells of a layer's prefix are complete."""
        whole = self.front[layer] >= self.back[layer] and not self.missing[layer]
        return whole and self.computed[layer] >= self.back[layer]

    @property
    def met(self) -> bool:
        """Whether an operation was begun for every cell."""
        return all(f >= b for f, b in zip(self.front, self.back, strict=True))

    @property
    def restored(self) -> bool:
        """Whether the whole prefix is complete."""
        return all(map(self.there, range(self.request.layers)))

    @property
    def done(self) -> bool:
        """Whether the prefix and the suffix are complete."""
        suffix = self.request.layers if self.request.suffix else 0
        return self.answered >= suffix and self.restored


class State:
    """State of all restores under way together.

    Args:
        costs: Expected costs of operations.

    Attributes:
        now_s: The time, set by the executor.
        requests: Progress by number, in order of arrival.
        link_cells: Cells of loads under way, by tier.
        untold: Tiers without a finished load so far, so that their costs are unconfirmed.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs, self.now_s = costs, 0.0
        self.requests: dict[int, Progress] = {}
        self.link_cells: dict[str, int] = {}
        self.untold = set[str]()

    def add(self, request: RestoreRequest) -> Progress:
        """Add a request that arrived."""
        if request.number in self.requests:
            raise StateError(f"request {request.number} exists already", "Use another number")
        progress = self.requests[request.number] = Progress(request)
        return progress

    def remove(self, number: int) -> None:
        """Remove a request that is done or cancelled."""
        progress = self.requests.pop(number)
        for op in progress.flying:
            if isinstance(op, RestoreLoad):
                self._count(progress.request, op, -1)

    def fronted(self, number: int) -> None:
        """Record that no more of a request's prefix will be computed."""
        self.requests[number].fronted = True

    def __iter__(self) -> Iterator[Progress]:
        return iter(self.requests.values())

    def among(self, numbers: Iterable[int] | None) -> Iterator[Progress]:
        """Return the requests with these numbers; all of them if that is None."""
        if numbers is None:
            return iter(self)
        return (self.requests[number] for number in numbers if number in self.requests)

    # ---- events

    def begin(self, op: Op) -> None:
        """Begin an operation, and take its cells.

        Raises:
            StateError: It does not continue at the pointers. The verifier says more.
        """
        progress = self.requests[op.request]
        if isinstance(op, Suffix):
            if op.layer != progress.suffix or not progress.there(op.layer):
                raise StateError(f"{op} is not due", "Ask the policy again")
            progress.suffix += 1
        elif isinstance(op, Compute):
            layers = range(*op.layers)
            begins = all(progress.front[layer] == op.tokens.first for layer in layers)
            fits = all(op.tokens.stop <= progress.back[layer] for layer in layers)
            self._meets(op, begins and fits)
            for layer in layers:
                progress.front[layer] = op.tokens.stop
        else:
            layers = range(*op.layers)
            ends = all(progress.back[layer] == op.tokens.stop for layer in layers)
            fits = all(op.tokens.first >= progress.front[layer] for layer in layers)
            self._meets(op, ends and fits and op.tokens.first >= progress.lost)
            for layer in layers:
                progress.back[layer] = op.tokens.first
                progress.missing[layer] += op.tokens.size
            self._count(progress.request, op, 1)
        progress.flying.append(op)

    def end(self, op: Op) -> None:
        """Complete an operation: its cells are available."""
        progress = self.requests[op.request]
        progress.flying.remove(op)
        if isinstance(op, Suffix):
            progress.answered += 1
        elif isinstance(op, Compute):
            for layer in range(*op.layers):
                progress.computed[layer] = op.tokens.stop
        else:
            self._landed(progress, op)

    def fail(self, op: Op) -> None:
        """Drop a failed load's cells: all up to its last token must be computed."""
        if not isinstance(op, RestoreLoad):
            raise StateError(f"{op} cannot fail", "Only loads do")
        progress = self.requests[op.request]
        progress.flying.remove(op)
        self._landed(progress, op)
        progress.lost = max(progress.lost, op.tokens.stop)
        for layer in range(progress.request.layers):
            progress.back[layer] = max(progress.back[layer], progress.lost)

    def _landed(self, progress: Progress, op: RestoreLoad) -> None:
        for layer in range(*op.layers):
            progress.missing[layer] -= op.tokens.size
        self._count(progress.request, op, -1)

    def _count(self, request: RestoreRequest, op: RestoreLoad, sign: int) -> None:
        tier = request.sources[op.source].tier
        cells = sign * op.layers.size * op.tokens.size
        self.link_cells[tier] = self.link_cells.get(tier, 0) + cells

    @staticmethod
    def _meets(op: Compute | RestoreLoad, right: bool) -> None:
        if not right or op.tokens.size <= 0 or op.layers.size <= 0:
            raise StateError(f"{op} does not continue at the pointers", "Ask the policy again")


# The two decisions of a restore policy, made from the state alone.


class RestorePolicy(ABC):
    """Base of policies that choose the next operation of each engine. Pure and deterministic.

    The same object serves a virtual clock, emulated devices, torch and the cache. Each calls it
    when one of its engines is idle, and begins the answer at once (`State.begin`), before the next
    call. None leaves the engine idle until an operation ends or a request arrives.

    Attributes:
        name: Name of the policy.
        at_once: Whether the cache copies pages at once, without a call of the policy, if all of
            them lie in host memory that the device reads.
    """

    name, at_once = "", False

    @abstractmethod
    def next_compute(
        self, state: State, among: Collection[int] | None = None
    ) -> Compute | Suffix | None:
        """Return the operation to compute next.

        Args:
            state: Progress of all restores.
            among: Numbers of the requests that this engine can compute; None for all.
        """

    @abstractmethod
    def next_load(self, state: State, tier: str) -> RestoreLoad | None:
        """Return the next load from a tier."""

    def forget(self, number: int) -> None:  # noqa: B027 - most have no state
        """Drop the state of a request that is done or cancelled."""


# FlowKV's own policy: two pointers that meet where both engines end together.
#
# The front is computed layer by layer in one long pass, so that a layer's fixed costs are paid
# once, and the goal is set anew from layer to layer: a slow engine makes a staircase of it, a fast
# one adds a pass. Loads come from the back, all layers at once, while the split can still move; the
# last of them, as much as the suffix takes to compute, come layer by layer from the bottom, and the
# suffix runs behind them. Several requests are served shortest first; waiting makes a request
# shorter.
#
# Costs are not trusted: they set the sizes of steps and the moment to change the order of loads,
# but a cell without an operation may still be computed or loaded.
#
# Split of a request: the tokens to compute so that both engines end together.

_TOGETHER = 0.01


class Prices(NamedTuple):
    """Durations that count for one request, in seconds.

    Attributes:
        cell_s: Loading a cell, by all its tiers together; 0 while unknown.
        suffix_s: Computing the rest of the suffix.
        compute_wait_s: Wait for the compute engine.
        link_wait_s: Wait for the link.
        input_s: Link time for each token that is computed from the lowest layer on.
    """

    cell_s: float
    suffix_s: float
    compute_wait_s: float = 0.0
    link_wait_s: float = 0.0
    input_s: float = 0.0


class Split(NamedTuple):
    """Split of a request: compute up to `goal`, load the rest; all is done `finish_s` from now."""

    goal: int
    finish_s: float


def first_behind(progress: Progress) -> int:
    """Return the lowest of the layers that are computed least far and still have free cells.

    Their cells are the cheapest, and their inputs exist: the layer below is further.
    """
    front, back = progress.front, progress.back
    layer = front.index(front[-1])
    while layer and front[layer] >= back[layer]:
        layer = front.index(front[layer - 1])
    return layer


def best_split(
    progress: Progress,
    layer: int,
    cap: int,
    costs: Costs,
    prices: Prices,
    hint: int = 0,
    first: int = -1,
) -> Split:
    """Return how far to compute from `layer` upwards, so that the later engine ends soonest.

    Compute time grows and load time falls with the goal, so that they cross once. The suffix runs
    behind the loads layer by layer: only its last layer waits for all of them.

    Args:
        progress: Progress of the request; layers below `layer` are computed to their ends.
        layer: The lowest layer to compute.
        cap: Token that the goal cannot exceed.
        costs: Costs of computing.
        prices: Other durations that count.
        hint: The goal so far; it stays while both engines still end almost together.
        first: Token to compute from; -1 for where `layer` stands.
    """
    request, back = progress.request, progress.back
    if first < 0:
        first = progress.front[layer]
    last = request.layers
    while last > layer + 1 and back[last - 1] <= first:
        last -= 1
    layers, unit = last - layer, request.unit
    cells = sum(back[layer:last])
    if layer:  # the rest of the link's work below
        for front, end in zip(progress.front[:layer], back, strict=False):
            cells += max(0, end - max(front, progress.lost))
    cell_s, suffix_s, busy_s, link_s, input_s = prices
    input_s = 0.0 if layer else input_s
    busy_s += suffix_s
    link_s += suffix_s / request.layers

    def both(goal: int) -> tuple[float, float]:
        computed_s = busy_s
        if goal > first:
            computed_s += costs.compute_s(request, layers, Span(first, goal))
        return computed_s, link_s + (cells - layers * goal) * cell_s + (goal - first) * input_s

    low = max(first, min(progress.lost, cap))
    if low < hint <= cap:
        computed_s, loaded_s = both(hint)
        if abs(computed_s - loaded_s) < _TOGETHER * computed_s:
            return Split(hint, max(computed_s, loaded_s))
    nothing = max(both(low))
    if low >= cap:
        return Split(low, nothing)
    computed_s, loaded_s = both(cap)
    best = Split(low, nothing)
    if max(computed_s, loaded_s) < nothing:
        best = Split(cap, max(computed_s, loaded_s))
    if computed_s <= loaded_s:
        return best
    pages = range(low // unit * unit + unit, cap, unit)
    at = bisect_left(pages, True, key=lambda goal: operator.ge(*both(goal)))
    for goal in pages[max(at - 1, 0) : at + 1]:
        if (finish_s := max(both(goal))) < best.finish_s:
            best = Split(goal, finish_s)
    return best


# Decision about one request, and its inputs.

_AS_GOOD = 1.01
_PART = 4


class Aim:
    """Decision about a request.

    Attributes:
        progress: Progress of the request; another object under the same number is another request.
        goal: Token up to which layers that are not computed yet should be computed.
        sources: Index of the source to load from, by tier.
        size_s: Seconds that the request takes alone; 0 while unknown.
        stripe: Lowest layer that may have cells left to load.
        group: Least layers of a stripe; below 0 while undecided.
        cell_s: Seconds to load a cell, by all tiers together, as of the last plan.
        suffix_s: Seconds of the rest of the suffix, as of the last plan; below 0 before it.
        set: Whether there is a goal.
        busy_until_s: Expected end of the last compute.
        loads_from_s: Time when the link began the loads under way.
        loads_until_s: Expected end of the last load.
    """

    def __init__(self, progress: Progress) -> None:
        self.progress, self.goal, self.size_s = progress, progress.request.resident, 0.0
        self.sources: dict[str, int] = {}
        for index, source in enumerate(progress.request.sources):
            self.sources.setdefault(source.tier, index)
        self.stripe, self.group, self.cell_s, self.suffix_s = 0, -1, 0.0, -1.0
        self.set = False
        self.busy_until_s = self.loads_from_s = self.loads_until_s = 0.0

    def late(self, state: State) -> float:
        """Return actual over expected time of loads under way; 0.0 without any, or in time."""
        until_s, from_s = self.loads_until_s, self.loads_from_s
        flying = any(isinstance(op, RestoreLoad) for op in self.progress.flying)
        if not flying or state.now_s <= until_s or until_s <= from_s:
            return 0.0
        return (state.now_s - from_s) / (until_s - from_s)

    def known(self, costs: Costs) -> bool:
        """Return whether the cost of computing is known."""
        request = self.progress.request
        return costs.compute_s(request, 1, Span(0, request.unit)) > 0

    def measure(self, state: State) -> None:
        """Choose the codec of loads, as precise as costs nothing, and estimate the request's size.

        While costs are unknown, both stay open.
        """
        progress = self.progress
        request, costs = progress.request, state.costs
        if request.computable and not self.known(costs):
            return
        suffix_s = costs.suffix_s(request) if request.suffix else 0.0
        layer = first_behind(progress)
        cap = min(progress.back)
        best: list[tuple[Split, dict[str, int]]] = []
        for codec in dict.fromkeys(source.codec for source in request.sources):
            sources = dict(self.sources)
            for index, source in enumerate(request.sources):
                if source.codec == codec:
                    sources[source.tier] = index
            prices = Prices(together_s(state, request, sources), suffix_s)
            if not prices.cell_s:
                return
            split = Split(cap, cap * request.layers * prices.cell_s + suffix_s)
            if request.computable:
                split = best_split(progress, layer, cap, costs, prices)
            best.append((split, sources))
        if not best:
            whole = Span(request.resident, request.tokens)
            self.size_s = suffix_s + costs.compute_s(request, request.layers, whole)
            return
        least = min(split.finish_s for split, _ in best)
        split, self.sources = next(one for one in best if one[0].finish_s <= _AS_GOOD * least)
        self.size_s = split.finish_s

    def left_s(self, state: State) -> tuple[float, float]:
        """Return the seconds of each engine that a request still needs."""
        progress = self.progress
        request = progress.request
        busy_s, cells = suffix_left_s(state, progress), 0
        layer = first_behind(progress)
        first = progress.front[layer]
        if self.goal > first:
            stop = min(self.goal, progress.front[layer - 1]) if layer else self.goal
            busy_s += state.costs.compute_s(request, request.layers - layer, Span(first, stop))
            if self.goal > stop:
                busy_s += state.costs.compute_s(request, request.layers, Span(stop, self.goal))
        for front, back in zip(progress.front, progress.back, strict=True):
            cells += max(0, back - max(front, self.goal))
        return busy_s, cells * together_s(state, request, self.sources)


def aligned(request: RestoreRequest, token: int, first: int, most: int) -> int:
    """Return the end of the page that contains `token`, at least one page behind `first`."""
    stop = -(-max(token, first + 1) // request.unit) * request.unit
    return min(stop, most)


def suffix_left_s(state: State, progress: Progress) -> float:
    """Return the seconds of the rest of the suffix."""
    request = progress.request
    if not request.suffix:
        return 0.0
    return state.costs.suffix_s(request) * (1.0 - progress.answered / request.layers)


def together_s(state: State, request: RestoreRequest, sources: dict[str, int]) -> float:
    """Return the seconds to load a cell by all tiers together; 0 while one is unknown."""
    rate, cells = 0.0, request.layers * max(request.unit, request.tokens // _PART)
    if len(sources) == 1:
        (index,) = sources.values()
        return state.costs.load_s(request, index, cells) / cells
    for index in sources.values():
        seconds = state.costs.load_s(request, index, cells)
        if not seconds:
            return 0.0
        rate += cells / seconds
    return 1.0 / rate if rate else 0.0


# Loads from the back: all layers at once while the split can still move, then layer by layer.

_TAIL = 1.25
_PAYS = 4.0
_BLOCKS = 5
_LEAST = 3
_SLOWLY = 0.7


class ChunkSizes(NamedTuple):
    """Token counts of single operations.

    Attributes:
        chunk: Most tokens computed at once.
        block: Most tokens loaded at once, of all layers.
        probe: Tokens computed at once while costs are unknown.
    """

    chunk: int
    block: int
    probe: int


def load_from_back(state: State, aim: Aim, tier: str, sizes: ChunkSizes) -> RestoreLoad | None:
    """Return the next load of a request from a tier; None if the rest is to be computed."""
    progress = aim.progress
    request, back, front = progress.request, progress.back, progress.front
    index, layers = aim.sources[tier], request.layers
    end = back[0]
    if not progress.fronted and end == back[-1] and back.count(end) == layers:
        floor = max(front[0], aim.goal, progress.lost)
        size = _block(state, aim, end - floor, sizes) if end > floor else 0
        if size:
            start = max(floor, (end - size) // request.unit * request.unit)
            return RestoreLoad(request.number, Span(0, layers), Span(start, end), index)
    layer = aim.stripe
    while layer < layers:
        floor = max(front[layer], progress.lost, aim.goal)
        if back[layer] > floor:
            break
        layer += 1
    aim.stripe = layer
    if layer == layers:
        return None
    end, last, first = back[layer], layer + 1, front[layer]
    most = min(layers, layer + _stripes(state, aim, index, end - floor))
    while last < most and back[last] == end and front[last] == first:
        last += 1
    start = max(floor, (end - sizes.block * layers) // request.unit * request.unit)
    return RestoreLoad(request.number, Span(layer, last), Span(start, end), index)


def _stripes(state: State, aim: Aim, index: int, tokens: int) -> int:
    """Return the least layers of one load so that its time is not mostly latency."""
    if aim.group < 0:
        request, load_s = aim.progress.request, state.costs.load_s
        one_s, latency_s = load_s(request, index, tokens), load_s(request, index, 1)
        worth = math.ceil(latency_s * _PAYS / one_s / request.least) if one_s else 1
        aim.group = max(1, worth) * request.least
    return aim.group


def in_time(state: State, aim: Aim, op: RestoreLoad) -> RestoreLoad | None:
    """Cut a load to the time that the other tiers need for the rest; None if nothing is left.

    A slow tier helps as long as no request waits for it.
    """
    progress = aim.progress
    request, load_s = progress.request, state.costs.load_s
    cells = op.layers.size * op.tokens.size
    took_s = load_s(request, op.source, cells)
    if not took_s or not aim.cell_s:
        return op
    fastest = min(load_s(request, index, cells) for index in aim.sources.values())
    left_s = aim.cell_s * sum(
        max(0, back - max(front, aim.goal, progress.lost))
        for front, back in zip(progress.front, progress.back, strict=True)
    )
    if took_s <= fastest:
        return op
    left_s = (left_s - suffix_left_s(state, progress)) * _SLOWLY
    if took_s <= left_s and op.layers.size == request.layers:
        return op
    first = op.tokens.stop - int(op.tokens.size * left_s / took_s)
    first = -(-first // request.unit) * request.unit
    if op.layers.size < request.layers or first >= op.tokens.stop:
        return None
    return op._replace(tokens=Span(first, op.tokens.stop))


def _block(state: State, aim: Aim, gap: int, sizes: ChunkSizes) -> int:
    """Return the tokens to load of all layers at once; 0 where loads go layer by layer.

    The first block is small: it measures the cost of the others.
    """
    request = aim.progress.request
    aim.cell_s = together_s(state, request, aim.sources)
    if not aim.cell_s:
        return min(gap, max(sizes.probe // 4, request.unit))
    if aim.suffix_s < 0:
        aim.suffix_s = suffix_left_s(state, aim.progress)
    tail = _TAIL * aim.suffix_s / (aim.cell_s * request.layers)
    if not state.untold.isdisjoint(aim.sources):
        tail = 0.0  # cells requested by layers can no longer be computed
    part = 0.0 if aim.progress.back[0] == request.tokens else (gap - tail) / _BLOCKS
    size = min(max(_LEAST * request.unit, part), gap - tail, sizes.block)
    return max(0, int(size // request.unit) * request.unit)


_LATE, _LONG = 2.0, 8.0
_STEPS = 3
_LITTLE, _BEARABLE = 1.01, 1.1


class TwoPointer(RestorePolicy):
    """Adaptive two-pointer policy with a layer-major tail behind which the suffix runs.

    Args:
        chunk: Most tokens of a layer that are computed at once.
        block: Most tokens that are loaded at once.
        probe: Tokens that are computed at once while costs are unknown.
        inputs_s: By number of request: seconds of the link for each computed token. For pipeline
            stages, which load the activations at their lower boundary; their first pass is short,
            and each later one may be four times as long, since later stages wait for it.
        aging: Weight of a second of waiting against a second of work when requests are ordered.
            No request is overtaken by one that came more than its size / aging later.

    Raises:
        ConfigError: A size is not positive.
    """

    name, at_once = "flowkv", True

    def __init__(
        self,
        *,
        chunk: int = 8192,
        block: int = 2048,
        probe: int = 512,
        inputs_s: Mapping[int, float] | None = None,
        aging: float = 0.25,
    ) -> None:
        if min(chunk, block, probe) < 1 or aging <= 0:
            raise ConfigError("sizes and aging must be positive", "Leave them at their defaults")
        self._sizes, self._aging = ChunkSizes(chunk, block, probe), aging
        self._inputs_s = dict(inputs_s or {})
        self._aims: dict[int, Aim] = {}

    def goal(self, number: int) -> int:
        """Return the token up to which a request is to be computed, at present; 0 if unknown."""
        return self._aims[number].goal if number in self._aims else 0

    def next_compute(
        self, state: State, among: Collection[int] | None = None
    ) -> Compute | Suffix | None:
        """Return a compute of the first request in order that has one."""
        before: list[Aim] = []
        for aim in self._ordered(state):
            progress = aim.progress
            request = progress.request
            if among is None or request.number in among:
                op: Compute | Suffix | None = self._suffix(progress) if progress.suffix else None
                op = op or self._front(state, aim, before) or self._suffix(progress)
                if op is not None:
                    if isinstance(op, Compute):
                        took_s = state.costs.compute_s(request, op.layers.size, op.tokens)
                        aim.busy_until_s = state.now_s + took_s
                    return op
                before.append(aim)
        return None

    def next_load(self, state: State, tier: str) -> RestoreLoad | None:
        """Return a load of the first request in order that has one on this tier."""
        before: list[Aim] = []
        for aim in self._ordered(state):
            if tier in aim.sources:
                if not aim.set or (aim.progress.fronted and aim.goal):
                    self._plan(state, aim, before)
                op = load_from_back(state, aim, tier, self._sizes)
                if op is None and self._lowered(state, aim, before):
                    op = load_from_back(state, aim, tier, self._sizes)
                if op is not None and len(aim.sources) > 1:
                    op = in_time(state, aim, op)
                if op is not None:
                    (low, high), (first, stop) = op.layers, op.tokens
                    took_s = (high - low) * (stop - first) * aim.cell_s
                    queued = state.link_cells.get(tier, 0) > 0
                    begins_s = max(state.now_s, aim.loads_until_s) if queued else state.now_s
                    if not queued:
                        aim.loads_from_s = begins_s
                    aim.loads_until_s = begins_s + took_s
                    return op
                before.append(aim)
        return None

    def forget(self, number: int) -> None:
        """Drop the aim of a request."""
        self._aims.pop(number, None)

    # ---- the order

    def _ordered(self, state: State) -> list[Aim]:
        aims = [self._aim(progress) for progress in state.requests.values()]
        if len(aims) < 2:
            return aims
        for aim in aims:
            if not aim.size_s:
                aim.measure(state)
        aims.sort(key=self._key)
        return aims

    def _aim(self, progress: Progress) -> Aim:
        number = progress.request.number
        aim = self._aims.get(number)
        if aim is None or aim.progress is not progress:
            aim = self._aims[number] = Aim(progress)
        return aim

    def _key(self, aim: Aim) -> tuple[float, int, int]:
        request = aim.progress.request
        waited = aim.size_s + self._aging * request.arrived_s
        return (waited, request.tokens - request.resident, request.number)

    # ---- the split

    def _plan(self, state: State, aim: Aim, before: list[Aim]) -> None:
        """Set the goal of a request."""
        aim.set = True
        goal = self._goal(state, aim, before)
        if goal != aim.goal:
            aim.goal, aim.stripe, aim.group = goal, 0, -1

    def _goal(self, state: State, aim: Aim, before: list[Aim]) -> int:
        progress = aim.progress
        request, costs = progress.request, state.costs
        if not request.computable or progress.fronted:
            return request.resident
        if not aim.sources:
            return request.tokens
        if not aim.size_s and len(request.sources) > len(aim.sources):
            aim.measure(state)  # there is a codec to choose
        layer = 0 if request.whole else first_behind(progress)
        first = progress.front[layer]
        cap = progress.front[layer - 1] if layer else request.tokens
        if request.whole:
            cap = min(progress.back)
        else:
            back = progress.back
            cap = min(cap, back[layer])
            if back[-1] != back[layer] or back.count(cap) < request.layers:
                cap = min(cap, *(token for token in back[layer:] if token > first))
        if cap <= first:
            return first
        aim.cell_s = cell_s = together_s(state, request, aim.sources)
        if not cell_s or not aim.known(costs):
            return aligned(request, first + self._sizes.probe, first, cap)
        unit_s = costs.compute_s(request, request.layers, Span(first, first + request.unit))
        if request.shared and unit_s > _LONG * cell_s * request.unit * request.layers:
            return max(first, min(progress.lost, cap))  # more would slow the loads for little
        busy_s = link_s = 0.0
        for other in before:
            more = other.left_s(state)
            shared = not aim.sources.keys().isdisjoint(other.sources)
            busy_s, link_s = busy_s + more[0], link_s + (more[1] if shared else 0.0)
        busy_s += max(0.0, aim.busy_until_s - state.now_s)
        free_s = aim.loads_until_s
        if before:
            free_s = max(free_s, *(other.loads_until_s for other in before))
        if free_s > state.now_s:
            flying = sum([state.link_cells.get(tier, 0) for tier in aim.sources])
            link_s += min(free_s - state.now_s, flying * cell_s)
        elif (late := aim.late(state)) > _LATE:  # the link is slower than expected
            cell_s *= late
        input_s = self._inputs_s.get(request.number, 0.0)
        aim.suffix_s = suffix_left_s(state, progress)
        prices = Prices(cell_s, aim.suffix_s, busy_s, link_s, input_s)
        hint = aim.goal if layer or progress.front[-1] > request.resident else 0
        goal = best_split(progress, layer, cap, costs, prices, hint).goal
        least = min(progress.back)
        if not layer or goal < cap or least <= cap:
            return goal
        # Another pass can follow: what it computes need not be loaded.
        busy_s += costs.compute_s(request, request.layers - layer, Span(first, cap))
        prices = prices._replace(compute_wait_s=busy_s)
        return best_split(progress, 0, least, costs, prices, hint, cap).goal

    def _lowered(self, state: State, aim: Aim, before: list[Aim]) -> bool:
        """Lower the goal when the link is idle; return whether it was lowered."""
        progress = aim.progress
        if not progress.request.computable or progress.fronted or progress.met:
            return False
        goal = aim.goal
        self._plan(state, aim, before)
        return aim.goal < goal

    # ---- next operations

    def _suffix(self, progress: Progress) -> Suffix | None:
        request, layer = progress.request, progress.suffix
        if not request.suffix or layer >= request.layers or progress.answered < layer:
            return None
        return Suffix(request.number, layer) if progress.there(layer) else None

    def _front(self, state: State, aim: Aim, before: list[Aim]) -> Compute | None:
        progress = aim.progress
        request, front, back = progress.request, progress.front, progress.back
        if not request.computable or progress.fronted:
            return None
        if front[0] >= back[0] and front[-1] == front[0]:
            return None
        layer = first_behind(progress)
        first = front[layer]
        if first >= back[layer]:
            return None
        self._plan(state, aim, before)
        goal = min(aim.goal, progress.computed[layer - 1]) if layer else aim.goal
        if goal <= first or progress.computed[layer] != first:
            return None
        if request.whole:
            goal = self._chunk(state, request, first, goal, not before)
            return Compute(request.number, Span(0, request.layers), Span(first, goal))
        if layer == 0:
            goal = self._pass(request, first, goal)
        # Steps get longer: the first one measures the cost of the others.
        most = layer + (1 if before else max(1, min(layer, request.layers // _STEPS)))
        last = layer + 1
        while last < min(most, request.layers) and front[last] == first and back[last] >= goal:
            last += 1
        if progress.computed[last - 1] != first:
            return None
        return Compute(request.number, Span(layer, last), Span(first, goal))

    def _pass(self, request: RestoreRequest, first: int, goal: int) -> int:
        """Return the end of a pass that begins at `first`: passes are equal, none above a chunk."""
        if request.number in self._inputs_s:
            most = max(self._sizes.probe // 2, 3 * (first - request.resident))
            goal = min(goal, aligned(request, first + most, first, goal))
        passes = -(-(goal - first) // self._sizes.chunk)
        return aligned(request, first + -(-(goal - first) // passes), first, goal)

    def _chunk(
        self, state: State, request: RestoreRequest, first: int, goal: int, calm: bool
    ) -> int:
        """Return the end of an unmodified model's compute: a short first part, then a longer one.

        The first part measures the cost; a part is cut only where a further chunk costs little, and
        parts stay short while other requests wait.
        """
        left = min(goal - first, self._sizes.chunk)
        if left <= self._sizes.probe:
            return goal
        if not calm:
            return aligned(request, first + self._sizes.probe, first, goal)
        fresh = first == request.resident
        size = max(self._sizes.probe, left // 4) if fresh else left * 3 // 4
        part = aligned(request, first + size, first, goal)
        compute_s, layers = state.costs.compute_s, request.layers
        at_once_s = compute_s(request, layers, Span(first, first + left))
        parts_s = compute_s(request, layers, Span(first, part))
        parts_s += compute_s(request, layers, Span(part, first + left))
        if parts_s < (_BEARABLE if fresh else _LITTLE) * at_once_s:
            return part
        return aligned(request, first + left, first, goal)


RESTORE_POLICIES: Mapping[str, Callable[..., RestorePolicy]] = MappingProxyType(
    {"flowkv": TwoPointer}
)
"""Restore policies by name. `bench.restore.baselines` has those that this one is compared with."""


def make_restore_policy(policy: str | RestorePolicy, **options: Any) -> RestorePolicy:
    """Make a restore policy by its name, or pass an object through.

    Args:
        policy: A name in `RESTORE_POLICIES`, or a `RestorePolicy`.
        **options: Arguments of the policy's class; none with an object.

    Raises:
        ConfigError: The name or an option is unknown, or the object is no restore policy.
    """
    return made(policy, RESTORE_POLICIES, RestorePolicy, "restore policy", options)  # type: ignore[type-abstract]
