"""Entropy coding: every coefficient comes back, damage is noticed, and few bits are lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.inside import (
    CLASSES,
    SYMBOLS,
    CodedSymbols,
    SymbolTables,
    count_symbols,
    deviation_class,
)


def tables(seed: int = 0) -> SymbolTables:
    rng, counts = np.random.default_rng(seed), np.zeros((CLASSES, SYMBOLS), np.int64)
    for kind in range(CLASSES):
        q = draw(rng, np.full(20, 0.25 * 2 ** (kind / 3)), 64)
        count_symbols(q, np.full(20, kind, np.uint8), counts)
    return SymbolTables.learned(counts)


def draw(rng: np.random.Generator, deviations: np.ndarray, tokens: int) -> np.ndarray:
    x = rng.laplace(size=(len(deviations), tokens)) * deviations[:, None] / 2**0.5
    return np.clip(np.rint(x), -32767, 32767).astype(np.int16)


def decoded(
    table: SymbolTables,
    coded: CodedSymbols,
    classes: np.ndarray,
    coarse: np.ndarray,
    fine: np.ndarray | None = None,
) -> bool:
    """Decode a page between two others; return whether it is sound."""
    data, (words, literals) = b"".join(one.tobytes() for one in coded), map(len, coded)
    fine = np.zeros((0, coarse.shape[1]), np.int8) if fine is None else fine
    parts = np.array([[3, words, literals], [3, words, max(0, literals - 1)], [0, 0, 0]])
    outs = [np.zeros((len(one), 3 * one.shape[1]), one.dtype) for one in (coarse, fine)]
    sound = table.decode(b"odd" + data, parts[[1, 0, 2]], classes, *outs)
    for one, out in zip((coarse, fine), outs, strict=True):
        one[:] = out[:, one.shape[1] : 2 * one.shape[1]]
    assert not sound[2] and not (sound[0] and sound[1] and literals)
    return bool(sound[1])


@given(
    rows=st.integers(0, 40),
    tokens=st.sampled_from([4, 8, 64, 128]),
    seed=st.integers(0, 1 << 20),
    wild=st.booleans(),
)
def test_round_trip(rows: int, tokens: int, seed: int, wild: bool) -> None:
    rng = np.random.default_rng(seed)
    deviations = 2.0 ** rng.uniform(-4, 10, rows)
    q = draw(rng, deviations, tokens)
    if wild:  # of another scale than the class says
        q[rng.random(q.shape) < 0.1] = rng.integers(-32767, 32768)
    classes, table = deviation_class(deviations), tables(seed % 3)
    coded, back = table.encode(q, classes), np.empty(q.shape, np.float32)
    assert decoded(table, coded, classes, back)
    assert (back == q).all()
    few, fits = rows // 3, bool((abs(q[rows // 3 :].astype(int)) < 128).all())
    wide, small = np.zeros((few, tokens), np.float32), np.zeros((rows - few, tokens), np.int8)
    found = decoded(table, coded, classes, wide, small)
    assert not fits or (found and np.array_equal(np.vstack([wide, small]), q))
    for other in (
        CodedSymbols(coded.words[:-1], coded.literals),
        CodedSymbols(coded.words, np.append(coded.literals, np.int16(1))),
        CodedSymbols(np.append(coded.words, np.uint16(7)), coded.literals),
    ):
        assert not decoded(table, other, classes, back)


@given(data=st.binary(max_size=400), seed=st.integers(0, 99))
def test_any_bytes_end(data: bytes, seed: int) -> None:
    words = np.frombuffer(data[: len(data) // 2 * 2], np.uint16)
    classes = np.random.default_rng(seed).integers(0, CLASSES, 12).astype(np.uint8)
    q = np.zeros((12, 16), np.float32)
    decoded(tables(), CodedSymbols(words, words[:3].view(np.int16)), classes, q)


def test_bits_are_near_the_entropy() -> None:
    rng, deviations = np.random.default_rng(5), np.full(400, 0.8)
    counts, classes = np.zeros((CLASSES, SYMBOLS), np.int64), deviation_class(deviations)
    count_symbols(draw(rng, deviations, 64), classes, counts)
    q = draw(rng, deviations, 64)
    coded = SymbolTables.learned(counts).encode(q, classes)
    _, times = np.unique(q, return_counts=True)
    shares = times / q.size
    entropy = -(shares * np.log2(shares)).sum()
    assert coded.words.nbytes * 8 / q.size < entropy * 1.02 + 0.02


def test_tables_that_are_not_complete_are_refused() -> None:
    frequencies = tables().frequencies.copy()
    frequencies[3, 4] += 1
    with pytest.raises(ValueError, match="complete"):
        SymbolTables(frequencies)
