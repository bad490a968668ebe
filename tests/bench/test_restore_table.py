"""The table over rows of `python -m bench restore`, and its promises."""

from __future__ import annotations

import pytest

from bench.policy.finding import Finding
from bench.restore.promise import V1, promises
from bench.restore.row import OURS, Row
from bench.restore.table import by_cell, summaries


def row(policy: str, ttft_s: float = 2.0, **changed: object) -> Row:
    """A row whose bound is one second."""
    given = {
        **{"model": "m", "gpu": "g", "tokens": 6144, "suffix": 512},
        **{"gbps": 40.0, "compute_share": 1.0, "batch": 1, "policy": policy, "ttft_s": ttft_s},
        **{"bound_s": 1.0, "bound_ratio": ttft_s, "link_bytes": 100.0},
        **{"part": "paper", "makespan_s": ttft_s, "makespan_bound_s": 1.0},
    }
    return Row(**{**given, **changed})


PLANNER = "planner, share of the time, median"


def figure(found: list[Finding], what: str, on: str = "") -> Finding:
    (one,) = [f for f in found if f.what.startswith(what) and on in f.trace]
    return one


# ---- lines


def test_a_line_per_policy() -> None:
    rows = [
        *(row("load", 4.0, tokens=n, link_bytes=200.0) for n in (1, 2, 3)),
        *(row("cake", t, tokens=n, computed=0.5) for n, t in ((1, 2.0), (2, 5.0), (3, 4.0))),
    ]
    load, cake = summaries(rows)
    assert (load.policy, load.cells, load.median, load.largest) == ("load", 3, 4.0, 4.0)
    assert (cake.median, cake.largest, cake.p90) == (4.0, 5.0, pytest.approx(4.8))
    assert (load.best, cake.best) == (2, 2), "a tie is both's"
    assert (load.link, cake.link, cake.computed) == (1.0, 0.5, 0.5)


def test_nothing_to_compare_bytes_with() -> None:
    (line,) = summaries([row("cake")])
    assert line.link is None and line.best == 1


@pytest.mark.parametrize(
    "change",
    [
        *({"part": "busy"}, {"model": "n"}, {"gpu": "h"}, {"tokens": 1}),
        *({"suffix": 1}, {"gbps": 1.0}, {"compute_share": 0.5}, {"lengths": (1, 2)}),
        *({"stages": 2}, {"codec": "kv8"}),
    ],
    ids=str,
)
def test_what_differs_is_not_compared(change: dict[str, object]) -> None:
    assert len(by_cell([row("load"), row("cake", **change)])) == 2
    assert len(by_cell([row("load", **change), row("cake", **change)])) == 1


# ---- promises


def test_simulated_promises_over_the_paper_only() -> None:
    rows = [
        *(row(OURS, 1.01), row("load", 1.5), row("recompute", 1.6)),
        *(row(OURS, 1.03, tokens=2), row("load", 1.02, tokens=2)),
        *(row(OURS, 9.0, part="busy"), row("load", 8.0, part="busy")),
    ]
    found = promises(rows)
    assert {f.group for f in found} == {"virtual"}
    assert [f.what for f in found if f.source != "simulated"] == [PLANNER]
    assert figure(found, "x bound, median").measured == pytest.approx(1.02)
    assert figure(found, "x bound, median").met
    assert figure(found, "x bound, at worst").measured == pytest.approx(1.03)
    other = figure(found, "over the fastest other")
    assert other.measured == pytest.approx(1.03 / 1.02) and other.met is False
    ends = figure(found, "over the better of")  # of all single requests, busy ones too
    assert ends.measured == pytest.approx(9 / 8) and ends.met is False
    assert figure(found, "mean, of v1's").met is None


def test_less_is_moved_only_where_computing_helps() -> None:
    rows = [
        *(row(OURS, link_bytes=70.0, bound_computed=0.25), row("load")),
        *(row(OURS, link_bytes=99.0, bound_computed=0.24, tokens=2), row("load", tokens=2)),
    ]
    found = figure(promises(rows), "link bytes")
    assert found.measured == 0.7 and "1 cells" in found.note


def test_promises_of_batches() -> None:
    batch = {"part": "batch", "lengths": (1, 2), "batch": 2}
    rows = [row(OURS, 1.1, makespan_s=3.0, **batch), row(V1, 2.2, makespan_s=2.5, **batch)]
    found = promises(rows)
    assert figure(found, "mean, of v1's").measured == pytest.approx(0.5)
    assert figure(found, "last, of v1's").measured == pytest.approx(1.2)
    assert figure(found, "last, of v1's").met is False
    assert figure(found, "x mean bound").measured == pytest.approx(1.1)
    assert figure(found, "over the better of").measured is None, "that is of single requests"


def test_promises_of_stages_are_against_one_stage() -> None:
    rows = [
        row(OURS, t, part="stages", stages=k, tokens=n, boundary_bytes=5.0 * (k > 1), bound_ratio=x)
        for n in (1, 2)
        for k, t, x in ((1, 4.0 * n, 1.0), (2, 2.1 * n, 1.0 + n / 20), (4, 1.5 * n, 1.2))
    ]
    found = promises(rows)
    two, four = figure(found, "speed-up", "2"), figure(found, "speed-up", "4")
    assert two.measured == pytest.approx(1 / 1.1) and two.met, "at worst"
    assert two.note == (
        "median 0.931, 0 of 2 cells below; 1.9 to 1.9 times; 5.0% of the bytes are activations"
    )
    assert four.measured == pytest.approx(1 / 1.2) and four.met is False
    assert "2 of 2 cells below" in four.note
