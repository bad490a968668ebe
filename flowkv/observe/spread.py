"""Quantiles of streams of any length: within 1 % of the true ones, in bounded memory.

Values are counted in buckets whose bounds grow by a constant factor, as in DDSketch (Masson, Rim
and Lee, VLDB 2019): every value of a bucket is within `ERROR` of its middle, so that a quantile is,
whatever the distribution. Spreads of parts add up to that of the whole, exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

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
    """How values of at least zero are spread. Not thread-safe.

    Attributes:
        count: Values so far.
        total: Their sum.
        least: The smallest; 0.0 without any.
        most: The largest; 0.0 without any.
    """

    __slots__ = ("_counts", "_least", "_most", "_total", "_waiting", "_zeros")

    def __init__(self, values: Iterable[float] = ()) -> None:
        self._counts = np.zeros(0, np.int64)
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

    def merge(self, other: Spread) -> None:
        """Counts all that another one has counted."""
        self._fold()
        other._fold()
        if len(other._counts):
            self._room()
            self._counts += other._counts
        self._zeros += other._zeros
        self._total += other._total
        self._least = min(self._least, other._least)
        self._most = max(self._most, other._most)

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

    def _room(self) -> None:
        if not len(self._counts):  # most spreads of a process stay empty
            self._counts = np.zeros(_BUCKETS, np.int64)

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
            self._room()
            numbers = np.ceil(np.log(np.clip(above, LEAST, MOST) / LEAST) / _GROWTH)
            self._counts += np.bincount(numbers.astype(np.int64), minlength=_BUCKETS)

    def __repr__(self) -> str:
        return f"<Spread of {self.count}: p50 {self.quantile(0.5):.3g}, max {self.most:.3g}>"
