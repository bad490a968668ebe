"""A prefix that is being restored: computed from the front while it is loaded from the back.

    restoration = seq.restoration             # of kv.open(tokens, wait=False)
    while tokens := restoration.next(): ...   # compute so many, in a step
    restoration.settle()                      # the front is done; the rest comes behind the suffix
    with kv.step([seq], [rest]) as step: ...  # layer i waits for layer i of all pages
    restoration.finish(ok=True)

While the front is computed, pages come in from the back and are kept beside the sequence. `settle`
puts them into its line, also those that are still on their way: whoever attends to a layer then
waits for it first. What does not come is `Late`, and is computed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from flowkv.core.errors import FlowKVError
from flowkv.policy.restore import Compute, Request, Span
from flowkv.runtime.back import Back
from flowkv.runtime.flights import Flight
from flowkv.runtime.prospect import Prospect
from flowkv.runtime.restore import Restorer
from flowkv.runtime.restores import Restores, rest
from flowkv.runtime.sequence import Sequence
from flowkv.runtime.tally import Tally

_PAUSE_S = 0.002


class Late(FlowKVError, TimeoutError):
    """A layer of some pages did not arrive in time, or cannot be had.

    Args:
        layer: Its index in the model.
    """

    def __init__(self, layer: int) -> None:
        super().__init__(f"layer {layer} of some pages did not arrive in time", "Compute them")
        self.layer = layer


class _Phase(Enum):
    """How far a restore is."""

    FRONT = "the front is computed while the back is loaded"
    BEHIND = "the rest is loaded behind the suffix"
    OVER = "it is over"


class _Computing(NamedTuple):
    """Part of the front that was handed out; what one thread computes is measured together."""

    op: Compute
    started_s: float
    thread: int


class Restoration:
    """One sequence's prefix on its way. Thread-safe; made by `KV.open(..., wait=False)`.

    Args:
        restores: All of the cache.
        restorer: Knows pages and windows.
        seq: Whose prefix; its resident pages are attached.
        prospect: What is to come.
        computable: Whether the caller computes tokens of the front where that helps.

    Attributes:
        seq: Whose prefix.
        request: As the policy knows it.
        back: The pages that come from the back.
    """

    def __init__(
        self,
        restores: Restores,
        restorer: Restorer,
        seq: Sequence,
        prospect: Prospect,
        *,
        computable: bool,
    ) -> None:
        self._restores, self.seq = restores, seq
        self._planner, self._guard = restorer.planner, restorer.planner.guard
        self.back = Back(restorer, seq, prospect)
        self._size, self._stop = restorer.page_size, prospect.pages
        self._phase, self._broken = _Phase.FRONT, False
        self._computing: _Computing | None = None
        self.request = Request(
            number=restores.number(),
            tokens=prospect.stop * self._size,
            suffix=seq.known - prospect.pages * self._size,
            layers=len(self.back.index),
            resident=prospect.resident * self._size,
            unit=self._size,
            sources=prospect.sources,
            computable=computable,
            whole=True,
            arrived_s=time.perf_counter(),
        )
        restores.add(self)
        self._progress = restores.state.requests[self.request.number]
        self._tally = Tally(restores, seq, self.request)

    @property
    def tokens(self) -> int:
        """Where the prefix ends, as things stand."""
        return self._stop * self._size

    @property
    def settled(self) -> bool:
        """Whether the front is done."""
        return self._phase is not _Phase.FRONT

    @property
    def front(self) -> int:
        """Tokens that were there or computed when the front was done."""
        return self._tally.front

    @property
    def lacks(self) -> bool:
        """Whether pages in the sequence's line are not there yet."""
        with self._guard:
            behind = self._phase is _Phase.BEHIND
            return behind and not all(map(self._there, range(self.request.layers)))

    @property
    def gone(self) -> bool:
        """Whether anything of it was forgotten meanwhile."""
        return self.back.gone

    @property
    def quiet(self) -> bool:
        """Whether no tier owes anything for it."""
        return not (self._restores.flights.of(self) or self._restores.paused)

    # ---- loads

    def arrived(self, flight: Flight) -> None:
        """A load is over. Callers hold the KV lock."""
        state, op = self._restores.state, flight.op
        self._tally.loaded(flight)
        if flight.lost and self.request.computable:
            state.fail(op)
        else:
            state.end(op)
        missing = [piece.inbound.page_no for piece in self.back.pieces(op)] if flight.lost else ()
        if missing and self._phase is _Phase.BEHIND:
            self._broken = True
        elif missing and not self.request.computable:  # the prefix ends where it is missing
            self._stop = min(self._stop, *missing)

    # ---- the front

    def next(self, most: int | None = None) -> int:
        """Tokens to compute now, from the sequence's length on: whole pages, 0 for none any more.

        Args:
            most: Compute no more than that at once, or a page.
        """
        found = choose([self], most)
        return found[1] if found is not None else 0

    def pump(self) -> None:
        """Takes what has come, and asks for more. Never waits."""
        with self._guard:
            if self._phase is not _Phase.OVER:
                self._advance()
                self._restores.pump()

    def take(self, op: Compute, most: int | None) -> int:
        """Hands out an op of the policy; returns its tokens. Callers hold the KV lock."""
        first, stop = op.tokens
        if most is not None:
            stop = min(stop, first + max(most // self._size, 1) * self._size)
        if op.layers != Span(0, self.request.layers) or first != self.seq.length:
            return 0
        op = op._replace(tokens=Span(first, stop))
        if not self.back.room(op.tokens.size // self._size):
            return 0  # what is loaded has its room already
        self._restores.state.begin(op)
        self._computing = _Computing(op, time.perf_counter(), threading.get_ident())
        self.back.drop(range(first // self._size, stop // self._size))
        return op.tokens.size

    def computed(self, thread: int) -> _Computing | None:
        """What a thread has computed of it since it was handed out. Callers hold the KV lock."""
        done = self._computing
        if done is None or done.thread != thread or self.seq.length < done.op.tokens.stop:
            return None
        self._computing = None
        return done

    def told(self, op: Compute, started_s: float, seconds: float, counted_s: float) -> None:
        """Part of the front is computed, in so many seconds of its own; see `Tally.computed`."""
        self._restores.state.end(op)
        self._tally.computed(op, started_s, seconds, counted_s)

    def pending(self) -> int:
        """Tokens that were handed out and are not computed yet. Callers hold the KV lock."""
        return self._computing.op.tokens.stop - self.seq.length if self._computing else 0

    def _advance(self) -> None:
        """Notices what was computed, whoever asked for it."""
        length, state = self.seq.length, self._restores.state
        if self._phase is not _Phase.FRONT:
            return
        if self._computing is not None and length >= self._computing.op.tokens.stop:
            self._restores.computed(self._computing.thread)
        front = self._progress.front[0]
        stop = min(length // self._size * self._size, *self._progress.back)
        if self._computing is None and front < stop:
            extra = Compute(self.request.number, Span(0, self.request.layers), Span(front, stop))
            state.begin(extra)
            state.end(extra)

    # ---- the rest

    def settle(self) -> int:
        """Ends the front: all pages are in the sequence's line, also those still on their way.

        Returns:
            The sequence's length now; less than `tokens` was if nothing more may come.

        Raises:
            StateError: The sequence is closed, suspended or in a step.
        """
        with self._guard:
            if self._phase is not _Phase.FRONT:
                return self.seq.length
            self._planner.idle(self.seq)
            self.pump()
            first = self.seq.length // self._size
            self._tally.front = first * self._size
            # What was to be computed and is not cannot be loaded any more.
            hole = self._computing is not None or self._progress.lost > first * self._size
            self._stop = first if hole else self.back.reach(first, self._stop, lambda one: True)
            if self._stop > first:
                self.back.place(first, self._stop)
                self._phase = _Phase.BEHIND
                self._restores.state.fronted(self.request.number)
                self._restores.pump()
            else:
                self._end(ok=True)
            return self.seq.length

    def wait(self, layer: int) -> None:
        """Returns once a layer of all pages is there, verified; see `Step.awaits`.

        Raises:
            Late: It is not going to come. Once `fill` has seen to that, `wait` can be called again.
        """
        index, begun_s = self.back.index[layer], time.perf_counter()
        while not self._ready(index, begun_s):
            if self._broken:
                raise Late(layer)
            self._rest()

    def _rest(self) -> None:
        with self._guard:
            self._restores.allow()  # nobody has better use of this thread
            files = self._restores.files()
        rest(files, _PAUSE_S)

    def _ready(self, index: int, begun_s: float) -> bool:
        with self._guard:
            self.pump()
            if self._phase is not _Phase.BEHIND:
                return not self._broken
            if not self._there(index):
                self._stuck()
                if not self._broken or not self._there(index):
                    return False
            self._tally.waited(index, begun_s, suffix=True)
            self._restores.store.join()
            return True

    def _there(self, index: int) -> bool:
        return self.back.there(index) if self._broken else self._progress.there(index)

    def _stuck(self) -> None:
        """A wait has an end: all was asked for that links have room for, and nothing is owed."""
        if self._restores.still and not self._progress.restored:
            self._broken = True

    def poll(self) -> bool | None:
        """Whether all of it is there, after `settle`; None as long as it may come. Never waits."""
        with self._guard:
            self.pump()
            if self._phase is not _Phase.BEHIND:
                return not self._broken
            if self.lacks:
                self._stuck()
                if self.lacks:
                    return False if self._broken else None
            self._restores.store.join()
            return True

    def complete(self) -> bool:
        """Waits until all of it is there, after `settle`; False if that is not going to be."""
        self.settle()
        begun_s = time.perf_counter()
        while (there := self.poll()) is None:
            self._rest()
        with self._guard:
            self._tally.waited(0, begun_s, suffix=False)
        return there

    def fill(self, other: Sequence) -> None:
        """Puts what is missing in place, from another sequence; also within a step that waits.

        Args:
            other: A sequence of the same tokens and salts, whose `length` is `tokens` at least.

        Raises:
            CapacityError: A page that a tier may still write to cannot be replaced.
            StateError: The other one has not got it.
        """
        with self._guard:
            self._restores.store.join()
            self.back.fill(other, self._stop)

    # ---- the end

    def finish(self, *, ok: bool = True) -> int:
        """Ends it: what came becomes known; what did not is cut off. Safe to call again.

        Args:
            ok: Whether the step that waited for it was committed.

        Returns:
            The sequence's length.

        Raises:
            StateError: The sequence is in a step.
        """
        with self._guard:
            if self._phase is _Phase.BEHIND and not self.seq.closed:
                self._planner.ready(self.seq)
                self._close_line(ok)
            self._end(ok=ok)
            return self.seq.length

    def _close_line(self, ok: bool) -> None:
        self.seq.restoration = None  # from here on, its line is like any other
        self._restores.store.join()
        first, whole = self._tally.front // self._size, self._stop
        if not ok or not all(map(self._there, range(self.request.layers))):
            self._stop = self.back.reach(first, whole, lambda one: one.complete)
        self._stop = self.back.close(first, whole, self._stop)

    def cancel(self) -> None:
        """Calls it off. What came of a settled one stays, as far as it is complete."""
        with self._guard:
            if self._phase is _Phase.BEHIND and self._planner.stepping(self.seq):
                self._broken = True  # whoever drives the step is told, and finishes
                return
            self.finish(ok=False)

    def abandon(self) -> None:
        """Calls it off for a sequence that is about to be closed."""
        with self._guard:
            self._broken = self._phase is _Phase.BEHIND  # in case that it is in a step
            self._end(ok=False)

    def _end(self, *, ok: bool) -> None:
        if self._phase is _Phase.OVER:
            return
        self._phase = _Phase.OVER
        self._tally.ended(self._stop, ok=ok)
        self._restores.remove(self)
        self.back.clear()
        if self.seq.restoration is self:
            self.seq.restoration = None


def choose(
    restorations: Iterable[Restoration], most: int | None = None
) -> tuple[Restoration, int] | None:
    """What the policy wants computed next, for one of these.

    Args:
        restorations: Of one cache, unsettled.
        most: See `Restoration.next`.

    Returns:
        One, and how many of its tokens: 0 where only its suffix is left. None if all wait for
        loads.
    """
    mine = [one for one in restorations if not one.settled]
    if not mine:
        return None
    with mine[0]._guard:
        return mine[0]._restores.hand_out(mine, most)
