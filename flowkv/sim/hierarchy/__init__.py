"""The memory-hierarchy experiment: decode steps that read KV blocks from SRAM, HBM, CXL and DRAM.

A published experiment (KVFlow) is rebuilt here from its description, to the digit, and FlowKV's own
policies run on its workload: under its own timing rules (`published`), under rules in which every
byte takes its turn on a shared channel (`strict`), and with an HBM too small for the context
(`pressure`). Everything is simulated. `flowkv sim hierarchy` prints the table.
"""

from flowkv.sim.hierarchy.experiment import Row, run_experiment
from flowkv.sim.hierarchy.machine import MACHINES, Codec, Machine, Tier
from flowkv.sim.hierarchy.workload import (
    Workload,
    published_workload,
    read_workload,
    write_workload,
)

__all__ = [
    "MACHINES",
    "Codec",
    "Machine",
    "Row",
    "Tier",
    "Workload",
    "published_workload",
    "read_workload",
    "run_experiment",
    "write_workload",
]
