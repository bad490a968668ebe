"""Makes full pages known: checked, named by their chain key, shared from then on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch

from flowkv.core.layout import CODEC_SHIFT
from flowkv.observe.events import Published
from flowkv.runtime.index import Block
from flowkv.runtime.sequence import Sequence
from flowkv.runtime.store import Store
from flowkv.runtime.tables import Tables


class Publisher:
    """Publishes pages of sequences. Callers hold the KV lock.

    Args:
        store: Where the pages become known.
        tables: Lines of all sequences.

    Attributes:
        allowed: Whether a sequence's pages may become known.
        on_non_finite: Told (group, page) that holds NaN or infinity.
    """

    def __init__(self, store: Store, tables: Tables) -> None:
        self.store, self.tables = store, tables
        self.page_size = store.geometry.page_size
        self.allowed: Callable[[Sequence], bool] = lambda seq: seq.publishable
        self.on_non_finite: Callable[[int, int], None] = lambda group, page: None

    def publish(self, seqs: Iterable[Sequence], *, exact: bool = False) -> None:
        """Makes the sequences' full pages with known tokens known to the index.

        A page that somebody else has computed meanwhile takes the place of a sequence's own.

        Args:
            seqs: The sequences.
            exact: Only if it has the same bytes: rounding may differ with what else was in a step.
        """
        fresh: list[list[Block]] = [[] for _ in self.store.geometry.groups]
        try:
            for seq in seqs:
                self._publish_full(seq, fresh, exact)
        finally:
            for blocks in fresh:
                self.store.insert(blocks)

    def _publish_full(self, seq: Sequence, fresh: list[list[Block]], exact: bool) -> None:
        full = min(seq.length, len(seq.tokens)) // self.page_size
        for g, blocks in enumerate(seq.blocks):
            start = max(seq.published[g], seq.first_page[g])
            if start >= full or not self.allowed(seq):
                continue
            before = len(fresh[g])
            for page_no in range(start, full):
                if blocks[page_no] is None and not (exact and self._differs(seq, g, page_no)):
                    self._publish(seq, g, page_no, fresh[g])
                if not seq.publishable:
                    return
            seq.published[g] = full
            pages = len(fresh[g]) - before
            if pages:
                tokens = pages * self.page_size
                self.store.bus.emit(
                    Published(group=g, pages=pages, tokens=tokens, tenant=seq.owner)
                )

    def _differs(self, seq: Sequence, group: int, page_no: int) -> bool:
        """Whether a page is known with other bytes than those that a sequence has."""
        block = self.store.index.find(seq.key(group, page_no))
        page = int(self.tables.pages[group][seq.row, page_no])
        if block is None or block.page < 0:
            return False
        pool, n_bytes = self.store.pool(group), self.store.forms[group].of(page).page_bytes
        if block.page >> CODEC_SHIFT != page >> CODEC_SHIFT:
            return True
        mine, theirs = (pool.page_bytes(one, n_bytes) for one in (page, block.page))
        return not torch.equal(mine, theirs)

    def _publish(self, seq: Sequence, group: int, page_no: int, fresh: list[Block]) -> None:
        """Makes a page known, or takes the known one; adds what was not on the device before."""
        store, pool = self.store, self.store.pool(group)
        page = int(self.tables.pages[group][seq.row, page_no])
        key = seq.key(group, page_no)
        block = store.index.find(key)
        if block is not None and block.page >= 0:
            seq.fidelity = max(seq.fidelity, block.fidelity)
            store.hold(block)
            pool.release(page)
            self.tables.pages[group][seq.row, page_no] = block.page
            self.tables.touch()
            seq.blocks[group][page_no] = block
            return
        codec = page >> CODEC_SHIFT
        if not codec and not self._sound(group, page):
            seq.publishable = False
            self.on_non_finite(group, page_no)
            return
        if block is not None:
            store.supersede(block)
        block = store.index.publish(key, seq.parent_key(group, page_no), group)
        first = page_no * self.page_size
        block.tokens = seq.tokens[first : first + self.page_size].copy()
        block.tenant, block.namespace = seq.tenant, seq.namespace
        block.fidelity = max(seq.fidelity, codec)
        block.lease = seq.care.of(first, first + self.page_size)
        store.publish(block, page)
        store.provisional.add(block)
        fresh.append(block)
        store.hold(block)
        seq.blocks[group][page_no] = block
        if codec or not store.forms[group].ladder.rungs:  # else it is once it is encoded
            store.write_down(block)

    def _sound(self, group: int, page: int) -> bool:
        """Whether a page holds finite numbers only; blanks what lies between its stripes."""
        layout = self.store.forms[group].raw
        raw = self.store.pool(group).page_bytes(page, layout.page_bytes)
        stripes = raw.view(layout.layers, layout.stripe_stride_bytes)
        if layout.stripe_bytes < layout.stripe_stride_bytes:
            # Padding holds whatever the page held before, for another group or tenant.
            stripes[:, layout.stripe_bytes :].zero_()
        return finite(stripes[:, : layout.stripe_bytes].view(getattr(torch, layout.dtype)))


def finite(values: torch.Tensor) -> bool:
    """Whether a tensor holds neither NaN nor infinity."""
    # A finite sum proves that all summands are finite, at memory speed; overflow asks again.
    return math.isfinite(values.sum().item()) or bool(torch.isfinite(values).all())
