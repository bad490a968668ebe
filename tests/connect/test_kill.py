"""`kill -9` of a process that stores through a keeper: what it confirmed and kept is there."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowkv.connect import Keeper
from flowkv.policy import make_policy
from flowkv.tiers import Load, Outcome
from flowkv.tiers.disk import DiskTier
from tests.tiers.frames import LAYOUT, answers, body_of, key_of
from tests.tiers.victim import CAPACITY_BYTES, kill_once, size_of

from .victim import NAMES

Server = subprocess.Popen[bytes]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    command = [sys.executable, "-m", "tests.connect.victim"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.kill()


def found(keeper: Keeper) -> set[int]:
    """Names that are verified hits; their bytes must be right, and all must be answered."""
    caller, targets = keeper.caller(), [bytearray(size_of(name)) for name in range(NAMES)]
    items = [Load(key_of(name), memoryview(target), LAYOUT) for name, target in enumerate(targets)]
    there = set()
    for answer in answers(caller, caller.submit_load(items), NAMES):
        assert (answer.outcome, answer.reason) in ((Outcome.HIT, ""), (Outcome.MISS, ""))
        if answer.outcome is Outcome.HIT:
            assert targets[answer.item] == body_of(answer.item, size_of(answer.item)), "WRONG BYTES"
            there.add(answer.item)
    return there


def kills(server: Server, directory: Path, points: int, seed: int) -> tuple[int, int]:
    """Kills again and again in one directory; frames checked, and lines said."""
    rng, checked, said, must = random.Random(seed), 0, 0, set[int]()
    for point in range(points):
        said += kill_once(server, directory, point, rng.uniform(0.001, 0.06), must)
        with Keeper([DiskTier(directory, CAPACITY_BYTES)], lambda *_: make_policy("lru")) as keeper:
            (level,) = keeper.levels
            there = found(keeper)
            assert must <= there, f"lost {sorted(must - there)} at point {point}"
            assert set(level.book) == {key_of(name) for name in there}
            assert level.tier.used_bytes() <= CAPACITY_BYTES
        checked, must = checked + len(there), there
    return checked, said


def test_what_was_confirmed_and_kept_survives(server: Server, tmp_path: Path) -> None:
    checked, said = kills(server, tmp_path / "kv", 25, seed=1)
    assert checked > 200
    assert said > 200


@pytest.mark.deep
@pytest.mark.timeout(3600)
def test_five_hundred_times(server: Server, tmp_path: Path) -> None:
    kills(server, tmp_path / "kv", 500, seed=2)
