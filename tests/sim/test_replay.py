"""Replays: equal to the plain loop, bounded by the optimum, and what they tell."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowkv.policy import CATALOGUE, LRU, Optimum, make_policy
from flowkv.policy.prefetch import Prefetcher
from flowkv.sim import generate, replay, sweep
from tests.inside import (
    NEVER_NS,
    ConfigError,
    OnePlace,
    PlaceStack,
    belady,
    bounds_of,
    hints_of,
    next_turns,
    pages_of,
    share_of,
)
from tests.sim.stories import (
    PUBLIC,
    fresh,
    long_traces,
    needs_traces,
    public,
    run_through,
    told,
    traces,
)

ROW = [
    *("policy", "size", "pages", "prefix_hit_ratio", "closure", "load_traffic_vs_lru"),
    *("prefetch_precision", "blocks_per_s"),
]


@pytest.mark.parametrize("name", CATALOGUE)
@settings(max_examples=15)
@given(trace=long_traces, capacity=st.integers(0, 12))
def test_a_place_is_the_plain_loop(name, trace, capacity):
    """Decision by decision, over dense numbers and over a ledger with ids and a table."""
    plain, dense, listed = (fresh(name, trace) for _ in range(3))
    hits = run_through(trace, plain, capacity)
    for place in (OnePlace(trace, dense, capacity), PlaceStack(trace, [listed], [capacity])):
        assert place.replay().hits.tolist() == hits.tolist()
    assert plain.digest() == dense.digest() == listed.digest()


@settings(max_examples=15)
@given(trace=traces, capacity=st.integers(0, 12))
def test_the_two_ends_of_the_scale(trace, capacity):
    lru, opt = replay(trace, "lru", pages=capacity), replay(trace, "opt", pages=capacity)
    best = belady(trace.offsets, trace.blocks, trace.unique, capacity)
    assert lru.hits.tolist() == run_through(trace, LRU(), capacity).tolist()
    assert opt.hits.tolist() == best.tolist()
    assert lru.prefix_hit_ratio <= opt.prefix_hit_ratio
    assert lru.closure in (0.0, None)
    assert opt.closure in (1.0, None)
    slow = replay(trace, Optimum, pages=capacity)
    assert slow.hits.tolist() == best.tolist()
    assert slow.load_traffic == opt.load_traffic


@settings(max_examples=15)
@given(trace=traces, capacity=st.integers(0, 12))
def test_blocks_add_up(trace, capacity):
    got = replay(trace, "lru", pages=capacity)
    assert got.hits.sum() + got.missed.sum() == got.blocks == len(trace.blocks)
    assert got.load_traffic == got.blocks - trace.unique - got.hits.sum()  # leaves go first
    assert got.block_hit_ratio == got.prefix_hit_ratio
    assert sum(share.blocks for share in got.tenants) == got.blocks
    if capacity >= trace.unique:
        assert got.load_traffic == 0


def test_a_row_has_what_others_read():
    trace = generate("chat", requests=300, seed=3, tenants=2)
    row = replay(trace, "auto", size="2%", hints=0.5).row()
    assert set(ROW) <= set(row)
    assert row["policy"] == "auto+hints"
    assert row["source"] == "simulated"
    assert row["pages"] == int(0.02 * trace.unique)
    assert all(value is None or isinstance(value, str | int | float) for value in row.values())
    assert row["blocks_per_s"] > 0
    assert row["policy_us_p50"] > 0


def test_tenants_are_told_apart():
    trace = generate("chat", requests=400, seed=4, tenants=3)
    got = replay(trace, "lru", size=0.05)
    sizes = np.diff(trace.offsets)
    for share in got.tenants:
        mine = trace.tenants == share.tenant
        assert share.requests == mine.sum()
        assert share.prefix_hit_ratio == got.hits[mine].sum() / sizes[mine].sum()
    assert [share.tenant for share in got.tenants] == [0, 1, 2]


def test_deep_blocks_cost_more():
    """Two requests for one chain of which half fits: the upper half is the cheaper one."""
    got = replay(told([(0, [0, 1, 0, 1], 0), (1, [0, 1, 0, 1], 0)]), "lru", pages=2)
    assert got.prefix_hit_ratio == got.saved_bytes_ratio == 0.25
    assert 0.24 < got.saved_cost_ratio < 0.25


# ---- hints, queue, prefetch


def test_next_turns_by_session_and_by_blocks():
    story = [(0, [0, 0], 7), (1, [0, 0, 1], 7), (1, [1, 1], 8), (1, [2, 2], 7)]
    assert next_turns(told(story)).tolist() == [1, 3, -1, -1]
    unknown = [(gap, word, -1) for gap, word, _ in story]
    assert next_turns(told(unknown)).tolist() == [1, -1, -1, -1]
    cut = [(0, [0, 0, 0], -1), (1, [0, 0, 1, 1], -1), (1, [0, 1, 1], -1)]
    assert next_turns(told(cut)).tolist() == [1, -1, -1]  # the last block of the first was partial


def said_by(trace, sigma=0.0):
    """What is hinted after each request, in seconds: (eta, how many blocks)."""
    etas, counts = hints_of(trace, sigma)
    etas = [None if eta == NEVER_NS else eta / 1e9 for eta in etas.tolist()]
    return list(zip(etas, counts.tolist(), strict=True))


def test_a_hint_is_about_what_its_session_sends_again():
    a, b = [0, 0, 0], [0, 1]
    story = [(0, a, 7), (1, [0, 0, 1], 8), (2, b, 7), (4, a[:2], 7), (8, b, 8)]
    assert said_by(told(story)) == [(7, 2), (14, 1), (4, 1), (None, 0), (None, 0)]
    unknown = [(gap, word, -1) for gap, word, _ in story]
    assert said_by(told(unknown)) == [(1, 2), (6, 2), (12, 2), (8, 1), (None, 0)]


def test_hints_are_true_gaps_with_errors():
    trace = generate("agents", requests=3000, seed=5)
    exact = hints_of(trace, 0.0)
    on = exact.counts > 0
    assert ((exact.etas_ns == NEVER_NS) == ~on).all()
    gaps = exact.etas_ns[on]
    noisy = hints_of(trace, 0.5, seed=1)
    assert (noisy.counts == exact.counts).all()
    errors = np.log(noisy.etas_ns[on][gaps > 0] / gaps[gaps > 0])
    assert abs(errors.mean()) < 0.05
    assert abs(errors.std() - 0.5) < 0.03
    assert (noisy.etas_ns == hints_of(trace, 0.5, seed=1).etas_ns).all()
    assert (noisy.etas_ns != hints_of(trace, 0.5, seed=2).etas_ns).any()
    with pytest.raises(ConfigError, match="hints with an error of -1"):
        hints_of(trace, -1.0)


def test_hints_help():
    trace = generate("agents", requests=1500, seed=6)
    plain, told_so = replay(trace, "lru", size="2%"), replay(trace, "lru", size="2%", hints=0.5)
    assert told_so.closure > 0.5 > plain.closure == 0.0


def test_a_queue_is_certain():
    """What waits is not given up: with a long queue, more is kept of what comes next."""
    trace = generate("rag", requests=1500, seed=7)
    plain = replay(trace, "lru", size="2%")
    queued = replay(trace, "lru", size="2%", queue_s=3.0)
    assert queued.policy == "lru+queue"
    assert queued.prefix_hit_ratio > plain.prefix_hit_ratio
    with pytest.raises(ConfigError, match="queue_s=-1"):
        replay(trace, "lru", size="2%", queue_s=-1)


def test_a_queue_brings_blocks_back():
    """A prefetcher that sees the queue brings what was used before, and all of it is used."""
    trace = generate("rag", requests=1500, seed=7)
    queued = replay(trace, "lru", size="2%", queue_s=2.0)
    brought = replay(trace, "lru", size="2%", queue_s=2.0, prefetch=True)
    assert brought.prefetched > 0
    assert brought.prefetch_precision > 0.8
    assert brought.prefix_hit_ratio > queued.prefix_hit_ratio
    assert brought.load_traffic >= queued.load_traffic * 0.9


def test_the_place_and_its_prefetcher_count_alike():
    trace = generate("rag", requests=600, seed=9)
    prefetcher = Prefetcher(100)
    place = OnePlace(trace, LRU(), 100, queue_ns=10**9, prefetcher=prefetcher)
    course = place.replay()
    assert course.prefetched == sum(prefetcher.fetched_bytes) > 0
    assert course.prefetch_used == sum(prefetcher.used_bytes) > 0
    assert place.used == np.count_nonzero(place.here) <= 100


def test_prefetch_is_counted_in_blocks():
    trace = generate("rag", requests=800, seed=8)
    got = replay(trace, "lru", size="3%", queue_s=1.0, prefetch={"bytes_per_s": 50.0})
    span_s = trace.times_ns[-1] / 1e9
    assert 0 < got.prefetched <= 50.0 * (span_s + 10.0)
    loaded = got.load_traffic - got.prefetched
    assert loaded == got.blocks - trace.unique - round(got.block_hit_ratio * got.blocks)


# ---- arguments


def test_sizes():
    trace = generate("chat", requests=200, seed=1)
    assert pages_of(trace, size="1%") == pages_of(trace, size=0.01) == int(0.01 * trace.unique)
    assert pages_of(trace, size=1e-9) == 1
    assert pages_of(trace, pages=0) == 0
    assert share_of(" 0.5% ") == 0.005
    for bad in ("", "%", "x%", "-1%", 0, float("nan"), float("inf"), None, [1]):
        with pytest.raises(ConfigError, match="no share"):
            share_of(bad)
    for bad in (-1, True, 1.5):
        with pytest.raises(ConfigError, match="no number of blocks"):
            pages_of(trace, pages=bad)
    for both in ({}, {"pages": 1, "size": 0.1}):
        with pytest.raises(ConfigError, match="Give one of the two"):
            pages_of(trace, **both)


def test_what_replay_does_not_know():
    trace = generate("chat", requests=50, seed=1)
    with pytest.raises(ConfigError, match=r"has no setting prefech\. Use .*prefetch"):
        replay(trace, "lru", size=0.1, prefech=True)
    with pytest.raises(ConfigError, match="tau_s"):
        replay(trace, "opt", size=0.1, options={"tau_s": 3})


class Told(LRU):
    """Notes what inserts say."""

    def __init__(self):
        super().__init__()
        self.said, self.payers = [], []

    def access(self, now_ns, slots, visit):
        self.payers.append(visit.tenant)
        super().access(now_ns, slots, visit)

    def insert(self, now_ns, slots, parents, **said):
        self.said.append((len(slots), said))
        super().insert(now_ns, slots, parents, **said)


def test_policies_are_told_tenants_and_costs():
    trace = generate("chat", requests=120, seed=1, tenants=2)
    plain, costly = Told(), Told()
    replay(trace, plain, size=0.1)
    replay(trace, costly, size=0.1, costs=True, hardware="h100")
    assert all(set(said) == {"tenant"} for _, said in plain.said)
    costs = [said["cost_ns"] for _, said in costly.said]
    assert 10**6 < min(costs) < max(costs) < 10**9  # 512 tokens of an 8-billion model
    stack = [Told(), Told()]
    PlaceStack(trace, stack, [20, 40]).replay()
    for one in (plain, *stack):
        assert one.payers == trace.tenants.tolist()
        assert {said["tenant"] for _, said in one.said} == {0, 1}


def test_policies_of_ones_own():
    trace = generate("chat", requests=200, seed=1)
    by_name = replay(trace, "lru", pages=50)
    assert by_name.digest == replay(trace, LRU, pages=50).digest
    assert by_name.digest == replay(trace, LRU(), pages=50).digest
    used = LRU()
    replay(trace, used, pages=50)
    with pytest.raises(ConfigError, match="holds blocks already"):
        replay(trace, used, pages=50)
    with pytest.raises(ConfigError, match="Did you mean 'lru'"):
        replay(trace, "lur", pages=50)
    with pytest.raises(ConfigError, match="Leave out warm"):
        replay(trace, "lru", pages=50, warm=b"")
    assert replay(trace, "lfu-ttl", pages=50, options={"tau_s": 0}).hits.tolist() == (
        by_name.hits.tolist()
    )


def test_a_learner_may_begin_with_what_another_one_learned():
    teacher = make_policy("hazard")
    replay(generate("agents", requests=1500, seed=1), teacher, size="2%")
    trace = generate("agents", requests=500, seed=2)
    cold = replay(trace, "hazard", size="2%")
    warm = replay(trace, "hazard", size="2%", warm=teacher.save_model())
    assert warm.policy == "hazard+warm"
    assert warm.digest != cold.digest
    assert warm.first_closure == warm.closure  # of all 500 requests
    with pytest.raises(ConfigError):
        replay(trace, "hazard", size="2%", warm=b"nonsense")


def test_an_empty_trace_is_replayed():
    empty = told([(0, [0], 0)]).head(0)
    for name in ("lru", "opt", "auto"):
        got = replay(empty, name, pages=4)
        assert (got.requests, got.prefix_hit_ratio, got.closure) == (0, 0.0, None)


def test_sweep_goes_through_everything():
    trace = generate("chat", requests=300, seed=2)
    steps = []
    results = sweep(
        trace, ["lru", "opt"], ["1%", 0.02], done=lambda n, of, r: steps.append((n, of, r.policy))
    )
    assert [(r.policy, r.pages) for r in results] == [
        (name, pages_of(trace, size=size)) for size in (0.01, 0.02) for name in ("lru", "opt")
    ]
    assert steps == [(i + 1, 4, results[i].policy) for i in range(4)]
    given = sweep(trace, {"lru": {"hints": 0.5}, "opt": {}}, [0.02])
    assert [r.policy for r in given] == ["lru+hints", "opt"]
    seen = []
    replay(trace, "lru", size=0.02, progress=lambda done, of: seen.append((done, of)))
    assert seen[-1] == (300, 300)
    with pytest.raises(ConfigError, match="only names"):
        sweep(trace, [LRU, "lru"], [0.02], processes=2)


@pytest.mark.slow
def test_processes_change_nothing():
    trace = generate("chat", requests=300, seed=2)
    alone = sweep(trace, ["lru", "auto"], [0.02])
    beside = sweep(trace, ["lru", "auto"], [0.02], processes=2)
    assert [r.digest for r in alone] == [r.digest for r in beside]


def test_bounds_are_computed_once():
    trace = generate("chat", requests=300, seed=9)
    assert bounds_of(trace, 40) is bounds_of(trace.head(300), 40)
    assert bounds_of(trace, 40) is not bounds_of(trace.head(299), 40)


# ---- published traces


@needs_traces
@pytest.mark.parametrize("name", PUBLIC)
def test_smoke_of_a_published_trace(name):
    trace = public(name).head(1500)
    trace.check()
    start = time.process_time()
    results = {p: replay(trace, p, size="2%") for p in ("lru", "auto", "opt")}
    assert results["lru"].closure == 0.0
    assert results["opt"].closure == 1.0
    assert results["auto"].prefix_hit_ratio <= results["opt"].prefix_hit_ratio
    assert time.process_time() - start < 60  # compiling included; two seconds of it are work


@needs_traces
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lru", "opt"),
    [
        ("kct_dev", [0.2507, 0.4941, 0.7943], [0.5428, 0.7380, 0.8867]),
        ("moon_conv", [0.0440, 0.0525, 0.0793], [0.1829, 0.2464, 0.3142]),
        ("lmc_agent", [0.290, 0.489, 0.655], [0.344, 0.527, 0.690]),
        ("moon_synth", [0.020, 0.038, 0.078], [0.125, 0.185, 0.261]),
    ],
)
def test_published_figures(name, lru, opt):
    trace = public(name)
    for size, low, high in zip((0.005, 0.01, 0.02), lru, opt, strict=True):
        got = replay(trace, "opt", size=size).prefix_hit_ratio
        assert abs(got - high) < 6e-4
        got = replay(trace, "lru", size=size).prefix_hit_ratio
        assert abs(got - low) < 6e-4
