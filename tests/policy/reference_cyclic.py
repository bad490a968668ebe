"""The policy for circles as written down, slowly."""

from __future__ import annotations

from tests.inside import NO_VISIT
from tests.policy.reference import SlowLfuTtl


class SlowCyclic(SlowLfuTtl):
    """`recent` is what LRU would hold, newest last; `stays` a set that fills up once."""

    name = "slow-cyclic"

    def __init__(self, leases=None, streaming=2, slots=1024):
        super().__init__(0, leases)
        self.streaming, self.slots = streaming, slots
        self.size = self.uses = self.lru_hits = self.set_hits = 0
        self.cycle = False
        self.known: set[int] = set()
        self.recent: list[int] = []
        self.stays: set[int] = set()
        self.fixed: set[int] = set()

    def drop(self, slot):
        super().drop(slot)
        self.fixed.discard(slot)

    def order_class(self, slot):
        here = super().order_class(slot)
        return 103 if slot in self.fixed and 1 < here < 127 else here

    def access(self, now_ns, slots, visit=NO_VISIT):
        super().access(now_ns, slots, visit)
        verdict = 0
        for s in slots.tolist() if self.size else ():
            verdict = self.watch(s) or verdict if s >= 0 else verdict
        if verdict:
            self.cycle = verdict > 0
        if not self.cycle:
            self.fixed.clear()

    def watch(self, s):
        if s in self.known:
            self.uses += 1
            self.lru_hits += s in self.recent
            self.set_hits += s in self.stays
        self.known.add(s)
        self.recent = [x for x in self.recent if x != s] + [s]
        if len(self.stays) < self.size - self.streaming:
            self.stays.add(s)
        del self.recent[: max(0, len(self.recent) - self.size)]
        return self.judge() if self.uses >= max(len(self.known), 16) else 0

    def judge(self):
        lru, stayed = self.lru_hits, self.set_hits
        self.uses = self.lru_hits = self.set_hits = 0
        if stayed > 1.1 * lru:
            return 1
        if lru > stayed or stayed == 0:
            self.stays.clear()
        return -1 if lru > stayed else 0

    def forget(self, slots):
        super().forget(slots)
        gone = set(slots.tolist()) - set(self.blocks)
        self.known -= gone
        self.stays -= gone
        self.recent = [s for s in self.recent if s not in gone]

    def evict(self, now_ns, n, protected=()):
        done = super().evict(now_ns, n, protected)
        if done is not None and n > 0:
            self.size = max(self.size, len(self.blocks))
            if self.cycle:
                self.fix(len(self.blocks) - len(self.fixed) - self.streaming)
        return done

    def fix(self, n):
        for _ in range(n):
            plain = [s for s in self.candidates(set()) if not self.standing(s)[2]]
            if not plain:
                return
            first = min(plain, key=self.turn)
            if not 1 < self.order_class(first) < 103:
                return
            self.fixed.add(first)
