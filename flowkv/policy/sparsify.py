"""Rules that choose which tokens of a computed prompt stay, by name. Experimental.

| name | class | which tokens stay, beside the first and the latest |
|---|---|---|
| `latest` | `KeepLatest` | the latest |
| `key-norm` | `KeyNorm` | for each head, the tokens with the shortest keys |
| `snapkv` | `SnapKV` | for each head, the tokens with most attention from the prompt's end |

A dropped token is lost: the answer differs from that of the whole prompt, and a later question
may need just that token. The guide on dropping tokens has the figures. A rule of your own needs
one method, `Sparsifier.score`. Each rule takes one share for all layers, or one per layer, such as
PyramidKV's (arXiv 2406.02069), which falls from the first layer to the last.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import ArrayLike, NDArray

from flowkv.core.errors import ConfigError, GeometryError
from flowkv.policy.base import made
from flowkv.policy.pages import highest

__all__ = [
    "SPARSIFIERS", "KVzip", "KeepLatest", "KeyNorm", "SnapKV", "Sparsifier", "make_sparsifier"
]  # fmt: skip

Floats = NDArray[np.floating]


class Sparsifier(ABC):
    """Rule that chooses the tokens to keep per layer and KV head. Deterministic and stateless.

    Args:
        share: Part of the tokens that stays, above 0 and at most 1; or such a part for each layer
            of the model, first to last. Layers with the same share are paged together.
        sink_tokens: First tokens that stay, within that part: every head parks weight on them
            (StreamingLLM, arXiv 2309.17453).
        recent_tokens: Latest tokens that stay, within what is left of that part.

    Attributes:
        name: Name in the catalogue.
        queries: Last tokens of the prompt for which `score` gets the attention mass; 0 for none.
        repeats: Whether it gets the mass of a repetition of the prompt instead.

    Raises:
        ConfigError: A share is no such part, or a count is negative.
    """

    name: str = ""
    queries: int = 0
    repeats: bool = False

    def __init__(self, share: ArrayLike, *, sink_tokens: int = 4, recent_tokens: int = 32) -> None:
        parts = np.asarray(share, np.float64)
        self.share: float | tuple[float, ...] = (*parts.tolist(),) if parts.ndim else float(parts)
        self.sink_tokens, self.recent_tokens = sink_tokens, recent_tokens
        if parts.ndim > 1 or not parts.size or not ((parts > 0) & (parts <= 1)).all():
            raise ConfigError(
                f"a share of {share!r} of the tokens",
                f"Pass a number above 0 and at most 1, such as {self.name or 'snapkv'}:0.5, or one "
                "for each layer",
            )
        if min(sink_tokens, recent_tokens) < 0:
            raise ConfigError(
                f"{sink_tokens} first and {recent_tokens} latest tokens", "Pass 0 or more"
            )

    @abstractmethod
    def score(self, layer: int, keys: Floats, values: Floats, mass: Floats | None) -> Floats:
        """Return a score for each token and KV head of a layer; the tokens with the largest stay.

        Args:
            layer: The model's layer index.
            keys: `[Hk, S, D]`, rotated to their positions; neither kept nor written.
            values: `[Hk, S, Dv]`, likewise.
            mass: `[Hk, S]`, if `queries` is not 0: the attention weight that a token was given by
                the last `queries` tokens of the prompt, mean over them and over the query heads.
                If `repeats`: the largest that it was given while the model read the prompt a
                second time, behind itself, mean over the query heads.

        Returns:
            `[Hk, S]`, finite; the largest stay, among equals the latest.
        """

    def share_of(self, layer: int) -> float:
        """Return the part of the tokens that stays in a layer.

        Raises:
            ConfigError: Shares were given for fewer layers.
        """
        if isinstance(self.share, float):
            return self.share
        if layer >= len(self.share):
            raise ConfigError(
                f"shares of {len(self.share)} layers, and none for layer {layer}",
                "Pass one for each layer of the model, or one number for all",
            )
        return self.share[layer]

    def count(self, tokens: int, layer: int) -> int:
        """Return how many of so many tokens stay in a layer; equal for layers of one share."""
        return max(1, math.ceil(self.share_of(layer) * tokens)) if tokens else 0

    def keep(
        self, layer: int, keys: Floats, values: Floats, mass: Floats | None = None
    ) -> NDArray[np.int32]:
        """Return the slots of a layer to keep; arguments as of `score`.

        Returns:
            int32 `[Hk, count(S, layer)]`, ascending.

        Raises:
            GeometryError: The rule's scores have another shape, or are not finite.
        """
        score, shape = np.asarray(self.score(layer, keys, values, mass), np.float64), keys.shape[:2]
        if score.shape != shape or not np.isfinite(score).all():
            raise GeometryError(
                f"sparsifier {self.name or type(self).__name__!r} scores tokens {score.shape}",
                f"Let score() return one finite number for each token of each head, {list(shape)}",
            )
        count = self.count(shape[1], layer)
        sinks = min(count, self.sink_tokens)
        return highest(score, count, sinks, min(count - sinks, self.recent_tokens))


class KeepLatest(Sparsifier):
    """The first tokens and the latest ones, the same in all heads (StreamingLLM, 2309.17453)."""

    name = "latest"

    def score(self, layer: int, keys: Floats, values: Floats, mass: Floats | None) -> Floats:
        """Score tokens by their position."""
        return np.broadcast_to(np.arange(keys.shape[1], dtype=np.float64), keys.shape[:2])


class KeyNorm(Sparsifier):
    """Tokens with short keys, which get most attention (Devoto et al., arXiv 2406.11430)."""

    name = "key-norm"

    def score(self, layer: int, keys: Floats, values: Floats, mass: Floats | None) -> Floats:
        """Score tokens by the negative length of their keys."""
        lengths: Floats = np.linalg.norm(keys, axis=2)
        return -lengths


class SnapKV(Sparsifier):
    """Tokens with most attention from the prompt's end, and their neighbours (arXiv 2404.14469).

    Args:
        share: See `Sparsifier`.
        kernel_tokens: Tokens, odd, over which a weight spreads to its neighbours.
        **counts: See `Sparsifier`.
    """

    name = "snapkv"
    queries = 32

    def __init__(self, share: ArrayLike, *, kernel_tokens: int = 7, **counts: int) -> None:
        super().__init__(share, **counts)
        if kernel_tokens < 1 or kernel_tokens % 2 == 0:
            raise ConfigError(
                f"a kernel of {kernel_tokens} tokens", "Pass an odd number, such as 7"
            )
        self.kernel_tokens = kernel_tokens

    def score(self, layer: int, keys: Floats, values: Floats, mass: Floats | None) -> Floats:
        """Score a token by the largest attention weight near it."""
        if mass is None:
            raise GeometryError("snapkv needs attention mass", "Pass mass=, [heads, tokens]")
        reach = self.kernel_tokens // 2
        padded = np.pad(mass, ((0, 0), (reach, reach)))
        highest_near: Floats = sliding_window_view(padded, self.kernel_tokens, axis=1).max(axis=2)
        return highest_near


class KVzip(Sparsifier):
    """Tokens with most attention while the prompt is repeated (Kim et al., arXiv 2505.23416)."""

    name = "kvzip"
    repeats = True

    def score(self, layer: int, keys: Floats, values: Floats, mass: Floats | None) -> Floats:
        """Score a token by the largest attention weight that its repetition gave it."""
        if mass is None:
            raise GeometryError("kvzip needs attention mass", "Pass mass=, [heads, tokens]")
        return mass


SPARSIFIERS: Mapping[str, type[Sparsifier]] = MappingProxyType(
    {rule.name: rule for rule in (KVzip, KeyNorm, KeepLatest, SnapKV)}
)


def make_sparsifier(given: str | Sparsifier) -> Sparsifier:
    """Make a sparsifier from "NAME:SHARE", as "snapkv:0.5", or pass an object through.

    Raises:
        ConfigError: The name is unknown, the share is none, or the object is no sparsifier.
    """
    if not isinstance(given, str):
        return made(given, SPARSIFIERS, Sparsifier, "sparsifier", {})  # type: ignore[type-abstract]
    name, _, share = given.partition(":")
    try:
        part = float(share)
    except ValueError:
        raise ConfigError(
            f"sparsify={given!r} has no numeric share of the tokens",
            f"Write NAME:SHARE, such as {name}:0.5",
        ) from None
    return made(name, SPARSIFIERS, Sparsifier, "sparsifier", {"share": part})  # type: ignore[type-abstract]
