"""`flowkv sim characterise`: what a trace is like, before any policy."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from flowkv.cli.arguments import AddVerb
from flowkv.cli.replays import TRACE, load_trace
from flowkv.demo.show import Screen

if TYPE_CHECKING:
    from flowkv.sim.character import Character, Spread


def add_verbs(verb: AddVerb) -> None:
    """Adds the verb."""
    added = verb("characterise", _characterise, "show what a trace is like, before any policy")
    added.add_argument("trace", metavar="TRACE", help=TRACE)


def _characterise(given: argparse.Namespace, screen: Screen) -> tuple[int, Any]:
    from flowkv.sim.character import characterise

    with Screen(to_stderr=True).progress("looking"):
        found = characterise(load_trace(given.trace))
    screen.table(["", ""], _facts(found), title=f"Trace {found.trace}")
    spreads = {
        "blocks per request": found.blocks_per_request,
        "to the next turn, s": found.gap_s,
        "to a block's next use, s": found.reuse_s,
        "... in requests": found.reuse_requests,
        "... in blocks of an LRU stack": found.stack_distance,
    }
    rows = [[name, *_percentiles(spread)] for name, spread in spreads.items()]
    screen.table(["", "p10", "p50", "p90", "p99"], rows, title="Spread")
    columns = [f"{100 * size:.4g}%" for size in found.lru]
    ratios = [f"{100 * ratio:.1f}%" for ratio in found.lru.values()]
    screen.table(["size", *columns], [["lru", *ratios]], title="Hit ratio of leaf-first LRU")
    columns = [f"{window:g} s" for window in found.working_set]
    blocks = [f"{count:,.0f}" for count in found.working_set.values()]
    screen.table(["window", *columns], [["blocks", *blocks]], title="Working set, mean")
    columns = [f"turn {turn}" for turn in found.returns]
    shares = [f"{share:.0%}" for share in found.returns.values()]
    screen.table(["", *columns], [["goes on", *shares]], title="Conversations that go on")
    return 0, found


def _facts(found: Character) -> list[list[str]]:
    return [
        ["requests", f"{found.requests:,}"],
        ["known sessions, tenants", f"{found.sessions:,}, {found.tenants:,}"],
        ["from the first to the last", f"{found.span_s:,.0f} s"],
        [
            "between requests, mean and variation",
            f"{found.arrival_s:.3g} s, {found.arrival_cv:.2f}",
        ],
        ["blocks asked for, different ones", f"{found.blocks:,}, {found.unique:,}"],
        ["tokens of a block", f"{found.block_tokens:,}"],
        ["hit ratio with room for everything", f"{found.infinite_hit_ratio:.1%}"],
        ["different blocks used only once", f"{found.used_once:.1%}"],
        ["uses that fall on the top 1% of them", f"{found.top_share:.1%}"],
        ["requests that continue an earlier one", f"{found.extending:.1%}"],
    ]


def _percentiles(spread: Spread) -> list[str]:
    return [f"{value:,.4g}" for value in (spread.p10, spread.p50, spread.p90, spread.p99)]
