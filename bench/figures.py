"""What benchmarks share: turns, ratios and spreads, divergences, answers of tiers, and results."""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from flowkv.core.memory import own_memory
from flowkv.tiers.base import FrameInfo, Outcome, Store

LAYOUT = bytes(16)
PIECE_BYTES, PIECES = 1 << 20, 4
"""Of reads that tell how fast a disk is: bytes of one, and how many are under way."""


def took(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds that a call takes."""
    start = clock()
    call()
    return clock() - start


def repeated(call: Callable[[], object], times: int) -> Callable[[], None]:
    """Return a function that makes a call so many times."""

    def calls() -> None:
        for _ in range(times):
            call()

    return calls


def turns(
    ways: Mapping[str, Callable[[], object]],
    count: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return the seconds of each way in so many turns; a turn before them warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(count + 1):
        for name, way in ways.items():
            spent = took(way, clock)
            if turn:
                seconds[name].append(spent)
    return seconds


def ratios(some: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return the ratios of figures of the same turns."""
    return [a / b for a, b in zip(some, others, strict=True)]


def spread(values: Sequence[float]) -> list[float]:
    """Return the least, the median and the most."""
    return [min(values), statistics.median(values), max(values)]


def shown(value: object) -> str:
    """Return a figure, or the middle one of three and its ends, as text."""
    if isinstance(value, list):
        return f"{value[1]:.4g} ({value[0]:.4g} to {value[2]:.4g})"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def between(values: Sequence[float], form: str = ".2f") -> str:
    """Return the median, and the least and the most in brackets."""
    least, middle, most = spread(values)
    return f"{middle:{form}} ({least:{form}} to {most:{form}})"


def show(name: str, values: Sequence[float]) -> float:
    """Print the median, and the 10th and the 90th percentile in brackets; return the median."""
    low, *_, high = statistics.quantiles(values, n=10)
    middle = statistics.median(values)
    print(f"  {name:<58} {middle:7.3f}  ({low:.3f} to {high:.3f})")
    return middle


def interval(own: Any, over: Any = None, draws: int = 10_000) -> tuple[float, float, float] | None:
    """Return a mean, or the ratio of two sums, and the ends of its 95 % interval by bootstrap.

    None for a ratio to nothing.
    """
    own = np.asarray(own)
    drawn = np.random.default_rng(0).integers(len(own), size=(draws, len(own)))
    if over is None:
        centre, some = own.mean(), own[drawn].mean(1)
    else:
        over = np.asarray(over)
        below = over[drawn].sum(1)
        centre, some = own.sum() / max(over.sum(), 1e-12), own[drawn].sum(1)
        some = some[below > 0] / below[below > 0]
    if not len(some):
        return None
    low, high = np.percentile(some, (2.5, 97.5))
    return float(centre), float(low), float(high)


def percent_more(more: Sequence[float], errors: float = 1.96) -> tuple[float, float, float]:
    """Return what mean differences of nats are in percent of perplexity, and so many errors off."""
    error = errors * statistics.stdev(more) / math.sqrt(len(more)) if len(more) > 1 else 0.0
    middle = statistics.mean(more)
    low, centre, high = (100 * math.expm1(middle + e) for e in (-error, 0.0, error))
    return low, centre, high


class Score(NamedTuple):
    """What a model makes of the tokens of one task.

    Attributes:
        nats: Mean of the scored tokens.
        agreement: Share of them where the likeliest token is that of the exact prediction.
        kl: Mean Kullback-Leibler divergence from the exact predictions, in nats.
    """

    nats: float
    agreement: float
    kl: float


def score(found: Any, exact: Any, wanted: Any) -> Score:
    """Return the score of log-probabilities `[tokens, vocabulary]` beside the exact ones."""
    nats = -found.gather(1, wanted[:, None]).mean().item()
    same = (found.argmax(-1) == exact.argmax(-1)).double().mean().item()
    return Score(nats, same, divergence(found, exact).mean().item())


def divergence(found: Any, exact: Any) -> Any:
    """Return the Kullback-Leibler divergence of each token from the exact prediction, in nats."""
    return (exact.exp() * (exact - found)).sum(-1)


def page_info(stripe_bytes: int) -> FrameInfo:
    """Return what a frame of 64 tokens says of itself."""
    return FrameInfo("page", 0, 0, LAYOUT, bytes(32), bytes(32), 0, 64, stripe_bytes)


def frames(size: int, total: int) -> list[Store]:
    """Return distinct frames of 16 layers, whose bodies are noise."""
    noise, info = memoryview(np.random.default_rng(0).bytes(total)), page_info(size // 16)
    return [
        Store(hashlib.sha256(b"%d %d" % (size, at)).digest(), info, noise[at : at + size])
        for at in range(0, total - size + 1, size)
    ]


def finish(tier: Any, count: int, outcome: Outcome, patience_s: float = 60.0) -> None:
    """Wait for so many answers of a tier, which all must have one outcome."""
    end_s = time.monotonic() + patience_s
    while count:
        answers = tier.poll(1.0)
        assert all(answer.outcome is outcome for answer in answers), answers[:3]
        assert answers or time.monotonic() < end_s
        count -= len(answers)


def read_rate(path: Path) -> float:
    """Return the bytes a second of a file, read past the page cache in pieces, four at a time."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    pieces = range(0, path.stat().st_size // PIECE_BYTES * PIECE_BYTES, PIECE_BYTES)
    memory, free = own_memory(PIECES * PIECE_BYTES), SimpleQueue[memoryview]()
    for at in range(0, len(memory), PIECE_BYTES):
        free.put(memory[at : at + PIECE_BYTES])

    def read(first: int) -> int:
        buffer = free.get()
        try:
            return os.preadv(descriptor, [buffer], first)
        finally:
            free.put(buffer)

    try:
        start = time.perf_counter()
        with ThreadPoolExecutor(PIECES) as pool:
            n_bytes = sum(pool.map(read, pieces))
        return n_bytes / (time.perf_counter() - start)
    finally:
        os.close(descriptor)


def answer(command: Sequence[str], **environment: str) -> Any:
    """Return the last line of a command's output, which is JSON."""
    env = {**os.environ, **environment}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def save(path: Path | None, result: Any) -> None:
    """Write a result as JSON, if a path is given."""
    if path:
        path.write_text(json.dumps(result, indent=1) + "\n")
