"""OpenTelemetry gets the same numbers, and requests as spans below whoever submitted them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from flowkv import Engine
from tests.engine.nano import Nano, make_kv
from tests.inside import Bridge, EngineStep, Histogram, StepPlanned, events
from tests.observe.story import Clock, finished, step, tell
from tests.observe.test_prometheus import Watched


class Telemetry:
    """An SDK that keeps what it is told."""

    def __init__(self) -> None:
        self.reader, self.spans = InMemoryMetricReader(), InMemorySpanExporter()
        self.meters = MeterProvider([self.reader], shutdown_on_exit=False)
        self.tracers = TracerProvider(shutdown_on_exit=False)
        self.tracers.add_span_processor(SimpleSpanProcessor(self.spans))
        self.meter, self.tracer = self.meters.get_meter("m"), self.tracers.get_tracer("t")

    def points(self) -> dict[tuple[str, tuple[tuple[str, Any], ...]], Any]:
        found = {}
        data = self.reader.get_metrics_data()
        for resource in data.resource_metrics if data else ():
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    for point in metric.data.data_points:
                        found[metric.name, tuple(sorted(point.attributes.items()))] = point
        return found


@pytest.fixture
def telemetry() -> Iterator[Telemetry]:
    made = Telemetry()
    yield made
    made.meters.shutdown()
    made.tracers.shutdown()


def test_metrics_agree_with_those_of_the_cache(telemetry: Telemetry) -> None:
    watched = Watched()
    with Bridge(watched, meter=telemetry.meter, tracer=telemetry.tracer, gaps=True):
        tell(watched.bus, Clock())
        watched.bus.emit(events.Hit(tier="host", tokens=30, n_bytes=3, tenant="alice"))
        points = telemetry.points()
        families = watched.metrics.families()
    told = 0
    for name, _, _, series in families:
        for labels, value in series:
            point = points.pop((f"flowkv.{name.removesuffix('_total')}", labels))
            told += 1
            if isinstance(value, Histogram):
                assert (point.count, point.sum) == (sum(value.counts), pytest.approx(value.total))
            else:
                assert point.value == value
    assert told > 15 and not points, "nothing else is told"
    assert "alice" not in str(families)


def test_requests_are_spans_below_their_submitter(telemetry: Telemetry) -> None:
    watched, clock = Watched(), Clock()
    with (
        Bridge(watched, meter=telemetry.meter, tracer=telemetry.tracer, clock=clock),
        telemetry.tracer.start_as_current_span("web request") as parent,
    ):
        tell(watched.bus, clock)
    spans = [s for s in telemetry.spans.get_finished_spans() if s.name != "web request"]
    requests = {s.attributes["flowkv.request"]: s for s in spans if s.name == "flowkv.request"}
    assert sorted(requests) == [0, 1]
    for span in requests.values():
        assert span.parent.span_id == parent.get_span_context().span_id
        below = [s for s in spans if s.parent.span_id == span.context.span_id]
        assert all(span.start_time <= s.start_time <= s.end_time <= span.end_time for s in below)
        assert not any(value == "alice" for s in below for value in s.attributes.values())
    phases = [s.name for s in spans if s.parent.span_id == requests[1].context.span_id]
    told = ("queued", "prefill", "aside", "prefill", "decode")
    assert phases == [f"flowkv.{phase}" for phase in told]
    one = requests[0]
    assert one.attributes["gen_ai.usage.output_tokens"] == 5
    assert one.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert one.end_time - one.start_time == pytest.approx(50e6, abs=2e3)
    assert one.events[0].timestamp - one.start_time == pytest.approx(20e6, abs=2e3)


def test_failures_are_errors_and_restores_are_spans(telemetry: Telemetry) -> None:
    watched = Watched()
    with Bridge(watched, meter=telemetry.meter, tracer=telemetry.tracer) as bridge:
        watched.bus.emit(events.Queued(request=0, prompt_tokens=1, waiting=1))
        watched.bus.emit(finished(0, 1.0, 2.0, reason="failed"))
        watched.bus.emit(finished(9, 1.0, 2.0))  # began before the bridge
        restored = {"resident_tokens": 0, "computed_tokens": 2, "loaded_tokens": 6, "n_bytes": 9}
        watched.bus.emit(
            events.RestoreEnded(request=0, tokens=8, started_s=1.0, seconds=0.5, **restored)
        )
        assert not bridge._parents and not len(bridge._lanes), "nothing is left behind"
    spans = {s.name: s for s in telemetry.spans.get_finished_spans()}
    assert spans["flowkv.request"].status.status_code is StatusCode.ERROR
    assert spans["flowkv.restore"].attributes["flowkv.loaded_tokens"] == 6


def test_spans_follow_the_time_of_day(
    telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is set in the weeks of a server, and goes on while a machine sleeps."""
    watched, day_ns = Watched(), time.time_ns()
    with Bridge(watched, meter=telemetry.meter, tracer=telemetry.tracer):
        monkeypatch.setattr(time, "time_ns", lambda: day_ns + 86400 * 10**9)
        watched.bus.emit(events.Queued(request=0, prompt_tokens=1, waiting=1))
        watched.bus.emit(finished(0, time.perf_counter() - 1.0, 1.0))
    span = telemetry.spans.get_finished_spans()[-1]
    assert abs(span.end_time - day_ns - 86400e9) < 3600e9


def test_nothing_is_told_once_it_is_closed(telemetry: Telemetry) -> None:
    watched = Watched()
    bridge = Bridge(watched, meter=telemetry.meter, tracer=telemetry.tracer)
    watched.bus.emit(events.Miss(tokens=1))
    assert telemetry.points()
    bridge.close()
    bridge.close()
    watched.bus.emit(finished(0, 1.0, 2.0))
    assert not telemetry.points() and not telemetry.spans.get_finished_spans()
    assert not watched.bus.wants(EngineStep)


def test_gaps_cost_much_and_are_told_if_asked_for(telemetry: Telemetry) -> None:
    watched = Watched()
    with Bridge(watched, meter=telemetry.meter, tracer=telemetry.tracer):
        watched.bus.emit(step(1.0))
        names = {name for name, _ in telemetry.points()}
    assert "flowkv.engine_steps" in names and "flowkv.engine_step_seconds" in names
    assert "flowkv.inter_token_seconds" not in names


def test_the_thread_of_an_engine_knows_who_submitted(telemetry: Telemetry) -> None:
    parents = {}
    with (
        make_kv() as kv,
        Bridge(kv, meter=telemetry.meter, tracer=telemetry.tracer),
        Engine(Nano(), kv) as engine,
    ):
        for name in ("one", "two"):
            with telemetry.tracer.start_as_current_span(name) as span:
                answer = engine.submit([1, 2, 3], max_new_tokens=2)
            parents[answer.number] = span.get_span_context().span_id
            answer.result(90)
        alone = engine.submit([1, 2, 3], max_new_tokens=2)
        alone.result(90)
    spans = telemetry.spans.get_finished_spans()
    requests = {s.attributes["flowkv.request"]: s for s in spans if s.name == "flowkv.request"}
    assert requests.pop(alone.number).parent is None
    assert {number: span.parent.span_id for number, span in requests.items()} == parents


def test_planned_steps_come_too_often(telemetry: Telemetry) -> None:
    with make_kv() as kv, Bridge(kv, meter=telemetry.meter, tracer=telemetry.tracer):
        assert kv.bus.wants(EngineStep) and not kv.bus.wants(StepPlanned)
