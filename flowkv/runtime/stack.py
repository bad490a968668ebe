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
from flowkv.core.sizes import Place
from flowkv.runtime.forms import make_forms
from flowkv.runtime.pool import PagePool
from flowkv.tiers import open_tier
from flowkv.tiers.base import Tier


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
        pools[device] = PagePool(device, size, granules, least_slabs=4 * codecs)
    return pools


def open_tiers(config: Config, given: Sequence[Tier], clock: Clock, *, on_cpu: bool) -> list[Tier]:
    """The tiers of the configuration, then those given as objects.

    Raises:
        ConfigError: A kind of tier is not available.
        StoreError: A directory cannot be used.
    """
    tiers: list[Tier] = []
    try:
        for place in config.places(on_cpu=on_cpu)[1:]:
            tiers.append(
                open_tier(
                    place.kind,
                    path=place.path,
                    capacity_bytes=place.size_bytes(_total_bytes(place)) or 0,
                    exclusive=config.exclusive,
                    durability=config.durability,
                    clock=clock,
                )
            )
    except BaseException:
        for tier in tiers:
            tier.close()
        raise
    return [*tiers, *given]


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
