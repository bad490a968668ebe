"""The simulation of a stack of tiers: deterministic, passed, and a finder of what is wrong."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from flowkv import Tier
from flowkv.tiers.disk import DiskTier
from tests.inside import Journal, journal
from tests.tiers import simulation
from tests.tiers.simulation import (
    HAZARDS,
    SimulatedFiles,
    Simulation,
    SimulationFailure,
    shrink,
    simulate,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def ended() -> None:
    """Tiers of processes that were killed are not closed."""


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_ever_wrong(seed: int) -> None:
    report = simulate(seed, 400)
    assert report.answers > 100
    assert report.steps == 400


@pytest.mark.parametrize("hazard", sorted(HAZARDS))
def test_one_hazard_at_a_time(hazard: str) -> None:
    for seed in range(100, 103):
        simulate(seed, 300, [hazard])


def test_everything_happens() -> None:
    counts: Counter[str] = Counter()
    for seed in range(200, 206):
        counts += simulate(seed, 500).counts
    always = {"request", "load", "store", "wait", "cancel", "forget", "reopen", "evict"}
    assert always | HAZARDS - {"remote"} <= set(counts)


@pytest.mark.deep
@pytest.mark.parametrize("part", range(10))
def test_nothing_is_ever_wrong_deep(part: int) -> None:
    for seed in range(1000 * (part + 1), 1000 * (part + 1) + 100):
        simulate(seed, 1000)


# ---- the same seed is the same run


def test_same_seed_same_run() -> None:
    first, again = simulate(7, 600), simulate(7, 600)
    assert first == again
    assert simulate(8, 600).digest != first.digest
    assert simulate(7, 599).digest != first.digest


def test_same_seed_same_run_in_another_process() -> None:
    program = "from tests.tiers.simulation import simulate; print(simulate(7, 300).digest)"
    digests = set()
    for number in ("1", "2"):  # the order of sets differs between these processes
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": number},
            capture_output=True,
            text=True,
            check=True,
        )
        digests.add(done.stdout)
    assert len(digests) == 1


# ---- wrong tiers are found, with a seed and a step


class LosesDeletions(DiskTier):
    """Answers a deletion, and forgets to do it when it is opened again."""

    def delete(self, keys: object) -> int:
        return sum(self.contains(list(keys)))  # type: ignore[call-overload]


class Overdrawn(DiskTier):
    """Uses more of the disk than it may."""

    def used_bytes(self) -> int:
        return min(super().used_bytes(), self.capacity_bytes // 2)


def opened(kind: type[DiskTier], run: Simulation, **changes: object) -> Tier:
    settings: dict[str, object] = {
        "name": "disk",
        "durability": "sync" if run.durable else "none",
        "files": run.files,
        "engine": run.engine,
        "threads": 0,
        "clock": run.clock,
    }
    capacity_bytes = changes.pop("capacity_bytes", run.disk_bytes)
    return kind(simulation.DIRECTORY, capacity_bytes, **settings | changes)  # type: ignore[arg-type]


def never_waits(run: Simulation) -> Tier:
    return opened(DiskTier, run, durability="none")


def takes_too_much(run: Simulation) -> Tier:
    return opened(Overdrawn, run, capacity_bytes=4 * run.disk_bytes)


def keeps_everything(run: Simulation) -> Tier:
    return opened(LosesDeletions, run)


@pytest.mark.parametrize("wrong", [never_waits, takes_too_much, keeps_everything])
def test_wrong_disk_is_found(
    wrong: Callable[[Simulation], Tier], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulation, "open_disk_tier", wrong)
    found = None
    for seed in range(40):
        try:
            simulate(seed, 500, ["power"])
        except SimulationFailure as failure:
            found = failure
            break
    assert found is not None
    with pytest.raises(SimulationFailure) as again:
        simulate(found.seed, found.step + 1, found.hazards)
    assert again.value.step == found.step
    assert str(again.value) == str(found)
    smaller = shrink(found, tries=3)
    assert smaller.step <= found.step and smaller.hazards <= found.hazards


def test_a_journal_that_believes_what_failed_writes_left_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As this one did until others filled the disk here: it went by the places of records."""
    never = property(lambda self: False, lambda self, value: None)
    monkeypatch.setattr(Journal, "_torn", never, raising=False)
    monkeypatch.setattr(journal, "in_order", lambda rows, capacity_bytes: rows)
    monkeypatch.setattr(journal, "numbered_apart", lambda rows: False)
    with pytest.raises(SimulationFailure, match=r"said not to be there|refused as damaged"):
        simulate(3, 200, ["full", "kill"])


@pytest.mark.parametrize("seed", [3, 12])
def test_a_compaction_while_the_device_is_waited_for(seed: int) -> None:
    """Of the journal, whose file an engine was told to sync, and which was closed meanwhile."""
    simulate(seed, 130, ["full", "kill"])


def test_wrong_engine_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that reports a read before it has happened: the target gets what was there before."""

    def early(self: simulation.SimulatedEngine, rows: list[tuple[int, ...]]) -> object:
        import numpy as np

        from tests.inside import COMPLETION

        return np.array([(row[-1], row[4]) for row in rows], COMPLETION)

    monkeypatch.setattr(simulation.SimulatedEngine, "_do", early)
    with pytest.raises(SimulationFailure, match="refused as damaged"):
        simulate(0, 500, [])


# ---- the simulated disk


def written(files: SimulatedFiles, path: str, content: bytes) -> int:
    fd = files.open(path, write=True)
    files.write(fd, [content], 0)
    return fd


def content_of(files: SimulatedFiles, path: str) -> bytes:
    return dict(files.images())[path]


def test_synced_bytes_survive() -> None:
    for seed in range(50):
        files = SimulatedFiles(random.Random(seed))
        fd = written(files, "/d/a", b"x" * 4096)
        files.sync(fd)
        files.sync_directory("/d")
        files.lose_power()
        assert content_of(files, "/d/a") == b"x" * 4096


def test_other_bytes_may_be_lost_in_any_combination() -> None:
    seen = set()
    for seed in range(300):
        files = SimulatedFiles(random.Random(seed))
        fd = written(files, "/d/a", b"1" * 1536)
        files.sync(fd)
        files.sync_directory("/d")
        files.write(fd, [b"2" * 1536], 0)
        files.write(fd, [b"3" * 512], 512)
        files.lose_power()
        data = content_of(files, "/d/a")
        assert len(data) == 1536
        sectors = [data[at : at + 512] for at in (0, 512, 1024)]
        assert all(len(set(sector)) == 1 for sector in sectors)
        seen.add("".join(chr(sector[0]) for sector in sectors))
    assert seen == {a + b + c for a in "12" for b in "123" for c in "12"}


def test_names_may_be_lost() -> None:
    seen = set()
    for seed in range(60):
        files = SimulatedFiles(random.Random(seed))
        written(files, "/d/a", b"x")
        files.sync_directory("/d")
        files.replace("/d/a", "/d/b", durable=False)
        files.lose_power()
        seen.add(tuple(files.names("/d")))
    assert seen == {("a",), ("b",)}


def test_a_failed_sync_is_reported_once() -> None:
    lost = 0
    for seed in range(20):
        files = SimulatedFiles(random.Random(seed))
        fd = written(files, "/d/a", b"x" * 4096)
        files.sync_directory("/d")
        files.troubles = {"sync": 1.0}
        with pytest.raises(OSError, match="Input/output"):
            files.sync(fd)
        files.troubles = {}
        files.sync(fd)
        assert content_of(files, "/d/a") == b"x" * 4096
        files.lose_power()
        lost += content_of(files, "/d/a") != b"x" * 4096
    assert lost > 15


def test_a_write_ends_where_the_space_does() -> None:
    files = SimulatedFiles(random.Random(0), space_bytes=8192)
    fd = files.open("/d/a", write=True)
    assert files.write(fd, [b"x" * 6000, b"y" * 6000], 4000) == 2 * 4096 - 4000
    assert content_of(files, "/d/a") == bytes(4000) + b"x" * 4192
    assert files.next_data(fd, 0) == 0
    files.space_bytes += 4096
    assert files.write(fd, [b"z"], 20_000) == 1
    assert files.next_data(fd, 8192) == 4 * 4096
    assert files.next_data(fd, 20_480) == files.size(fd) == 20_001


def test_space_runs_out_and_comes_back() -> None:
    files = SimulatedFiles(random.Random(0), space_bytes=8192)
    fd = written(files, "/d/a", bytes(8192))
    with pytest.raises(OSError) as full:
        files.write(fd, [b"x"], 8192)
    assert full.value.errno == errno.ENOSPC
    files.punch(fd, 0, 4096)
    assert files.used_bytes() == 4096
    files.write(fd, [b"x"], 8192)
    files.truncate(fd, 0)
    assert files.used_bytes() == 0


def test_every_trouble_happens() -> None:
    files = SimulatedFiles(random.Random(0))
    fd = written(files, "/d/a", bytes(4096))
    for name, call in {
        "write": lambda: files.write(fd, [b"x"], 0),
        "enospc": lambda: files.write(fd, [b"x"], 0),
        "torn": lambda: files.write(fd, [b"x"], 0),
        "read": lambda: files.read(fd, [memoryview(bytearray(9))], 0),
        "sync": lambda: files.sync(fd),
        "open": lambda: files.open("/d/a", write=False),
        "names": lambda: files.truncate(fd, 1),
    }.items():
        files.troubles = {name: 1.0}
        with pytest.raises(OSError):
            call()
    files.troubles = {"short": 1.0, "short read": 1.0}
    assert files.write(fd, [bytes(4096)], 0) < 4096
    assert 0 < files.read(fd, [memoryview(bytearray(4096))], 0) < 4096
