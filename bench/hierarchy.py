"""The memory-hierarchy experiment: decode steps that read KV blocks from SRAM, HBM, CXL and DRAM.

A published experiment (KVFlow) is rebuilt here from its description, to the digit, and FlowKV's own
policies run on its workload: under its own timing rules (`published`), under rules in which every
byte takes its turn on a shared channel (`strict`), and with an HBM too small for the context
(`pressure`). Everything is simulated. `python -m bench hierarchy` prints the table.
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import numpy as np

from flowkv.cli.arguments import AddVerb, names
from flowkv.core.config import parse_size
from flowkv.core.errors import ConfigError
from flowkv.policy import Policy, make_policy
from flowkv.report.screen import Screen
from flowkv.sim.formats import read_lines
from flowkv.sim.hardware import HARDWARE

__all__ = [
    "MACHINES",
    "BlockWorkload",
    "ExperimentRow",
    "Machine",
    "MemoryLevel",
    "ModelledCodec",
    "published_workload",
    "read_workload",
    "run_experiment",
]


# Tiers, codecs and machines: what holds blocks, how fast it gives them, what it costs.
#
# Bandwidths and prices of the profiles are those of `flowkv.sim.hardware`; latencies, the CXL link
# and its price are assumptions. They compare plans with each other and predict no bill.

MIB, GIB = 1 << 20, 1 << 30


class MemoryLevel(NamedTuple):
    """One level of memory.

    Attributes:
        capacity: Bytes.
        bytes_per_ns: Bandwidth; the same number is GB/s.
        latency_ns: Time to the first byte.
        usd_per_gib_hour: Price of what is occupied.
    """

    capacity: int
    bytes_per_ns: float
    latency_ns: float
    usd_per_gib_hour: float = 0.0

    def transfer_ns(self, n_bytes: int) -> float:
        """Time for `n_bytes` when nothing else uses the tier."""
        return self.latency_ns + n_bytes / self.bytes_per_ns


class ModelledCodec(NamedTuple):
    """A form of a block.

    Attributes:
        name: For tables.
        share: Bytes, as a share of the raw ones.
        decode_ns: Time to decode a block.
    """

    name: str
    share: float
    decode_ns: float

    def n_bytes(self, raw: int) -> int:
        """Bytes of a block of `raw` bytes in this form."""
        return int(raw * self.share)


RAW = ModelledCodec("raw", 1.0, 0.0)
INT8 = ModelledCodec("int8", 0.5, 120.0)
INT4 = ModelledCodec("int4", 0.25, 260.0)
CODECS = (RAW, INT8, INT4)


class Machine(NamedTuple):
    """Tiers from the fastest to the slowest, and the compute that reads them.

    Attributes:
        name: For tables.
        sram: Staging memory next to the compute units.
        hbm: Device memory.
        cxl: Memory behind a CXL link.
        dram: Host memory.
        compute_ns: Time to work on one block.
        stage_ns: Time to hand one block to the compute units.
    """

    name: str
    sram: MemoryLevel
    hbm: MemoryLevel
    cxl: MemoryLevel
    dram: MemoryLevel
    compute_ns: float = 180.0
    stage_ns: float = 40.0


def _device(name: str, sram_mib: int) -> Machine:
    """An accelerator of `flowkv.sim.hardware` with a CXL link; SRAM is its last-level cache."""
    known = HARDWARE[name]
    own, host = known.place("hbm"), known.place("dram")
    rate = own.bytes_per_s / 1e9
    return Machine(
        name,
        MemoryLevel(sram_mib * MIB, 4 * rate, 25.0),
        MemoryLevel(int(known.memory_bytes), rate, 300.0, own.dollars_per_gib_hour),
        MemoryLevel(512 * GIB, 50.0, 900.0, host.dollars_per_gib_hour / 2),
        MemoryLevel(1024 * GIB, host.bytes_per_s / 1e9, 1800.0, host.dollars_per_gib_hour),
    )


# The published machine's bandwidths were given in Gbit/s; its own profiles hold the same numbers
# as GB/s. A published digit needs the published arithmetic.
PUBLISHED = Machine(
    "kvflow",
    MemoryLevel(512 * MIB, 20_000 / 8, 25.0),
    MemoryLevel(8 * GIB, 3_000 / 8, 300.0, 0.03),
    MemoryLevel(24 * GIB, 300 / 8, 900.0, 0.002),
    MemoryLevel(64 * GIB, 120 / 8, 1800.0, 0.004),
)

MACHINES: Mapping[str, Machine] = MappingProxyType(
    {
        machine.name: machine
        for machine in (
            PUBLISHED,
            _device("h100", 50),
            _device("h200", 50),
            _device("b200", 126),
            _device("mi300x", 256),
        )
    }
)


# Which blocks each decode step reads: the published pattern, or a JSON-lines trace.


class BlockShape(NamedTuple):
    """Shape of the cache; a block holds keys and values of one head for `block_tokens` tokens."""

    layers: int = 32
    heads: int = 32
    head_dim: int = 128
    value_bytes: int = 2
    context: int = 8192
    block_tokens: int = 128

    @property
    def blocks_per_head(self) -> int:
        """Blocks of the whole context, per layer and head."""
        return self.context // self.block_tokens

    @property
    def blocks(self) -> int:
        """Blocks in all."""
        return self.layers * self.heads * self.blocks_per_head

    @property
    def block_bytes(self) -> int:
        """Bytes of a block at full precision."""
        return self.block_tokens * self.head_dim * self.value_bytes * 2

    def newest(self, room: int) -> list[list[int]]:
        """The `room` blocks that a prefill wrote last, as it wrote them, chunk by chunk.

        A chunk is the same block of tokens in every layer and head.
        """
        per_chunk = self.layers * self.heads
        skipped = max(0, self.blocks - room)
        chunks = [
            list(range(first, self.blocks, self.blocks_per_head))
            for first in range(skipped // per_chunk, self.blocks_per_head)
        ]
        if chunks:
            chunks[0] = chunks[0][skipped % per_chunk :]
        return chunks

    def slot(self, layer: int, head: int, block: int) -> int:
        """The number under which a policy knows a block."""
        return (layer * self.heads + head) * self.blocks_per_head + block


class BlockWorkload(NamedTuple):
    """What is read, step by step.

    Attributes:
        name: For tables.
        geometry: Shape of the cache.
        steps: Slots in the order in which a step reads them, with repetitions.
        positions: Per step, the index of the block that holds the newest token.
    """

    name: str
    geometry: BlockShape
    steps: list[list[int]]
    positions: list[int]

    def distinct(self, step: int) -> list[int]:
        """Slots of a step, each once, in order."""
        return list(dict.fromkeys(self.steps[step]))


def published_workload() -> BlockWorkload:
    """The pattern of KVFlow: 8,192 tokens of context, 128 decode steps, 20,288 reads.

    Per step and layer, a head that moves on with the step reads its last three blocks, a second one
    a block that is eight blocks old, a third one a block from anywhere.
    Source: manishklach/KVFabric (formerly KVFlow), state of commit 3942e4d.
    """
    shape = BlockShape()
    last = shape.blocks_per_head - 1
    steps, positions = [], []
    for step in range(128):
        newest = min(last, step // 2)
        reads = []
        for layer in range(shape.layers):
            recent, older, random = ((stride * step + layer) % shape.heads for stride in (1, 3, 7))
            for block in range(max(0, newest - 2), newest + 1):
                reads.append(shape.slot(layer, recent, block))
            reads.append(shape.slot(layer, older, max(0, newest - 8)))
            reads.append(shape.slot(layer, random, 11 * step % shape.blocks_per_head))
        steps.append(reads)
        positions.append(newest)
    return BlockWorkload("kvflow", shape, steps, positions)


class DecodeStep(msgspec.Struct, forbid_unknown_fields=True):
    """A line of a trace: blocks as layer, head and number; and the newest one's number."""

    reads: list[tuple[int, int, int]]
    newest: int = -1


def read_workload(path: Path, geometry: BlockShape | None = None) -> BlockWorkload:
    """Reads a trace with one JSON object per decode step, plain or zstd-compressed.

    A line is `{"reads": [[layer, head, block], ...], "newest": block}`; without `newest`, the
    largest block read so far is taken for the newest one.

    Args:
        path: The file.
        geometry: Shape of the cache; default that of the published experiment.

    Raises:
        ConfigError: If the file cannot be read, or a line is no step of this geometry.
    """
    shape = geometry or BlockShape()
    if not path.is_file():
        raise ConfigError(f"cannot read {path}", "Give the path of a JSON-lines file")
    workload, largest = BlockWorkload(path.stem, shape, [], []), 0
    for number, step in enumerate(read_lines(path, DecodeStep), 1):
        for read in step.reads:
            ends = zip(read, (shape.layers, shape.heads, shape.blocks_per_head), strict=True)
            if not all(0 <= at < end for at, end in ends):
                problem = f"{path}, step {number}: there is no block {list(read)}"
                raise ConfigError(problem, "Write layer, head and block from 0 on")
            largest = max(largest, read[2])
        workload.steps.append([shape.slot(*read) for read in step.reads])
        workload.positions.append(step.newest if step.newest >= 0 else largest)
    if not any(workload.steps):
        raise ConfigError(f"{path} holds no reads", 'Write lines such as {"reads": [[0, 0, 0]]}')
    return workload


# What no policy can read less than: compulsory reads, and Belady's choice for a full HBM.


def compulsory_bytes(workload: BlockWorkload, codec: ModelledCodec) -> int:
    """Bytes if every block is read once: an SRAM that nothing ever leaves."""
    distinct = {slot for step in workload.steps for slot in step}
    return len(distinct) * codec.n_bytes(workload.geometry.block_bytes)


def least_cxl_bytes(workload: BlockWorkload, machine: Machine, codec: ModelledCodec) -> int:
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


def _uses(workload: BlockWorkload) -> list[list[int]]:
    """Steps that read each block, the next one last; beyond them never."""
    never = len(workload.steps)
    uses = [[never] for _ in range(workload.geometry.blocks)]
    for step in reversed(range(len(workload.steps))):
        for slot in workload.distinct(step):
            uses[slot].append(step)
    return uses


# What a run counted.

_NS_PER_HOUR = 3600e9


@dataclass
class RunCounters:
    """Counters of one run; times are of the simulated clock.

    Attributes:
        reads: Blocks that the steps read.
        sram_hits: Of these, how many lay staged, and in time.
        read_bytes: Bytes read, by tier.
        moved_bytes: Bytes moved between tiers, prefetches included.
        saved_bytes: Bytes that encoding took away.
        encoded: Blocks encoded smaller.
        staged: Blocks that a prefetch staged.
        total_ns: The whole run.
        exposed_ns: Of this, time in which compute waited for bytes.
        exposed_decode_ns: Time in which it waited for decoding, where that is counted apart.
        peak_bytes: The most that was occupied at the end of a step, by tier.
    """

    reads: int = 0
    sram_hits: int = 0
    read_bytes: dict[str, int] = field(default_factory=lambda: {"hbm": 0, "cxl": 0, "dram": 0})
    moved_bytes: int = 0
    saved_bytes: int = 0
    encoded: int = 0
    staged: int = 0
    total_ns: float = 0.0
    exposed_ns: float = 0.0
    exposed_decode_ns: float = 0.0
    peak_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def sram_hit_rate(self) -> float:
        """Share of the reads that found their block staged."""
        return self.sram_hits / self.reads

    def usd_per_million_tokens(self, machine: Machine, tokens: int) -> float:
        """What the occupied memory costs for as long as a million tokens take; a proxy."""
        peaks = self.peak_bytes.items()
        per_hour: float = sum(getattr(machine, t).usd_per_gib_hour * n / GIB for t, n in peaks)
        return per_hour * self.total_ns / _NS_PER_HOUR * 1e6 / tokens


# One level of memory whose content a policy of the catalogue decides.

_ROOT = np.array([-1])


class BoundedMemory:
    """Blocks of equal size in a bounded memory.

    The blocks of this experiment do not depend on each other: one is read without its
    predecessors. So the policy is told no parents, and about one block at a time.

    Args:
        capacity: Bytes.
        block_bytes: Bytes of a block.
        policy: A fresh policy; it decides what leaves.
    """

    def __init__(self, capacity: int, block_bytes: int, policy: Policy) -> None:
        self.room = capacity // block_bytes
        self.held: set[int] = set()
        self._policy = policy
        self._clock = 0

    def use(self, now_ns: float, slot: int) -> bool:
        """A block is read; whether it is here."""
        self._policy.access(self._time(now_ns), np.array([slot]))
        return slot in self.held

    def add(self, now_ns: float, slot: int, protected: Collection[int] = ()) -> list[int]:
        """A block comes in; returns those that leave for it, which may be itself.

        If everything else is protected, it is the new block that stays out.
        """
        now = self._time(now_ns)
        self._policy.insert(now, np.array([slot]), _ROOT)
        self.held.add(slot)
        if len(self.held) <= self.room:
            return []
        victims = self._policy.evict(now, 1, protected)
        if victims is None:
            self._policy.remove(np.array([slot]))
            victims = np.array([slot])
        gone: list[int] = victims.tolist()
        self.held.difference_update(gone)
        return gone

    def fill(self, chunks: Iterable[Sequence[int]]) -> None:
        """What lies here at the beginning, written chunk by chunk; it must fit."""
        for chunk in chunks:
            slots = np.array(chunk, np.int64)
            self._policy.insert(self._time(0.0), slots, np.full(len(slots), -1))
            self.held.update(chunk)
        assert len(self.held) <= self.room

    def _time(self, now_ns: float) -> int:
        # A nanosecond apart, so that blocks of one step have an order among themselves.
        self._clock = max(self._clock + 1, int(now_ns))
        return self._clock


# Published timing rules: moves are free, prefetches and reads do not get in each other's way.
#
# Per step: prefetches that are through are staged; the step's blocks are placed anew, at no cost;
# the next step's blocks are ordered, each through one transfer engine, one decoder and one stage;
# then every block that is not staged is read from where it lives, one after the other, latency
# included. Every read counts as bytes of the block's home tier, staged or not.
#
# `Everything` and `Classes` are the two columns of the published table. `Kept` is FlowKV's: one
# form for all blocks, device memory as long as it lasts, and then what a policy of the catalogue
# says.

HOT, WARM, COLD = "hot", "warm", "cold"

RECENT_TOKENS = 128  # up to here behind the newest token a block is hot
WARM_READS = 2  # an older one is warm from here on
FAR_TOKENS = 768  # beyond that a cold one takes four bits
_PER_STEP = 48  # blocks fetched ahead per step by the published plan


class Everything:
    """All blocks raw in HBM, nothing fetched ahead: the published baseline. Other plans differ.

    Args:
        workload: What is read.
        machine: What it is read from.

    Attributes:
        tier: Where each block lives.
        codec: Its form.
        reads: How often it was read.
        staged: Blocks in the staging memory, and their bytes there.
        flying: Blocks on their way there, and when they are through.
    """

    def __init__(self, workload: BlockWorkload, machine: Machine) -> None:
        self.workload, self.machine, self.shape = workload, machine, workload.geometry
        self.tier, self.codec = ["hbm"] * self.shape.blocks, [RAW] * self.shape.blocks
        self.reads = [0] * self.shape.blocks
        self.staged: dict[int, int] = {}
        self.flying: dict[int, float] = {}
        self.counted = RunCounters()
        self._occupied = {"hbm": self.shape.blocks * self.shape.block_bytes, "cxl": 0, "dram": 0}
        self._free_ns = (0.0, 0.0, 0.0)  # transfer engine, decoder, stage

    # ---- what a plan decides

    def place(self, slot: int, newest: int, now_ns: float) -> tuple[str, ModelledCodec]:
        """Tier and form of a block that this step reads; may classify it, and move others."""
        return "hbm", RAW

    def ahead(self, slots: Sequence[int]) -> list[int]:
        """Which blocks of the next step to fetch now, of those that are not on their way."""
        return []

    def stage(self, slot: int, now_ns: float) -> list[int] | None:
        """Blocks that leave the staging memory for this one; None to leave it out."""
        used = sum(self.staged.values())
        return [] if used + self.n_bytes(slot) <= self.machine.sram.capacity else None

    def unstage(self) -> list[int]:
        """Blocks that leave the staging memory after a step."""
        return []

    # ---- the rules

    def run(self) -> RunCounters:
        """Runs the plan; times in nanoseconds."""
        workload, counted, now = self.workload, self.counted, 0.0
        for step, reads in enumerate(workload.steps):
            for slot in [slot for slot, ready in self.flying.items() if ready <= now]:
                del self.flying[slot]
                self._stage(slot, now)
            for slot in workload.distinct(step):
                self._place(slot, workload.positions[step], now)
            following = workload.distinct(min(step + 1, len(workload.steps) - 1))
            for slot in self.ahead(following):
                self._order(slot, now)
            now += self._serve(reads)
            for slot in self.unstage():
                del self.staged[slot]
            for tier, n_bytes in self._occupied.items():
                counted.peak_bytes[tier] = max(counted.peak_bytes.get(tier, 0), n_bytes)
        counted.total_ns = now
        return counted

    def n_bytes(self, slot: int) -> int:
        """Bytes of a block in its present form."""
        return self.codec[slot].n_bytes(self.shape.block_bytes)

    def settle(self, slot: int, tier: str, codec: ModelledCodec) -> None:
        """A block lives there from now on, in that form."""
        self._occupied[self.tier[slot]] -= self.n_bytes(slot)
        self.tier[slot], self.codec[slot] = tier, codec
        self._occupied[tier] += self.n_bytes(slot)

    def _stage(self, slot: int, now_ns: float) -> None:
        leaving = None if slot in self.staged else self.stage(slot, now_ns)
        if leaving is not None:
            for gone in leaving:
                del self.staged[gone]
            self.staged[slot] = self.n_bytes(slot)
            self.counted.staged += 1

    def _place(self, slot: int, newest: int, now_ns: float) -> None:
        before, home = self.n_bytes(slot), self.tier[slot]
        self.settle(slot, *self.place(slot, newest, now_ns))
        after = self.n_bytes(slot)
        self.counted.saved_bytes += max(0, before - after)
        self.counted.encoded += after < before
        self.counted.moved_bytes += after if self.tier[slot] != home else 0

    def _order(self, slot: int, now_ns: float) -> None:
        n_bytes, (moved, decoded, ready) = self.n_bytes(slot), self._free_ns
        level: MemoryLevel = getattr(self.machine, self.tier[slot])
        moved = max(moved, now_ns) + level.transfer_ns(n_bytes)
        decoded = max(decoded, moved) + self.codec[slot].decode_ns
        ready = max(ready, decoded) + self.machine.stage_ns
        self._free_ns = moved, decoded, ready
        self.flying[slot] = ready
        self.counted.moved_bytes += n_bytes

    def _serve(self, reads: Sequence[int]) -> float:
        """Reads a step's blocks; returns its time."""
        counted, missed, transfer, decode = self.counted, set[int](), 0.0, 0.0
        for slot in reads:
            if slot in self.staged:
                counted.sram_hits += 1
            elif slot not in missed:
                missed.add(slot)
                level: MemoryLevel = getattr(self.machine, self.tier[slot])
                transfer += level.transfer_ns(self.n_bytes(slot))
                decode += self.codec[slot].decode_ns
            counted.read_bytes[self.tier[slot]] += self.n_bytes(slot)
            self.reads[slot] += 1
        counted.reads += len(reads)
        compute = self.machine.compute_ns * len(reads)
        counted.exposed_ns += max(0.0, transfer - compute)
        counted.exposed_decode_ns += max(0.0, decode - (compute - min(compute, transfer)))
        return max(compute, transfer + decode)


class Classes(Everything):
    """Hot, warm and cold: the published plan. Cold blocks are encoded and live behind CXL."""

    def __init__(self, workload: BlockWorkload, machine: Machine) -> None:
        super().__init__(workload, machine)
        self._class = [HOT] * self.shape.blocks
        for slot in range(self.shape.blocks):
            token = self._first_token(slot)
            if token > FAR_TOKENS:
                self._class[slot] = COLD
                self.settle(slot, "dram", INT8)
            elif token > RECENT_TOKENS:
                self._class[slot] = WARM
                self.settle(slot, "cxl", RAW)

    def _first_token(self, slot: int) -> int:
        return slot % self.shape.blocks_per_head * self.shape.block_tokens

    def place(self, slot: int, newest: int, now_ns: float) -> tuple[str, ModelledCodec]:
        """Classifies the block anew; a cold one is encoded."""
        age = max(0, newest * self.shape.block_tokens - self._first_token(slot))
        older = WARM if self.reads[slot] >= WARM_READS else COLD
        self._class[slot] = HOT if age <= RECENT_TOKENS else older
        if self._class[slot] != COLD:
            return "hbm", RAW
        return "cxl", INT4 if age >= FAR_TOKENS else INT8

    def ahead(self, slots: Sequence[int]) -> list[int]:
        """Those that were hot when last classified: a next-step block seldom is."""
        hot = [s for s in slots if self._class[s] == HOT and s not in self.staged]
        return [s for s in hot[:_PER_STEP] if s not in self.flying]

    def unstage(self) -> list[int]:
        """Cold ones."""
        return [slot for slot in self.staged if self._class[slot] == COLD]


class Kept(Everything):
    """FlowKV's plan: one form, as near as there is room, the next step fetched ahead.

    Args:
        workload: What is read.
        machine: What it is read from.
        codec: Form of every block.
        per_step: Blocks fetched ahead per step, at most.
        policy: A name of the catalogue; decides what leaves staging and device memory.
    """

    def __init__(
        self,
        workload: BlockWorkload,
        machine: Machine,
        codec: ModelledCodec,
        per_step: int,
        policy: str,
    ) -> None:
        super().__init__(workload, machine)
        n_bytes = codec.n_bytes(self.shape.block_bytes)
        self._form, self._per_step = codec, per_step
        self._sram = BoundedMemory(machine.sram.capacity, n_bytes, make_policy(policy))
        self._hbm = BoundedMemory(machine.hbm.capacity, n_bytes, make_policy(policy))
        self._hbm.fill(self.shape.newest(self._hbm.room))  # as a prefill leaves it
        for slot in range(self.shape.blocks):
            self.settle(slot, self._home(slot), codec)

    def _home(self, slot: int) -> str:
        return "hbm" if slot in self._hbm.held else "cxl"

    def place(self, slot: int, newest: int, now_ns: float) -> tuple[str, ModelledCodec]:
        """Into device memory, if its policy does not keep it out."""
        self._sram.use(now_ns, slot)
        if not self._hbm.use(now_ns, slot):
            for gone in self._hbm.add(now_ns, slot):
                self.settle(gone, "cxl", self._form)
        return self._home(slot), self._form

    def ahead(self, slots: Sequence[int]) -> list[int]:
        """All of them, up to the budget."""
        return [s for s in slots if s not in self.staged and s not in self.flying][: self._per_step]

    def stage(self, slot: int, now_ns: float) -> list[int] | None:
        """What the policy gives up; None if that is the block itself."""
        gone = self._sram.add(now_ns, slot)
        return None if slot in gone else gone


# Strict timing rules: every byte takes its turn on the channel of its tier.
#
# SRAM is a real cache: what lies there is not read from HBM again, what does not fit leaves. A
# step orders the blocks it lacks when it begins, then those of the steps ahead; all of them share
# the HBM channel, in this order. A block that is not in HBM is read over CXL; one that enters HBM
# occupies the HBM channel for its write, and one that leaves HBM for the first time the CXL
# channel: blocks do not change, so the copy is made once. Latency is pipelined. Compute goes
# through the reads in order and waits for what is not there; every wait counts as exposed,
# decoding included.


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

    codec: ModelledCodec
    sram: Policy
    hbm: Policy
    lookahead: int = 0
    thrifty: bool = False


class _StrictRun:
    """One run: levels, channels, counters."""

    def __init__(self, workload: BlockWorkload, machine: Machine, plan: StrictPlan) -> None:
        shape = workload.geometry
        self.workload, self.machine, self.plan = workload, machine, plan
        self.n_bytes = plan.codec.n_bytes(shape.block_bytes)
        self.sram = BoundedMemory(machine.sram.capacity, self.n_bytes, plan.sram)
        self.hbm = BoundedMemory(machine.hbm.capacity, self.n_bytes, plan.hbm)
        self.hbm.fill(shape.newest(self.hbm.room))
        self.free_ns = {"hbm": 0.0, "cxl": 0.0}  # when the channels are free
        self.ready: dict[int, float] = {}  # when what lies in SRAM can be used
        self.counted = RunCounters()
        self.spilled = set(range(shape.blocks)) - self.hbm.held
        self.read_over_cxl: set[int] = set()

    def run(self) -> RunCounters:
        """Steps order what they and those ahead lack, and compute over their blocks in order."""
        counted, steps, now = self.counted, self.workload.steps, 0.0
        for step, reads in enumerate(steps):
            busy: set[int] = set()
            for nearest in range(step, min(len(steps), step + 1 + self.plan.lookahead)):
                slots = self.workload.distinct(nearest)
                busy.update(slots)
                for slot in slots:
                    if not self.sram.use(now, slot):
                        self._fetch(slot, now, busy)
            for slot in reads:
                if slot not in self.ready:  # a step wider than SRAM
                    self._fetch(slot, now, {slot})
                wait = max(0.0, self.ready[slot] - now)
                counted.exposed_ns += wait
                counted.sram_hits += wait == 0.0
                now = max(now, self.ready[slot]) + self.machine.compute_ns
            counted.reads += len(reads)
        counted.total_ns = now
        behind = self.spilled | (set(range(self.workload.geometry.blocks)) - self.hbm.held)
        held = {"hbm": len(self.hbm.held), "cxl": len(behind)}
        counted.peak_bytes = {tier: blocks * self.n_bytes for tier, blocks in held.items()}
        return counted

    def _fetch(self, slot: int, now_ns: float, busy: set[int]) -> None:
        """Brings a block into SRAM, from HBM or, through it or past it, over CXL."""
        tier = "hbm" if self.hbm.use(now_ns, slot) else "cxl"
        level: MemoryLevel = getattr(self.machine, tier)
        self.counted.read_bytes[tier] += self.n_bytes
        through = self._turn(now_ns, tier) + level.latency_ns
        if tier == "cxl" and self._enters(slot):
            self._into_hbm(slot, now_ns)
        self.ready[slot] = through + self.plan.codec.decode_ns
        for gone in self.sram.add(now_ns, slot, busy):
            if gone != slot:
                del self.ready[gone]

    def _turn(self, now_ns: float, tier: str) -> float:
        """Takes a turn on a channel; returns when the bytes are through."""
        level: MemoryLevel = getattr(self.machine, tier)
        self.free_ns[tier] = max(self.free_ns[tier], now_ns) + self.n_bytes / level.bytes_per_ns
        return self.free_ns[tier]

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
        written = set(gone) - self.spilled
        self.spilled |= written
        for tier in ("hbm", *["cxl"] * len(written)):
            self._turn(now_ns, tier)
            self.counted.moved_bytes += self.n_bytes


def run_strict(workload: BlockWorkload, machine: Machine, plan: StrictPlan) -> RunCounters:
    """Runs a plan under strict rules.

    Args:
        workload: What is read.
        machine: What it is read from.
        plan: Form, policies, and what is fetched ahead.

    Returns:
        The counters; times in nanoseconds. `exposed_ns` includes waiting for decoding.
    """
    return _StrictRun(workload, machine, plan).run()


# The table of the experiment: every plan, every set of rules, one row each.

STRICT_SRAM = 32 * MIB  # what an L2 cache can spare; the published 512 MiB exist on no device
PRESSURE_HBM = 2 * GIB  # half of the context, at full precision
_AHEAD = ((RAW, 80), (INT8, 80), (INT4, 96))  # blocks fetched ahead per step under published rules

Tell = Callable[[int, int, str], None]


class ExperimentRow(msgspec.Struct, frozen=True):
    """One plan under one set of rules. All of it is simulated.

    Attributes:
        rules: "published", "strict", or "pressure": strict, with an HBM too small for the context.
        plan: What was done.
        source: "kvflow" (rebuilt), "flowkv", or "floor": what no plan can undercut.
        hbm_read_bytes: Bytes read from HBM; under published rules every read counts. None for a
            floor that is about the link alone.
        cxl_read_bytes: Bytes read over CXL.
        exposed_ns: Time in which compute waited; None for a floor of bytes.
        exposed_decode_ns: Waiting for decoding, which the published rules count apart.
        total_ns: The whole run.
        sram_hit_rate: Share of reads that found their block staged and in time.
        moved_bytes: Bytes moved between tiers.
        usd_per_million_tokens: Price of the occupied memory, a proxy.
    """

    rules: str
    plan: str
    source: str
    hbm_read_bytes: int | None
    cxl_read_bytes: int
    exposed_ns: float | None = None
    exposed_decode_ns: float | None = None
    total_ns: float | None = None
    sram_hit_rate: float | None = None
    moved_bytes: int | None = None
    usd_per_million_tokens: float | None = None


def run_experiment(
    workload: BlockWorkload | None = None,
    machine: Machine = PUBLISHED,
    *,
    policies: Sequence[str] = ("lru", "auto"),
    sram_bytes: int = STRICT_SRAM,
    pressure_bytes: int = PRESSURE_HBM,
    tell: Tell | None = None,
) -> list[ExperimentRow]:
    """Runs all plans on one workload.

    Args:
        workload: What is read; default the published pattern.
        machine: What it is read from; its SRAM and HBM as they are under published rules.
        policies: Names of the catalogue that decide what leaves SRAM and HBM in FlowKV's rows.
        sram_bytes: Staging memory under strict rules.
        pressure_bytes: HBM of the last rows.
        tell: Called with (done, all, label) after every row.

    Returns:
        The rows, by rules.

    Raises:
        ConfigError: If there is no such policy.
    """
    given = workload or published_workload()
    for name in policies:
        make_policy(name)  # better now than after the first half of the rows
    strict = machine._replace(sram=machine.sram._replace(capacity=sram_bytes))
    tight = strict._replace(hbm=strict.hbm._replace(capacity=pressure_bytes))
    plans = list(_plans(given, machine, strict, tight, policies))
    rows = []
    for rules, plan, source, run in plans:
        found = run()
        if isinstance(found, RunCounters):
            price = found.usd_per_million_tokens(machine, len(given.steps))
            read = found.read_bytes
            found = ExperimentRow(
                rules, plan, source, read["hbm"], read["cxl"], found.exposed_ns,
                found.exposed_decode_ns, found.total_ns, found.sram_hit_rate, found.moved_bytes,
                price,
            )  # fmt: skip
        rows.append(found)
        if tell is not None:
            tell(len(rows), len(plans), source if source == "floor" else plan)
    return rows


def _plans(
    workload: BlockWorkload, machine: Machine, strict: Machine, tight: Machine, names: Sequence[str]
) -> Iterator[tuple[str, str, str, Callable[[], RunCounters | ExperimentRow]]]:
    """Rules, plan and source of every row, and what computes it."""

    def strictly(
        on: Machine, codec: ModelledCodec, name: str, steps: int, thrifty: bool = False
    ) -> RunCounters:
        plan = StrictPlan(codec, make_policy(name), make_policy(name), steps, thrifty)
        return run_strict(workload, on, plan)

    def kept(codec: ModelledCodec, ahead: int, name: str) -> RunCounters:
        return Kept(workload, machine, codec, ahead, name).run()

    yield "published", "all in HBM", "kvflow", lambda: Everything(workload, machine).run()
    yield "published", "hot, warm, cold", "kvflow", lambda: Classes(workload, machine).run()
    for (codec, ahead), name in product(_AHEAD, names):
        label = f"{codec.name}, {name}, +{ahead} blocks"
        yield "published", label, "flowkv", partial(kept, codec, ahead, name)
    for codec, name, steps in product(CODECS, names, (0, 1)):
        label = f"{codec.name}, {name}, +{steps} {'step' if steps == 1 else 'steps'}"
        yield "strict", label, "flowkv", partial(strictly, strict, codec, name, steps)
    for codec in CODECS:
        once = "strict", f"{codec.name}, each block once", "floor"
        least = compulsory_bytes(workload, codec)
        yield *once, partial(ExperimentRow, *once, least, 0, 0.0)
    for name, thrifty in product(names, (False, True)):
        label = f"raw, {name}" + (", CXL-aware" if thrifty else "")
        yield "pressure", label, "flowkv", partial(strictly, tight, RAW, name, 1, thrifty)
    for codec in (INT8, INT4):
        label = f"{codec.name}, {names[-1]}"
        yield "pressure", label, "flowkv", partial(strictly, tight, codec, names[-1], 1)
    best = "pressure", "raw, Belady", "floor"
    yield *best, lambda: ExperimentRow(*best, None, least_cxl_bytes(workload, tight, RAW))


# `python -m bench hierarchy`: the verb and its tables.

_RULES = {
    "published": "By the rules that were published",
    "strict": "By strict rules: every byte takes its turn on a shared channel",
    "pressure": "Strict, with an HBM too small for the context",
}


def add_verbs(verb: AddVerb) -> None:
    """Adds the verb."""
    about = "decode over SRAM, HBM, CXL and DRAM: a published table, and better"
    added = verb("hierarchy", _hierarchy, about)
    about = "what decides who leaves SRAM and HBM; default lru,auto"
    added.option("--policy", "A,B", about, type=names, default=["lru", "auto"])
    about = "kvflow (as published, the default), h100, h200, b200 or mi300x"
    added.option("--machine", "NAME", about, default="kvflow")
    about = "steps as JSON lines; default the published ones"
    added.option("--trace", "FILE", about, type=Path)
    added.option("--sram", "SIZE", "under strict rules; default %(default)s", default="32MiB")
    added.option("--hbm", "SIZE", "of the last rows; default %(default)s", default="2GiB")


def _hierarchy(given: argparse.Namespace, screen: Screen) -> tuple[int, Any]:
    if given.machine not in MACHINES:
        raise ConfigError(f"there is no machine {given.machine!r}", f"Use {', '.join(MACHINES)}")
    sizes = [parse_size(given.sram), parse_size(given.hbm)]
    if not all(sizes):
        raise ConfigError("a memory of 0 bytes holds nothing", "Give --sram and --hbm a size")
    workload = read_workload(given.trace) if given.trace else None
    room = dict(zip(("sram_bytes", "pressure_bytes"), sizes, strict=True))
    with Screen(to_stderr=True).progress("simulating") as tell:
        machine = MACHINES[given.machine]
        rows = run_experiment(workload, machine, policies=given.policy, tell=tell, **room)
    for rules, title in _RULES.items():
        shown = [row for row in rows if row.rules == rules]
        apart = any(row.exposed_decode_ns for row in shown)
        columns = ["", "HBM MB", "CXL MB", "exposed ms", *["decode ms"] * apart]
        columns += ["total ms", "SRAM", "$/Mtok"]
        screen.table(columns, [_cells(row, apart) for row in shown], title=title)
    screen.say(
        "Simulated. Exposed: compute waited for bytes; decode: for decoding, where that is counted"
        " apart. kvflow: rebuilt from its rules. No plan can undercut a floor."
    )
    return 0, rows


def _cells(row: ExperimentRow, apart: bool) -> list[str]:
    """A line of the table; `apart` has a column for waiting for decoding."""
    times = [row.exposed_ns, *[row.exposed_decode_ns] * apart, row.total_ns]
    return [
        row.plan if row.source == "flowkv" else f"{row.source}: {row.plan}",
        *(_or_dash(n_bytes, ",.1f", 1e-6) for n_bytes in (row.hbm_read_bytes, row.cxl_read_bytes)),
        *(_or_dash(ns, ".4f", 1e-6) for ns in times),
        _or_dash(row.sram_hit_rate, ".1%"),
        _or_dash(row.usd_per_million_tokens, ".5f"),
    ]


def _or_dash(value: float | None, form: str, unit: float = 1.0) -> str:
    return "-" if value is None else format(value * unit, form)
