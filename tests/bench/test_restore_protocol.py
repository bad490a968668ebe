"""`python -m bench restore`: which cells there are, their order, what is said of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from bench.__main__ import main
from bench.restore import protocol
from bench.restore.baselines import RESTORE_POLICIES
from bench.restore.engines import ENGINES, make_engine
from bench.restore.modelled import Emulated, Virtual, costs_of, requests_of
from bench.restore.protocol import (
    cells_of_parts,
    emulated_cells,
    measure_restores,
    paper_cells,
)
from bench.restore.real import Processor
from bench.restore.row import OURS, Bounds, Cell, Label, Outcome, Row
from flowkv.policy.restore import RestoreRequest, Source, Span
from flowkv.sim.restore import GPUS, SHAPES, Modelled
from tests.inside import ConfigError

# What the command's rows are promised to have, at least.
FIELDS = {
    *("engine", "model", "gpu", "tokens", "suffix", "gbps", "compute_share", "batch", "policy"),
    *("ttft_s", "bound_s", "bound_ratio", "link_bytes", "label"),
}


def cell(**changed: object) -> Cell:
    """A cell of which only something matters."""
    given = {
        **{"part": "paper", "model": protocol.DENSE, "gpu": "H100"},
        **{"tokens": 6144, "suffix": 512, "gbps": 40.0},
    }
    return Cell(**{**given, **changed})


class Played:
    """An engine whose times are told."""

    name = "virtual"
    label: Label = "simulated"

    def __init__(self, times: dict[str, list[float]], batch: int = 1) -> None:
        self.times, self.batch = times, batch
        self.repetitions = len(next(iter(times.values())))
        self.ran: list[str] = []

    def cells(self) -> Sequence[Cell]:
        return [cell(), cell(part="pcie", gbps=440.0)]

    def policies(self, cell: Cell) -> Sequence[str]:
        return list(self.times)

    def bounds(self, cell: Cell) -> Bounds:
        return Bounds(mean_s=2.0, makespan_s=4.0)

    def close(self) -> None:
        pass

    def run(self, cell: Cell, policy: str) -> Outcome:
        ttft = self.times[policy][self.ran.count(policy) % self.repetitions]
        self.ran.append(policy)
        return Outcome(
            ttft_s=tuple(ttft * (i + 1) for i in range(self.batch)),
            link_bytes=100.0 * ttft,
            computed=0.25,
            compute_busy=0.5,
            link_busy=1.0,
            planner_s=0.01 * ttft,
        )


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
        assert {c.part for c in cells} == set(protocol.PARTS) - {"disk", "small"}
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


def test_five_shapes_are_played_in_real_time() -> None:
    assert len(set(emulated_cells())) == 5
    assert Emulated(full=True).repetitions == 5


def test_parts_can_be_chosen() -> None:
    engine = Played({"load": [1.0]})
    assert [c.part for c in cells_of_parts(engine, ["pcie"])] == ["pcie"]
    assert len(cells_of_parts(engine, None)) == 2
    with pytest.raises(ConfigError, match=r"no part 'disk'.*Use paper, pcie"):
        cells_of_parts(engine, ["pcie", "disk"])


# ---- repetitions


def test_repetitions_are_interleaved_and_begin_with_another_one_each_time() -> None:
    engine = Played({"a": [1.0] * 3, "b": [2.0] * 3, "c": [3.0] * 3})
    measure_restores(engine, cells=[cell()])
    assert engine.ran == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]


def test_a_row_has_the_median_and_both_ends() -> None:
    (row,) = measure_restores(Played({"a": [9.0, 3.0, 4.0]}), cells=[cell()])
    assert (row.ttft_s, row.ttft_min_s, row.ttft_max_s, row.repetitions) == (4.0, 3.0, 9.0, 3)
    assert (row.bound_s, row.bound_ratio) == (2.0, 2.0)
    assert (row.link_bytes, row.computed, row.planner_share) == (400.0, 0.25, 0.01)
    assert row.error is None and row.same_token is None


def test_a_batch_is_its_mean_beside_its_last() -> None:
    (row,) = measure_restores(Played({"a": [3.0]}, batch=3), cells=[cell(lengths=(64, 64, 64))])
    assert (row.batch, row.ttft_s, row.bound_s) == (3, 6.0, 2.0)
    assert (row.makespan_s, row.makespan_bound_s, row.worst_s) == (9.0, 4.0, 9.0)


def test_progress_counts_every_run() -> None:
    told = []
    engine = Played({"a": [1.0] * 2, "b": [1.0] * 2})
    measure_restores(engine, tell=lambda done, total, doing: told.append((done, total)))
    assert told == [(i, 8) for i in range(8)]


def test_policies_can_be_chosen_and_unknown_ones_are_refused() -> None:
    engine = Played({"a": [1.0], "b": [2.0]})
    rows = measure_restores(engine, policies=["b"])
    assert [row.policy for row in rows] == ["b", "b"] and engine.ran == ["b", "b"]
    with pytest.raises(ConfigError, match=r"'nobody'.*Use a, b"):
        measure_restores(engine, policies=["a", "nobody"])


def test_what_is_restored_wrongly_is_told() -> None:
    class Wrong(Played):
        def run(self, cell: Cell, policy: str) -> Outcome:
            found = super().run(cell, policy)
            first = self.ran.count(policy) == 1
            told = {"error": 0.5 if first else 0.0, "same_token": not first}
            return Outcome(**{name: getattr(found, name) for name in NAMES} | told)

    (row,) = measure_restores(Wrong({"a": [1.0, 1.0, 1.0]}), cells=[cell()])
    assert row.error == 0.5 and row.same_token is False


NAMES = ("ttft_s", "link_bytes", "computed", "compute_busy", "link_busy", "planner_s")


# ---- engines


def test_every_policy_runs_in_virtual_cells_and_none_beats_the_bound() -> None:
    some = [
        *(cell(), cell(gbps=80.0, compute_share=0.125), cell(suffix=64)),
        *(cell(lengths=(4096, 640, 8192)), cell(codecs=("raw", "kv8"))),
    ]
    rows = measure_restores(Virtual(), cells=some)
    assert len(rows) == len(some) * len(RESTORE_POLICIES)
    for row in rows:
        assert row.label == "simulated" and row.engine == "virtual"
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
    rows = measure_restores(Virtual(), cells=some)
    assert [row.policy for row in rows] == [OURS] * 3
    one, two, four = rows
    assert one.boundary_bytes == 0 < two.boundary_bytes < four.boundary_bytes < four.link_bytes
    assert one.ttft_s > 1.6 * two.ttft_s > 1.6**2 * four.ttft_s
    assert all(row.ttft_s >= row.bound_s and 0 < row.link_busy <= 1 for row in rows)
    assert all(0 < row.computed < 1 and row.compute_busy is None for row in rows)


def test_less_computing_and_a_slower_link_take_longer() -> None:
    fast, slow, busy = (
        measure_restores(Virtual(), cells=[c], policies=["cake"])[0]
        for c in (cell(), cell(gbps=10.0), cell(compute_share=0.125))
    )
    assert fast.ttft_s < min(slow.ttft_s, busy.ttft_s)
    assert fast.bound_s < min(slow.bound_s, busy.bound_s)


def test_runs_of_a_virtual_clock_are_equal() -> None:
    first, again = (measure_restores(Virtual(), cells=[cell()]) for _ in range(2))
    assert [row.ttft_s for row in first] == [row.ttft_s for row in again]


def test_unknown_models_and_engines_are_refused() -> None:
    with pytest.raises(ConfigError, match="there is no HAL 9000 on H100"):
        measure_restores(Virtual(), cells=[cell(model="HAL 9000")])
    with pytest.raises(ConfigError, match=f"Use {', '.join(ENGINES)}"):
        make_engine("steam")


def small(**changed: object) -> Cell:
    given = {"part": "small", "model": "fixture", "gpu": "cpu", "tokens": 256, "suffix": 32}
    return Cell(**{**given, "gbps": 1.0, **changed})


def test_a_processor_restores_the_same_numbers_under_every_policy() -> None:
    engine = Processor()
    engine.repetitions = 1
    disk = small(gbps=0.0, link="disk")
    with closing(engine):
        rows = measure_restores(engine, cells=[small()])
        rows += measure_restores(engine, cells=[disk], policies=[OURS])
    assert len(rows) == len(RESTORE_POLICIES) + 1
    for row in rows:
        assert (row.engine, row.label) == ("cpu", "measured")
        assert row.error is not None and row.error < 1e-3 and row.same_token
        assert row.bound_s > 0 and row.ttft_s > 0
    at = {row.policy: row for row in rows if row.link == "limited"}
    n_bytes = 256 * 4 * 2 * 2 * 64 * 4
    assert at["load"].link_bytes == n_bytes and at["recompute"].link_bytes == 0
    assert at["load"].ttft_s >= n_bytes * 8 / 1e9, "the limit holds"


def test_a_processors_links_are_as_fast_as_its_computing_allows() -> None:
    engine = Processor()
    engine._calibrated = known  # type: ignore[method-assign]
    engine._engine = lambda cell: Prompted  # type: ignore[assignment,method-assign]
    cells = list(engine.cells())
    assert [c.model for c in cells] == ["small"] * 2 + ["wide"] * 2
    assert [c.gbps for c in cells[:2]] == [3.4, 0.84], "load/recompute of .25 and 1"


class Prompted:
    """An engine that was made, whose prefix has 104,857,600 bytes."""

    @staticmethod
    def requests() -> list[RestoreRequest]:
        source = Source("link", "raw", 6400)
        return [RestoreRequest(number=0, tokens=2048, suffix=128, layers=8, sources=(source,))]


def known(cell: Cell) -> Modelled:
    """Costs by which computing the prefix takes a second."""

    class OneSecond(Modelled):
        def compute_s(self, request: RestoreRequest, layers: int, tokens: Span) -> float:
            return 1.0

    shape, gpu = next(iter(SHAPES.values())), next(iter(GPUS.values()))
    return OneSecond(shape, gpu, 1.0)


# ---- the command


def test_the_command_prints_rows(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    html, out = tmp_path / "r.html", tmp_path / "r.json"
    words = ["restore", "--engine", "virtual", "--part", "pcie", "--json"]
    status = main([*words, "--html", str(html), "--out", str(out)])
    printed = capsys.readouterr().out
    assert status in (0, 1) and printed.count("\n") == 1
    rows = json.loads(printed)
    assert len(rows) == 4 * len(RESTORE_POLICIES) and all(row.keys() >= FIELDS for row in rows)
    assert {row["label"] for row in rows} == {"simulated"}
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
    page = html.read_text()
    assert "simulated" in page and ('<div class="bars">' in page or "<svg" in page)


def test_the_command_shows_tables(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["restore", "--part", "pcie", "--policy", "load,cake"]
    assert main(words) == 0, "what is not measured is not missed"
    printed = capsys.readouterr().out
    assert "4 cells, simulated" in printed and "On the virtual clock" in printed
    assert "1e9 bits per second" in " ".join(printed.split())


@pytest.mark.parametrize(
    "words",
    [
        ["--engine", "steam"],
        ["--policy", "nobody"],
        ["--part", "nothing"],
        ["--html", "/nowhere/at/all/r.html"],
    ],
)
def test_the_command_refuses(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["restore", *words]) == 2
    assert "Traceback" not in capsys.readouterr().err
