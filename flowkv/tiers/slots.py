"""Slots of host memory for frames, which a device can read and write itself."""

from __future__ import annotations

import ctypes
import threading
import weakref
from bisect import bisect
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from flowkv.core.errors import StateError
from flowkv.core.memory import address_of
from flowkv.tiers.io.engine import Arena, ArenaSlot

Bytes = NDArray[np.uint8]

CHUNK_BYTES = 256 << 20
"""Memory that is registered with a device in one call."""
AHEAD_BYTES = 1 << 30
"""Memory that is registered before it is asked for: registering takes as long as writing it."""


class SlotPool:
    """Slots of host memory; a slot is free again when no array refers to its bytes. Thread-safe.

    Memory for a device comes in chunks, each registered with it before its first slot is given out.
    A thread makes them ahead of their use. Without a device all memory is one chunk.

    Args:
        n_bytes: Most bytes of all chunks.

    Attributes:
        why: The reason for which the device does not reach the memory; "" where it does.
        kept_bytes: Bytes of slots whose owner counts them as his own, of those that are taken.
    """

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes, self.why, self.kept_bytes = n_bytes, "", 0
        self._pin: Callable[[int, int], str] | None = None
        self._unpin: Callable[[int], None] | None = None
        self._chunks: list[_Chunk] = []  # by address
        self._last: _Chunk | None = None  # that had room
        self._ended: deque[ArenaSlot] = deque()  # whose arrays are gone; a finalizer may only add
        self._sizes: dict[int, int] = {}  # bytes of each slot that is taken, by address
        self._wiped: set[int] = set()  # addresses of slots whose bytes are to be overwritten
        self._lock, self._closed = threading.Lock(), False
        self._open = {True}  # empty once the pool is closed: then no slot is collected any more
        self._ahead: _Making | None = None

    @property
    def pinned(self) -> bool:
        """Whether a device reaches the memory, or a part of it."""
        return any(chunk.pinned for chunk in self._chunks)

    def register(
        self,
        pin: Callable[[int, int], str],
        unpin: Callable[[int], None],
        more_bytes: int = 0,
    ) -> None:
        """Register all memory with a device, now and as it is made; the first device counts.

        Args:
            pin: `pin(address, n_bytes)` returns why that does not work, or "".
            unpin: `unpin(address)` ends it.
            more_bytes: Added to the size, for copies under way.
        """
        with self._lock:
            if self._pin is not None or self._closed:
                return
            self._pin, self._unpin, self.n_bytes = pin, unpin, self.n_bytes + more_bytes
            for chunk in self._chunks:
                self._register(chunk)
            if self._chunks or self.why:
                return
            self._add(self._make())

    def take(self, n_bytes: int, *, pinned: bool = False) -> Bytes | None:
        """Return a slot, with whatever was there before; None where there is no room.

        Args:
            n_bytes: Its size; it occupies multiples of 4096.
            pinned: Return memory that the device reaches, or None.
        """
        with self._lock:
            if self._closed or n_bytes < 1:
                return None
            self._collect()
            found = self._find(n_bytes, pinned)
            while found is None and not (pinned and (self.why or self._pin is None)):
                chunk = self._next(n_bytes)
                if chunk is None:
                    break
                self._add(chunk)
                found = self._find(n_bytes, pinned)
            if found is None:
                return None
            chunk, slot = found
            self._make_ahead()
        array = np.frombuffer(slot.view, np.uint8)
        self._sizes[slot.address] = n_bytes
        books = self._ended, self._open, self._sizes, self._wiped
        # The chunk stays registered and mapped until the last of its arrays is gone.
        weakref.finalize(array, _end, slot, chunk, *books).atexit = False
        return array

    def owns(self, view: memoryview) -> bool:
        """Whether memory is a slot of this pool."""
        return bool(view.nbytes) and self._sizes.get(address_of(view)) == view.nbytes

    def reaches(self, array: Bytes) -> bool:
        """Whether a device reaches the memory of an array."""
        chunk = self._chunk_of(array.ctypes.data)
        return chunk is not None and chunk.pinned

    def place(self, address: int) -> tuple[Bytes, int] | None:
        """Return a chunk whole, and where in it an address lies; None for other memory."""
        chunk = self._chunk_of(address)
        return None if chunk is None else (chunk.whole, address - chunk.address)

    def wipe(self, array: Bytes) -> None:
        """Overwrite a slot with zeros once no array refers to its bytes."""
        self._wiped.add(array.ctypes.data)

    @property
    def used_bytes(self) -> int:
        """Bytes of all slots that are taken."""
        with self._lock:
            self._collect()
            return sum(chunk.arena.n_bytes - chunk.arena.free_bytes for chunk in self._chunks)

    def close(self) -> None:
        """Give back all memory; a chunk goes with the last array that refers to it."""
        with self._lock:
            self._closed = True
            self._open.clear()
            self._ended.clear()  # each holds the memory of its chunk
            self._chunks, self._last = [], None
            ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.join()

    def _find(self, n_bytes: int, pinned: bool) -> tuple[_Chunk, ArenaSlot] | None:
        for chunk in (self._last, *self._chunks):
            if chunk is not None and (chunk.pinned or not pinned):
                slot = chunk.arena.take(n_bytes)
                if slot is not None:
                    self._last = chunk
                    return chunk, slot
        return None

    def _chunk_of(self, address: int) -> _Chunk | None:
        chunks = self._chunks
        at = bisect(chunks, address, key=lambda chunk: chunk.address) - 1
        found = at >= 0 and address - chunks[at].address < chunks[at].arena.n_bytes
        return chunks[at] if found else None

    def _collect(self) -> None:
        while self._ended:
            slot = self._ended.popleft()
            with suppress(StateError):  # closed
                slot.arena.give_back(slot)

    def _made_bytes(self) -> int:
        return sum(chunk.arena.n_bytes for chunk in self._chunks)

    def _make(self, n_bytes: int = 0) -> _Chunk | None:
        """Return a new chunk of at least so many bytes, registered; None if there can be none."""
        left = self.n_bytes - self._made_bytes()
        size = left if self._pin is None else min(left, max(CHUNK_BYTES, n_bytes))
        if size < max(n_bytes, 1):
            return None
        with suppress(OSError, MemoryError, OverflowError):
            chunk = _Chunk(Arena(size))
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
            self._chunks = sorted([*self._chunks, chunk], key=lambda one: one.address)

    def _next(self, n_bytes: int) -> _Chunk | None:
        """Return the chunk that a thread makes, or else a new one of at least so many bytes."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.join()
            if ahead.made is not None:
                return ahead.made
        return self._make(n_bytes)

    def _make_ahead(self) -> None:
        """Have a thread make the next chunk, if little is left of those that there are."""
        if self.why or self._pin is None:
            return
        if self._ahead is not None:
            if self._ahead.is_alive():
                return
            self._add(self._ahead.made)
            self._ahead = None
        made = self._made_bytes()
        free = sum(chunk.arena.free_bytes for chunk in self._chunks)
        if made < self.n_bytes and free < max(AHEAD_BYTES, made - free):
            making = _Making(self._make)
            with suppress(RuntimeError):  # no thread can begin: it is made when it is needed
                making.start()
                self._ahead = making


class _Chunk:
    """Memory in one piece.

    Attributes:
        pinned: A device reaches it.
        whole: All of its bytes.
        end: Ends the registration, once nothing refers to the chunk.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena, self.address, self.pinned = arena, arena.address, False
        self.whole: Bytes = np.frombuffer(arena.view, np.uint8)
        self.end: object = None


class _Making(threading.Thread):
    """A thread that makes a chunk."""

    def __init__(self, make: Callable[[], _Chunk | None]) -> None:
        super().__init__(name="flowkv memory", daemon=True)
        self.made: _Chunk | None = None
        self._make = make

    def run(self) -> None:
        self.made = self._make()


def _end(
    slot: ArenaSlot,
    _: _Chunk,
    ended: deque[ArenaSlot],
    is_open: set[bool],
    sizes: dict[int, int],
    wiped: set[int],
) -> None:
    if slot.address in wiped:
        ctypes.memset(slot.address, 0, slot.n_bytes)
        wiped.discard(slot.address)
    sizes.pop(slot.address, None)
    if is_open:
        ended.append(slot)
