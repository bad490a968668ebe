"""Which tokens of a computed prompt stay, by name. Experimental.

| name | class | which tokens stay, beside the first and the latest |
|---|---|---|
| `latest` | `KeepLatest` | the latest |
| `key-norm` | `KeyNorm` | for each head, those whose keys are shortest |
| `snapkv` | `SnapKV` | for each head, those at which the end of the prompt looked most |

What goes is gone: the answer is another one than that of the whole prompt, and a question that
comes later may ask for just that. The guide on dropping tokens has the figures. A rule of your own
needs one method, `Sparsifier.score`. Each takes one share for all layers, or one for each of them,
as PyramidKV's (arXiv 2406.02069), which falls from the first layer to the last.
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

__all__ = ["SPARSIFIERS", "KeepLatest", "KeyNorm", "SnapKV", "Sparsifier", "make_sparsifier"]

Floats = NDArray[np.floating]


class Sparsifier(ABC):
    """Says which tokens of a prompt stay in each layer and KV head. Deterministic; keeps no state.

    Args:
        share: Part of the tokens that stays, above 0 and at most 1; or such a part for each layer
            of the model, first to last. Layers with the same share are paged together.
        sink_tokens: First tokens that stay, within that part: every head parks weight on them
            (StreamingLLM, arXiv 2309.17453).
        recent_tokens: Latest tokens that stay, within what is left of that part.

    Attributes:
        name: Its name in the catalogue.
        queries: It is told the attention of so many of a prompt's last tokens; 0 for none.

    Raises:
        ConfigError: A share is no such part, or a count is negative.
    """

    name: str = ""
    queries: int = 0

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
        """How much each token is worth to each KV head of a layer.

        Args:
            layer: The model's layer index.
            keys: `[Hk, S, D]`, rotated to their positions; neither kept nor written.
            values: `[Hk, S, Dv]`, likewise.
            mass: `[Hk, S]`, if `queries` is not 0: the attention weight that a token was given by
                the last `queries` tokens of the prompt, mean over them and over the query heads.

        Returns:
            `[Hk, S]`, finite; the largest stay, among equals the latest.
        """

    def share_of(self, layer: int) -> float:
        """The part of the tokens that stays in a layer.

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
        """How many of so many tokens stay in a layer; as many in all layers of one share."""
        return max(1, math.ceil(self.share_of(layer) * tokens)) if tokens else 0

    def keep(
        self, layer: int, keys: Floats, values: Floats, mass: Floats | None = None
    ) -> NDArray[np.int32]:
        """The slots of a layer that stay; arguments as of `score`.

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
        """Its position."""
        return np.broadcast_to(np.arange(keys.shape[1], dtype=np.float64), keys.shape[:2])


class KeyNorm(Sparsifier):
    """Tokens with short keys: those are looked at most (Devoto et al., arXiv 2406.11430)."""

    name = "key-norm"

    def score(self, layer: int, keys: Floats, values: Floats, mass: Floats | None) -> Floats:
        """Minus the length of its key."""
        lengths: Floats = np.linalg.norm(keys, axis=2)
        return -lengths


class SnapKV(Sparsifier):
    """Tokens at which the end of the prompt looked, and those beside them (arXiv 2404.14469).

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
        """The largest attention weight around it."""
        if mass is None:
            raise GeometryError("snapkv was told no attention", "Pass mass=, [heads, tokens]")
        reach = self.kernel_tokens // 2
        padded = np.pad(mass, ((0, 0), (reach, reach)))
        highest_near: Floats = sliding_window_view(padded, self.kernel_tokens, axis=1).max(axis=2)
        return highest_near


SPARSIFIERS: Mapping[str, type[Sparsifier]] = MappingProxyType(
    {rule.name: rule for rule in (KeyNorm, KeepLatest, SnapKV)}
)


def make_sparsifier(given: str | Sparsifier) -> Sparsifier:
    """Makes a sparsifier from "NAME:SHARE", as "snapkv:0.5", or passes an object through.

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
            f"sparsify={given!r} does not say what part of the tokens stays",
            f"Write NAME:SHARE, such as {name}:0.5",
        ) from None
    return made(name, SPARSIFIERS, Sparsifier, "sparsifier", {"share": part})  # type: ignore[type-abstract]
