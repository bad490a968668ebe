"""Where states of recurrent layers are saved, and which ones a new one replaces."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.inside import STATE_RULES, ConfigError, SavedState, StatePlacement

rules = st.sampled_from(sorted(STATE_RULES))
PAGE = 16


@given(rules, st.integers(0, 3000), st.integers(0, 200), st.integers(0, 3000))
def test_stops_are_whole_pages_that_are_computed(rule, base, known, more):
    known, end = known * PAGE, base + more
    stops = StatePlacement(rule).stops(base, known, end, page=PAGE)
    assert stops == sorted(set(stops))
    assert all(base < stop <= end and stop % PAGE == 0 for stop in stops)
    if rule in ("interval", "ends"):
        assert stops == StatePlacement(rule).stops(base, 0, end, page=PAGE)


@pytest.mark.parametrize(
    ("rule", "first", "parts", "goes_on"),
    [
        *(("interval", [1024, 2048], [2048], [3072]), ("ends", [2992], [2992], [3488])),
        *(("junctions", [], [1600], []), ("tail", [2992], [1600, 2992], [3488])),
        *(("newest", [2992], [1600, 2992], [3488]), ("auto", [2992], [1600, 2992], [])),
    ],
)
def test_stops_of_each_rule(rule, first, parts, goes_on):
    """A new prompt, one that parts from a known one, and one that goes on from an answer."""
    placed = StatePlacement(rule, **({"every_tokens": 1020} if rule == "interval" else {}))
    assert placed.stops(0, 0, 3000, page=PAGE) == first
    assert placed.stops(1024, 1600, 3000, page=PAGE) == parts
    assert placed.stops(3005, 2992, 3500, page=PAGE) == goes_on, "495 tokens are no further stop"


def test_a_prompt_that_comes_again_is_worth_a_state():
    placed = StatePlacement()
    assert placed.stops(592, 592, 900, page=PAGE) == []
    assert placed.stops(592, 896, 900, page=PAGE) == [896]
    assert placed.stops(592, 832, 900, page=PAGE) == []


@given(
    rules,
    st.lists(st.tuples(st.integers(1, 100_000), st.integers(0, 4)), min_size=1, max_size=30),
    st.integers(0, 40),
    st.floats(0, 5000),
)
def test_what_stays_is_a_junction_or_new_or_spaced(rule, states, placed, state_tokens):
    saved = [SavedState(*one) for one in sorted(dict(states).items())]
    own = saved[min(placed, len(saved) - 1)].tokens
    gone = StatePlacement(rule).replaced(saved, own, state_tokens=state_tokens)
    stays = [one for one in saved if one.tokens not in gone]
    assert set(gone) <= {one.tokens for one in saved}
    assert saved[-1] in stays and own not in gone
    assert all(one in stays for one in saved if one.branches > 1)
    if not STATE_RULES[rule].replaces:
        assert not gone
    free = [one.tokens for one in stays[:-1] if one.branches < 2 and one.tokens != own]
    if rule == "newest":
        assert not free
    if rule == "auto":
        deeper = {a.tokens: b.tokens for a, b in itertools.pairwise(stays)}
        end = saved[-1].tokens
        assert all(deeper[n] - n >= max(state_tokens, end - deeper[n]) for n in free)
        assert len(free) <= 2 + math.log2(end), "distances double"


@given(st.lists(st.integers(1, 64), min_size=1, max_size=60))
def test_a_conversation_keeps_few_states(turns):
    """Turn after turn, what is lost by a cut of the text is at most what was cut and one state."""
    placement, kept, end = StatePlacement("auto"), list[int](), 0
    for pages in turns:
        end += pages * PAGE
        kept.append(end)
        gone = placement.replaced([SavedState(n) for n in kept], state_tokens=PAGE)
        kept = [n for n in kept if n not in gone]
    assert kept[-1] == end and len(kept) <= 3 + math.log2(end / PAGE)


def test_unknown_rules_and_options_are_refused():
    with pytest.raises(ConfigError, match="placement"):
        StatePlacement("Auto")
    with pytest.raises(ConfigError, match="every"):
        StatePlacement("interval", every=3)
    assert StatePlacement("tail", every_tokens=64).stops(0, 0, 130, page=64) == [64, 128]
