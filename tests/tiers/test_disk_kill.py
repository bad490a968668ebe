"""F1: a real `kill -9` at any moment: everything acknowledged is found, with its bytes."""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowkv.tiers.disk import DiskTier

from .frames import key_of
from .victim import CAPACITY_BYTES, NAMES, forking, found, kill_once

Server = subprocess.Popen


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with forking("tests.tiers.victim") as process:
        yield process


def disk_bytes(directory: Path) -> int:
    return sum(os.stat(path).st_blocks * 512 for path in [directory, *directory.iterdir()])


def kills(server: Server, directory: Path, points: int, seed: int) -> tuple[int, int, float]:
    """Kills again and again in one directory: frames checked, lines said, slowest reopening."""
    DiskTier(directory.parent / "first", CAPACITY_BYTES, threads=0).close()  # loads the engine
    rng, checked, said, slowest_s = random.Random(seed), 0, 0, 0.0
    there: set[int] = set()
    for point in range(points):
        after_s = rng.uniform(0.001, 0.06)
        must = set(there)
        lines = kill_once(server, directory, point, after_s, must)
        start_s = time.process_time()  # others may use this machine
        tier = DiskTier(directory, CAPACITY_BYTES, threads=0)
        slowest_s = max(slowest_s, time.process_time() - start_s)
        assert tier.writable, "the lock outlived its owner"
        assert disk_bytes(directory) <= CAPACITY_BYTES
        there = found(tier, NAMES)
        assert must <= there, f"lost {sorted(must - there)} at point {point}"
        assert {entry.key for entry in tier.scan()} == {key_of(name) for name in there}
        assert tier.corrupt == 0
        tier.close()
        checked, said = checked + len(there), said + lines
    return checked, said, slowest_s


def test_F1_kill(server: Server, tmp_path: Path) -> None:
    checked, said, slowest_s = kills(server, tmp_path / "kv", 100, seed=1)
    assert checked > 1000
    assert said > 1000
    assert slowest_s < 10


@pytest.mark.deep
@pytest.mark.timeout(7200)
def test_F1_kill_deep(server: Server, tmp_path: Path) -> None:
    _, _, slowest_s = kills(server, tmp_path / "kv", 10_000, seed=2)
    assert slowest_s < 10
