"""What became of the blocks that were prefetched, and of those that had to go for them."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from flowkv.policy.base import Slots

FREE, FLYING, LANDED, AWAITED = 0, 1, 2, 3
"""Of a slot: not prefetched; on its way; there and not used yet; on its way, and demanded."""

SLOT = np.dtype(
    [
        ("state", np.uint8),
        ("purse", np.uint8),
        ("pushed", np.bool_),  # it left to make room for a prefetch
        ("bytes", np.int64),
        ("batch", np.int64),  # number of the prefetch, or of the one that pushed it out
    ]
)


class Outcome:
    """Sums of bytes over what was just settled, by purse.

    Attributes:
        used: Purses and bytes of those that somebody asked for.
        wasted: Purses and bytes of those that nobody did.
        displaced: Bytes that somebody asked for, and that a prefetch had pushed out.
    """

    __slots__ = ("displaced", "used", "wasted")

    def __init__(self) -> None:
        self.used: dict[int, int] = {}
        self.wasted: dict[int, int] = {}
        self.displaced = 0


class Outcomes:
    """Follows prefetched slots until they are used, leave, or are forgotten about.

    Args:
        horizon_ns: A prefetch that was not used by then counts as wasted, a block that is asked for
            later than that after it was pushed out as not displaced.

    Attributes:
        flying_bytes: On their way.
        unproven_bytes: On their way, or there and not used yet.
    """

    def __init__(self, horizon_ns: int) -> None:
        self.horizon_ns = horizon_ns
        self.flying_bytes = self.unproven_bytes = 0
        self._slots = np.zeros(0, SLOT)
        self._batches: deque[tuple[int, int, Slots]] = deque()
        self._count = 0

    def bring(self, now_ns: int, purse: int, slots: Slots, sizes: Slots) -> None:
        """Blocks of some sizes start to come, for a reason."""
        self._begin(now_ns, slots, sizes)
        self._slots["state"][slots], self._slots["purse"][slots] = FLYING, purse
        self._slots["pushed"][slots] = False
        self.flying_bytes += int(sizes.sum())
        self.unproven_bytes += int(sizes.sum())

    def push(self, now_ns: int, slots: Slots, sizes: Slots) -> None:
        """Blocks of some sizes had to go for a prefetch. Those it brought itself have left."""
        self._begin(now_ns, slots, sizes)
        self._slots["pushed"][slots] = True

    def of(self, slots: Slots) -> NDArray[np.uint8]:
        """States of slots."""
        self._grow(int(slots.max(initial=-1)))
        return self._slots["state"][slots]

    def land(self, slots: Slots) -> Slots:
        """Blocks came; returns those that nobody waited for meanwhile."""
        states = self.of(slots)
        fresh: Slots = slots[states == FLYING]
        self._settle(slots[states == AWAITED])
        self.flying_bytes -= int(self._slots["bytes"][slots[states != FREE]].sum())
        self._slots["state"][fresh] = LANDED
        return fresh

    def drop(self, slots: Slots) -> Slots:
        """Blocks will not come; returns those that were on their way."""
        gone = slots[np.isin(self.of(slots), (FLYING, AWAITED))]
        self.flying_bytes -= int(self._slots["bytes"][gone].sum())
        self._settle(gone)
        return gone

    def ask(self, chain: Slots, hits: int) -> Outcome:
        """Somebody asks for a chain, of which so many leading blocks were there."""
        outcome, states = Outcome(), self.of(chain)
        known = np.flatnonzero(states)
        if len(known):
            landed = known[states[known] == LANDED]
            self._sum(outcome.used, chain[landed[landed < hits]])
            self._sum(outcome.wasted, chain[landed[landed >= hits]])
            self._settle(chain[landed])
            flying = chain[known[states[known] == FLYING]]
            self._sum(outcome.used, flying)  # it is waited for, but shorter
            self._slots["state"][flying] = AWAITED
        pushed = np.flatnonzero(self._slots["pushed"][chain])
        if len(pushed):
            lost = chain[pushed[pushed >= hits]]
            outcome.displaced = int(self._slots["bytes"][lost].sum())
            self._slots["pushed"][chain[pushed]] = False
        return outcome

    def leave(self, slots: Slots) -> Outcome:
        """Blocks left the place."""
        outcome = Outcome()
        unused = slots[self.of(slots) == LANDED]
        if len(unused):
            self._sum(outcome.wasted, unused)
            self._settle(unused)
        return outcome

    def forget(self, slots: Slots) -> None:
        """Slots that name other blocks next."""
        self._settle(self.drop(slots))
        self._settle(slots[self.of(slots) == LANDED])
        self._slots["pushed"][slots] = False

    def tick(self, now_ns: int) -> Outcome:
        """What nobody asked for within the horizon is wasted."""
        outcome = Outcome()
        while self._batches and self._batches[0][0] + self.horizon_ns <= now_ns:
            _, batch, slots = self._batches.popleft()
            slots = slots[self._slots["batch"][slots] == batch]
            unused = slots[self._slots["state"][slots] == LANDED]
            self._sum(outcome.wasted, unused)
            self._settle(unused)
            self._slots["pushed"][slots] = False
        return outcome

    def _begin(self, now_ns: int, slots: Slots, sizes: Slots) -> None:
        self._grow(int(slots.max(initial=-1)))
        self._count += 1
        self._slots["batch"][slots], self._slots["bytes"][slots] = self._count, sizes
        self._batches.append((now_ns, self._count, slots))

    def _sum(self, into: dict[int, int], slots: Slots) -> None:
        for purse in np.unique(self._slots["purse"][slots]).tolist():
            mine = slots[self._slots["purse"][slots] == purse]
            into[purse] = into.get(purse, 0) + int(self._slots["bytes"][mine].sum())

    def _settle(self, slots: Slots) -> None:
        self.unproven_bytes -= int(self._slots["bytes"][slots].sum())
        self._slots["state"][slots] = FREE

    def _grow(self, top: int) -> None:
        if top >= len(self._slots):
            grown = np.zeros(max(top + 1, 2 * len(self._slots)), SLOT)
            grown[: len(self._slots)] = self._slots
            self._slots = grown
