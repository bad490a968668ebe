"""The engine that a machine allows is taken, and says why it is not a better one.

io_uring is denied as containers deny it: by a seccomp filter, which a child process sets for
itself. Each child then runs the whole conformance of what is left.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.inside import ThreadsEngine, open_engine, tiers_io
from tests.inside import io_engine as opening
from tests.tiers.io.rig import BLOCK, Rig, rigged

ROOT = Path(__file__).resolve().parents[3]
MACHINES = ("x86_64", "aarch64")
NOBODY = 65534

PROBE = """
import sys
sys.path.insert(0, {root!r})
from tests.tiers.io.test_ladder import deny, drop
from flowkv.tiers.io import open_engine
{setup}
engine = open_engine({arguments})
print(engine.name, engine.direct, engine.why)
assert engine.close()
"""


def deny(code: int, *numbers: int) -> None:
    """Has the kernel answer io_uring's system calls of this process with an errno."""
    numbers = numbers or (425, 426, 427)
    load, equal, give = 0x20, 0x15, 0x06
    last = len(numbers)  # instructions from the first comparison to the one that allows
    program = [(load, 0, 0, 0)]
    program += [(equal, last - i, 0, number) for i, number in enumerate(numbers)]
    program += [(give, 0, 0, 0x7FFF0000), (give, 0, 0, 0x00050000 | code)]
    text = b"".join(struct.pack("HBBI", *line) for line in program)
    filters = ctypes.create_string_buffer(text)
    whole = ctypes.create_string_buffer(
        struct.pack("HxxxxxxQ", len(program), ctypes.addressof(filters))
    )
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    if prctl(38, 1, 0, 0, 0) or prctl(22, 2, ctypes.addressof(whole), 0, 0):
        raise OSError(ctypes.get_errno(), "this system allows no seccomp filter")


def drop(locked_bytes: int) -> None:
    """Becomes somebody with few rights, who may lock little memory."""
    import resource

    resource.setrlimit(resource.RLIMIT_MEMLOCK, (locked_bytes, locked_bytes))
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def probe(setup: str, arguments: str = "") -> str:
    program = PROBE.format(root=str(ROOT), setup=setup, arguments=arguments)
    return run(program).strip()


def run(program: str) -> str:
    """What a Python program prints."""
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=ROOT, timeout=200
    )
    if "allows no seccomp filter" in done.stderr:
        pytest.skip("this system allows no seccomp filter")
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(
    platform.machine() not in MACHINES, reason="a seccomp filter reads other words here"
)
@pytest.mark.parametrize("code", ["EPERM", "ENOSYS"])
def test_where_io_uring_is_denied_threads_are_taken(code: str) -> None:
    answer = probe(f"deny({getattr(errno, code)})")
    assert answer.startswith(f"threads True no io_uring here ({code}: ")


@pytest.mark.skipif(
    platform.machine() not in MACHINES, reason="a seccomp filter reads other words here"
)
@pytest.mark.parametrize("number", [425, 426, 427])
def test_a_ring_of_which_half_is_denied_is_not_taken(number: int) -> None:
    """One that can be made and not entered would never answer."""
    answer = probe(f"deny({errno.EPERM}, {number})")
    assert answer.startswith("threads True no io_uring here (EPERM: ")


@pytest.mark.skipif(
    platform.machine() not in MACHINES, reason="a seccomp filter reads other words here"
)
def test_conformance_where_io_uring_is_denied() -> None:
    """The suite passes with what is left, and skips io_uring with a sentence."""
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import pytest\n"
        "from tests.tiers.io.test_ladder import deny\n"
        f"deny({errno.EPERM})\n"
        "sys.exit(pytest.main(['-q', '-n', '0', '-p', 'no:cacheprovider', '-k',"
        " 'not child and not behaves and not share', '-rs', '--noconftest',"
        " '--hypothesis-profile', 'ci', 'tests/tiers/io/test_engines.py']))\n"
    )
    answer = run(program)
    assert "io_uring is not allowed here" in answer
    assert "passed" in answer


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody with fewer rights")
def test_little_locked_memory() -> None:
    """The ring works unregistered; kernels that count rings as locked memory give threads."""
    body = (
        "from flowkv.tiers.io.engine import Arena\n"
        "import numba\n"
        "open_engine().close()\n"  # so that everything is loaded while it may be read
        "numba.config.CACHE_DIR = '/'  # compiled code counts as kept\n"
        "arena = Arena(16 << 20)\n"
        "drop(1 << 20)"
    )
    answer = probe(body, "arena=arena)\nprint(getattr(engine, 'registered', None)")
    assert answer.split()[:2] in (["False", "io_uring"], ["None", "threads"])


def test_a_file_system_without_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told before files are opened, or found out with the first."""
    monkeypatch.setattr(opening, "aligned", lambda fd: False)
    engine = open_engine(directory=str(tmp_path))
    assert (engine.name, engine.direct) == ("buffered", False)
    assert engine.why == f"no O_DIRECT in {tmp_path}"
    assert engine.close()
    with rigged("threads") as rig:
        fd = rig.open(tmp_path / "file")
        assert (rig.engine.name, rig.engine.direct) == ("buffered", False)
        assert "no O_DIRECT for" in rig.engine.why
        assert rig.write(fd, 5, b"unaligned") == 9


@pytest.mark.parametrize("name", ["threads", "io_uring"])
def test_a_file_that_takes_no_direct_io(name: str) -> None:
    """A real one: of a file system that knows nothing but reads."""
    path = Path("/proc/version")
    if not path.exists():
        pytest.skip("there is no /proc here")
    with rigged(name) as rig:
        fd = rig.open(path, write=False)
        assert (rig.engine.direct, rig.engine.why) == (False, f"no O_DIRECT for {path}")
        result, data = rig.read(fd, 0, 1000)
        assert data[:result] == path.read_bytes()[:1000]


def test_a_refused_flag_means_no_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true = opening.set_flags

    def refuse(fd: int, flags: int) -> bool:
        if flags:
            raise OSError(errno.EINVAL, "no direct I/O here")
        return true(fd, flags)

    monkeypatch.setattr(opening, "set_flags", refuse)
    files = opening.DirectFiles(True)
    os.close(files.open(str(tmp_path / "file"), write=True))
    assert not files.direct
    assert not opening.allows_direct(str(tmp_path))


@pytest.mark.parametrize("name", ["threads", "io_uring"])
def test_memory_file_systems(name: str) -> None:
    """They may take O_DIRECT and then ask for no alignment at all."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        pytest.skip("there is no /dev/shm here")
    path = shared / f"flowkv-io-{os.getpid()}"
    with rigged(name) as rig:
        try:
            fd = rig.open(path)
            data = bytes(range(256)) * (BLOCK // 64)
            assert rig.write(fd, 0, data) == len(data)
            assert rig.read(fd, BLOCK, 8 * BLOCK)[0] == len(data) - BLOCK
            assert rig.read(fd, 0, len(data)) == (len(data), data)
        finally:
            path.unlink(missing_ok=True)


def test_a_thread_that_never_returns(tmp_path: Path) -> None:
    """Closing says so: the memory it may write to must not be used again."""
    (tmp_path / "file").write_bytes(bytes(BLOCK))
    begun, free = threading.Event(), threading.Event()
    engine = ThreadsEngine()
    with rigged("files") as made:
        rig = Rig(engine, made.arena)
        fd = engine.open(str(tmp_path / "file"), write=False)
        true = engine._read

        def stuck(*arguments: int) -> int:
            begun.set()
            free.wait(60)
            return true(*arguments)

        engine._read = stuck
        with made.slot(BLOCK) as slot:
            (tag,) = rig.submit((0, fd, 0, slot.address, BLOCK))
            assert begun.wait(30)
            assert not engine.close(0.05)
            assert rig.owed == 1
            free.set()
            assert engine.close()
            assert rig.finish(1) == {tag: BLOCK}
        os.close(fd)


def test_a_tier_without_io_uring_digests_by_compiled_code(tmp_path: Path) -> None:
    answer = run(
        "from flowkv.core import digest\n"
        "from flowkv.tiers.disk import DiskTier\n"
        "from flowkv.tiers import io\n"
        f"io.probe_ring = lambda: {errno.EPERM}\n"
        f"tier = DiskTier({str(tmp_path)!r}, 1 << 20)\n"
        "print(tier.engine, digest.compiled is not None)\n"
        "tier.close()\n"
    )
    assert answer.split() == ["threads", "True"]


@pytest.mark.parametrize("denied", [False, True])
def test_a_tier_opens_where_compiled_code_cannot_be_kept(tmp_path: Path, denied: bool) -> None:
    answer = run(
        "import os\n"
        "os.environ |= {'XDG_CACHE_HOME': '/dev/null', 'NUMBA_CACHE_DIR': ''}\n"
        "from flowkv.tiers.disk import DiskTier\n"
        "from flowkv.tiers import io\n"
        f"io.probe_ring = lambda: {errno.EPERM if denied else 0}\n"
        f"tier = DiskTier({str(tmp_path)!r}, 1 << 20)\n"
        "print(tier.engine)\n"
        "tier.close()\n"
        "import flowkv.tiers.digest\n"
    )
    assert answer.split() == ["threads"]


@pytest.mark.parametrize("code", ["EPERM", "ENOSYS", "ENOMEM", "EMFILE"])
def test_reasons_are_sentences(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers_io, "probe_ring", lambda: getattr(errno, code))
    engine = open_engine()
    assert engine.why.startswith(f"no io_uring here ({code}")
    assert engine.close()
