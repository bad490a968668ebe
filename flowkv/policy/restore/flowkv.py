"""FlowKV's own restore policy: two pointers that meet where both engines end together.

The front is computed layer by layer in one long pass, so that a layer's fixed costs are paid once,
and the goal is set anew from layer to layer: a slow engine makes a staircase of it, a fast one adds
a pass. Loads come from the back, all layers at once, while the split can still move; the last of
them, as much as the suffix takes to compute, come layer by layer from the bottom, and the suffix
runs behind them. Several requests are served shortest first; waiting makes a request shorter.

Nothing here trusts the costs: they say how large the steps are and when to change the order of
loads, but what was not begun is still anybody's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from flowkv.core.errors import ConfigError
from flowkv.policy.restore.aim import Aim, aligned, suffix_left_s, together_s
from flowkv.policy.restore.base import RestorePolicy
from flowkv.policy.restore.split import Prices, best_split, first_behind
from flowkv.policy.restore.state import Progress, State
from flowkv.policy.restore.tail import Sizes, in_time, load_from_back
from flowkv.policy.restore.words import Compute, Load, Request, Span, Suffix

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
        self._sizes, self._aging = Sizes(chunk, block, probe), aging
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

    def next_load(self, state: State, tier: str) -> Load | None:
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

    def _pass(self, request: Request, first: int, goal: int) -> int:
        """Where a pass that begins at `first` ends: equal ones, none longer than a chunk."""
        if request.number in self._inputs_s:
            most = max(self._sizes.probe // 2, 3 * (first - request.resident))
            goal = min(goal, aligned(request, first + most, first, goal))
        passes = -(-(goal - first) // self._sizes.chunk)
        return aligned(request, first + -(-(goal - first) // passes), first, goal)

    def _chunk(self, state: State, request: Request, first: int, goal: int, calm: bool) -> int:
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
