"""The numba kernel of `checksum`."""

from __future__ import annotations

import numpy as np
from numba import njit

from flowkv.kernels.cpu.bits import pointer
from flowkv.kernels.sums import FIRST, SECOND, STEP

_STEP, _FIRST, _SECOND = np.uint64(STEP), np.uint64(FIRST), np.uint64(SECOND)


@njit(error_model="numpy")
def sum_blocks(a, part, parts):
    """Sum up every block of a slice; a: words, their number, those of a block, sums."""
    words = pointer(a[0], np.uint64(0))
    sums = pointer(a[3], np.uint64(0))
    blocks = (a[1] + a[2] - 1) // a[2]
    for block in range(blocks * part // parts, blocks * (part + 1) // parts):
        first = block * a[2]
        key, one, two = np.uint64(0), np.uint64(0), np.uint64(0)
        for at in range(first, min(first + a[2], a[1])):
            key += _STEP
            x = words[at] ^ key
            x = (x ^ (x >> np.uint64(32))) * _FIRST
            x = (x ^ (x >> np.uint64(29))) * _SECOND
            x ^= x >> np.uint64(32)
            one += x
            two += x * (key | np.uint64(1))
        sums[2 * block] = one
        sums[2 * block + 1] = two
    return blocks
