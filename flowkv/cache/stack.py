"""The stack below a cache: page pools and tiers, learned policy models, statistics, and its end.

The end of a cache that was not closed: at the end of the process, or with its last reference.

Queued pages are then written for at most `exit_s` seconds; one line on stderr counts the others.
An `Ending` refers to the store and the lock, but not to the cache, which may be collected any time.
The garbage collector may run in the middle of any change: it only queues the ending for a thread,
which writes.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import hashlib
import os
import platform
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from multiprocessing import parent_process
from multiprocessing.util import Finalize
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import torch
import xxhash

from flowkv.cache.pinned import CudaStreams, open_copies
from flowkv.cache.pool import PagePool, make_forms
from flowkv.cache.sequence import Guard, Tables
from flowkv.cache.store import PageStore
from flowkv.cache.tier_stack import TierStack
from flowkv.core.config import Config
from flowkv.core.errors import ConfigError
from flowkv.core.files import MALFORMED
from flowkv.core.geometry import Geometry
from flowkv.core.keys import Namespace
from flowkv.core.reaper import REAPER
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


_now_s = time.monotonic  # this clock does not stop during compilation


class Ending:
    """Writer of a cache's queued pages when the cache is collected, or the process ends.

    Args:
        kv: The cache, referenced weakly.
        store: Its pages and tiers.
        lock: The KV lock.
        exit_s: Longest time for writing.
        given: Tiers that were passed as objects: only `KV.close` closes them.
        over: Returns whether the model that a cache was attached to is gone, or was detached.
        prepare: Proves pages and saves models; returns False if a time of `time.monotonic` came
            before all pages were proven.
    """

    def __init__(
        self,
        kv: Any,
        store: PageStore,
        lock: Guard,
        exit_s: float,
        *,
        given: Iterable[Any],
        over: Callable[[Any], bool],
        prepare: Callable[[Any, float], bool],
    ) -> None:
        self._store, self._lock, self.exit_s, self._pid = store, lock, exit_s, os.getpid()
        self._over, self._prepare, self._lost = over, prepare, 0
        self._given = set(map(id, given))
        self._finalizer = weakref.finalize(kv, REAPER.put, self.end)
        self._finalizer.atexit = False
        _ENDINGS.add(self)
        REAPER.start()
        _end_with(self._pid)

    @property
    def kv(self) -> Any:
        """The cache; None once it is gone."""
        found = self._finalizer.peek()
        return found[0] if found else None

    @property
    def over(self) -> bool:
        """Return whether the cache is gone, or detached from its model."""
        kv = self.kv
        return kv is None or self._over(kv)

    @property
    def inherited(self) -> bool:
        """Return whether the process was forked since: then the parent process writes."""
        return os.getpid() != self._pid

    def cancel(self) -> None:
        """Unregister the ending: the cache is closed, or has another store."""
        self._finalizer.detach()
        _ENDINGS.discard(self)

    def begin(self, end_s: float) -> int:
        """Prove pages and send them to the tiers; return the pages that are not proven in time."""
        kv, proven, self._lost = self.kv, True, self._store.stack.lost
        with contextlib.suppress(Exception):
            proven = kv is None or self._prepare(kv, end_s)
        with self._lock.within(end_s - _now_s()) as held, contextlib.suppress(Exception):
            if held and _now_s() < end_s:
                self._store.writes.write_chosen(self._store.index)
                self._store.writes.drain()
        return 0 if proven else self._store.writes.unproven

    def write(self, end_s: float) -> int:
        """Wait until all pages are written, or until `end_s`; return the pages that are not.

        Tiers that rest are tried once more.
        """
        with self._lock.within(end_s - _now_s()) as held, contextlib.suppress(Exception):
            if held and _now_s() < end_s:
                for lane in self._store.stack.mover.lanes:
                    lane.rest(0.0)
                self._store.writes.flush(end_s - _now_s(), _now_s)
        return self._store.stack.lost - self._lost + self._store.writes.unsaved

    def finish(self, lost: int) -> None:
        """Write the pages that still wait; one line counts those not written or lost.

        Args:
            lost: The number of pages that were lost before the end began, see `TierStack.lost`.
        """
        self._lost = lost
        _tell(self.write(_now_s() + self.exit_s), self.exit_s)

    def end(self) -> None:
        """Write the queued pages of a collected cache, and release its tiers and pools."""
        if self.inherited or self not in _ENDINGS:
            return
        with ExitStack() as last:  # an error in one of these calls does not skip the others
            last.callback(self.cancel)
            for tier in self._store.stack.tiers:
                if self._given.isdisjoint((id(tier), id(getattr(tier, "inner", tier)))):
                    last.callback(tier.close)
            last.callback(self._store.stack.erasure_logs.close)
            last.callback(self._store.stack.mover.cancel)
            end_s = _now_s() + self.exit_s
            self.begin(end_s)
            _tell(self.write(end_s), self.exit_s)

    def cede(self, directory: str) -> None:
        """Write the queued pages, then release a directory so that another cache can own it."""
        end_s = _now_s() + self.exit_s
        self.begin(end_s)
        self.write(end_s)
        for tier in self._owning(directory):
            self._store.stack.troubles[tier.name] = ""  # no reason for a warning
            tier.cede(max(end_s - _now_s(), 0.0))

    def owns(self, directory: str) -> bool:
        """Return whether a tier of the cache writes to a directory."""
        return not self.inherited and bool(self._owning(directory))

    def _owning(self, directory: str) -> list[Any]:
        found = list[Any]()
        for tier in self._store.stack.tiers:
            disk: Any = tier
            with contextlib.suppress(OSError):
                if hasattr(disk, "cede") and disk.writable:
                    found += [disk] if os.path.samefile(disk.path, directory) else []
        return found


_ENDINGS: set[Ending] = set()


@functools.cache
def _end_with(pid: int) -> None:
    """Register `_exit` in a process of `multiprocessing`, which ends without `atexit` calls."""
    if parent_process() is not None:
        Finalize(None, _exit, exitpriority=0)


def make_way(directories: Iterable[str]) -> None:
    """Release directories that collected or detached caches of this process still own.

    Args:
        directories: Directories that another cache is about to open.
    """
    for directory in directories:
        owners = [one for one in list(_ENDINGS) if one.owns(directory)]
        if not all(one.over for one in owners):
            gc.collect()  # the cache may be garbage that is not collected yet
        if any(one.kv is None for one in owners):
            REAPER.join(max(one.exit_s for one in owners))
        for one in owners:
            if one.over and one.owns(directory):
                one.cede(directory)


def _tell(lost: int, exit_s: float) -> None:
    if lost:
        with contextlib.suppress(Exception):  # stderr may be closed, or None
            print(
                f"flowkv: {lost} pages were not written by the end (exit_s={exit_s:g}): they are"
                " computed anew. Call kv.flush() or kv.close() while tiers answer, or raise exit_s",
                file=sys.stderr,
            )


@atexit.register
def _exit() -> None:
    """Write the queued pages of all caches, concurrently."""
    mine, begun_s = [one for one in list(_ENDINGS) if not one.inherited], _now_s()
    lost = 0
    for work in (Ending.begin, Ending.write):
        for one in mine:
            with contextlib.suppress(Exception):
                lost += work(one, begun_s + one.exit_s)
    _tell(lost, max((one.exit_s for one in mine), default=0.0))
    for one in mine:
        one.cancel()
