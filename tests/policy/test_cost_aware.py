"""Cost-aware eviction equals its slow rules; and what it is for."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowkv.policy import CostAware, LfuTtl
from tests.inside import ConfigError, log2
from tests.policy.reference_cost_aware import SlowCostAware
from tests.policy.slots import ids
from tests.policy.test_against_reference import LEASES, Both

S = 10**9


class BothCostAware(Both):
    def make(self, tau):
        return CostAware(tau_s=max(tau, 1) / S, leases=LEASES)

    def reference(self, tau, leases):
        return SlowCostAware(max(tau, 1), leases)


TestBothCostAware = BothCostAware.TestCase
TestBothCostAware.settings = settings(max_examples=20, stateful_step_count=30)


@given(st.floats(1e-300, 1e300))
def test_log2(x):
    assert abs(log2(x) - math.log2(x)) <= 4e-16 * max(1.0, abs(math.log2(x)))


def test_of_two_equally_used_the_cheaper_per_byte_goes_first():
    policy = CostAware(tau_s=60)
    policy.insert(1, ids(0), ids(-1), n_bytes=1000, cost_ns=9000)
    policy.insert(1, ids(1), ids(-1), n_bytes=4000, cost_ns=9000)
    policy.insert(1, ids(2), ids(-1), n_bytes=1000, cost_ns=8000)
    policy.insert(1, ids(3), ids(-1), n_bytes=7000)  # unknown: 1 ns a byte
    assert policy.evict(2, 4).tolist() == [3, 1, 2, 0]


def test_a_factor_of_eight_is_three_half_lives():
    policy = CostAware(tau_s=60)
    policy.insert(0, ids(0), ids(-1), n_bytes=1, cost_ns=8)
    policy.insert(179 * S, ids(1), ids(-1), n_bytes=1, cost_ns=1)
    policy.insert(181 * S, ids(2), ids(-1), n_bytes=1, cost_ns=1)
    assert policy.evict(200 * S, 3).tolist() == [1, 0, 2]


def saved(policy, seed, capacity=40):
    """Nanoseconds that hits save where one block in four costs thirty times as much."""
    rng = random.Random(seed)
    here, total, now = set(), 0, 0
    for _ in range(3000):
        now += rng.randrange(1, S)
        s = min(int(rng.paretovariate(0.6)), 400)
        cost = 30_000 if s % 4 == 0 else 1000
        policy.access(now, ids(s))
        if s in here:
            total += cost
            continue
        policy.insert(now, ids(s), ids(-1), n_bytes=1000, cost_ns=cost)
        here.add(s)
        if len(here) > capacity:
            here -= set(policy.evict(now, 1).tolist())
    return total


@pytest.mark.parametrize("seed", range(3))
def test_it_saves_more_where_costs_differ(seed):
    assert saved(CostAware(tau_s=60), seed) > 1.05 * saved(LfuTtl(tau_s=60), seed)
    assert saved(CostAware(tau_s=60, alpha=0), seed) == saved(LfuTtl(tau_s=60), seed)


def test_errors_name_the_field():
    with pytest.raises(ConfigError, match="tau_s"):
        CostAware(tau_s=0)
    with pytest.raises(ConfigError, match="ns_per_byte"):
        CostAware(ns_per_byte=math.inf)
