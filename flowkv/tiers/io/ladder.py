"""Picks the engine: the best one that this machine allows."""

from __future__ import annotations

import errno
import os
import resource
from typing import Literal

from flowkv.core.errors import ConfigError
from flowkv.tiers.io.opening import allows_direct
from flowkv.tiers.io.staging import Arena
from flowkv.tiers.io.threads import ThreadsEngine
from flowkv.tiers.io.uring import UringEngine

Rung = Literal["io_uring", "threads", "buffered"]
RUNGS: tuple[Rung, ...] = ("io_uring", "threads", "buffered")
SPARE = 16
"""Files that a tier may want to open: locks, journal, and slab files of a few sizes."""


def open_engine(
    prefer: Rung | None = None,
    *,
    direct: bool = True,
    arena: Arena | None = None,
    directory: str | None = None,
) -> UringEngine | ThreadsEngine:
    """Opens an engine; where one is not allowed the next rung is taken.

    The rungs are io_uring, threads with O_DIRECT, and threads through the page cache. `name` says
    which was taken, and `why` what was wrong with a better one.

    Args:
        prefer: The first rung to try; default the first of all.
        direct: Open files with O_DIRECT. False takes "buffered", whatever is preferred.
        arena: Memory that most operations will use, which io_uring may register.
        directory: Where the files will lie: without O_DIRECT there, "buffered" is taken.

    Raises:
        ConfigError: No such rung.
        OSError: The directory cannot be written to.
    """
    if prefer not in (None, *RUNGS):
        raise ConfigError(f"engine {prefer!r}", f"Use one of {', '.join(RUNGS)}")
    if not direct or prefer == "buffered":
        return ThreadsEngine(direct=False)
    if directory is not None and not allows_direct(directory):
        return ThreadsEngine(direct=False, why=f"no O_DIRECT in {directory}")
    if prefer == "threads":
        return ThreadsEngine()
    try:
        ring = UringEngine(arena=arena)
    except OSError as error:
        return ThreadsEngine(why=f"no io_uring here ({reason_of(error)})")
    if _files_left():
        return ring
    ring.close()
    return ThreadsEngine(why="io_uring takes files, of which few may be open still, `ulimit -n`")


def _files_left() -> bool:
    """Whether as many files may be opened still as a tier wants."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        return most == resource.RLIM_INFINITY or most - len(os.listdir("/proc/self/fd")) >= SPARE
    except OSError as error:
        return error.errno not in (errno.EMFILE, errno.ENFILE)  # nobody counts them without /proc


def reason_of(error: OSError) -> str:
    """What the system's name for an error means to whoever wants io_uring."""
    name = errno.errorcode.get(error.errno or 0, "EIO")
    if error.errno == errno.EPERM:
        return f"{name}: forbidden by a seccomp filter or kernel.io_uring_disabled"
    if error.errno == errno.ENOSYS:
        return f"{name}: the kernel has none, or an old one"
    if error.errno == errno.ENOMEM:
        return f"{name}: beyond the limit of locked memory, `ulimit -l`"
    return name
