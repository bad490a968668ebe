"""The order itself: which leaf goes next, and what happens by itself.

There are binary heaps over the *leaves* only, since nothing else may be given up: a request of 245
blocks rewrites 245 records and moves one heap entry. Which leaf goes next: the expired; those
hinted never to be used again; the others by rank and, among equals, by static key
(`.static_key`); last of all those that a queued request will use. Leaves whose next
use is known by a hint have a heap of their own, furthest first. Another heap, of what happens by
itself, tells whose lease runs out, whose rank falls and whose hint passes next.

Whatever is pinned, and all above it, is in no heap of leaves: `held` counts a slot's reasons. So
an eviction costs nothing per pinned block.
"""

from __future__ import annotations

from flowkv.policy.order.compiled import Array, inner, kernel
from flowkv.policy.order.heap import put, take
from flowkv.policy.order.slots import (
    BLOCKED,
    CLOCK,
    DUES,
    ETA,
    FIRST_CLASS,
    HINTED,
    LEASED,
    LEAVES,
    NEVER,
    QUEUED_CLASS,
    RANKED,
    SECOND,
    TIMED,
    TWICE,
    class_of,
    own_due,
    parent_of,
    words,
)

# ---- what happens by itself


@kernel
def attend(nodes: Array, terms: Array, heaps: Array, state: Array, s: int) -> None:
    """Puts a slot where it belongs in the heap of what happens by itself, or takes it out."""
    when = NEVER
    marks = nodes[s].marks
    if nodes[s].birth != 0 and nodes[s].live >= 0:
        if marks & LEASED and nodes[s].live == 0:
            when = own_due(nodes, terms, s)
        if nodes[s].place >= 0:
            if marks & ETA and terms[s].eta > state[CLOCK]:
                when = min(when, terms[s].eta)
            if marks & RANKED:
                when = min(when, terms[s].fall)
    i = terms[s].due
    if when == NEVER:
        if i >= 0:
            take(heaps[DUES], terms["due"], state[DUES], i)
            state[DUES] -= 1
        return
    if i < 0:
        i = state[DUES]
        state[DUES] += 1
    put(heaps[DUES], terms["due"], state[DUES], i, (when, s))


# ---- the heaps of leaves


@inner
def row_of(nodes: Array, terms: Array, state: Array, s: int) -> int:
    """Which heap of leaves a slot belongs to."""
    marks = nodes[s].marks
    ahead = marks & ETA and terms[s].eta > state[CLOCK]
    if ahead and FIRST_CLASS <= class_of(nodes, s) < QUEUED_CLASS:
        return HINTED
    return SECOND if marks & TWICE else LEAVES


@kernel
def enter(nodes: Array, terms: Array, heaps: Array, state: Array, s: int) -> None:
    """A slot becomes one that may go next."""
    row = row_of(nodes, terms, state, s)
    i = state[row]
    state[row] += 1
    nodes[s].row = row
    put(heaps[row], nodes["place"], state[row], i, words(nodes, terms, s, row))
    if nodes[s].marks & TIMED:
        attend(nodes, terms, heaps, state, s)


@kernel
def leave(nodes: Array, terms: Array, heaps: Array, state: Array, s: int) -> None:
    """A slot is no longer one that may go next."""
    row = nodes[s].row
    take(heaps[row], nodes["place"], state[row], nodes[s].place)
    state[row] -= 1
    if nodes[s].marks & TIMED:
        attend(nodes, terms, heaps, state, s)


@inner
def reorder(nodes: Array, terms: Array, heaps: Array, state: Array, s: int) -> None:
    """What a slot is sorted by changed, other than by an access."""
    if nodes[s].place >= 0:
        leave(nodes, terms, heaps, state, s)
        enter(nodes, terms, heaps, state, s)


@inner
def settle_leaf(nodes: Array, terms: Array, heaps: Array, state: Array, s: int) -> None:
    """Enters a slot that is a leaf and may go, where it is not entered yet."""
    if nodes[s].kids == 0 and nodes[s].held == 0 and nodes[s].place < 0:
        enter(nodes, terms, heaps, state, s)


@kernel
def hold(nodes: Array, terms: Array, heaps: Array, state: Array, s: int) -> None:
    """One more reason for a resident slot to stay, and for all above it."""
    while s >= 0:
        nodes[s].held += 1
        if nodes[s].held > 1:
            return
        state[BLOCKED] += 1
        if nodes[s].place >= 0:
            leave(nodes, terms, heaps, state, s)
        s = parent_of(nodes, s)


@kernel
def release(nodes: Array, terms: Array, heaps: Array, state: Array, s: int) -> None:
    """One reason less."""
    while s >= 0:
        nodes[s].held -= 1
        if nodes[s].held > 0:
            return
        state[BLOCKED] -= 1
        settle_leaf(nodes, terms, heaps, state, s)
        s = parent_of(nodes, s)
