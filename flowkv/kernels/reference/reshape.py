"""The oracle of the operations that remake pages, and of rotation (RoPE)."""

from __future__ import annotations

import torch

from flowkv.core.layout import PageLayout
from flowkv.kernels.operands import Pages, Rotary
from flowkv.kernels.reference.pages import page_views
from flowkv.kernels.reference.rotary import rotated


def drop_tokens(
    arena: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    keep: torch.Tensor,
    layout: PageLayout,
) -> None:
    """Make pages of chosen tokens of others; see `movement.drop_tokens`."""
    size, count = layout.page_size, keep.shape[2]
    heads = torch.arange(layout.kv_heads, device=arena.device)[:, None]
    token = torch.arange(count, device=arena.device)
    to = target.long()[token // size], heads, token % size
    for layer in range(layout.layers):
        chosen = keep[layer].long()  # [Hk, n]
        of = source.long()[chosen // size], heads, chosen % size
        for view in page_views(Pages(arena, layout, layer)):
            view[to] = view[of]


def reposition(
    arena: torch.Tensor,
    pages: torch.Tensor,
    turns: torch.Tensor,
    rope: Rotary,
    layout: PageLayout,
    layer: int | None = None,
) -> None:
    """Rotate the keys of pages in place; see `rotary.reposition`."""
    for number in range(layout.layers) if layer is None else (layer,):
        keys, _ = page_views(Pages(arena, layout, number))
        for page, turn in zip(pages.tolist(), turns.tolist(), strict=True):
            if turn >= 0:
                keys[page] = rotated(keys[page], rope.cos[turn], rope.sin[turn], rope, keys.dtype)
