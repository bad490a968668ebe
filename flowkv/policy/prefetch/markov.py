"""Markov chains of order 0 to 3 that learn online which symbol of a stream comes next.

Streams without growing prompts: weight blocks, experts, rows of embeddings, documents and templates
that are asked for again and again (`prefetch="markov"`).

Each context, the last j symbols, keeps a few successors and their recent frequencies. The orders
are blended from the lowest up, P_j = l p_j + (1 - l) P_(j-1). The weight l belongs to an order and
to the number of visits of its context, and is learned online as the share of the symbols that this
order explains better than the lower ones (Jelinek and Mercer's interpolation, with one step of
expectation maximisation a symbol). An order that the stream does not have therefore costs nothing,
and an unseen context falls back to a shorter one. Frequencies fade with each visit of a context.

Memory is bounded: the least recently visited context of an order is replaced. Only additions,
multiplications and divisions: the same stream gives the same bits on every machine.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from flowkv.policy.base import PolicyConfig, Slots, configure

BUCKETS, BEAM = 8, 8
UNSEEN = 1.0 / 65536.0
"""Probability of a symbol that no order knows."""
TRUST, LEAST = 1.0 / 256.0, 1.0 / 64.0
"""Step of the weights, and the least weight of an order."""
UNLIKELY = 0.01
"""Probability up to which a continuation is not followed."""
_MOST_ORDER = 3


class MarkovConfig(PolicyConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of `Markov`.

    Attributes:
        order: Symbols of the longest context.
        contexts: Contexts of each order that are remembered.
        successors: Successors of each context.
        memory: Visits of a context after which a frequency has faded to about a third.
    """

    order: Annotated[int, Meta(ge=1, le=_MOST_ORDER)] = 3
    contexts: Annotated[int, Meta(ge=1, le=1 << 20)] = 8192
    successors: Annotated[int, Meta(ge=1, le=64)] = 16
    memory: Annotated[int, Meta(ge=2, le=1 << 20)] = 128


class _Context:
    """The successors of one context, each with its share times `scale`."""

    __slots__ = ("shares", "visits")

    def __init__(self) -> None:
        self.visits = 0
        self.shares: dict[int, float] = {}

    def count(self, symbol: int, memory: int, most: int) -> None:
        """Count a successor. A new one takes the place and the share of the rarest."""
        self.visits += 1
        shares, step, taken = self.shares, 1.0 / min(self.visits, memory), 0.0
        for known in shares:
            shares[known] *= 1.0 - step
        if symbol not in shares and len(shares) == most:
            taken = shares.pop(min(shares, key=shares.__getitem__))
        shares[symbol] = shares.get(symbol, taken) + step


class Markov:
    """Predictor of the next symbols of one stream.

    Args:
        **options: Fields of `MarkovConfig`.

    Attributes:
        seen: Symbols so far.

    Raises:
        ConfigError: An option is unknown or wrong.
    """

    name = "markov"

    def __init__(self, **options: object) -> None:
        self.config = config = configure(MarkovConfig, self.name, options)
        self.seen = 0
        orders = range(config.order + 1)
        self._tables = [OrderedDict[tuple[int, ...], _Context]() for _ in orders]
        self._trust = [[0.5] * BUCKETS for _ in orders]
        self._last = deque[int](maxlen=config.order)

    def observe(self, symbols: Slots | Iterable[int]) -> None:
        """Learn from symbols that were used, in this order."""
        config = self.config
        for symbol in symbols.tolist() if isinstance(symbols, np.ndarray) else symbols:
            last, below = tuple(self._last), UNSEEN
            for order in range(len(last) + 1):
                table, context = self._tables[order], last[len(last) - order :]
                row = table.get(context)
                if row is None:
                    if len(table) == config.contexts:
                        table.popitem(last=False)
                    row = table[context] = _Context()
                else:
                    table.move_to_end(context)
                    trust, b = self._trust[order], _bucket(row.visits)
                    mine = trust[b] * row.shares.get(symbol, 0.0)
                    below = mine + (1.0 - trust[b]) * below
                    learned = trust[b] + TRUST * (mine / below - trust[b])
                    trust[b] = min(max(learned, LEAST), 1.0 - LEAST)
                row.count(symbol, config.memory, config.successors)
            self._last.append(symbol)
            self.seen += 1

    def predict(self, n: int, steps: int = 1) -> tuple[Slots, NDArray[np.float64]]:
        """Return the `n` symbols that are likeliest to be used within the next `steps`, best first.

        Args:
            n: Most symbols.
            steps: Symbols ahead. Beyond the next one, only the likeliest continuations count.

        Returns:
            Symbols, and the expected number of uses of each.
        """
        return self._sum(n, np.ones(max(steps, 0)))

    def rates(self, n: int, steps: int) -> tuple[Slots, NDArray[np.float64]]:
        """Return the symbols with the most uses soon: each use counts 1 / its distance."""
        return self._sum(n, 1.0 / np.arange(1, steps + 1))

    def _sum(self, n: int, weights: NDArray[np.float64]) -> tuple[Slots, NDArray[np.float64]]:
        """Return the `n` best symbols by their probabilities in the next steps, weighted."""
        total = defaultdict[int, float](float)
        steps = self._ahead(len(weights) if n > 0 else 0)
        for weight, scores in zip(weights.tolist(), steps, strict=False):
            for symbol, score in scores:
                total[symbol] += weight * score
        best = _best(total, n)
        return np.array([x for x, _ in best], np.int64), np.array([p for _, p in best], float)

    def _ahead(self, steps: int) -> Iterator[list[tuple[int, float]]]:
        """Yield symbols and probabilities of each of the next steps."""
        beams: list[tuple[float, tuple[int, ...]]] = [(1.0, tuple(self._last))]
        for _ in range(steps):
            after, found = list[tuple[float, tuple[int, ...]]](), list[tuple[int, float]]()
            for chance, last in beams:
                scores = {x: p * chance for x, p in self._blend(last).items()}
                found += scores.items()
                for symbol, score in _best(scores, BEAM):
                    if score > UNLIKELY:
                        after.append((score, (*last, symbol)[-self.config.order :]))
            beams = heapq.nlargest(BEAM, after, key=lambda one: one[0])
            yield found

    def _blend(self, last: Sequence[int]) -> dict[int, float]:
        """Return the probabilities of the symbols that may follow a history."""
        scores, rest = defaultdict[int, float](float), 1.0
        for order in range(len(last), -1, -1):
            row = self._tables[order].get(tuple(last[len(last) - order :]))
            if row is None:
                continue
            weight = rest * self._trust[order][_bucket(row.visits)]
            for symbol, share in row.shares.items():
                scores[symbol] += weight * share
            rest -= weight
        return scores

    def __repr__(self) -> str:
        return f"Markov(order={self.config.order}, {self.seen} uses seen)"


def _bucket(visits: int) -> int:
    """Return roughly the logarithm of the visits of a context."""
    return min(visits.bit_length() - 1, BUCKETS - 1)


def _best(scores: dict[int, float], n: int) -> list[tuple[int, float]]:
    """Return the `n` best symbols and their scores; among equals the smaller symbol first."""
    return heapq.nsmallest(n, scores.items(), key=lambda one: (-one[1], one[0]))
