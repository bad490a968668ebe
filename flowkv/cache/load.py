"""Loads pages of known prefixes onto their device: one at a time, layer by layer, in batches."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from functools import partial
from typing import NamedTuple

import torch

from flowkv import kernels
from flowkv.cache.index import Block
from flowkv.cache.mover import TransferRequest
from flowkv.cache.pool import PagePool
from flowkv.cache.sequence import Sequence
from flowkv.cache.store import PageStore, ReadFrom
from flowkv.core import compiling
from flowkv.core.errors import NonFiniteError, StateError
from flowkv.core.layout import CODEC_SHIFT, GRANULE_BYTES, granule_of
from flowkv.observe.events import Promoted
from flowkv.policy.restore import Load as LoadOp
from flowkv.tiers.base import Completion, FrameInfo, Load, Outcome


class PageLoad:
    """A page that a sequence waits for. Callers hold the KV lock.

    Its device page is *lent* while it is on its way, so that nothing moves, encodes or frees it;
    a tier that is late with an answer keeps it lent, whatever became of the restore (DESIGN D10).
    Once all stripes are there, verified, the page is the block's and others can use it too.

    Args:
        store: Where its block is known.
        block: What is to come.
        page_no: Which page of the sequence it is.

    Attributes:
        page: Id of the device page; -1 without one.
        flying: Loads that tiers still owe.
        held: The block is on its device, and held for the sequence.
        wanted: Nobody has called it off.
        fidelity: Lossiest codec in the lineage of what came.
    """

    __slots__ = (
        *("_came", "_kept", "_lent", "_line", "_store", "block", "fidelity"),
        *("flying", "held", "page", "page_no", "wanted"),
    )

    def __init__(self, store: PageStore, block: Block, page_no: int) -> None:
        self._store, self.block, self.page_no = store, block, page_no
        self.page, self.flying, self._came = -1, 0, 0
        self.held, self.wanted, self._lent = False, True, -1  # the page lent
        self._line: Sequence | None = None
        self.fidelity, self._kept = 0, block.page < 0
        if self._kept:
            store.keep(block)
        else:
            self._hold()

    # ---- what is there

    @property
    def group(self) -> int:
        """Its layer group."""
        return self.block.group

    @property
    def codec(self) -> int:
        """Index of the codec of its device page."""
        return self.page >> CODEC_SHIFT

    @property
    def stripes(self) -> int:
        """Layers of the page."""
        return self._store.forms[self.group].raw.layers

    def there(self, stripe: int) -> bool:
        """Whether a layer can be attended to."""
        return self.held or bool(self._came >> stripe & 1)

    @property
    def complete(self) -> bool:
        """Whether all layers can be."""
        return self.held or self._came == (1 << self.stripes) - 1

    # ---- its memory

    def take(self, page: int) -> None:
        """Gives it a private page, fresh from the pool."""
        self.page = page
        self._lend()

    def change(self, codec: int) -> bool:
        """Has a page of another codec, if nothing depends on the one it has; False otherwise."""
        if codec == self.codec and self.page >= 0:
            return True
        if self.flying or self._came or self._line is not None:
            return False
        fresh = self._store.spare(self.group, 1, codec)
        if not fresh:
            return False
        self._give_back()
        self.take(fresh[0])
        return True

    def wish(self, source: ReadFrom, first: int, count: int) -> tuple[Load, torch.Tensor]:
        """What a tier is asked for some layers, and the memory that it fills.

        That is the page itself, or pinned memory beside a GPU.
        """
        store, group = self._store, self.group
        layout, pool = store.forms[group].layouts[source.codec], store.pool(group)
        stride = layout.stripe_stride_bytes
        if pool.copies is None:
            page = pool.page_bytes(self.page, layout.page_bytes)
            buffer = page[first * stride : (first + count) * stride]
        else:
            (buffer,) = pool.copies.stage(1, count * stride)
        fingerprint = store.forms[group].fingerprints[source.codec]
        whole = count == layout.layers
        span = (0, 0) if whole else (first, count)
        return Load(self.block.key, buffer.numpy().data, fingerprint, store.fidelity, *span), buffer

    def sources(self, first: int) -> Iterator[ReadFrom]:
        """Where it may be read from, best first: of the codec that it has begun to have.

        Args:
            first: Number of the tier that is asked before the others; -1 for the nearest.
        """
        known = list(self._store.sources(self.block)) if not self.block.gone else []
        for source in sorted(known, key=lambda one: one.tier != first):
            if self.page >= 0 and self.change(source.codec):
                yield source

    # ---- what becomes of it

    def came(self, first: int, count: int, buffer: torch.Tensor, info: FrameInfo) -> None:
        """Some layers came, verified."""
        pool = self._store.pool(self.group)
        if pool.copies is not None:
            stride = self._store.forms[self.group].of(self.page).stripe_stride_bytes
            pool.copies.upload(buffer, granule_of(self.page) + first * stride // GRANULE_BYTES)
            pool.copies.flush()
        self._came |= ((1 << count) - 1) << first
        self.fidelity = max(self.fidelity, info.fidelity)
        if self._line is not None:
            self._line.fidelity = max(self._line.fidelity, info.fidelity)

    def publish(self, source: ReadFrom) -> bool:
        """A complete page becomes its block's, unless another one is by now; whether it did."""
        block, store = self.block, self._store
        if not self.complete or self.held or block.gone:
            return False
        if self._line is not None and self._at(self._line) != self.page:
            self._line = None  # a step went on without it, past its window
        if block.page >= 0:
            if self._line is None:  # nobody uses ours
                self._hold()
                self._give_back()
            return False
        block.fidelity = max(self.fidelity, self.codec)
        if block.tiers >> source.tier & 1:
            block.enter(source.tier, self.codec)
        store.pool(self.group).share(self.page)
        store.publish(block, self.page)
        store.samples.came(block.key, store.tiers[source.tier].name)
        self._hold()
        if self._line is not None:
            self._line.blocks[self.group][self.page_no] = block
            store.pool(self.group).release(self.page)  # what the line had of its own
        self._give_back()
        return True

    def _at(self, line: Sequence) -> int:
        return int(line.planner.tables.pages[self.group][line.row, self.page_no])

    def place(self, seq: Sequence) -> None:
        """Puts it into the line of its sequence, which lets go of it from then on."""
        group, store = self.group, self._store
        seq.planner.put(seq, group, self.page_no, self.block.page if self.held else self.page)
        self._line = seq
        if self.held:
            seq.blocks[group][self.page_no] = self.block
            seq.fidelity = max(seq.fidelity, self.block.fidelity)
        else:
            store.pool(group).share(self.page)
            seq.fidelity = max(seq.fidelity, self.fidelity, self.codec)

    def fill(self, source: int) -> None:
        """Takes what it should hold from another page, in whatever codec that is.

        Raises:
            CapacityError: A tier may still write to this page, and there is no other one.
            NonFiniteError: It cannot be encoded like this one.
            StateError: There is no such page, or a step cannot be told of another one.
        """
        line, group = self._line, self.group
        if line is None or source < 0:
            raise StateError("a page is missing in the other sequence", "Compute all of them")
        pool, forms = self._store.pool(group), self._store.forms[group]
        if self.flying and pool.copies is None:  # the tier has this very page
            self._swap(line)
        target = self.page
        if source >> CODEC_SHIFT == self.codec:
            pool.copy([source], [target], forms.of(target).granules)
        else:
            old, new = forms.of(source), forms.of(target)
            where = pool.granules([source]), pool.granules([target])
            if kernels.transcode(pool.arena, *where, old, new).any():
                raise NonFiniteError(
                    f"a page cannot be encoded as {new.codec}", "Open the prompt with reuse=False"
                )
        self._came = (1 << self.stripes) - 1

    def _swap(self, line: Sequence) -> None:
        """Leaves its page to the tier that is late, and takes another one.

        On a CPU steps under way read the same table that is written here.
        """
        (fresh,) = self._store.allocate(self.group, 1, self.codec)
        pool, old = self._store.pool(self.group), self.page
        pool.release(old)  # what the line had of its own; the tier's remains until it answers
        line.planner.tables.replace(self.group, line.row, self.page_no, fresh)
        self.page = fresh

    def drop(self) -> None:
        """Is wanted no more: gives everything back that no tier may still write to."""
        if not self.wanted:
            return
        self.wanted = False
        if self.held and self._line is None:
            self._store.drop(self.block)
        self._unkeep()
        if self._lent >= 0:
            self._store.awaits(self.group, self._lent, False)
        self.let_go()

    def let_go(self) -> None:
        """Frees the page of what is wanted no more, once no tier owes anything for it."""
        if not self.wanted and not self.flying:
            self._give_back()

    def _hold(self) -> None:
        self._store.hold(self.block)
        self.held = True
        self._unkeep()

    def _unkeep(self) -> None:
        if self._kept:
            self._kept = False
            self._store.unkeep(self.block)

    def _lend(self) -> None:
        self._store.lend(self.group, self.page)
        self._store.awaits(self.group, self.page, True)
        self._store.pool(self.group).release(self.page)
        self._lent = self.page

    def _give_back(self) -> None:
        if self._lent >= 0:
            page, self._lent = self._lent, -1
            self._store.give_back(self.group, page)


# Loads of restores under way: one flight per `Load` of the policy, many answers of tiers.


class LayerSlice(NamedTuple):
    """Some layers of a page.

    Attributes:
        inbound: The page.
        first: First of them, within its group.
        stripes: How many.
    """

    inbound: PageLoad
    first: int
    stripes: int


class LoadBatch:
    """One load under way.

    Attributes:
        op: What the policy wanted.
        owner: Whose; flights of one owner are called off together.
        tier: The tier that the policy meant.
        started_s: When it was asked for, as by `time.perf_counter`.
        ended_s: When its last answer came, as the tier says.
        end_s: When it is given up, as by `compiling.now_s`.
        left: Answers that are owed.
        n_bytes: Bytes that came, by number of the tier.
        seconds: Of the link's time that it took, once that is known.
        lost: Some of it cannot be had.
        called_off: Nobody is told that it arrived.
    """

    __slots__ = (
        *("_done", "called_off", "end_s", "ended_s", "left", "lost"),
        *("n_bytes", "op", "owner", "seconds", "started_s", "tier", "trips"),
    )

    def __init__(
        self, op: LoadOp, owner: object, tier: str, done: Callable[[LoadBatch], None]
    ) -> None:
        self.op, self.owner, self.tier, self._done = op, owner, tier, done
        self.started_s = self.ended_s = time.perf_counter()
        self.end_s, self.left, self.seconds = compiling.now_s(), 1, 0.0
        self.lost = self.called_off = False
        self.n_bytes: Counter[int] = Counter()
        self.trips: dict[_Trip, int] = {}  # what each asks of its tier, in bytes

    def arrived(self) -> None:
        """All is answered."""
        self._done(self)


class _Trip:
    """One question to one tier, and where to ask next."""

    __slots__ = ("asked_s", "buffer", "flight", "given_up", "piece", "source", "sources", "wish")

    def __init__(
        self, flight: LoadBatch, piece: LayerSlice, source: ReadFrom, sources: Iterator[ReadFrom]
    ) -> None:
        self.flight, self.piece, self.source, self.sources = flight, piece, source, sources
        self.asked_s, self.given_up = time.perf_counter(), False
        self.wish: TransferRequest | None = None
        self.buffer: torch.Tensor | None = None


class LoadBatches:
    """All flights of a cache. Callers hold the KV lock.

    Args:
        store: Where pages are known.
    """

    def __init__(self, store: PageStore) -> None:
        self._store = store
        self._flights: dict[LoadBatch, None] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def flying_bytes(self, tier: str) -> int:
        """Bytes asked for and not answered, of flights that the policy sent to a tier."""
        return sum(sum(f.trips.values()) for f in self._flights if f.tier == tier)

    def of(self, owner: object) -> int:
        """Flights of an owner."""
        return sum(flight.owner is owner for flight in self._flights)

    def busy(self) -> set[int]:
        """Numbers of the tiers that owe something."""
        return {trip.source.tier for flight in self._flights for trip in flight.trips}

    def begin(self, flight: LoadBatch, pieces: Iterable[LayerSlice], prefer: int) -> int:
        """Asks tiers for pieces of pages; `LoadBatch.arrived` is called now or in a later `drain`.

        Args:
            flight: A new one.
            pieces: Of pages that are not there.
            prefer: Number of the tier that is asked first; -1 for the nearest of each page.

        Returns:
            Bytes asked for.
        """
        self._flights[flight] = None
        asked = 0
        try:
            for piece in pieces:
                asked += self._ask(flight, piece, piece.inbound.sources(prefer))
        except BaseException:
            flight.lost = True
            raise
        finally:
            self._allow(flight)
            self._less(flight)
        return asked

    def expire(self) -> None:
        """Gives up what is overdue; where a tier may still write stays lent to it."""
        now, moment_s = time.perf_counter(), compiling.now_s()
        for flight in [flight for flight in self._flights if flight.end_s <= moment_s]:
            for trip in list(flight.trips):
                self._abandon(trip)
                source, block = trip.source, trip.piece.inbound.block
                failed = Completion(0, 0, block.key, Outcome.FAILED, "deadline passed")
                waited = failed._replace(seconds=now - trip.asked_s)
                self._store.not_served(block, source.tier, waited)
                flight.lost = True
                self._less(flight)

    def cancel(self, owner: object) -> None:
        """Calls off all flights of an owner; they do not arrive, whatever their tiers still do."""
        mine = [flight for flight in self._flights if flight.owner is owner]
        for flight in mine:
            flight.called_off = True
        if mine:
            self._store.mover.cancel(owner)

    def _ask(self, flight: LoadBatch, piece: LayerSlice, sources: Iterator[ReadFrom]) -> int:
        """Asks the next source for a piece; without one the flight is lost."""
        source = next(sources, None)
        if source is None:
            flight.lost = True
            return 0
        trip = _Trip(flight, piece, source, sources)
        load, trip.buffer = piece.inbound.wish(source, piece.first, piece.stripes)
        piece.inbound.flying += 1
        flight.left += 1
        flight.trips[trip] = load.target.nbytes
        done = partial(self._answered, trip)
        trip.wish = self._store.mover.demand(source.tier, load, done, flight.owner)
        return load.target.nbytes

    def _allow(self, flight: LoadBatch) -> None:
        """Says when a flight is overdue: what else its tiers owe comes first."""
        lanes, now = self._store.mover.lanes, compiling.now_s()
        for tier in {trip.source.tier for trip in flight.trips}:
            owed = lanes[tier].schedule.flying_bytes + lanes[tier].schedule.queued_bytes
            flight.end_s = max(flight.end_s, now + lanes[tier].patience_s(owed))

    def _answered(self, trip: _Trip, answer: Completion) -> None:
        store, flight, inbound = self._store, trip.flight, trip.piece.inbound
        inbound.flying -= 1
        if not trip.given_up:
            flight.trips.pop(trip)
            end_s = trip.asked_s + answer.seconds if answer.seconds else time.perf_counter()
            flight.ended_s = max(flight.ended_s, min(end_s, time.perf_counter()))
            if answer.outcome is Outcome.HIT and answer.info is not None:
                store.count_loaded(trip.source.tier, answer.n_bytes)
                flight.n_bytes[trip.source.tier] += answer.n_bytes
                self._landed(trip, answer.info)
            else:
                self._missed(trip, answer)
            self._less(flight)
        inbound.let_go()

    def _landed(self, trip: _Trip, info: FrameInfo) -> None:
        inbound, first, count = trip.piece
        if inbound.wanted and not inbound.complete and trip.buffer is not None:
            inbound.came(first, count, trip.buffer, info)
            if inbound.publish(trip.source):
                self._store.insert([inbound.block])

    def _missed(self, trip: _Trip, answer: Completion) -> None:
        """Counts a miss, and asks elsewhere."""
        inbound, source, flight = trip.piece.inbound, trip.source, trip.flight
        known = not inbound.block.gone and (source.last or answer.reason != "layout")
        if known and answer.reason != "cancelled":
            self._store.not_served(inbound.block, source.tier, answer)
        if inbound.wanted and not inbound.held and not flight.called_off:
            self._ask(flight, trip.piece, trip.sources)
            self._allow(flight)
        else:
            flight.lost |= not inbound.held

    def _abandon(self, trip: _Trip) -> None:
        trip.given_up = True
        trip.flight.trips.pop(trip)
        inbound = trip.piece.inbound
        if trip.wish is None or not self._store.mover.give_up(trip.source.tier, trip.wish):
            inbound.flying -= 1
            inbound.let_go()

    def _less(self, flight: LoadBatch) -> None:
        flight.left -= 1
        if not flight.left and flight in self._flights:
            del self._flights[flight]
            if not flight.called_off:
                flight.arrived()


# Brings blocks from tiers onto their device, verified, each held for the sequence that asked.


class Fetched(NamedTuple):
    """What came from one tier.

    Attributes:
        pages: Pages of the layer group that got most.
        n_bytes: Bytes of all groups.
        seconds: Time it took.
        counted_s: The same as far as it says anything (`core.compiling`).
    """

    pages: int
    n_bytes: int
    seconds: float
    counted_s: float


class Landing(NamedTuple):
    """A device page that waits for a block's bytes.

    Attributes:
        block: Whose.
        source: Where from.
        page: Its id.
        buffer: Where the tier puts the bytes: the page itself, or memory beside a GPU.
        key: The block's key, which it may lose meanwhile.
    """

    block: Block
    source: ReadFrom
    page: int
    buffer: torch.Tensor
    key: bytes


def fetch(store: PageStore, blocks: Iterable[Block]) -> dict[str, Fetched]:
    """Loads blocks that are not on their device, and holds each that arrived.

    All tiers are asked at once, each for the blocks that it is the nearest place of; what one of
    them does not give is asked of the next.

    Args:
        store: Where they are known.
        blocks: Blocks without a device page.

    Returns:
        What came, by tier name.
    """
    waiting = [(block, store.sources(block)) for block in blocks]
    moved: dict[int, list[Landing]] = {}
    times: dict[int, list[tuple[float, float]]] = {}
    while waiting:
        started = time.perf_counter()
        arrived, waiting = _load(store, landings(store, waiting, store.try_allocate))
        for landing in arrived:
            moved.setdefault(landing.source.tier, []).append(landing)
        ended = time.perf_counter()
        took = ended - started, compiling.measured_s(started, ended)
        for tier in {landing.source.tier for landing in arrived}:
            times.setdefault(tier, []).append(took)
    return {store.tiers[n].name: _told(store, n, moved[n], times[n]) for n in sorted(moved)}


def landings(
    store: PageStore,
    waiting: Items[tuple[Block, Iterator[ReadFrom]]],
    allocate: Callable[[int, int, int], list[int] | None],
) -> list[tuple[Landing, Iterator[ReadFrom]]]:
    """Pages for the blocks that may be read from somewhere, group by group and codec by codec.

    Args:
        store: Where they are known.
        waiting: Blocks, and where each may be read from.
        allocate: `allocate(group, count, codec)`: private pages, or fewer than that.

    Returns:
        Where blocks will land, and where each may be read from if it does not.
    """
    wanted: dict[tuple[int, int], list[tuple[Block, ReadFrom, Iterator[ReadFrom]]]] = {}
    for block, path in waiting:
        source = next(path, None) if block.page < 0 else None
        if source is not None:
            wanted.setdefault((block.group, source.codec), []).append((block, source, path))
    prepared = []
    for (group, codec), those in wanted.items():
        pages = allocate(group, len(those), codec) or []
        buffers = _buffers(store.pool(group), pages, store.page_bytes(group, codec))
        for (block, source, path), page, buffer in zip(those, pages, buffers, strict=False):
            prepared.append((Landing(block, source, page, buffer, block.key), path))
    return prepared


def _load(
    store: PageStore, prepared: list[tuple[Landing, Iterator[ReadFrom]]]
) -> tuple[list[Landing], list[tuple[Block, Iterator[ReadFrom]]]]:
    """What arrived, each held, and what may be read from elsewhere."""
    places = [landing for landing, _ in prepared]
    # A page whose load is overdue is lent until the tier has let go of it (DESIGN D10).
    wishes = [(landing.source.tier, wish(store, landing)) for landing in places]
    answers, lent = store.mover.load(wishes, partial(_late, store, places))
    _bring(store, places, answers)
    arrived, again, fresh = [], [], list[Block]()
    for number, ((landing, path), answer) in enumerate(zip(prepared, answers, strict=True)):
        block = landing.block
        if number in lent:
            store.lend(block.group, landing.page)
        if land(store, landing, answer, brought=True):
            arrived.append(landing)
            fresh.append(block)
        elif block.page >= 0:  # a prefetch brought it, and counts its bytes
            arrived.append(landing._replace(buffer=landing.buffer[:0]))
        else:
            again.append((block, path))
            continue
        store.hold(block)
    store.insert(fresh)
    return arrived, again


def wish(store: PageStore, landing: Landing) -> Load:
    """What a tier is asked for a landing."""
    layout = store.forms[landing.block.group].fingerprints[landing.source.codec]
    return Load(landing.key, landing.buffer.numpy().data, layout, store.fidelity)


def _bring(store: PageStore, places: list[Landing], answers: Items[Completion]) -> None:
    """Copies what came to its pages, all at once, where those lie beside a GPU."""
    for landing, answer in zip(places, answers, strict=True):
        copies = store.pool(landing.block.group).copies
        if copies is not None and answer.outcome is Outcome.HIT:
            copies.upload(landing.buffer, granule_of(landing.page))
    for pool in store.pools.values():
        if pool.copies is not None:
            pool.copies.flush()


def land(store: PageStore, landing: Landing, answer: Completion, *, brought: bool = False) -> bool:
    """Publishes a page that came, or gives it back; whether it is the block's page now.

    Policies are to be told of it then (`PageStore.insert`).

    Args:
        store: Where its block is known.
        landing: The page.
        answer: What the tier says.
        brought: Whether its bytes lie in the page already, also where that is beside a GPU.
    """
    block, source, page, buffer, _ = landing
    pool = store.pool(block.group)
    if answer.outcome is Outcome.HIT and answer.info is not None:
        if block.page < 0 and not block.gone:
            if pool.copies is not None and not brought:
                pool.copies.upload(buffer, granule_of(page))
                pool.copies.flush()
            block.fidelity = answer.info.fidelity
            if block.tiers >> source.tier & 1:
                block.enter(source.tier, source.codec)
            store.publish(block, page)
            store.samples.came(block.key, store.tiers[source.tier].name)
            return True
        pool.release(page)  # it came by another way, or was forgotten meanwhile
        return False
    pool.release(page)
    if not block.gone and (source.last or answer.reason != "layout"):  # else: the next codec
        store.not_served(block, source.tier, answer)
    return False


def _told(
    store: PageStore, number: int, landings: list[Landing], times: list[tuple[float, float]]
) -> Fetched:
    """Counts and announces what came from one tier."""
    name, pages = store.tiers[number].name, dict[int, int]()
    n_bytes = sum(len(landing.buffer) for landing in landings)
    for landing in landings:
        pages[landing.block.group] = pages.get(landing.block.group, 0) + 1
    store.count_loaded(number, n_bytes)
    store.bus.emit(Promoted(source=name, tier="device", pages=len(landings), n_bytes=n_bytes))
    seconds, counted_s = (sum(column) for column in zip(*times, strict=True))
    known = all(counted for _, counted in times)
    return Fetched(max(pages.values()), n_bytes, seconds, counted_s if known else 0.0)


def _late(store: PageStore, landings: list[Landing], number: int) -> None:
    store.give_back(landings[number].block.group, landings[number].page)


def _buffers(pool: PagePool, pages: list[int], n_bytes: int) -> list[torch.Tensor]:
    """Where the tier puts the bytes: the pages themselves, or pinned memory beside a GPU."""
    if pool.copies is None:
        return [pool.page_bytes(page, n_bytes) for page in pages]
    return pool.copies.stage(len(pages), n_bytes)
