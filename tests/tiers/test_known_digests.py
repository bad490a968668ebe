"""Stores with digests that were made where the body came from: no tier makes them once more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowkv import Tier
from flowkv.tiers import Envelope, Store
from flowkv.tiers.disk import DiskTier
from flowkv.tiers.remote.tier import RemoteTier
from flowkv.tiers.shared import SharedTier
from tests.inside import (
    HostTier,
    Keyring,
    Lossless,
    ManualClock,
    core_digest,
    digests,
    host,
    own_memory,
    tiers_frame,
)

from .frames import answers, body_of, get, info_of, key_of, outcomes
from .gates import GatedEngine
from .remote.faulty import FaultyBackend

MIB, SIZE = 1 << 20, 4 * 8192


def aligned(data: bytes) -> memoryview:
    """Memory as a slot has it."""
    view = own_memory(len(data))
    view[:] = data
    return view


def store_of(name: object, known: object = "", body: memoryview | None = None) -> Store:
    """A frame of four stripes, with the digests of the body of another name or its own."""
    body = aligned(body_of(name, SIZE)) if body is None else body
    made = digests(body_of(known or name, SIZE), 8192)
    return Store(key_of(name), info_of(8192), body, memoryview(made))


TIERS: dict[str, Callable[[Path], Tier]] = {
    "host": lambda _: HostTier(MIB),
    "shared": lambda path: SharedTier("n", 64 * MIB, directory=path),
    "disk": lambda path: DiskTier(path, 4 * MIB, threads=0),
    "disk, compressed": lambda path: DiskTier(
        path, 4 * MIB, threads=0, envelope=Envelope(lossless=Lossless(lambda: 1.0))
    ),
    "remote": lambda _: RemoteTier(FaultyBackend(), 4 * MIB),
}


@pytest.fixture(params=TIERS)
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    made = TIERS[request.param](tmp_path)
    yield made
    made.close()


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of bodies that the processor digested."""
    found, plain = list[int](), core_digest.digests

    def counted(data: Any, step: int) -> bytes:
        found.append(memoryview(data).nbytes)
        return plain(data, step)

    monkeypatch.setattr(tiers_frame, "digests", counted)
    return found


def test_they_are_those_of_the_frame(tier: Tier, untouched: list[int]) -> None:
    job = tier.submit_store([store_of(name) for name in "abc"])
    assert outcomes(answers(tier, job, 3)) == [("stored", "")] * 3
    assert max(untouched, default=0) < SIZE, "only headers"
    assert outcomes(get(tier, "abc", SIZE)) == [("hit", "")] * 3
    assert outcomes(get(tier, "abc", SIZE)) == [("hit", "")] * 3


def test_a_body_that_is_not_theirs_is_never_served(tier: Tier) -> None:
    """As if the copy had gone wrong: a page in the slot of another one, or half of one."""
    half = body_of("c", SIZE // 2) + bytes(SIZE // 2)
    items = [store_of("a", "b"), store_of("b", "a"), store_of("c", body=aligned(half))]
    items += [store_of("d")]
    job = tier.submit_store(items)
    assert outcomes(answers(tier, job, 4)) == [("stored", "")] * 4
    assert outcomes(get(tier, "abcd", SIZE)) == [("miss", "digest")] * 3 + [("hit", "")]
    assert outcomes(get(tier, "abcd", SIZE)) == [("miss", "")] * 3 + [("hit", "")]


def test_a_body_at_an_odd_address_is_not_believed_either(tier: Tier) -> None:
    odd = [memoryview(bytearray(b"." + body_of(name, SIZE)))[1:] for name in "ab"]
    items = [store_of("a", "b", odd[0]), store_of("b", body=odd[1])]
    assert outcomes(answers(tier, tier.submit_store(items), 2)) == [("stored", "")] * 2
    assert outcomes(get(tier, "ab", SIZE)) == [("miss", "digest"), ("hit", "")]


def test_stripes_that_are_swapped_are_never_served(tier: Tier) -> None:
    body = body_of("a", SIZE)
    items = [store_of("a", body=aligned(body[8192:16384] + body[:8192] + body[16384:]))]
    assert outcomes(answers(tier, tier.submit_store(items), 1)) == [("stored", "")]
    assert outcomes(get(tier, "a", SIZE)) == [("miss", "digest")]


@pytest.mark.parametrize("count", [0, 3, 5])
def test_too_few_or_too_many_are_refused(tier: Tier, count: int) -> None:
    used = tier.used_bytes()
    item = store_of("a")._replace(digests=bytes(16 * count))
    assert outcomes(answers(tier, tier.submit_store([item]), 1)) == [("failed", "invalid")]
    assert tier.used_bytes() == used and not tier.contains([key_of("a")])[0]


def test_an_encrypted_frame_is_checked_by_its_tags(tmp_path: Path) -> None:
    envelope = Envelope(integrity="aead", keyring=Keyring(bytes(32)))
    tier = DiskTier(tmp_path, 4 * MIB, threads=0, envelope=envelope)
    job = tier.submit_store([store_of("a"), store_of("b", "a")])
    assert outcomes(answers(tier, job, 2)) == [("stored", "")] * 2
    assert outcomes(get(tier, "ab", SIZE)) == [("hit", "")] * 2


def test_a_slot_of_the_host_tier_is_kept_unread(
    untouched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, copies = HostTier(MIB), []
    monkeypatch.setattr(host.np, "copyto", lambda *both: copies.append(both))
    tier.slots.register(lambda *_: "", lambda _: None)
    slot = tier.slots.acquire(SIZE, pinned=True)
    slot[:] = np.frombuffer(body_of("a", SIZE), np.uint8)
    job = tier.submit_store([store_of("a", body=slot.data)])
    assert outcomes(answers(tier, job, 1)) == [("stored", "")]
    assert not untouched and not copies
    assert tier._frames[key_of("a")].header.digests == digests(body_of("a", SIZE), 8192)


# ---- a disk writes such a body from where it lies


def slabs(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name[:4] == "slab"}


@pytest.mark.parametrize("odd", [False, True])
def test_the_bytes_on_the_disk_are_the_same(odd: bool, tmp_path: Path) -> None:
    """Also where an earlier, longer frame lay, and for a body at an odd address."""
    found = []
    for known in (False, True):
        tier = DiskTier(tmp_path / str(known), 4 * MIB, threads=0)
        size = slot_like = 17 * 8192
        for name, size in (("long", slot_like), ("short", slot_like - 8192)):
            body = body_of(name, size)
            view = memoryview(bytearray(b"." + body))[1:] if odd else aligned(body)
            made = digests(body, 8192) if known else None
            item = Store(key_of(name), info_of(8192), view, made)
            assert outcomes(answers(tier, tier.submit_store([item]), 1)) == [("stored", "")]
            if name == "long":
                tier.delete([key_of("long")])
        assert outcomes(get_all(tier, "short", size)) == [("hit", "")]
        tier.close()
        found.append(slabs(tmp_path / str(known)))
    assert found[0] == found[1] and found[0]


def get_all(tier: Tier, name: str, size: int) -> Any:
    return get(tier, [name], size)


def test_a_body_that_is_written_late_stays_where_it_is(tmp_path: Path) -> None:
    """Nothing may use a slot again while the disk reads from it; the store is undone."""
    engine, clock, pool = GatedEngine(), ManualClock(), HostTier(MIB)
    tier = DiskTier(tmp_path, 4 * MIB, engine=engine, clock=clock)
    used, engine.holds = tier.used_bytes(), "write"
    slot = pool.slots.acquire(SIZE)
    slot[:] = np.frombuffer(body_of("a", SIZE), np.uint8)
    job = tier.submit_store([store_of("a", body=slot.data)], deadline_s=3)
    assert engine.entered.acquire(timeout=60)
    address, held = slot.ctypes.data, pool.slots.used_bytes
    del slot
    clock.advance(s=4)
    assert outcomes(answers(tier, job, 1)) == [("failed", "deadline")]
    assert pool.slots.used_bytes == held
    other = pool.slots.acquire(SIZE)
    assert other.ctypes.data != address
    engine.release()
    job = tier.submit_store([store_of("b")])
    assert outcomes(answers(tier, job, 1)) == [("stored", "")]
    tier.delete([key_of("b")])
    while tier.used_bytes() != used or pool.slots.used_bytes != held:
        tier.poll(0.01)
    assert tier.contains([key_of("a")]) == [False]
