"""Who waits, in a scheduler's order; ranks are asked for again only where they may have changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flowkv.policy.scheduling.base import Scheduler
from flowkv.policy.scheduling.job import Job

Key = tuple[float, ...]


class Line:
    """Orders requests. What it remembers saves time and changes no answer; it holds no request.

    Args:
        scheduler: The order.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._numbers: list[int] = []
        self._moves: list[int] = []
        self._places: list[int] = []  # of those that wait, the first first
        self._keys: dict[int, tuple[int, Key]] = {}

    def order(self, waiting: Sequence[Job], now_s: float) -> Iterable[Job]:
        """Those that wait, the first first."""
        rank = self._scheduler.rank
        if not self._scheduler.steady:
            return sorted(waiting, key=lambda job: rank(job, now_s))
        numbers, moves = [job.number for job in waiting], [job.moves for job in waiting]
        if numbers != self._numbers or moves != self._moves:
            self._numbers, self._moves = numbers, moves
            self._keys = {job.number: self._key(job, now_s) for job in waiting}
            keys = [self._keys[number][1] for number in numbers]
            self._places = sorted(range(len(keys)), key=keys.__getitem__)
        return (waiting[place] for place in self._places)

    def _key(self, job: Job, now_s: float) -> tuple[int, Key]:
        """A request that has not moved ranks as before."""
        known = self._keys.get(job.number)
        if known is not None and known[0] == job.moves:
            return known
        return job.moves, self._scheduler.rank(job, now_s)
