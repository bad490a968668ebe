"""Changes of the shared table: each takes the lock on the file, and gives it back.

A change is one compiled call without the interpreter lock, so that the file's lock is held for
microseconds, however busy Python is; functions of `shared.table` do the work.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types

from flowkv.tiers.shared.table import (
    ABSENT,
    BUSY,
    COUNT,
    CROWDED,
    FULL,
    GROW,
    GROWN,
    REPAIRS,
    SEQUENCE,
    THERE,
    USED,
    VERSION,
    find,
    free,
    granules_of,
    insert,
    remove,
    repair,
    take,
)

_LOCK_NOW, _UNLOCK = 2 | 4, 8
_TRIES, _PAUSE_US = 20, 50

_flock = types.ExternalFunction("flock", types.int32(types.int32, types.int32))
_usleep = types.ExternalFunction("usleep", types.int32(types.uint32))
_getpid = types.ExternalFunction("getpid", types.int32())


@njit(cache=True, nogil=True)
def _enter(fd, arrays):  # type: ignore[no-untyped-def]
    """Takes the lock and marks the arrays as changing; False if it is not to be had for 1 ms."""
    counters = arrays[0]
    tries = 0
    while _flock(fd, _LOCK_NOW) != 0:
        tries += 1
        if tries == _TRIES:
            return False
        _usleep(_PAUSE_US)
    if counters[VERSION] & 1:
        repair(arrays)
        counters[REPAIRS] += 1
        _getpid()
        counters[VERSION] += 1
    counters[VERSION] += 1
    _getpid()  # no compiler moves a store across a call that it knows nothing about
    return True


@njit(cache=True, nogil=True)
def _leave(fd, arrays):  # type: ignore[no-untyped-def]
    _getpid()
    arrays[0][VERSION] += 1
    _flock(fd, _UNLOCK)


@njit(cache=True, nogil=True)
def claim(fd, arrays, key, seat, n_bytes, out):  # type: ignore[no-untyped-def]
    """Takes granules for a frame that is about to be written; `out` gets the first one.

    Returns:
        The row of `claims`, or BUSY, THERE, GROW, FULL or CROWDED.
    """
    counters, index, links, claims = arrays
    count = granules_of(n_bytes)
    if not _enter(fd, arrays):
        return BUSY
    answer = FULL
    if find(index, key) >= 0:
        answer = THERE
    elif counters[USED] + count <= len(links):
        row = 0
        while row < len(claims) and claims[row, 0] != 0:
            row += 1
        if counters[USED] + count > counters[GROWN]:
            answer = GROW
        elif row < len(claims):
            first = take(arrays, count)
            claims[row, 1], claims[row, 2] = first, n_bytes
            claims[row, 0] = seat
            out[0] = first
            answer = row
        else:
            answer = CROWDED
    _leave(fd, arrays)
    return answer


@njit(cache=True, nogil=True)
def grow(fd, arrays, count):  # type: ignore[no-untyped-def]
    """Says that the first `count` granules are backed by memory now; BUSY, or 0."""
    if not _enter(fd, arrays):
        return BUSY
    arrays[0][GROWN] = max(arrays[0][GROWN], min(count, len(arrays[2])))
    _leave(fd, arrays)
    return 0


@njit(cache=True, nogil=True)
def commit(fd, arrays, claimed, key):  # type: ignore[no-untyped-def]
    """Makes a claimed and written frame known; BUSY, THERE (its granules are free again), or 0."""
    counters, index, _, claims = arrays
    if not _enter(fd, arrays):
        return BUSY
    answer, first, n_bytes = 0, claims[claimed, 1], claims[claimed, 2]
    if find(index, key) >= 0:
        answer = THERE
        claims[claimed, 0] = 0
        free(arrays, first, granules_of(n_bytes))
    else:
        counters[SEQUENCE] += 1
        row = np.zeros(8, np.int64)
        row[:4] = key
        row[4], row[5], row[6] = counters[SEQUENCE], first, n_bytes
        insert(index, row)
        claims[claimed, 0] = 0
        counters[COUNT] += 1
    _leave(fd, arrays)
    return answer


@njit(cache=True, nogil=True)
def release(fd, arrays, claimed):  # type: ignore[no-untyped-def]
    """Gives back what was claimed and shall not become known; BUSY, or 0."""
    claims = arrays[3]
    if not _enter(fd, arrays):
        return BUSY
    first, n_bytes = claims[claimed, 1], claims[claimed, 2]
    claims[claimed, 0] = 0
    free(arrays, first, granules_of(n_bytes))
    _leave(fd, arrays)
    return 0


@njit(cache=True, nogil=True)
def withdraw(fd, arrays, key, sequence, seat):  # type: ignore[no-untyped-def]
    """Takes a frame out of the index.

    Args:
        fd: Of the file.
        arrays: See above.
        key: Whose.
        sequence: Only if it has this number; 0 for any.
        seat: Where not 0, its granules become a claim of that seat, to be overwritten first.

    Returns:
        The row of `claims` or 0; BUSY, ABSENT or CROWDED.
    """
    counters, index, _, claims = arrays
    if not _enter(fd, arrays):
        return BUSY
    answer, slot = ABSENT, find(index, key)
    if slot >= 0 and (sequence == 0 or index[slot, 4] == sequence):
        first, n_bytes, row = index[slot, 5], index[slot, 6], 0
        while seat and row < len(claims) and claims[row, 0] != 0:
            row += 1
        if row == len(claims):
            answer = CROWDED
        else:
            answer = row
            remove(index, slot)
            counters[COUNT] -= 1
            if seat:
                claims[row, 1], claims[row, 2] = first, n_bytes
                claims[row, 0] = seat
            else:
                free(arrays, first, granules_of(n_bytes))
    _leave(fd, arrays)
    return answer


@njit(cache=True, nogil=True)
def adopt(fd, arrays, seat, heir):  # type: ignore[no-untyped-def]
    """Gives one claim of a seat whose holder died to another; its row, BUSY or ABSENT."""
    claims = arrays[3]
    if not _enter(fd, arrays):
        return BUSY
    answer = ABSENT
    for row in range(len(claims)):
        if claims[row, 0] == seat:
            claims[row, 0] = heir
            answer = row
            break
    _leave(fd, arrays)
    return answer


@njit(cache=True, nogil=True)
def settle(fd, arrays):  # type: ignore[no-untyped-def]
    """Waits for changes that are under way, and sees all that came before; BUSY, or 0."""
    if not _enter(fd, arrays):
        return BUSY
    _leave(fd, arrays)
    return 0
