"""Merge of partials on the CPU: outputs weighted by their shares of the softmax's sum."""

from __future__ import annotations

import numpy as np
from numba import njit

from flowkv.kernels.cpu.bits import FAST, ahead, exp2, narrow, pointer, widen
from flowkv.kernels.cpu.inner import ZERO

_NONE = np.float32(-np.inf)
_LOG2_E = np.float32(np.log2(np.e))


@njit(fastmath=FAST, error_model="numpy")
def merge(a, like, part, parts):
    """Merge slice `part` of `parts` of the lines (token, head).

    `a` is int64 [1 + inputs + 1, 2]: first lines and Dv; then the addresses of o (whose elements
    travel as `like`) and lse (float32) of each input, last of the result.
    """
    count, lines, dim = a.shape[0] - 2, a[0, 0], a[0, 1]
    addresses = a[1:]
    sums, weights = np.empty(dim, np.float32), np.empty(count, np.float32)
    to, to_lse = pointer(addresses[count, 0], like), pointer(addresses[count, 1], ZERO)
    for line in range(lines * part // parts, lines * (part + 1) // parts):
        top = _NONE
        for i in range(count):
            top = max(top, pointer(addresses[i, 1], ZERO)[line])
        total = ZERO
        for i in range(count):
            lse = pointer(addresses[i, 1], ZERO)[line]
            weights[i] = ZERO if lse == _NONE else exp2((lse - top) * _LOG2_E)
            total += weights[i]
        sums[:] = ZERO
        for i in range(count):
            if weights[i] != ZERO:  # a part without tokens may hold anything
                o = ahead(pointer(addresses[i, 0], like), line * dim)
                for d in range(dim):
                    sums[d] += weights[i] * widen(o[d])
        inverse = ZERO if total == ZERO else np.float32(1) / total
        row = ahead(to, line * dim)
        for d in range(dim):
            row[d] = narrow(sums[d] * inverse, like)
        to_lse[line] = _NONE if total == ZERO else top + np.log(total)
    return count
