"""HazardIndex as written down, slowly: lists every tip, sorts every block, remembers no order."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np

from tests.inside import BEFORE, BEYOND, EDGES_NS, NO_VISIT, WIDTHS, hinted_index, log2, logistic


class Tip:
    def __init__(self, time, known, blocks, last=None):
        self.time, self.known, self.blocks, self.path, self.named = time, known, blocks, [], 0
        self.stop, self.output, self.done, self.edge, self.bin, self.hint = (
            0,
            -1,
            False,
            0,
            -1,
            None,
        )
        self.turn, self.gap, self.pace, self.spread, self.by_stop = 0, None, None, 1.0, [None] * 4
        if last is None:
            return
        gap = self.gap = log2(max((time - last.time) * 1e-9, 0.1))
        self.turn, self.by_stop = last.turn + 1, list(last.by_stop)
        self.pace = gap if last.pace is None else last.pace + 0.3 * (gap - last.pace)
        if last.pace is not None:
            self.spread = last.spread + 0.3 * (abs(gap - last.pace) - last.spread)
        old = last.by_stop[last.stop]
        self.by_stop[last.stop] = gap if old is None else old + 0.4 * (gap - old)

    def features(self):
        def octaves(x, fine=1):
            n = math.floor(fine * math.log2(x)) + 1 if x >= 1 else 0
            return min(n, 31 if fine == 2 else 17)

        def pace(x, fine, most):
            return 0 if x is None else 1 + min(max(math.floor((x + 4) * fine), 0), most - 1)

        n, g, stop, turn = self.blocks, self.known, self.stop, min(self.turn, 7)
        new, out = max(n - g, 0) + 1, self.output + 1
        gap = 0 if self.gap is None else 2 + min(max(math.floor((self.gap + 1) / 0.75), -1), 13)
        return (
            (stop, turn),
            octaves(n, 2),
            octaves(out, 2),
            (stop, pace(self.by_stop[stop], 1.5, 25)),
            octaves(g + 1, 2) if turn == 0 else 0,
            (stop, octaves(out, 2)),
            (pace(self.pace, 1, 17), min(max(math.floor(4 * self.spread), 0), 15)),
            (octaves(n), octaves(out)),
            (octaves(new), octaves(out)),
            (turn, octaves(n)),
            (octaves(n), octaves(new)),
            (turn, octaves(out)),
            (stop, gap),
            (min(turn, 2), 8 * min(g, n) // max(n, 1)),
        )


class SlowHazard:
    """Parts are methods, so that mutants can spoil them one by one. Parents are given or -1."""

    def __init__(self):
        self.tips, self.open, self.clock = [], {}, -(1 << 61)
        self.weights = defaultdict(lambda: [0.0, 0.0])
        self.bases = [[-2.0, 1.0] for _ in WIDTHS]
        self.reached = [1.0] + [0.0] * 7
        self.owner, self.at, self.next, self.forks = {}, {}, {}, {}
        self.here, self.keys, self.pins = {}, {}, defaultdict(int)  # here: slot -> (parent, depth)

    # --- the model

    def said(self, features, k):
        total = 0.0
        for f, bucket in enumerate(features):
            total += self.weights[f, bucket, k][0]
        return total

    def hazard(self, features, i):
        k, u = int(BEFORE[i]), float(BEYOND[i])
        low, high = self.said(features, k), self.said(features, k + 1)
        return logistic(self.bases[i][0] + (1.0 - u) * low + u * high)

    def teach(self, tip, i, returned):
        step = returned - self.hazard(tip.features(), i)
        k, u = int(BEFORE[i]), float(BEYOND[i])
        self.nudge(self.bases[i], step, 0.3, 0.0, 16.0)
        for f, bucket in enumerate(tip.features()):
            self.nudge(self.weights[f, bucket, k], (1.0 - u) * step, 0.14, 0.5, 8.0)
            self.nudge(self.weights[f, bucket, k + 1], u * step, 0.14, 0.5, 8.0)

    def nudge(self, weight, step, rate, ease, limit):
        weight[1] += step * step
        moved = weight[0] + rate * step / math.sqrt(weight[1] + ease)
        weight[0] = min(max(moved, -limit), limit)

    def index(self, tip, now):
        i = int(np.searchsorted(EDGES_NS, now - tip.time, side="right")) - 1
        if i == tip.bin:
            return tip.value
        tip.bin, tip.value = i, -1.0
        if tip.hint is not None:
            eta, sigma, told = tip.hint
            age = max(tip.time + int(EDGES_NS[i]) - told, 0)
            tip.value = hinted_index(eta * 1e-9, sigma, age * 1e-9)
        if tip.value < 0.0:
            alive, gained, spent, best = 1.0, 0.0, 0.0, 0.0
            for b in range(i, len(WIDTHS)):
                h = self.hazard(tip.features(), b)
                gained += alive * h
                spent += alive * float(WIDTHS[b]) * (1.0 - 0.5 * h)
                alive *= 1.0 - h
                best = max(best, gained / spent)
                if alive < 1e-3:
                    break
            tip.value = best
        return tip.value

    def worth(self, slot, now):
        value, tip = 0.0, self.owner.get(slot)
        if tip is not None:
            value = self.index(tip, now)
            short = max(tip.blocks - 1 - self.at[slot], 0)
            if short < 8:
                value *= sum(self.reached[: short + 1]) / sum(self.reached)
        count, pause, last = self.forks.get(slot, (0, 0.0, 0))
        if count >= 4:
            value += 1.0 / (max(pause, 1e-3) + (now - last) * 1e-9)
        return value

    # --- the rules

    def leaf(self, slot):
        return slot in self.here and slot not in {p for p, _ in self.here.values()}

    def rekey(self, slots, now):
        for s in slots:
            if self.leaf(s):
                self.keys[s] = self.worth(s, now)

    def advance(self, now):
        self.clock = max(now, self.clock)
        while True:
            due = [(t.time + int(EDGES_NS[t.edge + 1]), t.edge, i)
                   for i, t in enumerate(self.tips) if t.edge + 1 < len(EDGES_NS)]  # fmt: skip
            if not due or min(due)[0] > self.clock:
                return self.clock
            when, edge, i = min(due)
            tip = self.tips[i]
            if not tip.done:
                self.teach(tip, edge, 0)
            self.rekey_tip(tip, when)
            tip.edge += 1

    def rekey_tip(self, tip, now):
        """From the end upwards, until a block is no root: what is above it is no leaf."""
        for s in reversed(tip.path):
            if self.owner.get(s) is not tip:
                return
            self.rekey([s], now)
            if self.here.get(s, (-1, 0))[0] >= 0:
                return

    def follow(self, tip, slot):
        if slot not in self.owner:
            self.forks[slot] = (0, -1.0, self.clock)
            self.next.pop(slot, None)
        if tip.path:
            above = tip.path[-1]
            if self.next.get(above, slot) != slot:
                count, pause, last = self.forks[above]
                now = (self.clock - last) * 1e-9
                mixed = now if count == 0 else 0.7 * pause + 0.3 * now
                self.forks[above] = (count + 1, float(np.float32(mixed)), self.clock)
            self.next[above] = slot
        self.owner[slot], self.at[slot] = tip, self.at[tip.path[-1]] + 1 if tip.path else 0
        tip.path.append(slot)
        tip.named += 1

    # --- the protocol

    def access(self, now, slots, visit=NO_VISIT):
        self.advance(now)
        known = 0
        while known < len(slots) and slots[known] in self.owner:
            known += 1
        last = self.owner[slots[known - 1]] if known else None
        short = max(last.blocks - known, 0) if last else 9
        if short > 1 or (short == 1 and known == 1):
            last = None
        elif not last.done:
            last.done = True
            i = int(np.searchsorted(EDGES_NS, self.clock - last.time, side="right")) - 1
            self.teach(last, i, 1)
            self.reached = [0.999 * x for x in self.reached]
            self.reached[short] += 1.0
        tip = Tip(self.clock, known, max(visit.blocks, len(slots)), last)
        self.tips.append(tip)
        self.open[visit.request] = tip
        for s in slots:
            self.follow(tip, s)
        self.rekey(slots, self.clock)

    def insert(self, now, slots, parents):
        self.advance(now)  # first: no edge judged what was not here
        for i, (s, p) in enumerate(zip(slots, parents, strict=True)):
            p = p if p in self.here else -1
            if s not in self.here:
                self.here[s] = (p, self.here[p][1] + 1 if p >= 0 else i)
        latest = self.tips[-1] if self.tips else None
        for i, s in enumerate(slots):
            if s in self.owner:
                continue
            above = parents[i] if parents[i] >= 0 else (slots[i - 1] if i else -1)
            tip = self.owner.get(above)
            if tip is not None and tip.path[-1] != above:
                n, path = self.at[above] + 1, tip.path[: tip.path.index(above) + 1]
                tip = Tip(self.clock, n, n)
                tip.path, tip.named = path, n
                self.tips.append(tip)
            elif above < 0 and latest is not None and latest.named < latest.blocks:
                tip = latest
            if tip is None:
                tip = Tip(self.clock, 0, 0)
                self.tips.append(tip)
            self.follow(tip, s)
            if self.at[s] >= tip.blocks:
                tip.blocks, tip.bin = self.at[s] + 1, -1
        self.rekey(slots, self.clock)

    def complete(self, now, request, stop, output_tokens):
        tip = self.open.pop(request, None)
        if tip is not None:
            self.advance(now)
            tip.stop, tip.output, tip.bin = stop, output_tokens, -1
            self.rekey_tip(tip, self.clock)

    def hint(self, now, slots, eta_ns, sigma):
        self.advance(now)
        tip = self.owner.get(slots[-1])
        if tip is not None:
            tip.hint, tip.bin = (eta_ns, sigma, self.clock), -1
            self.rekey_tip(tip, self.clock)

    def drop(self, slot):
        parent, _ = self.here.pop(slot)
        self.here = {s: (-1 if p == slot else p, d) for s, (p, d) in self.here.items()}
        self.rekey([parent], self.clock)

    def remove(self, slots):
        for s in slots:
            if s in self.here:
                self.drop(s)

    def forget(self, slots):
        for s in slots:
            if s in self.owner and s not in self.here:
                self.owner.pop(s).path.remove(s)

    def evict(self, now, n, protected=()):
        self.advance(now)
        stay, victims = set(), []
        for s in {*protected, *(s for s, n in self.pins.items() if n)}:
            while s in self.here and s not in stay:
                stay.add(s)
                s = self.here[s][0]
        if n > len(self.here) - len(stay):
            return None
        for _ in range(n):
            leaves = [s for s in self.here if self.leaf(s) and s not in stay]
            victims.append(min(leaves, key=lambda s: (self.keys[s], -self.here[s][1], s)))
            self.drop(victims[-1])
        return victims
