from __future__ import annotations

import random
import shutil
from pathlib import Path

import msgspec
import pytest

from flowkv.core.errors import StoreError
from flowkv.tiers.disk import DiskTier
from flowkv.tiers.disk.files import FileIO
from flowkv.tiers.disk.home import Superblock, write_superblock
from flowkv.tiers.disk.inspect import Share, inspect, scrub

from .frames import key_of, stored

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
    assert found.kinds == {"page": Share(5, 5 * 8192), "state": Share(2, 10_000)}
    assert found.codecs == {"kv4c": Share(1, 8192), "raw": Share(6, 4 * 8192 + 10_000)}
    assert found.namespaces[key_of("other").hex()] == Share(2, 10_000)
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
    tier.close()


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
    tier.close()


def test_what_the_owner_dropped_meanwhile_is_not_bad(tmp_path: Path) -> None:
    tier = fill(tmp_path)

    def drop(done: int, total: int) -> None:
        if done == 1:
            tier.delete([key_of(name) for name in range(7)])
            stored(tier, ["new"])

    assert scrub(tmp_path, drop).bad == 0
    tier.close()


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
    tier = DiskTier(tmp_path, MIB)
    stored(tier, range(40))
    tier.close()
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
