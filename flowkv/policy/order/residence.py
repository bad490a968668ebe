"""Coming, going and running out: how the records and heaps follow what happens to a slot."""

from __future__ import annotations

from flowkv.policy.order.arc_lists import part, promote
from flowkv.policy.order.compiled import Array, inner, kernel
from flowkv.policy.order.heap import put, sift_down
from flowkv.policy.order.ranking import attend, hold, leave, release, reorder, settle_leaf
from flowkv.policy.order.rings import delist, enlist
from flowkv.policy.order.slots import (
    BLOCKED,
    BRANCHED,
    CLOCK,
    CLOCK_LIMIT,
    COUNT,
    DEAD,
    DEFAULT_RANK,
    DUES,
    ETA,
    EXPIRED,
    FIXED,
    HELD_FAST,
    HINTED,
    LATEST,
    LEASED,
    LEAVES,
    LISTS,
    RANK_SHIFT,
    RANKED,
    RUN_OUT,
    SECOND,
    STALE,
    TENANTS,
    TIMED,
    TWICE,
    own_due,
    parent_of,
    words,
)


@inner
def lose_live_kid(nodes: Array, terms: Array, heaps: Array, state: Array, p: int) -> None:
    """A child of `p` left or expired: with the last one, its own lease begins to matter."""
    nodes[p].live -= 1
    if nodes[p].live == 0 and nodes[p].marks & LEASED:
        attend(nodes, terms, heaps, state, p)


@inner
def are_alike(nodes: Array, s: int, t: int, row: int) -> bool:
    """Whether `t` may simply take the place of `s` in heap `row`."""
    if (nodes[s].marks | nodes[t].marks) & TIMED != 0 or row >= HINTED:
        return False
    return bool(row == (SECOND if nodes[t].marks & TWICE else LEAVES))


@kernel
def drop(nodes: Array, terms: Array, heaps: Array, state: Array, s: int) -> None:
    """Ends the residence of a slot; its children, if any, become roots."""
    p = parent_of(nodes, s)
    if nodes[s].live < 0:
        state[EXPIRED] -= 1
        delist(terms, state, RUN_OUT, s)
    else:
        delist(terms, state, TENANTS + terms[s].tenant, s)
        if p >= 0:
            lose_live_kid(nodes, terms, heaps, state, p)
    part(nodes, state, s)
    state[HELD_FAST] -= nodes[s].marks & FIXED != 0
    nodes[s].marks &= ~FIXED
    held = nodes[s].held
    nodes[s].birth = 0
    nodes[s].held = nodes[s].kids = nodes[s].live = 0
    state[COUNT] -= 1
    state[BLOCKED] -= held > 0
    if p >= 0:
        nodes[p].kids -= 1
    i, row = nodes[s].place, nodes[s].row
    plain = i >= 0 and p >= 0 and nodes[p].kids == 0 and nodes[p].held == 0
    if plain and are_alike(nodes, s, p, row):  # the parent takes its place
        nodes[s].place = -1
        nodes[p].row = row
        put(heaps[row], nodes["place"], state[row], i, words(nodes, terms, p, row))
        return
    if i >= 0:
        leave(nodes, terms, heaps, state, s)
    elif terms[s].due >= 0:
        attend(nodes, terms, heaps, state, s)
    if p >= 0 and held > 0:
        release(nodes, terms, heaps, state, p)
    if p >= 0:
        settle_leaf(nodes, terms, heaps, state, p)


@inner
def link(nodes: Array, terms: Array, heaps: Array, state: Array, s: int, p: int) -> None:
    """Makes `p` the parent of the live slot `s`."""
    nodes[s].parent = p
    nodes[s].bond = nodes[p].birth
    nodes[p].kids += 1
    nodes[p].live += 1
    if nodes[p].kids > 1:
        nodes[p].marks |= BRANCHED
    if nodes[p].place >= 0:
        i, row = nodes[p].place, nodes[p].row
        free = nodes[s].place < 0 and nodes[s].kids == 0 and nodes[s].held == 0
        if free and are_alike(nodes, p, s, row):  # it takes the parent's place
            nodes[p].place = -1
            nodes[s].row = row
            put(heaps[row], nodes["place"], state[row], i, words(nodes, terms, s, row))
            return
        leave(nodes, terms, heaps, state, p)
    elif terms[p].due >= 0:
        attend(nodes, terms, heaps, state, p)
    if nodes[s].held > 0:
        hold(nodes, terms, heaps, state, p)


@inner
def run_out(nodes: Array, terms: Array, heaps: Array, state: Array, s: int) -> None:
    """A block and all below it have expired."""
    p = parent_of(nodes, s)
    nodes[s].live = -1
    state[EXPIRED] += 1
    delist(terms, state, TENANTS + terms[s].tenant, s)
    enlist(terms, state, RUN_OUT, s)
    attend(nodes, terms, heaps, state, s)
    reorder(nodes, terms, heaps, state, s)
    if p >= 0:
        lose_live_kid(nodes, terms, heaps, state, p)


@inner
def sweep(nodes: Array, terms: Array, heaps: Array, state: Array) -> None:
    """Ends the leases of all blocks of the tenant that was invalidated."""
    head = s = state[LISTS + TENANTS + state[STALE] - 1] - 1
    while s >= 0:
        nodes[s].marks |= LEASED
        terms[s].limit = -LATEST
        attend(nodes, terms, heaps, state, s)
        s = terms[s].after
        if s == head:
            break
    state[STALE] = 0


@kernel
def expire(nodes: Array, terms: Array, heaps: Array, state: Array, now: int) -> int:
    """Moves the clock, lets happen what happens by then, and returns the (clamped) time.

    A block runs out when its own lease has and every child has: expiry = max(own, children's).
    """
    now = max(min(now, CLOCK_LIMIT), state[CLOCK])
    state[CLOCK] = now
    if state[STALE] != 0:
        sweep(nodes, terms, heaps, state)
    while state[DUES] > 0 and heaps[DUES, 0, 0] <= now:
        s = heaps[DUES, 0, 1]
        marks = nodes[s].marks
        if marks & LEASED and nodes[s].live == 0 and own_due(nodes, terms, s) <= now:
            run_out(nodes, terms, heaps, state, s)
            continue
        if marks & RANKED and terms[s].fall <= now:
            marks &= (1 << RANK_SHIFT) - 1 - RANKED
            nodes[s].marks = marks | DEFAULT_RANK << RANK_SHIFT
        reorder(nodes, terms, heaps, state, s)
        attend(nodes, terms, heaps, state, s)
    return now


@inner
def touch(nodes: Array, terms: Array, heaps: Array, state: Array, s: int, key: int) -> None:
    """Gives a live slot its new key, ends its hints and renews its lease."""
    nodes[s].key = key
    nodes[s].last = state[CLOCK]
    i = nodes[s].place
    if promote(nodes, state, s) or nodes[s].marks & (TIMED | DEAD):
        nodes[s].marks &= ~(ETA | DEAD)
        reorder(nodes, terms, heaps, state, s)
        attend(nodes, terms, heaps, state, s)
    elif i >= 0:
        row = nodes[s].row
        heaps[row, i, 0], heaps[row, i, 1] = words(nodes, terms, s, row)
        sift_down(heaps[row], nodes["place"], state[row], i)
