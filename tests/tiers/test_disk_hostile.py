"""S10: fields that no store comes to, with the right checksums, and files of claimed lengths."""

from __future__ import annotations

import os
import random
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from flowkv.tiers import Outcome, encode_header
from flowkv.tiers.disk import DiskTier
from tests.inside import (
    DELETED,
    STORED,
    FileIO,
    Held,
    Record,
    Slot,
    inspect,
    pack_header,
    pack_page,
    pack_record,
    repair,
    scrub,
)
from tests.inside import frame_describe as describe_frame
from tests.inside import journal_PAGE_BYTES as PAGE_BYTES

from .frames import body_of, get, hits, info_of, key_of, put, stored

MIB = 1 << 20
GIB = 1 << 30
NAMES = range(12)
in_files = settings(
    max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)


def superblock_of(directory: Path) -> dict[str, object]:
    return msgspec.json.decode(
        (directory / "superblock.json").read_bytes().rpartition(b"\n")[0][:-8]
    )


def change_superblock(directory: Path, **fields: object) -> None:
    body = msgspec.json.encode(superblock_of(directory) | fields)
    (directory / "superblock.json").write_bytes(body + b"\n%08x\n" % zlib.crc32(body))


def filled(directory: Path, capacity_bytes: int = MIB) -> Path:
    tier = DiskTier(directory, capacity_bytes, threads=0)
    stored(tier, NAMES)
    tier.close()
    return directory


def say(directory: Path, *records: Record) -> None:
    """Appends a page to the journal."""
    store_id = bytes.fromhex(str(superblock_of(directory)["store_id"]))
    with (directory / "journal").open("ab") as file:
        number = file.tell() // PAGE_BYTES
        file.write(pack_page(number, store_id, map(pack_record, records)))


def held_of(name: object = "crafted", **changes: object) -> Held:
    held = Held(1000, Slot(3, 1), 1, info_of(8192), 4096 + 8192)
    return held._replace(**changes)  # type: ignore[arg-type]


def lives_on(directory: Path, names: range = NAMES, *, bad: int = 0) -> None:
    """What was there is served; what is stored now is served after the next opening, and so on."""
    there: list[object] = list(names)
    for new in ("a", "b", "c"):
        tier = DiskTier(directory, MIB, threads=0)
        assert hits(tier, there) == len(there)
        stored(tier, [new])
        there.append(new)
        assert tier.delete([key_of(there.pop(0))]) == 1
        tier.close()
    assert scrub(directory).bad <= bad
    assert inspect(directory).frames >= len(there)


# ---- sequence numbers


@in_files
@given(seq=st.integers(1 << 54, (1 << 64) - 1), op=st.sampled_from((STORED, DELETED)))
@example(seq=(1 << 64) - 1, op=STORED)
@example(seq=(1 << 64) - 1, op=DELETED)
@example(seq=(1 << 64) - 2, op=STORED)
@example(seq=(1 << 63) - 1, op=STORED)
def test_numbers_that_no_store_comes_to(
    tmp_path_factory: pytest.TempPathFactory, seq: int, op: int
) -> None:
    directory = filled(tmp_path_factory.mktemp("seq") / "kv")
    crafted = held_of(seq=seq)
    say(directory, Record(op, key_of("crafted"), crafted), Record(op, key_of(3), crafted))
    lives_on(directory)


@pytest.mark.parametrize("seq", [(1 << 64) - 1, (1 << 64) - 2, 1 << 63, 10**16])
def test_headers_with_numbers_that_no_store_comes_to(tmp_path: Path, seq: int) -> None:
    directory = filled(tmp_path / "kv")
    header = pack_header(describe_frame(key_of(0), info_of(8192), body_of(0), seq))
    assert len(header) == len(encode_header(key_of(0), info_of(8192), body_of(0)))
    (directory / "journal").unlink()
    slab = directory / "slab-00000003"
    data = bytearray(slab.read_bytes())
    data[: len(header)] = header  # over the frame in the first slot
    slab.write_bytes(data)
    lives_on(directory, range(1, len(NAMES)))


# ---- whose pages


@pytest.mark.parametrize(
    "store_id", ["", "zz", "é" * 16, "00" * 15, "00" * 17, "0" * 31, "00" * 99]
)
@pytest.mark.parametrize("lost", [False, True])
def test_names_that_no_store_has(tmp_path: Path, store_id: str, lost: bool) -> None:
    directory = filled(tmp_path / "kv")
    change_superblock(directory, store_id=store_id)
    if lost:
        (directory / "journal").unlink()
    assert inspect(directory).frames == len(NAMES)
    assert scrub(directory).frames == len(NAMES)
    lives_on(directory)
    assert len(bytes.fromhex(str(superblock_of(directory)["store_id"]))) == 16


def test_repair_of_a_store_without_a_name(tmp_path: Path) -> None:
    directory = filled(tmp_path / "kv")
    change_superblock(directory, store_id="not hex")
    assert repair(directory).frames == len(NAMES)
    lives_on(directory)


# ---- places


PLACES = [
    *(Slot(3, (1 << 40) - 1), Slot((1 << 23) - 1, (1 << 40) - 1), Slot((1 << 23) - 1, 0)),
    *(Slot(3, 1 << 39), Slot(3, 5000)),
]


@pytest.mark.parametrize("slot", PLACES, ids=str)
@pytest.mark.parametrize("stripes", [1, 3])
def test_one_bad_load_never_fails_its_batch(tmp_path: Path, slot: Slot, stripes: int) -> None:
    """Of a reader, who believes the journal for longer, and of the next owner."""
    owner = DiskTier(tmp_path / "kv", MIB)
    stored(owner, NAMES)
    step = 8192 if stripes == 1 else 1000
    crafted = held_of(
        slot=slot, stripes=stripes, info=info_of(step), stored_bytes=4096 + stripes * step
    )
    say(tmp_path / "kv", Record(STORED, key_of("crafted"), crafted))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        reader = DiskTier(tmp_path / "kv", MIB)
    names = ["crafted", *NAMES, "crafted"]
    for tier in (reader, owner):
        outcomes = [answer.outcome for answer in get(tier, names)]
        assert outcomes[1:-1] == [Outcome.HIT] * len(NAMES)
        assert {outcomes[0], outcomes[-1]} == {Outcome.MISS}
        assert inspect(tmp_path / "kv").owned
        assert scrub(tmp_path / "kv").frames in (len(NAMES), len(NAMES) + 1)
        tier.close()
    lives_on(tmp_path / "kv", bad=1)


# ---- lengths


class Reads:
    """Bytes that all tiers of this process read, and calls."""

    def __init__(self) -> None:
        self.n_bytes = self.calls = 0


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reads]:
    seen, real = Reads(), FileIO.read

    def read(self: FileIO, fd: int, buffers: list[memoryview], offset: int) -> int:
        seen.n_bytes += sum(map(len, buffers))
        seen.calls += 1
        assert seen.n_bytes < 256 * MIB, "no end of reading"
        return real(self, fd, buffers, offset)

    monkeypatch.setattr(FileIO, "read", read)
    yield seen


def stretch(directory: Path, name: str, size: int) -> None:
    try:
        os.truncate(directory / name, size)
    except OSError:
        pytest.skip("this file system has no files of that length")


def opened(directory: Path) -> None:
    DiskTier(directory, MIB, threads=0).close()


LOOKS: list[Callable[[Path], object]] = [inspect, scrub, repair, opened]


@pytest.mark.parametrize("look", LOOKS, ids=["inspect", "scrub", "repair", "open"])
@pytest.mark.parametrize("size", [64 * GIB, 15 << 40])
@pytest.mark.parametrize("name", ["journal", "slab-00000003"])
def test_what_is_read_does_not_follow_the_length(
    tmp_path: Path, reads: Reads, look: Callable[[Path], object], size: int, name: str
) -> None:
    directory = filled(tmp_path / "kv")
    stretch(directory, name, size)
    if name != "journal":
        (directory / "journal").unlink()  # so that slots are looked through
    before = reads.n_bytes
    look(directory)
    assert reads.n_bytes - before < 4 * MIB
    lives_on(directory)
    assert (directory / name).stat().st_size < MIB


@pytest.mark.parametrize("kind", ["noise", "zeros"])
def test_a_journal_larger_than_its_store_is_not_read(
    tmp_path: Path, reads: Reads, kind: str
) -> None:
    directory = filled(tmp_path / "kv")
    rest = random.Random(0).randbytes(MIB) if kind == "noise" else bytes(MIB)
    with (directory / "journal").open("ab") as file:
        for _ in range(24):
            file.write(rest)
    for look in (inspect, scrub, opened):
        before = reads.n_bytes
        look(directory)
        assert reads.n_bytes - before < 2 * MIB
    assert (directory / "journal").stat().st_size < MIB // 4
    lives_on(directory)


def test_an_honest_journal_is_read_whatever_the_capacity_is_now(tmp_path: Path) -> None:
    """The store was larger: its newest frames are at the end of a journal of that size."""
    directory = tmp_path / "kv"
    tier = DiskTier(directory, 256 * MIB, threads=0)
    for first in range(0, 600, 60):
        stored(tier, range(first, first + 60), 10)
    tier.close()
    assert (directory / "journal").stat().st_size > 2 * (64 << 10)
    tier = DiskTier(directory, 256 << 10, threads=0)
    assert hits(tier, range(590, 600), 10) == 10


def test_a_frame_far_out_in_a_file_of_holes(tmp_path: Path) -> None:
    """It is served, and no memory is spent on the places before it."""
    directory = filled(tmp_path / "kv")
    far = Slot(3, (32 * GIB) // (3 * 4096))
    header = pack_header(describe_frame(key_of("far"), info_of(8192), body_of("far"), 500))
    with (directory / "slab-00000003").open("r+b") as file:
        try:
            file.seek(far.offset)
            file.write(header + body_of("far"))
        except OSError:
            pytest.skip("this file system has no files of that length")
    say(directory, Record(STORED, key_of("far"), held_of(seq=500, slot=far)))
    tier = DiskTier(directory, MIB, threads=0)
    assert hits(tier, [*NAMES, "far"]) == len(NAMES) + 1
    assert tier.used_bytes() < MIB
    stored(tier, range(100, 110))
    assert sum(len(slab.free) for slab in tier._store._slabs._slabs.values()) <= 1 << 20
    assert put(tier, ["x"])[0].outcome is Outcome.STORED
    tier.close()
    assert (directory / "slab-00000003").stat().st_blocks * 512 < MIB
