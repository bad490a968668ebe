"""Disks that fail, lie and forget: never a wrong byte, and a bounded loss."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from flowkv.tiers import Load, Outcome, Store
from flowkv.tiers.disk import DiskTier
from tests.inside import RECORD_BYTES, RECORDS, Arena, ErasureLog, StoreError

from .crashing import MemoryFiles
from .faulty import CHANGES, FastFiles, FaultyFiles, NeverFiles
from .files_engine import tier_over
from .frames import LAYOUT, body_of, get, hits, info_of, key_of, leave, put, stored

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
        tier = tier_over(files, directory, SMALL, durability=durability, threads=0)
        scenario(tier)
        tier.close()
        return files.done


@pytest.mark.parametrize("durability", [pytest.param("none", marks=pytest.mark.thorough), "sync"])
@pytest.mark.parametrize("mode", ["ENOSPC", "EIO", "torn", "short", "stuck"])
def test_F5_any_operation_may_fail(tmp_path: Path, mode: str, durability: str) -> None:
    done = operations(durability)
    assert set(done) == set(CHANGES)
    seen: Counter[str] = Counter()
    for at, operation in enumerate(done):
        if not mode.startswith("E") and operation != "write":
            continue
        directory = tmp_path / str(at)
        files = FaultyFiles(at, mode)
        try:
            tier = tier_over(files, directory, SMALL, durability=durability, threads=0)
        except StoreError:
            files.armed = False
            tier = tier_over(files, directory, SMALL, durability=durability, threads=0)
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


CALLS: list[Callable[[DiskTier], object]] = [
    lambda tier: put(tier, ["new"]),
    lambda tier: get(tier, [0, 1]),
    lambda tier: tier.delete([key_of(0)]),
    lambda tier: tier.erase([key_of(0)]),
    lambda tier: tier.survey(),
    lambda tier: list(tier.scan()),
    lambda tier: tier.bind(bytes(32), "model"),
    lambda tier: (tier.delete(map(key_of, range(3))), tier.no_room(1)),  # type: ignore[arg-type]
    lambda tier: tier.cede(0.1),
    lambda tier: tier.close(),
]


@pytest.mark.parametrize("number", range(len(CALLS)))
def test_F5_no_error_of_the_system_leaves_a_call(tmp_path: Path, number: int) -> None:
    for at in itertools.count():
        files = NeverFiles(errno.EMFILE)
        tier = tier_over(files, tmp_path / str(at), SMALL, threads=0)
        stored(tier, range(3))
        files.left = at
        with contextlib.suppress(StoreError):
            CALLS[number](tier)
        harmless, files.left = files.left > 0, 1 << 40
        tier.close()
        if harmless:
            return


def test_F5_a_descriptor_is_gone_even_if_closing_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on network file systems. What others opened next was written to, as the journal."""
    own, directory = os.close, tmp_path / "kv"

    def close(fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        own(fd)
        if path.startswith(str(directory)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "close", close)
    tier = tier_over(FastFiles(), directory, SMALL, threads=0)
    journal, log = tier._store._journal, ErasureLog(tier.erasure_log)
    assert journal is not None
    stored(tier, [0])
    before = journal.count
    while journal.count >= before:  # until it is compacted
        before = journal.count
        stored(tier, [1])
        tier.delete([key_of(1)])
    with (tmp_path / "mine").open("w+b") as mine:
        mine.write(b"mine")
        log.close()
        stored(tier, range(1, 4))
        assert (tmp_path / "mine").stat().st_size == 0 and not log.changed()
    tier.close()
    tier = tier_over(FastFiles(), directory, SMALL, threads=0)
    assert hits(tier, range(4)) == 4


def test_F5_a_directory_that_goes_while_its_tier_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for left in range(8):
        tier = tier_over(FastFiles(), tmp_path, SMALL, threads=0)
        tier.bind(bytes(32), "model")
        looks = iter([True] * left)
        monkeypatch.setattr(tier._store.home, "holds", lambda looks=looks: next(looks, False))
        tier.close()


def test_F5_a_disk_that_stays_full(tmp_path: Path) -> None:
    files = FaultyFiles()
    tier = tier_over(files, tmp_path, MIB)
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


def test_F5_a_disk_that_cannot_read(tmp_path: Path) -> None:
    class Unreadable(FastFiles):
        broken = False

        def read(self, fd: int, buffers: list[memoryview], offset: int) -> int:
            if self.broken:
                raise OSError(5, "Input/output error")
            return super().read(fd, buffers, offset)

    files = Unreadable()
    tier = tier_over(files, tmp_path, MIB)
    stored(tier, ["a"])
    files.broken = True
    assert [(a.outcome, a.reason) for a in get(tier, ["a"])] == [(Outcome.FAILED, "EIO")]
    files.broken = False
    assert hits(tier, ["a"]) == 1


def test_F5_reads_in_pieces(tmp_path: Path) -> None:
    class Pieces(FastFiles):
        def read(self, fd: int, buffers: list[memoryview], offset: int) -> int:
            return super().read(fd, [buffers[0][:1000]], offset)

    leave(tier_over(Pieces(), tmp_path, MIB), range(5))
    tier = tier_over(Pieces(), tmp_path, MIB)
    assert hits(tier, range(5)) == 5


FRAMES = 50
GONE = 5
PLACE = "/flips/kv"
FRAME_BODIES = [body_of(name, 3000 if name % 3 else 12_288) for name in range(FRAMES + GONE)]


@pytest.fixture(scope="module")
def filled() -> MemoryFiles:
    """A store of 50 frames of two sizes, with some deleted, not open."""
    files = MemoryFiles()
    tier = tier_over(files, PLACE, 2 * MIB, threads=0)
    for name, body in enumerate(FRAME_BODIES):
        stored(tier, [name], len(body))
    tier.delete([key_of(name) for name in range(FRAMES, FRAMES + GONE)])
    tier.close()
    return files


def found(files: MemoryFiles, arena: Arena) -> tuple[set[int], int]:
    """Names that are verified hits, with the right bytes; and bad journal pages."""
    tier = tier_over(files, PLACE, 2 * MIB, threads=0, arena=arena)
    targets = [bytearray(len(body)) for body in FRAME_BODIES]
    tier.submit_load(
        [Load(key_of(name), memoryview(target), LAYOUT) for name, target in enumerate(targets)]
    )
    there = set()
    for answer in tier.poll():
        assert answer.outcome in (Outcome.HIT, Outcome.MISS), answer
        if answer.outcome is Outcome.HIT:
            assert targets[answer.item] == FRAME_BODIES[answer.item], "WRONG BYTES"
            there.add(answer.item)
    assert tier._store._journal is not None
    bad_pages = tier._store._journal.bad_pages
    tier.close()
    return there, bad_pages


def used_part(files: MemoryFiles, name: str) -> int:
    """Where the last byte that matters lies: files reach further, by holes."""
    return len(bytes(files.files[name].data).rstrip(b"\0")) + 64


def flips(filled: MemoryFiles, count: int, seed: int) -> Counter[str]:
    """Flips bits, one at a time; how many frames that costs at most, by file."""
    rng, worst, arena = random.Random(seed), Counter[str](), Arena(4 * MIB)
    names = [name for name in filled.files if "slab" in name or name.endswith("journal")]
    sizes = {name: used_part(filled, name) for name in names}
    for _ in range(count):
        name, files = rng.choice(names), filled.copy()
        data = files.files[name].data
        data[rng.randrange(min(sizes[name], len(data)))] ^= 1 << rng.randrange(8)
        there, _ = found(files, arena)
        assert there <= set(range(FRAMES)), "a deleted frame came back"
        short = name.rpartition("/")[2]
        worst[short] = max(worst[short], FRAMES - len(there))
    return worst


def test_F3_flipped_bits(filled: MemoryFiles) -> None:
    assert found(filled.copy(), Arena(4 * MIB)) == (set(range(FRAMES)), 0)
    worst = flips(filled, 400, seed=5)
    assert set(worst) == {"journal", "slab-00000002", "slab-00000004"}
    assert max(worst.values()) == 1  # not even a journal page: its other records are found


@pytest.mark.deep
@pytest.mark.timeout(3600)
def test_F3_flipped_bits_deep(filled: MemoryFiles) -> None:
    assert max(flips(filled, 100_000, seed=6).values()) == 1


def test_F3_a_journal_page_costs_its_records_at_most(filled: MemoryFiles) -> None:
    for page in range(3):
        files = filled.copy()
        journal = files.files[f"{PLACE}/journal"].data
        journal[page * 4096 : (page + 1) * 4096] = random.Random(page).randbytes(4096)
        there, bad_pages = found(files, Arena(4 * MIB))
        assert bad_pages == 1
        assert FRAMES - RECORDS <= len(there) < FRAMES
    assert RECORDS * RECORD_BYTES < 4096


def every_bit(monkeypatch: pytest.MonkeyPatch, positions: range) -> None:
    """Flips each bit of these bytes of a frame: it is a miss, and its neighbour is not harmed."""
    arena, files = Arena(MIB), MemoryFiles()
    tier = tier_over(files, PLACE, MIB, threads=0, arena=arena)
    body = memoryview(body_of("a", 8192))
    keys, info = [key_of("a"), key_of("b")], info_of(8192, stripe_bytes=4096)
    tier.submit_store([Store(key, info, body) for key in keys])
    assert [answer.outcome for answer in tier.poll()] == [Outcome.STORED] * 2
    (slab,) = (file for name, file in files.files.items() if "slab" in name)
    start = tier._store.entries()[0][1].slot.offset
    monkeypatch.setattr(tier._store, "condemn", lambda key, held: True)  # and all is as before
    targets = [memoryview(bytearray(8192)) for _ in keys]
    loads = [Load(key, target, LAYOUT) for key, target in zip(keys, targets, strict=True)]
    for at in positions:
        for bit in range(8):
            slab.data[start + at] ^= 1 << bit
            tier.submit_load(loads)
            wrong, right = sorted(tier.poll(), key=lambda answer: answer.item)
            assert (wrong.outcome, bool(wrong.reason)) == (Outcome.MISS, True)
            assert right.outcome is Outcome.HIT and targets[1] == body
            slab.data[start + at] ^= 1 << bit
    tier.submit_load(loads)
    assert [answer.outcome for answer in tier.poll()] == [Outcome.HIT] * 2
    tier.close()


@pytest.mark.parametrize(
    "positions", [range(288), range(288, 4096, 173), range(4096, 12_288, 577)], ids=str
)
def test_F3_any_bit_of_a_frame(monkeypatch: pytest.MonkeyPatch, positions: range) -> None:
    every_bit(monkeypatch, positions)


@pytest.mark.deep
@pytest.mark.timeout(1200)
def test_F3_every_bit_of_a_frame_deep(monkeypatch: pytest.MonkeyPatch) -> None:
    every_bit(monkeypatch, range(12_288))
