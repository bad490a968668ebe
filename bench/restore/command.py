"""`python -m bench restore`: every restore policy in every cell of the protocol."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

import flowkv
from bench.promised import show_promises
from flowkv.cli.arguments import AddVerb, count, names
from flowkv.core.errors import ConfigError
from flowkv.report.screen import Screen

if TYPE_CHECKING:
    from bench.restore.row import Row

_EXACT = 1e-3
"""Targets of real engines up to it are of what is restored; those above are of times."""

_WIDE = 6  # cells beside each other


def add_verbs(verb: AddVerb) -> None:
    """Adds the verb."""
    added = verb("restore", _restore, "restore prefixes by every policy, beside the lower bound")
    added.add_argument(
        "--engine",
        type=names,
        default=["virtual"],
        metavar="A,B",
        help="virtual (a clock that jumps, simulated; the default), emulated (devices that sleep),"
        " cpu (torch, measured)",
    )
    added.add_argument("--policy", type=names, metavar="A,B", help="default: all of the catalogue")
    added.add_argument(
        "--part", type=names, metavar="A,B", help="of the protocol; default: all that there are"
    )
    added.add_argument("--full", action="store_true", help="every row of the protocol")
    added.add_argument(
        "--repeats", type=count, metavar="N", help="of each row, where the time is real"
    )
    added.add_argument(
        "--headline",
        action="store_true",
        help="search, on the virtual clock, where a staircase is 2.24 times as fast as the best"
        " policy before it; nothing else is run (minutes)",
    )
    added.add_argument("--html", type=Path, metavar="FILE", help="write a report with curves")
    added.add_argument("--out", type=Path, metavar="FILE", help="write all of it as JSON, too")


def _restore(given: argparse.Namespace, screen: Screen) -> tuple[int, Any]:
    if given.headline:
        from bench.restore.headline import show_headline

        return 0, show_headline(screen)
    from bench.restore.engines import make_engine
    from bench.restore.promise import promises
    from bench.restore.protocol import cells_of_parts, measure_restores

    for path in filter(None, (given.html, given.out)):
        if not path.absolute().parent.is_dir():
            raise ConfigError(f"there is no directory for {path}", "Make it first")
    rows: list[Row] = []
    with ExitStack() as stack:
        names = dict.fromkeys(given.engine)
        engines = [
            stack.enter_context(closing(make_engine(name, full=given.full))) for name in names
        ]
        for engine in engines:
            if given.repeats and engine.repetitions > 1:
                engine.repetitions = given.repeats
            with Screen(to_stderr=True).progress(f"restoring ({engine.label})") as tell:
                cells = cells_of_parts(engine, given.part)
                rows += measure_restores(engine, policies=given.policy, cells=cells, tell=tell)
    found = [{**msgspec.structs.asdict(f), "met": f.met} for f in promises(rows)]
    _show(screen, rows, found)
    load = os.getloadavg()[0]  # others' work makes real times longer
    machine = (
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()},"
        f" FlowKV {flowkv.__version__}, load {load:.1f}"
    )
    if given.out is not None:
        kept = [row.kept() for row in rows]
        report = {"full": given.full, "machine": machine, "findings": found, "rows": kept}
        given.out.write_bytes(_lines(report))
    if given.html is not None:
        from bench.restore.report import write_restore_report

        path = write_restore_report(given.html.absolute(), rows, footer=f"{machine}.")
        screen.say(f"Report: {path}")
    return int(any(f["met"] is False and _judged(f) for f in found)), rows


def _judged(finding: dict[str, Any]) -> bool:
    """Times of a shared machine are reported only; what is simulated or wrong is a failure."""
    simulated, exact = finding["source"] == "simulated", finding["target"] <= _EXACT
    return simulated or bool(exact and finding["group"] == "cpu")


def _lines(report: dict[str, Any]) -> bytes:
    """As JSON: a line for each finding and row, so that differences can be read."""
    parts = []
    for name, value in report.items():
        found = value if isinstance(value, list) else [value]
        text = b",\n  ".join(map(msgspec.json.encode, found))
        if isinstance(value, list):
            text = b"[\n  " + text + b"\n ]"
        parts.append(msgspec.json.encode(name) + b": " + text)
    return b"{\n " + b",\n ".join(parts) + b"\n}\n"


def _show(screen: Screen, rows: Sequence[Row], found: Sequence[dict[str, Any]]) -> None:
    from bench.restore.promise import GROUPS
    from bench.restore.protocol import PARTS
    from bench.restore.report import SUMMARY, summary_cells
    from bench.restore.table import by_cell, summaries

    parts: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        parts.setdefault((row.engine, row.part), []).append(row)
    for (_, part), own in parts.items():
        title = f"{PARTS[part]}: {len(by_cell(own))} cells, {own[0].label}"
        screen.table(SUMMARY, [summary_cells(line) for line in summaries(own)], title=title)
        if own[0].label != "simulated":
            cells = by_cell(own)
            for first in range(0, len(cells), _WIDE):
                _show_cells(screen, cells[first : first + _WIDE])
    show_promises(screen, GROUPS, found, "on")
    screen.say(
        "x bound: time to the first token over the lower bound, suffix included. 1 Gbps is 1e9"
        " bits per second."
    )


def _show_cells(screen: Screen, cells: Sequence[dict[str, Row]]) -> None:
    """A column for each of a few cells."""
    from bench.restore.report import situation

    columns = ["ms (x bound)"]
    lines: dict[str, list[str]] = {}
    for number, cell in enumerate(cells, 1):
        row = next(iter(cell.values()))
        bound = f"{1e3 * row.bound_s:,.0f} ms at best"
        screen.say(f"{number}: {row.model} on {row.gpu}, {situation(row)}; {bound}")
        columns.append(str(number))
        for name in cell:
            lines.setdefault(name, [name, *["-"] * len(cells)])
        for name, row in cell.items():
            lines[name][number] = f"{1e3 * row.ttft_s:,.0f} ({row.bound_ratio:.2f})"
    screen.table(columns, list(lines.values()))
