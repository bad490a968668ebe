"""The calls of the `Policy` protocol that a learned order answers otherwise than a static one.

`order` is what `calls` works on: nodes, terms, heaps, state. `mind` is what is learned from: own
(per slot), tips, traits and rows (per tip), model, counters.
"""

from __future__ import annotations

from flowkv.policy.hazard.features import INDEX, SIGMA
from flowkv.policy.hazard.tips import (
    EDGE_COUNT,
    PASSED,
    TIPS,
    advance,
    await_all,
    begin,
    find_return,
    follow,
    give_up,
    judge,
    rekey,
    rekey_tip,
    value_of,
    worth_of,
)
from flowkv.policy.order import calls
from flowkv.policy.order.calls import change_pins, choose
from flowkv.policy.order.compiled import SLOT_MASK, Array, fold, kernel, room_for
from flowkv.policy.order.ranking import reorder
from flowkv.policy.order.residence import expire
from flowkv.policy.order.slots import (
    BLOCKED,
    CLASS_WORTH,
    CLOCK,
    COUNT,
    DEAD,
    DEFAULT_RANK,
    DIGEST,
    DUES,
    EXPIRED,
    FIRST_CLASS,
    QUEUED_CLASS,
    RANKED,
    class_of,
)


@kernel
def room_needed(capacity: int, slots: Array) -> int:
    """See `room_for`."""
    return int(room_for(capacity, slots))


@kernel
def visit(
    order: tuple[Array, ...], mind: tuple[Array, ...], slots: Array, now: int, blocks: int
) -> int:
    """A request uses these blocks, of `blocks` in all: returns its tip; -1 if there is no room."""
    nodes, terms, heaps, state = order
    own, tips, _traits, _rows, _model, counters = mind
    if room_for(len(nodes), slots) != 0 or counters[TIPS] >= len(tips):
        return -1
    calls.access(nodes, terms, heaps, state, slots, now)
    now = state[CLOCK]
    advance(order, mind, now)
    known, q = find_return(mind, slots, now)
    t = begin(mind, now, q, known, max(blocks, len(slots)))
    for s in slots:
        follow(own, tips, t, s, now)
    rekey_path(order, mind, slots)
    return int(t)


@kernel
def rekey_path(order: tuple[Array, ...], mind: tuple[Array, ...], slots: Array) -> None:
    """Re-keys the resident leaves among these slots, as of now."""
    nodes, now = order[0], order[3][CLOCK]
    for s in slots:
        if nodes[s].birth != 0 and nodes[s].kids == 0:
            rekey(order, mind, s, now)


@kernel
def join(order: tuple[Array, ...], mind: tuple[Array, ...], slots: Array, parents: Array) -> None:
    """Blocks became resident; those not known yet continue a chain. There is room for each.

    A block continues the tip that ends at its parent, at the block before it, or, for the first one
    without a parent, the latest tip while blocks of its request are missing; or begins a tip.
    """
    own, tips, _traits, _rows, _model, counters = mind
    now = order[3][CLOCK]
    for s in slots:  # those that come back, before time passes
        if own[s].tip >= 0:
            mine = tips[own[s].tip]
            if mine.low < 0 or own[mine.low].at < own[s].at:
                mine.low = s
    advance(order, mind, now)
    latest = counters[TIPS] - 1
    for i in range(len(slots)):
        s = slots[i]
        if own[s].tip >= 0:
            continue
        known = 0 <= parents[i] < len(own)  # beyond, nothing is resident
        above = parents[i] if known else (slots[i - 1] if i > 0 else -1)
        t = -1
        if above >= 0:
            t = own[above].tip
            if t >= 0 and tips[t].slot != above:
                t = begin(mind, now, -1, own[above].at + 1, own[above].at + 1)
                tips[t].seen, tips[t].slot = own[above].at + 1, above
        elif latest >= 0 and tips[latest].seen < tips[latest].blocks:
            t = latest
        if t < 0:
            t = begin(mind, now, -1, 0, 0)
        follow(own, tips, t, s, now)
        if tips[t].seen > tips[t].blocks:
            tips[t].blocks = tips[t].seen
            judge(mind, t)
    rekey_path(order, mind, slots)


@kernel
def finish(order: tuple[Array, ...], mind: tuple[Array, ...], t: int, stop: int, out: int) -> None:
    """The request of tip `t` has ended."""
    tips = mind[1]
    tips[t].stop = stop
    tips[t].output = out
    judge(mind, t)
    rekey_tip(order, mind, t, order[3][CLOCK])


@kernel
def announce(
    order: tuple[Array, ...], mind: tuple[Array, ...], slots: Array, eta: int, sigma: float
) -> None:
    """The tip that owns the last of these blocks returns in about `eta`; -1: nothing is known."""
    own, tips, traits = mind[0], mind[1], mind[2]
    nodes, terms, heaps, state = order
    now = state[CLOCK]
    for s in slots:
        if 0 <= s < len(nodes) and nodes[s].marks & DEAD:
            nodes[s].marks &= ~DEAD
            reorder(nodes, terms, heaps, state, s)
    s = slots[len(slots) - 1]
    if s < 0 or s >= len(own) or own[s].tip < 0:
        return
    t = own[s].tip
    tips[t].eta, tips[t].told, tips[t].bin = eta, now, -1
    traits[t, SIGMA] = sigma
    rekey_tip(order, mind, t, now)


@kernel
def remove(order: tuple[Array, ...], mind: tuple[Array, ...], slots: Array) -> None:
    """Drops what is resident; a parent that becomes a leaf is judged as one."""
    nodes, state = order[0], order[3]
    for s in slots:
        if 0 <= s < len(nodes) and nodes[s].birth != 0:
            give_up(order, mind, s, state[CLOCK])


@kernel
def forget(order: tuple[Array, ...], mind: tuple[Array, ...], slots: Array) -> None:
    """These numbers, where not resident, name nothing any more."""
    nodes, own, tips = order[0], mind[0], mind[1]
    for s in slots:
        if 0 <= s < len(own) and nodes[s].birth == 0:
            t = own[s].tip
            if t >= 0 and tips[t].slot == s:
                tips[t].slot, tips[t].seen = own[s].up, own[s].at
            if t >= 0 and tips[t].low == s:
                tips[t].low = own[s].up
            own[s].tip = own[s].up = -1


@kernel
def evict(
    order: tuple[Array, ...],
    mind: tuple[Array, ...],
    protected: Array,
    victims: Array,
    now: int,
) -> bool:
    """As `calls.evict`; a parent that becomes a leaf is judged as one."""
    nodes, terms, heaps, state = order
    now = expire(nodes, terms, heaps, state, now)
    advance(order, mind, now)
    change_pins(nodes, terms, heaps, state, protected, 1)
    enough = state[COUNT] - state[BLOCKED] >= len(victims)
    fold(state, DIGEST, len(victims) if enough else -1)
    if enough:
        for i in range(len(victims)):
            s = heaps[choose(heaps, state, now), 0, 1] & SLOT_MASK
            victims[i] = s
            fold(state, DIGEST, s)
            give_up(order, mind, s, now)
            if state[DUES] > 0 and heaps[DUES, 0, 0] <= now:
                expire(nodes, terms, heaps, state, now)
    change_pins(nodes, terms, heaps, state, protected, -1)
    return bool(enough)


@kernel
def compact(mind: tuple[Array, ...], nodes: Array, keep: Array, ghosts: int) -> int:
    """Drops tips that no longer matter; `keep[t]` becomes a tip's new number, -1 if dropped.

    Kept: tips with a resident block, and of the others that have not returned the latest ones, at
    most `ghosts` and four times as many as there are of the first kind.
    """
    own, tips, traits, rows, _model, counters = mind
    n = counters[TIPS]
    keep[:n] = 0
    live = 0
    for s in range(len(own)):
        t = own[s].tip
        if t >= 0 and nodes[s].birth != 0 and keep[t] == 0:
            keep[t] = 1
            live += 1
    left = ghosts + 4 * live
    for t in range(n - 1, -1, -1):
        if keep[t] == 0 and left > 0 and tips[t].done == 0:
            keep[t] = 1
            left -= 1
    kept = 0
    for t in range(n):
        if keep[t] == 0:
            keep[t] = -1
            continue
        if kept != t:
            tips[kept] = tips[t]
            for k in range(traits.shape[1]):
                traits[kept, k] = traits[t, k]
            for k in range(rows.shape[1]):
                rows[kept, k] = rows[t, k]
        keep[t] = kept
        kept += 1
    for i in range(EDGE_COUNT):
        t = counters[PASSED + i]
        while t < n and keep[t] < 0:
            t += 1
        counters[PASSED + i] = keep[t] if t < n else kept
    for s in range(len(own)):
        if own[s].tip >= 0:
            own[s].tip = keep[own[s].tip]
    counters[TIPS] = kept
    await_all(tips, counters)
    return int(kept)


@kernel
def tick(order: tuple[Array, ...], mind: tuple[Array, ...], now: int) -> int:
    """As `calls.tick`; the tips follow the time as well."""
    nodes, terms, heaps, state = order
    advance(order, mind, expire(nodes, terms, heaps, state, now))
    return int(state[EXPIRED])


@kernel
def worth(order: tuple[Array, ...], mind: tuple[Array, ...], s: int) -> float:
    """What a block is worth as of the last call, in 1/s; whole classes apart lie further."""
    nodes, terms, _heaps, state = order
    own, tips, traits, _rows, _model, _counters = mind
    if nodes[s].kids == 0:
        value = value_of(nodes[s].key)
    else:
        t = own[s].tip
        seen, known = tips[t].bin, traits[t, INDEX]
        value = worth_of(mind, s, state[CLOCK])
        tips[t].bin, traits[t, INDEX] = seen, known  # a question changes nothing
    here = class_of(nodes, s)
    fell = nodes[s].marks & RANKED and terms[s].fall <= state[CLOCK]
    if fell and FIRST_CLASS <= here < QUEUED_CLASS:
        here = FIRST_CLASS + DEFAULT_RANK  # noted only once it may go
    return float((here - FIRST_CLASS - DEFAULT_RANK) * CLASS_WORTH + value)
