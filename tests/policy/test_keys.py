"""The one integer that stands for a decayed access count."""

from __future__ import annotations

import itertools
import random
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flowkv.policy import LRU, LfuTtl
from tests.inside import aged, softplus2
from tests.policy.reference import EXACT, key_after
from tests.policy.slots import ids

S = 10**9
TAU = 30 * S


def count(times, now, tau=TAU):
    """Sum of 2^-((now - t) / tau), to 60 digits."""
    return sum(EXACT.power(2, EXACT.divide(Decimal(t - now), Decimal(tau))) for t in times)


@given(st.floats(0, 70))
@example(0.0)
@example(61.99999)
@example(0.5)
@example(1e-300)
def test_softplus(y):
    exact = EXACT.divide(EXACT.ln(1 + EXACT.power(2, -Decimal(y))), EXACT.ln(Decimal(2)))
    assert abs(Decimal(softplus2(y)) - exact) <= exact * Decimal(2**-51) + Decimal(2**-61)


@given(
    key=st.integers(-(10**18), 10**18),
    dt=st.integers(-(10**14), 10**14),
    tau=st.sampled_from([0, 1, 999, S, TAU, 3600 * S]),
)
@example(key=0, dt=3, tau=S)  # half-way between two integers but for 1e-9 of a nanosecond
def test_an_access_is_the_exact_rule_rounded(key, dt, tau):
    far = abs(aged(key, key + dt, tau) - key_after(key, key + dt, tau))
    assert far <= Decimal("0.5") + Decimal(tau) * Decimal(2**-51)


@given(
    histories=st.lists(
        st.lists(st.integers(0, 300 * S), min_size=1, max_size=8).map(sorted),
        min_size=2,
        max_size=5,
    ),
    later=st.integers(300 * S, 3000 * S),
)
def test_order_by_key_is_order_by_count_at_any_later_time(histories, later):
    policy = LfuTtl(tau_s=30)
    events = sorted((t, s, i) for s, ts in enumerate(histories) for i, t in enumerate(ts))
    for t, s, i in events:
        if i == 0:
            policy.insert(t, ids(s), ids(-1))
        else:
            policy.access(t, ids(s))
    for now in (300 * S, later):
        counts = [count(ts, now) for ts in histories]
        for a, b in itertools.permutations(range(len(histories)), 2):
            if counts[a] > counts[b] * (1 + Decimal(10) ** -8):
                assert policy.priority(a) > policy.priority(b)
    victims = policy.evict(later, len(histories)).tolist()
    counts = [count(histories[s], later) for s in victims]
    for first, second in itertools.pairwise(counts):
        assert first <= second * (1 + Decimal(10) ** -8)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=12).map(sorted))
def test_whole_half_lives_are_exact(times):
    """Accesses at multiples of tau: the count is dyadic, and so many doublings are so many tau."""
    policy = LfuTtl(tau_s=30)
    policy.insert(times[0] * TAU, ids(0), ids(-1))
    for t in times[1:]:
        policy.access(t * TAU, ids(0))
    weight = sum(1 << t for t in times)  # 2^(K / tau)
    if weight & (weight - 1) == 0:
        assert abs(policy.priority(0) - (weight.bit_length() - 1) * TAU) <= len(times)
    assert policy.priority(0) == pytest.approx(float(np.log2(weight)) * TAU, rel=1e-12, abs=10)


chains = st.lists(
    st.tuples(st.integers(1, 5), st.lists(st.integers(0, 2), min_size=1, max_size=4)),
    min_size=1,
    max_size=25,
)


def story(policy, requests, capacity):
    """Replays paths in a tree of three children a node; yields what is given up and what stays."""
    names: dict[tuple[int, ...], int] = {}
    here: set[int] = set()
    now = 0
    for dt, word in requests:
        now += dt * S
        path = [names.setdefault(tuple(word[: i + 1]), len(names)) for i in range(len(word))]
        old = [s for s in path if s in here]
        policy.access(now, ids(*old))
        new = path[len(old) :]
        victims = policy.evict(now, max(0, len(here) + len(new) - capacity), path).tolist()
        policy.insert(now, ids(*new), ids(*[-1, *path][len(old) : len(path)]))
        here = (here - set(victims)) | set(new)
        yield victims, frozenset(here)


@given(chains, st.integers(4, 12))
def test_tau_to_zero_is_leaf_lru(requests, capacity):
    lru = list(story(LRU(), requests, capacity))
    assert list(story(LfuTtl(tau_s=0.0), requests, capacity)) == lru
    assert list(story(LfuTtl(tau_s=0.015), requests, capacity)) == lru  # 1 s is 66 half-lives


@given(chains, st.integers(4, 12), st.integers(1, 4))
def test_lru_inclusion(requests, capacity, more):
    """A larger cache holds whatever a smaller one holds, at all times."""
    small, large = (story(LRU(), requests, c) for c in (capacity, capacity + more))
    for (_, few), (_, many) in zip(small, large, strict=True):
        assert few <= many


@given(chains, st.sampled_from([LRU, LfuTtl]))
def test_equal_stories_have_equal_digests(requests, make):
    one, two, other = make(), make(), make()
    assert list(story(one, requests, 5)) == list(story(two, requests, 5))
    assert one.digest() == two.digest()
    list(story(other, requests, 5))
    other.evict(0, 1)
    assert other.digest() != one.digest()


@given(chains, st.integers(0, 8), st.sets(st.integers(0, 20)), st.sampled_from([LRU, LfuTtl]))
def test_n_at_once_are_n_one_by_one(requests, n, protected, make):
    one, two = make(), make()
    for policy in (one, two):
        list(story(policy, requests, 99))
    at_once = one.evict(0, n, protected)
    if at_once is not None:
        assert at_once.tolist() == [two.evict(0, 1, protected)[0] for _ in range(n)]


def test_digest_is_the_same_on_every_machine():
    """Golden: nothing but integers and correctly rounded operations leads to a decision."""
    bits = random.Random(7).getrandbits
    words = [(1 + bits(6), [bits(2) % 3 for _ in range(5)]) for _ in range(400)]
    digests = []
    for policy in (LRU(), LfuTtl(tau_s=77.7)):
        list(story(policy, words, 40))
        digests.append(policy.digest())
    assert [hex(d) for d in digests] == ["0xaa78d0c78a3db329", "0x616a1b495f49b6df"]
