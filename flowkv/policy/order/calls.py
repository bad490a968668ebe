"""One compiled function per call of the `Policy` protocol, over records, heaps and lists of slots.

Every function that knows the time takes the clock forward first (`expire`), so that what happens by
itself is settled before anything is decided. Arguments common to all: `nodes` and `terms`
[capacity] records, `heaps` [4, capacity, 2], `state` [LISTS + lists].

numba's cache looks at the time stamp of this file only: after an edit of what it calls, delete the
`.nbi` files in `__pycache__` (the tests do so).
"""

from __future__ import annotations

import numpy as np

from flowkv.policy.order.arc_lists import arc_row, learn, remember, trim, unremember
from flowkv.policy.order.compiled import SLOT_LIMIT, SLOT_MASK, Array, fold, inner, kernel
from flowkv.policy.order.ranking import attend, hold, release, reorder
from flowkv.policy.order.residence import drop, expire, sweep, touch
from flowkv.policy.order.slots import (
    ARC,
    BLOCKED,
    BRANCHED,
    CLASS_SHIFT,
    CLOCK,
    CLOCK_LIMIT,
    COUNT,
    DEAD,
    DIGEST,
    DUES,
    ETA,
    EXPIRED,
    HINTED,
    LATEST,
    LEAVES,
    LISTS,
    MODE,
    NEVER,
    QUEUED,
    STALE,
    TAU,
    TENANTS,
    key_in,
)
from flowkv.policy.order.static_key import aged


@kernel
def access(nodes: Array, terms: Array, heaps: Array, state: Array, slots: Array, now: int) -> None:
    """Renews what is resident and not expired; nothing revives an expired block but `insert`.

    Of what is not resident only the hints end.
    """
    now = expire(nodes, terms, heaps, state, now)
    old, new = np.int64(0), np.int64(0)
    known = False
    for s in slots:
        if s < 0 or s >= len(nodes):
            continue
        if nodes[s].birth == 0 or nodes[s].live < 0:
            if nodes[s].birth == 0:
                learn(nodes, state, s)
                nodes[s].marks &= ~(ETA | DEAD)
            continue
        # Blocks of one prefix mostly share their history, hence their key: compute it once.
        if not known or nodes[s].key != old:
            old = nodes[s].key
            new = aged(old, now, state[TAU])
            known = True
        touch(nodes, terms, heaps, state, s, new)


@kernel
def assign(
    nodes: Array, terms: Array, heaps: Array, state: Array, slots: Array, keys: Array
) -> None:
    """Gives resident slots keys that were computed elsewhere."""
    for i in range(len(slots)):
        s = slots[i]
        if 0 <= s < len(nodes) and nodes[s].birth != 0:
            nodes[s].key = keys[i]
            reorder(nodes, terms, heaps, state, s)


@kernel
def remove(nodes: Array, terms: Array, heaps: Array, state: Array, slots: Array) -> None:
    """Drops what is resident."""
    for s in slots:
        if 0 <= s < len(nodes) and nodes[s].birth != 0:
            drop(nodes, terms, heaps, state, s)


@kernel
def forget(nodes: Array, terms: Array, heaps: Array, state: Array, slots: Array) -> None:
    """Ends what outlives residence, but for pins and queued requests."""
    for s in slots:
        if 0 <= s < len(nodes) and nodes[s].birth == 0:
            unremember(nodes, terms, state, s)
            nodes[s].marks &= QUEUED


@inner
def change_pins(
    nodes: Array, terms: Array, heaps: Array, state: Array, slots: Array, by: int
) -> None:
    """Adds `by` (1 or -1) to the pins of each slot that there is room for; none fall below 0."""
    for s in slots:
        if 0 <= s < len(nodes):
            before = terms[s].pins
            terms[s].pins = max(before + by, 0)
            if nodes[s].birth != 0 and before == 0 and by > 0:
                hold(nodes, terms, heaps, state, s)
            if nodes[s].birth != 0 and before == 1 and by < 0:
                release(nodes, terms, heaps, state, s)


@kernel
def pin(nodes: Array, terms: Array, heaps: Array, state: Array, slots: Array, by: int) -> int:
    """Adds `by` (1 or -1) to the pins of each. Returns the room it needs, having done nothing."""
    room = 0
    for s in slots:
        room = max(room, s + 1 if len(nodes) <= s < SLOT_LIMIT else 0)
    if room > 0 and by > 0:
        return int(room)
    change_pins(nodes, terms, heaps, state, slots, by)
    return 0


@kernel
def queue(nodes: Array, terms: Array, heaps: Array, state: Array, slots: Array, by: int) -> int:
    """Adds `by` (1 or -1) to the queued requests of each. Returns the room it needs, as `pin`."""
    room = 0
    for s in slots:
        room = max(room, s + 1 if len(nodes) <= s < SLOT_LIMIT else 0)
    if room > 0 and by > 0:
        return int(room)
    for s in slots:
        if 0 <= s < len(nodes):
            terms[s].queued = max(terms[s].queued + by, 0)
            before = nodes[s].marks
            nodes[s].marks = before | QUEUED if terms[s].queued > 0 else before & ~QUEUED
            if before != nodes[s].marks:
                reorder(nodes, terms, heaps, state, s)
    return 0


@kernel
def hint(
    nodes: Array, terms: Array, heaps: Array, state: Array, slots: Array, now: int, eta: int
) -> int:
    """Writes a hint on a chain, last block first; returns the room it needs, having done nothing.

    Never: on the last block and those above, up to one that another chain uses too. A time: on all
    of them, the earliest where there are several.
    """
    room = 0
    for s in slots:
        room = max(room, s + 1 if len(nodes) <= s < SLOT_LIMIT else 0)
    if room > 0:
        return int(room)
    now = expire(nodes, terms, heaps, state, now)
    when = LATEST if eta >= LATEST - now else now + max(eta, 0)
    for i in range(len(slots) - 1, -1, -1):
        s = slots[i]
        if s < 0 or s >= len(nodes):
            continue
        marks = nodes[s].marks
        shared = marks & BRANCHED != 0 or nodes[s].kids > (i < len(slots) - 1)
        if eta == NEVER:
            if shared:
                break
            nodes[s].marks = marks & ~ETA | DEAD
        else:
            if shared and marks & ETA and terms[s].eta > now:
                terms[s].eta = min(terms[s].eta, when)
            else:
                terms[s].eta = when
            nodes[s].marks = marks & ~DEAD | ETA
        reorder(nodes, terms, heaps, state, s)
        attend(nodes, terms, heaps, state, s)
    return 0


@kernel
def invalidate(
    nodes: Array, terms: Array, heaps: Array, state: Array, now: int, tenant: int
) -> None:
    """Notes which tenant's blocks are stale; the next call that decides anything sweeps them."""
    state[CLOCK] = max(min(now, CLOCK_LIMIT), state[CLOCK])
    if state[STALE] != 0 and state[STALE] != tenant + 1:
        sweep(nodes, terms, heaps, state)
    if state[LISTS + TENANTS + tenant] != 0:
        state[STALE] = tenant + 1


@inner
def choose(heaps: Array, state: Array, now: int) -> int:
    """The heap of leaves whose top goes next; one of them is not empty."""
    row = LEAVES if state[MODE] != ARC else arc_row(heaps, state)
    if state[HINTED] == 0:
        return row
    if state[row] == 0:
        return HINTED
    plain = heaps[row, 0, 0] >> CLASS_SHIFT
    hinted = heaps[HINTED, 0, 0] >> CLASS_SHIFT
    if plain != hinted:
        return row if plain < hinted else HINTED
    unused = now - key_in(heaps[row, 0, 0], heaps[row, 0, 1])
    left = -key_in(heaps[HINTED, 0, 0], heaps[HINTED, 0, 1]) - now
    return HINTED if left > unused else row


@kernel
def evict(
    nodes: Array,
    terms: Array,
    heaps: Array,
    state: Array,
    protected: Array,
    victims: Array,
    now: int,
) -> bool:
    """Fills `victims`, or returns False with no slot touched.

    Whatever is neither pinned nor above something pinned can be freed leaf by leaf, so whether it
    will do is known before the first victim is taken: nothing has to be put back.
    """
    now = expire(nodes, terms, heaps, state, now)
    change_pins(nodes, terms, heaps, state, protected, 1)
    enough = state[COUNT] - state[BLOCKED] >= len(victims)
    fold(state, DIGEST, len(victims) if enough else -1)
    if enough:
        for i in range(len(victims)):
            s = heaps[choose(heaps, state, now), 0, 1] & SLOT_MASK
            victims[i] = s
            fold(state, DIGEST, s)
            drop(nodes, terms, heaps, state, s)
            remember(nodes, terms, state, s)
            if state[DUES] > 0 and heaps[DUES, 0, 0] <= now:  # what only this child kept alive
                expire(nodes, terms, heaps, state, now)
        trim(nodes, terms, state)
    change_pins(nodes, terms, heaps, state, protected, -1)
    return bool(enough)


@kernel
def peek(nodes: Array, terms: Array, heaps: Array, state: Array, protected: Array, now: int) -> int:
    """The slot that `evict` would take first, or -1."""
    now = expire(nodes, terms, heaps, state, now)
    change_pins(nodes, terms, heaps, state, protected, 1)
    s = -1
    if state[COUNT] > state[BLOCKED]:
        s = heaps[choose(heaps, state, now), 0, 1] & SLOT_MASK
    change_pins(nodes, terms, heaps, state, protected, -1)
    return int(s)


@kernel
def tick(nodes: Array, terms: Array, heaps: Array, state: Array, now: int) -> int:
    """Moves the clock; returns how many blocks have run out."""
    expire(nodes, terms, heaps, state, now)
    return int(state[EXPIRED])


@kernel
def record(state: Array, answer: Array) -> None:
    """Rolls an answer into the digest."""
    fold(state, DIGEST, len(answer))
    for s in answer:
        fold(state, DIGEST, s)
