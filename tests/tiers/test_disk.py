from __future__ import annotations

import errno
import os
import random
import select
import stat
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from flowkv import Tier
from flowkv.tiers import Load, Outcome, Store, open_tier
from flowkv.tiers.disk import DiskTier
from tests.inside import (
    ConfigError,
    FileIO,
    StateError,
    StoreError,
    Superblock,
    read_superblock,
    slot_granules,
    write_superblock,
)

from .faulty import FaultyFiles, Solid
from .files_engine import tier_over
from .frames import (
    answers,
    body_of,
    get,
    hits,
    info_of,
    key_of,
    leave,
    outcomes,
    put,
    stored,
)
from .wraps import envelope_of

MIB = 1 << 20


def reader_of(directory: Path) -> DiskTier:
    with pytest.warns(UserWarning, match="another cache of this process"):
        return DiskTier(directory, MIB)


def test_is_a_tier(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "kv", MIB)
    assert isinstance(tier, Tier)
    assert (tier.kind, tier.writable) == ("disk", True)
    tier.close()
    tier.close()


def test_warm_restart(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "kv", 4 * MIB)
    stored(tier, range(40))
    stored(tier, ["big"], size=300_000)
    tier.delete([key_of(3), key_of(39)])
    entries, used = list(tier.scan()), tier.used_bytes()
    tier.close()
    tier = DiskTier(tmp_path / "kv", 4 * MIB)
    assert list(tier.scan()) == entries
    assert tier.used_bytes() == used
    assert hits(tier, range(40)) == 38
    assert hits(tier, ["big"], size=300_000) == 1


def test_stores_are_listed_as_they_began_whichever_ended_first(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 4 * MIB)
    stored(tier, range(20))
    index = tier._store._index
    before = list(tier.scan())
    first, held = next(iter(index.items()))
    index.pop(first)
    index[first] = held  # as if its write had ended last
    assert next(iter(index.items()))[0] != first
    assert list(tier.scan()) == before


def test_what_a_hit_tells(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, MIB)
    stored(tier, ["a"], codec=1, fidelity=2)
    (answer,) = get(tier, ["a"], fidelity=2)
    assert answer.info == info_of(8192, codec=1, fidelity=2)
    assert (answer.n_bytes, answer.reason) == (8192, "")
    assert 0 < answer.seconds < 10
    assert outcomes(get(tier, ["a"], fidelity=1)) == [("miss", "fidelity")]
    job = tier.submit_load([Load(key_of("a"), memoryview(bytearray(8192)), bytes(16), 4)])
    assert outcomes(answers(tier, job, 1)) == [("miss", "layout")]
    assert tier.corrupt == 0


def flip(path: Path, at: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


def test_a_damaged_slot_is_not_used_again_until_the_next_start(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, MIB)
    stored(tier, ["a", "b"])
    (held,) = [held for key, held in tier._store.entries() if key == key_of("a")]
    flip(tmp_path / "slab-00000003", held.slot.number * 3 * 4096 + 5)
    assert outcomes(get(tier, ["a", "b"])) == [("miss", "foreign"), ("hit", "")]
    assert tier.corrupt == 1
    stored(tier, ["c", "d", "e"])
    assert held.slot not in [other.slot for _, other in tier._store.entries()]
    assert hits(tier, ["b", "c", "d", "e"]) == 4
    tier.close()
    tier = DiskTier(tmp_path, MIB)
    assert tier.contains([key_of("a"), key_of("b")]) == [False, True]
    stored(tier, ["f"])
    assert held.slot in [other.slot for _, other in tier._store.entries()]


def test_a_frame_in_the_place_of_another_is_a_miss(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, MIB)
    stored(tier, ["a"])
    stored(tier, ["b"])
    slab = tmp_path / "slab-00000003"
    data = slab.read_bytes()
    size = 3 * 4096
    slab.write_bytes(data[size : 2 * size] + data[:size] + data[2 * size :])
    assert outcomes(get(tier, ["a", "b"])) == [("miss", "key")] * 2
    assert tier.corrupt == 2


def test_F10_full_and_room_again(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, MIB)
    names, size = list(range(200)), 16384
    done = put(tier, names, size)
    kept = [
        name for name, answer in zip(names, done, strict=True) if answer.outcome is Outcome.STORED
    ]
    assert 30 < len(kept) < 64
    assert {answer.reason for answer in done} == {"", "full"}
    assert tier.used_bytes() <= MIB < tier.used_bytes() + tier.frame_bytes(size)
    tier.delete([key_of(name) for name in kept[:2]])
    stored(tier, ["new", "newer"], size)
    tier.delete([key_of(name) for name in kept])
    stored(tier, ["large"], 500_000)
    assert hits(tier, ["new", "newer"], size) == 2


def disk_bytes(directory: Path) -> int:
    return sum(os.stat(path).st_blocks * 512 for path in [directory, *directory.iterdir()])


@pytest.mark.parametrize("seed", range(3))
def test_F10_the_quota_holds_on_the_disk(tmp_path: Path, seed: int) -> None:
    rng, capacity = random.Random(seed), 2 * MIB
    tier, there = DiskTier(tmp_path, capacity), {}
    for step in range(150):
        size = rng.choice((1, 5000, 12_000, 30_000, 100_000, 250_000))
        need = tier.frame_bytes(size)
        while there and tier.used_bytes() + need > capacity:
            name = rng.choice(list(there))
            assert tier.delete([key_of(name)]) == 1
            del there[name]
        stored(tier, [step], size)  # room was made, so it must fit
        there[step] = size
        assert tier.used_bytes() <= capacity
        assert disk_bytes(tmp_path) <= capacity
    assert all(hits(tier, [name], size) for name, size in there.items())
    tier.close()
    tier = DiskTier(tmp_path, capacity)
    assert all(hits(tier, [name], size) for name, size in there.items())
    assert disk_bytes(tmp_path) <= capacity


def test_F10_a_smaller_capacity_drops_the_oldest(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 2 * MIB)
    for name in range(100):
        stored(tier, [name])
    tier.close()
    tier = DiskTier(tmp_path, MIB)
    assert tier.used_bytes() <= MIB
    assert disk_bytes(tmp_path) <= MIB
    there = [tier.contains([key_of(name)])[0] for name in range(100)]
    assert there == sorted(there) and 40 < sum(there) < 100


def test_without_holes_in_files_space_stays_with_its_size(tmp_path: Path) -> None:
    tier = tier_over(Solid(), tmp_path, MIB)
    done = put(tier, range(100), 16384)
    kept = [n for n, answer in enumerate(done) if answer.outcome is Outcome.STORED]
    tier.delete([key_of(name) for name in kept])
    assert outcomes(put(tier, ["large"], 500_000)) == [("failed", "full")]
    stored(tier, kept, 16384)
    assert disk_bytes(tmp_path) <= MIB


def test_no_frame_takes_more_than_was_reserved(tmp_path: Path) -> None:
    tier, size = DiskTier(tmp_path, 8 * MIB, envelope=envelope_of("aead")), 209 * 4096
    most = tier.used_bytes() + tier.frame_bytes(size)
    stored(tier, ["a"], size)  # compressed, the frame would have a longer header
    assert tier.used_bytes() <= most


def test_slot_sizes() -> None:
    assert [slot_granules(4096, n * 4096) for n in (1, 8, 9, 16, 17, 256, 2048)] == [
        *(2, 9, 10, 17, 19, 257, 2049)
    ]
    for granules in range(1, 5000):
        slot = slot_granules(4096, granules * 4096) - 1
        assert granules <= slot <= granules * 1.125
    assert slot_granules(4096, 1) == 2


def test_F10_second_process_reads_along(tmp_path: Path) -> None:
    owner = DiskTier(tmp_path, MIB)
    stored(owner, ["a"])
    reader = reader_of(tmp_path)
    assert not reader.writable
    assert hits(reader, ["a", "b"]) == 1
    stored(owner, ["b"])
    assert reader.contains([key_of("b")]) == [True]
    assert hits(reader, ["b"]) == 1
    assert outcomes(put(reader, ["c", "d"])) == [("failed", "read-only")] * 2
    assert reader.delete([key_of("a")]) == 0
    owner.delete([key_of("a")])
    stored(owner, ["e", "f"])  # one of them into the slot of "a"
    assert outcomes(get(reader, ["a", "e", "f"])) == [("miss", ""), ("hit", ""), ("hit", "")]
    assert (reader.corrupt, owner.corrupt) == (0, 0)


def test_a_reader_follows_a_compaction(tmp_path: Path) -> None:
    owner = DiskTier(tmp_path, MIB)
    stored(owner, ["kept"])
    reader = reader_of(tmp_path)
    inode = (tmp_path / "journal").stat().st_ino
    for name in range(60):
        stored(owner, [name])
        owner.delete([key_of(name)])
    assert (tmp_path / "journal").stat().st_ino != inode
    stored(owner, ["late"])
    assert hits(reader, ["kept", "late", 3]) == 2
    assert [entry.key for entry in reader.scan()] == [key_of("kept"), key_of("late")]


def test_a_frame_that_moves_while_a_reader_reads(tmp_path: Path) -> None:
    owner = DiskTier(tmp_path, MIB)
    stored(owner, ["a"])

    class Slow(FileIO):
        moves = 0

        def read(self, fd: int, buffers: list[memoryview], offset: int) -> int:
            if any(view.nbytes > 4096 for view in buffers) and self.moves:
                self.moves -= 1
                assert owner.delete([key_of("a"), key_of("b")])
                stored(owner, ["b"])
                stored(owner, ["a"])
            return super().read(fd, buffers, offset)

    files = Slow()
    with pytest.warns(UserWarning):
        reader = tier_over(files, tmp_path, MIB)
    files.moves = 2
    assert outcomes(get(reader, ["a"])) == [("hit", "")]
    files.moves = 99  # it never holds still
    assert outcomes(get(reader, ["a"])) == [("miss", "")]
    files.moves = 0
    assert outcomes(get(reader, ["a"])) == [("hit", "")]
    assert reader.corrupt == 0


def test_a_reader_may_be_first_to_look(tmp_path: Path) -> None:
    owner = DiskTier(tmp_path, MIB)
    superblock, journal = tmp_path / "superblock.json", tmp_path / "journal"
    superblock.rename(tmp_path / "aside-1")
    journal.rename(tmp_path / "aside-2")
    reader = reader_of(tmp_path)
    assert hits(reader, ["a"]) == 0
    (tmp_path / "aside-1").rename(superblock)
    (tmp_path / "aside-2").rename(journal)
    stored(owner, ["a"])
    assert hits(reader, ["a"]) == 1


def test_F10_exclusive(tmp_path: Path) -> None:
    owner = DiskTier(tmp_path, MIB, exclusive=True)
    owned = r"another cache of this process owns .*\. Close the other one"
    with pytest.raises(StoreError, match=owned):
        DiskTier(tmp_path, MIB, exclusive=True)
    owner.close()
    DiskTier(tmp_path, MIB, exclusive=True).close()


def test_permissions(tmp_path: Path) -> None:
    directory = tmp_path / "deep" / "kv"
    tier = DiskTier(directory, MIB)
    stored(tier, ["a"])
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()} == {0o600}


def test_directories_that_cannot_be_used(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    foreign = tmp_path / "photos"
    foreign.mkdir()
    (foreign / "holiday.jpg").write_text("x")
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    for path, message in (
        *((file, "cannot be used"), (file / "kv", "cannot be used")),
        (foreign, r"holds other files, such as 'holiday.jpg'\. Choose an empty"),
        *((shared, r"all users may write .* Run chmod 700"), ("", "has no path")),
    ):
        with pytest.raises(StoreError, match=message):
            DiskTier(path, MIB)
    assert sorted(path.name for path in foreign.iterdir()) == ["holiday.jpg"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_no_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match="cannot be used"):
        DiskTier(tmp_path / "kv", MIB)


@pytest.mark.parametrize("name", ["lock", "superblock.json", "journal", "slab-00000003"])
def test_links_are_not_followed(tmp_path: Path, name: str) -> None:
    victim, directory = tmp_path / "victim", tmp_path / "kv"
    victim.write_text("precious")
    directory.mkdir(mode=0o700)
    (directory / name).symlink_to(victim)
    with pytest.raises(StoreError, match="cannot be"):
        DiskTier(directory, MIB)
    assert victim.read_text() == "precious"


def test_a_pipe_is_no_journal(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    os.mkfifo(tmp_path / "journal")
    with pytest.raises(StoreError, match="cannot be"):
        DiskTier(tmp_path, MIB)


@pytest.mark.parametrize("format_", [1, 3, 99])
def test_F11_another_format_is_moved_aside(tmp_path: Path, format_: int) -> None:
    leave(DiskTier(tmp_path, MIB), ["a"])
    files = FileIO()
    superblock = read_superblock(files, tmp_path)
    assert superblock is not None
    superblock.format = format_
    write_superblock(files, tmp_path, superblock)
    with pytest.warns(UserWarning, match=rf"format {format_},.*starting empty.*moved to aside-1"):
        tier = DiskTier(tmp_path, MIB)
    assert list(tier.scan()) == []
    stored(tier, ["b"])
    assert {path.name for path in (tmp_path / "aside-1").iterdir()} == {
        *("superblock.json", "journal", "slab-00000003")
    }
    tier.close()
    tier = DiskTier(tmp_path, MIB)  # and no second warning
    assert hits(tier, ["a", "b"]) == 1


def test_F11_a_move_aside_that_was_interrupted_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it was once or more often, it is whole in one place."""
    (tmp_path / "aside-1").mkdir()  # of an earlier upgrade
    (tmp_path / "aside-1" / "superblock.json").write_bytes(b"of a store of its own")
    for number in (3, 4, 5):
        (tmp_path / f"slab-0000000{number}").write_bytes(b"a frame of another format")
    write_superblock(FileIO(), tmp_path, Superblock(store="flowkv", format=99))
    names, replace = FileIO.names, FileIO.replace
    with monkeypatch.context() as broken:
        broken.setattr(FileIO, "names", lambda *it: sorted(names(*it), reverse=True))

        def once(files: FileIO, path: str, target: str, **how: bool) -> None:
            replace(files, path, target, **how)
            raise OSError(errno.EIO, "")

        broken.setattr(FileIO, "replace", once)
        for _ in range(2):
            with pytest.raises(StoreError):
                DiskTier(tmp_path, MIB)
    with pytest.warns(UserWarning, match="format 99.* moved to aside-2;"):
        DiskTier(tmp_path, MIB).close()
    (superblock,) = (tmp_path / "aside-1").iterdir()
    assert superblock.read_bytes() == b"of a store of its own"
    kept = {path.name: path.read_bytes() for path in (tmp_path / "aside-2").iterdir()}
    assert kept.pop("superblock.json") and len(kept) == 3
    assert {*kept.values()} == {b"a frame of another format"} and not [*tmp_path.glob("aside-3")]


def test_F11_a_reader_of_another_format_is_empty(tmp_path: Path) -> None:
    owner = DiskTier(tmp_path, MIB)
    stored(owner, ["a"])
    write_superblock(FileIO(), tmp_path, Superblock(store="flowkv", format=99))
    with pytest.warns(UserWarning) as caught:
        reader = DiskTier(tmp_path, MIB)
    assert len(caught) == 2
    assert hits(reader, ["a"]) == 0
    reader.close()
    owner.close()
    assert not (tmp_path / "aside-1").exists()


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"\x00" * 300, b'{"store":"flowkv","format":7}\n00000000\n']
)
def test_a_damaged_superblock_is_repaired(tmp_path: Path, damage: bytes) -> None:
    leave(DiskTier(tmp_path, MIB), range(5))
    (tmp_path / "superblock.json").write_bytes(damage)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tier = DiskTier(tmp_path, MIB)
    assert hits(tier, range(5)) == 5


def test_superblock_and_journal_lost(tmp_path: Path) -> None:
    leave(DiskTier(tmp_path, MIB), range(5))
    (tmp_path / "superblock.json").unlink()
    (tmp_path / "journal").unlink()
    tier = DiskTier(tmp_path, MIB)
    assert hits(tier, range(5)) == 5


@pytest.mark.parametrize("loss", ["gone", "empty", "zeros", "noise", "of another store"])
def test_journal_lost(tmp_path: Path, loss: str) -> None:
    tier = DiskTier(tmp_path / "kv", 4 * MIB)
    stored(tier, range(20))
    stored(tier, ["big"], 300_000)
    tier.close()
    journal = tmp_path / "kv" / "journal"
    if loss == "gone":
        journal.unlink()
    elif loss == "of another store":
        leave(DiskTier(tmp_path / "other", MIB), ["x"])
        journal.write_bytes((tmp_path / "other" / "journal").read_bytes())
    else:
        noise = random.Random(0).randbytes(9000)
        journal.write_bytes({"empty": b"", "zeros": bytes(8192), "noise": noise}[loss])
    tier = DiskTier(tmp_path / "kv", 4 * MIB)
    assert hits(tier, range(20)) == 20
    assert hits(tier, ["big"], 300_000) == 1
    stored(tier, ["new"])
    tier.close()
    tier = DiskTier(tmp_path / "kv", 4 * MIB)
    assert hits(tier, [*range(20), "new"]) == 21


def test_an_emptied_store_stays_empty(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, MIB)
    for name in range(70):
        stored(tier, [name])
        tier.delete([key_of(name)])
    tier.close()
    tier = DiskTier(tmp_path, MIB)
    assert list(tier.scan()) == []


def test_slab_cut_off(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, MIB)
    for name in range(6):
        stored(tier, [name])
    os.truncate(tmp_path / "slab-00000003", 2 * 3 * 4096 + 100)
    assert outcomes(get(tier, range(6))) == [("hit", "")] * 2 + [("miss", "truncated")] * 4
    tier.close()
    tier = DiskTier(tmp_path, MIB)
    assert hits(tier, range(6)) == 2
    stored(tier, [4, 5])
    os.truncate(tmp_path / "slab-00000003", 0)
    tier.close()
    tier = DiskTier(tmp_path, MIB)
    assert list(tier.scan()) == []
    stored(tier, range(6))
    assert hits(tier, range(6)) == 6


def test_capacity_and_durability_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 262144"):
        DiskTier(tmp_path, 1000)
    with pytest.raises(ConfigError, match="durability"):
        DiskTier(tmp_path, MIB, durability="maybe")  # type: ignore[arg-type]


def test_sync(tmp_path: Path) -> None:
    files = FaultyFiles()
    tier = tier_over(files, tmp_path, MIB, durability="sync")
    before = files.done.count("sync")
    stored(tier, range(10))
    assert files.done.count("sync") >= before + 2
    tier.close()
    tier = DiskTier(tmp_path, MIB)
    assert hits(tier, range(10)) == 10


def test_no_sync_on_the_way_of_a_store(tmp_path: Path) -> None:
    files = FaultyFiles()
    tier = tier_over(files, tmp_path, MIB)
    before = files.done.count("sync")
    stored(tier, range(10))
    assert files.done.count("sync") == before


def test_close_finishes_what_is_queued(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 4 * MIB)
    items = [Store(key_of(n), info_of(8192), memoryview(body_of(n))) for n in range(50)]
    job = tier.submit_store(items)
    tier.close()
    assert outcomes(answers(tier, job, 50)) == [("stored", "")] * 50
    with pytest.raises(StateError, match="is closed"):
        tier.submit_load([])
    assert (tier.contains([key_of(1)]), tier.delete([key_of(1)]), list(tier.scan())) == (
        [False],
        0,
        [],
    )


def test_the_descriptor_follows_the_answers(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, MIB)
    fd = tier.fileno()
    item = Store(key_of("a"), info_of(8192), memoryview(body_of("a")))
    tier.submit_store([item])
    assert select.select([fd], [], [], 20)[0]
    assert len(tier.poll()) == 1
    assert not select.select([fd], [], [], 0)[0]


FORK = """
import os, sys
from tests.tiers.frames import hits, key_of, stored
from flowkv.core.errors import StateError
from flowkv.tiers.disk import DiskTier
tier = DiskTier(sys.argv[1], 1 << 20)
stored(tier, ["a"])
ready, done = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    code = 1
    try:
        for call in (lambda: tier.submit_load([]), lambda: tier.submit_store([])):
            try:
                call()
            except StateError as error:
                assert "fork" in str(error)
            else:
                raise AssertionError
        assert tier.contains([key_of("a")]) == [False]
        assert tier.delete([key_of("a")]) == 0 and tier.poll() == [] and list(tier.scan()) == []
        tier.close()
        os.write(ready[1], b"x")
        os.read(done[0], 1)  # stays alive while the owner closes
        code = 0
    finally:
        os._exit(code)
assert os.read(ready[0], 1) == b"x"
assert hits(tier, ["a"]) == 1
stored(tier, ["b"])
tier.close()
again = DiskTier(sys.argv[1], 1 << 20)
assert again.writable, "the child still holds the lock"
assert hits(again, ["a", "b"]) == 2
again.close()
os.write(done[1], b"x")
assert os.waitpid(child, 0)[1] == 0
"""


def test_the_working_directory_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tier = DiskTier("kv", MIB)
    monkeypatch.chdir("/")
    stored(tier, ["a"])
    assert hits(tier, ["a"]) == 1
    assert (tmp_path / "kv" / "slab-00000003").is_file()


def test_a_deadline_may_be_infinite(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, MIB)
    job = tier.submit_store(
        [Store(key_of("a"), info_of(8192), memoryview(body_of("a")))], deadline_s=float("inf")
    )
    assert outcomes(answers(tier, job, 1)) == [("stored", "")]


def test_fork(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", FORK, str(tmp_path)], check=True, timeout=60)


def test_open_tier(tmp_path: Path) -> None:
    tier = open_tier("disk", path=str(tmp_path), capacity_bytes=MIB, name="d", durability="sync")
    assert (tier.name, tier.kind, tier.capacity_bytes) == ("d", "disk", MIB)
    tier.close()
    assert open_tier("host", capacity_bytes=MIB).name == "host"
    with pytest.raises(ConfigError, match="unknown"):
        open_tier("floppy", capacity_bytes=MIB)
