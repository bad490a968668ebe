"""Measures of `python -m bench serve` that are no loads, on the fixture: their counts."""

from __future__ import annotations

import pytest

from bench.serve.beside import measure_beside
from bench.serve.ground import Ground, Setting
from bench.serve.protocol import Plan
from bench.serve.run import measure_serving
from bench.serve.soak import measure_soak
from bench.serve.steps import ROWS, findings, measure_steps
from bench.serve.swap import measure_swaps


@pytest.fixture(scope="module")
def ground() -> Ground:
    return Ground(device="cpu", pool="64MiB")


def test_long_answers_are_the_same_both_ways(ground: Ground) -> None:
    soak = measure_soak(ground, Setting(), rows=2, tokens=120)
    assert soak.same_tokens and (soak.rows, soak.tokens) == (2, 120)
    assert soak.at[-1] in (118, 119), "gaps, without the first, which holds the prompt"
    assert {len(curve) for curve in soak.curves.values()} == {len(soak.at)} and len(
        soak.curves
    ) == 2
    assert all(mean > 0 for mean in soak.mean_s) and soak.variance_ratio > 0
    wall = [deviation**2 for deviation in soak.deviation_s]
    assert soak.variance_ratio == pytest.approx(wall[0] / wall[1])
    assert soak.finding().measured == soak.variance_ratio
    assert ground.model.config.max_position_embeddings == 4096, "a copy was made longer"


def test_tokens_under_pressure(ground: Ground) -> None:
    swaps = measure_swaps(ground, Setting(), schedules=2)
    assert swaps.same == 1.0 and swaps.schedules == 2
    assert swaps.preempted >= swaps.pressed >= 1, "the pool is too small for all of them"
    assert swaps.finding().met


def test_a_plan_of_measures_alone(ground: Ground) -> None:
    told: list[str] = []
    plan = Plan(parts=("soak",), soak_tokens=8, soak_rows=1)
    report = measure_serving(ground, plan, lambda _done, _all, doing: told.append(doing))
    assert told == ["soak"] and report.rows == [] and report.soak is not None
    assert [finding.group for finding in report.findings] == ["soak"]
    assert report.steps == [] and report.beside is None and report.swaps is None


@pytest.mark.slow
def test_steps_and_restores(ground: Ground) -> None:
    steps = measure_steps(ground, Setting(pool_bytes=1 << 30))
    assert [one.rows for one in steps] == [ROWS, ROWS] and steps[0].context < steps[1].context
    assert all(one.steps > 20 and 0 < one.beside_s < one.model_s for one in steps)
    assert len(findings(steps)) == 2


def test_decodes_beside_restores(ground: Ground) -> None:
    beside = measure_beside(ground, Setting(), turns=2)
    assert beside.restores == 2 and beside.reused > 0.5, (
        "each was found on the disk, and only there"
    )
    assert beside.finding().measured == beside.pace is not None


def test_live_rows_that_end_end_the_turns() -> None:
    small = Ground(device="cpu", pool="64MiB")
    small.context = 256
    beside = measure_beside(small, Setting(), turns=9)
    assert beside.restores == 0 and beside.pace is None and beside.live == 8
    assert beside.finding().note == "nothing was restored"
