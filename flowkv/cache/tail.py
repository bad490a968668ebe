"""Reuse of tokens that fill no page, while a page in memory holds them.

Full pages have keys, and are found by them. The tokens that a prompt shares beyond its last full
page are found by comparison instead: in the open page of another sequence, in the page that a
closed one left unfilled (its *tail*), or at the beginning of a full page. For later processes tails
are stored as well, under keys of exactly their tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from flowkv.cache.index import Block, frame_infos, matching
from flowkv.cache.sequence import Sequence, Tables
from flowkv.cache.store import PageStore
from flowkv.core.geometry import CODEC_SHIFT
from flowkv.core.keys import within

_WORTH = 4
"""Tails of fewer tokens than one part in 4 of a page are not stored."""


class SharedTokens(NamedTuple):
    """A page in memory that begins with the next tokens of a prompt.

    Attributes:
        tokens: Number of equal tokens.
        fidelity: Index of the lossiest codec in their lineage.
        pages: Id of the page in each group.
        finite: Whether raw pages are known to hold finite numbers only, as full ones are.
    """

    tokens: int
    fidelity: int
    pages: list[int]
    finite: bool = False


class Tails:
    """Partly filled pages, found and kept for reuse. Callers hold the KV lock.

    Args:
        store: Pages and blocks.
        tables: Block tables of all sequences.
        sequences: All open sequences.
        allowed: Returns whether a sequence's pages may be published.
        vouched: Returns whether the model that computed a sequence is still as it was named.
    """

    def __init__(
        self,
        store: PageStore,
        tables: Tables,
        sequences: Mapping[int, Sequence],
        allowed: Callable[[Sequence], bool],
        vouched: Callable[[Sequence], bool],
    ) -> None:
        self.store, self.tables, self.page_size = store, tables, store.geometry.page_size
        self._sequences, self.allowed, self.vouched = sequences, allowed, vouched

    def best_match(self, seq: Sequence, page_no: int, stop: int) -> SharedTokens | None:
        """Return the page with most of a prompt's tokens `[page_no * P, stop)`, or None.

        Fewer tokens than a page (P) are compared.
        """
        first = page_no * self.page_size
        wanted = seq.tokens[first : max(first, min(stop, first + self.page_size - 1))]
        found = self._open(seq, page_no, len(wanted))
        best = max(found, key=lambda one: one.tokens, default=SharedTokens(0, 0, []))
        for tokens, block in self.store.index.beginnings.near(seq.place(page_no), wanted):
            if tokens <= best.tokens:
                break
            if held := self._held(seq, page_no, block):
                tail = self.store.tails.get(block)
                pages = [one.page for one in held] if tail is None else tail
                fidelity = max(one.fidelity for one in held)
                return SharedTokens(tokens, fidelity, pages, finite=tail is None)
        return best if best.tokens else None

    def _held(self, seq: Sequence, page_no: int, block: Block) -> list[Block]:
        """Return a tail, or the pages with a block's tokens in all groups.

        Return [] if the block does not continue this prompt, or a group has no page on its device.
        """
        # An equal key proves that the block depends on the same inputs, images for instance.
        keys = [_key(seq, g, page_no, block.tokens) for g in range(len(seq.chains))]  # type: ignore[arg-type]
        if block.key != keys[0] or block in self.store.tails:
            return [block] if block.key == keys[0] else []
        waiting = self.store.samples.waiting  # unaudited pages are not copied into others
        found = (self.store.find(key) for key in keys if not waiting(key))
        blocks = [one for one in found if one is not None and one.page >= 0]
        return blocks if len(blocks) == len(keys) else []

    def _open(self, seq: Sequence, page_no: int, most: int) -> Iterator[SharedTokens]:
        """Yield the open pages of other sequences that begin with the prompt's next tokens."""
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
            if differing:  # a run of one token type is compared as a whole: back to its start
                differs = min(salt.position for salt in differing)
                runs = within(seq.salts, first, differs)
                tokens = max((salt.position for salt in runs), default=differs)
            yield SharedTokens(tokens, other.fidelity, pages)

    def _own(self, seq: Sequence, page_no: int) -> list[int]:
        """Return a sequence's own open page in each group, behind known pages; [] if private."""
        if not self.allowed(seq) or seq.restoration is not None:
            return []
        if self._hidden(seq, page_no) or any(blocks[page_no] is not None for blocks in seq.blocks):
            return []
        pages = [int(table[seq.row, page_no]) for table in self.tables.pages]
        return pages if min(pages) >= 0 else []

    def _hidden(self, seq: Sequence, page_no: int) -> bool:
        """Return whether a sequence lacks a page, or the page above it is not published."""
        for blocks in seq.blocks:
            above = blocks[page_no - 1] if 0 < page_no < len(blocks) else None
            if len(blocks) <= page_no or (page_no > 0 and (above is None or above.gone)):
                return True
        return False

    def keep(self, seq: Sequence) -> None:
        """Keep the page that a sequence leaves unfilled, unless another page has its tokens."""
        end, store = min(seq.length, seq.known), self.store
        page_no, count = divmod(end, self.page_size)
        pages = self._own(seq, page_no) if count else []
        forked = (p >> CODEC_SHIFT or store.pool(g).references(p) > 1 for g, p in enumerate(pages))
        if not pages or any(forked):
            return
        found = self.best_match(seq, page_no, end)
        if found is None or found.tokens < count:
            tokens = seq.tokens[page_no * self.page_size : end].copy()
            key, above = _key(seq, 0, page_no, tokens), seq.parent_key(0, page_no)
            tail = Block(-1, key, above, 0, "tail", fidelity=seq.fidelity, tokens=tokens)
            tail.tenant, tail.namespace = seq.tenant, seq.namespace
            store.tails.keep(tail, pages)

    def sums(self, group: int, page: int, count: int) -> torch.Tensor:
        """Return the sum of K and V of a raw page's first tokens: finite if all elements are."""
        keys, values = self.store.views(group, page, count)
        return keys.sum(dtype=torch.float64) + values.sum(dtype=torch.float64)

    # ---- for later processes

    def save(self, seq: Sequence) -> None:
        """Store the tail of a sequence, and that of its prompt without the last token.

        The last token is always computed again when the same prompt comes back.
        """
        store, end = self.store, min(seq.length, seq.known)
        number = store.stack.admission.writes_to()
        # On a GPU a forward over a few tokens takes as long as over one: a tail saves no time.
        elsewhere = any(pool.device.type != "cpu" for pool in store.pools.values())
        if number < 0 or elsewhere or not self.allowed(seq):
            return
        for stop in {end, seq.prompted - 1}:
            page_no, count = divmod(stop, self.page_size)
            known = (page_no + 1) * self.page_size <= seq.prompted  # within a page of the prompt
            # The frame of a tail takes as many bytes as that of a full page.
            few = count < max(1, self.page_size // _WORTH)
            if stop > end or few or known or self._hidden(seq, page_no):
                continue
            above = seq.blocks[0][page_no - 1] if page_no else None
            admission = store.stack.admission
            worth = admission.writes_all
            if above is not None:
                worth = bool(admission.worth_storing(admission.at_once([above]), number))
            if worth:
                for g in range(len(seq.blocks)):
                    self._save(seq, g, page_no, count, number)

    def _save(self, seq: Sequence, group: int, page_no: int, count: int, number: int) -> None:
        store, first = self.store, page_no * self.page_size
        page, layout = int(self.tables.pages[group][seq.row, page_no]), store.forms[group].raw
        tokens, above = seq.tokens[first : first + count].copy(), seq.parent_key(group, page_no)
        key = _key(seq, group, page_no, tokens)
        known = store.index.find(key)
        if page < 0 or page >> CODEC_SHIFT or (known and known.fidelity <= store.stack.fidelity):
            return
        store.stack.supersede(known)
        body = torch.zeros(layout.page_bytes, dtype=torch.uint8, device="cpu")
        old, new = store.views(group, page, count), store.forms[group].views(body, count)
        for source, target in zip(old, new, strict=True):
            target.copy_(source)
        block = store.index.get_or_create(key, above, group, "state")
        block.tokens, block.tail, block.n_bytes = tokens, count, len(body)
        block.tenant, block.namespace, block.fidelity = seq.tenant, seq.namespace, seq.fidelity
        form = store.forms[group].fingerprints[0], count, layout.stripe_stride_bytes
        info = frame_infos([block], *form)[0]
        store.writes.store_tail(block, number, info, body.numpy().data)

    def stored(self, seq: Sequence, page_no: int, stop: int) -> list[Block]:
        """Return the blocks, by group, of the longest stored tail of a prompt.

        The tail covers tokens from `page_no * P` on, up to `stop`; [] if there is none.
        """
        first = page_no * self.page_size
        above = seq.parent_key(0, page_no)
        for count in self.store.index.tails(above, stop - first) if self.store.stack.tiers else ():
            tokens, groups = seq.tokens[first : first + count], range(len(seq.chains))
            found = [self.store.find(_key(seq, g, page_no, tokens)) for g in groups]
            blocks = [block for block in found if block is not None and block.tail == count]
            if len(blocks) == len(found):
                return blocks
        return []


def _key(seq: Sequence, group: int, page: int, tokens: NDArray[np.uint32]) -> bytes:
    """Return the chain key of the first tokens of a page."""
    chain = seq.chains[group]
    salts = within(seq.salts, page * chain.page_size, len(tokens))
    return chain.page(seq.parent_key(group, page), tokens, salts)
