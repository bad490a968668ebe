"""Carries out what turns decide: rows are opened, preempted, resumed, closed; pages are counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from typing import Any
from weakref import ref

from flowkv.core import compiling
from flowkv.engine.ahead import Ahead
from flowkv.engine.coming import Coming
from flowkv.engine.live import Live
from flowkv.engine.runner import Runner
from flowkv.observe.events import Admitted, Preempted
from flowkv.policy.scheduling import ASIDE, COMING, RUNNING, Room
from flowkv.policy.scheduling.worth import Worth
from flowkv.runtime import swap
from flowkv.runtime.cache import KV
from flowkv.runtime.footprint import Footprint
from flowkv.runtime.planner import Planner
from flowkv.runtime.restores import rest

_PAUSE_S = 0.002
_EVERY = 32
"""Turns in which the pages of every row are counted at least once."""


class Keeper:
    """Rows of requests, and the pages that they hold. Belongs to the thread that runs the engine.

    Args:
        kv: The cache.
        runner: Opens rows.
        swap_bytes: Most host memory for pages of preempted requests.

    Attributes:
        worth: Says whether pages are worth keeping, by what was measured.
    """

    def __init__(self, kv: KV, runner: Runner, swap_bytes: int = 1 << 32) -> None:
        self._kv, self._runner, self._swap_bytes = kv, runner, swap_bytes
        self._planner = kv._bound()
        self._footprint = Footprint(self._planner)
        self._coming, self._ahead = Coming(kv), Ahead(kv)
        self._counted: dict[Live, int] = {}
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
        planner, known = self._kv.planner or self._planner, self._longest
        if known[0]() is not planner or known[1] != chunk:
            known = self._longest = ref(planner), chunk, Footprint(planner).longest(chunk)
        return known[2]

    def count(self, active: Iterable[Live], *, exact: bool = True) -> None:
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
                    live.pages = footprint.alone(seq) if seq.planner is self._planner else 0

    def share(self, live: Live) -> None:
        """Counts the pages that a request which waits will share with those in progress."""
        live.shared = self._ahead.shared(live, self._pages())

    # ---- rows

    def look_ahead(self, waiting: Iterable[Live], rank: Callable[[Live], Any]) -> None:
        """See `Ahead.look`."""
        self._ahead.look(waiting, rank)

    def enter(self, live: Live, now_s: float) -> None:
        """Opens a request's row, or puts its pages back.

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
            self._coming.expect()
            try:
                live.row = self._runner.open(live.request, live.known, wait=False)
            except BaseException:
                self._coming.forget(live, now_s)
                raise
            footprint = self._pages()
            footprint.learn(live.prompt + live.limit)
            self.worth.page_bytes = footprint.page_bytes
            self._ahead.opened(live)
            live.admitted(now_s)
            self._coming.begin(live, now_s)
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

    def leave(self, live: Live, keep: bool, now_s: float) -> None:
        """Preempts a request: its pages go to host memory, or are dropped.

        They are dropped where part of them is on its way, or more would lie in host memory than
        it was given.
        """
        row, n_bytes, pages = live.open_row, 0, live.pages
        keep = keep and live.state == RUNNING and row.seq.restoration is None and self._fits(live)
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

    def close(self, live: Live, now_s: float, stop: str = "") -> None:
        """Gives back what a request holds."""
        try:
            self._ahead.over(live)
            self._coming.finish(live)
        finally:
            self._forget(live, now_s)
            live.pages = 0
            if live.row is not None:
                live.row.close(stop)
            live.row = None

    def _forget(self, live: Live, now_s: float) -> None:
        self._coming.forget(live, now_s)
        self._counted.pop(live, None)

    def _fits(self, live: Live) -> bool:
        with self._kv.lock:
            seq = live.open_row.seq
            open_rows = self._kv._open.values()  # of before the model changed, too
            planners = {id(one.planner): one.planner for one in open_rows}.values()
            aside = sum(planner.aside_bytes for planner in planners)
            return aside + swap.weigh(seq.planner, seq) <= self._swap_bytes

    def _move(self, live: Live, move: Callable[[], int | None], *, out: bool) -> int | None:
        """Suspends or resumes a row, and measures what it copied."""
        planner = live.open_row.seq.planner
        before, begun_s = planner.copied_bytes, time.perf_counter()
        moved = move()
        n_bytes = planner.copied_bytes - before
        if n_bytes:
            seconds = compiling.measured_s(begun_s, time.perf_counter())
            self.worth.moved(n_bytes, seconds, out=out)
        return moved

    # ---- rows whose prefix is on its way

    def pace(self, active: Iterable[Live], now_s: float) -> None:
        """See `Coming.pace`."""
        self._coming.pace(now_s, alone=not any(live.state == RUNNING for live in active))

    def come(
        self, coming: Items[Live], budget: int, *, alone: bool, now_s: float
    ) -> list[tuple[Live, int]]:
        """See `Coming.parts`."""
        return self._coming.parts(coming, budget, alone=alone, now_s=now_s)

    def late(self, live: Live, now_s: float) -> bool:
        """See `Coming.late`."""
        return live.state == COMING and self._coming.late(live, now_s)

    def rest(self, coming: Items[Live]) -> None:
        """Waits a moment for what is on its way: there is nothing else to do."""
        if any(live.state == COMING for live in coming):
            with self._kv.lock:
                files = self._kv.restores.files()
            rest(files, _PAUSE_S)
