"""Who is served by an engine: taken in, ended, answered."""

from __future__ import annotations

import heapq
import logging
import math
import time
from collections import deque
from collections.abc import Iterable

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
        self._fresh: deque[Live] = deque()  # out of the inbox, and not among these yet
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
        fresh, off = self.inbox.take()
        self._fresh += fresh
        while self._fresh:
            self._take(self._fresh[0])
            self.news.queued(self._fresh.popleft(), len(self.waiting))
        for number in off:
            self._call_off(number, "cancelled", now_s)
        if self.inbox.now:
            for number in list(self._lives):
                self._call_off(number, "cancelled", now_s)
        while self._deadlines and self._deadlines[0][0] <= now_s:
            self._call_off(heapq.heappop(self._deadlines)[1], "deadline", now_s)
        self.inbox.waiting = len(self.waiting)

    def _take(self, live: Live) -> None:
        self._lives[live.number] = live
        self.waiting.append(live)
        if live.deadline_s < math.inf:
            if len(self._deadlines) > 2 * len(self._lives) + 64:  # most of them are over
                self._deadlines = [one for one in self._deadlines if one[1] in self._lives]
                heapq.heapify(self._deadlines)
            heapq.heappush(self._deadlines, (live.deadline_s, live.number))

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
        if self._lives.pop(live.number, None) is None:
            return
        for some in (self.waiting, self.active):
            if live in some:
                some.remove(live)
        live.move(OVER, now_s)
        try:
            self.keeper.close(live, now_s, "" if error else _STOPS.get(reason, ""))
        except Exception:  # its pages are the cache's to account for; others go on
            _log.exception("request %d could not be closed", live.number)
        finally:  # whatever interrupts it, somebody waits for the answer
            completion = live.completion(reason, now_s)
            self._due.append((live.answer, completion, error))
        self.news.finished(live, completion, "failed" if error else reason)

    def _answer(self) -> None:
        """Wakes those who wait for tokens, and gives answers."""
        if self._told:
            told, self._told = self._told, []
            tell(told)
        while self._due:  # whatever a callback raises, the others are still to be called
            answer, completion, error = self._due.popleft()
            answer.settle(completion, error)

    # ---- when all goes wrong

    def fail(self, error: BaseException) -> None:
        """Ends everything: what decides about requests raised, and nothing is certain any more."""
        self.inbox.close(now=True, why=error)
        for live in (*self._fresh, *self.inbox.take().fresh):
            self._take(live)
        self._fresh.clear()
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
        while self._fresh:
            self._take(self._fresh.popleft())
        self.waiting, self.active = list(self._lives.values()), []
        for live in self.waiting:
            live.made = len(live.tokens)
            if live.state != WAITING or live.row is not None:
                self.keeper.close(live, now_s)
                live.dropped(now_s)
        for answer in off:
            self._call_off(answer.number, "cancelled", now_s)
        self._answer()
