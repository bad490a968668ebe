"""Traces: their format, their tracks, and that they survive whatever ends the program."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.clock import together
from tests.inside import Bus, ConfigError, Event, RestoreEnded, RestoreSpan, TraceFile, events
from tests.observe import story
from tests.observe.chrome import read_chrome


class Clock:
    """A clock that stands still until it is told."""

    def __init__(self, now_s: float = 100.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def span(engine: str, started_s: float, seconds: float, **fields: Any) -> RestoreSpan:
    said = {"request": 1, "token": 0, "tokens": 64, "layer": 0, "layers": 4, **fields}
    return RestoreSpan(engine=engine, started_s=started_s, seconds=seconds, **said)


def ended(started_s: float, seconds: float, **fields: Any) -> RestoreEnded:
    said = {"request": 1, "tokens": 256, "resident_tokens": 0, "computed_tokens": 128}
    said |= {"loaded_tokens": 128, "n_bytes": 4096, **fields}
    return RestoreEnded(started_s=started_s, seconds=seconds, **said)


def test_engines_tiers_and_requests_have_tracks(tmp_path: Path) -> None:
    bus, clock = Bus(), Clock()
    with TraceFile(tmp_path / "t.json", bus, clock=clock) as trace:
        bus.emit(span("compute", 100.001, 0.010, tokens=128))
        bus.emit(span("disk", 100.001, 0.004, token=192, n_bytes=7))
        bus.emit(span("host:chat", 100.005, 0.004, token=128, layer=2, layers=1))
        bus.emit(span("suffix", 100.011, 0.002, token=256, layer=3, layers=1))
        bus.emit(ended(100.001, 0.012, request=17, failed=2))
        assert trace.events == 5
    shown = read_chrome((tmp_path / "t.json").read_text())
    assert [(s.name, s.first, s.stop) for s in shown.on("compute")] == [
        ("compute 0-128", 1_000_000, 11_000_000),
        ("suffix, layer 3", 11_000_000, 13_000_000),
    ]
    assert [s.name for s in shown.on("disk")] == ["load 192-256"]
    assert [s.name for s in shown.on("host:chat")] == ["load 128-192, layer 2"]
    (restore,) = shown.on("restores")
    assert (restore.track, restore.stop - restore.first) == ("restore 17", 12_000_000)
    assert restore.args["failed"] == 2 and restore.args["loaded_tokens"] == 128
    assert shown.on("disk")[0].args["n_bytes"] == 7


def test_what_overlaps_goes_on_further_tracks(tmp_path: Path) -> None:
    with TraceFile(tmp_path / "t.json", clock=Clock()) as trace:
        for number in range(6):
            trace.on_event(span("disk", 100 + 0.010 * number, 0.025))
        trace.on_event(events.Evicted(tier="disk", pages=1, n_bytes=1))
        for request in (1, 2):  # one forward over two rows
            trace.on_event(span("compute", 100.0, 0.5, request=request))
    shown = read_chrome((tmp_path / "t.json").read_text())
    assert shown.tracks("disk") == {"disk", "disk (2)", "disk (3)"}, "three at a time"
    assert [s.track for s in shown.instants] == ["disk"], "an instant crosses nothing"
    assert shown.tracks("compute") == {"compute"} and len(shown.on("compute")) == 2


def test_other_events_are_shown_too(tmp_path: Path) -> None:
    clock = Clock()
    seen: list[Event] = [
        events.Stored(tier="disk", pages=2, n_bytes=10, seconds=0.25),
        events.Stored(tier="disk", pages=2, n_bytes=10),
        events.Promoted(source="remote", tier="device", pages=1, n_bytes=5),
        events.Quarantined(tier="disk", key=b"\x01\xff", reason="digest"),
        events.Miss(tokens=5, tenant="alice"),
        events.StepPlanned(rows=2, new_tokens=3, context_tokens=9),
        events.Audited(tier="disk", group=0, page=3, codec="raw", error=math.inf, bound=0.0),
    ]
    with TraceFile(tmp_path / "t.json", clock=clock) as trace:
        clock.now_s += 1
        for event in seen:
            trace.on_event(event)
    text = (tmp_path / "t.json").read_text()
    assert "alice" not in text, "tenants may be private"
    shown = read_chrome(text)
    (stored,) = shown.slices
    assert (stored.first, stored.stop) == (750_000_000, 1_000_000_000), "it has just ended"
    placed = [(s.group, s.track, s.name) for s in shown.instants]
    assert placed == [
        *(("disk", "disk", "stored"), ("remote", "remote", "promoted")),
        *(("disk", "disk", "quarantined"), ("events", "events", "miss")),
        *(("compute", "steps", "step, 3 tokens"), ("disk", "disk", "audited")),
    ]
    assert shown.instants[2].args["key"] == "01ff"
    assert shown.instants[-1].args["error"] is None


def test_what_was_restored_is_drawn_once(tmp_path: Path) -> None:
    clock = Clock()
    with TraceFile(tmp_path / "t.json", clock=clock) as trace:
        clock.now_s += 1
        alone = events.Restored(tier="disk", tokens=64, n_bytes=9, seconds=0.5)
        trace.on_event(alone)
        clock.now_s += 1
        trace.on_event(span("disk", 101.4, 0.3))
        trace.on_event(alone)
    shown = read_chrome((tmp_path / "t.json").read_text())
    assert [s.name for s in shown.on("disk")] == ["restored", "load 0-64"]
    (told,) = shown.instants
    assert (told.name, told.first) == ("restored", 2_000_000_000)


def test_every_event_can_be_written(tmp_path: Path) -> None:
    kinds = [k for k in vars(events).values() if isinstance(k, type) and issubclass(k, Event)]
    filled = {"int": 3, "float": 0.5, "str": "x", "bytes": b"x", "bool": True}
    filled |= {"tuple[float, ...]": (0.1, 0.2)}
    clock = Clock(0.0)
    with TraceFile(tmp_path / "t.json", clock=clock) as trace:
        clock.now_s = 1.0
        for kind in kinds:
            said = {name: filled[text] for name, text in kind.__annotations__.items()}
            trace.on_event(kind(**said))
        assert trace.events == len(kinds) >= 20
    read_chrome((tmp_path / "t.json").read_text())


def test_what_came_before_is_cut_off(tmp_path: Path) -> None:
    with TraceFile(tmp_path / "t.json", clock=Clock(50.0)) as trace:
        trace.on_event(span("compute", 49.0, 1.5))
        trace.on_event(span("compute", 48.0, 1.0))
        assert trace.events == 1
    (left,) = read_chrome((tmp_path / "t.json").read_text()).slices
    assert (left.first, left.stop) == (0, 500_000_000)


times = st.integers(0, 40).map(lambda n: 7.0 + n / 1000)
spans = st.builds(
    span,
    st.sampled_from(["compute", "suffix", "disk", "host"]),
    times,
    st.integers(0, 15).map(lambda n: n / 1000),
    request=st.integers(1, 3),
)
stories = st.lists(spans | st.builds(ended, times, st.just(0.02), request=st.integers(1, 3)))


@given(story=stories)
@settings(max_examples=25, deadline=None)
def test_any_order_of_events_is_a_sound_trace(
    story: list[Event], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "story.json"
    clock = Clock(7.01)
    with TraceFile(path, clock=clock) as trace:
        for event in story:
            trace.on_event(event)
    shown = read_chrome(path.read_text())
    began, lasting = 7_010_000_000, list[Any]()
    for event in story:
        stop = round((event.started_s + event.seconds) * 1e9)
        if stop > max(began, round(event.started_s * 1e9)):
            lasting.append(event)
    assert len(shown.slices) == len(lasting)


# ---- what ends it


def test_an_exception_ends_it_whole(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    with pytest.raises(RuntimeError, match="model"), TraceFile(path) as trace:
        trace.on_event(events.Miss(tokens=1))
        raise RuntimeError("the model failed")
    assert trace.closed and path.read_text().endswith("\n]\n")
    assert len(read_chrome(path.read_text()).instants) == 1


def test_a_process_that_is_killed_leaves_what_happened(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    code = f"""
        import os, signal
        from flowkv.observe import events
        from flowkv.observe.timeline import TraceFile
        bus = events.Bus()
        trace = TraceFile({str(path)!r}, bus)
        for tokens in range(1, 101):
            bus.emit(events.Miss(tokens=tokens))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False)
    assert ran.returncode < 0
    text = path.read_text()
    assert not text.endswith("]\n")
    assert [s.args["tokens"] for s in read_chrome(text).instants] == list(range(1, 101))


def test_an_empty_trace_is_a_trace(tmp_path: Path) -> None:
    TraceFile(tmp_path / "t.json").close()
    assert read_chrome((tmp_path / "t.json").read_text()).slices == []


def test_nothing_is_written_once_it_is_closed(tmp_path: Path) -> None:
    bus = Bus()
    trace = TraceFile(tmp_path / "t.json", bus)
    assert bus.wants(RestoreSpan)
    trace.close()
    trace.close()
    assert not bus.wants(RestoreSpan), "nobody pays for a trace that is over"
    trace.on_event(events.Miss(tokens=1))
    assert trace.events == 0 and read_chrome((tmp_path / "t.json").read_text()).instants == []


def test_a_full_disk_ends_it_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus, said = Bus(), list[str]()
    trace = TraceFile(tmp_path / "t.json", bus, warn=said.append)
    bus.emit(events.Miss(tokens=1))
    file = trace._file

    class Full:
        """Room for ten more bytes."""

        def write(self, data: bytes) -> int:
            return file.write(data[:10])

        def __getattr__(self, name: str) -> Any:
            return getattr(file, name)

        def __enter__(self) -> None:
            file.__enter__()

        def __exit__(self, *_: object) -> None:
            file.close()

    monkeypatch.setattr(trace, "_file", Full())
    bus.emit(events.Miss(tokens=2))
    bus.emit(events.Miss(tokens=3))
    assert trace.closed and file.closed and len(said) == 1 and "t.json" in said[0]
    shown = read_chrome((tmp_path / "t.json").read_text())
    assert [s.args["tokens"] for s in shown.instants] == [1], "no half line is left"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    bus = Bus()
    with TraceFile(tmp_path / "t.json", bus) as trace:
        child = os.fork()
        if not child:
            bus.emit(events.Miss(tokens=9))
            trace.close()
            os._exit(0)
        os.waitpid(child, 0)
        bus.emit(events.Miss(tokens=1))
    (mine,) = read_chrome((tmp_path / "t.json").read_text()).instants
    assert mine.args["tokens"] == 1


def test_threads_write_whole_lines(tmp_path: Path) -> None:
    bus = Bus()

    def work(request: int) -> None:
        for number in range(50):
            bus.emit(span("disk", trace._began_ns / 1e9 + number, 1.5, request=request))

    with TraceFile(tmp_path / "t.json", bus) as trace:
        together(*(partial(work, n) for n in range(4)))
    assert len(read_chrome((tmp_path / "t.json").read_text()).on("disk")) == 200


def test_a_file_that_cannot_be_made(tmp_path: Path) -> None:
    bus = Bus()
    with pytest.raises(ConfigError, match="directory that can be written"):
        TraceFile(tmp_path / "no" / "t.json", bus)
    assert not bus.wants(RestoreSpan)


def test_requests_leave_nothing_behind(tmp_path: Path) -> None:
    with TraceFile(tmp_path / "t.json", clock=Clock()) as trace:
        for request in range(30):
            trace.on_event(span("disk", 100.0 + request, 0.5, request=request))
            trace.on_event(ended(100.0 + request, 0.5, request=request))
        assert len(trace._tracks) == 1, "a server may trace for days"
    assert len(read_chrome((tmp_path / "t.json").read_text()).tracks("restores")) == 30


# ---- engines


def test_requests_of_engines_have_tracks(tmp_path: Path) -> None:
    bus, clock = Bus(), story.Clock()
    with TraceFile(tmp_path / "t.json", bus, clock=clock) as trace:
        story.tell(bus, clock)
        bus.emit(events.Queued(request=7, prompt_tokens=3, waiting=1, tenant="alice"))
        clock.now_s += 0.5
        assert len(trace._lanes) == 1, "what is over is forgotten"
    text = (tmp_path / "t.json").read_text()
    assert "alice" not in text and "bob" not in text
    shown = read_chrome(text)
    assert shown.tracks("requests") == {"request 0", "request 1", "request 7"}
    phases = [
        (s.track, s.name, round(s.first / 1e6), round(s.stop / 1e6)) for s in shown.on("requests")
    ]
    assert phases == [
        *(("request 0", "queued", 0, 1), ("request 0", "prefill", 1, 20)),
        *(("request 0", "decode", 20, 50), ("request 1", "queued", 2, 10)),
        *(("request 1", "prefill", 10, 30), ("request 1", "aside", 30, 60)),
        *(("request 1", "prefill", 60, 80), ("request 1", "decode", 80, 100)),
        ("request 7", "queued", 100, 600),
    ]
    told = [s.name for s in shown.instants if s.track == "request 1"]
    assert told == ["queued", "admitted", "preempted", "admitted", "length"]
    assert shown.on("requests")[0].args["new_tokens"] == 5


def test_steps_of_engines_have_parts_and_levels(tmp_path: Path) -> None:
    with TraceFile(tmp_path / "t.json", clock=Clock()) as trace:
        trace.on_event(story.step(100.0, 0.010, waiting=3))
        trace.on_event(story.step(100.010, 0.005, rows=1, model_s=0.9, sampling_s=0.0))
    shown = read_chrome((tmp_path / "t.json").read_text())
    assert [(s.name, s.first, s.stop) for s in shown.on("engine")] == [
        *(("2 rows, 7 tokens", 0, 10_000_000), ("model", 1_000_000, 9_000_000)),
        *(("sampling", 9_000_000, 10_000_000), ("1 row, 7 tokens", 10_000_000, 15_000_000)),
        ("model", 10_000_000, 15_000_000),
    ]
    assert shown.tracks("engine") == {"steps"} and "gaps_s" not in shown.on("engine")[0].args
    assert [(s.name, s.args) for s in shown.levels[:2]] == [
        ("requests", {"running": 2, "waiting": 3, "set aside": 0}),
        ("pages", {"in use": 10}),
    ]


def test_a_server_may_trace_many_requests(tmp_path: Path) -> None:
    bus, clock = Bus(), Clock()
    with TraceFile(tmp_path / "t.json", bus, clock=clock) as trace:
        for number in range(50):
            bus.emit(events.Queued(request=number, prompt_tokens=1, waiting=1))
            clock.now_s += 0.1
            bus.emit(story.finished(number, clock.now_s - 0.1, 0.1, reason="cancelled"))
        assert not trace._tracks and not len(trace._lanes)
    assert len(read_chrome((tmp_path / "t.json").read_text()).tracks("requests")) == 50
