"""`check_policy` passes what is right (the shipped policies) and finds what is wrong (mutants)."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from flowkv.policy import CATALOGUE, LRU, Lease, LfuTtl, make_policy
from flowkv.testing import check_policy
from tests.policy.reference import SlowLfuTtl

S = 10**9
LEASES = ("", "short", "old")
SLOW_LEASES = {"": (math.inf, math.inf), "short": (3 * S, math.inf), "old": (50 * S, 90 * S)}


class Fast(LfuTtl):
    def __init__(self):
        super().__init__(tau_s=7, leases={"short": Lease(3), "old": Lease(50, 90)})


class Slow(SlowLfuTtl):
    def __init__(self):
        super().__init__(7 * S, SLOW_LEASES)


@pytest.mark.parametrize("name", CATALOGUE)
def test_catalogue_conforms(name):
    check_policy(lambda: make_policy(name), leases=("",))


@pytest.mark.parametrize("make", [Fast, Slow])
def test_leases_conform(make):
    check_policy(make, leases=LEASES)


def test_without_leaf_first():
    """A policy that does not know parents is fine where that is allowed, and only there."""

    class Flat(LRU):
        def insert(self, now_ns, slots, parents, **kw):
            super().insert(now_ns, slots, np.full_like(parents, -1), **kw)

    check_policy(Flat, leaf_first=False)
    with pytest.raises(AssertionError, match="before its resident child"):
        check_policy(Flat, shrink=False)


# --- mutants: one fault each ---------------------------------------------------------------------


class IgnoresProtection(Fast):
    def evict(self, now_ns, n, protected=()):
        return super().evict(now_ns, n)


class ProtectsOnlyFirst(Fast):
    def evict(self, now_ns, n, protected=()):
        return super().evict(now_ns, n, list(protected)[:1])


class RemembersProtection(Fast):
    def evict(self, now_ns, n, protected=()):
        self.kept = getattr(self, "kept", set()) | set(protected)
        return super().evict(now_ns, n, self.kept)


class EvictsThenRefuses(Fast):
    def evict(self, now_ns, n, protected=()):
        got = super().evict(now_ns, n, protected)
        if got is None:
            super().evict(now_ns, 1, protected)
        return got


class EvictsTooFew(Fast):
    def evict(self, now_ns, n, protected=()):
        return super().evict(now_ns, max(n - 1, 0), protected)


class EvictsWhatItCan(Fast):
    def evict(self, now_ns, n, protected=()):
        free = set(self.resident()) - set(protected)
        return super().evict(now_ns, min(n, len(free)), protected)


class ForgetsToRemove(Slow):
    def remove(self, slots):
        super().remove(slots[1:])


class RemoveTakesChildren(Slow):
    def drop(self, slot):
        for s in [s for s, b in self.blocks.items() if b.parent is self.blocks[slot]]:
            self.drop(s)
        super().drop(slot)


class LeakyCounter(Slow):
    """A child counter that is never decremented: who was a parent once is never a leaf again."""

    def evict(self, now_ns, n, protected=()):
        self.parents = getattr(self, "parents", set())
        self.parents |= {id(b.parent) for b in self.blocks.values()}
        leaves = [b for b in self.blocks.values() if id(b) not in self.parents]
        return super().evict(now_ns, n, protected) if n <= len(leaves) else None


class TiesToReusedSlots(Slow):
    """A new block in a removed parent's slot inherits the children."""

    def insert(self, now_ns, slots, parents, **kw):
        old = {s: self.blocks.get(s) for s in slots.tolist()}
        super().insert(now_ns, slots, parents, **kw)
        self.past = getattr(self, "past", {})
        for s, block in old.items():
            if block is None and s in self.past:
                for b in self.blocks.values():
                    if b.parent is self.past[s] and self.blocks[s].parent is None:
                        b.parent = self.blocks[s]
        self.past |= {s: self.blocks[s] for s in slots.tolist()}


class ParentsFirst(Slow):
    def candidates(self, protected):
        return [s for s in self.blocks if s not in protected]


class LiveBeforeExpired(Slow):
    def turn(self, slot):
        return super().turn(slot)[1:]


class MostFrequentFirst(Slow):
    def turn(self, slot):
        live, key, depth, slot = super().turn(slot)
        return live, -key, depth, slot


class Revives(Slow):
    def access(self, now_ns, slots):
        self.tick(now_ns)
        for block in [self.blocks[s] for s in slots.tolist() if s in self.blocks]:
            self.touch(block)


class FollowsTheClockBack(Slow):
    def tick(self, now):
        self.clock = now
        return now


class CountsStrangers(Fast):
    def access(self, now_ns, slots):
        new = np.array([s for s in slots if s not in self.resident()], np.int64)
        super().insert(now_ns, new, np.full_like(new, -1))
        super().access(now_ns, slots)


class AdmitInserts(Fast):
    def admit(self, now_ns, slots):
        self.insert(now_ns, slots, np.full_like(slots, -1))
        return super().admit(now_ns, slots)


class ExpiredRemoves(Fast):
    def expired(self, now_ns):
        out = super().expired(now_ns)
        self.remove(out)
        return out


class FlipsCoins(Slow):
    coins = itertools.count()

    def turn(self, slot):
        live, _, depth, slot = super().turn(slot)
        return live, next(self.coins) % 3, depth, slot


class DigestStandsStill(Fast):
    def digest(self):
        return 7


class DigestOfIdentity(Fast):
    def digest(self):
        return id(self)


class PriorityOfStrangers(Fast):
    def priority(self, slot):
        return max(super().priority(slot), -1e300)


class PriorityUpsideDown(Fast):
    def priority(self, slot):
        value = super().priority(slot)
        return value if math.isinf(value) else -value


class KeepsTheArrays(Slow):
    def access(self, now_ns, slots):
        before, self.kept = getattr(self, "kept", slots), slots
        super().access(now_ns, before)


class WritesIntoArguments(Fast):
    def access(self, now_ns, slots):
        super().access(now_ns, slots)
        slots.sort()


class HandsOutItsMemory(Slow):
    def evict(self, now_ns, n, protected=()):
        got = super().evict(now_ns, n, protected)
        if got is None or n == 0:
            return got
        self.memory = getattr(self, "memory", np.zeros(99, np.int64))
        if self.memory[0] < 0:
            got[:] = self.memory[:n]
        self.memory[:n] = got
        return self.memory[:n]


MUTANTS = [
    mutant
    for mutant in [*Fast.__subclasses__(), *Slow.__subclasses__()]
    if mutant.__module__ == __name__
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.__name__)
def test_mutant_is_killed(mutant):
    with pytest.raises(AssertionError):
        check_policy(mutant, leases=LEASES, max_examples=600, shrink=False)
