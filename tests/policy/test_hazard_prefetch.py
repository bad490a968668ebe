"""The learned order's answers to a prefetcher: asking changes nothing, no better block goes."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from flowkv.policy import HazardIndex, Visit
from flowkv.sim import Trace, generate
from tests.inside import NEVER_NS, TOOL_USE, TURN_END
from tests.policy.slots import ids

S = 1_000_000_000


class Place:
    """Chains of four blocks each: number 10 t + i, after a common block 0, in a place of 12."""

    def __init__(self) -> None:
        self.policy, self.here, self.request = HazardIndex(), set[int](), 0

    def chain(self, talk: int, length: int) -> list[int]:
        return [0, *(10 * talk + i for i in range(length))]

    def serve(self, now: int, talk: int, length: int, stop: int) -> None:
        chain = self.chain(talk, length)
        self.request += 1
        self.policy.access(now, ids(*chain), Visit(self.request, talk, 0, len(chain)))
        new = [s for s in chain if s not in self.here]
        parents = [-1 if s == 0 else 0 if s % 10 == 0 else s - 1 for s in new]
        self.policy.insert(now, ids(*new), ids(*parents))
        self.here |= set(new)
        self.policy.complete(now, self.request, stop=stop, output_tokens=10 * talk)
        if len(self.here) > 12:
            victims = self.policy.evict(now, len(self.here) - 12)
            assert victims is not None
            self.here -= set(victims.tolist())


TURNS = st.lists(
    st.tuples(
        st.sampled_from([S // 4, S, 5 * S, 40 * S]),
        st.integers(1, 6),
        st.integers(1, 4),
        st.sampled_from([TOOL_USE, TURN_END]),
    ),
    min_size=1,
    max_size=25,
)


@given(TURNS, st.integers(1, 9))
def test_asking_changes_nothing(turns: list[tuple[int, int, int, int]], n: int) -> None:
    asked, silent = Place(), Place()
    now = 0
    for gap, talk, length, stop in turns:
        for step in range(1, 4):
            asked.policy.wanted(now + gap * step // 4, n)
        now += gap
        for place in (asked, silent):
            place.serve(now, talk, length, stop)
        assert asked.here == silent.here and asked.policy.digest() == silent.policy.digest()


@given(TURNS, st.integers(0, 9))
def test_wanted_are_ends_of_absent_chains_best_first(
    turns: list[tuple[int, int, int, int]], n: int
) -> None:
    place, now, ends = Place(), 0, set[int]()
    for gap, talk, length, stop in turns:
        now += gap
        place.serve(now, talk, length, stop)
        ends.add(place.chain(talk, length)[-1])
        slots, rates = place.policy.wanted(now, n)
        found = slots.tolist()
        assert len(found) == len(rates) <= n and len(set(found)) == len(found)
        assert set(found) <= ends - place.here
        assert (np.diff(rates) <= 0).all() and (rates > 0).all()
        everything = place.policy.wanted(now, 99)
        assert found == everything[0].tolist()[:n]


@given(TURNS, st.integers(0, 12), st.sampled_from([0.0, 1e-3, 0.03, 0.1, 1.0, np.inf]))
def test_only_what_is_worth_less_goes_and_in_the_order_of_eviction(
    turns: list[tuple[int, int, int, int]], n: int, rate: float
) -> None:
    place, twin, now = Place(), Place(), 0
    for gap, talk, length, stop in turns:
        now += gap
        for one in (place, twin):
            one.serve(now, talk, length, stop)
    protected = sorted(place.here)[:2]
    gone = place.policy.displace(now, n, rate, protected).tolist()
    assert len(gone) <= n and not set(gone) & set(protected)
    for slot in gone:
        assert twin.policy.priority(slot) < rate
        victims = twin.policy.evict(now, 1, protected)
        assert victims is not None and victims.tolist() == [slot]
    if len(gone) < n:
        victims = twin.policy.evict(now, 1, protected)
        assert victims is None or twin_worth(twin, place, int(victims[0])) >= rate


def twin_worth(twin: Place, place: Place, slot: int) -> float:
    """What a slot was worth that the twin has just given up and the other one has not."""
    assert slot not in twin.policy.resident()
    return place.policy.priority(slot)


def test_what_never_comes_back_is_not_wanted_and_what_is_queued_does_not_go() -> None:
    place = Place()
    for talk in range(1, 7):
        place.serve(talk * S, talk, 4, TOOL_USE)
    gone = next(talk for talk in range(1, 7) if 10 * talk + 3 not in place.here)
    chain = ids(*place.chain(gone, 4))
    place.policy.hint(8 * S, chain, S // 2)
    slots, rates = place.policy.wanted(8 * S, 99)
    assert slots[0] == chain[-1] and rates[0] == pytest.approx(2.0, rel=0.5)
    place.policy.hint(8 * S, chain, NEVER_NS)
    assert chain[-1] not in place.policy.wanted(8 * S, 99)[0]
    place.policy.enqueue(8 * S, 99, ids(*sorted(place.here)))
    assert len(place.policy.displace(8 * S, 5, np.inf)) == 0


def test_on_a_trace_asking_changes_nothing() -> None:
    trace = generate("agents", requests=600, seed=0)
    assert serve_all(trace, asks=0) == serve_all(trace, asks=3)


def serve_all(trace: Trace, asks: int) -> int:
    policy, capacity = HazardIndex(), trace.unique // 50
    here, last = np.zeros(trace.unique, np.bool_), 0
    for r, now in enumerate(trace.times_ns.tolist()):
        for i in range(asks):
            policy.wanted(last + (now - last) * (i + 1) // (asks + 1), 8)
        last = now
        chain = trace.blocks[trace.offsets[r] : trace.offsets[r + 1]]
        policy.access(now, chain, Visit(r, -1, 0, len(chain)))
        new = chain[~here[chain]]
        policy.insert(now, new, trace.parents[new])
        here[new] = True
        policy.complete(now, r, stop=int(trace.stops[r]))
        surplus = int(here.sum()) - capacity
        if surplus > 0:
            victims = policy.evict(now, surplus)
            assert victims is not None
            here[victims] = False
    return policy.digest()


def test_nothing_is_asked_of_an_empty_place() -> None:
    policy = HazardIndex()
    assert len(policy.wanted(0, 5)[0]) == 0 and len(policy.displace(0, 5, 1.0)) == 0
    assert policy.wanted(0, 0)[1].tolist() == pytest.approx([])
