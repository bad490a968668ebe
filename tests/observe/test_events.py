"""The bus delivers to whoever asked, costs nothing otherwise, and survives its listeners."""

from __future__ import annotations

import logging
import threading
import time

import msgspec
import pytest

from tests.inside import Bus, Event, Evicted, Hit, Miss, StepPlanned, Warned

HIT = Hit(tier="host", tokens=64, n_bytes=4096, tenant="alice")
MISS = Miss(tokens=3)


def test_types_select() -> None:
    bus, hits, both, everything = Bus(), [], [], []
    bus.subscribe(hits.append, Hit)
    bus.subscribe(both.append, Hit, Miss)
    bus.subscribe(everything.append)
    for event in (HIT, MISS, Warned(code="c", message="m")):
        bus.emit(event)
    assert hits == [HIT]
    assert both == [HIT, MISS]
    assert len(everything) == 3


def test_subclasses_are_delivered() -> None:
    class LateHit(Hit, frozen=True, kw_only=True):
        pass

    bus, hits = Bus(), []
    bus.subscribe(hits.append, Hit)
    bus.emit(LateHit(tier="disk", tokens=1, n_bytes=1))
    assert [type(hit) for hit in hits] == [LateHit]


def test_wants() -> None:
    bus = Bus()
    assert not bus.wants(Hit)
    with bus.subscribe(print, Hit):
        assert bus.wants(Hit)
        assert not bus.wants(Miss)
    assert not bus.wants(Hit)
    bus.subscribe(print, Event)
    assert bus.wants(Miss)


def test_closing_ends_it() -> None:
    bus, one, two = Bus(), [], []
    first = bus.subscribe(one.append)
    bus.subscribe(two.append)
    bus.emit(HIT)
    first.close()
    first.close()
    bus.emit(MISS)
    assert (one, two) == ([HIT], [HIT, MISS])


def test_order_of_subscription_is_order_of_delivery() -> None:
    bus, seen = Bus(), []
    for name in "abc":
        bus.subscribe(lambda _, name=name: seen.append(name))
    bus.emit(HIT)
    assert seen == ["a", "b", "c"]


def test_a_failing_subscriber_harms_nobody_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bus, seen = Bus(), []

    def fail(_: Event) -> None:
        raise ValueError("broken listener")

    bus.subscribe(fail)
    bus.subscribe(seen.append)
    with caplog.at_level(logging.ERROR, logger="flowkv"):
        bus.emit(HIT)
        bus.emit(MISS)
    assert seen == [HIT, MISS]
    assert len(caplog.records) == 1
    assert "Hit" in caplog.text
    assert "broken listener" in caplog.text


def test_interrupts_are_not_swallowed() -> None:
    bus = Bus()

    def interrupt(_: Event) -> None:
        raise KeyboardInterrupt

    bus.subscribe(interrupt)
    with pytest.raises(KeyboardInterrupt):
        bus.emit(HIT)


def test_a_callback_may_use_the_bus() -> None:
    bus, seen = Bus(), []

    def follow_up(_: Hit) -> None:
        subscription.close()
        bus.subscribe(seen.append, Miss)
        bus.emit(MISS)

    subscription = bus.subscribe(follow_up, Hit)
    bus.emit(HIT)
    bus.emit(HIT)
    assert seen == [MISS]


def test_threads() -> None:
    bus, seen, stop = Bus(), [], threading.Event()
    bus.subscribe(seen.append, Hit)

    def churn() -> None:
        while not stop.is_set():
            bus.subscribe(lambda _: None).close()

    def emit() -> None:
        for _ in range(2000):
            bus.emit(HIT)

    churner = threading.Thread(target=churn)
    emitters = [threading.Thread(target=emit) for _ in range(3)]
    churner.start()
    for thread in emitters:
        thread.start()
    for thread in emitters:
        thread.join()
    stop.set()
    churner.join()
    assert len(seen) == 6000  # none lost while others came and went


def test_without_a_subscriber_it_costs_less_than_a_microsecond() -> None:
    bus = Bus()

    def once() -> float:
        start = time.perf_counter()
        for _ in range(10_000):
            bus.emit(HIT)
        return (time.perf_counter() - start) / 10_000

    assert min(once() for _ in range(20)) < 1e-6


def test_events_are_values_with_a_json_form() -> None:
    assert Hit(tier="host", tokens=64, n_bytes=4096, tenant="alice") == HIT
    with pytest.raises(AttributeError):
        HIT.tokens = 5  # type: ignore[misc]
    event = Evicted(tier="device", pages=2, n_bytes=10)
    text = msgspec.json.encode(event)
    assert text == b'{"event":"Evicted","tier":"device","pages":2,"n_bytes":10,"reason":"space"}'
    assert msgspec.json.decode(text, type=Evicted | StepPlanned) == event
