"""Chains and their ends: who owns a block, what is a return, and what each block is worth now.

Every request leaves a *tip*, the record of its chain's end. A block belongs to the tip of the last
request that used it, so the blocks of one tip are a stretch of one chain, and at most one of them
is a leaf where parents are known. Tips lie in a vector in the order of their times: those that
reach a bin edge do so in that order too, and one counter per edge finds them without a search.

A tip *returns* when a request comes whose known blocks end at the tip or just before it (the last
block of a chain is often a partial one, that nobody uses again). It learns until then, also when
all its blocks have been given up.
"""

from __future__ import annotations

import numpy as np

from flowkv.policy.hazard.features import (
    GAP,
    INDEX,
    NO_PACE,
    PACE,
    SIGMA,
    SPREAD,
    STOP_PACE,
    describe,
)
from flowkv.policy.hazard.hint import hinted_index
from flowkv.policy.hazard.model import (
    BINS,
    EDGES_NS,
    REACHES,
    bin_of,
    index,
    reach,
    teach,
    teach_reach,
)
from flowkv.policy.order.compiled import Array, inner, kernel
from flowkv.policy.order.heap import put
from flowkv.policy.order.residence import drop
from flowkv.policy.order.slots import MODE, NEVER, parent_of, words
from flowkv.policy.order.static_key import log2

OWN = np.dtype(
    [
        ("tip", np.int32),  # the tip that it belongs to, -1: not known
        ("at", np.int32),  # its place in that chain
        ("up", np.int32),  # the block before it there, -1 for the first
        ("next", np.int32),  # the block after it when last used, -1: none yet
        ("forks", np.int32),  # how often that was another block than before
        ("pause", np.float32),  # moving average of the seconds between forks
        ("forked", np.int64),  # time of the last fork, or of the first use
    ]
)

# Entries of the vector of counters: tips; when the next of them reaches an edge; then, for each
# edge, how many have passed it and when the next one reaches it.
TIPS, NEXT, PASSED = 0, 1, 2
EDGE_COUNT = BINS - 1
REACHED = PASSED + EDGE_COUNT
COUNTERS = REACHED + EDGE_COUNT

SHORT = 1  # how far before a tip a return may end
BRANCHES = 4  # forks from which a block counts as shared
KEY_SCALE = 2.0**-100


@inner
def key_of(value: float) -> int:
    """An index as a key in [2^61, 2^62), in the same order; later than any clock."""
    scaled = np.float64(min(max(value * KEY_SCALE, 2.0**-511), 1.0))
    return int(scaled.view(np.int64))


@inner
def value_of(key: int) -> float:
    """The index that a key stands for; the smallest stands for none."""
    value = np.int64(key).view(np.float64)
    return value / KEY_SCALE if value > 2.0**-511 else 0.0


@kernel
def index_of(tips: Array, traits: Array, rows: Array, model: Array, t: int, now: int) -> float:
    """The index of a tip, computed once per age bin, for its beginning."""
    tip = tips[t]
    b = bin_of(now - tip.time)
    if b == tip.bin:
        return float(traits[t, INDEX])
    value = -1.0
    if tip.eta >= 0:
        age = max(tip.time + EDGES_NS[b] - tip.told, 0)
        value = hinted_index(tip.eta * 1e-9, traits[t, SIGMA], age * 1e-9)
    if value < 0.0:
        value = index(model, rows[t], b)
    tip.bin = b
    traits[t, INDEX] = value
    return value


@inner
def worth_of(mind: tuple[Array, ...], s: int, now: int) -> float:
    """What a block is worth: its tip's index, as far as returns reach it, and that of its forks."""
    own, tips, traits, rows, model, _counters = mind
    mine = own[s]
    t = mine.tip
    value = 0.0
    if t >= 0:
        short = tips[t].blocks - 1 - mine.at
        value = index_of(tips, traits, rows, model, t, now)
        if short < REACHES:
            value *= reach(model, max(short, 0))
    if mine.forks >= BRANCHES:
        value += 1.0 / (max(mine.pause, 1e-3) + (now - mine.forked) * 1e-9)
    return value


@inner
def rekey(order: tuple[Array, ...], mind: tuple[Array, ...], s: int, now: int) -> None:
    """Gives a resident leaf its present place among the leaves, while this order decides."""
    nodes, terms, heaps, state = order
    if state[MODE] != 0:  # another key is in use; see `flowkv.policy.hedge.hedge`
        return
    nodes[s].key = key_of(worth_of(mind, s, now))
    i, row = nodes[s].place, nodes[s].row
    if i >= 0:
        put(heaps[row], nodes["place"], state[row], i, words(nodes, terms, s, row))


@inner
def give_up(order: tuple[Array, ...], mind: tuple[Array, ...], s: int, now: int) -> None:
    """Ends the residence of a slot; the parent that becomes a leaf by that is judged as one.

    It is judged first, so that it moves once.
    """
    nodes, terms, heaps, state = order
    p = parent_of(nodes, s)
    if p >= 0 and nodes[p].kids == 1:
        rekey(order, mind, p, now)
    drop(nodes, terms, heaps, state, s)


@inner
def rekey_tip(order: tuple[Array, ...], mind: tuple[Array, ...], t: int, now: int) -> None:
    """Re-keys the leaves of a tip: one where parents are known, else any number."""
    nodes = order[0]
    own, tips = mind[0], mind[1]
    s, found = tips[t].low, False
    while s >= 0 and own[s].tip == t:
        if nodes[s].birth != 0:
            if not found:
                tips[t].low, found = s, True
            if nodes[s].kids == 0:
                rekey(order, mind, s, now)
            p = nodes[s].parent
            if p >= 0 and nodes[p].birth == nodes[s].bond:
                break
        up = own[s].up
        if up >= 0 and own[up].at >= own[s].at:
            break
        s = up
    if not found:
        tips[t].low = -1  # all have gone: `follow` or `join` tells when one is back


@inner
def await_edge(tips: Array, counters: Array, i: int) -> None:
    """Notes when the next tip reaches edge `i`."""
    c = counters[PASSED + i]
    counters[REACHED + i] = tips[c].time + EDGES_NS[i + 1] if c < counters[TIPS] else NEVER


@inner
def await_next(counters: Array) -> int:
    """Notes when the next tip reaches any edge; returns which."""
    first = 0
    for i in range(1, EDGE_COUNT):
        if counters[REACHED + i] < counters[REACHED + first]:
            first = i
    counters[NEXT] = counters[REACHED + first]
    return first


@kernel
def await_all(tips: Array, counters: Array) -> None:
    """Notes when the next tip reaches each edge."""
    for i in range(EDGE_COUNT):
        await_edge(tips, counters, i)
    await_next(counters)


@kernel
def advance(order: tuple[Array, ...], mind: tuple[Array, ...], now: int) -> None:
    """Lets the tips that reach an edge by `now` learn it and be judged anew, in order of time.

    So what is known at a time does not depend on how often anybody has asked in between.
    """
    _own, tips, _traits, rows, model, counters = mind
    while counters[NEXT] <= now:
        i = await_next(counters)
        if counters[NEXT] > now:
            break
        c = counters[PASSED + i]
        if tips[c].done == 0:
            teach(model, rows[c], i, 0)
        rekey_tip(order, mind, c, counters[NEXT])
        counters[PASSED + i] = c + 1
        await_edge(tips, counters, i)


@inner
def averaged(old: float, new: float, share: float) -> float:
    """A moving average whose first value is taken as it is."""
    return new if old == NO_PACE else old + share * (new - old)


@inner
def succeed(tips: Array, traits: Array, t: int, q: int) -> None:
    """Tip `t` is the turn after `q`, or a first one: what its history is."""
    tips[t].turn = 0
    traits[t, GAP] = traits[t, PACE] = NO_PACE
    traits[t, SPREAD] = 1.0
    for k in range(4):
        traits[t, STOP_PACE + k] = NO_PACE
    tips[t].turn = 0
    if q < 0:
        return
    gap = log2(max((tips[t].time - tips[q].time) * 1e-9, 0.1))
    tips[t].turn = tips[q].turn + 1
    traits[t, GAP] = gap
    traits[t, PACE] = averaged(traits[q, PACE], gap, 0.3)
    if traits[q, PACE] != NO_PACE:
        off = abs(gap - traits[q, PACE])
        traits[t, SPREAD] = traits[q, SPREAD] + 0.3 * (off - traits[q, SPREAD])
    for k in range(4):
        traits[t, STOP_PACE + k] = traits[q, STOP_PACE + k]
    k = STOP_PACE + (tips[q].stop & 3)
    traits[t, k] = averaged(traits[q, k], gap, 0.4)


@inner
def judge(mind: tuple[Array, ...], t: int) -> None:
    """Describes a tip anew; its index is computed when it is asked for."""
    _own, tips, traits, rows, _model, _counters = mind
    describe(tips, traits, rows, t)
    tips[t].bin = -1


@inner
def begin(mind: tuple[Array, ...], now: int, q: int, known: int, blocks: int) -> int:
    """A new tip, the turn after `q` (-1: a first one). There is room for it."""
    _own, tips, traits, _rows, _model, counters = mind
    t = counters[TIPS]
    counters[TIPS] += 1
    tip = tips[t]
    tip.time = now
    tip.eta = tip.slot = tip.low = tip.output = -1
    tip.blocks, tip.known, tip.seen = blocks, known, 0
    tip.stop = tip.done = 0
    succeed(tips, traits, t, q)
    judge(mind, t)
    for i in range(EDGE_COUNT):
        if counters[PASSED + i] == t:
            await_edge(tips, counters, i)
    counters[NEXT] = min(counters[NEXT], now + EDGES_NS[1])
    return int(t)


@inner
def follow(own: Array, tips: Array, t: int, s: int, now: int) -> None:
    """Block `s` is the next one of the chain of tip `t`."""
    before = tips[t].slot
    mine = own[s]
    if mine.tip < 0:
        mine.next, mine.forks, mine.pause, mine.forked = -1, 0, -1.0, now
    if before >= 0:
        above = own[before]
        if above.next >= 0 and above.next != s:
            pause = (now - above.forked) * 1e-9
            above.pause = pause if above.forks == 0 else 0.7 * above.pause + 0.3 * pause
            above.forks += 1
            above.forked = now
        above.next = s
    mine.tip, mine.at, mine.up = t, tips[t].seen, before
    tips[t].seen += 1
    tips[t].slot = tips[t].low = s


@inner
def find_return(mind: tuple[Array, ...], slots: Array, now: int) -> tuple[int, int]:
    """How many leading blocks are known, and the tip that returns with them, or -1. It learns."""
    own, tips, _traits, rows, model, _counters = mind
    known = 0
    while known < len(slots) and own[slots[known]].tip >= 0:
        known += 1
    if known == 0:
        return 0, -1
    q = own[slots[known - 1]].tip
    short = max(tips[q].blocks - known, 0)
    if short > SHORT or (short > 0 and known == 1):
        return known, -1
    if tips[q].done == 0:
        tips[q].done = 1
        teach(model, rows[q], bin_of(now - tips[q].time), 1)
        teach_reach(model, short)
    return known, int(q)
