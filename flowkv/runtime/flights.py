"""Loads of restores under way: one flight per `Load` of the policy, many answers of tiers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from flowkv.core import compiling
from flowkv.policy.restore import Load
from flowkv.runtime.inbound import Inbound
from flowkv.runtime.schedule import Wish
from flowkv.runtime.store import Store
from flowkv.runtime.traffic import Source
from flowkv.tiers.base import Completion, FrameInfo, Outcome


class Piece(NamedTuple):
    """Some layers of a page.

    Attributes:
        inbound: The page.
        first: First of them, within its group.
        stripes: How many.
    """

    inbound: Inbound
    first: int
    stripes: int


class Flight:
    """One load under way.

    Attributes:
        op: What the policy wanted.
        owner: Whose; flights of one owner are called off together.
        tier: The tier that the policy meant.
        started_s: When it was asked for, as by `time.perf_counter`.
        ended_s: When its last answer came, as the tier says.
        end_s: When it is given up, as by `compiling.now_s`.
        left: Answers that are owed.
        n_bytes: Bytes that came, by number of the tier.
        seconds: Of the link's time that it took, once that is known.
        lost: Some of it cannot be had.
        called_off: Nobody is told that it arrived.
    """

    __slots__ = (
        *("_done", "called_off", "end_s", "ended_s", "left", "lost"),
        *("n_bytes", "op", "owner", "seconds", "started_s", "tier", "trips"),
    )

    def __init__(self, op: Load, owner: object, tier: str, done: Callable[[Flight], None]) -> None:
        self.op, self.owner, self.tier, self._done = op, owner, tier, done
        self.started_s = self.ended_s = time.perf_counter()
        self.end_s, self.left, self.seconds = compiling.now_s(), 1, 0.0
        self.lost = self.called_off = False
        self.n_bytes: Counter[int] = Counter()
        self.trips: dict[_Trip, int] = {}  # what each asks of its tier, in bytes

    def arrived(self) -> None:
        """All is answered."""
        self._done(self)


class _Trip:
    """One question to one tier, and where to ask next."""

    __slots__ = ("asked_s", "buffer", "flight", "given_up", "piece", "source", "sources", "wish")

    def __init__(
        self, flight: Flight, piece: Piece, source: Source, sources: Iterator[Source]
    ) -> None:
        self.flight, self.piece, self.source, self.sources = flight, piece, source, sources
        self.asked_s, self.given_up = time.perf_counter(), False
        self.wish: Wish | None = None
        self.buffer: torch.Tensor | None = None


class Flights:
    """All flights of a cache. Callers hold the KV lock.

    Args:
        store: Where pages are known.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._flights: dict[Flight, None] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def flying_bytes(self, tier: str) -> int:
        """Bytes asked for and not answered, of flights that the policy sent to a tier."""
        return sum(sum(f.trips.values()) for f in self._flights if f.tier == tier)

    def of(self, owner: object) -> int:
        """Flights of an owner."""
        return sum(flight.owner is owner for flight in self._flights)

    def busy(self) -> set[int]:
        """Numbers of the tiers that owe something."""
        return {trip.source.tier for flight in self._flights for trip in flight.trips}

    def begin(self, flight: Flight, pieces: Iterable[Piece], prefer: int) -> int:
        """Asks tiers for pieces of pages; `Flight.arrived` is called now or in a later `drain`.

        Args:
            flight: A new one.
            pieces: Of pages that are not there.
            prefer: Number of the tier that is asked first; -1 for the nearest of each page.

        Returns:
            Bytes asked for.
        """
        self._flights[flight] = None
        asked = 0
        try:
            for piece in pieces:
                asked += self._ask(flight, piece, piece.inbound.sources(prefer))
        except BaseException:
            flight.lost = True
            raise
        finally:
            self._allow(flight)
            self._less(flight)
        return asked

    def expire(self) -> None:
        """Gives up what is overdue; where a tier may still write stays lent to it."""
        now, moment_s = time.perf_counter(), compiling.now_s()
        for flight in [flight for flight in self._flights if flight.end_s <= moment_s]:
            for trip in list(flight.trips):
                self._abandon(trip)
                source, block = trip.source, trip.piece.inbound.block
                failed = Completion(0, 0, block.key, Outcome.FAILED, "deadline passed")
                waited = failed._replace(seconds=now - trip.asked_s)
                self._store.not_served(block, source.tier, waited)
                flight.lost = True
                self._less(flight)

    def cancel(self, owner: object) -> None:
        """Calls off all flights of an owner; they do not arrive, whatever their tiers still do."""
        mine = [flight for flight in self._flights if flight.owner is owner]
        for flight in mine:
            flight.called_off = True
        if mine:
            self._store.mover.cancel(owner)

    def _ask(self, flight: Flight, piece: Piece, sources: Iterator[Source]) -> int:
        """Asks the next source for a piece; without one the flight is lost."""
        source = next(sources, None)
        if source is None:
            flight.lost = True
            return 0
        trip = _Trip(flight, piece, source, sources)
        load, trip.buffer = piece.inbound.wish(source, piece.first, piece.stripes)
        piece.inbound.flying += 1
        flight.left += 1
        flight.trips[trip] = load.target.nbytes
        done = partial(self._answered, trip)
        trip.wish = self._store.mover.demand(source.tier, load, done, flight.owner)
        return load.target.nbytes

    def _allow(self, flight: Flight) -> None:
        """Says when a flight is overdue: what else its tiers owe comes first."""
        lanes, now = self._store.mover.lanes, compiling.now_s()
        for tier in {trip.source.tier for trip in flight.trips}:
            owed = lanes[tier].schedule.flying_bytes + lanes[tier].schedule.queued_bytes
            flight.end_s = max(flight.end_s, now + lanes[tier].patience_s(owed))

    def _answered(self, trip: _Trip, answer: Completion) -> None:
        store, flight, inbound = self._store, trip.flight, trip.piece.inbound
        inbound.flying -= 1
        if not trip.given_up:
            flight.trips.pop(trip)
            end_s = trip.asked_s + answer.seconds if answer.seconds else time.perf_counter()
            flight.ended_s = max(flight.ended_s, min(end_s, time.perf_counter()))
            if answer.outcome is Outcome.HIT and answer.info is not None:
                store.count_loaded(trip.source.tier, answer.n_bytes)
                flight.n_bytes[trip.source.tier] += answer.n_bytes
                self._landed(trip, answer.info)
            else:
                self._missed(trip, answer)
            self._less(flight)
        inbound.let_go()

    def _landed(self, trip: _Trip, info: FrameInfo) -> None:
        inbound, first, count = trip.piece
        if inbound.wanted and not inbound.complete and trip.buffer is not None:
            inbound.came(first, count, trip.buffer, info)
            if inbound.publish(trip.source):
                self._store.insert([inbound.block])

    def _missed(self, trip: _Trip, answer: Completion) -> None:
        """Counts a miss, and asks elsewhere."""
        inbound, source, flight = trip.piece.inbound, trip.source, trip.flight
        known = not inbound.block.gone and (source.last or answer.reason != "layout")
        if known and answer.reason != "cancelled":
            self._store.not_served(inbound.block, source.tier, answer)
        if inbound.wanted and not inbound.held and not flight.called_off:
            self._ask(flight, trip.piece, trip.sources)
            self._allow(flight)
        else:
            flight.lost |= not inbound.held

    def _abandon(self, trip: _Trip) -> None:
        trip.given_up = True
        trip.flight.trips.pop(trip)
        inbound = trip.piece.inbound
        if trip.wish is None or not self._store.mover.give_up(trip.source.tier, trip.wish):
            inbound.flying -= 1
            inbound.let_go()

    def _less(self, flight: Flight) -> None:
        flight.left -= 1
        if not flight.left and flight in self._flights:
            del self._flights[flight]
            if not flight.called_off:
                flight.arrived()
