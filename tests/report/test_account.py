"""Reports of serving are whole and say what happened, whatever that was."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.inside import (
    Account,
    Bus,
    ConfigError,
    Distributions,
    EngineStep,
    Gantt,
    Level,
    OverTime,
    RequestLane,
    RequestPhase,
    Serving,
    Spread,
    events,
    render_report,
    seconds,
    serving_sections,
)
from tests.observe.story import BEGIN_S, Clock, finished, step, tell
from tests.report.drawn import Drawn, points
from tests.report.test_page import read

LEVELS = [
    Level("device_used_bytes", 3 * 2**20, {"device": "cpu"}),
    Level("device_capacity_bytes", 2**23, {"device": "cpu"}),
    Level("device_fragmentation", 0.25, {"device": "cpu"}),
    Level("tier_used_bytes", 2**30, {"tier": "disk:<kv>"}),
    Level("tier_capacity_bytes", 2**63 - 1, {"tier": "disk:<kv>"}),
    Level("tier_loaded_bytes_total", 1024, {"tier": "disk:<kv>"}),
    Level("audit_mismatches_total", 7),
    Level("audit_worst", 0.125),
    Level("prefetch_used_bytes_total", 3072, {"tier": "disk:<kv>"}),
    Level("prefetch_wasted_bytes_total", 1024, {"tier": "disk:<kv>"}),
    *(
        Level("tier_breaker", float(s == "open"), {"tier": "disk:<kv>", "state": s})
        for s in ("closed", "half-open", "open")
    ),
]


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
        *("In short", "Latencies", "Requests over time", "Memory", "Reuse", "Audits"),
        "Given up and failed",
    ]
    assert {s.source for s in sections} == {"measured"}
    page = render_report("Served", sections)
    shown = read(page)
    cells = shown.of("td")
    assert "alice" not in page and "tenant 1" in cells and "<kv>" not in page
    for told in ("3MiB", "25%", "1GiB", "no limit", "open", "2KiB", "75%", "deadline", "host"):
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


def test_an_account_writes_when_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bus, path = Bus(), tmp_path / "served.html"
    clock = Clock()
    monkeypatch.chdir(tmp_path)
    with Account("served.html", bus, lambda: LEVELS, title="A & B") as account:
        monkeypatch.chdir("/")
        tell(bus, clock)
        assert not path.exists() and bus.wants(EngineStep)
        assert account.write() == path and "2 finished" in path.read_text()
        path.unlink()
    assert not bus.wants(EngineStep) and not bus.wants(events.RestoreSpan)
    shown = read(path.read_text(encoding="utf-8"))
    assert shown.of("h1") == ["A & B"] and "3MiB" in shown.of("td")
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
    st.sampled_from(["", "%", "bytes"]),
)  # fmt: skip
@settings(max_examples=12, deadline=None)
def test_any_curves_are_drawn_within_their_frame(
    curves: dict[str, list[float]], stacked: bool, unit: str
) -> None:
    picture = OverTime("<c>", [0, 1, 2, 3.5, 9], curves, unit=unit, stacked=stacked)  # type: ignore[arg-type]
    assert [shape.said[0] for shape in Drawn(picture).shapes] == list(curves)


def test_areas_lie_on_each_other() -> None:
    chart = OverTime("c", [0, 1], {"a": [1, 1], "b": [2, 1]}, stacked=True, height=100)
    drawn = Drawn(chart)
    a, b = ([y for _, y in line] for line in drawn.lines())
    assert a[0] - b[0] == pytest.approx(2 * (b[1] - b[0]), abs=0.3), "b is 3 high, then 2"
    assert a[0] == a[1] > b[1] > b[0]
    assert [shape.said for shape in drawn.shapes] == ["a: at most 1", "b: at most 2"]


def test_several_curves_have_markers_of_their_own() -> None:
    several = OverTime("c", [0, 1], {"a": [1, 1], "b": [2, 1]}).draw().legend
    assert len({key.mark for key in several}) == 2


def test_wrong_curves_are_refused() -> None:
    with pytest.raises(ConfigError, match="lacks values"):
        OverTime("c", [0, 1], {"a": [1]})
    with pytest.raises(ConfigError, match="Show 1 to"):
        OverTime("c", [0], {})


def test_bytes_have_round_labels() -> None:
    drawn = Drawn(OverTime("c", [0, 1], {"a": [0, 900 * 2**20]}, unit="bytes"))
    assert list(drawn.labels("end")) == ["0B", "256MiB", "512MiB", "768MiB", "1GiB"]


@given(st.dictionaries(st.sampled_from("abc"), st.lists(st.floats(0, 1e4), min_size=1), min_size=1))
@settings(max_examples=12, deadline=None)
def test_any_spread_is_drawn_within_its_frame(values: dict[str, list[float]]) -> None:
    spreads = {name: Spread(found) for name, found in values.items()}
    drawn = Drawn(Distributions("c", spreads))
    assert set(values) <= set(drawn.texts)
    counted = [int(shape.said.partition(" of ")[0].replace(",", "")) for shape in drawn.shapes]
    assert sum(counted) == sum(spread.count for spread in spreads.values())
    for shape in drawn.shapes:
        if shape.said.startswith("0 of "):
            assert shape.height == 0


def test_quantiles_are_marked_where_they_are() -> None:
    spread = Spread([0.001 * n for n in range(1, 1001)])
    drawn = Drawn(Distributions("c", {"a": spread}))
    (said,) = (text for text in drawn.texts if "P50" in text)
    assert said.startswith("P50 50") and " · P95 9" in said and " · P99 9" in said
    dashes = [path for path in drawn.paths if "opacity: 0.6" in path.attrib["style"]]
    places = [points(path)[0][0] for path in dashes]
    assert len(places) == 3 and places == sorted(places)
    assert len({path.attrib["style"] for path in dashes}) == 3, "each of its own dash"


@pytest.mark.parametrize("count", [1, 20, 128])
def test_requests_are_bars_over_time(count: int) -> None:
    lanes = [
        RequestLane(n, BEGIN_S + n, [RequestPhase("queued", BEGIN_S + n, BEGIN_S + n + 1),
                              RequestPhase("decode", BEGIN_S + n + 1, BEGIN_S + n + 2)],
             finished(n, BEGIN_S + n, 2.0, reason="failed" if n == 0 else "stop"))
        for n in range(count)
    ]  # fmt: skip
    drawn = Drawn(Gantt("c", lanes, BEGIN_S, count + 2.0))
    waiting = [shape for shape in drawn.shapes if "waiting, 1 s" in shape.said]
    decoding = [shape for shape in drawn.shapes if "further tokens, 1 s" in shape.said]
    assert len(waiting) == len(decoding) == count
    assert all(thin.height < high.height for thin, high in zip(waiting, decoding, strict=True))
    assert all(a.right == pytest.approx(b.left) for a, b in zip(waiting, decoding, strict=True))
    assert [s.said for s in drawn.shapes if "failed" in s.said] == ["request 0: failed"]
    assert [key.name for key in drawn.picture.legend][-1] == "cancelled, late or failed"


@pytest.mark.parametrize(
    ("value", "said"),
    [(0, "0 s"), (2.5, "2.5 s"), (0.0123, "12.3 ms"), (0.9999, "1 s"), (4e-6, "4 µs"),
     (9.996e-4, "1 ms"), (3e-8, "30 ns"), (0.42, "420 ms"), (math.nan, "-")],
)  # fmt: skip
def test_times_read_well(value: float, said: str) -> None:
    assert seconds(value) == said
