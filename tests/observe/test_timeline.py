"""Timelines of restores: what they say, and how they are drawn."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.inside import Bus, Meeting, RestoreEnded, RestoreSpan, Timeline, Timelines

BEGUN_S = 1000.0


def span(engine: str, first_ms: float, stop_ms: float, **fields: Any) -> RestoreSpan:
    said = {"request": 1, "token": 0, "tokens": 64, "layer": 0, "layers": 2, **fields}
    seconds = (stop_ms - first_ms) / 1e3
    return RestoreSpan(engine=engine, started_s=BEGUN_S + first_ms / 1e3, seconds=seconds, **said)


def ended(**fields: Any) -> RestoreEnded:
    said = {"request": 1, "tokens": 512, "resident_tokens": 64, "computed_tokens": 192}
    said |= {"loaded_tokens": 256, "n_bytes": 3_000_000, "seconds": 0.060, **fields}
    return RestoreEnded(started_s=BEGUN_S, **said)


def met(**fields: Any) -> Timeline:
    """Computed for 30 ms, loaded for 40 ms in two pieces at once, 10 ms of suffix."""
    spans = [
        span("compute", 0, 30, token=64, tokens=192),
        span("disk", 0, 20, token=384, tokens=128, n_bytes=2_000_000),
        span("disk", 10, 40, token=256, tokens=128, n_bytes=1_000_000),
        span("suffix", 42, 47, token=512, tokens=8, layer=0, layers=1),
        span("suffix", 47, 52, token=512, tokens=8, layer=1, layers=1),
    ]
    return Timeline(ended=ended(**fields), spans=tuple(spans))


# ---- what they say


def test_what_was_computed_what_was_loaded_and_when_they_met() -> None:
    timeline = met(bound_s=0.050)
    assert timeline.engines == ["compute", "suffix", "disk"] and timeline.tiers == ["disk"]
    assert timeline.met == Meeting(256, pytest.approx(0.040))
    assert timeline.busy_s("compute") == pytest.approx(0.030)
    assert timeline.busy_s("disk") == pytest.approx(0.040), "two at once are one link at work"
    assert timeline.busy_s("compute", "suffix") == pytest.approx(0.040)
    assert timeline.overlap_s() == pytest.approx(0.030), "the suffix began when all was there"
    assert timeline.bound_ratio == pytest.approx(1.2)
    assert timeline.layers == 2 and timeline.until_s == pytest.approx(0.060)
    assert timeline.describe() == (
        "512 tokens in 60.0 ms, 64 there already, 192 computed, 256 loaded from disk,"
        " met at token 256 after 40.0 ms, 1.20x the lower bound"
    )


def test_a_bound_that_was_beaten_is_none() -> None:
    timeline = met(bound_s=0.061)
    assert timeline.bound_s == timeline.bound_ratio == 0


def test_the_bus_collects_restores_apart() -> None:
    bus = Bus()
    assert not bus.wants(RestoreSpan)
    with Timelines(bus, most=2) as restores:
        assert bus.wants(RestoreSpan)
        bus.emit(span("disk", 5, 9, request=2, token=64))
        bus.emit(span("disk", 0, 9, request=1))
        bus.emit(span("compute", 1, 4, request=2))
        bus.emit(ended(request=2))
        assert [t.ended.request for t in restores] == [2]
        (second,) = restores.ended
        assert [s.engine for s in second.spans] == ["compute", "disk"], "by when they began"
        bus.emit(ended(request=1))
        bus.emit(ended(request=3))
    assert [(t.ended.request, len(t.spans)) for t in restores] == [(1, 1), (3, 0)]
    assert not bus.wants(RestoreSpan), "nobody pays once it is closed"


def test_the_longest_is_kept_however_many_follow() -> None:
    bus = Bus()
    with Timelines(bus, most=2) as restores:
        assert restores.longest is None
        bus.emit(ended(request=1, seconds=9.0, loaded_tokens=0))
        assert restores.longest is None, "that was no load"
        bus.emit(span("disk", 0, 9, request=2))
        bus.emit(ended(request=2, seconds=2.0))
        for request in range(3, 30):
            bus.emit(ended(request=request, seconds=0.1 * (request % 7)))
    longest = restores.longest
    assert longest is not None and longest.ended.request == 2 and len(longest.spans) == 1
    assert [timeline.ended.request for timeline in restores] == [28, 29]


def test_what_was_called_off_is_forgotten() -> None:
    with Timelines(Bus()) as restores:
        for request in range(3000):
            restores.note(span("disk", 0, 1, request=request))
        assert len(restores._under_way) < 1100
        restores.note(ended(request=2999))
        assert len(restores.ended[0].spans) == 1, "the latest are kept"


times = st.integers(0, 20)


@given(st.lists(st.tuples(st.sampled_from(["compute", "disk", "host"]), times, times), max_size=9))
@settings(max_examples=30, deadline=None)
def test_busy_time_counts_every_millisecond_once(drawn: list[tuple[str, int, int]]) -> None:
    spans = tuple(span(engine, a, a + b) for engine, a, b in drawn)
    timeline = Timeline(ended=ended(), spans=spans)
    at = {ms: {e for e, a, b in drawn if a <= ms < a + b} for ms in range(40)}
    loading = sum(bool(found & {"disk", "host"}) for found in at.values())
    assert timeline.busy_s("disk", "host") == pytest.approx(loading / 1e3, abs=1e-9)
    both = sum("compute" in found and len(found) > 1 for found in at.values())
    assert timeline.overlap_s() == pytest.approx(both / 1e3, abs=1e-9)
