"""The Markov predictor: against its reference, against Bayes, after drift, in bounded memory."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from numpy.typing import NDArray

from tests.inside import ConfigError, Markov
from tests.policy.markov_reference import SlowMarkov

STREAMS = st.lists(st.integers(-3, 5), min_size=10, max_size=60)


def array(symbols: list[int]) -> NDArray[np.int64]:
    return np.array(symbols, np.int64)


class Source:
    """A random chain of some order, and what a reader who knows its matrix would predict."""

    def __init__(self, order: int, alphabet: int, concentration: float, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.order, self.alphabet = order, alphabet
        self.matrix = self.random.dirichlet(np.full(alphabet, concentration), alphabet**order)
        self.context = 0

    def draw(self, n: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Symbols, and the context before each."""
        symbols, contexts = np.empty(n, np.int64), np.empty(n, np.int64)
        steps, sums = self.random.random(n), self.matrix.cumsum(1)
        for i in range(n):
            contexts[i] = self.context
            x = int(np.searchsorted(sums[self.context], steps[i]))
            symbols[i] = x = min(x, self.alphabet - 1)
            self.context = (self.context * self.alphabet + x) % len(self.matrix)
        return symbols, contexts

    def bayes(self, contexts: NDArray[np.int64], n: int) -> NDArray[np.int64]:
        return np.argsort(-self.matrix, axis=1, kind="stable")[contexts, :n]


def recalls(markov: Markov, source: Source, counts: tuple[int, ...]) -> list[float]:
    """Shares of the next symbols among the n predicted, against the best that can be done."""
    symbols, contexts = source.draw(3000)
    ranks = []
    for x in symbols.tolist():
        guessed = markov.predict(max(counts))[0].tolist()
        ranks.append(guessed.index(x) if x in guessed else len(guessed))
        markov.observe([x])
    best = source.bayes(contexts, max(counts)) == symbols[:, None]
    return [sum(rank < n for rank in ranks) / best[:, :n].any(1).sum() for n in counts]


CHAINS = [(1, 64, 0.1), (1, 32, 0.3), (2, 16, 0.3), (3, 8, 0.3)]


@pytest.mark.parametrize(("order", "alphabet", "concentration"), CHAINS)
def test_recall_is_nearly_that_of_bayes(order: int, alphabet: int, concentration: float) -> None:
    found = []
    for seed in (order + 1, order + 11):
        source, markov = Source(order, alphabet, concentration, seed), Markov()
        markov.observe(source.draw(30_000)[0])
        found.append(recalls(markov, source, (1, 2, 4)))
    assert all(sum(each) / len(each) >= 0.95 for each in zip(*found, strict=True)), found


@given(STREAMS, STREAMS, st.integers(1, 3), st.integers(1, 3))
def test_it_is_its_reference(first: list[int], second: list[int], order: int, steps: int) -> None:
    fast, slow = Markov(order=order, successors=9, memory=8), SlowMarkov(order, 9, 8)
    for part in (first, second):
        fast.observe(array(part))
        slow.observe(part)
        for n in (1, 3, 100):
            symbols, scores = fast.predict(n)
            found = dict(zip(symbols.tolist(), scores.tolist(), strict=True))
            known = dict(slow.predict(100))
            assert found == pytest.approx({symbol: known[symbol] for symbol in found})
            assert sorted(found.values()) == pytest.approx(sorted(known.values())[-n:])
        symbols, scores = fast.predict(5, steps)
        assert scores.tolist() == pytest.approx([p for _, p in slow.predict(5, steps)])
    assert fast.seen == len(first) + len(second)


@given(STREAMS)
def test_probabilities_are_probabilities(stream: list[int]) -> None:
    markov = Markov(successors=2, memory=4)
    markov.observe(array(stream))
    symbols, scores = markov.predict(100)
    assert len(set(symbols.tolist())) == len(symbols) and set(symbols.tolist()) <= set(stream)
    assert all(scores > 0) and scores.sum() <= 1 + 1e-9
    assert (np.diff(scores) <= 0).all()
    far = markov.predict(100, steps=3)[1]
    assert far.sum() <= 3 + 1e-9


def test_old_habits_fade() -> None:
    markov = Markov(order=1)
    markov.observe([0, 1] * 5000 + [0, 2] * 400 + [0])
    assert markov.predict(1)[0].tolist() == [2]
    assert markov._tables[1][(0,)].shares[2] > 0.9


@pytest.mark.parametrize("times", [5, 5000])
def test_a_new_successor_takes_the_share_of_the_rarest(times: int) -> None:
    markov = Markov(order=1, successors=2, memory=2)
    markov.observe([0, 1] * times + [0, 2] * 2 + [0])
    row = markov._tables[1][(0,)]
    assert row.shares[2] == pytest.approx(3 / 4)  # 1 had all: half, and half again
    assert row.shares[1] == pytest.approx(1 / 4)
    markov.observe([3])
    assert set(row.shares) == {2, 3}
    assert row.shares[3] == pytest.approx(1 / 8 + 1 / 2)


def test_memory_is_bounded_and_what_is_used_stays() -> None:
    markov = Markov(contexts=64, order=1)
    noise = np.random.default_rng(0).integers(1000, 1_000_000, 20_000)
    for part in noise.reshape(-1, 4):
        markov.observe(array([1, 2, 1, 2]))
        markov.observe(part)
    markov.observe(array([1]))
    assert sum(len(table) for table in markov._tables) <= 2 * 64
    assert all(len(row.shares) <= 16 for table in markov._tables for row in table.values())
    assert markov.predict(1)[0].tolist() == [2]


def test_mistakes_are_told() -> None:
    with pytest.raises(ConfigError, match="contexts"):
        Markov(contexts=0)
    with pytest.raises(ConfigError, match="order"):
        Markov(order=4)
    assert len(Markov().predict(0)[0]) == 0 and len(Markov().predict(3)[0]) == 0
    assert repr(Markov()) == "Markov(order=3, 0 uses seen)"
