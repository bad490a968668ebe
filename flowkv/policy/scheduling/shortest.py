"""Shortest remaining work first, with aging."""

from __future__ import annotations

import math
from collections.abc import Sequence

from flowkv.core.errors import ConfigError
from flowkv.policy.scheduling.base import Scheduler
from flowkv.policy.scheduling.job import Job

_PROMPT = 1 / 32  # of a new token, which takes a step, what a token of a prompt takes of one


class Shortest(Scheduler):
    """Shortest remaining work first; nobody is overtaken by what came `aging_s` later.

    Every request has a time when it is due: `arrived_s + aging_s * work / (work + typical)`, `work`
    being the new tokens it may still make, and a small share of those of its prompt. Among requests
    of about the same age that is the order of their work, which makes the mean completion least
    (Smith 1956; Schrage 1968 for preemption). As `work / (work + typical)` is below 1, whatever is
    submitted `aging_s` later than a request is due after it: that is the bound. The due time of a
    request that waits does not change, so that its place in the order is found once.

    Args:
        aging_s: The bound, in seconds; above 0.
        typical: New tokens of a typical answer: such a request may be overtaken by negligible ones
            for half of `aging_s`.
        times: Preempt a row for a request that waits if its work is more than this many times the
            other's. None preempts nobody for that: where moving a row takes as long as a few steps,
            which hold up everybody, the mean gets worse (simulated), and else hardly better.

    Raises:
        ConfigError: One of these is out of range.
    """

    name = "shortest"
    steady = True

    def __init__(
        self, aging_s: float = 30.0, *, typical: float = 256.0, times: float | None = None
    ) -> None:
        if not (0 < aging_s < math.inf and 0 < typical < math.inf):
            raise ConfigError(
                f"aging_s={aging_s}, typical={typical}", "Pass finite numbers above 0"
            )
        if times is not None and not times >= 1:
            raise ConfigError(f"times={times}: would preempt shorter ones", "Pass 1 or more")
        self.aging_s, self.typical, self.times = float(aging_s), float(typical), times
        self.preempts = times is not None

    def work(self, job: Job) -> float:
        """What a request still takes, in new tokens."""
        left = job.limit - job.made
        return left + _PROMPT * (job.prompt + job.made - job.ready)

    def rank(self, job: Job, now_s: float) -> tuple[float, ...]:
        """By when it is due."""
        work = self.work(job)
        return (job.arrived_s + self.aging_s * work / (work + self.typical), job.number)

    def victims(self, active: Sequence[Job], wanting: Job | None, now_s: float) -> Sequence[Job]:
        """Those due last; for a request that waits, those with much more work than it has."""
        if wanting is not None:
            least = math.inf if self.times is None else self.times * self.work(wanting)
            active = [job for job in active if self.work(job) > least]
        return sorted(active, key=lambda job: self.rank(job, now_s), reverse=True)

    def bound_s(self, job: Job) -> float:
        """Less than `aging_s`, the less the shorter it is."""
        work = job.limit + _PROMPT * job.prompt  # at most: a new token counts less once it is made
        return self.aging_s * work / (work + self.typical)
