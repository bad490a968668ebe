"""What is decided about one request, and what that is decided from."""

from __future__ import annotations

from flowkv.policy.restore.split import Prices, Split, best_split, first_behind
from flowkv.policy.restore.state import Costs, Progress, State
from flowkv.policy.restore.words import Request, Span

_AS_GOOD = 1.01
_PART = 4


class Aim:
    """What is decided about a request.

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
        loads_until_s: When the load that was begun last should.
    """

    __slots__ = (
        *("busy_until_s", "cell_s", "goal", "group", "loads_until_s", "progress", "set", "size_s"),
        *("_known", "sources", "stripe", "suffix_s"),
    )

    def __init__(self, progress: Progress) -> None:
        self.progress, self.goal, self.size_s = progress, progress.request.resident, 0.0
        self.sources: dict[str, int] = {}
        for index, source in enumerate(progress.request.sources):
            self.sources.setdefault(source.tier, index)
        self.stripe, self.group, self.cell_s, self.suffix_s = 0, -1, 0.0, -1.0
        self.set = self._known = False
        self.busy_until_s = self.loads_until_s = 0.0

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


def aligned(request: Request, token: int, first: int, most: int) -> int:
    """The end of the page that `token` is in, a page behind `first` at least."""
    stop = -(-max(token, first + 1) // request.unit) * request.unit
    return min(stop, most)


def suffix_left_s(state: State, progress: Progress) -> float:
    """What is left of the suffix."""
    request = progress.request
    if not request.suffix:
        return 0.0
    return state.costs.suffix_s(request) * (1.0 - progress.answered / request.layers)


def together_s(state: State, request: Request, sources: dict[str, int]) -> float:
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
