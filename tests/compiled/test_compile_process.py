"""Compiling in a process of its own: one at a time, and none left behind by its owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.inside import compile_process

PAUSE = """
import pathlib, sys, time
def main(text):
    place = pathlib.Path(text)
    (place / "process").write_text(str(__import__("os").getpid()))
    (place / "process").rename(place / "begun")  # whole at once
    while not (place / "go").exists():
        time.sleep(0.02)
    (place / "done").touch()
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module whose `main` waits for a file."""
    (tmp_path / "pausing.py").write_text(PAUSE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    return "pausing"


def place(tmp_path: Path, name: str) -> Path:
    (tmp_path / name).mkdir()
    return tmp_path / name


def until(done: Callable[[], object]) -> None:
    """Wait for something another process does."""
    for _ in range(3000):
        if done():
            return
        time.sleep(0.02)
    raise AssertionError("it did not happen")


def gone(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_one_at_a_time_holds_the_lock(tmp_path: Path, module: str) -> None:
    lock, first, second = tmp_path / "lock", place(tmp_path, "a"), place(tmp_path, "b")
    one = compile_process.begin(lock, module, str(first))
    until((first / "begun").exists)
    two = compile_process.begin(lock, module, str(second))
    until(lambda: "-> FLOCK" in Path("/proc/locks").read_text() or second.exists())
    time.sleep(0.3)
    assert not (second / "begun").exists(), "the first one holds the lock"
    (first / "go").touch()
    assert one.wait() == 0
    until((second / "begun").exists)
    assert (first / "done").exists() and os.getpriority(os.PRIO_PROCESS, two.pid) == 19
    compile_process.end()
    assert two.returncode == -signal.SIGTERM and not compile_process._RUNNING


@pytest.mark.parametrize("how", ["killed", "ends"])
def test_it_ends_with_its_owner(tmp_path: Path, module: str, how: str) -> None:
    work = place(tmp_path, "a")
    code = (
        "import pathlib, sys, time; from flowkv.compiled import compile_process\n"
        f"compile_process.begin(pathlib.Path({str(tmp_path / 'lock')!r}), 'pausing', sys.argv[1])\n"
        "while not (pathlib.Path(sys.argv[1]) / 'begun').exists(): time.sleep(0.02)\n"
        f"time.sleep({60 if how == 'killed' else 0})\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(work)]) as owner:
        until((work / "begun").exists)
        process = int((work / "begun").read_text())
        if how == "killed":
            owner.kill()
        owner.wait()
    until(lambda: gone(process))
    assert not (work / "done").exists()


def test_a_crash_is_told_and_no_process_is_none(
    tmp_path: Path, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compile_process.begin(tmp_path / "lock", "no.such.module", "").wait() != 0
    work = place(tmp_path, "a")
    (work / "go").touch()
    unlocked = compile_process.begin(tmp_path / "no" / "directory", module, str(work))
    assert unlocked.wait() == 0, "without a lock it works all the same"
    monkeypatch.setattr(sys, "executable", "")
    assert compile_process.begin(tmp_path / "lock", module, "") is None
    compile_process.end()
