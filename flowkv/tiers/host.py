"""Frames in the host's memory: the first tier below the device, and the one without surprises."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple, TypeVar

import numpy as np

from flowkv.core.clock import Clock, SystemClock
from flowkv.core.errors import ConfigError, StateError
from flowkv.core.geometry import GRANULE_BYTES
from flowkv.core.memory import address_of
from flowkv.tiers.base import Entry, Load, Outcome, Store, TierAnswer
from flowkv.tiers.frame import (
    DIGEST_BYTES,
    BadFrame,
    Header,
    accept,
    count_stripes,
    describe,
    span,
    verify_stripes,
)
from flowkv.tiers.worker import Completions

# Tiers that answer while they are asked, as memory can.

Wish = TypeVar("Wish", Load, Store)


class Immediate:
    """A base of tiers whose jobs are answered by `submit_*` at once, so no poll waits.

    Args:
        name: Shown in statistics.
        clock: Source of time.
    """

    def __init__(self, name: str, clock: Clock) -> None:
        self.name, self._clock = name, clock
        self._answers, self._closed, self._pid = Completions(), False, os.getpid()

    def submit_load(self, items: Sequence[Load], *, deadline_s: float = 10.0) -> int:
        """Copies frames into their targets, verified.

        Raises:
            StateError: The tier is closed, or was opened before a fork.
        """
        return self._run(items, deadline_s, self._load)

    def submit_store(self, items: Sequence[Store], *, deadline_s: float = 60.0) -> int:
        """Copies bodies.

        Raises:
            StateError: The tier is closed, or was opened before a fork.
        """
        return self._run(items, deadline_s, self._store)

    def poll(self, timeout_s: float = 0.0) -> list[TierAnswer]:
        """Answers that were not polled yet."""
        return self._answers.take(timeout_s)

    def fileno(self) -> int:
        """An eventfd that is readable while answers wait."""
        return self._answers.fileno()

    def cancel(self, job: int) -> None:
        """Too late: all items were answered while they were submitted."""

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
        self._answers.put(answers)
        return job


def failed(key: bytes, reason: str) -> TierAnswer:
    """An answer; `_run` fills in which item it is for."""
    return TierAnswer(0, 0, key, Outcome.FAILED, reason)


def missed(key: bytes, reason: str = "") -> TierAnswer:
    """An answer; `_run` fills in which item it is for."""
    return TierAnswer(0, 0, key, Outcome.MISS, reason)


def copied(header: Header, item: Load, copy: Callable[[memoryview, int], None]) -> TierAnswer:
    """Copies what was wished for of a frame into the target, and verifies the copy.

    Args:
        header: Of the frame.
        item: The wish.
        copy: Fills memory with the body from some byte on.

    Raises:
        BadFrame: The frame is not what was wished for, or damaged.
    """
    stripes, step = _asked(header, item), header.info.stripe_bytes
    n_bytes = len(stripes) * step
    if not n_bytes:
        return failed(item.key, "target")
    target = item.target.cast("B")[:n_bytes]
    copy(target, stripes.start * step)
    verify_stripes(header, stripes.start, target)
    return TierAnswer(0, 0, item.key, Outcome.HIT, "", header.info, n_bytes)


def _asked(header: Header, item: Load) -> range:
    """Stripes that are wished for of a frame; none if the target cannot take them.

    Raises:
        BadFrame: The frame is not what was wished for.
    """
    accept(header, item.key, item.layout, item.fidelity)
    stripes, target = span(header, item.first, item.stripes), item.target
    fits = target.c_contiguous and target.nbytes >= len(stripes) * header.info.stripe_bytes
    return stripes if fits and not target.readonly else range(0)


APART_BYTES = 1 << 20
"""A job of so many bytes takes longer than to wake a thread for it."""
TOGETHER_BYTES = 4 << 20
"""What that thread copies at once; then it looks whether the job was called off."""
OVERHEAD_BYTES = 1024
"""Charged per frame for its Python objects: key, description, table entry."""


class KeptFrame(NamedTuple):
    """What is kept of a frame.

    Attributes:
        header: With the digests that its body must have.
        body: Its memory.
        body_at: Address of that.
        digests_at: Address of the digests.
    """

    header: Header
    body: bytearray
    body_at: int
    digests_at: int


class HostTier(Immediate):
    """Keeps copies of frames in RAM, bounded in bytes; every load is checked against the digests.

    Small jobs are answered while they are submitted. Loads that take longer are carried out by a
    thread, so that whoever asked can compute meanwhile. Memory that rots, or that something else in
    the process overwrites, is a miss with reason "digest" and the frame is gone.

    Args:
        capacity_bytes: Most bytes it may occupy.
        name: Shown in statistics.
        clock: Source of time.

    Attributes:
        corrupt: Frames found damaged so far.
    """

    kind = "host"
    writable = True
    shared = False

    def __init__(
        self, capacity_bytes: int, *, name: str = "host", clock: Clock | None = None
    ) -> None:
        if capacity_bytes < 1:
            raise ConfigError(f"a host tier of {capacity_bytes} bytes", "Give it at least one page")
        super().__init__(name, clock or SystemClock())
        self.capacity_bytes, self.corrupt = capacity_bytes, 0
        self._lock, self._apart = threading.Lock(), ThreadPoolExecutor(1, f"flowkv {name}")
        self._waiting: set[int] = set()  # jobs of the thread that nobody cancelled
        self._frames: dict[bytes, KeptFrame] = {}
        self._used_bytes = 0

    def submit_load(self, items: Sequence[Load], *, deadline_s: float = 10.0) -> int:
        """Copies frames into their targets, verified; many bytes in the background.

        Raises:
            StateError: The tier is closed, or was opened before a fork.
        """
        if sum(item.target.nbytes for item in items) < APART_BYTES or not self._usable():
            return super().submit_load(items, deadline_s=deadline_s)
        job, start_ns = self._answers.new_job(), self._clock.now_ns()
        end_ns = start_ns + round(min(deadline_s, 1e9) * 1e9)
        self._waiting.add(job)
        work = (job, items, start_ns, end_ns, itertools.count())
        try:
            self._apart.submit(self._carry_out, *work)
        except RuntimeError:  # closed meanwhile, which is what it will answer, or no thread begins
            self._carry_out(*work)
        return job

    def _carry_out(
        self, job: int, items: Sequence[Load], start_ns: int, end_ns: int, turns: Iterator[int]
    ) -> None:
        if next(turns):  # it was queued, although no thread could begin then
            return
        first, together = 0, _compiled()
        most_bytes = TOGETHER_BYTES if together else 1
        while first < len(items):
            part, n_bytes = list[Load](), 0
            while n_bytes < most_bytes and first + len(part) < len(items):
                part.append(items[first + len(part)])
                n_bytes += part[-1].target.nbytes
            if self._closed or job not in self._waiting:
                why = "closed" if self._closed else "cancelled"
                replies = [failed(item.key, why) for item in part]
            elif self._clock.now_ns() >= end_ns:
                replies = [failed(item.key, "deadline") for item in part]
            else:
                try:
                    one = self._load
                    replies = self._load_all(part) if together else [one(i, end_ns) for i in part]
                except Exception as error:
                    why = f"{type(error).__name__}: {error}"
                    replies = [failed(item.key, why) for item in part]
            seconds = (self._clock.now_ns() - start_ns) / 1e9
            self._answers.put(
                [
                    TierAnswer(job, first + n, key, outcome, reason, info, n_bytes, seconds)
                    for n, (_, _, key, outcome, reason, info, n_bytes, _) in enumerate(replies)
                ]
            )
            first += len(part)
        self._waiting.discard(job)

    def cancel(self, job: int) -> None:
        """Leaves out what was not carried out yet of a job."""
        self._waiting.discard(job)

    def used_bytes(self) -> int:
        """Bytes of all frames, with what is charged for their objects."""
        return self._used_bytes

    def frame_bytes(self, body_bytes: int) -> int:
        """Upper bound of what such a frame is charged."""
        return body_bytes + DIGEST_BYTES * -(-body_bytes // GRANULE_BYTES) + OVERHEAD_BYTES

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys are there."""
        return [key in self._frames for key in keys]

    def delete(self, keys: Sequence[bytes]) -> int:
        """Frees frames."""
        with self._lock:
            return sum(self._drop(key) is not None for key in keys)

    def erase(self, keys: Sequence[bytes]) -> int:
        """Overwrites and frees frames."""
        with self._lock:
            gone = [body for key in keys if (body := self._drop(key)) is not None]
            for body in gone:
                body[:] = bytes(len(body))
        return len(gone)

    def scan(self) -> Iterator[Entry]:
        """All frames, oldest store first."""
        with self._lock:
            frames = list(self._frames.items())
        for key, (header, *_) in frames:
            yield Entry(key, header.info, _charge(header.body_bytes, header.stripes))

    def close(self) -> None:
        """Frees everything."""
        with self._lock:
            self._closed = True
        if self._pid == os.getpid():  # threads do not follow into a child
            with suppress(RuntimeError):  # closed by that very thread
                self._apart.shutdown()
        with self._lock:
            self._frames.clear()
            self._used_bytes = 0
        self._answers.close()

    def _load(self, item: Load, end_ns: int) -> TierAnswer:
        frame = self._frames.get(item.key)
        if frame is None:
            return missed(item.key)

        def copy(target: memoryview, at: int) -> None:
            part = memoryview(frame.body)[at : at + len(target)]
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(part, np.uint8))  # without GIL

        try:  # the copy is what is verified: the frame may be overwritten by `erase` meanwhile
            return copied(frame.header, item, copy)
        except BadFrame as error:
            return self._bad(frame, error.reason)

    def _load_all(self, items: Sequence[Load]) -> list[TierAnswer]:
        """The same of many, in one compiled call that needs no interpreter."""
        from flowkv.tiers.digest import REASONS, check_known

        replies, found, rows = list[TierAnswer](), list[tuple[int, KeptFrame]](), []
        for number, item in enumerate(items):
            frame = self._frames.get(item.key)
            if frame is None:
                replies.append(missed(item.key))
                continue
            header, _, body_at, digests_at = frame
            try:
                stripes, step = _asked(header, item), header.info.stripe_bytes
            except BadFrame as error:
                replies.append(self._bad(frame, error.reason))
                continue
            first, count = stripes.start, len(stripes)
            if not count:
                replies.append(failed(item.key, "target"))
                continue
            part = body_at + first * step, count * step, address_of(item.target), step
            rows.append((digests_at, 0, *part, header.stripes, first, count, 1))
            found.append((number, frame))
            answer = TierAnswer(0, 0, item.key, Outcome.HIT, "", header.info, count * step)
            replies.append(answer)
        for (number, frame), reason in zip(found, check_known(rows), strict=True):
            if reason:
                replies[number] = self._bad(frame, REASONS[reason])
        return replies

    def _bad(self, frame: KeptFrame, reason: str) -> TierAnswer:
        """The answer where a frame is not what was wished for; a damaged one is gone."""
        key = frame.header.key
        damaged = reason == "digest" and self._discard(key, frame)
        return missed(key, reason if damaged or reason != "digest" else "")

    def _store(self, item: Store, end_ns: int) -> TierAnswer:
        key, body = item.key, item.body
        try:
            charge = _charge(body.nbytes, count_stripes(key, item.info, body.nbytes))
        except BadFrame as error:
            return failed(key, error.reason)
        with self._lock:
            there = key in self._frames
            if not there and self._used_bytes + charge > self.capacity_bytes:
                return failed(key, "full")
            self._used_bytes += 0 if there else charge
        if not there:
            # Digests come from the caller's memory: should it change while it is copied, against
            # the contract, then the copy will not match them and never be served.
            try:
                header, copy = describe(key, item.info, body), bytearray(body)
                at = address_of(memoryview(copy)), address_of(memoryview(header.digests))
                frame = KeptFrame(header, copy, *at)
            except MemoryError:
                with self._lock:
                    self._used_bytes -= charge
                return failed(key, "memory")
            with self._lock:
                if self._closed or key in self._frames:
                    self._used_bytes -= charge
                else:
                    self._frames[key] = frame
        return TierAnswer(0, 0, key, Outcome.STORED, "", None, 0 if there else body.nbytes)

    def _discard(self, key: bytes, damaged: KeptFrame) -> bool:
        """Takes a damaged frame out; False if it was taken out meanwhile, and overwritten."""
        with self._lock:
            found = self._frames.get(key) is damaged and self._drop(key) is not None
            self.corrupt += found
            return found

    def _drop(self, key: bytes) -> bytearray | None:
        """The body of a frame that is now forgotten."""
        frame = self._frames.pop(key, None)
        if frame is None:
            return None
        self._used_bytes -= _charge(len(frame.body), frame.header.stripes)
        return frame.body


def _compiled() -> bool:
    """Whether many are copied in one compiled call: nobody waits here for it to be compiled."""
    digest = sys.modules.get("flowkv.tiers.digest")
    return digest is not None and bool(digest.is_compiled())


def _charge(body_bytes: int, stripes: int) -> int:
    return body_bytes + DIGEST_BYTES * stripes + OVERHEAD_BYTES
