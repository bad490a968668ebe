"""Rules of `Turns` for every turn and any scheduler, written down again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from hypothesis import given

from flowkv.policy.scheduling import COMING, RUNNING, Job, Room, Scheduler, Turn, Turns
from flowkv.testing.stories import require, tell, told
from tests.inside import CheckedTurns, SchedulerStory, SchedulerWorld, VerificationError
from tests.inside import schedulers_worlds as worlds


def check_turns(
    turns: Callable[..., Turns],
    make: Callable[[], Scheduler],
    *,
    max_examples: int = 100,
    shrink: bool = True,
) -> None:
    """Tells the stories of `check_scheduler` about a mechanism, a class like `Turns`."""
    checked = type("Proven", (ProvenTurns,), {"mechanism": turns})

    @told(max_examples, shrink=shrink)
    @given(world=worlds())
    def story(world: SchedulerWorld) -> None:
        SchedulerStory(make, world, checked).run()

    tell(story)


class ProvenTurns(CheckedTurns):
    """Checks who is in, and for how long, and what they compute, too."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.pushed: dict[int, int] = {}  # how often each job was preempted for one that waited
        self._entered_at: dict[int, int] = {}

    def admit(
        self, waiting: Sequence[Job], active: Sequence[Job], room: Room, now_s: float
    ) -> Turn:
        turn = super().admit(waiting, active, room, now_s)
        self._check_places(turn, waiting, active)
        self._check_order(turn, waiting, now_s)
        self._check_room(turn, waiting, active, room, now_s)
        for job, _ in turn.leave:
            self._check_victim(job)
        for job in turn.enter:
            self._entered_at[job.number] = job.made
        return turn

    def share(self, active: Sequence[Job], now_s: float) -> list[tuple[Job, int]]:
        shares = super().share(active, now_s)
        given = {job.number: count for job, count in shares}
        require(len(given) == len(shares), "a row has two shares", shares)
        running = [job for job in active if job.state == RUNNING]
        for job, count in shares:
            require(job in running, "a share for a row that does not run", job)
            require(1 <= count <= job.missing, f"a share of {count} for {job}")
        could = min(self.limits.token_budget, sum(job.missing for job in running))
        require(sum(given.values()) == could, f"{sum(given.values())} tokens instead of {could}")
        decodes = [job for job in running if job.missing == 1]
        if len(decodes) + self.limits.page_size <= self.limits.token_budget:
            require(all(job.number in given for job in decodes), "a row that decodes waits", shares)
        self._check_chunks([job for job in running if job.missing > 1], given, now_s)
        return shares

    def relieve(self, active: Sequence[Job], now_s: float) -> tuple[Job, bool] | None:
        """What it would say next is checked as well."""
        gone = self._relieve(active, now_s)
        left, follows = list(active), gone
        while follows is not None:
            left.remove(follows[0])
            follows = self._relieve(left, now_s)
        return gone

    def _relieve(self, active: Sequence[Job], now_s: float) -> tuple[Job, bool] | None:
        gone = super().relieve(active, now_s)
        if len(active) < 2:
            require(gone is None, "the last row makes room for nobody", gone)
            return None
        if gone is None:
            raise VerificationError("nobody makes room, though two rows are there")
        require(gone[0] in active, "who makes room is not there", gone)
        first = min(active, key=lambda job: self.scheduler.rank(job, now_s))
        require(gone[0] is not first, "the first in the order makes room", gone)
        self._check_kept(gone)
        return gone

    def _check_victim(self, job: Job) -> None:
        """A victim has been left alone for long enough."""
        done = job.made - self._entered_at[job.number]
        times = 2 ** min(job.preempted - 1, 4) if job.preempted else 0
        least = self.limits.grace * times
        require(done >= least, f"preempted again after {done} tokens", job)
        self.pushed[job.number] = self.pushed.get(job.number, 0) + 1
        most = 1 + math.log2(1 + job.limit / self.limits.grace)
        require(self.pushed[job.number] <= most, "preempted too often", job)

    def _check_places(self, turn: Turn, waiting: Sequence[Job], active: Sequence[Job]) -> None:
        gone = [job for job, _ in turn.leave]
        require(all(job in active for job in gone), "who leaves is not in", gone)
        require(all(job in waiting for job in turn.enter), "who enters does not wait", turn.enter)
        for jobs in (gone, turn.enter):
            require(len({job.number for job in jobs}) == len(jobs), "a job moves twice", jobs)
        require(bool(turn.enter) or not gone, "somebody leaves, and nobody enters", gone)
        rows = len(active) - len(gone) + len(turn.enter)
        require(rows <= self.limits.max_rows, f"{rows} rows")
        require(rows > 0 or not waiting, "nobody is in, though somebody waits")
        for one in turn.leave:
            self._check_kept(one)

    def _check_kept(self, gone: tuple[Job, bool]) -> None:
        job, kept = gone
        require(not (kept and job.state == COMING), "what is on its way is kept", job)

    def _check_order(self, turn: Turn, waiting: Sequence[Job], now_s: float) -> None:
        keys = [self.scheduler.rank(job, now_s) for job in turn.enter]
        require(keys == sorted(keys), "they enter in another order", turn.enter)
        rest = [job for job in waiting if job not in turn.enter]
        if keys and rest:
            first = min(self.scheduler.rank(job, now_s) for job in rest)
            require(keys[-1] < first, "somebody passes by another", turn.enter)

    def _check_room(
        self, turn: Turn, waiting: Sequence[Job], active: Sequence[Job], room: Room, now_s: float
    ) -> None:
        """Those who enter fit, alone or beside what the others may claim; and nobody else would."""
        gone = [job for job, _ in turn.leave]
        stay = [job for job in active if job not in gone]
        free = room.free + sum(job.pages for job in gone) - self.limits.watermark * room.total
        free -= sum(self._owed(job) for job in stay)
        rows = len(stay)
        for job in turn.enter:
            fits = self._needs(job, rows) <= free
            require(fits or not rows, "who enters does not fit", job)
            require(not self._idle(job, active, turn, now_s), "who enters would be idle", job)
            rows, free = rows + 1, free - self._needs(job, 0)
        rest = [job for job in waiting if job not in turn.enter]
        if rest and rows < self.limits.max_rows:
            first = min(rest, key=lambda job: self.scheduler.rank(job, now_s))
            fits = self._needs(first, rows) <= free and not self._idle(first, active, turn, now_s)
            require(not fits, "who would fit waits", first)
        if len(turn.enter) == 1:  # else one may have been needed for another
            spare = free + self._needs(turn.enter[0], 0) - self._needs(turn.enter[0], rows - 1)
            for job in gone:
                less = job.pages + self._owed(job)
                needless = rows < self.limits.max_rows and less <= spare
                require(not needless, "who leaves would not have to", job)

    def _idle(self, job: Job, active: Sequence[Job], turn: Turn, now_s: float) -> bool:
        """Whether prompts in front take the whole step, so that a prompt would wait inside."""
        rank, size = self.scheduler.rank, self.limits.page_size
        prompts = [one for one in active if one.state == RUNNING and one.missing > 1]
        front = [one for one in [*prompts, *turn.enter] if rank(one, now_s) < rank(job, now_s)]
        tokens = sum(max(1, one.missing - size * one.shared) for one in front)
        return job.missing > 1 and tokens >= self.limits.token_budget

    def _needs(self, job: Job, rows: int) -> int:
        """Pages of all that is known, one to go on if it goes on, and one a row if it came back."""
        size = self.limits.page_size
        known = math.ceil((job.prompt + job.made) / size) + 1
        pages = max(1, min(known, math.ceil((job.prompt + job.limit - 1) / size)) - job.shared)
        return pages + (rows if job.preempted else 0)

    def _owed(self, job: Job) -> int:
        """Pages of what is known of a row and is not there."""
        size = self.limits.page_size
        there = max(math.ceil(job.ready / size), job.pages)
        return max(0, math.ceil((job.prompt + job.made) / size) - there)

    def _check_chunks(self, behind: Sequence[Job], given: dict[int, int], now_s: float) -> None:
        """Chunks follow the order, and end with pages, but for one."""
        size = self.limits.page_size
        order = sorted(behind, key=lambda job: self.scheduler.rank(job, now_s))
        cut = [job for job in order if 0 < given.get(job.number, 0) < job.missing]
        odd = [job for job in cut if (job.ready + given[job.number]) % size]
        require(len(odd) <= 1, "chunks end within pages", odd)
        first = not order or order[0].number in given
        require(first or not any(job.number in given for job in order), "the first waits", order)
        lacking = False
        for job in order:
            count = given.get(job.number, 0)
            require(not lacking or count < size, "a later prompt goes before", job)
            lacking = lacking or job.missing - count >= size
