"""Compiling in a process of its own: of lowest priority, one at a time, and ended with its owner.

    python -m flowkv.core.compile_process LOCK OWNER MODULE TEXT

calls `main(TEXT)` of a module, once it holds the lock that is named by a file.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import importlib
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_RUNNING: list[tuple[int, subprocess.Popen[bytes]]] = []  # with the process that began them


def begin(lock: Path, module: str, text: str) -> subprocess.Popen[bytes] | None:
    """Begin a process that compiles. It ends with the thread that calls this, at the latest.

    Args:
        lock: File of a lock, which those that fill the same directory have in common.
        module: Whose `main` is called.
        text: Its argument.

    Returns:
        The process; None where none can be begun.
    """
    owner = os.getpid()
    command = [sys.executable or "", "-m", __name__, str(lock), str(owner), module, text]
    try:
        process = subprocess.Popen(
            command,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except OSError:
        return None
    _RUNNING.append((owner, process))
    return process


def end() -> None:
    """End what still compiles: the next process goes on."""
    for owner, process in _RUNNING:
        if owner == os.getpid():  # a child of `fork` has processes of its own
            process.terminate()
            process.wait()
    _RUNNING.clear()


atexit.register(end)


def _serve(lock: str, owner: str, module: str, text: str) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(owner):  # which ended before
        return
    os.nice(19)
    with suppress(OSError):  # without a lock, two may do the same work
        fcntl.flock(os.open(lock, os.O_RDWR | os.O_CREAT, 0o600), fcntl.LOCK_EX)
    importlib.import_module(module).main(text)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
