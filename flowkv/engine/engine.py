"""`Engine`: serve many requests at once over one model and its cache."""

from __future__ import annotations

import asyncio
import atexit
import heapq
import importlib
import logging
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import count
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from flowkv.cache.kv import KV, Tokens, plain
from flowkv.cache.sequence import make_care
from flowkv.compiled import compiling
from flowkv.core import interrupts
from flowkv.core.config import parse_size
from flowkv.core.errors import (
    BusyError,
    CapacityError,
    ConfigError,
    FlowKVError,
    StateError,
    TokenError,
    UnsupportedModelError,
    refuse_unknown,
)
from flowkv.core.keys import Salt, as_tokens
from flowkv.engine.invariant import check_cache, invariant, marked
from flowkv.engine.request import (
    Answer,
    AnswerSource,
    Completion,
    Reason,
    Request,
    is_number,
    tell,
    whole,
    yours,
)
from flowkv.engine.runner import PackedRunner, Runner, own_model
from flowkv.engine.sampling import (
    Drawn,
    OwnSampler,
    Sampler,
    UnreadTokens,
    draw,
    runs_behind,
    seed_of,
)
from flowkv.engine.scheduler import (
    CountedTurns,
    KVManager,
    Part,
    RunningRequest,
    StepOutcome,
    attempt,
    follow,
)
from flowkv.observe.events import Bus, EngineStep, Finished, Queued
from flowkv.policy.scheduling import (
    ASIDE,
    COMING,
    OVER,
    RUNNING,
    WAITING,
    Limits,
    Scheduler,
    Turns,
    make_scheduler,
)

# Requests and cancellations from other threads.


class Inbox:
    """Queue of requests and cancellations for the engine. Thread-safe.

    Args:
        limit: Most requests that wait.

    Attributes:
        fresh: New requests in order of submission, until `taken` moves them.
        off: Numbers of cancelled requests, until the engine removes them.
        waiting: Number of requests that wait in the engine, as the engine sets it.
        closed: Further requests are refused.
        now: Accepted requests are cancelled as well.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self.waiting = limit, 0
        self._changed = threading.Condition()
        self.fresh: deque[RunningRequest] = deque()
        self.off: deque[int] = deque()
        self.closed = self.now = False
        self._why: BaseException | None = None

    @property
    def pending(self) -> bool:
        """Return whether requests or cancellations wait for the engine to take them."""
        return bool(self.fresh or self.off)

    def put(self, *lives: RunningRequest, limited: bool = True) -> None:
        """Add requests, all or none.

        Args:
            *lives: The requests.
            limited: False ignores the limit of waiting requests.

        Raises:
            BusyError: Too many wait.
            StateError: The engine is closed, or failed.
        """
        with self._changed:
            self.check()
            waiting = self.waiting + len(self.fresh)
            if limited and waiting >= self._limit:
                raise BusyError(
                    f"{waiting} requests wait already",
                    "Wait for some of the answers first, or raise max_waiting",
                )
            self.fresh += lives
            self._changed.notify_all()

    def check(self) -> None:
        """Raise if further requests are refused.

        Raises:
            StateError: The engine is closed, or failed.
        """
        if self.closed and self._why is None:
            raise StateError("the engine is closed", "Make a new one")
        if self.closed:
            raise StateError(f"the engine failed: {self._why!r}", "Make a new one") from self._why

    def call_off(self, number: int) -> None:
        """Ask the engine to cancel a request."""
        with self._changed:
            self.off.append(number)
            self._changed.notify_all()

    def close(self, *, now: bool = False, why: BaseException | None = None) -> None:
        """Refuse requests from now on.

        Args:
            now: Cancel accepted requests, too.
            why: The error that the engine failed with.
        """
        with self._changed:
            self.closed, self.now = True, self.now or now
            self._why = self._why or why
            self._changed.notify_all()

    def taken(self) -> None:
        """Remove the first of `fresh`, which the engine has, and count it as waiting there."""
        with self._changed:
            self.waiting += 1
            self.fresh.popleft()

    def wait(self) -> bool:
        """Wait until there is something to do; return False once the inbox is closed and empty."""
        with self._changed:
            while not (self.pending or self.closed):
                self._changed.wait()
            return self.pending


# Events of an engine's requests.


def tell_queued(bus: Bus, live: RunningRequest, waiting: int) -> None:
    """Emit `Queued` for a new request, in the context of its submission."""
    context, live.context = live.context, None
    event = Queued(
        request=live.number,
        prompt_tokens=live.prompt,
        waiting=waiting,
        tenant=live.request.tenant or "",
    )
    if context is None:  # an earlier call was interrupted
        bus.emit(event)
    else:
        context.run(bus.emit, event)


def tell_finished(bus: Bus, live: RunningRequest, completion: Completion, reason: str) -> None:
    """Emit `Finished` for a request that is over."""
    told = {**vars(completion), "reason": reason, "started_s": live.arrived_s}
    told["new_tokens"] = len(told.pop("tokens"))  # the other fields have the same names
    bus.emit(Finished(request=live.number, tenant=live.request.tenant or "", **told))


# The turns of an engine: requests come in, a step is run over all rows, tokens go out.

_log = logging.getLogger("flowkv")
_STOPS: dict[Reason, str] = {"stop": "turn_end", "length": "cut_off"}
_PAUSE_S = 0.002


class _Unread(NamedTuple):
    """Tokens of a step not read yet: their requests, and the place of each among its new ones."""

    lives: Items[RunningRequest]
    places: list[int]
    tokens: UnreadTokens


class Loop:
    """The engine's loop: takes requests from submission to answer, on one thread at a time.

    If rows decode on a device that runs behind the host, the tokens of a step are read after the
    next step was queued on the device, which takes them from device memory. A row that ends by such
    a token has computed one token too many, which is dropped. Operations that need all tokens read
    them first.

    A task stays in its queue until it is done: after an interrupt, `reset` finds it there again,
    and doing a task twice does no harm.

    Args:
        runner: Runs the model.
        keeper: Keeps rows and pages.
        turns: Decides which requests are served.
        inbox: Requests and cancellations of other threads.
        bus: Receives events.
        patience_s: Seconds that a request which is alone waits for pages that others hold.

    Attributes:
        waiting: Requests that wait or were set aside.
        active: Requests that take part in steps.
        source: The engine's side of answers.
        drive: Lock of the thread that runs turns.
    """

    def __init__(
        self,
        runner: Runner,
        keeper: KVManager,
        turns: Turns,
        inbox: Inbox,
        bus: Bus,
        *,
        patience_s: float,
    ) -> None:
        self.runner, self.keeper, self.turns = runner, keeper, turns
        self.inbox, self._bus, self._patience_s = inbox, bus, patience_s
        self.source, self.drive = AnswerSource(inbox.call_off), threading.Lock()
        self.waiting: list[RunningRequest] = []
        self.active: list[RunningRequest] = []
        self._lives: dict[int, RunningRequest] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._stuck = -1, 0.0  # number of the request that waits for pages, and since when
        # Chosen tokens and their places, until they are handed out.
        self._made: deque[tuple[RunningRequest, int, Drawn]] = deque()
        # Tokens on the device: of the last step and, while another step runs, of that one.
        self._unread: deque[_Unread] = deque()
        self._gaps, self._given = list[float](), 0  # see `EngineStep`, of this turn
        # Answers to settle at the end of the turn.
        self._due: deque[tuple[Answer, Completion, BaseException | None]] = deque()
        self._told: list[Answer] = []

    @property
    def busy(self) -> bool:
        """Return whether a thread runs turns, or there is work for one."""
        return self.drive.locked() or not self.idle or self.inbox.pending

    @property
    def idle(self) -> bool:
        """Return whether no request is under way."""
        return not self._lives

    # ---- threads

    def serve(self) -> None:
        """Run turns on this thread until the inbox is closed and all requests are answered."""
        with self.drive:
            self.source.driver = threading.get_ident()
            try:
                while not self.idle or self.inbox.wait():
                    self.turn()
            except BaseException as error:
                _log.exception("an engine failed")
                self.fail(error)
            finally:
                self.source.driver = 0

    def drive_until(self, answers: Items[Answer]) -> None:
        """Run turns on this thread, which holds `drive`, until some answers are made."""
        self.source.driver = threading.get_ident()
        try:
            for answer in answers:
                while not answer.done():
                    self.turn()
            self._read()  # another thread may go on, with another order of device work
            self._answer()
        except Exception as error:
            self.fail(error)
        except BaseException:  # an interrupt, anywhere in a turn
            self.reset(answers)
            raise
        finally:
            self.source.driver = 0

    def turn(self) -> None:
        """Take in requests, run one step if there is anything to compute, and settle answers."""
        if self.keeper.closed:
            self.fail(StateError("the cache is closed", "Open a new one"))
            return
        began_s = time.perf_counter()
        self._gaps, self._given = [], 0
        self._take_in(began_s)
        alone = not any(live.state == RUNNING for live in self.active)
        self.keeper.coming.pace(began_s, alone=alone)
        if self.waiting:
            self._admit(began_s)
        if self.active or self._unread:
            self._step(began_s)
        if not self._lives:  # the rest are tokens after the end of their rows
            self._unread.clear()
        self._answer()

    # ---- in

    def _take_in(self, now_s: float) -> None:
        """Take in requests and cancellations, and end requests past their deadline."""
        inbox = self.inbox
        off = len(inbox.off)  # read first: a cancelled request was submitted before
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
            tell_queued(self._bus, live, len(self.waiting))
            self.inbox.taken()

    def _take(self, live: RunningRequest) -> None:
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
        live: RunningRequest,
        now_s: float,
        reason: Reason = "cancelled",
        error: BaseException | None = None,
    ) -> None:
        """End a request; its answer is settled at the end of the turn."""
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
        tell_finished(self._bus, live, completion, "failed" if error else reason)

    def _close(self, live: RunningRequest, now_s: float, stop: str = "") -> None:
        try:
            self.keeper.close(live, now_s, stop)
        except Exception:  # the cache accounts for the pages; other requests go on
            _log.exception("request %d could not be closed", live.number)

    def _answer(self) -> None:
        """Wake the readers of new tokens, and settle answers."""
        if self._told:
            tell(self._told)
            self._told.clear()
        while self._due:  # a callback that raises must not keep the others from being called
            answer, completion, error = self._due[0]
            try:
                answer.settle(completion, error)
            except BaseException as raised:
                if not yours(raised):
                    raise
                _log.exception("a callback of answer %d raised", answer.number)
            self._due.popleft()

    # ---- failures

    def fail(self, error: BaseException) -> None:
        """End all requests after an error in the loop itself, and refuse further ones."""
        if self.keeper.closed:  # the likely cause of `error`
            closed = StateError("its cache was closed", "Close an engine before its cache")
            closed.__cause__, error = error, closed
        self.inbox.close(now=True, why=error)
        self._unread.clear()
        self._take_fresh()
        for live in list(self._lives.values()):
            failure = StateError(f"the engine failed: {error!r}", "See the cause; make a new one")
            failure.__cause__ = error
            self._end(live, time.perf_counter(), error=failure)
        self._answer()

    def reset(self, off: Iterable[Answer]) -> None:
        """Restart all requests after a turn was interrupted anywhere; their tokens stay.

        Args:
            off: Answers of requests to cancel instead.
        """
        self._stuck = -1, 0.0
        self._read()
        self._hand_out()
        now_s = time.perf_counter()
        self._take_fresh()
        for answer, _, _ in self._due:  # these ended; only their answers are outstanding
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

    # ---- admission and preemption

    def _admit(self, now_s: float) -> None:
        while self.waiting and self._let_in(now_s):
            pass  # a prompt's need is exact only once it is in: there may be room for more
        if not self.active and self.waiting:
            self._force(now_s)
        if self.waiting:
            rank = self.turns.scheduler.rank
            self.keeper.ahead.look(self.waiting, lambda live: rank(live, now_s))
        self.inbox.waiting = len(self.waiting)

    def _let_in(self, now_s: float) -> bool:
        """Preempt and admit requests; return whether all chosen ones entered and none left."""
        turn = self.turns.admit(self.waiting, self.active, self.keeper.room(), now_s)
        for job, keep in turn.leave:
            self._leave(cast(RunningRequest, job), keep, now_s)
        for job in turn.enter:
            if self._enter(cast(RunningRequest, job), now_s) is not None:
                return False
        return bool(turn.enter) and not turn.leave

    def _force(self, now_s: float) -> None:
        """Admit the first request in rank, or the first one set aside, as no row is active."""
        order = sorted(self.waiting, key=lambda live: self.turns.scheduler.rank(live, now_s))
        aside = next((live for live in order if live.state == ASIDE), order[0])
        for live in dict.fromkeys((order[0], aside)):
            short = self._enter(live, now_s)
            if short is None:
                return
        if short is not None and not self._patient(order[0]):
            self._end(order[0], now_s, error=short)

    def _patient(self, live: RunningRequest) -> bool:
        """Wait a moment for pages that others hold; return False if the wait was too long."""
        now_s = compiling.now_s()
        if self._stuck[0] != live.number:
            self._stuck = live.number, now_s
        if now_s - self._stuck[1] < self._patience_s:
            time.sleep(_PAUSE_S)
            return True
        self._stuck = -1, 0.0
        return False

    def _enter(self, live: RunningRequest, now_s: float) -> CapacityError | None:
        """Admit a request; return the error if there is no room."""
        try:
            self.keeper.enter(live, now_s)
        except CapacityError as error:
            return error
        except Exception as error:  # the cache refuses the request, or a user's own tier fails
            self._end(live, now_s, error=error)
            return None
        self.waiting.remove(live)
        self.active.append(live)
        return None

    def _leave(self, live: RunningRequest, keep: bool, now_s: float) -> None:
        self._read()  # the request must keep all of its tokens
        if live.number not in self._lives:
            return
        try:
            self.keeper.leave(live, keep, now_s)
        except Exception as error:  # for instance, the host has no memory for the pages
            self._end(live, now_s, error=error)
            return
        self.active.remove(live)
        self.waiting.append(live)

    # ---- a step

    def _step(self, began_s: float) -> None:
        if self._unread and not {*self.active} <= {*self._unread[-1].lives}:
            self._read()  # other requests have entered, with prompts
            self._answer()
        parts, forward_s = self._parts(began_s), time.perf_counter()
        outcome = self._follow(parts) if parts and self._unread else None
        measured = outcome is not None  # from one step to the next
        if outcome is None:
            if self._unread:
                self._read()
                parts, forward_s = self._parts(began_s), time.perf_counter()
            if not parts and any(live.state == COMING for live in self.active):
                self.keeper.coming.rest()
            outcome = self._attempt(parts) if parts else StepOutcome()
        sampling_s = time.perf_counter()
        done = [part for some, _ in outcome.done for part in some]
        if done:
            self._stuck = -1, 0.0
        self._advance(outcome)
        told = self._bus.wants(EngineStep)
        room = self.keeper.room() if told else None  # read before rows that are over are closed
        self._read(keep=1)
        chosen_s = time.perf_counter()
        # Measured until tokens are chosen: only that waits for work queued on a GPU.
        tokens = sum(count for _, count in done)
        if parts and (measured or not self._unread):
            self.keeper.worth.step(tokens, compiling.measured_s(forward_s, chosen_s))
        further = len(self._gaps)
        self._hand_out()
        if room is None or not (parts or self._given):
            return
        aside = sum(live.state == ASIDE for live in self.waiting)
        self._bus.emit(
            EngineStep(
                rows=len(done),
                prefill_tokens=0 if self._unread else tokens - (len(self._gaps) - further),
                decode_tokens=len(self._gaps),
                made_tokens=self._given,
                waiting=len(self.waiting) - aside,
                aside=aside,
                pages=room.total - room.free,
                total_pages=room.total,
                started_s=began_s,
                seconds=time.perf_counter() - began_s,
                model_s=sampling_s - forward_s,
                sampling_s=chosen_s - sampling_s,
                gaps_s=tuple(self._gaps),
            )
        )

    def _follow(self, parts: Items[Part]) -> StepOutcome | None:
        """Run a step of decoding rows before their tokens are read; None if not possible."""
        lives, _, tokens = self._unread[-1]
        if not tokens.sent or any(count != 1 for _, count in parts):
            return None
        places = {live: place for place, live in enumerate(lives)}
        outcome = follow(self.runner, parts, tokens.select([places[live] for live, _ in parts]))
        if outcome is not None and outcome.failed:
            self._read()
            for live, error in outcome.failed:
                self._end(live, time.perf_counter(), error=error)
        return outcome

    def _attempt(self, parts: Items[Part]) -> StepOutcome:
        """Run a step, with as many rows as there is room for."""
        outcome = attempt(self.runner, parts)
        while outcome.short is not None and not outcome.done and self._relieve(outcome.short):
            parts = [part for part in parts if part[0].active]
            if not parts:
                break
            outcome = attempt(self.runner, parts)
        now_s = time.perf_counter()
        for live, error in outcome.failed:
            self._end(live, now_s, error=error)
        behind = [self.keeper.coming.late(live, now_s) for live, _ in outcome.late]
        if not any(behind):  # no row waits for loads: the same error would come back for ever
            for live, error in outcome.late:
                self._end(live, now_s, error=error)
        return outcome

    def _parts(self, now_s: float) -> list[Part]:
        shares = cast("list[Part]", self.turns.share(self.active, now_s))
        coming = [live for live in self.active if live.state == COMING]
        if coming:
            left = self.turns.limits.token_budget - sum(count for _, count in shares)
            shares += self.keeper.coming.parts(coming, left, alone=not shares, now_s=now_s)
        most = self.keeper.chunk(len(shares))
        # Rows that have made all of their tokens only wait for the last one to be read.
        return [
            (live, min(count, most, live.open_row.seq.until_stop()))
            for live, count in shares
            if live.made < live.limit
        ]

    def _relieve(self, short: CapacityError) -> bool:
        """Make room for rows that cannot grow; return False if there is no row to preempt."""
        now_s = time.perf_counter()
        gone = self.turns.relieve(self.active, now_s)
        if gone is not None:
            self._leave(cast(RunningRequest, gone[0]), gone[1], now_s)
            return True
        if not self._patient(self.active[-1]):
            self._end(self.active[-1], now_s, error=short)
        return False

    def _advance(self, outcome: StepOutcome) -> None:
        """Count computed tokens, and draw the next token of rows with no known one left."""
        for parts, logits in outcome.done:
            ends, lives = [], []
            for place, (live, done) in enumerate(parts):
                ready = live.ready = live.ready + done
                if ready == live.prompt + live.made:
                    ends.append(place)
                    lives.append(live)
            ahead = len(outcome.done) == 1 and self._ahead(parts, lives, logits)
            if lives:
                self._draw(lives, logits if len(lives) == len(parts) else logits[ends], ahead=ahead)

    def _ahead(
        self, parts: Items[Part], lives: Items[RunningRequest], logits: torch.Tensor
    ) -> bool:
        """Return whether all rows of a step decode, and can choose tokens on the logits' device."""
        able = runs_behind(logits) and hasattr(self.runner, "append_ids")
        decode = all(n == 1 and getattr(live.choice, "ahead", False) for live, n in parts)
        return able and decode and len(lives) == len(parts)

    def _draw(self, lives: Items[RunningRequest], logits: torch.Tensor, *, ahead: bool) -> None:
        """Choose tokens, keeping each at once: no choice can be made again."""
        if not ahead:
            self._read()
        before, places = len(self._made), [live.made for live in lives]
        choices = [live.choice for live in lives]
        try:
            with torch.no_grad():
                if ahead:
                    tokens = UnreadTokens(choices, logits)
                    self._unread.append(_Unread(lives, places, tokens))
                    for live in lives:
                        live.made += 1
                    with suppress(Exception):  # a device error: `read` raises it again
                        tokens.draw()
                else:
                    drawn = draw(choices, logits)
                    self._made.extend(zip(lives, places, drawn, strict=True))
        except Exception as error:  # no single row is known to be at fault
            for live in lives[len(self._made) - before :]:
                self._made.append((live, live.made, Drawn(-1, True, error)))

    def _read(self, keep: int = 0) -> None:
        """Read tokens that were left on the device, and hand them out.

        Args:
            keep: Number of the latest steps with tokens that stay on the device.
        """
        while len(self._unread) > keep:
            lives, places, tokens = self._unread[0]
            try:
                drawn = tokens.read()
            except Exception as error:  # a device error
                drawn = [Drawn(-1, True, error)] * len(lives)
            each = [
                (live, place, one)
                for live, place, one in zip(lives, places, drawn, strict=True)
                if one is not None and live.number in self._lives  # else the row has ended
            ]
            self._made.extend(each)
            if len(self._unread) > 1:  # the next step ran over these tokens
                on = set(self._unread[1].lives)
                self._tell([part for part in each if part[0] in on and not part[2].over])
            self._unread.popleft()
            self._hand_out()

    def _tell(self, parts: Items[tuple[RunningRequest, int, Drawn]]) -> None:
        """Pass tokens to the cache for rows that were stepped before the tokens were read."""
        rows = [live.open_row for live, _, _ in parts]
        places = [live.prompt + place for live, place, _ in parts]
        try:
            cast(PackedRunner, self.runner).append_ids(rows, places, [d.token for *_, d in parts])
        except Exception as error:  # treated like an error of the step
            for live, _, _ in parts:
                self._end(live, time.perf_counter(), error=error)

    def _hand_out(self) -> None:
        """Append tokens to their answers, and end requests that are over."""
        now_s, waiting = time.perf_counter(), self._made
        while waiting:
            live, place, (token, over, error) = waiting[0]
            if error is not None:
                self._end(live, now_s, error=error)
            elif live.number in self._lives:
                if len(live.tokens) == place:  # else an interrupt came right after the append
                    live.tokens.append(token)
                    self._given += 1
                if live.made <= place:  # else it was counted when the device was asked for it
                    live.made = place + 1
                if not live.first_s:
                    live.first_s = now_s
                else:
                    self._gaps.append(now_s - live.last_s)
                live.last_s = now_s
                if live.answer.heard:
                    self._told.append(live.answer)
                if over or place + 1 >= live.limit:
                    self._end(live, now_s, "stop" if over else "length")
            waiting.popleft()


# Settings of an engine beside its model and cache, checked in one place.


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Settings of an engine.

    Attributes:
        scheduler: "fcfs", another name of `flowkv.policy.scheduling.SCHEDULERS`, or a `Scheduler`.
        scheduler_options: Arguments of the scheduler's class.
        max_rows: Most requests in one step.
        token_budget: Most tokens in one step; rows that decode come first, the rest is for prompts.
        watermark: Share of the device's pages that stays free when a request enters.
        max_waiting: Most requests that wait; `submit` refuses further ones.
        context_tokens: Most tokens of a request, its new ones included; by default the limit of the
            model and of the device's pages.
        swap: Most host memory for pages of preempted requests, in bytes or as "4GiB".
        patience_s: Seconds that a request which is alone waits for pages held outside the engine,
            before it fails.
        seed: Seed from which those of requests without one are derived.
        invariant: Make a request's tokens independent of other requests to the last bit, at the
            cost of speed.

    Raises:
        ConfigError: A value is wrong.
    """

    scheduler: str | Scheduler = "fcfs"
    scheduler_options: dict[str, Any] = field(default_factory=dict)
    max_rows: int = 32
    token_budget: int = 512
    watermark: float = 0.02
    max_waiting: int = 1024
    context_tokens: int | None = None
    swap: int | str = "4GiB"
    patience_s: float = 1.0
    seed: int = 0
    invariant: bool = False

    def __post_init__(self) -> None:
        for name in ("max_rows", "token_budget", "max_waiting"):
            whole(name, getattr(self, name), 1)
        if self.context_tokens is not None:
            whole("context_tokens", self.context_tokens, 2)
        if self.token_budget < self.max_rows:
            raise ConfigError(
                f"token_budget={self.token_budget} for {self.max_rows} rows, which decode one "
                "token each",
                "Raise token_budget, or lower max_rows",
            )
        if not is_number(self.watermark) or not 0.0 <= self.watermark < 1.0:
            raise ConfigError(f"watermark={self.watermark!r}", "Use a share from 0 to less than 1")
        if not is_number(self.patience_s) or not self.patience_s >= 0.0:
            raise ConfigError(f"patience_s={self.patience_s!r}", "Use seconds, 0 or more")
        whole("seed", self.seed)
        parse_size(self.swap)
        self.order()

    def order(self) -> Scheduler:
        """Return the scheduler, made from its name and options."""
        return make_scheduler(self.scheduler, **self.scheduler_options)


# The served model: its runner and sampler, and the limits of its prompts.

Check = Callable[[NDArray[np.uint32], Mapping[str, Any]], None]


class ServedModel(NamedTuple):
    """A model as an engine serves it.

    Attributes:
        runner: Runs it.
        sampler: Reads the sampling options of requests.
        positions: Most tokens of a request, its new ones included; None if there is no bound.
        vocabulary: Bound of token ids, exclusive; 2**32 if unknown.
        check: Refuses a prompt, with its options, that cannot be served.
        refresh: Called before rows are opened, to detect a changed model.
    """

    runner: Runner
    sampler: Sampler
    positions: int | None = None
    vocabulary: int = 1 << 32
    check: Check = lambda tokens, options: None
    refresh: Callable[[], object] = lambda: None


def serve(
    model: Any, kv: KV, runner: Runner | None, sampler: Sampler | None, *, fixed: bool = False
) -> ServedModel:
    """Choose how to run a model: packed rows if it can, each row by itself otherwise.

    Args:
        model: A Hugging Face model that is attached to the cache, or your own: called with
            `(tokens [1, N], positions [1, N])`, it returns logits `[1, N, V]`.
        kv: The cache.
        runner: Another runner of the model.
        sampler: Another reader of sampling options.
        fixed: Make a request's result the same to the last bit, whatever other requests run.

    Raises:
        ConfigError: The model is not attached to this cache, or no model at all; or `fixed` with a
            runner of your own, or with pages of a lossy codec.
        UnsupportedModelError: The model cannot be continued from token ids alone, or its steps
            cannot be made invariant.
        CapacityError: The cache has no room to try how rows of the model run together.
    """
    if runner is not None:
        if fixed:
            raise ConfigError("invariant=True beside a runner", "Make your runner invariant")
        return ServedModel(runner, sampler or OwnSampler())
    if fixed:
        check_cache(kv)
    if hasattr(model, "config") and callable(getattr(model, "generate", None)):
        return _transformers(model, kv, sampler, fixed)
    if not callable(model):
        raise ConfigError(
            f"{type(model).__name__} is no model", "Pass a model, or runner= that runs one"
        )
    forward = own_model(model)
    return ServedModel(
        PackedRunner(kv, invariant(forward) if fixed else forward), sampler or OwnSampler()
    )


def _transformers(model: Any, kv: KV, sampler: Sampler | None, fixed: bool) -> ServedModel:
    runners = importlib.import_module("flowkv.hooks.huggingface.runners")
    parts = runners.make_runner_parts(model, kv)
    sampler = sampler or runners.GenerateSampler(parts.model)
    runner: Runner = parts.apart
    if parts.forward is not None:
        if fixed and parts.blend is not None:
            raise ConfigError('invariant=True with reuse="blend"', "Leave one of them out")
        forward = invariant(parts.forward) if fixed else parts.forward
        runner = PackedRunner(kv, forward, parts.blend)
    elif fixed:
        raise UnsupportedModelError(
            f"steps of this model cannot be made invariant: {parts.reason}",
            "Leave invariant=True out",
        )
    return ServedModel(
        runner, sampler, parts.positions, parts.vocabulary, parts.check, parts.refresh
    )


# Checks of requests at submission.

_NUMBERS = count()  # shared by all engines, so that events of one cache have unique numbers
_FIELDS = [one.name for one in fields(Request) if one.name != "prompt"]
_SETTINGS = [one.name for one in fields(EngineSettings)]


def make_request(prompt: Tokens | Request, fields: Mapping[str, Any]) -> Request:
    """Return a request made of a prompt or another request, and further fields.

    Raises:
        ConfigError: There is no such field, or its value is invalid.
    """
    remedy = "How tokens are chosen goes into options={...}, see flowkv.Request"
    for name in fields:
        refuse_unknown("a request has no field", name, _FIELDS, remedy)
    if isinstance(prompt, Request):
        request = replace(prompt, **fields) if fields else prompt
    else:
        request = Request(prompt=prompt, **fields)
    whole("max_new_tokens", request.max_new_tokens, 1)
    whole("priority", request.priority)
    if request.seed is not None:
        whole("seed", request.seed, 0)
        if request.seed >= 1 << 64:
            raise ConfigError(f"seed={request.seed}", "Use a whole number below 2**64")
    late = request.deadline_s
    if late is not None and (not is_number(late) or not late >= 0):
        raise ConfigError(f"deadline_s={late!r}", "Use seconds from submission, 0 or more")
    if not isinstance(request.options, Mapping):
        raise ConfigError(f"options={request.options!r}", "Pass a dictionary")
    _check_identity(request)
    return request


def _check_identity(request: Request) -> None:
    tenant, salts = request.tenant, request.salts
    if tenant is not None and not isinstance(tenant, str):
        raise ConfigError(f"tenant={tenant!r}", "Use text")
    if not all(isinstance(salt, Salt) for salt in salts):
        raise ConfigError(f"salts={salts!r}", "Pass flowkv.Salt objects")
    try:
        make_care(request.session, request.lease, request.retain, (tenant or "").encode()[:64])
    except UnicodeEncodeError as error:
        raise ConfigError(f"a name that is no text: {error}", "Use valid Unicode") from None


# Threads of engines, which are stopped before the interpreter exits.

_started: weakref.WeakKeyDictionary[Loop, threading.Thread] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


@interrupts.unbroken
def start(loop: Loop) -> threading.Thread:
    """Start a loop on a thread of its own.

    At the end of the process, its requests are cancelled: a thread within a model must not outlive
    the interpreter.
    """
    thread = threading.Thread(target=loop.serve, name="flowkv-engine", daemon=True)
    with _lock:
        if not _started:
            atexit.unregister(_stop)
            atexit.register(_stop)
        _started[loop] = thread
    thread.start()
    return thread


def _stop() -> None:
    mine = [(loop, thread) for loop, thread in _started.items() if loop.source.pid == os.getpid()]
    for loop, _ in mine:
        loop.inbox.close(now=True)
    for _, thread in mine:
        thread.join()


class Engine:
    """Server of many requests at once, which join and leave at every step. Thread-safe.

        with flowkv.Engine(model, kv, max_rows=16) as engine:
            for completion in engine.run(prompts):          # all of them, in order
                ...
            answer = engine.submit(prompt, max_new_tokens=64)
            for token in answer:                            # as they come; or `async for`
                ...
            answer.result()                                 # or `await answer`

    Prompts are computed in chunks beside the tokens of rows that decode, packed, without padding.
    Cached prefixes of prompts are not computed again. Where device memory does not suffice,
    requests are preempted, and go on later where they were.

    One thread runs the model: the engine's own, from the first `submit` on, or the thread that
    calls `run` before that.

    Args:
        model: A Hugging Face model that is attached to `kv`; or your own, called with
            `(tokens [1, N], positions [1, N])` and returning logits `[1, N, V]`, with attention by
            `flowkv.attention`.
        kv: Its cache. The engine does not close it.
        runner: Runs the model in another way.
        sampler: Another reader of the sampling options of requests.
        **settings: See `EngineSettings`: scheduler, max_rows, token_budget, ...

    Raises:
        ConfigError: A setting is wrong, or the model is not attached to this cache.
        StateError: The cache is closed, or does not know its model.
        UnsupportedModelError: The model cannot be continued from token ids alone.
        CapacityError: The cache has no room to try how rows of the model run together.
    """

    def __init__(
        self,
        model: Any,
        kv: KV,
        *,
        runner: Runner | None = None,
        sampler: Sampler | None = None,
        **settings: Any,
    ) -> None:
        for name in settings:
            refuse_unknown("an engine has no setting", name, _SETTINGS)
        self.settings = made = EngineSettings(**settings)
        self.kv = kv
        served = serve(model, kv, runner, sampler, fixed=made.invariant)
        if made.max_rows > kv.config.max_rows:
            raise ConfigError(
                f"max_rows={made.max_rows} with a cache for {kv.config.max_rows} sequences",
                "Lower it, or give the cache a larger max_rows",
            )
        keeper = KVManager(kv, served.runner, parse_size(made.swap), served.refresh)
        limits = Limits(made.max_rows, made.token_budget, kv.page_size, made.watermark)
        turns = CountedTurns(made.order(), limits, keeper)
        self._inbox = Inbox(made.max_waiting)
        self._loop = Loop(
            *(served.runner, keeper, turns, self._inbox, kv.bus), patience_s=made.patience_s
        )
        self._served, self._longest = served, partial(keeper.longest, made.token_budget)
        self._places = count()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        # Submitted requests are still computed when the engine itself is no longer referenced.
        weakref.finalize(self, _retire, self._loop).atexit = False

    @property
    def closed(self) -> bool:
        """Return whether it refuses further requests: it was closed, or failed."""
        return self._inbox.closed

    # ---- requests

    def submit(self, prompt: Tokens | Request, **fields: Any) -> Answer:
        """Submit a request, and return at once. Callable from any thread, event loops included.

        Args:
            prompt: Token ids, or a whole request.
            **fields: Further fields of `Request`: max_new_tokens, priority, deadline_s, options...

        Returns:
            A future that can be awaited and iterated, see `Answer`.

        Raises:
            BusyError: Too many requests wait.
            CapacityError: The request can never fit.
            ConfigError: A field or option of the request is wrong.
            StateError: The engine is closed, or failed, or belongs to a parent process.
            TokenError: The prompt is empty, or has ids that are no tokens of the model.
            UnsupportedModelError: The request needs more than token ids.
        """
        live = self._hand_in(make_request(prompt, fields), limited=True)
        self._start()
        return live.answer

    def run(self, requests: Iterable[Tokens | Request], **fields: Any) -> list[Completion]:
        """Serve requests, and wait for all of them. If one is refused, none is served.

        Args:
            requests: Prompts, or whole requests; `max_waiting` does not limit their number.
            **fields: Fields of all requests, see `submit`.

        Returns:
            The completions, in the order of the requests.

        Raises:
            Exception: The error of the first request that failed; the others are served.
            StateError: Called by the engine's own thread, for instance in a callback.
        """
        if self._loop.source.driver == threading.get_ident():
            raise StateError(
                "the engine's own thread cannot run requests", "Use submit in callbacks"
            )
        answers = self._all(requests, fields)
        with _together(answers):
            self._drive(answers)
            return [answer.result() for answer in answers]

    async def arun(self, requests: Iterable[Tokens | Request], **fields: Any) -> list[Completion]:
        """Serve requests like `run`, awaiting all waits, for event loops."""
        answers = self._all(requests, fields)
        self._start()
        with _together(answers):
            await asyncio.gather(*map(asyncio.wrap_future, answers), return_exceptions=True)
            return [answer.result() for answer in answers]

    def _hand_in(self, request: Request, *, limited: bool) -> RunningRequest:
        live = self._live(request)
        self._inbox.put(live, limited=limited)
        return live

    def _all(self, requests: Iterable[Tokens | Request], fields: dict[str, Any]) -> list[Answer]:
        """Submit all requests, or none."""
        lives: list[RunningRequest] = []
        for place, one in enumerate(requests):
            try:
                lives.append(self._live(make_request(one, fields)))
            except FlowKVError as error:
                error.add_note(f"It is number {place} of the requests, counted from 0.")
                raise
        self._inbox.put(*lives, limited=False)
        return [live.answer for live in lives]

    def _live(self, request: Request) -> RunningRequest:
        if os.getpid() != self._loop.source.pid:
            raise StateError(
                "the engine belongs to the parent process", "Make another one in this process"
            )
        interrupts.cover()
        self._inbox.check()
        if self.kv.closed:
            raise StateError("the engine's cache is closed", "Make a new engine over an open one")
        prompt = self._prompt(request)
        if self.settings.invariant:
            request = marked(request)
        place, seed = next(self._places), request.seed
        seed = seed_of(self.settings.seed, place) if seed is None else int(seed)
        choice = self._served.sampler.start(request, prompt, seed)
        answer = Answer(self._loop.source, next(_NUMBERS))
        return RunningRequest(request, prompt, choice, answer, time.perf_counter(), copy_context())

    def _prompt(self, request: Request) -> NDArray[np.uint32]:
        given: object = request.prompt  # callers may pass anything
        if isinstance(given, str | Mapping):
            kind = "text" if isinstance(given, str) else "a mapping"
            raise TokenError(
                f"the prompt is {kind}", "Pass token ids, as in tokenizer(text).input_ids"
            )
        prompt = as_tokens(plain(request.prompt), self._served.vocabulary)
        if not prompt.size:
            raise TokenError("the prompt is empty", "Begin with one token at least")
        self._served.check(prompt, request.options)
        total = len(prompt) + request.max_new_tokens
        bounds = {
            "settings allow": self.settings.context_tokens,
            "model allows": self._served.positions,
            "device has pages for": self._longest(),
        }
        for name, most in bounds.items():
            if most is not None and total > most:
                raise CapacityError(
                    f"{len(prompt)} tokens and {request.max_new_tokens} new ones, where the "
                    f"engine's {name} {most}",
                    "Shorten the prompt, or lower max_new_tokens",
                )
        return prompt

    # ---- threads

    def _drive(self, answers: list[Answer]) -> None:
        """Ensure that answers are made: on this thread, unless another one runs the engine."""
        loop, held = self._loop, list[bool]()
        try:
            if self._thread is None:  # one call: no interrupt between the acquire and its record
                held.extend(filter(None, map(loop.drive.acquire, (False,))))
            if held:
                loop.drive_until(answers)
                return
        finally:
            for _ in held:  # no other call before the release, and so no interrupt
                loop.drive.release()
        self._start()
        wait(answers)

    def _start(self) -> threading.Thread:
        with self._starting:
            if self._thread is None:
                self._thread = start(self._loop)
            return self._thread

    # ---- closing

    def close(self, *, drain: bool = True, timeout_s: float | None = None) -> None:
        """Refuse further requests, and return once all are answered. Safe to call again.

        Args:
            drain: False cancels the requests under way; they end as "cancelled".
            timeout_s: Seconds after which the remaining requests are cancelled, too.
        """
        if os.getpid() != self._loop.source.pid:
            return
        self._inbox.close(now=not drain)
        if self._loop.source.driver == threading.get_ident():
            return  # in a callback: the loop ends by itself after its remaining turns
        if self._thread is None and not self._loop.busy:
            return
        thread = self._start()
        thread.join(timeout_s)
        if thread.is_alive():
            self._inbox.close(now=True)
            thread.join()

    async def aclose(self, *, drain: bool = True, timeout_s: float | None = None) -> None:
        """Close the engine like `close`, for event loops."""
        await asyncio.to_thread(self.close, drain=drain, timeout_s=timeout_s)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(drain=kind is None)

    async def __aenter__(self) -> Engine:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self.aclose(drain=kind is None)

    def __repr__(self) -> str:
        loop = self._loop
        state = "closed" if self._inbox.closed else "open"
        return f"<flowkv.Engine {state}: {len(loop.active)} rows, {len(loop.waiting)} waiting>"


@contextmanager
def _together(answers: Items[Answer]) -> Iterator[None]:
    """Cancel the remaining answers if one fails, or if the waiting thread is interrupted."""
    try:
        yield
    except BaseException:
        for answer in answers:
            answer.cancel()
        raise


def _retire(loop: Loop) -> None:
    if loop.source.pid == os.getpid():  # a fork may have copied a lock that is held
        loop.inbox.close()
