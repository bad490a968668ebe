"""One restore policy, executed on made-up engines whose ops take and lose what a story says."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from flowkv.policy.restore.base import RestorePolicy
from flowkv.policy.restore.cells import VerificationError, require
from flowkv.policy.restore.costs import Measured
from flowkv.policy.restore.state import Costs, Progress, State
from flowkv.policy.restore.verify import Caps, verify
from flowkv.policy.restore.words import Compute, Load, Op, Request, Suffix

Entry = tuple[Op, float, float, bool]
_MOST = 100_000  # ops of a story: a policy that needs more never ends


class World(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy meets.

    Attributes:
        requests: What is asked for.
        costs: What the policy is told that things take; None: what was measured so far.
        takes_s: What an op takes, the n-th that is begun.
        failing: Which loads fail, in the order in which they are begun.
        engines: Per compute engine, the numbers of requests that it can compute; None for all.
        windows: Per tier, loads that may be under way at once.
        called_off: Number of a request -> when it is called off.
    """

    requests: Sequence[Request]
    costs: Costs | None
    takes_s: Callable[[Op, int], float]
    failing: Collection[int] = ()
    engines: Sequence[Collection[int] | None] = (None,)
    windows: Mapping[str, int] = {}
    called_off: Mapping[int, float] = {}


class RestoreStory:
    """Executes a policy, and checks what it answers; `run` checks the timeline too.

    Args:
        make: Makes a fresh policy.
        world: What it meets.

    Attributes:
        timeline: Ops that were begun, with start, end and whether they went well.
        unfinished: Requests that were called off, or cannot be finished.
    """

    def __init__(self, make: Callable[[], RestorePolicy], world: World) -> None:
        self.world, self._measured = world, Measured()
        self.state = State(self._measured if world.costs is None else world.costs)
        self._policy, self._twin = make(), make()
        require(isinstance(self._policy, RestorePolicy), "a policy is a RestorePolicy")
        require(bool(self._policy.name), "its name must not be empty")
        self.timeline: list[Entry] = []
        self.unfinished: set[int] = set()
        self._flying: list[tuple[float, int, int]] = []  # end, index into timeline, engine
        self._busy = [False] * len(world.engines)
        self._link = dict.fromkeys(world.windows, 0)
        self._loads = 0
        self._ahead = sorted(world.requests, key=lambda r: (r.arrived_s, r.number))

    def run(self) -> None:
        """Executes everything.

        Raises:
            VerificationError: The policy broke a rule, or got stuck.
        """
        while True:
            self._arrive()
            self._ask_engines()
            self._ask_links()
            following = self._next_s()
            if following is None:
                break
            self.state.now_s = following
            while self._flying and self._flying[0][0] <= following:
                self._end(*heapq.heappop(self._flying)[1:])
            self._leave()
        stuck = list(self.state.requests)
        require(not stuck, f"stuck: nothing is done about requests {stuck}")
        caps = Caps(len(self.world.engines), self.world.windows)
        verify(self.world.requests, self.timeline, caps, unfinished=self.unfinished)

    # ---- time

    def _next_s(self) -> float | None:
        """When something happens next."""
        times = [self._flying[0][0]] if self._flying else []
        times += [self._ahead[0].arrived_s] if self._ahead else []
        now = self.state.now_s
        times += [
            max(now, self.world.called_off[number])
            for number in self.state.requests
            if number in self.world.called_off
        ]
        return min(times, default=None)

    def _arrive(self) -> None:
        while self._ahead and self._ahead[0].arrived_s <= self.state.now_s:
            self.state.add(self._ahead.pop(0))
        self._leave()

    def _leave(self) -> None:
        """Those leave that are done, called off, or cannot be done."""
        for number, progress in list(self.state.requests.items()):
            off = self.world.called_off.get(number)
            if self._hopeless(progress) or (off is not None and off <= self.state.now_s):
                self.unfinished.add(number)
            elif not progress.done:
                continue
            self.state.remove(number)
            self._policy.forget(number)
            self._twin.forget(number)

    @staticmethod
    def _hopeless(progress: Progress) -> bool:
        return not progress.request.computable and progress.lost > progress.request.resident

    # ---- questions

    def _ask_engines(self) -> None:
        for engine, among in enumerate(self.world.engines):
            if self._busy[engine]:
                continue
            op = self._ask(lambda p, a=among: p.next_compute(self.state, a))  # type: ignore[misc]
            if op is None:
                continue
            require(isinstance(op, Compute | Suffix), "a compute engine computes", op)
            require(op.request in self.state.requests, "a request that is not there", op)
            require(among is None or op.request in among, "a request of another engine", op)
            self._busy[engine] = True
            self._begin(op, True, engine)

    def _ask_links(self) -> None:
        for tier, window in self.world.windows.items():
            while self._link[tier] < window:
                op = self._ask(lambda p, t=tier: p.next_load(self.state, t))  # type: ignore[misc]
                if op is None:
                    break
                if not isinstance(op, Load):
                    raise VerificationError(f"a link loads: {op}")
                require(op.request in self.state.requests, "a request that is not there", op)
                sources = self.state.requests[op.request].request.sources
                require(0 <= op.source < len(sources), "source: there is no such one", op)
                require(sources[op.source].tier == tier, "a load from another tier", op)
                self._link[tier] += 1
                self._begin(op, self._loads not in self.world.failing, -1)
                self._loads += 1

    def _ask(self, question: Callable[[RestorePolicy], Op | None]) -> Op | None:
        before = self._snapshot()
        answer = question(self._policy)
        require(question(self._twin) == answer, "two of a kind answer differently", answer)
        require(self._snapshot() == before, "a question changes the state")
        return answer

    def _snapshot(self) -> list[object]:
        now: list[object] = [self.state.now_s, dict(self.state.link_cells)]
        for number, p in self.state.requests.items():
            now += [number, p.request, p.suffix, p.answered, p.lost]
            now += [list(x) for x in (p.front, p.back, p.computed, p.missing, p.flying)]
        return now

    # ---- what happens

    def _begin(self, op: Op, ok: bool, engine: int) -> None:
        require(len(self.timeline) < _MOST, "it never ends", op)
        self.state.begin(op)
        now = self.state.now_s
        end = now + self.world.takes_s(op, len(self.timeline))
        heapq.heappush(self._flying, (end, len(self.timeline), engine))
        self.timeline.append((op, now, end, ok))

    def _end(self, index: int, engine: int) -> None:
        op, start_s, end_s, ok = self.timeline[index]
        if engine >= 0:
            self._busy[engine] = False
        elif isinstance(op, Load):
            self._link[self._tier(op)] -= 1
        if op.request in self.state.requests:
            if ok:
                self.state.end(op)
                self._measure(op, end_s - start_s)
            else:
                self.state.fail(op)

    def _measure(self, op: Op, seconds: float) -> None:
        request = self.state.requests[op.request].request
        if isinstance(op, Compute):
            self._measured.computed(request, op.layers.size, op.tokens, seconds)
        elif isinstance(op, Load):
            cells = op.layers.size * op.tokens.size
            self._measured.loaded(request, op.source, cells, seconds)
        else:
            self._measured.suffixed(request, seconds * request.layers)

    def _tier(self, op: Load) -> str:
        asked = next(r for r in self.world.requests if r.number == op.request)
        return asked.sources[op.source].tier
