"""Rules that choose which tokens of a reused document are recomputed, by name. Experimental.

| name | class | recomputed tokens |
|---|---|---|
| `first` | `FirstTokens` | the first n of each document |
| `values` | `ValueDeviation` | the tokens with the largest change in second-layer values |

All other tokens keep the K and V computed at the beginning of a text, rotated to their present
positions: the answer is near that of the whole prompt, but not the same. A rule of your own needs
one method, `BlendRule.choose`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowkv.core.errors import ConfigError, GeometryError
from flowkv.policy.base import made

__all__ = ["BLEND_RULES", "BlendRule", "FirstTokens", "ValueDeviation", "make_blend_rule"]


class BlendRule(ABC):
    """Rule that chooses which tokens of reused documents are recomputed.

    Deterministic and stateless.

    Attributes:
        name: Name in the catalogue.
        looks: Whether `choose` needs the deviation of the second layer's values. To measure it, the
            first layer is computed for all tokens, at a cost of one part in the number of layers.
    """

    name: str = ""
    looks: bool = False

    @abstractmethod
    def choose(
        self, sizes: Sequence[int], deviation: NDArray[np.floating] | None
    ) -> NDArray[np.bool_]:
        """Return a mask of the tokens to recompute.

        Args:
            sizes: Tokens of each cached document of the prompt.
            deviation: float `[sum(sizes)]`, if `looks`: squared distance of each token's values in
                the second layer, over heads and dims, from those of the whole prompt.

        Returns:
            bool `[sum(sizes)]`.
        """

    def chosen(
        self, sizes: Sequence[int], deviation: NDArray[np.floating] | None = None
    ) -> NDArray[np.bool_]:
        """Return the result of `choose`, checked.

        Raises:
            GeometryError: `choose` did not return one truth value for each token.
        """
        found, count = np.asarray(self.choose(sizes, deviation)), sum(sizes)
        if found.shape != (count,) or found.dtype != np.bool_:
            raise GeometryError(
                f"blend rule {self.name or type(self).__name__!r} chose {found.dtype} "
                f"{list(found.shape)}",
                f"Let choose() return one truth value for each token, bool [{count}]",
            )
        return found


class FirstTokens(BlendRule):
    """The first n tokens of each document (LegoLink of EPIC, arXiv 2410.15332).

    Computed at the beginning of a text, a document's first tokens are attention sinks for its other
    tokens: there the K and V of both places differ most, and recomputing them costs least.

    Args:
        amount: Tokens of each document.

    Raises:
        ConfigError: The amount is negative or no whole number.
    """

    name = "first"

    def __init__(self, amount: float = 16) -> None:
        if not math.isfinite(amount) or amount != int(amount) or amount < 0:
            raise ConfigError(f"first:{amount}", "Pass a number of tokens, such as first:16")
        self.tokens = int(amount)

    def choose(
        self, sizes: Sequence[int], deviation: NDArray[np.floating] | None
    ) -> NDArray[np.bool_]:
        """Return a mask of the first `tokens` of each document."""
        parts = [np.arange(size) < self.tokens for size in sizes]
        return np.concatenate([np.empty(0, np.bool_), *parts])


class ValueDeviation(BlendRule):
    """The tokens with the largest deviation in the second layer (CacheBlend, arXiv 2405.16444).

    The first layer's K and V depend on a token alone, so the second layer is the first to differ.

    Args:
        amount: Part of the tokens of all documents, from 0 to 1.

    Raises:
        ConfigError: The amount is outside 0 to 1.
    """

    name, looks = "values", True

    def __init__(self, amount: float = 0.15) -> None:
        if not 0 <= amount <= 1:
            raise ConfigError(
                f"values:{amount}", "Pass a part of the tokens from 0 to 1, such as values:0.15"
            )
        self.share = amount

    def choose(
        self, sizes: Sequence[int], deviation: NDArray[np.floating] | None
    ) -> NDArray[np.bool_]:
        """Return a mask of the `share` of tokens that deviate most; among equals the first."""
        if deviation is None:
            raise GeometryError("values needs the deviation", "Pass deviation=, [tokens]")
        found = np.zeros(sum(sizes), np.bool_)
        count = math.ceil(self.share * len(found))
        found[np.argsort(-deviation, kind="stable")[:count]] = True
        return found


BLEND_RULES: Mapping[str, Callable[..., BlendRule]] = MappingProxyType(
    {"first": FirstTokens, "values": ValueDeviation}
)


def make_blend_rule(given: str | float | BlendRule) -> BlendRule:
    """Make a blend rule, or pass one through.

    Args:
        given: A share of the tokens, for `values`; or a name, with or without its argument:
            "first", "first:32", "values:0.3".

    Raises:
        ConfigError: The name is unknown, its argument is no number, or the object is no rule.
    """
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        given = f"values:{given}"
    if not isinstance(given, str):
        return made(given, BLEND_RULES, BlendRule, "blend rule", {})  # type: ignore[type-abstract]
    name, _, argument = given.partition(":")
    options: dict[str, Any] = {}
    if argument:
        try:
            options = {"amount": float(argument)}
        except ValueError:
            raise ConfigError(
                f"recompute={given!r} has no numeric amount of tokens",
                "Write NAME:AMOUNT, such as first:16 or values:0.15",
            ) from None
    return made(name, BLEND_RULES, BlendRule, "blend rule", options)  # type: ignore[type-abstract]
