"""F12: a disk tier is the same on every engine, with and without a thread, and wherever io_uring,
locked memory or O_DIRECT are denied."""

from __future__ import annotations

import errno
import itertools
import os
import platform
from collections.abc import Callable
from pathlib import Path

import pytest

from flowkv.tiers import Load, Outcome, Store
from flowkv.tiers.disk import DiskTier
from tests.clock import without_threads
from tests.inside import IOEngine, ThreadsEngine, open_engine
from tests.inside import io_engine as opening

from .files_engine import FilesEngine
from .frames import LAYOUT, answers, hits, info_of, key_of, leave, outcomes, stored
from .io.test_ladder import ROOT, run
from .wraps import KINDS, bfloat16, envelope_of

MIB = 1 << 20
KNOWN = ("x86_64", "aarch64")
ENGINES = ("io_uring", "threads", "buffered", "files")
Opener = Callable[..., DiskTier]


def engine_of(name: str) -> IOEngine:
    if name == "files":
        return FilesEngine()
    if name in ("threads", "buffered"):
        return ThreadsEngine(direct=name == "threads")
    engine = open_engine()
    if engine.name != name:
        engine.close()
        pytest.skip(f"{name} is not allowed here: {engine.why}")
    return engine


@pytest.fixture(params=list(itertools.product(ENGINES, (1, 0))), ids=str)
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Opener:
    name, threads = request.param

    def open_(capacity_bytes: int = 4 * MIB, **arguments: object) -> DiskTier:
        directory = arguments.pop("directory", tmp_path / "kv")
        tier = DiskTier(
            directory,  # type: ignore[arg-type]
            capacity_bytes,
            engine=engine_of(name),
            threads=threads,
            **arguments,  # type: ignore[arg-type]
        )
        assert tier.engine == name
        return tier

    return open_


def load(tier: DiskTier, name: object, n_bytes: int, **part: int) -> tuple[str, str, bytes]:
    target = bytearray(n_bytes + 3)
    job = tier.submit_load([Load(key_of(name), memoryview(target), LAYOUT, **part)])
    (answer,) = answers(tier, job, 1)
    assert target[n_bytes:] == bytes(3)
    if answer.outcome is Outcome.HIT:
        assert answer.n_bytes == n_bytes
    return answer.outcome.value, answer.reason, bytes(target[:n_bytes])


def put(tier: DiskTier, name: object, stripes: int, step: int) -> bytes:
    body = bfloat16(name, stripes * step)
    job = tier.submit_store([Store(key_of(name), info_of(step), memoryview(body))])
    assert outcomes(answers(tier, job, 1)) == [("stored", "")]
    return body


@pytest.mark.parametrize("kind", KINDS)
def test_F12_frames_whole_and_in_part(opened: Opener, kind: str) -> None:
    """Every wrap on every engine, across a restart."""
    envelope = envelope_of(kind)
    tier = opened(envelope=envelope)
    shapes = {"odd": (1, 5001), "some": (5, 8192), "many": (40, 4096), "large": (3, 262_144)}
    bodies = {name: put(tier, name, *shape) for name, shape in shapes.items()}
    for _ in range(2):
        for name, (stripes, step) in shapes.items():
            body = bodies[name]
            assert load(tier, name, len(body)) == ("hit", "", body)
            for first in {0, stripes // 2, stripes - 1}:
                for count in {1, stripes - first}:
                    part = body[first * step : (first + count) * step]
                    found = load(tier, name, len(part), first=first, stripes=count)
                    assert found == ("hit", "", part)
            for first, count in ((stripes, 0), (0, stripes + 1), (-1, 1), (1, -1)):
                assert load(tier, name, 1, first=first, stripes=count)[:2] == ("miss", "stripes")
            assert load(tier, name, 1)[:2] == ("failed", "target")
        tier.close()
        tier = opened(envelope=envelope)


def test_F12_damage_is_a_miss(opened: Opener, tmp_path: Path) -> None:
    leave(opened(), range(6))
    slab = tmp_path / "kv" / "slab-00000003"
    data = bytearray(slab.read_bytes())
    data[12_288 + 5000] ^= 1
    data[3 * 12_288] ^= 1
    slab.write_bytes(data[: 5 * 12_288 + 6000])
    tier = opened()
    assert hits(tier, range(6)) == 3
    assert tier.corrupt == 2
    stored(tier, [*range(6), "more"])
    assert hits(tier, [*range(6), "more"]) == 7


def test_F12_slots_are_reused_and_cleared(opened: Opener, tmp_path: Path) -> None:
    tier = opened(MIB)
    for name in range(30):
        stored(tier, [name], size=40_000)
        assert tier.delete([key_of(name)]) == 1
    stored(tier, range(100, 110), size=37_000)  # shorter frames in the slots of longer ones
    assert hits(tier, range(100, 110), size=37_000) == 10
    assert tier.erase([key_of(n) for n in range(100, 105)]) == 5
    assert hits(tier, range(100, 110), size=37_000) == 5


def test_F12_with_the_device(opened: Opener) -> None:
    tier = opened(durability="sync")
    stored(tier, range(20))
    assert hits(tier, range(20)) == 20


def test_a_moment_without_threads_costs_its_stores(opened: Opener) -> None:
    """The error reached the caller; nothing was answered from then on, nor could it be closed."""

    tier = opened()
    with without_threads():
        tier.bind(key_of("namespace"), "a model")
        job = tier.submit_store([Store(key_of(0), info_of(8192), memoryview(bytes(8192)))])
        ((outcome, reason),) = outcomes(answers(tier, job, 1))
    assert (outcome, reason) in (("stored", ""), ("failed", "memory"), ("failed", "ENOMEM"))
    assert tier.contains([key_of(0)]) == [not reason]
    stored(tier, [1])
    assert hits(tier, [1]) == 1


def test_F12_readers(opened: Opener) -> None:
    owner = opened()
    stored(owner, range(5))
    with pytest.warns(UserWarning, match="another cache of this process"):
        reader = opened()
    stored(owner, range(5, 10))
    assert hits(reader, range(10)) == 10
    owner.delete([key_of(n) for n in range(5)])
    stored(owner, range(20, 25))
    assert hits(reader, range(25)) == 10


@pytest.mark.skipif(platform.machine() not in KNOWN, reason="numbers of system calls differ here")
@pytest.mark.parametrize("code", ["EPERM", "ENOSYS"])
def test_F12_io_uring_denied(code: str) -> None:
    """This file passes in a process that may not use io_uring, on what is left."""
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import pytest\n"
        "from tests.tiers.io.test_ladder import deny\n"
        f"deny({getattr(errno, code)})\n"
        "sys.exit(pytest.main(['-q', '-n', '0', '-p', 'no:cacheprovider', '-rs', '-k',"
        " 'damage or device or takes_what_is_there', 'tests/tiers/test_disk_engines.py']))\n"
    )
    answer = run(program)
    assert "io_uring is not allowed here" in answer
    assert "passed" in answer


def test_F12_takes_what_is_there(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "kv", MIB)
    assert tier.engine in ENGINES[:3]
    stored(tier, range(5))
    assert hits(tier, range(5)) == 5


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody with fewer rights")
def test_F12_little_locked_memory(tmp_path: Path) -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from tests.tiers.io.test_ladder import drop\n"
        "from tests.tiers.frames import hits, stored\n"
        "from flowkv.tiers.disk import DiskTier\n"
        "from flowkv.tiers.io import open_engine\n"
        "import os, tempfile\n"
        "open_engine().close()\n"  # so that everything is loaded while it may be read
        "drop(1 << 20)\n"
        "with tempfile.TemporaryDirectory() as directory:\n"
        "    tier = DiskTier(os.path.join(directory, 'kv'), 1 << 22)\n"
        "    stored(tier, range(50))\n"
        "    print(hits(tier, range(50)), tier.engine)\n"
        "    tier.close()\n"
    )
    found, engine = run(program).split()
    assert (found, engine in ENGINES[:3]) == ("50", True)


@pytest.mark.parametrize("name", ["io_uring", "threads"])
def test_F12_no_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(opening, "set_direct", lambda fd: False)
    engine = engine_of(name)
    tier = DiskTier(tmp_path / "kv", MIB, engine=engine)
    stored(tier, range(20))
    assert hits(tier, range(20)) == 20
    assert not engine.direct


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no file system in memory here")
def test_F12_a_file_system_in_memory(tmp_path: Path) -> None:
    directory = Path("/dev/shm") / f"flowkv-test-{os.getpid()}"
    tier = DiskTier(directory, MIB)
    try:
        stored(tier, range(20))
        tier.close()
        tier = DiskTier(directory, MIB)
        assert hits(tier, range(20)) == 20
    finally:
        tier.close()
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()
