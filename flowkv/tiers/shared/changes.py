"""Changes of the shared table: each takes the lock on the file, and gives it back.

A change is one compiled call without the interpreter lock, so that the file's lock is held for
microseconds, however busy Python is; functions of `shared.table` do the work. Each answers BUSY if
the lock is not to be had, and LOST if the table contradicts itself, which is then thrown away: from
there on every change of every process answers LOST.
"""

from __future__ import annotations

from numba import njit, types

from flowkv.tiers.shared.table import (
    ABSENT,
    BUSY,
    CHECK,
    COUNT,
    FREE,
    FULL,
    GRANULE,
    GROW,
    LOST,
    REPAIRS,
    SEQUENCE,
    SOUND,
    STATE,
    THERE,
    USED,
    VERSION,
    agrees,
    check_of,
    enrol,
    find,
    free,
    granules_of,
    grown_of,
    insert,
    remove,
    repair,
    seal,
    set_grown,
    take,
    vacancy,
)

_LOCK_NOW, _UNLOCK = 2 | 4, 8
_TRIES, _PAUSE_US = 20, 50

_flock = types.ExternalFunction("flock", types.int32(types.int32, types.int32))
_usleep = types.ExternalFunction("usleep", types.int32(types.uint32))
_getpid = types.ExternalFunction("getpid", types.int32())


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
