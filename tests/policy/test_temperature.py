"""Hot, warm and cold: shares, hysteresis, and what is chosen by them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowkv.policy import LfuTtl
from tests.inside import ConfigError, Heat, Shares, Temperature, make_ladder, shares_that_fit

S = 10**9


def ids(*values):
    return np.array(values, np.int64)


def felt(shares, margin, before, values):
    """The rules, one block at a time: how many are at least as good, and what it was."""
    n, out = len(values), []
    for old, value in zip(before, values, strict=True):
        better = sum(other > value for other in values)

        def within(share, inside, better=better):
            return better < round(n * (share + (margin if inside else -margin)))

        if within(shares.hot, old == 2):
            out.append(2)
        else:
            out.append(1 if within(shares.hot + shares.warm, old >= 1) else 0)
    return out


@given(
    st.lists(st.lists(st.integers(0, 30), min_size=12, max_size=12), min_size=1, max_size=6),
    st.sampled_from([(0.1, 0.3), (0.25, 0.25), (0.0, 0.5), (0.6, 0.4), (0.0, 0.0), (1.0, 0.0)]),
    st.sampled_from([0.0, 0.05, 0.1, 0.3]),
)
def test_equals_the_rules(days, shares, margin):
    temperature, heats = Temperature(Shares(*shares), margin), [0] * 12
    for values in days:
        heats = felt(Shares(*shares), margin, heats, values)
        priorities = np.array(values, float)
        temperature.gauge(priorities)
        assert temperature.feel(np.arange(12), priorities).tolist() == heats


def test_a_block_at_the_border_does_not_flicker():
    rng = np.random.default_rng(3)
    changes = {}
    for margin in (0.0, 0.1):
        temperature, slots = Temperature(Shares(0.2, 0.3), margin), np.arange(200)
        last, changes[margin] = None, 0
        for _ in range(50):
            priorities = slots + rng.normal(0, 8, 200)
            temperature.gauge(priorities)
            heats = temperature.feel(slots, priorities)
            changes[margin] += 0 if last is None else (heats != last).sum()
            last = heats
        assert abs((last == Heat.HOT).mean() - 0.2) <= margin + 0.01
    assert 0 < 5 * changes[0.1] < changes[0.0]


def test_by_the_order_of_a_policy():
    policy = LfuTtl(tau_s=60)
    slots = np.arange(10)
    policy.insert(0, slots, slots - 1)
    for t in range(1, 4):
        policy.access(t * S, slots[:3])
    policy.access(5 * S, slots[:5])
    temperature = Temperature(Shares(0.3, 0.2), 0.0)
    priorities = np.array([policy.priority(s) for s in slots])
    temperature.gauge(priorities)
    assert temperature.feel(slots, priorities).tolist() == [2] * 3 + [1] * 2 + [0] * 5
    temperature.forget(ids(0, 99))
    temperature.gauge(np.full(10, 1e300))
    assert temperature.feel(ids(0), np.array([-1e300])).tolist() == [Heat.COLD]


@given(
    st.integers(0, 100),
    st.integers(0, 5000),
    st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(0, 9)),
)
def test_shares_that_fit_do_and_are_the_least_cold(n, capacity, steps):
    cold, warm, hot = sizes = tuple(np.cumsum(steps).tolist())
    shares = shares_that_fit(n, capacity, sizes)
    hots, warms = round(n * shares.hot), round(n * shares.warm)
    colds = n - hots - warms
    assert min(hots, warms, colds) >= 0
    if n * cold <= capacity:
        assert hots * hot + warms * warm + colds * cold <= capacity
    assert not (hots and colds)
    if warms and hot > warm and not colds:
        assert (hots + 1) * hot + (warms - 1) * warm > capacity
    if colds and warm > cold:
        assert (warms + 1) * warm + (colds - 1) * cold > capacity


def test_tiers_and_codecs():
    assert [Temperature.tier(heat, 3) for heat in Heat] == [2, 1, 0]
    assert [Temperature.tier(heat, 2) for heat in Heat] == [1, 0, 0]
    assert [Temperature.tier(heat, 1) for heat in Heat] == [0, 0, 0]
    ladder = make_ladder("auto", 16, ("kv8", "kv4c"), recent_tokens=64, warm_tokens=64)
    raw, kv8, kv4c = ladder.codecs
    assert [Temperature.codec(heat, ladder.codecs) for heat in Heat] == [kv4c, kv8, raw]
    assert Temperature.codec(Heat.WARM, ladder.codecs) == ladder.idle  # what all idle ones have now


def test_errors():
    with pytest.raises(ConfigError, match="sum to 1"):
        Temperature(Shares(0.7, 0.4))
    with pytest.raises(ConfigError, match="ascending"):
        shares_that_fit(1, 1, (3, 2, 1))
