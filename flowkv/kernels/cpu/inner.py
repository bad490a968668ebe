"""The two inner loops of CPU attention, over the elements of a head: scores and mix.

Both serve a block of 4, 2 or 1 query rows at once, so that an element of K or V is loaded and
widened once for all of them, and two (scores) or four (mix) tokens, so that the query rows and
accumulators are loaded less often than they are used. LLVM vectorises the loops over d. Query rows,
scores and accumulators are float32 scratch; k and v point into a page.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from flowkv.kernels.cpu.bits import FAST, ahead, widen

_JIT = {"fastmath": FAST, "error_model": "numpy", "forceinline": True}
ZERO = np.float32(0)


@njit(**_JIT)
def _scores4(q, k, dim, s, size):
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = ZERO
    k1 = ahead(k, dim)
    q1, q2, q3 = ahead(q, dim), ahead(q, 2 * dim), ahead(q, 3 * dim)
    for d in range(dim):
        x, y = widen(k[d]), widen(k1[d])
        a0 += q[d] * x
        b0 += q[d] * y
        a1 += q1[d] * x
        b1 += q1[d] * y
        a2 += q2[d] * x
        b2 += q2[d] * y
        a3 += q3[d] * x
        b3 += q3[d] * y
    s[0], s[1] = a0, b0
    s[size], s[size + 1] = a1, b1
    s[2 * size], s[2 * size + 1] = a2, b2
    s[3 * size], s[3 * size + 1] = a3, b3


@njit(**_JIT)
def _scores2(q, k, dim, s, size):
    a0 = a1 = b0 = b1 = ZERO
    k1, q1 = ahead(k, dim), ahead(q, dim)
    for d in range(dim):
        x, y = widen(k[d]), widen(k1[d])
        a0 += q[d] * x
        b0 += q[d] * y
        a1 += q1[d] * x
        b1 += q1[d] * y
    s[0], s[1] = a0, b0
    s[size], s[size + 1] = a1, b1


@njit(**_JIT)
def _scores1(q, k, dim, s):
    a = b = ZERO
    k1 = ahead(k, dim)
    for d in range(dim):
        a += q[d] * widen(k[d])
        b += q[d] * widen(k1[d])
    s[0], s[1] = a, b


@njit(**_JIT)
def scores(rows, q, k, dim, s, size):
    """s[r * size + t] = q[r] . k[t] for `rows` (4, 2 or 1) query rows and the tokens t = 0, 1."""
    if rows == 4:
        _scores4(q, k, dim, s, size)
    elif rows == 2:
        _scores2(q, k, dim, s, size)
    else:
        _scores1(q, k, dim, s)


@njit(**_JIT)
def _mix4(p, size, v, dim, o, stride):
    v0, v1, v2, v3 = v
    p1, p2, p3 = ahead(p, size), ahead(p, 2 * size), ahead(p, 3 * size)
    a0, a1, a2, a3 = p[0], p[1], p[2], p[3]
    b0, b1, b2, b3 = p1[0], p1[1], p1[2], p1[3]
    c0, c1, c2, c3 = p2[0], p2[1], p2[2], p2[3]
    d0, d1, d2, d3 = p3[0], p3[1], p3[2], p3[3]
    o1, o2, o3 = ahead(o, stride), ahead(o, 2 * stride), ahead(o, 3 * stride)
    for d in range(dim):
        w, x, y, z = widen(v0[d]), widen(v1[d]), widen(v2[d]), widen(v3[d])
        o[d] += a0 * w + a1 * x + a2 * y + a3 * z
        o1[d] += b0 * w + b1 * x + b2 * y + b3 * z
        o2[d] += c0 * w + c1 * x + c2 * y + c3 * z
        o3[d] += d0 * w + d1 * x + d2 * y + d3 * z


@njit(**_JIT)
def _mix2(p, size, v, dim, o, stride):
    v0, v1, v2, v3 = v
    p1, o1 = ahead(p, size), ahead(o, stride)
    a0, a1, a2, a3 = p[0], p[1], p[2], p[3]
    b0, b1, b2, b3 = p1[0], p1[1], p1[2], p1[3]
    for d in range(dim):
        w, x, y, z = widen(v0[d]), widen(v1[d]), widen(v2[d]), widen(v3[d])
        o[d] += a0 * w + a1 * x + a2 * y + a3 * z
        o1[d] += b0 * w + b1 * x + b2 * y + b3 * z


@njit(**_JIT)
def _mix1(p, v0, v1, v2, v3, dim, o):
    a0, a1, a2, a3 = p[0], p[1], p[2], p[3]
    for d in range(dim):
        o[d] += a0 * widen(v0[d]) + a1 * widen(v1[d]) + a2 * widen(v2[d]) + a3 * widen(v3[d])


@njit(**_JIT)
def mix(rows, p, size, v, tokens, dims, o, stride):
    """o[r] += sum of p[r * size + i] * v[t + i], i = 0 to 3, for `rows` (4, 2 or 1) query rows.

    `dims` is (elements of a value, elements from one to the next). Lines of o begin `stride`
    elements from each other.

    `tokens` is (t, low, high): of tokens outside [low, high), whose p are 0, nothing may be read,
    for 0 * NaN is NaN: the nearest one inside stands in.
    """
    t, low, high = tokens
    dim, row = dims
    v0 = ahead(v, max(t, low) * row)
    v1 = ahead(v, min(max(t + 1, low), high - 1) * row)
    v2 = ahead(v, min(max(t + 2, low), high - 1) * row)
    v3 = ahead(v, min(max(t + 3, low), high - 1) * row)
    if rows == 4:
        _mix4(p, size, (v0, v1, v2, v3), dim, o, stride)
    elif rows == 2:
        _mix2(p, size, (v0, v1, v2, v3), dim, o, stride)
    else:
        _mix1(p, v0, v1, v2, v3, dim, o)
