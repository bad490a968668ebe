"""Loading of known pages onto their device: single pages, slices of layers, and batches."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, zip_longest
from typing import Any, NamedTuple, cast

import msgspec
import torch

from flowkv import kernels
from flowkv.cache.index import UNKNOWN, Block
from flowkv.cache.mover import IOPriority, TransferRequest
from flowkv.cache.pinned import BATCH_BYTES
from flowkv.cache.pool import Forms, PagePool
from flowkv.cache.sequence import Sequence
from flowkv.cache.store import PageStore
from flowkv.cache.tier_stack import ReadFrom
from flowkv.compiled import compiling
from flowkv.core.errors import NonFiniteError, StateError
from flowkv.core.geometry import CODEC_SHIFT, GRANULE_BYTES, GRANULE_MASK
from flowkv.policy.restore import RestoreLoad
from flowkv.tiers.base import FrameInfo, Load, Outcome, TierAnswer

Allocate = Callable[[int, int, int], list[int] | None]
"""`allocate(group, count, codec)` returns up to `count` private pages, or None."""

_LONGEST_S = 0.1


class PageLoad(msgspec.Struct, eq=False):  # made without a call of Python
    """Load of one page for a sequence, which `several` makes. Callers hold the KV lock.

    The device page is *lent* while the load is under way, so that nothing moves, encodes or frees
    it; a tier that is late with an answer keeps it lent, even after the restore (DESIGN D10).
    Once all stripes are loaded and verified, the page becomes the block's, and others can use it.

    Attributes:
        block: The block to load.
        page_no: Number of the page in the sequence.
        group: Layer group of the page.
        stripes: Layers of the page.
        page: Id of the device page; -1 without one.
        flying: Layers that tiers have not answered.
        held: Whether the block is on its device, and held for the sequence.
        wanted: Whether the load is still wanted; False after `drop`.
        fidelity: Lossiest codec in the lineage of the loaded layers.
        filled: Whether the page was filled from another one.
    """

    block: Block
    page_no: int
    _kept: bool
    _store: PageStore
    _awaited: bool
    _own: bool
    _allocate: Allocate
    group: int
    stripes: int
    _whole: int  # `_came` of a page with all layers
    _forms: Forms
    _pool: PagePool
    page: int = -1
    _lent: int = -1  # id of the lent page
    _came: int = 0
    fidelity: int = 0
    flying: list[LayerSlice] = msgspec.field(default_factory=list)
    held: bool = False
    wanted: bool = True
    filled: bool = False
    _line: Sequence | None = None

    @classmethod
    def several(
        cls, store: PageStore, pages: Iterable[tuple[Block, int]], *, awaited: bool = True,
        allocate: Allocate | None = None, own: bool = False,
    ) -> list[PageLoad]:  # fmt: skip
        """Return loads of blocks for page numbers; blocks on their device are held.

        Args:
            store: Store of the blocks.
            pages: Blocks to load, with the numbers of their pages in the sequence.
            awaited: Whether a sequence waits for them: until they arrive, no tier evicts them, and
                their pages do not count as some that come free.
            allocate: Source of a page of another codec; by default idle ones are evicted.
            own: Whether the content is for this sequence alone, and never becomes the blocks'.
        """
        terms, loads = dict[int, tuple[Any, ...]](), list[PageLoad]()
        for block, page_no in pages:
            if (group := block.group) not in terms:
                forms, pool = store.forms[group], store.pool(group)
                form = group, (layers := forms.layouts[0].layers), (1 << layers) - 1, forms, pool
                terms[group] = store, awaited, own, allocate or store.allocator.spare, *form
            loads.append(cls(block, page_no, awaited and block.page < 0, *terms[group]))
        store.keep(*[one.block for one in loads if one._kept])
        _hold([one for one in loads if one.block.page >= 0])
        return loads

    # ---- loaded layers

    @property
    def codec(self) -> int:
        """Return the codec index of the device page."""
        return self.page >> CODEC_SHIFT

    def there(self, stripe: int) -> bool:
        """Return whether a layer of the page has been loaded."""
        return self.held or bool(self._came >> stripe & 1)

    @property
    def complete(self) -> bool:
        """Return whether every layer of the page has been loaded."""
        return self.held or self._came == self._whole

    # ---- the device page

    def meet(self) -> bool:
        """Hold the block's page if another load has published it; return whether it is held."""
        free = self._line is None and not (self._own or self.flying or self.block.gone)
        if not self.held and free and self.block.page >= 0:
            _hold([self])
            _give_back([self])
        return self.held

    def offers(self, stripe: int, codec: int) -> bool:
        """Return whether another load may copy a layer, which a tier gave in this codec."""
        return not self.filled and self.codec == codec and bool(self._came >> stripe & 1)

    def change(self, codec: int) -> bool:
        """Change to a page of a codec; return False if something depends on the present page."""
        if codec == self.page >> CODEC_SHIFT and self.page >= 0:
            return True
        if self.flying or self._came or self._line is not None:
            return False
        fresh = self._allocate(self.group, 1, codec)
        if not fresh:
            return False
        _give_back([self])
        set_pages([self], fresh)
        return True

    def sources(self, first: int) -> Iterator[ReadFrom]:
        """Yield the places that the page may be read from, best first.

        The device page takes the codec of each; layers loaded before rule out other codecs.

        Args:
            first: Number of the tier to try before the others; -1 for the nearest.
        """
        stack = self._store.stack
        known: Iterable[ReadFrom] = stack.sources(self.block) if not self.block.gone else ()
        if first >= 0:
            known = sorted(known, key=lambda one: one.tier != first)
        for source in known:
            if self.page >= 0 and self.change(source.codec):
                yield source

    def only_source(self, first: int) -> ReadFrom | None:
        """Return the first of the `sources`; None if that may not be it for pages listed alike."""
        before, source = self.block.tiers, next(self.sources(first), None)
        return source if source and source.last and self.block.tiers == before else None

    # ---- publication, release

    def attach_to(self, seq: Sequence) -> None:
        """Enter the page into its sequence's block table; the sequence then releases it."""
        group = self.group
        seq.planner.put(seq, group, self.page_no, self.block.page if self.held else self.page)
        self._line = seq
        if self.held:
            seq.blocks[group][self.page_no] = self.block
            seq.fidelity = max(seq.fidelity, self.block.fidelity)
        else:
            self._pool.share(self.page)
            seq.fidelity = max(seq.fidelity, self.fidelity, self.codec)

    def copy_from(self, source: int) -> None:
        """Fill the page with the content of another page, of any codec.

        Args:
            source: Id of the other page.

        Raises:
            CapacityError: A tier may still write to this page, and there is no other one.
            NonFiniteError: The content cannot be encoded in this page's codec.
            StateError: There is no such page, or this one is in no block table.
        """
        line = self._line
        if line is None or source < 0:
            raise StateError("a page is missing in the other sequence", "Compute all of them")
        pool, forms = self._pool, self._forms
        self.filled = True  # from here on no load copies from it, also if this fails half-way
        if self.flying and pool.copies is None:  # the tier has this very page
            self._swap(line)
        target = self.page
        if source >> CODEC_SHIFT == self.codec:
            pool.copy([source], [target], forms.layout(target).granules)
        else:
            old, new = forms.layout(source), forms.layout(target)
            where = pool.granules([source]), pool.granules([target])
            if kernels.transcode(pool.arena, *where, old, new).any():
                raise NonFiniteError(
                    f"a page cannot be encoded as {new.codec}", "Open the prompt with reuse=False"
                )
        self._came = self._whole

    def _swap(self, line: Sequence) -> None:
        """Leave the page to the late tier that may write to it, and take another one.

        On a CPU, steps under way read the same block table that is written here.
        """
        (fresh,) = self._store.allocator.allocate(self.group, 1, self.codec)
        pool, old = self._pool, self.page
        pool.release(old)  # the line's own reference; the tier's remains until it answers
        line.planner.tables.replace(self.group, line.row, self.page_no, fresh)
        self.page = fresh

    def drop(self) -> None:
        """End the load: release everything that no tier may still write to."""
        if not self.wanted:
            return
        self.wanted = False
        if self.held and self._line is None:
            self._store.drop(self.block)
        _unkeep([self])
        if self._lent >= 0:
            self._pool.awaits(self._lent, awaited=False)
        self.let_go()

    def let_go(self) -> None:
        """Release the page of a dropped load once no tier has an answer left to give."""
        if not self.wanted and not self.flying:
            _give_back([self])


def set_pages(loads: Items[PageLoad], pages: Iterable[int]) -> None:
    """Make private pages, fresh from the pool, the device pages of loads of one group."""
    those = [*zip(loads, pages, strict=False)]
    for one, page in those:
        one.page = one._lent = page
        one._store.coming.setdefault(one.block, []).append(one)
    if those:
        pool, fresh = loads[0]._pool, [page for _, page in those]
        pool.lend(*fresh)
        pool.awaits(*fresh, awaited=loads[0]._awaited)
        pool.release(*fresh)


def _granules(some: Items[LayerSlice]) -> list[int]:
    """Return the granule of a GPU where each slice begins; -1 for layers that nothing lacks."""
    found = [-1] * len(some)
    for n, (one, first, _) in enumerate(some):
        lacks = one.wanted and not one.held and one._came != one._whole
        if lacks and one._pool.copies is not None:
            step = one._forms.layouts[one.page >> CODEC_SHIFT].stripe_stride_bytes
            found[n] = (one.page & GRANULE_MASK) + step * first // GRANULE_BYTES
    return found


def _arrive(some: Items[_Landed]) -> dict[PageLoad, ReadFrom]:
    """Record verified layers that arrived; `launch` starts their copies to the device now.

    Returns:
        Loads with layers that they lacked, with the place that these were read from.
    """
    rows = dict[PagePool, list[tuple[int, torch.Tensor]]]()
    places = _granules([piece for piece, *_ in some])
    for at, (piece, _, buffer, _) in zip(places, some, strict=True):
        if at >= 0 and buffer is not None:
            rows.setdefault(piece.page_load._pool, []).append((at, buffer))
    for pool, those in rows.items():
        if pool.copies is not None:
            pool.copies.upload(those)
    arrived = dict[PageLoad, ReadFrom]()  # once each, though two slices may complete a page
    for (one, first, count), source, _, fidelity in some:
        if one.wanted and not one.held and one._came != one._whole:
            one._came |= ((1 << count) - 1) << first
            one.fidelity = max(one.fidelity, fidelity)
            if one._line is not None:
                one._line.fidelity = max(one._line.fidelity, fidelity)
            arrived[one] = source
    return arrived


def _enter(loads: Mapping[PageLoad, ReadFrom]) -> list[PageLoad]:
    """Make complete pages their blocks', unless these have others; return their loads.

    The references of the pages' loans are the blocks' from then on.
    """
    entered = list[PageLoad]()
    for one, source in loads.items():
        block, line, codec, page_no = one.block, one._line, one.page >> CODEC_SHIFT, one.page_no
        if one._came != one._whole or one.held or block.gone or one._own:
            continue
        if line is not None and line.planner.tables.pages[one.group][line.row, page_no] != one.page:
            line = one._line = None  # a step went on without the page, past its window
        if block.page >= 0:
            if line is None:  # our own page is unused
                _hold([one])
                if copies := one._pool.copies:
                    copies.launch()  # no copy may be on its way to a page that becomes free
                _give_back([one])
            continue
        block.fidelity, block.page = max(one.fidelity, codec), one.page
        if block.tiers >> source.tier & 1:
            block.codecs &= ~(UNKNOWN << 4 * source.tier)
            block.codecs |= codec << 4 * source.tier
        if one._store.samples.share:
            one._store.samples.came(block.key, one._store.stack.tiers[source.tier].name)
        if line is not None:
            line.blocks[one.group][page_no] = block
            one._pool.release(one.page)  # the line's own reference
        entered.append(one)
    return entered


def _hold(loads: Items[PageLoad]) -> None:
    for one in loads:
        one.held = True
    if loads:
        loads[0]._store.hold(*[one.block for one in loads])
        _unkeep(loads)


def _unkeep(loads: Items[PageLoad]) -> None:
    kept = [one for one in loads if one._kept]
    for one in kept:
        one._kept = False
    if kept:
        kept[0]._store.unkeep(*[one.block for one in kept])


def _give_back(loads: Iterable[PageLoad], release: bool = True) -> None:
    pages = dict[PagePool, list[int]]()
    for one in loads:
        if one._lent >= 0:
            pages.setdefault(one._pool, []).append(one._lent)
            one._lent, coming = -1, one._store.coming
            coming[one.block].remove(one)
            if not coming[one.block]:
                del coming[one.block]
    for pool, those in pages.items():
        pool.give_back(*those, release=release)


# All loads of pages: for a restore's plan, for a caller that waits at once, and for prefetches. A
# batch of loads gets many answers from tiers.


class LayerSlice(NamedTuple):
    """Consecutive layers of a page.

    Attributes:
        page_load: Load of the page.
        first: First layer, within its group.
        stripes: Number of layers.
    """

    page_load: PageLoad
    first: int
    stripes: int


_Landed = tuple[LayerSlice, ReadFrom, torch.Tensor | None, int]
"""Layers that arrived, the place that they were read from, their bytes (None if these are on the
device), and their fidelity."""


@dataclass(slots=True, eq=False, repr=False)
class LoadBatch:
    """Slices of pages that are loaded together.

    Args:
        owner: Owner for `cancel`; batches of one owner are cancelled together.
        done: Called when all slices are answered.
        op: Load of the restore policy's plan; None without one.
        tier: Name of the tier in that plan.
        priority: Priority of the transfers. A prefetch has no deadline.

    Attributes:
        started_s: Start of the batch, by `time.perf_counter`.
        ended_s: Time of its last answer, as the tier reports it.
        end_s: Deadline of the batch, by `compiling.now_s`.
        left: Number of missing answers.
        n_bytes: Bytes loaded, by number of the tier.
        joined: Bytes of them that another load had requested, too.
        pages: Pages that a tier completed, by its number and layer group.
        lost: Whether a slice cannot be loaded.
        refused: Whether there was no room for a prefetch.
        called_off: Whether it was cancelled; `done` is then not called.
        trips: Requests under way, each with its bytes.
        fresh: Published blocks, to be inserted into policies together; None inserts each at once.
        prefer: Number of the tier to try first; -1 for the nearest of each page.
    """

    owner: object
    done: Callable[[LoadBatch], None]
    op: RestoreLoad | None = None
    tier: str = ""
    priority: IOPriority = IOPriority.DEMAND
    started_s: float = field(default_factory=time.perf_counter)
    ended_s: float = field(default_factory=time.perf_counter)
    end_s: float = field(default_factory=compiling.now_s)
    left: int = 1
    n_bytes: Counter[int] = field(default_factory=Counter)
    joined: Counter[int] = field(default_factory=Counter)
    pages: Counter[tuple[int, int]] = field(default_factory=Counter)
    lost: bool = False
    refused: bool = False
    called_off: bool = False
    trips: dict[_Trip, int] = field(default_factory=dict)
    fresh: list[Block] | None = None
    prefer: int = -1


class _Trip(msgspec.Struct, eq=False):
    """A request to one tier, with the sources to try next; by default those of other tiers."""

    flight: LoadBatch
    piece: LayerSlice
    source: ReadFrom
    buffer: torch.Tensor
    sources: Iterator[ReadFrom] | None = None
    asked_s: float = msgspec.field(default_factory=time.perf_counter)
    given_up: bool = False
    joined: bool = False
    request: TransferRequest | None = None


_Answers = list[tuple[_Trip, TierAnswer]]
_Check = tuple[Items[_Trip], Callable[[], list[bool]]]
"""Trips with layers on their way to a device, and the call that waits for them and checks them."""


class PageLoader:
    """All loads of pages of a cache. Callers hold the KV lock.

    Args:
        store: Store of the pages.
    """

    def __init__(self, store: PageStore) -> None:
        self._store = store
        self._flights: dict[LoadBatch, None] = {}
        self._checks = deque[tuple[Items[_Trip], _Answers, _Answers, list[_Check]]]()
        self._unread = _Answers()  # answers of one page each, to be checked together

    def __len__(self) -> int:
        return len(self._flights)

    def flying_bytes(self, tier: str) -> int:
        """Return the unanswered bytes of the batches that the restore policy sent to a tier."""
        return sum(sum(f.trips.values()) for f in self._flights if f.tier == tier)

    def in_flight(self, owner: object) -> int:
        """Return the number of an owner's batches under way."""
        return sum(flight.owner is owner for flight in self._flights)

    def busy_tiers(self) -> set[int]:
        """Return the numbers of the tiers with loads under way."""
        return {trip.source.tier for flight in self._flights for trip in flight.trips}

    def load_pages(self, loads: Items[PageLoad], owner: object) -> LoadBatch:
        """Load whole pages into their device pages, and wait for all of them.

        Returns:
            The finished batch: each page is held by then, or cannot be loaded.
        """
        batch = LoadBatch(owner, lambda _: None)
        batch.fresh = []
        try:
            self.submit(batch, [LayerSlice(one, 0, one.stripes) for one in loads], -1)
            while batch.left:
                now, tiers = compiling.now_s(), {trip.source.tier for trip in batch.trips}
                wait_s = min(max(batch.end_s - now, 0.0), _LONGEST_S) * (not self._checks)
                came = self._store.stack.mover.wait(tiers, wait_s)
                self._check_together()
                if not came and self._checks:
                    check = self._checks.popleft()
                    for trip in check[0]:
                        trip.piece.page_load.flying.remove(trip.piece)
                    self._settle(*check)  # while later ones are copied
                # Poll once more after the end: the tier may have answered at its own deadline.
                self.expire(now)
        finally:
            if batch.left:  # after an error: the loads stay without these layers
                self._drop_checks(batch)
            self._launch()
            # One call inserts neighbours in chain order, without blocks that have gone meanwhile.
            # This runs after an interrupt, too: a page that no policy knows is never evicted. Later
            # answers insert their blocks one by one.
            there, batch.fresh = set(batch.fresh), None
            blocks = [one.block for one in loads if one.block in there]
            self._store.insert([block for block in blocks if block.page >= 0 and not block.gone])
        return batch

    def submit(self, flight: LoadBatch, pieces: Iterable[LayerSlice], prefer: int) -> int:
        """Request slices of pages from tiers; `LoadBatch.done` is called now or in a later `drain`.

        Args:
            flight: A new batch.
            pieces: Slices of pages that are not loaded.
            prefer: Number of the tier to try first; -1 for the nearest of each page.

        Returns:
            Number of bytes requested.
        """
        if flight.priority is IOPriority.DEMAND:  # a prefetch has no deadline, and no waiter
            self._flights[flight] = None
        asked, flight.prefer = 0, prefer
        places, alike = dict[Any, ReadFrom | None](), dict[Any, list[LayerSlice]]()
        try:
            for piece in pieces:
                (one, *span), block, coming = piece, piece.page_load.block, self._store.coming
                form = one.group, block.tiers, block.codecs, *span
                absent = block.page < 0 and not (block.going or block.gone)
                if absent and len(coming.get(block, ())) < 2:
                    if form not in places:
                        places[form] = one.only_source(prefer)
                    source = places[form]
                    if source and one.page >> CODEC_SHIFT == source.codec:
                        alike.setdefault(form, []).append(piece)
                        continue
                for part in self._parts(piece):
                    asked += self._ask_next(flight, part, part.page_load.sources(prefer))
            for form, some in alike.items():
                asked += self._ask(flight, some, cast(ReadFrom, places[form]))
        except BaseException:
            flight.lost = True
            raise
        finally:
            self._allow(flight)
            self._less(flight)
        return asked

    def expire(self, moment_s: float | None = None) -> None:
        """Give up overdue batches; pages that a tier may still write to stay lent.

        Args:
            moment_s: The time by `compiling.now_s`; None for now.
        """
        if not self._flights:
            return
        now, moment_s = time.perf_counter(), compiling.now_s() if moment_s is None else moment_s
        for flight in [flight for flight in self._flights if flight.end_s <= moment_s]:
            for trip in list(flight.trips):
                self._abandon(trip)
                source, block = trip.source, trip.piece.page_load.block
                failed = TierAnswer(0, 0, block.key, Outcome.FAILED, "deadline passed")
                waited = failed._replace(seconds=now - trip.asked_s)
                self._store.stack.not_served(block, source.tier, waited)
                flight.lost = True
                self._less(flight)

    def cancel(self, owner: object) -> None:
        """Cancel all batches of an owner; their `done` is never called."""
        mine = [flight for flight in self._flights if flight.owner is owner]
        for flight in mine:
            flight.called_off = True
        if mine:
            self._store.stack.mover.cancel(owner)

    def _parts(self, piece: LayerSlice) -> Iterator[LayerSlice]:
        """Cut a slice at the bounds of layers that other loads of the page have or requested.

        Yield nothing if the block's page is on the device by now.
        """
        one, first, count = piece
        others = [other for other in self._store.coming.get(one.block, ()) if other is not one]

        def who(stripe: int) -> object:
            if any(other.offers(stripe, one.codec) for other in others):
                return True
            flying = (part for other in others for part in other.flying)
            spans = ((part.first, part.first + part.stripes) for part in flying)
            return next((span for span in spans if span[0] <= stripe < span[1]), None)

        for _, run in groupby(range(first, first + count), who) if not one.meet() else ():
            head, *more = run
            yield LayerSlice(one, head, 1 + len(more))

    def _copied(self, flight: LoadBatch, piece: LayerSlice, source: ReadFrom) -> bool:
        """Copy layers from a page on this device, of the block or of another load of it."""
        (one, first, count), pool = piece, self._store.pool(piece.page_load.group)
        if pool.copies is not None:
            return False  # layers may still be on their way to the device
        pages = [(one.block.page, one.block.fidelity)]
        for other in self._store.coming[one.block]:
            span = range(first, first + count) if other is not one else ()
            if span and all(other.offers(stripe, source.codec) for stripe in span):
                pages.append((other.page, other.fidelity))
        for page, fidelity in pages:
            if page >= 0 and page >> CODEC_SHIFT == source.codec:
                layout = self._store.forms[one.group].layout(page)
                both, at = (one.page, page), layout.stripe_stride_bytes
                buffer, other = (pool.page_bytes(n, layout.page_bytes) for n in both)
                buffer = buffer[first * at :][: count * at]
                buffer.copy_(other[first * at :][: count * at])
                flight.joined[source.tier] += len(buffer)
                flight.n_bytes[source.tier] += len(buffer)
                self._landed(flight, [(piece, source, buffer, fidelity)])
                return True
        return False

    def _ask_next(self, flight: LoadBatch, piece: LayerSlice, sources: Iterator[ReadFrom]) -> int:
        """Request a slice from its next source; without one the batch is lost."""
        source = next(sources, None)
        if source is None:
            flight.lost = True
        elif not self._copied(flight, piece, source):
            return self._ask(flight, [piece], source, sources)
        return 0

    def _ask(
        self, flight: LoadBatch, pieces: Items[LayerSlice], source: ReadFrom,
        sources: Iterator[ReadFrom] | None = None, *, read: bool = False,
    ) -> int:  # fmt: skip
        """Request the same layers of like pages; return their bytes.

        The targets are the pages; beside a GPU the tier's own memory, or staged rows, which a disk
        reads straight into. Demands into the tier's memory are a few large requests. In a batch
        that is waited for, the device verifies them unless the tier is to `read` them; in one for
        steps under way, each is copied up while the next is verified here.
        """
        (one, first, count), stack, demand = pieces[0], self._store.stack, IOPriority.DEMAND
        copies, layout = one._pool.copies, one._forms.layouts[source.codec]
        at, n_bytes = (n * layout.stripe_stride_bytes for n in (first, count))
        span = (0, 0) if count == layout.layers else (first, count)
        terms = one._forms.fingerprints[source.codec], stack.fidelity, *span
        bodies, lend = list[Any](), getattr(stack.tiers[source.tier], "lend_all", None)
        if lend is not None and copies is not None and not one.block.going:  # else a body is read
            bodies = lend([piece.page_load.block.key for piece in pieces], *span)
        lent, direct = list[tuple[_Trip, Load]](), copies is not None
        unread = direct and flight.fresh is not None and not read
        for piece, body in zip_longest(pieces, bodies):
            one, is_lent = piece.page_load, body is not None and len(body) == n_bytes
            if is_lent:
                buffer = torch.from_numpy(body)
            elif copies is None:
                buffer = one._pool.page_bytes(one.page, layout.page_bytes)[at:][:n_bytes]
            else:
                (buffer,) = copies.stage(1, n_bytes)
            # Another copy from the tier's memory may be under way: nothing may write there.
            target = body.data.toreadonly() if is_lent else buffer.numpy().data
            trip = _Trip(flight, piece, source, buffer, sources)
            load = Load(one.block.key, target, *terms, unread and (is_lent or not lend), direct)
            one.flying.append(piece)
            flight.left += 1
            flight.trips[trip] = n_bytes
            if is_lent and flight.priority is demand:
                lent.append((trip, load))
                continue
            those = partial(self._answered, [trip]), flight.owner, flight.priority
            trip.request = stack.mover.ask(source.tier, load, *those)
            trip.joined = trip.request is not None and trip.request.leader is not None
        most = -(-BATCH_BYTES // n_bytes)
        for part in (lent[first : first + most] for first in range(0, len(lent), most)):
            trips, loads = zip(*part, strict=True)
            done = partial(self._answered, trips)
            request = stack.mover.ask_all(source.tier, loads, done, flight.owner)
            for trip in trips:
                trip.request = request
        return n_bytes * len(pieces)

    def _allow(self, flight: LoadBatch) -> None:
        """Extend a batch's deadline by the time that its tiers need for all their requests."""
        lanes, now = self._store.stack.mover.lanes, compiling.now_s()
        for tier in {trip.source.tier for trip in flight.trips}:
            owed = lanes[tier].schedule.flying_bytes + lanes[tier].schedule.queued_bytes
            flight.end_s = max(flight.end_s, now + lanes[tier].patience_s(owed))

    def _answered(self, trips: Items[_Trip], answers: Items[TierAnswer]) -> None:
        """Handle the answers to trips of one batch, which were given together."""
        flight, now_s = trips[0].flight, time.perf_counter()
        hits, missed = _Answers(), _Answers()
        for trip, answer in zip(trips, answers, strict=True):
            trip.piece.page_load.flying.remove(trip.piece)
            if trip.given_up:
                continue
            flight.trips.pop(trip)
            end_s = trip.asked_s + answer.seconds if answer.seconds else now_s
            flight.ended_s = max(flight.ended_s, min(end_s, now_s))
            hit = answer.outcome is Outcome.HIT and answer.info is not None
            (hits if hit else missed).append((trip, answer))
        alone = len(hits) == len(trips) == 1 and answers[0].digests and flight.fresh is not None
        if alone or (checks := self._verify(hits)):
            for trip in trips:  # until then nothing may change or free their pages
                trip.piece.page_load.flying.append(trip.piece)
        if alone:
            self._unread += hits
        elif checks:
            self._checks.append((trips, hits, missed, checks))
        else:
            self._settle(trips, hits, missed, checks)

    def _check_together(self) -> None:
        """Start to check the layers that came unread, each in an answer of its own."""
        hits, self._unread = self._unread, _Answers()
        for flight in dict.fromkeys([trip.flight for trip, _ in hits]):  # one may load in another
            own = [one for one in hits if one[0].flight is flight]
            self._checks.append(([trip for trip, _ in own], own, _Answers(), self._verify(own)))

    def _drop_checks(self, batch: LoadBatch) -> None:
        """Leave out what came for a batch and is not checked; end the batch."""
        trips = [trip for trip, _ in self._unread if trip.flight is batch]
        trips += [trip for those, *_ in self._checks for trip in those if trip.flight is batch]
        self._unread = [one for one in self._unread if one[0].flight is not batch]
        self._checks = deque(one for one in self._checks if one[0][0].flight is not batch)
        for trip in trips:
            trip.piece.page_load.flying.remove(trip.piece)
            trip.piece.page_load.let_go()
        self._less(batch, len(trips))

    def _settle(
        self, trips: Items[_Trip], hits: _Answers, missed: _Answers, checks: list[_Check]
    ) -> None:
        """Take what arrived and is sound; ask further sources for the rest."""
        flight, stack, landed = trips[0].flight, self._store.stack, list[_Landed]()
        sound, unsound = dict[_Trip, bool](), _Answers()
        for those, check in checks:
            sound |= zip(those, check(), strict=True)
            flight.ended_s = time.perf_counter()  # the copies are part of the load
        for trip, answer in hits:
            if answer.digests and not sound.get(trip):
                unsound += [(trip, answer)] * (trip in sound)  # else nothing lacks it
                continue
            tier, n_bytes, info = trip.source.tier, answer.n_bytes, cast(FrameInfo, answer.info)
            if trip.joined:
                flight.joined[tier] += n_bytes
            else:
                stack.mover.lanes[tier].loaded_bytes += n_bytes
            flight.n_bytes[tier] += n_bytes
            buffer = None if answer.digests else trip.buffer
            landed.append((trip.piece, trip.source, buffer, info.fidelity))
        self._landed(flight, landed)
        # Those first: until they fly again, a source in another codec could change their page.
        for trip, answer in (*unsound, *missed):
            self._missed(trip, answer)
        self._less(flight, sum([not trip.given_up for trip in trips]))
        for trip in trips:
            if not trip.piece.page_load.wanted:
                trip.piece.page_load.let_go()

    def _verify(self, hits: _Answers) -> list[_Check]:
        """Start to copy layers that came unread to their device, and to check them there.

        Layers that nothing lacks are left out.
        """
        forms, checks = dict[Any, list[Any]](), list[_Check]()
        places = _granules([trip.piece for trip, _ in hits])
        for (trip, answer), at in zip(hits, places, strict=True):
            if answer.digests and at >= 0:
                form = trip.piece.page_load._pool, len(trip.buffer), len(answer.digests)
                forms.setdefault(form, []).append((trip, trip.buffer, at, answer.digests))
        for (pool, *_), those in forms.items():
            trips, *rows = zip(*those, strict=True)
            checks.append((trips, pool.copies.verify(*rows)))
        return checks

    def _landed(self, batch: LoadBatch, some: Items[_Landed]) -> None:
        """Take verified layers that arrived, and publish the pages that are complete now."""
        arrived = _arrive(some)
        if batch.fresh is None or len(arrived) > 1:
            self._launch()
        fresh = _enter(arrived)
        _hold(fresh)
        _give_back(fresh, release=False)
        for page_load in arrived if batch.priority is IOPriority.DEMAND else fresh:
            if page_load.held:
                batch.pages[arrived[page_load].tier, page_load.group] += 1
        insert = self._store.insert if batch.fresh is None else batch.fresh.extend
        insert([page_load.block for page_load in fresh])

    def _launch(self) -> None:
        """Start the copies to the devices that are queued."""
        for pool in self._store.pools.values():
            if pool.copies is not None:
                pool.copies.launch()

    def _missed(self, trip: _Trip, answer: TierAnswer) -> None:
        """Count a miss, and request the slice from its next source; an unsound copy once more."""
        page_load, source, flight = trip.piece.page_load, trip.source, trip.flight
        known = not page_load.block.gone and (source.last or answer.reason != "layout")
        unasked, unsound = answer.reason in ("cancelled", "busy"), answer.outcome is Outcome.HIT
        if known and not (unasked or unsound):
            self._store.stack.not_served(page_load.block, source.tier, answer)
        flight.refused |= answer.reason == "busy"
        again = flight.priority is IOPriority.DEMAND or not unasked
        if again and page_load.wanted and not page_load.held and not flight.called_off:
            if unsound and page_load.change(source.codec):
                # Now the tier reads it: it is damaged, or its copy was.
                self._ask(flight, [trip.piece], source, trip.sources, read=True)
            else:
                others = (o for o in page_load.sources(flight.prefer) if o.tier != source.tier)
                self._ask_next(flight, trip.piece, trip.sources or others)
            self._allow(flight)
        else:
            flight.lost |= not page_load.held

    def _abandon(self, trip: _Trip) -> None:
        trip.given_up = True
        trip.flight.trips.pop(trip)
        page_load, lane = trip.piece.page_load, self._store.stack.mover.lanes[trip.source.tier]
        if trip.request is None or not lane.give_up(trip.request):
            page_load.flying.remove(trip.piece)
            page_load.let_go()

    def _less(self, flight: LoadBatch, count: int = 1) -> None:
        flight.left -= count
        if not flight.left and count:
            self._flights.pop(flight, None)
            if not flight.called_off:
                flight.done(flight)


def ways(store: PageStore, loads: Iterable[PageLoad]) -> list[dict[int, int]]:
    """Return for each page its codec on each readable tier, the nearest first."""
    found, known = list[dict[int, int]](), dict[tuple[int, ...], dict[int, int]]()
    for one in loads:
        block, alike = one.block, (one.group, one.block.tiers, one.block.codecs)
        codecs = None if block.going else known.get(alike)
        if codecs is None:
            codecs = {}
            for source in store.stack.sources(block):
                codecs.setdefault(source.tier, source.codec)
            if not block.going and block.tiers == alike[1]:  # readable wherever it is listed
                known[alike] = codecs
        found.append(codecs)
    return found


def reserve(loads: Items[PageLoad], codecs: Items[dict[int, int]], allocate: Allocate) -> bool:
    """Allocate device pages of the codecs in `ways`; return False if a load got none."""
    wanted: dict[tuple[int, int], list[PageLoad]] = {}
    for one, way in zip(loads, codecs, strict=True):
        if way:
            wanted.setdefault((one.group, next(iter(way.values()))), []).append(one)
    for (group, codec), those in wanted.items():
        set_pages(those, allocate(group, len(those), codec) or ())
    return all([one.page >= 0 for one in loads])
