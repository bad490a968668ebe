"""An engine without a model: turns are decided by `Turns`, and take what `Costs` says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from flowkv.core.errors import ConfigError, StateError
from flowkv.policy.scheduling import ASIDE, COMING, OVER, RUNNING, WAITING, Room, Turns
from flowkv.policy.scheduling.worth import Worth
from flowkv.sim.serving.costs import Costs
from flowkv.sim.serving.load import Ask
from flowkv.sim.serving.result import Result
from flowkv.sim.serving.row import Row


class VirtualEngine:
    """Serves a load in virtual time. Deterministic.

    Args:
        turns: Decides turns.
        pages: Pages of the device.
        costs: What everything takes.
        worth: Told what steps and moves took, in pages of one byte.

    Attributes:
        now_s: The time.
        waiting: Rows that wait or are set aside.
        active: Rows that are in.
        over: Rows that are over.
        steps: Steps so far.
        peak: Most pages that were held at once.
    """

    def __init__(
        self, turns: Turns, pages: int, costs: Costs | None = None, worth: Worth | None = None
    ) -> None:
        self.turns, self.pages, self.costs = turns, pages, costs or Costs()
        self._worth, self._size = worth, turns.limits.page_size
        self.now_s, self.steps, self.peak, self._entered = 0.0, 0, 0, 0
        self.waiting: list[Row] = []
        self.active: list[Row] = []
        self.over: list[Row] = []

    def run(self, asks: Sequence[Ask]) -> Result:
        """Serves everything.

        Raises:
            ConfigError: A request does not fit into the device at all.
            StateError: Nothing goes on though not everything is over.
        """
        for ask in asks:
            if -(-(ask.prompt + ask.limit) // self._size) > self.pages:
                raise ConfigError(f"{ask} does not fit {self.pages} pages", "Give the engine more")
        rows = [Row(number, ask) for number, ask in enumerate(asks)]
        ahead = sorted(rows, key=lambda row: (row.arrived_s, row.number), reverse=True)
        while ahead or self.waiting or self.active:
            if not self.waiting and not self.active:
                self.now_s = max(self.now_s, ahead[-1].arrived_s)
            while ahead and ahead[-1].arrived_s <= self.now_s:
                self.waiting.append(ahead.pop())
            self.turn(ahead[-1].arrived_s if ahead else None)
        return self._result(rows)

    def turn(self, next_s: float | None = None) -> None:
        """One turn.

        Args:
            next_s: When the next request comes, if any does.

        Raises:
            StateError: Nothing goes on, nothing is on its way, and nobody comes.
        """
        for row in self.active:
            if row.state == COMING and row.here_s <= self.now_s:
                row.ready = row.ask.found
                row.move(RUNNING, self.now_s)
        turn = self.turns.admit(self.waiting, self.active, self._room(), self.now_s)
        for job, keep in turn.leave:
            self._leave(cast(Row, job), keep)
        for job in turn.enter:
            self._enter(cast(Row, job))
        shares = self._shares()
        if shares:
            self._step(shares)
            return
        times = [row.here_s for row in self.active if row.state == COMING]
        times += [next_s] if next_s is not None else []
        if not times:
            raise StateError("nothing goes on", "Let the scheduler's victims() and rank() agree")
        self.now_s = max(self.now_s, min(times))

    # ---- who is in

    def _room(self) -> Room:
        held = sum(row.pages for row in self.active)
        return Room(self.pages - held, self.pages)

    def _enter(self, row: Row) -> None:
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

    def _leave(self, row: Row, keep: bool) -> None:
        self.active.remove(row)
        self.waiting.append(row)
        row.preempted += 1
        if keep:
            self._moved(row, self.costs.out_s * row.pages, out=True)
        else:
            row.ready = 0
        row.pages = 0
        row.move(ASIDE if keep else WAITING, self.now_s)

    def _moved(self, row: Row, seconds: float, *, out: bool) -> None:
        self.now_s += seconds
        if self._worth is not None:
            self._worth.moved(row.held(self._size), seconds, out=out)

    # ---- steps

    def _shares(self) -> list[tuple[Row, int]]:
        """What is computed now; whoever has to make room for that has left."""
        while True:
            shares = cast("list[tuple[Row, int]]", self.turns.share(self.active, self.now_s))
            held = sum(row.pages for row in self.active)
            grown = sum(self._growth(row, tokens) for row, tokens in shares)
            if held + grown <= self.pages:
                self.peak = max(self.peak, held + grown)
                return shares
            gone = self.turns.relieve(self.active, self.now_s)
            if gone is None:
                raise StateError(f"{shares[0][0]} does not fit alone", "Give the engine more pages")
            self._leave(cast(Row, gone[0]), gone[1])

    def _growth(self, row: Row, tokens: int) -> int:
        return -(-(row.ready + tokens) // self._size) - row.pages

    def _step(self, shares: Sequence[tuple[Row, int]]) -> None:
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

    def _result(self, rows: Sequence[Row]) -> Result:
        served, latest_s = [], 0.0
        for row in sorted([row for row in rows if row.place >= 0], key=lambda row: row.place):
            latest_s = max(latest_s, row.arrived_s)
            served.append(row.served(latest_s - row.arrived_s))
        return Result(
            scheduler=self.turns.scheduler.name,
            served=sorted(served, key=lambda one: one.number),
            seconds=self.now_s,
            steps=self.steps,
            preemptions=sum(row.preempted for row in rows),
            peak_pages=self.peak,
        )
