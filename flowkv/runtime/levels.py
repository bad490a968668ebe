"""What a cache holds at this moment, for whoever asks often: cheap, and without its lock."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from flowkv.observe.rules import Kind, Level
from flowkv.runtime.opening import Opening
from flowkv.runtime.store import Store
from flowkv.tiers.base import Tier

BREAKER = ("closed", "half-open", "open")
"""States of a breaker: everything is let through, or one operation that finds out, or nothing."""


def levels(kv: Opening) -> Iterator[Level]:
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


def source(kv: Opening) -> Callable[[], list[Level]]:
    """What reads `levels` of a cache again and again, without keeping the cache alive."""
    ref = weakref.ref(kv)

    def read() -> list[Level]:
        there = ref()
        return list(levels(there)) if there is not None else []

    return read


def breaker(store: Store, number: int) -> str:
    """State of a tier's breaker: its own, if it has one, or else whether it may be asked now."""
    tier: Tier = store.tiers[number]
    own = getattr(tier, "state", None)
    told = str(getattr(own, "value", ""))
    if told in BREAKER:
        return told
    return "closed" if store.answers(number) else "open"


def _tier(store: Store, number: int) -> Iterator[Level]:
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
