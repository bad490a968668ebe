"""Tiers that others fill: the oldest of their frames go before nothing can be stored."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowkv import KV
from flowkv.testing import MemoryTier
from flowkv.tiers import Entry, FrameInfo, Store
from tests.cache.audit import audit
from tests.cache.fakes import Wrapped
from tests.cache.toy import make_kv, published, simple
from tests.inside import Evicted, FileIO, inspect, read_superblock, tier_stack, write_superblock

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


def test_the_work_is_bounded() -> None:
    residency_adopted, tier_stack._ADOPTED = tier_stack._ADOPTED, 4
    residency_looked, tier_stack._LOOKED_AT = tier_stack._LOOKED_AT, 6
    try:
        memory = MemoryTier(200 * 4096)
        kv, pool = kv_over(memory)
        strangers(memory, 200)
        pool.listed = 0
        published(kv, [1] * 8)
        assert kv.flush() and pool.listed <= 6 and kv.stats()["blocks"] <= 4
        audit(kv)
    finally:
        tier_stack._ADOPTED, tier_stack._LOOKED_AT = residency_adopted, residency_looked


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
    assert kv.planner.store.stack.listing.adopt(0) == 0


def test_a_second_cache_writes_once_the_first_is_closed(tmp_path: Path) -> None:
    disk = f"{tmp_path}:64MiB"
    first = make_kv(simple(), pages=16, disk=disk)
    published(first, P)
    with pytest.warns(UserWarning, match="another cache of this process"):
        second = make_kv(simple(), pages=16, disk=disk)
    published(second, Q)
    assert second.flush() and not second.planner.store.stack.tiers[0].writable
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
    with pytest.warns(UserWarning, match="stores no page now .its directory was moved or removed"):
        for prompt in (Q, [3] * 24, P):
            published(kv, prompt)
        kv.flush()
    assert not kv.planner.store.stack.tiers[0].writable
    audit(kv)
    kv.close()
    assert not (tmp_path / "kv").exists()


# --- frames that nobody can ask for any more --------------------------------------------------


def small_disk(path: Path, name: str, mib: int = 2, **options: Any) -> KV:
    """A cache of pages of 4 KiB over a small directory."""
    return make_kv(simple(), pages=16, namespace=name, disk=f"{path}:{mib}MiB", **options)


def fill(kv: KV, first: int, count: int) -> None:
    for prompt in range(first, first + count):
        published(kv, [prompt] * 24)
        assert kv.flush()


def by_name(path: Path) -> dict[str, int]:
    found = inspect(path)
    return {found.names.get(d, "unknown"): share.frames for d, share in found.namespaces.items()}


def forget_names(path: Path) -> None:
    """As if an earlier version had written it all."""
    superblock = read_superblock(FileIO(), path)
    assert superblock is not None
    superblock.namespaces = {}
    write_superblock(FileIO(), path, superblock)


def first_reason(path: Path, name: str) -> str:
    """Why the first frame goes when a cache fills a directory."""
    gone = list[Evicted]()
    with small_disk(path, name) as kv:
        kv.bus.subscribe(gone.append, Evicted)
        number = 200
        while not any(event.tier.startswith("disk") for event in gone):
            fill(kv, number, 1)
            number += 1
            assert number < 400
        audit(kv)
    return next(event.reason for event in gone if event.tier.startswith("disk"))


def test_frames_of_an_earlier_version_are_the_first_to_go(tmp_path: Path) -> None:
    with small_disk(tmp_path, "kept") as kv:
        fill(kv, 0, 20)  # older than what goes before them
    with small_disk(tmp_path, "gone") as kv:
        fill(kv, 100, 20)
    forget_names(tmp_path)
    with small_disk(tmp_path, "kept"):
        pass
    before = by_name(tmp_path)
    assert before == {"kept": 60, "unknown": 60}
    reasons = list[str]()
    with small_disk(tmp_path, "kept") as kv:
        kv.bus.subscribe(lambda event: reasons.append(event.reason), Evicted)
        tier = kv.planner.store.stack.tiers[0]
        number = 200
        while by_name(tmp_path).get("unknown", 0) > 3:
            fill(kv, number, 1)
            number += 1
            assert number < 400, (tier.used_bytes(), tier.capacity_bytes)
        assert number > 220, "there was room at first"
        assert {kv.explain([prompt] * 24 + [0]).known for prompt in range(20)} == {24}
        assert "unused" in reasons
        audit(kv)
    assert by_name(tmp_path)["kept"] == 60 + 3 * (number - 200)


@pytest.mark.parametrize(
    ("day", "reason"), [(0, "space"), (8, "unused"), (-8, "unused")], ids=["now", "later", "before"]
)
def test_models_that_share_a_directory_keep_their_frames(
    tmp_path: Path, day: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that was ahead once keeps no model's frames for ever."""
    with small_disk(tmp_path, "other") as kv:
        fill(kv, 0, 20)
    now_s = time.time() + day * 86400
    monkeypatch.setattr(time, "time", lambda: now_s)
    assert first_reason(tmp_path, "mine") == reason


def test_a_model_that_is_used_for_weeks_keeps_its_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process is killed in the end, and another model takes the directory."""
    kv = small_disk(tmp_path / "kv", "other")
    fill(kv, 0, 20)
    now_s = time.time() + 8 * 86400
    monkeypatch.setattr(time, "time", lambda: now_s)
    fill(kv, 20, 1)
    shutil.copytree(tmp_path / "kv", tmp_path / "left")
    kv.close()
    assert first_reason(tmp_path / "left", "mine") == "space"


def test_names_of_weights_that_change_are_bounded(tmp_path: Path) -> None:
    tier = small_disk(tmp_path, "mine").planner.store.stack.tiers[0]
    for number in range(300):
        tier._store.bind(number.to_bytes(32, "big"), "mine")
    assert len(tier._store._bound) == 256 and tier.in_use((299).to_bytes(32, "big"))


def test_what_any_cache_of_the_process_uses_is_in_use(tmp_path: Path) -> None:
    mine = small_disk(tmp_path, "mine")
    with pytest.warns(UserWarning, match="another cache of this process"):
        beside = small_disk(tmp_path, "other")
    tier = mine.planner.store.stack.tiers[0]
    assert set(inspect(tmp_path).names.values()) == {"mine"}, "a reader writes nothing"
    assert tier.in_use(mine.namespace) and tier.in_use(beside.namespace)
    beside.close()
    assert tier.in_use(mine.namespace) and not tier.in_use(beside.namespace)


def test_a_frame_of_this_model_is_never_taken_for_a_stranger(tmp_path: Path) -> None:
    with small_disk(tmp_path, "mine") as kv:
        fill(kv, 0, 20)
    forget_names(tmp_path)
    assert first_reason(tmp_path, "mine") == "space"
