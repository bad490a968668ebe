"""Builds what a cache stands on: device pools, the tiers below them, and what policies learned."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec
import torch
import xxhash

from flowkv.cache.pinned import CudaStreams, open_copies
from flowkv.cache.pool import PagePool, make_forms
from flowkv.cache.store import PolicyPlace
from flowkv.core.clock import Clock
from flowkv.core.config import Config, TierConfig
from flowkv.core.errors import ConfigError
from flowkv.core.geometry import Geometry
from flowkv.core.keys import Shard
from flowkv.policy.rates import Rates
from flowkv.tiers import Envelope, open_tier
from flowkv.tiers.base import UNBOUNDED, Tier
from flowkv.tiers.disk.files import FileIO, read_file, replace_file
from flowkv.tiers.disk.home import LEARNED
from flowkv.tiers.sharded import ShardedTier


def open_pools(geometry: Geometry, config: Config) -> dict[str, PagePool]:
    """One page pool per device of the geometry.

    Raises:
        CapacityError: A pool is too small for a few pages.
        ConfigError: A group's pages cannot have the codec.
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
        total = _memory_bytes() if on_cpu else _device_bytes(device)
        size, codecs = place.size_bytes(total) or 0, max(len(found.layouts) for found in forms)
        pool = pools[device] = PagePool(device, size, granules, least_slabs=4 * codecs)
        if pool.device.type == "cuda":
            pool.copies = open_copies(CudaStreams(pool.device), pool.arena)
    return pools


def open_tiers(
    config: Config,
    given: Sequence[Tier],
    clock: Clock,
    rates: dict[str, Rates],
    *,
    on_cpu: bool,
) -> list[Tier]:
    """The tiers of the configuration, then those given as objects.

    Args:
        config: Which tiers, and how their frames are checked and compressed.
        given: Tiers that are open.
        clock: Source of time.
        rates: Gets an entry for each tier of the configuration, whose measured rate decides
            whether its frames are compressed.
        on_cpu: Whether the layers compute on the CPU.

    Raises:
        ConfigError: A kind of tier is unknown, or too small.
        MissingDependencyError: A tier, or encryption, needs an extra that is not installed.
        StoreError: A directory or an engine cannot be used.
    """
    tiers: list[Tier] = []
    try:
        for place in config.places(on_cpu=on_cpu)[1:]:
            loads = Rates()
            tier = open_tier(
                place.kind,
                path=place.path,
                capacity_bytes=place.size_bytes(_total_bytes(place)) or UNBOUNDED,
                exclusive=config.exclusive,
                durability=config.durability,
                envelope=make_envelope(config, loads) if place.kind != "host" else None,
                clock=clock,
            )
            tiers.append(tier)
            rates[tier.name] = loads
    except BaseException:
        for tier in tiers:
            tier.close()
        raise
    return [*tiers, *given]


def divided(tiers: Sequence[Tier], geometry: Geometry, shard: Shard | None) -> list[Tier]:
    """The tiers as one rank of a tensor-parallel model sees them; private memory as it is.

    Args:
        tiers: The stack.
        geometry: Of the whole model.
        shard: Which rank; None if the model is in one piece, and nobody else's pieces are read.

    Raises:
        ConfigError: The shard names other heads than the rank holds.
    """
    if shard is None:
        return list(tiers)
    return [
        ShardedTier(tier, geometry, shard) if tier.kind != "host" or tier.shared else tier
        for tier in tiers
    ]


def make_envelope(config: Config, loads: Rates | None = None) -> Envelope:
    """How frames outside this process are wrapped.

    Args:
        config: Says how.
        loads: What loads take where they lie; without, all that shrinks is compressed.

    Raises:
        MissingDependencyError: Encryption needs an extra that is not installed.
    """
    rates = loads or Rates()
    keyring = lossless = None
    if config.integrity == "aead":
        from flowkv.tiers.envelope import Keyring

        keyring = Keyring(config.secret_bytes)
    if config.lossless == "auto":
        from flowkv.tiers.lossless import Lossless

        lossless = Lossless(lambda: rates.bytes_per_s)
    return Envelope(integrity=config.integrity, keyring=keyring, lossless=lossless)


def _total_bytes(place: TierConfig) -> int:
    if place.kind != "disk":
        return _memory_bytes()
    path = Path(place.path).expanduser().absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).total


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _device_bytes(device: str) -> int:
    return int(torch.cuda.get_device_properties(torch.device(device)).total_memory)


# What policies learned, kept in a small file within a disk tier's directory.
#
# Models only: how soon conversations go on, after what kind of turn. No block, no key, no tenant
# and no time is in it; which pages lie where is the tiers' own business.
#
#     16 bytes xxh3_128 of what follows | MessagePack: version, and a model for each kind of place

VERSION = 1
_CHECK_BYTES, _MOST_BYTES = 16, 1 << 24


@runtime_checkable
class Learner(Protocol):
    """A policy that can begin with what another one of its kind learned."""

    def save_model(self) -> bytes:
        """What it learned."""
        ...

    def load_model(self, saved: bytes) -> None:
        """Begins with it, weakly: what is observed soon counts more."""
        ...


class _File(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    models: dict[str, bytes]


def save(directory: Path, places: Iterable[PolicyPlace]) -> bool:
    """Writes what the policies of places learned; the file appears whole or not at all.

    Args:
        directory: Of a disk tier, which this process owns.
        places: Whose policies.

    Returns:
        Whether there was anything to write.

    Raises:
        OSError: It cannot be written.
    """
    models = {name: learner.save_model() for name, learner in _learners(places).items()}
    if not models:
        return False
    body = msgspec.msgpack.encode(_File(VERSION, models))
    replace_file(FileIO(), str(directory / LEARNED), xxhash.xxh3_128_digest(body) + body)
    return True


def load(directory: Path, places: Iterable[PolicyPlace]) -> int:
    """Has policies begin with what was learned before; returns how many do.

    Raises:
        ConfigError: The file is damaged, of another version, or a model does not fit its policy.
        OSError: It cannot be read, or is no file of ours.
    """
    path = directory / LEARNED
    try:
        raw = read_file(FileIO(), str(path), _MOST_BYTES, ours=True)
    except FileNotFoundError:
        return 0
    body = raw[_CHECK_BYTES:]
    if len(raw) > _MOST_BYTES or xxhash.xxh3_128_digest(body) != raw[:_CHECK_BYTES]:
        raise ConfigError(f"{path} is damaged, or no such file", "Delete it")
    try:
        found = msgspec.msgpack.decode(body, type=_File)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is of another version ({error})", "Delete it") from None
    if found.version != VERSION:
        raise ConfigError(f"{path} is of version {found.version}", "Delete it")
    learners = _learners(places)
    started = 0
    for name in learners.keys() & found.models.keys():
        learners[name].load_model(found.models[name])
        started += 1
    return started


def _learners(places: Iterable[PolicyPlace]) -> dict[str, Learner]:
    """The policies that learn, by the kind of their place, its number in it, and their name."""
    found: dict[str, Learner] = {}
    counts: dict[str, int] = {}
    for place in places:
        number = counts[place.kind] = counts.get(place.kind, 0) + 1
        if isinstance(place.policy, Learner):
            found[f"{place.kind}/{number}/{place.policy.name}"] = place.policy
    return found
