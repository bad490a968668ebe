"""No policy beats the bound, and the best condition of the search keeps its ratio; simulated."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.restore.baselines import RESTORE_POLICIES, make_restore_policy
from bench.restore.headline import CLAIMED, EIGHT, MLA, PLACES, Floor, Situation, situations
from flowkv.policy.restore import Measured
from flowkv.sim.restore import Modelled, asked, lower_bound, run


@given(
    name=st.sampled_from(list(RESTORE_POLICIES)),
    place=st.sampled_from(PLACES),
    gbps=st.floats(0.5, 400),
    sizes=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    suffix=st.sampled_from([0, 1, 64, 2048]),
    every_s=st.sampled_from([0.0, 0.03]),
)
@settings(max_examples=100, deadline=None)
def test_no_policy_beats_the_bound(
    name: str, place: tuple[Any, Any], gbps: float, sizes: list[int], suffix: int, every_s: float
) -> None:
    costs = Modelled(*place, gbps)
    requests = [
        asked(costs.model, 64 * size, suffix, number=i, arrived_s=every_s * i)
        for i, size in enumerate(sizes)
    ]
    done, floor = run(requests, make_restore_policy(name), costs), Floor(costs)
    assert done.mean_s >= lower_bound(requests, floor, of="mean") * (1 - 1e-9)
    end_s = max(done.ttft_s[one.number] + one.arrived_s for one in requests)
    assert end_s >= lower_bound(requests, floor) * (1 - 1e-9)
    assert lower_bound(requests, floor) >= lower_bound(requests, costs.ideal)


def test_the_best_condition_keeps_its_ratio() -> None:
    one = Situation(MLA, EIGHT, 4, 8192, 64, 128, 0.0, 0.85)
    costs = Modelled(one.model, one.gpu, one.gbps)
    requests = one.requests(costs)
    mean_s = {
        name: run(requests, make_restore_policy(name), costs, believed=Measured(costs)).mean_s
        for name in ("recompute", "cake", "layers", "staircase", "flowkv")
    }
    assert min(mean_s["recompute"], mean_s["cake"]) / mean_s["staircase"] == pytest.approx(
        3.03, abs=0.02
    )
    wider = run(requests, make_restore_policy("cake", chunk=2048), costs, believed=Measured(costs))
    assert wider.mean_s <= 1.27 * mean_s["staircase"], "the ratio is the cost of small chunks"
    assert mean_s["flowkv"] <= mean_s["staircase"] < mean_s["layers"] < mean_s["cake"] / CLAIMED


def test_one_request_cannot_show_the_ratio() -> None:
    found = [one.ratios() for one in itertools.islice(situations(), 0, 375, 12)]
    assert max(ratios["bound"] for ratios in found) < 1.5 < CLAIMED
    assert all(ratios["bound"] >= max(ratios.values()) for ratios in found)
