"""The compiled digest, called from Python."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from tests.inside import swapped, xxh3_128


@njit(cache=True, nogil=True, error_model="numpy")
def _digest_many(addresses, n_bytes, digests):  # type: ignore[no-untyped-def]
    for i in range(len(addresses)):
        low, high = xxh3_128(np.uint64(addresses[i]), n_bytes)
        digests[i, 0], digests[i, 1] = swapped(high), swapped(low)


def digest_many(addresses: NDArray[np.uint64], n_bytes: int) -> NDArray[np.uint8]:
    """The digests of pieces of memory of one length, as the library gives them: `[n, 16]`."""
    digests = np.empty((len(addresses), 2), np.uint64)
    _digest_many(addresses, np.uint64(n_bytes), digests)
    return digests.view(np.uint8)


def digest(address: int, n_bytes: int) -> bytes:
    """The digest of one piece of memory."""
    return digest_many(np.array([address], np.uint64), n_bytes).tobytes()
