"""The ledger's table of blocks, and the compiled loops over one request's blocks.

One record per slot; the table of ids finds it, or, along a chain that was used before, the record
of the block before it (`heir`), without hashing. Places are bits of `here`. A block in no place is
a *ghost*: it stays known, in a ring from the youngest to the oldest, until there are too many. A
slot is reused after its block is forgotten: a reference to a parent's or a child's slot is valid
only with its `birth`, or if the id agrees.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flowkv.core.digest import random_words
from flowkv.core.errors import ConfigError
from flowkv.policy.order.compiled import LISTS, Array, delist, enlist, fold, inner, kernel

# Open-addressing table from 128-bit ids to small integers.
#
# A bucket is one word: 32 bits of the hash, and the slot + 1; the id itself is in the slot's record
# and is compared in full, so that a look-up costs about two cache misses and never errs. Collisions
# go to the next bucket; removal moves later entries back, so that no tombstones gather. The hash is
# vector multiply-shift (Dietzfelbinger, "Universal hashing and k-wise independent random variables
# via integer arithmetic without primes", STACS 1996) with seeded factors: ids chosen without the
# seed collide no more often than by chance. The bucket of an entry is never visible outside, so a
# secret seed changes no decision.
#
# Each id belongs to a *space* (a 31-bit number): equal ids of two spaces are two entries.

Ids = NDArray[np.uint64]

KEY = np.dtype([("lo", np.uint64), ("hi", np.uint64), ("space", np.int32)])
"""Fields that every record has. `space` is -1 while its slot has no entry."""

FACTORS = 6
LOW_32 = np.uint64(0xFFFF_FFFF)
HALF = np.uint64(32)
NOTHING = np.uint64(0)
ONE = np.uint64(1)


def factors(seed: int) -> NDArray[np.uint64]:
    """Return the multipliers of a hash: 64-bit numbers drawn by SplitMix64."""
    return random_words(FACTORS, seed)


# ---- compiled


@inner
def tag_of(mix: Array, lo: int, hi: int, space: int) -> int:
    """Return 32 bits of hash; the lowest of them are the home bucket of an entry."""
    a, b = np.uint64(lo), np.uint64(hi)
    x = mix[0] + mix[1] * (a & LOW_32) + mix[2] * (a >> HALF)
    x += mix[3] * (b & LOW_32) + mix[4] * (b >> HALF) + mix[5] * np.uint64(space)
    tag: int = x >> HALF
    return tag


@inner
def find(keys: Array, buckets: Array, mix: Array, lo: int, hi: int, space: int) -> int:
    """Return the slot of an id, or -1."""
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
    """Put an entry into the first empty bucket from its home on."""
    mask = np.uint64(len(buckets) - 1)
    i = (entry >> HALF) & mask
    while buckets[i] != NOTHING:
        i = (i + ONE) & mask
    buckets[i] = entry


@inner
def put(keys: Array, buckets: Array, mix: Array, s: int, lo: int, hi: int, space: int) -> None:
    """Enter a new id for slot `s`, which has no entry."""
    keys[s].lo, keys[s].hi, keys[s].space = lo, hi, space
    place(buckets, tag_of(mix, lo, hi, space) << HALF | np.uint64(s + 1))


@inner
def cut(keys: Array, buckets: Array, mix: Array, s: int) -> None:
    """Remove the entry of a slot, and move back entries that it had pushed away."""
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
    """Enter all entries into a table of another size."""
    for entry in buckets:
        if entry != NOTHING:
            place(wider, entry)


# ---- for Python


def buckets_for(capacity: int) -> NDArray[np.uint64]:
    """Return an empty table that is at most half full with `capacity` entries."""
    return np.zeros(max(16, 1 << (2 * capacity - 1).bit_length()), np.uint64)


def as_ids(ids: Ids) -> Ids:
    """Return ids as compiled code takes them.

    Raises:
        ConfigError: If they are no u64 [n, 2].
    """
    if type(ids) is np.ndarray and ids.ndim == 2 and ids.shape[1] == 2 and ids.dtype == np.uint64:
        return ids if ids.flags.c_contiguous else np.ascontiguousarray(ids)
    raise ConfigError(
        f"ids must be an array u64 [n, 2], not {np.asarray(ids).dtype} {np.shape(ids)}",
        "Use np.frombuffer(digests, np.uint64).reshape(-1, 2), 16 bytes of digest a block",
    )


BLOCK = np.dtype(
    [
        ("lo", np.uint64),  # the id; with `space` as in `KEY`
        ("hi", np.uint64),
        ("bytes", np.int64),  # valid while it is in any place
        ("birth", np.int64),  # a number never used twice
        ("bond", np.int64),  # the parent's birth
        ("space", np.int32),
        ("parent", np.int32),  # a slot or -1; counts only while its birth equals `bond`
        ("heir", np.int32),  # the child used last, or -1; compare the id
        ("pins", np.int32),  # requests under way that use it, and pins by the user
        ("before", np.int32),  # neighbours in the ring of ghosts: the younger, the older
        ("after", np.int32),  # and the next free slot
        ("here", np.uint8),  # bit k: it is in place k, or takes up room there
        ("flight", np.uint8),  # bit k: it is not complete there yet
        ("stale", np.uint8),  # bit k: it expired there while pinned
        ("ghost", np.uint8),  # 1: in the ring
    ]
)
MAX_PLACES = 8
NOWHERE, IN_FLIGHT = -1, -2

# Entries of the state vector, also that of each place from USED and PINNED on. Last comes the front
# of the ring of ghosts, the youngest.
DIGEST, FRESH, FREE, GHOSTS, BIRTHS, RESIDENT, LARGEST = range(7)
USED, PINNED = 8, 16
STATE_SIZE = LISTS + 1


@inner
def parent_of(blocks: Array, s: int) -> int:
    """Return the slot of the known parent, or -1."""
    p = blocks[s].parent
    if p >= 0 and blocks[p].birth == blocks[s].bond and blocks[p].space >= 0:
        return int(p)
    return -1


@inner
def settled(blocks: Array, s: int) -> int:
    """Return the places in which a block can be read, as bits."""
    b = blocks[s]
    return int(np.int64(b.here) & ~np.int64(b.flight) & ~np.int64(b.stale))


@inner
def fastest(places: int) -> int:
    """Return the number of the lowest bit that is set, or -1."""
    for k in range(MAX_PLACES):
        if places >> k & 1:
            return k
    return NOWHERE


# ---- ghosts


@inner
def ghost_insert(blocks: Array, state: Array, s: int) -> None:
    """Make a block the youngest ghost."""
    blocks[s].ghost = 1
    enlist(blocks, state, 0, s)
    state[GHOSTS] += 1


@inner
def ghost_remove(blocks: Array, state: Array, s: int) -> None:
    """Take a block out of the ring of ghosts."""
    delist(blocks, state, 0, s)
    blocks[s].ghost = 0
    state[GHOSTS] -= 1


@inner
def rest(blocks: Array, state: Array, s: int) -> None:
    """Make a block a ghost if it is in no place and has no pins."""
    b = blocks[s]
    if b.here == 0 and b.pins == 0 and b.ghost == 0:
        ghost_insert(blocks, state, s)


@kernel
def lay_ghosts(
    blocks: Array, buckets: Array, mix: Array, state: Array, bound: int, out: Array
) -> int:
    """Forget the oldest ghosts beyond `bound`, as many as `out` takes; return how many."""
    n = 0
    while state[GHOSTS] > bound and n < len(out):
        s = blocks[state[LISTS] - 1].before
        ghost_remove(blocks, state, s)
        cut(blocks, buckets, mix, s)
        blocks[s].after = state[FREE]
        state[FREE] = s
        out[n] = s
        n += 1
    return n


# ---- arrivals and departures


@inner
def arrive(blocks: Array, state: Array, k: int, s: int, size: int, flying: int) -> bool:
    """Give a block room in a place; return whether it was absent or stale there."""
    bit = np.uint8(1 << k)
    b = blocks[s]
    if b.here & bit:
        if not b.stale & bit:
            b.flight &= np.uint8(255) if flying else ~bit  # a completed arrival ends the flight
            return False
        b.stale &= ~bit
        b.flight = b.flight & ~bit | (bit if flying else np.uint8(0))
        return True
    if b.here == 0:
        b.bytes = size
        state[LARGEST] = max(state[LARGEST], size)
        state[RESIDENT] += 1
        if b.ghost:
            ghost_remove(blocks, state, s)
    b.here |= bit
    b.flight |= bit if flying else np.uint8(0)
    state[USED + k] += b.bytes
    if b.pins > 0:
        state[PINNED + k] += b.bytes
    return True


@inner
def depart(blocks: Array, state: Array, k: int, s: int) -> None:
    """Take a block out of a place."""
    bit = np.uint8(1 << k)
    b = blocks[s]
    if not b.here & bit:
        return
    b.here &= ~bit
    b.flight &= ~bit
    b.stale &= ~bit
    state[USED + k] -= b.bytes
    if b.pins > 0:
        state[PINNED + k] -= b.bytes
    if b.here == 0:
        state[RESIDENT] -= 1
        rest(blocks, state, s)


@kernel
def land(blocks: Array, state: Array, slots: Array, terms: tuple[int, int, int], out: Array) -> int:
    """Give blocks room in a place; write the new ones and their parents to `out`.

    Args:
        blocks: Records.
        state: Totals.
        slots: Root to leaf.
        terms: (place, bytes of each, whether they are in flight).
        out: [3, at least the slots]: slots, parents, 1 where it takes up room that it did not.

    Returns:
        How many are new there.
    """
    k, size, flying = terms
    n = 0
    for s in slots:
        used = state[USED + k]
        if arrive(blocks, state, k, s, size, flying):
            out[2, n] = state[USED + k] > used
            out[0, n] = s
            out[1, n] = parent_of(blocks, s)
            n += 1
    return n


# Loops over blocks that arrive, depart, wait, or change their place.


@kernel
def fitting(blocks: Array, slots: Array, k: int, size: int, room: int) -> int:
    """Return how many leading blocks a place has room for; blocks in the place need none."""
    for i in range(len(slots)):
        b = blocks[slots[i]]
        if not b.here >> k & 1:
            room -= b.bytes if b.here else size
            if room < 0:
                return i
    return len(slots)


@kernel
def needed(blocks: Array, slots: Array, k: int, size: int) -> int:
    """Return the bytes that blocks need in a place besides those that they have there."""
    need = 0
    for s in slots:
        if not blocks[s].here >> k & 1:
            need += blocks[s].bytes if blocks[s].here else size
    return need


@kernel
def held(blocks: Array, k: int, slots: Array) -> bool:
    """Return whether all these slots are in a place, none of them twice; accept any numbers."""
    bit = np.uint8(1 << k)
    n = 0
    for s in slots:
        if not 0 <= s < len(blocks) or not blocks[s].here & bit:
            break
        blocks[s].here ^= bit  # so that a second one of this number does not count
        n += 1
    for i in range(n):
        blocks[slots[i]].here ^= bit
    return n == len(slots)


@kernel
def leave(blocks: Array, state: Array, k: int, slots: Array) -> None:
    """Take evicted blocks out of a place, and fold them into the digest of decisions."""
    fold(state, DIGEST, (k << 32) + len(slots))
    for s in slots:
        fold(state, DIGEST, s)
        depart(blocks, state, k, s)


@kernel
def expire(blocks: Array, state: Array, k: int, slots: Array, out: Array) -> int:
    """Remove expired blocks, but mark pinned ones as stale; write the removed, return how many."""
    bit = np.uint8(1 << k)
    n = 0
    for s in slots:
        if not 0 <= s < len(blocks) or not blocks[s].here & bit:
            continue
        if blocks[s].pins > 0:
            blocks[s].stale |= bit
        else:
            fold(state, DIGEST, s)
            depart(blocks, state, k, s)
            out[n] = s
            n += 1
    return n


@kernel
def pin(blocks: Array, state: Array, slots: Array) -> None:
    """Pin blocks once more, so that they stay, and stay known."""
    for s in slots:
        b = blocks[s]
        b.pins += 1
        if b.pins > 1:
            continue
        if b.ghost:
            ghost_remove(blocks, state, s)
        for k in range(MAX_PLACES):
            if b.here >> k & 1:
                state[PINNED + k] += b.bytes


@kernel
def unpin(blocks: Array, state: Array, slots: Array, done: bool, out: Array) -> int:
    """Unpin blocks once; a block with flights or stale copies then leaves those places.

    Args:
        blocks: Records.
        state: Totals.
        slots: Blocks.
        done: Whether the awaited blocks have arrived; else they never will, unless others wait too.
        out: Bit sets of places.

    Returns:
        How many blocks left a place, or several; `out[0]` has them and `out[1]` the places.
    """
    n = 0
    for i in range(len(slots) - 1, -1, -1):
        s = slots[i]
        b = blocks[s]
        b.pins -= 1
        if done:
            b.flight = 0
        if b.pins > 0:
            continue
        for k in range(MAX_PLACES):
            if b.here >> k & 1:
                state[PINNED + k] -= b.bytes
        out[0, n], out[1, n] = s, b.flight | b.stale
        if out[1, n] == 0:
            rest(blocks, state, s)
            continue
        for k in range(MAX_PLACES):
            if out[1, n] >> k & 1:
                depart(blocks, state, k, s)
        n += 1
    return n


@kernel
def chains(blocks: Array, k: int, slots: Array, out: Array) -> None:
    """Write blocks that are not in place `k` as parts of chains, each behind what it continues."""
    bit = np.uint8(1 << k)
    for s in slots:
        blocks[s].stale |= bit  # a mark that no other block without a copy there has
    n = 0
    for s in slots:
        start = n
        while s >= 0 and blocks[s].stale & bit and not blocks[s].here & bit:
            blocks[s].stale &= ~bit
            out[n] = s
            n += 1
            s = parent_of(blocks, s)
        for j in range((n - start) // 2):
            out[start + j], out[n - 1 - j] = out[n - 1 - j], out[start + j]


# From a request's ids to slots.


@inner
def seek(
    blocks: Array, buckets: Array, mix: Array, lo: int, hi: int, where: tuple[int, int]
) -> int:
    """Return the slot of an id, or -1; `where` = (space, slot of the block before it or -1)."""
    space, above = where
    if above >= 0:
        s = int(blocks[above].heir)
        if s >= 0 and blocks[s].lo == lo and blocks[s].hi == hi and blocks[s].space == space:
            return s
    return find(blocks, buckets, mix, lo, hi, space)


@kernel
def run_of(blocks: Array, buckets: Array, mix: Array, ids: Array, space: int, chained: bool) -> int:
    """Return the number of leading blocks that can be read from any place; change nothing."""
    s = np.int64(-1)
    for i in range(len(ids)):
        above = s if chained else np.int64(-1)
        s = seek(blocks, buckets, mix, ids[i, 0], ids[i, 1], (space, above))
        if s < 0 or settled(blocks, s) == 0:
            return i
    return len(ids)


@kernel
def known_of(blocks: Array, buckets: Array, mix: Array, ids: Array, space: int, out: Array) -> int:
    """Write the slots of the leading known blocks, resident or not, to `out`; return how many."""
    for i in range(len(ids)):
        s = find(blocks, buckets, mix, ids[i, 0], ids[i, 1], space)
        if s < 0:
            return i
        out[i] = s
    return len(ids)


@inner
def christen(blocks: Array, buckets: Array, mix: Array, state: Array, lo: int, hi: int) -> int:
    """Allocate a slot for an unknown id, still without space and parent."""
    s = state[FREE]
    if s >= 0:
        state[FREE] = blocks[s].after
    else:
        s = state[FRESH]
        state[FRESH] += 1
    state[BIRTHS] += 1
    b = blocks[s]
    b.birth = state[BIRTHS]
    b.pins, b.heir, b.parent = 0, -1, -1
    b.here, b.flight, b.stale, b.ghost = 0, 0, 0, 0
    return s


@kernel
def follow(
    blocks: Array,
    buckets: Array,
    mix: Array,
    state: Array,
    ids: Array,
    where: tuple[int, bool],
    chain: Array,
    sources: Array,
) -> int:
    """Write the slots of a request's blocks, new ones included, and the fastest place of each.

    `where` = (space, whether each block is the parent of the next). The caller ensures that as many
    slots as ids are free. Return the number of leading blocks that can be read.
    """
    space, chained = where
    above, hits = np.int64(-1), -1
    for i in range(len(ids)):
        lo, hi = ids[i, 0], ids[i, 1]
        s = seek(blocks, buckets, mix, lo, hi, (space, above))
        if s < 0:
            s = christen(blocks, buckets, mix, state, lo, hi)
            put(blocks, buckets, mix, s, lo, hi, space)
            ghost_insert(blocks, state, s)
        if above >= 0:
            blocks[above].heir = s
            if parent_of(blocks, s) < 0 and above != s:
                blocks[s].parent = above
                blocks[s].bond = blocks[above].birth
        places = settled(blocks, s)
        chain[i] = s
        sources[i] = fastest(places) if places else (IN_FLIGHT if blocks[s].here else NOWHERE)
        if places == 0 and hits < 0:
            hits = i
        above = s if chained else np.int64(-1)
    hits = len(ids) if hits < 0 else hits
    fold(state, DIGEST, hits)
    return hits
