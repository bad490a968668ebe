"""Device memory that sequences take, counted in pages: what is free, held, and would come free."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from flowkv.cache.block_table import WINDOW_SLACK_TOKENS, Planner
from flowkv.cache.restore import RestoreJob
from flowkv.cache.sequence import Sequence
from flowkv.core.layout import CODEC_SHIFT, GRANULE_BYTES

_TYPICAL_TOKENS, _SHARE, _CHANGE = 2048, 1 / 16, 1.25
"""Length of a sequence while nobody has said any; weight of a new one in the mean; what matters."""


class Footprint:
    """Counts what a cache's devices have room for.

    A *page* stands for `page_size` tokens in all layer groups. What that takes depends on where in
    a sequence they are: behind a window they take nothing, encoded ones little. Here it is the mean
    over a sequence of the usual length, and the device that is short counts.

    Args:
        planner: Of a cache.

    Attributes:
        total: Pages that all devices could hold.
        page_bytes: Bytes of a page, on all devices.
    """

    def __init__(self, planner: Planner) -> None:
        self._planner, self._store = planner, planner.store
        self._mean = self._gauged = 0.0
        self._gauge(_TYPICAL_TOKENS)

    def learn(self, tokens: int) -> None:
        """A sequence is going to have so many tokens."""
        self._mean += (tokens - self._mean) * (_SHARE if self._mean else 1.0)
        if not 1 / _CHANGE < self._mean / self._gauged < _CHANGE:
            self._gauge(self._mean)

    def _gauge(self, tokens: float) -> None:
        size = self._planner.page_size
        pages = max(1, round(tokens / size))
        typical = self.granules(pages * size)
        self._gauged = tokens
        self._unit = {device: max(1.0, granules / pages) for device, granules in typical.items()}
        capacity = {d: pool.capacity_granules for d, pool in self._store.pools.items()}
        self.total = min(int(capacity[d] / unit) for d, unit in self._unit.items())
        self.page_bytes = round(sum(self._unit.values())) * GRANULE_BYTES

    def granules(self, length: int) -> dict[str, int]:
        """Granules that a sequence of `length` tokens takes, by device."""
        found = dict.fromkeys(self._store.pools, 0)
        for (device, granules), pages in self._pages(length).items():
            found[device] += granules * pages
        return found

    def _pages(self, length: int) -> Counter[tuple[str, int]]:
        """Pages that a sequence takes, by device and size in granules."""
        planner, size = self._planner, self._planner.page_size
        found = Counter[tuple[str, int]]()
        for g, group in enumerate(planner.geometry.groups):
            window, forms, first = planner.window(g), self._store.forms[g], 0
            if window is not None:
                first = max(0, length - window - WINDOW_SLACK_TOKENS) // size
            for rung in forms.ladder.rungs:  # the furthest first
                border = max(first, forms.ladder.border(rung, length))
                found[group.device, forms.layouts[rung.codec].granules] += border - first
                first = border
            found[group.device, forms.raw.granules] += max(0, -(-length // size) - first)
        return found

    def room(self) -> int:
        """Pages that are free, or held by nobody but the index. Costs the same whatever is held."""
        store = self._store
        return min(int(store.room(device) / unit) for device, unit in self._unit.items())

    def longest(self, chunk: int) -> int:
        """Tokens of the longest sequence that fits alone, computed in chunks of so many tokens."""
        low, high = 0, self.total * self._planner.page_size + 1
        while self._fits(high, chunk) and high < 1 << 40:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(middle, chunk) else (low, middle)
        return low

    def _fits(self, length: int, chunk: int) -> bool:
        """Whether a sequence fits alone, its last chunk raw and not yet behind any window."""
        done, size, store = max(0, length - chunk), self._planner.page_size, self._store
        pages, slabs = self._pages(done), dict.fromkeys(store.pools, 0)
        for g, group in enumerate(self._planner.geometry.groups):
            pages[group.device, store.forms[g].raw.granules] += -(-length // size) + -done // size
        for (device, granules), count in pages.items():  # each size has slabs of its own
            slabs[device] += -(-count // (store.pools[device].slab_granules // granules))
        return all(taken <= store.pools[device].slabs for device, taken in slabs.items())

    # ---- of one sequence

    def alone(self, seq: Sequence) -> int:
        """Pages that come free if a sequence goes: those that nobody else uses."""
        taken = dict.fromkeys(self._unit, 0)
        for g, blocks in enumerate(seq.blocks):
            line = self._planner.tables.pages[g][seq.row, : len(blocks)]
            taken[self._store.device(g)] += self._size(g, line[self._alone(seq, g)])
        restoration = RestoreJob.of(seq)
        if restoration is not None and not restoration.settled:
            for inbound in restoration.back:
                if inbound.page >= 0 and not inbound.held:
                    granules = self._store.forms[inbound.group].of(inbound.page).granules
                    taken[self._store.device(inbound.group)] += granules
        return max(round(taken[device] / unit) for device, unit in self._unit.items())

    def _size(self, group: int, pages: NDArray[np.int32]) -> int:
        """Granules of pages of a group; -1 is none."""
        forms = self._store.forms[group]
        if len(forms.layouts) == 1 and self._planner.window(group) is None:
            return len(pages) * forms.raw.granules
        codecs = enumerate(np.bincount(pages[pages >= 0] >> CODEC_SHIFT).tolist())
        return sum(count * forms.layouts[codec].granules for codec, count in codecs if count)

    def _alone(self, seq: Sequence, group: int) -> slice | list[int]:
        """Numbers of the pages that nobody else uses."""
        blocks, low = seq.blocks[group], seq.first_page[group]
        high = stop = len(blocks)
        if self._planner.window(group) is not None:  # others may have let go of the first ones
            return [n for n in range(low, stop) if (b := blocks[n]) is None or b.holds < 2]
        while low < high:  # whoever uses a page uses all before it
            middle = (low + high) // 2
            block = blocks[middle]
            low, high = (low, middle) if block is None or block.holds < 2 else (middle + 1, high)
        return slice(low, stop)

    def held(self, seq: Sequence, pages: int) -> int:
        """Of the leading pages of a prompt, how many open sequences use now.

        Args:
            seq: One that knows the prompt, and may hold nothing.
            pages: Full pages of the prompt.
        """
        low, high, find = 0, pages, self._store.find
        while low < high:
            middle = (low + high + 1) // 2
            block = find(seq.key(0, middle - 1))
            used = block is not None and block.page >= 0 and block.holds > 0
            low, high = (middle, high) if used else (low, middle - 1)
        return low
