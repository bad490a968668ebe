"""What happens in one turn of an engine: who leaves, who enters, who computes how many tokens.

A turn is decided in two questions, since what of a prompt is known is seen only once it is opened:
`admit` says who is set aside and who enters, `share` divides the token budget of one step among the
rows that are in. Where pages run out though the count said that they would not, `relieve` names who
goes. All three are pure.

Whatever the scheduler, as long as it does not change its mind about an order:

* Nobody passes by a request that waits in front: if that does not fit, the others wait as well.
* No prompt enters behind prompts that take all tokens of a step, so that many requests with one
  beginning compute it once: those behind find it when they enter.
* Among rows that are in, the first in the order is never preempted, so that it ends; then the next.
* A row is preempted for a request that waits only if it ranks behind that, and only if everybody
  who can go makes enough room together; then no more go than have to.
* A row that was preempted before is left alone by those that wait until it has made `grace` new
  tokens since it is back; twice as many after each time, and at most 16 times as many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from flowkv.core.errors import ConfigError, StateError
from flowkv.policy.scheduling.base import Scheduler
from flowkv.policy.scheduling.budget import divide
from flowkv.policy.scheduling.job import RUNNING, Job
from flowkv.policy.scheduling.line import Line

_DOUBLINGS = 4  # or what is urgent would wait for long, once a row had to make room often


class Limits(NamedTuple):
    """What an engine may do at once.

    Attributes:
        max_rows: Most rows of a step.
        token_budget: Most tokens of a step; rows that decode come first.
        page_size: Tokens of a page.
        watermark: Share of all pages that stays free when somebody enters, so that rows in
            progress can grow for a while.
        grace: New tokens that a row makes, once it is back, before it is preempted again for a
            request that waits; twice as many after each time, up to 16 times as many.
    """

    max_rows: int
    token_budget: int
    page_size: int
    watermark: float = 0.02
    grace: int = 16


class Room(NamedTuple):
    """Pages of the device, in pages of all layer groups together.

    Attributes:
        free: Free, or held by nobody but the index, so that they can be had.
        total: All.
    """

    free: int
    total: int


class Turn(NamedTuple):
    """Who leaves, and who enters after that, in this order.

    Attributes:
        leave: Preempted jobs; True: its pages go to host memory, False: they are dropped.
        enter: Jobs that wait or were set aside.
    """

    leave: list[tuple[Job, bool]]
    enter: list[Job]


class Turns:
    """Decides turns with a scheduler.

    Args:
        scheduler: The order.
        limits: What may be done at once.
        keeps: Whether a job's pages are worth keeping in host memory, rather than computing them
            again, as far as anybody has measured; see `policy.scheduling.worth`.

    Raises:
        ConfigError: A limit is out of range.
    """

    def __init__(
        self, scheduler: Scheduler, limits: Limits, keeps: Callable[[Job], bool] = lambda _: True
    ) -> None:
        if min(limits.max_rows, limits.token_budget, limits.page_size, limits.grace) < 1:
            raise ConfigError(f"{limits}", "Pass 1 or more")
        if not 0 <= limits.watermark < 1:
            raise ConfigError(f"watermark={limits.watermark}", "Pass a share from 0 to below 1")
        self.scheduler, self.limits, self.keeps = scheduler, limits, keeps
        self._line = Line(scheduler)

    def admit(
        self, waiting: Sequence[Job], active: Sequence[Job], room: Room, now_s: float
    ) -> Turn:
        """Who leaves and who enters now.

        Args:
            waiting: Jobs that wait or were set aside, in any order.
            active: Jobs that are in, coming or running.
            room: Pages.
            now_s: The time.

        Raises:
            StateError: The scheduler names a victim that is none of those it was shown.
        """
        turn, rows, most = Turn([], []), len(active), self.limits.max_rows
        if not waiting or (rows >= most and not self.scheduler.preempts):
            return turn
        free = room.free - self.limits.watermark * room.total - sum(map(self.claim, active))
        staying = active
        prompts = [job for job in active if job.state == RUNNING and job.missing > 1]
        for job in self._line.order(waiting, now_s):
            if job.missing > 1 and self._full([*prompts, *turn.enter], job, now_s):
                break
            wanted = needed = self.pages(job)
            if job.preempted:  # or it goes again as soon as the others have grown a little
                wanted += rows
            if rows and (rows >= most or wanted > free):
                going = self._going(staying, job, rows - most + 1, wanted - free, now_s)
                if not going:
                    break
                turn.leave.extend((one, self._keeps(one)) for one in going)
                staying = [one for one in staying if one not in going]
                rows, free = rows - len(going), free + sum(map(self.gain, going))
            turn.enter.append(job)
            rows, free = rows + 1, free - needed
        return turn

    def _full(self, prompts: Sequence[Job], job: Job, now_s: float) -> bool:
        """Whether prompts in front of a job take the whole step: it would be idle inside.

        Outside, it may find what they compute: what a prompt has in common with others is looked
        up when it enters.
        """
        budget, size = self.limits.token_budget, self.limits.page_size
        missing = sum(max(1, one.missing - one.shared * size) for one in prompts)
        if missing < budget:
            return False
        rank = self.scheduler.rank
        mine = rank(job, now_s)
        ahead = (one for one in prompts if rank(one, now_s) < mine)
        return sum(max(1, one.missing - one.shared * size) for one in ahead) >= budget

    def pages(self, job: Job) -> int:
        """Pages that a job needs to enter: those of all that is known of it, and one to go on."""
        size = self.limits.page_size
        most = -(-(job.prompt + job.limit - 1) // size)  # the last token is not computed
        return max(1, min(-(-(job.prompt + job.made) // size) + 1, most) - job.shared)

    def claim(self, job: Job) -> int:
        """Pages that a job in progress needs for what is known of it, and has not taken yet."""
        missing = job.prompt + job.made - job.ready
        size = self.limits.page_size
        if missing == 1 and job.ready % size:
            return 0
        taken = max(-(-job.ready // size), job.pages)
        return max(0, -(-(job.ready + missing) // size) - taken)

    def gain(self, job: Job) -> int:
        """Pages that come free if a job in progress leaves."""
        return job.pages + self.claim(job)

    def share(self, active: Sequence[Job], now_s: float) -> list[tuple[Job, int]]:
        """Tokens that each row computes in the next step; rows that get none are left out."""
        return divide(
            active,
            self.limits.token_budget,
            self.limits.page_size,
            lambda job: self.scheduler.rank(job, now_s),
        )

    def relieve(self, active: Sequence[Job], now_s: float) -> tuple[Job, bool] | None:
        """Who goes where rows in progress cannot grow; None where only one is left.

        So asking again and again, each time without who went, comes to an end.

        Args:
            active: Jobs that are in.
            now_s: The time.

        Returns:
            The job, and whether its pages go to host memory.

        Raises:
            StateError: The scheduler names a victim that is none of those it was shown.
        """
        if len(active) < 2:
            return None
        first = min(active, key=lambda job: self.scheduler.rank(job, now_s))
        others = [job for job in active if job is not first]
        others = [job for job in others if job.pages] or others
        named = self._named(others, None, now_s)
        victim = named[0] if named else max(others, key=lambda job: self.scheduler.rank(job, now_s))
        return victim, self._keeps(victim)

    def _going(
        self, active: Sequence[Job], wanting: Job, rows: int, pages: float, now_s: float
    ) -> list[Job]:
        """Whom to preempt so that `wanting` gets rows and pages; empty: it has to wait."""
        if not self.scheduler.preempts:
            return []
        could = [job for job in active if not job.preempted or self._settled(job)]
        if not could or len(could) < rows:
            return []
        rank, mine = self.scheduler.rank, self.scheduler.rank(wanting, now_s)
        named = [one for one in self._named(could, wanting, now_s) if rank(one, now_s) > mine]
        if len(named) < rows or sum(map(self._most, named)) < pages:
            return []
        gains: dict[Job, int] = {}
        for victim in named:
            gains[victim] = self.gain(victim)
            rows, pages = rows - 1, pages - gains[victim]
            if rows <= 0 and pages <= 0:
                break
        else:
            return []
        going = list(gains)
        for victim in going[-2::-1]:  # who came later may have made others needless
            if rows < 0 and pages + gains[victim] <= 0:
                going.remove(victim)
                rows, pages = rows + 1, pages + gains[victim]
        return going

    def _most(self, job: Job) -> int:
        """No fewer pages than `gain` says, which may have to count them."""
        return max(job.pages, -(-(job.prompt + job.made) // self.limits.page_size))

    def _settled(self, job: Job) -> bool:
        """Whether a row has made enough since it is back to be preempted again."""
        return job.made - job.back_at >= self.limits.grace << min(job.preempted - 1, _DOUBLINGS)

    def _named(self, among: Sequence[Job], wanting: Job | None, now_s: float) -> Sequence[Job]:
        """The scheduler's victims, which are some of `among`, each once."""
        named = self.scheduler.victims(among, wanting, now_s)
        if len(set(named)) < len(named) or not set(named).issubset(among):
            raise StateError(
                f"scheduler {self.scheduler.name!r} names {list(named)} as victims",
                "Let victims() return some of the rows it is shown, each once",
            )
        return named

    def _keeps(self, job: Job) -> bool:
        """What is on its way lies below anyway."""
        return job.state == RUNNING and self.keeps(job)
