"""Mutants for `check_policy` and the ledger's story: policies and ledgers of one fault each."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from flowkv.policy import LRU, Lease
from flowkv.residency import Ledger
from flowkv.testing import check_policy
from flowkv.testing.stories import tell_machine
from tests.inside import NO_VISIT, ByScore, StateError
from tests.policy.ledger_story import LedgerStory
from tests.policy.test_conformance import LEASES, Fast, Slow

# --- policies ------------------------------------------------------------------------------------


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
    def access(self, now_ns, slots, visit=NO_VISIT):
        now = self.tick(now_ns)
        for block in [self.blocks[s] for s in slots.tolist() if s in self.blocks]:
            block.last = now
        super().access(now_ns, slots, visit)


class FollowsTheClockBack(Slow):
    def tick(self, now):
        self.clock = now
        return now


class CountsStrangers(Fast):
    def access(self, now_ns, slots, visit=NO_VISIT):
        new = np.array([s for s in slots if s not in self.resident()], np.int64)
        super().insert(now_ns, new, np.full_like(new, -1))
        super().access(now_ns, slots, visit)


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
    def access(self, now_ns, slots, visit=NO_VISIT):
        before, self.kept = getattr(self, "kept", slots), slots
        super().access(now_ns, before, visit)


class WritesIntoArguments(Fast):
    def access(self, now_ns, slots, visit=NO_VISIT):
        super().access(now_ns, slots, visit)
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


class PinsDoNotHold(Fast):
    def pin(self, slots):
        pass

    def unpin(self, slots):
        pass


class PinsDoNotNest(Fast):
    def pin(self, slots):
        self.pinned = getattr(self, "pinned", set())
        super().pin(np.array([s for s in slots if s not in self.pinned], np.int64))
        self.pinned |= set(slots.tolist())

    def unpin(self, slots):
        self.pinned = getattr(self, "pinned", set())
        super().unpin(np.array([s for s in slots if s in self.pinned], np.int64))
        self.pinned -= set(slots.tolist())


class UnpinForgetsTheLast(Fast):
    def unpin(self, slots):
        super().unpin(slots[:-1])


class QueueIsDeaf(Fast):
    def enqueue(self, now_ns, request, slots):
        pass


class RanksUpsideDown(Fast):
    def insert(self, now_ns, slots, parents, *, lease="", **more):
        if isinstance(lease, Lease):
            lease = Lease(lease.lease_s, lease.max_age_s, 100 - lease.rank, lease.rank_s)
        super().insert(now_ns, slots, parents, lease=lease, **more)


class InvalidatesTheOther(Fast):
    def invalidate(self, now_ns, tenant):
        super().invalidate(now_ns, 1 - tenant if tenant < 2 else 2)


class PriorityIsNaN(Fast):
    def hint(self, now_ns, slots, eta_ns, sigma=0.5):
        super().hint(now_ns, slots, eta_ns, sigma)
        self.odd = getattr(self, "odd", set()) | set(slots.tolist())

    def priority(self, slot):
        value = super().priority(slot)
        return math.nan if slot in getattr(self, "odd", ()) and value > -math.inf else value


class WeakestIsTheStrongest(Fast):
    def weakest(self, now_ns, protected=()):
        super().weakest(now_ns, protected)
        return max(self.resident(), key=self.priority, default=-1)


class DisplacesThePinned(Slow):
    def displace(self, now_ns, n, rate, protected=()):
        return super().displace(now_ns, n, rate)


class WantsWhatIsThere(Fast):
    def wanted(self, now_ns, n):
        here = np.array(sorted(self.resident())[:n], np.int64)
        return here, np.ones(len(here))


class BreaksOnATenant(Fast):
    def access(self, now_ns, slots, visit=NO_VISIT):
        super().access(now_ns, slots, visit)
        if visit.tenant == 1:
            raise KeyError(visit.tenant)


class RefusesAtAnEarlierTime(Fast):
    seen = -math.inf

    def expired(self, now_ns):
        self.seen = now_ns
        return super().expired(now_ns)

    def evict(self, now_ns, n, protected=()):
        return None if n and now_ns < self.seen else super().evict(now_ns, n, protected)


class CannotLoadItsModel(Fast):
    def save_model(self):
        return b"model"

    def load_model(self, saved):
        raise ValueError(saved)


class LearnsNonsense(CannotLoadItsModel):
    def load_model(self, saved):
        self.weight = math.nan

    def priority(self, slot):
        return super().priority(slot) + getattr(self, "weight", 0.0)


class DisplacesForAnyRate(Fast):
    def displace(self, now_ns, n, rate, protected=()):
        return super().displace(now_ns, n, math.inf, protected)


POLICIES = [
    mutant
    for mutant in [*Fast.__subclasses__(), *Slow.__subclasses__(), LearnsNonsense]
    if mutant.__module__ == __name__
]
RANKED = (*LEASES, Lease(rank=10), Lease(rank=60))


@pytest.mark.parametrize("mutant", POLICIES, ids=lambda m: m.__name__)
def test_policy_mutant_is_killed(mutant):
    leases = RANKED if issubclass(mutant, Fast) else LEASES
    with pytest.raises(AssertionError) as caught:
        check_policy(mutant, leases=leases, max_examples=2400, shrink=False)
    assert caught.value.__notes__[0].startswith("The calls that show it:")


class Scored(ByScore):
    def score(self, now_ns, use):
        return np.log2(1.0 + use.uses)


class ScoresTooFew(Scored):
    def score(self, now_ns, use):
        return super().score(now_ns, use)[:-1]


class ScoresTooMany(Scored):
    def score(self, now_ns, use):
        return np.append(super().score(now_ns, use), 0.0)


class ScoresAllAlike(Scored):
    def score(self, now_ns, use):
        return 1.0


class ScoresInTwoDimensions(Scored):
    def score(self, now_ns, use):
        return super().score(now_ns, use)[:, None]


class ScoresNaN(Scored):
    def score(self, now_ns, use):
        return np.where(use.uses > 1, np.nan, 1.0)


class ScoresObjects(Scored):
    def score(self, now_ns, use):
        return super().score(now_ns, use).astype(object)


class ScoresNothing(Scored):
    def score(self, now_ns, use):
        return None


@pytest.mark.parametrize("mutant", Scored.__subclasses__(), ids=lambda m: m.__name__)
def test_score_mutant_is_killed(mutant):
    with pytest.raises(AssertionError, match=r"score\(\) of policy"):
        check_policy(mutant, max_examples=20, shrink=False)


# --- ledgers -------------------------------------------------------------------------------------


class HoldsOneMore(Ledger):
    def _make_room(self, now, shelf, need):
        shelf.capacity += 1
        made = super()._make_room(now, shelf, need)
        shelf.capacity -= 1
        return made


class SharesNamespaces(Ledger):
    def namespace(self, name, generation=0):
        number = super().namespace(name, generation)
        self._spaces = [0] * len(self._spaces)
        return number


class InvalidatesNothing(Ledger):
    def invalidate(self, now_ns, namespace):
        self._advance(now_ns)


class KeepsTheExpired(Ledger):
    def _advance(self, now_ns):
        self._clock = max(now_ns, self._clock)
        return self._clock


class SaysItIsThere(Ledger):
    """A block on its way counts as a hit."""

    def _land(self, now, k, slots, terms, flying=False):
        return super()._land(now, k, slots, terms)


class NeverForgets(Ledger):
    def _flush(self):
        moves, self._moves = self._moves, []
        return moves


class PinsNothing(Ledger):
    def _pin(self, slots):
        pass

    def _unpin(self, now, slots, done):
        pass


class TellsNoPolicyOfPins(Ledger):
    def _protected(self, shelf):
        return ()

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        for shelf in self._shelves:
            shelf.pins = False


class AbortIsSuccess(Ledger):
    def _unpin(self, now, slots, done):
        super()._unpin(now, slots, True)


class CompleteIsFailure(Ledger):
    def _unpin(self, now, slots, done):
        super()._unpin(now, slots, False)


class LookUpIsAnAccess(Ledger):
    def lookup(self, namespace, ids, *, chained=True):
        for shelf in self._shelves:
            shelf.policy.access(self._clock, np.arange(len(ids)))
        return super().lookup(namespace, ids, chained=chained)


class FindsOneMore(Ledger):
    def lookup(self, namespace, ids, *, chained=True):
        return min(super().lookup(namespace, ids, chained=chained) + 1, len(ids))


class CopiesAgain(Ledger):
    """What a place has already comes once more."""

    def _lacking(self, shelf, slots):
        return slots


class ThrowsAway(Ledger):
    """Tells nobody what leaves."""

    def _give_up(self, now, k, victims):
        super()._give_up(now, k, victims)
        self._moves.pop()


class CountsBlocks(Ledger):
    """All blocks have one byte."""

    def _land(self, now, k, slots, terms, flying=False):
        return super()._land(now, k, slots, terms._replace(n_bytes=1), flying)


class ResizesOnPaper(Ledger):
    def resize(self, now_ns, place, capacity_bytes):
        self._advance(now_ns)
        self._shelves[place].resize(capacity_bytes)
        return self._flush()


class SeedDecides(Ledger):
    def _give_up(self, now, k, victims):
        super()._give_up(now, k, victims)
        if int(self._mix[0]) & 1:
            self._state[0] += 1


LEDGERS = [mutant for mutant in Ledger.__subclasses__() if mutant.__module__ == __name__]


@pytest.mark.parametrize("mutant", LEDGERS, ids=lambda m: m.__name__)
def test_ledger_mutant_is_killed(mutant):
    said = {"make": staticmethod(Fast), "leases": LEASES, "leaf_first": True}
    said["ledger_class"] = mutant
    with pytest.raises((AssertionError, LookupError, StateError)):
        tell_machine(type("Story", (LedgerStory,), said), 300, 40, shrink=False)


def test_there_are_enough_mutants():
    assert len(POLICIES) >= 30
    assert len(LEDGERS) >= 15
    changed = [name for mutant in LEDGERS for name in vars(mutant) if not name.startswith("__")]
    assert all(hasattr(Ledger, name) for name in changed)


def test_the_unspoilt_survive():
    """What the mutants were made from passes the same stories."""
    said = {"make": staticmethod(LRU), "leases": ("",), "leaf_first": True}
    tell_machine(type("Story", (LedgerStory,), said), 10, 40, shrink=False)
    check_policy(Scored, max_examples=20, shrink=False)
