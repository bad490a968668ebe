"""Private memory in the form that disks, copies and devices reach fastest."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import threading
from collections.abc import Iterable
from itertools import repeat
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

HUGE_BYTES = 2 << 20


def own_memory(n_bytes: int) -> memoryview:
    """Return zeros; the system commits each page of them when it is first written to.

    From 2 MiB on they begin at a multiple of 2 MiB, smaller ones at a memory page. Full multiples
    of 2 MiB are in huge pages where the system has them: fewer page faults, and fewer pieces for
    every device that reads or writes them. A file that bypasses the page cache came 2.6 times as
    fast into huge pages as into small ones.

    Raises:
        OSError: The process cannot have so much; `MemoryError` where the system reports it so.
    """
    # The mapping is private, or the kernel gives no huge pages.
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if n_bytes < HUGE_BYTES:
        return memoryview(mmap.mmap(-1, max(n_bytes, 1), kind))[:n_bytes]
    mapped = mmap.mmap(-1, n_bytes + HUGE_BYTES, kind)
    skip = -address_of(memoryview(mapped)) % HUGE_BYTES
    with contextlib.suppress(OSError):  # a kernel without huge pages: small ones must do
        mapped.madvise(mmap.MADV_HUGEPAGE, skip, n_bytes // HUGE_BYTES * HUGE_BYTES)
    return memoryview(mapped)[skip : skip + n_bytes]


_TOUCH_BYTES = 1 << 21
"""Bytes touched by one call, during which no other thread can change the process's mappings."""
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14


def populate(address: int, n_bytes: int) -> None:
    """Commit memory as if it were written, without changing it; others may write meanwhile.

    The system clears memory when it is written for the first time, and in a virtual machine the
    host provides it only then: up to 2.5 ms for each MiB.
    """
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    stop = address + n_bytes
    for at in range(address, stop, _TOUCH_BYTES):
        if advise(at, min(_TOUCH_BYTES, stop - at), _POPULATE_WRITE):
            return  # an older system, or no memory is left


class Scratch(threading.local):
    """Memory of a thread for results that do not last: new memory would cost as much as its use."""

    def array(self, name: str, dtype: Any, *shape: int) -> NDArray[Any]:
        """Return memory with undefined content, the same for each call with this name."""
        size, own = math.prod(shape), getattr(self, name, None)
        if own is None or own.size < size:
            own = np.empty(size, dtype)
            setattr(self, name, own)
        return own[:size].reshape(shape)


def address_of(view: memoryview) -> int:
    """Return the address of the bytes of a contiguous view."""
    if view.nbytes and not view.readonly:
        return ctypes.addressof(ctypes.c_char.from_buffer(view))
    return addresses_of([view])[0]


def addresses_of(views: Iterable[bytes | memoryview]) -> list[int]:
    """Return the addresses of the bytes of contiguous views."""
    arrays = map(np.frombuffer, views, repeat(np.uint8))
    found = map(itemgetter("data"), map(attrgetter("__array_interface__"), arrays))
    return [*map(itemgetter(0), found)]
