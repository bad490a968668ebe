"""The restore policies that FlowKV's own is compared with, by name.

| name | class | what it does |
|---|---|---|
| `recompute` | `Recompute` | computes everything |
| `load` | `LoadOnly` | loads everything, then computes the suffix |
| `load-layers` | `LoadLayers` | loads layer by layer, the suffix behind it |
| `cake` | `Cake` | computes chunks from the front, loads chunks from the back |
| `layers` | `LayerWise` | computes layers from the bottom, loads layers from the top |
| `two-pointer-v1` | `TwoPointerV1` | either of both; the longest request first on the link |
| `two-pointer-seed` | `TwoPointerSeed` | over tokens, whichever step saves most |
| `staircase` | `Staircase` | per block of layers, as many chunks as balance both engines |
| `flowkv` | `TwoPointer` | over tokens, the suffix behind the last loads, shortest first |
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from flowkv.core.errors import ConfigError
from flowkv.policy.base import made
from flowkv.policy.restore import (
    Compute,
    Costs,
    Progress,
    RestoreLoad,
    RestorePolicy,
    RestoreRequest,
    Span,
    State,
    Suffix,
)
from flowkv.policy.restore.policy import TwoPointer

# The next step of a pointer: from the front by computing, from the back by loading.


def ahead(request: RestoreRequest, first: int, chunk: int) -> int:
    """Where a chunk that begins at `first` ends: at the edge of a page, one page on at least."""
    stop = (first + chunk) // request.unit * request.unit
    return min(stop if stop > first else (first // request.unit + 1) * request.unit, request.tokens)


def behind(request: RestoreRequest, stop: int, chunk: int) -> int:
    """Where a chunk that ends at `stop` begins: at the edge of a page, one page back at least."""
    first = -((chunk - stop) // request.unit) * request.unit
    return max(first if first < stop else (stop - 1) // request.unit * request.unit, 0)


def source_on(request: RestoreRequest, tier: str) -> int | None:
    """The most precise source on a tier; None if there is none."""
    found = (i for i, source in enumerate(request.sources) if source.tier == tier)
    return next(found, None)


def compute_all(progress: Progress, chunk: int, limit: int | None = None) -> Compute | None:
    """The next chunk from the front, through all layers.

    Args:
        progress: Of the request.
        chunk: Tokens at most; a page at least.
        limit: Token to stop at; None for as far as nothing was begun.

    Returns:
        None if nothing is left there, or a compute is under way.
    """
    first, layers = progress.front[0], progress.request.layers
    level = [first] * layers
    stop = min(progress.back if limit is None else (limit, *progress.back))
    if first >= stop or not progress.request.computable:
        return None
    if progress.front != level or progress.computed != level:
        return None
    stop = min(stop, ahead(progress.request, first, chunk))
    return Compute(progress.request.number, Span(0, layers), Span(first, stop))


def compute_layers(progress: Progress, layers: Span, stop: int) -> Compute | None:
    """Layers that stand at the same token, on to `stop` or as far as dependencies let them.

    Args:
        progress: Of the request.
        layers: Which.
        stop: Token to stop at, if nothing else stops them before.

    Returns:
        None if they can do nothing now.
    """
    first, request = progress.front[layers.first], progress.request
    level = [first] * layers.size
    stop = min(stop, *progress.back[layers.first : layers.stop])
    if layers.first:  # the layer below must have computed these tokens: it hands them up
        stop = min(stop, progress.computed[layers.first - 1])
    if first >= stop or not request.computable:
        return None
    if progress.front[layers.first : layers.stop] != level:
        return None
    if progress.computed[layers.first : layers.stop] != level:
        return None
    return Compute(request.number, layers, Span(first, stop))


def load_back(
    progress: Progress, layers: Span, chunk: int, source: int, floor: int = 0
) -> RestoreLoad | None:
    """The next chunk from the back, of layers that stand at the same token.

    Args:
        progress: Of the request.
        layers: Which.
        chunk: Tokens at most; a page at least.
        source: Index into `RestoreRequest.sources`.
        floor: Token to stop at, if nothing else stops them before.

    Returns:
        None if nothing is left there that can be loaded.
    """
    stop, request = progress.back[layers.first], progress.request
    floor = max(floor, progress.lost, *progress.front[layers.first : layers.stop])
    if stop <= floor or progress.back[layers.first : layers.stop] != [stop] * layers.size:
        return None
    first = max(floor, behind(request, stop, chunk))
    return RestoreLoad(request.number, layers, Span(first, stop), source)


def load_all(progress: Progress, chunk: int, source: int) -> RestoreLoad | None:
    """The next chunk from the back, of all layers.

    Args:
        progress: Of the request.
        chunk: Tokens at most; a page at least.
        source: Index into `RestoreRequest.sources`.

    Returns:
        None if nothing is left there that can be loaded.
    """
    return load_back(progress, Span(0, progress.request.layers), chunk, source)


def compute_lowest(progress: Progress) -> Compute | None:
    """All tokens of the lowest layer that is not there, as far as dependencies let it."""
    tokens, layers = progress.request.tokens, range(progress.request.layers)
    steps = (compute_layers(progress, Span(layer, layer + 1), tokens) for layer in layers)
    return next((op for op in steps if op is not None), None)


def load_layer(progress: Progress, source: int, upwards: bool) -> RestoreLoad | None:
    """What is left of one layer.

    Args:
        progress: Of the request.
        source: Index into `RestoreRequest.sources`.
        upwards: The lowest layer that has something left; otherwise the highest.
    """
    tokens, layers = progress.request.tokens, range(progress.request.layers)
    steps = (
        load_back(progress, Span(layer, layer + 1), tokens, source)
        for layer in (layers if upwards else reversed(layers))
    )
    return next((op for op in steps if op is not None), None)


def suffix_layer(progress: Progress, early: bool) -> Suffix | None:
    """The next layer of the suffix, if it is due.

    Args:
        progress: Of the request.
        early: As soon as its layer is there; otherwise once the whole prefix is there.
    """
    request, layer = progress.request, progress.suffix
    if not request.suffix or layer >= request.layers or progress.answered < layer:
        return None
    due = progress.there(layer) if early else progress.restored
    return Suffix(request.number, layer) if due else None


def must_compute(progress: Progress) -> int:
    """Token up to which nothing can be loaded: nowhere to load from, or a load failed."""
    return progress.lost if progress.request.sources else progress.request.tokens


# What is left to do, if one engine did it all: how the last steps find out whose they are.


def link_would(state: State, progress: Progress, step: Compute) -> bool:
    """Whether loads, left alone, would be through with everything before this compute ends.

    False where costs are not known, or the step is about tokens that cannot be loaded.
    """
    request = progress.request
    if not request.sources or progress.lost > step.tokens.first:
        return False
    takes_s = state.costs.compute_s(request, step.layers.size, step.tokens)
    return 0.0 < _to_load_s(state) < takes_s


def engine_would(state: State, progress: Progress, step: RestoreLoad) -> bool:
    """Whether computes, left alone, would be through with everything before this load ends.

    False where costs are not known, or the request cannot be computed.
    """
    request = progress.request
    if not request.computable:
        return False
    takes_s = state.costs.load_s(request, step.source, step.layers.size * step.tokens.size)
    return 0.0 < _to_compute_s(state) < takes_s


def _to_load_s(state: State) -> float:
    """Loading what nothing was begun for, and what is on its way."""
    seconds = 0.0
    for progress in state:
        request, flying = progress.request, progress.flying
        cells = progress.cells() + sum(_cells(op) for op in flying if isinstance(op, RestoreLoad))
        if request.sources and cells:
            seconds += state.costs.load_s(request, 0, cells)
    return seconds


def _to_compute_s(state: State) -> float:
    """Computing what nothing was begun for, and what is being computed."""
    seconds = 0.0
    for progress in state:
        request = progress.request
        for op in progress.flying:
            if isinstance(op, Compute):
                seconds += state.costs.compute_s(request, op.layers.size, op.tokens)
        for span, layers in _gaps(progress).items():
            seconds += state.costs.compute_s(request, layers, span)
    return seconds


def _gaps(progress: Progress) -> dict[Span, int]:
    """Tokens that nothing was begun for, and in how many layers."""
    found: dict[Span, int] = {}
    for first, stop in zip(progress.front, progress.back, strict=True):
        if first < stop:
            found[Span(first, stop)] = found.get(Span(first, stop), 0) + 1
    return found


def _cells(op: RestoreLoad) -> int:
    return op.layers.size * op.tokens.size


# What the simple restore policies share: one request after the other, as they arrived.


class InOrder(RestorePolicy):
    """Each engine serves the first request that has something for it.

    Args:
        chunk: Tokens that are computed at once.
        io_chunk: Tokens that are loaded at once.

    Attributes:
        early: Whether a layer of the suffix waits for its own layer of the prefix only.

    Raises:
        ConfigError: A chunk is not positive.
    """

    early = False

    def __init__(self, chunk: int = 512, io_chunk: int = 128) -> None:
        if chunk < 1 or io_chunk < 1:
            raise ConfigError(
                f"chunks of {chunk} and {io_chunk} tokens", "Use one token or more for both"
            )
        self.chunk, self.io_chunk = chunk, io_chunk

    def next_compute(
        self, state: State, among: Collection[int] | None = None
    ) -> Compute | Suffix | None:
        mine = list(state.among(among))
        due = (suffix_layer(progress, self.early) for progress in mine)
        suffix = next((op for op in due if op is not None), None)
        if suffix is not None:  # short, and somebody's first token
            return suffix
        steps = (self._compute(state, progress) for progress in self._compute_order(state, mine))
        return next((op for op in steps if op is not None), None)

    def next_load(self, state: State, tier: str) -> RestoreLoad | None:
        for progress in self._load_order(state, list(state)):
            source = source_on(progress.request, tier)
            if source is not None:
                op = self._load(state, progress, source)
                if op is not None:
                    return op
        return None

    def _compute_order(self, state: State, requests: list[Progress]) -> list[Progress]:
        return requests

    def _load_order(self, state: State, requests: list[Progress]) -> list[Progress]:
        return requests

    @abstractmethod
    def _compute(self, state: State, progress: Progress) -> Compute | None: ...

    @abstractmethod
    def _load(self, state: State, progress: Progress, source: int) -> RestoreLoad | None: ...


# Cake: compute chunks from the front, load chunks from the back, until they meet.


class Cake(InOrder):
    """Two pointers over tokens, then the suffix. "Compute or Load KV cache" (arXiv 2410.03065)."""

    name = "cake"

    def _compute(self, state: State, progress: Progress) -> Compute | None:
        return compute_all(progress, self.chunk)

    def _load(self, state: State, progress: Progress, source: int) -> RestoreLoad | None:
        return load_all(progress, self.io_chunk, source)


# Layer-wise: compute layers from the bottom, load layers from the top, until they meet.


class LayerWise(InOrder):
    """Two pointers over layers, then the suffix, as HCache splits a model (arXiv 2410.05004).

    A model that computes all layers at once (`RestoreRequest.whole`) gets two pointers over tokens.
    A layer that the other engine would be through with before is left to it.
    """

    name = "layers"

    def _compute(self, state: State, progress: Progress) -> Compute | None:
        if progress.request.whole:
            return compute_all(progress, self.chunk)
        op = compute_lowest(progress)
        return None if op is not None and link_would(state, progress, op) else op

    def _load(self, state: State, progress: Progress, source: int) -> RestoreLoad | None:
        if progress.request.whole:
            return load_all(progress, self.io_chunk, source)
        op = load_layer(progress, source, upwards=False)
        if op is None or not engine_would(state, progress, op):
            return op
        rival = compute_lowest(progress)  # both must not leave it to each other
        return op if rival is not None and link_would(state, progress, rival) else None


# Load: nothing is computed that can be loaded.


class LoadOnly(InOrder):
    """Loads the prefix from the back, then computes the suffix, as HiCache and LMCache do.

    What cannot be loaded, because a load failed or there is no source, is computed.

    Args:
        chunk: Tokens that are computed at once, where that must be.
        io_chunk: Tokens that are loaded at once; nothing waits for a part of them.
    """

    name = "load"

    def __init__(self, chunk: int = 512, io_chunk: int = 2048) -> None:
        super().__init__(chunk, io_chunk)

    def _compute(self, state: State, progress: Progress) -> Compute | None:
        return compute_all(progress, self.chunk, must_compute(progress))

    def _load(self, state: State, progress: Progress, source: int) -> RestoreLoad | None:
        return load_all(progress, self.io_chunk, source)


# Load layer by layer: the suffix runs behind the loads.


class LoadLayers(LoadOnly):
    """Loads whole layers, the lowest first; a layer of the suffix waits for its own layer only."""

    name = "load-layers"
    early = True

    def _load(self, state: State, progress: Progress, source: int) -> RestoreLoad | None:
        return load_layer(progress, source, upwards=True)


# Recompute: nothing is loaded that can be computed.


class Recompute(InOrder):
    """Computes the prefix in chunks, then the suffix, as an engine without a store does.

    Args:
        chunk: Tokens that are computed at once.
        io_chunk: Tokens that are loaded at once, of requests that cannot be computed.
    """

    name = "recompute"

    def __init__(self, chunk: int = 2048, io_chunk: int = 128) -> None:
        super().__init__(chunk, io_chunk)

    def _compute(self, state: State, progress: Progress) -> Compute | None:
        return compute_all(progress, self.chunk)

    def _load(self, state: State, progress: Progress, source: int) -> RestoreLoad | None:
        if progress.request.computable:
            return None
        return load_all(progress, self.io_chunk, source)


# The two-pointer scheduler as first described: whichever step saves most work comes next.


class TwoPointerSeed(InOrder):
    """Two pointers over tokens, each step chosen over the batch by its marginal benefit.

    A load is worth the compute that it saves, per second on the link: attention makes the last
    tokens of the longest request the most expensive ones. A compute is worth the load that it
    saves, per second: the first tokens are the cheapest. A step that the other pointer would have
    made before it ends is left to it. While costs are not known, a token's index stands for them.
    """

    name = "two-pointer-seed"

    def _compute(self, state: State, progress: Progress) -> Compute | None:
        op = compute_all(progress, self.chunk)
        return None if op is not None and link_would(state, progress, op) else op

    def _load(self, state: State, progress: Progress, source: int) -> RestoreLoad | None:
        return load_all(progress, self.io_chunk, source)

    def _compute_order(self, state: State, requests: list[Progress]) -> list[Progress]:
        return sorted(requests, key=lambda progress: self._price(state, progress))

    def _load_order(self, state: State, requests: list[Progress]) -> list[Progress]:
        return sorted(requests, key=lambda progress: self._saved(state, progress), reverse=True)

    def _price(self, state: State, progress: Progress) -> tuple[float, int]:
        """Compute seconds for each load second that the next chunk from the front saves."""
        first, request = progress.front[0], progress.request
        tokens = Span(first, ahead(request, first, self.chunk))
        return _worth(state, progress, tokens), first

    def _saved(self, state: State, progress: Progress) -> tuple[float, int]:
        """Compute seconds that the next chunk from the back saves, for each second it takes."""
        stop, request = max(progress.back), progress.request
        tokens = Span(behind(request, stop, self.io_chunk), stop)
        return _worth(state, progress, tokens), stop


def _worth(state: State, progress: Progress, tokens: Span) -> float:
    """Compute seconds over load seconds of some tokens; 0 where one of both is not known."""
    request = progress.request
    if not request.sources or tokens.size <= 0:
        return 0.0
    load_s = state.costs.load_s(request, 0, request.layers * tokens.size)
    compute_s = state.costs.compute_s(request, request.layers, tokens)
    return compute_s / load_s if load_s else 0.0


# Staircase: each block of layers computes as many leading chunks as balance both engines.


class Stairs(NamedTuple):
    """Where a request's computes end: two steps, one chunk apart.

    Attributes:
        layers: How many layers, from the bottom, stand on the high step.
        high: Tokens that those compute.
        low: Tokens that the others compute.
    """

    layers: int
    high: int
    low: int

    def target(self, layer: int) -> int:
        """Tokens that a layer computes."""
        return self.high if layer < self.layers else self.low


class Staircase(InOrder):
    """A staircase of computed chunks over layer blocks (arXiv 2604.25080, second version).

    Its dynamic programme chooses, per request and block, how many leading chunks are computed, no
    more than in the block below, such that computing and loading end together. All layers cost the
    same and later chunks cost more, so that its optimum has two steps one chunk apart, the same for
    all requests as far as they reach; those are found by bisection. Planned anew whenever requests
    come; what was planned wrong is made good at the end, where the pointers meet. The suffix comes
    when the prefix is there. While costs are not known, both engines just go on.

    Args:
        chunk: Tokens of a step.
        io_chunk: Tokens that are loaded at once.
        block: Layers that are computed at once.

    Raises:
        ConfigError: A chunk or a block is not positive.
    """

    name = "staircase"

    def __init__(self, chunk: int = 512, io_chunk: int = 128, block: int = 1) -> None:
        super().__init__(chunk, io_chunk)
        if block < 1:
            raise ConfigError(f"blocks of {block} layers", "Use one layer or more")
        self.block = block
        self._stairs: dict[int, Stairs] = {}

    def forget(self, number: int) -> None:
        self._stairs.pop(number, None)

    def _compute(self, state: State, progress: Progress) -> Compute | None:
        stairs = self._planned(state, progress)
        blocks = self._blocks(progress.request)
        if stairs is not None:
            for block in blocks:
                op = compute_layers(progress, block, max(stairs.target(block.first), progress.lost))
                if op is not None:
                    return op
        for block in sorted(blocks, key=lambda b: progress.front[b.first]):
            stop = ahead(progress.request, progress.front[block.first], self.chunk)
            op = compute_layers(progress, block, stop)
            if op is not None:  # beyond the plan: only if it helps
                return None if link_would(state, progress, op) else op
        return None

    def _load(self, state: State, progress: Progress, source: int) -> RestoreLoad | None:
        stairs = self._planned(state, progress)
        floors = [0 if stairs is None else stairs.target(i) for i in range(progress.request.layers)]
        return self._load_above(progress, source, floors) or (
            self._load_above(progress, source, [0] * len(floors)) if stairs else None
        )

    def _load_above(self, progress: Progress, source: int, floors: list[int]) -> RestoreLoad | None:
        """The next chunk from the back, of the lowest layers that stand furthest back."""
        back, front = progress.back, progress.front
        least = [max(x, f, progress.lost) for x, f in zip(floors, front, strict=True)]
        stop = max((b for b, x in zip(back, least, strict=True) if b > x), default=0)
        if not stop:
            return None
        left = [b == stop > x for b, x in zip(back, least, strict=True)]
        first = left.index(True)
        last = first
        while last < len(back) and left[last]:
            last += 1
        floor = max(floors[first:last])
        return load_back(progress, Span(first, last), self.io_chunk, source, floor)

    def _blocks(self, request: RestoreRequest) -> list[Span]:
        size = request.layers if request.whole else self.block
        edges = [*range(0, request.layers, size), request.layers]
        return [Span(a, b) for a, b in itertools.pairwise(edges)]

    def _planned(self, state: State, progress: Progress) -> Stairs | None:
        number = progress.request.number
        if number not in self._stairs:
            self._plan(state)
        return self._stairs.get(number)

    def _plan(self, state: State) -> None:
        """For all that can be computed and loaded."""
        both = [p for p in state if p.request.computable and p.request.sources]
        plans = [_Plan(p, state.costs, self.chunk) for p in both]
        if not plans or not all(plan.known for plan in plans):
            return
        least, most = 0, max(plan.levels for plan in plans)
        while least < most:
            level = (least + most) // 2
            if sum(p.compute_s(level) for p in plans) < sum(p.load_s(level) for p in plans):
                least = level + 1
            else:
                most = level
        for plan in plans:
            request = plan.progress.request
            stops = [0, *(block.stop for block in self._blocks(request))]
            share = _share(plans, least, len(stops) - 1)
            layers = stops[round(share * (len(stops) - 1))]
            steps = Stairs(layers, plan.stop(least), plan.stop(least - 1))
            self._stairs[request.number] = steps


class _Plan:
    """One request's part: what it takes to compute so many leading chunks of each layer."""

    def __init__(self, progress: Progress, costs: Costs, chunk: int) -> None:
        self.progress, self.costs, self.chunk = progress, costs, chunk
        self.first, self.last = min(progress.front), max(progress.back)
        request = progress.request
        page = Span(max(0, request.tokens - request.unit), request.tokens)
        known = costs.compute_s(request, 1, page) * costs.load_s(request, 0, page.size)
        self.known = known > 0.0
        self.levels = -(-request.tokens // chunk)

    def stop(self, level: int) -> int:
        """Where so many chunks end."""
        request = self.progress.request
        pages = max(0, level) * self.chunk // request.unit
        return min(pages * request.unit, request.tokens)

    def compute_s(self, level: int) -> float:
        """Computing them, of all layers."""
        request = self.progress.request
        stop = min(self.stop(level), self.last)
        if stop <= self.first:
            return 0.0
        return self.costs.compute_s(request, request.layers, Span(self.first, stop))

    def load_s(self, level: int) -> float:
        """Loading the rest."""
        request = self.progress.request
        tokens = self.last - max(self.stop(level), self.first)
        return self.costs.load_s(request, 0, request.layers * tokens) if tokens > 0 else 0.0


def _share(plans: list[_Plan], level: int, blocks: int) -> float:
    """Which share of the blocks computes `level` chunks while the others compute one less."""
    high = sum(p.compute_s(level) for p in plans), sum(p.load_s(level) for p in plans)
    low = sum(p.compute_s(level - 1) for p in plans), sum(p.load_s(level - 1) for p in plans)

    def takes_s(share: float) -> float:
        return max(h * share + x * (1 - share) for h, x in zip(high, low, strict=True))

    return min((n / blocks for n in range(blocks + 1)), key=takes_s)


# The published two-pointer scheduler: over layers for short prefixes, over tokens for long.


class TwoPointerV1(InOrder):
    """The two pointers of CacheFlow (arXiv 2604.25080, first version, Algorithm 1).

    The link goes to the request with most left to do; computes advance all requests alike, one
    chunk or layer each. Requests below a threshold are restored over layers, others over tokens.
    The suffix comes when the prefix is there.

    Args:
        chunk: Tokens that are computed at once, over tokens.
        io_chunk: Tokens that are loaded at once, over tokens.
        threshold_tokens: From how many tokens on requests are restored over tokens; profiled for
            the box. None: whichever of both should be faster, by what is known of the costs when
            the request is first seen.
    """

    name = "two-pointer-v1"

    def __init__(
        self, chunk: int = 512, io_chunk: int = 128, threshold_tokens: int | None = None
    ) -> None:
        super().__init__(chunk, io_chunk)
        self.threshold_tokens = threshold_tokens
        self._layers, self._tokens = LayerWise(chunk, io_chunk), Cake(chunk, io_chunk)
        self._ways: dict[int, InOrder] = {}

    def forget(self, number: int) -> None:
        self._ways.pop(number, None)

    def _compute(self, state: State, progress: Progress) -> Compute | None:
        return self._way(state, progress)._compute(state, progress)

    def _load(self, state: State, progress: Progress, source: int) -> RestoreLoad | None:
        return self._way(state, progress)._load(state, progress, source)

    def _compute_order(self, state: State, requests: list[Progress]) -> list[Progress]:
        return sorted(requests, key=_computed)

    def _load_order(self, state: State, requests: list[Progress]) -> list[Progress]:
        return sorted(requests, key=Progress.cells, reverse=True)

    def _way(self, state: State, progress: Progress) -> InOrder:
        request = progress.request
        if self.threshold_tokens is not None:
            return self._layers if request.tokens < self.threshold_tokens else self._tokens
        way = self._ways.get(request.number)
        if way is None:
            tokens_s = over_tokens_s(state.costs, request, self.chunk)
            short = over_layers_s(state.costs, request) < tokens_s
            way = self._ways[request.number] = self._layers if short else self._tokens
        return way


def over_tokens_s(costs: Costs, request: RestoreRequest, chunk: int) -> float:
    """What restoring over tokens should take, without the suffix; 0 where nothing is known."""
    first, busy_s = request.resident, 0.0
    each_s = _load_s(costs, request, request.layers * (request.tokens - first))
    each_s /= max(1, request.tokens - first)
    while True:
        loaded = int(busy_s / each_s) if each_s else 0
        back = max(first, request.tokens - loaded)
        stop = min(back, ahead(request, first, chunk))
        if stop > first:
            busy_s += costs.compute_s(request, request.layers, Span(first, stop))
        if stop >= back:  # the last chunk takes all that is left when it begins
            return busy_s
        first = stop


def over_layers_s(costs: Costs, request: RestoreRequest) -> float:
    """What restoring over layers should take, without the suffix; 0 where nothing is known."""
    tokens = Span(request.resident, request.tokens)
    each_s = costs.compute_s(request, 1, tokens)
    return min(
        max(layers * each_s, _load_s(costs, request, (request.layers - layers) * tokens.size))
        for layers in range(request.layers + 1)
    )


def _load_s(costs: Costs, request: RestoreRequest, cells: int) -> float:
    return costs.load_s(request, 0, cells) if request.sources and cells else 0.0


def _computed(progress: Progress) -> int:
    """Cells that computes were begun for."""
    return sum(progress.front) - progress.request.layers * progress.request.resident


RESTORE_POLICIES: Mapping[str, Callable[..., RestorePolicy]] = MappingProxyType(
    {
        "recompute": Recompute,
        "load": LoadOnly,
        "load-layers": LoadLayers,
        "cake": Cake,
        "layers": LayerWise,
        "two-pointer-v1": TwoPointerV1,
        "two-pointer-seed": TwoPointerSeed,
        "staircase": Staircase,
        "flowkv": TwoPointer,
    }
)


def make_restore_policy(policy: str | RestorePolicy, **options: Any) -> RestorePolicy:
    """As `flowkv.policy.restore.make_restore_policy`, with the names of all of these."""
    return made(policy, RESTORE_POLICIES, RestorePolicy, "restore policy", options)  # type: ignore[type-abstract]
