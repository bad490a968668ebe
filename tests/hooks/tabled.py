"""MLPs as a library may have them, with tables beside them; tests load them by a library's name."""

from __future__ import annotations

import importlib.util
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

MAPPED = {"scale": 1.0}
ORDERED = OrderedDict(scale=1.0)
LISTED = [1.0]
NESTED = {"scale": {"of": ([1.0],)}}
CHOSEN = {1.0}


def by_default(scale: float = 1.0, *, again: float = 1.0) -> float:
    return scale * again


class Tabled(torch.nn.Module):
    level = 1.0
    scaled = staticmethod(torch.abs)

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def factor(self) -> float:
        return 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tables = MAPPED["scale"] * ORDERED["scale"] * LISTED[0] * NESTED["scale"]["of"][0][0]
        layer = self.inner.down_proj
        for each in (self, layer, layer.weight):
            tables = tables * getattr(each, "later", 1.0)
        out = self.inner(x) * (tables * max(CHOSEN) * by_default() * self.factor() * self.level)
        return out * self.scaled(torch.ones(1))


class Times(torch.nn.Module):
    """An MLP, times numbers that lie in several places."""

    def __init__(self, inner: torch.nn.Module, config: Any) -> None:
        super().__init__()
        self.inner, self.config, self.scale = inner, config, 1.0
        self.register_buffer("gain", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = self.scale * getattr(self.config, "scale_of_a_test", 1.0)
        return self.inner(x) * (factor * self.gain * MAPPED["scale"])


def _rewrite(layer: Any, out: torch.Tensor) -> None:
    layer.kept["width"] = [out.shape[0], out.shape[-1]]


def _configure(layer: Any, out: torch.Tensor) -> None:
    layer.config.calls = getattr(layer.config, "calls", 0) + 1


WRITES: dict[str, Callable[[Any, torch.Tensor], object]] = {
    "a_number": lambda layer, out: setattr(layer, "n", layer.n + 1),
    "a_list": lambda layer, out: layer.listed.__setitem__(0, layer.listed[0] + 1),
    "nested_lists": lambda layer, out: layer.nested[1].__setitem__(0, layer.nested[1][0] + 1),
    "a_kept_output": lambda layer, out: layer.listed.__setitem__(0, out),
    "an_equal_list": _rewrite,
    "a_dictionary_that_grows": lambda layer, out: layer.kept.__setitem__(len(layer.kept), out),
    "a_set_that_grows": lambda layer, out: layer.seen.add(len(layer.seen)),
    "a_configuration": _configure,
    "an_uncounted_buffer": lambda layer, out: layer.mean.data.add_(out.mean()),
    "a_counted_buffer": lambda layer, out: layer.mean.add_(out.mean()),
    "another_buffer": lambda layer, out: setattr(layer, "mean", out.mean((0, 1))),
    "a_table": lambda layer, out: LISTED.__setitem__(0, LISTED[0] + 1.0),
}


class Writing(torch.nn.Module):
    """An MLP that writes to one place in each forward."""

    def __init__(self, inner: torch.nn.Module, config: Any, kind: str) -> None:
        super().__init__()
        self.inner, self.config, self.kind = inner, config, kind
        self.n, self.listed, self.nested, self.kept, self.seen = 0, [0], [[0], [0]], {}, set()
        self.register_buffer("mean", torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner(x)
        WRITES[self.kind](self, out)
        return out + 0.0 * LISTED[0]


class Lazy(torch.nn.Module):
    """An MLP that makes its scale when it is first called, unless it is set, and counts."""

    def __init__(self, inner: torch.nn.Module, first: float | torch.Tensor) -> None:
        super().__init__()
        self.inner, self.scale, self.first, self.calls = inner, None, first, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.scale is None:
            self.scale = self.first
        return self.inner(x) * self.scale


class Once(torch.nn.Module):
    """An MLP that adds what is pending, once."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner, self.pending = inner, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        if self.pending is not None:
            y, self.pending = y + self.pending, None
        return y


class ByRow(torch.nn.Module):
    """An MLP that steers each row of a batch by its place."""

    def __init__(self, inner: torch.nn.Module, strengths: list[float]) -> None:
        super().__init__()
        self.inner, self.strengths = inner, torch.tensor(strengths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.strengths[: x.shape[0], None, None]


COUNT: Any = None
"""Function that is called with the rows of each computation of an `Encoder`."""


class Encoder(torch.nn.Module):
    """Gives the same bits for a row in every batch."""

    def __init__(self, seed: int = 0, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.weight = torch.nn.Parameter(torch.randn(width), requires_grad=False)
        self.scale = 2.0
        self.eval()

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        COUNT(len(x))
        found = x * self.weight * self.scale
        return found if mask is None else found * mask[:, None]


NAME = "transformers.models.tabled"


def as_library(name: str = NAME) -> Any:
    """Load this file under a name of transformers: its code counts as a library's."""
    if name not in sys.modules:
        place: Any = importlib.util.spec_from_file_location(name, __file__)
        sys.modules[name] = importlib.util.module_from_spec(place)
        place.loader.exec_module(sys.modules[name])
    return sys.modules[name]
