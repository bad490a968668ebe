"""Tiers, codecs and machines: what holds blocks, how fast it gives them, what it costs.

Bandwidths and prices of the profiles are those of `flowkv.sim.hardware`; latencies, the CXL link
and its price are assumptions. They compare plans with each other and predict no bill.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from flowkv.sim.hardware import HARDWARE

MIB, GIB = 1 << 20, 1 << 30


class Tier(NamedTuple):
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


class Codec(NamedTuple):
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


RAW = Codec("raw", 1.0, 0.0)
INT8 = Codec("int8", 0.5, 120.0)
INT4 = Codec("int4", 0.25, 260.0)
CODECS: Mapping[str, Codec] = MappingProxyType({c.name: c for c in (RAW, INT8, INT4)})


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
    sram: Tier
    hbm: Tier
    cxl: Tier
    dram: Tier
    compute_ns: float = 180.0
    stage_ns: float = 40.0


def _device(name: str, sram_mib: int) -> Machine:
    """An accelerator of `flowkv.sim.hardware` with a CXL link; SRAM is its last-level cache."""
    known = HARDWARE[name]
    own, host = known.place("hbm"), known.place("dram")
    rate = own.bytes_per_s / 1e9
    return Machine(
        name,
        Tier(sram_mib * MIB, 4 * rate, 25.0),
        Tier(int(known.memory_bytes), rate, 300.0, own.dollars_per_gib_hour),
        Tier(512 * GIB, 50.0, 900.0, host.dollars_per_gib_hour / 2),
        Tier(1024 * GIB, host.bytes_per_s / 1e9, 1800.0, host.dollars_per_gib_hour),
    )


# The published machine's bandwidths were given in Gbit/s; its own profiles hold the same numbers
# as GB/s. A published digit needs the published arithmetic.
PUBLISHED = Machine(
    "kvflow",
    Tier(512 * MIB, 20_000 / 8, 25.0),
    Tier(8 * GIB, 3_000 / 8, 300.0, 0.03),
    Tier(24 * GIB, 300 / 8, 900.0, 0.002),
    Tier(64 * GIB, 120 / 8, 1800.0, 0.004),
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
