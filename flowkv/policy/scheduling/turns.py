"""The turns of an engine: which rows leave, which enter, and how many tokens each computes.

A turn is decided in two calls, since the cached part of a prompt is seen only once the prompt is
opened: `admit` chooses the rows to set aside and the requests to enter, `share` divides the token
budget of one step among the active rows. Where pages run out in spite of the count, `relieve`
names the row to preempt. All three are pure.

Under every scheduler with a stable order:

* No request overtakes one that waits in front: if that does not fit, the others wait as well.
* No prompt enters behind prompts that take all tokens of a step, so that many requests with one
  beginning compute it once: the later ones find it when they enter.
* The first active row in the order is never preempted, so that it ends; then the next.
* A row is preempted for a request that waits only if it ranks behind that request, and only if all
  rows that can go make enough room together; then no more go than needed.
* A row that was preempted before is not preempted for a waiting request until it has made `grace`
  new tokens since its return; twice as many after each time, and at most 16 times as many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from flowkv.core.errors import ConfigError, StateError
from flowkv.policy.restore.costs import Rates
from flowkv.policy.scheduling.schedulers import RUNNING, Job, Scheduler

# The token budget of a step, divided among rows: chunked prefill beside decodes.

Key = Callable[[Job], tuple[float, ...]]


def divide(active: Sequence[Job], budget: int, page_size: int, rank: Key) -> list[tuple[Job, int]]:
    """Divide the token budget of a step among the running rows.

    Rows that decode get their token first; if there are more of them than the budget has tokens,
    the first in the order get one, and a page of the budget, or half of it if that is less, is left
    for rows in prefill. These share the rest in their order. A chunk that does not end its prompt
    ends with a page where another row can use the rest, but the first prompt always advances. No
    token is left over while a row could use it.

    Args:
        active: Active rows; rows that are not running get nothing.
        budget: Most tokens.
        page_size: Tokens of a page.
        rank: The order.

    Returns:
        Rows that get tokens, with their counts: decodes first.
    """
    shares: list[tuple[Job, int]] = []
    behind: list[Job] = []
    for job in active:
        if job.state == RUNNING:
            missing = job.prompt + job.made - job.ready
            if missing == 1:
                shares.append((job, 1))
            elif missing > 1:
                behind.append(job)
    kept = min(page_size, budget // 2) if behind else 0
    if len(shares) > budget - kept:
        shares.sort(key=lambda share: rank(share[0]))
        kept = min(kept, sum(job.missing for job in behind))
        del shares[budget - kept :]
    if not behind or len(shares) >= budget:
        return shares
    if len(behind) > 1:
        behind.sort(key=rank)
    return shares + _chunks(behind, budget - len(shares), page_size)


def _chunks(behind: Sequence[Job], left: int, page_size: int) -> list[tuple[Job, int]]:
    """Return chunks of prompts in their order: to the end, or to the end of a page."""
    tokens: dict[Job, int] = {}
    for job in behind:
        chunk = min(job.missing, left)
        if chunk < job.missing:
            pages = max(0, (job.ready + chunk) // page_size * page_size - job.ready)
            chunk = pages if pages or tokens else chunk  # the first always advances
        tokens[job] = chunk
        left -= chunk
        if not left:
            break
    for job in behind:  # the tokens that no other row could use
        extra = min(left, job.missing - tokens.get(job, 0))
        tokens[job] = tokens.get(job, 0) + extra
        left -= extra
        if not left:
            break
    return [(job, count) for job, count in tokens.items() if count]


# Waiting requests in a scheduler's order; ranks are computed again only where they may change.

Rank = tuple[float, ...]


class WaitingLine:
    """Sorter of waiting requests. Its memory saves time and changes no answer; it holds no request.

    Args:
        scheduler: The order.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._numbers: list[int] = []
        self._moves: list[int] = []
        self._places: list[int] = []  # indices of the waiting requests, in order
        self._keys: dict[int, tuple[int, Rank]] = {}

    def order(self, waiting: Sequence[Job], now_s: float) -> Iterable[Job]:
        """Return the waiting requests in order."""
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

    def _key(self, job: Job, now_s: float) -> tuple[int, Rank]:
        """Return the moves and rank of a request: as before if it has not moved."""
        known = self._keys.get(job.number)
        if known is not None and known[0] == job.moves:
            return known
        return job.moves, self._scheduler.rank(job, now_s)


_DOUBLINGS = 4  # with more, an urgent request would wait long for a row that was preempted often


class Limits(NamedTuple):
    """Limits of an engine's steps.

    Attributes:
        max_rows: Most rows of a step.
        token_budget: Most tokens of a step; rows that decode come first.
        page_size: Tokens of a page.
        watermark: Share of all pages that must stay free when a request enters, so that rows in
            progress can grow for a while.
        grace: New tokens that a row makes after its return before it is preempted again for a
            request that waits; twice as many after each time, up to 16 times as many.
    """

    max_rows: int
    token_budget: int
    page_size: int
    watermark: float = 0.02
    grace: int = 16


class Room(NamedTuple):
    """Pages of the device, counted over all layer groups together.

    Attributes:
        free: Pages that are free, or held only by the index and thus available.
        total: All pages.
    """

    free: int
    total: int


class Turn(NamedTuple):
    """Rows that leave, and requests that enter after that, in this order.

    Attributes:
        leave: Preempted jobs; True: its pages go to host memory, False: they are dropped.
        enter: Jobs that wait or were set aside.
    """

    leave: list[tuple[Job, bool]]
    enter: list[Job]


class Turns:
    """Mechanism that decides turns with a scheduler.

    Args:
        scheduler: The order.
        limits: Limits of a step.
        keeps: Returns whether a job's pages are worth keeping in host memory, rather than
            recomputing, as far as measured.

    Raises:
        ConfigError: A limit is out of range.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        limits: Limits,
        keeps: Callable[[Job], bool] = lambda _: True,
    ) -> None:
        if min(limits.max_rows, limits.token_budget, limits.page_size, limits.grace) < 1:
            raise ConfigError(f"{limits}", "Pass 1 or more")
        if not 0 <= limits.watermark < 1:
            raise ConfigError(f"watermark={limits.watermark}", "Pass a share from 0 to below 1")
        self.scheduler, self.limits, self.keeps = scheduler, limits, keeps
        self._line = WaitingLine(scheduler)

    def admit(
        self, waiting: Sequence[Job], active: Sequence[Job], room: Room, now_s: float
    ) -> Turn:
        """Choose the rows that leave and the requests that enter now.

        Args:
            waiting: Jobs that wait or were set aside, in any order.
            active: Jobs that are coming or running.
            room: Pages of the device.
            now_s: The time.

        Raises:
            StateError: The scheduler names a victim that it was not given.
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
            if job.preempted:  # else it goes again as soon as the others have grown a little
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
        """Return whether prompts in front of a job take the whole step, so that it would be idle.

        Outside, it may find their pages: the prefix that a prompt shares with others is looked up
        when it enters.
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
        """Return the pages that a job needs to enter: those of its known tokens, and one more."""
        size = self.limits.page_size
        most = -(-(job.prompt + job.limit - 1) // size)  # the last token is not computed
        return max(1, min(-(-(job.prompt + job.made) // size) + 1, most) - job.shared)

    def claim(self, job: Job) -> int:
        """Return the pages that a job in progress still needs for its known tokens."""
        missing = job.prompt + job.made - job.ready
        size = self.limits.page_size
        if missing == 1 and job.ready % size:
            return 0
        taken = max(-(-job.ready // size), job.pages)
        return max(0, -(-(job.ready + missing) // size) - taken)

    def gain(self, job: Job) -> int:
        """Return the pages that come free if a job in progress leaves."""
        return job.pages + self.claim(job)

    def share(self, active: Sequence[Job], now_s: float) -> list[tuple[Job, int]]:
        """Return the rows with tokens in the next step, and their token counts."""
        return divide(
            active,
            self.limits.token_budget,
            self.limits.page_size,
            lambda job: self.scheduler.rank(job, now_s),
        )

    def relieve(self, active: Sequence[Job], now_s: float) -> tuple[Job, bool] | None:
        """Choose a row to preempt where rows in progress cannot grow; None where only one is left.

        Repeated calls, each without the rows chosen before, come to an end.

        Args:
            active: Active jobs.
            now_s: The time.

        Returns:
            The job, and whether its pages go to host memory.

        Raises:
            StateError: The scheduler names a victim that it was not given.
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
        """Choose rows to preempt so that `wanting` gets rows and pages; empty: it has to wait."""
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
        for victim in going[-2::-1]:  # later victims may have made earlier ones needless
            if rows < 0 and pages + gains[victim] <= 0:
                going.remove(victim)
                rows, pages = rows + 1, pages + gains[victim]
        return going

    def _most(self, job: Job) -> int:
        """Return an upper bound of `gain` that needs no count of pages."""
        return max(job.pages, -(-(job.prompt + job.made) // self.limits.page_size))

    def _settled(self, job: Job) -> bool:
        """Return whether a row has made enough tokens since its return to be preempted again."""
        return job.made - job.back_at >= self.limits.grace << min(job.preempted - 1, _DOUBLINGS)

    def _named(self, among: Sequence[Job], wanting: Job | None, now_s: float) -> Sequence[Job]:
        """Return the scheduler's victims, checked: some of `among`, each once."""
        named = self.scheduler.victims(among, wanting, now_s)
        if len(set(named)) < len(named) or not set(named).issubset(among):
            raise StateError(
                f"scheduler {self.scheduler.name!r} names {list(named)} as victims",
                "Let victims() return some of the rows it gets, each once",
            )
        return named

    def _keeps(self, job: Job) -> bool:
        """Return whether a row's pages go to host memory; pages still loading are below already."""
        return job.state == RUNNING and self.keeps(job)


# Value of keeping the pages of a preempted request, by measured rates.

_MEMORY = 0.9
_APART = 1.5  # steps of about the same size do not show the cost of a further token


class Worth:
    """Comparison of two moves of a request's pages with recomputing them.

    Kept pages cross the link twice. Dropped pages are recomputed in steps that run anyway, at the
    cost of a further token of a step. As long as one of these costs is unknown, pages are kept, so
    that no token is recomputed for lack of a measurement.

    Args:
        page_bytes: Bytes of a page of all layer groups.

    Attributes:
        page_bytes: The same; the caller updates it when the page size is measured again.
        out: Rates of moves to host memory.
        back: Rates of moves to the device.
    """

    def __init__(self, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.out, self.back = Rates(), Rates()
        # Steps of many and of few tokens are kept apart, or a while of decoding would displace the
        # measurements of large steps: mean tokens and seconds.
        self._most = 0
        self._small: tuple[float, float] | None = None
        self._large: tuple[float, float] | None = None

    def step(self, tokens: int, seconds: float) -> None:
        """Record the seconds of a step over so many tokens."""
        if tokens <= 0 or seconds <= 0:
            return
        if tokens > 2 * self._most and self._large is not None:
            self._small, self._large = self._large, None
        self._most = max(self._most, tokens)
        if 2 * tokens > self._most:
            self._large = _mean(self._large, tokens, seconds)
        else:
            self._small = _mean(self._small, tokens, seconds)

    def observe_move(self, n_bytes: int, seconds: float, *, out: bool) -> None:
        """Record a move of bytes to host memory, or back to the device."""
        (self.out if out else self.back).add(n_bytes, seconds)

    def __call__(self, job: Job) -> bool:
        """Return whether to keep the pages of a job that is to leave."""
        n_bytes, token_s = job.pages * self.page_bytes, self.token_s
        if not n_bytes or not token_s or not self.out.samples:
            return True
        back = self.back if self.back.samples else self.out
        moves_s = self.out.expected_s(n_bytes) + back.expected_s(n_bytes)
        return moves_s <= token_s * job.ready

    @property
    def token_s(self) -> float:
        """Seconds that a further token adds to a step; 0.0 while unknown."""
        if self._small is None or self._large is None:
            return 0.0
        (few, least_s), (many, most_s) = self._small, self._large
        if many < _APART * few:
            return 0.0
        return max(0.0, most_s - least_s) / (many - few)


def _mean(known: tuple[float, float] | None, tokens: int, seconds: float) -> tuple[float, float]:
    """Return the updated mean of tokens and seconds, recent steps counting most."""
    if known is None:
        return float(tokens), seconds
    return (
        _MEMORY * known[0] + (1 - _MEMORY) * tokens,
        _MEMORY * known[1] + (1 - _MEMORY) * seconds,
    )
