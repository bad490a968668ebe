"""The workload: prompts with shared beginnings, and the times at which they come."""

from __future__ import annotations

import sysconfig
from functools import cache
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from bench.serve.lengths import draw_lengths
from flowkv.core.errors import ConfigError
from flowkv.sim.generate import bursts, poisson

CLOSED, POISSON, BURSTS = "closed", "poisson", "bursts"
ARRIVALS = (CLOSED, POISSON, BURSTS)
"""Clients that ask anew once they are answered; strangers; strangers in bursts."""

# Bursts of ten requests or so, ten times as dense as on average, every 25th mean gap.
_FACTOR, _BURST_GAPS, _CALM_GAPS = 16.0, 1.0, 24.0

_DRAWN = 128
"""Lengths are drawn by so many at once, of which a load takes what it needs."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What a load is like.

    Attributes:
        requests: How many.
        concurrency: Clients of a closed load; most rows at once of any.
        lengths: Of prompts and answers, see `draw_lengths`.
        arrivals: A name in `ARRIVALS`.
        rate: Requests a second of an open load.
        prefix_share: Share of each prompt, 0 to 1, that it has in common with others of its group.
        prefix_tokens: That many shared tokens before each prompt, beside the lengths.
        groups: Different shared beginnings.
        ranks: Priorities that requests have in turn; 1 for none.
    """

    requests: int
    concurrency: int
    lengths: str = "chat"
    arrivals: str = CLOSED
    rate: float = 0.0
    prefix_share: float = 0.0
    prefix_tokens: int = 0
    groups: int = 4
    ranks: int = 1


class Ask(msgspec.Struct, frozen=True):
    """A request of a load.

    Attributes:
        prompt: Token ids.
        new_tokens: That it makes, exactly.
        at_s: When it is submitted, after the beginning; 0.0 for the requests of clients.
        priority: Larger is more urgent.
    """

    prompt: list[int]
    new_tokens: int
    at_s: float = 0.0
    priority: int = 0


def draw(load: Load, *, context: int, vocabulary: int, seed: int, text: int = 0) -> list[Ask]:
    """The requests of a load; another seed gives other text, lengths and times.

    A longer load begins with the requests of a shorter one of the same seed.

    Args:
        load: What it is like.
        context: Most tokens of prompt and answer together.
        vocabulary: Tokens that there are.
        seed: Of all that is drawn.
        text: Another number gives other text of the same lengths and times.

    Raises:
        ConfigError: If the load is none, or does not fit into the context.
    """
    _check(load, context)
    of_lengths, of_times = np.random.default_rng(seed).spawn(2)
    of_texts = np.random.default_rng([seed, text])
    room, blocks = context - load.prefix_tokens, -(-load.requests // _DRAWN)
    drawn = [draw_lengths(load.lengths, _DRAWN, room, of_lengths) for _ in range(blocks)]
    pairs = np.concatenate(drawn)[: load.requests]
    times = arrival_times(load, of_times)
    longest = load.prefix_tokens + int(pairs[:, 0].max())
    shared = [_passage(longest, vocabulary, of_texts) for _ in range(load.groups)]
    asks = []
    for number, (prompt, new) in enumerate(pairs.tolist()):
        common = load.prefix_tokens + round(load.prefix_share * prompt)
        own = _passage(load.prefix_tokens + prompt - common, vocabulary, of_texts)
        ids = np.concatenate([shared[number % load.groups][:common], own])
        asks.append(Ask(ids.tolist(), new, times[number], number % load.ranks))
    return asks


def arrival_times(load: Load, rng: np.random.Generator) -> list[float]:
    """Seconds at which requests come, ascending; zeros where clients decide."""
    if load.arrivals == CLOSED:
        return [0.0] * load.requests
    if load.arrivals == POISSON:
        times = poisson(rng, load.rate)
    else:
        calm_s, burst_s = _CALM_GAPS / load.rate, _BURST_GAPS / load.rate
        times = bursts(rng, load.rate, factor=_FACTOR, calm_s=calm_s, burst_s=burst_s)
    return list(islice(times, load.requests))


def _check(load: Load, context: int) -> None:
    if load.arrivals not in ARRIVALS:
        raise ConfigError(
            f"there are no arrivals {load.arrivals!r}", f"Use one of {', '.join(ARRIVALS)}"
        )
    if load.arrivals != CLOSED and not load.rate > 0:
        raise ConfigError(f"a rate of {load.rate} requests a second", "Use more than 0")
    if not 0 <= load.prefix_share <= 1:
        raise ConfigError(f"{load.prefix_share} is no share", "Use 0 to 1")
    if min(load.requests, load.concurrency, load.groups, load.ranks) < 1:
        raise ConfigError("a load of nothing", "Use 1 or more of requests, clients and groups")
    if load.prefix_tokens > context - 8:
        raise ConfigError(
            f"a prefix of {load.prefix_tokens} tokens leaves no room in a context of {context}",
            "Use a shorter one",
        )


def _passage(count: int, vocabulary: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """So many tokens of real text from somewhere, the same for the same draw."""
    text = _text()
    first = int(rng.integers(len(text)))
    taken = np.take(text, np.arange(first, first + count), mode="wrap")
    return taken.astype(np.int64) % vocabulary


@cache
def _text() -> NDArray[np.uint8]:
    """Bytes of the standard library's source, without zero bytes, which are padding to many."""
    library = Path(sysconfig.get_path("stdlib"))
    paths = sorted(library.glob("*.py")) or sorted(Path(__file__).parents[2].rglob("*.py"))
    found = np.frombuffer(b"\n".join(path.read_bytes() for path in paths), np.uint8)
    plain: NDArray[np.uint8] = found[found != 0]
    return plain
