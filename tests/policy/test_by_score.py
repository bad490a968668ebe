"""A policy from one function: the default is LRU, and others are what they say."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import settings

from flowkv.policy import LRU
from flowkv.policy.by_score import ByScore, _keys
from flowkv.testing import check_policy
from tests.policy.reference import SlowLfuTtl
from tests.policy.test_against_reference import LEASES, Both


def ids(*values):
    return np.array(values, np.int64)


class Recent(ByScore):
    """LRU in words: the default."""

    name = "recent"


class Often(ByScore):
    """Least often used ever, then least recently."""

    name = "often"

    def score(self, now_ns, use):
        return use.uses + now_ns / 2.0**62


class Lru2(ByScore):
    """By the last use but one (O'Neil et al., LRU-K, SIGMOD 1993)."""

    name = "lru-2"

    def score(self, now_ns, use):
        return np.where(use.uses == 1, -np.inf, use.before_ns)


class BothRecent(Both):
    """With leases, pins and all, but for hints of a time."""

    def make(self, tau):
        return Recent(leases=LEASES)

    def reference(self, tau, leases):
        class Slow(SlowLfuTtl):
            def hint(self, now_ns, slots, eta_ns, sigma=0.5):
                if eta_ns == np.iinfo(np.int64).max:
                    super().hint(now_ns, slots, eta_ns)
                self.tick(now_ns)

        return Slow(0, leases)


TestBothRecent = BothRecent.TestCase
TestBothRecent.settings = settings(max_examples=25, stateful_step_count=30)


def test_conforms():
    check_policy(Often, max_examples=12)
    check_policy(Lru2, leases=("", "one_shot"), max_examples=12)


def test_often_counts_whatever_left_meanwhile():
    policy = Often()
    for now, slots in enumerate(([0], [1], [0], [2], [1], [1])):
        policy.access(now, ids(*slots))
        policy.insert(now, ids(*slots), ids(-1))
    assert policy.evict(9, 1).tolist() == [2]
    policy.insert(9, ids(2), ids(-1))
    policy.access(10, ids(2))
    assert policy.evict(11, 3).tolist() == [0, 1, 2]
    policy.forget(ids(1))
    for now, s in ((12, 0), (13, 1)):
        policy.insert(now, ids(s), ids(-1))
    assert policy.evict(14, 2).tolist() == [1, 0]


def test_lru_2_resists_a_scan():
    rng = random.Random(1)
    found = {}
    for make in (LRU, Lru2):
        policy, here, found[make], rng = make(), set(), 0, random.Random(1)
        for now in range(6000):
            s = rng.randrange(30) if rng.random() < 0.5 else 100 + now
            policy.access(now, ids(s))
            found[make] += s in here
            policy.insert(now, ids(s), ids(-1))
            here.add(s)
            if len(here) > 32:
                here -= set(policy.evict(now, 1).tolist())
    assert found[Lru2] > 1.5 * found[LRU]


def test_keys_keep_the_order_of_scores():
    scores = np.array([-np.inf, -1e300, -2.0, -1e-300, -0.0, 0.0, 1e-300, 1.0, 2.0, 1e300, np.inf])
    keys = _keys(scores)
    assert (np.diff(keys)[[0, 1, 2, 3, 5, 6, 7, 8, 9]] > 0).all()
    assert keys[4] == keys[5]
    assert _keys(ids(-(1 << 63), -5, 7, (1 << 63) - 1)).tolist()[1:3] == [-5, 7]
    assert abs(_keys(ids(-(1 << 63), (1 << 63) - 1))).max() < 1 << 62
