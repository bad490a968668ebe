"""Streams that are not prompts: generated Markov chains."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bench.policy.finding import Finding
from flowkv.policy.prefetch.markov import Markov

RECALLS = (1, 4)  # of so many predictions
_SUCCESSORS = 6


def chain(
    order: int, symbols: int, length: int, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """A stream whose next symbol depends on the last `order` ones, and the best anyone could do.

    Args:
        order: Symbols of a context.
        symbols: Different symbols, 6 or more.
        length: Of the stream.
        seed: Of the generator.

    Returns:
        The stream, and for each of its symbols the probabilities of its context's successors,
        largest first.
    """
    rng = np.random.default_rng(seed)
    contexts = symbols**order
    successors = np.argsort(rng.random((contexts, symbols)), axis=1)[:, :_SUCCESSORS]
    odds = -np.sort(-rng.dirichlet(np.full(_SUCCESSORS, 0.5), contexts), axis=1)
    draws = rng.random(length)
    stream, best = np.zeros(length, np.int64), np.zeros((length, _SUCCESSORS))
    edges = np.cumsum(odds, axis=1)
    context = 0
    for i in range(length):
        best[i] = odds[context]
        chosen = min(int(np.searchsorted(edges[context], draws[i])), _SUCCESSORS - 1)
        stream[i] = successors[context, chosen]
        context = (context * symbols + int(stream[i])) % contexts
    return stream, best


def recall(stream: NDArray[np.int64], warm: int, counts: tuple[int, ...]) -> list[float]:
    """Shares of the symbols, after the first `warm`, that were among the first n predicted."""
    model, most = Markov(), max(counts)
    model.observe(stream[:warm])
    found = np.zeros(len(counts))
    for symbol in stream[warm:]:
        guessed = model.predict(most)[0].tolist()
        found += [symbol in guessed[:n] for n in counts]
        model.observe(np.array([symbol]))
    shares: list[float] = (found / (len(stream) - warm)).tolist()
    return shares


def chains(quick: bool) -> list[Finding]:
    """Recall of the predictor on chains of order 1 to 3, against Bayes' optimum."""
    findings = []
    for order, symbols, length in ((1, 64, 30_000), (2, 24, 60_000), (3, 12, 120_000)):
        stream, best = chain(order, symbols, length, seed=order)
        tested = 2_000 if quick else 10_000
        warm = length - tested
        for n, share in zip(RECALLS, recall(stream, warm, RECALLS), strict=True):
            optimum = float(best[warm:, :n].sum(axis=1).mean())
            what = f"{n} predicted"
            note = f"{share:.3f} of {optimum:.3f}"
            name = f"order {order}, {symbols} symbols"
            findings.append(
                Finding("chains", what, name, 0.95, "at least", share / optimum, note=note)
            )
    return findings
