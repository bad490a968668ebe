"""Conformance of every I/O engine."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.clock import in_child
from tests.inside import OPERATION, READ, SYNC, WRITE, ArenaSlot, StateError
from tests.tiers.io.rig import BLOCK, MAKERS, Rig, rigged

REFUSED = np.array([(READ, 0, 0, 0, 0, 1)], OPERATION)


@pytest.fixture(params=MAKERS)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    with rigged(request.param) as made:
        yield made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


def noise(n_bytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(n_bytes)


def test_bytes_come_back(rig: Rig, path: Path) -> None:
    fd, data = rig.open(path), noise(16 * BLOCK)
    assert rig.write(fd, 2 * BLOCK, data) == len(data)
    assert rig.sync(fd) == 0
    assert path.read_bytes() == bytes(2 * BLOCK) + data
    assert rig.read(fd, 2 * BLOCK, len(data)) == (len(data), data)
    assert rig.owed == 0 and not len(rig.engine.wait())


def test_a_read_ends_where_the_file_ends(rig: Rig, path: Path) -> None:
    data = noise(3 * BLOCK + 777)
    path.write_bytes(data)
    fd = rig.open(path)
    result, read = rig.read(fd, BLOCK, 8 * BLOCK)
    assert result == 2 * BLOCK + 777
    assert read[:result] == data[BLOCK:]
    assert rig.read(fd, 64 * BLOCK, BLOCK)[0] == 0
    assert rig.read(fd, 3 * BLOCK, BLOCK)[0] == 777


def test_errors_are_results(rig: Rig, path: Path) -> None:
    path.write_bytes(bytes(BLOCK))
    readable, closed = rig.open(path, write=False), os.open(path, os.O_RDONLY)
    os.close(closed)
    with rig.slot(BLOCK) as slot:
        results = rig.run(
            (READ, closed, 0, slot.address, BLOCK),
            (WRITE, readable, 0, slot.address, BLOCK),
            (SYNC, closed, 0, 0, 0),
            (7, readable, 0, slot.address, BLOCK),
            (READ, readable, 0, slot.address, BLOCK),
        )
    assert results == [-errno.EBADF, -errno.EBADF, -errno.EBADF, -errno.EINVAL, BLOCK]


def test_a_full_device_is_an_error(rig: Rig) -> None:
    fd = os.open("/dev/full", os.O_RDWR)
    try:
        with rig.slot(BLOCK) as slot:
            assert rig.run((WRITE, fd, 0, slot.address, BLOCK)) == [-errno.ENOSPC]
    finally:
        os.close(fd)


def test_nothing_is_moved_by_nothing(rig: Rig, path: Path) -> None:
    fd = rig.open(path)
    with rig.slot(BLOCK) as slot:
        assert rig.run((READ, fd, 0, slot.address, 0), (WRITE, fd, 0, slot.address, 0)) == [0, 0]
    rig.engine.submit(np.empty(0, OPERATION))
    assert len(rig.engine.wait()) == 0
    assert path.stat().st_size == 0


def test_links_and_directories_are_refused(rig: Rig, path: Path) -> None:
    path.write_bytes(b"x")
    link = path.with_name("link")
    link.symlink_to(path)
    for wrong in (link, path.parent, path.with_name("absent")):
        with pytest.raises(OSError):
            rig.open(wrong, write=False)


def test_unaligned_operations_go_through_the_page_cache(rig: Rig, path: Path) -> None:
    """A direct file refuses them, or its file system does not mind; a plain one never minds."""
    data = noise(2 * BLOCK)
    path.write_bytes(data)
    fd, plain = rig.open(path), os.open(path, os.O_RDWR)
    try:
        with rig.slot(BLOCK) as slot:
            row = (100, slot.address + 3, 1000)
            direct, buffered = rig.run((READ, fd, *row), (READ, plain, *row))
            assert direct in ((1000, -errno.EINVAL) if rig.engine.direct else (1000,))
            assert buffered == 1000
            assert bytes(slot.view[3:1003]) == data[100:1100]
    finally:
        os.close(plain)


def test_more_than_the_depth_at_once(rig: Rig, path: Path) -> None:
    fd, count = rig.open(path), 40 * rig.engine.depth
    with rig.slot(count * BLOCK) as slot:
        slot.view[:] = data = noise(count * BLOCK)
        rows = [(fd, i * BLOCK, slot.address + i * BLOCK, BLOCK) for i in range(count)]
        assert rig.run(*((WRITE, *row) for row in rows)) == [BLOCK] * count
        slot.view[:] = bytes(len(data))
        assert rig.run(*((READ, *row) for row in reversed(rows))) == [BLOCK] * count
        assert slot.view == data


def test_threads_share_an_engine(rig: Rig, path: Path) -> None:
    """Several submit and several wait; every operation is answered once, to one of them."""
    path.write_bytes(noise(64 * BLOCK))
    fd, answers, each = rig.open(path), [], 50

    def submit() -> None:
        for i in range(each):
            rig.submit((READ, fd, i % 64 * BLOCK, slots[i % 4].address, BLOCK))

    def wait() -> None:
        while len(answers) < 3 * each:
            answers.extend(rig.engine.wait(0.02).tolist())

    slots = [rig.arena.acquire(BLOCK) for _ in range(4)]
    submitters = [threading.Thread(target=submit) for _ in range(3)]
    waiters = [threading.Thread(target=wait) for _ in range(2)]
    for thread in (*submitters, *waiters):
        thread.start()
    for thread in submitters:
        thread.join()
    for thread in waiters:
        thread.join(30)
    assert sorted(result for _, result in answers) == [BLOCK] * (3 * each)
    assert len({tag for tag, _ in answers}) == 3 * each


def test_waiting_ends_in_time(rig: Rig, path: Path) -> None:
    path.write_bytes(bytes(BLOCK))
    fd = rig.open(path)
    started = time.monotonic()
    assert len(rig.engine.wait(0.05)) == 0
    with rig.slot(BLOCK) as slot:
        rig.submit((READ, fd, 0, slot.address, BLOCK))
        answers = rig.engine.wait(20.0)
        assert len(rig.engine.wait(0.3)) == 0  # a second never comes
    assert 0.3 < time.monotonic() - started < 20
    assert answers["result"].tolist() == [BLOCK]


def test_waits_may_be_as_long_as_one_likes(rig: Rig, path: Path) -> None:
    path.write_bytes(bytes(BLOCK))
    fd, slot = rig.open(path), rig.arena.acquire(BLOCK)
    for forever in (1e9, float("inf")):
        rig.submit((READ, fd, 0, slot.address, BLOCK))
        assert len(rig.engine.wait(forever)) == 1


def test_a_waiter_wakes_when_another_thread_submits(rig: Rig, path: Path) -> None:
    path.write_bytes(bytes(BLOCK))
    fd, slot = rig.open(path), rig.arena.acquire(BLOCK)
    timer = threading.Timer(0.1, rig.submit, [(READ, fd, 0, slot.address, BLOCK)])
    timer.start()
    started = time.monotonic()
    assert len(rig.engine.wait(30.0)) == 1
    assert time.monotonic() - started < 15
    timer.join()


def test_a_closed_engine(rig: Rig, path: Path) -> None:
    """It ends what it has begun, answers for the rest, and takes no more."""
    path.write_bytes(bytes(BLOCK))
    fd, slot = rig.open(path), rig.arena.acquire(BLOCK)
    tags = rig.submit(*[(READ, fd, 0, slot.address, BLOCK)] * 500)
    assert rig.engine.close()
    results = rig.finish(len(tags))
    assert set(results) == set(tags)
    assert set(results.values()) <= {BLOCK, -errno.ECANCELED}
    assert rig.owed == 0 and not len(rig.engine.wait())
    with pytest.raises(StateError, match="closed"):
        rig.engine.submit(REFUSED)
    rig.engine.cancel(np.array([1], np.uint64))
    started = time.monotonic()
    assert len(rig.engine.wait(30.0)) == 0  # nothing can come, so nobody waits
    assert time.monotonic() - started < 15
    assert rig.engine.close()


def test_cancelled_operations_are_answered_too(rig: Rig, path: Path) -> None:
    path.write_bytes(bytes(BLOCK))
    fd, slot = rig.open(path), rig.arena.acquire(BLOCK)
    tags = rig.submit(*[(READ, fd, 0, slot.address, BLOCK)] * 300)
    rig.engine.cancel(np.array(tags[::2], np.uint64))
    results = rig.finish(len(tags))
    assert set(results) == set(tags)
    assert all(results[tag] == BLOCK for tag in tags[1::2])
    assert {results[tag] for tag in tags[::2]} <= {BLOCK, -errno.ECANCELED}


def test_a_child_may_not_use_it(rig: Rig) -> None:
    if rig.engine.name == "files":
        pytest.skip("this engine has no threads that a fork could lose")

    def refused() -> bool:
        with pytest.raises(StateError):
            rig.engine.submit(REFUSED)
        rig.engine.cancel(np.array([1], np.uint64))
        return not rig.engine.close() or len(rig.engine.wait(5.0)) > 0

    assert in_child(refused) == 0
    assert rig.run((7, 0, 0, 0, 0)) == [-errno.EINVAL]  # its parent still may


# ---- against a model

BLOCKS = 24
ranges = st.tuples(st.integers(0, BLOCKS - 1), st.integers(1, 6))
moves = st.tuples(st.booleans(), ranges, st.integers(0, 1 << 30))
batches = st.lists(st.lists(moves, min_size=1, max_size=12) | st.integers(0, BLOCKS * BLOCK))


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=batches)
@example(steps=[[(True, (0, 6), 1)], 5000, [(False, (0, 4), 0)], [(True, (20, 3), 2)]])
def test_a_file_behaves_as_its_bytes(name: str, steps: list, tmp_path: Path) -> None:
    behaves(name, steps, tmp_path)


@pytest.mark.deep
@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=1500, suppress_health_check=list(HealthCheck))
@given(steps=batches)
def test_a_file_behaves_as_its_bytes_for_long(name: str, steps: list, tmp_path: Path) -> None:
    behaves(name, steps, tmp_path)


def behaves(name: str, steps: list, tmp_path: Path) -> None:
    """Batches of reads and writes, and truncations to any length in between."""
    with rigged(name) as rig:
        path, model = tmp_path / "model", bytearray()
        path.write_bytes(b"")
        fd = rig.open(path)
        for step in steps:
            if isinstance(step, int):
                os.ftruncate(fd, step)
                model[:] = model[:step].ljust(step, b"\0")
            else:
                apply(rig, fd, model, step)
        assert path.read_bytes() == model


def apply(rig: Rig, fd: int, model: bytearray, batch: list) -> None:
    """Runs the moves of a batch whose ranges are apart, all at once, on file and model."""
    touched: set[int] = set()
    rows, slots, checks = [], [], []
    end = len(model)
    for write, (first, count), seed in batch:
        blocks = set(range(first, min(first + count, BLOCKS)))
        if touched & blocks:
            continue
        touched |= blocks
        length, offset = len(blocks) * BLOCK, first * BLOCK
        slot = rig.arena.acquire(length)
        slots.append(slot)
        if write:
            slot.view[:] = data = noise(length, seed)
            model.extend(bytes(max(0, offset + length - len(model))))
            model[offset : offset + length] = data
            checks.append((slot, length, data))
        else:
            checks.append((slot, None, (offset, length)))
        rows.append((WRITE if write else READ, fd, offset, slot.address, length))
    for (slot, wanted, data), result in zip(checks, rig.run(*rows), strict=True):
        if wanted is not None:
            assert result == wanted
            continue
        offset, length = data
        # Another write of this batch may have made the file longer before this read, or after.
        least, most = (max(0, min(n - offset, length)) for n in (end, len(model)))
        assert least <= result <= most
        assert bytes(slot.view[:result]) == model[offset : offset + result]
    for slot in slots:
        rig.arena.give_back(slot)


# ---- many at once, some called off

COUNT = 64  # blocks of the file


def storm(rig: Rig, path: Path, rounds: int) -> None:
    """Reads into memory of their own while others are cancelled: each gets its bytes, or none."""
    content = np.random.default_rng(5).integers(0, 256, (COUNT, BLOCK), np.uint8)
    path.write_bytes(content.tobytes())
    fd, random = rig.open(path), np.random.default_rng(6)
    owners: dict[int, tuple[ArenaSlot, int]] = {}
    cancelled = done = 0
    for _ in range(rounds):
        operations = []
        for block in random.integers(0, COUNT, random.integers(1, 40)).tolist():
            slot = rig.arena.acquire(BLOCK)
            if slot is not None:
                slot.view[:8] = bytes(8)
                operations.append((slot, block))
        tags = rig.submit(*[(READ, fd, b * BLOCK, s.address, BLOCK) for s, b in operations])
        owners.update(zip(tags, operations, strict=True))
        if random.random() < 0.3:
            chosen = random.choice(np.array(list(owners), np.uint64), min(9, len(owners)))
            rig.engine.cancel(chosen)
        for tag, result in rig.wait(60.0 if owners and random.random() < 0.5 else 0.0):
            slot, block = owners.pop(tag)
            assert result in (BLOCK, -errno.ECANCELED)
            assert result < 0 or bytes(slot.view) == content[block].tobytes()
            cancelled, done = cancelled + (result < 0), done + 1
            rig.arena.give_back(slot)
    for tag, result in rig.finish(len(owners)).items():
        slot, block = owners.pop(tag)
        assert result < 0 or bytes(slot.view) == content[block].tobytes()
        rig.arena.give_back(slot)
    assert rig.arena.free_bytes == rig.arena.n_bytes
    assert done > cancelled
    assert rig.owed == 0 and not len(rig.engine.wait())


def test_a_storm(rig: Rig, path: Path) -> None:
    storm(rig, path, 60)


@pytest.mark.deep
def test_a_long_storm(rig: Rig, path: Path) -> None:
    storm(rig, path, 20_000)
