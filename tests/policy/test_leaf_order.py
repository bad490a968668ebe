"""LRU and LFU-TTL by example: what a reader of the documentation expects."""

from __future__ import annotations

import numpy as np
import pytest

from flowkv.core.errors import ConfigError
from flowkv.policy import LRU, Lease, LfuTtl
from flowkv.policy.leaf import FIRST_CAPACITY

S = 10**9


def ids(*values):
    return np.array(values, np.int64)


def chain(policy, now, *slots, parent=-1, **kw):
    policy.insert(now, ids(*slots), ids(parent, *slots[:-1]), **kw)


@pytest.fixture(params=[LRU, LfuTtl])
def policy(request):
    return request.param()


def test_least_recent_request_goes_first_leaf_by_leaf(policy):
    chain(policy, 1, 10, 11, 12)
    chain(policy, 2, 20, 21)
    policy.access(3, ids(10, 11))
    assert policy.evict(4, 5).tolist() == [12, 21, 20, 11, 10]


def test_ties_go_deepest_first_then_smallest_slot(policy):
    chain(policy, 1, 5)
    chain(policy, 1, 3)
    chain(policy, 1, 8, 9)
    assert policy.evict(1, 4).tolist() == [9, 3, 5, 8]


def test_without_parents_the_place_in_the_array_is_the_depth(policy):
    policy.insert(1, ids(4, 2, 7), ids(-1, -1, -1))
    assert policy.evict(1, 3).tolist() == [7, 2, 4]


def test_protected_slots_shield_what_is_above_them(policy):
    chain(policy, 1, 0, 1, 2)
    chain(policy, 2, 3)
    before = policy.resident()
    assert policy.evict(3, 2, {2}) is None
    assert policy.resident() == before
    assert policy.evict(3, 1, {2}).tolist() == [3]
    assert policy.evict(3, 2, [0, 77, -5]).tolist() == [2, 1]
    assert policy.evict(3, 0).tolist() == []
    assert policy.evict(3, 2) is None
    assert policy.evict(3, 1 << 50) is None


def test_removed_parents_leave_roots(policy):
    chain(policy, 1, 0, 1, 2)
    policy.remove(ids(1, 1, 55, -3))
    assert policy.resident() == [0, 2]
    assert policy.evict(2, 1, {2}).tolist() == [0]
    chain(policy, 3, 1)  # the slot of the parent is another block now
    assert policy.evict(3, 1, {2}).tolist() == [1]
    assert policy.evict(3, 1).tolist() == [2]


def test_a_second_insert_is_an_access_and_finds_a_parent(policy):
    chain(policy, 1, 0, 1)
    policy.remove(ids(0))
    chain(policy, 2, 5)
    policy.insert(3, ids(1), ids(5))
    assert policy.evict(9, 1, {1}) is None
    policy.insert(4, ids(5), ids(1))  # a ring is refused
    policy.insert(4, ids(5), ids(5))
    assert policy.evict(9, 2).tolist() == [1, 5]


def test_time_does_not_run_backwards(policy):
    chain(policy, 100, 0)
    chain(policy, 50, 1)
    assert policy.priority(0) == policy.priority(1) == 100.0
    policy.admit(200, ids(9))
    chain(policy, 150, 2)
    assert policy.priority(2) == 200.0


def test_grows_on_demand(policy):
    far = 5 * FIRST_CAPACITY
    chain(policy, 1, 0, far, FIRST_CAPACITY)
    chain(policy, 2, *range(1, FIRST_CAPACITY))
    assert len(policy) == FIRST_CAPACITY + 2
    assert policy.evict(3, 3).tolist() == [FIRST_CAPACITY, far, 0]
    assert policy.priority(far) == policy.priority(10**9) == policy.priority(-1) == -np.inf


def test_takes_any_vector_of_integers(policy):
    frozen = ids(0, 1)
    frozen.flags.writeable = False
    policy.insert(1, frozen, [-1, 0])
    policy.insert(2, np.arange(6, dtype=np.int32)[2::2], (1, 2))
    policy.access(3, range(5))
    assert policy.resident() == [0, 1, 2, 4]
    assert policy.evict(4, 1, frozenset({np.int64(7)})).tolist() == [4]
    assert policy.evict(4, 1, {2: "a dict"}) is None
    assert policy.admit(5, ids(8, 9)).tolist() == [True, True]


def test_errors_say_what_to_do(policy):
    with pytest.raises(ConfigError, match="densely from 0"):
        policy.insert(1, ids(3, -1), ids(-1, 3))
    with pytest.raises(ConfigError, match="densely from 0"):
        policy.insert(1, ids(1 << 40), ids(-1))
    with pytest.raises(ConfigError, match="one parent per slot"):
        policy.insert(1, ids(1, 2), ids(-1))
    with pytest.raises(ConfigError, match="none or more"):
        policy.evict(1, -1)
    assert policy.resident() == []
    assert type(policy).__name__ in repr(policy)


def test_frequency_outlives_recency():
    policy = LfuTtl(tau_s=100)
    chain(policy, 0, 0)
    for t in range(1, 4):
        policy.access(t * S, ids(0))
    chain(policy, 50 * S, 1)
    assert policy.evict(51 * S, 1).tolist() == [1]  # used once
    chain(policy, 600 * S, 2)
    assert policy.evict(601 * S, 1).tolist() == [0]  # used often, but six half-lives ago


def leased():
    return LfuTtl(leases={"s": Lease(3), "m": Lease(10, 12), "l": {"lease_s": 30}})


def test_expired_go_before_live():
    policy = leased()
    chain(policy, 0, 0)
    chain(policy, 1 * S, 1, lease="s")
    assert policy.expired(4 * S - 1).tolist() == []
    assert policy.expired(4 * S).tolist() == [1]
    assert policy.evict(4 * S, 1, {1}).tolist() == [0]
    assert policy.evict(4 * S, 1).tolist() == [1]


def test_access_renews_a_lease_up_to_the_maximum_age():
    policy = leased()
    chain(policy, 0, 0, lease="s")
    chain(policy, 0, 1, lease="m")
    policy.access(2 * S, ids(0, 1))
    assert policy.expired(5 * S - 1).tolist() == []
    policy.access(5 * S - 1, ids(1))
    assert policy.expired(5 * S).tolist() == [0]
    assert policy.expired(12 * S).tolist() == [0, 1]


def test_a_parent_lives_as_long_as_its_children():
    policy = leased()
    chain(policy, 0, 0, lease="s")
    chain(policy, 0, 1, parent=0, lease="l")
    assert policy.expired(20 * S).tolist() == []
    policy.remove(ids(1))
    assert policy.expired(20 * S).tolist() == [0]


def test_within_one_call_what_a_victim_kept_alive_is_next():
    policy = leased()
    chain(policy, 0, 0, lease="s")
    chain(policy, 0, 1, parent=0)
    chain(policy, 5 * S, 2)
    policy.access(7 * S, ids(0))
    assert policy.evict(20 * S, 2).tolist() == [1, 0]


def test_only_insert_revives():
    policy = leased()
    chain(policy, 0, 0, 1, lease="s")
    policy.access(5 * S, ids(0, 1))
    chain(policy, 5 * S, 2, parent=1)  # its parent is expired, so it has none
    assert policy.expired(6 * S).tolist() == [0, 1]
    policy.insert(6 * S, ids(0), ids(-1))
    assert policy.expired(6 * S).tolist() == [1]
    assert policy.evict(6 * S, 3).tolist() == [1, 2, 0]


def test_built_in_leases():
    policy = LfuTtl()
    for slot, name in enumerate(["", "pinned_prefix", "turn_end", "tool_wait", "one_shot"]):
        chain(policy, 0, slot, lease=name)
    chain(policy, 0, 9, lease="ephemeral")
    assert policy.expired(60 * S).tolist() == [4, 9]
    assert policy.expired(1800 * S).tolist() == [2, 3, 4, 9]
    assert policy.expired(10**18).tolist() == [2, 3, 4, 9]
    with pytest.raises(ConfigError, match=r"no lease class 'x'.*turn_end"):
        chain(policy, 0, 7, lease="x")
