"""The hedge as written down, slowly: lists and sets, sorted where something is chosen."""

from __future__ import annotations

import math

from tests.inside import aged

HALF_LIFE_S = 1800.0


class SlowHedge:
    """What a hedge keeps beside the order; `worth(slot)` tells what the learned order thinks."""

    def __init__(self, taus):
        self.taus = [0, *taus]
        self.rows = len(taus) + 2  # LRU, the counts, the learned order
        self.up, self.depth = {}, {}
        self.here = set()
        self.keys = [{} for _ in range(self.rows)]
        self.held = [set() for _ in range(self.rows)]
        self.active = self.room = 0
        self.remained = []
        self.last = self.last_time = self.time = None
        self.blocks = self.surplus = self.failed = self.entry = 0
        self.lately = self.squares = 0.0
        self.stats = [[0.0, 0.0, 0.0] for _ in range(self.rows)]

    # ---- who belongs to whom

    def name(self, s, above):
        self.up[s] = above
        self.depth[s] = self.depth[above] + 1 if above is not None else 0
        self.last = s

    def insert(self, now, slots, parents):
        above = self.last if self.last_time == now else None
        for s, p in zip(slots, parents, strict=True):
            above = p if p >= 0 and p in self.up else above
            if s not in self.up:
                self.name(s, above)
            self.here.add(s)
            above = s
        for k in range(self.rows - 1):
            for s in slots:
                self.keys[k].setdefault(s, now)
            self.held[k] |= set(slots)
        if self.active != self.rows - 1:
            self.held[-1] |= set(slots)

    # ---- shadows

    def leaves(self, k):
        return self.held[k] - {self.up[s] for s in self.held[k]}

    def trim(self, k, most, key):
        while len(self.held[k]) > most:
            self.held[k].remove(min(self.leaves(k), key=lambda s: (key(s), -self.depth[s], s)))

    def learn(self, worth):
        slack = self.room >> 5
        if self.room and len(self.held[-1]) > self.room + slack:
            self.trim(self.rows - 1, self.room - slack, worth)

    def evicted(self, victims, capacity_left):
        self.here -= set(victims)
        self.remained.append(capacity_left)
        epoch = (len(self.remained) // 64) * 64
        self.room = max(1, *self.remained[max(0, epoch - 65) :][-127:])

    # ---- the rule

    def rate(self, k):
        weight, gain, spread = self.stats[k]
        weight = max(weight, 1.0)
        return gain / weight, math.sqrt(spread + 24.0**2) / weight

    def credit(self, k, n, more):
        for i, x in enumerate((n, more, more * more)):
            self.stats[k][i] += x

    def in_debt(self, k, debt, share):
        rate, doubt = self.rate(k)
        return self.surplus < -(debt + share * self.blocks) and rate <= 3 * doubt

    def decide(self):
        least = [0.0]
        for k in range(1, self.rows):
            rate, doubt = self.rate(k)
            least.append(rate - (1.0 if k == self.rows - 1 else 2.0) * doubt)
        best = least.index(max(least))
        if self.active == 0:
            early = self.blocks < 1.5 * self.failed
            return 0 if early or self.in_debt(best, 24, 0.0005) else best
        since = self.surplus - self.entry
        broke = since < 0 and self.in_debt(self.active, 64, 0.0006)
        bad = self.lately < -2 * math.sqrt(self.squares + 24.0**2)
        if since < -(40 + 0.0004 * self.blocks) or broke or bad:
            return 0
        (rate, doubt), (mine, also) = self.rate(best), self.rate(self.active)
        better = rate - 1.02 * mine > math.hypot(doubt, also)
        return best if best and best != self.active and better else self.active

    def count(self, k, now, slots):
        """A shadow of counts sees a request: how many of its blocks it holds."""
        if self.room:
            self.trim(k, self.room, self.keys[k].get)
        hits = len(self.held[k] & set(slots))
        for s in slots:
            old = self.keys[k].get(s)
            self.keys[k][s] = now if old is None else aged(old, now, self.taus[k])
        self.held[k] |= self.here & set(slots)
        return hits

    def access(self, now, slots, worth):
        known = max([i + 1 for i, s in enumerate(slots) if s in self.up], default=0)
        for i in range(known, len(slots)):
            self.name(slots[i], slots[i - 1] if i else None)
        here, found = len(self.here & set(slots)), self.count(0, now, slots)
        if self.time is not None and now > self.time:
            fade = 0.5 ** ((now - self.time) / 1e9 / HALF_LIFE_S)
            self.lately, self.squares = self.lately * fade, self.squares * fade
            self.stats = [[x * fade for x in row] for row in self.stats]
        self.time = self.last_time = now
        n, more = len(slots), here - found
        self.last = slots[-1] if slots else None
        self.blocks, self.surplus = self.blocks + n, self.surplus + more
        self.lately, self.squares = self.lately + more, self.squares + more * more
        if self.active == self.rows - 1:
            self.credit(-1, n, more)
        chosen = self.decide()
        if chosen != self.active:
            self.failed = self.blocks if chosen == 0 else self.failed
            self.entry, self.lately, self.squares = self.surplus, 0.0, 0.0
            if self.active == self.rows - 1:
                self.held[-1] = set(self.here)
            self.active = chosen
        if self.active != self.rows - 1:
            self.learn(worth)
            self.credit(-1, n, len(self.held[-1] & set(slots)) - found)
            self.held[-1] |= self.here & set(slots)
        for k in range(1, self.rows - 1):
            self.credit(k, n, self.count(k, now, slots) - found)
