"""Is the traffic a circle? What least-recently-used would find, against a set that stays.

Both are kept beside the cache, without data, for the slots that are known: `RECENT` blocks are in a
ring, newest first, as many as fit; `STAYS` marks a set that fills up and then changes no more.
"""

from __future__ import annotations

import numpy as np

from flowkv.policy.order.compiled import SLOT_MASK, Array, inner, kernel
from flowkv.policy.order.ranking import reorder
from flowkv.policy.order.rings import delist, enlist
from flowkv.policy.order.slots import (
    CLASS_SHIFT,
    FIRST_CLASS,
    FIXED,
    FIXED_CLASS,
    HELD_FAST,
    LEAVES,
    LISTS,
)

SHADOW = np.dtype([("before", np.int32), ("after", np.int32), ("marks", np.int32)])
SEEN, RECENT, STAYS = 1, 2, 4
# Entries of the vector of counts, which ends with the front of the ring.
KNOWN, RECENTS, STAYERS, USES, LRU_HITS, SET_HITS = 0, 1, 2, 3, 4, 5
COUNTS = LISTS + 1
LEAST_ROUND = 16


@inner
def unset(shadow: Array, counts: Array) -> None:
    """Begins another set that stays."""
    for s in range(len(shadow)):
        shadow[s].marks &= ~STAYS
    counts[STAYERS] = 0


@inner
def judge(shadow: Array, counts: Array) -> int:
    """After a round: 1 if the set that stays wins, -1 if LRU does, else 0."""
    of_lru, of_set = counts[LRU_HITS], counts[SET_HITS]
    counts[USES] = counts[LRU_HITS] = counts[SET_HITS] = 0
    if 10 * of_set > 11 * of_lru:
        return 1
    if of_lru > of_set or of_set == 0:
        unset(shadow, counts)
    return -1 if of_lru > of_set else 0


@kernel
def watch(shadow: Array, counts: Array, slots: Array, size: int, streaming: int) -> int:
    """Some blocks are used; what `judge` says where that ends a round."""
    verdict = 0
    for s in slots:
        if s < 0 or s >= len(shadow):
            continue
        marks = shadow[s].marks
        if marks & SEEN:
            counts[USES] += 1
            counts[LRU_HITS] += marks & RECENT != 0
            counts[SET_HITS] += marks & STAYS != 0
        else:
            counts[KNOWN] += 1
        if marks & RECENT:
            delist(shadow, counts, 0, s)
            counts[RECENTS] -= 1
        enlist(shadow, counts, 0, s)
        counts[RECENTS] += 1
        if not marks & STAYS and counts[STAYERS] < size - streaming:
            marks |= STAYS
            counts[STAYERS] += 1
        shadow[s].marks = marks | SEEN | RECENT
        while counts[RECENTS] > size:
            oldest = shadow[counts[LISTS] - 1].before
            delist(shadow, counts, 0, oldest)
            counts[RECENTS] -= 1
            shadow[oldest].marks &= ~RECENT
        if counts[USES] >= max(counts[KNOWN], LEAST_ROUND):
            verdict = judge(shadow, counts)
    return verdict


@kernel
def forsake(nodes: Array, shadow: Array, counts: Array, slots: Array) -> None:
    """Slots are forgotten, but for those that are resident."""
    for s in slots:
        if 0 <= s < len(shadow) and nodes[s].birth == 0:
            marks = shadow[s].marks
            counts[KNOWN] -= marks & SEEN != 0
            counts[STAYERS] -= marks & STAYS != 0
            if marks & RECENT:
                delist(shadow, counts, 0, s)
                counts[RECENTS] -= 1
            shadow[s].marks = 0


@kernel
def recall(shadow: Array, counts: Array, recent: Array) -> None:
    """Fills the ring with slots that are marked so, newest first, and counts all marks."""
    counts[LISTS] = counts[KNOWN] = counts[STAYERS] = 0
    counts[RECENTS] = len(recent)
    for i in range(len(recent) - 1, -1, -1):
        enlist(shadow, counts, 0, recent[i])
    for s in range(len(shadow)):
        counts[KNOWN] += shadow[s].marks & SEEN != 0
        counts[STAYERS] += shadow[s].marks & STAYS != 0


@kernel
def fix(nodes: Array, terms: Array, heaps: Array, state: Array, n: int) -> None:
    """Up to `n` leaves stay from now on: those that would go next, but for what should go."""
    for _ in range(n):
        if state[LEAVES] == 0:
            return
        s = heaps[LEAVES, 0, 1] & SLOT_MASK
        if not FIRST_CLASS <= heaps[LEAVES, 0, 0] >> CLASS_SHIFT < FIXED_CLASS:
            return
        nodes[s].marks |= FIXED
        state[HELD_FAST] += 1
        reorder(nodes, terms, heaps, state, s)


@kernel
def loosen(nodes: Array, terms: Array, heaps: Array, state: Array) -> None:
    """Nothing stays for good any more."""
    for s in range(len(nodes)):
        if nodes[s].marks & FIXED:
            nodes[s].marks &= ~FIXED
            reorder(nodes, terms, heaps, state, s)
    state[HELD_FAST] = 0
