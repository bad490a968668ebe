"""Lanes of requests: they follow from events, for any number of requests."""

from __future__ import annotations

import pytest

from tests.inside import Admitted, Lanes, Preempted, Queued, RequestPhase
from tests.observe.story import BEGIN_S, finished, story


def told() -> Lanes:
    lanes = Lanes()
    for at_s, event in story():
        lanes.record(event, BEGIN_S + at_s)
    return lanes


def test_phases_follow_each_other() -> None:
    one, two = told()
    shown = [
        [(p.phase, round((p.first_s - BEGIN_S) * 1e3), round((p.stop_s - BEGIN_S) * 1e3))]
        for lane in (one, two)
        for p in lane.pieces
    ]
    assert shown == [
        *([("queued", 0, 1)], [("prefill", 1, 20)], [("decode", 20, 50)], [("queued", 2, 10)]),
        *([("prefill", 10, 30)], [("aside", 30, 60)], [("prefill", 60, 80)]),
        [("decode", 80, 100)],
    ]
    assert one.ended is not None and one.ended.reason == "length"


def test_who_is_called_off_early_only_waited() -> None:
    lanes = Lanes()
    lanes.record(Queued(request=3, prompt_tokens=1, waiting=1), 5.0)
    (open_,) = lanes.under_way(5.5)
    assert open_.pieces == [RequestPhase("queued", 5.0, 5.5)]
    lanes.record(finished(3, 5.0, 1.0, reason="cancelled", ttft_s=0.0), 0.0)
    (lane,) = lanes
    assert lane.pieces == [RequestPhase("queued", 5.0, 6.0)] and not lanes.under_way(9.0)


def test_preempted_while_it_decodes() -> None:
    lanes = Lanes()
    lanes.record(Queued(request=0, prompt_tokens=1, waiting=1), 0.0)
    lanes.record(Admitted(request=0, queued_s=1.0, reused_tokens=0), 1.0)
    lanes.record(Preempted(request=0, pages=1, n_bytes=1, kept=False), 4.0)
    assert [p.phase for p in lanes.under_way(6.0)[0].pieces] == ["queued", "prefill", "aside"]
    lanes.record(finished(0, 0.0, 6.0, ttft_s=3.0, reason="deadline"), 0.0)
    (lane,) = lanes
    assert [(p.phase, p.stop_s) for p in lane.pieces] == [
        ("queued", 1.0),
        ("prefill", 3.0),
        ("decode", 4.0),
        ("aside", 6.0),
    ]


@pytest.mark.parametrize("total", [9, 100, 1000])
def test_of_many_an_even_choice_is_kept(total: int) -> None:
    lanes = Lanes(most=8)
    for request in range(total):
        lanes.record(Queued(request=request, prompt_tokens=1, waiting=1), float(request))
        lanes.record(Admitted(request=request, queued_s=0.5, reused_tokens=0), request + 0.5)
        if request % 3:
            lanes.record(finished(request, float(request), 1.0), 0.0)
    kept = [lane.request for lane in lanes]
    assert len(kept) <= 8 and kept == list(range(0, total, lanes.stride))
    assert len(kept) > 3 and len(lanes._open) <= 8


def test_a_request_can_be_taken_out() -> None:
    lanes = told()
    lane = lanes.pop(1)
    assert lane is not None and lane.request == 1 and len(lanes) == 1
    assert lanes.pop(1) is None
    lanes.record(finished(77, 0.0, 1.0), 0.0)  # began before anybody listened
    assert len(lanes) == 1


def test_numbers_may_be_of_other_caches_in_between() -> None:
    lanes = Lanes(most=8)
    for request in range(1, 200, 2):
        lanes.record(Queued(request=request, prompt_tokens=1, waiting=1), float(request))
    kept = [lane.request for lane in lanes]
    assert kept == list(range(1, 200, 2 * lanes.stride)) and len(kept) > 3
    assert len(lanes._places) == len(kept)


def test_one_that_ends_twice_ended_once() -> None:
    lanes = told()
    before = [lane.pieces for lane in lanes]
    lanes.record(finished(1, BEGIN_S + 0.002, 0.098, ttft_s=0.078), 0.0)
    assert [lane.pieces for lane in lanes] == before
