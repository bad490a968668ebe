"""What stands between FlowKV and an engine that may be slow, flapping, hung or gone.

A `Breaker` leaves an engine alone that failed too often; `attempt` retries, with jitter, inside the
one deadline of an operation and never beyond; `Rates` learns how fast the engine is, for those who
plan loads and choose deadlines.
"""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Callable
from enum import Enum
from typing import TypeVar

from flowkv.core.clock import Clock

Result = TypeVar("Result")

FAILURES = 3
"""Consecutive failures that open a breaker."""

ANSWERS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Failures of an engine that works: it has no room, for anything or for something so large."""

GRACE_S = 0.05
"""Least deadline that `Rates` proposes."""


class State(Enum):
    """What a breaker lets through: everything, nothing, or one operation that finds out."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Pass:
    """Leave to use the engine once; its first report counts, and only the first."""

    __slots__ = ("_breaker", "_epoch", "_open")

    def __init__(self, breaker: Breaker, epoch: int) -> None:
        self._breaker, self._epoch, self._open = breaker, epoch, True

    def report(self, well: bool | None) -> bool:
        """Says how it went (None: nothing can be said); whether this opened the breaker."""
        return self._breaker._report(self, well)


class Breaker:
    """Counts consecutive failures; open, it refuses until a pause is over, then tries one probe.

    Each failed probe doubles the pause; a probe that succeeds closes the breaker. Reports of
    operations that began before the breaker opened say nothing about now and are ignored.

    Args:
        clock: Source of time.
        failures: Consecutive failures that open it.
        pause_s: First pause.
        most_pause_s: Longest pause.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        failures: int = FAILURES,
        pause_s: float = 0.5,
        most_pause_s: float = 15.0,
    ) -> None:
        self._clock, self._most_failures = clock, failures
        self._first_pause_s, self._most_pause_s = pause_s, most_pause_s
        self._lock = threading.Lock()
        self._failures, self._epoch, self._pause_s = 0, 0, pause_s
        self._opened_ns: int | None = None
        self._probe: Pass | None = None
        self.trips = 0

    @property
    def state(self) -> State:
        """What it lets through now."""
        with self._lock:
            return self._state()

    def enter(self) -> Pass | None:
        """Leave to use the engine, or None. Who gets it must report."""
        with self._lock:
            state = self._state()
            if state is State.OPEN:
                return None
            leave = Pass(self, self._epoch)
            if state is State.HALF_OPEN:
                self._probe = leave
            return leave

    def ready(self) -> bool:
        """Whether `enter` would give leave now."""
        return self.state is not State.OPEN

    def _state(self) -> State:
        if self._opened_ns is None:
            return State.CLOSED
        waited_s = (self._clock.now_ns() - self._opened_ns) / 1e9
        if waited_s < self._pause_s or self._probe is not None:
            return State.OPEN
        return State.HALF_OPEN

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
            if self._failures < self._most_failures:
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
    """Calls until it works, with growing random pauses; never starts again without time left.

    Args:
        call: Gets the seconds it may take. `PermissionError` and `ANSWERS` are final, like all but
            `OSError`.
        left_s: Seconds left of the operation's deadline.
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


class Rates:
    """Latency and bandwidth of single operations, learnt online.

    Operations of n bytes are taken to last `latency + n / bandwidth` seconds. Small ones teach the
    latency and large ones, less the latency, the bandwidth: both as moving averages in which the
    last few dozen operations count.

    Args:
        latency_s: Assumed before anything was seen.
        bandwidth_bytes_per_s: Assumed before anything was seen.
    """

    SMALL_BYTES = 16 << 10

    def __init__(self, *, latency_s: float = 0.005, bandwidth_bytes_per_s: float = 100e6) -> None:
        self._lock = threading.Lock()
        self._latency_s, self._s_per_byte = latency_s, 1 / bandwidth_bytes_per_s
        self._latencies, self._bandwidths = 0, 0

    @property
    def latency_s(self) -> float:
        """Seconds of an operation without bytes."""
        return self._latency_s

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Bytes per second of a single large operation, while others may be under way."""
        return 1 / self._s_per_byte

    def note(self, n_bytes: int, seconds: float) -> None:
        """One operation that worked."""
        with self._lock:
            if n_bytes <= self.SMALL_BYTES:
                self._latencies += 1
                self._latency_s += (seconds - self._latency_s) * _weight(self._latencies)
            else:
                moving_s = max(seconds - self._latency_s, seconds / 8)
                self._bandwidths += 1
                change = moving_s / n_bytes - self._s_per_byte
                self._s_per_byte = max(1e-12, self._s_per_byte + change * _weight(self._bandwidths))

    def expected_s(self, n_bytes: int) -> float:
        """How long an operation of so many bytes will take."""
        return self._latency_s + n_bytes * self._s_per_byte

    def deadline_s(self, n_bytes: int) -> float:
        """A deadline for it that a healthy engine meets: grace, and twice what is expected."""
        return GRACE_S + 2 * self.expected_s(n_bytes)


def _weight(seen: int) -> float:
    return max(1 / seen, 1 / 16)
