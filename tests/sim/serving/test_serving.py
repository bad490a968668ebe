"""The virtual engine: timelines by hand, and what schedulers are worth on a mixed load."""

from __future__ import annotations

import pytest
from msgspec import structs

from flowkv.policy.scheduling import FirstCome, Job, Limits, Priority, Shortest
from flowkv.sim.serving import StepCosts, VirtualRequest, mixed, serve
from tests.inside import ConfigError, StateError

ONE = StepCosts(step_s=1.0, token_s=0.0, context_s=0.0, out_s=0.25, back_s=0.5, load_s=0.1)
LIMITS = Limits(max_rows=2, token_budget=8, page_size=4, watermark=0.0, grace=1)


def ask(arrived_s: float = 0.0, prompt: int = 4, new: int = 3, **fields) -> VirtualRequest:
    return VirtualRequest(arrived_s=arrived_s, prompt=prompt, new=new, **{"limit": new, **fields})


def test_a_request_by_hand() -> None:
    result = serve([ask(2.0, prompt=12, new=3)], limits=LIMITS, costs=ONE)
    one = result.served[0]
    # 8 tokens, then 4 and the first new one, then two more
    assert (one.queued_s, one.ttft_s, one.tpot_s, one.seconds) == (0.0, 2.0, 1.0, 4.0)
    assert (one.computed, one.gap_s, result.steps, result.seconds) == (14, 1.0, 4, 6.0)
    assert result.peak_pages == 4 and result.label == "simulated"


def test_a_step_takes_what_is_in_it() -> None:
    costs = StepCosts(step_s=1.0, token_s=0.1, context_s=0.01)
    result = serve([ask(prompt=4, new=2)], limits=LIMITS, costs=costs)
    assert result.seconds == pytest.approx(1.0 + 0.4 + 1.0 + 0.1 + 0.04)


def test_a_third_request_waits_for_a_row() -> None:
    result = serve([ask(), ask(), ask(0.5)], limits=LIMITS, costs=ONE)
    assert [one.queued_s for one in result.served] == [0.0, 0.0, 2.5]
    assert [one.seconds for one in result.served] == [3.0, 3.0, 5.5]
    assert result.mean() == pytest.approx(11.5 / 3) and result.percentile(100) == 5.5


def test_prompts_ride_beside_decodes() -> None:
    result = serve([ask(new=6), ask(1.0, prompt=14, new=1)], limits=LIMITS, costs=ONE)
    # 7 of its tokens a step beside one of the other's: a page, and what nobody else could use
    assert [one.seconds for one in result.served] == [6.0, 2.0]
    assert result.served[0].gap_s == 1.0


def test_a_known_prefix_comes_while_others_go_on() -> None:
    result = serve([ask(new=6), ask(prompt=12, new=1, found=10)], limits=LIMITS, costs=ONE)
    # there after 1.0 s, so that the two tokens that are left ride in the second step
    assert [one.ttft_s for one in result.served] == [1.0, 2.0]
    assert result.served[1].computed == 2


def test_nothing_to_do_but_to_wait_for_a_prefix() -> None:
    result = serve([ask(prompt=12, new=1, found=10)], limits=LIMITS, costs=ONE)
    assert result.served[0].ttft_s == 1.0 + 1.0


def test_a_row_is_moved_out_and_back() -> None:
    low, high = ask(prompt=4, new=4), ask(1.0, prompt=4, new=2, priority=1)
    limits = LIMITS._replace(max_rows=1)
    result = serve([low, high], "priority", limits=limits, costs=ONE)
    # 1 step; a page goes out; 2 steps; it comes back; 3 steps
    assert [one.seconds for one in result.served] == [1 + 0.25 + 2 + 0.5 + 3, 0.25 + 2]
    assert [one.preempted for one in result.served] == [1, 0] and result.preemptions == 1
    assert result.served[0].gap_s == 0.25 + 2 + 0.5 + 1
    assert result.served[0].waited_s == 2.5  # from the end of its move to the beginning of the next


def test_a_row_is_computed_again_where_that_is_known_to_be_cheaper() -> None:
    slow = StepCosts(step_s=0.01, token_s=0.001, out_s=10.0, back_s=10.0)
    low, high = ask(prompt=64, new=60), ask(0.2, new=2, priority=1)
    later = [ask(900.0, prompt=64, new=60), ask(900.2, new=2, priority=1)]
    limits = Limits(max_rows=1, token_budget=32, page_size=4)
    result = serve([low, high, *later], "priority", limits=limits, costs=slow)
    once, again = 64 + 60 - 1, result.served[2].computed
    assert [one.preempted for one in result.served] == [1, 0, 1, 0]
    assert result.served[0].computed == once  # it was kept, as nothing was known
    assert again > once + 64 and result.served[2].seconds < 2.0


def test_rows_that_grow_make_room_and_end() -> None:
    asks = [ask(0.0, prompt=4, new=40) for _ in range(4)]
    limits = Limits(max_rows=4, token_budget=16, page_size=4)
    result = serve(asks, limits=limits, pages=12, costs=ONE)
    assert result.peak_pages <= 12 and result.preemptions > 0
    assert [one.computed >= 43 for one in result.served] == [True] * 4
    first = result.served[0]
    assert first.preempted == 0 and first.seconds == min(one.seconds for one in result.served)


def test_a_request_that_never_fits_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not fit"):
        serve([ask(prompt=100)], limits=LIMITS, pages=20)


def test_an_engine_that_gets_stuck_says_so() -> None:
    from flowkv.policy.scheduling import Turn, Turns
    from flowkv.sim.serving import VirtualEngine

    class Closed(Turns):
        def admit(self, waiting, active, room, now_s):
            return Turn([], [])

    with pytest.raises(StateError, match="nothing proceeds"):
        VirtualEngine(Closed(FirstCome(), LIMITS), 20, ONE).run([ask()])


def test_who_was_passed_by_whom() -> None:
    asks = [ask(0.0, new=20), ask(0.1, new=20), ask(0.2, new=9), ask(0.5, new=2), ask(0.7, new=1)]
    result = serve(asks, Shortest(100.0), limits=LIMITS._replace(max_rows=1), costs=ONE)
    late = [round(one.overtaken_s, 6) for one in result.served]
    assert late == [0.0, 0.6, 0.5, 0.2, 0.0]


# --- loads, and what schedulers are worth --------------------------------------------------------


def test_equal_loads_are_served_equally() -> None:
    assert mixed(seed=3) == mixed(seed=3) != mixed(seed=4)
    assert serve(mixed(seed=3), "shortest") == serve(mixed(seed=3), "shortest")


def test_a_mixed_load_is_mixed() -> None:
    load = mixed(2000, rate=5.0, long=0.25, seed=1)
    long = [one for one in load if one.new > 32]
    assert 0.22 < len(long) / 2000 < 0.28 and 350 < load[-1].arrived_s < 450
    assert all(one.new <= one.limit < 2 * one.new for one in load)
    assert all(256 <= one.new <= 512 and 128 <= one.prompt <= 1024 for one in long)


@pytest.mark.parametrize("seed", range(3))
def test_shortest_shortens_the_mean_and_lets_nobody_wait_beyond_the_bound(seed: int) -> None:
    """Simulated: more than the engine can serve, for half a minute."""
    load, scheduler = mixed(400, rate=12.0, seed=seed), Shortest(aging_s=20.0)
    fcfs, shortest = serve(load), serve(load, scheduler)
    assert shortest.mean() <= 0.8 * fcfs.mean()
    assert shortest.mean() <= 0.6 * fcfs.mean()  # 0.44 to 0.59
    assert max(one.queued_s for one in shortest.served) <= scheduler.aging_s
    assert max(one.overtaken_s for one in shortest.served) <= scheduler.aging_s
    assert shortest.seconds <= 1.05 * fcfs.seconds  # and costs hardly any throughput


def test_without_aging_a_stream_of_short_ones_starves_a_long_one_and_with_it_does_not() -> None:
    long = ask(0.5, prompt=4, new=40)
    stream = [ask(0.9 * number, prompt=4, new=1) for number in range(200)]
    limits = LIMITS._replace(max_rows=1)

    def waits(aging_s: float) -> float:
        result = serve([long, *stream], Shortest(aging_s), limits=limits, costs=ONE)
        return result.served[0].queued_s

    assert waits(1e9) > 180 and waits(30.0) < 30 / 0.9 + 2


def test_high_priorities_are_served_sooner_and_low_ones_within_their_bound() -> None:
    load = [
        structs.replace(one, priority=n % 2) for n, one in enumerate(mixed(300, rate=10.0, seed=5))
    ]
    by_level = []
    for scheduler in (FirstCome(), Priority(aging_s=30.0)):
        served = serve(load, scheduler).served
        high = [one.ttft_s for one in served if load[one.number].priority]
        by_level.append(sum(high) / len(high))
        assert max(one.overtaken_s for one in served) <= 30.0
    assert by_level[1] < 0.5 * by_level[0]


BOUNDED = {
    "fcfs": FirstCome(),
    "shortest": Shortest(2.0),
    "shortest, preempting": Shortest(2.0, times=1.5),
    "priority": Priority(1.0, top=2),
}


@pytest.mark.parametrize("sort", BOUNDED)
def test_nobody_waits_for_what_comes_after_its_bound(sort: str) -> None:
    """What comes later than `bound_s` changes nothing: a wait is over when what came before is."""
    scheduler, pages = BOUNDED[sort], 200
    load = [
        structs.replace(one, priority=n % 3, found=one.prompt // 2 if n % 4 == 0 else 0)
        for n, one in enumerate(mixed(120, rate=14.0, seed=7))
    ]
    served, cut = serve(load, scheduler, pages=pages).served, 0
    for number in range(0, 120, 7):
        ask = load[number]
        job = Job(number, ask.arrived_s, ask.prompt, ask.limit, priority=ask.priority)
        last_s = ask.arrived_s + scheduler.bound_s(job)
        before = [one for one in load if one.arrived_s <= last_s]
        alone = serve(before, scheduler, pages=pages)
        assert served[number].queued_s == alone.served[number].queued_s
        assert served[number].arrived_s + served[number].queued_s <= alone.seconds
        cut += len(before) < len(load)
    assert cut > 5
