"""Plans: where blocks live, in which form, and what is fetched ahead.

`Everything in HBM` and `Classes` are the two columns of the published table. `Kept` is FlowKV's:
one form for all blocks, device memory as long as it lasts, and then what a policy of the catalogue
says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from flowkv.policy import Policy
from flowkv.sim.hierarchy.level import Level
from flowkv.sim.hierarchy.machine import INT4, INT8, RAW, Codec, Machine
from flowkv.sim.hierarchy.workload import Geometry, Workload

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

    def __init__(self, shape: Geometry) -> None:
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

    def settle(self, slot: int, tier: str, codec: Codec) -> None:
        """A block lives there from now on, in that form."""
        self.occupied[self.tier[slot]] -= self.n_bytes(slot)
        self.tier[slot], self.codec[slot] = tier, codec
        self.occupied[tier] += self.n_bytes(slot)


class Plan(Protocol):
    """What a run asks while its steps go by."""

    def start(self, blocks: Blocks) -> None:
        """Sets tier, form and temperature of every block before the first step."""

    def place(self, blocks: Blocks, slot: int, newest: int, now_ns: float) -> tuple[str, Codec]:
        """Tier and form of a block that this step reads; may classify it, and move others."""

    def ahead(self, blocks: Blocks, slots: Sequence[int], flying: Sequence[int]) -> list[int]:
        """Which blocks of the next step to fetch now; `flying` ones are on their way."""

    def stage(self, blocks: Blocks, slot: int, room: int, now_ns: float) -> list[int] | None:
        """Blocks that leave the staging memory of `room` bytes for this one; None to leave it."""

    def unstage(self, blocks: Blocks) -> list[int]:
        """Blocks that leave the staging memory after a step."""


class Everything:
    """All blocks raw in HBM, nothing fetched ahead: the published baseline."""

    def start(self, blocks: Blocks) -> None:
        """See `Plan`."""

    def place(self, blocks: Blocks, slot: int, newest: int, now_ns: float) -> tuple[str, Codec]:
        """See `Plan`."""
        return "hbm", RAW

    def ahead(self, blocks: Blocks, slots: Sequence[int], flying: Sequence[int]) -> list[int]:
        """See `Plan`."""
        return []

    def stage(self, blocks: Blocks, slot: int, room: int, now_ns: float) -> list[int] | None:
        """See `Plan`."""
        used = sum(blocks.staged.values())
        return [] if used + blocks.n_bytes(slot) <= room else None

    def unstage(self, blocks: Blocks) -> list[int]:
        """See `Plan`."""
        return []


class Classes(Everything):
    """Hot, warm and cold: the published plan. Cold blocks are encoded and live behind CXL."""

    def start(self, blocks: Blocks) -> None:
        """See `Plan`."""
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

    def place(self, blocks: Blocks, slot: int, newest: int, now_ns: float) -> tuple[str, Codec]:
        """See `Plan`."""
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
        """See `Plan`."""
        return [slot for slot in blocks.staged if blocks.temperature[slot] == COLD]


class Kept(Everything):
    """FlowKV's plan: one form, as near as there is room, the next step fetched ahead.

    Args:
        machine: Gives the capacities.
        workload: What will be read; only its shape is looked at.
        codec: Form of every block.
        per_step: Blocks fetched ahead per step, at most.
        sram_policy: Decides what leaves the staging memory.
        hbm_policy: Decides what leaves device memory.
    """

    def __init__(
        self,
        machine: Machine,
        workload: Workload,
        codec: Codec,
        per_step: int,
        sram_policy: Policy,
        hbm_policy: Policy,
    ) -> None:
        n_bytes = codec.n_bytes(workload.geometry.block_bytes)
        self._codec, self._per_step = codec, per_step
        self._sram = Level(machine.sram.capacity, n_bytes, sram_policy)
        self._hbm = Level(machine.hbm.capacity, n_bytes, hbm_policy)

    def start(self, blocks: Blocks) -> None:
        """Device memory as a prefill leaves it."""
        self._hbm.fill(blocks.shape.newest(self._hbm.room))
        for slot in range(blocks.shape.blocks):
            blocks.settle(slot, "hbm" if slot in self._hbm else "cxl", self._codec)

    def place(self, blocks: Blocks, slot: int, newest: int, now_ns: float) -> tuple[str, Codec]:
        """See `Plan`."""
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
        """See `Plan`."""
        gone = self._sram.add(now_ns, slot)
        return None if slot in gone else gone
