"""Reports of serving are whole and say what happened, whatever that was."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowkv.core.errors import ConfigError
from flowkv.observe import charts, events
from flowkv.observe.account import Account, serving_sections
from flowkv.observe.charts import Distributions, Gantt, OverTime, Scale, _apart, _bars, _ends
from flowkv.observe.events import Bus, EngineStep
from flowkv.observe.metrics import Level, Spread
from flowkv.observe.report import render_report
from flowkv.observe.timeline import RequestLane, RequestPhase, Serving
from tests.observe.story import BEGIN_S, Clock, finished, step, tell
from tests.observe.test_report import read

LEVELS = [
    Level("device_used_bytes", 3 * 2**20, {"device": "cpu"}),
    Level("device_capacity_bytes", 2**23, {"device": "cpu"}),
    Level("device_fragmentation", 0.25, {"device": "cpu"}),
    Level("tier_used_bytes", 2**30, {"tier": "disk:<kv>"}),
    Level("tier_capacity_bytes", 2**63 - 1, {"tier": "disk:<kv>"}),
    Level("tier_loaded_bytes_total", 1024, {"tier": "disk:<kv>"}, "counter"),
    Level("audit_mismatches_total", 7, kind="counter"),
    Level("audit_worst", 0.125),
    Level("prefetch_used_bytes_total", 3072, {"tier": "disk:<kv>"}, "counter"),
    Level("prefetch_wasted_bytes_total", 1024, {"tier": "disk:<kv>"}, "counter"),
    *(
        Level("tier_breaker", float(s == "open"), {"tier": "disk:<kv>", "state": s})
        for s in ("closed", "half-open", "open")
    ),
]


def drawn(picture: OverTime | Distributions | Gantt) -> ET.Element:
    """The picture, which is well-formed and lies within its frame."""
    root = ET.fromstring(picture.draw())
    (svg,) = root.iter("svg")
    _, _, width, height = map(float, svg.attrib["viewBox"].split())
    moved = {
        id(part): tuple(map(float, group.attrib["transform"][10:-1].split()))
        for group in root.iter("g")
        for part in group.iter()
    }
    for part in root.iter():
        dx, dy = moved.get(id(part), (0.0, 0.0))
        corners = [tuple(map(float, at.split(","))) for at in part.get("points", "").split()]
        if part.tag == "rect":
            x, y = float(part.attrib["x"]), float(part.attrib["y"])
            corners += [(x, y), (x + float(part.attrib["width"]), y + float(part.attrib["height"]))]
        for x, y in corners:
            assert -3 <= x + dx <= width + 3 and -3 <= y + dy <= height + 3, part.attrib
    return root


def test_everything_that_happened_is_told(tmp_path: Path) -> None:
    bus, clock = Bus(), Clock()
    serving = Serving(bus, levels=lambda: LEVELS, clock=clock)
    tell(bus, clock)
    clock.now_s += 0.1
    bus.emit(step(clock.now_s, waiting=4))
    bus.emit(events.Queued(request=2, prompt_tokens=3, waiting=1))
    bus.emit(finished(2, clock.now_s, 0.5, reason="deadline", ttft_s=0.0))
    bus.emit(events.Hit(tier="disk:<kv>", tokens=30, n_bytes=3, tenant="alice"))
    bus.emit(events.Miss(tokens=10, tenant="bob"))
    bus.emit(events.Evicted(tier="host", pages=5, n_bytes=9))
    bus.emit(events.Stored(tier="disk:<kv>", pages=1, n_bytes=2048))
    bus.emit(events.Audited(tier="far", group=0, page=1, codec="raw", error=0.0, bound=1.0))
    sections = serving_sections(serving, LEVELS)
    assert [s.title for s in sections] == [
        "In short",
        "Latencies",
        "Requests over time",
        "Memory",
        "Reuse",
        "Audits",
        "Given up and failed",
    ]
    assert {s.source for s in sections} == {"measured"}
    page = render_report("Served", sections)
    shown = read(page)
    cells = shown.of("td")
    assert "alice" not in page and "tenant 1" in cells and "<kv>" not in page
    for told in ("3 MiB", "25%", "1 GiB", "no limit", "open", "2 KiB", "75%", "deadline", "host"):
        assert told in cells, told
    assert "far" in cells and {"7", "12.5%"} <= set(shown.of("b"))
    assert "3" in shown.of("b") and "2 finished, 1 called off" in shown.of("span")
    named = render_report("Served", serving_sections(serving, LEVELS, tenants=True))
    assert "alice" in read(named).of("td")


def test_what_is_unknown_is_left_out() -> None:
    bus = Bus()
    with Serving(bus) as serving:
        bus.emit(events.Miss(tokens=10))
    titles = [section.title for section in serving_sections(serving)]
    assert titles == ["Reuse"]
    page = render_report("t", serving_sections(serving, source="simulated"))
    assert "simulated" in page and "measured" not in read(page).of("span")


def test_an_account_writes_when_it_ends(tmp_path: Path) -> None:
    bus, path = Bus(), tmp_path / "served.html"
    clock = Clock()
    with Account(path, bus, lambda: LEVELS, title="A & B") as account:
        tell(bus, clock)
        assert not path.exists() and bus.wants(EngineStep)
        assert account.write() == path and "2 finished" in path.read_text()
        path.unlink()
    assert not bus.wants(EngineStep) and not bus.wants(events.RestoreSpan)
    shown = read(path.read_text(encoding="utf-8"))
    assert shown.of("h1") == ["A & B"] and "3 MiB" in shown.of("td")
    assert account.summary()["requests"] == 2
    path.unlink()
    account.close()
    assert not path.exists(), "once is enough"


def test_an_account_shows_the_longest_restore_of_all(tmp_path: Path) -> None:
    bus = Bus()
    with Account(tmp_path / "r.html", bus):
        for request, seconds in enumerate([0.777, *[0.1] * 30]):
            bus.emit(
                events.RestoreEnded(
                    request=request, tokens=8, resident_tokens=0, computed_tokens=0,
                    loaded_tokens=8, n_bytes=9, started_s=BEGIN_S + request, seconds=seconds,
                )
            )  # fmt: skip
    page = (tmp_path / "r.html").read_text()
    assert "The longest restore" in page and "8 tokens of prefix in 777" in page


def test_an_account_of_nothing(tmp_path: Path) -> None:
    with Account(tmp_path / "r.html", Bus()):
        pass
    assert "Nothing happened" in (tmp_path / "r.html").read_text()
    with pytest.raises(ConfigError, match="directory that can be written"):
        Account(tmp_path / "no" / "r.html", Bus())


# ---- pictures


finite = st.floats(0, 1e12)


@given(
    st.dictionaries(st.sampled_from("abcd"), st.lists(finite | st.just(math.nan), min_size=5,
                    max_size=5), min_size=1),
    st.booleans(),
    st.sampled_from(["", "%", "bytes", "s"]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_any_curves_are_drawn_within_their_frame(
    curves: dict[str, list[float]], stacked: bool, unit: str
) -> None:
    picture = OverTime("<c>", [0, 1, 2, 3.5, 9], curves, unit=unit, stacked=stacked)  # type: ignore[arg-type]
    root = drawn(picture)
    assert len([p for p in root.iter("polygon")]) == (len(curves) if stacked else 0)


def test_areas_lie_on_each_other() -> None:
    root = drawn(OverTime("c", [0, 1], {"a": [1, 1], "b": [2, 1]}, stacked=True, height=100))
    tops = [[float(p.split(",")[1]) for p in line.attrib["points"].split()]
            for line in root.iter("polyline")]  # fmt: skip
    (a, b) = tops
    assert a[0] - b[0] == pytest.approx(2 * (b[1] - b[0]), abs=0.3), "b is 3 high, then 2"
    assert a[0] == a[1] > b[1] > b[0]


def test_wrong_curves_are_refused() -> None:
    with pytest.raises(ConfigError, match="lacks values"):
        OverTime("c", [0, 1], {"a": [1]}).draw()
    with pytest.raises(ConfigError, match="Show 1 to"):
        OverTime("c", [0], {}).draw()


@given(st.dictionaries(st.sampled_from("abc"), st.lists(st.floats(0, 1e4), max_size=30)))
@settings(max_examples=60, deadline=None)
def test_any_spread_is_drawn_within_its_frame(values: dict[str, list[float]]) -> None:
    spreads = {name: Spread(found) for name, found in values.items()}
    there = [spread for spread in spreads.values() if spread.count]
    picture = Distributions("c", spreads)
    if not there:
        assert picture.draw() == ""
        return
    assert len(list(drawn(picture).iter("g"))) == len(there)
    for spread in there:
        low, high = _ends(spread)
        assert sum(_bars(spread, Scale(math.log(low), math.log(high), 0, 300))) == spread.count


@given(st.lists(st.floats(0, 342), min_size=3, max_size=3), st.integers(40, 100))
@settings(max_examples=80, deadline=None)
def test_labels_of_quantiles_never_overlap(places: list[float], width: int) -> None:
    widths = [float(width)] * 3
    lefts = _apart([at - width / 2 for at in sorted(places)], widths, Scale(0, 1, 0.0, 342.0))
    assert lefts[0] >= -1e-6 and lefts[-1] + width <= 342 + 1e-6
    assert all(b - a >= width + 8 - 1e-6 for a, b in pairwise(lefts))


@pytest.mark.parametrize("count", [1, 20, 128])
def test_requests_are_bars_over_time(count: int) -> None:
    lanes = [
        RequestLane(n, BEGIN_S + n, [RequestPhase("queued", BEGIN_S + n, BEGIN_S + n + 1),
                              RequestPhase("decode", BEGIN_S + n + 1, BEGIN_S + n + 2)],
             finished(n, BEGIN_S + n, 2.0, reason="failed" if n == 0 else "stop"))
        for n in range(count)
    ]  # fmt: skip
    root = drawn(Gantt("c", lanes, BEGIN_S, count + 2.0))
    titles = [t.text or "" for t in root.iter("title")]
    assert sum("waiting, 1 s" in t for t in titles) == count
    assert [t for t in titles if "failed" in t] == ["request 0: failed"]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0 s"), (2.5, "2.5 s"), (0.0123, "12.3 ms"), (0.9999, "1 s"), (4e-6, "4 µs"),
     (9.996e-4, "1 ms"), (3e-8, "30 ns")],
)  # fmt: skip
def test_times_read_well(seconds: float, said: str) -> None:
    assert charts.seconds(seconds) == said


def test_bytes_and_steps_read_well() -> None:
    assert [charts.amount(n) for n in (0, 512, 1536, 1023.9 * 1024, 3 * 2**40)] == [
        "0 B", "512 B", "1.5 KiB", "1 MiB", "3 TiB",
    ]  # fmt: skip
    assert charts.round_step(7, 4) == 2 and charts.round_step(0, 4) == 1
    assert charts.round_step(0.3, 3) == pytest.approx(0.1)
    assert charts.binary_step(100, 4) == 32
    for length in (0.013, 1.0, 37, 1e7):
        assert length / charts.round_step(length, 4) <= 4
