"""What a ledger knows about each block, and the loops over one request's blocks.

One record per slot; the table of ids (`.table`) finds it, or, along a chain that was
used before, the record of the block before it (`heir`), without hashing. Places are bits of `here`.
A block that lies nowhere is a *ghost*: it stays known, in a ring from the youngest to the oldest,
until too many are. A slot outlives its block by nothing: who remembers a parent's or a child's slot
remembers its `birth` too, or compares the id.
"""

from __future__ import annotations

import numpy as np

from flowkv.policy.ledger.table import cut
from flowkv.policy.order.compiled import Array, inner, kernel

BLOCK = np.dtype(
    [
        ("lo", np.uint64),  # the id; with `space` as in `table.KEY`
        ("hi", np.uint64),
        ("bytes", np.int64),  # while it lies anywhere
        ("birth", np.int64),  # a number never used twice
        ("bond", np.int64),  # the parent's birth
        ("space", np.int32),
        ("parent", np.int32),  # a slot or -1; counts only while its birth equals `bond`
        ("heir", np.int32),  # the child last seen, or -1; compare the id
        ("pins", np.int32),  # requests under way that use it, and pins of the user's
        ("watch", np.int32),  # queued requests that name it
        ("younger", np.int32),  # neighbours in the ring of ghosts, or -1
        ("older", np.int32),  # and the next free slot
        ("here", np.uint8),  # bit k: it lies, or takes up room, in place k
        ("flight", np.uint8),  # bit k: it is not complete there yet
        ("stale", np.uint8),  # bit k: it expired there while pinned
        ("ghost", np.uint8),  # 1: in the ring
    ]
)
MAX_PLACES = 8
NOWHERE, IN_FLIGHT = -1, -2

# Entries of the state vector, also that of each place from USED and PINNED on.
DIGEST, FRESH, FREE, GHOSTS, YOUNGEST, OLDEST, BIRTHS, RESIDENT, LARGEST = range(9)
USED, PINNED = 16, 24
STATE_SIZE = 32


@inner
def parent_of(blocks: Array, s: int) -> int:
    """The slot of the known parent, or -1."""
    p = blocks[s].parent
    if p >= 0 and blocks[p].birth == blocks[s].bond and blocks[p].space >= 0:
        return int(p)
    return -1


@inner
def settled(blocks: Array, s: int) -> int:
    """Places in which a block can be read, as bits."""
    b = blocks[s]
    return int(np.int64(b.here) & ~np.int64(b.flight) & ~np.int64(b.stale))


@inner
def fastest(places: int) -> int:
    """The lowest bit that is set, or -1."""
    for k in range(MAX_PLACES):
        if places >> k & 1:
            return k
    return NOWHERE


# ---- ghosts


@inner
def haunt(blocks: Array, state: Array, s: int) -> None:
    """A block becomes the youngest ghost."""
    first = state[YOUNGEST]
    blocks[s].ghost = 1
    blocks[s].younger = -1
    blocks[s].older = first
    if first >= 0:
        blocks[first].younger = s
    else:
        state[OLDEST] = s
    state[YOUNGEST] = s
    state[GHOSTS] += 1


@inner
def calm(blocks: Array, state: Array, s: int) -> None:
    """A block is a ghost no longer."""
    younger, older = blocks[s].younger, blocks[s].older
    if younger >= 0:
        blocks[younger].older = older
    else:
        state[YOUNGEST] = older
    if older >= 0:
        blocks[older].younger = younger
    else:
        state[OLDEST] = younger
    blocks[s].ghost = 0
    state[GHOSTS] -= 1


@inner
def rest(blocks: Array, state: Array, s: int) -> None:
    """A block that lies nowhere and is needed by nobody becomes a ghost."""
    b = blocks[s]
    if b.here == 0 and b.pins == 0 and b.watch == 0 and b.ghost == 0:
        haunt(blocks, state, s)


@kernel
def lay_ghosts(
    blocks: Array, buckets: Array, mix: Array, state: Array, bound: int, out: Array
) -> int:
    """Forgets the oldest ghosts beyond `bound`, as many as `out` takes; returns how many."""
    n = 0
    while state[GHOSTS] > bound and n < len(out):
        s = state[OLDEST]
        calm(blocks, state, s)
        cut(blocks, buckets, mix, s)
        blocks[s].older = state[FREE]
        state[FREE] = s
        out[n] = s
        n += 1
    return n


# ---- coming and going


@inner
def arrive(blocks: Array, state: Array, k: int, s: int, size: int, flying: int) -> bool:
    """A block takes up room in a place, where it does not yet or is stale; whether that is new."""
    bit = np.uint8(1 << k)
    b = blocks[s]
    if b.here & bit:
        if not b.stale & bit:
            b.flight &= np.uint8(255) if flying else ~bit  # whoever is done has brought it
            return False
        b.stale &= ~bit
        b.flight = b.flight & ~bit | (bit if flying else np.uint8(0))
        return True
    if b.here == 0:
        b.bytes = size
        state[LARGEST] = max(state[LARGEST], size)
        state[RESIDENT] += 1
        if b.ghost:
            calm(blocks, state, s)
    b.here |= bit
    b.flight |= bit if flying else np.uint8(0)
    state[USED + k] += b.bytes
    if b.pins > 0:
        state[PINNED + k] += b.bytes
    return True


@inner
def depart(blocks: Array, state: Array, k: int, s: int) -> None:
    """A block leaves a place."""
    bit = np.uint8(1 << k)
    b = blocks[s]
    if not b.here & bit:
        return
    b.here &= ~bit
    b.flight &= ~bit
    b.stale &= ~bit
    state[USED + k] -= b.bytes
    if b.pins > 0:
        state[PINNED + k] -= b.bytes
    if b.here == 0:
        state[RESIDENT] -= 1
        rest(blocks, state, s)


@inner
def land_all(
    blocks: Array, state: Array, slots: Array, terms: tuple[int, int, int], out: Array
) -> int:
    """Blocks take up room in a place; writes the new ones of them and their parents.

    Args:
        blocks: Records.
        state: Totals.
        slots: Root to leaf.
        terms: (place, bytes of each, whether they are to be waited for).
        out: [3, at least the slots]: slots, parents, 1 where it takes up room that it did not.

    Returns:
        How many are new there.
    """
    k, size, flying = terms
    n = 0
    for s in slots:
        used = state[USED + k]
        if arrive(blocks, state, k, s, size, flying):
            out[2, n] = state[USED + k] > used
            out[0, n] = s
            out[1, n] = parent_of(blocks, s)
            n += 1
    return n
