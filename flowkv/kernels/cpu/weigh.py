"""From a page's logits to its weights on the CPU, under every switch of `operands.Scoring`."""

from __future__ import annotations

import numpy as np
from numba import njit

from flowkv.kernels.cpu.attend import FIELDS, GROUP, LOG2_E, MOST_ROWS, WINDOW
from flowkv.kernels.cpu.bits import FAST, ahead, exp2, order, pointer, tanh, unorder, widen
from flowkv.kernels.cpu.inner import ZERO

BASE, RUN, V_AT, K_SCALES, V_SCALES = range(5)
FORMAT_FIELDS = 5
ALIBI, TREE, MASS, SHARES, PAGES, CAUSAL, CHUNK, FORMATS = range(FIELDS, FIELDS + 8)
"""Places in the vector `a` of a call behind those of `cpu.attend`.

ALIBI, TREE and MASS are addresses (0: absent) of operands of `Scoring`, with PAGES pages to a row
of the mass; SHARES is that of float32 [B, Hk, PAGES, MOST_ROWS, 2], the maximum and the sum that a
query row found in a page, or 0. CHUNK are the pages of a piece. From FORMATS on lie, for each codec
of `core.layout.CODECS`, five integers: the address of the layer in granule 0 (0: no such pages),
the bytes of a run, and the offsets in it of V, of the scales of K and of those of V.
"""

NONE = np.float32(-np.inf)
_INLINE = {"fastmath": FAST, "error_model": "numpy", "forceinline": True}


@njit(**_INLINE)
def weigh(a, s, r, place, scales, m, cap):
    """Logits of query row r for a page's tokens to probabilities; 0 for those that it cannot see.

    `place` is (first new token, packed; head; place of the page's token 0 counted from the first
    new one; first token of the page that any row sees; the first that none does; anything).
    `scales` is the address of float16 scales of the logits, or 0; m the row's maximum so far.

    Returns the new maximum, the sum, and the factor for what was accumulated under the old maximum.
    """
    first, head, offset, low, high, _ = place
    end, j = high, r // a[GROUP]
    last = j - offset  # where the query row's own token stands, counted from the page's first
    if a[CAUSAL]:
        low = max(low, last - a[WINDOW] + 1)
        if not a[TREE]:
            high = min(high, last + 1)
    if scales:
        factors = pointer(scales, np.int16(0))
        for t in range(low, high):
            s[t] *= widen(factors[t])
    if cap > ZERO:
        for t in range(low, high):
            s[t] = tanh(s[t]) * cap
    if a[ALIBI]:
        slope = pointer(a[ALIBI], ZERO)[head * a[GROUP] + r % a[GROUP]] * LOG2_E
        for t in range(low, high):
            s[t] += slope * np.float32(t - last)
    if a[TREE]:
        bits = pointer(a[TREE], np.int64(0))[first + j]
        for t in range(max(low, -offset), high):
            if not (bits >> (t + offset)) & 1:
                s[t] = NONE
    most = order(m)
    for t in range(low, high):
        most = max(most, order(s[t]))
    top = unorder(most)
    if top == NONE or high <= low:
        high = low  # nothing of this page
    total = ZERO
    for t in range(min(low, end)):
        s[t] = ZERO
    for t in range(low, high):
        p = exp2(s[t] - top)
        s[t] = p
        total += p
    for t in range(max(low, high), (end + 3) // 4 * 4):  # values are mixed in fours
        s[t] = ZERO
    keep = np.float32(1) if high <= low else exp2(m - top)
    return top, total, keep


@njit(**_INLINE)
def share(shares, rows, m, z):
    """The weight that finished query rows give to a page, from what they found in it."""
    total = ZERO
    for r in range(rows):
        if z[r] != ZERO:
            total += shares[2 * r + 1] * exp2(shares[2 * r] - m[r]) / z[r]
    return total


@njit(**_INLINE)
def shares_of(a, item, page):
    """Where the shares of a page of an item (row * Hk + head) begin."""
    return ahead(pointer(a[SHARES], ZERO), (item * a[PAGES] + page) * 2 * a[MOST_ROWS])
