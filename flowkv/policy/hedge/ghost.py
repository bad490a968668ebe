"""What plain LRU would have here, exactly: a whole place of the same size, without the blocks.

The reference that a hedge is measured against. A list of blocks by the time of their last use, in
which the blocks of one request lie root first, so that the oldest is always a leaf: leaf-first LRU
at a few nanoseconds a block. Beside it, what really lies here, so that both can be compared request
by request; and the lineage of each block, by which requests are sampled.

*Lineage.* A request that goes on where an earlier one ended, or but for its last block, belongs to
the same conversation and inherits its lineage. One that branches off in the middle begins another.
"""

from __future__ import annotations

import numpy as np

from flowkv.policy.order.compiled import Array, inner

CELL = np.dtype(
    [
        ("older", np.int32),  # neighbours in the ghost's list, -1 at its ends
        ("newer", np.int32),
        ("up", np.int32),  # the block above it, -1 for a root
        ("next", np.int32),  # the first block that was below it, -1: none yet
        ("depth", np.int32),
        ("line", np.int32),  # its lineage, 30 bits; -1: not known yet
        ("birth", np.int32),  # changes whenever the number names another block
        ("bond", np.int32),  # the birth of the block above it when they were linked
        ("ghost", np.int32),  # 1: LRU would hold it
        ("here", np.int32),  # 1: it is resident
    ]
)

# Entries of the book: the ends of the list; how many blocks LRU holds, how many are resident, how
# many fit (0: not known yet); time, last block and lineage of the request at hand; numbers given;
# the most that remained after an eviction lately, and before that; evictions. A lineage is in the
# sample if it has none of the bits of the mask. `FOUND`: blocks of the request that LRU would have.
OLDEST, NEWEST, GHOSTS, HERE, ROOM, NOW, LAST, LINE = range(8)
SERIAL, BIRTHS, PEAK, OLD_PEAK, COUNT, MASK, FOUND = range(8, 15)
BOOK_SIZE = 16
EPOCH = 64  # evictions after which what remained after those before them no longer counts
SERIALS = (1 << 30) - 1


def fresh_cells(n: int) -> Array:
    """Cells of blocks that nothing is known of."""
    cells = np.zeros(n, CELL)
    for name in ("older", "newer", "up", "next", "line"):
        cells[name] = -1
    return cells


def fresh_book() -> Array:
    """The book of an empty place whose capacity is not known."""
    book = np.zeros(BOOK_SIZE, np.int64)
    book[[OLDEST, NEWEST, LAST]] = -1
    return book


# ---- the list


@inner
def unlink(cells: Array, book: Array, s: int) -> None:
    """Takes a block out of the list."""
    older, newer = cells[s].older, cells[s].newer
    if older >= 0:
        cells[older].newer = newer
    else:
        book[OLDEST] = newer
    if newer >= 0:
        cells[newer].older = older
    else:
        book[NEWEST] = older


@inner
def link_below(cells: Array, book: Array, s: int, newer: int) -> None:
    """Enters a block as the next older one of `newer`; as the newest of all if that is -1."""
    older = cells[newer].older if newer >= 0 else book[NEWEST]
    cells[s].older, cells[s].newer = older, newer
    if older >= 0:
        cells[older].newer = s
    else:
        book[OLDEST] = s
    if newer >= 0:
        cells[newer].older = s
    else:
        book[NEWEST] = s


@inner
def lose(cells: Array, book: Array, s: int) -> None:
    """LRU would not hold this block any more."""
    unlink(cells, book, s)
    cells[s].ghost = 0
    book[GHOSTS] -= 1


@inner
def lose_surplus(cells: Array, book: Array) -> None:
    """LRU gives up what is too much, as far as the capacity is known."""
    if book[ROOM] > 0:
        while book[GHOSTS] > book[ROOM]:
            lose(cells, book, book[OLDEST])


# ---- who belongs to whom


@inner
def mixed(x: int) -> int:
    """A lineage from any number (SplitMix64's finaliser)."""
    y = np.uint64(x) + np.uint64(0x9E3779B97F4A7C15)
    y = (y ^ (y >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    y = (y ^ (y >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int(y >> np.uint64(34))


@inner
def above_of(cells: Array, s: int) -> int:
    """The block above another one, -1 if there is none or it is forgotten."""
    p = cells[s].up
    if p >= 0 and cells[p].birth == cells[s].bond:
        return int(p)
    return -1


@inner
def name(cells: Array, book: Array, s: int, above: int) -> None:
    """A block is seen for the first time, below `above` (-1: not known)."""
    book[BIRTHS] = (book[BIRTHS] & SERIALS) + 1
    cell = cells[s]
    cell.birth, cell.line = book[BIRTHS], book[LINE]
    cell.up, cell.next, cell.depth = above, -1, 0
    if above >= 0:
        cell.bond = cells[above].birth
        cell.depth = cells[above].depth + 1
        if cells[above].next < 0:
            cells[above].next = s


@inner
def line_of(cells: Array, book: Array, slots: Array, known: int) -> int:
    """The lineage of a request whose first `known` blocks were seen before."""
    if known > 0:
        s = slots[known - 1]
        after = cells[s].next
        if after < 0 or known == len(slots) or cells[after].next < 0:
            return int(cells[s].line)
    book[SERIAL] += 1
    return int(mixed(book[SERIAL]))


# ---- what happens


@inner
def arrive(cells: Array, book: Array, slots: Array, session: int, now: int) -> tuple[int, int]:
    """A request uses these known blocks: how many are resident, and how many LRU would have."""
    lose_surplus(cells, book)
    n = len(slots)
    known = n
    while known > 0 and cells[slots[known - 1]].line < 0:
        known -= 1
    book[LINE] = mixed(session) if session >= 0 else line_of(cells, book, slots, known)
    for i in range(known, n):
        name(cells, book, slots[i], slots[i - 1] if i > 0 else -1)
    here = ghosts = 0
    for i in range(n - 1, -1, -1):  # so that the root is the newest
        s = slots[i]
        here += cells[s].here
        if cells[s].ghost == 1:
            ghosts += 1
            unlink(cells, book, s)
            link_below(cells, book, s, -1)
        elif cells[s].here == 1:
            cells[s].ghost = 1
            book[GHOSTS] += 1
            link_below(cells, book, s, -1)
    book[NOW] = now
    book[LAST] = slots[n - 1] if n > 0 else -1
    return here, ghosts


@inner
def come(cells: Array, book: Array, slots: Array, parents: Array, now: int) -> None:
    """Blocks became resident; those that LRU does not hold continue the chain of their request."""
    above = book[LAST] if book[NOW] == now else -1
    for i in range(len(slots)):
        s = slots[i]
        if parents[i] >= 0 and parents[i] < len(cells) and cells[parents[i]].line >= 0:
            above = parents[i]
        elif i == 0 and cells[s].line >= 0:
            above = above_of(cells, s)
        if cells[s].line < 0:
            name(cells, book, s, above if above != s else -1)
            book[LAST] = s
        if cells[s].here == 0:
            cells[s].here = 1
            book[HERE] += 1
        if cells[s].ghost == 0:
            cells[s].ghost = 1
            book[GHOSTS] += 1
            link_below(cells, book, s, above if above >= 0 and cells[above].ghost == 1 else -1)
        above = s


@inner
def go(cells: Array, book: Array, slots: Array, whole: bool) -> None:
    """Blocks are no longer resident here; `whole`: nor would they be with LRU."""
    for s in slots:
        if 0 <= s < len(cells):
            if cells[s].here == 1:
                cells[s].here = 0
                book[HERE] -= 1
            if whole and cells[s].ghost == 1:
                lose(cells, book, s)


@inner
def measure(book: Array) -> None:
    """An eviction is over: what remains tells how many blocks fit.

    Whether a driver makes room before an insert or after it, the most that remains after any of the
    last evictions is what fits, but for the smallest insert.
    """
    book[COUNT] += 1
    if book[COUNT] % EPOCH == 0:
        book[OLD_PEAK], book[PEAK] = book[PEAK], 0
    book[PEAK] = max(book[PEAK], book[HERE])
    book[ROOM] = max(book[PEAK], book[OLD_PEAK], 1)


@inner
def unname(cells: Array, book: Array, s: int) -> None:
    """A number names nothing any more."""
    if book[LAST] == s:
        book[LAST] = -1
    if cells[s].ghost == 1:
        lose(cells, book, s)
    p = above_of(cells, s)
    if p >= 0 and cells[p].next == s:
        cells[p].next = -1
    cells[s].line = cells[s].up = cells[s].next = -1
    cells[s].birth = 0
