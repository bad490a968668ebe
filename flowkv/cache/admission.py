"""Admission of blocks to tiers: which tiers may store a block, and which should.

Writes to weights that PyTorch does not count are found by reading the weights again. A page is
proven once such a reading, begun after the page became known, has found all weights unchanged.
Unproven pages are known in the process, but kept out of all persistent and shared places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from itertools import compress

from flowkv.cache.context import PolicyContext
from flowkv.cache.index import Block
from flowkv.cache.mover import Mover
from flowkv.cache.pool import Forms
from flowkv.policy.base import DEFAULT_RANK, Lease
from flowkv.policy.order.leaf import as_slots
from flowkv.residency.keyed import PolicyPlace
from flowkv.tiers.base import FrameInfo, Tier

_SHORT = ("", "one_shot", "ephemeral")


def _stays(block: Block) -> bool:
    """Return whether a request asked for a page to be kept: by a pin, a lease or `Retain`."""
    lease = block.lease
    asked = lease.rank >= DEFAULT_RANK if isinstance(lease, Lease) else lease not in _SHORT
    return block.pinned or asked


class Provisional(dict[Block, bool]):
    """Unproven blocks, kept out of persistent and shared tiers. Callers hold the KV lock.

    The value of each is whether a reading of all weights has begun since it became known.

    Attributes:
        active: Whether blocks that become known from now on have to be proven.
        tails: Header and body of each unproven tail, the oldest first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.active, self.tails = False, dict[Block, tuple[FrameInfo, memoryview]]()

    def add(self, block: Block) -> None:
        """Add a block that became known, if blocks have to be proven now."""
        if self.active:
            self[block] = False

    def discard(self, block: Block) -> None:
        """Remove a block that was forgotten."""
        self.pop(block, None)
        self.tails.pop(block, None)

    def begin(self) -> None:
        """Begin a reading of all weights, which can prove all blocks known by now."""
        self.update(dict.fromkeys(self, True))

    def confirm(self) -> dict[Block, tuple[FrameInfo, memoryview] | None]:
        """End a reading that found no change; return the blocks proven by it, and tails' bodies."""
        proven = [block for block, read in self.items() if read]
        for block in proven:
            del self[block]
        return {block: self.tails.pop(block, None) for block in proven}


class Admission:
    """Choice of the tiers that store a block. Callers hold the KV lock.

    Args:
        context: The known blocks, with time and rates.
        tiers: The tiers, nearest first.
        places: The tiers as policies see them.
        mover: Transfers to the tiers.
        forms: The page forms of each layer group.
        provisional: Blocks that must not leave the process yet.
        write_back: Whether full pages are written to the persistent tier at once.
        sends: Returns whether other processes read the pages, at rates that are unknown here.

    Attributes:
        states_only: Numbers of the tiers that are closed to pages.
    """

    def __init__(
        self, context: PolicyContext, tiers: Sequence[Tier], places: Sequence[PolicyPlace],
        mover: Mover, forms: Sequence[Forms], provisional: Provisional, *, write_back: bool,
        sends: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._context, self._tiers, self._places, self._mover = context, tiers, places, mover
        self._provisional, self.write_back, self._sends = provisional, write_back, sends
        self._groups, whole = len(forms), [one for one in forms if one.whole] or forms
        self._prompt_bytes = sum(one.likely_bytes for one in whole)  # per page of a long prompt
        self.states_only = set[int]()

    def outlives(self, number: int) -> bool:
        """Return whether a tier is persistent, or shared with other processes."""
        return self._tiers[number].kind != "host" or self._tiers[number].shared

    def worth_storing(self, blocks: Sequence[Block], number: int) -> list[Block]:
        """Return the pages that can ever be worth loading from a tier; count each other once."""
        terms = self._tiers[number].name, self._prompt_bytes, self._context.page_size
        groups, gate, poor = 0 if self._sends() else self._groups, self._context.gate, set[Block]()
        for block in [b for b in blocks if b.kind == "page" and b.group < groups]:
            reach = lru_cache(partial(self._context.index.reach, block))
            if not gate.pays_to_store(*terms, reach):
                poor.add(block)
            elif not reach.cache_info().misses:  # it pays in any prompt: so do all others
                break
        new = [block for block in poor if not block.unpaid >> number & 1]
        self._mover.lanes[number].unpaid += len(new)
        for block in new:
            block.unpaid |= 1 << number
        return [block for block in blocks if block not in poor]

    @property
    def writes_all(self) -> bool:
        """Return whether every page is written at once: without write admission, or to memory."""
        if self._context.writes is None or self._sends():
            return True
        number = self.lasting()
        return number < 0 or self._tiers[number].kind == "host"

    def at_once(self, blocks: Sequence[Block]) -> Sequence[Block]:
        """Return the blocks that are written as soon as they are final."""
        return blocks if self.writes_all else [b for b in blocks if b.kind != "page" or _stays(b)]

    def chosen(self, blocks: Iterable[Block]) -> list[Block]:
        """Return the pages that write admission would let leave memory now."""
        some, rule = [*blocks], self._context.writes
        if rule is None:
            return some
        rule.choose(as_slots([block.slot for block in some if _stays(block)]))
        return [*compress(some, rule.admits(as_slots([block.slot for block in some])))]

    def decline(self, blocks: Iterable[Block], number: int) -> set[Block]:
        """Return the pages that leave memory for no lasting tier, by write admission; count them.

        Args:
            blocks: Blocks that leave memory and that the tier may store.
            number: The tier.
        """
        rule = self._context.writes
        if rule is None or self.writes_all or self._tiers[number].kind == "host":
            return set()
        pages = [block for block in blocks if block.kind == "page"]
        self.chosen(pages)
        found = {*compress(pages, ~rule.depart(as_slots([block.slot for block in pages])))}
        self._mover.lanes[number].declined += len(found)
        return found

    def storable(self, blocks: Iterable[Block], number: int) -> list[Block]:
        """Return the blocks that a tier is open to, if it is writable, be it resting or not."""
        barred = self._provisional if self.outlives(number) else ()
        pages = number not in self.states_only
        some = blocks if self._tiers[number].writable else ()
        return [one for one in some if one not in barred and (pages or one.kind != "page")]

    def admitted(self, blocks: Iterable[Block], number: int) -> list[Block]:
        """Return the blocks that a tier may store, and that its policy admits."""
        some, policy = self.storable(blocks, number), self._places[number].policy
        slots = as_slots([block.slot for block in some])
        return [*compress(some, policy.admit(self._context.now_ns(), slots) if some else ())]

    def writes_to(self) -> int:
        """Return the number of the tier that full pages are written to at once, else -1."""
        return self.lasting() if self.write_back or self._sends() else -1

    def near(self) -> int:
        """Return the number of the nearest writable tier if it ends with the process, else -1."""
        some = [n for n, t in enumerate(self._tiers) if t.writable and n not in self.states_only]
        return some[0] if some and not self.outlives(some[0]) else -1

    def lasting(self) -> int:
        """Return the number of the first writable tier that outlives the process, else -1."""
        numbers = [n for n, tier in enumerate(self._tiers) if tier.writable and self.outlives(n)]
        return min(numbers, key=lambda number: self._tiers[number].kind == "host", default=-1)
