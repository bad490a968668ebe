"""Threads for the CPU kernels: a counter that everyone draws slices from, the caller included.

numba's own threading layers are avoided on purpose: they are neither thread-safe everywhere nor
fork-safe, and they split work evenly, however unevenly a busy machine runs it. Where torch computes
with GNU's OpenMP, what must be quick takes torch's own threads, which wait for work already.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

import torch

SLICES_PER_THREAD = 4
"""Slices are drawn, not dealt: a core that is busy elsewhere takes fewer of them."""

_lock = Lock()
_pool: ThreadPoolExecutor | None = None
_size = 0
_team: int | None = None


def slices(work: int, least: int) -> int:
    """Into how many slices to cut `work`, none much smaller than `least`; 1 means inline."""
    if work < 2 * least:
        return 1
    threads = torch.get_num_threads()
    return 1 if threads == 1 else min(threads * SLICES_PER_THREAD, work // least)


def team() -> int:
    """The address of OpenMP's `GOMP_parallel`; 0 where there is none, or none of this process."""
    global _team  # noqa: PLW0603 - found once
    if _team is None:
        found = getattr(ctypes.CDLL(None), "GOMP_parallel", None) if os.name == "posix" else None
        _team = ctypes.cast(found, ctypes.c_void_p).value or 0 if found is not None else 0
    return _team


def spread(run: Callable[[int], object], count: int) -> None:
    """Call `run(i)` for each i < count, on this thread and on helpers; return when all are done."""
    draw = itertools.count()

    def drain() -> None:
        while (i := next(draw)) < count:
            run(i)

    helpers = min(torch.get_num_threads(), count) - 1
    futures = [_executor(helpers).submit(drain) for _ in range(helpers)]
    try:
        drain()
    finally:
        for future in futures:  # one that never started finds nothing left to do
            if not future.cancel():
                future.result()


def _executor(size: int) -> ThreadPoolExecutor:
    global _pool, _size
    with _lock:
        if _pool is None or _size < size:
            if _pool is not None:
                _pool.shutdown(wait=False)  # its running slices finish
            _pool, _size = ThreadPoolExecutor(size, "flowkv-kernels"), size
        return _pool


def _forget() -> None:
    global _lock, _pool, _size, _team  # threads do not survive a fork
    _lock, _pool, _size, _team = Lock(), None, 0, 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
