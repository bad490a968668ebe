"""What came of executing restores, whichever engine did it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from flowkv.policy.restore.words import Compute, Load, Op, Request


class Done(NamedTuple):
    """One op, as it went.

    Attributes:
        op: Which.
        start_s: When it was given to its engine.
        end_s: When its cells were there, or when it failed.
        ok: False if it failed.
    """

    op: Op
    start_s: float
    end_s: float
    ok: bool


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What one execution did.

    Attributes:
        timeline: Its ops, in order of their starts; of one time, in the order they were begun in.
        ttft_s: Per request: from its arrival until its last op was done.
        link_bytes: Moved by loads, failed ones too.
        compute_busy_s: Seconds of all compute ops, suffixes too.
        link_busy_s: Seconds in which loads were under way, summed over tiers.
        met: Per request: share of its cells that was computed; where the pointers met.
    """

    timeline: tuple[Done, ...]
    ttft_s: dict[int, float]
    link_bytes: float
    compute_busy_s: float
    link_busy_s: float
    met: dict[int, float]

    @property
    def makespan_s(self) -> float:
        """From the first start until all was done."""
        ends = [done.end_s for done in self.timeline]
        return max(ends) - min(done.start_s for done in self.timeline) if ends else 0.0

    @property
    def mean_s(self) -> float:
        """Mean time to first token."""
        return sum(self.ttft_s.values()) / len(self.ttft_s)


def summed(requests: Iterable[Request], timeline: Iterable[Done]) -> Run:
    """What a timeline says about its requests; ops of one start in the order they were begun in."""
    known = {request.number: request for request in requests}
    timeline = tuple(sorted(timeline, key=lambda done: done.start_s))
    ends = {number: request.arrived_s for number, request in known.items()}
    computed = dict.fromkeys(known, 0)
    link_bytes = compute_s = link_s = 0.0
    free_s: dict[str, float] = {}
    for op, start_s, end_s, ok in timeline:
        ends[op.request] = max(ends[op.request], end_s)
        if isinstance(op, Load):
            cells = op.layers.size * op.tokens.size
            link_bytes += cells * known[op.request].sources[op.source].cell_bytes
            tier = known[op.request].sources[op.source].tier
            link_s += max(0.0, end_s - max(start_s, free_s.get(tier, -math.inf)))
            free_s[tier] = max(free_s.get(tier, -math.inf), end_s)
            continue
        compute_s += end_s - start_s
        if isinstance(op, Compute) and ok:
            computed[op.request] += op.layers.size * op.tokens.size
    return Run(
        timeline=timeline,
        ttft_s={number: ends[number] - known[number].arrived_s for number in known},
        link_bytes=link_bytes,
        compute_busy_s=compute_s,
        link_busy_s=link_s,
        met={number: computed[number] / max(1, cells_of(known[number])) for number in known},
    )


def cells_of(request: Request) -> int:
    """Cells that a restore of it has to produce."""
    return (request.tokens - request.resident) * request.layers


__all__ = ["Done", "Run", "cells_of", "summed"]
