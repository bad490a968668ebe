"""`ValueDeviation`: recompute the tokens with the largest change in values."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flowkv.core.errors import ConfigError, GeometryError
from flowkv.policy.blend.base import BlendRule


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
