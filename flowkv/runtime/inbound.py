"""One page of a restored prefix on its way to its device, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from flowkv import kernels
from flowkv.core.errors import NonFiniteError, StateError
from flowkv.core.layout import CODEC_SHIFT, GRANULE_BYTES, granule_of
from flowkv.runtime.index import Block
from flowkv.runtime.sequence import Sequence
from flowkv.runtime.store import Store
from flowkv.runtime.traffic import Source
from flowkv.tiers.base import FrameInfo, Load


class Inbound:
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

    def __init__(self, store: Store, block: Block, page_no: int) -> None:
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

    def wish(self, source: Source, first: int, count: int) -> tuple[Load, torch.Tensor]:
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

    def sources(self, first: int) -> Iterator[Source]:
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

    def publish(self, source: Source) -> bool:
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
