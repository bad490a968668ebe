"""Counters, gauges and histograms, fed by the bus and readable as a dict or Prometheus text.

Tenants are no labels: their number is unbounded, and their names may be private.
"""

from __future__ import annotations

import bisect
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from flowkv.observe import events
from flowkv.observe.events import Bus, EngineStep, Event, Subscription

Kind = Literal["counter", "gauge", "histogram"]


class Level(NamedTuple):
    """A value that is read when somebody asks, not told by events.

    Attributes:
        name: The metric.
        value: Its value now.
        labels: Of the series.
    """

    name: str
    value: float
    labels: Mapping[str, str] = MappingProxyType({})


class Metric(NamedTuple):
    """The definition of a metric.

    Attributes:
        kind: "counter", "gauge" or "histogram".
        labels: What tells its series apart: fields of the event.
        meaning: One line for people.
        event: The type of event that tells it; "" for what is read when somebody asks.
        field: What of the event adds up, is at, or is spread; "" counts the events.
        maybe: Whether 0.0 says that there was nothing to measure.
    """

    kind: Kind
    labels: tuple[str, ...]
    meaning: str
    event: str
    field: str
    maybe: bool


# name | c(ounter), g(auge) or h(istogram) | labels | what tells it | meaning
#
# An event tells how often it came; `Event.field` what the field adds up to, is at, or how its
# values are spread. A "?" means that 0.0 says that there was nothing to measure. What no event
# tells is read when somebody asks.
_TABLE = """
requests_total | c | | Queued | Requests that an engine accepted
request_prompt_tokens_total | c | | Queued.prompt_tokens | Tokens of their prompts
requests_waiting | g | | EngineStep.waiting | Requests that wait for their first admission
requests_aside | g | | EngineStep.aside | Preempted requests whose pages lie in host memory
admissions_total | c | resumed | Admitted | Requests that entered the batch; resumed: again, after \
they were preempted
admitted_reused_tokens_total | c | resumed | Admitted.reused_tokens | Tokens that needed no \
computing when they entered
queue_seconds | h | resumed | Admitted.queued_s | Wait that ended with an admission
preemptions_total | c | kept | Preempted | Requests that made room; kept: their pages went to host \
memory, else they were dropped
preempted_pages_total | c | kept | Preempted.pages | Device pages that they gave back
preempted_bytes_total | c | kept | Preempted.n_bytes | Bytes of those pages
finished_total | c | reason | Finished | Requests that are over: stop, length, cancelled, deadline \
or failed
finished_tokens_total | c | reason | Finished.new_tokens | New tokens that they got
request_seconds | h | reason | Finished.seconds | From submission to the end
ttft_seconds | h | reason | Finished.ttft_s? | From submission to the first new token
tpot_seconds | h | reason | Finished.tpot_s? | Mean time of a further token of a request
inter_token_seconds | h | | EngineStep.gaps_s | Time between two tokens of a row
engine_steps_total | c | | EngineStep | Steps of engines
engine_step_seconds | h | | EngineStep.seconds | A whole step
engine_model_seconds | h | | EngineStep.model_s | The forward in it
engine_sampling_seconds | h | | EngineStep.sampling_s | The choice of tokens in it
prefill_tokens_total | c | | EngineStep.prefill_tokens | Prompt tokens that engines computed
decode_tokens_total | c | | EngineStep.decode_tokens | Tokens of rows that decode, computed
made_tokens_total | c | | EngineStep.made_tokens | New tokens that requests got
engine_rows | g | | EngineStep.rows | Rows of the last step
engine_pages | g | | EngineStep.pages | Device pages that anybody held in the last step
engine_total_pages | g | | EngineStep.total_pages | Device pages that there are
tokens_seen_total | c | | | Prompt tokens that were looked up
tokens_reused_total | c | | | Those of them that were found
open_sequences | g | | | Sequences that are open
known_pages | g | | | Pages and states that the index knows, wherever they lie
hits_total | c | tier | Hit | Prompts of which a part was found
hit_tokens_total | c | tier | Hit.tokens | Prompt tokens found
hit_bytes_total | c | tier | Hit.n_bytes | Bytes of what was found; 0 on the device
misses_total | c | | Miss | Prompts of which a part was found nowhere
miss_tokens_total | c | | Miss.tokens | Prompt tokens found nowhere
restores_total | c | tier | Restored | Loads of prefixes
restored_tokens_total | c | tier | Restored.tokens | Tokens of prefixes that were loaded
restored_bytes_total | c | tier | Restored.n_bytes | Bytes of them
restore_seconds | h | tier | Restored.seconds | From the beginning of such a load to its end
overlapped_restores_total | c | | RestoreEnded | Restores from both ends
overlapped_restore_seconds | h | | RestoreEnded.seconds | From the beginning of a restore to its end
restore_exposed_seconds | h | | RestoreEnded.exposed_s | The part of that in which somebody waited \
for loads
restore_computed_tokens_total | c | | RestoreEnded.computed_tokens | Tokens that restores computed
restore_loaded_tokens_total | c | | RestoreEnded.loaded_tokens | Tokens that restores loaded
restore_failed_loads_total | c | | RestoreEnded.failed | Loads that did not come and were recomputed
restore_spans_total | c | engine | RestoreSpan | Pieces of restores (not counted unless followed)
restore_span_bytes_total | c | engine | RestoreSpan.n_bytes | Bytes of them
published_total | c | group | Published | Times that full pages became known to the index
published_tokens_total | c | group | Published.tokens | Tokens of those pages
encodings_total | c | source target | Encoded | Times that full pages were encoded
encoded_pages_total | c | source target | Encoded.pages | Pages that were encoded
encoded_source_bytes_total | c | source target | Encoded.n_bytes_before | Their bytes before
encoded_bytes_total | c | source target | Encoded.n_bytes | Their bytes afterwards
stores_total | c | tier | Stored | Writes to a tier
stored_pages_total | c | tier | Stored.pages | Pages written
stored_bytes_total | c | tier | Stored.n_bytes | Bytes written
store_seconds | h | tier | Stored.seconds | From the beginning of a write to its end
evictions_total | c | tier reason | Evicted | Times that a tier gave up pages: space, unused, \
lease, quota, prefetch or close
evicted_pages_total | c | tier reason | Evicted.pages | Pages that it gave up
evicted_bytes_total | c | tier reason | Evicted.n_bytes | Bytes of them
promotions_total | c | source tier | Promoted | Times that pages were copied to a faster tier
promoted_pages_total | c | source tier | Promoted.pages | Pages copied
promoted_bytes_total | c | source tier | Promoted.n_bytes | Bytes of them
demotions_total | c | source tier | Demoted | Times that pages moved to a slower tier to make room
demoted_pages_total | c | source tier | Demoted.pages | Pages moved
demoted_bytes_total | c | source tier | Demoted.n_bytes | Bytes of them
defragmentations_total | c | device | Defragmented | Times that pages moved within a pool
defragmented_pages_total | c | device | Defragmented.pages | Pages moved
defragmented_bytes_total | c | device | Defragmented.n_bytes | Bytes of them
defragmented_slabs_total | c | device | Defragmented.slabs | Slabs that became empty
defragmentation_seconds | h | device | Defragmented.seconds | How long that took
fragmentation | g | device | Defragmented.fragmentation | Fragmentation right after the last one
device_used_bytes | g | device | | Bytes of a pool in use
device_capacity_bytes | g | device | | Bytes of a pool
device_fragmentation | g | device | | Share of the bytes of occupied slabs that no page uses, 0 to 1
tier_used_bytes | g | tier | | Bytes that a tier holds
tier_capacity_bytes | g | tier | | Bytes that it may hold; +Inf without a limit
tier_answers | g | tier | | 1 if the tier may be asked now, 0 if it owes answers or rests
tier_breaker | g | tier state | | 1 for the state that the tier's breaker is in: closed, half-open \
or open
tier_breaker_trips_total | c | tier | | Times that the breaker of a remote tier opened
tier_queued_bytes | g | tier | | Bytes that wait to be moved
tier_in_flight_bytes | g | tier | | Bytes under way
tier_loaded_bytes_total | c | tier | | Bytes loaded, for whatever reason
tier_refused_total | c | tier | | Frames that were damaged or of another kind
tier_dropped_total | c | tier | | Pages not written, as the tier was too slow, away or full
tier_unpaid_total | c | tier | | Pages that were not written, as loading them could not pay
tier_load_bytes_per_second | g | tier | | Measured rate of loads
tier_store_bytes_per_second | g | tier | | Measured rate of writes
prefetch_used_bytes_total | c | tier | | Bytes brought early from a tier, and used
prefetch_wasted_bytes_total | c | tier | | Bytes brought early from a tier, and evicted unused
prefetch_precision | g | tier | | Used share of those of either kind, 0 to 1
audited_pages_total | c | tier codec | Audited | Restored pages that were recomputed and compared
audit_mismatches_total | c | | | Those of them that were wrong
audit_skipped_total | c | | | Sampled pages that could not be recomputed
audit_worst | g | | | Greatest error of a sound page as a share of its bound
failures_total | c | tier operation | Failed | Operations that a tier did not do
failed_items_total | c | tier operation | Failed.items | Items of them
quarantined_total | c | tier | Quarantined | Stored pages that failed their check
remembered_calls_total | c | | Remembered | Calls of what `flowkv.memo` made
remembered_rows_total | c | | Remembered.rows | Their rows
remembered_found_rows_total | c | | Remembered.found | Those of them that had been computed before
remembered_computed_rows_total | c | | Remembered.computed | Those of them that were computed
forgotten_total | c | tier | Forgotten | Times that another cache erased something on a shared tier
forgotten_blocks_total | c | tier | Forgotten.blocks | Blocks that were dropped for that
embedding_lookups_total | c | | RowsRead | Look-ups in embeddings on disk
embedding_rows_total | c | | RowsRead.rows | Different rows of those
embedding_found_rows_total | c | | RowsRead.found | Those of them that were in memory
embedding_read_bytes_total | c | | RowsRead.n_bytes | Bytes that were read for the others
weights_forwards_total | c | | WeightsRead | Forwards of models whose weights are read meanwhile
weights_units_total | c | | WeightsRead.units | Units of weights that they met
weights_found_units_total | c | | WeightsRead.found | Those of them that were there or under way
weights_read_bytes_total | c | | WeightsRead.n_bytes | Bytes that were read for the others
weights_blocked_seconds | h | | WeightsRead.seconds | Time that a forward waited for them
steps_total | c | | StepPlanned | Forward passes that were planned (not counted unless followed)
step_tokens_total | c | | StepPlanned.new_tokens | New tokens of them
step_rows | h | | StepPlanned.rows | Rows of one
step_context_tokens | h | | StepPlanned.context_tokens | Context tokens of one
warnings_total | c | code | Warned | Warnings
"""


def _table() -> Iterator[tuple[str, Metric]]:
    kinds: dict[str, Kind] = {"c": "counter", "g": "gauge", "h": "histogram"}
    for line in _TABLE.strip().splitlines():
        name, kind, labels, source, said = (cell.strip() for cell in line.split("|"))
        event, _, field = source.rstrip("?").partition(".")
        told = event, field, source.endswith("?")
        yield name, Metric(kinds[kind], tuple(labels.split()), said, *told)


NAMES: Mapping[str, Metric] = MappingProxyType(dict(_table()))
"""Names, without their prefix `flowkv_`."""

RULES: Mapping[type[Event], Mapping[str, Metric]] = MappingProxyType(
    {
        getattr(events, event): {name: one for name, one in NAMES.items() if one.event == event}
        for event in dict.fromkeys(one.event for one in NAMES.values() if one.event)
    }
)
"""Event type -> the metrics that it tells, all of the same labels."""


class MetricReading(NamedTuple):
    """The reading of one metric from an event.

    Attributes:
        kind: "counter": add `values[0]`; "gauge": set it; "histogram": add all of `values`.
        name: The metric.
        values: One value, or as many as the event has of a histogram.
    """

    kind: Kind
    name: str
    values: tuple[float, ...]


def read(event: Event) -> tuple[dict[str, str], list[MetricReading]]:
    """Labels of the series that an event counts for, and what it says about each metric.

    An event counts as its type, or as the nearest base of that which is in the table.
    """
    rule = next(RULES[base] for base in type(event).__mro__ if base in RULES)
    found, labels = list[MetricReading](), next(iter(rule.values())).labels
    for name, metric in rule.items():
        value = getattr(event, metric.field) if metric.field else 1
        if value or not metric.maybe:
            values = value if isinstance(value, tuple) else (value,)
            found.append(MetricReading(metric.kind, name, values))
    return {label: text(getattr(event, label)) for label in labels}, found


def text(value: object) -> str:
    """A label's value."""
    return str(value).lower() if isinstance(value, bool) else str(value)


SECONDS_BUCKETS = tuple(m * 10.0**e for e in range(-5, 2) for m in (1, 2.5, 5))
"""Upper bounds of a histogram of times, 10 microseconds to 50 seconds."""

COUNT_BUCKETS = tuple(float(4**e) for e in range(0, 13))
"""Upper bounds of a histogram of counts, 1 to 16 Mi."""

PREFIX = "flowkv_"
"""What names begin with outside of this process."""

_Labels = tuple[tuple[str, str], ...]


class Histogram:
    """A histogram: counts of values by bucket.

    Attributes:
        bounds: Upper bounds of the buckets, ascending, without the last one, which has none.
        counts: Values in each bucket.
        total: Sum of the values.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.total, self.counts = bounds, 0.0, [0] * (len(bounds) + 1)

    def add(self, values: Iterable[float]) -> None:
        """Counts values."""
        for value in values:
            self.counts[bisect.bisect_left(self.bounds, value)] += 1
            self.total += value

    def copy(self) -> Histogram:
        """As it is now."""
        other = Histogram(self.bounds)
        other.counts, other.total = self.counts.copy(), self.total
        return other

    def below(self) -> list[tuple[str, int]]:
        """Each upper bound as text, and how many values are not above it."""
        bounds = map(number, (*self.bounds, math.inf))
        return list(zip(bounds, accumulate(self.counts), strict=True))

    def quantile(self, q: float) -> float:
        """Upper bound of the bucket that holds quantile `q`; the last bound if beyond it."""
        rank, seen = q * sum(self.counts), accumulate(self.counts)
        holding = (bound for bound, count in zip(self.bounds, seen, strict=False) if count >= rank)
        return next(holding, self.bounds[-1])


class Family(NamedTuple):
    """All series of one name.

    Attributes:
        name: Without the prefix.
        kind: What it is.
        meaning: One line for people.
        series: Labels and value of each, in the order of their labels.
    """

    name: str
    kind: Kind
    meaning: str
    series: list[tuple[_Labels, float | Histogram]]


class Metrics:
    """The series of all names in the table. Thread-safe.

    Args:
        bus: Where to listen at once; `follow` adds more.
    """

    def __init__(self, bus: Bus | None = None) -> None:
        self._lock = threading.Lock()
        self._series: dict[str, dict[_Labels, Any]] = {}
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

    def total(self, name: str, /, **labels: object) -> float:
        """Sum of a counter or gauge over all series that carry `labels`; 0 if there is none."""
        wanted = set(_key(labels))
        with self._lock:
            series = self._series.get(name, {})
            return float(sum(value for key, value in series.items() if wanted <= set(key)))

    def snapshot(self) -> dict[str, float | dict[str, float]]:
        """All series now, by Prometheus-like name such as `hits_total{tier="host"}`.

        A histogram is {"count", "sum", "p50", "p99"}, quantiles being upper bounds of buckets.
        """
        plain: dict[str, float | dict[str, float]] = {}
        with self._lock:
            for name, series in self._series.items():
                for key, value in series.items():
                    plain[name + _braces(key)] = (
                        {
                            "count": sum(value.counts),
                            "sum": value.total,
                            "p50": value.quantile(0.5),
                            "p99": value.quantile(0.99),
                        }
                        if isinstance(value, Histogram)
                        else value
                    )
        return dict(sorted(plain.items()))

    def by(self, name: str, label: str, /) -> dict[str, float]:
        """A counter or gauge by the values of one label, summed over all others."""
        found: dict[str, float] = {}
        with self._lock:
            for key, value in self._series.get(name, {}).items():
                told = dict(key).get(label, "")
                found[told] = found.get(told, 0) + value
        return found

    def families(self) -> list[Family]:
        """All series now, and what sources say, by name: what every exposition is made of."""
        levels = [level for source in self._sources for level in source()]
        with self._lock:
            found = {
                name: {
                    key: one.copy() if isinstance(one, Histogram) else one
                    for key, one in of.items()
                }
                for name, of in self._series.items()
            }
        for level in levels:
            found.setdefault(level.name, {})[_key(level.labels)] = level.value
        return [
            Family(name, known.kind, known.meaning, sorted(series.items()))
            if (known := NAMES.get(name)) is not None
            else Family(name, "gauge", "", sorted(series.items()))  # of somebody's own source
            for name, series in sorted(found.items())
        ]

    def prometheus(self) -> str:
        """All series in the Prometheus text format (version 0.0.4)."""
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

    def note(self, event: Event) -> None:
        """Counts an event."""
        labels, readings = read(event)
        key = _key(labels)
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
                    series[key].add(values)


class Observable(Protocol):
    """An owner of a bus and its metrics: a `KV`."""

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


# Values over time in bounded memory, however long that is: the grid gets coarser, nothing else.


class Series:
    """Named values on a grid of time. Not thread-safe.

    Args:
        most: Cells of the grid. When they are full, neighbours become one.
        cell_s: Width of a cell at first.

    Attributes:
        started_s: Time of the first value.
        cell_s: Width of a cell now.
    """

    def __init__(self, *, most: int = 512, cell_s: float = 0.02) -> None:
        self.started_s, self.cell_s, self._most = math.nan, cell_s, most
        # By name and cell: the sum, and the weights of levels in it, which amounts have none of.
        self._cells: dict[str, dict[int, tuple[float, float]]] = {}

    def count(self, at_s: float, amounts: Mapping[str, float]) -> None:
        """Adds amounts, which are read as rates."""
        cell = self._cell(at_s)
        for name, amount in amounts.items():
            _add(self._cells.setdefault(name, {}), cell, (amount, 0.0))

    def set(self, at_s: float, levels: Mapping[str, float], *, weight: float = 1.0) -> None:
        """Says how high some levels are; those of one cell are read as their weighted mean."""
        cell = self._cell(at_s)
        for name, level in levels.items():
            _add(self._cells.setdefault(name, {}), cell, (level * weight, weight))

    @property
    def cells(self) -> int:
        """Cells from the first value to the last."""
        return max((max(cells) for cells in self._cells.values()), default=-1) + 1

    @property
    def times_s(self) -> list[float]:
        """Middle of each cell, in seconds from the first value."""
        return [(number + 0.5) * self.cell_s for number in range(self.cells)]

    @property
    def names(self) -> list[str]:
        """What there is, in order of appearance."""
        return list(self._cells)

    def rate(self, name: str, *, most: int = 72) -> tuple[list[float], list[float]]:
        """What was counted, per second: middles of at most so many stretches, and their rates."""
        cells, every = self._cells.get(name, {}), max(1, -(-self.cells // most))
        sums = [0.0] * -(-self.cells // every)
        for cell, (amount, _) in cells.items():
            sums[cell // every] += amount
        width_s = every * self.cell_s
        times_s = [(number + 0.5) * width_s for number in range(len(sums))]
        return times_s, [total / width_s for total in sums]

    def level(self, name: str) -> list[float]:
        """How high a level was in each cell; where nobody said anything, as in the one before."""
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


# Quantiles of streams of any length: within 1 % of the true ones, in bounded memory.
#
# Values are counted in buckets whose bounds grow by a constant factor, as in DDSketch (Masson,
# Rim and Lee, VLDB 2019): every value of a bucket is within `ERROR` of its middle, so that a
# quantile is, whatever the distribution.

ERROR = 0.01
"""Greatest relative error of a quantile."""

LEAST, MOST = 1e-9, 1e9
"""Values outside are counted as these; what is not above zero is counted apart, exactly."""

QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
"""Those that summaries have."""

_GROWTH = math.log1p(ERROR) - math.log1p(-ERROR)  # of bucket bounds, as a logarithm
_BUCKETS = math.ceil(math.log(MOST / LEAST) / _GROWTH) + 1
_FOLD = 512  # values that are counted at once: less than a microsecond each


class Bucket(NamedTuple):
    """Values between two bounds.

    Attributes:
        low: Lower bound.
        high: Upper bound.
        held: How many there are.
    """

    low: float
    high: float
    held: int


class Spread:
    """The distribution of values of at least zero. Not thread-safe.

    Attributes:
        count: Values so far.
        total: Their sum.
        least: The smallest; 0.0 without any.
        most: The largest; 0.0 without any.
    """

    __slots__ = ("_counts", "_least", "_most", "_total", "_waiting", "_zeros")

    def __init__(self, values: Iterable[float] = ()) -> None:
        self._counts = np.zeros(_BUCKETS, np.int64)
        self._zeros, self._total, self._least, self._most = 0, 0.0, math.inf, -math.inf
        self._waiting: list[float] = []
        self.extend(values)

    def add(self, value: float) -> None:
        """Counts a value; NaN is ignored."""
        self._waiting.append(value)
        if len(self._waiting) >= _FOLD:
            self._fold()

    def extend(self, values: Iterable[float]) -> None:
        """Counts values."""
        self._waiting.extend(values)
        if len(self._waiting) >= _FOLD:
            self._fold()

    @property
    def count(self) -> int:
        """Values so far."""
        self._fold()
        return self._zeros + int(self._counts.sum())

    @property
    def total(self) -> float:
        """Their sum."""
        self._fold()
        return self._total

    @property
    def least(self) -> float:
        """The smallest; 0.0 without any."""
        self._fold()
        return self._least if self._most >= self._least else 0.0

    @property
    def most(self) -> float:
        """The largest; 0.0 without any."""
        self._fold()
        return self._most if self._most >= self._least else 0.0

    @property
    def mean(self) -> float:
        """Their mean; 0.0 without any."""
        count = self.count
        return self._total / count if count else 0.0

    def quantile(self, q: float) -> float:
        """The value below which a share `q` of all lies; 0.0 without any.

        It is that of rank `ceil(q * count)`, within `ERROR` of it.
        """
        count = self.count
        rank = min(max(1, math.ceil(q * count)), count)
        if rank <= self._zeros:
            return self.least
        behind = np.cumsum(self._counts)
        number = int(np.searchsorted(behind, rank - self._zeros))
        middle = LEAST * math.exp(number * _GROWTH) * (1 - ERROR)
        return min(max(middle, self.least), self.most)

    def summary(self) -> dict[str, float]:
        """Plain numbers: count, mean, p50, p90, p95, p99 and max."""
        quantiles = {name: self.quantile(q) for name, q in QUANTILES.items()}
        return {"count": self.count, "mean": self.mean, **quantiles, "max": self.most}

    def buckets(self) -> Iterator[Bucket]:
        """The buckets that hold any value above zero, ascending."""
        self._fold()
        for number in np.flatnonzero(self._counts).tolist():
            high = LEAST * math.exp(number * _GROWTH)
            yield Bucket(high * math.exp(-_GROWTH), high, int(self._counts[number]))

    @property
    def zeros(self) -> int:
        """Values that were not above zero."""
        self._fold()
        return self._zeros

    def _fold(self) -> None:
        if not self._waiting:
            return
        values = np.array(self._waiting, np.float64)
        self._waiting.clear()
        values = values[~np.isnan(values)]
        if not len(values):
            return
        self._total += float(values.sum())
        self._least = min(self._least, float(values.min()))
        self._most = max(self._most, float(values.max()))
        above = values[values > 0]
        self._zeros += len(values) - len(above)
        if len(above):
            numbers = np.ceil(np.log(np.clip(above, LEAST, MOST) / LEAST) / _GROWTH)
            self._counts += np.bincount(numbers.astype(np.int64), minlength=_BUCKETS)

    def __repr__(self) -> str:
        return f"<Spread of {self.count}: p50 {self.quantile(0.5):.3g}, max {self.most:.3g}>"


# Tokens found by tenant, for a bounded number of tenants.

OTHERS = "(others)"
"""What tenants beyond the number that are told apart are called, all together."""


class Tenancy:
    """Tokens found and not found by tenant. Thread-safe.

    Names of tenants may be private: they leave the process only where somebody asks for them.

    Args:
        bus: Where to listen.
        most: Tenants that are told apart. Beyond them, the last of them in a ranking joins the
            others; no token is lost. Whoever has more than one in `most` of all tokens is told
            apart, with what it had since it was ranked last: these are no counters.
    """

    def __init__(self, bus: Bus, *, most: int = 64) -> None:
        self._lock, self._most = threading.Lock(), most
        self._found: dict[str, dict[str, int]] = {}  # tenant -> tier -> tokens; "" is nowhere
        self._others: dict[str, int] = {}
        # Where tenants rank, as in Space-Saving (Metwally et al., ICDT 2005): a newcomer goes on
        # from the rank that it takes over, or a crowd of small ones would never let it grow.
        self._ranks: dict[str, int] = {}
        self._subscription = bus.subscribe(self.note, events.Hit, events.Miss)

    def note(self, event: events.Hit | events.Miss) -> None:
        """Takes an event."""
        tier = event.tier if isinstance(event, events.Hit) else ""
        with self._lock:
            rank = self._ranks.get(event.tenant, 0)
            if event.tenant not in self._ranks and len(self._ranks) >= self._most:
                rank = self._join(min(self._ranks, key=self._ranks.__getitem__))
            self._ranks[event.tenant] = rank + event.tokens
            found = self._found.setdefault(event.tenant, {})
            found[tier] = found.get(tier, 0) + event.tokens

    def _join(self, tenant: str) -> int:
        """Counts a tenant as one of the others; returns its rank."""
        _add_tokens(self._others, self._found.pop(tenant))
        return self._ranks.pop(tenant)

    def tokens(self) -> dict[str, dict[str, int]]:
        """Prompt tokens by tenant and by the tier that had them; "" is nowhere."""
        with self._lock:
            told = {tenant: dict(found) for tenant, found in self._found.items()}
            if self._others:  # a tenant may be called that, too
                _add_tokens(told.setdefault(OTHERS, {}), self._others)
            return told

    def report(self) -> dict[str, Any]:
        """Plain numbers: for each tenant its tokens by tier, those not found, and its hit rate."""
        report = {}
        for tenant, found in self.tokens().items():
            missed = found.pop("", 0)
            hits = sum(found.values())
            rate = hits / (hits + missed) if hits + missed else 0.0
            report[tenant] = {"hit_tokens": found, "miss_tokens": missed, "hit_rate": rate}
        return report

    def close(self) -> None:
        """Ends the collecting; what was collected stays."""
        self._subscription.close()


def _add_tokens(found: dict[str, int], more: dict[str, int]) -> None:
    for tier, tokens in more.items():
        found[tier] = found.get(tier, 0) + tokens
