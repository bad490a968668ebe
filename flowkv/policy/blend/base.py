"""`BlendRule`: the one method of a rule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flowkv.core.errors import GeometryError


class BlendRule(ABC):
    """Says which tokens of reused documents are computed again. Deterministic; keeps no state.

    Attributes:
        name: Its name in the catalogue.
        looks: It is told how far the values of the second layer are from what they would be. For
            that the first layer is computed for all tokens, one part in the number of layers.
    """

    name: str = ""
    looks: bool = False

    @abstractmethod
    def choose(
        self, sizes: Sequence[int], deviation: NDArray[np.floating] | None
    ) -> NDArray[np.bool_]:
        """The tokens that are computed again.

        Args:
            sizes: Tokens of each document of the prompt that is known.
            deviation: float `[sum(sizes)]`, if `looks`: squared distance of each token's values in
                the second layer, over heads and dims, from those of the whole prompt.

        Returns:
            `[sum(sizes)]`.
        """

    def chosen(
        self, sizes: Sequence[int], deviation: NDArray[np.floating] | None = None
    ) -> NDArray[np.bool_]:
        """What `choose` says, checked.

        Raises:
            GeometryError: It is not one truth value for each token.
        """
        found, count = np.asarray(self.choose(sizes, deviation)), sum(sizes)
        if found.shape != (count,) or found.dtype != np.bool_:
            raise GeometryError(
                f"blend rule {self.name or type(self).__name__!r} chose {found.dtype} "
                f"{list(found.shape)}",
                f"Let choose() return one truth value for each token, bool [{count}]",
            )
        return found
