"""Prefixes of a batch that are still on their way while the model runs (DESIGN D14).

Before the first forward of a generation, nested forwards compute prefix chunks from the front while
loads arrive from the back, until both have met. Then the user's own forward runs; each layer of it
waits for that layer of the pages. What does not come is computed in nested forwards of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from contextlib import suppress

import torch

from flowkv.core.errors import CapacityError
from flowkv.hooks.huggingface.admission import Admitted, abort, discard, uncount
from flowkv.hooks.huggingface.fill import Fill
from flowkv.hooks.huggingface.nested import Nested, Part
from flowkv.hooks.huggingface.sequences import apart, close_all
from flowkv.runtime.cache import KV
from flowkv.runtime.restoration import Late, Restoration
from flowkv.runtime.sequence import Sequence

CHUNK = 512
"""Tokens of a row that one nested forward computes where no policy says how many."""


class _Coming:
    """One prefix on its way.

    Attributes:
        part: Its row.
        restoration: Brings it.
        shared: Several rows are of this prompt.
        front: Tokens that were computed, or there, when the rest was left to come.
        over: Nothing is waited for any more.
    """

    def __init__(self, part: Part, restoration: Restoration, *, shared: bool) -> None:
        self.part, self.restoration, self.shared = part, restoration, shared
        self.front, self.over = part.seq.length, False

    def finish(self, kv: KV, *, ok: bool) -> None:
        """Ends it; what came counts as reused."""
        self.restoration.finish(ok=ok)
        if not self.over:
            self.over = True
            came = max(0, self.restoration.tokens - self.front)
            if not self.restoration.tokens:
                came = -self.part.seq.reused  # a saved state was of no use, nor was its prefix
            self.part.seq.reused += came
            uncount(kv, 0, -came)


class Restoring:
    """The restorations of one batch, until the first forward behind them is over.

    Args:
        kv: The cache.
        seqs: One per row; rows of one prompt may share theirs, until `meet` takes them apart.
        pads: Padding columns of each row.
        types: Token types of the whole prompts, by name.
    """

    def __init__(
        self,
        kv: KV,
        seqs: list[Sequence],
        pads: Items[int],
        types: Mapping[str, torch.Tensor],
    ) -> None:
        self._kv, self._seqs, self._pads, self.types = kv, seqs, list(pads), types
        rows: dict[int, list[int]] = {}
        for row, seq in enumerate(seqs):
            rows.setdefault(id(seq), []).append(row)
        self._coming: list[_Coming] = []
        for row, *others in rows.values():
            if (restoration := seqs[row].restoration) is not None:
                part = Part(row, seqs[row], pads[row], 0)
                self._coming.append(_Coming(part, restoration, shared=bool(others)))
        self._nested: Nested | None = None

    def __bool__(self) -> bool:
        return bool(self._coming)

    @property
    def cut(self) -> bool:
        """Whether rows that hold less than was to come can be gone on with."""
        return self._nested is None or self._nested.cut

    # ---- before the user's forward

    def restore(self, found: Admitted, nested: Nested, fill: Fill) -> Admitted:
        """As `meet`, for rows whose forward may begin where that ends.

        Returns:
            The rows, each with a sequence of its own, and the columns that need no computing.
        """
        try:
            self.meet(nested, front=nested.cut)
            ends = [p + seq.length for p, seq in zip(self._pads, found.seqs, strict=True)]
            base = fill.cut(min(ends), self._pads)
            return found._replace(base=base, states=found.states if base == found.base else None)
        except BaseException:
            close_all(found.seqs)
            raise

    def meet(self, nested: Nested, *, front: bool, columns: int = 0) -> None:
        """Computes prefix chunks while loads arrive, then lets the rest come behind the forward.

        Args:
            nested: Computes.
            front: Chunks from the front can be computed; otherwise everything is loaded.
            columns: Every row has so many in the end, whatever comes.
        """
        self._nested, times = nested, nested.rows // len(self._pads)
        for one in self._coming:  # rows may have been repeated, for beams
            one.part = one.part._replace(row=one.part.row * times)
        with suppress(CapacityError):  # what has no room to be computed is not restored
            while front and (wanted := self._wanted(nested)):
                nested.compute(wanted, self._pump)
        for one in self._coming:
            one.restoration.settle()
            one.front = one.restoration.front
        for one in self._coming:
            if one.shared:  # what is on its way cannot be forked
                one.finish(self._kv, ok=one.restoration.complete())
        while short := self._short(columns):
            nested.compute(short)
        apart(self._kv, self._seqs)

    def _wanted(self, nested: Nested) -> list[Part]:
        found = []
        for one in self._coming:
            if count := one.restoration.next():
                part = nested.whole(one.part._replace(count=count))
                if part.count < part.seq.known - part.seq.length:
                    found.append(part)
        return found

    def _short(self, columns: int) -> list[Part]:
        """What is missing of so many columns, a chunk of each row."""
        found = []
        for part, left in ((p, columns - p.pad - p.seq.length) for p in self._parts):
            if left > 0:
                found.append(part._replace(count=min(left, CHUNK)))
        return found

    @property
    def _parts(self) -> list[Part]:
        return [one.part for one in self._coming]

    @property
    def _left(self) -> list[_Coming]:
        return [one for one in self._coming if not one.over]

    def _pump(self, layer: int) -> None:
        for one in self._left:
            one.restoration.pump()

    # ---- behind it

    def wait(self, layer: int) -> bool:
        """Returns when a layer of all pages is there; True if other pages took the place of some.

        Raises:
            CapacityError: There is no room to compute what does not come.
            Late: It cannot be computed either.
        """
        mended = False
        for one in self._left:
            try:
                one.restoration.wait(layer)
            except Late:
                self._mend(one)
                one.restoration.wait(layer)
                mended = True
        return mended

    def complete(self) -> bool:
        """Returns when all of it is there, loaded or computed; False if that cannot be."""
        with suppress(CapacityError):
            for one in self._left:
                if not one.restoration.complete():
                    if self._nested is None:
                        return False
                    self._mend(one)
            return True
        return False

    def _mend(self, one: _Coming) -> None:
        """Computes what does not come in a sequence of its own, whose pages then take its place."""
        nested, seq, end = self._nested, one.part.seq, one.restoration.tokens
        assert nested is not None
        twin = self._kv.open(
            seq.tokens, tenant=seq.owner, salts=seq.salts, limit=end, reuse=nested.cut, wait=False
        )
        try:
            twin.publishable = seq.publishable
            if twin.restoration is not None:
                twin.restoration.cancel()
            one.front += max(0, end - twin.length)
            while twin.length < end:
                rest = one.part._replace(seq=twin, count=min(CHUNK, end - twin.length))
                nested.compute([nested.whole(rest)], self._pump)
            one.restoration.fill(twin)
        finally:
            abort(self._kv, discard(self._kv, [twin]))

    def finish(self, *, ok: bool) -> None:
        """The forward is over, and was committed or not: what came is kept."""
        for one in self._coming:
            one.finish(self._kv, ok=ok)
