"""How events are counted: the one table that metrics and other exporters read."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

from flowkv.observe import events
from flowkv.observe.events import Event

Kind = Literal["counter", "gauge", "histogram"]


class Rule(NamedTuple):
    """How events of one type are counted; the mappings are from fields to metric names.

    Attributes:
        number: Counter of the events.
        labels: Fields that tell series apart.
        sums: Counters that grow by a field.
        spreads: Histograms of a field, or of all values of a field that is a tuple.
        levels: Gauges that a field sets.
        maybe: Fields of `spreads` whose 0.0 means that there was nothing to measure.
    """

    number: str
    labels: tuple[str, ...] = ()
    sums: Mapping[str, str] = MappingProxyType({})
    spreads: Mapping[str, str] = MappingProxyType({})
    levels: Mapping[str, str] = MappingProxyType({})
    maybe: tuple[str, ...] = ()


class Reading(NamedTuple):
    """What an event says about one metric.

    Attributes:
        kind: "counter": add `values[0]`; "gauge": set it; "histogram": add all of `values`.
        name: The metric.
        values: One value, or as many as the event has of a histogram.
        timed: Whether a histogram is of seconds, not of counts.
    """

    kind: Kind
    name: str
    values: tuple[float, ...]
    timed: bool = False


class Level(NamedTuple):
    """A value that is read when somebody asks, not told by events.

    Attributes:
        name: The metric.
        value: Its value now.
        labels: Of the series.
        kind: "gauge"; "counter" if it never goes down.
    """

    name: str
    value: float
    labels: Mapping[str, str] = MappingProxyType({})
    kind: Kind = "gauge"


RULES: Mapping[type[Event], Rule] = MappingProxyType(
    {
        events.Published: Rule("published_total", ("group",), {"tokens": "published_tokens_total"}),
        events.Encoded: Rule(
            "encodings_total",
            ("source", "target"),
            {
                "pages": "encoded_pages_total",
                "n_bytes_before": "encoded_source_bytes_total",
                "n_bytes": "encoded_bytes_total",
            },
        ),
        events.Hit: Rule(
            "hits_total", ("tier",), {"tokens": "hit_tokens_total", "n_bytes": "hit_bytes_total"}
        ),
        events.Miss: Rule("misses_total", (), {"tokens": "miss_tokens_total"}),
        events.Restored: Rule(
            "restores_total",
            ("tier",),
            {"tokens": "restored_tokens_total", "n_bytes": "restored_bytes_total"},
            {"seconds": "restore_seconds"},
        ),
        events.RestoreSpan: Rule(
            "restore_spans_total", ("engine",), {"n_bytes": "restore_span_bytes_total"}
        ),
        events.RestoreEnded: Rule(
            "overlapped_restores_total",
            (),
            {
                "computed_tokens": "restore_computed_tokens_total",
                "loaded_tokens": "restore_loaded_tokens_total",
                "failed": "restore_failed_loads_total",
            },
            {"seconds": "overlapped_restore_seconds", "exposed_s": "restore_exposed_seconds"},
        ),
        events.Audited: Rule("audited_pages_total", ("tier", "codec")),
        events.Stored: Rule(
            "stores_total",
            ("tier",),
            {"pages": "stored_pages_total", "n_bytes": "stored_bytes_total"},
            {"seconds": "store_seconds"},
        ),
        events.Evicted: Rule(
            "evictions_total",
            ("tier", "reason"),
            {"pages": "evicted_pages_total", "n_bytes": "evicted_bytes_total"},
        ),
        events.LayerSent: Rule(
            "layers_sent_total", (), {"pages": "sent_pages_total", "n_bytes": "sent_bytes_total"}
        ),
        events.LayerArrived: Rule(
            "layers_arrived_total",
            (),
            {"pages": "arrived_pages_total", "n_bytes": "arrived_bytes_total"},
        ),
        events.Promoted: Rule(
            "promotions_total",
            ("source", "tier"),
            {"pages": "promoted_pages_total", "n_bytes": "promoted_bytes_total"},
        ),
        events.Demoted: Rule(
            "demotions_total",
            ("source", "tier"),
            {"pages": "demoted_pages_total", "n_bytes": "demoted_bytes_total"},
        ),
        events.Defragmented: Rule(
            "defragmentations_total",
            ("device",),
            {
                "pages": "defragmented_pages_total",
                "n_bytes": "defragmented_bytes_total",
                "slabs": "defragmented_slabs_total",
            },
            {"seconds": "defragmentation_seconds"},
            {"fragmentation": "fragmentation"},
        ),
        events.Failed: Rule(
            "failures_total", ("tier", "operation"), {"items": "failed_items_total"}
        ),
        events.Quarantined: Rule("quarantined_total", ("tier",)),
        events.StepPlanned: Rule(
            "steps_total",
            (),
            {"new_tokens": "step_tokens_total"},
            {"rows": "step_rows", "context_tokens": "step_context_tokens"},
        ),
        events.Queued: Rule(
            "requests_total",
            (),
            {"prompt_tokens": "request_prompt_tokens_total"},
        ),
        events.Admitted: Rule(
            "admissions_total",
            ("resumed",),
            {"reused_tokens": "admitted_reused_tokens_total"},
            {"queued_s": "queue_seconds"},
        ),
        events.Preempted: Rule(
            "preemptions_total",
            ("kept",),
            {"pages": "preempted_pages_total", "n_bytes": "preempted_bytes_total"},
        ),
        events.EngineStep: Rule(
            "engine_steps_total",
            (),
            {
                "prefill_tokens": "prefill_tokens_total",
                "decode_tokens": "decode_tokens_total",
                "made_tokens": "made_tokens_total",
            },
            {
                "seconds": "engine_step_seconds",
                "model_s": "engine_model_seconds",
                "sampling_s": "engine_sampling_seconds",
                "gaps_s": "inter_token_seconds",
            },
            {
                "rows": "engine_rows",
                "waiting": "requests_waiting",
                "aside": "requests_aside",
                "pages": "engine_pages",
                "total_pages": "engine_total_pages",
            },
        ),
        events.Finished: Rule(
            "finished_total",
            ("reason",),
            {"new_tokens": "finished_tokens_total"},
            {"seconds": "request_seconds", "ttft_s": "ttft_seconds", "tpot_s": "tpot_seconds"},
            maybe=("ttft_s", "tpot_s"),
        ),
        events.Warned: Rule("warnings_total", ("code",)),
    }
)
"""Event type -> how it is counted."""


def rule_of(kind: type[Event]) -> Rule:
    """The rule of an event type: its own, or that of its nearest base that has one."""
    return next(RULES[base] for base in kind.__mro__ if base in RULES)


def labels_of(event: Event, rule: Rule) -> dict[str, str]:
    """Labels of the series that an event counts for."""
    return {field: text(getattr(event, field)) for field in rule.labels}


def read(event: Event, rule: Rule) -> list[Reading]:
    """What an event says about each metric."""
    found = [Reading("counter", rule.number, (1,))]
    for field, name in rule.sums.items():
        found.append(Reading("counter", name, (getattr(event, field),)))
    for field, name in rule.levels.items():
        found.append(Reading("gauge", name, (getattr(event, field),)))
    for field, name in rule.spreads.items():
        value = getattr(event, field)
        if value or field not in rule.maybe:
            values = value if isinstance(value, tuple) else (value,)
            found.append(Reading("histogram", name, values, timed(field)))
    return found


def timed(field: str) -> bool:
    """Whether a field holds seconds."""
    return field == "seconds" or field.endswith("_s")


def text(value: object) -> str:
    """A label's value."""
    return str(value).lower() if isinstance(value, bool) else str(value)
