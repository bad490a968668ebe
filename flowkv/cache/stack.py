"""The stack below a cache: page pools and tiers, learned policy models, and statistics."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import torch
import xxhash

from flowkv.cache.pinned import CudaStreams, open_copies
from flowkv.cache.pool import PagePool, make_forms
from flowkv.cache.sequence import Tables
from flowkv.cache.store import PageStore
from flowkv.cache.tier_stack import TierStack
from flowkv.core.config import Config
from flowkv.core.errors import ConfigError
from flowkv.core.files import MALFORMED
from flowkv.core.geometry import Geometry
from flowkv.core.keys import Namespace
from flowkv.kernels.operands import GPUS
from flowkv.observe.metrics import Level
from flowkv.policy.base import Learner
from flowkv.policy.hedge import Hedge
from flowkv.policy.restore import EarlierRates, LoadGate
from flowkv.policy.tenants import Tenants
from flowkv.policy.warming import Warming, behind
from flowkv.residency.places import PolicyPlace, memory_bytes
from flowkv.tiers.base import Tier, reserved_bytes
from flowkv.tiers.disk.home import LEARNED
from flowkv.tiers.host import HostTier
from flowkv.tiers.io.engine import FileIO, read_file, replace_file


def open_pools(geometry: Geometry, config: Config) -> dict[str, PagePool]:
    """Open one page pool per device of the geometry.

    Raises:
        CapacityError: A pool is too small for a few pages.
        ConfigError: The codec does not support the pages of a group.
    """
    pools, forms = {}, make_forms(geometry, config)
    for device in dict.fromkeys(group.device for group in geometry.groups):
        granules = [
            layout.granules
            for group, found in zip(geometry.groups, forms, strict=True)
            for layout in found.layouts.values()
            if group.device == device
        ]
        on_cpu = torch.device(device).type != "cuda"
        place = config.places(on_cpu=on_cpu)[0]
        total = memory_bytes() if on_cpu else torch.cuda.get_device_properties(device).total_memory
        size, codecs = place.size_bytes(total) or 0, max(len(found.layouts) for found in forms)
        pools[device] = PagePool(device, size, granules, least_slabs=4 * codecs)
    return pools


def link_pools(pools: Iterable[PagePool], tiers: Iterable[Tier]) -> None:
    """Give pools on GPUs a copier of pages that uses the memory of the host tier."""
    slots = next((tier.slots for tier in tiers if isinstance(tier, HostTier)), None)
    for pool in pools:
        if pool.device.type in GPUS:
            pool.copies = open_copies(CudaStreams(pool.device), pool.arena, slots)


def computes(namespace: Namespace, geometry: Geometry) -> str:
    """Return the digest of a model's title and geometry and of this machine's devices.

    Measured compute rates are kept under this name.
    """
    devices = sorted({group.device for group in geometry.groups})
    names = [
        torch.cuda.get_device_name(device)
        if torch.device(device).type == "cuda"
        else f"{platform.machine()} {os.cpu_count()} {torch.get_num_threads()}"
        for device in devices
    ]
    said = "\n".join([namespace.title, namespace.geometry, *names])
    return hashlib.sha256(said.encode()).hexdigest()


# The learned models of policies, in a small file within a disk tier's directory.
#
# The file holds models of how soon conversations continue after each kind of turn, and rates of
# tiers and models, with which the first restore of a process is planned. It holds no block, no key,
# no tenant and no time of day; the tiers themselves record the places of pages.
#
#     16 bytes xxh3_128 of the rest | MessagePack: version, models by kind of place, rates

VERSION = 1
_CHECK_BYTES, _MOST_BYTES = 16, 1 << 24


class _File(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    models: dict[str, bytes]
    rates: EarlierRates = EarlierRates()


def save(directory: Path, places: Iterable[PolicyPlace], gate: LoadGate) -> None:
    """Write the learned models of the places' policies; the file appears whole or not at all.

    Args:
        directory: Directory of a disk tier, which this process owns.
        places: Places of the policies.
        gate: Source of the measured rates.

    Raises:
        OSError: The file cannot be written.
    """
    learned = {name: learner.save_model() for name, learner in _learners(places).items()}
    models = {name: model for name, model in learned.items() if model}
    rates = gate.learned()
    if models or rates.links or rates.computes:
        body = msgspec.msgpack.encode(_File(VERSION, models, rates))
        replace_file(FileIO(), str(directory / LEARNED), xxhash.xxh3_128_digest(body) + body)


def load(directory: Path, places: Iterable[PolicyPlace], gate: LoadGate) -> None:
    """Load saved models into policies and rates into a gate.

    Raises:
        ConfigError: The file is damaged, of another version, or a model does not fit its policy.
        OSError: The file cannot be read, or belongs to another user.
    """
    path = directory / LEARNED
    try:
        raw = read_file(FileIO(), str(path), _MOST_BYTES, ours=True)
    except FileNotFoundError:
        return
    body = raw[_CHECK_BYTES:]
    if len(raw) > _MOST_BYTES or xxhash.xxh3_128_digest(body) != raw[:_CHECK_BYTES]:
        raise ConfigError(f"{path} is damaged, or holds no learned models", "Delete it")
    try:
        found = msgspec.msgpack.decode(body, type=_File)
    except MALFORMED as error:
        raise ConfigError(f"{path} is of another version ({error})", "Delete it") from None
    if found.version != VERSION:
        raise ConfigError(f"{path} is of version {found.version}", "Delete it")
    gate.earlier, learners = found.rates.sane(), _learners(places)
    for name in learners.keys() & found.models.keys():
        learners[name].load_model(found.models[name])


def _learners(places: Iterable[PolicyPlace]) -> dict[str, Learner]:
    """Return the policies that learn, by the kind and number of their place and their name."""
    found: dict[str, Learner] = {}
    counts: dict[str, int] = {}
    for place in places:
        number = counts[place.kind] = counts.get(place.kind, 0) + 1
        if isinstance(place.policy, Learner):
            found[f"{place.kind}/{number}/{place.policy.name}"] = place.policy
    return found


# Current levels of a cache, for frequent reads: cheap, and without its lock.

BREAKER = ("closed", "half-open", "open")
"""States of a breaker: it passes all operations, one that probes the tier, or none."""


def breaker(stack: TierStack, number: int) -> str:
    """Return the state of a tier's breaker; without one, "closed" if the tier is in use."""
    own = getattr(stack.tiers[number], "state", None)
    told = str(getattr(own, "value", ""))
    if told in BREAKER:
        return told
    return "closed" if stack.mover.lanes[number].answering else "open"


def tier_levels(stack: TierStack, number: int) -> Iterator[Level]:
    """Yield levels and counts of a tier, in time that does not depend on its number of pages."""
    told, labels = tier_report(stack, number), MappingProxyType({"tier": stack.tiers[number].name})
    told |= {f"prefetch_{name}": value for name, value in told["prefetch"].items()}
    for name, level in _LEVELS.items():
        yield Level(level, told[name], labels)
    if told["prefetch_used_bytes"] or told["prefetch_wasted_bytes"]:
        yield Level("prefetch_precision", told["prefetch_precision"], labels)
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
    "locked": "tier_locked_frames",
    "dropped": "tier_dropped_total",
    "unpaid": "tier_unpaid_total",
    "declined": "tier_declined_total",
    "load_bytes_per_s": "tier_load_bytes_per_second",
    "store_bytes_per_s": "tier_store_bytes_per_second",
    "prefetch_used_bytes": "prefetch_used_bytes_total",
    "prefetch_wasted_bytes": "prefetch_wasted_bytes_total",
}
"""Name of the level for each field of `tier_report` that is one."""


def tier_report(stack: TierStack, number: int) -> dict[str, Any]:
    """Return statistics of a tier, in time that does not depend on its number of pages."""
    tier, lane = stack.tiers[number], stack.mover.lanes[number]
    early = lane.guard.saved_bytes, lane.guard.wasted_bytes
    report = {
        "kind": tier.kind,
        "engine": getattr(tier, "engine", ""),
        "writable": tier.writable,
        "used_bytes": max(tier.used_bytes() - reserved_bytes(tier), 0),
        "capacity_bytes": tier.capacity_bytes,
        "answers": lane.answering,
        "breaker": breaker(stack, number),
        "trips": getattr(tier, "trips", 0),
        "locked": getattr(tier, "locked", 0),
        "queued_bytes": lane.schedule.queued_bytes,
        "in_flight_bytes": lane.schedule.flying_bytes,
        "coalesced": lane.schedule.joined,
        "cancelled": lane.cancelled,
        "prefetch": {  # bytes that were loaded ahead of a request
            "used_bytes": early[0],
            "wasted_bytes": early[1],
            "precision": early[0] / sum(early) if any(early) else 0.0,
            "rests": lane.guard.rests,
        },
    }
    for counted in ("loaded_bytes", "stored_bytes", "refused", "dropped", "unpaid", "declined"):
        report[counted] = getattr(lane, counted)
    for way, rates in (("load", lane.loads), ("store", lane.stores)):
        report[f"{way}_bytes_per_s"] = rates.bytes_per_s
        report[f"{way}_latency_s"] = rates.latency_s
    return report


def store_levels(store: PageStore) -> Iterator[Level]:
    """Yield levels and counts of a store, in time that does not depend on its number of pages.

    The values are read one after the other while other threads may change them, so they need not
    be consistent with each other.
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
    for number in range(len(store.stack.tiers)):
        yield from tier_levels(store.stack, number)


def store_report(
    store: PageStore, tables: Tables, quotas: Iterable[str], *, tiers: bool
) -> dict[str, Any]:
    """Return statistics of a store, ready for JSON. Callers hold the KV lock.

    Args:
        store: The store.
        tables: Block tables of all sequences.
        quotas: Tenants with a quota, in the order of the configuration.
        tiers: Whether to include the tiers: not in a forked child.
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
        if (copies := pool.copies) is not None:
            staging = {"used_bytes": copies.staged_bytes(), "why_not_pinned": copies.slots.why}
            report["devices"][device]["staging"] = staging
    report["policies"] = {place.name: _policy(place, quotas) for place in store.places}
    report["ghosts"] = len(store.index.ghosts)
    counts = ("share", "audited", "mismatches", "skipped", "worst")
    report["audit"] = {name: getattr(store.samples, name) for name in counts}
    report["audit"]["waiting"] = len(store.samples)
    for number, tier in enumerate(store.stack.tiers if tiers else ()):
        blocks = sum(block.tiers >> number & 1 for block in store.index)
        report["tiers"][tier.name] = tier_report(store.stack, number) | {"blocks": blocks}
    return report


def _policy(place: PolicyPlace, quotas: Iterable[str]) -> dict[str, Any]:
    """Return name and digest of a place's policy, and the bytes of tenants with a quota."""
    report: dict[str, Any] = {"name": place.policy.name, "digest": f"{place.policy.digest():016x}"}
    policy = behind(place.policy)
    if isinstance(policy, Hedge):
        warms = isinstance(place.policy, Warming) and place.policy.plain
        report["chosen"] = "lru" if warms else policy.chosen
    if isinstance(policy, Tenants):
        used = {name: policy.used_bytes(n) for n, name in enumerate(quotas)}
        report["quotas"] = {name: {"used_bytes": n} for name, n in used.items()}
    return report


def _compression(store: PageStore, tables: Tables, device: str) -> float:
    """Return the compression ratio of a device's pages: bytes if all were raw, over bytes used."""
    raw = taken = 0
    for g, group in enumerate(store.geometry.groups):
        if group.device == device:
            pages = {page for page in tables.pages[g].ravel().tolist() if page >= 0}
            pages |= {block.page for block in store.blocks_on(device) if block.group == g}
            raw += len(pages) * store.forms[g].raw.page_bytes
            taken += sum(store.forms[g].layout(page).page_bytes for page in pages)
    return raw / taken if taken else 1.0
