"""The hedge: that it knows what LRU would hit, when LRU decides, and that nothing is lost."""

from __future__ import annotations

import numpy as np
import pytest

from flowkv.policy import LRU, Hedge, Lease, Visit
from flowkv.sim import generate
from flowkv.testing import check_policy
from tests.inside import BIRTHS, NEVER_NS, NO_VISIT, STAKE
from tests.sim.stories import run_through

S = 10**9


KINDS = [("bursts", 0.02), ("drift", 0.1), ("scan", 0.02), ("cyclic", 0.1), ("agents", 0.1)]


class Restless(Hedge):
    """Lets the other rule decide after every few blocks, whatever it would hit."""

    def access(self, now_ns, slots, visit=NO_VISIT):
        super().access(now_ns, slots, visit)
        if int(self._state[BIRTHS]) % 7 < 3:
            self._turn(self.chosen == "lru")


@pytest.mark.parametrize("make", [Hedge, Restless])
@pytest.mark.parametrize(("kind", "size"), KINDS)
def test_what_lru_would_have_hit_is_known_exactly(make, kind, size):
    trace = generate(kind, requests=600, seed=3)
    policy, capacity = make(), int(size * trace.unique)
    hits, lru = (run_through(trace, p, capacity).sum() for p in (policy, LRU()))
    assert policy.surplus == hits - lru


def test_requests_at_one_time_are_served_in_their_order():
    """As if each came a nanosecond after the one before."""
    policies = [Hedge(), Hedge()]
    for policy, step in zip(policies, (0, 1), strict=True):
        rng = np.random.default_rng(0)
        for r in range(300):
            chain = 10 * int(rng.zipf(1.3) % 12) + np.arange(int(rng.integers(1, 10)))
            new = np.setdiff1d(chain, policy.resident())
            policy.access(r * step, chain, Visit(r))
            policy.insert(r * step, new, np.where(new % 10 == 0, -1, new - 1))
            policy.evict(r * step, max(len(policy) - 40, 0))
    assert policies[0].surplus == policies[1].surplus != 0
    assert policies[0].digest() == policies[1].digest()


def test_lru_decides_once_the_stake_is_lost_until_half_of_it_is_there_again():
    """40 blocks and a thousandth of all, that LRU would have had, were taken from the other."""
    policy, chain, chosen = Hedge(), np.arange(50), []
    for r in range(1000):
        policy.access(r * S, chain)
        policy.insert(r * S, chain, chain - 1)
        chosen.append(policy.chosen)
        if r == 3:
            policy.evict(r * S, 1)
            policy._left[0] = 50  # the ring keeps what was evicted: as if LRU had evicted nothing
            policy.evict(r * S, 45)
    lost = chosen.index("lru")
    assert lost == 4 and policy.surplus == -46
    back = chosen.index("hazard", lost)
    assert 50 * back <= (46 - 40 + 20) * 1000 < 50 * (back + 2)


def test_blocks_that_a_request_computes_are_asked_for():
    """Else the stake of a live cache, which knows none of them before, would be smaller."""
    books = list[list[int]]()
    for known in (0, 30, 50):
        policy = Hedge()
        policy.access(0, np.arange(known), Visit(0, blocks=50))
        books.append(policy._book[:5].tolist())
    assert books[0][3:] == books[1][3:] == books[2][3:] == [50, 0]


def test_nothing_is_lost_when_another_rule_decides():
    check_policy(Restless, leases=("", "one_shot"), max_examples=25)


def test_every_turn_keeps_the_promises_of_the_order():
    """Pins, ranks and what is certain hold whoever decides, and victims come in its order."""
    for learned in (None, False, True):
        policy = Hedge()
        for i in range(6):
            policy.access(i * S, np.array([i]), Visit(request=i))
            policy.insert(
                i * S, np.array([i]), np.array([-1]), lease=Lease(rank=10 if i == 4 else 35)
            )
        policy.pin(np.array([0]))
        policy.enqueue(6 * S, 9, np.array([1]))
        policy.hint(6 * S, np.array([5]), NEVER_NS)
        if learned is not None:
            policy._turn(learned)
        assert policy.evict(7 * S, 2).tolist() == [5, 4]
        assert sorted(policy.evict(7 * S, 2, protected=[]).tolist()) == [2, 3]
        assert policy.evict(7 * S, 2) is None
        assert policy.evict(7 * S, 1).tolist() == [1]
        policy.unpin(np.array([0]))
        assert policy.evict(7 * S, 1).tolist() == [0]
        assert len(policy.resident()) == 0


@pytest.mark.parametrize(("kind", "size"), KINDS)
def test_never_much_worse_than_lru(kind, size):
    trace = generate(kind, requests=1500, seed=3)
    capacity = int(size * trace.unique)
    policy = Hedge()
    hits, lru = (run_through(trace, p, capacity).sum() for p in (policy, LRU()))
    assert hits - lru >= -0.002 * len(trace.blocks) - STAKE


def test_a_cyclic_scan_hits():
    """LRU hits nothing in a circle that does not fit; the learned order hits a good part."""
    trace = generate("cyclic", requests=20_000)
    policy = Hedge()
    hits = run_through(trace, policy, int(0.3 * trace.unique)).sum()
    assert hits > 0.1 * len(trace.blocks)
    assert policy.chosen == "hazard"


def test_what_a_number_named_before_is_forgotten():
    """Numbers that name other blocks later leave no trace of what they were."""
    policy = Hedge()
    rng = np.random.default_rng(0)
    for r in range(200):
        chain = 10 * int(rng.integers(3)) + np.arange(10)
        new = np.setdiff1d(chain, policy.resident())
        policy.access(r * S, chain, Visit(r))
        policy.insert(r * S, new, np.where(new % 10 == 0, -1, new - 1))
        if r % 7 == 3:
            gone = policy.evict(r * S, 5)
            policy.forget(gone)
            assert not policy._ring["held"][gone].any()
        if r % 11 == 5:
            policy.remove(np.array([19]))
            assert not policy._ring["held"][19]
    assert policy.evict(10**12, len(policy)) is not None


def test_a_model_that_was_brought_decides_once_it_is_proved():
    """From the same kind of traffic: before there is evidence of hits. From another: never."""
    teachers = {kind: generate(kind, requests=2500, seed=3) for kind in ("agents", "chat")}
    models = {}
    for kind, trace in teachers.items():
        teacher = Hedge()
        run_through(trace, teacher, trace.unique // 100)
        models[kind] = teacher.save_model()
    trace = generate("agents", requests=300, seed=4)
    hits = {}
    for source in ("agents", "chat", None):
        policy = Hedge()
        if source is not None:
            policy.load_model(models[source])
        hits[source] = run_through(trace, policy, trace.unique // 20)
        assert policy.surplus >= 0
    assert hits["agents"].sum() > 1.01 * hits[None].sum()
    assert hits["chat"].sum() >= 0.995 * hits[None].sum()
