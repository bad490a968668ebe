from __future__ import annotations

import os
import random
import shutil
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flowkv import cli
from flowkv.tiers import Envelope
from flowkv.tiers.disk import DiskTier
from tests.inside import (
    FileIO,
    FrameShare,
    Held,
    Keyring,
    Record,
    Slot,
    StoreError,
    Superblock,
    drop,
    inspect,
    open_journal,
    read_superblock,
    repair,
    scrub,
    write_superblock,
)

from .frames import body_of, info_of, key_of, leave, stored

MIB = 1 << 20


def fill(directory: Path) -> DiskTier:
    tier = DiskTier(directory, MIB)
    stored(tier, range(4))
    stored(tier, range(4, 6), size=5000, kind="state", namespace=key_of("other"))
    stored(tier, [6], codec=3, fidelity=3)
    return tier


def test_inspect(tmp_path: Path) -> None:
    tier = fill(tmp_path)
    found = inspect(tmp_path)
    assert (found.format, found.readable, found.owned) == (2, True, True)
    assert (found.frames, found.bytes) == (7, 5 * 8192 + 2 * 5000)
    assert found.kinds == {"page": FrameShare(5, 5 * 8192), "state": FrameShare(2, 10_000)}
    assert found.codecs == {"kv4c": FrameShare(1, 8192), "raw": FrameShare(6, 4 * 8192 + 10_000)}
    assert found.namespaces[key_of("other").hex()] == FrameShare(2, 10_000)
    assert found.capacity_bytes == MIB
    assert 0 < found.disk_bytes < tier.used_bytes() <= MIB
    assert found.free_bytes == MIB - found.disk_bytes
    assert (found.bad_pages, found.journal_lost) == (0, False)
    tier.close()
    assert not inspect(tmp_path).owned
    assert msgspec.json.decode(msgspec.json.encode(found))["frames"] == 7


def test_inspecting_does_not_get_in_the_way(tmp_path: Path) -> None:
    fill(tmp_path).close()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    inspect(tmp_path)
    scrub(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    tier = DiskTier(tmp_path, MIB)
    assert tier.writable


def test_scrub(tmp_path: Path) -> None:
    tier = fill(tmp_path)
    seen: list[tuple[int, int]] = []
    report = scrub(tmp_path, lambda done, total: seen.append((done, total)))
    assert (report.frames, report.bad, report.bytes) == (7, 0, 5 * 12_288 + 2 * 9096)
    assert seen == [(n, 7) for n in range(1, 8)]
    assert report.seconds >= 0
    slab = tmp_path / "slab-00000003"
    data = bytearray(slab.read_bytes())
    data[6000] ^= 1
    slab.write_bytes(data)
    assert scrub(str(tmp_path)).bad == 1
    assert len(list(tier.scan())) == 7, "a scrub changes nothing"


def test_what_the_owner_dropped_meanwhile_is_not_bad(tmp_path: Path) -> None:
    tier = fill(tmp_path)

    def drop(done: int, total: int) -> None:
        if done == 1:
            tier.delete([key_of(name) for name in range(7)])
            stored(tier, ["new"])

    assert scrub(tmp_path, drop).bad == 0


@pytest.mark.parametrize("loss", [None, b"", bytes(4096), b"noise" * 3000])
def test_without_a_journal(tmp_path: Path, loss: bytes | None) -> None:
    fill(tmp_path).close()
    journal = tmp_path / "journal"
    journal.unlink()
    if loss is not None:
        journal.write_bytes(loss)
    found = inspect(tmp_path)
    assert (found.frames, found.journal_lost) == (7, True)
    assert scrub(tmp_path).frames == 7


def test_damaged_pages_are_counted(tmp_path: Path) -> None:
    leave(DiskTier(tmp_path, MIB), range(40))
    journal = bytearray((tmp_path / "journal").read_bytes())
    journal[4096:8192] = random.Random(0).randbytes(4096)
    (tmp_path / "journal").write_bytes(journal)
    found = inspect(tmp_path)
    assert (found.frames, found.bad_pages) == (22, 1)


def test_an_empty_store(tmp_path: Path) -> None:
    DiskTier(tmp_path, MIB).close()
    assert inspect(tmp_path).frames == 0
    assert scrub(tmp_path).frames == 0


def test_what_is_no_store(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        for call in (inspect, scrub):
            with pytest.raises(StoreError, match="no readable store"):
                call(path)
    write_superblock(FileIO(), tmp_path, Superblock(store="flowkv", format=7))
    assert not inspect(tmp_path).readable
    with pytest.raises(StoreError, match="format 7"):
        scrub(tmp_path)
    shutil.rmtree(tmp_path)
    tmp_path.write_text("")
    with pytest.raises(StoreError, match="cannot be read"):
        inspect(tmp_path)


# --- frames by namespace --------------------------------------------------------------------


def of_models(directory: Path, **arguments: Any) -> dict[str, str]:
    """A store with frames of two models that said their names and two old ones; digests by name."""
    tier = DiskTier(directory, MIB, **arguments)
    for name in ("new", "other"):
        tier.bind(key_of(name), f"model-{name}@3")
        stored(tier, [f"{name} {n}" for n in range(3)], namespace=key_of(name))
    for name in ("old", "older"):
        stored(tier, [f"{name} {n}" for n in range(2)], namespace=key_of(name))
    tier.close()
    return {name: key_of(name).hex() for name in ("new", "other", "old", "older")}


def bodies(directory: Path, name: str) -> int:
    """How many frames of a model are anywhere in the files."""
    data = b"".join(path.read_bytes() for path in directory.glob("slab-*"))
    return sum(body_of(f"{name} {n}")[:64] in data for n in range(3))


def test_frames_are_shown_by_namespace(tmp_path: Path) -> None:
    digests = of_models(tmp_path)
    found, report = inspect(tmp_path), scrub(tmp_path)
    for seen in (found, report):
        assert seen.namespaces.keys() == set(digests.values())
        assert seen.namespaces[digests["new"]] == FrameShare(3, 3 * 8192)
        assert seen.namespaces[digests["old"]] == FrameShare(2, 2 * 8192)
        assert seen.names == {digests["new"]: "model-new@3", digests["other"]: "model-other@3"}
    DiskTier(tmp_path, MIB).close()  # names stay, whoever opens it
    assert inspect(tmp_path).names == found.names


@pytest.mark.parametrize("how", ["digest", "begin", "name"])
@pytest.mark.parametrize("solid", [False, True])
def test_dropping_a_namespace_leaves_nothing_of_it(
    tmp_path: Path, how: str, solid: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if solid:

        def punch(self: FileIO, fd: int, offset: int, size: int) -> None:
            raise OSError(95, "Operation not supported")

        monkeypatch.setattr(FileIO, "punch", punch)
    digests = of_models(tmp_path)
    given = {"digest": digests["new"], "begin": digests["new"][:8].upper(), "name": "model-new@3"}
    assert bodies(tmp_path, "new") == 3
    report = drop(tmp_path, given[how])
    assert (report.namespaces, report.frames, report.bytes) == ([digests["new"]], 3, 3 * 8192)
    assert bodies(tmp_path, "new") == 0 and bodies(tmp_path, "other") == 3
    found = inspect(tmp_path)
    assert found.frames == 7 and digests["new"] not in {**found.namespaces, **found.names}
    assert scrub(tmp_path).bad == 0
    with pytest.raises(StoreError, match=r"no frames of .* `flowkv inspect` lists them"):
        drop(tmp_path, given[how])


def test_dropping_what_no_model_has_named(tmp_path: Path) -> None:
    digests = of_models(tmp_path)
    report = drop(tmp_path, "unknown")
    assert report.namespaces == sorted([digests["old"], digests["older"]]) and report.frames == 4
    assert inspect(tmp_path).namespaces.keys() == {digests["new"], digests["other"]}
    assert bodies(tmp_path, "old") == bodies(tmp_path, "older") == 0


def test_dropping_wants_the_store_for_itself_and_to_know_what(tmp_path: Path) -> None:
    of_models(tmp_path)
    owner = DiskTier(tmp_path, MIB)
    with pytest.raises(StoreError, match=r"another process owns .* Close it there, then drop"):
        drop(tmp_path, "unknown")
    owner.close()
    for wrong in ("", "x", "model-new", key_of("new").hex()[:7], key_of("nobody").hex(), "../new"):
        with pytest.raises(StoreError, match="no frames of the namespace"):
            drop(tmp_path, wrong)
    tier = DiskTier(tmp_path, MIB)
    tier.bind(key_of("old"), "model-new@3")
    tier.close()
    with pytest.raises(StoreError, match="Name one of these"):
        drop(tmp_path, "model-new@3")
    assert inspect(tmp_path).frames == 10
    with pytest.raises(StoreError, match="no readable store"):
        drop(tmp_path / "nowhere", "unknown")


def test_dropping_without_the_secret_or_a_journal(tmp_path: Path) -> None:
    sealed = Envelope(integrity="aead", keyring=Keyring(bytes(range(32))))
    digests = of_models(tmp_path, envelope=sealed)
    assert drop(tmp_path, digests["old"]).frames == 2  # which needs no look into frames
    (tmp_path / "journal").write_bytes(b"noise" * 3000)
    with pytest.raises(StoreError, match="Name their secret"):
        drop(tmp_path, "model-new@3")
    assert drop(tmp_path, "model-new@3", keyring=Keyring(bytes(range(32)))).frames == 3
    assert inspect(tmp_path).frames == 5


def test_names_of_models_are_bounded_and_shown_safely(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, MIB)
    for number in range(300):
        tier.bind(key_of(number), "\x1b[2J" + "x" * 5000)
    tier.close()
    assert (tmp_path / "superblock.json").stat().st_size < 1 << 20
    names = inspect(tmp_path).names
    assert len(names) == 256 and set(names.values()) == {"?[2J" + "x" * 196}
    assert DiskTier(tmp_path, MIB).writable


def test_an_older_version_opens_a_store_with_names(tmp_path: Path) -> None:
    """What it does not know of a superblock it leaves out: names are lost, and nothing else."""
    of_models(tmp_path)
    superblock = read_superblock(FileIO(), tmp_path)
    assert superblock is not None
    superblock.namespaces = {}
    write_superblock(FileIO(), tmp_path, superblock)
    assert inspect(tmp_path).names == {} and inspect(tmp_path).frames == 10
    assert drop(tmp_path, "unknown").frames == 10


# --- what files claim of their lengths ----------------------------------------------------------

BUDGET = 8 * MIB
LOOKS: dict[str, Callable[[Path], object]] = {
    "inspect": inspect,
    "scrub": scrub,
    "repair": repair,
    "drop": lambda path: drop(path, key_of("other").hex()),
    "cli inspect": lambda path: cli.main(["inspect", str(path)]),
    "cli scrub": lambda path: cli.main(["scrub", str(path)]),
    "open": lambda path: DiskTier(path, MIB).close(),
}


@pytest.mark.parametrize(
    "lies",
    [
        *(["superblock.json"], ["lock"], ["learned", "superblock.json.tmp", "journal.tmp"]),
        *(["slab-00000003"], ["slab-00000001", "slab-00500000", "slab-99999999"], ["journal"]),
        *(["slab-00000003", "no journal"], ["slab-00000001", "slab-99999999", "no journal"]),
    ],
)
@pytest.mark.parametrize("look", LOOKS)
def test_work_is_bounded_by_the_capacity_whatever_files_claim(
    tmp_path: Path, lies: list[str], look: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sparse files of 64 GiB were once read to their ends."""
    fill(tmp_path).close()
    for name in lies:
        if name == "no journal":
            (tmp_path / "journal").unlink()
        else:
            fd = os.open(tmp_path / name, os.O_RDWR | os.O_CREAT, 0o600)
            os.ftruncate(fd, 64 << 30)
            os.close(fd)
    work = Counter[str]()
    read = FileIO.read

    def counted(self: FileIO, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        work["calls"] += 1
        work["bytes"] += sum(buffer.nbytes for buffer in buffers)
        assert work["bytes"] <= BUDGET and work["calls"] < 10_000, "it reads on and on"
        return read(self, fd, buffers, offset)

    monkeypatch.setattr(FileIO, "read", counted)
    with suppress(StoreError):  # of a superblock with zeros behind it, for one
        LOOKS[look](tmp_path)


@pytest.mark.parametrize("lossless", [False, True])
def test_a_record_that_lies_about_a_length_takes_no_memory(tmp_path: Path, lossless: bool) -> None:
    fill(tmp_path).close()
    superblock = read_superblock(FileIO(), tmp_path)
    assert superblock is not None
    journal = open_journal(FileIO(), tmp_path, superblock, write=True)
    journal.read_new()
    slot = Slot((1 << 23) - 1, 0)
    stripes, n_bytes = (1, 30 << 30) if lossless else (1, (30 << 30) - 4096)
    info = info_of(n_bytes, stripe_bytes=n_bytes)
    stored_bytes = n_bytes if lossless else n_bytes + 4096
    held = Held(journal.next_seq(), slot, stripes, info, stored_bytes, lossless=lossless)
    journal.append([Record(1, key_of("lie"), held)])
    journal.close()
    with (tmp_path / f"slab-{slot.granules:08d}").open("wb") as file:
        file.truncate(64 << 30)
    tracemalloc.start()
    report = scrub(tmp_path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert report.frames - report.bad == 7 and report.bad <= 1 and most < 64 * MIB
