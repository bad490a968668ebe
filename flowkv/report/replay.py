"""Results of replays as one HTML file: hit ratio and closure against size, and the table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from flowkv.report.charts import Curves
from flowkv.report.page import Figures, Section, Table, write_report
from flowkv.sim.replay import Result

BOUND = "opt"
BASE = "lru"


def write_replay_report(path: Path, rows: Sequence[Result], *, footer: str = "") -> Path:
    """Writes the report and returns its path.

    Args:
        path: The HTML file.
        rows: What was replayed, on one trace or several.
        footer: Versions, machine, date.

    Raises:
        ConfigError: If there are more policies than curves can be told apart.
        OSError: The file cannot be written.
    """
    traces = list(dict.fromkeys(row.trace for row in rows))
    policies = list(dict.fromkeys(row.policy for row in rows))
    title = "What a policy keeps" if len(traces) > 1 else f"What a policy keeps of {traces[0]}"
    sections = []
    for trace in traces:
        own = [row for row in rows if row.trace == trace]
        sections.append(_curves(trace, own, policies))
        sections.append(_tables(trace, own))
    lead = (
        "Requests of a trace, replayed through the policy objects that the cache uses. A hit is a"
        " block in the leading run of blocks that are there when a request arrives."
    )
    return write_report(path, title, sections, lead=lead, footer=footer)


def _curves(trace: str, rows: Sequence[Result], policies: Sequence[str]) -> Section:
    sizes = sorted({row.size for row in rows})
    at = {(row.policy, row.size): row for row in rows}
    shown = [name for name in policies if any((name, size) in at for size in sizes)]
    hits = {
        name: [at[name, s].prefix_hit_ratio if (name, s) in at else math.nan for s in sizes]
        for name in shown
    }
    closures = {
        name: [_closure(at.get((name, size))) for size in sizes]
        for name in shown
        if name not in (BOUND, BASE)
    }
    parts: list[Figures | Curves] = []
    best = _best(rows)
    if best is not None:
        parts.append(best)
    colours = {name: number for number, name in enumerate(policies)}
    x = "room, as a share of the trace's different blocks"
    parts.append(Curves("Prefix hit ratio", sizes, hits, x, [BOUND], colours))
    if any(math.isfinite(value) for values in closures.values() for value in values):
        caption = "Closure: how much of the way from leaf-first LRU to Belady"
        parts.append(Curves(caption, sizes, closures, x, (), colours))
    return Section(trace, parts=parts, source="simulated")


def _best(rows: Sequence[Result]) -> Figures | None:
    """The closures of the policies, averaged over sizes: the best three."""
    means = []
    for name in dict.fromkeys(row.policy for row in rows):
        values = [row.closure for row in rows if row.policy == name and row.closure is not None]
        if values and name not in (BOUND, BASE):
            means.append((sum(values) / len(values), name, len(values)))
    if not means:
        return None
    best = sorted(means, reverse=True)[:3]
    items = [
        (name, f"{mean:.2f}", f"mean closure of {_sizes(count)}") for mean, name, count in best
    ]
    return Figures(items)


def _sizes(count: int) -> str:
    return "one size" if count == 1 else f"{count} sizes"


def _closure(row: Result | None) -> float:
    return math.nan if row is None or row.closure is None else row.closure


def _tables(trace: str, rows: Sequence[Result]) -> Section:
    """One table per figure: a policy a line, a size a column."""
    sizes = {row.size: row.pages for row in sorted(rows, key=lambda row: row.size)}
    columns = ["policy", *(f"{100 * size:.4g}%" for size in sizes)]
    at = {(row.policy, row.size): row for row in rows}
    tables = [Table(["", *columns[1:]], [["blocks that fit", *sizes.values()]], "Sizes")]
    for caption, field, digits, unit in (
        ("Prefix hit ratio, percent", "prefix_hit_ratio", 2, 100.0),
        ("Closure", "closure", 3, 1.0),
        ("Blocks loaded again and prefetched, over those of lru", "load_traffic_vs_lru", 3, 1.0),
        ("Prefetched blocks that were used, percent", "prefetch_precision", 0, 100.0),
        ("Million blocks replayed per second (measured)", "blocks_per_s", 1, 1e-6),
    ):
        cells = []
        for name in dict.fromkeys(row.policy for row in rows):
            values = [getattr(at.get((name, size)), field, None) for size in sizes]
            if any(value is not None for value in values):
                cells.append([name, *(_rounded(value, unit, digits) for value in values)])
        if cells:
            tables.append(Table(columns, cells, caption))
    return Section(f"{trace}, in figures", parts=tables, source="simulated")


def _rounded(value: float | None, unit: float, digits: int) -> str | None:
    return None if value is None else f"{unit * value:.{digits}f}".replace("-", "\N{MINUS SIGN}")
