"""Traces: numbering, checks, heads, joins."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowkv.policy import LRU
from flowkv.sim import Trace, build_trace, join
from tests.inside import ConfigError, OnePlace, wide
from tests.sim.stories import S, chains, same, stories, told, traces


@given(stories)
def test_equal_numbers_mean_equal_prefixes(story):
    trace = told(story)
    trace.check()
    prefix: dict[int, tuple[int, ...]] = {}
    for (_, word, _), chain in zip(story, chains(trace), strict=True):
        assert len(word) == len(chain)
        for i, block in enumerate(chain):
            assert prefix.setdefault(block, tuple(word[: i + 1])) == tuple(word[: i + 1])
    assert len(set(prefix.values())) == len(prefix) == trace.unique
    assert f"{len(trace):,} requests" in repr(trace) and "\n" not in repr(trace)


@given(stories, st.randoms(use_true_random=False))
def test_requests_may_come_in_any_order(story, rng):
    trace = told([(1, word, session) for _, word, session in story])
    order = list(range(len(story)))
    rng.shuffle(order)
    letters = [letter for i in order for letter in story[i][1]]
    other = build_trace(
        "shuffled",
        [(i + 1) * S for i in order],
        [len(story[i][1]) for i in order],
        wide(letters),
        4,
        sessions=[story[i][2] for i in order],
        stops=[len(story[i][1]) % 4 for i in order],
        output_tokens=[3 * len(story[i][1]) for i in order],
    )
    assert same(trace, other)


def test_ids_of_128_bits_and_negative_ones_differ():
    ids = np.array([[5, 0], [5, 1], [5, 0]], np.uint64)
    assert build_trace("wide", [0, 1, 2], [1, 1, 1], ids, 1).unique == 2
    assert build_trace("signed", [0, 1, 2], [1, 1, 1], wide([-1, 1, -1]), 1).unique == 2


@given(traces, st.integers(0, 30))
def test_head_is_a_trace(trace, n):
    head = trace.head(n)
    head.check()
    assert chains(head) == chains(trace)[:n]
    assert len(head) == min(n, len(trace))


@given(traces, traces)
def test_join_keeps_both_apart(one, other):
    both = join("both", [one, other])
    both.check()
    assert both.unique == one.unique + other.unique
    assert len(both) == len(one) + len(other)
    assert sorted(set(both.tenants.tolist())) == [0, 1]
    for session in set(both.sessions.tolist()) - {-1}:
        assert len(set(both.tenants[both.sessions == session].tolist())) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("times_ns", [5, 4, 6]), ("times_ns", [0, 1]), ("offsets", [0, 2, 4])),
        *(("offsets", [1, 2, 4, 6]), ("offsets", [0, 4, 2, 6]), ("offsets", [0, 2, 4, 7])),
        *(("blocks", [0, 1, 0, 2, 0, 3]), ("blocks", [0, 1, 0, 3, 0, 2])),
        *(("blocks", [0, 1, 0, -2, 0, 1]), ("blocks", [0, 1, 1, 2, 0, 1])),
        *(("parents", [-1, 0, 1]), ("parents", [-1, 0, 0, 0]), ("depths", [0, 1, 2])),
        *(("sessions", [0, 0]), ("block_tokens", 0), ("block_tokens", 1 << 31)),
        *(("times_ns", [0, 1, 1 << 61]), ("input_tokens", [4, -4, 4]), ("stops", [0, -1, 0])),
        *(("sessions", [0, -2, 0]), ("blocks", np.array([0, 1, 0, 2, 0, 1], np.uint64))),
        ("blocks", np.array([0, 1, 0, 2, 0, 1], np.float64)),
        ("offsets", np.array([[0, 2, 4, 6]])),
    ],
)
def test_what_is_no_trace_is_refused(field, value):
    good = told([(0, [0, 0], 0), (1, [0, 1], 0), (1, [0, 0], 0)])
    good.check()
    kind = getattr(good, field)
    changed = np.array(value, kind.dtype) if isinstance(value, list) else value
    with pytest.raises(ConfigError, match="trace 'story': "):
        msgspec.structs.replace(good, **{field: changed}).check()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("offsets", [0, 2, 4, 7]), ("offsets", [-1, 2, 4, 6]), ("offsets", [0, 4, 2, 6])),
        *(("offsets", [0, 2, 6]), ("blocks", [0, 1, 0, 3, 0, 1])),
        *(("blocks", [0, -1, 0, 2, 0, 1]), ("parents", [-1, 0, 3]), ("parents", [-2, 0, 0])),
        *(("depths", [0, 1]), ("tenants", [])),
    ],
)
def test_what_leads_out_of_its_arrays_cannot_even_be_made(field, value):
    good = told([(0, [0, 0], 0), (1, [0, 1], 0), (1, [0, 0], 0)])
    with pytest.raises(ConfigError, match="trace 'story': "):
        msgspec.structs.replace(good, **{field: np.array(value, getattr(good, field).dtype)})


def test_a_wrong_depth_leads_nowhere():
    good = told([(0, [0] * 6, 0), (1, [0, 1], 0)])
    flat = msgspec.structs.replace(good, depths=np.zeros_like(good.depths))
    place = OnePlace(flat, LRU(), 9)
    place.seen[:] = True
    assert len(place.missing(5)[1]) <= 1 and len(place.missing(7)[1]) == 0
    place = OnePlace(good, LRU(), 9)
    place.seen[:] = True
    assert place.missing(5)[1].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("lengths", "ids"),
    [([5, -3], np.zeros((2, 2), np.uint64)), ([2], np.zeros((2, 1), np.uint64)), ([2], [1, 2])],
)
def test_lengths_and_ids_are_what_they_are_walked_as(lengths, ids):
    with pytest.raises(ConfigError, match="negative lengths, or ids of shape"):
        build_trace("story", np.zeros(len(lengths)), lengths, ids, 16)


def test_lengths_must_fit():
    with pytest.raises(ConfigError, match="2 times, 1 lengths and 3 blocks"):
        build_trace("bad", [0, 1], [3], wide([1, 2, 3]), 4)
    with pytest.raises(ConfigError, match="1 times, 1 lengths and 3 blocks"):
        build_trace("bad", [0], [2], wide([1, 2, 3]), 4)
    with pytest.raises(ConfigError):
        build_trace("bad", [0], [3], wide([1, 2, 3]), 4, sessions=[0, 1])
    with pytest.raises(ConfigError, match="blocks of one size"):
        join("none", [])


def test_a_trace_may_be_empty():
    empty = build_trace("empty", [], [], wide([]), 16)
    empty.check()
    assert isinstance(empty, Trace)
    assert (len(empty), empty.unique) == (0, 0)
