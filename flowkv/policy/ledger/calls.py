"""Loops over blocks that come, go, wait, or change their place."""

from __future__ import annotations

import numpy as np

from flowkv.policy.ledger.blocks import (
    DIGEST,
    MAX_PLACES,
    PINNED,
    calm,
    depart,
    land_all,
    parent_of,
    rest,
    settled,
)
from flowkv.policy.order.compiled import Array, fold, kernel


@kernel
def land(blocks: Array, state: Array, slots: Array, terms: tuple[int, int, int], out: Array) -> int:
    """`land_all`, as a call."""
    return land_all(blocks, state, slots, terms, out)


@kernel
def fitting(blocks: Array, slots: Array, k: int, size: int, room: int) -> int:
    """How many leading blocks a place has room for, where those present need none."""
    for i in range(len(slots)):
        b = blocks[slots[i]]
        if not b.here >> k & 1:
            room -= b.bytes if b.here else size
            if room < 0:
                return i
    return len(slots)


@kernel
def held(blocks: Array, k: int, slots: Array) -> bool:
    """Whether all these lie in a place, none of them named twice. Anything may be asked."""
    bit = np.uint8(1 << k)
    n = 0
    for s in slots:
        if not 0 <= s < len(blocks) or not blocks[s].here & bit:
            break
        blocks[s].here ^= bit  # so that the next one of this number does not
        n += 1
    for i in range(n):
        blocks[slots[i]].here ^= bit
    return n == len(slots)


@kernel
def leave(blocks: Array, state: Array, k: int, slots: Array) -> None:
    """Blocks were given up by a place."""
    fold(state, DIGEST, (k << 32) + len(slots))
    for s in slots:
        fold(state, DIGEST, s)
        depart(blocks, state, k, s)


@kernel
def expire(blocks: Array, state: Array, k: int, slots: Array, out: Array) -> int:
    """Takes away what expired, but marks what is pinned; writes what left, returns how many."""
    bit = np.uint8(1 << k)
    n = 0
    for s in slots:
        if not 0 <= s < len(blocks) or not blocks[s].here & bit:
            continue
        if blocks[s].pins > 0:
            blocks[s].stale |= bit
        else:
            fold(state, DIGEST, s)
            depart(blocks, state, k, s)
            out[n] = s
            n += 1
    return n


@kernel
def pin(blocks: Array, state: Array, slots: Array) -> None:
    """One more reason for blocks to stay, and to stay known."""
    for s in slots:
        b = blocks[s]
        b.pins += 1
        if b.pins > 1:
            continue
        if b.ghost:
            calm(blocks, state, s)
        for k in range(MAX_PLACES):
            if b.here >> k & 1:
                state[PINNED + k] += b.bytes


@kernel
def unpin(blocks: Array, state: Array, slots: Array, done: bool, out: Array) -> int:
    """One reason less.

    Args:
        blocks: Records.
        state: Totals.
        slots: Blocks.
        done: What was to be waited for has come; else it never will, unless others wait too.
        out: Bit sets of places.

    Returns:
        How many blocks left a place, or several; `out[0]` names them and `out[1]` the places.
    """
    n = 0
    for i in range(len(slots) - 1, -1, -1):
        s = slots[i]
        b = blocks[s]
        b.pins -= 1
        if done:
            b.flight = 0
        if b.pins > 0:
            continue
        for k in range(MAX_PLACES):
            if b.here >> k & 1:
                state[PINNED + k] -= b.bytes
        out[0, n], out[1, n] = s, b.flight | b.stale
        if out[1, n] == 0:
            rest(blocks, state, s)
            continue
        for k in range(MAX_PLACES):
            if out[1, n] >> k & 1:
                depart(blocks, state, k, s)
        n += 1
    return n


@kernel
def watch(blocks: Array, state: Array, slots: Array, by: int) -> None:
    """A queued request names blocks (`by` = 1), or does so no longer (-1)."""
    for s in slots:
        blocks[s].watch += by
        if blocks[s].ghost:
            calm(blocks, state, s)
        if by < 0:
            rest(blocks, state, s)


@kernel
def lower(blocks: Array, k: int, victims: Array, out: Array) -> int:
    """What must be in place `k` so that the victims' chains are whole there; takes up the room.

    Victims come leaf first. Writes root to leaf: the victims and those of their ancestors that can
    be read anywhere and are not in `k`. Nothing of a chain that a gap cuts off, but the victim.
    """
    n = 0
    bit = np.uint8(1 << k)
    for i in range(len(victims) - 1, -1, -1):
        s = np.int64(victims[i])
        start = n
        while s >= 0 and not blocks[s].here & bit and settled(blocks, s) and n < len(out):
            out[n] = s
            n += 1
            s = parent_of(blocks, s)
        for j in range((n - start) // 2):
            out[start + j], out[n - 1 - j] = out[n - 1 - j], out[start + j]
        for j in range(start, n):
            blocks[out[j]].here |= bit
    for j in range(n):
        blocks[out[j]].here &= ~bit
    return n


@kernel
def gap(blocks: Array, s: int, source: int, target: int, out: Array) -> tuple[int, int]:
    """Writes the way up from a block to what is in `target`, leaf to root.

    Returns:
        How many blocks are missing there and can be had from `source` without a gap, and the slot
        of the deepest that is there, or -1. None if the block itself cannot be had, or is none.
    """
    n = 0
    if s >= len(blocks):
        return 0, -1
    while s >= 0 and not blocks[s].here >> target & 1:
        if n == len(out):
            return 0, -1
        out[n] = s
        n += 1
        s = parent_of(blocks, s)
    bottom = 0  # what lies below a block that cannot be had is of no use
    for i in range(n):
        if not settled(blocks, out[i]) >> source & 1:
            bottom = i + 1
    for i in range(bottom, n):
        out[i - bottom] = out[i]
    return n - bottom, s


@kernel
def readable(blocks: Array, slots: Array, source: int, target: int, out: Array) -> int:
    """Writes the leading slots that can be read in `source` and are not in `target` yet."""
    n = 0
    for s in slots:
        if not 0 <= s < len(blocks):
            break
        if blocks[s].here >> target & 1 or not settled(blocks, s) >> source & 1:
            break
        out[n] = s
        n += 1
    return n
