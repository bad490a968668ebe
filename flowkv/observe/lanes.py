"""What requests of an engine went through: waiting, prefill, decoding, set aside."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from flowkv.observe.events import Admitted, Finished, Preempted, Queued

Phase = Literal["queued", "prefill", "decode", "aside"]

PHASES: tuple[Phase, ...] = ("queued", "prefill", "decode", "aside")
"""Waiting for its turn; until its first token; from then on; preempted, waiting to go on."""


class Piece(NamedTuple):
    """A phase of a request; times are those of `time.perf_counter`."""

    phase: Phase
    first_s: float
    stop_s: float


@dataclass
class Lane:
    """A request.

    Attributes:
        request: Its number.
        started_s: When it was submitted.
        pieces: What it went through, in order.
        ended: How it ended; None while it is under way.
    """

    request: int
    started_s: float
    pieces: list[Piece] = field(default_factory=list)
    ended: Finished | None = None


class Lanes:
    """Requests by their events, evenly chosen where they are many. Not thread-safe.

    Args:
        most: Requests that are kept at most. Beyond that every second one is forgotten, and of
            those to come only as many are begun.

    Attributes:
        stride: Every how many requests one is kept.
    """

    def __init__(self, *, most: int = 128) -> None:
        self._most, self.stride = most, 1
        self._begun, self._places = 0, dict[int, int]()  # numbers may be of other caches in between
        self._lanes: dict[int, Lane] = {}
        self._open: dict[int, tuple[Phase, float]] = {}  # the phase of a request, since when

    def queued(self, event: Queued, now_s: float) -> None:
        """A request was accepted."""
        place, self._begun = self._begun, self._begun + 1
        if place % self.stride:
            return
        self._places[event.request] = place
        self._lanes[event.request] = Lane(event.request, now_s)
        self._open[event.request] = "queued", now_s
        while len(self._lanes) > self._most:
            self._thin()

    def admitted(self, event: Admitted, now_s: float) -> None:
        """A request entered the batch; its first token is told when it is over."""
        self._enter(event.request, "prefill", now_s)

    def preempted(self, event: Preempted, now_s: float) -> None:
        """A request made room."""
        self._enter(event.request, "aside", now_s)

    def finished(self, event: Finished) -> None:
        """A request is over."""
        lane = self._lanes.get(event.request)
        if lane is None:
            return
        self._enter(event.request, "queued", event.started_s + event.seconds)
        self._open.pop(event.request, None)
        first_token_s = event.started_s + event.ttft_s if event.ttft_s else float("inf")
        lane.started_s, lane.ended = event.started_s, event
        lane.pieces = [part for piece in lane.pieces for part in _parted(piece, first_token_s)]

    def take(self, request: int) -> Lane | None:
        """Hands out a request, and forgets it; None if it is not kept."""
        return self._forget(request)

    def under_way(self, now_s: float) -> list[Lane]:
        """Requests that are not over, with what they are in until now."""
        found = []
        for request, (phase, since_s) in self._open.items():
            lane = self._lanes[request]
            pieces = [*lane.pieces, Piece(phase, since_s, max(now_s, since_s))]
            found.append(Lane(request, lane.started_s, pieces))
        return found

    def _enter(self, request: int, phase: Phase, now_s: float) -> None:
        if request in self._open:
            before, since_s = self._open[request]
            self._open[request] = phase, now_s
            if now_s > since_s:
                self._lanes[request].pieces.append(Piece(before, since_s, now_s))

    def _thin(self) -> None:
        self.stride *= 2
        for request in [one for one, place in self._places.items() if place % self.stride]:
            self._forget(request)

    def _forget(self, request: int) -> Lane | None:
        self._places.pop(request, None)
        self._open.pop(request, None)
        return self._lanes.pop(request, None)

    def __iter__(self) -> Iterator[Lane]:
        """Requests that are kept, in order of submission, with the phases that are over."""
        return iter(sorted(self._lanes.values(), key=lambda lane: lane.request))

    def __len__(self) -> int:
        return len(self._lanes)


def _parted(piece: Piece, first_token_s: float) -> Iterator[Piece]:
    """Computing is prefill until the first token, and decoding from then on."""
    phase, first_s, stop_s = piece
    if phase != "prefill" or stop_s <= first_token_s:
        yield piece
        return
    if first_s < first_token_s:
        yield Piece("prefill", first_s, first_token_s)
    yield Piece("decode", max(first_s, first_token_s), stop_s)
