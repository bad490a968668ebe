"""An engine in this process that fails as engines do, when it is told to."""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flowkv.tiers.remote.tier import RemoteTier
from tests.clock import wait_for
from tests.inside import CHANGED, Listed, ManualClock

from ..frames import get, hits, outcomes, put

ERASED = "erased"
Fault = Callable[[str, bytes], bytes]
PATIENCE_S = 20.0


class FaultyBackend:
    """A dict of objects; `plan` has the faults of the next calls of each kind, first one first.

    Faults: "error" (connection refused), "refuse" (no permission), "late" (its time passes, then a
    `TimeoutError`), "hang" (beyond its time, until `release`, then what was asked), "lost reply"
    (done, then an error), "truncate", "corrupt" (a bit), "garbage" (another object's bytes), "slow"
    (a tenth of its time), "ignore" (a deletion that is confirmed and not done), "panic" (no
    `OSError`). `always` is what happens when the plan has nothing. Each name of a listing takes
    `pauses_s`. With a `clock`, what is late moves that and does not wait.
    """

    name = "faulty"

    def __init__(self, asks: int = 100, seed: int = 0) -> None:
        self.asks, self.objects, self.stored = asks, {}, {}
        self.plan: dict[str, list[str]] = {}
        self.always: dict[str, str] = {}
        self.after: dict[str, str] = {}
        self.calls: list[tuple[str, int]] = []
        self.closed = False
        self.clock: ManualClock | None = None
        self.hanging, self.pauses_s = 0, 0.0
        self._random, self._gate, self._lock = (
            random.Random(seed),
            threading.Event(),
            threading.Lock(),
        )
        self.objects: dict[str, bytes]
        self.stored: dict[str, int]

    def release(self) -> None:
        """Lets hanging calls go on, and nothing fails any more."""
        self.always.clear()
        self.plan.clear()
        self._gate.set()
        self._gate = threading.Event()

    def count(self, kind: str) -> int:
        return sum(called == kind for called, _ in self.calls)

    def get(self, name: str, offset: int, into: memoryview, timeout_s: float) -> memoryview | None:
        fault = self._suffer("get", timeout_s)
        data = self.objects.get(name)
        if self.after.pop("get", "") == "hang":  # with an answer that grows old
            self._hang()
        if data is None:
            return None
        piece = bytearray(data[offset : offset + len(into)])
        if fault == "truncate":
            del piece[len(piece) // 2 :]
        elif fault == "corrupt":
            bit = self._random.randrange(8 * len(piece))
            piece[bit // 8] ^= 1 << bit % 8
        elif fault == "garbage":
            others = [other for key, other in self.objects.items() if key != name]
            piece = bytearray((others or [bytes(len(piece))])[0][offset : offset + len(piece)])
        into[: len(piece)] = piece
        self._lose(fault)
        return into[: len(piece)]

    def put(self, name: str, data: memoryview, timeout_s: float) -> None:
        fault = self._suffer("put", timeout_s)
        with self._lock:
            self.objects[name] = bytes(data)
            self.stored[name] = time.time_ns()
        if self.after.pop("put", "") == "hang":
            self._hang()
        self._lose(fault)

    def swap(self, name: str, was: bytes | None, data: memoryview, timeout_s: float) -> None:
        if self.objects.get(name) != was:
            raise OSError(errno.EBUSY, CHANGED)
        self.put(name, data, timeout_s)

    def delete(self, names: Sequence[str], timeout_s: float) -> None:
        fault = self._suffer("delete", timeout_s)
        for name in names if fault != "ignore" else ():
            self.objects.pop(name, None)
        self._lose(fault)

    def exists(self, names: Sequence[str], timeout_s: float) -> list[bool]:
        self._suffer("exists", timeout_s)
        return [name in self.objects for name in names]

    def list(self, timeout_s: float) -> Iterator[Listed]:
        self._suffer("list", timeout_s)
        found = list(self.objects.items())
        if self.after.pop("list", "") == "hang":
            self._hang()
        for name, data in found:
            if len(name) != 64:  # no frame, see `Backend.list`
                continue
            time.sleep(self.pauses_s)
            yield Listed(name, len(data), self.stored.get(name, 0))

    def close(self) -> None:
        self.closed = True

    def _suffer(self, kind: str, timeout_s: float) -> str:
        with self._lock:
            self.calls.append((kind, threading.get_ident()))
            plan = self.plan.get(kind)
            fault = plan.pop(0) if plan else self.always.get(kind, "")
        if fault == "error":
            raise ConnectionRefusedError(111, "connection refused")
        if fault == "refuse":
            raise PermissionError(13, "access denied")
        if fault == "late":
            self.clock.advance(s=timeout_s) if self.clock else time.sleep(timeout_s)
            raise TimeoutError("the engine did not answer")
        if fault == "panic":
            raise LookupError("of the client library")
        if fault == "slow":
            time.sleep(timeout_s / 10)
        if fault == "hang":
            self._hang()
        return fault

    def _hang(self) -> None:
        gate = self._gate
        self.hanging += 1
        assert gate.wait(PATIENCE_S)
        self.hanging -= 1

    def _lose(self, fault: str) -> None:
        if fault == "lost reply":
            raise ConnectionResetError(104, "connection reset")


def swaps(backend: Any, was: bytes | None, data: memoryview) -> bool:
    try:
        backend.swap(ERASED, was, data, 5.0)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        return False
    return True


def check_late_start(tier: RemoteTier, server: Any) -> None:
    """Nothing is found before a server starts; then the tier finds it by itself."""
    try:
        assert outcomes(get(tier, [1]))[0][0] == "failed"
        server.start()
        wait_for(lambda: outcomes(put(tier, [1])) == [("stored", "")])
        assert hits(tier, [1]) == 1
    finally:
        tier.close()
        server.stop()


def check_swap(backend: Any) -> None:
    """A write from what was read before another write changes nothing."""
    one, two, room = memoryview(b"one"), memoryview(b"22"), memoryview(bytearray(9))
    assert not swaps(backend, b"one", two)
    assert swaps(backend, None, one) and not swaps(backend, None, two)
    assert not any(swaps(backend, other, two) for other in (b"", b"on", b"ono", b"onee"))
    assert backend.get(ERASED, 0, room, 5.0) == b"one"
    assert swaps(backend, b"one", two) and not swaps(backend, b"one", one)
    assert backend.get(ERASED, 0, room, 5.0) == b"22"


def steady(tier: RemoteTier) -> RemoteTier:
    """A tier whose breaker stays closed: a busy test machine is late like a hung engine."""
    tier._breaker._most_failures = 1 << 30
    return tier
