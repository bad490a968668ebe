"""Turns over real rows: pages are counted, and sharing looked up, right where it is decided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from flowkv.engine.keeper import Keeper
from flowkv.engine.live import Live
from flowkv.policy.scheduling import COMING, Job, Limits, Room, Scheduler, Turn, Turns


class Counted(Turns):
    """`Turns` of an engine: what they look at is brought up to date first.

    No more than that: counting everything in every turn would cost more than deciding.

    Args:
        scheduler: The order.
        limits: What may be done at once.
        keeper: Counts, and says whose pages are worth keeping.
    """

    def __init__(self, scheduler: Scheduler, limits: Limits, keeper: Keeper) -> None:
        super().__init__(scheduler, limits, keeper.worth)
        self._keeper = keeper

    def admit(
        self, waiting: Sequence[Job], active: Sequence[Job], room: Room, now_s: float
    ) -> Turn:
        """See `Turns.admit`."""
        # Who cannot be preempted is counted by its length alone.
        everybody = self.scheduler.preempts
        self._count([job for job in active if everybody or job.state == COMING], exact=False)
        return super().admit(waiting, active, room, now_s)

    def relieve(self, active: Sequence[Job], now_s: float) -> tuple[Job, bool] | None:
        """See `Turns.relieve`."""
        self._count(active, exact=True)
        return super().relieve(active, now_s)

    def pages(self, job: Job) -> int:
        """See `Turns.pages`."""
        self._keeper.share(cast(Live, job))
        return super().pages(job)

    def _count(self, jobs: Sequence[Job], *, exact: bool) -> None:
        if jobs:
            self._keeper.count(cast("Sequence[Live]", jobs), exact=exact)
