"""Deterministic simulation of a stack of tiers: time, disks, networks and chance in one hand.

    from flowkv.testing.simulation import simulate
    simulate(seed=7, steps=10_000)

A host tier, a disk tier whose files are no files, and a slow and moody remote one serve a small
store: a request falls through the tiers, what is found is copied upwards, what is not found is made
anew and written down, and a full tier loses a victim. Meanwhile processes are killed, power fails,
bits flip, disks fill up, fail and hang. After every step: no wrong byte, no capacity exceeded, no
answer late, double or missing, and no frame lost that was promised to be there. The same seed is
the same run, so a failure is a seed and a step.
"""

from __future__ import annotations

from flowkv.testing.simulation.disk import SimulatedFiles
from flowkv.testing.simulation.engine import SimulatedEngine
from flowkv.testing.simulation.run import (
    HAZARDS,
    Report,
    Simulation,
    SimulationFailure,
    shrink,
    simulate,
)

__all__ = [
    "HAZARDS",
    "Report",
    "SimulatedEngine",
    "SimulatedFiles",
    "Simulation",
    "SimulationFailure",
    "shrink",
    "simulate",
]
