"""Eviction policy over keys (`KeyedPolicy`), for drivers of a place that decides its own content.

A `Ledger` decides the content of places. In an engine's cache, or in a tier with vanishing frames,
that is decided elsewhere: here keys become slots, departed blocks stay known as ghosts for a while,
and a policy without pins is passed the blocks that it must not evict. Pure, as policies are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np

from flowkv.policy.base import NO_VISIT, Policy, Slots, Visit
from flowkv.policy.tenants import Tenants

LEAST_GHOSTS = 1 << 10
GHOSTS_PER_RESIDENT = 4


class KeyedPolicy:
    """Content of one place, by key, and its order of eviction. Not thread-safe.

    Args:
        policy: A fresh policy, not shared.

    Attributes:
        policy: The same, for queries.
        used_bytes: Bytes of the blocks in the place.
        largest_bytes: Bytes of the largest block so far.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.used_bytes, self.largest_bytes = 0, 1
        kind = type(policy)
        self._policy_pins = kind.pin is not Policy.pin and kind.unpin is not Policy.unpin
        self._slots: dict[bytes, int] = {}  # slots of residents and of ghosts
        self._keys: dict[int, bytes] = {}
        self._here: dict[bytes, int] = {}  # bytes of each resident
        self._ghosts: dict[bytes, None] = {}  # the oldest first
        self._pins: Counter[bytes] = Counter()
        self._free: list[int] = []

    def __contains__(self, key: bytes) -> bool:
        return key in self._here

    def __len__(self) -> int:
        return len(self._here)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._here)

    def insert(
        self,
        now_ns: int,
        keys: Sequence[bytes],
        parents: Sequence[bytes],
        *,
        n_bytes: int = 1,
        **said: Any,
    ) -> None:
        """Insert blocks, root to leaf.

        Args:
            now_ns: Time.
            keys: Keys of the blocks; one that is resident is accessed.
            parents: The key of each block's parent; an unknown one counts as none.
            n_bytes: Bytes of each.
            **said: Further arguments of `Policy.insert`.
        """
        slots = [self._slot(key) for key in keys]
        above = [self._slots.get(parent, -1) for parent in parents]
        for key in keys:
            if key not in self._here:
                self._here[key] = n_bytes
                self.used_bytes += n_bytes
                self._ghosts.pop(key, None)
        self.largest_bytes = max(self.largest_bytes, n_bytes)
        self.policy.insert(now_ns, _array(slots), _array(above), n_bytes=n_bytes, **said)
        self._lay_ghosts()

    def access(self, now_ns: int, keys: Iterable[bytes], visit: Visit = NO_VISIT) -> None:
        """Record a request's use of blocks, root to leaf; absent ones become ghosts."""
        asked = list(keys)
        for key in asked:
            if key not in self._slots:
                self._slot(key)
                self._ghosts[key] = None
        if asked:
            self.policy.access(now_ns, self._known(asked), visit)
            self._lay_ghosts()

    def remove(self, keys: Iterable[bytes]) -> None:
        """Remove blocks that left for another reason than `evict`; absent ones are skipped."""
        gone = [key for key in dict.fromkeys(keys) if key in self._here]
        self.policy.remove(self._known(gone))
        self._left(gone)

    def pin(self, keys: Collection[bytes]) -> None:
        """Pin known blocks until as many `unpin`; nests."""
        self._pins.update(keys)
        if self._policy_pins:
            self.policy.pin(self._known(keys))

    def unpin(self, keys: Collection[bytes]) -> None:
        """End one `pin` of each block."""
        for key in keys:
            if self._pins[key] > 1:
                self._pins[key] -= 1
            else:
                self._pins.pop(key, None)
        if self._policy_pins:
            self.policy.unpin(self._known(keys))

    def evict(self, now_ns: int, n: int, protected: Iterable[bytes] = ()) -> list[bytes] | None:
        """Evict `n` blocks, none of them pinned or protected; do nothing if there are fewer.

        Leaves go first; an evictable block above a pinned one may be evicted all the same.

        Returns:
            The keys of the evicted blocks, or None.
        """
        victims = self.policy.evict(now_ns, n, self._guarded(protected))
        if victims is not None:
            return self._gave_up(victims)
        if isinstance(self.policy, Tenants):  # reserves of other tenants
            return None
        kept = set(protected)
        free = [key for key in self._here if key not in kept and not self._pins[key]]
        if len(free) < n:
            return None
        worth = self.policy.priority
        gone = sorted(free, key=lambda key: worth(self._slots[key]))[:n]
        self.remove(gone)
        return gone

    def shed(self, now_ns: int) -> list[bytes]:
        """Evict expired blocks, and those above the limits of tenants."""
        expired = [self._keys[slot] for slot in self.policy.expired(now_ns).tolist()]
        gone = [key for key in expired if not self._pins[key]]
        self.remove(gone)
        if isinstance(self.policy, Tenants):
            gone += self._gave_up(self.policy.shed(now_ns, self._guarded(())))
        return gone

    def clear(self) -> None:
        """Remove all blocks of the place."""
        self.remove(list(self._here))

    def _slot(self, key: bytes) -> int:
        slot = self._slots.get(key)
        if slot is None:
            slot = self._free.pop() if self._free else len(self._slots)
            self._slots[key], self._keys[slot] = slot, key
        return slot

    def _known(self, keys: Iterable[bytes]) -> Slots:
        return _array([self._slots[key] for key in keys if key in self._slots])

    def _guarded(self, protected: Iterable[bytes]) -> set[int]:
        guarded = protected if self._policy_pins else chain(protected, self._pins)
        return {self._slots[key] for key in guarded if key in self._slots}

    def _gave_up(self, victims: Slots) -> list[bytes]:
        gone = [self._keys[slot] for slot in victims.tolist()]
        self._left(gone)
        return gone

    def _left(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.used_bytes -= self._here.pop(key)
            self._ghosts[key] = None
        self._lay_ghosts()

    def _lay_ghosts(self) -> None:
        """Forget the oldest ghosts, if there are too many; pinned ones stay."""
        excess = len(self._ghosts) - max(LEAST_GHOSTS, GHOSTS_PER_RESIDENT * len(self._here))
        if excess <= 0:
            return
        laid = [key for key in self._ghosts if not self._pins[key]][:excess]
        self.policy.forget(self._known(laid))
        for key in laid:
            del self._ghosts[key]
            slot = self._slots.pop(key)
            del self._keys[slot]
            self._free.append(slot)


def _array(slots: list[int]) -> Slots:
    return np.array(slots, np.int64)
