"""What the compiled order keeps about a slot: two records, and what a leaf is sorted by.

`NODE` is one cache line, for what every call reads; `TERMS` is another, for what few do. Residence
is told by `birth`, a number never used twice; a child remembers its parent's (`bond`), so that the
removal of a parent makes roots of its children without visiting them. What outlives residence
until `forget`: the key, hints, pins, being queued.
"""

from __future__ import annotations

import numpy as np

from flowkv.policy.order.compiled import SLOT_BITS, SLOT_MASK, Array, inner, kernel

NODE = np.dtype(
    [
        ("birth", np.int64),  # 0: not resident
        ("bond", np.int64),  # birth of the parent when linked
        ("key", np.int64),  # the static key; smaller goes earlier
        ("last", np.int64),  # time of the last counted access
        ("parent", np.int32),  # a slot or -1; counts only while its birth equals `bond`
        ("kids", np.int32),  # resident children
        ("live", np.int32),  # resident children not expired; -1: expired itself
        ("depth", np.int32),
        ("place", np.int32),  # index in its heap of leaves, or -1
        ("held", np.int32),  # reasons not to go: pinned (1), and each child that may not go
        ("row", np.int32),  # which heap of leaves
        ("marks", np.int32),  # bits below, and the rank above RANK_SHIFT
    ]
)
TERMS = np.dtype(
    [
        ("lease", np.int64),  # after the last access, NEVER for none
        ("limit", np.int64),  # when it expires whatever is accessed
        ("eta", np.int64),  # time of the next use, by a hint
        ("fall", np.int64),  # when its rank falls back
        ("extra", np.int64),  # added to the key: tau * log2(worth)
        ("before", np.int32),  # neighbours in its tenant's list, a ring
        ("after", np.int32),
        ("tenant", np.int32),
        ("pins", np.int32),
        ("queued", np.int32),  # queued requests that will use it
        ("due", np.int32),  # index in the heap of what happens by itself, or -1
    ]
)

KNOWN, LEASED, RANKED, ETA, DEAD, QUEUED, EXTRA, BRANCHED = (1 << i for i in range(8))
TWICE, GHOST, FIXED = (1 << i for i in range(8, 11))
RANK_SHIFT = 16
TIMED = LEASED | RANKED | ETA  # may be in the heap of what happens by itself
LASTING = KNOWN | ETA | DEAD | QUEUED | BRANCHED | TWICE | GHOST  # outlives residence

NEVER = np.iinfo(np.int64).max
CLOCK_LIMIT = 1 << 61  # nanoseconds either way; `time.time_ns` stays below it until 2043
LATEST = (1 << 62) - 1  # keys lie between this and its negative

# Entries of the state vector. First the sizes of the heaps; last the heads of lists of slots.
LEAVES, SECOND, HINTED, DUES = 0, 1, 2, 3
HEAPS = 4
COUNT, BLOCKED, EXPIRED, BIRTHS, CLOCK, TAU, DIGEST, STALE, MODE = 4, 5, 6, 7, 8, 9, 10, 11, 12
# ARC: blocks used once, its target, how many blocks fit, and (1, 2 more) ghosts of either list.
ONCE, TARGET, SIZE, GHOSTS = 13, 14, 15, 16
HELD_FAST = 19  # blocks with the mark FIXED
LISTS = 24
RUN_OUT, TENANTS = 0, 4  # lists: the expired, 1 and 2 for ARC's ghosts, the live of each tenant

STATIC, ARC = 0, 1  # modes

DEFAULT_RANK = 35
EXPIRED_CLASS, DEAD_CLASS, FIRST_CLASS, QUEUED_CLASS = 0, 1, 2, 127
FIXED_CLASS = 103  # above every rank
CLASS_SHIFT = 56
LOW_KEY_BITS = 7
KEY_BIAS = 1 << 55
CLASS_WORTH = 2.0**64


@inner
def class_of(nodes: Array, s: int) -> int:
    """0..127; lower classes go before any higher one."""
    marks = nodes[s].marks
    if nodes[s].live < 0:
        return EXPIRED_CLASS
    if marks & QUEUED:
        return QUEUED_CLASS
    if marks & DEAD:
        return DEAD_CLASS
    if marks & FIXED:
        return FIXED_CLASS
    return FIRST_CLASS + (marks >> RANK_SHIFT)


@inner
def words(nodes: Array, terms: Array, s: int, row: int) -> tuple[int, int]:
    """What a leaf is sorted by: class, key, the deeper first, the smaller slot first."""
    key = nodes[s].key
    if nodes[s].marks & EXTRA:
        key += terms[s].extra
    if nodes[s].marks & ETA:
        key = -terms[s].eta if row == HINTED else max(key, terms[s].eta)
    high = (class_of(nodes, s) << CLASS_SHIFT) + (key >> LOW_KEY_BITS) + KEY_BIAS
    low = (key & 127) << 2 * SLOT_BITS | (SLOT_MASK - nodes[s].depth) << SLOT_BITS | s
    return high, low


@inner
def key_in(high: int, low: int) -> int:
    """The key that an entry is sorted by."""
    key = ((high & ((1 << CLASS_SHIFT) - 1)) - KEY_BIAS) << LOW_KEY_BITS
    return key | low >> 2 * SLOT_BITS


@inner
def parent_of(nodes: Array, s: int) -> int:
    """The resident parent of a slot, or -1."""
    p = nodes[s].parent
    if p >= 0 and nodes[p].birth == nodes[s].bond:
        return int(p)
    return -1


@inner
def own_due(nodes: Array, terms: Array, s: int) -> int:
    """When its own lease runs out."""
    lease = terms[s].lease
    return terms[s].limit if lease == NEVER else min(nodes[s].last + lease, terms[s].limit)


@kernel
def worth(nodes: Array, terms: Array, state: Array, s: int) -> float:
    """The key that a slot is sorted by, rounded; whole classes apart lie further than any key."""
    key = nodes[s].key
    marks = nodes[s].marks
    if marks & EXTRA:
        key += terms[s].extra
    here = class_of(nodes, s)
    if FIRST_CLASS <= here < QUEUED_CLASS and marks & RANKED and terms[s].fall <= state[CLOCK]:
        here = FIRST_CLASS + DEFAULT_RANK  # noted only once it may go
    ahead = False
    if marks & ETA:
        eta = terms[s].eta
        ahead = eta > state[CLOCK] and FIRST_CLASS <= here < QUEUED_CLASS
        key = 2 * state[CLOCK] - eta if ahead else max(key, eta)
    late = 0.0
    if (
        not ahead and state[MODE] == ARC and state[LEAVES] > 0 and state[SECOND] > 0
    ):  # the other list goes first
        late = CLASS_WORTH / 2 * ((marks & TWICE != 0) == (state[ONCE] >= state[TARGET]))
    return (here - FIRST_CLASS - DEFAULT_RANK) * CLASS_WORTH + late + key
