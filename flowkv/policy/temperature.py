"""Hot, warm and cold: a policy's own order, cut in three, for the choice of tier and codec.

A policy says which block goes next. Before one goes it may lie further away, or smaller: that is
the same order asked for more than its end. Borders are shares of what is resident, taken from the
policy's priorities, whatever their unit. A block changes class only once it is past a border by a
margin, so that none flickers between two codecs.

`Ladder` chooses codecs of open sequences by distance from their end, since the errors that cost
most are near it. The two compose: the ladder rules while a sequence is open, and when no
open sequence uses a page, `Temperature.codec` takes one of the ladder's codecs by its heat.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flowkv.core.config import AUTO
from flowkv.core.errors import ConfigError
from flowkv.core.layout import CODECS
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


# How old a page must be to be encoded, and how: hot, warm and cold by distance from the end.
#
# The last tokens of a sequence get most of its attention, so that errors in them cost most, and
# they are few (the residual window of Liu et al., KIVI, arXiv 2402.02750). A ladder keeps them
# raw and encodes what lies further back, the further the smaller. A page only ever climbs down.

AUTO_CODECS = ("kv8", "kv4c")
"""What "auto" encodes warm and cold pages with."""


class Rung(NamedTuple):
    """One step of a ladder.

    Attributes:
        pages: Whole pages that lie between a page and the end of its sequence, at least.
        codec: Index of the codec that such a page is encoded with.
    """

    pages: int
    codec: int


class Ladder:
    """The codec of each full page of a sequence, by its distance from the sequence's end.

    Distances are whole pages, so that a page becomes due when another one fills, and never between.

    Args:
        rungs: (tokens, codec): with at least so many tokens behind its end, a page is encoded so.
            Nearer pages are raw. The further, the lossier.
        page_size: Tokens per page.

    Raises:
        ConfigError: A codec is unknown, or the order is another one.

    Attributes:
        rungs: Furthest first.
        idle: Index of the codec of pages that no open sequence uses.
    """

    def __init__(self, rungs: Collection[tuple[int, str]], page_size: int) -> None:
        self.page_size = page_size
        unknown = [codec for _, codec in rungs if codec not in CODECS[1:]]
        if unknown or min((tokens for tokens, _ in rungs), default=0) < 0:
            raise ConfigError(
                f"rungs {list(rungs)}", f"Give distances of 0 or more, and {', '.join(CODECS[1:])}"
            )
        steps = [Rung(-(-tokens // page_size), CODECS.index(codec)) for tokens, codec in rungs]
        # Of two codecs at one distance only the smaller one is ever used.
        furthest = {rung.pages: rung for rung in sorted(steps)}
        self.rungs = tuple(furthest[pages] for pages in sorted(furthest, reverse=True))
        codecs = [rung.codec for rung in self.rungs]
        if codecs != sorted(set(codecs), reverse=True):
            raise ConfigError(f"rungs {list(rungs)}", "Let pages that lie further back be smaller")
        self.idle = codecs[-1] if codecs else 0

    @property
    def codecs(self) -> tuple[int, ...]:
        """Indices of the codecs of all pages, "raw" included, least lossy first."""
        return (0, *(rung.codec for rung in reversed(self.rungs)))

    def border(self, rung: Rung, length: int) -> int:
        """Leading pages of a sequence of `length` tokens that have this rung's codec, or more."""
        return max(0, length // self.page_size - rung.pages)

    def codec(self, page: int, length: int) -> int:
        """Index of the codec of page number `page` of a sequence of `length` tokens."""
        for rung in self.rungs:
            if page < self.border(rung, length):
                return rung.codec
        return 0


def make_ladder(
    codec: str, page_size: int, possible: Collection[str], *, recent_tokens: int, warm_tokens: int
) -> Ladder:
    """The ladder of one layer group.

    Args:
        codec: A codec, or "auto".
        page_size: Tokens per page.
        possible: Codecs that the group's pages can have. "auto" leaves the others out.
        recent_tokens: Tokens at the end of a sequence whose pages stay raw.
        warm_tokens: Tokens before these that "auto" gives eight bits.
    """
    if codec != AUTO:
        return Ladder([(recent_tokens, codec)] if codec != "raw" else [], page_size)
    distances = (recent_tokens, recent_tokens + warm_tokens)
    rungs = zip(distances, AUTO_CODECS, strict=True)
    return Ladder([(tokens, name) for tokens, name in rungs if name in possible], page_size)
