"""The directory of a disk tier: its owner, what may be in it, and what is left in it."""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
import pytest

from flowkv.tiers import Envelope, Outcome, Store
from flowkv.tiers.disk import DiskTier
from tests.inside import (
    FileIO,
    Keyring,
    Record,
    StoreError,
    Superblock,
    inspect,
    repair,
    scrub,
    write_superblock,
)

from .faulty import FaultyFiles, Solid
from .files_engine import tier_over
from .frames import answers, body_of, get, hits, info_of, key_of, leave, outcomes, put, stored

MIB = 1 << 20
OURS = re.compile(r"lock|superblock\.json|journal|slab-\d{8}")


def test_the_directory_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "kv"
    DiskTier(directory, MIB).close()
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(StoreError, match="belongs to another user"):
        DiskTier(directory, MIB)


@pytest.mark.parametrize("names", [[], ["a", "b"]], ids=["unused", "used"])
def test_a_directory_of_a_tier_that_is_garbage_is_taken_over(
    tmp_path: Path, names: list[str], ended: dict[int, object]
) -> None:
    tier = DiskTier(tmp_path / "kv", MIB)
    if names:
        stored(tier, names)
    tier.own_cycle = tier  # type: ignore[attr-defined]
    ended.clear()
    del tier  # and no collection
    heir = DiskTier(tmp_path / "kv", MIB, exclusive=True)
    assert heir.writable and heir.contains(list(map(key_of, names))) == [True] * len(names)


def test_files_of_others_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "kv"
    DiskTier(directory, MIB).close()
    if os.geteuid():
        pytest.skip("only root can give files away")
    os.chown(directory / "journal", 65534, 65534)
    with pytest.raises(StoreError, match="belongs to another user"):
        DiskTier(directory, MIB)


@pytest.mark.parametrize(("mode", "works"), [(0o777, False), (0o1777, True), (0o755, True)])
def test_nobody_may_put_another_directory_in_its_place(
    tmp_path: Path, mode: int, works: bool
) -> None:
    parent = tmp_path / "parent"
    parent.mkdir()
    parent.chmod(mode)
    if works:
        DiskTier(parent / "kv", MIB).close()
        return
    with pytest.raises(StoreError, match=r"all users may replace .* Run chmod \+t"):
        DiskTier(parent / "kv", MIB)


def test_a_group_may_not_write(tmp_path: Path) -> None:
    directory = tmp_path / "kv"
    directory.mkdir()
    directory.chmod(0o770)
    DiskTier(directory, MIB).close()  # it was empty: ours now
    assert directory.stat().st_mode & 0o777 == 0o700
    directory.chmod(0o770)
    with pytest.raises(StoreError, match="a group may write to"):
        DiskTier(directory, MIB)


def test_a_link_to_a_directory_is_judged_by_where_it_leads(tmp_path: Path) -> None:
    parent = tmp_path / "parent"
    (parent / "kv").mkdir(parents=True, mode=0o700)
    (tmp_path / "link").symlink_to(parent / "kv")
    leave(DiskTier(tmp_path / "link", MIB), ["a"])
    parent.chmod(0o777)
    with pytest.raises(StoreError, match="all users may replace"):
        DiskTier(tmp_path / "link", MIB)


def test_no_name_comes_from_a_key(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "kv", MIB)
    hostile = [b"../../../../tmp/x".ljust(32, b"/"), bytes(32), b"\n" * 32, b"\xff" * 32]
    for key in hostile:
        info = info_of(4096, tenant=hostile[0], namespace=hostile[1], layout=b"/../" * 4)
        job = tier.submit_store([Store(key, info, memoryview(bytes(4096)))])
        assert outcomes(answers(tier, job, 1)) == [("stored", "")]
    assert all(tier.contains(hostile))
    tier.close()
    assert all(OURS.fullmatch(name) for name in os.listdir(tmp_path / "kv"))
    assert os.listdir(tmp_path) == ["kv"]


def test_directories_stack(tmp_path: Path) -> None:
    """Fast before slow: each is bounded by itself, and knows nothing of the other."""
    fast, slow = DiskTier(tmp_path / "nvme", MIB), DiskTier(tmp_path / "hdd", 4 * MIB)
    assert fast.name != slow.name
    done = put(fast, range(100), 16_384)
    there = [n for n, answer in enumerate(done) if answer.outcome is Outcome.STORED]
    moved = [n for n in range(100) if n not in there]
    assert moved and {answer.reason for answer in done} == {"", "full"}
    stored(slow, moved, 16_384)
    assert (hits(fast, range(100), 16_384), hits(slow, range(100), 16_384)) == (
        len(there),
        len(moved),
    )


# --- nothing is left ------------------------------------------------------------------------


def anywhere(directory: Path, name: object, size: int = 8192) -> bool:
    """Whether a part of a frame's body is in any file."""
    body = body_of(name, size)
    pieces = [body[at : at + 64] for at in range(0, size - 64, 1000)]
    data = [path.read_bytes() for path in directory.iterdir() if path.is_file()]
    return any(piece in content for content in data for piece in pieces)


@pytest.mark.parametrize("files", [FileIO, Solid])
def test_erased_frames_leave_nothing(tmp_path: Path, files: type[FileIO]) -> None:
    tier = tier_over(files(), tmp_path, MIB)
    stored(tier, range(6))
    stored(tier, ["long"], size=73_600)
    assert anywhere(tmp_path, 0) and anywhere(tmp_path, "long", 73_600)
    tier.delete([key_of(1), key_of("long")])  # evicted some time before
    stored(tier, ["short"], size=66_000)  # into the slot of a longer one
    assert len(list(tmp_path.glob("slab-*"))) == 2
    (held,) = [held for key, held in tier._store.entries() if key == key_of(2)]
    slab = tmp_path / "slab-00000003"
    with slab.open("r+b") as file:
        file.seek(held.slot.offset)
        file.write(b"x")
    assert outcomes(get(tier, [2])) == [("miss", "foreign")]  # and it is quarantined
    assert tier.erase([key_of(0), key_of("nothing")]) == 1
    for name in (0, 1, 2):
        assert not anywhere(tmp_path, name)
    assert not anywhere(tmp_path, "long", 73_600)
    assert hits(tier, range(6)) == 3
    assert hits(tier, ["short"], 66_000) == 1
    stored(tier, range(100, 110))
    tier.close()
    tier = DiskTier(tmp_path, MIB)
    assert hits(tier, [*range(6), *range(100, 110)]) == 13


def test_an_erasure_that_fails_says_so(tmp_path: Path) -> None:
    files = FaultyFiles(mode="EIO", count=10**6)
    tier = tier_over(files, tmp_path, MIB)
    stored(tier, ["a", "b"])
    files.at = len(files.done)
    with pytest.raises(StoreError, match=r"could not clear .* erase again"):
        tier.erase([key_of("a")])
    assert anywhere(tmp_path, "a")
    files.left = 0
    assert tier.erase([]) == 0  # the frame is forgotten, its bytes are not
    assert not anywhere(tmp_path, "a")
    assert hits(tier, ["b"]) == 1


class Forgetful(Solid):
    """A device that loses what was written since the last sync, when one fails: said only once."""

    def __init__(self) -> None:
        self.failing, self.before = False, list[tuple[int, int, bytes]]()

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:  # type: ignore[override]
        done = sum(len(memoryview(one).cast("B")) for one in buffers)
        self.before.append((fd, offset, os.pread(fd, done, offset)))
        return super().write(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        before, self.before = self.before, []
        if self.failing:
            for where, offset, data in reversed(before):
                os.pwrite(where, data, offset)
            self.failing = False
            raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_an_erasure_whose_sync_failed_writes_all_of_it_again(tmp_path: Path) -> None:
    """A file's next sync succeeds: the kernel takes what it could not write as written."""
    files = Forgetful()
    tier = tier_over(files, tmp_path, MIB)
    stored(tier, ["bad", "a"])
    (held,) = [held for key, held in tier._store.entries() if key == key_of("bad")]
    with (tmp_path / "slab-00000003").open("r+b") as file:
        file.seek(held.slot.offset)
        file.write(b"x")
    assert outcomes(get(tier, ["bad"])) == [("miss", "foreign")]  # it is quarantined
    files.before, files.failing = [], True
    with pytest.raises(StoreError, match="erase again"):
        tier.erase([key_of("a")])
    assert tier.erase([]) == 0
    assert not anywhere(tmp_path, "a") and not anywhere(tmp_path, "bad")


def test_what_is_aside_cannot_be_erased(tmp_path: Path) -> None:
    leave(DiskTier(tmp_path, MIB), ["a"])
    write_superblock(FileIO(), tmp_path, Superblock(store="flowkv", format=1))
    with pytest.warns(UserWarning, match="starting empty"):
        tier = DiskTier(tmp_path, MIB)
    with pytest.raises(StoreError, match=r"aside-1 holds a store of another format\. Delete"):
        tier.erase([key_of("a")])


def test_only_the_owner_erases(tmp_path: Path) -> None:
    owner = DiskTier(tmp_path, MIB)
    stored(owner, ["a"])
    with pytest.warns(UserWarning):
        reader = DiskTier(tmp_path, MIB)
    with pytest.raises(StoreError, match="another cache of this process"):
        reader.erase([key_of("a")])


def test_deleted_frames_stay_away_without_a_journal(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, MIB)
    stored(tier, range(40))
    tier.delete([key_of(n) for n in range(30)])
    tier.close()
    (tmp_path / "journal").unlink()
    tier = DiskTier(tmp_path, MIB)
    assert {entry.key for entry in tier.scan()} == {key_of(n) for n in range(30, 40)}


# --- repair ---------------------------------------------------------------------------------


def damage(directory: Path, page: int) -> None:
    data = bytearray((directory / "journal").read_bytes())
    data[page * 4096 : (page + 1) * 4096] = random.Random(page).randbytes(4096)
    (directory / "journal").write_bytes(data)


def filled(directory: Path, **arguments: object) -> None:
    tier = DiskTier(directory, MIB, **arguments)  # type: ignore[arg-type]
    stored(tier, range(40))
    tier.delete([key_of(3), key_of(25)])
    stored(tier, ["late"])
    tier.close()


def test_repair_finds_what_the_journal_lost(tmp_path: Path) -> None:
    filled(tmp_path)
    damage(tmp_path, 0)
    report = repair(tmp_path)
    assert (report.frames, report.bad, report.locked) == (39, 0, 0)
    # The page has 18 entries in the order in which writes ended; two frames were deleted later.
    assert 16 <= report.recovered <= 18
    assert report.bytes == 39 * 12_288
    tier = DiskTier(tmp_path, MIB)
    assert hits(tier, [*range(40), "late"]) == 39
    assert not any(tier.contains([key_of(3), key_of(25)]))
    assert inspect(tmp_path).bad_pages == 0
    stored(tier, ["new"])
    tier.close()
    again = repair(tmp_path)
    assert (again.frames, again.bad, again.recovered) == (40, 0, 0)


def test_repair_drops_what_is_damaged(tmp_path: Path) -> None:
    filled(tmp_path)
    slab = tmp_path / "slab-00000003"
    data = bytearray(slab.read_bytes())
    for number in (5, 6, 7):
        data[number * 12_288 + 6000] ^= 1
    slab.write_bytes(data)
    seen: list[tuple[int, int]] = []
    report = repair(tmp_path, lambda done, total: seen.append((done, total)))
    assert (report.frames, report.bad, report.recovered) == (36, 3, 0)
    assert seen[-1] == (39, 39)
    assert repair(str(tmp_path)).bad == 0
    tier = DiskTier(tmp_path, MIB)
    assert hits(tier, [*range(40), "late"]) == 36


def test_repair_of_encrypted_frames_needs_the_secret(tmp_path: Path) -> None:
    ring = Keyring(bytes(range(32)))
    sealed = Envelope(integrity="aead", keyring=ring)
    filled(tmp_path, envelope=sealed)
    slab = tmp_path / "slab-00000003"
    data = bytearray(slab.read_bytes())
    data[5 * 12_288 + 6000] ^= 1
    slab.write_bytes(data)
    blind = repair(tmp_path)
    assert (blind.frames, blind.bad, blind.locked, blind.bytes) == (39, 0, 39, 0)
    wrong = Keyring(bytes(32))
    assert (scrub(tmp_path, keyring=wrong).bad, scrub(tmp_path, keyring=wrong).locked) == (0, 39)
    lost = repair(tmp_path, keyring=wrong)  # once took them all for damaged, and dropped them
    assert (lost.frames, lost.bad, lost.locked) == (39, 0, 39)
    assert scrub(tmp_path, keyring=ring).bad == 1
    damage(tmp_path, 0)
    with pytest.raises(StoreError, match=r"damaged journal and 39 encrypted.* Name their secret"):
        repair(tmp_path)
    report = repair(tmp_path, keyring=ring)
    assert (report.frames, report.bad, report.recovered, report.locked) == (38, 1, 17, 0)
    tier = DiskTier(tmp_path, MIB, envelope=sealed)
    assert hits(tier, [*range(40), "late"]) == 38
    tier.close()
    (tmp_path / "journal").unlink()
    tier = DiskTier(tmp_path, MIB, envelope=sealed)  # the slots know, for who has the secret
    assert hits(tier, [*range(40), "late"]) == 38


def test_repair_of_a_store_of_both_kinds(tmp_path: Path) -> None:
    ring = Keyring(bytes(range(32)))
    filled(tmp_path)
    leave(DiskTier(tmp_path, MIB, envelope=Envelope(integrity="aead", keyring=ring)), ["secret"])
    damage(tmp_path, 0)
    damage(tmp_path, 2)
    report = repair(tmp_path, keyring=ring)
    assert (report.frames, report.bad, report.locked) == (40, 0, 0)


def test_repair_wants_the_store_for_itself(tmp_path: Path) -> None:
    filled(tmp_path)
    owner = DiskTier(tmp_path, MIB)
    with pytest.raises(StoreError, match="another cache of this process"):
        repair(tmp_path)
    owner.close()
    assert msgspec.json.decode(msgspec.json.encode(repair(tmp_path)))["frames"] == 39
    with pytest.raises(StoreError, match="no readable store"):
        repair(tmp_path / "nowhere")


def test_the_wrong_secret_is_a_miss(tmp_path: Path) -> None:
    filled(tmp_path, envelope=Envelope(integrity="aead", keyring=Keyring(bytes(range(32)))))
    other = Envelope(integrity="aead", keyring=Keyring(bytes(32)))
    with pytest.warns(UserWarning, match="encrypted with another secret"):
        tier = DiskTier(tmp_path, MIB, envelope=other)
    assert tier.locked > 1 and outcomes(get(tier, [0])) == [("miss", "digest")]
    tier.close()
    with pytest.warns(UserWarning, match="encrypted with another secret"):
        tier = DiskTier(tmp_path, MIB)  # who wants no encryption gets no encrypted frame
    assert outcomes(get(tier, [1])) == [("miss", "integrity")]
    assert tier.contains([key_of(1)]) == [True]


def test_an_older_frame_in_the_same_place_is_a_miss(tmp_path: Path) -> None:
    """Generations differ: somebody, or a lost write, brought back what lay there before."""
    size = 8192
    tier = DiskTier(tmp_path, 8 * MIB)
    stored(tier, ["a"], size)
    (held,) = [held for _, held in tier._store.entries()]
    slab = tmp_path / f"slab-{held.slot.granules:08d}"
    before = slab.read_bytes()
    tier.delete([key_of("a")])
    stored(tier, ["a"], size)
    (again,) = [held for _, held in tier._store.entries()]
    assert again.slot == held.slot and again.seq > held.seq
    with slab.open("r+b") as file:
        file.write(before)
    assert scrub(tmp_path).bad == 1
    assert outcomes(get(tier, ["a"], size)) == [("miss", "foreign")]


# --- who may write --------------------------------------------------------------------------


def another(directory: Path, **arguments: object) -> DiskTier:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return DiskTier(directory, MIB, **arguments)  # type: ignore[arg-type]


def remove_lock(directory: Path) -> None:
    (directory / "lock").unlink()


def replace_lock(directory: Path) -> None:
    (directory / "lock").unlink()
    (directory / "lock").write_text("1\n")


def link_lock(directory: Path) -> None:
    (directory / "lock").rename(directory.parent / "taken")
    (directory / "lock").symlink_to(directory.parent / "taken")


def remove_journal(directory: Path) -> None:
    (directory / "journal").unlink()


def remove_slabs(directory: Path) -> None:
    for slab in directory.glob("slab-*"):
        slab.unlink()


def remove_directory(directory: Path) -> None:
    shutil.rmtree(directory)


def move_directory(directory: Path) -> None:
    directory.rename(directory.with_name("moved"))


def replace_directory(directory: Path) -> None:
    directory.rename(directory.with_name("moved"))
    directory.mkdir(mode=0o700)


HARM = [
    *(remove_lock, replace_lock, link_lock, remove_journal, remove_slabs, remove_directory),
    *(move_directory, replace_directory),
]


@pytest.mark.parametrize("harm", HARM)
@pytest.mark.parametrize("durability", ["none", "sync"])
def test_what_is_no_longer_ours_is_not_written(
    tmp_path: Path, harm: Callable[[Path], None], durability: str
) -> None:
    """Once the owner went on into files that nobody would find, and said that they were stored."""
    directory = tmp_path / "kv"
    tier = DiskTier(directory, MIB, durability=durability)  # type: ignore[arg-type]
    stored(tier, range(3))
    harm(directory)
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    (answer,) = put(tier, ["lost"])
    assert (answer.outcome, answer.reason) in [
        (Outcome.FAILED, "read-only"),
        (Outcome.FAILED, "ESTALE"),
    ]
    assert not tier.writable and tier.shared
    assert tier.delete([key_of(0)]) == 0
    with pytest.raises(StoreError):
        tier.erase([key_of(1)])
    ours = harm in (remove_slabs, remove_journal)  # the lock is: the store goes as far as its slot
    slabs = "slab-" if ours else "nothing"
    for path, content in after.items():
        assert path.name.startswith(slabs) or path.read_bytes() == content
    assert directory.exists() == (harm not in (remove_directory, move_directory))
    for name in [0, 1, 2, "lost"]:
        for answer in get(tier, [name]):
            assert answer.outcome in (Outcome.HIT, Outcome.MISS)


@pytest.mark.parametrize("harm", HARM)
def test_never_two_writers(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    directory = tmp_path / "kv"
    first = DiskTier(directory, MIB)
    stored(first, range(3))
    harm(directory)
    try:
        second = another(directory)
    except StoreError:  # a link in the place of the lock
        second = None
    for name in range(3, 30):
        both = [tier for tier in (first, second) if tier is not None and tier.writable]
        elsewhere = harm in (remove_directory, move_directory, replace_directory)
        assert len(both) < 2 or elsewhere, "both may write"
        done = [put(tier, [(name, n)])[0] for n, tier in enumerate((first, second)) if tier]
        assert sum(answer.outcome is Outcome.STORED for answer in done) <= 1
        for tier in (second, first):
            if tier is not None:
                tier.contains([key_of(0)])
    for tier in (second, first):
        if tier is not None:
            tier.close()
    if directory.exists() and not (directory / "lock").is_symlink():
        assert scrub(directory).bad == 0


def test_an_owner_whose_lock_was_removed_gives_way_and_may_come_back(tmp_path: Path) -> None:
    first = DiskTier(tmp_path, MIB, threads=0)
    stored(first, ["a"])
    (tmp_path / "lock").unlink()
    second = another(tmp_path, threads=0)
    assert not second.writable, "the directory is still the first one's"
    assert outcomes(put(first, ["b"])) == [("failed", "read-only")]
    assert hits(second, ["a", "b"]) == 1 and second.writable
    stored(second, ["c"])
    assert outcomes(put(first, ["d"])) == [("failed", "read-only")]
    assert hits(first, ["a", "c"]) == 2 and not first.writable
    second.close()
    assert hits(first, ["a", "c"]) == 2 and first.writable
    stored(first, ["e"])
    first.close()
    assert scrub(tmp_path).frames == 3


def test_a_lost_lock_is_noticed_in_the_middle_of_a_store(tmp_path: Path) -> None:
    """Between the place and the record: the record is not written, and nobody is told STORED."""
    tier = DiskTier(tmp_path, MIB, threads=0)
    stored(tier, ["a"])
    store, commit = tier._store, tier._store.commit

    def late(batch: Sequence[Record], claim: Callable[[], Iterable[object]]) -> None:
        (tmp_path / "lock").unlink()
        second = another(tmp_path)
        assert not second.writable and second.contains([key_of("a")]) == [True]
        assert not second.writable, "what was begun may still be written"
        second.close()
        commit(batch, claim)

    store.commit = late  # type: ignore[method-assign]
    assert outcomes(put(tier, ["b"])) == [("failed", "ESTALE")]
    second = another(tmp_path)
    assert second.writable and not second.contains([key_of("b")])[0]


@pytest.mark.parametrize("threads", [0, 1])
def test_a_reader_becomes_the_owner_when_there_is_none(tmp_path: Path, threads: int) -> None:
    owner = DiskTier(tmp_path, MIB)
    stored(owner, range(5))
    readers = [another(tmp_path, threads=threads) for _ in range(3)]
    for reader in readers:
        assert hits(reader, range(5)) == 5 and not reader.writable
    owner.delete([key_of(0)])
    stored(owner, ["late"])
    owner.close()
    for reader in readers:
        assert hits(reader, [*range(5), "late"]) == 5
    assert [reader.writable for reader in readers] == [True, False, False]
    assert all(reader.shared for reader in readers), "frames may be there that it never told of"
    stored(readers[0], range(10, 20))
    assert hits(readers[1], range(10, 20)) == 10
    assert outcomes(put(readers[1], ["x"])) == [("failed", "read-only")]
    readers[0].close()
    assert hits(readers[2], range(10, 20)) == 10 and readers[2].writable
    for reader in readers:
        reader.close()
    assert scrub(tmp_path).bad == 0 and inspect(tmp_path).frames == 15


def test_a_closed_reader_takes_nothing_over(tmp_path: Path) -> None:
    owner, reader = DiskTier(tmp_path, MIB), another(tmp_path)
    reader.close()
    owner.close()
    assert reader.contains([key_of(0)]) == [False] and list(reader.scan()) == []
    assert not inspect(tmp_path).owned


def test_inspect_sees_an_owner_whose_lock_is_gone(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, MIB)
    (tmp_path / "lock").unlink()
    assert inspect(tmp_path).owned
    tier.close()
    assert not inspect(tmp_path).owned


class ReadOnly(FileIO):
    """A file system that was mounted to be read, or files that may only be read."""

    def __init__(self, code: int = errno.EROFS) -> None:
        self.code = code

    def open(self, path: str, *, write: bool) -> int:
        if write:
            raise OSError(self.code, os.strerror(self.code), path)
        return super().open(path, write=False)

    def restrict(self, path: str) -> None:
        raise OSError(self.code, os.strerror(self.code), path)

    truncate = punch = write = replace = remove = None  # type: ignore[assignment]


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_read_only_file_system_serves_what_it_holds(tmp_path: Path, code: int) -> None:
    leave(DiskTier(tmp_path, MIB), range(4))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.warns(UserWarning, match=os.strerror(code)):
        tier = tier_over(ReadOnly(code), tmp_path, MIB)
    assert not tier.writable and hits(tier, range(5)) == 4
    assert outcomes(put(tier, ["x"])) == [("failed", "read-only")]
    assert tier.delete([key_of(0)]) == 0 and len(list(tier.scan())) == 4
    with pytest.raises(StoreError):
        tier.erase([key_of(0)])
    tier.close()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    with pytest.raises(StoreError, match=rf"can only be read \({os.strerror(code)}\)"):
        tier_over(ReadOnly(code), tmp_path, MIB, exclusive=True)
    (tmp_path / "empty").mkdir(mode=0o700)
    with pytest.raises(StoreError, match="cannot be used"):
        tier_over(ReadOnly(code), tmp_path / "empty", MIB)


def test_a_mount_that_is_read_only(tmp_path: Path) -> None:
    """The same with real system calls: io_uring, and no file without a name."""
    directory = tmp_path / "kv"
    leave(DiskTier(directory, MIB), range(4))
    script = (
        "import sys, warnings; sys.path.insert(0, sys.argv[2]); warnings.simplefilter('ignore');"
        "from tests.tiers.test_disk_home import *;"
        "tier = DiskTier(sys.argv[1], MIB);"
        "print(tier.writable, hits(tier, range(5)), outcomes(put(tier, ['x'])), inspect("
        "sys.argv[1]).frames, scrub(sys.argv[1]).bad); tier.close()"
    )
    mount = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
    unshared = ["unshare", "--mount", "--map-root-user", "sh", "-c", mount, str(directory)]
    if subprocess.run([*unshared, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mounts of one's own are allowed here")
    root = str(Path(__file__).parents[2])
    python = [sys.executable, "-c", script, str(directory), root]
    done = subprocess.run([*unshared, *python], capture_output=True, text=True, check=False)
    assert done.stdout.split() == "False 4 [('failed', 'read-only')] 4 0".split(), done.stderr


LIMITED = """
import resource, sys
from flowkv.core.errors import FlowKVError
from flowkv.tiers.disk import DiskTier
from flowkv.tiers.disk.inspect import inspect, scrub
from flowkv.tiers.disk.inspect import repair
from tests.tiers.frames import hits

def load(directory):
    tier = DiskTier(directory, 1 << 28)
    assert hits(tier, range(5)) == 5
    tier.close()

work = {"open": load, "inspect": inspect, "scrub": scrub, "repair": repair}[sys.argv[1]]
pages = int(open("/proc/self/statm").read().split()[0])
most = pages * resource.getpagesize() + (int(sys.argv[3]) << 20)
resource.setrlimit(resource.RLIMIT_AS, (most, most))
try:
    work(sys.argv[2])
    print("done")
except FlowKVError as error:
    print(type(error).__name__)
"""


@pytest.mark.parametrize("work", ["open", "inspect", "scrub", "repair"])
def test_a_process_without_memory_is_told(tmp_path: Path, work: str) -> None:
    """Not by MemoryError, OSError or ImportError, nor by a thread that never starts."""
    tier = DiskTier(tmp_path, 1 << 28)
    stored(tier, range(5))
    stored(tier, ["large"], 16 << 20)
    tier.close()
    said = []
    for spare_mib in (0, 8, 70, 300, 2048):
        done = subprocess.run(
            [sys.executable, "-c", LIMITED, work, str(tmp_path), str(spare_mib)],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.strip())
    assert set(said) <= {"StoreError", "done"} and said[-1] == "done"
    assert "StoreError" in said or work == "inspect"
