"""Served requests, as their clients saw them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Served(NamedTuple):
    """A request that was answered. Times are of `time.perf_counter`.

    Attributes:
        submitted_s: When its client sent it.
        first_s: When its first token was there.
        last_s: When its last one was.
        tokens: The new tokens.
        reused: Tokens of the prompt that were not computed.
        preempted: How often it made room for others.
        restore_s: From the beginning of the load of its prefix to its end.
        exposed_s: The part of that in which nothing of it was computed.
        queued_s: From submission until it was first let in.
    """

    submitted_s: float
    first_s: float
    last_s: float
    tokens: list[int]
    reused: int = 0
    preempted: int = 0
    restore_s: float = 0.0
    exposed_s: float = 0.0
    queued_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        """From submission to the first token."""
        return self.first_s - self.submitted_s

    @property
    def tpot_s(self) -> float:
        """Mean time of a further token; 0.0 if there was none."""
        more = len(self.tokens) - 1
        return (self.last_s - self.first_s) / more if more > 0 else 0.0

    @property
    def seconds(self) -> float:
        """From submission to the end."""
        return self.last_s - self.submitted_s


class Outcome(NamedTuple):
    """A load that was served once.

    Attributes:
        served: Its requests, in the order of the load.
        kv_utilisation: Share of the pool's pages that anybody held, mean over the steps; None where
            there is no pool.
        cpu_s: Processor time of the process meanwhile, all threads together.
    """

    served: list[Served]
    kv_utilisation: float | None = None
    cpu_s: float = 0.0

    @property
    def seconds(self) -> float:
        """From the first submission to the last token."""
        first = min(one.submitted_s for one in self.served)
        return max(one.last_s for one in self.served) - first

    @property
    def tokens_per_s(self) -> float:
        """New tokens over that time: prompts count nothing, and neither does padding."""
        return sum(len(one.tokens) for one in self.served) / self.seconds

    @property
    def tokens_per_cpu_s(self) -> float:
        """New tokens over processor time, which other work on the machine hardly changes."""
        return sum(len(one.tokens) for one in self.served) / (self.cpu_s or self.seconds)

    @property
    def completion_s(self) -> float:
        """Mean time from submission to the end."""
        return float(np.mean([one.seconds for one in self.served]))

    @property
    def overtaken_s(self) -> float:
        """How much later than a request somebody came who was let in before it, at most."""
        worst, latest_s = 0.0, -math.inf
        for one in sorted(self.served, key=lambda one: one.submitted_s + one.queued_s):
            worst = max(worst, latest_s - one.submitted_s)
            latest_s = max(latest_s, one.submitted_s)
        return worst

    @property
    def ttft_p95_s(self) -> float:
        """Of the times to the first token."""
        return percentile([one.ttft_s for one in self.served], 95)


def percentile(values: Sequence[float], share: float) -> float:
    """Of all values, between neighbours where it falls between them; 0.0 of none."""
    return float(np.percentile(values, share)) if values else 0.0


class Spread(NamedTuple):
    """A figure over repetitions.

    Attributes:
        median: Of them.
        least: Of them.
        most: Of them.
    """

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of one value or more."""
        return cls(float(np.median(values)), float(min(values)), float(max(values)))

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.least:.3g} to {self.most:.3g})"
