"""Empties sparse slabs by moving pages, and rewrites everything that names them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from flowkv.runtime.store import Store
from flowkv.runtime.tables import STEPPING, Tables


def defragment(store: Store, tables: Tables) -> int:
    """Moves pages of all devices; returns how many. None while a step is under way.

    Callers hold the KV lock, and know of no page that is in no table and no block.
    """
    if (tables.state == STEPPING).any():
        return 0  # a step reads and writes its pages without the lock
    moved = 0
    for device, pool in store.pools.items():
        moves = pool.plan_defragmentation(set(pool.live()) - store.lent(device))
        relocate(store, tables, device, moves)
        moved += len(moves)
    return moved


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
