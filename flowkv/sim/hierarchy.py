"""The memory-hierarchy experiment: decode steps that read KV blocks from SRAM, HBM, CXL and DRAM.

A published experiment (KVFlow) is rebuilt here from its description, to the digit, and FlowKV's own
policies run on its workload: under its own timing rules (`published`), under rules in which every
byte takes its turn on a shared channel (`strict`), and with an HBM too small for the context
(`pressure`). Everything is simulated. `flowkv sim hierarchy` prints the table.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import numpy as np

from flowkv.core.errors import ConfigError
from flowkv.policy import Policy, make_policy
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
    "write_workload",
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
CODECS: Mapping[str, ModelledCodec] = MappingProxyType({c.name: c for c in (RAW, INT8, INT4)})


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
    steps: Sequence[Sequence[int]]
    positions: Sequence[int]

    @property
    def accesses(self) -> int:
        """Reads in all."""
        return sum(map(len, self.steps))

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


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    reads: list[tuple[int, int, int]]
    newest: int = -1


def read_workload(path: Path, geometry: BlockShape | None = None) -> BlockWorkload:
    """Reads a trace with one JSON object per decode step.

    A line is `{"reads": [[layer, head, block], ...], "newest": block}`; without `newest`, the
    largest block read so far is taken for the newest one.

    Args:
        path: The file.
        geometry: Shape of the cache; default that of the published experiment.

    Raises:
        ConfigError: If the file cannot be read, or a line is no step of this geometry.
    """
    shape = geometry or BlockShape()
    steps: list[list[int]] = []
    positions: list[int] = []
    newest = 0
    for number, line in enumerate(_lines(path), 1):
        try:
            given = msgspec.json.decode(line, type=_Line)
        except msgspec.DecodeError as error:
            raise _refused(path, number, str(error)) from None
        for layer, head, block in given.reads:
            if not (
                0 <= layer < shape.layers
                and 0 <= head < shape.heads
                and 0 <= block < shape.blocks_per_head
            ):
                raise _refused(path, number, f"there is no block {[layer, head, block]}")
            newest = max(newest, block)
        steps.append([shape.slot(*read) for read in given.reads])
        positions.append(given.newest if given.newest >= 0 else newest)
    if not any(steps):
        raise ConfigError(f"{path} holds no reads", 'Write lines such as {"reads": [[0, 0, 0]]}')
    return BlockWorkload(path.stem, shape, steps, positions)


def write_workload(path: Path, workload: BlockWorkload) -> None:
    """Writes what `read_workload` reads."""
    shape = workload.geometry
    with path.open("wb") as file:
        for reads, newest in zip(workload.steps, workload.positions, strict=True):
            split = [_split(shape, slot) for slot in reads]
            file.write(msgspec.json.encode(_Line(split, newest)) + b"\n")


def _split(shape: BlockShape, slot: int) -> tuple[int, int, int]:
    pair, block = divmod(slot, shape.blocks_per_head)
    layer, head = divmod(pair, shape.heads)
    return layer, head, block


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from (line for line in file if line.strip())
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", "Give the path of a JSON-lines file"
        ) from None


def _refused(path: Path, number: int, problem: str) -> ConfigError:
    return ConfigError(
        f"{path}, step {number}: {problem}",
        'Write one object per step, {"reads": [[layer, head, block], ...]}',
    )


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
    read_bytes: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("hbm", "cxl", "dram"), 0)
    )
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

    def occupy(self, n_bytes: dict[str, int]) -> None:
        """Notes how full the tiers are now."""
        for tier, value in n_bytes.items():
            self.peak_bytes[tier] = max(self.peak_bytes.get(tier, 0), value)

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
        self.left = 0
        self._policy = policy
        self._clock = 0

    def __contains__(self, slot: int) -> bool:
        return slot in self.held

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
        self.left += len(gone)
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


# Plans: where blocks live, in which form, and what is fetched ahead.
#
# `Everything in HBM` and `Classes` are the two columns of the published table. `Kept` is
# FlowKV's: one form for all blocks, device memory as long as it lasts, and then what a policy of
# the catalogue says.

HOT, WARM, COLD = "hot", "warm", "cold"

RECENT_TOKENS = 128  # up to here behind the newest token a block is hot
WARM_READS = 2  # an older one is warm from here on
FAR_TOKENS = 768  # beyond that a cold one takes four bits
_WINDOW, _PER_STEP = 96, 48  # candidates looked at, and taken, per step


class Blocks:
    """State of every block: tier, form, temperature, reads; and which lie staged.

    Args:
        shape: Shape of the cache.
    """

    def __init__(self, shape: BlockShape) -> None:
        self.shape = shape
        self.tier = ["hbm"] * shape.blocks
        self.codec = [RAW] * shape.blocks
        self.temperature = [WARM] * shape.blocks
        self.reads = [0] * shape.blocks
        self.staged: dict[int, int] = {}  # and its bytes there
        self.occupied = {"hbm": shape.blocks * shape.block_bytes, "cxl": 0, "dram": 0}

    def n_bytes(self, slot: int) -> int:
        """Bytes of a block in its present form."""
        return self.codec[slot].n_bytes(self.shape.block_bytes)

    def first_token(self, slot: int) -> int:
        """Number of the first token of a block."""
        return slot % self.shape.blocks_per_head * self.shape.block_tokens

    def age(self, slot: int, newest: int) -> int:
        """Tokens between a block and the newest one's."""
        return max(0, newest * self.shape.block_tokens - self.first_token(slot))

    def settle(self, slot: int, tier: str, codec: ModelledCodec) -> None:
        """A block lives there from now on, in that form."""
        self.occupied[self.tier[slot]] -= self.n_bytes(slot)
        self.tier[slot], self.codec[slot] = tier, codec
        self.occupied[tier] += self.n_bytes(slot)


class Everything:
    """All blocks raw in HBM, nothing fetched ahead: the published baseline. Other plans differ."""

    def start(self, blocks: Blocks) -> None:
        """Sets tier, form and temperature of every block before the first step."""

    def place(
        self, blocks: Blocks, slot: int, newest: int, now_ns: float
    ) -> tuple[str, ModelledCodec]:
        """Tier and form of a block that this step reads; may classify it, and move others."""
        return "hbm", RAW

    def ahead(self, blocks: Blocks, slots: Sequence[int], flying: Sequence[int]) -> list[int]:
        """Which blocks of the next step to fetch now; `flying` ones are on their way."""
        return []

    def stage(self, blocks: Blocks, slot: int, room: int, now_ns: float) -> list[int] | None:
        """Blocks that leave the staging memory of `room` bytes for this one; None to leave it."""
        used = sum(blocks.staged.values())
        return [] if used + blocks.n_bytes(slot) <= room else None

    def unstage(self, blocks: Blocks) -> list[int]:
        """Blocks that leave the staging memory after a step."""
        return []


class Classes(Everything):
    """Hot, warm and cold: the published plan. Cold blocks are encoded and live behind CXL."""

    def start(self, blocks: Blocks) -> None:
        """Classifies all blocks by their tokens."""
        for slot in range(blocks.shape.blocks):
            token = blocks.first_token(slot)
            if token <= RECENT_TOKENS:
                blocks.temperature[slot] = HOT
            elif token <= FAR_TOKENS:
                blocks.temperature[slot] = WARM
                blocks.settle(slot, "cxl", RAW)
            else:
                blocks.temperature[slot] = COLD
                blocks.settle(slot, "dram", INT8)

    def place(
        self, blocks: Blocks, slot: int, newest: int, now_ns: float
    ) -> tuple[str, ModelledCodec]:
        """Classifies the block anew; a cold one is encoded."""
        age = blocks.age(slot, newest)
        if age <= RECENT_TOKENS:
            blocks.temperature[slot] = HOT
        else:
            blocks.temperature[slot] = WARM if blocks.reads[slot] >= WARM_READS else COLD
        if blocks.temperature[slot] != COLD:
            return "hbm", RAW
        return "cxl", INT4 if age >= FAR_TOKENS else INT8

    def ahead(self, blocks: Blocks, slots: Sequence[int], flying: Sequence[int]) -> list[int]:
        """Those that were hot when last classified: a next-step block seldom is."""
        hot = [s for s in slots if blocks.temperature[s] == HOT and s not in blocks.staged]
        return [s for s in hot[:_WINDOW][:_PER_STEP] if s not in flying]

    def unstage(self, blocks: Blocks) -> list[int]:
        """Cold ones."""
        return [slot for slot in blocks.staged if blocks.temperature[slot] == COLD]


class Kept(Everything):
    """FlowKV's plan: one form, as near as there is room, the next step fetched ahead.

    Args:
        machine: Gives the capacities.
        workload: What will be read; only its shape is looked at.
        codec: Form of every block.
        per_step: Blocks fetched ahead per step, at most.
        policy: A name of the catalogue; decides what leaves staging and device memory.
    """

    def __init__(
        self,
        machine: Machine,
        workload: BlockWorkload,
        codec: ModelledCodec,
        per_step: int,
        policy: str,
    ) -> None:
        n_bytes = codec.n_bytes(workload.geometry.block_bytes)
        self._codec, self._per_step = codec, per_step
        self._sram = BoundedMemory(machine.sram.capacity, n_bytes, make_policy(policy))
        self._hbm = BoundedMemory(machine.hbm.capacity, n_bytes, make_policy(policy))

    def start(self, blocks: Blocks) -> None:
        """Device memory as a prefill leaves it."""
        self._hbm.fill(blocks.shape.newest(self._hbm.room))
        for slot in range(blocks.shape.blocks):
            blocks.settle(slot, "hbm" if slot in self._hbm else "cxl", self._codec)

    def place(
        self, blocks: Blocks, slot: int, newest: int, now_ns: float
    ) -> tuple[str, ModelledCodec]:
        """Into device memory, if its policy does not keep it out."""
        self._sram.use(now_ns, slot)
        if not self._hbm.use(now_ns, slot):
            for gone in self._hbm.add(now_ns, slot):
                blocks.settle(gone, "cxl", self._codec)
        return ("hbm" if slot in self._hbm else "cxl"), self._codec

    def ahead(self, blocks: Blocks, slots: Sequence[int], flying: Sequence[int]) -> list[int]:
        """All of them, up to the budget."""
        missing = [s for s in slots if s not in blocks.staged and s not in flying]
        return missing[: self._per_step]

    def stage(self, blocks: Blocks, slot: int, room: int, now_ns: float) -> list[int] | None:
        """What the policy gives up; None if that is the block itself."""
        gone = self._sram.add(now_ns, slot)
        return None if slot in gone else gone


# The published timing rules: moves are free, prefetches and reads do not get in each other's way.
#
# Per step: prefetches that are through are staged; the step's blocks are placed anew, at no cost;
# the next step's blocks are ordered, each through one transfer engine, one decoder and one stage;
# then every block that is not staged is read from where it lives, one after the other, latency
# included. Every read counts as bytes of the block's home tier, staged or not. Rules as
# published; `strict` has those that a machine would impose.


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


def run_published(workload: BlockWorkload, machine: Machine, plan: Everything) -> RunCounters:
    """Runs a plan under the published rules.

    Args:
        workload: What is read.
        machine: What it is read from.
        plan: Where blocks live and what is fetched ahead.

    Returns:
        The counters; times in nanoseconds.
    """
    blocks, engine, counted = Blocks(workload.geometry), _Engine(machine), RunCounters()
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
            counted.moved_bytes += blocks.n_bytes(slot)
        now += _serve(workload.steps[step], blocks, machine, counted)
        for slot in plan.unstage(blocks):
            del blocks.staged[slot]
        counted.occupy(blocks.occupied)
    counted.total_ns = now
    return counted


def _stage(
    plan: Everything, blocks: Blocks, slot: int, room: int, now_ns: float, counted: RunCounters
) -> None:
    leaving = plan.stage(blocks, slot, room, now_ns)
    if leaving is None:
        return
    for gone in leaving:
        del blocks.staged[gone]
    blocks.staged[slot] = blocks.n_bytes(slot)
    counted.staged += 1


def _place(
    plan: Everything, blocks: Blocks, slot: int, newest: int, now_ns: float, counted: RunCounters
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


def _serve(reads: Sequence[int], blocks: Blocks, machine: Machine, counted: RunCounters) -> float:
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
    counted.exposed_ns += max(0.0, transfer - compute)
    counted.exposed_decode_ns += max(0.0, decode - (compute - hidden))
    return max(compute, transfer + decode)


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


class _Run:
    """One run: levels, channels, counters."""

    def __init__(self, workload: BlockWorkload, machine: Machine, plan: StrictPlan) -> None:
        shape = workload.geometry
        self.machine, self.plan = machine, plan
        self.n_bytes = plan.codec.n_bytes(shape.block_bytes)
        self.sram = BoundedMemory(machine.sram.capacity, self.n_bytes, plan.sram)
        self.hbm = BoundedMemory(machine.hbm.capacity, self.n_bytes, plan.hbm)
        self.free_ns = {"hbm": 0.0, "cxl": 0.0}  # when the channels are free
        self.ready: dict[int, float] = {}
        self.counted = RunCounters()
        self.hbm.fill(shape.newest(self.hbm.room))
        self.spilled = set(range(shape.blocks)) - self.hbm.held
        self.read_over_cxl: set[int] = set()

    def fetch(self, slot: int, now_ns: float, busy: set[int]) -> None:
        """Brings a block into SRAM, from HBM or, through it or past it, over CXL."""
        if self.hbm.use(now_ns, slot):
            through = self.read(now_ns, "hbm")
        else:
            through = self.read(now_ns, "cxl")
            if self._enters(slot):
                self._into_hbm(slot, now_ns)
        self.ready[slot] = through + self.plan.codec.decode_ns
        for gone in self.sram.add(now_ns, slot, busy):
            if gone != slot:
                del self.ready[gone]

    def read(self, now_ns: float, tier: str) -> float:
        """Counts a read; returns when its bytes are there."""
        self.counted.read_bytes[tier] += self.n_bytes
        latency_ns: float = getattr(self.machine, tier).latency_ns
        return self.move(now_ns, tier) + latency_ns

    def move(self, now_ns: float, tier: str) -> float:
        """Takes a turn on a channel; returns when the bytes are through."""
        took_ns = self.n_bytes / getattr(self.machine, tier).bytes_per_ns
        self.free_ns[tier] = max(self.free_ns[tier], now_ns) + took_ns
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
        self.move(now_ns, "hbm")
        self.counted.moved_bytes += self.n_bytes
        for victim in gone:
            if victim not in self.spilled:
                self.spilled.add(victim)
                self.move(now_ns, "cxl")
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
                    run.fetch(slot, now, busy)
        now = _consume(run, workload, step, now)
    run.counted.total_ns = now
    _occupy(run, workload)
    return run.counted


def _consume(run: _Run, workload: BlockWorkload, step: int, now_ns: float) -> float:
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


def _occupy(run: _Run, workload: BlockWorkload) -> None:
    spilled = len(run.spilled | (set(range(workload.geometry.blocks)) - run.hbm.held))
    run.counted.occupy({"hbm": len(run.hbm.held) * run.n_bytes, "cxl": spilled * run.n_bytes})


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
    for done, (label, run) in enumerate(plans, 1):
        rows.append(run())
        if tell is not None:
            tell(done, len(plans), label)
    return rows


def _plans(
    workload: BlockWorkload,
    machine: Machine,
    strict: Machine,
    tight: Machine,
    policies: Sequence[str],
) -> Iterator[tuple[str, Callable[[], ExperimentRow]]]:
    """Every row by its label, and what computes it."""

    def published(make: Callable[[], Everything]) -> RunCounters:
        return run_published(workload, machine, make())

    def strictly(
        on: Machine, codec: ModelledCodec, policy: str, steps: int, thrifty: bool = False
    ) -> RunCounters:
        plan = StrictPlan(codec, make_policy(policy), make_policy(policy), steps, thrifty)
        return run_strict(workload, on, plan)

    def row(
        rules: str, label: str, run: Callable[[], RunCounters], source: str = "flowkv"
    ) -> tuple[str, Callable[[], ExperimentRow]]:
        return label, lambda: _row(rules, label, source, run(), workload, machine)

    yield row("published", "all in HBM", partial(published, Everything), "kvflow")
    yield row("published", "hot, warm, cold", partial(published, Classes), "kvflow")
    for (codec, ahead), name in product(_AHEAD, policies):
        make = partial(Kept, machine, workload, codec, ahead, name)
        yield row("published", f"{codec.name}, {name}, +{ahead} blocks", partial(published, make))
    for codec, name, steps in product(CODECS.values(), policies, (0, 1)):
        label = f"{codec.name}, {name}, +{steps} {'step' if steps == 1 else 'steps'}"
        yield row("strict", label, partial(strictly, strict, codec, name, steps))
    for codec in CODECS.values():
        yield "floor", partial(_each_block_once, workload, codec)
    for name, thrifty in product(policies, (False, True)):
        label = f"raw, {name}" + (", CXL-aware" if thrifty else "")
        yield row("pressure", label, partial(strictly, tight, RAW, name, 1, thrifty))
    for codec in (INT8, INT4):
        label = f"{codec.name}, {policies[-1]}"
        yield row("pressure", label, partial(strictly, tight, codec, policies[-1], 1))
    yield "floor", partial(_belady, workload, tight)


def _each_block_once(workload: BlockWorkload, codec: ModelledCodec) -> ExperimentRow:
    n_bytes = compulsory_bytes(workload, codec)
    return ExperimentRow("strict", f"{codec.name}, each block once", "floor", n_bytes, 0, 0.0)


def _belady(workload: BlockWorkload, machine: Machine) -> ExperimentRow:
    over_cxl = least_cxl_bytes(workload, machine, RAW)
    return ExperimentRow("pressure", "raw, Belady", "floor", None, over_cxl)


def _row(
    rules: str,
    plan: str,
    source: str,
    outcome: RunCounters,
    workload: BlockWorkload,
    machine: Machine,
) -> ExperimentRow:
    return ExperimentRow(
        rules,
        plan,
        source,
        outcome.read_bytes["hbm"],
        outcome.read_bytes["cxl"],
        outcome.exposed_ns,
        outcome.exposed_decode_ns,
        outcome.total_ns,
        outcome.sram_hit_rate,
        outcome.moved_bytes,
        outcome.usd_per_million_tokens(machine, len(workload.steps)),
    )
