"""`Policy.insert` over the compiled order: how a block begins its life, and what prolongs it."""

from __future__ import annotations

import numpy as np

from flowkv.policy.order.arc_lists import arrive
from flowkv.policy.order.compiled import SLOT_MASK, Array, inner, kernel, room_for
from flowkv.policy.order.ranking import attend, hold, reorder, settle_leaf
from flowkv.policy.order.residence import drop, expire, link, touch
from flowkv.policy.order.rings import enlist
from flowkv.policy.order.slots import (
    BIRTHS,
    COUNT,
    EXTRA,
    KNOWN,
    LASTING,
    LEASED,
    NEVER,
    RANK_SHIFT,
    RANKED,
    TAU,
    TENANTS,
    parent_of,
)
from flowkv.policy.order.static_key import aged

LEASE_S, MAX_AGE, RANK, RANK_S, EXPLICIT = 0, 1, 2, 3, 4


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
def sign(nodes: Array, terms: Array, s: int, now: int, lease: Array) -> None:
    """Gives a slot the lease and rank of an insert, where they are more than what it has."""
    marks = nodes[s].marks
    limit = NEVER if lease[MAX_AGE] == NEVER else now + lease[MAX_AGE]
    if not marks & LEASED or (lease[LEASE_S] == NEVER and limit == NEVER):
        marks &= ~LEASED
    else:
        terms[s].lease = max(terms[s].lease, lease[LEASE_S])
        terms[s].limit = max(terms[s].limit, limit)
    if lease[RANK] >= marks >> RANK_SHIFT:
        marks &= (1 << RANK_SHIFT) - 1 - RANKED
        marks |= lease[RANK] << RANK_SHIFT
        if lease[RANK_S] != NEVER:
            marks |= RANKED
            terms[s].fall = now + lease[RANK_S]
    nodes[s].marks = marks


@inner
def begin_terms(nodes: Array, terms: Array, s: int, now: int, lease: Array, extra: int) -> None:
    """Gives a new resident the lease and rank of its insert, and what its worth adds."""
    marks = nodes[s].marks | KNOWN | lease[RANK] << RANK_SHIFT
    if lease[LEASE_S] != NEVER or lease[MAX_AGE] != NEVER:
        marks |= LEASED
        terms[s].lease = lease[LEASE_S]
        terms[s].limit = NEVER if lease[MAX_AGE] == NEVER else now + lease[MAX_AGE]
    if lease[RANK_S] != NEVER:
        marks |= RANKED
        terms[s].fall = now + lease[RANK_S]
    if extra != 0:
        marks |= EXTRA
        terms[s].extra = extra
    nodes[s].marks = marks


@inner
def settle(
    nodes: Array, terms: Array, heaps: Array, state: Array, s: int, depth: int, tenant: int
) -> None:
    """Makes `s` resident, without parent, lease or rank yet."""
    state[COUNT] += 1
    state[BIRTHS] += 1
    node = nodes[s]
    node.birth = state[BIRTHS]
    node.parent = -1
    node.kids = 0
    node.live = 0
    node.depth = depth
    arrive(nodes, terms, state, s)
    node.marks &= LASTING
    terms[s].tenant = tenant
    enlist(terms, state, TENANTS + tenant, s)
    if terms[s].pins > 0:
        hold(nodes, terms, heaps, state, s)


@kernel
def insert(
    nodes: Array,
    terms: Array,
    heaps: Array,
    state: Array,
    slots: Array,
    parents: Array,
    lease: Array,
    said: tuple[int, int, int],
) -> int:
    """Returns `room_for`: nothing is done unless that is 0.

    `lease` is what `LEASE_S` and so on index; `said` = (now, tenant, what its worth adds).
    """
    room = room_for(len(nodes), slots)
    if room != 0:
        return int(room)
    now, tenant, extra = said
    now = expire(nodes, terms, heaps, state, now)
    old, new = np.int64(0), np.int64(0)
    known = False
    for i in range(len(slots)):
        s, p = slots[i], parents[i]
        if nodes[s].birth != 0 and nodes[s].live < 0:
            drop(nodes, terms, heaps, state, s)  # expired: it begins a new life
        key = now
        if nodes[s].marks & KNOWN:
            key = nodes[s].key
            if nodes[s].last != now:
                if not known or key != old:
                    old, new, known = key, aged(key, now, state[TAU]), True
                key = new
        p = live_parent(nodes, s, p)
        if nodes[s].birth != 0:
            if nodes[s].last != now:
                touch(nodes, terms, heaps, state, s, key)
            if lease[EXPLICIT]:
                sign(nodes, terms, s, now, lease)
                reorder(nodes, terms, heaps, state, s)
                attend(nodes, terms, heaps, state, s)
            if parent_of(nodes, s) >= 0:
                continue
        else:
            depth = min(nodes[p].depth + 1, SLOT_MASK) if p >= 0 else min(i, SLOT_MASK)
            settle(nodes, terms, heaps, state, s, depth, tenant)
            nodes[s].key, nodes[s].last = key, now
            begin_terms(nodes, terms, s, now, lease, extra)
        if p >= 0:
            link(nodes, terms, heaps, state, s, p)
        settle_leaf(nodes, terms, heaps, state, s)
        if nodes[s].place < 0 and nodes[s].marks & LEASED:
            attend(nodes, terms, heaps, state, s)  # held: its lease runs all the same
    return 0
