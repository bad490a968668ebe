"""Every tier against the dict model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from flowkv import Tier
from flowkv.testing import FlakyTier, MemoryTier, check_tier
from flowkv.tiers.disk import DiskTier
from tests.conftest import examples
from tests.inside import Faults, HostTier

from .faulty import FastFiles
from .files_engine import tier_over


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


def disks(directory: Path, **options: Any) -> tuple[Callable[[int], Tier], Callable[[Tier], Tier]]:
    """A factory of empty disk tiers, and what closes one and opens it again."""
    numbers = itertools.count()
    files = options.pop("files", None)
    make = partial(tier_over, files) if files else DiskTier

    def fresh(capacity_bytes: int) -> Tier:
        return make(directory / str(next(numbers)), capacity_bytes, **options)

    def reopen(tier: Tier) -> Tier:
        assert isinstance(tier, DiskTier)
        tier.close()
        return make(tier.name.removeprefix("disk:"), tier.capacity_bytes, **options)

    return fresh, reopen


def reader(tier: Tier) -> Tier:
    """A second handle of a disk tier's directory, as another process has it."""
    with pytest.warns(UserWarning, match="another cache of this process"):
        return DiskTier(tier.name.removeprefix("disk:"), tier.capacity_bytes)


def flip(tier: Tier, number: int) -> None:
    """Turns a bit of a slab file or of the journal."""
    directory = Path(tier.name.removeprefix("disk:"))
    files = sorted(p for p in directory.iterdir() if p.name.startswith(("slab", "journal")))
    path = files[number % len(files)]
    at = number // 7 % max(1, path.stat().st_size)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([(byte or b"\0")[0] ^ 1 << number % 8]))


@pytest.fixture
def briefly() -> Iterator[None]:
    """Fewer examples of a disk, which takes its time."""
    with examples(8):
        yield


@pytest.mark.parametrize("capacity_bytes", [256 << 10, 1 << 20])
def test_disk_tier(tmp_path: Path, capacity_bytes: int, briefly: None) -> None:
    factory, reopen = disks(tmp_path)
    check_tier(factory, reopen=reopen, capacity_bytes=capacity_bytes)


def test_disk_tier_without_threads(tmp_path: Path, briefly: None) -> None:
    factory, reopen = disks(tmp_path, threads=0, files=FastFiles())
    check_tier(factory, reopen=reopen, capacity_bytes=512 << 10)


def test_disk_tier_and_a_reader(tmp_path: Path, briefly: None) -> None:
    factory, reopen = disks(tmp_path)
    check_tier(factory, reopen=reopen, peer=reader, capacity_bytes=512 << 10)


def test_damaged_disk_tier(tmp_path: Path, briefly: None) -> None:
    factory, reopen = disks(tmp_path)
    check_tier(factory, reopen=reopen, damage=flip, capacity_bytes=512 << 10)


def test_disk_tier_on_a_device_that_is_waited_for(tmp_path: Path, briefly: None) -> None:
    factory, reopen = disks(tmp_path, durability="sync", threads=0, files=FastFiles())
    check_tier(factory, reopen=reopen, capacity_bytes=512 << 10)
