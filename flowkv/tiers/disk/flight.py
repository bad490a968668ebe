"""One wish between the queue and its answer: what it does to the disk, and in which memory."""

from __future__ import annotations

from flowkv.core.layout import GRANULE_BYTES
from flowkv.tiers.disk.records import Held, Written
from flowkv.tiers.disk.wishes import Item
from flowkv.tiers.frame import Header, aligned
from flowkv.tiers.io.engine import READ, WRITE
from flowkv.tiers.io.staging import Slot

NEAR_BYTES = 64 << 10
"""Stripes that lie so near to their header are read together with it."""

Operation = tuple[int, int, int, int, int]  # op, fd, offset, address, length


class Flight:
    """Operations of one item.

    Attributes:
        item: Whose.
        stores: Whether it writes.
        memory: Staging slot; None while or if there is none.
        left: Operations that did not complete yet.
        error: First negative result, or 0.
        short: Whether an operation moved less than it must.
    """

    __slots__ = ("error", "item", "left", "memory", "short", "tags")

    stores = False

    def __init__(self, item: Item, memory: Slot | None) -> None:
        self.item, self.memory = item, memory
        self.left = self.error = 0
        self.short = False
        self.tags: list[int] = []

    def note(self, result: int, must: int) -> bool:
        """Takes a completion; whether it was the last one."""
        self.left -= 1
        if result < 0:
            self.error = self.error or result
        elif result < must:
            self.short = True
        return self.left == 0


class Reading(Flight):
    """A load. `first` and `count` are the stripes wished for.

    Attributes:
        held: Where the frame lies.
        direct: The target itself, where the disk may write to it.
        header: What the header says, once it was read before the stripes.
        body_at: Where the stored stripes begin in `memory`.
    """

    __slots__ = ("body_at", "count", "direct", "first", "head_at", "header", "held")

    def __init__(self, item: Item, held: Held, first: int, count: int) -> None:
        super().__init__(item, None)
        self.held, self.first, self.count = held, first, count
        self.direct: memoryview | None = None
        self.header: Header | None = None
        self.head_at = self.body_at = 0

    def extents(self, *, direct: bool) -> list[tuple[int, int]]:
        """Parts of the slot to be read now, from and length: header and stripes, or one of them."""
        held = self.held
        head = held.header_bytes
        if held.lossless:
            if self.header is not None:
                raise AssertionError("the stripes are placed by their header")
            whole = self.count == held.stripes or held.stored_bytes <= head + NEAR_BYTES
            return [(0, held.stored_bytes if whole else head)]
        step = held.info.stripe_bytes
        start, n_bytes = head + self.first * step, self.count * step
        if not direct and start - head <= NEAR_BYTES:
            return [(0, start + n_bytes)]
        return [(0, head), (start, n_bytes)]


class Writing(Flight):
    """A store: one write of header and stripes."""

    __slots__ = ("length", "written")

    stores = True

    def __init__(self, item: Item, memory: Slot, written: Written, length: int) -> None:
        super().__init__(item, memory)
        self.written, self.length = written, length

    def operation(self, fd: int) -> Operation:
        """What to do."""
        assert self.memory is not None
        offset = self.written.held.slot.offset
        return WRITE, fd, offset, self.memory.address, self.length


def read(fd: int, offset: int, address: int, n_bytes: int) -> Operation:
    """A read of whole granules."""
    return READ, fd, offset, address, aligned(n_bytes)


def wider(n_bytes: int) -> int:
    """Memory that such a read needs."""
    return aligned(max(n_bytes, GRANULE_BYTES))
