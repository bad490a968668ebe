"""The table of all rows: a line per policy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from bench.restore.row import Row

SUMMARY = ["policy", "x bound", "90 %", "worst", "fastest", "of load", "computed", "GPU", "link"]
"""Median ratio to the bound, of nine in ten cells, at worst; cells in which no policy is faster;
bytes over those of loading everything; share that is computed; use of GPU and link."""

Cells = list[dict[str, Row]]
"""Rows by policy, cell by cell."""


class Summary(NamedTuple):
    """A policy over some cells.

    Attributes:
        policy: Its name.
        cells: How many.
        median: Of `bound_ratio`.
        p90: Of the same.
        largest: Of the same.
        best: In how many cells nobody is faster by more than 0.1 %.
        link: Its link bytes over those of loading everything, median; None without that.
        computed: Share of the prefix that was computed, median.
        compute_busy: Median; None where it is not known.
        link_busy: The same.
    """

    policy: str
    cells: int
    median: float
    p90: float
    largest: float
    best: int
    link: float | None
    computed: float
    compute_busy: float | None
    link_busy: float | None


def by_cell(rows: Iterable[Row]) -> Cells:
    """Rows that are to be compared, together."""
    cells: dict[tuple[object, ...], dict[str, Row]] = {}
    for row in rows:
        cells.setdefault(row.cell(), {})[row.policy] = row
    return list(cells.values())


def summaries(rows: Sequence[Row]) -> list[Summary]:
    """A line per policy, in their order."""
    cells = by_cell(rows)
    return [_summary(name, cells) for name in dict.fromkeys(row.policy for row in rows)]


def _summary(name: str, cells: Cells) -> Summary:
    found = [cell for cell in cells if name in cell]
    own = [cell[name] for cell in found]
    ratios = [row.bound_ratio for row in own]
    fastest = [min(row.ttft_s for row in cell.values()) for cell in found]
    link = [cell[name].link_bytes / cell["load"].link_bytes for cell in found if "load" in cell]
    return Summary(
        policy=name,
        cells=len(own),
        median=median(ratios),
        p90=float(np.percentile(ratios, 90)),
        largest=max(ratios),
        best=sum(row.ttft_s <= 1.001 * best for row, best in zip(own, fastest, strict=True)),
        link=known_median(link),
        computed=median(row.computed for row in own),
        compute_busy=known_median(r.compute_busy for r in own),
        link_busy=known_median(r.link_busy for r in own),
    )


def known_median(values: Iterable[float | None]) -> float | None:
    """The median of those that are known; None if none is."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def summary_cells(summary: Summary) -> list[str]:
    """Return a line under `SUMMARY`."""

    def percent(value: float | None) -> str:
        return "-" if value is None else f"{value:.0%}"

    return [
        *(summary.policy, f"{summary.median:.3f}", f"{summary.p90:.3f}"),
        *(f"{summary.largest:.3f}", f"{summary.best} of {summary.cells}", percent(summary.link)),
        *(percent(summary.computed), percent(summary.compute_busy), percent(summary.link_busy)),
    ]
