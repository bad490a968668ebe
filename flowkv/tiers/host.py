"""Host tier: frames in slots of memory that devices reach, the first tier below the device."""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import threading
import weakref
from bisect import bisect
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import repeat
from operator import attrgetter, is_not
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from flowkv.compiled.compiling import SystemClock
from flowkv.core.clock import Clock
from flowkv.core.errors import ConfigError
from flowkv.core.geometry import GRANULE_BYTES
from flowkv.core.memory import address_of, addresses_of, own_memory, populate
from flowkv.core.reaper import begin
from flowkv.tiers.base import BadFrame, Entry, Load, Outcome, Store, TierAnswer
from flowkv.tiers.frame import (
    DIGEST_BYTES,
    FIXED_BYTES,
    Header,
    accept,
    count_stripes,
    span,
    verify_stripes,
)
from flowkv.tiers.io.engine import PAGE_BYTES, Extents
from flowkv.tiers.worker import Completions, Handle

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


# Answers that memory can give during the call.

Wish = TypeVar("Wish", Load, Store)


def failed(key: bytes, reason: str) -> TierAnswer:
    """Return a `FAILED` answer; `_run` fills in job and item."""
    return TierAnswer(0, 0, key, Outcome.FAILED, reason)


def missed(key: bytes, reason: str = "") -> TierAnswer:
    """Return a `MISS` answer; `_run` fills in job and item."""
    return TierAnswer(0, 0, key, Outcome.MISS, reason)


def copied(header: Header, item: Load, copy: Callable[[memoryview, int], None]) -> TierAnswer:
    """Copy the requested stripes of a frame into the target, and verify the copy.

    Args:
        header: Header of the frame.
        item: The request.
        copy: Fills memory with the body from the given offset on.

    Raises:
        BadFrame: The frame is not the requested one, or damaged.
    """
    accept(header, item.key, item.layout, item.fidelity)
    stripes, step = span(header, item.first, item.stripes), header.info.stripe_bytes
    target, n_bytes = item.target, len(stripes) * step
    if not target.c_contiguous or target.nbytes < n_bytes or target.readonly:
        return failed(item.key, "target")
    copy(target.cast("B")[:n_bytes], stripes.start * step)
    verify_stripes(header, stripes.start, target.cast("B")[:n_bytes])
    return TierAnswer(0, 0, item.key, Outcome.HIT, "", header.info, n_bytes)


APART_BYTES = 1 << 20
"""Loads from this size on take longer than waking a thread for them."""
TOGETHER_BYTES = 4 << 20
"""Least bytes of a thread's share of a job; smaller stores run during their submission. After four
times as much a thread looks whether the job was cancelled."""
THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))
"""Number of threads that share a job: one core copies and digests about 8 GB/s."""
TRANSIT_BYTES = 1 << 27
"""Bytes of slots in transit beyond which frames that go elsewhere leave theirs for other pages."""
OVERHEAD_BYTES = 1024
"""Bytes charged per frame for its Python objects: key, description, table entry."""
SLOT_BYTES = 1 << 16
"""Size from which on bodies go into slots, so that their memory is used again."""


class KeptFrame(NamedTuple):
    """One frame in the tier.

    Attributes:
        header: With the digests that its body must have.
        body: Its bytes.
        body_at: Address of the body.
        kept_bytes: Bytes that it occupies of the slots; 0 where it has memory of its own.
        reached: Whether a device reaches the body.
        digests_at: Address of the digests.
        charge: Bytes charged for the frame.
    """

    header: Header
    body: Bytes
    body_at: int
    kept_bytes: int
    reached: bool
    digests_at: int
    charge: int


class HostTier(Handle):
    """Copies of frames in RAM, bounded in bytes; every load is checked against the digests.

    Small jobs are answered during their submission. Larger ones are shared among threads, so that
    the caller can compute meanwhile. A frame in damaged or overwritten memory is a miss with reason
    "digest" and is dropped. Memory of large frames is used again for others, and goes back to the
    system when the tier is closed.

    With a device that reaches the slots no copy is made: a body in a slot stays where it is, and a
    load into the memory that `lend` returned is checked in place.

    Args:
        capacity_bytes: Most bytes it may occupy.
        name: Shown in statistics.
        clock: Source of time.

    Attributes:
        corrupt: Frames found damaged so far.
        slots: Memory of the bodies.
    """

    kind = "host"
    writable = True
    shared = False

    def __init__(
        self, capacity_bytes: int, *, name: str = "host", clock: Clock | None = None
    ) -> None:
        if capacity_bytes < 1:
            raise ConfigError(f"a host tier has {capacity_bytes} bytes", "Give it a few pages")
        from flowkv.tiers.digest import compile_frames

        compile_frames()  # threads copy and digest in one pass
        super().__init__(name, Completions())
        self._clock = clock or SystemClock()
        self.capacity_bytes, self.corrupt = capacity_bytes, 0
        self._lock, self._apart = threading.Lock(), ThreadPoolExecutor(THREADS, f"flowkv {name}")
        self._waiting: dict[int, int] = {}  # remaining shares of each job not cancelled
        self.slots = SlotPool(capacity_bytes)
        self._frames: dict[bytes, KeptFrame] = {}
        self._used_bytes = self._claimed_bytes = 0  # of frames here, and of stores under way

    def _run(self, items: Sequence[Load] | Sequence[Store], deadline_s: float) -> int:
        """Run small jobs at once, and share large ones among threads; unread bytes do not count.

        A body that is a slot stays there, and known digests are not made.
        """
        self._require_usable()
        if not items:
            return self._answers.new_job()
        stores, wishes = isinstance(items[0], Store), cast(Sequence[Any], items)
        if stores:
            sizes = [wish.body.nbytes for wish in wishes]
            if all(map(is_not, map(attrgetter("digests"), wishes), repeat(None))):
                slots = self.slots.reaches(addresses_of([wish.body for wish in wishes]), sizes)
                sizes = [n * (slot is None) for n, slot in zip(sizes, slots, strict=True)]
        else:
            sizes = [wish.target.nbytes * (not wish.unread) for wish in wishes]
        small = sum(sizes) < (TOGETHER_BYTES if stores else APART_BYTES)
        many: Any = self._store_all if stores else self._load_all
        job, start_ns = self._answers.new_job(), self._clock.now_ns()
        times = start_ns, start_ns + round(min(deadline_s, 1e9) * 1e9)
        shares, share_bytes, first = list[slice](), 0, 0
        least = max(TOGETHER_BYTES, -(-sum(sizes) // THREADS))
        for number, size in enumerate(sizes, 1):
            share_bytes += size
            if share_bytes >= least or number == len(items):
                shares.append(slice(first, number))
                first, share_bytes = number, 0
        self._waiting[job] = len(shares)
        for part in shares:
            turns, those = itertools.count(), (part.start, wishes[part], sizes[part])
            work = partial(self._carry_out, job, *those, times, many, turns)
            try:
                work() if small else self._apart.submit(work)
            # the tier is closed, which will be the answer, or no thread can start
            except RuntimeError:
                work()
        return job

    def _carry_out(
        self, job: int, number: int, items: Sequence[Wish], sizes: list[int],
        times: tuple[int, int], answer: Callable[[Sequence[Wish]], list[TierAnswer]],
        turns: Iterator[int],
    ) -> None:  # fmt: skip
        """Serve a share of a job; its first item has the given number in the job."""
        if next(turns):  # the share was queued, although no thread could start then
            return
        (start_ns, end_ns), first, now_ns = times, 0, self._clock.now_ns()
        while first < len(items):
            part, n_bytes = list[Wish](), 0
            while n_bytes < 4 * TOGETHER_BYTES and first + len(part) < len(items):
                n_bytes += sizes[first + len(part)]
                part.append(items[first + len(part)])
            why = "deadline" if now_ns >= end_ns else ""
            why = "closed" if self._closed else why if job in self._waiting else "cancelled"
            try:
                replies = [failed(item.key, why) for item in part] if why else answer(part)
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                replies = [failed(item.key, why) for item in part]
            now_ns = self._clock.now_ns()
            seconds, begun = (now_ns - start_ns) / 1e9, number + first
            for n, reply in enumerate(replies):
                replies[n] = TierAnswer(job, begun + n, *reply[2:7], seconds, reply.digests)
            self._answers.post(replies)
            first += len(part)
        with self._lock:
            left = self._waiting.pop(job, 1) - 1
            if left > 0:
                self._waiting[job] = left

    def cancel(self, job: int) -> None:
        """Skip the remaining shares of a job."""
        with self._lock:
            self._waiting.pop(job, None)

    def used_bytes(self) -> int:
        """Return the bytes of all frames, with the overhead charged for their objects."""
        return self._used_bytes

    def frame_bytes(self, body_bytes: int) -> int:
        """Return an upper bound of the bytes charged for such a frame."""
        return body_bytes + DIGEST_BYTES * -(-body_bytes // GRANULE_BYTES) + OVERHEAD_BYTES

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which keys are present."""
        return [key in self._frames for key in keys]

    def delete(self, keys: Sequence[bytes]) -> int:
        """Drop frames and free their memory; return how many were present."""
        with self._lock:
            return sum(self._drop(key) is not None for key in keys)

    def erase(self, keys: Sequence[bytes]) -> int:
        """Overwrite frames and free their memory; return how many were present."""
        with self._lock:
            gone = [frame for key in keys if (frame := self._drop(key)) is not None]
            for frame in gone:
                if frame.kept_bytes:
                    self.slots.wipe(frame.body)  # at once, or when the last copy of it is over
                else:
                    frame.body[:] = 0
        return len(gone)

    def lend(self, key: bytes, first: int = 0, stripes: int = 0) -> Bytes | None:
        """Return the memory of stripes of a frame, if a device reaches it; None otherwise.

        A load with that memory as its target copies nothing, and answers whether it is sound. The
        memory stays unchanged while an array refers to it, even if the frame is dropped.

        Args:
            key: Key of the frame.
            first: First stripe.
            stripes: Number of stripes; 0 for all from the first on.
        """
        return self.lend_all([key], first, stripes)[0]

    def lend_all(self, keys: Iterable[bytes], first: int, stripes: int) -> list[Bytes | None]:
        """Return the memory of the same stripes of several frames; see `lend`."""
        found = list[Bytes | None]()
        for frame in map(self._frames.get, keys):
            body = frame.body if frame is not None and frame.reached else None
            if frame is not None and body is not None and (first or stripes):
                step, size = frame.header.info.stripe_bytes, len(body)
                stop = (first + stripes) * step if stripes else size
                body = body[first * step : stop] if stop <= size else None
            found.append(body)
        return found

    def as_store(self, key: bytes) -> Store | None:
        """Return the store of a frame elsewhere, from where it lies; None if it must be copied.

        It is not verified: the digests are those with which it came here.
        """
        frame, transit_bytes = self._frames.get(key), self.slots.used_bytes - self.slots.kept_bytes
        if frame is None or not frame.kept_bytes or transit_bytes > TRANSIT_BYTES:
            return None
        return Store(key, frame.header.info, frame.body.data.toreadonly(), frame.header.digests)

    def scan(self) -> Iterator[Entry]:
        """Yield all frames, oldest store first."""
        with self._lock:
            frames = list(self._frames.items())
        for key, frame in frames:
            yield Entry(key, frame.header.info, frame.charge)

    def close(self) -> None:
        """Close the tier and free all memory."""
        with self._lock:
            self._closed = True
        if self._pid == os.getpid():  # threads do not exist in a forked child
            with suppress(RuntimeError):  # close was called by one of these threads
                self._apart.shutdown()
        with self._lock:
            self._frames.clear()
            self._used_bytes = self._claimed_bytes = 0
        self.slots.close()
        self._answers.close()

    def _load_all(self, items: Sequence[Load]) -> list[TierAnswer]:
        """Load many frames in one compiled call that needs no interpreter.

        A frame that may stay unread does so if its own memory is the target.
        """
        replies, found = list[TierAnswer](), list[tuple[int, KeptFrame, int, int]]()
        targets, rows = list[memoryview](), list[tuple[int, ...]]()
        for number, item in enumerate(items):
            frame = self._frames.get(item.key)
            if frame is None:
                replies.append(missed(item.key))
                continue
            header, info, target = frame.header, frame.header.info, item.target
            every, first = len(frame.body) // info.stripe_bytes, item.first
            stop = first + item.stripes if item.stripes else every
            same = (item.key, item.layout) == (header.key, info.layout)
            if not (same and info.fidelity <= item.fidelity and 0 <= first < stop <= every):
                try:
                    accept(header, item.key, item.layout, item.fidelity)
                    span(header, first, item.stripes)
                except BadFrame as error:
                    replies.append(self._bad(frame, error.reason))
                    continue
            if not (target.c_contiguous and target.nbytes >= (stop - first) * info.stripe_bytes):
                replies.append(failed(item.key, "target"))
                continue
            targets.append(target)
            found.append((number, frame, first, stop - first))
            n_bytes = (stop - first) * info.stripe_bytes
            replies.append(TierAnswer(0, 0, item.key, Outcome.HIT, "", info, n_bytes))
        read = list[tuple[int, KeptFrame]]()
        for wanted, target, target_at in zip(found, targets, addresses_of(targets), strict=True):
            (number, frame, first, count), digests = wanted, wanted[1].header.digests
            step, every = frame.header.info.stripe_bytes, len(frame.body)
            at = frame.body_at + first * step
            if target_at != at and target.readonly:
                replies[number] = failed(items[number].key, "target")
            elif target_at == at and items[number].unread:
                known = digests[DIGEST_BYTES * first :][: DIGEST_BYTES * count]
                replies[number] = TierAnswer(*replies[number][:8], known)
            else:
                part = at, count * step, target_at, step, every // step, first, count, 1
                rows.append((frame.digests_at, 0, *part))
                read.append((number, frame))
        from flowkv.tiers.digest import REASONS, check_known

        for (number, frame), reason in zip(read, check_known(rows), strict=True):
            if reason:
                replies[number] = self._bad(frame, REASONS[reason])
        return replies

    def _bad(self, frame: KeptFrame, reason: str) -> TierAnswer:
        """Return the answer for a frame that is not the requested one; drop a damaged one."""
        key, damaged = frame.header.key, True
        if reason == "digest":
            with self._lock:  # else it was dropped meanwhile, and overwritten
                damaged = self._frames.get(key) is frame and self._drop(key) is not None
                self.corrupt += damaged
        return missed(key, reason if damaged else "")

    def _store_all(self, items: Sequence[Store]) -> list[TierAnswer]:
        """Store many frames: copy and digest them in one compiled call without the interpreter."""
        found, claimed = dict[int, TierAnswer](), dict[int, int]()
        try:
            found = self._claim(items, claimed)
            self._keep(items, claimed, found)
        except BaseException as error:
            with self._lock:
                self._claimed_bytes -= sum(claimed.values())
            if isinstance(error, MemoryError):
                return [found.get(n) or failed(one.key, "memory") for n, one in enumerate(items)]
            raise
        return [*map(found.__getitem__, range(len(items)))]

    def _claim(self, items: Sequence[Store], claimed: dict[int, int]) -> dict[int, TierAnswer]:
        """Reserve room for frames, and add their charges; return answers to the others."""
        found, forms = dict[int, TierAnswer](), dict[tuple[Any, ...], int]()
        for number, (key, info, body, known) in enumerate(items):
            names = key, info.layout, info.parent, info.namespace, info.tenant
            form = *map(len, names), *info[:3], *info[6:9], *info[10:], body.nbytes
            form += (None if known is None else len(known),)
            try:
                if form not in forms:
                    digest_bytes = DIGEST_BYTES * count_stripes(key, info, body.nbytes, known)
                    forms[form] = body.nbytes + digest_bytes + OVERHEAD_BYTES
            except BadFrame as error:
                found[number] = failed(key, error.reason)
                continue
            charge = forms[form]
            with self._lock:
                if key in self._frames:
                    found[number] = TierAnswer(0, 0, key, Outcome.STORED, "", None, 0)
                elif self._used_bytes + self._claimed_bytes + charge > self.capacity_bytes:
                    found[number] = failed(key, "full")
                else:
                    self._claimed_bytes += charge
                    claimed[number] = charge
        return found

    def _keep(
        self, items: Sequence[Store], claimed: dict[int, int], found: dict[int, TierAnswer]
    ) -> None:
        """Copy and enter the claimed frames, and add the answers to them."""
        wished = [*map(items.__getitem__, claimed)]
        arrays, sources, places, reached = self._memory([*map(attrgetter("body"), wished)])
        digests = self._digests(wished, arrays, sources, places) if wished else []
        where = places, reached, digests, addresses_of(digests)
        for number, body, at, reaches, its, its_at in zip([*claimed], arrays, *where, strict=True):
            (key, info, *_), n_bytes = items[number], len(body)
            kept_bytes = -(-n_bytes // GRANULE_BYTES) * GRANULE_BYTES * (reaches is not None)
            made = Header(key, info, its), body, at, kept_bytes, bool(reaches), its_at
            frame = KeptFrame(*made, claimed[number])
            with self._lock:
                self._claimed_bytes -= frame.charge
                del claimed[number]
                if not self._closed and key not in self._frames:
                    self._frames[key] = frame
                    self._used_bytes += frame.charge
                    self.slots.kept_bytes += kept_bytes
                else:
                    n_bytes = 0
            found[number] = TierAnswer(0, 0, key, Outcome.STORED, "", None, n_bytes)

    def _digests(
        self, items: Sequence[Store], arrays: list[Bytes], sources: list[int], places: list[int]
    ) -> list[bytes]:
        """Copy bodies into memory where they are not there; return the digests of each."""
        found, fresh = [b""] * len(items), list[int]()
        for n, item in enumerate(items):
            if item.digests is None:
                fresh.append(n)
                continue
            if places[n] != sources[n]:
                np.copyto(arrays[n], np.frombuffer(item.body, np.uint8))
            # Digests come from the caller's memory, or a device's: should it change until the copy
            # is over, then the copy will not match them and never be served.
            found[n] = bytes(item.digests)
        if not fresh:
            return found
        from flowkv.tiers.digest import SEAL, seal_frames

        rows = np.empty(len(fresh), SEAL)
        steps = rows["step"] = [items[n].info.stripe_bytes for n in fresh]
        counts = rows["stripes"] = np.array([len(arrays[n]) for n in fresh]) // steps
        sizes = rows["header_bytes"] = FIXED_BYTES + DIGEST_BYTES * counts
        ends = np.cumsum(sizes)
        headers = np.zeros(ends[-1], np.uint8)
        rows["header"] = headers.ctypes.data + ends - sizes
        rows["body"], rows["data"] = ([at[n] for n in fresh] for at in (sources, places))
        seal_frames(rows)
        parts = map(slice, (ends - DIGEST_BYTES * counts).tolist(), ends.tolist())
        for n, its in zip(fresh, map(headers.data.__getitem__, parts), strict=True):
            found[n] = bytes(its)
        return found

    def _memory(
        self, bodies: Sequence[memoryview]
    ) -> tuple[list[Bytes], list[int], list[int], list[bool | None]]:
        """Return memory for bodies: a body itself, if it is a slot.

        Returns:
            The memory, the addresses of the bodies and of the memory, and whether a device reaches
            it; None if that is no slot.

        Raises:
            MemoryError: There is none.
        """
        sources, sizes = addresses_of(bodies), [*map(attrgetter("nbytes"), bodies)]
        reached = self.slots.reaches(sources, sizes)
        arrays = [*map(np.frombuffer, bodies, repeat(np.uint8))]
        if None not in reached:
            return arrays, sources, sources, reached
        others = Counter([n for n, there in zip(sizes, reached, strict=True) if there is None])
        slots = {
            n: self.slots.acquire_all(count * (n >= SLOT_BYTES), n) for n, count in others.items()
        }
        for number in [number for number, there in enumerate(reached) if there is None]:
            n_bytes = sizes[number]
            spare = slots[n_bytes] or [np.frombuffer(bytearray(n_bytes), np.uint8)]
            arrays[number] = spare.pop()
        places = addresses_of([array.data for array in arrays])
        return arrays, sources, places, self.slots.reaches(places, sizes)

    def _drop(self, key: bytes) -> KeptFrame | None:
        """Remove a frame from the table; return it, or None if it is not present."""
        frame = self._frames.pop(key, None)
        if frame is not None:
            self._used_bytes -= frame.charge
            self.slots.kept_bytes -= frame.kept_bytes
        return frame
