"""What restores cost: from a model's shape, an accelerator's data sheet and the rate of a link.

Nothing here is measured; whatever is computed from it is simulated (DESIGN D17).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from flowkv.core.errors import ConfigError
from flowkv.policy.restore.words import Request, Source, Span
from flowkv.sim.hardware import CODECS

LINK = "link"
"""Name of the tier where nothing else is said."""


class Decoder(NamedTuple):
    """The shape of a decoder, in bf16.

    Attributes:
        name: As the rows of the bench name it.
        layers: L.
        width: Of the residual stream, d.
        heads: Query heads.
        kv_heads: Key/value heads.
        head_dim: Numbers of each.
        ffn: Inner width of the feed-forward part (of each expert).
        experts: Experts that take part in each token; 1 for a dense model.
    """

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    experts: int = 1

    @property
    def weights(self) -> int:
        """Weights of a layer that take part in each token."""
        attention = self.width * self.head_dim * 2 * (self.heads + self.kv_heads)
        return attention + 3 * self.width * self.ffn * self.experts

    @property
    def cell_bytes(self) -> int:
        """Keys and values of one token of one layer."""
        return 2 * self.kv_heads * self.head_dim * 2


SHAPES = MappingProxyType(
    {
        shape.name: shape
        for shape in (
            Decoder("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336),
            Decoder("Qwen3-8B", 36, 4096, 32, 8, 128, 12288),
            Decoder("Qwen3-30B-A3B", 48, 2048, 32, 4, 128, 768, experts=8),
            Decoder("Llama-3.1-70B", 80, 8192, 64, 8, 128, 28672),
        )
    }
)
"""Shapes of the protocol, from the models' public configuration files."""


class Accelerator(NamedTuple):
    """What a data sheet says.

    Attributes:
        name: As the rows of the bench name it.
        flops: Dense bf16 operations a second.
        bytes_per_s: Of its memory.
    """

    name: str
    flops: float
    bytes_per_s: float


GPUS = MappingProxyType(
    {
        gpu.name: gpu
        for gpu in (
            Accelerator("L40S", 362e12, 864e9),
            Accelerator("A100", 312e12, 1.555e12),
            Accelerator("H100", 989e12, 3.35e12),
            Accelerator("H200", 989e12, 4.8e12),
        )
    }
)
"""Accelerators of the protocol, from the makers' data sheets."""


class Modelled:
    """Costs by formula (`Costs`).

    One layer of a chunk takes a fixed overhead, the larger of its products and one reading of its
    weights, and its attention. A load takes its bytes over the link's rate.

    Args:
        model: Shape of the model.
        gpu: Accelerator.
        gbps: Rate of each tier's link, 1 Gbps = 1e9 bit/s; or one rate for all.
        share: Of the accelerator, what restores get; 1 is all of it.
        launch_s: Overhead of a layer of a chunk; an assumption.
        latency_s: Of a load, before its first byte.
        ideal: Without overheads and without the reading of weights: for bounds.

    Raises:
        ConfigError: A rate or a share that is not above 0.
    """

    def __init__(
        self,
        model: Decoder,
        gpu: Accelerator,
        gbps: float | Mapping[str, float],
        *,
        share: float = 1.0,
        launch_s: float = 60e-6,
        latency_s: float = 0.0,
        ideal: bool = False,
    ) -> None:
        rates = dict(gbps) if isinstance(gbps, Mapping) else {LINK: gbps}
        if share <= 0 or min(rates.values()) <= 0:
            raise ConfigError(f"Share {share} and rates {rates}", "Give numbers above 0")
        self.model, self.gpu, self.rates, self.share = model, gpu, rates, share
        self._launch_s, self._latency_s = (0.0, 0.0) if ideal else (launch_s, latency_s)
        self._token_s = 2.0 * model.weights / (gpu.flops * EFFICIENCY * share)
        self._pair_s = 4.0 * model.heads * model.head_dim / (gpu.flops * ATTENTION * share)
        self._least_s = 0.0 if ideal else 2.0 * model.weights / (gpu.bytes_per_s * share)
        self._options = {"share": share, "launch_s": launch_s, "latency_s": latency_s}
        self._byte_s = {tier: 8.0 / (rate * 1e9) for tier, rate in rates.items()}

    @property
    def ideal(self) -> Modelled:
        """The same without overheads, for `lower_bound`."""
        return Modelled(self.model, self.gpu, self.rates, ideal=True, **self._options)

    def compute_s(self, request: Request, layers: int, tokens: Span) -> float:
        """So many layers of these tokens."""
        return layers * self._layer_s(tokens.first, tokens.stop - tokens.first)

    def suffix_s(self, request: Request) -> float:
        """All layers of the suffix."""
        return request.layers * self._layer_s(request.tokens, request.suffix)

    def load_s(self, request: Request, source: int, cells: int) -> float:
        """So many cells at once."""
        tier, _, cell_bytes = request.sources[source]
        return self._latency_s + cells * cell_bytes * self._byte_s[tier]

    def _layer_s(self, before: int, tokens: int) -> float:
        if tokens <= 0:
            return 0.0
        pairs = tokens * (before + (tokens + 1) / 2)
        return self._launch_s + max(tokens * self._token_s, self._least_s) + pairs * self._pair_s


EFFICIENCY = 0.55
"""Share of the peak that products reach; an assumption."""

ATTENTION = 0.45
"""Share of the peak that attention reaches; an assumption."""


def asked(
    model: Decoder,
    tokens: int,
    suffix: int = 512,
    *,
    number: int = 0,
    codecs: tuple[str, ...] = ("raw",),
    tiers: tuple[str, ...] = (LINK,),
    arrived_s: float = 0.0,
    whole: bool = False,
) -> Request:
    """A request to such a model; its prefix lies in each of these tiers, in each codec."""
    sources = tuple(
        Source(tier, codec, model.cell_bytes * CODECS[codec]) for codec in codecs for tier in tiers
    )
    return Request(
        number=number,
        tokens=tokens,
        suffix=suffix,
        layers=model.layers,
        sources=sources,
        arrived_s=arrived_s,
        whole=whole,
    )
