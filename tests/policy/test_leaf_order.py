"""LRU and LFU-TTL by example: what a reader of the documentation expects."""

from __future__ import annotations

import numpy as np
import pytest

from flowkv.policy import LRU, Lease, LfuTtl, Visit
from tests.inside import FIRST_CAPACITY, NEVER_NS, ConfigError
from tests.policy.slots import ids

S = 10**9


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


def test_what_is_pinned_stays_with_all_above_it(policy):
    chain(policy, 1, 0, 1, 2)
    chain(policy, 2, 3)
    policy.pin(ids(1))
    policy.pin(ids(1, 7))  # nests; 7 is not resident yet
    assert policy.evict(3, 1).tolist() == [2]
    assert policy.evict(3, 2) is None
    policy.unpin(ids(1))
    assert policy.evict(3, 1).tolist() == [3]
    chain(policy, 4, 7, parent=0)
    policy.unpin(ids(1, 1, 1))  # more than were pinned
    assert policy.evict(5, 1).tolist() == [1]
    assert policy.evict(5, 1) is None
    policy.unpin(ids(7))
    assert policy.evict(5, 2).tolist() == [7, 0]


def test_hints_of_time_count_as_age(policy):
    for slot, now in enumerate((0, 10, 20)):
        chain(policy, now * S, slot)
    policy.hint(21 * S, ids(2), 15 * S)  # as one unused for 15 s: after 0, before 1
    policy.hint(21 * S, ids(0), 1 * S)
    assert policy.evict(21 * S, 1).tolist() == [2]
    chain(policy, 21 * S, 2)
    policy.hint(21 * S, ids(2), 9 * S)
    assert policy.evict(21 * S, 2).tolist() == [1, 2]
    chain(policy, 22 * S, 3)
    assert policy.evict(40 * S, 2).tolist() == [0, 3]  # its time has passed: as used at 22 s


def test_hints_of_never_go_first_up_to_what_others_use(policy):
    chain(policy, 1, 0, 1, 2)
    chain(policy, 1, 3, parent=0)
    chain(policy, 1, 4)
    policy.hint(2, ids(0, 1, 2), NEVER_NS)
    assert policy.evict(3, 5).tolist() == [2, 1, 3, 0, 4]


def test_never_spares_what_was_shared_once(policy):
    chain(policy, 1, 4)
    chain(policy, 2, 0, 1)
    chain(policy, 2, 3, parent=0)
    policy.remove(ids(3))
    policy.hint(3, ids(0, 1), NEVER_NS)
    assert policy.evict(4, 3).tolist() == [1, 4, 0]


def test_a_use_ends_a_hint_also_of_a_ghost(policy):
    chain(policy, 1, 0)
    chain(policy, 2, 1)
    policy.hint(3, ids(1), NEVER_NS)
    policy.access(4, ids(1))
    assert policy.evict(5, 1).tolist() == [0]
    policy.hint(6, ids(0), NEVER_NS)
    policy.access(7, ids(0))
    chain(policy, 7, 0)
    assert policy.evict(8, 1).tolist() == [1]


def test_what_a_queued_request_will_use_goes_last(policy):
    chain(policy, 1, 0, 1)
    chain(policy, 2, 2)
    policy.enqueue(3, 7, ids(0, 1, 5))
    policy.enqueue(3, 8, ids(0, 1))
    policy.access(4, ids(0, 1), Visit(request=7))
    chain(policy, 4, 5)
    chain(policy, 5, 3)
    assert policy.evict(6, 3).tolist() == [2, 5, 3]
    queued = policy.priority(1)
    policy.abort(7, 99)
    assert policy.priority(1) == queued
    policy.abort(7, 8)
    assert policy.priority(1) < queued


def test_ranks_rule_until_they_fall():
    policy = LRU()
    chain(policy, 1, 0, lease=Lease(rank=20))
    chain(policy, 0, 1, lease=Lease(rank=80, rank_s=5))
    chain(policy, 0, 2)
    chain(policy, 0, 3, lease=Lease(rank=80))
    assert policy.evict(2, 2).tolist() == [0, 2]
    chain(policy, 3, 4)
    assert policy.evict(6 * S, 1).tolist() == [1]
    chain(policy, 7 * S, 4, lease=Lease(rank=90))  # an insert that says more prevails
    chain(policy, 8 * S, 3, lease=Lease(rank=10))  # one that says less does not
    assert policy.evict(9 * S, 2).tolist() == [3, 4]


def test_of_equal_ranks_the_longer_time_counts():
    policy = LRU()
    chain(policy, 0, 0, lease=Lease(rank=80, rank_s=3600))
    chain(policy, 0, 1, lease=Lease(rank=80))
    chain(policy, 0, 2, lease=Lease(rank=80, rank_s=5))
    for slot in range(3):
        chain(policy, S, slot, lease=Lease(rank=80, rank_s=5))
    chain(policy, 100 * S, 3)
    assert policy.evict(100 * S, 2).tolist() == [2, 3]
    chain(policy, 3700 * S, 3)
    assert policy.evict(3700 * S, 1).tolist() == [0]


def test_a_rank_that_fell_hinders_no_lower_one():
    policy = LRU()
    chain(policy, 0, 0, lease=Lease(rank=80, rank_s=5))
    chain(policy, 0, 1, parent=0)  # while a child is there, a fall is not stored
    chain(policy, 6 * S, 0, lease=Lease(rank=50))
    policy.remove(ids(1))
    chain(policy, 7 * S, 2)
    assert policy.evict(8 * S, 1).tolist() == [2]


def test_invalid_blocks_of_a_tenant_are_expired_at_once(policy):
    chain(policy, 1, 0, 1, tenant=3)
    chain(policy, 0, 2)
    chain(policy, 1, 4, parent=1, tenant=5)
    policy.invalidate(2, 3)
    policy.invalidate(2, 99)
    assert policy.expired(2).tolist() == []  # a parent lives as long as its children
    policy.remove(ids(4))
    assert policy.expired(2).tolist() == [0, 1]
    assert policy.priority(1) < policy.priority(2)
    chain(policy, 3, 0, tenant=3)
    assert policy.expired(3).tolist() == [1]
    assert policy.evict(4, 3).tolist() == [1, 2, 0]


def test_an_insert_at_the_time_of_an_access_is_no_second_use():
    policy = LfuTtl(tau_s=100)
    for now in (0, 7 * S):
        policy.access(now, ids(0))
        chain(policy, now, 0)
        chain(policy, now, 0)
        chain(policy, now, 1)
    policy.access(8 * S, ids(1))
    assert policy.priority(0) < policy.priority(1)
    policy.access(8 * S, ids(0))
    assert policy.priority(0) == policy.priority(1)


def test_counts_outlive_eviction_until_forgotten():
    policy = LfuTtl(tau_s=100)
    for now in range(4):
        chain(policy, now * S, 0)
        policy.access(now * S, ids(0))
    policy.evict(4 * S, 1)
    chain(policy, 5 * S, 0)
    chain(policy, 6 * S, 1)
    assert policy.evict(7 * S, 2).tolist() == [1, 0]
    policy.forget(ids(0))
    chain(policy, 8 * S, 0)
    chain(policy, 9 * S, 1)
    assert policy.evict(10 * S, 1).tolist() == [0]
