"""What may be said of any policy's next victim, whatever its taste: a model over a dozen slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from flowkv.policy.config import DEFAULT_RANK


def require(holds: bool, sentence: str) -> None:
    """Fails with a sentence."""
    if not holds:
        raise AssertionError(sentence)


class PolicyModel:
    """Who is resident, above whom, and who may not go.

    Args:
        leaf_first: Whether a block must go after its resident children.

    Attributes:
        parent: Resident slot -> resident parent, or -1.
        gone: Resident slots that had expired when last asked.
        pins: Slot -> pins.
        queued: Request -> its chain.
        rank: Resident slot -> the rank it was inserted with.
        hinted: Slots that a hint was about, or the blocks above them.
        tenant: Resident slot -> tenant.
    """

    def __init__(self, leaf_first: bool) -> None:
        self.leaf_first = leaf_first
        self.parent: dict[int, int] = {}
        self.gone: set[int] = set()
        self.pins: Counter[int] = Counter()
        self.queued: dict[int, list[int]] = {}
        self.rank: dict[int, int] = {}
        self.hinted: set[int] = set()
        self.tenant: dict[int, int] = {}

    def add(self, slot: int, parent: int, tenant: int, rank: int) -> None:
        """A block became resident."""
        self.parent[slot] = parent if parent in self.parent and parent not in self.gone else -1
        self.tenant[slot], self.rank[slot] = tenant, rank

    def drop(self, slots: Collection[int]) -> None:
        """Blocks are no longer resident; their children are roots."""
        for s in slots:
            del self.parent[s], self.tenant[s], self.rank[s]
            self.gone.discard(s)
        for child, p in self.parent.items():
            if p in slots:
                self.parent[child] = -1

    def path(self, slot: int) -> list[int]:
        """A resident slot and those above it, root to leaf; none for others."""
        found: list[int] = []
        while slot in self.parent:
            found.insert(0, slot)
            slot = self.parent[slot]
        return found

    def below(self, slot: int) -> set[int]:
        """A slot and its resident descendants."""
        return {s for s in self.parent if slot in self.path(s)}

    def stuck(self, protected: Collection[int]) -> set[int]:
        """Resident slots that may not go: pinned, protected, or, leaf by leaf, above those."""
        held = {s for s in (*self.pins, *protected) if s in self.parent}
        if self.leaf_first:
            held |= {above for s in held for above in self.path(s)}
        return held

    def stale_of(self, tenant: int) -> set[int]:
        """What must have expired once a tenant's blocks are invalid."""
        return {s for s in self.parent if all(self.tenant[x] == tenant for x in self.below(s))}

    def judge(
        self, victim: int, free: set[int], worth: Mapping[int, float], heeded: Collection[str]
    ) -> None:
        """Whether it was this slot's turn.

        Args:
            victim: Who went.
            free: Who could have gone, leaves or not.
            worth: Priorities of all; empty where they are not known.
            heeded: "queue", "rank": what is known to matter to this policy.
        """
        has_child = set(self.parent.values())
        turn = free - has_child if self.leaf_first else free
        if self.leaf_first:
            require(victim not in has_child, "a block went before its resident child")
        if victim not in self.gone:
            require(not turn & self.gone, "a live block went before an expired one")
        for s in turn if worth else ():
            if (s in self.gone) == (victim in self.gone):
                require(worth[victim] <= worth[s], "a smaller priority must go earlier")
        rivals = turn - self.gone - {victim}
        certain = {s for chain in self.queued.values() for s in chain}
        if "queue" in heeded and victim in certain - self.gone:
            require(rivals <= certain, "a queued block went before one that nobody queues for")
        plain = rivals - self.hinted - certain
        if "rank" in heeded and victim not in self.gone | self.hinted | certain:
            least = min((self.rank[s] for s in plain), default=DEFAULT_RANK)
            if plain:
                require(self.rank[victim] <= least, "a block went before one of lower rank")
