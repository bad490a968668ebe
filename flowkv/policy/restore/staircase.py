"""Staircase: each block of layers computes as many leading chunks as balance both engines."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from flowkv.core.errors import ConfigError
from flowkv.policy.restore.in_order import InOrder
from flowkv.policy.restore.pointers import ahead, compute_layers, load_back
from flowkv.policy.restore.remaining import link_would
from flowkv.policy.restore.state import Costs, Progress, State
from flowkv.policy.restore.words import Compute, Load, Request, Span


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
        """See `RestorePolicy`."""
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

    def _load(self, state: State, progress: Progress, source: int) -> Load | None:
        stairs = self._planned(state, progress)
        floors = [0 if stairs is None else stairs.target(i) for i in range(progress.request.layers)]
        return self._load_above(progress, source, floors) or (
            self._load_above(progress, source, [0] * len(floors)) if stairs else None
        )

    def _load_above(self, progress: Progress, source: int, floors: list[int]) -> Load | None:
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

    def _blocks(self, request: Request) -> list[Span]:
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
