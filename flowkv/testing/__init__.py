"""Conformance checks for your own policies, schedulers, tiers and codecs, and tiers for tests.

The checks need `pytest` and `hypothesis` and nothing else beside the library
(`pip install 'flowkv[testing]'`), which are imported only when a check is used. The tiers, the
simplest correct one and one that fails on purpose, need neither.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from flowkv.compiled.compiling import SystemClock
from flowkv.core.clock import Clock
from flowkv.core.errors import MissingDependencyError, StateError
from flowkv.tiers.base import BadFrame, Entry, Load, Outcome, OverTier, Store, Tier, TierAnswer
from flowkv.tiers.frame import Header, accept, count_stripes, describe, span, verify

if TYPE_CHECKING:
    from flowkv.testing.planners import check_restore_policy as check_restore_policy
    from flowkv.testing.planners import check_scheduler as check_scheduler
    from flowkv.testing.policies import check_policy as check_policy
    from flowkv.testing.sparsifiers import check_sparsifier as check_sparsifier
    from flowkv.testing.storage import check_codec as check_codec
    from flowkv.testing.storage import check_tier as check_tier

_PLACES = {
    "check_codec": "storage",
    "check_policy": "policies",
    "check_restore_policy": "planners",
    "check_scheduler": "planners",
    "check_sparsifier": "sparsifiers",
    "check_tier": "storage",
}

__all__ = [
    "FlakyTier",
    "MemoryTier",
    "check_codec",
    "check_policy",
    "check_restore_policy",
    "check_scheduler",
    "check_sparsifier",
    "check_tier",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import_module("hypothesis")
    except ImportError:
        raise MissingDependencyError("flowkv.testing", "testing", "pytest and hypothesis") from None
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return __all__


Asked = TypeVar("Asked", Load, Store)


class MemoryTier:
    """The simplest correct tier: a dict of frames, as an example of the protocol of a tier.

    Args:
        capacity_bytes: Most bytes of bodies.
        name: Name in statistics.
    """

    kind = "host"
    writable = True
    shared = False

    def __init__(self, capacity_bytes: int = 1 << 30, *, name: str = "memory") -> None:
        self.name, self.capacity_bytes = name, capacity_bytes
        self.frames: dict[bytes, tuple[Header, bytes]] = {}
        self._answers: list[TierAnswer] = []
        self._jobs = 0
        self._lock = threading.RLock()

    def used_bytes(self) -> int:
        """Return the bytes of all bodies."""
        with self._lock:
            return sum(len(body) for _, body in self.frames.values())

    def frame_bytes(self, body_bytes: int) -> int:
        """Return the bytes that a frame takes: those of its body."""
        return body_bytes

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether its frame is stored."""
        return [key in self.frames for key in keys]

    def submit_load(self, items: Sequence[Load], *, deadline_s: float = 10.0) -> int:
        """Load frames, and queue the answers at once."""
        return self._answer([self._load(item) for item in items])

    def submit_store(self, items: Sequence[Store], *, deadline_s: float = 60.0) -> int:
        """Store frames, and queue the answers at once."""
        return self._answer([self._store(item) for item in items])

    def poll(self, timeout_s: float = 0.0) -> list[TierAnswer]:
        """Return all queued answers, without waiting: every job has been answered."""
        with self._lock:
            answers, self._answers = self._answers, []
            return answers

    def cancel(self, job: int) -> None:
        """Do nothing: every job has been answered."""

    def delete(self, keys: Sequence[bytes]) -> int:
        """Delete frames; return how many were stored."""
        return sum(self.frames.pop(key, None) is not None for key in keys)

    def erase(self, keys: Sequence[bytes]) -> int:
        """Delete frames; no other copy of their bytes exists."""
        return self.delete(keys)

    def scan(self) -> Iterator[Entry]:
        """Yield all frames, oldest store first."""
        for key, (header, body) in list(self.frames.items()):
            yield Entry(key, header.info, len(body))

    def close(self) -> None:
        """Delete all frames."""
        self.frames.clear()

    def forge(self, key: bytes, body: bytes) -> None:
        """Replace a frame's body and its digests: only an audit can detect that.

        Args:
            key: Key of a stored frame.
            body: New body, as long as the old one.
        """
        with self._lock:
            header, old = self.frames[key]
            if len(body) != len(old):
                raise StateError(f"{len(body)} bytes for a frame of {len(old)}", "Keep its length")
            self.frames[key] = describe(key, header.info, memoryview(body)), body

    def _answer(self, answers: list[TierAnswer]) -> int:
        with self._lock:
            self._jobs += 1
            self._answers += [
                answer._replace(job=self._jobs, item=item) for item, answer in enumerate(answers)
            ]
            return self._jobs

    def _load(self, item: Load) -> TierAnswer:
        if item.key not in self.frames:
            return TierAnswer(0, 0, item.key, Outcome.MISS)
        header, body = self.frames[item.key]
        try:
            accept(header, item.key, item.layout, item.fidelity)
            stripes = span(header, item.first, item.stripes)
            verify(header, body)
        except BadFrame as error:
            return TierAnswer(0, 0, item.key, Outcome.MISS, error.reason)
        step = header.info.stripe_bytes
        part = body[stripes.start * step : stripes.stop * step]
        if item.target.readonly or item.target.nbytes < len(part):
            return TierAnswer(0, 0, item.key, Outcome.FAILED, "target")
        item.target.cast("B")[: len(part)] = part
        return TierAnswer(0, 0, item.key, Outcome.HIT, "", header.info, len(part))

    def _store(self, item: Store) -> TierAnswer:
        size = item.body.nbytes
        with self._lock:
            if item.key not in self.frames:
                try:
                    count_stripes(item.key, item.info, size)
                except BadFrame as error:
                    return TierAnswer(0, 0, item.key, Outcome.FAILED, error.reason)
                if self.used_bytes() + size > self.capacity_bytes:
                    return TierAnswer(0, 0, item.key, Outcome.FAILED, "full")
                self.frames[item.key] = describe(item.key, item.info, item.body), bytes(item.body)
            return TierAnswer(0, 0, item.key, Outcome.STORED, "", None, size)


class Faults(NamedTuple):
    """Rates at which a `FlakyTier` misbehaves; probabilities per item.

    Attributes:
        fail: Nothing is done, and the answer is `FAILED` with reason "injected".
        lose: The frame is deleted before the load: a `MISS`.
        flip: A bit of the loaded body is flipped: a `MISS` with reason "digest", the damaged bytes
            are in the target, and the frame is deleted.
        latency_s: Answers become visible after a uniform random time up to this.
        bytes_per_s: Rate of a link that all loads share; 0 for one without a limit.
    """

    fail: float = 0.0
    lose: float = 0.0
    flip: float = 0.0
    latency_s: float = 0.0
    bytes_per_s: float = 0.0


SOME_FAULTS = Faults(fail=0.1, lose=0.05, flip=0.05)


class FlakyTier(OverTier):
    """Wrapper of a tier that fails in every way a tier may, and in no other.

    Use it below any code over tiers: it exposes a reader that uses a target without a `HIT`, waits
    without an end, or relies on `contains`.

    Args:
        inner: The tier that does the work.
        seed: Equal seeds and equal calls give equal faults.
        faults: Rates of faults.
        clock: Source of time, for the latency.
        name: Name in statistics.
    """

    def __init__(
        self,
        inner: Tier,
        seed: int,
        faults: Faults = SOME_FAULTS,
        clock: Clock | None = None,
        *,
        name: str = "",
    ) -> None:
        self.inner, self.faults = inner, faults
        self.name, self.kind = name or f"flaky {inner.name}", inner.kind
        self.capacity_bytes = inner.capacity_bytes
        self._random, self._clock = random.Random(seed), clock or SystemClock()
        self._lock = threading.Lock()
        self._jobs = 0
        self._wishes: dict[int, tuple[int, int, list[tuple[int, Load | Store]]]] = {}
        self._held: list[tuple[int, TierAnswer]] = []
        self._begun_ns: dict[int, int] = {}
        self._free_ns = 0  # when the link has moved all loads so far

    def submit_load(self, items: Sequence[Load], *, deadline_s: float = 10.0) -> int:
        """Start loads of which some miss or fail."""
        with self._lock:
            self.inner.delete([item.key for item in items if self._happens(self.faults.lose)])
            return self._submit(items, self.inner.submit_load, deadline_s)

    def submit_store(self, items: Sequence[Store], *, deadline_s: float = 60.0) -> int:
        """Start stores of which some fail."""
        with self._lock:
            return self._submit(items, self.inner.submit_store, deadline_s)

    def poll(self, timeout_s: float = 0.0) -> list[TierAnswer]:
        """Return the answers that are due."""
        end_s = time.monotonic() + timeout_s
        while True:
            wait_s = 0.0 if self._held else max(0.0, end_s - time.monotonic())
            fresh = self.inner.poll(min(wait_s, 0.01))
            with self._lock:
                self._held += [self._translate(answer) for answer in fresh]
                now_ns = self._clock.now_ns()
                ready = [self._late(one, now_ns) for due_ns, one in self._held if due_ns <= now_ns]
                self._held = [held for held in self._held if held[0] > now_ns]
            if ready or time.monotonic() >= end_s:
                return ready
            time.sleep(0.0005)

    def cancel(self, job: int) -> None:
        """Cancel the part of a job that is in the inner tier."""
        with self._lock:
            for inner_job, (outer_job, _, _) in self._wishes.items():
                if outer_job == job:
                    self.inner.cancel(inner_job)

    def delete(self, keys: Sequence[bytes]) -> int:
        """Delete frames, without faults."""
        return self.inner.delete(keys)

    def erase(self, keys: Sequence[bytes]) -> int:
        """Erase frames, without faults."""
        return self.inner.erase(keys)

    def scan(self) -> Iterator[Entry]:
        """Yield the frames of the inner tier."""
        return self.inner.scan()

    def close(self) -> None:
        """Close the inner tier."""
        self.inner.close()

    def _happens(self, probability: float) -> bool:
        return self._random.random() < probability

    def _due_ns(self, deadline_ns: int, n_bytes: int = 0) -> int:
        now_ns, rate = self._clock.now_ns(), self.faults.bytes_per_s
        due_ns = now_ns + round(self._random.random() * self.faults.latency_s * 1e9)
        if n_bytes and rate:
            self._free_ns = max(now_ns, self._free_ns) + round(n_bytes / rate * 1e9)
            due_ns = max(due_ns, self._free_ns)
        return min(due_ns, deadline_ns)

    def _late(self, answer: TierAnswer, now_ns: int) -> TierAnswer:
        """Return a delayed answer with its true duration, of which rates are made."""
        if not (self.faults.latency_s or self.faults.bytes_per_s):
            return answer
        return answer._replace(seconds=(now_ns - self._begun_ns[answer.job]) / 1e9)

    def _submit(self, items: Sequence[Asked], submit: Callable[..., int], deadline_s: float) -> int:
        self._jobs += 1
        self._begun_ns[self._jobs] = self._clock.now_ns()
        deadline_ns = self._clock.now_ns() + round(deadline_s * 1e9)
        passed: list[tuple[int, Load | Store]] = []
        for index, item in enumerate(items):
            if self._happens(self.faults.fail):
                failed = TierAnswer(self._jobs, index, item.key, Outcome.FAILED, "injected")
                self._held.append((self._due_ns(deadline_ns), failed))
            else:
                passed.append((index, item))
        if passed:
            inner_job = submit([item for _, item in passed], deadline_s=deadline_s)
            self._wishes[inner_job] = self._jobs, deadline_ns, passed
        return self._jobs

    def _translate(self, answer: TierAnswer) -> tuple[int, TierAnswer]:
        job, deadline_ns, passed = self._wishes[answer.job]
        index, item = passed[answer.item]
        answer = answer._replace(job=job, item=index)
        if answer.outcome is Outcome.HIT and self._happens(self.faults.flip):
            assert isinstance(item, Load)
            bit = self._random.randrange(8 * answer.n_bytes)
            item.target.cast("B")[bit // 8] ^= 1 << bit % 8
            self.inner.delete([answer.key])
            answer = answer._replace(outcome=Outcome.MISS, reason="digest", info=None, n_bytes=0)
        loaded_bytes = answer.n_bytes if answer.outcome is Outcome.HIT else 0
        return self._due_ns(deadline_ns, loaded_bytes), answer
