"""The compiled heart of the leaf-first policies: an order over slots, one call per request.

What is kept, and why it is fast: one 64-byte record per slot (a cache line) and a binary heap over
the *leaves* only, since nothing else may be given up. A request of 245 blocks rewrites 245 records
and moves one heap entry. A second heap, over the live leaves, knows whose lease runs out next.

Frequency is kept as one integer. With c the access count that halves every `tau`, the static key
K = t_last + tau * log2(c) orders blocks as their counts do at *every* later time, since all counts
fall at the same rate: ageing costs nothing. An access at time t makes
c <- 1 + c * 2^(-(t - t_last) / tau), which on K alone reads

    K <- max(K, t) + tau * log2(1 + 2^(-|K - t| / tau)),

in whole nanoseconds. The logarithm is built from + - * / only, which IEEE 754 rounds alike on every
machine, so that ties fall alike too. tau = 0 leaves K = t: least recently used.

Residence is told by `birth`, a number never used twice; a child remembers its parent's (`bond`), so
the removal of a parent makes roots of its children without visiting them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit
from numba.core.options import DefaultOptions
from numpy.typing import NDArray

Array = NDArray[Any]

# Counting references to the arrays would cost five times the work itself. Nothing compiled here
# makes or returns an array, so numba is asked to leave it out, where it knows how.
LEAN = {"_nrt": False} if hasattr(DefaultOptions, "_nrt") else {}
kernel = njit(cache=True, error_model="numpy", **LEAN)
inner = njit(cache=True, error_model="numpy", forceinline=True, **LEAN)

NODE = np.dtype(
    [
        ("birth", np.int64),  # 0: not resident
        ("bond", np.int64),  # birth of the parent when linked
        ("key", np.int64),  # K; smaller goes earlier; FAR below once expired
        ("due", np.int64),  # when its own lease runs out
        ("limit", np.int64),  # created + max age
        ("lease", np.int64),
        ("parent", np.int32),  # a slot or -1; counts only while its birth equals `bond`
        ("kids", np.int32),  # resident children
        ("live", np.int32),  # resident children not expired; -1: expired itself
        ("depth", np.int32),
    ]
)

NEVER = np.iinfo(np.int64).max
FAR = 1 << 62  # beyond the distance of any two keys
CLOCK_LIMIT = 1 << 61  # nanoseconds either way; `time.time_ns` stays below it until 2043
SLOT_LIMIT = 1 << 28
LOW = (1 << 32) - 1

# Entries of the state vector. The first two are the sizes of the heaps, which the rows of `heaps`
# and `place` share; row GUARD of `place` marks slots during one call.
LEAVES, DUES, GUARD = 0, 1, 2
COUNT, BIRTHS, EXPIRED, CLOCK, TAU, DIGEST = 2, 3, 4, 5, 6, 7
STATE_SIZE = 8

LN2 = 0.6931471805599453
TWO_OVER_LN2 = 2.8853900817779268
EXP = tuple(1.0 / math.factorial(k) for k in range(13, -1, -1))  # e^x, highest power first
ATANH = tuple(1.0 / k for k in range(33, 0, -2))  # atanh(s) / s in s^2


@inner
def softplus2(y: float) -> float:
    """log2(1 + 2^-y) for y >= 0, to about 2 ulp, from correctly rounded operations only."""
    if y >= 62.0:
        return 0.0
    whole = int(y + 0.5)
    x = (whole - y) * LN2  # 2^-y = e^x / 2^whole, |x| <= 0.35
    e = 0.0
    for c in EXP:
        e = e * x + c
    z = e / (1 << whole)
    s = z / (2.0 + z)  # log(1 + z) = 2 atanh(s), s <= 1/3
    s2 = s * s
    total = 0.0
    for c in ATANH:
        total = total * s2 + c
    return TWO_OVER_LN2 * s * total


@inner
def aged(key: int, now: int, tau: int) -> int:
    """The key after an access at `now`."""
    if tau == 0:
        return now
    gain = int(np.rint(tau * softplus2(abs(key - now) / tau)))
    return max(key, now) + gain


@inner
def sift_up(heap: Array, place: Array, i: int) -> None:
    """Moves entry `i` of a heap towards the top until its parent is no greater."""
    key, tie = heap[i, 0], heap[i, 1]
    while i > 0:
        up = (i - 1) >> 1
        if heap[up, 0] < key or (heap[up, 0] == key and heap[up, 1] < tie):
            break
        heap[i, 0], heap[i, 1] = heap[up, 0], heap[up, 1]
        place[heap[i, 1] & LOW] = i
        i = up
    heap[i, 0], heap[i, 1] = key, tie
    place[tie & LOW] = i


@inner
def sift_down(heap: Array, place: Array, size: int, i: int) -> None:
    """Moves entry `i` of a heap away from the top until its children are no smaller."""
    key, tie = heap[i, 0], heap[i, 1]
    while True:
        c = 2 * i + 1
        if c >= size:
            break
        r = c + 1
        if r < size and (
            heap[r, 0] < heap[c, 0] or (heap[r, 0] == heap[c, 0] and heap[r, 1] < heap[c, 1])
        ):
            c = r
        if key < heap[c, 0] or (key == heap[c, 0] and tie < heap[c, 1]):
            break
        heap[i, 0], heap[i, 1] = heap[c, 0], heap[c, 1]
        place[heap[i, 1] & LOW] = i
        i = c
    heap[i, 0], heap[i, 1] = key, tie
    place[tie & LOW] = i


@inner
def write(nodes: Array, heaps: Array, which: int, i: int, s: int) -> None:
    """Entry `i` of a heap becomes `s`. Ties: the deeper first, then the smaller slot."""
    if which == LEAVES:
        heaps[which, i, 0] = nodes[s].key
        heaps[which, i, 1] = ((LOW >> 1) - nodes[s].depth) << 32 | s
    else:
        heaps[which, i, 0] = nodes[s].due
        heaps[which, i, 1] = s


@inner
def push(nodes: Array, heaps: Array, place: Array, state: Array, which: int, s: int) -> None:
    """Enters a slot into one of the two heaps."""
    i = state[which]
    state[which] = i + 1
    write(nodes, heaps, which, i, s)
    sift_up(heaps[which], place[which], i)


@inner
def pull(heaps: Array, place: Array, state: Array, which: int, s: int) -> None:
    """Takes a slot out of one of the two heaps, if it is there."""
    i = place[which, s]
    if i < 0:
        return
    place[which, s] = -1
    last = state[which] - 1
    state[which] = last
    if i == last:
        return
    heap = heaps[which]
    heap[i, 0], heap[i, 1] = heap[last, 0], heap[last, 1]
    sift_up(heap, place[which], i)
    sift_down(heap, place[which], last, i)


@inner
def succeed(nodes: Array, heaps: Array, place: Array, state: Array, old: int, new: int) -> None:
    """`new` becomes a leaf where `old`, its child or its parent, was one.

    Along a chain the two are neighbours in the order, so that an entry hardly ever moves.
    """
    i = place[LEAVES, old]
    place[LEAVES, old] = -1
    write(nodes, heaps, LEAVES, i, new)
    sift_up(heaps[LEAVES], place[LEAVES], i)
    sift_down(heaps[LEAVES], place[LEAVES], state[LEAVES], place[LEAVES, new])


@inner
def parent_of(nodes: Array, s: int) -> int:
    """The resident parent of a slot, or -1."""
    p = nodes[s].parent
    if p >= 0 and nodes[p].birth == nodes[s].bond:
        return int(p)
    return -1


@inner
def lose_live_kid(nodes: Array, heaps: Array, place: Array, state: Array, p: int) -> None:
    """A child of `p` left or expired: with the last one, its own lease begins to matter."""
    nodes[p].live -= 1
    if nodes[p].live == 0 and nodes[p].due != NEVER:
        push(nodes, heaps, place, state, DUES, p)


@inner
def drop(nodes: Array, heaps: Array, place: Array, state: Array, s: int) -> None:
    """Ends the residence of a slot; its children, if any, become roots."""
    pull(heaps, place, state, DUES, s)
    p = parent_of(nodes, s)
    if nodes[s].live < 0:
        state[EXPIRED] -= 1
    elif p >= 0:
        lose_live_kid(nodes, heaps, place, state, p)
    if p >= 0:
        nodes[p].kids -= 1
    if p < 0 or nodes[p].kids > 0 or place[GUARD, p] == 1:  # the guarded stay out of the heap
        pull(heaps, place, state, LEAVES, s)
    elif place[LEAVES, s] >= 0:
        succeed(nodes, heaps, place, state, s, p)
    else:
        push(nodes, heaps, place, state, LEAVES, p)
    nodes[s].birth = 0
    state[COUNT] -= 1


@inner
def link(nodes: Array, heaps: Array, place: Array, state: Array, s: int, p: int) -> None:
    """Makes `p` the parent of the live slot `s`."""
    nodes[s].parent = p
    nodes[s].bond = nodes[p].birth
    nodes[p].kids += 1
    nodes[p].live += 1
    pull(heaps, place, state, DUES, p)
    if place[LEAVES, p] >= 0 and place[LEAVES, s] < 0 and nodes[s].kids == 0:
        succeed(nodes, heaps, place, state, p, s)
        return
    pull(heaps, place, state, LEAVES, p)


@inner
def expire(nodes: Array, heaps: Array, place: Array, state: Array, now: int) -> int:
    """Moves the clock, marks what has run out by then, and returns the (clamped) time.

    A block runs out when its own lease has and every child has: expiry = max(own, children's).
    """
    now = max(min(now, CLOCK_LIMIT), state[CLOCK])
    state[CLOCK] = now
    while state[DUES] > 0 and heaps[DUES, 0, 0] <= now:
        s = heaps[DUES, 0, 1]
        pull(heaps, place, state, DUES, s)
        nodes[s].live = -1
        nodes[s].key -= FAR
        state[EXPIRED] += 1
        i = place[LEAVES, s]
        if i >= 0:
            heaps[LEAVES, i, 0] = nodes[s].key
            sift_up(heaps[LEAVES], place[LEAVES], i)
        p = parent_of(nodes, s)
        if p >= 0:
            lose_live_kid(nodes, heaps, place, state, p)
    return now


@inner
def touch(nodes: Array, heaps: Array, place: Array, state: Array, s: int, key: int) -> None:
    """Gives a live slot its new key and renews its lease; both only ever grow."""
    node = nodes[s]
    node.key = key
    i = place[LEAVES, s]
    if i >= 0:
        heaps[LEAVES, i, 0] = key
        sift_down(heaps[LEAVES], place[LEAVES], state[LEAVES], i)
    if node.lease != NEVER:
        node.due = min(state[CLOCK] + node.lease, node.limit)
        i = place[DUES, s]
        if i >= 0:
            heaps[DUES, i, 0] = node.due
            sift_down(heaps[DUES], place[DUES], state[DUES], i)


@inner
def fold(state: Array, value: int) -> None:
    """Rolls one number into the digest (one round of SplitMix64's finaliser)."""
    x = np.uint64(state[DIGEST]) ^ np.uint64(value)
    x = (x + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
    state[DIGEST] = np.int64(x ^ (x >> np.uint64(31)))
