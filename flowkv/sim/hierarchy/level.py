"""One level of memory whose content a policy of the catalogue decides."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from flowkv.policy import Policy

_ROOT = np.array([-1])


class Level:
    """Blocks of equal size in a bounded memory.

    The blocks of this experiment do not depend on each other: one is read without its
    predecessors. So the policy is told no parents, and about one block at a time.

    Args:
        capacity: Bytes.
        block_bytes: Bytes of a block.
        policy: A fresh policy; it decides what leaves.
    """

    def __init__(self, capacity: int, block_bytes: int, policy: Policy) -> None:
        self.room = capacity // block_bytes
        self.held: set[int] = set()
        self.left = 0
        self._policy = policy
        self._clock = 0

    def __contains__(self, slot: int) -> bool:
        return slot in self.held

    def use(self, now_ns: float, slot: int) -> bool:
        """A block is read; whether it is here."""
        self._policy.access(self._time(now_ns), np.array([slot]))
        return slot in self.held

    def add(self, now_ns: float, slot: int, protected: Collection[int] = ()) -> list[int]:
        """A block comes in; returns those that leave for it, which may be itself.

        If everything else is protected, it is the new block that stays out.
        """
        now = self._time(now_ns)
        self._policy.insert(now, np.array([slot]), _ROOT)
        self.held.add(slot)
        if len(self.held) <= self.room:
            return []
        victims = self._policy.evict(now, 1, protected)
        if victims is None:
            self._policy.remove(np.array([slot]))
            victims = np.array([slot])
        gone: list[int] = victims.tolist()
        self.held.difference_update(gone)
        self.left += len(gone)
        return gone

    def fill(self, chunks: Iterable[Sequence[int]]) -> None:
        """What lies here at the beginning, written chunk by chunk; it must fit."""
        for chunk in chunks:
            slots = np.array(chunk, np.int64)
            self._policy.insert(self._time(0.0), slots, np.full(len(slots), -1))
            self.held.update(chunk)
        assert len(self.held) <= self.room

    def _time(self, now_ns: float) -> int:
        # A nanosecond apart, so that blocks of one step have an order among themselves.
        self._clock = max(self._clock + 1, int(now_ns))
        return self._clock
