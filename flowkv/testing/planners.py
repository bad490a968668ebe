"""`check_restore_policy` and `check_scheduler`: check rules of restore policies and schedulers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter
from typing import Any, cast

import msgspec
from hypothesis import given
from hypothesis import strategies as st

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
from flowkv.policy.scheduling import (
    COMING,
    OVER,
    RUNNING,
    Job,
    Limits,
    Room,
    Scheduler,
    Turn,
    Turns,
)
from flowkv.sim.restore import VirtualClock
from flowkv.sim.serving import ServingResult, StepCosts, VirtualEngine, VirtualRequest
from flowkv.testing.stories import VerificationError, require, tell, told

# A restore policy, executed on simulated engines with the durations and failures of a story.

_MOST = 100_000  # ops of a story: a policy that needs more never ends


class RestoreWorld(msgspec.Struct, frozen=True, kw_only=True):
    """Requests, costs and faults that a restore policy meets.

    Attributes:
        requests: The requests.
        costs: Estimates that the policy gets; None for those measured so far.
        takes_s: Duration of an op, the n-th that is begun.
        failing: Numbers of the loads that fail, in the order of their begin.
        engines: Per compute engine, the numbers of requests that it can compute; None for all.
        windows: Per tier, loads that may be under way at once.
        called_off: Number of a request -> time of its cancellation.
    """

    requests: Sequence[RestoreRequest]
    costs: Costs | None
    takes_s: Callable[[Op, int], float]
    failing: Collection[int] = ()
    engines: Sequence[Collection[int] | None] = (None,)
    windows: Mapping[str, int] = {}
    called_off: Mapping[int, float] = {}


class CheckedRestorePolicy:
    """Proxy of a policy that compares it with a second one of its kind, and checks its answers.

    Args:
        make: Makes a fresh policy.
    """

    def __init__(self, make: Callable[[], RestorePolicy]) -> None:
        self._policy, self._twin = make(), make()
        require(isinstance(self._policy, RestorePolicy), "a policy is a RestorePolicy")
        require(bool(self._policy.name), "its name must not be empty")
        self.name = self._policy.name

    def next_compute(self, state: State, among: Collection[int] | None = None) -> Op | None:
        """Return the next op of a compute engine, checked."""
        op = self._ask(state, lambda policy: policy.next_compute(state, among))
        if op is not None:
            require(isinstance(op, Compute | Suffix), "a compute engine computes", op)
            require(op.request in state.requests, "a request that is not there", op)
            require(among is None or op.request in among, "a request of another engine", op)
            _allowed(op, state.requests[op.request])
        return op

    def next_load(self, state: State, tier: str) -> RestoreLoad | None:
        """Return the next load of a tier's link, checked."""
        op = self._ask(state, lambda policy: policy.next_load(state, tier))
        if op is None:
            return None
        if not isinstance(op, RestoreLoad):
            raise VerificationError(f"a link loads: {op}")
        require(op.request in state.requests, "a request that is not there", op)
        sources = state.requests[op.request].request.sources
        require(0 <= op.source < len(sources), "source: there is no such one", op)
        require(sources[op.source].tier == tier, "a load from another tier", op)
        _allowed(op, state.requests[op.request])
        return op

    def forget(self, number: int) -> None:
        """Forget a request."""
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
    """Execution of a policy with checks of its answers.

    Args:
        make: Makes a fresh policy.
        world: Requests, costs and faults.

    Attributes:
        unfinished: Requests that were cancelled, or cannot be finished.
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
        """Execute all requests.

        Raises:
            VerificationError: The policy broke a rule, or got stuck.
        """
        super().execute()
        stuck = list(self.state.requests)
        require(not stuck, f"stuck: nothing is done about requests {stuck}")

    def takes_s(self, op: Op) -> tuple[float, float]:
        """Return begin and duration of an op in this world; loads of one link run at once."""
        require(len(self.timeline) < _MOST, "it never ends", op)
        return self.state.now_s, self.world.takes_s(op, len(self.timeline))

    def settle(self, progress: Progress) -> None:
        """Remove a request if it is done, or cannot be finished."""
        if not progress.request.computable and progress.lost > progress.request.resident:
            self.called_off(progress.request.number)
        elif progress.done:
            self.remove(progress.request.number)

    def called_off(self, number: int) -> None:
        """Remove a request before it is done."""
        if number in self.state.requests:
            self.unfinished.add(number)
            self.remove(number)


def _allowed(op: Op, progress: Progress) -> None:
    """Check the conditions that `State.begin` assumes.

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
_INSTANT_S = 1e-9  # an op of no duration would leave the order of events open


class MadeUpCosts(msgspec.Struct, frozen=True):
    """Made-up durations. Implements `Costs`.

    Attributes:
        token_s: Seconds to compute a token of a layer.
        pair_s: Seconds of the attention of one token to another, in a layer.
        start_s: Seconds to start a layer's compute.
        cell_s: Seconds to load a cell; the second source takes half.
    """

    token_s: float
    pair_s: float
    start_s: float
    cell_s: float

    def compute_s(self, request: RestoreRequest, layers: int, tokens: Span) -> float:
        """Return the seconds to compute so many layers of these tokens."""
        pairs = tokens.size * (tokens.first + tokens.stop + 1) / 2
        fixed = self.start_s if self.token_s else 0.0
        return layers * (fixed + self.token_s * tokens.size + self.pair_s * pairs)

    def suffix_s(self, request: RestoreRequest) -> float:
        """Return the seconds to compute all layers of the suffix."""
        behind = Span(request.tokens, request.tokens + request.suffix)
        return self.compute_s(request, request.layers, behind)

    def load_s(self, request: RestoreRequest, source: int, cells: int) -> float:
        """Return the seconds to load so many cells (tokens times layers) at once."""
        return self.cell_s * cells / (1 + source)

    def op_s(self, request: RestoreRequest, op: Op) -> float:
        """Return the seconds that an op takes."""
        if isinstance(op, Compute):
            return self.compute_s(request, op.layers.size, op.tokens)
        if isinstance(op, RestoreLoad):
            return self.load_s(request, op.source, op.layers.size * op.tokens.size)
        return self.suffix_s(request) / request.layers


@st.composite
def _requests(draw: st.DrawFn, number: int) -> RestoreRequest:
    """Draw a request for a prompt of some pages, resident or in tiers."""
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
        shared=draw(st.booleans()),
        arrived_s=draw(st.sampled_from([0.0, 0.0, 0.01, 0.5])),
    )


_rates = st.sampled_from([1e-7, 1e-6, 1e-5, 1e-4])
_beliefs = st.sampled_from([_UNKNOWN, 0.01, 1.0, 1.0, 1.0, 100.0])
_noises = st.lists(st.sampled_from([0.0, 0.3, 1.0, 1.0, 4.0]), min_size=1, max_size=7)


@st.composite
def restore_worlds(draw: st.DrawFn, most: int = 4) -> RestoreWorld:
    """Draw requests with their true durations, the policy's estimates, and faults.

    Args:
        draw: Passed by Hypothesis.
        most: Most requests.
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
    """Run the conformance suite on a restore policy; return if it found no fault. Deterministic.

    Stories have up to four requests, some of an unmodified model, some that cannot be computed or
    loaded, with resident pages; costs that are right, wrong, unknown or measured; one or two
    engines; ops that take longer than expected, or no time; loads that fail; requests that come
    late or are cancelled. Checked: queries do not change the state, and a second object answers
    equal queries alike; answers are for the engine that asks; no request is forgotten; each cell
    comes once, after its dependencies.

    Args:
        make: Makes a fresh policy: its class, or any callable without arguments.
        max_examples: Number of stories to run.
        shrink: Search for the shortest story that shows a fault, rather than report the first.

    Raises:
        VerificationError: (an `AssertionError`) The policy broke a rule; Hypothesis adds the story.
        StateError: An op does not go on where the pointers are.
    """

    @told(max_examples, shrink=shrink)
    @given(world=restore_worlds())
    def story(world: RestoreWorld) -> None:
        RestoreStory(make, world).execute()

    tell(story)


# Turns with checks of each decision.

_state = attrgetter(*Job.__slots__)


class CheckedTurns:
    """Proxy of `Turns` that compares them with fresh ones at each call, and checks the answers.

    Args:
        make: Makes a scheduler.
        limits: Limits of rows, tokens and pages.
        keeps: Whether pages of a job are worth keeping.

    Attributes:
        mechanism: The class under test.
        limits: Limits of rows, tokens and pages.
        scheduler: The scheduler.
    """

    mechanism: Callable[..., Turns] = Turns

    def __init__(
        self, make: Callable[[], Scheduler], limits: Limits, keeps: Callable[[Job], bool]
    ) -> None:
        self.limits, self.scheduler = limits, make()
        require(isinstance(self.scheduler, Scheduler), "a scheduler is a Scheduler")
        require(bool(getattr(self.scheduler, "name", "")), "its name must not be empty")
        self._make, self._keeps = make, keeps
        self._turns = self._mechanism(self.scheduler)

    def admit(
        self, waiting: Sequence[Job], active: Sequence[Job], room: Room, now_s: float
    ) -> Turn:
        """Decide which rows leave and which requests enter now, checked."""
        jobs = [*waiting, *active]
        self._check_ranks(jobs, now_s)
        turn: Turn = self._ask(jobs, lambda one: one.admit(waiting, active, room, now_s))
        best = min((self.scheduler.rank(job, now_s) for job in turn.enter), default=())
        for job, _ in turn.leave:
            late = self.scheduler.rank(job, now_s) > best
            require(late, "a victim ranks before a request that enters", job)
        return turn

    def share(self, active: Sequence[Job], now_s: float) -> list[tuple[Job, int]]:
        """Return the tokens of each row in the next step; rows that get none are left out."""
        shares: list[tuple[Job, int]] = self._ask(active, lambda one: one.share(active, now_s))
        return shares

    def relieve(self, active: Sequence[Job], now_s: float) -> tuple[Job, bool] | None:
        """Choose the row to preempt where rows cannot grow; None if only one is left."""
        gone: tuple[Job, bool] | None = self._ask(active, lambda one: one.relieve(active, now_s))
        return gone

    def _mechanism(self, scheduler: Scheduler) -> Turns:
        return type(self).mechanism(scheduler, self.limits, self._keeps)

    def _ask(self, jobs: Sequence[Job], question: Callable[[Turns], Any]) -> Any:
        before = [_state(job) for job in jobs]
        answer = question(self._turns)
        again = question(self._mechanism(self._make()))
        require(again == answer, "an answer depends on earlier queries", answer)
        require(before == [_state(job) for job in jobs], "a question changes jobs")
        return answer

    def _check_ranks(self, jobs: Sequence[Job], now_s: float) -> None:
        """Check that keys are tuples of numbers that end with the request's own."""
        for job in jobs:
            key = self.scheduler.rank(job, now_s)
            require(isinstance(key, tuple) and bool(key), "a rank is a tuple", key)
            require(not any(math.isnan(part) for part in key), "a rank is no number", key)
            require(key[-1] == job.number, "a rank ends with the request's number", key)
            if self.scheduler.steady and job.state not in (COMING, RUNNING):
                later = self.scheduler.rank(job, now_s + 100.0)
                require(later == key, "a steady rank changes with time", later)
        if jobs and not self.scheduler.preempts:
            named = self.scheduler.victims(jobs[1:], jobs[0], now_s) if jobs[1:] else ()
            require(not named, "it preempts, though it says that it does not", named)


# One load, served by a virtual engine with faults.

_SLACK = 1e-6  # rounding of sums in another order


class SchedulerWorld(msgspec.Struct, frozen=True, kw_only=True):
    """Requests, pages and faults that a scheduler meets.

    Attributes:
        asks: The load; each request fits into `least` pages.
        limits: Limits of rows, tokens and pages.
        pages: Pages of the device.
        least: Pages of the device once it has shrunk.
        shrinks: Step at which it shrinks.
        costs: Durations of steps and loads.
        keeps: Whether the n-th job that leaves is kept, repeated in a cycle.
        called_off: Number of a request -> step at which it is cancelled.
    """

    asks: Sequence[VirtualRequest]
    limits: Limits
    pages: int
    least: int
    shrinks: int
    costs: StepCosts
    keeps: Sequence[bool]
    called_off: Mapping[int, int] = {}


class SchedulerStory(VirtualEngine):
    """Service of a world with checks of every turn.

    Args:
        make: Makes a scheduler.
        world: Requests, pages and faults.
        checked: Proxy of the turns, which checks their answers.
    """

    def __init__(
        self,
        make: Callable[[], Scheduler],
        world: SchedulerWorld,
        checked: type[CheckedTurns] = CheckedTurns,
    ) -> None:
        self.world, self._turn = world, 0
        self.watch = checked(make, world.limits, self._keeps)
        super().__init__(cast(Turns, self.watch), world.pages, world.costs)
        work = sum(ask.prompt + ask.new for ask in world.asks)
        self._most = 100 + 20 * work + 20 * len(world.asks)

    def run(self, asks: Sequence[VirtualRequest] = ()) -> ServingResult:
        """Serve all requests.

        Raises:
            VerificationError: A rule is broken, or the run does not end.
        """
        result = super().run(asks or self.world.asks)
        for one in result.served:
            ask = self.world.asks[one.number]
            job = Job(0, 0.0, ask.prompt, ask.limit, priority=ask.priority)
            fair = one.overtaken_s <= self.watch.scheduler.bound_s(job) + _SLACK
            require(fair, f"passed by one that came {one.overtaken_s} s later", one)
        return result

    def turn(self, next_s: float | None = None) -> None:
        """Run one turn, after the faults due before it."""
        self._turn += 1
        require(self._turn < self._most, "it never ends", self.active)
        if self._turn == self.world.shrinks:
            self.pages = self.world.least
        for number, at in self.world.called_off.items():
            if at == self._turn:
                self._call_off(number)
        if self.waiting or self.active:
            super().turn(next_s)

    def _call_off(self, number: int) -> None:
        for rows in (self.waiting, self.active):
            for row in [row for row in rows if row.number == number]:
                rows.remove(row)
                row.pages = 0
                row.move(OVER, self.now_s)

    def _keeps(self, job: Job) -> bool:
        return self.world.keeps[(job.number + job.preempted) % len(self.world.keeps)]


_priorities = st.sampled_from([0, 0, 0, 1, 2, -1, 10, 99])
_gaps = st.sampled_from([0, 0, 0, 1, 3, 12])  # steps
_patience_s = st.sampled_from([math.inf, math.inf, 0.0, 3.0, 100.0])
_behind_s = st.sampled_from([1e-3, 0.1, 5.0, 1e3, 1e5])
_SIZES = (1, 2, 5, 12, 30)


@st.composite
def _asks(draw: st.DrawFn, step_s: float) -> list[VirtualRequest]:
    """Draw requests of all kinds, some at once; or a long one beside short and urgent ones."""
    now_s, asks, stream = 0.0, [], draw(st.booleans())
    for number in range(draw(st.sampled_from([1, 4, 8, 12]))):
        now_s += step_s * draw(_gaps)
        prompt, new = draw(st.sampled_from(_SIZES)), draw(st.sampled_from(_SIZES))
        if stream:
            prompt, new = (prompt, 30) if number == 0 else (min(prompt, 5), min(new, 2))
        prompt += draw(st.integers(0, 3))
        asks.append(
            VirtualRequest(
                arrived_s=now_s,
                prompt=prompt,
                new=new,
                limit=new + draw(st.sampled_from([0, 0, 1, 20])),
                priority=draw(_priorities) if not stream else min(number, 1),
                deadline_s=now_s + draw(_patience_s),
                found=draw(st.sampled_from([0, 0, prompt // 2, prompt - 1])),
            )
        )
    return asks


@st.composite
def scheduler_worlds(draw: st.DrawFn) -> SchedulerWorld:
    """Draw a load, a device that is too small for it, and faults."""
    step_s = draw(st.sampled_from([0.001, 0.1, 10.0]))
    asks, size = draw(_asks(step_s)), draw(st.sampled_from([1, 4, 16]))
    most = max(-(-(ask.prompt + ask.limit) // size) for ask in asks)
    least = most + draw(st.sampled_from([0, 1, 4, 12]))
    numbers = st.integers(0, len(asks) - 1)
    return SchedulerWorld(
        asks=asks,
        limits=Limits(
            max_rows=draw(st.sampled_from([1, 2, 4, 8])),
            token_budget=draw(st.sampled_from([1, 4, 9, 20, 40])),
            page_size=size,
            watermark=draw(st.sampled_from([0.0, 0.02, 0.3])),
            grace=draw(st.sampled_from([1, 2, 16])),
        ),
        pages=least + draw(st.sampled_from([0, 2, 10, 50])),
        least=least,
        shrinks=draw(st.sampled_from([1, 10, 40, 1000])),
        costs=StepCosts(step_s=step_s, token_s=0.0, load_s=draw(st.sampled_from([0.0, step_s]))),
        keeps=draw(st.sampled_from([(True,), (False,), (True, False, False)])),
        called_off=draw(st.dictionaries(numbers, st.integers(1, 40), max_size=2)),
    )


@st.composite
def _jobs(draw: st.DrawFn, number: int, arrived_s: float) -> Job:
    """Draw a job in any state of progress."""
    job = Job(
        number,
        arrived_s,
        draw(st.sampled_from([1, 50, 100_000])),
        draw(st.sampled_from([1, 20, 5000])),
        priority=draw(_priorities),
        deadline_s=arrived_s + draw(_patience_s),
    )
    job.made = draw(st.integers(0, job.limit - 1))
    job.ready = draw(st.integers(0, job.prompt + job.made - 1))
    job.preempted = draw(st.integers(0, 3))
    job.move(draw(st.integers(0, 3)), arrived_s)
    return job


def check_scheduler(
    make: Callable[[], Scheduler], *, max_examples: int = 100, shrink: bool = True
) -> None:
    """Run the conformance suite on a scheduler; return if it found no fault. Deterministic.

    Stories are loads of up to twelve requests on a virtual engine with few rows, tokens and pages,
    which shrinks; with prefixes that are on their way, rows that are kept or dropped, and requests
    that are cancelled. Checked: ranks are a total order, steady if declared so; queries change
    nothing, and answers depend on the arguments alone; victims are among the rows passed, and rank
    behind the requests they make room for; no request is overtaken by one that came more than
    `bound_s` later; everything ends.

    Args:
        make: Makes a fresh scheduler: its class, or any callable without arguments.
        max_examples: Number of stories to run.
        shrink: Search for the shortest story that shows a fault, rather than report the first.

    Raises:
        VerificationError: (an `AssertionError`) A rule was broken; Hypothesis adds the story.
        StateError: The scheduler names a victim that is none of the rows, or nothing goes on.
    """

    @told(max_examples, shrink=shrink)
    @given(data=st.data(), first_s=st.sampled_from([0.0, 1e5]), behind_s=_behind_s)
    def bound(data: st.DataObject, first_s: float, behind_s: float) -> None:
        scheduler = make()
        job = data.draw(_jobs(3, first_s))
        bound_s = scheduler.bound_s(job)
        require(bound_s >= 0, "bound_s is below 0", bound_s)
        if bound_s < math.inf:
            later = data.draw(_jobs(4, first_s + bound_s + behind_s))
            now_s = later.arrived_s + data.draw(st.floats(0.0, 1e5))
            passes = scheduler.rank(later, now_s) < scheduler.rank(job, now_s)
            require(not passes, f"{later} passes {job}, though it came later than bound_s allows")

    tell(bound)

    @told(max_examples, shrink=shrink)
    @given(world=scheduler_worlds())
    def story(world: SchedulerWorld) -> None:
        SchedulerStory(make, world).run()

    tell(story)
