"""Builds what a cache stands on, from its configuration: device pools and the tiers below them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from flowkv.core.clock import Clock
from flowkv.core.config import Config
from flowkv.core.geometry import Geometry
from flowkv.core.keys import Shard
from flowkv.core.sizes import Place
from flowkv.policy.rates import Rates
from flowkv.runtime.forms import make_forms
from flowkv.runtime.pinned import open_copies
from flowkv.runtime.pool import PagePool
from flowkv.runtime.streams import CudaStreams
from flowkv.tiers import Envelope, open_tier
from flowkv.tiers.base import UNBOUNDED, Tier
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
        from flowkv.tiers.keyring import Keyring

        keyring = Keyring(config.secret_bytes)
    if config.lossless == "auto":
        from flowkv.tiers.lossless import Lossless

        lossless = Lossless(lambda: rates.bytes_per_s)
    return Envelope(integrity=config.integrity, keyring=keyring, lossless=lossless)


def _total_bytes(place: Place) -> int:
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
