"""Host tier: frames in the host's memory, the first tier below the device."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from flowkv.compiled.compiling import SystemClock
from flowkv.core.clock import Clock
from flowkv.core.errors import ConfigError, StateError
from flowkv.core.geometry import GRANULE_BYTES
from flowkv.core.memory import address_of
from flowkv.tiers.base import Entry, Load, Outcome, Store, TierAnswer
from flowkv.tiers.frame import (
    DIGEST_BYTES,
    FIXED_BYTES,
    BadFrame,
    Header,
    accept,
    count_stripes,
    describe,
    span,
    verify_stripes,
)
from flowkv.tiers.slots import Bytes, SlotPool
from flowkv.tiers.worker import Completions

# Base of tiers that answer during the call, as memory can.

Wish = TypeVar("Wish", Load, Store)


class Immediate:
    """Base of tiers with jobs that `submit_*` answers at once, so that no poll waits.

    Args:
        name: Shown in statistics.
        clock: Source of time.
    """

    def __init__(self, name: str, clock: Clock) -> None:
        self.name, self._clock = name, clock
        self._answers, self._closed, self._pid = Completions(), False, os.getpid()

    def submit_load(self, items: Sequence[Load], *, deadline_s: float = 10.0) -> int:
        """Copy frames into their targets and verify them.

        Raises:
            StateError: The tier is closed, or was opened before a fork.
        """
        return self._run(items, deadline_s, self._load)

    def submit_store(self, items: Sequence[Store], *, deadline_s: float = 60.0) -> int:
        """Copy bodies into the tier.

        Raises:
            StateError: The tier is closed, or was opened before a fork.
        """
        return self._run(items, deadline_s, self._store)

    def poll(self, timeout_s: float = 0.0) -> list[TierAnswer]:
        """Return the answers that were not polled yet."""
        return self._answers.poll(timeout_s)

    def fileno(self) -> int:
        """Return an eventfd that is readable while answers wait."""
        return self._answers.fileno()

    def cancel(self, job: int) -> None:
        """Do nothing: all items were answered when they were submitted."""

    def _usable(self) -> bool:
        return not self._closed and self._pid == os.getpid()

    def _load(self, item: Load, end_ns: int) -> TierAnswer:
        raise NotImplementedError

    def _store(self, item: Store, end_ns: int) -> TierAnswer:
        raise NotImplementedError

    def _run(
        self, items: Sequence[Wish], deadline_s: float, answer: Callable[[Wish, int], TierAnswer]
    ) -> int:
        if not self._usable():
            why = "is closed" if self._pid == os.getpid() else "was opened before a fork"
            raise StateError(f"tier {self.name!r} {why}", "Open another one, here")
        job, start_ns = self._answers.new_job(), self._clock.now_ns()
        end_ns, answers = start_ns + round(min(deadline_s, 1e9) * 1e9), []
        for index, item in enumerate(items):
            late = self._clock.now_ns() >= end_ns
            reply = failed(item.key, "deadline") if late else answer(item, end_ns)
            seconds = (self._clock.now_ns() - start_ns) / 1e9
            answers.append(reply._replace(job=job, item=index, seconds=seconds))
        self._answers.post(answers)
        return job


def failed(key: bytes, reason: str) -> TierAnswer:
    """Return a `FAILED` answer; `_run` fills in job and item."""
    return TierAnswer(0, 0, key, Outcome.FAILED, reason)


def missed(key: bytes, reason: str = "") -> TierAnswer:
    """Return a `MISS` answer; `_run` fills in job and item."""
    return TierAnswer(0, 0, key, Outcome.MISS, reason)


def copied(
    header: Header, item: Load, copy: Callable[[memoryview, int], None], body_at: int = 0
) -> TierAnswer:
    """Copy the requested stripes of a frame into the target, and verify the copy.

    Args:
        header: Header of the frame.
        item: The request.
        copy: Fills memory with the body from the given offset on.
        body_at: Address of the body; 0 if it has none.

    Raises:
        BadFrame: The frame is not the requested one, or damaged.
    """
    stripes, step = _asked(header, item, body_at), header.info.stripe_bytes
    n_bytes = len(stripes) * step
    if not n_bytes:
        return failed(item.key, "target")
    target = item.target.cast("B")[:n_bytes]
    copy(target, stripes.start * step)
    verify_stripes(header, stripes.start, target)
    return TierAnswer(0, 0, item.key, Outcome.HIT, "", header.info, n_bytes)


def _asked(header: Header, item: Load, body_at: int = 0) -> range:
    """Return the requested stripes of a frame; an empty range if the target cannot take them.

    Read-only memory is a target only if it is the memory of the frame itself.

    Raises:
        BadFrame: The frame is not the requested one.
    """
    accept(header, item.key, item.layout, item.fidelity)
    stripes = span(header, item.first, item.stripes)
    target, step = item.target, header.info.stripe_bytes
    fits = target.c_contiguous and target.nbytes >= len(stripes) * step
    if fits and target.readonly:
        fits = bool(body_at) and address_of(target) == body_at + stripes.start * step
    return stripes if fits else range(0)


APART_BYTES = 1 << 20
"""Loads from this size on take longer than waking a thread for them."""
TOGETHER_BYTES = 4 << 20
"""Least bytes of a thread's share of a job; smaller stores run during their submission. After four
times as much a thread looks whether the job was cancelled."""
THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))
"""Number of threads that share a job: one core copies and digests about 8 GB/s."""
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


class HostTier(Immediate):
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
        super().__init__(name, clock or SystemClock())
        self.capacity_bytes, self.corrupt = capacity_bytes, 0
        self._lock, self._apart = threading.Lock(), ThreadPoolExecutor(THREADS, f"flowkv {name}")
        self._waiting: dict[int, int] = {}  # remaining shares of each job not cancelled
        self.slots = SlotPool(capacity_bytes)
        self._frames: dict[bytes, KeptFrame] = {}
        self._used_bytes = self._claimed_bytes = 0  # both include stores under way

    def _run(
        self, items: Sequence[Wish], deadline_s: float, answer: Callable[[Wish, int], TierAnswer]
    ) -> int:
        """Run small jobs at once, and large ones in the background."""
        if items and isinstance(items[0], Load) and items[0].unread:
            return super()._run(items, deadline_s, self._load_unread)
        sizes = [(one.target if isinstance(one, Load) else one.body).nbytes for one in items]
        stores = bool(items) and isinstance(items[0], Store)
        if sum(sizes) < (TOGETHER_BYTES if stores else APART_BYTES) or not self._usable():
            return super()._run(items, deadline_s, answer)
        many: Any = self._store_all if stores else self._load_all
        return self._share_out(items, sizes, deadline_s, many)

    def _share_out(
        self,
        items: Sequence[Wish],
        sizes: list[int],
        deadline_s: float,
        answer: Callable[[Sequence[Wish]], Sequence[TierAnswer]],
    ) -> int:
        """Share the items of a job among threads; return the number of the job."""
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
            turns, those = itertools.count(), (part.start, items[part], sizes[part])
            work = partial(self._carry_out, job, *those, times, answer, turns)
            try:
                self._apart.submit(work)
            # the tier is closed, which will be the answer, or no thread can start
            except RuntimeError:
                work()
        return job

    def _carry_out(
        self,
        job: int,
        number: int,
        items: Sequence[Wish],
        sizes: list[int],
        times: tuple[int, int],
        answer: Callable[[Sequence[Wish]], Sequence[TierAnswer]],
        turns: Iterator[int],
    ) -> None:
        """Serve a share of a job; its first item has the given number in the job."""
        if next(turns):  # the share was queued, although no thread could start then
            return
        (start_ns, end_ns), first = times, 0
        most_bytes = 4 * TOGETHER_BYTES if _compiled() else 1
        while first < len(items):
            part, n_bytes = list[Wish](), 0
            while n_bytes < most_bytes and first + len(part) < len(items):
                n_bytes += sizes[first + len(part)]
                part.append(items[first + len(part)])
            if self._closed or job not in self._waiting:
                why = "closed" if self._closed else "cancelled"
                replies: Sequence[TierAnswer] = [failed(item.key, why) for item in part]
            elif self._clock.now_ns() >= end_ns:
                replies = [failed(item.key, "deadline") for item in part]
            else:
                try:
                    replies = answer(part)
                except Exception as error:
                    why = f"{type(error).__name__}: {error}"
                    replies = [failed(item.key, why) for item in part]
            seconds = (self._clock.now_ns() - start_ns) / 1e9
            self._answers.post(
                [
                    reply._replace(job=job, item=number + first + n, seconds=seconds)
                    for n, reply in enumerate(replies)
                ]
            )
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
        return self._used_bytes - self._claimed_bytes

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
        frame = self._frames.get(key)
        if frame is None or not frame.reached:
            return None
        step = frame.header.info.stripe_bytes
        stop = (first + stripes) * step if stripes else len(frame.body)
        return frame.body[first * step : stop] if stop <= len(frame.body) else None

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

    def _load(self, item: Load, end_ns: int) -> TierAnswer:
        frame = self._frames.get(item.key)
        if frame is None:
            return missed(item.key)

        def copy(target: memoryview, at: int) -> None:
            into, part = np.frombuffer(target, np.uint8), frame.body[at : at + len(target)]
            if into.ctypes.data != part.ctypes.data:
                np.copyto(into, part)  # without the interpreter's lock

        try:  # The copy is verified, since `erase` may overwrite the frame meanwhile.
            return copied(frame.header, item, copy, frame.body_at)
        except BadFrame as error:
            return self._bad(frame, error.reason)

    def _load_unread(self, item: Any, end_ns: int) -> TierAnswer:
        """Leave a frame unread whose own memory is the target; load any other one."""
        frame, stripes = self._frames.get(item.key), range(0)
        with suppress(BadFrame):
            stripes = _asked(frame.header, item, frame.body_at) if frame is not None else stripes
        if frame is not None and stripes and item.unread:
            info, first, stop = frame.header.info, stripes.start, stripes.stop
            if address_of(item.target) == frame.body_at + first * info.stripe_bytes:
                known = frame.header.digests[DIGEST_BYTES * first : DIGEST_BYTES * stop]
                hit = 0, 0, item.key, Outcome.HIT, "", info, len(stripes) * info.stripe_bytes
                return TierAnswer(*hit, digests=known)
        return self._load(item, end_ns)

    def _load_all(self, items: Sequence[Load]) -> list[TierAnswer]:
        """Load many frames in one compiled call that needs no interpreter, if it is compiled."""
        if not _compiled():
            return [self._load(item, 0) for item in items]
        from flowkv.tiers.digest import REASONS, check_known

        replies, found, rows = list[TierAnswer](), list[tuple[int, KeptFrame]](), []
        for number, item in enumerate(items):
            frame = self._frames.get(item.key)
            if frame is None:
                replies.append(missed(item.key))
                continue
            header, body_at, digests_at = frame.header, frame.body_at, frame.digests_at
            try:
                stripes, step = _asked(header, item, body_at), header.info.stripe_bytes
            except BadFrame as error:
                replies.append(self._bad(frame, error.reason))
                continue
            first, count = stripes.start, len(stripes)
            if not count:
                replies.append(failed(item.key, "target"))
                continue
            part = body_at + first * step, count * step, address_of(item.target), step
            rows.append((digests_at, 0, *part, len(frame.body) // step, first, count, 1))
            found.append((number, frame))
            answer = TierAnswer(0, 0, item.key, Outcome.HIT, "", header.info, count * step)
            replies.append(answer)
        for (number, frame), reason in zip(found, check_known(rows), strict=True):
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

    def _store(self, item: Store, end_ns: int) -> TierAnswer:
        return self._store_all([item])[0]

    def _store_all(self, items: Sequence[Store]) -> list[TierAnswer]:
        """Store many frames: copy and digest them in one compiled call without the interpreter."""
        found, claimed = dict[int, TierAnswer](), dict[int, int]()
        rows, made, compiled = list[tuple[int, ...]](), list[tuple[Any, ...]](), _compiled()
        try:
            found = self._claim(items, claimed)
            for number, charge in claimed.items():
                key, info, body, known = items[number]
                stripes = body.nbytes // info.stripe_bytes
                header = bytearray(FIXED_BYTES + DIGEST_BYTES * stripes)
                array, source, at, reached = self._memory(body)
                if compiled and known is None:
                    places = address_of(memoryview(header)), len(header), source, at
                    rows.append((*places, info.stripe_bytes, stripes))
                else:
                    # Digests come from the caller's memory, or a device's: should it change until
                    # the copy is over, then the copy will not match them and never be served.
                    header[FIXED_BYTES:] = describe(key, info, body, known=known).digests
                    if at != source:
                        np.copyto(array, np.frombuffer(body, np.uint8))
                made.append((number, header, array, at, reached, charge))
            if rows:
                from flowkv.tiers.digest import SEAL, seal_frames

                seal_frames(np.array(rows, SEAL))
            for number, header, *memory in made:
                key, info, *_ = items[number]
                kept = Header(key, info, bytes(header[FIXED_BYTES:]))
                found[number] = self._keep(kept, *memory)
                del claimed[number]
        except BaseException as error:
            with self._lock:
                self._used_bytes -= sum(claimed.values())
                self._claimed_bytes -= sum(claimed.values())
            if isinstance(error, MemoryError):
                return [found.get(n) or failed(one.key, "memory") for n, one in enumerate(items)]
            raise
        return [found[number] for number in range(len(items))]

    def _claim(self, items: Sequence[Store], claimed: dict[int, int]) -> dict[int, TierAnswer]:
        """Reserve room for frames, and add their charges; return answers to the others."""
        found = dict[int, TierAnswer]()
        for number, (key, info, body, known) in enumerate(items):
            try:
                digest_bytes = DIGEST_BYTES * count_stripes(key, info, body.nbytes, known)
            except BadFrame as error:
                found[number] = failed(key, error.reason)
                continue
            charge = body.nbytes + digest_bytes + OVERHEAD_BYTES
            with self._lock:
                if key in self._frames:
                    found[number] = TierAnswer(0, 0, key, Outcome.STORED, "", None, 0)
                elif self._used_bytes + charge > self.capacity_bytes:
                    found[number] = failed(key, "full")
                else:
                    self._used_bytes += charge
                    self._claimed_bytes += charge
                    claimed[number] = charge
        return found

    def _keep(
        self, header: Header, body: Bytes, at: int, reached: bool | None, charge: int
    ) -> TierAnswer:
        kept_bytes = -(-len(body) // GRANULE_BYTES) * GRANULE_BYTES * (reached is not None)
        place = at, kept_bytes, bool(reached)
        frame = KeptFrame(header, body, *place, address_of(memoryview(header.digests)), charge)
        with self._lock:
            self._claimed_bytes -= charge
            new = not self._closed and header.key not in self._frames
            if new:
                self._frames[header.key] = frame
                self.slots.kept_bytes += kept_bytes
            else:
                self._used_bytes -= charge
        n_bytes = len(body) if new else 0
        return TierAnswer(0, 0, header.key, Outcome.STORED, "", None, n_bytes)

    def _memory(self, body: memoryview) -> tuple[Bytes, int, int, bool | None]:
        """Return memory for a body: the body itself, if it is a slot.

        Returns:
            The memory, the addresses of the body and of the memory, and whether a device reaches
            it; None if that is no slot.

        Raises:
            MemoryError: There is none.
        """
        source, n_bytes = address_of(body), body.nbytes
        reached = self.slots.reaches(source, n_bytes)
        if reached is not None:
            return np.frombuffer(body, np.uint8), source, source, reached
        slot = self.slots.acquire(n_bytes) if n_bytes >= SLOT_BYTES else None
        if slot is None:
            array = np.frombuffer(bytearray(n_bytes), np.uint8)
            return array, source, array.ctypes.data, None
        at = slot.ctypes.data
        return slot, source, at, self.slots.reaches(at, n_bytes)

    def _drop(self, key: bytes) -> KeptFrame | None:
        """Remove a frame from the table; return it, or None if it is not present."""
        frame = self._frames.pop(key, None)
        if frame is not None:
            self._used_bytes -= frame.charge
            self.slots.kept_bytes -= frame.kept_bytes
        return frame


def _compiled() -> bool:
    """Return whether the compiled batch functions are ready, without a wait for compiling."""
    digest = sys.modules.get("flowkv.tiers.digest")
    return digest is not None and bool(digest.is_compiled())
