"""Tails that closed sequences leave on their devices, for prompts that begin with their tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from flowkv.cache.index import Beginnings, Block
from flowkv.cache.pool import PagePool


class ClosedTails(dict[Block, list[int]]):
    """Partly filled last pages of closed sequences, the oldest first, with the page of each group.

    No policy orders them: they go before any other page where room is needed. Tiers get copies, see
    `WriteBack.store_tail`. Callers hold the KV lock.

    Args:
        pools: The page pool of each group.
        beginnings: Index of blocks by their tokens.
    """

    def __init__(self, pools: Sequence[PagePool], beginnings: Beginnings) -> None:
        super().__init__()
        self._pools, self._beginnings = pools, beginnings

    def keep(self, tail: Block, pages: list[int]) -> None:
        """Keep the pages of a tail until their memory is needed."""
        self.outgrow(tail.place, tail.tokens)  # type: ignore[arg-type]
        self[tail] = pages
        self._beginnings.add(tail)
        for pool, page in zip(self._pools, pages, strict=True):
            pool.share(page)

    def outgrow(self, place: bytes, tokens: NDArray[np.uint32]) -> None:
        """Drop the tails below a place that are prefixes of these tokens; see `Block.place`."""
        near = self._beginnings.near(place, tokens) if self else ()
        known = [(shared, one) for shared, one in near if shared and one in self]
        self.drop([one for shared, one in known if shared == len(one.tokens)])  # type: ignore[arg-type]

    def held_bytes(self, pool: PagePool) -> int:
        """Return the bytes of tails in a pool."""
        pages = zip(self._pools, next(iter(self.values()), ()), strict=False)
        return len(self) * sum(one.size_bytes(page) for one, page in pages if one is pool)

    def drop(self, tails: Iterable[Block] | None = None) -> None:
        """Drop tails; None drops all, after an erasure or where content does not match its key."""
        for tail in list(self if tails is None else tails):
            self._beginnings.discard(tail)
            for pool, page in zip(self._pools, self.pop(tail), strict=True):
                pool.release(page)
