"""Frames in the host's memory: the first tier below the device, and the one without surprises."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from flowkv.core.clock import Clock, SystemClock
from flowkv.core.errors import ConfigError, StateError
from flowkv.core.layout import GRANULE_BYTES
from flowkv.tiers.base import Completion, Entry, Load, Outcome, Store
from flowkv.tiers.completions import Completions
from flowkv.tiers.frame import (
    DIGEST_BYTES,
    BadFrame,
    Header,
    accept,
    count_stripes,
    describe,
    span,
    verify_stripe,
)

Wish = TypeVar("Wish", Load, Store)

OVERHEAD_BYTES = 1024
"""Charged per frame for its Python objects: key, description, table entry."""


class HostTier:
    """Keeps copies of frames in RAM, bounded in bytes; every load is checked against the digests.

    Items are answered while they are submitted, so `poll` never waits. Memory that rots, or that
    something else in the process overwrites, is a miss with reason "digest" and the frame is gone.

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
        self.name, self.capacity_bytes, self.corrupt = name, capacity_bytes, 0
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._frames: dict[bytes, tuple[Header, bytes]] = {}
        self._used_bytes = 0
        self._answers = Completions()
        self._closed = False

    def used_bytes(self) -> int:
        """Bytes of all frames, with what is charged for their objects."""
        return self._used_bytes

    def frame_bytes(self, body_bytes: int) -> int:
        """Upper bound of what such a frame is charged."""
        return body_bytes + DIGEST_BYTES * -(-body_bytes // GRANULE_BYTES) + OVERHEAD_BYTES

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys are there."""
        return [key in self._frames for key in keys]

    def submit_load(self, items: Sequence[Load], *, deadline_s: float = 10.0) -> int:
        """Copies frames into their targets, verified first."""
        return self._run(items, deadline_s, self._load)

    def submit_store(self, items: Sequence[Store], *, deadline_s: float = 60.0) -> int:
        """Copies bodies."""
        return self._run(items, deadline_s, self._store)

    def poll(self, timeout_s: float = 0.0) -> list[Completion]:
        """Answers that were not polled yet."""
        return self._answers.take(timeout_s)

    def fileno(self) -> int:
        """An eventfd that is readable while answers wait."""
        return self._answers.fileno()

    def cancel(self, job: int) -> None:
        """Too late: all items were answered while they were submitted."""

    def delete(self, keys: Sequence[bytes]) -> int:
        """Frees frames."""
        with self._lock:
            return sum(self._drop(key) for key in keys)

    def erase(self, keys: Sequence[bytes]) -> int:
        """Frees frames; the process may hand their memory out again, blanked or overwritten."""
        return self.delete(keys)

    def scan(self) -> Iterator[Entry]:
        """All frames, oldest store first."""
        with self._lock:
            frames = list(self._frames.items())
        for key, (header, _) in frames:
            yield Entry(key, header.info, _charge(header.body_bytes, header.stripes))

    def close(self) -> None:
        """Frees everything."""
        with self._lock:
            self._closed = True
            self._frames.clear()
            self._used_bytes = 0
        self._answers.close()

    def _run(
        self, items: Sequence[Wish], deadline_s: float, answer: Callable[[Wish], Completion]
    ) -> int:
        if self._closed:
            raise StateError(f"tier {self.name!r} is closed", "Open another one")
        job, start_ns = self._answers.new_job(), self._clock.now_ns()
        answers = []
        for index, item in enumerate(items):
            late = self._clock.now_ns() - start_ns >= deadline_s * 1e9
            reply = _failed(item.key, "deadline") if late else answer(item)
            seconds = (self._clock.now_ns() - start_ns) / 1e9
            answers.append(reply._replace(job=job, item=index, seconds=seconds))
        self._answers.put(answers)
        return job

    def _load(self, item: Load) -> Completion:
        frame = self._frames.get(item.key)
        if frame is None:
            return Completion(0, 0, item.key, Outcome.MISS)
        header, body = frame
        try:
            accept(header, item.key, item.layout, item.fidelity)
            stripes, step = span(header, item.first, item.stripes), header.info.stripe_bytes
            n_bytes = len(stripes) * step
            if item.target.readonly or item.target.nbytes < n_bytes:
                return _failed(item.key, "target")
            part = memoryview(body)[stripes.start * step : stripes.stop * step]
            for number, stripe in enumerate(stripes):
                verify_stripe(header, stripe, part[number * step : (number + 1) * step])
        except BadFrame as error:
            if error.reason == "digest":
                self._discard(item.key, frame)
            return Completion(0, 0, item.key, Outcome.MISS, error.reason)
        item.target.cast("B")[:n_bytes] = part
        return Completion(0, 0, item.key, Outcome.HIT, "", header.info, n_bytes)

    def _store(self, item: Store) -> Completion:
        key, body = item.key, item.body
        try:
            charge = _charge(body.nbytes, count_stripes(key, item.info, body.nbytes))
        except BadFrame as error:
            return _failed(key, error.reason)
        with self._lock:
            there = key in self._frames
            if not there and self._used_bytes + charge > self.capacity_bytes:
                return _failed(key, "full")
            self._used_bytes += 0 if there else charge
        if not there:
            # Digests come from the caller's memory: should it change while it is copied, against
            # the contract, then the copy will not match them and never be served.
            try:
                frame = describe(key, item.info, body), bytes(body)
            except MemoryError:
                with self._lock:
                    self._used_bytes -= charge
                return _failed(key, "memory")
            with self._lock:
                if self._closed or key in self._frames:
                    self._used_bytes -= charge
                else:
                    self._frames[key] = frame
        return Completion(0, 0, key, Outcome.STORED, "", None, 0 if there else body.nbytes)

    def _discard(self, key: bytes, damaged: tuple[Header, bytes]) -> None:
        with self._lock:
            self.corrupt += 1
            if self._frames.get(key) is damaged:
                self._drop(key)

    def _drop(self, key: bytes) -> bool:
        frame = self._frames.pop(key, None)
        if frame is not None:
            self._used_bytes -= _charge(len(frame[1]), frame[0].stripes)
        return frame is not None


def _charge(body_bytes: int, stripes: int) -> int:
    return body_bytes + DIGEST_BYTES * stripes + OVERHEAD_BYTES


def _failed(key: bytes, reason: str) -> Completion:
    return Completion(0, 0, key, Outcome.FAILED, reason)
