"""Remote tier: any engine behind the `Tier` protocol, so that every failure is only a miss.

An engine is a `Backend` of six blocking calls. Everything else is here, once for all of them: the
index of frames expected there, the breaker, threads that move frames, and one thread that lists,
deletes and maintains the index in the background.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from enum import Enum
from functools import cached_property, partial
from itertools import islice
from typing import NamedTuple, TypeVar

from flowkv.compiled import compiling
from flowkv.core.clock import Clock
from flowkv.core.errors import ConfigError, StoreError, stating
from flowkv.core.geometry import GRANULE_BYTES
from flowkv.core.reaper import begin, started
from flowkv.tiers.base import (
    UNBOUNDED,
    BadFrame,
    Entry,
    FrameInfo,
    Load,
    Outcome,
    Store,
    TierAnswer,
)
from flowkv.tiers.erasure_log import Erased
from flowkv.tiers.frame import Envelope, Header, accept, count_stripes, peek_header_bytes, span
from flowkv.tiers.remote.backend import Backend, RemoteLimits
from flowkv.tiers.remote.erasures import AGAIN_S, RemoteErasures
from flowkv.tiers.worker import Handle, Item, ItemAnswer, ThreadMemory, Workers

__all__ = ["RemoteLimits", "RemoteTier"]


# Index of a store that others write to as well.

MOST_KNOWN = 1 << 20
MOST_HEADS = 1 << 14
MOST_GONE = 1 << 16


class Fact(NamedTuple):
    """Known facts about one frame.

    Attributes:
        n_bytes: Bytes it occupies; 0 while unknown.
        info: Its description; None until its header was read.
        stored_ns: Time of the store, in nanoseconds since 1970; 0 while unknown.
    """

    n_bytes: int = 0
    info: FrameInfo | None = None
    stored_ns: int = 0

    def completed(self, other: Fact) -> Fact:
        """Return this fact, with unknown fields filled from the other."""
        return Fact(*(mine or its for mine, its in zip(self, other, strict=True)))  # type: ignore[arg-type]


class Known:
    """Index of keys expected in the store, and of keys that must not be used. Thread-safe.

    A key is *shunned* after its frame was found damaged, *refused* as well if its header was twice,
    and *condemned* from a deletion on until the engine confirmed it: only a store of this process
    makes it usable again. Listings bring back keys that are only shunned: an erasure must find
    their frames, which may be whole in the engine. A frame on its way is *flying*: only its landing
    shows whether it is there; if its key is condemned meanwhile, it is deleted after it landed.
    Frames seen in the store before a deletion was confirmed prove nothing about the present
    (`look`).

    Args:
        most: Most frames in the index; beyond it the oldest entries are forgotten, and found again
            when they are asked for. Headers are kept of the frames read or written last, so that
            ranges of those frames can be read.

    Attributes:
        used_bytes: Bytes of all known frames.
        fresh: Facts of frames that landed, or with a header read, until a catalog takes them out;
            None to keep none.
    """

    def __init__(self, most: int = MOST_KNOWN) -> None:
        self._most, self._changed = most, threading.Condition()
        self._facts: dict[bytes, Fact] = {}
        self._heads: OrderedDict[bytes, Header] = OrderedDict()
        self._shunned: set[bytes] = set()
        self._refused: set[bytes] = set()
        self._condemned: set[bytes] = set()
        self._deleting: set[bytes] = set()
        self._flying: dict[bytes, bool] = {}
        self._deletions, self._forgotten = 0, 0
        self._gone: dict[bytes, int] = {}  # number of the last confirmed deletion, oldest first
        self.used_bytes = self._reserved_bytes = 0
        self.fresh: list[tuple[bytes, Fact]] | None = None

    def __len__(self) -> int:
        return len(self._facts)

    def get(self, key: bytes) -> Fact | None:
        """Return the fact about a key, or None."""
        return self._facts.get(key)

    def head(self, key: bytes) -> Header | None:
        """Return the header of a frame, if it was read lately."""
        with self._changed:
            if key in self._heads:
                self._heads.move_to_end(key)
            return self._heads.get(key)

    def forget_head(self, key: bytes) -> None:
        """Forget the header of a frame: it may be outdated."""
        with self._changed:
            self._heads.pop(key, None)

    def usable(self, key: bytes) -> bool:
        """Return whether a frame of that key is expected, and was not found damaged."""
        return key in self._facts and key not in self._shunned

    def is_shunned(self, key: bytes) -> bool:
        """Return whether a frame of that key must not be used, even if the store has one."""
        return key in self._shunned

    def facts(self) -> list[tuple[bytes, Fact]]:
        """Return all facts, oldest store first."""
        with self._changed:
            found = list(self._facts.items())
        return sorted(found, key=lambda pair: pair[1].stored_ns)

    def look(self) -> int:
        """Return the number of deletions, for `merge` and `see`; call before asking the engine."""
        return self._deletions

    def merge(self, facts: Iterable[tuple[bytes, Fact]], look: int) -> None:
        """Add frames that were seen; known facts are completed, never contradicted.

        Args:
            facts: Keys, and the facts seen about their frames.
            look: Result of `look` before the engine was asked.
        """
        with self._changed:
            for key, fact in facts:
                mine, gone = self._facts.get(key), self._gone.get(key, self._forgotten) > look
                if mine is not None:
                    self._put(key, mine.completed(fact))
                elif not (gone or self._hidden(key) or key in self._flying):
                    self._put(key, fact)

    def see(self, head: Header, n_bytes: int, look: int) -> None:
        """Add the header of a frame of so many bytes, read after that `look`."""
        with self._changed:
            key, mine = head.key, self._facts.get(head.key, Fact())
            self.merge([(key, Fact(n_bytes, head.info))], look)
            if mine.info is None and key in self._facts:
                self._note(key)
            self._keep(head)

    def mark_missing(self, key: bytes, was: Fact | None, *, shun: bool = False) -> None:
        """Forget a key that the engine does not have, or with a damaged frame.

        Args:
            key: The key.
            was: The fact before the engine was asked; if it has changed, a store came in between,
                and nothing is forgotten.
            shun: Whether the key must not be used any more either.
        """
        with self._changed:
            self.forget_head(key)
            now = self._facts.get(key)
            if (now.stored_ns if now else 0) == (was.stored_ns if was else 0):
                self._drop(key)
                if shun:
                    self._shunned.add(key)

    def refuse(self, key: bytes, was: Fact | None) -> None:
        """Shun a key whose header is damaged for good; listings do not bring it back."""
        with self._changed:
            self.mark_missing(key, was, shun=True)
            if key in self._shunned:  # else a store came in between
                self._refused.add(key)

    # ---- stores

    def reserve(self, n_bytes: int, capacity_bytes: int) -> bool:
        """Reserve room for a frame on its way; return whether there was enough."""
        with self._changed:
            if self.used_bytes + self._reserved_bytes + n_bytes > capacity_bytes:
                return False
            self._reserved_bytes += n_bytes
            return True

    def unreserve(self, n_bytes: int) -> None:
        """Return the room of a `reserve`."""
        with self._changed:
            self._reserved_bytes -= n_bytes

    def launch(self, key: bytes, timeout_s: float) -> bool:
        """Mark a frame as flying; False if its key is still being deleted after `timeout_s`."""
        with self._changed:
            if not self._changed.wait_for(lambda: key not in self._deleting, max(0.0, timeout_s)):
                return False
            self._flying[key] = False
            return True

    def forsake(self, key: bytes) -> None:
        """Condemn the frame of that key, if one is flying, because its store is about to fail."""
        with self._changed:
            if key in self._flying:
                self.condemn([key])

    def land(self, key: bytes, fact: Fact | None, head: Header | None = None) -> None:
        """End a flight; `fact` and `head` of the frame, or None if its arrival is uncertain."""
        with self._changed:
            unwanted = self._flying.pop(key, False)
            if fact is not None and not unwanted:
                self._condemned.discard(key)
                self._shunned.discard(key)
                self._refused.discard(key)
                self._put(key, fact)
                self._note(key)
                if head is not None:
                    self._keep(head)
            self._changed.notify_all()

    # ---- deletions

    def condemn(self, keys: Iterable[bytes]) -> int:
        """Mark frames for deletion; return how many were known."""
        with self._changed:
            keys = list(keys)
            self._condemned.update(keys)
            for key in keys:
                if key in self._flying:
                    self._flying[key] = True
            self._shunned.update(keys)
            return sum(self._drop(key) for key in keys)

    def take_condemned(self, most: int) -> list[bytes]:
        """Take keys to delete now, none of them flying; `end_deletion` must follow."""
        with self._changed:
            keys = [key for key in self._condemned if key not in self._flying][:most]
            self._deletes(keys)
            return keys

    def seize(self, keys: Collection[bytes], timeout_s: float) -> bool:
        """Take these keys to delete now, as soon as none is flying or being deleted.

        Frames that landed since their condemnation are condemned with them: they are going to be
        deleted, and would be known all the same. `end_deletion` must follow.

        Returns:
            False if it takes longer than `timeout_s`.
        """
        names = set(keys)
        with self._changed:
            if not self._changed.wait_for(
                lambda: not names & self._deleting and names.isdisjoint(self._flying),
                max(0.0, timeout_s),
            ):
                return False
            self.condemn(names)  # frames that landed since the first condemnation
            self._deletes(names)
            return True

    def _hidden(self, key: bytes) -> bool:
        return any(key in keys for keys in (self._condemned, self._deleting, self._refused))

    def _deletes(self, keys: Collection[bytes]) -> None:
        self._condemned.difference_update(keys)
        self._deleting.update(keys)

    def end_deletion(self, keys: Iterable[bytes], *, gone: bool) -> None:
        """Record that the engine deleted the keys, or failed to: then they are condemned again."""
        with self._changed:
            self._deleting.difference_update(keys)
            if gone:
                self._deletions += 1
                for key in keys:
                    self._gone.pop(key, None)
                    self._gone[key] = self._deletions
                while len(self._gone) > MOST_GONE:
                    self._forgotten = self._gone.pop(next(iter(self._gone)))
                again = [key for key in keys if key not in self._condemned]
                self._shunned.difference_update(again)
                self._refused.difference_update(again)
            else:
                self._condemned.update(keys)
            self._changed.notify_all()

    def _drop(self, key: bytes) -> bool:
        fact = self._facts.pop(key, None)
        self._heads.pop(key, None)
        if fact is not None:
            self.used_bytes -= fact.n_bytes
        return fact is not None

    def _note(self, key: bytes) -> None:
        if self.fresh is not None:
            self.fresh.append((key, self._facts[key]))

    def _keep(self, head: Header) -> None:
        self._heads[head.key] = head
        if len(self._heads) > MOST_HEADS:
            self._heads.popitem(last=False)

    def _put(self, key: bytes, fact: Fact) -> None:
        before = self._facts.get(key)
        if before is None and len(self._facts) >= self._most:
            self._drop(next(iter(self._facts)))
        self.used_bytes += fact.n_bytes - (before.n_bytes if before else 0)
        self._facts[key] = fact


# Calls that may hang, each on a thread of its own, with a time limit for the caller.

Result = TypeVar("Result")


class Aside:
    """Runner of calls on threads of their own; few may hang at a time, further ones are refused.

    Args:
        name: Name of the threads.
        most: Most calls under way, abandoned ones included.
    """

    def __init__(self, name: str, most: int = 4) -> None:
        self._name, self._free = name, threading.Semaphore(most)

    def call(self, work: Callable[[], Result], timeout_s: float) -> Result:
        """Return the result of `work`.

        Raises:
            TimeoutError: It takes longer, or too many calls hang.
            OSError: As `work` does, whatever it raises; or no thread can start.
        """
        if not self._free.acquire(blocking=False):
            raise TimeoutError("earlier calls to the engine still hang")
        answer: Future[Result] = Future()
        if begin(self._run, work, answer, name=f"flowkv {self._name}") is None:
            self._free.release()
            raise OSError("no thread can start")
        if not wait([answer], timeout_s).done:
            raise TimeoutError(f"the engine did not answer within {timeout_s:g} s")
        return answer.result()

    def _run(self, work: Callable[[], Result], answer: Future[Result]) -> None:
        give: Callable[[], None]
        try:
            give = partial(answer.set_result, work())
        except BaseException as error:  # a client library may raise anything
            other = OSError(f"{type(error).__name__}: {error}")
            give = partial(answer.set_exception, error if isinstance(error, OSError) else other)
        self._free.release()  # first, because the caller may call again once it has the answer
        give()


# Protection from an engine that may be slow, flapping, hung or gone.
#
# A `Breaker` stops the use of an engine that failed too often; `attempt` retries, with jitter,
# inside the one deadline of an operation and never beyond; `OperationRates` measures the speed of
# the engine, so that an engine with too little time is not blamed.

FAILURES = 3
"""Consecutive failures that open a breaker."""

ANSWERS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Failures of an engine that works: it has no room, for any object or for one so large."""
REFUSED = (*ANSWERS, errno.EAGAIN, errno.EACCES, errno.EPERM, errno.ENOENT, errno.EINVAL)
"""Failures of a store that the engine will not carry out late."""


class BreakerState(Enum):
    """State of a breaker: it lets through every operation, none, or one probe."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Pass:
    """Permission to use the engine once; only its first report counts."""

    __slots__ = ("_breaker", "_epoch", "_open")

    def __init__(self, breaker: Breaker, epoch: int) -> None:
        self._breaker, self._epoch, self._open = breaker, epoch, True

    def report(self, well: bool | None) -> bool:
        """Report success, failure or None (undecided); return whether this opened the breaker."""
        return self._breaker._report(self, well)


class Breaker:
    """Circuit breaker: opens after consecutive failures, refuses for a pause, then tries a probe.

    Each failed probe doubles the pause; a probe that succeeds closes the breaker. Reports of
    operations that began before the breaker opened are ignored as outdated.

    Args:
        clock: Source of time.
        pause_s: First pause.
        most_pause_s: Longest pause.
    """

    def __init__(self, clock: Clock, *, pause_s: float = 0.5, most_pause_s: float = 15.0) -> None:
        self._clock, self._first_pause_s, self._most_pause_s = clock, pause_s, most_pause_s
        self._lock = threading.Lock()
        self._failures, self._epoch, self._pause_s = 0, 0, pause_s
        self._opened_ns: int | None = None
        self._probe: Pass | None = None
        self.trips = 0

    @property
    def state(self) -> BreakerState:
        """Return the state at this moment."""
        with self._lock:
            return self._state()

    def enter(self) -> Pass | None:
        """Return permission to use the engine, or None. The caller must report its outcome."""
        with self._lock:
            state = self._state()
            if state is BreakerState.OPEN:
                return None
            leave = Pass(self, self._epoch)
            if state is BreakerState.HALF_OPEN:
                self._probe = leave
            return leave

    def ready(self) -> bool:
        """Return whether `enter` would give permission now."""
        return self.state is not BreakerState.OPEN

    def _state(self) -> BreakerState:
        if self._opened_ns is None:
            return BreakerState.CLOSED
        waited_s = (self._clock.now_ns() - self._opened_ns) / 1e9
        if waited_s < self._pause_s or self._probe is not None:
            return BreakerState.OPEN
        return BreakerState.HALF_OPEN

    def _report(self, leave: Pass, well: bool | None) -> bool:
        with self._lock:
            if not leave._open:
                return False
            leave._open = False
            if leave is self._probe:
                self._probe = None
                if well:
                    self._opened_ns, self._failures = None, 0
                    self._pause_s = self._first_pause_s
                elif well is False:
                    self._pause_s = min(2 * self._pause_s, self._most_pause_s)
                    self._opened_ns = self._clock.now_ns()
                return False
            if leave._epoch != self._epoch or well is None:
                return False
            self._failures = 0 if well else self._failures + 1
            if self._failures < FAILURES:
                return False
            self._epoch += 1
            self.trips += 1
            self._opened_ns = self._clock.now_ns()
            return True


def attempt(
    call: Callable[[float], Result],
    left_s: Callable[[], float],
    *,
    tries: int = 4,
    pause_s: float = 0.01,
    jitter: random.Random | None = None,
    sleep: Callable[[float], object] = time.sleep,
) -> Result:
    """Call until it works, with growing random pauses; never start again without time left.

    Args:
        call: Gets its time limit in seconds. `PermissionError` and `ANSWERS` are final, like all
            but `OSError`.
        left_s: Returns the seconds left of the operation's deadline.
        tries: Most calls.
        pause_s: Longest pause before the second call; doubled for each further one.
        jitter: Source of the pauses' lengths.
        sleep: Waits.

    Raises:
        OSError: The last failure; `TimeoutError` if there was no time for a call.
    """
    draw = (jitter or random).random
    for number in range(tries):
        if (left := left_s()) <= 0:
            raise TimeoutError("the deadline passed before the engine was asked")
        try:
            return call(left)
        except PermissionError:
            raise
        except OSError as error:
            wait_s = draw() * pause_s * 2**number
            if number + 1 == tries or error.errno in ANSWERS or wait_s >= left_s():
                raise
            sleep(wait_s)
    raise AssertionError("unreachable")  # pragma: no cover


class OperationRates:
    """Latency and bandwidth of single operations, measured online.

    Operations of n bytes are taken to last `latency + n / bandwidth` seconds. Small ones update the
    latency and large ones, less the latency, the bandwidth: both as moving averages over the last
    few dozen operations.

    Attributes:
        latency_s: Seconds of an operation without bytes.
        s_per_byte: Added seconds per byte, in a single large operation while others may be under
            way.
    """

    SMALL_BYTES = 16 << 10

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.latency_s, self.s_per_byte = 0.005, 1e-8  # assumed before the first measurement
        self._small, self._large = 0, 0

    def add_sample(self, n_bytes: int, seconds: float) -> None:
        """Record one successful operation."""
        with self._lock:
            if n_bytes <= self.SMALL_BYTES:
                self._small += 1
                self.latency_s += (seconds - self.latency_s) * max(1 / self._small, 1 / 16)
            else:
                moving_s = max(seconds - self.latency_s, seconds / 8)
                self._large += 1
                change = moving_s / n_bytes - self.s_per_byte
                share = max(1 / self._large, 1 / 16)
                self.s_per_byte = max(1e-12, self.s_per_byte + change * share)

    def expected_s(self, n_bytes: int) -> float:
        """Return the expected duration of an operation of so many bytes."""
        return self.latency_s + n_bytes * self.s_per_byte


DAMAGED = ("digest", "key", "foreign", "truncated")
LEAST_BLAMED_S = 0.02
"""Least time limit with which an engine is blamed for a timeout."""
TRIES = 4
ASK_S = 0.045
"""Longest wait for the engine in a look-up of keys; a `Tier.contains` has 50 ms."""
ABSENT_S = 1.0
"""Pause before a missing key, or a silent engine, is asked again."""
MOST_ABSENT = 1 << 14
DELETES = 1000
LISTED = 1000
LATE_NS = round(AGAIN_S * 1e9)


class RemoteTier(Handle):
    """`Tier` over an engine that others run and share.

    A load is received and checked in a thread's own memory and copied to its target last; a store
    is copied before it is sent. So a call that hangs is abandoned at its deadline without touching
    the caller's memory. After three failures in a row the breaker opens: items are `FAILED` with
    reason "breaker" at once, and an occasional probe finds out whether the engine is back.

    A frame left there by a store that `FAILED` for its time is not found, and is deleted; after
    another failure it may be found later, whole, or not at all. A damaged frame is a `MISS`; this
    process does not ask for it again before storing it anew.

    Args:
        backend: The engine.
        capacity_bytes: Most bytes of frames that this process knows of there.
        name: Shown in statistics; default the backend's.
        envelope: Seals and checks frames; default xxh3 and nothing else.
        clock: Source of time.
        limits: Limits of concurrency, memory and time; default `usual`.

    Attributes:
        known: Index of the frames expected there.
        corrupt: Frames found damaged since the tier was opened.
        reading: Speed of single loads.
        writing: Speed of single stores.

    Raises:
        ConfigError: The capacity is too small.
        StoreError: The engine refuses access; a silent one only causes a warning.
    """

    kind = "remote"
    writable = True
    shared = True
    usual = RemoteLimits()
    _remedy = "Open it again, here"

    def __init__(
        self,
        backend: Backend,
        capacity_bytes: int = UNBOUNDED,
        *,
        name: str = "",
        envelope: Envelope | None = None,
        clock: Clock | None = None,
        limits: RemoteLimits | None = None,
    ) -> None:
        if capacity_bytes < 1:
            raise ConfigError(f"a remote tier has {capacity_bytes} bytes", "Give it a few pages")
        name = name or backend.name
        self.capacity_bytes = capacity_bytes
        self.backend, self.limits = backend, limits or self.usual
        self.envelope, self._clock = envelope or Envelope(), clock or compiling.SystemClock()
        self.known, self.corrupt = Known(), 0
        self.reading, self.writing = OperationRates(), OperationRates()
        self._breaker = Breaker(self._clock, pause_s=self.limits.pause_s)
        self._begun: dict[Item, tuple[Pass, int]] = {}
        self._workers = Workers(
            name,
            self._work,
            self._clock,
            threads=self.limits.threads,
            queue_bytes=self.limits.queue_bytes,
            spares=self.limits.spares,
            storing=max(1, self.limits.threads // 2),
            late=self._late,
            forsake=lambda item: self.known.forsake(item.key),
        )
        super().__init__(name, self._workers.answers)
        self._aside = Aside(name)
        self._absent: dict[bytes, int] = {}
        self._quiet_until_ns, self._looked_ns = 0, self._clock.now_ns()
        self._doubtful: dict[bytes, int] = {}  # times of stores that failed, and may arrive late
        self._unproven = set[bytes]()  # keys of erasures that failed
        self._closing, self._wake = threading.Lock(), threading.Event()
        self._listed: Future[None] = Future()
        compiling.watch()  # imports numba, which must not begin in two threads at a time
        self._keeper = started(self._keep, name=f"flowkv {self.name}")
        self._begin()

    @property
    def state(self) -> BreakerState:
        """Return the present state of the breaker."""
        return self._breaker.state

    @property
    def trips(self) -> int:
        """Return how often the breaker opened."""
        return self._breaker.trips

    @cached_property
    def erasure_log(self) -> RemoteErasures:
        """Return the log of erasures by caches of all nodes; made at first use."""
        log = RemoteErasures(self.backend, self._aside.call, self.limits.call_s, self._clock)
        log.mark_seen()
        return log

    @property
    def retired_bytes(self) -> int:
        """Return the bytes of memory of hanging calls."""
        return self._workers.retired_bytes

    def bind(self, namespace: bytes, name: str) -> None:
        """Start a thread for a cache, which may use this tier until the process ends."""
        if self._usable():
            self._workers.start()

    def used_bytes(self) -> int:
        """Return the bytes of the frames that this process knows of."""
        return self.known.used_bytes if self._usable() else 0

    def frame_bytes(self, body_bytes: int) -> int:
        """Return an upper bound of the bytes of such a frame."""
        return self.envelope.most_bytes(body_bytes)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which keys are known; ask the engine for some of the others, for 50 ms at most.

        While the breaker is open, all keys are False.
        """
        if not self._usable() or not self._ready():
            return [False] * len(keys)
        unknown = [key for key in keys if self.known.get(key) is None]
        if unknown and self.backend.asks:
            self._ask(unknown)
        return [self.known.usable(key) for key in keys]

    def poll(self, timeout_s: float = 0.0) -> list[TierAnswer]:
        """Return the answers that are ready; wait up to `timeout_s` for the first one."""
        return self._workers.poll(timeout_s) if self._pid == os.getpid() else []

    def cancel(self, job: int) -> None:
        """Cancel the items of a job that are not about to be answered."""
        self._workers.cancel(job)

    def delete(self, keys: Sequence[bytes]) -> int:
        """Forget frames at once; the engine deletes them in the background, until it confirms."""
        if not self._usable():
            return 0
        gone = self.known.condemn(keys)
        self._wake.set()
        return gone

    def erase(self, keys: Sequence[bytes]) -> int:
        """Remove frames from the engine, and verify with it that they are gone.

        Those of earlier calls that failed are removed, too: until that is proven, each call fails.

        Raises:
            StoreError: The engine did not confirm it.
        """
        if not self._usable():
            raise StoreError(f"tier {self.name!r} is closed", "Open it again and erase then")
        self._unproven.update(keys)
        keys = [*self._unproven]
        limit_s, known = self.limits.erase_s * (1 + len(keys) / DELETES), self.known
        strange = [key for key in keys if known.get(key) is None and not known.is_shunned(key)]
        gone = self.known.condemn(keys)
        problem = f"{self.name} did not confirm that {len(keys)} frames are gone"
        with stating(problem, "Erase again when the engine answers, or delete the frames there"):
            if keys:
                gone += self._aside.call(lambda: self._remove(keys, strange, limit_s), limit_s)
            self._sweep()
            since_ns = self._clock.now_ns() - LATE_NS
            if late := sum(self._doubtful.get(key, since_ns) > since_ns for key in keys):
                raise OSError(f"{late} failed stores may arrive until {AGAIN_S:g} s are over")
            self._unproven.difference_update(keys)
        return gone

    def scan(self) -> Iterator[Entry]:
        """Yield all known frames, oldest store first; read unseen headers before, for a while."""
        if not self._usable():
            return
        self._describe(self.limits.open_s)
        yield from self._entries()

    def _entries(self) -> Iterator[Entry]:
        for key, fact in self.known.facts():
            if fact.info is not None:
                yield Entry(key, fact.info, fact.n_bytes)

    def survey(self) -> None:
        """Look anew for frames of other writers, so that `scan` omits none that is there now.

        Raises:
            StoreError: The engine did not list everything, or headers could not be read.
        """
        with stating(f"{self.name} cannot list its frames", "Try again when it answers"):
            self._aside.call(self.refresh, self.limits.erase_s)
            self._aside.call(lambda: self._list({}), self.limits.erase_s)
            self._describe(self.limits.erase_s)
            unseen = sum(fact.info is None for _, fact in self.known.facts())
            if unseen or len(self.known) >= MOST_KNOWN:
                raise OSError(f"the headers of {unseen or 'some'} frames could not be read")

    def close(self) -> None:
        """Work off all queued items, as long as the engine answers, and close the engine."""
        if self._pid != os.getpid():
            return
        with self._closing:
            if self._closed:
                return
            if not self._ready():
                self._workers.fail_waiting("breaker")
            ended = self._workers.close(self.limits.close_s)
            self._closed = True
            self._wake.set()
            self._keeper.join(self.limits.close_s if self._ready() else 0.1)
            if ended and not self._keeper.is_alive():
                self.backend.close()  # otherwise a call still uses it

    # ---- background work

    def recall(self) -> dict[bytes, Fact]:
        """Return recorded facts about frames, some of which may be gone: called before a listing.

        Raises:
            OSError: The engine failed.
        """
        return {}

    def learn(self) -> None:
        """Add all frames in the engine to the index.

        Raises:
            OSError: The engine failed.
        """
        self._list(self.recall())

    def _list(self, told: dict[bytes, Fact]) -> None:
        facts: list[tuple[bytes, Fact]] = []
        look = self.known.look()
        for name, n_bytes, stored_ns in islice(self.backend.list(self.limits.call_s), MOST_KNOWN):
            key = bytes.fromhex(name)
            fact = told.get(key)
            if fact is None or fact.n_bytes != n_bytes:  # a fact of an earlier frame of that key
                fact = Fact(n_bytes, None, stored_ns)
            facts.append((key, fact))
            if len(facts) == LISTED:
                self.known.merge(facts, look)
                facts.clear()
                self._hear()
            if self._closed:
                break
        self.known.merge(facts, look)

    def refresh(self) -> None:
        """Look for frames of other writers, where that is cheap; called every `every_s` seconds.

        Raises:
            OSError: The engine failed.
        """

    def flush(self) -> None:
        """Record facts for the next opening; called soon after stores and at the end.

        Raises:
            OSError: The engine failed.
        """

    def _begin(self) -> None:
        if not wait([self._listed], self.limits.open_s).done:
            return  # a long listing goes on in the background
        error = self._listed.exception()
        if isinstance(error, PermissionError):
            self._closed = True
            self._wake.set()
            said = f"{self.name} refuses access ({error})"
            remedy = "Check the address, the credentials and their rights"
            if error.errno == errno.ENOENT:
                said = f"{self.name}: {error.strerror}"
                remedy = "Create it, or correct its name, the region and the endpoint"
            raise StoreError(said, remedy) from error
        if error is not None:
            warnings.warn(
                f"{self.name} does not answer ({error}): it will be tried again",
                UserWarning,
                stacklevel=3,
            )

    def _keep(self) -> None:
        """Run the tier's own thread: list, then delete, look for news and record."""
        learn = self.learn
        try:
            self.learn()
            learn = self.refresh
            self._listed.set_result(None)
        except BaseException as error:  # a client library may raise anything
            self._listed.set_exception(error)
        while not self._closed:
            self._wake.wait(min(self.limits.every_s, 1.0))
            self._wake.clear()
            if self._closed or not self._ready():
                continue
            news = (self._agree, learn) if self._due() else ()
            for work in (*news, self._delete_condemned, self.flush):
                with contextlib.suppress(BaseException):  # loads and stores find it themselves
                    work()
                    learn = self.refresh if work == self.learn else learn
        if self._ready():
            with contextlib.suppress(BaseException):
                self._delete_condemned()
                self.flush()

    def _agree(self) -> None:
        """Read erasures by others, and repeat erasures for stores that ended late."""
        since_ns = self._clock.now_ns() - LATE_NS
        for key in [key for key, at_ns in [*self._doubtful.items()] if at_ns <= since_ns]:
            self._doubtful.pop(key)
        if "erasure_log" not in vars(self):  # no cache has used it
            return
        self.erasure_log.look()
        self.erasure_log.repeat(self._erase_again)

    def _erase_again(self, erased: Iterable[Erased]) -> None:
        try:
            self.survey()
        finally:
            for one in erased:
                named = {key for key, _ in self.known.facts() if one.has(key)}
                self.known.condemn(named | one.among(self._entries()))
            self._delete_condemned()
            self._sweep()

    def _sweep(self) -> None:
        """Remove unfinished files, which no listing has: killed processes leave them behind."""
        sweep: Callable[[], None] | None = getattr(self.backend, "sweep", None)
        if sweep is not None:
            self._aside.call(sweep, self.limits.erase_s)

    def _due(self) -> bool:
        """Return True every `every_s` seconds, when news of others are to be read."""
        now_ns = self._clock.now_ns()
        due = now_ns - self._looked_ns >= self.limits.every_s * 1e9
        self._looked_ns = now_ns if due else self._looked_ns
        return due

    def _hear(self) -> None:
        """Read erasures by others within long work."""
        if "erasure_log" in vars(self) and self._due():
            with contextlib.suppress(OSError):
                self.erasure_log.look()

    def _remove(self, keys: Sequence[bytes], strange: Sequence[bytes], timeout_s: float) -> int:
        """Delete frames and verify that they are gone; return how many unknown ones were there."""
        left_s = partial(self._left_s, self._clock.now_ns() + round(timeout_s * 1e9))
        if not self.known.seize(keys, left_s()):
            raise TimeoutError("a store or a deletion of them hangs")
        gone = False
        names = [key.hex() for key in keys]
        try:
            others = [key.hex() for key in strange]
            before = attempt(partial(self.backend.exists, others), left_s) if others else []
            attempt(partial(self.backend.delete, names), left_s)
            left = sum(attempt(partial(self.backend.exists, names), left_s))
            if left:
                raise OSError(f"{left} are still there")
            gone = True
            return sum(before)
        finally:
            self.known.end_deletion(keys, gone=gone)

    def _delete_condemned(self) -> None:
        while keys := self.known.take_condemned(DELETES):
            gone = False
            try:
                self.backend.delete([key.hex() for key in keys], self.limits.call_s)
                gone = True
            finally:
                self.known.end_deletion(keys, gone=gone)
            self._hear()

    def _describe(self, limit_s: float) -> None:
        """Read the headers of frames that are known only by name."""
        missing = [pair for pair in self.known.facts() if pair[1].info is None]

        def read() -> None:
            staging = ThreadMemory()
            end_ns = self._clock.now_ns() + round(limit_s * 1e9)
            for key, fact in missing:
                try:
                    try:
                        self._header(key, staging, end_ns)
                    except BadFrame as error:
                        if error.reason not in DAMAGED:
                            raise
                        self._header(key, staging, end_ns)  # perhaps it was damaged on its way
                except BadFrame:
                    self.known.refuse(key, fact)

        if missing and self._ready():
            with contextlib.suppress(OSError):
                self._aside.call(read, limit_s)

    def _ask(self, keys: Sequence[bytes]) -> None:
        """Ask the engine for the first of some keys that it was not asked for lately."""
        now_ns, silence_ns = self._clock.now_ns(), round(ABSENT_S * 1e9)
        if now_ns < self._quiet_until_ns:
            return
        fresh = (key for key in keys if now_ns - self._absent.get(key, -silence_ns) >= silence_ns)
        asked = [key for key in fresh if not self.known.is_shunned(key)][: self.backend.asks]
        if not asked:
            return
        names, look = [key.hex() for key in asked], self.known.look()
        try:
            there = self._aside.call(lambda: self.backend.exists(names, ASK_S), ASK_S)
        except OSError:
            self._quiet_until_ns = now_ns + silence_ns
            return
        answered = list(zip(asked, there, strict=True))
        self.known.merge(((key, Fact()) for key, found in answered if found), look)
        if len(self._absent) > MOST_ABSENT:
            self._absent.clear()
        self._absent.update((key, now_ns) for key, found in answered if not found)

    # ---- transfers of one frame: in time, past the breaker, checked, counted

    def _ready(self) -> bool:
        """Return whether the engine may be called: the breaker allows it, and memory is left."""
        return self.retired_bytes <= self.limits.retired_bytes and self._breaker.ready()

    def _work(self, item: Item) -> None:
        if isinstance(item.wish, Load):
            self._load(item, item.wish)
        else:
            try:
                self._store(item, item.wish)
            except BadFrame as error:  # before any write
                self._workers.answer(item, Outcome.FAILED, error.reason)

    def _load(self, item: Item, wish: Load) -> None:
        """Read, check, and copy to the target last."""
        key, known = item.key, self.known
        if known.is_shunned(key):
            self._workers.answer(item, Outcome.MISS)
            return
        was, part = known.get(key), bool(wish.first or wish.stripes)
        for remembered in (part and known.head(key) is not None, False):
            try:
                failed = self._guarded(item, lambda: self._read(item, wish, was))
            except BadFrame as error:
                known.forget_head(key)
                if remembered and error.reason in DAMAGED:
                    # it may have been replaced: read header and stripes anew
                    self._workers.unclaim(item)
                    continue
                if error.reason in DAMAGED:
                    self.corrupt += 1
                    known.mark_missing(key, was, shun=True)
                self._workers.answer(item, Outcome.MISS, error.reason)
                return
            if failed is not None:
                self._workers.answer(item, Outcome.FAILED, failed)
            return

    def _read(self, item: Item, wish: Load, was: Fact | None) -> None:
        assert item.hand is not None
        workers, envelope, staging = self._workers, self.envelope, item.hand.staging
        end_ns, stored = item.deadline_ns, None
        if wish.first or wish.stripes:
            head = self._header(item.key, staging, end_ns)
        else:  # one call, header included: header and stripes belong together
            look = self.known.look()
            most = envelope.most_bytes(max(1, item.n_bytes))  # of a frame that fits into the target
            known_bytes = max(GRANULE_BYTES, was.n_bytes or most) if was else most
            for n_bytes in sorted({min(most, known_bytes), most}):
                stored = self._get(item.key, 0, n_bytes, staging, end_ns)
                found = envelope.head(stored, item.key) if stored is not None else None
                head = self._see(found, look) if found is not None else None
                if head is None or head.frame_bytes <= n_bytes:  # else a longer one replaced it
                    break
        if head is not None:
            accept(head, wish.key, wish.layout, wish.fidelity)
            stripes = span(head, wish.first, wish.stripes)
            n_bytes = len(stripes) * head.info.stripe_bytes
            if item.readonly or item.n_bytes < n_bytes:  # before memory is allocated
                workers.answer(item, Outcome.FAILED, "target")
                return
            offset, length = envelope.place(head, stripes.start, len(stripes))
            if stored is not None:
                stored = stored[offset:]
            else:
                stored = self._get(item.key, offset, length, staging, end_ns)
        if head is None or stored is None:
            self.known.mark_missing(item.key, was)
            workers.answer(item, Outcome.MISS)
        elif (target := workers.claim(item)) is not None:
            envelope.open(head, stored, target, stripes.start, len(stripes))
            workers.answer_all([ItemAnswer(item, Outcome.HIT, "", head.info, n_bytes)])

    def _header(self, key: bytes, staging: ThreadMemory, end_ns: int) -> Header | None:
        """Return the header of a frame, from memory or the engine; None if there is no such frame.

        Raises:
            BadFrame: It is damaged.
            OSError: The engine failed.
        """
        if (head := self.known.head(key)) is not None:
            return head
        was, look = self.known.get(key), self.known.look()
        page = self._get(key, 0, GRANULE_BYTES, staging, end_ns)
        if page is not None and (size := peek_header_bytes(page)) > len(page):
            page = self._get(key, 0, size, staging, end_ns)
        if page is None:
            self.known.mark_missing(key, was)
            return None
        return self._see(self.envelope.head(page, key), look)

    def _see(self, head: Header, look: int) -> Header:
        self.known.see(head, sum(self.envelope.place(head, 0, head.stripes)), look)
        return head

    def _store(self, item: Item, wish: Store) -> None:
        """Copy the body, then write the frame, unless it is known to be there."""
        count_stripes(item.key, wish.info, item.n_bytes)
        if self.known.usable(item.key):
            self._workers.answer(item, Outcome.STORED)
            return
        sealed = self._seal(item, wish.info)
        if sealed is None:
            return
        data, header = sealed
        if not self.known.reserve(len(data), self.capacity_bytes):
            self._workers.answer(item, Outcome.FAILED, "full")
            return
        fact = failed = None
        try:
            if not self.known.launch(item.key, self._left_s(item.deadline_ns)):
                raise BadFrame("deadline", "an earlier frame of that key is still being deleted")
            try:
                # An item given up from here on is forsaken as well: a failed store must not be
                # found.
                if item.done is None:
                    failed = self._guarded(item, lambda: self._put(item, data))
                    if failed is None:
                        self._unproven.discard(item.key)
                        fact = Fact(len(data), header.info, time.time_ns())
                in_time = self._workers.claim(item) is not None
            finally:
                self.known.land(item.key, fact, header)
        finally:
            self.known.unreserve(len(data))
        if fact is None or not in_time:
            self._wake.set()
        # last, so that with the answer the frame is found there, or its room is free again
        if in_time and fact is not None:
            stored = ItemAnswer(item, Outcome.STORED, "", None, item.n_bytes)
            self._workers.answer_all([stored])
        elif in_time:
            self._workers.answer(item, Outcome.FAILED, failed or "")

    def _seal(self, item: Item, info: FrameInfo) -> tuple[memoryview, Header] | None:
        """Return the frame in staging memory; None if the item was answered."""
        assert item.hand is not None
        n_bytes, most = item.n_bytes, self.envelope.most_bytes(item.n_bytes)
        start, stop = most - n_bytes, most  # of the body, behind the largest header
        memory = item.hand.staging(stop + (0 if self.envelope.plain else most))
        body = self._workers.claim(item)
        if body is None:
            return None
        memory[start:stop] = body
        self._workers.unclaim(item)
        known = item.wish.digests if isinstance(item.wish, Store) else None
        sealed = self.envelope.seal(item.key, info, memory[start:stop], known=known)
        if self.envelope.plain:
            begin = start - len(sealed.header)
            memory[begin:start] = sealed.header
            return memory[begin:stop], sealed.head
        return memory[stop:][: sealed.write(memory[stop:])], sealed.head

    def _put(self, item: Item, data: memoryview) -> None:
        def call(timeout_s: float) -> None:
            begun = self._clock.now_ns(), compiling.spent_ns()
            try:
                self.backend.put(item.key.hex(), data, timeout_s)
            except BaseException as error:
                if getattr(error, "errno", 0) not in REFUSED:
                    self._doubtful[item.key] = self._clock.now_ns()
                raise
            self._learn(self.writing, len(data), begun, timeout_s)

        attempt(call, partial(self._left_s, item.deadline_ns), tries=self._tries())

    def _get(
        self, key: bytes, offset: int, n_bytes: int, staging: ThreadMemory, end_ns: int
    ) -> memoryview | None:
        def call(timeout_s: float) -> memoryview | None:
            begun = self._clock.now_ns(), compiling.spent_ns()
            found = self.backend.get(key.hex(), offset, staging(n_bytes), timeout_s)
            if found is not None:
                self._learn(self.reading, len(found), begun, timeout_s)
            return found

        return attempt(call, partial(self._left_s, end_ns), tries=self._tries())

    def _learn(
        self, rates: OperationRates, n_bytes: int, begun: tuple[int, int], timeout_s: float
    ) -> None:
        took_s = (self._clock.now_ns() - begun[0]) / 1e9
        # A call that hung, or ran beside a compiler, is no measure of the engine's speed.
        if took_s <= timeout_s and compiling.spent_ns() == begun[1]:
            rates.add_sample(n_bytes, took_s)

    def _tries(self) -> int:
        return TRIES if self.state is BreakerState.CLOSED else 1

    def _left_s(self, end_ns: int) -> float:
        return (end_ns - self._clock.now_ns()) / 1e9

    def _guarded(self, item: Item, work: Callable[[], None]) -> str | None:
        """Run an engine operation; return None on success, else the reason for the answer."""
        leave = self._breaker.enter() if self._ready() else None
        if leave is None:
            return "breaker"
        self._begun[item] = leave, self._clock.now_ns()
        well: bool | None = True
        try:
            work()
        except OSError as error:
            well = self._blames(item, error)
            if item.hand is not None:  # a library may still use it
                item.hand.staging.give_up()
            self._report(leave, well)  # first, so that the caller finds the breaker in this state
            if item.stores and isinstance(error, TimeoutError):  # it may be there all the same
                self.known.forsake(item.key)
            return reason_of(error)
        except BadFrame:
            raise  # not the engine's fault
        except BaseException:
            well = None
            raise
        finally:
            self._report(leave, well)
            # only now, because until it is reported, `_late` may report it
            self._begun.pop(item, None)
        return None

    def _late(self, item: Item) -> None:
        """Blame the engine for an item unfinished at its deadline, if it had enough time."""
        begun = self._begun.get(item)
        if begun is not None:
            self._report(begun[0], self._blames(item, None))

    def _blames(self, item: Item, error: OSError | None) -> bool | None:
        """Return whether the engine works nevertheless; None if it had too little time."""
        if error is not None and error.errno in ANSWERS:
            return True
        begun = self._begun.get(item)
        if isinstance(error, TimeoutError | None) and begun is not None:
            rates = self.writing if item.stores else self.reading
            took_s = (self._clock.now_ns() - begun[1]) / 1e9
            enough_s = max(LEAST_BLAMED_S, rates.expected_s(item.n_bytes))
            return False if took_s >= enough_s else None
        return False

    def _report(self, leave: Pass, well: bool | None) -> None:
        if leave.report(well):
            self._workers.fail_waiting("breaker")

    def _run(self, items: Sequence[Load] | Sequence[Store], deadline_s: float) -> int:
        self._require_usable()
        return self._workers.submit(items, deadline_s)


def reason_of(error: OSError) -> str:
    """Return one word for an error of an engine."""
    if isinstance(error, TimeoutError):
        return "deadline"
    code = error.errno
    if isinstance(code, int) and code == errno.ENOSPC:
        return "full"
    return errno.errorcode.get(code, "") if isinstance(code, int) else type(error).__name__
