"""What must be true of a `Ledger` whatever its policies decide, counted anew from its answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from flowkv.policy.ledger import Ledger, Move, Plan
from flowkv.policy.ledger.table import Ids
from flowkv.testing.policy_model import require

Key = tuple[int, int, tuple[int, ...]]
"""(namespace, generation, tokens from the root on)."""


def ids_of(tokens: tuple[int, ...]) -> Ids:
    """An id for each prefix; the same for every namespace."""
    numbers = [int("1" + "".join(map(str, tokens[: i + 1]))) for i in range(len(tokens))]
    return np.array([(n, 7 * n) for n in numbers], np.uint64).reshape(-1, 2)


class LedgerModel:
    """Where every block lies, and who needs it.

    Args:
        capacities: Bytes of the places.

    Attributes:
        here: By place, the blocks in it.
        flight: Those on their way to the first place.
        fresh: Those that came to the first place in the present call.
        live: Request -> its blocks.
        slots: Block -> slot, while it is known to be known.
        bytes: Block -> bytes, while it lies anywhere.
    """

    def __init__(self, capacities: Sequence[int]) -> None:
        self.capacities = list(capacities)
        self.generation = [0, 0]
        self.here: list[set[Key]] = [set() for _ in capacities]
        self.flight: set[Key] = set()
        self.fresh: set[Key] = set()
        self.live: dict[int, list[Key]] = {}
        self.pins: Counter[Key] = Counter()
        self.slots: dict[Key, int] = {}
        self.names: dict[int, Key] = {}
        self.bytes: dict[Key, int] = {}

    # ---- identity

    def keys(self, namespace: int, tokens: tuple[int, ...]) -> list[Key]:
        """The blocks of a chain, as of the present generation."""
        generation = self.generation[namespace]
        return [(namespace, generation, tokens[: i + 1]) for i in range(len(tokens))]

    def learn(self, keys: list[Key], slots: Sequence[int]) -> None:
        """A plan named slots: one for each block, and the old one where the block lies anywhere."""
        require(len(set(slots)) == len(keys), "two blocks have one slot")
        for key, slot in zip(keys, slots, strict=True):
            if self.needed(key):
                require(self.slots[key] == slot, "a block that is there has another slot now")
            old = self.names.get(slot)
            if old is not None and old != key:
                require(not self.needed(old), "a slot was reused while its block was needed")
                del self.slots[old]
            self.names.pop(self.slots.get(key, slot), None)
            self.slots[key], self.names[slot] = slot, key

    def needed(self, key: Key) -> bool:
        """Whether a block lies anywhere or is in use."""
        return self.pins[key] > 0 or any(key in place for place in self.here)

    # ---- what can be read

    def source(self, key: Key, stale: Sequence[set[int]]) -> int:
        """The fastest place it can be read in; -2 while it is only on its way, -1 if nowhere."""
        present = [k for k, place in enumerate(self.here) if key in place]
        slot = self.slots.get(key, -1)
        for k in present:
            if slot not in stale[k] and not (k == 0 and key in self.flight):
                return k
        return -2 if present else -1

    def run(self, keys: list[Key], stale: Sequence[set[int]]) -> int:
        """Leading blocks that can be read."""
        can = [self.source(key, stale) >= 0 for key in keys]
        return can.index(False) if False in can else len(can)

    # ---- what changes

    def serve(self, keys: list[Key], plan: Plan, size: int, stale: Sequence[set[int]]) -> None:
        """A plan was made: it must be what the present state asks for."""
        require(plan.hits == self.run(keys, stale), f"{plan.hits} hits were counted wrongly")
        self.learn(keys, plan.slots.tolist())
        want = [self.source(key, stale) for key in keys]
        require(plan.sources.tolist() == want, "the sources are not where the blocks are")
        require(0 <= plan.kept <= len(keys), "kept more than there is")
        self.fresh = set(keys[: plan.kept]) - self.here[0]
        for key in keys[: plan.kept]:
            self.add(key, 0, size)

    def add(self, key: Key, k: int, size: int = 0) -> None:
        """A block lies in a place."""
        if size:
            self.bytes.setdefault(key, size)
        self.here[k].add(key)

    def apply(self, moves: Sequence[Move]) -> None:
        """Carries out what goes, in this order: only from where it is."""
        for move in moves:
            keys = [self.names[s] for s in move.slots.tolist()]
            require(len(set(keys)) == len(keys), "a move names a block twice")
            for key in keys:
                if move.target >= 0:
                    require(key in self.here[move.source], "a copy was made of what is not there")
                    require(key not in self.here[move.target], "a copy was there already")
                    self.add(key, move.target)
                    continue
                k = move.source
                require(key in self.here[k], "what left was not there")
                declined = k == 0 and key in self.fresh  # it came in this call, for another
                require(self.pins[key] == 0 or declined, "a pinned block left")
                self.here[k].discard(key)
                if k == 0:
                    self.flight.discard(key)
                if not any(key in place for place in self.here):
                    self.bytes.pop(key, None)
        self.fresh = set()

    def pin(self, keys: list[Key]) -> None:
        """In use."""
        self.pins.update(keys)

    def unpin(self, keys: list[Key], done: bool) -> set[Key]:
        """No longer; returns what never came and so is not there."""
        self.pins.subtract(keys)
        if done:
            self.flight -= set(keys)
        return {key for key in keys if key in self.flight and self.pins[key] <= 0}

    # ---- what is always true

    def audit(self, ledger: Ledger, leaf_first: bool) -> None:
        """Room, residence, chains, ghosts."""
        for k, place in enumerate(self.here):
            used = sum(self.bytes[key] for key in place)
            pinned = sum(self.bytes[key] for key in place if self.pins[key] > 0)
            require(ledger.used_bytes(k) == used, "bytes in use were counted wrongly")
            require(used <= max(self.capacities[k], pinned), "more than the place holds")
            believed = set(ledger.policy(k).resident())
            require(believed == {self.slots[key] for key in place}, "a policy lost count")
            for namespace, generation, tokens in place if leaf_first else ():
                parent = namespace, generation, tokens[:-1]
                if len(tokens) > 1 and generation == self.generation[namespace]:
                    above = any(parent in faster for faster in self.here[: k + 1])
                    require(above, "a block is there without its parent")
        require(len(ledger) == len(set().union(*self.here)), "resident blocks counted wrongly")
        require(0 <= ledger.ghosts <= ledger.ghost_bound, "too many ghosts")
