"""Free extents of an arena: two-level segregated fit, in constant time.

After Masmano et al., "TLSF: a new dynamic memory allocator for real-time systems" (ECRTS 2004):
free extents are binned by size, eight bins to a power of two; a request takes an extent of the
first bin whose extents all suffice, gives back what is left over, and freed neighbours are merged
at once.
"""

from __future__ import annotations

_BITS = 3  # eight bins to a power of two
_TRIES = 8  # extents of a request's own bin that are looked at where no larger bin has any


class Extents:
    """Free pages of a range.

    Args:
        pages: Their number.

    Attributes:
        free_pages: How many are free.
    """

    def __init__(self, pages: int) -> None:
        self.free_pages = 0
        self._sizes: dict[int, int] = {}  # by first page
        self._starts: dict[int, int] = {}  # by the page behind the last
        self._bins: dict[int, dict[int, None]] = {}
        self._filled = 0  # bit i: bin i has extents
        self._add(0, pages)

    def take(self, pages: int) -> int | None:
        """The first of so many neighbouring pages, or None where there are not as many."""
        first = self._find(pages)
        if first is None:
            return None
        size = self._remove(first)
        if size > pages:
            self._add(first + pages, size - pages)
        return first

    def give_back(self, first: int, pages: int) -> None:
        """Frees pages."""
        before = self._starts.get(first)
        if before is not None:
            pages += self._remove(before)
            first = before
        if first + pages in self._sizes:
            pages += self._remove(first + pages)
        self._add(first, pages)

    def _find(self, pages: int) -> int | None:
        own = _bin(pages)
        least = own if _least(own) >= pages else own + 1
        larger = self._filled >> least
        if larger:
            enough = self._bins[least + (larger & -larger).bit_length() - 1]
            return next(reversed(enough))
        for first, _ in zip(reversed(self._bins.get(own, {})), range(_TRIES), strict=False):
            if self._sizes[first] >= pages:
                return first
        return None

    def _add(self, first: int, pages: int) -> None:
        number = _bin(pages)
        self._sizes[first] = pages
        self._starts[first + pages] = first
        self._bins.setdefault(number, {})[first] = None
        self._filled |= 1 << number
        self.free_pages += pages

    def _remove(self, first: int) -> int:
        pages = self._sizes.pop(first)
        del self._starts[first + pages]
        number = _bin(pages)
        extents = self._bins[number]
        del extents[first]
        if not extents:
            self._filled &= ~(1 << number)
        self.free_pages -= pages
        return pages


def _bin(pages: int) -> int:
    """The bin of extents of a size."""
    if pages < 1 << _BITS:
        return pages
    power = pages.bit_length() - 1 - _BITS
    return (power + 1 << _BITS) + (pages >> power) - (1 << _BITS)


def _least(number: int) -> int:
    """The smallest size of a bin."""
    if number < 1 << _BITS:
        return number
    power, step = divmod(number, 1 << _BITS)
    return (1 << _BITS) + step << power - 1
