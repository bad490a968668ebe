"""What a learned order tells a prefetcher: which chains are worth bringing back, at whose cost."""

from __future__ import annotations

import numpy as np

from flowkv.policy.hazard.features import INDEX
from flowkv.policy.hazard.model import bin_of
from flowkv.policy.hazard.tips import TIPS, advance, give_up, value_of, worth_of
from flowkv.policy.order.calls import change_pins, choose
from flowkv.policy.order.compiled import SLOT_MASK, Array, fold, inner, kernel
from flowkv.policy.order.residence import expire
from flowkv.policy.order.slots import (
    BLOCKED,
    COUNT,
    DEAD,
    DEAD_CLASS,
    DIGEST,
    DUES,
    QUEUED_CLASS,
    class_of,
)

ASKED = np.dtype(
    [
        ("tip", np.int64),  # what was judged: a number made of the tip's history
        ("bin", np.int64),
        ("worth", np.float64),
    ]
)
"""By slot: what the end of a chain was worth when it was last asked for."""


LEAST_KEY = 1 << 61  # keys that stand for a worth begin there; see `tips.key_of`


@inner
def weakest_worth(order: tuple[Array, ...], mind: tuple[Array, ...], s: int, now: int) -> float:
    """What the leaf `s` is worth, also while the leaves are sorted by another rule than that."""
    key = order[0][s].key
    if key >= LEAST_KEY:
        return float(value_of(key))
    t = mind[0][s].tip
    if t < 0:
        return 0.0
    seen, known = mind[1][t].bin, mind[2][t, INDEX]
    worth = worth_of(mind, s, now)
    mind[1][t].bin, mind[2][t, INDEX] = seen, known
    return float(worth)


@inner
def asked_worth(mind: tuple[Array, ...], asked: Array, t: int, s: int, now: int) -> float:
    """What the end `s` of tip `t` is worth, computed once per age bin; changes nothing else."""
    tips, traits = mind[1], mind[2]
    tip, mine = tips[t], asked[s]
    name = tip.time * 4 + tip.stop + (tip.output << 20) + tip.blocks
    if tip.eta >= 0:
        name += tip.told * 3 + tip.eta
    b = bin_of(now - tip.time)
    if mine.tip != name or mine.bin != b:
        seen, known = tip.bin, traits[t, INDEX]
        mine.worth = worth_of(mind, s, now)
        tip.bin, traits[t, INDEX] = seen, known
        mine.tip, mine.bin = name, b
    return float(mine.worth)


@kernel
def wanted(
    order: tuple[Array, ...],
    mind: tuple[Array, ...],
    asked: Array,
    slots: Array,
    rates: Array,
    now: int,
) -> int:
    """Fills the ends of absent chains that are worth more than what would go next, best first.

    `asked` has a record for each slot, `slots` room for one at least. Ties: the older tip first.
    """
    nodes, terms, heaps, state = order
    own, tips, counters = mind[0], mind[1], mind[5]
    now = expire(nodes, terms, heaps, state, now)
    advance(order, mind, now)
    least, n = 0.0, 0
    if state[COUNT] > state[BLOCKED]:
        first = heaps[choose(heaps, state, now), 0, 1] & SLOT_MASK
        least = weakest_worth(order, mind, first, now)
    for t in range(counters[TIPS]):
        s = tips[t].slot
        if tips[t].done != 0 or s < 0 or own[s].tip != t or nodes[s].birth != 0:
            continue
        if nodes[s].marks & DEAD:
            continue
        value = asked_worth(mind, asked, t, s, now)
        if value <= least or (n == len(slots) and value <= rates[n - 1]):
            continue
        n = min(n + 1, len(slots))
        i = n - 1
        while i > 0 and rates[i - 1] < value:
            rates[i], slots[i] = rates[i - 1], slots[i - 1]
            i -= 1
        rates[i], slots[i] = value, s
    return int(n)


@kernel
def displace(
    order: tuple[Array, ...],
    mind: tuple[Array, ...],
    protected: Array,
    victims: Array,
    now: int,
    rate: float,
) -> int:
    """As `calls.evict`, while what goes next is worth less than `rate`; returns how many."""
    nodes, terms, heaps, state = order
    now = expire(nodes, terms, heaps, state, now)
    advance(order, mind, now)
    change_pins(nodes, terms, heaps, state, protected, 1)
    most, found = min(state[COUNT] - state[BLOCKED], len(victims)), 0
    while found < most:
        s = heaps[choose(heaps, state, now), 0, 1] & SLOT_MASK
        where = class_of(nodes, s)
        if where == QUEUED_CLASS:
            break
        if where > DEAD_CLASS and weakest_worth(order, mind, s, now) >= rate:
            break
        victims[found] = s
        found += 1
        fold(state, DIGEST, s)
        give_up(order, mind, s, now)
        if state[DUES] > 0 and heaps[DUES, 0, 0] <= now:
            expire(nodes, terms, heaps, state, now)
    change_pins(nodes, terms, heaps, state, protected, -1)
    return int(found)
