"""An engine that finishes nothing before it is told to."""

from __future__ import annotations

import threading

import numpy as np

from tests.inside import OPERATION, READ, SYNC, WRITE, Operations

from .files_engine import FilesEngine

NAMES = {"read": READ, "write": WRITE, "sync": SYNC}


class GatedEngine(FilesEngine):
    """Holds back operations of a kind: they move no byte and complete when `release` is called.

    `entered` counts what was held. What is cancelled stays held, as a device would do.
    """

    def __init__(self) -> None:
        super().__init__()
        self.holds = ""
        self.entered = threading.Semaphore(0)
        self.held: list[tuple[int, ...]] = []

    def submit(self, operations: Operations) -> None:
        passed = []
        for row in operations.tolist():
            if self.holds and row[0] == NAMES[self.holds] and (row[0] == SYNC or row[4] > 4096):
                self.held.append(row)
                self.entered.release()
            else:
                passed.append(row)
        super().submit(np.array(passed, OPERATION))

    def release(self, count: int | None = None) -> None:
        """Does what was held back, oldest first, and holds no more if all of it."""
        if count is None:
            self.holds = ""
        rows, self.held = self.held[:count], self.held[len(self.held[:count]) :]
        super().submit(np.array(rows, OPERATION))

    def close(self) -> bool:
        return super().close() and not self.held
