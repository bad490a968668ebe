"""Staging memory: one mapping that disks, networks and GPUs move bytes into and out of.

One arena is registered once with whoever wants that (CUDA, io_uring, RDMA), and every transfer uses
a slot of it, so that nothing is copied on the way. A slot whose operation is overdue is *retired*:
a tag cannot stop a DMA or a receive, so the memory is given to nobody else until the engine has
reported the completion (DESIGN D10).
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import threading

import numpy as np

from flowkv.core.errors import ConfigError, StateError

# Free extents of an arena: two-level segregated fit, in constant time.
#
# After Masmano et al., "TLSF: a new dynamic memory allocator for real-time systems" (ECRTS 2004):
# free extents are binned by size, eight bins to a power of two; a request takes an extent of the
# first bin whose extents all suffice, gives back what is left over, and freed neighbours are merged
# at once.

_BITS = 3  # eight bins to a power of two
_TRIES = 8  # extents of a request's own bin that are looked at where no larger bin has any


class Extents:
    """Free pages of a range.

    Args:
        pages: Their number.

    Attributes:
        free_pages: How many are free.
    """

    def __init__(self, pages: int) -> None:
        self.free_pages = 0
        self._sizes: dict[int, int] = {}  # by first page
        self._starts: dict[int, int] = {}  # by the page behind the last
        self._bins: dict[int, dict[int, None]] = {}
        self._filled = 0  # bit i: bin i has extents
        self._add(0, pages)

    def take(self, pages: int) -> int | None:
        """The first of so many neighbouring pages, or None where there are not as many."""
        first = self._find(pages)
        if first is None:
            return None
        size = self._remove(first)
        if size > pages:
            self._add(first + pages, size - pages)
        return first

    def give_back(self, first: int, pages: int) -> None:
        """Frees pages."""
        before = self._starts.get(first)
        if before is not None:
            pages += self._remove(before)
            first = before
        if first + pages in self._sizes:
            pages += self._remove(first + pages)
        self._add(first, pages)

    def _find(self, pages: int) -> int | None:
        own = _bin(pages)
        least = own if _least(own) >= pages else own + 1
        larger = self._filled >> least
        if larger:
            enough = self._bins[least + (larger & -larger).bit_length() - 1]
            return next(reversed(enough))
        for first, _ in zip(reversed(self._bins.get(own, {})), range(_TRIES), strict=False):
            if self._sizes[first] >= pages:
                return first
        return None

    def _add(self, first: int, pages: int) -> None:
        number = _bin(pages)
        self._sizes[first] = pages
        self._starts[first + pages] = first
        self._bins.setdefault(number, {})[first] = None
        self._filled |= 1 << number
        self.free_pages += pages

    def _remove(self, first: int) -> int:
        pages = self._sizes.pop(first)
        del self._starts[first + pages]
        number = _bin(pages)
        extents = self._bins[number]
        del extents[first]
        if not extents:
            self._filled &= ~(1 << number)
        self.free_pages -= pages
        return pages


def _bin(pages: int) -> int:
    """The bin of extents of a size."""
    if pages < 1 << _BITS:
        return pages
    power = pages.bit_length() - 1 - _BITS
    return (power + 1 << _BITS) + (pages >> power) - (1 << _BITS)


def _least(number: int) -> int:
    """The smallest size of a bin."""
    if number < 1 << _BITS:
        return number
    power, step = divmod(number, 1 << _BITS)
    return (1 << _BITS) + step << power - 1


PAGE_BYTES = 4096
_HUGE_BYTES = 2 << 20
_MBIND = {"x86_64": 237, "aarch64": 235}
_BIND = 2  # MPOL_BIND
_NODES = 1024  # bits of a node mask

_kept: list[mmap.mmap] = []  # mappings that somebody may still write to: never unmapped


class ArenaSlot:
    """A piece of an arena.

    Attributes:
        address: Where it begins, a multiple of 4096.
        n_bytes: As many as were asked for.
        view: Them.
    """

    __slots__ = ("_state", "address", "n_bytes", "view")

    def __init__(self, address: int, view: memoryview) -> None:
        self.address, self.view, self.n_bytes = address, view, len(view)
        self._state = "taken"

    def __repr__(self) -> str:
        return f"Slot({self.address:#x}, {self.n_bytes} bytes, {self._state})"


class Arena:
    """An anonymous mapping cut into slots. Thread-safe.

    Args:
        n_bytes: Its size, rounded up to 4096. Memory is committed as it is first touched.
        numa_node: Bind it to a NUMA node, which is also how CXL memory appears; default anywhere.
        huge: Ask for huge pages: fewer page table entries for every device that reads it.
        most_retired_bytes: Beyond so many retired bytes it is `clogged`; default a quarter.

    Attributes:
        address: Where it begins; a multiple of 2 MiB.
        n_bytes: Its size.
        view: All of it.

    Raises:
        ConfigError: The size is not positive, or there is no such node.
    """

    def __init__(
        self,
        n_bytes: int,
        *,
        numa_node: int | None = None,
        huge: bool = True,
        most_retired_bytes: int | None = None,
    ) -> None:
        if n_bytes <= 0:
            raise ConfigError(f"an arena of {n_bytes} bytes", "Give it at least 4096 bytes")
        self.n_bytes = -(-n_bytes // PAGE_BYTES) * PAGE_BYTES
        self.most_retired_bytes = (
            self.n_bytes // 4 if most_retired_bytes is None else most_retired_bytes
        )
        self._map: mmap.mmap | None = mmap.mmap(
            -1, self.n_bytes + _HUGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        whole = memoryview(self._map)
        skip = -address_of(whole) % _HUGE_BYTES
        self.view = whole[skip : skip + self.n_bytes]
        self.address = address_of(self.view)
        if huge and hasattr(mmap, "MADV_HUGEPAGE"):
            self._advise(skip)
        if numa_node is not None:
            _bind(self.address, self.n_bytes, numa_node)
        self._lock = threading.Lock()
        self._extents = Extents(self.n_bytes // PAGE_BYTES)
        self._owner = np.full(self.n_bytes // PAGE_BYTES, -1, np.int32)  # first page of its slot
        self._slots: dict[int, ArenaSlot] = {}
        self._retired_bytes = 0

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
        pages = max(1, -(-n_bytes // PAGE_BYTES))
        with self._lock:
            if self._map is None:
                raise StateError("the staging arena is closed", "Make another one")
            first = self._extents.take(pages)
            if first is None:
                return None
            self._owner[first : first + pages] = first
            start = first * PAGE_BYTES
            slot = ArenaSlot(self.address + start, self.view[start : start + n_bytes])
            self._slots[first] = slot
            return slot

    def give_back(self, slot: ArenaSlot) -> None:
        """Frees a slot that nothing moves bytes into or out of.

        Raises:
            StateError: It is not taken.
        """
        with self._lock:
            self._expect(slot, "taken")
            self._free(slot)

    def retire(self, slot: ArenaSlot) -> None:
        """Keeps a slot from being used until `revive`: its operation is overdue.

        Raises:
            StateError: It is not taken.
        """
        with self._lock:
            self._expect(slot, "taken")
            slot._state = "retired"
            self._retired_bytes += _bytes(slot)

    def revive(self, slot: ArenaSlot) -> None:
        """Frees a retired slot: its operation has ended after all.

        Raises:
            StateError: It is not retired.
        """
        with self._lock:
            self._expect(slot, "retired")
            self._retired_bytes -= _bytes(slot)
            self._free(slot)

    def slot_of(self, view: memoryview) -> ArenaSlot | None:
        """The taken slot in which all of some memory lies, if there is one."""
        if not view.nbytes or not view.contiguous:
            return None
        start = address_of(view) - self.address
        with self._lock:
            if not 0 <= start < self.n_bytes:
                return None
            slot = self._slots.get(int(self._owner[start // PAGE_BYTES]))
        inside = slot and start + view.nbytes <= slot.address - self.address + slot.n_bytes
        return slot if inside and slot and slot._state == "taken" else None

    def close(self) -> None:
        """Gives the memory back to the system, unless a retired slot may still be written to.

        Memory that somebody holds a view of stays until that is gone.
        """
        with self._lock:
            mapping, self._map = self._map, None
            if mapping is None:
                return
            if self._retired_bytes:
                _kept.append(mapping)
            self.view = memoryview(b"")
            self._slots.clear()
            self._owner = self._owner[:0]
            self.n_bytes = 0
        if mapping not in _kept:
            try:
                mapping.close()
            except BufferError:
                return  # the last view unmaps it

    def _expect(self, slot: ArenaSlot, state: str) -> None:
        first = (slot.address - self.address) // PAGE_BYTES
        if self._slots.get(first) is not slot or slot._state != state:
            raise StateError(f"{slot!r} is not {state}", "Give back what was taken, once")

    def _free(self, slot: ArenaSlot) -> None:
        first, pages = (slot.address - self.address) // PAGE_BYTES, _bytes(slot) // PAGE_BYTES
        del self._slots[first]
        self._owner[first : first + pages] = -1
        self._extents.give_back(first, pages)
        slot._state = "free"

    def _advise(self, skip: int) -> None:
        try:
            if self._map is not None:
                self._map.madvise(mmap.MADV_HUGEPAGE, skip, self.n_bytes)
        except OSError:
            return  # a kernel without huge pages: small ones do


def address_of(view: memoryview) -> int:
    """Where the bytes of a contiguous view lie."""
    if view.nbytes and not view.readonly:
        return ctypes.addressof(ctypes.c_char.from_buffer(view))
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


def _bytes(slot: ArenaSlot) -> int:
    """What a slot occupies."""
    return max(1, -(-slot.n_bytes // PAGE_BYTES)) * PAGE_BYTES


def _bind(address: int, n_bytes: int, node: int) -> None:
    number = _MBIND.get(platform.machine())
    mask = (ctypes.c_ulong * (_NODES // (8 * ctypes.sizeof(ctypes.c_ulong))))()
    width = 8 * ctypes.sizeof(ctypes.c_ulong)
    if number is not None and 0 <= node < _NODES:
        mask[node // width] = 1 << node % width
        call = ctypes.CDLL(None, use_errno=True).syscall
        call.argtypes = [ctypes.c_long] * 7
        if not call(number, address, n_bytes, _BIND, ctypes.addressof(mask), _NODES, 0):
            return
    raise ConfigError(
        f"memory cannot be bound to NUMA node {node}",
        "Pass a node that `ls /sys/devices/system/node` shows, or none",
    )
