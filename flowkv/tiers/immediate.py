"""Tiers that answer while they are asked, as memory can."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

from flowkv.core.clock import Clock
from flowkv.core.errors import StateError
from flowkv.tiers.base import Completion, Load, Outcome, Store
from flowkv.tiers.completions import Completions

Wish = TypeVar("Wish", Load, Store)


class Immediate:
    """What such tiers share: jobs whose items are all answered by `submit_*`, so no poll waits.

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

    def poll(self, timeout_s: float = 0.0) -> list[Completion]:
        """Answers that were not polled yet."""
        return self._answers.take(timeout_s)

    def fileno(self) -> int:
        """An eventfd that is readable while answers wait."""
        return self._answers.fileno()

    def cancel(self, job: int) -> None:
        """Too late: all items were answered while they were submitted."""

    def _usable(self) -> bool:
        return not self._closed and self._pid == os.getpid()

    def _load(self, item: Load, end_ns: int) -> Completion:
        raise NotImplementedError

    def _store(self, item: Store, end_ns: int) -> Completion:
        raise NotImplementedError

    def _run(
        self, items: Sequence[Wish], deadline_s: float, answer: Callable[[Wish, int], Completion]
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


def failed(key: bytes, reason: str) -> Completion:
    """An answer; `_run` fills in which item it is for."""
    return Completion(0, 0, key, Outcome.FAILED, reason)


def missed(key: bytes, reason: str = "") -> Completion:
    """An answer; `_run` fills in which item it is for."""
    return Completion(0, 0, key, Outcome.MISS, reason)
