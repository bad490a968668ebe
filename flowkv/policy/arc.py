"""Adaptive replacement: recency and frequency, with a border that follows what is missed."""

from __future__ import annotations

from flowkv.policy.config import ArcConfig, configure
from flowkv.policy.order.compiled import ARC as ARC_MODE
from flowkv.policy.order.compiled import MODE
from flowkv.policy.order.leaf import LeafOrder


class ARC(LeafOrder):
    """Gives up the longest unused leaf of what was used once, or of what was used again.

    The rule of vLLM's offloading (`ARCOffloadingManager`), after Megiddo and Modha (FAST 2003): T1
    holds blocks used once, T2 blocks used again, B1 and B2 remember what was evicted from them. A
    use of what B1 remembers raises the target size of T1 by max(1, |B2| // |B1|), one of B2 lowers
    it by max(1, |B1| // |B2|). A victim is taken from T1 while it has at least its target size.
    What comes back begins in T1. Each of B1 and B2 is as long at most as the cache is large, which
    is the largest number of blocks that an eviction has left.

    Differences to vLLM: only leaves are victims, and so are never found before their prefix is; of
    one request the deepest goes first; where the list whose turn it is has no leaf that may go, the
    other gives one.

    Args:
        **options: Fields of `ArcConfig`: leases.
    """

    name = "arc"
    config: ArcConfig

    def __init__(self, **options: object) -> None:
        self.config = configure(ArcConfig, self.name, options)
        super().__init__(leases=self.config)
        self._state[MODE] = ARC_MODE
