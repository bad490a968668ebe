"""Where a trace shows an event, as what, and what it says about it."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from flowkv.observe.events import (
    Admitted,
    Demoted,
    EngineStep,
    Event,
    Preempted,
    Promoted,
    Queued,
    RestoreEnded,
    RestoreSpan,
    StepPlanned,
)

_SERVING, _ENGINES, _TIERS, _RESTORES, _REQUESTS, _EVENTS = range(6)  # in the order shown
_HIDDEN = frozenset({"tenant", "started_s", "seconds", "gaps_s"})


class Place(NamedTuple):
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


def place_of(event: Event) -> Place:
    """Where an event is shown."""
    match event:
        case RestoreSpan():
            return _of_span(event)
        case RestoreEnded():
            label = f"restore {event.tokens} tokens"
            return Place(_RESTORES, "restores", f"restore {event.request}", label)
        case EngineStep():
            rows = "1 row" if event.rows == 1 else f"{event.rows} rows"
            tokens = event.prefill_tokens + event.decode_tokens
            return Place(_SERVING, "engine", "steps", f"{rows}, {tokens} tokens")
        case Queued() | Admitted() | Preempted():
            return request_place(event.request, type(event).__name__.lower())
        case StepPlanned():
            return Place(_ENGINES, "compute", "steps", f"step, {event.new_tokens} tokens")
    moved = isinstance(event, Promoted | Demoted)
    tier: str = getattr(event, "source" if moved else "tier", "")
    label = type(event).__name__.lower()
    return Place(_TIERS, tier, tier, label) if tier else Place(_EVENTS, "events", "events", label)


def request_place(request: int, label: str) -> Place:
    """The track of a request of an engine."""
    return Place(_REQUESTS, "requests", f"request {request}", label)


def arguments(event: Event) -> dict[str, Any]:
    """What a viewer shows of an event when it is clicked on; no names of tenants."""
    fields = msgspec.structs.asdict(event)
    told = {name: value for name, value in fields.items() if name not in _HIDDEN}
    return {k: v.hex() if isinstance(v, bytes) else v for k, v in told.items()}


def _of_span(span: RestoreSpan) -> Place:
    tokens = f"{span.token}-{span.token + span.tokens}"
    if span.engine == "suffix":
        return Place(_ENGINES, "compute", "compute", f"suffix, {_layers(span)}")
    if span.engine == "compute":
        return Place(_ENGINES, "compute", "compute", f"compute {tokens}")
    part = "" if span.layer == 0 and span.layers > 1 else f", {_layers(span)}"
    return Place(_TIERS, span.engine, span.engine, f"load {tokens}{part}")


def _layers(span: RestoreSpan) -> str:
    last = span.layer + span.layers - 1
    return f"layer {last}" if span.layers == 1 else f"layers {span.layer}-{last}"
