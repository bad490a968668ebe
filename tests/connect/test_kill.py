"""`kill -9` of a process that stores through a keeper: what it confirmed and kept is there."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowkv.connect import Keeper
from flowkv.policy import make_policy
from flowkv.tiers.disk import DiskTier
from tests.tiers.frames import key_of
from tests.tiers.victim import CAPACITY_BYTES, forking, found, kill_once

from .victim import NAMES

Server = subprocess.Popen[bytes]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with forking("tests.connect.victim") as process:
        yield process


def kills(server: Server, directory: Path, points: int, seed: int) -> tuple[int, int]:
    """Kills again and again in one directory; frames checked, and lines said."""
    rng, checked, said, must = random.Random(seed), 0, 0, set[int]()
    for point in range(points):
        said += kill_once(server, directory, point, rng.uniform(0.001, 0.06), must)
        with Keeper([DiskTier(directory, CAPACITY_BYTES)], lambda *_: make_policy("lru")) as keeper:
            (level,) = keeper.levels
            there = found(keeper.caller(), NAMES)
            assert must <= there, f"lost {sorted(must - there)} at point {point}"
            assert set(level.book) == {key_of(name) for name in there}
            assert level.tier.used_bytes() <= CAPACITY_BYTES
        checked, must = checked + len(there), there
    return checked, said


def test_what_was_confirmed_and_kept_survives(server: Server, tmp_path: Path) -> None:
    checked, said = kills(server, tmp_path / "kv", 25, seed=1)
    assert checked > 200
    assert said > 25  # of a loaded machine, too


@pytest.mark.deep
@pytest.mark.timeout(3600)
def test_five_hundred_times(server: Server, tmp_path: Path) -> None:
    kills(server, tmp_path / "kv", 500, seed=2)
