"""What a request says about itself: its conversation, and how its pages should be kept."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence as Items
from typing import NamedTuple

import msgspec

from flowkv.core.errors import ConfigError
from flowkv.policy.base import NEVER_NS
from flowkv.policy.config import DEFAULT_RANK, Lease

NEVER = math.inf
"""As `eta_s`: will not be used again."""

SOON = 0.0
"""As `eta_s`: right away."""

_SESSION_BITS = 62


class Retain(msgspec.Struct, frozen=True):
    """How the pages of a span of tokens should be kept.

    A page belongs to a span that has a token of it; of several spans the highest priority counts.

    Attributes:
        start: First token of the span.
        stop: First token behind it; None for the end of the sequence, however long it grows.
        priority: 0 to 100: everything of lower priority is given up before. The default is 35.
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


class Care(NamedTuple):
    """How the pages of a request should be kept.

    Attributes:
        session: Number of its conversation, -1 if unknown; see `session_number`.
        lease: Lease class, or a lease, of all pages; "" for the place's default.
        retain: Spans that are kept otherwise.
    """

    session: int = -1
    lease: str | Lease = ""
    retain: tuple[Retain, ...] = ()

    def of(self, start: int, stop: int) -> str | Lease:
        """The lease of a page that holds these tokens."""
        if not self.retain:
            return self.lease
        spans = [r for r in self.retain if r.start < stop and (r.stop is None or start < r.stop)]
        if not spans:
            return self.lease
        best = max(spans, key=lambda span: (span.priority, span.for_s))
        return Lease(rank=best.priority, rank_s=best.for_s)


NO_CARE = Care()


def make_care(
    session: str | int | None, lease: str | Lease, retain: Items[Retain], salt: bytes
) -> Care:
    """What a request says about itself, as the runtime keeps it.

    Raises:
        ConfigError: A span is none.
    """
    odd = [span for span in retain if not isinstance(span, Retain)]
    if odd:
        raise ConfigError(f"retain holds {odd[0]!r}", "Give flowkv.Retain(start, stop, ...) spans")
    number = -1 if session is None else session_number(session, salt)
    return Care(number, lease, tuple(retain)) if number >= 0 or lease or retain else NO_CARE


def session_number(session: str | int, salt: bytes) -> int:
    """A 62-bit number of a conversation, its own for each tenant, that does not tell its name."""
    name = f"{type(session).__name__}:{session}".encode()
    digest = hashlib.blake2b(name, key=salt[:64], digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _SESSION_BITS)


def eta_ns(eta_s: float) -> int:
    """Nanoseconds of an `eta_s`.

    Raises:
        ConfigError: It is negative, or no number.
    """
    if not eta_s >= 0:
        raise ConfigError(f"eta_s={eta_s}", "Give seconds from now, flowkv.SOON or flowkv.NEVER")
    return NEVER_NS if eta_s * 1e9 >= NEVER_NS else round(eta_s * 1e9)
