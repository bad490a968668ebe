"""When to empty sparse slabs of a page pool, and how much copying that is worth.

Pages of different codecs have different sizes, and a slab holds pages of one size (Bonwick, USENIX
'94). Bytes that are free in slabs of one size are of no use to another, until a slab is empty. So a
pool can refuse a page with half its bytes free. Moving the pages of sparse slabs into the holes of
fuller ones gives whole slabs back; here it is decided when that pays, a little at each step's edge.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from msgspec import Meta

from flowkv.policy.config import PolicyConfig, configure

Share = Annotated[float, Meta(ge=0.0, le=1.0)]


class Occupancy(NamedTuple):
    """What a pool looks like.

    Attributes:
        slabs: All slabs.
        empty: Those that any size of page may take.
        reclaimable: Slabs that would be empty as well if the holes of each size lay together.
        sizes: Sizes that pages have; with a single one, holes are as good as empty slabs.
        fragmentation: Share of the bytes in occupied slabs that no page uses.
    """

    slabs: int
    empty: int
    reclaimable: int
    sizes: int
    fragmentation: float


class DefragmentationConfig(PolicyConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What `Defragmentation` can be told.

    Attributes:
        least_fragmentation: Nothing moves below this.
        reserve_share: Part of the slabs that should be empty, ready for any size.
        most_bytes: Copied at one step's edge, or one page if that is more; 0 for nothing ever.
        least_gain: Bytes of slabs emptied per byte copied, at least. 2 means that only slabs which
            are at most half full are emptied.
        blocks_per_edge: After moving, whoever names a page is looked up among all known blocks:
            there is one edge of rest for so many.
    """

    least_fragmentation: Share = 0.1
    reserve_share: Share = 1 / 16
    most_bytes: Annotated[int, Meta(ge=0)] = 16 << 20
    least_gain: Annotated[float, Meta(ge=1.0)] = 2.0
    blocks_per_edge: Annotated[int, Meta(ge=1)] = 512


class Defragmentation:
    """Decides for one pool. Deterministic: it sees numbers only, and counts edges, not seconds.

    Args:
        **options: Fields of `DefragmentationConfig`.

    Raises:
        ConfigError: An option is unknown or malformed.
    """

    name = "defragmentation"

    def __init__(self, **options: object) -> None:
        self.config = configure(DefragmentationConfig, self.name, options)
        self._rest = 0
        self._fruitless: Occupancy | None = None

    def budget(self, now: Occupancy, blocks: int) -> int:
        """Most bytes to copy at this step's edge; 0 to leave the pool as it is.

        Args:
            now: What the pool looks like.
            blocks: Blocks that may have to be renamed.
        """
        if self._rest:
            self._rest -= 1
            return 0
        config = self.config
        short = now.empty < max(1, int(config.reserve_share * now.slabs))
        pays = now.reclaimable > 0 and now.fragmentation >= config.least_fragmentation
        if not (short and pays) or now.sizes < 2 or now == self._fruitless:
            return 0
        self._rest = blocks // config.blocks_per_edge
        return config.most_bytes

    def moved(self, pages: int, now: Occupancy) -> None:
        """What came of a budget. After nothing, nothing is tried until the pool looks different."""
        self._fruitless = None if pages else now
