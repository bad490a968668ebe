"""Hot, warm and cold: a policy's own order, cut in three, for the choice of tier and codec.

A policy says which block goes next. Before one goes it may lie further away, or smaller: that is
the same order asked for more than its end. Borders are shares of what is resident, taken from the
policy's priorities, whatever their unit. A block changes class only once it is past a border by a
margin, so that none flickers between two codecs.

`flowkv.policy.ladder` chooses codecs of open sequences by distance from their end, since the errors
that cost most are near it. The two compose: the ladder rules while a sequence is open, and when no
open sequence uses a page, `Temperature.codec` takes one of the ladder's codecs by its heat.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flowkv.core.errors import ConfigError
from flowkv.policy.base import Slots


class Heat(IntEnum):
    """How likely a block is to be used, beside the others."""

    COLD = 0
    WARM = 1
    HOT = 2


class Shares(NamedTuple):
    """Parts of what is resident, hottest first; the rest is cold.

    Attributes:
        hot: 0 to 1.
        warm: 0 to 1 - hot.
    """

    hot: float
    warm: float


USUAL = Shares(0.1, 0.3)


def shares_that_fit(n: int, capacity_bytes: int, sizes: tuple[int, int, int]) -> Shares:
    """The least cold shares with which `n` blocks fit.

    Nothing is colder than it must be: blocks are cold only if not all fit warm, and hot only as far
    as all others fit warm.

    Args:
        n: Blocks.
        capacity_bytes: Room for them.
        sizes: Bytes of a cold, a warm and a hot block, ascending.
    """
    cold, warm, hot = sizes
    if not 0 < cold <= warm <= hot:
        raise ConfigError(f"sizes {sizes}", "Give bytes of a cold, warm and hot block, ascending")
    if n <= 0 or n * hot <= capacity_bytes:
        return Shares(1.0, 0.0)
    if n * warm <= capacity_bytes:
        hot_blocks = (capacity_bytes - n * warm) // (hot - warm)
        return Shares(hot_blocks / n, 1 - hot_blocks / n)
    warm_blocks = max(0, capacity_bytes - n * cold) // max(warm - cold, 1)
    return Shares(0.0, min(warm_blocks / n, 1.0))


class Temperature:
    """Tells hot from warm from cold blocks, with hysteresis.

    Args:
        shares: Parts that are hot and warm.
        margin: How far past a border, as a share, a block must be before it changes class.

    Raises:
        ConfigError: The shares are none.

    Attributes:
        shares: May be set anew at any time, as by `shares_that_fit`; counts from the next `gauge`.
    """

    def __init__(self, shares: Shares = USUAL, margin: float = 0.02) -> None:
        self.margin = margin
        self.shares = shares
        if min(shares) < 0 or sum(shares) > 1 + 1e-9 or not 0 <= margin < 0.5:
            raise ConfigError(
                f"shares {tuple(shares)}, margin {margin}",
                "Let shares of 0 or more sum to 1 at most, and the margin be below 0.5",
            )
        self._heats = np.zeros(0, np.int8)
        self._enter = self._stay = (np.inf, np.inf)  # priorities that make a block hot, or warm

    def gauge(self, priorities: NDArray[np.float64]) -> None:
        """Sets the borders.

        Args:
            priorities: Of all resident blocks, or of a fair sample of them.
        """
        ordered = np.sort(priorities)[::-1]
        hot, warm = self.shares.hot, self.shares.hot + self.shares.warm
        near, far = -self.margin, self.margin
        self._enter = _border(ordered, hot + near), _border(ordered, warm + near)
        self._stay = _border(ordered, hot + far), _border(ordered, warm + far)

    def feel(self, slots: Slots, priorities: NDArray[np.float64]) -> NDArray[np.int8]:
        """The heat of some blocks, by the borders as last set and by what they were last.

        Args:
            slots: Blocks.
            priorities: Theirs, now.

        Returns:
            A `Heat` for each. A block never felt before is cold until it is past a border.
        """
        top = int(slots.max(initial=-1)) + 1
        if top > len(self._heats):
            heats = np.zeros(max(top, 2 * len(self._heats)), np.int8)
            heats[: len(self._heats)] = self._heats
            self._heats = heats
        before = self._heats[slots]
        hot = priorities >= np.where(before == Heat.HOT, self._stay[0], self._enter[0])
        warm = priorities >= np.where(before >= Heat.WARM, self._stay[1], self._enter[1])
        heats = np.where(hot, Heat.HOT, np.where(warm, Heat.WARM, Heat.COLD)).astype(np.int8)
        self._heats[slots] = heats
        return heats

    def forget(self, slots: Slots) -> None:
        """Slots that name other blocks next."""
        self._heats[slots[slots < len(self._heats)]] = Heat.COLD

    @staticmethod
    def tier(heat: int, tiers: int) -> int:
        """Where a block belongs, of so many tiers, the fastest being 0."""
        return (Heat.HOT - heat) * (tiers - 1) // 2

    @staticmethod
    def codec(heat: int, codecs: Sequence[int]) -> int:
        """How a block that no open sequence uses is stored.

        Args:
            heat: Its heat.
            codecs: Least lossy first, as `Ladder.codecs`. A block that is stored smaller already
                stays so: take the greater of the two.
        """
        return codecs[(Heat.HOT - heat) * (len(codecs) - 1) // 2]


def _border(ordered: NDArray[np.float64], share: float) -> float:
    """The least of the greatest `share` of some values in descending order."""
    count = round(share * len(ordered))
    if count <= 0:
        return float("inf")
    return -float("inf") if count >= len(ordered) else float(ordered[count - 1])
