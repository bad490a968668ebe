"""A tier made slower, so that on a fast disk, too, loading and computing can be seen to share."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from typing import Any

from flowkv.tiers.base import Completion, Outcome, Tier

_PAUSE_S = 0.001


class Slow:
    """A tier that hands out what it loaded no faster than a link of some rate would.

    Args:
        tier: Does the work; closed with this one.
        bytes_per_s: Of the link that is emulated.
    """

    def __init__(self, tier: Tier, bytes_per_s: float) -> None:
        self._tier, self._bytes_per_s = tier, bytes_per_s
        self._lock = threading.Lock()
        self._due: list[tuple[float, int, Completion]] = []
        self._order = itertools.count()
        self._free_s = 0.0

    def __getattr__(self, name: str) -> Any:
        if name == "fileno":  # it would say when the fast tier is done
            raise AttributeError(name)
        return getattr(self._tier, name)

    def poll(self, timeout_s: float = 0.0) -> list[Completion]:
        """See `Tier`."""
        end_s = time.monotonic() + timeout_s
        while True:
            with self._lock:
                for answer in self._tier.poll(0.0):
                    self._take(answer)
                now_s = time.monotonic()
                ready = []
                while self._due and self._due[0][0] <= now_s:
                    ready.append(heapq.heappop(self._due)[2])
            if ready or now_s >= end_s:
                return ready
            time.sleep(min(_PAUSE_S, end_s - now_s))

    def _take(self, answer: Completion) -> None:
        due_s = now_s = time.monotonic()
        if answer.outcome is Outcome.HIT:
            due_s = max(now_s, self._free_s) + answer.n_bytes / self._bytes_per_s
            self._free_s = due_s
            answer = answer._replace(seconds=answer.seconds + due_s - now_s)
        heapq.heappush(self._due, (due_s, next(self._order), answer))
