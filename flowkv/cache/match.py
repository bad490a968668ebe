"""Finds the longest known prefix of a prompt, and plans how it comes into a sequence's pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from flowkv.cache.block_table import Planner
from flowkv.cache.index import Block
from flowkv.cache.load import LoadBatch, PageLoad, PageLoader, reserve, ways
from flowkv.cache.sequence import Sequence
from flowkv.core import compiling
from flowkv.core.layout import CODECS
from flowkv.observe.events import Bus, Hit, Miss, Promoted, Restored
from flowkv.policy.restore import LoadGate, Source


class PrefixMatcher:
    """Restores prefixes. Callers hold the KV lock.

    Args:
        planner: Tables and store.
        gate: Decides whether loading helps.
        bus: Where hits and misses go.
        loader: Brings what is not on its device.
    """

    def __init__(self, planner: Planner, gate: LoadGate, bus: Bus, loader: PageLoader) -> None:
        self.planner, self.store, self.tables = planner, planner.store, planner.tables
        self.gate, self.bus, self._loader = gate, bus, loader
        self.page_size = planner.page_size

    # ---- what is known

    def match(self, seq: Sequence, limit_pages: int) -> int:
        """Pages of the longest prefix that is known in every group, at most `limit_pages`.

        Full groups need all pages; sliding groups only those that the window still reaches (D12).
        """
        pages, groups = limit_pages, range(len(seq.blocks))
        for g in groups:
            if self.planner.window(g) is None:
                pages = self._run(seq, g, pages)
        sliding = [g for g in groups if self.planner.window(g) is not None]
        runs = {g: self._runs(seq, g, pages) for g in sliding}
        while pages and any(runs[g][pages] < pages - self.first(g, pages) for g in sliding):
            pages -= 1
        return pages

    def first(self, group: int, pages: int) -> int:
        """First page that a query right behind `pages` pages needs: at least the last one."""
        window = self.planner.window(group)
        if window is None or not pages:
            return 0
        return min(max(0, pages * self.page_size - window + 1) // self.page_size, pages - 1)

    def find(self, seq: Sequence, group: int, page: int) -> Block | None:
        """The block of a page of a prompt, if it lies somewhere."""
        return self.store.find(seq.key(group, page))

    def _run(self, seq: Sequence, group: int, limit: int) -> int:
        """Known pages from the first one on."""
        page = 0
        for asked in (False, True):
            while page < limit and self.find(seq, group, page) is not None:
                page += 1
            if page < limit and not asked:
                self._discover(seq, group, page, limit)
        return page

    def _runs(self, seq: Sequence, group: int, limit: int) -> list[int]:
        """For each number of pages, how many known ones lie right before it."""
        self._discover(seq, group, 0, limit)
        runs = [0]
        for page in range(limit):
            runs.append(runs[-1] + 1 if self.find(seq, group, page) is not None else 0)
        return runs

    def _discover(self, seq: Sequence, group: int, first: int, limit: int) -> None:
        if first < limit and self.store.watches:
            keys = [seq.key(group, page) for page in range(first, limit)]
            self.store.discover(
                keys,
                group=group,
                parent=seq.parent_key(group, first),
                tenant=seq.tenant,
                namespace=seq.namespace,
            )

    # ---- attaching it

    def restore(self, seq: Sequence, limit: int) -> int:
        """Attaches a known prefix of at most `limit` tokens to a fresh sequence.

        Returns:
            Tokens attached.
        """
        self.store.expire()
        tokens, loaded = self.attach(seq, max(0, limit) // self.page_size)
        self.report(seq, tokens, loaded, limit)
        return tokens

    def attach(self, seq: Sequence, limit_pages: int) -> tuple[int, int]:
        """Attaches the longest prefix that is known, worth loading and really there.

        Returns:
            Tokens attached, and how many of them were loaded.
        """
        wanted = limit_pages
        while pages := self.match(seq, wanted):
            loads = self.loads(seq, 0, pages)
            absent = [one for group in loads for one in group.values() if not one.held]
            first = min((one.page_no for one in absent), default=pages)
            try:
                stop = self._bring(seq, absent, first, pages)
            except BaseException:
                drop(loads)
                raise
            if stop == pages:  # what each page is held for is its sequence from here on
                blocks = [[one.block for one in group.values()] for group in loads]
                self._attach(seq, blocks, pages)
                return pages * self.page_size, (pages - first) * self.page_size
            drop(loads)
            wanted = min(stop, pages - 1)
        return 0, 0

    def loads(self, seq: Sequence, first: int, pages: int) -> list[dict[int, PageLoad]]:
        """Per group, the pages of a known prefix from page `first` on that are needed, by number.

        Those on their device are held for the sequence.
        """
        found: list[dict[int, PageLoad]] = []
        for g in range(len(seq.blocks)):
            numbers = range(max(first, self.first(g, pages)), pages)
            blocks = [(page, self.find(seq, g, page)) for page in numbers]
            found.append({n: PageLoad(self.store, b, n) for n, b in blocks if b is not None})
        return found

    def _bring(self, seq: Sequence, absent: list[PageLoad], first: int, pages: int) -> int:
        """Loads what is not on its device; where the prefix ends now, `pages` if all came."""
        if not self._worth([one.block for one in absent], pages - first):
            return first
        codecs = ways(self.store, absent)
        away = [one.page_no for one, way in zip(absent, codecs, strict=True) if not way]
        if away or not reserve(absent, codecs, self.store.try_allocate):
            return min(away, default=first)
        if absent:
            self._tell(seq, self._loader.load(absent, self))
        return min((one.page_no for one in absent if not one.held), default=pages)

    def _tell(self, seq: Sequence, batch: LoadBatch) -> None:
        """Announces what was loaded, and what that took."""
        seconds = batch.ended_s - batch.started_s
        counted_s = compiling.measured_s(batch.started_s, batch.ended_s)
        for number in sorted({tier for tier, _ in batch.pages}):
            name = self.store.tiers[number].name
            count = max(n for (tier, _), n in batch.pages.items() if tier == number)
            total = sum(n for (tier, _), n in batch.pages.items() if tier == number)
            tokens, n_bytes = count * self.page_size, batch.n_bytes[number] - batch.joined[number]
            self.bus.emit(Promoted(source=name, tier="device", pages=total, n_bytes=n_bytes))
            self.gate.loaded(name, n_bytes, counted_s)
            self.bus.emit(Hit(tier=name, tokens=tokens, n_bytes=n_bytes, tenant=seq.owner))
            self.bus.emit(Restored(tier=name, tokens=tokens, n_bytes=n_bytes, seconds=seconds))

    def attach_resident(self, seq: Sequence, pages: int) -> None:
        """Attaches so many leading pages, all of which are on their device."""
        blocks = [self._blocks(seq, g, pages) for g in range(len(seq.blocks))]
        for block in (block for group in blocks for block in group):
            self.store.hold(block)
        self._attach(seq, blocks, pages)

    def report(self, seq: Sequence, tokens: int, loaded: int, limit: int) -> None:
        """Says on the bus what was found on the device, and what nowhere."""
        if tokens > loaded:
            here = Hit(tier="device", tokens=tokens - loaded, n_bytes=0, tenant=seq.owner)
            self.bus.emit(here)
        if tokens < limit:
            self.bus.emit(Miss(tokens=limit - tokens, tenant=seq.owner))

    def _blocks(self, seq: Sequence, group: int, pages: int) -> list[Block]:
        found = (self.find(seq, group, page) for page in range(self.first(group, pages), pages))
        return [block for block in found if block is not None]

    def _worth(self, absent: list[Block], pages: int) -> bool:
        n_bytes: dict[str, int] = {}
        for block in absent:
            number = self.store.source(block)
            tier = self.store.tiers[number].name
            n_bytes[tier] = n_bytes.get(tier, 0) + self.store.body_bytes(block, number)
        return not absent or self.gate.worth(n_bytes, pages * self.page_size)

    def _attach(self, seq: Sequence, blocks: list[list[Block]], pages: int) -> None:
        self.tables.reserve(pages)
        for g, group in enumerate(blocks):
            first = pages - len(group)
            seq.blocks[g] = [None] * first + list(group)
            seq.first_page[g], seq.published[g] = first, pages
            self.tables.pages[g][seq.row, first:pages] = [block.page for block in group]
            seq.fidelity = max([seq.fidelity, *(block.fidelity for block in group)])
        self.tables.touch()
        self.tables.lengths[seq.row] = pages * self.page_size

    def absent(self, seq: Sequence) -> list[Block]:
        """Blocks of a prompt's longest known prefix that are not on their device."""
        pages = self.match(seq, len(seq.tokens) // self.page_size)
        known = [self._blocks(seq, g, pages) for g in range(len(seq.blocks))]
        return [block for blocks in known for block in blocks if block.page < 0]

    # ---- erasing

    def known(self, seq: Sequence) -> list[Block]:
        """Known blocks of a prompt's pages, in every group."""
        pages = range(len(seq.tokens) // self.page_size)
        found = [self.find(seq, g, page) for g in range(len(seq.blocks)) for page in pages]
        return [block for block in found if block is not None]


# What of a prompt can be restored, and from where: looked up once, when it is opened.


class RestorePlan(NamedTuple):
    """A known prefix that is not on its device.

    Attributes:
        pages: Of the whole prefix.
        resident: Leading ones that are on the device in every group.
        stop: One past the last page that is not.
        inbound: Per group: the pages behind the resident ones that are needed, by number.
        sources: Where they can be loaded from.
        tiers: Number of the tier of each source; -1 where pages lie on various ones.
    """

    pages: int
    resident: int
    stop: int
    inbound: list[dict[int, PageLoad]]
    sources: tuple[Source, ...]
    tiers: tuple[int, ...]

    def drop(self) -> None:
        """Gives everything back."""
        drop(self.inbound)


def drop(loads: Iterable[dict[int, PageLoad]]) -> None:
    """Wants none of these pages any more."""
    for group in loads:
        for one in group.values():
            one.drop()


def resident_pages(restorer: PrefixMatcher, seq: Sequence, pages: int) -> int:
    """Leading pages that are on their device, in every group and as far as windows reach."""

    def here(group: int, page: int) -> bool:
        block = restorer.find(seq, group, page)
        return block is not None and block.page >= 0

    groups = range(len(seq.blocks))
    for g in groups:
        if restorer.planner.window(g) is None:
            pages = next((page for page in range(pages) if not here(g, page)), pages)
    sliding = [g for g in groups if restorer.planner.window(g) is not None]
    while pages and not all(
        here(g, page) for g in sliding for page in range(restorer.first(g, pages), pages)
    ):
        pages -= 1
    return pages


def look(restorer: PrefixMatcher, seq: Sequence, resident: int, pages: int) -> RestorePlan | None:
    """Reserves the pages that a known prefix will lie in. Callers hold the KV lock.

    Args:
        restorer: Knows it.
        seq: Whose; its resident pages are attached, so that nothing evicts them.
        resident: How many those are.
        pages: All that are known.

    Returns:
        None if nothing of it can be loaded: it is out of reach for now, or does not fit.
    """
    while resident < pages:
        inbound = restorer.loads(seq, resident, pages)
        absent = [one for group in inbound for one in group.values() if not one.held]
        codecs = ways(restorer.store, absent)
        stop = max((one.page_no for one in absent), default=-1) + 1
        sources, tiers = _sources(restorer, absent, codecs, (stop - resident) * restorer.page_size)
        prospect = RestorePlan(pages, resident, stop, inbound, sources, tiers)
        if sources and reserve(absent, codecs, restorer.store.try_allocate):
            return prospect
        prospect.drop()
        away = [one.page_no for one, way in zip(absent, codecs, strict=True) if not way]
        if not away:
            return None
        pages = restorer.match(seq, min(away))  # as far as it can be reached
    return None


def _sources(
    restorer: PrefixMatcher, absent: list[PageLoad], codecs: list[dict[int, int]], tokens: int
) -> tuple[tuple[Source, ...], tuple[int, ...]]:
    """Tiers that have all of it, the most precise first; else one that stands for several."""
    if not codecs or not all(codecs):
        return (), ()
    store = restorer.store
    cells = tokens * sum(len(group.layers) for group in store.geometry.groups)

    def bytes_of(one: PageLoad, codec: int) -> int:
        return store.page_bytes(one.group, codec)

    def source(tier: int, chosen: list[int]) -> Source:
        n_bytes = sum(map(bytes_of, absent, chosen))
        usual = Counter(chosen).most_common(1)[0][0]
        return Source(store.tiers[tier].name, CODECS[usual], n_bytes / cells)

    common = set.intersection(*(set(one) for one in codecs))
    if common:
        made = {tier: source(tier, [one[tier] for one in codecs]) for tier in sorted(common)}
        order = sorted(common, key=lambda tier: (CODECS.index(made[tier].codec), tier))
        return tuple(made[tier] for tier in order), tuple(order)
    nearest = [next(iter(one)) for one in codecs]
    main = Counter(nearest).most_common(1)[0][0]
    chosen = [one[tier] for one, tier in zip(codecs, nearest, strict=True)]
    return (source(main, chosen),), (-1,)
