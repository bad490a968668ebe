"""NH-128 (`core.digest`) in numba, over memory by address, which may be copied in the same pass."""

from __future__ import annotations

import ctypes
import zlib
from pathlib import Path

import numpy as np
from numba import njit

from flowkv.compiled.machine_code import (
    LINE_BYTES,
    PART,
    ahead,
    data,
    kept,
    pointer,
    prefetch,
    stream,
)
from flowkv.core import digest
from flowkv.core.digest import KEYS, STEP, WORDS
from flowkv.core.geometry import GRANULE_BYTES

STAMP = zlib.crc32(Path(digest.__file__).read_bytes() + Path(__file__).read_bytes())
"""Stamp of kept machine code that contains functions of this module."""

PIECE_BYTES = 512
"""Bytes of the piece in the caches from which copies past the caches are made."""

AHEAD_BYTES, COPYING_AHEAD_BYTES = 2 * GRANULE_BYTES, 2048
"""Distance of prefetching: a sixth, and a quarter, faster by measurement."""

_WORD, _BYTE, _ZERO, _G = np.uint64(0), np.uint8(0), np.uint64(0), np.uint64(STEP)
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
mix = njit(**PART)(digest.mix)


@njit(**PART)
def _sums(words, out, first, n):
    """Sum up `n` words of a granule from its word `first` on; `out` gets them, unless it is None.

    LLVM makes vectors of this loop: a word and its two keys are loaded, and two pairs of halves
    multiplied.
    """
    keys = ahead(data(KEYS), first)
    others = ahead(keys, WORDS)
    one, two = _ZERO, _ZERO
    for i in range(n):
        word = words[i]
        if out is not None:  # a constant
            out[i] = word
        x = word + keys[i]
        one += (x & _LOW) * (x >> _HALF)
        y = word + others[i]
        two += (y & _LOW) * (y >> _HALF)
    return one, two


@njit(**PART)
def _streamed(at, target, scratch):
    """Sum up a granule and copy it past the caches, out of the summed piece."""
    one, two = _ZERO, _ZERO
    n = PIECE_BYTES // 8
    for first in range(0, WORDS, n):
        of = pointer(at + 8 * first, _WORD)
        h, k = _sums(of, pointer(scratch, _WORD), first, n)
        one, two = one + h, two + k
        for line in range(0, PIECE_BYTES, LINE_BYTES):
            prefetch(of, (COPYING_AHEAD_BYTES + line) // 8)
            stream(target + 8 * first + line, scratch + line)
    return one, two


@njit(**PART)
def _last_word(at, target, n):
    """Return the word of the last `n` bytes, filled up with zeros; copy the bytes, too."""
    word = _ZERO
    for i in range(n):
        byte = pointer(at, _BYTE)[i]
        word |= np.uint64(byte) << np.uint64(8 * i)
        if target:
            pointer(target, _BYTE)[i] = byte
    return word


@njit(**PART)
def digest_of(address, n_bytes, target, scratch):
    """Return the digest of memory, low half and high half, as uint64.

    Each byte is read once. With a target, the digest is that of the bytes in the target, even if
    another thread writes to the memory meanwhile.

    Args:
        address: int64.
        n_bytes: int64.
        target: Address of memory that does not overlap, for a copy; 0 for none.
        scratch: Address of `PIECE_BYTES`: whole granules go to an aligned target past the caches,
            and the caller must call `fence`. 0 to copy through the caches.
    """
    one, two = _ZERO, _ZERO
    streams = scratch != 0 and target != 0 and target % LINE_BYTES == 0
    for granule in range((n_bytes + GRANULE_BYTES - 1) // GRANULE_BYTES):
        skip = granule * GRANULE_BYTES
        left = min(GRANULE_BYTES, n_bytes - skip)
        n, at, to = left // 8, address + skip, target + skip
        words = pointer(at, _WORD)
        if target == 0:
            for line in range(0, left, LINE_BYTES):
                prefetch(words, (AHEAD_BYTES + line) // 8)
            h, k = _sums(words, None, 0, n)
        elif streams and left == GRANULE_BYTES:
            h, k = _streamed(at, to, scratch)
        else:
            h, k = _sums(words, pointer(to, _WORD), 0, n)
        if left % 8:
            word = _last_word(at + 8 * n, to + 8 * n if target else 0, left % 8)
            x, y = word + data(KEYS)[n], word + data(KEYS)[WORDS + n]
            h += (x & _LOW) * (x >> _HALF)
            k += (y & _LOW) * (y >> _HALF)
        u = mix(h + np.uint64(granule + 1) * _G)
        one += u
        two += mix(k + u)
    low = mix(one + two + np.uint64(n_bytes + 1) * _G)
    return low, mix(two + low)


@kept(STAMP, nogil=True, error_model="numpy")
def digest_all(address, n_bytes, step, out):
    """Digest each `step` bytes of memory; `out` is the address of two uint64 for each."""
    found = pointer(out, _WORD)
    for i in range(max(1, (n_bytes + step - 1) // step)):
        skip = i * step
        low, high = digest_of(address + skip, min(step, n_bytes - skip), 0, 0)
        found[2 * i] = low
        found[2 * i + 1] = high


def compile_digest() -> None:
    """Compile `core.digest`, or load it from the cache, ahead of its first use."""
    found = ctypes.create_string_buffer(16)
    digest_all(ctypes.addressof(found), 0, 1, ctypes.addressof(found))
    digest.compiled = digest_all
