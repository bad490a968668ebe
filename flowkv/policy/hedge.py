"""The shipped default: what serves the traffic at hand best, and never worse than recency."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowkv.policy.base import NEVER_NS, NO_SLOTS, NO_VISIT, Policy, Slots, Visit
from flowkv.policy.config import HedgeConfig, configure
from flowkv.policy.hazard.compiled import decay, key_of, rekey, speaker, worth_of
from flowkv.policy.hazard.index import HazardIndex
from flowkv.policy.order.compiled import (
    CLOCK,
    DIGEST,
    ETA,
    KNOWN,
    LISTS,
    MODE,
    SLOT_BITS,
    SLOT_MASK,
    TAU,
    Array,
    aged,
    attend,
    delist,
    enlist,
    enlist_behind,
    fold,
    inner,
    kernel,
    put,
    reorder,
    sift_down,
    take,
)
from flowkv.policy.order.leaf import LeafOrder, as_slots

# What plain LRU would have here, exactly: a whole place of the same size, without the blocks.
#
# The reference that a hedge is measured against. A list of blocks by the time of their last use,
# in which the blocks of one request lie root first, so that the oldest is always a leaf:
# leaf-first LRU at a few nanoseconds a block. Beside it, what really lies here, so that both can
# be compared request by request; and the lineage of each block, by which requests are sampled.
#
# *Lineage.* A request that goes on where an earlier one ended, or but for its last block, belongs
# to the same conversation and inherits its lineage. One that branches off in the middle begins
# another.

CELL = np.dtype(
    [
        ("before", np.int32),  # neighbours in the ring of ghosts: the newer, the older
        ("after", np.int32),
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

# Entries of the book: how many blocks LRU holds, how many are resident, how many fit (0: not known
# yet); time, last block and lineage of the request at hand; numbers given; the most that remained
# after an eviction lately, and before that; evictions. A lineage is in the sample if it has none of
# the bits of the mask. `FOUND`: blocks of the request that LRU would have. Last comes the front of
# the ring of ghosts, the newest.
GHOSTS, HERE, ROOM, NOW, LAST, LINE, SERIAL, BIRTHS, PEAK, OLD_PEAK, COUNT, MASK, FOUND = range(13)
BOOK_SIZE = LISTS + 1
EPOCH = 64  # evictions after which what remained after those before them no longer counts
SERIALS = (1 << 30) - 1


def fresh_cells(n: int) -> Array:
    """Cells of blocks that nothing is known of."""
    cells = np.zeros(n, CELL)
    for name in ("up", "next", "line"):
        cells[name] = -1
    return cells


def fresh_book() -> Array:
    """The book of an empty place whose capacity is not known."""
    book = np.zeros(BOOK_SIZE, np.int64)
    book[LAST] = -1
    return book


# ---- the list


@inner
def ghost_lose(cells: Array, book: Array, s: int) -> None:
    """LRU would not hold this block any more."""
    delist(cells, book, 0, s)
    cells[s].ghost = 0
    book[GHOSTS] -= 1


@inner
def lose_surplus(cells: Array, book: Array) -> None:
    """LRU gives up what is too much, as far as the capacity is known."""
    if book[ROOM] > 0:
        while book[GHOSTS] > book[ROOM]:
            ghost_lose(cells, book, cells[book[LISTS] - 1].before)


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
            delist(cells, book, 0, s)
            enlist(cells, book, 0, s)
        elif cells[s].here == 1:
            cells[s].ghost = 1
            book[GHOSTS] += 1
            enlist(cells, book, 0, s)
    book[NOW] = now
    book[LAST] = slots[n - 1] if n > 0 else -1
    return here, ghosts


@inner
def ghost_insert(cells: Array, book: Array, slots: Array, parents: Array, now: int) -> None:
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
            if above >= 0 and cells[above].ghost == 1:
                enlist_behind(cells, s, above)
            else:
                enlist(cells, book, 0, s)
        above = s


@inner
def ghost_remove(cells: Array, book: Array, slots: Array, whole: bool) -> None:
    """Blocks are no longer resident here; `whole`: nor would they be with LRU."""
    for s in slots:
        if 0 <= s < len(cells):
            if cells[s].here == 1:
                cells[s].here = 0
                book[HERE] -= 1
            if whole and cells[s].ghost == 1:
                ghost_lose(cells, book, s)


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
        ghost_lose(cells, book, s)
    p = above_of(cells, s)
    if p >= 0 and cells[p].next == s:
        cells[p].next = -1
    cells[s].line = cells[s].up = cells[s].next = -1
    cells[s].birth = 0


# Places that hold only numbers, one per candidate: what would it have hit?
#
# A candidate is judged by letting it decide. The shadows of the decayed counts serve a sample of
# the conversations and hold the sampled share of what the real place holds, so that their hits
# per block are about those that the candidate would have at full size (Waldspurger et al.,
# SHARDS, FAST 2015); where the place is small the sample is everything. The shadow of the learned
# order serves everybody, while another order decides: at a large place a small sample tells too
# little about it.
#
# Every shadow has a heap of its leaves. A learned index changes by itself, so its shadow gives up a
# few hundredths of its blocks at once, after a look at all its leaves.

SHADE = np.dtype(
    [
        ("key", np.int64),  # static key; NO_KEY: never used
        ("kids", np.int32),  # blocks below it that this shadow holds
        ("place", np.int32),  # among the leaves; INNER: no leaf; AWAY: not held
    ]
)
INNER, AWAY = -1, -2
NO_KEY = np.iinfo(np.int64).min
SLACK_BITS = 5  # the learned shadow's size may be off by a 32nd

LEAVES, HELD = 0, 1  # columns of the counts of a shadow


def fresh_shades(*shape: int) -> Array:
    """Shadows that hold nothing."""
    shades = np.zeros(shape, SHADE)
    shades["place"], shades["key"] = AWAY, NO_KEY
    return shades


def longer(old: Array, new: Array) -> Array:
    """`new`, which begins with what was in `old`, a shorter vector, or several."""
    new[..., : old.shape[-1]] = old
    return new


def wider(heaps: Array, width: int) -> Array:
    """A heap of so many entries, or several, with what was in `heaps`."""
    made = np.zeros((*heaps.shape[:-2], width, 2), np.int64)
    made[..., : heaps.shape[-2], :] = heaps
    return made


@inner
def stand(shade: Array, leaves: Array, count: Array, cells: Array, s: int, i: int) -> None:
    """A block takes entry `i` of the leaves, whoever had it, and goes where its key says."""
    tie = (SLOT_MASK - min(cells[s].depth, SLOT_MASK)) << SLOT_BITS | s
    put(leaves, shade["place"], count[LEAVES], i, (shade[s].key, tie))


@inner
def lift(shade: Array, leaves: Array, count: Array, cells: Array, s: int) -> None:
    """A block stands among the leaves, according to its key."""
    i = shade[s].place
    if i < 0:
        i = count[LEAVES]
        count[LEAVES] += 1
    stand(shade, leaves, count, cells, s, i)


@inner
def sink(shade: Array, leaves: Array, count: Array, s: int) -> None:
    """A leaf is none any more."""
    take(leaves, shade["place"], count[LEAVES], shade[s].place)
    count[LEAVES] -= 1


@inner
def bared(shade: Array, cells: Array, s: int) -> int:
    """The held block that becomes a leaf once `s` is given up, -1 for none."""
    p = above_of(cells, s)
    return int(p) if p >= 0 and shade[p].kids == 1 and shade[p].place != AWAY else -1


@inner
def shadow_drop(shade: Array, leaves: Array, count: Array, cells: Array, s: int) -> int:
    """A block is given up; returns the one above it if that is a leaf now, else -1."""
    p, q, i = above_of(cells, s), bared(shade, cells, s), shade[s].place
    if q >= 0 and i >= 0:  # it takes its place
        stand(shade, leaves, count, cells, q, i)
    elif i >= 0:
        sink(shade, leaves, count, s)
    shade[s].place = AWAY
    count[HELD] -= 1
    if p >= 0:
        shade[p].kids -= 1
    if q >= 0 and i < 0:
        lift(shade, leaves, count, cells, q)
    return int(q)


@inner
def hold(shade: Array, leaves: Array, count: Array, cells: Array, s: int) -> None:
    """A block is held from now on, and stands where its key says; those below it come first."""
    if shade[s].place == AWAY:
        shade[s].place = INNER
        count[HELD] += 1
        p = above_of(cells, s)
        if p >= 0:
            shade[p].kids += 1
            if shade[p].place >= 0:
                sink(shade, leaves, count, p)
    if shade[s].kids == 0:
        lift(shade, leaves, count, cells, s)


# ---- decayed counts


@inner
def shadow_serve(
    shade: Array, leaves: Array, count: Array, cells: Array, tau: int, slots: Array, now: int
) -> int:
    """A request uses these blocks: how many are held. Those that are resident are held next."""
    # Blocks of one prefix mostly share their history, hence their key: compute it once.
    old, new, hits = np.int64(NO_KEY), np.int64(now), 0
    for i in range(len(slots) - 1, -1, -1):  # so that what is no leaf in the end never was
        s = slots[i]
        if shade[s].key != old:
            old = shade[s].key
            new = aged(old, now, tau) if old != NO_KEY else np.int64(now)
        shade[s].key = new
        if shade[s].place != AWAY:
            hits += 1
            hold(shade, leaves, count, cells, s)
        elif cells[s].here == 1:
            hold(shade, leaves, count, cells, s)
    return hits


@inner
def shadow_keep(
    shade: Array, leaves: Array, count: Array, cells: Array, slots: Array, now: int
) -> None:
    """These blocks became resident."""
    for i in range(len(slots) - 1, -1, -1):
        s = slots[i]
        if shade[s].place == AWAY:
            if shade[s].key == NO_KEY:
                shade[s].key = now
            hold(shade, leaves, count, cells, s)


@inner
def shadow_trim(shade: Array, leaves: Array, count: Array, cells: Array, capacity: int) -> None:
    """Gives up what is too much."""
    while count[HELD] > capacity:
        shadow_drop(shade, leaves, count, cells, leaves[0, 1] & SLOT_MASK)


@inner
def thin(shade: Array, leaves: Array, count: Array, cells: Array, mask: int) -> None:
    """Gives up the ends of chains that are not in the sample."""
    for first in range(len(cells)):
        s = first
        while s >= 0 and shade[s].place >= 0 and cells[s].line & mask != 0:
            s = shadow_drop(shade, leaves, count, cells, s)


# ---- the learned order


@inner
def appraise(shade: Array, mind: tuple[Array, ...], s: int, now: int) -> None:
    """Writes the key of a block as of now."""
    shade[s].key = key_of(worth_of(mind, s, now))


@inner
def serve_learned(
    shade: Array,
    leaves: Array,
    count: Array,
    cells: Array,
    mind: tuple[Array, ...],
    slots: Array,
    now: int,
) -> int:
    """As `serve`; also for blocks that became resident."""
    hits = 0
    for i in range(len(slots) - 1, -1, -1):
        s = slots[i]
        held = shade[s].place != AWAY
        hits += held
        if held or cells[s].here == 1:
            if shade[s].kids == 0:
                appraise(shade, mind, s, now)
            hold(shade, leaves, count, cells, s)
    return hits


@inner
def trim_learned(
    shade: Array,
    leaves: Array,
    count: Array,
    cells: Array,
    mind: tuple[Array, ...],
    capacity: int,
    now: int,
) -> None:
    """Gives up what is too much, if that is worth a look at all leaves."""
    slack = capacity >> SLACK_BITS
    if count[HELD] <= capacity + slack:
        return
    n = count[LEAVES]
    for i in range(n):
        s = leaves[i, 1] & SLOT_MASK
        appraise(shade, mind, s, now)
        leaves[i, 0] = shade[s].key
    for i in range(n // 2 - 1, -1, -1):
        sift_down(leaves, shade["place"], n, i)
    while count[HELD] > capacity - slack:
        s = leaves[0, 1] & SLOT_MASK
        p = bared(shade, cells, s)
        if p >= 0:
            appraise(shade, mind, p, now)  # first, so that it moves once
        shadow_drop(shade, leaves, count, cells, s)


# Which candidate decides: what each has hit more than LRU, and when that is reason to change.
#
# Row 0 is LRU, and has the benefit of the doubt. Another row takes over once it is *surely*
# better: by more than `SURE` standard deviations of what it gains per block, over the last half
# hour or so. It hands back at once if, since it took over, it has really cost more than a small
# stake, however sure one was; and then LRU stays until half as many blocks again have been asked
# for, and until what was lost is small against that, or the next try is sure to bring it back. So
# a try is paid from a loss that nobody notices, 0.002 of all blocks, or from what was gained
# before.

# Entries of the sums: seconds of the last request; blocks so far; hits more than LRU's so far; the
# same lately with the sum of its squares, since the last change; blocks when LRU last had to help
# out; surplus at the last change. Then three per row: blocks lately, hits more than LRU's, squares.
TIME, BLOCKS, SURPLUS, LATELY, SQUARES, FAILED, ENTRY, ROWS = range(8)
WEIGHT, GAIN, SPREAD = range(3)

HALF_LIFE_S = 1800.0
SURE, SURE_SAMPLED, SURE_IN_DEBT, SURE_IN_PLACE = 1.0, 2.0, 3.0, 2.0
DOUBT = 24.0  # blocks: as if one request had already gone the other way
STAKE, SHARE = 40.0, 0.0004  # of a try: blocks, and of all blocks so far
DEBT, DEBT_SHARE = 24.0, 0.0005  # with which a try may begin
MOST, MOST_SHARE = 64.0, 0.0006  # of all tries
WAIT = 1.5
HYSTERESIS = 0.02
LN2 = 0.6931471805599453


def fresh_sums(rows: int) -> Array:
    """Nothing has been seen."""
    return np.zeros(ROWS + 3 * rows)


@inner
def witness(sums: Array, now: int, blocks: int, more: int) -> None:
    """A request of so many blocks has come; `more` of them were resident than LRU would have."""
    gone = now * 1e-9 - sums[TIME]
    if gone > 0.0:
        fade = decay(LN2 * gone / HALF_LIFE_S)
        sums[LATELY] *= fade
        sums[SQUARES] *= fade
        for i in range(ROWS, len(sums)):
            sums[i] *= fade
        sums[TIME] = now * 1e-9
    sums[BLOCKS] += blocks
    sums[SURPLUS] += more
    sums[LATELY] += more
    sums[SQUARES] += float(more) * more


@inner
def credit(sums: Array, row: int, blocks: int, more: int) -> None:
    """A candidate would have hit `more` blocks than LRU, of a request of so many."""
    i = ROWS + 3 * row
    sums[i + WEIGHT] += blocks
    sums[i + GAIN] += more
    sums[i + SPREAD] += float(more) * more


@inner
def rate_of(sums: Array, row: int) -> tuple[float, float]:
    """Hits more than LRU's per block, and the variance of that."""
    i = ROWS + 3 * row
    weight = max(sums[i + WEIGHT], 1.0)
    return sums[i + GAIN] / weight, (sums[i + SPREAD] + DOUBT * DOUBT) / (weight * weight)


@inner
def surely_best(sums: Array, rows: int) -> int:
    """The row that gains most for sure, 0 if none does."""
    best, most = 0, 0.0
    for a in range(1, rows):
        rate, variance = rate_of(sums, a)
        least = rate - (SURE if a == rows - 1 else SURE_SAMPLED) * np.sqrt(variance)
        if least > most:
            best, most = a, least
    return best


@inner
def in_debt(sums: Array, row: int, debt: float, share: float) -> bool:
    """Whether more was lost than that, and the row is not sure to bring it back."""
    if sums[SURPLUS] >= -(debt + share * sums[BLOCKS]):
        return False
    rate, variance = rate_of(sums, row)
    return bool(rate <= SURE_IN_DEBT * np.sqrt(variance))


@inner
def decide(sums: Array, rows: int, active: int) -> int:
    """The row that is to decide from now on."""
    best = surely_best(sums, rows)
    if active == 0:
        early = sums[BLOCKS] < WAIT * sums[FAILED]
        return 0 if early or in_debt(sums, best, DEBT, DEBT_SHARE) else int(best)
    since = sums[SURPLUS] - sums[ENTRY]
    lost = since < -(STAKE + SHARE * sums[BLOCKS])
    broke = since < 0.0 and in_debt(sums, active, MOST, MOST_SHARE)
    if lost or broke or sums[LATELY] < -SURE_IN_PLACE * np.sqrt(sums[SQUARES] + DOUBT * DOUBT):
        return 0
    if best not in (0, active):
        rate, variance = rate_of(sums, best)
        mine, also = rate_of(sums, active)
        if rate - (1.0 + HYSTERESIS) * mine > SURE * np.sqrt(variance + also):
            return best
    return int(active)


@inner
def turn(sums: Array, chosen: int) -> None:
    """Another row decides from now on."""
    if chosen == 0:
        sums[FAILED] = sums[BLOCKS]
    sums[ENTRY] = sums[SURPLUS]
    sums[LATELY] = sums[SQUARES] = 0.0


# One compiled function per thing that a hedge does beside the order that decides.
#
# Arguments: `watch` is what is kept about the place itself: cells, book (`flowkv.policy.hedge`)
# and sums (`flowkv.policy.hedge`). `shadows` = shades, heaps and counts of some rows.
# `learned` = shade, leaves and count of the learned order's shadow. For `mind` and `order` see
# `flowkv.policy.hazard.compiled`.

LEARNED, ASIDE = 0, 2
"""Modes of the order: by the learned index; by a static key, while the index only learns."""

SAMPLED = 1 << 8


@kernel
def access(watch: tuple[Array, ...], slots: Array, session: int, now: int, active: int) -> int:
    """A request uses these known blocks.

    Returns:
        The row that is to decide from now on, `SAMPLED` added if the request is in the sample; -1
        if a slot has no cell, and nothing was done.
    """
    cells, book, sums = watch
    for s in slots:
        if s < 0 or s >= len(cells):
            return -1
    rows = (len(sums) - ROWS) // 3
    here, book[FOUND] = arrive(cells, book, slots, session, now)
    more = here - book[FOUND]
    witness(sums, now, len(slots), more)
    if active == rows - 1:
        credit(sums, active, len(slots), more)
    chosen = decide(sums, rows, active)
    if chosen != active:
        turn(sums, chosen)
    return int(chosen) + (SAMPLED if book[LINE] & book[MASK] == 0 else 0)


@inner
def crowded(counts: Array, width: int, n: int) -> bool:
    """Whether a heap might be too narrow for `n` leaves more."""
    most = 0
    for k in range(len(counts)):
        most = max(most, counts[k, LEAVES])
    return bool(most + n > width)


@kernel
def serve(
    watch: tuple[Array, ...], shadows: tuple[Array, ...], taus: Array, slots: Array, now: int
) -> bool:
    """A sampled request uses these blocks. False if the heaps are too narrow; nothing was done."""
    cells, _book, sums = watch
    shades, heaps, counts = shadows
    if crowded(counts, heaps.shape[1], len(slots)):
        return False
    lru = shadow_serve(shades[0], heaps[0], counts[0], cells, taus[0], slots, now)
    for k in range(1, len(taus)):
        hits = shadow_serve(shades[k], heaps[k], counts[k], cells, taus[k], slots, now)
        credit(sums, k, len(slots), hits - lru)
    return True


@kernel
def keep(cells: Array, shadows: tuple[Array, ...], slots: Array, now: int) -> bool:
    """A sampled request's blocks became resident. As `serve`."""
    shades, heaps, counts = shadows
    if crowded(counts, heaps.shape[1], len(slots)):
        return False
    for k in range(len(shades)):
        shadow_keep(shades[k], heaps[k], counts[k], cells, slots, now)
    return True


@kernel
def come(
    watch: tuple[Array, ...], shadows: tuple[Array, ...], slots: Array, parents: Array, now: int
) -> int:
    """Blocks became resident; they have cells.

    Returns:
        0 if they are not in the sample, 1 if the sampled shadows hold them now, -1 if `keep` has
        still to see to that, with wider heaps.
    """
    cells, book, _sums = watch
    ghost_insert(cells, book, slots, parents, now)
    if book[LINE] & book[MASK] != 0:
        return 0
    return 1 if keep(cells, shadows, slots, now) else -1


@kernel
def go(
    watch: tuple[Array, ...],
    shadows: tuple[Array, ...],
    slots: Array,
    sample: int,
    grown: bool,
) -> None:
    """Blocks were given up here; so do the sampled shadows, where they have `grown`."""
    cells, book, _sums = watch
    ghost_remove(cells, book, slots, False)
    measure(book)
    if grown:
        trim(watch, shadows, sample)


@inner
def trim(watch: tuple[Array, ...], shadows: tuple[Array, ...], sample: int) -> None:
    """The sampled shadows give up what is too much; the sample shrinks as the place grows."""
    cells, book, _sums = watch
    shades, heaps, counts = shadows
    while book[ROOM] // (book[MASK] + 1) > sample:
        book[MASK] = 2 * book[MASK] + 1
        for k in range(len(shades)):
            thin(shades[k], heaps[k], counts[k], cells, book[MASK])
    capacity = max(book[ROOM] // (book[MASK] + 1), 1)
    for k in range(len(shades)):
        shadow_trim(shades[k], heaps[k], counts[k], cells, capacity)


@kernel
def learn(
    watch: tuple[Array, ...],
    learned: tuple[Array, ...],
    mind: tuple[Array, ...],
    slots: Array,
    now: int,
    asked: bool,
) -> bool:
    """The learned order's shadow sees a request, if `asked`, or what became resident. As `serve`.

    Its surplus goes when the next request comes.
    """
    cells, book, sums = watch
    shade, leaves, count = learned
    if count[LEAVES] + len(slots) > len(leaves):
        return False
    if asked and book[ROOM] > 0:
        trim_learned(shade, leaves, count, cells, mind, book[ROOM], now)
    hits = serve_learned(shade, leaves, count, cells, mind, slots, now)
    if asked:
        row = (len(sums) - ROWS) // 3 - 1
        credit(sums, row, len(slots), hits - book[FOUND])
    return True


@kernel
def lose(watch: tuple[Array, ...], slots: Array) -> None:
    """Blocks left, for another reason than that they were too many: LRU has lost them too."""
    cells, book, _sums = watch
    ghost_remove(cells, book, slots, True)


@kernel
def drop(cells: Array, shadows: tuple[Array, ...], slots: Array, forget: bool) -> None:
    """Shadows lose what left like that; `forget`: and what they know of it."""
    shades, heaps, counts = shadows
    for s in slots:
        if 0 <= s < len(cells):
            for k in range(len(shades)):
                if shades[k, s].place != AWAY:
                    shadow_drop(shades[k], heaps[k], counts[k], cells, s)
                if forget:
                    shades[k, s].key, shades[k, s].kids = NO_KEY, 0


@kernel
def forget(watch: tuple[Array, ...], slots: Array) -> None:
    """These numbers name nothing any more."""
    cells, book, _sums = watch
    for s in slots:
        if 0 <= s < len(cells):
            unname(cells, book, s)


# ---- another row decides


@kernel
def follow_learned(order: tuple[Array, ...], mind: tuple[Array, ...]) -> None:
    """The learned order decides from now on: every leaf is judged by its index."""
    nodes, terms, heaps, state = order
    state[MODE], state[TAU] = LEARNED, 1
    fold(state, DIGEST, LEARNED)
    for s in range(len(nodes)):
        if nodes[s].marks & ETA:
            nodes[s].marks &= ~ETA  # the index knows the hints itself
            reorder(nodes, terms, heaps, state, s)
            attend(nodes, terms, heaps, state, s)
        if nodes[s].birth != 0 and nodes[s].kids == 0:
            rekey(order, mind, s, state[CLOCK])


@kernel
def follow_counts(order: tuple[Array, ...], shade: Array, tau: int, known: bool) -> None:
    """Decayed counts decide from now on; those of a shadow that serves everybody are `known`.

    Else every block begins with a count of 1, from its last use on.
    """
    nodes, terms, heaps, state = order
    state[MODE], state[TAU] = ASIDE, tau
    fold(state, DIGEST, ASIDE + tau)
    for s in range(len(nodes)):
        if nodes[s].marks & KNOWN:
            nodes[s].key = nodes[s].last
            if known and shade[s].key != NO_KEY:
                nodes[s].key = max(shade[s].key, nodes[s].last)
            reorder(nodes, terms, heaps, state, s)


@kernel
def copy_place(cells: Array, learned: tuple[Array, ...], mind: tuple[Array, ...], now: int) -> None:
    """The learned order's shadow begins with what is really here. Its heap is wide enough."""
    shade, leaves, count = learned
    count[LEAVES] = count[HELD] = 0
    for s in range(len(cells)):
        shade[s].place, shade[s].kids = AWAY, 0
    for s in range(len(cells)):
        if cells[s].here == 1:
            appraise(shade, mind, s, now)
            hold(shade, leaves, count, cells, s)


# The default: several rules watch the same traffic, and the one that would hit most decides.

FIRST_LEAVES = 1024


class Hedge(HazardIndex):
    """LRU until something else is surely better here, and again as soon as it is not.

    Candidates: LRU; decayed counts (`LfuTtl`) with half-lives of 30 s, 2 and 10 minutes; and the
    learned index (`HazardIndex`), which learns whoever decides. Each has a *shadow*, a place that
    holds only numbers, and is judged by what that hits (`flowkv.policy.hedge`). LRU's own is
    of full size, always: so how many hits more than LRU there really were is known exactly
    (`flowkv.policy.hedge`), and a rule that disappoints is dismissed before the damage passes
    a small share of all blocks (`flowkv.policy.hedge`). A model that was brought
    (`load_model`) and predicts well here spares the learned order the wait for such evidence.

    One order holds the blocks, whoever decides; another rule sorts the same leaves by another key.
    So pins, leases, ranks, tenants and queued requests go on as they were. Hints of a time are
    obeyed by every rule, the learned one making most of them. Chains are offered to a prefetch
    while the learned index decides, and not otherwise.

    Memory: as `HazardIndex` and about 130 bytes per slot.

    Args:
        **options: Fields of `HedgeConfig`.

    Raises:
        ConfigError: If an option is unknown or out of range.
    """

    name = "auto"

    def __init__(self, **options: object) -> None:
        config = configure(HedgeConfig, self.name, options)
        taus = np.array([0, *(round(tau_s * 1e9) for tau_s in config.taus_s)], np.int64)
        rows = len(taus)
        self._watch = (
            fresh_cells(0),
            fresh_book(),
            fresh_sums(rows + 1),
        )
        self._sampled: tuple[NDArray[Any], ...] = (
            fresh_shades(rows, 0),
            np.zeros((rows, FIRST_LEAVES, 2), np.int64),
            np.zeros((rows, 2), np.int64),
        )
        self._learned: tuple[NDArray[Any], ...] = (
            fresh_shades(0),
            np.zeros((FIRST_LEAVES, 2), np.int64),
            np.zeros(2, np.int64),
        )
        self._taus, self._active, self._grown = taus, 0, False
        self._sample = config.sample
        super().__init__(**{f: getattr(config, f) for f in ("lease_s", "max_age_s", "leases")})
        self.config = config
        self._state[MODE], self._state[TAU] = ASIDE, 0

    # ---- what happens

    def insert(self, now_ns: int, slots: Slots, parents: Slots, **said: Any) -> None:
        """See `LeafOrder.insert`."""
        slots, parents = as_slots(slots), as_slots(parents)
        super().insert(now_ns, slots, parents, **said)
        now = self._state[CLOCK]
        kept = come(self._watch, self._sampled, slots, parents, now)
        if kept != 0:
            self._grown = True
        while kept < 0:
            self._widen_sampled()
            kept = 0 if keep(self._watch[0], self._sampled, slots, now) else -1
        if self._active != len(self._taus):
            self._learn(slots, False)

    def access(self, now_ns: int, slots: Slots, visit: Visit = NO_VISIT) -> None:
        """See `Policy.access`. Known blocks that are not resident teach as well."""
        slots = as_slots(slots)
        super().access(now_ns, slots, visit)
        now = self._state[CLOCK]
        said = (visit.session, now, self._active)
        answer = access(self._watch, slots, *said)
        if answer < 0:
            slots = slots[(slots >= 0) & (slots < len(self._watch[0]))]
            answer = access(self._watch, slots, *said)
        chosen = answer % SAMPLED
        if chosen == 0 and len(self._mind[4]) > 1 and self._proved():
            chosen = len(self._taus)
            turn(self._watch[2], chosen)
        if chosen != self._active:
            self._turn(chosen)
        if chosen != len(self._taus):
            self._learn(slots, True)
        if answer >= SAMPLED:
            while not serve(self._watch, self._sampled, self._taus, slots, now):
                self._widen_sampled()
            self._grown = True

    def remove(self, slots: Slots) -> None:
        """See `LeafOrder.remove`."""
        slots = as_slots(slots)
        super().remove(slots)
        self._drop(slots, False)
        lose(self._watch, slots)

    def forget(self, slots: Slots) -> None:
        """See `Policy.forget`."""
        slots = as_slots(slots)
        super().forget(slots)
        self._drop(slots, True)
        forget(self._watch, slots)

    def hint(self, now_ns: int, slots: Slots, eta_ns: int, sigma: float = 0.5) -> None:
        """See `Policy.hint`. The learned index hears of it whoever decides."""
        super().hint(now_ns, slots, eta_ns, sigma)
        if self._active != len(self._taus) and eta_ns < NEVER_NS:
            LeafOrder.hint(self, now_ns, slots, eta_ns, sigma)

    # ---- what is decided

    def evict(self, now_ns: int, n: int, protected: Collection[int] = ()) -> Slots | None:
        """See `LeafOrder.evict`."""
        victims = super().evict(now_ns, n, protected)
        if victims is not None and len(victims):
            self._give_up(victims)
        return victims

    def displace(self, now_ns: int, n: int, rate: float, protected: Collection[int] = ()) -> Slots:
        """See `Policy.displace`. For what is certain only, unless the learned index decides."""
        if self._active != len(self._taus):
            return Policy.displace(self, now_ns, n, rate, protected)
        victims = super().displace(now_ns, n, rate, protected)
        if len(victims):
            self._give_up(victims)
        return victims

    def wanted(self, now_ns: int, n: int) -> tuple[Slots, NDArray[np.float64]]:
        """See `Policy.wanted`. Nothing, unless the learned index decides."""
        if self._active != len(self._taus):
            return NO_SLOTS.copy(), np.empty(0)
        return super().wanted(now_ns, n)

    def priority(self, slot: int) -> float:
        """As the order that decides: an index in 1/s, or a static key in nanoseconds."""
        if self._active != len(self._taus):
            return LeafOrder.priority(self, slot)
        return super().priority(slot)

    @property
    def chosen(self) -> str:
        """The rule that decides at present: "lru", "lfu-ttl 30 s", "hazard"."""
        if self._active == len(self._taus):
            return "hazard"
        tau_s = self._taus[self._active] / 1e9
        return f"lfu-ttl {tau_s:g} s" if self._active else "lru"

    @property
    def surplus(self) -> int:
        """Blocks that hit so far, less those that plain LRU would have hit."""
        return int(self._watch[2][SURPLUS])

    # ---- parts

    def _proved(self) -> bool:
        """Whether a model that was brought predicts well here, and no rule has failed yet."""
        return speaker(self._mind[4]) == 1 and self._watch[2][FAILED] == 0.0

    def _turn(self, chosen: int) -> None:
        """Another row decides from now on."""
        learned = len(self._taus)
        if self._active == learned:
            if len(self._learned[1]) < len(self._watch[0]):
                self._widen_learned(len(self._watch[0]))
            now = self._state[CLOCK]
            copy_place(self._watch[0], self._learned, self._mind, now)
        self._active = chosen
        if chosen == learned:
            follow_learned(self._order, self._mind)
        else:
            everybody = self._watch[1][MASK] == 0
            shade, tau = self._sampled[0][chosen], self._taus[chosen]
            follow_counts(self._order, shade, tau, everybody)

    def _give_up(self, victims: Slots) -> None:
        """Notes victims; shadows follow, where anything was added to them."""
        go(self._watch, self._sampled, victims, self._sample, self._grown)
        self._grown = False

    def _learn(self, slots: Slots, asked: bool) -> None:
        """Shows these blocks to the learned order's shadow."""
        said = (slots, self._state[CLOCK], asked)
        while not learn(self._watch, self._learned, self._mind, *said):
            self._widen_learned(2 * len(self._learned[1]) + len(slots))

    def _drop(self, slots: Slots, forget: bool) -> None:
        """Takes blocks out of all shadows."""
        cells = self._watch[0]
        drop(cells, self._sampled, slots, forget)
        shade, leaves, count = self._learned
        drop(cells, (shade[None], leaves[None], count[None]), slots, forget)

    def _widen_learned(self, width: int) -> None:
        shade, leaves, count = self._learned
        self._learned = shade, wider(leaves, width), count

    def _widen_sampled(self) -> None:
        shades, heaps, counts = self._sampled
        self._sampled = shades, wider(heaps, 2 * heaps.shape[1]), counts

    def _grow(self, room: int) -> None:
        super()._grow(room)
        new = len(self._arrays[0])
        cells, book, sums = self._watch
        self._watch = longer(cells, fresh_cells(new)), book, sums
        shades, shade = self._sampled[0], self._learned[0]
        self._sampled = longer(shades, fresh_shades(len(shades), new)), *self._sampled[1:]
        self._learned = longer(shade, fresh_shades(new)), *self._learned[1:]
