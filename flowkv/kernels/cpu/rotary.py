"""numba kernels that rotate keys (RoPE): on their way into pages, and where they lie in pages.

The functions name no fast-math flags, so that every product and sum is rounded by itself, as the
contract of `operands.Rotary` wants; see `cpu.move` for how they take their operands.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from flowkv.kernels.cpu.bits import ahead, memcpy, narrow, pointer, widen

GRANULE = 4096
_JIT = {"error_model": "numpy", "fastmath": False}
_INLINE = {**_JIT, "forceinline": True}


@njit(**_INLINE)
def _int32_at(address, i):
    return np.int64(pointer(address, np.int32(0))[i])


@njit(**_INLINE)
def _rotate(to, of, cos, sin, pairs, interleaved, like):
    """Write the rotation of the 2 * pairs elements at `of` to `to`, another place."""
    if interleaved:
        for i in range(pairs):
            x, y, c, s = widen(of[2 * i]), widen(of[2 * i + 1]), cos[i], sin[i]
            to[2 * i] = narrow(x * c - y * s, like)
            to[2 * i + 1] = narrow(y * c + x * s, like)
        return
    of_y, to_y = ahead(of, pairs), ahead(to, pairs)
    for i in range(pairs):
        x, y, c, s = widen(of[i]), widen(of_y[i]), cos[i], sin[i]
        to[i] = narrow(x * c - y * s, like)
        to_y[i] = narrow(y * c + x * s, like)


@njit(**_INLINE)
def _rotate_here(p, cos, sin, pairs, interleaved, like):
    """Rotate the 2 * pairs elements at `p`, four times faster than `_rotate` could from p to p.

    LLVM vectorises loops under the condition that what is written is not read by later rounds, and
    asks that at run time of any two pointers, of equal ones too.
    """
    if interleaved:
        for i in range(pairs):
            x, y, c, s = widen(p[2 * i]), widen(p[2 * i + 1]), cos[i], sin[i]
            p[2 * i] = narrow(x * c - y * s, like)
            p[2 * i + 1] = narrow(y * c + x * s, like)
        return
    p_y = ahead(p, pairs)
    for i in range(pairs):
        x, y, c, s = widen(p[i]), widen(p_y[i]), cos[i], sin[i]
        p[i] = narrow(x * c - y * s, like)
        p_y[i] = narrow(y * c + x * s, like)


@njit(**_JIT)
def append(a, turn, likes, part, parts):
    """Write packed tokens into pages, their keys rotated; operands `a` are those of `cpu.move`.

    turn: addresses of cos and sin, pairs, first rotated dim, whether interleaved, bytes of an
    element of a page. `likes` are the types of an element of a packed key and of a page.
    """
    like_of, like = likes
    pairs, start, interleaved = turn[2], turn[3], turn[4] != 0
    arena, starts = a[2], a[6]
    size, k_bytes, v_bytes = a[9], a[10], a[11]
    dims, rotated = k_bytes // turn[5], start + 2 * pairs
    tokens = _int32_at(starts, a[7])
    low, high = tokens * part // parts, tokens * (part + 1) // parts
    for b in range(a[7]):
        first, end = _int32_at(starts, b), _int32_at(starts, b + 1)
        shift = _int32_at(a[5], b) - end  # position of packed token n is n + shift
        line = a[3] + 4 * a[14] * _int32_at(a[4], b)
        for n in range(max(first, low), min(end, high)):
            page, t = (n + shift) // size, (n + shift) % size
            cos = pointer(turn[0] + 4 * pairs * (n + shift), np.float32(0))
            sin = pointer(turn[1] + 4 * pairs * (n + shift), np.float32(0))
            run = arena + GRANULE * _int32_at(line, page)
            for h in range(a[8]):
                of = pointer(a[0] + n * a[15] + h * a[16], like_of)
                to = pointer(run + t * k_bytes, like)
                for d in range(start):
                    to[d] = narrow(widen(of[d]), like)
                _rotate(ahead(to, start), ahead(of, start), cos, sin, pairs, interleaved, like)
                for d in range(rotated, dims):
                    to[d] = narrow(widen(of[d]), like)
                memcpy(run + a[13] + t * v_bytes, a[1] + n * a[17] + h * a[18], v_bytes)
                run += a[12]
    return high - low


@njit(**_JIT)
def reposition(a, turn, like, part, parts):
    """Rotate the keys of pages in place; the slice is a range of (page, layer, head).

    a: arena (with layer offset), pages, turns; n, layers, Hk, P, bytes of a K row, run bytes,
    stripe bytes. `turn` as for `append`.
    """
    pairs, interleaved = turn[2], turn[4] != 0
    units = a[3] * a[4] * a[5]
    for unit in range(units * part // parts, units * (part + 1) // parts):
        head, layer = unit % a[5], unit // a[5] % a[4]
        n = unit // (a[5] * a[4])
        line = _int32_at(a[2], n)
        if line < 0:
            continue
        cos = pointer(turn[0] + 4 * pairs * line, np.float32(0))
        sin = pointer(turn[1] + 4 * pairs * line, np.float32(0))
        key = a[0] + GRANULE * _int32_at(a[1], n) + layer * a[9] + head * a[8]
        key += turn[3] * turn[5]
        for _ in range(a[6]):
            _rotate_here(pointer(key, like), cos, sin, pairs, interleaved, like)
            key += a[7]
    return units
