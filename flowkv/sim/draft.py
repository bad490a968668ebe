"""Conversations under way while a trace is generated, each a Python generator."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterator
from typing import Annotated

import numpy as np
from msgspec import Meta
from numpy.random import Generator
from numpy.typing import NDArray

from flowkv.policy.config import PolicyConfig
from flowkv.sim.chains import build_trace
from flowkv.sim.trace import Trace

Count = Annotated[int, Meta(ge=1, le=10**7)]
Rate = Annotated[float, Meta(gt=0.0, le=1e6)]
Odds = Annotated[float, Meta(ge=0.0, le=1.0)]
Seconds = Annotated[float, Meta(gt=0.0, le=1e8)]
Times = Annotated[float, Meta(ge=1.0, le=1e6)]
Spread = Annotated[float, Meta(ge=0.0, le=5.0)]
Span = tuple[int, int]
"""A space of ids, and how many blocks of it, from its first."""


class TalkConfig(PolicyConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What all generated conversations can be told.

    Attributes:
        requests: How many.
        seed: Equal seeds give equal traces.
        block_tokens: Tokens of a block; only whole ones count.
        sessions_per_s: New conversations a second, on average.
        tenants: Conversations belong to so many, evenly.
    """

    requests: Count = 5000
    seed: int = 0
    block_tokens: Count = 512
    sessions_per_s: Rate = 0.6
    tenants: Count = 1


class Draft:
    """Conversations under way, and the requests that they made.

    Args:
        config: Common options.
        rng: Source of randomness.

    Attributes:
        spaces: Spaces of ids given away; below the first one given lie prompts and documents.
        now: Seconds of the present request,
        session: ... and its conversation.
        renamed: (which, of how many) -> which is meant; for popularity that changes.
    """

    def __init__(self, config: TalkConfig, rng: Generator) -> None:
        self.config, self.rng = config, rng
        self.spaces = 1 << 20  # below: prompts and documents
        self._pending: list[tuple[float, int, Iterator[float | None]]] = []
        self._rows: list[tuple[float, int, int, int, int, int, int]] = []
        self._ids: list[NDArray[np.uint64]] = []
        self._begun = 0
        self.now, self.session = 0.0, 0
        self.renamed: Callable[[int, int], int] = lambda at, _n: at

    def fresh(self) -> int:
        """A space of ids that nobody shares."""
        self.spaces += 1
        return self.spaces

    def size(self, median: float, spread: float) -> int:
        """A length in tokens."""
        return max(1, round(median * float(np.exp(spread * self.rng.standard_normal()))))

    def time(self, median_s: float, spread: float) -> float:
        """A time in seconds."""
        return median_s * float(np.exp(spread * self.rng.standard_normal()))

    def pick(self, shares: list[float]) -> int:
        """One of some things, by cumulative popularity and what `renamed` makes of it."""
        at = min(bisect.bisect_right(shares, self.rng.random()), len(shares) - 1)
        return self.renamed(at, len(shares))

    def note(self, prompts: list[Span], own: int, tokens: int, output: int, stop: int) -> None:
        """A request of the present session: whole blocks of prompts, then of its own tokens."""
        size = self.config.block_tokens
        spans = [(space, length // size) for space, length in prompts]
        rest = max(1, tokens // size) - sum(count for _, count in spans)
        pairs = [_span(space, count) for space, count in [*spans, (own, max(0, rest))]]
        self._ids.append(np.concatenate(pairs))
        tenant = self.session % self.config.tenants
        length = len(self._ids[-1])
        self._rows.append((self.now, length, tokens, output, self.session, stop, tenant))

    def play(
        self, starts: Iterator[float], talk: Callable[[Draft], Iterator[float | None]]
    ) -> None:
        """Lets conversations begin at `starts` until there are enough requests.

        `talk` is a generator: sent the time, it notes a request and yields the time to its next
        one, or None.
        """
        start = next(starts)
        while len(self._rows) < self.config.requests:
            if not self._pending or start <= self._pending[0][0]:
                heapq.heappush(self._pending, (start, self._begun, talk(self)))
                self._begun += 1
                start = next(starts)
                continue
            now, session, steps = heapq.heappop(self._pending)
            self.now, self.session = now, session
            gap = next(steps, None)
            if gap is not None:
                heapq.heappush(self._pending, (now + gap, session, steps))

    def trace(self, name: str) -> Trace:
        """What was noted."""
        table = list(zip(*self._rows, strict=True))
        return build_trace(
            name,
            np.round(np.array(table[0]) * 1e9).astype(np.int64),
            table[1],
            np.concatenate(self._ids),
            self.config.block_tokens,
            input_tokens=table[2],
            output_tokens=table[3],
            sessions=table[4],
            stops=table[5],
            tenants=table[6],
        )


def _span(space: int, count: int) -> NDArray[np.uint64]:
    pairs = np.empty((count, 2), np.uint64)
    pairs[:, 0], pairs[:, 1] = np.arange(count), space
    return pairs
