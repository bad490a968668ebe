"""Mutants for `check_scheduler`: schedulers, and mechanisms, of one fault each."""

from __future__ import annotations

import itertools
import math

import pytest

from flowkv.policy.scheduling import (
    COMING,
    RUNNING,
    WAITING,
    FirstCome,
    Priority,
    Room,
    Shortest,
    Turn,
    Turns,
)
from flowkv.testing import check_scheduler
from tests.inside import StateError, WaitingLine
from tests.policy.scheduling.proven import check_turns

FAULTS = (AssertionError, StateError, IndexError)

# --- schedulers ----------------------------------------------------------------------------------


class Nameless(FirstCome):
    name = ""


class Ties(Shortest):
    def rank(self, job, now_s):
        return (job.limit,)


class NoNumber(FirstCome):
    def rank(self, job, now_s):
        return (math.nan, job.number)


class NoTuple(FirstCome):
    def rank(self, job, now_s):
        return [job.number]


class FlipsCoins(FirstCome):
    coins = itertools.count()

    def rank(self, job, now_s):
        return (next(self.coins) % 7, job.number)


class Remembers(FirstCome):
    """Its answers depend on how often it was asked."""

    steady = False

    def __init__(self):
        self.asked = 0

    def rank(self, job, now_s):
        self.asked += 1
        return (job.number if self.asked < 200 else -job.number, job.number)


class Writes(FirstCome):
    def rank(self, job, now_s):
        job.priority += 1
        return super().rank(job, now_s)


class SteadyByName(FirstCome):
    def rank(self, job, now_s):
        return (-(now_s - job.arrived_s) / job.limit, job.number)


class PreemptsInSecret(Priority):
    preempts = False


class NamesWhoWants(Priority):
    def victims(self, active, wanting, now_s):
        named = super().victims(active, wanting, now_s)
        return named if wanting is None else [wanting]


class NamesTwice(Priority):
    def victims(self, active, wanting, now_s):
        return [active[0], active[0]]


class NoAging(Shortest):
    """Promises a bound, and has none."""

    def rank(self, job, now_s):
        return (self.work(job), job.number)


class HalfTheBound(Shortest):
    def bound_s(self, job):
        return super().bound_s(job) / 2


class NoTop(Priority):
    """Bounds what is above the top, and lets it pass all the same."""

    def rank(self, job, now_s):
        return (job.arrived_s - self.aging_s * job.priority, job.number)


class StrictByRank(Priority):
    def rank(self, job, now_s):
        return (-job.priority, job.number)


class LastFirst(FirstCome):
    def rank(self, job, now_s):
        return (-job.number, job.number)


class BelowZero(FirstCome):
    def bound_s(self, job):
        return -1.0


SCHEDULERS = [
    *(Nameless, Ties, NoNumber, NoTuple, FlipsCoins, Remembers, Writes, SteadyByName),
    *(PreemptsInSecret, NamesWhoWants, NamesTwice, NoAging, HalfTheBound, NoTop, StrictByRank),
    *(LastFirst, BelowZero),
]


def _stories(fault) -> int:
    """As many as the suite tells by default; more for mechanisms, and for what few stories show."""
    if fault in (NoTop, LeavesTheFirstOut, OldOrder, PreemptsInVain):
        return 2000
    return 300 if issubclass(fault, Turns) else 100


@pytest.mark.parametrize("fault", SCHEDULERS)
def test_finds_the_fault_of_a_scheduler(fault) -> None:
    with pytest.raises(FAULTS):
        check_scheduler(fault, max_examples=_stories(fault), shrink=False)


# --- mechanisms ----------------------------------------------------------------------------------


class Hasty(Shortest):
    def __init__(self):
        super().__init__(5.0, times=1)


class PassesBy(Turns):
    """Lets smaller ones in where the first does not fit."""

    def admit(self, waiting, active, room, now_s):
        turn = super().admit(waiting, active, room, now_s)
        rest = [job for job in waiting if job not in turn.enter and self.pages(job) < 3]
        rows = len(active) - len(turn.leave) + len(turn.enter)
        if rest and not turn.leave and rows < self.limits.max_rows:
            turn.enter.append(rest[0])
        return turn


class EntersToBeIdle(Turns):
    def _full(self, prompts, job, now_s):
        return False


class WaitsForPrompts(Turns):
    """Behind any prompt, whatever the budget."""

    def _full(self, prompts, job, now_s):
        return bool(prompts)


class CountsNoClaims(Turns):
    def claim(self, job):
        return 0


class IgnoresTheWatermark(Turns):
    def admit(self, waiting, active, room, now_s):
        return super().admit(waiting, active, Room(room.free, 0), now_s)


class OneRowTooMany(Turns):
    def __init__(self, scheduler, limits, keeps):
        super().__init__(scheduler, limits._replace(max_rows=limits.max_rows + 1), keeps)


class OneTokenTooMany(Turns):
    def __init__(self, scheduler, limits, keeps):
        super().__init__(scheduler, limits._replace(token_budget=limits.token_budget + 1), keeps)


class LeavesTokensOver(Turns):
    def share(self, active, now_s):
        return super().share(active, now_s)[:3]


class PromptsFirst(Turns):
    def share(self, active, now_s):
        left, shares = self.limits.token_budget, []
        for job in sorted(active, key=lambda job: -job.missing):
            count = min(left, job.missing) if job.state == RUNNING else 0
            left -= count
            shares += [(job, count)] if count else []
        return shares


class LaterPromptsFirst(Turns):
    def share(self, active, now_s):
        turned = Turns(LastFirst(), self.limits, self.keeps)
        return turned.share(active, now_s)


class LeavesTheFirstOut(Turns):
    """A prompt that cannot end a page gives what is left to another."""

    def share(self, active, now_s):
        shares = super().share(active, now_s)
        for number, (job, count) in enumerate(shares):
            others = [one for one in active if one.state == RUNNING and one.missing >= count > 0]
            others = [one for one in others if one not in [got for got, _ in shares]]
            if others and count < min(job.missing, self.limits.page_size) and job.missing > 1:
                shares[number] = (others[0], count)
                break
        return shares


class CutsAnywhere(Turns):
    def share(self, active, now_s):
        shares = super().share(active, now_s)
        if len(shares) > 1 and min(count for _, count in shares[:2]) > 1:
            (a, x), (b, y) = shares[:2]
            if b.missing > y:
                shares[:2] = [(a, x - 1), (b, y + 1)]
        return shares


class RunsWhatIsComing(Turns):
    def share(self, active, now_s):
        return [(job, 1) for job in active if job.state in (COMING, RUNNING)]


class FirstMakesRoom(Turns):
    def relieve(self, active, now_s):
        first = min(active, key=lambda job: self.scheduler.rank(job, now_s))
        return (first, True) if len(active) > 1 else None


class LastMakesRoom(Turns):
    def relieve(self, active, now_s):
        return super().relieve(active, now_s) or (active[0], False)


class NobodyMakesRoom(Turns):
    def relieve(self, active, now_s):
        return None


class KeepsWhatIsComing(Turns):
    def _keeps(self, job):
        return True


class NoGrace(Turns):
    def _settled(self, job):
        return True


class PreemptsInVain(Turns):
    """Takes whom it gets, whether or not that is enough."""

    def _going(self, active, wanting, rows, pages, now_s):
        going = super()._going(active, wanting, rows, pages, now_s)
        return going or super()._going(active, wanting, rows, min(pages, 1), now_s)


class PreemptsAll(Turns):
    def _going(self, active, wanting, rows, pages, now_s):
        going = super()._going(active, wanting, rows, pages, now_s)
        return [job for job in active if not job.preempted] if going else []


class PreemptsForNobody(Turns):
    def admit(self, waiting, active, room, now_s):
        turn = super().admit(waiting, active, room, now_s)
        return turn._replace(enter=[]) if turn.leave else turn


class EntersAtOnce(Turns):
    """Lets in who came back without room for the others to grow."""

    def pages(self, job):
        return super().pages(job) - 3 * bool(job.preempted)


class Remembering(WaitingLine):
    def order(self, waiting, now_s):
        known, rank = self.__dict__.setdefault("all", {}), self._scheduler.rank
        return sorted(waiting, key=lambda job: known.setdefault(job.number, rank(job, now_s)))


class OldOrder(Turns):
    """Does not see that a request that came back ranks elsewhere now."""

    def __init__(self, scheduler, limits, keeps):
        super().__init__(scheduler, limits, keeps)
        self._line = Remembering(scheduler)


class NobodyEnters(Turns):
    def admit(self, waiting, active, room, now_s):
        return (
            Turn([], [])
            if len(active) == 0 and now_s > 5
            else super().admit(waiting, active, room, now_s)
        )


class SetsAsideAtOnce(Turns):
    def admit(self, waiting, active, room, now_s):
        back = [job for job in active if job.state == RUNNING and job.preempted]
        if back and any(job.state == WAITING for job in waiting):
            return Turn([(back[0], True)], [])
        return super().admit(waiting, active, room, now_s)


MECHANISMS = [
    *((PassesBy, Priority), (EntersToBeIdle, Priority), (WaitsForPrompts, Priority)),
    *((CountsNoClaims, Priority), (IgnoresTheWatermark, Priority), (OneRowTooMany, Priority)),
    *((OneTokenTooMany, Priority), (LeavesTokensOver, Priority), (PromptsFirst, Priority)),
    *((LaterPromptsFirst, Priority), (LeavesTheFirstOut, Hasty), (CutsAnywhere, Hasty)),
    *((RunsWhatIsComing, Priority), (FirstMakesRoom, Priority), (LastMakesRoom, Priority)),
    *((NobodyMakesRoom, Priority), (KeepsWhatIsComing, Priority), (NoGrace, Priority)),
    *((PreemptsInVain, Hasty), (PreemptsAll, Priority), (PreemptsForNobody, Priority)),
    *((EntersAtOnce, Priority), (OldOrder, Hasty), (NobodyEnters, Priority)),
    (SetsAsideAtOnce, Priority),
]


@pytest.mark.parametrize(("fault", "make"), MECHANISMS)
def test_finds_the_fault_of_a_mechanism(fault, make) -> None:
    with pytest.raises(FAULTS):
        check_turns(fault, make, max_examples=_stories(fault), shrink=False)
