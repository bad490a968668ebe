"""For what is used in a circle, such as weights: keeps some of it and streams the rest."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from flowkv.policy.base import NO_VISIT, Slots, Visit
from flowkv.policy.config import CyclicConfig, configure
from flowkv.policy.order.compiled import (
    CLASS_SHIFT,
    COUNT,
    FIRST_CLASS,
    FIXED,
    FIXED_CLASS,
    HELD_FAST,
    LEAVES,
    LISTS,
    SLOT_MASK,
    Array,
    delist,
    enlist,
    inner,
    kernel,
    reorder,
)
from flowkv.policy.order.leaf import LeafOrder, as_slots

# Is the traffic a circle? What least-recently-used would find, against a set that stays.
#
# Both are kept beside the cache, without data, for the slots that are known: `RECENT` blocks are
# in a ring, newest first, as many as fit; `STAYS` marks a set that fills up and then changes no
# more.

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


class Cyclic(LeafOrder):
    """Least recently used, until the traffic is a circle; then some blocks stay and others stream.

    When N blocks are used in a circle and C fit, LRU gives up each just before its next use, and
    hits nothing. Here C - `streaming` blocks stay for good and the others go through what is left,
    the longest unused first: a share (C - streaming) / N is found, of C / N at best, and which are
    missing is known a round ahead, so that they can be fetched in time.

    That the traffic is a circle is found by keeping count, beside the cache, of what LRU would have
    found and what a set would have that stays. A round of as many uses as there are known blocks
    decides: with a tenth more, the set wins; it is given up in the first round that LRU wins. How
    many blocks fit is the largest number that an eviction has left. What stays is chosen when an
    eviction leaves more than `streaming` blocks that do not: the longest unused of these.

    The optimum for a circle is to give up what was used last (Belady, IBM Systems Journal 1966);
    weight offloading runtimes keep the first k layers (Sheng et al., FlexGen, arXiv 2303.06865).

    Args:
        **options: Fields of `CyclicConfig`.

    Raises:
        ConfigError: If an option is unknown or out of range.
    """

    name = "cyclic"
    config: CyclicConfig

    def __init__(self, **options: object) -> None:
        self.config = configure(CyclicConfig, self.name, options)
        super().__init__(leases=self.config)
        self.cycle = self.config.cycle is True
        self._size = 0  # blocks that fit
        self._shadow = np.zeros(0, SHADOW)
        self._counts = np.zeros(COUNTS, np.int64)

    def access(self, now_ns: int, slots: Slots, visit: Visit = NO_VISIT) -> None:
        """A request uses these known blocks, root to leaf.

        Ghosts count: that they come back tells of a circle.
        """
        slots = as_slots(slots)
        super().access(now_ns, slots, visit)
        if self.config.cycle is not None or self._size == 0:
            return
        if len(self._shadow) < len(self._arrays[0]):
            grown = np.zeros(len(self._arrays[0]), SHADOW)
            grown[: len(self._shadow)] = self._shadow
            self._shadow = grown
        verdict = watch(self._shadow, self._counts, slots, self._size, self.config.streaming)
        if verdict != 0:
            self.cycle = verdict > 0
            if not self.cycle:
                loosen(*self._arrays, self._state)

    def forget(self, slots: Slots) -> None:
        """Nobody knows these blocks any more: their slots may name others next."""
        slots = as_slots(slots)
        super().forget(slots)
        forsake(self._arrays[0], self._shadow, self._counts, slots)

    def evict(self, now_ns: int, n: int, protected: Collection[int] = ()) -> Slots | None:
        """Chooses and removes `n` victims, none pinned or protected; None, nothing changed, else.

        Where the traffic is a circle, it also chooses what stays.
        """
        victims = super().evict(now_ns, n, protected)
        if victims is not None and n > 0:
            self._size = max(self._size, int(self._state[COUNT]))
            spare = int(self._state[COUNT] - self._state[HELD_FAST]) - self.config.streaming
            if self.cycle and spare > 0:
                fix(*self._arrays, self._state, spare)
        return victims
