"""What is left to do, if one engine did it all: how the last steps find out whose they are."""

from __future__ import annotations

from flowkv.policy.restore.state import Progress, State
from flowkv.policy.restore.words import Compute, Load, Span


def link_would(state: State, progress: Progress, step: Compute) -> bool:
    """Whether loads, left alone, would be through with everything before this compute ends.

    False where costs are not known, or the step is about tokens that cannot be loaded.
    """
    request = progress.request
    if not request.sources or progress.lost > step.tokens.first:
        return False
    takes_s = state.costs.compute_s(request, step.layers.size, step.tokens)
    return 0.0 < _to_load_s(state) < takes_s


def engine_would(state: State, progress: Progress, step: Load) -> bool:
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
        cells = progress.cells() + sum(_cells(op) for op in flying if isinstance(op, Load))
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


def _cells(op: Load) -> int:
    return op.layers.size * op.tokens.size
