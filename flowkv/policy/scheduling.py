"""Schedulers of requests: an order each, and the one mechanism that decides turns by it.

A scheduler is pure like every policy here: no I/O, no clock of its own, no randomness, and no state
beside its arguments. The engine (`flowkv.engine`) and the simulator (`flowkv.sim.serving`) drive
the same objects through the same mechanism (`Turns`), which prevents starvation under any order.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from flowkv.core.errors import ConfigError, StateError
from flowkv.policy.base import made
from flowkv.policy.restore.costs import Rates

__all__ = [
    "ASIDE",
    "COMING",
    "OVER",
    "RUNNING",
    "SCHEDULERS",
    "WAITING",
    "FirstCome",
    "Job",
    "Limits",
    "Priority",
    "Room",
    "Scheduler",
    "Shortest",
    "Turn",
    "Turns",
    "make_scheduler",
]

# Facts that a scheduler sees about one request.

WAITING, COMING, RUNNING, ASIDE, OVER = range(5)
"""States of a request: not begun or begun anew; admitted, with loads in flight; in every step;
preempted with its pages in host memory; finished, failed or cancelled."""


class Job:
    """Request, as schedulers see it. Executors change its state; policies only read it.

    Attributes:
        number: Order of submission, unique in an engine.
        arrived_s: Time of submission.
        prompt: Tokens of the prompt.
        limit: Most new tokens.
        priority: Larger is more urgent.
        deadline_s: Time after which the answer is useless; `math.inf` without one.
        state: `WAITING`, `COMING`, `RUNNING`, `ASIDE` or `OVER`; changed by `move` alone.
        since_s: Time of the last state change.
        ready: Tokens with K and V in the cache.
        made: New tokens so far; they count among the tokens to compute.
        pages: Device pages that only this request holds and would free, including those
            reserved for loads in flight.
        shared: While it waits, pages of its prefix held by rows in progress, as of the last
            look-up: it needs no room for these.
        waited_s: Time spent waiting or set aside before `since_s`.
        preempted: Number of preemptions.
        back_at: `made` at the last entry.
        moves: Number of state changes.
    """

    __slots__ = (
        *("arrived_s", "back_at", "deadline_s", "limit", "made", "moves", "number", "pages"),
        *("preempted", "priority", "prompt", "ready", "shared", "since_s", "state", "waited_s"),
    )

    def __init__(
        self,
        number: int,
        arrived_s: float,
        prompt: int,
        limit: int,
        *,
        priority: int = 0,
        deadline_s: float = math.inf,
    ) -> None:
        self.number, self.arrived_s = number, arrived_s
        self.prompt, self.limit, self.priority = prompt, limit, priority
        self.deadline_s = deadline_s
        self.state, self.since_s = WAITING, arrived_s
        self.ready = self.made = self.pages = self.shared = 0
        self.preempted = self.back_at = self.moves = 0
        self.waited_s = 0.0

    @property
    def missing(self) -> int:
        """Known tokens still to be computed; 1 for a row that decodes."""
        return self.prompt + self.made - self.ready

    @property
    def remaining(self) -> int:
        """Most tokens still to be computed, new ones included."""
        return self.missing + self.limit - self.made

    def move(self, state: int, now_s: float) -> None:
        """Enter another state. The caller of a preemption counts it in `preempted`."""
        if self.state in (WAITING, ASIDE):
            self.waited_s += now_s - self.since_s
            self.back_at = self.made
        self.state, self.since_s = state, now_s
        self.moves += 1

    def __repr__(self) -> str:
        name = ("waiting", "coming", "running", "aside", "over")[self.state]
        return f"<Job {self.number} {name}: {self.ready} of {self.prompt}+{self.made} tokens>"


class Scheduler(ABC):
    """Order of requests, and a choice of victims.

    Attributes:
        name: Name of the scheduler.
        steady: Whether the rank of a request depends only on its state, not on the time or on the
            prefix pages that other rows hold (`shared`): then `rank` runs once per state, rather
            than in every turn.
        preempts: Whether `victims` may name rows for a request that waits; False saves the calls.
    """

    name: ClassVar[str]
    steady: ClassVar[bool] = False
    preempts: bool = True

    @abstractmethod
    def rank(self, job: Job, now_s: float) -> tuple[float, ...]:
        """Return the sort key of a request: the smallest is served first. Ends with its number."""

    def victims(self, active: Sequence[Job], wanting: Job | None, now_s: float) -> Sequence[Job]:
        """Return rows to preempt, in that order; only as many go as needed.

        Rows that rank before `wanting` are not preempted for it, even if named.

        Args:
            active: Rows that could go, never empty; `wanting` is not among them.
            wanting: Request that cannot enter for lack of room or rows; None if a row in progress
                cannot grow, in which case some row has to go.
            now_s: The time.

        Returns:
            Some of `active`, each once; none if `wanting` has to wait.
        """
        if wanting is not None:
            return ()
        return sorted(active, key=lambda job: self.rank(job, now_s), reverse=True)

    def bound_s(self, job: Job) -> float:
        """Return for how many seconds after this request later ones may still overtake it.

        Any request submitted later than `job.arrived_s + bound_s(job)` ranks behind it at all
        times. `math.inf` promises nothing.
        """
        return math.inf


# First come, first served.


class FirstCome(Scheduler):
    """Order of submission; the latest row makes room."""

    name = "fcfs"
    steady = True
    preempts = False

    def rank(self, job: Job, now_s: float) -> tuple[float, ...]:
        """Return the request's number as its rank."""
        return (job.number,)

    def bound_s(self, job: Job) -> float:
        """Return 0: no request overtakes another."""
        return 0.0


# By priority, with aging; the lowest priority makes room.


class Priority(Scheduler):
    """Order of priority; requests that wait preempt rows of lower priority.

    A step of priority is worth `aging_s` seconds: a request is overtaken by requests one step above
    it that came less than `aging_s` later. Its place in the order does not change with time.

    Args:
        aging_s: Seconds that a step of priority is worth; `math.inf`: low priorities wait as long
            as there are higher ones.
        top: Highest priority; larger ones count as this. It bounds for how long a request can be
            overtaken.

    Raises:
        ConfigError: `aging_s` is not above 0.
    """

    name = "priority"
    steady = True

    def __init__(self, aging_s: float = 30.0, *, top: int = 10) -> None:
        if not aging_s > 0:
            raise ConfigError(f"aging_s={aging_s}", "Pass seconds above 0")
        self.aging_s, self.top = float(aging_s), top

    def level(self, job: Job) -> int:
        """Return the priority of a request, at most `top`."""
        return min(job.priority, self.top)

    def rank(self, job: Job, now_s: float) -> tuple[float, ...]:
        """Return the time of submission, `aging_s` sooner for each step of priority."""
        level = min(job.priority, self.top)
        if self.aging_s == math.inf:
            return (-level, job.number)
        return (job.arrived_s - self.aging_s * level, job.number)

    def victims(self, active: Sequence[Job], wanting: Job | None, now_s: float) -> Sequence[Job]:
        """Return the rows of lowest priority first, of one priority the last in the order first."""
        if wanting is not None:
            level = self.level(wanting)
            active = [job for job in active if job.priority < level]
        return sorted(
            active, key=lambda job: (-self.level(job), self.rank(job, now_s)), reverse=True
        )

    def bound_s(self, job: Job) -> float:
        """Return `aging_s` for each step of priority below the top."""
        steps = self.top - self.level(job)
        return steps * self.aging_s if steps else 0.0


# Shortest remaining work first, with aging.

_PROMPT = 1 / 32  # cost of a prompt token in a step, relative to a new token


class Shortest(Scheduler):
    """Order of remaining work; requests that came `aging_s` later never overtake.

    Every request has a due time: `arrived_s + aging_s * work / (work + typical)`, `work` being the
    new tokens it may still make, and a small share of its prompt's. Among requests of about the
    same age that is the order of their work, which makes the mean completion least (Smith 1956;
    Schrage 1968 for preemption). As `work / (work + typical)` is below 1, a request submitted
    `aging_s` later than another is due after it: that is the bound. The due time of a request that
    waits does not change, so that its place in the order is found once.

    Args:
        aging_s: The bound, in seconds; above 0.
        typical: New tokens of a typical answer: such a request may be overtaken by negligible ones
            for half of `aging_s`.
        times: Preempt a row for a request that waits if its work is more than this many times the
            other's. None disables this preemption: where moving a row takes as long as a few
            steps, which delay all rows, the mean gets worse (simulated), and else hardly better.

    Raises:
        ConfigError: One of these is out of range.
    """

    name = "shortest"
    steady = True

    def __init__(
        self, aging_s: float = 30.0, *, typical: float = 256.0, times: float | None = None
    ) -> None:
        if not (0 < aging_s < math.inf and 0 < typical < math.inf):
            raise ConfigError(
                f"aging_s={aging_s}, typical={typical}", "Pass finite numbers above 0"
            )
        if times is not None and not times >= 1:
            raise ConfigError(f"times={times}: would preempt shorter ones", "Pass 1 or more")
        self.aging_s, self.typical, self.times = float(aging_s), float(typical), times
        self.preempts = times is not None

    def work(self, job: Job) -> float:
        """Return the remaining work of a request, in new tokens."""
        left = job.limit - job.made
        return left + _PROMPT * (job.prompt + job.made - job.ready)

    def rank(self, job: Job, now_s: float) -> tuple[float, ...]:
        """Return the due time of a request."""
        work = self.work(job)
        return (job.arrived_s + self.aging_s * work / (work + self.typical), job.number)

    def victims(self, active: Sequence[Job], wanting: Job | None, now_s: float) -> Sequence[Job]:
        """Return the rows due last; for a request that waits, only those with much more work."""
        if wanting is not None:
            least = math.inf if self.times is None else self.times * self.work(wanting)
            active = [job for job in active if self.work(job) > least]
        return sorted(active, key=lambda job: self.rank(job, now_s), reverse=True)

    def bound_s(self, job: Job) -> float:
        """Return less than `aging_s`, and the less, the shorter the request."""
        work = job.limit + _PROMPT * job.prompt  # at most: a new token counts less once it is made
        return self.aging_s * work / (work + self.typical)


# Schedulers by name.
#
# | name | class | what it does |
# |---|---|---|
# | `fcfs` | `FirstCome` | in order of submission |
# | `shortest` | `Shortest` | the shortest remaining work first, with aging |
# | `priority` | `Priority` | the highest priority first, with aging; the lowest makes room |

SCHEDULERS: Mapping[str, Callable[..., Scheduler]] = MappingProxyType(
    {"fcfs": FirstCome, "shortest": Shortest, "priority": Priority}
)


def make_scheduler(scheduler: str | Scheduler, **options: Any) -> Scheduler:
    """Make a scheduler by its name, or pass an object through.

    Args:
        scheduler: A name in `SCHEDULERS`, or a `Scheduler`.
        **options: Arguments of the scheduler's class; none with an object.

    Raises:
        ConfigError: The name or an option is unknown, or the object is no scheduler.
    """
    return made(scheduler, SCHEDULERS, Scheduler, "scheduler", options)  # type: ignore[type-abstract]


# The token budget of a step, divided among rows: chunked prefill beside decodes.


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
        self._asked: list[tuple[int, int]] = []  # numbers and moves of the waiting requests
        self._places: list[int] = []  # their indices, in order
        self._ranks: dict[tuple[int, int], Rank] = {}

    def order(self, waiting: Sequence[Job], now_s: float) -> Iterable[Job]:
        """Return the waiting requests in order."""
        rank = self._scheduler.rank
        if not self._scheduler.steady:
            return sorted(waiting, key=lambda job: rank(job, now_s))
        asked = [(job.number, job.moves) for job in waiting]
        if asked != self._asked:
            self._asked, known = asked, self._ranks
            self._ranks = {
                at: known[at] if at in known else rank(job, now_s)
                for at, job in zip(asked, waiting, strict=True)
            }
            ranks = list(self._ranks.values())
            self._places = sorted(range(len(ranks)), key=ranks.__getitem__)
        return (waiting[place] for place in self._places)


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
    """Mechanism that decides which rows leave and enter, and how many tokens each computes.

    A turn is decided in two calls, since the cached part of a prompt is seen only once the prompt
    is opened: `admit` chooses the rows to set aside and the requests to enter, `share` divides the
    token budget of one step among the active rows. Where pages run out in spite of the count,
    `relieve` names the row to preempt. All three are pure.

    Under every scheduler with a stable order:

    * No request overtakes one that waits in front: if that does not fit, the others wait as well.
    * No prompt enters behind prompts that take all tokens of a step, so that many requests with one
      beginning compute it once: the later ones find it when they enter.
    * The first active row in the order is never preempted, so that it ends; then the next.
    * A row is preempted for a request that waits only if it ranks behind that request, and only if
      all rows that can go make enough room together; then no more go than needed.
    * A row that was preempted before is not preempted for a waiting request until it has made
      `grace` new tokens since its return; twice as many after each time, and at most 16 times as
      many.

    Args:
        scheduler: The order.
        limits: Limits of a step.
        keeps: Returns whether a job's pages are worth keeping in host memory, rather than
            recomputing, as far as measured.

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
        """Divide the token budget of a step among the running rows.

        Rows that decode get their token first; if there are more of them than the budget has
        tokens, the first in the order get one, and a page of the budget, or half of it if that is
        less, is left for rows in prefill. These share the rest in their order. A chunk that does
        not end its prompt ends with a page where another row can use the rest, but the first prompt
        always advances. No token is left over while a row could use it.

        Args:
            active: Active rows; rows that are not running get nothing.
            now_s: Time.

        Returns:
            Rows that get tokens, with their counts: decodes first.
        """
        budget, size = self.limits.token_budget, self.limits.page_size

        def rank(job: Job) -> Rank:
            return self.scheduler.rank(job, now_s)

        shares: list[tuple[Job, int]] = []
        behind: list[Job] = []
        for job in active:
            if job.state == RUNNING:
                missing = job.prompt + job.made - job.ready
                if missing == 1:
                    shares.append((job, 1))
                elif missing > 1:
                    behind.append(job)
        kept = min(size, budget // 2) if behind else 0
        if len(shares) > budget - kept:
            shares.sort(key=lambda share: rank(share[0]))
            kept = min(kept, sum(job.missing for job in behind))
            del shares[budget - kept :]
        if not behind or len(shares) >= budget:
            return shares
        if len(behind) > 1:
            behind.sort(key=rank)
        return shares + _chunks(behind, budget - len(shares), size)

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
