"""Loading of known pages onto their device: single pages, slices of layers, and batches."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, groupby
from typing import Any, NamedTuple

import torch

from flowkv import kernels
from flowkv.cache.index import Block
from flowkv.cache.mover import IOPriority, TransferRequest
from flowkv.cache.pool import AT_ONCE_BYTES, PagePool
from flowkv.cache.sequence import Sequence
from flowkv.cache.store import PageStore
from flowkv.cache.tier_stack import ReadFrom
from flowkv.compiled import compiling
from flowkv.core.errors import NonFiniteError, StateError
from flowkv.core.geometry import CODEC_SHIFT, GRANULE_BYTES, GRANULE_MASK
from flowkv.policy.restore import RestoreLoad
from flowkv.tiers.base import Load, Outcome, TierAnswer

Allocate = Callable[[int, int, int], list[int] | None]
"""`allocate(group, count, codec)` returns up to `count` private pages, or None."""

_LONGEST_S = 0.1


class PageLoad:
    """Load of one page for a sequence. Callers hold the KV lock.

    The device page is *lent* while the load is under way, so that nothing moves, encodes or frees
    it; a tier that is late with an answer keeps it lent, even after the restore (DESIGN D10).
    Once all stripes are loaded and verified, the page becomes the block's, and others can use it.

    Args:
        store: Store of the block.
        block: The block to load.
        page_no: Number of the page in the sequence.
        awaited: Whether a sequence waits for it: until it arrives, no tier evicts it, and its page
            does not count as one that comes free.
        allocate: Source of a page of another codec; by default idle ones are evicted.
        own: Whether the content is for this sequence alone, and never becomes the block's.

    Attributes:
        group: Layer group of the page.
        stripes: Layers of the page.
        page: Id of the device page; -1 without one.
        flying: Layers that tiers have not answered.
        held: Whether the block is on its device, and held for the sequence.
        wanted: Whether the load is still wanted; False after `drop`.
        fidelity: Lossiest codec in the lineage of the loaded layers.
        filled: Whether the page was filled from another one.
    """

    __slots__ = (
        *("_allocate", "_awaited", "_came", "_forms", "_kept", "_lent", "_line", "_own", "_pool"),
        *("_store", "block", "fidelity", "filled", "flying", "group", "held", "page", "page_no"),
        *("stripes", "wanted"),
    )

    def __init__(
        self,
        store: PageStore,
        block: Block,
        page_no: int,
        *,
        awaited: bool = True,
        allocate: Allocate | None = None,
        own: bool = False,
    ) -> None:
        self._store, self.block, self.page_no, self._awaited = store, block, page_no, awaited
        self._own, self.group = own, block.group
        self._forms, self._pool = store.forms[block.group], store.pool(block.group)
        self.stripes = self._forms.layouts[0].layers
        self._allocate = allocate or store.spare
        self.page, self._came = -1, 0
        self.flying: list[LayerSlice] = []
        self.held, self.wanted, self._lent = False, True, -1  # `_lent`: id of the lent page
        self.filled = False
        self._line: Sequence | None = None
        self.fidelity, self._kept = 0, awaited and block.page < 0

    @classmethod
    def several(
        cls, store: PageStore, pages: Iterable[tuple[Block, int]], **options: Any
    ) -> list[PageLoad]:
        """Return loads of blocks for page numbers; what is on its device is held."""
        loads = [cls(store, block, page_no, **options) for block, page_no in pages]
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
        return self.held or self._came == (1 << self.stripes) - 1

    # ---- the device page

    @property
    def alone(self) -> bool:
        """Return whether the block has no page, and no other load of it is under way."""
        return self.block.page < 0 and len(self._store.coming.get(self.block, ())) < 2

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

    def request(self, source: ReadFrom, first: int, count: int) -> tuple[Load, torch.Tensor, bool]:
        """Return the `Load` of some layers, its buffer, and whether the tier lent that memory.

        The buffer is the page itself; beside a GPU the tier's own memory, or a staged row.
        """
        store, pool = self._store, self._pool
        layout = self._forms.layouts[source.codec]
        stride, lent = layout.stripe_stride_bytes, None
        if pool.copies is None:
            page = pool.page_bytes(self.page, layout.page_bytes)
            buffer = page[first * stride : (first + count) * stride]
        else:
            lend = getattr(store.stack.tiers[source.tier], "lend", None)
            if lend is not None and not self.block.going:  # else a store's body is read
                lent = lend(self.block.key, first, count)
            if lent is not None and len(lent) == count * stride:
                buffer = torch.from_numpy(lent)
            else:
                (buffer,) = pool.copies.stage(1, count * stride)
        fingerprint = self._forms.fingerprints[source.codec]
        whole = count == layout.layers
        span = (0, 0) if whole else (first, count)
        target = buffer.numpy().data
        if lent is not None:  # another copy from it may be under way: nothing may write there
            target = target.toreadonly()
        load = Load(self.block.key, target, fingerprint, store.stack.fidelity, *span)
        return load, buffer, lent is not None

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

    # ---- arrival, publication, release

    def granule(self, first: int) -> int:
        """Return the granule of the device where a layer begins."""
        at = self._forms.layouts[self.page >> CODEC_SHIFT].stripe_stride_bytes * first
        return (self.page & GRANULE_MASK) + at // GRANULE_BYTES

    def came(self, first: int, count: int, buffer: torch.Tensor | None, fidelity: int) -> None:
        """Record that verified layers arrived; `launch` starts their copies to the device now.

        The buffer is None if they are there.
        """
        if self._pool.copies is not None and buffer is not None:
            self._pool.copies.upload(buffer, self.granule(first))
        self._came |= ((1 << count) - 1) << first
        self.fidelity = max(self.fidelity, fidelity)
        if self._line is not None:
            self._line.fidelity = max(self._line.fidelity, fidelity)

    def enter(self, source: ReadFrom) -> bool:
        """Make a complete page its block's; return False if it is not, or another one is.

        The reference of the page's loan is the block's from then on.
        """
        block, store, codec = self.block, self._store, self.codec
        if not self.complete or self.held or block.gone or self._own:
            return False
        if self._line is not None and self._at(self._line) != self.page:
            self._line = None  # a step went on without the page, past its window
        if block.page >= 0:
            if self._line is None:  # our own page is unused
                _hold([self])
                if copies := self._pool.copies:
                    copies.launch()  # no copy may be on its way to a page that becomes free
                _give_back([self])
            return False
        block.fidelity, block.page = max(self.fidelity, codec), self.page
        if block.tiers >> source.tier & 1:
            block.enter(source.tier, codec)
        if store.samples.share:
            store.samples.came(block.key, store.stack.tiers[source.tier].name)
        if self._line is not None:
            self._line.blocks[self.group][self.page_no] = block
            self._pool.release(self.page)  # the line's own reference
        return True

    def _at(self, line: Sequence) -> int:
        return int(line.planner.tables.pages[self.group][line.row, self.page_no])

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
        self._came = (1 << self.stripes) - 1

    def _swap(self, line: Sequence) -> None:
        """Leave the page to the late tier that may write to it, and take another one.

        On a CPU, steps under way read the same block table that is written here.
        """
        (fresh,) = self._store.allocate(self.group, 1, self.codec)
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
        seconds: Time of the link that the batch took, once that is known.
        lost: Whether a slice cannot be loaded.
        refused: Whether there was no room for a prefetch.
        called_off: Whether it was cancelled; `done` is then not called.
        trips: Requests under way, each with its bytes.
        fresh: Published blocks, to be inserted into policies together; None inserts each at once.
    """

    owner: object
    done: Callable[[LoadBatch], None]
    op: RestoreLoad | None = None
    tier: str = ""
    priority: IOPriority = IOPriority.DEMAND
    started_s: float = field(default_factory=time.perf_counter)
    ended_s: float = 0.0
    end_s: float = field(default_factory=compiling.now_s)
    left: int = 1
    n_bytes: Counter[int] = field(default_factory=Counter)
    joined: Counter[int] = field(default_factory=Counter)
    pages: Counter[tuple[int, int]] = field(default_factory=Counter)
    seconds: float = 0.0
    lost: bool = False
    refused: bool = False
    called_off: bool = False
    trips: dict[_Trip, int] = field(default_factory=dict)
    fresh: list[Block] | None = None

    def __post_init__(self) -> None:
        self.ended_s = self.started_s


@dataclass(slots=True, eq=False, repr=False)
class _Trip:
    """A request to one tier, with the sources to try next."""

    flight: LoadBatch
    piece: LayerSlice
    source: ReadFrom
    sources: Iterator[ReadFrom]
    asked_s: float = field(default_factory=time.perf_counter)
    given_up: bool = False
    joined: bool = False
    request: TransferRequest | None = None
    buffer: torch.Tensor | None = None


class PageLoader:
    """All loads of pages of a cache. Callers hold the KV lock.

    Args:
        store: Store of the pages.
    """

    def __init__(self, store: PageStore) -> None:
        self._store = store
        self._flights: dict[LoadBatch, None] = {}

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
                self._store.stack.mover.wait(tiers, min(max(batch.end_s - now, 0.0), _LONGEST_S))
                # Poll once more after the end: the tier may have answered at its own deadline.
                self.expire(now)
        finally:
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
        asked, lent = 0, dict[int, list[tuple[_Trip, Load]]]()
        try:
            for piece in pieces:
                alone = piece.page_load.alone
                for part in (piece,) if alone else self._parts(piece):
                    sources = part.page_load.sources(prefer)
                    asked += self._ask(flight, part, sources, lent, alone=alone)
        except BaseException:
            flight.lost = True
            raise
        finally:
            for tier, those in lent.items():
                self._ask_together(flight, tier, those)
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
                _, buffer, _ = one.request(source, first, count)
                layout = self._store.forms[one.group].layout(page)
                whole, at = pool.page_bytes(page, layout.page_bytes), layout.stripe_stride_bytes
                buffer.copy_(whole[first * at :][: len(buffer)])
                flight.joined[source.tier] += len(buffer)
                flight.n_bytes[source.tier] += len(buffer)
                self._landed(flight, [(piece, source, buffer, fidelity)])
                return True
        return False

    def _ask(
        self,
        flight: LoadBatch,
        piece: LayerSlice,
        sources: Iterator[ReadFrom],
        lent: dict[int, list[tuple[_Trip, Load]]] | None = None,
        *,
        alone: bool = False,
    ) -> int:
        """Request a slice from its next source; without one the batch is lost.

        Demands into memory that a tier lent are added to `lent` instead. With `alone`, no other
        load of the page exists to copy from.
        """
        source = next(sources, None)
        if source is None:
            flight.lost = True
            return 0
        if not (alone or piece.page_load.alone) and self._copied(flight, piece, source):
            return 0
        trip = _Trip(flight, piece, source, sources)
        load, trip.buffer, is_lent = piece.page_load.request(source, piece.first, piece.stripes)
        piece.page_load.flying.append(piece)
        flight.left += 1
        flight.trips[trip] = load.target.nbytes
        if is_lent and lent is not None and flight.priority is IOPriority.DEMAND:
            # A batch that is waited for is verified on the device, one for steps under way here.
            load = load._replace(unread=flight.fresh is not None)
            lent.setdefault(source.tier, []).append((trip, load))
            return load.target.nbytes
        those = partial(self._answered, [trip]), flight.owner, flight.priority
        trip.request = self._store.stack.mover.ask(source.tier, load, *those)
        trip.joined = trip.request is not None and trip.request.leader is not None
        return load.target.nbytes

    def _ask_together(self, flight: LoadBatch, tier: int, those: list[tuple[_Trip, Load]]) -> None:
        """Request loads in a few large requests, each copied up while the next is verified."""
        part, n_bytes = list[tuple[_Trip, Load]](), 0
        for number, one in enumerate(those, 1):
            part.append(one)
            n_bytes += one[1].target.nbytes
            if n_bytes >= AT_ONCE_BYTES or number == len(those):
                trips = [trip for trip, _ in part]
                loads, done = [load for _, load in part], partial(self._answered, trips)
                request = self._store.stack.mover.ask_all(tier, loads, done, flight.owner)
                for trip in trips:
                    trip.request = request
                part, n_bytes = [], 0

    def _allow(self, flight: LoadBatch) -> None:
        """Extend a batch's deadline by the time that its tiers need for all their requests."""
        lanes, now = self._store.stack.mover.lanes, compiling.now_s()
        for tier in {trip.source.tier for trip in flight.trips}:
            owed = lanes[tier].schedule.flying_bytes + lanes[tier].schedule.queued_bytes
            flight.end_s = max(flight.end_s, now + lanes[tier].patience_s(owed))

    def _answered(self, trips: Items[_Trip], answers: Items[TierAnswer]) -> None:
        """Handle the answers to trips of one batch, which were given together."""
        flight, stack, now_s = trips[0].flight, self._store.stack, time.perf_counter()
        landed, missed = list[Any](), list[tuple[_Trip, TierAnswer]]()
        hits = list[tuple[_Trip, TierAnswer]]()
        for trip, answer in zip(trips, answers, strict=True):
            trip.piece.page_load.flying.remove(trip.piece)
            if trip.given_up:
                continue
            flight.trips.pop(trip)
            end_s = trip.asked_s + answer.seconds if answer.seconds else now_s
            flight.ended_s = max(flight.ended_s, min(end_s, now_s))
            hit = answer.outcome is Outcome.HIT and answer.info is not None
            (hits if hit else missed).append((trip, answer))
        unsound = self._verify(hits)
        for trip, answer in hits:
            tier, n_bytes = trip.source.tier, answer.n_bytes
            if trip in unsound:
                continue
            if trip.joined:
                flight.joined[tier] += n_bytes
            else:
                stack.mover.lanes[tier].loaded_bytes += n_bytes
            flight.n_bytes[tier] += n_bytes
            if trip.buffer is not None and answer.info is not None:
                buffer = None if answer.digests else trip.buffer
                landed.append((trip.piece, trip.source, buffer, answer.info.fidelity))
        self._landed(flight, landed)
        for trip in unsound:  # now the tier reads it: it is damaged, or its copy was
            self._ask(flight, trip.piece, chain([trip.source], trip.sources))
        for trip, answer in missed:
            self._missed(trip, answer)
        self._less(flight, sum([not trip.given_up for trip in trips]))
        for trip in trips:
            if not trip.piece.page_load.wanted:
                trip.piece.page_load.let_go()

    def _verify(self, hits: Items[tuple[_Trip, TierAnswer]]) -> list[_Trip]:
        """Copy layers that came unread to their device; return those with other digests there."""
        forms, unsound = dict[Any, list[Any]](), list[_Trip]()
        for trip, answer in hits:
            one, known, row = trip.piece.page_load, answer.digests, trip.buffer
            if known and row is not None and one.wanted and not one.complete:
                form = self._store.pool(one.group).copies, len(row), len(known)
                given = trip, row, one.granule(trip.piece.first), known
                forms.setdefault(form, []).append(given)
        for (copies, *_), those in forms.items():
            trips, *rows = zip(*those, strict=True)
            sound = copies.verify(*rows)
            unsound += [trip for trip, fine in zip(trips, sound, strict=True) if not fine]
            trips[0].flight.ended_s = time.perf_counter()  # the copies are part of the load
        return unsound

    def _landed(self, batch: LoadBatch, some: Iterable[tuple[Any, ...]]) -> None:
        """Take verified layers that arrived, and publish the pages that are complete now.

        Args:
            batch: The batch.
            some: Layers, the place that they were read from, their bytes, and their fidelity.
        """
        arrived = dict[PageLoad, ReadFrom]()  # once each, though two slices may complete a page
        for (page_load, first, count), source, buffer, fidelity in some:
            if page_load.wanted and not page_load.complete:
                page_load.came(first, count, buffer, fidelity)
                arrived[page_load] = source
        if batch.fresh is None or len(arrived) > 1:
            self._launch()
        fresh = [one for one, source in arrived.items() if one.enter(source)]
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
        """Count a miss, and request the slice from its next source."""
        page_load, source, flight = trip.piece.page_load, trip.source, trip.flight
        known = not page_load.block.gone and (source.last or answer.reason != "layout")
        unasked = answer.reason in ("cancelled", "busy")
        if known and not unasked:
            self._store.stack.not_served(page_load.block, source.tier, answer)
        flight.refused |= answer.reason == "busy"
        again = flight.priority is IOPriority.DEMAND or not unasked
        if again and page_load.wanted and not page_load.held and not flight.called_off:
            self._ask(flight, trip.piece, trip.sources)
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
