"""The compiled order equals the slow rules, decision by decision; its counters equal a recount."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from flowkv.policy import Lease, LfuTtl
from flowkv.policy.order import DUES, EXPIRED, FAR, LEAVES
from tests.policy.reference import SlowLfuTtl

S = 10**9
slots = st.lists(st.integers(-2, 9), max_size=5)
steps = st.sampled_from([0, 0, 1, S // 3, S, 2 * S, 5 * S, 40 * S, -1, -S])


def ids(values):
    return np.array(values, np.int64)


class Both(RuleBasedStateMachine):
    @initialize(tau=st.sampled_from([0, 1, 3 * S, 600 * S]), start=st.sampled_from([-S, 0, 10**18]))
    def begin(self, tau, start):
        leases = {"": (math.inf, math.inf), "a": (3 * S, math.inf), "b": (4 * S, 9 * S)}
        self.fast = LfuTtl(tau_s=tau / S, leases={"a": Lease(3), "b": Lease(4, 9)})
        self.slow = SlowLfuTtl(tau, leases)
        self.now = start
        self.expired(0)

    def time(self, dt):
        self.now = self.slow.clock + dt if self.slow.clock is not None else self.now
        return self.now

    @rule(
        dt=steps,
        chain=st.lists(st.integers(0, 9), min_size=1, max_size=4),
        above=st.lists(st.integers(-2, 10), min_size=4, max_size=4),
        straight=st.booleans(),
        lease=st.sampled_from(["", "a", "b"]),
    )
    def insert(self, dt, chain, above, straight, lease):
        """Anything goes: resident slots, itself as parent, rings, repeats, strangers."""
        now = self.time(dt)
        parents = [above[0], *chain[:-1]] if straight else above[: len(chain)]
        for policy in (self.fast, self.slow):
            policy.insert(now, ids(chain), ids(parents), lease=lease)

    @rule(dt=steps, chain=slots)
    def access(self, dt, chain):
        now = self.time(dt)
        for policy in (self.fast, self.slow):
            policy.access(now, ids([s for s in chain if s >= 0]))

    @rule(chain=slots)
    def remove(self, chain):
        for policy in (self.fast, self.slow):
            policy.remove(ids(chain))

    @rule(dt=steps, n=st.integers(0, 6), protected=slots)
    def evict(self, dt, n, protected):
        now = self.time(dt)
        fast, slow = (p.evict(now, n, protected) for p in (self.fast, self.slow))
        assert (fast is None) == (slow is None)
        assert fast is None or fast.tolist() == slow.tolist()

    @rule(dt=steps)
    def expired(self, dt):
        now = self.time(dt)
        assert self.fast.expired(now).tolist() == self.slow.expired(now).tolist()

    @invariant()
    def counters(self):
        if not hasattr(self, "fast"):
            return
        blocks, slow = self.slow.blocks, self.slow
        assert self.fast.resident() == sorted(blocks)
        nodes, _, place = self.fast._arrays
        marked = 0
        for s, block in blocks.items():
            node, children = nodes[s], slow.children(block)
            gone = node["live"] < 0  # marked no later than the next call that knows the time
            marked += gone
            assert node["key"] == block.key - FAR * gone
            assert node["depth"] == block.depth
            assert node["kids"] == len(children)
            assert not gone or slow.is_expired(block)
            assert (place[LEAVES, s] >= 0) == (not children)
            if not gone:
                live = [b for b in children if not slow.is_expired(b)]
                assert len(live) <= node["live"] <= len(children)
                lone = node["live"] == 0 and slow.own_expiry(block) < math.inf
                assert (place[DUES, s] >= 0) == lone
        assert (place[:2, [s for s in range(len(nodes)) if s not in blocks]] == -1).all()
        assert not place[2].any()
        assert self.fast._state[EXPIRED] == marked
        self.is_heap(LEAVES)
        self.is_heap(DUES)

    def is_heap(self, which):
        _, heaps, place = self.fast._arrays
        entries = heaps[which, : self.fast._state[which]].tolist()
        assert all(entries[(i - 1) // 2] < entries[i] for i in range(1, len(entries)))
        assert all(place[which, tie & 0xFFFFFFFF] == i for i, (_, tie) in enumerate(entries))


TestBoth = Both.TestCase
TestBoth.settings = settings(max_examples=150, stateful_step_count=30)
