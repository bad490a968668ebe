"""What no policy can read less than: compulsory reads, and Belady's choice for a full HBM."""

from __future__ import annotations

import heapq

from flowkv.sim.hierarchy.machine import Codec, Machine
from flowkv.sim.hierarchy.workload import Workload


def compulsory_bytes(workload: Workload, codec: Codec) -> int:
    """Bytes if every block is read once: an SRAM that nothing ever leaves."""
    distinct = {slot for step in workload.steps for slot in step}
    return len(distinct) * codec.n_bytes(workload.geometry.block_bytes)


def least_cxl_bytes(workload: Workload, machine: Machine, codec: Codec) -> int:
    """Fewest bytes that must come over CXL when HBM is too small for the context.

    Belady's choice with bypass, from the content that a prefill leaves (the newest chunks that
    fit), over SRAM and HBM as one memory whose content is chosen by someone who knows the future.
    """
    n_bytes = codec.n_bytes(workload.geometry.block_bytes)
    hbm_room = machine.hbm.capacity // n_bytes
    room = hbm_room + machine.sram.capacity // n_bytes
    held = {slot for chunk in workload.geometry.newest(hbm_room) for slot in chunk}
    uses = _uses(workload)
    # Farthest next use first; an entry is stale once its block was used again.
    heap = [(-uses[slot][-1], slot) for slot in held]
    heapq.heapify(heap)
    misses = 0
    for step in range(len(workload.steps)):
        for slot in workload.distinct(step):
            uses[slot].pop()
            misses += slot not in held
            held.add(slot)
            heapq.heappush(heap, (-uses[slot][-1], slot))
        while len(held) > room:
            next_use, slot = heapq.heappop(heap)
            if slot in held and -next_use == uses[slot][-1]:
                held.discard(slot)
    return misses * n_bytes


def _uses(workload: Workload) -> list[list[int]]:
    """Steps that read each block, the next one last; beyond them never."""
    never = len(workload.steps)
    uses = [[never] for _ in range(workload.geometry.blocks)]
    for step in reversed(range(len(workload.steps))):
        for slot in workload.distinct(step):
            uses[slot].append(step)
    return uses
