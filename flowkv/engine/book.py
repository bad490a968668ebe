"""Who is served by an engine: taken in, ended, answered."""

from __future__ import annotations

import heapq
import logging
import math
import time
from collections import deque
from collections.abc import Iterable

from flowkv.core import compiling
from flowkv.core.errors import StateError
from flowkv.engine.answer import Answer, Desk, tell
from flowkv.engine.inbox import Inbox
from flowkv.engine.keeper import Keeper
from flowkv.engine.live import Live
from flowkv.engine.news import News
from flowkv.engine.request import Completion, Reason
from flowkv.policy.scheduling import OVER, WAITING

_log = logging.getLogger("flowkv")
_STOPS: dict[Reason, str] = {"stop": "turn_end", "length": "cut_off"}


class Book(Desk):
    """Requests from their submission to their answer. Belongs to the thread that runs turns.

    What is to be done stays where it is noted until it was done: whoever is interrupted in between
    finds it there again (`reset`), and to do it twice does no harm.

    Args:
        keeper: Keeps rows and pages.
        inbox: What other threads ask.
        news: Told what happens.

    Attributes:
        waiting: Requests that wait or were set aside.
        active: Requests that have part in steps.
    """

    def __init__(self, keeper: Keeper, inbox: Inbox, news: News) -> None:
        super().__init__()
        self.keeper, self.inbox, self.news = keeper, inbox, news
        self.waiting: list[Live] = []
        self.active: list[Live] = []
        self._lives: dict[int, Live] = {}
        self._deadlines: list[tuple[float, int]] = []
        # Answers to be given, once everything else of the turn is in order.
        self._due: deque[tuple[Answer, Completion, BaseException | None]] = deque()
        self._told: list[Answer] = []

    @property
    def idle(self) -> bool:
        """Whether no request is under way."""
        return not self._lives

    def call_off(self, number: int) -> None:
        """See `Desk.call_off`."""
        self.inbox.call_off(number)

    # ---- in

    def _take_in(self, now_s: float) -> None:
        """Takes what was asked since the last turn, and ends what comes too late."""
        inbox = self.inbox
        off = len(inbox.off)  # before the others: whoever is called off was handed in before
        self._take_fresh()
        for _ in range(off):
            self._call_off(inbox.off[0], "cancelled", now_s)
            inbox.off.popleft()
        if inbox.now:
            for number in list(self._lives):
                self._call_off(number, "cancelled", now_s)
        while self._deadlines and self._deadlines[0][0] <= compiling.now_s():
            self._call_off(self._deadlines[0][1], "deadline", now_s)
            heapq.heappop(self._deadlines)
        inbox.waiting = len(self.waiting)

    def _take_fresh(self) -> None:
        while self.inbox.fresh:
            self._take(live := self.inbox.fresh[0])
            self.news.queued(live, len(self.waiting))
            self.inbox.taken()

    def _take(self, live: Live) -> None:
        self._lives[live.number] = live
        self.waiting.append(live)
        if live.due_s < math.inf:
            if len(self._deadlines) > 2 * len(self._lives) + 64:  # most of them are over
                self._deadlines = [one for one in self._deadlines if one[1] in self._lives]
                heapq.heapify(self._deadlines)
            heapq.heappush(self._deadlines, (live.due_s, live.number))

    def _call_off(self, number: int, reason: Reason, now_s: float) -> None:
        live = self._lives.get(number)
        if live is not None:
            self._end(live, now_s, reason)

    # ---- out

    def _end(
        self,
        live: Live,
        now_s: float,
        reason: Reason = "cancelled",
        error: BaseException | None = None,
    ) -> None:
        """Ends a request; its answer is given at the end of the turn."""
        if live.number not in self._lives:
            return
        for some in (self.waiting, self.active):
            if live in some:
                some.remove(live)
        live.move(OVER, now_s)
        self._close(live, now_s, "" if error else _STOPS.get(reason, ""))
        completion = live.completion(reason, now_s)
        self._due.append((live.answer, completion, error))
        del self._lives[live.number]
        self.news.finished(live, completion, "failed" if error else reason)

    def _close(self, live: Live, now_s: float, stop: str = "") -> None:
        try:
            self.keeper.close(live, now_s, stop)
        except Exception:  # its pages are the cache's to account for; others go on
            _log.exception("request %d could not be closed", live.number)

    def _answer(self) -> None:
        """Wakes those who wait for tokens, and gives answers."""
        if self._told:
            tell(self._told)
            self._told.clear()
        while self._due:  # whatever a callback raises, the others are still to be called
            answer, completion, error = self._due[0]
            answer.settle(completion, error)
            self._due.popleft()

    # ---- when all goes wrong

    def fail(self, error: BaseException) -> None:
        """Ends everything: what decides about requests raised, and nothing is certain any more."""
        if self.keeper.closed:  # whatever that led to
            closed = StateError("its cache was closed", "Close an engine before its cache")
            closed.__cause__, error = error, closed
        self.inbox.close(now=True, why=error)
        self._take_fresh()
        for live in list(self._lives.values()):
            failure = StateError(f"the engine failed: {error!r}", "See the cause; make a new one")
            failure.__cause__ = error
            self._end(live, time.perf_counter(), error=failure)
        self._answer()

    def reset(self, off: Iterable[Answer]) -> None:
        """Begins requests anew after a turn was interrupted anywhere; their tokens stay.

        Args:
            off: Those whose requests are called off instead.
        """
        now_s = time.perf_counter()
        self._take_fresh()
        for answer, _, _ in self._due:  # they ended, and nobody notes that again
            self._lives.pop(answer.number, None)
        self.waiting, self.active = list(self._lives.values()), []
        for live in self.waiting:
            live.made = len(live.tokens)
            if live.state != WAITING or live.row is not None:
                self._close(live, now_s)
                live.dropped(now_s)
        for answer in off:
            self._call_off(answer.number, "cancelled", now_s)
        self.inbox.waiting = len(self.waiting)
        self._answer()
