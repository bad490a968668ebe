"""Faults that only the io_uring engine can have: its rings, its thread, its flags."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.clock import without_threads
from tests.inside import OPERATION, READ, SYNC, WRITE, Arena, UringEngine, uring
from tests.tiers.io.rig import BLOCK, Rig, rigged

ROOT = Path(__file__).resolve().parents[3]
FOREVER = (1 << 64) - 1  # the offset at which a pipe is read: wherever it is


@pytest.fixture
def rig() -> Iterator[Rig]:
    with rigged("io_uring") as made:
        yield made


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """An empty pipe: a read of it lasts until somebody writes, or cancels it."""
    ends = os.pipe()
    yield ends
    for fd in ends:
        os.close(fd)


def loop_threads() -> int:
    return sum(thread.name == "flowkv io_uring" for thread in threading.enumerate())


def test_short_transfers_are_continued(rig: Rig, pipe: tuple[int, int]) -> None:
    """A pipe gives and takes what it has: the operation goes on until it has all."""
    data = np.random.default_rng(0).bytes(64 * BLOCK)
    with rig.slot(len(data)) as source, rig.slot(len(data)) as target:
        source.view[:] = data
        results = rig.run(
            (READ, pipe[0], FOREVER, target.address, len(data)),
            (WRITE, pipe[1], FOREVER, source.address, len(data)),
        )
        assert results == [len(data)] * 2
        assert target.view == data


def test_what_hangs_is_cancelled(rig: Rig, pipe: tuple[int, int]) -> None:
    with rig.slot(BLOCK) as slot:
        hanging, other = rig.submit(*[(READ, pipe[0], FOREVER, slot.address, BLOCK)] * 2)
        assert len(rig.engine.wait(0.1)) == 0
        rig.engine.cancel(np.array([hanging, 12345], np.uint64))
        assert rig.finish(1) == {hanging: -errno.ECANCELED}
        os.write(pipe[1], bytes(BLOCK))
        assert rig.finish(1) == {other: BLOCK}


def test_what_waits_behind_hanging_operations_is_cancelled_at_once(
    rig: Rig, pipe: tuple[int, int]
) -> None:
    """All places in the kernel are taken, and stay so."""
    with rig.slot(BLOCK) as slot:
        row = (READ, pipe[0], FOREVER, slot.address, BLOCK)
        hanging = rig.submit(*[row] * rig.engine.depth)
        waiting = rig.submit(*[row] * 20)
        rig.engine.cancel(np.array(waiting[5:], np.uint64))
        assert rig.finish(15) == dict.fromkeys(waiting[5:], -errno.ECANCELED)
        rig.engine.cancel(np.array(hanging, np.uint64))
        assert rig.finish(len(hanging)) == dict.fromkeys(hanging, -errno.ECANCELED)
        assert len(rig.engine.wait(0.1)) == 0  # the five hang in their place now
        assert rig.owed == 5
        rig.engine.cancel(np.array(waiting[:5], np.uint64))
        rig.finish(5)


def test_closing_cancels_what_hangs(rig: Rig, pipe: tuple[int, int]) -> None:
    slot = rig.arena.acquire(BLOCK)
    tags = rig.submit(*[(READ, pipe[0], FOREVER, slot.address, BLOCK)] * 30)
    os.write(pipe[1], b"x")  # one of them has begun
    time.sleep(0.05)
    before = loop_threads()
    assert rig.engine.close()
    assert loop_threads() == before - 1
    assert rig.finish(30) == dict.fromkeys(tags, -errno.ECANCELED)
    os.write(pipe[1], b"nobody reads this")
    assert os.read(pipe[0], 100) == b"nobody reads this"


def test_closing_wakes_who_waits(rig: Rig) -> None:
    waited: list[int] = []
    waiter = threading.Thread(target=lambda: waited.append(len(rig.engine.wait(60.0))))
    waiter.start()
    time.sleep(0.1)
    assert rig.engine.close()
    waiter.join(60)
    assert waited == [0]


def test_more_operations_than_the_rings_hold(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those beyond wait on this side until completions are taken, and can be cancelled there."""
    monkeypatch.setattr(uring, "CAPACITY", 16)
    with rigged("io_uring") as small:
        (tmp_path / "file").write_bytes(bytes(BLOCK))
        fd = small.open(tmp_path / "file")
        with small.slot(BLOCK) as slot:
            row = (READ, fd, 0, slot.address, BLOCK)
            assert small.run(*[row] * 1000) == [BLOCK] * 1000
            tags = small.submit(*[row] * 100)
            small.engine.cancel(np.array(tags[50:], np.uint64))
            results = small.finish(100)
            assert [results[tag] for tag in tags[:16]] == [BLOCK] * 16
            assert [results[tag] for tag in tags[50:]] == [-errno.ECANCELED] * 50
            rows = np.array([(*row, tag) for tag in range(100)], OPERATION)
            small.engine.submit(rows)
            rows["tag"] = rows["op"] = 99  # the caller's again
            assert small.finish(100) == dict.fromkeys(range(100), BLOCK)
            tags = small.submit(*[row] * 100)
            assert small.engine.close()
            assert set(small.finish(100)) == set(tags)


@pytest.mark.parametrize("level", range(len(uring.FLAGS)))
def test_every_step_of_the_flags_works(
    level: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that knows fewer flags is asked for fewer, down to none but CLAMP."""
    monkeypatch.setattr(uring, "FLAGS", (1 << 31, *uring.FLAGS[level:]))
    with rigged("io_uring") as rig:
        assert rig.engine.flags in uring.FLAGS[1:]
        fd = rig.open(tmp_path / "file")
        assert rig.write(fd, 0, b"y" * (20 * BLOCK)) == 20 * BLOCK
        assert rig.read(fd, BLOCK, 19 * BLOCK) == (19 * BLOCK, b"y" * (19 * BLOCK))
        assert rig.sync(fd) == 0


def test_registered_memory_is_used_and_so_is_other(tmp_path: Path) -> None:
    with rigged("registered") as rig:
        assert rig.engine.registered
        other = Arena(1 << 20)
        outside = other.acquire(BLOCK)
        fd = rig.open(tmp_path / "file")
        with rig.slot(BLOCK) as inside:
            inside.view[:], outside.view[:] = b"i" * BLOCK, b"o" * BLOCK
            rows = [(WRITE, fd, i * BLOCK, slot.address, BLOCK)
                    for i, slot in enumerate((inside, outside))]  # fmt: skip
            assert rig.run(*rows) == [BLOCK] * 2
        assert (tmp_path / "file").read_bytes() == b"i" * BLOCK + b"o" * BLOCK


def test_memory_that_is_not_ours_is_an_error(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(BLOCK))
    fd = rig.open(tmp_path / "file")
    assert rig.run((READ, fd, 0, 4096, BLOCK), (READ, fd, 0, 0, -1 & FOREVER)) == [
        -errno.EFAULT,
        -errno.EINVAL,
    ]


def test_a_ring_that_breaks(tmp_path: Path, pipe: tuple[int, int]) -> None:
    """Something replaces the ring's descriptor: nothing is answered wrongly, and nothing hangs."""
    with rigged("io_uring") as made:
        before = rings()
        engine = UringEngine(depth=2)
        ring_fd = min(rings() - before)  # the others belong to its mappings
        rig = Rig(engine, made.arena)
        slot = made.arena.acquire(BLOCK)
        hanging = rig.submit(*[(READ, pipe[0], FOREVER, slot.address, BLOCK)] * 2)
        waiting = rig.submit(*[(READ, pipe[0], FOREVER, slot.address, BLOCK)] * 3)
        time.sleep(0.1)
        keep = os.dup(ring_fd)
        os.dup2(pipe[0], ring_fd)
        late = rig.submit((SYNC, pipe[0], 0, 0, 0))
        results = rig.finish(4)
        assert set(results) == {*waiting, *late}
        assert all(result < 0 for result in results.values())
        after = rig.submit((SYNC, pipe[0], 0, 0, 0))
        assert set(rig.finish(1)) == set(after)
        assert rig.owed == len(hanging)
        assert not engine.close()  # the kernel never let go of the two
        assert not engine.close()
        os.close(keep)
        os.close(ring_fd)
        os.write(pipe[1], bytes(2 * BLOCK))


def rings() -> set[int]:
    """Descriptors of io_urings in this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if "io_uring" in os.readlink(f"/proc/self/fd/{name}"):
                found.add(int(name))
        except OSError:  # the listing's own
            continue
    return found


def test_nothing_is_left_behind() -> None:
    """Neither threads nor descriptors."""
    with rigged("io_uring"):
        pass
    gc.collect()
    before = len(os.listdir("/proc/self/fd")), loop_threads()
    for _ in range(5):
        engine = UringEngine(depth=4)
        engine.submit(np.array([(SYNC, 1 << 20, 0, 0, 0, 1)], OPERATION))
        assert engine.close()
    end_s = time.monotonic() + 60
    while (len(os.listdir("/proc/self/fd")), loop_threads()) != before:
        assert time.monotonic() < end_s, (rings(), loop_threads(), before)
        gc.collect()
        time.sleep(0.01)


def test_without_a_thread_no_descriptor_is_left() -> None:
    with rigged("io_uring"):
        pass
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))

    with without_threads(), pytest.raises(OSError, match="no thread"):
        UringEngine(depth=4)
    assert len(os.listdir("/proc/self/fd")) == before


def test_without_memory_for_the_loop_no_ring_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    with rigged("io_uring"):
        pass
    gc.collect()
    before = rings()

    def none_left(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(uring, "Served", none_left)
    with pytest.raises(MemoryError):
        UringEngine(depth=4)
    assert rings() == before


@pytest.mark.parametrize("hangs", [False, True])
def test_a_process_that_forgets_to_close_ends(hangs: bool) -> None:
    program = (
        f"import sys, os; sys.path.insert(0, {str(ROOT)!r})\n"
        "import numpy as np\n"
        "from flowkv.tiers.io.engine import OPERATION\n"
        "from flowkv.tiers.io.engine import Arena\n"
        "from flowkv.tiers.io.uring import UringEngine\n"
        "arena, pipe = Arena(1 << 20), os.pipe()\n"
        "engine, slot = UringEngine(arena=arena), arena.acquire(4096)\n"
        f"row = (0, pipe[0], {FOREVER}, slot.address, 4096, 1)\n"
        f"engine.submit(np.array([row] * {int(hangs)}, OPERATION))\n"
        "print('over')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120
    )
    if "io_uring" in done.stderr and "Error" in done.stderr:
        pytest.skip("io_uring is not allowed here")
    assert (done.returncode, done.stdout, done.stderr) == (0, "over\n", "")


def test_statistics_say_why_a_file_is_not_direct(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowkv.tiers.io.engine.aligned", lambda fd: False)
    fd = rig.open(tmp_path / "file")
    assert not rig.engine.direct
    assert str(tmp_path) in rig.engine.why
    assert rig.write(fd, 3, b"unaligned") == 9


@pytest.mark.parametrize(
    ("op", "done", "result", "reported"),
    [
        (READ, 8192, -errno.EINVAL, 8192),  # a direct read went on from where no sector begins
        (READ, 0, -errno.EINVAL, -errno.EINVAL),
        (WRITE, 8192, -errno.EINVAL, -errno.EINVAL),
        (READ, 8192, -errno.EIO, -errno.EIO),
        (READ, 8192, 0, 8192),
        (WRITE, 8192, 0, -errno.ENOSPC),
        (READ, 12288, 4096, 12288),
        (READ, 8192, 4096, -errno.ECANCELED),  # closed before it could go on
        (SYNC, 0, 0, 0),
    ],
)
def test_what_is_reported(op: int, done: int, result: int, reported: int) -> None:
    """File systems differ in how a file ends; this one shows a part of it only."""
    slots = np.zeros((1, uring.COLUMNS), np.int64)
    slots[0, [uring.OP, uring.DONE, uring.LENGTH]] = op, done, 12288
    assert uring._result(slots, 0, result) == reported
