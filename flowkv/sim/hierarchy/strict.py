"""Strict timing rules: every byte takes its turn on the channel of its tier.

SRAM is a real cache: what lies there is not read from HBM again, what does not fit leaves. A step
orders the blocks it lacks when it begins, then those of the steps ahead; all of them share the HBM
channel, in this order. A block that is not in HBM is read over CXL; one that enters HBM occupies
the HBM channel for its write, and one that leaves HBM for the first time the CXL channel: blocks do
not change, so the copy is made once. Latency is pipelined. Compute goes through the reads in order
and waits for what is not there; every wait counts as exposed, decoding included.
"""

from __future__ import annotations

from typing import NamedTuple

from flowkv.policy import Policy
from flowkv.sim.hierarchy.level import Level
from flowkv.sim.hierarchy.machine import Codec, Machine
from flowkv.sim.hierarchy.outcome import Outcome
from flowkv.sim.hierarchy.workload import Workload


class StrictPlan(NamedTuple):
    """What a run under strict rules is told.

    Attributes:
        codec: Form of every block.
        sram: Fresh policy of the staging memory.
        hbm: Fresh policy of device memory.
        lookahead: Steps whose blocks are fetched ahead.
        thrifty: CXL-aware residency: a block enters a full HBM only when it is read for the second
            time, since what leaves for it must be written over the slow link.
    """

    codec: Codec
    sram: Policy
    hbm: Policy
    lookahead: int = 0
    thrifty: bool = False


class _Channels:
    """When the two channels are free."""

    def __init__(self, machine: Machine, n_bytes: int) -> None:
        self._machine, self._n_bytes = machine, n_bytes
        self._hbm = self._cxl = 0.0

    def over_hbm(self, now_ns: float) -> float:
        """Takes a turn on the HBM channel; returns when the bytes are through."""
        self._hbm = max(self._hbm, now_ns) + self._n_bytes / self._machine.hbm.bytes_per_ns
        return self._hbm

    def over_cxl(self, now_ns: float) -> float:
        """Takes a turn on the CXL channel; returns when the bytes are through."""
        self._cxl = max(self._cxl, now_ns) + self._n_bytes / self._machine.cxl.bytes_per_ns
        return self._cxl


class _Run:
    """One run: levels, channels, counters."""

    def __init__(self, workload: Workload, machine: Machine, plan: StrictPlan) -> None:
        shape = workload.geometry
        self.machine, self.plan = machine, plan
        self.n_bytes = plan.codec.n_bytes(shape.block_bytes)
        self.sram = Level(machine.sram.capacity, self.n_bytes, plan.sram)
        self.hbm = Level(machine.hbm.capacity, self.n_bytes, plan.hbm)
        self.channels = _Channels(machine, self.n_bytes)
        self.ready: dict[int, float] = {}
        self.counted = Outcome()
        self.hbm.fill(shape.newest(self.hbm.room))
        self.spilled = set(range(shape.blocks)) - self.hbm.held
        self.read_over_cxl: set[int] = set()

    def fetch(self, slot: int, now_ns: float, busy: set[int]) -> None:
        """Brings a block into SRAM, from HBM or, through it or past it, over CXL."""
        if self.hbm.use(now_ns, slot):
            through = self.channels.over_hbm(now_ns) + self.machine.hbm.latency_ns
            self.counted.read_bytes["hbm"] += self.n_bytes
        else:
            through = self.channels.over_cxl(now_ns) + self.machine.cxl.latency_ns
            self.counted.read_bytes["cxl"] += self.n_bytes
            if self._enters(slot):
                self._into_hbm(slot, now_ns)
        self.ready[slot] = through + self.plan.codec.decode_ns
        for gone in self.sram.add(now_ns, slot, busy):
            if gone != slot:
                del self.ready[gone]

    def _enters(self, slot: int) -> bool:
        if not self.plan.thrifty or len(self.hbm.held) < self.hbm.room:
            return True
        again = slot in self.read_over_cxl
        self.read_over_cxl.add(slot)
        return again

    def _into_hbm(self, slot: int, now_ns: float) -> None:
        gone = self.hbm.add(now_ns, slot)
        if slot in gone:
            return
        self.channels.over_hbm(now_ns)
        self.counted.moved_bytes += self.n_bytes
        for victim in gone:
            if victim not in self.spilled:
                self.spilled.add(victim)
                self.channels.over_cxl(now_ns)
                self.counted.moved_bytes += self.n_bytes


def run_strict(workload: Workload, machine: Machine, plan: StrictPlan) -> Outcome:
    """Runs a plan under strict rules.

    Args:
        workload: What is read.
        machine: What it is read from.
        plan: Form, policies, and what is fetched ahead.

    Returns:
        The counters; times in nanoseconds. `exposed_ns` includes waiting for decoding.
    """
    run = _Run(workload, machine, plan)
    now = 0.0
    for step in range(len(workload.steps)):
        until = min(len(workload.steps), step + 1 + plan.lookahead)
        busy: set[int] = set()
        for nearest in range(step, until):
            slots = workload.distinct(nearest)
            busy.update(slots)
            for slot in slots:
                if not run.sram.use(now, slot):
                    before = run.counted.read_bytes.copy()
                    run.fetch(slot, now, busy)
                    if nearest > step:
                        ahead = sum(run.counted.read_bytes.values()) - sum(before.values())
                        run.counted.prefetched_bytes += ahead
        now = _consume(run, workload, step, now)
    run.counted.total_ns, run.counted.left = now, run.hbm.left
    _occupy(run, workload)
    return run.counted


def _consume(run: _Run, workload: Workload, step: int, now_ns: float) -> float:
    """Computes over a step's blocks in order; returns when it is done."""
    counted = run.counted
    for slot in workload.steps[step]:
        counted.reads += 1
        if slot not in run.ready:  # a step wider than SRAM
            run.fetch(slot, now_ns, {slot})
        wait = run.ready[slot] - now_ns
        if wait > 0:
            counted.exposed_ns += wait
            now_ns = run.ready[slot]
        else:
            counted.sram_hits += 1
        now_ns += run.machine.compute_ns
    return now_ns


def _occupy(run: _Run, workload: Workload) -> None:
    spilled = len(run.spilled | (set(range(workload.geometry.blocks)) - run.hbm.held))
    run.counted.occupy({"hbm": len(run.hbm.held) * run.n_bytes, "cxl": spilled * run.n_bytes})
