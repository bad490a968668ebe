"""Requests in an engine: their rows and pages, restores, prefetches while they wait, and steps."""

from __future__ import annotations

import math
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from contextvars import Context
from heapq import nsmallest
from typing import Any, cast
from weakref import ref

import numpy as np
import torch
from numpy.typing import NDArray

from flowkv.cache import swap
from flowkv.cache.block_table import Planner
from flowkv.cache.kv import KV
from flowkv.cache.mover import rest
from flowkv.cache.restore import Late, RestoreJob, choose
from flowkv.cache.sequence import Sequence
from flowkv.cache.swap import Footprint
from flowkv.compiled import compiling
from flowkv.core.errors import CapacityError
from flowkv.engine.request import Answer, Completion, Reason, Request, yours
from flowkv.engine.runner import OpenRow, Runner
from flowkv.engine.sampling import Choice
from flowkv.observe.events import Admitted, Preempted
from flowkv.policy.scheduling import (
    ASIDE,
    COMING,
    RUNNING,
    WAITING,
    Job,
    Limits,
    Room,
    Scheduler,
    Turn,
    Turns,
    Worth,
)


class RunningRequest(Job):
    """A request with its row and its new tokens. Used only by the thread that runs the engine.

    Attributes:
        request: The request as submitted.
        answer: The answer that `submit` returned.
        choice: Its sampling rule.
        due_s: Its deadline on the clock of `compiling.now_s`.
        begin: Its prompt.
        known: Its prompt, and the tokens made before its row was last dropped.
        tokens: The new tokens.
        row: Its row; None while it has none.
        reused: Tokens of its prompt that were not computed.
        queued_s: Time from submission to the first admission; -1.0 before.
        first_s: Time of its first token; 0.0 before.
        last_s: Time of its latest token.
        restore_s: See `Completion`.
        exposed_s: See `Completion`.
        context: Context of its submission, in which `Queued` is emitted; None afterwards.
        queued: Result of `KV.enqueue` while it waits; None if it was not enqueued.
    """

    def __init__(
        self,
        request: Request,
        prompt: NDArray[np.uint32],
        choice: Choice,
        answer: Answer,
        arrived_s: float,
        context: Context | None,
    ) -> None:
        super().__init__(answer.number, arrived_s, len(prompt), request.max_new_tokens)
        patience_s = math.inf if request.deadline_s is None else request.deadline_s
        self.priority, self.deadline_s = request.priority, arrived_s + patience_s
        self.due_s = compiling.now_s() + patience_s
        self.request, self.answer, self.choice = request, answer, choice
        self.context = context
        self.begin = self.known = prompt
        self.tokens = answer._made
        self.row: OpenRow | None = None
        self.queued: Any = None
        self.reused = 0
        self.queued_s = -1.0
        self.first_s = self.last_s = self.restore_s = self.exposed_s = 0.0

    @property
    def open_row(self) -> OpenRow:
        """Return the row of a request that has one."""
        assert self.row is not None
        return self.row

    def next(self, count: int) -> Any:
        """Return its next token ids, as `KV.step` takes them."""
        ready = self.ready
        if ready < self.known.size:
            return self.known[ready : ready + count]
        return self.tokens[-1:]

    def admitted(self, now_s: float) -> None:
        """Record the end of its first wait."""
        if self.queued_s < 0.0:
            self.queued_s = now_s - self.arrived_s

    def dropped(self, now_s: float) -> None:
        """Return to the queue without a row, and append the new tokens to `known`."""
        self.row, self.ready, self.pages = None, 0, 0
        self.known = np.concatenate([self.begin, np.asarray(self.tokens, np.uint32)])
        self.move(WAITING, now_s)

    def completion(self, reason: Reason, now_s: float) -> Completion:
        """Return its result so far as a `Completion`."""
        further = len(self.tokens) - 1
        return Completion(
            tokens=self.tokens.copy(),
            reason=reason,
            prompt_tokens=self.prompt,
            reused_tokens=self.reused,
            queued_s=now_s - self.arrived_s if self.queued_s < 0.0 else self.queued_s,
            ttft_s=self.first_s - self.arrived_s if self.first_s else 0.0,
            tpot_s=(self.last_s - self.first_s) / further if further > 0 else 0.0,
            seconds=now_s - self.arrived_s,
            preempted=self.preempted,
            restore_s=self.restore_s,
            exposed_s=self.exposed_s,
        )

    @property
    def active(self) -> bool:
        """Return whether it takes part in steps."""
        return self.state in (COMING, RUNNING)


# Rows with a known prefix on its way: they join the others as soon as it is there.
#
# While the prefix is loaded from its back, its front is computed in steps that run anyway. No step
# waits for loads while any row can compute: a row joins once all of its prefix is there. If no
# other row computes, the tokens after the prefix are computed behind the loads, layer by layer.

_PAUSE_S = 0.002
_SHARE, _LONGEST_S = 0.05, 0.1
"""Share of a turn that loads may take from rows that decode; longest turn that is counted."""


class _Wait:
    """Record of a row that waits for its prefix.

    Attributes:
        begun_s: Begin of the wait.
        exposed_s: Time of the wait in which no token of the row was computed.
        computes: Tokens of the row are computed in this turn.
        tokens: Tokens of the prefix that are not on the device.
        n_bytes: Bytes to load.
        loads: Loading the rest is estimated to be faster than computing it.
        seen_s: End of the last turn that was accounted for.
    """

    def __init__(self, restoration: RestoreJob, kv: KV, now_s: float) -> None:
        self.begun_s = self.seen_s = now_s
        self.exposed_s, self.computes = 0.0, False
        request = restoration.request
        source, self.tokens = request.sources[0], request.tokens - request.resident
        self.n_bytes = round(source.cell_bytes * request.layers * self.tokens)
        with kv.lock:
            self.loads = kv.gate.worth({source.tier: self.n_bytes}, self.tokens)

    def see(self, now_s: float) -> None:
        """Account for a turn that is over: exposed unless tokens of the row were computed."""
        if not self.computes:
            self.exposed_s += now_s - self.seen_s
        self.seen_s, self.computes = now_s, False


class RestoreQueue:
    """Rows in state `COMING`. Used only by the thread that runs the engine.

    Args:
        kv: The cache.
    """

    def __init__(self, kv: KV) -> None:
        self._kv = kv
        self._waits: dict[RunningRequest, _Wait] = {}
        self._seen_s = self._turn_s = 0.0
        self._budget, self._alone = 1, True

    def expect(self) -> None:
        """Allow loads for a row that is about to be opened."""
        self._allow(alone=self._alone)

    def await_prefix(self, live: RunningRequest, now_s: float) -> None:
        """Wait for the prefix of a row that was opened, or run the row if it is there."""
        live.ready = live.open_row.seq.length
        restoration = RestoreJob.of(live.open_row.seq)
        if restoration is None:
            self._join(live, now_s)
            return
        self._waits[live] = _Wait(restoration, self._kv, now_s)
        live.move(COMING, now_s)

    def withdraw(self, live: RunningRequest, now_s: float) -> None:
        """End the wait of a row for its prefix, if there is one, and add up its times.

        Without another row that waits, the limit on loads of other callers ends.
        """
        wait = self._waits.pop(live, None)
        if wait is not None:
            wait.see(now_s)
            live.restore_s += now_s - wait.begun_s
            live.exposed_s += wait.exposed_s
        if not self._waits:
            self._allow(alone=True)

    def pace(self, now_s: float, *, alone: bool) -> None:
        """Begin a turn: limit loads to a small share of the time that recent turns took.

        The limit is larger where loading would otherwise take more turns than computing.

        Args:
            now_s: The time.
            alone: No other row computes, so that loads may take the whole turn.
        """
        seconds = min(now_s - self._seen_s, _LONGEST_S)
        self._turn_s += (seconds - self._turn_s) / 4
        self._seen_s, self._alone = now_s, alone
        if self._waits:
            self._allow(alone=alone)

    def _allow(self, *, alone: bool) -> None:
        with self._kv.lock:
            restores = self._kv.restores
            if alone:
                restores.allow()
                return
            tokens = sum(wait.tokens for wait in self._waits.values())
            least_s = _SHARE * self._turn_s
            if tokens:
                turns = -(-tokens // self._budget)
                n_bytes = sum(wait.n_bytes for wait in self._waits.values())
                least_s = max(least_s, n_bytes * restores.s_per_byte / turns)
            restores.allow(least_s)

    def parts(
        self, coming: Items[RunningRequest], budget: int, *, alone: bool, now_s: float
    ) -> list[tuple[RunningRequest, int]]:
        """Return the tokens to compute of restoring rows; those with a whole prefix run now.

        Args:
            coming: Rows in state `COMING`.
            budget: Most tokens of all these rows together.
            alone: No other row computes: one of these may wait for its loads within the step.
            now_s: The time.

        Returns:
            Tokens of each row, from its `ready` on; rows that compute none are left out.
        """
        shares, left = dict[RunningRequest, int](), budget
        self._budget = max(budget, 1)
        if alone:
            self._allow(alone=True)

        def compute(live: RunningRequest, tokens: int) -> None:
            nonlocal left
            if left > 0 and tokens > 0:
                shares[live] = min(tokens, left)
                left -= shares[live]

        for live in coming:
            self._waits[live].see(now_s)
            self._look(live, now_s)
            compute(live, live.missing if live.state == RUNNING else 0)
        fronts = self._due(coming, alone)
        while fronts:
            # If all wait for loads, those without any left are settled.
            over = ((one, 0) for one in fronts if one.exhausted)
            if (found := choose(fronts, max(left, 1)) or next(over, None)) is None:
                break
            restoration, tokens = found
            live = fronts.pop(restoration)
            if not tokens:
                if not restoration.soon:
                    restoration.settle()
                    self._look(live, now_s)
                    compute(live, live.missing if live.state == RUNNING else 0)
            elif left > 0:
                live.ready = live.open_row.seq.length
                compute(live, tokens)
            elif restoration.quiet:  # no load is under way: compute the rest like any prompt
                restoration.finish(ok=False)
                self._join(live, now_s)
        if alone and not shares:  # the tokens after the prefix are computed behind the loads
            for live in coming:
                if live.state == COMING and self._settled(live) is not None:
                    compute(live, live.missing)
        for live in shares.keys() & self._waits.keys():
            self._waits[live].computes = True
        return list(shares.items())

    def late(self, live: RunningRequest, now_s: float) -> bool:
        """End the restore of a row after a load failed: the rest of its prefix is computed.

        Returns:
            Whether the row was waiting for loads.
        """
        restoration = RestoreJob.of(live.open_row.seq)
        if restoration is None:
            return False
        restoration.finish(ok=False)
        self._join(live, now_s)
        return True

    def finish(self, live: RunningRequest) -> None:
        """End the restore of a row that is over, and count the pages that were loaded as reused."""
        restoration = self._settled(live) if live.row is not None else None
        if restoration is not None and restoration.poll():
            restoration.finish(ok=True)
            self._reuse(live)

    def rest(self) -> None:
        """Wait a moment for loads, as there is nothing else to do."""
        with self._kv.lock:
            files = self._kv.restores.files()
        rest(files, _PAUSE_S)

    def _due(self, coming: Items[RunningRequest], alone: bool) -> dict[RestoreJob, RunningRequest]:
        """Return the restores with a front that should be computed in this step.

        While other rows decode, computing a prefix would slow them down, and loading hardly does:
        a prefix is loaded as long as its loads go on and are faster than computing it.
        """
        found = dict[RestoreJob, RunningRequest]()
        for live in coming:
            restoration = RestoreJob.of(live.open_row.seq) if live.state == COMING else None
            if restoration is None or restoration.settled:
                continue
            restoration.pump()
            if alone or not self._waits[live].loads or restoration.quiet:
                found[restoration] = live
        return found

    def _look(self, live: RunningRequest, now_s: float) -> None:
        """End the restore of a row if its settled prefix is complete, or cannot be."""
        restoration, seq = self._settled(live), live.open_row.seq
        if restoration is not None and (there := restoration.poll()) is not None:
            restoration.finish(ok=there)
        live.ready = seq.length
        if seq.restoration is None:
            self._join(live, now_s)

    def _settled(self, live: RunningRequest) -> RestoreJob | None:
        """Return the restore of a row if its front is done."""
        restoration = RestoreJob.of(live.open_row.seq)
        return restoration if restoration is not None and restoration.settled else None

    def _join(self, live: RunningRequest, now_s: float) -> None:
        live.ready = live.open_row.seq.length
        self._reuse(live)
        self.withdraw(live, now_s)
        live.move(RUNNING, now_s)

    def _reuse(self, live: RunningRequest) -> None:
        if not live.preempted:
            live.reused = live.open_row.seq.reused


# Requests that wait: their known pages are prefetched, and pages they will share are counted.

_MOST, _EACH_TURN = 16, 2
"""Most requests that prefetch pages while they wait, and most that start to in one turn."""


class QueuePrefetch:
    """Prefetcher for requests that wait. Used only by the thread that runs the engine.

    Args:
        kv: The cache.
    """

    def __init__(self, kv: KV) -> None:
        self._kv = kv
        self._queued: set[RunningRequest] = set()
        self._probes: dict[RunningRequest, Sequence] = {}

    def look(
        self, waiting: Iterable[RunningRequest], rank: Callable[[RunningRequest], Any]
    ) -> None:
        """Enqueue the next few requests in the cache, which may prefetch their pages.

        Args:
            waiting: Requests that wait.
            rank: Sort key of their order.
        """
        room = min(_EACH_TURN, _MOST - len(self._queued))
        if room <= 0:
            return
        fresh = [live for live in waiting if live.queued is None and live.state == WAITING]
        for live in nsmallest(room, fresh, key=rank):
            request = live.request
            live.queued = self._kv.enqueue(live.known, tenant=request.tenant, salts=request.salts)
            self._queued.add(live)

    def opened(self, live: RunningRequest) -> None:
        """End the prefetch of a request that has a row now."""
        if live.queued is not None and live.queued.waiting:
            for other in self._queued:  # opening the prompt served one with the same key: swap
                served = other.queued
                if served is not None and not served.waiting and served._key == live.queued._key:
                    other.queued, live.queued = live.queued, served
                    break
        self.over(live)

    def over(self, live: RunningRequest) -> None:
        """Cancel the prefetch of a request that will not be served, or end that of a served one."""
        self._probes.pop(live, None)
        if live.queued is not None:
            live.queued.cancel()
            self._queued.discard(live)
            live.queued = None

    def shared(self, live: RunningRequest, footprint: Footprint) -> int:
        """Return how many known pages of a request are in use by others, and so need no room.

        Args:
            live: A request that waits.
            footprint: Counts pages of the cache's pools.
        """
        kv, known = self._kv, live.known.size
        with kv.lock:
            seq = self._probe(live) if live.row is None else live.row.seq
            if Planner.of(seq) is not kv.planner:  # in pools from before the model changed
                return 0
            return footprint.held(seq, min(known, live.ready or known - 1) // kv.page_size)

    def _probe(self, live: RunningRequest) -> Sequence:
        kv, probe = self._kv, self._probes.get(live)
        if (
            probe is None
            or probe.known != live.known.size
            or (probe.planner, probe.namespace) != (kv.planner, kv.namespace)  # another model
        ):
            request = live.request
            probe = kv._lineless(kv._bound(), request.tenant, request.salts)
            probe.extend(live.known)
            self._probes[live] = probe
        return probe


# Carries out decisions of turns: opens, preempts, resumes and closes rows, and counts pages.

_EVERY = 32
"""Turns in which the pages of every row are counted at least once."""


class KVManager:
    """Rows of requests, and the pages that they hold. Used only by the thread that runs the engine.

    Args:
        kv: The cache.
        runner: Opens rows.
        swap_bytes: Most host memory for pages of preempted requests.
        refresh: Detects a changed model; called once in each turn that opens rows.

    Attributes:
        coming: Rows with a prefix on its way.
        ahead: Prefetches pages of requests that wait.
        worth: Decides by measurements whether pages are worth keeping.
    """

    def __init__(
        self, kv: KV, runner: Runner, swap_bytes: int, refresh: Callable[[], object] = lambda: None
    ) -> None:
        self._kv, self._runner, self._swap_bytes = kv, runner, swap_bytes
        self._refresh, self._refreshed_s = refresh, -math.inf
        self._planner = kv._bound()
        self._footprint = Footprint(self._planner)
        self.coming, self.ahead = RestoreQueue(kv), QueuePrefetch(kv)
        self._counted: dict[RunningRequest, int] = {}
        self._turns = 0
        # A weak reference, so that pools from before a model change are freed.
        self._longest: tuple[ref[Planner], int, int] = ref(self._planner), 0, 0
        self.worth = Worth(self._footprint.page_bytes)

    @property
    def closed(self) -> bool:
        """Return whether the cache is closed."""
        return self._kv.closed

    # ---- pages

    def room(self) -> Room:
        """Return free and total pages as schedulers count them."""
        pages = self._pages()
        return Room(pages.room(), pages.total)

    def _pages(self) -> Footprint:
        """Return the page counter of the current pools, which a model change replaces."""
        planner = self._kv.planner
        if planner is not None and planner is not self._planner:
            self._planner, self._footprint = planner, Footprint(planner)
            self.worth.page_bytes = self._footprint.page_bytes
            self._counted.clear()
        return self._footprint

    def longest(self, chunk: int) -> int:
        """Return the tokens of the longest request that fits, computed in chunks. Thread-safe."""
        if self._kv.config.overflow:  # pages that do not fit go to a tier below
            return sys.maxsize
        planner, known = self._kv.planner or self._planner, self._longest
        if known[0]() is not planner or known[1] != chunk:
            known = self._longest = ref(planner), chunk, Footprint(planner).longest(chunk)
        return known[2]

    def chunk(self, rows: int) -> int:
        """Return the most tokens that a step may add to each of so many rows."""
        overflow = self._planner.overflow
        return sys.maxsize if overflow is None or not rows else overflow.chunk(rows)

    def count(self, active: Iterable[RunningRequest], *, exact: bool = True) -> None:
        """Count the pages that rows in progress would free.

        Args:
            active: The rows.
            exact: Count all rows now. Otherwise count rows that have grown, and in every turn some
                of the others, which may share more or fewer pages than before.
        """
        self._turns += 1
        footprint, counted = self._pages(), self._counted
        size = self._planner.page_size
        with self._kv.lock:
            for live in active:
                pages = live.ready // size
                again = exact or not (live.number + self._turns) % _EVERY
                if again or live.state == COMING or counted.get(live) != pages:
                    seq, counted[live] = live.open_row.seq, pages
                    # Pages in pools from before a model change make no room.
                    live.pages = footprint.alone(seq) if Planner.of(seq) is self._planner else 0

    def count_shared(self, live: RunningRequest) -> None:
        """Count the pages that a waiting request will share with those in progress."""
        live.shared = self.ahead.shared(live, self._pages())

    # ---- rows

    def enter(self, live: RunningRequest, now_s: float) -> None:
        """Open a request's row, or put its pages back on the device.

        Args:
            live: The request.
            now_s: Begin of the turn.

        Raises:
            CapacityError: There is no room for the request now; its state is unchanged.
            Exception: The cache refuses the request.
        """
        resumed = live.state == ASIDE
        queued_s = now_s - live.since_s
        if resumed:
            self._move(live, live.open_row.resume, out=False)
            live.admitted(now_s)
            live.move(RUNNING, now_s)
        else:
            if now_s != self._refreshed_s:  # once a turn: its rows are opened for the same model
                self._refresh()
                self._refreshed_s = now_s
            self.coming.expect()
            try:
                live.row = self._runner.open(live.request, live.known, wait=False)
            except BaseException:
                self.coming.withdraw(live, now_s)
                raise
            footprint = self._pages()
            footprint.observe_length(live.prompt + live.limit)
            self.worth.page_bytes = footprint.page_bytes
            self.ahead.opened(live)
            live.admitted(now_s)
            self.coming.await_prefix(live, now_s)
        live.shared = 0
        event = Admitted(
            request=live.number,
            queued_s=queued_s,
            reused_tokens=live.ready,
            resumed=resumed or live.preempted > 0,
            tenant=live.request.tenant or "",
        )
        self._kv.bus.emit(event)

    def leave(self, live: RunningRequest, keep: bool, now_s: float) -> None:
        """Preempt a request: its pages go to host memory, or are dropped.

        Pages are dropped if part of them is being loaded, or if they would exceed `swap_bytes`.
        """
        row, n_bytes, pages = live.open_row, 0, live.pages
        whole = row.seq.restoration is None and not row.seq.away
        keep = keep and live.state == RUNNING and whole and self._fits(live)
        live.preempted += 1
        self._forget(live, now_s)
        if keep:
            n_bytes = self._move(live, row.suspend, out=True) or 0
            live.pages = 0
            live.move(ASIDE, now_s)
        else:
            row.close()
            live.dropped(now_s)
        event = Preempted(request=live.number, pages=pages, n_bytes=n_bytes, kept=keep)
        self._kv.bus.emit(event)

    def close(self, live: RunningRequest, now_s: float, stop: str = "") -> None:
        """Release the row, pages and prefetch of a request."""
        try:
            self.ahead.over(live)
            self.coming.finish(live)
        finally:
            self._forget(live, now_s)
            live.pages = 0
            if live.row is not None:
                live.row.close(stop)
            live.row = None

    def _forget(self, live: RunningRequest, now_s: float) -> None:
        self.coming.withdraw(live, now_s)
        self._counted.pop(live, None)

    def _fits(self, live: RunningRequest) -> bool:
        with self._kv.lock:
            seq = live.open_row.seq
            open_rows = self._kv._open.values()  # also from before a model change
            planners = {id(one.planner): Planner.of(one) for one in open_rows}.values()
            aside = sum(planner.aside_bytes for planner in planners)
            return aside + swap.weigh(Planner.of(seq), seq) <= self._swap_bytes

    def _move(
        self, live: RunningRequest, move: Callable[[], int | None], *, out: bool
    ) -> int | None:
        """Suspend or resume a row, and measure the copy."""
        planner = Planner.of(live.open_row.seq)
        before, begun_s = planner.copied_bytes, time.perf_counter()
        moved = move()
        n_bytes = planner.copied_bytes - before
        if n_bytes:
            seconds = compiling.measured_s(begun_s, time.perf_counter())
            self.worth.observe_move(n_bytes, seconds, out=out)
        return moved


# Turns over real rows: pages and sharing are counted right before each decision.


class CountedTurns(Turns):
    """`Turns` of an engine, which update the page counts of jobs before they decide.

    Only counts that the decision reads are updated: counting all would cost more than deciding.

    Args:
        scheduler: The order of requests.
        limits: Limits of rows, tokens and pages.
        keeper: Counts pages, and estimates which are worth keeping.
    """

    def __init__(self, scheduler: Scheduler, limits: Limits, keeper: KVManager) -> None:
        super().__init__(scheduler, limits, keeper.worth)
        self._keeper = keeper

    def admit(self, waiting: Items[Job], active: Items[Job], room: Room, now_s: float) -> Turn:
        """Decide which rows leave and which requests enter now."""
        # Jobs that cannot be preempted are counted by their length alone.
        everybody = self.scheduler.preempts
        self._count([job for job in active if everybody or job.state == COMING], exact=False)
        return super().admit(waiting, active, room, now_s)

    def relieve(self, active: Items[Job], now_s: float) -> tuple[Job, bool] | None:
        """Choose the row to preempt where rows cannot grow; None if only one is left."""
        self._count(active, exact=True)
        return super().relieve(active, now_s)

    def pages(self, job: Job) -> int:
        """Return the pages that a job needs to enter: for all its known tokens and one more."""
        self._keeper.count_shared(cast(RunningRequest, job))
        return super().pages(job)

    def _count(self, jobs: Items[Job], *, exact: bool) -> None:
        if jobs:
            self._keeper.count(cast("Items[RunningRequest]", jobs), exact=exact)


# Runs a step and, if it fails, finds the request that is at fault.

Part = tuple[RunningRequest, int]
"""A row's part of a step: the request, and its number of new tokens."""


class StepOutcome:
    """Result of a step.

    Attributes:
        done: Parts that were computed, with logits `[B, V]` behind the last token of each.
        failed: Requests that fail by themselves, each with its error.
        short: The error if some of the other parts do not fit; None if they do.
        late: Other requests, in a step that waited for failed loads, each with its error.
    """

    def __init__(self) -> None:
        self.done: list[tuple[Items[Part], torch.Tensor]] = []
        self.failed: list[tuple[RunningRequest, BaseException]] = []
        self.short: CapacityError | None = None
        self.late: list[tuple[RunningRequest, Exception]] = []


def attempt(runner: Runner, parts: Items[Part]) -> StepOutcome:
    """Run a step; if it raises, run as many of its rows as possible.

    A step that raises leaves its rows unchanged (`Runner.step`); rows that it advanced all the same
    fail with its error. The step is tried again without the rows that have no token yet, then half
    by half, until the rows that raise alone are found.

    Args:
        runner: Runs the model.
        parts: Parts of rows outside any step.
    """
    outcome = StepOutcome()
    suspects = [parts] if runner.together else [[part] for part in reversed(parts)]
    while suspects:
        given = group = suspects.pop()
        error, group = _run(runner, given, outcome)
        if error is None or not group:
            continue
        if isinstance(error, CapacityError):
            outcome.short = error
        elif isinstance(error, Late):
            outcome.late += [(live, error) for live, _ in group]
        elif len(group) == 1:
            outcome.failed.append((group[0][0], error))
        else:
            suspects += _newest(group) if given is parts else _halves(group)
    return outcome


def follow(runner: Any, parts: Items[Part], ids: torch.Tensor) -> StepOutcome | None:
    """Run a step over tokens that are not read yet; None if it raises and changed nothing.

    Args:
        runner: A `PackedRunner`.
        parts: Parts of rows that decode.
        ids: The next token of each row, int64 `[B]` on the device.
    """
    outcome = StepOutcome()
    error, _ = _run(runner, parts, outcome, ids)
    return None if error is not None and not outcome.failed else outcome


def _run(
    runner: Any, parts: Items[Part], outcome: StepOutcome, ids: torch.Tensor | None = None
) -> tuple[BaseException | None, Items[Part]]:
    """Run a step; return its error or None, and the parts of rows that did not move."""
    rows = [live.row for live, _ in parts]
    before = [*map(_length, parts)]
    try:
        given = [live.next(tokens) for live, tokens in parts] if ids is None else ids
        logits = runner.step(rows, given)
    except BaseException as error:  # the model may raise anything
        if not yours(error):
            raise
        _let_go(error)
        still = [part for part, was in zip(parts, before, strict=True) if _length(part) == was]
        outcome.failed += [(part[0], error) for part in parts if part not in still]
        return error, still
    outcome.done.append((parts, logits))
    return None, parts


def _length(part: Part) -> int:
    """Return the number of a row's tokens in its pages, -1 without a row."""
    row = part[0].row
    return -1 if row is None else row.seq.length


def _newest(parts: Items[Part]) -> list[Items[Part]]:
    """Split parts into those without a token and the others, which run first; else in halves."""
    fresh = [part for part in parts if not part[0].tokens]
    others = [part for part in parts if part[0].tokens]
    return [fresh, others] if fresh and others else _halves(parts)


def _halves(parts: Items[Part]) -> list[Items[Part]]:
    middle = len(parts) // 2
    return [parts[middle:], parts[:middle]]


def _let_go(error: BaseException | None) -> None:
    """Clear the frames of a failed forward, which hold activations; tracebacks keep their lines."""
    left, seen = [error], set[int]()
    while left:
        one = left.pop()
        if one is not None and id(one) not in seen:  # errors may cause each other
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            left += [one.__cause__, one.__context__]
