"""Promises of restores, beside what was measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from bench.policy.finding import Finding
from bench.restore.row import OURS, Row
from bench.restore.table import Cells, by_cell, known_median

LOADS = ("load", "load-layers")
COMPUTES = "recompute"
V1 = "two-pointer-v1"
GROUPS = {"virtual": "On the virtual clock"}
"""Titles of the groups of findings."""

_STAGED = 0.9
_HELPS = 0.25  # of the prefix is computed where the bound is reached: there computing helps


def promises(rows: Sequence[Row]) -> list[Finding]:
    """Return the targets beside their figures."""
    paper = _part(rows, "paper")
    single = [row for row in rows if row.batch == 1 and row.stages == 1 and row.part != "stages"]
    batch = _part(rows, "batch")
    ratios, one = [row.bound_ratio for row in paper if row.policy == OURS], "single request"
    on = f"{len(ratios)} cells"
    helped = [c for c in _with(paper, OURS) if c[OURS].bound_computed >= _HELPS]
    timed = "measured, over simulated times"
    planner = _finding("planner, share of the time, median", on, 1e-3, _planner(paper), timed)
    note = f"in the {len(helped)} cells where the bound computes a quarter or more"
    return [
        _finding("x bound, median", on, 1.02, known_median(ratios)),
        _finding("x bound, at worst", on, 1.10, max(ratios, default=None)),
        _finding("over the fastest other, at worst", on, 1.0, _worst(paper, _others)),
        _finding(
            "over the better of load and recompute, at worst", one, 1.02, _worst(single, _ends)
        ),
        _finding("link bytes, of loading everything", on, 0.8, _links(helped), note),
        msgspec.structs.replace(planner, source="measured"),  # of this machine's processor
        *_batches(batch),
        *_stages(_part(rows, "stages")),
    ]


def _batches(rows: Sequence[Row]) -> list[Finding]:
    means = [_of(cell, OURS, V1, _ttft) for cell in _with(rows, OURS, V1)]
    spans = [_of(cell, OURS, V1, _makespan) for cell in _with(rows, OURS, V1)]
    bounds = [row.bound_ratio for row in rows if row.policy == OURS]
    on = "batch of 8"
    return [
        _finding("mean, of v1's, median", on, 0.60, known_median(means), _range(means)),
        _finding("last, of v1's, median", on, 1.08, known_median(spans), _range(spans)),
        _finding("x mean bound, median", on, 1.15, known_median(bounds), _range(bounds)),
    ]


def _stages(rows: Sequence[Row]) -> list[Finding]:
    """How much of k times as fast k stages are, beside what activations between them cost.

    Their bound counts these, that of one stage has none: so the two ratios to the bounds say what
    is lost besides.
    """
    own = {row.cell(): row for row in rows if row.policy == OURS}
    alone = {_unstaged(row): row for row in own.values() if row.stages == 1}
    found = []
    for stages in sorted({row.stages for row in own.values()} - {1}):
        staged = [r for r in own.values() if r.stages == stages and _unstaged(r) in alone]
        shares = [alone[_unstaged(row)].bound_ratio / row.bound_ratio for row in staged]
        times = [alone[_unstaged(row)].ttft_s / row.ttft_s for row in staged]
        sent = known_median([row.boundary_bytes / row.link_bytes for row in staged]) or 0.0
        what = "speed-up, of linear beside activations, least"
        least, short = min(shares, default=None), sum(share < _STAGED for share in shares)
        note = (
            f"median {known_median(shares) or 0.0:.3f}, {short} of {len(shares)} cells below; "
            f"{_range(times)} times; {sent:.1%} of the bytes are activations"
        )
        found.append(_finding(what, f"{stages} stages", _STAGED, least, note, "at least"))
    return found


def _unstaged(row: Row) -> tuple[object, ...]:
    return (row.model, row.gpu, row.tokens, row.suffix, row.gbps)


# ---- parts of these


def _part(rows: Sequence[Row], part: str) -> list[Row]:
    return [row for row in rows if row.part == part]


def _with(rows: Sequence[Row], *names: str) -> Cells:
    return [cell for cell in by_cell(rows) if all(name in cell for name in names)]


def _others(cell: dict[str, Row]) -> list[float]:
    return [row.ttft_s for name, row in cell.items() if name != OURS]


def _ends(cell: dict[str, Row]) -> list[float]:
    """What does without two pointers."""
    return [cell[name].ttft_s for name in (*LOADS, COMPUTES) if name in cell]


def _ratios(
    rows: Sequence[Row], others: Callable[[dict[str, Row]], Sequence[float]]
) -> list[float]:
    found = ((cell[OURS].ttft_s, others(cell)) for cell in _with(rows, OURS))
    return [own / min(rest) for own, rest in found if rest]


def _worst(
    rows: Sequence[Row], others: Callable[[dict[str, Row]], Sequence[float]]
) -> float | None:
    return max(_ratios(rows, others), default=None)


def _links(cells: Cells) -> float | None:
    return max((_of(cell, OURS, "load", _link) for cell in cells if "load" in cell), default=None)


def _planner(rows: Sequence[Row]) -> float | None:
    return known_median([row.planner_share for row in rows if row.policy == OURS])


def _of(cell: dict[str, Row], name: str, other: str, what: Callable[[Row], float]) -> float:
    return what(cell[name]) / what(cell[other])


def _link(row: Row) -> float:
    return row.link_bytes


def _ttft(row: Row) -> float:
    return row.ttft_s


def _makespan(row: Row) -> float:
    return row.makespan_s


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.3g} to {max(values):.3g}" if values else ""


def _finding(
    what: str,
    on: str,
    target: float,
    measured: float | None,
    note: str = "",
    sense: Literal["at least", "at most"] = "at most",
) -> Finding:
    return Finding("virtual", what, on, target, sense, measured, "simulated", note)
