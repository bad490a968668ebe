"""Statistics of traces: small ones by definition, public ones as others measured them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from flowkv.policy import LRU
from flowkv.sim import characterise
from tests.inside import lru_hit_ratios, stack_distances
from tests.sim.stories import chains, needs_traces, public, run_through, traces


@settings(max_examples=25)
@given(trace=traces)
def test_distances_are_lru(trace):
    """At every size, request by request: a block is a hit exactly if its distance is smaller."""
    distances = stack_distances(trace)
    for capacity in range(trace.unique + 2):
        hits = run_through(trace, LRU(), capacity)
        found = (distances >= 0) & (distances < capacity)
        ends = zip(trace.offsets[:-1], trace.offsets[1:], strict=True)
        assert hits.tolist() == [int(found[a:b].sum()) for a, b in ends]
        expected = hits.sum() / max(len(trace.blocks), 1)
        assert lru_hit_ratios(distances, [capacity]) == [expected]


@settings(max_examples=20)
@given(trace=traces)
def test_against_definitions(trace):
    got, asked = characterise(trace), [b for chain in chains(trace) for b in chain]
    assert got.unique == len(set(asked))
    assert got.blocks == len(asked)
    times = dict.fromkeys(asked, 0)
    for block in asked:
        times[block] += 1
    if asked:
        assert got.used_once == sum(n == 1 for n in times.values()) / len(times)
        assert got.top_share == max(times.values()) / len(asked)
        assert got.infinite_hit_ratio == 1.0 - len(times) / len(asked)
        assert got.lru[1.0] == pytest.approx(got.infinite_hit_ratio)
    windows: dict[int, set[int]] = {}
    for now, chain in zip(trace.times_ns.tolist(), chains(trace), strict=True):
        if chain:
            windows.setdefault((now - int(trace.times_ns[0])) // (60 * 10**9), set()).update(chain)
    sizes = list(map(len, windows.values()))
    assert got.working_set[60.0] == pytest.approx(sum(sizes) / max(len(sizes), 1))


PUBLISHED = {  # measured by other code: chains alone tell what continues what
    "moon_conv": {
        "infinite": 0.366, "once": 0.76, "top": 0.12, "lengths": (14, 167), "extending": 0.33,
        "gaps": (39, 123, 474), "reuse": (114, 519), "between": (384, 1748), "cv": 3.0,
    },
    "moon_synth": {
        "infinite": 0.640, "once": 0.58, "top": 0.07, "lengths": (23, 130), "extending": 0.34,
        "gaps": (5, 56, 285), "reuse": (59, 282), "between": (233, 1100), "cv": 1.0,
    },
    "lmc_agent": {
        "infinite": 0.900, "once": 0.26, "top": 0.05, "lengths": (72, 1654), "extending": 0.81,
        "gaps": (0.3, 1.5, 12), "reuse": (1.4, 12.6), "between": (1, 5), "cv": 2.7,
    },
    "kct_dev": {
        "infinite": 0.965, "once": 0.06, "top": 0.13, "lengths": (208, 884), "extending": 0.965,
        "gaps": (8, 18, 114), "reuse": (19, 123), "between": (11, 62), "cv": 11.0,
    },
}  # fmt: skip
SLOW = {"kct_dev": pytest.mark.slow}


@needs_traces
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=SLOW.get(name, ())) for name in PUBLISHED]
)
def test_published_traces(name):
    got, said = characterise(public(name)), PUBLISHED[name]
    assert got.infinite_hit_ratio == pytest.approx(said["infinite"], abs=6e-4)
    assert got.used_once == pytest.approx(said["once"], abs=6e-3)
    assert got.top_share == pytest.approx(said["top"], abs=6e-3)
    spread = got.blocks_per_request
    assert (spread.p50, spread.p99) == pytest.approx(said["lengths"], rel=0.01)
    assert (got.reuse_s.p50, got.reuse_s.p90) == pytest.approx(said["reuse"], rel=0.03)
    between = got.reuse_requests
    assert (between.p50, between.p90) == pytest.approx(said["between"], rel=0.02)
    assert got.arrival_cv == pytest.approx(said["cv"], rel=0.02)
    assert got.extending == pytest.approx(said["extending"], abs=0.025)
    assert (got.gap_s.p10, got.gap_s.p50, got.gap_s.p90) == pytest.approx(said["gaps"], rel=0.12)
