"""`Prefetcher` as written down, slowly: dicts, and sums computed anew. Blocks of one byte.

`Shop` is what both are driven over: a small tree, two places, and a policy that is told its rates.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import numpy as np

from flowkv import Policy
from flowkv.policy.prefetch import PrefetchConfig
from tests.inside import NEVER_NS, NO_VISIT, Hint, class_of

S = 1_000_000_000


class Shop(Policy):
    """A policy whose rates are set from outside, and the places: a `Reach`."""

    name = "shop"

    def __init__(self, parents: list[int], capacity: int) -> None:
        self.parents, self.capacity_bytes = parents, capacity
        self.rates = [0.0 for _ in parents]
        self.here, self.known = set[int](), set[int]()
        self.place = set[int]()  # what the driver knows to lie here

    def way(self, slot: int) -> list[int]:
        """Root to leaf."""
        return ([] if slot < 0 else self.way(self.parents[slot])) + ([slot] if slot >= 0 else [])

    def leaves(self) -> list[int]:
        return [s for s in self.here if not any(self.parents[c] == s for c in self.here)]

    def insert(self, now_ns, slots, parents, **said: Any) -> None:
        self.here |= set(slots.tolist())
        self.known |= self.here
        self.place |= self.here

    def access(self, now_ns, slots, visit=NO_VISIT) -> None:
        self.known |= set(slots.tolist())

    def remove(self, slots) -> None:
        self.here -= set(slots.tolist())

    def evict(self, now_ns, n: int, protected: Collection[int] = ()):
        found = self.displace(now_ns, n, math.inf, protected)
        return found if len(found) == n else None

    def displace(self, now_ns, n, rate, protected=()):
        safe = {above for slot in protected for above in self.way(slot)}
        victims = list[int]()
        while len(victims) < n:
            weak = [(self.rates[s], s) for s in self.leaves() if s not in safe]
            if not weak or min(weak)[0] >= rate:
                break
            victims.append(min(weak)[1])
            self.here.remove(victims[-1])
        return np.array(victims, np.int64)

    def wanted(self, now_ns, n):
        absent = [s for s in self.known - self.here if self.rates[s] > 0]
        best = sorted(absent, key=lambda s: (-self.rates[s], s))[:n]
        return np.array(best, np.int64), np.array([self.rates[s] for s in best])

    def priority(self, slot: int) -> float:
        return self.rates[slot] if slot in self.here else -math.inf

    def resident(self):
        return sorted(self.here)

    def digest(self) -> int:
        return 0

    # ---- the reach

    def room_bytes(self) -> int:
        return self.capacity_bytes - len(self.place)

    def sizes(self, slots):
        return np.ones(len(slots), np.int64)

    def missing(self, tip: int):
        anchor, out = -1, list[int]()
        for slot in self.way(tip):
            if slot in self.place:
                anchor, out = slot, []
            elif slot in self.known:
                out.append(slot)
            else:
                break
        return anchor, np.array(out, np.int64)


class SlowPrefetcher:
    def __init__(self, capacity: int, **options: Any) -> None:
        self.c, self.capacity = PrefetchConfig(**options), capacity
        self.queue: dict[int, int] = {}
        self.hints: dict[int, Hint] = {}
        self.agenda: list[tuple[int, int]] = []
        self.budget = {0: float(capacity), 1: float(capacity)}
        self.probes = self.allowance = 0.0
        self.flying: dict[int, tuple[int, int]] = {}  # slot -> budget, born
        self.landed: dict[int, tuple[int, int]] = {}
        self.counted = set[int]()  # flying ones that were demanded
        self.pushed: dict[int, int] = {}
        self.now = self.asked = None
        self.idle = self.used = self.wasted = self.displaced = 0

    def tick(self, now: int) -> int:
        now = now if self.now is None else max(now, self.now)
        passed = 0 if self.now is None else now - self.now
        most = self.c.bytes_per_s * self.c.burst_s
        earned = 0.0 if most == math.inf else self.c.bytes_per_s * passed / 1e9
        self.allowance = most if most == math.inf else min(self.allowance + earned, most)
        self.now = now
        late = [s for s, (_, b) in self.landed.items() if b + self.c.horizon_s * 1e9 <= now]
        self.waste(late)
        for slot in [s for s, b in self.pushed.items() if b + self.c.horizon_s * 1e9 <= now]:
            del self.pushed[slot]
        return now

    def pay_back(self, budget: int) -> None:
        self.used += 1
        self.budget[budget] = min(self.budget.get(budget, 0.0) + 1 / self.c.floor, self.capacity)

    def waste(self, slots: list[int]) -> None:
        for slot in slots:
            if self.landed.pop(slot, None):
                self.wasted += 1

    def enqueue(self, now: int, request: int, chain: list[int]) -> None:
        self.tick(now)
        self.queue[request] = chain[-1]

    def hint(self, now: int, chain: list[int], eta: int, sigma: float) -> None:
        self.tick(now)
        self.hints.pop(chain[-1], None)
        if eta != NEVER_NS:
            self.hints[chain[-1]] = Hint(now, eta, sigma)
            early = round(eta * math.exp(-self.c.early * sigma))
            self.agenda.append((now + early - round(self.c.slack_s * 1e9), chain[-1]))

    def abort(self, now: int, request: int) -> None:
        self.tick(now)
        self.queue.pop(request, None)

    def accessed(self, now: int, chain: list[int], hits: int, demanded: int, request: int) -> None:
        self.tick(now)
        self.idle = 0
        self.queue.pop(request, None)
        for slot in chain:
            self.hints.pop(slot, None)
        self.probes = min(self.probes + self.c.probe_share * demanded, self.capacity / 4)
        gained = dict[int, int]()
        for i, slot in enumerate(chain):
            if i < hits and slot in self.landed:
                budget = self.landed.pop(slot)[0]
                gained[budget] = gained.get(budget, 0) + 1
            elif slot in self.flying and slot not in self.counted:
                self.counted.add(slot)
                gained[self.flying[slot][0]] = gained.get(self.flying[slot][0], 0) + 1
            if self.pushed.pop(slot, None) is not None and i >= hits:
                self.displaced += 1
        self.waste(chain[hits:])
        for budget, count in gained.items():
            self.used += count
            more = self.budget.get(budget, 0.0) + count / self.c.floor
            self.budget[budget] = min(more, self.capacity)

    def left(self, now: int, slots: list[int]) -> None:
        self.tick(now)
        self.waste(slots)

    def landed_now(self, now: int, slots: list[int]) -> None:
        self.tick(now)
        for slot in slots:
            budget = self.flying.pop(slot)
            if slot not in self.counted:
                self.landed[slot] = budget
            self.counted.discard(slot)

    def failed(self, now: int, slots: list[int]) -> None:
        self.tick(now)
        for slot in slots:
            self.flying.pop(slot)
            self.counted.discard(slot)

    def plan(self, now: int, shop: Shop):
        now = self.tick(now)
        for tip in list(self.queue.values()):
            yield from self.bring(now, 0, tip, math.inf, shop)
        due = dict.fromkeys(tip for when, tip in sorted(self.agenda) if when <= now)
        self.agenda = [one for one in self.agenda if one[0] > now]
        urgent = [(tip, self.hints[tip].rate(now)) for tip in due if tip in self.hints]
        full = False
        for tip, rate in sorted(urgent, key=lambda one: -one[1]):
            hint = self.hints[tip]
            if not full:
                yield from self.bring(now, 1, tip, rate, shop)
                full = bool(self.absent(tip, shop))
            if full:
                left = abs(hint.told_ns + hint.eta_ns - now)
                wait = max(left // 4, hint.eta_ns // 16, self.period(0))
                if now + wait < hint.told_ns + 4 * hint.eta_ns:
                    self.agenda.append((now + wait, tip))
        if self.asked is None or now >= self.asked + self.period(self.idle):
            self.asked, self.idle = now, self.idle + 1
            tips, rates = shop.wanted(now, self.c.candidates)
            for tip, rate in zip(tips.tolist(), rates.tolist(), strict=True):
                if tip not in self.hints:
                    yield from self.bring(now, 2, tip, rate, shop)

    def period(self, idle: int) -> int:
        return round(self.c.period_s * 1e9) * 2 ** min(max(idle - 16, 0), 6)

    def absent(self, tip: int, shop: Shop) -> list[int]:
        return [s for s in shop.missing(tip)[1].tolist() if s not in self.flying]

    def bring(self, now: int, kind: int, tip: int, rate: float, shop: Shop):
        anchor, budget = shop.missing(tip)[0], class_of(kind, rate)
        unproven = len(self.landed) + len(self.flying)
        most = min(
            self.budget.get(budget, 0.0) + self.probes,
            self.allowance,
            self.c.flying_bytes - len(self.flying),
            self.c.unproven * self.capacity - unproven if kind == 2 else math.inf,
        )
        slots = self.absent(tip, shop)[: max(0, math.floor(min(most, 1e9)))]
        if not slots:
            return
        bound = math.inf if kind == 0 else rate / (1.0 + self.c.margin)
        need = len(slots) - shop.room_bytes()
        protected = () if anchor < 0 else (anchor,)
        victims = shop.displace(now, need, bound, protected).tolist() if need > 0 else []
        slots = slots[: max(0, shop.room_bytes() + len(victims))]
        if not slots and not victims:
            return
        self.waste(victims)
        self.pushed.update(dict.fromkeys(victims, now))
        for slot in slots:
            self.flying[slot] = budget, now
            self.pushed.pop(slot, None)
        own = min(len(slots), self.budget.get(budget, 0.0))
        self.budget[budget] = self.budget.get(budget, 0.0) - own
        self.probes = max(0.0, self.probes - (len(slots) - own))
        self.allowance -= len(slots)
        yield kind, slots, victims
