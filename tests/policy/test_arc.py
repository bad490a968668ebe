"""ARC equals its slow rules; and what it is for."""

from __future__ import annotations

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
