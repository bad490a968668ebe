"""Where a request's pointers should meet: how far to compute so that both engines end together."""

from __future__ import annotations

from typing import NamedTuple

from flowkv.policy.restore.state import Costs, Progress
from flowkv.policy.restore.words import Span

_TOGETHER = 0.01


class Prices(NamedTuple):
    """What counts for one request, in seconds.

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
