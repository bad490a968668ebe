"""Small traces for property tests, and where the public ones are."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st
from numpy.typing import NDArray

from flowkv.policy import Optimum, Policy, Visit, make_policy
from flowkv.sim import Trace, build_trace, read_trace
from tests.inside import wide

S = 10**9
TRACES = os.environ.get("FLOWKV_TRACES")
PUBLIC = ["moon_conv", "moon_synth", "lmc_agent", "kct_dev"]
needs_traces = pytest.mark.skipif(
    TRACES is None, reason="FLOWKV_TRACES names no directory of traces"
)

words = st.lists(st.integers(0, 2), min_size=0, max_size=5)
requests = st.tuples(st.sampled_from([0, 0, 1, 3, 40]), words, st.integers(-1, 2))
stories = st.lists(requests, min_size=1, max_size=24)
long_stories = st.lists(requests, min_size=12, max_size=40)


def told(story: list[tuple[int, list[int], int]], **more: object) -> Trace:
    """Requests of (seconds since the last, letters, session)."""
    letters = [letter for _, word, _ in story for letter in word]
    return build_trace(
        "story",
        np.cumsum([gap * S for gap, _, _ in story]),
        [len(word) for _, word, _ in story],
        wide(letters),
        4,
        sessions=[session for _, _, session in story],
        stops=[len(word) % 4 for _, word, _ in story],
        output_tokens=[3 * len(word) for _, word, _ in story],
        **more,
    )


traces = st.builds(told, stories)
long_traces = st.builds(told, long_stories)


def public(name: str) -> Trace:
    """One of the published traces."""
    return read_trace(Path(str(TRACES)) / "blocks" / f"{name}.npz")


def chains(trace: Trace) -> list[list[int]]:
    """The blocks of each request."""
    ends = zip(trace.offsets[:-1], trace.offsets[1:], strict=True)
    return [trace.blocks[a:b].tolist() for a, b in ends]


def same(one: Trace, other: Trace) -> bool:
    """Whether two traces are equal, but for their names."""
    fields = [name for name in one.__struct_fields__ if name != "name"]
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in fields)


def fresh(name, trace):
    """A policy of the catalogue; `opt` knows the trace."""
    policy = make_policy(name)
    if isinstance(policy, Optimum):
        policy.foresee(trace.offsets, trace.blocks)
    return policy


def run_through(trace: Trace, policy: Policy, capacity: int) -> NDArray[np.int64]:
    """Leading resident blocks of each request, from cold, where `capacity` blocks fit.

    All blocks of a request become resident, and afterwards what is too much leaves; the request's
    own blocks may be among it, so that a policy can decline to keep them.
    """
    here = np.zeros(trace.unique, np.bool_)
    hits = np.zeros(len(trace), np.int64)
    used = 0
    times, offsets = trace.times_ns.tolist(), trace.offsets.tolist()
    for r, now in enumerate(times):
        chain = trace.blocks[offsets[r] : offsets[r + 1]]
        run_out = policy.expired(now)
        if len(run_out):
            policy.remove(run_out)
            here[run_out] = False
            used -= len(run_out)
        held = here[chain]
        run = len(chain) if held.all() else int(held.argmin())
        hits[r] = run
        n_tokens = int(trace.input_tokens[r])
        policy.access(now, chain, Visit(r, int(trace.sessions[r]), n_tokens, len(chain)))
        new = chain[~held]
        if len(new):
            policy.insert(now, new, trace.parents[new])
            here[new] = True
            used += len(new)
        stop, output = int(trace.stops[r]), int(trace.output_tokens[r])
        policy.complete(now, r, stop=stop, output_tokens=output)
        if used > capacity:
            victims = policy.evict(now, used - capacity)
            assert victims is not None
            here[victims] = False
            used = capacity
    return hits
