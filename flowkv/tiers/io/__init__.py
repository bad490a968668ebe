"""File I/O: staging memory, and engines that read and write in batches."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING

from flowkv.tiers.io.engine import Arena, ThreadsEngine, allows_direct, reason_of

if TYPE_CHECKING:
    from flowkv.tiers.io.uring import UringEngine

SPARE = 16
"""Number of files that a tier may want to open: locks, journal, and slab files of a few sizes."""
_CAUSES = {
    errno.EPERM: "forbidden by a seccomp filter or kernel.io_uring_disabled",
    errno.ENOSYS: "the kernel has none, or an old one",
    errno.ENOMEM: "beyond the limit of locked memory, `ulimit -l`",
}


def open_engine(
    arena: Arena | None = None, directory: str | None = None
) -> UringEngine | ThreadsEngine:
    """Open the best engine: io_uring, threads with O_DIRECT, or threads through the page cache.

    Its `name` is the kind taken, and `why` the reason against a better one. The code of io_uring is
    loaded only where a ring can be made.

    Args:
        arena: Memory that most operations will use, which io_uring may register.
        directory: Directory of the files: without O_DIRECT there, "buffered" is taken.

    Raises:
        OSError: The directory cannot be written to.
    """
    if directory is not None and not allows_direct(directory):
        return _threads(f"no O_DIRECT in {directory}", direct=False)
    if code := probe_ring():
        return _threads(_no_ring(OSError(code, os.strerror(code))))
    from flowkv.compiled.machine_code import is_kept  # imported here, because it imports numba

    if not is_kept(Path(__file__).parent):  # else every process compiles for seconds
        why = "compiled code cannot be kept: set XDG_CACHE_HOME to a directory of this user"
        return _threads(f"no io_uring here ({why})")
    from flowkv.tiers.io.uring import UringEngine

    try:
        ring = UringEngine(arena=arena)
    except OSError as error:
        return _threads(_no_ring(error))
    if not _files_left():
        ring.close()
        return _threads("io_uring needs more files than `ulimit -n` allows still")
    return ring


def _threads(why: str, *, direct: bool = True) -> ThreadsEngine:
    engine = ThreadsEngine(direct=direct, why=why)
    engine.start()  # at the end of the process no thread can be started
    return engine


def _no_ring(error: OSError) -> str:
    """Return a description of an error of io_uring, with its likely cause."""
    cause = _CAUSES.get(error.errno or 0)
    return f"no io_uring here ({': '.join(filter(None, (reason_of(error), cause)))})"


def probe_ring() -> int:
    """Return the errno with which a ring is denied, or 0."""
    call = ctypes.CDLL(None, use_errno=True).syscall
    parameters = ctypes.create_string_buffer(120)  # struct io_uring_params
    fd = call(425, 1, parameters)  # io_uring_setup
    if fd < 0:
        return ctypes.get_errno()
    os.close(fd)
    return 0


def _files_left() -> bool:
    """Return whether as many files may still be opened as a tier wants."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        return most == resource.RLIM_INFINITY or most - len(os.listdir("/proc/self/fd")) >= SPARE
    except OSError as error:
        # without /proc they cannot be counted
        return error.errno not in (errno.EMFILE, errno.ENFILE)
