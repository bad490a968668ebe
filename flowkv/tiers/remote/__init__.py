"""Tiers on engines run by others: object stores, Valkey and Redis, Mooncake.

All that a client library lacks is in `tier` (deadlines, breaker, retries, rates, threads, index,
checks) and `erasures`; an engine itself is one small class, a `backend.Backend`.
"""
