"""Generated streams of single blocks: scans, scans that come round again, Markov chains.

So weights, experts and table rows are asked for. Every block is a root.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from msgspec import Meta
from numpy.random import Generator
from numpy.typing import NDArray

from flowkv.core.errors import ConfigError
from flowkv.policy.config import PolicyConfig
from flowkv.sim.chains import build_trace, wide
from flowkv.sim.draft import Count, Odds, Rate
from flowkv.sim.talks import zipf
from flowkv.sim.trace import Trace

MOST_CONTEXTS = 1 << 22


class StreamConfig(PolicyConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What all streams can be told.

    Attributes:
        requests: How many.
        seed: Equal seeds give equal traces.
        blocks: Different blocks.
        per_s: Requests a second.
    """

    requests: Count = 20_000
    seed: int = 0
    blocks: Count = 512
    per_s: Rate = 1000.0


class ScanConfig(StreamConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Popular blocks, and between them scans over others that are never used again.

    Attributes:
        scan_share: Share of the requests that belong to scans.
        scan_blocks: Length of a scan.
        zipf: Exponent of the popularity.
    """

    scan_share: Odds = 0.5
    scan_blocks: Count = 1000
    zipf: Annotated[float, Meta(ge=0.0, le=4.0)] = 1.0


class CyclicConfig(StreamConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All blocks in order, again and again, as layers' weights are."""


class MarkovConfig(StreamConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The next block depends on the last ones.

    Attributes:
        order: On how many.
        fanout: Blocks that may follow.
        skew: Their chances are drawn from a Dirichlet distribution of this concentration: small
            means that one of them is nearly certain.
    """

    blocks: Count = 64
    order: Annotated[int, Meta(ge=1, le=4)] = 2
    fanout: Annotated[int, Meta(ge=1, le=256)] = 4
    skew: Annotated[float, Meta(gt=0.0, le=100.0)] = 0.5


def scan(config: ScanConfig, rng: Generator) -> Trace:
    """Popular blocks disturbed by scans."""
    shares = np.array(zipf(config.blocks, config.zipf))
    chosen = np.searchsorted(shares, rng.random(config.requests), side="right")
    chosen = np.minimum(chosen, config.blocks - 1)
    fresh, r = config.blocks, 0
    odds = config.scan_share / max(config.scan_blocks * (1.0 - config.scan_share), 1e-9)
    while r < config.requests:
        r += int(rng.geometric(min(odds, 1.0))) if odds > 0 else config.requests
        n = max(0, min(config.scan_blocks, config.requests - r))
        chosen[r : r + n] = np.arange(fresh, fresh + n)
        fresh, r = fresh + n, r + n
    return _stream("scan", config, rng, chosen)


def cyclic(config: CyclicConfig, rng: Generator) -> Trace:
    """A scan that comes round again."""
    return _stream("cyclic", config, rng, np.arange(config.requests) % config.blocks)


def markov(config: MarkovConfig, rng: Generator) -> Trace:
    """A chain of some order."""
    return _stream("markov", config, rng, walk(config, rng))


def walk(config: MarkovConfig, rng: Generator) -> NDArray[np.int64]:
    """The blocks of a chain, as `transitions` numbers them."""
    followers, odds = transitions(config)
    edges, draws = np.cumsum(odds, axis=1), rng.random(config.requests)
    contexts = len(followers)
    chosen, context = np.empty(config.requests, np.int64), 0
    for i, draw in enumerate(draws.tolist()):
        which = min(int(np.searchsorted(edges[context], draw, side="right")), odds.shape[1] - 1)
        chosen[i] = followers[context, which]
        context = (context * config.blocks + int(chosen[i])) % contexts
    return chosen


def transitions(config: MarkovConfig) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """What may follow each context, [blocks ** order, fanout], and how likely, likeliest first.

    A context is the number whose digits, in base `blocks`, are the last blocks, latest last; the
    stream begins in context 0.

    Raises:
        ConfigError: If there are too many contexts, or fewer blocks than may follow.
    """
    contexts = config.blocks**config.order
    if contexts > MOST_CONTEXTS or config.fanout > config.blocks:
        raise ConfigError(
            f"a chain of order {config.order} over {config.blocks} blocks, {config.fanout} of "
            "which may follow",
            f"Keep blocks ** order within {MOST_CONTEXTS}, and fanout within blocks",
        )
    rng = np.random.default_rng((config.seed, config.order))
    keys = rng.integers(0, config.blocks, contexts)
    steps = rng.permutation(config.blocks)[: config.fanout]
    followers = (keys[:, None] + steps) % config.blocks
    odds = -np.sort(-rng.dirichlet(np.full(config.fanout, config.skew), contexts), axis=1)
    return followers, odds


def _stream(name: str, config: StreamConfig, rng: Generator, chosen: NDArray[np.int64]) -> Trace:
    gaps = rng.exponential(1.0 / config.per_s, len(chosen))
    times = np.round(np.cumsum(gaps) * 1e9).astype(np.int64)
    return build_trace(name, times, np.ones(len(chosen), np.int64), wide(chosen), 1)
