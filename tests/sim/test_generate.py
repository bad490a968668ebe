"""Generators: traces, repeatable, and like what they say they are."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowkv.sim import characterise, generate, replay
from tests.inside import (
    TOOL_USE,
    TURN_END,
    ConfigError,
    MarkovTraceConfig,
    bursts,
    poisson,
    transitions,
    walk,
)
from tests.inside import generate_KINDS as KINDS
from tests.sim.stories import same


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=6)
@given(requests=st.integers(1, 400), seed=st.integers(0, 2**40))
def test_every_kind_is_a_trace(kind, requests, seed):
    trace = generate(kind, requests=requests, seed=seed)
    trace.check()
    assert (len(trace), trace.name) == (requests, kind)
    assert same(trace, generate(kind, requests=requests, seed=seed))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "cyclic"])
def test_a_seed_tells_traces_apart(kind):
    one, other = (generate(kind, requests=300, seed=seed) for seed in (1, 2))
    assert not np.array_equal(one.blocks, other.blocks)


@pytest.mark.parametrize("kind", ["chat", "agents", "rag", "bursts", "drift"])
def test_more_requests_go_on_from_fewer(kind):
    assert same(generate(kind, requests=300), generate(kind, requests=500).head(300))


def test_chat_is_like_the_published_one():
    chat = characterise(generate("chat", requests=6000, seed=1))
    assert 90 < chat.gap_s.p50 < 150
    assert 25 < chat.gap_s.p10 < 50
    assert 10 <= chat.blocks_per_request.p50 <= 22
    assert 0.3 < chat.infinite_hit_ratio < 0.6
    assert 0.25 < chat.returns[0] < 0.45
    assert chat.returns[5] > chat.returns[0] + 0.2
    assert 0.9 < chat.arrival_cv < 1.2


def test_agents_are_like_the_published_ones():
    trace = generate("agents", requests=6000, seed=1)
    agents = characterise(trace)
    assert 12 < agents.gap_s.p50 < 22
    assert 100 < agents.blocks_per_request.p50 < 300
    assert agents.infinite_hit_ratio > 0.94
    assert agents.extending > 0.93
    assert 0.8 < (trace.stops == TOOL_USE).mean() < 0.92
    assert set(trace.stops.tolist()) == {TOOL_USE, TURN_END}
    assert trace.input_tokens.max() <= 180_000 + 32_000


def test_rag_reuses_documents():
    trace = generate("rag", requests=4000, seed=1)
    rag = characterise(trace)
    assert rag.infinite_hit_ratio > 0.4
    assert rag.top_share > 0.25
    flat = generate("rag", requests=4000, seed=1, zipf=0.0, documents=100_000)
    assert characterise(flat).infinite_hit_ratio < rag.infinite_hit_ratio - 0.1


def test_bursts_are_bursty_at_the_same_rate():
    rng = np.random.default_rng(1)
    terms = {"factor": 20.0, "calm_s": 300.0, "burst_s": 30.0}
    hot = np.array(list(itertools.islice(bursts(rng, 2.0, **terms), 100_000)))
    calm = np.array(list(itertools.islice(poisson(rng, 2.0), 100_000)))
    for times in (hot, calm):
        assert (np.diff(times) >= 0).all()
        assert abs(len(times) / times[-1] - 2.0) < 0.2
    dispersion = [np.bincount(times.astype(int) // 10).var() / 20.0 for times in (hot, calm)]
    assert dispersion[0] > 10 * dispersion[1]
    assert 0.9 < dispersion[1] < 1.1
    several = characterise(generate("bursts", requests=4000, seed=1))
    assert several.arrival_cv > 1.3


def test_drift_changes_what_is_popular():
    trace = generate("drift", requests=4000, seed=1, phase_s=300.0, sessions_per_s=4.0)
    phases = trace.times_ns // (300 * 10**9)
    assert phases.max() >= 2
    second = trace.blocks[trace.offsets[:-1] + 2]  # behind the prompt: the document
    favourites = []
    for phase in range(3):
        counts = np.bincount(second[phases == phase])
        favourites.append(set(np.argsort(counts)[-20:].tolist()))
    assert len(favourites[0] & favourites[1]) <= 2
    steady = generate("rag", requests=4000, seed=1, sessions_per_s=4.0)
    second = steady.blocks[steady.offsets[:-1] + 2]
    counts = [np.bincount(part, minlength=steady.unique) for part in np.array_split(second, 2)]
    assert len(set(np.argsort(counts[0])[-20:]) & set(np.argsort(counts[1])[-20:])) >= 10


def test_scans_hurt_lru():
    trace = generate("scan", requests=12_000, seed=1, scan_blocks=200)
    quiet = generate("scan", requests=12_000, seed=1, scan_share=0.0)
    pages = 200
    assert quiet.unique <= 512
    once = np.bincount(trace.blocks) == 1
    assert 0.35 < once[trace.blocks].mean() < 0.65
    assert replay(trace, "lru", pages=pages).closure == 0.0
    assert replay(trace, "lru", pages=pages).prefix_hit_ratio < 0.6 * (
        replay(quiet, "lru", pages=pages).prefix_hit_ratio
    )


def test_a_cyclic_scan_defeats_lru():
    trace = generate("cyclic", requests=2000, blocks=100)
    assert replay(trace, "lru", pages=60).prefix_hit_ratio == 0.0
    best = replay(trace, "opt", pages=60).prefix_hit_ratio
    assert abs(best - (60 - 1) / 99 * 1900 / 2000) < 0.02


@pytest.mark.parametrize("order", [1, 2, 3])
def test_chains_follow_their_odds(order):
    config = MarkovTraceConfig(requests=40_000, blocks=8, order=order, fanout=3, seed=5)
    followers, odds = transitions(config)
    assert followers.shape == odds.shape == (8**order, 3)
    assert np.allclose(odds.sum(axis=1), 1.0)
    assert (np.diff(odds, axis=1) <= 0).all()
    trace = generate("markov", requests=40_000, blocks=8, order=order, fanout=3, seed=5)
    stream = walk(config, np.random.default_rng(5)).tolist()
    _, first = np.unique(stream, return_index=True)
    order_of_use = np.argsort(np.argsort(first))  # blocks are numbered as they appear
    assert order_of_use[np.unique(stream, return_inverse=True)[1]].tolist() == trace.blocks.tolist()
    context = likeliest = 0
    for block in stream:
        assert block in followers[context]
        likeliest += block == followers[context, 0]
        context = (context * 8 + block) % 8**order
    expected = 0.0
    context = 0
    for block in stream:
        expected += odds[context, 0]
        context = (context * 8 + block) % 8**order
    assert abs(likeliest - expected) / len(stream) < 0.01


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        *(("chatt", {}, "Did you mean 'chat'"), ("chat", {"requests": 0}, "requests")),
        ("chat", {"sessions_per_s": -1.0}, "sessions_per_s"),
        *(("chat", {"returns": [2.0]}, "returns"), ("rag", {"nonsense": 1}, "nonsense")),
        ("markov", {"order": 4, "blocks": 1000}, "order 4"),
        ("markov", {"blocks": 3, "fanout": 4}, "fanout"),
    ],
)
def test_wrong_options_are_named(kind, options, message):
    with pytest.raises(ConfigError, match=message):
        generate(kind, **options)
