"""The shipped default: the learned order, for as long as it costs nothing against recency."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowkv.policy.base import NEVER_NS, NO_SLOTS, NO_VISIT, Policy, Slots, Visit
from flowkv.policy.hazard.compiled import learner_on, rekey
from flowkv.policy.hazard.index import HazardIndex
from flowkv.policy.order.compiled import (
    CLOCK,
    COUNT,
    DIGEST,
    ETA,
    KNOWN,
    LISTS,
    MODE,
    TAU,
    Array,
    attend,
    delist,
    enlist,
    enlist_behind,
    fold,
    inner,
    kernel,
    order_on,
    reorder,
)
from flowkv.policy.order.leaf import LeafOrder, as_slots

# What plain LRU would have, without blocks: a ring of slots, newest first, a block before those
# below it, as many as fit. So a request moves its blocks to the front, and LRU gives up the last.

RING = np.dtype([("before", np.int32), ("after", np.int32), ("held", np.int32)])

# Entries of the book: blocks in the ring; time and last block of the request at hand; blocks asked
# for so far; of these, found here less found in the ring; whether the learned order may decide. The
# head of the ring comes last.
HELD, NOW, LAST, ASKED, SURPLUS, MAY = range(6)
BOOK_SIZE = LISTS + 1

# The learned order decides unless it has cost more than a stake: so many blocks, and one in so many
# of all. LRU hands back once part of the stake is there again, as the traffic goes on.
STAKE, SHARE, AGAIN = 40, 1000, 20
EPOCH = 64  # evictions after which what remained after those before them no longer counts

LEARNED, ASIDE = 0, 2
"""Modes of the order: by the learned index; by last use, while the index only learns."""


@inner
def drop(ring: Array, book: Array, s: int) -> None:
    """A block of the ring leaves it."""
    delist(ring, book, 0, s)
    ring[s].held = 0
    book[HELD] -= 1


@kernel
def ask(nodes: Array, ring: Array, book: Array, slots: Array, now: int, room: int) -> bool:
    """A request uses these known blocks, root to leaf; `room` blocks fit (0: not known yet).

    What LRU or the place holds of them is newest now. What is too much leaves the ring before.

    Returns:
        Whether the learned order may decide; that it does is told by `book[LEARNED]`.
    """
    while book[HELD] > room > 0:
        drop(ring, book, ring[book[LISTS] - 1].before)
    book[NOW], book[LAST] = now, -1
    for i in range(len(slots) - 1, -1, -1):  # the first block is the newest in the end
        s = slots[i]
        if s < 0 or s >= len(ring):
            continue
        here, held = nodes[s].birth != 0, ring[s].held != 0
        book[SURPLUS] += int(here) - int(held)
        if held:
            drop(ring, book, s)
        if held or here:
            enlist(ring, book, 0, s)
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
    """Blocks became resident, root to leaf: each comes behind the one above it."""
    above = book[LAST] if book[NOW] == now else -1
    for i in range(len(slots)):
        s, p = slots[i], parents[i]
        if 0 <= p < len(ring) and ring[p].held:
            above = p
        if not ring[s].held:
            if above >= 0 and ring[above].held:
                enlist_behind(ring, s, above)
            else:
                enlist(ring, book, 0, s)
            ring[s].held = 1
            book[HELD] += 1
        above = s


@kernel
def lose(ring: Array, book: Array, slots: Array) -> None:
    """Blocks left for another reason than that they were too many."""
    for s in slots:
        if 0 <= s < len(ring) and ring[s].held:
            drop(ring, book, s)


@kernel
def follow(desk: Array, mode: int) -> None:
    """Another rule decides from now on: every leaf is sorted by its key."""
    order = order_on(desk)
    nodes, heaps, state = order
    state[MODE], state[TAU] = mode, mode == LEARNED  # 1 ns leaves a key as it is, 0 is the last use
    fold(state, DIGEST, mode)
    for s in range(len(nodes)):
        if mode != LEARNED:
            if nodes[s].marks & KNOWN:
                nodes[s].key = nodes[s].last
                reorder(nodes, heaps, state, s)
            continue
        if nodes[s].marks & ETA:
            nodes[s].marks &= ~ETA  # the index knows the hints itself
            reorder(nodes, heaps, state, s)
            attend(nodes, heaps, state, s)
        if nodes[s].birth != 0 and nodes[s].kids == 0:
            rekey(order, learner_on(desk), s, state[CLOCK])


class Hedge(HazardIndex):
    """The learned index (`HazardIndex`), or plain LRU while that one would have been better.

    What leaf-first LRU would have found is known exactly, but for leases and pins: a ring of block
    numbers, as many as fit, follows the same traffic. The learned order decides from the beginning,
    and may lose 40 blocks and a thousandth of all that were asked for against LRU, beside what it
    has won. Then LRU decides, which loses nothing, until the traffic has earned half of a stake
    again. The index learns whoever decides.

    One order holds the blocks, whoever decides; another rule sorts the same leaves by another key.
    So pins, leases, ranks, tenants and queued requests go on as they were. Hints of a time are
    obeyed by both rules, the learned one making most of them. Chains are offered to a prefetch
    while the learned index decides, and not otherwise.

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
        self._left = [0, 0]  # the most that remained after an eviction lately, and before that
        self._evictions = 0
        super().__init__(**options)

    # ---- what happens

    def insert(self, now_ns: int, slots: Slots, parents: Slots, **said: Any) -> None:
        """Blocks became resident here, root to leaf; `parents[i]` is a slot or -1."""
        slots, parents = as_slots(slots), as_slots(parents)
        super().insert(now_ns, slots, parents, **said)
        bring(self._ring, self._book, slots, parents, now_ns)

    def access(self, now_ns: int, slots: Slots, visit: Visit = NO_VISIT) -> None:
        """A request uses these known blocks, root to leaf.

        Known blocks that are not resident teach as well.
        """
        slots = as_slots(slots)
        super().access(now_ns, slots, visit)
        told = self._arrays[0], self._ring, self._book, slots, now_ns, max(self._left)
        if ask(*told) != self._learned:
            self._turn(not self._learned)

    def remove(self, slots: Slots) -> None:
        """Blocks left for another reason than `evict`."""
        slots = as_slots(slots)
        super().remove(slots)
        lose(self._ring, self._book, slots)

    def forget(self, slots: Slots) -> None:
        """Nobody knows these blocks any more: their slots may name others next."""
        slots = as_slots(slots)
        super().forget(slots)
        lose(self._ring, self._book, slots)

    def hint(self, now_ns: int, slots: Slots, eta_ns: int, sigma: float = 0.5) -> None:
        """The application expects the next use of this chain in about `eta_ns`.

        The learned index hears of it whoever decides.
        """
        super().hint(now_ns, slots, eta_ns, sigma)
        if not self._learned and eta_ns < NEVER_NS:
            LeafOrder.hint(self, now_ns, slots, eta_ns, sigma)

    # ---- what is decided

    def evict(self, now_ns: int, n: int, protected: Collection[int] = ()) -> Slots | None:
        """Chooses and removes `n` victims, none pinned or protected; None if there are fewer."""
        victims = super().evict(now_ns, n, protected)
        if victims is not None and len(victims):
            self._measure()
        return victims

    def displace(self, now_ns: int, n: int, rate: float, protected: Collection[int] = ()) -> Slots:
        """Gives up to `n` victims to a prefetch: only what is worth less than that.

        For what is certain only, unless the learned index decides.
        """
        if not self._learned:
            return Policy.displace(self, now_ns, n, rate, protected)
        victims = super().displace(now_ns, n, rate, protected)
        if len(victims):
            self._measure()
        return victims

    def wanted(self, now_ns: int, n: int) -> tuple[Slots, NDArray[np.float64]]:
        """Up to `n` ends of chains that are not resident and worth bringing here, best first.

        Nothing, unless the learned index decides.
        """
        if not self._learned:
            return NO_SLOTS.copy(), np.empty(0)
        return super().wanted(now_ns, n)

    def _worth(self, slot: int) -> float:
        """As the order that decides: an index in 1/s, or a static key in nanoseconds."""
        return super()._worth(slot) if self._learned else LeafOrder._worth(self, slot)

    def seldom(self) -> list[Callable[[], object]]:
        """Calls that compile what ordinary traffic reaches late; they spoil the policy."""
        one = as_slots([0])
        return [
            partial(self._turn, False),
            partial(self.priority, 0),
            partial(self.hint, 30, one, 1),
        ]

    @property
    def chosen(self) -> str:
        """The rule that decides at present: "lru" or "hazard"."""
        return "hazard" if self._learned else "lru"

    @property
    def surplus(self) -> int:
        """Blocks that hit so far, less those that plain LRU would have hit."""
        return int(self._book[SURPLUS])

    # ---- parts

    @property
    def _learned(self) -> bool:
        """Whether the learned index decides."""
        return bool(self._state[MODE] == LEARNED)

    def _turn(self, learned: bool) -> None:
        """Another rule decides from now on."""
        follow(self._desk, LEARNED if learned else ASIDE)

    def _measure(self) -> None:
        """An eviction is over: what is left tells how many blocks fit.

        Whether a driver makes room before an insert or after it, the most that remains after any of
        the last evictions is what fits, but for the smallest insert.
        """
        self._evictions += 1
        if self._evictions % EPOCH == 0:
            self._left = [0, self._left[0]]
        self._left[0] = max(self._left[0], int(self._state[COUNT]), 1)

    def _grow(self, room: int) -> None:
        super()._grow(room)
        ring = np.zeros(len(self._arrays[0]), RING)
        ring[: len(self._ring)] = self._ring
        self._ring = ring
