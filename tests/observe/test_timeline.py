"""Timelines of restores: what they say, and how they are drawn."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowkv.observe.account import restore_section
from flowkv.observe.charts import Overlap, draw_overlap
from flowkv.observe.events import Bus, RestoreEnded, RestoreSpan
from flowkv.observe.report import Section, render_report
from flowkv.observe.timeline import Meeting, Timeline, Timelines

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


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"computed_tokens": 0, "resident_tokens": 0}, "all of it was loaded from disk"),
        ({"loaded_tokens": 0}, "all of it was computed"),
    ],
)
def test_one_engine_alone_meets_nobody(fields: dict[str, int], said: str) -> None:
    timeline = met(**fields)
    assert timeline.met is None and timeline.bound_ratio == 0
    assert "met" not in timeline.describe()
    page = render_report("r", [restore_section(timeline)])
    assert said in page and "met at" not in page and "bound" not in page


def test_a_bound_that_was_beaten_is_none() -> None:
    timeline = met(bound_s=0.061)
    assert timeline.bound_s == timeline.bound_ratio == 0
    assert "bound" not in render_report("r", [restore_section(timeline)])


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
@settings(max_examples=80, deadline=None)
def test_busy_time_counts_every_millisecond_once(drawn: list[tuple[str, int, int]]) -> None:
    spans = tuple(span(engine, a, a + b) for engine, a, b in drawn)
    timeline = Timeline(ended=ended(), spans=spans)
    at = {ms: {e for e, a, b in drawn if a <= ms < a + b} for ms in range(40)}
    loading = sum(bool(found & {"disk", "host"}) for found in at.values())
    assert timeline.busy_s("disk", "host") == pytest.approx(loading / 1e3, abs=1e-9)
    both = sum("compute" in found and len(found) > 1 for found in at.values())
    assert timeline.overlap_s() == pytest.approx(both / 1e3, abs=1e-9)


# ---- how they are drawn


def shapes(page: str, kind: str) -> list[dict[str, str]]:
    svg = re.search(r"<svg.*?</svg>", page, re.DOTALL)
    assert svg
    return [dict(found.attrib) for found in ET.fromstring(svg[0]).iter(kind)]


def test_pieces_lie_where_their_tokens_and_times_are() -> None:
    page = draw_overlap(Overlap("c", met(bound_s=0.03)))
    there, computed, late, early, *rest = shapes(page, "rect")
    if float(late["x"]) < float(early["x"]):
        late, early = early, late
    for rect in (there, computed, late, early):
        assert float(rect["x"]) >= 92 and float(rect["x"]) + float(rect["width"]) <= 698.5
    low = float(computed["y"]) + float(computed["height"])
    assert low == pytest.approx(float(there["y"]), abs=0.6), "computed from what was there on"
    assert float(early["y"]) + float(early["height"]) == pytest.approx(float(late["y"]), abs=0.6)
    assert float(late["y"]) + float(late["height"]) == pytest.approx(float(computed["y"]), abs=0.6)
    assert float(early["x"]) == float(computed["x"]) < float(late["x"])
    assert float(computed["width"]) == pytest.approx(1.5 * float(early["width"]), abs=1)
    suffix = [rect for rect in rest if float(rect["height"]) < 10]
    assert len(suffix) == 2, "a band per layer"
    assert float(suffix[0]["y"]) > float(suffix[1]["y"]), "the first layer is the lowest"
    lanes = [rect for rect in rest if float(rect["height"]) == 16]
    assert len(lanes) == 3, "pieces that touch are one bar"
    (circle,) = shapes(page, "circle")
    assert float(circle["cy"]) == pytest.approx(float(computed["y"]), abs=0.6)
    assert float(circle["cx"]) == pytest.approx(float(late["x"]) + float(late["width"]), abs=0.6)
    assert "lower bound" in page and "met at token 256, 40 ms" in page


@pytest.mark.parametrize("seconds", [2e-6, 0.06, 3.0, 4000.0])
def test_labels_of_the_axis_fit(seconds: float) -> None:
    page = draw_overlap(Overlap("c", Timeline(ended=ended(seconds=seconds), spans=())))
    labels = re.findall(r'<text class="v" x="([0-9.]+)" y="[0-9.]+" text-anchor="middle">', page)
    assert 4 <= len(labels) <= 11
    assert ("seconds" in page) and ("milliseconds" in page) == (seconds < 5)


def test_ten_thousand_pieces_are_no_burden() -> None:
    stripes = [
        span("disk", n / 900, (n + 1) / 900, token=512 - n // 32, tokens=1, layer=n % 32, layers=1)
        for n in range(10_000)
    ]
    page = draw_overlap(Overlap("c", Timeline(ended=ended(), spans=tuple(stripes))))
    rects = shapes(page, "rect")
    assert 300 < len(rects) < 2500


def test_everything_is_escaped() -> None:
    timeline = met()
    odd = span("<b>&'\"", 1, 2)
    timeline = Timeline(ended=timeline.ended, spans=(*timeline.spans, odd))
    page = render_report("r", [restore_section(timeline, title="<i>", source="emulated")])
    assert "<b>" not in page.replace("<b>192", "") or "<b>&" not in page
    assert "<i>" not in page.replace("<i>4", "") and "&lt;i&gt;" in page and "&lt;b&gt;" in page
    assert shapes(page, "rect") and 'class="source emulated"' in page


def test_the_section_tells_it_in_words_and_numbers() -> None:
    page = render_report("r", [restore_section(met(bound_s=0.05, failed=3))])
    assert "Here the two met at token 256" in page and "3 loads failed" in page
    assert "57% of what was missing" in page and "1.20x" in page
    cells = re.findall(r"<td[^>]*>(.*?)</td>", page)
    assert cells[:6] == ["compute", "192", "1", "\N{EN DASH}", "30", "50"]
    assert cells[12:] == ["disk", "256", "2", "3", "40", "66.7"]
    assert 'class="source measured"' in page


def test_nothing_at_all_can_be_drawn() -> None:
    bare = ended(tokens=0, computed_tokens=0, loaded_tokens=0, resident_tokens=0, seconds=0.0)
    section = restore_section(Timeline(ended=bare, spans=()))
    assert isinstance(section, Section) and shapes(render_report("r", [section]), "line")
