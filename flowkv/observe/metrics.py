"""Counters, gauges and histograms, fed by the bus and readable as a dict or Prometheus text.

Tenants are no labels: their number is unbounded, and their names may be private.
"""

from __future__ import annotations

import bisect
import math
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple, Protocol

from flowkv.core.errors import ConfigError
from flowkv.observe.events import Bus, EngineStep, Event, Subscription
from flowkv.observe.names import meaning
from flowkv.observe.rules import RULES, Kind, Level, labels_of, read, rule_of, text

SECONDS_BUCKETS = tuple(m * 10.0**e for e in range(-5, 2) for m in (1, 2.5, 5))
"""Upper bounds of a histogram of times, 10 microseconds to 50 seconds."""

COUNT_BUCKETS = tuple(float(4**e) for e in range(0, 13))
"""Upper bounds of a histogram of counts, 1 to 16 Mi."""

PREFIX = "flowkv_"
"""What names begin with outside of this process."""

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_Labels = tuple[tuple[str, str], ...]


class Histogram(NamedTuple):
    """How values are spread over buckets.

    Attributes:
        bounds: Upper bounds of the buckets, ascending, without the last one, which has none.
        counts: Values in each bucket.
        total: Sum of the values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    def below(self) -> list[tuple[str, int]]:
        """Each upper bound as text, and how many values are not above it."""
        seen, found = 0, []
        for bound, count in zip((*self.bounds, math.inf), self.counts, strict=True):
            seen += count
            found.append((number(bound), seen))
        return found


class Family(NamedTuple):
    """All series of one name.

    Attributes:
        name: Without the prefix.
        kind: What it is.
        meaning: One line for people; "" if nobody wrote it.
        series: Labels and value of each, in the order of their labels.
    """

    name: str
    kind: Kind
    meaning: str
    series: list[tuple[_Labels, float | Histogram]]


class _Histogram:
    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def add(self, values: Iterable[float]) -> None:
        for value in values:
            self.counts[bisect.bisect_left(self.bounds, value)] += 1
            self.total += value

    def frozen(self) -> Histogram:
        return Histogram(self.bounds, tuple(self.counts), self.total)

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
        self._kinds: dict[str, Kind] = {}
        self._numbers: dict[str, dict[_Labels, float]] = {}
        self._histograms: dict[str, dict[_Labels, _Histogram]] = {}
        self._sources: list[Callable[[], Iterable[Level]]] = []
        self._followers, self._steps = 0, list[Subscription]()
        if bus is not None:
            self.follow(bus)

    def follow(
        self, bus: Bus, *only: type[Event], without: Sequence[type[Event]] = ()
    ) -> Subscription:
        """Counts the events of `bus`, or only those of some types, until it is closed.

        Args:
            bus: Where to listen.
            *only: Types; default all.
            without: Types that are left out.
        """
        kinds = (kind for kind in only or RULES if kind not in without)
        return bus.subscribe(self.note, *kinds)

    def follow_steps(self, bus: Bus) -> ExitStack:
        """Counts the steps of engines as long as anybody wants that, once, however many do.

        Steps come often, so that a cache does not count them by itself: whoever reads metrics asks
        for it, as exporters do.

        Returns:
            Ends it, by `close` or as the end of a `with` block; forever if it is dropped.
        """
        with self._lock:
            self._followers += 1
            if self._followers == 1:
                self._steps.append(self.follow(bus, EngineStep))
        mine = ExitStack()
        mine.callback(self._leave_steps)
        return mine

    def _leave_steps(self) -> None:
        with self._lock:
            self._followers -= 1
            if not self._followers:
                self._steps.pop().close()

    def source(self, levels: Callable[[], Iterable[Level]]) -> None:
        """Adds what is read whenever `families` is: called then, without a lock."""
        self._sources.append(levels)

    def count(self, name: str, n: float = 1, /, **labels: object) -> None:
        """Adds `n` to a counter.

        Raises:
            ConfigError: `n` is negative, or the name is malformed or of another kind.
        """
        if n < 0:
            raise ConfigError(f"counter {name!r} cannot go down by {-n}", "Use `set` for a gauge")
        with self._lock:
            self._count(name, _key(labels), n)

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
            self._observe(name, _key(labels), (value,), buckets)

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

    def by(self, name: str, label: str, /) -> dict[str, float]:
        """A counter or gauge by the values of one label, summed over all others."""
        found: dict[str, float] = {}
        with self._lock:
            for key, value in self._numbers.get(name, {}).items():
                told = dict(key).get(label, "")
                found[told] = found.get(told, 0) + value
        return found

    def families(self) -> list[Family]:
        """All series now, and what sources say, by name: what every exposition is made of.

        Raises:
            ConfigError: A source uses a name that is of another kind.
        """
        levels = [level for source in self._sources for level in source()]
        with self._lock:
            kinds = dict(self._kinds)
            series: dict[str, dict[_Labels, float | Histogram]] = {}
            for name, numbers in self._numbers.items():
                series[name] = {**numbers}
            for name, histograms in self._histograms.items():
                series[name] = {key: one.frozen() for key, one in histograms.items()}
        for level in levels:
            if kinds.setdefault(level.name, level.kind) != level.kind:
                raise ConfigError(f"{level.name!r} is a {kinds[level.name]}", "Use another name")
            series.setdefault(level.name, {})[_key(level.labels)] = level.value
        return [
            Family(name, kinds[name], meaning(name), sorted(series[name].items()))
            for name in sorted(series)
        ]

    def prometheus(self) -> str:
        """All series in the Prometheus text format (version 0.0.4)."""
        lines = []
        for name, kind, said, series in self.families():
            full = PREFIX + name
            if said:
                lines.append(f"# HELP {full} {said}")
            lines.append(f"# TYPE {full} {kind}")
            for key, value in series:
                if not isinstance(value, Histogram):
                    lines.append(f"{full}{_braces(key)} {number(value)}")
                    continue
                below = value.below()
                for bound, count in below:
                    lines.append(f"{full}_bucket{_braces((*key, ('le', bound)))} {count}")
                lines.append(f"{full}_sum{_braces(key)} {number(value.total)}")
                lines.append(f"{full}_count{_braces(key)} {below[-1][1]}")
        return "".join(line + "\n" for line in lines)

    def note(self, event: Event) -> None:
        """Counts an event."""
        rule = rule_of(type(event))
        key = _key(labels_of(event, rule))
        readings = read(event, rule)
        with self._lock:
            for kind, name, values, timed in readings:
                if kind == "counter":
                    self._count(name, key, values[0])
                elif kind == "gauge":
                    self._series(name, "gauge")[key] = values[0]
                else:
                    buckets = SECONDS_BUCKETS if timed else COUNT_BUCKETS
                    self._observe(name, key, values, buckets)

    def _count(self, name: str, key: _Labels, n: float) -> None:
        series = self._series(name, "counter")
        series[key] = series.get(key, 0) + n

    def _observe(
        self, name: str, key: _Labels, values: Sequence[float], buckets: Sequence[float]
    ) -> None:
        self._check(name, "histogram")
        series = self._histograms.setdefault(name, {})
        if key not in series:
            known = next(iter(series.values()), None)
            series[key] = _Histogram(known.bounds if known else buckets)
        series[key].add(values)

    def _check(self, name: str, kind: Kind) -> None:
        known = self._kinds.get(name)
        if known is None and _NAME.fullmatch(name):
            self._kinds[name] = kind
        elif known is None:
            raise ConfigError(f"metric name {name!r}", "Use lower-case words joined by _")
        elif known != kind:
            raise ConfigError(f"{name!r} is a {known}, not a {kind}", "Use another name")

    def _series(self, name: str, kind: Kind) -> dict[_Labels, float]:
        self._check(name, kind)
        return self._numbers.setdefault(name, {})


class Watched(Protocol):
    """What has a bus and counts it: a `KV`."""

    @property
    def bus(self) -> Bus:
        """Where events come from."""
        ...

    @property
    def metrics(self) -> Metrics:
        """What counts them."""
        ...


def _key(labels: Mapping[str, object]) -> _Labels:
    return tuple(sorted((name, text(value)) for name, value in labels.items()))


def _braces(key: _Labels) -> str:
    if not key:
        return ""
    escaped = (
        (name, value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n"))
        for name, value in key
    )
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped) + "}"


def number(value: float) -> str:
    """A value as Prometheus writes it."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(float(value))
