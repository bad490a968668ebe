"""One promise, and what came of it."""

from __future__ import annotations

from typing import Literal

import msgspec

GROUPS = {
    "closure": "Closure of the default: 0 is leaf-first LRU, 1 is Belady",
    "floor": "Prefix hit ratio of the default less that of LRU, at the worst of 0.5 to 30 %",
    "hints": "Closure with hints of returns, the logarithm of the time off by 0.5",
    "prefetch": "Learned prefetches, with the default",
    "warm start": "The first 500 requests at 0.5 %",
    "cost": "What decisions of the default cost, ids looked up",
    "chains": "Recall of the Markov predictor, of Bayes' optimum",
    "bursts": "Bursty and drifting traffic, with prefetch",
}
"""What the groups of findings are about."""


class Finding(msgspec.Struct, frozen=True):
    """A target beside what was measured.

    Attributes:
        group: Of `GROUPS`, or of another protocol's.
        what: The promise.
        trace: On which trace or stream; "" where there is none.
        target: The bound.
        sense: Which side of the bound is good.
        measured: The figure; None if it was not taken.
        source: "simulated" (counted in a replay, or on a virtual clock) or "measured" (time on this
            machine).
        note: Why it was not taken, or what it is made of.
    """

    group: str
    what: str
    trace: str
    target: float
    sense: Literal["at least", "at most"]
    measured: float | None
    source: Literal["simulated", "measured"] = "simulated"
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the figure is on the good side; None if there is none."""
        if self.measured is None:
            return None
        good = self.measured >= self.target
        return good if self.sense == "at least" else self.measured <= self.target


def summary(findings: list[Finding]) -> dict[str, int]:
    """How many targets are met, missed, and not measured."""
    states = [finding.met for finding in findings]
    return {
        "met": states.count(True),
        "missed": states.count(False),
        "not_measured": states.count(None),
    }
