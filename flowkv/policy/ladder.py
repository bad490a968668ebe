"""How old a page must be to be encoded, and how: hot, warm and cold by distance from the end.

The last tokens of a sequence get most of its attention, so that errors in them cost most, and they
are few (the residual window of Liu et al., KIVI, arXiv 2402.02750). A ladder keeps them raw and
encodes what lies further back, the further the smaller. A page only ever climbs down.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from flowkv.core.config import AUTO
from flowkv.core.errors import ConfigError
from flowkv.core.layout import CODECS

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
