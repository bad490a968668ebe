"""Every tier against the dict model."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from flowkv.testing.tiers import Faults, FlakyTier, MemoryTier, check_tier
from flowkv.tiers.base import Tier
from flowkv.tiers.disk import DiskTier
from flowkv.tiers.host import HostTier


def test_memory_tier() -> None:
    check_tier(MemoryTier, capacity_bytes=1 << 20)


def test_small_memory_tier_is_full_often() -> None:
    check_tier(MemoryTier, capacity_bytes=3 << 12)


def test_host_tier() -> None:
    check_tier(HostTier, capacity_bytes=1 << 20)


def test_small_host_tier_is_full_often() -> None:
    check_tier(HostTier, capacity_bytes=3 << 12)


def test_flaky_tier_never_lies() -> None:
    faults = Faults(fail=0.2, lose=0.1, flip=0.2, latency_s=0.001)
    check_tier(lambda n: FlakyTier(HostTier(n), 7, faults), lossy=True)


def disks(directory: Path) -> tuple[Callable[[int], Tier], Callable[[Tier], Tier]]:
    """A factory of empty disk tiers, and what closes one and opens it again."""
    numbers = itertools.count()

    def fresh(capacity_bytes: int) -> Tier:
        return DiskTier(directory / str(next(numbers)), capacity_bytes)

    def reopen(tier: Tier) -> Tier:
        assert isinstance(tier, DiskTier)
        tier.close()
        return DiskTier(tier.name.removeprefix("disk:"), tier.capacity_bytes)

    return fresh, reopen


@pytest.mark.parametrize("capacity_bytes", [256 << 10, 1 << 20])
def test_disk_tier(tmp_path: Path, capacity_bytes: int) -> None:
    factory, reopen = disks(tmp_path)
    check_tier(factory, reopen=reopen, capacity_bytes=capacity_bytes)
