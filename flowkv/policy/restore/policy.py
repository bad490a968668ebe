"""Restores: ops, how far they are, and the policy that says what comes next.

Whoever executes a restore (virtual clock, emulated devices, torch, the cache) tells it `begin`,
`end` and `fail`; policies only read it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import msgspec

from flowkv.core.errors import ConfigError, StateError
from flowkv.policy.base import made

# The words of a restore: what is asked for, and the three things that can be done about it.
#
# A prefix of N tokens over L layers is a rectangle of *cells* (layer, token). Each cell is
# computed or loaded, once. Causality gives both their direction: a layer's tokens are computed
# from the front, and only where the layer below computed them too; so loads come from the back.
# Per layer there are two pointers, and the layer is there when they have met. The suffix, which
# nobody has, is computed layer by layer once the prefix of its layer is there.


class Span(NamedTuple):
    """A half-open range: of layers, or of tokens."""

    first: int
    stop: int

    @property
    def size(self) -> int:
        """How many."""
        return self.stop - self.first


class Source(NamedTuple):
    """Somewhere all cells of a prefix can be loaded from.

    Attributes:
        tier: Its name; loads of one tier share a link.
        codec: How the pages lie there (`core.geometry.CODECS`).
        cell_bytes: Bytes of one token of one layer.
    """

    tier: str
    codec: str
    cell_bytes: float


class RestoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt whose prefix lies somewhere.

    Attributes:
        number: Names it; unique among those that are restored together.
        tokens: N, tokens of the prefix; the cells are those of `[resident, tokens)`.
        suffix: S, tokens behind it, which must be computed. 0 leaves the suffix out.
        layers: L.
        resident: Leading tokens that are there already.
        unit: Tokens of a page. Spans of tokens begin and end at multiples of it, or at `tokens`.
        sources: Where it can be loaded from, most precise first; empty if it can only be computed.
        computable: Whether cells can be computed at all; False where nobody drives the model.
        whole: Computes are over all layers (an unmodified model cannot be stopped halfway).
        least: Layers of a page that are worth asking for at once, however fast the link is.
        arrived_s: When it came.
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
    arrived_s: float = 0.0


class Compute(NamedTuple):
    """Compute these layers of these tokens.

    Attributes:
        request: Number of the request.
        layers: Which.
        tokens: Which; they begin where the layers' computed tokens end.
    """

    request: int
    layers: Span
    tokens: Span


class RestoreLoad(NamedTuple):
    """Load these layers of these tokens.

    Attributes:
        request: Number of the request.
        layers: Which.
        tokens: Which; they end where the layers' loaded tokens begin.
        source: Index into `RestoreRequest.sources`.
    """

    request: int
    layers: Span
    tokens: Span
    source: int = 0


class Suffix(NamedTuple):
    """Compute a layer of the suffix: all cells of the layer are there, and the layer below is done.

    Attributes:
        request: Number of the request.
        layer: Which.
    """

    request: int
    layer: int


Op = Compute | RestoreLoad | Suffix


class Costs(Protocol):
    """Expected durations, in seconds; 0.0 while one is not known."""

    def compute_s(self, request: RestoreRequest, layers: int, tokens: Span) -> float:
        """Computing so many layers of these tokens."""
        ...

    def suffix_s(self, request: RestoreRequest) -> float:
        """Computing all layers of the suffix."""
        ...

    def load_s(self, request: RestoreRequest, source: int, cells: int) -> float:
        """Loading so many cells (tokens times layers) at once."""
        ...


class Progress:
    """One request's cells.

    Attributes:
        request: Whose.
        front: Per layer: tokens that computes were begun for, from the first one on.
        back: Per layer: first token that loads were begun for.
        computed: Per layer: tokens that are computed (or were resident).
        missing: Per layer: tokens of loads that were begun and have not ended.
        suffix: Layers of the suffix that were begun.
        answered: Layers of the suffix that are done.
        flying: Ops that were begun and have not ended.
        lost: Tokens up to which nothing can be loaded, because a load of theirs failed.
        fronted: Its front has ended: of the prefix nothing is computed any more, and the suffix
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
        """Tokens of a layer that nothing was begun for."""
        return max(0, self.back[layer] - self.front[layer])

    def cells(self) -> int:
        """Cells that nothing was begun for."""
        return sum(map(self.gap, range(self.request.layers)))

    def there(self, layer: int) -> bool:
        """Whether all cells of a layer's prefix are there."""
        whole = self.front[layer] >= self.back[layer] and not self.missing[layer]
        return whole and self.computed[layer] >= self.back[layer]

    @property
    def met(self) -> bool:
        """Whether something was begun for every cell."""
        return all(f >= b for f, b in zip(self.front, self.back, strict=True))

    @property
    def restored(self) -> bool:
        """Whether the whole prefix is there."""
        return all(map(self.there, range(self.request.layers)))

    @property
    def done(self) -> bool:
        """Whether nothing is left to do."""
        suffix = self.request.layers if self.request.suffix else 0
        return self.answered >= suffix and self.restored


class State:
    """Restores that are under way, together.

    Args:
        costs: What things are expected to take.

    Attributes:
        now_s: The time, as whoever executes tells it.
        requests: By number, in order of arrival.
        link_cells: Cells of loads under way, by tier.
        untold: Tiers of which no load has ended yet: what costs say of them is hearsay.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs, self.now_s = costs, 0.0
        self.requests: dict[int, Progress] = {}
        self.link_cells: dict[str, int] = {}
        self.untold = set[str]()

    def add(self, request: RestoreRequest) -> Progress:
        """A request arrived."""
        if request.number in self.requests:
            raise StateError(f"request {request.number} is there already", "Number it otherwise")
        progress = self.requests[request.number] = Progress(request)
        return progress

    def remove(self, number: int) -> None:
        """A request is done, or was called off."""
        progress = self.requests.pop(number)
        for op in progress.flying:
            if isinstance(op, RestoreLoad):
                self._count(progress.request, op, -1)

    def fronted(self, number: int) -> None:
        """Nobody computes any more of a request's prefix."""
        self.requests[number].fronted = True

    def __iter__(self) -> Iterator[Progress]:
        return iter(self.requests.values())

    def among(self, numbers: Iterable[int] | None) -> Iterator[Progress]:
        """Those with these numbers; all of them if that is None."""
        if numbers is None:
            return iter(self)
        return (self.requests[number] for number in numbers if number in self.requests)

    # ---- what happens

    def begin(self, op: Op) -> None:
        """An op is begun; its cells are taken.

        Raises:
            StateError: It does not go on where the pointers are. The verifier says more.
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
        """An op is done: its cells are there."""
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
        """A load failed: all up to its last token must be computed, what came of it is dropped."""
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
            raise StateError(f"{op} does not go on where the pointers are", "Ask the policy again")


# What a restore policy is: two questions, answered from the state alone.


class RestorePolicy(ABC):
    """Says what each engine does next. Pure: no I/O, no clock of its own, deterministic.

    The same object drives a virtual clock, emulated devices, torch and the cache. Each asks when
    an engine of its is idle; what is answered is begun at once (`State.begin`), before anything
    else is asked. None says that the engine has nothing to do until something ends or arrives.
    """

    name = ""

    @abstractmethod
    def next_compute(
        self, state: State, among: Collection[int] | None = None
    ) -> Compute | Suffix | None:
        """What is computed next.

        Args:
            state: How far everything is.
            among: Numbers of the requests that this engine can compute; None for all.
        """

    @abstractmethod
    def next_load(self, state: State, tier: str) -> RestoreLoad | None:
        """What is loaded from a tier next."""

    def forget(self, number: int) -> None:  # noqa: B027 - most remember nothing
        """A request is done or was called off: what is remembered of it can go."""


# FlowKV's own policy: two pointers that meet where both engines end together.
#
# The front is computed layer by layer in one long pass, so that a layer's fixed costs are paid
# once, and the goal is set anew from layer to layer: a slow engine makes a staircase of it, a fast
# one adds a pass. Loads come from the back, all layers at once, while the split can still move; the
# last of them, as much as the suffix takes to compute, come layer by layer from the bottom, and the
# suffix runs behind them. Several requests are served shortest first; waiting makes a request
# shorter.
#
# Nothing here trusts the costs: they say how large the steps are and when to change the order of
# loads, but what was not begun is still anybody's.
#
# Where a request's pointers should meet: how far to compute so that both engines end together.

_TOGETHER = 0.01


class Prices(NamedTuple):
    """The durations that count for one request, in seconds.

    Attributes:
        cell_s: To load a cell, by all its tiers together; 0 while unknown.
        suffix_s: To compute what is left of the suffix.
        compute_wait_s: Until the compute engine is free for it.
        link_wait_s: Until the link is.
        input_s: Of the link, for each token that is computed from the lowest layer on.
    """

    cell_s: float
    suffix_s: float
    compute_wait_s: float = 0.0
    link_wait_s: float = 0.0
    input_s: float = 0.0


class Split(NamedTuple):
    """Compute up to `goal`, load the rest; all is there `finish_s` from now."""

    goal: int
    finish_s: float


def first_behind(progress: Progress) -> int:
    """The lowest layer of those that are computed least far and still have cells to take.

    Those are the cheapest cells, and their inputs are there: the layer below is further.
    """
    front, back = progress.front, progress.back
    layer = front.index(front[-1])
    while layer and front[layer] >= back[layer]:
        layer = front.index(front[layer - 1])
    return layer


def best_split(
    progress: Progress, layer: int, cap: int, costs: Costs, prices: Prices, hint: int = 0
) -> Split:
    """How far to compute from `layer` on upwards, so that the later engine ends soonest.

    Computing takes ever longer and loading ever less the further the goal, so that they cross once.
    The suffix runs behind the loads layer by layer: only its last layer waits for all of them.

    Args:
        progress: Of the request; layers below `layer` are computed as far as they will be.
        layer: The lowest layer that would be computed.
        cap: Token that the goal cannot exceed.
        costs: What computing takes.
        prices: What else counts.
        hint: The goal so far; it stays while both engines still end almost together.
    """
    request, back = progress.request, progress.back
    first = progress.front[layer]
    last = request.layers
    while last > layer + 1 and back[last - 1] <= first:
        last -= 1
    layers, unit = last - layer, request.unit
    cells = sum(back[layer:last])
    if layer:  # what the link still has to do below
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
    if computed_s <= loaded_s:
        return (
            Split(cap, computed_s) if max(computed_s, loaded_s) < nothing else Split(low, nothing)
        )
    # Regula falsi (Illinois) on whole pages, until two neighbours hold the crossing.
    high, over, under = cap, computed_s - loaded_s, both(low)
    short = under[0] - under[1]
    best = Split(low, nothing)
    if max(computed_s, loaded_s) < nothing:
        best = Split(cap, max(computed_s, loaded_s))
    side = 0
    while short < 0 and high - low > unit:
        guess = low + round((high - low) * short / (short - over))
        guess = guess // unit * unit
        guess = min(max(guess, low // unit * unit + unit), (high - 1) // unit * unit)
        computed_s, loaded_s = both(guess)
        if max(computed_s, loaded_s) < best.finish_s:
            best = Split(guess, max(computed_s, loaded_s))
        difference = computed_s - loaded_s
        if difference < 0:
            low, short = guess, difference
            over = over / 2 if side < 0 else over
            side = -1
        else:
            high, over = guess, difference
            short = short / 2 if side > 0 else short
            side = 1
    return best


# What is decided about one request, and what that is decided from.

_AS_GOOD = 1.01
_PART = 4


class Aim:
    """The decision about a request.

    Attributes:
        progress: Whose; another one under the same number is another request.
        goal: Token up to which layers that are not computed yet should be computed.
        sources: Index of the source to load from, by tier.
        size_s: What it takes alone; 0 while that is not known.
        stripe: No layer below it has anything left to load.
        group: Layers of a stripe at least; below 0 while that is open.
        cell_s: To load a cell, by all tiers together, as of the last plan.
        suffix_s: To compute what is left of the suffix, as of the last plan; below 0 before it.
        set: Whether there is a goal.
        busy_until_s: When the compute that was begun last should end.
        loads_from_s: When the link began with those under way.
        loads_until_s: When the load that was begun last should end.
    """

    def __init__(self, progress: Progress) -> None:
        self.progress, self.goal, self.size_s = progress, progress.request.resident, 0.0
        self.sources: dict[str, int] = {}
        for index, source in enumerate(progress.request.sources):
            self.sources.setdefault(source.tier, index)
        self.stripe, self.group, self.cell_s, self.suffix_s = 0, -1, 0.0, -1.0
        self.set = self._known = False
        self.busy_until_s = self.loads_from_s = self.loads_until_s = 0.0

    def late(self, state: State) -> float:
        """How much longer loads under way take than they should; 0.0 without any, or in time."""
        until_s, from_s = self.loads_until_s, self.loads_from_s
        flying = any(isinstance(op, RestoreLoad) for op in self.progress.flying)
        if not flying or state.now_s <= until_s or until_s <= from_s:
            return 0.0
        return (state.now_s - from_s) / (until_s - from_s)

    def known(self, costs: Costs) -> bool:
        """Whether it is known what computing takes."""
        if not self._known:
            request = self.progress.request
            self._known = costs.compute_s(request, 1, Span(0, request.unit)) > 0
        return self._known

    def measure(self, state: State) -> None:
        """Chooses how precisely to load, as far as that costs nothing, and sizes the request.

        Where costs are not known yet, that stays open.
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
            finish_s = suffix_s + costs.compute_s(
                request, request.layers, Span(request.resident, request.tokens)
            )
            self.size_s = finish_s
            return
        least = min(split.finish_s for split, _ in best)
        split, self.sources = next(one for one in best if one[0].finish_s <= _AS_GOOD * least)
        self.size_s = split.finish_s

    def left_s(self, state: State) -> tuple[float, float]:
        """Seconds of each engine that a request still needs."""
        progress = self.progress
        request = progress.request
        busy_s, cells = suffix_left_s(state, progress), 0
        layer = first_behind(progress)
        first = progress.front[layer]
        if self.goal > first:
            layers = request.layers - layer
            busy_s += state.costs.compute_s(request, layers, Span(first, self.goal))
        for front, back in zip(progress.front, progress.back, strict=True):
            cells += max(0, back - max(front, self.goal))
        return busy_s, cells * together_s(state, request, self.sources)


def aligned(request: RestoreRequest, token: int, first: int, most: int) -> int:
    """The end of the page that `token` is in, a page behind `first` at least."""
    stop = -(-max(token, first + 1) // request.unit) * request.unit
    return min(stop, most)


def suffix_left_s(state: State, progress: Progress) -> float:
    """What is left of the suffix."""
    request = progress.request
    if not request.suffix:
        return 0.0
    return state.costs.suffix_s(request) * (1.0 - progress.answered / request.layers)


def together_s(state: State, request: RestoreRequest, sources: dict[str, int]) -> float:
    """Seconds to load a cell by all tiers together; 0 while one is not known."""
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
    """Tokens that are taken at once.

    Attributes:
        chunk: Most that are computed.
        block: Most that are loaded of all layers.
        probe: What is computed while costs are not known.
    """

    chunk: int
    block: int
    probe: int


def load_from_back(state: State, aim: Aim, tier: str, sizes: ChunkSizes) -> RestoreLoad | None:
    """The next load of a request from a tier; None if the rest is to be computed."""
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
    lost, goal, layer = progress.lost, aim.goal, aim.stripe
    turn = first_behind(progress) if goal > front[-1] else 0
    while layer < layers:
        floor = max(front[layer], lost, goal if layer >= turn else 0)
        if back[layer] > floor:
            break
        layer += 1
    aim.stripe = layer
    if layer == layers:
        return None
    end, last, first = back[layer], layer + 1, front[layer]
    most = min(layers, layer + _stripes(state, aim, index, end - floor))
    while last < most and back[last] == end and front[last] == first and last != turn:
        last += 1
    start = max(floor, (end - sizes.block * layers) // request.unit * request.unit)
    return RestoreLoad(request.number, Span(layer, last), Span(start, end), index)


def _stripes(state: State, aim: Aim, index: int, tokens: int) -> int:
    """Layers that must be loaded at once for that not to be mostly latency."""
    if aim.group < 0:
        request, load_s = aim.progress.request, state.costs.load_s
        one_s, latency_s = load_s(request, index, tokens), load_s(request, index, 1)
        aim.group = max(request.least, math.ceil(latency_s * _PAYS / one_s) if one_s else 1)
    return aim.group


def in_time(state: State, aim: Aim, op: RestoreLoad) -> RestoreLoad | None:
    """Cut to what this tier can load while the others load the rest; None if that is nothing.

    A slow tier helps as long as nobody has to wait for it.
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
    """Tokens to load of all layers at once; 0 where the rest should come layer by layer.

    The first block is small: it tells what the others will take.
    """
    request = aim.progress.request
    aim.cell_s = together_s(state, request, aim.sources)
    if not aim.cell_s:
        return min(gap, max(sizes.probe // 4, request.unit))
    if aim.suffix_s < 0:
        aim.suffix_s = suffix_left_s(state, aim.progress)
    tail = _TAIL * aim.suffix_s / (aim.cell_s * request.layers)
    if not state.untold.isdisjoint(aim.sources):
        tail = 0.0  # what is asked for by layers cannot be computed any more
    part = 0.0 if aim.progress.back[0] == request.tokens else (gap - tail) / _BLOCKS
    size = min(max(_LEAST * request.unit, part), gap - tail, sizes.block)
    return max(0, int(size // request.unit) * request.unit)


_LATE = 2.0
_STEPS = 3
_LITTLE, _BEARABLE = 1.01, 1.1


class TwoPointer(RestorePolicy):
    """Adaptive two-pointer with a layer-major tail behind which the suffix runs.

    Args:
        chunk: Most tokens of a layer that are computed at once.
        block: Most tokens that are loaded at once.
        probe: Tokens that are computed at once while costs are not known.
        inputs_s: By number of request: seconds of the link for each token that is computed. For
            pipeline stages, which load the activations at their lower boundary; their first pass is
            short, and each later one may be four times as long, for they wait for them.
        aging: How much a second of waiting counts against a second of work when requests are
            ordered. Nobody is overtaken by one that came more than its size / aging later.

    Raises:
        ConfigError: Sizes that are not positive.
    """

    name = "flowkv"

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
            raise ConfigError("Sizes and aging must be positive", "Leave them at their defaults")
        self._sizes, self._aging = ChunkSizes(chunk, block, probe), aging
        self._inputs_s = dict(inputs_s or {})
        self._aims: dict[int, Aim] = {}

    def goal(self, number: int) -> int:
        """Token up to which a request is going to be computed, as things stand; 0 if unknown."""
        return self._aims[number].goal if number in self._aims else 0

    def next_compute(
        self, state: State, among: Collection[int] | None = None
    ) -> Compute | Suffix | None:
        """The first request in order that has something to compute."""
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
        """The first request in order that has something to load from there."""
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
        """A request is done."""
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
        """Sets the goal."""
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
            aim.measure(state)  # there is a precision to choose
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
        elif (late := aim.late(state)) > _LATE:  # the link is no faster than that shows
            cell_s *= late
        input_s = self._inputs_s.get(request.number, 0.0)
        aim.suffix_s = suffix_left_s(state, progress)
        prices = Prices(cell_s, aim.suffix_s, busy_s, link_s, input_s)
        hint = aim.goal if layer or progress.front[-1] > request.resident else 0
        return best_split(progress, layer, cap, costs, prices, hint).goal

    def _lowered(self, state: State, aim: Aim, before: list[Aim]) -> bool:
        """The link has nothing to do: whether less should be computed after all."""
        progress = aim.progress
        if not progress.request.computable or progress.fronted or progress.met:
            return False
        goal = aim.goal
        self._plan(state, aim, before)
        return aim.goal < goal

    # ---- what is next

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
        # Longer and longer steps: the first one tells what the others will take.
        most = layer + (1 if before else max(1, min(layer, request.layers // _STEPS)))
        last = layer + 1
        while last < min(most, request.layers) and front[last] == first and back[last] >= goal:
            last += 1
        if progress.computed[last - 1] != first:
            return None
        return Compute(request.number, Span(layer, last), Span(first, goal))

    def _pass(self, request: RestoreRequest, first: int, goal: int) -> int:
        """Where a pass that begins at `first` ends: equal ones, none longer than a chunk."""
        if request.number in self._inputs_s:
            most = max(self._sizes.probe // 2, 3 * (first - request.resident))
            goal = min(goal, aligned(request, first + most, first, goal))
        passes = -(-(goal - first) // self._sizes.chunk)
        return aligned(request, first + -(-(goal - first) // passes), first, goal)

    def _chunk(
        self, state: State, request: RestoreRequest, first: int, goal: int, calm: bool
    ) -> int:
        """Of an unmodified model: a first part that tells what the rest will take, then most of it.

        Where a further chunk costs little, that is; and little at a time while others wait.
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
"""By name. `bench.restore.baselines` has those that this one is compared with."""


def make_restore_policy(policy: str | RestorePolicy, **options: Any) -> RestorePolicy:
    """Makes a restore policy from its name, or passes an object through.

    Args:
        policy: A name in `RESTORE_POLICIES`, or a `RestorePolicy`.
        **options: Arguments of the policy's class; none with an object.

    Raises:
        ConfigError: The name or an option is unknown, or the object is no restore policy.
    """
    return made(policy, RESTORE_POLICIES, RestorePolicy, "restore policy", options)  # type: ignore[type-abstract]
