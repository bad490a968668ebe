"""First come, first served."""

from __future__ import annotations

from flowkv.policy.scheduling.base import Scheduler
from flowkv.policy.scheduling.job import Job


class FirstCome(Scheduler):
    """In order of submission; whoever came last makes room."""

    name = "fcfs"
    steady = True
    preempts = False

    def rank(self, job: Job, now_s: float) -> tuple[float, ...]:
        """By submission."""
        return (job.number,)

    def bound_s(self, job: Job) -> float:
        """Nobody overtakes anybody."""
        return 0.0
