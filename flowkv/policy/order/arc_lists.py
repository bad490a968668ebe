"""ARC inside the compiled order: two lists of residents, two of ghosts, and a target between them.

T1 (heap `LEAVES`) is what was used once, T2 (`SECOND`, mark `TWICE`) what was used again. What an
eviction takes from them is remembered in B1 and B2, rings of slots that are not resident, newest
first. A use of what B1 remembers says that T1 was too small, one of B2 that T2 was.
"""

from __future__ import annotations

from flowkv.policy.order.compiled import Array, inner
from flowkv.policy.order.rings import delist, enlist
from flowkv.policy.order.slots import (
    ARC,
    CLASS_SHIFT,
    COUNT,
    GHOST,
    GHOSTS,
    LEAVES,
    LISTS,
    MODE,
    ONCE,
    SECOND,
    SIZE,
    TARGET,
    TWICE,
)


@inner
def arrive(nodes: Array, terms: Array, state: Array, s: int) -> None:
    """A block becomes resident: in T1, whatever was remembered."""
    if state[MODE] == ARC:
        unremember(nodes, terms, state, s)
        nodes[s].marks &= ~TWICE
        state[ONCE] += 1


@inner
def promote(nodes: Array, state: Array, s: int) -> bool:
    """A resident block is used; whether that moves it from T1 to T2."""
    if state[MODE] != ARC or nodes[s].marks & TWICE:
        return False
    nodes[s].marks |= TWICE
    state[ONCE] -= 1
    return True


@inner
def part(nodes: Array, state: Array, s: int) -> None:
    """A block is no longer resident."""
    if state[MODE] == ARC and not nodes[s].marks & TWICE:
        state[ONCE] -= 1


@inner
def remember(nodes: Array, terms: Array, state: Array, s: int) -> None:
    """A block was evicted: it becomes a ghost."""
    if state[MODE] == ARC:
        which = 1 + (nodes[s].marks & TWICE != 0)
        enlist(terms, state, which, s)
        state[GHOSTS + which] += 1
        nodes[s].marks |= GHOST


@inner
def unremember(nodes: Array, terms: Array, state: Array, s: int) -> None:
    """A block is no ghost any more, if it was one."""
    if nodes[s].marks & GHOST:
        which = 1 + (nodes[s].marks & TWICE != 0)
        delist(terms, state, which, s)
        state[GHOSTS + which] -= 1
        nodes[s].marks &= ~(GHOST | TWICE)


@inner
def learn(nodes: Array, state: Array, s: int) -> None:
    """A block that is not resident is used: the list that let go of it should be larger."""
    if nodes[s].marks & GHOST:
        once, twice = state[GHOSTS + 1], state[GHOSTS + 2]
        if nodes[s].marks & TWICE:
            state[TARGET] = max(state[TARGET] - max(once // twice, 1), 0)
        else:
            state[TARGET] = min(state[TARGET] + max(twice // once, 1), state[SIZE])


@inner
def trim(nodes: Array, terms: Array, state: Array) -> None:
    """Notes how many blocks fit, and forgets the oldest ghosts beyond as many in each list."""
    if state[MODE] == ARC:
        state[SIZE] = max(state[SIZE], state[COUNT])
        for which in (1, 2):
            while state[GHOSTS + which] > state[SIZE]:
                front = state[LISTS + which] - 1
                unremember(nodes, terms, state, terms[front].before)


@inner
def arc_row(heaps: Array, state: Array) -> int:
    """Whether T1 (`LEAVES`) or T2 (`SECOND`) gives up its oldest leaf; lower classes go first."""
    if state[SECOND] == 0 or state[LEAVES] == 0:
        return LEAVES if state[SECOND] == 0 else SECOND
    once, twice = heaps[LEAVES, 0, 0] >> CLASS_SHIFT, heaps[SECOND, 0, 0] >> CLASS_SHIFT
    if once != twice:
        return LEAVES if once < twice else SECOND
    return LEAVES if state[ONCE] >= state[TARGET] else SECOND
