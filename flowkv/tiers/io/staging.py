"""Staging memory: one mapping that disks, networks and GPUs move bytes into and out of.

One arena is registered once with whoever wants that (CUDA, io_uring, RDMA), and every transfer uses
a slot of it, so that nothing is copied on the way. A slot whose operation is overdue is *retired*:
a tag cannot stop a DMA or a receive, so the memory is given to nobody else until the engine has
reported the completion (DESIGN D10).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from bisect import bisect

import numpy as np

from flowkv.core.errors import ConfigError, StateError


class Extents:
    """Free pages of a range: extents in order, the first that is large enough is taken.

    Args:
        pages: Their number.

    Attributes:
        free_pages: How many are free.
    """

    def __init__(self, pages: int) -> None:
        self.free_pages = pages
        self._firsts, self._counts = [0], [pages]

    def take(self, pages: int) -> int | None:
        """The first of so many neighbouring pages, or None where there are not as many."""
        for at, count in enumerate(self._counts):
            if count >= pages:
                first = self._firsts[at]
                self._firsts[at], self._counts[at] = first + pages, count - pages
                if count == pages:
                    del self._firsts[at], self._counts[at]
                self.free_pages -= pages
                return first
        return None

    def give_back(self, first: int, pages: int) -> None:
        """Frees pages; neighbours that are free become one extent."""
        self.free_pages += pages
        at = bisect(self._firsts, first)
        if at < len(self._firsts) and self._firsts[at] == first + pages:
            pages += self._counts.pop(at)
            del self._firsts[at]
        if at and self._firsts[at - 1] + self._counts[at - 1] == first:
            self._counts[at - 1] += pages
        else:
            self._firsts.insert(at, first)
            self._counts.insert(at, pages)


PAGE_BYTES = 4096
_HUGE_BYTES = 2 << 20

_kept: list[mmap.mmap] = []  # mappings that somebody may still write to: never unmapped


class ArenaSlot:
    """A piece of an arena.

    Attributes:
        arena: The arena.
        address: Where it begins, a multiple of 4096.
        n_bytes: As many as were asked for.
        view: Them.
    """

    __slots__ = ("_state", "address", "arena", "n_bytes", "view")

    def __init__(self, arena: Arena, address: int, view: memoryview) -> None:
        self.arena, self.address, self.view, self.n_bytes = arena, address, view, len(view)
        self._state = "taken"

    def __repr__(self) -> str:
        return f"Slot({self.address:#x}, {self.n_bytes} bytes, {self._state})"

    @property
    def retired(self) -> bool:
        """Whether its operation is overdue."""
        return self._state == "retired"

    @property
    def _pages(self) -> int:
        """What it occupies."""
        return max(1, -(-self.n_bytes // PAGE_BYTES))


class Arena:
    """An anonymous mapping cut into slots. Thread-safe.

    Args:
        n_bytes: Its size, rounded up to 4096. Memory is committed as it is first touched, in huge
            pages where the system has them: fewer page table entries for every device that reads
            it.

    Attributes:
        address: Where it begins; a multiple of 2 MiB.
        n_bytes: Its size.
        view: All of it.
        most_retired_bytes: A quarter; beyond so many retired bytes it is `clogged`.

    Raises:
        ConfigError: The size is not positive.
    """

    def __init__(self, n_bytes: int) -> None:
        if n_bytes <= 0:
            raise ConfigError(f"an arena of {n_bytes} bytes", "Give it at least 4096 bytes")
        self.n_bytes = -(-n_bytes // PAGE_BYTES) * PAGE_BYTES
        self._map: mmap.mmap | None = mmap.mmap(
            -1, self.n_bytes + _HUGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        whole = memoryview(self._map)
        skip = -address_of(whole) % _HUGE_BYTES
        self.view = whole[skip : skip + self.n_bytes]
        self.address = address_of(self.view)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages: small ones do
                self._map.madvise(mmap.MADV_HUGEPAGE, skip, self.n_bytes)
        self._lock = threading.Lock()
        self._extents = Extents(self.n_bytes // PAGE_BYTES)
        self.most_retired_bytes, self._retired_bytes = self.n_bytes // 4, 0

    @property
    def retired_bytes(self) -> int:
        """Bytes of slots whose operation is overdue."""
        return self._retired_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes in no slot; not all of them may lie side by side."""
        return self._extents.free_pages * PAGE_BYTES

    @property
    def clogged(self) -> bool:
        """Whether so much is retired that its engine should be left alone: open the breaker."""
        return self._retired_bytes > self.most_retired_bytes

    def take(self, n_bytes: int) -> ArenaSlot | None:
        """A slot of at least `n_bytes`, with whatever was there before; None if there is no room.

        Raises:
            StateError: The arena is closed.
        """
        with self._lock:
            if self._map is None:
                raise StateError("the staging arena is closed", "Make another one")
            first = self._extents.take(max(1, -(-n_bytes // PAGE_BYTES)))
            if first is None:
                return None
            start = first * PAGE_BYTES
            return ArenaSlot(self, self.address + start, self.view[start : start + n_bytes])

    def give_back(self, slot: ArenaSlot) -> None:
        """Frees a slot that nothing moves bytes into or out of.

        Raises:
            StateError: It is not taken.
        """
        with self._lock:
            self._become(slot, "taken", "free")
            self._free(slot)

    def retire(self, slot: ArenaSlot) -> None:
        """Keeps a slot from being used until `revive`: its operation is overdue.

        Raises:
            StateError: It is not taken.
        """
        with self._lock:
            self._become(slot, "taken", "retired")
            self._retired_bytes += slot._pages * PAGE_BYTES

    def revive(self, slot: ArenaSlot) -> None:
        """Frees a retired slot: its operation has ended after all.

        Raises:
            StateError: It is not retired.
        """
        with self._lock:
            self._become(slot, "retired", "free")
            self._retired_bytes -= slot._pages * PAGE_BYTES
            self._free(slot)

    def close(self) -> None:
        """Gives the memory back to the system, unless a retired slot may still be written to.

        Memory that somebody holds a view of stays until that is gone.
        """
        with self._lock:
            mapping, self._map = self._map, None
            if mapping is None:
                return
            self.view, self.n_bytes = memoryview(b""), 0
            if self._retired_bytes:
                _kept.append(mapping)
                return
        with contextlib.suppress(BufferError):  # the last view unmaps it
            mapping.close()

    def _become(self, slot: ArenaSlot, before: str, after: str) -> None:
        if slot.arena is not self or slot._state != before or self._map is None:
            raise StateError(f"{slot!r} is not {before}", "Give back what was taken, once")
        slot._state = after

    def _free(self, slot: ArenaSlot) -> None:
        self._extents.give_back((slot.address - self.address) // PAGE_BYTES, slot._pages)


def address_of(view: memoryview) -> int:
    """Where the bytes of a contiguous view lie."""
    if view.nbytes and not view.readonly:
        return ctypes.addressof(ctypes.c_char.from_buffer(view))
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])
