"""Frames sealed in staging memory: by the interpreter or by one compiled call, bit for bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from flowkv.tiers import Envelope, Outcome, Store
from flowkv.tiers.disk import DiskTier
from tests.inside import (
    Arena,
    ArenaSlot,
    DiskScheduler,
    Flight,
    Held,
    Item,
    Slot,
    header_bytes,
    seal_all,
)

from .frames import answers, hits, info_of, key_of, outcomes, stored

SHAPES = [(1, 1), (1, 77), (1, 239), (1, 5001), (3, 4096), (40, 4096), (300, 4096), (16, 65_536)]


def sealed(arena: Arena) -> list[bytes]:
    frames = []
    for number, (stripes, step) in enumerate(SHAPES):
        start, size = header_bytes(stripes), stripes * step
        memory = arena.acquire(start + size)
        assert memory is not None
        memory.view[:] = b"\xee" * memory.n_bytes
        body = memoryview(random.Random(number).randbytes(size + 3))[3:]  # at an odd address
        key = key_of(number)
        item = Item(0, 0, key, Store(key, info_of(step), body), body, size, True, True, 0, 0)
        held = Held(1000 + number, Slot(1, 0), stripes, info_of(step), start + size)
        frames.append(Flight(item, held, None))
        frames[-1].memory = memory
    seal_all(frames)
    data = [bytes(frame.memory.view) for frame in frames]
    for frame in frames:
        arena.give_back(frame.memory)
    return data


def test_it_is_what_the_envelope_makes() -> None:
    arena = Arena(16 << 20)
    for number, data in enumerate(sealed(arena)):
        stripes, step = SHAPES[number]
        body = random.Random(number).randbytes(stripes * step + 3)[3:]
        made = Envelope().seal(key_of(number), info_of(step), body, generation=1000 + number)
        assert data == b"".join([made.header, *made.parts])
    arena.close()


def test_what_cannot_be_sealed_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = DiskTier(tmp_path, 1 << 20, threads=0)
    used = tier.used_bytes()

    def none_left(frames: list[Flight]) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("flowkv.tiers.disk.tier.seal_all", none_left)
        items = [Store(key_of(n), info_of(8192), memoryview(bytes(8192))) for n in range(3)]
        job = tier.submit_store(items)
        assert outcomes(answers(tier, job, 3)) == [("failed", "memory")] * 3
    assert tier.used_bytes() == used
    assert tier._conductor._arena.free_bytes == tier._conductor._arena.n_bytes
    stored(tier, range(3))
    assert hits(tier, range(3)) == 3


def test_a_store_that_fails_once_it_has_a_slot_is_not_sealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its body is the caller's again, and its staging memory somebody else's."""
    tier = DiskTier(tmp_path, 1 << 20, threads=0)
    used = tier.used_bytes()
    arena = tier._conductor._arena

    class Full:
        """A view into which no zeros go."""

        def __init__(self, slot: ArenaSlot) -> None:
            self.slot = slot

        def __getattr__(self, name: str) -> object:
            return getattr(self.slot, name)

        @property
        def view(self) -> memoryview:
            raise MemoryError

    begun = DiskScheduler._begun

    def begin(self: DiskScheduler, item: object, memory: ArenaSlot, *rest: Any, **more: Any) -> Any:
        return begun(self, item, Full(memory), *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(DiskScheduler, "_begun", begin)
        wish = Store(key_of("a"), info_of(8192), memoryview(bytes(8192)))
        job = tier.submit_store([wish])
        assert outcomes(answers(tier, job, 1)) == [("failed", "memory")]
        assert not tier._conductor._unsealed
    assert tier.used_bytes() == used and arena.free_bytes == arena.n_bytes
    stored(tier, ["a"])
    assert hits(tier, ["a"]) == 1


@pytest.mark.parametrize("where", ["to_sync", "append"])
def test_a_store_that_cannot_count_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    tier = DiskTier(tmp_path, 1 << 20, threads=0, durability="sync")
    used = tier.used_bytes()
    place = tier._store if where == "to_sync" else tier._store._journal

    def none_left(*_: object, **__: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(place, where, none_left)
        wish = Store(key_of("a"), info_of(8192), memoryview(bytes(8192)))
        (answer,) = answers(tier, tier.submit_store([wish]), 1)
        assert outcomes([answer])[0] in (("failed", "memory"), ("failed", "ENOMEM"))
    assert tier.used_bytes() == used
    stored(tier, ["a"])
    assert hits(tier, ["a"]) == 1


def test_large_batches_go_there_and_back(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 64 << 20)
    bodies = [random.Random(n).randbytes(1 << 20) for n in range(12)]
    info = info_of(1 << 16)
    items = [Store(key_of(n), info, memoryview(body)) for n, body in enumerate(bodies)]
    done = answers(tier, tier.submit_store(items), 12)
    assert {answer.outcome for answer in done} == {Outcome.STORED}
    for n, body in enumerate(bodies):
        held = tier._store._index.get(key_of(n))
        assert held is not None and held.stripes == 16
        found = (tmp_path / f"slab-{held.slot.granules:08d}").read_bytes()
        made = Envelope().seal(key_of(n), info, body, generation=held.seq)
        assert found[held.slot.offset :][: made.n_bytes] == b"".join([made.header, *made.parts])
