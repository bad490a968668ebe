"""The way to one tier and back: sends what the schedule says, matches answers, measures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import cast

from flowkv.core import compiling
from flowkv.core.errors import FlowKVError
from flowkv.policy.prefetch.regret import RegretGuard
from flowkv.policy.rates import Rates
from flowkv.runtime.schedule import Priority, Schedule, Verdict, Wish
from flowkv.tiers.base import Completion, Load, Outcome, Store, Tier
from flowkv.tiers.frame import BadFrame, wanted

_STORE_DEADLINE_S = 60.0
_BACKGROUND_S = 0.1
_LEAST_BYTES, _MOST_BYTES = 1 << 23, 1 << 26
"""A demand may find writes before it that take so long, and are so many bytes."""


class _Job:
    """Wishes that were sent together; a place becomes None once its wish is answered."""

    __slots__ = ("bytes", "left", "seconds", "sent_s", "wishes")

    def __init__(self, wishes: Sequence[Wish], sent_s: float) -> None:
        self.wishes: list[Wish | None] = list(wishes)
        self.left, self.sent_s = len(wishes), sent_s
        self.bytes, self.seconds = 0, 0.0


class Lane:
    """Transfers of one tier. Callers hold the KV lock.

    Args:
        tier: The tier.
        deadline_s: Longest wait for a load.
        loads: What loads from it take.
        clock_ns: Tells the guard the time.

    Attributes:
        schedule: What waits and what is in flight.
        guard: Whether prefetches go on, and how many bytes of them at a time.
        loads: What loads from it took when somebody waited for them.
        stores: What stores to it took.
        overdue: Loads that it owes after their deadline.
        cancelled: Loads that were called off.
    """

    def __init__(
        self,
        tier: Tier,
        deadline_s: float,
        loads: Rates,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.tier, self.deadline_s, self.clock_ns = tier, deadline_s, clock_ns
        self.guard = RegretGuard()
        self.schedule, self.loads, self.stores = Schedule(), loads, Rates()
        self.overdue = self.cancelled = 0
        self._jobs: dict[int, _Job] = {}
        self._busy_until_s = 0.0

    # ---- asking

    def ask(self, wish: Wish) -> Verdict:
        """Queues a wish; `pump` sends it. A prefetch is refused while the guard says so."""
        if wish.priority is Priority.DEMAND:
            self.guard.demanded(self.clock_ns(), wish.n_bytes, self.schedule.in_the_way())
        elif wish.priority is Priority.PREFETCH and not self.guard.allows(self.clock_ns()):
            self.schedule.refused += 1
            return Verdict.REFUSED
        return self.schedule.ask(wish)

    def pump(self) -> int:
        """Sends what may be sent now, one job for all loads of an owner and one for all stores."""
        if self.schedule.waits(Priority.PREFETCH):
            self.schedule.chunk_bytes = self.guard.chunk_bytes(self.loads)
            if not self.guard.allows(self.clock_ns()):
                self.cancel(None)
        batch, jobs = self.schedule.take(), dict[tuple[bool, int], list[Wish]]()
        for wish in batch:
            jobs.setdefault((wish.stores, id(wish.owner)), []).append(wish)
        for wishes in jobs.values():
            self._send(wishes)
        return len(batch)

    def _send(self, wishes: list[Wish]) -> None:
        sent_s = time.monotonic()
        try:
            if wishes[0].stores:
                stores = [cast(Store, wish.item) for wish in wishes]
                job = self.tier.submit_store(stores, deadline_s=_STORE_DEADLINE_S)
            else:
                loads = [cast(Load, wish.item) for wish in wishes]
                patience_s = self.patience_s(sum(wish.n_bytes for wish in wishes))
                job = self.tier.submit_load(loads, deadline_s=patience_s)
        except FlowKVError:  # closed, or opened before a fork: a miss like any other
            for wish in wishes:
                self._answer(wish, Completion(0, 0, wish.item.key, Outcome.FAILED, "closed"))
        else:
            self._jobs[job] = _Job(wishes, sent_s)

    def settle(self, timeout_s: float = 0.0) -> int:
        """Sends and handles until neither goes on; waits up to `timeout_s` for a first answer."""
        self.pump()
        handled = fresh = self.poll(timeout_s)
        while fresh and self.pump():
            fresh = self.poll()
            handled += fresh
        return handled

    @property
    def busy(self) -> bool:
        """Whether something waits, is in flight, or is owed."""
        return bool(self._jobs) or bool(self.schedule)

    def patience_s(self, n_bytes: int) -> float:
        """How long to wait for so many bytes."""
        return self.loads.patience_s(n_bytes, self.deadline_s)

    # ---- answers

    def poll(self, timeout_s: float = 0.0) -> int:
        """Handles answers that are there, or the first within `timeout_s`. Returns how many."""
        if not self._jobs:
            return 0
        answers = self.tier.poll(timeout_s)
        for answer in answers:
            job = self._jobs.get(answer.job)
            wish = job.wishes[answer.item] if job else None
            if job is None or wish is None:
                continue
            job.wishes[answer.item] = None
            job.left -= 1
            self._measure(job, answer)
            if not job.left:
                del self._jobs[answer.job]
            self._answer(wish, answer)
        return len(answers)

    def _answer(self, wish: Wish, answer: Completion) -> None:
        """Answers a wish, and those that followed it: with its bytes, or by asking anew."""
        followers = self.schedule.end(wish)
        self.cancelled += answer.reason == "cancelled"
        if not followers:
            wish.flying, wish.ended = False, True
            wish.done(answer)
            return
        failed = answer.outcome is Outcome.FAILED
        again = [follower for follower in followers if failed and not follower.stores]
        if answer.outcome is Outcome.HIT:
            given = cast(Load, wish.item).target.cast("B")[: answer.n_bytes]
            for follower in followers:
                cast(Load, follower.item).target.cast("B")[: answer.n_bytes] = given
        for one in (wish, *followers):
            if one not in again:
                one.flying, one.ended = False, True
                one.done(answer)
        self._ask_again(again)

    def _ask_again(self, wishes: Iterable[Wish]) -> None:
        for wish in wishes:
            if self.schedule.ask(wish) is Verdict.REFUSED:
                wish.ended = True
                wish.done(Completion(0, 0, wish.item.key, Outcome.FAILED, "busy"))

    def _measure(self, job: _Job, answer: Completion) -> None:
        """Rates of stores; those of loads are measured by who waits for them."""
        if answer.outcome is not Outcome.STORED or not answer.n_bytes:
            return
        job.bytes += answer.n_bytes
        job.seconds = max(job.seconds, answer.seconds)
        if not job.left:  # jobs in flight at one time share the tier
            end_s = job.sent_s + job.seconds
            begun_s = max(job.sent_s, self._busy_until_s)
            self.stores.add(job.bytes, compiling.measured_s(begun_s, end_s))
            self._busy_until_s = max(end_s, self._busy_until_s)
            bound = round(self.stores.bytes_per_s * _BACKGROUND_S)
            self.schedule.background_bytes = min(max(bound, _LEAST_BYTES), _MOST_BYTES)

    # ---- calling off

    def give_up(self, wish: Wish) -> bool:
        """Waits for a load no longer; whether the tier still owes it, and so its target is lent."""
        if self.schedule.withdraw(wish):
            wish.ended = True
            return False
        if wish.ended:
            return False
        self._ask_again(self.schedule.retire(wish))
        self.overdue += 1
        done = wish.done

        def late(answer: Completion) -> None:
            self.overdue -= 1
            done(answer)

        wish.done = late
        self._call_off({wish})
        return True

    def cancel(self, owner: object) -> int:
        """Calls off the loads of an owner (None: all prefetches) that nobody else waits for."""
        known = [one for wish in self.schedule for one in (wish, *wish.followers)]
        mine = [one for one in known if one.owner is not None and owner in (None, one.owner)]
        if owner is None:
            mine = [one for one in mine if not one.demanded]
        flying = set()
        for wish in mine:
            if self.schedule.withdraw(wish):
                self.cancelled += 1
                wish.ended = True
                wish.done(Completion(0, 0, wish.item.key, Outcome.FAILED, "cancelled"))
            elif not wish.followers:
                flying.add(wish)
        self._call_off(flying)
        return len(mine)

    def _call_off(self, wishes: set[Wish]) -> None:
        """Tells the tier to cancel jobs of which nothing else is wanted any more."""
        for number, job in list(self._jobs.items()):
            left = {wish for wish in job.wishes if wish is not None}
            if left <= wishes and left:
                self.tier.cancel(number)


def from_memory(load: Load, store: Store) -> Completion | None:
    """Answers a load with the body of a store that is under way; None if it is not what is asked.

    The bytes never left this process, so there is nothing to verify.
    """
    info, body, step = store.info, store.body.cast("B"), store.info.stripe_bytes
    try:
        wanted(info, load.layout, load.fidelity)
    except BadFrame:
        return None
    stripes = body.nbytes // step
    end = load.first + load.stripes if load.stripes else stripes
    n_bytes = (end - load.first) * step
    if not 0 <= load.first < end <= stripes or n_bytes > load.target.nbytes:
        return None
    load.target.cast("B")[:n_bytes] = body[load.first * step : end * step]
    return Completion(0, 0, load.key, Outcome.HIT, "", info, n_bytes)
