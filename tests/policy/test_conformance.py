"""`check_policy` passes what is right: the whole catalogue, quotas, and policies of few methods."""

from __future__ import annotations

import ast
import math
import re

import numpy as np
import pytest

from flowkv.policy import CATALOGUE, LRU, Lease, LfuTtl, Policy, Visit, make_policy
from flowkv.testing import check_policy
from flowkv.testing.stories import tell_machine
from tests.inside import Quota, Tenants
from tests.policy.ledger_story import LedgerStory
from tests.policy.reference import SlowLfuTtl

S = 10**9
LEASES = ("", "short", "old")
SLOW_LEASES = {"": (math.inf, math.inf), "short": (3 * S, math.inf), "old": (50 * S, 90 * S)}
RANKED = ("", Lease(3), Lease(50, 90), Lease(rank=10), Lease(rank=60))
DECLARED = {  # what does not hold for an entry of the catalogue, on purpose
    "opt": {"heeds": ()}  # the future that it is told has the queue in it
}


class Fast(LfuTtl):
    def __init__(self):
        super().__init__(tau_s=7, leases={"short": Lease(3), "old": Lease(50, 90)})


class Slow(SlowLfuTtl):
    def __init__(self):
        super().__init__(7 * S, SLOW_LEASES)


class Shared(Tenants):
    def __init__(self):
        super().__init__(LRU)


class First(Policy):
    """Gives up the smallest slot; knows no parents, no pins, no leases, and saves nothing."""

    name = "first"

    def __init__(self):
        self.here = set()
        self.said = 0

    def insert(self, now_ns, slots, parents, **terms):
        self.here |= set(slots.tolist())

    def access(self, now_ns, slots, visit=None):
        pass

    def remove(self, slots):
        self.here -= set(slots.tolist())

    def evict(self, now_ns, n, protected=()):
        free = sorted(self.here - {int(s) for s in protected})
        if n > len(free):
            return None
        self.here -= set(free[:n])
        self.said = hash((self.said, *free[:n])) % 2**64
        return np.array(free[:n], np.int64)

    def priority(self, slot):
        return float(slot) if slot in self.here else -math.inf

    def resident(self):
        return list(self.here)

    def digest(self):
        return self.said


def decides_for_a_ledger(make, leases, max_examples, steps=50, *, leaf_first=True):
    """Tells stories of a ledger that the policy decides for."""
    said = {"make": staticmethod(make), "leases": leases, "leaf_first": leaf_first}
    tell_machine(type("Story", (LedgerStory,), said), max_examples, steps, shrink=True)


@pytest.mark.parametrize("name", CATALOGUE)
def test_catalogue_conforms(name):
    most = 6 if name == "auto" else 12  # the others are parts of it
    check_policy(
        lambda: make_policy(name), leases=RANKED, max_examples=most, **DECLARED.get(name, {})
    )
    decides_for_a_ledger(lambda: make_policy(name), RANKED, most)


@pytest.mark.deep
@pytest.mark.parametrize("name", CATALOGUE)
def test_catalogue_conforms_in_long_stories(name):
    declared = DECLARED.get(name, {})
    check_policy(lambda: make_policy(name), leases=RANKED, max_examples=400, steps=80, **declared)
    decides_for_a_ledger(lambda: make_policy(name), RANKED, 400, 80)


@pytest.mark.parametrize("make", [Fast, Slow])
def test_leases_conform(make):
    check_policy(make, leases=LEASES, max_examples=10)
    decides_for_a_ledger(make, LEASES, 10)


def test_tenants_without_quotas_are_one_policy():
    check_policy(Shared, leases=RANKED, max_examples=10)
    decides_for_a_ledger(Shared, RANKED, 10)


def test_a_policy_of_the_least_methods_conforms():
    check_policy(First, leaf_first=False, max_examples=10)
    decides_for_a_ledger(First, ("",), 10, leaf_first=False)


def test_without_leaf_first():
    """A policy that does not know parents is fine where that is allowed, and only there."""

    class Flat(LRU):
        def insert(self, now_ns, slots, parents, **kw):
            super().insert(now_ns, slots, np.full_like(parents, -1), **kw)

    check_policy(Flat, leaf_first=False, max_examples=10)
    decides_for_a_ledger(Flat, ("",), 10, leaf_first=False)
    with pytest.raises(AssertionError, match="before its resident child"):
        check_policy(Flat, shrink=False)


def test_a_fault_comes_with_a_program_that_shows_it():
    class Careless(First):
        def evict(self, now_ns, n, protected=()):
            return super().evict(now_ns, n)

    with pytest.raises(AssertionError, match="a protected or pinned slot") as caught:
        check_policy(Careless, leaf_first=False, max_examples=100)
    (note,) = caught.value.__notes__
    head, *program = note.splitlines()
    assert head == "The calls that show it:" and "state." not in note
    assert program[0] == "    policy = make()" and len(program) < 12
    *_, victims = re.findall(r"policy\.evict\((.*)\)  # np\.array\((.*)\)", program[-1])[0]
    names = {"make": Careless, "np": np, "Visit": Visit, "Lease": Lease}
    exec("\n".join(line.strip() for line in program), names)
    assert victims and not {*ast.literal_eval(victims)} & {*names["policy"].resident()}


class Quotas(LedgerStory):
    """Two tenants in places of 8 bytes and more."""

    make = staticmethod(LRU)
    leases = ("",)
    leaf_first = True
    quotas = {0: Quota(4), 1: Quota(2, 6)}  # noqa: RUF012


def test_reserves_hold():
    tell_machine(Quotas, 25, 40, shrink=True)


def test_pins_and_reserves_together_may_exceed_a_place_that_shrinks():
    story = Quotas()
    story.begin_life(start=0, capacities=[9])
    story.begin(dt=0, request=0, namespace=0, tokens=(0,), said=(0, 1, 0))
    story.invalidate(dt=0, namespace=0)
    story.begin(dt=0, request=1, namespace=0, tokens=(0,) * 6, said=(0, 1, 0))
    story.serve(dt=0, namespace=1, tokens=(0, 0), said=(0, 1, 0), stop=0)
    story.resize(dt=0, place=0, capacity=8)
    story.is_whole()
    assert story.raw.used_bytes(0) == 9
    story.end(dt=0, request=1, stop=0, done=True)
    story.is_whole()
    assert story.raw.used_bytes(0) == 8


@pytest.mark.deep
def test_reserves_hold_in_long_stories():
    tell_machine(Quotas, 500, 80, shrink=True)
