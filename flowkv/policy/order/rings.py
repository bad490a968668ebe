"""Lists of slots as rings, so that a slot enters and leaves one in O(1).

`state[LISTS + which]` is one more than the slot at the front, 0 for an empty list. A resident slot
is in the list of the expired or in its tenant's; one that is not may be in a list of ghosts.
"""

from __future__ import annotations

from flowkv.policy.order.compiled import Array, inner, kernel
from flowkv.policy.order.slots import LISTS


@inner
def enlist(terms: Array, state: Array, which: int, s: int) -> None:
    """Enters a slot at the front of a list."""
    head = state[LISTS + which] - 1
    state[LISTS + which] = s + 1
    if head < 0:
        terms[s].before = terms[s].after = s
        return
    tail = terms[head].before
    terms[s].before, terms[s].after = tail, head
    terms[tail].after = terms[head].before = s


@inner
def delist(terms: Array, state: Array, which: int, s: int) -> None:
    """Takes a slot out of the list that it is in."""
    before, after = terms[s].before, terms[s].after
    if after == s:
        state[LISTS + which] = 0
        return
    terms[before].after, terms[after].before = after, before
    if state[LISTS + which] == s + 1:
        state[LISTS + which] = after + 1


@kernel
def members(terms: Array, state: Array, which: int, out: Array) -> int:
    """Fills `out` with a list from its front; returns how many slots that are."""
    head = s = state[LISTS + which] - 1
    found = 0
    while s >= 0 and found < len(out):
        out[found] = s
        found += 1
        s = terms[s].after
        if s == head:
            break
    return found
