"""The HTML report of replays: what it shows, and that it loads nothing."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from flowkv.sim import Result
from tests.inside import write_replay_report
from tests.report.drawn import curves

NOTHING = np.zeros(0, np.int64)


def row(
    trace: str,
    policy: str,
    size: float,
    hits: float,
    closure: float | None = None,
    traffic: float | None = None,
) -> Result:
    """A result of which only a few figures matter."""
    return Result(
        trace=trace,
        policy=policy,
        size=size,
        pages=int(1e5 * size),
        requests=1,
        blocks=1,
        prefix_hit_ratio=hits,
        block_hit_ratio=hits,
        closure=closure,
        first_hit_ratio=hits,
        first_closure=closure,
        saved_bytes_ratio=hits,
        saved_cost_ratio=hits,
        load_traffic=0,
        load_traffic_vs_lru=traffic,
        prefetched=0,
        prefetch_precision=None,
        missed_p50=0.0,
        missed_p95=0.0,
        missed_p99=0.0,
        blocks_per_s=2e7,
        requests_per_s=1.0,
        policy_us_p50=None,
        policy_us_p99=None,
        digest="",
        hits=NOTHING,
        missed=NOTHING,
        tenants=[],
    )


def rows(trace: str) -> list[Result]:
    """Two sizes, three policies; `new` closes half of the gap."""
    found = []
    for size, low in ((0.01, 0.2), (0.05, 0.6)):
        for name, closure in (("lru", 0.0), ("new", 0.5), ("opt", 1.0)):
            hits = low + 0.2 * closure
            found.append(row(trace, name, size, hits, closure, 1.0 - closure))
    return found


def test_a_report_shows_curves_closures_and_the_table(tmp_path: Path) -> None:
    page = write_replay_report(tmp_path / "r.html", rows("chat"), footer="made now").read_text()
    assert curves(page) == 4, "three curves of hits, one of closures"
    assert page.count("stroke-dasharray") == 1, "the bound"
    assert "mean closure of 2 sizes" in page and ">0.50<" in page
    assert ">30.00<" in page and ">0.500<" in page and "made now" in page
    assert "simulated" in page
    assert not re.search(r"https?://|<script|<img|<link|@import|url\(", page)


def test_each_trace_has_its_own_card(tmp_path: Path) -> None:
    page = write_replay_report(tmp_path / "r.html", rows("a") + rows("b")).read_text()
    assert "Replays of policies</title>" in page
    assert [title for title in ("a", "b") if f"<h2>{title}</h2>" in page] == ["a", "b"]


def test_without_a_bound_there_is_no_closure(tmp_path: Path) -> None:
    one = [row("t", "lru", 0.1, 0.5)]
    page = write_replay_report(tmp_path / "r.html", one).read_text()
    assert page.count("<figure>") == page.count("<title>lru, ") == 1 and "Closure" not in page


def test_sizes_that_a_policy_lacks_are_left_out(tmp_path: Path) -> None:
    some = [r for r in rows("t") if r.policy != "new" or r.size == 0.01]
    page = write_replay_report(tmp_path / "r.html", some).read_text()
    assert curves(page) == 2, "a point is no line"
    assert page.count("<title>new, ") == 2 and "mean closure of one size" in page
