"""Schedulers: who is served next, and who has to make room.

A scheduler is pure like every policy here: no I/O, no clock of its own, no randomness, no state
that its answers depend on beside what it is shown. The engine (`flowkv.engine`) and the simulator
(`flowkv.sim.serving`) drive the same objects through the same mechanism (`turns.Turns`), which sees
to it that no order starves anybody: nobody passes by a request that waits in front, whoever ranks
first is never preempted, and who was preempted is left alone for a while once it is back.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from flowkv.policy.scheduling.job import Job


class Scheduler(ABC):
    """An order of requests, and a choice of victims.

    Attributes:
        name: Its name.
        steady: Whether the rank of a request stays the same while its state does, whatever the
            time, and whatever of its prefix others hold (`shared`): it is asked once then, rather
            than in every turn.
        preempts: Whether `victims` may name anybody for a request that waits; False saves asking.
    """

    name: ClassVar[str]
    steady: ClassVar[bool] = False
    preempts: bool = True

    @abstractmethod
    def rank(self, job: Job, now_s: float) -> tuple[float, ...]:
        """Sort key of a request: the smallest is served first. Ends with its number: no ties."""

    def victims(self, active: Sequence[Job], wanting: Job | None, now_s: float) -> Sequence[Job]:
        """Whom to preempt, as far as need be, the first first.

        Whoever ranks before `wanting` is not preempted for it, even if named.

        Args:
            active: Rows that could go, never empty; `wanting` is not among them.
            wanting: Who cannot enter for lack of room or rows; None if a row in progress cannot
                grow, in which case somebody has to go.
            now_s: The time.

        Returns:
            Some of `active`, each once; none if `wanting` has to wait.
        """
        if wanting is not None:
            return ()
        return sorted(active, key=lambda job: self.rank(job, now_s), reverse=True)

    def bound_s(self, job: Job) -> float:
        """How far behind this request others may be submitted and still be served before it.

        Whatever is submitted later than `job.arrived_s + bound_s(job)` ranks behind it at all
        times. `math.inf` promises nothing.
        """
        return math.inf
