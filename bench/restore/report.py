"""Restores as one HTML file: times against length per policy with the bound, tables, promises."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

from bench.policy.finding import Finding
from bench.restore.promise import GROUPS, promises
from bench.restore.protocol import PARTS
from bench.restore.row import OURS, Row
from bench.restore.table import Summary, by_cell, summaries
from flowkv.core.errors import ConfigError
from flowkv.report.charts import MOST_CURVES, Curves
from flowkv.report.page import Bars, Figures, Section, Table, write_report

BOUND = "bound"
_BOUND_COLOUR = 5  # grey
_MOST_GROUPS = 3

SUMMARY = ["policy", "x bound", "90 %", "worst", "fastest", "of load", "computed", "GPU", "link"]
"""Median ratio to the bound, of nine in ten cells, at worst; in how many cells nobody is faster;
bytes over those of loading everything; share that is computed; how busy both engines are."""

PROMISES = ["", "on", "target", "figure", "", "range"]
_WORDS = {True: "met", False: "missed", None: None}


def write_restore_report(path: Path, rows: Sequence[Row], *, footer: str = "") -> Path:
    """Writes the report and returns its path.

    Args:
        path: The HTML file.
        rows: Of one engine or several.
        footer: Versions, machine, date.

    Raises:
        ConfigError: If there are no rows, or more policies than curves can be told apart.
        OSError: The file cannot be written.
    """
    if not rows:
        raise ConfigError("a report of no rows", "Measure something first")
    if len({row.policy for row in rows}) >= MOST_CURVES:
        raise ConfigError(
            f"more than {MOST_CURVES - 1} policies cannot be told apart", "Choose some of them"
        )
    sections = []
    for engine in dict.fromkeys(row.engine for row in rows):
        own = [row for row in rows if row.engine == engine]
        sections.append(_promised(engine, own))
        for part in dict.fromkeys(row.part for row in own):
            sections += _part(part, [row for row in own if row.part == part])
    lead = (
        "Times to the first token, suffix included, when a prefix is computed anew, loaded, or both"
        " at once; and the lower bound, which nobody can beat. 1 Gbps is 1e9 bits per second."
    )
    return write_report(path, "Restoring a prefix", sections, lead=lead, footer=footer)


def _promised(engine: str, rows: Sequence[Row]) -> Section:
    found = promises(rows)
    ours = [row.bound_ratio for row in rows if row.policy == OURS]
    parts: list[Figures | Table] = []
    if ours:
        shown = next(summary for summary in summaries(rows) if summary.policy == OURS)
        parts.append(Figures(list(_figures(shown))))
    parts.append(Table(PROMISES, list(map(_promise, found)), "What is promised"))
    return Section(GROUPS[engine], parts=parts, source=rows[0].label)


def _figures(ours: Summary) -> Iterable[tuple[str, object, str]]:
    yield "Over the bound, median", f"{ours.median:.3f}x", f"{ours.cells:,} cells"
    yield "At worst", f"{ours.largest:.3f}x", "the bound"
    if ours.link is not None:
        yield "Bytes over the link", f"{ours.link:.0%}", "of loading everything"


def _promise(finding: Finding) -> list[object]:
    return [
        finding.what,
        finding.trace,
        f"{finding.sense} {finding.target:.4g}",
        None if finding.measured is None else f"{finding.measured:.4g}",
        _WORDS[finding.met],
        finding.note,
    ]


def _part(part: str, rows: Sequence[Row]) -> list[Section]:
    """A table of the part, and charts of it."""
    lines = [summary_cells(summary) for summary in summaries(rows)]
    table = Table(SUMMARY, lines, f"Over {len(by_cell(rows))} cells")
    lengths = {row.tokens for row in rows if row.batch == 1}
    over = [ratios(rows)] if len(lengths) > 1 else []
    sections = [Section(PARTS[part], parts=[table, *over], source=rows[0].label)]
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.model, row.gpu), []).append(row)
    last = next(reversed(groups))[1]
    many = len(groups) > _MOST_GROUPS
    for (model, gpu), own in groups.items():
        if many and gpu != last:
            continue
        charts = _curves(own) if len({row.tokens for row in own}) > 1 else _bars(own)
        parts = [_detail(own), *charts] if rows[0].repetitions > 1 else charts
        sections.append(Section(f"{model} on {gpu}", parts=parts, source=rows[0].label))
    return sections


def summary_cells(summary: Summary) -> list[str]:
    """A line under `SUMMARY`."""

    def percent(value: float | None) -> str:
        return "-" if value is None else f"{value:.0%}"

    return [
        summary.policy,
        f"{summary.median:.3f}",
        f"{summary.p90:.3f}",
        f"{summary.largest:.3f}",
        f"{summary.best} of {summary.cells}",
        percent(summary.link),
        percent(summary.computed),
        percent(summary.compute_busy),
        percent(summary.link_busy),
    ]


def situation(row: Row) -> str:
    """What tells a cell from others of its part, model and GPU."""
    words = [f"{row.gbps:.3g} Gbps" if row.gbps else row.link]
    if row.link != "limited" and row.gbps:
        words.append(row.link)
    words.append(f"{row.tokens:,} + {row.suffix:,} tokens")
    if row.batch > 1:
        words.append(f"batch of {row.batch}")
    if row.compute_share < 1.0:
        words.append(f"{row.compute_share:.3g} of the computing")
    if row.stages > 1:
        words.append(f"{row.stages} stages")
    if row.codec != "raw":
        words.append(row.codec)
    return ", ".join(words)


def _curves(rows: Sequence[Row]) -> list[Curves]:
    """Time against length, a chart per link, suffix, share, ..."""
    charts: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        if row.batch == 1:
            what = (row.gbps, row.suffix, row.compute_share, row.stages, row.codec, row.link)
            charts.setdefault(what, []).append(row)
    return [_curve(own) for own in charts.values() if len({row.tokens for row in own}) > 1]


def ratios(rows: Sequence[Row]) -> Curves:
    """Time over the bound against length, medians of all cells of that length."""
    single = [row for row in rows if row.batch == 1]
    sizes = sorted({row.tokens for row in single})
    names = list(dict.fromkeys(row.policy for row in single))
    series: dict[str, list[float]] = {}
    for name in names:
        found = (
            [r.bound_ratio for r in single if (r.policy, r.tokens) == (name, n)] for n in sizes
        )
        series[name] = [median(ratios) if ratios else math.nan for ratios in found]
    series[BOUND] = [1.0] * len(sizes)
    caption = "Time to the first token over the bound, median of the cells"
    return _chart(caption, sizes, series)


def _curve(rows: Sequence[Row]) -> Curves:
    sizes = sorted({row.tokens for row in rows})
    at = {(row.policy, row.tokens): row.ttft_s for row in rows}
    bounds = {row.tokens: row.bound_s for row in rows}
    names = list(dict.fromkeys(row.policy for row in rows))
    series = {name: [at.get((name, size), math.nan) for size in sizes] for name in names}
    series[BOUND] = [bounds[size] for size in sizes]
    caption = situation(rows[0]).replace(f"{rows[0].tokens:,} + ", "suffix of ")
    return _chart(f"Seconds to the first token, {caption}", sizes, series)


def _chart(caption: str, sizes: Sequence[float], series: dict[str, list[float]]) -> Curves:
    names = [name for name in series if name != BOUND]
    return Curves(
        caption,
        sizes,
        series,
        "tokens of the prefix",
        [BOUND],
        colours(names),
        percent=False,
        log_y=True,
    )


def colours(names: Sequence[str]) -> dict[str, int]:
    """A colour for each policy, the same in all charts of a page; grey is the bound's."""
    free = [number for number in range(MOST_CURVES) if number != _BOUND_COLOUR]
    order = [name for name in (OURS, *names) if name in names]
    return {**dict(zip(dict.fromkeys(order), free, strict=False)), BOUND: _BOUND_COLOUR}


def _bars(rows: Sequence[Row]) -> list[Bars]:
    charts = []
    for cell in by_cell(rows):
        own = list(cell.values())
        labels = [BOUND, *(row.policy for row in own)]
        values = [own[0].bound_s, *(row.ttft_s for row in own)]
        caption = f"Seconds to the first token, {situation(own[0])}"
        charts.append(Bars(caption, labels, {"": values}, "s"))
    return charts


def _detail(rows: Sequence[Row]) -> Table:
    """Row by row, for what was run more than once."""
    columns = ["", "policy", "ms", "least", "most", "x bound", "computed", "MB loaded"]
    lines = [
        [
            situation(row),
            row.policy,
            *(f"{1e3 * value:,.1f}" for value in (row.ttft_s, row.ttft_min_s, row.ttft_max_s)),
            f"{row.bound_ratio:.3f}",
            f"{row.computed:.0%}",
            f"{row.link_bytes / 1e6:,.1f}",
        ]
        for row in rows
    ]
    return Table(columns, lines, "Row by row")
