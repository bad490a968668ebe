"""What to bring nearer before it is asked for, and when to leave that."""

from flowkv.policy.prefetch.prefetcher import PrefetchConfig, Prefetcher
from flowkv.policy.prefetch.reach import Fetch

__all__ = ["Fetch", "PrefetchConfig", "Prefetcher"]
