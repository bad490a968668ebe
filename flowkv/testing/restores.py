"""`check_restore_policy`: what every `RestorePolicy` must do, told as stories by Hypothesis."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import cast

import msgspec

from flowkv.policy.restore.costs import Measured
from flowkv.policy.restore.state import (
    Caps,
    Compute,
    Costs,
    Load,
    Op,
    Progress,
    Request,
    RestorePolicy,
    Source,
    Span,
    State,
    Suffix,
    VerificationError,
    require,
    verify,
)
from flowkv.sim.restore import VirtualClock
from flowkv.testing.stories import given, st, tell, told

# One restore policy, executed on made-up engines whose ops take and lose what a story says.

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

    requests: Sequence[Request]
    costs: Costs | None
    takes_s: Callable[[Op, int], float]
    failing: Collection[int] = ()
    engines: Sequence[Collection[int] | None] = (None,)
    windows: Mapping[str, int] = {}
    called_off: Mapping[int, float] = {}


class CheckedRestorePolicy:
    """Asks a policy, and a second one of its kind; checks what they say.

    Args:
        make: Makes a fresh policy.
    """

    def __init__(self, make: Callable[[], RestorePolicy]) -> None:
        self._policy, self._twin = make(), make()
        require(isinstance(self._policy, RestorePolicy), "a policy is a RestorePolicy")
        require(bool(self._policy.name), "its name must not be empty")
        self.name = self._policy.name

    def next_compute(self, state: State, among: Collection[int] | None = None) -> Op | None:
        """What a compute engine does now."""
        op = self._ask(state, lambda policy: policy.next_compute(state, among))
        if op is not None:
            require(isinstance(op, Compute | Suffix), "a compute engine computes", op)
            require(op.request in state.requests, "a request that is not there", op)
            require(among is None or op.request in among, "a request of another engine", op)
        return op

    def next_load(self, state: State, tier: str) -> Load | None:
        """What the link of a tier does now."""
        op = self._ask(state, lambda policy: policy.next_load(state, tier))
        if op is None:
            return None
        if not isinstance(op, Load):
            raise VerificationError(f"a link loads: {op}")
        require(op.request in state.requests, "a request that is not there", op)
        sources = state.requests[op.request].request.sources
        require(0 <= op.source < len(sources), "source: there is no such one", op)
        require(sources[op.source].tier == tier, "a load from another tier", op)
        return op

    def forget(self, number: int) -> None:
        """A request is gone."""
        self._policy.forget(number)
        self._twin.forget(number)

    def _ask(self, state: State, question: Callable[[RestorePolicy], Op | None]) -> Op | None:
        before = _snapshot(state)
        answer = question(self._policy)
        require(question(self._twin) == answer, "two of a kind answer differently", answer)
        require(_snapshot(state) == before, "a question changes the state")
        return answer


def _snapshot(state: State) -> list[object]:
    now: list[object] = [state.now_s, dict(state.link_cells)]
    for number, p in state.requests.items():
        now += [number, p.request, p.suffix, p.answered, p.lost]
        now += [list(x) for x in (p.front, p.back, p.computed, p.missing, p.flying)]
    return now


class RestoreStory(VirtualClock):
    """Executes a policy, and checks what it answers; `execute` checks the timeline too.

    Args:
        make: Makes a fresh policy.
        world: What it meets.

    Attributes:
        unfinished: Requests that were called off, or cannot be finished.
    """

    def __init__(self, make: Callable[[], RestorePolicy], world: RestoreWorld) -> None:
        self.world, self.unfinished, loads = world, set[int](), itertools.count()
        costs = world.costs or Measured()
        super().__init__(
            world.requests,
            cast(RestorePolicy, CheckedRestorePolicy(make)),
            costs,
            engines=world.engines,
            fails=lambda _: next(loads) in world.failing,
        )
        self.windows = dict(world.windows)
        for number, at_s in world.called_off.items():
            self.at(max(at_s, self.requests[number].arrived_s), number)

    def execute(self) -> None:
        """Executes everything.

        Raises:
            VerificationError: The policy broke a rule, or got stuck.
        """
        super().execute()
        stuck = list(self.state.requests)
        require(not stuck, f"stuck: nothing is done about requests {stuck}")
        caps = Caps(len(self.world.engines), self.world.windows)
        verify(self.world.requests, self.timeline, caps, unfinished=self.unfinished)

    def takes_s(self, op: Op) -> tuple[float, float]:
        """What the world says; loads of one link go on at once."""
        require(len(self.timeline) < _MOST, "it never ends", op)
        return self.state.now_s, self.world.takes_s(op, len(self.timeline))

    def settle(self, progress: Progress) -> None:
        """A request goes if it is done, or cannot be."""
        if not progress.request.computable and progress.lost > progress.request.resident:
            self.called_off(progress.request.number)
        elif progress.done:
            self.remove(progress.request.number)

    def called_off(self, number: int) -> None:
        """A request goes before it is done."""
        if number in self.state.requests:
            self.unfinished.add(number)
            self.remove(number)


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

    def compute_s(self, request: Request, layers: int, tokens: Span) -> float:
        """Computing so many layers of these tokens."""
        pairs = tokens.size * (tokens.first + tokens.stop + 1) / 2
        fixed = self.start_s if self.token_s else 0.0
        return layers * (fixed + self.token_s * tokens.size + self.pair_s * pairs)

    def suffix_s(self, request: Request) -> float:
        """Computing all layers of the suffix."""
        behind = Span(request.tokens, request.tokens + request.suffix)
        return self.compute_s(request, request.layers, behind)

    def load_s(self, request: Request, source: int, cells: int) -> float:
        """Loading so many cells (tokens times layers) at once."""
        return self.cell_s * cells / (1 + source)

    def op_s(self, request: Request, op: Op) -> float:
        """What an op takes."""
        if isinstance(op, Compute):
            return self.compute_s(request, op.layers.size, op.tokens)
        if isinstance(op, Load):
            return self.load_s(request, op.source, op.layers.size * op.tokens.size)
        return self.suffix_s(request) / request.layers


@st.composite
def _requests(draw: st.DrawFn, number: int) -> Request:
    """A prompt of some pages, here and there."""
    unit, layers = draw(st.sampled_from([1, 16, 64, 256])), draw(st.integers(1, 6))
    pages, resident = draw(st.integers(1, 40)), draw(st.integers(0, 3))
    tokens = max(1, pages * unit - draw(st.sampled_from([0, 0, unit // 2])))
    found = draw(st.lists(st.sampled_from(_TIERS), max_size=2))
    kinds = (("raw", 8.0), ("kv8", 4.0))
    return Request(
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
    asked the same answers alike; answers are for the engine that asks; no request is forgotten; and
    what `verify` checks.

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
        RestoreStory(make, world).execute()

    tell(story)
