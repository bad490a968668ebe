"""A real `kill -9`, at any moment: everything that was acknowledged is found, with its bytes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from flowkv.tiers.disk import DiskTier

from .frames import hits, key_of
from .victim import CAPACITY_BYTES, NAMES, size_of


def disk_bytes(directory: Path) -> int:
    return sum(os.stat(path).st_blocks * 512 for path in [directory, *directory.iterdir()])


def kill_once(directory: Path, seed: int, after_s: float, before: set[int]) -> tuple[set[int], int]:
    """Lets a victim run for a while; the frames that must be there, and the lines it said."""
    command = [sys.executable, "-m", "tests.tiers.victim", str(directory), str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as victim:
        assert victim.stdout is not None
        assert victim.stdout.readline() == b"= 0\n"
        lines: list[bytes] = []
        reader = threading.Thread(target=lambda: lines.extend(victim.stdout))
        reader.start()
        time.sleep(after_s)
        victim.kill()
        reader.join()
    assert victim.returncode == -9
    there = set(before)
    for line in lines:
        sign, name = line.split()
        if sign == b"+":
            there.add(int(name))
        else:
            there.discard(int(name))
    return there, len(lines)


def kills(directory: Path, points: int, seed: int) -> tuple[int, int]:
    """Kills again and again in one directory; frames checked, lines said."""
    rng, checked, said = random.Random(seed), 0, 0
    there: set[int] = set()
    for point in range(points):
        must, lines = kill_once(directory, point, rng.uniform(0.002, 0.12), there)
        tier = DiskTier(directory, CAPACITY_BYTES)
        assert tier.writable, "the lock outlived its owner"
        assert disk_bytes(directory) <= CAPACITY_BYTES
        there = {name for name in range(NAMES) if hits(tier, [name], size_of(name))}
        assert must <= there, f"lost {sorted(must - there)} at point {point}"
        assert {entry.key for entry in tier.scan()} == {key_of(name) for name in there}
        assert tier.corrupt == 0
        tier.close()
        checked, said = checked + len(there), said + lines
    return checked, said


def test_kill(tmp_path: Path) -> None:
    checked, said = kills(tmp_path / "kv", 10, seed=1)
    assert checked > 100
    assert said > 500


@pytest.mark.deep
@pytest.mark.timeout(1200)
def test_kill_deep(tmp_path: Path) -> None:
    kills(tmp_path / "kv", 400, seed=2)
