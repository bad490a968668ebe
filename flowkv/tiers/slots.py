"""Slots of host memory for frames, which a device can read and write directly."""

from __future__ import annotations

import ctypes
import threading
import weakref
from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from operator import attrgetter
from queue import Empty, SimpleQueue

import numpy as np
from numpy.typing import NDArray

from flowkv.core.errors import StateError
from flowkv.core.memory import populate
from flowkv.tiers.io.engine import Arena, ArenaSlot

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
        self._ended: deque[ArenaSlot] = deque()  # slots without arrays; a finalizer may only append
        self._taken: dict[int, tuple[int, _Chunk]] = {}  # bytes and chunk of each slot, by address
        self._wiped: set[int] = set()  # addresses of slots to overwrite
        self._lock, self._closed = threading.Lock(), False
        self._open = {True}  # emptied on close: then no slot is collected any more
        self._ahead: _Making | None = None

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
            if self._pin is not None or self._closed:
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
        found = list[tuple[_Chunk, ArenaSlot]]()
        with self._lock:
            if self._closed or n_bytes < 1:
                return []
            self._collect()
            try:
                while len(found) < count:
                    if some := self._find(count - len(found), n_bytes, pinned):
                        found += some
                        self._free_bytes -= sum([slot.taken_bytes for _, slot in some])
                        continue
                    chunk = None if pinned and (self.why or not self._pin) else self._next(n_bytes)
                    if chunk is None:
                        break
                    self._add(chunk)
                if found:
                    self._make_ahead()
            except BaseException:
                self._ended += [slot for _, slot in found]
                raise
        arrays = [np.frombuffer(slot.view, np.uint8) for _, slot in found]
        books = self._ended, self._open, self._taken, self._wiped
        for (chunk, slot), array in zip(found, arrays, strict=True):
            self._taken[slot.address] = n_bytes, chunk
            # The chunk stays registered and mapped until the last of its arrays is gone.
            weakref.finalize(array, _end, slot, chunk, *books).atexit = False
        return arrays

    def reaches(self, addresses: Iterable[int], sizes: Iterable[int]) -> list[bool | None]:
        """Return for each slot of this pool whether a device reaches it; None for other memory."""
        found = list[bool | None]()
        for address, n_bytes in zip(addresses, sizes, strict=True):
            size, chunk = self._taken.get(address, (0, None))
            found.append(chunk.pinned if chunk and size == n_bytes else None)
        return found

    def locate(self, address: int) -> tuple[Bytes, int] | None:
        """Return the whole chunk of an address, and the offset in it; None for other memory."""
        chunks = self._chunks
        at = bisect(chunks, address, key=attrgetter("address")) - 1
        if at < 0 or address - chunks[at].address >= chunks[at].arena.n_bytes:
            return None
        return chunks[at].whole, address - chunks[at].address

    def wipe(self, array: Bytes) -> None:
        """Overwrite a slot with zeros once no array refers to its bytes."""
        self._wiped.add(array.ctypes.data)

    @property
    def used_bytes(self) -> int:
        """Return the bytes of all taken slots."""
        with self._lock:
            self._collect()
            return self._made_bytes - self._free_bytes

    def close(self) -> None:
        """Release all memory; a chunk goes with the last array that refers to it."""
        with self._lock:
            self._closed = True
            self._open.clear()
            self._ended.clear()  # each slot holds the memory of its chunk
            self._chunks, self._last, self._made_bytes, self._free_bytes = [], None, 0, 0
            ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.over = True
            ahead.join()

    def _find(self, count: int, n_bytes: int, pinned: bool) -> list[tuple[_Chunk, ArenaSlot]]:
        """Take up to so many slots of one chunk."""
        for chunk in (self._last, *self._chunks):
            fits = chunk is not None and (chunk.pinned or not pinned)
            if chunk and fits and (slots := chunk.arena.acquire_all(count, n_bytes)):
                self._last = chunk
                return [(chunk, slot) for slot in slots]
        return []

    def _collect(self) -> None:
        while self._ended:
            slot = self._ended.popleft()
            with suppress(StateError):  # the arena is closed
                slot.arena.give_back(slot)
                self._free_bytes += slot.taken_bytes

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
            chunk = _Chunk(Arena(size))
            if self._pin is not None:  # registering alone would hold up all calls of the device
                populate(chunk.address, size)
            self._register(chunk)
            return chunk
        return None

    def _register(self, chunk: _Chunk) -> None:
        if self._pin is not None and self._unpin is not None and not self.why:
            self.why = self._pin(chunk.address, chunk.arena.n_bytes)
            if not self.why:
                chunk.pinned = True
                chunk.end = weakref.finalize(chunk, self._unpin, chunk.address)
                chunk.end.atexit = False

    def _add(self, chunk: _Chunk | None) -> None:
        if chunk is not None:
            self._chunks = sorted([*self._chunks, chunk], key=attrgetter("address"))
            self._made_bytes += chunk.arena.n_bytes
            self._free_bytes += chunk.arena.n_bytes

    def _next(self, n_bytes: int) -> _Chunk | None:
        """Return the next chunk made ahead, or else a new one of at least that many bytes."""
        return self._made(wait=True) or self._make(self._size(n_bytes))

    def _made(self, *, wait: bool) -> _Chunk | None:
        """Return the next chunk of the thread that makes them ahead; None if it makes no more."""
        ahead = self._ahead
        if ahead is None:
            return None
        try:  # a thread that has ended put all that it made; in a forked child it may lack the end
            chunk = ahead.made.get(wait and ahead.is_alive())
        except Empty:
            chunk, wait = None, wait or not ahead.is_alive()
            if not wait:
                return None
        if chunk is None:
            self._ahead, self._ahead_bytes = None, 0
        else:
            self._ahead_bytes -= chunk.arena.n_bytes
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
                making = _Making(self._make, sizes)
                with suppress(RuntimeError):  # no thread can start: chunks are made when needed
                    making.start()
                    self._ahead = making
        finally:
            if self._ahead is None:
                self._ahead_bytes = 0


class _Chunk:
    """Memory in one piece.

    Attributes:
        pinned: Whether a device reaches it.
        whole: All of its bytes.
        end: Finalizer that ends the registration, once nothing refers to the chunk.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena, self.address, self.pinned = arena, arena.address, False
        self.whole: Bytes = np.frombuffer(arena.view, np.uint8)
        self.end: object = None


class _Making(threading.Thread):
    """Thread that makes chunks.

    Attributes:
        made: Finished chunks, and None at the end.
        over: Whether to make no more.
    """

    def __init__(self, make: Callable[[int], _Chunk | None], sizes: list[int]) -> None:
        super().__init__(name="flowkv memory", daemon=True)
        self.made: SimpleQueue[_Chunk | None] = SimpleQueue()
        self.over, self._make, self._sizes = False, make, sizes

    def run(self) -> None:
        try:
            for size in self._sizes:
                chunk = None if self.over else self._make(size)
                if chunk is None:
                    return
                self.made.put(chunk)
        finally:
            self.made.put(None)


def _end(
    slot: ArenaSlot,
    _: _Chunk,
    ended: deque[ArenaSlot],
    is_open: set[bool],
    taken: dict[int, tuple[int, _Chunk]],
    wiped: set[int],
) -> None:
    if slot.address in wiped:
        ctypes.memset(slot.address, 0, slot.n_bytes)
        wiped.discard(slot.address)
    taken.pop(slot.address, None)
    if is_open:
        ended.append(slot)
