"""Every scheduler of the catalogue keeps every rule, whatever it meets."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from flowkv.policy.scheduling import (
    SCHEDULERS,
    FirstCome,
    Job,
    Priority,
    Scheduler,
    Shortest,
    Turns,
)
from flowkv.testing import check_scheduler
from tests.policy.scheduling.proven import check_turns


class Deadline(Scheduler):
    """A user's own: the earliest deadline first."""

    name = "deadline"
    steady = True
    preempts = False

    def rank(self, job: Job, now_s: float) -> tuple[float, ...]:
        return (min(job.deadline_s, job.arrived_s + 60.0), job.number)

    def bound_s(self, job: Job) -> float:
        return 60.0


class LeastSlack(Scheduler):
    """A user's own whose order changes with time: whoever has waited longest for its size."""

    name = "least-slack"

    def rank(self, job: Job, now_s: float) -> tuple[float, ...]:
        return (-(now_s - job.arrived_s) / (job.prompt + job.limit), job.number)

    def victims(self, active, wanting, now_s):
        return sorted(active, key=lambda job: self.rank(job, now_s), reverse=True)


SORTS: dict[str, Callable[[], Scheduler]] = {
    **SCHEDULERS,
    "shortest, short bound": lambda: Shortest(0.5, typical=8),
    "shortest, preempting": lambda: Shortest(5.0, times=1),
    "priority, short bound": lambda: Priority(1.0),
    "priority, strict": lambda: Priority(math.inf),
    "deadline": Deadline,
    "least slack": LeastSlack,
}


@pytest.mark.parametrize("sort", SORTS)
def test_keeps_the_rules(sort: str) -> None:
    check_scheduler(SORTS[sort], max_examples=12)
    check_turns(Turns, SORTS[sort], max_examples=12)


@pytest.mark.deep
@pytest.mark.parametrize("sort", SORTS)
def test_keeps_the_rules_for_long(sort: str) -> None:
    check_scheduler(SORTS[sort], max_examples=3000)
    check_turns(Turns, SORTS[sort], max_examples=3000)


def test_the_catalogue_is_made_of_these() -> None:
    assert [type(make()) for make in SCHEDULERS.values()] == [FirstCome, Shortest, Priority]
    assert all(make().name == name for name, make in SCHEDULERS.items())
