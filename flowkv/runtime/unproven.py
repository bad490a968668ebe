"""Pages that were prefetched, until it is known whether that was of use."""

from __future__ import annotations

from collections.abc import Callable

from flowkv.runtime.index import Block
from flowkv.runtime.mover import Mover


class Unproven:
    """Pages that prefetches brought and that nobody has used yet. Callers hold the KV lock.

    What becomes of them is told to the guard of the tier they came from, which stops prefetching
    where it costs more than it saves.

    Args:
        mover: Has the guards.

    Attributes:
        on_leave: Told of those that left unused.
    """

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self.on_leave: Callable[[Block], None] = lambda block: None
        self._pages: dict[Block, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._pages)

    def add(self, block: Block, tier: int, n_bytes: int) -> None:
        """A prefetch brought a page from a tier."""
        self._pages[block] = tier, n_bytes

    def use(self, block: Block) -> None:
        """Somebody uses a page, prefetched or not."""
        found = self._pages.pop(block, None)
        if found is not None and found[0] < len(self._mover.lanes):
            lane = self._mover.lanes[found[0]]
            lane.guard.used(lane.clock_ns(), found[1])

    def leave(self, block: Block) -> None:
        """A page left its device, prefetched or not."""
        found = self._pages.pop(block, None)
        if found is not None and found[0] < len(self._mover.lanes):
            lane = self._mover.lanes[found[0]]
            lane.guard.wasted(lane.clock_ns(), found[1])
            self.on_leave(block)
