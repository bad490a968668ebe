"""Several requests at once: lengths to draw from, and what became of all of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from flowkv.policy.restore.base import RestorePolicy
from flowkv.policy.restore.bounds import lower_bound
from flowkv.policy.restore.words import Request
from flowkv.sim.restore.clock import run
from flowkv.sim.restore.model import Modelled, asked

MEDIAN_TOKENS = 12_000
LEAST_TOKENS, MOST_TOKENS, SPREAD = 1024, 98304, 0.8


def lengths(size: int, seed: int) -> tuple[int, ...]:
    """Prefix lengths of a batch, in tokens: lognormal around 12K, between 1K and 96K."""
    draw = random.Random(seed)
    some = (MEDIAN_TOKENS * draw.lognormvariate(0.0, SPREAD) for _ in range(size))
    return tuple(max(LEAST_TOKENS, min(MOST_TOKENS, int(n) // 64 * 64)) for n in some)


def together(
    costs: Modelled, tokens: Sequence[int], suffix: int = 512, *, every_s: float = 0.0
) -> list[Request]:
    """Requests of these lengths; one every so many seconds, all at once without."""
    return [
        asked(costs.model, n, suffix, number=i, arrived_s=i * every_s) for i, n in enumerate(tokens)
    ]


class Outcome(NamedTuple):
    """A batch under one policy.

    Attributes:
        mean_s: Mean time to first token.
        makespan_s: Until all were done.
        mean_bound_s: What no policy can beat on the mean.
        makespan_bound_s: Nor until all are done.
    """

    mean_s: float
    makespan_s: float
    mean_bound_s: float
    makespan_bound_s: float


def outcome(requests: Sequence[Request], policy: RestorePolicy, costs: Modelled) -> Outcome:
    """Restores a batch that came at once, and says how far from the bounds it ended."""
    done = run(requests, policy, costs)
    return Outcome(
        done.mean_s,
        done.makespan_s,
        lower_bound(requests, costs.ideal, of="mean"),
        lower_bound(requests, costs.ideal),
    )
