"""The hedge: what it keeps beside the order, when it changes its mind, and that nothing is lost."""

from __future__ import annotations

import numpy as np
import pytest

from flowkv.policy import LRU, Hedge, Lease, Visit
from flowkv.sim import generate
from flowkv.testing import check_policy
from tests.inside import AWAY, BIRTHS, NEVER_NS, NO_VISIT, ROOM, worth_of
from tests.policy.hedge_reference import SlowHedge
from tests.sim.stories import run_through

S = 10**9


class Watched(Hedge):
    """Tells a slow hedge the same story, and compares after every call."""

    def __init__(self, **options):
        super().__init__(**options)
        self.slow = SlowHedge(self._watched[6][1:-1].tolist())
        self.turns = []

    def access(self, now_ns, slots, visit):
        copies = []

        def worth(s):  # of copies, made at the first question: a question must change nothing
            if not copies:
                copies.append(tuple(x.copy() for x in self._mind))
            return worth_of(copies[0], s, now_ns)

        super().access(now_ns, slots, visit)
        self.slow.access(now_ns, slots.tolist(), worth)
        self.compare()

    def insert(self, now_ns, slots, parents, **said):
        super().insert(now_ns, slots, parents, **said)
        self.slow.insert(now_ns, slots.tolist(), parents.tolist())
        self.compare()

    def evict(self, now_ns, n, protected=()):
        victims = super().evict(now_ns, n, protected)
        self.slow.evicted(victims.tolist(), len(self))
        self.compare()
        return victims

    def _turn(self, chosen):
        self.turns.append(chosen)
        super()._turn(chosen)

    def compare(self):
        slow, (_, book, _, shades, *_) = self.slow, self._watched
        assert self._active == slow.active
        assert book[ROOM] == slow.room
        assert set(self.resident()) == slow.here
        for k, shade in enumerate(shades):
            if k < self._learned or self._active < self._learned:
                assert set(np.flatnonzero(shade["place"] != AWAY).tolist()) == slow.held[k], k
        assert self.surplus == slow.surplus


@pytest.mark.parametrize(
    ("kind", "requests", "capacity", "turns"),
    [("scan", 1200, 60, [1]), ("rag", 250, 90, [2, 1]), ("chat", 200, 300, [2])],
)
def test_against_the_slow_one(kind, requests, capacity, turns):
    policy = Watched()
    run_through(generate(kind, requests=requests, seed=5), policy, capacity)
    assert policy.turns == turns


class Restless(Hedge):
    """Lets another rule decide after every few blocks, whatever they would hit."""

    def access(self, now_ns, slots, visit=NO_VISIT):
        super().access(now_ns, slots, visit)
        chosen = int(self._state[BIRTHS]) // 3 % (self._learned + 1)
        if chosen != self._active:
            self._turn(chosen)


def test_nothing_is_lost_when_another_rule_decides():
    check_policy(Restless, leases=("", "one_shot"), max_examples=60)


def test_every_turn_keeps_the_promises_of_the_order():
    """Pins, ranks and what is certain hold whoever decides, and victims come in its order."""
    for chosen in range(5):
        policy = Hedge(taus_s=(30.0, 120.0, 600.0))
        for i in range(6):
            policy.access(i * S, np.array([i]), Visit(request=i))
            policy.insert(
                i * S, np.array([i]), np.array([-1]), lease=Lease(rank=10 if i == 4 else 35)
            )
        policy.pin(np.array([0]))
        policy.enqueue(6 * S, 9, np.array([1]))
        policy.hint(6 * S, np.array([5]), NEVER_NS)
        if chosen:
            policy._turn(chosen)
        assert policy.evict(7 * S, 2).tolist() == [5, 4]
        assert sorted(policy.evict(7 * S, 2, protected=[]).tolist()) == [2, 3]
        assert policy.evict(7 * S, 2) is None
        assert policy.evict(7 * S, 1).tolist() == [1]
        policy.unpin(np.array([0]))
        assert policy.evict(7 * S, 1).tolist() == [0]
        assert len(policy.resident()) == 0


KINDS = [("bursts", 0.02), ("drift", 0.1), ("scan", 0.02), ("cyclic", 0.1), ("agents", 0.1)]


@pytest.mark.parametrize(("kind", "size"), KINDS)
def test_never_much_worse_than_lru(kind, size):
    trace = generate(kind, requests=1500, seed=3)
    capacity = int(size * trace.unique)
    policy = Hedge()
    hits, lru = (run_through(trace, p, capacity).sum() for p in (policy, LRU()))
    assert hits - lru >= -0.002 * len(trace.blocks)
    assert policy.surplus == pytest.approx(hits - lru, abs=0.002 * len(trace.blocks))


def test_a_cyclic_scan_hits():
    """LRU hits nothing in a circle that does not fit; whoever takes over hits a good part."""
    trace = generate("cyclic", requests=20_000)
    policy = Hedge()
    hits = run_through(trace, policy, int(0.3 * trace.unique)).sum()
    assert hits > 0.1 * len(trace.blocks)
    assert policy.chosen != "lru"


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
            cells, shades = policy._watched[0], policy._watched[3]
            assert (shades["place"][:, gone] == AWAY).all()
            assert (cells["birth"][gone] == 0).all()
        if r % 11 == 5:
            policy.remove(np.array([19]))
            assert policy._watched[3][-1]["place"][19] == AWAY
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
