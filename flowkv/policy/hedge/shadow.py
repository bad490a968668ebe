"""Places that hold only numbers, one per candidate: what would it have hit?

A candidate is judged by letting it decide. The shadows of the decayed counts serve a sample of the
conversations and hold the sampled share of what the real place holds, so that their hits per block
are about those that the candidate would have at full size (Waldspurger et al., SHARDS, FAST 2015);
where the place is small the sample is everything. The shadow of the learned order serves everybody,
while another order decides: at a large place a small sample tells too little about it.

Every shadow has a heap of its leaves. A learned index changes by itself, so its shadow gives up a
few hundredths of its blocks at once, after a look at all its leaves.
"""

from __future__ import annotations

import numpy as np

from flowkv.policy.hazard.tips import key_of, worth_of
from flowkv.policy.hedge.ghost import above_of
from flowkv.policy.order.compiled import SLOT_BITS, SLOT_MASK, Array, inner
from flowkv.policy.order.heap import put, sift_down, take
from flowkv.policy.order.static_key import aged

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


def fresh_shades(rows: int, n: int) -> Array:
    """Shadows that hold nothing."""
    shades = np.zeros((rows, n), SHADE)
    shades["place"], shades["key"] = AWAY, NO_KEY
    return shades


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
def drop(shade: Array, leaves: Array, count: Array, cells: Array, s: int) -> int:
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
def serve(
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
def keep(shade: Array, leaves: Array, count: Array, cells: Array, slots: Array, now: int) -> None:
    """These blocks became resident."""
    for i in range(len(slots) - 1, -1, -1):
        s = slots[i]
        if shade[s].place == AWAY:
            if shade[s].key == NO_KEY:
                shade[s].key = now
            hold(shade, leaves, count, cells, s)


@inner
def trim(shade: Array, leaves: Array, count: Array, cells: Array, capacity: int) -> None:
    """Gives up what is too much."""
    while count[HELD] > capacity:
        drop(shade, leaves, count, cells, leaves[0, 1] & SLOT_MASK)


@inner
def thin(shade: Array, leaves: Array, count: Array, cells: Array, mask: int) -> None:
    """Gives up the ends of chains that are not in the sample."""
    for first in range(len(cells)):
        s = first
        while s >= 0 and shade[s].place >= 0 and cells[s].line & mask != 0:
            s = drop(shade, leaves, count, cells, s)


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
        drop(shade, leaves, count, cells, s)
