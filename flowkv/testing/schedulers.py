"""`check_scheduler`: what every `Scheduler` must do, told as stories by Hypothesis."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, cast

import msgspec

from flowkv.policy.restore.state import VerificationError
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
from flowkv.sim.serving import ServingResult, StepCosts, VirtualEngine, VirtualRequest
from flowkv.testing.stories import given, st, tell, told

# Turns that are checked as they are decided, by rules that are written down again here.

_state = attrgetter(*Job.__slots__)


def require(holds: bool, sentence: str, about: object = None) -> None:
    """Fails with a sentence, and what it is about.

    Raises:
        VerificationError: It does not hold.
    """
    if not holds:
        raise VerificationError(sentence if about is None else f"{sentence}: {about}")


class CheckedTurns:
    """Asks `Turns`, and a second one with a scheduler that has seen nothing; checks what they say.

    Args:
        make: Makes a scheduler.
        limits: What may be done at once.
        keeps: Whether pages of a job are worth keeping.
        turns: The class to check.

    Attributes:
        limits: What may be done at once.
        scheduler: The scheduler.
        pushed: How often each job was preempted for one that waited.
    """

    def __init__(
        self,
        make: Callable[[], Scheduler],
        limits: Limits,
        keeps: Callable[[Job], bool],
        turns: Callable[..., Turns] = Turns,
    ) -> None:
        self.limits, self.scheduler = limits, make()
        require(isinstance(self.scheduler, Scheduler), "a scheduler is a Scheduler")
        require(bool(getattr(self.scheduler, "name", "")), "its name must not be empty")
        self._turns = turns(self.scheduler, limits, keeps)
        self._make, self._keeps, self._kind = make, keeps, turns
        self.pushed: dict[int, int] = {}
        self._entered_at: dict[int, int] = {}

    # ---- questions

    def admit(
        self, waiting: Sequence[Job], active: Sequence[Job], room: Room, now_s: float
    ) -> Turn:
        """See `Turns.admit`."""
        jobs = [*waiting, *active]
        self._check_ranks(jobs, now_s)
        turn: Turn = self._ask(jobs, lambda one: one.admit(waiting, active, room, now_s))
        self._check_places(turn, waiting, active)
        self._check_order(turn, waiting, now_s)
        self._check_room(turn, waiting, active, room, now_s)
        for job, _ in turn.leave:
            self._check_victim(job, turn, now_s)
        for job in turn.enter:
            self._entered_at[job.number] = job.made
        return turn

    def share(self, active: Sequence[Job], now_s: float) -> list[tuple[Job, int]]:
        """See `Turns.share`."""
        shares: list[tuple[Job, int]] = self._ask(active, lambda one: one.share(active, now_s))
        given = {job.number: count for job, count in shares}
        require(len(given) == len(shares), "a row has two shares", shares)
        running = [job for job in active if job.state == RUNNING]
        for job, count in shares:
            require(job in running, "a share for a row that does not run", job)
            require(1 <= count <= job.missing, f"a share of {count} for {job}")
        could = min(self.limits.token_budget, sum(job.missing for job in running))
        require(sum(given.values()) == could, f"{sum(given.values())} tokens instead of {could}")
        decodes = [job for job in running if job.missing == 1]
        if len(decodes) + self.limits.page_size <= self.limits.token_budget:
            require(all(job.number in given for job in decodes), "a row that decodes waits", shares)
        self._check_chunks([job for job in running if job.missing > 1], given, now_s)
        return shares

    def relieve(self, active: Sequence[Job], now_s: float) -> tuple[Job, bool] | None:
        """See `Turns.relieve`; what it would say next is checked as well."""
        gone = self._relieve(active, now_s)
        left, follows = list(active), gone
        while follows is not None:
            left.remove(follows[0])
            follows = self._relieve(left, now_s)
        return gone

    def _relieve(self, active: Sequence[Job], now_s: float) -> tuple[Job, bool] | None:
        gone = self._ask(active, lambda one: one.relieve(active, now_s))
        if len(active) < 2:
            require(gone is None, "the last row makes room for nobody", gone)
            return None
        if gone is None:
            raise VerificationError("nobody makes room, though two rows are there")
        require(gone[0] in active, "who makes room is not there", gone)
        first = min(active, key=lambda job: self.scheduler.rank(job, now_s))
        require(gone[0] is not first, "the first in the order makes room", gone)
        self._check_kept(gone)
        return gone  # type: ignore[no-any-return]

    def _fresh(self) -> Turns:
        return self._kind(self._make(), self.limits, self._keeps)

    def _ask(self, jobs: Sequence[Job], question: Callable[[Turns], Any]) -> Any:
        before = [_state(job) for job in jobs]
        answer = question(self._turns)
        require(question(self._fresh()) == answer, "it depends on what was asked before", answer)
        require(before == [_state(job) for job in jobs], "a question changes jobs")
        return answer

    # ---- the scheduler

    def _check_ranks(self, jobs: Sequence[Job], now_s: float) -> None:
        """Keys are tuples of numbers that end with the request's own."""
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

    def _check_victim(self, job: Job, turn: Turn, now_s: float) -> None:
        """A victim ranks behind somebody who enters, and has been left alone for long enough."""
        rank = self.scheduler.rank
        best = min(rank(one, now_s) for one in turn.enter)
        require(rank(job, now_s) > best, "a victim ranks before those who enter", job)
        done = job.made - self._entered_at[job.number]
        times = 2 ** min(job.preempted - 1, 4) if job.preempted else 0
        least = self.limits.grace * times
        require(done >= least, f"preempted again after {done} tokens", job)
        self.pushed[job.number] = self.pushed.get(job.number, 0) + 1
        most = 1 + math.log2(1 + job.limit / self.limits.grace)
        require(self.pushed[job.number] <= most, "preempted too often", job)

    # ---- who is in

    def _check_places(self, turn: Turn, waiting: Sequence[Job], active: Sequence[Job]) -> None:
        gone = [job for job, _ in turn.leave]
        require(all(job in active for job in gone), "who leaves is not in", gone)
        require(all(job in waiting for job in turn.enter), "who enters does not wait", turn.enter)
        for jobs in (gone, turn.enter):
            require(len({job.number for job in jobs}) == len(jobs), "a job moves twice", jobs)
        require(bool(turn.enter) or not gone, "somebody leaves, and nobody enters", gone)
        rows = len(active) - len(gone) + len(turn.enter)
        require(rows <= self.limits.max_rows, f"{rows} rows")
        require(rows > 0 or not waiting, "nobody is in, though somebody waits")
        for one in turn.leave:
            self._check_kept(one)

    def _check_kept(self, gone: tuple[Job, bool]) -> None:
        job, kept = gone
        require(not (kept and job.state == COMING), "what is on its way is kept", job)

    def _check_order(self, turn: Turn, waiting: Sequence[Job], now_s: float) -> None:
        keys = [self.scheduler.rank(job, now_s) for job in turn.enter]
        require(keys == sorted(keys), "they enter in another order", turn.enter)
        rest = [job for job in waiting if job not in turn.enter]
        if keys and rest:
            first = min(self.scheduler.rank(job, now_s) for job in rest)
            require(keys[-1] < first, "somebody passes by another", turn.enter)

    def _check_room(
        self,
        turn: Turn,
        waiting: Sequence[Job],
        active: Sequence[Job],
        room: Room,
        now_s: float,
    ) -> None:
        """Those who enter fit, alone or beside what the others may claim; and nobody else would."""
        gone = [job for job, _ in turn.leave]
        stay = [job for job in active if job not in gone]
        free = room.free + sum(job.pages for job in gone) - self.limits.watermark * room.total
        free -= sum(self._owed(job) for job in stay)
        rows = len(stay)
        for job in turn.enter:
            fits = self._needs(job, rows) <= free
            require(fits or not rows, "who enters does not fit", job)
            require(not self._idle(job, active, turn, now_s), "who enters would be idle", job)
            rows, free = rows + 1, free - self._needs(job, 0)
        rest = [job for job in waiting if job not in turn.enter]
        if rest and rows < self.limits.max_rows:
            first = min(rest, key=lambda job: self.scheduler.rank(job, now_s))
            fits = self._needs(first, rows) <= free and not self._idle(first, active, turn, now_s)
            require(not fits, "who would fit waits", first)
        if len(turn.enter) == 1:  # else one may have been needed for another
            spare = free + self._needs(turn.enter[0], 0) - self._needs(turn.enter[0], rows - 1)
            for job in gone:
                less = job.pages + self._owed(job)
                needless = rows < self.limits.max_rows and less <= spare
                require(not needless, "who leaves would not have to", job)

    def _idle(self, job: Job, active: Sequence[Job], turn: Turn, now_s: float) -> bool:
        """Whether prompts in front take the whole step, so that a prompt would wait inside."""
        rank, size = self.scheduler.rank, self.limits.page_size
        prompts = [one for one in active if one.state == RUNNING and one.missing > 1]
        front = [one for one in [*prompts, *turn.enter] if rank(one, now_s) < rank(job, now_s)]
        tokens = sum(max(1, one.missing - size * one.shared) for one in front)
        return job.missing > 1 and tokens >= self.limits.token_budget

    def _needs(self, job: Job, rows: int) -> int:
        """Pages of all that is known, one to go on if it goes on, and one a row if it came back."""
        size = self.limits.page_size
        known = math.ceil((job.prompt + job.made) / size) + 1
        pages = max(1, min(known, math.ceil((job.prompt + job.limit - 1) / size)) - job.shared)
        return pages + (rows if job.preempted else 0)

    def _owed(self, job: Job) -> int:
        """Pages of what is known of a row and is not there."""
        size = self.limits.page_size
        there = max(math.ceil(job.ready / size), job.pages)
        return max(0, math.ceil((job.prompt + job.made) / size) - there)

    # ---- chunks

    def _check_chunks(self, behind: Sequence[Job], given: dict[int, int], now_s: float) -> None:
        """Chunks follow the order, and end with pages, but for one."""
        size = self.limits.page_size
        order = sorted(behind, key=lambda job: self.scheduler.rank(job, now_s))
        cut = [job for job in order if 0 < given.get(job.number, 0) < job.missing]
        odd = [job for job in cut if (job.ready + given[job.number]) % size]
        require(len(odd) <= 1, "chunks end within pages", odd)
        first = not order or order[0].number in given
        require(first or not any(job.number in given for job in order), "the first waits", order)
        lacking = False
        for job in order:
            count = given.get(job.number, 0)
            require(not lacking or count < size, "a later prompt goes before", job)
            lacking = lacking or job.missing - count >= size


# One load, served by a virtual engine in which things go wrong.

_SLACK = 1e-6  # of what is added up in another order


class SchedulerWorld(msgspec.Struct, frozen=True, kw_only=True):
    """What a scheduler meets.

    Attributes:
        asks: The load; each fits into `least` pages.
        limits: What may be done at once.
        pages: Pages of the device.
        least: Pages of the device once it has shrunk.
        shrinks: At which step it shrinks.
        costs: What everything takes.
        keeps: Whether the n-th job that leaves is kept, over and over.
        called_off: Number of a request -> step at which it is called off.
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
    """Serves a world, and checks every turn.

    Args:
        make: Makes a scheduler.
        world: What it meets.
        turns: The mechanism.
    """

    def __init__(
        self,
        make: Callable[[], Scheduler],
        world: SchedulerWorld,
        turns: Callable[..., Turns] = Turns,
    ) -> None:
        self.world, self._turn = world, 0
        self.watch = CheckedTurns(make, world.limits, self._keeps, turns)
        super().__init__(cast(Turns, self.watch), world.pages, world.costs)
        work = sum(ask.prompt + ask.new for ask in world.asks)
        self._most = 100 + 20 * work + 20 * len(world.asks)

    def run(self, asks: Sequence[VirtualRequest] = ()) -> ServingResult:
        """Serves everything.

        Raises:
            VerificationError: A rule is broken, or it does not end.
        """
        result = super().run(asks or self.world.asks)
        for one in result.served:
            job = Job(0, 0.0, self.world.asks[one.number].prompt, self.world.asks[one.number].limit)
            job.priority = self.world.asks[one.number].priority
            bound = self.watch.scheduler.bound_s(job)
            late = one.overtaken_s <= bound + _SLACK
            require(late, f"passed by one that came {one.overtaken_s} s later", one)
        return result

    def turn(self, next_s: float | None = None) -> None:
        """One turn, and what goes wrong before it."""
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
    """Requests of all kinds, some of them at once; or a long one, and short and urgent ones."""
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
def worlds(draw: st.DrawFn) -> SchedulerWorld:
    """A load, a device that is too small for it, and what goes wrong."""
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
    """A job, however far it is."""
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
    """Runs the conformance suite on a scheduler; returns if it found no fault. Deterministic.

    Stories are loads of up to twelve requests on a virtual engine with few rows, tokens and pages,
    which shrinks; with prefixes that are on their way, rows that are kept or dropped, and requests
    that are called off. Checked: ranks are a total order, steady if they are said to be; questions
    change nothing, and the answers depend on nothing but what is shown; victims are some of the
    rows shown; rows, tokens and pages are not exceeded; nothing idles that could be used; nobody is
    passed by more than `bound_s` says, preempted too often or again at once; everything ends.

    Args:
        make: Makes a fresh scheduler: its class, or any callable without arguments.
        max_examples: Stories to tell.
        shrink: Look for the shortest story that shows a fault, rather than tell the first.

    Raises:
        VerificationError: (an `AssertionError`) Says what is wrong; Hypothesis adds the story.
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
    check_turns(Turns, make, max_examples=max_examples, shrink=shrink)


def check_turns(
    turns: Callable[..., Turns],
    make: Callable[[], Scheduler],
    *,
    max_examples: int = 100,
    shrink: bool = True,
) -> None:
    """Tells the stories of `check_scheduler` about a mechanism.

    Args:
        turns: A class like `Turns`.
        make: Makes a fresh scheduler.
        max_examples: Stories to tell.
        shrink: Look for the shortest story that shows a fault.

    Raises:
        VerificationError: A rule is broken.
        StateError: Nothing goes on.
    """

    @told(max_examples, shrink=shrink)
    @given(world=worlds())
    def story(world: SchedulerWorld) -> None:
        SchedulerStory(make, world, turns).run()

    tell(story)
