"""A request in a virtual engine."""

from __future__ import annotations

from flowkv.policy.scheduling import Job
from flowkv.sim.serving.load import Ask
from flowkv.sim.serving.result import Served


class Row(Job):
    """A job, and what is measured of it.

    Attributes:
        ask: What was asked.
        here_s: When its prefix is there, while it is `COMING`.
        place: How many were admitted before it was first; -1 until then.
        queued_s: See `Served`.
        first_s: When its first token was made.
        last_s: When its latest was.
        gap_s: See `Served`.
        computed: See `Served`.
    """

    __slots__ = ("ask", "computed", "first_s", "gap_s", "here_s", "last_s", "place", "queued_s")

    def __init__(self, number: int, ask: Ask) -> None:
        super().__init__(
            number,
            ask.arrived_s,
            ask.prompt,
            ask.limit,
            priority=ask.priority,
            deadline_s=ask.deadline_s,
        )
        self.ask, self.place, self.computed = ask, -1, 0
        self.here_s = self.queued_s = self.first_s = self.last_s = self.gap_s = 0.0

    def held(self, page_size: int) -> int:
        """Pages of what is there."""
        return -(-self.ready // page_size)

    def compute(self, tokens: int, now_s: float) -> None:
        """So many tokens are computed; a new one is made where that is all that is known."""
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

    def served(self, overtaken_s: float) -> Served:
        """What became of it, once it is over."""
        further = self.made - 1
        return Served(
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
