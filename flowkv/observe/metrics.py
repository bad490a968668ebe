"""Counters, gauges and histograms of bus events, readable as a dict or Prometheus text.

Tenants are no labels: their number is unbounded, and their names may be private.
"""

from __future__ import annotations

import bisect
import functools
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from itertools import accumulate, repeat
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from flowkv.observe import events
from flowkv.observe.events import Bus, EngineStep, Event, Subscription

Kind = Literal["counter", "gauge", "histogram"]


class Level(NamedTuple):
    """Value that is read on demand, not counted from events.

    Attributes:
        name: The metric.
        value: Its value now.
        labels: Labels of the series.
    """

    name: str
    value: float
    labels: Mapping[str, str] = MappingProxyType({})


class Metric(NamedTuple):
    """Definition of a metric.

    Attributes:
        kind: "counter", "gauge" or "histogram".
        labels: Fields of the event that distinguish its series.
        meaning: Description in one line.
        event: Type of the event that feeds it; "" if it is read on demand.
        field: Field of the event to add, set or distribute; "" counts the events.
        maybe: Whether 0.0 means that there was nothing to measure, and is skipped.
    """

    kind: Kind
    labels: tuple[str, ...]
    meaning: str
    event: str
    field: str
    maybe: bool


def _table() -> Iterator[tuple[str, Metric]]:
    kinds: dict[str, Kind] = {"c": "counter", "g": "gauge", "h": "histogram"}
    lines = Path(__file__).with_name("metrics.txt").read_text(encoding="utf-8").splitlines()
    for line in [line for line in lines if not line.startswith("#")]:
        name, kind, labels, source, said = (cell.strip() for cell in line.split("|"))
        event, _, field = source.rstrip("?").partition(".")
        told = event, field, source.endswith("?")
        yield name, Metric(kinds[kind], tuple(labels.split()), said, *told)


NAMES: Mapping[str, Metric] = MappingProxyType(dict(_table()))
"""Definition of each metric, by name without the prefix `flowkv_`."""

RULES: Mapping[type[Event], Mapping[str, Metric]] = {
    getattr(events, event): {name: one for name, one in NAMES.items() if one.event == event}
    for event in dict.fromkeys(one.event for one in NAMES.values() if one.event)
}
"""Event type -> the metrics that it feeds, all with the same labels."""


Labels = tuple[tuple[str, str], ...]


@functools.cache
def _rule(kind: type[Event]) -> tuple[list[str], list[tuple[str, Metric]]]:
    """Return the sorted labels and the metrics of an event type, or of its nearest base class."""
    rule = next(RULES[base] for base in kind.__mro__ if base in RULES)
    return sorted(next(iter(rule.values())).labels), [*rule.items()]


def read(event: Event) -> tuple[Labels, list[tuple[Kind, str, tuple[float, ...]]]]:
    """Return the sorted labels of an event's series, and its readings: kind, metric and values.

    An event counts as its type, or as the nearest base class in the table. The one value of a
    counter is to be added, that of a gauge to be set, and all values of a histogram to be counted.
    """
    labels, rule = _rule(type(event))
    found = []
    for name, metric in rule:
        value = getattr(event, metric.field) if metric.field else 1
        if value or not metric.maybe:
            values = value if isinstance(value, tuple) else (value,)
            found.append((metric.kind, name, values))
    told = zip(labels, map(getattr, repeat(event), labels), strict=False)
    return tuple([(label, one if type(one) is str else text(one)) for label, one in told]), found


def text(value: object) -> str:
    """Return a label's value as text."""
    return str(value).lower() if isinstance(value, bool) else str(value)


SECONDS_BUCKETS = tuple(m * 10.0**e for e in range(-5, 2) for m in (1, 2.5, 5))
"""Upper bounds of a histogram of times, 10 microseconds to 50 seconds."""

COUNT_BUCKETS = tuple(float(4**e) for e in range(0, 13))
"""Upper bounds of a histogram of counts, 1 to 16 Mi."""

PREFIX = "flowkv_"
"""Prefix of metric names outside of this process."""


class Histogram:
    """Histogram: counts of values by bucket.

    Attributes:
        bounds: Upper bounds of the buckets, ascending, without the last one, which has none.
        counts: Values in each bucket.
        total: Sum of the values.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.total, self.counts = bounds, 0.0, [0] * (len(bounds) + 1)

    def observe(self, values: Iterable[float]) -> None:
        """Count values into their buckets."""
        for value in values:
            self.counts[bisect.bisect_left(self.bounds, value)] += 1
            self.total += value

    def below(self) -> list[tuple[str, int]]:
        """Return each upper bound as text, with the number of values not above it."""
        bounds = map(number, (*self.bounds, math.inf))
        return list(zip(bounds, accumulate(self.counts), strict=True))

    def quantile(self, q: float) -> float:
        """Return the upper bound of the bucket with quantile `q`; the last bound if beyond it."""
        rank, seen = q * sum(self.counts), accumulate(self.counts)
        holding = (bound for bound, count in zip(self.bounds, seen, strict=False) if count >= rank)
        return next(holding, self.bounds[-1])

    def summary(self) -> dict[str, float]:
        """Return plain numbers: count, sum, and quantiles as upper bounds of buckets."""
        p50, p99 = self.quantile(0.5), self.quantile(0.99)
        return {"count": sum(self.counts), "sum": self.total, "p50": p50, "p99": p99}


class Family(NamedTuple):
    """All series of one name.

    Attributes:
        name: Name of the metric, without the prefix.
        kind: "counter", "gauge" or "histogram".
        meaning: Description in one line.
        series: Labels and value of each series, sorted by labels.
    """

    name: str
    kind: Kind
    meaning: str
    series: list[tuple[Labels, float | Histogram]]


class Metrics:
    """Series of all metrics in the table. Thread-safe.

    Args:
        bus: Bus to follow at once; `subscribe` adds more.
    """

    def __init__(self, bus: Bus | None = None) -> None:
        self._lock = threading.Lock()
        self._series: dict[str, dict[Labels, Any]] = {}
        self._sources: list[Callable[[], Iterable[Level]]] = []
        self._followers, self._steps = 0, list[Subscription]()
        if bus is not None:
            self.subscribe(bus)

    def subscribe(
        self, bus: Bus, *only: type[Event], without: Sequence[type[Event]] = ()
    ) -> Subscription:
        """Count the events of `bus`, or only those of some types, until closed.

        Args:
            bus: Source of the events.
            *only: Types to count; default all.
            without: Types to leave out.
        """
        kinds = (kind for kind in only or RULES if kind not in without)
        return bus.subscribe(self.on_event, *kinds)

    def follow_steps(self, bus: Bus) -> ExitStack:
        """Count the steps of engines, once, while at least one follower is open.

        Steps are frequent, so a cache does not count them by itself: readers of metrics, such as
        exporters, have to ask for them.

        Returns:
            A follower to end with `close` or a `with` block; if dropped, steps are counted forever.
        """
        with self._lock:
            self._followers += 1
            if self._followers == 1:
                self._steps.append(self.subscribe(bus, EngineStep))
        mine = ExitStack()
        mine.callback(self._leave_steps)
        return mine

    def _leave_steps(self) -> None:
        with self._lock:
            self._followers -= 1
            if not self._followers:
                self._steps.pop().close()

    def source(self, levels: Callable[[], Iterable[Level]]) -> None:
        """Add a source of levels that `families` reads, without a lock."""
        self._sources.append(levels)

    def total(self, name: str, /, **labels: object) -> float:
        """Return the sum of a counter or gauge over all series with these labels; 0 without any."""
        wanted = set(_key(labels))
        with self._lock:
            series = self._series.get(name, {})
            return float(sum(value for key, value in series.items() if wanted <= set(key)))

    def snapshot(self) -> dict[str, float | dict[str, float]]:
        """Return all series now, by Prometheus-like name such as `hits_total{tier="host"}`.

        A histogram is {"count", "sum", "p50", "p99"}, quantiles being upper bounds of buckets.
        """
        plain: dict[str, float | dict[str, float]] = {}
        with self._lock:
            for name, series in self._series.items():
                for key, value in series.items():
                    told = value.summary() if isinstance(value, Histogram) else value
                    plain[name + _braces(key)] = told
        return dict(sorted(plain.items()))

    def by(self, name: str, label: str, /) -> dict[str, float]:
        """Return a counter or gauge by the values of one label, summed over all other labels."""
        found: dict[str, float] = {}
        with self._lock:
            for key, value in self._series.get(name, {}).items():
                told = dict(key).get(label, "")
                found[told] = found.get(told, 0) + value
        return found

    def families(self) -> list[Family]:
        """Return all series and levels now, sorted by name: the source of all export formats."""
        levels = [level for source in self._sources for level in source()]
        with self._lock:
            found = deepcopy(self._series)
        for level in levels:
            found.setdefault(level.name, {})[_key(level.labels)] = level.value
        return [
            Family(name, known.kind, known.meaning, sorted(series.items()))
            if (known := NAMES.get(name)) is not None
            else Family(name, "gauge", "", sorted(series.items()))  # from a user's own source
            for name, series in sorted(found.items())
        ]

    def prometheus(self) -> str:
        """Return all series in the Prometheus text format (version 0.0.4)."""
        lines = []
        for name, kind, said, series in self.families():
            full = PREFIX + name
            lines += [f"# HELP {full} {said}", f"# TYPE {full} {kind}"]
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

    def on_event(self, event: Event) -> None:
        """Count an event."""
        key, readings = read(event)
        with self._lock:
            for kind, name, values in readings:
                series = self._series.setdefault(name, {})
                if kind == "counter":
                    series[key] = series.get(key, 0) + values[0]
                elif kind == "gauge":
                    series[key] = values[0]
                else:
                    if key not in series:
                        timed = name.endswith("_seconds")
                        series[key] = Histogram(SECONDS_BUCKETS if timed else COUNT_BUCKETS)
                    series[key].observe(values)


class Observable(Protocol):
    """Interface of an owner of a bus and its metrics: a `KV`.

    Attributes:
        bus: Bus of its events.
        metrics: Metrics of these events.
    """

    bus: Bus
    metrics: Metrics


def _key(labels: Mapping[str, object]) -> Labels:
    return tuple(sorted((name, text(value)) for name, value in labels.items()))


def _braces(key: Labels) -> str:
    if not key:
        return ""
    escaped = (
        (name, value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n"))
        for name, value in key
    )
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped) + "}"


def number(value: float) -> str:
    """Return a value as Prometheus writes it."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(float(value))


# Values over any length of time in bounded memory: only the grid gets coarser.


class Series:
    """Named values on a grid of time. Not thread-safe.

    Args:
        most: Cells of the grid. When they are full, each two neighbours are merged.
        cell_s: Width of a cell at first.

    Attributes:
        started_s: Time of the first value.
        cell_s: Width of a cell now.
    """

    def __init__(self, *, most: int = 512, cell_s: float = 0.02) -> None:
        self.started_s, self.cell_s, self._most = math.nan, cell_s, most
        # By name and cell: the sum, and the total weight of levels in it, 0.0 for amounts.
        self._cells: dict[str, dict[int, tuple[float, float]]] = {}

    def count(self, at_s: float, amounts: Mapping[str, float]) -> None:
        """Add amounts, which are read as rates."""
        cell = self._cell(at_s)
        for name, amount in amounts.items():
            _add(self._cells.setdefault(name, {}), cell, (amount, 0.0))

    def set(self, at_s: float, levels: Mapping[str, float], *, weight: float = 1.0) -> None:
        """Record levels; those of one cell are read as their weighted mean."""
        cell = self._cell(at_s)
        for name, level in levels.items():
            _add(self._cells.setdefault(name, {}), cell, (level * weight, weight))

    @property
    def cells(self) -> int:
        """Return the number of cells from the first value to the last."""
        return max((max(cells) for cells in self._cells.values()), default=-1) + 1

    @property
    def times_s(self) -> list[float]:
        """Return the middle of each cell, in seconds from the first value."""
        return [(number + 0.5) * self.cell_s for number in range(self.cells)]

    @property
    def names(self) -> list[str]:
        """Return the names of all values, in order of appearance."""
        return list(self._cells)

    def rate(self, name: str, *, most: int = 72) -> tuple[list[float], list[float]]:
        """Return amounts per second: middles of at most `most` intervals, and their rates."""
        cells, every = self._cells.get(name, {}), max(1, -(-self.cells // most))
        sums = [0.0] * -(-self.cells // every)
        for cell, (amount, _) in cells.items():
            sums[cell // every] += amount
        width_s = every * self.cell_s
        times_s = [(number + 0.5) * width_s for number in range(len(sums))]
        return times_s, [total / width_s for total in sums]

    def level(self, name: str) -> list[float]:
        """Return a level in each cell; a cell without values repeats the one before."""
        cells, found, last = self._cells.get(name, {}), list[float](), math.nan
        for number in range(self.cells):
            total, weights = cells.get(number, (0.0, 0.0))
            if weights:
                last = total / weights
            found.append(last)
        return found

    def _cell(self, at_s: float) -> int:
        if math.isnan(self.started_s):
            self.started_s = at_s
        cell = max(0, int((at_s - self.started_s) / self.cell_s))
        while cell >= self._most:
            self._coarsen()
            cell //= 2
        return cell

    def _coarsen(self) -> None:
        self.cell_s *= 2
        for name, cells in self._cells.items():
            self._cells[name] = {}
            for cell, held in cells.items():
                _add(self._cells[name], cell // 2, held)


def _add(cells: dict[int, tuple[float, float]], cell: int, more: tuple[float, float]) -> None:
    total, weights = cells.get(cell, (0.0, 0.0))
    cells[cell] = total + more[0], weights + more[1]


NEWEST = 65_536
"""Values of a distribution that quantiles are of."""

QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
"""Quantiles in summaries."""


class Spread:
    """Distribution of a stream of values. Not thread-safe.

    Attributes:
        newest: The newest values, for quantiles; older ones are dropped.
        count: Values so far.
        total: Their sum.
        least: The smallest; 0.0 without any.
        most: The largest; 0.0 without any.
    """

    def __init__(self, values: Iterable[float] = ()) -> None:
        self.newest = deque[float](maxlen=NEWEST)
        self.count, self.total, self.least, self.most = 0, 0.0, 0.0, 0.0
        self.extend(values)

    def add(self, value: float) -> None:
        """Count a value; NaN is ignored."""
        self.extend((value,))

    def extend(self, values: Iterable[float]) -> None:
        """Count several values; NaN is ignored."""
        for value in values:
            if not math.isnan(value):
                self.least = min(self.least, value) if self.count else value
                self.most = max(self.most, value) if self.count else value
                self.count, self.total = self.count + 1, self.total + value
                self.newest.append(value)

    def quantile(self, q: float) -> float:
        """Return the value of rank `ceil(q * n)` of the newest `n` values; 0.0 without any."""
        if not self.newest:
            return 0.0
        return float(np.quantile(self.newest, q, method="inverted_cdf"))

    def summary(self) -> dict[str, float]:
        """Return plain numbers: count, mean, p50, p90, p95, p99 and max."""
        quantiles = {name: self.quantile(q) for name, q in QUANTILES.items()}
        mean = self.total / self.count if self.count else 0.0
        return {"count": self.count, "mean": mean, **quantiles, "max": self.most}


# Hit and missed tokens by tenant, for a bounded number of tenants.

OTHERS = "(others)"
"""Common name of all tenants beyond the number that are counted by name."""


class Tenancy:
    """Counts of hit and missed tokens by tenant. Thread-safe.

    Names of tenants may be private: they leave the process only in `tokens` and `report`.

    Args:
        bus: Source of the events.
        most: Tenants that are counted by name. Beyond them, the lowest in a ranking joins the
            others; no token is lost. A tenant with more than one in `most` of all tokens is
            counted by name, since it last entered the ranking: these are no counters.
    """

    def __init__(self, bus: Bus, *, most: int = 64) -> None:
        self._lock, self._most = threading.Lock(), most
        self._found: dict[str, Counter[str]] = {}  # tenant -> tier -> tokens; "" is nowhere
        self._others = Counter[str]()
        # Ranks as in Space-Saving (Metwally et al., ICDT 2005): a newcomer continues from the rank
        # that it takes over; otherwise many small tenants would keep it from growing.
        self._ranks: dict[str, int] = {}
        self._subscription = bus.subscribe(self.on_event, events.Hit, events.Miss)

    def on_event(self, event: events.Hit | events.Miss) -> None:
        """Count the tokens of an event for its tenant."""
        tier = event.tier if isinstance(event, events.Hit) else ""
        with self._lock:
            rank = self._ranks.get(event.tenant, 0)
            if event.tenant not in self._ranks and len(self._ranks) >= self._most:
                lowest = min(self._ranks, key=self._ranks.__getitem__)  # it joins the others
                self._others += self._found.pop(lowest)
                rank = self._ranks.pop(lowest)
            self._ranks[event.tenant] = rank + event.tokens
            self._found.setdefault(event.tenant, Counter())[tier] += event.tokens

    def tokens(self) -> dict[str, dict[str, int]]:
        """Return prompt tokens by tenant and by the tier that had them; "" is nowhere."""
        with self._lock:
            told = dict(self._found)
            if self._others:  # a tenant may have that name, too
                told[OTHERS] = self._others + told.get(OTHERS, Counter())
            return {tenant: dict(found) for tenant, found in told.items()}

    def report(self) -> dict[str, Any]:
        """Return plain numbers for each tenant: hit tokens by tier, missed tokens, hit rate."""
        report = {}
        for tenant, found in self.tokens().items():
            missed = found.pop("", 0)
            hits = sum(found.values())
            rate = hits / (hits + missed) if hits + missed else 0.0
            report[tenant] = {"hit_tokens": found, "miss_tokens": missed, "hit_rate": rate}
        return report

    def close(self) -> None:
        """Stop counting; the counts stay."""
        self._subscription.close()
