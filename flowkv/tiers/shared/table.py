"""What processes change together: a hash index and chains of granules, in shared arrays.

Here is what works on them; `shared.changes` does so under the lock on the file. The arrays are

    counters  int64    see the constants below
    index     int64    [slots, 8]: key (4 words), sequence number (never 0), first granule,
                       bytes of the frame, check over the others; linear probing from the key
    links     uint64   [granules]: the granule that follows, in a frame or in the free list, and
                       above it 32 bits that only this granule of this owner has (`seal`)
    claims    int64    [rows, 8]: granules of frames that are being written: seat of the writer
                       (0: none), 3 zeros, and as in the index, with a check over all but the seat

The owner of a granule is the sequence number of its frame, or 0: so it is in one chain at most.

`VERSION` is odd while somebody changes them. Readers, who take no lock, then look again; whoever
gets the lock next and still finds it odd knows that a peer was killed in the middle, and repairs.

Anything may stand in these arrays, and change while it is looked at: a stray pointer in any process
can write there. No number out of them is used before it was checked, and every walk is as long as
the caller says at most. What cannot be, under the lock, is `LOST`.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types

GRANULE = 4096
USED, FREE, COUNT, SEQUENCE, GROWN, REPAIRS = range(6)
"""Granules taken; head of the free list, which has all others up to `GROWN`; frames; last sequence
number; granules with memory behind them (sealed); times that peers repaired."""
CHECK, VERSION, STATE = 7, 8, 9
"""Check over all before; changes begun and ended; `SOUND`, or the table is thrown away."""
SOUND = 0x464B56534F554E44

BUSY, FULL, GROW, ABSENT, THERE, CROWDED, LOST = -1, -2, -3, -4, -5, -6, -7
"""Answers below zero: the lock was not to be had, no room, room only beyond `GROWN`, no such frame,
a frame of this key exists, too many frames are being written, the table contradicts itself."""

_LOOKS = 64
_SEED = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_LOW = np.uint64(0xFFFFFFFF)
_MOST_SEQUENCE = 1 << 62

_getpid = types.ExternalFunction("getpid", types.int32())
_memmove = types.ExternalFunction("memmove", types.uintp(types.uintp, types.uintp, types.uintp))


# ---- checks


@njit(cache=True, nogil=True)
def check_of(row, begin):  # type: ignore[no-untyped-def]
    """What the last of eight words must be: a half-written row has another."""
    state = _SEED
    for word in range(begin, 7):
        state = (state ^ np.uint64(row[word])) * _MIX
        state ^= state >> np.uint64(29)
    return np.int64(state)


@njit(cache=True, nogil=True)
def seal(granule, follower, owner):  # type: ignore[no-untyped-def]
    """The link of a granule."""
    state = (np.uint64(granule) ^ _SEED) * _MIX
    state = (state ^ (state >> np.uint64(29)) ^ np.uint64(owner)) * _MIX
    state = (state ^ (state >> np.uint64(31)) ^ np.uint64(follower)) * _SEED
    return (state & ~_LOW) | np.uint64(follower)


@njit(cache=True, nogil=True)
def follow(links, granule, owner):  # type: ignore[no-untyped-def]
    """The granule that follows one of an owner; -1 if it is not that owner's, or not there."""
    if not 0 <= granule < len(links):
        return np.int64(-1)
    link = links[granule]
    follower = np.int64(link & _LOW)
    return follower if link == seal(granule, follower, owner) else np.int64(-1)


@njit(cache=True, nogil=True)
def grown_of(arrays):  # type: ignore[no-untyped-def]
    """Granules with memory behind them; -1 if nobody knows."""
    word = np.uint64(arrays[0][GROWN])
    grown = np.int64(word & _LOW)
    return grown if word == seal(0, grown, -1) and grown <= len(arrays[2]) else np.int64(-1)


@njit(cache=True, nogil=True)
def set_grown(counters, grown):  # type: ignore[no-untyped-def]
    """Says how many granules have memory behind them, in one word."""
    counters[GROWN] = np.int64(seal(0, grown, -1))


@njit(cache=True, nogil=True)
def begin(counters):  # type: ignore[no-untyped-def]
    """Counters of an empty table."""
    set_grown(counters, 0)
    counters[CHECK], counters[STATE] = check_of(counters, 0), SOUND


# ---- the index; callers hold the lock, or bear what they see


@njit(cache=True, nogil=True)
def home_of(key, slots):  # type: ignore[no-untyped-def]
    """The slot where probing for a key begins."""
    mixed = np.uint64(key[0]) ^ (np.uint64(key[1]) * _SEED)
    return np.int64(mixed % np.uint64(slots))


@njit(cache=True, nogil=True)
def find(index, key, strict):  # type: ignore[no-untyped-def]
    """The slot of a key; ABSENT, or LOST if `strict` and a row on the way there is damaged."""
    slots = len(index)
    slot = home_of(key, slots)
    for _ in range(slots):
        row = index[slot]
        if row[4] == 0:
            return ABSENT
        if strict and row[7] != check_of(row, 0):
            return LOST
        if row[0] == key[0] and row[1] == key[1] and row[2] == key[2] and row[3] == key[3]:
            return slot
        slot = slot + 1 if slot + 1 < slots else 0
    return ABSENT


@njit(cache=True, nogil=True)
def insert(index, row):  # type: ignore[no-untyped-def]
    """Puts a row without its check; False if there is no free slot."""
    slots = len(index)
    slot = home_of(row, slots)
    for _ in range(slots):
        if index[slot, 4] == 0:
            for word in (0, 1, 2, 3, 5, 6):
                index[slot, word] = row[word]
            index[slot, 7] = check_of(row, 0)
            index[slot, 4] = row[4]
            return True
        slot = slot + 1 if slot + 1 < slots else 0
    return False


@njit(cache=True, nogil=True)
def remove(index, slot):  # type: ignore[no-untyped-def]
    """Empties a slot and moves up what probing would not find any more."""
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


# ---- granules and claims; callers hold the lock


@njit(cache=True, nogil=True)
def granules_of(n_bytes):  # type: ignore[no-untyped-def]
    """Granules of so many bytes."""
    return (n_bytes + GRANULE - 1) // GRANULE


@njit(cache=True, nogil=True)
def take(arrays, count, owner):  # type: ignore[no-untyped-def]
    """The first granule of a chain out of the free list; LOST if that is damaged."""
    counters, _, links, _ = arrays
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


@njit(cache=True, nogil=True)
def free(arrays, row):  # type: ignore[no-untyped-def]
    """Puts the chain of a row in front of the free list; whether it was one."""
    counters, _, links, _ = arrays
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


@njit(cache=True, nogil=True)
def enrol(claims, place, seat, row):  # type: ignore[no-untyped-def]
    """Fills a row of `claims`; what it says is copied from `row`, which gets its check."""
    row[:4] = 0
    row[7] = check_of(row, 1)
    claims[place, 1:] = row[1:]
    claims[place, 0] = seat


@njit(cache=True, nogil=True)
def vacancy(claims):  # type: ignore[no-untyped-def]
    """A free row of `claims`, or CROWDED."""
    for place in range(len(claims)):
        if claims[place, 0] == 0:
            return place
    return CROWDED


# ---- the whole table; callers hold the lock


@njit(cache=True, nogil=True)
def agrees(arrays):  # type: ignore[no-untyped-def]
    """Whether all rows are sound and have as many granules as are taken."""
    counters, index, _, claims = arrays
    count = used = 0
    for slot in range(len(index)):
        row = index[slot]
        if row[4] != 0:
            if row[7] != check_of(row, 0):
                return False
            count, used = count + 1, used + granules_of(row[6])
    for place in range(len(claims)):
        row = claims[place]
        if row[0] != 0:
            if row[7] != check_of(row, 1):
                return False
            used += granules_of(row[6])
    return counters[USED] == used and counters[COUNT] == count


@njit(cache=True, nogil=True)
def mark(links, row, number, kept, taken):  # type: ignore[no-untyped-def]
    """Marks the chain of a row with its number.

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


@njit(cache=True, nogil=True)
def repair(arrays):  # type: ignore[no-untyped-def]
    """Rebuilds everything from the rows whose check is right; False if they contradict another."""
    counters, index, links, claims = arrays
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
        if row[4] == 0 or row[7] != check_of(row, 0):
            continue
        granules = mark(links, row, count + 1, kept, taken)
        if granules < 0:
            return False
        if granules:
            last, count, used = max(last, row[4]), count + 1, used + granules
    frames = count
    for place in range(len(claims)):
        row = kept[count]
        row[:] = claims[place]
        if row[0] == 0:
            continue
        granules = 0
        if row[7] == check_of(row, 1):
            granules = mark(links, row, count + 1, kept, taken)
        if granules < 0:
            return False
        if granules:
            last, count, used = max(last, row[4]), count + 1, used + granules
        else:
            claims[place, 0] = 0
    index[:, 4] = 0
    for number in range(frames):
        if not insert(index, kept[number]):
            return False
    head = 0
    for granule in range(grown - 1, -1, -1):
        if not taken[granule]:
            links[granule] = seal(granule, head, 0)
            head = granule
    counters[FREE], counters[USED], counters[COUNT] = head, used, frames
    counters[SEQUENCE] = last
    return True


# ---- what needs no lock


@njit(cache=True, nogil=True)
def look(arrays, key, row):  # type: ignore[no-untyped-def]
    """Finds a frame without the lock; `row` gets what the index says of it.

    What it says may be wrong by the time it is used, and even now if a peer is changing the index:
    only the frame itself can prove what it is.

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
            if row[7] != check_of(row, 0):
                row[7], found = slot, LOST
        _getpid()
        if counters[VERSION] == version and not version & 1:
            return found
    return found if found >= 0 else ABSENT


@njit(cache=True, nogil=True)
def gather(arena, links, row, skip, target):  # type: ignore[no-untyped-def]
    """Copies bytes of a row's chain, from byte `skip` on; False if it is not whole."""
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


@njit(cache=True, nogil=True)
def scatter(arena, links, row, skip, source):  # type: ignore[no-untyped-def]
    """Copies bytes into the chain of a row that the caller has claimed; False if it is not whole.

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


# Changes of the shared table: each takes the lock on the file, and gives it back.
#
# A change is one compiled call without the interpreter lock, so that the file's lock is held for
# microseconds, however busy Python is; functions of `shared.table` do the work. Each answers BUSY
# if the lock is not to be had, and LOST if the table contradicts itself, which is then thrown
# away: from there on every change of every process answers LOST.

_LOCK_NOW, _UNLOCK = 2 | 4, 8
_TRIES, _PAUSE_US = 20, 50

_flock = types.ExternalFunction("flock", types.int32(types.int32, types.int32))
_usleep = types.ExternalFunction("usleep", types.int32(types.uint32))


@njit(cache=True, nogil=True)
def _enter(fd, arrays):  # type: ignore[no-untyped-def]
    """Takes the lock and marks the arrays as changing; 0, or BUSY after 1 ms, or LOST."""
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
        sound = counters[CHECK] == check_of(counters, 0)
    counters[VERSION] += torn + 1
    _getpid()  # no compiler moves a store across a call that it knows nothing about
    return 0 if sound else _leave(fd, arrays, LOST)


@njit(cache=True, nogil=True)
def _leave(fd, arrays, answer):  # type: ignore[no-untyped-def]
    counters = arrays[0]
    if answer == LOST:
        counters[STATE] = 0
    counters[CHECK] = check_of(counters, 0)
    _getpid()
    counters[VERSION] += 1
    _flock(fd, _UNLOCK)
    return answer


@njit(cache=True, nogil=True)
def claim(fd, arrays, key, seat, n_bytes, out):  # type: ignore[no-untyped-def]
    """Takes granules for a frame that is about to be written; `out` gets their row.

    Returns:
        The place in `claims`, or BUSY, THERE, GROW, FULL, CROWDED or LOST.
    """
    counters, index, links, claims = arrays
    count = granules_of(n_bytes)
    answer = _enter(fd, arrays)
    if answer < 0:
        return answer
    slot, grown, place = find(index, key, True), grown_of(arrays), vacancy(claims)
    if slot == LOST or grown < 0:
        answer = LOST
    elif slot >= 0:
        answer = THERE
    elif counters[USED] + count > len(links):
        answer = FULL
    elif counters[USED] + count > grown:
        answer = GROW
    else:
        answer = place
    if answer >= 0:
        counters[SEQUENCE] += 1
        out[4], out[6] = counters[SEQUENCE], n_bytes
        out[5] = take(arrays, count, out[4])
        if out[5] < 0:
            answer = LOST
        else:
            enrol(claims, place, seat, out)
    return _leave(fd, arrays, answer)


@njit(cache=True, nogil=True)
def grow(fd, arrays, count):  # type: ignore[no-untyped-def]
    """Says that the first `count` granules are backed by memory now; 0, BUSY or LOST."""
    counters, _, links, _ = arrays
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


@njit(cache=True, nogil=True)
def _holds(claims, place, seat, row):  # type: ignore[no-untyped-def]
    """Whether a claim is still there as it was made."""
    return (
        0 <= place < len(claims)
        and claims[place, 0] == seat
        and claims[place, 4] == row[4]
        and claims[place, 5] == row[5]
        and claims[place, 6] == row[6]
    )


@njit(cache=True, nogil=True)
def commit(fd, arrays, place, seat, row, key):  # type: ignore[no-untyped-def]
    """Makes a claimed and written frame known; 0, THERE (its granules are free), BUSY or LOST."""
    counters, index, _, claims = arrays
    answer = _enter(fd, arrays)
    if answer < 0:
        return answer
    slot = find(index, key, True)
    if slot == LOST or not _holds(claims, place, seat, row):
        answer = LOST
    elif slot >= 0:
        claims[place, 0] = 0
        answer = THERE if free(arrays, row) else LOST
    else:
        known = row.copy()
        known[:4] = key
        if insert(index, known):
            claims[place, 0] = 0
            counters[COUNT] += 1
        else:
            answer = LOST
    return _leave(fd, arrays, answer)


@njit(cache=True, nogil=True)
def release(fd, arrays, place, seat, row):  # type: ignore[no-untyped-def]
    """Gives back what was claimed and shall not become known; 0, BUSY or LOST."""
    claims = arrays[3]
    answer = _enter(fd, arrays)
    if answer < 0:
        return answer
    if _holds(claims, place, seat, row):
        claims[place, 0] = 0
        answer = 0 if free(arrays, row) else LOST
    else:
        answer = LOST
    return _leave(fd, arrays, answer)


@njit(cache=True, nogil=True)
def withdraw(fd, arrays, key, sequence, seat, out):  # type: ignore[no-untyped-def]
    """Takes a frame out of the index.

    Args:
        fd: Of the file.
        arrays: See above.
        key: Whose.
        sequence: Only if it has this number; 0 for any.
        seat: Where not 0, its granules become a claim of that seat, to be overwritten first.
        out: Gets the row.

    Returns:
        The place in `claims` or 0; BUSY, ABSENT, CROWDED or LOST.
    """
    counters, index, links, claims = arrays
    answer = _enter(fd, arrays)
    if answer < 0:
        return answer
    slot = find(index, key, True)
    if slot >= 0:
        out[:] = index[slot]
        if sequence and out[4] != sequence:
            slot = ABSENT
        elif not GRANULE < out[6] <= GRANULE * len(links):
            slot = LOST
    answer = slot
    if slot >= 0:
        answer = vacancy(claims) if seat else 0
    if answer >= 0:
        remove(index, slot)
        counters[COUNT] -= 1
        if seat:
            enrol(claims, answer, seat, out)
        elif not free(arrays, out):
            answer = LOST
    return _leave(fd, arrays, answer)


@njit(cache=True, nogil=True)
def adopt(fd, arrays, seat, heir, out):  # type: ignore[no-untyped-def]
    """Gives one claim of a seat whose holder died to another, and `out` its row.

    Returns:
        Its place; BUSY, ABSENT or LOST.
    """
    links, claims = arrays[2], arrays[3]
    answer = _enter(fd, arrays)
    if answer < 0:
        return answer
    answer = ABSENT
    for place in range(len(claims)):
        if claims[place, 0] == seat:
            out[:] = claims[place]
            sound = out[7] == check_of(out, 1) and GRANULE < out[6] <= GRANULE * len(links)
            if sound:
                claims[place, 0] = heir
            answer = place if sound else LOST
            break
    return _leave(fd, arrays, answer)


@njit(cache=True, nogil=True)
def settle(fd, arrays, slot):  # type: ignore[no-untyped-def]
    """Waits for changes that are under way, and sees all that came before.

    Args:
        fd: Of the file.
        arrays: See above.
        slot: Of a row that seems to be damaged: it must not be; -1 for none.

    Returns:
        0, BUSY or LOST.
    """
    index = arrays[1]
    answer = _enter(fd, arrays)
    if answer < 0:
        return answer
    if 0 <= slot < len(index) and index[slot, 4] != 0:
        answer = 0 if index[slot, 7] == check_of(index[slot], 0) else LOST
    return _leave(fd, arrays, answer)


@njit(cache=True, nogil=True)
def audit(fd, arrays):  # type: ignore[no-untyped-def]
    """Looks at every row, as who opens the table does; 0, BUSY or LOST."""
    answer = _enter(fd, arrays)
    if answer < 0:
        return answer
    return _leave(fd, arrays, 0 if agrees(arrays) else LOST)
