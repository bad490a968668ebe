"""States in a replay: equal to a plain loop over prefixes, and better than rules of others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowkv.sim import generate, replay
from tests.inside import MODELS, STATE_RULES, ConfigError, SavedState, StatePlacement
from tests.sim.stories import chains, needs_traces, public, traces

HYBRID = "qwen3-next"


def plain_hits(trace, placement):
    """Hits with room for all blocks; prefixes, states and children are sets of tuples."""
    size, model = trace.block_tokens, MODELS[HYBRID]
    known, states, hits = set(), set(), []
    for chain, tokens in zip(map(tuple, chains(trace)), trace.input_tokens.tolist(), strict=True):
        whole = max(0, min(len(chain), (tokens - 1) // size))
        prefixes = [chain[: n + 1] for n in range(len(chain))]
        there = [n for n in range(len(chain)) if prefixes[n] in known]
        used = max([n + 1 for n in there if n < whole and prefixes[n] in states], default=0)
        hits.append(used)
        full = min(len(chain), tokens // size)
        known.update(prefixes)
        whole_known.update(prefixes[:full])
        stops = placement.stops(used * size, min(len(there), whole) * size, whole * size, page=size)
        states.update(chain[: stop // size] for stop in stops)
        if stops:
            mine = [n for n in range(len(chain)) if prefixes[n] in states]
            saved = [SavedState((n + 1) * size, below(prefixes[n])) for n in mine]
            cost = model.state_bytes / model.token_bytes()
            for gone in placement.replaced(saved, state_tokens=cost):
                states.discard(chain[: gone // size])
    return hits


whole_known: set[tuple[int, ...]] = set()


def below(prefix):
    return sum(len(one) == len(prefix) + 1 and one[:-1] == prefix for one in whole_known)


@pytest.mark.parametrize("rule", STATE_RULES)
@settings(max_examples=25)
@given(trace=traces, least=st.sampled_from([0, 8]))
def test_a_replay_is_the_plain_loop(rule, trace, least):
    whole_known.clear()
    told = {"rule": rule, "least_tokens": least, "every_tokens": 8 * (rule == "interval")}
    wanted = plain_hits(trace, StatePlacement(**told))
    found = replay(trace, "lru", pages=trace.unique, model=HYBRID, states=told)
    assert found.hits.tolist() == wanted
    alone = replay(trace, "lru", pages=trace.unique)
    assert found.extra["attention_hit_ratio"] == pytest.approx(alone.prefix_hit_ratio)
    assert (found.hits <= alone.hits).all() and found.closure is None


@settings(max_examples=25)
@given(trace=traces, capacity=st.integers(0, 8), room=st.sampled_from([0.0, 1.0, 1e4]))
def test_states_leave_with_their_blocks(trace, capacity, room):
    told = {"rule": "auto", "least_tokens": 0, "room": room}
    found = replay(trace, "lru", pages=capacity, model=HYBRID, states=told)
    alone = replay(trace, "lru", pages=capacity)
    assert (found.hits <= alone.hits).all()
    assert not capacity or not room or found.extra["states_share"] <= room


def test_a_state_after_each_block_serves_what_attention_serves():
    trace = generate("agents", requests=300, seed=2)
    told = {"rule": "interval", "every_tokens": trace.block_tokens}
    found = replay(trace, "lru", size="100%", model=HYBRID, states=told)
    whole = np.minimum((trace.input_tokens - 1) // trace.block_tokens, np.diff(trace.offsets))
    alone = replay(trace, "lru", size="100%").hits
    lost = np.minimum(alone, whole) - found.hits
    assert (lost >= 0).all() and (lost <= 1).all(), "no state follows the last token of a prompt"
    assert (lost == 0).mean() > 0.9
    assert found.extra["states_share"] > 1, "and takes more bytes than its K and V"


@pytest.mark.parametrize(
    ("told", "problem"),
    [
        ({"states": "auto"}, "keeps no states"),
        ({"states": "best", "model": HYBRID}, "placement"),
        ({"states": {"rule": "auto", "room": -1}, "model": HYBRID}, "room"),
        ({"states": "auto", "model": HYBRID, "tiers": ["dram:5%"]}, "states"),
    ],
)
def test_what_cannot_be_replayed_is_refused(told, problem):
    with pytest.raises(ConfigError, match=problem):
        replay(generate("chat", requests=20, seed=1), "lru", size="10%", **told)


def compared(trace, **more):
    """Share of the hits of attention, and bytes, by rule."""
    found = {}
    for rule in STATE_RULES:
        extra = replay(trace, "lru", size="100%", model=HYBRID, states={"rule": rule, **more})
        of_attention = extra.prefix_hit_ratio / extra.extra["attention_hit_ratio"]
        found[rule] = of_attention, extra.extra["states_share"]
    return found


def test_agents_hit_nearly_all_with_few_bytes():
    found = compared(generate("agents", requests=1500, seed=3))
    assert found["auto"][0] > 0.95 and found["auto"][0] >= found["newest"][0] - 0.01
    assert found["auto"][1] < 0.5 * found["tail"][1]
    assert found["interval"][0] < found["auto"][0]


@needs_traces
def test_coding_agents_hit_what_attention_hits_at_a_twentieth_of_its_bytes():
    found = compared(public("kct_dev").head(4000))
    hits, n_bytes = found["auto"]
    assert hits >= 0.95 and n_bytes <= 0.05
    assert all(n_bytes < found[rule][1] for rule in ("interval", "ends", "junctions", "tail"))
