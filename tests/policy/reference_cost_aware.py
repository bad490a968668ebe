"""Cost-aware eviction as written down: the count's key, moved by what a byte costs."""

from __future__ import annotations

from tests.inside import log2
from tests.policy.reference import SlowLfuTtl


class SlowCostAware(SlowLfuTtl):
    name = "slow-cost-aware"

    def __init__(self, tau_ns, leases=None):
        super().__init__(tau_ns, leases)
        self.per_byte: dict[int, float] = {}

    def insert(self, now_ns, slots, parents, *, n_bytes=1, cost_ns=0, **kw):
        self.tick(now_ns)
        for s in slots.tolist():
            if s not in self.blocks or self.is_expired(self.blocks[s]):
                self.per_byte[s] = cost_ns / n_bytes if cost_ns else 1.0
        super().insert(now_ns, slots, parents, **kw)

    def base_key(self, slot):
        return self.blocks[slot].key + round(self.tau * log2(self.per_byte[slot]))
