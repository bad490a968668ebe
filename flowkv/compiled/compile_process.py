"""Compilation in a separate process: of lowest priority, one at a time, and ended with its owner.

    python -m flowkv.compiled.compile_process LOCK MODULE TEXT

calls `main(TEXT)` of a module once it holds a file's lock, and ends with its standard input.
"""

from __future__ import annotations

import atexit
import fcntl
import importlib
import logging
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

_log = logging.getLogger("flowkv")
_RUNNING: list[subprocess.Popen[bytes]] = []


def begin(lock: Path, module: str, text: str) -> subprocess.Popen[bytes] | None:
    """Start a process that compiles, and ends with this one at the latest.

    Args:
        lock: File of a lock, shared by the processes that fill the same directory.
        module: Module with the `main` to be called.
        text: Argument of `main`.

    Returns:
        The process; None where none can be started.
    """
    try:
        process = subprocess.Popen(
            [sys.executable or "", "-m", __name__, str(lock), module, text],
            start_new_session=True,
            stdin=subprocess.PIPE,  # closed by the system when this process is gone
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except OSError:
        return None
    _RUNNING.append(process)
    _log.info("another process compiles ahead of its use: %s", module)
    return process


def end() -> None:
    """End the processes that still compile; the next process continues their work."""
    with suppress(IndexError):  # another thread may have ended the last one
        while True:
            with _RUNNING.pop() as process:
                process.terminate()


def _forget() -> None:
    """Forget the processes in a forked child: they are its parent's, and end with it."""
    for process in _RUNNING:
        assert process.stdin is not None
        process.stdin.close()
        process.returncode = 0  # no exit status to wait for
    _RUNNING.clear()


atexit.register(end)
os.register_at_fork(after_in_child=_forget)


def _follow() -> None:
    os.read(0, 1)  # the input ends with the owner
    os._exit(1)


def _serve(lock: str, module: str, text: str) -> None:
    threading.Thread(target=_follow, daemon=True).start()
    os.nice(19)
    with suppress(OSError):  # without a lock, two may do the same work
        fcntl.flock(os.open(lock, os.O_RDWR | os.O_CREAT, 0o600), fcntl.LOCK_EX)
    importlib.import_module(module).main(text)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
