"""Entropy coding of quantised coefficients: interleaved rANS with tables learned beforehand.

A coefficient q is coded as the symbol of q >> shift, and `shift` low bits as they are. Symbols of
one class share a table; q whose symbol is rare beyond the table is an *escape*, followed by q as a
literal of two bytes (Duda, arXiv 1311.2540; four states side by side, Giesen, arXiv 1402.3392).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flowkv.compiled.machine_code import kept

BITS = 11
"""Precision of probabilities: 2048 parts."""
SYMBOLS = 32
_TOTAL, _MIDDLE, _ESCAPE = 1 << BITS, 15, SYMBOLS - 1
CLASSES = 37
"""Classes of coefficients: three for each octave of their deviation in steps, from a quarter on."""


class CodedSymbols(NamedTuple):
    """Coded coefficients.

    Attributes:
        words: u16 states and words, in the order in which they are read.
        literals: i16 values of escapes, in order.
    """

    words: NDArray[np.uint16]
    literals: NDArray[np.int16]


def deviation_class(deviations: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Return the class of coefficients with these standard deviations, in steps."""
    octaves = np.log2(np.maximum(deviations, 0.25))
    found: NDArray[np.uint8] = np.clip(np.rint(3 * octaves) + 6, 0, CLASSES - 1).astype(np.uint8)
    return found


SHIFTS = np.maximum((np.arange(CLASSES) - 6) // 3 - 1, 0).astype(np.uint8)
"""Low bits of each class that are stored as they are."""


class SymbolTables:
    """Frequencies of the symbols of each class.

    Args:
        frequencies: u16 `[CLASSES, SYMBOLS]`, each at least 1; the sum of a class is 2048.
    """

    def __init__(self, frequencies: NDArray[np.uint16]) -> None:
        self.frequencies = frequencies
        wide = frequencies.astype(np.uint32)
        if wide.shape != (CLASSES, SYMBOLS) or not wide.all() or (wide.sum(1) != _TOTAL).any():
            raise ValueError("tables of symbols that are not complete")
        self.starts = np.zeros_like(wide)
        self.starts[:, 1:] = np.cumsum(wide[:, :-1], 1)
        slots = np.arange(_TOTAL, dtype=np.uint32)
        self.slots = np.empty((CLASSES, _TOTAL), np.uint32)
        for number in range(CLASSES):
            symbol = np.repeat(np.arange(SYMBOLS, dtype=np.uint32), wide[number])
            bias = slots - self.starts[number, symbol]
            self.slots[number] = symbol | wide[number, symbol] << 8 | bias << 20

    @classmethod
    def learned(cls, counts: NDArray[np.int64]) -> SymbolTables:
        """Return tables from how often each symbol came, `[CLASSES, SYMBOLS]`."""
        shares = counts.astype(np.float64)
        turned = shares[:, _MIDDLE * 2 :: -1]  # signs of transforms mean nothing
        shares[:, : 2 * _MIDDLE + 1] += turned
        shares += 0.25
        shares /= shares.sum(1, keepdims=True)
        found = np.maximum(np.rint(shares * _TOTAL), 1).astype(np.int64)
        for row in found:  # the most frequent symbols pay for the rarest
            while (over := int(row.sum()) - _TOTAL) != 0:
                most = int(row.argmax())
                row[most] -= min(over, int(row[most]) - 1)
        return cls(found.astype(np.uint16))

    def encode(self, q: NDArray[np.int16], classes: NDArray[np.uint8]) -> CodedSymbols:
        """Code coefficients i16 `[n, tokens]`, row by row; `tokens` is a multiple of 4."""
        room = q.size * 2 + 8
        words, literals = np.empty(room, np.uint16), np.empty(q.size, np.int16)
        at, left = _encode(q, classes, self.frequencies, self.starts, SHIFTS, words, literals)
        return CodedSymbols(words[at:], literals[left:])

    def decode(self, coded: CodedSymbols, classes: NDArray[np.uint8], q: NDArray[np.int16]) -> bool:
        """Decode into `q`; return whether the words and literals are exactly what it takes."""
        if len(coded.words) < 8:
            return False
        return bool(_decode(*coded, classes, self.slots, SHIFTS, q))


def count(q: NDArray[np.int16], classes: NDArray[np.uint8], counts: NDArray[np.int64]) -> None:
    """Count the symbols of coefficients i16 `[n, tokens]` into i64 `[CLASSES, SYMBOLS]`."""
    high = (q >> SHIFTS[classes][:, None].astype(np.int16)).astype(np.int64) + _MIDDLE
    high = np.where((high < 0) | (high >= _ESCAPE), _ESCAPE, high)
    np.add.at(counts, (np.broadcast_to(classes[:, None], high.shape), high), 1)


@kept(nogil=True)
def _encode(q, classes, frequencies, starts, shifts, words, literals):  # type: ignore[no-untyped-def]
    states = np.full(4, 1 << 16, np.uint64)
    at, left = len(words), len(literals)
    for row in range(q.shape[0] - 1, -1, -1):
        kind = classes[row]
        shift = np.uint64(shifts[kind])
        most_low = np.uint64(1) << (np.uint64(32) - shift)
        for token in range(q.shape[1] - 1, -1, -1):
            value = np.int64(q[row, token])
            lane = token & 3
            x = states[lane]
            symbol = (value >> np.int64(shift)) + 15
            if symbol < 0 or symbol >= 31:
                symbol = np.int64(31)
                left -= 1
                literals[left] = q[row, token]
            elif shift:
                if x >= most_low:
                    at -= 1
                    words[at] = x & np.uint64(0xFFFF)
                    x >>= np.uint64(16)
                low = np.uint64(value) & ((np.uint64(1) << shift) - np.uint64(1))
                x = (x << shift) | low
            f = np.uint64(frequencies[kind, symbol])
            if x >= f << np.uint64(21):
                at -= 1
                words[at] = x & np.uint64(0xFFFF)
                x >>= np.uint64(16)
            x = ((x // f) << np.uint64(11)) + x % f + np.uint64(starts[kind, symbol])
            states[lane] = x
    for lane in range(3, -1, -1):
        at -= 2
        words[at] = states[lane] & np.uint64(0xFFFF)
        words[at + 1] = states[lane] >> np.uint64(16)
    return at, left


@kept(nogil=True)
def _decode(words, literals, classes, slots, shifts, q):  # type: ignore[no-untyped-def]
    states = np.empty(4, np.uint32)
    for lane in range(4):
        states[lane] = np.uint32(words[2 * lane]) | np.uint32(words[2 * lane + 1]) << np.uint32(16)
    at, used, n_words, n_literals = 8, 0, len(words), len(literals)
    for row in range(q.shape[0]):
        table, shift = slots[classes[row]], np.uint32(shifts[classes[row]])
        for token in range(q.shape[1]):
            x = states[token & 3]
            e = table[x & np.uint32(2047)]
            f, bias = (e >> np.uint32(8)) & np.uint32(4095), e >> np.uint32(20)
            x = f * (x >> np.uint32(11)) + bias
            if x < np.uint32(65536):
                if at >= n_words:
                    return False
                x = (x << np.uint32(16)) | np.uint32(words[at])
                at += 1
            value = np.int32(e & np.uint32(31)) - 15
            if value == 16:
                if used >= n_literals:
                    return False
                value = np.int32(literals[used])
                used += 1
            elif shift:
                low = x & ((np.uint32(1) << shift) - np.uint32(1))
                value = np.int32(value << np.int32(shift)) | np.int32(low)
                x >>= shift
                if x < np.uint32(65536):
                    if at >= n_words:
                        return False
                    x = (x << np.uint32(16)) | np.uint32(words[at])
                    at += 1
            states[token & 3] = x
            q[row, token] = value
    return at == n_words and used == n_literals
