"""ARC equals its slow rules; and what it is for."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import invariant

from flowkv.policy import ARC
from tests.inside import GHOSTS, ONCE, SIZE, TARGET
from tests.policy.reference_arc import SlowArc
from tests.policy.test_against_reference import LEASES, Both


class BothArc(Both):
    def make(self, tau):
        return ARC(leases=LEASES)

    def reference(self, tau, leases):
        return SlowArc(leases)

    @invariant()
    def lists(self):
        if hasattr(self, "fast"):
            state, slow = self.fast._state, self.slow
            assert state[ONCE] == len(slow.once)
            assert (state[TARGET], state[SIZE]) == (slow.target, slow.size)
            assert [state[GHOSTS + 1], state[GHOSTS + 2]] == [len(g) for g in slow.ghosts]


TestBothArc = BothArc.TestCase
TestBothArc.settings = settings(max_examples=25, stateful_step_count=30)


@pytest.mark.parametrize("seed", range(20))
def test_an_eviction_of_nothing_changes_no_later_victim(seed: int) -> None:
    draw, two, here = random.Random(seed), (ARC(), ARC()), set[int]()
    for now in range(300):
        two[0].evict(now, 0)
        slot = draw.randrange(16)
        for policy in two:
            policy.access(now, np.array([slot]))
        if slot not in here:
            here.add(slot)
            for policy in two:
                policy.insert(now, np.array([slot]), np.array([-1]))
        if draw.random() < 0.2:
            count = draw.randint(1, len(here))
            first, second = (policy.evict(now, count) for policy in two)
            assert first is not None and second is not None
            assert first.tolist() == second.tolist()
            here -= set(first.tolist())
