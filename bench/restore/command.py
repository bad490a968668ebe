"""`python -m bench restore`: every restore policy in every cell of the protocol."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

import flowkv
from bench.promised import show_promises
from flowkv.cli.arguments import AddVerb, names
from flowkv.core.errors import ConfigError
from flowkv.report.screen import Screen

if TYPE_CHECKING:
    from bench.restore.row import Row


def add_verbs(verb: AddVerb) -> None:
    """Adds the verb."""
    added = verb("restore", _restore, "restore prefixes by every policy, beside the lower bound")
    added.add_argument("--policy", type=names, metavar="A,B", help="default: all of the catalogue")
    added.add_argument(
        "--part", type=names, metavar="A,B", help="of the protocol; default: all that there are"
    )
    added.add_argument("--full", action="store_true", help="every row of the protocol")
    added.add_argument(
        "--headline",
        action="store_true",
        help="search, on the virtual clock, where a staircase is 2.24 times as fast as the best"
        " policy before it; nothing else is run (minutes)",
    )
    added.add_argument("--out", type=Path, metavar="FILE", help="write all of it as JSON, too")


def _restore(given: argparse.Namespace, screen: Screen) -> tuple[int, Any]:
    if given.headline:
        from bench.restore.headline import show_headline

        return 0, show_headline(screen)
    from bench.restore.promise import promises
    from bench.restore.protocol import cells_of_parts, measure_restores

    if given.out is not None and not given.out.absolute().parent.is_dir():
        raise ConfigError(f"there is no directory for {given.out}", "Make it first")
    cells = cells_of_parts(given.part, full=given.full)
    with Screen(to_stderr=True).progress("restoring (simulated)") as tell:
        rows = measure_restores(cells, chosen=given.policy, tell=tell)
    found = [{**msgspec.structs.asdict(f), "met": f.met} for f in promises(rows)]
    _show(screen, rows, found)
    load = os.getloadavg()[0]  # other work makes the planner's times longer
    machine = (
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()},"
        f" FlowKV {flowkv.__version__}, load {load:.1f}"
    )
    if given.out is not None:
        kept = [row.kept() for row in rows]
        report = {"full": given.full, "machine": machine, "findings": found, "rows": kept}
        given.out.write_bytes(_lines(report))
    return int(any(f["met"] is False and f["source"] == "simulated" for f in found)), rows


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
    from bench.restore.table import SUMMARY, by_cell, summaries, summary_cells

    for part in dict.fromkeys(row.part for row in rows):
        own = [row for row in rows if row.part == part]
        title = f"{PARTS[part]}: {len(by_cell(own))} cells, simulated"
        screen.table(SUMMARY, [summary_cells(line) for line in summaries(own)], title=title)
    show_promises(screen, GROUPS, found, "on")
    screen.say(
        "x bound: time to the first token over the lower bound, suffix included. 1 Gbps is 1e9"
        " bits per second."
    )
