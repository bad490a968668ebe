"""Orders, victims and bounds of the catalogue's schedulers, by hand."""

from __future__ import annotations

import math

import pytest

from flowkv.policy.scheduling import (
    RUNNING,
    SCHEDULERS,
    FirstCome,
    Job,
    Priority,
    Scheduler,
    Shortest,
    make_scheduler,
)
from tests.inside import ConfigError


def job(number: int, arrived_s: float = 0.0, prompt: int = 32, limit: int = 64, **fields) -> Job:
    return Job(number, arrived_s, prompt, limit, **fields)


def order(scheduler: Scheduler, jobs) -> list[int]:
    return [one.number for one in sorted(jobs, key=lambda one: scheduler.rank(one, 1000.0))]


def test_first_come_looks_at_the_number_alone() -> None:
    jobs = [job(2, 0.0), job(0, 5.0, limit=1000), job(1, 5.0, priority=9)]
    assert order(FirstCome(), jobs) == [0, 1, 2]
    assert FirstCome().bound_s(jobs[1]) == 0.0
    assert FirstCome().victims(jobs, job(7), 9.0) == ()
    assert [one.number for one in FirstCome().victims(jobs, None, 9.0)] == [2, 1, 0]


# --- shortest ------------------------------------------------------------------------------------


def test_among_requests_of_one_age_the_least_work_is_first() -> None:
    jobs = [job(0, limit=64), job(1, limit=63), job(2, prompt=63, limit=63), job(3, limit=1000)]
    assert order(Shortest(), jobs) == [1, 2, 0, 3]


def test_work_is_what_remains() -> None:
    half = job(0, prompt=320, limit=100)
    assert Shortest().work(half) == 110.0
    half.ready, half.made = 160, 20
    assert Shortest().work(half) == 80 + (320 + 20 - 160) / 32
    half.ready = 339
    assert Shortest().work(half) == 80 + 1 / 32


def test_a_request_is_due_the_sooner_the_less_it_takes_and_never_later_than_the_bound() -> None:
    one = Shortest(40.0, typical=65.0)
    assert one.rank(job(3, 7.0), 9.0) == (7.0 + 20.0, 3)  # 64 + 32 / 32 is typical
    assert one.bound_s(job(3, 7.0)) == 20.0
    huge = job(0, limit=10**9)
    assert 39.9 < one.bound_s(huge) < 40.0
    assert order(one, [huge, job(1, 39.0, 1, 1)]) == [1, 0]
    assert order(one, [huge, job(1, 40.0, 1, 1)]) == [0, 1]


def test_shortest_preempts_nobody_unless_asked() -> None:
    rows = [job(0, limit=1000), job(1, limit=10)]
    assert not Shortest().preempts and list(Shortest().victims(rows, job(2, limit=1), 9.0)) == []
    assert [one.number for one in Shortest().victims(rows, None, 9.0)] == [0, 1]


def test_shortest_preempts_those_with_many_times_the_work() -> None:
    one, wanting = Shortest(times=4.0), job(9, prompt=32, limit=9)  # 10 of work
    rows = [job(0, limit=39), job(1, limit=40), job(2, limit=100), job(3, 100.0, limit=60)]
    assert one.preempts
    assert [row.number for row in one.victims(rows, wanting, 9.0)] == [3, 2, 1]


@pytest.mark.parametrize(
    "wrong",
    [{"aging_s": 0}, {"aging_s": math.inf}, {"typical": 0}, {"typical": math.nan}, {"times": 0.5}],
)
def test_options_of_shortest_are_checked(wrong) -> None:
    with pytest.raises(ConfigError):
        Shortest(**wrong)


# --- priority ------------------------------------------------------------------------------------


def test_a_step_of_priority_is_worth_so_many_seconds() -> None:
    one = Priority(30.0)
    jobs = [job(0, 0.0), job(1, 29.0, priority=1), job(2, 31.0, priority=1), job(3, 58, priority=2)]
    assert order(one, jobs) == [3, 1, 0, 2]
    assert one.bound_s(jobs[0]) == 300.0 and one.bound_s(jobs[3]) == 240.0


def test_equals_go_by_submission() -> None:
    assert order(Priority(), [job(1, 2.0), job(0, 1.0), job(2, 2.0)]) == [0, 1, 2]


def test_there_is_a_top() -> None:
    one = Priority(30.0, top=2)
    assert order(one, [job(0, 0.0, priority=2), job(1, 1.0, priority=99)]) == [0, 1]
    assert one.bound_s(job(0, priority=99)) == 0.0
    rows = [job(0, priority=2), job(1, priority=50)]
    assert one.victims(rows, job(2, priority=99), 9.0) == []


def test_priorities_can_be_strict() -> None:
    one = Priority(math.inf)
    assert order(one, [job(0, 0.0), job(1, 1e9, priority=1), job(2, 5.0, priority=1)]) == [1, 2, 0]
    assert one.bound_s(job(0)) == math.inf and one.bound_s(job(0, priority=10)) == 0.0


def test_the_lowest_go_first_and_equals_only_where_somebody_has_to() -> None:
    rows = [job(0, 0.0, priority=1), job(1, 1.0), job(2, 2.0, priority=1), job(3, 3.0, priority=2)]
    rows += [job(4, 90.0, priority=1)]  # behind 1 in the order, but of a higher priority
    one = Priority()
    assert [row.number for row in one.victims(rows, job(9, priority=2), 9.0)] == [1, 4, 2, 0]
    assert [row.number for row in one.victims(rows, job(9, priority=1), 9.0)] == [1]
    assert [row.number for row in one.victims(rows, None, 9.0)] == [1, 4, 2, 0, 3]


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan])
def test_options_of_priority_are_checked(wrong: float) -> None:
    with pytest.raises(ConfigError):
        Priority(wrong)


# --- by name -------------------------------------------------------------------------------------


def test_schedulers_by_name() -> None:
    assert make_scheduler("fcfs").name == "fcfs"
    assert make_scheduler("shortest", aging_s=5.0).bound_s(job(0)) < 5.0
    made = Priority()
    assert make_scheduler(made) is made
    assert set(SCHEDULERS) == {"fcfs", "shortest", "priority"}


@pytest.mark.parametrize(
    ("wrong", "options", "says"),
    [
        *(("shortst", {}, "Did you mean 'shortest'"), ("zzz", {}, "fcfs, shortest, priority")),
        *(("shortest", {"ageing": 1}, "ageing"), (Priority(), {"top": 1}, "already")),
        *((7, {}, "7 is no scheduler"), (Priority, {}, "is no scheduler")),
    ],
)
def test_what_is_no_scheduler_is_refused(wrong, options, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_scheduler(wrong, **options)


def test_a_row_that_runs_ranks_by_what_it_has_left() -> None:
    row, new = job(0, limit=100), job(1, limit=60)
    assert order(Shortest(), [row, new]) == [1, 0]
    row.move(RUNNING, 1.0)
    row.made, row.ready = 60, 91
    assert order(Shortest(), [row, new]) == [0, 1]
