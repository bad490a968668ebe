"""When things begin: steadily at random, or in bursts."""

from __future__ import annotations

from collections.abc import Iterator

from numpy.random import Generator


def poisson(rng: Generator, rate: float) -> Iterator[float]:
    """Seconds of arrivals that know nothing of each other, `rate` a second on average."""
    now = 0.0
    while True:
        now += rng.exponential(1.0 / rate)
        yield now


def bursts(
    rng: Generator, rate: float, *, factor: float, calm_s: float, burst_s: float
) -> Iterator[float]:
    """A Markov-modulated Poisson process of two states, `rate` a second on average over both.

    Args:
        rng: Source of randomness.
        rate: Mean over both states.
        factor: How many times denser arrivals are in a burst.
        calm_s: Mean length of the time between bursts.
        burst_s: Mean length of a burst.

    References:
        Fischer and Meier-Hellstern, "The Markov-modulated Poisson process (MMPP) cookbook", 1993.
    """
    calm = rate * (calm_s + burst_s) / (calm_s + factor * burst_s)
    now, hot = 0.0, False
    until = rng.exponential(calm_s)
    while True:
        step = rng.exponential(1.0 / (calm * (factor if hot else 1.0)))
        if now + step < until:
            now += step
            yield now
        else:  # exponential waiting forgets: draw anew from the switch on
            now, hot = until, not hot
            until += rng.exponential(burst_s if hot else calm_s)
