"""Slots of host memory for frames, which a device can read and write directly."""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from operator import attrgetter
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowkv.core.memory import address_of, own_memory, populate
from flowkv.core.reaper import begin
from flowkv.tiers.io.engine import PAGE_BYTES, Extents

Bytes = NDArray[np.uint8]

CHUNK_BYTES = 256 << 20
"""Bytes of memory that are registered with a device in one call."""
AHEAD_BYTES = 2 << 30
"""Bytes that are registered before they are needed: registering takes as long as writing."""


class SlotPool:
    """Pool of slots in host memory; a slot is free once no array refers to its bytes. Thread-safe.

    Memory for a device comes in chunks, each registered with the device before its first slot is
    given out. A thread makes chunks ahead of their use. Without a device all memory is one chunk.

    Args:
        n_bytes: Most bytes of all chunks.

    Attributes:
        why: The reason for which the device does not reach the memory; "" where it does.
        kept_bytes: Bytes of taken slots that the slot's owner counts as its own.
    """

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes, self.why, self.kept_bytes = n_bytes, "", 0
        self._pin: Callable[[int, int], str] | None = None
        self._unpin: Callable[[int], None] | None = None
        self._chunks: list[_Chunk] = []  # by address
        self._made_bytes = self._free_bytes = 0  # of all chunks
        self._ahead_bytes = 0  # of chunks that the thread makes
        self._last: _Chunk | None = None  # the chunk that had room last
        self._book = _Book()
        self._lock = threading.Lock()
        self._ahead: threading.Thread | None = None
        self._coming = SimpleQueue[_Chunk | None]()  # its chunks, and None at its end

    @property
    def pinned(self) -> bool:
        """Return whether a device reaches the memory, or a part of it."""
        return any(map(attrgetter("pinned"), self._chunks))

    def register(
        self, pin: Callable[[int, int], str], unpin: Callable[[int], None], more_bytes: int = 0
    ) -> None:
        """Register all memory with a device, now and as it is made; later devices are ignored.

        Args:
            pin: `pin(address, n_bytes)` returns the reason why registering failed, or "".
            unpin: `unpin(address)` ends the registration.
            more_bytes: Added to the size, for copies under way.
        """
        with self._lock:
            if self._pin is not None or self._book.closed:
                return
            self._pin, self._unpin, self.n_bytes = pin, unpin, self.n_bytes + more_bytes
            for chunk in self._chunks:
                self._register(chunk)
            if not (self._chunks or self.why):
                self._add(self._make(self._size()))
            self._make_ahead()

    def acquire(self, n_bytes: int, *, pinned: bool = False) -> Bytes | None:
        """Return a slot with undefined content; None where there is no room.

        Args:
            n_bytes: Size of the slot; it occupies multiples of 4096.
            pinned: Return memory that the device reaches, or None.
        """
        return next(iter(self.acquire_all(1, n_bytes, pinned=pinned)), None)

    def acquire_all(self, count: int, n_bytes: int, *, pinned: bool = False) -> list[Bytes]:
        """Return so many slots of one size, or as many as there is room for; see `acquire`."""
        arrays = list[Bytes]()
        with self._lock:
            if self._book.closed or n_bytes < 1:
                return []
            self._collect()
            while len(arrays) < count:
                if some := self._find(count - len(arrays), n_bytes, pinned):
                    arrays += some
                    continue
                chunk = None if pinned and (self.why or not self._pin) else self._next(n_bytes)
                if chunk is None:
                    break
                self._add(chunk)
            if arrays:
                self._make_ahead()
        return arrays

    def reaches(self, addresses: Iterable[int], sizes: Iterable[int]) -> list[bool | None]:
        """Return for each slot of this pool whether a device reaches it; None for other memory."""
        found = list[bool | None]()
        for address, n_bytes in zip(addresses, sizes, strict=True):
            size, chunk = self._book.taken.get(address, (0, None))
            found.append(chunk.pinned if chunk and size == n_bytes else None)
        return found

    def locate(self, address: int) -> tuple[Bytes, int] | None:
        """Return the whole chunk of an address, and the offset in it; None for other memory."""
        chunks = self._chunks
        at = bisect(chunks, address, key=attrgetter("address")) - 1
        if at < 0 or address - chunks[at].address >= len(chunks[at].whole):
            return None
        return chunks[at].whole, address - chunks[at].address

    def wipe(self, array: Bytes) -> None:
        """Overwrite a slot with zeros once no array refers to its bytes."""
        self._book.wiped.add(array.ctypes.data)

    @property
    def used_bytes(self) -> int:
        """Return the bytes of all taken slots."""
        with self._lock:
            self._collect()
            return self._made_bytes - self._free_bytes

    def close(self) -> None:
        """Release all memory; a chunk goes with the last array that refers to it."""
        with self._lock:
            self._book.closed = True
            self._book.ended.clear()  # each slot holds the memory of its chunk
            self._chunks, self._last, self._made_bytes, self._free_bytes = [], None, 0, 0
            ahead, self._ahead, self._coming = self._ahead, None, SimpleQueue()
        if ahead is not None:
            ahead.join()

    def _find(self, count: int, n_bytes: int, pinned: bool) -> list[Bytes]:
        """Take up to so many slots of one chunk."""
        pages, found = -(-n_bytes // PAGE_BYTES), list[Bytes]()
        for chunk in (self._last, *self._chunks):
            if chunk is None or (pinned and not chunk.pinned):
                continue
            if places := chunk.extents.allocate(pages, count):
                self._last, kind = chunk, _slots_of(pages)
                self._free_bytes -= len(places) * pages * PAGE_BYTES
                for address in map(chunk.address.__add__, map(PAGE_BYTES.__mul__, places)):
                    slot = kind.from_address(address)
                    slot.chunk, slot.book = chunk, self._book
                    self._book.taken[address] = n_bytes, chunk
                    found.append(np.frombuffer(slot, np.uint8, n_bytes))
                break
        return found

    def _collect(self) -> None:
        while self._book.ended:
            chunk, address, n_bytes = self._book.ended.popleft()
            chunk.extents.free((address - chunk.address) // PAGE_BYTES, n_bytes // PAGE_BYTES)
            self._free_bytes += n_bytes

    def _size(self, n_bytes: int = 0) -> int:
        """Return the size of a new chunk for at least that many bytes; 0 without room for them."""
        left = self.n_bytes - self._made_bytes - self._ahead_bytes
        size = left if self._pin is None else min(left, max(CHUNK_BYTES, n_bytes))
        return size if size >= n_bytes else 0

    def _make(self, size: int) -> _Chunk | None:
        """Return a new registered chunk of a size; None if none can be made."""
        if size < 1:
            return None
        with suppress(OSError, MemoryError, OverflowError):
            chunk = _Chunk(-(-size // PAGE_BYTES))
            if self._pin is not None:  # registering alone would hold up all calls of the device
                populate(chunk.address, len(chunk.whole))
            self._register(chunk)
            return chunk
        return None

    def _register(self, chunk: _Chunk) -> None:
        if self._pin is not None and self._unpin is not None and not self.why:
            self.why = self._pin(chunk.address, len(chunk.whole))
            if not self.why:
                chunk.pinned = True
                chunk.end = weakref.finalize(chunk, self._unpin, chunk.address)
                chunk.end.atexit = False

    def _add(self, chunk: _Chunk | None) -> None:
        if chunk is not None:
            self._chunks = sorted([*self._chunks, chunk], key=attrgetter("address"))
            self._made_bytes += len(chunk.whole)
            self._free_bytes += len(chunk.whole)

    def _next(self, n_bytes: int) -> _Chunk | None:
        """Return the next chunk made ahead, or else a new one of at least that many bytes."""
        return self._made(wait=True) or self._make(self._size(n_bytes))

    def _made(self, *, wait: bool) -> _Chunk | None:
        """Return the next chunk of the thread that makes them ahead; None if it makes no more."""
        ahead = self._ahead
        if ahead is None:
            return None
        try:  # a thread that has ended put all that it made; in a forked child it may lack the end
            chunk = self._coming.get(wait and ahead.is_alive())
        except Empty:
            chunk, wait = None, wait or not ahead.is_alive()
            if not wait:
                return None
        if chunk is None:
            self._ahead, self._ahead_bytes = None, 0
        else:
            self._ahead_bytes -= len(chunk.whole)
        return chunk

    def _make_ahead(self) -> None:
        """Start a thread that makes chunks, if few bytes of the present ones are free."""
        if self.why or self._pin is None:
            return
        while (chunk := self._made(wait=False)) is not None:
            self._add(chunk)
        missing = max(AHEAD_BYTES, self._made_bytes - self._free_bytes) - self._free_bytes
        if self._ahead is not None or missing <= 0:
            return
        try:
            sizes = list[int]()
            while missing > sum(sizes) and (size := self._size()):
                sizes.append(size)
                self._ahead_bytes += size
            if sizes:  # else all memory is made
                made = self._coming = SimpleQueue[_Chunk | None]()
                self._ahead = begin(self._make_all, sizes, made, name="flowkv memory")
        finally:
            if self._ahead is None:  # no thread can start: chunks are made when needed
                self._ahead_bytes = 0

    def _make_all(self, sizes: list[int], made: SimpleQueue[_Chunk | None]) -> None:
        """Make chunks until the pool is closed; runs in a thread of its own."""
        try:
            for size in sizes:
                chunk = None if self._book.closed else self._make(size)
                if chunk is None:
                    return
                made.put(chunk)
        finally:
            made.put(None)


class _Chunk:
    """Memory in one piece.

    Args:
        pages: Its size, in memory pages.

    Attributes:
        address: Its start.
        whole: All of its bytes.
        extents: Its free memory pages.
        pinned: Whether a device reaches it.
        end: Finalizer that ends the registration, once nothing refers to the chunk.
    """

    def __init__(self, pages: int) -> None:
        memory = own_memory(pages * PAGE_BYTES)
        self.address, self.whole = address_of(memory), np.frombuffer(memory, np.uint8)
        self.extents, self.pinned, self.end = Extents(pages), False, object()


class _Book:
    """State of a pool that its slots change when they end, in any thread.

    Attributes:
        ended: Chunk, address and bytes of slots that no array refers to.
        taken: Bytes and chunk of each slot in use, by address.
        wiped: Addresses of slots to overwrite.
        closed: Whether no slot is collected any more.
    """

    def __init__(self) -> None:
        self.ended: deque[tuple[_Chunk, int, int]] = deque()
        self.taken: dict[int, tuple[int, _Chunk]] = {}
        self.wiped: set[int] = set()
        self.closed = False


@functools.lru_cache(64)
def _slots_of(pages: int) -> Any:
    """Return the type of slots of so many memory pages: arrays that end with their last user."""
    return type("Slot", (ctypes.c_ubyte * (pages * PAGE_BYTES),), {"__del__": _end})


def _end(slot: Any, address_of: Any = ctypes.addressof, fill: Any = ctypes.memset) -> None:
    # It may only append: the pool's lock may be held. The slot keeps its chunk mapped.
    book, address = slot.book, address_of(slot)
    n_bytes, _ = book.taken.pop(address)
    if address in book.wiped:
        fill(address, 0, n_bytes)
        book.wiped.discard(address)
    if not book.closed:
        book.ended.append((slot.chunk, address, len(slot)))
