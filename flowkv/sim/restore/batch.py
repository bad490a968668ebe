"""Several requests at once: lengths to draw from."""

from __future__ import annotations

import random

MEDIAN_TOKENS = 12_000
LEAST_TOKENS, MOST_TOKENS, SPREAD = 1024, 98304, 0.8


def lengths(size: int, seed: int) -> tuple[int, ...]:
    """Prefix lengths of a batch, in tokens: lognormal around 12K, between 1K and 96K."""
    draw = random.Random(seed)
    some = (MEDIAN_TOKENS * draw.lognormvariate(0.0, SPREAD) for _ in range(size))
    return tuple(max(LEAST_TOKENS, min(MOST_TOKENS, int(n) // 64 * 64)) for n in some)
