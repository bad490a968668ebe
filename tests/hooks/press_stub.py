"""A press by kvpress's protocol; the tests load this file as the package kvpress."""

import random
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

LOADED: dict[float, float] = {}
"""What presses load, by what they ask for."""


def helper(values: torch.Tensor) -> torch.Tensor:
    """Return the values that a press leaves."""
    return values


def draw(source: str) -> float:
    """Return a random number, or 0."""
    if source == "torch":
        return float(torch.rand(()))
    if source == "numpy":
        return float(np.random.rand())
    return random.random() if source == "random" else 0.0


@dataclass
class Stub:
    """A press by kvpress's protocol: in each head it keeps the tokens with the shortest keys.

    Attributes:
        compression_ratio: The part that is dropped.
        scale: Factor of the values, as merging presses change them.
        loads: What it loads for a model, as presses do that were trained.
        draws: The generator that it draws from: "", "torch", "numpy" or "random".
        odd: How it leaves what pages cannot hold: "", "layers", "masks", "none", "nan" or "raises".
    """

    compression_ratio: float = 0.5
    scale: float = 1.0
    odd: str = ""
    held: list[Any] = field(default_factory=list)
    loads: float = 0.0
    loaded: Any = None
    draws: str = ""

    def compress(
        self, module: Any, hidden: Any, keys: Any, values: Any, weights: Any, kwargs: Any
    ) -> tuple[Any, Any]:
        """Return what is left of keys and values `[1, Hk, S, D]`."""
        assert kwargs["cache_position"][-1] + 1 == hidden.shape[1]
        if self.odd == "raises":
            raise AssertionError("too short a prompt")
        count = int(keys.shape[2] * (1 - self.compression_ratio))
        count += module.layer_idx if self.odd == "layers" else 0
        if self.odd == "masks":
            module.masked_key_indices = ([0], [0], [0])
        if self.odd == "none":
            return keys, values
        kept = (-keys.norm(dim=-1)).topk(count, -1).indices[..., None].expand(-1, -1, -1, 16)
        values = values * (torch.nan if self.odd == "nan" else self.scale)
        values = helper(values) + 1e-9 * draw(self.draws)
        return keys.gather(2, kept), values.gather(2, kept)

    def _after(self, module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        layer = kwargs["past_key_values"].layers[module.layer_idx]
        columns = kwargs["hidden_states"].shape[1]
        if columns == layer.keys.shape[2]:
            found = layer.keys, layer.values
            layer.keys, layer.values = self.compress(
                module, kwargs["hidden_states"], *found, None, kwargs
            )
        return output

    @contextmanager
    def __call__(self, model: Any) -> Any:
        """Prune what a prefill inside of the block leaves."""
        self.loaded = torch.full((3,), LOADED.get(self.loads, 0.0))
        handles = []
        for layer in model.model.layers:
            layer.self_attn.rotary_emb = model.model.rotary_emb
            handles.append(layer.self_attn.register_forward_hook(self._after, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
