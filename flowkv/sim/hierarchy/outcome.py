"""What a run counted."""

from __future__ import annotations

from dataclasses import dataclass, field

from flowkv.sim.hierarchy.machine import GIB, Machine

_NS_PER_HOUR = 3600e9


@dataclass
class Outcome:
    """Counters of one run; times are of the simulated clock.

    Attributes:
        reads: Blocks that the steps read.
        sram_hits: Of these, how many lay staged, and in time.
        read_bytes: Bytes read, by tier.
        prefetched_bytes: Of these, how many came before they were needed.
        moved_bytes: Bytes moved between tiers, prefetches included.
        saved_bytes: Bytes that encoding took away.
        encoded: Blocks encoded smaller.
        staged: Blocks that a prefetch staged.
        left: Blocks that left device memory because it was full.
        total_ns: The whole run.
        exposed_ns: Of this, time in which compute waited for bytes.
        exposed_decode_ns: Time in which it waited for decoding, where that is counted apart.
        hidden_ns: Transfer that compute covered.
        peak_bytes: The most that was occupied at the end of a step, by tier.
    """

    reads: int = 0
    sram_hits: int = 0
    read_bytes: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("hbm", "cxl", "dram"), 0)
    )
    prefetched_bytes: int = 0
    moved_bytes: int = 0
    saved_bytes: int = 0
    encoded: int = 0
    staged: int = 0
    left: int = 0
    total_ns: float = 0.0
    exposed_ns: float = 0.0
    exposed_decode_ns: float = 0.0
    hidden_ns: float = 0.0
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
        prices = {
            "hbm": machine.hbm.usd_per_gib_hour,
            "cxl": machine.cxl.usd_per_gib_hour,
            "dram": machine.dram.usd_per_gib_hour,
        }
        per_hour = sum(prices[t] * n / GIB for t, n in self.peak_bytes.items())
        return per_hour * self.total_ns / _NS_PER_HOUR * 1e6 / tokens
