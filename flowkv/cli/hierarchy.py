"""`flowkv sim hierarchy`: the memory-hierarchy experiment."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowkv.cli.arguments import AddVerb, names
from flowkv.core.errors import ConfigError
from flowkv.core.sizes import parse_size
from flowkv.demo.show import Screen

if TYPE_CHECKING:
    from flowkv.sim.hierarchy import Row

_RULES = {
    "published": "By the rules that were published",
    "strict": "By strict rules: every byte takes its turn on a shared channel",
    "pressure": "Strict, with an HBM too small for the context",
}


def add_verbs(verb: AddVerb) -> None:
    """Adds the verb."""
    added = verb(
        "hierarchy",
        _hierarchy,
        "decode over SRAM, HBM, CXL and DRAM: a published table, and better",
    )
    added.add_argument(
        "--policy",
        type=names,
        default=["lru", "auto"],
        metavar="A,B",
        help="what decides who leaves SRAM and HBM; default lru,auto",
    )
    added.add_argument(
        "--machine",
        default="kvflow",
        metavar="NAME",
        help="kvflow (as published, the default), h100, h200, b200 or mi300x",
    )
    added.add_argument(
        "--trace", type=Path, metavar="FILE", help="steps as JSON lines; default the published ones"
    )
    added.add_argument(
        "--sram", default="32MiB", metavar="SIZE", help="under strict rules; default %(default)s"
    )
    added.add_argument(
        "--hbm", default="2GiB", metavar="SIZE", help="of the last rows; default %(default)s"
    )


def _hierarchy(given: argparse.Namespace, screen: Screen) -> tuple[int, Any]:
    from flowkv.sim.hierarchy import MACHINES, read_workload, run_experiment

    if given.machine not in MACHINES:
        raise ConfigError(f"there is no machine {given.machine!r}", f"Use {', '.join(MACHINES)}")
    sizes = [parse_size(given.sram), parse_size(given.hbm)]
    if not all(sizes):
        raise ConfigError("a memory of 0 bytes holds nothing", "Give --sram and --hbm a size")
    workload = read_workload(given.trace) if given.trace else None
    with Screen(to_stderr=True).progress("simulating") as tell:
        rows = run_experiment(
            workload,
            MACHINES[given.machine],
            policies=given.policy,
            sram_bytes=sizes[0],
            pressure_bytes=sizes[1],
            tell=tell,
        )
    for rules, title in _RULES.items():
        shown = [row for row in rows if row.rules == rules]
        apart = any(row.exposed_decode_ns for row in shown)
        columns = ["", "HBM MB", "CXL MB", "exposed ms", *["decode ms"] * apart]
        columns += ["total ms", "SRAM", "$/Mtok"]
        screen.table(columns, [_cells(row, apart) for row in shown], title=title)
    screen.say(
        "Simulated. Exposed: compute waited for bytes; decode: for decoding, where that is counted"
        " apart. kvflow: rebuilt from its rules. No plan can undercut a floor."
    )
    return 0, rows


def _cells(row: Row, apart: bool) -> list[str]:
    """A line of the table; `apart` has a column for waiting for decoding."""
    price = row.usd_per_million_tokens
    return [
        row.plan if row.source == "flowkv" else f"{row.source}: {row.plan}",
        _mb(row.hbm_read_bytes),
        _mb(row.cxl_read_bytes),
        _ms(row.exposed_ns),
        *[_ms(row.exposed_decode_ns)] * apart,
        _ms(row.total_ns),
        "-" if row.sram_hit_rate is None else f"{row.sram_hit_rate:.1%}",
        "-" if price is None else f"{price:.5f}",
    ]


def _mb(n_bytes: int | None) -> str:
    return "-" if n_bytes is None else f"{n_bytes / 1e6:,.1f}"


def _ms(ns: float | None) -> str:
    return "-" if ns is None else f"{ns / 1e6:.4f}"
