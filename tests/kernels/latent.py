"""Layouts and switches for attention over latents."""

from __future__ import annotations

from flowkv import LayerGroup
from tests.inside import PageLayout, page_layout

SWITCHES = {
    "plain": {},
    "softcap and sinks": {"softcap": 3.0, "sinks": True},
    "alibi": {"alibi": True},
    "tree": {"tree": True},
    "window": {"window": 30},
    "cross": {"causal": False},
}


def latent_layout(
    head_dim: int, value_dim: int, page_size: int = 16, dtype: str = "float32"
) -> PageLayout:
    """A raw layout of two layers of latents."""
    group = LayerGroup(
        layers=(0, 1),
        kv_heads=1,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=dtype,
        kind="latent",
    )
    return page_layout(group, page_size)
