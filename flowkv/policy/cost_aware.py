"""Keeps what saves most time per byte: a decayed count times what computing a block anew costs."""

from __future__ import annotations

from flowkv.policy.config import CostAwareConfig, configure
from flowkv.policy.order.compiled import CLOCK_LIMIT, log2_of
from flowkv.policy.order.leaf import LeafOrder

MOST = CLOCK_LIMIT >> 2


class CostAware(LeafOrder):
    """Gives up, among the leaves, the one that saves least: count * (cost / bytes) ** alpha.

    For blocks of unequal kinds, such as pages of several codecs, state snapshots beside pages, or
    late tokens, which cost more than early ones. Where cost is in proportion to size, and where it
    is unknown, it is `LfuTtl`.

    The idea is that of GreedyDual-Size with frequency (Cao and Irani, USITS 1997; Cherkasova, HP
    Labs 1998), and of Marconi for prefixes (Pan et al., arXiv 2411.19379: recency, and work saved
    per byte). Those age by raising a floor at each eviction, or recompute a score; here counts
    decay with time, so that the product is one static key: K + alpha * tau * log2(cost / bytes)
    orders blocks by the product at every time.

    Args:
        **options: Fields of `CostAwareConfig`.

    Raises:
        ConfigError: If an option is unknown or out of range.
    """

    name = "cost-aware"
    config: CostAwareConfig

    def __init__(self, **options: object) -> None:
        self.config = configure(CostAwareConfig, self.name, options)
        tau_ns = max(1, round(self.config.tau_s * 1e9))
        super().__init__(tau_ns, self.config)
        self._scale = self.config.alpha * tau_ns
        self._last: tuple[tuple[int, int], int] = (0, 0), 0

    def _extra(self, n_bytes: int, cost_ns: int) -> int:
        """Half-life * alpha * log2 of the cost per byte, in nanoseconds."""
        asked = n_bytes, cost_ns
        if asked != self._last[0]:  # mostly it is what it was
            n_bytes = max(n_bytes, 1)
            per_byte = cost_ns / n_bytes if cost_ns > 0 else self.config.ns_per_byte
            extra = round(self._scale * log2_of(per_byte))
            self._last = asked, max(-MOST, min(MOST, extra))
        return self._last[1]
