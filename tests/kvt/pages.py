"""Random pages with structure, and coders of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from flowkv import LayerGroup
from tests.inside import GroupLearner, KeyTurn, PageCoder, PageLayout, page_layout

SIZE = 64
TURN = KeyTurn(1e4 ** (-np.arange(0, 16, 2) / 16))


def group(dtype: str = "float32", **more: Any) -> LayerGroup:
    given: dict[str, Any] = {"layers": (0, 1, 2), "kv_heads": 2, "head_dim": 16, "value_dim": 16}
    return LayerGroup(**given | {"dtype": dtype} | more)


def layout(dtype: str = "float32", size: int = SIZE, **more: Any) -> PageLayout:
    return page_layout(group(dtype, **more), size, "raw")


class Source:
    """Keys and values of few hidden causes, as models have them.

    Args:
        shape: Layout of their pages.
        seed: Seed of all draws.
        loud: Factor of some channels, as in models with outliers.
        bias: Added to all keys, as in models with biases.
    """

    def __init__(self, shape: PageLayout, seed: int = 0, loud: float = 1.0, bias: float = 0.0):
        self.shape, self.random = shape, torch.Generator().manual_seed(seed)
        n = shape.layers * shape.kv_heads
        self.mix = [self.draw(12, n * dim) for dim in (shape.head_dim, shape.value_dim)]
        self.mix[0][:, ::29] *= loud
        self.bias = bias

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random)

    def sides(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys, not rotated, and values `[layers, heads, tokens, dim]` in float32."""
        out = []
        for side, dim in enumerate((self.shape.head_dim, self.shape.value_dim)):
            x = self.draw(tokens, 12) @ self.mix[side]
            x = x + 0.05 * self.draw(*x.shape) + (self.bias if not side else 0.0)
            x = x.view(tokens, self.shape.layers, self.shape.kv_heads, dim)
            out.append(x.permute(1, 2, 0, 3).contiguous())
        return out[0], out[1]

    def gradients(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(1e-3 * x for x in self.sides(tokens))  # type: ignore[return-value]


def learner(source: Source, turn: KeyTurn | None = TURN) -> GroupLearner:
    made = GroupLearner(source.shape, [turn] * source.shape.layers)
    for _ in range(3):
        keys, values = source.sides(512)
        made.add((made.turns.apply(keys, 0), values), source.gradients(512), sample=True)
    return made


def page(coder: PageCoder, source: Source, page_no: int) -> bytearray:
    """A page of a prompt, with its keys rotated to its place."""
    size = coder.layout.page_size
    keys, values = source.sides(size)
    body = bytearray(coder.layout.page_bytes)
    own = coder.views(memoryview(body))
    own[0].copy_(coder.basis.turns.apply(keys, page_no * size))
    own[1].copy_(values)
    return body
