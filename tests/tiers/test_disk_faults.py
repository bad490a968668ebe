"""Disks that fail, lie and forget: never a wrong byte, and a bounded loss."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from flowkv.core.errors import StoreError
from flowkv.tiers.base import Outcome
from flowkv.tiers.disk import DiskTier
from flowkv.tiers.disk.journal import RECORD_BYTES, RECORDS
from flowkv.tiers.disk.store import DiskStore, Refused

from .faulty import CHANGES, FastFiles, FaultyFiles, RecordingFiles, after_power_loss
from .frames import body_of, get, hits, info_of, key_of, put, stored

MIB = 1 << 20
SMALL = 256 << 10


def scenario(tier: DiskTier) -> tuple[dict[int, int], set[int], Counter[str]]:
    """Stores of several sizes, deletions and a full disk; what is there, what is not, and why."""
    there: dict[int, int] = {}
    gone: set[int] = set()
    reasons: Counter[str] = Counter()
    for step in range(16):
        size = (8192, 20_000, 8192, 60_000)[step % 4]
        (answer,) = put(tier, [step], size)
        reasons[answer.reason] += 1
        if answer.outcome is Outcome.STORED:
            there[step] = size
        else:
            gone.add(step)
        if step % 5 == 4 and there:
            oldest = min(there)
            assert tier.delete([key_of(oldest)]) == 1
            del there[oldest]
            gone.add(oldest)
    return there, gone, reasons


def check(tier: DiskTier, there: dict[int, int], gone: set[int]) -> None:
    assert all(hits(tier, [name], size) for name, size in there.items())
    assert not any(tier.contains([key_of(name) for name in gone]))
    assert {entry.key for entry in tier.scan()} == {key_of(name) for name in there}


def operations(durability: str) -> list[str]:
    with tempfile.TemporaryDirectory() as directory:
        files = FaultyFiles()
        tier = DiskTier(directory, SMALL, durability=durability, files=files)
        scenario(tier)
        tier.close()
        return files.done


@pytest.mark.parametrize("durability", ["none", "sync"])
@pytest.mark.parametrize("mode", ["ENOSPC", "EIO", "torn", "short", "stuck"])
def test_any_operation_may_fail(tmp_path: Path, mode: str, durability: str) -> None:
    done = operations(durability)
    assert set(done) == set(CHANGES)
    seen: Counter[str] = Counter()
    for at, operation in enumerate(done):
        if not mode.startswith("E") and operation != "write":
            continue
        directory = tmp_path / str(at)
        files = FaultyFiles(at, mode)
        try:
            tier = DiskTier(directory, SMALL, durability=durability, files=files)
        except StoreError:
            files.armed = False
            tier = DiskTier(directory, SMALL, durability=durability, files=files)
            seen["open"] += 1
        there, gone, reasons = scenario(tier)
        seen.update(reasons)
        assert set(reasons) <= {"", "full", mode, "ENOSPC", "EIO"}
        files.armed = False
        check(tier, there, gone)
        # space recovered: what is charged is what is there, and all of the rest can be used
        empty = DiskTier(tmp_path / "empty", SMALL)
        charged = sum(entry.n_bytes for entry in tier.scan())
        assert tier.used_bytes() == empty.used_bytes() + charged
        empty.close()
        extra = 1000
        while tier.used_bytes() + tier.frame_bytes(8192) <= SMALL:
            stored(tier, [extra])
            there[extra] = 8192
            extra += 1
        tier.close()
        tier = DiskTier(directory, SMALL)
        check(tier, there, gone)
        tier.close()
        shutil.rmtree(directory)
    assert seen[""]
    if mode != "short":
        assert seen["open"] and (seen["ENOSPC"] or seen["EIO"])


def test_a_disk_that_stays_full(tmp_path: Path) -> None:
    files = FaultyFiles()
    tier = DiskTier(tmp_path, MIB, files=files)
    stored(tier, range(10))
    files.at, files.left = len(files.done), 10**9
    assert [answer.reason for answer in put(tier, range(10, 14))] == ["ENOSPC"] * 4
    assert tier.delete([key_of(0), key_of(1)]) == 2
    assert hits(tier, range(2, 10)) == 8
    files.armed = False
    stored(tier, ["after"])
    tier.close()
    tier = DiskTier(tmp_path, MIB)
    assert tier.contains([key_of(n) for n in range(14)]) == [False] * 2 + [True] * 8 + [False] * 4
    assert hits(tier, [*range(2, 10), "after"]) == 9
    tier.close()


def test_a_disk_that_cannot_read(tmp_path: Path) -> None:
    class Unreadable(FastFiles):
        broken = False

        def read(self, fd: int, buffers: list[memoryview], offset: int) -> int:
            if self.broken:
                raise OSError(5, "Input/output error")
            return super().read(fd, buffers, offset)

    files = Unreadable()
    tier = DiskTier(tmp_path, MIB, files=files)
    stored(tier, ["a"])
    files.broken = True
    assert [(a.outcome, a.reason) for a in get(tier, ["a"])] == [(Outcome.FAILED, "EIO")]
    files.broken = False
    assert hits(tier, ["a"]) == 1
    tier.close()


def test_reads_in_pieces(tmp_path: Path) -> None:
    class Pieces(FastFiles):
        def read(self, fd: int, buffers: list[memoryview], offset: int) -> int:
            return super().read(fd, [buffers[0][:1000]], offset)

    tier = DiskTier(tmp_path, MIB, files=Pieces())
    stored(tier, range(5))
    tier.close()
    tier = DiskTier(tmp_path, MIB, files=Pieces())
    assert hits(tier, range(5)) == 5
    tier.close()


FRAMES = 50


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of 50 frames of two sizes, with some deleted, not open."""
    directory = tmp_path_factory.mktemp("filled") / "kv"
    tier = DiskTier(directory, 2 * MIB)
    for name in range(FRAMES + 5):
        stored(tier, [name], size_of(name))
    tier.delete([key_of(name) for name in range(FRAMES, FRAMES + 5)])
    tier.close()
    return directory


def size_of(name: int) -> int:
    return 3000 if name % 3 else 12_288


def flips(filled: Path, count: int, seed: int) -> Counter[str]:
    """Flips bits, one at a time; how many frames that cost at most, by file."""
    rng, worst = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "kv"
        shutil.copytree(filled, directory)
        targets = [
            path for path in directory.iterdir() if path.name.startswith(("slab", "journal"))
        ]
        for _ in range(count):
            path = rng.choice(targets)
            # the journal ends soon, and slab files are holes behind the last frame
            size = {"journal": 4096 * 4, "slab-00000002": 8192 * 40}.get(path.name, 16384 * 20)
            at, bit = rng.randrange(min(size, path.stat().st_size)), rng.randrange(8)
            whole = {each: each.read_bytes() for each in targets}
            damaged = bytearray(whole[path])
            damaged[at] ^= 1 << bit
            path.write_bytes(damaged)
            store = DiskStore(str(directory), 2 * MIB, files=FastFiles())
            lost = sum(not found(store, name) for name in range(FRAMES))
            assert not any(found(store, name) for name in range(FRAMES, FRAMES + 5))
            store.close()
            worst[path.name] = max(worst[path.name], lost)
            for each, data in whole.items():
                each.write_bytes(data)
    return worst


def found(store: DiskStore, name: int) -> bool:
    """Whether a frame is a verified hit; its bytes must be right."""
    size = size_of(name)
    try:
        hit = store.read(key_of(name), info_of(size).layout, 0, lambda n: memoryview(bytearray(n)))
    except Exception as error:
        assert getattr(error, "reason", ""), error
        return False
    assert hit is None or hit[1] == body_of(name, size), "WRONG BYTES"
    return hit is not None


def test_flipped_bits(filled: Path) -> None:
    worst = flips(filled, 200, seed=5)
    assert set(worst) == {"journal", "slab-00000002", "slab-00000004"}
    assert max(worst.values()) == 1  # not even a journal page: its other records are found


@pytest.mark.deep
def test_flipped_bits_deep(filled: Path) -> None:
    assert max(flips(filled, 5000, seed=6).values()) == 1


def test_a_journal_page_costs_its_records_at_most(filled: Path, tmp_path: Path) -> None:
    directory = tmp_path / "kv"
    for page in range(3):
        shutil.copytree(filled, directory)
        journal = bytearray((directory / "journal").read_bytes())
        journal[page * 4096 : (page + 1) * 4096] = random.Random(page).randbytes(4096)
        (directory / "journal").write_bytes(journal)
        store = DiskStore(str(directory), 2 * MIB, files=FastFiles())
        assert store.bad_pages == 1
        assert sum(not found(store, name) for name in range(FRAMES)) <= RECORDS
        store.close()
        shutil.rmtree(directory)
    assert RECORDS * RECORD_BYTES < 4096


def churn(store: DiskStore, files: RecordingFiles, seed: int) -> None:
    """Random stores and deletions, so many that slots are reused; each noted when it is done."""
    rng = random.Random(seed)
    for _ in range(60):
        name = rng.randrange(30)
        key, size = key_of(name), size_of(name)
        if rng.random() < 0.3:
            files.note("deleting", name)
            store.delete([key])
            continue
        try:
            written = store.write(key, info_of(size), memoryview(body_of(name, size)))
        except Refused:
            files.note("deleting", *range(30))
            store.delete([store.entries()[0][0]])
            continue
        if written is not None:
            store.commit([written])
            files.note("stored", name)


def power_losses(points: int, seed: int, *, durable: bool) -> tuple[int, int]:
    """Crashes a machine; frames found, and frames that were there before."""
    rng, hits_, before = random.Random(seed), 0, 0
    with tempfile.TemporaryDirectory() as scratch:
        for point in range(points):
            if point % 20 == 0:
                files = RecordingFiles()
                source = Path(scratch) / f"source{point}"
                store = DiskStore(str(source), SMALL, durable=durable, files=files)
                churn(store, files, seed + point)
                store.close()
            directory = Path(scratch) / "crashed"
            directory.mkdir(mode=0o700)
            cut = rng.randrange(len(files.log) + 1)
            after_power_loss(files.log, cut, rng, directory)
            acknowledged: set[object] = set()
            for what, *names in files.log[:cut]:
                if what == "note" and names[0] == "stored":
                    acknowledged.add(names[1])
                elif what == "note":
                    acknowledged -= set(names[1:])
            store = DiskStore(str(directory), SMALL, files=FastFiles())
            there = {name for name in range(30) if found(store, name)}
            if durable:
                assert acknowledged <= there, "lost what the device had confirmed"
            hits_, before = hits_ + len(there), before + len(acknowledged)
            store.close()
            shutil.rmtree(directory)
    return hits_, before


@pytest.mark.parametrize("durable", [False, True])
def test_power_loss(durable: bool) -> None:
    there, before = power_losses(200, 11, durable=durable)
    assert there > before / 4


@pytest.mark.deep
@pytest.mark.parametrize("durable", [False, True])
def test_power_loss_deep(durable: bool) -> None:
    power_losses(10_000, 12, durable=durable)
