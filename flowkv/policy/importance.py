"""Which tokens of a sequence to keep under a budget: the pages that were looked at most.

Attention weights are sparse, and what was looked at once is looked at again (H2O, arXiv 2306.14048;
SnapKV, arXiv 2404.14469). The attention kernels say how much weight each page was given, per layer
and KV head, without a second pass (`Scoring.mass`). Here those weights add up, older ones fading.
The first tokens stay, as every head parks weight on them (StreamingLLM, arXiv 2309.17453), and the
latest do, as the next tokens are mostly predicted from them.
"""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from flowkv.core.errors import ConfigError, GeometryError
from flowkv.policy.config import PolicyConfig, configure

Count = Annotated[int, Meta(ge=0)]


class ImportanceConfig(PolicyConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What `Importance` can be told.

    Attributes:
        sink_tokens: First tokens that always stay.
        recent_share: Part of a budget that always goes to the latest tokens.
        half_life_tokens: Queries after which a weight counts half; 0 for never.
    """

    sink_tokens: Count = 4
    recent_share: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.25
    half_life_tokens: Count = 1024


class Importance:
    """Running page mass of one sequence, and what it says should stay. Deterministic.

    Args:
        layers: Layers of the group, L.
        kv_heads: KV heads, Hk.
        page_size: Tokens of a page, P.
        **options: Fields of `ImportanceConfig`.

    Raises:
        ConfigError: An option is unknown or malformed.
    """

    name = "importance"

    def __init__(self, layers: int, kv_heads: int, page_size: int, **options: object) -> None:
        self.config = configure(ImportanceConfig, self.name, options)
        self.page_size = page_size
        self._mass = np.zeros((layers, kv_heads, 0))

    @property
    def mass(self) -> NDArray[np.float64]:
        """`[L, Hk, pages]`: the faded weight that each page was given so far; a copy."""
        return self._mass.copy()

    def observe(self, mass: NDArray[np.floating], queries: int) -> None:
        """Adds the weights that the next queries gave to pages.

        Args:
            mass: `[L, Hk, pages]`, not negative, of all pages that the sequence has now.
            queries: How many tokens asked.

        Raises:
            GeometryError: Another shape.
        """
        if mass.ndim != 3 or mass.shape[:2] != self._mass.shape[:2]:
            layers, heads, _ = self._mass.shape
            raise GeometryError(f"page mass {mass.shape}", f"Pass [{layers}, {heads}, pages]")
        half_lives = queries / (self.config.half_life_tokens or math.inf)
        before = self._mass[:, :, : mass.shape[2]]  # a sequence may have been cut meanwhile
        total = mass.astype(np.float64)
        total[:, :, : before.shape[2]] += before * 0.5**half_lives
        self._mass = total

    def keep(
        self, length: int, budget: int, scores: NDArray[np.floating] | None = None
    ) -> NDArray[np.int32]:
        """The slots to keep of a sequence of `length` tokens.

        Whole pages go first, those of least mass; the page at the border keeps its latest tokens,
        or those of the highest scores.

        Args:
            length: Tokens the sequence has, one a slot.
            budget: Tokens to keep of them, per layer and head.
            scores: `[L, Hk, length]`, not negative, where the caller knows more: a page's mass is
                then shared among its tokens in proportion to them, and tokens compete for
                themselves.

        Returns:
            int32 `[L, Hk, n]`, ascending, `n = min(budget, length)`.

        Raises:
            ConfigError: The budget does not even hold the first tokens, which always stay.
            GeometryError: Scores of another shape.
        """
        sinks = min(length, self.config.sink_tokens)
        count = min(budget, length)
        if count < max(sinks, 1):
            raise ConfigError(
                f"a budget of {budget} of {length} tokens, {sinks} of which always stay",
                "Raise the budget, or lower sink_tokens",
            )
        value = self._token_values(length, scores)
        value[:, :, :sinks] = np.inf
        recent = min(count - sinks, int(self.config.recent_share * count))
        value[:, :, length - recent :] = np.inf
        # A stable sort of the slots from last to first: among equals the latest stay.
        order = length - 1 - np.argsort(-value[:, :, ::-1], axis=2, kind="stable")
        return np.sort(order[:, :, :count], axis=2).astype(np.int32)

    def kept(self, keep: NDArray[np.int32]) -> None:
        """Follows a drop: slot i of a layer and head now holds what was in slot `keep[..., i]`."""
        size = self.page_size
        shares = np.take_along_axis(self._padded(int(keep.max(initial=0)) + 1), keep // size, 2)
        self._mass = np.add.reduceat(shares / size, np.arange(0, keep.shape[2], size), axis=2)

    def _padded(self, length: int) -> NDArray[np.float64]:
        """Mass of all pages of so many tokens; pages that nobody asked for have none."""
        pages = -(-length // self.page_size)
        missing = max(0, pages - self._mass.shape[2])
        return np.pad(self._mass, ((0, 0), (0, 0), (0, missing)))[:, :, :pages]

    def _token_values(
        self, length: int, scores: NDArray[np.floating] | None
    ) -> NDArray[np.float64]:
        size, mass = self.page_size, self._padded(length)
        value = np.repeat(mass, size, axis=2)[:, :, :length]
        if scores is None:
            return value
        if scores.shape != value.shape:
            raise GeometryError(
                f"token scores {scores.shape}", f"Pass one number per slot, {value.shape}"
            )
        empty = mass.shape[2] * size - length
        padded = np.pad(scores.astype(np.float64), ((0, 0), (0, 0), (0, empty)))
        pages = padded.reshape(*mass.shape, size)
        sums = np.maximum(pages.sum(axis=3, keepdims=True), np.finfo(np.float64).tiny)
        shared: NDArray[np.float64] = (mass[..., None] * pages / sums).reshape(padded.shape)
        return shared[:, :, :length]
