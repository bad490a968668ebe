"""An engine that is late, out of order, or silent, on a clock that somebody else moves."""

from __future__ import annotations

import contextlib
import errno
import random

import numpy as np
from numpy.typing import NDArray

from flowkv.core.clock import Clock
from flowkv.testing.simulation.disk import SimulatedFiles
from flowkv.tiers.io.engine import COMPLETION, OPERATION, WRITE, Completions, Operations
from flowkv.tiers.io.files import FilesEngine, memory

NEVER_NS = 1 << 62
_CANCELLED = 1000


class SimulatedEngine:
    """An `Engine` whose operations take effect when they complete, some day, in any order.

    So memory that is used again too early is read or written too late, and a tier that trusts its
    deadline instead of the engine is caught.

    Args:
        files: The disk.
        chance: Source of every delay.
        clock: Time.

    Attributes:
        latency_s: Longest delay of an operation.
        hang: Probability that one waits for `revive`.
    """

    name = "simulated"
    direct = False
    depth = 64

    def __init__(self, files: SimulatedFiles, chance: random.Random, clock: Clock) -> None:
        self.files, self.chance, self.clock = files, chance, clock
        self.latency_s, self.hang = 0.002, 0.0
        self._inner = FilesEngine(files)
        self._pending: list[tuple[int, tuple[int, ...]]] = []
        self._gone = False

    def open(self, path: str, *, write: bool) -> int:
        """Opens a file."""
        return self.files.open(path, write=write)

    def submit(self, operations: Operations) -> None:
        """Puts operations off."""
        now = self.clock.now_ns()
        for row in operations.tolist():
            late = round(self.chance.random() * self.latency_s * 1e9)
            due = NEVER_NS if self.chance.random() < self.hang else now + late
            self._pending.append((due, row))

    def wait(self, timeout_s: float = 0.0, *, least: int = 1) -> Completions:
        """Does what is due; never waits, because time stands still meanwhile."""
        now = self.clock.now_ns()
        ready = [row for due, row in self._pending if due <= now]
        self._pending = [each for each in self._pending if each[0] > now]
        self.chance.shuffle(ready)
        return self._do(ready)

    def cancel(self, tags: NDArray[np.uint64]) -> None:
        """Half of the operations listen, and are then reported as cancelled."""
        wanted, now = set(tags.tolist()), self.clock.now_ns()
        for number, (due, row) in enumerate(self._pending):
            if row[-1] in wanted and self.chance.random() < 0.5:
                self._pending[number] = min(due, now), (_CANCELLED, *row[1:])

    def in_flight(self) -> int:
        """Operations that were not reported."""
        return len(self._pending)

    def revive(self) -> None:
        """What hung goes on."""
        now = self.clock.now_ns()
        self._pending = [(now if due == NEVER_NS else due, row) for due, row in self._pending]

    def close(self) -> bool:
        """Ends what can be ended; False if something hangs."""
        hung = any(due == NEVER_NS for due, _ in self._pending)
        if not self._gone:
            self._do([row for due, row in self._pending if due != NEVER_NS])
            self._pending = [each for each in self._pending if each[0] == NEVER_NS]
        self._gone = not hung
        return not hung

    def kill(self) -> None:
        """The process is gone: of the writes under way, any part happens, unheard."""
        self.files.troubles = {}
        for _, (op, fd, offset, address, length, _) in self._pending:
            if op == WRITE:
                part = self.chance.choice((0, self.chance.randrange(length + 1), length))
                with contextlib.suppress(OSError):
                    self.files.write(fd, [bytes(memory(address, length)[:part])], offset)
        self._pending.clear()
        self._gone = True

    def _do(self, rows: list[tuple[int, ...]]) -> Completions:
        done = []
        for row in rows:
            if row[0] == _CANCELLED:
                done.append((row[-1], -errno.ECANCELED))
                continue
            self._inner.submit(np.array([row], OPERATION))
            done += self._inner.wait().tolist()
        return np.array(done, COMPLETION)
