"""Export of metrics and spans through OpenTelemetry, wherever the program sends them.

    from flowkv.observe.otel import Bridge

    with Bridge(kv):
        engine.run(requests)

Only the interface package is needed (`opentelemetry-api`); nothing is sent before the program has
set up an SDK. Counters and gauges are read from `KV.metrics` when the SDK asks, histograms are
recorded as events come. A request of an engine is a span, a child of the span that was active at
its submission, and has a child span for each phase.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from flowkv.core.errors import MissingDependencyError
from flowkv.observe import events
from flowkv.observe.events import Closing, Event
from flowkv.observe.metrics import NAMES, RULES, Observable, read
from flowkv.observe.timeline import OF_REQUESTS, Lanes, RequestLane

try:
    from opentelemetry import context, metrics, trace
except ImportError as error:
    raise MissingDependencyError("OpenTelemetry", "otel") from error

_MOST = 4096  # requests under way that have spans; beyond, every second one has none
_FRESH_S = 0.05  # a collection reads instrument by instrument: all share one reading


class Bridge(Closing):
    """Exporter of a cache's metrics, and spans of its engines, to OpenTelemetry until closed.

    Instruments are named `flowkv.` and a name of `flowkv.observe.metrics`, without `_total`.
    The SDK cannot remove an instrument: those of a closed bridge yield no values.

    Args:
        kv: The cache.
        meter: Meter that makes the instruments; default `flowkv`'s of the global provider.
        tracer: Tracer that makes the spans; default `flowkv`'s of the global provider.
        gaps: Also record the time between any two tokens of a row. OpenTelemetry takes its values
            one by one, at about ten microseconds each, so that this costs a large batch a few per
            cent of its time. The mean of each request (`tpot_seconds`) is recorded anyway.
        clock: Clock of the events, in seconds.
    """

    def __init__(
        self,
        kv: Observable,
        *,
        meter: Any = None,
        tracer: Any = None,
        gaps: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._metrics, self.closed = kv.metrics, False
        self._tracer = trace.get_tracer("flowkv") if tracer is None else tracer
        self._lock, self._lanes = threading.Lock(), Lanes(most=_MOST)
        self._parents: dict[int, Any] = {}
        self._values: dict[str, list[Any]] = {}
        self._read_s = float("-inf")
        self._clock, self._epoch_ns = clock, 0
        meter = metrics.get_meter("flowkv") if meter is None else meter
        self._histograms = self._instruments(meter)
        self._gaps, bus = gaps, kv.bus
        # Plans are too frequent to be emitted for this alone, as for `KV.metrics`.
        spread = {one.event for one in NAMES.values() if one.kind == "histogram"} - {"StepPlanned"}
        timed = [kind for kind in RULES if kind.__name__ in spread]
        self._subscriptions = [
            bus.subscribe(self._record, *timed),
            bus.subscribe(self._span, *OF_REQUESTS, events.RestoreEnded),
        ]
        self._steps = kv.metrics.follow_steps(bus)

    # ---- metrics

    def _instruments(self, meter: Any) -> dict[str, Any]:
        histograms = {}
        for name, metric in NAMES.items():
            told = {"unit": _unit(name), "description": metric.meaning}
            called = f"flowkv.{name.removesuffix('_total')}"
            if metric.kind == "histogram":
                histograms[name] = meter.create_histogram(called, **told)
            elif metric.kind == "counter":
                meter.create_observable_counter(called, [self._reader(name)], **told)
            else:
                meter.create_observable_gauge(called, [self._reader(name)], **told)
        return histograms

    def _reader(self, name: str) -> Callable[[Any], Iterable[Any]]:
        def answer(_: Any) -> Iterable[Any]:
            with self._lock:
                now_s = time.monotonic()
                if now_s - self._read_s > _FRESH_S:
                    self._values, self._read_s = self._all(), now_s
                return self._values.get(name, ())

        return answer

    def _all(self) -> dict[str, list[Any]]:
        if self.closed:
            return {}
        plain = [one for one in self._metrics.families() if one.kind != "histogram"]
        return {one.name: [metrics.Observation(v, dict(k)) for k, v in one.series] for one in plain}

    def _record(self, event: Event) -> None:
        labels, readings = read(event)
        for kind, name, values in readings:
            if kind == "histogram" and (self._gaps or name != "inter_token_seconds"):
                record = self._histograms[name].record
                for value in values:
                    record(value, dict(labels))

    # ---- spans

    def _span(self, event: Event) -> None:
        now_s = self._clock()
        with self._lock:
            self._epoch_ns = time.time_ns() - round(now_s * 1e9)  # the time of day may be set
            self._lanes.record(event, now_s)
            match event:
                case events.RestoreEnded():
                    self._restore(event)
                case events.Queued():
                    self._parents[event.request] = context.get_current()
                case events.Finished():
                    parent = self._parents.pop(event.request, None)
                    if lane := self._lanes.pop(event.request):
                        self._request(event, lane, parent)

    def _request(self, event: events.Finished, lane: RequestLane, parent: Any) -> None:
        span = self._tracer.start_span(
            "flowkv.request",
            context=parent,
            start_time=self._ns(event.started_s),
            attributes={
                "flowkv.request": event.request,
                "flowkv.reused_tokens": event.reused_tokens,
                "flowkv.preempted": event.preempted,
                "gen_ai.usage.input_tokens": event.prompt_tokens,
                "gen_ai.usage.output_tokens": event.new_tokens,
                "gen_ai.response.finish_reasons": (event.reason,),
            },
        )
        if event.ttft_s:
            first_s = event.started_s + event.ttft_s
            span.add_event("first token", timestamp=self._ns(first_s))
        if event.reason == "failed":
            span.set_status(trace.StatusCode.ERROR)
        below = trace.set_span_in_context(span)
        for phase, first_s, stop_s in lane.pieces:
            part = self._tracer.start_span(
                f"flowkv.{phase}", context=below, start_time=self._ns(first_s)
            )
            part.end(self._ns(stop_s))
        span.end(self._ns(event.started_s + event.seconds))

    def _restore(self, event: events.RestoreEnded) -> None:
        span = self._tracer.start_span(
            "flowkv.restore",
            start_time=self._ns(event.started_s),
            attributes={
                "flowkv.computed_tokens": event.computed_tokens,
                "flowkv.loaded_tokens": event.loaded_tokens,
                "flowkv.bytes": event.n_bytes,
                "flowkv.exposed_s": event.exposed_s,
                "flowkv.failed_loads": event.failed,
            },
        )
        span.end(self._ns(event.started_s + event.seconds))

    def _ns(self, at_s: float) -> int:
        return round(at_s * 1e9) + self._epoch_ns

    # ---- closing

    def close(self) -> None:
        """End the export. Safe to call again."""
        self.closed = True
        for subscription in self._subscriptions:
            subscription.close()
        self._steps.close()
        with self._lock:
            self._values, self._read_s = {}, float("-inf")


def _unit(name: str) -> str:
    for part, unit in (("bytes_per_second", "By/s"), ("seconds", "s"), ("bytes", "By")):
        if name.removesuffix("_total").endswith(part):
            return unit
    return "1"
