"""Serving as one HTML file: promises, throughput and latencies against clients, long answers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.policy.finding import Finding
from bench.serve.promise import GROUPS
from bench.serve.protocol import PARTS
from bench.serve.row import Row
from bench.serve.run import Report
from bench.serve.soak import Soak
from flowkv.report.charts import Curves
from flowkv.report.page import Bars, Figures, Section, Table, Text, write_report

COLUMNS = ["", "clients", "tokens/s", "TTFT ms p50 / 95 / 99", "TPOT ms p50 / 99", "KV"]
"""Of the table of a part; the last is the share of pages that anybody holds."""

_PROMISES = ["", "on", "target", "figure", "", "note"]
_WORDS = {True: "met", False: "missed", None: None}


def write_serving_report(path: Path, report: Report) -> Path:
    """Writes the report and returns its path.

    Args:
        path: The HTML file.
        report: What was measured.

    Raises:
        OSError: The file cannot be written.
    """
    sections = []
    if report.findings:
        lines = list(map(_promise, report.findings))
        parts: list[Figures | Table] = [Table(_PROMISES, lines)]
        if figures := list(_figures(report.findings)):
            parts.insert(0, Figures(figures))
        sections.append(Section("Promises", parts=parts, source="measured"))
    if report.advice.reasons:
        said = [Text(f"{reason}.") for reason in report.advice.reasons]
        sections.append(Section("Recommended for this load", parts=said, source="measured"))
    for part in dict.fromkeys(row.part for row in report.rows):
        own = [row for row in report.rows if row.part == part]
        table = Table(COLUMNS, [cells(row) for row in own])
        sections.append(Section(PARTS[part], parts=[*_charts(part, own), table], source="measured"))
    if report.soak is not None:
        sections.append(_soak(report.soak))
    lead = (
        f"{report.model} under loads of many requests: the engine, and the same model served by"
        " transformers alone, in turns."
    )
    footer = f"{report.machine}."
    return write_report(path, "Serving many requests", sections, lead=lead, footer=footer)


def cells(row: Row) -> list[str]:
    """A line under `COLUMNS`."""
    used = "-" if row.kv_utilisation is None else f"{row.kv_utilisation:.0%}"
    ttft = " / ".join(map(_ms, (row.ttft_p50_s, row.ttft_p95_s, row.ttft_p99_s)))
    tpot = " / ".join(map(_ms, (row.tpot_p50_s, row.tpot_p99_s)))
    return [situation(row), f"{row.concurrency}", f"{row.tokens_per_s:,.0f}", ttft, tpot, used]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}" if seconds < 0.1 else f"{1e3 * seconds:,.0f}"


def situation(row: Row) -> str:
    """What tells a row from others of its part."""
    if row.part in ("concurrency", "prefix"):
        words = [row.baseline or "engine"]
    else:
        words = [row.baseline or f"engine, {row.scheduler}"]
    if row.arrivals != "closed":
        words.append(f"{row.arrivals}, {row.rate:.2g}/s")
    if row.part == "prefix":
        shared = f"{row.prefix_tokens:,} tokens" if row.prefix_tokens else f"{row.prefix_share:.0%}"
        words.append(f"{shared} shared")
    if row.part == "pages":
        words.append(f"pages of {row.page_size}")
    if row.part == "budget":
        words.append(f"steps of {row.token_budget}")
    return ", ".join(words)


def _figures(findings: Sequence[Finding]) -> Iterable[tuple[str, object, str]]:
    """The three that say most."""
    for group, label in (("throughput", "Throughput"), ("prefix", "First tokens")):
        own = [f for f in findings if f.group == group and f.measured is not None]
        for finding in own[-2:]:
            yield label, f"{finding.measured:.2f}x", f"{finding.what}, {finding.trace}"


def _promise(finding: Finding) -> list[object]:
    return [
        f"{GROUPS[finding.group]}: {finding.what}",
        finding.trace,
        f"{finding.sense} {finding.target:.4g}",
        None if finding.measured is None else f"{finding.measured:.4g}",
        _WORDS[finding.met],
        finding.note,
    ]


def _charts(part: str, rows: Sequence[Row]) -> list[Curves | Bars]:
    if part == "concurrency" and len({row.concurrency for row in rows}) > 1:
        clients = sorted({row.concurrency for row in rows})
        return [
            _curve("New tokens a second", rows, clients, "tokens_per_s"),
            _curve("Seconds to the first token, 95th percentile", rows, clients, "ttft_p95_s"),
        ]
    labels = [situation(row) for row in rows]
    return [
        Bars("New tokens a second", labels, {"": [row.tokens_per_s for row in rows]}),
        Bars(
            "To the first token, 95th percentile",
            labels,
            {"": [1e3 * row.ttft_p95_s for row in rows]},
            "ms",
        ),
    ]


def _curve(caption: str, rows: Sequence[Row], clients: Sequence[int], what: str) -> Curves:
    names = list(dict.fromkeys(situation(row) for row in rows))
    at = {(situation(row), row.concurrency): float(getattr(row, what)) for row in rows}
    series = {name: [at.get((name, count), math.nan) for count in clients] for name in names}
    return Curves(caption, clients, series, "clients", percent=False, log_y=True)


def _soak(soak: Soak) -> Section:
    series = {name: [1e3 * value for value in values] for name, values in soak.curves.items()}
    chart = Curves(
        "Milliseconds between two tokens, medians",
        soak.at,
        series,
        "tokens of a row",
        percent=False,
        log_x=False,
    )
    return Section(PARTS["soak"], parts=[chart], source="measured")
