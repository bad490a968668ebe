"""The published timing rules: moves are free, prefetches and reads do not get in each other's way.

Per step: prefetches that are through are staged; the step's blocks are placed anew, at no cost; the
next step's blocks are ordered, each through one transfer engine, one decoder and one stage; then
every block that is not staged is read from where it lives, one after the other, latency included.
Every read counts as bytes of the block's home tier, staged or not. Rules as published; `strict` has
those that a machine would impose.
"""

from __future__ import annotations

from collections.abc import Sequence

from flowkv.sim.hierarchy.machine import Machine
from flowkv.sim.hierarchy.outcome import Outcome
from flowkv.sim.hierarchy.plans import Blocks, Plan
from flowkv.sim.hierarchy.workload import Workload


class _Engine:
    """Transfer, decoding and staging of prefetches, each one after the other."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._free = [0.0, 0.0, 0.0]
        self.flying: dict[int, float] = {}

    def order(self, blocks: Blocks, slot: int, now_ns: float) -> None:
        tier = getattr(self._machine, blocks.tier[slot])
        moved = max(self._free[0], now_ns) + tier.transfer_ns(blocks.n_bytes(slot))
        decoded = max(self._free[1], moved) + blocks.codec[slot].decode_ns
        ready = max(self._free[2], decoded) + self._machine.stage_ns
        self._free = [moved, decoded, ready]
        self.flying[slot] = ready

    def through(self, now_ns: float) -> list[int]:
        done = [slot for slot, ready in self.flying.items() if ready <= now_ns]
        for slot in done:
            del self.flying[slot]
        return done


def run_published(workload: Workload, machine: Machine, plan: Plan) -> Outcome:
    """Runs a plan under the published rules.

    Args:
        workload: What is read.
        machine: What it is read from.
        plan: Where blocks live and what is fetched ahead.

    Returns:
        The counters; times in nanoseconds.
    """
    blocks, engine, counted = Blocks(workload.geometry), _Engine(machine), Outcome()
    plan.start(blocks)
    now = 0.0
    for step in range(len(workload.steps)):
        for slot in engine.through(now):
            if slot not in blocks.staged:
                _stage(plan, blocks, slot, machine.sram.capacity, now, counted)
        for slot in workload.distinct(step):
            _place(plan, blocks, slot, workload.positions[step], now, counted)
        following = min(step + 1, len(workload.steps) - 1)
        for slot in plan.ahead(blocks, workload.distinct(following), list(engine.flying)):
            engine.order(blocks, slot, now)
            counted.prefetched_bytes += blocks.n_bytes(slot)
            counted.moved_bytes += blocks.n_bytes(slot)
        now += _serve(workload.steps[step], blocks, machine, counted)
        for slot in plan.unstage(blocks):
            del blocks.staged[slot]
        counted.occupy(blocks.occupied)
    counted.total_ns = now
    return counted


def _stage(
    plan: Plan, blocks: Blocks, slot: int, room: int, now_ns: float, counted: Outcome
) -> None:
    leaving = plan.stage(blocks, slot, room, now_ns)
    if leaving is None:
        return
    for gone in leaving:
        del blocks.staged[gone]
    blocks.staged[slot] = blocks.n_bytes(slot)
    counted.staged += 1


def _place(
    plan: Plan, blocks: Blocks, slot: int, newest: int, now_ns: float, counted: Outcome
) -> None:
    before, home = blocks.n_bytes(slot), blocks.tier[slot]
    tier, codec = plan.place(blocks, slot, newest, now_ns)
    blocks.settle(slot, tier, codec)
    saved = before - blocks.n_bytes(slot)
    if saved > 0:
        counted.saved_bytes += saved
        counted.encoded += 1
    if tier != home:
        counted.moved_bytes += blocks.n_bytes(slot)


def _serve(reads: Sequence[int], blocks: Blocks, machine: Machine, counted: Outcome) -> float:
    """Reads a step's blocks; returns its time."""
    missed: set[int] = set()
    transfer = decode = 0.0
    for slot in reads:
        counted.reads += 1
        if slot in blocks.staged:
            counted.sram_hits += 1
        elif slot not in missed:
            missed.add(slot)
            transfer += getattr(machine, blocks.tier[slot]).transfer_ns(blocks.n_bytes(slot))
            decode += blocks.codec[slot].decode_ns
        counted.read_bytes[blocks.tier[slot]] += blocks.n_bytes(slot)
        blocks.reads[slot] += 1
    compute = machine.compute_ns * len(reads)
    hidden = min(compute, transfer)
    counted.hidden_ns += hidden
    counted.exposed_ns += max(0.0, transfer - compute)
    counted.exposed_decode_ns += max(0.0, decode - (compute - hidden))
    return max(compute, transfer + decode)
