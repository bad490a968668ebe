"""Slabs of a page pool: places for pages of one size, and how sparse ones can be emptied."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from typing import NamedTuple


class Slab:
    """Places for pages of one size, granules [first, first + pages * granules).

    Attributes:
        first: Granule at which it begins.
        granules: Of each page.
        pages: Places.
        free: Granules at which the free places begin.
    """

    __slots__ = ("first", "free", "granules", "pages")

    def __init__(self, first: int, granules: int, pages: int) -> None:
        self.first, self.granules, self.pages = first, granules, pages
        self.free = [first + i * granules for i in range(pages - 1, -1, -1)]

    @property
    def used(self) -> int:
        """Pages in use."""
        return self.pages - len(self.free)

    def occupied(self) -> list[int]:
        """Granules at which the pages in use begin."""
        free = set(self.free)
        every = range(self.first, self.first + self.pages * self.granules, self.granules)
        return [granule for granule in every if granule not in free]


class Drain(NamedTuple):
    """How one slab can be emptied.

    Attributes:
        granules: To copy.
        holes: (granule at which a page begins, granule of a hole of its size) for all its pages.
    """

    granules: int
    holes: list[tuple[int, int]]


def drain_sparse(slabs: Iterable[Slab], stay: Set[int]) -> Iterator[Drain]:
    """How the sparsest of these slabs can be emptied into the fullest ones, sparsest first.

    Any number of them, from the first on, can be carried out.

    Args:
        slabs: Partly used slabs of one size.
        stay: Granules of pages that must not move. A slab with one of them is not emptied.
    """
    ordered = sorted(slabs, key=lambda slab: slab.used)
    # From both ends, until they meet.
    low, high = 0, len(ordered) - 1
    room = sum(len(slab.free) for slab in ordered)
    holes: list[int] = []
    while low <= high:
        pages, granules = ordered[low].occupied(), ordered[low].granules
        room -= len(ordered[low].free)
        low += 1
        if len(pages) > room:
            return  # all others are fuller still
        if not stay.isdisjoint(pages):
            continue
        while len(holes) < len(pages) and high >= low:
            holes += ordered[high].free
            high -= 1
        if len(holes) < len(pages):
            return
        yield Drain(len(pages) * granules, list(zip(pages, holes, strict=False)))
        del holes[: len(pages)]
        room -= len(pages)
