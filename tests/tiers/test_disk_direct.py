"""Stripes that a disk reads straight into the caller's memory, verified there or by the caller."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowkv.tiers import Envelope, Load, Outcome, Store
from flowkv.tiers.disk import DiskTier
from tests.inside import (
    READ,
    Arena,
    Keyring,
    Lossless,
    ManualClock,
    Operations,
    SlotPool,
    ThreadsEngine,
    digests,
    transfer,
)

from .counting import Touching
from .files_engine import FilesEngine
from .format1 import Format1Envelope
from .frames import LAYOUT, answers, body_of, info_of, key_of, outcomes
from .gates import GatedEngine

MIB, STEP, STRIPES = 1 << 20, 8192, 6
SIZE = STEP * STRIPES
HEAD = 4096
ENGINES: dict[str, Callable[[], Any]] = {
    "best": lambda: None,
    "threads": ThreadsEngine,
    "buffered": lambda: ThreadsEngine(direct=False),
    "files": FilesEngine,
}


class Rows:
    """Memory as a device has it, and loads into it."""

    def __init__(self) -> None:
        self.pool = SlotPool(8 * MIB)

    def load(self, name: object, first: int = 0, stripes: int = 0, **given: Any) -> Load:
        """A load of stripes of a frame into a slot with other bytes."""
        row = self.pool.acquire((stripes or STRIPES - first) * STEP)
        assert row is not None
        row[:] = 0xAA
        return Load(key_of(name), row.data, LAYOUT, 0, first, stripes, direct=True, **given)


def filled(path: Path, names: Sequence[object], **options: Any) -> DiskTier:
    tier = DiskTier(path, 8 * MIB, **options)
    info = info_of(STEP)
    items = [Store(key_of(n), info, memoryview(body_of(n, SIZE))) for n in names]
    done = answers(tier, tier.submit_store(items), len(items))
    assert {one.outcome for one in done} == {Outcome.STORED}
    return tier


def arrived(tier: DiskTier, loads: Sequence[Load]) -> list[tuple[str, str]]:
    """Outcomes of loads; of a hit that came unread, whether a device would find it sound."""
    done, found = answers(tier, tier.submit_load(loads), len(loads)), list[tuple[str, str]]()
    for load, answer in zip(loads, done, strict=True):
        state = answer.outcome.value, answer.reason
        if answer.outcome is Outcome.HIT:
            assert answer.n_bytes == load.target.nbytes and answer.info is not None
            unread = load.unread and load.direct
            assert bool(answer.digests) == unread
            if unread and digests(load.target, STEP) != answer.digests:
                state = "hit", "unsound"
        found.append(state)
    return found


def right(loads: Sequence[Load], names: Sequence[object]) -> bool:
    spans = [(load.first * STEP, load.target.nbytes) for load in loads]
    return all(
        load.target == body_of(name, SIZE)[at : at + n_bytes]
        for load, name, (at, n_bytes) in zip(loads, names, spans, strict=True)
    )


def change(tier: DiskTier, name: object, at: int, data: bytes | None = None) -> None:
    """Overwrites bytes of a frame as it lies on the disk; flips a bit without `data`."""
    held = tier._store.find(key_of(name))
    assert held is not None
    with open(tier._store._slabs._path(held.slot.granules), "r+b") as file:
        file.seek(held.slot.offset + at)
        byte = file.read(1)[0]
        file.seek(held.slot.offset + at)
        file.write(bytes([byte ^ 1 << at % 8]) if data is None else data)


@pytest.mark.parametrize("unread", [True, False])
@pytest.mark.parametrize("engine", ENGINES)
def test_they_arrive_without_a_copy(
    engine: str, unread: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, names = Rows(), range(6)
    tier = filled(tmp_path, names, engine=ENGINES[engine]())
    count, expected = Touching(monkeypatch), 0
    for first, stripes in ((0, 0), (0, 0), (2, 1), (3, 0), (1, 4)):  # the first reads headers, too
        loads = [rows.load(n, first, stripes, unread=unread) for n in names]
        assert arrived(tier, loads) == [("hit", "")] * len(names)
        assert right(loads, names)
        expected += 0 if unread else sum(load.target.nbytes for load in loads)
    assert not count.n_copied and count.n_bytes == expected


def test_only_headers_go_into_staging_memory_and_only_once(tmp_path: Path) -> None:
    class Noting(FilesEngine):
        def __init__(self) -> None:
            super().__init__()
            self.reads: list[tuple[int, int]] = []

        def submit(self, operations: Operations) -> None:
            self.reads += [(row[3], row[4]) for row in operations.tolist() if row[0] == READ]
            super().submit(operations)

    rows, engine = Rows(), Noting()
    tier = filled(tmp_path, "ab", engine=engine, threads=0)
    for turn in range(2):
        engine.reads.clear()
        loads = [rows.load(n, unread=True) for n in "ab"]
        assert arrived(tier, loads) == [("hit", "")] * 2
        places = [np.frombuffer(load.target, np.uint8).ctypes.data for load in loads]
        straight = [(at, SIZE) for at in places]
        assert [one for one in engine.reads if one in straight] == straight
        others = [n_bytes for at, n_bytes in engine.reads if at not in places]
        assert others == [HEAD] * 2 * (turn == 0)
    assert tier._conductor._used_bytes == {False: 0, True: 0}


@pytest.mark.parametrize("unread", [True, False])
def test_what_does_not_fit_passes_through_staging_memory(unread: bool, tmp_path: Path) -> None:
    """An odd address, odd bytes, memory that is used again; and what must be decoded here."""
    rows = Rows()
    tier = filled(tmp_path / "plain", "ab")
    odd = rows.pool.acquire(SIZE + 4096)
    assert odd is not None
    load = rows.load("a", unread=unread)
    loads = [load._replace(target=odd[1 : 1 + SIZE].data), load._replace(direct=False)]
    for _ in range(2):
        done = answers(tier, tier.submit_load(loads), 2)
        assert [(one.outcome.value, one.digests) for one in done] == [("hit", b"")] * 2
        assert right(loads, "aa")
    body = body_of("odd", 5000)
    answers(tier, tier.submit_store([Store(key_of("odd"), info_of(5000), memoryview(body))]), 1)
    load = load._replace(key=key_of("odd"), target=odd[:8192].data)
    (answer,) = answers(tier, tier.submit_load([load]), 1)
    assert (answer.outcome.value, answer.digests, answer.n_bytes) == ("hit", b"", 5000)
    assert odd[:5000].tobytes() == body
    tier.close()
    for number, envelope in enumerate((
        Envelope(lossless=Lossless(lambda: 1.0)),
        Envelope(integrity="aead", keyring=Keyring(bytes(32))),
        Format1Envelope(),
    )):  # fmt: skip
        tier = filled(tmp_path / str(number), "ab", envelope=envelope)
        loads = [rows.load(n, unread=unread) for n in "ab"]
        done = answers(tier, tier.submit_load(loads), 2)
        assert outcomes(done) == [("hit", "")] * 2 and right(loads, "ab")
        compressible = number == 0  # noise is not: its frames are plain
        assert compressible or not any(one.digests for one in done)
        tier.close()


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DiskTier]:
    tier = filled(tmp_path_factory.mktemp("disk"), range(8))
    yield tier
    tier.close()


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, STRIPES - 1), st.booleans()), max_size=9)
)
@settings(max_examples=25, deadline=None)
def test_any_parts_in_any_order(disk: DiskTier, wishes: list[tuple[int, int, bool]]) -> None:
    rows = Rows()
    loads = [rows.load(name, first, unread=unread) for name, first, unread in wishes]
    found = arrived(disk, loads) if loads else []
    assert found == [("hit", "") if name < 8 else ("miss", "") for name, *_ in wishes]
    known = [(load, name) for load, (name, *_) in zip(loads, wishes, strict=True) if name < 8]
    assert right([load for load, _ in known], [name for _, name in known])


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("unread", [True, False])
def test_every_flip_is_found(unread: bool, known: bool, tmp_path: Path) -> None:
    """One bit of header, padding of the header, or body: here or there, and then the frame goes."""
    rows, picks = Rows(), random.Random(5)
    names = [*range(40)]
    tier = filled(tmp_path, names)
    if known:
        loads = [rows.load(n, unread=unread) for n in names]
        assert arrived(tier, loads) == [("hit", "")] * 40
    served = 0
    for name in names:
        at = picks.randrange(HEAD if name % 2 else HEAD + SIZE)
        change(tier, name, at)
        (found,) = arrived(tier, [rows.load(name, unread=unread)])
        if at < HEAD and known:
            assert found == ("hit", ""), "the digests were read before, and the stripes are right"
            served += 1
            continue
        if unread and at >= HEAD:
            assert found == ("hit", "unsound")
            (found,) = arrived(tier, [rows.load(name)])
        assert found[0] == "miss" and found[1]
        assert arrived(tier, [rows.load(name, unread=unread)]) == [("miss", "")]
    assert tier.corrupt == 40 - served > 4
    assert not tier._store._slabs.pinned and tier._conductor._used_bytes == {False: 0, True: 0}


@pytest.mark.parametrize("unread", [True, False])
def test_bytes_that_change_behind_the_disk_are_found_by_their_reader(
    unread: bool, tmp_path: Path
) -> None:
    """In the row, between the read and its end: as if the copy to it had gone wrong."""

    class Spoiling(FilesEngine):
        spoils = 1

        def submit(self, operations: Operations) -> None:
            super().submit(operations)
            if loads and self.spoils:
                self.spoils = 0
                loads[0].target[STEP + 5] ^= 1

    rows, loads = Rows(), list[Load]()
    tier = filled(tmp_path, "a", engine=Spoiling(), threads=0)
    loads += [rows.load("a", unread=unread)]
    assert arrived(tier, loads) == [("hit", "unsound") if unread else ("miss", "digest")]
    assert arrived(tier, [rows.load("a")]) == [("hit", "") if unread else ("miss", "")]


def slot_bytes(tier: DiskTier, name: object) -> bytes:
    held = tier._store.find(key_of(name))
    assert held is not None
    with open(tier._store._slabs._path(held.slot.granules), "rb") as file:
        file.seek(held.slot.offset)
        return file.read(held.slot.n_bytes)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(
    "what", ["of another key", "of another time", "half", "no header", "swapped", "zeros"]
)
def test_a_torn_or_strange_frame_is_never_served(what: str, known: bool, tmp_path: Path) -> None:
    rows = Rows()
    tier = filled(tmp_path, "ab")
    if known:
        assert arrived(tier, [rows.load("a", unread=True)]) == [("hit", "")]
    a, b = slot_bytes(tier, "a"), slot_bytes(tier, "b")
    data = {
        "of another key": b,
        "of another time": a[:64] + bytes([a[64] ^ 1]) + a[65:],
        "half": a[: HEAD + SIZE // 2] + b[HEAD + SIZE // 2 :],
        "no header": bytes(HEAD) + b[HEAD:],
        "swapped": a[:HEAD] + a[HEAD + STEP :][:STEP] + a[HEAD:][:STEP] + a[HEAD + 2 * STEP :],
        "zeros": bytes(len(a)),
    }[what]
    change(tier, "a", 0, data)
    (found,) = arrived(tier, [load := rows.load("a", unread=True)])
    wrong = load.target != body_of("a", SIZE)
    if known or what in ("half", "swapped"):
        assert found == (("hit", "unsound") if wrong else ("hit", "")), "the device refuses it"
    else:
        assert found[0] == "miss" and found[1]
    if wrong:
        tier._conductor.known.invalidate(key_of("a"))
        assert arrived(tier, [rows.load("a")])[0][0] == "miss"
    assert arrived(tier, [rows.load("b", unread=True)]) == [("hit", "")]


@pytest.mark.parametrize("keeps", [0, HEAD - 1, HEAD, HEAD + SIZE - 1])
def test_a_short_read_is_a_miss(keeps: int, tmp_path: Path) -> None:
    rows = Rows()
    tier = filled(tmp_path, "ab")
    held = tier._store.find(key_of("b"))
    assert held is not None and held.slot.number > 0
    path = tier._store._slabs._path(held.slot.granules)
    with open(path, "r+b") as file:
        file.truncate(held.slot.offset + keeps)
    assert arrived(tier, [rows.load("b", unread=True)]) == [("miss", "truncated")]
    assert arrived(tier, [rows.load("a", unread=True)]) == [("hit", "")]


def test_memory_that_is_read_into_late_is_used_for_nothing_else(tmp_path: Path) -> None:
    """Neither while the disk may still write there, nor once the tier is closed over it."""
    engine, clock, rows = GatedEngine(), ManualClock(), Rows()
    tier = filled(tmp_path, "ab", engine=engine, clock=clock)
    engine.holds = "read"
    load = rows.load("a", unread=True)
    at, used = np.frombuffer(load.target, np.uint8).ctypes.data, rows.pool.used_bytes
    job = tier.submit_load([load], deadline_s=3)
    assert engine.entered.acquire(timeout=60)
    del load
    clock.advance(s=4)
    assert outcomes(answers(tier, job, 1)) == [("failed", "deadline")]
    gc.collect()
    assert rows.pool.used_bytes == used
    other = rows.load("b")
    assert np.frombuffer(other.target, np.uint8).ctypes.data != at
    engine.release()
    assert arrived(tier, [rows.load("b", unread=True)]) == [("hit", "")]
    while rows.pool.used_bytes > SIZE:  # of `other`
        tier.poll(0.01)
        gc.collect()
    assert bytes(other.target) == b"\xaa" * SIZE


def test_memory_of_a_disk_that_never_answers_outlives_the_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "CLOSE_S", 0.2)
    monkeypatch.setattr(transfer, "_stuck", [])
    engine, rows = GatedEngine(), Rows()
    tier = filled(tmp_path, "a", engine=engine)
    engine.holds = "read"
    job = tier.submit_load([rows.load("a", unread=True)])
    assert engine.entered.acquire(timeout=60)
    tier.close()
    assert outcomes(answers(tier, job, 1)) == [("failed", "closed")]
    del tier
    gc.collect()
    assert rows.pool.used_bytes == SIZE and len(transfer._stuck) == 1


def test_too_much_memory_that_is_read_into_late_opens_the_breaker(tmp_path: Path) -> None:
    engine, clock, rows = GatedEngine(), ManualClock(), Rows()
    tier = filled(tmp_path, range(8), engine=engine, clock=clock, arena=Arena(MIB))
    engine.holds = "read"
    job = tier.submit_load([rows.load(n, unread=True) for n in range(6)], deadline_s=3)
    for _ in range(6):
        assert engine.entered.acquire(timeout=60)
    clock.advance(s=4)
    assert outcomes(answers(tier, job, 6)) == [("failed", "deadline")] * 6
    end = threading.Event()
    while tier._conductor._late_bytes < 6 * SIZE:
        end.wait(0.001)
    (answer,) = answers(tier, tier.submit_load([rows.load(6)]), 1)
    assert (answer.outcome.value, answer.reason) == ("failed", "breaker")
    engine.release()
    while tier._conductor._late_bytes:
        end.wait(0.001)
    names = range(8)
    loads = [rows.load(n, unread=True) for n in names]
    assert arrived(tier, loads) == [("hit", "")] * 8 and right(loads, names)


def test_a_frame_that_moves_while_a_reader_reads(tmp_path: Path) -> None:
    """Its header came before, its stripes are those of another frame: never served as its own."""
    rows, engine = Rows(), GatedEngine()
    owner = filled(tmp_path, "a")
    with pytest.warns(UserWarning):
        reader = DiskTier(tmp_path, 8 * MIB, engine=engine)
    engine.holds = "read"
    load = rows.load("a", unread=True)
    job = reader.submit_load([load])
    assert engine.entered.acquire(timeout=60)
    owner.delete([key_of("a")])
    answers(
        owner,
        owner.submit_store([Store(key_of("b"), info_of(STEP), memoryview(body_of("b", SIZE)))]),
        1,
    )
    engine.release()
    (answer,) = answers(reader, job, 1)
    if answer.outcome is Outcome.HIT:
        assert digests(load.target, STEP) != answer.digests
    assert arrived(reader, [rows.load("a")]) == [("miss", "")] and not reader.corrupt
    assert arrived(reader, [rows.load("b", unread=True)]) == [("hit", "")]
