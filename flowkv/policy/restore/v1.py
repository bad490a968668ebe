"""The published two-pointer scheduler: over layers for short prefixes, over tokens for long."""

from __future__ import annotations

from flowkv.policy.restore.cake import Cake
from flowkv.policy.restore.in_order import InOrder
from flowkv.policy.restore.layers import LayerWise
from flowkv.policy.restore.pointers import ahead
from flowkv.policy.restore.state import Costs, Progress, State
from flowkv.policy.restore.words import Compute, Load, Request, Span


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
        """See `RestorePolicy`."""
        self._ways.pop(number, None)

    def _compute(self, state: State, progress: Progress) -> Compute | None:
        return self._way(state, progress)._compute(state, progress)

    def _load(self, state: State, progress: Progress, source: int) -> Load | None:
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


def over_tokens_s(costs: Costs, request: Request, chunk: int) -> float:
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


def over_layers_s(costs: Costs, request: Request) -> float:
    """What restoring over layers should take, without the suffix; 0 where nothing is known."""
    tokens = Span(request.resident, request.tokens)
    each_s = costs.compute_s(request, 1, tokens)
    return min(
        max(layers * each_s, _load_s(costs, request, (request.layers - layers) * tokens.size))
        for layers in range(request.layers + 1)
    )


def _load_s(costs: Costs, request: Request, cells: int) -> float:
    return costs.load_s(request, 0, cells) if request.sources and cells else 0.0


def _computed(progress: Progress) -> int:
    """Cells that computes were begun for."""
    return sum(progress.front) - progress.request.layers * progress.request.resident
