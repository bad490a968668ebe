"""Frames with the digests of earlier releases are read, verified, and written by nobody."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from flowkv import Tier
from flowkv.tiers import BadFrame, Load, Outcome, Store, decode_header, verify
from flowkv.tiers.disk import DiskTier
from tests.inside import (
    NH_128,
    XXH3_128,
    HostTier,
    Journal,
    inspect,
    pack_header,
    repair,
    scrub,
    verify_stripes,
)
from tests.inside import journal_Rows as Rows

from .format1 import Format1Envelope, header_of
from .frames import LAYOUT, answers, body_of, get, hits, info_of, key_of, outcomes, stored

GOLDEN = "eb64b6ebe000d8928e190da03594a2b757b6d087245a37d9e37a044cde512130"
NAMES = [f"{n}" for n in range(24)]


def test_the_writer_makes_the_bytes_of_then() -> None:
    body = bytes(range(256)) * 32
    data = header_of(key_of("golden"), info_of(4096), body)
    assert hashlib.sha256(data).hexdigest() == GOLDEN, "of release 0.1 and later"
    header = decode_header(data)
    verify(header, body)
    assert header.integrity == XXH3_128 and pack_header(header) == data


@pytest.mark.parametrize("stripes", [1, 3, 241])
def test_every_change_is_found(stripes: int) -> None:
    body = body_of(stripes, 4096 * stripes)
    data = header_of(key_of(stripes), info_of(4096), body)
    header, rng = decode_header(data), random.Random(stripes)
    verify(header, body)
    verify_stripes(header, stripes - 1, body[-4096:])
    for _ in range(1000):
        bit, frame = rng.randrange(8 * len(data + body)), bytearray(data + body)
        frame[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BadFrame):
            verify(decode_header(frame), frame[len(data) :])
    other = bytearray(data)
    other[35] = NH_128  # the same frame with the name of the other digest
    with pytest.raises(BadFrame, match="does not match its digest"):
        decode_header(other)


def test_it_is_no_tag() -> None:
    data = header_of(key_of("a"), info_of(4096), bytes(4096))
    with pytest.raises(BadFrame, match="integrity 0"):
        decode_header(data, 1)


def old_store(path: Path, names: list[str], size: int = 65536) -> None:
    with closing(DiskTier(path, 16 << 20, envelope=Format1Envelope())) as tier:
        stored(tier, names, size)


def test_a_store_of_then_is_served(tmp_path: Path) -> None:
    old_store(tmp_path, NAMES[:12], 65536)
    with closing(DiskTier(tmp_path, 16 << 20)) as tier:
        assert hits(tier, NAMES[:12], 65536) == 12
        stored(tier, NAMES[12:], 65536)
        stored(tier, NAMES[:1], 65536)  # is there, and stays as it is
        mixed = [name for pair in zip(NAMES[:12], NAMES[12:], strict=True) for name in pair]
        for _ in range(3):  # with headers read, and with digests known
            assert hits(tier, mixed, 65536) == 24
    kinds = {decode_header(head).integrity for head in heads(tmp_path)}
    assert kinds == {XXH3_128, NH_128}
    with closing(DiskTier(tmp_path, 16 << 20)) as tier:
        assert hits(tier, mixed, 65536) == 24


def test_what_an_older_release_stored_between_is_served_and_erased(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads no records of new frames: it counts from 1, and stores into the slots of those."""
    with closing(DiskTier(tmp_path, 16 << 20)) as tier:
        for _ in range(2):
            tier.delete([key_of(name) for name in NAMES[:6]])
            stored(tier, NAMES[:6], 65536)
    read_all = Journal.read_new

    def read_old(journal: Journal) -> Rows:
        rows = read_all(journal)
        journal._next_seq = 1
        return rows[rows["integrity"] != NH_128]

    with monkeypatch.context() as then:
        then.setattr(Journal, "read_new", read_old)
        old_store(tmp_path, NAMES[6:9])
    with closing(DiskTier(tmp_path, 16 << 20)) as tier:
        assert hits(tier, NAMES[6:9], 65536) == 3
        assert tier.erase([key_of(NAMES[6])]) == 1
    with closing(DiskTier(tmp_path, 16 << 20)) as tier:
        assert {entry.key for entry in tier.scan()} == {key_of(name) for name in NAMES[7:9]}
    there = b"".join(file.read_bytes() for file in tmp_path.glob("slab-*"))
    assert body_of(NAMES[6], 65536)[:64] not in there


def heads(path: Path) -> list[bytes]:
    """Pages of all files that begin as headers do."""
    found = []
    for file in path.rglob("*"):
        if file.is_file():
            data = file.read_bytes()
            pages = (data[at : at + 4096] for at in range(0, len(data), 4096))
            found += [page for page in pages if page.startswith(b"FKVFRAME")]
    return found


def test_damage_there_is_found(tmp_path: Path) -> None:
    old_store(tmp_path, NAMES[:6])
    for file in tmp_path.rglob("*"):
        data = bytearray(file.read_bytes()) if file.is_file() else bytearray()
        at = data.find(body_of(NAMES[2], 65536)[:64])
        if at >= 0:
            data[at + 5000] ^= 4
            file.write_bytes(data)
    with closing(DiskTier(tmp_path, 16 << 20)) as tier:
        done = outcomes(get(tier, NAMES[:6], 65536))
        assert done[2] == ("miss", "digest")
        assert done[:2] + done[3:] == [("hit", "")] * 5


def test_stripes_alone(tmp_path: Path) -> None:
    size, step = 16 * 4096, 4096
    with closing(DiskTier(tmp_path, 16 << 20, envelope=Format1Envelope())) as tier:
        body = body_of("a", size)
        item = Store(key_of("a"), info_of(step), memoryview(body))
        answers(tier, tier.submit_store([item]), 1)
    with closing(DiskTier(tmp_path, 16 << 20)) as tier:
        for first in (0, 7, 15, 7):
            target = bytearray(step)
            load = Load(key_of("a"), memoryview(target), LAYOUT, 0, first, 1)
            (done,) = answers(tier, tier.submit_load([load]), 1)
            assert done.outcome is Outcome.HIT
            assert target == body[first * step : (first + 1) * step]


def test_a_store_whose_journal_is_lost(tmp_path: Path) -> None:
    old_store(tmp_path, NAMES[:6])
    with closing(DiskTier(tmp_path, 16 << 20)) as tier:
        stored(tier, NAMES[6:9], 65536)
    (tmp_path / "journal").unlink()
    repair(tmp_path)
    with closing(DiskTier(tmp_path, 16 << 20)) as tier:
        assert hits(tier, NAMES[:9], 65536) == 9


def test_what_looks_at_stores(tmp_path: Path) -> None:
    old_store(tmp_path, NAMES[:6])
    with closing(DiskTier(tmp_path, 16 << 20)) as tier:
        stored(tier, NAMES[6:9], 65536)
    assert inspect(tmp_path).frames == 9
    assert not scrub(tmp_path).bad


@pytest.mark.parametrize("old_first", [True, False])
def test_peers_of_one_place_with_both(tmp_path: Path, *, old_first: bool) -> None:
    """Each writes its own form beside the other's; who knows both reads all."""
    pytest.importorskip("obstore")
    from tests.inside import ObjectTier

    uri = tmp_path.as_uri()
    peers: list[Callable[[], Tier]] = [
        lambda: ObjectTier(uri, envelope=Format1Envelope()),
        lambda: ObjectTier(uri),
    ]
    if not old_first:
        peers.reverse()
    with closing(peers[0]()) as one, closing(peers[1]()) as two:
        stored(one, NAMES[:3])
        stored(two, NAMES[3:6])
        stored(two, NAMES[:1])  # is there
        for tier in (one, two):
            assert hits(tier, NAMES[:6]) == 6
        with closing(HostTier(1 << 20)) as host:
            stored(host, NAMES[:6])
            assert hits(host, NAMES[:6]) == 6
    with closing(ObjectTier(uri)) as third:
        assert hits(third, NAMES[:6]) == 6
