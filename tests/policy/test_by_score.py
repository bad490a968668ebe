"""A policy from one function: the default is LRU, and others are what they say."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import settings

from flowkv.policy import LRU
from flowkv.testing import check_policy
from tests.inside import ByScore, ConfigError, _keys
from tests.policy.reference import SlowLfuTtl
from tests.policy.slots import ids
from tests.policy.test_against_reference import LEASES, Both


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
TestBothRecent.settings = settings(max_examples=12, stateful_step_count=30)


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


@pytest.mark.parametrize(
    "wrong",
    [
        *(lambda n: np.zeros(n - 1), lambda n: np.zeros(n + 1), lambda n: np.zeros((n, 1))),
        *(lambda n: np.float64(1), lambda n: [1.0] * (n - 1), lambda n: np.full(n, np.nan)),
        lambda n: np.append(np.zeros(n - 1, np.float32), np.float32("nan")),
        *(lambda n: np.zeros(n, complex), lambda n: np.array(["1"] * n)),
        *(lambda n: np.zeros(n, "datetime64[s]"), lambda n: None),
        *(lambda n: [[1]] * (n - 1) + [[1, 2]], lambda n: torch.zeros(n, requires_grad=True)),
        lambda n: torch.zeros(n, device="meta"),
    ],
)
def test_what_is_no_score_for_each_block_is_refused(wrong):
    class Wrong(ByScore):
        name = "wrong"
        spoilt = False

        def score(self, now_ns, use):
            return wrong(len(use.slots)) if self.spoilt else use.uses

    policy = Wrong()
    policy.insert(0, ids(0, 1, 2), ids(-1, 0, 1))
    before = [policy.priority(slot) for slot in range(3)]
    policy.spoilt = True
    with pytest.raises(ConfigError, match=r"score\(\) of policy 'wrong' gave"):
        policy.access(1, ids(0, 1, 2))
    with pytest.raises(ConfigError, match=r"Return one number for each of use\.slots"):
        policy.insert(2, ids(3, 4), ids(2, 3))
    assert [policy.priority(slot) for slot in range(3)] == before
    policy.spoilt = False
    policy.access(3, ids(0, 1, 2, 3, 4))
    assert policy.evict(4, 5).tolist() == [4, 3, 2, 1, 0]


def test_any_vector_of_numbers_is_a_score():
    kinds = (np.uint8, np.int32, np.uint64, np.float16, np.float32, np.longdouble, bool)
    for kind in kinds:

        class Odd(ByScore):
            name = "odd"

            def score(self, now_ns, use, kind=kind):
                strided = np.repeat(np.array(use.slots % 2 == 0).astype(kind), 2)[::2]
                use.slots[:] = 1 << 40  # its own copy
                return strided

        policy = Odd()
        policy.insert(0, ids(0, 1), ids(-1, -1))
        assert policy.evict(1, 2).tolist() == [1, 0], kind


def test_huge_unsigned_scores_keep_their_order():
    scores = np.array([0, 5, 2**63, 2**64 - 1], np.uint64)
    assert (np.diff(_keys(scores)) >= 0).all() and _keys(scores)[0] == 0
