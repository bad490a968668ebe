"""NH-128, the digest of bytes in frames: its definition, in numpy; compiled code replaces it.

    digest(data)            16 bytes
    digests(data, step)     16 bytes for each `step` bytes of the data

The digest finds accidents: flipped bits, torn writes, blocks that are stale, moved or swapped. It
stops no attacker, as it has no secret. GPUs (`flowkv.kernels`), numba (`compiled.digest`) and
numpy compute it bit for bit alike, in any order and any number of parts:

    of granule g (4096 bytes) of the data, with its words w of 64 bits, little-endian
        x = w + KEYS[0, i] mod 2^64,   h = sum over i of low32(x) * high32(x) mod 2^64
        y = w + KEYS[1, i] mod 2^64,   k = sum over i of low32(y) * high32(y) mod 2^64
        u = mix(h + (g + 1) G),        v = mix(k + u)
    of the data, n bytes               low = mix(sum of u + v, + (n + 1) G)
                                       high = mix(sum of v, + low)

The last word is filled up with zeros; words behind it, in the last granule, are left out.

Within a granule this is NH (Black et al., "UMAC", 1999), twice: with random keys, any two contents
of one length agree in one sum with a probability near 2^-32, and the keys of the second sum are
independent: 2^-64, also for words that are swapped, that change by the same amount, or that are
shifted, as each word meets keys of its own place. (Keys in arithmetic progression would let swapped
blocks cancel.) Random changes of more than a word agree with 2^-128. The step from (h, k) to (u, v)
is a bijection that depends on the place, with all of its bits mixed, so granules that are swapped
or moved agree with 2^-128; so do other lengths. Bits flipped in one word agree only where both
factors of a product vanish by chance, 2^-64.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowkv.core.geometry import GRANULE_BYTES
from flowkv.core.memory import address_of

STEP, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 0xBF58476D1CE4E5B9
"""G, and the multipliers of `mix`; odd, from Steele et al., "Fast splittable pseudorandom number
generators" (2014), and Degski's mixer."""

DIGEST_BYTES = 16
WORDS = GRANULE_BYTES // 8
"""Words of a granule."""

_G, _FIRST, _SECOND = map(np.uint64, (STEP, FIRST, SECOND))
_LOW = np.uint64(0xFFFFFFFF)
_AT_ONCE = 32
"""Granules at a time, so that their words and products fit the caches."""


def mix(x: Any) -> Any:
    """Mix the bits of uint64, a bijection; for numpy and, as it stands, for numba."""
    x = (x ^ (x >> np.uint64(32))) * _FIRST
    x = (x ^ (x >> np.uint64(29))) * _SECOND
    return x ^ (x >> np.uint64(32))


def random_words(count: int, seed: int = 0) -> NDArray[np.uint64]:
    """Return the words of SplitMix64 (Steele et al., 2014) from the state `seed` on."""
    x = np.arange(1, count + 1, dtype=np.uint64) * _G + np.uint64(seed & (1 << 64) - 1)
    x = (x ^ (x >> np.uint64(30))) * _SECOND
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


KEYS = random_words(2 * WORDS).reshape(2, WORDS)
"""Addends of the words of a granule, for each of the two sums."""

compiled: Callable[[int, int, int, int], None] | None = None
"""Compiled code of `digests`: gets the address of data, its bytes, those of a step, and the address
of the output, 16 bytes for each step."""


def digest(data: Any) -> bytes:
    """Return the digest of the bytes of a buffer."""
    return digests(data, 1 << 62)


def digests(data: Any, step: int) -> bytes:
    """Return a digest of 16 bytes for each `step` bytes of a buffer; one for an empty buffer."""
    view = memoryview(data).cast("B")
    count = max(1, -(-view.nbytes // step))
    if compiled is not None:
        found = ctypes.create_string_buffer(DIGEST_BYTES * count)
        compiled(address_of(view), view.nbytes, step, ctypes.addressof(found))
        return found.raw
    flat = np.frombuffer(view, np.uint8)
    with np.errstate(over="ignore"):
        plain = [_plain(flat[n * step : (n + 1) * step]) for n in range(count)]
    return np.array(plain, "<u8").tobytes()


def _plain(data: NDArray[np.uint8]) -> tuple[Any, Any]:
    whole = len(data) // GRANULE_BYTES
    words = _words(data[: whole * GRANULE_BYTES]).reshape(whole, WORDS)
    parts = [words[at : at + _AT_ONCE] for at in range(0, whole, _AT_ONCE)]
    if len(data) % GRANULE_BYTES:
        parts.append(_words(data[whole * GRANULE_BYTES :])[None])
    one = two = np.uint64(0)
    granule = 1
    for part in parts:
        first, second = (_products(part + keys[: part.shape[1]]) for keys in KEYS)
        place = np.arange(granule, granule + len(part), dtype=np.uint64) * _G
        u = mix(first + place)
        one, two = one + u.sum(), two + mix(second + u).sum()
        granule += len(part)
    low = mix(one + two + np.uint64(len(data) + 1) * _G)
    return low, mix(two + low)


def _words(data: NDArray[np.uint8]) -> NDArray[np.uint64]:
    if len(data) % 8:
        data = np.append(data, np.zeros(-len(data) % 8, np.uint8))
    return data.view("<u8").astype(np.uint64, copy=False)


def _products(x: NDArray[np.uint64]) -> Any:
    return np.einsum("ij,ij->i", x & _LOW, x >> np.uint64(32))
