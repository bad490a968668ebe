"""One load, served by a virtual engine in which things go wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import msgspec

from flowkv.policy.scheduling import OVER, Job, Limits, Scheduler, Turns
from flowkv.sim.serving import Ask, Costs, Result, VirtualEngine
from flowkv.testing.scheduler_watch import Watch, require

_SLACK = 1e-6  # of what is added up in another order


class World(msgspec.Struct, frozen=True, kw_only=True):
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

    asks: Sequence[Ask]
    limits: Limits
    pages: int
    least: int
    shrinks: int
    costs: Costs
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
        self, make: Callable[[], Scheduler], world: World, turns: Callable[..., Turns] = Turns
    ) -> None:
        self.world, self._turn = world, 0
        self.watch = Watch(make, world.limits, self._keeps, turns)
        super().__init__(cast(Turns, self.watch), world.pages, world.costs)
        work = sum(ask.prompt + ask.new for ask in world.asks)
        self._most = 100 + 20 * work + 20 * len(world.asks)

    def run(self, asks: Sequence[Ask] = ()) -> Result:
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
