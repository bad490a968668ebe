"""What a virtual engine is asked: when, and how many tokens; no model and no text."""

from __future__ import annotations

import math

import msgspec
import numpy as np

from flowkv.sim.arrivals import poisson


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One request.

    Attributes:
        arrived_s: When it is submitted.
        prompt: Tokens of its prompt.
        new: New tokens that it makes.
        limit: New tokens that it may make: all that a scheduler is told.
        priority: Larger is more urgent.
        deadline_s: When it is of no use any more; schedulers are told, and nobody is called off.
        found: Tokens of its prompt that are loaded rather than computed, not all of them.
    """

    arrived_s: float
    prompt: int
    new: int
    limit: int
    priority: int = 0
    deadline_s: float = math.inf
    found: int = 0


def mixed(requests: int = 200, *, rate: float = 4.0, long: float = 0.2, seed: int = 0) -> list[Ask]:
    """Short questions among long tasks, as Poisson arrivals.

    A short one has 16 to 256 tokens of prompt and 8 to 32 new ones; a long one 128 to 1,024 and 256
    to 512, all of them log-uniform. Limits are the next power of two, as users set them: a
    scheduler does not know exactly how long an answer gets.

    Args:
        requests: How many.
        rate: Requests in a second, on average.
        long: Share of long ones.
        seed: Of everything that is drawn.
    """
    rng = np.random.default_rng(seed)
    times = poisson(rng, rate)

    def draw(least: int, most: int) -> int:
        return round(float(np.exp(rng.uniform(np.log(least), np.log(most)))))

    asks = []
    for _ in range(requests):
        is_long = bool(rng.random() < long)
        prompt = draw(128, 1024) if is_long else draw(16, 256)
        new = draw(256, 512) if is_long else draw(8, 32)
        limit = 1 << (new - 1).bit_length()
        asks.append(Ask(arrived_s=next(times), prompt=prompt, new=new, limit=limit))
    return asks
