"""ARC as written down, slowly: four lists, and sorting where it chooses."""

from __future__ import annotations

from tests.inside import NO_VISIT
from tests.policy.reference import SlowLfuTtl


class SlowArc(SlowLfuTtl):
    """T1 and T2 are sets of resident slots, B1 and B2 lists of slots, newest last."""

    name = "slow-arc"

    def __init__(self, leases=None):
        super().__init__(0, leases)
        self.once: set[int] = set()
        self.ghosts: tuple[list[int], list[int]] = [], []
        self.target = self.size = 0

    def slot(self, block):
        return next(s for s, b in self.blocks.items() if b is block)

    def touch(self, block):
        super().touch(block)
        self.once.discard(self.slot(block))

    def unremember(self, slot):
        for ghosts in self.ghosts:
            if slot in ghosts:
                ghosts.remove(slot)

    def drop(self, slot):
        super().drop(slot)
        self.was_once = slot in self.once
        self.once.discard(slot)

    def insert(self, now_ns, slots, parents, **kw):
        """One by one, since a slot may be named twice."""
        for i, (s, p) in enumerate(zip(slots.tolist(), parents.tolist(), strict=True)):
            block = self.blocks.get(s)
            self.tick(now_ns)
            fresh = block is None or self.is_expired(block)
            if fresh:
                self.unremember(s)
            before = dict(self.blocks)
            super().insert(now_ns, slots[i : i + 1], parents[i : i + 1], **kw)
            if fresh:
                self.once.add(s)
                if p not in before or self.blocks[s].parent is None:
                    self.blocks[s].depth = i

    def access(self, now_ns, slots, visit=NO_VISIT):
        self.tick(now_ns)
        for s in slots.tolist():
            if s in self.blocks:
                continue
            one, two = map(len, self.ghosts)
            if s in self.ghosts[0]:
                self.target = min(self.target + max(1, two // one), self.size)
            elif s in self.ghosts[1]:
                self.target = max(self.target - max(1, one // two), 0)
        super().access(now_ns, slots, visit)

    def forget(self, slots):
        super().forget(slots)
        for s in set(slots.tolist()) - set(self.blocks):
            self.unremember(s)

    def pick(self, slots):
        """The first of either list, whichever list's turn it is, or what a hint says is later."""
        ahead = [s for s in slots if self.standing(s)[2]]
        lists = [[s for s in slots if s not in ahead and (s in self.once) == x] for x in (1, 0)]
        firsts = [min(some, key=self.turn) for some in lists if some]
        if len(firsts) == 2:
            classes = [self.order_class(s) for s in firsts]
            take_once = len(self.once) >= self.target
            if classes[0] != classes[1]:
                take_once = classes[0] < classes[1]
            firsts = [firsts[0] if take_once else firsts[1]]
        return min(firsts + ahead, key=self.turn)

    def evict(self, now_ns, n, protected=()):
        done = super().evict(now_ns, n, protected)
        if done is not None and n > 0:
            self.size = max(self.size, len(self.blocks))
            for ghosts in self.ghosts:
                del ghosts[: max(0, len(ghosts) - self.size)]
        return done

    def give_up(self, slot):
        super().give_up(slot)
        self.ghosts[not self.was_once].append(slot)

    def priority(self, slot):
        worth = super().priority(slot)
        if slot not in self.blocks or self.standing(slot)[2]:
            return worth
        leaves = [s for s in self.candidates(set()) if not self.standing(s)[2]]
        both = {s in self.once for s in leaves} == {True, False}
        if both and (slot not in self.once) == (len(self.once) >= self.target):
            here, key, _ = self.standing(slot)
            return (here - 37) * 2.0**64 + 2.0**63 + key
        return worth
