"""Tiers on engines that others run: object stores, Valkey and Redis, Mooncake.

What FlowKV adds to a client library is in `guard` (deadlines, breaker, retries, rates) and `tier`
(threads, index, checks); an engine itself is one small class, a `backend.Backend`.
"""
