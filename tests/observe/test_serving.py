"""Statistics of serving: they are what the events said, in memory that does not grow."""

from __future__ import annotations

import json

import pytest

from tests.clock import together
from tests.inside import LATENCIES, Bus, EngineStep, Event, Level, Serving, events
from tests.observe.story import BEGIN_S, Clock, finished, step, tell


def collected() -> Serving:
    bus, clock = Bus(), Clock()
    with Serving(bus, clock=clock) as serving:
        tell(bus, clock)
        bus.emit(events.Hit(tier="host", tokens=30, n_bytes=3, tenant="alice"))
        bus.emit(events.Miss(tokens=10, tenant="alice"))
        restored = {"resident_tokens": 0, "computed_tokens": 0, "n_bytes": 9}
        bus.emit(
            events.RestoreEnded(
                request=0, tokens=8, loaded_tokens=8, started_s=BEGIN_S, seconds=0.004,
                exposed_s=0.001, **restored
            )
        )  # fmt: skip
    assert not bus.wants(EngineStep) and not bus.wants(events.Hit)
    return serving


def test_numbers_are_those_of_the_story() -> None:
    told = collected().summary()
    assert (told["requests"], told["finished"], told["steps"]) == (2, {"length": 2}, 2)
    assert told["made_tokens"] == 4 and told["prefill_tokens"] == 12
    assert told["tokens_per_s"] == pytest.approx(4 / 0.030), "first step's begin to last one's end"
    assert told["requests_per_s"] == pytest.approx(2 / 0.030)
    assert told["rows"] == {"mean": pytest.approx(1.5), "max": 2}
    assert told["kv_utilisation"] == {"mean": pytest.approx(0.375), "max": 0.5}
    assert told["preempted"] == {"kept": 1, "dropped": 0} and told["reused_tokens"] == 4
    assert told["hit_rate"] == {"host": 0.75} and told["tenants"]["alice"]["hit_rate"] == 0.75
    assert told["seconds"] == pytest.approx(0.1) and told["busy_s"] == pytest.approx(0.02)
    json.dumps(told)


def test_latencies_are_those_of_the_story() -> None:
    told = collected().summary()
    counts = {name: told[name]["count"] for name in LATENCIES}
    steps = dict.fromkeys(("step_s", "model_s", "sampling_s", "bookkeeping_s"), 2)
    restores = dict.fromkeys(("restore_s", "restore_exposed_s", "restore_hidden_s"), 1)
    pairs = {"ttft_s": 2, "tpot_s": 2, "inter_token_s": 2, "queue_s": 2, "aside_s": 1}
    assert counts == {**pairs, "request_s": 2, "held_s": 0, **steps, **restores}
    assert told["ttft_s"]["p50"] == pytest.approx(0.020, rel=0.01)
    assert told["ttft_s"]["p99"] == pytest.approx(0.078, rel=0.01)
    assert told["queue_s"]["max"] == 0.008 and told["aside_s"]["max"] == 0.030
    assert told["bookkeeping_s"]["mean"] == pytest.approx(0.001)
    assert told["restore_exposed_s"]["max"] == 0.001
    assert told["restore_hidden_s"]["max"] == pytest.approx(0.003)


def test_what_had_no_first_token_has_no_latency() -> None:
    bus = Bus()
    with Serving(bus) as serving:
        bus.emit(finished(0, 0.0, 1.0, ttft_s=0.0, tpot_s=0.0, reason="cancelled"))
    told = serving.summary()
    assert told["ttft_s"]["count"] == told["tpot_s"]["count"] == 0
    assert told["request_s"]["count"] == 1 and told["finished"] == {"cancelled": 1}


def test_requests_are_held_up_by_their_own_loads() -> None:
    bus = Bus()
    with Serving(bus) as serving:
        bus.emit(finished(0, 0.0, 1.0, restore_s=0.4, exposed_s=0.1))
        bus.emit(finished(1, 0.0, 1.0, restore_s=0.2, exposed_s=0.0))
        bus.emit(finished(2, 0.0, 1.0))
    held = serving.summary()["held_s"]
    assert (held["count"], held["max"], held["mean"]) == (2, 0.1, 0.05)


def test_memory_is_sampled_now_and_then() -> None:
    bus, clock, asked = Bus(), Clock(), []

    def levels() -> list[Level]:
        asked.append(clock.now_s)
        return [
            Level("device_used_bytes", 10.0 * len(asked), {"device": "cpu"}),
            Level("tier_used_bytes", 7.0, {"tier": "disk"}),
            Level("tier_capacity_bytes", 9.0, {"tier": "disk"}),
        ]

    serving = Serving(bus, levels=levels, every_s=0.05, clock=clock)
    for number in range(20):
        clock.now_s = BEGIN_S + 0.02 * number
        bus.emit(events.Stored(tier="disk", pages=1, n_bytes=1))
    assert 6 <= len(asked) <= 8
    assert serving.places() == ["cpu", "disk"]
    assert serving.series.level("disk")[-1] == 7.0 and serving.series.level("cpu")[-1] > 60


def test_an_empty_account_of_serving() -> None:
    told = Serving(Bus(), clock=Clock()).summary()
    assert told["tokens_per_s"] == told["requests_per_s"] == 0.0 and told["hit_rate"] == {}
    assert told["rows"] == {"mean": 0.0, "max": 0}


def test_subclasses_of_events_count() -> None:
    class LongStep(EngineStep, frozen=True, kw_only=True):
        pass

    bus = Bus()
    with Serving(bus) as serving:
        plain = step(1.0)
        bus.emit(LongStep(**{name: getattr(plain, name) for name in plain.__struct_fields__}))
    assert serving.summary()["steps"] == 1


def test_memory_does_not_grow() -> None:
    bus, clock = Bus(), Clock()
    serving = Serving(bus, clock=clock)
    for number in range(3000):
        clock.now_s += 0.01
        bus.emit(events.Queued(request=number, prompt_tokens=4, waiting=1, tenant=f"t{number}"))
        bus.emit(step(clock.now_s, gaps_s=(0.01, 0.02)))
        bus.emit(events.Miss(tokens=4, tenant=f"t{number}"))
        bus.emit(finished(number, clock.now_s, 0.01))
    assert len(serving.lanes) <= 128 and serving.series.cells <= 512
    assert len(serving.summary()["tenants"]) <= 65
    assert serving.summary()["inter_token_s"]["count"] == 6000


def test_threads_lose_nothing() -> None:
    bus = Bus()
    serving = Serving(bus)
    story: list[Event] = [step(1.0), finished(0, 1.0, 0.5), events.Miss(tokens=1)]

    def work() -> None:
        for _ in range(200):
            for event in story:
                bus.emit(event)
            serving.summary()

    together(*[work] * 3)
    told = serving.summary()
    assert told["steps"] == told["finished"]["length"] == told["step_s"]["count"] == 600
