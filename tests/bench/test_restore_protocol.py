"""`python -m bench restore`: its cells, its rows, and the command."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from bench.__main__ import main
from bench.restore import protocol
from bench.restore.baselines import RESTORE_POLICIES
from bench.restore.grid import GRID_MODELS
from bench.restore.modelled import costs_of, requests_of
from bench.restore.protocol import cells_of_parts, measure_restores, paper_cells
from bench.restore.row import OURS, Cell, Outcome, Row
from flowkv.policy.restore import Span
from tests.inside import ConfigError

# What the command's rows are promised to have, at least.
FIELDS = {
    *("model", "gpu", "tokens", "suffix", "gbps", "compute_share", "batch", "policy"),
    *("ttft_s", "bound_s", "bound_ratio", "link_bytes"),
}


def cell(**changed: object) -> Cell:
    """A cell of which only something matters."""
    given = {
        **{"part": "paper", "model": GRID_MODELS[0], "gpu": "H100"},
        **{"tokens": 6144, "suffix": 512, "gbps": 40.0},
    }
    return Cell(**{**given, **changed})


# ---- the cells


def test_the_paper_has_108_cells() -> None:
    cells = [c for c in paper_cells(False) if c.part == "paper"]
    assert len(cells) == len(set(cells)) == 108
    assert {c.gbps for c in cells} == {10.0, 40.0, 80.0} and {c.suffix for c in cells} == {512}
    assert {c.tokens for c in cells} == {6144, 16384, 30720, 98304}
    assert len({c.model for c in cells}) == len({c.gpu for c in cells}) == 3


def test_all_of_the_protocol_is_there() -> None:
    some, all_of_it = paper_cells(False), paper_cells(True)
    assert set(some) <= set(all_of_it) and len(set(all_of_it)) == len(all_of_it)
    for cells in (some, all_of_it):
        assert {c.part for c in cells} == set(protocol.PARTS)
        assert {c.suffix for c in cells} == {0, 64, 512, 2048}
        assert {c.compute_share for c in cells} == {0.125, 0.5, 1.0}
        assert {c.stages for c in cells} == {1, 2, 4}
        assert {7.0, 25.0, 32.0, 56.0, 100.0} <= {c.gbps for c in cells}
        assert {c.batch for c in cells} == {1, 8}
    counts = Counter(c.part for c in all_of_it)
    assert counts["links"] == 3 * 3 * 5 * 4 and counts["suffix"] == 3 * 3 * 3 * 4 * 2


def test_batches_differ_and_are_the_same_every_time() -> None:
    drawn = [c.lengths for c in paper_cells(True) if c.lengths]
    assert drawn == [c.lengths for c in paper_cells(True) if c.lengths]
    assert len(set(drawn)) == 5 and all(len(lengths) == 8 for lengths in drawn)
    assert all(length % 64 == 0 and length >= 512 for lengths in drawn for length in lengths)


def test_a_batch_is_asked_for_under_different_numbers() -> None:
    requests = requests_of(cell(lengths=(640, 1280, 640)))
    assert [request.number for request in requests] == [0, 1, 2]
    assert [request.tokens for request in requests] == [640, 1280, 640]


def test_parts_can_be_chosen() -> None:
    assert {c.part for c in cells_of_parts(["pcie"])} == {"pcie"}
    assert cells_of_parts(None) == paper_cells(False)
    with pytest.raises(ConfigError, match=r"no part 'disk'.*Use paper, suffix"):
        cells_of_parts(["pcie", "disk"])


# ---- rows


def test_a_batch_is_its_mean_beside_its_last(monkeypatch: pytest.MonkeyPatch) -> None:
    done = Outcome(
        ttft_s=(3.0, 6.0, 9.0),
        link_bytes=400.0,
        computed=0.25,
        compute_busy=0.5,
        link_busy=1.0,
        planner_s=0.09,
    )
    monkeypatch.setattr(protocol, "play", lambda cell, policy: done)
    (row,) = measure_restores([cell(lengths=(640, 640, 640))], chosen=["cake"])
    assert (row.batch, row.ttft_s, row.makespan_s) == (3, 6.0, 9.0)
    assert row.bound_ratio == 6.0 / row.bound_s and row.bound_s < row.makespan_bound_s
    assert (row.link_bytes, row.computed, row.planner_share) == (400.0, 0.25, 0.01)


def test_policies_can_be_chosen_and_unknown_ones_are_refused() -> None:
    told = []
    rows = measure_restores(
        [cell(), cell(gbps=10.0)], chosen=["load"], tell=lambda done, *rest: told.append(done)
    )
    assert [row.policy for row in rows] == ["load", "load"] and told == [0, 1]
    with pytest.raises(ConfigError, match=r"'nobody'.*Use recompute"):
        measure_restores([cell()], chosen=["load", "nobody"])


def test_every_policy_runs_in_virtual_cells_and_none_beats_the_bound() -> None:
    some = [
        *(cell(), cell(gbps=80.0, compute_share=0.125), cell(suffix=64)),
        *(cell(lengths=(4096, 640, 8192)), cell(codecs=("raw", "kv8"))),
    ]
    rows = measure_restores(some)
    assert len(rows) == len(some) * len(RESTORE_POLICIES)
    for row in rows:
        assert row.ttft_s >= 0.999 * row.bound_s > 0
        assert row.makespan_s >= 0.999 * row.makespan_bound_s > 0
        assert 0 <= row.computed <= 1 and 0 <= row.link_busy <= 1.001
    at = {row.policy: row for row in rows if row.cell() == rows[0].cell()}
    loaded = 6144 * 32 * 2 * 8 * 128 * 2
    assert at["load"].link_bytes == loaded and at["load"].computed == 0
    assert at["recompute"].link_bytes == 0 and at["recompute"].computed == 1
    costs, (request,) = costs_of(some[0]).ideal, requests_of(some[0])
    first = round(at["load"].bound_computed * 6144)  # both engines are done at once
    computed_s = costs.compute_s(request, 32, Span(0, first)) + costs.suffix_s(request)
    assert computed_s == pytest.approx(costs.load_s(request, 0, (6144 - first) * 32), rel=1e-3)
    share = 1 - at["cake"].computed
    assert at["cake"].link_bytes == pytest.approx(share * loaded)


def test_more_stages_are_faster_but_load_activations() -> None:
    some = [cell(part="stages", suffix=0, stages=stages) for stages in (1, 2, 4)]
    rows = measure_restores(some)
    assert [row.policy for row in rows] == [OURS] * 3
    one, two, four = rows
    assert one.boundary_bytes == 0 < two.boundary_bytes < four.boundary_bytes < four.link_bytes
    assert one.ttft_s > 1.6 * two.ttft_s > 1.6**2 * four.ttft_s
    assert all(row.ttft_s >= row.bound_s and 0 < row.link_busy <= 1 for row in rows)
    assert all(0 < row.computed < 1 and row.compute_busy is None for row in rows)


def test_less_computing_and_a_slower_link_take_longer() -> None:
    fast, slow, busy = (
        measure_restores([c], chosen=["cake"])[0]
        for c in (cell(), cell(gbps=10.0), cell(compute_share=0.125))
    )
    assert fast.ttft_s < min(slow.ttft_s, busy.ttft_s)
    assert fast.bound_s < min(slow.bound_s, busy.bound_s)


def test_runs_of_a_virtual_clock_are_equal() -> None:
    first, again = (measure_restores([cell()]) for _ in range(2))
    assert [row.ttft_s for row in first] == [row.ttft_s for row in again]


def test_unknown_models_are_refused() -> None:
    with pytest.raises(ConfigError, match="there is no HAL 9000 on H100"):
        measure_restores([cell(model="HAL 9000")])


# ---- the command


def test_the_command_prints_rows(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    status = main(["restore", "--part", "pcie", "--json", "--out", str(out)])
    printed = capsys.readouterr().out
    assert status in (0, 1) and printed.count("\n") == 1
    rows = json.loads(printed)
    assert len(rows) == 4 * len(RESTORE_POLICIES) and all(row.keys() >= FIELDS for row in rows)
    assert {row["policy"] for row in rows} == set(RESTORE_POLICIES)
    told = json.loads(out.read_text())
    assert not told["full"] and "cores" in told["machine"]
    for kept, row in zip(msgspec.convert(told["rows"], list[Row]), rows, strict=True):
        read = json.loads(msgspec.json.encode(kept))
        assert {k: v for k, v in read.items() if not isinstance(v, float)} == {
            k: v for k, v in row.items() if not isinstance(v, float)
        }
        floats = {k: v for k, v in row.items() if isinstance(v, float)}
        assert {k: read[k] for k in floats} == pytest.approx(floats, rel=1e-5)
    assert {f["group"] for f in told["findings"]} == {"virtual"}


def test_the_command_shows_tables(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["restore", "--part", "pcie", "--policy", "load,cake"]
    assert main(words) == 0, "what is not measured is not missed"
    printed = capsys.readouterr().out
    assert "4 cells, simulated" in printed and "On the virtual clock" in printed
    assert "1e9 bits per second" in " ".join(printed.split())


@pytest.mark.parametrize(
    "words", [["--policy", "nobody"], ["--part", "nothing"], ["--out", "/nowhere/at/all/r.json"]]
)
def test_the_command_refuses(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["restore", *words]) == 2
    assert "Traceback" not in capsys.readouterr().err
