"""Retention of spans of tokens: how long the pages of a prompt stay, and before which others."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from flowkv.core.errors import ConfigError
from flowkv.policy.base import DEFAULT_RANK, Lease

EPHEMERAL = 80
"""Priority of the pages before a breakpoint of `cache_control`."""

EPHEMERAL_S = {"5m": 300.0, "1h": 3600.0}
"""Seconds of the times that `cache_control` knows."""


class Retain(msgspec.Struct, frozen=True):
    """Retention of the pages of a span of tokens.

    A page belongs to a span that contains one of its tokens; if several do, the highest priority
    counts.

    Attributes:
        start: First token of the span.
        stop: First token behind it; None for the end of the sequence, however long it grows.
        priority: 0 to 100: pages of lower priority are evicted first. The default is 35.
        for_s: Seconds after which the priority is the default again.
    """

    start: int
    stop: int | None = None
    priority: int = DEFAULT_RANK
    for_s: float = math.inf

    def __post_init__(self) -> None:
        stop = self.start + 1 if self.stop is None else self.stop
        if not 0 <= self.start < stop:
            raise ConfigError(
                f"a span of tokens from {self.start} to {self.stop}", "Let it hold a token or more"
            )
        if not 0 <= self.priority <= 100 or not self.for_s > 0:
            raise ConfigError(
                f"priority {self.priority} for {self.for_s} seconds",
                "Use a priority from 0 to 100, and a time above 0",
            )


def lease_of(retain: Iterable[Retain], start: int, stop: int) -> Lease | None:
    """Return the lease of a page of the tokens from `start` to `stop`; None if no span has any."""
    spans = [r for r in retain if r.start < stop and (r.stop is None or start < r.stop)]
    if not spans:
        return None
    best = max(spans, key=lambda span: (span.priority, span.for_s))
    return Lease(rank=best.priority, rank_s=best.for_s)
