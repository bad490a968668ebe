"""128-bit ids -> slots as a dict, over the compiled table that a ledger's records lie in."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tests.inside import (
    HALF,
    KEY,
    NOTHING,
    SLOT_LIMIT,
    Array,
    ConfigError,
    Ids,
    as_ids,
    buckets_for,
    cut,
    factors,
    find,
    kernel,
    put,
    rehash,
)


@kernel
def find_all(keys: Array, buckets: Array, mix: Array, ids: Array, space: int, out: Array) -> None:
    """Slots of many ids."""
    for i in range(len(ids)):
        out[i] = find(keys, buckets, mix, ids[i, 0], ids[i, 1], space)


@kernel
def put_all(keys: Array, buckets: Array, mix: Array, ids: Array, space: int, slots: Array) -> int:
    """Enters ids under slots; returns the place of the first that cannot be, or the number."""
    for i in range(len(ids)):
        lo, hi, s = ids[i, 0], ids[i, 1], slots[i]
        if s < 0 or s >= len(keys) or keys[s].space >= 0:
            return i
        if find(keys, buckets, mix, lo, hi, space) >= 0:
            return i
        put(keys, buckets, mix, s, lo, hi, space)
    return len(ids)


@kernel
def cut_all(keys: Array, buckets: Array, mix: Array, slots: Array) -> int:
    """Takes out the entries of slots; returns how many had one."""
    count = 0
    for s in slots:
        if 0 <= s < len(keys) and keys[s].space >= 0:
            cut(keys, buckets, mix, s)
            count += 1
    return count


@kernel
def longest_probe(buckets: Array) -> int:
    """How far the worst entry lies from its home."""
    mask = np.uint64(len(buckets) - 1)
    worst = 0
    for i in range(len(buckets)):
        if buckets[i] != NOTHING:
            away = (np.uint64(i) - (buckets[i] >> HALF)) & mask
            worst = max(worst, int(away))
    return worst


class IdTable:
    """128-bit ids -> slots, in batches.

    Args:
        capacity: Slots are numbers below it; `grow` raises it.
        seed: Of the hash.
    """

    def __init__(self, capacity: int = 64, seed: int = 0) -> None:
        self._mix = factors(seed)
        self._keys = np.zeros(0, KEY)
        self._buckets = buckets_for(1)
        self._count = 0
        self.grow(capacity)

    def find(self, ids: Ids, space: int = 0) -> NDArray[np.int64]:
        """Slots of ids u64 [n, 2]; -1 where there is none."""
        out = np.empty(len(ids), np.int64)
        find_all(self._keys, self._buckets, self._mix, as_ids(ids), space, out)
        return out

    def insert(self, ids: Ids, slots: NDArray[np.int64], space: int = 0) -> None:
        """Enters ids u64 [n, 2] under slots.

        Raises:
            ConfigError: If a slot is out of range or has an entry, or an id has one; those before
                it are entered.
        """
        done = put_all(self._keys, self._buckets, self._mix, as_ids(ids), space, slots)
        self._count += done
        if done < len(ids):
            raise ConfigError(
                f"entry {done} cannot be made: its id or its slot {slots[done]} has one already, "
                f"or the slot is not in 0..{len(self._keys) - 1}",
                "Remove the slot's entry first, or grow the table",
            )

    def remove(self, slots: NDArray[np.int64]) -> None:
        """Takes out what is entered under slots; those without entry are ignored."""
        self._count -= cut_all(self._keys, self._buckets, self._mix, slots)

    def grow(self, capacity: int) -> None:
        """Makes room for slots below `capacity`.

        Raises:
            ConfigError: If that is more than slots can number.
        """
        if capacity > SLOT_LIMIT:
            raise ConfigError(
                f"a table of {capacity} slots is too large", f"Use at most {SLOT_LIMIT}"
            )
        old = len(self._keys)
        if capacity > old:
            keys = np.zeros(capacity, KEY)
            keys[:old] = self._keys
            keys["space"][old:] = -1
            buckets = buckets_for(capacity)
            rehash(self._buckets, buckets)
            self._keys, self._buckets = keys, buckets

    @property
    def longest_probe(self) -> int:
        """Buckets between the worst entry and its home."""
        return int(longest_probe(self._buckets))

    def __len__(self) -> int:
        return self._count
