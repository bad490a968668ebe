"""The compiled learned order equals the slow rules, decision by decision, to the last bit."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from flowkv.policy import HazardIndex, Visit
from tests.policy.hazard_reference import SlowHazard
from tests.policy.slots import ids

S = 10**9
FOREST = [-1, 0, 1, 2, 3, 2, 5, 1, 7, 0, 9, 10, -1, 12, 13, 13]  # parents
NODES = st.integers(0, len(FOREST) - 1)
STEPS = st.sampled_from([0, 1, S // 3, S, 2 * S, 4 * S, 9 * S, 40 * S, 900 * S, 10**14, -S])
TIMES = st.tuples(STEPS, st.booleans())  # until a call, and whether the fast one is asked before
CALLS = st.one_of(
    st.tuples(st.just("request"), TIMES, NODES, st.integers(0, 3), st.integers(0, 900)),
    st.tuples(st.just("pages"), TIMES, NODES, st.booleans()),
    st.tuples(st.just("evict"), TIMES, st.integers(0, 5), st.lists(NODES, max_size=2)),
    st.tuples(st.just("hint"), TIMES, NODES, st.integers(1, 90), st.floats(0.1, 2)),
    st.tuples(st.just("remove"), NODES, st.booleans()),
    st.tuples(st.just("pin"), NODES, st.integers(-1, 1)),
)
RETURNING = [  # blocks come back after a pause in which others taught the model
    ("request", (S, False), 8, 0, 0),
    ("request", (S // 3, False), 15, 0, 455),
    ("evict", (0, False), 4, []),
    ("pages", (900 * S, False), 7, False),
]
APART = [  # the last block of the latest request is forgotten, then another chain's blocks arrive
    *(("request", (0, False), 15, 3, 0), ("evict", (0, False), 2, [])),
    *(("request", (0, False), 14, 3, 0), ("remove", 14, True), ("pages", (0, False), 8, False)),
    *(("pages", (0, False), 4, False), ("evict", (0, False), 2, [])),
    *(("evict", (0, False), 2, [15, 3]), ("request", (9 * S, False), 7, 1, 0)),
    ("evict", (9 * S, False), 3, []),
]

TAKEN = [  # what a chain has left here becomes another chain's, then its own end comes back
    *(("request", (0, False), 11, 3, 0), ("pages", (0, False), 7, False)),
    *(("evict", (0, False), 3, [6, 3]), ("hint", (0, False), 7, 52, 1.5)),
    *(("request", (0, False), 3, 3, 0), ("pages", (0, False), 7, False)),
    ("hint", (0, False), 7, 24, 0.4),
]


def chain_to(node):
    path = []
    while node >= 0:
        path.insert(0, node)
        node = FOREST[node]
    return path


class Pair:
    """Both, told the same. `known`: whether parents are told."""

    def __init__(self, known, announced):
        self.fast, self.slow = HazardIndex(), SlowHazard()
        self.known, self.announced, self.now, self.requests = known, announced, 0, 0

    def wait(self, dt, asked):
        """Questions change nothing that is known later: the slow one gets none."""
        if asked and dt > 0:
            self.fast.expired(self.now + dt // 2)
        self.now += dt

    def insert(self, slots):
        parents = [FOREST[s] if self.known else -1 for s in slots]
        self.fast.insert(self.now, ids(*slots), ids(*parents))
        self.slow.insert(self.now, slots, parents)

    def request(self, time, end, stop, output):
        """As a driver with an index of its own: it names what it knows, and inserts the rest."""
        self.wait(*time)
        path, r = chain_to(end), self.requests
        self.requests += 1
        n = next((i for i, s in enumerate(path) if s not in self.slow.owner), len(path))
        visit = Visit(r, blocks=len(path) if self.announced else 0)
        self.fast.access(self.now, ids(*path[:n]), visit)
        self.slow.access(self.now, path[:n], visit)
        self.insert([s for s in path if s not in self.slow.here])
        if output:
            self.now += S
            self.fast.complete(self.now, r, stop=stop, output_tokens=output)
            self.slow.complete(self.now, r, stop, output)

    def pages(self, time, end, one_by_one):
        """Blocks arrive with no request: a prefetch, or pages filled while an answer is written."""
        self.wait(*time)
        slots = [s for s in chain_to(end) if s not in self.slow.here]
        for part in [[s] for s in slots] if slots and one_by_one else [slots]:
            self.insert(part)

    def evict(self, time, n, protected):
        self.wait(*time)
        got = self.fast.evict(self.now, n, protected)
        assert (None if got is None else got.tolist()) == self.slow.evict(self.now, n, protected)

    def hint(self, time, end, eta, sigma):
        self.wait(*time)
        self.fast.hint(self.now, ids(*chain_to(end)), eta * S, sigma)
        self.slow.hint(self.now, chain_to(end), eta * S, sigma)

    def remove(self, slot, forget):
        for call in ("remove", "forget") if forget else ("remove",):
            getattr(self.fast, call)(ids(slot))
            getattr(self.slow, call)([slot])

    def pin(self, slot, by):
        (self.fast.pin if by > 0 else self.fast.unpin)(ids(slot))
        self.slow.pins[slot] = max(self.slow.pins[slot] + (1 if by > 0 else -1), 0)

    def check(self):
        assert set(self.fast.resident()) == set(self.slow.here)
        for s in self.slow.here:
            if self.slow.leaf(s):
                assert self.fast.priority(s) == self.slow.keys[s]


@pytest.mark.parametrize(("known", "announced"), [(True, True), (False, True), (True, False)])
def test_equals_the_slow_rules(known, announced):
    @settings(
        max_examples=12,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],  # a story is short; shrinking it takes minutes
        suppress_health_check=list(HealthCheck),
    )
    @example(RETURNING)
    @example(APART)
    @example(TAKEN)
    @given(st.lists(CALLS, min_size=20, max_size=45))
    def tell(story):
        pair = Pair(known, announced)
        for name, *said in story:
            getattr(pair, name)(*said)
            pair.check()

    tell()
