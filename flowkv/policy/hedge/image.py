"""What a hedge remembers beside its order, as plain values, and back.

The list of what LRU would hold is carried over as a list; of the shadows, which blocks each holds
and by which key: heaps and counts are built anew. A snapshot may come from anywhere, so whatever is
used as an index later, or decides how long a loop runs, is checked before anything is taken over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flowkv.policy.hedge.ghost import (
    BOOK_SIZE,
    GHOSTS,
    HERE,
    LAST,
    MASK,
    NEWEST,
    NOW,
    OLDEST,
    SERIALS,
    fresh_cells,
    link_below,
)
from flowkv.policy.hedge.rule import fresh_sums
from flowkv.policy.hedge.shadow import NO_KEY, hold
from flowkv.policy.order.compiled import Array, kernel
from flowkv.policy.order.image import column, damaged, uncolumn

FIELDS = ("up", "next", "depth", "line", "birth", "bond")


class Memory(NamedTuple):
    """What a hedge remembers.

    Attributes:
        cells: See `flowkv.policy.hedge.ghost`.
        book: Likewise.
        sums: See `flowkv.policy.hedge.rule`.
        keys: i8 [rows, slots], the key of each block in each shadow, the learned one last.
        held: Likewise, which blocks each of them holds.
    """

    cells: NDArray[Any]
    book: NDArray[np.int64]
    sums: NDArray[np.float64]
    keys: NDArray[np.int64]
    held: NDArray[np.bool_]


def columns_of(memory: Memory) -> dict[str, object]:
    """A memory as plain values."""
    cells, book, sums, keys, held = memory
    n = int(np.flatnonzero(cells["line"] >= 0).max(initial=-1)) + 1
    ghosts = np.empty(book[GHOSTS], np.int64)
    list_ghosts(cells, book, ghosts)
    return {
        "slots": n,
        "cells": [column(cells[name][:n]) for name in FIELDS],
        "ghosts": column(ghosts + 1),
        "book": column(book),
        "sums": column(sums),
        "keys": column(keys[:, :n].reshape(-1)),
        "held": column(held[:, :n].reshape(-1)),
    }


def memory_of(values: Mapping[str, Any], here: NDArray[np.bool_], rows: int) -> Memory:
    """The memory that `columns_of` told of.

    Args:
        values: What it gave.
        here: Which slots are resident, of all that there is room for.
        rows: How many shadows there are.

    Raises:
        ConfigError: It cannot have given that.
    """
    room = len(here)
    n = values.get("slots")
    told = values.get("cells")
    if type(n) is not int or not 0 <= n <= room or type(told) is not list:
        raise damaged("it tells of other slots")
    if len(told) != len(FIELDS) or here[n:].any():
        raise damaged("it tells of other slots")
    book = uncolumn(values.get("book"), np.int64, BOOK_SIZE)
    sums = uncolumn(values.get("sums"), np.float64, len(fresh_sums(rows)))
    cells, keys = fresh_cells(room), np.full((rows, room), NO_KEY)
    held = np.zeros((rows, room), np.bool_)
    for name, values_of in zip(FIELDS, told, strict=True):
        cells[name][:n] = uncolumn(values_of, np.int32, n)
    cells["here"] = here
    keys[:, :n] = uncolumn(values.get("keys"), np.int64, rows * n).reshape(rows, n)
    held[:, :n] = uncolumn(values.get("held"), np.uint8, rows * n).reshape(rows, n) != 0
    ghosts = uncolumn(values.get("ghosts"), np.int64, int(min(max(book[GHOSTS], 0), n))) - 1
    if not _fits(cells, book, sums, ghosts, held):
        raise damaged("its numbers do not fit each other")
    cells["ghost"][ghosts] = 1
    book[OLDEST] = book[NEWEST] = -1
    link_ghosts(cells, book, ghosts)
    return Memory(cells, book, sums, keys, held)


def _fits(cells: Any, book: Any, sums: Any, ghosts: Any, held: Any) -> bool:
    """Whether all of it can be used without looking."""
    n, up, line = len(cells), cells["up"], cells["line"]
    ranges = (
        (up, -1, n - 1),
        (cells["next"], -1, n - 1),
        (cells["depth"], 0, np.iinfo(np.int32).max),
        (line, -1, SERIALS),
        (cells["birth"], 0, SERIALS + 1),
        (ghosts, 0, n - 1),
        (book[LAST], -1, n - 1),
        (np.delete(book, NOW), -1, np.iinfo(np.int64).max),
        (book[MASK], 0, SERIALS),
    )
    if not all(((low <= x) & (x <= high)).all() for x, low, high in ranges):
        return False
    bound = (up >= 0) & (cells["birth"][np.maximum(up, 0)] == cells["bond"])
    used = cells["here"] == 1
    used |= held.any(axis=0)
    used[ghosts] = True
    whole = (
        len(np.unique(ghosts)) == len(ghosts) == book[GHOSTS],
        book[HERE] == cells["here"].sum(),
        book[MASK] & (book[MASK] + 1) == 0,
        (line[used] >= 0).all() and (book[LAST] < 0 or line[book[LAST]] >= 0),
        (cells["depth"][bound] == cells["depth"][up[bound]] + 1).all(),  # so there is no circle
        np.isfinite(sums).all(),
    )
    return all(whole)


@kernel
def list_ghosts(cells: Array, book: Array, out: Array) -> None:
    """What LRU would hold, the newest first."""
    s = book[NEWEST]
    for i in range(len(out)):
        out[i] = s
        s = cells[s].older


@kernel
def link_ghosts(cells: Array, book: Array, slots: Array) -> None:
    """The list that `list_ghosts` told of."""
    for i in range(len(slots) - 1, -1, -1):
        link_below(cells, book, slots[i], -1)


@kernel
def refill(shadow: tuple[Array, ...], cells: Array, held: Array) -> None:
    """A shadow that knows its keys holds these blocks. Its heap is wide enough."""
    shade, leaves, count = shadow
    for s in range(len(held)):
        if held[s]:
            hold(shade, leaves, count, cells, s)
