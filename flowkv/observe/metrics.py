"""Counters, gauges and histograms, fed by the bus and readable as a dict or Prometheus text.

Tenants are no labels: their number is unbounded, and their names may be private.
"""

from __future__ import annotations

import bisect
import math
import re
import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

from flowkv.core.errors import ConfigError
from flowkv.observe import events
from flowkv.observe.events import Bus, Event, Subscription

SECONDS_BUCKETS = tuple(m * 10.0**e for e in range(-5, 2) for m in (1, 2.5, 5))
"""Upper bounds of a histogram of times, 10 microseconds to 50 seconds."""

COUNT_BUCKETS = tuple(float(4**e) for e in range(0, 13))
"""Upper bounds of a histogram of counts, 1 to 16 Mi."""

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_PREFIX = "flowkv_"
_Labels = tuple[tuple[str, str], ...]
_Kind = Literal["counter", "gauge", "histogram"]


class _Rule(NamedTuple):
    """How events of one type are counted; the mappings are from fields to metric names."""

    number: str
    labels: tuple[str, ...] = ()
    sums: Mapping[str, str] = MappingProxyType({})
    spreads: Mapping[str, str] = MappingProxyType({})
    levels: Mapping[str, str] = MappingProxyType({})


_RULES: dict[type[Event], _Rule] = {
    events.Published: _Rule("published_total", ("group",), {"tokens": "published_tokens_total"}),
    events.Encoded: _Rule(
        "encodings_total",
        ("source", "target"),
        {
            "pages": "encoded_pages_total",
            "n_bytes_before": "encoded_source_bytes_total",
            "n_bytes": "encoded_bytes_total",
        },
    ),
    events.Hit: _Rule(
        "hits_total", ("tier",), {"tokens": "hit_tokens_total", "n_bytes": "hit_bytes_total"}
    ),
    events.Miss: _Rule("misses_total", (), {"tokens": "miss_tokens_total"}),
    events.Restored: _Rule(
        "restores_total",
        ("tier",),
        {"tokens": "restored_tokens_total", "n_bytes": "restored_bytes_total"},
        {"seconds": "restore_seconds"},
    ),
    events.RestoreSpan: _Rule(
        "restore_spans_total", ("engine",), {"n_bytes": "restore_span_bytes_total"}
    ),
    events.RestoreEnded: _Rule(
        "overlapped_restores_total",
        (),
        {
            "computed_tokens": "restore_computed_tokens_total",
            "loaded_tokens": "restore_loaded_tokens_total",
            "failed": "restore_failed_loads_total",
        },
        {"seconds": "overlapped_restore_seconds", "exposed_s": "restore_exposed_seconds"},
    ),
    events.Audited: _Rule("audited_pages_total", ("tier", "codec")),
    events.Stored: _Rule(
        "stores_total",
        ("tier",),
        {"pages": "stored_pages_total", "n_bytes": "stored_bytes_total"},
        {"seconds": "store_seconds"},
    ),
    events.Evicted: _Rule(
        "evictions_total",
        ("tier", "reason"),
        {"pages": "evicted_pages_total", "n_bytes": "evicted_bytes_total"},
    ),
    events.LayerSent: _Rule(
        "layers_sent_total",
        (),
        {"pages": "sent_pages_total", "n_bytes": "sent_bytes_total"},
    ),
    events.LayerArrived: _Rule(
        "layers_arrived_total",
        (),
        {"pages": "arrived_pages_total", "n_bytes": "arrived_bytes_total"},
    ),
    events.Promoted: _Rule(
        "promotions_total",
        ("source", "tier"),
        {"pages": "promoted_pages_total", "n_bytes": "promoted_bytes_total"},
    ),
    events.Demoted: _Rule(
        "demotions_total",
        ("source", "tier"),
        {"pages": "demoted_pages_total", "n_bytes": "demoted_bytes_total"},
    ),
    events.Defragmented: _Rule(
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
    events.Failed: _Rule("failures_total", ("tier", "operation"), {"items": "failed_items_total"}),
    events.Quarantined: _Rule("quarantined_total", ("tier",)),
    events.StepPlanned: _Rule(
        "steps_total",
        (),
        {"new_tokens": "step_tokens_total"},
        {"rows": "step_rows", "context_tokens": "step_context_tokens"},
    ),
    events.Warned: _Rule("warnings_total", ("code",)),
}


class _Histogram:
    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value

    def quantile(self, q: float) -> float:
        """Upper bound of the bucket that holds quantile `q`; the last bound if beyond it."""
        rank, seen = q * sum(self.counts), 0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            seen += count
            if seen >= rank:
                return bound
        return self.bounds[-1]


class Metrics:
    """A set of named series. Thread-safe.

    Names are without the prefix "flowkv_" and follow Prometheus: counters end in `_total`, units
    are part of the name. A name keeps the kind it was first used with.

    Args:
        bus: Where to listen at once; `follow` adds more.
    """

    def __init__(self, bus: Bus | None = None) -> None:
        self._lock = threading.Lock()
        self._kinds: dict[str, _Kind] = {}
        self._numbers: dict[str, dict[_Labels, float]] = {}
        self._histograms: dict[str, dict[_Labels, _Histogram]] = {}
        if bus is not None:
            self.follow(bus)

    def follow(self, bus: Bus, *, without: Sequence[type[Event]] = ()) -> Subscription:
        """Counts the events of `bus`, but not those of types `without`, until it is closed."""
        return bus.subscribe(self._count_event, *(kind for kind in _RULES if kind not in without))

    def count(self, name: str, n: float = 1, /, **labels: object) -> None:
        """Adds `n` to a counter.

        Raises:
            ConfigError: `n` is negative, or the name is malformed or of another kind.
        """
        if n < 0:
            raise ConfigError(f"counter {name!r} cannot go down by {-n}", "Use `set` for a gauge")
        with self._lock:
            series = self._series(name, "counter")
            key = _key(labels)
            series[key] = series.get(key, 0) + n

    def set(self, name: str, value: float, /, **labels: object) -> None:
        """Sets a gauge, a value that may go down, such as bytes in use.

        Raises:
            ConfigError: The name is malformed or of another kind.
        """
        with self._lock:
            self._series(name, "gauge")[_key(labels)] = value

    def observe(
        self,
        name: str,
        value: float,
        /,
        *,
        buckets: Sequence[float] = SECONDS_BUCKETS,
        **labels: object,
    ) -> None:
        """Adds one observation to a histogram, whose buckets are those of its first observation.

        Raises:
            ConfigError: The name is malformed or of another kind.
        """
        with self._lock:
            self._check(name, "histogram")
            series = self._histograms.setdefault(name, {})
            key = _key(labels)
            if key not in series:
                known = next(iter(series.values()), None)
                series[key] = _Histogram(known.bounds if known else buckets)
            series[key].add(value)

    def total(self, name: str, /, **labels: object) -> float:
        """Sum of a counter or gauge over all series that carry `labels`; 0 if there is none."""
        wanted = set(_key(labels))
        with self._lock:
            series = self._numbers.get(name, {})
            return sum(value for key, value in series.items() if wanted <= set(key))

    def snapshot(self) -> dict[str, float | dict[str, float]]:
        """All series now, by Prometheus-like name such as `hits_total{tier="host"}`.

        A histogram is {"count", "sum", "p50", "p99"}, quantiles being upper bounds of buckets.
        """
        plain: dict[str, float | dict[str, float]] = {}
        with self._lock:
            for name, numbers in self._numbers.items():
                plain |= {name + _braces(key): value for key, value in numbers.items()}
            for name, histograms in self._histograms.items():
                for key, histogram in histograms.items():
                    plain[name + _braces(key)] = {
                        "count": sum(histogram.counts),
                        "sum": histogram.total,
                        "p50": histogram.quantile(0.5),
                        "p99": histogram.quantile(0.99),
                    }
        return dict(sorted(plain.items()))

    def prometheus(self) -> str:
        """All series in the Prometheus text format (version 0.0.4)."""
        lines = []
        with self._lock:
            for name, kind in sorted(self._kinds.items()):
                full = _PREFIX + name
                lines.append(f"# TYPE {full} {kind}")
                for key, value in sorted(self._numbers.get(name, {}).items()):
                    lines.append(f"{full}{_braces(key)} {_number(value)}")
                for key, histogram in sorted(self._histograms.get(name, {}).items()):
                    below = 0
                    bounds = (*map(_number, histogram.bounds), "+Inf")
                    for bound, count in zip(bounds, histogram.counts, strict=True):
                        below += count
                        lines.append(f"{full}_bucket{_braces((*key, ('le', bound)))} {below}")
                    lines.append(f"{full}_sum{_braces(key)} {_number(histogram.total)}")
                    lines.append(f"{full}_count{_braces(key)} {below}")
        return "".join(line + "\n" for line in lines)

    def _count_event(self, event: Event) -> None:
        rule = next(_RULES[kind] for kind in type(event).__mro__ if kind in _RULES)
        labels = {field: getattr(event, field) for field in rule.labels}
        self.count(rule.number, **labels)
        for field, name in rule.sums.items():
            self.count(name, getattr(event, field), **labels)
        for field, name in rule.spreads.items():
            timed = field == "seconds" or field.endswith("_s")
            buckets = SECONDS_BUCKETS if timed else COUNT_BUCKETS
            self.observe(name, getattr(event, field), buckets=buckets, **labels)
        for field, name in rule.levels.items():
            self.set(name, getattr(event, field), **labels)

    def _check(self, name: str, kind: _Kind) -> None:
        known = self._kinds.get(name)
        if known is None and _NAME.fullmatch(name):
            self._kinds[name] = kind
        elif known is None:
            raise ConfigError(f"metric name {name!r}", "Use lower-case words joined by _")
        elif known != kind:
            raise ConfigError(f"{name!r} is a {known}, not a {kind}", "Use another name")

    def _series(self, name: str, kind: _Kind) -> dict[_Labels, float]:
        self._check(name, kind)
        return self._numbers.setdefault(name, {})


def _key(labels: dict[str, object]) -> _Labels:
    return tuple(sorted((name, str(value)) for name, value in labels.items()))


def _braces(key: _Labels) -> str:
    if not key:
        return ""
    escaped = (
        (name, value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n"))
        for name, value in key
    )
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped) + "}"


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(float(value))
