"""Shared table that several processes change: a hash index and chains of granules.

The arrays of the table are

    counters  int64    see the constants below
    index     int64    [slots, 8]: key (4 words), sequence number (never 0), first granule,
                       bytes of the frame, check over the others; linear probing from the key
    links     uint64   [granules]: the granule that follows, in a frame or in the free list, and
                       above it 32 bits that only this granule of this owner has (`seal`)

The owner of a granule is the sequence number of its frame, or 0: so it is in one chain at most. The
row of a frame that is being written, or blanked, has a name that is no key: its sequence number,
the seat of its writer, and `WRITING` twice.

`VERSION` is odd during a change. Readers, which take no lock, then look again; a process that takes
the lock and finds it odd repairs the table, because a peer was killed in mid-change.

Any content is possible in these arrays, and may change during a look: a stray pointer in any
process can write there. No number from them is used before it is checked, and every walk is bounded
by an argument. An impossible value, found under the lock, is `LOST`.
"""

from __future__ import annotations

import numpy as np
from numba import types

from flowkv.compiled.machine_code import kept

GRANULE = 4096
USED, FREE, SEQUENCE, GROWN, REPAIRS = range(5)
"""Granules taken; head of the free list, which has all others up to `GROWN`; last sequence number;
granules with memory behind them (sealed); number of repairs."""
CHECK, VERSION, STATE = 7, 8, 9
"""Check over all before; changes begun and ended; `SOUND`, or the table is condemned."""
SOUND = 0x464B56534F554E44
WRITING = 0x57524954494E4721

BUSY, FULL, GROW, ABSENT, THERE, LOST = -1, -2, -3, -4, -5, -6
"""Answers below zero: the lock could not be taken, no room, room only beyond `GROWN`, no such
frame, a frame of this key exists, the table contradicts itself."""

_LOOKS = 64
_SEED = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_LOW = np.uint64(0xFFFFFFFF)
_MOST_SEQUENCE = 1 << 62

_getpid = types.ExternalFunction("getpid", types.int32())
_memmove = types.ExternalFunction("memmove", types.uintp(types.uintp, types.uintp, types.uintp))


# ---- checks


@kept(nogil=True)
def check_of(row):  # type: ignore[no-untyped-def]
    """Return the check for the last of a row's eight words: a half-written row has another."""
    state = _SEED
    for word in range(7):
        state = (state ^ np.uint64(row[word])) * _MIX
        state ^= state >> np.uint64(29)
    return np.int64(state)


@kept(nogil=True)
def seal(granule, follower, owner):  # type: ignore[no-untyped-def]
    """Return the link of a granule to its follower, sealed for an owner."""
    state = (np.uint64(granule) ^ _SEED) * _MIX
    state = (state ^ (state >> np.uint64(29)) ^ np.uint64(owner)) * _MIX
    state = (state ^ (state >> np.uint64(31)) ^ np.uint64(follower)) * _SEED
    return (state & ~_LOW) | np.uint64(follower)


@kept(nogil=True)
def follow(links, granule, owner):  # type: ignore[no-untyped-def]
    """Return the granule after one of an owner; -1 if it is not the owner's, or out of range."""
    if not 0 <= granule < len(links):
        return np.int64(-1)
    link = links[granule]
    follower = np.int64(link & _LOW)
    return follower if link == seal(granule, follower, owner) else np.int64(-1)


@kept(nogil=True)
def grown_of(arrays):  # type: ignore[no-untyped-def]
    """Return the number of granules with memory behind them; -1 if the word is damaged."""
    word = np.uint64(arrays[0][GROWN])
    grown = np.int64(word & _LOW)
    return grown if word == seal(0, grown, -1) and grown <= len(arrays[2]) else np.int64(-1)


@kept(nogil=True)
def set_grown(counters, grown):  # type: ignore[no-untyped-def]
    """Set the number of granules with memory behind them, in one word."""
    counters[GROWN] = np.int64(seal(0, grown, -1))


@kept(nogil=True)
def begin(counters):  # type: ignore[no-untyped-def]
    """Initialize the counters of an empty table."""
    set_grown(counters, 0)
    counters[CHECK], counters[STATE] = check_of(counters), SOUND


# ---- the index; callers hold the lock, or verify the result


@kept(nogil=True)
def home_of(key, slots):  # type: ignore[no-untyped-def]
    """Return the slot where probing for a key begins."""
    mixed = np.uint64(key[0]) ^ (np.uint64(key[1]) * _SEED)
    return np.int64(mixed % np.uint64(slots))


@kept(nogil=True)
def find(index, key, strict):  # type: ignore[no-untyped-def]
    """Return the slot of a key; ABSENT, or LOST if `strict` and a damaged row comes before it."""
    slots = len(index)
    slot = home_of(key, slots)
    for _ in range(slots):
        row = index[slot]
        if row[4] == 0:
            return ABSENT
        if strict and row[7] != check_of(row):
            return LOST
        if row[0] == key[0] and row[1] == key[1] and row[2] == key[2] and row[3] == key[3]:
            return slot
        slot = slot + 1 if slot + 1 < slots else 0
    return ABSENT


@kept(nogil=True)
def insert(index, row):  # type: ignore[no-untyped-def]
    """Insert a row with a new check; False if there is no free slot."""
    slots = len(index)
    slot = home_of(row, slots)
    for _ in range(slots):
        if index[slot, 4] == 0:
            for word in (0, 1, 2, 3, 5, 6):
                index[slot, word] = row[word]
            index[slot, 7] = check_of(row)
            index[slot, 4] = row[4]
            return True
        slot = slot + 1 if slot + 1 < slots else 0
    return False


@kept(nogil=True)
def remove(index, slot):  # type: ignore[no-untyped-def]
    """Empty a slot and move up the rows that probing would not find any more."""
    slots, hole = len(index), slot
    for _ in range(slots):
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


@kept(nogil=True)
def granules_of(n_bytes):  # type: ignore[no-untyped-def]
    """Return the number of granules for so many bytes."""
    return (n_bytes + GRANULE - 1) // GRANULE


@kept(nogil=True)
def take(arrays, count, owner):  # type: ignore[no-untyped-def]
    """Take a chain out of the free list; return its first granule; LOST if that is damaged."""
    counters, _, links = arrays
    first = granule = counters[FREE]
    for left in range(count, 0, -1):
        follower = follow(links, granule, 0)
        if follower < 0:
            return LOST
        links[granule] = seal(granule, follower if left > 1 else 0, owner)
        granule = follower
    counters[FREE] = granule
    counters[USED] += count
    return first


@kept(nogil=True)
def free(arrays, row):  # type: ignore[no-untyped-def]
    """Put the chain of a row in front of the free list; return whether the chain was valid."""
    counters, _, links = arrays
    owner, granule, count = row[4], row[5], granules_of(row[6])
    first = granule
    if not 0 < count <= len(links):
        return False
    for left in range(count, 0, -1):
        follower = follow(links, granule, owner)
        if follower < 0:
            return False
        links[granule] = seal(granule, follower if left > 1 else counters[FREE], 0)
        granule = follower
    counters[FREE] = first
    counters[USED] -= count
    return True


# ---- the whole table; callers hold the lock


@kept(nogil=True)
def agrees(arrays):  # type: ignore[no-untyped-def]
    """Return whether all rows are sound and have as many granules as are taken."""
    counters, index, _ = arrays
    used = 0
    for slot in range(len(index)):
        row = index[slot]
        if row[4] != 0:
            if row[7] != check_of(row):
                return False
            used += granules_of(row[6])
    return counters[USED] == used


@kept(nogil=True)
def mark(links, row, number, kept, taken):  # type: ignore[no-untyped-def]
    """Mark the granules of a row's chain with its number.

    Returns:
        Its granules; 0 if it was marked before, as a row that was being moved is there twice; LOST
            if it is no chain.
    """
    owner, granule, count = row[4], row[5], granules_of(row[6])
    if not 2 <= count <= len(taken):
        return LOST
    for step in range(count):
        if not 0 <= granule < len(taken):
            return LOST
        if taken[granule]:
            twice = step == 0 and kept[taken[granule] - 1, 4] == owner
            return 0 if twice else LOST
        taken[granule] = number
        granule = follow(links, granule, owner)
    return count if granule >= 0 else LOST


@kept(nogil=True)
def repair(arrays):  # type: ignore[no-untyped-def]
    """Rebuild the table from the rows with a valid check; False if they contradict each other."""
    counters, index, links = arrays
    grown = grown_of(arrays)
    if grown < 0:
        return False
    taken = np.zeros(grown, np.int32)
    kept = np.zeros((grown // 2 + 2, 8), np.int64)
    count = used = 0
    last = counters[SEQUENCE] if 0 <= counters[SEQUENCE] < _MOST_SEQUENCE else 0
    for slot in range(len(index)):
        row = kept[count]
        row[:] = index[slot]
        if row[4] == 0 or row[7] != check_of(row):
            continue
        granules = mark(links, row, count + 1, kept, taken)
        if granules < 0:
            return False
        if granules:
            last, count, used = max(last, row[4]), count + 1, used + granules
    index[:, 4] = 0
    for number in range(count):
        if not insert(index, kept[number]):
            return False
    head = 0
    for granule in range(grown - 1, -1, -1):
        if not taken[granule]:
            links[granule] = seal(granule, head, 0)
            head = granule
    counters[FREE], counters[USED], counters[SEQUENCE] = head, used, last
    return True


# ---- functions that need no lock


@kept(nogil=True)
def look(arrays, key, row):  # type: ignore[no-untyped-def]
    """Find a frame without the lock; copy its index entry to `row`.

    The entry may be outdated by the time it is used, and wrong even now if a peer is changing the
    index: only the frame itself can prove its identity.

    Returns:
        Its slot or ABSENT; LOST if its row, with the slot in its last word, seems to be damaged.
    """
    counters, index = arrays[0], arrays[1]
    found = ABSENT
    for _ in range(_LOOKS):
        version = counters[VERSION]
        _getpid()
        found = slot = find(index, key, False)
        if slot >= 0:
            row[:] = index[slot]
            if row[7] != check_of(row):
                row[7], found = slot, LOST
        _getpid()
        if counters[VERSION] == version and not version & 1:
            return found
    return found if found >= 0 else ABSENT


@kept(nogil=True)
def gather(arena, links, row, skip, target):  # type: ignore[no-untyped-def]
    """Copy bytes of a row's chain to `target`, from byte `skip` on; False if it is broken."""
    owner, granule, at, wanted = row[4], row[5], 0, len(target)
    for _ in range(skip // GRANULE):
        granule = follow(links, granule, owner)
        if granule < 0:
            return False
    inside = skip % GRANULE
    source, sink = arena.ctypes.data, target.ctypes.data
    while at < wanted:
        begin, size = granule, GRANULE - inside
        granule = follow(links, granule, owner)
        while granule == begin + (size + inside) // GRANULE and at + size < wanted:
            granule = follow(links, granule, owner)
            size += GRANULE
        if granule < 0:
            return False
        size = min(size, wanted - at)
        _memmove(sink + at, source + begin * GRANULE + inside, size)
        at, inside = at + size, 0
    return True


@kept(nogil=True)
def scatter(arena, links, row, skip, source):  # type: ignore[no-untyped-def]
    """Copy bytes into the chain of a row that the caller has claimed; False if it is broken.

    `skip` is a multiple of GRANULE.
    """
    owner, granule, at = row[4], row[5], 0
    for _ in range(skip // GRANULE):
        granule = follow(links, granule, owner)
        if granule < 0:
            return False
    given, sink = source.ctypes.data, arena.ctypes.data
    while at < len(source):
        follower = follow(links, granule, owner)
        if follower < 0:
            return False
        size = min(GRANULE, len(source) - at)
        _memmove(sink + granule * GRANULE, given + at, size)
        at += size
        granule = follower
    return True


# Changes of the shared table: each takes the lock on the file, and releases it.
#
# A change is one compiled call without the interpreter lock, so that the file's lock is held for
# microseconds, however busy Python is; the functions above do the work. Each answers BUSY if the
# lock cannot be taken, and LOST if the table contradicts itself, which is then condemned: from
# there on every change of every process answers LOST.

_LOCK_NOW, _UNLOCK = 2 | 4, 8
_TRIES, _PAUSE_US = 20, 50

_flock = types.ExternalFunction("flock", types.int32(types.int32, types.int32))
_usleep = types.ExternalFunction("usleep", types.int32(types.uint32))


@kept(nogil=True)
def _enter(fd, arrays):  # type: ignore[no-untyped-def]
    """Take the lock and mark the arrays as changing; 0, or BUSY after 1 ms, or LOST."""
    counters = arrays[0]
    tries = 0
    while _flock(fd, _LOCK_NOW) != 0:
        tries += 1
        if tries == _TRIES:
            return BUSY
        _usleep(_PAUSE_US)
    if counters[STATE] != SOUND:
        _flock(fd, _UNLOCK)
        return LOST
    torn = counters[VERSION] & 1
    if torn:
        sound = repair(arrays)
        counters[REPAIRS] += 1
    else:
        sound = counters[CHECK] == check_of(counters)
    counters[VERSION] += torn + 1
    _getpid()  # a compiler moves no store across a call to an unknown function
    return 0 if sound else _leave(fd, arrays, LOST)


@kept(nogil=True)
def _leave(fd, arrays, answer):  # type: ignore[no-untyped-def]
    counters = arrays[0]
    if answer == LOST:
        counters[STATE] = 0
    counters[CHECK] = check_of(counters)
    _getpid()
    counters[VERSION] += 1
    _flock(fd, _UNLOCK)
    return answer


@kept(nogil=True)
def _write(index, row, seat):  # type: ignore[no-untyped-def]
    """Insert a row under the name of a frame that is being written from a seat."""
    row[0], row[1], row[2], row[3] = row[4], seat, WRITING, WRITING
    return insert(index, row)


@kept(nogil=True)
def claim(fd, arrays, key, seat, n_bytes, out):  # type: ignore[no-untyped-def]
    """Take granules for a frame that is about to be written; `out` gets their row.

    Returns:
        0, or BUSY, THERE, GROW, FULL or LOST.
    """
    counters, index, links = arrays
    count = granules_of(n_bytes)
    answer = _enter(fd, arrays)
    if answer < 0:
        return answer
    slot, grown = find(index, key, True), grown_of(arrays)
    if slot == LOST or grown < 0:
        answer = LOST
    elif slot >= 0:
        answer = THERE
    elif counters[USED] + count > len(links):
        answer = FULL
    elif counters[USED] + count > grown:
        answer = GROW
    else:
        counters[SEQUENCE] += 1
        out[4], out[6] = counters[SEQUENCE], n_bytes
        out[5] = take(arrays, count, out[4])
        if out[5] < 0 or not _write(index, out, seat):
            answer = LOST
    return _leave(fd, arrays, answer)


@kept(nogil=True)
def grow(fd, arrays, count):  # type: ignore[no-untyped-def]
    """Record that the first `count` granules have memory behind them; 0, BUSY or LOST."""
    counters, _, links = arrays
    answer = _enter(fd, arrays)
    if answer < 0:
        return answer
    grown = grown_of(arrays)
    if grown < 0:
        return _leave(fd, arrays, LOST)
    count = min(count, len(links))
    for granule in range(count - 1, grown - 1, -1):
        links[granule] = seal(granule, counters[FREE], 0)
        counters[FREE] = granule
    if count > grown:
        set_grown(counters, count)
    return _leave(fd, arrays, 0)


@kept(nogil=True)
def commit(fd, arrays, row, key):  # type: ignore[no-untyped-def]
    """Publish a claimed and written frame; 0, THERE (its granules are freed), BUSY or LOST."""
    index = arrays[1]
    answer = _enter(fd, arrays)
    if answer < 0:
        return answer
    slot, other = find(index, row, True), find(index, key, True)
    if slot < 0 or other == LOST or (index[slot, 4:7] != row[4:7]).any():
        return _leave(fd, arrays, LOST)
    remove(index, slot)
    if other >= 0:
        answer = THERE if free(arrays, row) else LOST
    else:
        known = row.copy()
        known[:4] = key
        answer = 0 if insert(index, known) else LOST
    return _leave(fd, arrays, answer)


@kept(nogil=True)
def withdraw(fd, arrays, key, sequence, seat, out):  # type: ignore[no-untyped-def]
    """Remove a frame from the index, or one being written that shall not be published.

    Args:
        fd: Descriptor of the file.
        arrays: Counters, index and links.
        key: Key of the frame, or the name of a frame that is being written.
        sequence: Remove it only if it has this number; 0 for any.
        seat: If not 0, the row stays, as one being written from this seat, to be blanked first.
        out: Gets the row.

    Returns:
        0; BUSY, ABSENT or LOST.
    """
    index, links = arrays[1], arrays[2]
    answer = _enter(fd, arrays)
    if answer < 0:
        return answer
    slot = find(index, key, True)
    if slot < 0:
        return _leave(fd, arrays, slot)
    out[:] = index[slot]
    if sequence and out[4] != sequence:
        answer = ABSENT
    elif not GRANULE < out[6] <= GRANULE * len(links):
        answer = LOST
    else:
        remove(index, slot)
        answer = 0 if (_write(index, out, seat) if seat else free(arrays, out)) else LOST
    return _leave(fd, arrays, answer)


@kept(nogil=True)
def settle(fd, arrays, slot):  # type: ignore[no-untyped-def]
    """Wait for changes under way, so that all earlier writes are visible.

    Args:
        fd: Descriptor of the file.
        arrays: Counters, index and links.
        slot: Slot of a row that seems to be damaged, which is LOST if confirmed; -1 for none.

    Returns:
        0, BUSY or LOST.
    """
    index = arrays[1]
    answer = _enter(fd, arrays)
    if answer < 0:
        return answer
    if 0 <= slot < len(index) and index[slot, 4] != 0:
        answer = 0 if index[slot, 7] == check_of(index[slot]) else LOST
    return _leave(fd, arrays, answer)


@kept(nogil=True)
def audit(fd, arrays):  # type: ignore[no-untyped-def]
    """Check every row, after the table is opened; 0, BUSY or LOST."""
    answer = _enter(fd, arrays)
    if answer < 0:
        return answer
    return _leave(fd, arrays, 0 if agrees(arrays) else LOST)
