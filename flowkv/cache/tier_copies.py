"""Forms of the copies that tiers hold of blocks: their codecs and their bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flowkv.cache.index import UNKNOWN, Block
from flowkv.cache.mover import Mover
from flowkv.cache.pool import Forms


class TierCopies:
    """Codecs and bytes of blocks on tiers, as far as they are known. Callers hold the KV lock.

    Args:
        forms: The page forms of each layer group.
        mover: Transfers, with the frames on their way to tiers.
    """

    def __init__(self, forms: Sequence[Forms], mover: Mover) -> None:
        self._forms, self._mover = forms, mover

    def size(self, block: Block, number: int) -> int:
        """Return the bytes of a block's body as a tier (-1: any) gives it: at least 1."""
        if block.group >= len(self._forms):
            return block.n_bytes or 1  # a block of another model
        unknown = number < 0 or (not block.n_bytes and block.codec_on(number) == UNKNOWN)
        known = 0 if unknown else self.body_bytes(block, number)
        return known or self._forms[block.group].likely_bytes

    def nearest_size(self, block: Block) -> int:
        """Return the bytes of a block's device page, or of its copy on the nearest tier."""
        if block.page >= 0:
            return self._forms[block.group].layout(block.page).page_bytes
        return self.size(block, block.tier)

    def nearest_bytes(self, blocks: Iterable[Block]) -> dict[int, int]:
        """Return the bytes of blocks in the tier that each is read from now, by its number."""
        found, known = dict[int, int](), dict[tuple[int, ...], tuple[int, int]]()
        for block in blocks:
            form = block.group, block.tiers, block.codecs, block.n_bytes
            if block.going or form not in known:
                known[form] = (tier := self._source(block)), self.size(block, tier)
            number, n_bytes = known.pop(form) if block.going else known[form]
            found[number] = found.get(number, 0) + n_bytes
        return found

    def _source(self, block: Block) -> int:
        """Return the tier that a block is read from now; the nearest one if none can be read."""
        moving = self._mover.on_the_way(block.key) if block.going else None
        if moving is not None:
            return moving.tier
        lanes = (n for n, lane in enumerate(self._mover.lanes) if lane.answering)
        return next((n for n in lanes if block.tiers >> n & 1), block.tier)

    def codecs(self, block: Block, number: int) -> tuple[int, ...]:
        """Return the codecs that a tier's copy of a page may have; () if it is unreadable."""
        if block.group >= len(self._forms):
            return ()  # a block of another model
        forms, codec = self._forms[block.group], block.codec_on(number)
        if codec == UNKNOWN:
            return forms.likely
        return (codec,) if codec in forms.layouts else ()

    def body_bytes(self, block: Block, number: int) -> int:
        """Return the most bytes of a block's body on a tier; 0 if that is unknown here."""
        if block.n_bytes:
            return block.n_bytes
        moving = self._mover.on_the_way(block.key, number) if block.going >> number & 1 else None
        if moving is not None:
            return moving.store.body.nbytes
        codecs = self.codecs(block, number)
        return max([self._forms[block.group].layouts[c].page_bytes for c in codecs], default=0)
