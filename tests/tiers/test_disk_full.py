"""F5: a real file system fills up, writes of the journal end half-way, and later ones succeed.

`python -m tests.tiers.test_disk_full DIRECTORY TRIES DURABILITY` tries as often as one likes on any
small file system, such as `mount -t tmpfs -o size=8m,mode=700 tmpfs DIRECTORY`.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from flowkv.tiers import Outcome, Store
from flowkv.tiers.disk import DiskTier

from .frames import answers, body_of, get, info_of, key_of

CAPACITY_BYTES = 64 << 20  # more than there is
DISK_BYTES = 8 << 20


class Seen(NamedTuple):
    """Frames confirmed and not deleted, those of them that were lost, and stores that failed."""

    confirmed: int = 0
    lost: int = 0
    failed: int = 0


def size_of(name: int) -> int:
    return (4096, 12_288)[name % 2]


def occupy(fd: int, left: int) -> None:
    """Fills a file until the file system has so many pages left."""
    size = os.fstat(fd).st_size
    for step in (1 << 18, 4096):
        with contextlib.suppress(OSError):
            while (count := os.pwrite(fd, bytes(step), size)) == step:
                size += count
    os.ftruncate(fd, max(0, size // 4096 - left) * 4096)


def fill_and_reopen(directory: Path, seed: int, durability: str) -> Seen:
    """Stores and deletes on a full disk; what the next owner misses of what was confirmed.

    Others use the disk too, so that there is room for one page of the journal and not for the next.
    """
    rng, there, failed, name = random.Random(seed), set[int](), 0, 0
    other = os.open(directory.parent / "other", os.O_RDWR | os.O_CREAT, 0o600)
    tier = DiskTier(directory, CAPACITY_BYTES, durability=durability)  # type: ignore[arg-type]
    for count in (300, 0, rng.randrange(20, 60), *(1,) * rng.choice((9, 13, 17))):
        if not count:
            gone = rng.sample(sorted(there), min(len(there), rng.choice((40, 80))))
            there -= set(gone)
            occupy(other, 8)
            tier.delete([key_of(n) for n in gone])
            occupy(other, rng.choice((1, 1, 2)))
            continue
        names = range(name, name := name + count)
        items = [
            Store(key_of(n), info_of(size_of(n)), memoryview(body_of(n, size_of(n)))) for n in names
        ]
        for answer in answers(tier, tier.submit_store(items), len(items)):
            if answer.outcome is Outcome.STORED:
                there.add(names[answer.item])
            failed += answer.reason == "ENOSPC"
    tier.close()
    os.close(other)
    tier = DiskTier(directory, CAPACITY_BYTES, durability=durability)  # type: ignore[arg-type]
    lost = sum(get(tier, [n], size_of(n))[0].outcome is not Outcome.HIT for n in there)
    assert tier.corrupt == 0
    tier.close()
    return Seen(len(there), lost, failed)


def tries(place: Path, count: int, durability: str) -> list[Seen]:
    """As many as wanted, each in a directory of its own."""
    seen = []
    for seed in range(count):
        shutil.rmtree(place / "kv", ignore_errors=True)
        (place / "other").unlink(missing_ok=True)
        seen.append(fill_and_reopen(place / "kv", seed, durability))
    return seen


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=700", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a small file system")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("durability", ["none", "sync"])
def test_F5_what_a_full_disk_confirmed_is_there(small_disk: Path, durability: str) -> None:
    seen = tries(small_disk, 120, durability)
    assert sum(each.failed for each in seen) > 1000
    assert sum(each.confirmed for each in seen) > 10_000
    assert sum(each.lost for each in seen) == 0


if __name__ == "__main__":
    found = tries(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    confirmed, lost, failed = map(sum, zip(*found, strict=True))
    where = sum(each.lost > 0 for each in found)
    print(f"{len(found)} tries: {confirmed} confirmed, {failed} failed, {lost} lost in {where}")
