"""The two-pointer scheduler as first described: whichever step saves most work comes next."""

from __future__ import annotations

from flowkv.policy.restore.in_order import InOrder
from flowkv.policy.restore.pointers import ahead, behind, compute_all, load_all
from flowkv.policy.restore.remaining import link_would
from flowkv.policy.restore.state import Progress, State
from flowkv.policy.restore.words import Compute, Load, Span


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

    def _load(self, state: State, progress: Progress, source: int) -> Load | None:
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
