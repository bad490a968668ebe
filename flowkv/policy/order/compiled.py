"""The leaf-first order, compiled: slots, heaps, lists, and one function per policy call."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit
from numba.core.options import DefaultOptions
from numpy.typing import NDArray

from flowkv.compiled.machine_code import PART, kept

Array = NDArray[Any]

# Reference counts of the arrays would cost five times the work itself. No compiled function here
# makes or returns an array, so numba is asked to leave them out, where it supports that.
LEAN = {"_nrt": False} if hasattr(DefaultOptions, "_nrt") else {}

# Packages with code that is compiled into other files' functions.
ROOMS = [Path(__file__).parents[2] / room for room in ("policy", "residency")]
SOURCES = sorted(
    (path.stat().st_mtime_ns, path.stat().st_size) for room in ROOMS for path in room.rglob("*.py")
)


def kernel(function: Callable[..., Any]) -> Any:
    """Compile with `numba.njit`, cached on disk until a file of these packages changes.

    Numba alone checks the file of a function only, not those that it calls into, and would reuse
    code that no longer fits the arrays.
    """
    return kept(SOURCES, error_model="numpy", **LEAN)(function)


# Parts of kernels are never called from Python, so they have no wrapper and no cache entry.
helper = njit(**PART, **LEAN)
inner = njit(forceinline=True, **PART, **LEAN)

SLOT_BITS = 28
SLOT_LIMIT = 1 << SLOT_BITS
SLOT_MASK = SLOT_LIMIT - 1


@inner
def fold(state: Array, where: int, value: int) -> None:
    """Fold one number into the digest `state[where]` (a round of SplitMix64's finaliser)."""
    x = np.uint64(state[where]) ^ np.uint64(value)
    x = (x + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
    state[where] = np.int64(x ^ (x >> np.uint64(31)))


@kernel
def room_for(capacity: int, slots: Array) -> int:
    """Return 0 if all slots fit, else the capacity needed, or -1 for an invalid slot number."""
    top = -1
    for s in slots:
        if s < 0 or s >= SLOT_LIMIT:
            return -1
        top = max(top, s)
    return top + 1 if top >= capacity else 0


# Record of a slot in the compiled order; the fields that every call reads share a cache line.
#
# A slot is resident if `birth` is not 0. Births are never reused, and a child stores its parent's
# (`bond`), so that the removal of a parent makes roots of its children without visiting them.
# The key, hints, pins and queue counts outlive residence until `forget`.

NODE = np.dtype(
    [
        ("birth", np.int64),  # 0: not resident
        ("bond", np.int64),  # birth of the parent when linked
        ("key", np.int64),  # the static key; smaller goes earlier
        ("last", np.int64),  # time of the last counted access
        ("parent", np.int32),  # a slot or -1; counts only while its birth equals `bond`
        ("kids", np.int32),  # resident children
        ("live", np.int32),  # resident children not expired; -1: expired itself
        ("depth", np.int32),
        ("place", np.int32),  # index in its heap of leaves, or -1
        ("held", np.int32),  # reasons against eviction: pinned (1), and each child that is held
        ("row", np.int32),  # heap of leaves
        ("marks", np.int32),  # bits below, and the rank above RANK_SHIFT
        # Fields that few calls read.
        ("lease", np.int64),  # after the last access, NEVER for none
        ("limit", np.int64),  # time of expiry regardless of accesses
        ("eta", np.int64),  # time of the next use, by a hint
        ("fall", np.int64),  # time when its rank falls back
        ("extra", np.int64),  # added to the key: tau * log2(worth)
        ("before", np.int32),  # neighbours in its tenant's list, a ring
        ("after", np.int32),
        ("tenant", np.int32),
        ("pins", np.int32),
        ("queued", np.int32),  # queued requests that will use it
        ("due", np.int32),  # index in the heap of due events, or -1
    ]
)
KNOWN, LEASED, RANKED, ETA, DEAD, QUEUED, EXTRA, BRANCHED = (1 << i for i in range(8))
TWICE, GHOST = (1 << i for i in range(8, 10))
RANK_SHIFT = 16
TIMED = LEASED | RANKED | ETA  # may be in the heap of due events
LASTING = KNOWN | ETA | DEAD | QUEUED | BRANCHED | TWICE | GHOST  # outlives residence

NEVER = np.iinfo(np.int64).max
CLOCK_LIMIT = 1 << 61  # nanoseconds either way; `time.time_ns` stays below it until 2043
LATEST = (1 << 62) - 1  # keys lie between this and its negative

# Entries of the state vector. First come the sizes of the heaps, last the heads of lists.
LEAVES, SECOND, HINTED, DUES = 0, 1, 2, 3
HEAPS = 4
COUNT, BLOCKED, EXPIRED, BIRTHS, CLOCK, TAU, DIGEST, STALE, MODE = 4, 5, 6, 7, 8, 9, 10, 11, 12
# ARC: blocks used once, its target, capacity in blocks, and (1, 2 more) ghosts of either list.
ONCE, TARGET, SIZE, GHOSTS = 13, 14, 15, 16
LISTS = 24
RUN_OUT, TENANTS = 0, 4  # lists: the expired, 1 and 2 for ARC's ghosts, the live of each tenant

STATIC, ARC = 0, 1  # modes

DEFAULT_RANK = 35
EXPIRED_CLASS, DEAD_CLASS, FIRST_CLASS, QUEUED_CLASS = 0, 1, 2, 127
CLASS_SHIFT = 56
LOW_KEY_BITS = 7
KEY_BIAS = 1 << 55
CLASS_WORTH = 2.0**64


@inner
def class_of(nodes: Array, s: int) -> int:
    """Return a leaf's class, 0..127; lower classes go before any higher one."""
    marks = nodes[s].marks
    if nodes[s].live < 0:
        return EXPIRED_CLASS
    if marks & QUEUED:
        return QUEUED_CLASS
    if marks & DEAD:
        return DEAD_CLASS
    return FIRST_CLASS + (marks >> RANK_SHIFT)


@inner
def words(nodes: Array, s: int, row: int) -> tuple[int, int]:
    """Return the sort key of a leaf: class, key, the deeper first, the smaller slot first."""
    key = nodes[s].key
    if nodes[s].marks & EXTRA:
        key += nodes[s].extra
    if nodes[s].marks & ETA:
        key = -nodes[s].eta if row == HINTED else max(key, nodes[s].eta)
    high = (class_of(nodes, s) << CLASS_SHIFT) + (key >> LOW_KEY_BITS) + KEY_BIAS
    low = (key & 127) << 2 * SLOT_BITS | (SLOT_MASK - nodes[s].depth) << SLOT_BITS | s
    return high, low


@inner
def key_in(high: int, low: int) -> int:
    """Return the key of a heap entry."""
    key = ((high & ((1 << CLASS_SHIFT) - 1)) - KEY_BIAS) << LOW_KEY_BITS
    return key | low >> 2 * SLOT_BITS


@inner
def parent_of(nodes: Array, s: int) -> int:
    """Return the resident parent of a slot, or -1."""
    p = nodes[s].parent
    if p >= 0 and nodes[p].birth == nodes[s].bond:
        return int(p)
    return -1


@inner
def own_due(nodes: Array, s: int) -> int:
    """Return the time when a slot's own lease runs out."""
    lease = nodes[s].lease
    return nodes[s].limit if lease == NEVER else min(nodes[s].last + lease, nodes[s].limit)


@inner
def present_class(nodes: Array, state: Array, s: int) -> int:
    """Return `class_of` as of now; a fallen rank is stored only once the slot may go."""
    here = class_of(nodes, s)
    fell = nodes[s].marks & RANKED and nodes[s].fall <= state[CLOCK]
    return FIRST_CLASS + DEFAULT_RANK if fell and FIRST_CLASS <= here < QUEUED_CLASS else here


@kernel
def worth(nodes: Array, state: Array, s: int) -> float:
    """Return a slot's sort key, rounded; whole classes lie further apart than any two keys."""
    key = nodes[s].key
    marks = nodes[s].marks
    if marks & EXTRA:
        key += nodes[s].extra
    here = present_class(nodes, state, s)
    ahead = False
    if marks & ETA:
        eta = nodes[s].eta
        ahead = eta > state[CLOCK] and FIRST_CLASS <= here < QUEUED_CLASS
        key = 2 * state[CLOCK] - eta if ahead else max(key, eta)
    late = 0.0
    if (
        not ahead and state[MODE] == ARC and state[LEAVES] > 0 and state[SECOND] > 0
    ):  # the other list goes first
        late = CLASS_WORTH / 2 * ((marks & TWICE != 0) == (state[ONCE] >= state[TARGET]))
    return (here - FIRST_CLASS - DEFAULT_RANK) * CLASS_WORTH + late + key


# Binary heaps of slots with a back index, so that an entry moves in O(log n).
#
# An entry is two words, compared one after the other; the lowest bits of the second are the slot,
# so that no two are equal and the eviction order depends on nothing else. `place[slot]` is a slot's
# index in the heap, -1 if it is in none.


@inner
def sift_up(heap: Array, place: Array, i: int) -> None:
    """Move entry `i` towards the top until its parent is no greater."""
    key, tie = heap[i, 0], heap[i, 1]
    while i > 0:
        up = (i - 1) >> 1
        if heap[up, 0] < key or (heap[up, 0] == key and heap[up, 1] < tie):
            break
        heap[i, 0], heap[i, 1] = heap[up, 0], heap[up, 1]
        place[heap[i, 1] & SLOT_MASK] = i
        i = up
    heap[i, 0], heap[i, 1] = key, tie
    place[tie & SLOT_MASK] = i


@inner
def sift_down(heap: Array, place: Array, size: int, i: int) -> None:
    """Move entry `i` away from the top until its children are no smaller."""
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
        place[heap[i, 1] & SLOT_MASK] = i
        i = c
    heap[i, 0], heap[i, 1] = key, tie
    place[tie & SLOT_MASK] = i


@helper
def put(heap: Array, place: Array, size: int, i: int, words: tuple[int, int]) -> None:
    """Set entry `i` to these words, and restore the heap's order."""
    heap[i, 0], heap[i, 1] = words
    sift_up(heap, place, i)
    sift_down(heap, place, size, place[words[1] & SLOT_MASK])


@helper
def take(heap: Array, place: Array, size: int, i: int) -> None:
    """Remove entry `i` of a heap of `size`; the caller decrements the size."""
    place[heap[i, 1] & SLOT_MASK] = -1
    last = size - 1
    if i == last:
        return
    heap[i, 0], heap[i, 1] = heap[last, 0], heap[last, 1]
    place[heap[i, 1] & SLOT_MASK] = i
    sift_down(heap, place, last, i)
    sift_up(heap, place, i)


# Lists of slots as rings, so that a slot enters and leaves one in O(1).
#
# `state[LISTS + which]` is one more than the slot at the front, 0 for an empty list. A resident
# slot is in the list of the expired or in its tenant's; one that is not resident may be in a list
# of ghosts.


@inner
def enlist_behind(links: Array, s: int, t: int) -> None:
    """Insert slot `s` behind slot `t`, into the list of `t`."""
    after = links[t].after
    links[s].before, links[s].after = t, after
    links[t].after = links[after].before = s


@inner
def enlist(links: Array, state: Array, which: int, s: int) -> None:
    """Insert a slot at the front of a list."""
    head = state[LISTS + which] - 1
    state[LISTS + which] = s + 1
    if head < 0:
        links[s].before = links[s].after = s
    else:
        enlist_behind(links, s, links[head].before)


@inner
def delist(links: Array, state: Array, which: int, s: int) -> None:
    """Remove a slot from its list."""
    before, after = links[s].before, links[s].after
    if after == s:
        state[LISTS + which] = 0
        return
    links[before].after, links[after].before = after, before
    if state[LISTS + which] == s + 1:
        state[LISTS + which] = after + 1


@kernel
def members(links: Array, state: Array, which: int, out: Array) -> int:
    """Fill `out` with a list from its front; return the number of slots."""
    head = s = state[LISTS + which] - 1
    found = 0
    while s >= 0 and found < len(out):
        out[found] = s
        found += 1
        s = links[s].after
        if s == head:
            break
    return found


# A decayed access count as one static integer.
#
# With c the access count that halves every `tau`, the static key K = t_last + tau * log2(c) orders
# blocks as their counts do at *every* later time, since all counts fall at the same rate: ageing
# costs nothing. An access at time t makes c <- 1 + c * 2^(-(t - t_last) / tau), which on K alone is
#
#     K <- max(K, t) + tau * log2(1 + 2^(-|K - t| / tau)),
#
# in whole nanoseconds. tau = 0 leaves K = t: least recently used. A block that is worth w times
# another per byte has a count w times as high: its key has tau * log2(w) added.
#
# The logarithms are built from + - * / only, which IEEE 754 rounds alike on every machine, so that
# ties fall alike too.

LN2 = 0.6931471805599453
TWO_OVER_LN2 = 2.8853900817779268
SQRT_HALF = 0.7071067811865476
EXP = tuple(1.0 / math.factorial(k) for k in range(13, -1, -1))  # e^x, highest power first
ATANH = tuple(1.0 / k for k in range(33, 0, -2))  # atanh(s) / s in s^2


@inner
def log2_from(s: float) -> float:
    """Return log2((1 + s) / (1 - s)) for |s| <= 1/3."""
    s2 = s * s
    total = 0.0
    for c in ATANH:
        total = total * s2 + c
    return TWO_OVER_LN2 * s * total


@inner
def softplus2(y: float) -> float:
    """Return log2(1 + 2^-y) for y >= 0, to about 2 ulp, from correctly rounded operations."""
    if y >= 62.0:
        return 0.0
    whole = int(y + 0.5)
    x = (whole - y) * LN2  # 2^-y = e^x / 2^whole, |x| <= 0.35
    e = 0.0
    for c in EXP:
        e = e * x + c
    z = e / (1 << whole)
    return log2_from(z / (2.0 + z))


@kernel
def log2(x: float) -> float:
    """Return log2 of a finite x > 0, rounded alike on every machine; to about 2 ulp."""
    whole = 0
    while x >= 2.0 * SQRT_HALF:
        x *= 0.5
        whole += 1
    while x < SQRT_HALF:
        x *= 2.0
        whole -= 1
    return float(whole + log2_from((x - 1.0) / (x + 1.0)))


@helper
def aged(key: int, now: int, tau: int) -> int:
    """Return the key after an access at `now`."""
    if tau == 0:
        return now
    gain = int(np.rint(tau * softplus2(abs(key - now) / tau)))
    return max(key, now) + gain


# ARC inside the compiled order: two lists of residents, two of ghosts, and a target between them.
#
# T1 (heap `LEAVES`) holds blocks used once, T2 (`SECOND`, mark `TWICE`) blocks used again. B1 and
# B2 hold the blocks evicted from them: rings of slots that are not resident, newest first. A use of
# a block in B1 shows that T1 was too small, one in B2 that T2 was.


@inner
def arrive(nodes: Array, state: Array, s: int) -> None:
    """Put a new resident block into T1, out of the ghosts."""
    if state[MODE] == ARC:
        unremember(nodes, state, s)
        nodes[s].marks &= ~TWICE
        state[ONCE] += 1


@inner
def promote(nodes: Array, state: Array, s: int) -> bool:
    """Move a used resident block from T1 to T2; return whether it moved."""
    if state[MODE] != ARC or nodes[s].marks & TWICE:
        return False
    nodes[s].marks |= TWICE
    state[ONCE] -= 1
    return True


@inner
def part(nodes: Array, state: Array, s: int) -> None:
    """Count down T1 when one of its blocks leaves."""
    if state[MODE] == ARC and not nodes[s].marks & TWICE:
        state[ONCE] -= 1


@inner
def remember(nodes: Array, state: Array, s: int) -> None:
    """Make an evicted block a ghost."""
    if state[MODE] == ARC:
        which = 1 + (nodes[s].marks & TWICE != 0)
        enlist(nodes, state, which, s)
        state[GHOSTS + which] += 1
        nodes[s].marks |= GHOST


@inner
def unremember(nodes: Array, state: Array, s: int) -> None:
    """Take a block out of the ghosts, if it is one."""
    if nodes[s].marks & GHOST:
        which = 1 + (nodes[s].marks & TWICE != 0)
        delist(nodes, state, which, s)
        state[GHOSTS + which] -= 1
        nodes[s].marks &= ~(GHOST | TWICE)


@inner
def learn(nodes: Array, state: Array, s: int) -> None:
    """Adapt the target after a use of a ghost: the list that evicted it should be larger."""
    if nodes[s].marks & GHOST:
        once, twice = state[GHOSTS + 1], state[GHOSTS + 2]
        if nodes[s].marks & TWICE:
            state[TARGET] = max(state[TARGET] - max(once // twice, 1), 0)
        else:
            state[TARGET] = min(state[TARGET] + max(twice // once, 1), state[SIZE])


@inner
def trim(nodes: Array, state: Array) -> None:
    """Update the capacity, and drop the oldest ghosts beyond it in each list."""
    if state[MODE] == ARC:
        state[SIZE] = max(state[SIZE], state[COUNT])
        for which in (1, 2):
            while state[GHOSTS + which] > state[SIZE]:
                front = state[LISTS + which] - 1
                unremember(nodes, state, nodes[front].before)


@inner
def arc_row(heaps: Array, state: Array) -> int:
    """Return the list that gives up its oldest leaf, T1 or T2; lower classes go first."""
    if state[SECOND] == 0 or state[LEAVES] == 0:
        return LEAVES if state[SECOND] == 0 else SECOND
    once, twice = heaps[LEAVES, 0, 0] >> CLASS_SHIFT, heaps[SECOND, 0, 0] >> CLASS_SHIFT
    if once != twice:
        return LEAVES if once < twice else SECOND
    return LEAVES if state[ONCE] >= state[TARGET] else SECOND


# The order itself: the next victim, and the due events.
#
# Only *leaves* are in the binary heaps, since no other block may be evicted: a request of 245
# blocks rewrites 245 records and moves one heap entry. The next victim: the expired; those hinted
# never to be used again; the others by rank and, among equals, by static key (`aged`); last of all
# those that a queued request will use. Leaves with a hint of their next use have a heap of their
# own, furthest first. Another heap, of due events, holds the next expiry, fall of rank or passing
# of a hint of each slot.
#
# A pinned block, and all above it, are in no heap of leaves: `held` counts a slot's reasons. So an
# eviction costs nothing per pinned block.

# ---- due events


@helper
def attend(nodes: Array, heaps: Array, state: Array, s: int) -> None:
    """Update a slot's entry in the heap of due events, or take it out."""
    when = NEVER
    marks = nodes[s].marks
    if nodes[s].birth != 0 and nodes[s].live >= 0:
        if marks & LEASED and nodes[s].live == 0:
            when = own_due(nodes, s)
        if nodes[s].place >= 0:
            if marks & ETA and nodes[s].eta > state[CLOCK]:
                when = min(when, nodes[s].eta)
            if marks & RANKED:
                when = min(when, nodes[s].fall)
    i = nodes[s].due
    if when == NEVER:
        if i >= 0:
            take(heaps[DUES], nodes["due"], state[DUES], i)
            state[DUES] -= 1
        return
    if i < 0:
        i = state[DUES]
        state[DUES] += 1
    put(heaps[DUES], nodes["due"], state[DUES], i, (when, s))


# ---- the heaps of leaves


@inner
def row_of(nodes: Array, state: Array, s: int) -> int:
    """Return the heap of leaves that a slot belongs to."""
    marks = nodes[s].marks
    ahead = marks & ETA and nodes[s].eta > state[CLOCK]
    if ahead and FIRST_CLASS <= class_of(nodes, s) < QUEUED_CLASS:
        return HINTED
    return SECOND if marks & TWICE else LEAVES


@helper
def enter(nodes: Array, heaps: Array, state: Array, s: int) -> None:
    """Add a slot to its heap of leaves."""
    row = row_of(nodes, state, s)
    i = state[row]
    state[row] += 1
    nodes[s].row = row
    put(heaps[row], nodes["place"], state[row], i, words(nodes, s, row))
    if nodes[s].marks & TIMED:
        attend(nodes, heaps, state, s)


@helper
def leave(nodes: Array, heaps: Array, state: Array, s: int) -> None:
    """Take a slot out of its heap of leaves."""
    row = nodes[s].row
    take(heaps[row], nodes["place"], state[row], nodes[s].place)
    state[row] -= 1
    if nodes[s].marks & TIMED:
        attend(nodes, heaps, state, s)


@inner
def reorder(nodes: Array, heaps: Array, state: Array, s: int) -> None:
    """Move a slot after a change of its sort key, other than by an access."""
    if nodes[s].place >= 0:
        leave(nodes, heaps, state, s)
        enter(nodes, heaps, state, s)


@inner
def settle_leaf(nodes: Array, heaps: Array, state: Array, s: int) -> None:
    """Add a slot to its heap of leaves if it is an evictable leaf outside it."""
    if nodes[s].kids == 0 and nodes[s].held == 0 and nodes[s].place < 0:
        enter(nodes, heaps, state, s)


@helper
def hold(nodes: Array, heaps: Array, state: Array, s: int) -> None:
    """Add a reason to hold a resident slot, and all above it."""
    while s >= 0:
        nodes[s].held += 1
        if nodes[s].held > 1:
            return
        state[BLOCKED] += 1
        if nodes[s].place >= 0:
            leave(nodes, heaps, state, s)
        s = parent_of(nodes, s)


@helper
def release(nodes: Array, heaps: Array, state: Array, s: int) -> None:
    """Take away a reason to hold a slot, and all above it."""
    while s >= 0:
        nodes[s].held -= 1
        if nodes[s].held > 0:
            return
        state[BLOCKED] -= 1
        settle_leaf(nodes, heaps, state, s)
        s = parent_of(nodes, s)


# Arrival, departure and expiry: updates of records and heaps.


@inner
def lose_live_kid(nodes: Array, heaps: Array, state: Array, p: int) -> None:
    """Count down the live children of `p`; with the last one, its own lease takes effect."""
    nodes[p].live -= 1
    if nodes[p].live == 0 and nodes[p].marks & LEASED:
        attend(nodes, heaps, state, p)


@inner
def are_alike(nodes: Array, s: int, t: int, row: int) -> bool:
    """Return whether `t` may take the place of `s` in heap `row`."""
    if (nodes[s].marks | nodes[t].marks) & TIMED != 0 or row >= HINTED:
        return False
    return bool(row == (SECOND if nodes[t].marks & TWICE else LEAVES))


@helper
def drop(nodes: Array, heaps: Array, state: Array, s: int) -> None:
    """End the residence of a slot; its children, if any, become roots."""
    p = parent_of(nodes, s)
    if nodes[s].live < 0:
        state[EXPIRED] -= 1
        delist(nodes, state, RUN_OUT, s)
    else:
        delist(nodes, state, TENANTS + nodes[s].tenant, s)
        if p >= 0:
            lose_live_kid(nodes, heaps, state, p)
    part(nodes, state, s)
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
        put(heaps[row], nodes["place"], state[row], i, words(nodes, p, row))
        return
    if i >= 0:
        leave(nodes, heaps, state, s)
    elif nodes[s].due >= 0:
        attend(nodes, heaps, state, s)
    if p >= 0 and held > 0:
        release(nodes, heaps, state, p)
    if p >= 0:
        settle_leaf(nodes, heaps, state, p)


@inner
def link(nodes: Array, heaps: Array, state: Array, s: int, p: int) -> None:
    """Make `p` the parent of the live slot `s`."""
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
            put(heaps[row], nodes["place"], state[row], i, words(nodes, s, row))
            return
        leave(nodes, heaps, state, p)
    elif nodes[p].due >= 0:
        attend(nodes, heaps, state, p)
    if nodes[s].held > 0:
        hold(nodes, heaps, state, p)


@inner
def run_out(nodes: Array, heaps: Array, state: Array, s: int) -> None:
    """Mark a block as expired, once all below it are."""
    p = parent_of(nodes, s)
    nodes[s].live = -1
    state[EXPIRED] += 1
    delist(nodes, state, TENANTS + nodes[s].tenant, s)
    enlist(nodes, state, RUN_OUT, s)
    attend(nodes, heaps, state, s)
    reorder(nodes, heaps, state, s)
    if p >= 0:
        lose_live_kid(nodes, heaps, state, p)


@inner
def sweep(nodes: Array, heaps: Array, state: Array) -> None:
    """End the leases of all blocks of the invalidated tenant."""
    head = s = state[LISTS + TENANTS + state[STALE] - 1] - 1
    while s >= 0:
        nodes[s].marks |= LEASED
        nodes[s].limit = -LATEST
        attend(nodes, heaps, state, s)
        s = nodes[s].after
        if s == head:
            break
    state[STALE] = 0


@helper
def expire(nodes: Array, heaps: Array, state: Array, now: int) -> int:
    """Advance the clock, handle the events due by then, and return the (clamped) time.

    A block expires when its own lease has run out and every child has: max(own, children's).
    """
    now = max(min(now, CLOCK_LIMIT), state[CLOCK])
    state[CLOCK] = now
    if state[STALE] != 0:
        sweep(nodes, heaps, state)
    while state[DUES] > 0 and heaps[DUES, 0, 0] <= now:
        s = heaps[DUES, 0, 1]
        marks = nodes[s].marks
        if marks & LEASED and nodes[s].live == 0 and own_due(nodes, s) <= now:
            run_out(nodes, heaps, state, s)
            continue
        if marks & RANKED and nodes[s].fall <= now:
            marks &= (1 << RANK_SHIFT) - 1 - RANKED
            nodes[s].marks = marks | DEFAULT_RANK << RANK_SHIFT
        reorder(nodes, heaps, state, s)
        attend(nodes, heaps, state, s)
    return now


@inner
def touch(nodes: Array, heaps: Array, state: Array, s: int, key: int) -> None:
    """Give a live slot its new key, end its hints and renew its lease."""
    nodes[s].key = key
    nodes[s].last = state[CLOCK]
    i = nodes[s].place
    if promote(nodes, state, s) or nodes[s].marks & (TIMED | DEAD):
        nodes[s].marks &= ~(ETA | DEAD)
        reorder(nodes, heaps, state, s)
        attend(nodes, heaps, state, s)
    elif i >= 0:
        row = nodes[s].row
        heaps[row, i, 0], heaps[row, i, 1] = words(nodes, s, row)
        sift_down(heaps[row], nodes["place"], state[row], i)


# `Policy.insert` over the compiled order: a block's begin of life, and its renewals.

LEASE_S, MAX_AGE, RANK, RANK_S, EXPLICIT = 0, 1, 2, 3, 4


@inner
def live_parent(nodes: Array, s: int, p: int) -> int:
    """Return `p` if it may become the parent of `s`, else -1: live and not below `s`."""
    if p < 0 or p >= len(nodes) or nodes[p].birth == 0 or nodes[p].live < 0:
        return -1
    q = p
    while q >= 0 and nodes[s].kids > 0:  # only a slot with children can be above another
        if q == s:
            return -1
        q = parent_of(nodes, q)
    return p if p != s else -1


@inner
def sign(nodes: Array, s: int, now: int, lease: Array) -> None:
    """Give a slot the lease and rank of an insert, where they exceed its own."""
    marks = nodes[s].marks
    limit = NEVER if lease[MAX_AGE] == NEVER else now + lease[MAX_AGE]
    if not marks & LEASED or (lease[LEASE_S] == NEVER and limit == NEVER):
        marks &= ~LEASED
    else:
        nodes[s].lease = max(nodes[s].lease, lease[LEASE_S])
        nodes[s].limit = max(nodes[s].limit, limit)
    rank, fall = marks >> RANK_SHIFT, nodes[s].fall if marks & RANKED else NEVER
    if fall <= now:
        rank, fall = DEFAULT_RANK, NEVER
    if lease[RANK] >= rank:
        ends = NEVER if lease[RANK_S] == NEVER else now + lease[RANK_S]
        if lease[RANK] == rank:
            ends = max(ends, fall)
        marks &= (1 << RANK_SHIFT) - 1 - RANKED
        marks |= lease[RANK] << RANK_SHIFT
        if ends != NEVER:
            marks |= RANKED
            nodes[s].fall = ends
    nodes[s].marks = marks


@inner
def begin_terms(nodes: Array, s: int, now: int, lease: Array, extra: int) -> None:
    """Give a new resident the lease, rank and extra key of its insert."""
    marks = nodes[s].marks | KNOWN | lease[RANK] << RANK_SHIFT
    if lease[LEASE_S] != NEVER or lease[MAX_AGE] != NEVER:
        marks |= LEASED
        nodes[s].lease = lease[LEASE_S]
        nodes[s].limit = NEVER if lease[MAX_AGE] == NEVER else now + lease[MAX_AGE]
    if lease[RANK_S] != NEVER:
        marks |= RANKED
        nodes[s].fall = now + lease[RANK_S]
    if extra != 0:
        marks |= EXTRA
        nodes[s].extra = extra
    nodes[s].marks = marks


@inner
def settle(nodes: Array, heaps: Array, state: Array, s: int, depth: int, tenant: int) -> None:
    """Make `s` resident, without parent, lease or rank yet."""
    state[COUNT] += 1
    state[BIRTHS] += 1
    node = nodes[s]
    node.birth = state[BIRTHS]
    node.parent = -1
    node.kids = 0
    node.live = 0
    node.depth = depth
    arrive(nodes, state, s)
    node.marks &= LASTING
    nodes[s].tenant = tenant
    enlist(nodes, state, TENANTS + tenant, s)
    if nodes[s].pins > 0:
        hold(nodes, heaps, state, s)


@kernel
def insert(
    nodes: Array,
    heaps: Array,
    state: Array,
    slots: Array,
    parents: Array,
    lease: Array,
    said: tuple[int, int, int],
) -> None:
    """Insert blocks, whose slots there is room for.

    `lease` is indexed by `LEASE_S` and so on; `said` = (now, tenant, extra key).
    """
    now, tenant, extra = said
    now = expire(nodes, heaps, state, now)
    old, new = np.int64(0), np.int64(0)
    known = False
    for i in range(len(slots)):
        s, p = slots[i], parents[i]
        if nodes[s].birth != 0 and nodes[s].live < 0:
            drop(nodes, heaps, state, s)  # expired: a new life begins
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
                touch(nodes, heaps, state, s, key)
            if lease[EXPLICIT]:
                sign(nodes, s, now, lease)
                reorder(nodes, heaps, state, s)
                attend(nodes, heaps, state, s)
            if parent_of(nodes, s) >= 0:
                continue
        else:
            depth = min(nodes[p].depth + 1, SLOT_MASK) if p >= 0 else min(i, SLOT_MASK)
            settle(nodes, heaps, state, s, depth, tenant)
            nodes[s].key, nodes[s].last = key, now
            begin_terms(nodes, s, now, lease, extra)
        if p >= 0:
            link(nodes, heaps, state, s, p)
        settle_leaf(nodes, heaps, state, s)
        if nodes[s].place < 0 and nodes[s].marks & LEASED:
            attend(nodes, heaps, state, s)  # held: its lease runs all the same


# One compiled function per call of the `Policy` protocol, over records, heaps and lists of slots.
#
# Every function with a time advances the clock first (`expire`), so that due events are handled
# before any decision. Common arguments: `nodes` [capacity] records, `heaps` [4, capacity, 2],
# `state` [LISTS + lists].


@kernel
def access(nodes: Array, heaps: Array, state: Array, slots: Array, now: int) -> None:
    """Renew resident, live blocks; only `insert` revives an expired block.

    For blocks that are not resident, only hints end.
    """
    now = expire(nodes, heaps, state, now)
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
        touch(nodes, heaps, state, s, new)


@kernel
def assign(nodes: Array, heaps: Array, state: Array, slots: Array, keys: Array) -> None:
    """Set the keys of resident slots to keys that were computed elsewhere."""
    for i in range(len(slots)):
        s = slots[i]
        if 0 <= s < len(nodes) and nodes[s].birth != 0:
            nodes[s].key = keys[i]
            reorder(nodes, heaps, state, s)


@kernel
def remove(nodes: Array, heaps: Array, state: Array, slots: Array) -> None:
    """Drop the slots that are resident."""
    for s in slots:
        if 0 <= s < len(nodes) and nodes[s].birth != 0:
            drop(nodes, heaps, state, s)


@kernel
def forget(nodes: Array, heaps: Array, state: Array, slots: Array) -> None:
    """Clear the marks that outlive residence, except for queued requests; pins stay."""
    for s in slots:
        if 0 <= s < len(nodes) and nodes[s].birth == 0:
            unremember(nodes, state, s)
            nodes[s].marks &= QUEUED


@helper
def change_pins(nodes: Array, heaps: Array, state: Array, slots: Array, by: int) -> None:
    """Add `by` (1 or -1) to the pins of each slot within the capacity; none fall below 0."""
    for s in slots:
        if 0 <= s < len(nodes):
            before = nodes[s].pins
            nodes[s].pins = max(before + by, 0)
            if nodes[s].birth != 0 and before == 0 and by > 0:
                hold(nodes, heaps, state, s)
            if nodes[s].birth != 0 and before == 1 and by < 0:
                release(nodes, heaps, state, s)


@kernel
def pin(nodes: Array, heaps: Array, state: Array, slots: Array, by: int) -> None:
    """Add `by` (1 or -1) to the pins of each slot."""
    change_pins(nodes, heaps, state, slots, by)


@kernel
def queue(nodes: Array, heaps: Array, state: Array, slots: Array, by: int) -> None:
    """Add `by` (1 or -1) to the queued requests of each slot."""
    for s in slots:
        if 0 <= s < len(nodes):
            nodes[s].queued = max(nodes[s].queued + by, 0)
            before = nodes[s].marks
            nodes[s].marks = before | QUEUED if nodes[s].queued > 0 else before & ~QUEUED
            if before != nodes[s].marks:
                reorder(nodes, heaps, state, s)


@kernel
def hint(nodes: Array, heaps: Array, state: Array, slots: Array, now: int, eta: int) -> None:
    """Set a hint on a chain, last block first.

    NEVER marks the last block and those above, up to one that another chain uses too. A time marks
    all of them, the earliest where there are several.
    """
    now = expire(nodes, heaps, state, now)
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
            if shared and marks & ETA and nodes[s].eta > now:
                nodes[s].eta = min(nodes[s].eta, when)
            else:
                nodes[s].eta = when
            nodes[s].marks = marks & ~DEAD | ETA
        reorder(nodes, heaps, state, s)
        attend(nodes, heaps, state, s)


@kernel
def invalidate(nodes: Array, heaps: Array, state: Array, now: int, tenant: int) -> None:
    """Record the tenant with stale blocks; the next call that decides sweeps them."""
    state[CLOCK] = max(min(now, CLOCK_LIMIT), state[CLOCK])
    if state[STALE] != 0 and state[STALE] != tenant + 1:
        sweep(nodes, heaps, state)
    if state[LISTS + TENANTS + tenant] != 0:
        state[STALE] = tenant + 1


@helper
def choose(heaps: Array, state: Array, now: int) -> int:
    """Return the heap of leaves with the next victim on top; one of them is not empty."""
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
    nodes: Array, heaps: Array, state: Array, protected: Array, victims: Array, now: int
) -> bool:
    """Fill `victims`, or return False with no slot touched.

    All blocks that are neither pinned nor above a pinned one can be freed leaf by leaf, so the
    answer is known before the first victim is taken: nothing has to be put back.
    """
    now = expire(nodes, heaps, state, now)
    change_pins(nodes, heaps, state, protected, 1)
    enough = state[COUNT] - state[BLOCKED] >= len(victims)
    fold(state, DIGEST, len(victims) if enough else -1)
    if enough:
        for i in range(len(victims)):
            s = heaps[choose(heaps, state, now), 0, 1] & SLOT_MASK
            victims[i] = s
            fold(state, DIGEST, s)
            drop(nodes, heaps, state, s)
            remember(nodes, state, s)
            if state[DUES] > 0 and heaps[DUES, 0, 0] <= now:  # kept alive by this child
                expire(nodes, heaps, state, now)
        if len(victims) > 0:
            trim(nodes, state)
    change_pins(nodes, heaps, state, protected, -1)
    return bool(enough)


@kernel
def peek(nodes: Array, heaps: Array, state: Array, protected: Array, now: int) -> int:
    """Return the slot that `evict` would take first, or -1."""
    now = expire(nodes, heaps, state, now)
    change_pins(nodes, heaps, state, protected, 1)
    s = -1
    if state[COUNT] > state[BLOCKED]:
        s = heaps[choose(heaps, state, now), 0, 1] & SLOT_MASK
    change_pins(nodes, heaps, state, protected, -1)
    return int(s)


@kernel
def tick(nodes: Array, heaps: Array, state: Array, now: int) -> int:
    """Advance the clock; return how many blocks have expired."""
    expire(nodes, heaps, state, now)
    return int(state[EXPIRED])


@kernel
def record(state: Array, answer: Array) -> None:
    """Fold an answer into the digest."""
    fold(state, DIGEST, len(answer))
    for s in answer:
        fold(state, DIGEST, s)
