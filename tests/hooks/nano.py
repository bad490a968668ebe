"""A GPT as small as it gets, in the words of nanoGPT: it knows nothing of caches."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items

import torch
import torch.nn.functional as F
from torch import nn

Attend = Callable[..., torch.Tensor]


def plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, layer: int
) -> torch.Tensor:
    """What such models call; `flowkv.attention` takes its place."""
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


class Block(nn.Module):
    def __init__(self, index: int, heads: int, kv_heads: int, dim: int) -> None:
        super().__init__()
        self.index, self.heads, self.kv_heads, self.dim = index, heads, kv_heads, dim
        width = heads * dim
        self.norm_a, self.norm_b = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * dim)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: torch.Tensor, attend: Attend) -> torch.Tensor:
        batch, count, width = x.shape
        parts = self.qkv(self.norm_a(x)).view(batch, count, -1, self.dim).transpose(1, 2)
        q, k, v = parts.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        y = attend(q, k, v, layer=self.index)
        x = x + self.out(y.transpose(1, 2).reshape(batch, count, width))
        return x + self.mlp(self.norm_b(x))


class Nano(nn.Module):
    """Token ids and positions `[B, T]` in, logits `[B, T, vocabulary]` out."""

    def __init__(
        self,
        *,
        vocabulary: int = 50,
        layers: int = 2,
        heads: int = 4,
        kv_heads: int = 2,
        dim: int = 8,
        positions: int = 256,
        attend: Attend = plain_attention,
    ) -> None:
        super().__init__()
        self.attend = attend
        self.tokens = nn.Embedding(vocabulary, heads * dim)
        self.positions = nn.Embedding(positions, heads * dim)
        self.blocks = nn.ModuleList(Block(i, heads, kv_heads, dim) for i in range(layers))
        self.head = nn.Linear(heads * dim, vocabulary)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x, self.attend)
        return self.head(x)


def make_nano(**options: object) -> Nano:
    """The same weights every time, large enough that tokens depend on all of the past."""
    torch.manual_seed(11)
    model = Nano(**options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    return model.requires_grad_(False)


@torch.no_grad()
def generate_plain(model: Nano, prompt: Items[int], count: int) -> list[int]:
    """Greedy tokens, everything computed anew at every step."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]
