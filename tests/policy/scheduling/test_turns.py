"""Turns by hand: who enters, who leaves, who computes how much."""

from __future__ import annotations

import weakref

import pytest

from flowkv.policy.scheduling import (
    ASIDE,
    COMING,
    OVER,
    RUNNING,
    WAITING,
    FirstCome,
    Job,
    Limits,
    Priority,
    Room,
    Scheduler,
    Shortest,
    Turns,
)
from tests.inside import ConfigError, StateError

LIMITS = Limits(max_rows=4, token_budget=40, page_size=16, watermark=0.0)
PLENTY = Room(1000, 1000)


def waits(number: int, prompt: int = 16, limit: int = 100, **fields) -> Job:
    return Job(number, float(number), prompt, limit, **fields)


def runs(number: int, ready: int, missing: int = 1, *, limit: int = 100, **fields) -> Job:
    """A row; one token was made where it decodes."""
    made = 1 if missing == 1 else 0
    job = Job(number, float(number), ready + missing - made, limit, **fields)
    job.move(RUNNING, float(number))
    job.made, job.ready, job.pages = made, ready, -(-ready // 16)
    return job


def numbers(jobs) -> list[int]:
    return [job.number for job in jobs]


def turns(scheduler: Scheduler | None = None, **changes) -> Turns:
    return Turns(scheduler or FirstCome(), LIMITS._replace(**changes))


# --- who enters ----------------------------------------------------------------------------------


def test_they_enter_in_order_until_rows_are_full() -> None:
    waiting = [waits(number) for number in (5, 3, 4, 2)]
    turn = turns().admit(waiting, [runs(0, 20), runs(1, 20)], PLENTY, 9.0)
    assert numbers(turn.enter) == [2, 3] and not turn.leave


def test_nobody_passes_by_who_does_not_fit() -> None:
    turn = turns().admit([waits(1, 160), waits(2, 1)], [runs(0, 20)], Room(10, 100), 9.0)
    assert turn == ([], [])


def test_one_needs_its_prompt_and_a_page_to_go_on_but_no_more_than_it_can_ever_fill() -> None:
    row = [runs(0, 20)]
    for prompt, limit, pages in [(16, 100, 2), (17, 100, 3), (16, 1, 1), (10, 7, 1), (10, 8, 2)]:
        assert turns().admit([waits(1, prompt, limit)], row, Room(pages, 100), 9.0).enter
        assert not turns().admit([waits(1, prompt, limit)], row, Room(pages - 1, 100), 9.0).enter


def test_pages_that_others_hold_are_not_needed_again() -> None:
    job = waits(1, 160)
    job.shared = 10
    assert turns().admit([job], [runs(0, 20)], Room(1, 100), 9.0).enter


def test_whoever_is_alone_enters_whatever_the_count_says() -> None:
    turn = turns(watermark=0.5).admit([waits(1, 160), waits(2)], [], Room(0, 100), 9.0)
    assert numbers(turn.enter) == [1]


def test_a_share_of_the_pages_stays_free() -> None:
    row, job = [runs(0, 20)], waits(1)
    assert turns(watermark=0.1).admit([job], row, Room(12, 100), 9.0).enter
    assert not turns(watermark=0.1).admit([job], row, Room(11, 100), 9.0).enter


def test_nobody_enters_behind_prompts_that_take_the_whole_step() -> None:
    """What they compute, others with the same beginning find when they enter later."""
    prompt = runs(1, 32, missing=100)
    assert not turns(token_budget=100).admit([waits(2)], [prompt], PLENTY, 9.0).enter
    assert turns(token_budget=101).admit([waits(2)], [prompt], PLENTY, 9.0).enter
    first = turns(token_budget=100).admit([waits(0)], [prompt], PLENTY, 9.0)
    assert numbers(first.enter) == [0], "in front of it in the order"
    back = waits(2)
    back.move(RUNNING, 3.0)
    back.made, back.ready = 1, 16
    back.move(ASIDE, 4.0)
    assert turns(token_budget=100).admit([back], [prompt], PLENTY, 9.0).enter, "it decodes"
    many = [waits(number) for number in range(8)]  # of 16 tokens each
    assert numbers(turns(token_budget=40).admit(many, [], PLENTY, 9.0).enter) == [0, 1, 2]
    many[0].shared = 1  # others hold its page: it needs no computing, but for a token
    assert numbers(turns(token_budget=40).admit(many, [], PLENTY, 9.0).enter) == [0, 1, 2, 3]


def test_what_rows_have_still_to_compute_is_spoken_for() -> None:
    prompt = runs(0, 32, missing=320)  # 22 pages, 2 of them taken
    wide = turns(token_budget=321)
    assert not wide.admit([waits(1)], [prompt], Room(21, 100), 9.0).enter
    assert wide.admit([waits(1)], [prompt], Room(22, 100), 9.0).enter
    prompt.pages = 22  # reserved for what is on its way
    assert wide.admit([waits(1)], [prompt], Room(2, 100), 9.0).enter


def test_a_row_that_goes_on_in_its_last_page_needs_none_and_at_its_end_one() -> None:
    assert [turns().claim(runs(0, ready)) for ready in (15, 16, 17, 31, 32)] == [0, 1, 0, 0, 1]


def test_who_was_preempted_comes_back_where_the_others_can_grow() -> None:
    job, rows = waits(9, 20), [runs(0, 20), runs(1, 20)]
    job.move(RUNNING, 1.0)
    job.made, job.preempted, job.ready = 2, 1, 21
    job.move(ASIDE, 2.0)
    assert not turns().admit([job], rows, Room(4, 100), 9.0).enter
    assert turns().admit([job], rows, Room(5, 100), 9.0).enter


def test_the_order_follows_what_changed_while_nobody_looked() -> None:
    short, long = waits(0, 16, 50), waits(1, 16, 60)
    one = Turns(Shortest(), LIMITS._replace(max_rows=1))
    assert numbers(one.admit([short, long], [], PLENTY, 9.0).enter) == [0]
    long.made, long.preempted = 40, 1
    long.move(RUNNING, 9.0)
    long.move(WAITING, 9.0)
    assert numbers(one.admit([short, long], [], PLENTY, 9.0).enter) == [1]


# --- who leaves ----------------------------------------------------------------------------------


def test_the_lowest_priority_makes_room_and_among_equals_whoever_came_last() -> None:
    rows = [runs(0, 64, priority=0), runs(1, 64, priority=-1), runs(2, 64, priority=-1)]
    rows += [runs(3, 64, priority=3)]
    turn = turns(Priority()).admit([waits(4, priority=1)], rows, PLENTY, 9.0)
    assert [(job.number, kept) for job, kept in turn.leave] == [(2, True)]
    assert numbers(turn.enter) == [4]


def test_equals_are_not_preempted() -> None:
    rows = [runs(number, 64, priority=1) for number in range(4)]
    assert turns(Priority()).admit([waits(4, priority=1)], rows, PLENTY, 9.0) == ([], [])


def test_who_is_old_enough_is_not_preempted() -> None:
    rows = [runs(0, 64) for _ in range(4)]
    one = turns(Priority(aging_s=30.0))
    young, old = Job(7, 29.0, 16, 100, priority=1), Job(8, 31.0, 16, 100, priority=1)
    assert one.admit([young], rows, PLENTY, 40.0).leave
    assert not one.admit([old], rows, PLENTY, 40.0).leave


def test_nobody_leaves_in_vain() -> None:
    rows = [runs(0, 159, priority=5), runs(1, 63), runs(2, 63)]  # 10, 4 and 4 pages
    one = turns(Priority())
    assert one.admit([waits(3, 16 * 9, priority=1)], rows, Room(1, 19), 9.0) == ([], [])
    turn = one.admit([waits(3, 16 * 8, priority=1)], rows, Room(1, 19), 9.0)
    assert sorted(numbers(job for job, _ in turn.leave)) == [1, 2]


def test_no_more_leave_than_have_to() -> None:
    rows = [runs(0, 160), runs(1, 16), runs(2, 16)]
    turn = turns(Priority()).admit([waits(3, 16 * 5, priority=1)], rows, Room(0, 12), 9.0)
    assert numbers(job for job, _ in turn.leave) == [0]  # 2 and 1 come first, and are not enough


def test_who_is_back_is_left_alone_for_twice_as_long_each_time() -> None:
    row = runs(0, 64, limit=500)
    one = turns(Priority(), max_rows=1, grace=8)
    for times, made in [(1, 8), (2, 16), (3, 32), (5, 128), (50, 128)]:
        row.preempted, row.back_at, row.made = times, 5, 5 + made - 1
        assert not one.admit([waits(1, priority=1)], [row], PLENTY, 9.0).leave
        row.made += 1
        assert one.admit([waits(1, priority=1)], [row], PLENTY, 9.0).leave


def test_what_is_on_its_way_is_dropped_and_the_rest_as_it_is_worth() -> None:
    coming, worth = runs(0, 64), runs(1, 64)
    coming.move(COMING, 1.0)
    one = Turns(Priority(), LIMITS._replace(max_rows=1), keeps=lambda job: job.pages > 3)
    for row, kept in [(coming, False), (worth, True), (runs(2, 48), False)]:
        turn = one.admit([waits(3, priority=1)], [row], PLENTY, 9.0)
        assert turn.leave == [(row, kept)]


def test_a_victim_that_is_nobody_there_is_refused() -> None:
    class Strange(Priority):
        def victims(self, active, wanting, now_s):
            return [waits(99)]

    with pytest.raises(StateError, match="victims"):
        turns(Strange()).relieve([runs(0, 64), runs(1, 64)], 9.0)


# --- who makes room for those in progress --------------------------------------------------------


def test_relief_spares_the_first_and_ends() -> None:
    rows, gone = [runs(number, 64) for number in range(5)], []
    while (one := turns().relieve(rows, 9.0)) is not None:
        rows.remove(one[0])
        gone.append(one[0].number)
    assert gone == [4, 3, 2, 1]


def test_relief_takes_the_lowest_priority() -> None:
    rows = [runs(0, 64, priority=2), runs(1, 64), runs(2, 64, priority=1)]
    one = turns(Priority()).relieve(rows, 9.0)
    assert one is not None and one[0].number == 1


def test_relief_takes_somebody_who_has_something_to_give() -> None:
    rows = [runs(0, 64), runs(1, 64), runs(2, 16)]
    rows[2].pages = 0  # others hold them too
    one = turns().relieve(rows, 9.0)
    assert one is not None and one[0].number == 1


def test_relief_finds_somebody_even_if_the_scheduler_does_not() -> None:
    class Kind(FirstCome):
        def victims(self, active, wanting, now_s):
            return []

    one = turns(Kind()).relieve([runs(0, 64), runs(1, 64)], 9.0)
    assert one is not None and one[0].number == 1


# --- tokens --------------------------------------------------------------------------------------


def shares(active, **changes) -> dict[int, int]:
    return {job.number: count for job, count in turns(**changes).share(active, 9.0)}


def test_decodes_come_first_and_prompts_share_the_rest() -> None:
    rows = [runs(0, 16, missing=100), runs(1, 20), runs(2, 20)]
    assert shares(rows) == {1: 1, 2: 1, 0: 32 + 6}  # nobody else could use what ends no page
    assert list(shares(rows)) == [1, 2, 0]


def test_a_chunk_ends_with_a_page_where_another_can_use_what_that_leaves() -> None:
    rows = [runs(0, 8, missing=100), runs(1, 0, missing=5), runs(2, 0, missing=60)]
    assert shares(rows, token_budget=30) == {0: 24 + 1, 1: 5}
    assert shares(rows, token_budget=29) == {0: 24, 1: 5}


def test_the_first_prompt_goes_on_even_if_less_than_a_page_is_left() -> None:
    rows = [runs(0, 0, missing=100), runs(1, 0, missing=5)]
    assert shares(rows, token_budget=10) == {0: 10}
    rows[0].ready = 10
    assert shares(rows, token_budget=11) == {0: 6, 1: 5}
    assert shares(rows, token_budget=10) == {0: 10}


def test_prompts_go_in_order_and_the_first_ends_first() -> None:
    rows = [runs(1, 0, missing=50), runs(0, 0, missing=30)]
    assert shares(rows) == {0: 30, 1: 10}
    assert shares(rows, token_budget=64) == {0: 30, 1: 34}


def test_more_decodes_than_tokens_leave_a_page_for_prompts() -> None:
    rows = [runs(number, 20) for number in range(30)] + [runs(30, 0, missing=50)]
    given = shares(rows, token_budget=20)
    assert given == {**{number: 1 for number in range(10)}, 30: 10}
    given = shares(rows, token_budget=40)
    assert given == {**{number: 1 for number in range(24)}, 30: 16}
    assert len(shares(rows[:30], token_budget=20)) == 20


def test_a_prompt_that_needs_less_than_a_page_leaves_the_rest_to_decodes() -> None:
    rows = [runs(number, 20) for number in range(30)] + [runs(30, 0, missing=3)]
    given = shares(rows, token_budget=30)
    assert given == {**{number: 1 for number in range(27)}, 30: 3}


def test_who_is_coming_or_needs_nothing_gets_nothing() -> None:
    coming, done = runs(0, 16, missing=50), runs(1, 16, missing=2)
    coming.move(COMING, 1.0)
    done.ready += 2
    assert shares([coming, done, runs(2, 20)]) == {2: 1}
    assert shares([]) == {}


# --- jobs and limits -----------------------------------------------------------------------------


def test_a_job_knows_how_long_it_waited() -> None:
    job = Job(0, 1.0, 10, 5)
    job.move(COMING, 3.0)
    job.move(RUNNING, 4.0)
    job.made = 2
    job.move(ASIDE, 7.0)
    assert (job.waited_s, job.back_at) == (2.0, 0)
    job.move(RUNNING, 9.5)
    assert (job.waited_s, job.back_at, job.since_s, job.moves) == (4.5, 2, 9.5, 4)
    job.move(OVER, 11.0)
    assert job.waited_s == 4.5 and "over" in repr(job)


def test_what_remains_of_a_job() -> None:
    job = runs(0, 20, missing=1, limit=50)
    assert (job.missing, job.remaining) == (1, 1 + 49)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"max_rows": 0}, {"token_budget": 0}, {"page_size": 0}, {"grace": 0}),
        *({"watermark": 1.0}, {"watermark": -0.1}),
    ],
)
def test_limits_are_checked(wrong) -> None:
    with pytest.raises(ConfigError):
        turns(**wrong)


def test_turns_hold_no_request() -> None:
    class Seen(Job):
        __slots__ = ("__weakref__",)

    one, waiting = turns(max_rows=1), [Seen(number, 0.0, 16, 100) for number in range(3)]
    seen = [weakref.ref(job) for job in waiting]
    one.admit(waiting, [], PLENTY, 9.0)
    del waiting
    assert [ref() for ref in seen] == [None] * 3


def test_an_order_is_asked_for_once_while_nothing_moves() -> None:
    class Counting(Shortest):
        asked = 0

        def rank(self, job, now_s):
            self.asked += 1
            return super().rank(job, now_s)

    scheduler, rows = Counting(), [runs(0, 20)]
    one, waiting = turns(scheduler), [waits(number, 900) for number in range(1, 50)]
    for _ in range(20):
        assert not one.admit(waiting, rows, Room(0, 100), 9.0).enter
    assert scheduler.asked == 49
    waiting.append(waits(50, 900))
    one.admit(waiting, rows, Room(0, 100), 9.0)
    assert scheduler.asked == 50
