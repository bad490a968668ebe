"""A decoder with random weights, a layer at a time: what real restores compute.

Grouped-query attention, rotary positions, gated feed-forward or a mixture of experts. It stands in
for a trained model of the same shape: costs are the same, nothing has to be fetched, and a restore
that is wrong shows as clearly. Tensors: T tokens, Hk key/value heads of D numbers, L layers.
"""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from flowkv.core.errors import ConfigError
from flowkv.sim.restore import Decoder

SMALL = MappingProxyType(
    {
        shape.name: shape
        for shape in (
            # Tenths of a second on a processor: as the fixture model, deeper, and two wide layers.
            Decoder("fixture", 4, 128, 4, 2, 64, 224),
            Decoder("small", 8, 256, 8, 2, 32, 704),
            Decoder("wide", 2, 1024, 16, 4, 64, 2816),
        )
    }
)
"""Shapes that a processor restores while one waits."""

VOCABULARY = 256
"""Tokens that there are. Few: embedding and head are not what is measured."""

_EXPERTS = 16  # for each that takes part in a token
_THETA = 500_000.0


class _Layer:
    """Weights of one layer, random."""

    def __init__(self, shape: Decoder, make: _Maker) -> None:
        d, f, inner = shape.width, shape.ffn, shape.heads * shape.head_dim
        self.qkv = make(d, inner + 2 * shape.kv_heads * shape.head_dim)
        self.out = make(inner, d)
        many = (shape.experts * _EXPERTS,) if shape.experts > 1 else ()
        self.router = make(d, *many) if many else None
        self.gate_up, self.down = make(*many, d, 2 * f), make(*many, f, d)


class _Maker:
    """Makes weights that keep the size of what goes through them."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *size: int) -> torch.Tensor:
        return torch.empty(size).normal_(0.0, size[-2] ** -0.5, generator=self._generator)


class Model:
    """A decoder with random weights, in fp32 on the processor.

    Args:
        shape: Its shape.
        positions: Most tokens of a prompt, answer included.
        seed: Of the weights.
    """

    def __init__(self, shape: Decoder, *, positions: int, seed: int = 0) -> None:
        if shape.heads % shape.kv_heads or shape.head_dim % 2:
            raise ConfigError(
                f"{shape.heads} query heads do not share {shape.kv_heads} heads of "
                f"{shape.head_dim} numbers",
                "Make heads a multiple of kv_heads, and head_dim even",
            )
        self.shape = shape
        make = _Maker(seed)
        self._embedding = make(VOCABULARY, shape.width) * VOCABULARY**0.5
        self._head = make(shape.width, VOCABULARY)
        self._layers = [_Layer(shape, make) for _ in range(shape.layers)]
        half = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
        turns = torch.arange(positions, dtype=torch.float64)[:, None] * _THETA**-half
        self._cos = turns.cos().float()[:, None]
        self._sin = turns.sin().float()[:, None]

    def empty_kv(self, tokens: int) -> torch.Tensor:
        """Room for keys and values, `[L, T, 2, Hk, D]`, full of NaN: unwritten cells show."""
        shape = self.shape
        size = shape.layers, tokens, 2, shape.kv_heads, shape.head_dim
        return torch.full(size, torch.nan)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """What the first layer is given, `[T, d]`, for int64 tokens `[T]`."""
        x: torch.Tensor = self._embedding[tokens]
        return x

    def layer(self, number: int, x: torch.Tensor, kv: torch.Tensor, first: int) -> torch.Tensor:
        """One layer over tokens that follow `first` others.

        Args:
            number: Of the layer.
            x: `[T, d]`.
            kv: `[>= first + T, 2, Hk, D]` of this layer; those of the new tokens are written.
            first: Tokens before them.
        """
        shape, weights = self.shape, self._layers[number]
        sizes = [shape.heads, shape.kv_heads, shape.kv_heads]
        stop = first + len(x)
        h = functional.rms_norm(x, (shape.width,))
        heads = (h @ weights.qkv).view(len(x), sum(sizes), shape.head_dim)
        q, k, v = torch.split(heads, sizes, 1)
        kv[first:stop, 0] = self._rotated(k, first)
        kv[first:stop, 1] = v
        o = _attend(self._rotated(q, first), kv[:stop])
        x = x + o @ weights.out
        return x + self._fed_forward(weights, functional.rms_norm(x, (shape.width,)))

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of the token that follows the last of `x`, `[VOCABULARY]`."""
        return functional.rms_norm(x[-1], (self.shape.width,)) @ self._head

    def forward(self, tokens: torch.Tensor, kv: torch.Tensor, first: int) -> torch.Tensor:
        """All layers over tokens that follow `first` others; see `layer` and `scores`."""
        x = self.embed(tokens)
        for number in range(self.shape.layers):
            x = self.layer(number, x, kv[number], first)
        return self.scores(x)

    def _rotated(self, x: torch.Tensor, first: int) -> torch.Tensor:
        cos, sin = self._cos[first : first + len(x)], self._sin[first : first + len(x)]
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def _fed_forward(self, weights: _Layer, h: torch.Tensor) -> torch.Tensor:
        if weights.router is None:
            gate, up = (h @ weights.gate_up).chunk(2, -1)
            return (functional.silu(gate) * up) @ weights.down
        chosen = torch.topk(h @ weights.router, self.shape.experts, dim=-1)
        share = torch.softmax(chosen.values, -1)
        expert, order = torch.sort(chosen.indices.flatten(), stable=True)
        ids = torch.arange(len(weights.down), device=h.device)
        ends = torch.searchsorted(expert, ids, right=True).to(torch.int32)
        mine = h[order // self.shape.experts]
        gate, up = functional.grouped_mm(mine, weights.gate_up, offs=ends).chunk(2, -1)
        out = functional.grouped_mm(functional.silu(gate) * up, weights.down, offs=ends)
        back = out[torch.argsort(order)].view(*share.shape, -1)
        return (back * share[:, :, None]).sum(1)


def _attend(q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last tokens: q `[T, H, D]`, kv `[S, 2, Hk, D]` to `[T, H * D]`."""
    k, v = kv[None, :, 0].transpose(1, 2), kv[None, :, 1].transpose(1, 2)
    q4, tokens = q[None].transpose(1, 2), len(q)
    if tokens == kv.shape[0]:
        o = functional.scaled_dot_product_attention(q4, k, v, is_causal=True, enable_gqa=True)
    elif tokens == 1:
        o = functional.scaled_dot_product_attention(q4, k, v, enable_gqa=True)
    else:
        bias = causal_lower_right(tokens, kv.shape[0])
        o = functional.scaled_dot_product_attention(q4, k, v, attn_mask=bias, enable_gqa=True)
    return o[0].transpose(0, 1).flatten(1)
