"""`FirstTokens`: recompute the beginning of each document."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flowkv.core.errors import ConfigError
from flowkv.policy.blend.base import BlendRule


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
