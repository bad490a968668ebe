"""What a scheduler knows of one request."""

from __future__ import annotations

import math

WAITING, COMING, RUNNING, ASIDE, OVER = range(5)
"""Where a request is: not begun or begun anew; admitted, part of its prefix on its way; in every
step; preempted with its pages in host memory; finished, failed or cancelled."""


class Job:
    """One request, as schedulers see it. Executors move it; policies only read it.

    Attributes:
        number: Order of submission, unique in an engine.
        arrived_s: When it was submitted.
        prompt: Tokens of the prompt.
        limit: Most new tokens.
        priority: Larger is more urgent.
        deadline_s: When it is of no use any more; `math.inf` without one.
        state: `WAITING`, `COMING`, `RUNNING`, `ASIDE` or `OVER`; changed by `move` alone.
        since_s: Since when it has been in this state.
        ready: Tokens whose K and V are there.
        made: New tokens so far; they are part of what is to be computed.
        pages: Device pages that nobody else holds and that it would give back, those included
            that are reserved for what is on its way.
        shared: While it waits, pages of its prefix that rows in progress hold, as far as anybody
            has looked: it needs no room for these.
        waited_s: Time spent waiting or set aside before `since_s`.
        preempted: How often it was preempted.
        back_at: `made` when it entered last.
        moves: How often its state changed.
    """

    __slots__ = (
        "arrived_s",
        "back_at",
        "deadline_s",
        "limit",
        "made",
        "moves",
        "number",
        "pages",
        "preempted",
        "priority",
        "prompt",
        "ready",
        "shared",
        "since_s",
        "state",
        "waited_s",
    )

    def __init__(
        self,
        number: int,
        arrived_s: float,
        prompt: int,
        limit: int,
        *,
        priority: int = 0,
        deadline_s: float = math.inf,
    ) -> None:
        self.number, self.arrived_s = number, arrived_s
        self.prompt, self.limit, self.priority = prompt, limit, priority
        self.deadline_s = deadline_s
        self.state, self.since_s = WAITING, arrived_s
        self.ready = self.made = self.pages = self.shared = 0
        self.preempted = self.back_at = self.moves = 0
        self.waited_s = 0.0

    @property
    def missing(self) -> int:
        """Tokens that are known and not computed; 1 for a row that decodes."""
        return self.prompt + self.made - self.ready

    @property
    def remaining(self) -> int:
        """Tokens that are still to be computed, at most, the new ones included."""
        return self.missing + self.limit - self.made

    def move(self, state: int, now_s: float) -> None:
        """Enters another state. Who preempts it counts that in `preempted`."""
        if self.state in (WAITING, ASIDE):
            self.waited_s += now_s - self.since_s
            self.back_at = self.made
        self.state, self.since_s = state, now_s
        self.moves += 1

    def __repr__(self) -> str:
        name = ("waiting", "coming", "running", "aside", "over")[self.state]
        return f"<Job {self.number} {name}: {self.ready} of {self.prompt}+{self.made} tokens>"
