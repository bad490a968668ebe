"""An open-addressing table from 128-bit ids to small integers.

A bucket is one word: 32 bits of the hash, and the slot + 1; the id itself lies in the slot's record
and is compared in full, so that a look-up costs about two cache misses and never errs. Collisions
go to the next bucket; removal moves later entries back, so that no tombstones gather. The hash is
vector multiply-shift (Dietzfelbinger, "Universal hashing and k-wise independent random variables
via integer arithmetic without primes", STACS 1996) with seeded factors: whoever chooses ids without
knowing the seed finds no two that collide more often than by chance. Which bucket an entry has is
never seen from outside, so a secret seed changes no decision.

Each id belongs to a *space* (a 31-bit number): equal ids of two spaces are two entries.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flowkv.core.errors import ConfigError
from flowkv.policy.order.compiled import SLOT_LIMIT, Array, inner, kernel

Ids = NDArray[np.uint64]

KEY = np.dtype([("lo", np.uint64), ("hi", np.uint64), ("space", np.int32)])
"""What a record needs at least. `space` is -1 while its slot has no entry."""

FACTORS = 6
LOW_32 = np.uint64(0xFFFF_FFFF)
HALF = np.uint64(32)
NOTHING = np.uint64(0)
ONE = np.uint64(1)


def factors(seed: int) -> NDArray[np.uint64]:
    """The multipliers of a hash: 64-bit numbers drawn by SplitMix64."""
    drawn = []
    for i in range(1, FACTORS + 1):
        x = (seed + i * 0x9E37_79B9_7F4A_7C15) & (1 << 64) - 1
        x = (x ^ x >> 30) * 0xBF58_476D_1CE4_E5B9 & (1 << 64) - 1
        x = (x ^ x >> 27) * 0x94D0_49BB_1331_11EB & (1 << 64) - 1
        drawn.append(x ^ x >> 31)
    return np.array(drawn, np.uint64)


# ---- compiled


@inner
def tag_of(mix: Array, lo: int, hi: int, space: int) -> int:
    """32 bits of hash; the lowest of them say which bucket is its home."""
    a, b = np.uint64(lo), np.uint64(hi)
    x = mix[0] + mix[1] * (a & LOW_32) + mix[2] * (a >> HALF)
    x += mix[3] * (b & LOW_32) + mix[4] * (b >> HALF) + mix[5] * np.uint64(space)
    tag: int = x >> HALF
    return tag


@inner
def find(keys: Array, buckets: Array, mix: Array, lo: int, hi: int, space: int) -> int:
    """The slot of an id, or -1."""
    mask = np.uint64(len(buckets) - 1)
    tag = tag_of(mix, lo, hi, space)
    i = tag & mask
    while buckets[i] != NOTHING:
        entry = buckets[i]
        if entry >> HALF == tag:
            s = np.int64(entry & LOW_32) - 1
            if keys[s].lo == lo and keys[s].hi == hi and keys[s].space == space:
                return int(s)
        i = (i + ONE) & mask
    return -1


@inner
def place(buckets: Array, entry: int) -> None:
    """Puts an entry into the first empty bucket from its home on."""
    mask = np.uint64(len(buckets) - 1)
    i = (entry >> HALF) & mask
    while buckets[i] != NOTHING:
        i = (i + ONE) & mask
    buckets[i] = entry


@inner
def put(keys: Array, buckets: Array, mix: Array, s: int, lo: int, hi: int, space: int) -> None:
    """Slot `s`, which has no entry, takes an id that has none."""
    keys[s].lo, keys[s].hi, keys[s].space = lo, hi, space
    place(buckets, tag_of(mix, lo, hi, space) << HALF | np.uint64(s + 1))


@inner
def cut(keys: Array, buckets: Array, mix: Array, s: int) -> None:
    """Takes out the entry of a slot, and moves those back that it had pushed away."""
    mask = np.uint64(len(buckets) - 1)
    tag = tag_of(mix, keys[s].lo, keys[s].hi, keys[s].space)
    keys[s].space = -1
    i = tag & mask
    while np.int64(buckets[i] & LOW_32) != s + 1:
        i = (i + ONE) & mask
    j = i
    while True:
        j = (j + ONE) & mask
        if buckets[j] == NOTHING:
            break
        home = (buckets[j] >> HALF) & mask
        if (j - home) & mask >= (j - i) & mask:  # its home is not after the hole
            buckets[i] = buckets[j]
            i = j
    buckets[i] = NOTHING


@kernel
def rehash(buckets: Array, wider: Array) -> None:
    """Enters everything into a table of another size."""
    for entry in buckets:
        if entry != NOTHING:
            place(wider, entry)


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
def enter_all(keys: Array, buckets: Array, mix: Array, n: int) -> bool:
    """Enters the ids that the first `n` records hold already; False if two are equal."""
    for s in range(n):
        lo, hi, space = keys[s].lo, keys[s].hi, keys[s].space
        if space >= 0:
            if find(keys, buckets, mix, lo, hi, space) >= 0:
                return False
            put(keys, buckets, mix, s, lo, hi, space)
    return True


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


# ---- for Python


def buckets_for(capacity: int) -> NDArray[np.uint64]:
    """An empty table that is at most half full with `capacity` entries."""
    return np.zeros(max(16, 1 << (2 * capacity - 1).bit_length()), np.uint64)


class Table:
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


def as_ids(ids: Ids) -> Ids:
    """Ids as compiled code takes them.

    Raises:
        ConfigError: If they are no u64 [n, 2].
    """
    if type(ids) is np.ndarray and ids.ndim == 2 and ids.shape[1] == 2 and ids.dtype == np.uint64:
        return ids if ids.flags.c_contiguous else np.ascontiguousarray(ids)
    raise ConfigError(
        f"ids must be an array u64 [n, 2], not {np.asarray(ids).dtype} {np.shape(ids)}",
        "Use np.frombuffer(digests, np.uint64).reshape(-1, 2), 16 bytes of digest a block",
    )
