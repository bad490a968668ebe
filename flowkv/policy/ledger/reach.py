"""From one place of a ledger into a faster one, before anybody asks.

`Reach` is what a `Prefetcher` has to know about the two, and carries out what it decides.
"""

from __future__ import annotations

import numpy as np

from flowkv.core.errors import ConfigError
from flowkv.policy.base import NO_SLOTS, Slots
from flowkv.policy.ledger import calls
from flowkv.policy.ledger.blocks import LARGEST, RESIDENT
from flowkv.policy.ledger.places import Move
from flowkv.policy.ledger.residence import Residence
from flowkv.policy.order.leaf import as_slots


class Reach:
    """Two places of a ledger, as they are at the moment.

    Args:
        ledger: Whose places.
        source: Number of the slower one.
        target: Number of the faster one.

    Raises:
        ConfigError: If the target is not the faster one.
    """

    def __init__(self, ledger: Residence, source: int, target: int) -> None:
        if not 0 <= target < source < len(ledger._shelves):
            raise ConfigError(
                f"nothing can be brought from place {source} to place {target}",
                f"Name a faster one of the {len(ledger._shelves)} places as the target",
            )
        self._ledger = ledger
        self._source, self._target = source, target

    @property
    def capacity_bytes(self) -> int:
        """Of the target."""
        return self._ledger._shelves[self._target].capacity

    def room_bytes(self) -> int:
        """Free in the target."""
        shelf = self._ledger._shelves[self._target]
        return shelf.capacity - int(self._ledger._state[shelf.used_at])

    def sizes(self, slots: Slots) -> Slots:
        """Bytes of blocks."""
        sizes: Slots = self._ledger._blocks["bytes"][slots]
        return sizes

    def missing(self, tip: int) -> tuple[int, Slots]:
        """The deepest ancestor of `tip` in the target, or -1, and what lies between, root first.

        Only as far as the source can be read without a gap; `tip` comes last.
        """
        path = np.empty(int(self._ledger._state[RESIDENT]) + 1, np.int64)
        n, anchor = calls.gap(self._ledger._blocks, tip, self._source, self._target, path)
        return int(anchor), path[:n][::-1].copy()

    def bring(self, now_ns: int, slots: Slots, victims: Slots = NO_SLOTS) -> list[Move]:
        """Carries it out, at once: `victims`, which the target's policy has given up, go.

        Args:
            now_ns: Time.
            slots: What comes, root to leaf, as `missing` said; as far as there is room.
            victims: What goes for it.

        Raises:
            StateError: The victims do not lie in the target.
        """
        ledger, k = self._ledger, self._target
        now = ledger._advance(now_ns)
        if len(victims):
            ledger._give_up(now, k, victims)
        slots = as_slots(slots)
        can = np.empty(len(slots), np.int64)
        slots = can[: calls.readable(ledger._blocks, slots, self._source, k, can)]
        slots = slots[: np.searchsorted(self.sizes(slots).cumsum(), self.room_bytes(), "right")]
        if len(slots):
            ledger._bring(now, k, slots)
            ledger._moves.append(Move(slots, self._source, k))
        return ledger._flush()

    def fill(self, now_ns: int, budget_blocks: int) -> tuple[list[Move], list[Slots]]:
        """Brings what the target's policy wants, while it is worth more than what goes for it.

        Returns:
            What moved, and the chains that came, root to leaf each. None is the normal answer.
        """
        ledger, k = self._ledger, self._target
        now = ledger._advance(now_ns)
        moves, chains = ledger._flush(), []
        shelf = ledger._shelves[k]
        tips, rates = shelf.policy.wanted(now, budget_blocks)
        for tip, rate in zip(tips.tolist(), rates.tolist(), strict=True):
            anchor, path = self.missing(tip)
            path = path[:budget_blocks]
            need = int(self.sizes(path).sum()) - self.room_bytes()
            victims = NO_SLOTS
            if need > 0:
                count = -(-need // int(ledger._state[LARGEST]))
                guarded = [*ledger._protected(shelf).tolist(), *([anchor] if anchor >= 0 else [])]
                victims = shelf.policy.displace(now, count, rate, guarded)
            more = self.bring(now, path, victims)
            moves += more
            came = [move.slots for move in more if move.target == k]
            chains += came
            budget_blocks -= sum(map(len, came))
        return moves, chains
