"""Costs as plain constants: models, accelerators and the places behind them.

Each constant has its source beside it, or is marked as an assumption. Nothing here is measured by
FlowKV; all results computed from it are simulated (DESIGN D17).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from flowkv.core.errors import refuse_unknown
from flowkv.sim.trace import Trace

Positive = Annotated[float, Meta(gt=0.0)]
T = TypeVar("T", bound=tuple[Any, ...])


def by_name(*constants: T) -> Mapping[str, T]:
    """Return tuples of constants by their first fields, their names."""
    return MappingProxyType({one[0]: one for one in constants})


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of a model, as far as it decides the cost of keys and values.

    Attributes:
        parameters: Weights that take part in each token.
        layers: Layers with attention.
        heads: Query heads.
        kv_heads: Key/value heads.
        head_dim: Elements of a head.
        bytes_per_number: Bytes of a stored element of a key or value.
        recurrent_layers: Further layers, with a state in place of attention.
        state_bytes: Bytes of the states of one prefix; 0 for models without.
    """

    parameters: Positive = 8.0e9
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    bytes_per_number: Positive = 2.0
    recurrent_layers: int = 0
    state_bytes: float = 0.0

    def token_bytes(self) -> float:
        """Return the bytes of keys and values of one token."""
        return 2.0 * self.layers * self.kv_heads * self.head_dim * self.bytes_per_number

    def whole_token_bytes(self) -> float:
        """Return the bytes of keys and values of one token if all layers had attention."""
        return self.token_bytes() * (self.layers + self.recurrent_layers) / self.layers

    def prefill_flops(self, first: NDArray[np.float64], tokens: float) -> NDArray[np.float64]:
        """Return the operations to compute `tokens` tokens that follow `first` others.

        Twice the weights per token, and two products of each query with the keys before it
        (causal), over all heads and layers: Hoffmann et al., arXiv 2203.15556, appendix F.
        """
        attended = tokens * (first + (tokens + 1) / 2)
        return 2.0 * self.parameters * tokens + 4.0 * self.layers * self.heads * (
            self.head_dim * attended
        )


def _state_bytes(numbers: int, channels: int) -> float:
    """Return the bytes of one layer's state: fp32 numbers, and 4 columns of a bf16 convolution."""
    return 4.0 * numbers + 4 * 2.0 * channels


MODELS = MappingProxyType(
    {
        "8b": Shape(),
        "70b": Shape(parameters=70.6e9, layers=80, heads=64),
        "1b": Shape(parameters=1.24e9, layers=16, head_dim=64),
        # One latent of 576 numbers per token and layer.
        "kimi-linear": Shape(
            parameters=3e9, layers=7, kv_heads=1, head_dim=288, recurrent_layers=20,
            state_bytes=20 * _state_bytes(32 * 128 * 128, 3 * 32 * 128),
        ),
        "qwen3-next": Shape(
            parameters=3e9, layers=12, heads=16, kv_heads=2, head_dim=256, recurrent_layers=36,
            state_bytes=36 * _state_bytes(32 * 128 * 128, 8192),
        ),
        # Attention and a state in every layer.
        "falcon-h1-7b": Shape(
            parameters=7.6e9, layers=44, heads=12, kv_heads=2,
            state_bytes=44 * _state_bytes(24 * 128 * 256, 3072 + 2 * 256),
        ),
        "jamba": Shape(
            parameters=12e9, layers=4, recurrent_layers=28,
            state_bytes=28 * _state_bytes(8192 * 16, 8192),
        ),
    }
)  # fmt: skip
"""Shapes of common models in bf16, from their public configuration files: dense ones with
grouped-query attention, and hybrids."""


class ModelledPlace(NamedTuple):
    """Place for blocks.

    Attributes:
        name: Name for tables.
        latency_s: Seconds before the first byte of a transfer to the accelerator.
        bytes_per_s: Rate of that transfer.
        dollars_per_gib_hour: Price of its room.
    """

    name: str
    latency_s: float
    bytes_per_s: float
    dollars_per_gib_hour: float


class Hardware(NamedTuple):
    """Accelerator with the places that it can reach.

    Attributes:
        name: Name in `HARDWARE`.
        flops: Dense bf16 operations per second, as the maker states them.
        efficiency: Share of these that a prefill reaches; an assumption everywhere.
        memory_bytes: Memory of the accelerator.
        dollars_per_hour: Rent of the accelerator; an assumption everywhere.
        places: Fastest first; the first is the accelerator's own memory.
    """

    name: str
    flops: float
    efficiency: float
    memory_bytes: float
    dollars_per_hour: float
    places: tuple[ModelledPlace, ...]

    def place(self, name: str) -> ModelledPlace:
        """Return one of its places by name.

        Raises:
            ConfigError: If there is none of that name.
        """
        places = {place.name: place for place in self.places}
        remedy = f"Its places are {', '.join(places)}"
        refuse_unknown(f"{self.name} has no place", name, places, remedy)
        return places[name]

    def prefill_s(self, flops: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the seconds of a prefill of so many operations."""
        return flops / (self.flops * self.efficiency)


# Prices of room are assumptions: the accelerator's own memory costs its share of the rent; host
# memory 0.004, NVMe 0.00011 and objects 0.00003 dollars per GiB and hour are the order of public
# cloud list prices in 2025. Latencies of host and NVMe: tens of microseconds, the time that a copy
# and a read take to begin (assumptions); of a remote store about one round trip and a look-up.
# One PCIe 4 x4 drive, read: data sheets, 6.5-7 GB/s.
_DISK = ModelledPlace("disk", 100e-6, 6.5e9, 0.00011)
_REMOTE = ModelledPlace("remote", 1e-3, 10e9, 0.0005)  # 100 Gbit/s at 80 %; assumption
_HOST_GIB = 0.004


def _server(name: str, flops: float, memory_gb: float, rate: float, dollars: float) -> Hardware:
    """Return a data-centre accelerator. `rate`: bytes/s of its memory, `dollars`: per hour."""
    memory = memory_gb * 1e9
    own = ModelledPlace("hbm", 1e-6, rate, dollars / (memory / 2**30))
    host = ModelledPlace("dram", 15e-6, 55e9, _HOST_GIB)  # PCIe 5 x16 is 63 GB/s: copies reach 55
    return Hardware(name, flops, 0.5, memory, dollars, (own, host, _DISK, _REMOTE))


# A laptop with a mobile GPU and a PCIe 4 x8 link; all figures are assumptions.
_LAPTOP = (
    ModelledPlace("hbm", 2e-6, 256e9, 0.05 / (8e9 / 2**30)),
    ModelledPlace("dram", 20e-6, 12e9, _HOST_GIB),
    ModelledPlace("disk", 120e-6, 3.5e9, 0.00011),
    ModelledPlace("remote", 20e-3, 100e6, 0.0005),
)
HARDWARE = by_name(
    # Makers' data sheets: dense bf16, memory, its bandwidth.
    _server("h100", 989e12, 80, 3.35e12, 3.0),
    _server("h200", 989e12, 141, 4.8e12, 3.8),
    _server("b200", 2250e12, 180, 8.0e12, 6.0),
    _server("mi300x", 1307e12, 192, 5.3e12, 3.0),
    Hardware("laptop", 40e12, 0.4, 8e9, 0.05, _LAPTOP),
)
"""Accelerators by name."""

CODECS = MappingProxyType({"raw": 1.0, "kv8": 0.53, "kv4": 0.28})
"""Bytes after compression over bytes before, scales included; INT8 and INT4 pages of 64 tokens and
more (docs/guides/codecs.md)."""


def block_costs(trace: Trace, model: Shape = MODELS["8b"]) -> NDArray[np.float64]:
    """Return the operations to compute each block, given all blocks before it, f8 [U]."""
    tokens = float(trace.block_tokens)
    return model.prefill_flops(np.multiply(trace.depths, tokens, dtype=np.float64), tokens)
