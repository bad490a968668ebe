"""Timelines of restores and of engines' requests, statistics of serving, and trace files.

    with Timelines(kv.bus) as restores:
        model.generate(**inputs)
    for restore in restores.ended:
        print(restore.describe())

Without a listener nothing is collected, and span events are not even made.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from flowkv.core.errors import ConfigError
from flowkv.observe import events
from flowkv.observe.events import Bus, Closing, Event, Subscription
from flowkv.observe.metrics import RULES, Level, Metrics, Series, Spread, Tenancy

COMPUTING = ("compute", "suffix")
"""Engines that are the model; every other one is a tier."""

Number = TypeVar("Number", int, float)
_MOST_UNDER_WAY = 1024  # requests that may still end; older ones were cancelled


class Meeting(NamedTuple):
    """Point where the computed tokens of a restore met the loaded ones.

    Attributes:
        token: First token that was loaded; tokens before it were computed or resident.
        at_s: Time from the restore's begin until the prefix was complete.
    """

    token: int
    at_s: float


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """Timeline of one restore.

    Attributes:
        ended: Its result.
        spans: Its pieces, by their begin.
    """

    ended: events.RestoreEnded
    spans: tuple[events.RestoreSpan, ...]

    @property
    def tiers(self) -> list[str]:
        """Return the tiers that were loaded from, in order of their first piece."""
        return [name for name in self.engines if name not in COMPUTING]

    @property
    def engines(self) -> list[str]:
        """Return the names of all engines, computing ones first."""
        seen = dict.fromkeys(span.engine for span in self.spans)
        return sorted(seen, key=lambda name: (name not in COMPUTING, name == "suffix"))

    @property
    def names(self) -> dict[str, str]:
        """Return a short name for each engine: without path if a tier is alone of its kind."""
        short = {name: name.partition(":")[0] for name in self.engines}
        taken = list(short.values())
        return {name: kind if taken.count(kind) == 1 else name for name, kind in short.items()}

    @property
    def layers(self) -> int:
        """Return the number of layers that pieces cover; 1 if there is none."""
        return max((span.layer + span.layers for span in self.spans), default=1)

    @property
    def until_s(self) -> float:
        """Return the time until the last piece ended: the suffix may outlast the restore."""
        last = max((self.at(span)[1] for span in self.spans), default=0.0)
        return max(last, self.ended.seconds)

    @property
    def met(self) -> Meeting | None:
        """Return where and when computing and loading met; None if one of them did nothing."""
        ended = self.ended
        if not ended.computed_tokens or not ended.loaded_tokens:
            return None
        last = max((self.at(s)[1] for s in self.spans if s.engine != "suffix"), default=0.0)
        return Meeting(ended.resident_tokens + ended.computed_tokens, last)

    @property
    def bound_s(self) -> float:
        """Return the lower bound; 0.0 if unknown, or beaten because of wrong rates."""
        return self.ended.bound_s if self.ended.bound_s <= self.ended.seconds else 0.0

    @property
    def bound_ratio(self) -> float:
        """Return the duration as a multiple of the lower bound; 0.0 while the bound is unknown."""
        return self.ended.seconds / self.bound_s if self.bound_s > 0 else 0.0

    def at(self, span: events.RestoreSpan) -> tuple[float, float]:
        """Return begin and end of a piece in seconds from the restore's begin, at least 0."""
        first = span.started_s - self.ended.started_s
        return max(0.0, first), max(0.0, first + span.seconds)

    def busy_s(self, *engines: str) -> float:
        """Return the seconds in which any of these engines worked for the restore."""
        return covered_s(self.at(span) for span in self.spans if span.engine in engines)

    def overlap_s(self) -> float:
        """Return the seconds in which the model computed while something was being loaded."""
        computing, loading = self.busy_s(*COMPUTING), self.busy_s(*self.tiers)
        return max(0.0, computing + loading - covered_s(map(self.at, self.spans)))

    def describe(self) -> str:
        """Return a description of the restore in one line."""
        ended, met = self.ended, self.met
        parts = [f"{ended.tokens:,} tokens in {ended.seconds * 1e3:,.1f} ms"]
        if ended.resident_tokens:
            parts.append(f"{ended.resident_tokens:,} there already")
        if ended.computed_tokens:
            parts.append(f"{ended.computed_tokens:,} computed")
        if ended.loaded_tokens:
            tiers = [self.names[name] for name in self.tiers]
            source = f" from {' and '.join(tiers)}" if tiers else ""
            parts.append(f"{ended.loaded_tokens:,} loaded{source}")
        if met is not None:
            parts.append(f"met at token {met.token:,} after {met.at_s * 1e3:,.1f} ms")
        if self.bound_ratio:
            parts.append(f"{self.bound_ratio:.2f}x the lower bound")
        return ", ".join(parts)


class Timelines(Closing):
    """Collector of a cache's restores while it is open. Thread-safe.

    Args:
        bus: `KV.bus`.
        most: Restores to keep; older ones are dropped.

    Attributes:
        longest: The longest restore so far that loaded anything; None before the first.
    """

    def __init__(self, bus: Bus, *, most: int = 64) -> None:
        self._lock = threading.Lock()
        self._under_way: OrderedDict[int, list[events.RestoreSpan]] = OrderedDict()
        self._ended: deque[Timeline] = deque(maxlen=most)
        self.longest: Timeline | None = None
        self._subscription = bus.subscribe(self.note, events.RestoreSpan, events.RestoreEnded)

    def note(self, event: events.RestoreSpan | events.RestoreEnded) -> None:
        """Record a piece of a restore, or its end."""
        with self._lock:
            if isinstance(event, events.RestoreSpan):
                if idle(event):
                    return
                self._under_way.setdefault(event.request, []).append(event)
                if len(self._under_way) > _MOST_UNDER_WAY:
                    self._under_way.popitem(last=False)
                return
            spans = sorted(self._under_way.pop(event.request, ()), key=lambda s: s.started_s)
            timeline = Timeline(ended=event, spans=tuple(spans))
            self._ended.append(timeline)
            before = self.longest.ended.seconds if self.longest is not None else -1.0
            if event.loaded_tokens and event.seconds > before:
                self.longest = timeline

    @property
    def ended(self) -> list[Timeline]:
        """Return the restores that ended, oldest first."""
        with self._lock:
            return list(self._ended)

    def __iter__(self) -> Iterator[Timeline]:
        return iter(self.ended)

    def close(self) -> None:
        """Stop collecting; the restores stay."""
        self._subscription.close()


def idle(span: events.RestoreSpan) -> bool:
    """Return whether a piece needed no work: its layers do not attend to its tokens."""
    return not (span.seconds or span.n_bytes)


def joined(pieces: Iterable[tuple[Number, Number]]) -> list[tuple[Number, Number]]:
    """Return intervals in ascending order, with touching and overlapping ones merged."""
    found: list[tuple[Number, Number]] = []
    for first, stop in sorted(pieces):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((first, stop))
    return found


def covered_s(pieces: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    return sum(stop - first for first, stop in joined(pieces))


# Phases of an engine's requests: waiting, prefill, decoding, set aside.

Phase = Literal["queued", "prefill", "decode", "aside"]

PHASES: tuple[Phase, ...] = ("queued", "prefill", "decode", "aside")
"""Waiting for admission; until the first token; from then on; preempted, waiting to resume."""


OF_REQUESTS = (events.Queued, events.Admitted, events.Preempted, events.Finished)
"""Events that `Lanes` are made of."""


class RequestPhase(NamedTuple):
    """Phase of a request; times are those of `time.perf_counter`."""

    phase: Phase
    first_s: float
    stop_s: float


@dataclass
class RequestLane:
    """Phases of a request.

    Attributes:
        request: Its number.
        started_s: Time of its submission.
        pieces: Its phases, in order.
        ended: Its result; None while it is under way.
    """

    request: int
    started_s: float
    pieces: list[RequestPhase] = field(default_factory=list)
    ended: events.Finished | None = None


class Lanes:
    """Phases of requests by their events, evenly sampled if requests are many. Not thread-safe.

    Args:
        most: Most requests to keep. Beyond that every second one is dropped, and of later requests
            the same share.

    Attributes:
        stride: Requests for each one that is kept.
    """

    def __init__(self, *, most: int = 128) -> None:
        self._most, self.stride = most, 1
        self._begun, self._places = 0, dict[int, int]()  # request numbers may have gaps
        self._lanes: dict[int, RequestLane] = {}
        self._open: dict[int, tuple[Phase, float]] = {}  # phase of a request, and its begin

    def record(self, event: Event, now_s: float) -> None:
        """Record an event of a request; other events are ignored."""
        match event:
            case events.Queued():
                self._begin(event.request, now_s)
            case events.Admitted():  # `Finished` brings the time of the first token
                self._enter(event.request, "prefill", now_s)
            case events.Preempted():
                self._enter(event.request, "aside", now_s)
            case events.Finished():
                self._finish(event)

    def _begin(self, request: int, now_s: float) -> None:
        place, self._begun = self._begun, self._begun + 1
        if place % self.stride:
            return
        self._places[request] = place
        self._lanes[request] = RequestLane(request, now_s)
        self._open[request] = "queued", now_s
        while len(self._lanes) > self._most:
            self.stride *= 2
            for one in [one for one, place in self._places.items() if place % self.stride]:
                self.pop(one)

    def _finish(self, event: events.Finished) -> None:
        lane = self._lanes.get(event.request)
        if lane is None:
            return
        self._enter(event.request, "queued", event.started_s + event.seconds)
        self._open.pop(event.request, None)
        first_token_s = event.started_s + event.ttft_s if event.ttft_s else float("inf")
        lane.started_s, lane.ended = event.started_s, event
        lane.pieces = [part for piece in lane.pieces for part in _parted(piece, first_token_s)]

    def pop(self, request: int) -> RequestLane | None:
        """Remove and return a request's phases; None if they are not kept."""
        self._places.pop(request, None)
        self._open.pop(request, None)
        return self._lanes.pop(request, None)

    def under_way(self, now_s: float) -> list[RequestLane]:
        """Return the requests that are not over, with their current phase until now."""
        found = []
        for request, (phase, since_s) in self._open.items():
            lane = self._lanes[request]
            pieces = [*lane.pieces, RequestPhase(phase, since_s, max(now_s, since_s))]
            found.append(RequestLane(request, lane.started_s, pieces))
        return found

    def _enter(self, request: int, phase: Phase, now_s: float) -> None:
        if request in self._open:
            before, since_s = self._open[request]
            self._open[request] = phase, now_s
            if now_s > since_s:
                self._lanes[request].pieces.append(RequestPhase(before, since_s, now_s))

    def __iter__(self) -> Iterator[RequestLane]:
        """Yield the requests kept, in order of submission, with the phases that are over."""
        return iter(sorted(self._lanes.values(), key=lambda lane: lane.request))

    def __len__(self) -> int:
        return len(self._lanes)


def _parted(piece: RequestPhase, first_token_s: float) -> Iterator[RequestPhase]:
    """Split a phase of computing into prefill until the first token, and decoding from then on."""
    phase, first_s, stop_s = piece
    if phase != "prefill" or stop_s <= first_token_s:
        yield piece
        return
    if first_s < first_token_s:
        yield RequestPhase("prefill", first_s, first_token_s)
    yield RequestPhase("decode", max(first_s, first_token_s), stop_s)


# Statistics of serving: latencies, throughput, use of memory; in bounded memory, for any time.
#
#     with Serving(kv.bus) as serving:
#         engine.run(requests)
#     print(serving.summary()["ttft_s"]["p95"])
#
# Without a listener nothing is collected, and step events are not even made.

LATENCIES = {
    "ttft_s": "time to the first token",
    "tpot_s": "mean time of a further token, by request",
    "inter_token_s": "time between two tokens",
    "queue_s": "wait for the first admission",
    "aside_s": "wait of preempted requests",
    "request_s": "from submission to the end",
    "held_s": "requests: waiting for loads of their own prefix",
    "restore_s": "restores",
    "restore_exposed_s": "restores: the caller waited for loads",
    "restore_hidden_s": "restores: behind other work",
    "step_s": "steps",
    "model_s": "steps: the forward",
    "sampling_s": "steps: choice of tokens",
    "bookkeeping_s": "steps: everything else",
}
"""Times with a collected distribution, and their descriptions."""

MEMORY = ("device_used_bytes", "tier_used_bytes")
"""Levels that are collected over time."""

_MOVES = {kind for kind, told in RULES.items() if "tier" in next(iter(told.values())).labels}
_MOVES.add(events.Miss)
_BESIDE: dict[str, tuple[str, str, type[Event]]] = {
    "results": ("remembered", "rows", events.Remembered),
    "embedding rows": ("embedding", "rows", events.RowsRead),
    "units of weights": ("weights", "units", events.WeightsRead),
}


class Serving(Closing):
    """Collector of statistics of a cache and its engines while it is open. Thread-safe.

    Args:
        bus: `KV.bus`.
        levels: Read from time to time for the use of memory, on the threads that emit events;
            None leaves that out.
        every_s: Least time between two such readings.
        clock: Clock of the events, in seconds.

    Attributes:
        spreads: Distributions of the times in `LATENCIES`, by name.
        series: Over time: "rows", "waiting", "aside" and "kv" (pages held, as a share of all),
            the used bytes of each place, and counted "made", "prefill" and "decode" tokens.
        lanes: Phases of requests.
        moves: Counts of requests, hits, transfers and losses.
        tenants: Hit tokens of each tenant.
    """

    def __init__(
        self,
        bus: Bus,
        *,
        levels: Callable[[], Iterable[Level]] | None = None,
        every_s: float = 0.05,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._lock, self._clock = threading.RLock(), clock
        self._levels, self._every_s, self._next_s = levels, every_s, -1.0
        self.spreads = {name: Spread() for name in LATENCIES}
        self.series, self.lanes = Series(), Lanes()
        self.moves, self.tenants = Metrics(), Tenancy(bus)
        self._totals: Counter[str] = Counter()  # of steps
        self._most: dict[str, float] = {}
        self._started_s, self._stopped_s = clock(), 0.0
        self._busy_s = self._used_s = self._row_s = 0.0
        self._begun_s, self._until_s = float("inf"), 0.0  # of all steps
        self._subscriptions = [
            self.moves.subscribe(bus, *OF_REQUESTS, *_MOVES, *(one[2] for one in _BESIDE.values())),
            bus.subscribe(self.note, *OF_REQUESTS, events.EngineStep, events.RestoreEnded),
            bus.subscribe(self._moved, *_MOVES),
        ]

    def note(self, event: Event) -> None:
        """Record an event of an engine, or the end of a restore."""
        spreads = self.spreads
        with self._lock:
            self.lanes.record(event, self._clock())
            match event:
                case events.EngineStep():
                    self._step(event)
                case events.Admitted():
                    spreads["aside_s" if event.resumed else "queue_s"].add(event.queued_s)
                case events.Finished():
                    self._finished(event)
                case events.RestoreEnded():
                    exposed_s = min(event.exposed_s, event.seconds)
                    spreads["restore_s"].add(event.seconds)
                    spreads["restore_exposed_s"].add(exposed_s)
                    spreads["restore_hidden_s"].add(event.seconds - exposed_s)

    # ---- events, under the lock

    def _step(self, step: events.EngineStep) -> None:
        spreads, seconds = self.spreads, step.seconds
        spreads["step_s"].add(seconds)
        spreads["model_s"].add(step.model_s)
        spreads["sampling_s"].add(step.sampling_s)
        spreads["bookkeeping_s"].add(max(0.0, seconds - step.model_s - step.sampling_s))
        spreads["inter_token_s"].extend(step.gaps_s)
        used = step.pages / step.total_pages if step.total_pages else 0.0
        self._begun_s = min(self._begun_s, step.started_s)
        self._until_s = max(self._until_s, step.started_s + seconds)
        self._busy_s += seconds
        self._used_s += used * seconds
        self._row_s += step.rows * seconds
        levels = {"rows": step.rows, "waiting": step.waiting, "aside": step.aside, "kv": used}
        for name, level in levels.items():
            self._most[name] = max(self._most.get(name, 0), level)
        self.series.set(step.started_s, levels, weight=seconds)
        counted = {"made": step.made_tokens, "prefill": step.prefill_tokens}
        counted["decode"] = step.decode_tokens
        self._totals.update(counted, steps=1)
        self.series.count(step.started_s, counted)
        self._sample(step.started_s + seconds)

    def _finished(self, event: events.Finished) -> None:
        self.spreads["request_s"].add(event.seconds)
        if event.ttft_s:
            self.spreads["ttft_s"].add(event.ttft_s)
        if event.tpot_s:
            self.spreads["tpot_s"].add(event.tpot_s)
        if event.restore_s:
            self.spreads["held_s"].add(event.exposed_s)

    def _moved(self, event: Event) -> None:
        with self._lock:
            self._sample(self._clock())

    def _sample(self, now_s: float) -> None:
        if self._levels is None or now_s < self._next_s:
            return
        self._next_s = now_s + self._every_s
        used = [level for level in self._levels() if level.name in MEMORY]
        self.series.set(now_s, {next(iter(one.labels.values())): one.value for one in used})

    # ---- reading

    @property
    def now_s(self) -> float:
        """Return the time, or the end of collecting once it is closed."""
        return self._stopped_s or self._clock()

    def places(self) -> list[str]:
        """Return the devices and tiers with a collected use."""
        own = {"rows", "waiting", "aside", "kv", "made", "prefill", "decode"}
        with self._lock:
            return [name for name in self.series.names if name not in own]

    def summary(self) -> dict[str, Any]:
        """Return plain numbers, ready for JSON.

        Each of `LATENCIES` is {"count", "mean", "p50", "p90", "p95", "p99", "max"} in seconds,
        with quantiles of the newest 65,536 values. `tokens_per_s` counts new tokens from the
        beginning of the first step to the end of the last one. The means of `rows` and
        `kv_utilisation` are over the time of steps, weighted by duration. `beside` has counts of
        units `asked` for and `found`, and `read_bytes`, of results, embeddings and weights.
        """
        with self._lock:
            span_s = max(0.0, self._until_s - self._begun_s)
            totals, most, busy_s = self._totals, self._most, self._busy_s
            made, finished = totals["made"], self.moves.by("finished_total", "reason")
            found = self.moves.by("hit_tokens_total", "tier")
            known = sum(found.values()) + self.moves.total("miss_tokens_total")
            kept, dropped = (self.moves.total("preemptions_total", kept=k) for k in (True, False))
            reused = self.moves.total("admitted_reused_tokens_total", resumed=False)
            return {
                "seconds": self.now_s - self._started_s,
                "requests": int(self.moves.total("requests_total")),
                "finished": finished,
                "steps": totals["steps"],
                "busy_s": busy_s,
                "made_tokens": made,
                "prefill_tokens": totals["prefill"],
                "reused_tokens": int(reused),
                "tokens_per_s": made / span_s if span_s else 0.0,
                "requests_per_s": sum(finished.values()) / span_s if span_s else 0.0,
                "rows": {"mean": _share(self._row_s, busy_s), "max": most.get("rows", 0)},
                "waiting": {"max": most.get("waiting", 0)},
                "kv_utilisation": {"mean": _share(self._used_s, busy_s), "max": most.get("kv", 0)},
                "preempted": {"kept": int(kept), "dropped": int(dropped)},
                "hit_rate": {tier: tokens / known for tier, tokens in found.items() if known},
                "tenants": self.tenants.report(),
                "beside": self._beside(),
                **{name: spread.summary() for name, spread in self.spreads.items()},
            }

    def _beside(self) -> dict[str, dict[str, float]]:
        """Return units asked for and found beside K and V, of each kind that was asked for."""
        told = {}
        for what, (begin, unit, _) in _BESIDE.items():
            if asked := self.moves.total(f"{begin}_{unit}_total"):
                found = self.moves.total(f"{begin}_found_{unit}_total")
                n_bytes = self.moves.total(f"{begin}_read_bytes_total")
                told[what] = {"asked": asked, "found": found, "read_bytes": n_bytes}
        return told

    def close(self) -> None:
        """Stop collecting; the statistics stay."""
        for subscription in self._subscriptions:
            subscription.close()
        self.tenants.close()
        with self._lock:
            self._stopped_s = self._stopped_s or self._clock()


class OpenReport(Closing):
    """Report that collects until it is closed, and is then written. Thread-safe.

    Attributes:
        serving: Collected data; `serving.summary()` has the numbers.
        closed: Whether it was closed.
    """

    serving: Serving
    closed = False

    def summary(self) -> dict[str, Any]:
        """Return plain numbers, ready for JSON."""
        return self.serving.summary()

    def write(self) -> Path:
        """Write the report as of now; return its path.

        Raises:
            OSError: The file cannot be written.
        """
        raise NotImplementedError


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


# Traces for Perfetto and `chrome://tracing`: the work of each engine and tier over time.
#
#     with kv.trace("restore.json"):
#         model.generate(**inputs)
#
# The file is in Chrome's JSON array format, one event per line. Each line is written at once, and
# the format does not need its end: the file of a process that died can be opened. Counts and
# times are written, as in the events; no tokens, and no names of tenants.
#
# Track, label and arguments of each event in a trace.

_SERVING, _ENGINES, _TIERS, _RESTORES, _REQUESTS, _EVENTS = range(6)  # in the order shown
_HIDDEN = frozenset({"tenant", "started_s", "seconds", "gaps_s"})


class TracePlace(NamedTuple):
    """Track on which an event is shown, and its label.

    Attributes:
        rank: Sort key of groups.
        group: Name of a "process" of the format.
        track: Name of a "thread" of that process.
        label: Name of the slice.
    """

    rank: int
    group: str
    track: str
    label: str


def place_of(event: Event) -> TracePlace:
    """Return the track and label of an event."""
    match event:
        case events.RestoreSpan():
            return _of_span(event)
        case events.RestoreEnded():
            label = f"restore {event.tokens} tokens"
            return TracePlace(_RESTORES, "restores", f"restore {event.request}", label)
        case events.EngineStep():
            rows = "1 row" if event.rows == 1 else f"{event.rows} rows"
            tokens = event.prefill_tokens + event.decode_tokens
            return TracePlace(_SERVING, "engine", "steps", f"{rows}, {tokens} tokens")
        case events.Queued() | events.Admitted() | events.Preempted():
            return request_place(event.request, type(event).__name__.lower())
        case events.StepPlanned():
            return TracePlace(_ENGINES, "compute", "steps", f"step, {event.new_tokens} tokens")
    moved = isinstance(event, events.Promoted | events.Demoted)
    tier: str = getattr(event, "source" if moved else "tier", "")
    label = type(event).__name__.lower()
    if tier:
        return TracePlace(_TIERS, tier, tier, label)
    return TracePlace(_EVENTS, "events", "events", label)


def request_place(request: int, label: str) -> TracePlace:
    """Return the track of a request of an engine."""
    return TracePlace(_REQUESTS, "requests", f"request {request}", label)


def arguments(event: Event) -> dict[str, Any]:
    """Return the fields that a viewer shows for a selected event, without names of tenants."""
    fields = msgspec.structs.asdict(event)
    told = {name: value for name, value in fields.items() if name not in _HIDDEN}
    return {k: v.hex() if isinstance(v, bytes) else v for k, v in told.items()}


def _of_span(span: events.RestoreSpan) -> TracePlace:
    tokens = f"{span.token}-{span.token + span.tokens}"
    if span.engine == "suffix":
        return TracePlace(_ENGINES, "compute", "compute", f"suffix, {_layers(span)}")
    if span.engine == "compute":
        return TracePlace(_ENGINES, "compute", "compute", f"compute {tokens}")
    part = "" if span.layer == 0 and span.layers > 1 else f", {_layers(span)}"
    return TracePlace(_TIERS, span.engine, span.engine, f"load {tokens}{part}")


def _layers(span: events.RestoreSpan) -> str:
    last = span.layer + span.layers - 1
    return f"layer {last}" if span.layers == 1 else f"layers {span.layer}-{last}"


_MOST = 4096  # requests under way; beyond, every second one is not drawn


class TraceFile(Closing):
    """Trace that is being written, as `KV.trace` returns it. Ends with `close`, or the cache.

    Each engine and each tier is a group of its own, a "process" of the format, and so are requests
    and restores, with a track each. Overlapping slices go on further tracks of their group, since
    the slices of one track may not cross. Time before the trace began is cut off. A failed write
    ends the trace, with a warning, and nothing else. The phases of a request are drawn once it is
    over, or when the trace ends.

    Args:
        path: The file; an old one is replaced.
        bus: Source of the events; None if only `on_event` brings any.
        warn: Called with a message when a write fails.
        clock: Clock of the events, in seconds.

    Raises:
        ConfigError: The file cannot be created.

    Attributes:
        events: Events written so far.
        closed: Whether the trace has ended.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        bus: Bus | None = None,
        *,
        warn: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.path, self.events, self.closed = Path(path), 0, False
        self._warn, self._clock, self._pid = warn, clock, os.getpid()
        self._lock = threading.Lock()
        self._groups: dict[str, int] = {}
        self._tracks: dict[tuple[str, str], list[_Track]] = {}
        self._numbers, self._lanes = 0, Lanes(most=_MOST)
        self._began_ns = _ns(clock())
        try:  # unbuffered: a line is in the file, whole, before the next event happens
            self._file = self.path.open("wb", buffering=0)
            self._size = self._file.write(b"[")
        except OSError as error:
            raise ConfigError(
                f"a trace cannot be written to {self.path} ({error.strerror or error})",
                "Name a file in a directory that can be written",
            ) from error
        self._subscription: Subscription | None = bus.subscribe(self.on_event) if bus else None

    def on_event(self, event: Event) -> None:
        """Write an event."""
        now_s, problem = self._clock(), ""
        with self._lock:
            if self.closed or os.getpid() != self._pid:  # a forked child shares the file
                return
            try:
                lines = self._lines(event, now_s)
                self._write(lines)
                self.events += bool(lines)
            except OSError as error:
                problem = f"The trace {self.path} ends here, as it cannot be written ({error})."
                self._end()
        if problem and self._warn is not None:
            self._warn(problem)

    def _write(self, lines: list[bytes]) -> None:
        # The comma comes before a line: at any moment the file ends with an event.
        text = b"".join(b",\n" + line for line in lines)[self._size == 1 :]
        if self._file.write(text) != len(text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += len(text)

    # ---- lines of an event

    def _lines(self, event: Event, now_s: float) -> list[bytes]:
        self._lanes.record(event, now_s)
        if isinstance(event, events.Finished):
            lane = self._lanes.pop(event.request)
            lines = self._request(lane) if lane is not None else []
            place = request_place(event.request, event.reason)
            lines += self._shown(place, event, (now_s, now_s))
            self._tracks.pop((place.group, place.track), None)  # nothing more comes there
            return lines
        place = place_of(event)
        seconds = getattr(event, "seconds", 0.0)
        started_s = getattr(event, "started_s", now_s - seconds)
        if seconds and _ns(started_s + seconds) <= self._began_ns:
            return []
        if isinstance(event, events.RestoreSpan) and idle(event):
            return []
        if isinstance(event, events.Restored) and self._drawn(place, self._at(started_s)):
            started_s += seconds  # its pieces are drawn already
            seconds = 0.0
        lines = self._shown(place, event, (started_s, started_s + seconds))
        if isinstance(event, events.RestoreEnded):  # the last event of its track
            del self._tracks[place.group, place.track]
        return lines

    def _shown(self, place: TracePlace, event: Event, when: tuple[float, float]) -> list[bytes]:
        """Return an event's lines: a slice, or an instant if it took no time, and its parts."""
        first, stop = map(self._at, when)
        track, lines = self._track(place, first, stop)
        kind = type(event).__name__
        lines.append(_line(track, place.label, kind, (first, stop), arguments(event)))
        if isinstance(event, events.EngineStep):
            lines += self._parts(track, event, first, stop)
        return lines

    def _parts(self, track: _Track, step: events.EngineStep, first: int, stop: int) -> list[bytes]:
        """Return the slices of forward and sampling at the end of their step, and its counters."""
        middle = max(first, stop - _ns(step.sampling_s))
        begin = max(first, middle - _ns(step.model_s))
        parts, kind = {"model": (begin, middle), "sampling": (middle, stop)}, "EngineStep"
        lines = [_line(track, name, kind, (a, b), {}) for name, (a, b) in parts.items() if a < b]
        crowd = {"running": step.rows, "waiting": step.waiting, "set aside": step.aside}
        for name, levels in (("requests", crowd), ("pages", {"in use": step.pages})):
            ids = {"pid": track.group, "tid": track.number}
            line = {"name": name, "ph": "C", "ts": first / 1e3, **ids, "args": levels}
            lines.append(msgspec.json.encode(line))
        return lines

    def _request(self, lane: RequestLane) -> list[bytes]:
        """Return the phases of a request, one behind the other."""
        lines, kind = list[bytes](), "Finished" if lane.ended is not None else "Queued"
        told = arguments(lane.ended) if lane.ended is not None else {"request": lane.request}
        for phase, first_s, stop_s in lane.pieces:
            first, stop = self._at(first_s), self._at(stop_s)
            if first < stop:
                track, fresh = self._track(request_place(lane.request, phase), first, stop)
                lines += [*fresh, _line(track, phase, kind, (first, stop), told)]
        return lines

    def _at(self, at_s: float) -> int:
        """Return nanoseconds from the trace's begin."""
        return max(0, _ns(at_s) - self._began_ns)

    def _track(self, place: TracePlace, first: int, stop: int) -> tuple[_Track, list[bytes]]:
        """Return a track with room from `first` to `stop`, and its header lines if it is new.

        Slices of a track may be nested, as with the same work for two requests, but they may not
        cross.
        """
        tracks = self._tracks.setdefault((place.group, place.track), [])
        same = [track for track in tracks if (track.first, track.stop) == (first, stop)]
        free = [track for track in tracks if track.stop <= first]
        if same or (tracks and stop == first):  # an instant cannot cross a slice
            return (same or tracks)[0], []
        if free:
            track, lines = max(free, key=lambda track: track.stop), list[bytes]()
        else:
            track, lines = self._new_track(place, len(tracks) + 1)
            tracks.append(track)
        track.first, track.stop = first, stop
        return track, lines

    def _drawn(self, place: TracePlace, first: int) -> bool:
        return any(t.stop > first for t in self._tracks.get((place.group, place.track), ()))

    def _new_track(self, place: TracePlace, number: int) -> tuple[_Track, list[bytes]]:
        said: list[tuple[str, dict[str, Any]]] = []
        group = self._groups.get(place.group)
        if group is None:
            group = self._groups[place.group] = len(self._groups) + 1
            said.append(("process_name", {"name": place.group}))
            said.append(("process_sort_index", {"sort_index": 1000 * place.rank + group}))
        self._numbers += 1
        track = _Track(group, self._numbers)
        name = f"{place.track} ({number})" if number > 1 else place.track
        said.append(("thread_name", {"name": name}))
        said.append(("thread_sort_index", {"sort_index": track.number}))
        ids = {"ph": "M", "pid": group, "tid": track.number}
        return track, [msgspec.json.encode({"name": n, **ids, "args": args}) for n, args in said]

    # ---- its end

    def close(self) -> None:
        """End the trace. Safe to call again, from any thread."""
        with self._lock:
            if os.getpid() != self._pid:
                return
            if not self.closed:
                with suppress(OSError):  # draw requests that are not over, up to now
                    for lane in self._lanes.under_way(self._clock()):
                        self._write(self._request(lane))
            self._end()

    def _end(self) -> None:
        if self.closed:
            return
        self.closed = True
        if self._subscription is not None:
            self._subscription.close()
        with suppress(OSError), self._file:
            self._file.truncate(self._size)  # a full disk may have left half a line
            self._file.seek(self._size)
            self._file.write(b"\n]\n")

    def __repr__(self) -> str:
        return f"<flowkv.Trace: {self.events} events to {self.path}>"


class _Track:
    """Track of a group, and the last slice on it in nanoseconds."""

    __slots__ = ("first", "group", "number", "stop")

    def __init__(self, group: int, number: int) -> None:
        self.group, self.number, self.first, self.stop = group, number, 0, 0


def _line(
    track: _Track, name: str, kind: str, when: tuple[int, int], args: dict[str, Any]
) -> bytes:
    first, stop = when
    shape = {"ph": "X", "dur": (stop - first) / 1e3} if stop > first else {"ph": "i", "s": "t"}
    ids = {"pid": track.group, "tid": track.number}
    return msgspec.json.encode(
        {"name": name, "cat": kind, "ts": first / 1e3, **ids, "args": args, **shape}
    )


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
