"""Promises of many requests at once, beside what rows say."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Literal

import msgspec

from bench.policy.finding import Finding
from bench.serve.baselines import BATCHED, SEQUENTIAL
from bench.serve.row import UNCACHED, Row
from bench.serve.served import Spread
from flowkv.policy.scheduling import Shortest

GROUPS = {
    "throughput": "Throughput of the engine, new tokens a second",
    "prefix": "Prompts with a long beginning in common",
    "scheduler": "Short and long answers mixed",
    "soak": "Long answers",
    "steps": "What a step takes beside the model",
    "beside": "Decodes beside restores",
    "swap": "Preempted and resumed",
    "tokens": "Tokens",
}
"""What the groups of findings are about."""

PARTS_OF = MappingProxyType(
    {
        "throughput": "concurrency",
        "prefix": "prefix",
        "scheduler": "scheduler",
        "tokens": "concurrency",
    }
)
"""Which part of the protocol rows of a group come from."""

_THROUGHPUT = ((4, SEQUENTIAL, 1.8), (16, SEQUENTIAL, 3.0), (16, BATCHED, 1.2))
_TTFT, _COMPLETION = 0.62, 0.8
SHORTEST, FIRST_COME = "shortest", "fcfs"


def promises(rows: Sequence[Row]) -> list[Finding]:
    """Targets beside figures; one that rows do not tell has no figure."""
    own = [row for row in rows if row.baseline == ""]
    found = [_throughput(own, *promised) for promised in _THROUGHPUT]
    many = [row for row in own if row.part == "prefix" and row.prefix_tokens]
    short = [row for row in own if row.part == "scheduler" and row.scheduler == SHORTEST]
    ttft = _ratio(many, "ttft_over", UNCACHED)
    what = "95th percentile of the time to the first token, of that without caching"
    found.append(_finding("prefix", what, _shared(many), _TTFT, "at most", ttft))
    end = _ratio(short, "completion_over", FIRST_COME)
    what = "mean time to the end of shortest, of that of fcfs"
    found.append(_finding("scheduler", what, _mixed(short), _COMPLETION, "at most", end))
    what = "s by which a later request was let in before an earlier one, at most"
    late = max((row.overtaken_s for row in short), default=None)
    bound_s = Shortest().aging_s
    on = _mixed(short)
    found.append(Finding("scheduler", what, on, bound_s, "at most", late, "measured"))
    return [*found, _tokens(rows)]


def _throughput(rows: Sequence[Row], clients: int, rival: str, target: float) -> Finding:
    cell = [row for row in rows if row.part == "concurrency" and row.concurrency == clients]
    spread = _ratio(cell, "throughput_over", rival)
    on = f"{clients} clients"
    finding = _finding("throughput", f"of {rival}", on, target, "at least", spread)
    cpu = _ratio(cell, "cpu_over", rival)
    if cpu is None:
        return finding
    note = f"{finding.note}; {cpu} for the same processor time"
    return msgspec.structs.replace(finding, note=note)


def _tokens(rows: Sequence[Row]) -> Finding:
    """Of the engine alone, and where rounding leaves no near ties to fall either way."""
    exact = [row for row in rows if row.scheduler and row.dtype == "float32"]
    same = [row.same_tokens for row in exact if row.same_tokens is not None]
    on = f"{len(same)} rows in float32"
    worst = min(same, default=None)
    what = "requests with the tokens of generate, least"
    return Finding("tokens", what, on, 1.0, "at least", worst, "measured")


def _finding(
    group: str,
    what: str,
    on: str,
    target: float,
    sense: Literal["at least", "at most"],
    spread: Spread | None,
) -> Finding:
    note = "" if spread is None else f"{spread.least:.3g} to {spread.most:.3g}"
    figure = None if spread is None else spread.median
    return Finding(group, what, on, target, sense, figure, "measured", note)


def _ratio(rows: Sequence[Row], what: str, rival: str) -> Spread | None:
    found: list[Spread] = [getattr(row, what)[rival] for row in rows if rival in getattr(row, what)]
    return found[0] if found else None


def _shared(rows: Sequence[Row]) -> str:
    return f"{rows[0].concurrency} clients, {rows[0].prefix_tokens:,} tokens" if rows else ""


def _mixed(rows: Sequence[Row]) -> str:
    return f"{rows[0].requests} requests, {rows[0].max_rows} rows" if rows else ""
