"""Places that say that they are far away."""

from __future__ import annotations

import time
from collections.abc import Sequence

from flowkv.testing import FlakyTier
from tests.inside import Faults, HostTier


class FarTier(HostTier):
    """Memory that says it is far away."""

    kind = "remote"


class _Stuck(FarTier):
    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        time.sleep(1.0)
        return [True] * len(keys)


def stuck_tier() -> FlakyTier:
    """A far place that answers nothing, and is asked in vain."""
    return FlakyTier(_Stuck(1 << 20), 1, Faults(latency_s=1e6))
