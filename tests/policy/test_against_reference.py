"""The compiled order equals the slow rules, decision by decision; its counters equal a recount."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from flowkv.policy import Lease, LfuTtl, Visit
from tests.inside import BLOCKED, DUES, EXPIRED, HINTED, LEAVES, NEVER_NS
from tests.inside import compiled_SECOND as SECOND
from tests.policy.reference import SlowLfuTtl
from tests.policy.slots import ids

S = 10**9
slots = st.lists(st.integers(-2, 9), max_size=5)
steps = st.sampled_from([0, 0, 1, S // 3, S, 2 * S, 5 * S, 40 * S, -1, -S])
LEASES = {"a": Lease(3), "b": Lease(4, 9), "low": Lease(rank=10), "high": Lease(20, 90, 80, 6)} | {
    "brief": Lease(rank=80, rank_s=2),
    "middle": Lease(rank=50, rank_s=9),
}


class Both(RuleBasedStateMachine):
    @initialize(tau=st.sampled_from([0, 1, 3 * S, 600 * S]), start=st.sampled_from([-S, 0, 10**18]))
    def begin(self, tau, start):
        leases = {
            name: (x.lease_s * S, x.max_age_s * S, x.rank, x.rank_s * S)
            for name, x in {"": Lease(), **LEASES}.items()
        }
        self.fast = self.make(tau)
        self.slow = self.reference(tau, leases)
        self.now = start
        self.expired(0)

    def make(self, tau):
        return LfuTtl(tau_s=tau / S, leases=LEASES)

    def reference(self, tau, leases):
        return SlowLfuTtl(tau, leases)

    def time(self, dt):
        self.now = self.slow.clock + dt if self.slow.clock is not None else self.now
        return self.now

    @rule(
        dt=steps,
        chain=st.lists(st.integers(0, 9), min_size=1, max_size=4),
        above=st.lists(st.integers(-2, 10), min_size=4, max_size=4),
        straight=st.booleans(),
        lease=st.sampled_from(["", "", *LEASES]),
        tenant=st.integers(0, 1),
        worth=st.sampled_from([(1, 0), (1, 0), (4096, 10**6), (1 << 20, 3), (3, 10**12)]),
    )
    def insert(self, dt, chain, above, straight, lease, tenant, worth):
        """Anything goes: resident slots, itself as parent, rings, repeats, strangers."""
        now = self.time(dt)
        parents = [above[0], *chain[:-1]] if straight else above[: len(chain)]
        said = {"n_bytes": worth[0], "cost_ns": worth[1], "lease": lease, "tenant": tenant}
        for policy in (self.fast, self.slow):
            policy.insert(now, ids(*chain), ids(*parents), **said)

    @rule(dt=steps, chain=slots, request=st.integers(-1, 2))
    def access(self, dt, chain, request):
        now = self.time(dt)
        for policy in (self.fast, self.slow):
            policy.access(now, ids(*[s for s in chain if s >= 0]), Visit(request))

    @rule(chain=slots, known=st.booleans())
    def remove(self, chain, known):
        for policy in (self.fast, self.slow):
            policy.remove(ids(*chain))
            if not known:
                policy.forget(ids(*chain))

    @rule(chain=slots, times=st.integers(1, 2))
    def pin(self, chain, times):
        for policy in (self.fast, self.slow):
            for _ in range(times):
                policy.pin(ids(*chain))

    @rule(chain=slots)
    def unpin(self, chain):
        for policy in (self.fast, self.slow):
            policy.unpin(ids(*chain))

    @rule()
    def unpin_all(self):
        for s, n in list(self.slow.pins.items()):
            for policy in (self.fast, self.slow):
                policy.unpin(ids(*[s] * n))

    @rule(
        dt=steps,
        chain=st.lists(st.integers(0, 9), unique=True, max_size=4),
        eta=st.sampled_from([0, 1, S, 3 * S, 50 * S, NEVER_NS, NEVER_NS - 1, -S]),
    )
    def hint(self, dt, chain, eta):
        now = self.time(dt)
        for policy in (self.fast, self.slow):
            policy.hint(now, ids(*chain), eta)

    @rule(chain=slots, request=st.integers(0, 2))
    def enqueue(self, chain, request):
        for policy in (self.fast, self.slow):
            policy.enqueue(self.now, request, ids(*chain))

    @rule(request=st.integers(0, 2))
    def abort(self, request):
        for policy in (self.fast, self.slow):
            policy.abort(self.now, request)

    @rule(dt=steps, tenant=st.integers(0, 3))
    def invalidate(self, dt, tenant):
        now = self.time(dt)
        for policy in (self.fast, self.slow):
            policy.invalidate(now, tenant)

    @rule(dt=steps, n=st.integers(0, 6), protected=slots)
    def evict(self, dt, n, protected):
        now = self.time(dt)
        first = self.fast.weakest(now, protected)
        fast, slow = (p.evict(now, n, protected) for p in (self.fast, self.slow))
        assert (fast is None) == (slow is None)
        assert fast is None or n == 0 or fast[0] == first
        assert fast is None or fast.tolist() == slow.tolist()

    @rule(dt=steps)
    def expired(self, dt):
        now = self.time(dt)
        assert self.fast.expired(now).tolist() == self.slow.expired(now).tolist()

    @rule()
    def priorities(self):
        """As of the last call; so both look at the clock first."""
        self.expired(0)
        for s in range(-1, 11):
            assert self.fast.priority(s) == self.slow.priority(s)

    @invariant()
    def counters(self):
        if not hasattr(self, "fast"):
            return
        blocks, slow = self.slow.blocks, self.slow
        assert self.fast.resident() == sorted(blocks)
        nodes = self.fast._order[0]
        fixed = slow.blocked(())
        marked = 0
        for s, block in blocks.items():
            node, children = nodes[s], slow.children(block)
            gone = node["live"] < 0  # marked no later than the next call that knows the time
            marked += gone
            assert node["key"] == block.key
            assert node["depth"] == block.depth
            assert node["kids"] == len(children)
            assert not gone or slow.is_expired(block)
            assert (node["held"] > 0) == (id(block) in fixed)
            assert (node["place"] >= 0) == (not children and not node["held"])
            if not gone:
                live = [b for b in children if not slow.is_expired(b)]
                assert len(live) <= node["live"] <= len(children)
        away = [s for s in range(len(nodes)) if s not in blocks]
        assert (nodes["place"][away] == -1).all()
        assert (nodes["due"][away] == -1).all()
        assert self.fast._state[EXPIRED] == marked
        assert self.fast._state[BLOCKED] == len(fixed)
        for row in (LEAVES, SECOND, HINTED):
            self.is_heap(row, nodes["place"])
        self.is_heap(DUES, nodes["due"])

    def is_heap(self, which, place):
        heaps = self.fast._order[1]
        entries = heaps[which, : self.fast._state[which]].tolist()
        assert all(entries[(i - 1) // 2] < entries[i] for i in range(1, len(entries)))
        assert all(place[tie & (1 << 28) - 1] == i for i, (_, tie) in enumerate(entries))


TestBoth = Both.TestCase
TestBoth.settings = settings(max_examples=25, stateful_step_count=30)
