"""`check_restore_policy`: what every `RestorePolicy` must do, told as stories by Hypothesis."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from flowkv.policy.restore.costs import Measured
from flowkv.policy.restore.policy import (
    Compute,
    Costs,
    Op,
    Progress,
    RestoreLoad,
    RestorePolicy,
    RestoreRequest,
    Source,
    Span,
    State,
    Suffix,
)
from flowkv.sim.restore import learn
from flowkv.testing.stories import VerificationError, given, require, st, tell, told

# One restore policy, executed on made-up engines whose ops take and lose what a story says.

Entry = tuple[Op, float, float, bool]
_MOST = 100_000  # ops of a story: a policy that needs more never ends


class RestoreWorld(msgspec.Struct, frozen=True, kw_only=True):
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

    requests: Sequence[RestoreRequest]
    costs: Costs | None
    takes_s: Callable[[Op, int], float]
    failing: Collection[int] = ()
    engines: Sequence[Collection[int] | None] = (None,)
    windows: Mapping[str, int] = {}
    called_off: Mapping[int, float] = {}


class RestoreStory:
    """Executes a policy, and checks what it answers.

    Args:
        make: Makes a fresh policy.
        world: What it meets.

    Attributes:
        timeline: Ops that were begun, with start, end and whether they went well.
        unfinished: Requests that were called off, or cannot be finished.
    """

    def __init__(self, make: Callable[[], RestorePolicy], world: RestoreWorld) -> None:
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
                if not isinstance(op, RestoreLoad):
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
        _allowed(op, self.state.requests[op.request])
        self.state.begin(op)  # which sees to it that pointers go on where they are
        now = self.state.now_s
        end = now + self.world.takes_s(op, len(self.timeline))
        heapq.heappush(self._flying, (end, len(self.timeline), engine))
        self.timeline.append((op, now, end, ok))

    def _end(self, index: int, engine: int) -> None:
        op, start_s, end_s, ok = self.timeline[index]
        if engine >= 0:
            self._busy[engine] = False
        elif isinstance(op, RestoreLoad):
            self._link[self._tier(op)] -= 1
        if op.request in self.state.requests:
            if ok:
                self.state.end(op)
                request = self.state.requests[op.request].request
                learn(self._measured, request, op, end_s - start_s)
            else:
                self.state.fail(op)

    def _tier(self, op: RestoreLoad) -> str:
        asked = next(r for r in self.world.requests if r.number == op.request)
        return asked.sources[op.source].tier


def _allowed(op: Op, progress: Progress) -> None:
    """Checks what `State.begin` takes on trust.

    Raises:
        VerificationError: The op may not be begun now.
    """
    request = progress.request
    if isinstance(op, Suffix):
        require(request.suffix > 0 and op.layer < request.layers, "suffix: there is none", op)
        require(progress.answered == op.layer, "suffix: the layer below is not done", op)
        return
    (low, high), (first, stop) = op.layers, op.tokens
    require(0 <= low < high <= request.layers, "span: layers are not the model's", op)
    require(request.resident <= first < stop <= request.tokens, "span: not the prefix's", op)
    for edge in (first, stop):
        aligned = edge % request.unit == 0 or edge in (request.resident, request.tokens)
        require(aligned, "span: tokens do not begin and end with pages", op)
    if isinstance(op, Compute):
        require(request.computable, "compute: the request cannot be computed", op)
        all_layers = op.layers == Span(0, request.layers)
        require(all_layers or not request.whole, "whole: a compute leaves layers out", op)
        before = min(progress.computed[low:high])
        require(before >= first, "causal: tokens before are not computed", op)
        below = progress.computed[low - 1] if low else stop
        require(below >= stop, "layers: the layer below is not computed", op)


_TIERS = ("host", "disk")
_UNKNOWN = 0.0
_INSTANT_S = 1e-9  # an op that ended when it began would leave open what came first


class MadeUpCosts(msgspec.Struct, frozen=True):
    """What things take, or are thought to take. Implements `Costs`.

    Attributes:
        token_s: Computing a token of a layer.
        pair_s: Attention of a token of a layer to another.
        start_s: Starting a layer's compute.
        cell_s: Loading a cell; the second source takes half.
    """

    token_s: float
    pair_s: float
    start_s: float
    cell_s: float

    def compute_s(self, request: RestoreRequest, layers: int, tokens: Span) -> float:
        """Computing so many layers of these tokens."""
        pairs = tokens.size * (tokens.first + tokens.stop + 1) / 2
        fixed = self.start_s if self.token_s else 0.0
        return layers * (fixed + self.token_s * tokens.size + self.pair_s * pairs)

    def suffix_s(self, request: RestoreRequest) -> float:
        """Computing all layers of the suffix."""
        behind = Span(request.tokens, request.tokens + request.suffix)
        return self.compute_s(request, request.layers, behind)

    def load_s(self, request: RestoreRequest, source: int, cells: int) -> float:
        """Loading so many cells (tokens times layers) at once."""
        return self.cell_s * cells / (1 + source)

    def op_s(self, request: RestoreRequest, op: Op) -> float:
        """What an op takes."""
        if isinstance(op, Compute):
            return self.compute_s(request, op.layers.size, op.tokens)
        if isinstance(op, RestoreLoad):
            return self.load_s(request, op.source, op.layers.size * op.tokens.size)
        return self.suffix_s(request) / request.layers


@st.composite
def _requests(draw: st.DrawFn, number: int) -> RestoreRequest:
    """A prompt of some pages, here and there."""
    unit, layers = draw(st.sampled_from([1, 16, 64, 256])), draw(st.integers(1, 6))
    pages, resident = draw(st.integers(1, 40)), draw(st.integers(0, 3))
    tokens = max(1, pages * unit - draw(st.sampled_from([0, 0, unit // 2])))
    found = draw(st.lists(st.sampled_from(_TIERS), max_size=2))
    kinds = (("raw", 8.0), ("kv8", 4.0))
    return RestoreRequest(
        number=number,
        tokens=tokens,
        suffix=draw(st.sampled_from([0, 1, 64, 512])),
        layers=layers,
        resident=min(resident * unit, tokens),
        unit=unit,
        sources=tuple(Source(tier, *kind) for tier, kind in zip(found, kinds, strict=False)),
        computable=not found or draw(st.sampled_from([True, True, True, False])),
        whole=draw(st.booleans()),
        arrived_s=draw(st.sampled_from([0.0, 0.0, 0.01, 0.5])),
    )


_rates = st.sampled_from([1e-7, 1e-6, 1e-5, 1e-4])
_beliefs = st.sampled_from([_UNKNOWN, 0.01, 1.0, 1.0, 1.0, 100.0])
_noises = st.lists(st.sampled_from([0.0, 0.3, 1.0, 1.0, 4.0]), min_size=1, max_size=7)


@st.composite
def worlds(draw: st.DrawFn, most: int = 4) -> RestoreWorld:
    """Requests, what they really take, what the policy is told, and what goes wrong.

    Args:
        draw: Given by Hypothesis.
        most: Requests at most.
    """
    requests = [draw(_requests(number)) for number in range(draw(st.integers(1, most)))]
    token_s, cell_s = draw(_rates), draw(_rates)
    pair_s, start_s = draw(st.sampled_from([0.0, token_s / 1000])), draw(st.sampled_from([0, 1e-5]))
    true = MadeUpCosts(token_s, pair_s, start_s, cell_s)
    doubt = draw(_beliefs)
    known = MadeUpCosts(token_s * doubt, pair_s * doubt, start_s, cell_s * draw(_beliefs))
    noise = draw(_noises)

    def takes_s(op: Op, nth: int) -> float:
        return max(_INSTANT_S, true.op_s(requests[op.request], op) * noise[nth % len(noise)])

    numbers = range(len(requests))
    engines = draw(st.sampled_from([(None,), (numbers[::2], numbers[1::2]), (None, None)]))
    return RestoreWorld(
        requests=requests,
        costs=draw(st.sampled_from([known, None])),
        takes_s=takes_s,
        failing=draw(st.sets(st.integers(0, 30), max_size=3)),
        engines=engines,
        windows={tier: draw(st.integers(1, 3)) for tier in _TIERS},
        called_off={0: 0.02} if draw(st.integers(0, 7)) == 0 else {},
    )


def check_restore_policy(
    make: Callable[[], RestorePolicy], *, max_examples: int = 150, shrink: bool = True
) -> None:
    """Runs the conformance suite on a restore policy; returns if it found no fault. Deterministic.

    Stories have up to four requests, some of an unmodified model, some that cannot be computed or
    loaded, with pages that are resident; costs that are right, wrong, unknown or measured; one or
    two engines; ops that take longer than expected, or no time; loads that fail; requests that come
    late or are called off. Checked: questions do not change the state, and a second object that is
    asked the same answers alike; answers are for the engine that asks; no request is forgotten;
    each cell comes once, behind what it depends on.

    Args:
        make: Makes a fresh policy: its class, or any callable without arguments.
        max_examples: Stories to tell.
        shrink: Look for the shortest story that shows a fault, rather than tell the first.

    Raises:
        VerificationError: (an `AssertionError`) Says what is wrong; Hypothesis adds the story.
        StateError: An op does not go on where the pointers are.
    """

    @told(max_examples, shrink=shrink)
    @given(world=worlds())
    def story(world: RestoreWorld) -> None:
        RestoreStory(make, world).run()

    tell(story)
