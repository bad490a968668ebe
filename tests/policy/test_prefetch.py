"""The prefetcher's decisions: against its reference, and its invariants, over a small shop."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from flowkv.policy.prefetch import Fetch, Prefetcher
from tests.inside import (
    HINT,
    LEARNED,
    NEVER_NS,
    NO_SLOTS,
    QUEUE,
    ConfigError,
    Hint,
    Rates,
    RegretGuard,
)
from tests.policy.prefetch_reference import S, Shop, SlowPrefetcher
from tests.policy.slots import ids

PARENTS = [-1, 0, 1, 2, 1, 4, -1, 6, 7, 7]
TIPS = [3, 5, 8, 9, 2, 0]
OPTIONS: dict[str, Any] = {"horizon_s": 20.0, "probe_share": 0.5, "floor": 0.5, "candidates": 3}


def patient() -> RegretGuard:
    """Never stops anything."""
    return RegretGuard(trial_bytes=1 << 40)


class Drive:
    """Both prefetchers over one shop each, that knows all blocks and holds none.

    All that they plan is carried out and compared.
    """

    def __init__(self, capacity: int, **options: Any) -> None:
        self.shops = Shop(PARENTS, capacity), Shop(PARENTS, capacity)
        for shop in self.shops:
            shop.known |= set(range(len(PARENTS)))
        options = OPTIONS | options
        self.fast = Prefetcher(capacity, guard=patient(), **options)
        self.slow = SlowPrefetcher(capacity, **options)
        self.now, self.flying = 0, list[int]()
        self.fetches = list[Fetch]()

    def both(self, call: Callable[[Shop], Any]) -> None:
        first, second = (call(shop) for shop in self.shops)
        assert first == second

    def serve(self, tip: int, request: int) -> None:
        shop = self.shops[0]
        chain = shop.way(tip)
        hits = next((i for i, s in enumerate(chain) if s not in shop.place), len(chain))
        demanded = len([s for s in chain if s in shop.known and s not in shop.place])
        self.fast.accessed(self.now, ids(*chain), hits, demanded, request)
        self.slow.accessed(self.now, chain, hits, demanded, request)
        came = [s for s in chain if s in self.flying]
        self.land(came)
        for one in self.shops:
            one.access(self.now, ids(*chain))
            one.insert(self.now, ids(*chain), ids(*(PARENTS[s] for s in chain)))
        self.make_room()

    def make_room(self) -> None:
        over = -self.shops[0].room_bytes()
        if over > 0:
            gone = [shop.displace(self.now, over, math.inf).tolist() for shop in self.shops]
            assert gone[0] == gone[1] and len(gone[0]) == over
            for shop in self.shops:
                shop.place -= set(gone[0])
            self.fast.left(self.now, ids(*gone[0]))
            self.slow.left(self.now, gone[0])

    def enqueue(self, request: int, slots: list[int]) -> None:
        self.fast.enqueue(self.now, request, ids(*slots))
        self.slow.enqueue(self.now, request, slots)

    def hint(self, slots: list[int], eta_ns: int, sigma: float) -> None:
        self.fast.hint(self.now, ids(*slots), eta_ns, sigma)
        self.slow.hint(self.now, slots, eta_ns, sigma)

    def clear(self) -> None:
        """Empties the place."""
        for shop in self.shops:
            shop.place.clear()
            shop.here.clear()
        self.fast.left(self.now, np.arange(len(PARENTS)))
        self.slow.left(self.now, list(range(len(PARENTS))))

    def land(self, slots: list[int]) -> None:
        self.flying = [s for s in self.flying if s not in slots]
        self.fast.landed(self.now, ids(*slots))
        self.slow.landed_now(self.now, slots)
        for shop in self.shops:
            shop.insert(self.now, ids(*slots), ids(*(PARENTS[s] for s in slots)))

    def fail(self) -> None:
        gone, self.flying = self.flying, []
        self.fast.failed(self.now, ids(*gone))
        self.slow.failed(self.now, gone)
        for shop in self.shops:
            shop.place -= set(gone)

    def plan(self, at_once: bool) -> None:
        shop, other = self.shops
        slowly = self.slow.plan(self.now, other)
        for fetch in self.fast.plan(self.now, shop, shop):
            self.check(fetch)
            assert next(slowly) == (fetch.kind, fetch.slots.tolist(), fetch.victims.tolist())
            for one in self.shops:
                one.place -= set(fetch.victims.tolist())
                one.place |= set(fetch.slots.tolist())  # its room is taken from now on
            self.fetches.append(fetch)
            self.flying += fetch.slots.tolist()
            if at_once:
                self.land(fetch.slots.tolist())
        assert next(slowly, None) is None

    def check(self, fetch: Fetch) -> None:
        """From the source only, parents first, within budget, at the cost of what is worth less."""
        shop, slots, victims = self.shops[0], fetch.slots.tolist(), fetch.victims.tolist()
        assert len(slots) + len(victims) > 0 and len(set(slots)) == len(slots)
        for i, slot in enumerate(slots):
            assert slot in shop.known and slot not in shop.here and slot not in self.flying
            assert PARENTS[slot] in (-1, *slots[:i]) or PARENTS[slot] in shop.place
        assert len(shop.place) - len(victims) + len(slots) <= shop.capacity_bytes
        if fetch.kind != QUEUE:
            assert all(shop.rates[v] * 1.2 < fetch.rate * (1 + 1e-12) for v in victims)
        for victim in victims:
            assert not {victim} & {above for s in slots for above in shop.way(s)}

    def compare(self) -> None:
        assert sum(self.fast.used_bytes) == self.slow.used
        assert sum(self.fast.wasted_bytes) == self.slow.wasted
        assert self.fast.displaced_bytes == self.slow.displaced
        assert self.fast.unproven_bytes == len(self.slow.landed) + len(self.slow.flying)
        assert sum(self.fast.fetched_bytes) == sum(len(f.slots) for f in self.fetches)
        for budget, bytes_left in self.slow.budget.items():
            assert self.fast.credit.budgets[budget] == pytest.approx(bytes_left)
        assert self.fast.credit.probes == pytest.approx(self.slow.probes)


TIP, REQUEST = st.sampled_from(TIPS), st.integers(0, 3)
RATE = st.sampled_from([0.0, 0.1, 0.3, 0.31, 1.0, 4.0])
EVENTS = st.one_of(
    st.tuples(st.just("serve"), TIP, REQUEST),
    st.tuples(st.just("serve"), TIP, REQUEST),
    st.tuples(st.just("plan"), st.booleans()),
    st.tuples(st.just("plan"), st.just(True)),
    st.tuples(st.just("pass"), st.sampled_from([S // 2, S, 3 * S, 25 * S])),
    st.tuples(st.just("rate"), st.integers(0, len(PARENTS) - 1), RATE),
    st.tuples(st.just("rate"), st.integers(0, len(PARENTS) - 1), RATE),
    st.tuples(st.just("enqueue"), TIP, REQUEST),
    st.tuples(st.just("abort"), REQUEST),
    st.tuples(st.just("hint"), TIP, st.sampled_from([0, S, 4 * S, 9 * S, NEVER_NS])),
    st.tuples(st.just("fail")),
)
LIMITS = st.fixed_dictionaries(
    {
        "early": st.sampled_from([0.0, 3.0]),
        "slack_s": st.sampled_from([0.05, 1.0]),
        "burst_s": st.just(3.0),
    },
    optional={
        "bytes_per_s": st.sampled_from([0.5, 2.0]),
        "unproven": st.sampled_from([0.3, 1.0]),
        "flying_bytes": st.just(2.0),
        "probe_share": st.sampled_from([0.0, 1.0]),
    },
)


def run(events: list[tuple], capacity: int, limits: dict[str, Any]) -> Drive:
    drive = Drive(capacity, **limits)
    for event in events:
        match event:
            case "serve", tip, request:
                drive.serve(tip, request)
            case "plan", at_once:
                drive.plan(at_once)
            case "pass", ns:
                drive.now += ns
            case "rate", slot, rate:
                for shop in drive.shops:
                    shop.rates[slot] = rate
            case "enqueue", tip, request:
                drive.enqueue(request, drive.shops[0].way(tip))
            case "abort", request:
                drive.fast.abort(drive.now, request)
                drive.slow.abort(drive.now, request)
            case "hint", tip, eta:
                drive.hint(drive.shops[0].way(tip), eta, 0.5)
            case _:
                drive.fail()
        drive.compare()
    return drive


STORIES = st.lists(EVENTS, min_size=20, max_size=60)
"""Long enough: in shorter ones hardly anything is brought."""


def test_it_decides_what_its_reference_decides() -> None:
    brought = set[int]()

    @settings(max_examples=120)
    @given(STORIES, st.integers(4, 7), LIMITS)
    def tell(events: list[tuple], capacity: int, limits: dict[str, Any]) -> None:
        brought.update(fetch.kind for fetch in run(events, capacity, limits).fetches)

    tell()
    assert brought == {QUEUE, HINT, LEARNED}, "stories that bring nothing compare nothing"


@pytest.mark.deep
@settings(max_examples=10_000)
@given(st.lists(EVENTS, min_size=20, max_size=150), st.integers(4, 12), LIMITS)
def test_it_decides_what_its_reference_decides_at_length(
    events: list[tuple], capacity: int, limits: dict[str, Any]
) -> None:
    run(events, capacity, limits)


@given(STORIES)
def test_equal_events_give_equal_digests(events: list[tuple]) -> None:
    first, second = run(events, 5, {}), run(events, 5, {})
    assert first.fast.digest() == second.fast.digest()
    fetches = [(f.slots.tolist(), f.victims.tolist()) for f in first.fetches]
    assert (first.fast.digest() == 0) == (not fetches)


def test_learned_prefetches_that_are_never_used_cost_a_share_of_the_demand_at_most() -> None:
    drive, demanded = Drive(8, probe_share=0.25, unproven=1.0), 0
    for shop in drive.shops:
        shop.rates[8] = 4.0
    for turn in range(200):
        drive.now += S
        before = drive.slow.probes
        drive.plan(True)
        demanded += 4
        drive.serve([3, 5][turn % 2], 0)
        assert drive.slow.probes <= before + 1
        drive.clear()
    brought = drive.fast.fetched_bytes[LEARNED]
    assert 0 < brought <= 0.25 * demanded and drive.fast.precision(LEARNED) == 0.0


def test_a_slow_place_below_is_asked_earlier() -> None:
    rates = Rates()
    for _ in range(9):
        rates.add(1, 5.0)
    prefetcher = Prefetcher(8, rates=rates, guard=patient(), slack_s=1e-3)
    shop = Shop(PARENTS, 8)
    shop.known |= {0, 1}
    prefetcher.hint(0, ids(0), 0)
    for fetch in prefetcher.plan(0, shop, shop):  # so that it knows what a block weighs
        prefetcher.landed(0, fetch.slots)
        shop.insert(0, fetch.slots, NO_SLOTS)
    prefetcher.hint(0, ids(0, 1), 100 * S, 1e-9)
    start = 100 * S - round((1e-3 + 2 * 5.0) * 1e9)
    assert prefetcher.due_ns(start - S // 2) <= start
    assert not list(prefetcher.plan(start - S, shop, shop))
    assert [f.slots.tolist() for f in prefetcher.plan(start + S, shop, shop)] == [[1]]


def test_the_guard_stops_everything() -> None:
    guard = RegretGuard(trial_bytes=1, rest_s=10.0)
    prefetcher, shop = Prefetcher(8, guard=guard), Shop(PARENTS, 8)
    shop.known |= {0}
    prefetcher.enqueue(0, 1, ids(0))
    guard.wasted(0, 10)
    assert not list(prefetcher.plan(0, shop, shop))
    assert len(list(prefetcher.plan(10 * S, shop, shop))) == 1


def test_what_a_markov_chain_expects_comes_until_its_slot_names_another_block() -> None:
    options = {"learned": "markov", "probe_share": 1.0, "floor": 0.5, "margin": 0.0}
    prefetcher, shop = Prefetcher(4, guard=patient(), **options), Shop([-1] * 9, 4)
    shop.known |= set(range(9))
    for turn in range(40):
        now, slot = turn * S, turn % 3
        prefetcher.accessed(now, ids(slot), 0, 4)
        assert prefetcher.due_ns(now) == now + 1, "a use changes what is expected"
        for fetch in prefetcher.plan(now, shop, shop):
            assert fetch.kind == LEARNED and fetch.rate < 1.0 + 1 / 4 + 1e-9
            assert set(fetch.slots.tolist()) <= {0, 1, 2}
            prefetcher.failed(now, fetch.slots)
        assert prefetcher.due_ns(now) > now + 1
    assert prefetcher.fetched_bytes[LEARNED] > 3
    prefetcher.forget(ids(0, 1, 2))
    prefetcher.accessed(40 * S, ids(0), 0, 4)
    brought = [fetch.slots.tolist() for fetch in prefetcher.plan(40 * S, shop, shop)]
    assert not {1, 2} & {slot for slots in brought for slot in slots}, "these are other blocks now"


@pytest.mark.parametrize("sigma", [0.2, 0.5, 1.0])
@pytest.mark.parametrize("passed", [0.05, 0.5, 1.0, 3.0])
def test_the_rate_of_a_hint_is_that_of_a_lognormal_time(sigma: float, passed: float) -> None:
    draws = np.exp(sigma * np.random.default_rng(0).normal(size=2_000_000))
    later = draws[draws > passed]
    if len(later) > 1000:
        expected = 1.0 / (later - passed).mean()
        assert Hint(0, S, sigma).rate(round(passed * S)) == pytest.approx(expected, rel=0.05)
    assert Hint(0, S, sigma).rate(10**6 * S) > 0


def test_it_says_how_right_it_was_and_refuses_what_is_no_option() -> None:
    prefetcher = Prefetcher(1000)
    assert prefetcher.precision(LEARNED) == 1.0
    prefetcher.used_bytes[LEARNED], prefetcher.wasted_bytes[LEARNED] = 200, 100
    assert prefetcher.precision(LEARNED) == pytest.approx(2 / 3)
    with pytest.raises(ConfigError, match="margin"):
        Prefetcher(8, margin=-1)
    assert "0 bytes brought" in repr(prefetcher)
