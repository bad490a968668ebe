"""Schedulers without a model: a virtual engine over the same turns as `flowkv.Engine`.

    from flowkv.sim.serving import mixed, serve

    print(serve(mixed(seed=1), "shortest").mean())

All results are simulated and labelled so (DESIGN D17).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import numpy as np

from flowkv.core.errors import ConfigError, StateError
from flowkv.policy.scheduling import (
    ASIDE,
    COMING,
    OVER,
    RUNNING,
    WAITING,
    Job,
    Limits,
    Room,
    Scheduler,
    Turns,
    Worth,
    make_scheduler,
)
from flowkv.sim.generate import poisson

__all__ = [
    "ServedRequest",
    "ServingResult",
    "StepCosts",
    "VirtualEngine",
    "VirtualRequest",
    "mixed",
    "serve",
]


# Requests to a virtual engine: times and token counts; no model and no text.


class VirtualRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request to a virtual engine.

    Attributes:
        arrived_s: Time of submission.
        prompt: Tokens of its prompt.
        new: New tokens that it makes.
        limit: New tokens that it may make; schedulers see this number only.
        priority: Larger is more urgent.
        deadline_s: Time after which the answer is useless; schedulers see it, but no request is
            cancelled.
        found: Tokens of its prompt that are loaded rather than computed, not all of them.
    """

    arrived_s: float
    prompt: int
    new: int
    limit: int
    priority: int = 0
    deadline_s: float = math.inf
    found: int = 0


def mixed(
    requests: int = 200, *, rate: float = 4.0, long: float = 0.2, seed: int = 0
) -> list[VirtualRequest]:
    """Return short questions among long tasks, as Poisson arrivals.

    A short one has 16 to 256 tokens of prompt and 8 to 32 new ones; a long one 128 to 1,024 and 256
    to 512, all of them log-uniform. Limits are the next power of two, as users set them: a
    scheduler does not know exactly how long an answer gets.

    Args:
        requests: Number of requests.
        rate: Requests per second, on average.
        long: Share of long ones.
        seed: Seed of all draws.
    """
    rng = np.random.default_rng(seed)
    times = poisson(rng, rate)

    def draw(least: int, most: int) -> int:
        return round(float(np.exp(rng.uniform(np.log(least), np.log(most)))))

    asks = []
    for _ in range(requests):
        is_long = bool(rng.random() < long)
        prompt = draw(128, 1024) if is_long else draw(16, 256)
        new = draw(256, 512) if is_long else draw(8, 32)
        limit = 1 << (new - 1).bit_length()
        asks.append(VirtualRequest(arrived_s=next(times), prompt=prompt, new=new, limit=limit))
    return asks


# Outcomes of simulated requests.


class ServedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of one request. Simulated.

    Attributes:
        number: Index of the request in the load.
        arrived_s: Time of submission.
        queued_s: Seconds from submission to the first admission.
        ttft_s: Seconds from submission to its first token.
        tpot_s: Mean time of a further token.
        gap_s: Longest time between two of its tokens.
        seconds: Seconds from submission to the end.
        waited_s: Time outside the batch.
        preempted: Number of preemptions.
        computed: Tokens that were computed for it, recomputed ones included.
        overtaken_s: How much later than it the latest request was submitted that was admitted
            before it; 0.0 without one.
    """

    number: int
    arrived_s: float
    queued_s: float
    ttft_s: float
    tpot_s: float
    gap_s: float
    seconds: float
    waited_s: float
    preempted: int
    computed: int
    overtaken_s: float


class ServingResult(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a load on a virtual engine. Simulated.

    Attributes:
        scheduler: Name of the scheduler.
        served: Outcomes, in the order of the load.
        seconds: Time until the last request was over.
        steps: Number of steps.
        preemptions: Moves out of the batch.
        peak_pages: Most pages that were held at once.
        label: Always "simulated".
    """

    scheduler: str
    served: Sequence[ServedRequest]
    seconds: float
    steps: int
    preemptions: int
    peak_pages: int
    label: str = "simulated"

    def mean(self, field: str = "seconds") -> float:
        """Return the mean of a field of `ServedRequest`."""
        return float(np.mean([getattr(one, field) for one in self.served]))

    def percentile(self, share: float, field: str = "seconds") -> float:
        """Return a percentile of a field of `ServedRequest`; `share` from 0 to 100."""
        return float(np.percentile([getattr(one, field) for one in self.served], share))

    @property
    def tokens_per_s(self) -> float:
        """Computed tokens per second of the whole time."""
        return sum(one.computed for one in self.served) / self.seconds if self.seconds else 0.0


# Requests in a virtual engine.


class VirtualRow(Job):
    """Job of a virtual engine, with its measurements.

    Attributes:
        ask: The request.
        here_s: Time when its prefix is loaded, while it is `COMING`.
        place: Number of requests admitted before its first admission; -1 until then.
        queued_s: See `ServedRequest`.
        first_s: Time of its first token.
        last_s: Time of its latest token.
        gap_s: See `ServedRequest`.
        computed: See `ServedRequest`.
    """

    def __init__(self, number: int, ask: VirtualRequest) -> None:
        super().__init__(number, ask.arrived_s, ask.prompt, ask.limit)
        self.priority, self.deadline_s = ask.priority, ask.deadline_s
        self.ask, self.place, self.computed = ask, -1, 0
        self.here_s = self.queued_s = self.first_s = self.last_s = self.gap_s = 0.0

    def held(self, page_size: int) -> int:
        """Return the pages of its computed or loaded tokens."""
        return -(-self.ready // page_size)

    def compute(self, tokens: int, now_s: float) -> None:
        """Compute so many tokens; once all known ones are computed, make a new one."""
        self.ready += tokens
        self.computed += tokens
        if self.missing:
            return
        self.made += 1
        if self.made == 1:
            self.first_s = now_s
        else:
            self.gap_s = max(self.gap_s, now_s - self.last_s)
        self.last_s = now_s

    def served(self, overtaken_s: float) -> ServedRequest:
        """Return the outcome, once the request is over."""
        further = self.made - 1
        return ServedRequest(
            number=self.number,
            arrived_s=self.arrived_s,
            queued_s=self.queued_s,
            ttft_s=self.first_s - self.arrived_s,
            tpot_s=(self.last_s - self.first_s) / further if further else 0.0,
            gap_s=self.gap_s,
            seconds=self.last_s - self.arrived_s,
            waited_s=self.waited_s,
            preempted=self.preempted,
            computed=self.computed,
            overtaken_s=overtaken_s,
        )


# Durations of a virtual engine's steps and moves.


class StepCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Durations in seconds, linear in the work.

    Attributes:
        step_s: An empty step: reading the weights, launching, bookkeeping.
        token_s: Each token of a step.
        context_s: Each token that one of its rows attends to.
        out_s: Moving a page to host memory.
        back_s: Moving a page to the device.
        load_s: Loading a token of a cached prefix, while steps go on.
    """

    step_s: float = 0.010
    token_s: float = 0.0002
    context_s: float = 2e-7
    out_s: float = 0.0005
    back_s: float = 0.0005
    load_s: float = 0.00002

    def of_step(self, tokens: int, context: int) -> float:
        """Return the seconds of a step over so many tokens, with `context` tokens before them."""
        return self.step_s + self.token_s * tokens + self.context_s * context


# Engine without a model: `Turns` decides turns, `StepCosts` their durations.


class VirtualEngine:
    """Engine that serves a load in virtual time. Deterministic.

    Args:
        turns: Decides turns.
        pages: Pages of the device.
        costs: Durations of steps and moves.
        worth: Gets the durations of steps and moves, in pages of one byte.

    Attributes:
        now_s: The time.
        waiting: Rows that wait or are set aside.
        active: Rows in the batch.
        over: Rows that are over.
        steps: Steps so far.
        peak: Most pages that were held at once.
    """

    def __init__(
        self, turns: Turns, pages: int, costs: StepCosts | None = None, worth: Worth | None = None
    ) -> None:
        self.turns, self.pages, self.costs = turns, pages, costs or StepCosts()
        self._worth, self._size = worth, turns.limits.page_size
        self.now_s, self.steps, self.peak, self._entered = 0.0, 0, 0, 0
        self.waiting: list[VirtualRow] = []
        self.active: list[VirtualRow] = []
        self.over: list[VirtualRow] = []

    def run(self, asks: Sequence[VirtualRequest]) -> ServingResult:
        """Serve all requests of a load.

        Raises:
            ConfigError: A request does not fit into the device at all.
            StateError: Nothing proceeds though requests are left.
        """
        for ask in asks:
            if -(-(ask.prompt + ask.limit) // self._size) > self.pages:
                raise ConfigError(f"{ask} does not fit {self.pages} pages", "Pass more pages")
        rows = [VirtualRow(number, ask) for number, ask in enumerate(asks)]
        ahead = sorted(rows, key=lambda row: (row.arrived_s, row.number), reverse=True)
        while ahead or self.waiting or self.active:
            if not self.waiting and not self.active:
                self.now_s = max(self.now_s, ahead[-1].arrived_s)
            while ahead and ahead[-1].arrived_s <= self.now_s:
                self.waiting.append(ahead.pop())
            self.turn(ahead[-1].arrived_s if ahead else None)
        return self._result(rows)

    def turn(self, next_s: float | None = None) -> None:
        """Run one turn: preempt, admit, and compute a step.

        Args:
            next_s: Time of the next request, if there is one.

        Raises:
            StateError: Nothing proceeds, no load is in flight, and no request is left to come.
        """
        for row in self.active:
            if row.state == COMING and row.here_s <= self.now_s:
                row.ready = row.ask.found
                row.move(RUNNING, self.now_s)
        held = sum(row.pages for row in self.active)
        room = Room(self.pages - held, self.pages)
        turn = self.turns.admit(self.waiting, self.active, room, self.now_s)
        for job, keep in turn.leave:
            self._leave(cast(VirtualRow, job), keep)
        for job in turn.enter:
            self._enter(cast(VirtualRow, job))
        shares = self._shares()
        if shares:
            self._step(shares)
            return
        times = [row.here_s for row in self.active if row.state == COMING]
        times += [next_s] if next_s is not None else []
        if not times:
            raise StateError("nothing proceeds", "Let the scheduler's victims() and rank() agree")
        self.now_s = max(self.now_s, min(times))

    # ---- entering and leaving

    def _enter(self, row: VirtualRow) -> None:
        self.waiting.remove(row)
        self.active.append(row)
        if row.place < 0:
            row.place, row.queued_s = self._entered, self.now_s - row.arrived_s
            self._entered += 1
        if row.state == ASIDE:
            seconds = self.costs.back_s * row.held(self._size)
            self._moved(row, seconds, out=False)
            row.move(RUNNING, self.now_s)
            row.pages = row.held(self._size)
        elif row.ask.found:
            row.here_s = self.now_s + self.costs.load_s * row.ask.found
            row.pages = -(-row.ask.found // self._size)
            row.move(COMING, self.now_s)
        else:
            row.move(RUNNING, self.now_s)

    def _leave(self, row: VirtualRow, keep: bool) -> None:
        self.active.remove(row)
        self.waiting.append(row)
        row.preempted += 1
        if keep:
            self._moved(row, self.costs.out_s * row.pages, out=True)
        else:
            row.ready = 0
        row.pages = 0
        row.move(ASIDE if keep else WAITING, self.now_s)

    def _moved(self, row: VirtualRow, seconds: float, *, out: bool) -> None:
        self.now_s += seconds
        if self._worth is not None:
            self._worth.observe_move(row.held(self._size), seconds, out=out)

    # ---- steps

    def _shares(self) -> list[tuple[VirtualRow, int]]:
        """Return the tokens of the next step, after rows have left that must make room for it."""
        while True:
            shares = cast("list[tuple[VirtualRow, int]]", self.turns.share(self.active, self.now_s))
            held = sum(row.pages for row in self.active)
            grown = sum(-(-(row.ready + n) // self._size) - row.pages for row, n in shares)
            if held + grown <= self.pages:
                self.peak = max(self.peak, held + grown)
                return shares
            gone = self.turns.relieve(self.active, self.now_s)
            if gone is None:
                raise StateError(f"{shares[0][0]} does not fit alone", "Give the engine more pages")
            self._leave(cast(VirtualRow, gone[0]), gone[1])

    def _step(self, shares: Sequence[tuple[VirtualRow, int]]) -> None:
        tokens = sum(count for _, count in shares)
        seconds = self.costs.of_step(tokens, sum(row.ready for row, _ in shares))
        self.now_s += seconds
        self.steps += 1
        if self._worth is not None:
            self._worth.step(tokens, seconds)
        for row, count in shares:
            row.compute(count, self.now_s)
            row.pages = row.held(self._size)
            if row.made >= row.ask.new:
                self.active.remove(row)
                self.over.append(row)
                row.pages = 0
                row.move(OVER, self.now_s)

    def _result(self, rows: Sequence[VirtualRow]) -> ServingResult:
        served, latest_s = [], 0.0
        for row in sorted([row for row in rows if row.place >= 0], key=lambda row: row.place):
            latest_s = max(latest_s, row.arrived_s)
            served.append(row.served(latest_s - row.arrived_s))
        return ServingResult(
            scheduler=self.turns.scheduler.name,
            served=sorted(served, key=lambda one: one.number),
            seconds=self.now_s,
            steps=self.steps,
            preemptions=sum(row.preempted for row in rows),
            peak_pages=self.peak,
        )


def serve(
    asks: Sequence[VirtualRequest],
    scheduler: str | Scheduler = "fcfs",
    *,
    limits: Limits | None = None,
    pages: int = 1024,
    costs: StepCosts | None = None,
    **options: Any,
) -> ServingResult:
    """Serve a load in virtual time.

    Args:
        asks: The load.
        scheduler: A name in `flowkv.policy.scheduling.SCHEDULERS`, or a `Scheduler`.
        limits: Limits of a step; by default 16 rows, 256 tokens, pages of 16 tokens.
        pages: Pages of the device.
        costs: Durations of steps and moves.
        **options: Arguments of the scheduler's class.

    Raises:
        ConfigError: A request does not fit, or the scheduler or an option is unknown.
        StateError: The scheduler lets nothing proceed.
    """
    worth = Worth(page_bytes=1)
    turns = Turns(make_scheduler(scheduler, **options), limits or Limits(16, 256, 16), keeps=worth)
    return VirtualEngine(turns, pages, costs, worth).run(asks)
