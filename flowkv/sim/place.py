"""One place that a trace is replayed through: policy, hints, queue and prefetches in their order.

Without hints, queue and prefetches this is `run_through` (`flowkv.sim.loop`), decision by decision.
What the prefetcher brings is there at once; how long a transfer takes is for `flowkv.sim.tiers`.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowkv.policy.base import NEVER_NS, Policy, Slots, Visit
from flowkv.policy.order.compiled import Array, kernel
from flowkv.policy.prefetch import Prefetcher
from flowkv.sim.conversations import Hints
from flowkv.sim.trace import Trace

Progress = Callable[[int, int], None]
"""Called with what is done, and all there is to do."""


@kernel
def climb(here: Array, seen: Array, parents: Array, tip: int, out: Array) -> tuple[int, int]:
    """Writes `tip` and its ancestors up to the first that is here; how many, and that one or -1.

    No more than there is room for.
    """
    n = 0
    while tip >= 0 and n < len(out) and not here[tip] and seen[tip]:
        out[n] = tip
        n += 1
        tip = parents[tip]
    return n, tip


class Course:
    """What happened, request by request.

    Attributes:
        hits: i8 [R], leading blocks that were there.
        held: i8 [R], blocks that were there.
        loaded: i8 [R], blocks that were not, and had been asked for before.
        policy_ns: i8 [R], time that the calls of the policy took; measured.
        prefetched: Blocks brought by prefetches.
        prefetch_used: Of these, asked for before they left.
    """

    def __init__(self, requests: int) -> None:
        self.hits, self.held, self.loaded, self.policy_ns = np.zeros((4, requests), np.int64)
        self.prefetched = self.prefetch_used = 0


class OnePlace:
    """A place of equal blocks, one byte each, above one that has all blocks ever asked for.

    It is the `Reach` of its prefetcher.

    Args:
        trace: What to replay.
        policy: A fresh policy.
        capacity: Blocks that fit.
        hints: What the application hints after each request; none without.
        sigma: Error of the hints, as the policy is told.
        queue_ns: Each request is known so long before it runs.
        prefetcher: Brings blocks before they are asked for.
        costs_ns: i8 [U], time to compute each block anew.
    """

    def __init__(
        self,
        trace: Trace,
        policy: Policy,
        capacity: int,
        *,
        hints: Hints | None = None,
        sigma: float = 0.0,
        queue_ns: int = 0,
        prefetcher: Prefetcher | None = None,
        costs_ns: NDArray[np.int64] | None = None,
    ) -> None:
        self.trace, self.policy, self.capacity_bytes = trace, policy, capacity
        self.hints, self.sigma, self.queue_ns = hints, sigma, queue_ns
        self.prefetcher, self.costs_ns = prefetcher, costs_ns
        self.here = np.zeros(trace.unique, np.bool_)
        self.seen = np.zeros(trace.unique, np.bool_)
        self.unproven = np.zeros(trace.unique, np.bool_)  # prefetched, not asked for yet
        self.owners = np.zeros(trace.unique, np.int32)  # tenants that asked first
        self.used = 0
        self.course = Course(len(trace))
        self._due = int(trace.times_ns[0]) if len(trace) else 0
        self._path = np.empty(int(trace.depths.max(initial=0)) + 1, np.int64)

    # ---- what a prefetcher asks

    def room_bytes(self) -> int:
        """See `Reach`."""
        return self.capacity_bytes - self.used

    def sizes(self, slots: Slots) -> Slots:
        """See `Reach`."""
        return np.ones(len(slots), np.int64)

    def missing(self, tip: int) -> tuple[int, Slots]:
        """See `Reach`."""
        if tip >= len(self.here):
            return -1, self._path[:0].copy()
        n, top = climb(self.here, self.seen, self.trace.parents, tip, self._path)
        if top >= 0 and not self.here[top]:  # a gap: the source never saw what lies above
            return -1, self._path[:0].copy()
        return int(top), self._path[:n][::-1].copy()

    # ---- the replay

    def run(self, progress: Progress | None = None) -> Course:
        """Replays the trace from cold.

        Args:
            progress: Called now and then with the requests done and all requests.
        """
        times = self.trace.times_ns.tolist()
        every = max(1, len(times) // 100)
        queued = 0
        for r, now in enumerate(times):
            while self.queue_ns and queued < len(times) and times[queued] - self.queue_ns <= now:
                self.enqueue(max(times[queued] - self.queue_ns, times[0]), queued)
                queued += 1
            self.prefetch(now)
            self.step(r, now)
            if progress is not None and r % every == every - 1:
                progress(r + 1, len(times))
        return self.course

    def chain(self, r: int) -> Slots:
        """The blocks of a request."""
        return self.trace.blocks[self.trace.offsets[r] : self.trace.offsets[r + 1]]

    def step(self, r: int, now: int) -> None:
        """One request, that takes no time."""
        trace, policy, course, chain = self.trace, self.policy, self.course, self.chain(r)
        start = perf_counter_ns()
        run_out = policy.expired(now)
        course.policy_ns[r] += perf_counter_ns() - start
        if len(run_out):
            policy.remove(run_out)
            self._left(now, run_out)
        held = self.here[chain]
        hits = len(chain) if held.all() else int(held.argmin())
        new = chain[~held]
        again = int(np.count_nonzero(self.seen[new]))
        course.hits[r], course.held[r], course.loaded[r] = hits, len(chain) - len(new), again
        self.owners[new[~self.seen[new]]] = trace.tenants[r]
        self.seen[new] = True
        self._asked(now, r, chain, hits, again)
        visit = Visit(r, int(trace.sessions[r]), int(trace.input_tokens[r]), len(chain))
        parents, said = trace.parents[new], self._said(int(trace.tenants[r]), new)
        stop, output = int(trace.stops[r]), int(trace.output_tokens[r])
        self.here[new] = True
        self.used += len(new)
        start = perf_counter_ns()
        policy.access(now, chain, visit)
        if len(new):
            policy.insert(now, new, parents, **said)
        policy.complete(now, r, stop=stop, output_tokens=output)
        if self.hints is not None:
            self._hint(now, r, policy)
        surplus = self.used - self.capacity_bytes
        victims = policy.evict(now, surplus) if surplus > 0 else None
        course.policy_ns[r] += perf_counter_ns() - start
        if victims is not None:
            self._left(now, victims)
        if self.prefetcher is not None:
            if self.hints is not None:
                self._hint(now, r, self.prefetcher)
            self._due = self.prefetcher.due_ns(now)

    def _hint(self, now: int, r: int, to: Policy | Prefetcher) -> None:
        """What the application says after a request: what is not sent again, and when the rest."""
        assert self.hints is not None
        chain, n = self.chain(r), int(self.hints.counts[r])
        if n < len(chain):
            to.hint(now, chain, NEVER_NS)
        if n > 0:
            to.hint(now, chain[:n], int(self.hints.etas_ns[r]), self.sigma)

    def enqueue(self, now: int, r: int) -> None:
        """A request is known that will run later."""
        self.prefetch(now)
        chain = self.chain(r)
        known = self.seen[chain]
        chain = chain if known.all() else chain[: int(known.argmin())]
        self.policy.enqueue(now, r, chain)
        if self.prefetcher is not None:
            self.prefetcher.enqueue(now, r, chain)
            self._bring(now)

    def prefetch(self, until: int) -> None:
        """Lets the prefetcher decide, as often as it wants to, up to `until`."""
        if self.prefetcher is None:
            return
        while self._due <= until:
            self._bring(self._due)
            self._due = self.prefetcher.due_ns(self._due)

    def _bring(self, now: int) -> None:
        assert self.prefetcher is not None
        for fetch in self.prefetcher.plan(now, self.policy, self):
            self._gone(fetch.victims)
            if len(fetch.slots):
                said = self._said(int(self.owners[fetch.slots[-1]]), fetch.slots)
                self.policy.insert(now, fetch.slots, self.trace.parents[fetch.slots], **said)
                self.here[fetch.slots] = self.unproven[fetch.slots] = True
                self.used += len(fetch.slots)
                self.course.prefetched += len(fetch.slots)
            self.prefetcher.landed(now, fetch.slots)

    def _asked(self, now: int, r: int, chain: Slots, hits: int, loaded: int) -> None:
        if self.prefetcher is not None:
            waiting = self.unproven[chain]
            self.course.prefetch_used += int(np.count_nonzero(waiting[:hits]))
            self.unproven[chain] = False
            self.prefetcher.accessed(now, chain, hits, loaded, r)

    def _said(self, tenant: int, new: Slots) -> dict[str, Any]:
        said: dict[str, Any] = {"tenant": tenant}
        if self.costs_ns is not None and len(new):
            said["cost_ns"] = int(self.costs_ns[new].mean())
        return said

    def _left(self, now: int, slots: Slots) -> None:
        self._gone(slots)
        if self.prefetcher is not None:
            self.prefetcher.left(now, slots)

    def _gone(self, slots: Slots) -> None:
        self.here[slots] = self.unproven[slots] = False
        self.used -= len(slots)
