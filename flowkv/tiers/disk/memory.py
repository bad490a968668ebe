"""Where frames lie on their way between a disk and whoever wants them."""

from __future__ import annotations

from flowkv.tiers.io.staging import Arena, Slot


class Staging:
    """Slots of an arena, and memory for the odd frame that does not fit into it.

    Args:
        arena: Shared with others; None for one of its own.
        n_bytes: Size of its own.

    Attributes:
        arena: Where slots come from.
    """

    def __init__(self, arena: Arena | None, n_bytes: int) -> None:
        self.arena, self._own = arena or Arena(n_bytes), arena is None
        self._spare: dict[Slot, Arena] = {}
        self._retired: set[Slot] = set()
        self._retired_bytes = 0

    @property
    def clogged(self) -> bool:
        """Whether so much memory waits for overdue operations that the disk is left alone."""
        return self.arena.clogged or self._retired_bytes > self.arena.most_retired_bytes

    def take(self, n_bytes: int) -> Slot | None:
        """Memory in the arena; None if there is no room now."""
        return self.arena.take(n_bytes)

    def take_spare(self, n_bytes: int) -> Slot:
        """Memory outside of the arena, for what would wait for ever.

        Raises:
            OSError: The system has none.
        """
        arena = Arena(n_bytes, most_retired_bytes=1 << 62)
        slot = arena.take(n_bytes)
        assert slot is not None
        self._spare[slot] = arena
        return slot

    def retire(self, slot: Slot) -> None:
        """The operation on this memory is overdue: `give_back` will say when it has ended."""
        if slot not in self._retired:
            self._retired.add(slot)
            self._retired_bytes += slot.n_bytes
            self._spare.get(slot, self.arena).retire(slot)

    def give_back(self, slot: Slot) -> None:
        """No operation uses this memory any more."""
        arena = self._spare.pop(slot, None)
        home = arena or self.arena
        if slot in self._retired:
            self._retired.discard(slot)
            self._retired_bytes -= slot.n_bytes
            home.revive(slot)
        else:
            home.give_back(slot)
        if arena is not None:
            arena.close()

    def close(self) -> None:
        """Gives up memory of its own, unless something may still be written to it."""
        for arena in self._spare.values():
            arena.close()
        if self._own:
            self.arena.close()
