"""All restores of a cache that are under way: one policy, one state, links that they share.

The policy decides, this executes: it asks tiers for what the policy wants loaded, and tells the
state what came. Nothing of it blocks.
"""

from __future__ import annotations

import math
import select
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from flowkv.core import compiling
from flowkv.observe.events import Bus, RestoreSpan
from flowkv.policy.restore import (
    Compute,
    Load,
    LoadGate,
    RestorePolicy,
    Span,
    State,
    make_restore_policy,
)
from flowkv.policy.restore.costs import Measured
from flowkv.runtime.flights import Flight, Flights
from flowkv.runtime.prior import Prior
from flowkv.runtime.store import Store

if TYPE_CHECKING:
    from flowkv.runtime.restoration import Restoration

_PAUSE_S = 0.0005
_AHEAD_S = 0.05
_LEAST_PAGES, _LEAST_BYTES, _MOST_BYTES = 4, 1 << 22, 1 << 26
"""In flight from one tier are as many bytes as it gives in that time, within these bounds."""
_MEMORY = 8
"""Weight of what was measured before, beside a further measurement."""


class Restores:
    """Restores of one cache. Callers hold the KV lock.

    Args:
        store: Where pages are known.
        gate: Told what loads take.
        bus: Where spans go.

    Attributes:
        policy: Decides; another one can take its place while nothing is restored.
        costs: What was measured so far.
        state: How far all of them are.
        flights: Loads under way.
        s_per_byte: Seconds of the thread that drives them; 0.0 while that is not known.
    """

    def __init__(self, store: Store, gate: LoadGate, bus: Bus) -> None:
        self.store, self.gate, self.bus = store, gate, bus
        self.policy: RestorePolicy = make_restore_policy("flowkv")
        self.costs = Measured(Prior(gate))
        self.state, self.flights = State(self.costs), Flights(store)
        store.give_up_late = self.flights.expire
        self._active: dict[int, Restoration] = {}
        self._busy_s: dict[str, float] = {}
        self._computed_s: dict[int, float] = {}
        self._numbers = 0
        self._pumping = False
        self._allowance_s, self.s_per_byte = math.inf, 0.0

    def number(self) -> int:
        """A number for a request."""
        self._numbers += 1
        return self._numbers

    def add(self, restoration: Restoration) -> None:
        """A restore begins."""
        self.state.add(restoration.request)
        self._active[restoration.request.number] = restoration

    def remove(self, restoration: Restoration) -> None:
        """A restore is over; what is on its way for it is called off."""
        number = restoration.request.number
        if self._active.pop(number, None) is not None:
            self.flights.cancel(restoration)
            self.state.remove(number)
            self.policy.forget(number)
            if not self._active:
                self._computed_s.clear()

    # ---- the time of the thread that drives them

    def allow(self, seconds: float = math.inf) -> None:
        """From now on they take so much time of this thread, for others have need of it.

        What they took too much is taken off, what was left over is kept, up to as much again;
        without a number, that ends.
        """
        left = 0.0 if self._allowance_s == math.inf else min(self._allowance_s, seconds)
        self._allowance_s = left + seconds

    @property
    def paused(self) -> bool:
        """Whether nothing is asked for until more time is allowed."""
        return self._allowance_s <= 0.0

    @property
    def still(self) -> bool:
        """Whether no tier owes anything, though all was asked for that there is room for."""
        return not self.paused and not self.flights.busy()

    def _spent(self, seconds: float, asked: int) -> None:
        self._allowance_s -= seconds
        if asked:
            known = self.s_per_byte or seconds / asked
            self.s_per_byte = known + (seconds / asked - known) / _MEMORY

    # ---- loads

    def pump(self) -> None:
        """Takes the answers that are there, and asks for as much more as links should have."""
        if self._pumping:  # an answer ended a restore, which is why this was called
            return
        self._pumping = True
        try:
            self.store.drain()
            if self._active:
                self._now()
                begun_s = compiling.now_s()
                asked = sum(self._fill(tier) for tier in self._tiers())
                self.store.drain()
                self._spent(compiling.now_s() - begun_s, asked)
        finally:
            self._pumping = False

    def _tiers(self) -> Iterable[str]:
        sources = (s for one in self._active.values() for s in one.request.sources)
        return dict.fromkeys(source.tier for source in sources)

    def _fill(self, tier: str) -> int:
        """Asks a tier for what the policy wants, up to its window; returns the bytes."""
        asked, room = 0, self._window(tier) - self.flights.flying_bytes(tier)
        if self._allowance_s < math.inf:
            most = self._allowance_s / self.s_per_byte if self.s_per_byte else self._least(tier)
            room = min(room, most) if self._allowance_s > 0.0 else 0.0
        while room > asked:
            op = self.policy.next_load(self.state, tier) or self._left(tier)
            if op is None:
                break
            asked += self._load(op, tier)
        return asked

    def _window(self, tier: str) -> float:
        rates = self.gate.rates.get(tier)
        expected = rates.bytes_per_s * _AHEAD_S if rates else 0.0
        return min(max(expected, self._least(tier)), _MOST_BYTES)

    def _least(self, tier: str) -> float:
        """A few pages: of a small model, a fixed number of bytes would be all there is."""
        pages = (
            source.cell_bytes * one.request.layers * one.request.unit
            for one in self._active.values()
            for source in one.request.sources
            if source.tier == tier
        )
        return min(_LEAST_PAGES * max(pages, default=0.0), _LEAST_BYTES)

    def _load(self, op: Load, tier: str) -> int:
        self.state.begin(op)
        restoration = self._active[op.request]
        flight = Flight(op, restoration, tier, self._arrived)
        return self.flights.begin(
            flight, restoration.back.pieces(op), restoration.back.tier_of(op.source)
        )

    def _left(self, tier: str) -> Load | None:
        """What the policy leaves where it is, though nobody computes it any more: by layers."""
        for number, one in self._active.items():
            progress = self.state.requests[number]
            if not progress.fronted or one.request.sources[0].tier != tier:
                continue
            for layer in range(one.request.layers):
                floor = max(progress.front[layer], progress.lost)
                if floor < progress.back[layer]:
                    return Load(number, Span(layer, layer + 1), Span(floor, progress.back[layer]))
        return None

    def files(self) -> list[int]:
        """What can be polled for the next answer of a tier; empty if that cannot be polled for."""
        numbers = self.flights.busy()
        tiers = [self.store.tiers[number] for number in numbers if number < len(self.store.tiers)]
        files = [tier.fileno() for tier in tiers if hasattr(tier, "fileno")]
        return files if len(files) == len(tiers) and min(files, default=0) >= 0 else []

    def _arrived(self, flight: Flight) -> None:
        restoration = self._active.get(flight.op.request)
        if restoration is None or restoration is not flight.owner:
            return
        self._now()
        self._measure(flight)
        restoration.arrived(flight)

    def _measure(self, flight: Flight) -> None:
        """Loads in flight at one time share the link: each counts from the end of the last."""
        n_bytes, op = flight.n_bytes.total(), flight.op
        request = self._active[op.request].request
        begun_s = max(flight.started_s, self._busy_s.get(flight.tier, 0.0))
        self._busy_s[flight.tier] = max(flight.ended_s, begun_s)
        flight.seconds = seconds = max(0.0, flight.ended_s - begun_s)
        counted_s = compiling.measured_s(begun_s, begun_s + seconds)
        if n_bytes and counted_s > 0 and not flight.lost:
            source = request.sources[op.source]
            self.costs.loaded(request, op.source, round(n_bytes / source.cell_bytes), counted_s)
            if len(flight.n_bytes) == 1:
                (number,) = flight.n_bytes
                self.gate.loaded(self.store.tiers[number].name, n_bytes, counted_s)
        if self.bus.wants(RestoreSpan):
            (first, size), (layer, layers) = _cut(op.tokens), _cut(op.layers)
            span = RestoreSpan(
                request=op.request,
                engine=flight.tier,
                token=first,
                tokens=size,
                layer=layer,
                layers=layers,
                started_s=begun_s,
                seconds=seconds,
                n_bytes=n_bytes,
            )
            self.bus.emit(span)

    # ---- computing

    def computed(self, thread: int) -> None:
        """Takes what a thread has computed: rows of one forward share its time, by their tokens."""
        now, found = time.perf_counter(), []
        for one in self._active.values():
            if (done := one.computed(thread)) is not None:
                found.append((one, done))
        begun_s = min(done.started_s for _, done in found)
        # Handed out together and computed one after the other: each from the end of the last.
        begun_s = max(begun_s, self._computed_s.get(thread, 0.0))
        self._computed_s[thread] = now
        tokens = sum(done.op.tokens.size for _, done in found)
        counted_s = compiling.measured_s(begun_s, now)
        for one, done in found:
            share = done.op.tokens.size / tokens
            one.told(done.op, begun_s, (now - begun_s) * share, counted_s * share)

    def hand_out(
        self, among: Sequence[Restoration], most: int | None
    ) -> tuple[Restoration, int] | None:
        """See `restoration.choose`."""
        for one in among:
            one.pump()
        for one in among:
            if tokens := one.pending():
                return one, tokens
        found = self.choose(among)
        if found is None or found[1] is None:
            return None if found is None else (found[0], 0)
        return found[0], found[0].take(found[1], most)

    def choose(self, among: Iterable[Restoration]) -> tuple[Restoration, Compute | None] | None:
        """What is computed next for one of these; `Compute` is None where only the suffix is left.

        Returns:
            None if nothing is to be computed now: all wait for loads.
        """
        numbers = [one.request.number for one in among if one.request.number in self._active]
        if not numbers:
            return None
        self._now()
        op = self.policy.next_compute(self.state, numbers)
        if op is None:
            return None
        if not isinstance(op, Compute):
            return self._active[op.request], None
        return self._active[op.request], op

    def _now(self) -> None:
        self.state.now_s = time.perf_counter()


def rest(files: Iterable[int], seconds: float) -> None:
    """Waits for the next answer of a tier, without the KV lock.

    Args:
        files: As `Restores.files` said.
        seconds: Longest wait.
    """
    waiting, polls = select.poll(), False
    for number in files:
        waiting.register(number, select.POLLIN)
        polls = True
    if polls:
        waiting.poll(1000 * seconds)
    else:
        time.sleep(_PAUSE_S)


def _cut(span: Span) -> tuple[int, int]:
    return span.first, span.size
