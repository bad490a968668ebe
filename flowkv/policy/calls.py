"""One compiled function per call of the `Policy` protocol, over the records and heaps of `order`.

Every function that knows the time takes the clock forward first (`expire`), so that which blocks
have run out is settled before anything is decided. Arguments common to all: `nodes` [capacity]
records, `heaps` [2, capacity, 2], `place` [3, capacity], `state` [STATE_SIZE].

numba's cache looks at the time stamp of this file only: after an edit of `order`, delete the `.nbi`
files in `__pycache__` (the tests do so).
"""

from __future__ import annotations

import numpy as np

from flowkv.policy.order import (
    BIRTHS,
    COUNT,
    DUES,
    EXPIRED,
    GUARD,
    LEAVES,
    LOW,
    NEVER,
    SLOT_LIMIT,
    TAU,
    Array,
    aged,
    drop,
    expire,
    fold,
    inner,
    kernel,
    link,
    parent_of,
    pull,
    push,
    touch,
)


@inner
def room_for(capacity: int, slots: Array) -> int:
    """0 if all slots fit, the capacity that would do, or -1 for a number that is no slot."""
    top = -1
    for s in slots:
        if s < 0 or s >= SLOT_LIMIT:
            return -1
        top = max(top, s)
    return top + 1 if top >= capacity else 0


@inner
def live_parent(nodes: Array, s: int, p: int) -> int:
    """`p` where it may become the parent of `s`, else -1: resident, not expired, not below `s`."""
    if p < 0 or p >= len(nodes) or nodes[p].birth == 0 or nodes[p].live < 0:
        return -1
    q = p
    while q >= 0 and nodes[s].kids > 0:  # only a slot with children can be above another
        if q == s:
            return -1
        q = parent_of(nodes, q)
    return p if p != s else -1


@inner
def settle(
    nodes: Array, heaps: Array, place: Array, state: Array, s: int, birth: tuple[int, ...]
) -> None:
    """Makes `s` resident, without parent yet; `birth` = (now, lease, max age, depth)."""
    now, lease, max_age, depth = birth
    state[COUNT] += 1
    state[BIRTHS] += 1
    node = nodes[s]
    node.birth = state[BIRTHS]
    node.key = now
    node.lease = lease
    node.limit = NEVER if max_age == NEVER else now + max_age
    node.due = node.limit if lease == NEVER else min(now + lease, node.limit)
    node.parent = -1
    node.kids = 0
    node.live = 0
    node.depth = depth
    if node.due != NEVER:
        push(nodes, heaps, place, state, DUES, s)


@kernel
def insert(
    nodes: Array,
    heaps: Array,
    place: Array,
    state: Array,
    slots: Array,
    parents: Array,
    times: tuple[int, ...],
) -> int:
    """`times` = (now, lease, max age). Returns `room_for`: nothing is done unless that is 0."""
    room = room_for(len(nodes), slots)
    if room != 0:
        return int(room)
    now = expire(nodes, heaps, place, state, times[0])
    for i in range(len(slots)):
        s, p = slots[i], parents[i]
        if nodes[s].birth != 0 and nodes[s].live < 0:
            drop(nodes, heaps, place, state, s)  # expired: it begins a new life
        if nodes[s].birth != 0:
            touch(nodes, heaps, place, state, s, aged(nodes[s].key, now, state[TAU]))
            if parent_of(nodes, s) >= 0:
                continue
            p = live_parent(nodes, s, p)
        else:
            p = live_parent(nodes, s, p)
            depth = min(nodes[p].depth + 1, SLOT_LIMIT) if p >= 0 else i
            settle(nodes, heaps, place, state, s, (now, times[1], times[2], depth))
        if p >= 0:
            link(nodes, heaps, place, state, s, p)
        if place[LEAVES, s] < 0 and nodes[s].kids == 0:
            push(nodes, heaps, place, state, LEAVES, s)
    return 0


@kernel
def access(nodes: Array, heaps: Array, place: Array, state: Array, slots: Array, now: int) -> None:
    """Renews what is resident and not expired; nothing revives an expired block but `insert`."""
    now = expire(nodes, heaps, place, state, now)
    old, new = np.int64(0), np.int64(0)
    known = False
    for s in slots:
        if s < 0 or s >= len(nodes) or nodes[s].birth == 0 or nodes[s].live < 0:
            continue
        # Blocks of one prefix mostly share their history, hence their key: compute it once.
        if not known or nodes[s].key != old:
            old = nodes[s].key
            new = aged(old, now, state[TAU])
            known = True
        touch(nodes, heaps, place, state, s, new)


@kernel
def remove(nodes: Array, heaps: Array, place: Array, state: Array, slots: Array) -> None:
    """Drops what is resident."""
    for s in slots:
        if 0 <= s < len(nodes) and nodes[s].birth != 0:
            drop(nodes, heaps, place, state, s)


@inner
def guard(nodes: Array, heaps: Array, place: Array, state: Array, protected: Array) -> int:
    """Marks the protected slots and all above them, hides the leaves; returns how many they are."""
    blocked = 0
    for s in protected:
        q = s if 0 <= s < len(nodes) and nodes[s].birth != 0 else -1
        if q >= 0:
            pull(heaps, place, state, LEAVES, s)
        while q >= 0 and place[GUARD, q] == 0:
            place[GUARD, q] = 1
            blocked += 1
            q = parent_of(nodes, q)
    return blocked


@inner
def unguard(nodes: Array, heaps: Array, place: Array, state: Array, protected: Array) -> None:
    """Takes back what `guard` did; none of the marked was evicted in between."""
    for s in protected:
        q = s if 0 <= s < len(nodes) and nodes[s].birth != 0 else -1
        if q >= 0 and nodes[q].kids == 0 and place[LEAVES, q] < 0:
            push(nodes, heaps, place, state, LEAVES, s)
        while q >= 0 and place[GUARD, q] == 1:
            place[GUARD, q] = 0
            q = parent_of(nodes, q)


@kernel
def evict(
    nodes: Array,
    heaps: Array,
    place: Array,
    state: Array,
    protected: Array,
    victims: Array,
    now: int,
) -> bool:
    """Fills `victims`, or returns False with no slot touched.

    Whatever is neither protected nor above something protected can be freed leaf by leaf, so
    whether it will do is known before the first victim is taken: nothing has to be put back.
    """
    now = expire(nodes, heaps, place, state, now)
    blocked = guard(nodes, heaps, place, state, protected)
    enough = state[COUNT] - blocked >= len(victims)
    fold(state, len(victims) if enough else -1)
    if enough:
        for i in range(len(victims)):
            s = heaps[LEAVES, 0, 1] & LOW
            victims[i] = s
            fold(state, s)
            drop(nodes, heaps, place, state, s)
            expire(nodes, heaps, place, state, now)  # what only this child kept alive
    unguard(nodes, heaps, place, state, protected)
    return bool(enough)


@kernel
def tick(nodes: Array, heaps: Array, place: Array, state: Array, now: int) -> int:
    """Moves the clock; returns how many blocks have run out."""
    expire(nodes, heaps, place, state, now)
    return int(state[EXPIRED])


@kernel
def list_expired(nodes: Array, heaps: Array, place: Array, state: Array, out: Array) -> None:
    """Fills `out` with the `state[EXPIRED]` blocks that have run out, in time proportional to it.

    Expired leaves are the top of the heap, a subtree of it; the others lie above expired leaves.
    """
    out[0] = 0
    found, read = 1, 0
    while read < found:  # a queue of heap positions, turned into slots as it is read
        i = out[read]
        out[read] = heaps[LEAVES, i, 1] & LOW
        read += 1
        for c in (2 * i + 1, 2 * i + 2):
            if c < state[LEAVES] and nodes[heaps[LEAVES, c, 1] & LOW].live < 0:
                out[found] = c
                found += 1
    read = 0
    while read < found:
        p = parent_of(nodes, out[read])
        read += 1
        if p >= 0 and nodes[p].live < 0 and place[GUARD, p] == 0:
            place[GUARD, p] = 1
            out[found] = p
            found += 1
    for s in out:
        place[GUARD, s] = 0


@kernel
def record(state: Array, answer: Array) -> None:
    """Rolls an answer into the digest."""
    fold(state, len(answer))
    for s in answer:
        fold(state, s)
