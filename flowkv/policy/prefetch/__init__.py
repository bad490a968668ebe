"""Prefetch policies: chains to bring nearer before a request asks, and when to stop."""

from flowkv.policy.prefetch.prefetcher import Fetch, PrefetchConfig, Prefetcher

__all__ = ["Fetch", "PrefetchConfig", "Prefetcher"]
