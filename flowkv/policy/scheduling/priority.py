"""By priority, with aging; the lowest priority makes room."""

from __future__ import annotations

import math
from collections.abc import Sequence

from flowkv.core.errors import ConfigError
from flowkv.policy.scheduling.base import Scheduler
from flowkv.policy.scheduling.job import Job


class Priority(Scheduler):
    """The highest priority first; requests that wait preempt rows of lower priority.

    A step of priority is worth `aging_s` seconds: a request is overtaken by those that are one step
    above it and came less than `aging_s` later. Its place in the order does not change with time.

    Args:
        aging_s: What a step of priority is worth; `math.inf`: low ones wait for as long as
            there are higher ones.
        top: The highest priority there is; what is above counts as that. Bounds how long
            anybody can be overtaken.

    Raises:
        ConfigError: `aging_s` is not above 0.
    """

    name = "priority"
    steady = True

    def __init__(self, aging_s: float = 30.0, *, top: int = 10) -> None:
        if not aging_s > 0:
            raise ConfigError(f"aging_s={aging_s}", "Pass seconds above 0")
        self.aging_s, self.top = float(aging_s), top

    def level(self, job: Job) -> int:
        """Its priority, not above `top`."""
        return min(job.priority, self.top)

    def rank(self, job: Job, now_s: float) -> tuple[float, ...]:
        """By when it came, `aging_s` sooner for each step of priority."""
        level = min(job.priority, self.top)
        if self.aging_s == math.inf:
            return (-level, job.number)
        return (job.arrived_s - self.aging_s * level, job.number)

    def victims(self, active: Sequence[Job], wanting: Job | None, now_s: float) -> Sequence[Job]:
        """The lowest priority first, of those whoever comes last in the order."""
        if wanting is not None:
            level = self.level(wanting)
            active = [job for job in active if job.priority < level]
        return sorted(
            active, key=lambda job: (-self.level(job), self.rank(job, now_s)), reverse=True
        )

    def bound_s(self, job: Job) -> float:
        """`aging_s` for each step that it is below the top."""
        steps = self.top - self.level(job)
        return steps * self.aging_s if steps else 0.0
