"""Entropy coding of quantised coefficients: interleaved rANS with tables learned beforehand.

A coefficient q is coded as the symbol of q >> shift, and `shift` low bits as they are. Symbols of
one class share a table; q whose symbol is rare beyond the table is an *escape*, followed by q as a
literal of two bytes (Duda, arXiv 1311.2540; four states side by side, Giesen, arXiv 1402.3392).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from flowkv.compiled.machine_code import kept

BITS = 11
"""Precision of probabilities: 2048 parts."""
SYMBOLS = 32
_TOTAL, _MIDDLE, _ESCAPE = 1 << BITS, 15, SYMBOLS - 1
CLASSES = 37
"""Classes of coefficients: three for each octave of their deviation in steps, from a quarter on."""


Array = NDArray[Any]


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
            escape = (symbol == _ESCAPE).astype(np.uint32) << 5
            self.slots[number] = symbol | escape | wide[number, symbol] << 8 | bias << 20

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

    def decode(
        self, data: bytes, parts: Array, classes: Array, coarse: Array, fine: Array
    ) -> NDArray[np.bool_]:
        """Decode coefficients of pages; return which have exactly the words and literals it takes.

        Args:
            data: The bytes.
            parts: `[pages, 3]`: first byte, words and literals of each; none for no page.
            classes: Class of each row.
            coarse: Memory of the first rows, float32 `[rows, pages * tokens]`.
            fine: Memory of those behind them, whose values fit i8.
        """
        sound = np.zeros(len(parts), np.bool_)
        given = np.frombuffer(data, np.uint8), np.ascontiguousarray(parts), classes
        _decode(*given, (self.slots, SHIFTS), coarse, fine, sound)
        return sound


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
            share = np.uint64(np.uint32(x) // np.uint32(f))  # 32 bits: a quarter of the time
            x = (share << np.uint64(11)) + x - share * f + np.uint64(starts[kind, symbol])
            states[lane] = x
    for lane in range(3, -1, -1):
        at -= 2
        words[at] = states[lane] & np.uint64(0xFFFF)
        words[at + 1] = states[lane] >> np.uint64(16)
    return at, left


@njit(forceinline=True)
def _word(data, at, end):  # type: ignore[no-untyped-def]
    at = min(at, end)
    return np.uint32(data[at]) | np.uint32(data[at + np.uint64(1)]) << np.uint32(8)


@njit(forceinline=True)
def _next(x, at, e, data, end):  # type: ignore[no-untyped-def]
    x = ((e >> np.uint32(8)) & np.uint32(4095)) * (x >> np.uint32(11)) + (e >> np.uint32(20))
    word, low = _word(data, at, end), x < np.uint32(65536)
    return (x << np.uint32(16)) | word if low else x, at + np.uint64(low << 1)


@kept(nogil=True)
def _decode(data, parts, classes, tables, coarse, fine, sound):  # type: ignore[no-untyped-def]
    tokens, first = coarse.shape[1] // len(parts), len(coarse)
    for page in range(len(parts)):
        if parts[page, 1] < 8:
            continue
        start, state = np.uint64(parts[page, 0]), np.empty(6, np.uint64)
        for lane in range(4):
            at = start + np.uint64(4 * lane)
            high = _word(data, at + np.uint64(2), at + np.uint64(2))
            state[lane] = _word(data, at, at) | high << np.uint32(16)
        behind = start + np.uint64(2 * parts[page, 1])
        state[4], state[5] = start + np.uint64(16), behind
        own = slice(page * tokens, (page + 1) * tokens)
        ends = behind - np.uint64(2), behind + np.uint64(2 * parts[page, 2])
        fits = _rows(data, ends, classes[:first], tables, state, 32768, coarse, own)
        if fits and _rows(data, ends, classes[first:], tables, state, 127, fine, own):
            sound[page] = state[4] == behind and state[5] == ends[1]


@njit
def _rows(data, ends, classes, tables, state, most, out, own):  # type: ignore[no-untyped-def]
    (slots, shifts), (end, over), at, used = tables, ends, state[4], state[5]
    part, mask = np.uint32(2047), np.uint32(31)
    for row in range(len(out)):
        q = out[row, own]
        table, shift = slots[classes[row]], np.uint32(shifts[classes[row]])
        a, b, c, d = state[0], state[1], state[2], state[3]
        said = np.uint32(0)
        for token in range(0, len(q) if not shift else 0, 4):  # without branches
            e, f, g, h = table[a & part], table[b & part], table[c & part], table[d & part]
            a, at = _next(a, at, e, data, end)
            b, at = _next(b, at, f, data, end)
            c, at = _next(c, at, g, data, end)
            d, at = _next(d, at, h, data, end)
            q[token] = np.int32(e & mask) - 15
            q[token + 1] = np.int32(f & mask) - 15
            q[token + 2] = np.int32(g & mask) - 15
            q[token + 3] = np.int32(h & mask) - 15
            said |= e | f | g | h
        state[0], state[1], state[2], state[3] = a, b, c, d
        for token in range(len(q) if shift or said & np.uint32(32) else 0):
            value = np.int64(q[token])
            escaped = value == 16
            if shift:
                x = state[token & 3]
                e = table[x & part]
                x, at = _next(x, at, e, data, end)
                value, escaped = np.int64(e & mask) - 15, e & np.uint32(32) != 0
                if not escaped:
                    low = x & ((np.uint64(1) << shift) - np.uint64(1))
                    value = (value << np.int64(shift)) | np.int64(low)
                    x >>= shift
                    if x < np.uint64(65536):
                        x, at = (x << np.uint64(16)) | _word(data, at, end), at + np.uint64(2)
                state[token & 3] = x
            if escaped:
                value = np.int64(np.int16(_word(data, used, over - np.uint64(2))))
                used += np.uint64(2)
                if used > over or abs(value) > most:
                    return False
            q[token] = value
    state[4], state[5] = at, used
    return True
