"""File I/O: staging memory, and engines that read and write in batches."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from flowkv.tiers.io.engine import Arena, IOEngine, ThreadsEngine, allows_direct, reason_of_ring


def open_best(arena: Arena, directory: str) -> IOEngine:
    """Return the best engine for a directory, as `uring.open_engine`; load that only for a ring.

    Raises:
        OSError: The directory cannot be written to.
    """
    if not allows_direct(directory):
        return _threads(f"no O_DIRECT in {directory}", direct=False)
    if code := _probe_ring():
        why = reason_of_ring(OSError(code, os.strerror(code)))
        return _threads(f"no io_uring here ({why})")
    from flowkv.compiled.machine_code import is_kept  # imported here, because it imports numba

    if not is_kept(Path(__file__).parent):  # else every process compiles for seconds
        why = "compiled code cannot be kept: set XDG_CACHE_HOME to a directory of this user"
        return _threads(f"no io_uring here ({why})")
    from flowkv.tiers.io.uring import open_engine

    return open_engine(arena=arena, directory=directory)


def _threads(why: str, *, direct: bool = True) -> ThreadsEngine:
    engine = ThreadsEngine(direct=direct, why=why)
    engine.start()  # at the end of the process no thread can be started
    return engine


def _probe_ring() -> int:
    """Return the errno with which a ring is denied, or 0."""
    call = ctypes.CDLL(None, use_errno=True).syscall
    parameters = ctypes.create_string_buffer(120)  # struct io_uring_params
    fd = call(425, 1, parameters)  # io_uring_setup
    if fd < 0:
        return ctypes.get_errno()
    os.close(fd)
    return 0
