"""The policy for circles: equals its slow rules, and finds what can be found."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from flowkv.policy import LRU, Cyclic
from tests.inside import HELD_FAST, RECENTS, SEEN_ONCE, STAYERS, ConfigError
from tests.policy.reference_cyclic import SlowCyclic
from tests.policy.test_against_reference import LEASES, Both, ids

S = 10**9


class BothCyclic(Both):
    def make(self, tau):
        return Cyclic(leases=LEASES, streaming=1)

    def reference(self, tau, leases):
        return SlowCyclic(leases, streaming=1)

    @rule(n=st.integers(3, 8), rounds=st.integers(1, 8), room=st.integers(2, 5))
    def scan(self, n, rounds, room):
        """A few rounds through some blocks, of which not all fit."""
        for s in [*range(n)] * rounds:
            now = self.time(1)
            fresh = s not in self.slow.blocks
            for policy in (self.fast, self.slow):
                policy.access(now, ids([s]))
                if fresh:
                    policy.insert(now, ids([s]), ids([-1]))
            extra = len(self.slow.blocks) - room
            if extra > 0:
                fast, slow = (policy.evict(now, extra) for policy in (self.fast, self.slow))
                assert (fast is None) == (slow is None)
                assert fast is None or fast.tolist() == slow.tolist()

    @invariant()
    def shadows(self):
        if hasattr(self, "fast"):
            counts, slow = self.fast._counts, self.slow
            assert self.fast.cycle == slow.cycle
            assert self.fast._state[HELD_FAST] == len(slow.fixed)
            assert counts[SEEN_ONCE] == len(slow.known)
            assert counts[RECENTS] == len(slow.recent)
            assert counts[STAYERS] == len(slow.stays)


TestBothCyclic = BothCyclic.TestCase
TestBothCyclic.settings = settings(max_examples=20, stateful_step_count=20)


def hits(policy, trace, capacity):
    """Whether each use of a block finds it."""
    here, found = set(), []
    for now, s in enumerate(trace):
        policy.access(now, ids([s]))
        found.append(s in here)
        if s not in here:
            policy.insert(now, ids([s]), ids([-1]))
            here.add(s)
            if len(here) > capacity:
                here -= set(policy.evict(now, len(here) - capacity).tolist())
    return np.array(found)


@pytest.mark.parametrize(("n", "room"), [(100, 50), (100, 99), (20, 10), (1000, 10)])
@pytest.mark.parametrize("streaming", [1, 2, 4])
def test_a_circle_hits_what_does_not_stream(n, room, streaming):
    rounds = hits(Cyclic(streaming=streaming), [*range(n)] * 8, room).reshape(8, n).sum(1)
    assert rounds[4:].tolist() == [room - streaming] * 4
    told = hits(Cyclic(streaming=streaming, cycle=True), [*range(n)] * 8, room).reshape(8, n).sum(1)
    assert told[2:].tolist() == [room - streaming] * 6
    assert hits(LRU(), [*range(n)] * 8, room).sum() == 0


def test_what_is_no_circle_is_lru():
    rng = random.Random(5)
    trace = [min(int(rng.paretovariate(0.7)), 300) for _ in range(4000)]
    lru = hits(LRU(), trace, 40)
    assert (hits(Cyclic(cycle=False), trace, 40) == lru).all()
    assert hits(Cyclic(), trace, 40).sum() >= lru.sum()


def test_it_finds_a_circle_and_its_end():
    rng = random.Random(6)
    walk = []
    for i in range(6000):  # a window that moves: LRU finds nearly all, a set that stays nothing
        walk.append(1000 + i // 20 + rng.randrange(10))
    trace = [*walk, *[*range(100)] * 10, *walk]
    policy, lru = hits(Cyclic(), trace, 50), hits(LRU(), trace, 50)
    assert policy[6500:7000].mean() > 0.45
    assert lru[6500:7000].mean() < 0.01
    assert policy[-5000:].mean() >= lru[-5000:].mean() - 0.02
    assert (policy[:6000] == lru[:6000]).all()


def test_errors_name_the_field():
    with pytest.raises(ConfigError, match="streaming"):
        Cyclic(streaming=0)
