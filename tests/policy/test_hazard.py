"""The learned order: what its model may and may not do, what it keeps, and what it learns."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowkv.policy import HazardIndex, Lease, Policy, Visit, make_policy
from tests.inside import (
    BASE_LIMIT,
    BASES,
    BINS,
    BUCKETS,
    EDGES_NS,
    FEATURES,
    MOST_INDEX,
    NEVER_NS,
    REACH,
    SIZES,
    STARTS,
    TIP,
    TIPS,
    TOOL_USE,
    TRAITS,
    TURN_END,
    WEIGHT_LIMIT,
    ConfigError,
    beyond,
    bin_of,
    decay,
    fresh_model,
    hazard,
    hinted_index,
    index,
    is_model,
    key_of,
    logistic,
    teach,
    value_of,
)
from tests.inside import compiled_describe as describe
from tests.policy.slots import ids

S = 10**9
whole = st.integers(-(1 << 31), (1 << 31) - 1)
anything = st.floats(allow_nan=True, allow_infinity=True)
few = settings(max_examples=25, deadline=None, derandomize=True, database=None)


# ---- the arithmetic


@given(anything)
@few
def test_a_hazard_is_a_probability_whatever_the_weights_say(x):
    assert 0.0 < logistic(x) < 1.0
    if abs(x) < 17:
        assert logistic(x) == pytest.approx(1 / (1 + math.exp(-x)), rel=1e-9)


@given(st.floats(0, 1e6))
@few
def test_decay(x):
    assert decay(x) == pytest.approx(math.exp(-x) if x < 40 else 0.0, rel=1e-9, abs=1e-17)


@given(st.floats(-6, 6))
@few
def test_tail_of_the_normal_distribution(z):
    assert beyond(z) == pytest.approx(0.5 * math.erfc(z / math.sqrt(2)), abs=2e-7)


@given(st.lists(st.one_of(whole, st.integers(0, 40)), min_size=4, max_size=4), anything, anything)
@few
def test_every_history_has_one_bucket_per_feature(counts, pace, spread):
    tips, traits = np.zeros(1, TIP), np.full((1, TRAITS), pace)
    tips["blocks"], tips["known"], tips["turn"], tips["output"] = counts
    tips["blocks"], tips["known"] = abs(tips["blocks"]), abs(tips["known"])
    tips["turn"] = abs(tips["turn"])
    tips["stop"], traits[0, 2] = counts[0] & 127, spread
    rows = np.zeros((1, FEATURES), np.int32)
    describe(tips, traits, rows, 0)
    inside = (rows[0] >= STARTS) & (rows[0] < STARTS + np.array(list(SIZES.values())))
    assert inside.all(), rows


@given(st.integers(0, 1 << 62))
@few
def test_bins(age):
    b = bin_of(age)
    assert EDGES_NS[b] <= age and (b == BINS - 1 or age < EDGES_NS[b + 1])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, BINS - 1), st.integers(0, 1))))
@few
def test_learning_stays_within_bounds_and_finite(events):
    rng = np.random.default_rng(0)
    rows = (STARTS + rng.integers(0, 1 << 20, (4, FEATURES)) % list(SIZES.values())).astype("i4")
    models = fresh_model()
    models[0, :BASES:2] = rng.choice([-WEIGHT_LIMIT, 0, WEIGHT_LIMIT], BUCKETS * 9)
    models[0, BASES:REACH:2] = rng.choice([-BASE_LIMIT, 0, BASE_LIMIT], BINS)
    for row, i, returned in events * 20:
        teach(models, rows[row], i, returned)
        assert 0.0 < hazard(models[0], rows[row], i) < 1.0
        assert 0.0 <= index(models, rows[row], i) <= MOST_INDEX
    assert is_model(models)


def test_learning_finds_the_rate():
    rng = np.random.default_rng(1)
    models, row = fresh_model(), STARTS.astype("i4")
    for _ in range(3000):
        teach(models, row, 7, int(rng.random() < 0.3))
    assert hazard(models[0], row, 7) == pytest.approx(0.3, abs=0.08)


@given(st.floats(1e-9, 1e6), st.floats(0, 10), st.floats(0, 1e6))
@few
def test_a_hint_gives_an_index_or_gives_up(eta, sigma, age):
    value = hinted_index(eta, sigma, age)
    assert value == -1.0 or 0.0 < value <= MOST_INDEX


def test_hints_prefer_the_sooner_and_the_surer():
    assert hinted_index(5.0, 0.5, 0.0) > hinted_index(50.0, 0.5, 0.0) > 0
    assert hinted_index(50.0, 0.5, 40.0) > hinted_index(50.0, 0.5, 0.0)
    assert hinted_index(5.0, 0.5, 5000.0) == -1.0


@given(st.floats(0, 1e12), st.floats(0, 1e12))
@few
def test_keys_keep_the_order_of_indices(a, b):
    assert (1 << 61) <= key_of(a) < 1 << 62
    if a < b:
        assert key_of(a) <= key_of(b)
    if 1e-12 < a < 1e12:
        assert value_of(key_of(a)) == pytest.approx(a, rel=1e-12)


# ---- what it keeps


def turn(policy, now, chain, request, stop=TOOL_USE, output=50):
    policy.access(now, ids(*chain), Visit(request, blocks=len(chain)))
    new = [s for s in chain if policy.priority(s) == -math.inf]
    parents = {s: p for s, p in zip(chain[1:], chain, strict=False)}
    policy.insert(now, ids(*new), ids(*[parents.get(s, -1) for s in new]))
    policy.complete(now, request, stop=stop, output_tokens=output)


def teach_policy(policy, rounds=150):
    """Tool calls return after 3 s, ended turns never do."""
    now = 0
    for i in range(rounds):
        chain = [8 * i + k for k in range(3)]
        turn(policy, now, chain, 2 * i, TOOL_USE if i % 2 else TURN_END)
        if i % 2:
            turn(policy, now + 3 * S, [*chain, 8 * i + 3], 2 * i + 1, TURN_END)
        policy.remove(ids(*chain, 8 * i + 3))
        now += 400 * S
    return now


def test_it_learns_which_answers_are_followed_by_another_turn():
    policy = HazardIndex()
    now = teach_policy(policy)
    turn(policy, now, [5000, 5001, 5002], 10_000, TURN_END)
    turn(policy, now, [6000, 6001, 6002], 10_001, TOOL_USE)
    assert policy.priority(6002) > 3 * policy.priority(5002)
    assert policy.evict(now, 3).tolist() == [5002, 5001, 5000]


def test_hints_never_ranks_and_queue():
    policy = HazardIndex()
    for k in range(5):
        turn(policy, 0, [10 * k, 10 * k + 1], k)
    policy.hint(S, ids(0, 1), 2 * S)
    policy.hint(S, ids(10, 11), 900 * S)
    policy.hint(S, ids(20, 21), NEVER_NS)
    policy.enqueue(S, 77, ids(30, 31))
    policy.insert(S, ids(40, 41), ids(-1, 40), lease=Lease(rank=10))  # a lower rank changes nothing
    order = policy.evict(S, 10).tolist()
    assert order[:2] == [21, 20]
    assert order[-2:] == [31, 30]
    assert order.index(11) < order.index(1)


def test_a_hint_ends_with_the_next_use_and_a_later_one_replaces_it():
    policy, plain = HazardIndex(), HazardIndex()
    for p in (policy, plain):
        turn(p, 0, [1, 2], 0)
    policy.hint(0, ids(1, 2), NEVER_NS)
    policy.hint(0, ids(1, 2), 60 * S)
    assert policy.priority(2) == pytest.approx(hinted_index(60.0, 0.5, 0.0))
    for p in (policy, plain):
        turn(p, S, [1, 2], 1)
    assert policy.priority(2) == plain.priority(2)


def test_blocks_of_many_chains_outlive_their_tips():
    policy = HazardIndex()
    for k in range(12):
        turn(policy, k * S, [0, 1, 100 + k], k)
    victims = policy.evict(12 * S, 12).tolist()
    assert set(victims) == {100 + k for k in range(12)}


def test_memory_is_bounded():
    policy = HazardIndex()
    for k in range(30_000):
        turn(policy, k * S, [k % 64], k)
        policy.remove(ids(k % 64))
        policy.forget(ids(k % 64))
    assert len(policy._learner[1]) <= 4 * (4096 + 5 * 64)
    assert int(policy._learner[-1][TIPS]) <= len(policy._learner[1])
    assert len(policy._open) <= 1


def test_strange_slots_and_requests_are_ignored():
    policy = HazardIndex()
    policy.access(0, ids(-5, 1 << 40, 3), Visit(1))
    policy.complete(0, 99, stop=1)
    policy.hint(0, ids(7), S)
    policy.hint(0, ids(), S)
    policy.forget(ids(3, -1, 1 << 40))
    assert policy.evict(0, 1) is None


def test_blocks_that_arrive_by_themselves_are_none_of_the_latest_requests():
    """Also where blocks of that request were forgotten: none of them is still to come."""
    policy = HazardIndex()
    turn(policy, 0, [0, 1, 2], 0)
    policy.remove(ids(2))
    policy.forget(ids(2))
    policy.insert(0, ids(5, 6), ids(-1, -1))
    before = policy.priority(1)
    policy.hint(0, ids(5, 6), 2 * S)
    assert policy.priority(1) == before != policy.priority(6)


def test_a_chain_closes_up_over_a_block_that_is_forgotten():
    """Those above age as those below do, and do not keep the worth that they had."""
    policy = HazardIndex()
    policy.insert(0, ids(0, 1, 2, 3), ids(-1, -1, -1, -1))
    fresh = policy.priority(0)
    policy.remove(ids(1))
    policy.forget(ids(1))
    policy.expired(7 * S)
    assert policy.priority(0) == policy.priority(2) < fresh


@pytest.mark.parametrize("how", ["under another", "as a root", "a hole is filled"])
def test_a_leaf_ages_beside_a_block_of_its_chain_that_is_not_below_it(how):
    policy = HazardIndex()
    policy.insert(0, ids(0, 1, 2, 3), ids(-1, -1, 1, 2))
    if how == "a hole is filled":
        policy.insert(0, ids(4), ids(3))
        policy.remove(ids(2))
        policy.insert(0, ids(2), ids(1))
    else:
        policy.remove(ids(3))
        policy.insert(0, ids(3, 4), ids(0 if how == "under another" else -1, 3))
    fresh = policy.priority(2)
    policy.expired(7 * S)
    assert policy.priority(2) < fresh


# ---- carrying it over


def test_a_model_warms_another_policy():
    teacher = HazardIndex()
    teach_policy(teacher)
    saved = teacher.save_model()
    assert len(saved) < 200_000
    ratios = []
    for brought in (True, False):
        policy = HazardIndex()
        if brought:
            policy.load_model(saved)
            assert policy.save_model() == saved  # nothing has spoken against it
        now = teach_policy(policy, 3)  # proves it
        turn(policy, now, [6000, 6001, 6002], 10_000, TURN_END)
        turn(policy, now, [7000, 7001, 7002], 10_001, TOOL_USE)
        ratios.append(policy.priority(7002) / policy.priority(6002))
    assert ratios[0] > 20
    assert ratios[1] < 3


def test_a_model_is_not_heard_before_it_has_proved_itself():
    teacher = HazardIndex()
    teach_policy(teacher)
    warm, cold = HazardIndex(), HazardIndex()
    warm.load_model(teacher.save_model())
    for policy in (warm, cold):
        turn(policy, 0, [0, 1, 2], 0, TURN_END)
        turn(policy, 0, [10, 11, 12], 1, TOOL_USE)
    assert warm.priority(12) == cold.priority(12)


def test_a_wrong_model_is_found_out():
    teacher, warm, cold = HazardIndex(), HazardIndex(), HazardIndex()
    now = 0
    for i in range(400):  # nothing ever returns, whatever the reason to stop
        now += 3 * S
        turn(teacher, now, [i], i)
        teacher.remove(ids(i))
    warm.load_model(teacher.save_model())
    teach_policy(warm, 60)
    now = teach_policy(cold, 60)
    for policy in (warm, cold):
        turn(policy, now, [6000, 6001, 6002], 10_001, TOOL_USE)
    assert warm.priority(6002) == cold.priority(6002)


@pytest.mark.parametrize("spoil", ["version", "short", "nan", "bytes"])
def test_damaged_models_are_refused(spoil):
    saved = HazardIndex().save_model()
    at = len(saved) // 2
    damaged = {
        "version": saved[:1] + b"\x07" + saved[2:],
        "short": saved[:-9],
        "nan": saved[:at] + b"\xff" * 8 + saved[at + 8 :],
        "bytes": b"no model",
    }[spoil]
    with pytest.raises(ConfigError, match=r"start without it|hazard model"):
        HazardIndex().load_model(damaged)


# ---- copies


def serve(policy: Policy, first: int, last: int) -> list[list[int]]:
    """Requests that need ever higher slot numbers, with room for 300 blocks."""
    gone = []
    for r in range(first, last):
        slots = np.arange(16 * r, 16 * r + 16)
        policy.access(r * 10**9, slots)
        policy.insert(r * 10**9, slots, slots - 1)
        victims = policy.evict(r * 10**9, max(len(policy.resident()) - 300, 0))
        assert victims is not None
        gone.append(victims.tolist())
    return gone


def arrays(policy: Policy) -> list[bytes]:
    """Everything the order and its model remember."""
    return [array.tobytes() for array in (*policy._order, *policy._learner)]


@pytest.mark.parametrize("name", ["hazard", "auto"])
def test_a_copy_goes_on_by_itself(name: str) -> None:
    policy = make_policy(name)
    serve(policy, 0, 40)
    twin = copy.deepcopy(policy)
    before, image = policy.digest(), arrays(policy)
    theirs = serve(twin, 40, 80)
    assert policy.digest() == before
    assert arrays(policy) == image
    assert serve(policy, 40, 80) == theirs
    assert policy.digest() == twin.digest() != before
