"""`BlendRule`: base class of the rules that choose recomputed tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flowkv.core.errors import GeometryError


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
