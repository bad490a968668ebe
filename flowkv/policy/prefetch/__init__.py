"""Prefetch policies: pages to bring nearer before a request asks for them, and when not to."""

from flowkv.policy.prefetch.prefetcher import Fetch, PrefetchConfig, Prefetcher

__all__ = ["Fetch", "PrefetchConfig", "Prefetcher"]
