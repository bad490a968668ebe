"""The turns of an engine: requests come in, a step is run over all rows, tokens go out."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Items
from threading import Lock
from typing import cast

import torch

from flowkv.core import compiling
from flowkv.core.errors import CapacityError, StateError
from flowkv.engine.answer import Answer
from flowkv.engine.book import Book
from flowkv.engine.failure import Outcome, Part, attempt
from flowkv.engine.inbox import Inbox
from flowkv.engine.keeper import Keeper
from flowkv.engine.live import Live
from flowkv.engine.news import News, Times
from flowkv.engine.runner import Runner
from flowkv.engine.sampling import Drawn, draw
from flowkv.observe.events import Bus
from flowkv.policy.scheduling import ASIDE, COMING, Turns

_PAUSE_S = 0.002


class Loop(Book):
    """Runs requests, turn after turn, on one thread at a time.

    Args:
        runner: Runs the model.
        keeper: Keeps rows and pages.
        turns: Decides who is served.
        inbox: What other threads ask.
        bus: Told what happens.
        patience_s: How long a request that is alone waits for pages that others hold.

    Attributes:
        drive: Held by the thread that runs turns.
    """

    def __init__(
        self,
        runner: Runner,
        keeper: Keeper,
        turns: Turns,
        inbox: Inbox,
        bus: Bus,
        *,
        patience_s: float = 1.0,
    ) -> None:
        super().__init__(keeper, inbox, News(bus))
        self.runner, self.turns = runner, turns
        self.drive = Lock()
        self._patience_s = patience_s
        self._stuck = -1, 0.0  # number of who waits for pages of others, and since when
        # Tokens that were chosen, and the places where they belong, until they are handed out.
        self._made: deque[tuple[Live, int, Drawn]] = deque()

    @property
    def busy(self) -> bool:
        """Whether a thread runs turns, or there is something to do for one."""
        return self.drive.locked() or not self.idle or self.inbox.pending

    def turn(self) -> None:
        """Takes in what was asked, runs one step if there is anything to compute, answers."""
        if self.keeper.closed:
            self.fail(StateError("the cache is closed", "Open a new one"))
            return
        began_s = time.perf_counter()
        self._take_in(began_s)
        self.keeper.pace(self.active, began_s)
        if self.waiting:
            self._admit(began_s)
        if self.active:
            self._step(began_s)
        self._answer()

    # ---- who is in

    def _admit(self, now_s: float) -> None:
        while self.waiting and self._let_in(now_s):
            pass  # what a prompt still needs is known once it is in: there may be room for more
        if not self.active and self.waiting:
            self._force(now_s)
        if self.waiting:
            rank = self.turns.scheduler.rank
            self.keeper.look_ahead(self.waiting, lambda live: rank(live, now_s))
        self.inbox.waiting = len(self.waiting)

    def _let_in(self, now_s: float) -> bool:
        """Has some leave and some enter; whether all of those entered, and nobody left."""
        turn = self.turns.admit(self.waiting, self.active, self.keeper.room(), now_s)
        for job, keep in turn.leave:
            self._leave(cast(Live, job), keep, now_s)
        for job in turn.enter:
            if self._enter(cast(Live, job), now_s) is not None:
                return False
        return bool(turn.enter) and not turn.leave

    def _force(self, now_s: float) -> None:
        """Nobody computes and nobody may enter: whoever is first has to, or who holds a line."""
        order = sorted(self.waiting, key=lambda live: self.turns.scheduler.rank(live, now_s))
        aside = next((live for live in order if live.state == ASIDE), order[0])
        for live in dict.fromkeys((order[0], aside)):
            short = self._enter(live, now_s)
            if short is None:
                return
        if short is not None and not self._patient(order[0]):
            self._end(order[0], now_s, error=short)

    def _patient(self, live: Live) -> bool:
        """Waits a moment for pages that others than the engine hold; False if it was long."""
        now_s = compiling.now_s()
        if self._stuck[0] != live.number:
            self._stuck = live.number, now_s
        if now_s - self._stuck[1] < self._patience_s:
            time.sleep(_PAUSE_S)
            return True
        self._stuck = -1, 0.0
        return False

    def _enter(self, live: Live, now_s: float) -> CapacityError | None:
        """Lets a request in; why not, if there is no room."""
        try:
            self.keeper.enter(live, now_s)
        except CapacityError as error:
            return error
        except Exception as error:  # the cache refuses it, or a tier of the user's own fails
            self._end(live, now_s, error=error)
            return None
        self.waiting.remove(live)
        self.active.append(live)
        return None

    def _leave(self, live: Live, keep: bool, now_s: float) -> None:
        try:
            self.keeper.leave(live, keep, now_s)
        except Exception as error:  # the host has no memory for its pages, for instance
            self._end(live, now_s, error=error)
            return
        self.active.remove(live)
        self.waiting.append(live)

    # ---- a step

    def _step(self, began_s: float) -> None:
        parts = self._parts(began_s)
        if not parts:
            self.keeper.rest([live for live in self.active if live.state == COMING])
            return
        forward_s = time.perf_counter()
        outcome = self._attempt(parts)
        sampling_s = time.perf_counter()
        done = [part for some, _ in outcome.done for part in some]
        if done:
            self._stuck = -1, 0.0
        self._advance(outcome)
        times = Times(began_s, forward_s, sampling_s, time.perf_counter())
        # Until tokens are chosen: before that, nobody waits for what a GPU has been asked.
        tokens = sum(count for _, count in done)
        self.keeper.worth.step(tokens, compiling.measured_s(forward_s, times.chosen_s))
        if not self.news.steps:
            self._hand_out(None)
            return
        made, gaps = len(self._made), list[float]()
        room = self.keeper.room()  # before rows that are over are closed
        self._hand_out(gaps)
        self.news.step(done, made, gaps, times, self.waiting, room)

    def _attempt(self, parts: Items[Part]) -> Outcome:
        """Runs a step, with as many rows as there is room for."""
        outcome = attempt(self.runner, parts)
        while outcome.short is not None and not outcome.done and self._relieve(outcome.short):
            parts = [part for part in parts if part[0].active]
            if not parts:
                break
            outcome = attempt(self.runner, parts)
        now_s = time.perf_counter()
        for live, error in outcome.failed:
            self._end(live, now_s, error=error)
        behind = [self.keeper.late(live, now_s) for live, _ in outcome.late]
        if not any(behind):  # nobody waited for loads: who says so anyway would do it for ever
            for live, error in outcome.late:
                self._end(live, now_s, error=error)
        return outcome

    def _parts(self, now_s: float) -> list[Part]:
        shares = cast("list[Part]", self.turns.share(self.active, now_s))
        coming = [live for live in self.active if live.state == COMING]
        if coming:
            left = self.turns.limits.token_budget - sum(count for _, count in shares)
            shares += self.keeper.come(coming, left, alone=not shares, now_s=now_s)
        return shares

    def _relieve(self, short: CapacityError) -> bool:
        """Makes room for rows that cannot grow; False if there is nobody who could."""
        now_s = time.perf_counter()
        gone = self.turns.relieve(self.active, now_s)
        if gone is not None:
            self._leave(cast(Live, gone[0]), gone[1], now_s)
            return True
        if not self._patient(self.active[-1]):
            self._end(self.active[-1], now_s, error=short)
        return False

    def _advance(self, outcome: Outcome) -> None:
        """Counts what was computed, and draws the next token where all that is known is."""
        for parts, logits in outcome.done:
            ends = []
            for place, (live, count) in enumerate(parts):
                live.ready += count
                if live.ready == live.prompt + live.made:
                    ends.append(place)
            if ends:
                self._draw([parts[place][0] for place in ends], _rows(logits, ends))

    def _draw(self, lives: Items[Live], logits: torch.Tensor) -> None:
        """Keeps each token as soon as it is chosen: no choice can be made again."""
        before, places = len(self._made), [live.made for live in lives]
        try:
            with torch.no_grad():
                drawn = draw([live.choice for live in lives], logits)
                self._made.extend(zip(lives, places, drawn, strict=True))
        except Exception as error:  # nobody knows whose fault it is
            for live in lives[len(self._made) - before :]:
                self._made.append((live, live.made, Drawn(-1, True, error)))

    def _hand_out(self, gaps: list[float] | None) -> None:
        """Gives tokens to those who wait for them, and ends what is over."""
        now_s = time.perf_counter()
        while self._made:
            live, place, (token, over, error) = self._made[0]
            if error is not None:
                self._end(live, now_s, error=error)
            else:
                self._give(live, place, token, now_s, gaps)
                if over:
                    self._end(live, now_s, "stop")
                elif live.made >= live.limit:
                    self._end(live, now_s, "length")
            self._made.popleft()

    def _give(
        self, live: Live, place: int, token: int, now_s: float, gaps: list[float] | None
    ) -> None:
        if len(live.tokens) == place:  # else it was interrupted right behind
            live.tokens.append(token)
        live.made = place + 1
        if not live.first_s:
            live.first_s = now_s
        elif gaps is not None:
            gaps.append(now_s - live.last_s)
        live.last_s = now_s
        if live.answer.heard:
            self._told.append(live.answer)

    def reset(self, off: Iterable[Answer]) -> None:
        """See `Book.reset`."""
        self._stuck = -1, 0.0
        self._hand_out(None)
        super().reset(off)


def _rows(logits: torch.Tensor, places: list[int]) -> torch.Tensor:
    return logits if len(places) == logits.shape[0] else logits[places]
