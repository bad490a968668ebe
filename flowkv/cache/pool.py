"""The page pool of one device: one arena cut into slabs, reference counts, defragmentation.

A *slab* holds pages of one size; an empty slab may take another size (Bonwick, USENIX '94). A page
id holds the granule (4 KiB) at which the page begins and, in the bits above, its codec
(`core.geometry`): pages of all sizes and codecs share an arena, and an id suffices to read a page.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch

from flowkv import kernels
from flowkv.cache.index import Block, SwappedCopy, frame_infos
from flowkv.core.config import AUTO, Config, format_size
from flowkv.core.errors import CapacityError, ConfigError, StateError
from flowkv.core.geometry import (
    CODEC_SHIFT,
    CODECS,
    GRANULE_BYTES,
    GRANULE_MASK,
    Geometry,
    LayerGroup,
    PageLayout,
    page_layout,
)
from flowkv.core.memory import own_memory, populate
from flowkv.core.reaper import begin
from flowkv.kernels.operands import sent
from flowkv.policy.pages import Ladder, Occupancy, make_ladder
from flowkv.tiers.base import FrameInfo

if TYPE_CHECKING:
    from flowkv.cache.pinned import Copies


# Slabs of a page pool: places for pages of one size, and plans that empty sparse slabs.


class Slab:
    """Places for pages of one size, granules [first, first + pages * granules).

    Attributes:
        first: Granule at which the slab begins.
        granules: Size of each page.
        pages: Number of places.
        free: Granules at which the free places begin.
    """

    __slots__ = ("first", "free", "granules", "pages")

    def __init__(self, first: int, granules: int, pages: int) -> None:
        self.first, self.granules, self.pages = first, granules, pages
        self.free = [first + i * granules for i in range(pages - 1, -1, -1)]

    @property
    def used(self) -> int:
        """Return the number of pages in use."""
        return self.pages - len(self.free)

    def occupied(self) -> list[int]:
        """Return the granules at which the pages in use begin."""
        free = set(self.free)
        every = range(self.first, self.first + self.pages * self.granules, self.granules)
        return [granule for granule in every if granule not in free]


class Drain(NamedTuple):
    """A plan to empty one slab.

    Attributes:
        granules: Number of granules to copy.
        holes: (granule at which a page begins, granule of a hole of its size) for all its pages.
    """

    granules: int
    holes: list[tuple[int, int]]


def drain_sparse(slabs: Iterable[Slab], stay: Set[int]) -> Iterator[Drain]:
    """Yield plans that empty the sparsest slabs into the fullest ones, sparsest first.

    Any number of the plans, from the first on, can be carried out.

    Args:
        slabs: Partly used slabs of one size.
        stay: Granules of pages that must not move. A slab with such a page is not emptied.
    """
    ordered = sorted(slabs, key=lambda slab: slab.used)
    holes = [hole for slab in reversed(ordered) for hole in slab.free]
    start, stop = 0, len(holes)
    for slab in ordered:
        pages = slab.occupied()
        stop -= len(slab.free)  # the slab's own holes are the last ones
        if start + len(pages) > stop:
            return  # all others are fuller still
        if stay.isdisjoint(pages):
            yield Drain(
                len(pages) * slab.granules, list(zip(pages, holes[start:stop], strict=False))
            )
            start += len(pages)


_SLAB_PAGES = 16


class PagePool:
    """Allocator of shared pages in one device's arena. Callers hold the KV lock.

    Args:
        device: Device of the arena.
        capacity_bytes: Size of the arena; rounded down to whole slabs.
        page_granules: Sizes of the pages to hold; slabs take 16 of the largest.
        least_slabs: Slabs that a small pool is cut into, which then take fewer pages. Each size in
            use occupies at least one.

    Attributes:
        allocated: Granules that were allocated so far.
        copies: Copies between pages and pinned memory, where the device is not the CPU.
        lent: Pages that transfers use, and how often; they neither move nor become free.

    Raises:
        CapacityError: Not even two slabs fit, or more bytes than page ids can name.
    """

    def __init__(
        self, device: torch.device | str, capacity_bytes: int, page_granules: Sequence[int],
        least_slabs: int = 4,
    ) -> None:  # fmt: skip
        self.device = torch.device(device)
        largest = max(page_granules)
        total = capacity_bytes // GRANULE_BYTES
        pages = max(1, min(_SLAB_PAGES, total // (least_slabs * largest)))
        self.slab_granules = pages * largest
        count = total // self.slab_granules
        if count < 2:
            raise CapacityError(
                f"a pool of {format_size(capacity_bytes)} on {self.device} holds {count} slabs of "
                f"{format_size(self.slab_granules * GRANULE_BYTES)}",
                f"Give it at least {format_size(2 * largest * GRANULE_BYTES)}",
            )
        self.capacity_granules = count * self.slab_granules
        if self.capacity_granules > GRANULE_MASK + 1:
            most = format_size((GRANULE_MASK + 1) * GRANULE_BYTES)
            raise CapacityError(
                f"a pool of {format_size(capacity_bytes)} on {self.device} exceeds the page ids",
                f"Give it at most {most}",
            )
        self.arena = _arena(self.device, self.capacity_granules * GRANULE_BYTES)
        self._sizes = frozenset(page_granules)
        self._slabs: list[Slab | None] = [None] * count
        self._free_slabs = list(range(count - 1, -1, -1))
        self._partial: dict[int, dict[int, None]] = {}
        self._vacant: dict[int, int] = {}  # free pages of partial slabs, by size
        self._refs: dict[int, int] = {}
        self.lent: dict[int, int] = {}
        self._awaited = set[int]()
        self.used_granules = self._touched = self.allocated = 0
        self.copies: Copies | None = None
        self._touch(0)

    # ---- pages in use and free

    @property
    def slabs(self) -> int:
        """Return the number of slabs."""
        return len(self._slabs)

    def used_bytes(self) -> int:
        """Return the bytes of the pages in use."""
        return self.used_granules * GRANULE_BYTES

    def capacity_bytes(self) -> int:
        """Return the bytes of the arena."""
        return self.capacity_granules * GRANULE_BYTES

    def available(self, granules: int) -> int:
        """Return the number of pages of a size that `allocate` can still give."""
        fresh = len(self._free_slabs) * (self.slab_granules // granules)
        return self._vacant.get(granules, 0) + fresh

    def references(self, page: int) -> int:
        """Return the number of references to a page; 0 when it is free."""
        return self._refs.get(page, 0)

    def live(self) -> Iterable[int]:
        """Return the ids of the pages in use."""
        return self._refs.keys()

    def bytes_by_codec(self) -> dict[str, int]:
        """Return the bytes of the pages in use, by codec name."""
        found = Counter[str]()
        for page in self._refs:
            found[CODECS[page >> CODEC_SHIFT]] += self.size_bytes(page)
        return dict(found)

    def size_bytes(self, page: int) -> int:
        """Return the bytes of a page in use."""
        return self._size(page) * GRANULE_BYTES

    # ---- allocation and release

    def allocate(self, granules: int, count: int, codec: int = 0) -> list[int] | None:
        """Allocate pages with one reference each; None, and nothing changed, if they do not fit.

        Args:
            granules: Size of each page.
            count: Number of pages.
            codec: Index of their codec, which becomes part of their ids.
        """
        if count > self.available(granules):
            return None
        if self.copies is not None:
            self.copies.reuse()
        taken: list[int] = []
        partial = self._partial.setdefault(granules, {})
        while len(taken) < count:
            if not partial:
                number = self._free_slabs.pop()
                self._touch(number * self.slab_granules * GRANULE_BYTES)
                first, pages = number * self.slab_granules, self.slab_granules // granules
                self._slabs[number] = Slab(first, granules, pages)
                partial[number] = None
                self._change(granules, pages)
            number = next(reversed(partial))
            free = (self._slabs[number] or self._slab(number)).free
            while free and len(taken) < count:
                taken.append(free.pop())
            if not free:
                del partial[number]
        if codec:
            taken = [codec << CODEC_SHIFT | granule for granule in taken]
        self._refs |= dict.fromkeys(taken, 1)
        self._change(granules, -count)
        self.used_granules += granules * count
        self.allocated += granules * count
        return taken

    def share(self, *pages: int) -> None:
        """Add a reference to pages in use."""
        for page in pages:
            self._refs[page] += 1

    def release(self, *pages: int) -> bool:
        """Drop a reference to pages; return True if that freed all of them.

        Raises:
            StateError: A page is not in use.
        """
        freed = list[int]()
        for page in pages:
            count = self._refs.get(page, 0)
            if count == 0:
                raise StateError(f"page {page} is released but not in use", "Report this as a bug")
            if count > 1:
                self._refs[page] = count - 1
            else:
                del self._refs[page]
                freed.append(page & GRANULE_MASK)
        if freed:
            self._vacate(*freed)
        return len(freed) == len(pages)

    def lend(self, *pages: int) -> None:
        """Lend pages to a transfer: they neither move nor become free until `give_back`."""
        self.share(*pages)
        for page in pages:
            self.lent[page] = self.lent.get(page, 0) + 1

    def give_back(self, *pages: int, release: bool = True) -> None:
        """End one `lend` of pages.

        Args:
            pages: Pages of which a transfer is over.
            release: Drop the references of the loan, too; otherwise they pass to the caller.
        """
        for page in pages:
            self.lent[page] -= 1
            if not self.lent[page]:
                del self.lent[page]
                self._awaited.discard(page)
        if release:
            self.release(*pages)

    def awaits(self, *pages: int, awaited: bool) -> None:
        """Mark lent pages as awaited by a sequence, thus not leaving; or end that."""
        (self._awaited.update if awaited else self._awaited.difference_update)(pages)

    def leaving(self) -> int:
        """Return how many pages become free once transfers give them back."""
        return sum(self._refs[page] == 1 for page in self.lent.keys() - self._awaited)

    def replace(self, old: int, new: int) -> None:
        """Move all references of page `old` to the just allocated page `new`, and free `old`.

        The caller rewrites everything that names the old page.
        """
        self._refs[new] = self._refs.pop(old)
        self._vacate(old & GRANULE_MASK)

    def _vacate(self, *granules: int) -> None:
        if self.copies is not None:
            self.copies.free(*granules)
        for granule in granules:
            number = granule // self.slab_granules
            slab = self._slabs[number] or self._slab(number)
            slab.free.append(granule)
            self.used_granules -= slab.granules
            self._vacant[slab.granules] = self._vacant.get(slab.granules, 0) + 1  # without a call
            partial = self._partial.setdefault(slab.granules, {})
            if len(slab.free) < slab.pages:
                partial[number] = None
            else:
                partial.pop(number, None)
                self._change(slab.granules, -slab.pages)
                self._slabs[number] = None
                self._free_slabs.append(number)

    def _touch(self, used_bytes: int) -> None:
        """Start a thread that touches memory ahead of the used slabs, which are taken in order."""
        size = self.capacity_bytes()
        ahead = min(_AHEAD_BYTES, size // _AHEAD_SHARE // GRANULE_BYTES * GRANULE_BYTES)
        if self.device.type == "cpu" and used_bytes + ahead // 2 >= self._touched < size:
            first, self._touched = self._touched, min(used_bytes + ahead, size)
            part = self.arena.data_ptr() + first, self._touched - first
            wait_s = _TOUCH_LATER_S if first else 0.0
            # without such a thread, the first write waits
            begin(_first_touch, weakref.ref(self.arena), *part, wait_s, name="flowkv-memory")

    def _change(self, granules: int, pages: int) -> None:
        self._vacant[granules] = self._vacant.get(granules, 0) + pages

    # ---- defragmentation

    def fragmentation(self) -> float:
        """Return the unused share of the bytes in occupied slabs, 0 to 1."""
        occupied = (len(self._slabs) - len(self._free_slabs)) * self.slab_granules
        return 1.0 - self.used_granules / occupied if occupied else 0.0

    def occupancy(self) -> Occupancy:
        """Return the pool's occupancy, the input of the defragmentation policy."""
        reclaimable = sum(
            vacant // (self.slab_granules // granules) for granules, vacant in self._vacant.items()
        )
        return Occupancy(
            slabs=len(self._slabs),
            empty=len(self._free_slabs),
            reclaimable=reclaimable,
            sizes=len(self._sizes | self._vacant.keys()),
            fragmentation=self.fragmentation(),
        )

    def plan_defragmentation(
        self, fixed: Collection[int] = (), *, most_granules: int | None = None,
        most_slabs: int | None = None, wanted: int = 0, least_gain: float = 1.0,
    ) -> dict[int, int]:  # fmt: skip
        """Plan moves (old page -> new page) that empty sparse slabs into fuller ones of their size.

        Args:
            fixed: Pages that are being read or written. Slabs with such a page stay.
            most_granules: Most granules to copy, but at least one page: the last slab may be
                emptied in part, and the next plan continues with it.
            most_slabs: Most slabs to empty.
            wanted: Size of the pages that need room; slabs of this size, with holes for them, stay.
            least_gain: Least number of granules emptied per granule copied.
        """
        stay = {page & GRANULE_MASK for page in fixed}
        drains = [
            drain
            for granules, partial in self._partial.items()
            if granules != wanted
            for drain in drain_sparse((self._slab(number) for number in partial), stay)
        ]
        # Sorting is stable: slabs of one size stay in the order in which holes were assigned.
        drains.sort(key=lambda drain: drain.granules)
        left = self.used_granules if most_granules is None else most_granules
        moves: dict[int, int] = {}
        for drain in drains[:most_slabs]:
            if drain.granules * least_gain > self.slab_granules:
                break
            each = drain.granules // len(drain.holes)
            part = max(left // each, 0 if moves else 1)
            for granule, hole in drain.holes[:part]:
                page = self._name(granule)
                moves[page] = page - granule + hole
            left -= drain.granules
            if left <= 0:
                break
        return moves

    def _name(self, granule: int) -> int:
        """Return the id of the page in use that begins at a granule."""
        for codec in range(len(CODECS)):
            if (page := codec << CODEC_SHIFT | granule) in self._refs:
                return page
        raise StateError(f"granule {granule} has no page", "Report this as a bug")

    def relocate(self, moves: Mapping[int, int]) -> None:
        """Copy pages (old -> new) into holes of their size, and free their old places.

        The new ids include the codec of their page. The caller rewrites every table that names a
        moved page.
        """
        by_size: dict[int, list[int]] = {}
        for old in moves:
            by_size.setdefault(self._size(old), []).append(old)
        for granules, pages in by_size.items():
            self.copy(pages, [moves[page] for page in pages], granules)
        for new in moves.values():  # all targets first, so that no slab becomes empty meanwhile
            self._occupy(new & GRANULE_MASK)
        for old, new in moves.items():
            self.replace(old, new)
        self._avoid({(page & GRANULE_MASK) // self.slab_granules for page in moves})

    def _avoid(self, left: set[int]) -> None:
        """Order partly emptied slabs last for allocation, so that they can be emptied whole."""
        for granules, partial in self._partial.items():
            draining = [number for number in partial if number in left]
            if draining:
                rest = (number for number in partial if number not in left)
                self._partial[granules] = dict.fromkeys((*draining, *rest))

    def copy(self, source: Sequence[int], target: Sequence[int], granules: int) -> None:
        """Copy pages onto others of their size, in the order of all streams' work on them."""
        if self.copies is not None:
            self.copies.streams.use(behind=True)
        kernels.copy_pages(self.arena, self.granules(source), self.granules(target), granules)
        if self.copies is not None:
            self.copies.free()

    def _occupy(self, granule: int) -> None:
        number = granule // self.slab_granules
        slab = self._slab(number)
        slab.free.remove(granule)
        self._change(slab.granules, -1)
        self.used_granules += slab.granules
        if not slab.free:
            self._partial[slab.granules].pop(number, None)

    # ---- bytes

    def page_bytes(self, page: int, n_bytes: int) -> torch.Tensor:
        """Return a view of a page's memory, uint8 `[n_bytes]`, as `granules` orders it."""
        if self.copies is not None:
            self.copies.join()
        first = (page & GRANULE_MASK) * GRANULE_BYTES
        return self.arena[first : first + n_bytes]

    def granules(self, pages: Sequence[int]) -> torch.Tensor:
        """Return the first granule of each page, int32 on the device, as kernels take them.

        Work queued from now on sees the copies to pages, also those begun on another stream.
        """
        if self.copies is not None:
            self.copies.join()
        granules = [page & GRANULE_MASK for page in pages]
        return sent(torch.tensor(granules, dtype=torch.int32, device="cpu"), self.device)

    @contextmanager
    def encoding(self, targets: Sequence[int]) -> Iterator[None]:
        """Queue work on pages beside the caller's stream, behind its work so far.

        All its pages stay lent until the host has seen the end of the work.

        Args:
            targets: Pages that are written; released if the block raises.
        """
        try:
            if self.copies is not None:  # queued copies to pages begin behind the caller's work
                self.copies.join()
            with self.copies.streams.encoding(self.arena) if self.copies else nullcontext():
                yield
        except BaseException:
            self.release(*targets)
            raise

    def _slab(self, number: int) -> Slab:
        slab = self._slabs[number]
        if slab is None:
            raise StateError(f"slab {number} is empty", "Report this as a bug")
        return slab

    def _size(self, page: int) -> int:
        return self._slab((page & GRANULE_MASK) // self.slab_granules).granules


@torch.inference_mode(False)  # or no later write outside inference mode could reach the pages
def _arena(device: torch.device, n_bytes: int) -> torch.Tensor:
    if device.type != "cpu":
        return torch.empty(n_bytes, dtype=torch.uint8, device=device)
    try:
        arena = own_memory(n_bytes)
    except (OSError, MemoryError) as error:
        raise CapacityError(
            f"the device pool cannot allocate {format_size(n_bytes)} of memory in this process",
            "Make the pool smaller (gpu=...), or raise the limit (ulimit -v)",
        ) from error
    return torch.frombuffer(arena, dtype=torch.uint8)


# Restores and prefills would wait for memory that is written for the first time (`populate`).
_AHEAD_BYTES, _AHEAD_SHARE = 1 << 29, 4
"""Bytes of a pool touched ahead of the used ones, and their limit, one part in 4 of the pool."""
_TOUCH_LATER_S = 0.5
"""Delay of later touches, so that they do not slow the restore that used up the memory."""


def _first_touch(
    arena: weakref.ref[torch.Tensor], address: int, n_bytes: int, wait_s: float
) -> None:
    """Commit memory of an arena after a delay.

    A tensor that this thread frees at the interpreter's end would abort the process.
    """
    time.sleep(wait_s)
    if arena() is not None:
        populate(address, n_bytes)


# The codecs that the pages of a layer group may have, and the layout of each.


class Forms:
    """Codecs and layouts of one layer group's pages.

    Args:
        group: The layer group.
        page_size: Tokens per page.
        config: The codec, and the number of last tokens of a sequence that stay raw.

    Raises:
        ConfigError: The group's pages cannot have the codec.

    Attributes:
        ladder: Schedule of codecs by a page's distance from the end of its sequence.
        layouts: Layouts by codec index, least lossy first; raw is always among them.
        fingerprints: Fingerprints of the layouts, stored as they take time to compute.
        whole: Whether a prompt needs all of its pages (no sliding window).
    """

    def __init__(self, group: LayerGroup, page_size: int, config: Config) -> None:
        self._group, self._page_size, self.whole = group, page_size, group.window is None
        possible = [codec for codec in CODECS if self._possible(codec, config)]
        self.ladder: Ladder = make_ladder(
            config.codec if possible else "raw",  # keys alone stay raw
            page_size,
            possible,
            recent_tokens=config.raw_tokens,
            warm_tokens=config.warm_tokens,
        )
        self.layouts: dict[int, PageLayout] = {}
        self.fingerprints: dict[int, bytes] = {}
        for codec in self.ladder.codecs:
            self._add(codec)

    def _possible(self, codec: str, config: Config) -> bool:
        try:
            page_layout(self._group, self._page_size, codec)
        except ConfigError:
            if codec == config.codec and self._group.kind != "keys":
                raise
            return False
        return config.codec in (codec, AUTO)

    def _add(self, codec: int) -> None:
        self.layouts[codec] = page_layout(self._group, self._page_size, CODECS[codec])
        self.layouts = dict(sorted(self.layouts.items()))
        self.fingerprints[codec] = self.layouts[codec].fingerprint()

    @property
    def raw(self) -> PageLayout:
        """Return the layout of open pages."""
        return self.layouts[0]

    @property
    def sealed(self) -> tuple[PageLayout, ...]:
        """Return the layouts of all codecs but raw."""
        return tuple(layout for codec, layout in self.layouts.items() if codec)

    @property
    def likely(self) -> tuple[int, ...]:
        """Return the codec indices, the likeliest codec of other caches' frames first."""
        return tuple(sorted(self.layouts, key=lambda codec: codec != self.ladder.idle))

    @property
    def likely_bytes(self) -> int:
        """Return the bytes of a page in the codec that it has below its device, most likely."""
        return self.layouts[self.ladder.idle].page_bytes

    def layout(self, page: int) -> PageLayout:
        """Return the layout of a page, from the codec in its id."""
        return self.layouts[page >> CODEC_SHIFT]

    def describe(self, blocks: Sequence[Block]) -> list[FrameInfo]:
        """Return the frame headers of the device pages of blocks, all of one codec."""
        layout, codec = self.layout(blocks[0].page), blocks[0].page >> CODEC_SHIFT
        form = self.fingerprints[codec], layout.page_size, layout.stripe_stride_bytes, codec
        return frame_infos(blocks, *form)

    def views(self, page: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of a raw page's first tokens, views `[layers, heads, count, dim]`.

        Args:
            page: The page in any memory, uint8 `[page_bytes]`.
            count: Number of tokens.
        """
        layout, cells = self.raw, page.view(getattr(torch, self.raw.dtype))
        steps = layout.stripe_stride_bytes, layout.run_bytes, layout.v_offset_bytes
        stripe, run, v = (n_bytes // cells.element_size() for n_bytes in steps)

        def view(dim: int, stride: int, offset: int) -> torch.Tensor:
            size, strides = (layout.layers, layout.kv_heads, count, dim), (stripe, run, stride, 1)
            return cells.as_strided(size, strides, cells.storage_offset() + offset)

        keys = view(layout.head_dim, layout.head_dim, 0)
        return keys, view(layout.value_dim, layout.value_stride, v)

    def meet(self, info: FrameInfo) -> None:
        """Add the codec of a stored page that another ladder encoded, if it is readable here."""
        if info.kind != "page" or info.codec in self.layouts or info.codec >= len(CODECS):
            return
        try:
            layout = page_layout(self._group, self._page_size, CODECS[info.codec])
        except ConfigError:
            return
        if layout.fingerprint() == info.layout:
            self._add(info.codec)


def make_forms(geometry: Geometry, config: Config) -> list[Forms]:
    """Return the forms of every layer group's pages.

    Raises:
        ConfigError: A group's pages cannot have the codec.
    """
    return [Forms(group, geometry.page_size, config) for group in geometry.groups]


# Pages in host memory, such as those of suspended sequences.

AT_ONCE_BYTES = 1 << 26
"""Most bytes of pages in one transfer, which takes as much again of a full device's memory."""


def download(pool: PagePool, pages: list[int], n_bytes: int) -> list[torch.Tensor]:
    """Return host copies of pages of `n_bytes` each, made in as few transfers as possible."""
    if pool.copies is not None:  # another thread's stream may still compute them
        pool.copies.streams.use(behind=True)
    copies: list[torch.Tensor] = []
    for part in _parts(len(pages), n_bytes):
        some = [pool.page_bytes(page, n_bytes) for page in pages[part]]
        if len(some) == 1:  # no stacked copy: a full device may have no memory for one
            copies.append(some[0].to("cpu", copy=True))
        else:
            copies += torch.stack(some).to("cpu")
    return copies


class SwappedCopies(dict[Block, SwappedCopy]):
    """Pages on their device that suspended sequences need as they are. Callers hold the KV lock.

    Args:
        pools: The page pool of each group.
        forms: The page forms of each group.
    """

    def __init__(self, pools: Sequence[PagePool], forms: Sequence[Forms]) -> None:
        super().__init__()
        self._pools, self._forms = pools, forms

    def add_user(self, block: Block) -> SwappedCopy:
        """Return the copy that restores a block's page, with one more suspended user."""
        copy = self.get(block)
        if copy is None:
            copy = self[block] = SwappedCopy(block)
        copy.users += 1
        return copy

    def remove_user(self, copy: SwappedCopy) -> bool:
        """Remove one user from a swapped copy; return whether it was the last."""
        copy.users -= 1
        if not copy.users and copy.content is None:
            del self[copy.block]
        return not copy.users

    def copy_out(self, block: Block) -> None:
        """Copy the page of a block to host memory before it changes or goes, if it is one of these.

        The page is not among them any more.
        """
        if (copy := self.get(block)) is not None:
            n_bytes = self._forms[block.group].layouts[copy.codec].page_bytes
            copy.content = download(self._pools[block.group], [block.page], n_bytes)[0]
            del self[block]


def upload(pool: PagePool, pages: list[int], contents: list[torch.Tensor]) -> None:
    """Write host copies, as `download` returns them, into pages of the same codec."""
    n_bytes = contents[0].numel()
    for part in _parts(len(pages), n_bytes):
        some: Iterable[torch.Tensor] = contents[part]
        if pool.device.type != "cpu":
            some = torch.stack(contents[part]).to(pool.device)
        for page, content in zip(pages[part], some, strict=True):
            pool.page_bytes(page, n_bytes).copy_(content)


def _parts(pages: int, n_bytes: int) -> Iterator[slice]:
    most = max(1, AT_ONCE_BYTES // n_bytes)
    return (slice(first, first + most) for first in range(0, pages, most))
