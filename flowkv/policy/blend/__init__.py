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

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from flowkv.core.errors import ConfigError
from flowkv.policy.base import made
from flowkv.policy.blend.base import BlendRule
from flowkv.policy.blend.first import FirstTokens
from flowkv.policy.blend.values import ValueDeviation

__all__ = ["BLEND_RULES", "BlendRule", "FirstTokens", "ValueDeviation", "make_blend_rule"]

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
