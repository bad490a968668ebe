"""Stripes that are read alone: many together, without their headers once those were checked."""

from __future__ import annotations

import errno
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowkv.testing import check_tier
from flowkv.tiers import Load, Outcome, Store
from flowkv.tiers.disk import DiskTier
from tests.inside import OPERATION, READ, ManualClock, Operations, transfer

from .files_engine import FilesEngine
from .frames import LAYOUT, answers, body_of, info_of, key_of, outcomes
from .gates import GatedEngine
from .test_conformance import flip

MIB, STEP, STRIPES = 1 << 20, 8192, 12
SIZE = STEP * STRIPES


class Counted(FilesEngine):
    """Notes the lengths of what is read, and fails reads that `fails` says."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[int] = []
        self.fails = 0

    def submit(self, operations: Operations) -> None:
        good = []
        for row in operations.tolist():
            self.reads += [row[4]] if row[0] == READ else []
            if row[0] == READ and self.fails:
                self.fails -= 1
                self._reports.post([(row[5], -errno.EIO)])
            else:
                good.append(row)
        super().submit(np.array(good, OPERATION))


@pytest.fixture(autouse=True)
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stripe lies far from its header."""
    monkeypatch.setattr(transfer, "NEAR_BYTES", -1)


def filled(path: Path, names: Sequence[object], **options: Any) -> DiskTier:
    options.setdefault("engine", FilesEngine() if options.get("threads") == 0 else None)
    tier = DiskTier(path, 8 * MIB, **options)
    items = [
        Store(key_of(n), info_of(SIZE, stripe_bytes=STEP), memoryview(body_of(n, SIZE)))
        for n in names
    ]
    done = answers(tier, tier.submit_store(items), len(items))
    assert {one.outcome for one in done} == {Outcome.STORED}
    return tier


def loads_of(
    names: Sequence[object], first: int, stripes: int = 1
) -> tuple[list[Load], list[bytearray]]:
    targets = [bytearray(b"\xaa" * STEP * (stripes or STRIPES - first)) for _ in names]
    return [
        Load(key_of(n), memoryview(target), LAYOUT, 0, first, stripes)
        for n, target in zip(names, targets, strict=True)
    ], targets


def read(tier: DiskTier, names: Sequence[object], first: int, stripes: int = 1) -> list[Any]:
    """Outcomes of loads of the same stripes of some frames; a hit must have the right bytes."""
    items, targets = loads_of(names, first, stripes)
    done = answers(tier, tier.submit_load(items), len(items))
    for name, target, answer in zip(names, targets, done, strict=True):
        if answer.outcome is Outcome.HIT:
            start = first * STEP
            assert target == body_of(name, SIZE)[start : start + len(target)], "WRONG BYTES"
            assert answer.n_bytes == len(target) and answer.info is not None
    return outcomes(done)


def damage(tier: DiskTier, name: object, at: int) -> None:
    """Flips a bit of a frame as it lies on the disk, counted from its first byte."""
    held = tier._store.find(key_of(name))
    assert held is not None
    path = tier._store._slabs._path(held.slot.granules)
    with open(path, "r+b") as file:
        file.seek(held.slot.offset + at)
        byte = file.read(1)[0]
        file.seek(held.slot.offset + at)
        file.write(bytes([byte ^ 4]))


def test_headers_are_read_once(tmp_path: Path) -> None:
    engine, names = Counted(), range(5)
    tier = filled(tmp_path, names, engine=engine)
    for first in range(3):
        engine.reads.clear()
        assert read(tier, names, first) == [("hit", "")] * 5
        assert sorted(engine.reads) == sorted([STEP] * 5 + [4096] * 5 * (first == 0))
    engine.reads.clear()
    assert read(tier, names, 2, 0) == [("hit", "")] * 5
    assert engine.reads == [SIZE - 2 * STEP] * 5


def test_what_comes_together_is_checked_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind each compiled call, a busy interpreter keeps its lock for 5 ms."""
    tier, checked, check = filled(tmp_path, range(9), threads=0), list[int](), transfer.open_all
    read(tier, range(9), 0)

    def counted(envelope: Any, flights: Any) -> Any:
        checked.append(len(flights))
        return check(envelope, flights)

    with monkeypatch.context() as patch:
        patch.setattr(transfer, "TOGETHER_BYTES", STEP)  # each is a group of its own
        patch.setattr(transfer, "open_all", counted)
        assert read(tier, range(9), 1) == [("hit", "")] * 9
    assert [count for count in checked if count] == [9]


def test_stores_look_once_a_batch_whether_the_directory_is_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, looks = type(filled(tmp_path, "a")._store.home), list[Any]()
    holds = home.holds
    monkeypatch.setattr(home, "holds", lambda self: looks.append(self) or holds(self))
    filled(tmp_path / "other", range(64), threads=0)
    assert 2 <= len(looks) <= 16


def test_damage_is_found_and_costs_that_frame_alone(tmp_path: Path) -> None:
    tier = filled(tmp_path, "abc")
    assert read(tier, "abc", 3) == [("hit", "")] * 3
    damage(tier, "b", 4096 + 5 * STEP + 17)
    assert read(tier, "abc", 4) == [("hit", "")] * 3, "that stripe is whole"
    assert read(tier, "abc", 5) == [("hit", ""), ("miss", "digest"), ("hit", "")]
    assert tier.contains([key_of(n) for n in "abc"]) == [True, False, True]
    assert tier.corrupt == 1
    assert read(tier, "abc", 4) == [("hit", ""), ("miss", ""), ("hit", "")]


def test_another_frame_of_the_same_name_is_not_taken_for_the_former(tmp_path: Path) -> None:
    tier = filled(tmp_path, "ab")
    assert read(tier, "ab", 1) == [("hit", "")] * 2
    tier.delete([key_of("a")])
    assert read(tier, "ab", 1) == [("miss", ""), ("hit", "")]
    other = body_of("other", SIZE)
    item = Store(key_of("a"), info_of(SIZE, stripe_bytes=STEP), memoryview(other))
    answers(tier, tier.submit_store([item]), 1)
    (load,), (target,) = loads_of("a", 1)
    assert outcomes(answers(tier, tier.submit_load([load]), 1)) == [("hit", "")]
    assert target == other[STEP : 2 * STEP]


def test_nothing_is_known_of_what_was_erased(tmp_path: Path) -> None:
    tier = filled(tmp_path, "ab")
    read(tier, "ab", 1)
    assert key_of("a") in tier._conductor.known
    tier.erase([key_of("a")])
    assert key_of("a") not in tier._conductor.known


def test_what_is_known_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "KNOWN_BYTES", 16 * STRIPES * 3)
    names = range(8)
    tier = filled(tmp_path, names)
    for first in range(4):
        assert read(tier, names, first) == [("hit", "")] * 8
    assert sum(key_of(name) in tier._conductor.known for name in names) == 3


@pytest.mark.parametrize("fails", [1, 3])
def test_a_read_that_fails_fails_one_load_at_most(tmp_path: Path, fails: int) -> None:
    """What was read together begins anew, each by itself, and tells its own end."""
    engine, names = Counted(), range(4)
    tier = filled(tmp_path, names, engine=engine)
    read(tier, names, 0)
    engine.fails = fails
    assert read(tier, names, 1) == [("hit", "")] * 4
    engine.fails = 4 + 1  # all of them together, and the header of one
    found = read(tier, names, 2)
    assert sorted(found) == [("failed", "EIO")] + [("hit", "")] * 3
    assert read(tier, names, 3) == [("hit", "")] * 4


def test_loads_that_do_not_fit_are_answered_beside_those_that_do(tmp_path: Path) -> None:
    tier = filled(tmp_path, "abcdef")
    read(tier, "abcdef", 0)
    items, targets = loads_of("abcdef", 7)
    items[1] = items[1]._replace(target=memoryview(bytes(STEP)))
    items[2] = items[2]._replace(layout=bytes(16))
    items[3] = items[3]._replace(first=STRIPES)
    items[4] = items[4]._replace(target=memoryview(bytearray(STEP - 1)))
    done = outcomes(answers(tier, tier.submit_load(items), 6))
    assert done == [
        ("hit", ""),
        ("failed", "target"),
        ("miss", "layout"),
        ("miss", "stripes"),
        ("failed", "target"),
        ("hit", ""),
    ]
    assert targets[5] == body_of("f", SIZE)[7 * STEP : 8 * STEP]


@pytest.mark.parametrize("how", ["cancel", "late"])
def test_what_is_answered_before_it_came_is_left_alone(tmp_path: Path, how: str) -> None:
    engine, clock = GatedEngine(), ManualClock()
    tier = filled(tmp_path, "abc", engine=engine, clock=clock)
    read(tier, "abc", 0)
    engine.holds = "read"
    items, targets = loads_of("abc", 1)
    job = tier.submit_load(items, deadline_s=3)
    for _ in items:
        assert engine.entered.acquire(timeout=60)
    if how == "cancel":
        tier.cancel(job)
    clock.advance(s=4)
    reason = "cancelled" if how == "cancel" else "deadline"
    assert outcomes(answers(tier, job, 3)) == [("failed", reason)] * 3
    engine.release()
    assert read(tier, "abc", 2) == [("hit", "")] * 3
    tier.close()
    assert all(target == b"\xaa" * STEP for target in targets)
    assert tier._conductor._late_bytes == 0


def test_what_goes_wrong_with_some_stripes_costs_nobody_else_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Held(Counted):
        hold = False

        def wait(self, timeout_s: float = 0.0) -> Any:
            if self.hold:
                return np.empty((0, 2), np.int64)
            return super().wait(timeout_s)

    engine = Held()
    tier = filled(tmp_path, "abcd", engine=engine, threads=0)
    read(tier, "ab", 0)
    engine.hold = True
    (items, targets), (others, theirs) = loads_of("ab", 3), loads_of("cd", 3)
    body = memoryview(body_of("e", SIZE))
    store = Store(key_of("e"), info_of(SIZE, stripe_bytes=STEP), body)
    jobs = [tier.submit_load(items)]
    tier._conductor.step(0.0)
    jobs += [tier.submit_load(others), tier.submit_store([store])]
    tier._conductor.step(0.0)

    def broken(*given: Any) -> Any:
        monkeypatch.undo()
        raise MemoryError

    monkeypatch.setattr(transfer, "open_all", broken)
    engine.hold = False
    found = [answer for _ in range(20) for answer in tier.poll(0.05)]
    assert sorted(one.job for one in found) == sorted([jobs[0]] * 2 + [jobs[1]] * 2 + [jobs[2]])
    assert {one.outcome for one in found} == {Outcome.HIT, Outcome.STORED}
    for name, target in zip("abcd", targets + theirs, strict=True):
        assert target == body_of(name, SIZE)[3 * STEP : 4 * STEP]
    assert not tier._store._slabs.pinned and set(tier._conductor._used_bytes.values()) == {0}


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DiskTier]:
    tier = filled(tmp_path_factory.mktemp("disk"), range(8))
    yield tier
    tier.close()


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, STRIPES), st.integers(0, 4))))
@settings(max_examples=20)
def test_any_parts_in_any_order(disk: DiskTier, wishes: list[tuple[int, int, int]]) -> None:
    items, targets = list[Load](), list[bytearray]()
    for name, first, stripes in wishes:
        target = bytearray(STEP * max(stripes or STRIPES - first, 1))
        items.append(Load(key_of(name), memoryview(target), LAYOUT, 0, first, stripes))
        targets.append(target)
    if not items:
        return
    job = disk.submit_load(items)
    for answer, (name, first, stripes), target in zip(
        answers(disk, job, len(items)), wishes, targets, strict=True
    ):
        end = first + stripes if stripes else STRIPES
        if name > 7:
            assert (answer.outcome, answer.reason) == (Outcome.MISS, "")
        elif not first < end <= STRIPES:
            assert (answer.outcome, answer.reason) == (Outcome.MISS, "stripes")
        else:
            assert answer.outcome is Outcome.HIT
            assert target[: answer.n_bytes] == body_of(name, SIZE)[first * STEP : end * STEP]


@pytest.mark.usefixtures("briefly")
@pytest.mark.parametrize("damage", [None, flip])
def test_conformance(tmp_path: Path, damage: Any) -> None:
    places = iter(range(1 << 30))

    def make(capacity_bytes: int) -> DiskTier:
        return DiskTier(tmp_path / str(next(places)), capacity_bytes)

    def reopen(tier: Any) -> DiskTier:
        tier.close()
        return DiskTier(tier.path, tier.capacity_bytes)

    check_tier(make, reopen=reopen, damage=damage, capacity_bytes=512 << 10)


def test_while_others_store_delete_and_erase(tmp_path: Path) -> None:
    dice = random.Random(3)
    tier = filled(tmp_path, range(12))
    for turn in range(60):
        names = dice.sample(range(12), 6)
        first = dice.randrange(STRIPES)
        items, targets = loads_of(names, first)
        job = tier.submit_load(items)
        victim = dice.choice(names)
        if turn % 3 == 0:
            tier.delete([key_of(victim)])
            body = memoryview(body_of(victim, SIZE))
            tier.submit_store([Store(key_of(victim), info_of(SIZE, stripe_bytes=STEP), body)])
        left, n_found = len(items) + (turn % 3 == 0), 0
        while n_found < left:
            for answer in tier.poll(0.05):
                n_found += 1
                if answer.job == job and answer.outcome is Outcome.HIT:
                    at = first * STEP
                    wanted = body_of(names[answer.item], SIZE)[at : at + STEP]
                    assert targets[answer.item] == wanted, "WRONG BYTES"
    assert not tier._store._slabs.pinned
