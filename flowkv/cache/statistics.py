"""Numbers about what a cache holds: levels for whoever asks often, and a report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import MappingProxyType
from typing import Any

from flowkv.cache.sequence import Tables
from flowkv.cache.store import PageStore, PolicyPlace, Samples
from flowkv.observe.metrics import Level
from flowkv.policy.hedge import Hedge
from flowkv.policy.prefetch.prefetcher import RegretGuard
from flowkv.policy.tenants import Tenants
from flowkv.tiers.base import Tier

# What a cache holds at this moment, for whoever asks often: cheap, and without its lock.

BREAKER = ("closed", "half-open", "open")
"""States of a breaker: everything is let through, or one operation that finds out, or nothing."""


def breaker(store: PageStore, number: int) -> str:
    """State of a tier's breaker: its own, if it has one, or else whether it may be asked now."""
    tier: Tier = store.tiers[number]
    own = getattr(tier, "state", None)
    told = str(getattr(own, "value", ""))
    if told in BREAKER:
        return told
    return "closed" if store.answers(number) else "open"


def tier_levels(store: PageStore, number: int) -> Iterator[Level]:
    """Levels and counts of a tier, in time that does not depend on how much it holds."""
    lane, labels = store.mover.lanes[number], MappingProxyType({"tier": store.tiers[number].name})
    told, prefetched = _tier(store, number), _prefetch(lane.guard)
    for name, level in _LEVELS.items():
        yield Level(level, told[name], labels)
    yield Level("prefetch_used_bytes_total", prefetched["used_bytes"], labels)
    yield Level("prefetch_wasted_bytes_total", prefetched["wasted_bytes"], labels)
    if prefetched["used_bytes"] or prefetched["wasted_bytes"]:
        yield Level("prefetch_precision", prefetched["precision"], labels)
    for one in BREAKER:
        yield Level("tier_breaker", float(one == told["breaker"]), {**labels, "state": one})


_LEVELS = {
    "used_bytes": "tier_used_bytes",
    "capacity_bytes": "tier_capacity_bytes",
    "answers": "tier_answers",
    "trips": "tier_breaker_trips_total",
    "queued_bytes": "tier_queued_bytes",
    "in_flight_bytes": "tier_in_flight_bytes",
    "loaded_bytes": "tier_loaded_bytes_total",
    "refused": "tier_refused_total",
    "dropped": "tier_dropped_total",
    "unpaid": "tier_unpaid_total",
    "load_bytes_per_s": "tier_load_bytes_per_second",
    "store_bytes_per_s": "tier_store_bytes_per_second",
}
"""What of `_tier` is a level, and under which name."""


def _tier(store: PageStore, number: int) -> dict[str, Any]:
    """Plain numbers about a tier, in time that does not depend on how much it holds."""
    tier, lane = store.tiers[number], store.mover.lanes[number]
    return {
        "kind": tier.kind,
        "engine": getattr(tier, "engine", ""),
        "writable": tier.writable,
        "used_bytes": tier.used_bytes(),
        "capacity_bytes": tier.capacity_bytes,
        "loaded_bytes": store.loaded_bytes[tier.name],
        "stored_bytes": store.stored_bytes[tier.name],
        "refused": store.refused[tier.name],
        "answers": store.answers(number),
        "breaker": breaker(store, number),
        "trips": getattr(tier, "trips", 0),
        "queued_bytes": lane.schedule.queued_bytes,
        "in_flight_bytes": lane.schedule.flying_bytes,
        "dropped": store.dropped[tier.name],
        "unpaid": store.unpaid[tier.name],
        "coalesced": lane.schedule.joined,
        "cancelled": lane.cancelled,
        "load_bytes_per_s": lane.loads.bytes_per_s,
        "load_latency_s": lane.loads.latency_s,
        "store_bytes_per_s": lane.stores.bytes_per_s,
        "store_latency_s": lane.stores.latency_s,
    }


def store_levels(store: PageStore) -> Iterator[Level]:
    """Levels and counts of what a store holds, in time that does not depend on how much that is.

    They are read one after the other while others may work, so that two of them need not fit
    together.
    """
    samples = store.samples
    yield Level("known_pages", len(store.index))
    yield Level("audit_mismatches_total", samples.mismatches)
    yield Level("audit_skipped_total", samples.skipped)
    yield Level("audit_worst", samples.worst)
    for device, pool in list(store.pools.items()):
        labels = MappingProxyType({"device": device})
        yield Level("device_used_bytes", pool.used_bytes(), labels)
        yield Level("device_capacity_bytes", pool.capacity_bytes(), labels)
        yield Level("device_fragmentation", pool.fragmentation(), labels)
    for number in range(len(store.tiers)):
        yield from tier_levels(store, number)


def store_report(
    store: PageStore, tables: Tables, quotas: Iterable[str], *, tiers: bool
) -> dict[str, Any]:
    """Plain numbers about what a store holds, ready for JSON. Callers hold the KV lock.

    Args:
        store: The store.
        tables: Lines of all sequences.
        quotas: Tenants with a quota, in the order of the configuration.
        tiers: Whether they may be asked: not in a forked child.
    """
    report: dict[str, Any] = {"blocks": len(store.index), "devices": {}, "tiers": {}}
    for device, pool in store.pools.items():
        report["devices"][device] = {
            "used_bytes": pool.used_bytes(),
            "capacity_bytes": pool.capacity_bytes(),
            "fragmentation": pool.fragmentation(),
            "codecs": pool.bytes_by_codec(),
            "compression": _compression(store, tables, device),
        }
        if pool.copies is not None:
            staging = {"used_bytes": pool.copies.staged_bytes(), "why_not_pinned": pool.copies.why}
            report["devices"][device]["staging"] = staging
    report["policies"] = {place.name: _policy(place, quotas) for place in store.places}
    report["ghosts"] = len(store.index.ghosts)
    report["audit"] = _audit(store.samples)
    for number, tier in enumerate(store.tiers if tiers else ()):
        blocks = sum(block.tiers >> number & 1 for block in store.index)
        prefetched = _prefetch(store.mover.lanes[number].guard)
        about = {"blocks": blocks, "prefetch": prefetched}
        report["tiers"][tier.name] = _tier(store, number) | about
    return report


def _prefetch(guard: RegretGuard) -> dict[str, Any]:
    """What became of bytes that were brought from a tier before anybody asked for them."""
    known = guard.saved_bytes + guard.wasted_bytes
    return {
        "used_bytes": guard.saved_bytes,
        "wasted_bytes": guard.wasted_bytes,
        "precision": guard.saved_bytes / known if known else 0.0,
        "rests": guard.rests,
    }


def _audit(samples: Samples) -> dict[str, Any]:
    """What came of restored pages that were recomputed."""
    return {
        "share": samples.share,
        "audited": samples.audited,
        "mismatches": samples.mismatches,
        "skipped": samples.skipped,
        "waiting": len(samples),
        "worst": samples.worst,
    }


def _policy(place: PolicyPlace, quotas: Iterable[str]) -> dict[str, Any]:
    """What a place's policy is, and what the tenants with a quota have of the place."""
    policy = place.policy
    report: dict[str, Any] = {"name": policy.name, "digest": f"{policy.digest():016x}"}
    if isinstance(policy, Hedge):
        report["chosen"] = policy.chosen
    if isinstance(policy, Tenants):
        used = {name: policy.used_bytes(n) for n, name in enumerate(quotas)}
        report["quotas"] = {name: {"used_bytes": n} for name, n in used.items()}
    return report


def _compression(store: PageStore, tables: Tables, device: str) -> float:
    """Bytes that a device's pages would take if all were raw, over those that they take."""
    raw = taken = 0
    for g, group in enumerate(store.geometry.groups):
        if group.device == device:
            pages = {page for page in tables.pages[g].ravel().tolist() if page >= 0}
            pages |= {block.page for block in store.blocks_on(device) if block.group == g}
            raw += len(pages) * store.page_bytes(g)
            taken += sum(store.forms[g].of(page).page_bytes for page in pages)
    return raw / taken if taken else 1.0
