"""The table over rows of `python -m bench restore`, and the report that shows them."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from bench.policy.finding import Finding
from bench.restore.promise import V1, promises
from bench.restore.report import BOUND, colours, situation, write_restore_report
from bench.restore.row import OURS, Row
from bench.restore.table import by_cell, summaries
from tests.inside import ConfigError
from tests.report.drawn import curves


def row(policy: str, ttft_s: float = 2.0, **changed: object) -> Row:
    """A row whose bound is one second."""
    given = {
        **{"engine": "virtual", "model": "m", "gpu": "g", "tokens": 6144, "suffix": 512},
        **{"gbps": 40.0, "compute_share": 1.0, "batch": 1, "policy": policy, "ttft_s": ttft_s},
        **{"bound_s": 1.0, "bound_ratio": ttft_s, "link_bytes": 100.0, "label": "simulated"},
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
        *({"engine": "cpu"}, {"part": "busy"}, {"model": "n"}, {"gpu": "h"}, {"tokens": 1}),
        *({"suffix": 1}, {"gbps": 1.0}, {"compute_share": 0.5}, {"lengths": (1, 2)}),
        *({"stages": 2}, {"codec": "kv8"}, {"link": "disk"}),
    ],
    ids=str,
)
def test_what_differs_is_not_compared(change: dict[str, object]) -> None:
    assert len(by_cell([row("load"), row("cake", **change)])) == 2
    assert len(by_cell([row("load", **change), row("cake", **change)])) == 1
    assert situation(row("load")) or change


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
    rows = [
        row(OURS, 1.1, makespan_s=3.0, **batch),
        row(V1, 2.2, makespan_s=2.5, **batch),
    ]
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


def test_emulated_promises_are_medians() -> None:
    shapes = {"engine": "emulated", "label": "emulated"}
    rows = [row(OURS, t, tokens=n, **shapes) for n, t in enumerate((1.0, 1.1, 9.0))]
    (found,) = promises(rows)
    assert (found.measured, found.met, found.source) == (1.1, True, "emulated")


def test_real_restores_must_be_right_under_every_policy() -> None:
    real = {"engine": "cpu", "label": "measured", "part": "small"}
    rows = [
        row(OURS, 1.0, error=1e-6, same_token=True, **real),
        row("cake", 1.2, error=2e-3, same_token=True, **real),
        row("load", 1.3, error=0.0, same_token=False, **real),
        row("load", 1.3, error=0.5, same_token=False, **{**real, "codec": "kv8"}),
    ]
    found = promises(rows)
    assert figure(found, "over the fastest other").measured == pytest.approx(1 / 1.2)
    error, tokens = figure(found, "largest difference"), figure(found, "runs with another")
    assert error.measured == 2e-3 and error.met is False, "of exact pages only"
    assert tokens.measured == 1.0 and tokens.met is False
    assert {f.source for f in found} == {"measured"}


def test_engines_are_judged_apart() -> None:
    rows = [row(OURS, 1.0), row(OURS, 5.0, engine="emulated", label="emulated")]
    assert {f.group for f in promises(rows)} == {"virtual", "emulated"}
    assert figure(promises(rows)[:2], "x bound, median").measured == 1.0


# ---- the report


def report(tmp_path: Path, rows: list[Row]) -> str:
    return write_restore_report(tmp_path / "r.html", rows, footer="<machine>").read_text()


def lengths(policy: str, times: tuple[float, ...], **changed: object) -> list[Row]:
    return [
        row(policy, t, tokens=1024 << i, bound_s=0.5, bound_ratio=2 * t, **changed)
        for i, t in enumerate(times)
    ]


def test_curves_of_every_policy_and_the_bound(tmp_path: Path) -> None:
    page = report(tmp_path, [*lengths(OURS, (1.1, 2.0)), *lengths("load", (2.0, 4.0))])
    assert "Seconds to the first token, 40 Gbps, suffix of 512 tokens" in page
    ratio, time = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert curves(time) == 3 and time.count("stroke-dasharray") == 1
    assert f"{BOUND}, 1024: 0.5" in time and f"{OURS}, 2048: 2" in time
    assert f"{BOUND}, 1024: 1<" in ratio and f"{OURS}, 2048: 4<" in ratio
    assert '<span class="source simulated">simulated</span>' in page
    assert "&lt;machine&gt;" in page and "<script" not in page and "//" not in page


def test_one_length_is_shown_as_bars_beside_the_bound(tmp_path: Path) -> None:
    rows = [row(OURS, 1.1, repetitions=5, ttft_min_s=0.9, ttft_max_s=1.4), row("load", 2.0)]
    page = report(tmp_path, [msgspec.structs.replace(r, label="measured") for r in rows])
    assert "<svg" not in page and page.count('<div class="bar">') == 3
    assert ">1,100.0<" in page and ">900.0<" in page and ">1,400.0<" in page
    assert ">simulated<" not in page and ">measured<" in page


def test_a_policy_has_one_colour(tmp_path: Path) -> None:
    numbers = colours(["load", OURS, "cake"])
    assert len(set(numbers.values())) == 4 and numbers[OURS] == 0
    assert numbers == colours(["load", "cake", OURS]) | {}


def test_many_models_and_gpus_are_shown_on_one_gpu(tmp_path: Path) -> None:
    rows = [r for m in "ab" for g in "xyz" for r in lengths(OURS, (1.0, 2.0), model=m, gpu=g)]
    page = report(tmp_path, rows)
    assert "a on z" in page and "b on z" in page and "a on x" not in page


def test_what_cannot_be_shown_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no rows"):
        report(tmp_path, [])
    with pytest.raises(ConfigError, match="Choose some"):
        report(tmp_path, [row(f"p{i}") for i in range(12)])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, "40 Gbps, 6,144 + 512 tokens"),
        ({"gbps": 0.0, "link": "disk"}, "disk, 6,144 + 512 tokens"),
        ({"gbps": 440.0, "link": "pcie"}, "440 Gbps, pcie, 6,144 + 512 tokens"),
        ({"compute_share": 0.125}, "40 Gbps, 6,144 + 512 tokens, 0.125 of the computing"),
        ({"batch": 8, "stages": 2}, "40 Gbps, 6,144 + 512 tokens, batch of 8, 2 stages"),
        ({"codec": "raw/kv8"}, "40 Gbps, 6,144 + 512 tokens, raw/kv8"),
    ],
)
def test_a_situation_in_words(changed: dict[str, object], said: str) -> None:
    assert situation(row("load", **changed)) == said
