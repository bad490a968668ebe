"""Upper bound of any policy, computed from the future: Belady's algorithm with bypass.

Blocks that are never needed again go first, then those needed latest; of equals the deepest.
A request that uses a block uses all blocks above it, so that a block is needed no later than those
below it: the rule keeps chains whole by itself, and is optimal for prefix hits too, not only for
single blocks. A request's own blocks are among the candidates (bypass), and time is counted in
requests.

`belady` is the plain function, `Optimum` the same rule as a `Policy` of the catalogue.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowkv.core.errors import ConfigError
from flowkv.policy.base import NO_SLOTS, NO_VISIT, LeaseConfig, Slots, Visit, configure
from flowkv.policy.order.compiled import (
    SLOT_BITS,
    SLOT_LIMIT,
    SLOT_MASK,
    Array,
    assign,
    kernel,
    put,
    take,
)
from flowkv.policy.order.leaf import LeafOrder, as_slots

NOT_AGAIN = 1 << 40
"""Next use of a block that is not used again."""


@kernel
def fill_next_uses(offsets: Array, blocks: Array, following: Array, uses: Array) -> None:
    """Fill `uses`, walking the trace backwards; `following[b]` is the next request to use `b`."""
    for r in range(len(offsets) - 2, -1, -1):
        for j in range(offsets[r], offsets[r + 1]):
            uses[j] = following[blocks[j]]
        for j in range(offsets[r], offsets[r + 1]):
            following[blocks[j]] = r


@kernel
def replay(
    offsets: Array,
    blocks: Array,
    uses: Array,
    heap: Array,
    place: Array,
    capacity: int,
    hits: Array,
) -> None:
    """Fill `hits` with the leading resident blocks of each request; `place` is all -1."""
    held = 0
    for r in range(len(offsets) - 1):
        first, end = offsets[r], offsets[r + 1]
        run = first
        while run < end and place[blocks[run]] >= 0:
            run += 1
        hits[r] = run - first
        for j in range(first, end):  # the block needed latest is on top, of equals the deepest
            b = blocks[j]
            i = place[b]
            if i < 0:
                i = held
                held += 1
            put(heap, place, held, i, (-uses[j], (SLOT_MASK - (j - first)) << SLOT_BITS | b))
        while held > capacity:
            take(heap, place, held, 0)
            held -= 1


def next_uses(
    offsets: NDArray[np.int64], blocks: NDArray[np.int64], unique: int
) -> NDArray[np.int64]:
    """Return for every use of a block the next request that uses it, `NOT_AGAIN` for none.

    Args:
        offsets: i8 [R + 1]; the blocks of request r are `blocks[offsets[r]:offsets[r + 1]]`.
        blocks: Numbers below `unique`.
        unique: Different blocks.
    """
    _check_requests(offsets, blocks, unique)
    uses = np.empty(len(blocks), np.int64)
    fill_next_uses(offsets, blocks, np.full(unique, NOT_AGAIN, np.int64), uses)
    return uses


def belady(
    offsets: NDArray[np.int64],
    blocks: NDArray[np.int64],
    unique: int,
    capacity: int,
    uses: NDArray[np.int64] | None = None,
) -> NDArray[np.int64]:
    """Return the hits of the optimum, request by request, from cold.

    Args:
        offsets: i8 [R + 1]; the blocks of request r are `blocks[offsets[r]:offsets[r + 1]]`, root
            to leaf. The optimum is one for prefixes where a block's parent precedes it wherever it
            is used, and otherwise for single blocks.
        blocks: Numbers below `unique`.
        unique: Different blocks.
        capacity: Blocks that fit.
        uses: The result of `next_uses`, to share it among several capacities.

    Returns:
        i8 [R]: leading resident blocks of each request.

    Raises:
        ConfigError: If `capacity` is negative, or the arrays do not fit each other.

    References:
        L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", 1966.
    """
    if capacity < 0:
        raise ConfigError(f"a place cannot hold {capacity} blocks", "Use 0 or more")
    if uses is None:
        uses = next_uses(offsets, blocks, unique)
    else:
        _check_requests(offsets, blocks, unique)
    if len(uses) != len(blocks):
        raise ConfigError(f"{len(uses)} uses of {len(blocks)} blocks", "Pass those of next_uses()")
    hits = np.zeros(max(len(offsets) - 1, 0), np.int64)
    heap, place = np.empty((unique, 2), np.int64), np.full(unique, -1, np.int32)
    replay(offsets, blocks, uses, heap, place, capacity, hits)
    return hits


def _check_requests(offsets: NDArray[np.int64], blocks: NDArray[np.int64], unique: int) -> None:
    """Check the arrays that compiled code will index with, since it checks nothing."""
    if (
        not _within(offsets, 0, len(blocks) + 1)
        or (offsets[1:] < offsets[:-1]).any()
        or not _within(blocks, 0, min(unique, SLOT_LIMIT))
    ):
        raise ConfigError(
            f"{len(offsets)} offsets into {len(blocks)} blocks, {unique} of them different",
            "Let offsets rise to the number of blocks, which are numbered from 0",
        )


def _within(values: NDArray[np.int64], low: int, end: int) -> bool:
    """Return whether a vector of integers holds only numbers from `low` to `end` - 1."""
    if values.dtype.kind != "i" or values.ndim != 1:
        return False
    return bool(values.min(initial=low) >= low and values.max(initial=low) < max(end, low + 1))


class OptimumConfig(LeaseConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of `Optimum`: leases only."""


class Optimum(LeafOrder):
    """Belady with bypass as a policy: an upper bound for comparisons, not for serving.

    It evicts the leaf that is needed latest. `foresee` must pass the future before the first
    request; else no block is ever needed again, and the deepest goes first. Replayed with
    everything eligible after each request it has exactly the hits of `belady`. Hints are ignored.

    Args:
        **options: Fields of `OptimumConfig`: leases.
    """

    name = "opt"

    def __init__(self, **options: object) -> None:
        super().__init__(leases=configure(OptimumConfig, self.name, options))
        self._offsets = self._uses = NO_SLOTS
        self._requests = 0
        self._chain, self._due = NO_SLOTS, NO_SLOTS  # this request's blocks so far; its uses

    def foresee(self, offsets: NDArray[np.int64], blocks: NDArray[np.int64]) -> None:
        """Set all requests that will come, in order, as in `belady`.

        `visit.request` of each `access` is its index; where that is -1, accesses are counted.

        Raises:
            ConfigError: The arrays do not fit each other.
        """
        unique = int(blocks.max()) + 1 if len(blocks) else 0
        self._offsets, self._uses = offsets, next_uses(offsets, blocks, unique)

    def access(self, now_ns: int, slots: Slots, visit: Visit = NO_VISIT) -> None:
        """Record that a request uses these known blocks, root to leaf.

        These are the first blocks of the request; `insert` adds the others.
        """
        super().access(now_ns, slots, visit)
        r = visit.request if visit.request >= 0 else self._requests
        self._requests += 1
        known = r + 1 < len(self._offsets)
        self._due = self._uses[self._offsets[r] : self._offsets[r + 1]] if known else NO_SLOTS
        self._chain = as_slots(slots).copy()
        self._rank()

    def insert(self, now_ns: int, slots: Slots, parents: Slots, **said: Any) -> None:
        """Add blocks that became resident, root to leaf; `parents[i]` is a slot or -1.

        They belong to the request that was last accessed.
        """
        super().insert(now_ns, slots, parents, **said)
        slots = as_slots(slots)
        self._chain = np.append(self._chain, slots[~np.isin(slots, self._chain)])
        self._rank()

    def hint(self, now_ns: int, slots: Slots, eta_ns: int, sigma: float = 0.5) -> None:
        """Ignore the hint: the future is known."""

    def enqueue(self, now_ns: int, request: int, slots: Slots) -> None:
        """Ignore the queued request: the future is known."""

    def _rank(self) -> None:
        """Rank the blocks of the current request by their next use."""
        keys = np.full(len(self._chain), -NOT_AGAIN, np.int64)
        n = min(len(keys), len(self._due))
        keys[:n] = -self._due[:n]
        assign(*self._order, self._chain, keys)
