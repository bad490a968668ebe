"""Tokens that fill no page, and are known all the same while a page in memory holds them.

Full pages have names, and travel by them. What a prompt shares beyond its last full page with
others is found by its tokens instead: in the open page of another sequence, in the page that a
closed one left unfilled (its *tail*), or at the beginning of a full page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from flowkv.cache.index import Block, matching
from flowkv.cache.sequence import Sequence, Tables
from flowkv.cache.store import PageStore
from flowkv.core.geometry import CODEC_SHIFT
from flowkv.core.keys import within


class SharedTokens(NamedTuple):
    """A page in memory that begins as a prompt goes on.

    Attributes:
        tokens: How many are the same.
        fidelity: Index of the lossiest codec that they were built on.
        pages: Where they lie, for each group.
    """

    tokens: int
    fidelity: int
    pages: list[int]


class Tails:
    """Finds and keeps tokens that fill no page. Callers hold the KV lock.

    Args:
        store: Pages and blocks.
        tables: Lines of all sequences.
        sequences: All that are open.
        allowed: Whether a sequence's pages may become known.
    """

    def __init__(
        self,
        store: PageStore,
        tables: Tables,
        sequences: Mapping[int, Sequence],
        allowed: Callable[[Sequence], bool],
    ) -> None:
        self.store, self.tables, self.page_size = store, tables, store.geometry.page_size
        self._sequences, self.allowed = sequences, allowed

    def find(self, seq: Sequence, page_no: int, stop: int) -> SharedTokens | None:
        """What has most of a prompt's tokens `[page_no * P, stop)`, less than a page of them."""
        first = page_no * self.page_size
        wanted = seq.tokens[first : max(first, min(stop, first + self.page_size - 1))]
        found = self._open(seq, page_no, len(wanted))
        best = max(found, key=lambda one: one.tokens, default=SharedTokens(0, 0, []))
        for tokens, block in self.store.index.beginnings.near(seq.place(page_no), wanted):
            if tokens <= best.tokens:
                break
            if held := self._held(seq, page_no, block):
                pages = self.store.tails.get(block) or [one.page for one in held]
                return SharedTokens(tokens, max(one.fidelity for one in held), pages)
        return best if best.tokens else None

    def _held(self, seq: Sequence, page_no: int, block: Block) -> list[Block]:
        """A tail, or pages with its tokens in all groups; none if not below this very prompt."""
        salts = within(seq.salts, page_no * self.page_size, len(block.tokens))  # type: ignore[arg-type]
        # Its key says that it depends on nothing else than the prompt does, images for instance.
        keys = [
            chain.page(seq.parent_key(group, page_no), block.tokens, salts)  # type: ignore[arg-type]
            for group, chain in enumerate(seq.chains)
        ]
        if block.key != keys[0] or block in self.store.tails:
            return [block] if block.key == keys[0] else []
        waiting = self.store.samples.waiting  # what has yet to be audited would be a part of others
        found = (self.store.find(key) for key in keys if not waiting(key))
        blocks = [one for one in found if one is not None and one.page >= 0]
        return blocks if len(blocks) == len(keys) else []

    def _open(self, seq: Sequence, page_no: int, most: int) -> Iterator[SharedTokens]:
        """What the open pages of other sequences have."""
        first = page_no * self.page_size
        for other in self._sequences.values():
            end = min(other.length, other.known, first + most)
            if other is seq or end <= first or other.length // self.page_size != page_no:
                continue
            alike = other.place(page_no) == seq.place(page_no)
            if not alike or not (pages := self._own(other, page_no)):
                continue
            tokens = matching(other.tokens[first:end], seq.tokens[first:])
            differing = {*within(seq.salts, first, tokens)} ^ {*within(other.salts, first, tokens)}
            if differing:  # what a run of one type is may show in its first token: go back there
                differs = min(salt.position for salt in differing)
                runs = within(seq.salts, first, differs)
                tokens = max((salt.position for salt in runs), default=differs)
            yield SharedTokens(tokens, other.fidelity, pages)

    def _own(self, seq: Sequence, page_no: int) -> list[int]:
        """Where a sequence has a page of its own, behind known ones; none if it is private."""
        if not self.allowed(seq) or seq.restoration is not None:
            return []
        for blocks in seq.blocks:
            above = blocks[page_no - 1] if 0 < page_no < len(blocks) else None
            hidden = page_no > 0 and (above is None or above.gone)
            if hidden or len(blocks) <= page_no or blocks[page_no] is not None:
                return []
        pages = [int(table[seq.row, page_no]) for table in self.tables.pages]
        return pages if min(pages) >= 0 else []

    def keep(self, seq: Sequence) -> None:
        """Keeps the page that a sequence leaves unfilled, unless others have its tokens."""
        end, store = min(seq.length, seq.known), self.store
        page_no, count = divmod(end, self.page_size)
        pages = self._own(seq, page_no) if count else []
        forked = (p >> CODEC_SHIFT or store.pool(g).references(p) > 1 for g, p in enumerate(pages))
        if not pages or any(forked):
            return
        found = self.find(seq, page_no, end)
        if found is None or found.tokens < count:
            first, above = page_no * self.page_size, seq.parent_key(0, page_no)
            tokens = seq.tokens[first:end].copy()
            key = seq.chains[0].page(above, tokens, within(seq.salts, first, count))
            tail = Block(-1, key, above, 0, "tail", fidelity=seq.fidelity, tokens=tokens)
            tail.tenant, tail.namespace = seq.tenant, seq.namespace
            store.keep_tail(tail, pages)
