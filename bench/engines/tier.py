"""FlowKV's tier of vLLM, watched: its keepers are remembered, and their places may answer late.

Imported by vLLM when it makes the tier: FlowKV is not to be imported before, by whoever measures.
"""

from __future__ import annotations

import os
from typing import Any

import flowkv.connect.vllm as door
from flowkv.connect.vllm import FlowKVTier
from flowkv.residency.keeper import Keeper, open_keeper
from flowkv.testing import Faults, FlakyTier

__all__ = ["FlowKVTier"]

KEEPERS: list[Keeper] = []
LATE = "FLOWKV_BENCH_LATENCY_S"
"""Set to seconds: answers of places come so late, uniformly from none on; inf: none ever comes."""


def _opened(*places: str, **options: Any) -> Keeper:
    keeper = open_keeper(*places, **options)
    KEEPERS.append(keeper)
    if late := os.environ.get(LATE):
        faults = Faults(fail=1.0, latency_s=1e9) if late == "inf" else Faults(latency_s=float(late))
        for level in keeper.levels:
            flaky = FlakyTier(level.tier, 1, faults)
            level.tier, flaky.name = flaky, level.tier.name  # by which its rates are known
    return keeper


door.open_keeper = _opened
