"""Replays of request traces through the same policy objects that the cache uses.

    from flowkv.sim import generate, replay

    result = replay(generate("agents", requests=2000, seed=1), policy="auto", size="2%")

All results are simulated and labelled so (DESIGN D17).
"""

from __future__ import annotations

from flowkv.sim.character import characterise
from flowkv.sim.formats import read_trace
from flowkv.sim.generate import generate
from flowkv.sim.replay import Result, replay, sweep
from flowkv.sim.restore import lower_bound
from flowkv.sim.trace import Trace, build_trace, join

__all__ = [
    "Result",
    "Trace",
    "build_trace",
    "characterise",
    "generate",
    "join",
    "lower_bound",
    "read_trace",
    "replay",
    "sweep",
]
