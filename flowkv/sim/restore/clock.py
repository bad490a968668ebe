"""A virtual clock: executes a restore policy against costs, deterministically."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from flowkv.core.errors import StateError
from flowkv.policy.restore.base import RestorePolicy
from flowkv.policy.restore.costs import Measured
from flowkv.policy.restore.state import Costs, Progress, State
from flowkv.policy.restore.words import Compute, Load, Op, Request, Suffix
from flowkv.sim.restore.run import Done, Run, summed

Among = Collection[int] | None


def run(
    requests: Sequence[Request],
    policy: RestorePolicy,
    costs: Costs,
    *,
    believed: Costs | None = None,
    engines: Sequence[Among] = (None,),
    depth: int = 1,
    fails: Callable[[Load], bool] | None = None,
) -> Run:
    """Restores requests as a policy says.

    Args:
        requests: What is asked for; each is known from `arrived_s` on.
        policy: Who decides.
        costs: What things really take.
        believed: What the policy is told that they take; a `Measured` is told what they took. The
            truth without.
        engines: Compute engines, each with the numbers of the requests that it can compute; None
            for all. Each tier has one link, which loads one after the other.
        depth: Loads that are begun at once on a link, to be served one after the other.
        fails: Whether a load comes to nothing.

    Raises:
        StateError: The policy does not go on although something is left, or breaks the rules.
    """
    return Clock(requests, policy, costs, believed or costs, engines, depth, fails).run()


class _Ending(NamedTuple):
    op: Op
    took_s: float
    ok: bool


class Clock:
    """See `run`; `inputs_s` can be extended."""

    def __init__(
        self,
        requests: Sequence[Request],
        policy: RestorePolicy,
        costs: Costs,
        believed: Costs,
        engines: Sequence[Among],
        depth: int,
        fails: Callable[[Load], bool] | None,
    ) -> None:
        self.policy, self.costs, self.believed = policy, costs, believed
        self.requests = list(requests)
        self.state = State(believed)
        self.engines, self.depth = list(engines), depth
        self.fails = fails
        self.tiers = sorted({source.tier for one in requests for source in one.sources})
        self.busy = [False] * len(self.engines)
        self.queued = dict.fromkeys(self.tiers, 0)
        self.free_s = dict.fromkeys(self.tiers, 0.0)
        self.timeline: list[Done] = []
        self.events: list[tuple[float, int, Request | _Ending, int]] = []
        self.count = 0

    def run(self) -> Run:
        """Until nothing is left."""
        for request in self.requests:
            self._at(request.arrived_s, request, 0)
        while self.events:
            now_s = self.state.now_s = self.events[0][0]
            while self.events and self.events[0][0] <= now_s:
                _, _, what, engine = heapq.heappop(self.events)
                if isinstance(what, Request):
                    self._drop_if_done(self.state.add(what))
                else:
                    self._ended(what, engine)
            self._ask()
        if self.state.requests:
            left = sorted(self.state.requests)
            raise StateError(f"Requests {left} were left unfinished", "See the policy's answers")
        return summed(self.requests, self.timeline)

    def _at(self, time_s: float, what: Request | _Ending, engine: int) -> None:
        self.count += 1
        heapq.heappush(self.events, (time_s, self.count, what, engine))

    def _ask(self) -> None:
        for engine, among in enumerate(self.engines):
            if not self.busy[engine]:
                op = self.policy.next_compute(self.state, among)
                if op is not None:
                    self.busy[engine] = True
                    self._begin(op, engine)
        for tier in self.tiers:
            while self.queued[tier] < self.depth:
                load = self.policy.next_load(self.state, tier)
                if load is None:
                    break
                self.queued[tier] += 1
                self._begin(load, -1)

    def _begin(self, op: Op, engine: int) -> None:
        self.state.begin(op)
        now_s = start_s = self.state.now_s
        request = self.state.requests[op.request].request
        ok = True
        if isinstance(op, Load):
            cells = op.layers.size * op.tokens.size
            took_s = self.costs.load_s(request, op.source, cells)
            tier = request.sources[op.source].tier
            start_s = max(now_s, self.free_s[tier])
            self.free_s[tier] = start_s + took_s
            ok = self.fails is None or not self.fails(op)
        elif isinstance(op, Compute):
            start_s = self.inputs_s(op)
            took_s = self.costs.compute_s(request, op.layers.size, op.tokens)
        else:
            took_s = self.costs.suffix_s(request) / request.layers
        self.timeline.append(Done(op, now_s, start_s + took_s, ok))
        self._at(start_s + took_s, _Ending(op, took_s, ok), engine)

    def inputs_s(self, op: Compute) -> float:
        """When what a compute needs is there: now, for it is only begun then."""
        return self.state.now_s

    def _ended(self, ending: _Ending, engine: int) -> None:
        op, took_s, ok = ending
        progress = self.state.requests[op.request]
        if isinstance(op, Load):
            self.queued[progress.request.sources[op.source].tier] -= 1
        else:
            self.busy[engine] = False
        (self.state.end if ok else self.state.fail)(op)
        if ok and isinstance(self.believed, Measured):
            self._tell(self.believed, progress.request, op, took_s)
        self._drop_if_done(progress)

    def _drop_if_done(self, progress: Progress) -> None:
        if progress.done and not progress.flying:
            self.state.remove(progress.request.number)
            self.policy.forget(progress.request.number)

    @staticmethod
    def _tell(measured: Measured, request: Request, op: Op, seconds: float) -> None:
        if isinstance(op, Compute):
            measured.computed(request, op.layers.size, op.tokens, seconds)
        elif isinstance(op, Suffix):
            measured.suffixed(request, seconds * request.layers)
        else:
            measured.loaded(request, op.source, op.layers.size * op.tokens.size, seconds)
