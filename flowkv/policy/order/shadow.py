"""A place that holds only numbers: which of them are leaves, and which of those goes next.

What a rule would have kept (`flowkv.policy.hedge`), or what the optimum keeps
(`flowkv.policy.optimum`): leaf first, by a static key, without leases, pins or anything else that
the order itself knows. `cells` says where blocks belong: records with the block above each (`up`,
which counts while its `birth` equals `bond`) and its `depth`.
"""

from __future__ import annotations

import numpy as np

from flowkv.policy.order.compiled import SLOT_BITS, SLOT_MASK, Array, inner, put, take

SHADE = np.dtype(
    [
        ("key", np.int64),  # static key; NO_KEY: never used
        ("kids", np.int32),  # blocks below it that this shadow holds
        ("place", np.int32),  # among the leaves; INNER: no leaf; AWAY: not held
    ]
)
INNER, AWAY = -1, -2
NO_KEY = np.iinfo(np.int64).min

LEAVES, HELD = 0, 1  # columns of the counts of a shadow


def fresh_shades(*shape: int) -> Array:
    """Shadows that hold nothing."""
    shades = np.zeros(shape, SHADE)
    shades["place"], shades["key"] = AWAY, NO_KEY
    return shades


@inner
def above_of(cells: Array, s: int) -> int:
    """The block above another one, -1 if there is none or it is forgotten."""
    p = cells[s].up
    if p >= 0 and cells[p].birth == cells[s].bond:
        return int(p)
    return -1


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
def shadow_drop(shade: Array, leaves: Array, count: Array, cells: Array, s: int) -> None:
    """A block is given up."""
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
