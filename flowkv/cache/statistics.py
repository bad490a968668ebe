"""What `KV.stats` reports."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from flowkv.cache.facade import Cache
from flowkv.cache.sequence import Tables
from flowkv.cache.store import PageStore, PolicyPlace, Samples
from flowkv.observe.metrics import Kind, Level
from flowkv.policy.hedge import Hedge
from flowkv.policy.prefetch.prefetcher import RegretGuard
from flowkv.policy.tenants import Tenants
from flowkv.tiers.base import Tier

# What a cache holds at this moment, for whoever asks often: cheap, and without its lock.

BREAKER = ("closed", "half-open", "open")
"""States of a breaker: everything is let through, or one operation that finds out, or nothing."""


def levels(kv: Cache) -> Iterator[Level]:
    """Levels and counts of a cache, in time that does not depend on how much it holds.

    They are read one after the other while others may work, so that two of them need not fit
    together. Nothing comes from a cache that is closed.

    Args:
        kv: The cache.
    """
    planner = kv.planner
    if kv.closed:
        return
    # What was opened in vain is taken out again: these wait until they grow beyond it. The present
    # value is read before the one that it may give way to, so that no correction slips between.
    yield Level("tokens_seen_total", max(kv.tokens_seen, kv.seen_most), kind="counter")
    yield Level("tokens_reused_total", max(kv.tokens_reused, kv.reused_most), kind="counter")
    yield Level("open_sequences", len(kv._open))
    if planner is None:
        return
    store = planner.store
    samples = store.samples
    yield Level("known_pages", len(store.index))
    yield Level("audit_mismatches_total", samples.mismatches, kind="counter")
    yield Level("audit_skipped_total", samples.skipped, kind="counter")
    yield Level("audit_worst", samples.worst)
    for device, pool in list(store.pools.items()):
        labels = MappingProxyType({"device": device})
        yield Level("device_used_bytes", pool.used_bytes(), labels)
        yield Level("device_capacity_bytes", pool.capacity_bytes(), labels)
        yield Level("device_fragmentation", pool.fragmentation(), labels)
    for number in range(len(store.tiers)):
        yield from _tier(store, number)


def source(kv: Cache) -> Callable[[], list[Level]]:
    """What reads `levels` of a cache again and again, without keeping the cache alive."""
    ref = weakref.ref(kv)

    def read() -> list[Level]:
        there = ref()
        return list(levels(there)) if there is not None else []

    return read


def breaker(store: PageStore, number: int) -> str:
    """State of a tier's breaker: its own, if it has one, or else whether it may be asked now."""
    tier: Tier = store.tiers[number]
    own = getattr(tier, "state", None)
    told = str(getattr(own, "value", ""))
    if told in BREAKER:
        return told
    return "closed" if store.answers(number) else "open"


def _tier(store: PageStore, number: int) -> Iterator[Level]:
    tier, lane = store.tiers[number], store.mover.lanes[number]
    labels: Mapping[str, str] = MappingProxyType({"tier": tier.name})
    prefetched = lane.guard.saved_bytes, lane.guard.wasted_bytes
    told: list[tuple[str, float, Kind]] = [
        ("tier_used_bytes", tier.used_bytes(), "gauge"),
        ("tier_capacity_bytes", tier.capacity_bytes, "gauge"),
        ("tier_answers", float(store.answers(number)), "gauge"),
        ("tier_breaker_trips_total", getattr(tier, "trips", 0), "counter"),
        ("tier_queued_bytes", lane.schedule.queued_bytes, "gauge"),
        ("tier_in_flight_bytes", lane.schedule.flying_bytes, "gauge"),
        ("tier_loaded_bytes_total", store.loaded_bytes.get(tier.name, 0), "counter"),
        ("tier_refused_total", store.refused.get(tier.name, 0), "counter"),
        ("tier_dropped_total", store.dropped.get(tier.name, 0), "counter"),
        ("tier_unpaid_total", store.unpaid.get(tier.name, 0), "counter"),
        ("tier_load_bytes_per_second", lane.loads.bytes_per_s, "gauge"),
        ("tier_store_bytes_per_second", lane.stores.bytes_per_s, "gauge"),
        ("prefetch_used_bytes_total", prefetched[0], "counter"),
        ("prefetch_wasted_bytes_total", prefetched[1], "counter"),
    ]
    for name, value, kind in told:
        yield Level(name, value, labels, kind)
    if any(prefetched):
        yield Level("prefetch_precision", prefetched[0] / sum(prefetched), labels)
    state = breaker(store, number)
    for one in BREAKER:
        yield Level("tier_breaker", float(one == state), {**labels, "state": one})


def statistics(kv: Cache) -> dict[str, Any]:
    """Plain numbers about a cache, ready for JSON. Callers hold the KV lock.

    In a forked child, those of the parent at that moment, without its tiers.
    """
    seen, reused = kv.tokens_seen, kv.tokens_reused
    report: dict[str, Any] = {
        "tokens_seen": seen,
        "tokens_reused": reused,
        "hit_rate": reused / seen if seen else 0.0,
        "hits": _hits(kv),
        "tenants": kv.tenants.report(),
        "sequences": len(kv._open),
        "blocks": 0,
        "devices": {},
        "tiers": {},
        "policies": {},
        "prefetch": {},
        "ghosts": 0,
        "audit": {},
        "events": kv.metrics.snapshot(),
    }
    if kv.planner is None:
        return report
    store = kv.planner.store
    report["blocks"] = len(store.index)
    for device, pool in store.pools.items():
        report["devices"][device] = {
            "used_bytes": pool.used_bytes(),
            "capacity_bytes": pool.capacity_bytes(),
            "fragmentation": pool.fragmentation(),
            "codecs": pool.bytes_by_codec(),
            "compression": _compression(store, kv.planner.tables, device),
        }
        if pool.copies is not None:
            staging = {"used_bytes": pool.copies.staged_bytes(), "why_not_pinned": pool.copies.why}
            report["devices"][device]["staging"] = staging
    report["policies"] = {place.name: _policy(kv, place) for place in store.places}
    foresight = kv.planner.foresight
    report["prefetch"] = foresight.report() if foresight is not None else {}
    report["ghosts"] = len(store.index.ghosts)
    report["audit"] = _audit(store.samples)
    for number, tier in enumerate(() if kv.inherited else store.tiers):
        lane = store.mover.lanes[number]
        report["tiers"][tier.name] = {
            "kind": tier.kind,
            "engine": getattr(tier, "engine", ""),
            "writable": tier.writable,
            "used_bytes": tier.used_bytes(),
            "capacity_bytes": tier.capacity_bytes,
            "blocks": sum(block.tiers >> number & 1 for block in store.index),
            "loaded_bytes": store.loaded_bytes.get(tier.name, 0),
            "stored_bytes": store.stored_bytes.get(tier.name, 0),
            "refused": store.refused.get(tier.name, 0),
            "answers": store.answers(number),
            "breaker": breaker(store, number),
            "trips": getattr(tier, "trips", 0),
            "queued_bytes": lane.schedule.queued_bytes,
            "in_flight_bytes": lane.schedule.flying_bytes,
            "dropped": store.dropped.get(tier.name, 0),
            "unpaid": store.unpaid.get(tier.name, 0),
            "prefetch": _prefetch(lane.guard),
            "coalesced": lane.schedule.joined,
            "cancelled": lane.cancelled,
            "load_bytes_per_s": lane.loads.bytes_per_s,
            "load_latency_s": lane.loads.latency_s,
            "store_bytes_per_s": lane.stores.bytes_per_s,
            "store_latency_s": lane.stores.latency_s,
        }
    return report


def _hits(kv: Cache) -> dict[str, float]:
    """Share of all prompt tokens that each place had."""
    found = kv.metrics.by("hit_tokens_total", "tier")
    known = sum(found.values()) + kv.metrics.total("miss_tokens_total")
    return {tier: tokens / known for tier, tokens in found.items() if known}


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


def _policy(kv: Cache, place: PolicyPlace) -> dict[str, Any]:
    """What a place's policy is, and what the tenants with a quota have of the place."""
    policy = place.policy
    report: dict[str, Any] = {"name": policy.name, "digest": f"{policy.digest():016x}"}
    if isinstance(policy, Hedge):
        report["chosen"] = policy.chosen
    if isinstance(policy, Tenants):
        used = {name: policy.used_bytes(n) for n, name in enumerate(kv.config.quotas)}
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
