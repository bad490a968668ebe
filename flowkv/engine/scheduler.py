"""What an engine has in hand: rows with their pages, those on their way, those that wait."""

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
from flowkv.cache.kv import KV, end
from flowkv.cache.mover import rest
from flowkv.cache.restore import Late, RestoreJob, choose
from flowkv.cache.sequence import Sequence
from flowkv.cache.swap import Footprint
from flowkv.core import compiling
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
)
from flowkv.policy.scheduling.turns import Worth


class RunningRequest(Job):
    """A request, its row, and what was made of it. Belongs to the thread that runs the engine.

    Attributes:
        request: What was asked.
        answer: Where it goes.
        choice: How its tokens are chosen.
        due_s: Its deadline, as by `compiling.now_s`.
        begin: Its prompt.
        known: Its prompt, and what was made of it before its row was dropped last.
        tokens: The new tokens.
        row: Its row; None while it has none.
        reused: Tokens of its prompt that needed no computing.
        queued_s: From submission until it was first admitted.
        first_s: When its first token was there; 0.0 before.
        last_s: When its latest token was there.
        restore_s: See `Completion`.
        exposed_s: See `Completion`.
        context: Where it was submitted, for those who are told that it was; None afterwards.
        queued: What `KV.enqueue` returned, while it waits; None where nobody looked ahead.
    """

    __slots__ = (
        "answer",
        "begin",
        "choice",
        "context",
        "due_s",
        "exposed_s",
        "first_s",
        "known",
        "last_s",
        "queued",
        "queued_s",
        "request",
        "restore_s",
        "reused",
        "row",
        "tokens",
    )

    def __init__(
        self,
        request: Request,
        prompt: NDArray[np.uint32],
        choice: Choice,
        answer: Answer,
        arrived_s: float,
        context: Context | None,
    ) -> None:
        late = math.inf if request.deadline_s is None else arrived_s + request.deadline_s
        super().__init__(
            answer.number,
            arrived_s,
            len(prompt),
            request.max_new_tokens,
            priority=request.priority,
            deadline_s=late,
        )
        self.due_s = math.inf if request.deadline_s is None else compiling.now_s()
        self.due_s += request.deadline_s or 0.0
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
        """Its row."""
        assert self.row is not None
        return self.row

    def next(self, count: int) -> Any:
        """Its next token ids, as `KV.step` takes them."""
        ready = self.ready
        if ready < self.known.size:
            return self.known[ready : ready + count]
        return self.tokens[-1:]

    def admitted(self, now_s: float) -> None:
        """Notes the end of its first wait."""
        if self.queued_s < 0.0:
            self.queued_s = now_s - self.arrived_s

    def dropped(self, now_s: float) -> None:
        """Its row is gone; it is begun anew, with what it made."""
        self.row, self.ready, self.pages = None, 0, 0
        self.known = np.concatenate([self.begin, np.asarray(self.tokens, np.uint32)])
        self.move(WAITING, now_s)

    def completion(self, reason: Reason, now_s: float) -> Completion:
        """What became of it."""
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
        """Whether it has part in steps."""
        return self.state in (COMING, RUNNING)


# Rows whose known prefix is on its way: they join the others as soon as it is there.
#
# While it is loaded from its back, its front is computed in steps that run anyway. Nobody waits
# for loads as long as anybody can compute: rows join once all of their prefix is there. Where
# nobody else computes, what follows the prefix is computed behind the loads, layer by layer.

_PAUSE_S = 0.002
_SHARE, _LONGEST_S = 0.05, 0.1
"""Part of a turn that loads take from rows that decode; a turn that waited says nothing."""


class _Wait:
    """Since when a row waits for its prefix, and what for.

    Attributes:
        begun_s: Since when.
        exposed_s: How much of that nothing of it was computed.
        computes: Something of it is computed in this turn.
        tokens: That are not there.
        n_bytes: To load.
        loads: All of it is loaded in less time than it takes to compute.
    """

    __slots__ = ("begun_s", "computes", "exposed_s", "loads", "n_bytes", "seen_s", "tokens")

    def __init__(self, restoration: RestoreJob, kv: KV, now_s: float) -> None:
        self.begun_s = self.seen_s = now_s
        self.exposed_s, self.computes = 0.0, False
        request = restoration.request
        source, self.tokens = request.sources[0], request.tokens - request.resident
        self.n_bytes = round(source.cell_bytes * request.layers * self.tokens)
        with kv.lock:
            self.loads = kv.gate.worth({source.tier: self.n_bytes}, self.tokens)

    def see(self, now_s: float) -> None:
        """A turn is over in which something of it was computed, or not."""
        if not self.computes:
            self.exposed_s += now_s - self.seen_s
        self.seen_s, self.computes = now_s, False


class RestoreQueue:
    """Rows in state `COMING`. Belongs to the thread that runs the engine.

    Args:
        kv: The cache.
    """

    def __init__(self, kv: KV) -> None:
        self._kv = kv
        self._waits: dict[RunningRequest, _Wait] = {}
        self._seen_s = self._turn_s = 0.0
        self._budget, self._alone = 1, True

    def expect(self) -> None:
        """A row is about to be opened, and to ask for what it lacks."""
        self._allow(alone=self._alone)

    def begin(self, live: RunningRequest, now_s: float) -> None:
        """A row was opened: its prefix is on its way, or there."""
        live.ready = live.open_row.seq.length
        restoration = RestoreJob.of(live.open_row.seq)
        if restoration is None:
            self._join(live, now_s)
            return
        self._waits[live] = _Wait(restoration, self._kv, now_s)
        live.move(COMING, now_s)

    def forget(self, live: RunningRequest, now_s: float) -> None:
        """A row is closed; what is on its way for it is called off with that."""
        self._over(live, now_s)
        self._lift()

    def _lift(self) -> None:
        """Where nothing is on its way for the engine, others of the cache are not held up."""
        if not self._waits:
            self._allow(alone=True)

    def pace(self, now_s: float, *, alone: bool) -> None:
        """A turn begins: loads may take a small part of what the last one took.

        Or more, if they take longer than computing the same in so many turns otherwise.

        Args:
            now_s: The time.
            alone: Nobody else computes, so that they may take all of it.
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
        """What they compute in the next step; those whose prefix is there run from now on.

        Args:
            coming: Rows in state `COMING`.
            budget: Most tokens, of all of them together.
            alone: Nobody else computes: one of them may wait for its loads within the step.
            now_s: The time.

        Returns:
            Tokens of each, from its `ready` on; rows that compute none are left out.
        """
        shares: dict[RunningRequest, int] = {}
        self._budget = max(budget, 1)
        if alone:
            self._allow(alone=True)
        for live in coming:
            self._waits[live].see(now_s)
            self._look(live, now_s)
            budget -= self._joined(live, budget, shares)
        budget -= self._fronts(self._due(coming, alone), budget, shares, now_s)
        if alone and not shares:  # what follows is computed behind the loads
            for live in coming:
                if live.state == COMING and self._settled(live) and budget > 0:
                    shares[live] = min(live.missing, budget)
                    budget -= shares[live]
        for live in shares:
            if live in self._waits:
                self._waits[live].computes = True
        return list(shares.items())

    def late(self, live: RunningRequest, now_s: float) -> bool:
        """A step found that loads of a row do not come: the rest of its prefix is computed.

        Returns:
            Whether it waited for any.
        """
        restoration = RestoreJob.of(live.open_row.seq)
        if restoration is None:
            return False
        end(self._kv, restoration, ok=False)
        self._join(live, now_s)
        return True

    def finish(self, live: RunningRequest) -> None:
        """A row is over right after a step behind its loads: what came is known from now on."""
        restoration = RestoreJob.of(live.row.seq) if live.row is not None else None
        if restoration is not None and restoration.settled and restoration.poll():
            end(self._kv, restoration, ok=True)
            self._reuse(live)

    def rest(self) -> None:
        """Waits a moment for what is on its way: there is nothing else to do."""
        with self._kv.lock:
            files = self._kv.restores.files()
        rest(files, _PAUSE_S)

    def _due(self, coming: Items[RunningRequest], alone: bool) -> dict[RestoreJob, RunningRequest]:
        """Those of whose front something should be computed now, if there is anything.

        Where others decode, computing would slow them down, and loading hardly does: as long as
        loads go on, and all of it is loaded in less time than it takes to compute, it is loaded.
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

    def _fronts(
        self,
        fronts: dict[RestoreJob, RunningRequest],
        budget: int,
        shares: dict[RunningRequest, int],
        now_s: float,
    ) -> int:
        """Hands out what is computed from the front meanwhile; returns the tokens."""
        left = budget
        while fronts:
            found = choose(fronts, max(left, 1))
            if found is None:  # all wait for loads, unless the policy has none under way
                found = next(((one, 0) for one in fronts if one.exhausted), None)
            if found is None:
                break
            restoration, tokens = found
            live = fronts.pop(restoration)
            if not tokens and restoration.soon:
                continue
            if not tokens:
                restoration.settle()
                self._look(live, now_s)
                left -= self._joined(live, left, shares)
            elif left > 0:
                live.ready = live.open_row.seq.length
                shares[live] = min(tokens, left)
                left -= shares[live]
            elif restoration.quiet:  # it only waits for its turn, like others
                end(self._kv, restoration, ok=False)
                self._join(live, now_s)
        return budget - left

    def _look(self, live: RunningRequest, now_s: float) -> None:
        """Sees whether a settled prefix is there, or is not going to be."""
        seq = live.open_row.seq
        restoration, there = RestoreJob.of(seq), None
        if restoration is not None and restoration.settled:
            there = restoration.poll()
            if there is not None:
                end(self._kv, restoration, ok=there)
        live.ready = seq.length
        if seq.restoration is None:
            self._join(live, now_s)

    def _settled(self, live: RunningRequest) -> bool:
        restoration = RestoreJob.of(live.open_row.seq)
        return restoration is not None and restoration.settled

    def _joined(self, live: RunningRequest, budget: int, shares: dict[RunningRequest, int]) -> int:
        """A row that runs now takes part at once, as far as the budget goes."""
        if live.state != RUNNING or budget <= 0 or live.missing <= 0:
            return 0
        shares[live] = min(live.missing, budget)
        return shares[live]

    def _join(self, live: RunningRequest, now_s: float) -> None:
        live.ready = live.open_row.seq.length
        self._reuse(live)
        self._over(live, now_s)
        live.move(RUNNING, now_s)
        self._lift()

    def _reuse(self, live: RunningRequest) -> None:
        if not live.preempted:
            live.reused = live.open_row.seq.reused

    def _over(self, live: RunningRequest, now_s: float) -> None:
        """A row waits no longer for its prefix, be it that it is there."""
        wait = self._waits.pop(live, None)
        if wait is not None:
            wait.see(now_s)
            live.restore_s += now_s - wait.begun_s
            live.exposed_s += wait.exposed_s


# Requests that wait: what is known of them comes nearer, and what they will share is looked up.

_MOST, _EACH_TURN = 16, 2
"""Requests whose pages come nearer while they wait, and those that one turn begins with."""


class QueuePrefetch:
    """Looks at requests that wait. Belongs to the thread that runs the engine.

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
        """Tells the cache of a few requests that are to be served next: it may fetch their pages.

        Args:
            waiting: Who waits.
            rank: Their order.
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
        """A request has a row now: opening its prompt has served one that waited for it."""
        self._probes.pop(live, None)
        if live.queued is None:
            return
        self._queued.discard(live)
        if live.queued.waiting:  # it served another request for the same prompt: they change places
            for other in self._queued:
                served = other.queued
                if served is not None and not served.waiting and served._key == live.queued._key:
                    other.queued, live.queued = live.queued, None
                    break
            else:
                live.queued.cancel()
        live.queued = None

    def over(self, live: RunningRequest) -> None:
        """A request will not be served."""
        self._probes.pop(live, None)
        if live.queued is not None:
            live.queued.cancel()
            self._queued.discard(live)
            live.queued = None

    def shared(self, live: RunningRequest, footprint: Footprint) -> int:
        """Pages of what is known of a request that others hold now, so that it needs no room.

        Args:
            live: It waits.
            footprint: Counts pages of the cache's pools.
        """
        kv, known = self._kv, live.known.size
        with kv.lock:
            if live.row is not None:
                seq = live.row.seq
            else:
                seq = self._probe(live)
            if Planner.of(seq) is not kv.planner:  # in pools of before the model changed
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


# Carries out what turns decide: rows are opened, preempted, resumed, closed; pages are counted.

_EVERY = 32
"""Turns in which the pages of every row are counted at least once."""


class KVManager:
    """Rows of requests, and the pages that they hold. Belongs to the thread that runs the engine.

    Args:
        kv: The cache.
        runner: Opens rows.
        swap_bytes: Most host memory for pages of preempted requests.
        refresh: Notices that the model has changed, once in each turn that opens rows.

    Attributes:
        coming: Rows whose prefix is on its way.
        ahead: Looks at requests that wait.
        worth: Says whether pages are worth keeping, by what was measured.
    """

    def __init__(
        self,
        kv: KV,
        runner: Runner,
        swap_bytes: int,
        refresh: Callable[[], object] = lambda: None,
    ) -> None:
        self._kv, self._runner, self._swap_bytes = kv, runner, swap_bytes
        self._refresh, self._refreshed_s = refresh, -math.inf
        self._planner = kv._bound()
        self._footprint = Footprint(self._planner)
        self.coming, self.ahead = RestoreQueue(kv), QueuePrefetch(kv)
        self._counted: dict[RunningRequest, int] = {}
        self._turns = 0
        # Pools of before the model changed are not held.
        self._longest: tuple[ref[Planner], int, int] = ref(self._planner), 0, 0
        self.worth = Worth(self._footprint.page_bytes)

    @property
    def closed(self) -> bool:
        """Whether the cache is closed."""
        return self._kv.closed

    # ---- pages

    def room(self) -> Room:
        """Pages as schedulers count them."""
        pages = self._pages()
        return Room(pages.room(), pages.total)

    def _pages(self) -> Footprint:
        """Counts pages where rows are opened now: pools are made anew for a model that changed."""
        planner = self._kv.planner
        if planner is not None and planner is not self._planner:
            self._planner, self._footprint = planner, Footprint(planner)
            self.worth.page_bytes = self._footprint.page_bytes
            self._counted.clear()
        return self._footprint

    def longest(self, chunk: int) -> int:
        """Tokens of the longest request that fits, computed in chunks of so many. Thread-safe."""
        if self._kv.config.overflow:  # what does not fit goes below
            return sys.maxsize
        planner, known = self._kv.planner or self._planner, self._longest
        if known[0]() is not planner or known[1] != chunk:
            known = self._longest = ref(planner), chunk, Footprint(planner).longest(chunk)
        return known[2]

    def chunk(self, rows: int) -> int:
        """Most tokens that a step may add to each of so many rows."""
        overflow = self._planner.overflow
        return sys.maxsize if overflow is None or not rows else overflow.chunk(rows)

    def count(self, active: Iterable[RunningRequest], *, exact: bool = True) -> None:
        """Counts the pages that rows in progress would give back.

        Args:
            active: The rows.
            exact: All of them, now. Otherwise those that have grown, and of the others, which may
                share more or less than before, some in every turn.
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
                    # What is in pools of before makes no room for anybody.
                    live.pages = footprint.alone(seq) if Planner.of(seq) is self._planner else 0

    def share(self, live: RunningRequest) -> None:
        """Counts the pages that a request which waits will share with those in progress."""
        live.shared = self.ahead.shared(live, self._pages())

    # ---- rows

    def enter(self, live: RunningRequest, now_s: float) -> None:
        """Opens a request's row, or puts its pages back.

        Args:
            live: The request.
            now_s: When its turn began.

        Raises:
            CapacityError: There is no room for it now; it stays where it was.
            Exception: What the cache refuses it for.
        """
        resumed = live.state == ASIDE
        queued_s = now_s - live.since_s
        if resumed:
            self._move(live, live.open_row.resume, out=False)
            live.admitted(now_s)
            live.move(RUNNING, now_s)
        else:
            if now_s != self._refreshed_s:  # rows of one turn are opened by the same model
                self._refresh()
                self._refreshed_s = now_s
            self.coming.expect()
            try:
                live.row = self._runner.open(live.request, live.known, wait=False)
            except BaseException:
                self.coming.forget(live, now_s)
                raise
            footprint = self._pages()
            footprint.learn(live.prompt + live.limit)
            self.worth.page_bytes = footprint.page_bytes
            self.ahead.opened(live)
            live.admitted(now_s)
            self.coming.begin(live, now_s)
        live.shared = 0
        if self._kv.bus.wants(Admitted):
            self._kv.bus.emit(
                Admitted(
                    request=live.number,
                    queued_s=queued_s,
                    reused_tokens=live.ready,
                    resumed=resumed or live.preempted > 0,
                    tenant=live.request.tenant or "",
                )
            )

    def leave(self, live: RunningRequest, keep: bool, now_s: float) -> None:
        """Preempts a request: its pages go to host memory, or are dropped.

        They are dropped where part of them is on its way, or more would lie in host memory than
        it was given.
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
        if self._kv.bus.wants(Preempted):
            self._kv.bus.emit(
                Preempted(request=live.number, pages=pages, n_bytes=n_bytes, kept=keep)
            )

    def close(self, live: RunningRequest, now_s: float, stop: str = "") -> None:
        """Gives back what a request holds."""
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
        self.coming.forget(live, now_s)
        self._counted.pop(live, None)

    def _fits(self, live: RunningRequest) -> bool:
        with self._kv.lock:
            seq = live.open_row.seq
            open_rows = self._kv._open.values()  # of before the model changed, too
            planners = {id(one.planner): Planner.of(one) for one in open_rows}.values()
            aside = sum(planner.aside_bytes for planner in planners)
            return aside + swap.weigh(Planner.of(seq), seq) <= self._swap_bytes

    def _move(
        self, live: RunningRequest, move: Callable[[], int | None], *, out: bool
    ) -> int | None:
        """Suspends or resumes a row, and measures what it copied."""
        planner = Planner.of(live.open_row.seq)
        before, begun_s = planner.copied_bytes, time.perf_counter()
        moved = move()
        n_bytes = planner.copied_bytes - before
        if n_bytes:
            seconds = compiling.measured_s(begun_s, time.perf_counter())
            self.worth.moved(n_bytes, seconds, out=out)
        return moved


# Turns over real rows: pages are counted, and sharing looked up, right where it is decided.


class CountedTurns(Turns):
    """`Turns` of an engine: what they look at is brought up to date first.

    No more than that: counting everything in every turn would cost more than deciding.

    Args:
        scheduler: The order.
        limits: What may be done at once.
        keeper: Counts, and says whose pages are worth keeping.
    """

    def __init__(self, scheduler: Scheduler, limits: Limits, keeper: KVManager) -> None:
        super().__init__(scheduler, limits, keeper.worth)
        self._keeper = keeper

    def admit(self, waiting: Items[Job], active: Items[Job], room: Room, now_s: float) -> Turn:
        """Who leaves and who enters now."""
        # Who cannot be preempted is counted by its length alone.
        everybody = self.scheduler.preempts
        self._count([job for job in active if everybody or job.state == COMING], exact=False)
        return super().admit(waiting, active, room, now_s)

    def relieve(self, active: Items[Job], now_s: float) -> tuple[Job, bool] | None:
        """Who goes where rows in progress cannot grow; None where only one is left."""
        self._count(active, exact=True)
        return super().relieve(active, now_s)

    def pages(self, job: Job) -> int:
        """Pages that a job needs to enter: those of all that is known of it, and one to go on."""
        self._keeper.share(cast(RunningRequest, job))
        return super().pages(job)

    def _count(self, jobs: Items[Job], *, exact: bool) -> None:
        if jobs:
            self._keeper.count(cast("Items[RunningRequest]", jobs), exact=exact)


# Runs a step, and finds out whose fault it is if it fails.

Part = tuple[RunningRequest, int]
"""A row's part of a step: whose, and how many new tokens."""


class StepOutcome:
    """What became of a step.

    Attributes:
        done: Parts that were computed, with logits `[B, V]` behind the last token of each.
        failed: Requests that fail by themselves, and with what.
        short: Why some of the other parts do not fit; None if they do.
        late: Others whose step waited for loads that do not come, and what it raised.
    """

    __slots__ = ("done", "failed", "late", "short")

    def __init__(self) -> None:
        self.done: list[tuple[Items[Part], torch.Tensor]] = []
        self.failed: list[tuple[RunningRequest, BaseException]] = []
        self.short: CapacityError | None = None
        self.late: list[tuple[RunningRequest, Exception]] = []


def attempt(runner: Runner, parts: Items[Part]) -> StepOutcome:
    """Runs a step; where it raises, as many of its rows as possible.

    A step that raises leaves its rows where they were (`Runner.step`); rows that it took further
    all the same fail with what it raised. It is tried again without the rows that have no token
    yet, then half by half, until who raises alone is known.

    Args:
        runner: Runs the model.
        parts: Of rows in no step.
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
    """Runs a step over tokens that are not read yet; None where it raises and changed nothing.

    Args:
        runner: Runs the model; a `PackedRunner`.
        parts: Of rows that decode.
        ids: int64 `[B]`: the token of each.
    """
    outcome = StepOutcome()
    error, _ = _run(runner, parts, outcome, ids)
    return None if error is not None and not outcome.failed else outcome


def _run(
    runner: Any, parts: Items[Part], outcome: StepOutcome, ids: torch.Tensor | None = None
) -> tuple[BaseException | None, Items[Part]]:
    """Runs a step; what it raised, and the rows that are where they were then."""
    rows = [live.row for live, _ in parts]
    before = [*map(_length, parts)]
    try:
        given = [live.next(tokens) for live, tokens in parts] if ids is None else ids
        logits = runner.step(rows, given)
    except BaseException as error:  # of the model, which may raise anything
        if not yours(error):
            raise
        _let_go(error)
        still = [part for part, was in zip(parts, before, strict=True) if _length(part) == was]
        outcome.failed += [(part[0], error) for part in parts if part not in still]
        return error, still
    outcome.done.append((parts, logits))
    return None, parts


def _length(part: Part) -> int:
    """Return how many tokens of a row are in its pages."""
    row = part[0].row
    return -1 if row is None else row.seq.length


def _newest(parts: Items[Part]) -> list[Items[Part]]:
    """The rows that have no token yet, and the others, who come first; halves if all are alike."""
    fresh = [part for part in parts if not part[0].tokens]
    others = [part for part in parts if part[0].tokens]
    return [fresh, others] if fresh and others else _halves(parts)


def _halves(parts: Items[Part]) -> list[Items[Part]]:
    middle = len(parts) // 2
    return [parts[middle:], parts[:middle]]


def _let_go(error: BaseException | None) -> None:
    """Frees what the frames of a failed forward hold, activations above all; lines stay known."""
    left, seen = [error], set[int]()
    while left:
        one = left.pop()
        if one is not None and id(one) not in seen:  # they may be the cause of each other
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            left += [one.__cause__, one.__context__]
