"""Schedulers: the order in which requests are served, and the rows to preempt for them.

A scheduler is pure like every policy here: no I/O, no clock of its own, no randomness, and no state
beside its arguments. The engine (`flowkv.engine`) and the simulator (`flowkv.sim.serving`) drive
the same objects through the same mechanism (`turns.Turns`), which prevents starvation under any
order: no request overtakes one that waits in front, the request that ranks first is never
preempted, and a preempted row is safe for a while once it is back.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from flowkv.core.errors import ConfigError
from flowkv.policy.base import made

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
        "arrived_s",
        "back_at",
        "deadline_s",
        "limit",
        "made",
        "moves",
        "number",
        "pages",
        "preempted",
        "priority",
        "prompt",
        "ready",
        "shared",
        "since_s",
        "state",
        "waited_s",
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
