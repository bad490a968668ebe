"""`ValueDeviation`: tokens whose values changed most."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flowkv.core.errors import ConfigError, GeometryError
from flowkv.policy.blend.base import BlendRule


class ValueDeviation(BlendRule):
    """Those of all documents whose values in the second layer differ most (CacheBlend, 2405.16444).

    The first layer's K and V depend on a token alone, so the second is the first that tells.

    Args:
        amount: Part of the tokens, from 0 to 1.

    Raises:
        ConfigError: It is no such part.
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
        """The `share` of them with the largest deviation; among equals the first."""
        if deviation is None:
            raise GeometryError("values was told no deviation", "Pass deviation=, [tokens]")
        found = np.zeros(sum(sizes), np.bool_)
        count = math.ceil(self.share * len(found))
        found[np.argsort(-deviation, kind="stable")[:count]] = True
        return found
