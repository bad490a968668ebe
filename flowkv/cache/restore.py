"""Restore of cached prefixes from both ends: load from the back, compute from the front.

    restoration = seq.restoration             # of kv.open(tokens, wait=False)
    while tokens := restoration.next(): ...   # compute so many, in a step
    restoration.settle()                      # the front is done; the rest loads behind the suffix
    with kv.step([seq], [rest]) as step: ...  # layer i waits for layer i of all pages
    restoration.finish(ok=True)

While the front is computed, pages are loaded from the back and held beside the sequence. `settle`
puts them into its row of the block tables, also those that still load: attention then waits for
each layer. Layers that do not arrive raise `Late`, and their pages are computed.
"""

from __future__ import annotations

import math
import time
import weakref
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from enum import Enum
from itertools import count, groupby, takewhile
from typing import NamedTuple, cast

import numpy as np
import torch

from flowkv.cache.block_table import Planner
from flowkv.cache.index import Block
from flowkv.cache.load import LayerSlice, LoadBatch, PageLoad, PageLoader, reserve, ways
from flowkv.cache.mover import files, rest
from flowkv.cache.seal import SharedTokens
from flowkv.cache.sequence import Sequence
from flowkv.compiled import compiling
from flowkv.core.errors import FlowKVError, StateError
from flowkv.core.geometry import CODECS, INDEXERS
from flowkv.kernels.operands import Later
from flowkv.kvt.tier import CodecTier
from flowkv.observe.events import Bus, Hit, Miss, Promoted, Restored, RestoreEnded, RestoreSpan
from flowkv.policy.restore import (
    Compute,
    LoadGate,
    Progress,
    RestoreLoad,
    RestorePolicy,
    RestoreRequest,
    Source,
    Span,
    State,
    Suffix,
    make_restore_policy,
)
from flowkv.policy.restore.costs import Measured, lower_bound

# Matching a prompt with the cache, and attaching the cached prefix to a sequence.


class RestorePlan(NamedTuple):
    """Known prefix with pages that are not on their device.

    Attributes:
        pages: Pages of the whole prefix.
        resident: Leading pages that are on the device in every group.
        stop: One past the last page that is not on the device.
        page_loads: Per group: the needed pages behind the resident ones, by number.
        sources: Tiers that they can be loaded from.
        tiers: Number of the tier of each source; -1 if the pages are on several tiers.
        computable: Whether the caller computes tokens of the front if that helps.
        behind: Loads of the page that contains the limit, one for each group.
        limit: Most tokens of the prefix.
    """

    pages: int
    resident: int
    stop: int
    page_loads: list[dict[int, PageLoad]]
    sources: tuple[Source, ...]
    tiers: tuple[int, ...]
    computable: bool
    behind: Items[PageLoad] = ()
    limit: int = 0


def drop(loads: Iterable[PageLoad]) -> None:
    """Drop these page loads, and with them the reserved pages."""
    for one in loads:
        one.drop()


def _each(groups: Iterable[dict[int, PageLoad]]) -> list[PageLoad]:
    return [one for group in groups for one in group.values()]


_WORTH_COPYING = 8
"""Divisor of a page: a known start of a prompt below this part of a page is not copied."""


class PrefixMatcher:
    """Matcher and restorer of cached prefixes. Callers hold the KV lock.

    Args:
        planner: Tables and store.
        gate: Decides whether loading pays.
        bus: Event bus for hits and misses.
        loader: Loads pages that are not on their device.

    Attributes:
        index: Index of each model layer among the layers with pages.
        stripes: These indices of the layers of each group.
    """

    def __init__(self, planner: Planner, gate: LoadGate, bus: Bus, loader: PageLoader) -> None:
        self.planner, self.store, self.tables = planner, planner.store, planner.tables
        self.gate, self.bus, self.loader = gate, bus, loader
        self.page_size, groups = planner.page_size, planner.geometry.groups
        # An indexer is read behind the attention of its own layer, and loaded there.
        layers = [layer for group in groups for layer in group.layers]
        layers.sort(key=lambda layer: (layer % INDEXERS, layer))
        self.index = {layer: index for index, layer in enumerate(layers)}
        self.stripes = [[self.index[layer] for layer in group.layers] for group in groups]

    def least_layers(self, plan: RestorePlan) -> int:
        """Return the layers of a page that are worth one request, however fast the link is."""
        if not plan.sources:
            return 1
        worth = round(_WORTH_BYTES / (plan.sources[0].cell_bytes * self.page_size))
        tier, least = self.store.stack.tiers[plan.tiers[0]], max(1, worth)
        if not isinstance(tier, CodecTier):
            return least
        # Layers of one chunk are decoded together, whichever of them are requested.
        depth = tier.bases.chunk_layers() if len(self.stripes) == 1 else len(self.index)
        return -(-least // depth) * depth

    def decodes(self, plan: RestorePlan) -> bool:
        """Return whether the processor that computes decodes some of the pages, too."""
        tiers = (self.store.stack.tiers[number] for number in plan.tiers)
        cold = any(isinstance(tier, CodecTier) for tier in tiers)
        return cold and self.planner.geometry.groups[0].device == "cpu"

    # ---- matching

    def match(self, seq: Sequence, limit_pages: int) -> int:
        """Return the pages of the longest prefix known in every group, at most `limit_pages`.

        Full groups need all pages; sliding groups only those that the window still reaches (D12).
        """
        pages, groups = limit_pages, range(len(seq.blocks))
        for g in groups:
            if self.planner.window(g) is None:
                pages = self._run(seq, g, pages)
        for g in groups:
            if self.planner.window(g) is not None:
                self._discover(seq, g, 0, pages)
        return self._within(0, pages, lambda g, page: self.find(seq, g, page) is not None)

    def longest(self, first: int, stop: int, has: Callable[[int, int], bool]) -> int:
        """Return the length in pages of the longest prefix that every group has in its window.

        Args:
            first: Leading pages that all groups have.
            stop: Most pages.
            has: Returns whether a group has a page.
        """
        for g in range(len(self.planner.geometry.groups)):
            if self.planner.window(g) is None:
                stop = next((page for page in range(first, stop) if not has(g, page)), stop)
        return self._within(first, stop, has)

    def _within(self, first: int, stop: int, has: Callable[[int, int], bool]) -> int:
        """Return the longest prefix up to `stop` with all pages in the sliding groups' windows."""
        groups = range(len(self.planner.geometry.groups))
        sliding = [g for g in groups if self.planner.window(g) is not None]

        def gap(g: int) -> int:
            # The last missing page. Windows of shorter prefixes begin no later, so every prefix
            # that ends behind it also lacks it.
            pages = range(stop - 1, max(first, self.first(g, stop)) - 1, -1)
            return next((page for page in pages if not has(g, page)), stop)

        while (least := min(map(gap, sliding), default=stop)) < stop:
            stop = least
        return stop

    def first(self, group: int, pages: int) -> int:
        """Return the first page that a query right behind `pages` pages needs, at most the last."""
        window = self.planner.window(group)
        if window is None or not pages:
            return 0
        return min(max(0, pages * self.page_size - window + 1) // self.page_size, pages - 1)

    def find(self, seq: Sequence, group: int, page: int) -> Block | None:
        """Return the block of a prompt's page; None if no place has it."""
        return self.store.find(seq.key(group, page))

    def _run(self, seq: Sequence, group: int, limit: int) -> int:
        """Return the number of consecutive known pages from the first one on."""
        page, keys = 0, seq.keys(group, limit)
        for asked in (False, True):
            page += [*self.store.find_all(keys[page:limit]), None].index(None)
            if page < limit and not asked:
                self._discover(seq, group, page, limit)
        return page

    def _discover(self, seq: Sequence, group: int, first: int, limit: int) -> None:
        if first < limit and self.store.stack.listing.watches:
            keys = [seq.key(group, page) for page in range(first, limit)]
            above, realm = seq.parent_key(group, first), (seq.tenant, seq.namespace)
            self.store.stack.listing.discover(keys, above, realm, (group, "page"))

    # ---- attaching

    def restore(self, seq: Sequence, limit: int, *, pays: bool = False) -> int:
        """Load a known prefix of at most `limit` tokens and attach it to a fresh sequence.

        Args:
            seq: The sequence.
            limit: Most tokens.
            pays: See `attach`.

        Returns:
            Tokens attached.
        """
        pages, overflow = max(0, limit) // self.page_size, self.planner.overflow
        _, loaded = self.attach(seq, pages, pays=pays)
        if overflow is not None and seq.length < pages * self.page_size:
            overflow.adopt(seq, self.match(seq, pages))
        behind = self.behind(seq, seq.length // self.page_size, limit)
        try:
            if behind:
                self.measure(self.loader.load_pages(behind, self))
            tokens = self.extend(seq, limit, behind)
        finally:
            drop(behind)
        self.emit_hits(seq, tokens, loaded, limit)
        return tokens

    def behind(self, seq: Sequence, pages: int, limit: int) -> list[PageLoad]:
        """Reserve loads of the page behind a prompt's whole pages, for `extend` to copy from.

        Args:
            seq: The prompt's sequence.
            pages: Whole pages of its prefix.
            limit: Most tokens.

        Returns:
            A private page load for each group; none if a group's page is missing or does not fit.
        """
        found = [(block, pages) for block in self.page_behind(seq, pages, limit)]
        loads = PageLoad.several(self.store, found, own=True)
        codecs = ways(self.store, loads)
        if all(codecs) and reserve(loads, codecs, self.store.allocator.try_allocate):
            return loads
        drop(loads)
        return []

    def page_behind(self, seq: Sequence, pages: int, limit: int) -> list[Block]:
        """Return the blocks that `behind` loads, one for each group; none if that does not pay."""
        first, size = pages * self.page_size, self.page_size
        stop = min(limit, first + size - 1)
        if stop <= first or not self.store.stack.tiers:
            return []
        blocks: list[Block | None] = []
        if limit == stop and len(seq.tokens) >= first + size:
            for g in range(len(seq.blocks)):
                self._discover(seq, g, pages, pages + 1)
                audited = self.store.samples.has(seq.key(g, pages))  # a copy cannot be audited
                blocks.append(None if audited else self.find(seq, g, pages))
        if not blocks or None in blocks:
            blocks = [*self.planner.tails.stored(seq, pages, stop)]
        found = [block for block in blocks if block is not None and block.page < 0]
        tokens = min([stop - first, *(block.tail for block in found if block.tail)])
        return found if len(found) == len(blocks) and self._worth(found, tokens) else []

    def extend(self, seq: Sequence, limit: int, behind: Items[PageLoad] = ()) -> int:
        """Copy the known tokens of the page behind a prompt's whole ones; return its tokens.

        Args:
            seq: A sequence of whole pages.
            limit: Most tokens.
            behind: Page loads of that page, from `behind`.
        """
        planner, store, length = self.planner, self.store, seq.length
        found = planner.tails.best_match(seq, length // self.page_size, limit)
        few = min(self.page_size // _WORTH_COPYING, limit)
        if found is not None and not length and found.tokens < few:
            found = None
        if behind and all(one.complete and not one.block.gone for one in behind):
            store.join()  # on a GPU, uploads may be under way
            count = min(limit - length, *(one.block.tail or self.page_size for one in behind))
            if found is None or found.tokens < count:
                fidelity = max(max(one.fidelity, one.codec) for one in behind)
                full = not any(one.block.tail for one in behind)
                pages = [one.page for one in behind]
                found = SharedTokens(count, fidelity, pages, full)
        if found is None:
            return length
        held = [*enumerate(found.pages)]
        for g, page in held:  # allocating the copy may evict it otherwise
            store.pool(g).share(page)
        try:
            own = [store.allocator.try_allocate(g, 1) or [] for g, _ in held]
            if all(own) and self._copied(found, [page for (page,) in own]):
                planner.occupy(seq, own)
                self.tables.lengths[seq.row] += found.tokens
                seq.fidelity = max(seq.fidelity, found.fidelity)
                own = []
            for g, fresh in enumerate(own):
                store.pool(g).release(*fresh)
        finally:
            for g, page in held:
                store.pool(g).release(page)
        return seq.length

    def _copied(self, found: SharedTokens, pages: list[int]) -> bool:
        """Copy shared tokens into raw pages; return whether all of them are finite."""
        said = list[torch.Tensor]()
        for g, (old, page) in enumerate(zip(found.pages, pages, strict=True)):
            status = self.planner.copy(g, old, page)
            if status is not None:
                said.append(status)
            elif not found.finite:
                said.append(self.planner.tails.sums(g, page, found.tokens))
        return all(map(_sound, Later(*said).result()))

    def attach(self, seq: Sequence, limit_pages: int, *, pays: bool = False) -> tuple[int, int]:
        """Attach the longest prefix that is known, worth loading and loaded without failure.

        Args:
            seq: A fresh sequence.
            limit_pages: Most pages.
            pays: Load the prefix at any cost.

        Returns:
            Tokens attached, and how many of them were loaded.
        """
        wanted = limit_pages
        while pages := self.match(seq, wanted):
            loads = self._loads(seq, 0, pages)
            absent = [one for one in _each(loads) if not one.held]
            first = min([one.page_no for one in absent], default=pages)
            tokens = None if pays else (pages - first) * self.page_size
            try:
                stop, _ = self._reserve(absent, pages, tokens)
                if absent and stop == pages:
                    self._tell(seq, self.loader.load_pages(absent, self))
                    stop = min([one.page_no for one in absent if not one.held], default=pages)
            except BaseException:
                drop(_each(loads))
                raise
            if stop == pages:  # the holds of the page loads are the sequence's from here on
                blocks = [[one.block for one in group.values()] for group in loads]
                self._attach(seq, blocks, pages)
                return pages * self.page_size, (pages - first) * self.page_size
            drop(_each(loads))
            wanted = min(stop, pages - 1)
        return 0, 0

    def _reserve(
        self, absent: list[PageLoad], pages: int, tokens: int | None, parts: int = 1
    ) -> tuple[int, list[dict[int, int]]]:
        """Reserve device pages for absent pages if loading them pays, else nothing.

        Args:
            absent: Absent pages of a prefix.
            pages: Pages of the prefix.
            tokens: Tokens that are computed otherwise; None to load them at any cost.
            parts: See `_worth`.

        Returns:
            `pages`, or the end of a prefix for which less is to be loaded, and the pages' `ways`.
        """
        codecs = ways(self.store, absent)
        away = [one.page_no for one, way in zip(absent, codecs, strict=True) if not way]
        blocks = [one.block for one in absent]
        pays = not away and (tokens is None or self._worth(blocks, tokens, parts))
        if pays and reserve(absent, codecs, self.store.allocator.try_allocate):
            return pages, codecs
        return min(away or [one.page_no for one in absent]), codecs

    def attach_whole(self, seq: Sequence, pages: int) -> int | None:
        """Attach so many known pages; return the tokens loaded for it, None if one is missing."""
        tokens, loaded = self.attach(seq, pages)
        return loaded if tokens == pages * self.page_size else None

    def _loads(self, seq: Sequence, first: int, pages: int) -> list[dict[int, PageLoad]]:
        """Return the needed page loads of a known prefix from page `first` on, by group and number.

        Pages on their device are held for the sequence.
        """
        found: list[dict[int, PageLoad]] = []
        for g in range(len(seq.blocks)):
            start = max(first, self.first(g, pages))
            blocks = enumerate(self.store.find_all(seq.keys(g, pages)[start:pages]), start)
            loads = PageLoad.several(self.store, [(b, n) for n, b in blocks if b is not None])
            found.append({one.page_no: one for one in loads})
        return found

    def _tell(self, seq: Sequence, batch: LoadBatch) -> None:
        """Emit events for a finished batch of loads, and update the measured rates."""
        seconds = batch.ended_s - batch.started_s
        for number in sorted({tier for tier, _ in batch.pages}):
            name = self.store.stack.tiers[number].name
            counts = [n for (tier, _), n in batch.pages.items() if tier == number]
            tokens = max(counts) * self.page_size
            n_bytes = batch.n_bytes[number] - batch.joined[number]
            self.bus.emit(Promoted(source=name, tier="device", pages=sum(counts), n_bytes=n_bytes))
            self.bus.emit(Hit(tier=name, tokens=tokens, n_bytes=n_bytes, tenant=seq.owner))
            self.bus.emit(Restored(tier=name, tokens=tokens, n_bytes=n_bytes, seconds=seconds))
        self.measure(batch)

    def measure(self, batch: LoadBatch) -> None:
        """Update the measured rates of tiers from a finished batch of loads."""
        counted_s = compiling.measured_s(batch.started_s, batch.ended_s)
        for number, n_bytes in batch.n_bytes.items() if counted_s > 0 else ():
            name = self.store.stack.tiers[number].name
            self.gate.loaded(name, n_bytes - batch.joined[number], counted_s)

    def attach_resident(self, seq: Sequence, pages: int) -> None:
        """Attach the first `pages` pages, all of which are on their device."""
        blocks = [self._blocks(seq, g, pages) for g in range(len(seq.blocks))]
        for group in blocks:
            self.store.hold(*group)
        self._attach(seq, blocks, pages)

    def emit_hits(self, seq: Sequence, tokens: int, loaded: int, limit: int) -> None:
        """Emit a `Hit` for tokens found on the device, and a `Miss` for tokens found nowhere."""
        if tokens > loaded:
            here = Hit(tier="device", tokens=tokens - loaded, n_bytes=0, tenant=seq.owner)
            self.bus.emit(here)
        if tokens < limit:
            self.bus.emit(Miss(tokens=limit - tokens, tenant=seq.owner))

    def _blocks(self, seq: Sequence, group: int, pages: int) -> list[Block]:
        keys = seq.keys(group, pages)[self.first(group, pages) : pages]
        return [block for block in self.store.find_all(keys) if block is not None]

    def nearest_bytes(self, absent: Iterable[Block]) -> dict[str, int]:
        """Return the bytes of blocks in the nearest tier of each, by the tier's name."""
        stack = self.store.stack
        return {stack.tiers[at].name: n for at, n in stack.copies.nearest_bytes(absent).items()}

    def _worth(self, absent: list[Block], tokens: int, parts: int = 1) -> bool:
        """Return whether loading one of so many equal parts of blocks beats computing tokens."""
        n_bytes = {tier: n // parts for tier, n in self.nearest_bytes(absent).items()}
        return not absent or self.gate.worth(n_bytes, tokens)

    def _attach(self, seq: Sequence, blocks: list[list[Block]], pages: int) -> None:
        self.tables.reserve(pages)
        for g, group in enumerate(blocks):
            first = pages - len(group)
            seq.blocks[g] = [None] * first + list(group)
            seq.first_page[g], seq.published[g] = first, pages
            self.tables.pages[g][seq.row, first:pages] = [block.page for block in group]
            for page_no, block in enumerate(group, first):
                if block.tokens is None:  # a block of an earlier process
                    known = seq.tokens[page_no * self.page_size :][: self.page_size].copy()
                    self.store.index.set_tokens(block, known)
            seq.fidelity = max([seq.fidelity, *[block.fidelity for block in group]])
        self.tables.mark_changed()
        self.tables.lengths[seq.row] = pages * self.page_size

    def absent(self, seq: Sequence, pages: int | None = None) -> list[Block]:
        """Return the blocks of a prompt's known pages that are not on their device.

        Args:
            seq: The prompt's sequence.
            pages: Number of known pages; None for its longest known prefix.
        """
        known = self.match(seq, len(seq.tokens) // self.page_size) if pages is None else pages
        each = (block for g in range(len(seq.blocks)) for block in self._blocks(seq, g, known))
        return [block for block in each if block.page < 0]

    # ---- planning loads

    def lent(self, absent: Items[Block]) -> bool:
        """Return whether these blocks, at least one, lie in memory that their device reads."""
        keys, stack = dict[int, list[bytes]](), self.store.stack
        for block in absent:
            there = not block.going and self.store.pool(block.group).copies is not None
            keys.setdefault(block.tier if there else -1, []).append(block.key)
        lends = {n: n >= 0 and getattr(stack.tiers[n], "lend_all", None) for n in keys}
        return bool(absent) and all(
            lend and all(body is not None for body in lend(keys[n], 0, 0))
            for n, lend in lends.items()
        )

    def resident(self, seq: Sequence, pages: int) -> int:
        """Return the leading pages that are resident in every group, as far as windows reach."""
        every = range(len(seq.blocks))
        lines = [self.store.find_all(seq.keys(g, pages)[:pages]) for g in every]

        def here(group: int, page: int) -> bool:
            block = lines[group][page]
            return block is not None and block.page >= 0

        return self.longest(0, pages, here)

    def plan(
        self, seq: Sequence, resident: int, pages: int, *, computable: bool
    ) -> RestorePlan | None:
        """Reserve device pages for the absent pages of a known prefix, if loading them pays.

        Args:
            seq: The sequence; its resident pages are attached, so that they are not evicted.
            resident: Number of resident pages.
            pages: Number of known pages.
            computable: Pages can be computed instead: it is enough if the load of one page pays.

        Returns:
            The plan; None if no load pays, no tier can be read now, or the pages do not fit.
        """
        while resident < pages:
            page_loads = self._loads(seq, resident, pages)
            absent = [one for one in _each(page_loads) if not one.held]
            stop = max((one.page_no for one in absent), default=-1) + 1
            tokens, parts = (stop - resident) * self.page_size, stop - resident if computable else 1
            end, codecs = self._reserve(absent, pages, tokens, parts)
            if end == pages:
                sources = self.sources(absent, codecs, tokens)
                return RestorePlan(pages, resident, stop, page_loads, *sources, computable)
            drop(_each(page_loads))
            pages = self.match(seq, end)
        return None

    def sources(
        self, absent: list[PageLoad], codecs: list[dict[int, int]], tokens: int
    ) -> tuple[tuple[Source, ...], tuple[int, ...]]:
        """Return the tiers with all absent pages, the most precise first, and their numbers.

        If no tier has all of them, a single source of number -1 stands for the nearest tiers.
        """
        if not all(codecs):
            return (), ()
        store = self.store
        cells = tokens * sum(len(group.layers) for group in store.geometry.groups)

        def bytes_of(one: PageLoad, codec: int) -> int:
            return store.forms[one.group].layouts[codec].page_bytes

        def source(tier: int, chosen: list[int]) -> Source:
            n_bytes = sum(map(bytes_of, absent, chosen))
            usual = Counter(chosen).most_common(1)[0][0]
            return Source(store.stack.tiers[tier].name, CODECS[usual], n_bytes / cells)

        common = set.intersection(*(set(one) for one in codecs))
        if common:
            made = {tier: source(tier, [one[tier] for one in codecs]) for tier in sorted(common)}
            order = sorted(common, key=lambda tier: (CODECS.index(made[tier].codec), tier))
            return tuple(made[tier] for tier in order), tuple(order)
        nearest = [next(iter(one)) for one in codecs]
        main = Counter(nearest).most_common(1)[0][0]
        chosen = [one[tier] for one, tier in zip(codecs, nearest, strict=True)]
        return (source(main, chosen),), (-1,)

    # ---- erasing

    def known_blocks(self, seq: Sequence) -> list[Block]:
        """Return the known blocks of a prompt's pages, in every group."""
        pages, find_all = len(seq.tokens) // self.page_size, self.store.find_all
        lines = [find_all(seq.keys(g, pages)[:pages]) for g in range(len(seq.blocks))]
        return [block for line in lines for block in line if block is not None]


def _sound(said: torch.Tensor | None) -> bool:
    """Return whether a sum of a page is finite, or the status of its decoding is zero."""
    assert said is not None
    numbers = said.numpy()
    return bool(np.isfinite(numbers) if said.is_floating_point() else not numbers.any())


# Prior costs of restores, before any is measured.

_BYTES_PER_S = 1e9
_LEAST_S = 1e-9


class Prior:
    """Prior costs (`policy.restore.Costs`) from measured steps and loads, or guesses.

    Rates not measured yet in this process are taken from earlier processes, else guessed: a link of
    1 GB/s, and computing as slow as loading, so that both are tried. A prior is fixed once it was
    used: `Measured` corrects it by later measurements.

    Args:
        gate: Source of the rates of loads and steps.
    """

    def __init__(self, gate: LoadGate) -> None:
        self._gate = gate
        self._links: dict[str, tuple[float, float]] = {}
        self._token_s = 0.0

    def compute_s(self, request: RestoreRequest, layers: int, tokens: Span) -> float:
        """Return the seconds to compute `layers` layers of these tokens."""
        if not self._token_s:
            gate = self._gate
            earlier_s = gate.earlier.computes.get(gate.model, 0.0)
            self._token_s = gate.seconds_per_token or earlier_s or self._guess_s(request)
        return self._token_s * tokens.size * layers / request.layers

    def suffix_s(self, request: RestoreRequest) -> float:
        """Return the seconds to compute all layers of the suffix."""
        behind = Span(request.tokens, request.tokens + request.suffix)
        return self.compute_s(request, request.layers, behind)

    def load_s(self, request: RestoreRequest, source: int, cells: int) -> float:
        """Return the seconds to load `cells` cells at once, a cell being a token of a layer."""
        tier, _, cell_bytes = request.sources[source]
        if tier not in self._links:
            rates = self._gate.rates.get(tier)
            known = (rates.latency_s, rates.bytes_per_s) if rates is not None else (0.0, 0.0)
            guess = self._gate.earlier.links.get(tier, (0.0, _BYTES_PER_S))
            self._links[tier] = known if known[1] else guess
        latency_s, bytes_per_s = self._links[tier]
        return latency_s + cells * cell_bytes / bytes_per_s

    def _guess_s(self, request: RestoreRequest) -> float:
        """Guess the seconds to compute a token: as long as loading one takes."""
        if not request.sources:
            return _LEAST_S
        tokens = max(1, request.tokens - request.resident)
        return max(_LEAST_S, self.load_s(request, 0, tokens * request.layers) / tokens)


# Scheduling of all restores of a cache: they share one policy, one state, and the links to tiers.
#
# The policy decides, the scheduler executes: it submits the loads that the policy chooses, and
# records in the state which of them arrived. Nothing of it blocks.

_AHEAD_S = 0.05
_LEAST_PAGES, _LEAST_BYTES, _MOST_BYTES = 4, 1 << 22, 1 << 26
"""A tier has as many bytes in flight as it loads in `_AHEAD_S`, within these bounds."""
_WORTH_BYTES = 1 << 19
"""Least bytes of a load: submitting less takes about as long as loading it."""
_MEMORY = 8
"""Weight of earlier measurements in a running mean, relative to a further one."""


class RestoreScheduler:
    """Scheduler of all restores of one cache. Callers hold the KV lock.

    Args:
        restorer: Matches and attaches prefixes.
        add_reused: Adds to the tokens that the cache counts as reused.

    Attributes:
        flights: Loads under way.
        policy: Restore policy; it can be replaced while no restore is under way.
        costs: Measured costs.
        state: Progress of all restores.
        numbers: Numbers of requests to come.
        s_per_byte: Seconds of the driving thread per byte; 0.0 until measured.
    """

    def __init__(self, restorer: PrefixMatcher, add_reused: Callable[[int], None]) -> None:
        self.restorer, self.store, self.flights = restorer, restorer.store, restorer.loader
        self.add_reused = add_reused
        self.gate, self.bus = restorer.gate, restorer.bus
        self.policy: RestorePolicy = make_restore_policy("flowkv")
        self.costs = Measured(Prior(self.gate))
        self.state = State(self.costs)
        self._active: dict[int, RestoreJob] = {}
        self._busy_s: dict[str, float] = {}
        self.numbers = count(1)
        self._asked = 0  # bytes of the loads that the last `pump` submitted
        self._allowance_s, self.s_per_byte = math.inf, 0.0

    # ---- beginnings and ends

    def start_restore(self, seq: Sequence, limit: int, *, computable: bool) -> None:
        """Attach the resident pages of a prompt's prefix, and start to load the others.

        `Sequence.restoration` is the restore afterwards; None if nothing is to be loaded. Pages in
        memory that their device reads directly are copied at once: the policy's calls for parts of
        them would take longer than the copies.

        Args:
            seq: A fresh sequence.
            limit: Most tokens of the prefix.
            computable: See `RestorePlan`.
        """
        size, restorer, started_s = self.restorer.page_size, self.restorer, compiling.now_s()
        known = restorer.match(seq, max(0, limit) // size)
        if self.policy.at_once and self._may_copy(seq, known, limit):
            restorer.restore(seq, limit)
            self._spent(compiling.now_s() - started_s, 0)
            return
        plan = self._look(seq, known, computable) if known else None
        pages = plan.pages if plan is not None else seq.length // size
        behind = restorer.behind(seq, pages, limit)
        if plan is None and behind:
            sources = restorer.sources(behind, ways(self.store, behind), size)
            none: list[dict[int, PageLoad]] = [{} for _ in seq.blocks]
            plan = RestorePlan(pages, pages, pages, none, *sources, computable)
        if plan is None:
            restorer.emit_hits(seq, restorer.extend(seq, limit), 0, limit)
            return
        known = plan.pages * size
        restorer.emit_hits(seq, known, known - seq.length, known if behind else limit)
        self._launch(seq, plan._replace(behind=behind, limit=limit))

    def _may_copy(self, seq: Sequence, known: int, limit: int) -> bool:
        """Return whether a device reads all absent pages, and the time to copy them is allowed."""
        absent = self.restorer.absent(seq, known)
        if not self.restorer.lent(absent):
            return False
        behind = self.restorer.page_behind(seq, known, limit)
        if behind and not self.restorer.lent(behind):
            return False
        expected_s = self.gate.load_s(self.restorer.nearest_bytes([*absent, *behind]))
        return self._allowance_s == math.inf or 0.0 < expected_s <= self._allowance_s

    def begin_whole(self, seq: Sequence, pages: int) -> int | None:
        """Attach `pages` known pages, also those that still load: all or none.

        Returns:
            Tokens that load; None if they are not attached, but for some of them.
        """
        plan, tokens = self._look(seq, pages, computable=False), pages * self.restorer.page_size
        if plan is None:
            return 0 if seq.length == tokens else None
        restoration = self._launch(seq, plan)
        if restoration.settle() == tokens:
            return tokens - restoration.front
        restoration.abandon()
        return None

    def _look(self, seq: Sequence, pages: int, computable: bool) -> RestorePlan | None:
        """Attach the resident ones of known pages; plan to load the others if that pays."""
        resident = self.restorer.resident(seq, pages)
        if resident:
            self.restorer.attach_resident(seq, resident)
        return self.restorer.plan(seq, resident, pages, computable=computable)

    def _launch(self, seq: Sequence, plan: RestorePlan) -> RestoreJob:
        """Start the restore of a plan, and load the page behind the whole ones first."""
        seq.restoration = restoration = RestoreJob(self, seq, plan)
        self._active[restoration.request.number] = restoration
        for tier in {source.tier for source in plan.sources}:
            rates = self.gate.rates.get(tier)
            if rates is None or not rates.samples:
                self.state.untold.add(tier)
        pieces = [LayerSlice(one, 0, one.stripes) for one in plan.behind]
        self.flights.submit(restoration.ahead, () if self.paused else pieces, -1)
        self.pump()
        return restoration

    # ---- the time of the thread that drives them

    def allow(self, seconds: float = math.inf) -> None:
        """Limit the time of this thread for restores to `seconds` from now on.

        Overdrawn time is subtracted; time left over is kept, up to the same amount again. Without
        an argument, the limit ends.
        """
        left = 0.0 if self._allowance_s == math.inf else min(self._allowance_s, seconds)
        self._allowance_s = left + seconds

    @property
    def paused(self) -> bool:
        """Return whether no load is submitted until `allow` grants more time."""
        return self._allowance_s <= 0.0

    @property
    def still(self) -> bool:
        """Return whether no load is under way, and the last `pump` had none to submit.

        A tier may have finished a whole window by now, with more loads to submit in the next one.
        """
        return not (self.paused or self.flights.busy_tiers() or self._asked)

    def _spent(self, seconds: float, asked: int) -> None:
        self._allowance_s -= seconds
        if asked:
            known = self.s_per_byte or seconds / asked
            self.s_per_byte = known + (seconds / asked - known) / _MEMORY

    # ---- loads

    def pump(self) -> None:
        """Process finished loads, and submit further ones up to the tiers' windows."""
        self.store.writes.drain()
        if self._active:
            self.state.now_s = time.perf_counter()
            begun_s = compiling.now_s()
            sources = (source for one in self._active.values() for source in one.request.sources)
            tiers = dict.fromkeys(source.tier for source in sources)
            self._asked = sum(self._fill(tier) for tier in tiers)
            self.store.writes.drain()
            self._spent(compiling.now_s() - begun_s, self._asked)

    def _fill(self, tier: str) -> int:
        """Submit loads chosen by the policy, up to the tier's window; return their bytes."""
        asked, room = 0, self._window(tier) - self.flights.flying_bytes(tier)
        if self._allowance_s < math.inf:
            most = self._allowance_s / self.s_per_byte if self.s_per_byte else self._least(tier)
            room = min(room, most) if self._allowance_s > 0.0 else 0.0
        while room > asked:
            op = self.policy.next_load(self.state, tier) or self._left(tier)
            if op is None:
                break
            self.state.begin(op)
            job = self._active[op.request]
            flight = LoadBatch(job, self._arrived, op, tier)
            asked += self.flights.submit(flight, job.back.pieces(op), job.back.tiers[op.source])
        return asked

    def _window(self, tier: str) -> float:
        rates = self.gate.rates.get(tier)
        expected = rates.bytes_per_s * _AHEAD_S if rates else 0.0
        return min(max(expected, self._least(tier)), _MOST_BYTES)

    def _least(self, tier: str) -> float:
        """Return the least window, a few pages: fixed bytes could be all pages of a small model."""
        pages = (
            source.cell_bytes * one.request.layers * one.request.unit
            for one in self._active.values()
            for source in one.request.sources
            if source.tier == tier
        )
        return min(_LEAST_PAGES * max(pages, default=0.0), _LEAST_BYTES)

    def _left(self, tier: str) -> RestoreLoad | None:
        """Return a load of cells that the policy left to compute though the front is done."""
        for number, one in self._active.items():
            progress = self.state.requests[number]
            if not progress.fronted or one.request.sources[0].tier != tier:
                continue
            left = [
                Span(max(front, progress.lost), back)
                for front, back in zip(progress.front, progress.back, strict=True)
            ]
            for layer, span in enumerate(left):
                if span.size > 0:
                    alike = takewhile(span.__eq__, left[layer : layer + one.request.least])
                    return RestoreLoad(number, Span(layer, layer + len(list(alike))), span)
        return None

    def files(self) -> list[int]:
        """Return file descriptors to poll for the next answer of a tier; none without any."""
        tiers = self.store.stack.tiers
        return files([tiers[number] for number in self.flights.busy_tiers()])

    def _arrived(self, flight: LoadBatch) -> None:
        """Update costs by a finished load, timed from the end of the load before on its link."""
        job, op = cast(RestoreJob, flight.owner), cast(RestoreLoad, flight.op)
        self.state.now_s = time.perf_counter()
        n_bytes = flight.n_bytes.total() - flight.joined.total()
        begun_s = max(flight.started_s, self._busy_s.get(flight.tier, 0.0))
        self._busy_s[flight.tier] = max(flight.ended_s, begun_s)
        seconds = max(0.0, flight.ended_s - begun_s)
        counted_s = compiling.measured_s(begun_s, begun_s + seconds)
        if n_bytes and counted_s > 0 and not flight.lost:
            self.state.untold.discard(flight.tier)
            cells = round(n_bytes / job.request.sources[op.source].cell_bytes)
            self.costs.loaded(job.request, op.source, cells, counted_s)
            if len(flight.n_bytes) == 1:
                (number,) = flight.n_bytes
                self.gate.loaded(self.store.stack.tiers[number].name, n_bytes, counted_s)
        self.tell_span(job.request, flight.tier, op.tokens, op.layers, (begun_s, seconds), n_bytes)
        job._arrived(flight, op, seconds)

    def tell_span(
        self, request: RestoreRequest, engine: str, tokens: Span, layers: Span,
        when: tuple[float, float], n_bytes: int = 0,
    ) -> None:  # fmt: skip
        """Emit a `RestoreSpan` for a piece of a restore; `when` is its start and its seconds."""
        if self.bus.wants(RestoreSpan):
            span = RestoreSpan(
                request=request.number,
                engine=engine,
                token=tokens.first,
                tokens=tokens.size,
                layer=layers.first,
                layers=layers.size,
                started_s=when[0],
                seconds=when[1],
                n_bytes=n_bytes,
            )
            self.bus.emit(span)


# The pages of a restored prefix that load from the back, and their way into a sequence's row.


class IncomingPages:
    """Pages of a restore that load, in every layer group. Callers hold the KV lock.

    Args:
        restorer: Matcher, for the reach of windows.
        plan: Plan of the restore.

    Attributes:
        tiers: Number of the tier of each source; -1 if each page has its own.
    """

    def __init__(self, restorer: PrefixMatcher, plan: RestorePlan) -> None:
        self._restorer, self._planner = restorer, restorer.planner
        self._groups, self.tiers = plan.page_loads, plan.tiers

    def __iter__(self) -> Iterator[PageLoad]:
        return (page_load for group in self._groups for page_load in group.values())

    def pieces(self, op: RestoreLoad) -> Iterator[LayerSlice]:
        """Yield the slices of a load's cells that are not loaded yet."""
        size = self._restorer.page_size
        pages = range(op.tokens.first // size, -(-op.tokens.stop // size))
        for group, stripes in zip(self._groups, self._restorer.stripes, strict=True):
            first, stop = (bisect_left(stripes, layer) for layer in op.layers)
            for page_load in (group[page] for page in pages if page in group):
                for there, run in groupby(range(first, stop), page_load.there):
                    if not there:
                        head, *others = run
                        yield LayerSlice(page_load, head, 1 + len(others))

    def there(self, index: int) -> bool:
        """Return whether a layer of all pages is loaded."""
        stripes = self._restorer.stripes
        at = [each.index(index) if index in each else -1 for each in stripes]
        return all(
            page_load.there(stripe)
            for group, stripe in zip(self._groups, at, strict=True)
            for page_load in (group.values() if stripe >= 0 else ())
        )

    def room(self, pages: int) -> bool:
        """Return whether `pages` further pages fit on the device beside the reserved ones."""
        store, groups = self._restorer.store, range(len(self._groups))
        taken = [store.allocator.try_allocate(g, pages) for g in groups]
        for g, fresh in enumerate(taken):
            store.pool(g).release(*fresh or ())
        return None not in taken

    def reach(self, first: int, stop: int, good: Callable[[PageLoad], bool]) -> int:
        """Return the longest prefix of good pages in every group's window, at least `first`."""

        def has(group: int, page: int) -> bool:
            page_load = self._groups[group].get(page)
            return page_load is not None and good(page_load)

        return self._restorer.longest(first, stop, has)

    # ---- the row of the block tables

    def attach_pages(self, seq: Sequence, first: int, stop: int) -> None:
        """Put pages `[first, stop)` into the sequence's row, also those that are not loaded yet.

        Pages behind a window stay until `close`: the row may still be cut.
        """
        planner = self._planner
        planner.shorten(seq, first)
        for g, group in enumerate(self._groups):
            seen = self._restorer.first(g, stop)
            for page in range(first, stop):
                if page < seen:
                    planner.put(seq, g, page, -1)
                else:
                    group[page].attach_to(seq)
            if not first:
                seq.first_page[g] = seen
            seq.published[g] = stop  # so that `publish` skips pages that are not loaded
        self.drop([one.page_no for one in self if not first <= one.page_no < stop])
        planner.tables.lengths[seq.row] = stop * self._restorer.page_size

    def close(self, seq: Sequence, first: int, whole: int, stop: int) -> int:
        """Cut the row to its loaded pages, and publish them.

        Args:
            seq: The sequence.
            first: Pages of the row before `attach_pages`.
            whole: Pages of the row after `attach_pages`.
            stop: Leading pages that are loaded.

        Returns:
            Pages that are left.
        """
        planner = self._planner
        if stop < whole and seq.state is not None:  # a recurrent state is valid for all of it only
            stop, seq.state = 0, None
        for g in range(len(self._groups)):
            seen = self._restorer.first(g, stop)
            if stop > first and seq.first_page[g] < seen:
                planner.drop_before(seq, g, seen)
        if stop < whole:
            try:
                planner.shorten(seq, stop)
            except StateError:  # a step continued without pages: all of its results are wrong
                planner.shorten(seq, 0)
        seq.published = [min(done, first) for done in seq.published]
        planner.publish(seq)
        return stop

    def fill(self, seq: Sequence, other: Sequence, stop: int, tally: Tally) -> None:
        """Fill missing pages from another sequence, see `RestoreJob.fill`."""
        planner, end = self._planner, stop * self._restorer.page_size
        alike = other.planner is planner and min(other.length, other.known) >= end
        alike &= np.array_equal(other.tokens[:end], seq.tokens[:end])
        alike &= other.publishable or not seq.publishable  # else it may depend on more than tokens
        # Pages that stay private may come from a model that another thread has changed meanwhile.
        for g in range(len(self._groups)) if alike and seq.publishable else ():
            alike &= other.key(g, stop - 1) == seq.key(g, stop - 1)
        if not alike:
            raise StateError(
                "a sequence of another prompt, or too short, cannot fill this one",
                f"Compute the same {end} tokens",
            )
        tally.filled = max(tally.filled, end - other.reused)  # also if a copy fails
        for page_load in self:
            if not page_load.complete:
                g, page = page_load.group, page_load.page_no
                page_load.copy_from(int(planner.tables.pages[g][other.row, page]))
        seq.fidelity = max(seq.fidelity, other.fidelity)

    def drop(self, pages: Iterable[int]) -> None:
        """Drop the page loads with these numbers."""
        numbers = set(pages)
        for group in self._groups:
            for page in numbers & group.keys():
                group.pop(page).drop()


# Accounting of one restore: measured costs, events, spans, and the tokens that were reused.


class Tally:
    """Account of one restore. Callers hold the KV lock.

    Args:
        restores: Scheduler of the cache.
        progress: Progress of the request, for the policy.

    Attributes:
        front: Tokens that were resident or computed when the front was done.
        filled: Tokens behind the front that were computed because their pages did not load.
    """

    def __init__(self, restores: RestoreScheduler, progress: Progress) -> None:
        self._restores, self._request, self._progress = restores, progress.request, progress
        self.front, self.filled = progress.request.resident, 0
        self._n_bytes: Counter[int] = Counter()
        self._seconds: dict[int, float] = {}
        self._pages: set[int] = set()
        self._failed, self._exposed_s, self._suffix_s = 0, 0.0, 0.0
        self._layer_s = 0.0  # time at which the suffix started its latest layer
        self._known = True  # whether the time of the suffix was measured

    def loaded(self, flight: LoadBatch, op: RestoreLoad, seconds: float) -> None:
        """Record a finished load, and the seconds of its link."""
        self._failed += flight.lost
        if flight.n_bytes:
            (first, stop), unit = op.tokens, self._request.unit
            self._pages.update(range(first // unit, -(-stop // unit)))
        for tier, n_bytes in flight.n_bytes.items():
            self._n_bytes[tier] += n_bytes
            self._seconds[tier] = self._seconds.get(tier, 0.0) + seconds

    def waited(self, index: int | None, begun_s: float) -> None:
        """Record a wait from `begun_s` until now for a layer, which the suffix computes next.

        None is a wait for all layers, without a suffix that would wait.
        """
        now, request = time.perf_counter(), self._request
        self._exposed_s += now - begun_s
        if index is None or index != self._progress.suffix or not request.suffix:
            return  # or a repeated wait, or layers in another order
        self._behind(begun_s)
        if self._progress.there(index):
            self._restores.state.begin(Suffix(request.number, index))
            self._layer_s = now

    def _behind(self, until_s: float) -> None:
        """Record that the suffix finished its latest layer at `until_s`."""
        layer = self._progress.suffix - 1
        if self._progress.answered <= layer:
            self._restores.state.end(Suffix(self._request.number, layer))
            seconds = max(0.0, until_s - self._layer_s)
            counted_s = compiling.measured_s(self._layer_s, self._layer_s + seconds)
            self._suffix_s += counted_s
            self._known &= counted_s > 0 or not seconds
            request, layers = self._request, Span(layer, layer + 1)
            tokens = Span(request.tokens, request.tokens + request.suffix)
            self._restores.tell_span(request, "suffix", tokens, layers, (self._layer_s, seconds))

    def ended(self, seq: Sequence, stop: int, *, ok: bool) -> None:
        """Emit the events of a restore that is over, and learn the cost of the suffix.

        Args:
            seq: The sequence.
            stop: Pages that are attached.
            ok: Whether the suffix is computed.
        """
        self._behind(time.perf_counter())
        request, unit, bus = self._request, self._request.unit, self._restores.bus
        if ok and self._known and self._suffix_s and self._progress.answered == request.layers:
            self._restores.costs.suffixed(request, self._suffix_s)
        front = seq.length if seq.length < stop * unit else self.front
        came = [page for page in self._pages if self.front <= page * unit < stop * unit]
        loaded, total = len(came) * unit, self._n_bytes.total()
        for number, n_bytes in self._n_bytes.items():
            name = self._restores.store.stack.tiers[number].name
            part = loaded * n_bytes // total if total else 0
            bus.emit(Hit(tier=name, tokens=part, n_bytes=n_bytes, tenant=seq.owner))
            seconds = self._seconds[number]
            bus.emit(Restored(tier=name, tokens=part, n_bytes=n_bytes, seconds=seconds))
        computed = max(0, front - request.resident)
        if computed:
            bus.emit(Miss(tokens=computed, tenant=seq.owner))
        if bus.wants(RestoreEnded):
            known = self._restores.gate.seconds_per_token > 0 and bool(self._n_bytes)
            ended = RestoreEnded(
                request=request.number,
                tokens=stop * unit,
                resident_tokens=request.resident,
                computed_tokens=computed,
                loaded_tokens=loaded,
                n_bytes=total,
                started_s=request.arrived_s,
                seconds=time.perf_counter() - request.arrived_s,
                exposed_s=self._exposed_s,
                bound_s=lower_bound(request, self._restores.costs) if known else 0.0,
                failed=self._failed,
                tenant=seq.owner,
            )
            bus.emit(ended)

    def reused(self, seq: Sequence, tokens: int) -> None:
        """Count the tokens up to `tokens` that were loaded behind the front as reused."""
        came = max(0, tokens - self.front - self.filled)
        if not tokens:
            came = -seq.reused  # neither a saved state nor its prefix was used
        seq.reused += came
        self._restores.add_reused(came)


_PAUSE_S, _SOON_S = 0.002, 0.02


class Late(FlowKVError, TimeoutError):
    """Error of a layer that did not arrive in time for some pages, or failed to load.

    Args:
        layer: Index of the layer in the model.
    """

    def __init__(self, layer: int) -> None:
        super().__init__(f"layer {layer} of some pages did not arrive in time", "Compute them")
        self.layer = layer


class RestorePhase(Enum):
    """States of a restore.

    FRONT -> settle -> BEHIND -> finish, cancel -> OVER
    FRONT -> settle without a page left to load, finish, cancel, abandon -> OVER
    BEHIND -> a failed load, cancel within a step -> BROKEN -> finish, cancel -> OVER
    BEHIND, BROKEN -> abandon -> ABANDONED
    """

    FRONT = "the front is computed while the back is loaded"
    BEHIND = "all pages are in the row; the rest is loaded behind the suffix"
    BROKEN = "as BEHIND, but some pages will not come: they are filled, or cut off at the end"
    OVER = "it is over"
    ABANDONED = "its sequence was closed while pages were missing in the row"


class RestoreJob:
    """Restore of one sequence's prefix. Thread-safe; made by `KV.open(..., wait=False)`.

    Args:
        restores: Scheduler of the cache.
        seq: The sequence, with its resident pages attached.
        plan: Pages to load.

    Attributes:
        request: The request, for the policy.
        phase: State of the restore.
        back: Pages that are loaded from the back.
        ahead: Load of the page behind them, submitted first.
    """

    def __init__(self, restores: RestoreScheduler, seq: Sequence, plan: RestorePlan) -> None:
        self.bind(seq)
        self._restores, self._planner = restores, restores.restorer.planner
        self._guard, self._size = self._planner.guard, self._planner.page_size
        self._behind, self._limit = plan.behind, plan.limit
        self._whole, self._beyond, self._cut = plan.pages, 0, False
        self.ahead = LoadBatch(self, restores.restorer.measure)
        self.back, self._stop = IncomingPages(restores.restorer, plan), plan.pages
        self.phase = RestorePhase.FRONT
        self._computing: Compute | None = None  # the part of the front handed out
        self._hoping_s = 0.0  # when `next` began to wait
        self.request = RestoreRequest(
            number=next(restores.numbers),
            tokens=plan.stop * self._size,
            suffix=seq.known - plan.pages * self._size,
            layers=len(restores.restorer.index),
            resident=plan.resident * self._size,
            unit=self._size,
            sources=plan.sources,
            computable=plan.computable,
            whole=True,
            least=restores.restorer.least_layers(plan),
            shared=restores.restorer.decodes(plan),
            arrived_s=time.perf_counter(),
        )
        self._progress = restores.state.add(self.request)
        self._tally = Tally(restores, self._progress)

    @property
    def seq(self) -> Sequence:
        """Sequence of the restore, which refers to the restore strongly, but not vice versa."""
        return cast(Sequence, self._whose())

    def bind(self, seq: Sequence) -> None:
        """Refer to the sequence, without keeping it open.

        The collector clears references before finalizers run, which therefore bind it again.
        """
        self._whose = weakref.ref(seq)

    @staticmethod
    def of(seq: Sequence) -> RestoreJob | None:
        """Return the restore of a sequence's prefix; None if none is under way."""
        return cast("RestoreJob | None", seq.restoration)

    @property
    def tokens(self) -> int:
        """Current end of the prefix, in tokens."""
        return self.page_tokens + (self._beyond if self._stop == self._whole else 0)

    @property
    def page_tokens(self) -> int:
        """Current number of tokens in the whole pages of the prefix."""
        return self._stop * self._size

    @property
    def settled(self) -> bool:
        """Return whether the front is done."""
        return self.phase is not RestorePhase.FRONT

    @property
    def front(self) -> int:
        """Tokens that were resident or computed when the front was done."""
        return self._tally.front

    @property
    def lacks(self) -> bool:
        """Return whether pages in the sequence's row are not loaded yet."""
        with self._guard:
            return self._in_row and not self._there()

    @property
    def gone(self) -> bool:
        """Return whether one of its pages was forgotten meanwhile."""
        return any(one.block.gone for one in self)

    @property
    def quiet(self) -> bool:
        """Return whether no load for it is under way."""
        return not (self._restores.flights.in_flight(self) or self._restores.paused)

    @property
    def exhausted(self) -> bool:
        """Return whether no load is under way or to be submitted, so that a wait would not end."""
        return self._restores.still

    def __iter__(self) -> Iterator[PageLoad]:
        """Yield all page loads of the restore."""
        yield from self.back
        yield from self._behind

    # ---- loads

    def _arrived(self, flight: LoadBatch, op: RestoreLoad, seconds: float) -> None:
        """Take a finished load into account. Callers hold the KV lock."""
        state = self._restores.state
        self._tally.loaded(flight, op, seconds)
        if not flight.lost:
            state.end(op)
            return
        (state.fail if self.request.computable else state.end)(op)
        missing = [piece.page_load.page_no for piece in self.back.pieces(op)]
        if missing and self._in_row:
            self.phase = RestorePhase.BROKEN
        elif missing and not self.request.computable:  # the prefix ends where it is missing
            self._stop = min(self._stop, *missing)

    # ---- the front

    def next(self, most: int | None = None) -> int:
        """Return the tokens to compute next, from the sequence's length on; 0 ends the front.

        Args:
            most: Most tokens at once, in whole pages, but at least one page.
        """
        while (found := choose([self], most)) is None and self._hopes():
            self._rest()
        return found[1] if found is not None else 0

    def _hopes(self) -> bool:
        """Return whether to wait a moment for the first load of a tier that was never measured.

        If the front is left to loads, a slow tier is waited for; waiting to measure it first takes
        no longer than computing a page.
        """
        with self._guard:
            restores, request = self._restores, self.request
            tiers = (source.tier for source in request.sources)
            if self.settled or self._progress.met or restores.state.untold.isdisjoint(tiers):
                return False
            page = Span(request.resident, request.resident + request.unit)
            page_s = restores.costs.compute_s(request, request.layers, page)
            # Loads may have begun long after the prompt arrived.
            self._hoping_s = self._hoping_s or time.perf_counter()
            return not restores.still and time.perf_counter() - self._hoping_s < page_s

    def pump(self) -> None:
        """Process finished loads and computed parts, and submit further loads. Never waits."""
        with self._guard:
            if not self.settled:
                self._advance()
            if not self.settled or self._in_row:
                self._restores.pump()

    def _hand_out(self, op: Compute, most: int | None) -> int:
        """Hand out a compute op of the policy; return its tokens. Callers hold the KV lock."""
        first, stop = op.tokens
        if not (self._restores.gate.seconds_per_token or self._restores.costs.tried):
            most = self._size  # one page measures what computing costs
        if most is not None:
            stop = min(stop, first + max(most // self._size, 1) * self._size)
        if op.layers != Span(0, self.request.layers) or first != self.seq.length:
            return 0
        op = op._replace(tokens=Span(first, stop))
        if not self.back.room(op.tokens.size // self._size):
            return 0  # computing needs room beside the pages reserved for loads
        self._restores.state.begin(op)
        self._computing = op
        self.back.drop(range(first // self._size, stop // self._size))
        return op.tokens.size

    def computed(
        self, first: int, stop: int, started_s: float, host_s: float
    ) -> Callable[[float], None]:
        """Emit the span of tokens `[first, stop)`, computed in a step begun at `started_s`.

        Args:
            first: First token.
            stop: One past the last.
            started_s: Begin of the step.
            host_s: Seconds of the host for each token.

        Returns:
            A call that learns from the seconds of a token on its device, without compilation.
        """
        tokens, request, costs = Span(first, stop), self.request, self._restores.costs
        when, layers = (started_s, host_s * tokens.size), Span(0, request.layers)
        self._restores.tell_span(request, "compute", tokens, layers, when)
        return lambda each_s: costs.computed(request, layers.size, tokens, each_s * tokens.size)

    def _advance(self) -> None:
        """Record tokens computed since the last call, also those not handed out here."""
        length, state, op = self.seq.length, self._restores.state, self._computing
        if op is not None and length >= op.tokens.stop:
            state.end(op)
            self._computing = op = None
        front = self._progress.front[0]
        stop = min(length // self._size * self._size, *self._progress.back)
        if op is None and front < stop:
            extra = Compute(self.request.number, Span(0, self.request.layers), Span(front, stop))
            state.begin(extra)
            state.end(extra)

    @property
    def soon(self) -> bool:
        """Return whether the page behind the whole ones may arrive in a moment, see `meet`."""
        return self.ahead.left > 0 and time.perf_counter() - self.ahead.started_s < _SOON_S

    def meet(self) -> None:
        """Wait for the page behind the whole ones if it loads, so that `settle` can use it."""
        self.pump()
        while self.ahead.left and not self.settled:
            self._rest()
            self.pump()

    def settle(self, limit: int | None = None) -> int:
        """End the front: put all pages into the sequence's row, also those that still load.

        Args:
            limit: Most tokens of the prefix, a length that its caller relies on already.

        Returns:
            The sequence's new length; less than `tokens` before if the rest cannot be loaded.

        Raises:
            StateError: The sequence is closed, suspended or in a step.
        """
        with self._guard:
            if self.settled:
                return self.seq.length
            self._planner.idle(self.seq)
            self.pump()
            first, seq, restorer = self.seq.length // self._size, self.seq, self._restores.restorer
            self._tally.front = first * self._size
            # Pages handed out to compute are not loaded any more, so a gap may be left.
            hole = self._computing is not None or self._progress.lost > first * self._size
            self._stop = first if hole else self.back.reach(first, self._stop, lambda one: True)
            if self._stop > first:
                self.back.attach_pages(seq, first, self._stop)
            self.phase = RestorePhase.BEHIND
            self._restores.state.fronted(self.request.number)
            # Extend the prefix by the known tokens of the page behind its whole ones.
            end = self._whole * self._size
            most = self._limit if limit is None else min(limit, self._limit)
            if seq.length == end < most:
                self._beyond = restorer.extend(seq, most, self._behind) - end
            if self._behind:  # not reported when the restore began
                restorer.emit_hits(seq, self._beyond, 0, max(0, most - end))
            drop(self._behind)
            if self._stop > first:
                self._restores.pump()
            else:
                self._end(ok=True)
            return seq.length

    # ---- the rest

    @property
    def _in_row(self) -> bool:
        """Return whether pages that may still load are in the sequence's row."""
        return self.phase in (RestorePhase.BEHIND, RestorePhase.BROKEN)

    def wait(self, layer: int) -> None:
        """Block until a layer of all pages is loaded and verified, see `Step.awaits`.

        Raises:
            Late: The layer will not arrive. After `fill`, `wait` can be called again.
        """
        if not self._until(self._restores.restorer.index[layer]):
            raise Late(layer)

    def _until(self, index: int | None) -> bool:
        """Wait until a layer, or all of them (None), is loaded; return False if it will not be."""
        begun_s = time.perf_counter()
        while (there := self.poll(index)) is None:
            self._rest()
        with self._guard:
            if self._in_row:
                self._tally.waited(index, begun_s)
        return there

    def _rest(self) -> None:
        with self._guard:
            self._restores.allow()  # this thread has nothing else to do
            waited_for = self._restores.files()
        rest(waited_for, _PAUSE_S)

    def _there(self, index: int | None = None) -> bool:
        """Return whether one layer, or all of them (None), is loaded."""
        there = self.back.there if self.phase is RestorePhase.BROKEN else self._progress.there
        return all(map(there, range(self.request.layers) if index is None else (index,)))

    def poll(self, index: int | None = None) -> bool | None:
        """Return whether a layer, or all of them (None), is loaded after `settle`.

        Returns:
            None while some pages load; the call never waits.
        """
        with self._guard:
            self.pump()
            if not self._in_row:
                return self.phase is not RestorePhase.ABANDONED and not self._cut
            if not (there := self._there(index)):
                if self._restores.still and not self._progress.restored:
                    self.phase = RestorePhase.BROKEN  # no load is under way or to come
                    there = self._there(index)
                if not there:
                    return False if self.phase is RestorePhase.BROKEN else None
            self._restores.store.join()
            return True

    def complete(self) -> bool:
        """Settle the restore and wait until all pages are loaded; return False if some fail."""
        self.meet()
        self.settle()
        return self._until(None)

    def fill(self, other: Sequence) -> None:
        """Fill missing pages from another sequence, also within a step that waits for them.

        Args:
            other: A sequence of the same tokens and salts, `page_tokens` long at least.

        Raises:
            CapacityError: A page that a tier may still write to cannot be replaced.
            StateError: The other sequence has other tokens, or too few; or no page is missing.
        """
        with self._guard:
            if not self._in_row:
                raise StateError("no page of the restore is missing", "Fill it before its end")
            self._restores.store.join()
            self.back.fill(self.seq, other, self._stop, self._tally)

    # ---- the end

    def finish(self, *, ok: bool = True) -> int:
        """End the restore: publish the loaded pages, and cut missing ones off. Idempotent.

        The tokens that were loaded behind the front count as reused.

        Args:
            ok: Whether the step that waited for it was committed.

        Returns:
            The sequence's length.

        Raises:
            StateError: The sequence is in a step.
        """
        with self._guard:
            seq, whole = self.seq, self._stop
            if self._in_row and not seq.closed:
                self._planner.check_ready(seq)
                seq.restoration = None  # from here on, its row is like any other
                self._restores.store.join()
                first = self.front // self._size
                if not (ok and self._there()):
                    self._stop = self.back.reach(first, whole, lambda one: one.complete)
                self._stop = self.back.close(seq, first, whole, self._stop)
            self._cut |= self._stop < whole
            self._end(ok=ok)
            return seq.length

    def cancel(self) -> None:
        """Cancel the restore; a settled one keeps its leading complete pages."""
        with self._guard:
            if self._in_row and self._planner.stepping(self.seq):
                self.phase = RestorePhase.BROKEN  # the step gets `Late`, and its caller finishes
                return
            self.finish(ok=False)

    def abandon(self) -> None:
        """Cancel the restore of a sequence that is about to be closed."""
        with self._guard:
            self._end(ok=False, abandoned=self._in_row)

    def _end(self, *, ok: bool, abandoned: bool = False) -> None:
        if self.phase in (RestorePhase.OVER, RestorePhase.ABANDONED):
            return
        restores, number, seq = self._restores, self.request.number, self.seq
        counts = self._in_row and not abandoned
        self.phase = RestorePhase.ABANDONED if abandoned else RestorePhase.OVER
        self._tally.ended(seq, self._stop, ok=ok)
        if counts:
            self._tally.reused(seq, self.tokens)
        del restores._active[number]
        restores.flights.cancel(self)
        restores.state.remove(number)
        restores.policy.forget(number)
        self.back.drop([one.page_no for one in self.back])
        drop(self._behind)
        if seq.restoration is self:
            seq.restoration = None


def choose(
    restorations: Iterable[RestoreJob], most: int | None = None
) -> tuple[RestoreJob, int] | None:
    """Return the restore that the policy computes next.

    Args:
        restorations: Restores of one cache; settled ones are skipped.
        most: See `RestoreJob.next`.

    Returns:
        The restore and its number of tokens, 0 if only its suffix is left; None if all wait for
        loads.
    """
    jobs = [*restorations]
    if not jobs:
        return None
    restores = jobs[0]._restores
    with jobs[0]._guard:
        mine = [one for one in jobs if not one.settled]
        for one in mine:
            one._advance()
        restores.pump()
        for one in mine:
            if one._computing is not None:
                return one, one._computing.tokens.stop - one.seq.length
        restores.state.now_s = time.perf_counter()
        numbers = [one.request.number for one in mine]
        op = restores.policy.next_compute(restores.state, numbers) if mine else None
        if op is None:
            return None
        one = restores._active[op.request]
        return one, one._hand_out(op, most) if isinstance(op, Compute) else 0
