"""Restores as they went: what was computed, what was loaded, and when the two met.

    with Timelines(kv.bus) as restores:
        model.generate(**inputs)
    for restore in restores.ended:
        print(restore.describe())

Nothing is collected, and no event of a span is even made, while nobody listens.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from flowkv.observe.events import Bus, RestoreEnded, RestoreSpan

COMPUTING = ("compute", "suffix")
"""Engines that are the model; every other one is a tier."""

_MOST_UNDER_WAY = 1024  # requests whose end may still come; older ones were called off


class Meeting(NamedTuple):
    """Where the computed tokens and the loaded ones met.

    Attributes:
        token: First token that was loaded; what lies before it was computed or there already.
        at_s: When nothing of the prefix was missing any more, from the restore's begin.
    """

    token: int
    at_s: float


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """One restore.

    Attributes:
        ended: What it came to.
        spans: Its pieces, by when they began.
    """

    ended: RestoreEnded
    spans: tuple[RestoreSpan, ...]

    @property
    def tiers(self) -> list[str]:
        """Names of the tiers it was loaded from, in order of their first piece."""
        return [name for name in self.engines if name not in COMPUTING]

    @property
    def engines(self) -> list[str]:
        """Names of all engines, computing ones first."""
        seen = dict.fromkeys(span.engine for span in self.spans)
        return sorted(seen, key=lambda name: (name not in COMPUTING, name == "suffix"))

    @property
    def names(self) -> dict[str, str]:
        """What to call each engine: without the path of a tier that is alone of its kind."""
        short = {name: name.partition(":")[0] for name in self.engines}
        taken = list(short.values())
        return {name: kind if taken.count(kind) == 1 else name for name, kind in short.items()}

    @property
    def layers(self) -> int:
        """Layers that pieces were of; 1 if there is none."""
        return max((span.layer + span.layers for span in self.spans), default=1)

    @property
    def until_s(self) -> float:
        """How long it took until its last piece ended: the suffix may outlast the restore."""
        last = max((self.at(span)[1] for span in self.spans), default=0.0)
        return max(last, self.ended.seconds)

    @property
    def met(self) -> Meeting | None:
        """Where and when computing and loading met; None if one of them did nothing."""
        ended = self.ended
        if not ended.computed_tokens or not ended.loaded_tokens:
            return None
        last = max((self.at(s)[1] for s in self.spans if s.engine != "suffix"), default=0.0)
        return Meeting(ended.resident_tokens + ended.computed_tokens, last)

    @property
    def bound_s(self) -> float:
        """The lower bound; 0.0 if it is not known, or was beaten: then the rates were wrong."""
        return self.ended.bound_s if self.ended.bound_s <= self.ended.seconds else 0.0

    @property
    def bound_ratio(self) -> float:
        """How many times the lower bound it took; 0.0 while the bound is not known."""
        return self.ended.seconds / self.bound_s if self.bound_s > 0 else 0.0

    def at(self, span: RestoreSpan) -> tuple[float, float]:
        """Begin and end of a piece in seconds from the restore's begin, 0 for what came before."""
        first = span.started_s - self.ended.started_s
        return max(0.0, first), max(0.0, first + span.seconds)

    def busy_s(self, *engines: str) -> float:
        """Seconds in which one of these engines, or several at once, worked for it."""
        return _union(self.at(span) for span in self.spans if span.engine in engines)

    def overlap_s(self) -> float:
        """Seconds in which the model computed while something was being loaded."""
        computing, loading = self.busy_s(*COMPUTING), self.busy_s(*self.tiers)
        return max(0.0, computing + loading - _union(map(self.at, self.spans)))

    def describe(self) -> str:
        """One line for people."""
        ended, met = self.ended, self.met
        parts = [f"{ended.tokens:,} tokens in {ended.seconds * 1e3:,.1f} ms"]
        if ended.resident_tokens:
            parts.append(f"{ended.resident_tokens:,} there already")
        if ended.computed_tokens:
            parts.append(f"{ended.computed_tokens:,} computed")
        if ended.loaded_tokens:
            tiers = [self.names[name] for name in self.tiers]
            source = f" from {' and '.join(tiers)}" if tiers else ""
            parts.append(f"{ended.loaded_tokens:,} loaded{source}")
        if met is not None:
            parts.append(f"met at token {met.token:,} after {met.at_s * 1e3:,.1f} ms")
        if self.bound_ratio:
            parts.append(f"{self.bound_ratio:.2f}x the lower bound")
        return ", ".join(parts)


class Timelines:
    """Collects the restores of a cache while it is open. Thread-safe.

    Args:
        bus: `KV.bus`.
        most: Restores that are kept; older ones are forgotten.

    Attributes:
        longest: The longest of all so far that loaded anything; None before the first.
    """

    def __init__(self, bus: Bus, *, most: int = 64) -> None:
        self._lock = threading.Lock()
        self._under_way: OrderedDict[int, list[RestoreSpan]] = OrderedDict()
        self._ended: deque[Timeline] = deque(maxlen=most)
        self.longest: Timeline | None = None
        self._subscription = bus.subscribe(self.note, RestoreSpan, RestoreEnded)

    def note(self, event: RestoreSpan | RestoreEnded) -> None:
        """Takes an event."""
        with self._lock:
            if isinstance(event, RestoreSpan):
                if idle(event):
                    return
                self._under_way.setdefault(event.request, []).append(event)
                if len(self._under_way) > _MOST_UNDER_WAY:
                    self._under_way.popitem(last=False)
                return
            spans = sorted(self._under_way.pop(event.request, ()), key=lambda s: s.started_s)
            timeline = Timeline(ended=event, spans=tuple(spans))
            self._ended.append(timeline)
            before = self.longest.ended.seconds if self.longest is not None else -1.0
            if event.loaded_tokens and event.seconds > before:
                self.longest = timeline

    @property
    def ended(self) -> list[Timeline]:
        """Restores that ended, oldest first."""
        with self._lock:
            return list(self._ended)

    def __iter__(self) -> Iterator[Timeline]:
        return iter(self.ended)

    def close(self) -> None:
        """Ends the collecting; what was collected stays."""
        self._subscription.close()

    def __enter__(self) -> Timelines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def idle(span: RestoreSpan) -> bool:
    """Whether nothing was to be done for a piece: its layers see nothing of its tokens."""
    return not (span.seconds or span.n_bytes)


def _union(pieces: Iterable[tuple[float, float]]) -> float:
    """Length of what intervals cover together."""
    covered, until = 0.0, 0.0
    for first, stop in sorted(pieces):
        covered += max(0.0, stop - max(first, until))
        until = max(until, stop)
    return covered
