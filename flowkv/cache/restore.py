"""Restores prefixes from both ends: loads from the back, computes from the front.

    restoration = seq.restoration             # of kv.open(tokens, wait=False)
    while tokens := restoration.next(): ...   # compute so many, in a step
    restoration.settle()                      # the front is done; the rest comes behind the suffix
    with kv.step([seq], [rest]) as step: ...  # layer i waits for layer i of all pages
    restoration.finish(ok=True)

While the front is computed, pages come in from the back and are kept beside the sequence. `settle`
puts them into its line, also those that are still on their way: whoever attends to a layer then
waits for it first. What does not come is `Late`, and is computed.
"""

from __future__ import annotations

import math
import threading
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
from flowkv.cache.later import Later
from flowkv.cache.load import LayerSlice, LoadBatch, PageLoad, PageLoader, reserve, ways
from flowkv.cache.mover import files, rest
from flowkv.cache.sequence import Sequence
from flowkv.cache.tail import SharedTokens
from flowkv.core import compiling
from flowkv.core.errors import FlowKVError, StateError
from flowkv.core.geometry import CODECS
from flowkv.observe.events import (
    Bus,
    Hit,
    Miss,
    Promoted,
    Restored,
    RestoreEnded,
    RestoreSpan,
)
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

# What is known of a prompt, and how it comes into a sequence's pages.


class RestorePlan(NamedTuple):
    """A known prefix that is not on its device.

    Attributes:
        pages: Of the whole prefix.
        resident: Leading ones that are on the device in every group.
        stop: One past the last page that is not.
        page_loads: Per group: the pages behind the resident ones that are needed, by number.
        sources: Where they can be loaded from.
        tiers: Number of the tier of each source; -1 where pages lie on various ones.
    """

    pages: int
    resident: int
    stop: int
    page_loads: list[dict[int, PageLoad]]
    sources: tuple[Source, ...]
    tiers: tuple[int, ...]


def drop(loads: Iterable[PageLoad]) -> None:
    """Wants none of these pages any more."""
    for one in loads:
        one.drop()


def _each(groups: Iterable[dict[int, PageLoad]]) -> list[PageLoad]:
    return [one for group in groups for one in group.values()]


_WORTH_COPYING = 8
"""A prompt of which a smaller part of a page is known, as its first token, is computed whole."""


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
        self.gate, self.bus, self.loader = gate, bus, loader
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
        for g in groups:
            if self.planner.window(g) is not None:
                self._discover(seq, g, 0, pages)
        return self._within(0, pages, lambda g, page: self.find(seq, g, page) is not None)

    def longest(self, first: int, stop: int, has: Callable[[int, int], bool]) -> int:
        """The most pages that every group has as far as its window reaches.

        Args:
            first: So many all groups have.
            stop: No more than that.
            has: Whether a group has a page.
        """
        for g in range(len(self.planner.geometry.groups)):
            if self.planner.window(g) is None:
                stop = next((page for page in range(first, stop) if not has(g, page)), stop)
        return self._within(first, stop, has)

    def _within(self, first: int, stop: int, has: Callable[[int, int], bool]) -> int:
        """The longest prefix up to `stop` of which sliding groups have all that they still see."""
        groups = range(len(self.planner.geometry.groups))
        sliding = [g for g in groups if self.planner.window(g) is not None]

        def gap(g: int) -> int:
            # The last one. With fewer pages windows begin no later: none that ends behind it fits.
            pages = range(stop - 1, max(first, self.first(g, stop)) - 1, -1)
            return next((page for page in pages if not has(g, page)), stop)

        while (least := min(map(gap, sliding), default=stop)) < stop:
            stop = least
        return stop

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
        page, keys, find = 0, seq.keys(group, limit), self.store.find
        for asked in (False, True):
            while page < limit and find(keys[page]) is not None:
                page += 1
            if page < limit and not asked:
                self._discover(seq, group, page, limit)
        return page

    def _discover(self, seq: Sequence, group: int, first: int, limit: int) -> None:
        if first < limit and self.store.stack.watches:
            keys = [seq.key(group, page) for page in range(first, limit)]
            self.store.stack.discover(
                keys,
                group=group,
                parent=seq.parent_key(group, first),
                tenant=seq.tenant,
                namespace=seq.namespace,
            )

    # ---- attaching it

    def restore(self, seq: Sequence, limit: int, *, pays: bool = False) -> int:
        """Attaches a known prefix of at most `limit` tokens to a fresh sequence.

        Args:
            seq: The sequence.
            limit: Most tokens.
            pays: See `attach`.

        Returns:
            Tokens attached.
        """
        self.store.expire()
        pages = max(0, limit) // self.page_size
        _, loaded = self.attach(seq, pages, pays=pays)
        if self.planner.overflow is not None and seq.length < pages * self.page_size:
            self.planner.overflow.adopt(seq, self.match(seq, pages))
        behind = self.behind(seq, seq.length // self.page_size, limit)
        try:
            if behind:
                self.measure(self.loader.load(behind, self))
            tokens = self.extend(seq, limit, behind)
        finally:
            drop(behind)
        self.report(seq, tokens, loaded, limit)
        return tokens

    def behind(self, seq: Sequence, pages: int, limit: int) -> list[PageLoad]:
        """What tiers have of a prompt behind its whole pages, for `extend` to copy from.

        Args:
            seq: Its sequence.
            pages: Whole pages of its prefix.
            limit: Most tokens.

        Returns:
            A page for each group, to be loaded to a place of its own; none if they cannot be had.
        """
        first, size = pages * self.page_size, self.page_size
        stop = min(limit, first + size - 1)
        if stop <= first:
            return []
        blocks: list[Block | None] = []
        if limit == stop and len(seq.tokens) >= first + size:
            for g in range(len(seq.blocks)):
                self._discover(seq, g, pages, pages + 1)
                audited = self.store.samples.has(seq.key(g, pages))  # a page that is its block's is
                blocks.append(None if audited else self.find(seq, g, pages))
        if not blocks or None in blocks:
            blocks = [*self.planner.tails.stored(seq, pages, stop)]
        found = [block for block in blocks if block is not None and block.page < 0]
        count = min([stop - first, *(block.tail for block in found if block.tail)])
        if not found or len(found) < len(blocks) or not self._worth(found, count):
            return []
        loads = [PageLoad(self.store, block, pages, own=True) for block in found]
        codecs = ways(self.store, loads)
        if all(codecs) and reserve(loads, codecs, self.store.try_allocate):
            return loads
        drop(loads)
        return []

    def extend(self, seq: Sequence, limit: int, behind: Items[PageLoad] = ()) -> int:
        """Copies what memory has of the page behind a prompt's whole ones; its tokens then.

        Args:
            seq: A sequence of whole pages.
            limit: Most tokens.
            behind: What was to be loaded of that page.
        """
        planner, store, length = self.planner, self.store, seq.length
        found = planner.tails.find(seq, length // self.page_size, limit)
        few = min(self.page_size // _WORTH_COPYING, limit)
        if found is not None and not length and found.tokens < few:
            found = None
        if behind and all(one.complete and not one.block.gone for one in behind):
            store.join()  # on a GPU they may be on their way up
            count = min(limit - length, *(one.block.tail or self.page_size for one in behind))
            if found is None or found.tokens < count:
                fidelity = max(max(one.fidelity, one.codec) for one in behind)
                full = not any(one.block.tail for one in behind)
                pages = [one.page for one in behind]
                found = SharedTokens(count, fidelity, pages, full)
        if found is None:
            return length
        held = [*enumerate(found.pages)]
        for g, page in held:  # it may be given up for the page that it is copied to
            store.pool(g).share(page)
        try:
            own = [store.try_allocate(g, 1) or [] for g, _ in held]
            if all(own) and self._copied(found, [page for (page,) in own]):
                planner.occupy(seq, own)
                self.tables.lengths[seq.row] += found.tokens
                seq.fidelity = max(seq.fidelity, found.fidelity)
                own = []
            for g, fresh in enumerate(own):
                for page in fresh:
                    store.pool(g).release(page)
        finally:
            for g, page in held:
                store.pool(g).release(page)
        return seq.length

    def _copied(self, found: SharedTokens, pages: list[int]) -> bool:
        """Copies what was found into raw pages; whether it is sound."""
        said = list[torch.Tensor]()
        for g, (old, page) in enumerate(zip(found.pages, pages, strict=True)):
            status = self.planner.copy(g, old, page)
            if status is not None:
                said.append(status)
            elif not found.finite:
                said.append(self.planner.tails.sums(g, page, found.tokens))
        return all(map(_sound, Later(*said).get()))

    def attach(self, seq: Sequence, limit_pages: int, *, pays: bool = False) -> tuple[int, int]:
        """Attaches the longest prefix that is known, worth loading and really there.

        Args:
            seq: A fresh sequence.
            limit_pages: Most pages.
            pays: It is worth loading whatever that takes.

        Returns:
            Tokens attached, and how many of them were loaded.
        """
        wanted = limit_pages
        while pages := self.match(seq, wanted):
            loads = self.loads(seq, 0, pages)
            absent = [one for one in _each(loads) if not one.held]
            first = min((one.page_no for one in absent), default=pages)
            try:
                stop = self._bring(seq, absent, first, pages, pays=pays)
            except BaseException:
                drop(_each(loads))
                raise
            if stop == pages:  # what each page is held for is its sequence from here on
                blocks = [[one.block for one in group.values()] for group in loads]
                self._attach(seq, blocks, pages)
                return pages * self.page_size, (pages - first) * self.page_size
            drop(_each(loads))
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

    def _bring(
        self, seq: Sequence, absent: list[PageLoad], first: int, pages: int, *, pays: bool
    ) -> int:
        """Loads what is not on its device; where the prefix ends now, `pages` if all came."""
        tokens = (pages - first) * self.page_size
        if not pays and not self._worth([one.block for one in absent], tokens):
            return first
        codecs = ways(self.store, absent)
        away = [one.page_no for one, way in zip(absent, codecs, strict=True) if not way]
        if away or not reserve(absent, codecs, self.store.try_allocate):
            return min(away, default=first)
        if absent:
            self._tell(seq, self.loader.load(absent, self))
        return min((one.page_no for one in absent if not one.held), default=pages)

    def _tell(self, seq: Sequence, batch: LoadBatch) -> None:
        """Announces what was loaded, and what that took."""
        seconds = batch.ended_s - batch.started_s
        counted_s = compiling.measured_s(batch.started_s, batch.ended_s)
        for number in sorted({tier for tier, _ in batch.pages}):
            name = self.store.stack.tiers[number].name
            count = max(n for (tier, _), n in batch.pages.items() if tier == number)
            total = sum(n for (tier, _), n in batch.pages.items() if tier == number)
            tokens, n_bytes = count * self.page_size, batch.n_bytes[number] - batch.joined[number]
            self.bus.emit(Promoted(source=name, tier="device", pages=total, n_bytes=n_bytes))
            self.gate.loaded(name, n_bytes, counted_s)
            self.bus.emit(Hit(tier=name, tokens=tokens, n_bytes=n_bytes, tenant=seq.owner))
            self.bus.emit(Restored(tier=name, tokens=tokens, n_bytes=n_bytes, seconds=seconds))

    def measure(self, batch: LoadBatch) -> None:
        """Learns from what was loaded what its tiers take."""
        counted_s = compiling.measured_s(batch.started_s, batch.ended_s)
        for number, n_bytes in batch.n_bytes.items():
            own = n_bytes - batch.joined[number]
            if own and counted_s > 0:
                self.gate.loaded(self.store.stack.tiers[number].name, own, counted_s)

    def attach_resident(self, seq: Sequence, pages: int) -> None:
        """Attaches so many leading pages, all of which are on their device."""
        blocks = [self._blocks(seq, g, pages) for g in range(len(seq.blocks))]
        for group in blocks:
            for block in group:
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
        keys = seq.keys(group, pages)[self.first(group, pages) : pages]
        return [block for block in map(self.store.find, keys) if block is not None]

    def _worth(self, absent: list[Block], tokens: int) -> bool:
        n_bytes: dict[str, int] = {}
        for block in absent:
            number = self.store.stack.locate(block)
            tier = self.store.stack.tiers[number].name
            n_bytes[tier] = n_bytes.get(tier, 0) + self.store.stack.body_bytes(block, number)
        return not absent or self.gate.worth(n_bytes, tokens)

    def _attach(self, seq: Sequence, blocks: list[list[Block]], pages: int) -> None:
        self.tables.reserve(pages)
        for g, group in enumerate(blocks):
            first = pages - len(group)
            seq.blocks[g] = [None] * first + list(group)
            seq.first_page[g], seq.published[g] = first, pages
            self.tables.pages[g][seq.row, first:pages] = [block.page for block in group]
            for page_no, block in enumerate(group, first):
                if block.tokens is None:  # of an earlier process
                    known = seq.tokens[page_no * self.page_size :][: self.page_size].copy()
                    self.store.index.learn(block, known)
            seq.fidelity = max([seq.fidelity, *(block.fidelity for block in group)])
        self.tables.touch()
        self.tables.lengths[seq.row] = pages * self.page_size

    def absent(self, seq: Sequence) -> list[Block]:
        """Blocks of a prompt's longest known prefix that are not on their device."""
        pages = self.match(seq, len(seq.tokens) // self.page_size)
        known = [self._blocks(seq, g, pages) for g in range(len(seq.blocks))]
        return [block for blocks in known for block in blocks if block.page < 0]

    # ---- what is on its way

    def resident(self, seq: Sequence, pages: int) -> int:
        """Leading pages that are on their device, in every group and as far as windows reach."""
        lines = [seq.keys(g, pages) for g in range(len(seq.blocks))]
        find = self.store.find

        def here(group: int, page: int) -> bool:
            block = find(lines[group][page])
            return block is not None and block.page >= 0

        return self.longest(0, pages, here)

    def plan(self, seq: Sequence, resident: int, pages: int) -> RestorePlan | None:
        """Reserves the pages that a known prefix will lie in.

        Args:
            seq: Whose; its resident pages are attached, so that nothing evicts them.
            resident: How many those are.
            pages: All that are known.

        Returns:
            None if nothing of it can be loaded: it is out of reach for now, or does not fit.
        """
        while resident < pages:
            page_loads = self.loads(seq, resident, pages)
            absent = [one for one in _each(page_loads) if not one.held]
            codecs = ways(self.store, absent)
            stop = max((one.page_no for one in absent), default=-1) + 1
            sources, tiers = self.sources(absent, codecs, (stop - resident) * self.page_size)
            if sources and reserve(absent, codecs, self.store.try_allocate):
                return RestorePlan(pages, resident, stop, page_loads, sources, tiers)
            drop(_each(page_loads))
            away = [one.page_no for one, way in zip(absent, codecs, strict=True) if not way]
            if not away:
                return None
            pages = self.match(seq, min(away))  # as far as it can be reached
        return None

    def sources(
        self, absent: list[PageLoad], codecs: list[dict[int, int]], tokens: int
    ) -> tuple[tuple[Source, ...], tuple[int, ...]]:
        """Tiers that have all of it, the most precise first; else one that stands for several."""
        if not codecs or not all(codecs):
            return (), ()
        store = self.store
        cells = tokens * sum(len(group.layers) for group in store.geometry.groups)

        def bytes_of(one: PageLoad, codec: int) -> int:
            return store.page_bytes(one.group, codec)

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

    def known(self, seq: Sequence) -> list[Block]:
        """Known blocks of a prompt's pages, in every group."""
        pages = range(len(seq.tokens) // self.page_size)
        found = [self.find(seq, g, page) for g in range(len(seq.blocks)) for page in pages]
        return [block for block in found if block is not None]


def _sound(said: torch.Tensor | None) -> bool:
    """Return whether a sum is finite, or what decoding said is zero."""
    assert said is not None
    numbers = said.numpy()
    return bool(np.isfinite(numbers) if said.is_floating_point() else not numbers.any())


# What restores are believed to take before any was measured.

_BYTES_PER_S = 1e9
_LEAST_S = 1e-9


class Prior:
    """Costs (`policy.restore.Costs`) from what steps and loads took so far, and guesses.

    What was not measured yet in this process is believed to be as earlier ones found it, and else
    guessed: a link of 1 GB/s, and that computing takes as long as loading, so that both are tried.
    A belief is kept once it was asked for: what was measured since
    is held against it by `Measured`.

    Args:
        gate: Knows rates of loads and steps.
    """

    def __init__(self, gate: LoadGate) -> None:
        self._gate = gate
        self._links: dict[str, tuple[float, float]] = {}
        self._token_s = 0.0

    def compute_s(self, request: RestoreRequest, layers: int, tokens: Span) -> float:
        """So many layers of these tokens."""
        if not self._token_s:
            gate = self._gate
            earlier_s = gate.earlier.computes.get(gate.model, 0.0)
            self._token_s = gate.seconds_per_token or earlier_s or self._guess_s(request)
        return self._token_s * tokens.size * layers / request.layers

    def suffix_s(self, request: RestoreRequest) -> float:
        """All layers of the suffix."""
        behind = Span(request.tokens, request.tokens + request.suffix)
        return self.compute_s(request, request.layers, behind)

    def load_s(self, request: RestoreRequest, source: int, cells: int) -> float:
        """So many cells at once."""
        tier, _, cell_bytes = request.sources[source]
        if tier not in self._links:
            rates = self._gate.rates.get(tier)
            known = (rates.latency_s, rates.bytes_per_s) if rates is not None else (0.0, 0.0)
            guess = self._gate.earlier.links.get(tier, (0.0, _BYTES_PER_S))
            self._links[tier] = known if known[1] else guess
        latency_s, bytes_per_s = self._links[tier]
        return latency_s + cells * cell_bytes / bytes_per_s

    def _guess_s(self, request: RestoreRequest) -> float:
        """As long as it takes to load a token."""
        if not request.sources:
            return _LEAST_S
        tokens = max(1, request.tokens - request.resident)
        return max(_LEAST_S, self.load_s(request, 0, tokens * request.layers) / tokens)


# All restores of a cache that are under way: one policy, one state, links that they share.
#
# The policy decides, this executes: it asks tiers for what the policy wants loaded, and tells the
# state what came. Nothing of it blocks.

_AHEAD_S = 0.05
_LEAST_PAGES, _LEAST_BYTES, _MOST_BYTES = 4, 1 << 22, 1 << 26
"""In flight from one tier are as many bytes as it gives in that time, within these bounds."""
_WORTH_BYTES = 1 << 19
"""To ask a tier for less of a page takes about as long as it takes to come."""
_MEMORY = 8
"""Weight of what was measured before, beside a further measurement."""


class RestoreScheduler:
    """Restores of one cache. Callers hold the KV lock.

    Args:
        restorer: Knows what there is to restore.

    Attributes:
        flights: Loads under way.
        policy: Decides; another one can take its place while nothing is restored.
        costs: What was measured so far.
        state: How far all of them are.
        numbers: Of requests to come.
        s_per_byte: Seconds of the thread that drives them; 0.0 while that is not known.
    """

    def __init__(self, restorer: PrefixMatcher) -> None:
        self.restorer, self.store, self.flights = restorer, restorer.store, restorer.loader
        self.gate, self.bus = restorer.gate, restorer.bus
        self.policy: RestorePolicy = make_restore_policy("flowkv")
        self.costs = Measured(Prior(self.gate))
        self.state = State(self.costs)
        self._active: dict[int, RestoreJob] = {}
        self._busy_s: dict[str, float] = {}
        self._computed_s: dict[int, float] = {}
        self.numbers = count(1)
        self._pumping, self._asked = False, 0  # bytes that the last `pump` asked for
        self._allowance_s, self.s_per_byte = math.inf, 0.0

    # ---- beginnings and ends

    def begin(self, seq: Sequence, limit: int, *, computable: bool) -> None:
        """Attaches what is on the device of a prompt, and begins to load the rest.

        `Sequence.restoration` says what is to be loaded; None if that is nothing.

        Args:
            seq: A fresh sequence.
            limit: Most tokens of the prefix.
            computable: See `RestoreJob`.
        """
        size, restorer = self.restorer.page_size, self.restorer
        self.store.expire()
        known = restorer.match(seq, max(0, limit) // size)
        plan = self._look(seq, known, computable) if known else None
        pages = plan.pages if plan is not None else seq.length // size
        behind = restorer.behind(seq, pages, limit) if self.store.stack.tiers else []
        if plan is None and behind:
            sources = restorer.sources(behind, ways(self.store, behind), size)
            plan = RestorePlan(pages, pages, pages, [{} for _ in seq.blocks], *sources)
        here = seq.length if plan is not None else restorer.extend(seq, limit)
        known = plan.pages * size if plan is not None else here
        restorer.report(seq, known, known - here, known if behind else limit)
        if plan is not None:
            self._launch(seq, plan, computable, behind, limit)

    def begin_whole(self, seq: Sequence, pages: int) -> bool:
        """Attaches so many known pages, also those that are still on their way: all or none.

        Returns:
            Whether they are attached. If not, the sequence may hold some of them.
        """
        plan, tokens = self._look(seq, pages, computable=False), pages * self.restorer.page_size
        if plan is None:
            return seq.length == tokens
        restoration = self._launch(seq, plan, computable=False)
        if restoration.settle() == tokens:
            return True
        restoration.abandon()
        return False

    def _look(self, seq: Sequence, pages: int, computable: bool) -> RestorePlan | None:
        """Attaches what is on the device of known pages; finds the rest, if it is worth loading."""
        resident = self.restorer.resident(seq, pages)
        if resident:
            self.restorer.attach_resident(seq, resident)
        plan = self.restorer.plan(seq, resident, pages)
        if plan is not None and not self._worth(plan, computable):
            drop(_each(plan.page_loads))
            plan = None
        return plan

    def _worth(self, plan: RestorePlan, computable: bool) -> bool:
        """Whether loading helps: where the front is computed meanwhile, if it does for one page."""
        source, pages, size = plan.sources[0], plan.stop - plan.resident, self.restorer.page_size
        layers = sum(len(group.layers) for group in self.store.geometry.groups)
        page_bytes = source.cell_bytes * layers * size
        n_bytes = page_bytes if computable else page_bytes * pages
        return self.gate.worth({source.tier: round(n_bytes)}, pages * size)

    def _launch(
        self,
        seq: Sequence,
        plan: RestorePlan,
        computable: bool,
        behind: Items[PageLoad] = (),
        limit: int = 0,
    ) -> RestoreJob:
        """Begins to load what was found, the page behind the whole ones before the others."""
        seq.restoration = restoration = RestoreJob(
            self, seq, plan, computable=computable, behind=behind, limit=limit
        )
        pieces = [LayerSlice(one, 0, one.stripes) for one in behind]
        self.flights.begin(restoration.ahead, () if self.paused else pieces, -1)
        self.pump()
        return restoration

    def add(self, restoration: RestoreJob) -> Progress:
        """A restore begins."""
        self._active[restoration.request.number] = restoration
        for tier in {source.tier for source in restoration.request.sources}:
            rates = self.gate.rates.get(tier)
            if rates is None or not rates.samples:
                self.state.untold.add(tier)
        return self.state.add(restoration.request)

    def remove(self, restoration: RestoreJob) -> None:
        """A restore is over; what is on its way for it is called off."""
        number = restoration.request.number
        if self._active.pop(number, None) is not None:
            self.flights.cancel(restoration)
            self.state.remove(number)
            self.policy.forget(number)
            if not self._active:
                self._computed_s.clear()

    # ---- the time of the thread that drives them

    def allow(self, seconds: float = math.inf) -> None:
        """From now on they take so much time of this thread, for others have need of it.

        What they took too much is taken off, what was left over is kept, up to as much again;
        without a number, that ends.
        """
        left = 0.0 if self._allowance_s == math.inf else min(self._allowance_s, seconds)
        self._allowance_s = left + seconds

    def page_s(self, request: RestoreRequest) -> float:
        """What computing the first page should take."""
        first = Span(request.resident, request.resident + request.unit)
        return self.costs.compute_s(request, request.layers, first)

    def tries(self) -> bool:
        """Whether no forward of this process says yet what computing takes."""
        return not (self.gate.seconds_per_token or self.costs.tried)

    @property
    def paused(self) -> bool:
        """Whether nothing is asked for until more time is allowed."""
        return self._allowance_s <= 0.0

    @property
    def still(self) -> bool:
        """Whether no tier owes anything, and there was nothing more to ask for.

        A tier may have answered all of a window by now, and more is to come in the next one.
        """
        return not (self.paused or self.flights.busy() or self._asked)

    def _spent(self, seconds: float, asked: int) -> None:
        self._allowance_s -= seconds
        if asked:
            known = self.s_per_byte or seconds / asked
            self.s_per_byte = known + (seconds / asked - known) / _MEMORY

    # ---- loads

    def pump(self) -> None:
        """Takes the answers that are there, and asks for as much more as links should have."""
        if self._pumping:  # an answer ended a restore, which is why this was called
            return
        self._pumping = True
        try:
            self.store.drain()
            if self._active:
                self._now()
                begun_s = compiling.now_s()
                self._asked = sum(self._fill(tier) for tier in self._tiers())
                self.store.drain()
                self._spent(compiling.now_s() - begun_s, self._asked)
        finally:
            self._pumping = False

    def _tiers(self) -> Iterable[str]:
        sources = (s for one in self._active.values() for s in one.request.sources)
        return dict.fromkeys(source.tier for source in sources)

    def _fill(self, tier: str) -> int:
        """Asks a tier for what the policy wants, up to its window; returns the bytes."""
        asked, room = 0, self._window(tier) - self.flights.flying_bytes(tier)
        if self._allowance_s < math.inf:
            most = self._allowance_s / self.s_per_byte if self.s_per_byte else self._least(tier)
            room = min(room, most) if self._allowance_s > 0.0 else 0.0
        while room > asked:
            op = self.policy.next_load(self.state, tier) or self._left(tier)
            if op is None:
                break
            asked += self._load(op, tier)
        return asked

    def _window(self, tier: str) -> float:
        rates = self.gate.rates.get(tier)
        expected = rates.bytes_per_s * _AHEAD_S if rates else 0.0
        return min(max(expected, self._least(tier)), _MOST_BYTES)

    def _least(self, tier: str) -> float:
        """A few pages: of a small model, a fixed number of bytes would be all there is."""
        pages = (
            source.cell_bytes * one.request.layers * one.request.unit
            for one in self._active.values()
            for source in one.request.sources
            if source.tier == tier
        )
        return min(_LEAST_PAGES * max(pages, default=0.0), _LEAST_BYTES)

    def _load(self, op: RestoreLoad, tier: str) -> int:
        self.state.begin(op)
        restoration = self._active[op.request]
        flight = LoadBatch(restoration, self._arrived, op, tier)
        return self.flights.begin(
            flight, restoration.back.pieces(op), restoration.back.tier_of(op.source)
        )

    def _left(self, tier: str) -> RestoreLoad | None:
        """What the policy leaves where it is, though nobody computes it any more: by layers."""
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
        """What can be polled for the next answer of a tier; empty if that cannot be polled for."""
        tiers = self.store.stack.tiers
        return files([tiers[number] for number in self.flights.busy() if number < len(tiers)])

    def _arrived(self, flight: LoadBatch) -> None:
        op = flight.op
        restoration = self._active.get(op.request) if op is not None else None
        if op is None or restoration is None or restoration is not flight.owner:
            return
        self._now()
        self._measure(flight, op)
        restoration.arrived(flight, op)

    def _measure(self, flight: LoadBatch, op: RestoreLoad) -> None:
        """Loads in flight at one time share the link: each counts from the end of the last."""
        n_bytes = flight.n_bytes.total() - flight.joined.total()
        request = self._active[op.request].request
        begun_s = max(flight.started_s, self._busy_s.get(flight.tier, 0.0))
        self._busy_s[flight.tier] = max(flight.ended_s, begun_s)
        flight.seconds = seconds = max(0.0, flight.ended_s - begun_s)
        counted_s = compiling.measured_s(begun_s, begun_s + seconds)
        if n_bytes and counted_s > 0 and not flight.lost:
            source = request.sources[op.source]
            self.state.untold.discard(source.tier)
            self.costs.loaded(request, op.source, round(n_bytes / source.cell_bytes), counted_s)
            if len(flight.n_bytes) == 1:
                (number,) = flight.n_bytes
                self.gate.loaded(self.store.stack.tiers[number].name, n_bytes, counted_s)
        self.tell_span(request, flight.tier, op.tokens, op.layers, (begun_s, seconds), n_bytes)

    def tell_span(
        self,
        request: RestoreRequest,
        engine: str,
        tokens: Span,
        layers: Span,
        when: tuple[float, float],
        n_bytes: int = 0,
    ) -> None:
        """Announces a piece of a restore; `when` is its start, and the seconds that it took."""
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

    # ---- computing

    def computed(self, thread: int) -> None:
        """Takes what a thread has computed: rows of one forward share its time, by their tokens."""
        now, found = time.perf_counter(), []
        for one in self._active.values():
            if (done := one.computed(thread)) is not None:
                found.append((one, done))
        begun_s = min(done.started_s for _, done in found)
        # Handed out together and computed one after the other: each from the end of the last.
        begun_s = max(begun_s, self._computed_s.get(thread, 0.0))
        self._computed_s[thread] = now
        tokens = sum(done.op.tokens.size for _, done in found)
        counted_s = compiling.measured_s(begun_s, now)
        for one, done in found:
            share = done.op.tokens.size / tokens
            one.told(done.op, begun_s, (now - begun_s) * share, counted_s * share)

    def hand_out(self, among: Items[RestoreJob], most: int | None) -> tuple[RestoreJob, int] | None:
        """The job that computes next, and how many tokens; None if none has any to compute."""
        for one in among:
            one.pump()
        for one in among:
            if tokens := one.pending():
                return one, tokens
        numbers = [one.request.number for one in among if one.request.number in self._active]
        if not numbers:
            return None
        self._now()
        op = self.policy.next_compute(self.state, numbers)
        if op is None:  # all wait for loads
            return None
        one = self._active[op.request]
        return one, one.take(op, most) if isinstance(op, Compute) else 0

    def _now(self) -> None:
        self.state.now_s = time.perf_counter()


# The pages of a restored prefix that come from the back, and how they enter a sequence's line.


class WeakSequence:
    """A reference to a sequence that does not keep it; None once the sequence is gone."""

    def __init__(self, seq: Sequence) -> None:
        self.bind(seq)

    def bind(self, seq: Sequence) -> None:
        """Refer to a sequence."""
        self._ref = weakref.ref(seq)

    def __call__(self) -> Sequence | None:
        """Return the sequence."""
        return self._ref()


class IncomingPages:
    """Pages on their way, in every layer group. Callers hold the KV lock.

    Args:
        restorer: Knows windows.
        whose: Refers to the sequence.
        plan: What is to come.

    Attributes:
        index: Of each model layer: where it stands among all that have pages.
    """

    def __init__(self, restorer: PrefixMatcher, whose: WeakSequence, plan: RestorePlan) -> None:
        self._restorer, self._planner, self._whose = restorer, restorer.planner, whose
        self._groups, self._tiers = plan.page_loads, plan.tiers
        groups = self._planner.geometry.groups
        layers = sorted(layer for group in groups for layer in group.layers)
        self.index = {layer: index for index, layer in enumerate(layers)}
        self._stripes = [[self.index[layer] for layer in group.layers] for group in groups]

    @property
    def _seq(self) -> Sequence:
        return cast(Sequence, self._whose())

    def __iter__(self) -> Iterator[PageLoad]:
        return (page_load for group in self._groups for page_load in group.values())

    @property
    def gone(self) -> bool:
        """Whether anything of it was forgotten meanwhile."""
        return any(page_load.block.gone for page_load in self)

    def tier_of(self, source: int) -> int:
        """Number of the tier that a source is; -1 where that is for each page to say."""
        return self._tiers[source]

    def pieces(self, op: RestoreLoad) -> Iterator[LayerSlice]:
        """What is not there of the cells of a load."""
        size = self._restorer.page_size
        pages = range(op.tokens.first // size, -(-op.tokens.stop // size))
        for group, stripes in zip(self._groups, self._stripes, strict=True):
            first, stop = (bisect_left(stripes, layer) for layer in op.layers)
            for page_load in (group[page] for page in pages if page in group):
                for there, run in groupby(range(first, stop), page_load.there):
                    if not there:
                        head, *others = run
                        yield LayerSlice(page_load, head, 1 + len(others))

    def there(self, index: int) -> bool:
        """Whether a layer of all pages is there."""
        at = [stripes.index(index) if index in stripes else -1 for stripes in self._stripes]
        return all(
            page_load.there(stripe)
            for group, stripe in zip(self._groups, at, strict=True)
            for page_load in (group.values() if stripe >= 0 else ())
        )

    def room(self, pages: int) -> bool:
        """Whether so many pages can be computed beside those that are reserved."""
        store, taken = self._restorer.store, list[list[int] | None]()
        for g in range(len(self._groups)):
            taken.append(store.try_allocate(g, pages))
        for g, fresh in enumerate(taken):
            for page in fresh or ():
                store.pool(g).release(page)
        return None not in taken

    def reach(self, first: int, stop: int, good: Callable[[PageLoad], bool]) -> int:
        """The most pages that every group has as far as its window reaches; at least `first`."""

        def has(group: int, page: int) -> bool:
            page_load = self._groups[group].get(page)
            return page_load is not None and good(page_load)

        return self._restorer.longest(first, stop, has)

    # ---- the line

    def place(self, first: int, stop: int) -> None:
        """Puts pages `[first, stop)` into the line, also those that are not there yet.

        What lies behind a window now stays until `close`: the line may still be cut.
        """
        seq, planner = self._seq, self._planner
        planner.shorten(seq, first)
        for g, group in enumerate(self._groups):
            seen = self._restorer.first(g, stop)
            for page in range(first, stop):
                if page < seen:
                    planner.put(seq, g, page, -1)
                else:
                    group[page].place(seq)
            if not first:
                seq.first_page[g] = seen
            seq.published[g] = stop  # not before it is there
        self.drop([one.page_no for one in self if not first <= one.page_no < stop])
        planner.tables.lengths[seq.row] = stop * self._restorer.page_size

    def close(self, first: int, whole: int, stop: int) -> int:
        """Cuts the line to what is there, and makes that known.

        Args:
            first: Pages that were there before `place`.
            whole: Pages that there are with those that `place` put.
            stop: Pages that are there.

        Returns:
            Pages that are left.
        """
        seq, planner = self._seq, self._planner
        if stop < whole and seq.state is not None:  # of a recurrent layer: it fits all of it only
            stop, seq.state = 0, None
        for g in range(len(self._groups)):
            seen = self._restorer.first(g, stop)
            if stop > first and seq.first_page[g] < seen:
                planner.drop_before(seq, g, seen)
        if stop < whole:
            try:
                planner.shorten(seq, stop)
            except StateError:  # a step went on though it lacked pages: nothing of it is right
                planner.shorten(seq, 0)
        seq.published = [min(done, first) for done in seq.published]
        planner.publish(seq)
        return stop

    def fill(self, other: Sequence, stop: int) -> None:
        """Takes what is missing from another sequence; see `RestoreJob.fill`."""
        seq, planner, end = self._seq, self._planner, stop * self._restorer.page_size
        alike = other.planner is planner and min(other.length, other.known) >= end
        alike &= np.array_equal(other.tokens[:end], seq.tokens[:end])
        alike &= other.publishable or not seq.publishable  # it was given just these tokens
        for g in range(len(self._groups)) if alike else ():
            alike &= other.key(g, stop - 1) == seq.key(g, stop - 1)
        if not alike:
            raise StateError(
                "a sequence of another prompt, or too short, cannot fill this one",
                f"Compute the same {end} tokens",
            )
        for page_load in self:
            if not page_load.complete:
                g, page = page_load.group, page_load.page_no
                page_load.fill(int(planner.tables.pages[g][other.row, page]))
        seq.fidelity = max(seq.fidelity, other.fidelity)

    def drop(self, pages: Iterable[int]) -> None:
        """Wants pages with these numbers no more."""
        numbers = set(pages)
        for group in self._groups:
            for page in numbers & group.keys():
                group.pop(page).drop()

    def clear(self) -> None:
        """Wants nothing any more; what is in the line stays there."""
        self.drop([page_load.page_no for page_load in self])


# What one restore took and brought: told to whoever learns from it, counts it or watches it.


class Tally:
    """Adds up one restore. Callers hold the KV lock.

    Args:
        restores: All of the cache.
        whose: Refers to the sequence.
        request: As the policy knows it.

    Attributes:
        front: Tokens that were there when the front was done.
    """

    def __init__(
        self, restores: RestoreScheduler, whose: WeakSequence, request: RestoreRequest
    ) -> None:
        self._restores, self._whose, self._request = restores, whose, request
        self._progress = restores.state.requests[request.number]
        self.front = request.resident
        self._n_bytes: Counter[int] = Counter()
        self._seconds: dict[int, float] = {}
        self._pages: set[int] = set()
        self._failed, self._exposed_s, self._suffix_s = 0, 0.0, 0.0
        self._layer_s = 0.0  # when the suffix went on with its latest layer
        self._known = True  # what the suffix took

    @property
    def _seq(self) -> Sequence:
        return cast(Sequence, self._whose())

    def computed(self, op: Compute, started_s: float, seconds: float, counted_s: float) -> None:
        """Part of the front was computed; `counted_s` of it say what that takes."""
        self._restores.costs.computed(self._request, op.layers.size, op.tokens, counted_s)
        self._restores.tell_span(
            self._request, "compute", op.tokens, op.layers, (started_s, seconds)
        )

    def loaded(self, flight: LoadBatch, op: RestoreLoad) -> None:
        """A load is over."""
        self._failed += flight.lost
        if flight.n_bytes:
            (first, stop), unit = op.tokens, self._request.unit
            self._pages.update(range(first // unit, -(-stop // unit)))
        for tier, n_bytes in flight.n_bytes.items():
            self._n_bytes[tier] += n_bytes
            self._seconds[tier] = self._seconds.get(tier, 0.0) + flight.seconds

    def waited(self, index: int, begun_s: float, *, suffix: bool) -> None:
        """Somebody asked for a layer at `begun_s`, and goes on now: the suffix, or no compute."""
        now = time.perf_counter()
        self._exposed_s += now - begun_s
        if not suffix or index != self._progress.suffix or not self._request.suffix:
            return  # asked once more, or in an order of its own
        self._behind(begun_s)
        if self._progress.there(index):
            self._restores.state.begin(Suffix(self._request.number, index))
            self._layer_s = now

    def _behind(self, until_s: float) -> None:
        """The suffix is done with the layer that it went on with."""
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

    def ended(self, stop: int, *, ok: bool) -> None:
        """The restore is over.

        Args:
            stop: Pages that are there.
            ok: Whether the suffix is computed.
        """
        self._behind(time.perf_counter())
        request, unit = self._request, self._request.unit
        if ok and self._known and self._suffix_s and self._progress.answered == request.layers:
            self._restores.costs.suffixed(request, self._suffix_s)
        front = self._seq.length if self._seq.length < stop * unit else self.front
        came = [page for page in self._pages if self.front <= page * unit < stop * unit]
        loaded, total = len(came) * unit, self._n_bytes.total()
        bus = self._restores.bus
        for number, n_bytes in self._n_bytes.items():
            name = self._restores.store.stack.tiers[number].name
            tokens = loaded * n_bytes // total if total else 0
            bus.emit(Hit(tier=name, tokens=tokens, n_bytes=n_bytes, tenant=self._seq.owner))
            seconds = self._seconds[number]
            bus.emit(Restored(tier=name, tokens=tokens, n_bytes=n_bytes, seconds=seconds))
        computed = max(0, front - request.resident)
        if computed:
            bus.emit(Miss(tokens=computed, tenant=self._seq.owner))
        if bus.wants(RestoreEnded):
            bus.emit(self._event(stop * unit, computed, loaded))

    def _event(self, tokens: int, computed: int, loaded: int) -> RestoreEnded:
        request = self._request
        return RestoreEnded(
            request=request.number,
            tokens=tokens,
            resident_tokens=request.resident,
            computed_tokens=computed,
            loaded_tokens=loaded,
            n_bytes=self._n_bytes.total(),
            started_s=request.arrived_s,
            seconds=time.perf_counter() - request.arrived_s,
            exposed_s=self._exposed_s,
            bound_s=self._bound_s(),
            failed=self._failed,
            tenant=self._seq.owner,
        )

    def _bound_s(self) -> float:
        """What nobody could beat at these rates; 0.0 while one of them is not known."""
        known = self._restores.gate.seconds_per_token > 0 and bool(self._n_bytes)
        return lower_bound(self._request, self._restores.costs) if known else 0.0


_PAUSE_S, _SOON_S = 0.002, 0.02


class Late(FlowKVError, TimeoutError):
    """A layer of some pages did not arrive in time, or cannot be had.

    Args:
        layer: Its index in the model.
    """

    def __init__(self, layer: int) -> None:
        super().__init__(f"layer {layer} of some pages did not arrive in time", "Compute them")
        self.layer = layer


class _Phase(Enum):
    """Phases of a restore."""

    FRONT = "the front is computed while the back is loaded"
    BEHIND = "the rest is loaded behind the suffix"
    OVER = "it is over"


class _Computing(NamedTuple):
    """Part of the front that was handed out; what one thread computes is measured together."""

    op: Compute
    started_s: float
    thread: int


class RestoreJob:
    """One sequence's prefix on its way. Thread-safe; made by `KV.open(..., wait=False)`.

    Args:
        restores: All of the cache.
        seq: Whose prefix; its resident pages are attached.
        plan: What is to come.
        computable: Whether the caller computes tokens of the front where that helps.
        behind: The page that the limit lies in, of each group; see `PrefixMatcher.behind`.
        limit: Most tokens of the prefix.

    Attributes:
        request: As the policy knows it.
        back: The pages that come from the back.
        ahead: Loads the page behind them, first of all.
    """

    def __init__(
        self,
        restores: RestoreScheduler,
        seq: Sequence,
        plan: RestorePlan,
        *,
        computable: bool,
        behind: Items[PageLoad] = (),
        limit: int = 0,
    ) -> None:
        # Weakly: what is on its way must not keep a sequence open that was dropped.
        self._whose = WeakSequence(seq)
        self._restores, self._planner = restores, restores.restorer.planner
        self._behind, self._limit, self._whole, self._beyond = behind, limit, plan.pages, 0
        self.ahead = LoadBatch(self, restores.restorer.measure)
        self._guard, self._size = self._planner.guard, self._planner.page_size
        self.back, self._stop = IncomingPages(restores.restorer, self._whose, plan), plan.pages
        self._phase, self._broken = _Phase.FRONT, False
        self._computing: _Computing | None = None
        layer_bytes = [source.cell_bytes * self._size for source in plan.sources[:1]]
        least = max([1, *(round(_WORTH_BYTES / each) for each in layer_bytes)])
        self.request = RestoreRequest(
            number=next(restores.numbers),
            tokens=plan.stop * self._size,
            suffix=seq.known - plan.pages * self._size,
            layers=len(self.back.index),
            resident=plan.resident * self._size,
            unit=self._size,
            sources=plan.sources,
            computable=computable,
            whole=True,
            least=least,
            arrived_s=time.perf_counter(),
        )
        self._progress = restores.add(self)
        self._tally = Tally(restores, self._whose, self.request)

    @property
    def seq(self) -> Sequence:
        """The sequence whose prefix comes; it holds the restoration, and not the other way."""
        return cast(Sequence, self._whose())

    def bind(self, seq: Sequence) -> None:
        """Refer to the sequence again: the collector clears references before finalizers run."""
        self._whose.bind(seq)

    @staticmethod
    def of(seq: Sequence) -> RestoreJob | None:
        """What is still on its way of a sequence's prefix."""
        return cast("RestoreJob | None", seq.restoration)

    @property
    def tokens(self) -> int:
        """Where the prefix ends, as things stand."""
        return self.page_tokens + (self._beyond if self._stop == self._whole else 0)

    @property
    def page_tokens(self) -> int:
        """Tokens in the whole pages of the prefix, as things stand."""
        return self._stop * self._size

    @property
    def settled(self) -> bool:
        """Whether the front is done."""
        return self._phase is not _Phase.FRONT

    @property
    def front(self) -> int:
        """Tokens that were there or computed when the front was done."""
        return self._tally.front

    @property
    def lacks(self) -> bool:
        """Whether pages in the sequence's line are not there yet."""
        with self._guard:
            behind = self._phase is _Phase.BEHIND
            return behind and not all(map(self._there, range(self.request.layers)))

    @property
    def gone(self) -> bool:
        """Whether anything of it was forgotten meanwhile."""
        return self.back.gone or any(one.block.gone for one in self._behind)

    @property
    def quiet(self) -> bool:
        """Whether no tier owes anything for it."""
        return not (self._restores.flights.of(self) or self._restores.paused)

    @property
    def exhausted(self) -> bool:
        """Whether nothing is on its way, and the policy asks for nothing: to wait would not end."""
        return self._restores.still

    # ---- loads

    def arrived(self, flight: LoadBatch, op: RestoreLoad) -> None:
        """A load is over. Callers hold the KV lock."""
        state = self._restores.state
        self._tally.loaded(flight, op)
        if flight.lost and self.request.computable:
            state.fail(op)
        else:
            state.end(op)
        missing = [piece.page_load.page_no for piece in self.back.pieces(op)] if flight.lost else ()
        if missing and self._phase is _Phase.BEHIND:
            self._broken = True
        elif missing and not self.request.computable:  # the prefix ends where it is missing
            self._stop = min(self._stop, *missing)

    # ---- the front

    def next(self, most: int | None = None) -> int:
        """Tokens to compute now, from the sequence's length on: whole pages, 0 for none any more.

        Args:
            most: Compute no more than that at once, or a page.
        """
        found = choose([self], most)
        while found is None and self._hopes():
            self._rest()
            found = choose([self], most)
        return found[1] if found is not None else 0

    def _hopes(self) -> bool:
        """Whether the first load from a tier should show in a moment if it is as fast as believed.

        Once the front is left to come, a slow tier is waited for. To look first costs no more than
        the computing of a page would.
        """
        with self._guard:
            restores, waited_s = self._restores, time.perf_counter() - self.request.arrived_s
            tiers = (source.tier for source in self.request.sources)
            if self.settled or self._progress.met or restores.state.untold.isdisjoint(tiers):
                return False
            return not restores.still and waited_s < restores.page_s(self.request)

    def pump(self) -> None:
        """Takes what has come, and asks for more. Never waits."""
        with self._guard:
            if self._phase is not _Phase.OVER:
                self._advance()
                self._restores.pump()

    def take(self, op: Compute, most: int | None) -> int:
        """Hands out an op of the policy; returns its tokens. Callers hold the KV lock."""
        first, stop = op.tokens
        if self._restores.tries():
            most = self._size
        if most is not None:
            stop = min(stop, first + max(most // self._size, 1) * self._size)
        if op.layers != Span(0, self.request.layers) or first != self.seq.length:
            return 0
        op = op._replace(tokens=Span(first, stop))
        if not self.back.room(op.tokens.size // self._size):
            return 0  # what is loaded has its room already
        self._restores.state.begin(op)
        self._computing = _Computing(op, time.perf_counter(), threading.get_ident())
        self.back.drop(range(first // self._size, stop // self._size))
        return op.tokens.size

    def computed(self, thread: int) -> _Computing | None:
        """What a thread has computed of it since it was handed out. Callers hold the KV lock."""
        done = self._computing
        if done is None or done.thread != thread or self.seq.length < done.op.tokens.stop:
            return None
        self._computing = None
        return done

    def told(self, op: Compute, started_s: float, seconds: float, counted_s: float) -> None:
        """Part of the front is computed, in so many seconds of its own; see `Tally.computed`."""
        self._restores.state.end(op)
        self._tally.computed(op, started_s, seconds, counted_s)

    def pending(self) -> int:
        """Tokens that were handed out and are not computed yet. Callers hold the KV lock."""
        return self._computing.op.tokens.stop - self.seq.length if self._computing else 0

    def _advance(self) -> None:
        """Notices what was computed, whoever asked for it."""
        length, state = self.seq.length, self._restores.state
        if self._phase is not _Phase.FRONT:
            return
        if self._computing is not None and length >= self._computing.op.tokens.stop:
            self._restores.computed(self._computing.thread)
        front = self._progress.front[0]
        stop = min(length // self._size * self._size, *self._progress.back)
        if self._computing is None and front < stop:
            extra = Compute(self.request.number, Span(0, self.request.layers), Span(front, stop))
            state.begin(extra)
            state.end(extra)

    # ---- the rest

    def __iter__(self) -> Iterator[PageLoad]:
        """All pages that are to come."""
        yield from self.back
        yield from self._behind

    @property
    def soon(self) -> bool:
        """Whether the page behind the whole ones may come in a moment; see `meet`."""
        return self.ahead.left > 0 and time.perf_counter() - self.ahead.started_s < _SOON_S

    def meet(self) -> None:
        """Waits for the page behind the whole ones, if one comes, so that `settle` can use it."""
        self.pump()
        while self.ahead.left and self._phase is _Phase.FRONT:
            self._rest()
            self.pump()

    def bound(self, limit: int) -> None:
        """The prefix ends there at the latest, as somebody was told."""
        with self._guard:
            self._limit = min(self._limit, limit)

    def settle(self) -> int:
        """Ends the front: all pages are in the sequence's line, also those still on their way.

        Returns:
            The sequence's length now; less than `tokens` was if nothing more may come.

        Raises:
            StateError: The sequence is closed, suspended or in a step.
        """
        with self._guard:
            if self._phase is not _Phase.FRONT:
                return self.seq.length
            self._planner.idle(self.seq)
            self.pump()
            first = self.seq.length // self._size
            self._tally.front = first * self._size
            # What was to be computed and is not cannot be loaded any more.
            hole = self._computing is not None or self._progress.lost > first * self._size
            self._stop = first if hole else self.back.reach(first, self._stop, lambda one: True)
            if self._stop > first:
                self.back.place(first, self._stop)
                self._phase = _Phase.BEHIND
                self._restores.state.fronted(self.request.number)
                self._extend()
                self._restores.pump()
            else:
                self._extend()
                self._end(ok=True)
            return self.seq.length

    def _extend(self) -> None:
        """The prefix goes on with what memory has of the page behind its whole ones."""
        restorer, end = self._restores.restorer, self._whole * self._size
        if self.seq.length == end < self._limit:
            self._beyond = restorer.extend(self.seq, self._limit, self._behind) - end
        if self._behind:  # not told when it began
            restorer.report(self.seq, self._beyond, 0, max(0, self._limit - end))
        drop(self._behind)

    def wait(self, layer: int) -> None:
        """Returns once a layer of all pages is there, verified; see `Step.awaits`.

        Raises:
            Late: It is not going to come. Once `fill` has seen to that, `wait` can be called again.
        """
        index, begun_s = self.back.index[layer], time.perf_counter()
        while (there := self._poll(index)) is None:
            self._rest()
        if not there:
            raise Late(layer)
        with self._guard:
            if self._phase is _Phase.BEHIND:
                self._tally.waited(index, begun_s, suffix=True)

    def _rest(self) -> None:
        with self._guard:
            self._restores.allow()  # nobody has better use of this thread
            waited_for = self._restores.files()
        rest(waited_for, _PAUSE_S)

    def _there(self, index: int) -> bool:
        return self.back.there(index) if self._broken else self._progress.there(index)

    def _stuck(self) -> None:
        """A wait has an end: all was asked for that links have room for, and nothing is owed."""
        if self._restores.still and not self._progress.restored:
            self._broken = True

    def poll(self) -> bool | None:
        """Whether all of it is there, after `settle`; None as long as it may come. Never waits."""
        return self._poll(None)

    def _poll(self, index: int | None) -> bool | None:
        """The same, for one layer or all of them."""
        layers = range(self.request.layers) if index is None else (index,)
        with self._guard:
            self.pump()
            if self._phase is not _Phase.BEHIND:
                return not self._broken
            if not all(map(self._there, layers)):
                self._stuck()
                if not all(map(self._there, layers)):
                    return False if self._broken else None
            self._restores.store.join()
            return True

    def complete(self) -> bool:
        """Waits until all of it is there, settled; False if that is not going to be."""
        self.meet()
        self.settle()
        begun_s = time.perf_counter()
        while (there := self.poll()) is None:
            self._rest()
        with self._guard:
            self._tally.waited(0, begun_s, suffix=False)
        return there

    def fill(self, other: Sequence) -> None:
        """Puts what is missing in place, from another sequence; also within a step that waits.

        Args:
            other: A sequence of the same tokens and salts, `page_tokens` long at least.

        Raises:
            CapacityError: A page that a tier may still write to cannot be replaced.
            StateError: The other one has not got it.
        """
        with self._guard:
            self._restores.store.join()
            self.back.fill(other, self._stop)

    # ---- the end

    def finish(self, *, ok: bool = True) -> int:
        """Ends it: what came becomes known; what did not is cut off. Safe to call again.

        Args:
            ok: Whether the step that waited for it was committed.

        Returns:
            The sequence's length.

        Raises:
            StateError: The sequence is in a step.
        """
        with self._guard:
            if self._phase is _Phase.BEHIND and not self.seq.closed:
                self._planner.ready(self.seq)
                self._close_line(ok)
            self._end(ok=ok)
            return self.seq.length

    def _close_line(self, ok: bool) -> None:
        self.seq.restoration = None  # from here on, its line is like any other
        self._restores.store.join()
        first, whole = self._tally.front // self._size, self._stop
        if not ok or not all(map(self._there, range(self.request.layers))):
            self._stop = self.back.reach(first, whole, lambda one: one.complete)
        self._stop = self.back.close(first, whole, self._stop)

    def cancel(self) -> None:
        """Calls it off. What came of a settled one stays, as far as it is complete."""
        with self._guard:
            if self._phase is _Phase.BEHIND and self._planner.stepping(self.seq):
                self._broken = True  # whoever drives the step is told, and finishes
                return
            self.finish(ok=False)

    def abandon(self) -> None:
        """Calls it off for a sequence that is about to be closed."""
        with self._guard:
            self._broken = self._phase is _Phase.BEHIND  # in case that it is in a step
            self._end(ok=False)

    def _end(self, *, ok: bool) -> None:
        if self._phase is _Phase.OVER:
            return
        self._phase = _Phase.OVER
        self._tally.ended(self._stop, ok=ok)
        self._restores.remove(self)
        self.back.clear()
        drop(self._behind)
        if self.seq.restoration is self:
            self.seq.restoration = None


def choose(
    restorations: Iterable[RestoreJob], most: int | None = None
) -> tuple[RestoreJob, int] | None:
    """What the policy wants computed next, for one of these.

    Args:
        restorations: Of one cache, unsettled.
        most: See `RestoreJob.next`.

    Returns:
        One, and how many of its tokens: 0 where only its suffix is left. None if all wait for
        loads.
    """
    mine = [one for one in restorations if not one.settled]
    if not mine:
        return None
    with mine[0]._guard:
        return mine[0]._restores.hand_out(mine, most)
