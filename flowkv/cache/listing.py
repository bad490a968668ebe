"""Frames that tiers list become known blocks: at the start, and where other caches write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import islice

from flowkv.cache.index import UNKNOWN, Block, PrefixIndex, enter_tier
from flowkv.tiers.base import Entry, FrameInfo, Tier, evictable

_ADOPTED, _LOOKED_AT = 64, 1 << 12  # other caches' frames per call: most adopted, most examined


class Listing:
    """Publisher of the frames that tiers list. Callers hold the KV lock.

    Args:
        tiers: The tiers, nearest first; others may be added.
        index: The known blocks.
        insert: Inserts blocks that became resident on a tier into its policy.

    Attributes:
        quarantined: Tier numbers and keys of frames with wrong content, which are not published.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        index: PrefixIndex,
        insert: Callable[[Sequence[Block], int], None],
    ) -> None:
        self._tiers, self._index, self._insert = tiers, index, insert
        self._strangers: dict[int, list[Block]] = {}
        self.quarantined: set[tuple[int, bytes]] = set()

    def publish_frames(self, number: int, entries: Iterable[Entry]) -> None:
        """Publish blocks for frames that a tier holds, given the oldest first."""
        trees, fresh = dict[bytes, list[Block]](), list[list[Block]]()
        in_use = self._in_use(number)
        for entry in entries:
            info = entry.info
            block = self._index.get_or_create(entry.key, info.parent, info.group, info.kind)
            # Copies may differ in fidelity; the best of them counts.
            block.fidelity = min(info.fidelity, block.fidelity if block.tiers else info.fidelity)
            enter_tier([block], number, info.codec)
            block.placed &= info.tokens > 0
            if info.kind != "page":
                block.n_bytes, block.tail = entry.n_bytes, info.tokens
            block.tenant, block.namespace = info.tenant, info.namespace
            if not in_use(info.namespace):
                self._strangers.setdefault(number, []).append(block)
            if (tree := trees.get(info.parent)) is None:
                fresh.append(tree := [])
            trees[entry.key] = tree
            tree.append(block)
        # A policy evicts the last block of a call first, as a leaf: so the oldest tree comes last.
        blocks = [block for tree in reversed(fresh) for block in tree]
        self._insert(blocks, number)

    def _in_use(self, number: int) -> Callable[[bytes], bool]:
        """Return a cached predicate: whether a tier records a namespace as in use."""
        known: Callable[[bytes], bool] = getattr(self._tiers[number], "in_use", lambda _: True)
        return lru_cache(known)

    def stranger(self, number: int) -> Block | None:
        """Return a block of a tier in a namespace that is out of use; None if there is none.

        Frames of another version, which named pages differently, are such blocks: they are evicted
        before all others.
        """
        left, in_use = self._strangers.get(number, []), self._in_use(number)
        while left:
            block = left.pop()
            free = not (block.gone or block.kept or block.going)
            if free and block.tiers >> number & 1 and not in_use(block.namespace):
                return block
        return None

    def list_unknown(self, number: int, meant: Callable[[FrameInfo], bool]) -> None:
        """Publish the listed frames of a tier that `meant` selects and that are unknown there."""
        self._add(number, (entry for entry in self._tiers[number].scan() if meant(entry.info)))

    def _add(self, number: int, entries: Iterable[Entry], most: int | None = None) -> int:
        """Publish the first unknown of a tier's frames; return their number."""
        fresh = [*islice((one for one in entries if not self._knows(one.key, number)), most)]
        self.publish_frames(number, fresh)
        return len(fresh)

    def _knows(self, key: bytes, number: int) -> bool:
        known = self._index.find(key)
        return known is not None and bool((known.tiers | known.going) >> number & 1)

    def adopt(self, number: int) -> int:
        """Publish the oldest unknown frames of a shared tier; return their number.

        Used where room is needed and no known block may go: the policy then orders the frames of
        other caches, too.
        """
        tier = self._tiers[number]
        found = islice(evictable(tier), _LOOKED_AT)
        return self._add(number, found, _ADOPTED) if tier.shared else 0

    @property
    def watches(self) -> bool:
        """Return whether any of the tiers is shared with other writers."""
        return any(tier.shared for tier in self._tiers)

    def discover(
        self, keys: Sequence[bytes], above: bytes, realm: tuple[bytes, bytes], like: tuple[int, str]
    ) -> None:
        """Look up pages on the shared tiers, and publish those that are unknown here.

        Args:
            keys: Keys of consecutive pages.
            above: Key above the first one.
            realm: Their tenant salt and namespace digest.
            like: Their layer group and kind.
        """
        for number, tier in enumerate(self._tiers):
            if not tier.shared:
                continue
            parent, fresh = above, []
            for key, there in zip(keys, tier.contains(keys), strict=True):
                known = self._index.find(key)
                there = there and (number, key) not in self.quarantined
                if there and (known is None or not known.tiers >> number & 1):
                    block = self._index.get_or_create(key, parent, *like)
                    block.tenant, block.namespace = realm
                    enter_tier([block], number, UNKNOWN)
                    fresh.append(block)
                parent = key
            self._insert(fresh, number)
