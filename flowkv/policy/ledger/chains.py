"""From a request's ids to slots."""

from __future__ import annotations

import numpy as np

from flowkv.policy.ledger.blocks import (
    BIRTHS,
    DIGEST,
    FREE,
    FRESH,
    IN_FLIGHT,
    NOWHERE,
    fastest,
    haunt,
    land_all,
    parent_of,
    settled,
)
from flowkv.policy.ledger.table import find, put
from flowkv.policy.order.compiled import Array, fold, inner, kernel


@inner
def seek(
    blocks: Array, buckets: Array, mix: Array, lo: int, hi: int, where: tuple[int, int]
) -> int:
    """The slot of an id in (space, slot of the block before it or -1), or -1."""
    space, above = where
    if above >= 0:
        s = int(blocks[above].heir)
        if s >= 0 and blocks[s].lo == lo and blocks[s].hi == hi and blocks[s].space == space:
            return s
    return find(blocks, buckets, mix, lo, hi, space)


@kernel
def run_of(blocks: Array, buckets: Array, mix: Array, ids: Array, space: int, chained: bool) -> int:
    """How many leading blocks can be read, somewhere; changes nothing."""
    s = np.int64(-1)
    for i in range(len(ids)):
        above = s if chained else np.int64(-1)
        s = seek(blocks, buckets, mix, ids[i, 0], ids[i, 1], (space, above))
        if s < 0 or settled(blocks, s) == 0:
            return i
    return len(ids)


@kernel
def known_of(blocks: Array, buckets: Array, mix: Array, ids: Array, space: int, out: Array) -> int:
    """Slots of the leading blocks that are known, resident or not; returns how many."""
    for i in range(len(ids)):
        s = find(blocks, buckets, mix, ids[i, 0], ids[i, 1], space)
        if s < 0:
            return i
        out[i] = s
    return len(ids)


@inner
def christen(blocks: Array, buckets: Array, mix: Array, state: Array, lo: int, hi: int) -> int:
    """Gives an id that is not known a slot, still without space and parent."""
    s = state[FREE]
    if s >= 0:
        state[FREE] = blocks[s].older
    else:
        s = state[FRESH]
        state[FRESH] += 1
    state[BIRTHS] += 1
    b = blocks[s]
    b.birth = state[BIRTHS]
    b.pins, b.watch, b.heir, b.parent = 0, 0, -1, -1
    b.here, b.flight, b.stale, b.ghost = 0, 0, 0, 0
    return s


@inner
def follow_all(
    blocks: Array,
    buckets: Array,
    mix: Array,
    state: Array,
    ids: Array,
    where: tuple[int, bool],
    chain: Array,
    sources: Array,
) -> int:
    """Slots of a request's blocks, new ones included, and the fastest place of each.

    `where` = (space, whether each block is the parent of the next). The caller has seen to it that
    as many slots as ids are free. Returns how many leading blocks can be read.
    """
    space, chained = where
    above, hits = np.int64(-1), -1
    for i in range(len(ids)):
        lo, hi = ids[i, 0], ids[i, 1]
        s = seek(blocks, buckets, mix, lo, hi, (space, above))
        if s < 0:
            s = christen(blocks, buckets, mix, state, lo, hi)
            put(blocks, buckets, mix, s, lo, hi, space)
            haunt(blocks, state, s)
        if above >= 0:
            blocks[above].heir = s
            if parent_of(blocks, s) < 0 and above != s:
                blocks[s].parent = above
                blocks[s].bond = blocks[above].birth
        places = settled(blocks, s)
        chain[i] = s
        sources[i] = fastest(places) if places else (IN_FLIGHT if blocks[s].here else NOWHERE)
        if places == 0 and hits < 0:
            hits = i
        above = s if chained else np.int64(-1)
    hits = len(ids) if hits < 0 else hits
    fold(state, DIGEST, hits)
    return hits


@kernel
def follow(
    blocks: Array,
    buckets: Array,
    mix: Array,
    state: Array,
    ids: Array,
    where: tuple[int, bool],
    rows: Array,
    sources: Array,
) -> int:
    """`follow_all`, as a call; slots go to `rows[0]`."""
    return follow_all(blocks, buckets, mix, state, ids, where, rows[0], sources)


@kernel
def follow_and_land(
    blocks: Array,
    buckets: Array,
    mix: Array,
    state: Array,
    ids: Array,
    where: tuple[int, bool, int],
    rows: Array,
    sources: Array,
) -> tuple[int, int]:
    """`follow_all`, and `land_all` in the first place with `where[2]` bytes; returns both."""
    chain, terms = rows[0, : len(ids)], (0, where[2], 0)
    hits = follow_all(blocks, buckets, mix, state, ids, where[:2], chain, sources)
    return hits, land_all(blocks, state, chain, terms, rows[1:])


@kernel
def climb(blocks: Array, s: int, out: Array) -> int:
    """Writes a block and its ancestors, leaf to root, as many as `out` takes; returns how many."""
    n = 0
    while s >= 0 and n < len(out):
        out[n] = s
        n += 1
        s = parent_of(blocks, s)
    return n
