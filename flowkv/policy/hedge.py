"""`Hedge`, the default policy: the learned order, unless plain LRU would have hit more."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowkv.policy.base import NEVER_NS, NO_SLOTS, NO_VISIT, Policy, Slots, Visit
from flowkv.policy.hazard.compiled import rekey
from flowkv.policy.hazard.index import HazardIndex
from flowkv.policy.order import compiled
from flowkv.policy.order.compiled import Array, inner, kernel
from flowkv.policy.order.leaf import LeafOrder, as_slots

# Plain LRU is simulated without blocks by a ring of as many slots as fit, newest first, a block
# before those below it. A request moves its blocks to the front, and LRU evicts the last.

RING = np.dtype([("before", np.int32), ("after", np.int32), ("held", np.int32)])

# Entries of the book: blocks in the ring; time and last block of the current request; requested
# blocks so far; hits here less hits in the ring; whether the learned order may decide. The head of
# the ring comes last.
HELD, NOW, LAST, ASKED, SURPLUS, MAY = range(6)
BOOK_SIZE = compiled.LISTS + 1

# The learned order decides unless it has lost more than a stake: so many blocks, and one in so many
# of all. LRU hands back once the traffic has restored part of the stake.
STAKE, SHARE, AGAIN = 40, 1000, 20
EPOCH = 64  # evictions per window of the measured capacity; two windows count

LEARNED, ASIDE = 0, 2
"""Modes of the order: by the learned index; by last use, while the index only learns."""


@inner
def drop(ring: Array, book: Array, s: int) -> None:
    """Take a block out of the ring."""
    compiled.delist(ring, book, 0, s)
    ring[s].held = 0
    book[HELD] -= 1


@kernel
def ask(nodes: Array, ring: Array, book: Array, slots: Array, now: int, room: int) -> bool:
    """Move a request's known blocks, root to leaf, to the front of the ring.

    Blocks that LRU or the place holds become the newest. Blocks beyond `room` (how many fit; 0 if
    unknown) leave the ring before.

    Returns:
        Whether the learned order may decide from now on.
    """
    while book[HELD] > room > 0:
        drop(ring, book, ring[book[compiled.LISTS] - 1].before)
    book[NOW], book[LAST] = now, -1
    for i in range(len(slots) - 1, -1, -1):  # the first block ends up newest
        s = slots[i]
        if s < 0 or s >= len(ring):
            continue
        here, held = nodes[s].birth != 0, ring[s].held != 0
        book[SURPLUS] += int(here) - int(held)
        if held:
            drop(ring, book, s)
        if held or here:
            compiled.enlist(ring, book, 0, s)
            ring[s].held = 1
            book[HELD] += 1
            if book[LAST] < 0:
                book[LAST] = s
    book[ASKED] += len(slots)
    left = book[SURPLUS] + STAKE + book[ASKED] // SHARE
    if left < 0 or left >= AGAIN:
        book[MAY] = left >= 0
    return bool(book[MAY])


@kernel
def bring(ring: Array, book: Array, slots: Array, parents: Array, now: int) -> None:
    """Put blocks that became resident into the ring, root to leaf, each behind its parent."""
    above = book[LAST] if book[NOW] == now else -1
    for i in range(len(slots)):
        s, p = slots[i], parents[i]
        if 0 <= p < len(ring) and ring[p].held:
            above = p
        if not ring[s].held:
            if above >= 0 and ring[above].held:
                compiled.enlist_behind(ring, s, above)
            else:
                compiled.enlist(ring, book, 0, s)
            ring[s].held = 1
            book[HELD] += 1
        above = s


@kernel
def lose(ring: Array, book: Array, slots: Array) -> None:
    """Take blocks out of the ring that left for another reason than eviction."""
    for s in slots:
        if 0 <= s < len(ring) and ring[s].held:
            drop(ring, book, s)


@kernel
def follow(order: tuple[Array, ...], learner: tuple[Array, ...], mode: int) -> None:
    """Switch the order to another mode, and sort every leaf by its new key."""
    nodes, heaps, state = order
    state[compiled.MODE] = mode
    state[compiled.TAU] = mode == LEARNED  # 1 ns keeps a key, 0 is the last use
    compiled.fold(state, compiled.DIGEST, mode)
    for s in range(len(nodes)):
        if mode != LEARNED:
            if nodes[s].marks & compiled.KNOWN:
                nodes[s].key = nodes[s].last
                compiled.reorder(nodes, heaps, state, s)
            continue
        if nodes[s].marks & compiled.ETA:
            nodes[s].marks &= ~compiled.ETA  # the index has the hints too
            compiled.reorder(nodes, heaps, state, s)
            compiled.attend(nodes, heaps, state, s)
        if nodes[s].birth != 0 and nodes[s].kids == 0:
            rekey(order, learner, s, state[compiled.CLOCK])


class Hedge(HazardIndex):
    """Learned index (`HazardIndex`), replaced by plain LRU while LRU would have hit more.

    The hits of leaf-first LRU are known exactly, but for leases and pins: a ring of as many block
    numbers as fit follows the same traffic. The learned order decides from the beginning, and may
    lose 40 blocks and a thousandth of all requested blocks against LRU, beside its gains. Then LRU
    decides, which loses nothing, until the traffic has earned half of a stake again. The index
    learns in both modes.

    One order holds the blocks in both modes; a switch sorts the same leaves by another key. So
    pins, leases, ranks, tenants and queued requests persist. Both modes obey hints of a time, the
    learned one with more use. Chains are offered to a prefetch only while the learned index
    decides.

    Memory: as `HazardIndex` and 12 bytes per slot.

    Args:
        **options: Fields of `HazardConfig`.

    Raises:
        ConfigError: If an option is unknown or out of range.
    """

    name = "auto"

    def __init__(self, **options: object) -> None:
        self._ring = np.zeros(0, RING)
        self._book = np.zeros(BOOK_SIZE, np.int64)
        self._book[LAST], self._book[MAY] = -1, 1
        self._left = [0, 0]  # most blocks left after an eviction: this window, and the one before
        self._evictions = 0
        super().__init__(**options)

    # ---- what happens

    def insert(self, now_ns: int, slots: Slots, parents: Slots, **said: Any) -> None:
        """Add blocks that became resident, root to leaf; `parents[i]` is a slot or -1."""
        slots, parents = as_slots(slots), as_slots(parents)
        super().insert(now_ns, slots, parents, **said)
        bring(self._ring, self._book, slots, parents, now_ns)

    def access(self, now_ns: int, slots: Slots, visit: Visit = NO_VISIT) -> None:
        """Record that a request uses these known blocks, root to leaf.

        The index learns from known blocks that are not resident as well.
        """
        slots = as_slots(slots)
        super().access(now_ns, slots, visit)
        self._book[ASKED] += max(visit.blocks - len(slots), 0)
        told = self._order[0], self._ring, self._book, slots, now_ns, max(self._left)
        if ask(*told) != self._learned:
            self._turn(not self._learned)

    def remove(self, slots: Slots) -> None:
        """Remove blocks that left for another reason than `evict`."""
        slots = as_slots(slots)
        super().remove(slots)
        lose(self._ring, self._book, slots)

    def forget(self, slots: Slots) -> None:
        """Forget slots that are not resident; the numbers may be reused for other blocks."""
        slots = as_slots(slots)
        super().forget(slots)
        lose(self._ring, self._book, slots)

    def hint(self, now_ns: int, slots: Slots, eta_ns: int, sigma: float = 0.5) -> None:
        """Record that the application expects the next use of this chain in about `eta_ns`.

        The learned index records the hint in both modes.
        """
        super().hint(now_ns, slots, eta_ns, sigma)
        if not self._learned and eta_ns < NEVER_NS:
            LeafOrder.hint(self, now_ns, slots, eta_ns, sigma)

    # ---- what is decided

    def evict(self, now_ns: int, n: int, protected: Collection[int] = ()) -> Slots | None:
        """Remove and return `n` victims, none pinned or protected; None if there are fewer."""
        victims = super().evict(now_ns, n, protected)
        if victims is not None and len(victims):
            self._measure()
        return victims

    def displace(self, now_ns: int, n: int, rate: float, protected: Collection[int] = ()) -> Slots:
        """Evict up to `n` victims for a prefetch: only blocks worth less than those it brings.

        While LRU decides, only for a certain use.
        """
        if not self._learned:
            return Policy.displace(self, now_ns, n, rate, protected)
        victims = super().displace(now_ns, n, rate, protected)
        if len(victims):
            self._measure()
        return victims

    def wanted(self, now_ns: int, n: int) -> tuple[Slots, NDArray[np.float64]]:
        """Return up to `n` ends of non-resident chains that are worth prefetching, best first.

        While LRU decides, there are none.
        """
        if not self._learned:
            return NO_SLOTS.copy(), np.empty(0)
        return super().wanted(now_ns, n)

    def _worth(self, slot: int) -> float:
        """Return the worth by the order that decides: an index in 1/s, or a static key in ns."""
        return super()._worth(slot) if self._learned else LeafOrder._worth(self, slot)

    def seldom(self) -> list[Callable[[], object]]:
        """Return calls that compile code which traffic reaches late; they spoil the policy."""
        one = as_slots([0])
        return [
            partial(self._turn, False),
            partial(self.priority, 0),
            partial(self.hint, 30, one, 1),
        ]

    @property
    def chosen(self) -> str:
        """Name of the rule that decides at present: "lru" or "hazard"."""
        return "hazard" if self._learned else "lru"

    @property
    def surplus(self) -> int:
        """Hits so far, less those that plain LRU would have had, in blocks."""
        return int(self._book[SURPLUS])

    # ---- parts

    @property
    def _learned(self) -> bool:
        """Whether the learned index decides."""
        return bool(self._state[compiled.MODE] == LEARNED)

    def _turn(self, learned: bool) -> None:
        """Let the learned index decide, or LRU."""
        follow(self._order, self._learner, LEARNED if learned else ASIDE)

    def _measure(self) -> None:
        """Estimate how many blocks fit from the number left after an eviction.

        Drivers make room before an insert or after it: the most blocks left after any of the last
        evictions is the capacity, but for the smallest insert.
        """
        self._evictions += 1
        if self._evictions % EPOCH == 0:
            self._left = [0, self._left[0]]
        self._left[0] = max(self._left[0], int(self._state[compiled.COUNT]), 1)

    def _grow(self, room: int) -> None:
        super()._grow(room)
        more = len(self._order[0]) - len(self._ring)
        self._ring = np.append(self._ring, np.zeros(more, RING))
