"""What a prefetcher is given to decide with, and what a decision says."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from flowkv.policy.base import Slots


class Reach(Protocol):
    """What a driver knows about the place and the one below it, at this moment."""

    capacity_bytes: int
    """Of the place."""

    def room_bytes(self) -> int:
        """Free in the place."""
        ...

    def sizes(self, slots: Slots) -> Slots:
        """Bytes of blocks."""
        ...

    def missing(self, tip: int) -> tuple[int, Slots]:
        """The deepest ancestor of `tip` that is in the place, or -1, and what lies between.

        Root to leaf, and only as far as the source holds it without a gap; `tip` comes last.
        """
        ...


class Giver(Protocol):
    """Who knows what is worth bringing and what may go for it: a `Policy`, or who speaks for it."""

    def wanted(self, now_ns: int, n: int) -> tuple[Slots, NDArray[np.float64]]:
        """See `Policy.wanted`."""
        ...

    def displace(self, now_ns: int, n: int, rate: float, protected: Collection[int] = ()) -> Slots:
        """See `Policy.displace`."""
        ...


class Fetch(NamedTuple):
    """A decision, carried out at once: what leaves the place, and what comes.

    Attributes:
        kind: `QUEUE`, `HINT` or `LEARNED`.
        rate: Uses a second that are expected.
        slots: What to bring, root to leaf.
        victims: What the policy has given up for that; the driver removes it.
    """

    kind: int
    rate: float
    slots: Slots
    victims: Slots
