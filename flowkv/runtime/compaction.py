"""Empties sparse slabs by moving pages, and rewrites everything that names them.

When, and how much of it, is `policy.defragmentation`'s business. Pages move at the edges of steps
only, while no step is under way: kernels read tables and pages without the lock.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from flowkv.core.layout import GRANULE_BYTES
from flowkv.observe.events import Defragmented
from flowkv.policy.defragmentation import Defragmentation
from flowkv.runtime.store import Store
from flowkv.runtime.tables import STEPPING, Tables


class Compactor:
    """Defragments the pools of a store. Callers hold the KV lock.

    They know of no page that is in no table and no block: it would stay where it is, renamed.

    Args:
        store: Blocks and pools.
        tables: Lines of all sequences.
        most_bytes: Copied at the edge of a step; 0 for nothing.
    """

    def __init__(self, store: Store, tables: Tables, most_bytes: int) -> None:
        self.store, self.tables = store, tables
        self.policies = {
            device: Defragmentation(most_bytes=most_bytes) for device in store.pools if most_bytes
        }

    def edge(self) -> int:
        """What the policy wants done at a step's edge; returns the pages moved."""
        moved = 0
        for device, policy in self.policies.items():
            pool = self.store.pools[device]
            budget = policy.budget(pool.occupancy(), len(self.store.index))
            if budget and not self._stepping():
                pages = self._move(
                    device,
                    most_granules=budget // GRANULE_BYTES,
                    least_gain=policy.config.least_gain,
                )
                policy.moved(pages, pool.occupancy())
                moved += pages
        return moved

    def make_room(self, wanted: Mapping[tuple[int, int], int]) -> None:
        """Empties as many slabs as these pages lack, before anything is evicted for them.

        Args:
            wanted: How many pages of each (group, codec index) are about to be allocated.
        """
        for (group, codec), count in wanted.items():
            device, pool = self.store.device(group), self.store.pool(group)
            granules = self.store.forms[group].layouts[codec].granules
            short = count - pool.available(granules)
            if short > 0 and device in self.policies and pool.occupancy().reclaimable:
                if self._stepping():
                    return
                slabs = -(-short // (pool.slab_granules // granules))
                self._move(device, most_slabs=slabs, wanted=granules)

    def everything(self) -> int:
        """Moves all that can be moved to some use, of all devices; returns how many pages."""
        if self._stepping():
            return 0
        return sum(self._move(device) for device in self.store.pools)

    def _stepping(self) -> bool:
        return bool((self.tables.state == STEPPING).any())

    def _move(self, device: str, **limits: Any) -> int:
        pool, started = self.store.pools[device], time.perf_counter()
        empty = pool.occupancy().empty
        moves = pool.plan_defragmentation(self.store.lent(device), **limits)
        if moves:
            n_bytes = sum(pool.size_bytes(page) for page in moves)
            relocate(self.store, self.tables, device, moves)
            now = pool.occupancy()
            event = Defragmented(
                device=device,
                pages=len(moves),
                n_bytes=n_bytes,
                slabs=now.empty - empty,
                seconds=time.perf_counter() - started,
                fragmentation=now.fragmentation,
            )
            self.store.bus.emit(event)
        return len(moves)


def relocate(store: Store, tables: Tables, device: str, moves: Mapping[int, int]) -> None:
    """Moves pages of a device (old page -> new page), as if at once.

    Raises:
        StateError: See `PagePool.relocate`.
    """
    if not moves:
        return
    store.pools[device].relocate(moves)
    old = np.array(sorted(moves), np.int32)
    new = np.array([moves[page] for page in old.tolist()], np.int32)
    for g, group in enumerate(store.geometry.groups):
        if group.device == device:
            table = tables.pages[g]
            at = np.searchsorted(old, table).clip(0, len(old) - 1)
            table[:] = np.where(old[at] == table, new[at], table)
    tables.touch()
    for block in store.blocks_on(device):
        block.page = moves.get(block.page, block.page)
