"""What to bring nearer before it is asked for, and when to leave that."""

from flowkv.policy.prefetch.prefetcher import Fetch, PrefetchConfig, Prefetcher

__all__ = ["Fetch", "PrefetchConfig", "Prefetcher"]
