"""Completions on their way from an engine to whoever waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np

from flowkv.tiers.io.engine import COMPLETION, Completions


class Reports:
    """A queue of completions that counts what is still owed. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._rows: list[tuple[int, int]] = []
        self._owed = 0
        self._ended = False

    def expect(self, count: int) -> None:
        """So many operations were submitted."""
        with self._changed:
            self._owed += count

    def put(self, rows: Sequence[tuple[int, int]]) -> None:
        """Adds completions: pairs of tag and result."""
        with self._changed:
            self._rows += rows
            self._changed.notify_all()

    def take(self, timeout_s: float, least: int) -> Completions:
        """All completions that are there; waits up to `timeout_s` for the first `least`."""
        end_s = time.monotonic() + timeout_s
        with self._changed:
            while len(self._rows) < least and not self._ended:
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(min(left_s, threading.TIMEOUT_MAX))
            rows, self._rows = self._rows, []
            self._owed -= len(rows)
        return np.array(rows, COMPLETION)

    def owed(self) -> int:
        """Operations submitted and not yet taken."""
        with self._changed:
            return self._owed

    def end(self) -> None:
        """Nobody waits any more: what comes is kept for whoever looks."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
