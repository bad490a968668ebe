"""Tiers that others fill: the oldest of their frames go before nothing can be stored."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowkv import KV
from flowkv.observe.events import Evicted
from flowkv.runtime import residency
from flowkv.testing import MemoryTier
from flowkv.tiers.base import Entry, FrameInfo, Store
from tests.runtime.audit import audit
from tests.runtime.fakes import Wrapped
from tests.runtime.toy import make_kv, published, simple

P, Q = [1] * 24, [2] * 24
BODY = bytes(4096)


class Pool(Wrapped):
    """A tier of several processes; counts how many frames its lists showed."""

    listed = 0

    def scan(self) -> Iterator[Entry]:
        for entry in self.inner.scan():
            self.listed += 1
            yield entry


def strangers(memory: MemoryTier, count: int, start: int = 0) -> None:
    """Frames of another process, of another model."""
    for number in range(start, start + count):
        info = FrameInfo("page", 0, 0, b"o" * 16, bytes(32), b"other model".ljust(32), 0, 8, 4096)
        memory.submit_store([Store(number.to_bytes(32, "big"), info, memoryview(BODY))])
        memory.poll()


def kv_over(memory: MemoryTier, **options: Any) -> tuple[KV, Pool]:
    pool = Pool(memory, kind="disk", shared=True)
    return make_kv(simple(), pages=16, tiers=[pool], **options), pool


def test_a_tier_that_others_filled_makes_room_by_their_oldest_frames() -> None:
    memory = MemoryTier(10 * 4096)
    kv, _ = kv_over(memory)
    strangers(memory, 10, start=1)
    gone = list[Any]()
    kv.bus.subscribe(gone.append, Evicted)
    published(kv, P)
    assert kv.flush()
    left = [int.from_bytes(key, "big") for key in memory.frames if key[:8] == bytes(8)]
    assert left == list(range(4, 11)), "the oldest three went"
    assert len(memory.frames) == 10 and len(gone) == 3 and gone[0].reason == "space"
    audit(kv)
    with kv.open([*P, 0]) as seq:
        assert seq.reused == 24


def test_what_is_used_here_stays_before_what_nobody_uses() -> None:
    memory = MemoryTier(10 * 4096)
    kv, _ = kv_over(memory)
    published(kv, P)
    kv.flush()
    strangers(memory, 7)
    mine = set(memory.frames) - {number.to_bytes(32, "big") for number in range(7)}
    kv.pin(P)
    published(kv, Q)
    assert kv.flush() and mine <= set(memory.frames) and len(memory.frames) == 10
    audit(kv)


def test_the_work_is_bounded() -> None:
    residency_adopted, residency._ADOPTED = residency._ADOPTED, 4
    residency_looked, residency._LOOKED_AT = residency._LOOKED_AT, 6
    try:
        memory = MemoryTier(200 * 4096)
        kv, pool = kv_over(memory)
        strangers(memory, 200)
        pool.listed = 0
        published(kv, [1] * 8)
        assert kv.flush() and pool.listed <= 6 and kv.stats()["blocks"] <= 4
        audit(kv)
    finally:
        residency._ADOPTED, residency._LOOKED_AT = residency_adopted, residency_looked


def test_after_a_restart_the_oldest_prompt_goes_first() -> None:
    memory = MemoryTier(9 * 4096)
    first = make_kv(simple(), pages=16, tiers=[Wrapped(memory, kind="disk")])
    for prompt in (P, Q, [3] * 24):
        published(first, prompt)
    first.flush()
    again = make_kv(simple(), pages=16, tiers=[Wrapped(memory, kind="disk")])
    published(again, [4] * 16)
    again.flush()
    known = [again.explain([*prompt, 0]).known for prompt in (P, Q, [3] * 24)]
    assert known == [8, 24, 24], "and of it, the end"
    audit(again)


def test_a_tier_of_our_own_has_nothing_to_adopt() -> None:
    memory = MemoryTier(2 * 4096)
    kv = make_kv(simple(), pages=16, tiers=[Wrapped(memory, kind="disk")])
    published(kv, P)
    kv.flush()
    assert len(memory.frames) == 2
    strangers(memory, 1, start=9)  # refused: it is full
    kv.pin(P)
    published(kv, Q)
    kv.flush()
    assert kv.planner.store.adopt(0) == 0
    audit(kv)


def test_a_second_cache_writes_once_the_first_is_closed(tmp_path: Path) -> None:
    disk = f"{tmp_path}:64MiB"
    first = make_kv(simple(), pages=16, disk=disk)
    published(first, P)
    with pytest.warns(UserWarning, match="another process owns"):
        second = make_kv(simple(), pages=16, disk=disk)
    published(second, Q)
    assert second.flush() and not second.planner.store.tiers[0].writable
    first.close()
    for prompt in (P, [3] * 24):  # the first look finds that nobody owns it any more
        published(second, prompt)
    assert second.flush() and second.stats()["tiers"][f"disk:{tmp_path}"]["writable"]
    audit(second)
    second.close()
    with make_kv(simple(), pages=16, disk=disk) as third:
        assert third.explain([*P, 0]).known == third.explain([3] * 24 + [0]).known == 24


def test_a_cache_whose_directory_is_deleted_goes_on(tmp_path: Path) -> None:
    kv = make_kv(simple(), pages=16, disk=f"{tmp_path / 'kv'}:64MiB")
    published(kv, P)
    kv.flush()
    shutil.rmtree(tmp_path / "kv")
    for prompt in (Q, [3] * 24, P):
        published(kv, prompt)
    kv.flush()
    assert not kv.planner.store.tiers[0].writable
    audit(kv)
    kv.close()
    assert not (tmp_path / "kv").exists()
