"""Restores on a virtual clock, with the very policy objects that the runtime uses.

Everything here is simulated and says so (DESIGN D17).
"""

from __future__ import annotations

from flowkv.policy.restore.bounds import lower_bound
from flowkv.sim.restore.clock import run
from flowkv.sim.restore.model import GPUS, SHAPES, Modelled, asked
from flowkv.sim.restore.run import Done, Run, summed

__all__ = ["GPUS", "SHAPES", "Done", "Modelled", "Run", "asked", "lower_bound", "run", "summed"]
