"""What processes change together: a hash index and chains of granules, in shared arrays.

Here is what works on them; `shared.changes` does so under the lock on the file. The arrays are

    counters  int64    see the constants below
    index     int64    [slots, 8]: key (4 words), sequence number (never 0), first granule,
                       bytes of the frame, check over the others; linear probing from the key
    links     uint32   [granules]: the granule that follows, in a frame or in the free list,
                       whose length is `FRESH - USED`
    claims    int64    [rows, 4]: granules of frames that are being written: seat of the writer
                       (0: none), first granule, bytes

`VERSION` is odd while somebody changes them. Readers, who take no lock, then look again; whoever
gets the lock next and still finds it odd knows that a peer was killed in the middle, and repairs.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types

GRANULE = 4096
VERSION, USED, FRESH, GROWN, FREE, COUNT, SEQUENCE, REPAIRS = range(8)
"""Changes begun and ended; granules taken; granules never taken begin here, and are backed up to
here; head of the free list; frames; last sequence number; times that peers repaired."""

BUSY, FULL, GROW, ABSENT, THERE, CROWDED = -1, -2, -3, -4, -5, -6
"""Answers below zero: the lock was not to be had, no room, room only beyond `GROWN`, no such frame,
a frame of this key exists, too many frames are being written."""

_LOOKS = 64
_SEED = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)

_getpid = types.ExternalFunction("getpid", types.int32())
_memmove = types.ExternalFunction("memmove", types.uintp(types.uintp, types.uintp, types.uintp))


# ---- the index; callers hold the lock, or bear what they see


@njit(cache=True, nogil=True)
def home_of(key, slots):  # type: ignore[no-untyped-def]
    """The slot where probing for a key begins."""
    mixed = np.uint64(key[0]) ^ (np.uint64(key[1]) * _SEED)
    return np.int64(mixed % np.uint64(slots))


@njit(cache=True, nogil=True)
def check_of(row):  # type: ignore[no-untyped-def]
    """What the last word of a row must be: a half-written row has another."""
    state = _SEED
    for word in range(7):
        state = (state ^ np.uint64(row[word])) * _MIX
        state ^= state >> np.uint64(29)
    return np.int64(state)


@njit(cache=True, nogil=True)
def find(index, key):  # type: ignore[no-untyped-def]
    """The slot of a key; -1 if it is not there."""
    slots = len(index)
    slot = home_of(key, slots)
    for _ in range(slots):
        row = index[slot]
        if row[4] == 0:
            return -1
        if row[0] == key[0] and row[1] == key[1] and row[2] == key[2] and row[3] == key[3]:
            return slot
        slot = slot + 1 if slot + 1 < slots else 0
    return -1


@njit(cache=True, nogil=True)
def insert(index, row):  # type: ignore[no-untyped-def]
    """Puts a row without its check; there must be a free slot."""
    slots = len(index)
    slot = home_of(row, slots)
    while index[slot, 4] != 0:
        slot = slot + 1 if slot + 1 < slots else 0
    for word in (0, 1, 2, 3, 5, 6):
        index[slot, word] = row[word]
    index[slot, 7] = check_of(row)
    index[slot, 4] = row[4]


@njit(cache=True, nogil=True)
def remove(index, slot):  # type: ignore[no-untyped-def]
    """Empties a slot and moves up what probing would not find any more."""
    slots, hole = len(index), slot
    while True:
        slot = slot + 1 if slot + 1 < slots else 0
        if index[slot, 4] == 0:
            break
        home = home_of(index[slot], slots)
        if (slot - home) % slots >= (slot - hole) % slots:
            for word in range(8):
                index[hole, word] = index[slot, word]
            hole = slot
    index[hole, 4] = 0


# ---- granules; callers hold the lock


@njit(cache=True, nogil=True)
def granules_of(n_bytes):  # type: ignore[no-untyped-def]
    """Granules of so many bytes."""
    return (n_bytes + GRANULE - 1) // GRANULE


@njit(cache=True, nogil=True)
def take(arrays, count):  # type: ignore[no-untyped-def]
    """A chain of granules: of the free list, then such as were never taken."""
    counters, _, links, _ = arrays
    first, last, head = -1, -1, counters[FREE]
    spare = counters[FRESH] - counters[USED]
    for taken in range(count):
        if taken < spare:
            granule = head
            head = np.int64(links[granule])
        else:
            granule = counters[FRESH]
            counters[FRESH] += 1
        if last < 0:
            first = granule
        else:
            links[last] = granule
        last = granule
    counters[FREE] = head
    counters[USED] += count
    return first


@njit(cache=True, nogil=True)
def free(arrays, first, count):  # type: ignore[no-untyped-def]
    """Puts a chain in front of the free list."""
    counters, _, links, _ = arrays
    last = first
    for _ in range(count - 1):
        last = np.int64(links[last])
    links[last] = counters[FREE]
    counters[FREE] = first
    counters[USED] -= count


# ---- repair; callers hold the lock


@njit(cache=True, nogil=True)
def mark(links, fresh, first, count, taken):  # type: ignore[no-untyped-def]
    """Marks a chain as taken; False, and nothing is marked, if it is none of its own."""
    granule = first
    for step in range(count):
        if not 0 <= granule < fresh or taken[granule]:
            granule = first
            for _ in range(step):
                taken[granule] = 0
                granule = np.int64(links[granule])
            return False
        taken[granule] = 1
        granule = np.int64(links[granule])
    return True


@njit(cache=True, nogil=True)
def repair(arrays):  # type: ignore[no-untyped-def]
    """Rebuilds everything from the rows whose check is right and whose granules nobody else has."""
    counters, index, links, claims = arrays
    counters[GROWN] = min(max(counters[GROWN], 0), len(links))
    fresh = counters[FRESH] = min(max(counters[FRESH], 0), counters[GROWN])
    taken = np.zeros(max(fresh, 1), np.uint8)
    kept = np.zeros((fresh // 2 + 1, 8), np.int64)
    count = used = 0
    for slot in range(len(index)):
        row = index[slot]
        if row[4] == 0 or row[7] != check_of(row):
            continue
        granules = granules_of(row[6])
        if granules < 2 or granules > fresh:
            continue
        if mark(links, fresh, row[5], granules, taken):
            kept[count] = row
            count, used = count + 1, used + granules
    index[:, 4] = 0
    for number in range(count):
        insert(index, kept[number])
        counters[SEQUENCE] = max(counters[SEQUENCE], kept[number, 4])
    for row in range(len(claims)):
        granules = granules_of(claims[row, 2])
        if claims[row, 0] == 0:
            continue
        if 0 < granules <= fresh and mark(links, fresh, claims[row, 1], granules, taken):
            used += granules
        else:
            claims[row, 0] = 0
    head = 0
    for granule in range(fresh - 1, -1, -1):
        if not taken[granule]:
            links[granule] = head
            head = granule
    counters[FREE], counters[USED], counters[COUNT] = head, used, count


# ---- what needs no lock


@njit(cache=True, nogil=True)
def look(arrays, key, out):  # type: ignore[no-untyped-def]
    """Finds a frame without the lock; `out` gets sequence number, first granule, bytes.

    What it says may be wrong by the time it is used, and even now if a peer is changing the index:
    only the frame itself can prove what it is.
    """
    counters, index = arrays[0], arrays[1]
    for _ in range(_LOOKS):
        version = counters[VERSION]
        _getpid()
        slot = find(index, key)
        found = slot >= 0
        if found:
            out[0], out[1], out[2] = index[slot, 4], index[slot, 5], index[slot, 6]
            found = index[slot, 7] == check_of(index[slot])
        _getpid()
        if counters[VERSION] == version and not version & 1:
            return found
    return found


@njit(cache=True, nogil=True)
def gather(arena, arrays, first, skip, target):  # type: ignore[no-untyped-def]
    """Copies bytes of a chain, from byte `skip` on; False if it leads out of the arena."""
    links, most = arrays[2], min(arrays[0][GROWN], len(arrays[2]))
    granule, at, wanted = first, 0, len(target)
    for _ in range(skip // GRANULE):
        if not 0 <= granule < most:
            return False
        granule = np.int64(links[granule])
    inside = skip % GRANULE
    source, sink = arena.ctypes.data, target.ctypes.data
    while at < wanted:
        begin, size = granule, GRANULE - inside
        while 0 <= granule < most and at + size < wanted and links[granule] == granule + 1:
            granule += 1
            size += GRANULE
        if not (0 <= granule < most and begin >= 0):
            return False
        size = min(size, wanted - at)
        _memmove(sink + at, source + begin * GRANULE + inside, size)
        at, inside = at + size, 0
        granule = np.int64(links[granule])
    return True


@njit(cache=True, nogil=True)
def scatter(arena, arrays, first, skip, source):  # type: ignore[no-untyped-def]
    """Copies bytes into a chain that the caller has claimed; `skip` is a multiple of GRANULE."""
    links, granule, at = arrays[2], first, 0
    for _ in range(skip // GRANULE):
        granule = np.int64(links[granule])
    given, sink = source.ctypes.data, arena.ctypes.data
    while at < len(source):
        size = min(GRANULE, len(source) - at)
        _memmove(sink + granule * GRANULE, given + at, size)
        at += size
        granule = np.int64(links[granule])
