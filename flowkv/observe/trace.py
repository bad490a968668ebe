"""Traces for Perfetto and `chrome://tracing`: who worked on what, and when.

    with kv.trace("restore.json"):
        model.generate(**inputs)

The file is in Chrome's JSON array format, one event per line. Each line is written at once, and the
format does not need its end: what a process wrote before it died can be opened. Counts and times
are written, as in the events; no tokens, and no names of tenants.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from flowkv.core.errors import ConfigError
from flowkv.observe import events
from flowkv.observe.events import Bus, Closing, Event, Subscription
from flowkv.observe.timeline import Lanes, RequestLane, idle

# Where a trace shows an event, as what, and what it says about it.

_SERVING, _ENGINES, _TIERS, _RESTORES, _REQUESTS, _EVENTS = range(6)  # in the order shown
_HIDDEN = frozenset({"tenant", "started_s", "seconds", "gaps_s"})


class TracePlace(NamedTuple):
    """Where an event is shown, and as what.

    Attributes:
        rank: Groups are ordered by it.
        group: A "process" of the format.
        track: A "thread" of it.
        label: Name of the slice.
    """

    rank: int
    group: str
    track: str
    label: str


def place_of(event: Event) -> TracePlace:
    """Where an event is shown."""
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
    return (
        TracePlace(_TIERS, tier, tier, label)
        if tier
        else TracePlace(_EVENTS, "events", "events", label)
    )


def request_place(request: int, label: str) -> TracePlace:
    """The track of a request of an engine."""
    return TracePlace(_REQUESTS, "requests", f"request {request}", label)


def arguments(event: Event) -> dict[str, Any]:
    """What a viewer shows of an event when it is clicked on; no names of tenants."""
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


_MOST = 4096  # requests under way; of more, every second one is drawn


class TraceFile(Closing):
    """A trace that is being written, as `KV.trace` returns it. Ends with `close`, or the cache.

    Each engine and each tier is a group of its own, a "process" of the format, and so are requests
    and restores, with a track each. What overlaps goes on further tracks of its group, since the
    slices of one may not cross. What happened before the trace began is cut off. What cannot be
    written ends the trace, with a warning, and nothing else. What a request of an engine went
    through is drawn once it is over, or when the trace ends.

    Args:
        path: The file; an old one is replaced.
        bus: Whose events are written; None if only `note` brings any.
        warn: Told what went wrong.
        clock: Seconds, of the clock that events carry.

    Raises:
        ConfigError: The file cannot be made.

    Attributes:
        events: Events written so far.
        closed: Whether it has ended.
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
        self._subscription: Subscription | None = bus.subscribe(self.note) if bus else None

    def note(self, event: Event) -> None:
        """Writes an event."""
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

    # ---- what an event looks like

    def _lines(self, event: Event, now_s: float) -> list[bytes]:
        self._lanes.note(event, now_s)
        if isinstance(event, events.Finished):
            lane = self._lanes.take(event.request)
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
            started_s += seconds  # its pieces are there already
            seconds = 0.0
        lines = self._shown(place, event, (started_s, started_s + seconds))
        if isinstance(event, events.RestoreEnded):  # that was the last of its track
            del self._tracks[place.group, place.track]
        return lines

    def _shown(self, place: TracePlace, event: Event, when: tuple[float, float]) -> list[bytes]:
        """An event as a slice, or as an instant if it took no time; and what belongs to it."""
        first, stop = map(self._at, when)
        track, lines = self._track(place, first, stop)
        kind = type(event).__name__
        lines.append(_line(track, place.label, kind, (first, stop), arguments(event)))
        if isinstance(event, events.EngineStep):
            lines += self._parts(track, event, first, stop)
        return lines

    def _parts(self, track: _Track, step: events.EngineStep, first: int, stop: int) -> list[bytes]:
        """The forward and the choice of tokens, at the end of their step; and levels beside it."""
        middle = max(first, stop - _ns(step.sampling_s))
        begin = max(first, middle - _ns(step.model_s))
        parts = [("model", begin, middle), ("sampling", middle, stop)]
        lines = [
            _line(track, name, "EngineStep", (left, right), {})
            for name, left, right in parts
            if left < right
        ]
        crowd = {"running": step.rows, "waiting": step.waiting, "set aside": step.aside}
        for name, levels in (("requests", crowd), ("pages", {"in use": step.pages})):
            ids = {"pid": track.group, "tid": track.number}
            line = {"name": name, "ph": "C", "ts": first / 1e3, **ids, "args": levels}
            lines.append(msgspec.json.encode(line))
        return lines

    def _request(self, lane: RequestLane) -> list[bytes]:
        """The phases of a request, one behind the other."""
        lines, kind = list[bytes](), "Finished" if lane.ended is not None else "Queued"
        told = arguments(lane.ended) if lane.ended is not None else {"request": lane.request}
        for phase, first_s, stop_s in lane.pieces:
            first, stop = self._at(first_s), self._at(stop_s)
            if first < stop:
                track, fresh = self._track(request_place(lane.request, phase), first, stop)
                lines += [*fresh, _line(track, phase, kind, (first, stop), told)]
        return lines

    def _at(self, at_s: float) -> int:
        """Nanoseconds from the trace's begin."""
        return max(0, _ns(at_s) - self._began_ns)

    def _track(self, place: TracePlace, first: int, stop: int) -> tuple[_Track, list[bytes]]:
        """A track with room from `first` to `stop`, and the lines that introduce it if it is new.

        Slices of a track may lie one in the other, as the same work for two requests does, but they
        may not cross.
        """
        tracks = self._tracks.setdefault((place.group, place.track), [])
        same = [track for track in tracks if (track.first, track.stop) == (first, stop)]
        free = [track for track in tracks if track.stop <= first]
        if same or (tracks and stop == first):  # an instant is no slice: it may lie anywhere
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
        """Ends the trace. Safe to call again, from any thread."""
        with self._lock:
            if os.getpid() != self._pid:
                return
            if not self.closed:
                with suppress(OSError):  # requests that are not over, as far as they have come
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
            self._file.truncate(self._size)  # half a line may be there, if the disk is full
            self._file.seek(self._size)
            self._file.write(b"\n]\n")

    def __repr__(self) -> str:
        return f"<flowkv.Trace: {self.events} events to {self.path}>"


class _Track:
    """A track of a group, and the last slice on it in nanoseconds."""

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
