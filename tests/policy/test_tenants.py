"""Tenants: prefetches and what was learned keep to quotas and owners."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from flowkv.policy import LRU, HazardIndex, Visit
from tests.inside import TOOL_USE, TURN_END, ConfigError, Quota, Tenants

S = 10**9
QUOTAS = {1: Quota(reserve_bytes=4), 2: Quota(limit_bytes=6)}


def chain(policy, now, tenant, first, n, request=-1):
    slots = np.arange(first, first + n)
    policy.access(now, slots[:0], Visit(request, blocks=n))
    policy.insert(now, slots, np.concatenate([[-1], slots[:-1]]), tenant=tenant)
    return slots


def filled(make=LRU):
    policy = Tenants(make, QUOTAS)
    chain(policy, 1 * S, 1, 0, 5, 7)
    chain(policy, 2 * S, 2, 10, 8)
    chain(policy, 3 * S, 3, 20, 3)
    return policy


def test_a_certain_prefetch_takes_limits_first_and_no_reserve():
    policy = filled()
    assert policy.displace(4 * S, 4, np.inf).tolist() == [17, 16, 4, 15]
    assert policy.displace(4 * S, 99, np.inf).tolist() == [14, 13, 12, 11, 10, 22, 21, 20]
    assert policy.used_bytes(1) == 4
    assert policy.displace(4 * S, 1, np.inf).tolist() == []


def test_a_likely_prefetch_takes_only_what_is_worth_less():
    policy = filled()
    assert policy.displace(4 * S, 4, 1e9).tolist() == [17, 16]  # above the limit; LRU knows no rate
    policy = filled(HazardIndex)
    digest = policy.digest()
    guarded = set(range(10, 18))
    assert policy.displace(4 * S, 9, 1e-9, guarded).tolist() == []
    assert policy.digest() == digest
    took = policy.displace(4 * S, 9, 1e9, guarded).tolist()
    assert sorted(took) == [4, 20, 21, 22]


def test_each_tenant_begins_with_what_it_learned_itself():
    quotas = {tenant: Quota(limit_bytes=1 << 40) for tenant in (0, 1)}
    teacher = Tenants(HazardIndex, quotas)
    for i in range(40):
        now, slots = 400 * S * i, np.array([4 * i, 4 * i + 1])
        tenant = i % 2  # what tenant 1 asks for is asked for again; what tenant 0 does, never
        chain(teacher, now, tenant, 4 * i, 2, 2 * i)
        teacher.complete(now, 2 * i, stop=TOOL_USE if tenant else TURN_END)
        if tenant:
            teacher.access(now + 3 * S, slots, Visit(2 * i + 1, blocks=2))
    saved = teacher.save_model()
    heir, strange = Tenants(HazardIndex, quotas), Tenants(LRU, quotas)
    heir.load_model(saved)
    strange.load_model(saved)  # learns nothing, and does not mind
    for tenant in (0, 1):
        chain(strange, 0, tenant, 10 * tenant, 1)
        chain(heir, 0, tenant, 10 * tenant, 1)
    assert heir.save_model() == saved
    models = msgspec.msgpack.decode(saved, type=dict[int, bytes])
    assert models[0] != models[1]
    assert msgspec.msgpack.decode(strange.save_model()) == {}
    with pytest.raises(ConfigError, match="no models of tenants"):
        heir.load_model(b"no model")


def test_a_forgotten_slot_leaves_nothing_behind():
    """Also where a policy heard of a block that it never held."""

    def order_after(told):
        place = Tenants(HazardIndex, {1: Quota(limit_bytes=1 << 40)})
        chain(place, 0, 1, 0, 2, 0)
        if told:
            place.access(S, np.array([0, 1, 7]), Visit(5, blocks=3, tenant=1))
            place.complete(S, 5, stop=TURN_END)
            place.forget(np.array([7]))
        else:
            place.access(S, np.array([0, 1]), Visit(5, blocks=3, tenant=1))
            place.complete(S, 5, stop=TURN_END)
        chain(place, 60 * S, 1, 7, 1, 6)
        return place.priority(7)

    assert order_after(True) == order_after(False)


def test_tenants_without_a_quota_share_one_policy():
    made = []

    def make():
        made.append(LRU())
        return made[-1]

    place = Tenants(make, {1: Quota(reserve_bytes=2)})
    for tenant in range(50):
        chain(place, tenant * S, tenant, 10 * tenant, 2)
    assert len(made) == 2
    assert place.used_bytes(1) == 2


def test_a_request_is_its_tenants_whoever_inserts_next():
    place = Tenants(LRU, {1: Quota(limit_bytes=9), 2: Quota(limit_bytes=9)})
    place.access(0, np.empty(0, np.int64), Visit(7, tenant=1))
    chain(place, 0, 2, 0, 2)
    assert place._requests == {7: 1}
    place.access(S, np.empty(0, np.int64), Visit(8))  # told by what it inserts, not by a check
    place.insert(S, np.empty(0, np.int64), np.empty(0, np.int64), tenant=2)
    place.insert(S, np.array([4]), np.array([-1]), tenant=1)
    assert place._requests == {7: 1, 8: 1}


def test_a_chain_that_is_queued_before_anybody_owns_it_stays():
    policy = Tenants(LRU)
    policy.enqueue(1 * S, 9, np.array([0, 1]))
    chain(policy, 2 * S, 1, 0, 2)
    chain(policy, 3 * S, 1, 5, 1)
    assert policy.evict(4 * S, 1).tolist() == [5], "newer, but nobody queues for it"
    policy.abort(5 * S, 9)
    chain(policy, 6 * S, 1, 5, 1)
    assert policy.evict(7 * S, 1).tolist() == [1]
