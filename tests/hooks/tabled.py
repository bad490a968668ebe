"""An MLP as a library may have it, with tables beside it; tests load it under a library's name."""

from __future__ import annotations

from collections import OrderedDict

import torch

MAPPED = {"scale": 1.0}
ORDERED = OrderedDict(scale=1.0)
LISTED = [1.0]
NESTED = {"scale": {"of": ([1.0],)}}
CHOSEN = {1.0}


def by_default(scale: float = 1.0, *, again: float = 1.0) -> float:
    return scale * again


class Tabled(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tables = MAPPED["scale"] * ORDERED["scale"] * LISTED[0] * NESTED["scale"]["of"][0][0]
        return self.inner(x) * (tables * max(CHOSEN) * by_default())
