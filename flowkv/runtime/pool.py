"""The page pool of one device: one arena cut into slabs, reference counts, defragmentation.

A *slab* holds pages of one size; an empty slab may take another size (Bonwick, USENIX '94). A page
is named by the granule (4 KiB) at which it begins, so pages of all sizes and codecs share an arena.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping, Sequence

import torch

from flowkv import kernels
from flowkv.core.errors import CapacityError, StateError
from flowkv.core.layout import GRANULE_BYTES
from flowkv.core.sizes import format_size

_SLAB_PAGES = 16


class _Slab:
    """Pages of one size at [first, first + pages * granules)."""

    __slots__ = ("first", "free", "granules", "pages")

    def __init__(self, first: int, granules: int, pages: int) -> None:
        self.first, self.granules, self.pages = first, granules, pages
        self.free = [first + i * granules for i in range(pages - 1, -1, -1)]

    @property
    def used(self) -> int:
        return self.pages - len(self.free)


class PagePool:
    """Allocates, shares and frees pages of one device's arena. Callers hold the KV lock.

    Args:
        device: Where the arena lies.
        capacity_bytes: Its size; rounded down to whole slabs.
        page_granules: Sizes of the pages it will hold; slabs take at least 16 of the largest.

    Raises:
        CapacityError: Not even two slabs fit.
    """

    def __init__(
        self, device: torch.device | str, capacity_bytes: int, page_granules: Sequence[int]
    ) -> None:
        self.device = torch.device(device)
        largest = max(page_granules)
        total = capacity_bytes // GRANULE_BYTES
        pages = max(1, min(_SLAB_PAGES, total // (4 * largest)))
        self.slab_granules = pages * largest
        count = total // self.slab_granules
        if count < 2:
            raise CapacityError(
                f"a pool of {format_size(capacity_bytes)} on {self.device} holds {count} slabs of "
                f"{format_size(self.slab_granules * GRANULE_BYTES)}",
                f"Give it at least {format_size(2 * largest * GRANULE_BYTES)}",
            )
        self.capacity_granules = count * self.slab_granules
        self.arena = _arena(self.device, self.capacity_granules * GRANULE_BYTES)
        self._slabs: list[_Slab | None] = [None] * count
        self._free_slabs = list(range(count - 1, -1, -1))
        self._partial: dict[int, dict[int, None]] = {}
        self._vacant: dict[int, int] = {}  # free pages of partial slabs, by size
        self._refs: dict[int, int] = {}
        self._used_granules = 0

    # ---- what is there

    def used_bytes(self) -> int:
        """Bytes of the pages in use."""
        return self._used_granules * GRANULE_BYTES

    def capacity_bytes(self) -> int:
        """Bytes of the arena."""
        return self.capacity_granules * GRANULE_BYTES

    def available(self, granules: int) -> int:
        """Pages of this size that `allocate` can still give."""
        fresh = len(self._free_slabs) * (self.slab_granules // granules)
        return self._vacant.get(granules, 0) + fresh

    def references(self, page: int) -> int:
        """How often the page is shared; 0 when it is free."""
        return self._refs.get(page, 0)

    def live(self) -> Iterable[int]:
        """Pages in use."""
        return self._refs.keys()

    # ---- taking and giving back

    def allocate(self, granules: int, count: int) -> list[int] | None:
        """`count` pages with one reference each; None, and nothing changed, if they do not fit."""
        if count > self.available(granules):
            return None
        taken: list[int] = []
        partial = self._partial.setdefault(granules, {})
        while len(taken) < count:
            if not partial:
                number = self._free_slabs.pop()
                first, pages = number * self.slab_granules, self.slab_granules // granules
                self._slabs[number] = _Slab(first, granules, pages)
                partial[number] = None
                self._change(granules, pages)
            number = next(reversed(partial))
            free = self._slab(number).free
            while free and len(taken) < count:
                taken.append(free.pop())
            if not free:
                del partial[number]
        for page in taken:
            self._refs[page] = 1
        self._change(granules, -count)
        self._used_granules += granules * count
        return taken

    def share(self, page: int) -> None:
        """Adds a reference to a page in use."""
        self._refs[page] += 1

    def release(self, page: int) -> bool:
        """Drops a reference; True if that freed the page.

        Raises:
            StateError: The page is not in use.
        """
        count = self._refs.get(page, 0)
        if count == 0:
            raise StateError(f"page {page} is released but not in use", "Report this as a bug")
        if count > 1:
            self._refs[page] = count - 1
            return False
        del self._refs[page]
        number = page // self.slab_granules
        slab = self._slab(number)
        slab.free.append(page)
        self._used_granules -= slab.granules
        self._change(slab.granules, 1)
        partial = self._partial.setdefault(slab.granules, {})
        if slab.used:
            partial[number] = None
        else:
            partial.pop(number, None)
            self._change(slab.granules, -slab.pages)
            self._slabs[number] = None
            self._free_slabs.append(number)
        return True

    def _change(self, granules: int, pages: int) -> None:
        self._vacant[granules] = self._vacant.get(granules, 0) + pages

    # ---- defragmentation

    def fragmentation(self) -> float:
        """Share of the bytes in occupied slabs that no page uses, 0 to 1."""
        occupied = sum(slab is not None for slab in self._slabs) * self.slab_granules
        return 1.0 - self._used_granules / occupied if occupied else 0.0

    def plan_defragmentation(self, movable: Iterable[int]) -> dict[int, int]:
        """Moves (old page -> new page) that empty sparse slabs into fuller ones of their size.

        Args:
            movable: Pages that nobody reads or writes now. A slab with others stays.
        """
        may_move = set(movable)
        moves: dict[int, int] = {}
        for partial in self._partial.values():
            slabs = sorted((self._slab(number) for number in partial), key=lambda slab: slab.used)
            # From both ends: the sparsest slabs move into the fullest ones until they meet.
            low, high = 0, len(slabs) - 1
            room = sum(len(slab.free) for slab in slabs)
            holes: list[int] = []
            while low < high:
                pages = self._pages_of(slabs[low])
                room -= len(slabs[low].free)
                low += 1
                if len(pages) > room:
                    break  # all others are fuller still
                if not may_move.issuperset(pages):
                    continue
                while len(holes) < len(pages) and high >= low:
                    holes += slabs[high].free
                    high -= 1
                if len(holes) < len(pages):
                    break
                moves.update(zip(pages, holes, strict=False))
                del holes[: len(pages)]
                room -= len(pages)
        return moves

    def relocate(self, moves: Mapping[int, int]) -> None:
        """Copies pages as if at once: targets may be sources of other moves, cycles included.

        Every source must be in use; every target must be free or a source, of the same size. The
        caller rewrites every table that names a moved page.

        Raises:
            StateError: A move is not of that form.
        """
        moves = {old: new for old, new in moves.items() if old != new}
        self._check(moves)
        for granules in {self._size(old) for old in moves}:
            self._copy_all({o: n for o, n in moves.items() if self._size(o) == granules}, granules)
        counts = {new: self._refs[old] for old, new in moves.items()}
        for new in counts.keys() - moves.keys():
            self._occupy(new)
        for old in moves.keys() - counts.keys():
            self._refs[old] = 1
            self.release(old)
        self._refs.update(counts)

    def copy(self, source: Sequence[int], target: Sequence[int], granules: int) -> None:
        """Copies pages onto other pages of the same size."""
        kernels.copy_pages(self.arena, self._ids(source), self._ids(target), granules)

    def _copy_all(self, moves: dict[int, int], granules: int) -> None:
        # Chains first, from their free end, so that no source is overwritten before it was read;
        # what is left are cycles, which need one page aside.
        pending, sources = dict(moves), {new: old for old, new in moves.items()}
        order: list[tuple[int, int]] = []
        for end in [new for new in sources if new not in moves]:
            new = end
            while (old := sources.get(new)) is not None and old in pending:
                order.append((old, pending.pop(old)))
                new = old
        for old, new in order:
            self.copy([old], [new], granules)
        n_bytes = granules * GRANULE_BYTES
        while pending:
            start = next(iter(pending))
            aside = self.page_bytes(start, n_bytes).clone()
            new = start
            while (old := sources[new]) != start:
                self.copy([old], [new], granules)
                del pending[old]
                new = old
            self.page_bytes(new, n_bytes).copy_(aside)
            del pending[start]

    def _check(self, moves: Mapping[int, int]) -> None:
        free = {page for slab in self._slabs if slab is not None for page in slab.free}
        targets = set(moves.values())
        known = all(old in self._refs for old in moves)
        vacant = all(new in free or new in moves for new in targets)
        fits = known and vacant and all(self._size(o) == self._size(n) for o, n in moves.items())
        if not fits or len(targets) != len(moves):
            raise StateError(
                "pages cannot be moved that way",
                "Move pages in use onto distinct pages of their size that are free or moved away",
            )

    def _occupy(self, page: int) -> None:
        number = page // self.slab_granules
        slab = self._slab(number)
        slab.free.remove(page)
        self._change(slab.granules, -1)
        self._used_granules += slab.granules
        if not slab.free:
            self._partial[slab.granules].pop(number, None)
        self._refs[page] = 1

    # ---- bytes

    def page_bytes(self, page: int, n_bytes: int) -> torch.Tensor:
        """The page's memory, uint8 `[n_bytes]`, a view."""
        first = page * GRANULE_BYTES
        return self.arena[first : first + n_bytes]

    def _ids(self, pages: Sequence[int]) -> torch.Tensor:
        return torch.tensor(pages, dtype=torch.int32, device=self.device)

    def _slab(self, number: int) -> _Slab:
        slab = self._slabs[number]
        if slab is None:
            raise StateError(f"slab {number} is empty", "Report this as a bug")
        return slab

    def _size(self, page: int) -> int:
        return self._slab(page // self.slab_granules).granules

    def _pages_of(self, slab: _Slab) -> list[int]:
        free = set(slab.free)
        every = range(slab.first, slab.first + slab.pages * slab.granules, slab.granules)
        return [page for page in every if page not in free]


def _arena(device: torch.device, n_bytes: int) -> torch.Tensor:
    if device.type != "cpu":
        return torch.empty(n_bytes, dtype=torch.uint8, device=device)
    # Memory is taken when pages are first written. Private, or the kernel gives no huge pages,
    # which make first writes, copies and registration cheaper.
    memory = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
