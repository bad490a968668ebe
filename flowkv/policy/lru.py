"""Leaf-first least recently used: the baseline, and what engines do."""

from __future__ import annotations

from flowkv.policy.config import LruConfig, configure
from flowkv.policy.order.leaf import LeafOrder


class LRU(LeafOrder):
    """Gives up, among the leaves, the one whose last request is longest ago.

    The rule of SGLang's radix cache and of vLLM's reversed free list. All blocks of one request
    (one `now_ns`) are equally recent; ties go deepest first, then smallest slot.

    Args:
        **options: Fields of `LruConfig`: leases.
    """

    name = "lru"
    config: LruConfig

    def __init__(self, **options: object) -> None:
        self.config = configure(LruConfig, self.name, options)
        super().__init__(leases=self.config)
