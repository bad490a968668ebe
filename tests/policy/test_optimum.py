"""Belady: nothing beats it, and the policy, the function and the definition agree."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowkv.policy import CATALOGUE, Optimum, make_policy
from flowkv.sim import Trace
from tests.inside import NOT_AGAIN, ConfigError, belady, next_uses
from tests.sim.stories import chains, run_through, told

S = 10**9
words = st.lists(st.integers(0, 2), min_size=1, max_size=4)
stories = st.lists(st.tuples(st.integers(0, 40), words), min_size=8, max_size=24)


def a_trace(story: list[tuple[int, list[int]]]) -> Trace:
    """Requests of (seconds since the last, word); a block is a prefix of a word."""
    return told([(gap, word, -1) for gap, word in story])


def optimum_hits(trace: Trace, capacity: int) -> np.ndarray:
    return belady(trace.offsets, trace.blocks, trace.unique, capacity)


def by_definition(trace: Trace, capacity: int) -> list[int]:
    """Keeps, after each request, what is needed soonest; of equals the nearest to the root."""
    requests = chains(trace)
    here: set[int] = set()
    hits = []
    for r, chain in enumerate(requests):
        held = [b in here for b in chain]
        assert held == sorted(held, reverse=True)  # chains stay whole without being told to
        hits.append(sum(held))
        later = requests[r + 1 :]
        due = {b: next((i for i, c in enumerate(later) if b in c), None) for b in here | set(chain)}
        wanted = [b for b in due if due[b] is not None]
        here = set(sorted(wanted, key=lambda b: (due[b], trace.depths[b], b))[:capacity])
    return hits


def by_trying_everything(trace: Trace, capacity: int) -> int:
    """The most leading hits of any sequence of sets that can be kept."""
    best = {frozenset(): 0}
    for chain in chains(trace):
        after: dict[frozenset[int], int] = {}
        for here, total in best.items():
            run = 0
            while run < len(chain) and chain[run] in here:
                run += 1
            could = sorted(here | set(chain))
            for kept in combinations(could, min(capacity, len(could))):
                state = frozenset(kept)
                after[state] = max(after.get(state, 0), total + run)
        best = after
    return max(best.values())


@settings(max_examples=25, deadline=None)
@given(stories, st.integers(0, 9))
def test_policy_function_and_definition_agree(story, capacity):
    trace = a_trace(story)
    expected = by_definition(trace, capacity)
    assert optimum_hits(trace, capacity).tolist() == expected
    policy = Optimum()
    policy.foresee(trace.offsets, trace.blocks)
    assert run_through(trace, policy, capacity).tolist() == expected


@settings(max_examples=12, deadline=None)
@given(
    st.lists(
        st.tuples(st.just(1), st.lists(st.integers(0, 1), min_size=1, max_size=3)), max_size=7
    ).filter(len),
    st.integers(1, 4),
)
def test_no_sequence_of_decisions_is_better(story, capacity):
    trace = a_trace(story)
    assert optimum_hits(trace, capacity).sum() == by_trying_everything(trace, capacity)


@settings(max_examples=12, deadline=None)
@given(stories, st.integers(1, 9))
def test_no_policy_is_better(story, capacity):
    trace = a_trace(story)
    best = optimum_hits(trace, capacity).sum()
    for name in CATALOGUE:
        if name != "opt":
            assert run_through(trace, make_policy(name), capacity).sum() <= best, name


@settings(max_examples=20, deadline=None)
@given(stories, st.integers(1, 9))
def test_bigger_is_no_worse(story, capacity):
    """Of LRU a bigger place hits whatever a smaller one does, request by request."""
    trace = a_trace(story)
    small, big = optimum_hits(trace, capacity), optimum_hits(trace, capacity + 1)
    assert small.sum() <= big.sum()
    lru = [run_through(trace, make_policy("lru"), c) for c in (capacity, capacity + 1)]
    assert (lru[0] <= lru[1]).all()
    infinite = optimum_hits(trace, trace.unique)
    assert infinite.sum() == len(trace.blocks) - trace.unique


@settings(max_examples=20, deadline=None)
@given(stories, st.integers(1, 6))
def test_halving_the_blocks_never_lowers_the_hits_of_the_optimum(story, capacity):
    """Blocks of half the size, twice as many of which fit: at least as many tokens hit."""
    doubled = [(gap, [2 * s + half for s in word for half in (0, 1)]) for gap, word in story]
    whole, halves = a_trace(story), a_trace(doubled)
    assert optimum_hits(halves, 2 * capacity).sum() >= 2 * optimum_hits(whole, capacity).sum()


def test_single_blocks_without_parents():
    """A cyclic scan of n blocks over c places: c / n of the requests hit."""
    n, capacity, rounds = 10, 4, 20
    offsets = np.arange(n * rounds + 1)
    blocks = np.tile(np.arange(n), rounds)
    hits = belady(offsets, blocks, n, capacity)
    assert hits.sum() == capacity * (rounds - 1)


def test_next_uses():
    uses = next_uses(np.array([0, 2, 3, 5]), np.array([0, 1, 0, 0, 1]), 2)
    assert uses.tolist() == [1, 2, 2, NOT_AGAIN, NOT_AGAIN]


def test_without_a_future_the_deepest_goes_first():
    policy = make_policy("opt")
    policy.insert(0, np.arange(3), np.array([-1, 0, 1]))
    policy.hint(1, np.array([0, 1, 2]), 1)
    policy.enqueue(1, 7, np.array([0, 1, 2]))
    assert policy.evict(2, 2).tolist() == [2, 1]


def test_a_negative_capacity_is_refused():
    with pytest.raises(ConfigError, match="Use 0 or more"):
        belady(np.array([0]), np.empty(0, np.int64), 0, -1)


OFFSETS, BLOCKS = np.array([0, 2, 4]), np.array([0, 1, 0, 2])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("offsets", [0, 2, 5]), ("offsets", [-1, 2, 4]), ("offsets", [0, 4, 2])),
        *(("offsets", [0.0, 2.0, 4.0]), ("offsets", [[0, 2, 4]]), ("blocks", [0, 1, 0, 3])),
        *(("blocks", [0, 1, -1, 2]), ("blocks", [0, 1, 0, 2**40])),
        *(("blocks", np.array([0, 1, 0, 2], np.uint64)), ("unique", 2), ("uses", [1, 1, 1])),
        ("uses", []),
    ],
)
def test_what_does_not_fit_is_refused_before_it_is_walked(field, value):
    said = {"offsets": OFFSETS, "blocks": BLOCKS, "unique": 3, "uses": None}
    assert belady(**said, capacity=2).tolist() == [0, 1]
    said[field] = np.array(value) if isinstance(value, (list, np.ndarray)) else value
    with pytest.raises(ConfigError):
        belady(**said, capacity=2)
    if field in ("offsets", "blocks"):
        with pytest.raises(ConfigError):
            next_uses(said["offsets"], said["blocks"], 3)
    if field == "offsets" or (field == "blocks" and np.array(value).min() < 0):
        with pytest.raises(ConfigError):
            Optimum().foresee(said["offsets"], said["blocks"])
