"""What became of simulated requests."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """One request, served. Simulated.

    Attributes:
        number: Its place among those that were asked.
        arrived_s: When it was submitted.
        queued_s: From then until it was first admitted.
        ttft_s: From submission to its first token.
        tpot_s: Mean time of a further token.
        gap_s: Longest time between two of its tokens.
        seconds: From submission to the end.
        waited_s: Time that it had no part in steps.
        preempted: How often it made room.
        computed: Tokens that were computed for it, over again where they had been dropped.
        overtaken_s: How much later than it the latest of those was submitted that were admitted
            before it; 0.0 if nobody passed it.
    """

    number: int
    arrived_s: float
    queued_s: float
    ttft_s: float
    tpot_s: float
    gap_s: float
    seconds: float
    waited_s: float
    preempted: int
    computed: int
    overtaken_s: float


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A load, served by a virtual engine. Simulated.

    Attributes:
        scheduler: Its name.
        served: Requests, in the order in which they were asked.
        seconds: Until the last was over.
        steps: Steps.
        preemptions: Moves out of the batch.
        peak_pages: Most pages that were held at once.
        label: Always "simulated".
    """

    scheduler: str
    served: Sequence[Served]
    seconds: float
    steps: int
    preemptions: int
    peak_pages: int
    label: str = "simulated"

    def mean(self, field: str = "seconds") -> float:
        """Mean of a field of `Served`."""
        return float(np.mean([getattr(one, field) for one in self.served]))

    def percentile(self, share: float, field: str = "seconds") -> float:
        """Percentile of a field of `Served`; `share` from 0 to 100."""
        return float(np.percentile([getattr(one, field) for one in self.served], share))

    @property
    def tokens_per_s(self) -> float:
        """Tokens that were computed, by all of the time."""
        return sum(one.computed for one in self.served) / self.seconds if self.seconds else 0.0
